"""torch memory pools over managed memory.

The extension exports the functions that torch's caching allocator calls, one pair for each
combination of advice, so nothing is compiled at run time.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from operator import index
from typing import Any, NamedTuple, SupportsIndex

import torch

import managedmem
from managedmem import CUDAError, Device, Host, ManagedBuffer, MigrationPolicy, _managedmem

_allocators: dict[str, torch.cuda.memory.CUDAPluggableAllocator] = {}
"""By the name of the allocating function. None is removed: blocks may be freed after their pool."""

_SMALL = 1 << 20  # bytes; torch has blocks of another kind for tensors up to this


class UnifiedMemoryUnsupportedError(Exception):
    """torch cannot have managed memory here; the text says why."""


class _Advice(NamedTuple):
    """The arguments of _register_preset()."""

    preferred_location: Device | Host | None = None
    accessed_by: Iterable[Device | Host] = ()
    read_mostly: bool = False
    own_device: bool = False


def managed_mempool(
    *,
    policy: MigrationPolicy | None = None,
    preferred_location: Device | Host | None = None,
    accessed_by: Iterable[Device | Host] = (),
    read_mostly: bool = False,
    use_on_oom: bool = False,
    no_split: bool = False,
    reserve: SupportsIndex = 0,
) -> torch.cuda.MemPool:
    """Make a ``torch.cuda.MemPool`` whose tensors lie in managed memory.

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
    use_on_oom : bool
        A switch of torch: where the device is full, tensors that are made outside of the pool take
        free blocks of the pool. A new pool has no blocks but those of `reserve`.
    no_split : bool
        A switch of torch: no two tensors share a block, so that advice and prefetches of one do not
        reach the others.
    reserve : int
        The bytes of free blocks that the pool has at first, for use_on_oom, on torch's current
        stream. A sixteenth of them, at least 2 MiB, is for tensors of up to 1 MiB. The pages of the
        blocks take no memory before their first use.

    Each block that torch's caching allocator requests is advised once, for all tensors cut from it.
    Use the pool with ``torch.cuda.use_mem_pool(pool)``; tensors may outlive it. A pool belongs to
    torch's current device at its creation.

    Raises UnifiedMemoryUnsupportedError, with the reasons, where torch cannot have managed memory;
    NotImplementedError for a switch that this version of torch does not have; TypeError and
    ValueError for bad arguments; CUDAError for advice that the driver refuses; RuntimeError when 32
    different combinations of advice are in use. Safe from every thread.
    Driver: cuMemAllocManaged and cuMemAdvise for each block, cuMemFree.
    """
    advice = _read_advice(policy, _Advice(preferred_location, tuple(accessed_by), read_mostly))
    switches = _read_switches({"use_on_oom": use_on_oom, "no_split": no_split})
    size = _read_reserve(reserve, switches)
    pool = _make_pool(advice, switches)
    if size > 0:
        _reserve(pool, size)
    return pool


def own_device_mempool() -> torch.cuda.MemPool:
    """Make a pool whose blocks prefer, and are accessed by, the device they are allocated for."""
    return _make_pool(_Advice(own_device=True), {})


def _read_advice(policy: MigrationPolicy | None, parts: _Advice) -> _Advice:
    """The advice of the policy, or of the other arguments."""
    if policy is None:
        return parts
    if not isinstance(policy, MigrationPolicy):
        raise TypeError(f"policy must be a MigrationPolicy or None, got {policy!r}")
    if parts != _Advice():
        raise ValueError(
            "give policy, or preferred_location, accessed_by and read_mostly, but not both"
        )
    return _Advice(policy.preferred_location, policy.accessed_by, policy.read_mostly)


def _read_switches(values: Mapping[str, bool]) -> dict[str, bool]:
    """The switches that are on, by name, because versions of torch differ in their order."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    return {name: value for name, value in values.items() if value}


def _read_reserve(reserve: SupportsIndex, switches: Mapping[str, bool]) -> int:
    size = index(reserve)
    if size < 0:
        raise ValueError(f"reserve must be 0 bytes or more, got {size}")
    if size > 0 and "use_on_oom" not in switches:
        raise ValueError("reserve is for tensors outside of the pool, so it needs use_on_oom=True")
    if size > 0 and "no_split" in switches:
        raise ValueError(
            "reserve needs no_split=False: with no_split=True one tensor takes a whole block"
        )
    return size


