"""The places of pages over time, replayed from the events of a trace, on a grid of cells.

A move says where its pages were before and after. So the place of a page is known from its first
event on, and also before that event if it is a move. Nothing is guessed: other places are unknown.

All arithmetic is on arrays. Addresses are cut into segments at the borders of all events; each
event becomes one entry for each of its segments; each entry and the next one of its segment make a
rectangle of one place; rectangles add their areas to the cells.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from managedmem._extras import need
from managedmem._trace_arrays import records_of
from managedmem._trace_results import (
    CALL,
    DUPLICATE,
    DUPLICATE_END,
    HOST_FAULT,
    MOVE,
    ON_HOST,
    OPERATIONS,
    OTHER_PROCESSOR,
    REMOTE_MAP,
)

if TYPE_CHECKING:
    from managedmem._trace_results import Results, Selection
    from managedmem._trace_view import TraceView

NO_MEMORY, UNKNOWN, HOST, COPIES, MIXED, DEVICE = range(6)
"""Places. COPIES: the pages are on several processors. MIXED: only cells of a grid have this place.
DEVICE and the numbers after it are the devices in the order of their ordinals; the last number is
for all devices that are not visible."""

ROWS, COLUMNS = 512, 512
"""A grid has at most this many rows and columns."""
CLEAR = 0.6
"""A cell whose pages stay is shown with a place if at least this part of it has that place."""
CHANGED, RESTLESS = 0.5, 1.5
"""Pages of a cell changed once if their average number of changes lies between these two. Such a
cell has the place where its pages were for the longer time."""
MOST_ENTRIES = 1 << 22
"""About this many entries are replayed at a time, which bounds the memory in use."""

DISCARDS = tuple(i for i, name in enumerate(OPERATIONS) if name.startswith("discard"))


class Grid(NamedTuple):
    """The places of the cells, row by row, and the meaning of the rows.

    ``runs`` are the ranges of addresses, which lie end to end in the rows. ``ordinals`` are the
    devices of the places from DEVICE on.
    """

    cells: Any
    nbytes: int
    runs: list[tuple[int, int]]
    ordinals: list[int]


class Changes(NamedTuple):
    """Events as arrays: the time, the bytes (counted in all runs end to end), and their new place.

    ``before`` is the place before the event, UNKNOWN if not recorded. ``weak`` events count only
    where the place was unknown.
    """

    time: Any
    start: Any
    end: Any
    place: Any
    before: Any
    weak: Any


class History:
    """The changes of place of the chosen memory until the end of a part."""

    def __init__(self, part: TraceView, target: Any) -> None:
        self.np = need("numpy", "plot_pages()")
        self.results: Results = part._results()
        self.parts = part._parts()
        chosen = self.results.select(target)
        self.label = chosen.label
        self.indices = sorted(chosen.whole | chosen.cut)
        self.runs = merged(self.ranges(chosen))
        self.sizes = self.np.array([end - start for start, end in self.runs], "i8")
        self.nbytes = int(self.sizes.sum())
        self.window = self.results.parts[self.parts[0]][0], self.results.parts[self.parts[-1]][1]
        self.ordinals: list[int] = []

    def ranges(self, chosen: Selection) -> Iterator[tuple[int, int]]:
        """The addresses of the chosen memories, or the requested ones if no memory was there."""
        for i in self.indices:
            memory = self.results.memories[i]
            if i in chosen.cut:
                yield max(memory.address, chosen.start), min(memory.end, chosen.end)
            else:
                yield memory.address, memory.end
        if not self.indices and chosen.extent:
            yield chosen.extent[0], sum(chosen.extent)

    def records(self) -> Any:
        """The records of the memories from the beginning of the trace on."""
        records = records_of(self.results, range(self.parts[-1] + 1))
        return records[self.np.isin(records["memory"], self.np.array(self.indices, "u4"))]

    def places(self, numbers: Any) -> Any:
        """The places that stand for processors, given as numbers."""
        ordinals = self.np.array(self.ordinals, "i8")
        devices = DEVICE + self.np.searchsorted(ordinals, numbers)
        return self.np.where(
            numbers == ON_HOST, HOST, self.np.where(numbers >= 0, devices, UNKNOWN)
        )

    def note_devices(self, records: Any) -> None:
        """Find the devices that pages were on."""
        moves = records[self.np.isin(records["kind"], (MOVE, REMOTE_MAP, DUPLICATE_END))]
        numbers = self.np.concatenate([moves["source"], moves["destination"]])
        self.ordinals = [int(n) for n in self.np.unique(numbers) if n >= 0]

    def changes(self) -> Changes:
        """The changes in time order."""
        records = self.records()
        self.note_devices(records)
        kind = records["kind"]
        discards = (kind == CALL) & self.np.isin(records["cause"], DISCARDS)
        places = [
            # At the start of the move, because copies of read_mostly are noted before its end.
            self.of_kind(records[kind == MOVE], "start", "destination", "source"),
            self.of_kind(records[kind == DUPLICATE], "start", COPIES, UNKNOWN),
            self.of_kind(records[kind == DUPLICATE_END], "start", "destination", COPIES),
            self.of_kind(records[kind == REMOTE_MAP], "start", "destination", "destination"),
            self.of_kind(records[discards], "end", UNKNOWN, UNKNOWN),
            self.of_kind(records[kind == HOST_FAULT], "start", HOST, UNKNOWN, weak=True),
            *self.lives(),
        ]
        together = Changes(*map(self.np.concatenate, zip(*places, strict=True)))
        order = self.np.argsort(together.time, kind="stable")
        return Changes(*(column[order] for column in together))

    def of_kind(
        self, records: Any, time: str, place: str | int, before: str | int, weak: bool = False
    ) -> Changes:
        """The changes by records of one kind; `place` and `before` are places or field names."""
        count = len(records)
        start = records["address"].astype("i8")
        size = self.np.full(count, mmap.PAGESIZE) if weak else records["amount"].astype("i8")
        after, earlier = (
            self.places(records[each].astype("i8"))
            if isinstance(each, str)
            else self.np.full(count, each)
            for each in (place, before)
        )
        times, weaks = records[time].astype("i8"), self.np.full(count, weak)
        return self.laid_out(Changes(times, start, start + size, after, earlier, weaks))

    def lives(self) -> Iterator[Changes]:
        """The births and deaths of the memories."""
        np = self.np
        for i in self.indices:
            memory = self.results.memories[i]
            for time, place, before in (
                (memory.born, UNKNOWN, NO_MEMORY),
                (memory.died, NO_MEMORY, UNKNOWN),
            ):
                if time > 0:
                    columns = (time, memory.address, memory.end, place, before, False)
                    yield self.laid_out(Changes(*(np.array([each]) for each in columns)))

    def laid_out(self, changes: Changes) -> Changes:
        """The changes with offsets in the runs, laid end to end, instead of addresses."""
        np = self.np
        starts = np.array([start for start, _ in self.runs] or [0], "i8")
        ends = np.array([end for _, end in self.runs] or [0], "i8")
        offsets = np.concatenate([[0], self.sizes.cumsum()])[: len(starts)]
        run = np.maximum(np.searchsorted(starts, changes.start, side="right") - 1, 0)
        low = np.clip(changes.start, starts[run], ends[run]) - starts[run] + offsets[run]
        high = np.clip(changes.end, starts[run], ends[run]) - starts[run] + offsets[run]
        keep = low < high
        moved = changes._replace(start=low, end=high)
        return Changes(*(column[keep] for column in moved))


def merged(ranges: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in the order of addresses; those that overlap or touch become one."""
    spans: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        elif start < end:
            spans.append((start, end))
    return spans


