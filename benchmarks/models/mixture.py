"""A mixture of experts of 6 GB, with a quarter as its budget: a token uses 2 of 16 in a layer."""

from __future__ import annotations

from typing import Any

import torch

from .common import GIB, Job, Measured, Meter, Place, nbytes_of
from .language import Weights
from .process import library

NEED = (9 * GIB, 20 * GIB)  # of the device and of the host, at full size


def mixtral(place: Place) -> Any:
    """The shape of Mixtral, smaller; transformers keeps the experts of a layer in two tensors."""
    shape = {"hidden_size": 2048, "intermediate_size": 3584, "num_local_experts": 16}
    shape |= {"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000}
    if place.tiny:
        shape = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 8}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    layers = 3 if place.tiny else place.layers(8)
    shape |= {"num_experts_per_tok": 2, "num_hidden_layers": layers}
    return library("transformers").MixtralConfig(experts_implementation="eager", **shape)


class Expert(torch.nn.Module):
    """One expert with modules of its own."""

    def __init__(self, gate_up: Any, down: Any, act: Any) -> None:
        super().__init__()
        self.gate_up = torch.nn.Linear(1, 1, bias=False)
        self.down = torch.nn.Linear(1, 1, bias=False)
        self.gate_up.weight = torch.nn.Parameter(gate_up.clone(), requires_grad=False)
        self.down.weight = torch.nn.Parameter(down.clone(), requires_grad=False)
        self.act = act

    def forward(self, states: Any) -> Any:
        gate, up = self.gate_up(states).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


class Experts(torch.nn.Module):
    """The loop of transformers over the experts of a layer, which are modules."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.count = fused.num_experts
        self.fill(fused, zip(fused.gate_up_proj.data, fused.down_proj.data, strict=True))

    def fill(self, fused: Any, weights: Any) -> None:
        made = (Expert(gate_up, down, fused.act_fn) for gate_up, down in weights)
        self.members = torch.nn.ModuleList(made)

    def run(self, number: int, states: Any) -> Any:
        return self.members[number](states)

    def chosen(self, numbers: list[int]) -> None:
        """Called when the router has chosen."""

    def forward(self, states: Any, indices: Any, weights: Any) -> Any:
        result = torch.zeros_like(states)
        mask = torch.nn.functional.one_hot(indices, num_classes=self.count).permute(2, 1, 0)
        numbers = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero().flatten().tolist()
        self.chosen(numbers)
        for number in numbers:
            position, token = torch.where(mask[number])
            found = self.run(number, states[token]) * weights[token, position, None]
            result.index_add_(0, token, found.to(result.dtype))
        return result


class Cache:
    """The experts that were used last, on the device. They are copied there once the router has
    chosen."""

    def __init__(self, place: Place, nbytes: int, room: int) -> None:
        self.place, count = place, max(3, room // nbytes)
        self.slots = torch.empty(count, nbytes, dtype=torch.uint8, device=place.device)
        self.slot_of: dict[tuple[int, int], int] = {}  # of an expert of a layer, latest use last
        self.free = list(range(count))
        self.side = place.stream()
        self.used = [place.event() for _ in range(count)]
        self.filled = [place.event() for _ in range(count)]

    def bring(self, key: tuple[int, int], home: Any, keep: set[tuple[int, int]]) -> None:
        """Queue the copy of an expert if it is not there, unless only experts to keep could make
        room."""
        if key in self.slot_of:
            self.slot_of[key] = self.slot_of.pop(key)
            return
        if not self.free:
            oldest = next((each for each in self.slot_of if each not in keep), None)
            if oldest is None:
                return
            self.free.append(self.slot_of.pop(oldest))
        slot = self.slot_of[key] = self.free.pop()
        with self.place.on(self.side):
            self.side.wait_event(self.used[slot])
            self.slots[slot].copy_(home, non_blocking=True)
            self.filled[slot].record(self.side)


class CachedExperts(Experts):
    """Experts in pinned memory, which run from the cache."""

    def __init__(self, fused: Any, cache: Cache, layer: int) -> None:
        self.cache, self.layer = cache, layer
        super().__init__(fused)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # no modules and no parameters here

    def fill(self, fused: Any, weights: Any) -> None:
        self.act, self.homes = fused.act_fn, []
        self.shapes = fused.gate_up_proj.shape[1:], fused.down_proj.shape[1:]
        self.dtype, self.first = fused.down_proj.dtype, fused.gate_up_proj[0].nbytes
        for gate_up, down in weights:
            home = self.cache.place.pinned(gate_up.nbytes + down.nbytes)
            for view, tensor in zip(self.views(home), (gate_up, down), strict=True):
                view.copy_(tensor)
            self.homes.append(home)

    def views(self, flat: Any) -> list[Any]:
        parts = flat[: self.first], flat[self.first :]
        return [
            part.view(self.dtype).view(shape)
            for part, shape in zip(parts, self.shapes, strict=True)
        ]

    def chosen(self, numbers: list[int]) -> None:
        keep = {(self.layer, number) for number in numbers}
        for number in numbers:
            self.cache.bring((self.layer, number), self.homes[number], keep)

    def run(self, number: int, states: Any) -> Any:
        self.cache.bring((self.layer, number), self.homes[number], set())
        slot = self.cache.slot_of[self.layer, number]
        self.cache.place.current().wait_event(self.cache.filled[slot])
        gate_up, down = self.views(self.cache.slots[slot])
        gate, up = torch.nn.functional.linear(states, gate_up).chunk(2, dim=-1)
        found = torch.nn.functional.linear(self.act(gate) * up, down)
        self.cache.used[slot].record()
        return found


class Mixture(Weights):
    """The contenders; experts fused in two tensors, or as modules."""

    def as_modules(self, model: Any) -> Any:
        for layer in self.units(model):
            layer.mlp.experts = Experts(layer.mlp.experts)
        return model

    def by_hand(self, meter: Meter) -> Measured:
        model = self.made()
        layers = self.units(model)
        fused = [layer.mlp.experts for layer in layers]
        one = fused[0].gate_up_proj[0].nbytes + fused[0].down_proj[0].nbytes
        inside = nbytes_of(parameter for each in fused for parameter in each.parameters())
        outside = nbytes_of(model.parameters()) - inside
        cache = Cache(self.place, one, self.limit(model) - outside)
        del fused
        for number, layer in enumerate(layers):
            layer.mlp.experts = CachedExperts(layer.mlp.experts, cache, number)
        self.place.give_back()
        return self.measured(meter, model)

    def contenders(self) -> dict[str, Any]:
        found = super().contenders()
        found["resident, as modules"] = lambda meter: self.measured(
            meter, self.as_modules(self.made())
        )
        found["ours, read only"] = lambda meter: self.ours(meter, read_only=True)
        found["ours, as modules"] = lambda meter: self.ours(meter, self.as_modules)
        return found


def jobs(place: Place) -> list[Job]:
    """The job of this group; none without transformers."""
    if not library("transformers.models.mixtral.modeling_mixtral"):
        return []
    mixture = Mixture(place, mixtral(place), 0.25, "model.layers")
    size = "tiny" if place.tiny else f"{6 * place.share:.1f} GB in a quarter"
    return [Job(f"mixture of experts, {size}", mixture.contenders())]
