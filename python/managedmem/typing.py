"""Names to annotate with: the types of results and arguments.

>>> from managedmem.typing import Location, Residency, Target
>>> def where(data: Target) -> Residency:
...     return managedmem.residency(data)

``Target``, ``Location``, ``StreamLike`` and ``ArrayLike`` are for type checkers; at run time they
are ``typing.Any``. The other names are the classes of objects that the package returns, and
``TuneUnstableError``, which tune() raises. The import opens no driver.
"""

from typing import TYPE_CHECKING

from managedmem._capabilities import Capabilities
from managedmem._managedmem import (
    AccessedBySetProxy,
    AppliedPolicy,
    DType,
    MemoryInfo,
    PageRun,
    PeerAccessibleBySetProxy,
    PlanEntry,
    PoolAttributes,
)
from managedmem._memory_stats import KeptMemory, LiveMemory, MemoryCounts, MemoryStats
from managedmem._residency import Residency, ResidencyRun
from managedmem._trace import Finding, Trace, TraceEvent, TraceMemory, TraceSlice, TraceSums
from managedmem._tune import TuneResult, TuneTime, TuneTrial, TuneUnstableError
from managedmem._working_group import WorkingGroup, WorkingUse
from managedmem._working_set import WorkingSetStats

if TYPE_CHECKING:
    from numpy.typing import ArrayLike as _NumPyArrayLike

    from managedmem._managedmem import _Location as Location
    from managedmem._managedmem import _Stream as StreamLike
    from managedmem._managedmem import _Target as Target

    ArrayLike = Target | _NumPyArrayLike
else:
    from typing import Any as ArrayLike
    from typing import Any as Location
    from typing import Any as StreamLike
    from typing import Any as Target

__all__ = [
    "AccessedBySetProxy",
    "AppliedPolicy",
    "ArrayLike",
    "Capabilities",
    "DType",
    "Finding",
    "KeptMemory",
    "LiveMemory",
    "Location",
    "MemoryCounts",
    "MemoryInfo",
    "MemoryStats",
    "PageRun",
    "PeerAccessibleBySetProxy",
    "PlanEntry",
    "PoolAttributes",
    "Residency",
    "ResidencyRun",
    "StreamLike",
    "Target",
    "Trace",
    "TraceEvent",
    "TraceMemory",
    "TraceSlice",
    "TraceSums",
    "TuneResult",
    "TuneTime",
    "TuneTrial",
    "TuneUnstableError",
    "WorkingGroup",
    "WorkingSetStats",
    "WorkingUse",
]


def __dir__() -> list[str]:
    # Completion shows these: the public names.
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
