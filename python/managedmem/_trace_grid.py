"""The moves, faults and calls of a trace on a grid of lanes and columns of time.

A lane is a row of the table: a memory, the others together, or memory that is unknown. Events are
folded on the grid first, so the time of drawing does not depend on their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, NamedTuple

from managedmem._extras import need
from managedmem._trace_arrays import records_of
from managedmem._trace_results import (
    CALL,
    CAUSES,
    DEVICE_FAULT,
    HOST_FAULT,
    MOVE,
    REMOTE_MAP,
    THRASHING,
    THROTTLING,
)
from managedmem._units import label_text, size_text

if TYPE_CHECKING:
    from managedmem._trace_results import TraceSums
    from managedmem._trace_view import TraceView

COLUMNS = 320
"""The number of columns of a timeline: two pixels each at the width of a notebook."""
LANES = 12
"""At most this many memories have a lane of their own; the others share one more."""
LABEL = 28
"""A label on an axis is cut to this many characters."""
OTHERS = "({} others)"
UNKNOWN = "(freed before seen)"

TO_DEVICE, TO_DEVICE_BY_FAULT, BETWEEN_DEVICES = range(3)
TO_HOST, TO_HOST_BY_FAULT, EVICTED, VIEWED = range(3, 7)
MOVE_KINDS = 7
"""The kinds of moves that a timeline distinguishes."""
HOST_FAULTS, DEVICE_FAULTS, CALLS, REMOTE, CONTESTED = range(5)
"""The kinds of events without a duration that a timeline shows."""


class Lane(NamedTuple):
    """A row: its label with its size, the sums of its events, and its memories by index."""

    label: str
    sums: TraceSums
    indices: frozenset[int]


class Timeline(NamedTuple):
    """Sums by lane, kind and column: bytes that moved, and numbers of events.

    ``edges`` are the borders of the columns in nanoseconds from the beginning; ``marks`` the times
    and labels of the marks inside.
    """

    lanes: list[Lane]
    edges: Any
    moved: Any
    counted: Any
    marks: list[tuple[float, str]]


def short_label(label: str, most: int = LABEL) -> str:
    """A label for an axis, cut in the middle."""
    shown = label_text(label, len(label))
    if len(shown) <= most:
        return shown
    half = (most - 3) // 2
    return f"{shown[:half]}...{shown[half + 3 - most :]}"


def short_labels(labels: Sequence[str]) -> list[str]:
    """Labels for one axis: long ones without the words that all of them begin with."""
    long = [label for label in labels if len(label) > LABEL]
    shared = commonprefix(long) if len(long) > 1 else ""
    cut = max(shared.rfind(separator) for separator in ". /") + 1
    return [
        short_label(f"...{label[cut:]}" if cut > 3 and len(label) > LABEL else label)
        for label in labels
    ]


def lanes_of(part: TraceView, most: int = LANES) -> list[Lane]:
    """The rows of the table of a trace, without the total."""
    groups = part._groups()
    shown = groups if len(groups) <= most + 1 else groups[:most]
    lanes = []
    labels = short_labels([memory.label for memory in shown])
    for memory, label in zip(shown, labels, strict=True):
        sizes = [size_text(size) for size in memory._sizes]
        size = sizes[0] if sizes[0] == sizes[-1] else f"{sizes[0]}-{sizes[-1]}"
        count = f"{len(sizes)} x " if len(sizes) > 1 else ""
        lanes.append(Lane(f"{label}  {count}{size}", memory, memory._indices))
    rest = groups[len(shown) :]
    if rest:
        together = part._together(rest)
        lanes.append(Lane(OTHERS.format(len(rest)), together, together._indices))
    unknown = part.unattributed
    if unknown._nonzero():
        lanes.append(Lane(UNKNOWN, unknown, unknown._indices))
    return lanes


class Folding:
    """Folds the records of a part into columns."""

    def __init__(self, part: TraceView) -> None:
        self.np = np = need("numpy", "plot()")
        results, parts = part._results(), part._parts()
        self.lanes = lanes_of(part)
        records = records_of(results, parts)
        of_memory = np.full(len(results.memories) + 1, -1)
        for number, lane in enumerate(self.lanes):
            of_memory[list(lane.indices)] = number
        index = np.minimum(records["memory"], len(results.memories)).astype("i8")
        self.lane = of_memory[index]
        self.records = records[self.lane >= 0]
        self.lane = self.lane[self.lane >= 0]
        self.start, self.end = results.parts[parts[0]][0], results.parts[parts[-1]][1]
        self.length = max(self.end - self.start, 1)
        labels = part._whole()._labels
        self.marks = [
            (float(results.parts[p][1] - self.start), labels[p]) for p in parts if p < len(labels)
        ]

    def column(self, raw: Any) -> Any:
        """Times as positions on the axis of columns."""
        elapsed = self.np.clip(raw.astype("i8") - self.start, 0, self.length)
        return elapsed * (COLUMNS / self.length)

    def moved(self) -> Any:
        """Bytes by lane, kind of move and column. A long move is split by its time in columns."""
        np = self.np
        moves, lane = self.of_kind(MOVE)
        first, last = self.column(moves["start"]), self.column(moves["end"])
        last = np.maximum(last, first)
        amount = moves["amount"].astype("f8")
        base = (lane * MOVE_KINDS + self.kinds_of(moves)) * (COLUMNS + 2)
        begin = np.minimum(np.floor(first).astype("i8"), COLUMNS - 1)
        stop = np.minimum(np.floor(last).astype("i8"), COLUMNS - 1)
        size = len(self.lanes) * MOVE_KINDS * (COLUMNS + 2)
        inside = begin == stop
        counts = np.bincount((base + begin)[inside], weights=amount[inside], minlength=size).astype(
            "f8"
        )  # bincount() gives integers if there are no such moves
        base, begin, stop, first, last, amount = (
            each[~inside] for each in (base, begin, stop, first, last, amount)
        )
        rate = amount / (last - first)
        counts += np.bincount(base + begin, weights=rate * (begin + 1 - first), minlength=size)
        counts += np.bincount(base + stop, weights=rate * (last - stop), minlength=size)
        whole = np.bincount(base + begin + 1, weights=rate, minlength=size).astype("f8")
        whole -= np.bincount(base + stop, weights=rate, minlength=size)
        shape = (len(self.lanes), MOVE_KINDS, COLUMNS + 2)
        whole = whole.reshape(shape).cumsum(axis=2)
        whole[whole < 1e-6 * max(whole.max(initial=0), 1)] = 0  # rounding
        return (counts.reshape(shape) + whole)[:, :, :COLUMNS]

    def of_kind(self, *kinds: int) -> tuple[Any, Any]:
        """The records of some kinds, and their lanes."""
        chosen = self.np.isin(self.records["kind"], kinds)
        return self.records[chosen], self.lane[chosen]

    def kinds_of(self, moves: Any) -> Any:
        """The kinds of moves."""
        np = self.np
        requested = moves["cause"] == CAUSES.index("requested")
        to_host = np.where(requested, TO_HOST, TO_HOST_BY_FAULT)
        to_host = np.where(moves["cause"] == CAUSES.index("eviction"), EVICTED, to_host)
        to_host = np.where(moves["cause"] == CAUSES.index("host_view"), VIEWED, to_host)
        to_device = np.where(requested, TO_DEVICE, TO_DEVICE_BY_FAULT)
        to_device = np.where(moves["source"] < 0, to_device, BETWEEN_DEVICES)
        return np.where(moves["destination"] < 0, to_host, to_device)

    def counted(self) -> Any:
        """Numbers of events by lane, kind and column."""
        np = self.np
        cells = np.zeros((len(self.lanes), 5, COLUMNS), "i8")
        kinds = ((HOST_FAULT,), (DEVICE_FAULT,), (CALL,), (REMOTE_MAP,), (THRASHING, THROTTLING))
        for number, kind in enumerate(kinds):
            records, lane = self.of_kind(*kind)
            column = np.minimum(self.column(records["start"]).astype("i8"), COLUMNS - 1)
            counts = np.bincount(lane * COLUMNS + column, minlength=len(self.lanes) * COLUMNS)
            cells[:, number] = counts.reshape(len(self.lanes), COLUMNS)
        return cells


def timeline_of(part: TraceView) -> Timeline:
    """The timeline of a trace or a slice."""
    folding = Folding(part)
    edges = folding.np.linspace(0, folding.length, COLUMNS + 1)
    return Timeline(folding.lanes, edges, folding.moved(), folding.counted(), folding.marks)
