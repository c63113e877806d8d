"""The results of a trace: sums, memories and events, decoded from the extension's recorder.

Owns the decoding of the recorder's records, and the sums of one memory, of several memories, and of
a part of a memory.
"""

from __future__ import annotations

import difflib
import mmap
import operator
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from managedmem._managedmem import Device, Host, ManagedBuffer, PrefetchPlan
from managedmem._trace_memories import (
    REST,
    RawMemory,
    labelled,
    page_end,
    part_label,
    with_rests,
    with_system_memory,
    with_tails,
)

if TYPE_CHECKING:
    from managedmem._managedmem import Recorder

KINDS = (
    "move",
    "host_fault",
    "device_fault",
    "remote_map",
    "thrashing",
    "throttling",
    "duplicate",
    "duplicate_end",
    "eviction",
    "call",
)
CAUSES = (
    "unknown",
    "requested",
    "fault",
    "speculative",
    "eviction",
    "access_counters",
    "host_view",
)
ACCESSES = (None, "read", "write", "atomic")
OPERATIONS = ("advise", "prefetch", "discard", "discard_prefetch", "host_view", "copy", "wait")
ADVICES = (
    "set_read_mostly",
    "unset_read_mostly",
    "set_preferred_location",
    "unset_preferred_location",
    "set_accessed_by",
    "unset_accessed_by",
)
BY_FAULT = ("fault", "speculative")
PREFETCH, HOST_VIEW = OPERATIONS.index("prefetch"), OPERATIONS.index("host_view")
REMOTE_CAUSES = (None, "fault", "thrashing", "advice", "out_of_memory", "eviction")
"""KINDS, CAUSES, ACCESSES, OPERATIONS and REMOTE_CAUSES name the extension's numbers, from 0 on.
ADVICES names those of CUmem_advise, from 1 on."""

MOVE, HOST_FAULT, DEVICE_FAULT, REMOTE_MAP, THRASHING, THROTTLING, DUPLICATE = range(7)
DUPLICATE_END, EVICTION, CALL = 7, 8, 9
ON_HOST, NO_PROCESSOR, OTHER_PROCESSOR = -1, -2, 0x7FFF
_DIRECTIONS = ("to_device", "to_host", "between_devices")
_FAULTS = ("host_faults", "host_write_faults", "device_faults", "device_write_faults")
FIELDS = (
    *(f"{direction}_{cause}" for direction in _DIRECTIONS for cause in CAUSES),
    *_FAULTS,
    *("remote_mapped", "thrashing", "throttled", "duplicated", "evicted", "move_time"),
    *("turned_back", "turned_across"),
)
"""The sums of a row, as in the extension's sums.h."""
ROW = struct.Struct(f"<2I{len(FIELDS)}Q")
"""part, memory; the sums."""
TOTAL = 0xFFFFFFFF
"""The memory of the rows that count everything."""
RECORD = struct.Struct("<4QI2h4BI")
"""start, end, address, amount; memory; source, destination; kind, cause, access, flags; extra."""

_START = struct.Struct("<Q40x")
_KIND_OFFSET = 40
_ROUTE = struct.Struct("<32xI2hB7x")
_SECONDS = ("throttled", "move_time")
_SHOWN_CAUSES = (*CAUSES[1:], CAUSES[0])
_NEAREST = 5


