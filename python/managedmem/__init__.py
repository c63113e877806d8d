"""CUDA managed (unified) memory for Python: allocate, advise, prefetch, discard, share.

>>> import managedmem
>>> buf = managedmem.empty((1024, 1024), "float32")
>>> buf.read_mostly = True
>>> buf.prefetch(managedmem.Device(0))

The first use opens the driver; the import does not. MANAGEDMEM_DRIVER=emulator in the environment,
or managedmem.emulator.enable(), selects the emulated driver.
"""

from collections.abc import MutableSet as _MutableSet
from importlib import import_module as _import_module
from os import environ as _environ

from managedmem import _managedmem
from managedmem._managedmem import (
    CUDAError,
    CUDAOutOfMemoryError,
    CUDAWarning,
    Device,
    DeviceMemoryResource,
    DriverNotFoundError,
    DriverTooOldError,
    ExportError,
    Host,
    IPCNotSupportedError,
    ManagedBuffer,
    ManagedMemoryResource,
    MigrationPolicy,
    PrefetchPlan,
    Stream,
    TraceBusyError,
    TraceUnavailableError,
    advise,
    copy,
    discard,
    discard_prefetch,
    empty,
    is_managed,
    prefetch,
    residency,
)

__version__ = "0.2.0"

__all__ = [
    "CUDAError",
    "CUDAOutOfMemoryError",
    "CUDAWarning",
    "Device",
    "DeviceMemoryResource",
    "DriverNotFoundError",
    "DriverTooOldError",
    "ExportError",
    "Host",
    "IPCNotSupportedError",
    "ManagedBuffer",
    "ManagedMemoryResource",
    "ManagedWorkingSet",
    "MigrationPolicy",
    "PrefetchPlan",
    "Stream",
    "TraceBusyError",
    "TraceUnavailableError",
    "WorkingSet",
    "advise",
    "asarray",
    "capabilities",
    "copy",
    "discard",
    "discard_prefetch",
    "empty",
    "empty_like",
    "emulator",
    "full",
    "is_managed",
    "live",
    "memory_stats",
    "numpy_allocator",
    "prefetch",
    "residency",
    "result_cache",
    "trace",
    "tune",
    "zeros",
]

_MutableSet.register(_managedmem.AccessedBySetProxy)
_MutableSet.register(_managedmem.PeerAccessibleBySetProxy)


def _repr_html_(self: ManagedBuffer) -> str | None:
    """The buffer for notebooks: its name and shape, and strips of its pages by place and advice.

    Reads records only: no page is touched or moved, and no device is waited for. None if that
    fails. Safe from every thread. Driver: cuMemRangeGetAttributes.
    """
    module = _import_module("managedmem._buffer_html")
    html: str | None = module.html_of_buffer(self)
    return html


setattr(ManagedBuffer, _repr_html_.__name__, _repr_html_)
del _repr_html_

if _environ.get("MANAGEDMEM_NVTX", "") not in ("", "0"):
    from managedmem import _nvtx as _nvtx
if _environ.get("MANAGEDMEM_TOP", "") not in ("", "0"):
    from managedmem import _top_server as _top_server


def __dir__() -> list[str]:
    # Completion shows these: the public names, and the modules that have been imported.
    shown = {name for name in globals() if name[0] != "_" or name[:2] == "__"}
    return sorted(shown.union(__all__))


# Type checkers treat this name as true. Importing typing for it would double the import time.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from managedmem import cupy as cupy
    from managedmem import emulator as emulator
    from managedmem import megatron as megatron
    from managedmem import numba as numba
    from managedmem import torch as torch
    from managedmem import typing as typing
    from managedmem._capabilities import capabilities
    from managedmem._creation import asarray, empty_like, full, zeros
    from managedmem._memory_stats import live, memory_stats
    from managedmem._numpy_allocator import numpy_allocator
    from managedmem._result_cache import result_cache
    from managedmem._trace import trace
    from managedmem._tune import tune
    from managedmem._working_set import ManagedWorkingSet, WorkingSet
else:
    _FILES = {
        "capabilities": "_capabilities",
        "asarray": "_creation",
        "empty_like": "_creation",
        "full": "_creation",
        "zeros": "_creation",
        "live": "_memory_stats",
        "memory_stats": "_memory_stats",
        "numpy_allocator": "_numpy_allocator",
        "result_cache": "_result_cache",
        "trace": "_trace",
        "tune": "_tune",
        "ManagedWorkingSet": "_working_set",
        "WorkingSet": "_working_set",
    }
    _MODULES = ("cupy", "emulator", "megatron", "numba", "torch", "typing")

    def __getattr__(name: str) -> object:
        """Import a part at the first use of one of its names, which keeps this import short."""
        if name in _MODULES:
            try:
                return _import_module(f"managedmem.{name}")
            except ImportError as error:  # hasattr() is False if the library is missing
                raise AttributeError(str(error)) from error
        if name not in _FILES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(_import_module(f"managedmem.{_FILES[name]}"), name)
        return value


del TYPE_CHECKING
