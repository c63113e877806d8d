"""CUDA managed (unified) memory for Python: allocate, advise, prefetch, discard, share.

>>> import managedmem
>>> buf = managedmem.empty((1024, 1024), "float32")      # doctest: +SKIP
>>> buf.read_mostly = True                               # doctest: +SKIP
>>> buf.prefetch(managedmem.Device(0))                   # doctest: +SKIP

The first use opens the driver; the import does not. MANAGEDMEM_DRIVER=emulator in the environment,
or managedmem.emulator.enable(), selects the emulated driver.
"""

from collections.abc import MutableSet as _MutableSet
from importlib import import_module as _import_module

from managedmem._managedmem import (
    AccessedBySetProxy,
    AppliedPolicy,
    CUDAError,
    CUDAOutOfMemoryError,
    Device,
    DeviceMemoryResource,
    DriverNotFoundError,
    DriverTooOldError,
    DType,
    ExportError,
    Host,
    IPCNotSupportedError,
    ManagedBuffer,
    ManagedMemoryResource,
    MemoryInfo,
    MigrationPolicy,
    PageRun,
    PeerAccessibleBySetProxy,
    PlanEntry,
    PoolAttributes,
    PrefetchPlan,
    Stream,
    TraceBusyError,
    TraceUnavailableError,
    advise,
    discard,
    discard_prefetch,
    driver_info,
    empty,
    prefetch,
    residency,
)

__version__ = "0.1.0"

__all__ = [
    "AccessedBySetProxy",
    "AppliedPolicy",
    "CUDAError",
    "CUDAOutOfMemoryError",
    "DType",
    "Device",
    "DeviceMemoryResource",
    "DriverNotFoundError",
    "DriverTooOldError",
    "ExportError",
    "Host",
    "IPCNotSupportedError",
    "ManagedBuffer",
    "ManagedMemoryResource",
    "MemoryInfo",
    "MigrationPolicy",
    "PageRun",
    "PeerAccessibleBySetProxy",
    "PlanEntry",
    "PoolAttributes",
    "PrefetchPlan",
    "Residency",
    "ResidencyRun",
    "Stream",
    "TraceBusyError",
    "TraceUnavailableError",
    "advise",
    "discard",
    "discard_prefetch",
    "driver_info",
    "empty",
    "emulator",
    "prefetch",
    "residency",
]

_MutableSet.register(AccessedBySetProxy)
_MutableSet.register(PeerAccessibleBySetProxy)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Type checkers treat this name as true. Importing typing for it would double the import time.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from managedmem import emulator as emulator
    from managedmem._residency import Residency, ResidencyRun
else:

    def __getattr__(name: str) -> object:
        """Import modules at their first use, which keeps this package's import short."""
        if name == "emulator":
            return _import_module("managedmem.emulator")
        if name in ("Residency", "ResidencyRun"):
            return getattr(_import_module("managedmem._residency"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


del TYPE_CHECKING
