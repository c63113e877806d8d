"""The moves that ``managedmem top`` shows: sums of a recording, which runs while clients ask."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from managedmem._managedmem import CUDAError, Recorder, TraceBusyError, _memory_counts
from managedmem._trace_results import TOTAL, Results

SUMS = ("to_device", "to_host", "between_devices", "host_faults", "device_faults", "evicted")
UNKNOWN = "(freed before it was seen)"
NO_MEMORY = "moves are counted once this package has allocated memory"
IN_TRACE = "the process runs a managedmem.trace(), which records the moves until it ends"
_LIMIT = 10_000
"""Events that are kept, and memories that can be new in a recording. Sums have no limit."""
_MOST_PARTS = 30
"""A recording with more parts is replaced, because each reading decodes all of them."""


class Moves:
    """Sums over the time in which clients ask, by memory.

    As a context manager, it records nothing while a trace of the program starts. Safe from every
    thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._recorder: Recorder | None = None
        self._total = dict.fromkeys(SUMS, 0)
        self._lost = 0
        self._memories: dict[tuple[str, int], dict[str, Any]] = {}

    def __enter__(self) -> None:
        """End the recording; none begins before the exit."""
        self._lock.acquire()
        try:
            self.end()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def end(self) -> None:
        """End the recording, if one runs. What moved since the last reading is not counted."""
        with self._lock:
            recorder, self._recorder = self._recorder, None
            if recorder is not None and recorder.running:
                with suppress(CUDAError, RuntimeError):  # a failed stop has ended it, too
                    recorder.stop(wait=False)

    def read(self) -> dict[str, Any]:
        """``moves``, the sums or None, and ``reason``, the obstacle or None.

        Waits for no device, and opens no driver: the process may not have chosen one yet.
        """
        if not self._lock.acquire(blocking=False):
            return {"moves": None, "reason": IN_TRACE}
        try:
            if not any(made for *_, made in _memory_counts(False)):
                return {"moves": None, "reason": NO_MEMORY}
            return {"moves": self._moves(), "reason": None}
        except TraceBusyError:
            return {"moves": None, "reason": IN_TRACE}
        except Exception as error:  # goes into the answer, because the thread must live on
            self._recorder = None
            return {"moves": None, "reason": " ".join(str(error).split())}
        finally:
            self._lock.release()

    def _moves(self) -> dict[str, Any]:
        if self._recorder is not None:
            self._recorder.mark()
            self._add(self._recorder)
        if self._recorder is None or len(self._recorder.parts()) >= _MOST_PARTS:
            self.end()
            recorder = Recorder(limit=_LIMIT, faults=True, sync=False)
            recorder.start(wait=False)
            self._recorder = recorder
        return {**self._total, "lost": self._lost, "memories": list(self._memories.values())}

    def _add(self, recorder: Recorder) -> None:
        """Add the last part, and forget the memories that were freed before it."""
        results = Results(recorder, [], True)
        last = len(results.parts) - 1
        self._lost = recorder.report()["lost"]
        active = set()
        for (part, index), values in results.rows.items():
            if part != last:
                continue
            sums = results.as_sums(values)
            entry = self._total if index == TOTAL else self._memory(results, index)
            for name in SUMS:
                entry[name] += sums[name]
            active.add(id(entry))
        living = {(m.label, m.address) for m in results.memories if results.is_alive(m)}
        self._memories = {
            key: entry
            for key, entry in self._memories.items()
            if key in living or id(entry) in active
        }

    def _memory(self, results: Results, index: int) -> dict[str, Any]:
        """The entry of a memory of the last part."""
        memory = results.memories[index]
        is_unknown = memory.kind == "unknown"
        key = (UNKNOWN, 0) if is_unknown else (memory.label, memory.address)
        new = {"label": key[0], "address": key[1], "resource": memory.kind}
        new |= {"nbytes": 0 if is_unknown else memory.nbytes, **dict.fromkeys(SUMS, 0)}
        return self._memories.setdefault(key, new)
