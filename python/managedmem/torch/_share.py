"""Modules whose tensors lie in memory that others use too: ranks of a host, or a second module."""

from __future__ import annotations

import copy
import ctypes
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from managedmem import Device
from managedmem._managedmem import _Slab
from managedmem.torch._load import check_room, tensor_at
from managedmem.torch._moving import _check_movable, _swap
from managedmem.torch._offload import Offload, before_offload
from managedmem.torch._offload_arguments import target_of
from managedmem.torch._offload_children import check_claims
from managedmem.torch._offload_frames import Span
from managedmem.torch._offload_places import ALIGNMENT, is_home
from managedmem.torch._ranks import Ranks
from managedmem.torch._tensors import describe, extent_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_Device: TypeAlias = "Device | torch.device | str | int"


def share_memory(
    module: nn.Module, *, group: ProcessGroup | None = None, device: _Device | None = None
) -> int:
    """Let the ranks of a host have one copy of a module's parameters and buffers.

    Parameters
    ----------
    module : torch.nn.Module
        The same module in all ranks, on the CPU. A tensor on the meta device gets the contents from
        the first rank of its host that has them. One rank of each host must have them.
    group : torch.distributed.ProcessGroup, optional
        The ranks, which must all make this call; by default the default group.
    device : Device, torch.device, str or int, optional
        The GPU of this rank; by default the current one.

    The tensors move to memory that all ranks of a host map, page-locked for the GPU of each rank.
    Then each rank frees its own copy. offload(..., read_only=True) streams the tensors where they
    lie. Without read_only, offload() streams only parameters that require no gradient from there,
    and copies the others first: it writes nothing in shared memory. Any other write to these
    tensors is a write for all ranks of the host. The memory lives until the last rank has dropped
    its tensors or has ended, in whatever way, and has no name that could stay behind. If there are
    several hosts, each has one copy.

    Tied parameters stay tied. Parameters that were on the meta device are new objects, so make the
    optimizer afterwards. DistributedDataParallel writes what it synchronizes: give it
    ``init_sync=False``.

    Returns the bytes that are shared. Raises ValueError in all ranks if names, shapes, strides,
    dtypes or contents differ, or a tensor has contents in no rank of a host; MemoryError, CUDAError
    and OSError for lack of memory, and TypeError for other arguments. An error in one rank is
    raised in all ranks, and all modules are unchanged then. If a rank ends meanwhile, the others
    get the error of torch.distributed. No other thread may use the module during the call. Driver:
    cuMemHostRegister.
    """
    ranks = Ranks(group)
    shared: list[_Shared] = []
    chosen: list[int] = []

    def describe_mine() -> list[_Facts]:
        chosen.append(target_of("cuda" if device is None else device).device.device_id)
        shared.extend(_shared_tensors(module))
        check_room(_bytes_of(shared))
        return [entry.facts() for entry in shared]

    sources = _sources(ranks, ranks.agree(describe_mine))
    if _bytes_of(shared) == 0:
        return 0
    with torch.inference_mode(False), torch.no_grad():
        slab = ranks.host_memory(_bytes_of(shared), chosen[0])
        pairs = list(zip(shared, sources, strict=True))

        def copy_mine() -> None:
            _place(shared, slab)
            _copy([entry for entry, source in pairs if source == ranks.rank])

        ranks.agree(copy_mine)
        others = [entry for entry, source in pairs if source != ranks.rank and not entry.is_meta]
        _check_contents(shared, ranks.agree(lambda: _compared(ranks, shared, others)))
        ranks.agree(slab.lock)
        _give(module, shared)
    return sum(entry.place.nbytes for entry in shared)


