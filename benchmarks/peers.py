"""The other libraries: which are here, and the objects of theirs that the benchmarks call."""

from __future__ import annotations

import ctypes
import importlib
from types import ModuleType
from typing import Any

import managedmem


def optional(name: str) -> ModuleType | None:
    """The module, or None where it is missing or cannot be used."""
    try:
        return importlib.import_module(name)
    except Exception:
        return None


def versions() -> dict[str, str]:
    """What is measured, by name."""
    found = {"managedmem": managedmem.__version__}
    for name in ("cuda.core", "cuda.bindings", "cupy", "numba_cuda", "torch", "numpy"):
        if module := optional(name):
            found[name] = str(getattr(module, "__version__", "?"))
    return found


def cuda_core(buf: managedmem.ManagedBuffer, stream: managedmem.Stream) -> dict[str, Any]:
    """cuda.core's objects over our memory: its own pool memory takes no advice on this driver."""
    core = optional("cuda.core")
    if core is None or not hasattr(core, "ManagedBuffer"):
        return {}
    device = core.Device(0)
    device.set_current()
    return {
        "core": core,
        "core_buf": core.ManagedBuffer.from_handle(buf.handle, buf.nbytes),
        "core_device": device,
        "core_host": core.Host(),
        "core_stream": core.Stream.from_handle(stream.handle),
    }


def bindings(stream: managedmem.Stream) -> dict[str, Any]:
    """What a call of cuda.bindings needs."""
    driver = optional("cuda.bindings.driver")
    if driver is None:
        return {}
    there = driver.CUmemLocation()
    there.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    there.id = 0
    return {
        "drv": driver,
        "there": there,
        "cu_stream": driver.CUstream(stream.handle),
        "READ_MOSTLY": driver.CUmem_range_attribute.CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY,
        "SET_READ_MOSTLY": driver.CUmem_advise.CU_MEM_ADVISE_SET_READ_MOSTLY,
    }


def raw() -> dict[str, Any]:
    """The driver's functions through ctypes."""
    library = ctypes.CDLL(managedmem.driver_info()["path"])
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


def cupy(size: int) -> dict[str, Any]:
    """CuPy's managed memory, which it can only allocate itself."""
    module = optional("cupy")
    if module is None or not module.cuda.is_available():
        return {}
    return {
        "cupy_memory": module.cuda.ManagedMemory(size),
        "cupy_stream": module.cuda.Stream(non_blocking=True),
        "cupy_device": module.cuda.Device(0),
    }
