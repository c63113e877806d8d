"""Prefetch and advice for tensors: finds the tensors in what users have, and the memory under them.

Owns the walk over modules, optimizers and containers, the distinct byte ranges of tensors, and the
words for a tensor that has none to offer. managedmem.torch shows the public part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

import managedmem
from managedmem import Device, ManagedBuffer

if TYPE_CHECKING:
    from managedmem._managedmem import _Advice, _Dispatch, _Location, _Stream

Tensors: TypeAlias = (
    "Tensor | torch.nn.Module | torch.optim.Optimizer | Mapping[Any, Any] | Iterable[Any]"
)
Found: TypeAlias = "list[tuple[str, Tensor]]"
# These are iterable, but do not hold tensors.
NO_CONTAINER = (str, bytes, bytearray, memoryview, ManagedBuffer)

# --- the walk -----------------------------------------------------------------------------


def find_tensors(targets: Tensors, include_buffers: bool = False) -> Found:
    """Every tensor in the targets, with the name that an error message gives it."""
    return list(_walk(targets, "", include_buffers, chosen=True))


def _walk(
    what: Any, name: str, include_buffers: bool, chosen: bool
) -> Iterator[tuple[str, Tensor]]:
    """Tensors below `what`; not `chosen` is what only lies in the same dict, such as a step count.

    What was chosen must be a tensor in managed memory. The rest of a state dict or of an
    optimizer's state may hold anything: there only tensors count, and scalars only if managed.
    """
    if isinstance(what, Tensor):
        if chosen or what.dim() > 0 or is_managed(what):
            yield from inner_tensors(name, what)
    elif isinstance(what, torch.nn.Module):
        yield from _walk_module(what, name, include_buffers)
    elif isinstance(what, torch.optim.Optimizer):
        yield from _walk_optimizer(what, name, include_buffers)
    elif isinstance(what, Mapping):
        for key, value in what.items():
            yield from _walk(value, join_name(name, key), include_buffers, False)
    elif isinstance(what, Iterable) and not isinstance(what, NO_CONTAINER):
        for i, value in enumerate(what):
            yield from _walk(value, f"{name or 'targets'}[{i}]", include_buffers, chosen)
    elif chosen:
        raise TypeError(
            f"{name or 'targets'} must be a tensor, a module, an optimizer, or a mapping, sequence "
            f"or other iterable of them; got {what!r}"
        )


def _walk_module(
    module: torch.nn.Module, name: str, include_buffers: bool
) -> Iterator[tuple[str, Tensor]]:
    for key, parameter in module.named_parameters():
        yield from inner_tensors(join_name(name, key), parameter)
    if include_buffers:
        for key, buffer in module.named_buffers():
            yield from inner_tensors(join_name(name, key), buffer)


def _walk_optimizer(
    optimizer: torch.optim.Optimizer, name: str, include_buffers: bool
) -> Iterator[tuple[str, Tensor]]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    numbers = {id(parameter): i for i, parameter in enumerate(parameters)}
    for key, state in optimizer.state.items():
        label = join_name(name, f"state[{numbers.get(id(key), key)!r}]")
        yield from _walk(state, label, include_buffers, False)


def join_name(name: str, key: object) -> str:
    """The dotted name of what stands under the key, as in a state dict."""
    return f"{name}.{key}" if name else str(key)


def inner_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a wrapper such as DTensor, which has no memory itself; or the tensor."""
    if is_wrapper(tensor):
        for key in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from inner_tensors(f"{name}.{key}", getattr(tensor, key))
    else:
        yield name, tensor


def is_wrapper(tensor: Tensor) -> bool:
    """Whether the tensor is a subclass that only holds other tensors."""
    return type(tensor) not in _PLAIN and hasattr(type(tensor), "__tensor_flatten__")


_PLAIN = (Tensor, torch.nn.Parameter)  # the two that need no closer look, for speed

# --- memory -------------------------------------------------------------------------------


class NotManagedError(ValueError):
    """A tensor is not in managed memory, nor in system memory that its operation can move.

    ``tensor`` is the tensor and ``name`` its name, such as "decoder.bias", or "". The text has both
    and says what moves the tensor there.
    """

    def __init__(self, name: str, tensor: Tensor) -> None:
        super().__init__(
            f"{describe(name, tensor)} is not in managed memory: move it there with "
            "managedmem.torch.to_managed(), or make it inside "
            "torch.cuda.use_mem_pool(managedmem.torch.managed_mempool())"
        )
        self.name = name
        self.tensor = tensor

    def __reduce__(self) -> tuple[type, tuple[str, Tensor]]:
        return type(self), (self.name, self.tensor)


