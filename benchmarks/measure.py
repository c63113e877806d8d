"""Timing: statements by timeit, work on a GPU, and results as rows."""

from __future__ import annotations

import statistics
import time
import timeit
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import managedmem

KIB, MIB = 1 << 10, 1 << 20
BUDGET = 512 * MIB  # managed memory that may be live at once: the GPU may be shared
HEADROOM = 1024 * MIB  # left free on the card beside it: contexts, the peers' own pools

# A contender runs `count` times and returns the nanoseconds of one run.
Contender = Callable[[int], float]
PEERS = (
    *("cuda.core", "cuda.bindings", "CuPy", "numba", "ctypes"),
    *("accelerate", "diffusers leaf", "diffusers block"),
)
# Contenders that may fail, as a part of the result. Ours and the bare call must not fail.
MAY_FAIL = {*PEERS, "torch", "CUPTI", "page faults"}
UNFINISHED = "not finished"  # the operation of a row for the rest of a group that failed


@dataclass(frozen=True)
class Result:
    """Repeated measurements, in the smallest unit of their row (see report.SCALES)."""

    median: float
    spread: float = 0.0  # half the distance between the quartiles, as a part of the median
    count: int = 1  # of repetitions; 0 where only the median and the spread were kept
    least: float | None = None  # of several: other work on the machine disturbs it least

    @property
    def varies(self) -> bool:
        """True if the spread was measured."""
        return self.count != 1

    @classmethod
    def of(cls, values: list[float]) -> Result:
        median = statistics.median(values)
        if len(values) < 2 or not median:
            return cls(median, 0.0, len(values))
        low, _, high = statistics.quantiles(values, n=4)
        return cls(median, abs((high - low) / 2 / median), len(values), min(values))


@dataclass(frozen=True)
class Row:
    """One line of a table: what was measured, and the result of each contender by its name."""

    operation: str
    results: dict[str, Result]
    unit: str = "ns"
    note: str = ""
    failed: dict[str, str] = field(default_factory=dict)  # contenders, with the reason

    @property
    def broken(self) -> bool:
        """True if something failed that must not."""
        return self.operation == UNFINISHED or not MAY_FAIL.issuperset(self.failed)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Row:
        results = {name: Result(**result) for name, result in found["results"].items()}
        return cls(**{**found, "results": results})


def statement(code: str, names: dict[str, Any]) -> Contender:
    """Times one run of the statement, without the loop."""
    timed, empty = timeit.Timer(code, globals=names), timeit.Timer("pass")

    def run(count: int) -> float:
        return 1e9 * (timed.timeit(count) - empty.timeit(count)) / count

    return run


def elapsed(work: Callable[[], object]) -> float:
    """Nanoseconds of one call."""
    start = time.perf_counter_ns()
    work()
    return float(time.perf_counter_ns() - start)


def nothing() -> None:
    """The default step after a contender."""


def reason(error: Exception) -> str:
    """An error in one line that fits under a table."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


def side_by_side(
    operation: str,
    contenders: Mapping[str, Contender],
    *,
    count: int,
    repetitions: int,
    after: Callable[[], object] = nothing,
    unit: str = "ns",
    note: str = "",
) -> Row:
    """Measure all contenders in turn, repeatedly, so that a drift of the machine affects all.

    A contender that fails is left out and named.
    """
    values: dict[str, list[float]] = {name: [] for name in contenders}
    failed: dict[str, str] = {}
    for turn in range(repetitions + 1):
        for name in [name for name in contenders if name not in failed]:
            try:
                if turn:
                    values[name].append(contenders[name](count))
                else:  # caches, lazy initialisation, the driver's first call
                    contenders[name](max(count // 10, 1))
            except Exception as error:
                failed[name] = reason(error)
                if name not in MAY_FAIL:
                    traceback.print_exc()
            after()
    results = {name: Result.of(values[name]) for name in contenders if name not in failed}
    return Row(operation, results, unit=unit, note=note, failed=failed)


def need_room(nbytes: int) -> None:
    """RuntimeError if the card has too little free memory for a group."""
    if nbytes > BUDGET:
        raise ValueError(f"{nbytes} bytes of managed memory are above the limit of {BUDGET}")
    free = managedmem.Device(0).memory_info.free
    headroom = 0 if managedmem.emulator.is_active() else HEADROOM
    if nbytes and free < nbytes + headroom:
        needed = (nbytes + headroom) // MIB
        raise RuntimeError(f"the GPU needs {needed} MiB of free memory, it has {free // MIB}")
