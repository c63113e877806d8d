"""`managedmem.trace()`: the cost of recording, of its start and end, and its bytes.

A traced step is measured in turn with the same step untraced, and with a queue of the kernel module
that nobody reads. After these it is measured with CUPTI, where cupti-python is installed.

python -m benchmarks tracing also runs with the emulated driver, whose times mean nothing.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import managedmem
from managedmem import Device, Host, ManagedBuffer

from . import attribution
from .bare import include_folder
from .measure import MIB, Contender, Result, Row, elapsed, reason, side_by_side

NEED = 256 * MIB
BUFFERS = 4
PREFETCHED, FAULTED = 32 * MIB, 64 * MIB
SOURCE = Path(__file__).with_name("queue.c")
PARTS = ("driver/uvm_queue", "driver/uvm_calls", "driver/status", "trace/uvm_records")
UNTRACED, BARE, OURS, CUPTI = "untraced", "bare queue", "ours", "CUPTI"
STEP, FAULTS = "step of prefetches and kernels", "step of faults"
STEP_GOAL, FAULTS_GOAL = 1.02, 1.05
DESCRIPTION = (
    "A traced step beside the same step untraced, and with a queue of the kernel module that nobody"
    " reads. The first one prefetches buffers to the device, fills them there in kernels, and"
    " prefetches them back; the other one is fills of pages on the host, and loads of the host."
    " Bytes are compared with arithmetic."
)


# --- a bare queue ---------------------------------------------------------------------------------


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled queue.c."""
    include = include_folder()
    if include is None:
        raise SystemExit("benchmarks: no cudaTypedefs.h found; set CUDA_HOME to a CUDA 13 toolkit")
    folder = attribution.EXTENSION
    with tempfile.TemporaryDirectory() as build:
        output = f"{build}/queue.so"
        flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-DNDEBUG", "-shared", "-fPIC", "-Wall"]
        flags += ["-I", str(folder), "-isystem", include]
        sources = [str(SOURCE), *(str(folder / f"{part}.c") for part in PARTS)]
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, *flags, "-o", output, *sources, "-ldl"], check=True)
        found = ctypes.CDLL(output)
    found.queue_failure.restype = ctypes.c_char_p
    found.queue_close.restype = ctypes.c_int64
    found.load_pages.argtypes = (ctypes.c_uint64, ctypes.c_size_t)
    return found


class BareQueue:
    """A queue that records, and that nobody reads."""

    def __init__(self) -> None:
        found = managedmem.capabilities()
        self._arguments = (found.driver_path.encode(), int(found.emulated))
        self.records = 0

    def start(self) -> None:
        """Open it, and let it record."""
        if library().queue_open(*self._arguments) < 0:
            raise RuntimeError(library().queue_failure().decode())

    def stop(self) -> None:
        """Close it, and count its records."""
        self.records = library().queue_close()
        if self.records < 0:
            raise RuntimeError(library().queue_failure().decode())


class Cupti:
    """CUPTI's activity records of unified memory, through cupti-python."""

    COUNTERS = 8
    BUFFER = 8 * MIB

    def __init__(self, module: ModuleType) -> None:
        self._cupti = module
        self._kind = int(module.ActivityKind.UNIFIED_MEMORY_COUNTER)
        self.records = 0

    def start(self) -> None:
        """Configure all counters and enable them."""
        # Scope (a process and a single device), kind, device and on, for each counter.
        words = [word for kind in range(1, self.COUNTERS + 1) for word in (1, kind, 0, 1)]
        configured = (ctypes.c_uint32 * len(words))(*words)
        self._cupti.activity_configure_unified_memory_counter(
            ctypes.addressof(configured), self.COUNTERS
        )
        self._cupti.activity_register_callbacks(lambda: (self.BUFFER, 0), self._completed)
        self._cupti.activity_enable(self._kind)

    def _completed(self, activities: Sequence[object]) -> None:
        self.records += len(activities)

    def stop(self) -> None:
        """Deliver all records and disable the counters."""
        self._cupti.activity_flush_all(1)
        self._cupti.activity_disable(self._kind)


def cupti_or_reason() -> Cupti | str:
    """CUPTI, or the reason that it is left out."""
    if managedmem.emulator.is_active():
        return "it does not work with the emulated driver"
    try:
        return Cupti(importlib.import_module("cupti.cupti"))
    except Exception as error:
        return reason(error)


# --- steps ----------------------------------------------------------------------------------------


def on_the_host(bufs: Sequence[ManagedBuffer]) -> None:
    """The pages have contents, and are on the host."""
    for buf in bufs:
        buf.fill(1)
        buf.prefetch(Host())
    Device(0).sync()


