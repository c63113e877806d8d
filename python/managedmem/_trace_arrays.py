"""The records of a trace as NumPy arrays, and its events as a pandas.DataFrame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from managedmem._extras import need
from managedmem._trace_results import (
    ACCESSES,
    CALL,
    DEVICE_FAULT,
    HOST_FAULT,
    KINDS,
    RECORD,
    REMOTE_MAP,
    THROTTLING,
    cause_text,
    place_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from managedmem._trace_results import Results
    from managedmem._trace_view import TraceView

FIELDS = (
    *((name, "<u8") for name in ("start", "end", "address", "amount")),
    ("memory", "<u4"),
    *((name, "<i2") for name in ("source", "destination")),
    *((name, "u1") for name in ("kind", "cause", "access", "flags")),
    ("extra", "<u4"),
)
MARK = len(KINDS)
"""The kind of marks, after the recorder's kinds."""


def records_of(results: Results, parts: Sequence[int]) -> Any:
    """The records of consecutive parts in time order, as a structured array."""
    np = need("numpy", "this function")
    layout = np.dtype(list(FIELDS))
    assert layout.itemsize == RECORD.size
    records = np.frombuffer(results._span(parts), layout)
    starts = records["start"]
    if (starts[1:] >= starts[:-1]).all():
        return records
    return records[np.argsort(starts, kind="stable")]


def seconds_of(results: Results, raw: Any) -> Any:
    """Times of the recorder in seconds of ``time.perf_counter()``."""
    clock = results.clock
    elapsed = raw.astype("i8") - clock.raw
    return clock.monotonic / 1e9 + elapsed * clock.rate / 1e9


def _categories(pd: Any, codes: Any, texts: Sequence[str | None]) -> Any:
    """A column of texts. `codes` are indices of `texts`; the text None is a missing value."""
    np = need("numpy", "to_pandas()")
    known = [text for text in dict.fromkeys(texts) if text is not None]
    places = np.array([-1 if text is None else known.index(text) for text in texts], dtype="i8")
    chosen = places[codes] if len(texts) else np.full(len(codes), -1)
    return pd.Categorical.from_codes(chosen, categories=known)


class Table:
    """The columns of the events of a part, with its marks at their times."""

    def __init__(self, part: TraceView) -> None:
        self.pd = need("pandas", "to_pandas()")
        self.np = need("numpy", "to_pandas()")
        self.results, self.parts = part._results(), part._parts()
        labels = part._whole()._labels
        self.marks = [p for p in self.parts if p < len(labels)]
        self.labels = [*labels, "end"]
        times = [self.results.parts[p][1] for p in self.marks]
        events = records_of(self.results, self.parts)
        marks = self.np.zeros(len(times), events.dtype)
        marks["start"] = marks["end"] = times
        marks["kind"], marks["memory"] = MARK, 0xFFFFFFFF
        marks["source"] = marks["destination"] = -2
        records = self.np.concatenate([marks, events])  # a mark comes before events at its time
        order = self.np.argsort(records["start"], kind="stable")
        self.records = records[order]
        self.slices = self.np.concatenate([self.np.array(self.marks, "i8"), self._slices()])[order]

    def _slices(self) -> Any:
        """The part of each record, in time order."""
        counts = [self.results.parts[p][2] for p in self.parts]
        parts = self.np.repeat(self.np.array(self.parts, "i8"), counts)
        unsorted = self.np.frombuffer(self.results._span(self.parts), list(FIELDS))["start"]
        return parts[self.np.argsort(unsorted, kind="stable")]

    def frame(self) -> Any:
        """The events as a DataFrame."""
        records, clock = self.records, self.results.clock
        kind = records["kind"]
        faults = self.np.isin(kind, (HOST_FAULT, DEVICE_FAULT, THROTTLING, MARK))
        return self.pd.DataFrame(
            {
                "time": seconds_of(self.results, records["start"]),
                "duration": (records["end"] - records["start"]).astype("f8") * clock.rate / 1e9,
                "kind": self.pd.Categorical.from_codes(kind, categories=[*KINDS, "mark"]),
                "cause": self._causes(),
                "access": self._accesses(),
                "memory": self._memories(),
                "offset": self._offsets(),
                "nbytes": self.np.where(faults, 0, records["amount"]).astype("i8"),
                "source": self._places("source"),
                "destination": self._places("destination"),
                "thread": self._threads(),
                "slice": _categories(self.pd, self.slices, self.labels),
            }
        )

    def _causes(self) -> Any:
        records = self.records
        extra = self.np.where(
            self.np.isin(records["kind"], (CALL, REMOTE_MAP)), records["extra"], 0
        )
        extra = self.np.where(records["kind"] == MARK, self.slices, extra).astype("i8")
        codes = (extra << 16) + (records["kind"].astype("i8") << 8) + records["cause"]
        values, places = self.np.unique(codes, return_inverse=True)
        texts = [self._cause(int(v) >> 8 & 0xFF, int(v) & 0xFF, int(v) >> 16) for v in values]
        return _categories(self.pd, places, texts)

    def _cause(self, kind: int, cause: int, extra: int) -> str | None:
        return self.labels[extra] if kind == MARK else cause_text(kind, cause, extra)

    def _accesses(self) -> Any:
        codes = self.records["access"]
        known = self.np.where(codes < len(ACCESSES), codes, 0)
        return _categories(self.pd, known, ACCESSES)

    def _memories(self) -> Any:
        memories = self.results.memories
        known = self.np.minimum(self.records["memory"].astype("i8"), len(memories))
        return _categories(self.pd, known, [*(m.label for m in memories), None])

    def _offsets(self) -> Any:
        memories = self.results.memories
        starts = self.np.array([*(m.address for m in memories), 0], "u8")
        known = self.np.minimum(self.records["memory"].astype("i8"), len(memories))
        offsets = (self.records["address"] - starts[known]).astype("i8")
        return self.np.where(known < len(memories), offsets, 0)

    def _places(self, field: str) -> Any:
        values, places = self.np.unique(self.records[field], return_inverse=True)
        locations = [place_of(int(value)) for value in values]
        return _categories(
            self.pd, places, [None if place is None else str(place) for place in locations]
        )

    def _threads(self) -> Any:
        missing = self.records["kind"] != HOST_FAULT
        return self.pd.arrays.IntegerArray(self.records["extra"].astype("i8"), missing.copy())


def frame_of(part: TraceView) -> Any:
    """The events of a trace or a slice as a DataFrame."""
    return Table(part).frame()
