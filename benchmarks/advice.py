"""The cost of new advice, which the call applies to all populated pages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import managedmem
from managedmem import Device, Host

from .measure import MIB, Result, Row, elapsed

SIZES = (2 * MIB, 256 * MIB)
NEED = SIZES[-1]

Step = Callable[[], None]


def steps_of(buf: managedmem.ManagedBuffer, place: Device | Host) -> dict[str, tuple[Step, Step]]:
    """The calls that set and unset each advice, by name."""
    device = Device(0)

    def assign(name: str, value: object) -> Step:
        return lambda: setattr(buf, name, value)

    return {
        "read_mostly": (assign("read_mostly", True), assign("read_mostly", False)),
        "preferred_location, where they are": (
            assign("preferred_location", place),
            assign("preferred_location", None),
        ),
        "accessed_by the device": (
            lambda: buf.accessed_by.add(device),
            lambda: buf.accessed_by.discard(device),
        ),
        "accessed_by the host": (
            lambda: buf.accessed_by.add(Host()),
            lambda: buf.accessed_by.discard(Host()),
        ),
    }


def row(buf: managedmem.ManagedBuffer, place: Device | Host, advice: str, repetitions: int) -> Row:
    """Set an advice, set it again and unset it, on pages that have just moved."""
    other = Device(0) if place is Host() else Host()
    set_advice, unset_advice = steps_of(buf, place)[advice]
    times: dict[str, list[float]] = {"set": [], "set again": [], "unset": []}
    with managedmem.Stream() as stream:
        for _ in range(repetitions):
            for location in (other, place):
                buf.prefetch(location, stream=stream, defer=False)
                stream.sync()
            for name, step in zip(times, (set_advice, set_advice, unset_advice), strict=True):
                times[name].append(elapsed(step))
    title = f"{advice}, {buf.nbytes // MIB} MiB on the {'host' if place is Host() else 'device'}"
    return Row(title, {name: Result.of(found) for name, found in times.items()}, "us")


def measure(repetitions: int = 9, sizes: Sequence[int] = SIZES) -> Iterator[Row]:
    """A row for each advice, place and size."""
    for size in sizes:
        with managedmem.empty(size) as buf:
            buf.fill(1)
            places: tuple[Device | Host, ...] = Host(), Device(0)
            for place, advice in itertools.product(places, steps_of(buf, Host())):
                yield row(buf, place, advice, repetitions)
