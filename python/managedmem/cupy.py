"""Managed memory for CuPy: allocators for ``cupy.cuda.set_allocator``, a pool, prefetch and advice.

>>> import cupy, managedmem.cupy
>>> pool = managedmem.cupy.managed_mempool()
>>> cupy.cuda.set_allocator(pool.malloc)
>>> x = cupy.ones((1024, 1024))
>>> managedmem.cupy.prefetch(x, managedmem.Host())
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from managedmem._extras import CUPY

try:
    import cupy
except ModuleNotFoundError as error:
    if error.name != "cupy":
        raise
    raise ImportError(f"managedmem.cupy needs {CUPY}", name="cupy") from None

import managedmem
from managedmem import (
    CUDAOutOfMemoryError,
    Device,
    Host,
    ManagedMemoryResource,
    MigrationPolicy,
)

if TYPE_CHECKING:
    from managedmem._managedmem import _Advice, _Dispatch, _Location, _Stream, _Target

__all__ = [
    "ManagedMemoryPool",
    "advise",
    "allocator",
    "make_allocator",
    "managed_mempool",
    "prefetch",
]

OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation: CuPy's pools free unused blocks on it and try again."""


def allocator(size: int) -> cupy.cuda.MemoryPointer:
    """Allocate managed memory for CuPy: ``cupy.cuda.set_allocator(managedmem.cupy.allocator)``.

    Each allocation of ``size`` bytes has pages of its own, without advice, until its last array is
    gone. Raises cupy.cuda.runtime.CUDARuntimeError without memory, as CuPy's own allocators do, and
    RuntimeError with the emulated driver. Safe from every thread. Driver: cuMemAllocManaged,
    cuMemFree.
    """
    return _allocate(size, None)


def _allocate(size: int, policy: MigrationPolicy | None) -> cupy.cuda.MemoryPointer:
    device = cupy.cuda.Device().id
    if size == 0:
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(0, 0, None, device), 0)
    try:
        buffer = _resource().allocate(size, policy=policy)
    except CUDAOutOfMemoryError as error:
        raise cupy.cuda.runtime.CUDARuntimeError(OUT_OF_MEMORY) from error
    memory = cupy.cuda.UnownedMemory(buffer.handle, size, buffer, device)
    return cupy.cuda.MemoryPointer(memory, 0)


def make_allocator(
    *,
    policy: MigrationPolicy | None = None,
    preferred_location: Device | Host | None = None,
    accessed_by: Iterable[Device | Host] = (),
    read_mostly: bool = False,
) -> Callable[[int], cupy.cuda.MemoryPointer]:
    """Make an allocator like allocator() that advises each allocation.

    Parameters
    ----------
    policy : MigrationPolicy, optional
        The advice of the pages, in place of the next three arguments.
    preferred_location : Device or Host, optional
        The preferred location of the pages.
    accessed_by : iterable of Device and Host()
        Processors that keep a mapping of the pages.
    read_mostly : bool
        True gives each reader a copy of its own.

    Advises one page on trial, so that bad arguments (TypeError, ValueError) and advice that the
    driver refuses (CUDAError) raise at once. RuntimeError with the emulated driver.
    """
    parts = MigrationPolicy(
        read_mostly=read_mostly,
        preferred_location=preferred_location,
        accessed_by=frozenset(accessed_by),
    )
    if policy is None:
        policy = parts
    elif not parts.is_default:
        raise ValueError(
            "give policy, or preferred_location, accessed_by and read_mostly, but not both"
        )
    ManagedMemoryResource().allocate(mmap.PAGESIZE, policy=policy).close()
    _resource()
    return functools.partial(_allocate, policy=None if policy.is_default else policy)


class ManagedMemoryPool(cupy.cuda.MemoryPool):  # type: ignore[misc]
    """A ``cupy.cuda.MemoryPool`` in which every array has whole pages of its own.

    CuPy's pools cut blocks into multiples of 512 bytes, so that advice and prefetches, which act on
    pages, would reach an array's neighbours. This pool rounds sizes up to pages.
    """

    def malloc(self, size: int) -> cupy.cuda.MemoryPointer:
        """Allocate ``size`` bytes, rounded up to whole pages, from the pool if possible."""
        return super().malloc(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE)


def managed_mempool(
    *,
    policy: MigrationPolicy | None = None,
    preferred_location: Device | Host | None = None,
    accessed_by: Iterable[Device | Host] = (),
    read_mostly: bool = False,
) -> ManagedMemoryPool:
    """Make a pool over managed memory: ``cupy.cuda.set_allocator(pool.malloc)``.

    Takes the arguments and raises the errors of make_allocator(). Each block is advised once, when
    it is allocated. Advice that an array gets later stays with its block when another array reuses
    it.
    """
    return ManagedMemoryPool(
        make_allocator(
            policy=policy,
            preferred_location=preferred_location,
            accessed_by=accessed_by,
            read_mostly=read_mostly,
        )
    )


def prefetch(
    arrays: _Target | Iterable[_Target],
    location: _Location | Sequence[_Location],
    *,
    stream: _Stream | None = None,
    dispatch: _Dispatch = "auto",
    defer: bool | None = None,
) -> None:
    """Move the pages of one or more arrays to a location, in the order of CuPy's current stream.

    Works as managedmem.prefetch(), but ``stream=None`` is ``cupy.cuda.get_current_stream()``. A
    strided array is moved from its first to its last element.
    """
    if stream is None:
        stream = cupy.cuda.get_current_stream()
    managedmem.prefetch(arrays, location, stream=stream, dispatch=dispatch, defer=defer)


def advise(
    arrays: _Target | Iterable[_Target],
    advice: _Advice,
    location: _Location | Sequence[_Location] | None = None,
) -> None:
    """Tell the driver how the pages of one or more arrays will be used; as managedmem.advise()."""
    managedmem.advise(arrays, advice, location)


@functools.cache
def _resource() -> ManagedMemoryResource:
    if managedmem._managedmem._driver_info()["emulated"]:
        raise RuntimeError("the emulated driver is in use, and no GPU can reach its memory")
    return ManagedMemoryResource()
