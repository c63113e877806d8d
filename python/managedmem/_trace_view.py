"""The facts of a part of a trace: sums, memories, events and gaps. Draws no picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from managedmem._trace_results import Results, TraceEvent, TraceMemory, TraceSums

if TYPE_CHECKING:
    from managedmem._managedmem import Recorder, _Target


class WholeTrace(Protocol):
    """The members of a trace that its parts need."""

    _recorder: Recorder
    _labels: list[str]
    """The labels of the marks. Each mark is the end of a part."""
    _sync: bool
    _failure: BaseException | None
    """The error that stop() raised."""
    _overheads: list[int]
    """Nanoseconds that the trace spent by the start of each part, and by the end."""

    def _attributed(self, parts: range) -> Results:
        """The results, with these parts at least. Raises RuntimeError if they cannot be read."""

    def _obstacle(self, parts: range) -> str | None:
        """The reason that the results of parts cannot be read now."""

    def _problems(self) -> tuple[str, ...]:
        """Sentences on missing and uncertain results."""

    def _note_overhead(self) -> None:
        """Bring `_overheads` up to date."""


class TraceView:
    """The results of consecutive parts, for presentation."""

    def _whole(self) -> WholeTrace:
        raise NotImplementedError

    def _parts(self) -> range:
        raise NotImplementedError

    def _title(self) -> str:
        raise NotImplementedError

    def _results(self) -> Results:
        return self._whole()._attributed(self._parts())

    def _groups(self) -> list[TraceMemory]:
        return self._results().groups(self._parts())

    def _prefetched(self) -> list[TraceMemory]:
        """The memories that this library prefetched, if all moves of these prefetches count."""
        if self._whole()._problems() or not self._whole()._sync:
            return []
        return self._results().prefetched(self._parts())

    def _together(self, memories: Sequence[TraceMemory]) -> TraceMemory:
        indices = set().union(*(memory._indices for memory in memories))
        return self._results().together(self._parts(), indices, "")

    @property
    def source(self) -> str:
        """The source of the events: "kernel" or "emulator"."""
        return self._whole()._recorder.source

    @property
    def source_detail(self) -> str:
        """The device file and the layout of the records, or the emulated driver."""
        return self._whole()._recorder.source_detail

    @property
    def lost(self) -> int:
        """Number of events that the source dropped; the sums lack them."""
        return int(self._report("lost"))

    @property
    def rejected(self) -> int:
        """Number of records that were not understood; the sums lack them."""
        return int(self._report("rejected"))

    @property
    def truncated(self) -> bool:
        """True if there were more events than ``limit``; only the sums have the later ones."""
        return bool(self._report("truncated"))

    @property
    def complete(self) -> bool:
        """True if nothing is known to be missing in the sums."""
        return not (self.lost or self.rejected or self._whole()._failure)

    @property
    def problems(self) -> tuple[str, ...]:
        """Sentences on missing and uncertain results."""
        self._results()
        return self._whole()._problems()

    def _report(self, name: str) -> Any:
        self._results()
        report: Any = self._whole()._recorder.report()
        return report[name]

    @property
    def duration(self) -> float:
        """Seconds from the beginning to the end."""
        results, parts = self._results(), self._parts()
        start, end = results.parts[parts[0]][0], results.parts[parts[-1]][1]
        return results.clock.elapsed(start, end)

    @property
    def overhead(self) -> float:
        """Seconds that the trace itself spent in its start, marks, end and in reading events."""
        self._results()
        self._whole()._note_overhead()
        spent = self._whole()._overheads
        parts = self._parts()
        return (spent[parts[-1] + 1] - (spent[parts[0]] if parts[0] else 0)) / 1e9

    @property
    def total(self) -> TraceSums:
        """The sums of all events."""
        return self._results().total(self._parts())

    @property
    def memories(self) -> tuple[TraceMemory, ...]:
        """Every memory that lived during the trace, freed ones too, most bytes first."""
        return self._results().memories_of(self._parts())

    @property
    def unattributed(self) -> TraceMemory:
        """The sums of events on memory that was freed before the driver could be asked for it."""
        return self._results().unattributed(self._parts())

    def __getitem__(self, key: str | TraceMemory | tuple[int, int] | _Target) -> TraceMemory:
        """The memory of a label, a buffer, an array, or ``(address, nbytes)``.

        Memories with one label count together, and a buffer counts together with its named parts.
        A slice of a buffer counts the pages that it touches. Memory without events has sums of 0,
        and so has an ``(address, nbytes)`` without memory, because memory can be freed.
        Raises KeyError for an unknown label, ValueError for a closed buffer and for a target that
        is not in managed memory, RuntimeError while the trace runs, and for a slice of a memory if
        the trace is `truncated`.
        """
        try:
            return self._results().selected(self._parts(), key)
        except KeyError as error:
            if key in self._whole()._labels:
                hint = f"{error.args[0]}. It is the label of a slice: see Trace.slices"
                raise KeyError(hint) from None
            raise

    def events(self, kind: str | None = None, of: Any = None) -> Iterator[TraceEvent]:
        """The events in time order, as `TraceEvent`.

        ``kind`` selects one kind, such as "move"; ``of`` takes what ``trace[...]`` takes, and
        leaves out marks. An event over several memories is split at their borders. Events beyond
        the trace's ``limit`` are left out.
        Raises ValueError for an unknown kind, and what ``trace[...]`` raises.
        """
        marks = dict(enumerate(self._whole()._labels))
        return self._results().events(self._parts(), kind, of, marks)
