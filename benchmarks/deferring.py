"""Prefetches that return at once: the thread's time and the time to the end of the work.

"plain" is `defer=False`, "queued" `defer=True`, "auto" the default; "call" ends when the call
returns, "end" when the stream has done the work. "busy" is a call on a stream with earlier work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import managedmem
from managedmem import Device, Host

from .measure import KIB, MIB, Contender, Row, elapsed, side_by_side

SIZES = tuple(64 * KIB << i for i in range(14))  # 64 KiB to 512 MiB
NEED = SIZES[-1]
CALL_GOAL, END_GOAL = 20e3, 1.15
MODES = {"plain": False, "queued": True, "auto": None}
BUSY_BYTES, BUSY_TIMES = 256 * MIB, 4  # fills of plain device memory: about 0.3 ms on an H200


@dataclass(frozen=True)
class Case:
    """A buffer, a stream, the destination of the buffer, and a load that keeps the stream busy."""

    buf: managedmem.ManagedBuffer
    stream: managedmem.Stream
    to_device: bool
    load: managedmem.ManagedBuffer

    def prefetch(self, defer: bool | None, *, until_end: bool, busy: bool = False) -> Contender:
        """A measurement of one prefetch: until the call returns, or until the work is done."""
        target, origin = (Device(0), Host()) if self.to_device else (Host(), Device(0))

        def work() -> None:
            self.buf.prefetch(target, stream=self.stream, defer=defer)
            if until_end:
                self.stream.sync()

        def once(_: int) -> float:
            self.buf.prefetch(origin, stream=self.stream, defer=False)
            self.stream.sync()
            for _ in range(BUSY_TIMES if busy else 0):
                self.load.fill(0, stream=self.stream)
            found = elapsed(work)
            self.stream.sync()
            return found

        return once

    def contenders(self) -> dict[str, Contender]:
        """Every mode, to both ends; the default on a busy stream too."""
        found = {
            f"{name}, {'end' if until_end else 'call'}": self.prefetch(defer, until_end=until_end)
            for name, defer in MODES.items()
            for until_end in (False, True)
        }
        return {**found, "auto, busy": self.prefetch(None, until_end=False, busy=True)}

    def row(self, repetitions: int) -> Row:
        """The times of all modes; the note says if the default misses a goal."""
        side = "device" if self.to_device else "host"
        row = side_by_side(
            f"prefetch {self.buf.nbytes // KIB} KiB to the {side}",
            self.contenders(),
            count=1,
            repetitions=repetitions,
            unit="us",
        )
        if row.broken:
            return row
        call = max(row.results[name].median for name in ("auto, call", "auto, busy"))
        end = row.results["auto, end"].median / row.results["plain, end"].median
        within = call <= CALL_GOAL and end <= END_GOAL
        return replace(row, note=f"end {end:.2f} x plain{'' if within else ', a goal is missed'}")


def measure(
    repetitions: int = 9, sizes: Sequence[int] = SIZES, busy_bytes: int = BUSY_BYTES
) -> Iterator[Row]:
    """A row for each size and direction."""
    with ExitStack() as stack:
        stream = stack.enter_context(managedmem.Stream())
        resource = stack.enter_context(managedmem.DeviceMemoryResource(Device(0)))
        load = stack.enter_context(resource.allocate(busy_bytes))
        for to_device in (True, False):
            for size in sizes:
                with managedmem.empty(size) as buf:
                    yield Case(buf, stream, to_device, load).row(repetitions)
