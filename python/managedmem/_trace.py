"""``managedmem.trace()``: `Trace`, its slices, and reading their results.

The package imports this module at the first use of one of its names. ``_trace_results`` decodes
the records of the extension, ``_trace_view`` has the facts of a part of the trace; other modules
present them.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from managedmem import _managedmem
from managedmem._trace_findings import Finding, findings_of
from managedmem._trace_results import (
    Results,
    TraceEvent,
    TraceMemory,
    TraceSums,
    target_range,
)
from managedmem._trace_view import TraceView
from managedmem._units import NAME_BYTES

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

    from managedmem._managedmem import _Target

__all__ = ["Finding", "Trace", "TraceEvent", "TraceMemory", "TraceSlice", "TraceSums", "trace"]

SOURCES = ("auto", "kernel", "emulator")
LAST = "end"
"""The label of the slice behind the last mark."""
FORKED = "the trace belongs to the process that started it, not to a forked child"
before_start: AbstractContextManager[object] = nullcontext()
"""Entered around each start. ``_top_server`` puts a context here that ends its own recording."""


class TracePart(TraceView):
    """The results of consecutive parts, which a trace and its slices share, with their pictures."""

    def findings(self) -> tuple[Finding, ...]:
        """Wasted moves, with advice: at most five findings, the most costly one first."""
        return findings_of(self)

    def summary(self) -> str:
        """The results as a table, with problems and findings below it.

        Moved bytes are counted for each move. "requested" is the share that prefetches and advice
        moved, "-" where nothing moved. Columns that were not recorded are blank.
        """
        from managedmem._trace_table import text_of

        return text_of(self)

    def __str__(self) -> str:
        return self.summary() if self._is_readable() else repr(self)

    def _repr_html_(self) -> str | None:
        """The table for notebooks: HTML of 20 kB at most, without scripts."""
        from managedmem._trace_html import html_of

        return html_of(self) if self._is_readable() else None

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied: keep its results, which "
            "to_dict(), to_json() and to_pandas() give"
        )

    def _is_readable(self) -> bool:
        return self._whole()._obstacle(self._parts()) is None

    def to_dict(self) -> dict[str, Any]:
        """The results as dicts, lists, numbers and texts, for JSON."""
        return {
            "version": 1,
            "label": self._title(),
            "source": self.source,
            "source_detail": self.source_detail,
            "duration": self.duration,
            "overhead": self.overhead,
            "complete": self.complete,
            "lost": self.lost,
            "rejected": self.rejected,
            "truncated": self.truncated,
            "problems": list(self.problems),
            "total": self.total.to_dict(),
            "memories": [memory.to_dict() for memory in self.memories],
            "unattributed": self.unattributed.to_dict(),
            "findings": [
                {
                    "memory": finding.memory and finding.memory.label,
                    "observation": finding.observation,
                    "evidence": finding.evidence,
                    "advice": finding.advice,
                }
                for finding in self.findings()
            ],
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict()` to a file."""
        values = self.to_dict()
        with open(os.fspath(path), "w", encoding="utf-8") as file:
            json.dump(values, file, indent=1)

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Draw the moves over time, with a lane for each memory, and return the matplotlib Axes.

        The 12 memories that moved most have lanes, the others share one. Moves to devices are above
        the middle of a lane, moves to the host below; dark ones were requested, light ones came by
        faults. The height is the number of bytes in a column of time. Ticks are page faults,
        triangles are this library's calls, and dotted lines are marks. Events beyond the trace's
        ``limit`` are left out.
        ``ax`` are the Axes to draw on; without it there is a new figure. Raises ImportError without
        matplotlib, which the extra ``plot`` installs.
        """
        from managedmem._plots import timeline

        drawn: Axes = timeline(self, ax)
        return drawn

    def plot_pages(
        self, target: str | TraceMemory | tuple[int, int] | _Target, *, ax: Axes | None = None
    ) -> Axes:
        """Draw the places of the pages of a memory over time, and return the matplotlib Axes.

        ``target`` is what ``trace[...]`` takes. Pages run downwards, time to the right. Places are
        replayed from the events: a page without an event is unknown, and so is one before its first
        event, unless that is a move. At most 512 times 512 cells are drawn; one that contains
        several places is mixed. Events beyond the trace's ``limit`` are left out.
        ``ax`` is as for `plot`. Raises what ``trace[...]`` raises, and ImportError without
        matplotlib.
        """
        from managedmem._plots import pages

        drawn: Axes = pages(self, target, ax)
        return drawn

    def plot_causes(self, *, ax: Axes | None = None) -> Axes:
        """Draw the bytes of each memory by their cause, and return the matplotlib Axes.

        Bars to the right are moves to devices and between them; bars to the left are moves to the
        host. The 12 memories that moved most have bars, the others share one. ``ax`` is as for
        `plot`. Raises ImportError without matplotlib.
        """
        from managedmem._plots import causes

        drawn: Axes = causes(self, ax)
        return drawn

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the events to a file that https://ui.perfetto.dev and chrome://tracing open.

        The file is JSON in the Trace Event Format. Each memory has a row with its moves, and
        counters of its faults per ms. Calls of this library have a row of their own, with arrows to
        the first move that each call caused. Times are on the clock of ``time.perf_counter()``, in
        us; ``baseTimeNanoseconds`` is the time since 1970 at the zero of that clock. Events beyond
        the trace's ``limit`` are left out. A rank of torchrun, MPI or Slurm has its number, host
        and current device in its name, and ``python -m managedmem merge`` joins the files of all
        ranks in one file.
        """
        from managedmem._trace_chrome import write_chrome

        self._results()  # its errors must come before the file is made
        with open(os.fspath(path), "w", encoding="utf-8") as file:
            write_chrome(self, file)

    def to_pandas(self) -> pandas.DataFrame:
        """`events` as a pandas.DataFrame, with the fields of `TraceEvent` as columns.

        ``time`` and ``duration`` are float64 in seconds, ``offset`` and ``nbytes`` int64 in bytes,
        ``thread`` is Int64. The other columns are categories of texts, such as "Device(0)", and
        missing where an event has None. ``slice`` is the label of the slice.
        Raises ImportError without pandas, which the extra ``plot`` installs.
        """
        from managedmem._trace_arrays import frame_of

        frame: pandas.DataFrame = frame_of(self)
        return frame


