"""Jobs of two ranks, of which one is killed at a random point, again and again.

The other rank must end by itself, with the error of torch.distributed within its timeout. The next
start resumes from the last whole checkpoint, and its losses are those of ranks that nobody killed.
Several jobs run at once, because they wait most of the time.
"""

from __future__ import annotations

import importlib
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import managedmem
import managedmem.torch as ours

from ..measure import Result, Row
from . import ranks
from .common import Place, nbytes_of
from .decoder import Decoder, Shape
from .loading import Files
from .process import Found
from .ranks import WORLD, Process, Rank

dcp: Any = importlib.import_module("torch.distributed.checkpoint")
SHAPE = Shape(64, 128, 4, 256, 2)
SAVED = 8  # steps between two checkpoints
TIMEOUT = 5.0  # seconds of torch.distributed
MARGIN = 10.0  # seconds more, after which the other rank counts as hanging
WRITING = 0.3  # seconds in which a hanging rank writes its stacks
STARTING = 45.0  # seconds until a start may have failed
MOST = 75.0  # seconds of all
PHASES = ("step", "save", "load", "step")  # of the kills of a job, in turn
SHORT = 0.05  # seconds at most from the start of a load or a save to a kill
ENDLESS = 1_000_000
ERROR = re.compile(  # of torch.distributed, by NCCL or gloo
    r"watchdog|timeout|timed out|by peer|broken pipe|DistBackendError|ncclRemoteError", re.I
)


@dataclass(frozen=True)
class Plan:
    """How many jobs are killed how often, and how long after their start at most."""

    jobs: int
    kills: int
    span: float

    @classmethod
    def of(cls, tiny: bool) -> Plan:
        return cls(2, 1, 0.3) if tiny else cls(5, 4, 1.2)


# --- a rank --------------------------------------------------------------------------------


def whole(folder: Path) -> int:
    """The step of the last whole checkpoint, whose metadata is written last; or 0."""
    steps = [int(each.parent.name) for each in folder.glob("[0-9]*/.metadata")]
    return max(steps, default=0)