def prefetches_and_kernels(bufs: Sequence[ManagedBuffer], stream: managedmem.Stream) -> None:
    """To the device, four kernels on each buffer, and back."""
    for buf in bufs:
        buf.prefetch(Device(0), stream=stream)
    for value in range(4):
        for buf in bufs:
            buf.fill(value, stream=stream)
    for buf in bufs:
        buf.prefetch(Host(), stream=stream)
    stream.sync()


def faults(bufs: Sequence[ManagedBuffer], stream: managedmem.Stream) -> None:
    """A kernel writes pages of the host, and the host reads them again."""
    for buf in bufs:
        buf.fill(1, stream=stream)
    stream.sync()
    for buf in bufs:
        library().load_pages(buf.handle, buf.nbytes)


def traced(work: Callable[[], None]) -> float:
    """Nanoseconds of the work while a trace runs."""
    with managedmem.trace() as t:
        time = elapsed(work)
    if not t.complete:
        raise RuntimeError(f"the trace is not complete: {t.problems}")
    return time


def recorded(source: BareQueue | Cupti, work: Callable[[], None]) -> float:
    """Nanoseconds of the work while a source records."""
    source.start()
    try:
        return elapsed(work)
    finally:
        source.stop()


def step_row(
    title: str,
    step: Callable[[Sequence[ManagedBuffer], managedmem.Stream], None],
    sizes: Sequence[int],
    repetitions: int,
    note: str,
) -> Row:
    """A step, untraced and with each recorder."""
    cupti = cupti_or_reason()
    with managedmem.Stream() as stream:
        bufs = [managedmem.empty(size) for size in sizes]
        work = functools.partial(step, bufs, stream)
        contenders: dict[str, Contender] = {
            UNTRACED: lambda _: elapsed(work),
            BARE: lambda _: recorded(BareQueue(), work),
            OURS: lambda _: traced(work),
        }
        on_the_host(bufs)
        row = side_by_side(
            title, contenders, count=1, repetitions=repetitions, unit="us", note=note
        )
        row = with_cupti(row, cupti, work, repetitions)
        for buf in bufs:
            buf.close()
    return row


def with_cupti(row: Row, cupti: Cupti | str, work: Callable[[], None], repetitions: int) -> Row:
    """The row with CUPTI's time, which is measured last because its end can take seconds."""
    if isinstance(cupti, str):
        return replace(row, failed={**row.failed, CUPTI: cupti})
    try:
        times = [recorded(cupti, work) for _ in range(min(repetitions, 5))]
    except Exception as error:
        return replace(row, failed={**row.failed, CUPTI: reason(error)})
    if not cupti.records:
        return replace(row, failed={**row.failed, CUPTI: "it was enabled and delivered nothing"})
    return replace(row, results={**row.results, CUPTI: Result.of(times)})


# --- start and end --------------------------------------------------------------------------------


def start_and_stop(repetitions: int, size: int = 2 * MIB) -> list[Row]:
    """The times to start and to stop a trace and a bare queue; the first of each does not count."""
    times: dict[str, tuple[list[float], list[float]]] = {OURS: ([], []), BARE: ([], [])}
    makers: dict[str, Callable[[], Any]] = {OURS: managedmem.trace, BARE: BareQueue}
    with managedmem.empty(size) as buf:
        buf.fill(1)
        for turn in range(repetitions + 1):
            for name, make in makers.items():
                source = make()
                start = elapsed(source.start)
                buf.prefetch(Device(0) if turn % 2 else Host())
                Device(0).sync()
                end = elapsed(source.stop)
                if turn:
                    times[name][0].append(start)
                    times[name][1].append(end)
    titles = (("start of a trace", "goal 1 ms"), ("stop of a trace", "goal 5 ms"))
    return [
        Row(title, {name: Result.of(found[i]) for name, found in times.items()}, "us", note)
        for i, (title, note) in enumerate(titles)
    ]


# --- bytes ----------------------------------------------------------------------------------------


def leave(_: ManagedBuffer) -> None:
    """The pages stay where they are."""


@dataclass(frozen=True)
class Pattern:
    """Work on a buffer whose pages are on the host, and the bytes that move by the work."""

    title: str
    work: Callable[[ManagedBuffer], object]
    cause: str  # "fault" has speculative moves too: the module decides which ones these are
    direction: int  # as in by_cause: to a device, to the host, between devices
    before: Callable[[ManagedBuffer], object] = leave
    part: float = 1.0  # of the buffer's bytes