class TraceSlice(TracePart):
    """A part of a trace that ends at a mark, with the same results as the trace.

    ``label`` is the mark's. The part behind the last mark has the label "end". Made by `Trace.mark`
    and `Trace.slices`. Safe from every thread.
    """

    def __init__(self, trace: Trace, label: str, index: int) -> None:
        self._trace, self.label, self._index = trace, label, index

    def _whole(self) -> Trace:
        return self._trace

    def _parts(self) -> range:
        return range(self._index, self._index + 1)

    def _title(self) -> str:
        return f"slice {self.label!r}"

    def __repr__(self) -> str:
        return f"<TraceSlice {self.label!r}>"


class Trace(TracePart):
    """Records the moves and faults of managed memory, of all threads of the process.

    Made by `trace`, and used once: as a context manager, or with `start` and `stop`. Results can be
    read after the end; those of a `TraceSlice` as soon as its mark returns.

    Every method is safe from every thread.
    """

    def __init__(
        self,
        *,
        source: str = "auto",
        faults: bool = True,
        limit: int = 1_000_000,
        sync: bool = True,
    ) -> None:
        _check(source, faults, sync)
        self._request = source
        self._sync = sync
        self._faults = faults
        self._recorder = _managedmem.Recorder(limit=limit, faults=faults, sync=sync)
        self._lock = threading.RLock()
        self._process = 0
        self._starter = 0  # the process of the first start, set before that start is done
        self._labels: list[str] = []
        self._overheads = [0]
        self._named: list[tuple[int, int, str]] = []
        self._cached: Results | None = None
        self._failure: BaseException | None = None

    def _whole(self) -> Trace:
        return self  # a stored reference to itself would keep a dropped trace running

    # --- recording --------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to record.

        Waits for queued work if ``sync``. The first trace of a process checks the source: it moves
        64 KiB and counts them.
        Raises TraceUnavailableError without a usable source, TraceBusyError if a trace runs in the
        process, RuntimeError at a second start, CUDAError if the wait fails.
        """
        self._check_process()
        self._starter = os.getpid()
        with self._lock:
            if self._process:
                raise RuntimeError("a trace is used once: managedmem.trace() makes another")
            self._check_driver()
            try:
                with before_start:
                    self._recorder.start(wait=not self._would_end_a_capture())
                self._process = os.getpid()
            finally:
                if not self._process:  # an interrupt came in between
                    self._end_at_least()
            self._overheads = [self._recorder.report()["overhead"]]

    def _would_end_a_capture(self) -> bool:
        """True if a wait would end a capture of torch; the recorder checks for other captures."""
        return self._sync and _torch_captures()

    def _check_driver(self) -> None:
        if self._request == "auto":
            return
        info = _managedmem._driver_info()
        if info["emulated"] == (self._request == "emulator"):
            return
        driver = "the emulated driver" if info["emulated"] else f"the CUDA driver at {info['path']}"
        sentence = f"this process uses {driver}"
        error = _managedmem.TraceUnavailableError(
            f"source {self._request!r} cannot be used: {sentence}"
        )
        error.tried = [(self._request, None, sentence)]
        raise error

    def mark(self, label: str) -> TraceSlice:
        """End a slice here, and return it; its results can be read at once.

        Waits for queued work if ``sync``, and for the events of finished work. Raises RuntimeError
        unless the trace runs, and while a stream captures; TypeError for a label that is not a str;
        CUDAError if the wait fails. Driver: cuCtxSynchronize.
        """
        if not isinstance(label, str):
            raise TypeError(f"a label must be a str, got {label!r}")
        self._check_process()
        with self._lock:
            self._check_running("mark()")
            if self._would_end_a_capture():
                raise RuntimeError(
                    "mark() waits for the device, which would end the capture of torch's current "
                    "stream: call it before or after the capture"
                )
            self._labels.append(label)
            try:
                self._recorder.mark()
            finally:
                # An interrupt can come before or after the part has ended. Another thread can have
                # ended the trace meanwhile, with a last part.
                last = 0 if self._recorder.running else 1
                del self._labels[len(self._recorder.parts()) - last :]
                self._note_overhead()
            return TraceSlice(self, label, len(self._labels) - 1)

    def stop(self) -> None:
        """End the recording; a second call, or a call in a forked child, does nothing.

        Waits for queued work if ``sync``, and for the events of finished work. Raises RuntimeError
        before the start, CUDAError if the wait fails; the trace has ended then too, and
        `complete` is False. Driver: cuCtxSynchronize.
        """
        if self._is_inherited():
            return
        with self._lock:
            if not (self._process or self._running):
                raise RuntimeError("stop() needs a started trace, and this one has not started")
            if not self._running:
                return
            try:
                self._recorder.stop(wait=not self._would_end_a_capture())
            except Exception as error:
                self._failure = error
                raise
            finally:
                self._end_at_least()
                self._note_overhead()

    def _end_at_least(self) -> None:
        """End a trace that an interrupt has left running, without a wait for the device.

        Takes no lock, because another thread may hold it while it waits for the device.
        """
        if self._recorder.running:  # False in a forked child
            self._recorder.stop(wait=False)

    @property
    def _running(self) -> bool:
        """True while the recorder runs; not stored, as an interrupt could come before the store."""
        return self._recorder.running

    def _is_inherited(self) -> bool:
        """True in a forked child, where a thread of the parent may have left the lock taken."""
        return self._starter not in (0, os.getpid())

    def _check_process(self) -> None:
        if self._is_inherited():
            raise RuntimeError(FORKED)

    def _note_overhead(self) -> None:
        """Note the overhead so far, also for parts whose mark was interrupted."""
        with self._lock:
            missing = len(self._recorder.parts()) + 1 - len(self._overheads)
            self._overheads.extend([self._recorder.report()["overhead"]] * missing)

    def _check_running(self, action: str) -> None:
        if not self._process:
            raise RuntimeError(f"{action} needs a running trace, and this one has not started")
        if not self._running:
            raise RuntimeError(f"{action} needs a running trace, and this one has ended")

    def __enter__(self) -> Self:
        """Call start(). An interrupt ends the trace, even if a second one comes meanwhile."""
        is_first = not self._process
        try:
            try:
                self.start()
                return self
            except BaseException:
                if is_first:
                    self._end_at_least()
                raise
        except BaseException:
            if is_first:
                self._end_at_least()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Call stop(). An interrupt ends the trace, even if a second one comes meanwhile.

        If the block has raised an error, an error of stop() becomes a note on it.
        """
        try:
            try:
                self.stop()
            finally:
                self._end_at_least()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"managedmem.trace() could not end as it should: {failure}")
        finally:
            self._end_at_least()

    def name(self, target: _Target | tuple[int, int], label: str) -> None:
        """Give memory a name in this trace, before, during or after the recording.

        Parameters
        ----------
        target : ManagedBuffer, array, tensor or (address, nbytes)
            A slice gets a row of its own in the results, beside the rest of the buffer. Where names
            overlap, the last one counts.
        label : str
            1 to 200 bytes of UTF-8, without NUL.

        A name belongs to the addresses, and counts for the whole length of the trace.
        Raises TypeError or ValueError for other arguments, a closed buffer, and memory that is not
        managed.
        """
        if not isinstance(label, str):
            raise TypeError(f"a label must be a str, got {label!r}")
        if not 0 < len(label.encode()) <= NAME_BYTES or "\0" in label:
            raise ValueError(
                f"a label has 1 to {NAME_BYTES} bytes of UTF-8, without NUL, got {label!r}"
            )
        address, nbytes = target_range(target)
        if nbytes == 0:
            return
        self._check_process()
        with self._lock:
            self._named = [each for each in self._named if each[:2] != (address, nbytes)]
            self._named.append((address, nbytes, label))
            self._cached = None

    # --- results ----------------------------------------------------------------------------------

    @property
    def slices(self) -> tuple[TraceSlice, ...]:
        """The slices: one for each mark, and after the end the rest as "end"."""
        labels = [*self._labels, LAST] if self._has_ended() else self._labels
        return tuple(TraceSlice(self, label, i) for i, label in enumerate(labels))

    def _has_ended(self) -> bool:
        return bool(self._process) and not self._running

    def _is_cut_short(self) -> bool:
        """True if the trace has ended without a last part."""
        return len(self._recorder.parts()) <= len(self._labels)

    def _parts(self) -> range:
        return range(len(self._labels) + 1)

    def _title(self) -> str:
        return "trace"

    def _obstacle(self, parts: range) -> str | None:
        """The reason that the results of parts cannot be read now."""
        if not self._process:
            return "the trace has not started; use it in a with statement"
        if self._is_inherited():
            return FORKED
        if self._running and parts[-1] >= len(self._labels):
            return (
                "the trace is running: its results can be read after its end, and those of the "
                "slice that mark() returns at once"
            )
        if parts[-1] >= len(self._labels) and self._is_cut_short():
            return (
                "the last slice is missing: an interrupt or the end of the interpreter came before "
                "the end of the trace"
            )
        return None

    def _attributed(self, parts: range) -> Results:
        obstacle = self._obstacle(parts)
        if obstacle:
            raise RuntimeError(obstacle)
        with self._lock:
            if self._cached is None or len(self._cached.parts) <= parts[-1]:
                self._cached = Results(self._recorder, self._named, self._faults)
            return self._cached

    def _problems(self) -> tuple[str, ...]:
        report: Any = self._recorder.report()
        sentences = {
            "lost": "{} events were lost, because they came faster than they could be read: the "
            "sums are too small",
            "rejected": "{} records of the source were not understood: the sums are too small",
            "ambiguous": "{} events fit two memories that had one address, one after the other",
            "fault_overflows": "the fault buffer of a device overflowed {} times: the sums of "
            "device faults are too small",
            "fatal_faults": "{} accesses of devices were to memory that they cannot use",
            "unlisted": "{} memories were allocated after limit= new ones: they have no "
            "label, and their events are unattributed once they are freed",
        }
        problems = [text.format(f"{report[n]:,}") for n, text in sentences.items() if report[n]]
        if report["truncated"]:
            holders = "events() and names given by name() have" if self._named else "events() has"
            problems.append(
                "there were more events than limit=: the sums have all of them, "
                f"{holders} the first ones"
            )
        if not report["waited"]:
            problems.append(
                "the end did not wait for the device, because a stream was capturing: "
                "unfinished work is not counted"
            )
        if self._failure is not None:
            problems.append(f"the end of the trace failed: {self._failure}")
        return tuple(problems)

    def to_dict(self) -> dict[str, Any]:
        """The results as dicts, lists, numbers and strings, for JSON; includes the slices.

        A slice has only the memories with events in it.
        """
        slices = []
        for part in self.slices:
            values = part.to_dict()
            values["label"] = part.label
            values["memories"] = [memory.to_dict() for memory in part._groups()]
            slices.append(values)
        return {**super().to_dict(), "slices": slices}

    def __repr__(self) -> str:
        if not self._process:
            return "<Trace, not started>"
        state = "running" if self._running else "ended"
        return f"<Trace, {state}, source {self.source}>"


