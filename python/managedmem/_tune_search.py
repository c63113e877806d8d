"""The search of tune(): runs a step, places and puts back advice, and decides by paired runs.

A change is kept if the lower end of the interval of its paired gains is above the noise.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from managedmem._managedmem import (
    AppliedPolicy,
    CUDAError,
    Device,
    MigrationPolicy,
    PrefetchPlan,
    Stream,
)
from managedmem._tune_arguments import Limits, Phase
from managedmem._tune_rules import (
    Candidate,
    Discard,
    Item,
    Material,
    Prefetch,
    Setting,
    items_text,
)
from managedmem._tune_values import KEPT, TuneTime, TuneTrial, interval_of, order_index
from managedmem._units import time_text

MUCH_SLOWER = 3
"""A change that makes a run this many times slower gets only one pair."""
NOISE_ATTEMPTS = 3
"""The attempts to measure noise. By chance, one steady step in 25 fails the first one, of nine
pairs."""
REJECTED = "rejected"
OUT_OF_TIME = ("not tried: the time was up", "the time was up before it was proved")
MOST_ATTEMPTS = 5
"""The most attempts to restore advice, if other errors than the driver's come in between."""
LEGACY_STREAM = 0
NOT_SUPPORTED = 801


class TuneUnstableError(RuntimeError):
    """The unchanged step varies too much for `tune` to tell a gain from noise."""


# --- running a step -----------------------------------------------------------------------------


def plans_of(
    entries: Mapping[tuple[str, str], Any], targets: Mapping[str, Any]
) -> dict[str, PrefetchPlan]:
    """A plan for each phase of pairs (phase, memory) with a location."""
    by_phase: dict[str, list[tuple[Any, Any]]] = {}
    for (phase, name), location in entries.items():
        by_phase.setdefault(phase, []).append((targets[name], location))
    return {phase: PrefetchPlan(pairs) for phase, pairs in by_phase.items()}


class TunedStep:
    """Runs the phases of a step with plans before them; returns the results of the phases.

    With one phase it returns that phase's result, else a tuple with one for each. Work of other
    streams may use memory that is discarded, so devices are waited for around discards. `after` is
    called after each phase with its name; ``running`` is the name of the phase under way.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        plans: Mapping[str, PrefetchPlan],
        discards: Mapping[str, PrefetchPlan],
    ) -> None:
        self._phases, self._plans, self._discards = tuple(phases), plans, discards
        self.running: str | None = None

    def __call__(self, *, after: Callable[[str], object] | None = None) -> Any:
        results = []
        for phase in self._phases:
            self._prepare(phase.name)
            self.running = phase.name
            results.append(phase.run())
            self.running = None
            if after is not None:
                after(phase.name)
        return results[0] if len(results) == 1 else tuple(results)

    def _prepare(self, phase: str) -> None:
        """Execute the plans of discards and prefetches for a phase."""
        if phase in self._discards:
            plan = self._discards[phase]
            devices = {e.location for e in plan if isinstance(e.location, Device)} or {Device()}
            for device in devices:
                device.sync()
            plan.discard_prefetch()
            for device in devices:
                device.sync()
        if phase in self._plans:
            self._plans[phase].execute()

    def __repr__(self) -> str:
        return f"<tuned step of {', '.join(phase.name for phase in self._phases)}>"


def waiter_of(value: Any) -> Callable[[], Any] | None:
    """A method that waits for a stream or an event of any library; None for other values."""
    if isinstance(value, type):
        return None
    for name in ("synchronize", "sync"):
        method = getattr(value, name, None)
        if callable(method):
            return method  # type: ignore[no-any-return]
    if hasattr(type(value), "__cuda_stream__"):
        _, handle = value.__cuda_stream__()
        return Stream.from_handle(handle).sync
    return None


class Clock:
    """Measures runs of a step, from the first phase to the end of the device's work."""

    def __init__(
        self,
        clock: Callable[[], float],
        devices: set[Device],
        counts: Callable[[], Counts] | None = None,
    ) -> None:
        self.now = clock
        self.devices = devices
        self._counts = counts
        self.last: Counts = (0, 0)
        """The bytes and faults of the last run, if they are counted."""

    @property
    def counted(self) -> bool:
        """True if runs are judged by bytes and faults instead of seconds."""
        return self._counts is not None

    def counts(self) -> Counts:
        """The bytes and faults so far; zeros if they are not counted."""
        return (0, 0) if self._counts is None else self._counts()

    def wait(self, result: Any, is_single: bool) -> None:
        """Wait for the streams and events among the results; without any, for the devices."""
        waiters = [w for each in ((result,) if is_single else result) if (w := waiter_of(each))]
        for waiter in waiters:
            waiter()
        if waiters:
            Stream.from_handle(LEGACY_STREAM).sync()  # where the plans are executed
        else:
            for device in self.devices:
                device.sync()

    def run(self, step: TunedStep) -> tuple[float, Any]:
        """The seconds and the result of one run. The garbage collector pauses meanwhile."""
        collects = gc.isenabled()
        try:
            gc.disable()
            before, start = self.counts(), self.now()
            result = step()
            self.wait(result, len(step._phases) == 1)
            seconds, after = self.now() - start, self.counts()
            self.last = after[0] - before[0], after[1] - before[1]
            return seconds, result
        finally:
            if collects:
                gc.enable()


