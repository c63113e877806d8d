"""The benchmarks of models larger than their budget: tiny ones run, and numbers are compared."""

import os
import sys
import time
from types import SimpleNamespace

import pytest

import managedmem
from benchmarks import models
from benchmarks.measure import Result
from benchmarks.models import process
from benchmarks.report import section
from managedmem import Device

pytest.importorskip("torch")

import torch

from benchmarks.models import by_hand, common, ranks

GENERATION = ("the prompt", "a token", "caller's processor, a token")
LAUNCHES = ("launches over 20 us, a token", "time of these launches, a token")
FIGURES = {
    "language": [
        *(*GENERATION, "offload() itself", "loaded, a call", "taken"),
        *(*GENERATION, *LAUNCHES, "offload() itself", "loaded, a call", "taken"),
        *("a token", "taken"),
    ],
    "captured": ["a token", "taken"],
    "suspending": [
        *("the first suspension", "a suspension", "resuming"),
        *("free before", "free meanwhile", "free afterwards", "taken"),
    ],
    "mixture": [*GENERATION, "offload() itself", "loaded, a call", "taken"],
    "training": ["a step", "taken"],
    "diffusion": ["four steps", "offload() itself", "loaded, a call", "taken"],
    "loading": ["reading", "host memory, most", "offload() afterwards", "taken"],
    "sets": ["a round", "taken"] * 2,
}
GIB = 1 << 30


TITLES = [
    *["two ranks"] * 2,
    *["weights, 0.0 GB, two ranks"] * 9,
    *["fully_shard, tiny"] * 3,
    *["DistributedDataParallel, tiny, an eighth"] * 3,
    *("a rank of two killed at 2 random points", "end of the other rank after a kill"),
]


@pytest.mark.emulator_only
@pytest.mark.timeout(300)
def test_two_ranks_have_the_same_numbers_and_outlive_kills():
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("needs a torch with gloo")
    rows = list(models.measure("distributed"))
    assert [row.operation.partition(": ")[0] for row in rows] == TITLES
    assert [(row.operation, row.failed) for row in rows if row.broken] == []
    numbers = [row.note for row in rows if row.note.startswith("numbers beside ")]
    assert [note.partition(": ")[2].partition(";")[0] for note in numbers] == [
        "ours equal",
        "ours, an eighth equal",
        "ours, two ranks equal",
    ]
    killed, ends = rows[-2:]
    counts = {name: result.median for name, result in killed.results.items()}
    assert counts == {"killed": 2, "hangs": 0, "lost": 0, "resumed": 2}
    assert killed.note.endswith("losses equal to those without a kill")
    assert ends.note.startswith("2 with an error of torch.distributed")
    assert "| GB/s |" in section(models.GROUPS["distributed"], rows)


@pytest.mark.emulator_only  # a GPU runs them at their full size, in minutes
@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:.*were used without a call:UserWarning"
)
@pytest.mark.parametrize("group", FIGURES)
def test_every_contender_has_the_same_numbers(group):
    rows = list(models.measure(group))
    if not rows:
        pytest.skip("needs transformers or diffusers")
    assert [row.operation.partition(": ")[2] for row in rows] == FIGURES[group]
    assert [row.failed for row in rows if row.failed] == []
    for row in rows:
        assert any(name.startswith("ours") for name in row.results)
        assert "by hand" not in row.results or row.unit != "ms" or "by hand 1.00" in row.note
        if row.note.startswith("numbers beside "):
            assert {each.split()[-1] for each in row.note.split("; ")} == {"equal"}
    assert section(models.GROUPS[group], rows).count("| ms |") >= 1


def test_a_job_compares_with_its_first_contender():
    def contender(value):
        return lambda meter: common.Measured({("a step", "ms"): [value]}, [torch.tensor([value])])

    def fails(meter):
        raise MemoryError("no room")

    contenders = {"resident": contender(2.0), "ours": contender(3.0), "by hand": contender(2.0)}
    job = common.Job("a job", contenders | {"page faults": fails})
    step, taken = process.rows_of_job(job, common.Place(tiny=True))
    assert step.results["ours"] == Result(3.0)
    assert step.note == "in times by hand: resident 1.00; ours 1.50; by hand 1.00"
    assert taken.note == "numbers beside resident: ours 5.0e-01; by hand equal"
    assert taken.failed == {"page faults": "MemoryError: no room"}
    assert not taken.broken


