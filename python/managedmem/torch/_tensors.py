"""One tensor and its memory: its inner tensors, its bytes, and whether they are managed.

Owns the distinct byte ranges of tensors, and the error for a tensor outside managed memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor

import managedmem
from managedmem import Device, ManagedBuffer

Found: TypeAlias = "list[tuple[str, Tensor]]"

# --- wrappers -----------------------------------------------------------------------------


def inner_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors inside a wrapper such as DTensor, or the tensor itself."""
    if is_wrapper(tensor):
        for key in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            inner = getattr(tensor, key)
            if isinstance(inner, Tensor):  # a DTensor names its mesh too
                yield from inner_tensors(f"{name}.{key}", inner)
    else:
        yield name, tensor


def is_wrapper(tensor: Tensor) -> bool:
    """True for a subclass that only holds other tensors."""
    return type(tensor) not in _PLAIN and hasattr(type(tensor), "__tensor_flatten__")


def shard_of(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this process has, or the tensor itself."""
    if type(tensor) in _PLAIN or not is_wrapper(tensor):
        return tensor
    shard = getattr(tensor, "_local_tensor", None)
    return shard if isinstance(shard, Tensor) else tensor


_PLAIN = (Tensor, torch.nn.Parameter)  # skip the slower check

# --- memory -------------------------------------------------------------------------------


class NotManagedError(ValueError):
    """A tensor is neither in managed memory nor in system memory that the operation can move.

    ``tensor`` is the tensor and ``name`` its name, such as "decoder.bias", or "".
    """

    def __init__(self, name: str, tensor: Tensor, page_locked: bool = False) -> None:
        super().__init__(f"{describe(name, tensor)} {_PAGE_LOCKED if page_locked else _ELSEWHERE}")
        self.name = name
        self.tensor = tensor
        self._page_locked = page_locked

    def __reduce__(self) -> tuple[type, tuple[str, Tensor, bool]]:
        return type(self), (self.name, self.tensor, self._page_locked)


_ELSEWHERE = (
    "is not in managed memory: move it there with managedmem.torch.to_managed(), or make it inside "
    "torch.cuda.use_mem_pool(managedmem.torch.managed_mempool())"
)
_PAGE_LOCKED = (
    "is in page-locked memory, which does not migrate: leave the state of an optimizer there while "
    "offload() moves it, and move other tensors with managedmem.torch.to_managed()"
)


def describe(name: str, tensor: Tensor) -> str:
    """The tensor for an error message: name, shape, dtype and device."""
    shape = "unknown" if torch.nn.parameter.is_lazy(tensor) else tuple(tensor.shape)
    details = f"(shape {shape}, {tensor.dtype}, on {tensor.device})"
    return f"{name!r} {details}" if name else f"the tensor {details}"


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor that is not strided memory."""
    if torch.nn.parameter.is_lazy(tensor):
        reason = "has no shape yet: run the module once, so that it makes its parameters"
    elif tensor.is_meta:
        reason = (
            "has no memory: load the weights on the CPU, without device_map, or call "
            "module.to_empty(device=...), then fill it"
        )
    elif tensor.layout is not torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        reason = f"has layout {kind}, not one block of memory: pass its dense parts one by one"
    else:
        return
    raise ValueError(f"{describe(name, tensor)} {reason}")


def extent_of(name: str, tensor: Tensor) -> tuple[int, int] | None:
    """The addresses of the first byte and past the last; None for an empty tensor."""
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
    """The union of the ranges, sorted; adjacent ranges stay apart."""
    result: list[tuple[int, int]] = []
    for start, end in sorted(extents):
        if result and start < result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def ranges_of(tensors: Found) -> list[ManagedBuffer]:
    """The distinct memory of tensors; ValueError for the first that operations cannot act on.

    The buffers keep nothing alive: the caller holds the tensors.
    """
    extents = [extent for name, t in tensors if (extent := extent_of(name, t)) is not None]
    ranges = [ManagedBuffer.from_handle(start, end - start) for start, end in _distinct(extents)]
    if not all(buffer.is_managed for buffer in ranges):
        _check_system_memory(tensors)
    return ranges


def _check_system_memory(tensors: Found) -> None:
    """Raise for the first tensor in neither managed memory nor system memory that migrates."""
    migrates = Device().pageable_memory_access
    for name, tensor in tensors:
        if tensor.numel() == 0 or is_managed(tensor):
            continue
        if not migrates or not tensor.is_cpu or tensor.is_pinned():
            memory = ManagedBuffer.from_handle(tensor.data_ptr(), 1)
            # Apart from managed memory, host and device both reach only page-locked memory.
            locked = memory.is_host_accessible and memory.is_device_accessible
            raise NotManagedError(name, tensor, locked and not migrates)


def split_movable(tensors: Found) -> tuple[Found, list[str]]:
    """The tensors that operations can act on, and the names of the others."""
    movable: Found = []
    others = []
    for name, tensor in tensors:
        if _is_movable(tensor):
            movable.append((name, tensor))
        else:
            others.append(name)
    return movable, others


def _is_movable(tensor: Tensor) -> bool:
    """True for memory that operations act on, and for a strided tensor without an element."""
    if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    if tensor.numel() == 0 or is_managed(tensor):
        return True
    return tensor.is_cpu and Device().pageable_memory_access and not tensor.is_pinned()


def is_managed(tensor: Tensor) -> bool:
    """True if a tensor lies in CUDA managed memory, as managedmem.is_managed() answers.

    False for empty, sparse and meta tensors, which have no memory. A tensor subclass that holds
    other tensors, such as DTensor, is managed if all of those are.

    Raises TypeError for other objects. Safe from every thread. Driver: cuPointerGetAttributes.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"is_managed() takes a tensor, got {tensor!r}")
    if is_wrapper(tensor):
        return all(is_managed(inner) for _, inner in inner_tensors("", tensor))
    if (
        torch.nn.parameter.is_lazy(tensor)
        or tensor.layout is not torch.strided
        or tensor.data_ptr() == 0
    ):
        return False
    return managedmem.is_managed(tensor)
