"""A training step of 1.1 billion parameters with AdamW, whose state exceeds the budget.

The budget is a share of parameters, gradients and both averages. By hand, the averages come from
pinned memory and go back: during the step, or during the backward pass, which frees gradients.
"""

from __future__ import annotations

from typing import Any

import torch

import managedmem.torch as ours

from .by_hand import laid_out, views
from .common import GIB, Job, Measured, Meter, Place, nbytes_of
from .process import library

NEED = (14 * GIB, 20 * GIB)  # of the device and of the host, at full size
SLOTS = 3
STEPS = 6


def made(place: Place) -> Any:
    """The shape of TinyLlama, made on the device."""
    shape = {"hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 32000}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 4}
    if place.tiny:
        shape = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    transformers = library("transformers")
    config = transformers.LlamaConfig(
        **shape, num_hidden_layers=3 if place.tiny else place.layers(22)
    )
    torch.manual_seed(7)
    with torch.device(place.device):
        model = transformers.LlamaForCausalLM._from_config(config, dtype=place.dtype)
    place.give_back()
    return model.train()


def adamw(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def stepped(place: Place, meter: Meter, model: Any, optimizer: Any) -> Measured:
    """Steps that are timed, after three that are not; the losses of all."""
    # Otherwise the backward pass of attention would give other numbers each time.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    ids = (torch.arange(2 * (32 if place.tiny else 512), device=place.device) * 31) % 250
    losses: list[Any] = []

    def step() -> None:
        optimizer.zero_grad()
        loss = model(input_ids=ids.view(2, -1), labels=ids.view(2, -1), use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())

    step()
    step()
    meter.watch(step)
    times = place.timed(step, 2 if place.tiny else STEPS)
    return Measured({("a step", "ms"): times}, losses)


class Averages:
    """Both averages of each parameter in pinned memory, and the buffers that they pass through."""

    def __init__(self, place: Place, model: Any) -> None:
        self.place, self.optimizer = place, adamw(model)
        self.group = self.optimizer.param_groups[0]
        self.order = list(self.group["params"])
        self.homes: dict[Any, tuple[Any, list[int]]] = {}
        for parameter in self.order:
            offsets, nbytes = laid_out([parameter, parameter])
            self.homes[parameter] = place.pinned(nbytes).zero_(), offsets
            self.optimizer.state[parameter] = {"step": torch.tensor(0.0)}
        largest = max(home.numel() for home, _ in self.homes.values())
        self.slots = [
            torch.empty(largest, dtype=torch.uint8, device=place.device) for _ in range(SLOTS)
        ]
        self.inward, self.outward = place.stream(), place.stream()
        self.filled = [place.event() for _ in range(SLOTS)]
        self.free = [place.event() for _ in range(SLOTS)]
        self.begin()

    def begin(self) -> None:
        """The start of a round over all parameters."""
        self.done: list[Any] = []
        self.held: list[Any] = [None] * SLOTS
        self.copies = 0

    def fill(self, number: int, parameter: Any) -> None:
        """Queue the copy to the device."""
        slot, home = number % SLOTS, self.homes[parameter][0]
        with self.place.on(self.inward):
            self.inward.wait_event(self.free[slot])
            self.slots[slot][: home.numel()].copy_(home, non_blocking=True)
            self.filled[slot].record(self.inward)
        self.held[slot] = parameter

    @torch.no_grad()
    def update(self, parameter: Any) -> None:
        """Step one parameter. Averages are copied ahead in the order of the last round, others at
        once."""
        number = len(self.done)
        slot = number % SLOTS
        while self.copies < min(number + SLOTS, len(self.order)):
            self.fill(self.copies, self.order[self.copies])
            self.copies += 1
        if self.held[slot] is not parameter:
            self.fill(number, parameter)
        home, offsets = self.homes[parameter]
        average, square = views(self.slots[slot], [parameter, parameter], offsets)
        self.place.current().wait_event(self.filled[slot])
        self.optimizer.state[parameter].update(exp_avg=average, exp_avg_sq=square)
        self.group["params"] = [parameter]
        self.optimizer.step()
        self.outward.wait_stream(self.place.current())
        with self.place.on(self.outward):
            home.copy_(self.slots[slot][: home.numel()], non_blocking=True)
            self.free[slot].record(self.outward)
        self.done.append(parameter)
        if len(self.done) == len(self.order):
            self.order = self.done
            self.inward.wait_stream(self.outward)
            self.begin()


class InStep(Averages):
    """Everything in step(); parameters and gradients stay on the device."""

    def zero_grad(self) -> None:
        for parameter in self.homes:
            parameter.grad = None

    def step(self) -> None:
        for parameter in list(self.order):
            self.update(parameter)


class InBackward(Averages):
    """A parameter is stepped as soon as it has its gradient, which is freed then."""

    def __init__(self, place: Place, model: Any) -> None:
        super().__init__(place, model)
        self.order.reverse()  # a guess, until the first pass shows the order
        for parameter in self.order:
            parameter.register_post_accumulate_grad_hook(self.now)

    def now(self, parameter: Any) -> None:
        self.update(parameter)
        parameter.grad = None

    def zero_grad(self) -> None: ...

    def step(self) -> None: ...


class Training:
    """The contenders."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def resident(self, meter: Meter) -> Measured:
        model = made(self.place)
        return stepped(self.place, meter, model, adamw(model))

    def ours(self, meter: Meter, share: float) -> Measured:
        model = self.place.to_cpu(made(self.place))
        optimizer = adamw(model)
        budget = int(4 * nbytes_of(model.parameters()) * share)
        handle = ours.offload(model, "cuda:0", budget=budget, optimizer=optimizer)
        found = stepped(self.place, meter, model, optimizer)
        if handle.last_error:
            raise RuntimeError(handle.last_error)
        return found

    def by_hand(self, meter: Meter, order: type[Averages]) -> Measured:
        model = made(self.place)
        return stepped(self.place, meter, model, order(self.place, model))


def jobs(place: Place) -> list[Job]:
    """The job of this group; none without transformers."""
    if not library("transformers.models.llama.modeling_llama"):
        return []
    training = Training(place)
    contenders = {
        "resident": training.resident,
        "ours, a third": lambda meter: training.ours(meter, 1 / 3),
        "ours, an eighth": lambda meter: training.ours(meter, 1 / 8),
        "by hand, in the step": lambda meter: training.by_hand(meter, InStep),
        "by hand, in the backward pass": lambda meter: training.by_hand(meter, InBackward),
    }
    size = "tiny" if place.tiny else f"{1.1 * place.share:.1f} billion parameters"
    hand = tuple(name for name in contenders if name.startswith("by hand"))
    return [Job(f"AdamW, {size}", contenders, hand)]