@pytest.mark.filterwarnings(  # of JAX and of Python 3.12, where other tests have left threads
    "ignore:os.fork.. was called:RuntimeWarning",
    "ignore:This process .* is multi-threaded:DeprecationWarning",
)
class TestProcesses:
    def test_what_a_process_finds_comes_back(self):
        assert process.in_fork(lambda: {"pid": os.getpid()})["pid"] != os.getpid()

    @pytest.mark.parametrize(
        ("work", "said"),
        [
            (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
            (lambda: os._exit(3), "the process died, status 768"),
            (lambda: sys.exit(0), "the process died, status 0"),
            (lambda: time.sleep(60), "TimeoutError: not done after 0 s"),
        ],
    )
    def test_a_process_that_fails_is_a_reason(self, work, said, monkeypatch):
        if "Timeout" in said:
            monkeypatch.setattr(process, "SECONDS", 0.1)
        assert process.in_fork(work) == {"failed": said}

    @pytest.mark.parametrize(
        ("work", "said"),
        [
            (lambda rank: 1 / 0, "rank 0: ZeroDivisionError: division by zero"),
            (lambda rank: os._exit(3), "rank 0 died, status 768"),
            (lambda rank: time.sleep(60), "not done after 1 s"),
        ],
    )
    def test_a_rank_that_fails_is_a_reason(self, work, said, tmp_path, capsys):
        assert ranks.measured(work, tmp_path, tiny=True, share=1.0, world=1, seconds=1) == {
            "failed": said
        }
        assert "log of rank 0:" in capsys.readouterr().err

    def test_a_server_that_fails_ends_its_group(self):
        with pytest.raises(RuntimeError, match="ended with 1"):
            list(process.from_server("no such group"))

    @pytest.mark.parametrize(
        ("device", "host", "share"), [(80, 80, 1.0), (14, 80, 0.5), (80, 13, 0.25)]
    )
    def test_models_are_smaller_where_less_is_free(self, device, host, share, monkeypatch):
        free = {"device": device * GIB, "host": host * GIB}
        monkeypatch.setattr(process, "in_fork", lambda work: free)
        assert process.share_of((9 * GIB, 16 * GIB)) == share

    def test_too_little_memory_is_refused_with_the_sum(self, monkeypatch):
        monkeypatch.setattr(process, "in_fork", lambda work: {"device": 9 * GIB, "host": 80 * GIB})
        with pytest.raises(RuntimeError, match=r"at least 11 GB must be free on the device and 13"):
            process.share_of((9 * GIB, 16 * GIB))


class TestMemory:
    def test_pages_that_come_are_taken(self):
        if managedmem.emulator.is_active():
            meter = common.Meter(common.Place(tiny=True))
        elif torch.cuda.is_available():
            meter = common.Meter(common.Place(tiny=False))
        else:
            pytest.skip("torch has no GPU")
        with managedmem.zeros(16 << 20) as buffer:
            meter.watch(lambda: (buffer.prefetch(Device(0)), Device(0).sync()))
        assert meter.taken >= 16 << 20

    def test_managed_memory_has_a_limit(self):
        place = SimpleNamespace(tiny=True)
        common.check_managed(place, 16 * GIB)
        with pytest.raises(RuntimeError, match=r"17\.2 GB of managed memory, at most 17\.2"):
            common.check_managed(place, 16 * GIB + 1)


class TestByHand:
    def test_the_budget_decides_which_modules_stay(self):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(8)))
        one = model[0].weight.nbytes
        streamed = by_hand.stream(common.Place(tiny=True), model, list(model), 5 * one)
        assert len(streamed.ring.homes) == 5  # of 8, beside two buffers
        assert by_hand.spread_out(8, 3) == {1, 4, 6}

    def test_a_module_out_of_its_turn_is_an_error(self):
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
        by_hand.stream(common.Place(tiny=True), model, list(model), 0)
        with pytest.raises(RuntimeError, match="module 1 was called out of its turn"):
            model[1](torch.ones(8))
