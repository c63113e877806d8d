"""Ranks of torch.distributed: forked from a server without a context of CUDA, watched, and ended.

Each rank has torchrun's environment, one GPU and a log; on the emulated driver it has gloo and the
CPU. The server ends every rank that it started, by its id, even when it is ended itself.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .common import Place
from .process import Found, guarded

WORLD = 2
MEETING = 30  # seconds that ranks wait for each other at the start
GRACE = 8.0  # seconds for the others when a rank has failed
PERIOD = 0.02  # between two looks at the ranks
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl()
STACKS = signal.SIGUSR1  # a rank that gets it writes its stacks
FACTS = {  # for the environment of a server: a lost rank is an error within the timeout
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def end_with_parent() -> None:
    """Let this process be killed when the one that started it ends."""
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)


def listening() -> socket.socket:
    """A socket at a free port, which stays taken until the first rank listens there."""
    found = socket.socket()
    found.bind(("127.0.0.1", 0))
    found.listen()
    return found


@dataclass
class Rank:
    """What a rank knows of itself."""

    number: int
    world: int
    place: Place
    say: Callable[[str], None]  # to the server, at once

    @property
    def device(self) -> str:
        """The GPU; on the emulated driver, the device that stands for it."""
        return f"cuda:{self.number}"

    def together(self) -> None:
        """Wait for the device and for the other ranks."""
        self.place.wait()
        if self.world > 1:
            dist.barrier()

    def sums(self, values: Sequence[float]) -> list[float]:
        """The sums over the ranks."""
        return self.reduced(values, dist.ReduceOp.SUM)

    def most(self, values: Sequence[float]) -> list[float]:
        """The largest values of the ranks."""
        return self.reduced(values, dist.ReduceOp.MAX)

    def reduced(self, values: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        found = torch.tensor(values, dtype=torch.float64, device=self.place.device)
        if self.world > 1:
            dist.all_reduce(found, how)
        return [float(each) for each in found.tolist()]


Work = Callable[[Rank], Found]


def join(rank: Rank, listener: socket.socket, seconds: float) -> None:
    """Take a GPU and enter the group, whose operations may take so many seconds."""
    place, port = rank.place, listener.getsockname()[1]
    numbers = {"RANK": rank.number, "LOCAL_RANK": rank.number}
    numbers |= {"WORLD_SIZE": rank.world, "LOCAL_WORLD_SIZE": rank.world, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in numbers.items()}, MASTER_ADDR="127.0.0.1")
    processors = len(os.sched_getaffinity(0))
    torch.set_num_threads(1 if place.tiny else max(processors // rank.world, 1))
    if not place.tiny:
        torch.cuda.set_device(place.device)
        torch.zeros(1, device=place.device)
    if rank.world == 1:
        return
    options: dict[str, Any] = {"timeout": timedelta(seconds=MEETING)}
    if first := rank.number == 0:
        options |= {"master_listen_fd": listener.detach()}
    else:  # a second rank that holds it would take calls for a first rank that has died
        listener.close()
    store = vars(dist)["TCPStore"]("127.0.0.1", port, rank.world, first, **options)
    options = {"store": store, "rank": rank.number, "world_size": rank.world}
    options |= {"timeout": timedelta(seconds=seconds)}
    if place.tiny:
        dist.init_process_group("gloo", **options)
    else:  # gloo for objects: over NCCL, a save has waited for a dead rank beyond the timeout
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=place.device, **options)
    rank.together()


def be_rank(rank: Rank, work: Work, listener: socket.socket, seconds: float) -> Found:
    """The whole course of a rank, up to its result."""
    join(rank, listener, seconds)
    found = work(rank)
    rank.together()
    return found


class Process:
    """A rank as the server sees it: what it says, its log, and its end."""

    def __init__(self, number: int, log: Path, run: Callable[[Callable[[str], None]], Found]):
        self.number, self.log = number, log
        self.status: int | None = None
        self.said: list[str] = []
        self.found: Found | None = None
        self.rest = b""
        self.get, put = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(put)
            return
        try:
            self.be(put, run)
        finally:
            os._exit(1)

    def be(self, put: int, run: Callable[[Callable[[str], None]], Found]) -> None:
        """The child: runs, tells the result, and ends without the exit handlers of libraries."""
        end_with_parent()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for descriptor in (1, 2):
            os.dup2(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        faulthandler.register(STACKS, file=2, all_threads=True)

        def say(text: str) -> None:
            os.write(put, text.encode() + b"\n")

        say(f"R{json.dumps(guarded(partial(run, say)))}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def hear(self) -> None:
        """Take what the rank has written."""
        while select.select([self.get], [], [], 0)[0]:
            part = os.read(self.get, 1 << 16)
            if not part:
                break
            *lines, self.rest = (self.rest + part).split(b"\n")
            for line in map(bytes.decode, lines):
                if line.startswith("R"):
                    self.found = dict(json.loads(line[1:]))
                else:
                    self.said.append(line)

    def look(self) -> bool:
        """Take what the rank has written; true if the rank has ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.hear()
            if pid:
                self.status = status
                os.close(self.get)
        return self.status is not None

    def tell_stacks(self) -> None:
        """Let it write the stacks of its threads into its log."""
        if not self.look():
            os.kill(self.pid, STACKS)

    def kill(self) -> None:
        if not self.look():
            os.kill(self.pid, signal.SIGKILL)

    @property
    def failed(self) -> str | None:
        """Why it has no result, once it has ended."""
        if self.found is None:
            return f"rank {self.number} died, status {self.status}"
        reason = self.found.get("failed")
        return None if reason is None else f"rank {self.number}: {reason}"

    def text(self) -> str:
        """What it has logged."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def started(
    work: Work, folder: Path, *, tiny: bool, share: float, world: int = WORLD, seconds: float = 60.0
) -> list[Process]:
    """Ranks that do some work, with their logs in a folder."""

    def run(number: int, say: Callable[[str], None]) -> Found:
        rank = Rank(number, world, Place(tiny, share, number), say)
        return be_rank(rank, work, listener, seconds)

    found: list[Process] = []
    with listening() as listener:
        try:
            for number in range(world):
                log = folder / f"{time.monotonic_ns()}-{number}.log"
                found.append(Process(number, log, partial(run, number)))
        except BaseException:
            end(found)
            raise
    return found


def all_ended(processes: Sequence[Process]) -> bool:
    """Hear all; true if all have ended."""
    return {each.look() for each in processes} <= {True}


def end(processes: Sequence[Process]) -> None:
    """Kill the ranks that go on, and wait for all."""
    for each in processes:
        each.kill()
    while not all_ended(processes):
        time.sleep(PERIOD)


def reason_of(processes: Sequence[Process]) -> str | None:
    """Why the first rank that has ended without a result has none."""
    ended = (each for each in processes if each.status is not None)
    return next((each.failed for each in ended if each.failed), None)


def watch(
    processes: Sequence[Process], seconds: float, look: Callable[[], object] = lambda: None
) -> str | None:
    """Wait for the end of ranks, and end them when their time is over; why they failed, or None."""
    limit = time.monotonic() + seconds
    reason: str | None = None
    try:
        while not all_ended(processes):
            if reason is None and (reason := reason_of(processes)) is not None:
                limit = min(limit, time.monotonic() + GRACE)
            if time.monotonic() > limit:
                return reason or f"not done after {seconds:.0f} s"
            look()
            time.sleep(PERIOD)
    finally:
        end(processes)
    return reason or reason_of(processes)


def measured(
    work: Work,
    folder: Path,
    *,
    tiny: bool,
    share: float,
    world: int,
    seconds: float,
    look: Callable[[Sequence[Process]], object] = lambda processes: None,
) -> Found:
    """The result of the first rank, or {"failed": reason} with the ends of the logs on stderr."""
    processes = started(work, folder, tiny=tiny, share=share, world=world)
    reason = watch(processes, seconds, lambda: look(processes))
    if reason is None:
        return dict(processes[0].found or {})
    for each in processes:
        lines = "\n    ".join(each.text().splitlines()[-25:])
        print(f"  log of rank {each.number}:\n    {lines}", file=sys.stderr, flush=True)
    return {"failed": reason}
