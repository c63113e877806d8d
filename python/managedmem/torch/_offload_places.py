"""Moves the memory of tensors for offload(): to the device, or home on the host, and back.

Everything is allocated and copied before the first tensor changes, in both directions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import cycle

import torch
from torch import Tensor

from managedmem import CUDAError, Device, ManagedBuffer
from managedmem._managedmem import _Slab
from managedmem.torch._moving import _SKEW, _Block, _copies_of, _fill, _on, _swap
from managedmem.torch._offload_frames import Span

ALIGNMENT = 512  # of the starts of blocks, as torch's own allocators have it
_COMPARED = 16 << 20  # bytes that are compared at once
_STAGED = 16 << 20  # bytes of each half of the page-locked memory for _stage()


@dataclass(frozen=True, slots=True)
class Target:
    """A device, and its name in torch: the CPU on the emulated driver, which runs no kernels."""

    device: Device
    place: torch.device

    def stream(self) -> int | None:
        """The handle of torch's current stream, without a slow Stream object; None on the CPU."""
        if self.place.type != "cuda":
            return None
        handle: int = torch._C._cuda_getCurrentRawStream(self.place.index)
        return handle

    def current(self) -> AbstractContextManager[object]:
        """Make the device torch's current device in the block."""
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


def size_of(block: _Block) -> int:
    """The bytes that a block takes among others."""
    return -(-(_skew_of(block) + block.end - block.start) // ALIGNMENT) * ALIGNMENT


def _skew_of(block: _Block) -> int:
    return block.start % _SKEW


@dataclass(slots=True, eq=False)
class Moved:
    """A block in its new memory, with the data to put its tensors back."""

    block: _Block
    base: Tensor  # its bytes, in a storage of their own
    origin: torch.device
    pinned: bool
    # Each tensor with its earlier memory, if that was managed, or memory of load_file().
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    shared: _Slab | None = None  # its memory from before, if other processes have that too
    slab: _Slab | None = None  # its new memory, if that is on the device

    def is_pageable(self) -> bool:
        """True for a block that was in pageable memory of the host."""
        return self.origin.type == "cpu" and not self.pinned and not self.kept

    def tensors(self) -> Iterator[Tensor]:
        """Its tensors that still lie in it."""
        memory = self.base.untyped_storage()._cdata
        for piece in self.block.pieces:
            for tensor in piece.tensors:
                if tensor.untyped_storage()._cdata == memory:
                    yield tensor


@dataclass(slots=True)
class Memory:
    """One slab for consecutive blocks."""

    slab: _Slab
    target: Target
    used: int = 0

    def span(self, block: _Block) -> Span:
        """The place of the next block."""
        start = self.used + _skew_of(block)
        self.used += size_of(block)
        return Span(self.slab, start, block.end - block.start)


def host_memory(target: Target, sizes: list[int]) -> tuple[_Slab, list[int]]:
    """Page-locked memory of zeros for pieces of these sizes, and their offsets."""
    offsets: list[int] = []
    used = 0
    for size in sizes:
        offsets.append(used)
        used += -(-size // ALIGNMENT) * ALIGNMENT
    slab = _Slab(target.device.device_id, used, True)
    # Locking pages that were never touched takes longer.
    Span(slab, 0, used).tensor(torch.device("cpu")).zero_()
    slab.lock()
    return slab, offsets


def move_to_device(blocks: list[_Block], target: Target, suspendable: bool) -> list[Moved]:
    """Move blocks to the device unless they are there; return the data to move them back.

    With `suspendable`, blocks that are there move too, into memory that can be suspended.
    """
    away = [block for block in blocks if suspendable or not _is_there(block, target)]
    if not away:
        return []
    nbytes = sum(map(size_of, away))
    memory = Memory(_Slab(target.device.device_id, nbytes, False, suspendable), target)
    moved = [_moved(block, memory.span(block).tensor(target.place)) for block in away]
    pageable, rest = [entry for entry in moved if entry.is_pageable()], moved
    if sum(e.base.numel() for e in pageable) >= 4 * _STAGED and _stage(pageable, target):
        rest = [entry for entry in moved if not entry.is_pageable()]
    for entry in rest:
        _fill(entry.base, entry.block)
    _change(moved, target)
    for entry in moved:
        entry.slab = memory.slab
    return moved


def _stage(moved: list[Moved], target: Target) -> bool:
    """Fill blocks on the device from pageable memory, through page-locked memory.

    The driver takes longer to copy from pageable memory by itself. False if it locks no memory.
    """
    try:
        slab, offsets = host_memory(target, [_STAGED, _STAGED])
    except (CUDAError, MemoryError):
        return False
    halves = cycle(Span(slab, start, _STAGED).tensor(torch.device("cpu")) for start in offsets)
    for entry in moved:
        for new, old in _copies_of(entry.base, entry.block):
            for to, chunk in zip(new.split(_STAGED), old.split(_STAGED), strict=True):
                half = next(halves)[: chunk.numel()].copy_(chunk)
                target.wait()  # until the other half has been copied
                to.copy_(half, non_blocking=True)
    target.wait()
    return True


def home_of(blocks: list[_Block]) -> tuple[_Slab, int] | None:
    """The memory of load_file() in which blocks lie together, and their offset there; or None.

    Such memory is page-locked for all devices.
    """
    start, end = min(block.start for block in blocks), max(block.end for block in blocks)
    if start % ALIGNMENT or end - start > sum(map(size_of, blocks)):
        return None
    slab = _slab_of(blocks[0], end - start)
    if slab is None or not all(map(_is_on_host, blocks)):
        return None
    return slab, start - slab.handle


def is_home(tensor: Tensor) -> bool:
    """True for a tensor in memory of load_file()."""
    return tensor.is_cpu and tensor.nbytes > 0 and _Slab.at(tensor.data_ptr(), 1) is not None


def is_shared(block: _Block) -> bool:
    """True for a block in memory that other processes have too."""
    slab = _slab_of(block, block.end - block.start)
    return slab is not None and slab.is_shared


def _slab_of(block: _Block, nbytes: int) -> _Slab | None:
    return _Slab.at(block.start, nbytes) if _is_on_host(block) else None


def _is_on_host(block: _Block) -> bool:
    return all(t.is_cpu for piece in block.pieces for t in piece.tensors)


def stay_home(blocks: list[_Block], slab: _Slab, target: Target) -> list[Moved]:
    """Let the device use blocks where they lie."""
    if target.device.device_id != slab.device_id:
        slab.add_reader(target.device.device_id)
    moved = []
    for block in blocks:
        span = Span(slab, block.start - slab.handle, block.end - block.start)
        moved.append(_moved(block, span.tensor(target.place)))
    _change(moved, target)
    return moved


def move_home(blocks: list[_Block], target: Target) -> tuple[_Slab, list[Moved]]:
    """Move blocks into consecutive page-locked memory of the host."""
    memory = Memory(_Slab(target.device.device_id, sum(map(size_of, blocks)), True), target)
    spans = [(block, memory.span(block)) for block in blocks]
    for block, span in spans:  # before they are locked: locking untouched pages takes longer
        if _first_of(block).is_cpu:
            _fill(span.tensor(torch.device("cpu")), block)
    memory.slab.lock()
    moved = [_moved(block, span.tensor(target.place)) for block, span in spans]
    for entry in moved:
        if entry.origin.type != "cpu":
            _fill(entry.base, entry.block)
    _change(moved, target)
    return memory.slab, moved


def _first_of(block: _Block) -> Tensor:
    return block.pieces[0].tensors[0]


def _is_there(block: _Block, target: Target) -> bool:
    """True for a block in the memory of the GPU; always False on the emulated driver."""
    tensors = (t for piece in block.pieces for t in piece.tensors)
    return target.place.type == "cuda" and all(t.device == target.place for t in tensors)


def _moved(block: _Block, base: Tensor) -> Moved:
    first = _first_of(block)
    entry = Moved(block, base, first.device, first.is_cpu and _is_pinned(first))
    slab = _slab_of(block, 1)
    if ManagedBuffer.from_handle(block.start, 1).is_managed or slab is not None:
        entry.kept = [(t, t.data) for piece in block.pieces for t in piece.tensors]
    entry.shared = slab if slab is not None and slab.is_shared else None
    return entry


def _change(moved: list[Moved], target: Target) -> None:
    """Give the tensors of blocks their new memory."""
    changes: list[tuple[Tensor, Tensor]] = []
    for entry in moved:
        block = entry.block
        offsets = [(t, t.data_ptr() - block.start) for p in block.pieces for t in p.tensors]
        changes += [(t, _on(entry.base, t, offset)) for t, offset in offsets]
    target.wait()
    _swap(changes)
    for entry in moved:
        for piece in entry.block.pieces:
            piece.storage = entry.base.untyped_storage()  # lets go of the old memory


def _is_pinned(tensor: Tensor) -> bool:
    return torch.cuda.is_available() and tensor.is_pinned()


def move_back(moved: Iterable[Moved]) -> None:
    """Give tensors plain memory on the device where they were, with the present contents.

    Tensors that were in managed memory, or in memory of load_file(), return to it. If other
    processes have that memory, the tensors return only if it has their present contents.
    """
    changes: list[tuple[Tensor, Tensor]] = []
    for entry in moved:
        tensors = list(entry.tensors())
        if not tensors:
            continue
        if entry.kept and (entry.shared is None or _is_unchanged(entry, entry.shared)):
            changes += _into_kept(entry, tensors)
            continue
        start = entry.base.data_ptr()
        base = torch.empty(
            entry.base.numel(), dtype=torch.uint8, device=entry.origin, pin_memory=entry.pinned
        )
        base.copy_(entry.base)
        changes += [(t, _on(base, t, t.data_ptr() - start)) for t in tensors]
    _swap(changes)


def _into_kept(entry: Moved, tensors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The tensors with the memory they had, filled with the present contents."""
    present = {id(t) for t in tensors}
    changes = [(t, old) for t, old in entry.kept if id(t) in present]
    for tensor, old in changes if entry.shared is None else ():
        if old.numel() and old.data_ptr() != tensor.data_ptr():
            old.copy_(tensor.data)
    return changes


def _is_unchanged(entry: Moved, slab: _Slab) -> bool:
    """True if a block has the same bytes as its shared memory from before."""
    start, size = entry.block.start, entry.base.numel()
    if entry.base.data_ptr() == start:
        return True
    before = Span(slab, start - slab.handle, size).tensor(torch.device("cpu"))
    pieces = zip(entry.base.split(_COMPARED), before.split(_COMPARED), strict=True)
    return all(torch.equal(now.cpu(), old) for now, old in pieces)
