"""``python -m managedmem demo``: classify real handwritten digits in managed memory, and report.

Owns the demonstration: its buffers, their advice and prefetches, the job timed with and without
prefetches, and the report. ``engines`` does the arithmetic and ``digits`` has the images;
``examples/digits.py`` makes the same calls in a script to copy from.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import managedmem
from managedmem import Device, Host, ManagedBuffer, Stream, digits
from managedmem._cli import driver, engines
from managedmem._cli.bars import Bar, lines_of
from managedmem._cli.demo_plot import Timing, draw
from managedmem._cli.output import progress
from managedmem._cli.text import printable, size_text, table
from managedmem._extras import need

BATCH_BYTES = 64 << 20
"""Size of the inputs where the product is fast."""

TOTAL_LIMIT = 128 << 20
"""The most managed memory that the demo holds."""

ROUNDS = 5

_PER_IMAGE = 4 * digits.FEATURES + 4 * digits.CLASSES + 1


class Job(NamedTuple):
    """The classification of one batch: its memory, and where the pages are before and during it."""

    inputs: ManagedBuffer
    weights: ManagedBuffer
    scores: ManagedBuffer
    labels: ManagedBuffer
    stream: Stream
    engine: engines.Engine
    home: Device | Host
    work: Device | Host
    emulated: bool

    @property
    def buffers(self) -> dict[str, ManagedBuffer]:
        """The four buffers by name."""
        return {name: getattr(self, name) for name in ("inputs", "weights", "scores", "labels")}


class Hint(NamedTuple):
    """A hint to the driver, and a function that reads it back."""

    name: str
    value: object
    read: Callable[[], object]
    refusal: Exception | None = None

    def row(self) -> tuple[str, str, str]:
        """The name, the requested value, and the present one or the refusal."""
        if self.refusal is None:
            return self.name, str(self.value), str(self.read())
        error = getattr(self.refusal, "name", None) or type(self.refusal).__name__
        return self.name, str(self.value), f"refused: {error}"


def refused(action: Callable[[], object]) -> Exception | None:
    """Call the action; return the error of a machine that cannot do it, or None."""
    try:
        action()
    except (managedmem.CUDAError, NotImplementedError, ValueError) as error:
        return error
    return None


def repeats(engine: engines.Engine, emulated: bool, free: int) -> int:
    """Copies of the 1,797 images in the batch: one where the product is slow."""
    if emulated or not engine.fast:
        return 1
    count = len(digits.load().labels)
    most = min(TOTAL_LIMIT, free // 8) - (1 << 20)
    return max(1, min(BATCH_BYTES // (4 * digits.FEATURES * count), most // (_PER_IMAGE * count)))


@contextlib.contextmanager
def open_job(engine: engines.Engine, device: Device, emulated: bool) -> Iterator[Job]:
    """Allocate and fill the buffers of a job; they are freed at the end of the block."""
    data, trained = digits.load(), digits.load_weights()
    copies = repeats(engine, emulated, device.memory_info.free)
    count = len(data.labels) * copies
    # Pages start on the side that does not compute; otherwise none would have to move.
    on_device = engine.on_device or emulated
    home, work = (Host(), device) if on_device else (device, Host())
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(Stream())
        inputs, weights, scores = (
            stack.enter_context(managedmem.empty((rows, columns), "float32"))
            for rows, columns in (
                (count, digits.FEATURES),
                (digits.FEATURES + 1, digits.CLASSES),
                (count, digits.CLASSES),
            )
        )
        labels = stack.enter_context(managedmem.empty(count, "uint8"))
        job = Job(inputs, weights, scores, labels, stream, engine, home, work, emulated)
        fill(weights, trained.tobytes(), 1)
        fill(inputs, data.as_floats().tobytes(), copies)
        yield job


def fill(buffer: ManagedBuffer, content: bytes, copies: int) -> None:
    """Write copies of the same bytes into a buffer, from the host."""
    with memoryview(buffer) as view, view.cast("B") as flat:
        for start in range(0, copies * len(content), len(content)):
            flat[start : start + len(content)] = content


def advise(job: Job) -> list[Hint]:
    """Advise the driver that the weights are mostly read, and where they are used."""
    weights, work = job.weights, job.work

    def set_(name: str, value: object) -> Hint:
        refusal = refused(lambda: setattr(weights, name, value))
        return Hint(f"weights.{name}", value, lambda: getattr(weights, name), refusal)

    return [set_("read_mostly", True), set_("preferred_location", work)]


def prefetches(job: Job) -> list[Hint]:
    """The prefetches of the job, to be read back after it has run."""
    locations = [("inputs", job.work), ("weights", job.work), ("labels", Host())]

    def read(buffer: ManagedBuffer) -> Callable[[], object]:
        return lambda: buffer.last_prefetch_location

    return [
        Hint(f"{name}.last_prefetch_location", location, read(job.buffers[name]))
        for name, location in locations
    ]


def send_home(job: Job) -> None:
    """Move all pages to where each round starts."""
    managedmem.prefetch([*job.buffers.values()], job.home, stream=job.stream)
    job.stream.sync()


def touch(job: Job, names: Sequence[str], location: Device | Host, write: bool = False) -> None:
    """Report accesses to the emulated driver; a real one sees them by itself."""
    if job.emulated:
        for name in names:
            managedmem.emulator.touch(job.buffers[name], location, write)


def classify(job: Job, prefetch: bool) -> bytes:
    """Run the job once and read its answer on the host: one byte per image."""
    stream, work = job.stream, job.work
    if prefetch:
        # The old scores are not needed, so their pages move without a copy. If the driver cannot do
        # that, the next call copies them.
        refused(lambda: job.scores.discard_prefetch(work, stream=stream))
        managedmem.prefetch([*job.buffers.values()], work, stream=stream)
    if job.emulated:
        stream.sync()
        touch(job, ["inputs", "weights"], work)
        touch(job, ["scores", "labels"], work, write=True)
    job.engine.multiply(job.inputs, job.weights, job.scores, job.labels, stream)
    if prefetch:
        job.labels.prefetch(Host(), stream=stream)
    stream.sync()
    touch(job, ["labels"], Host())
    with memoryview(job.labels) as answer:
        return answer.tobytes()


def measure(job: Job, prefetch: bool, movable: bool) -> Timing:
    """Time the job from pages at home to the answer on the host: the median round."""
    seconds = []
    for _ in range(1 if job.emulated else ROUNDS):
        if movable:
            send_home(job)
        if job.emulated:
            managedmem.emulator.clear_counters()
        start = time.perf_counter()
        classify(job, prefetch)
        seconds.append(time.perf_counter() - start)
    counted = _counted() if job.emulated else ""
    faults: int | None
    if job.emulated:
        faults = managedmem.emulator.counters().gpu_faults
    else:
        faults = traced_faults(job, prefetch, movable)
    variant = "with prefetch" if prefetch else "by page faults" if movable else "no prefetch"
    return Timing(variant, statistics.median(seconds), counted, faults)


def traced_faults(job: Job, prefetch: bool, movable: bool) -> int | None:
    """The page faults where the job works, in a round of its own; None if they cannot be traced."""
    if movable:
        send_home(job)
    try:
        with managedmem.trace() as trace:
            classify(job, prefetch)
    except (managedmem.TraceUnavailableError, managedmem.TraceBusyError, managedmem.CUDAError):
        return None
    return trace.total.host_faults if job.work == Host() else trace.total.device_faults


def _counted() -> str:
    """The counters of the emulated driver in words, without zeros."""
    counters = managedmem.emulator.counters()._asdict()
    parts = []
    for name, value in counters.items():
        if value:
            label = {"bytes_htod": "to the device", "bytes_dtoh": "to the host"}.get(
                name, name.replace("_", " ")
            )
            text = size_text(value) if name.startswith("bytes") else str(value)
            parts.append(f"{text} {label}")
    return ", ".join(parts) or "nothing"


def print_job(job: Job, movable: bool) -> None:
    """Print the data, the engine and the buffers of the job."""
    count, stored = len(job.labels), len(digits.load().labels)
    text = f"{stored:,} handwritten digits of 8 x 8 pixels (UCI), real scans"
    if count > stored:
        text += f", {count // stored} times over"
    engine = job.engine
    total = sum(buffer.size for buffer in job.buffers.values())
    rows = [("images", text), ("product", f"{engine.name}, {count:,} x 64 by 64 x 10")]
    if engine.note:
        rows.append(("", engine.note))
    if job.emulated:
        rows.append(("", f"in place of {job.work}: the emulated driver runs no kernels"))
    start = f"pages start on {job.home}" if movable else "pages cannot be sent anywhere here"
    rows.append(("memory", f"{size_text(total)} managed, {start}"))
    for name, buffer in job.buffers.items():
        use = {"inputs": "read", "weights": "read, shared", "scores": "scratch"}.get(name, "output")
        shape = " x ".join(map(str, buffer.shape))
        rows.append(("", f"{name:8}{shape:14}{buffer.dtype:9}{use}"))
    print(table(rows, ""))


def print_hints(hints: Sequence[Hint]) -> None:
    """Print each hint beside the driver's present state, and the reason of each refusal."""
    print("\nadvice and prefetches")
    heads = ("", "asked", "the driver says now")
    print(table([heads, *(hint.row() for hint in hints)]))
    for reason in dict.fromkeys(str(hint.refusal) for hint in hints if hint.refusal):
        print(textwrap.fill(reason, 96, initial_indent="  ", subsequent_indent="    "))