class Areas:
    """Sums up the areas of rectangles in cells, for each place.

    Along one axis, a rectangle covers a part of its first cell, the cells between, and a part of
    its last cell. The covered parts of neighbours differ at up to four cells. So in two axes a
    rectangle is sixteen numbers in a table of differences; the running sums of the table are the
    areas.
    """

    def __init__(self, np: Any, places: int, rows: int, columns: int) -> None:
        self.np, self.shape = np, (places, rows + 2, columns + 2)
        self.table = np.zeros(places * (rows + 2) * (columns + 2))

    def differences(self, low: Any, high: Any) -> Iterator[tuple[Any, Any]]:
        """Cells along one axis, and the differences there, for parts from `low` to `high`."""
        for at, sign in ((low, -1), (high, 1)):
            cell = self.np.floor(at).astype("i8")
            beyond = at - cell
            yield cell, sign * (beyond - 1)
            yield cell + 1, -sign * beyond

    def add(self, place: Any, rows: tuple[Any, Any], columns: tuple[Any, Any], chosen: Any) -> None:
        """Add the chosen rectangles, given by places, and by borders in rows and in columns."""
        place = self.np.broadcast_to(place, chosen.shape)[chosen]
        rows, columns = ((low[chosen], high[chosen]) for low, high in (rows, columns))
        across = list(self.differences(*columns))
        for row, down in self.differences(*rows):
            base = (place * self.shape[1] + row) * self.shape[2]
            for column, along in across:
                self.table += self.np.bincount(
                    base + column, weights=down * along, minlength=len(self.table)
                )

    def sums(self) -> Any:
        """The areas by place, row and column."""
        sums = self.table.reshape(self.shape).cumsum(axis=1).cumsum(axis=2)
        return sums[:, :-2, :-2]


