"""offload_optimizer() under fully_shard() and DistributedDataParallel, and its checkpoints."""

import importlib
import subprocess
import sys

import pytest

from constants import EMULATED
from tensors import mt, torch

dist = pytest.importorskip("torch.distributed")
fsdp = pytest.importorskip("torch.distributed.fsdp")
if not (dist.is_available() and dist.is_gloo_available() and hasattr(fsdp, "fully_shard")):
    pytest.skip("needs a torch with gloo and fully_shard", allow_module_level=True)
if not EMULATED:
    pytest.skip("gloo has the CPU: examples/distributed.py is for GPUs", allow_module_level=True)

shards = importlib.import_module("sharded")
sharded, train = shards.sharded, shards.train
nn = torch.nn
optimizer_state = importlib.import_module("managedmem.torch._optimizer_state")
Visits = importlib.import_module("managedmem.torch._offload_visits").Visits
BUDGET = 8 << 20


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A group of this process, where a part is a layer."""
    monkeypatch.setattr(optimizer_state, "_PART", 1 << 20)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def local(value):
    return value.to_local() if hasattr(value, "to_local") else value


def assert_same(one, optimizer, other, reference):
    for mine, expected in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(local(mine), local(expected))
    states = zip(optimizer.state.values(), reference.state.values(), strict=True)
    for state, plain in states:
        assert {key: type(value) for key, value in state.items()} == {
            key: type(value) for key, value in plain.items()
        }
        for key, value in state.items():
            assert torch.equal(local(value), local(plain[key])), key


@pytest.mark.parametrize("budget", [1, 4 << 20, BUDGET, 1 << 30])
@pytest.mark.parametrize("before", [0, 1], ids=["from the first step", "with state"])
def test_shards_have_the_numbers_of_plain_steps(budget, before):
    one, optimizer = sharded()
    other, reference = sharded()
    train(one, optimizer, before)
    train(other, reference, before)
    with mt.offload_optimizer(optimizer, budget=budget) as handle:
        train(one, optimizer)
        train(other, reference)
        assert_same(one, optimizer, other, reference)
        assert (handle.stats()["state_on_host"] > 0) == (budget < 1 << 30)
        filled = sum(ring.filled for ring in handle._step.rings.values())
        assert (filled > 0) == (budget in (4 << 20, BUDGET))
    train(one, optimizer)
    train(other, reference)
    assert_same(one, optimizer, other, reference)


def test_shards_that_stay_step_with_shards_that_visit(monkeypatch):
    monkeypatch.setattr("managedmem.torch._offload_optimizer.MOST_RING", 10 << 20)
    one, optimizer = sharded(8)
    other, reference = sharded(8)
    with mt.offload_optimizer(optimizer, budget=16 << 20) as handle:
        for module, each in ((one, optimizer), (other, reference)):
            train(module, each)
        split = handle._step
        assert 0 < sum(part.home is None for part in split.parts) < len(split.parts)
        visits = Visits(optimizer, split.parts, split.rings, split.gradients, lambda: True)
        assert any(len({part.home is None for part in turn.parts}) == 2 for turn in visits.turns)
        assert_same(one, optimizer, other, reference)


def test_large_shards_come_in_slices():
    one, optimizer = sharded(1, 2048)
    other, reference = sharded(1, 2048)
    with mt.offload_optimizer(optimizer, budget=12 << 20) as handle:
        for module, each in ((one, optimizer), (other, reference)):
            train(module, each, width=2048)
        (ring,) = handle._step.rings.values()
        assert ring.filled > 6
        assert_same(one, optimizer, other, reference)


def test_under_distributed_data_parallel():
    torch.manual_seed(0)
    one = nn.Linear(512, 512)
    other = nn.Linear(512, 512)
    other.load_state_dict(one.state_dict())
    optimizer, reference = (torch.optim.AdamW(m.parameters()) for m in (one, other))
    with mt.offload_optimizer(optimizer, budget="1 MiB") as handle:
        train(nn.parallel.DistributedDataParallel(one), optimizer)
        train(other, reference)
        assert handle.stats()["state_on_host"] == 2 * sum(p.nbytes for p in one.parameters())
        assert_same(one, optimizer, other, reference)


@pytest.mark.timeout(300)
def test_a_checkpoint_of_two_processes_is_resumed_by_one(tmp_path):
    command = [sys.executable, "-X", "faulthandler", shards.__file__, tmp_path / "saved"]
    ranks = [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    one, optimizer = sharded()
    other, reference = sharded()
    train(other, reference)
    with mt.offload_optimizer(optimizer, budget="1 MiB"):
        shards.resume(one, optimizer, tmp_path / "saved")
        train(one, optimizer)
        train(other, reference)
        for mine, expected in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.allclose(local(mine), local(expected), rtol=0, atol=1e-5)
