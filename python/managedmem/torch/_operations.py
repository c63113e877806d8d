"""Prefetch and advice for tensors: each call is one batch.

Owns the two public functions, their result, and their default stream, torch's current one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

import managedmem
from managedmem import ManagedBuffer
from managedmem.torch._targets import Tensors, find_tensors
from managedmem.torch._tensors import Found, extent_of, ranges_of, split_movable

if TYPE_CHECKING:
    from managedmem._managedmem import _Advice, _Dispatch, _Location, _Stream, _Unsupported


class HintedBytes(int):
    """The number of bytes that took a hint, and the names of the tensors that were passed over.

    An int. ``names`` is a tuple with the qualified name of each tensor that was passed over because
    of unsupported="skip", such as "decoder.bias", and ``skipped`` their number.
    """

    names: tuple[str, ...]

    def __new__(cls, nbytes: int, names: tuple[str, ...] = ()) -> HintedBytes:
        self = super().__new__(cls, nbytes)
        self.names = names
        return self

    @property
    def skipped(self) -> int:
        """How many tensors were passed over."""
        return len(self.names)


def current_stream(device: torch.device | None = None) -> torch.cuda.Stream | None:
    """torch's current stream, or None where it has no CUDA or the driver is the emulated one."""
    if not torch.cuda.is_available() or managedmem._managedmem._driver_info()["emulated"]:
        return None
    return torch.cuda.current_stream(device)


def _check_location(location: object) -> None:
    # Ranges are sorted and merged, so locations could not be matched to tensors. A weak proxy of a
    # device counts as iterable.
    if isinstance(location, Iterable) and not isinstance(location, (str, *weakref.ProxyTypes)):
        raise TypeError(f"location must be one location for all tensors, got {location!r}")


def _check_unsupported(value: object) -> bool:
    """True for "skip", False for "raise"."""
    if value not in ("raise", "skip"):
        raise ValueError(f'unsupported must be "raise" or "skip", got {value!r}')
    return value == "skip"


def _hint(tensors: Found, call: Callable[[list[ManagedBuffer]], object]) -> HintedBytes:
    """Act on all tensors as one batch."""
    ranges = ranges_of(tensors)
    call(ranges)  # checks the arguments even where there is nothing to do
    return HintedBytes(sum(buffer.size for buffer in ranges))


def _hint_or_skip(tensors: Found, call: Callable[[list[ManagedBuffer]], int | None]) -> HintedBytes:
    """Act on the tensors that can take the hint; `call` counts the ranges that it passes over."""
    movable, _ = split_movable(tensors)
    ranges = ranges_of(movable)
    count = call(ranges)
    refused: list[ManagedBuffer] = []
    if count:
        # Giving a hint twice does no harm, and tells the ranges apart.
        refused = ranges if count == len(ranges) else [each for each in ranges if call([each])]
    taken = {id(tensor) for _, tensor in movable if not _lies_in(tensor, refused)}
    return HintedBytes(
        sum(buffer.size for buffer in ranges) - sum(buffer.size for buffer in refused),
        tuple(name for name, tensor in tensors if id(tensor) not in taken),
    )


def _lies_in(tensor: torch.Tensor, ranges: list[ManagedBuffer]) -> bool:
    extent = extent_of("", tensor) if ranges else None
    return extent is not None and any(
        each.handle <= extent[0] < each.handle + each.size for each in ranges
    )


def prefetch(
    tensors: Tensors,
    location: _Location,
    *,
    stream: _Stream | None = None,
    include_buffers: bool = False,
    dispatch: _Dispatch = "auto",
    defer: bool | None = None,
    unsupported: _Unsupported = "raise",
) -> HintedBytes:
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
    unsupported : "raise" or "skip"
        "skip" passes over tensors that are not in managed memory, also sparse and meta ones, and
        those that managedmem.prefetch() passes over. The others move.

    The call is one batch: memory that tensors share moves once, and adjacent tensors move in one
    driver call. A strided view moves from its first to its last element. Skips empty tensors, and
    in mappings and optimizers also other objects and scalars outside managed memory, such as step
    counts.

    Returns the number of distinct bytes that it acted on, with the names of the tensors that it
    passed over. Before anything moves, raises TypeError for other objects, and ValueError, with the
    parameter's name, for a tensor that is sparse, meta or not in managed memory. Otherwise raises
    as managedmem.prefetch() does. Safe from every thread. Driver: cuMemPrefetchAsync,
    cuMemPrefetchBatchAsync.
    """
    _check_location(location)
    skips = _check_unsupported(unsupported)
    named = find_tensors(tensors, include_buffers)  # holds the tensors during the call

    def call(ranges: list[ManagedBuffer]) -> int | None:
        return managedmem.prefetch(
            ranges,
            location,
            stream=current_stream() if stream is None else stream,
            dispatch=dispatch,
            defer=defer,
            unsupported=unsupported,
        )

    return _hint_or_skip(named, call) if skips else _hint(named, call)


def advise(
    tensors: Tensors,
    advice: _Advice,
    location: _Location | None = None,
    *,
    include_buffers: bool = False,
    unsupported: _Unsupported = "raise",
) -> HintedBytes:
    """Tell the driver how the memory of tensors will be used.

    Parameters
    ----------
    tensors : tensor, module, optimizer, mapping, sequence or other iterable of these
        As for prefetch().
    advice : str
        As for managedmem.advise(): "set_read_mostly", "set_preferred_location", "set_accessed_by",
        or one of them with "unset_".
    location : Device, Host, or a device object of another library
        Required for set_preferred_location and accessed_by advice.
    include_buffers : bool
        True advises the buffers of modules too.
    unsupported : "raise" or "skip"
        "skip" passes over tensors that are not in managed memory, also sparse and meta ones, and
        those that managedmem.advise() passes over. The others are advised.

    Advice applies to whole pages: tensors of a memory pool may share pages, those of to_managed()
    do not. It takes effect at once, and is all or nothing.

    Returns the number of distinct bytes under the advised tensors, with the names of the tensors
    that it passed over. Raises as prefetch() does, before anything is advised. Safe from every
    thread. Driver: cuMemAdvise.
    """
    _check_location(location)
    skips = _check_unsupported(unsupported)
    named = find_tensors(tensors, include_buffers)

    def call(ranges: list[ManagedBuffer]) -> int | None:
        return managedmem.advise(ranges, advice, location, unsupported=unsupported)

    return _hint_or_skip(named, call) if skips else _hint(named, call)
