"""torch memory pools over managed memory.

The extension exports the functions that torch's caching allocator calls, one pair for each
combination of advice, so nothing is compiled at run time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

import managedmem
from managedmem import CUDAError, Device, Host, ManagedBuffer, _managedmem

_allocators: dict[str, torch.cuda.memory.CUDAPluggableAllocator] = {}
"""By the name of the allocating function. Never removed: blocks of a pool may be freed after it."""


class UnifiedMemoryUnsupportedError(Exception):
    """torch cannot have managed memory here; the text says why."""


def managed_mempool(
    *,
    preferred_location: Device | Host | None = None,
    accessed_by: Iterable[Device | Host] = (),
    read_mostly: bool = False,
) -> torch.cuda.MemPool:
    """Make a ``torch.cuda.MemPool`` whose tensors lie in managed memory.

    Parameters
    ----------
    preferred_location : Device or Host, optional
        The preferred location of the pages.
    accessed_by : iterable of Device and Host()
        Processors that keep a mapping of the pages.
    read_mostly : bool
        True gives each reader a copy of its own.

    Each block that torch's caching allocator requests is advised once, for all tensors cut from it.
    Use the pool with ``torch.cuda.use_mem_pool(pool)``; tensors may outlive it. A pool belongs to
    torch's current device at its creation.

    Raises UnifiedMemoryUnsupportedError, with the reasons, where torch cannot have managed memory;
    TypeError and ValueError for bad arguments; CUDAError for advice that the driver refuses;
    RuntimeError when 32 different combinations of advice are in use. Safe from every thread.
    Driver: cuMemAllocManaged and cuMemAdvise for each block, cuMemFree.
    """
    return _make_pool(preferred_location, accessed_by, read_mostly, own_device=False)


def own_device_mempool() -> torch.cuda.MemPool:
    """Make a pool whose blocks prefer, and are accessed by, the device they are allocated for."""
    return _make_pool(None, (), False, own_device=True)


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
        info = managedmem.driver_info()
    except (managedmem.DriverNotFoundError, managedmem.DriverTooOldError) as error:
        yield str(error)
        return
    if info["emulated"]:
        yield "the emulated driver is in use, and no GPU can reach its memory"
        return
    for device in Device.all():
        if not device.managed_memory:
            yield f"{device} has no managed memory"


def _function_names(
    preferred_location: Device | Host | None,
    accessed_by: Iterable[Device | Host],
    read_mostly: bool,
    own_device: bool,
) -> tuple[str, str]:
    """The names of the functions for this advice, after one trial of it."""
    try:
        return _managedmem._register_preset(
            preferred_location, accessed_by, read_mostly, own_device
        )
    except CUDAError as error:
        if all(device.concurrent_managed_access for device in Device.all()):
            raise
        raise UnifiedMemoryUnsupportedError(
            f"this system does not support the advice: {error}"
        ) from error


def _make_pool(
    preferred_location: Device | Host | None,
    accessed_by: Iterable[Device | Host],
    read_mostly: bool,
    own_device: bool,
) -> torch.cuda.MemPool:
    if reasons := unsupported_reasons():
        raise UnifiedMemoryUnsupportedError("; ".join(reasons))
    allocate, free = _function_names(preferred_location, accessed_by, read_mostly, own_device)
    if allocate not in _allocators:
        made = torch.cuda.memory.CUDAPluggableAllocator(_managedmem.__file__, allocate, free)
        _allocators.setdefault(allocate, made)
    torch.cuda.init()  # a pool needs the caching allocator, which torch makes at its first use
    allocator = _allocators[allocate].allocator()
    if settings := _doubtful_settings():
        return _tried_pool(allocator, ", ".join(settings))
    return torch.cuda.MemPool(allocator)


def _doubtful_settings() -> list[str]:
    """Settings in the environment with which some versions of torch ignore a pool's allocator.

    torch reads the older variable first, ignores white space, and uses the last value of a key.
    """
    text = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", ""))
    values = dict(re.findall(r"(\w+):(\[[^\]]*\]|[^,]*)", re.sub(r"\s", "", text)))
    found = [
        f"{key}:{values[key]}"
        for key, harmless in (("expandable_segments", "False"), ("backend", "native"))
        if values.get(key, harmless) != harmless
    ]
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        found.append("PYTORCH_NO_CUDA_MEMORY_CACHING")
    return found


def _tried_pool(allocator: Any, settings: str) -> torch.cuda.MemPool:
    """A pool that gave managed memory in a trial: with these settings not every torch does."""
    try:
        pool = torch.cuda.MemPool(allocator)
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
