"""torch memory pools over managed memory; public as part of ``managedmem.torch``.

The functions that torch's caching allocator calls are exported by this package's extension, one
for each combination of advice, so nothing is compiled at run time.
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
"""By the name of the function that allocates; kept for the life of the process, because blocks of
a pool may be freed long after the pool itself has gone."""


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
        Where the pages of each block prefer to be.
    accessed_by : iterable of Device and Host()
        What keeps a mapping of the pages wherever they are.
    read_mostly : bool
        Whether readers get copies of their own.

    The advice is given to each block that torch's caching allocator asks for, once, and holds for
    all tensors that are cut from it. Use the pool with ``torch.cuda.use_mem_pool(pool)``; tensors
    may outlive it. A pool belongs to the device that is torch's current one when it is made.

    Raises UnifiedMemoryUnsupportedError where torch cannot have managed memory, with the reasons;
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
        yield "the emulated driver is in use, whose memory no GPU can reach"
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
    """The functions for this advice, which the driver has been asked to give once by now."""
    try:
        return _managedmem._register_preset(
            preferred_location, accessed_by, read_mostly, own_device
        )
    except CUDAError as error:
        if all(device.concurrent_managed_access for device in Device.all()):
            raise
        raise UnifiedMemoryUnsupportedError(
            f"this system cannot do what was asked to be advised: {error}"
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
    torch.cuda.init()  # a pool needs the caching allocator, which torch sets up at the first use
    allocator = _allocators[allocate].allocator()
    if settings := _doubtful_settings():
        return _tried_pool(allocator, ", ".join(settings))
    return torch.cuda.MemPool(allocator)


def _doubtful_settings() -> list[str]:
    """Settings from the environment with which some versions of torch pass over a pool's allocator.

    torch reads the older variable first, ignores white space, and lets the last value of a key win.
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
    """A pool that was seen to give managed memory: with these settings not every torch has one."""
    try:
        pool = torch.cuda.MemPool(allocator)
        with torch.cuda.use_mem_pool(pool):
            trial = torch.empty(1, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UnifiedMemoryUnsupportedError(
            f"torch {torch.__version__} takes no memory from the pool with {settings}: {error}"
        ) from error
    if not ManagedBuffer.from_handle(trial.data_ptr(), trial.nbytes, owner=trial).is_managed:
        raise UnifiedMemoryUnsupportedError(
            f"torch {torch.__version__} passes over the pool's allocator with {settings}"
        )
    return pool