def replayed(np: Any, changes: Changes, nbytes: int, end: int) -> Iterator[tuple[Any, ...]]:
    """Rectangles of one place as arrays: place, first and last byte, first and last time.

    The last array says whether the place changed at the first time.
    """
    borders = np.unique(np.concatenate([changes.start, changes.end, [0, nbytes]]))
    first = np.searchsorted(borders, changes.start)
    last = np.searchsorted(borders, changes.end)
    load = np.bincount(first, minlength=len(borders)) - np.bincount(last, minlength=len(borders))
    turns = np.cumsum(np.cumsum(load) + 1) // MOST_ENTRIES
    limits = [0, *(np.flatnonzero(np.diff(turns)) + 1), len(borders) - 1]
    for low, high in pairwise(limits):
        if low < high:
            yield from of_segments(np, changes, borders, (first, last), (low, high), end)


def of_segments(
    np: Any,
    changes: Changes,
    borders: Any,
    spans: tuple[Any, Any],
    limits: tuple[int, int],
    end: int,
) -> Iterator[tuple[Any, ...]]:
    """The rectangles of the segments between two limits."""
    first, last = (np.clip(span, *limits) for span in spans)
    count = last - first
    event = np.repeat(np.arange(len(count)), count)
    segment = np.arange(len(event)) - np.repeat(count.cumsum() - count - first, count)
    order = np.argsort(segment, kind="stable")
    event, segment = event[order], segment[order]
    begins = np.diff(segment, prepend=-1) != 0
    uncertain = begins | (np.roll(changes.place[event], 1) == UNKNOWN)
    keep = ~changes.weak[event] | uncertain
    event, segment = event[keep], segment[keep]
    begins = np.diff(segment, prepend=-1) != 0
    time = changes.time[event]
    until = np.where(np.roll(begins, -1), end, np.roll(time, -1))
    before = np.where(begins, changes.before[event], np.roll(changes.place[event], 1))
    changed = before != changes.place[event]
    yield changes.place[event], borders[segment], borders[segment + 1], time, until, changed
    opening, covered = event[begins], segment[begins]
    zeros = np.zeros(len(opening), "i8")
    yield (
        changes.before[opening],
        borders[covered],
        borders[covered + 1],
        zeros,
        changes.time[opening],
        zeros > 0,
    )
    bare = np.setdiff1d(np.arange(*limits), covered)
    zeros = np.zeros(len(bare), "i8")
    yield zeros + UNKNOWN, borders[bare], borders[bare + 1], zeros, zeros + end, zeros > 0


def grid_of(history: History) -> Grid:
    """The places of the pages of a history, in its window of time."""
    np = history.np
    changes = history.changes()
    start, end = history.window
    length = max(end - start, 1)
    pages = -(-history.nbytes // mmap.PAGESIZE)
    rows, columns = max(min(pages, ROWS), 1), COLUMNS
    turns = DEVICE + len(history.ordinals)  # the changes, added up like the area of one more place
    areas = Areas(np, turns + 1, rows, columns)
    per_byte = rows / max(history.nbytes, 1)
    for place, low, high, first, last, changed in replayed(np, changes, history.nbytes, end):
        begin, until = (
            (np.clip(t, start, end) - start) * (columns / length) for t in (first, last)
        )
        down = low * per_byte, high * per_byte
        seen = until > begin
        areas.add(place, down, (begin, until), seen)
        column = np.minimum(np.floor(begin), columns - 1)
        areas.add(turns, down, (column, column + 1), changed & (first > start) & (first < end))
    sums = areas.sums()
    return Grid(
        dominant(np, sums[:turns], sums[turns]), history.nbytes, history.runs, history.ordinals
    )


def dominant(np: Any, areas: Any, turns: Any) -> Any:
    """The place of each cell; MIXED where none is clear."""
    total = areas.sum(axis=0)
    clear = (turns > CHANGED) | (areas.max(axis=0) >= CLEAR * total)
    clear &= turns < RESTLESS
    largest = np.where(clear, areas.argmax(axis=0), MIXED)
    return np.where(total > 1e-9, largest, NO_MEMORY)


def device_names(ordinals: Sequence[int]) -> list[str]:
    """The names of the places from DEVICE on."""
    return [
        "on a device that is not visible" if ordinal == OTHER_PROCESSOR else f"on Device({ordinal})"
        for ordinal in ordinals
    ]
