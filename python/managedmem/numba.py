"""numba-cuda device arrays in managed memory: an external memory manager.

``NUMBA_CUDA_MEMORY_MANAGER=managedmem.numba`` in the environment, or, before CUDA is used:

>>> import managedmem.numba
>>> from numba import cuda
>>> cuda.set_memory_manager(managedmem.numba.ManagedMemoryManager)
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

try:
    from numba.cuda import HostOnlyCUDAMemoryManager, MemoryInfo, MemoryPointer
    from numba.cuda.cudadrv.driver import CudaAPIError
except ModuleNotFoundError as error:
    if error.name not in ("numba", "numba.cuda"):
        raise
    raise ImportError(
        "managedmem.numba needs numba-cuda, which is not installed here: pip install numba-cuda",
        name=error.name,
    ) from None

import managedmem
from managedmem import CUDAOutOfMemoryError, Device, ManagedBuffer, ManagedMemoryResource

__all__ = ["ManagedMemoryManager"]


class ManagedMemoryManager(HostOnlyCUDAMemoryManager):  # type: ignore[misc]
    """Allocates numba's device arrays as managed memory, each on pages of its own.

    Memory is freed when its last array is gone, or at the end of ``cuda.defer_cleanup()``. Pinned
    and mapped host memory stays numba's. numba makes one manager per context.
    Driver: cuMemAllocManaged, cuMemFree.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Called by numba, with ``context=``."""
        super().__init__(*args, **kwargs)
        self._deferring = 0
        self._deferred: list[ManagedBuffer] = []

    def initialize(self) -> None:
        """Check the driver; RuntimeError when the emulated one is in use."""
        if managedmem._managedmem._driver_info()["emulated"]:
            raise RuntimeError("the emulated driver is in use, and no GPU can reach its memory")

    def memalloc(self, size: int) -> MemoryPointer:
        """Allocate ``size`` bytes in numba's current context; CudaAPIError without memory."""
        try:
            buffer = ManagedMemoryResource().allocate(size)
        except CUDAOutOfMemoryError as error:
            raise CudaAPIError(error.code, str(error)) from error
        address = ctypes.c_void_p(buffer.handle)

        def release() -> None:
            if self._deferring:
                self._deferred.append(buffer)
            else:
                buffer.close()

        return MemoryPointer(weakref.proxy(self.context), address, size, finalizer=release)

    @contextlib.contextmanager
    def defer_cleanup(self) -> Iterator[None]:
        """Put off all frees to the end of the block."""
        with super().defer_cleanup():
            self._deferring += 1
            try:
                yield
            finally:
                self._deferring -= 1
                if not self._deferring:
                    self._deferred.clear()

    def get_memory_info(self) -> MemoryInfo:
        """Free and total bytes of the device's own memory; managed memory may exceed both."""
        return MemoryInfo(*Device(self.context.device.id).memory_info)

    def get_ipc_handle(self, memory: Any) -> NoReturn:
        """NotImplementedError: the driver has no IPC for managed memory."""
        raise NotImplementedError("managed memory cannot be shared by IPC: the driver has none")

    @property
    def interface_version(self) -> int:
        """The version of numba's interface that this class is written for."""
        return 1


_numba_memory_manager = ManagedMemoryManager
"""The name that numba reads when NUMBA_CUDA_MEMORY_MANAGER names this module."""
