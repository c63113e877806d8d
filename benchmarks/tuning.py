"""`tune()` beside the placements of experts, on the four programs of um_programs.

Every contender runs the same step on the same arrays: the host fills them, the device computes, the
host reads the results. All contenders give their advice before the steps, and it stands during
them: the published placements around a first fill, as in their programs, and ours by tune(). Ours
may also discard arrays before the phase that overwrites them. The published programs could not.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from statistics import median

import numpy as np

import managedmem
from managedmem import Device, Host, ManagedBuffer, MigrationPolicy

from . import peers
from .interleaved import (
    LOW,
    MEDIAN,
    Results,
    Step,
    Tune,
    copied,
    interleaved,
    ratios,
    time_for,
    times_row,
    tuned,
)
from .measure import MIB, Row
from .um_programs import PROGRAMS
from .um_programs.gpu import CuPyGpu, Gpu
from .um_programs.program import COMPUTE, FILL, READ, Program

NEED = 256 * MIB
PLAIN, OURS = "plain managed", "ours"
HAND = ("hints", "prefetch", "hints, prefetch")  # the placements that were published
GOAL = "goal 0.95"
PLAIN_GOAL = "goal 1.5 on three"
SECONDS = 20.0  # for tune() on one program


class Managed:
    """The arrays of a program in managed memory, seen by the host and by the device."""

    def __init__(self, program: Program, gpu: Gpu) -> None:
        self.program, self.gpu = program, gpu
        self.bufs: dict[str, ManagedBuffer] = {
            name: managedmem.empty(shape, dtype, name=name)
            for name, (shape, dtype) in program.arrays.items()
        }
        self.host = {name: np.asarray(buf) for name, buf in self.bufs.items()}
        self.device = {name: gpu.array(buf) for name, buf in self.bufs.items()}

    def close(self) -> None:
        """Give the memory back."""
        self.host.clear()
        self.device.clear()
        for buf in self.bufs.values():
            buf.close()

    # The phases of a step.

    def fill(self) -> None:
        self.program.fill(self.host)
        for name in self.program.zeroed:
            self.host[name].fill(0)

    def compute(self) -> None:
        self.program.compute(self.gpu, self.device)
        self.gpu.wait()

    def read(self) -> Results:
        return self.program.read(self.host)

    def prefetch(self, names: Sequence[str], location: Device | Host) -> None:
        for name in names:
            self.bufs[name].prefetch(location, defer=False)

    def step(self) -> Results:
        """A step without placement."""
        self.fill()
        self.compute()
        return self.read()

    def prefetching_step(self) -> Results:
        """A step with the published prefetches."""
        placement = self.program.placement
        self.fill()
        self.prefetch(placement.to_device, Device(0))
        self.compute()
        self.prefetch(placement.to_host, Host())
        return self.read()

    # Advice.

    def give_hints(self) -> None:
        """Give the published advice, some before the host fills the arrays, some after."""
        placement = self.program.placement
        for name in placement.preferred:
            self.bufs[name].preferred_location = Device(0)
        for name in placement.mapped:
            self.bufs[name].accessed_by.add(Host())
        self.fill()
        for name in placement.read_mostly:
            self.bufs[name].read_mostly = True

    def unset(self) -> None:
        """Take all advice back."""
        MigrationPolicy.default().apply(list(self.bufs.values()))

    # Contenders.

    def by_hand(self) -> dict[str, Step]:
        """The step without placement, and with the published placements."""
        hints = {"enter": self.give_hints, "leave": self.unset}
        return {
            PLAIN: Step(self.step),
            "hints": Step(self.step, **hints),
            "prefetch": Step(self.prefetching_step),
            "hints, prefetch": Step(self.prefetching_step, **hints),
        }

    def tuned(self, tune: Tune, seconds: float) -> tuple[Step, str]:
        """The step as tune() leaves it, and a note about the search."""
        seconds = time_for(seconds, self.step)
        expected = copied(self.step())

        def verify(*_: object) -> bool:
            return all(map(np.array_equal, self.program.results, expected))

        overwritten = self.program.overwritten.items()
        return tuned(
            tune,
            [(FILL, self.fill), (COMPUTE, self.compute), (READ, self.read)],
            self.bufs,
            Step(self.step),
            lambda: self.program.results,
            # A discard takes whole pages.
            disposable={k: v for k, v in overwritten if self.bufs[k].nbytes >= mmap.PAGESIZE},
            max_seconds=seconds,
            verify=verify,
        )


class Explicit:
    """The arrays of a program in plain device memory, and pinned ones beside them on the host."""

    def __init__(self, program: Program, gpu: Gpu) -> None:
        self.program, self.gpu = program, gpu
        self.device, self.host = {}, {}
        for name, (shape, dtype) in program.arrays.items():
            self.device[name] = gpu.empty(shape, dtype)
            self.host[name] = gpu.pinned(shape, dtype)

    def step(self) -> Results:
        self.program.fill(self.host)
        for name in self.program.copied_in:
            self.gpu.copy_in(self.host[name], self.device[name])
        for name in self.program.zeroed:
            self.gpu.zero(self.device[name])
        self.program.compute(self.gpu, self.device)
        for name in self.program.copied_out:
            self.gpu.copy_out(self.device[name], self.host[name])
        self.gpu.wait()
        return self.program.read(self.host)


def rows_of(program: Program, gpu: Gpu, tune: Tune, repetitions: int, seconds: float) -> list[Row]:
    """The times of all contenders, and how ours compares."""
    with closing(Managed(program, gpu)) as managed:
        ours, note = managed.tuned(tune, seconds)
        pinned = Step(Explicit(program, gpu).step)
        steps = {"pinned copies": pinned, **managed.by_hand(), OURS: ours}
        times = interleaved(steps, repetitions)
    best = min(HAND, key=lambda name: median(times[name]))
    title = program.title
    return [
        times_row(f"{title}, {program.nbytes // MIB} MiB", times, note),
        ratios(f"{title}: {PLAIN} / {OURS}", times[PLAIN], times[OURS], PLAIN_GOAL),
        ratios(f"{title}: best by hand / {OURS}", times[best], times[OURS], f"{best}; {GOAL}"),
    ]


def summary(rows: Sequence[Row]) -> str:
    """The goals, counted."""
    plain = [row.results for row in rows if f"{PLAIN} / {OURS}" in row.operation]
    hand = [row.results for row in rows if f"best by hand / {OURS}" in row.operation]
    reached = sum(found[MEDIAN].median >= 0.95 for found in hand)
    better = sum(found[LOW].median > 1 for found in hand)
    fast = sum(found[MEDIAN].median >= 1.5 for found in plain)
    return (
        f"Of {len(hand)} programs, {reached} have at least 0.95 of the speed of the best placement"
        f" by hand, {better} are faster than it beyond noise, and {fast} are 1.5 times as fast as"
        " plain managed memory."
    )


def measure(
    program: Sequence[str] | None = None,
    *,
    gpu: Gpu | None = None,
    tune: Tune | None = None,
    programs: Mapping[str, Callable[[], Program]] = PROGRAMS,
    repetitions: int = 11,
    seconds: float = SECONDS,
) -> Iterator[Row]:
    """Three rows for each program: all, or those of these names."""
    if gpu is None:
        cupy = peers.cupy_on_gpu()
        if cupy is None:
            yield Row("tuning", {}, note="needs CuPy and a GPU")
            return
        gpu = CuPyGpu(cupy)
    for name in program or programs:
        yield from rows_of(programs[name](), gpu, tune or managedmem.tune, repetitions, seconds)