@dataclass(frozen=True, kw_only=True, repr=False)
class TraceSums:
    """Sums over the events of a trace or of a slice.

    Bytes are counted for each move, so memory that moves twice counts twice. Sums of faults are
    numbers, None if the trace did not record them (``faults=False``). ``throttled`` and
    ``move_time`` are seconds, the other sums bytes. A fault is an access that the kernel module
    handled, which can bring many pages: 64 KiB to 1 MiB for the host on an H100. On the emulated
    driver each page that the host touches is a fault, and each 64 KiB that a device touches.
    ``duplicated`` are bytes copied for reading, by ``read_mostly``, while the original stayed.
    Immutable, so safe from every thread.
    """

    to_device: int
    """Bytes moved from the host to devices."""
    to_host: int
    """Bytes moved from devices to the host."""
    between_devices: int
    """Bytes moved from device to device."""
    by_cause: Mapping[str, tuple[int, int, int]] = field(hash=False)
    """The three sums above, in that order, by cause: "requested" (prefetches, and moves that an
    advice caused), "fault", "speculative" (moved along with a fault by the module's prediction),
    "eviction", "access_counters", "host_view" (brought to the host by ``numpy()`` or
    ``torch("cpu")``; some of those count as requested beyond the trace's ``limit``), "unknown"."""
    host_faults: int | None
    """Page faults of the host that the module handled."""
    host_write_faults: int | None
    """Page faults of the host that were writes."""
    device_faults: int | None
    """Page faults of devices; accesses of many threads to one page can count several times."""
    device_write_faults: int | None
    """Page faults of devices that were writes or atomic operations."""
    remote_mapped: int
    """Bytes that a processor got access to in place, in the memory of another processor."""
    thrashing: int
    """Bytes of pages that the module saw going back and forth."""
    throttled: float
    """Seconds for which the module held processors back, because of such pages."""
    duplicated: int
    """Bytes copied for reading, by ``read_mostly``, while the original stayed."""
    evicted: int
    """Bytes that had to leave a device for lack of memory."""
    move_time: float
    """Seconds in which something moved; moves at the same time count once."""
    turned_back: int
    """Bytes that went back where they came from within the trace, or within the slice."""

    @property
    def moved(self) -> int:
        """Bytes moved in all directions."""
        return self.to_device + self.to_host + self.between_devices

    def _nonzero(self) -> str:
        """The sums that are not 0."""
        amounts = ((f.name, getattr(self, f.name)) for f in fields(TraceSums))
        return "".join(f", {name}={n}" for name, n in amounts if n and name != "by_cause")

    def __repr__(self) -> str:
        return f"<TraceSums{self._nonzero()}>"

    def to_dict(self) -> dict[str, Any]:
        """The sums as a dict of numbers, for JSON."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name[0] != "_"}
        values["by_cause"] = {cause: list(moved) for cause, moved in self.by_cause.items()}
        return values


@dataclass(frozen=True, kw_only=True, repr=False)
class TraceMemory(TraceSums):
    """A memory that lived during a trace, with the sums of its events.

    Safe from every thread.
    """

    label: str
    """The name of the memory; for a buffer without one its dtype, shape and number."""
    nbytes: int
    """Size in bytes, without parts that have a name of their own; for several memories with one
    label, the size of the last."""
    address: int
    """Address of the first byte."""
    kind: str
    """"buffer" (allocated by managedmem), "named" (by `Trace.name`), "foreign" (allocated by
    others), "system" (malloc, NumPy) or "unknown" (freed before the driver could be asked)."""
    born: float | None
    """Seconds from the start of the trace to the allocation; None if it was there before, or if
    that is not known."""
    died: float | None
    """Seconds from the start of the trace to the free; None if the memory outlived the trace."""
    _results: Results = field(repr=False, compare=False)
    _indices: frozenset[int] = field(repr=False, compare=False)

    @property
    def _sizes(self) -> list[int]:
        """The sizes of the memories that count together here."""
        return sorted(self._results.memories[i].size for i in self._indices)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that the memory moved to or from, or that faulted on it, in order.

        Events beyond the trace's ``limit`` do not count.
        """
        ordinals = set().union(*(self._results.ordinals.get(i, ()) for i in self._indices))
        return tuple(Device(ordinal) for ordinal in sorted(ordinals))

    def __repr__(self) -> str:
        return f"<TraceMemory {self.label!r}, nbytes={self.nbytes}{self._nonzero()}>"

    def to_dict(self) -> dict[str, Any]:
        """The memory as a dict of numbers and strings, for JSON."""
        return {**super().to_dict(), "devices": [device.device_id for device in self.devices]}