def replicate(module: nn.Module) -> nn.Module:
    """Copy a module, but not the memory where load_model() or share_memory() has put its tensors.

    The parameters and buffers of the copy are new tensors over the same memory, so that several
    GPUs can stream one home: ``offload(model, 0, budget=..., read_only=True)`` and
    ``offload(replicate(model), 1, budget=..., read_only=True)``. A write to one is a write to both.
    Tensors elsewhere are copied, as copy.deepcopy() copies everything else. The memory lives as
    long as one of its tensors. The module may be offloaded with read_only=True; its copy is not.

    Returns the copy. Raises TypeError for what is not a module, and ValueError for a module that is
    offloaded without read_only=True, and for a module without a tensor in such memory. No
    other thread may change the module during the call; no driver call.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    memo: dict[int, object] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    offloaded = before_offload(module)
    with torch.inference_mode(False), torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            old, place = offloaded.get(id(tensor), (tensor, None))
            if old is not None and is_home(old):
                memo[id(tensor)] = _as(tensor, _second(old, storages))
            elif place is not None:
                memo[id(tensor)] = _as(tensor, tensor.detach().to(place, copy=True))
    if not storages:
        raise ValueError(
            "no tensor of the module is in memory of load_model() or share_memory(): call one of "
            "these first, or copy.deepcopy()"
        )
    return copy.deepcopy(module, memo)


def _second(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    """Another tensor over the same memory; those with one storage share the new one too."""
    old = tensor.untyped_storage()
    new = storages.get(old._cdata)
    if new is None:
        slab = _Slab.at(old.data_ptr(), old.nbytes())
        assert slab is not None
        span = Span(slab, old.data_ptr() - slab.handle, old.nbytes())
        new = storages[old._cdata] = span.tensor(torch.device("cpu")).untyped_storage()
    second = torch.empty(0, dtype=tensor.dtype)
    return second.set_(new, tensor.storage_offset(), tensor.shape, tensor.stride())


def _as(tensor: Tensor, new: Tensor) -> Tensor:
    """Make of the new memory what the tensor is: a parameter with its attributes, or a buffer."""
    if not isinstance(tensor, nn.Parameter):
        return new
    parameter = nn.Parameter(new, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter


# --- the tensors of a module ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Facts:
    """What must be equal in all ranks about a tensor, and whether a rank lacks its contents."""

    names: list[str]
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # of a dense copy
    dtype: torch.dtype
    is_meta: bool = field(compare=False)

    def __str__(self) -> str:
        tied = f", tied to {self.names[1:]}" if self.names[1:] else ""
        return f"{self.names[0]!r} (shape {self.shape}, strides {self.strides}, {self.dtype}{tied})"


@dataclass(slots=True, eq=False)
class _Shared:
    """A tensor of a module with all of its names, and others over exactly the same memory."""

    tensor: Tensor
    names: list[str]
    others: list[Tensor] = field(default_factory=list)
    place: Tensor = field(default_factory=lambda: torch.empty(0))  # over the new memory

    @property
    def is_meta(self) -> bool:
        return self.tensor.is_meta

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def facts(self) -> _Facts:
        strides = torch.empty_like(self.tensor, device="meta").stride()
        shape, dtype = tuple(self.tensor.shape), self.tensor.dtype
        return _Facts(self.names, shape, strides, dtype, self.is_meta)


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    if any(Offload.of(inner) is not None for inner in module.modules()):
        raise ValueError("the module is offloaded: call remove() on its handle first")


def _shared_tensors(module: nn.Module) -> list[_Shared]:
    """The parameters, in the order in which modules use them, and then the buffers."""
    _check_module(module)
    by_key: dict[object, _Shared] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        if not (tensor.is_meta and tensor.layout is torch.strided):
            _check_movable(name, tensor)
        if not tensor.is_meta and not tensor.is_cpu:
            raise ValueError(f"{describe(name, tensor)} is not on the CPU: move the module there")
        shared = by_key.setdefault(_key(tensor), _Shared(tensor, []))
        shared.names.append(name)
        if all(tensor is not each for each in (shared.tensor, *shared.others)):
            shared.others.append(tensor)
    every = list(by_key.values())
    check_claims(module, [(each.names[0], each.tensor) for each in every if not each.is_meta])
    _check_apart(every)
    return every


def _key(tensor: Tensor) -> object:
    if tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _check_apart(shared: list[_Shared]) -> None:
    """Raise ValueError for tensors that have a part of their memory in common."""
    extents = []
    for entry in shared:
        if not entry.is_meta and (extent := extent_of(entry.names[0], entry.tensor)) is not None:
            extents.append((*extent, entry.names[0]))
    last, before = 0, ""
    for start, end, name in sorted(extents):
        if start < last:
            raise ValueError(f"{name!r} and {before!r} have a part of their memory in common")
        last, before = end, name


def _bytes_of(shared: list[_Shared]) -> int:
    return sum(-(-entry.nbytes // ALIGNMENT) * ALIGNMENT for entry in shared)


def _place(shared: list[_Shared], slab: _Slab) -> None:
    """Give each tensor its place in the memory."""
    offset = 0
    for entry in shared:
        facts = entry.facts()
        entry.place = tensor_at(slab, offset, facts.shape, facts.dtype, facts.strides)
        offset += -(-entry.nbytes // ALIGNMENT) * ALIGNMENT


# --- what the ranks decide --------------------------------------------------------------------


def _sources(ranks: Ranks, every: list[list[_Facts]]) -> list[int]:
    """The rank of this host that has the contents of each tensor."""
    for rank, rows in enumerate(every):
        for mine, first in zip(rows, every[0], strict=False):
            if mine != first:
                raise ValueError(
                    f"rank {rank} has {mine} where rank 0 has {first}: the modules must be the same"
                )
        if len(rows) != len(every[0]):
            raise ValueError(f"rank {rank} has {len(rows)} tensors, and rank 0 {len(every[0])}")
    sources: dict[int, list[int]] = {}  # by the first rank of a host
    for leader in sorted(set(ranks.hosts)):
        peers = [rank for rank, first in enumerate(ranks.hosts) if first == leader]
        for i, facts in enumerate(every[0]):
            source = next((rank for rank in peers if not every[rank][i].is_meta), None)
            if source is None:
                raise ValueError(
                    f"{facts} is on the meta device in all ranks of the host of rank {leader}: one "
                    "of them must have its contents"
                )
            sources.setdefault(leader, []).append(source)
    return sources.get(ranks.leader, [])


def _copy(mine: list[_Shared]) -> None:
    for entry in mine:
        entry.place.copy_(entry.tensor)


def _compared(
    ranks: Ranks, shared: list[_Shared], others: list[_Shared]
) -> tuple[str | None, dict[int, bytes]]:
    """The first tensor whose contents differ here, and the digests of this rank's share."""
    for entry in others:
        own = entry.tensor
        if own.stride() != entry.place.stride():
            own = torch.empty_like(entry.place).copy_(own)
        if not torch.equal(_bytes(own), _bytes(entry.place)):
            return entry.names[0], {}
    if len(set(ranks.hosts)) == 1:
        return None, {}
    mine = range(ranks.index, len(shared), ranks.count)
    return None, {i: _digest(shared[i].place) for i in mine}


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor."""
    start = tensor.storage_offset() * tensor.element_size()
    raw = torch.empty(0, dtype=torch.uint8)
    return raw.set_(tensor.untyped_storage(), start, (tensor.nbytes,), (1,))


def _digest(tensor: Tensor) -> bytes:
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    return hashlib.blake2b(memory).digest()


def _check_contents(
    shared: list[_Shared], every: list[tuple[str | None, dict[int, bytes]]]
) -> None:
    digests: dict[int, bytes] = {}
    for rank, (name, mine) in enumerate(every):
        if name is not None:
            raise ValueError(f"{name!r} has other contents in rank {rank} than in another one")
        for i, digest in mine.items():
            if digests.setdefault(i, digest) != digest:
                wrong = shared[i].names[0]
                raise ValueError(f"{wrong!r} has other contents on the host of rank {rank}")


# --- the end ------------------------------------------------------------------------------------


def _give(module: nn.Module, shared: list[_Shared]) -> None:
    """Let the tensors of the module lie in the shared memory."""
    new: dict[int, Tensor] = {}
    changes: list[tuple[Tensor, Tensor]] = []
    for entry in shared:
        if entry.is_meta:
            new[id(entry.tensor)] = _as(entry.tensor, entry.place)
        elif entry.nbytes:
            changes += [(t, entry.place.detach()) for t in (entry.tensor, *entry.others)]
    _swap(changes)
    for inner in module.modules():
        for tensors in (inner._parameters, inner._buffers):
            for key, tensor in tensors.items():
                if id(tensor) in new:
                    tensors[key] = new[id(tensor)]  # type: ignore[assignment]
