"""What offload() keeps for one device: the places of its parts, their memory, and the hooks.

Owns the order in which tensors move, in both directions.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Container, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from managedmem import CUDAError
from managedmem._managedmem import _Frames, _Slab
from managedmem.torch._moving import _blocks, _empty_changes, _Piece, _swap
from managedmem.torch._offload_arguments import DeviceModule
from managedmem.torch._offload_choice import Place
from managedmem.torch._offload_coverage import Watch
from managedmem.torch._offload_frames import FramedPart
from managedmem.torch._offload_gradients import GradientHome, GradientRoom
from managedmem.torch._offload_hooks import Announcer, Places, Versions
from managedmem.torch._offload_places import (
    Moved,
    home_of,
    move_back,
    move_home,
    move_to_device,
    size_of,
    stay_home,
)
from managedmem.torch._offload_plan import (
    Later,
    Part,
    Plan,
    follow,
    make_plan,
    parts_below_data,
)
from managedmem.torch._offload_shares import Share
from managedmem.torch._offload_slices import SlicedPart
from managedmem.torch._offload_together import roots_of
from managedmem.torch._offload_visits import StepPart
from managedmem.torch._targets import join_name
from managedmem.torch._tensors import Found

_TRAINED = (
    "the optimizer trains {!r}, which required no gradient when the module was offloaded: it is in "
    "memory that other processes have too. Call remove(), and offload the module again"
)


class DeviceLane:
    """One device of an offloaded model: its parts, their memory, and the hooks."""

    def __init__(
        self,
        own: DeviceModule,
        budget: int,
        optimizer: torch.optim.Optimizer | None,
        chosen: dict[int, str],
        asked: dict[int, Place],
        read_only: bool,
        suspendable: bool,
    ) -> None:
        self.target = own.target
        self.name = own.name  # of the submodule on this device
        self.budget = budget
        self.read_only = read_only
        self.suspendable = suspendable
        # The modules that the caller wants as parts.
        self._chosen = weakref.WeakSet(m for m in own.module.modules() if id(m) in chosen)
        all_blocks = _blocks(own.tensors, own.target.place)
        total = sum(size_of(block) for block in all_blocks)
        self.room = budget  # the bytes for parameters
        self._share: Share | None = None
        if optimizer is not None:
            self._share = Share(optimizer, [t for _, t in own.tensors], total, budget)
            self.room = self.share.for_parameters()
        self.plan = make_plan(
            own.module, all_blocks, self._written(), self.room, chosen, asked, read_only
        )
        self.moved: list[Moved] = []
        # Tensors without elements, which are in no block, with their data from before.
        self._empty_before: list[tuple[Tensor, Tensor]] = []
        self.groups: dict[int, FramedPart] = {}
        self.steps: dict[int, StepPart] = {}  # by the id of a part
        self.hooks: list[RemovableHandle] = []
        self.frames: _Frames | None = None
        self.versions = Versions()
        self.places = Places(optimizer is not None, read_only)
        self.announcer = Announcer(own.target, self.groups, self.versions, self.places, read_only)
        self.gradient_room: GradientRoom | None = None
        self.final: dict[str, int] | None = None
        self.last_error: str | None = None

    @property
    def share(self) -> Share:
        """The division of the budget; only with an optimizer."""
        assert self._share is not None
        return self._share

    def _written(self) -> set[int]:
        """The ids of the tensors that the optimizer trains."""
        return set() if self._share is None else {id(p) for p in self.share.trained}

    def fill(self, own: DeviceModule) -> None:
        """Move what stays to the device, and the other tensors home."""
        self.move_empty(own.tensors)
        self._place(self.plan, own.module)

    def move_empty(self, tensors: Found) -> None:
        """Move the tensors without elements to the device."""
        changes = list(_empty_changes(tensors, self.target.place))
        before = [(tensor, tensor.data) for tensor, _ in changes]
        _swap(changes)
        self._empty_before += before

    def empty_returns(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the tensors without elements, each with its data from before."""
        for tensor, before in self._empty_before:
            if tensor.numel() == 0:  # else the caller has given it contents
                yield tensor, before

    def _place(self, plan: Plan, model: nn.Module) -> None:
        """Bring the parts of a plan to their places, and hook the modules that use them."""
        is_first = self.frames is None
        if is_first and plan.frames:
            is_cpu = self.target.place.type == "cpu"
            self.frames = _Frames(
                self.target.device.device_id, plan.frames, is_cpu, suspendable=self.suspendable
            )
            self.announcer.frames = self.frames
        stays = [block for part in plan.resident for block in part.blocks]
        self.moved += move_to_device(stays, self.target, self.suspendable)
        self._make_parts(plan, self._bring_home(plan))
        self.places.know(model)
        for part in plan.streamed:
            self.places.note(part)
            if self.read_only or part.is_shared:
                self.versions.watch(part)
        self.target.wait()  # other streams will use the memory, too
        for site in plan.sites:
            self.hooks += self.announcer.attach(site)
        self._note_writers(
            model, {id(p): p for p in (*self.plan.streamed, *plan.streamed)}.values()
        )
        if is_first and self.frames is not None:
            self.announcer.start()
            for root in roots_of(model):
                self.hooks += self.announcer.attach_rounds(root)

    def _note_writers(self, model: nn.Module, streamed: Iterable[Part]) -> None:
        """Note the parts that compiled calls of modules around them may write through `data`."""
        for part in parts_below_data(model, streamed):
            if id(part) in self.groups:
                self.groups[id(part)].is_below = True

    def _bring_home(self, plan: Plan) -> dict[int, tuple[_Slab, int]]:
        """Bring the streamed parts home; return the slab and offset of each, by the part's id."""
        homes = {
            id(part): home
            for part in plan.streamed
            if (home := home_of(part.blocks)) is not None
            and (part.is_shared or not home[0].is_shared)
        }
        stay = [part for part in plan.streamed if id(part) in homes]
        away = [part for part in plan.streamed if id(part) not in homes]
        if away:
            slab, moved = move_home([b for part in away for b in part.blocks], self.target)
            self.moved += moved
            offset = 0
            for part in away:
                homes[id(part)] = slab, offset
                offset += part.nbytes
        for part in stay:
            self.moved += stay_home(part.blocks, homes[id(part)][0], self.target)
        for part in plan.streamed:
            part.is_shared = homes[id(part)][0].is_shared
        return homes

    def _make_parts(self, plan: Plan, homes: dict[int, tuple[_Slab, int]]) -> None:
        moved = {id(entry.block): entry for entry in self.moved}
        for part in plan.streamed:
            slab, offset = homes[id(part)]
            if self.frames is not None and part.place == "frames":
                storages = [moved[id(block)].base.untyped_storage() for block in part.blocks]
                tensors = [t for block in part.blocks for p in block.pieces for t in p.tensors]
                self.groups[id(part)] = FramedPart(
                    self.frames,
                    slab,
                    offset,
                    storages,
                    tensors,
                    part.written,
                    part.is_unwatched,
                    None if self.read_only or part.is_shared else self.announcer.in_round,
                )
            elif part.use == "slices" and part.place == "home":
                self.announcer.add_slices(part, slab, offset)

    def watch(self, watch: Watch, left: Container[int] = ()) -> None:
        """Count the calls of the streamed parts, except the parts with the ids in `left`."""
        self.announcer.watch = watch
        acquired = {id(part) for site in self.plan.sites for part in site.parts}
        for part in (part for part in self.plan.streamed if id(part) not in left):
            full = join_name(self.name, part.name) if part.name else self.name
            watch.add(part, full, self.announcer, id(part) in acquired)

    # --- what comes later -----------------------------------------------------------------

    def present(self) -> Iterator[tuple[Part, _Piece, Tensor]]:
        """Yield the tensors that still have the memory of their part."""
        for part in (*self.plan.resident, *self.plan.streamed):
            for piece in (piece for block in part.blocks for piece in block.pieces):
                memory = piece.storage._cdata
                for tensor in piece.tensors:
                    if tensor.untyped_storage()._cdata == memory:
                        yield part, piece, tensor

    def origins(self) -> Iterator[tuple[int, torch.device]]:
        """Yield the storage of each moved block, and the device to which its tensors return."""
        for entry in self.moved:
            yield entry.base.untyped_storage()._cdata, entry.origin

    def _adopt(self, tensors: Found) -> Found:
        """Add tensors that have the memory of a part to it, and return the others."""
        places = {piece.storage._cdata: (part, piece) for part, piece, _ in self.present()}
        others: Found = []
        for name, tensor in tensors:
            part, piece = places.get(tensor.untyped_storage()._cdata, (None, None))
            if part is None or piece is None:
                others.append((name, tensor))
                continue
            piece.tensors.append(tensor)
            piece.names.append(name)
            if id(part) in self.groups:
                self.groups[id(part)].follow(tensor)
        return others

    def let_go(self) -> None:
        """Forget the tensors that no longer have the memory of their part."""
        for part, tensors in self._left():
            for piece in (piece for block in part.blocks for piece in block.pieces):
                piece.keep({id(t) for t in tensors})
            if id(part) in self.groups:
                self.groups[id(part)].keep(tensors)

    def _left(self) -> list[tuple[Part, list[Tensor]]]:
        """The parts, each with the tensors that have its memory."""
        parts = self.plan.resident + self.plan.streamed
        left: dict[int, list[Tensor]] = {id(part): [] for part in parts}
        for part, _, tensor in self.present():
            left[id(part)].append(tensor)
        return [(part, left[id(part)]) for part in parts]

    def follow(self, model: nn.Module, watch: Watch, gone: set[int]) -> None:
        """Announce and count the calls of the modules that use the parts now.

        Tensors with the ids of `gone` have left the model.
        """
        self.places.know(model)
        for part in self.plan.streamed:
            self.places.note(part)
            if self.read_only or part.is_shared:
                self.versions.watch(part)
        self.places.leave_out(gone)
        self.versions.leave_out(gone)
        new = follow(model, self.plan, self.room, self._chosen_ids())
        self.plan.sites += new
        for site in new:
            self.hooks += self.announcer.attach(site)
        left = {id(part) for part, tensors in self._left() if {id(t) for t in tensors} <= gone}
        watch.forget(left)
        self.watch(watch, left)

    def _chosen_ids(self) -> dict[int, str]:
        return {id(module): "" for module in self._chosen}

    def take_in(self, model: nn.Module, tensors: Found) -> list[Part]:
        """Give new tensors a place in what the budget has left, and return their parts.

        After an error they have their memory from before.
        """
        self.places.know(model)
        mine = self.plan
        taken = mine.frames + sum(part.nbytes for part in mine.resident)
        new = _blocks(self._adopt(tensors), self.target.place)
        nbytes = sum(map(size_of, new))
        if self._share is not None:
            self.room = self._share.take_in([t for _, t in tensors], nbytes, taken)
        every = new + [block for part in mine.resident + mine.streamed for block in part.blocks]
        later = Later(new, max(0, self.room - taken), mine.frames)
        plan = make_plan(
            model, every, self._written(), self.room, self._chosen_ids(), {}, self.read_only, later
        )
        moved, hooks = len(self.moved), len(self.hooks)
        try:
            self._place(plan, model)
        except BaseException:
            self._take_out(plan, moved, hooks)
            if self._share is not None:
                self._share.total -= nbytes
            raise
        self.plan = Plan(
            mine.sites + plan.sites,
            mine.streamed + plan.streamed,
            mine.resident + plan.resident,
            plan.frames,
        )
        return [*plan.resident, *plan.streamed]

    def _take_out(self, plan: Plan, moved: int, hooks: int) -> None:
        """Undo _place(). `moved` and `hooks` count the moved blocks and the hooks before it."""
        for hook in self.hooks[hooks:]:
            hook.remove()
        move_back(self.moved[moved:])
        del self.hooks[hooks:], self.moved[moved:]
        for part in plan.streamed:
            if (group := self.groups.pop(id(part), None)) is not None:
                group.leave_frames()
            self.announcer.sliced.pop(id(part), None)
            self.places.drop(part)
            self.versions.drop(part)
        if self.frames is not None and not self.plan.frames:
            self.frames.close()
            self.frames = self.announcer.frames = None

    # --- memory that comes and goes -------------------------------------------------------

    def memory(self, is_suspended: bool) -> list[_Frames | _Slab]:
        """The device memory that is suspended, or with False the memory that is not."""
        frames: list[_Frames | _Slab] = []
        if self.frames is not None:
            counts, _ = self.frames.stats()
            frames += [self.frames] if (counts["kept"] < counts["room"]) == is_suspended else []
        return [*frames, *(slab for slab in self.slabs() if slab.is_suspended == is_suspended)]

    def slabs(self) -> list[_Slab]:
        """The memory of the parts that stay on the device."""
        slabs = {id(entry.slab): entry.slab for entry in self.moved}
        return [slab for slab in slabs.values() if slab is not None]

    def bytes_suspended(self) -> int:
        """The bytes of the device that are given back now."""
        counts = _NO_FRAMES if self.frames is None else self.frames.stats()[0]
        slabs = (slab.nbytes for slab in self.slabs() if slab.is_suspended)
        return counts["room"] - counts["kept"] + sum(slabs)

    # --- the steps, and the end -------------------------------------------------------------

    def can_be_exceeded(self) -> bool:
        """True if gradients and state may need more than the budget."""
        return self._share is not None and self._share.can_be_exceeded()

    def gradient_homes(self, known: set[int]) -> list[GradientHome]:
        """Homes for the gradients of the parameters, except those with these ids."""
        if self.gradient_room is None:
            self.gradient_room = GradientRoom(self.target, self.share)
        wanted = (p for p in self.share.all_that_may_train() if id(p) not in known)
        homes = [GradientHome(parameter, self.gradient_room) for parameter in wanted]
        self.share.homes += [(home.parameter, home) for home in homes]
        return homes

    def step_parts(self) -> list[StepPart]:
        """The trained parameters, part by part, in the same objects each time."""
        index = {id(p): i for i, p in enumerate(self.share.trained)}
        streamed = set(map(id, self.plan.streamed))
        parts: list[StepPart] = []
        for part in self.plan.resident + self.plan.streamed:
            tensors = [t for block in part.blocks for p in block.pieces for t in p.tensors]
            mine = sorted((t for t in tensors if id(t) in index), key=lambda t: index[id(t)])
            if part.is_shared and id(part) in streamed:
                if any(map(self.share.trains, mine)):
                    raise RuntimeError(_TRAINED.format(part.name))
                continue
            if not mine:
                continue
            step = self.steps.setdefault(id(part), StepPart(mine, self.target, None))
            step.parameters = mine
            step.group = self.groups.get(id(part)) if id(part) in streamed else None
            parts.append(step)
        return parts

    def stop(self) -> None:
        """Remove the hooks, release everything, and close the frames."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.announcer.stop()
        if self.frames is not None:
            with contextlib.suppress(CUDAError):
                self.frames.settle(self.target.stream() or 0)
        self.target.wait()
        framed: list[FramedPart | SlicedPart] = [
            *self.groups.values(),
            *self.announcer.sliced.values(),
        ]
        for part in framed:
            part.go_home(self.target.place)
            part.data.end()
        if self.final is None:
            self.final = self.numbers()
        if self.frames is not None:
            self.frames.close()

    def forget(self) -> None:
        """Drop the references to the memory of the parts."""
        self.plan = Plan([], [], [])
        self.groups.clear()
        self.announcer.sliced.clear()
        self.steps.clear()
        self.moved.clear()
        self._empty_before.clear()
        self.versions.forget()

    def written(self) -> tuple[list[str], list[str]]:
        """The names of written tensors: in memory of this process alone, and in shared memory."""
        return self.versions.written({id(p) for p in self.plan.streamed if p.is_shared})

    def numbers(self) -> dict[str, int]:
        """The counters of this device, final once it has ended."""
        if self.final is not None:
            return self.final
        resident = sum(part.nbytes for part in self.plan.resident)
        is_away = any(slab.is_suspended for slab in self.slabs())
        counts = dict(_NO_FRAMES)
        if self.frames is not None:
            counts, self.last_error = self.frames.stats()
        counts["acquired"] += self.announcer.on_device
        counts["hits"] += self.announcer.on_device
        counts["acquired"] += self.announcer.at_home
        counts["mapped"] += self.announcer.at_home
        return {
            "budget": resident + counts.pop("room"),
            "held": (0 if is_away else resident) + counts.pop("present"),
            "groups": counts.pop("parts"),
            "streamed": sum(part.nbytes for part in self.plan.streamed),
            "resident": resident,
            **counts,
        }


_NO_FRAMES = dict.fromkeys(
    (
        "room",
        "present",
        "kept",
        "parts",
        "acquired",
        "hits",
        "mapped",
        "loads",
        "ahead",
        "drops",
        "bytes_loaded",
        "bytes_home",
        "failures",
    ),
    0,
)
