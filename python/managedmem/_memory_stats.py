"""memory_stats() and live(): the memory that this package has allocated, or frees."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from managedmem._managedmem import (
    Device,
    ManagedBuffer,
    _memory_counts,
    _memory_kept,
    _memory_living,
)
from managedmem._units import record_text, size_text, time_text

_OWN = os.path.join(os.path.dirname(__file__), "")


class MemoryCounts(NamedTuple):
    """The memory of one kind.

    Attributes
    ----------
    nbytes : int
        Bytes that live. Managed memory has whole pages.
    peak_nbytes : int
        The most bytes that lived at once, since the start or the last reset.
    living : int
        Number of memories that live. A memory and its views count once.
    made : int
        Number of memories made, since the start.
    """

    nbytes: int = 0
    peak_nbytes: int = 0
    living: int = 0
    made: int = 0

    def __repr__(self) -> str:
        return record_text(self, nbytes=size_text, peak_nbytes=size_text)


class KeptMemory(NamedTuple):
    """Bytes of a device that stay taken, whether they are in use or not.

    Attributes
    ----------
    frames : int
        Bytes of working sets and offloaded modules: WorkingSetStats.kept, summed.
    pools : int
        Bytes that the driver reserves for memory pools of this package, in use or freed.
    """

    frames: int
    pools: int

    def __repr__(self) -> str:
        return record_text(self, frames=size_text, pools=size_text)


class MemoryStats(NamedTuple):
    """The memory of the process that this package has allocated, or frees. repr gives a table.

    Attributes
    ----------
    total : MemoryCounts
        All kinds together.
    managed : MemoryCounts
        Managed memory without a pool.
    managed_pools : Mapping of Device or None to MemoryCounts
        Memory of managed pools, by the device that the pool prefers; None for other pools.
    device_pools : Mapping of Device to MemoryCounts
        Memory of device pools.
    wrapped : MemoryCounts
        Memory of other resources that buffers give back: from_handle(mr=...).
    kept : Mapping of Device or None to KeptMemory
        Memory that stays taken; None for managed pools that prefer no device.
    """

    total: MemoryCounts
    managed: MemoryCounts
    managed_pools: Mapping[Device | None, MemoryCounts]
    device_pools: Mapping[Device, MemoryCounts]
    wrapped: MemoryCounts
    kept: Mapping[Device | None, KeptMemory]

    def __repr__(self) -> str:
        counts = {
            "managed": self.managed,
            **{_kind("managed pools", place): each for place, each in self.managed_pools.items()},
            **{_kind("device pools", place): each for place, each in self.device_pools.items()},
            "wrapped": self.wrapped,
            "total": self.total,
        }
        rows = [("memory", "bytes", "peak", "living", "made")]
        for kind, each in counts.items():
            sizes = size_text(each.nbytes), size_text(each.peak_nbytes)
            rows.append((kind, *sizes, str(each.living), str(each.made)))
        lines = _aligned(rows)
        if self.kept:
            lines += [
                "",
                *_aligned([("kept", "frames", "pools"), *map(_kept_row, self.kept.items())]),
            ]
        return "\n".join(lines)


class LiveMemory(NamedTuple):
    """A memory that lives.

    Attributes
    ----------
    label : str
        The name of the buffer, or its dtype, shape and serial: "float32[512,1024] #7".
    nbytes : int
        Its bytes. Managed memory has whole pages.
    resource : str
        "managed", "managed pool", "device pool" or "wrapped", as in MemoryStats.
    device : Device or None
        The device of its pool, or the device that its pool prefers.
    serial : int
        Its number in the order of allocation.
    age : float
        Seconds since its allocation.
    address : int
        Its first byte.
    traceback : tracemalloc.Traceback or None
        The allocation in Python, whose last frame is the line that called this package; None if it
        is unknown, or was not asked for.
    """

    label: str
    nbytes: int
    resource: str
    device: Device | None
    serial: int
    age: float
    address: int
    traceback: tracemalloc.Traceback | None

    def __repr__(self) -> str:
        named = self._fields if self.traceback else self._fields[:-1]
        return record_text(self, *named, nbytes=size_text, age=time_text, address=hex)


def memory_stats(*, reset_peaks: bool = False) -> MemoryStats:
    """Bytes, peaks and numbers of allocations by resource and device, and the memory that is kept.

    Parameters
    ----------
    reset_peaks : bool
        True restarts the peaks from the bytes that live now.

    Counts all interpreters and threads. It does not count what torch's pools and NumPy's arrays
    take from managed_mempool() and numpy_allocator(): torch.cuda.memory_stats() and tracemalloc do.
    Raises TypeError for another reset_peaks, CUDAError if the driver does not answer. Safe from
    every thread; opens no driver. Driver: cuMemPoolGetAttribute, once for each pool.
    """
    _check_flag("reset_peaks", reset_peaks)
    kept = {_device(number): KeptMemory(*pair) for number, *pair in _memory_kept()}
    counts = {
        (kind, _device(number)): MemoryCounts(*rest)
        for kind, number, *rest in _memory_counts(reset_peaks)
    }

    def by_device(wanted: str) -> Mapping[Device | None, MemoryCounts]:
        return MappingProxyType({d: count for (kind, d), count in counts.items() if kind == wanted})

    return MemoryStats(
        counts["all", None],
        counts.get(("managed", None), MemoryCounts()),
        by_device("managed pool"),
        by_device("device pool"),  # type: ignore[arg-type]
        counts.get(("wrapped", None), MemoryCounts()),
        MappingProxyType(kept),
    )


def live(*, tracebacks: bool = False) -> list[LiveMemory]:
    """The memories that live, the largest first, and older ones first among equals.

    Parameters
    ----------
    tracebacks : bool
        True adds the traceback of each allocation that tracemalloc traced and whose buffer still
        exists. Looks through all objects of the interpreter.

    The memories are those that memory_stats() counts. Raises RuntimeError for tracebacks while
    tracemalloc does not trace, TypeError for anything but True and False. Safe from every thread.
    Driver: none.
    """
    _check_flag("tracebacks", tracebacks)
    traces = _tracebacks() if tracebacks else {}
    memories = [
        LiveMemory(label, nbytes, kind, _device(number), serial, age, start, traces.get(start))
        for label, nbytes, kind, number, serial, age, start in _memory_living()
    ]
    return sorted(memories, key=lambda memory: (-memory.nbytes, memory.serial))


def _kind(pools: str, place: Device | None) -> str:
    return f"{pools}, {place or 'no device'}"


def _kept_row(kept: tuple[Device | None, KeptMemory]) -> tuple[str, ...]:
    return f"{kept[0] or 'no device'}", *map(size_text, kept[1])


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def _device(number: int) -> Device | None:
    return None if number < 0 else Device(number)


def _tracebacks() -> dict[int, tracemalloc.Traceback | None]:
    """The tracebacks of the buffers of whole memories, by address."""
    if not tracemalloc.is_tracing():
        raise RuntimeError(
            "tracebacks need tracemalloc: call tracemalloc.start(25) before the allocations, or "
            "start Python with -X tracemalloc=25"
        )
    return {
        each.handle: _of_caller(tracemalloc.get_object_traceback(each))
        for each in gc.get_objects()
        if _is_buffer(each) and not any(map(_is_buffer, gc.get_referents(each)))  # no view
    }


def _of_caller(traceback: tracemalloc.Traceback | None) -> tracemalloc.Traceback | None:
    """The traceback without the frames of this package at its end, such as those of zeros()."""
    frames = [(frame.filename, frame.lineno) for frame in traceback or ()]
    while frames and frames[-1][0].startswith(_OWN):
        frames.pop()
    return tracemalloc.Traceback(frames[::-1]) if frames else traceback


def _is_buffer(each: object) -> bool:
    # isinstance() would read __class__, on which deprecated names of other libraries warn.
    return issubclass(type(each), ManagedBuffer)