# --- advice -------------------------------------------------------------------------------------


class Placement:
    """The advice that is applied for a trial. The advice that memories had before can be put back.

    Blocks are ended in the reverse order of their beginning, because memories can share a page.
    """

    def __init__(self, targets: Mapping[str, Any]) -> None:
        self._targets = targets
        self._blocks: list[tuple[dict[str, MigrationPolicy], AppliedPolicy]] = []

    def use(self, setting: Setting) -> bool:
        """Apply the advice of a setting, and end all other; True if something changed."""
        wanted = {name: item.policy for name, item in setting.policies.items()}
        same = 0
        for policies, _ in self._blocks:
            if any(wanted.get(name) != policy for name, policy in policies.items()):
                break
            same += 1
        changed = same < len(self._blocks)
        while len(self._blocks) > same:
            self._end_last()
        for policies, _ in self._blocks:
            for name in policies:
                del wanted[name]
        groups: dict[MigrationPolicy, list[str]] = {}
        for name, policy in wanted.items():
            groups.setdefault(policy, []).append(name)
        for policy, names in groups.items():
            self._begin(policy, names)
        return changed or bool(groups)

    def _begin(self, policy: MigrationPolicy, names: list[str]) -> None:
        block = policy.applied([self._targets[name] for name in names])
        # Noted first: an interrupt can come as soon as the policy is applied.
        self._blocks.append((dict.fromkeys(names, policy), block))
        try:
            block.__enter__()
        except BaseException:  # it failed, or a signal's handler raised when it was done
            self._end_last()
            raise

    def _end_last(self) -> None:
        block = self._blocks[-1][1]
        try:
            block.restore()
        except RuntimeError:
            try:
                block.restore()  # what is not restored yet
            except CUDAError:
                raise
            except RuntimeError:
                pass  # it is not applied
        self._blocks.pop()

    def put_back(self) -> None:
        """Give every page the advice that it had before; raises the first failure at the end."""
        failure: BaseException | None = None
        attempts = 0
        while self._blocks:
            try:
                self._end_last()
                attempts = 0
            except BaseException as error:  # even one of a signal handler: the advice comes first
                failure = failure or error
                attempts += 1
                if isinstance(error, CUDAError) or attempts == MOST_ATTEMPTS:
                    self._blocks.pop()
        if failure is not None:
            raise failure


# --- trials -------------------------------------------------------------------------------------


Counts = tuple[int, int]
"""The bytes and the faults of a run."""


def shares(first: Counts, second: Counts) -> list[float]:
    """The parts of the bytes and of the faults that the second run saved; negative if it added."""
    return [(a - b) / max(a, b, 1) for a, b in zip(first, second, strict=True)]


