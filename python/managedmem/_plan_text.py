"""The text of PrefetchPlan.explain(), from the numbers that the extension finds in a preview."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

MOST_NAMED = 16
"""The most entries that a remark names by their numbers."""
BATCHED = 0
RESIDENT = 8
# The routes of memory/dispatch.h, in its order.
REASONS = (
    "",
    'dispatch="loop" requests single calls',
    "one range needs no batch call",
    "ranges share pages and have different locations, so they are issued in order",
    "this driver has no batch call, which CUDA 13.0 added",
    "not every device here has concurrent_managed_access, which a batch call needs",
    "to the host, single calls are faster than a batch call",
    "below 64 KiB, single calls are as fast as a batch call",
    "last prefetched to their destination, where single calls are the fastest",
    "a batch call is for several such ranges, and this is the only one",
)


class Transfer(NamedTuple):
    """A range of a driver call, or an entry of a plan. The route of an entry has no meaning."""

    route: int
    place: str
    start: int
    nbytes: int


class Preview(NamedTuple):
    """The calls that an execution would make, and the options that were asked for."""

    is_discard: bool
    entries: tuple[Transfer, ...]
    ranges: tuple[Transfer, ...]
    edges: tuple[int, ...]
    """Bytes of the prefetches of pages at the ends; 0 for none."""
    deferred: tuple[int, str] | None
    """The bytes for which a host function is queued first, and their destination; None: none."""
    is_batch_requested: bool
    is_deferral_requested: bool
    is_legacy: bool


def explanation(*values: Any) -> str:
    """The text for the values of a Preview, with transfers as plain tuples."""
    given = Preview._make(values)
    view = given._replace(
        entries=tuple(map(Transfer._make, given.entries)),
        ranges=tuple(map(Transfer._make, given.ranges)),
        edges=tuple(filter(None, given.edges)),
    )
    return "\n".join((_heading(view), *_calls(view), *_remarks(view)))


def _size(nbytes: int) -> str:
    """The exact size, in the largest of three units that divides it."""
    for unit in ("bytes", "KiB"):
        if not nbytes or nbytes % 1024:
            return f"{nbytes} {unit}"
        nbytes //= 1024
    return f"{nbytes} MiB"


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _heading(view: Preview) -> str:
    singles = sum(each.route != BATCHED for each in view.ranges)
    calls = len(view.edges) + singles + (singles < len(view.ranges)) + (view.deferred is not None)
    nbytes = sum(entry.nbytes for entry in view.entries)
    entries = f"{len(view.entries)} {'entry' if len(view.entries) == 1 else 'entries'}"
    return f"{_counted(calls, 'driver call')} for {entries}, {_size(nbytes)}:"


# --- the calls ----------------------------------------------------------------------------


def _calls(view: Preview) -> Iterator[str]:
    if view.deferred:
        yield f"1 x cuLaunchHostFunc: {_deferral(view, *view.deferred)}"
    if view.edges:
        yield (
            f"{len(view.edges)} x cuMemPrefetchAsync, {_size(sum(view.edges))}: the pages at the "
            "ends, shared with neighbours, keep their contents"
        )
    prefetch = "cuMemDiscardAndPrefetch{}Async" if view.is_discard else "cuMemPrefetch{}Async"
    batched = [each for each in view.ranges if each.route == BATCHED]
    if batched:
        ranges = _counted(len(batched), "range")
        yield f"1 x {prefetch.format('Batch')} over {ranges}: {_batch_reason(view)}"
    for (_, place), sizes in _groups(batched):
        yield f"    {_counted(len(sizes), 'range')}, {_size(sum(sizes))} to {place}"
    single = prefetch.format("Batch" if view.is_discard else "")
    for (route, place), sizes in _groups(each for each in view.ranges if each.route != BATCHED):
        yield f"{len(sizes)} x {single}, {_size(sum(sizes))} to {place}: {REASONS[route]}"


def _groups(
    ranges: Iterable[Transfer],
) -> Iterator[tuple[tuple[int, str], list[int]]]:
    """The sizes of ranges with one route to one place, in the order of their first ranges."""
    groups: dict[tuple[int, str], list[int]] = {}
    for each in ranges:
        groups.setdefault((each.route, each.place), []).append(each.nbytes)
    yield from groups.items()


def _deferral(view: Preview, nbytes: int, destination: str) -> str:
    if view.is_deferral_requested:
        return "defer=True requests it"
    return (
        f"{_size(nbytes)} to {destination} are queued behind it, so that the call returns while "
        "the stream does the work"
    )


def _batch_reason(view: Preview) -> str:
    if view.is_batch_requested:
        return 'dispatch="batch" requests it'
    there = "to a device, and not prefetched there last"
    return there if view.is_discard else f"64 KiB or more each, {there}"


# --- remarks ------------------------------------------------------------------------------


def _remarks(view: Preview) -> Iterator[str]:
    filled = [entry for entry in view.entries if entry.nbytes]
    if len(view.ranges) < len(filled):
        yield (
            f"{len(filled)} entries are merged into {_counted(len(view.ranges), 'range')}: "
            "neighbours and overlaps in one allocation with one destination"
        )
    empty = len(view.entries) - len(filled)
    if empty:
        words = "entry without bytes needs" if empty == 1 else "entries without bytes need"
        yield f"{empty} {words} no call"
    there = _resident(view.ranges)
    resident = [str(i) for i, entry in enumerate(view.entries) if _was_there(there, entry)]
    if resident:
        more = f" and {len(resident) - MOST_NAMED} more" if len(resident) > MOST_NAMED else ""
        named = ", ".join(resident[:MOST_NAMED])
        yield f"Last prefetched to their destination: entries {named}{more}"
    batched = any(each.route == BATCHED for each in view.ranges)
    if view.is_legacy and (view.is_discard or batched):
        yield (
            "On a stream of the library, in the order of the default stream, which itself refuses "
            "batch and discard calls"
        )


_Extents = tuple[list[int], list[int]]
"""The starts of ranges, in order, and for each start the highest end of the ranges up to it."""


def _resident(ranges: Iterable[Transfer]) -> dict[str, _Extents]:
    """The ranges that were last prefetched to their destination, by its name."""
    extents: dict[str, _Extents] = {}
    for each in sorted(ranges, key=attrgetter("start")):
        if each.route == RESIDENT:
            starts, ends = extents.setdefault(each.place, ([], []))
            starts.append(each.start)
            ends.append(max(each.start + each.nbytes, ends[-1] if ends else 0))
    return extents


def _was_there(resident: dict[str, _Extents], entry: Transfer) -> bool:
    """True if a part of the entry was last prefetched to its destination, but may have left it."""
    starts, ends = resident.get(entry.place, ([], []))
    before = bisect_left(starts, entry.start + entry.nbytes)
    return bool(entry.nbytes and before) and ends[before - 1] > entry.start
