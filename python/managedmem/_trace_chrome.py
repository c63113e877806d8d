"""Writes a trace as JSON of the Trace Event Format, which Perfetto and chrome://tracing open.

One process, which ``_trace_ranks`` names, has a row for the calls of the library, and one for each
memory. Slices of a row must not overlap in that format, so moves at the same time take further
rows. The numbers of rows are no process or thread numbers of a system, because viewers join the
rows of several files that have the same number.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from managedmem._trace_ranks import clock_name, process_name, rank_of_process
from managedmem._trace_results import (
    CALL,
    CAUSES,
    DEVICE_FAULT,
    DUPLICATE,
    DUPLICATE_END,
    HOST_FAULT,
    HOST_VIEW,
    KINDS,
    MOVE,
    OPERATIONS,
    PREFETCH,
    REMOTE_MAP,
    THROTTLING,
    cause_text,
    place_of,
)

if TYPE_CHECKING:
    from managedmem._trace_results import Results
    from managedmem._trace_view import TraceView

PROCESS = 1_000_000_000
CALLS = "calls of managedmem"
UNKNOWN = "(freed before it was seen)"
BIN = 1_000_000
COUNTED = {
    HOST_FAULT: ("host faults", "faults"),
    DEVICE_FAULT: ("device faults", "faults"),
    DUPLICATE: ("copies of read_mostly", "bytes"),
    DUPLICATE_END: ("dropped copies of read_mostly", "bytes"),
}
"""Events of single pages become counters by ms: their names and units."""
ADVISE = OPERATIONS.index("advise")
REQUESTED, VIEWED = CAUSES.index("requested"), CAUSES.index("host_view")
MOST_WAITING, MOST_LABELS = 64, 8
"""The most calls of a memory that wait for their moves, and the most memories that a call names."""


class Rows:
    """The rows of the picture: one for calls, and for each memory one per overlapping move."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.ends: dict[str, list[tuple[int, int]]] = {}  # by label: row, end of its last slice
        self.last = PROCESS
        self.new: list[str] = []

    def label(self, memory: int) -> str:
        """The label of a memory by its index."""
        memories = self.results.memories
        if memory >= len(memories) or memories[memory].kind == "unknown":
            return UNKNOWN
        return memories[memory].label

    def place(self, label: str, start: int, end: int) -> int:
        """Take the first row of a memory that is free from `start` on, and return its number."""
        rows = self.ends.setdefault(label, [])
        for i, (row, free) in enumerate(rows):
            if free <= start:
                rows[i] = row, end
                return row
        self.last += 1
        rows.append((self.last, end))
        shown = label if len(rows) == 1 else f"{label} ({len(rows)})"
        self.new.extend(named_row(self.last, shown))
        return self.last

    def first(self, label: str) -> int:
        """The number of the first row of a memory."""
        if label not in self.ends:
            return self.place(label, 0, 0)
        return self.ends[label][0][0]

    def described(self) -> list[str]:
        """The descriptions of the rows that are new since the last call of this method."""
        rows, self.new = self.new, []
        return rows


def named_row(row: int, name: str) -> Iterator[str]:
    """The events that give a row its name and its place."""
    for kind, value in (("name", json.dumps({"name": name})), ("sort_index", None)):
        shown = value or json.dumps({"sort_index": row - PROCESS})
        yield f'{{"ph":"M","name":"thread_{kind}","pid":{PROCESS},"tid":{row},"args":{shown}}}'


def place_text(row: int, nanoseconds: int) -> str:
    """The row and the time of an event."""
    return f'"pid":{PROCESS},"tid":{row},"ts":{nanoseconds / 1e3:.3f}'


