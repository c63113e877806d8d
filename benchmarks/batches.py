"""Several ranges at once: `dispatch="auto"` beside a loop, a batch and one call over all.

Each time is that of the whole operation, from the call to the end of the work on the stream, with
`defer=False`; "deferring" is a group of its own. The same C code times all contenders and waits.
`ours` is one call of the function, which reads its sequence of buffers each time; `plan` is
`PrefetchPlan.execute`, whose arrays are filled beforehand, like those of the bare forms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from types import ModuleType
from typing import Any

import managedmem
from managedmem import Device, Host

from . import bare, peers
from .measure import KIB, MIB, Contender, Result, Row, side_by_side

COUNTS = (1, 2, 8, 64)
SIZES = (4 * KIB, 64 * KIB, MIB, 2 * MIB, 8 * MIB)
BETWEEN = (32, 2 * MIB)  # one more count, with one of the sizes
LARGEST = 256 * MIB  # of all ranges and the gaps between them
NEED = LARGEST
FORMS = ("loop", "batch", "one call")
GOAL = 1.05
WITHIN, NOT_TOLD_APART, ABOVE = "within", "above by less than they vary", "above the goal"

# The operation, the place of the pages before it, and the place after it.
MOVES = (
    ("prefetch", "host", "device"),
    ("prefetch", "device", "host"),
    ("prefetch", "device", "device"),
    ("discard", "device", "device"),
    ("discard_prefetch", "host", "device"),
    ("discard_prefetch", "device", "device"),
    ("discard_prefetch", "device", "host"),
)


@dataclass(frozen=True)
class Layout:
    """Ranges of one size in one allocation, adjacent or with gaps of the same size."""

    whole: managedmem.ManagedBuffer
    ranges: list[managedmem.ManagedBuffer]
    adjacent: bool
    stream: managedmem.Stream
    core: dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix, ready to run."""

    operation: str
    before: str
    after: str
    layout: Layout

    @property
    def title(self) -> str:
        """The operation, and the number, size and layout of the ranges."""
        ranges = self.layout.ranges
        move = f"{self.operation} {self.before} to {self.after}"
        adjacent = "adjacent" if self.layout.adjacent else "apart"
        return f"{move}, {len(ranges)} x {ranges[0].nbytes // KIB} KiB {adjacent}"

    def prepare(self) -> None:
        """Move all ranges to their start, range by range.

        After one call over all ranges, a driver can keep an old last prefetch location for some of
        them (topic "records" of the conformance program).
        """
        stream = self.layout.stream
        for part in self.layout.ranges:
            part.prefetch(place(self.before), stream=stream, defer=False)
        stream.sync()

    def timed(
        self, function: Callable[..., object], /, *arguments: object, **named: object
    ) -> Contender:
        """A contender that calls a Python function."""
        stream = self.layout.stream.handle

        def run(_: int) -> float:
            self.prepare()
            return bare.call_nanoseconds(stream, function, *arguments, **named)

        return run

    def bare_forms(self) -> dict[str, Contender]:
        """The driver's own calls."""
        device = -1 if self.after == "host" else 0
        sequence = bare.Sequence.of(self.layout.ranges, self.layout.stream, device, self.operation)

        def form(number: int) -> Contender:
            def run(_: int) -> float:
                self.prepare()
                return bare.sequence_nanoseconds(sequence, number)

            return run

        # One call over separate ranges would move the gaps too.
        return {name: form(i) for i, name in enumerate(FORMS[: 3 if self.layout.adjacent else 2])}

    def ours(self) -> dict[str, Contender]:
        """The function, and a plan of the same ranges."""
        function, ranges = getattr(managedmem, self.operation), self.layout.ranges
        stream = self.layout.stream
        if self.operation == "discard":
            return {"ours": self.timed(function, ranges, stream=stream)}
        location = place(self.after)
        plan = managedmem.PrefetchPlan((each, location) for each in ranges)
        execute = plan.execute if self.operation == "prefetch" else plan.discard_prefetch
        return {
            "ours": self.timed(function, ranges, location, stream=stream, defer=False),
            "plan": self.timed(execute, stream=stream, defer=False),
        }

    def peer_forms(self) -> dict[str, Contender]:
        """cuda.core's batches, which need at least two buffers, and a loop over CuPy's call."""
        found: dict[str, Contender] = {}
        core, ranges = self.layout.core, self.layout.ranges
        if core and len(ranges) > 1:
            location = core["core_host"] if self.after == "host" else core["core_device"]
            arguments = [core["core_stream"], core["core_bufs"], location]
            batch = getattr(core["core_utils"], f"{self.operation}_batch")
            found["cuda.core"] = self.timed(
                batch, *arguments[: 2 if self.operation == "discard" else 3]
            )
        runtime = peers.cupy_runtime()
        if runtime and (self.operation, self.after) == ("prefetch", "device"):
            found["CuPy"] = self.timed(cupy_loop, runtime, ranges, self.layout.stream.handle)
        return found

    def row(self, repetitions: int) -> Row:
        """The times of all contenders."""
        contenders = {**self.bare_forms(), **self.ours(), **self.peer_forms()}
        return side_by_side(self.title, contenders, count=1, repetitions=repetitions, unit="us")


