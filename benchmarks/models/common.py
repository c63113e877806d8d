"""The place of a job, its measurements, and the memory that the driver says is taken meanwhile."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

import managedmem

GIB = 1 << 30
MOST_MANAGED = 16 * GIB  # of the page faults, and never more than half of what is free
PERIOD = 0.003  # seconds between two looks at the memory that is taken

Step = Callable[[], object]


class Nothing:
    """A stream or an event where torch has no GPU."""

    def record(self, stream: object = None) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...


class Place:
    """Runs jobs on a GPU or, if `tiny`, on the CPU with the emulated driver. `share` is the size of
    the models, as a part of the full size."""

    def __init__(self, tiny: bool, share: float = 1.0, ordinal: int = 0) -> None:
        self.tiny, self.share, self.ordinal = tiny, share, ordinal
        self.device = torch.device("cpu" if tiny else f"cuda:{ordinal}")
        self.dtype = torch.float32 if tiny else torch.bfloat16
        self.repetitions = 2 if tiny else 3

    def layers(self, count: int) -> int:
        """The number of layers for a model that has `count` at full size."""
        return max(int(count * self.share), 2)

    def wait(self) -> None:
        if not self.tiny:
            torch.cuda.synchronize()

    def stream(self) -> Any:
        return Nothing() if self.tiny else torch.cuda.Stream()

    def event(self) -> Any:
        return Nothing() if self.tiny else torch.cuda.Event()

    def current(self) -> Any:
        return Nothing() if self.tiny else torch.cuda.current_stream()

    def on(self, stream: Any) -> Any:
        """The context in which work goes to a stream."""
        return nullcontext() if self.tiny else torch.cuda.stream(stream)

    def pinned(self, nbytes: int) -> Any:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=not self.tiny)

    def give_back(self) -> None:
        """Give the memory of the device that torch keeps back to the driver."""
        if not self.tiny:
            gc.collect()
            torch.cuda.empty_cache()

    def to_cpu(self, model: Any) -> Any:
        """The model in ordinary memory of the host, as a loader leaves it."""
        model.to("cpu")
        self.give_back()
        return model

    def timed(self, step: Step, most: int, seconds: float = 4.0) -> list[float]:
        """Nanoseconds of each step, of at most `most` steps; the last begins within these
        seconds."""
        found: list[float] = []
        end = time.monotonic() + seconds
        while len(found) < most and (not found or time.monotonic() < end):
            self.wait()
            begin = time.perf_counter_ns()
            step()
            self.wait()
            found.append(float(time.perf_counter_ns() - begin))
        return found


def nbytes_of(tensors: Iterable[Any]) -> int:
    """The bytes of parameters; shared ones count once."""
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


def check_managed(place: Place, nbytes: int) -> None:
    """RuntimeError for more managed memory than a GPU that others use can bear."""
    limit = MOST_MANAGED
    if not place.tiny:
        limit = min(limit, torch.cuda.mem_get_info()[0] // 2)
    if nbytes > limit:
        raise RuntimeError(f"{nbytes / 1e9:.1f} GB of managed memory, at most {limit / 1e9:.1f}")


@dataclass
class Measured:
    """The measurements of one contender: by figure and unit, in the smallest unit.

    "FIGURE@OTHER" is a figure of another contender, measured in turn with this one.
    """

    values: dict[tuple[str, str], list[float]]
    numbers: list[Any] = field(default_factory=list)  # tensors, to compare with the resident ones


@dataclass(frozen=True)
class Job:
    """Contenders that do the same work, each in a process of its own."""

    title: str
    contenders: dict[str, Callable[[Meter], Measured]]
    by_hand: tuple[str, ...] = ("by hand",)  # the fastest of these is the one to reach


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_uint64), ("free", ctypes.c_uint64), ("used", ctypes.c_uint64))


class Meter:
    """The most bytes that are taken on the device, above those that were taken before the model.

    Counted by NVML, which holds no lock of CUDA's, or else by cuMemGetInfo.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        if not place.tiny:  # the context, and cuBLAS with its scratch
            small = torch.ones(64, 64, device=place.device, dtype=place.dtype)
            (small @ small).sum().item()
            del small
        place.give_back()
        self.nvml, self.handle = self.opened()
        self.base = self.most = self.used()

    def opened(self) -> tuple[ctypes.CDLL | None, ctypes.c_void_p]:
        """NVML, or None, and its handle of the device."""
        handle = ctypes.c_void_p()
        try:
            nvml = None if self.place.tiny else ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            nvml = None
        if nvml is not None:
            name = f"GPU-{managedmem.Device(self.place.ordinal).uuid}".encode()
            if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)):
                nvml = None
        return nvml, handle

    def used(self) -> int:
        memory = _Memory()
        if self.nvml and not self.nvml.nvmlDeviceGetMemoryInfo(self.handle, ctypes.byref(memory)):
            return int(memory.used)
        info = managedmem.Device(self.place.ordinal).memory_info
        return int(info.total - info.free)

    def watch(self, work: Callable[[], Any]) -> Any:
        """Do some work, and look at the memory meanwhile."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(PERIOD):
                self.most = max(self.most, self.used())

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            found = work()
            self.place.wait()
        finally:
            ended.set()
            thread.join()
        self.most = max(self.most, self.used())
        return found

    @property
    def taken(self) -> float:
        return float(self.most - self.base)