def print_timings(job: Job, timings: Sequence[Timing]) -> None:
    """Print the time of each variant, and the counts of the emulated driver."""
    start = f"pages on {job.home}" if len(timings) == 2 else "the data"
    print(f"\ntime from {start} to the answer on the host")
    rows = [(each.variant, f"{each.seconds * 1e3:9.2f} ms", each.counted) for each in timings]
    if len(timings) == 2 and not job.emulated:
        factor = timings[1].seconds / timings[0].seconds
        rows.append(("prefetch gains", f"{factor:9.2f} x", ""))
    print(table(rows))
    if job.emulated:
        print("  These times mean nothing: the emulated driver moves no data. The counts say what")
        print("  would move on a GPU.")
    else:
        print(f"  (median of {ROUNDS} rounds)")


def print_picture(job: Job, timings: Sequence[Timing]) -> None:
    """Draw faults as bars, and times that mean something; the run without prefetch first."""
    shown = timings[::-1]
    if all(each.faults is not None for each in shown):
        unit = ", one for each 64 KiB" if job.emulated else ""
        print(f"\npage faults of {job.work}{unit}")
        counts = [(each.variant, each.faults or 0) for each in shown]
        rows = [Bar(name, count, f"{count:,} faults") for name, count in counts]
        print("\n".join(lines_of(rows, sys.stdout)))
    if job.emulated:
        return
    print("\nmilliseconds")
    times = [Bar(each.variant, each.seconds, f"{each.seconds * 1e3:.2f}") for each in shown]
    print("\n".join(lines_of(times, sys.stdout)))


