"""to_managed: moves the tensors of a module or optimizer into managed memory, in place.

Everything is checked, allocated and copied before the first tensor changes. Tensors that share
bytes form a block and keep their layout in it; the blocks of a device lie in one allocation.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

import managedmem
from managedmem import Device, ManagedBuffer, ManagedMemoryResource
from managedmem._units import NAME_BYTES
from managedmem.torch._targets import find_tensors, join_name
from managedmem.torch._tensors import Found, check_dense, describe, extent_of, is_wrapper

_Movable = TypeVar("_Movable", bound="torch.nn.Module | torch.optim.Optimizer | Tensor")
# The alignment of torch's own allocators; a block that starts inside a storage keeps it.
_ALIGNMENT = 512
_SKEW = 16  # a block keeps its start modulo this: 0, except in memory that torch did not allocate


@dataclass(slots=True)
class _Piece:
    """The part of one storage that tensors of the module reach."""

    device: torch.device  # its future device in torch
    storage: torch.UntypedStorage
    start: int
    end: int
    tensors: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of the tensors that have one

    def keep(self, wanted: set[int]) -> None:
        """Keep only the tensors with these ids. Each tensor must have a name."""
        pairs = zip(self.tensors, self.names, strict=True)
        kept = [(t, name) for t, name in pairs if id(t) in wanted]
        self.tensors, self.names = [t for t, _ in kept], [name for _, name in kept]


@dataclass(slots=True)
class _Block:
    """Pieces that overlap, and so keep their relative offsets."""

    device: torch.device
    start: int
    end: int
    pieces: list[_Piece] = field(default_factory=list)
    place: ManagedBuffer | None = None  # its future memory


def to_managed(
    module: _Movable, *, device: Device | torch.device | str | int | None = None
) -> _Movable:
    """Move the tensors of a module or optimizer into managed memory, in place.

    Parameters
    ----------
    module : torch.nn.Module, torch.optim.Optimizer or torch.Tensor
        A module's parameters and buffers move, or an optimizer's state tensors except scalars.
    device : torch.device, Device, str or int, optional
        The device of the tensors for torch: the CPU or a CUDA device. None keeps each tensor's own.
        If the device changes, gradients move too.

    Only the memory of the Parameter and tensor objects changes, so optimizers, hooks and tied
    weights keep working. dtype, shape, strides, requires_grad, values and sharing are kept. A CPU
    tensor in managed memory is an ordinary CPU tensor for torch, and every GPU can use its address.

    Each device gets one allocation, in which each storage starts on a page of its own. It is freed
    with its last tensor. Traces show the pages of each storage by the qualified names of its
    tensors. Memory that is already managed stays if its device is the right one. All or nothing:
    after an error the module is unchanged.

    Call it before DistributedDataParallel, torch.compile or a graph capture sees the module: they
    keep addresses. FullyShardedDataParallel copies parameters to memory of its own; build the model
    inside managed_mempool() for it.

    Returns its argument. Raises TypeError for other objects and for tensor subclasses that hold
    other tensors, ValueError with the parameter's name for a sparse, meta, quantized or lazily
    conjugated tensor, CUDAOutOfMemoryError when memory runs out. No other thread may use the module
    during the call. Driver: cuMemAllocManaged.
    """
    target = None if device is None else _target_device(device)
    movable = _find_movable(module, target)
    with torch.inference_mode(False), torch.no_grad():
        blocks = [block for block in _blocks(movable, target) if _must_change(block)]
        _find_places(blocks)
        _swap([*_changes(blocks), *_empty_changes(movable, target)])
    return module


# --- what moves ---------------------------------------------------------------------------


def _torch_device(device: Device | torch.device | str | int) -> torch.device:
    """The device that an argument names, even if torch lacks it."""
    if isinstance(device, Device):
        return torch.device("cuda", device.device_id)
    try:
        return torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be the CPU or a CUDA device, got {device!r}") from None
    except TypeError:
        raise TypeError(
            f"device must be a torch.device, a Device, a str or an int, got {device!r}"
        ) from None


def _target_device(device: Device | torch.device | str | int) -> torch.device:
    target = _torch_device(device)
    if target.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be the CPU or a CUDA device, got {target}")
    if target.type == "cpu":
        return torch.device("cpu")  # without a number, as tensors name it
    if not torch.cuda.is_available():
        raise ValueError(
            f"device is {target}, but this torch has no CUDA device: leave device out, which keeps "
            "the CPU"
        )
    if managedmem._managedmem._driver_info()["emulated"]:
        raise ValueError(f"device is {target}, but the emulated driver has only host memory")
    if target.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if target.index >= torch.cuda.device_count():
        raise ValueError(
            f"device is {target}, but torch has {torch.cuda.device_count()} CUDA device(s)"
        )
    return target


def _find_movable(module: object, target: torch.device | None) -> Found:
    """The tensors that move, checked, each once."""
    tensors: Found
    if isinstance(module, torch.nn.Module):
        tensors = [*module.named_parameters(), *module.named_buffers()]
    elif isinstance(module, torch.optim.Optimizer):
        tensors = [(name, t) for name, t in find_tensors(module) if t.dim() > 0]
    elif isinstance(module, Tensor):
        tensors = [("", module)]
    else:
        kind = type(module).__name__
        raise TypeError(f"to_managed() takes a module, an optimizer or a tensor, got {kind}")
    tensors += [entry for name, t in tensors for entry in _gradient(name, t, target)]
    unique: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in tensors:
        _check_movable(name, tensor)
        unique.setdefault(id(tensor), (name, tensor))
    return list(unique.values())


def _gradient(
    name: str, tensor: Tensor, target: torch.device | None
) -> Iterator[tuple[str, Tensor]]:
    """The gradient, if its tensor moves to another device."""
    if target in (None, tensor.device) or not tensor.is_leaf or tensor.grad is None:
        return
    yield join_name(name, "grad"), tensor.grad


def _check_movable(name: str, tensor: Tensor) -> None:
    if is_wrapper(tensor):
        raise TypeError(
            f"{describe(name, tensor)} is a {type(tensor).__name__}, which only holds other "
            "tensors: pass the module before it is wrapped, sharded or quantized"
        )
    check_dense(name, tensor)
    if tensor.is_quantized:
        raise ValueError(f"{describe(name, tensor)} is quantized, and its scales would be lost")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"{describe(name, tensor)} is a lazy conjugate or negative: make it plain with "
            "resolve_conj().resolve_neg() first"
        )


def _blocks(tensors: Found, target: torch.device | None) -> list[_Block]:
    """The memory of the tensors, in order of address."""
    pieces: dict[tuple[torch.device, int], _Piece] = {}
    for name, tensor in tensors:
        extent = extent_of(name, tensor)
        if extent is None:
            continue
        storage = tensor.untyped_storage()
        base = storage.data_ptr()
        start = base + (extent[0] - base) // _ALIGNMENT * _ALIGNMENT
        new = _Piece(target or tensor.device, storage, start, extent[1])
        piece = pieces.setdefault((tensor.device, base), new)
        if storage.nbytes() > piece.storage.nbytes():  # the largest at one address
            piece.storage = storage
        piece.start = min(piece.start, start)
        piece.end = max(piece.end, extent[1])
        piece.tensors.append(tensor)
        piece.names += [name] if name else []
    blocks: list[_Block] = []
    for piece in sorted(map(_rounded, pieces.values()), key=lambda piece: piece.start):
        if not blocks or piece.start >= blocks[-1].end:
            blocks.append(_Block(piece.device, piece.start, piece.end))
        blocks[-1].end = max(blocks[-1].end, piece.end)
        blocks[-1].pieces.append(piece)
    return blocks


def _rounded(piece: _Piece) -> _Piece:
    """Extend the piece to its whole storage if it is at least half of that.

    cuDNN expects all weights of a recurrent network in one storage, padding included.
    """
    whole = piece.storage.nbytes()
    if 2 * (piece.end - piece.start) >= whole:
        piece.start = piece.storage.data_ptr()
        piece.end = piece.start + whole
    return piece


def _must_change(block: _Block) -> bool:
    """True if the block is not in managed memory, or one of its tensors changes its device."""
    memory = ManagedBuffer.from_handle(block.start, block.end - block.start)
    moves = any(tensor.device != piece.device for piece in block.pieces for tensor in piece.tensors)
    return moves or not memory.is_managed


# --- the new memory -----------------------------------------------------------------------


def _find_places(blocks: list[_Block]) -> None:
    """Place every block: in its own memory if possible, else in a new allocation."""
    homeless: dict[torch.device, list[_Block]] = {}
    for block in blocks:
        owner = [piece.storage for piece in block.pieces]
        size = block.end - block.start
        memory = ManagedBuffer.from_handle(block.start, size, owner=owner, name=_name_of(block))
        # For torch, managed memory belongs to the device that was current at its allocation.
        if memory.is_managed and block.device.index in (None, memory.device_id):
            block.place = memory
        else:
            homeless.setdefault(block.device, []).append(block)
    for device, group in homeless.items():
        _allocate_places(device, group)


def _allocate_places(device: torch.device, blocks: list[_Block]) -> ManagedBuffer:
    """Make one allocation, in which each block starts on a page of its own, and return it."""
    current: AbstractContextManager[object]
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with current:
        arena = ManagedMemoryResource().allocate(sum(map(_pages_of, blocks)))
    _place_in(arena, blocks)
    return arena


def _pages_of(block: _Block) -> int:
    """The bytes of the pages that the block will take."""
    used = block.start % _SKEW + block.end - block.start
    return -(-used // mmap.PAGESIZE) * mmap.PAGESIZE


def _place_in(arena: ManagedBuffer, blocks: list[_Block]) -> None:
    """Give each block pages of its own in the memory."""
    address = arena.handle
    for block in blocks:
        size = _pages_of(block)
        pages = ManagedBuffer.from_handle(address, size, owner=arena, name=_name_of(block))
        skew = block.start % _SKEW
        block.place = pages[skew : skew + block.end - block.start]
        address += size


def _name_of(block: _Block) -> str | None:
    """The names of the tensors in a block, as the name of its memory."""
    names = [name for piece in block.pieces for name in piece.names]
    text = ", ".join(names)
    if len(names) > 1 and len(text.encode(errors="replace")) > NAME_BYTES:
        text = f"{names[0]} and {len(names) - 1} more"
    encoded = text.replace("\0", "?").encode(errors="replace")
    if len(encoded) > NAME_BYTES:  # the end of a name says more than its start
        encoded = b"..." + encoded[3 - NAME_BYTES :]
    return encoded.decode(errors="ignore") or None


def _as_bytes(place: ManagedBuffer, device: torch.device) -> Tensor:
    """A tensor of bytes over the memory, which it keeps alive; never a copy."""
    if device.type == "cpu":
        # The view is an export, so close() cannot free the memory under the tensor.
        base = torch.frombuffer(memoryview(place), dtype=torch.uint8)
    else:
        base = torch.as_tensor(place, device=device)
    if base.data_ptr() != place.handle or base.device != device:
        raise RuntimeError(
            f"torch did not use the managed memory at {place.handle:#x} on {device}: its tensor is "
            f"at {base.data_ptr():#x} on {base.device}"
        )
    return base


def _fill(base: Tensor, block: _Block) -> None:
    """Copy the contents of a block to its new place."""
    for new, old in _copies_of(base, block):
        new.copy_(old)


def _copies_of(base: Tensor, block: _Block) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the bytes of each piece as two tensors: at the new place, and at the old one."""
    for piece in block.pieces:
        old = torch.empty(0, dtype=torch.uint8, device=piece.storage.device)
        size = piece.end - piece.start
        old.set_(piece.storage, piece.start - piece.storage.data_ptr(), (size,), (1,))
        yield base[piece.start - block.start :][:size], old