def load(buf: ManagedBuffer) -> None:
    """The host reads a byte of each page."""
    library().load_pages(buf.handle, buf.nbytes)


def advise_read_mostly(buf: ManagedBuffer) -> None:
    """Reads of both sides make copies."""
    buf.read_mostly = True


def to_device(buf: ManagedBuffer) -> None:
    """A prefetch, without a wait."""
    buf.prefetch(Device(0))


PATTERNS = (
    Pattern("prefetch to the device", to_device, "requested", 0),
    Pattern(
        "prefetch of half of it", lambda b: to_device(b[: b.nbytes // 2]), "requested", 0, part=0.5
    ),
    Pattern("prefetch to where it is", lambda b: b.prefetch(Host()), "requested", 1, part=0.0),
    Pattern("prefetch to the host", lambda b: b.prefetch(Host()), "requested", 1, to_device),
    Pattern("loads of the host", load, "fault", 1, to_device),
    Pattern("fill on the device", lambda b: b.fill(2), "fault", 0),
    Pattern("prefetch of read_mostly", to_device, "requested", 0, advise_read_mostly),
)


def bytes_row(pattern: Pattern, buf: ManagedBuffer) -> Row:
    """The bytes of the pattern's cause, computed and counted; other moves count as difference."""
    buf.read_mostly = False
    on_the_host([buf])
    pattern.before(buf)
    Device(0).sync()
    with managedmem.trace() as t:
        pattern.work(buf)
        Device(0).sync()
    expected = pattern.part * buf.nbytes
    causes = ("fault", "speculative") if pattern.cause == "fault" else (pattern.cause,)
    found = sum(t[buf].by_cause[cause][pattern.direction] for cause in causes)
    everything = t.total.to_device + t.total.to_host + t.total.between_devices
    difference = abs(found - expected) + abs(everything - found)
    results = {"arithmetic": expected, OURS: found, "difference": difference}
    named = {name: Result(float(value)) for name, value in results.items()}
    return Row(f"bytes: {pattern.title}", named, "bytes", "goal: difference 0")


def bytes_rows(size: int) -> Iterator[Row]:
    """A row for each pattern."""
    with managedmem.empty(size) as buf:
        for pattern in PATTERNS:
            yield bytes_row(pattern, buf)


# --- the group ------------------------------------------------------------------------------------


def measure(
    repetitions: int = 15,
    scale: float = 1.0,
    canned: tuple[int, int, int] = (1_000_000, 10_000, 5),
) -> Iterator[Row]:
    """All rows. Sizes are `scale` times the usual ones; `canned` are events, memories and
    rounds."""

    def sized(size: int) -> int:
        return int(size * scale) // (2 * MIB) * 2 * MIB

    prefetched, faulted = map(sized, (PREFETCHED, FAULTED))
    yield step_row(
        f"{STEP}, {BUFFERS} x {prefetched // MIB} MiB",
        prefetches_and_kernels,
        [prefetched] * BUFFERS,
        repetitions,
        "goal: untraced + 2 %",
    )
    yield step_row(
        f"{FAULTS}, {faulted // MIB} MiB",
        faults,
        [faulted],
        repetitions,
        "goal: bare queue + 5 %",
    )
    yield from start_and_stop(repetitions)
    yield from bytes_rows(faulted)
    yield from canned_rows(*canned)


def canned_rows(events: int, memories: int, rounds: int) -> list[Row]:
    """Made-up events, divided among memories: time and memory."""
    goals = {"ms": "goal 150 ms, index included", "kB": "goal 67,109 kB (64 MiB)"}
    rows = attribution.measure(events, memories, rounds)
    return [replace(row, note=goals[row.unit]) for row in rows if "keep" not in row.operation]


def ratio(rows: Sequence[Row], title: str, to: str) -> float:
    """Ours as a multiple of another contender."""
    row = next(row for row in rows if row.operation.startswith(title))
    return row.results[OURS].median / row.results[to].median


def summary(rows: list[Row]) -> str:
    """The ratios that have goals."""
    differences = [row.results["difference"].median for row in rows if "difference" in row.results]
    return (
        f"Traced, a {STEP} takes {ratio(rows, STEP, UNTRACED):.3f} of the time untraced (goal"
        f" {STEP_GOAL}), a {FAULTS} {ratio(rows, FAULTS, BARE):.3f} of that with the bare queue"
        f" (goal {FAULTS_GOAL}) and {ratio(rows, FAULTS, UNTRACED):.3f} of that untraced. Bytes"
        f" differ from arithmetic by {sum(differences):.0f}."
    )
