"""Prefetch and advice for tensors: each call is one batch.

Owns the two public functions and their default stream, torch's current one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import managedmem
from managedmem.torch._targets import Tensors, find_tensors
from managedmem.torch._tensors import ranges_of

if TYPE_CHECKING:
    from managedmem._managedmem import _Advice, _Dispatch, _Location, _Stream


def current_stream(device: torch.device | None = None) -> torch.cuda.Stream | None:
    """torch's current stream, or None where it has no CUDA or the driver is the emulated one."""
    if not torch.cuda.is_available() or managedmem.driver_info()["emulated"]:
        return None
    return torch.cuda.current_stream(device)


def _check_location(location: object) -> None:
    if isinstance(location, list | tuple):
        raise TypeError(f"location must be one location for all tensors, got {location!r}")


def prefetch(
    tensors: Tensors,
    location: _Location,
    *,
    stream: _Stream | None = None,
    include_buffers: bool = False,
    dispatch: _Dispatch = "auto",
    defer: bool | None = None,
) -> int:
    """Move the memory of tensors to a location before it is used there, in stream order.

    Parameters
    ----------
    tensors : tensor, module, optimizer, mapping, sequence or other iterable of these
        The parameters of a module, the state of an optimizer, and the tensors at any depth of a
        mapping, such as a state dict. Anything else must be a tensor.
    location : Device, Host, or a device object of another library
        The destination of the pages.
    stream : Stream, object with __cuda_stream__, int, or None
        None is torch's current stream on the current CUDA device.
    include_buffers : bool
        True moves the buffers of modules too.
    dispatch, defer
        As for managedmem.prefetch().

    The call is one batch: memory that tensors share moves once, and adjacent tensors move in one
    driver call. A strided view moves from its first to its last element. Skips empty tensors, and
    in mappings and optimizers also other objects and scalars outside managed memory, such as step
    counts.

    Returns the number of distinct bytes. Before anything moves, raises TypeError for other objects,
    and ValueError, with the parameter's name, for a tensor that is sparse, meta or not in managed
    memory. Otherwise raises as managedmem.prefetch() does. Safe from every thread. Driver:
    cuMemPrefetchAsync, cuMemPrefetchBatchAsync.
    """
    _check_location(location)
    found = find_tensors(tensors, include_buffers)  # holds the tensors during the call
    ranges = ranges_of(found)
    if ranges:
        stream = current_stream() if stream is None else stream
        managedmem.prefetch(ranges, location, stream=stream, dispatch=dispatch, defer=defer)
    return sum(buffer.size for buffer in ranges)


def advise(
    tensors: Tensors,
    advice: _Advice,
    location: _Location | None = None,
    *,
    include_buffers: bool = False,
) -> int:
    """Tell the driver how the memory of tensors will be used.

    Parameters
    ----------
    tensors : tensor, module, optimizer, mapping, sequence or other iterable of these
        As for prefetch().
    advice : str
        As for managedmem.advise(): "set_read_mostly", "set_preferred_location", "set_accessed_by",
        or one of them with "unset_".
    location : Device, Host, or a device object of another library
        Required for set_preferred_location and both accessed_by advices.
    include_buffers : bool
        True advises the buffers of modules too.

    Advice applies to whole pages: tensors of a memory pool may share pages, those of to_managed()
    do not. It takes effect at once, and is all or nothing.

    Returns the number of distinct bytes under the tensors. Raises as prefetch() does, before
    anything is advised. Safe from every thread. Driver: cuMemAdvise.
    """
    _check_location(location)
    found = find_tensors(tensors, include_buffers)
    ranges = ranges_of(found)
    if ranges:
        managedmem.advise(ranges, advice, location)
    return sum(buffer.size for buffer in ranges)
