"""Weights of 6.8 GB that leave the device and come back: times, and free memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import managedmem.torch as ours
from managedmem import Device

from .common import GIB, Job, Measured, Meter, Place, nbytes_of
from .process import library

NEED = (8 * GIB, 24 * GIB)  # of the device and of the host, at full size
TIMES = 4  # that the weights leave; the first time allocates memory on the host for them
LAYERS = 203  # of 32 MiB

Change = Callable[[], object]


def made(place: Place) -> Any:
    """Layers with random weights, the same in every process."""
    torch.manual_seed(7)
    width = 256 if place.tiny else 4096
    with torch.device(place.device):
        count = 4 if place.tiny else place.layers(LAYERS)
        layers = [nn.Linear(width, width, bias=False) for _ in range(count)]
        model = nn.Sequential(*layers).to(place.dtype)
    place.give_back()
    return model.requires_grad_(False)


def timed(change: Change, place: Place) -> float:
    place.wait()
    begin = time.perf_counter_ns()
    change()
    place.wait()
    return float(time.perf_counter_ns() - begin)


@torch.inference_mode()
def measured(meter: Meter, model: Any, suspend: Change, resume: Change) -> Measured:
    """The first time apart, and the free memory around the last time."""
    place = meter.place
    width = model[0].in_features
    given = torch.linspace(-1, 1, width, device=place.device, dtype=place.dtype)
    before = meter.watch(lambda: model(given))
    place.give_back()
    free, there, back = Device(0).memory_info.free, [], []
    for _ in range(TIMES):
        there.append(timed(suspend, place))
        meanwhile = Device(0).memory_info.free
        back.append(timed(resume, place))
    afterwards = Device(0).memory_info.free
    if not torch.equal(model(given), before):
        raise RuntimeError("the weights have changed")
    values = {("the first suspension", "ms"): there[:1], ("a suspension", "ms"): there[1:]}
    values |= {("resuming", "ms"): back, ("free before", "MB"): [free]}
    values |= {("free meanwhile", "MB"): [meanwhile], ("free afterwards", "MB"): [afterwards]}
    return Measured(values, [before])


def by_hand(meter: Meter) -> Measured:
    """Copies in pinned memory, which stay; what torch keeps goes back to the driver."""
    place, model = meter.place, made(meter.place)
    weights = [layer.weight for layer in model]
    homes: list[Any] = []

    def suspend() -> None:
        if not homes:
            homes.extend(place.pinned(w.nbytes).view(w.dtype).view(w.shape) for w in weights)
        for weight, home in zip(weights, homes, strict=True):
            home.copy_(weight.data, non_blocking=True)
        place.wait()
        for weight in weights:
            weight.data = torch.empty(0, device=place.device, dtype=place.dtype)
        place.give_back()

    def resume() -> None:
        for weight, home in zip(weights, homes, strict=True):
            weight.data = home.to(place.device, non_blocking=True, copy=True)

    return measured(meter, model, suspend, resume)


def offloaded(meter: Meter, share: float) -> Measured:
    """offload() with this share of the weights in the budget."""
    model = meter.place.to_cpu(made(meter.place))
    budget = int(share * nbytes_of(model.parameters()))
    options: dict[str, Any] = {"budget": budget, "read_only": True, "suspendable": True}
    with ours.offload(model, "cuda:0", **options) as handle:
        found = measured(meter, model, handle.suspend, handle.resume)
        if handle.last_error:
            raise RuntimeError(handle.last_error)
    return found


def saver(meter: Meter) -> Measured:
    """torch_memory_saver, with the contents kept on the host."""
    memory = library("torch_memory_saver").torch_memory_saver
    memory.hook_mode = "torch"
    with memory.region(enable_cpu_backup=True):
        model = made(meter.place)
    return measured(meter, model, memory.pause, memory.resume)


def jobs(place: Place) -> list[Job]:
    """The only job: ours with all weights on the device, and with half, beside others."""
    contenders: dict[str, Callable[[Meter], Measured]] = {
        "by hand": by_hand,
        "ours": partial(offloaded, share=1.1),
        "ours, half streamed": partial(offloaded, share=0.5),
    }
    if not place.tiny and library("torch_memory_saver") is not None:
        contenders["torch_memory_saver"] = saver
    return [Job("weights, tiny" if place.tiny else "weights, 6.8 GB", contenders)]
