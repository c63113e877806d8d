"""The parts that offload() streams: memory that one module's call uses together.

Decides which modules announce their calls, and which memory belongs to each. Knows no driver.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from managedmem.torch._moving import _Block
from managedmem.torch._offload_choice import (
    EVERYTHING,
    MIB,
    SMALL_PART,
    TINY,
    Place,
    Use,
    choose_later,
    choose_places,
)
from managedmem.torch._offload_compiled import is_compiled
from managedmem.torch._offload_places import ALIGNMENT, is_shared, size_of
from managedmem.torch._targets import join_name

SMALL = 4 * MIB  # a module that contains a ModuleList or ModuleDict is one part up to this size
LARGE = 64 * MIB  # above this size, a module with submodules is not one part
_MANY = 4  # experts; with fewer, a call uses the whole parameter
LEAST_SLICE = MIB // 4  # bytes; a load of less costs more than its way over the bus
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
# These use the parameters of their submodules, but do not call the submodules.
_WHOLES = (nn.MultiheadAttention,)
_UNHOOKED = (EVERYTHING, SMALL_PART)  # reasons for which calls need no announcement
_NEAREST: tuple[Place, ...] = ("device", "frames", "home")
_PREPARING = ("__init__", "reset_parameters", "_init_weights", "init_weights")  # run before calls
_LOOKUPS = (nn.Embedding.forward, nn.EmbeddingBag.forward)  # they read a few rows of their weight


@dataclass(slots=True, eq=False)
class Part:
    """Memory that is used together: one working group."""

    name: str
    blocks: list[_Block]
    written: bool  # True if the optimizer or calls write it
    use: Use = "whole"
    asked: Place | None = None
    place: Place = "frames"
    reason: str = ""
    # Code of its modules may write it through `data`, which torch does not count.
    is_unwatched: bool = False
    is_shared: bool = False  # its home may be memory of other processes, which nothing writes
    slice_nbytes: int = 0  # of a slice that can be loaded alone

    @property
    def nbytes(self) -> int:
        """The bytes of its consecutive blocks."""
        return sum(size_of(block) for block in self.blocks)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Site:
    """A module whose calls use parts."""

    module: nn.Module
    parts: list[Part] = field(default_factory=list)
    sliced: list[Part] = field(default_factory=list)  # parts of which its calls name slices
    around: frozenset[int] = frozenset()  # the ids of the modules that contain it, and its own


@dataclass(slots=True)
class Plan:
    """The parts that stay on the device, the streamed parts, and the modules that use these."""

    sites: list[Site]
    streamed: list[Part]  # in frames or at home
    resident: list[Part]
    frames: int = 0  # bytes of frames for the streamed parts


@dataclass(frozen=True, slots=True)
class Later:
    """Memory that came to a model after its first plan."""

    blocks: list[_Block]
    room: int  # the bytes of the budget that are left
    frames: int  # the bytes of the frames that there are


def blocks_of_tensors(blocks: Iterable[_Block]) -> dict[int, _Block]:
    """The block of each tensor, by the tensor's id."""
    return {id(t): block for block in blocks for piece in block.pieces for t in piece.tensors}


def make_plan(
    model: nn.Module,
    blocks: list[_Block],
    written: set[int],
    budget: int,
    chosen: dict[int, str],
    asked: dict[int, Place],
    is_read_only: bool,
    later: Later | None = None,
) -> Plan:
    """Cut the model into parts for a budget of bytes.

    `written` has the ids of the tensors that the optimizer trains. `chosen` has the names, by id,
    of the modules that the caller wants as parts, and `asked` the places, by id, that the caller
    wants for tensors. `later` adds to an earlier plan, whose blocks are among `blocks`.
    """
    return _Cutter(model, blocks, written, budget, chosen, asked).plan(is_read_only, later)


