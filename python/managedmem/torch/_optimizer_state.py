"""offload_optimizer: the state of an optimizer at home, and its steps on the device.

Owns the public function and its handle. Parameters and gradients stay where they are, also with
fully_shard(), where each process steps its shards.
"""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor, optim

import managedmem
from managedmem import Device
from managedmem._limits import read_budget
from managedmem.torch._offload_arguments import checked_optimizer, parameters_of, target_of
from managedmem.torch._offload_children import holder_of
from managedmem.torch._offload_copies import Handle
from managedmem.torch._offload_optimizer import SplitStep, can_split
from managedmem.torch._offload_places import Target
from managedmem.torch._offload_room import left_free
from managedmem.torch._offload_shares import copies_of, state_of
from managedmem.torch._offload_visits import StepPart
from managedmem.torch._tensors import shard_of

_KEPT = "_managedmem_offload"  # an attribute of the optimizer, which keeps the handle
_PART = 16 << 20  # bytes of parameters whose state shares one home


def offload_optimizer(
    optimizer: optim.Optimizer,
    *,
    budget: int | str,
    device: Device | torch.device | str | int | None = None,
) -> OffloadedOptimizer:
    """Keep the state of an optimizer on the host, and step on the device.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        An optimizer that updates each parameter by itself: SGD, Adam, AdamW, Adamax, NAdam, RAdam,
        RMSprop, Adagrad, Adadelta, ASGD or Rprop of torch. Its parameters may be plain or shards of
        fully_shard(), under DistributedDataParallel or without it.
    budget : int or str
        The most bytes of state and scratch on each device: a number, text such as "2 GiB", or
        "auto": what is free, less a fifth of it. Scratch comes first, up to 256 MiB; state that
        the rest has room for stays on the device.
    device : Device, torch.device, str or int, optional
        The device that stands for the GPU on the emulated driver, where parameters are CPU tensors.
        By default each parameter's own device.

    optimizer.step() copies the state of some parameters at a time to scratch memory on the device
    and back, in both directions at once. Its numbers are the same as without offload_optimizer().
    State that the first step makes goes home part by part, to page-locked memory of exactly its
    size. state_dict(), load_state_dict(), schedulers, new groups and torch.distributed.checkpoint
    work as before. Parameters and gradients stay where they are; offload() moves these too.

    Returns a handle, which is a context manager, and which the optimizer keeps. Raises TypeError
    and ValueError for an optimizer that cannot step in parts, for parameters that are on no CUDA
    device or that offload() holds, and for bad budgets; after an error nothing has changed. If
    the driver refuses memory at home, state stays on the device, and `failures` counts it. No other
    thread may use the optimizer during the call. Driver: cuMemHostRegister, cuMemcpyAsync,
    cuEventRecord, cuStreamWaitEvent.
    """
    wanted = read_budget(budget)
    inner = checked_optimizer(optimizer)
    if inner is None:
        raise TypeError("optimizer must be a torch.optim.Optimizer, got None")
    if OffloadedOptimizer.of(inner) is not None:
        raise ValueError(
            "the state of the optimizer is offloaded already: call remove() on its handle first, "
            "which managedmem.torch.OffloadedOptimizer.of() returns"
        )
    place = None if device is None else target_of(device)
    targets = {id(p): _target_of(p, place) for p in parameters_of(inner)}
    if not targets:
        raise ValueError(f"optimizer ({type(inner).__name__}) has no parameters")
    for parameter in parameters_of(inner):
        if (holder := holder_of(shard_of(parameter))) is not None:
            raise ValueError(
                f"the optimizer trains {holder[0]!r} of an offloaded model ({holder[1]}): "
                "offload(model, ..., optimizer=optimizer) keeps its state on the host too"
            )
    if not can_split(inner, inner.step, hooks=True):
        raise ValueError(
            "optimizer must update each parameter by itself, as AdamW or SGD of torch, with its "
            f"own step() and without differentiable=True, got {type(inner).__name__}"
        )
    limit = wanted or min(map(left_free, set(targets.values())))
    handle = object.__new__(OffloadedOptimizer)
    handle._start(inner, limit, place)
    return handle


def _target_of(parameter: Tensor, place: Target | None) -> Target:
    """The device of a parameter; `place` stands for it on the emulated driver."""
    if managedmem._managedmem._driver_info()["emulated"]:
        if parameter.is_cpu:
            return place or target_of(Device())
    elif parameter.is_cuda and place in (None, target_of(parameter.device)):
        return target_of(parameter.device)
    elsewhere = "" if place is None else f", not on {place.device}"
    raise ValueError(
        f"a parameter of shape {tuple(parameter.shape)} is on {parameter.device}{elsewhere}: move "
        "the model to the device, and make the optimizer, before offload_optimizer()"
    )


# --- one device ---------------------------------------------------------------------------


def state_tensors(optimizer: optim.Optimizer) -> list[Tensor]:
    """All tensors of the state, without step counts; for DTensors, their shards."""
    return [t for p in list(optimizer.state) for _, t in state_of(optimizer, p)]