class Flows:
    """Finds the call from which a requested move, or a move of a host view, comes."""

    def __init__(self) -> None:
        self.waiting: dict[int, list[tuple[int, ...]]] = {}  # calls without a move, by memory
        self.count = 0

    def called(self, record: tuple[int, ...]) -> None:
        """Note a call that can move memory."""
        start, end = record[2], record[2] + record[3]
        calls = self.waiting.setdefault(record[4], [])
        calls[:] = [c for c in calls if not (start <= c[2] and c[2] + c[3] <= end)][-MOST_WAITING:]
        calls.append(record)

    def moved(self, record: tuple[int, ...]) -> tuple[int, ...] | None:
        """The latest call that a move can come from, if it is that call's first move; else None."""
        start, end = record[2], record[2] + record[3]
        calls = self.waiting.get(record[4], [])
        for i, call in reversed(list(enumerate(calls))):
            overlaps = call[2] < end and start < call[2] + call[3]
            there = call[8] == ADVISE or call[6] == record[6]
            alike = (call[8] == HOST_VIEW) == (record[8] == VIEWED)
            if overlaps and there and alike and call[0] <= record[0]:
                self.count += 1
                return calls.pop(i)
        return None


class Counters:
    """Sums of small events by memory and ms, as counters that fall back to 0."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, int], dict[int, int]] = {}

    def add(self, label: str, kind: int, nanoseconds: int, amount: int) -> None:
        """Add an event."""
        sums = self.sums.setdefault((label, kind), {})
        at = nanoseconds // BIN
        sums[at] = sums.get(at, 0) + amount

    def written(self) -> Iterator[str]:
        """The counters as events."""
        for (label, kind), sums in self.sums.items():
            name = json.dumps(f"{label}: {COUNTED[kind][0]} per ms")
            for at in sorted({*sums, *(i + 1 for i in sums)}):
                yield (
                    f'{{"ph":"C","name":{name},"pid":{PROCESS},"tid":{PROCESS},'
                    f'"ts":{at * BIN / 1e3:.3f},'
                    f'"args":{{"{COUNTED[kind][1]}":{sums.get(at, 0)}}}}}'
                )


class Writer:
    """Turns the records of a part into events, in time order."""

    def __init__(self, part: TraceView) -> None:
        self.part = part
        self.results = part._results()
        self.rows = Rows(self.results)
        self.flows = Flows()
        self.counters = Counters()
        self.words: dict[tuple[int, ...], tuple[str, str]] = {}
        self.calls: dict[int, str] = {}  # the place of each call, by its start
        self.pending: list[tuple[int, ...]] = []  # the records of one call, one for each memory

    def nanoseconds(self, raw: int) -> int:
        """A time of the recorder on the clock of ``time.perf_counter_ns()``."""
        clock = self.results.clock
        return clock.monotonic + round((raw - clock.raw) * clock.rate)

    def events(self) -> Iterator[str]:
        """All events of the part."""
        name = json.dumps({"name": process_name()})
        yield f'{{"ph":"M","name":"process_name","pid":{PROCESS},"tid":{PROCESS},"args":{name}}}'
        self.rows.place(CALLS, 0, 0)
        yield from self.rows.described()
        for record in self.results.raw_records(self.part._parts()):
            yield from self.of_record(record)
        yield from self.written_call()
        yield from self.counters.written()
        yield from self.marks()

    def marks(self) -> Iterator[str]:
        """The marks of the part, as lines across all rows."""
        for event in self.part.events("mark"):
            yield (
                f'{{"ph":"i","s":"p","name":{json.dumps(event.cause)},"cat":"mark",'
                f'"pid":{PROCESS},"tid":{PROCESS},"ts":{event.time * 1e6:.3f}}}'
            )

    def of_record(self, record: tuple[int, ...]) -> Iterator[str]:
        """The events of one record."""
        kind, label = record[7], self.rows.label(record[4])
        start = self.nanoseconds(record[0])
        if kind in COUNTED:
            self.counters.add(label, kind, start, record[3])
            return
        if kind == CALL:
            yield from self.of_call(record)
            return
        end = max(self.nanoseconds(record[1]), start)
        lasting = kind in (MOVE, THROTTLING)
        row = self.rows.place(label, start, end) if lasting else self.rows.first(label)
        yield from self.rows.described()
        at = place_text(row, start)
        name, more = self.text_of(record)
        args = f'"args":{{"bytes":{record[3]},"offset":{self.offset_of(record)}{more}}}'
        if not lasting:
            yield f'{{"ph":"i","s":"t","name":{name},"cat":"{KINDS[kind]}",{at},{args}}}'
            return
        duration = (end - start) / 1e3
        yield f'{{"ph":"X","name":{name},"cat":"{KINDS[kind]}",{at},"dur":{duration:.3f},{args}}}'
        call = (
            self.flows.moved(record) if kind == MOVE and record[8] in (REQUESTED, VIEWED) else None
        )
        if call is not None:
            if call[0] not in self.calls:
                yield from self.written_call()
            flow = f'"name":"asked","cat":"flow","id":{self.flows.count}'
            yield f'{{"ph":"s",{flow},{self.calls[call[0]]}}}'
            yield f'{{"ph":"f","bp":"e",{flow},{at}}}'

    def of_call(self, record: tuple[int, ...]) -> Iterator[str]:
        """Note a record of a call. The first record of another call yields the earlier slice."""
        if self.pending and self.pending[0][0] != record[0]:
            yield from self.written_call()
        self.pending.append(record)
        if record[8] in (ADVISE, PREFETCH, HOST_VIEW):
            self.flows.called(record)

    def written_call(self) -> Iterator[str]:
        """The slice of the noted call, which has a record for each of its memories."""
        if not self.pending:
            return
        records, self.pending = self.pending, []
        labels = dict.fromkeys(self.rows.label(record[4]) for record in records)
        memories = json.dumps([*list(labels)[:MOST_LABELS], *["..."] * (len(labels) > MOST_LABELS)])
        one_place = len({record[6] for record in records}) == 1
        name, more = self.text_of(
            records[0] if one_place else (*records[0][:6], -2, *records[0][7:])
        )
        start, end = (self.nanoseconds(raw) for raw in (records[0][0], max(r[1] for r in records)))
        row = self.rows.place(CALLS, start, max(start, end))
        yield from self.rows.described()
        at = self.calls[records[0][0]] = place_text(row, start)
        yield (
            f'{{"ph":"X","name":{name},"cat":"call",{at},"dur":{max(end - start, 0) / 1e3:.3f},'
            f'"args":{{"memories":{memories},"bytes":{sum(r[3] for r in records)}{more}}}}}'
        )

    def offset_of(self, record: tuple[int, ...]) -> int:
        """The offset of an event in its memory; 0 in an unknown one."""
        memories = self.results.memories
        return record[2] - memories[record[4]].address if record[4] < len(memories) else 0

    def text_of(self, record: tuple[int, ...]) -> tuple[str, str]:
        """The name of an event, and the end of its arguments, both as JSON."""
        key = (*record[5:9], record[11] if record[7] in (CALL, REMOTE_MAP) else 0)
        if key not in self.words:
            source, destination, kind, cause, _ = key
            why = cause_text(kind, cause, record[11])
            places = {"from": place_of(source), "to": place_of(destination)}
            shown = {name: str(place) for name, place in places.items() if place is not None}
            if kind == CALL:
                name = f"{why} {shown['to']}" if "to" in shown else str(why)
            elif kind == MOVE:
                name = f"to {shown.get('to', 'another device')}, {why}"
            else:
                name = KINDS[kind].replace("_", " ")
            more = {**shown, "cause": why} if why and kind != CALL else shown
            text = "".join(f",{json.dumps(k)}:{json.dumps(v)}" for k, v in more.items())
            self.words[key] = json.dumps(name), text
        return self.words[key]


def write_chrome(part: TraceView, file: TextIO) -> None:
    """Write the events of a trace or a slice to an open file."""
    writer = Writer(part)
    base = time.time_ns() - time.perf_counter_ns()
    header = {"source": part.source, "complete": part.complete, "problems": part.problems}
    header |= {"rank": rank_of_process(), "host": platform.node(), "clock": clock_name()}
    file.write(f'{{"displayTimeUnit":"ms","baseTimeNanoseconds":{base},')
    file.write(f'"otherData":{json.dumps(header)},"traceEvents":[\n')
    separator = ""
    for event in writer.events():
        file.write(separator + event)
        separator = ",\n"
    file.write("\n]}\n")