def follow(model: nn.Module, plan: Plan, budget: int, chosen: dict[int, str]) -> list[Site]:
    """Let the sites of a plan have the parts that their modules use now.

    Returns sites for other modules that use parts of the plan.
    """
    parts = plan.streamed + plan.resident
    announced = [part for part in parts if part.use != "rows" and part.reason not in _UNHOOKED]
    part_of = {key: part for part in announced for key in blocks_of_tensors(part.blocks)}
    cutter = _Cutter(model, [b for part in parts for b in part.blocks], set(), budget, chosen, {})
    covered, around = cutter.roots(), containing(model)
    sites = {id(site.module): site for site in plan.sites}
    holders: dict[int, list[Site]] = {}  # by the id of a part
    for site in plan.sites:
        for part in site.parts + site.sliced:
            holders.setdefault(id(part), []).append(site)
    used: dict[int, dict[int, Part]] = {}  # by the ids of a site and a part
    for module in model.modules():
        for part in (part_of[id(t)] for t in direct_tensors(module) if id(t) in part_of):
            users = [s for s in holders.get(id(part), ()) if id(s.module) in around[id(module)]]
            if not users and _can_announce(root := covered[id(module)]):
                users = [sites.setdefault(id(root), Site(root))]
            for site in users:
                used.setdefault(id(site), {})[id(part)] = part
    for site in (*plan.sites, *sites.values()):
        mine = used.get(id(site), {}).values()
        site.parts[:] = [part for part in mine if not _is_sliced(part)]
        site.sliced[:] = [part for part in mine if _is_sliced(part)]
        site.around = around.get(id(site.module), site.around)
    before = set(map(id, plan.sites))
    return [site for site in sites.values() if id(site) not in before]