class Pairs(NamedTuple):
    """Paired seconds, or bytes and faults if times mean nothing, with the reason for an early
    end."""

    seconds: list[tuple[float, float]]
    counts: list[tuple[Counts, Counts]] | None = None
    refused: str | None = None

    @property
    def gains(self) -> list[float]:
        """The seconds that the second of each pair saved.

        With counts, the larger of the saved parts of bytes and of faults. If it added to one of
        them, the added part, as a negative number.
        """
        if self.counts is None:
            return [first - second for first, second in self.seconds]
        shared = (shares(first, second) for first, second in self.counts)
        return [max(each) if min(each) >= 0 else min(each) for each in shared]

    def unchanged(self) -> dict[str, tuple[int, int]] | None:
        """The usual bytes and faults of the first runs, for both sides: nothing changed."""
        medians = self.medians()
        return medians and {name: (before, before) for name, (before, _) in medians.items()}

    def medians(self) -> dict[str, tuple[int, int]] | None:
        """The usual bytes and faults of the first and the second runs; None if seconds count."""
        if self.counts is None:
            return None
        before, after = (
            [statistics.median_low(each) for each in zip(*side, strict=True)]
            for side in zip(*self.counts, strict=True)
        )
        return {name: (before[i], after[i]) for i, name in enumerate(("bytes", "faults"))}


