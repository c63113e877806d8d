"""Work that people do, on at most 256 MiB: by page faults, with the right calls, and the limit.

torch does the arithmetic; the limit is a copy of the same bytes from or to pinned host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import managedmem
from managedmem import Device, Host, ManagedBuffer

from . import peers
from .measure import Row, elapsed, side_by_side

MIB = 1 << 20
SIZE = 256 * MIB
PAGE = 4096


class Jobs:
    """What the jobs share: torch, a device, a stream that torch and managedmem both use."""

    def __init__(self, torch: ModuleType) -> None:
        self.torch = torch
        self.device = Device(0)
        self.stream = torch.cuda.Stream()
        self.pinned = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
        self.plain = torch.empty(SIZE, dtype=torch.uint8, device="cuda")

    def timed(self, prepare: Callable[[], object], work: Callable[[], object]):  # type: ignore[no-untyped-def]
        """A contender: prepare and wait, then time the work until the stream has done it."""

        def run(_: int) -> float:
            prepare()
            self.torch.cuda.synchronize()
            with self.torch.cuda.stream(self.stream):
                return elapsed(lambda: (work(), self.stream.synchronize()))

        return run

    def copy_in(self) -> None:
        self.plain.copy_(self.pinned, non_blocking=True)

    def copy_out(self) -> None:
        self.pinned.copy_(self.plain, non_blocking=True)

    def tensor(self, buf: ManagedBuffer):  # type: ignore[no-untyped-def]
        return self.torch.as_tensor(buf, device="cuda").view(self.torch.float32)

    def to_host(self, buf: ManagedBuffer) -> None:
        buf.prefetch(Host(), stream=self.stream, defer=False)

    def to_device(self, buf: ManagedBuffer) -> None:
        buf.prefetch(self.device, stream=self.stream, defer=False)


def host_data(jobs: Jobs, repetitions: int) -> Row:
    """A sum on the GPU over data that the host has just written."""
    buf = managedmem.empty(SIZE)
    data = jobs.tensor(buf)
    plain = jobs.plain.view(jobs.torch.float32)
    remote = managedmem.empty(SIZE)
    remote.preferred_location = Host()
    remote.accessed_by.add(jobs.device)
    remote_data = jobs.tensor(remote)
    for each in (data, remote_data):
        each.fill_(1.0)
    samples = side_by_side(
        {
            "page faults": jobs.timed(lambda: jobs.to_host(buf), data.sum),
            "prefetch": jobs.timed(
                lambda: jobs.to_host(buf), lambda: (jobs.to_device(buf), data.sum())
            ),
            "remote access": jobs.timed(lambda: jobs.to_host(remote), remote_data.sum),
            "pinned copy": jobs.timed(lambda: None, lambda: (jobs.copy_in(), plain.sum())),
        },
        count=1,
        repetitions=repetitions,
    )
    buf.close()
    remote.close()
    return Row("sum on the GPU of 256 MiB from the host", samples, unit="us")


def table(jobs: Jobs, repetitions: int) -> Row:
    """A table that the host and the GPU read in turn."""
    buf = managedmem.empty(SIZE)
    data = jobs.tensor(buf)
    data.fill_(1.0)
    view = memoryview(buf)

    def turns() -> None:
        for _ in range(4):
            data.sum()
            jobs.stream.synchronize()
            view[::PAGE].tobytes()

    def advised(on: bool) -> Callable[[], object]:
        def prepare() -> None:
            buf.read_mostly = on
            jobs.to_host(buf)

        return prepare

    samples = side_by_side(
        {
            "page faults": jobs.timed(advised(False), turns),
            "read_mostly": jobs.timed(advised(True), turns),
        },
        count=1,
        repetitions=repetitions,
    )
    view.release()
    buf.close()
    return Row("256 MiB read by the GPU and by the host, 4 turns", samples, unit="us")


def scratch(jobs: Jobs, repetitions: int) -> Row:
    """A buffer whose old contents, on the host, are of no use to the kernel that fills it."""
    buf = managedmem.empty(SIZE)
    data = jobs.tensor(buf)

    def kernel() -> None:
        data.fill_(2.0)

    def discarded() -> None:
        buf.discard_prefetch(jobs.device, stream=jobs.stream, defer=False)
        kernel()

    samples = side_by_side(
        {
            "page faults": jobs.timed(lambda: jobs.to_host(buf), kernel),
            "prefetch": jobs.timed(
                lambda: jobs.to_host(buf), lambda: (jobs.to_device(buf), kernel())
            ),
            "discard_prefetch": jobs.timed(lambda: jobs.to_host(buf), discarded),
            "pinned copy": jobs.timed(lambda: None, lambda: (jobs.copy_in(), kernel())),
        },
        count=1,
        repetitions=repetitions,
    )
    buf.close()
    return Row("scratch of 256 MiB, filled on the GPU", samples, unit="us")


def result(jobs: Jobs, repetitions: int) -> Row:
    """A result on the GPU that the host reads."""
    buf = managedmem.empty(SIZE)
    data = jobs.tensor(buf)
    view = memoryview(buf)

    def fill() -> None:
        jobs.to_device(buf)
        data.fill_(3.0)

    def touch() -> None:
        view[::PAGE].tobytes()

    def read() -> None:
        buf.numpy(jobs.stream)[::PAGE].tobytes()

    samples = side_by_side(
        {
            "page faults": jobs.timed(fill, touch),
            "numpy()": jobs.timed(fill, read),
            "pinned copy": jobs.timed(fill, jobs.copy_out),
        },
        count=1,
        repetitions=repetitions,
    )
    view.release()
    buf.close()
    return Row("256 MiB from the GPU, one byte of each page read", samples, unit="us")


def measure(repetitions: int = 7) -> list[Row]:
    """The rows of this group; none without torch and a GPU."""
    torch = peers.optional("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    jobs = Jobs(torch)
    return [job(jobs, repetitions) for job in (host_data, table, scratch, result)]
