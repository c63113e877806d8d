"""The step of an optimizer in the backward pass: each part steps once its gradients are complete.

The gradients of the part are freed then, and never go home. Autograd calls the hooks in threads of
its own, where the stream of the pass is the current one. The step is queued on that stream.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint
from torch.utils.hooks import RemovableHandle

from managedmem import CUDAError
from managedmem.torch._offload_copies import inert
from managedmem.torch._offload_frames import FramedPart
from managedmem.torch._offload_gradients import EndOfPass, GradientHome
from managedmem.torch._offload_optimizer import Lane, SplitStep, can_split, has_hooks
from managedmem.torch._offload_partial import PartialStep
from managedmem.torch._offload_places import Target
from managedmem.torch._offload_shares import Share
from managedmem.torch._offload_together import roots_of
from managedmem.torch._offload_visits import Stay, StepPart, Turn, Visits

_OLDER = (
    "a parameter of shape {} has a gradient from before this backward pass, and with "
    "step_in_backward=True each pass is a step of its own: call optimizer.step() and "
    "optimizer.zero_grad() between passes, and do not accumulate gradients"
)
_GRAPH = (
    "create_graph=True makes a graph that needs the parameters of this pass, and "
    "step_in_backward=True changes them in it: offload without step_in_backward=True"
)
_CLOSURE = (
    "step() takes no closure with step_in_backward=True: the backward pass in it has stepped "
    "already. Call loss.backward(), and step() without arguments"
)
_OPTIONS = (
    "{!r} of a group changed between the backward pass and step(), from {!r} to {!r}, and the pass "
    "has stepped with the old value: with step_in_backward=True set options before the pass, or "
    "after step()"
)
_SCALER = (
    "GradScaler looks at all gradients before the step, and with step_in_backward=True the "
    "backward pass has stepped already: train in bfloat16, or offload without it"
)
_PARALLEL = (
    "DistributedDataParallel reduces gradients after their parameters have been stepped: offload "
    "without step_in_backward=True"
)
_TWICE = (
    "a parameter of shape {} got a gradient twice before optimizer.step(): call step() after each "
    "backward pass, and use_reentrant=False in checkpoints of modules that are called twice"
)


def check_step_in_backward(wanted: object, optimizer: optim.Optimizer | None) -> None:
    """Refuse an optimizer that cannot step in the backward pass."""
    if not isinstance(wanted, bool):
        raise TypeError(f"step_in_backward must be True or False, got {wanted!r}")
    if not wanted:
        return
    if optimizer is None:
        raise ValueError("step_in_backward=True needs an optimizer=")
    if not can_split(optimizer, optimizer.step, hooks=True):
        raise ValueError(
            f"step_in_backward=True needs an optimizer that updates each parameter by itself, such "
            f"as AdamW or SGD of torch, with its own step() and without differentiable=True, got "
            f"{type(optimizer).__name__}"
        )


def whole_parameters(model: nn.Module, shares: Iterable[Share]) -> list[Tensor]:
    """The parameters that only one module has: the gradients of tied ones may come in pieces."""
    every = (id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    shared = {key for key, count in Counter(every).items() if count > 1}
    may_train = (p for share in shares for p in share.all_that_may_train())
    return [p for p in may_train if id(p) not in shared]


class BackwardStep(SplitStep):
    """Steps parts in backward passes, and the remaining ones in step()."""

    steps_all = True

    def __init__(
        self,
        optimizer: optim.Optimizer,
        lanes: Sequence[Lane],
        gradients: Sequence[GradientHome],
        model: nn.Module,
        chosen: Iterable[Tensor],
    ) -> None:
        super().__init__(optimizer, lanes, gradients)
        self.lock = threading.RLock()  # a collection while it is held may call remove()
        self.chosen: set[int] = set()  # the ids of parameters that may step here
        self.order: list[StepPart] = []  # the parts as they came in the last round
        self.seen: dict[int, StepPart] = {}  # parts whose gradients came in this round, by ids
        self.came: set[int] = set()  # the ids of the parameters whose gradients came in this round
        self.unreached: set[int] = set()  # ids; others of their parts got gradients
        self.part_of: dict[int, StepPart] = {}  # by the ids of the parameters that step here
        self.missing: dict[int, set[int]] = {}  # ids of parameters yet to come, by ids of parts
        self.turn_of: dict[int, Turn] = {}  # by the ids of parts
        self.queue: deque[Turn] = deque()  # in the order in which they are expected
        self.task = -1  # the backward pass that is under way
        self.written: dict[FramedPart, Target] = {}  # parts that go home in this pass
        self.stepped = 0  # how many times a part was stepped
        self.visits: Visits | None = None  # of the latest pass
        self.partial: PartialStep | None = None  # of the latest pass
        self.hooks = [r.register_forward_pre_hook(_Unwrapped(self)) for r in roots_of(model)]
        self._choose(chosen)

    def _choose(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if id(parameter) not in self.chosen:
                self.chosen.add(id(parameter))
                self.hooks += _hooked(parameter, self)

    def take_in(
        self, lanes: Sequence[Lane], gradients: Sequence[GradientHome], chosen: Iterable[Tensor]
    ) -> None:
        """Step these lanes and parameters from now on."""
        with self.lock:
            super().take_in(lanes, gradients, chosen)
            self._choose(chosen)

    # --- a gradient -----------------------------------------------------------------------

    def check(self, parameter: Tensor) -> None:
        """Raise RuntimeError before autograd adds to a gradient that exists already."""
        if not self.active or parameter.grad is None or id(parameter) not in self.part_of:
            return
        if _accumulates(parameter):
            text = _TWICE if id(parameter) in self.came else _OLDER
            raise RuntimeError(text.format(tuple(parameter.shape)))

    def note(self, parameter: Tensor) -> None:
        """Step the part of a parameter if this gradient was the last one."""
        keeps_graph = torch.is_grad_enabled()
        with self.lock, torch.no_grad():
            key, task = id(parameter), torch._C._current_graph_task_id()
            if not self.active or key not in self.chosen:
                return
            if keeps_graph:
                raise RuntimeError(_GRAPH)
            if key in self.came:
                if _is_nested():
                    raise RuntimeError(_TWICE.format(tuple(parameter.shape)))
                self._end_round()
            if task != self.task:
                self._begin_pass(task, parameter)
            part, grad = self.part_of.get(key), parameter.grad
            if part is None or grad is None or grad.layout is not torch.strided:
                return
            if parameter.is_contiguous() and not grad.is_contiguous():
                parameter.grad = grad.contiguous()  # slices need that
            self.came.add(key)
            self.missing[id(part)].discard(key)
            if not self.missing[id(part)]:
                self.seen[id(part)] = part
            turn = self.turn_of[id(part)]
            if not any(self.missing[id(each)] for each in turn.parts):
                self._run(turn)

    def _run(self, turn: Turn) -> None:
        visits = self.visits
        assert visits is not None and self.partial is not None
        if turn in self.queue:
            while (first := self.queue.popleft()) is not turn:
                visits.skip(first)
        else:
            visits.call(turn)
        for part in turn.parts:
            if part.group is not None:
                part.group.is_settled_later = True
                self.written[part.group] = part.target
        for stay in turn.stays:
            stay.has_begun = False
        try:
            self._step_turn(turn, self.partial, visits)
        finally:  # after an exception, nothing is stepped twice
            for parameter in chain.from_iterable(s.parameters for s in turn.stays if s.has_begun):
                parameter.grad = None
        visits.skip(turn)  # visits of what was stepped over the bus
        self.stepped += len(turn.parts)

    # --- a pass, and the round until the next step() ----------------------------------------

    def _begin_pass(self, task: int, parameter: Tensor) -> None:
        """Expect the parts in the order of the last round. Passes may be nested."""
        self.settle()
        if not self.came:
            self._follow()
        for other in (p for part in self.parts for p in part.parameters if p is not parameter):
            expected = other.grad is None or id(other) in self.came
            if not expected and id(other) in self.part_of:
                raise RuntimeError(_OLDER.format(tuple(other.shape)))
        self.partial = PartialStep(self.optimizer, hooks=not has_hooks(self.optimizer))
        self._plan()
        streams = [torch.cuda.current_stream()] if torch.cuda.is_initialized() else []
        end = EndOfPass(self, *streams)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        self.task = task

    def _plan(self) -> None:
        present = set(map(id, self.parts))
        ahead = [p for p in self.order if id(p) in present and id(p) not in self.seen]
        rings = self._rings()
        alive = weakref.ref(self)

        def is_active() -> bool:
            return (step := alive()) is not None and step.active

        visits = Visits(self.optimizer, ahead, rings, {}, is_active, frozenset(self.part_of))
        self.visits = visits
        self.queue = deque(visits.turns)
        known = set(map(id, ahead))
        others = [part for part in self.parts if id(part) not in known]
        turns = [*self.queue, *(Turn([p], [Stay([p], list(p.parameters))]) for p in others)]
        self.turn_of = {id(part): turn for turn in turns for part in turn.parts}
        for stay in chain.from_iterable(turn.stays for turn in turns):
            stay.parameters = [p for p in stay.parameters if id(p) in self.part_of]
        self.missing = {
            id(part): {id(p) for p in part.parameters if id(p) in self.part_of and p.requires_grad}
            - (self.came | self.unreached)
            for part in self.parts
        }
        for target in rings:
            visits.look_ahead(target)

    def settle(self) -> None:
        """Let the current stream wait for the work of the pass, which has ended."""
        with self.lock:
            self.task = -1
            for ring in self.rings.values():
                ring.followed()
            written, self.written = self.written, {}
            for group in written:
                group.is_settled_later = False
            for frames, target in {g.frames: t for g, t in written.items()}.items():
                frames.settle(target.stream() or 0)

    def _end_round(self) -> None:
        """Learn the order of the parts, and which parameters had no gradients."""
        self.settle()
        if self.seen:
            self.order = list(self.seen.values())
        self.unreached -= self.came
        for part in self.parts:
            mine = [p for p in part.parameters if id(p) in self.part_of]
            if any(id(p) in self.came for p in mine):
                self.unreached |= {id(p) for p in mine if id(p) not in self.came and p.grad is None}
        self.seen, self.came = {}, set()

    def _follow(self) -> None:
        super()._follow()
        every = ((id(p), part) for part in self.parts for p in part.parameters)
        self.part_of = {key: part for key, part in every if key in self.chosen}

    def stepped_in_backward(self) -> int:
        """How many times a backward pass has stepped a part."""
        return self.stepped

    def steps_in_backward(self, parameter: Tensor) -> bool:
        """True for a parameter that backward passes step."""
        return id(parameter) in self.part_of

    # --- step() and the end ------------------------------------------------------------------

    def step(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Step the remaining parts, and call the hooks of the optimizer."""
        if any(each is not None for each in (*given, named.get("closure"))):
            raise ValueError(_CLOSURE)
        if "grad_scaler" in named or getattr(self.optimizer, "found_inf", None) is not None:
            raise RuntimeError(_SCALER)
        with self.lock:
            if self.came and self.partial is not None and (changed := self.partial.changed()):
                raise RuntimeError(_OPTIONS.format(*changed))
            self._end_round()
        every = [p for group in self.optimizer.param_groups for p in group["params"]]
        if all(p.grad is None for p in every):
            return original()
        result = super().step(original)
        for parameter in every:
            if id(parameter) in self.part_of:
                parameter.grad = None
        return result

    def stop(self) -> None:
        """Leave gradients alone from now on."""
        for hook in self.hooks:
            hook.remove()
        with contextlib.suppress(CUDAError):  # remove() waits for the devices anyway
            self.settle()
        super().stop()

    def forget(self) -> None:
        """Drop the references to parts."""
        super().forget()
        self.order, self.seen, self.part_of, self.turn_of = [], {}, {}, {}
        self.missing, self.written = {}, {}
        self.queue.clear()
        self.visits = self.partial = None