class Search:
    """Tries candidates one after the other, and keeps those that are proved."""

    def __init__(
        self,
        phases: Sequence[Phase],
        targets: Mapping[str, Any],
        limits: Limits,
        clock: Clock,
    ) -> None:
        self.phases, self.targets, self.limits, self.clock = phases, targets, limits, clock
        self.placement = Placement(targets)
        self.start = clock.now()
        self.setting = Setting()
        self.trials: list[TuneTrial] = []
        self.kept: list[tuple[int, Candidate]] = []  # with the numbers of their trials
        self.applied = "no change"
        self.active: TunedStep | None = None
        self.noise = 0.0
        self.usual = Pairs([])
        self.first_typical = self.typical = 0.0
        self._steps: dict[int, tuple[Setting, TunedStep]] = {}

    def step_of(self, setting: Setting) -> TunedStep:
        """The step with the plans of a setting."""
        known = self._steps.get(id(setting))
        if known is None or known[0] is not setting:
            made = TunedStep(
                self.phases,
                plans_of(setting.prefetches, self.targets),
                plans_of(setting.discards, self.targets),
            )
            known = self._steps[id(setting)] = (setting, made)
        return known[1]

    @contextmanager
    def applying(self, text: str) -> Iterator[None]:
        """Remember the candidate, for the notes of errors."""
        self.applied, before = text, self.applied
        yield
        self.applied = before  # left as it is by an error, whose note names the candidate

    def run(self, setting: Setting) -> tuple[float, Any]:
        """One run under a setting, whose advice is applied."""
        self.active = self.step_of(setting)
        return self.clock.run(self.active)

    def warm_up(self, setting: Setting, count: int) -> None:
        """Runs that are not measured."""
        for _ in range(count):
            self.run(setting)

    def pairs(self, first: Setting, second: Setting, enough: float | None = None) -> Pairs:
        """Alternating runs: first second, second first, and so on.

        Runs that are not measured follow every change of the setting, because pages lie where the
        other setting left them: `warmup` in the first pair, later one at most.

        With `enough`, the pairs can end early: after the first pair if verify() refuses its result
        or the second setting is much slower; from the second pair on, as soon as their interval
        cannot be above `enough` any more; and after any pair if the time is up.
        """
        settings = (first, second)
        pairs = Pairs([], [] if self.clock.counted else None)
        k = order_index(self.limits.pairs)
        settle = min(self.limits.warmup, 1)
        current = None
        for number in range(self.limits.pairs):
            seconds, results = [0.0, 0.0], [None, None]
            counts: list[Counts] = [(0, 0), (0, 0)]
            for at in (0, 1) if number % 2 == 0 else (1, 0):
                if at != current:
                    self.placement.use(settings[at])
                    self.warm_up(settings[at], settle if number else self.limits.warmup)
                    current = at
                seconds[at], results[at] = self.run(settings[at])
                counts[at] = self.clock.last
            pairs.seconds.append((seconds[0], seconds[1]))
            if pairs.counts is not None:
                pairs.counts.append((counts[0], counts[1]))
            if enough is None:
                continue
            if number == 0 and not self._verified(results):
                return pairs._replace(refused="verify() refused its result")
            if number == 0 and not pairs.counts and seconds[1] > MUCH_SLOWER * seconds[0]:
                times = seconds[1] / seconds[0]
                return pairs._replace(refused=f"{REJECTED}: a run took {times:.1f} times as long")
            if number and sum(gain <= enough for gain in pairs.gains) >= k:
                break
            if number + 1 < self.limits.pairs and self.left() <= 0:
                return pairs._replace(refused=OUT_OF_TIME[1])
        return pairs

    def _verified(self, results: Sequence[Any]) -> bool:
        return self.limits.verify is None or bool(self.limits.verify(results[0], results[1]))

    # --- time -----------------------------------------------------------------------------------

    def elapsed(self) -> float:
        """Seconds since the start."""
        return self.clock.now() - self.start

    def cost_of_pairs(self) -> float:
        """Seconds that a full set of pairs takes, if the step is as fast as at first."""
        settle = min(self.limits.warmup, 1)
        runs = self.limits.pairs * (2 + settle) + 2 * self.limits.warmup
        return self.first_typical * runs

    def left(self) -> float:
        """The seconds left for trials, without those that the proof at the end needs."""
        return self.limits.max_seconds - self.elapsed() - self.cost_of_pairs()

    # --- the course -----------------------------------------------------------------------------

    def measure_noise(self) -> TuneTime:
        """Compare the unchanged step with itself; return its seconds. Raises TuneUnstableError."""
        for _ in range(NOISE_ATTEMPTS):
            pairs = self.pairs(Setting(), Setting())
            seconds = [each for pair in pairs.seconds for each in pair]
            usual = interval_of(seconds)
            self.first_typical = self.typical = usual.median
            self.usual = pairs
            if pairs.counts is not None:
                if self._is_steady(pairs.counts):
                    return usual
                continue
            difference = interval_of(pairs.gains)
            floor = max(abs(difference.low), abs(difference.high))
            self.noise = floor / usual.median if usual.median > 0 else math.inf
            centred = difference.low <= 0 <= difference.high
            if centred and self.noise <= self.limits.max_noise:
                return usual
        if pairs.counts is not None:
            raise TuneUnstableError(
                f"the step varies too much to be tuned: over {self.limits.pairs} pairs of "
                f"unchanged runs, bytes or faults differ by {100 * self.noise:.4g}% (at most "
                f"{100 * self.limits.max_noise:.4g}% is allowed by max_noise). Each run must do "
                "the same work"
            )
        raise TuneUnstableError(
            f"the step varies too much to be tuned: over {self.limits.pairs} pairs of unchanged "
            f"runs of {time_text(usual.median)}, one of a pair took from "
            f"{time_text(abs(difference.low))} {'less' if difference.low < 0 else 'more'} to "
            f"{time_text(abs(difference.high))} {'less' if difference.high < 0 else 'more'} than "
            f"the other ({100 * self.noise:.4g}% of a run; at most "
            f"{100 * self.limits.max_noise:.4g}% is allowed by max_noise). A longer step, fixed "
            "seeds and an idle GPU and machine help"
        )

    def _is_steady(self, counts: Sequence[tuple[Counts, Counts]]) -> bool:
        """True if bytes and faults of unchanged runs differ little, and only by chance. Sets
        ``noise`` to the difference."""
        saved = [shares(first, second) for first, second in counts]
        intervals = [interval_of(each) for each in zip(*saved, strict=True)]
        self.noise = max(max(abs(each.low), abs(each.high)) for each in intervals)
        centred = all(each.low <= 0 <= each.high for each in intervals)
        return centred and self.noise <= self.limits.max_noise

    def threshold(self) -> float:
        """The seconds, or the part of bytes or faults, that a change must save."""
        part = max(self.limits.min_gain, self.noise)
        return part if self.clock.counted else part * self.typical

    def trial(self, candidate: Candidate, changed: Setting) -> TuneTrial:
        """Compare the present setting with a changed one, and take it over if it is better."""
        start = self.clock.now()
        with self.applying(candidate.change):
            try:
                self.placement.use(changed)
            except CUDAError as error:
                if error.code != NOT_SUPPORTED:
                    raise
                return self._report(candidate, f"the driver refuses it: {error}")
            cost = self.clock.now() - start
            self.placement.use(self.setting)
            pairs = self.pairs(self.setting, changed, self.threshold())
        verdict = self._verdict(pairs)
        if verdict == KEPT:
            self.kept.append((len(self.trials), candidate))
            self.setting = changed
            self.typical = statistics.median(second for _, second in pairs.seconds)
        return self._report(candidate, verdict, pairs, cost)

    def _verdict(self, pairs: Pairs) -> str:
        if pairs.refused:
            return pairs.refused
        threshold = self.threshold()
        passed = sum(gain > threshold for gain in pairs.gains)
        if len(pairs.seconds) - passed >= order_index(self.limits.pairs):
            return f"{REJECTED}: {passed} of {len(pairs.seconds)} pairs gained enough"
        return KEPT

    def _report(
        self, candidate: Candidate, verdict: str, pairs: Pairs | None = None, cost: float = 0.0
    ) -> TuneTrial:
        counted = self.clock.counted
        return TuneTrial(
            candidate.change,
            candidate.rule,
            candidate.reason,
            candidate.evidence,
            None if counted else candidate.estimate,
            tuple(pairs.seconds) if pairs else (),
            interval_of(pairs.gains) if pairs and not counted else None,
            cost,
            verdict,
            pairs.medians() if pairs else None,
        )

    def go_through(
        self, candidates: Sequence[Candidate], material: Material
    ) -> list[tuple[Candidate, Setting]]:
        """Try each candidate; return those that their pairs rejected, with the setting before."""
        rejected = []
        for candidate in candidates:
            changed = self.setting.with_items(candidate.items)
            if all(self.setting.has(item) for item in candidate.items):
                self.trials.append(self._report(candidate, "not tried: a part of what was kept"))
            elif not material.fits(changed):
                text = "not tried: with what was kept, it would fill a device"
                self.trials.append(self._report(candidate, text))
            elif self.left() < self.cost_of_pairs():
                self.trials.append(self._report(candidate, OUT_OF_TIME[0]))
            else:
                present = self.setting
                self.trials.append(self.trial(candidate, changed))
                if self.trials[-1].verdict.startswith(REJECTED):
                    rejected.append((candidate, present))
        return rejected

    def leave_out(self) -> None:
        """Try to do without each change that was kept only together with others."""
        together = {
            item
            for item in self._items()
            if not any(candidate.items == (item,) for _, candidate in self.kept)
        }
        for item in sorted(together, key=lambda each: items_text([each])):
            if len(self._items()) < 2 or self.left() < self.cost_of_pairs():
                return
            text = f"without: {items_text([item])}"
            phases = frozenset() if not hasattr(item, "phase") else frozenset([item.phase])
            candidate = Candidate("", text, (item,), {}, "it came in with others", phases)
            self.trials.append(self.trial(candidate, self.setting.without(item)))

    def _items(self) -> list[Item]:
        items: list[Item] = list(self.setting.policies.values())
        for (phase, name), location in self.setting.prefetches.items():
            items.append(Prefetch(name, phase, location))
        for (phase, name), location in self.setting.discards.items():
            items.append(Discard(name, phase, location))
        return items

    def prove(self, candidates: Sequence[Candidate], material: Material) -> None:
        """Try the candidates; retry rejected ones if a later candidate in their phase was kept."""
        rejected = self.go_through(candidates, material)
        shared = {phase for _, candidate in self.kept for phase in candidate.phases}
        again = [
            each
            for each, setting in rejected
            if setting is not self.setting and each.phases & shared
        ]
        self.go_through(again, material)
        self.leave_out()
        for number, candidate in self.kept:
            if candidate.rule and not any(map(self.setting.has, candidate.items)):
                trial = self.trials[number]._replace(verdict="kept, and later replaced by others")
                self.trials[number] = trial

    def compare(self) -> Pairs | None:
        """The proof of all kept changes together: pairs of the first and the last setting.

        None without a gain, and then all changes are put back.
        """
        if self.setting == Setting():
            return None
        with self.applying("everything that was kept"):
            pairs = self.pairs(Setting(), self.setting)
        if interval_of(pairs.gains).low > 0:
            return pairs
        self.setting = Setting()
        self.trials = [
            trial._replace(verdict="put back: all kept changes together gained nothing")
            if trial.verdict == KEPT
            else trial
            for trial in self.trials
        ]
        return None
