"""The moves of a process that does not serve: sums of the kernel module's events, by mapping."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from managedmem._managedmem import _Watch
from managedmem._top_moves import SUMS
from managedmem._trace_results import DEVICE_FAULT, EVICTION, HOST_FAULT, MOVE, RECORD

UNMAPPED = "(mapped before or after)"
STRANGE = "the kernel module writes its events in a way that this version does not read"
_HOST = -1
_TURN = 100
"""Milliseconds from one reading of the events to the next."""


def name_of(kind: int, source: int, destination: int) -> str | None:
    """The sum in which an event counts."""
    if kind == MOVE:
        if _HOST not in (source, destination):
            return "between_devices"
        return "to_device" if source == _HOST else "to_host"
    return {HOST_FAULT: "host_faults", DEVICE_FAULT: "device_faults", EVICTION: "evicted"}.get(kind)


class MappedMoves:
    """Sums from the start on. A thread reads events until the process ends, then closes the watch.

    Raises OSError or RuntimeError, with the reason, if the process cannot be watched.
    """

    def __init__(self, process: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._lock = threading.Lock()
        self._rows: dict[int, Mapping[str, Any]] = {}  # by address, in ascending order
        self._sums: dict[int, dict[str, int]] = {}
        self._total = dict.fromkeys(SUMS, 0)
        self._lost = self._rejected = 0
        self._know(rows)
        with contextlib.ExitStack() as opened:
            self._watch = _Watch(process)
            opened.callback(self._watch.close)
            self._handle = os.pidfd_open(process)  # readable once the process has ended
            opened.callback(os.close, self._handle)
            self._wake, self._waker = os.pipe()
            opened.callback(os.close, self._wake)
            opened.callback(os.close, self._waker)
            name = "managedmem-watch"
            self._thread = threading.Thread(target=self._follow, name=name, daemon=True)
            self._thread.start()
            opened.pop_all()

    def close(self) -> None:
        """End the recording."""
        os.close(self._waker)
        self._thread.join()
        for file in (self._wake, self._handle):
            os.close(file)

    def read(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """``moves`` and ``reason``, as a server answers; the rows are the present mappings."""
        with self._lock:
            self._know(rows)
            if self._rejected:
                return {"moves": None, "reason": STRANGE}
            memories = [{**self._row_of(start), **sums} for start, sums in self._sums.items()]
            moves = {**self._total, "lost": self._lost, "memories": memories}
            return {"moves": moves, "reason": None}

    def _know(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Count later events for these mappings. Sums of other mappings are added up under 0."""
        self._rows = {row["address"]: row for row in sorted(rows, key=lambda row: row["address"])}
        self._starts = list(self._rows)
        for start in self._sums.keys() - self._rows.keys() - {0}:
            for name, amount in self._sums.pop(start).items():
                self._sums_of(0)[name] += amount

    def _row_of(self, start: int) -> dict[str, Any]:
        row = self._rows.get(start, {"label": UNMAPPED, "nbytes": 0})
        names = {"label": row["label"], "nbytes": row["nbytes"]}
        return {**names, "address": start, "resource": "mapped"}

    def _sums_of(self, address: int) -> dict[str, int]:
        """The sums of the mapping with an address; those under 0 if no mapping has it."""
        at = bisect_right(self._starts, address) - 1
        start = self._starts[at] if at >= 0 else 0
        if start and address >= start + self._rows[start]["nbytes"]:
            start = 0
        return self._sums.setdefault(start, dict.fromkeys(SUMS, 0))

    def _follow(self) -> None:
        poll = select.poll()
        for file in (self._handle, self._wake):
            poll.register(file, select.POLLIN)
        while not poll.poll(_TURN):
            self._take()
        self._watch.close()

    def _take(self) -> None:
        """Add the events since the last time."""
        events, lost, rejected = self._watch.read()
        with self._lock:
            self._lost, self._rejected = lost, rejected
            for event in RECORD.iter_unpack(events):
                address, amount, (source, destination, kind) = event[2], event[3], event[5:8]
                if (name := name_of(kind, source, destination)) is not None:
                    self._sums_of(address)[name] += amount
                    self._total[name] += amount