def trained(rank: Rank, way: str) -> tuple[Any, Any, Any]:
    """The model to call, its optimizer, and the handle that keeps parts of them on the host."""
    torch.manual_seed(7)
    with torch.device(rank.place.device):
        model = Decoder(SHAPE)
    if way == "fully_shard":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(rank.place.device.type, (rank.world,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        device = managedmem.Device(rank.number) if rank.place.tiny else None
        return model, optimizer, ours.offload_optimizer(optimizer, budget=1, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    budget = nbytes_of(model.parameters()) // 2
    handle = ours.offload(model, rank.device, budget=budget, optimizer=optimizer)
    return nn.parallel.DistributedDataParallel(model), optimizer, handle


def resumed(model: Any, optimizer: Any, folder: Path, step: int) -> None:
    loaded: dict[str, Any] = state_of(model, optimizer)
    dcp.load(loaded, checkpoint_id=folder / str(step))
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def train(rank: Rank, files: Files, folder: Path, way: str, goal: int, saves: bool) -> Found:
    """Train beside frozen weights of which the ranks have one copy, from the last checkpoint on."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    frozen = files.model()
    ours.load_model(frozen, files.path, device=rank.device, group=dist.group.WORLD)
    ours.offload(frozen, rank.device, budget=files.nbytes // 2, read_only=True)
    model, optimizer, handle = trained(rank, way)
    begin = whole(folder)
    rank.together()  # both have looked
    rank.say("load")
    if begin:
        resumed(model, optimizer, folder, begin)
    rank.say(f"from {begin}")
    log = os.open(folder / "losses", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for step in range(begin + 1, goal + 1):
        ids = torch.arange(32, device=rank.place.device) * (step + 5) + rank.number
        rows = torch.full((2, files.width), step % 8 / 8, dtype=torch.bfloat16).to(ids.device)
        with torch.no_grad():
            base = frozen(rows * 1e-3).float().mean()
        optimizer.zero_grad()
        loss = model((ids % 250).view(2, 16))
        loss.backward()
        optimizer.step()
        (total,) = rank.sums([float(loss.detach()) + float(base)])
        if rank.number == 0:
            os.write(log, f"{step} {total.hex()}\n".encode())
        if saves and step % SAVED == 0:
            rank.say("save")
            dcp.save(state_of(model, optimizer), checkpoint_id=folder / str(step))
            rank.say("step")
    numbers = handle.stats()
    return {"state_on_host": numbers["state_on_host"], "failures": numbers["failures"]}


def losses_of(folder: Path) -> list[tuple[int, str]]:
    """The steps of all starts; the last line may be torn."""
    path = folder / "losses"
    text = path.read_text() if path.exists() else ""
    found = (line.split() for line in text.splitlines(keepends=True) if line.endswith("\n"))
    return [(int(step), loss) for step, loss in found]


# --- the server ----------------------------------------------------------------------------


@dataclass
class Counts:
    """What happened to all jobs."""

    killed: int = 0
    hangs: int = 0
    resumed: int = 0
    lost: int = 0
    told: int = 0  # ends with an error of torch.distributed
    phases: Counter[str] = field(default_factory=Counter)
    ends: list[float] = field(default_factory=list)  # nanoseconds from the kill


class Job:
    """One job: its start, the next kill, and the start after it."""

    def __init__(self, number: int, way: str, files: Files, folder: Path, plan: Plan) -> None:
        self.way, self.files, self.plan = way, files, plan
        self.logs, self.folder = folder, folder / f"job-{number}"
        self.folder.mkdir()
        self.chance = random.Random(7 + number)
        self.left = plan.kills
        self.number = number
        self.victim = 0
        self.pending = 0  # kills after which no step has been made yet
        self.counts = Counts()
        self.processes: list[Process] = []
        self.done = False

    def start(self, goal: int) -> None:
        """Ranks that resume, and the time of their kill unless they may finish."""
        self.expected = whole(self.folder)
        self.victim = self.chance.randrange(WORLD)
        self.begun = time.monotonic()
        self.kill_at: float | None = None
        self.killed_at: float | None = None
        self.finishing = goal < ENDLESS
        self.processes = self.ranks(self.folder, goal, saves=True)

    def look(self) -> None:
        """Go on with this job; raises RuntimeError if a rank fails that nobody has killed."""
        if not self.processes:
            self.start(ENDLESS)
        ended = [each.look() for each in self.processes]
        self.count_resumed()
        if self.killed_at is not None:
            self.wait_for_the_other(ended)
        elif self.finishing and all(ended):
            self.check_finished()
        elif any(ended) and not self.finishing:
            self.broken("ended before it was killed")
        elif time.monotonic() > self.begun + STARTING:
            self.broken(f"not started after {STARTING:.0f} s")
        elif not self.finishing:
            self.kill_in_time()

    def count_resumed(self) -> None:
        """Once a start has loaded a checkpoint: count the kills before as resumed, or as lost if it
        is not the last whole one."""
        words = [word for word in self.processes[0].said if word.startswith("from ")]
        if self.pending and words and self.killed_at is None:
            right = words[0] == f"from {self.expected}"
            self.counts.resumed += self.pending if right else 0
            self.counts.lost += 0 if right else self.pending
            self.pending = 0

    def kill_in_time(self) -> None:
        now = time.monotonic()
        victim = self.processes[self.victim]
        if self.kill_at is None:
            wanted = PHASES[(self.number + self.plan.kills - self.left) % len(PHASES)]
            said = [word.split()[0] for word in victim.said]
            if wanted == "save":  # a load may be over before anyone looks; saves come again
                said = said[-1:]
            if ("from" if wanted == "step" else wanted) in said:
                span = self.plan.span if wanted == "step" else SHORT
                self.kill_at = now + self.chance.uniform(0, span)
        elif now >= self.kill_at:
            victim.kill()
            self.killed_at = time.monotonic()
            self.counts.killed += 1
            self.pending += 1
            phase = victim.said[-1].split()[0]
            self.counts.phases["step" if phase == "from" else phase] += 1

    def wait_for_the_other(self, ended: list[bool]) -> None:
        assert self.killed_at is not None
        took = time.monotonic() - self.killed_at
        if not all(ended):
            if took < TIMEOUT + MARGIN:
                return
            self.counts.hangs += 1
            self.tell_hang()
            ranks.end(self.processes)
        else:
            self.counts.ends.append(took * 1e9)
            other = self.processes[1 - self.victim]
            self.counts.told += bool(ERROR.search(f"{other.text()} {other.found}"))
        self.left -= 1
        last = max((step for step, _ in losses_of(self.folder)), default=0)
        self.start(ENDLESS if self.left else max(last, self.expected) + SAVED + 2)

    def tell_hang(self) -> None:
        """Print the log and the stacks of the rank that goes on."""
        other = self.processes[1 - self.victim]
        other.tell_stacks()
        time.sleep(WRITING)
        print(f"{self.way}, a hang:\n{other.text()[-6000:]}", file=sys.stderr, flush=True)

    def check_finished(self) -> None:
        for each in self.processes:
            if each.failed or not (each.found or {}).get("state_on_host"):
                self.broken("did not finish")
        self.done = True

    def beside(self, jobs: list[Job]) -> tuple[Path, list[Process]]:
        """Ranks that do all steps that jobs of this way have done, without checkpoints."""
        steps = (step for job in jobs if job.way == self.way for step, _ in losses_of(job.folder))
        folder = self.logs / f"{self.way} alone"
        folder.mkdir()
        goal = max(steps, default=0)
        return folder, self.ranks(folder, goal, saves=False)

    def ranks(self, folder: Path, goal: int, *, saves: bool) -> list[Process]:
        work = partial(train, files=self.files, folder=folder, way=self.way, goal=goal, saves=saves)
        tiny = self.files.place.tiny
        return ranks.started(work, self.logs, tiny=tiny, share=1.0, seconds=TIMEOUT)

    def broken(self, why: str) -> None:
        for each in self.processes:
            print(each.text()[-3000:], file=sys.stderr, flush=True)
        reasons = [each.failed for each in self.processes if each.look() and each.failed]
        raise RuntimeError(f"{self.way}: {why}: {'; '.join(filter(None, reasons))}")


def run(jobs: list[Job], limit: float) -> str | None:
    """Go on with all jobs until they are done. Returns why one of them is not done, or None."""
    failed: str | None = None
    try:
        while not all(job.done for job in jobs):
            if time.monotonic() > limit:
                return failed or "the time was over"
            for job in [job for job in jobs if not job.done]:
                try:
                    job.look()
                except RuntimeError as error:
                    failed = failed or str(error)
                    job.done = True
                    ranks.end(job.processes)
            time.sleep(ranks.PERIOD / 2)
    finally:
        for job in jobs:
            ranks.end(job.processes)
    return failed


def different(jobs: list[Job], seconds: float) -> str | None:
    """A line about the first loss that differs from that of ranks that nobody kills, or None."""
    limit = time.monotonic() + seconds
    by_way = {job.way: job for job in jobs}
    alone = {way: job.beside(jobs) for way, job in by_way.items()}
    for way, (folder, processes) in alone.items():
        reason = ranks.watch(processes, limit - time.monotonic())
        if reason is not None:
            for _, others in alone.values():
                ranks.end(others)
            return f"{way}: without a kill: {reason}"
        expected = dict(losses_of(folder))
        for job in jobs:
            for step, loss in losses_of(job.folder) if job.way == way else ():
                if expected.get(step) != loss:
                    return f"{way}: step {step} has the loss {loss}, not {expected.get(step)}"
    return None


def rows(folder: Path, *, tiny: bool, seconds: float) -> Iterator[Row]:
    """Counts of kills, hangs, lost and resumed jobs; and how soon the other rank ends."""
    limit = time.monotonic() + min(seconds, MOST)
    plan = Plan.of(tiny)
    inside = folder / "killed"
    inside.mkdir()
    place = Place(tiny=tiny)
    files = Files(place, str(inside), width=64 if tiny else 512, count=4)
    ways = ("fully_shard", "DistributedDataParallel")
    jobs = [Job(n, ways[n % 2], files, inside, plan) for n in range(plan.jobs)]
    failed = run(jobs, limit - 10)
    all_counts = [job.counts for job in jobs]
    wrong = different(jobs, max(limit - time.monotonic(), 10.0))
    sums = {
        name: sum(getattr(each, name) for each in all_counts)
        for name in ("killed", "hangs", "lost", "resumed", "told")
    }
    phases: Counter[str] = sum((each.phases for each in all_counts), Counter())
    note = ", ".join(f"{count} in a {name}" for name, count in sorted(phases.items()))
    note += "; losses " + (f"differ: {wrong}" if wrong else "equal to those without a kill")
    good = sums["resumed"] == sums["killed"] == plan.jobs * plan.kills and not sums["hangs"]
    reason = failed or wrong or (None if good else "not every kill was resumed")
    results = {name: Result(float(count)) for name, count in sums.items() if name != "told"}
    title = f"a rank of two killed at {plan.jobs * plan.kills} random points"
    yield Row(title, results, "times", note, {"ours": reason} if reason else {})
    ends = [each for counts in all_counts for each in counts.ends]
    if ends:
        told = f"{sums['told']} with an error of torch.distributed; its timeout {TIMEOUT:.0f} s"
        yield Row("end of the other rank after a kill", {"ours": Result.of(ends)}, "ms", told)
