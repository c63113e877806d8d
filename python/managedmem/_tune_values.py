"""The findings of tune() as plain values: times, trials, and all of a result but its memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from managedmem._managedmem import Device, Host, MigrationPolicy
from managedmem._units import count_text, record_text, size_text, time_text

KEPT = "kept"
"""The verdict on a trial whose change is a part of the result."""
SECONDS, COUNTS = "seconds", "bytes and faults"
"""What decided about changes."""
FEW = 5
"""Fewer pairs have no interval, only a range."""

TAIL = 0.025
"""The probability on each side of an interval of 95 %."""

Location = Device | Host
Entries = dict[str, list[tuple[str, Location]]]
"""The names of memories with locations, by phase."""


class TuneTime(NamedTuple):
    """A median in seconds, with its interval of 95 % (93.75 % with 5 pairs)."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{signed(self.median)} ({signed(self.low)} to {signed(self.high)})"


def signed(seconds: float) -> str:
    """Seconds that can be negative, as s, ms or us."""
    return f"{'-' if seconds < 0 else ''}{time_text(abs(seconds))}"


CountPairs = dict[str, tuple[int, int]]
"""The usual "bytes" and "faults" of a run, without a change and with it."""


def counts_text(counts: CountPairs, side: int) -> str:
    """The bytes and faults of a run, without (0) or with (1) the change."""
    return f"{size_text(counts['bytes'][side])} and {count_text(counts['faults'][side])} faults"


def order_index(count: int) -> int:
    """The k for which the k-th smallest and the k-th largest of `count` values bound the median.

    The largest k with P(B < k) <= 2.5 %, B binomial with p = 1/2; 1 if there is none.
    """
    below, largest = 0, 1
    for k in range(1, count // 2 + 1):
        below += math.comb(count, k - 1)
        if below > TAIL * (1 << count):
            break
        largest = k
    return largest


def confidence(count: int) -> float:
    """The probability with which the interval of `count` values contains the median."""
    k = order_index(count)
    return 1 - 2 * sum(math.comb(count, i) for i in range(k)) / (1 << count)


def interval_of(values: Sequence[float]) -> TuneTime:
    """The median of values with its interval."""
    ordered = sorted(values)
    k = order_index(len(ordered))
    return TuneTime(statistics.median(ordered), ordered[k - 1], ordered[-k])


class TuneTrial(NamedTuple):
    """A change that `tune` considered, with the reason for it and the times that decided.

    ``rule`` is the number of the rule in :doc:`the guide <tuning>`, "" for an attempt to do without
    a kept change. ``evidence`` has the sums of a run, means of the traced ones, by their names in
    `TraceSums`; ``arrived`` and ``returned`` are the bytes that faults moved to devices and to the
    host. ``estimate`` is the number of seconds that the change may save at most, which orders the
    trials, or None.

    ``pairs`` are the seconds of a run without and with the change, ``gain`` the interval of the
    differences (the range, of fewer than five), or None if it was not tried. ``cost`` is the
    seconds that applying its advice took, which no pair contains. ``verdict`` is "kept", or a
    sentence.

    ``counts`` has the usual "bytes" and "faults" of a run, each without and with the change, where
    those decided instead of seconds: on the emulated driver. ``estimate`` and ``gain`` are None
    there.
    """

    change: str
    rule: str
    reason: str
    evidence: dict[str, int | float]
    estimate: float | None
    pairs: tuple[tuple[float, float], ...]
    gain: TuneTime | None
    cost: float
    verdict: str
    counts: CountPairs | None = None

    def __repr__(self) -> str:
        return record_text(self, "change", "rule", "reason", "gain", "verdict", gain=str)

    def __hash__(self) -> int:
        """A hash without the evidence, a dict, which has no hash."""
        return hash((*self[:3], *self[4:]))


@dataclass(kw_only=True, eq=False, repr=False)
class TuneValues:
    """A `TuneResult` without its memory and its step."""

    policies: dict[str, MigrationPolicy]
    """The policy of each memory whose advice changed, by name."""
    before: TuneTime
    after: TuneTime
    gain: TuneTime | None
    pairs: tuple[tuple[float, float], ...]
    """The seconds of a run before and after, in the alternating pairs of the proof."""
    judged_by: str
    """What decided: "seconds", or "bytes and faults" on the emulated driver."""
    counts: CountPairs | None
    """The usual "bytes" over the bus, moved or used in place, and "faults" of a run, each before
    and after. None where seconds decided."""
    noise: float
    trials: tuple[TuneTrial, ...]
    phases: tuple[str, ...]
    evidence: str
    notes: tuple[str, ...]
    seconds: float
    machine: dict[str, Any]
    """The driver, the devices and the version of the package that measured it."""
    _prefetch_entries: Entries
    _discard_entries: Entries

    @property
    def speedup(self) -> float:
        """How many times faster a run is than before."""
        return self.before.median / self.after.median if self.after.median else 1.0

    def _names(self) -> set[str]:
        entries = [*self._prefetch_entries.values(), *self._discard_entries.values()]
        return {*self.policies, *(name for pairs in entries for name, _ in pairs)}

    def _headline(self) -> str:
        if self.counts is not None:
            before, after = (counts_text(self.counts, side) for side in (0, 1))
            if not self._names():
                return f"{before} per run; no change was proved to gain, judged by {COUNTS}"
            return f"{before} -> {after} per run, judged by {COUNTS}"
        if self.gain is None:
            return f"{self.before} per run; no change was proved to gain"
        return (
            f"{time_text(self.before.median)} -> {time_text(self.after.median)} per run, "
            f"{self.speedup:.2f} x as fast: a run saves {self.gain}"
        )
