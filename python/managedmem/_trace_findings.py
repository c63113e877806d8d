"""Findings of a trace: rules that turn the sums of a memory into a sentence and a hint.

The costs, which order the findings, are estimates with the rates of one H100. They are not shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from managedmem import _managedmem
from managedmem._trace_memories import joined, overlap
from managedmem._trace_results import (
    ACCESSES,
    BY_FAULT,
    CAUSES,
    DEVICE_FAULT,
    MOVE,
)
from managedmem._units import count_text, label_text, size_text, time_text

if TYPE_CHECKING:
    from managedmem._trace_memories import RawMemory
    from managedmem._trace_results import TraceMemory, TraceSums
    from managedmem._trace_view import TraceView

MOST = 5
"""The most findings that are reported."""
MOST_LABELS = 3
"""The most memories that a finding of several names."""

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
REQUESTED_COST = 1 / 50e9
"""Seconds per byte, in this order: of faults to a device and of faults to the host, beyond those of
a prefetch; of competition; of eviction; of a prefetch."""

DISCARDS_SINCE = 13000
OVERWRITTEN = (
    "if the host overwrites the whole array, discard_prefetch(Host()) of its range before numpy() "
    "moves nothing"
)
POOLED = "Drivers refuse advice on memory of pools."


class Finding(NamedTuple):
    """Waste that a trace shows, with advice.

    ``memory`` is the `TraceMemory`, or None for all. ``observation`` and ``advice`` are sentences,
    ``evidence`` the sums behind them by their names in `TraceSums`.
    """

    memory: TraceMemory | None
    observation: str
    evidence: dict[str, int | float]
    advice: str

    def __hash__(self) -> int:
        """A hash without the evidence, a dict, which has no hash."""
        return hash((self.memory, self.observation, self.advice))

    def __str__(self) -> str:
        return f"{self.observation}\n    {self.advice}" if self.advice else self.observation


Costed = tuple[float, Finding]


def by_faults(sums: TraceSums, direction: int) -> int:
    """Bytes that moved in a direction because of faults."""
    return sum(sums.by_cause[cause][direction] for cause in BY_FAULT)


def viewed(sums: TraceSums) -> int:
    """Bytes that ``numpy()`` and ``torch("cpu")`` brought to the host."""
    return sums.by_cause["host_view"][1]


def evidence_of(sums: TraceSums, *names: str) -> dict[str, int | float]:
    """The named sums, without those that were not recorded."""
    counts = {name: getattr(sums, name) for name in names}
    return {name: value for name, value in counts.items() if value is not None}


def counts(moved: float, nbytes: int) -> bool:
    """True if so many bytes by faults, of a memory of that size, are worth a finding."""
    return moved > ENOUGH or moved >= max(LEAST, ENOUGH_SHARE * nbytes)


def discards() -> bool:
    """True if the driver has discards, which give memory pages without their contents."""
    return _managedmem._driver_info()["version"] >= DISCARDS_SINCE


def is_only_written(part: TraceView, memory: TraceMemory) -> bool:
    """True if faults brought all of the memory to a device, and each was a plain write."""
    results = memory._results
    arrived: dict[int, list[tuple[int, int]]] = {i: [] for i in memory._indices}
    for record in results.raw_records(part._parts()):
        if record[4] not in arrived:
            continue
        if record[7] == DEVICE_FAULT and ACCESSES[record[9]] != "write":
            return False
        if record[7] == MOVE and record[6] >= 0 and CAUSES[record[8]] in BY_FAULT:
            arrived[record[4]].append((record[2], record[2] + record[3]))
    return all(
        overlap(joined(ranges), each.address, each.end) == each.nbytes
        for i, ranges in arrived.items()
        for each in [results.memories[i]]
    )


class Material(NamedTuple):
    """A memory, with a fact that only its events show."""

    memory: TraceMemory
    is_output: bool
    """Faults brought all of it to a device, and each of them was a write."""

    @property
    def label(self) -> str:
        """The label as text."""
        return label_text(self.memory.label)

    @property
    def device(self) -> str:
        """The device of the memory as code; "device" unless it is exactly one."""
        devices = self.memory.devices
        return repr(devices[0]) if len(devices) == 1 else "device"

    def overlaps(self, others: Sequence[RawMemory]) -> bool:
        """True if one of `others` has some of the addresses of this memory."""
        memories = self.memory._results.memories
        own = [memories[i] for i in self.memory._indices] if others else []
        return any(m.address < o.end and o.address < m.end for m in own for o in others)

    @property
    def takes_advice(self) -> bool:
        """False if a pool has some of it: drivers refuse advice on memory of pools."""
        return not self.overlaps([m for m in self.memory._results.memories if m.pooled])

    def hedged(self, finding: Finding) -> Finding:
        """The finding, which says so if it gives advice for memory that may be from a pool."""
        if not any(word in finding.advice for word in ("read_duplicated", "preferred_location")):
            return finding
        foreign = [m for m in self.memory._results.memories if m.kind == "foreign"]
        if not self.overlaps(foreign):
            return finding
        return finding._replace(advice=f"{finding.advice} {POOLED}")

    @property
    def can_duplicate(self) -> bool:
        """True if read_mostly can be set, and is not set already."""
        return self.takes_advice and not self.memory.duplicated


def material_of(part: TraceView, memory: TraceMemory) -> Material:
    """The memory as Material. Its events are read only if its sums suggest an output."""
    writes = memory.device_write_faults
    is_output = (
        bool(writes)
        and writes == memory.device_faults
        and counts(by_faults(memory, 0), memory.nbytes)
        and len(memory.devices) == 1
        and not memory.duplicated
        and discards()
        and not part._whole()._problems()  # none of its faults may be missing
        and is_only_written(part, memory)
    )
    return Material(memory, is_output)


def contested(given: Material) -> Costed | None:
    """Host and device compete for the same pages: thrashing or throttling."""
    memory = given.memory
    if not (memory.thrashing or memory.throttled):
        return None
    parts = []
    if memory.thrashing:
        parts.append(f"{size_text(memory.thrashing)} thrashed")
    if memory.throttled:
        parts.append(f"processors waited {time_text(memory.throttled)} for their turn")
    advice = (
        "Set preferred_location to the processor that uses it most, and add the other to "
        "accessed_by, which then reaches it in place."
    )
    finding = Finding(
        memory,
        f"{given.label}: several processors compete for the same pages: {' and '.join(parts)}.",
        evidence_of(memory, "thrashing", "throttled"),
        advice if given.takes_advice else f"Let one processor use it at a time. {POOLED}",
    )
    return memory.throttled + memory.thrashing * CONTESTED_COST, finding


def evicted(given: Material) -> Costed | None:
    """Pages left a device that was full."""
    memory = given.memory
    if memory.evicted <= ENOUGH:
        return None
    stays = (
        "memory that is used least can stay on the host, with preferred_location = Host() and the "
        "device in accessed_by."
    )
    finding = Finding(
        memory,
        f"{given.label}: {size_text(memory.evicted)} were evicted, because a device was full.",
        evidence_of(memory, "evicted"),
        f"PrefetchPlan.fit() chooses what fits; {stays}"
        if given.takes_advice
        else "PrefetchPlan.fit() chooses what fits.",
    )
    return memory.evicted * EVICTED_COST, finding


def turned(given: Material) -> Costed | None:
    """Pages went to the device by faults and back by faults or ``numpy()``, once or often."""
    memory = given.memory
    there, back = by_faults(memory, 0), by_faults(memory, 1) + viewed(memory)
    if not all(counts(n, memory.nbytes) for n in (there, back, memory.turned_back)):
        return None
    cost = there * TO_DEVICE_COST + by_faults(memory, 1) * TO_HOST_COST
    once = max(memory.moved - memory.turned_back, 1)
    times = max(round(min(memory.to_device, memory.to_host) / once), 1)
    often = f" {times} times" if times > 1 else ""
    each = (
        f"{size_text(there)} each way"
        if size_text(there) == size_text(back)
        else f"{size_text(there)} there, {size_text(back)} back"
    )
    names = ("to_device", "to_host", "turned_back", "host_write_faults", "device_write_faults")
    by = "by faults and numpy()" if viewed(memory) else "by faults"
    is_small = times > 1 and once < SMALL_PART * memory.nbytes
    if is_small and given.takes_advice:
        observation = (
            f"{given.label}: {size_text(once)} of {size_text(memory.nbytes)} went to the device "
            f"and back{often} ({each}) {by}."
        )
        advice = (
            f"preferred_location = Host() and accessed_by.add({given.device}) let the device use "
            "the few pages in place."
        )
    else:
        observation = f"{given.label} went to the device and back{often} ({each}) {by}."
        advice = _advice_for_turned(given)
    return cost, Finding(memory, observation, evidence_of(memory, *names), advice)


def _advice_for_turned(given: Material) -> str:
    memory = given.memory
    writes = (memory.host_write_faults or 0) + (memory.device_write_faults or 0)
    if given.is_output:
        return _advice_for_output(given)
    if writes:
        return (
            f"It is written ({count_text(writes)} faults were writes), so read_mostly would not "
            "help: prefetch it before each use."
        )
    if not given.can_duplicate:
        return "Prefetch it before each use." + ("" if given.takes_advice else f" {POOLED}")
    start = "" if memory.device_faults is None else "No fault of the device was a write. "
    copies = "MigrationPolicy.read_duplicated() would copy once if it is only read; "
    if viewed(memory) and discards():
        copies += f"{OVERWRITTEN}; "
    return f"{start}{copies}else prefetch it before each use."


def _advice_for_output(given: Material) -> str:
    return (
        f"No fault of the device was a read: if it overwrites all of it, "
        f"discard_prefetch({given.device}) before that brings pages without their contents; else "
        f"prefetch({given.device}) moves them at the speed of the link."
    )


def arrived(given: Material) -> Costed | None:
    """Pages went to the device by faults."""
    memory = given.memory
    moved = by_faults(memory, 0)
    if not counts(moved, memory.nbytes):
        return None
    finding = Finding(
        memory,
        f"{given.label}: {size_text(moved)} went to the device by faults.",
        evidence_of(memory, "to_device", "device_faults"),
        _advice_for_output(given)
        if given.is_output
        else f"prefetch({given.device}) before the work that uses it moves them at the speed of "
        "the link.",
    )
    return moved * TO_DEVICE_COST, finding


def _asked_text(memory: TraceMemory) -> str:
    asked = memory.by_cause["requested"][0]
    return f", and {size_text(asked)} to the device as requested" if asked else ""


def returned(given: Material) -> Costed | None:
    """Pages went to the host by faults."""
    memory = given.memory
    moved = by_faults(memory, 1)
    if moved <= ENOUGH:
        return None
    finding = Finding(
        memory,
        f"{given.label}: {size_text(moved)} went to the host by faults{_asked_text(memory)}.",
        evidence_of(memory, "to_host", "host_faults"),
        "prefetch(Host()) before the host uses it moves them at the speed of the link.",
    )
    return moved * TO_HOST_COST, finding


def brought(given: Material) -> Costed | None:
    """Pages went to the host for ``numpy()``, perhaps to be overwritten there.

    No event shows how the host uses them. If a device made the contents, the host surely reads
    them, and there is no finding.
    """
    memory = given.memory
    moved = viewed(memory)
    made_there = memory.device_write_faults or (memory.born is not None and not memory.to_device)
    if moved <= ENOUGH or made_there or not discards():
        return None
    parts = [OVERWRITTEN]
    once = max(memory.moved - memory.turned_back, 1)
    if min(memory.by_cause["requested"][0], moved) >= 2 * once:  # in rounds
        parts.append(
            f"if a device overwrites it, discard_prefetch({given.device}) in place of prefetch() "
            "moves nothing"
        )
        if given.can_duplicate:
            parts.append("if neither writes it, MigrationPolicy.read_duplicated() copies once")
    text = "; ".join(parts)
    finding = Finding(
        memory,
        f"{given.label}: {size_text(moved)} went to the host for numpy(){_asked_text(memory)}.",
        evidence_of(memory, "to_device", "to_host", "turned_back"),
        f"{text[0].upper()}{text[1:]}.",
    )
    return moved * REQUESTED_COST, finding


def of_memory(given: Material) -> Iterator[Costed]:
    """The findings of one memory, each with its cost in seconds."""
    both = turned(given)
    rules = (contested, evicted) if both else (contested, evicted, arrived, returned, brought)
    for finding in filter(None, [both, *(rule(given) for rule in rules)]):
        yield finding[0], given.hedged(finding[1])


def nothing_to_gain(total: TraceSums) -> bool:
    """True if moves were requested, ``numpy()`` made all others, and no processor faulted."""
    requested = sum(total.by_cause["requested"])
    return (
        bool(requested)
        and requested + viewed(total) == total.moved
        and not (total.host_faults or total.device_faults)
    )


def requested_only(total: TraceSums, memories: Iterable[TraceMemory]) -> Finding:
    """The finding for a trace for which `nothing_to_gain` is True."""
    advice = ""
    names = ["to_device", "to_host", "host_faults", "device_faults"]
    start = "All moves were requested, and no processor faulted"
    if viewed(total):
        start = "All moves were requested or those of numpy(), and no processor faulted"
    text = f"{start}: there is nothing to gain."
    if total.turned_back:
        names.append("turned_back")
        text = f"{start}. {size_text(total.turned_back)} went back where they came from."
        most = max(memories, key=lambda memory: memory.turned_back)
        advice = (
            f"Leave out prefetches to where nothing uses the memory before it goes back: most of "
            f"it, {size_text(most.turned_back)}, is {label_text(most.label)}."
        )
    return Finding(None, text, evidence_of(total, *names), advice)


def without_moves(memories: Sequence[TraceMemory]) -> Finding | None:
    """Memories that were prefetched, but had no byte moved on request."""
    unprefetched = [memory for memory in memories if not any(memory.by_cause["requested"])]
    if not unprefetched:
        return None
    labels = ", ".join(label_text(memory.label) for memory in unprefetched[:MOST_LABELS])
    more = f" and {len(unprefetched) - MOST_LABELS} more" if len(unprefetched) > MOST_LABELS else ""
    return Finding(
        unprefetched[0] if len(unprefetched) == 1 else None,
        f"{labels}{more}: prefetches moved nothing.",
        {name: sum(getattr(m, name) for m in unprefetched) for name in ("to_device", "to_host")},
        "A prefetch moves nothing if the pages are there already, were never used, or have no room "
        "on the device. residency() before the prefetch shows their places, and "
        "memory_info the room.",
    )


def findings_of(part: TraceView) -> tuple[Finding, ...]:
    """The findings of a trace or a slice, the largest cost first."""
    groups = [*part._groups()]
    costed = [each for memory in groups for each in of_memory(material_of(part, memory))]
    costed.sort(key=lambda each: -each[0])
    findings = [finding for _, finding in costed]
    if not findings and nothing_to_gain(part.total):
        findings.append(requested_only(part.total, groups))
    idle = without_moves(part._prefetched())
    if idle is not None:
        findings.append(idle)
    return tuple(findings[:MOST])
