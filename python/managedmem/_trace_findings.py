"""Findings of a trace: rules that turn the sums of a memory into a sentence and an advice.

The costs, which order the findings, are estimates with the rates of one H100. They are not shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from managedmem._trace_table import label_text
from managedmem._units import count_text, size_text, time_text

if TYPE_CHECKING:
    from managedmem._trace import TracePart
    from managedmem._trace_results import TraceMemory, TraceSums

MOST = 5
"""So many findings are reported."""
MOST_LABELS = 3
"""A finding of several memories names at most so many."""

LEAST = 64 << 10
ENOUGH = 1 << 20
ENOUGH_SHARE = 0.05
"""Moves by faults count from 64 KiB on if they are 5 % of the memory, and always above 1 MiB."""
SMALL_PART = 0.25
"""If a smaller share of a memory moves back and forth, accesses in place are better."""

TO_DEVICE_COST = 1 / 9e9 - 1 / 50e9
TO_HOST_COST = 1 / 6e9 - 1 / 24e9
CONTESTED_COST = 1 / 0.5e9
EVICTED_COST = 2 / 24e9
"""Seconds for each byte: of faults beyond those of a prefetch, of competition, of eviction."""


class Finding(NamedTuple):
    """A waste that a trace shows, with advice.

    ``memory`` is the `TraceMemory`, or None for all. ``observation`` and ``advice`` are sentences,
    ``evidence`` the sums behind them by their names in `TraceSums`.
    """

    memory: TraceMemory | None
    observation: str
    evidence: dict[str, int | float]
    advice: str

    def __str__(self) -> str:
        return f"{self.observation}\n    {self.advice}" if self.advice else self.observation


Costed = tuple[float, Finding]


def by_faults(sums: TraceSums, direction: int) -> int:
    """Bytes that moved in a direction because of faults."""
    return sum(sums.by_cause[cause][direction] for cause in ("fault", "speculative"))


def evidence_of(sums: TraceSums, *names: str) -> dict[str, int | float]:
    """The named sums, without those that were not recorded."""
    found = {name: getattr(sums, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def counts(moved: float, nbytes: int) -> bool:
    """True if so many bytes by faults, of a memory of that size, are worth a finding."""
    return moved > ENOUGH or moved >= max(LEAST, ENOUGH_SHARE * nbytes)


def device_text(memory: TraceMemory) -> str:
    """The device of the memory as code, as far as it is one device."""
    devices = memory.devices
    return repr(devices[0]) if len(devices) == 1 else "device"


def contested(memory: TraceMemory) -> Costed | None:
    """Host and device compete for the same pages: thrashing or throttling."""
    if not (memory.thrashing or memory.throttled):
        return None
    parts = []
    if memory.thrashing:
        parts.append(f"{size_text(memory.thrashing)} thrashed")
    if memory.throttled:
        parts.append(f"processors waited {time_text(memory.throttled)} for their turn")
    finding = Finding(
        memory,
        f"{label_text(memory.label)}: several processors compete for the same pages: "
        f"{' and '.join(parts)}.",
        evidence_of(memory, "thrashing", "throttled"),
        "Set preferred_location to the processor that uses it most, and add the other to "
        "accessed_by, which then reaches it in place.",
    )
    return memory.throttled + memory.thrashing * CONTESTED_COST, finding


def evicted(memory: TraceMemory) -> Costed | None:
    """Pages left a device that was full."""
    if memory.evicted <= ENOUGH:
        return None
    finding = Finding(
        memory,
        f"{label_text(memory.label)}: {size_text(memory.evicted)} were evicted, because a "
        "device was full.",
        evidence_of(memory, "evicted"),
        "PrefetchPlan.fit() chooses what fits; memory that is used least can stay on the host, "
        "with preferred_location = Host() and the device in accessed_by.",
    )
    return memory.evicted * EVICTED_COST, finding


def turned(memory: TraceMemory) -> Costed | None:
    """Pages went to the device and back by faults, sometimes often."""
    there, back = by_faults(memory, 0), by_faults(memory, 1)
    if not all(counts(n, memory.nbytes) for n in (there, back, memory.turned_back)):
        return None
    cost = there * TO_DEVICE_COST + back * TO_HOST_COST
    once = max(memory.moved - memory.turned_back, 1)
    times = max(round(min(memory.to_device, memory.to_host) / once), 1)
    often = f" {times} times" if times > 1 else ""
    each = (
        f"{size_text(there)} each way"
        if size_text(there) == size_text(back)
        else f"{size_text(there)} there, {size_text(back)} back"
    )
    label = label_text(memory.label)
    names = ("to_device", "to_host", "turned_back", "host_write_faults", "device_write_faults")
    if times > 1 and once < SMALL_PART * memory.nbytes:
        observation = (
            f"{label}: {size_text(once)} of {size_text(memory.nbytes)} went to the device and "
            f"back{often} ({each}) by faults."
        )
        advice = (
            f"preferred_location = Host() and accessed_by.add({device_text(memory)}) let the "
            "device use the few pages in place."
        )
    else:
        observation = f"{label} went to the device and back{often} ({each}) by faults."
        advice = _advice_for_turned(memory)
    return cost, Finding(memory, observation, evidence_of(memory, *names), advice)


def _advice_for_turned(memory: TraceMemory) -> str:
    writes = (memory.host_write_faults or 0) + (memory.device_write_faults or 0)
    if writes:
        return (
            f"It is written ({count_text(writes)} faults were writes), so read_mostly would not "
            "help: prefetch it before each use."
        )
    if memory.host_faults is None:
        return (
            "MigrationPolicy.read_duplicated() would copy once if it is only read; else prefetch "
            "it before each use."
        )
    return (
        "No fault of the device was a write. MigrationPolicy.read_duplicated() would copy once if "
        "it is only read; else prefetch it before each use."
    )


def arrived(memory: TraceMemory) -> Costed | None:
    """Pages went to the device by faults."""
    moved = by_faults(memory, 0)
    if not counts(moved, memory.nbytes):
        return None
    finding = Finding(
        memory,
        f"{label_text(memory.label)}: {size_text(moved)} went to the device by faults.",
        evidence_of(memory, "to_device", "device_faults"),
        f"prefetch({device_text(memory)}) before the work that uses it moves them at the speed of "
        "the link.",
    )
    return moved * TO_DEVICE_COST, finding


def returned(memory: TraceMemory) -> Costed | None:
    """Pages went to the host by faults."""
    moved = by_faults(memory, 1)
    if moved <= ENOUGH:
        return None
    asked = memory.by_cause["requested"][0]
    beside = f", and {size_text(asked)} to the device as requested" if asked else ""
    finding = Finding(
        memory,
        f"{label_text(memory.label)}: {size_text(moved)} went to the host by faults{beside}.",
        evidence_of(memory, "to_host", "host_faults"),
        "prefetch(Host()) before the host uses it moves them at the speed of the link.",
    )
    return moved * TO_HOST_COST, finding


def of_memory(memory: TraceMemory) -> Iterator[Costed]:
    """The findings of one memory, each with its cost in seconds."""
    yield from filter(None, (contested(memory), evicted(memory)))
    both = turned(memory)
    yield from [both] if both else filter(None, (arrived(memory), returned(memory)))


def nothing_to_gain(total: TraceSums) -> bool:
    """True if something moved, all of it was requested, and no processor faulted."""
    requested = sum(total.by_cause["requested"])
    return (
        bool(requested)
        and requested == total.moved
        and not (total.host_faults or total.device_faults)
    )


def requested_only(total: TraceSums) -> Finding:
    """The finding of moves that `nothing_to_gain` has accepted."""
    names = ["to_device", "to_host", "host_faults", "device_faults"]
    text = "All moves were requested, and no processor faulted: there is nothing to gain."
    if total.turned_back:
        names.append("turned_back")
        text = (
            "All moves were requested, and no processor faulted. "
            f"{size_text(total.turned_back)} went back where they came from."
        )
    return Finding(None, text, evidence_of(total, *names), "")


def without_moves(memories: Sequence[TraceMemory]) -> Finding | None:
    """Memories that were prefetched, but had no byte moved on request."""
    found = [memory for memory in memories if not any(memory.by_cause["requested"])]
    if not found:
        return None
    labels = ", ".join(label_text(memory.label) for memory in found[:MOST_LABELS])
    more = f" and {len(found) - MOST_LABELS} more" if len(found) > MOST_LABELS else ""
    return Finding(
        found[0] if len(found) == 1 else None,
        f"{labels}{more}: prefetches moved nothing.",
        {name: sum(getattr(m, name) for m in found) for name in ("to_device", "to_host")},
        "The pages were there already, or held nothing yet, as before their first use. "
        "residency() before the prefetch shows their places.",
    )


def findings_of(part: TracePart) -> tuple[Finding, ...]:
    """The findings of a trace or a slice, the largest cost first."""
    costed = [each for memory in part._groups() for each in of_memory(memory)]
    costed.sort(key=lambda each: -each[0])
    found = [finding for _, finding in costed]
    if not found and nothing_to_gain(part.total):
        found.append(requested_only(part.total))
    idle = without_moves(part._prefetched())
    if idle is not None:
        found.append(idle)
    return tuple(found[:MOST])