def cupy_loop(runtime: ModuleType, ranges: Sequence[managedmem.ManagedBuffer], stream: int) -> None:
    """The loop of a CuPy user: CuPy has no batch, and on CUDA 13 cannot name the host."""
    for each in ranges:
        runtime.memPrefetchAsync(each.handle, each.nbytes, 0, stream)


def place(name: str) -> Device | Host:
    """The location of that name."""
    return Host() if name == "host" else Device(0)


def layouts(
    stream: managedmem.Stream, sizes: Sequence[int], counts: Sequence[int]
) -> Iterator[Layout]:
    """Every layout whose memory is within bounds."""
    for adjacent in (True, False):
        for size in sizes:
            for count in counts:
                step = size if adjacent else 2 * size
                if step * count > LARGEST or (count == 1 and not adjacent):
                    continue
                with managedmem.empty(step * count) as whole:
                    ranges = [whole[i * step : i * step + size] for i in range(count)]
                    core = peers.cuda_core(stream, *ranges)
                    yield Layout(whole, ranges, adjacent, stream, core)


def best_of_bare(row: Row) -> Result:
    """The fastest of the driver's own calls."""
    found = [row.results[name] for name in FORMS if name in row.results]
    return min(found, key=lambda result: result.median)


def verdict(row: Row, name: str) -> str:
    """Within the goal, above it by less than both times vary, or above it.

    The same bare call to a device can take three times as long from one run to the next.
    """
    ours, best = row.results[name], best_of_bare(row)
    above = ours.median - GOAL * best.median
    if above <= 0:
        return WITHIN
    varies = ours.spread * ours.median + best.spread * best.median
    return NOT_TOLD_APART if above <= varies else ABOVE


def judged(row: Row) -> Row:
    """The row with a note: ours as a multiple of the best bare form, and the verdict."""
    if row.broken:
        return row
    ratio = row.results["ours"].median / best_of_bare(row).median
    found = verdict(row, "ours")
    note = f"ours {ratio:.2f} x the best form{'' if found == WITHIN else f', {found}'}"
    return Row(row.operation, row.results, row.unit, note, row.failed)


def measure(
    repetitions: int = 21, sizes: Sequence[int] = SIZES, counts: Sequence[int] = COUNTS
) -> Iterator[Row]:
    """A row for each cell of the matrix, and for those of BETWEEN."""
    count, size = BETWEEN
    with managedmem.Stream() as stream:
        every = chain(layouts(stream, sizes, counts), layouts(stream, (size,), (count,)))
        for layout in every:
            for move in MOVES:
                yield judged(Cell(*move, layout).row(repetitions))


def summary(rows: list[Row]) -> str:
    """The number of cells that meet the goal, for ours and for the plan."""
    lines = []
    for name in ("ours", "plan"):
        having = [row for row in rows if name in row.results]
        if having:
            found = Counter(verdict(row, name) for row in having)
            pairs = [(row.results[name].median, best_of_bare(row).median) for row in having]
            ratios = [ours / best for ours, best in pairs]
            by = [ours - best for ours, best in pairs if ours > GOAL * best] or [0.0]
            lines.append(
                f"{name}: {found[WITHIN]} of {len(having)} cells within {GOAL} x the best bare"
                f" form, {found[NOT_TOLD_APART]} {NOT_TOLD_APART}, {found[ABOVE]} {ABOVE};"
                f" median {median(ratios):.2f}, worst {max(ratios):.2f}."
                f" Those that are not within take {median(by) / 1e3:.1f} us more, in the middle."
            )
    return "\n".join(lines)
