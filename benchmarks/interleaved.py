"""Whole steps of several contenders measured in turn, and the ratios of neighbouring measurements.

A contender may need a state of its own, such as advice, which it enters before a measurement and
leaves after it. Its step runs once untimed, so that pages are where its steps leave them, and then
timed. One contender can be the step as tune() leaves it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

import managedmem
from managedmem import MigrationPolicy

from .measure import Result, Row, elapsed, nothing, reason

Results = tuple[NDArray[Any], ...]
Tune = Callable[..., Any]  # managedmem.tune, or a stand-in of tests
Times = dict[str, list[float]]  # nanoseconds; times with the same index are neighbours

MEDIAN, LOW, HIGH = "median", "95 % from", "to"  # the columns of a ratio
TOLERANCE = 1e-4
RUNS = 150  # of a step, for which tune() must have the time


@dataclass(frozen=True)
class Step:
    """One contender: its step, which returns the results, and its state."""

    run: Callable[[], Results]
    enter: Callable[[], object] = nothing
    leave: Callable[[], object] = nothing


def time_for(seconds: float, step: Callable[[], object]) -> float:
    """At least these seconds for tune(), and enough for a slow step."""
    step()
    return max(seconds, RUNS * elapsed(step) / 1e9)


def tuned(
    tune: Tune,
    phases: Sequence[tuple[str, Callable[[], object]]],
    memories: Mapping[str, Any],
    plain: Step,
    results: Callable[[], Results],
    **options: Any,
) -> tuple[Step, str]:
    """The step as tune() leaves it, with the results of its last run, and a note about the search.

    A step that cannot be tuned stays plain.
    """
    start = time.monotonic()
    try:
        found = tune(phases, memories, keep=False, **options)
    except managedmem.typing.TuneUnstableError as error:
        return plain, f"not tuned: {reason(error)}"
    print(found, file=sys.stderr)

    def run() -> Results:
        found.step()
        return results()

    def enter() -> None:
        for name, policy in found.policies.items():
            policy.apply(memories[name])

    def leave() -> None:
        MigrationPolicy.default().apply(list(memories.values()))

    return Step(run, enter, leave), f"tuned in {time.monotonic() - start:.0f} s"


def copied(results: Results) -> Results:
    """Copies, which the next step does not overwrite. The originals are set to 0."""
    copies = tuple(np.array(array) for array in results)
    for array in results:
        array.fill(0)
    return copies


def same(found: Results, expected: Results) -> bool:
    """True if these are the same results, but for the order of sums."""
    return len(found) == len(expected) and all(
        bool(np.allclose(one, other, TOLERANCE, TOLERANCE * float(np.abs(other).max(initial=0))))
        for one, other in zip(found, expected, strict=True)
    )


def compare(steps: dict[str, Step]) -> None:
    """Run each step, and raise RuntimeError if its results differ from those of the first."""
    expected: Results | None = None
    for name, step in steps.items():
        step.enter()
        try:
            for _ in range(2):
                found = copied(step.run())
                expected = found if expected is None else expected
                if not same(found, expected):
                    raise RuntimeError(f"{name} and {next(iter(steps))} have different results")
        finally:
            step.leave()


def interleaved(steps: dict[str, Step], repetitions: int) -> Times:
    """The times of all, measured in turn; each repetition begins with another contender."""
    compare(steps)
    times: Times = {name: [] for name in steps}
    names = list(steps)
    for i in range(repetitions):
        start = i % len(names)
        for name in names[start:] + names[:start]:
            step = steps[name]
            step.enter()
            try:
                step.run()
                times[name].append(elapsed(step.run))
            finally:
                step.leave()
    return times


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval of the median with at least 95 %, if there are at least six values."""
    ordered, count = sorted(values), len(values)
    outside, below = 0.0, 0  # the chance to be wrong on one side, and the values left out there
    while below < (count - 1) // 2:
        outside += comb(count, below) / 2.0**count
        if outside > 0.025:
            break
        below += 1
    first = max(below - 1, 0)
    return ordered[first], ordered[count - 1 - first]


def ratios(operation: str, slower: Sequence[float], faster: Sequence[float], note: str = "") -> Row:
    """How many times as fast the second contender is, by pairs of neighbouring times."""
    values = [one / other for one, other in zip(slower, faster, strict=True)]
    low, high = interval(values)
    results = {MEDIAN: Result.of(values), LOW: Result(low), HIGH: Result(high)}
    return Row(operation, results, unit="x", note=note)


def times_row(operation: str, times: Times, note: str = "") -> Row:
    """The times of all contenders."""
    results = {name: Result.of(values) for name, values in times.items()}
    return Row(operation, results, unit="ms", note=note)