class _Cutter:
    """One walk over the modules of a model."""

    def __init__(
        self,
        model: nn.Module,
        blocks: list[_Block],
        written: set[int],
        budget: int,
        chosen: dict[int, str],
        asked: dict[int, Place],
    ) -> None:
        self.model = model
        self.blocks = blocks
        self.written = written
        self.budget = budget
        self.chosen = chosen
        self.asked = asked
        self.is_read_only = False
        self.large = min(LARGE, budget // 4)
        self.small = min(SMALL, self.large)
        self.block_of = blocks_of_tensors(blocks)
        self.owned = self._owned()
        self.experts = {id(p) for module in model.modules() for p in _expert_weights(module)}
        self.seen: set[int] = set()
        self.unwatched: set[int] = set()  # modules whose calls may write parts through `.data`
        self.writers: dict[type, bool] = {}  # by class: True if its methods read `.data`
        self.covered: dict[int, nn.Module] = {}  # the module whose call uses a module's tensors
        self.names: dict[int, str] = {}
        self.members: dict[int, list[_Block]] = {}  # the blocks of a module with a part, by its id

    def _owned(self) -> dict[int, list[_Block]]:
        """The blocks of each module, by its id. A shared block belongs to its first module."""
        owned: dict[int, list[_Block]] = {}
        taken: set[int] = set()
        for module in self.model.modules():
            for tensor in direct_tensors(module):
                block = self.block_of.get(id(tensor))
                if block is not None and id(block) not in taken:
                    taken.add(id(block))
                    owned.setdefault(id(module), []).append(block)
        return owned

    def plan(self, is_read_only: bool, later: Later | None) -> Plan:
        self._cut(self.model, "", None)
        self.is_read_only = is_read_only
        if later is not None:
            new = set(map(id, later.blocks))
            for key, members in self.members.items():
                self.members[key] = [block for block in members if id(block) in new]
        parts: dict[int, list[Part]] = {}  # by the id of a block
        streamed: list[Part] = []
        buffers: list[_Block] = []
        left = later.room if later else math.inf
        for key, members in self.members.items():
            small = self._small_buffers(members, left)
            left -= sum(map(size_of, small))
            buffers += small
            kept = [block for block in members if all(block is not each for each in small)]
            unwatched = key in self.unwatched and not is_read_only
            for mine, use, asked in self._together(kept, unwatched):
                part = Part(self.names[key], mine, self._is_written(mine[0]), use, asked)
                part.is_unwatched = unwatched
                part.is_shared = bool(self._shared_kind(mine[0], unwatched))
                if use == "slices":
                    self._describe_slices(part)
                streamed.append(part)
                for block in mine:
                    parts.setdefault(id(block), []).append(part)
        announced = {id(part) for site in self._sites(parts, streamed) for part in site.parts}
        for part in streamed:
            if part.use == "whole" and id(part) not in announced:
                part.use = "rows"
        room = max(0, (later.room if later else self.budget) - sum(map(size_of, buffers)))
        frames = later.frames if later else 0
        if frames:
            choose_later(streamed, room, frames)
        else:
            frames = choose_places(streamed, room, keeps_slices=is_read_only)
        resident = [part for part in streamed if part.place == "device"]
        if buffers:
            everything = Part("buffers", buffers, True, place="device", reason=SMALL_PART)
            resident.append(everything)
        streamed = [part for part in streamed if part.place != "device"]
        # If some are streamed, calls of all are announced, so that all are counted.
        called = [p for p in streamed + resident if p.use == "whole" and p.reason not in _UNHOOKED]
        called += [part for part in streamed if part.use == "slices"]
        return Plan(self._sites(parts, called), streamed, resident, frames)

    def _together(
        self, blocks: list[_Block], unwatched: bool
    ) -> list[tuple[list[_Block], Use, Place | None]]:
        """The blocks, grouped by the treatment of their memory; each block of experts alone."""
        groups: dict[tuple[bool, str, str], list[_Block]] = {}
        alone: list[tuple[list[_Block], Use, Place | None]] = []
        for block in blocks:
            asked = self._asked_for(block)
            if self._has_slices(block):
                alone.append(([block], "slices", asked))
            else:
                shared = self._shared_kind(block, unwatched)
                key = self._is_written(block), asked or "", shared
                groups.setdefault(key, []).append(block)
        together = [(groups[key], "whole", key[1] or None) for key in sorted(groups)]
        return alone + together  # type: ignore[operator]

    def _shared_kind(self, block: _Block, unwatched: bool) -> str:
        """The kind of a block that stays in shared memory: "parameters", "buffers" or "".

        In such memory all parameters lie together, and then the buffers.
        """
        tensors = [t for piece in block.pieces for t in piece.tensors]
        parameters = all(isinstance(t, nn.Parameter) for t in tensors)
        trains = self._is_written(block) or any(t.requires_grad for t in tensors)
        if not is_shared(block):
            return ""
        if not self.is_read_only and (unwatched or trains or not parameters):
            return ""
        return "parameters" if parameters else "buffers"

    def _asked_for(self, block: _Block) -> Place | None:
        """The place that the caller wants for a block; of several, the nearest to the kernels."""
        wanted = {self.asked.get(id(t)) for piece in block.pieces for t in piece.tensors}
        return next((place for place in _NEAREST if place in wanted), None)

    def _has_slices(self, block: _Block) -> bool:
        """True for the weights of experts in one parameter, of which calls use a few slices."""
        return any(id(t) in self.experts for piece in block.pieces for t in piece.tensors)

    def _describe_slices(self, part: Part) -> None:
        tensors = [t for piece in part.blocks[0].pieces for t in piece.tensors]
        if part.is_unwatched or len(tensors) != 1 or type(tensors[0]) is not nn.Parameter:
            return
        if tensors[0].is_contiguous() and not tensors[0].is_inference():
            nbytes = tensors[0].nbytes // tensors[0].shape[0]
            # A slice has the same alignment in a frame as at home, because kernels may depend on
            # it.
            if nbytes >= LEAST_SLICE and nbytes % ALIGNMENT == 0:
                part.slice_nbytes = nbytes

    def roots(self) -> dict[int, nn.Module]:
        """The module whose call uses the tensors of a module, by its id."""
        self._cut(self.model, "", None)
        return self.covered

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
        """Note that calls of the root use the blocks of the modules."""
        for module in modules:
            if id(module) in self.seen:
                continue
            self.seen.add(id(module))
            self.covered[id(module)] = root
            kind = type(module)
            if kind not in self.writers:
                self.writers[kind] = names_data(kind)
            if self.writers[kind]:
                self.unwatched.add(id(root))
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
        """True for tensors that kernels may write in a forward pass, such as statistics."""
        tensors = [t for piece in block.pieces for t in piece.tensors]
        limit = min(TINY, self.large // 16)
        return size_of(block) <= limit and not any(isinstance(t, nn.Parameter) for t in tensors)

    def _small_buffers(self, blocks: list[_Block], room: float) -> list[_Block]:
        """The small buffers among the blocks that fit in `room` bytes."""
        small: list[_Block] = []
        for block in filter(self._is_small_buffer, blocks):
            if size_of(block) <= room:
                small.append(block)
                room -= size_of(block)
        return small

    # --- the modules that announce calls ---------------------------------------------------

    def _sites(self, parts: dict[int, list[Part]], streamed: list[Part]) -> list[Site]:
        """The modules whose calls use streamed parts, tied weights included."""
        sites: dict[int, Site] = {}
        wanted = set(map(id, streamed))
        around = containing(self.model)
        for module in self.model.modules():
            root = self.covered[id(module)]
            if not _can_announce(root):
                continue
            for tensor in direct_tensors(module):
                block = self.block_of.get(id(tensor))
                for part in parts.get(id(block), []):
                    if id(part) not in wanted:
                        continue
                    site = sites.get(id(root))
                    if site is None:
                        site = sites[id(root)] = Site(root, around=around[id(root)])
                    mine = site.sliced if _is_sliced(part) else site.parts
                    if part not in mine:
                        mine.append(part)
        return list(sites.values())


def _can_announce(module: nn.Module) -> bool:
    """True if calls of a module use its parts as a whole."""
    return getattr(type(module), "forward", None) not in _LOOKUPS and is_called(module)


def _is_sliced(part: Part) -> bool:
    """True for a part of which calls name slices."""
    return part.place != "frames" and part.use != "whole"


def _expert_weights(module: nn.Module) -> Iterator[Tensor]:
    """Parameters with a slice for each of many experts, of which a call uses a few."""
    cubes = [p for p in module._parameters.values() if p is not None and p.dim() == 3]
    with contextlib.suppress(Exception):  # num_experts may be a property that raises
        count = getattr(module, "num_experts", 0) if cubes else 0
        if isinstance(count, int) and count >= _MANY:
            yield from (parameter for parameter in cubes if parameter.shape[0] == count)


def parts_below_data(model: nn.Module, parts: Iterable[Part]) -> list[Part]:
    """The parts that calls of modules around them may write through `data`.

    Adapters that merge themselves into a weight do so, for instance.
    """
    part_of = {
        id(t): part for part in parts for b in part.blocks for p in b.pieces for t in p.tensors
    }
    known: dict[Any, bool] = {}
    written: dict[int, Part] = {}
    for module in model.modules():
        kind = vars(module).get("forward") or type(module)
        if kind not in known:
            known[kind] = _forward_names_data(module)
        if known[kind]:
            mine = (part_of.get(id(p)) for p in module.parameters())
            written |= {id(part): part for part in mine if part is not None}
    return list(written.values())


def _forward_names_data(module: nn.Module) -> bool:
    """True if `forward`, or a method that it names, reads an attribute `data`."""
    kind = type(module)
    seen: set[str] = set()
    names = ["forward"]
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        method: Any = vars(module).get(name, getattr(kind, name, None))
        method = method.fget if isinstance(method, property) else method
        code = getattr(method, "__code__", None)
        if code is None or _is_of_torch(method):
            continue
        if _reads_data(code):
            return True
        names += _names_in(code)
    return False


def _names_in(code: CodeType) -> Iterator[str]:
    """The attributes that a function names, with those of functions nested in it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def _is_of_torch(definition: Any) -> bool:
    """True for a class or function of torch."""
    return str(getattr(definition, "__module__", None)).split(".")[0] == "torch"


def names_data(kind: type) -> bool:
    """True if methods of a class of modules read an attribute `data`, through which they may write.

    torch counts no such write. Classes of torch do not write parameters this way in a call.
    """
    for owner in kind.__mro__:
        if _is_of_torch(owner):
            continue
        for name, method in vars(owner).items():
            code = getattr(method, "__code__", None)
            if name not in _PREPARING and code is not None and _reads_data(code):
                return True
    return False


def _reads_data(code: CodeType) -> bool:
    """True if a function, or a function nested in it, names the attribute."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return "data" in code.co_names or any(map(_reads_data, inner))


def is_called(module: nn.Module) -> bool:
    """True if a module has a forward of its own."""
    if isinstance(module, (*_CONTAINERS, nn.ParameterList, nn.ParameterDict)):
        return False
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def direct_tensors(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers of a module itself."""
    yield from (t for t in module._parameters.values() if t is not None)
    yield from (t for t in module._buffers.values() if isinstance(t, torch.Tensor))


def containing(model: nn.Module) -> dict[int, frozenset[int]]:
    """By the id of a module, the ids of the modules that contain it, and its own."""
    around: dict[int, set[int]] = {}
    for module in model.modules():
        for inner in module.modules():
            around.setdefault(id(inner), set()).add(id(module))
    return {key: frozenset(ids) for key, ids in around.items()}