def _refuse_unknown(switches: Mapping[str, bool]) -> None:
    """NotImplementedError for a switch that this version of torch does not have."""
    known = inspect.signature(torch.cuda.MemPool.__init__).parameters
    if missing := sorted(switches.keys() - known.keys()):
        raise NotImplementedError(
            f"torch {torch.__version__} has no {' and no '.join(missing)} for torch.cuda.MemPool: "
            "a newer version is needed"
        )


def _reserve(pool: torch.cuda.MemPool, size: int) -> None:
    """Leave free blocks in the pool, because torch keeps separate ones for small tensors."""
    small = max(2, size // 16 // _SMALL)
    sizes = [max(size - small * _SMALL, 2 * _SMALL), *[_SMALL] * small]
    with torch.cuda.use_mem_pool(pool):
        blocks = [torch.empty(each, dtype=torch.uint8, device="cuda") for each in sizes]
    del blocks


def unsupported_reasons() -> list[str]:
    """Why torch cannot have managed memory here; empty where it can."""
    return [*_torch_reasons(), *_driver_reasons()]


def _torch_reasons() -> Iterator[str]:
    if torch.version.cuda is None:
        yield f"torch {torch.__version__} was built without CUDA"
    elif not hasattr(torch.cuda, "MemPool"):
        yield f"torch {torch.__version__} has no torch.cuda.MemPool"
    elif not torch.cuda.is_available():
        yield "torch finds no GPU that it can use"


def _driver_reasons() -> Iterator[str]:
    try:
        info = managedmem._managedmem._driver_info()
    except (managedmem.DriverNotFoundError, managedmem.DriverTooOldError) as error:
        yield str(error)
        return
    if info["emulated"]:
        yield "the emulated driver is in use, and no GPU can reach its memory"
        return
    for device in Device.all():
        if not device.managed_memory:
            yield f"{device} has no managed memory"


def _function_names(advice: _Advice) -> tuple[str, str]:
    """The names of the functions for this advice, after one trial of it."""
    try:
        return _managedmem._register_preset(*advice)
    except CUDAError as error:
        if all(device.concurrent_managed_access for device in Device.all()):
            raise
        raise UnifiedMemoryUnsupportedError(
            f"this system does not support the advice: {error}"
        ) from error


def _make_pool(advice: _Advice, switches: Mapping[str, bool]) -> torch.cuda.MemPool:
    if reasons := unsupported_reasons():
        raise UnifiedMemoryUnsupportedError("; ".join(reasons))
    _refuse_unknown(switches)
    allocate, free = _function_names(advice)
    if allocate not in _allocators:
        made = torch.cuda.memory.CUDAPluggableAllocator(_managedmem.__file__, allocate, free)
        _allocators.setdefault(allocate, made)
    torch.cuda.init()  # a pool needs the caching allocator, which torch makes at its first use
    allocator = _allocators[allocate].allocator()
    if settings := _doubtful_settings():
        return _tried_pool(allocator, switches, ", ".join(settings))
    return torch.cuda.MemPool(allocator, **switches)


def _doubtful_settings() -> list[str]:
    """Settings in the environment with which some versions of torch ignore a pool's allocator.

    torch reads the older variable first, ignores white space, and uses the last value of a key.
    """
    text = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", ""))
    values = dict(re.findall(r"(\w+):(\[[^\]]*\]|[^,]*)", re.sub(r"\s", "", text)))
    names = [
        f"{key}:{values[key]}"
        for key, harmless in (("expandable_segments", "False"), ("backend", "native"))
        if values.get(key, harmless) != harmless
    ]
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        names.append("PYTORCH_NO_CUDA_MEMORY_CACHING")
    return names


def _tried_pool(allocator: Any, switches: Mapping[str, bool], settings: str) -> torch.cuda.MemPool:
    """A pool that gave managed memory in a trial: with these settings not every torch does."""
    try:
        pool = torch.cuda.MemPool(allocator, **switches)
        with torch.cuda.use_mem_pool(pool):
            trial = torch.empty(1, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UnifiedMemoryUnsupportedError(
            f"torch {torch.__version__} allocates nothing from the pool with {settings}: {error}"
        ) from error
    if not ManagedBuffer.from_handle(trial.data_ptr(), trial.nbytes, owner=trial).is_managed:
        raise UnifiedMemoryUnsupportedError(
            f"torch {torch.__version__} ignores the pool's allocator with {settings}"
        )
    return pool
