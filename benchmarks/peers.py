"""The other libraries: those that are installed, and their objects for the benchmarks.

numba-cuda allocates managed arrays, but has no public call that advises, prefetches or discards
them. RMM has none either.
"""

from __future__ import annotations

import ctypes
import importlib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import managedmem


def optional(name: str) -> ModuleType | None:
    """The module, or None if it is missing or broken."""
    try:
        return importlib.import_module(name)
    except Exception:
        return None


def versions() -> dict[str, str]:
    """The versions of all measured libraries."""
    found = {"managedmem": managedmem.__version__}
    for name in ("cuda.core", "cuda.bindings", "cupy", "numba_cuda", "torch", "numpy"):
        if module := optional(name):
            found[name] = str(getattr(module, "__version__", "?"))
    for name in ("transformers", "diffusers", "accelerate"):  # slow to import
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def on_gpu(name: str) -> ModuleType | None:
    """The module, or None with the emulated driver, which no other library calls."""
    return None if managedmem.emulator.is_active() else optional(name)


def torch_on_gpu() -> ModuleType | None:
    """torch, if it can use a GPU."""
    torch = on_gpu("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


def core_on_gpu() -> ModuleType | None:
    """cuda.core of a version with managed buffers, its device current."""
    core = on_gpu("cuda.core")
    if core is None or not hasattr(core, "ManagedBuffer"):
        return None
    core.Device(0).set_current()
    return core


def cuda_core(stream: managedmem.Stream, *bufs: managedmem.ManagedBuffer) -> dict[str, Any]:
    """cuda.core's objects over our memory: driver 580 refuses advice on memory of cuda.core's
    pool."""
    core = core_on_gpu()
    if core is None:
        return {}
    wrapped = [core.ManagedBuffer.from_handle(buf.handle, buf.nbytes) for buf in bufs]
    return {
        "core": core,
        "core_bufs": wrapped,
        "core_buf": wrapped[0],
        "core_device": core.Device(0),
        "core_host": core.Host(),
        "core_stream": core.Stream.from_handle(stream.handle),
        "core_utils": optional("cuda.core.utils"),
    }


def bindings(stream: managedmem.Stream) -> dict[str, Any]:
    """The arguments of calls through cuda.bindings."""
    driver = on_gpu("cuda.bindings.driver")
    if driver is None:
        return {}
    on_device, on_host = driver.CUmemLocation(), driver.CUmemLocation()
    on_device.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    on_device.id = 0
    on_host.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST
    on_host.id = 0
    return {
        "drv": driver,
        "on_device": on_device,
        "on_host": on_host,
        "cu_stream": driver.CUstream(stream.handle),
        "READ_MOSTLY": driver.CUmem_range_attribute.CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY,
        "SET_READ_MOSTLY": driver.CUmem_advise.CU_MEM_ADVISE_SET_READ_MOSTLY,
        "ATTACH_GLOBAL": driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value,
    }


def raw() -> dict[str, Any]:
    """The driver's functions through ctypes."""
    library = ctypes.CDLL(managedmem.capabilities().driver_path)
    prefetch, attribute = library.cuMemPrefetchAsync, library.cuMemRangeGetAttribute
    size_t, address = ctypes.c_size_t, ctypes.c_uint64
    prefetch.argtypes = [address, size_t, ctypes.c_int, ctypes.c_void_p]
    attribute.argtypes = [ctypes.c_void_p, size_t, ctypes.c_int, address, size_t]
    answer = ctypes.c_int()
    return {
        "raw_prefetch": prefetch,
        "raw_attribute": attribute,
        "answer": answer,
        "answer_address": ctypes.addressof(answer),
    }


def cupy_on_gpu() -> ModuleType | None:
    """CuPy, if it can use a GPU."""
    module = on_gpu("cupy")
    return module if module is not None and module.cuda.is_available() else None


def cupy_runtime() -> ModuleType | None:
    """CuPy's calls of the CUDA runtime, which take any address; None without CuPy or its GPU."""
    module = cupy_on_gpu()
    if module is None:
        return None
    runtime: ModuleType = module.cuda.runtime
    return runtime


def cupy(size: int) -> dict[str, Any]:
    """CuPy's own managed memory."""
    module = optional("cupy")
    if module is None or cupy_runtime() is None:
        return {}
    return {
        "cupy_cuda": module.cuda,
        "cupy_memory": module.cuda.ManagedMemory(size),
        "cupy_stream": module.cuda.Stream(non_blocking=True),
        "cupy_device": module.cuda.Device(0),
    }


def numba() -> dict[str, Any]:
    """numba-cuda, if it has a GPU."""
    module = on_gpu("numba.cuda")
    return {} if module is None or not module.is_available() else {"numba_cuda": module}
