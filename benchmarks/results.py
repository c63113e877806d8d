"""Results of a device, brought to the host by this library, by torch, and at the limit of the link.

The pages are on the device before each call. A copy reuses the memory of an earlier copy, so the
first call of each contender is not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType

import managedmem
from managedmem import Device

from . import peers
from .measure import KIB, MIB, Contender, Row, elapsed, side_by_side

SIZES = (256 * KIB, 4 * MIB, 64 * MIB)
NEED = SIZES[-1]  # and as much plain device memory and page-locked host memory
LIMIT = "pinned copy"
GOAL = 1.15
JUDGED = ("numpy(copy=True)", "copy_to a result")
DESCRIPTION = (
    "From the call until the host has the contents; the pages were on the device. pinned copy is"
    " torch's, from plain device memory: the limit. copy_to a result copies to an earlier array of"
    " numpy(copy=True), copy_to to one of numpy.empty. numpy() and torch('cpu') move the pages, the"
    " others leave them."
)

Step = Callable[[], object]


def after_prefetch(buf: managedmem.ManagedBuffer, step: Step) -> Contender:
    """Times the step, with all pages on the device before it."""

    def run(_: int) -> float:
        buf.prefetch(Device(0))
        Device(0).sync()
        return elapsed(step)

    return run


def ours(buf: managedmem.ManagedBuffer) -> dict[str, Step]:
    """The ways of this library that need NumPy alone."""
    import numpy

    result = buf.numpy(copy=True)
    ordinary = numpy.empty(buf.nbytes, "u1")
    ordinary[:] = 1  # its pages exist
    return {
        "numpy(copy=True)": lambda: buf.numpy(copy=True),
        "copy_to a result": lambda: buf.copy_to(result),
        "copy_to": lambda: buf.copy_to(ordinary),
        "numpy()": buf.numpy,
    }


def by_torch(torch: ModuleType, buf: managedmem.ManagedBuffer) -> dict[str, Step]:
    """The limit, and the ways to a tensor on the CPU."""
    from managedmem.torch import to_host

    data = torch.as_tensor(buf, device="cuda")
    plain = torch.empty(buf.nbytes, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(buf.nbytes, dtype=torch.uint8, pin_memory=True)
    return {
        LIMIT: lambda: pinned.copy_(plain),
        "to_host": lambda: to_host(data),
        "torch .cpu()": data.cpu,
        "torch('cpu')": lambda: buf.torch("cpu"),
    }


def judged(row: Row) -> Row:
    """The row with a note: our times as parts of the limit."""
    if row.broken or LIMIT not in row.results:
        return row
    limit = row.results[LIMIT].median
    times = [f"{name} {row.results[name].median / limit:.2f} x" for name in JUDGED]
    return replace(row, note=f"{', '.join(times)} the pinned copy, goal {GOAL} x")


def measure(repetitions: int = 15, sizes: Sequence[int] = SIZES) -> Iterator[Row]:
    """A row for each size."""
    torch = peers.torch_on_gpu()
    for size in sizes:
        with managedmem.empty(size) as buf:
            buf.fill(1)
            steps = ours(buf) | (by_torch(torch, buf) if torch is not None else {})
            contenders = {name: after_prefetch(buf, step) for name, step in steps.items()}
            row = side_by_side(
                f"{size // KIB} KiB to the host",
                contenders,
                count=1,
                repetitions=repetitions,
                unit="us",
            )
            del steps, contenders  # tensors over the buffer
        managedmem.result_cache.clear()
        yield judged(row)
