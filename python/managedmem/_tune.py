"""``managedmem.tune()``: the course of a search from the first run to the result.

The package imports this module at the first use of one of its names. ``_tune_arguments`` checks the
arguments, ``_tune_rules`` proposes changes, ``_tune_search`` decides about them, ``_tune_report``
presents the result.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from managedmem import __version__, _managedmem
from managedmem._managedmem import (
    CUDAError,
    Device,
    MigrationPolicy,
    TraceUnavailableError,
    empty,
)
from managedmem._trace import Trace, _torch_captures
from managedmem._trace_findings import viewed
from managedmem._tune_arguments import (
    Limits,
    Phase,
    check_discards,
    disposable_of,
    extents_of,
    limits_of,
    named_targets,
    phases_of,
    points_of,
)
from managedmem._tune_report import TuneResult, entries_of
from managedmem._tune_rules import Material, PhaseEvidence, evidence_in, propose, propose_all
from managedmem._tune_search import (
    OUT_OF_TIME,
    Clock,
    Search,
    TuneUnstableError,
    plans_of,
)
from managedmem._tune_values import (
    COUNTS,
    SECONDS,
    TuneTime,
    TuneTrial,
    confidence,
    interval_of,
)
from managedmem._units import size_text

if TYPE_CHECKING:
    from managedmem._managedmem import _Target
    from managedmem._tune_arguments import _Disposable, _Step

__all__ = ["TuneResult", "TuneTime", "TuneTrial", "TuneUnstableError", "tune"]

TRACED_RUNS = 2
DISCARDS_SINCE = 13000
CAPTURED = 900
"""CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED."""
BUSY = (
    "tune() waits for the device after each run, which would end the capture of a CUDA graph: tune "
    "before or after the capture"
)


# --- circumstances ------------------------------------------------------------------------------


def _check_captures() -> None:
    """Raise RuntimeError if a stream captures a graph, as far as that can be seen."""
    if _torch_captures():
        raise RuntimeError(BUSY)
    probe = Trace(faults=False)
    try:
        _check_captures_by(probe)
    finally:
        probe._end_at_least()  # an interrupt can come between any two lines


def _check_captures_by(probe: Trace) -> None:
    try:
        probe.start()
    except TraceUnavailableError:
        _check_captures_by_copy()
    else:
        _check_captures_by_mark(probe)
    finally:
        probe._end_at_least()


def _check_captures_by_mark(probe: Trace) -> None:
    try:
        probe.mark("")
    except TraceUnavailableError:  # the source delivers no events
        _check_captures_by_copy()
    except CUDAError:
        raise
    except RuntimeError as error:
        raise RuntimeError(BUSY) from error


def _check_captures_by_copy() -> None:
    """Without a source of events: raise RuntimeError if a capture makes a copy fail."""
    with empty(1) as scratch:
        try:
            scratch.copy_from(b"\0")
        except CUDAError as error:
            if error.code == CAPTURED:
                raise RuntimeError(BUSY) from error
            raise


def _base_policies(targets: Mapping[str, Any]) -> tuple[dict[str, MigrationPolicy], list[str]]:
    """The advice of each memory; none for those whose pages differ, which are named as well."""
    base, mixed = {}, []
    for name, target in targets.items():
        try:
            base[name] = MigrationPolicy.of(target)
        except ValueError:
            base[name] = MigrationPolicy.default()
            mixed.append(name)
    return base, mixed


def _advisable(targets: Mapping[str, Any]) -> frozenset[str]:
    """The memories whose resource takes advice; memory of other libraries is included, on trial."""
    return frozenset(
        name
        for name, target in targets.items()
        if getattr(getattr(target, "memory_resource", None), "supports_advice", True)
    )


def _free_memory(devices: Iterable[Device]) -> dict[Device, int]:
    """The free bytes of the devices that can be prefetched to."""
    return {
        device: device.memory_info.free for device in devices if device.concurrent_managed_access
    }


# --- the course ---------------------------------------------------------------------------------


class Tuning:
    """One call of tune(): its arguments, and its findings so far."""

    def __init__(
        self,
        phases: tuple[Phase, ...],
        targets: dict[str, Any],
        disposable: dict[str, str | None],
        points: frozenset[str],
        limits: Limits,
        clock: Callable[[], float],
        counts: Callable[[], tuple[int, int]] | None,
    ) -> None:
        self.phases, self.targets, self.points = phases, targets, points
        self.disposable = disposable
        self.devices = {Device()}
        self.clock = Clock(clock, self.devices, counts)
        self.search = Search(phases, targets, limits, self.clock)
        self.notes: list[str] = []
        self.evidence = "none"
        self.sizes = {name: nbytes for name, (_, nbytes) in extents_of(targets).items()}
        self.free = _free_memory(self.devices)
        self.base, mixed = _base_policies(targets)
        if mixed:
            self.notes.append(
                f"the pages of {', '.join(mixed)} differ in their advice; a change of advice "
                "replaces all of it"
            )

    def record_runs(self) -> list[PhaseEvidence]:
        """Trace some runs; [] if nothing can be recorded."""
        named_targets(self.targets)  # raises if the step has closed one
        trace = Trace()
        for number, (name, target) in enumerate(self.targets.items()):
            if self.sizes[name]:
                trace.name(target, f"{number}")  # gives it a row of its own, found by its addresses
        try:
            if not self._record(trace):
                return []
        finally:
            trace._end_at_least()  # an interrupt can come between any two lines
        self.evidence = f"{trace.source}, {TRACED_RUNS} traced runs"
        self.notes += trace.problems
        return self._read(trace)

    def _record(self, trace: Trace) -> bool:
        """Trace some runs, each phase as a slice; False if nothing can be recorded."""
        try:
            trace.start()
        except TraceUnavailableError as error:
            self.notes.append(f"nothing could be recorded: {' '.join(str(error).split())}")
            return False
        with ExitStack() as stack:
            stack.push(trace)
            for _ in range(TRACED_RUNS):
                self.search.active = step = self.search.step_of(self.search.setting)
                step(after=trace.mark)
        return True

    def _read(self, trace: Trace) -> list[PhaseEvidence]:
        named_targets(self.targets)  # raises if a traced run has closed one
        runs: list[PhaseEvidence] = []
        count = len(self.phases)
        for i, phase in enumerate(self.phases):
            slices = [trace.slices[run * count + i] for run in range(TRACED_RUNS)]
            memories = {
                name: [part[self.targets[name]] for part in slices]
                for name, nbytes in self.sizes.items()
                if nbytes
            }
            runs += evidence_in(phase.name, slices, memories, not self.clock.counted)
        used = {each.device for each in runs if each.device is not None} - self.devices
        self.devices |= used
        self.free |= _free_memory(used)
        total = trace.total
        if total.turned_back and not (total.host_faults or total.device_faults or viewed(total)):
            self.notes.append(
                f"{size_text(total.turned_back)} in {TRACED_RUNS} runs went back where they "
                "came from, all on request: the step may prefetch memory that nothing uses there"
            )
        return runs

    def material(self) -> Material:
        """The facts that the rules need."""
        return Material(
            [phase.name for phase in self.phases],
            self.points,
            {name: nbytes for name, nbytes in self.sizes.items() if nbytes},
            self.base,
            _advisable(self.targets),
            self.disposable,
            self.free,
            frozenset(d for d in self.devices if d.direct_managed_mem_access_from_host),
        )

    def check_time(self, seconds: float) -> None:
        """Raise ValueError if the time is too short to prove a single change."""
        limits = self.search.limits
        runs = limits.pairs * (2 + min(limits.warmup, 1)) + 2 * limits.warmup
        needed = seconds * (3 * runs + TRACED_RUNS)
        if needed > limits.max_seconds:
            raise ValueError(
                f"max_seconds={limits.max_seconds:g} is too short to prove anything: a run took "
                f"{seconds:.3g} s, and noise, one change and the final proof need {3 * runs} runs. "
                f"Give max_seconds={math.ceil(needed * 2)}, fewer pairs, or a shorter step"
            )

    def warm_up(self) -> None:
        """Run the unchanged step, and check that the time allows a search."""
        search = self.search
        seconds = [search.run(search.setting)[0] for _ in range(max(search.limits.warmup, 1))]
        self.check_time(min(seconds))

    def run(self, keep: bool) -> TuneResult:
        """The whole search. On every failure all advice is put back."""
        placement, collects = self.search.placement, gc.isenabled()
        try:
            result = self._run()
            if keep:
                placement.use(self.search.setting)
            else:
                placement.put_back()
            return result
        except BaseException as error:
            if collects:  # an interrupt can come before a run has enabled it again
                gc.enable()
            ending = "the earlier advice is back"
            try:
                placement.put_back()
            except Exception as failure:
                ending = f"not all of the earlier advice could be put back: {failure}"
            if isinstance(error, Exception) and not isinstance(error, TuneUnstableError):
                error.add_note(self._note(ending))
            raise

    def _note(self, ending: str) -> str:
        step = self.search.active
        phase = step.running if step is not None else None
        place = f"in phase {phase!r} " if phase else ""
        return f"managedmem.tune(): {place}with {self.search.applied} applied; {ending}"

    def _run(self) -> TuneResult:
        search = self.search
        gc.collect()
        self.warm_up()
        seen = self.record_runs()
        search.warm_up(search.setting, search.limits.warmup)
        usual = search.measure_noise()
        material = self.material()
        for device in sorted(self.devices - material.free.keys(), key=str):
            self.notes.append(
                f"{device} has no concurrent_managed_access: nothing can be prefetched to it, and "
                "advice does not help"
            )
        if self.evidence == "none":
            candidates = propose_all(material, Device())
        else:
            candidates = propose(material, seen)
            if not candidates and material.free:
                self.notes.append("the runs moved nothing by faults that a change could avoid")
        search.prove(candidates, material)
        return self._result(usual)

    def _result(self, usual: TuneTime) -> TuneResult:
        search = self.search
        proof = search.compare()
        setting = search.setting
        names = [phase.name for phase in self.phases]
        late = sum(trial.verdict in OUT_OF_TIME for trial in search.trials)
        if late:
            self.notes.append(
                f"{late} changes were not tried to the end within max_seconds="
                f"{search.limits.max_seconds:g}"
            )
        if confidence(search.limits.pairs) < 0.95:
            self.notes.append(
                f"with {search.limits.pairs} pairs, intervals are of "
                f"{confidence(search.limits.pairs):.2%}"
            )
        counted = self.clock.counted
        if counted:
            self.notes.append(
                "judged by bytes and faults: times of the emulated driver mean nothing for a GPU"
            )
        timed = None if counted else proof
        result = TuneResult(
            phases=tuple(names),
            policies={name: item.policy for name, item in setting.policies.items()},
            _prefetch_entries=entries_of(setting.prefetches, names),
            _discard_entries=entries_of(setting.discards, names),
            before=interval_of([a for a, _ in timed.seconds]) if timed else usual,
            after=interval_of([b for _, b in timed.seconds]) if timed else usual,
            gain=interval_of(timed.gains) if timed else None,
            pairs=tuple(timed.seconds) if timed else (),
            judged_by=COUNTS if counted else SECONDS,
            counts=proof.medians() if proof else search.usual.unchanged(),
            noise=search.noise,
            evidence=self.evidence,
            notes=tuple(self.notes),
            seconds=search.elapsed(),
            machine=self._machine(),
            trials=tuple(search.trials),
        )
        step = search.step_of(setting)
        result._bind(
            plans_of(setting.prefetches, self.targets),
            plans_of(setting.discards, self.targets),
            step,
        )
        return result

    def _machine(self) -> dict[str, Any]:
        info = _managedmem._driver_info()
        return {
            "managedmem": __version__,
            "driver": info["version_string"],
            "emulated": info["emulated"],
            "devices": [device.name for device in sorted(self.devices, key=lambda d: d.device_id)],
        }


def tune(
    step: _Step,
    buffers: _Target | Iterable[_Target] | Mapping[str, _Target],
    *,
    disposable: _Disposable = (),
    points: Iterable[str] | None = None,
    max_seconds: float = 60.0,
    pairs: int = 9,
    min_gain: float = 0.03,
    warmup: int = 2,
    verify: Callable[[Any, Any], Any] | None = None,
    keep: bool = True,
    max_noise: float = 0.25,
) -> TuneResult:
    """Find advice and prefetches that make a step faster, and prove each of them by measuring.

    Some runs are traced, and rules propose changes from the bytes and faults of each memory. Each
    change is compared with the step as it is, in alternating pairs of runs. It is kept if the lower
    end of the 95 % interval of the gain is above noise, and put back otherwise. On the emulated
    driver, whose times mean nothing, a gain is fewer bytes or faults and more of neither.

    Parameters
    ----------
    step : callable, or list of callables or pairs (name, callable)
        The work, to be run again and again, without arguments. Several callables are phases, run in
        order: prefetches are placed before phases. If a step returns streams or events, tune()
        waits for these, else for the devices.
    buffers : target, several, or dict of names and targets
        The memory to tune: buffers, slices of them, arrays and tensors of other libraries. In a
        list, memory goes by the name of its buffer, or else by "buffers[i]".
    disposable : targets or names, or a dict with the phase that overwrites each
        Memory whose contents may be lost before it is overwritten. Nothing else is ever discarded.
        Needs CUDA 13.0.
    points : names of phases, optional
        The phases before which prefetches may be placed; default all.
    max_seconds : float
        Seconds for the search: no trial begins that could not end in this time.
    pairs : int
        Pairs of runs for each comparison, 5 or more.
    min_gain : float
        The part of a run, in time or of bytes or faults, that a change must save.
    warmup : int
        Runs before each comparison that are not measured. If it is not 0, one more such run follows
        each change of the setting between two measured runs.
    verify : callable, optional
        ``verify(before, after)`` gets the results of the step without and with a change, once for
        each change; the change is rejected if the answer is false.
    keep : bool
        Leave the policies that were proved applied. False: put back all advice.
    max_noise : float
        The largest difference between unchanged runs that is accepted, as a part of a run. It is
        measured in pairs of runs, as a gain is.

    Returns a `TuneResult`. Contents never change, except those of ``disposable`` memory. After
    every exception, even KeyboardInterrupt, each page has its earlier advice again. An exception of
    the step passes through, with a note on the change that was applied.

    Raises TypeError or ValueError for other arguments before the first run, and ValueError if
    ``max_seconds`` is too short for the step; NotImplementedError for ``disposable`` with an older
    driver; RuntimeError while a stream captures; TuneUnstableError if unchanged runs differ too
    much; CUDAError if the driver refuses a call. One thread at a time may tune the same memory.
    Driver: cuMemAdvise, cuMemPrefetchAsync, cuMemDiscardAndPrefetchBatchAsync, cuCtxSynchronize.
    """
    if not isinstance(keep, bool):
        raise TypeError(f"keep must be True or False, got {keep!r}")
    return prepared(
        step,
        buffers,
        disposable,
        points,
        limits_of(max_seconds, pairs, min_gain, warmup, max_noise, verify),
    ).run(keep)


def prepared(
    step: Any,
    buffers: Any,
    disposable: Any,
    points: Any,
    limits: Limits,
    clock: Callable[[], float] | None = None,
) -> Tuning:
    """The tuning for checked arguments; tests give it a clock of their own.

    Without a clock, runs of the emulated driver are judged by its counters.
    """
    phases = phases_of(step)
    chosen = points_of(points, phases)
    targets = named_targets(buffers)
    extents_of(targets)
    lost = disposable_of(disposable, targets, phases)
    info = _managedmem._driver_info()
    version = info["version"]
    if lost and version < DISCARDS_SINCE:
        raise NotImplementedError(
            f"disposable= needs a driver of CUDA 13.0 or newer, this one is of CUDA "
            f"{version // 1000}.{version % 1000 // 10}"
        )
    check_discards(lost, targets)
    _check_captures()
    counts = None
    if clock is None and info["emulated"]:
        from managedmem import emulator

        counts = emulator._run_counts
    return Tuning(phases, targets, lost, chosen, limits, clock or time.perf_counter, counts)
