"""What offload() keeps for one device: the places of its parts, their memory, and the hooks.

Owns the order in which tensors move, in both directions.
"""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from managedmem import CUDAError
from managedmem._managedmem import _Frames, _Slab
from managedmem.torch._moving import _blocks
from managedmem.torch._offload_choice import Place
from managedmem.torch._offload_coverage import Watch
from managedmem.torch._offload_frames import FramedPart
from managedmem.torch._offload_hooks import Announcer, Places, Versions
from managedmem.torch._offload_places import (
    Moved,
    Target,
    home_of,
    move_home,
    move_to_device,
    size_of,
    stay_home,
)
from managedmem.torch._offload_plan import Plan, make_plan
from managedmem.torch._offload_shares import Share
from managedmem.torch._offload_slices import SlicedPart
from managedmem.torch._offload_together import roots_of
from managedmem.torch._offload_visits import StepPart
from managedmem.torch._tensors import Found


class DeviceLane:
    """The streamed parts of one device."""

    def __init__(
        self,
        target: Target,
        model: nn.Module,
        found: Found,
        budget: int,
        optimizer: torch.optim.Optimizer | None,
        chosen: dict[int, str],
        asked: dict[int, Place],
        read_only: bool,
    ) -> None:
        self.target = target
        self.budget = budget
        self.read_only = read_only
        all_blocks = _blocks(found, target.place)
        total = sum(size_of(block) for block in all_blocks)
        room = budget
        written: set[int] = set()
        if optimizer is not None:
            self.share = Share(optimizer, [t for _, t in found], total, budget)
            room = self.share.for_parameters()
            written = {id(p) for p in self.share.trained}
        self.plan: Plan = make_plan(model, all_blocks, written, room, chosen, asked, read_only)
        self.moved: list[Moved] = []
        self.groups: dict[int, FramedPart] = {}
        self.steps: dict[int, StepPart] = {}  # by the id of a part
        self.hooks: list[RemovableHandle] = []
        self.frames = self._make_frames()
        self.versions = Versions()
        self.places = Places(model, optimizer is not None)
        self.announcer = Announcer(
            target, self.groups, self.frames, self.versions, self.places, read_only
        )
        self.final: dict[str, int] | None = None
        self.last_error: str | None = None

    def _make_frames(self) -> _Frames | None:
        """Frames for the streamed parts, if there are any."""
        if not self.plan.frames:
            return None
        return _Frames(
            self.target.device.device_id, self.plan.frames, self.target.place.type == "cpu"
        )

    def fill(self, model: nn.Module) -> None:
        """Move what stays to the device, and the other tensors home."""
        stays = [block for part in self.plan.resident for block in part.blocks]
        self.moved += move_to_device(stays, self.target)
        self._make_parts(self._bring_home())
        for part in self.plan.streamed:
            self.places.note(part)
            if self.read_only:
                self.versions.watch(part)
        self.target.wait()  # other streams use it too
        self.announcer.start()
        for site in self.plan.sites:
            self.hooks += self.announcer.attach(site)
        for root in roots_of(model) if self.frames is not None else ():
            self.hooks += self.announcer.attach_rounds(root)

    def _bring_home(self) -> dict[int, tuple[_Slab, int]]:
        """The home of each streamed part by its id: memory with an offset."""
        homes = {
            id(part): home
            for part in self.plan.streamed
            if (home := home_of(part.blocks, self.target)) is not None
        }
        stay = [part for part in self.plan.streamed if id(part) in homes]
        away = [part for part in self.plan.streamed if id(part) not in homes]
        if away:
            slab, moved = move_home([b for part in away for b in part.blocks], self.target)
            self.moved += moved
            offset = 0
            for part in away:
                homes[id(part)] = slab, offset
                offset += part.nbytes
        for part in stay:
            self.moved += stay_home(part.blocks, homes[id(part)][0], self.target)
        return homes

    def _make_parts(self, homes: dict[int, tuple[_Slab, int]]) -> None:
        moved = {id(entry.block): entry for entry in self.moved}
        for part in self.plan.streamed:
            slab, offset = homes[id(part)]
            if self.frames is not None and part.place == "frames":
                storages = [moved[id(block)].base.untyped_storage() for block in part.blocks]
                tensors = [t for block in part.blocks for p in block.pieces for t in p.tensors]
                self.groups[id(part)] = FramedPart(
                    self.frames, slab, offset, storages, tensors, part.written, part.is_unwatched
                )
            elif part.use == "slices" and part.place == "home":
                self.announcer.add_slices(part, slab, offset)

    def watch(self, watch: Watch, name: str) -> None:
        """Count the calls of the streamed parts; `name` is the submodule on this device."""
        self.announcer.watch = watch
        acquired = {id(part) for site in self.plan.sites for part in site.parts}
        for part in self.plan.streamed:
            full = f"{name}.{part.name}" if name and part.name else name or part.name
            watch.add(part, full, self.announcer, id(part) in acquired)

    def step_parts(self) -> list[StepPart]:
        """The trained parameters, part by part, in the same objects each time."""
        index = {id(p): i for i, p in enumerate(self.share.trained)}
        streamed = set(map(id, self.plan.streamed))
        parts: list[StepPart] = []
        for part in self.plan.resident + self.plan.streamed:
            tensors = [t for block in part.blocks for p in block.pieces for t in p.tensors]
            mine = sorted((t for t in tensors if id(t) in index), key=lambda t: index[id(t)])
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
        self.versions.forget()

    def numbers(self) -> dict[str, int]:
        """The counters of this device, final once it has ended."""
        if self.final is not None:
            return self.final
        resident = sum(part.nbytes for part in self.plan.resident)
        counts = dict(_NO_FRAMES)
        if self.frames is not None:
            counts, self.last_error = self.frames.stats()
        counts["acquired"] += self.announcer.on_device
        counts["hits"] += self.announcer.on_device
        counts["acquired"] += self.announcer.at_home
        counts["mapped"] += self.announcer.at_home
        return {
            "budget": resident + counts.pop("room"),
            "held": resident + counts.pop("present"),
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
