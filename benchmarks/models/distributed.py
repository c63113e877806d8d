"""Two ranks of torch.distributed: one copy of the weights, shards, and data-parallel training.

Each contender has ranks of its own (`ranks.py`). A row comes as soon as it is measured. If a
contender fails or hangs, the row has the reason.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import managedmem
import managedmem.torch as ours

from ..measure import UNFINISHED, Result, Row, reason
from ..report import cell
from . import killed, ranks
from .common import GIB, Meter, Place, nbytes_of
from .decoder import made
from .loading import Files
from .process import Found, in_fork, rows_of, share_of
from .ranks import WORLD, Process, Rank, Work

NEED = (52 * GIB, 24 * GIB)  # of each device and of the host, at full size
SECONDS = 215.0  # of all
LEAST = 5.0  # seconds; with less time left, no contender begins
SPARE = 20.0  # seconds; with less time left, one contender is left out
ROUNDS = 5
STEPS = 4
PARTS = {  # of the state, as budgets
    "ours, an eighth": 1 / 8,
    "ours, a quarter": 1 / 4,
    "ours, a half": 1 / 2,
    "ours, three quarters": 3 / 4,
}


@dataclass(frozen=True)
class Contender:
    """What ranks do, how many, and within how many seconds."""

    work: Work
    seconds: float = 40.0
    world: int = WORLD


@dataclass(frozen=True)
class Contest:
    """Contenders that do the same work; all should have the numbers of the first one."""

    title: str
    contenders: dict[str, Contender]
    by_hand: tuple[str, ...]
    look: Callable[[Sequence[Process]], object] = field(default=lambda processes: None)


class Course:
    """The time that is left, the folder for logs, and the size of the models."""

    def __init__(self, tiny: bool, share: float, folder: Path) -> None:
        self.tiny, self.share, self.folder = tiny, share, folder
        self.limit = time.monotonic() + SECONDS

    @property
    def left(self) -> float:
        return self.limit - time.monotonic()

    def run(self, contest: Contest) -> dict[str, Found]:
        """What each contender has found, with the differences of numbers from the first one's."""
        found: dict[str, Found] = {}
        for name, each in contest.contenders.items():
            begin, seconds = time.monotonic(), min(each.seconds, self.left)
            found[name] = {"failed": "no time is left"}
            if seconds > LEAST:
                found[name] = ranks.measured(
                    each.work,
                    self.folder,
                    tiny=self.tiny,
                    share=self.share,
                    world=each.world,
                    seconds=seconds,
                    look=contest.look,
                )
            first = next(iter(found.values()))
            numbers, expected = (one.get("numbers", []) for one in (found[name], first))
            compared = bool(numbers and expected) and found[name] is not first
            found[name]["difference"] = difference(numbers, expected) if compared else None
            said = found[name].get("failed", f"{time.monotonic() - begin:.1f} s")
            print(f"  {contest.title}: {name}: {said}", file=sys.stderr, flush=True)
        return found


def difference(mine: list[float], theirs: list[float]) -> float:
    """The largest difference, as a part of the largest of their numbers."""
    most = max(map(abs, theirs)) or 1.0
    return max(abs(a - b) for a, b in zip(mine, theirs, strict=False)) / most


def managed_device(rank: Rank) -> managedmem.Device | None:
    """The device that stands for the GPU where torch has none."""
    return managedmem.Device(rank.number) if rank.place.tiny else None


# --- one copy of the weights ---------------------------------------------------------------


def pss(pid: int | str = "self") -> int:
    """The bytes of a process in memory, those that it shares with others divided among them."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def available() -> int:
    """The bytes of the host that can be had: what page-locked memory takes is missing here."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


class Height:
    """The most memory of all ranks together, from their word "loading" to their word "loaded"."""

    def __init__(self) -> None:
        self.most = 0
        self.least_available = 1 << 62

    def look(self, processes: Sequence[Process]) -> None:
        if any("loading" not in each.said or "loaded" in each.said for each in processes):
            return
        self.least_available = min(self.least_available, available())
        try:
            self.most = max(self.most, sum(pss(each.pid) for each in processes))
        except (OSError, ValueError):  # one has ended
            return


