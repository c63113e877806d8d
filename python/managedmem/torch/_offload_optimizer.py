"""Gradients and optimizer state that live on the host while a module is offloaded.

A gradient goes home when it has been accumulated. An optimizer that updates each parameter by
itself steps part by part; the state of a part visits a scratch on the device where the budget has
room, and is else read and written over the bus. State lies in page-locked memory, because the two
copy engines of a device move it in both directions at once, which kernels do not.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, optim
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

import managedmem
from managedmem import CUDAError, Device, ManagedBuffer
from managedmem._managedmem import _page_locked, _results_trim
from managedmem.torch._moving import (
    _allocate_places,
    _as_bytes,
    _Block,
    _blocks,
    _fill,
    _on,
    _pages_of,
    _place_in,
    _swap,
)
from managedmem.torch._offload_frames import FramedPart
from managedmem.torch._offload_hooks import begin_use, end_use
from managedmem.torch._offload_partial import PartialStep
from managedmem.torch._offload_places import Target
from managedmem.torch._offload_shares import Share, state_of
from managedmem.torch._tensors import extent_of

# They update each parameter from its own gradient and state alone: parts give the same numbers.
_BY_PARAMETER = {
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
    optim.Rprop,
}
# The others raise for sparse gradients.
_TAKE_SPARSE: set[type[optim.Optimizer]] = {optim.SGD, optim.Adagrad}
_SLOTS = 3  # one part comes, one is updated, one goes
_SCHEDULED = "_wrapped_by_lr_sched"  # schedulers warn about a step() that has lost it
_SPLIT = "_managedmem_split"  # the SplitStep behind a step()


def _allocate_home(target: Target, nbytes: int) -> ManagedBuffer:
    """Managed memory that stays on the host, and that kernels of the device reach."""
    with target.current():
        memory = managedmem.ManagedMemoryResource().allocate(nbytes)
    _keep_home(memory, target)
    return memory


def _keep_home(memory: ManagedBuffer, target: Target) -> None:
    managedmem.advise(memory, "set_preferred_location", Device(target.device).nearest_host)
    managedmem.advise(memory, "set_accessed_by", target.device)


def _copy(to: Tensor, source: Tensor) -> None:
    """Copy bytes; on a GPU by a kernel, which reaches mapped memory at the speed of the link."""
    if to.is_cuda and to.numel() % 8 == 0:
        torch.add(source.view(torch.int64), 0, out=to.view(torch.int64))
    else:
        to.copy_(source)


# --- gradients ----------------------------------------------------------------------------


class GradientHome:
    """The place of one parameter's gradient on the host."""

    def __init__(self, parameter: Tensor, target: Target, share: Share) -> None:
        self.parameter = parameter
        self.target = target
        self.share = share
        self.base: Tensor | None = None
        self.alone = 0  # _users(base) while nothing else refers to it
        self.failures = 0
        self.active = True
        self.lock = threading.RLock()  # a collection inside of it may call remove()
        self.handle = _hooked(parameter, _GradientHook(self))

    def __call__(self, parameter: Tensor, is_older: bool = False) -> None:
        """Move a new gradient home; one that is there has been added to.

        `is_older`: the gradient was made before the latest backward pass.
        """
        grad = parameter.grad
        if not self.active or grad is None or self.is_home(grad):
            return
        if not self.share.sends_home(parameter):
            return
        with self.lock, torch.no_grad():
            if self.is_home(grad) or not _is_plain(grad) or _is_shared(grad, is_older):
                return  # another thread may have moved it
            source = grad.data
            try:
                base = self._place(source.nbytes)
            except CUDAError:  # without a place at home, it stays on the device
                self.failures += 1
                return
            _copy(base, _bytes_of(source))
            if self.active:  # else a collection has called remove() meanwhile
                grad.data = _on(base, source, 0)  # the same object: the caller may refer to it

    def stop(self) -> None:
        """Leave gradients alone from now on."""
        self.active = False
        self.handle.remove()

    def is_home(self, grad: Tensor) -> bool:
        """True if a gradient lies in its place."""
        if self.base is None or grad.layout is not torch.strided:
            return False
        return grad.untyped_storage().data_ptr() == self.base.untyped_storage().data_ptr()

    def _place(self, nbytes: int) -> Tensor:
        """Memory for a gradient: that of the last one, unless something else refers to it."""
        if self.base is None or self.base.numel() != nbytes or _users(self.base) != self.alone:
            memory = _allocate_home(self.target, nbytes)
            self.base = _as_bytes(memory, self.target.place)
            self.alone = _users(self.base)
        return self.base


