"""Several ranges at once: `dispatch="auto"` beside a loop, a batch and one call over all.

Each time is that of the whole operation, from the call to the end of the work on the stream, with
`defer=False`: deferring is measured by itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import managedmem
from managedmem import Device, Host

from . import bare
from .measure import Row, elapsed, side_by_side

KIB, MIB = 1 << 10, 1 << 20
COUNTS = (1, 2, 8, 64)
SIZES = (4 * KIB, 64 * KIB, MIB, 2 * MIB, 8 * MIB)
LARGEST = 256 * MIB  # of all ranges and the gaps between them
FORMS = ("loop", "batch", "one call")
GOAL = 1.05

# Operation, where the pages are before, where they go.
MOVES = (
    ("prefetch", "host", "device"),
    ("prefetch", "device", "host"),
    ("prefetch", "device", "device"),
    ("discard", "device", "device"),
    ("discard_prefetch", "host", "device"),
    ("discard_prefetch", "device", "device"),
    ("discard_prefetch", "device", "host"),
)


@dataclass
class Cell:
    """One cell of the matrix, ready to run."""

    operation: str
    before: str
    after: str
    whole: managedmem.ManagedBuffer
    ranges: list[managedmem.ManagedBuffer]
    adjacent: bool
    stream: managedmem.Stream

    @property
    def title(self) -> str:
        what = f"{self.operation} {self.before} to {self.after}"
        layout = "adjacent" if self.adjacent else "apart"
        return f"{what}, {len(self.ranges)} x {self.ranges[0].nbytes // KIB} KiB {layout}"

    def prepare(self) -> None:
        """Bring all pages to where they are to be."""
        self.whole.prefetch(place(self.before), stream=self.stream, defer=False)
        self.stream.sync()

    def ours(self) -> None:
        operation = getattr(managedmem, self.operation)
        where = [] if self.operation == "discard" else [place(self.after)]
        defer = {} if self.operation == "discard" else {"defer": False}
        operation(self.ranges, *where, stream=self.stream, **defer)
        self.stream.sync()

    def sequence(self) -> bare.Sequence:
        count = len(self.ranges)
        return bare.Sequence(
            (ctypes.c_uint64 * count)(*(r.handle for r in self.ranges)),
            (ctypes.c_size_t * count)(*(r.nbytes for r in self.ranges)),
            count,
            self.stream.handle,
            -1 if self.after == "host" else 0,
            ("prefetch", "discard", "discard_prefetch").index(self.operation),
        )

    def contenders(self) -> dict[str, Callable[[int], float]]:
        sequence = self.sequence()

        def form(number: int) -> Callable[[int], float]:
            def run(_: int) -> float:
                self.prepare()
                return bare.sequence_nanoseconds(sequence, number)

            return run

        def ours(_: int) -> float:
            self.prepare()
            return elapsed(self.ours)

        found = {FORMS[i]: form(i) for i in range(3 if self.adjacent else 2)}
        return {**found, "ours": ours}


def place(name: str) -> Device | Host:
    return Host() if name == "host" else Device(0)


def cells(stream: managedmem.Stream) -> Iterator[Cell]:
    """Every cell whose memory is within bounds."""
    for adjacent in (True, False):
        for size in SIZES:
            for count in COUNTS:
                step = size if adjacent else 2 * size
                if step * count > LARGEST or (count == 1 and not adjacent):
                    continue
                with managedmem.empty(step * count) as whole:
                    ranges = [whole[i * step : i * step + size] for i in range(count)]
                    for operation, before, after in MOVES:
                        yield Cell(operation, before, after, whole, ranges, adjacent, stream)


def measure(repetitions: int = 9) -> list[Row]:
    """A row for each cell; the note says how far ours is from the best of the others."""
    rows = []
    with managedmem.Stream() as stream:
        for cell in cells(stream):
            samples = side_by_side(cell.contenders(), count=1, repetitions=repetitions)
            best = min(s.median for name, s in samples.items() if name != "ours")
            ratio = samples["ours"].median / best
            note = f"{ratio:.2f} x the best{'' if ratio <= GOAL else ', above the goal'}"
            rows.append(Row(cell.title, samples, unit="us", note=note))
    return rows