class Weights:
    """Ranks that read a file: into one memory for all, or each into its own."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.heights: dict[int, Height] = {}  # of each contender, by its first rank's process

    def look(self, processes: Sequence[Process]) -> None:
        self.heights.setdefault(processes[0].pid, Height()).look(processes)

    def work(self, rank: Rank, one_copy: bool) -> Found:
        files, place = self.files, rank.place
        model = files.model()
        inputs = torch.ones(8, files.width, dtype=torch.bfloat16, device=place.device)
        square = torch.ones(files.width, files.width, dtype=torch.bfloat16, device=place.device)
        (inputs @ square.T).sum(dtype=torch.float32).item()  # what libraries take is not ours
        rank.together()
        before, free = pss(), available()
        rank.together()
        rank.say("loading")
        begin = time.perf_counter_ns()
        options: dict[str, Any] = {"group": dist.group.WORLD} if one_copy else {}
        ours.load_model(model, files.path, device=rank.device, **options)
        reading = float(time.perf_counter_ns() - begin)
        rates = self.copies(rank, model)
        begin = time.perf_counter_ns()
        budget = max(files.nbytes // 8, 2 * square.nbytes)
        handle = ours.offload(model, rank.device, budget=budget, read_only=True)
        offloading = float(time.perf_counter_ns() - begin)
        with torch.inference_mode():
            outputs = [layer(inputs).sum(dtype=torch.float32) for layer in model]
        rank.together()
        rank.say("loaded")
        more, base = rank.sums([pss() - before, before])
        taken = free - available()
        rates |= self.streaming(rank, model, handle, inputs)
        reading, offloading = rank.most([reading, offloading])
        values = [
            ["reading", "ms", [reading]],
            ["offload() afterwards", "ms", [offloading]],
            ["host memory, PSS of both", "MB", [more]],
            ["host memory, less available", "MB", [float(taken)]],
        ]
        numbers = [float(each) for each in outputs]
        return {"values": values, "numbers": numbers, "base": base, "free": free, "rates": rates}

    def streaming(self, rank: Rank, model: Any, handle: Any, inputs: Any) -> dict[str, Any]:
        """The rate of what offload() loads for calls of the model."""

        def stream() -> int:
            before = handle.stats()["bytes_loaded"]
            with torch.inference_mode():
                model(inputs)
            rank.place.wait()
            return int(handle.stats()["bytes_loaded"] - before)

        return rates(rank, "offload()", stream)

    def copies(self, rank: Rank, model: Any) -> dict[str, Any]:
        """The rate of plain copies of all weights."""
        weights = [each.detach().view(torch.uint8).view(-1) for each in model.parameters()]
        buffers = [torch.empty_like(weights[0], device=rank.place.device) for _ in "ab"]

        def copy() -> int:
            for number, each in enumerate(weights):
                buffers[number % 2].copy_(each, non_blocking=True)
            rank.place.wait()
            return nbytes_of(weights)

        return rates(rank, "copies", copy)

    def rows(self, contest: Contest, found: dict[str, Found]) -> Iterator[Row]:
        """Time and memory beside one copy, then the rates."""
        heights = dict(zip(found, self.heights.values(), strict=False))
        for name, each in found.items():
            if "values" not in each:
                continue
            height, one = heights.get(name), float(self.files.nbytes)
            if height is not None and height.most:
                each["values"] += [
                    ["host memory, PSS of both, most", "MB", [height.most - each["base"]]],
                    [
                        "host memory, less available, most",
                        "MB",
                        [float(each["free"] - height.least_available)],
                    ],
                ]
            each["values"] += [
                [f"{figure}@one copy", unit, [one]]
                for figure, unit, _ in list(each["values"])
                if figure.startswith("host memory")
            ]
            each["taken"] = 0.0
        for row in rows_of(contest, found):
            if row.unit == "MB" and not row.operation.endswith(": taken"):
                one = row.results["one copy"].median
                parts = [f"{name} {each.median / one:.2f}" for name, each in row.results.items()]
                yield Row(row.operation, row.results, row.unit, "in copies: " + "; ".join(parts))
            elif row.operation.endswith(": taken"):
                yield Row(f"{contest.title}: numbers", {}, "x", row.note or "none", row.failed)
            else:
                yield row
        yield from rows_of_rates(contest.title, found["ours"])


def rates(rank: Rank, name: str, move: Callable[[], int]) -> dict[str, list[float]]:
    """Bytes in a second: of one rank while the other waits, and of all at once."""
    found: dict[str, list[float]] = {}
    for turn in range(2 if rank.place.tiny else ROUNDS):
        for who in (*range(rank.world), "both"):
            rank.together()
            begin, moved = time.perf_counter(), 0
            if who in (rank.number, "both"):
                moved = move()
            seconds = time.perf_counter() - begin if moved else 0.0
            (total,), (longest,) = rank.sums([float(moved)]), rank.most([seconds])
            if turn:  # the first turn warms up
                key = f"{name}@{who if who == 'both' else f'rank {who} alone'}"
                found.setdefault(key, []).append(total / max(longest, 1e-9))
    return found


def rows_of_rates(title: str, found: Found) -> Iterator[Row]:
    """A row for each operation whose rates were measured."""
    figures: dict[str, dict[str, Result]] = {}
    for key, each in found.get("rates", {}).items():
        name, _, who = key.partition("@")
        figures.setdefault(name, {})[who] = Result.of(each)
    for name, results in figures.items():
        alone = [each.median for who, each in results.items() if who != "both"]
        times = results["both"].median * len(alone) / (sum(alone) or 1.0)
        yield Row(f"{title}: rate, {name}", results, "GB/s", f"both in times one: {times:.2f}")


def weights(course: Course) -> Iterator[Row]:
    """Rows about 4 GiB of weights, in the page cache."""
    files = Files(Place(course.tiny, course.share), str(course.folder))
    work = Weights(files)
    contenders = {
        "private copies": Contender(partial(work.work, one_copy=False)),
        "ours": Contender(partial(work.work, one_copy=True)),
    }
    title = f"weights, {files.nbytes / 1e9:.1f} GB, two ranks"
    contest = Contest(title, contenders, ("private copies",), work.look)
    yield from work.rows(contest, course.run(contest))
    files.path.unlink(missing_ok=True)


# --- what the machine and managed memory cost ----------------------------------------------


def moved(rank: Rank) -> Found:
    """An all_reduce over memory of each kind, and copies in both directions at once."""
    nbytes = 1 << 16 if rank.place.tiny else 256 << 20
    buffer = managedmem.empty(nbytes)
    own = torch.empty(nbytes, dtype=torch.uint8, device=rank.place.device)
    managed = torch.frombuffer(memoryview(buffer), dtype=torch.uint8)
    if not rank.place.tiny:
        managed = torch.as_tensor(buffer, device=rank.place.device)
    kinds = {
        "device memory": (own, None),
        "managed, on the device": (managed, managedmem.Device(rank.number)),
        "managed, on the host": (managed, managedmem.Host()),
    }
    values = []
    for name, (tensor, target) in kinds.items():
        times = []
        for _ in range(ROUNDS):
            tensor.fill_(1)
            if target is not None:
                managedmem.prefetch(buffer, target)
            rank.together()
            begin = time.perf_counter_ns()
            dist.all_reduce(tensor)
            rank.place.wait()
            times.append(float(time.perf_counter_ns() - begin))
            if int(tensor[-1]) != rank.world:
                raise RuntimeError(f"{name}: the sum is {int(tensor[-1])}, not {rank.world}")
        values.append([f"all_reduce, {nbytes / 2**20:g} MiB@{name}", "ms", rank.most(times)])
    found = rates(rank, "copies both ways", both_ways(rank.place, nbytes))
    return {"values": values, "taken": 0.0, "rates": found}


def both_ways(place: Place, nbytes: int) -> Callable[[], int]:
    """A function that copies to the device and from it at once, and returns the bytes."""
    pinned = [place.pinned(nbytes) for _ in "ab"]
    there = [torch.empty(nbytes, dtype=torch.uint8, device=place.device) for _ in "ab"]
    streams = [place.stream() for _ in "ab"]

    def copy() -> int:
        with place.on(streams[0]):
            there[0].copy_(pinned[0], non_blocking=True)
        with place.on(streams[1]):
            pinned[1].copy_(there[1], non_blocking=True)
        place.wait()
        return 2 * nbytes

    return copy


def moves(course: Course) -> Iterator[Row]:
    """Sums and copies without a model, to compare the other rows with."""
    contest = Contest("two ranks", {"ours": Contender(moved)}, ("device memory",))
    found = course.run(contest)
    for row in rows_of(contest, found):
        if not row.operation.endswith(": taken") or row.failed:
            yield row
    yield from rows_of_rates(contest.title, found["ours"])


# --- training ------------------------------------------------------------------------------


def repeatable() -> None:
    """Let the backward pass of attention give the same numbers each time."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def words(rank: Rank, batch: int, length: int) -> Any:
    """Words that differ between ranks."""
    if rank.place.tiny:
        batch, length = 2, 16
    ids = torch.arange(batch * length, device=rank.place.device) * 31 + 7 * rank.number
    return (ids % 250).view(batch, length)