class _GradientHook:
    """A hook of a parameter, through which the garbage collector cannot see: torch's C++ has it."""

    def __init__(self, home: GradientHome) -> None:
        self.home = weakref.ref(home)

    def __call__(self, parameter: Tensor) -> None:
        home = self.home()
        if home is not None:
            home(parameter)

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _inert, ()


def _hooked(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Hook a parameter, which may begin to require gradients later."""
    required = parameter.requires_grad
    try:
        parameter.requires_grad_(True)  # torch refuses hooks of others
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
        return handle
    finally:
        parameter.requires_grad_(required)


def _inert() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*arguments: object) -> None:
    """A hook of a copied parameter."""


def _users(tensor: Tensor) -> int:
    """The number of references to its memory, plus a constant."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _bytes_of(tensor: Tensor) -> Tensor:
    """A dense tensor as bytes."""
    storage = tensor.untyped_storage()
    offset = tensor.data_ptr() - storage.data_ptr()
    found = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return found.set_(storage, offset, (tensor.nbytes,), (1,))


def _is_shared(grad: Tensor, is_older: bool) -> bool:
    """True if the caller has the memory too, such as a flat buffer.

    A new gradient may share memory with others that torch made in this pass, so only older ones
    are counted: those from before it, and those that were added to.
    """
    if grad._is_view():  # torch makes none
        return True
    counts = is_older or grad.is_inference() or grad._version > 0
    alone = torch.empty(1)  # memory with one reference
    return counts and _users(grad) != _users(alone)


def _is_plain(grad: Tensor) -> bool:
    """True for dense memory that is not part of a graph."""
    if type(grad) is not Tensor or grad.layout is not torch.strided or grad.requires_grad:
        return False
    extent = extent_of("", grad)
    return extent is not None and extent[1] - extent[0] == grad.nbytes


# --- the step -----------------------------------------------------------------------------


def innermost(optimizer: optim.Optimizer) -> optim.Optimizer:
    """The optimizer inside of a wrapper that never called Optimizer.__init__(): accelerate's."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, optim.Optimizer) or inner is optimizer:
            break
        optimizer = inner
    return optimizer


def can_split(optimizer: optim.Optimizer, step: Callable[..., Any]) -> bool:
    """True if parts give the same numbers, and no code of the caller would see the parts.

    `step` is the optimizer's step() before offload().
    """
    if type(optimizer) not in _BY_PARAMETER or not _is_own(optimizer, step):
        return False
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    return not any(hooks) and not any(g.get("differentiable") for g in optimizer.param_groups)


def _is_own(optimizer: optim.Optimizer, step: Callable[..., Any]) -> bool:
    """True for the step() of the class, also inside of what schedulers wrap around it."""
    function: object = getattr(step, "__func__", step)
    while True:
        ended = _ended_link(function)
        inner: object
        if ended is not None:
            inner = ended.original
        elif hasattr(function, _SCHEDULED):
            inner = getattr(function, "__wrapped__", None)
        else:
            return function is type(optimizer).step
        function = getattr(inner, "__func__", inner)


class _Link:
    """What a step() in the place of the optimizer's has: nothing that keeps a model alive."""

    def __init__(self, split: SplitStep, optimizer: optim.Optimizer) -> None:
        self.split = weakref.ref(split)
        self.original = optimizer.step
        self.was_own = "step" in vars(optimizer)
        self.function: Callable[..., Any] | None = None

    def put(self, optimizer: optim.Optimizer) -> None:
        """Take the place of the optimizer's step()."""

        def step(_: optim.Optimizer, *given: Any, **named: Any) -> Any:
            split = self.split()
            if split is None or not split.active:
                return self.original(*given, **named)
            return split.step(self.original, *given, **named)

        setattr(step, _SPLIT, self)
        if hasattr(self.original, _SCHEDULED):
            setattr(step, _SCHEDULED, True)
        self.function = step
        # Schedulers take the function of a method.
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]

    def take_back(self, optimizer: optim.Optimizer) -> None:
        """Give the optimizer its own step() back, unless something has been put over this one."""
        if getattr(vars(optimizer).get("step"), "__func__", None) is not self.function:
            return
        oldest = self
        while (ended := _ended_link(oldest.original)) is not None:
            oldest = ended
        if oldest.was_own:
            optimizer.step = oldest.original  # type: ignore[method-assign]
        else:
            del optimizer.step


