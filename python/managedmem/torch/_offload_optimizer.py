"""Optimizer state that lives on the host while a module is offloaded, and the step in parts.

An optimizer that updates each parameter by itself steps part by part. If the budget has room for a
ring of scratch on the device, state and gradients of a part visit it. Otherwise the step reads and
writes them over the bus. State lies in page-locked memory, because the two copy engines of a device
move it in both directions at once, which kernels do not.

If a step raises, the parts that were stepped keep the step, the uses of the part under way end, and
the later parts are not updated. The same holds for steps in backward passes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, optim
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from managedmem import CUDAError
from managedmem._managedmem import _Slab
from managedmem.torch._moving import _blocks, _fill, _on, _swap
from managedmem.torch._offload_frames import Span, end_use
from managedmem.torch._offload_gradients import GradientHome
from managedmem.torch._offload_partial import PartialStep, Staged
from managedmem.torch._offload_places import Memory, Target, size_of
from managedmem.torch._offload_ring import Ring
from managedmem.torch._offload_seen import note_step
from managedmem.torch._offload_shares import MOST_RING, copies_of, spread, state_of
from managedmem.torch._offload_visits import (
    LEAST_SLICE,
    VISITORS,
    Entry,
    StateHome,
    StepPart,
    Turn,
    Visits,
    aligned,
)
from managedmem.torch._tensors import shard_of

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
# Those that take sparse gradients; the others raise for them.
_TAKE_SPARSE: set[type[optim.Optimizer]] = {optim.SGD, optim.Adagrad}
_SCHEDULED = "_wrapped_by_lr_sched"  # schedulers mark step() with it, and warn if the mark is gone
_SPLIT = "_managedmem_split"  # the SplitStep behind a step()


# --- the step -----------------------------------------------------------------------------


def innermost(optimizer: optim.Optimizer) -> optim.Optimizer:
    """The optimizer in a wrapper that never called Optimizer.__init__(), such as accelerate's."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, optim.Optimizer) or inner is optimizer:
            break
        optimizer = inner
    return optimizer


def can_split(optimizer: optim.Optimizer, step: Callable[..., Any], hooks: bool = False) -> bool:
    """True if parts give the same numbers, and no code of the caller would see the parts.

    `step` is the optimizer's step() before offload(). `hooks`: it may have step hooks, because the
    parts do not call them.
    """
    if type(optimizer) not in _BY_PARAMETER or not _is_own(optimizer, step):
        return False
    differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
    return not differentiable and (hooks or not has_hooks(optimizer))


def has_hooks(optimizer: optim.Optimizer) -> bool:
    """True if a step calls hooks of the caller."""
    return any(
        (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            [hook for hook in _global_optimizer_pre_hooks.values() if hook is not note_step],
            _global_optimizer_post_hooks,
        )
    )


def _is_own(optimizer: optim.Optimizer, step: Callable[..., Any]) -> bool:
    """True for the step() of the class, even if a scheduler has wrapped it."""
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
    """The data of a step() that replaces the optimizer's. Nothing in it keeps a model alive."""

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
        # It must be a method: schedulers read its __func__.
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
    """The link in a step(); None in a function to which a scheduler has copied the attribute."""
    function = getattr(step, "__func__", step)
    link: _Link | None = getattr(function, _SPLIT, None)
    return link if link is not None and link.function is function else None


def _ended_link(step: object) -> _Link | None:
    """The link in a step() whose offload() has ended; else None."""
    link = _link_of(step)
    if link is None:
        return None
    split = link.split()
    return link if split is None or not split.active else None


def _forgetting(split: weakref.ref[SplitStep]) -> Callable[[object], None]:
    """A callback for the end of the optimizer, which frees the homes of its state."""

    def forget(_: object) -> None:
        if (found := split()) is not None:
            found.forget()

    return forget


class Division(Protocol):
    """What a budget leaves for the state of an optimizer."""

    room: int  # bytes of scratch, and of state that stays
    divisions: int  # how many times it was divided
    state_stays: bool  # all of it

    def follow(self) -> None:
        """Divide again if the groups or what requires gradients have changed."""