def stepped(
    rank: Rank, meter: Meter, model: Any, optimizer: Any, ids: Any, steps: int, before: int
) -> Found:
    """The times of steps, after some that are not timed; the losses are summed over all ranks."""
    losses, whole, alone = [], [], []
    wait = rank.place.wait

    def step() -> None:
        wait()
        begin = time.perf_counter_ns()
        optimizer.zero_grad()
        loss = model(ids)
        loss.backward()
        wait()
        middle = time.perf_counter_ns()
        optimizer.step()
        wait()
        end = time.perf_counter_ns()
        whole.append(float(end - begin))
        alone.append(float(end - middle))
        losses.append(float(loss.detach()))

    for _ in range(before - 1):
        step()
    meter.watch(step)
    del whole[:], alone[:]
    for _ in range(2 if rank.place.tiny else steps):
        step()
    times = rank.most(whole), rank.most(alone)
    figures = ("a step", "optimizer.step()")
    values = [[name, "ms", each] for name, each in zip(figures, times, strict=True)]
    return {"values": values, "taken": meter.taken, "numbers": rank.sums(losses)}


def sharded(rank: Rank, kind: str) -> Found:
    """fully_shard(): resident, with our optimizer, or with torch's own offloading."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    repeatable()
    place, meter = rank.place, Meter(rank.place)
    if kind == "one thread":  # as torchrun has it
        torch.set_num_threads(1)
    options: dict[str, Any] = {"mesh": init_device_mesh(place.device.type, (rank.world,))}
    if kind in ("fused", "one thread"):
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=not place.tiny)
    model = made(place)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    place.give_back()
    fused = True if kind == "fused" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    handle = None
    if kind.startswith("ours"):
        state = 2 * sum(each.to_local().nbytes for each in model.parameters())
        budget = max(int(state * PARTS[kind]), 1)
        handle = ours.offload_optimizer(optimizer, budget=budget, device=managed_device(rank))
    ids = words(rank, max(int(8 * place.share), 1), 2048)
    steps, before = {"fused": (2, 1), "one thread": (1, 1)}.get(kind, (STEPS, 2))
    found = stepped(rank, meter, model, optimizer, ids, steps, before)
    if handle is not None:
        numbers = handle.stats()
        if numbers["failures"] or not numbers["state_on_host"]:
            raise RuntimeError(f"state did not go home: {numbers}")
    return found


def shards(course: Course) -> Iterator[Row]:
    """1.1 billion parameters; the budget is a part of the state of AdamW."""
    kinds = {kind: kind for kind in ("resident", *PARTS)}
    kinds["CPUOffloadPolicy"] = "fused"
    works = {name: Contender(partial(sharded, kind=kind)) for name, kind in kinds.items()}
    contest = Contest(f"fully_shard, {size_of(course)}", works, ("resident",))
    yield from rows_of(contest, course.run(contest))


def by_one_thread(course: Course) -> Iterator[Row]:
    """CPUOffloadPolicy as torchrun sets it, if there is time for it."""
    if course.left > SPARE and not course.tiny:
        work = Contender(partial(sharded, kind="one thread"))
        title = f"fully_shard, {size_of(course)}, as torchrun sets threads"
        contest = Contest(title, {"CPUOffloadPolicy": work}, ())
        yield from rows_of(contest, course.run(contest))


def parallel(rank: Rank, kind: str) -> Found:
    """DistributedDataParallel: resident, or over offload() with an eighth of the total."""
    repeatable()
    meter = Meter(rank.place)
    model = made(rank.place)
    handle = None
    if kind == "resident":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    else:
        model = rank.place.to_cpu(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        budget = 4 * nbytes_of(model.parameters()) // 8
        handle = ours.offload(model, rank.device, budget=budget, optimizer=optimizer)
    wrapped = model
    if rank.world > 1:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=kind == "ours")
    found = stepped(rank, meter, wrapped, optimizer, words(rank, 2, 512), STEPS, 3)
    if handle is not None and handle.last_error:
        raise RuntimeError(handle.last_error)
    if rank.world == 1:
        found["numbers"] = []  # two ranks have other words
    return found


def replicas(course: Course) -> Iterator[Row]:
    """1.1 billion parameters in each rank."""
    offloaded = partial(parallel, kind="ours")
    contenders = {
        "resident, two ranks": Contender(partial(parallel, kind="resident")),
        "ours, one rank": Contender(offloaded, world=1),
        "ours, two ranks": Contender(offloaded),
        "ours, no bucket views": Contender(partial(parallel, kind="no views")),
    }
    contest = Contest(
        f"DistributedDataParallel, {size_of(course)}, an eighth", contenders, ("ours, one rank",)
    )
    yield from rows_of(contest, course.run(contest))


def size_of(course: Course) -> str:
    return "tiny" if course.tiny else f"{1.1 * course.share:.1f} billion parameters"


# --- all -----------------------------------------------------------------------------------


def devices() -> Found:
    return {"count": torch.cuda.device_count()}


def rows() -> Iterator[Row]:
    """All rows of the group, in a server; a note alone where the machine has one GPU."""
    tiny = os.environ.get("MANAGEDMEM_DRIVER") == "emulator"
    ranks.end_with_parent()
    os.environ.update(ranks.FACTS)
    share = 1.0
    if not tiny:
        count = in_fork(devices).get("count", 0)
        if count < WORLD:
            yield Row("two ranks", {}, note=f"needs two GPUs, this machine has {count}")
            return
        share = share_of(NEED, WORLD)
    with tempfile.TemporaryDirectory(prefix="managedmem-") as folder:
        course = Course(tiny, share, Path(folder))
        for part in (moves, weights, shards, replicas, lost, by_one_thread):
            try:
                for row in part(course):
                    tell(row)
                    yield row
            except Exception as error:
                yield failed_row(part.__name__, error)


def lost(course: Course) -> Iterator[Row]:
    """Ranks that are killed at random points."""
    yield from killed.rows(course.folder, tiny=course.tiny, seconds=course.left)


def tell(row: Row) -> None:
    """A row on stderr at once: the table comes when the whole group is done."""
    cells = (f"{name} {cell(result, row.unit)}" for name, result in row.results.items())
    text = f"    {row.operation}: {'; '.join(cells)} {row.unit}; {row.note} {row.failed or ''}"
    print(text, file=sys.stderr, flush=True)


def failed_row(part: str, error: Exception) -> Row:
    traceback.print_exc()
    return Row(UNFINISHED, {}, note=f"{part}: {reason(error)}")