# --- hooks: copies of them, and pickles, do nothing ---------------------------------------------


class _Hook:
    """A hook with weak references: the collector cannot see cycles through torch's C++."""

    def __init__(self, step: BackwardStep) -> None:
        self.step = weakref.ref(step)

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return inert, ()


class _Before(_Hook):
    def __init__(self, step: BackwardStep, parameter: Tensor) -> None:
        super().__init__(step)
        self.parameter = weakref.ref(parameter)

    def __call__(self, _: Tensor) -> None:
        step, parameter = self.step(), self.parameter()
        if step is not None and parameter is not None:
            step.check(parameter)


class _After(_Hook):
    def __call__(self, parameter: Tensor) -> None:
        if (step := self.step()) is not None:
            step.note(parameter)


class _Unwrapped(_Hook):
    """Looks for DistributedDataParallel around the call of the model."""

    def __call__(self, module: nn.Module, arguments: object) -> None:
        if torch.compiler.is_compiling():  # a call of a compiled model is not checked
            return
        step = self.step()
        if step is not None and step.active and _active():
            raise RuntimeError(_PARALLEL)


def _active() -> object:
    """The DistributedDataParallel whose call is under way."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


def _hooked(parameter: Tensor, step: BackwardStep) -> list[RemovableHandle]:
    """Hook a parameter, which may begin to require gradients later."""
    required = parameter.requires_grad
    try:
        parameter.requires_grad_(True)  # else torch refuses the hooks
        before = parameter.register_hook(_Before(step, parameter))
        return [before, parameter.register_post_accumulate_grad_hook(_After(step))]
    finally:
        parameter.requires_grad_(required)


def _accumulates(parameter: Tensor) -> bool:
    """True if this backward pass adds to .grad, which torch.autograd.grad() does not do.

    torch raises RuntimeError here for a leaf whose gradient torch.autograd.grad() returns.
    """
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False


def _is_nested() -> bool:
    """True in the backward pass of a reentrant checkpoint, which is nested in another."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back
    return False