def _wait_for(block: _Block) -> None:
    """Wait for the old devices of a block, because nothing else orders old work before new work."""
    for device in {tensor.device for piece in block.pieces for tensor in piece.tensors}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


# --- the change ---------------------------------------------------------------------------


def _changes(blocks: list[_Block]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor with its replacement at the block's place."""
    for block in blocks:
        assert block.place is not None
        base = _as_bytes(block.place, block.device)
        if block.place.handle == block.start:
            _wait_for(block)
        else:
            _fill(base, block)
        for piece in block.pieces:
            for tensor in piece.tensors:
                yield tensor, _on(base, tensor, tensor.data_ptr() - block.start)


def _on(base: Tensor, tensor: Tensor, offset: int) -> Tensor:
    """A tensor of the same dtype, shape and strides over other memory."""
    if offset % tensor.element_size():
        raise ValueError(
            f"{describe('', tensor)} overlaps another tensor at a distance of {offset} bytes, "
            "which is not a multiple of its element size"
        )
    first = offset // tensor.element_size()
    # An assignment to `data` needs two inference tensors, or two ordinary ones.
    with torch.inference_mode(tensor.is_inference()):
        new = torch.empty(0, dtype=tensor.dtype, device=base.device)
        return new.set_(base.untyped_storage(), first, tensor.shape, tensor.stride())


def _empty_changes(tensors: Found, target: torch.device | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor without elements that changes its device, with its replacement."""
    for _, tensor in tensors:
        if tensor.numel() == 0 and target not in (None, tensor.device):
            new = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=target
            )
            yield tensor, new


def _swap(changes: list[tuple[Tensor, Tensor]]) -> None:
    """Give all tensors their new memory, or none."""
    before = [tensor.data for tensor, _ in changes]
    try:
        for tensor, new in changes:
            tensor.data = new
    except BaseException:
        for (tensor, _), old in zip(changes, before, strict=True):
            tensor.data = old
        raise
