"""Coverage of offload(): how many of the calls that used a part were announced.

Owns the evidence of uses that no hook sees: operations on the memory of a part in the first call of
the model, and gradients without a backward call.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from managedmem.torch._offload_compiled import in_compiled_code
from managedmem.torch._offload_copies import inert
from managedmem.torch._offload_outputs import nodes_of
from managedmem.torch._offload_plan import _LOOKUPS, Part
from managedmem.torch._offload_together import roots_of

_FIRST = "_compiled_call_impl"  # what torch calls in place of a module's hooks and forward
_UNSEEN = (
    "{names} {were} used without a call that offload() sees, and the device read {nbytes:,} bytes "
    "over the bus: results are right, but slow. {reason}. handle.coverage counts the calls of each"
)
_DIRECT = "{name} is not called itself, only its forward() or its submodules: call {name}"
_PARENT = (
    "{user} uses the parameters without calling {name}: name {user} in blocks=, or call {name}"
)
_GRADIENT = (
    "There are gradients, but no backward call was announced: call the module itself, return "
    "tensors in containers or attributes, or name the module whose forward uses it in blocks="
)


class Coverage(NamedTuple):
    """The calls of one part of an offloaded module, from ``Offload.coverage``.

    A call is a forward call or a backward pass that uses the part's parameters. `seen` counts
    announced calls, before which the part could be loaded; `made` also counts other calls that were
    noticed, see ``Offload.coverage``. `bus_bytes` are the bytes that the device used over the bus.
    A call that was not announced, or for which the budget had no room, counts the bytes of the
    part. Embeddings count the rows that they looked up. Experts in one parameter count the slices
    that had no frame, or all slices for a call that named none.
    """

    seen: int
    made: int
    bus_bytes: int


class _Holder(Protocol):
    """The hooks that announce the calls of a part."""

    def holds(self, part: Part) -> bool:
        """True while the calling thread has acquired the part."""


@dataclass(slots=True, eq=False)
class _Tally:
    """The calls of one part."""

    name: str
    part: Part
    announcer: weakref.ref[_Holder]  # weak: it refers to the tallies
    is_acquired: bool  # by hooks, in calls of a module
    is_lookup: bool = False  # a few rows of it are read over the bus, on purpose
    is_read_at_home: bool = False  # in backward passes at least
    seen: int = 0
    backward: int = 0  # of the seen calls
    missed: int = 0
    bus_bytes: int = 0
    # By the id of a root: how many calls its first call announced, if it also used the part without
    # an announcement.
    seen_when_missed: dict[int, int] = field(default_factory=dict)

    def miss(self) -> None:
        """Count a use that was not announced."""
        self.missed += 1
        self.bus_bytes += self.part.nbytes

    def tensors(self) -> Iterator[Tensor]:
        """The tensors of the part."""
        yield from (t for block in self.part.blocks for p in block.pieces for t in p.tensors)

    def gradients(self) -> list[tuple[int, int] | None]:
        """A mark for each gradient, which changes when something is added to it."""
        return [_mark(t.grad) if t.is_leaf else None for t in self.tensors()]


def _mark(gradient: Tensor | None) -> tuple[int, int] | None:
    if gradient is None:
        return None
    return id(gradient), 0 if gradient.is_inference() else gradient._version


@dataclass(slots=True)
class _Pass:
    """The state at the start of a backward pass that is under way."""

    gradients: dict[int, list[tuple[int, int] | None]]
    backward: dict[int, int]
    alone: bool  # no other pass was under way


class _Local(threading.local):
    """The calls of roots under way in one thread."""

    def __init__(self) -> None:
        self.rounds: list[dict[int, int]] = []  # for each, the seen calls of the parts at its start


class Watch:
    """The tallies of one offload(), whose roots are the modules that it was given."""

    def __init__(self, model: nn.Module) -> None:
        self.active = True
        self._roots = [weakref.ref(root) for root in roots_of(model)]
        self.names: dict[int, str] = {}  # of modules, by their ids
        self.places: dict[int, list[_Tally]] = {}  # by the address of a storage
        self._tallies: dict[int, _Tally] = {}  # by the id of a part
        self._watched: set[int] = set()  # the ids of roots whose operations were watched in a call
        self._passes: dict[int, _Pass] = {}
        self._local = _Local()
        self._has_warned = False
        self._final: dict[str, Coverage] = {}
        self._lock = threading.RLock()  # a collection while it is held may call remove()
        self.know(model)

    # --- the start and the end --------------------------------------------------------------

    def know(self, model: nn.Module) -> None:
        """Learn the names of the modules, and watch the next call of each root."""
        self.names.update((id(module), name) for name, module in model.named_modules())
        self._watched.clear()

    def forget(self, parts: set[int]) -> None:
        """Stop counting the calls of the parts with these ids."""
        with self._lock:
            self._tallies = {key: t for key, t in self._tallies.items() if key not in parts}
            for place, tallies in self.places.items():
                self.places[place] = [t for t in tallies if id(t.part) not in parts]

    def add(self, part: Part, name: str, announcer: _Holder, is_acquired: bool) -> None:
        """Count the calls of a part, unless it is known."""
        if id(part) in self._tallies:
            return
        tally = self._tallies[id(part)] = _Tally(name, part, weakref.ref(announcer), is_acquired)
        tally.is_read_at_home = part.use == "slices" and part.place == "home"
        for piece in (piece for block in part.blocks for piece in block.pieces):
            self.places.setdefault(piece.storage.data_ptr(), []).append(tally)

    def attach(self) -> list[RemovableHandle]:
        """Hook the roots, and the lookups in them; nothing if nothing is streamed."""
        hooks: list[RemovableHandle] = []
        for ref in self._roots if self._tallies else ():
            if (root := ref()) is not None:
                hooks += self._attach_to(root)
        return hooks

    def _attach_to(self, root: nn.Module) -> list[RemovableHandle]:
        hooks = [
            root.register_forward_pre_hook(_RoundStart(self), prepend=True),
            root.register_forward_hook(_RoundEnd(self), always_call=True),
        ]
        for module in root.modules():
            weight = module._parameters.get("weight")
            if getattr(type(module), "forward", None) in _LOOKUPS and weight is not None:
                for tally in self.places.get(weight.untyped_storage().data_ptr(), ()):
                    tally.is_lookup = not tally.is_acquired
                    hook = _Lookup(self, tally)
                    hooks.append(module.register_forward_hook(hook, with_kwargs=True))
        if getattr(root, _FIRST, self) is None and hasattr(_Probe, "ignore_compile_internals"):
            vars(root)[_FIRST] = _FirstCall(self, root)
        return hooks

    def stop(self) -> None:
        """Count nothing any more, and drop the references to the tensors."""
        if self.active:
            self._final = self.result()
        self.active = False
        for ref in self._roots:
            if (root := ref()) is not None:
                _end_first_call(root)
        with self._lock:
            self._tallies, self.places = {}, {}
            self._passes.clear()

    def result(self) -> dict[str, Coverage]:
        """The calls of each part, by its name."""
        if not self.active:
            return dict(self._final)
        by_part: dict[str, Coverage] = {}
        with self._lock:
            for tally in self._tallies.values():
                # The parts of one module are used together.
                seen, made, nbytes = by_part.get(tally.name, (0, 0, 0))
                mine = tally.seen + tally.missed
                by_part[tally.name] = Coverage(
                    max(seen, tally.seen), max(made, mine), nbytes + tally.bus_bytes
                )
        return by_part

    # --- announced calls --------------------------------------------------------------------

    def used(self, part: Part, backward: bool, on_device: bool) -> None:
        """Count an announced call of a part."""
        with self._lock:
            tally = self._tallies.get(id(part))
            if tally is not None:
                tally.seen += 1
                tally.backward += backward
                tally.bus_bytes += 0 if on_device else part.nbytes

    def read_at_home(self, part: Part, nbytes: int) -> None:
        """Count bytes that an announced call reads over the bus."""
        with self._lock:
            tally = self._tallies.get(id(part))
            if tally is not None:
                tally.bus_bytes += nbytes

    def looked_up(self, tally: _Tally, nbytes: int) -> None:
        """Count a call that read some rows of a part."""
        with self._lock:
            tally.seen += 1
            tally.bus_bytes += nbytes

    # --- calls of the roots -----------------------------------------------------------------

    def seen(self) -> dict[int, int]:
        """The announced calls of each part so far, by the id of the part."""
        return {key: tally.seen for key, tally in self._tallies.items()}

    def begin_round(self) -> None:
        """A call of a root begins."""
        self._local.rounds.append(self.seen())

    def end_round(self, root: nn.Module, output: Any) -> None:
        """A call of a root ends: notice the parts that it used without an announcement."""
        before = self._local.rounds.pop() if self._local.rounds else {}
        if torch.is_grad_enabled():
            me = weakref.ref(self)  # torch keeps the hooks as long as the output

            def reached(*gradients: object) -> None:
                watch = me()
                if watch is not None:
                    watch.reached()

            for node in nodes_of(output):
                node.register_prehook(reached)
        with self._lock:
            for key, tally in self._tallies.items():
                since = tally.seen - before.get(key, tally.seen)
                if since <= tally.seen_when_missed.get(id(root), -1):
                    tally.miss()  # as the first call did

    def end_first_round(
        self,
        root: nn.Module,
        missed: dict[int, tuple[_Tally, str | None]],
        before: dict[int, int],
    ) -> None:
        """Count parts that operations of a first call used without an announcement."""
        with self._lock:
            if id(root) in self._watched or not self.active:
                return
            self._watched.add(id(root))
            missed = {k: v for k, v in missed.items() if id(root) not in v[0].seen_when_missed}
            for tally, _ in missed.values():
                tally.miss()
                tally.seen_when_missed[id(root)] = tally.seen - before.get(id(tally.part), 0)
        for tally, user in missed.values():
            name, by = repr(tally.name or "model"), repr(user or "model")
            if user is None:
                reason = _GRADIENT
            elif user == tally.name or user.startswith(f"{tally.name}."):
                reason = _DIRECT.format(name=name)
            else:
                reason = _PARENT.format(user=by, name=name)
            self._warn([each for each, _ in missed.values()], reason)

    # --- backward passes --------------------------------------------------------------------

    def reached(self) -> None:
        """A backward pass has reached a hooked node: note its state, and ask torch for its end."""
        task = torch._C._current_graph_task_id()
        with self._lock:
            if task in self._passes or not self.active:
                return
            for other in self._passes.values():
                other.alone = False
            self._passes[task] = _Pass(
                {key: tally.gradients() for key, tally in self._tallies.items()},
                {key: tally.backward for key, tally in self._tallies.items()},
                not self._passes,
            )
        torch.autograd.Variable._execution_engine.queue_callback(_PassEnd(self, task))

    def end_pass(self, task: int) -> None:
        """Notice the parts that have new gradients without an announcement."""
        missed: list[_Tally] = []
        with self._lock:
            ended = self._passes.pop(task, None)
            if ended is None:
                return
            for key, tally in self._tallies.items():
                before = ended.backward[key] if ended.alone else 0
                if tally.is_lookup or tally.is_read_at_home or tally.backward > before:
                    continue
                now = tally.gradients()
                pairs = zip(now, ended.gradients[key], strict=True)
                if any(mark is not None and mark != old for mark, old in pairs):
                    tally.miss()
                    missed.append(tally)
        self._warn(missed, _GRADIENT)

    def drop_pass(self, task: int) -> None:
        """Forget a pass that ended by an exception."""
        with self._lock:
            self._passes.pop(task, None)

    def _warn(self, tallies: list[_Tally], reason: str) -> None:
        if not tallies or self._has_warned or not self.active:
            return
        self._has_warned = True
        names = list(dict.fromkeys(repr(tally.name or "model") for tally in tallies))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        text = ", ".join(names[:3]) + more
        were = "were" if len(names) > 1 else "was"
        nbytes = sum(tally.part.nbytes for tally in tallies)
        warnings.warn(
            _UNSEEN.format(names=text, were=were, nbytes=nbytes, reason=reason), stacklevel=3
        )


# --- hooks ---------------------------------------------------------------------------------


class _Hook:
    """A hook of a module. A copy of its module, or a pickle, gets one that does nothing."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return inert, ()

    def is_on(self, module: nn.Module) -> bool:
        """False in compiled code, where the call would break the graph, and in a replica."""
        return self.watch.active and not in_compiled_code() and "_is_replica" not in vars(module)


