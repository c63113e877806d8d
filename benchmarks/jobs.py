"""Typical work on 256 MiB: by page faults, with the right calls, and the limit.

torch does the arithmetic; the limit is a copy of the same bytes from or to pinned host memory.
`before` moves the pages and sets the advice, so that every run starts from the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import managedmem
from managedmem import Device, Host

from . import peers
from .measure import MIB, Contender, Row, elapsed, side_by_side

SIZE = 256 * MIB
NEED = SIZE  # and as much plain device memory
PAGE = 4096
TURNS = 4

Step = Callable[[], object]


class Jobs:
    """A managed buffer, the same size on the device and in pinned memory, torch and its stream."""

    def __init__(self, torch: ModuleType) -> None:
        self.torch = torch
        self.device = Device(0)
        self.stream = torch.cuda.Stream()
        self.buf = managedmem.empty(SIZE)
        self.data = torch.as_tensor(self.buf, device="cuda").view(torch.float32)
        self.pinned = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
        self.plain = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
        self.numbers = self.plain.view(torch.float32)

    def timed(self, before: Step, *work: Step) -> Contender:
        """A contender: prepare and wait, then time the steps until the stream has done them."""

        def steps() -> None:
            for step in work:
                step()
            self.stream.synchronize()

        def run(_: int) -> float:
            with self.torch.cuda.stream(self.stream):
                before()
                self.torch.cuda.synchronize()
                return elapsed(steps)

        return run

    def row(self, title: str, repetitions: int, contenders: dict[str, Contender]) -> Row:
        """The times of one job; the buffer is left without advice."""
        row = side_by_side(title, contenders, count=1, repetitions=repetitions, unit="us")
        self.advise()
        return row

    # Steps.

    def advise(self, *, read_mostly: bool = False, remote: bool = False) -> None:
        """Set this advice and unset the rest."""
        self.buf.read_mostly = read_mostly
        self.buf.preferred_location = Host() if remote else None
        self.buf.accessed_by = [self.device] if remote else []

    def on_host(self) -> None:
        """The pages are on the host, without advice and without the mappings that advice made."""
        self.advise()
        self.to_device()
        self.to_host()

    def on_device(self) -> None:
        """The pages are on the device, filled there, without advice."""
        self.advise()
        self.to_device()
        self.fill()

    def to_host(self) -> None:
        self.buf.prefetch(Host(), stream=self.stream, defer=False)

    def to_device(self) -> None:
        self.buf.prefetch(self.device, stream=self.stream, defer=False)

    def emptied_to_device(self) -> None:
        self.buf.discard_prefetch(self.device, stream=self.stream, defer=False)

    def sum(self) -> Any:
        return self.data.sum()

    def fill(self) -> None:
        self.data.fill_(2.0)

    def copy_in(self) -> None:
        self.plain.copy_(self.pinned, non_blocking=True)

    def copy_out(self) -> None:
        self.pinned.copy_(self.plain, non_blocking=True)

    def touch(self) -> None:
        """Read a byte of each page from the host, by page faults."""
        with memoryview(self.buf) as view:
            view[::PAGE].tobytes()

    def touch_numpy(self) -> None:
        """Read a byte of each page through numpy(), which moves all pages at once."""
        self.buf.numpy(self.stream)[::PAGE].tobytes()


def host_data(jobs: Jobs, repetitions: int) -> Row:
    """A sum on the GPU over data that the host has just written."""

    def remote() -> None:
        jobs.advise(remote=True)
        jobs.to_host()

    contenders = {
        "page faults": jobs.timed(jobs.on_host, jobs.sum),
        "prefetch": jobs.timed(jobs.on_host, jobs.to_device, jobs.sum),
        "remote access": jobs.timed(remote, jobs.sum),
        "pinned copy": jobs.timed(jobs.advise, jobs.copy_in, jobs.numbers.sum),
    }
    return jobs.row("data from the host, summed on the GPU", repetitions, contenders)


def table(jobs: Jobs, repetitions: int) -> Row:
    """A table that the GPU and the host read in turn."""

    def read_mostly() -> None:
        jobs.on_host()
        jobs.stream.synchronize()  # advice is not stream-ordered: it would come before the move
        jobs.advise(read_mostly=True)

    def turn() -> None:
        jobs.sum()
        jobs.stream.synchronize()
        jobs.touch()

    def copied_turn() -> None:
        jobs.copy_in()
        jobs.numbers.sum()
        jobs.stream.synchronize()
        bytes(memoryview(jobs.pinned.numpy())[::PAGE])

    contenders = {
        "page faults": jobs.timed(jobs.on_host, *[turn] * TURNS),
        "read_mostly": jobs.timed(read_mostly, *[turn] * TURNS),
        "read_mostly, prefetch": jobs.timed(read_mostly, jobs.to_device, *[turn] * TURNS),
        "pinned copy": jobs.timed(jobs.advise, *[copied_turn] * TURNS),
    }
    return jobs.row(f"read by the GPU and by the host, {TURNS} turns", repetitions, contenders)


def scratch(jobs: Jobs, repetitions: int) -> Row:
    """Memory on the host that a kernel fills without reading it."""
    contenders = {
        "page faults": jobs.timed(jobs.on_host, jobs.fill),
        "prefetch": jobs.timed(jobs.on_host, jobs.to_device, jobs.fill),
        "discard_prefetch": jobs.timed(jobs.on_host, jobs.emptied_to_device, jobs.fill),
        "pinned copy": jobs.timed(jobs.advise, jobs.copy_in, lambda: jobs.numbers.fill_(2.0)),
    }
    return jobs.row("scratch from the host, filled on the GPU", repetitions, contenders)


def result(jobs: Jobs, repetitions: int) -> Row:
    """A result on the GPU; the host reads a byte of each page."""
    contenders = {
        "page faults": jobs.timed(jobs.on_device, jobs.touch),
        "numpy()": jobs.timed(jobs.on_device, jobs.touch_numpy),
        "prefetch": jobs.timed(jobs.on_device, jobs.to_host, jobs.stream.synchronize, jobs.touch),
        "pinned copy": jobs.timed(jobs.advise, jobs.copy_out),
    }
    return jobs.row("a result from the GPU, read by the host", repetitions, contenders)


def measure(repetitions: int = 7) -> Iterator[Row]:
    """The rows of this group; none without torch and a GPU."""
    torch = peers.torch_on_gpu()
    if torch is None:
        return
    jobs = Jobs(torch)
    jobs.fill()
    for job in (host_data, table, scratch, result):
        yield job(jobs, repetitions)