def describe(name: str, tensor: Tensor) -> str:
    """What an error message calls a tensor."""
    shape = "unknown" if torch.nn.parameter.is_lazy(tensor) else tuple(tensor.shape)
    details = f"(shape {shape}, {tensor.dtype}, on {tensor.device})"
    return f"{name!r} {details}" if name else f"the tensor {details}"


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor whose values do not lie in memory with strides."""
    if torch.nn.parameter.is_lazy(tensor):
        reason = "has no shape yet: run the module once, so that it makes its parameters"
    elif tensor.is_meta:
        reason = "has no memory: bring it to life with module.to_empty(device=...), then fill it"
    elif tensor.layout is not torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        reason = f"has layout {kind}, not one block of memory: pass its dense parts one by one"
    else:
        return
    raise ValueError(f"{describe(name, tensor)} {reason}")


def extent_of(name: str, tensor: Tensor) -> tuple[int, int] | None:
    """Address of the first byte and of the one after the last; None for an empty tensor."""
    if tensor.layout is not torch.strided or tensor.is_meta or type(tensor) not in _PLAIN:
        check_dense(name, tensor)
    if tensor.numel() == 0:
        return None
    start = tensor.data_ptr()
    if start == 0:
        raise ValueError(f"{describe(name, tensor)} has no memory")
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _distinct(extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted ranges in which no byte appears twice."""
    result: list[tuple[int, int]] = []
    for start, end in sorted(extents):
        if result and start < result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def ranges_of(found: Found) -> list[ManagedBuffer]:
    """The distinct memory under tensors; ValueError for the first that operations cannot act on.

    The buffers keep nothing alive: the caller holds the tensors while it uses them.
    """
    extents = [extent for name, t in found if (extent := extent_of(name, t)) is not None]
    ranges = [ManagedBuffer.from_handle(start, end - start) for start, end in _distinct(extents)]
    if not all(buffer.is_managed for buffer in ranges):
        _check_system_memory(found)
    return ranges


def _check_system_memory(found: Found) -> None:
    """Raise for the first tensor whose memory is not managed, nor system memory that migrates."""
    migrates = Device().pageable_memory_access
    for name, tensor in found:
        if tensor.numel() == 0 or is_managed(tensor):
            continue
        if not migrates or not tensor.is_cpu or tensor.is_pinned():
            raise NotManagedError(name, tensor)


def is_managed(tensor: Tensor) -> bool:
    """Whether a tensor lies in CUDA managed memory.

    The driver is asked about the tensor's address, so memory of any origin is recognised. False for
    tensors that have no memory of their own: empty, sparse and meta tensors. A tensor subclass that
    holds other tensors, such as DTensor, is managed if all of those are.

    Raises TypeError for what is no tensor. Safe from every thread. Driver: cuPointerGetAttributes.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"is_managed() takes a tensor, got {tensor!r}")
    if is_wrapper(tensor):
        return all(is_managed(inner) for _, inner in inner_tensors("", tensor))
    if (
        torch.nn.parameter.is_lazy(tensor)
        or tensor.layout is not torch.strided
        or tensor.numel() == 0
    ):
        return False
    address = tensor.data_ptr()
    return address != 0 and ManagedBuffer.from_handle(address, 1).is_managed


# --- operations ---------------------------------------------------------------------------


def current_stream(device: torch.device | None = None) -> torch.cuda.Stream | None:
    """torch's current stream, or None where it has no CUDA or the driver is the emulated one."""
    if not torch.cuda.is_available() or managedmem.driver_info()["emulated"]:
        return None
    return torch.cuda.current_stream(device)


def _check_location(location: object) -> None:
    if isinstance(location, list | tuple):
        raise TypeError(f"give one location for all tensors, not {location!r}")


def prefetch(
    tensors: Tensors,
    location: _Location,
    *,
    stream: _Stream | None = None,
    include_buffers: bool = False,
    dispatch: _Dispatch = "auto",
    defer: bool | None = None,
) -> int:
    """Move the memory of tensors to a place before it is used there, in stream order.

    Parameters
    ----------
    tensors : tensor, module, optimizer, mapping, sequence or other iterable of these
        Of a module, its parameters. Of an optimizer, its state. Of a mapping, such as a state dict,
        the tensors in it, at any depth. Elsewhere everything must be a tensor.
    location : Device, Host, or a device object of another library
        Where the pages shall go.
    stream : Stream, object with __cuda_stream__, int, or None
        None is torch's current stream of the current CUDA device.
    include_buffers : bool
        Whether the buffers of modules are moved too.
    dispatch, defer
        As for managedmem.prefetch().

    All is one batch: memory that several tensors share is moved once, and neighbours in one call.
    Of a strided view the extent counts, from its first to its last element. Empty tensors are
    skipped; in mappings and optimizers also what is no tensor, and scalars outside managed memory,
    such as step counts.

    Returns the number of distinct bytes asked for. Raises TypeError for what is no tensor, and
    ValueError, with the parameter's name, for one that is not in managed memory, sparse or meta:
    before anything moves. Otherwise as managedmem.prefetch(). Safe from every thread. Driver:
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
        Needed for set_preferred_location and both accessed_by advices.
    include_buffers : bool
        Whether it goes for the buffers of modules too.

    Advice applies to whole pages: tensors of a memory pool may share theirs with neighbours, those
    of to_managed() do not. It takes effect at once, and over several tensors it is all or nothing.

    Returns the number of distinct bytes under the tensors. Raises as prefetch() does, before
    anything is advised. Safe from every thread. Driver: cuMemAdvise.
    """
    _check_location(location)
    found = find_tensors(tensors, include_buffers)
    ranges = ranges_of(found)
    if ranges:
        managedmem.advise(ranges, advice, location)
    return sum(buffer.size for buffer in ranges)
