"""The memory of what offload() moves: into managed memory at home on the host, and back.

Everything is allocated and copied before the first tensor changes, in both directions.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

import managedmem
from managedmem import Device, ManagedBuffer
from managedmem.torch._moving import _allocate_places, _as_bytes, _Block, _fill, _on, _swap


@dataclass(frozen=True, slots=True)
class Target:
    """A device, and its name in torch: the CPU on the emulated driver, which runs no kernels."""

    device: Device
    place: torch.device

    def stream(self) -> int | None:
        """The handle of torch's current stream there, which takes less time; None on the CPU."""
        if self.place.type != "cuda":
            return None
        handle: int = torch._C._cuda_getCurrentRawStream(self.place.index)
        return handle

    def current(self) -> AbstractContextManager[object]:
        """The device is torch's current one in the block."""
        return torch.cuda.device(self.place) if self.place.type == "cuda" else nullcontext()

    def free(self) -> int:
        """Bytes that are free on the device, with those that torch keeps for later."""
        free = self.device.memory_info.free
        if self.place.type == "cuda":
            free += torch.cuda.memory_reserved(self.place) - torch.cuda.memory_allocated(self.place)
        return free

    def wait(self) -> None:
        """Wait for all work of the device."""
        if self.place.type == "cuda":
            torch.cuda.synchronize(self.place)
        self.device.sync()


@dataclass(slots=True, eq=False)
class Moved:
    """A block in managed memory, and what is needed to put its tensors back."""

    block: _Block
    base: Tensor  # its bytes
    origin: torch.device
    pinned: bool
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # where it was managed before

    def tensors(self) -> Iterator[Tensor]:
        """Its tensors that still lie in it."""
        memory = self.base.untyped_storage().data_ptr()
        for piece in self.block.pieces:
            for tensor in piece.tensors:
                if tensor.untyped_storage().data_ptr() == memory:
                    yield tensor


def move_in(
    blocks: list[_Block], target: Target, by_device: bool
) -> tuple[list[ManagedBuffer], list[Moved]]:
    """Move blocks into one allocation; return its memory, to be streamed, and the way back.

    Blocks that are managed already, on their device and in pages of their own, stay there. With
    by_device, torch copies on the device, and the host does not map the pages
    (docs/develop/dispatch).
    """
    new = [block for block in blocks if not _stays(block, target)]
    ranges: list[ManagedBuffer] = []
    moved: list[Moved] = []
    changes: list[tuple[Tensor, Tensor]] = []
    for block in blocks:
        if block not in new:
            owner = [piece.storage for piece in block.pieces]
            memory = ManagedBuffer.from_handle(block.start, block.end - block.start, owner=owner)
            block.place = memory
            ranges.append(memory)
    if new:
        with target.current():
            arena = _allocate_places(target.place, new)
        # So that neither a copy by the host nor one by the device moves pages.
        managedmem.advise(arena, "set_preferred_location", Device(target.device).nearest_host)
        managedmem.advise(arena, "set_accessed_by", target.device)
        ranges.append(arena)
    for block in new:
        entry = _copied(block, target, by_device)
        moved.append(entry)
        offsets = [(t, t.data_ptr() - block.start) for p in block.pieces for t in p.tensors]
        changes += [(t, _on(entry.base, t, offset)) for t, offset in offsets]
    target.wait()
    _swap(changes)
    for entry in moved:
        for piece in entry.block.pieces:
            piece.storage = entry.base.untyped_storage()  # lets go of the old memory
    return ranges, moved


def _stays(block: _Block, target: Target) -> bool:
    """True for managed memory on the right device that begins a page, as to_managed() makes it."""
    if any(t.device != target.place for piece in block.pieces for t in piece.tensors):
        return False
    memory = ManagedBuffer.from_handle(block.start, block.end - block.start)
    right = target.place.index in (None, memory.device_id)
    return memory.is_managed and right and block.start % mmap.PAGESIZE == 0


def _copied(block: _Block, target: Target, by_device: bool) -> Moved:
    """The contents of a block in its new place."""
    assert block.place is not None
    first = block.pieces[0].tensors[0]
    was_managed = ManagedBuffer.from_handle(block.start, 1).is_managed
    base = _as_bytes(block.place, target.place)
    by_host = first.is_cpu and not by_device
    _fill(_as_bytes(block.place, torch.device("cpu")) if by_host else base, block)
    entry = Moved(block, base, first.device, first.is_cpu and _is_pinned(first))
    if was_managed:
        entry.kept = [(t, t.data) for piece in block.pieces for t in piece.tensors]
    return entry


def _is_pinned(tensor: Tensor) -> bool:
    return torch.cuda.is_available() and tensor.is_pinned()


def move_back(moved: Iterable[Moved]) -> None:
    """Give tensors plain memory on the device where they were, with the present contents."""
    changes: list[tuple[Tensor, Tensor]] = []
    for entry in moved:
        tensors = list(entry.tensors())
        if not tensors:
            continue
        if entry.kept:
            changes += _into_kept(entry, tensors)
            continue
        start = entry.base.data_ptr()
        base = torch.empty(
            entry.base.numel(), dtype=torch.uint8, device=entry.origin, pin_memory=entry.pinned
        )
        base.copy_(_readable(entry))
        changes += [(t, _on(base, t, t.data_ptr() - start)) for t in tensors]
    _swap(changes)


def _readable(entry: Moved) -> Tensor:
    """The bytes where the copy is fast: the host reads what goes to the host."""
    if entry.base.is_cpu or entry.origin.type != "cpu":
        return entry.base
    assert entry.block.place is not None
    return _as_bytes(entry.block.place, torch.device("cpu"))


def _into_kept(entry: Moved, tensors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The tensors with the managed memory they had, filled with the present contents."""
    present = {id(t) for t in tensors}
    changes = [(t, old) for t, old in entry.kept if id(t) in present]
    for tensor, old in changes:
        if old.numel():
            old.copy_(tensor.data)
    return changes