class _RoundStart(_Hook):
    def __call__(self, module: nn.Module, arguments: object) -> None:
        if not torch.compiler.is_compiling() and self.is_on(module):
            self.watch.begin_round()


class _RoundEnd(_Hook):
    def __call__(self, module: nn.Module, arguments: object, output: object) -> None:
        if not torch.compiler.is_compiling() and self.is_on(module):
            self.watch.end_round(module, output)


class _Lookup(_Hook):
    def __init__(self, watch: Watch, tally: _Tally) -> None:
        super().__init__(watch)
        self.tally = tally

    def __call__(self, module: Any, given: Any, named: Any, output: object) -> None:
        if not torch.compiler.is_compiling() and self.is_on(module):
            rows = given[0] if given else named["input"]
            weight = module.weight
            nbytes = rows.numel() * weight.shape[-1] * weight.element_size()
            self.watch.looked_up(self.tally, nbytes)


class _PassEnd:
    """Ends a backward pass: torch calls it, or drops it after an exception."""

    def __init__(self, watch: Watch, task: int) -> None:
        self.watch = weakref.ref(watch)
        self.task = task

    def __call__(self) -> None:
        watch = self.watch()
        if watch is not None:
            watch.end_pass(self.task)

    def __del__(self) -> None:
        try:
            watch = self.watch()
            if watch is not None:
                watch.drop_pass(self.task)
        except Exception:
            pass  # contextlib.suppress() may be gone at exit


