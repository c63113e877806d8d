"""The parts that offload() streams: memory that one module's call uses together.

Decides which modules announce their calls, and which memory belongs to each. Knows no driver.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from managedmem.torch._moving import _Block
from managedmem.torch._offload_compiled import is_compiled
from managedmem.torch._targets import join_name

MIB = 1 << 20
SMALL = 4 * MIB  # modules that contain a ModuleList or ModuleDict are parts up to this size
LARGE = 64 * MIB  # modules with submodules are not streamed as a whole above this
TINY = MIB  # parts up to this, and up to a 64th of the budget, stay on the device
PACKED = MIB  # new memory of up to this can have pages on a device, from freed allocations
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
# Their calls use the parameters of submodules without calling those.
_WHOLES = (nn.MultiheadAttention,)
_LOOKUPS = (nn.Embedding.forward, nn.EmbeddingBag.forward)  # they read a few rows of their weight


@dataclass(slots=True, eq=False)
class Part:
    """Memory that is used together: one working group."""

    name: str
    blocks: list[_Block]
    written: bool  # by kernels between two loads
    stepped: bool = False  # only by the optimizer

    @property
    def nbytes(self) -> int:
        """The bytes of its pages."""
        return sum(size_of(block) for block in self.blocks)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Site:
    """A module whose calls use parts."""

    module: nn.Module
    parts: list[Part] = field(default_factory=list)
    around: frozenset[int] = frozenset()  # the ids of the modules that contain it, and its own


@dataclass(slots=True)
class Plan:
    """What streams, what stays on the device, and the modules whose calls use them."""

    sites: list[Site]
    streamed: list[Part]
    resident: list[Part]


def size_of(block: _Block) -> int:
    """The bytes of the pages that a block takes."""
    return -(-(block.end - block.start) // mmap.PAGESIZE) * mmap.PAGESIZE


def blocks_of_tensors(blocks: Iterable[_Block]) -> dict[int, _Block]:
    """The block of each tensor, by the tensor's id."""
    return {id(t): block for block in blocks for piece in block.pieces for t in piece.tensors}


def make_plan(
    model: nn.Module,
    blocks: list[_Block],
    written: set[int],
    budget: int,
    chosen: dict[int, str],
    read_only: bool,
) -> Plan:
    """Cut the model into parts for a budget of bytes.

    `written` has the ids of the tensors that kernels write, and `chosen` the names, by id, of the
    modules that the caller wants as parts. `read_only` keeps buffers, which a forward call may
    write, out of the parts of parameters.
    """
    return _Cutter(model, blocks, written, budget, chosen, read_only).plan()