class Lane(Protocol):
    """The parameters of one device."""

    target: Target

    @property
    def share(self) -> Division:
        """The division of its budget."""

    def step_parts(self) -> list[StepPart]:
        """The trained parameters, part by part, in the same objects each time."""


class SplitStep:
    """Takes the place of optimizer.step()."""

    steps_all = False  # True: also parts whose state stays on the device

    def __init__(
        self, optimizer: optim.Optimizer, lanes: Sequence[Lane], gradients: Sequence[GradientHome]
    ) -> None:
        self._optimizer = weakref.ref(optimizer, _forgetting(weakref.ref(self)))
        self.lanes = lanes
        self.parts: list[StepPart] = []
        self.ever: dict[int, StepPart] = {}  # all parts so far, by their ids
        self.room: dict[Target, int] = {}  # bytes of scratch on each device
        self.known: set[int] = set()  # the ids of the parameters in parts
        self.rings: dict[Target, Ring] = {}
        self.largest: dict[Target, int] = {}  # bytes of a part in the ring, if it has room
        self.gradients = {id(home.parameter): home for home in gradients}
        self.gradient_rooms = list({id(home.room): home.room for home in gradients}.values())
        self.failures = 0
        self.active = True
        self._seen: tuple[list[int], list[int]] = [], []  # the ids of parameters, the divisions
        _Link(self, optimizer).put(optimizer)

    @property
    def optimizer(self) -> optim.Optimizer:
        """The optimizer, which is alive during its step."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def take_in(
        self, lanes: Sequence[Lane], gradients: Sequence[GradientHome], chosen: Iterable[Tensor]
    ) -> None:
        """Step these lanes from now on, and parameters whose gradients have these homes.

        `chosen` are parameters that may step in backward passes; only BackwardStep does that.
        """
        self.lanes = lanes
        self.gradients.update((id(home.parameter), home) for home in gradients)
        rooms = (home.room for home in self.gradients.values())
        self.gradient_rooms = list({id(room): room for room in rooms}.values())
        self._seen = [], []

    def begin(self) -> None:
        """Move existing state home. After an error, stop() gives the optimizer its step() back."""
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
        self.rings = {}

    def return_state(self) -> None:
        """Give the state at home plain memory beside its parameters."""
        for part in self.ever.values():
            if part.home is not None:
                self._release(part, part.home.holds)

    def forget(self) -> None:
        """Drop the memory at home, and free it."""
        ever, self.ever, self.parts = self.ever, {}, []
        self.gradients, self.gradient_rooms = {}, []
        for part in ever.values():  # step() may be going through them
            part.home = None

    def in_home(self) -> Iterator[Tensor]:
        """The state tensors that lie at home, even of parameters that have left the groups."""
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
        index = {key: i for i, key in enumerate(every)}
        parts: list[StepPart] = []
        rings: dict[Target, int] = {}
        for lane in self.lanes:  # steps go through parts in the order of the optimizer
            mine = sorted(lane.step_parts(), key=lambda part: index[id(part.parameters[0])])
            # State that has a home keeps it.
            stays = lane.share.state_stays and all(part.home is None for part in mine)
            if self.steps_all or not stays:
                parts += mine
            ring = self._divide_room(lane, mine)
            rings[lane.target] = max(rings.get(lane.target, 0), ring)
            for part in mine if stays else ():
                part.keeps_state = True
        parts.sort(key=lambda part: index[id(part.parameters[0])])
        self.parts = parts
        for target, room in rings.items():
            self._set_room(target, room)
        for part in parts:
            self._note_size(part)
        self.ever.update((id(part), part) for part in parts)
        self.known = {id(p) for part in parts for p in part.parameters}
        self._seen = seen  # only now: after an interrupt, the next step follows again

    def _divide_room(self, lane: Lane, parts: list[StepPart]) -> int:
        """Keep state in the room that the ring cannot use. Return the bytes of the ring."""
        largest = max(map(self._visit_size, parts), default=0)
        ring = min(lane.share.room, MOST_RING, VISITORS * largest)
        room = lane.share.room - ring
        is_known = type(self.optimizer) in _BY_PARAMETER
        sizes = [self._state_size(part) for part in parts]
        can_stay = [is_known and part.home is None for part in parts]  # a home is kept
        for part, stays in zip(parts, spread(sizes, can_stay, room), strict=True):
            part.keeps_state = stays
        return ring

    def _state_size(self, part: StepPart) -> int:
        """The bytes of the state of a part, with an estimate before its first step."""
        nbytes = sum(t.nbytes for _, t in self._state_on_device(part))
        trains = sum(shard_of(p).nbytes for p in part.parameters if p.requires_grad)
        return nbytes or copies_of(self.optimizer) * trains

    def _set_room(self, target: Target, room: int) -> None:
        """Let the scratch of a device take this many bytes."""
        if self.room.get(target) == room:
            return
        self.room[target] = room
        self.largest.pop(target, None)
        if (ring := self.rings.get(target)) is not None and ring.size > room:
            self.rings.pop(target).followed()

    # --- one step -------------------------------------------------------------------------

    def stepped_in_backward(self) -> int:
        """How many times a backward pass has stepped a part."""
        return 0

    def steps_in_backward(self, parameter: Tensor) -> bool:
        """True for a parameter that backward passes step."""
        return False

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
        for room in self.gradient_rooms:
            room.settle()
        rings = self._rings()
        try:
            with ExitStack() as rounds:
                self._begin_rounds(rounds)
                self._step_parts(original)
        finally:
            for ring in rings.values():
                ring.followed()
        return loss

    def _begin_rounds(self, rounds: ExitStack) -> None:
        """Load parameters ahead until `rounds` ends; later work then follows all copies home."""
        frames = {part.group.frames: part.target for part in self.parts if part.group is not None}
        for each, target in frames.items():
            stream = target.stream() or 0
            with contextlib.suppress(CUDAError):
                each.begin_round(stream)
            rounds.callback(each.end_round)
            rounds.callback(each.settle, stream)

    def _refused(self) -> list[Tensor]:
        """Parameters for which the optimizer raises. A step of these alone changes nothing."""
        if type(self.optimizer) in _TAKE_SPARSE:
            return []
        every = chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
        return [p for p in every if p.grad is not None and p.grad.is_sparse]

    def _step_parts(self, original: Callable[..., Any]) -> None:
        """Update the parameters that have gradients; the others need not come to the device."""
        partial = PartialStep(self.optimizer)
        every = chain.from_iterable(partial.parameters)
        rest = [p for p in every if id(p) not in self.known]
        mine = [part for part in self.parts if self._has_gradients(part, partial)]
        visits = Visits(self.optimizer, mine, self.rings, self.gradients, lambda: self.active)
        chosen = set(map(id, mine))
        for part in self.parts:
            if id(part) not in chosen:
                self._send_home(part)
        for turn in visits.turns:
            self._step_turn(turn, partial, visits)
        if rest:
            partial.run(rest)
        if hasattr(original, _SCHEDULED):
            self._tell_scheduler()
        if not mine and not rest:
            original()  # without effect, but a profiler shows it

    def _has_gradients(self, part: StepPart, partial: PartialStep) -> bool:
        return any(p.grad is not None and id(p) in partial.group_of for p in part.parameters)

    def _step_turn(self, turn: Turn, partial: PartialStep, visits: Visits) -> None:
        with ExitStack() as uses:
            for part in turn.parts:
                if part.group is not None and self.active:  # a collection may have called remove()
                    uses.enter_context(part.group.data.paused())
                    stream = part.target.stream()
                    if (use := part.group.acquire(stream, writes=True)) is not None:
                        uses.callback(end_use, use, stream, written=True)
            for stay in turn.stays:
                visit = visits.begin(stay)
                staged = None if stay.cut is None else Staged({}, {}, stay.cut)
                stay.has_begun = True
                try:
                    partial.run(stay.parameters, staged if visit is None else visit.staged)
                finally:
                    if visit is not None:
                        visits.end(visit)
        for part in turn.parts:
            self._send_home(part)

    def _tell_scheduler(self) -> None:
        """Set the mark of a called step(), which a scheduler that has wrapped step() looks for."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    # --- the state ------------------------------------------------------------------------

    def _send_home(self, part: StepPart) -> None:
        """Move state that the optimizer has made on the device, or loaded, to the host."""
        if not self.active or part.keeps_state:
            return
        with torch.no_grad():
            try:
                found = self._state_on_device(part)
                home = part.home
                if found and (home is None or not all(home.holds(t) for _, t in found)):
                    part.home = _home_of(found, part.target)
                    self._note_size(part)
                    if not self.active:  # a collection has called remove() meanwhile
                        self._release(part, part.home.holds)
                        self.forget()
            except (CUDAError, MemoryError):  # what is on the device stays there
                self.failures += 1

    def _note_size(self, part: StepPart) -> None:
        """Let the ring of a device hold three visits of the part, or of slices of it."""
        room = self.room.get(part.target, 0)
        size = 0 if self.steps_all and part.keeps_state else self._visit_size(part)
        if size > room:  # in slices, unless these would be small
            size = room // VISITORS if room >= VISITORS * LEAST_SLICE else 0
        self.largest[part.target] = max(self.largest.get(part.target, 0), size)

    def _visit_size(self, part: StepPart) -> int:
        """The bytes of a part in the ring, with an estimate before its first step."""
        places = sum(aligned(shard_of(p).nbytes) for p in part.parameters)
        home = part.home
        state = copies_of(self.optimizer) * places if home is None else aligned(home.host.numel())
        return state if self.steps_all else state + places  # steps_all: no gradients visit

    def _rings(self) -> dict[Target, Ring]:
        """The scratch of each device, ready for a step."""
        for target, largest in self.largest.items():
            size = min(self.room[target], VISITORS * largest)
            ring = self.rings.get(target)
            if ring is None or ring.size < size:
                self._make_ring(target, size)
        for ring in self.rings.values():
            ring.begin()
        return self.rings

    def _make_ring(self, target: Target, size: int) -> None:
        if self.rings.pop(target, None) is not None and target.place.type == "cuda":
            torch.cuda.empty_cache()  # else torch keeps the smaller ring
        if size == 0:
            return
        try:
            self.rings[target] = Ring(target, size)
        except torch.cuda.OutOfMemoryError:  # the state is reached over the bus
            self.room[target] = self.largest[target] = 0
            self.failures += 1

    def _state_on_device(self, part: StepPart) -> list[tuple[str, Tensor]]:
        """The named state of a part, without state that the optimizer keeps elsewhere."""
        return [
            (f"state.{name}", t)
            for parameter in part.parameters
            for name, t in state_of(self.optimizer, parameter)
            if t.device == parameter.device and t.layout is torch.strided
        ]

    def _release(self, part: StepPart, lies: Callable[[Tensor], bool]) -> None:
        """Give state for which `lies` is true plain memory on the device of its parameter."""
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


def _home_of(found: list[tuple[str, Tensor]], target: Target) -> StateHome:
    """Move state tensors into one piece of memory on the host."""
    blocks = _blocks(found, target.place)
    slab = _Slab(target.device.device_id, sum(map(size_of, blocks)), True)
    memory = Memory(slab, target)
    spans = [(block, memory.span(block)) for block in blocks]
    host = Span(slab, 0, memory.used).tensor(torch.device("cpu"))
    host.zero_()  # locking pages that were never touched takes longer
    slab.lock()
    entries: list[Entry] = []
    for block, span in spans:
        own = span.tensor(target.place)
        _fill(own, block)
        place = span.address - slab.handle
        for piece in block.pieces:
            for tensor in piece.tensors:
                entries.append(Entry(tensor, own, place, tensor.data_ptr() - block.start))
    _swap([(entry.tensor, _on(entry.own, entry.tensor, entry.offset)) for entry in entries])
    return StateHome(slab.handle, host, entries)
