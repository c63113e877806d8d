"""The rules of tune(): from the trace of each memory in each phase to the changes worth a try.

They share their thresholds with the findings of a trace. Nothing here runs a step or calls the
driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from managedmem._managedmem import Device, Host, MigrationPolicy
from managedmem._trace_findings import ENOUGH, SMALL_PART, by_faults, counts, viewed
from managedmem._tune_values import Location
from managedmem._units import count_text, label_text, size_text, time_text

if TYPE_CHECKING:
    from managedmem._trace import TraceSlice
    from managedmem._trace_results import TraceMemory, TraceSums

FREE_SHARE = 0.9
"""Prefetches may fill this share of the memory that a device had free at the start."""
MOST_NAMED = 3
"""A text names at most this many memories."""


# --- changes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prefetch:
    """A memory is prefetched before a phase."""

    name: str
    phase: str
    location: Location


@dataclass(frozen=True)
class Discard:
    """A memory is discarded before a phase: it gets pages at a location, without its contents."""

    name: str
    phase: str
    location: Location


@dataclass(frozen=True)
class Advise:
    """A memory gets a policy. With ``stays`` it stays in one place, and needs no prefetches."""

    name: str
    policy: MigrationPolicy
    stays: bool


Item = Prefetch | Discard | Advise


@dataclass(frozen=True)
class Setting:
    """Advice by memory, prefetches and discards by phase and memory: a point of the search."""

    policies: Mapping[str, Advise] = field(default_factory=dict)
    prefetches: Mapping[tuple[str, str], Location] = field(default_factory=dict)
    discards: Mapping[tuple[str, str], Location] = field(default_factory=dict)

    def with_items(self, items: Iterable[Item]) -> Setting:
        """The setting with changes, which replace the earlier changes that they contradict."""
        policies, prefetches = dict(self.policies), dict(self.prefetches)
        discards = dict(self.discards)
        for item in items:
            if isinstance(item, Advise):
                policies[item.name] = item
                for key in [k for k in prefetches if k[1] == item.name]:
                    if item.stays or isinstance(prefetches[key], Host):
                        del prefetches[key]
                continue
            key = item.phase, item.name
            added, other = (
                (prefetches, discards) if isinstance(item, Prefetch) else (discards, prefetches)
            )
            added[key] = item.location
            other.pop(key, None)
            if item.name in policies and policies[item.name].stays:
                del policies[item.name]
        return Setting(policies, prefetches, discards)

    def without(self, item: Item) -> Setting:
        """The setting without one change."""
        if isinstance(item, Advise):
            policies = {name: each for name, each in self.policies.items() if name != item.name}
            return replace(self, policies=policies)
        key = item.phase, item.name
        return Setting(
            self.policies,
            {k: v for k, v in self.prefetches.items() if k != key},
            {k: v for k, v in self.discards.items() if k != key},
        )

    def has(self, item: Item) -> bool:
        """True if the change is a part of the setting."""
        if isinstance(item, Advise):
            return self.policies.get(item.name) == item
        items = self.prefetches if isinstance(item, Prefetch) else self.discards
        return items.get((item.phase, item.name)) == item.location

    def on_devices(self) -> dict[Device, set[str]]:
        """The memories that are brought to each device."""
        by_device: dict[Device, set[str]] = {}
        for (_, name), location in [*self.prefetches.items(), *self.discards.items()]:
            if isinstance(location, Device):
                by_device.setdefault(location, set()).add(name)
        return by_device


@dataclass(frozen=True)
class Candidate:
    """A change that is worth a try, with the rule and the evidence behind it."""

    rule: str
    change: str
    items: tuple[Item, ...]
    evidence: dict[str, int | float]
    reason: str
    phases: frozenset[str]
    estimate: float | None = None
    """Seconds that it could save in a run, which order the candidates; None without evidence."""

    @property
    def names(self) -> frozenset[str]:
        """The memories that it changes."""
        return frozenset(item.name for item in self.items)


# --- evidence -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PhaseEvidence:
    """The bytes, faults and seconds of a memory in a phase, as means over runs."""

    name: str
    phase: str
    nbytes: int
    device: Device | None = None
    arrived: float = 0
    """Bytes that faults moved to a device."""
    returned: float = 0
    """Bytes that faults moved to the host."""
    viewed: float = 0
    """Bytes that ``numpy()`` moved to the host."""
    requested: tuple[float, float] = (0, 0)
    """Bytes that prefetches and advice moved to a device, and to the host."""
    device_faults: float | None = None
    device_write_faults: float | None = None
    host_faults: float | None = None
    host_write_faults: float | None = None
    thrashing: float = 0
    throttled: float = 0.0
    evicted: float = 0
    turned_back: float = 0
    stall: float = 0.0
    """The memory's share of the seconds of the phase, by the bytes that moved unasked: an upper
    bound. Where times mean nothing, these bytes themselves."""
    copying: float = 0.0
    """Seconds in which something of the memory moved."""
    phases: frozenset[str] = frozenset()
    """In the sums over all phases: the phases in which the memory moved unasked."""

    @property
    def unasked(self) -> float:
        """Bytes that moved without a prefetch of the user."""
        return self.arrived + self.returned + self.viewed


_COUNTED = (
    "device_faults",
    "device_write_faults",
    "host_faults",
    "host_write_faults",
    "thrashing",
    "throttled",
    "evicted",
    "turned_back",
)


def destination(part: TraceSlice, memory: TraceMemory) -> Device | None:
    """The device that got most bytes of the memory, or that faulted on it."""
    if len(memory.devices) <= 1:
        return memory.devices[0] if memory.devices else None
    by_device: dict[Device, int] = {}
    for event in part.events(of=memory):
        place = event.destination if event.kind == "move" else event.source
        if event.kind in ("move", "device_fault") and isinstance(place, Device):
            by_device[place] = by_device.get(place, 0) + max(event.nbytes, 1)
    return max(by_device, key=lambda each: by_device[each]) if by_device else None


def unasked(sums: TraceSums) -> int:
    """Bytes that moved between host and devices without a prefetch of the user."""
    return by_faults(sums, 0) + by_faults(sums, 1) + viewed(sums)


def evidence_in(
    phase: str,
    slices: Sequence[TraceSlice],
    memories: Mapping[str, Sequence[TraceMemory]],
    timed: bool = True,
) -> Iterator[PhaseEvidence]:
    """The evidence of one phase, from a slice for each run. `memories` has one for each slice, by
    name."""
    runs = len(slices)
    moved = {name: sum(map(unasked, per_run)) for name, per_run in memories.items()}
    total = max(sum(unasked(part.total) for part in slices), sum(moved.values()), 1)
    duration = sum(part.duration for part in slices) / runs if timed else total / runs
    for name, per_run in memories.items():
        pairs = zip(slices, per_run, strict=True)
        devices = [d for part, memory in pairs if (d := destination(part, memory)) is not None]
        sums: dict[str, float | None] = {}
        for each in _COUNTED:
            values = [getattr(memory, each) for memory in per_run]
            sums[each] = None if None in values else sum(values) / runs
        yield PhaseEvidence(
            name,
            phase,
            per_run[0].nbytes,
            devices[-1] if devices else None,
            sum(by_faults(memory, 0) for memory in per_run) / runs,
            sum(by_faults(memory, 1) for memory in per_run) / runs,
            sum(map(viewed, per_run)) / runs,
            (
                sum(memory.by_cause["requested"][0] for memory in per_run) / runs,
                sum(memory.by_cause["requested"][1] for memory in per_run) / runs,
            ),
            stall=duration * moved[name] / total,
            copying=sum(memory.move_time for memory in per_run) / runs if timed else 0.0,
            **sums,  # type: ignore[arg-type]
        )


def together(seen: Sequence[PhaseEvidence]) -> PhaseEvidence:
    """The sums of one memory over all phases."""

    def added(name: str) -> float | None:
        values = [getattr(each, name) for each in seen]
        return None if None in values else sum(values)

    first = seen[0]
    busiest = max(seen, key=lambda each: each.unasked)
    device = busiest.device or next((each.device for each in seen if each.device), None)
    plain = ("arrived", "returned", "viewed", "stall", "copying", *_COUNTED)
    return replace(
        first,
        phase="",
        phases=frozenset(each.phase for each in seen if each.unasked),
        device=device,
        requested=(
            sum(each.requested[0] for each in seen),
            sum(each.requested[1] for each in seen),
        ),
        **{name: added(name) for name in plain},  # type: ignore[arg-type]
    )


# --- rules --------------------------------------------------------------------------------------


class Material(NamedTuple):
    """The facts that the rules need beside the counters."""

    phases: Sequence[str]
    points: frozenset[str]
    """The phases before which prefetches may come."""
    sizes: Mapping[str, int]
    base: Mapping[str, MigrationPolicy]
    """The advice that memories had before the search."""
    advisable: frozenset[str]
    """The memories that take advice."""
    disposable: Mapping[str, str | None]
    """Memories whose contents may be lost, with the phase that overwrites them if it is known."""
    free: Mapping[Device, int]
    """The bytes that each usable device had free. Others get no prefetch and no advice."""
    mapped: frozenset[Device] = frozenset()
    """The devices whose memory the host can use in place."""

    def fits(self, setting: Setting) -> bool:
        """True if prefetches leave a tenth of the free memory of every device."""
        return all(
            sum(self.sizes[name] for name in names) <= FREE_SHARE * self.free.get(device, 0)
            for device, names in setting.on_devices().items()
        )


def names_text(names: Iterable[str]) -> str:
    """Some names, and the number of the others."""
    ordered = sorted(names)
    shown = ", ".join(label_text(name) for name in ordered[:MOST_NAMED])
    more = len(ordered) - MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def items_text(items: Iterable[Item]) -> str:
    """Changes in words."""
    groups: dict[tuple[str, str], list[str]] = {}
    for item in items:
        if isinstance(item, Prefetch):
            words = "prefetch", f"to {item.location} before {item.phase}"
        elif isinstance(item, Discard):
            words = "discard_prefetch", f"at {item.location} before {item.phase}"
        else:
            text = str(item.policy).removeprefix("MigrationPolicy(").removesuffix(")")
            words = f"{text} for", ""
        groups.setdefault(words, []).append(item.name)
    texts = (f"{start} {names_text(names)} {end}" for (start, end), names in groups.items())
    return "; ".join(text.rstrip() for text in texts)


def _candidate(
    rule: str,
    items: Sequence[Item],
    seen: Sequence[PhaseEvidence],
    reason: str,
    estimate: float | None,
) -> Candidate:
    evidence: dict[str, int | float] = {}
    for name in ("arrived", "returned", "viewed", *_COUNTED):
        values = [value for each in seen if (value := getattr(each, name))]
        if values:
            evidence[name] = sum(values)
    phases = {item.phase for item in items if not isinstance(item, Advise)}
    phases |= {each.phase for each in seen if each.phase}.union(*(each.phases for each in seen))
    return Candidate(
        rule, items_text(items), tuple(items), evidence, reason, frozenset(phases), estimate
    )


def _moves_text(seen: Sequence[PhaseEvidence]) -> str:
    arrived, returned = sum(s.arrived for s in seen), sum(s.returned for s in seen)
    brought = sum(s.viewed for s in seen)
    parts = [f"{size_text(round(arrived))} to the device"] if arrived else []
    parts += [f"{size_text(round(returned))} to the host"] if returned else []
    texts = [f"{' and '.join(parts)} by faults"] if parts or not brought else []
    texts += [f"{size_text(round(brought))} to the host by numpy()"] if brought else []
    return ", ".join(texts)


def prefetches(
    material: Material, seen: Iterable[PhaseEvidence]
) -> Iterator[tuple[Candidate, PhaseEvidence]]:
    """R1 and R2: memory that faults move in a phase is prefetched before that phase."""
    for each in seen:
        if each.phase not in material.points:
            continue
        moved = max(each.unasked, 1)
        wait = max(each.stall - each.copying, 0.0)
        if each.device and each.device in material.free and counts(each.arrived, each.nbytes):
            item = Prefetch(each.name, each.phase, each.device)
            reason = f"{size_text(round(each.arrived))} to the device by faults in {each.phase}"
            yield _candidate("R1", [item], [each], reason, wait * each.arrived / moved), each
        if each.returned > ENOUGH:
            item = Prefetch(each.name, each.phase, Host())
            reason = f"{size_text(round(each.returned))} to the host by faults in {each.phase}"
            yield _candidate("R2", [item], [each], reason, wait * each.returned / moved), each


def goes_both_ways(whole: PhaseEvidence, arrived: float | None = None) -> bool:
    """True if enough bytes move both ways in a run: by faults, and back also by ``numpy()``."""
    there = whole.arrived if arrived is None else arrived
    return counts(there, whole.nbytes) and counts(whole.returned + whole.viewed, whole.nbytes)


def duplicated(material: Material, whole: PhaseEvidence) -> Candidate | None:
    """R3, R4: read_mostly for memory that goes both ways, unless a device writes it."""
    base = material.base[whole.name]
    # The step may prefetch to the device and leave the way back to numpy().
    asked = whole.requested[0] if whole.viewed else 0
    if (
        not goes_both_ways(whole, whole.arrived + asked)
        or whole.device_write_faults
        or base.read_mostly
    ):
        return None
    policy = with_advice(base, read_mostly=True)
    moves = _moves_text([whole])
    if asked:
        moves += f", {size_text(round(asked))} to the device as requested"
    reason = f"{moves}, and no fault of the device was a write"
    if whole.device_write_faults is None:
        reason = f"{moves}; whether the device writes it was not recorded"
    share = (whole.returned + whole.viewed) / max(whole.unasked, 1)
    return _candidate(
        "R3", [Advise(whole.name, policy, False)], [whole], reason, whole.stall * share
    )


def in_place(material: Material, whole: PhaseEvidence, rule: str, reason: str) -> Candidate:
    """The memory stays on the host, and the device uses it there."""
    device = whole.device
    users = [device] if device else []
    policy = with_advice(material.base[whole.name], Host(), users, read_mostly=False)
    return _candidate(
        rule, [Advise(whole.name, policy, True)], [whole], reason, whole.stall + whole.throttled
    )


def used_in_place(material: Material, whole: PhaseEvidence) -> Candidate | None:
    """R5: access in place for memory that comes back in each run, above all small parts of it."""
    if not goes_both_ways(whole):
        return None
    reason = f"{_moves_text([whole])} in each run"
    if whole.arrived < SMALL_PART * whole.nbytes:
        reason += f", only a part of {size_text(whole.nbytes)}"
    return in_place(material, whole, "R5", reason)


def contested(material: Material, whole: PhaseEvidence) -> Candidate | None:
    """R6: a place for memory that host and device compete for."""
    if not (whole.thrashing or whole.throttled):
        return None
    parts = [f"{size_text(round(whole.thrashing))} thrashed"] if whole.thrashing else []
    parts += [f"{time_text(whole.throttled)} throttled"] if whole.throttled else []
    reason = ", ".join(parts)
    device = whole.device
    device_faults, host_faults = whole.device_faults or 0, whole.host_faults or 0
    reason += (
        f"; {count_text(round(device_faults))} faults of the device, "
        f"{count_text(round(host_faults))} of the host"
    )
    if device not in material.mapped or device_faults <= host_faults:
        return in_place(material, whole, "R6", reason)
    policy = with_advice(material.base[whole.name], device, [Host()], read_mostly=False)
    estimate = whole.stall + whole.throttled
    return _candidate("R6", [Advise(whole.name, policy, True)], [whole], reason, estimate)


def overwritten(material: Material, seen: Sequence[PhaseEvidence]) -> Iterator[Candidate]:
    """R8: contents that will be overwritten need not move."""
    by_name: dict[str, list[PhaseEvidence]] = {}
    for each in seen:
        by_name.setdefault(each.name, []).append(each)
    for name, given in material.disposable.items():
        for each in by_name.get(name, ()):
            if given is not None and each.phase != given:
                continue
            sure = given is not None or len(material.phases) == 1
            yield from _discards(material, each, by_name[name], sure)


def _discards(
    material: Material, each: PhaseEvidence, of_name: Sequence[PhaseEvidence], sure: bool
) -> Iterator[Candidate]:
    """The discards before a phase. Unless it is `sure` that the phase overwrites the memory, all
    faults of the side to which the memory moves must be writes, and no other phase may have write
    faults of that side."""
    sides: list[tuple[float, Location | None, str]] = [
        (each.arrived + each.requested[0], each.device, "device"),
        (each.returned + each.requested[1] + each.viewed, Host(), "host"),
    ]
    for moved, location, side in sides:
        writes, faults = (getattr(each, f"{side}_{name}") for name in ("write_faults", "faults"))
        others = [getattr(s, f"{side}_write_faults") for s in of_name if s.phase != each.phase]
        written = writes and writes == faults and not any(others)
        if moved <= ENOUGH or location is None or not (sure or written):
            continue
        if isinstance(location, Device) and location not in material.free:
            continue
        reason = f"{size_text(round(moved))} to the {side} in {each.phase}, which overwrites it"
        item = Discard(each.name, each.phase, location)
        yield _candidate("R8", [item], [each], reason, max(each.stall, each.copying))


def with_advice(
    base: MigrationPolicy,
    preferred: Location | None = None,
    accessed_by: Iterable[Location] = (),
    *,
    read_mostly: bool | None = None,
) -> MigrationPolicy:
    """A copy of the policy with the given parts replaced."""
    return MigrationPolicy(
        read_mostly=base.read_mostly if read_mostly is None else read_mostly,
        preferred_location=base.preferred_location if preferred is None else preferred,
        accessed_by=base.accessed_by.union(accessed_by),
    )


def joined(parts: Sequence[Candidate]) -> Candidate:
    """Several candidates as one."""
    items = tuple(item for part in parts for item in part.items)
    evidence: dict[str, int | float] = {}
    for part in parts:
        for name, value in part.evidence.items():
            evidence[name] = evidence.get(name, 0) + value
    estimates = [part.estimate for part in parts if part.estimate is not None]
    rules = sorted({part.rule for part in parts})
    reasons = {part.reason for part in parts}
    return Candidate(
        "+".join(rules),
        items_text(items),
        items,
        evidence,
        reasons.pop() if len(reasons) == 1 else f"{len(parts)} changes together",
        frozenset().union(*(part.phases for part in parts)),
        sum(estimates) if estimates else None,
    )


def compatible(parts: Iterable[Candidate]) -> list[Candidate]:
    """One candidate for each memory and phase: a discard first, else the largest estimate."""
    chosen: dict[tuple[str, str], Candidate] = {}
    for part in sorted(parts, key=lambda each: (each.rule != "R8", -(each.estimate or 0.0))):
        (item,) = part.items
        chosen.setdefault((getattr(item, "phase", ""), item.name), part)
    return list(chosen.values())


def groups_of(parts: Sequence[Candidate], phases: Sequence[str]) -> Iterator[Candidate]:
    """Candidates of one kind joined: the prefetches of a phase, of a memory, and all; the advice.

    If many memories gain a little each, none of them would pass alone. And a prefetch in one
    direction may need the prefetch in the other direction.
    """

    def of_rules(*rules: str) -> list[Candidate]:
        return [part for part in parts if part.rule in rules]

    moves, discards = of_rules("R1", "R2"), of_rules("R8")
    sets = [*([part for part in moves if phase in part.phases] for phase in phases)]
    for name in dict.fromkeys(name for part in moves for name in part.names):
        sets.append([part for part in moves if name in part.names])
        sets.append([part for part in [*discards, *moves] if name in part.names])
    sets += [moves, [*discards, *moves], of_rules("R3"), of_rules("R5"), of_rules("R6"), discards]
    for rule in ("R1", "R2"):
        alike = of_rules(rule)
        sets.append(alike)
        sets += ([part for part in alike if phase in part.phases] for phase in phases)
    for group in map(compatible, sets):
        if len(group) > 1:
            yield joined(group)


def fitted(
    material: Material, wholes: Sequence[PhaseEvidence], moves: Sequence[Candidate]
) -> list[str]:
    """R7: the names of memories that fit the devices, those with most bytes by faults first."""
    left = {device: FREE_SHARE * nbytes for device, nbytes in material.free.items()}
    moved = {item.name for part in moves for item in part.items}
    chosen = []
    for whole in sorted(wholes, key=lambda each: -each.arrived):
        if whole.name in moved and whole.device in left:
            nbytes = material.sizes[whole.name]
            if nbytes <= left[whole.device]:
                left[whole.device] -= nbytes
                chosen.append(whole.name)
    return chosen


def crowded(
    material: Material, wholes: Sequence[PhaseEvidence], moves: Sequence[Candidate]
) -> Iterator[Candidate]:
    """R7: if devices are too small, what fits is prefetched, and the rest stays on the host."""
    everything = Setting().with_items(item for part in compatible(moves) for item in part.items)
    evicted = sum(whole.evicted for whole in wholes)
    if evicted <= ENOUGH and material.fits(everything):
        return
    chosen = fitted(material, wholes, moves)
    taken = compatible(part for part in moves if part.names <= {*chosen})
    reason = (
        f"{size_text(round(evicted))} were evicted"
        if evicted
        else "all prefetches together do not fit the free memory"
    )
    if len(taken) > 1:
        yield replace(joined(taken), rule="R7", reason=f"{reason}: these fit")
    rest = [w for w in wholes if w.name not in chosen and w.device in material.free and w.arrived]
    if not rest and evicted:
        rest = sorted((w for w in wholes if w.arrived), key=lambda w: w.arrived / w.nbytes)[:1]
    cold = [
        in_place(material, whole, "R7", f"{reason}: it stays on the host")
        for whole in rest
        if whole.name in material.advisable
    ]
    if cold:
        yield cold[0] if len(cold) == 1 else replace(joined(cold), rule="R7", reason=reason)


def propose(material: Material, seen: Sequence[PhaseEvidence]) -> list[Candidate]:
    """The candidates that the evidence suggests, the largest estimate first."""
    by_name: dict[str, list[PhaseEvidence]] = {}
    for each in seen:
        by_name.setdefault(each.name, []).append(each)
    wholes = [together(same) for same in by_name.values()]
    moves = [candidate for candidate, _ in prefetches(material, seen)]
    parts = list(moves)
    for whole in wholes:
        if whole.name in material.advisable and whole.device in material.free:
            made = (rule(material, whole) for rule in (duplicated, used_in_place, contested))
            parts += filter(None, made)
    parts += overwritten(material, seen)
    candidates = [*groups_of(parts, material.phases), *crowded(material, wholes, moves), *parts]
    return usable(material, sorted(candidates, key=lambda each: -(each.estimate or 0.0)))


def propose_all(material: Material, device: Device) -> list[Candidate]:
    """The candidates without any evidence: every rule for every memory, the largest first."""
    if device not in material.free:
        return []
    reason = "no evidence: not recorded"
    parts: list[Candidate] = []
    for name in sorted(material.sizes, key=lambda each: -material.sizes[each]):
        base = material.base[name]
        for phase in material.phases:
            each = PhaseEvidence(name, phase, material.sizes[name], device)
            if phase in material.points:
                parts += (
                    _candidate(rule, [Prefetch(name, phase, place)], [each], reason, None)
                    for rule, place in (("R1", device), ("R2", Host()))
                )
            if name in material.disposable and (
                material.disposable[name] == phase or len(material.phases) == 1
            ):
                item = Discard(name, phase, device)
                parts.append(_candidate("R8", [item], [each], reason, None))
        if name in material.advisable:
            copies = Advise(name, with_advice(base, read_mostly=True), False)
            in_place_policy = with_advice(base, Host(), [device], read_mostly=False)
            stays = Advise(name, in_place_policy, True)
            whole = [PhaseEvidence(name, "", material.sizes[name], device)]
            parts += (
                _candidate(rule, [item], whole, reason, None)
                for rule, item in (("R3", copies), ("R5", stays))
            )
    return usable(material, [*groups_of(parts, material.phases), *parts])


def usable(material: Material, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Each candidate once, without those that would fill a device or set advice that is there."""
    seen: set[frozenset[Item]] = set()
    kept = []
    for candidate in candidates:
        items = frozenset(candidate.items)
        if any(isinstance(i, Advise) and i.policy == material.base[i.name] for i in items):
            continue
        if items and items not in seen and material.fits(Setting().with_items(items)):
            seen.add(items)
            kept.append(candidate)
    return kept
