"""A loop over several buffers: the host prepares one while others move and the GPU works.

Each step writes a buffer on the host, prefetches it to the GPU and queues work on it. Then it waits
for the work on the previous buffer, and prefetches that buffer to the host. Last, it reads the
buffer before the previous one. So every prefetch meets an idle stream, and the thread works while
pages move. The GPU's work is a fill of the whole buffer, for all contenders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import managedmem
from managedmem import Device, Host, ManagedBuffer, Stream

from . import peers
from .measure import KIB, MIB, Contender, Row, elapsed, side_by_side

SIZES = (2 * MIB, 8 * MIB, 32 * MIB)
COUNT = 8
NEED = SIZES[-1] * COUNT

# Moves the buffer with this number to the device (True) or to the host.
Move = Callable[[int, bool], object]


@dataclass
class Pipeline:
    """Buffers of one size, a stream for each, and the functions that move them."""

    bufs: list[ManagedBuffer]
    streams: list[Stream]
    held: float = 0.0  # nanoseconds that the thread spent in calls that move

    def ours(self, defer: bool) -> Move:
        """Prefetches of this library."""
        device, host = Device(0), Host()

        def move(i: int, to_device: bool) -> None:
            location = device if to_device else host
            self.bufs[i].prefetch(location, stream=self.streams[i], defer=defer)

        return move

    def cuda_core(self) -> Move | None:
        """Prefetches of cuda.core over the same memory."""
        pairs = zip(self.streams, self.bufs, strict=True)
        names = [peers.cuda_core(stream, buf) for stream, buf in pairs]
        if not names[0]:
            return None

        def move(i: int, to_device: bool) -> None:
            location = names[i]["core_device" if to_device else "core_host"]
            names[i]["core_buf"].prefetch(location, stream=names[i]["core_stream"])

        return move

    def bindings(self) -> Move | None:
        """The driver's call through cuda.bindings."""
        names = [peers.bindings(stream) for stream in self.streams]
        if not names[0]:
            return None
        call, success = names[0]["drv"].cuMemPrefetchAsync, names[0]["drv"].CUresult.CUDA_SUCCESS

        def move(i: int, to_device: bool) -> None:
            location = names[i]["on_device" if to_device else "on_host"]
            buf = self.bufs[i]
            (code,) = call(buf.handle, buf.nbytes, location, 0, names[i]["cu_stream"])
            if code != success:
                raise RuntimeError(f"cuMemPrefetchAsync gave {code}")

        return move

    def cupy(self) -> Move | None:
        """CuPy's call; if it cannot name the host, pages return by page faults."""
        runtime = peers.cupy_runtime()
        if runtime is None:
            return None
        host_device = -1  # the name of the host in this call, up to CUDA 12

        def move(i: int, to_device: bool) -> None:
            buf, stream = self.bufs[i], self.streams[i].handle
            if to_device:
                runtime.memPrefetchAsync(buf.handle, buf.nbytes, 0, stream)
            elif runtime.runtimeGetVersion() < 13000:
                runtime.memPrefetchAsync(buf.handle, buf.nbytes, host_device, stream)

        return move

    def moves(self) -> dict[str, Move]:
        """Every contender that can run here."""
        found: dict[str, Move | None] = {
            "ours, deferred": self.ours(True),
            "ours, plain": self.ours(False),
            "cuda.core": self.cuda_core(),
            "cuda.bindings": self.bindings(),
            "CuPy": self.cupy(),
            "no prefetch": lambda i, to_device: None,
        }
        return {name: move for name, move in found.items() if move}

    def run(self, move: Move, source: bytes, sink: memoryview) -> None:
        """The loop, from the first write to the last read, both by a copy of all bytes."""
        count = len(self.bufs)
        for i in range(count + 2):
            if i < count:
                with memoryview(self.bufs[i]) as view:
                    view[:] = source
                self.held += elapsed(partial(move, i, True))
                self.bufs[i].fill(i, stream=self.streams[i])
            if 1 <= i <= count:
                self.streams[i - 1].sync()
                self.held += elapsed(partial(move, i - 1, False))
            if i >= 2:
                self.streams[i - 2].sync()
                with memoryview(self.bufs[i - 2]) as view:
                    sink[:] = view

    def home(self) -> None:
        """Move all pages to the host, where every run starts."""
        for buf, stream in zip(self.bufs, self.streams, strict=True):
            buf.prefetch(Host(), stream=stream, defer=False)
            stream.sync()


def timed(pipeline: Pipeline, move: Move, *, held: bool) -> Contender:
    """A measurement of the loop: all of it, or the part that the thread spends in moving calls."""
    size = pipeline.bufs[0].nbytes
    # A view: assigning to a slice of the bytearray itself would make a copy first.
    source, sink = bytes(size), memoryview(bytearray(size))

    def once(_: int) -> float:
        pipeline.home()
        pipeline.held = 0.0
        whole = elapsed(lambda: pipeline.run(move, source, sink))
        return pipeline.held if held else whole

    return once


def measure(
    repetitions: int = 7, sizes: Sequence[int] = SIZES, count: int = COUNT
) -> Iterator[Row]:
    """Two rows for each size: the whole loop, and the time in the calls."""
    for size in sizes:
        with ExitStack() as stack:
            bufs = [stack.enter_context(managedmem.empty(size)) for _ in range(count)]
            streams = [stack.enter_context(Stream()) for _ in range(count)]
            pipeline = Pipeline(bufs, streams)
            for held in (False, True):
                title = f"{count} x {size // KIB} KiB, {'thread in the calls' if held else 'loop'}"
                contenders = {
                    name: timed(pipeline, move, held=held)
                    for name, move in pipeline.moves().items()
                }
                yield side_by_side(title, contenders, count=1, repetitions=repetitions, unit="us")
