"""Many copies of 64 KiB at once: a loop of `copy_from`, `managedmem.copy`, and cuda.core's batch.

Each time is from the call to the end of the work on the stream. "hint" tells the driver where the
source is, because it does not look this up for a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import managedmem
from managedmem import Device, Host

from . import bare, peers
from .measure import KIB, Contender, Row, side_by_side

COUNTS = (16, 1024)
SIZE = 64 * KIB
NEED = 2 * 2 * SIZE * COUNTS[-1]  # two sides, with gaps as large as the blocks
PLACES = ("host", "device")  # of the source


def blocks_of(whole: managedmem.ManagedBuffer, count: int) -> list[managedmem.ManagedBuffer]:
    """Blocks of one allocation, which do not touch."""
    return [whole[2 * i * SIZE : (2 * i + 1) * SIZE] for i in range(count)]


def loop(
    sources: Sequence[managedmem.ManagedBuffer],
    targets: Sequence[managedmem.ManagedBuffer],
    stream: managedmem.Stream,
) -> None:
    """A copy for each pair."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_from(source, stream=stream)


def contenders(
    sources: list[managedmem.ManagedBuffer],
    targets: list[managedmem.ManagedBuffer],
    place: Device | Host,
    stream: managedmem.Stream,
) -> dict[str, Contender]:
    """Every way to copy all blocks."""
    handle = stream.handle
    copy = managedmem.copy
    found: dict[str, Contender] = {
        "loop": lambda _: bare.call_nanoseconds(handle, loop, sources, targets, stream),
        "ours": lambda _: bare.call_nanoseconds(handle, copy, sources, targets, stream=stream),
        "ours, hint": lambda _: bare.call_nanoseconds(
            handle, copy, sources, targets, stream=stream, src_location=place
        ),
    }
    core = peers.cuda_core(stream, *sources, *targets)
    batch = getattr(core.get("core_utils"), "copy_batch", None)
    if batch is not None:
        sides = core["core_bufs"][: len(sources)], core["core_bufs"][len(sources) :]
        found["cuda.core"] = lambda _: bare.call_nanoseconds(
            handle, batch, core["core_stream"], *sides
        )
    return found


def measure(repetitions: int = 21, counts: Sequence[int] = COUNTS) -> Iterator[Row]:
    """A row for each count and place of the source; the targets are on the device."""
    with ExitStack() as stack:
        stream = stack.enter_context(managedmem.Stream())
        source, target = (
            stack.enter_context(managedmem.empty(2 * SIZE * max(counts))) for _ in range(2)
        )
        target.prefetch(Device(0), stream=stream)
        for name in PLACES:
            place = Host() if name == "host" else Device(0)
            source.preferred_location = place  # a copy by a kernel must not move its pages
            source.prefetch(place, stream=stream)
            stream.sync()
            for count in counts:
                sides = blocks_of(source, count), blocks_of(target, count)
                title = f"{count} copies of {SIZE // KIB} KiB from the {name}"
                ways = contenders(*sides, place, stream)
                yield side_by_side(title, ways, count=1, repetitions=repetitions, unit="us")
