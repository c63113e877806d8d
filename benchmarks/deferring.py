"""Prefetches that return at once: the thread's time and the time to the end of the work."""

from __future__ import annotations

from collections.abc import Callable

import managedmem
from managedmem import Device, Host

from .measure import Row, elapsed, side_by_side

KIB, MIB = 1 << 10, 1 << 20
SIZES = tuple(64 * KIB << i for i in range(13))  # 64 KiB to 256 MiB
CALL_GOAL, END_GOAL = 20e3, 1.15


def run(
    buf: managedmem.ManagedBuffer,
    stream: managedmem.Stream,
    device: bool,
    defer: bool | None,
    until_end: bool,
) -> Callable[[int], float]:
    """A measurement of one prefetch: until the call returns, or until the work is done."""
    there, back = (Device(0), Host()) if device else (Host(), Device(0))

    def once(_: int) -> float:
        buf.prefetch(back, stream=stream, defer=False)
        stream.sync()

        def work() -> None:
            buf.prefetch(there, stream=stream, defer=defer)
            if until_end:
                stream.sync()

        found = elapsed(work)
        stream.sync()
        return found

    return once


def measure(repetitions: int = 9) -> list[Row]:
    """A row for each size and direction, on an idle stream."""
    rows = []
    with managedmem.Stream() as stream:
        for device in (True, False):
            for size in SIZES:
                with managedmem.empty(size) as buf:
                    contenders = {
                        f"{name}, {'end' if end else 'call'}": run(buf, stream, device, defer, end)
                        for name, defer in (("plain", False), ("queued", True), ("auto", None))
                        for end in (False, True)
                    }
                    samples = side_by_side(contenders, count=1, repetitions=repetitions)
                call = samples["auto, call"].median
                end = samples["auto, end"].median / samples["plain, end"].median
                met = call <= CALL_GOAL and end <= END_GOAL
                direction = "device" if device else "host"
                rows.append(
                    Row(
                        f"prefetch {size // KIB} KiB to the {direction}",
                        samples,
                        unit="us",
                        note=f"end {end:.2f} x plain{'' if met else ', a goal is missed'}",
                    )
                )
    return rows
