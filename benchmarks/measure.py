"""How things are timed: statements as timeit times them, work on a GPU, and results as rows."""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Samples:
    """Repeated measurements of one thing, in nanoseconds."""

    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a part of the median."""
        if len(self.values) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.values, n=4)
        return (high - low) / 2 / self.median if self.median else 0.0


@dataclass
class Row:
    """One line of a table: what was measured, and the samples of each contender by its name."""

    operation: str
    samples: dict[str, Samples]
    unit: str = "ns"
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "operation": self.operation,
            "unit": self.unit,
            "note": self.note,
            "results": {
                name: {"median": s.median, "spread": s.spread, "count": len(s.values)}
                for name, s in self.samples.items()
            },
        }


def statement(code: str, names: dict[str, Any]) -> Callable[[int], float]:
    """A function of a count: nanoseconds of one run of the statement, the loop taken off."""
    timed, empty = timeit.Timer(code, globals=names), timeit.Timer("pass")

    def run(count: int) -> float:
        return 1e9 * (timed.timeit(count) - empty.timeit(count)) / count

    return run


def side_by_side(
    contenders: dict[str, Callable[[int], float]],
    *,
    count: int,
    repetitions: int,
    after: Callable[[], object] = lambda: None,
) -> dict[str, Samples]:
    """Measure all contenders in turn, again and again, so that a drift of the machine hits all."""
    results = {name: Samples() for name in contenders}
    for run in contenders.values():  # caches, lazy initialisation, the driver's first call
        run(max(count // 10, 1))
        after()
    for _ in range(repetitions):
        for name, run in contenders.items():
            results[name].values.append(run(count))
            after()
    return results


def elapsed(work: Callable[[], object]) -> float:
    """Nanoseconds of one call."""
    start = time.perf_counter_ns()
    work()
    return float(time.perf_counter_ns() - start)