def print_accuracy(answer: bytes) -> None:
    """Print the share of right answers on the held-out images."""
    labels = digits.load().labels
    held_out = len(labels[digits.HELD_OUT])
    rest = len(labels) - held_out
    print(f"\naccuracy  {digits.accuracy(answer, labels):.4f} on the {held_out} held-out images")
    print(f"          (every third; the classifier was trained on the other {rest:,})")


def report(job: Job, plot: str | None) -> bool:
    """Run each variant of the job that this machine allows, and print and draw all of it."""
    move_refusal = refused(lambda: send_home(job))
    movable = move_refusal is None
    print_job(job, movable)
    hints = advise(job)
    variants = (True, False) if movable else (False,)
    with progress("the first run, in which libraries load"):
        first = classify(job, movable)  # untimed
    with progress("timing the job"):
        timings = [measure(job, prefetch, movable) for prefetch in variants]
    again = classify(job, movable)
    if movable:
        hints += prefetches(job)
    else:
        hints.append(Hint("prefetch", job.work, str, move_refusal))
    refusal = refused(lambda: job.scores.discard(stream=job.stream))
    hints.append(Hint("scores.discard()", "scratch", lambda: "done, contents given up", refusal))
    job.stream.sync()
    print_hints(hints)
    print_accuracy(again)
    print_timings(job, timings)
    print_picture(job, timings)
    if plot is not None:
        draw(plot, timings[::-1], job.work, job.emulated)
        print(f"\nwritten: {printable(plot)}")
    if first != again:
        print("\nFAILED: two runs of the same job gave different answers")
    return first == again


def run(request: str | None = None, plot: str | None = None) -> int:
    """Run the demo on the driver ``request`` ("cuda", "emulator" or None); return the status.

    ``plot`` is the file of a picture to write. Raises ImportError for it without matplotlib.
    """
    if plot is not None:
        need("matplotlib", "--plot")
    info, reason = driver.open_driver(request)
    print(f"driver  {driver.describe_driver(info, reason)}", flush=True)
    device = Device(0)
    print(f"device  {device}: {device.name}")
    emulated = bool(info["emulated"])
    with progress("looking for a library that multiplies"):
        engine = engines.choose(emulated, device)
    with open_job(engine, device, emulated) as job:
        return 0 if report(job, plot) else 1
