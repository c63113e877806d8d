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

from managedmem._managedmem import (
    AccessedBySetProxy,
    AppliedPolicy,
    CUDAError,
    CUDAOutOfMemoryError,
    CUDAWarning,
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
    "CUDAWarning",
    "Capabilities",
    "DType",
    "Device",
    "DeviceMemoryResource",
    "DriverNotFoundError",
    "DriverTooOldError",
    "ExportError",
    "Finding",
    "Host",
    "IPCNotSupportedError",
    "ManagedBuffer",
    "ManagedMemoryResource",
    "ManagedWorkingSet",
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
    "Trace",
    "TraceBusyError",
    "TraceEvent",
    "TraceMemory",
    "TraceSlice",
    "TraceSums",
    "TraceUnavailableError",
    "TuneResult",
    "TuneTime",
    "TuneTrial",
    "TuneUnstableError",
    "WorkingGroup",
    "WorkingSet",
    "WorkingSetStats",
    "WorkingUse",
    "advise",
    "asarray",
    "capabilities",
    "discard",
    "discard_prefetch",
    "driver_info",
    "empty",
    "empty_like",
    "emulator",
    "full",
    "prefetch",
    "residency",
    "result_cache",
    "trace",
    "tune",
    "zeros",
]

_MutableSet.register(AccessedBySetProxy)
_MutableSet.register(PeerAccessibleBySetProxy)


def _repr_html_(self: ManagedBuffer) -> str | None:
    """The buffer for notebooks: its name and shape, and strips of its pages by place and advice.

    Reads records only: no page is touched or moved, and no device is waited for. None if that
    fails. Safe from every thread. Driver: cuMemRangeGetAttributes.
    """
    module = _import_module("managedmem._buffer_html")
    found: str | None = module.html_of_buffer(self)
    return found


setattr(ManagedBuffer, _repr_html_.__name__, _repr_html_)
del _repr_html_


def __dir__() -> list[str]:
    # Completion shows these: the public names, and the modules that have been imported.
    shown = {name for name in globals() if name[0] != "_" or name[:2] == "__"}
    return sorted(shown.union(__all__))


# Type checkers treat this name as true. Importing typing for it would double the import time.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from managedmem import emulator as emulator
    from managedmem._capabilities import Capabilities, capabilities
    from managedmem._creation import asarray, empty_like, full, zeros
    from managedmem._residency import Residency, ResidencyRun
    from managedmem._result_cache import result_cache
    from managedmem._trace import (
        Finding,
        Trace,
        TraceEvent,
        TraceMemory,
        TraceSlice,
        TraceSums,
        trace,
    )
    from managedmem._tune import TuneResult, TuneTime, TuneTrial, TuneUnstableError, tune
    from managedmem._working_group import WorkingGroup, WorkingUse
    from managedmem._working_set import ManagedWorkingSet, WorkingSet, WorkingSetStats
else:
    _FILES = {
        "Capabilities": "_capabilities",
        "capabilities": "_capabilities",
        "asarray": "_creation",
        "empty_like": "_creation",
        "full": "_creation",
        "zeros": "_creation",
        "Residency": "_residency",
        "ResidencyRun": "_residency",
        "result_cache": "_result_cache",
        "Finding": "_trace",
        "Trace": "_trace",
        "TraceEvent": "_trace",
        "TraceMemory": "_trace",
        "TraceSlice": "_trace",
        "TraceSums": "_trace",
        "trace": "_trace",
        "TuneResult": "_tune",
        "TuneTime": "_tune",
        "TuneTrial": "_tune",
        "TuneUnstableError": "_tune",
        "tune": "_tune",
        "WorkingGroup": "_working_group",
        "WorkingUse": "_working_group",
        "ManagedWorkingSet": "_working_set",
        "WorkingSet": "_working_set",
        "WorkingSetStats": "_working_set",
    }

    def __getattr__(name: str) -> object:
        """Import a part at the first use of one of its names, which keeps this import short."""
        if name == "emulator":
            return _import_module("managedmem.emulator")
        if name not in _FILES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(_import_module(f"managedmem.{_FILES[name]}"), name)
        return value


del TYPE_CHECKING