class TraceEvent(NamedTuple):
    """One event of a trace.

    ``time`` is in seconds on the clock of ``time.perf_counter()``, ``duration`` in seconds.
    ``kind`` is "move", "host_fault", "device_fault", "remote_map", "thrashing", "throttling",
    "duplicate", "duplicate_end", "eviction", "call" or "mark".

    ``cause`` is why pages moved ("requested", "fault", "speculative", "eviction",
    "access_counters", "host_view", "unknown"), or were mapped remotely ("fault", "thrashing",
    "advice", "out_of_memory", "eviction"). For a call it is the advice or the operation
    ("host_view" for ``numpy()`` and ``torch("cpu")``), and for a mark the label; else None.
    ``access`` is "read", "write" or "atomic" for a fault.

    ``memory`` is the label of the memory, ``offset`` the bytes from its start, and ``nbytes`` the
    size, 0 for a fault. ``source`` and ``destination`` are a Device or Host(), or None where that
    does not apply or the device is not visible to the process. A device fault has the device as
    ``source``. ``thread`` is the system's number of the thread that faulted on the host.
    """

    time: float
    duration: float
    kind: str
    cause: str | None
    access: str | None
    memory: str | None
    offset: int
    nbytes: int
    source: Device | Host | None
    destination: Device | Host | None
    thread: int | None


class Selection(NamedTuple):
    """Memories selected by a key, as indices: all of ``whole``, and parts of ``cut``.

    Of a ``cut`` memory, the addresses from ``start`` to ``end`` count. ``extent`` is the address
    and the size of a selection that is one range.
    """

    label: str
    whole: frozenset[int]
    cut: frozenset[int] = frozenset()
    start: int = 0
    end: int = 1 << 64
    extent: tuple[int, int] | None = None


class Clock:
    """Converts the recorder's clock to ``time.perf_counter()``, by two readings of both."""

    def __init__(self, readings: tuple[int, int, int, int]) -> None:
        self.raw, self.monotonic, raw, monotonic = readings
        elapsed = raw - self.raw
        self.rate = (monotonic - self.monotonic) / elapsed if elapsed > 0 else 1.0

    def seconds(self, raw: int) -> float:
        """A time in seconds of ``time.perf_counter()``."""
        return self.monotonic / 1e9 + (raw - self.raw) * self.rate / 1e9

    def elapsed(self, start: int, end: int) -> float:
        """Seconds from one time to another."""
        return (end - start) * self.rate / 1e9

    def since_start(self, raw: int) -> float:
        """Seconds since the start of the trace."""
        return self.elapsed(self.raw, raw)


def target_range(target: Any) -> tuple[int, int]:
    """Address and size of a target: a buffer, an array or tensor, or ``(address, nbytes)``."""
    if isinstance(target, tuple) and len(target) == 2:
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in target):
            raise TypeError(f"a pair must be (address, nbytes), both int, got {target!r}")
        address, nbytes = target
        if address <= 0 or not 0 < nbytes < 1 << 63 or address + nbytes >= 1 << 64:
            raise ValueError(f"(address, nbytes) must be a range of addresses, got {target!r}")
        return address, nbytes
    if isinstance(target, ManagedBuffer) and target.is_closed:
        raise ValueError("the buffer is closed; its label finds its results")
    # A plan reads one target of any kind, and checks that its memory is managed.
    entry = PrefetchPlan().add(target, Host())[0]
    return entry.pointer, entry.nbytes


def read_rows(rows: bytes) -> dict[tuple[int, int], tuple[int, ...]]:
    """{(part, memory): sums by field} of a recorder's rows that are not all zero."""
    unpacked = ROW.iter_unpack(rows)
    return {(part, memory): tuple(sums) for part, memory, *sums in unpacked if any(sums)}