class _Cutter:
    """One walk over the modules of a model."""

    def __init__(
        self,
        model: nn.Module,
        blocks: list[_Block],
        written: set[int],
        budget: int,
        chosen: dict[int, str],
        read_only: bool,
    ) -> None:
        self.model = model
        self.blocks = blocks
        self.written = written
        self.budget = budget
        self.chosen = chosen
        self.read_only = read_only
        self.large = min(LARGE, budget // 4)
        self.small = min(SMALL, self.large)
        self.block_of = blocks_of_tensors(blocks)
        self.owned = self._owned()
        self.seen: set[int] = set()
        self.covered: dict[int, nn.Module] = {}  # the module whose call uses a module's tensors
        self.names: dict[int, str] = {}
        self.members: dict[int, list[_Block]] = {}  # the blocks of a module with a part, by its id

    def _owned(self) -> dict[int, list[_Block]]:
        """The blocks of each module, by its id. A shared block belongs to its first module."""
        found: dict[int, list[_Block]] = {}
        taken: set[int] = set()
        for module in self.model.modules():
            for tensor in direct_tensors(module):
                block = self.block_of.get(id(tensor))
                if block is not None and id(block) not in taken:
                    taken.add(id(block))
                    found.setdefault(id(module), []).append(block)
        return found

    def plan(self) -> Plan:
        self._cut(self.model, "", None)
        parts: dict[int, list[Part]] = {}  # by the id of a block
        streamed: list[Part] = []
        buffers: list[_Block] = []
        for key, members in self.members.items():
            kept = [block for block in members if not self._is_small_buffer(block)]
            buffers += [block for block in members if self._is_small_buffer(block)]
            for mine in self._together(kept):
                written = self._is_written(mine[0])
                stepped = written and are_parameters(mine)
                part = Part(self.names[key], mine, written, stepped)
                streamed.append(part)
                for block in mine:
                    parts.setdefault(id(block), []).append(part)
        resident = self._resident(streamed)
        if buffers:
            resident.append(Part("buffers", buffers, True))
        stays = set(map(id, resident))
        streamed = [part for part in streamed if id(part) not in stays]
        return Plan(self._sites(parts, streamed), streamed, resident)

    def _together(self, blocks: list[_Block]) -> list[list[_Block]]:
        """The blocks by what happens to their memory."""
        found: dict[tuple[bool, bool], list[_Block]] = {}
        for block in blocks:
            apart = self.read_only and not are_parameters([block])
            found.setdefault((self._is_written(block), apart), []).append(block)
        return [found[key] for key in sorted(found)]

    # --- which module is a part -----------------------------------------------------------

    def _cut(self, module: nn.Module, name: str, host: nn.Module | None) -> None:
        if id(module) in self.seen:
            return
        if not is_called(module):
            self._take(host or module, name, [module])
        elif self._is_one(module):
            self._take(module, name, list(module.modules()))
            return
        else:
            self._take(module, name, [module])
            host = module
        for key, child in module.named_children():
            self._cut(child, join_name(name, key), host)

    def _take(self, root: nn.Module, name: str, modules: list[nn.Module]) -> None:
        """Let calls of the root use the blocks of modules."""
        for module in modules:
            if id(module) in self.seen:
                continue
            self.seen.add(id(module))
            self.covered[id(module)] = root
            if self.owned.get(id(module)):
                self.members.setdefault(id(root), []).extend(self.owned[id(module)])
        self.names.setdefault(id(root), name)

    def _is_one(self, module: nn.Module) -> bool:
        """True if a module is a part with all that it contains."""
        if (
            is_compiled(module) and id(module) not in self.chosen
        ):  # its hooks run outside of its graph
            assert isinstance(module._orig_mod, nn.Module)
            return self._is_one(module._orig_mod)
        inner = [each for each in module.modules() if each is not module]
        if any(id(each) in self.chosen for each in inner):
            return False
        if (
            isinstance(module, _WHOLES)
            or id(module) in self.chosen
            or not any(self.owned.get(id(each)) for each in inner)
        ):
            return True
        size = sum(size_of(b) for each in module.modules() for b in self.owned.get(id(each), []))
        lists = any(isinstance(each, _CONTAINERS) for each in inner)
        return size <= (self.small if lists else self.large)

    # --- what stays -----------------------------------------------------------------------

    def _is_written(self, block: _Block) -> bool:
        return any(id(t) in self.written for piece in block.pieces for t in piece.tensors)

    def _is_small_buffer(self, block: _Block) -> bool:
        """True for what kernels may write in a forward pass, such as statistics."""
        tensors = [t for piece in block.pieces for t in piece.tensors]
        limit = min(TINY, self.large // 16)
        return size_of(block) <= limit and not any(isinstance(t, nn.Parameter) for t in tensors)

    def _resident(self, parts: list[Part]) -> list[Part]:
        """The parts that stay on the device: all if they fit, else the smallest."""
        if sum(part.nbytes for part in parts) <= self.budget:
            return list(parts)
        found: list[Part] = []
        room = self.budget // 8
        for part in sorted(parts, key=lambda part: part.nbytes):
            nbytes = part.nbytes
            if nbytes > min(TINY, self.large // 16) or nbytes > room:
                break
            found.append(part)
            room -= nbytes
        return found

    # --- the modules that announce calls ---------------------------------------------------

    def _sites(self, parts: dict[int, list[Part]], streamed: list[Part]) -> list[Site]:
        """The modules whose calls use streamed parts, tied weights included."""
        sites: dict[int, Site] = {}
        wanted = set(map(id, streamed))
        around = {key: frozenset(found) for key, found in _containing(self.model)}
        for module in self.model.modules():
            root = self.covered[id(module)]
            if getattr(type(root), "forward", None) in _LOOKUPS or not is_called(root):
                continue
            for tensor in direct_tensors(module):
                block = self.block_of.get(id(tensor))
                for part in parts.get(id(block), []):
                    if id(part) not in wanted:
                        continue
                    site = sites.get(id(root))
                    if site is None:
                        site = sites[id(root)] = Site(root, [], around[id(root)])
                    if part not in site.parts:
                        site.parts.append(part)
        return list(sites.values())


def are_parameters(blocks: list[_Block]) -> bool:
    """False for buffers, which a forward call may write."""
    tensors = (t for block in blocks for piece in block.pieces for t in piece.tensors)
    return all(isinstance(t, nn.Parameter) for t in tensors)


def is_called(module: nn.Module) -> bool:
    """True if a module has a forward of its own."""
    if isinstance(module, (*_CONTAINERS, nn.ParameterList, nn.ParameterDict)):
        return False
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def direct_tensors(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers of a module itself."""
    yield from (t for t in module._parameters.values() if t is not None)
    yield from (t for t in module._buffers.values() if isinstance(t, torch.Tensor))


def _containing(model: nn.Module) -> Iterator[tuple[int, set[int]]]:
    """Each module's id with the ids of the modules that contain it, and its own."""
    found: dict[int, set[int]] = {}
    for module in model.modules():
        for inner in module.modules():
            found.setdefault(id(inner), set()).add(id(module))
    yield from found.items()