def _link_of(step: object) -> _Link | None:
    """The link in a step(); None if a scheduler has copied it."""
    function = getattr(step, "__func__", step)
    found: _Link | None = getattr(function, _SPLIT, None)
    return found if found is not None and found.function is function else None


def _ended_link(step: object) -> _Link | None:
    """The link in a step() whose offload() has ended; else None."""
    found = _link_of(step)
    if found is None:
        return None
    split = found.split()
    return found if split is None or not split.active else None


@dataclass(slots=True, eq=False)
class _Entry:
    """A tensor of the state. Its storage is its own, so that it is pickled without the others."""

    tensor: Tensor
    own: Tensor  # the bytes of its storage at home
    place: int  # of these bytes in the home
    offset: int  # of the tensor in its storage


@dataclass(slots=True, eq=False)
class _StateHome:
    """The state of a part of the parameters, in one allocation on the host."""

    memory: ManagedBuffer
    base: Tensor
    host: Tensor | None  # the same bytes for copies, if they are page-locked
    entries: list[_Entry]

    def holds(self, tensor: Tensor) -> bool:
        """True if a tensor lies in it."""
        return 0 <= tensor.data_ptr() - self.base.data_ptr() < self.base.numel()

    def views(self, scratch: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each tensor with a replacement in a scratch."""
        return [
            (entry.tensor, _on(scratch, entry.tensor, entry.place + entry.offset))
            for entry in self.entries
            if self.holds(entry.tensor)
        ]


@dataclass(slots=True, eq=False)
class StepPart:
    """Parameters that are updated together."""

    parameters: list[Tensor]
    target: Target
    group: FramedPart | None  # of the parameters, if they are streamed
    home: _StateHome | None = None


@dataclass(slots=True, eq=False)
class _Slot:
    """A scratch on the device for the state of one part."""

    scratch: Tensor
    free: torch.cuda.Event | None = None


@dataclass(slots=True, eq=False)
class _Stage:
    """The scratch memory of a device, and the streams that fill and empty it."""

    slots: list[_Slot] = field(default_factory=list)
    inward: torch.cuda.Stream | None = None
    outward: torch.cuda.Stream | None = None
    turn: int = 0

    def follow_outward(self) -> None:
        """Make the current stream wait for the copies home, before others use the scratch."""
        if self.outward is not None:
            torch.cuda.current_stream(self.outward.device).wait_stream(self.outward)


def _forgetting(split: weakref.ref[SplitStep]) -> Callable[[object], None]:
    """What frees the homes of state after its optimizer."""

    def forget(_: object) -> None:
        if (found := split()) is not None:
            found.forget()

    return forget


class Lane(Protocol):
    """What is streamed to one device."""

    target: Target
    share: Share

    def step_parts(self) -> list[StepPart]:
        """The trained parameters, part by part, in the same objects each time."""


class SplitStep:
    """Takes the place of optimizer.step()."""

    def __init__(self, optimizer: optim.Optimizer, lanes: Sequence[Lane]) -> None:
        self._optimizer = weakref.ref(optimizer, _forgetting(weakref.ref(self)))
        self.lanes = lanes
        self.parts: list[StepPart] = []
        self.ever: dict[int, StepPart] = {}  # by their ids, those of earlier groups too
        self.room: dict[Target, int] = {}  # bytes of scratch on each device
        self.known: set[int] = set()  # the ids of the parameters in parts
        self.stages: dict[Target, _Stage] = {}
        self.slot_bytes: dict[Target, int] = {}  # the largest state that fits in the room twice
        self.failures = 0
        self.active = True
        self._seen: tuple[list[int], list[int]] = [], []  # the ids of parameters, the divisions
        _Link(self, optimizer).put(optimizer)

    @property
    def optimizer(self) -> optim.Optimizer:
        """Whose step() it is; during that step it is there."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def begin(self) -> None:
        """Move the state that exists home. After an error, stop() gives step() back."""
        self._follow()
        for part in self.parts:
            self._send_home(part)

    def stop(self) -> None:
        """Give the optimizer its own step() back."""
        self.active = False
        optimizer = self._optimizer()
        link = None if optimizer is None else _link_of(vars(optimizer).get("step"))
        if optimizer is not None and link is not None and link.split() is self:
            link.take_back(optimizer)
        self.stages = {}

    def forget(self) -> None:
        """Drop the memory at home, and free it."""
        ever, self.ever, self.parts = self.ever, {}, []
        for part in ever.values():  # step() may be going through them
            part.home = None

    def in_home(self) -> Iterator[Tensor]:
        """The state tensors that lie at home, also of parameters that have left the groups."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        homes = [part.home for part in self.ever.values() if part.home is not None]
        memory = {e.own.untyped_storage().data_ptr() for home in homes for e in home.entries}
        for parameter in list(optimizer.state) if homes else []:
            for _, tensor in state_of(optimizer, parameter):
                if tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in memory:
                    yield tensor

    # --- what is trained ------------------------------------------------------------------

    def _follow(self) -> None:
        """Take notice of groups that were added, and of parameters that train now."""
        every = [id(p) for group in self.optimizer.param_groups for p in group["params"]]
        for lane in self.lanes:
            lane.share.follow()
        seen = every, [lane.share.divisions for lane in self.lanes]
        if seen == self._seen:
            return
        self._seen = seen
        index = {key: i for i, key in enumerate(every)}
        parts: list[StepPart] = []
        for lane in self.lanes:
            mine = lane.step_parts()
            # State that has a home keeps it.
            if not lane.share.state_stays or any(part.home is not None for part in mine):
                parts += mine
            self._set_room(lane.target, lane.share.room)
        parts.sort(key=lambda part: index[id(part.parameters[0])])  # the order of the state
        self.parts = parts
        self.ever.update((id(part), part) for part in parts)
        self.known = {id(p) for part in parts for p in part.parameters}

    def _set_room(self, target: Target, room: int) -> None:
        """Let the scratch of a device take this many bytes."""
        if self.room.get(target) == room:
            return
        self.room[target] = room
        self.slot_bytes.pop(target, None)
        if (stage := self.stages.pop(target, None)) is not None:
            stage.follow_outward()
        for part in self.parts:
            if part.home is not None and part.target == target:
                self._note_size(target, part.home.base.numel())

    # --- one step -------------------------------------------------------------------------

    def step(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """A step of the optimizer, whose own step() is `original`."""
        if not can_split(self.optimizer, original):
            result = original(*given, **named)
            if self.active:
                self._follow()
            for part in self.parts:
                if part.group is not None:
                    part.group.note_writes(part.target.stream())
                self._send_home(part)
            return result
        closure = given[0] if given else named.get("closure")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.active:  # the closure may have called remove()
            self._follow()
        if not self.active or not self.parts:
            original()
            return loss
        if refused := self._refused():
            PartialStep(self.optimizer).run(refused)
            return loss
        for stage in self.stages.values():
            if stage.inward is not None:
                stage.inward.wait_stream(torch.cuda.current_stream(stage.inward.device))
        stages = self.stages
        try:
            with ExitStack() as rounds:
                self._begin_rounds(rounds)
                self._step_parts(original)
        finally:
            for stage in stages.values():
                stage.follow_outward()
        return loss

    def _begin_rounds(self, rounds: ExitStack) -> None:
        """Load parameters ahead until the end, where later work follows all copies home."""
        frames = {part.group.frames: part.target for part in self.parts if part.group is not None}
        for each, target in frames.items():
            stream = target.stream() or 0
            with contextlib.suppress(CUDAError):
                each.begin_round(stream)
            rounds.callback(each.end_round)
            rounds.callback(each.settle, stream)

    def _refused(self) -> list[Tensor]:
        """Parameters for which the optimizer raises: a step for them alone changes nothing."""
        if type(self.optimizer) in _TAKE_SPARSE:
            return []
        every = chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
        return [p for p in every if p.grad is not None and p.grad.is_sparse]

    def _step_parts(self, original: Callable[..., Any]) -> None:
        """Update the parameters that have gradients; the others need not come to the device."""
        partial = PartialStep(self.optimizer)
        every = chain.from_iterable(partial.parameters)
        rest = [p for p in every if id(p) not in self.known]
        called = False
        for part in self.parts:
            if any(p.grad is not None and id(p) in partial.group_of for p in part.parameters):
                self._step_part(part, partial)
                called = True
            else:
                self._send_home(part)
        if rest:
            partial.run(rest)
        if hasattr(original, _SCHEDULED):
            self._tell_scheduler()
        if not called and not rest:
            original()  # without effect, but a profiler shows it

    def _step_part(self, part: StepPart, partial: PartialStep) -> None:
        with ExitStack() as stack:
            if part.group is not None and self.active:  # a collection may have called remove()
                stream = part.target.stream()
                if begin_use(part.group, stream, writes=True):
                    stack.callback(end_use, part.group, stream, written=True)
            staged: dict[int, Tensor] = {}
            if part.home is not None:
                staged = stack.enter_context(self._staged(part, part.home))
            partial.run(part.parameters, staged)
        self._send_home(part)

    def _tell_scheduler(self) -> None:
        """A scheduler that has wrapped the optimizer's own step() looks for a call of it."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    # --- the state ------------------------------------------------------------------------

    def _send_home(self, part: StepPart) -> None:
        """Move state that the optimizer has made on the device, or loaded, to the host."""
        if not self.active:
            return
        with torch.no_grad():
            try:
                found = self._state_on_device(part)
                home = part.home
                if found and (home is None or not all(home.holds(t) for _, t in found)):
                    part.home = _home_of(found, part.target)
                    self._note_size(part.target, part.home.base.numel())
                    if not self.active:  # a collection has called remove() meanwhile
                        self._release(part, part.home.holds)
                        self.forget()
            except CUDAError:  # what is on the device stays there
                self.failures += 1

    def _note_size(self, target: Target, nbytes: int) -> None:
        """Let the slots of a device hold a state of this size, if it has room for two."""
        if nbytes <= self.room.get(target, 0) // 2:
            self.slot_bytes[target] = max(self.slot_bytes.get(target, 0), nbytes)

    def _state_on_device(self, part: StepPart) -> list[tuple[str, Tensor]]:
        """The state of a part with its names, but for what the optimizer keeps elsewhere."""
        return [
            (f"state.{name}", t)
            for parameter in part.parameters
            for name, t in state_of(self.optimizer, parameter)
            if t.device == parameter.device and t.layout is torch.strided
        ]

    @contextmanager
    def _staged(self, part: StepPart, home: _StateHome) -> Iterator[dict[int, Tensor]]:
        """A copy of the state of a part in a scratch on the device, by the ids of its tensors.

        The end of the block copies it home. Without room for a scratch the mapping is empty.
        """
        stage = self._stage(part.target)
        if not stage.slots or stage.slots[0].scratch.numel() < home.base.numel():
            yield {}
            return
        slot = stage.slots[stage.turn % len(stage.slots)]
        stage.turn += 1
        scratch = slot.scratch[: home.base.numel()]
        with torch.no_grad(), torch.cuda.stream(stage.inward):
            if stage.inward is not None and slot.free is not None:
                stage.inward.wait_event(slot.free)
            if home.host is not None:
                scratch.copy_(home.host, non_blocking=True)
            else:
                _copy(scratch, home.base)
        if stage.inward is not None:
            torch.cuda.current_stream(part.target.place).wait_stream(stage.inward)
        views = home.views(scratch)
        try:
            yield {id(tensor): view for tensor, view in views}
        finally:
            self._unstage(stage, slot, home, views)

    def _unstage(
        self, stage: _Stage, slot: _Slot, home: _StateHome, views: list[tuple[Tensor, Tensor]]
    ) -> None:
        """Copy the state home."""
        scratch = slot.scratch[: home.base.numel()]
        if self.active:
            if stage.outward is not None:
                stage.outward.wait_stream(torch.cuda.current_stream(scratch.device))
            with torch.no_grad(), torch.cuda.stream(stage.outward):
                if home.host is not None:
                    home.host.copy_(scratch, non_blocking=True)
                else:
                    _copy(home.base, scratch)
            if stage.outward is not None:
                slot.free = stage.outward.record_event()
        if not self.active:  # a collection has called remove() meanwhile
            for tensor, view in views:
                tensor.data.copy_(view)

    def _release(self, part: StepPart, lies: Callable[[Tensor], bool]) -> None:
        """Give state that lies there plain memory beside its parameter."""
        changes: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for parameter in part.parameters:
                for _, t in state_of(self.optimizer, parameter):
                    if t.layout is torch.strided and lies(t):
                        new = torch.empty_strided(
                            t.shape, t.stride(), dtype=t.dtype, device=parameter.device
                        )
                        changes.append((t, new.copy_(t.data)))
            _swap(changes)

    def _stage(self, target: Target) -> _Stage:
        """The scratch of a device. A slot holds the largest state that fits in the room twice."""
        stage = self.stages.get(target)
        nbytes = self.slot_bytes.get(target, 0)
        if stage is not None:
            if nbytes == 0 or (stage.slots and stage.slots[0].scratch.numel() >= nbytes):
                return stage
            stage.follow_outward()
        stage = self.stages[target] = _Stage()
        count = min(_SLOTS, self.room.get(target, 0) // nbytes) if nbytes else 0
        try:
            for _ in range(count):
                scratch = torch.empty(nbytes, dtype=torch.uint8, device=target.place)
                stage.slots.append(_Slot(scratch))
        except torch.cuda.OutOfMemoryError:  # the state is reached over the bus
            stage.slots.clear()
            self.slot_bytes[target] = count = 0
            self.failures += 1
        if count and target.place.type == "cuda":
            stage.inward = torch.cuda.Stream(target.place)
            stage.outward = torch.cuda.Stream(target.place)
            stage.inward.wait_stream(torch.cuda.current_stream(target.place))
        return stage


def _home_of(found: list[tuple[str, Tensor]], target: Target) -> _StateHome:
    """Move state tensors into one allocation on the host."""
    blocks = _blocks(found, target.place)
    memory, host = _state_memory(target, blocks)
    base = _as_bytes(memory, target.place)
    entries: list[_Entry] = []
    for block in blocks:
        assert block.place is not None
        own = _as_bytes(block.place, target.place)
        _fill(own, block)
        place = block.place.handle - memory.handle
        for piece in block.pieces:
            for tensor in piece.tensors:
                entries.append(_Entry(tensor, own, place, tensor.data_ptr() - block.start))
    _swap([(entry.tensor, _on(entry.own, entry.tensor, entry.offset)) for entry in entries])
    return _StateHome(memory, base, host, entries)


class _Locked:
    """Page-locked memory, which is freed with its last user: the cache of results keeps it else."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = _page_locked(nbytes)
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the process
            del self.memory
            _results_trim(managedmem.result_cache.max_nbytes)


def _state_memory(target: Target, blocks: list[_Block]) -> tuple[ManagedBuffer, Tensor | None]:
    """Memory with a place for each block: page-locked, or managed if that cannot be had."""
    with target.current():
        try:
            locked = _Locked(sum(map(_pages_of, blocks)))
        except (CUDAError, MemoryError):
            memory = _allocate_places(target.place, blocks)
            _keep_home(memory, target)
            return memory, None
    memory = ManagedBuffer.from_handle(locked.address, locked.nbytes, owner=locked)
    _place_in(memory, blocks)
    return memory, _as_bytes(memory, torch.device("cpu"))