class _Lane:
    """The parameters of one device, and the budget for their state."""

    def __init__(self, optimizer: optim.Optimizer, target: Target, budget: int) -> None:
        self._optimizer = weakref.ref(optimizer)  # weak: it keeps the handle
        self.target = target
        self.room = budget
        self.divisions = 0
        self.state_stays = False
        self._seen: object = None
        self._part_of: dict[int, StepPart] = {}  # by the ids of parameters
        self._open: StepPart | None = None  # has room for more parameters

    @property
    def share(self) -> _Lane:
        """The division of the budget: this object, because parameters take nothing of it."""
        return self

    @property
    def optimizer(self) -> optim.Optimizer:
        """The optimizer, which is alive during its steps and while it is wrapped."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def follow(self) -> None:
        """Divide again if the groups, or what is trained, have changed."""
        mine = self.parameters()
        seen = [(id(p), p.requires_grad) for p in mine], len(self.optimizer.state)
        if seen != self._seen:
            self._seen = seen
            self.divisions += 1
            self.state_stays = sum(map(self._state_bytes, mine)) <= self.room

    def _state_bytes(self, parameter: Tensor) -> int:
        there = sum(t.nbytes for _, t in state_of(self.optimizer, parameter))
        estimate = copies_of(self.optimizer) * shard_of(parameter).nbytes
        return there or estimate * parameter.requires_grad

    def parameters(self) -> list[Tensor]:
        """The optimizer's parameters on this device."""
        place = self.target.place
        return [p for p in parameters_of(self.optimizer) if shard_of(p).device == place]

    def step_parts(self) -> list[StepPart]:
        """The parameters, part by part, in the same objects each time."""
        for parameter in self.parameters():
            if id(parameter) not in self._part_of:
                self._part_of[id(parameter)] = self._take(parameter)
        present = {id(p) for p in self.parameters()}
        parts = list({id(part): part for part in self._part_of.values()}.values())
        for part in parts:
            part.parameters = [p for p in part.parameters if id(p) in present]
        self._part_of = {key: part for key, part in self._part_of.items() if key in present}
        return [part for part in parts if part.parameters]

    def _take(self, parameter: Tensor) -> StepPart:
        """The part of a new parameter, which it shares with others if they are small."""
        part = self._open
        if part is None or part.home is not None:
            part = self._open = StepPart([], self.target, None)
        part.parameters.append(parameter)
        if sum(shard_of(p).nbytes for p in part.parameters) >= _PART:
            self._open = None
        return part


# --- the handle ---------------------------------------------------------------------------


class OffloadedOptimizer(Handle):
    """The handle of an optimizer whose state is offloaded, which offload_optimizer() returns.

    A context manager: the end of the block calls remove(). The optimizer keeps its handle, and
    OffloadedOptimizer.of(optimizer) returns it. A copy or pickle of a handle is None. Safe from
    every thread, except for remove().
    """

    def __init__(self) -> None:
        raise TypeError("OffloadedOptimizer objects are made by offload_optimizer()")

    def _start(self, optimizer: optim.Optimizer, budget: int, place: Target | None) -> None:
        self._kind = type(optimizer).__name__
        self._optimizer = weakref.ref(optimizer)
        self._budget = budget
        self._removing = threading.Lock()
        self._removed = False
        self._lanes: list[_Lane] = []
        targets = dict.fromkeys(_target_of(p, place) for p in parameters_of(optimizer))
        with torch.inference_mode(False), torch.no_grad():
            self._lanes = [_Lane(optimizer, target, budget) for target in targets]
            self._step = SplitStep(optimizer, self._lanes, [])
            try:
                self._step.begin()
            except BaseException:
                self.remove()
                raise
        vars(optimizer)[_KEPT] = self

    @staticmethod
    def of(optimizer: optim.Optimizer) -> OffloadedOptimizer | None:
        """The handle of an optimizer whose state is offloaded; None for other optimizers.

        Raises TypeError if it is not an optimizer. Safe from every thread; no driver call.
        """
        inner = checked_optimizer(optimizer)
        if inner is None:
            raise TypeError("optimizer must be a torch.optim.Optimizer, got None")
        handle: OffloadedOptimizer | None = vars(inner).get(_KEPT)
        return None if handle is None or handle._removed else handle

    def remove(self) -> None:
        """End the offloading: all state is on the device, in plain memory.

        Waits for the devices. Does nothing the second time. If a device lacks the memory, raises
        CUDAOutOfMemoryError or torch's OutOfMemoryError; the state can be used where it is, and
        remove() can be called again. Driver: cuMemcpyAsync, cuCtxSynchronize, cuMemHostUnregister.
        """
        self._remove()

    def _remove(self) -> None:
        if not self._removing.acquire(blocking=False):
            return
        try:
            if self._removed:
                return
            for lane in self._lanes:
                lane.target.wait()
            self._step.return_state()
            self._step.stop()
            self._removed = True
        finally:
            self._removing.release()
        self._step.forget()
        self._lanes = []

    def stats(self) -> dict[str, int]:
        """The bytes of state on the host and on the devices, the budget, and failures.

        failures counts state that stays on the device because there was no place on the host, and
        scratches that the device had no memory for.
        """
        optimizer = self._optimizer()
        state = [] if optimizer is None else state_tensors(optimizer)
        on_host = sum(tensor.nbytes for tensor in self._step.in_home())
        return {
            "budget": self._budget,
            "state_on_host": on_host,
            "state_on_device": sum(tensor.nbytes for tensor in state) - on_host,
            "failures": self._step.failures,
        }

    def __repr__(self) -> str:
        start = f"<offloaded state of {self._kind}"
        if self._removed:
            return f"{start}, removed>"
        numbers = self.stats()
        return (
            f"{start}: {numbers['state_on_host']:,} bytes on the host, "
            f"{numbers['state_on_device']:,} on the device, budget {self._budget:,}>"
        )