class Results:
    """One attribution of the recorder: memories, sums by part, events."""

    def __init__(self, recorder: Recorder, named: list[tuple[int, int, str]], faults: bool) -> None:
        memories, rows = recorder.attribute(named)
        widened = with_tails(named, memories)
        if widened != named:
            memories, rows = recorder.attribute(widened)
        self.rows = read_rows(rows)
        self.memories, self.covered = with_rests(
            [labelled(m) for m in with_system_memory([RawMemory(*m) for m in memories])],
            {memory for _, memory in self.rows},
        )
        self.parts = recorder.parts()
        self.records = recorder.events()
        self.clock = Clock(recorder.clock())
        self.truncated = bool(recorder.report()["truncated"])
        self.faults = faults
        self._ordinals: dict[int, set[int]] | None = None

    # --- sums -----------------------------------------------------------------------------------

    def sum_of(self, parts: Sequence[int], memories: Collection[int]) -> list[int]:
        """The sums of memories over parts, by field."""
        rows = [
            self.rows[key] for key in ((p, m) for p in parts for m in memories) if key in self.rows
        ]
        sums = [sum(column) for column in zip(*rows, strict=True)] or [0] * len(FIELDS)
        if len(parts) > 1:  # all parts: bytes that turned back across a mark count too
            sums[FIELDS.index("turned_back")] += sums[FIELDS.index("turned_across")]
        return sums

    def as_sums(self, values: Sequence[int]) -> dict[str, Any]:
        """Sums by field as the arguments of `TraceSums`."""
        given = dict(zip(FIELDS, values, strict=True))
        moved = {
            cause: tuple(given[f"{direction}_{cause}"] for direction in _DIRECTIONS)
            for cause in _SHOWN_CAUSES
        }
        plain = ("remote_mapped", "thrashing", "duplicated", "evicted", "turned_back")
        return {
            **dict(zip(_DIRECTIONS, map(sum, zip(*moved.values(), strict=True)), strict=True)),
            "by_cause": moved,
            **{name: given[name] if self.faults else None for name in _FAULTS},
            **{name: given[name] / 1e9 for name in _SECONDS},
            **{name: given[name] for name in plain},
        }

    def total(self, parts: Sequence[int]) -> TraceSums:
        """The sums of all events of the parts."""
        return TraceSums(**self.as_sums(self.sum_of(parts, [TOTAL])))

    def together(self, parts: Sequence[int], indices: Collection[int], label: str) -> TraceMemory:
        """Several memories as one."""
        return self._made(self.sum_of(parts, indices), indices, label)

    def _made(
        self,
        values: Sequence[int],
        indices: Collection[int],
        label: str,
        extent: tuple[int, int] | None = None,
    ) -> TraceMemory:
        raw = [self.memories[i] for i in indices]
        last = max(raw, key=lambda m: m.born, default=RawMemory("unknown", label, 0, 0, 0, -1))
        address, nbytes = extent or (last.address, last.size)
        first = min((m.born for m in raw), default=0)
        died = None
        if raw and not any(map(self.is_alive, raw)):
            died = self.clock.since_start(max(m.died for m in raw))
        return TraceMemory(
            **self.as_sums(values),
            label=label,
            nbytes=nbytes,
            address=address,
            kind=last.kind,
            born=self.clock.since_start(first) if first else None,
            died=died,
            _results=self,
            _indices=frozenset(indices),
        )

    # --- finding memories -----------------------------------------------------------------------

    def memories_of(self, parts: Sequence[int]) -> tuple[TraceMemory, ...]:
        """The memories that lived, except unknown ones and fully named ones, most bytes first."""
        end = self.parts[-1][1] if self.parts else 0
        indices = [
            self.together(parts, [i], memory.label)
            for i, memory in enumerate(self.memories)
            if memory.kind != "unknown" and memory.born <= end and i not in self.covered
        ]
        return tuple(sorted(indices, key=_busiest_first))

    def unattributed(self, parts: Sequence[int]) -> TraceMemory:
        """The sums of unknown memories."""
        unknown = [i for i, memory in enumerate(self.memories) if memory.kind == "unknown"]
        extent = (0, sum(self.memories[i].nbytes for i in unknown))
        values = self.sum_of(parts, unknown)
        return self._made(values, unknown, "(unattributed)", extent)

    def select(self, key: Any) -> Selection:
        """The memories that a label, a target or a `TraceMemory` means."""
        if isinstance(key, TraceMemory):
            if key._results is self:
                return Selection(key.label, key._indices)
            # The indices of an earlier reading can have another meaning now.
            known = any(memory.label == key.label for memory in self.memories)
            key = key.label if known else (key.address, key.nbytes)
        if isinstance(key, str):
            labels = [memory.label for memory in self.memories]
            same = (i for i, label in enumerate(labels) if label == key)
            indices = [i for i in same if i not in self.covered]
            return Selection(key, frozenset(indices)) if indices else self._with_names(key)
        start, nbytes = target_range(key)
        return self._at(start, start + nbytes, any_time=isinstance(key, tuple))

    def _with_names(self, label: str) -> Selection:
        """The memories of a label together with the parts of them that have names of their own."""
        split = {
            i: memory
            for i, memory in enumerate(self.memories)
            if memory.label == label + REST or (i in self.covered and memory.label == label)
        }
        if not split:
            raise KeyError(self._unknown(label))
        whole = set(split)
        cut: set[int] = set()
        for i, memory in enumerate(self.memories):
            around = [
                m for m in split.values() if m.address < memory.end and m.end > memory.address
            ]
            if memory.kind == "named" and around:
                inside = any(m.address <= memory.address and memory.end <= m.end for m in around)
                (whole if inside else cut).add(i)
        start = min(memory.address for memory in split.values())
        end = max(memory.end for memory in split.values())
        extent = (start, end - start) if len(split) == 1 else None
        return Selection(label, frozenset(whole), frozenset(cut), start, end, extent)

    def _unknown(self, label: str) -> str:
        known = sorted({memory.label for memory in self.memories if memory.kind != "unknown"})
        near = difflib.get_close_matches(label, known, n=_NEAREST, cutoff=0.0)
        if not near:
            return f"no memory named {label!r}: no memory lived during the trace"
        more = f" and {len(known) - len(near)} more" if len(known) > len(near) else ""
        return f"no memory named {label!r}; there are: {', '.join(near)}{more}"

    def _at(self, start: int, end: int, any_time: bool) -> Selection:
        """The memories at these addresses; only those alive at the end, unless `any_time`."""
        events = [
            (i, m)
            for i, m in enumerate(self.memories)
            if m.address < end and m.end > start and (any_time or self.is_alive(m))
        ]
        last = page_end(end)
        # Memory that managedmem allocates has whole pages.
        whole = [
            (i, m)
            for i, m in events
            if m.address >= start
            and (m.end <= end or (m.kind in ("buffer", "named") and m.end == last))
        ]
        exact = [(i, m) for i, m in whole if m.address == start and m.end >= end]
        extent = (start, end - start)
        for i, memory in exact:
            if memory.kind == "named":
                # The name lacks the events beyond the limit, which count for the memory.
                all_of_it = frozenset(j for j, _ in whole) if self.truncated else frozenset([i])
                return Selection(memory.label, all_of_it, extent=extent)
        cut = frozenset(i for i, _ in events) - {i for i, _ in whole}
        if exact:
            label = exact[-1][1].label.removesuffix(REST)
        else:
            label = part_label([memory for _, memory in events], start, end)
        if cut:  # faults and moves are of whole pages
            start, end = start // mmap.PAGESIZE * mmap.PAGESIZE, last
        return Selection(label, frozenset(i for i, _ in whole), cut, start, end, extent)

    def is_alive(self, memory: RawMemory) -> bool:
        """True if the memory lived at the end of the last part."""
        return memory.died < 0 or not self.parts or memory.died > self.parts[-1][1]

    def selected(self, parts: Sequence[int], key: Any) -> TraceMemory:
        """The memory that a key means, with its sums."""
        chosen = self.select(key)
        values = self.sum_of(parts, chosen.whole)
        if chosen.cut:
            if self.truncated:
                raise RuntimeError(
                    "the sums of a part of a memory need all events, and the trace did not keep "
                    "them: give managedmem.trace() a higher limit, or name the part with name()"
                )
            extra = _Cut(chosen.start, chosen.end)
            for record in self.raw_records(parts):
                if record[4] in chosen.cut:
                    extra.add(record)
            values = list(map(operator.add, values, extra.values()))
        return self._made(values, chosen.whole | chosen.cut, chosen.label, chosen.extent)

    def groups(self, parts: Sequence[int]) -> list[TraceMemory]:
        """The memories with events, merged by label, most bytes first."""
        return self._by_label(
            parts, {memory for part, memory in self.rows if part in parts and memory != TOTAL}
        )

    def prefetched(self, parts: Sequence[int]) -> list[TraceMemory]:
        """The memories that calls of this library prefetched, merged by label."""
        view = self._span(parts)
        kinds = view[_KIND_OFFSET :: RECORD.size].tobytes()
        memories, at = set(), kinds.find(CALL)
        while at >= 0:
            record = RECORD.unpack_from(view, at * RECORD.size)
            if record[8] == PREFETCH and record[4] < len(self.memories):
                memories.add(record[4])
            at = kinds.find(CALL, at + 1)
        return self._by_label(parts, memories)

    def _by_label(self, parts: Sequence[int], indices: Iterable[int]) -> list[TraceMemory]:
        labels: dict[str, list[int]] = {}
        for i in sorted(indices):
            if self.memories[i].kind != "unknown":
                labels.setdefault(self.memories[i].label, []).append(i)
        rows = [self.together(parts, indices, label) for label, indices in labels.items()]
        return sorted(rows, key=_busiest_first)

    # --- events ---------------------------------------------------------------------------------

    def _span(self, parts: Sequence[int]) -> memoryview:
        counts = [count for _, _, count in self.parts]
        first, last = sum(counts[: parts[0]]), sum(counts[: parts[-1] + 1])
        records: memoryview = self.records[first * RECORD.size : last * RECORD.size]
        return records

    def raw_records(self, parts: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """The records of consecutive parts in time order."""
        view = self._span(parts)
        starts = [start for (start,) in _START.iter_unpack(view)]
        if all(map(operator.le, starts, islice(starts, 1, None))):
            yield from RECORD.iter_unpack(view)
            return
        for i in sorted(range(len(starts)), key=starts.__getitem__):
            yield RECORD.unpack_from(view, i * RECORD.size)

    @property
    def ordinals(self) -> dict[int, set[int]]:
        """The ordinals of the devices in the events of each memory."""
        if self._ordinals is None:
            routes = set()
            for memory, source, destination, kind in _ROUTE.iter_unpack(self.records):
                if kind in (MOVE, DEVICE_FAULT):
                    routes.add((memory, source, destination))
            by_label: dict[int, set[int]] = {}
            for memory, *places in routes:
                ordinals = {n for n in places if 0 <= n < OTHER_PROCESSOR}
                by_label.setdefault(memory, set()).update(ordinals)
            self._ordinals = by_label
        return self._ordinals

    def events(
        self, parts: Sequence[int], kind: str | None, of: Any, marks: Mapping[int, str]
    ) -> Iterator[TraceEvent]:
        """The events of the parts, and the marks behind them, in time order."""
        if kind not in (None, "mark", *KINDS):
            raise ValueError(f"kind must be one of {', '.join((*KINDS, 'mark'))}, got {kind!r}")
        chosen = None if of is None else self.select(of)
        return self._events(parts, kind, chosen, marks if of is None else {})

    def _events(
        self,
        parts: Sequence[int],
        kind: str | None,
        chosen: Selection | None,
        marks: Mapping[int, str],
    ) -> Iterator[TraceEvent]:
        waiting = [(self.parts[p][1], marks[p]) for p in parts if p in marks]
        waiting = waiting if kind in (None, "mark") else []
        number = None if kind is None else KINDS.index(kind) if kind != "mark" else -1
        for record in self.raw_records(parts) if number != -1 else ():
            while waiting and waiting[0][0] <= record[0]:
                yield self._mark(*waiting.pop(0))
            if (number is None or record[7] == number) and _is_chosen(record, chosen):
                yield self._event(record)
        for each in waiting:
            yield self._mark(*each)

    def _mark(self, time: int, label: str) -> TraceEvent:
        seconds = self.clock.seconds(time)
        return TraceEvent(seconds, 0.0, "mark", label, None, None, 0, 0, None, None, None)

    def _event(self, record: tuple[int, ...]) -> TraceEvent:
        start, end, address, amount, index, source, destination, kind, cause, access = record[:10]
        memory = self.memories[index] if index < len(self.memories) else None
        return TraceEvent(
            self.clock.seconds(start),
            self.clock.elapsed(start, end),
            KINDS[kind],
            cause_text(kind, cause, record[11]),
            ACCESSES[access] if access < len(ACCESSES) else None,
            memory.label if memory else None,
            address - memory.address if memory else 0,
            0 if kind in (HOST_FAULT, DEVICE_FAULT, THROTTLING) else amount,
            place_of(source),
            place_of(destination),
            record[11] if kind == HOST_FAULT else None,
        )


def _busiest_first(memory: TraceMemory) -> tuple[int, int, int]:
    faults = (memory.host_faults or 0) + (memory.device_faults or 0)
    return -memory.moved, -faults, memory.address


def _is_chosen(record: tuple[int, ...], chosen: Selection | None) -> bool:
    if chosen is None or record[4] in chosen.whole:
        return True
    end = record[2] + max(record[3], 1)
    return record[4] in chosen.cut and record[2] < chosen.end and end > chosen.start


def cause_text(kind: int, cause: int, extra: int) -> str | None:
    """The cause of an event by the numbers of its record; for a call, the advice or operation."""
    if kind == CALL:
        if cause == 0 and 1 <= extra <= len(ADVICES):
            return ADVICES[extra - 1]
        return OPERATIONS[cause] if cause < len(OPERATIONS) else None
    if kind == REMOTE_MAP:
        return REMOTE_CAUSES[extra] if extra < len(REMOTE_CAUSES) else None
    if kind != MOVE:
        return None
    return CAUSES[cause] if cause < len(CAUSES) else CAUSES[0]


def place_of(number: int) -> Device | Host | None:
    """The processor of a number; None where there is none, or it is not visible."""
    if number == ON_HOST:
        return Host()
    return None if number in (NO_PROCESSOR, OTHER_PROCESSOR) else Device(number)


class _Cut:
    """Sums of the pieces of events that lie inside a range of addresses."""

    def __init__(self, start: int, end: int) -> None:
        self.sums = dict.fromkeys(FIELDS, 0)
        self.start, self.end = start, end
        self.moves: list[tuple[int, int]] = []
        self.last: dict[int, bool] = {}  # by page: last moved upwards; the host is lowest

    def add(self, record: tuple[int, ...]) -> None:
        """Add the part of an event that lies inside."""
        begin, finish, address, amount, _, source, destination, kind, cause, access = record[:10]
        if kind in (HOST_FAULT, DEVICE_FAULT, THROTTLING):
            if self.start <= address < self.end:
                self._add_instant(kind, access, finish - begin)
            return
        low, high = max(address, self.start), min(address + amount, self.end)
        if low >= high:
            return
        if kind == MOVE:
            direction = _DIRECTIONS[1 if destination < 0 else 0 if source < 0 else 2]
            name = CAUSES[cause] if cause < len(CAUSES) else CAUSES[0]
            self.sums[f"{direction}_{name}"] += high - low
            self.moves.append((begin, finish))
            self._turn(low, high, destination > source)
        elif kind in _BYTE_FIELDS:
            self.sums[_BYTE_FIELDS[kind]] += high - low

    def _add_instant(self, kind: int, access: int, duration: int) -> None:
        if kind == THROTTLING:
            self.sums["throttled"] += duration
            return
        side = "host" if kind == HOST_FAULT else "device"
        self.sums[f"{side}_faults"] += 1
        self.sums[f"{side}_write_faults"] += access in (2, 3)

    def _turn(self, low: int, high: int, upwards: bool) -> None:
        size = mmap.PAGESIZE
        for page in range(low // size, -(-high // size)):
            if self.last.get(page, upwards) != upwards:
                inside = min(high, (page + 1) * size) - max(low, page * size)
                self.sums["turned_back"] += inside
            self.last[page] = upwards

    def values(self) -> list[int]:
        """The sums by field."""
        covered = latest = 0
        for begin, finish in sorted(self.moves):
            covered += max(0, finish - max(begin, latest))
            latest = max(latest, finish)
        self.sums["move_time"] = covered
        return list(self.sums.values())


_BYTE_FIELDS = {
    REMOTE_MAP: "remote_mapped",
    THRASHING: "thrashing",
    DUPLICATE: "duplicated",
    EVICTION: "evicted",
}
