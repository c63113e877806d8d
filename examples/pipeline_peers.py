"""The loop of pipeline.py, timed with prefetches of this library and with those of others.

    python examples/pipeline_peers.py     on a machine with an NVIDIA GPU

The buffers, the streams and the work are the same for all; only the prefetches are made by
cuda.core, by the driver's call in cuda.bindings, or by CuPy, if they are installed. CuPy cannot
name the host on CUDA 13, so its pages return by page faults.
"""

import importlib
import time
from array import array
from contextlib import ExitStack

from pipeline import BUFFERS, PASSES, Stage, run, torch_with_gpu

import managedmem
from managedmem import Device, Host


class Peer(Stage):
    """A stage whose buffer another library prefetches."""

    def move(self, location, defer):
        start = time.perf_counter()
        self.prefetch(location is Device(0))
        self.held += time.perf_counter() - start


class CudaCore(Peer):
    def __init__(self, buf, stream, torch):
        super().__init__(buf, stream, torch)
        core = importlib.import_module("cuda.core")
        core.Device(0).set_current()
        self.places = core.Host(), core.Device(0)
        self.peer_buffer = core.ManagedBuffer.from_handle(buf.handle, buf.nbytes)
        self.peer_stream = core.Stream.from_handle(stream.handle)

    def prefetch(self, to_device):
        self.peer_buffer.prefetch(self.places[to_device], stream=self.peer_stream)


class CudaBindings(Peer):
    def __init__(self, buf, stream, torch):
        super().__init__(buf, stream, torch)
        self.driver = importlib.import_module("cuda.bindings.driver")
        kinds = self.driver.CUmemLocationType
        self.places = self.driver.CUmemLocation(), self.driver.CUmemLocation()
        self.places[False].type = kinds.CU_MEM_LOCATION_TYPE_HOST
        self.places[True].type = kinds.CU_MEM_LOCATION_TYPE_DEVICE

    def prefetch(self, to_device):
        buf, location, stream = self.buf, self.places[to_device], self.stream.handle
        (code,) = self.driver.cuMemPrefetchAsync(buf.handle, buf.nbytes, location, 0, stream)
        assert code == self.driver.CUresult.CUDA_SUCCESS, code


class CuPy(Peer):
    def __init__(self, buf, stream, torch):
        super().__init__(buf, stream, torch)
        self.runtime = importlib.import_module("cupy").cuda.runtime

    def prefetch(self, to_device):
        if to_device:
            self.runtime.memPrefetchAsync(self.buf.handle, self.buf.nbytes, 0, self.stream.handle)


# The library, its stage, and a module with an attribute that old versions lack.
PEERS = [
    ("cuda.core", CudaCore, "cuda.core", "ManagedBuffer"),
    ("cuda.bindings", CudaBindings, "cuda.bindings.driver", "cuMemPrefetchAsync"),
    ("CuPy", CuPy, "cupy", "cuda"),
]


def peers():
    """The libraries that can be used here."""
    if managedmem.emulator.is_active():
        print("other libraries cannot use the emulated driver")
        return
    Device(0).set_current()
    for name, kind, module, needed in PEERS:
        try:
            found = hasattr(importlib.import_module(module), needed)
        except ImportError:
            found = False
        if found:
            yield name, kind, False
        else:
            print(f"{name:>13}: not here, or too old")


def main():
    torch = torch_with_gpu()
    numbers = (32 << 20) // 8 if torch else 4096  # 256 MiB in all, as in pipeline.py
    source = array("q", range(numbers))
    variants = [("plain", Stage, False), ("deferred", Stage, True), *peers()]
    best = {}
    with ExitStack() as stack:
        bufs = [stack.enter_context(managedmem.empty(numbers, "int64")) for _ in range(BUFFERS)]
        streams = [stack.enter_context(managedmem.Stream()) for _ in range(BUFFERS)]
        for _ in range(PASSES):
            for name, kind, defer in variants:
                for buf in bufs:
                    buf.prefetch(Host(), defer=False)  # every pass begins there
                stages = [kind(*pair, torch) for pair in zip(bufs, streams, strict=True)]
                Device(0).sync()
                start = time.perf_counter()
                run(stages, source, numbers * (numbers - 1), defer)
                whole = time.perf_counter() - start
                held = sum(stage.held for stage in stages)
                best[name] = min(best.get(name, (whole, held)), (whole, held))
    for name, (whole, held) in best.items():
        print(f"{name:>13}: {1e3 * whole:7.2f} ms, {1e3 * held:6.2f} ms of it in prefetch calls")


if __name__ == "__main__":
    main()