def _check(source: object, faults: object, sync: object) -> None:
    """Check the arguments, except the limit, which the recorder checks."""
    if source not in SOURCES:
        choices = '", "'.join(SOURCES[:-1])
        raise ValueError(f'source must be "{choices}" or "{SOURCES[-1]}", got {source!r}')
    for name, flag in (("faults", faults), ("sync", sync)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {flag!r}")


def _torch_captures() -> bool:
    """True if torch's current stream captures; does not import torch or start CUDA."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    is_initialized = getattr(cuda, "is_initialized", None)  # None during the import of torch
    return bool(is_initialized and is_initialized() and cuda.is_current_stream_capturing())


def trace(
    *, source: str = "auto", faults: bool = True, limit: int = 1_000_000, sync: bool = True
) -> Trace:
    """Record which managed memory moves, where and why: ``with managedmem.trace() as t:``.

    Parameters
    ----------
    source : {"auto", "kernel", "emulator"}
        "kernel" is the event queue of the nvidia-uvm module, "emulator" that of the emulated
        driver. "auto" is the queue that belongs to the driver in use.
    faults : bool
        False: page faults of host and devices are not recorded, and their sums are None.
    limit : int
        The number of events that are kept for `Trace.events` and for slices of buffers, at 48 bytes
        each, and the number of memories that can be new during the trace, at some 250 bytes each.
        It is 1,000 to 10**9. Sums count all events; events of further new memories are
        `unattributed` once these are freed.
    sync : bool
        Wait for the current context, and for the devices that this library worked on, at the start,
        at marks and at the end. False: unfinished work is left out, or counted later.

    Returns a `Trace` that has not started. It records every thread of the process, and memory of
    every library. One trace at a time can run in a process. It does not use CUPTI.

    Raises ValueError or TypeError for other arguments. `Trace.start` opens the driver and
    checks the source. Safe from every thread. Driver: cuCtxSynchronize; the kernel module's
    /dev/nvidia-uvm-tools.
    """
    return Trace(source=source, faults=faults, limit=limit, sync=sync)