# --- the first call -------------------------------------------------------------------------


class _FirstCall:
    """Takes the calls of a root until one has returned, and watches the operations of each."""

    def __init__(self, watch: Watch, model: nn.Module) -> None:
        self.watch = watch
        self.model = weakref.ref(model)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # nn.Module leaves this attribute out of copies, but parametrized modules do not.
        return type(None), ()

    def __call__(self, *given: Any, **named: Any) -> Any:
        model = self.model()
        if torch.compiler.is_compiling() and model is not None:
            return model._call_impl(*given, **named)
        module = sys._getframe(1).f_locals.get("self")  # replicas have this object too
        if not isinstance(module, nn.Module) or vars(module).get(_FIRST) is not self:
            module = model
        assert module is not None
        if module is not model or in_compiled_code() or not self.watch.active:
            return module._call_impl(*given, **named)
        before = self.watch.seen()
        with _Probe(self.watch) as probe:
            result = module._call_impl(*given, **named)
        _end_first_call(module)
        self.watch.end_first_round(module, probe.missed, before)
        return result


def _end_first_call(module: nn.Module) -> None:
    if isinstance(vars(module).get(_FIRST), _FirstCall):
        vars(module).pop(_FIRST, None)  # another thread may do the same


class _Probe(TorchDispatchMode):
    """Looks at the operations of one call, and changes none."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code in the call stays compiled

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch
        self.missed: dict[int, tuple[_Tally, str | None]] = {}  # with the module that used it

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # A view reads nothing, and an embedding reads only a few rows.
        if not getattr(func, "is_view", False) and "embedding" not in str(func):
            for value in (*args, *kwargs.values()):
                for each in value if isinstance(value, list | tuple) else (value,):
                    if type(each) in (Tensor, nn.Parameter):
                        self._look_at(each)
        return func(*args, **kwargs)

    def _look_at(self, tensor: Tensor) -> None:
        try:
            place = tensor.untyped_storage().data_ptr()
        except RuntimeError:  # no dense memory
            return
        for tally in self.watch.places.get(place, ()):
            if id(tally) in self.missed or tally.is_lookup:
                continue
            announcer = tally.announcer()
            if announcer is not None and not announcer.holds(tally.part):
                self.missed[id(tally)] = tally, self._user()

    def _user(self) -> str | None:
        """The name of the innermost module that is running."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            running = id(frame.f_locals.get("self"))
            if running in self.watch.names:
                return self.watch.names[running]
            frame = frame.f_back
        return None
