"""Weights streamed by hand: from pinned memory, in a fixed order, through buffers on the device.

The modules that the budget has room for, beside the buffers, stay on the device. They are spread
evenly along the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .common import Place, nbytes_of

ALIGNMENT = 512


def laid_out(tensors: Sequence[Any]) -> tuple[list[int], int]:
    """The offset of each tensor in one flat buffer, and the size of the buffer in bytes."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def views(flat: Any, tensors: Sequence[Any], offsets: Sequence[int]) -> list[Any]:
    """The parts of a flat buffer that are like these tensors."""
    return [
        flat[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]


class Ring:
    """Buffers on the device, filled in turn on a side stream from homes in a fixed order."""

    def __init__(self, place: Place, homes: list[Any], slots: int) -> None:
        self.place, self.homes = place, homes
        largest = max(home.numel() for home in homes)
        self.slots = [
            torch.empty(largest, dtype=torch.uint8, device=place.device) for _ in range(slots)
        ]
        self.side = place.stream()
        self.filled = [place.event() for _ in range(slots)]
        self.used = [place.event() for _ in range(slots)]
        self.copies = self.uses = 0  # over all rounds

    def fill(self) -> None:
        """Queue one copy."""
        slot, home = self.copies % len(self.slots), self.homes[self.copies % len(self.homes)]
        with self.place.on(self.side):
            self.side.wait_event(self.used[slot])
            self.slots[slot][: home.numel()].copy_(home, non_blocking=True)
            self.filled[slot].record(self.side)
        self.copies += 1

    def enter(self, ahead: int) -> int:
        """The buffer of the next use. Queues copies until so many are queued from this use on."""
        while self.copies < self.uses + ahead:
            self.fill()
        slot = self.uses % len(self.slots)
        self.place.current().wait_event(self.filled[slot])
        return slot

    def leave(self) -> None:
        """The end of a use."""
        self.used[self.uses % len(self.slots)].record()
        self.uses += 1


class Streamed:
    """Modules that are called in a fixed order, their weights in one pinned buffer each."""

    def __init__(self, place: Place, units: list[Any], slots: int) -> None:
        self.parameters = [list(unit.parameters()) for unit in units]
        self.offsets, homes = [], []
        for mine in self.parameters:
            offsets, nbytes = laid_out(mine)
            home = place.pinned(nbytes)
            for view, parameter in zip(views(home, mine, offsets), mine, strict=True):
                view.copy_(parameter.data)
                parameter.data = view
            homes.append(home)
            self.offsets.append(offsets)
        place.wait()
        place.give_back()
        self.ring = Ring(place, homes, slots)
        self.views: dict[tuple[int, int], list[Any]] = {}
        for number, unit in enumerate(units):
            unit.register_forward_pre_hook(lambda *_, number=number: self.before(number))
            unit.register_forward_hook(lambda *_: self.ring.leave())

    def before(self, unit: int) -> None:
        """Point the weights of a module to the buffer that has them."""
        if unit != self.ring.uses % len(self.ring.homes):
            raise RuntimeError(f"module {unit} was called out of its turn")
        key = self.ring.enter(len(self.ring.slots)), unit
        if key not in self.views:
            flat = self.ring.slots[key[0]]
            self.views[key] = views(flat, self.parameters[unit], self.offsets[unit])
        for parameter, view in zip(self.parameters[unit], self.views[key], strict=True):
            parameter.data = view


def spread_out(count: int, kept: int) -> set[int]:
    """The numbers of the modules that stay on the device, spread evenly."""
    return {int((number + 0.5) * count / kept) for number in range(kept)}


def stream(place: Place, model: Any, units: list[Any], budget: int, slots: int = 2) -> Streamed:
    """Stream the modules of a model so that all its weights take no more than the budget."""
    sizes = [nbytes_of(unit.parameters()) for unit in units]
    room = budget - (nbytes_of(model.parameters()) - sum(sizes)) - slots * max(sizes)
    kept: set[int] = set()
    for count in range(1, len(units)):
        more = spread_out(len(units), count)
        if sum(sizes[number] for number in more) > room:
            break
        kept = more
    return Streamed(place, [unit for n, unit in enumerate(units) if n not in kept], slots)
