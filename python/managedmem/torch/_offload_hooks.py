"""Announces the calls of modules to the frames: acquires parts before a call, releases them after.

Hooks of modules surround forward calls. A backward pass enters a module when it reaches a node of
the module's output. It leaves the module when it reaches a node of another one, or ends. Hooks
change no tensor, so modules that work in place keep working.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils import stateless
from torch.utils.hooks import RemovableHandle

from managedmem import CUDAError
from managedmem._managedmem import _Frames, _Slab
from managedmem.torch._offload_choice import LOADED_SLICES
from managedmem.torch._offload_compiled import in_compiled_code, leave_to_python, untraced
from managedmem.torch._offload_copies import inert
from managedmem.torch._offload_frames import FramedPart, FrameUse, end_use
from managedmem.torch._offload_operators import (
    BEGIN,
    END,
    ENTER,
    LEAVE,
    REACHED,
    announce,
    can_announce,
    define,
    key_of,
)
from managedmem.torch._offload_outputs import nodes_of
from managedmem.torch._offload_places import Target
from managedmem.torch._offload_plan import Part, Site
from managedmem.torch._offload_slices import SlicedPart, SliceUses

if TYPE_CHECKING:
    from managedmem.torch._offload_coverage import Watch

_REPLICAS = (
    "the module is offloaded, and DataParallel copies all of its parameters to each device: use "
    "DistributedDataParallel with one process for each device, or DataParallel with one device"
)
_WRITTEN = (
    "{!r} was written although the module is offloaded with read_only=True: call remove(), "
    "which keeps the write, and offload the module without read_only"
)
_WRITTEN_SHARED = (
    "{!r} was written although it is in memory that other processes have too: writes during a call "
    "are lost; other writes reach all processes. Parameters that require gradients when offload() "
    "is called have a copy that can be written"
)
_LEFT = (
    "{!r} is not in the memory that offload() streams: half(), to(), load_state_dict(assign=True) "
    "or an assignment has replaced it. It does not move: call refresh() of the handle, which "
    "managedmem.torch.Offload.of() returns, or change the module before offload()"
)
_NO_OPTIMIZER = (
    "{!r} has a gradient, but offload() was given no optimizer: gradients and state stay on the "
    "device, outside of the budget, and the device writes parameters page by page. Pass "
    "optimizer=... to offload()"
)
_READ_ONLY = (
    "{!r} has a gradient, but the module is offloaded with read_only=True: a step would be lost, "
    "and torch counts no write of a fused optimizer. Pass optimizer=... in place of read_only=True"
)
_BREAKS = (
    "managedmem.torch.offload() loads the parameters of a module between two graphs, because its "
    "arguments or its output have no tensor: compile without fullgraph=True, or with a budget that "
    "holds all parameters"
)


@dataclass(slots=True, eq=False)
class _Use:
    """Parts that are acquired on a stream for one call."""

    site: Site
    stream: int | None
    backward: bool
    held: tuple[FrameUse, ...]
    slices: SliceUses | None = None

    def end(self) -> None:
        """Release the parts."""
        for use in self.held:
            end_use(use, self.stream)
        if self.slices is not None:
            self.slices.end()


class _Uses:
    """The uses that one thread has acquired, the innermost call last."""

    def __init__(self) -> None:
        self.open: list[_Use] = []
        self.task: int | None = None  # the backward pass that calls back at its end
        self.in_round = False  # True in a round that compiled code began

    def end_last(self) -> None:
        """Release the last use. Other threads may do the same: each use ends once."""
        try:
            last = self.open.pop()
        except IndexError:
            return
        last.end()

    def end_all(self) -> None:
        """Release all uses, even those of a thread that ended without unwinding."""
        while self.open:
            self.end_last()

    def end_backward(self) -> list[Site]:
        """Release the uses of a backward pass, and return their sites."""
        left: list[Site] = []
        while self.open and self.open[-1].backward:
            left.append(self.open[-1].site)
            self.end_last()
        return left

    def __del__(self) -> None:
        try:  # noqa: SIM105
            self.end_all()  # the frames may be closed
        except Exception:
            pass  # contextlib.suppress() may be gone at exit


class _PassEnd:
    """Ends the uses of a backward pass: torch's C++ calls it, or drops it after an exception."""

    def __init__(self, uses: _Uses, announcer: Announcer) -> None:
        self.uses = weakref.ref(uses)
        self.announcer = weakref.ref(announcer)
        self.is_open = True

    def __call__(self) -> None:
        uses, announcer = self.uses(), self.announcer()
        if uses is not None:
            uses.task = None
        left = self._end()
        if announcer is not None:
            announcer.places.check_gradients(left)

    def _end(self) -> list[Site]:
        uses, announcer = self.uses(), self.announcer()
        left = uses.end_backward() if uses is not None else []
        was_open, self.is_open = self.is_open, False
        if announcer is not None and was_open:
            announcer.end_round()
        return left

    def __del__(self) -> None:
        try:  # noqa: SIM105
            self._end()
        except Exception:
            pass  # contextlib.suppress() may be gone at exit


class Versions:
    """Tensors that nothing may write, with torch's counts of their writes at the start."""

    def __init__(self) -> None:
        self._parts: dict[int, list[tuple[Tensor, str, int]]] = {}  # by the id of a part

    def watch(self, part: Part) -> None:
        """Note the counts of the tensors of a part, which nothing may write from now on.

        Tensors that are known keep their counts from before.
        """
        known = {id(t): version for t, _, version in self._parts.get(id(part), ())}
        pieces = [piece for block in part.blocks for piece in block.pieces]
        named = [pair for piece in pieces for pair in zip(piece.tensors, piece.names, strict=True)]
        # Tensors that were made in inference mode have no count.
        self._parts[id(part)] = [
            (t, n, known.get(id(t), t._version)) for t, n in named if not t.is_inference()
        ]

    def leave_out(self, gone: set[int]) -> None:
        """Allow writes to the tensors with these ids, which have left the model."""
        for key, watched in self._parts.items():
            self._parts[key] = [each for each in watched if id(each[0]) not in gone]

    def drop(self, part: Part) -> None:
        """Forget a part, before another object may get its id."""
        self._parts.pop(id(part), None)

    def check(self, part: Part) -> None:
        """Raise if a tensor of the part was written."""
        for tensor, name, version in self._parts.get(id(part), ()):
            if tensor._version != version:
                text = _WRITTEN_SHARED if part.is_shared else _WRITTEN
                raise RuntimeError(text.format(name))

    def written(self, shared: set[int]) -> tuple[list[str], list[str]]:
        """The names of written tensors: outside of the parts with these ids, and in them."""
        written: tuple[list[str], list[str]] = [], []
        for key, watched in self._parts.items():
            names = (name for tensor, name, version in watched if tensor._version != version)
            written[key in shared].extend(names)
        return written

    def forget(self) -> None:
        """Drop the references to the tensors."""
        self._parts.clear()


@dataclass(slots=True, eq=False)
class _Place:
    """Where a streamed tensor was when it was offloaded."""

    tensor: Tensor
    name: str
    storage: int  # its id
    parameters: dict[str, nn.Parameter | None]  # of its module; empty for a buffer
    key: str  # its name there

    def has_changed(self) -> bool:
        """True if the tensor has other memory, or its module another parameter."""
        present = self.parameters.get(self.key, self.tensor)
        if self.tensor.untyped_storage()._cdata != self.storage:
            return True
        replaced = present is not self.tensor and isinstance(present, nn.Parameter)
        return replaced and not _in_functional_call()


def _in_functional_call() -> bool:
    """True in functional_call(), which replaces tensors during a call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == stateless.__file__:
            return True
        frame = frame.f_back
    return False


class Places:
    """Where streamed tensors were, to warn once of one that has moved or has a gradient."""

    def __init__(self, has_optimizer: bool, read_only: bool) -> None:
        self._owners: dict[int, tuple[dict[str, nn.Parameter | None], str]] = {}
        self._parts: dict[int, list[_Place]] = {}  # by the id of a part
        self._watches_places = True  # until it has warned
        self._watches_gradients = not has_optimizer
        self._has_gradient = _READ_ONLY if read_only else _NO_OPTIMIZER

    def know(self, model: nn.Module) -> None:
        """Learn which modules own the parameters, before note()."""
        self._owners.clear()
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self._owners[id(parameter)] = module._parameters, key

    def leave_out(self, gone: set[int]) -> None:
        """Stop looking at the tensors with these ids, which have left the model."""
        for key, places in self._parts.items():
            self._parts[key] = [place for place in places if id(place.tensor) not in gone]

    def note(self, part: Part) -> None:
        """Note the places of the tensors of a part."""
        pieces = [piece for block in part.blocks for piece in block.pieces]
        named = [pair for piece in pieces for pair in zip(piece.tensors, piece.names, strict=True)]
        self._parts[id(part)] = [
            _Place(t, name, t.untyped_storage()._cdata, *self._owners.get(id(t), ({}, "")))
            for t, name in named
        ]

    def drop(self, part: Part) -> None:
        """Forget a part, before another object may get its id."""
        self._parts.pop(id(part), None)

    def check_places(self, site: Site) -> None:
        """Warn of a tensor that is in other memory by now."""
        if self._watches_places:
            for place in self._places(site):
                # A collection in this loop may call remove().
                if place.has_changed() and self._watches_places:
                    self._watches_places = False
                    warnings.warn(_LEFT.format(place.name), stacklevel=2)
                    return

    def check_gradients(self, sites: list[Site]) -> None:
        """Warn of a gradient outside of the budget, when a backward pass has left these sites."""
        if self._watches_gradients:
            for place in (place for site in sites for place in self._places(site)):
                tensor = place.tensor
                if tensor.is_leaf and tensor.grad is not None and self._watches_gradients:
                    self._watches_gradients = False
                    warnings.warn(self._has_gradient.format(place.name), stacklevel=2)
                    return

    def stop(self) -> None:
        """Warn of nothing any more, and drop the references to the tensors."""
        self._watches_places = self._watches_gradients = False
        self._parts.clear()
        self._owners.clear()

    def _places(self, site: Site) -> Iterator[_Place]:
        for part in (*site.parts, *site.sliced):
            yield from self._parts.get(id(part), ())


class Announcer:
    """Announces the calls of the sites of one device."""

    def __init__(
        self,
        target: Target,
        groups: Mapping[int, FramedPart],
        versions: Versions,
        places: Places,
        is_read_only: bool,
    ) -> None:
        self.target = target
        self.place = target.place
        self.groups = groups  # by the id of a part
        self.sliced: dict[int, SlicedPart] = {}  # by the id of a part
        self.frames: _Frames | None = None
        self.versions = versions
        self.places = places
        self.is_read_only = is_read_only
        self.active = True
        self.watch: Watch | None = None
        # Counts of uses without frames. Threads that count at once may lose some.
        self.on_device = self.at_home = 0
        self.in_graphs = can_announce()
        self.rounds = 0  # under way
        self._local = threading.local()
        self._all: weakref.WeakSet[_Uses] = weakref.WeakSet()
        self._lock = threading.RLock()  # for _all and rounds; a collection may call stop()

    def attach(self, site: Site) -> list[RemovableHandle]:
        """Hook the module of a site."""
        if self.in_graphs:
            define()
        before = site.module.register_forward_pre_hook(
            _Before(self, site), prepend=True, with_kwargs=True
        )
        after = site.module.register_forward_hook(_After(self, site), always_call=True)
        return [before, after]

    def attach_rounds(self, model: nn.Module) -> list[RemovableHandle]:
        """Hook a module whose calls are rounds."""
        before = model.register_forward_pre_hook(_RoundBegin(self), prepend=True)
        after = model.register_forward_hook(_RoundEnd(self), always_call=True)
        return [before, after]

    def start(self) -> None:
        """If nothing is written, begin a round that lasts, in which frames keep their contents."""
        if self.is_read_only and self.frames is not None:
            self.frames.begin_round(self.target.stream() or 0)

    def begin_round(self) -> None:
        """Let parts be loaded ahead, with their present contents at home."""
        if self.frames is not None and not self.is_read_only:
            with self._lock:
                self.rounds += 1
            with contextlib.suppress(CUDAError):
                self.frames.begin_round(self.target.stream() or 0)

    def end_round(self) -> None:
        if self.frames is not None and not self.is_read_only:
            with self._lock:
                self.rounds = max(0, self.rounds - 1)
            self.frames.end_round()

    def in_round(self) -> bool:
        """True while parts may be loaded ahead."""
        return self.rounds > 0

    def begin_compiled_round(self) -> None:
        """Begin a round in compiled code, and end one that an exception has left open."""
        self.end_compiled_round()
        self._uses().in_round = True
        self.begin_round()

    def end_compiled_round(self) -> None:
        """End the round of this thread in compiled code, if one is open."""
        uses = self._uses()
        if uses.in_round:
            uses.in_round = False
            self.end_round()

    def stop(self) -> None:
        """Release everything; later calls of the hooks do nothing."""
        self.active = False
        self.places.stop()
        with self._lock:
            everyone = list(self._all)
        for uses in everyone:
            uses.end_all()

    def enter(self, site: Site, backward: bool = False, in_python: bool = False) -> None:
        """Acquire the groups of a site on the current stream.

        Slices are loaded in calls that run `in_python`, because compiled code names none.
        """
        uses = self._uses()
        left: list[Site] = []
        # An open call that does not contain this one has ended: by an exception that skipped its
        # hook, or because its backward pass has gone on.
        while (last := uses.open[-1] if uses.open else None) is not None and (
            id(last.site.module) not in site.around
        ):
            if last.backward and not backward:
                break  # a forward call in a backward pass, as checkpoints make
            left.append(last.site)
            uses.end_last()
        if backward:
            if self.watch is not None:
                self.watch.reached()
            self._expect_end(uses)
            if uses.open and uses.open[-1].backward and uses.open[-1].site is site:
                return
        try:
            uses.open.append(self._acquire(site, backward, in_python))
            if in_python and site.sliced:
                self._show_slices(uses.open[-1])
        except BaseException:
            if self.active:
                raise
            return
        if not self.active:  # removed by another thread meanwhile
            uses.end_all()
        if backward:
            self.places.check_gradients(left)
        else:
            self.places.check_places(site)

    def _acquire(self, site: Site, backward: bool, in_python: bool) -> _Use:
        stream = self.target.stream()
        held: list[FrameUse] = []
        try:
            for part in site.parts:
                self.versions.check(part)
                if part.place == "device":
                    self.on_device += 1
                    continue
                group = self.groups.get(id(part))
                self.at_home += group is None
                use = None if group is None else group.acquire(stream, False, in_python or backward)
                if use is not None:
                    held.append(use)
                if self.watch is not None:
                    self.watch.used(part, backward, use is not None)
            for part in site.sliced:
                self.versions.check(part)
                if self.watch is not None:
                    self.watch.used(part, backward, in_python)
        except BaseException:
            for use in held:
                end_use(use, stream)
            raise
        return _Use(site, stream, backward, tuple(held))

    def add_slices(self, part: Part, slab: _Slab, offset: int) -> None:
        """Let calls load the slices of a part that they name."""
        frames = self.frames if part.reason == LOADED_SLICES else None
        in_round = None if self.is_read_only else self.in_round
        self.sliced[id(part)] = SlicedPart(
            part, frames, slab, offset, self.place, self._call_with, in_round
        )

    def _call_with(self, sliced: SlicedPart) -> SliceUses | None:
        """The innermost call of this thread that may name slices of the part."""
        open_calls = (use.slices for use in reversed(self._uses().open))
        return next((c for c in open_calls if c is not None and sliced in c.parts), None)

    def _show_slices(self, use: _Use) -> None:
        """Let a call name slices of its parameters."""
        parts = [self.sliced[id(part)] for part in use.site.sliced if id(part) in self.sliced]
        use.slices = SliceUses(parts, self.target, self.watch)
        use.slices.show()

    def leave(self, site: Site) -> None:
        """Release the uses of a forward call of the site."""
        uses = self._uses()
        for i, use in reversed(list(enumerate(uses.open))):  # a collection may end them meanwhile
            if use.site is site and not use.backward:
                while len(uses.open) > i:
                    uses.end_last()
                if use.slices is not None:
                    use.slices.check()
                return

    def holds(self, part: Part) -> bool:
        """True if this thread is in an announced call that uses the part."""
        sites = [use.site for use in self._uses().open]
        return any(part in site.parts or part in site.sliced for site in sites)

    def _uses(self) -> _Uses:
        try:
            uses: _Uses = self._local.uses
        except AttributeError:
            uses = self._local.uses = _Uses()
            with self._lock:
                self._all.add(uses)
        return uses

    def _expect_end(self, uses: _Uses) -> None:
        """Queue a callback for the end of the present backward pass."""
        task = torch._C._current_graph_task_id()
        if task != uses.task:
            uses.task = task
            self.begin_round()
            torch.autograd.Variable._execution_engine.queue_callback(_PassEnd(uses, self))


class _Hook:
    """A hook of a site, or of the model. A copy of its module, or a pickle, gets one that does
    nothing.
    """

    def __init__(self, announcer: Announcer, site: Site | None = None) -> None:
        self.announcer = announcer
        self.site = site
        self.key = key_of(self)

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return inert, ()

    def happen(self, event: int) -> None:
        """Announce an event; an operator in compiled code calls this."""
        announcer, site = self.announcer, self.site
        if not announcer.active:
            return
        if event == BEGIN:
            announcer.begin_compiled_round()
        elif event == END:
            announcer.end_compiled_round()
        elif site is not None and event == LEAVE:
            announcer.leave(site)
        elif site is not None and (event == ENTER or torch._C._current_graph_task_id() >= 0):
            announcer.enter(site, backward=event == REACHED)

    def traced(self, event: int, value: object) -> None:
        """Announce in a graph that is being compiled, or between two graphs."""
        in_graph = self.announcer.in_graphs and not torch.compiler._is_exporting_flag
        if not in_graph or not announce(self.key, self.announcer.place, event, value):
            _apart(self.announcer, self.site, event, value)


class _RoundBegin(_Hook):
    """The beginning of a call of the model."""

    def __call__(self, module: nn.Module, arguments: object) -> None:
        if self.announcer.active:
            if torch.compiler.is_dynamo_compiling():
                self.traced(BEGIN, None)
            else:
                untraced(_begin)(self.announcer, None, False)


class _RoundEnd(_Hook):
    def __call__(self, module: nn.Module, arguments: object, output: object = None) -> None:
        if self.announcer.active:
            if torch.compiler.is_dynamo_compiling():
                self.traced(END, output)
            else:
                untraced(_end)(self.announcer, None, None)


class _Before(_Hook):
    def __call__(self, module: nn.Module, arguments: object, named: object) -> None:
        if self.announcer.active:
            if torch.compiler.is_dynamo_compiling():
                self.traced(ENTER, (arguments, named))
                return
            if "_is_replica" in vars(module):
                raise RuntimeError(_REPLICAS)
            in_python = not in_compiled_code()
            untraced(_begin)(self.announcer, self.site, in_python)


class _After(_Hook):
    def __call__(self, module: nn.Module, arguments: object, output: object) -> None:
        if self.announcer.active:
            if torch.compiler.is_dynamo_compiling():
                self.traced(LEAVE, output)
            else:
                untraced(_end)(self.announcer, self.site, output)


# If torch.compile compiled such a call alone, its graph would lack the nodes of the output.
for _call in (_RoundBegin.__call__, _RoundEnd.__call__, _Before.__call__, _After.__call__):
    leave_to_python(_call)


class _Reached:
    """A hook with weak references: the collector cannot see cycles through torch's C++."""

    def __init__(self, announcer: Announcer, site: Site) -> None:
        self.announcer = weakref.ref(announcer)
        self.site = weakref.ref(site)

    def __call__(self, *gradients: object) -> None:
        announcer, site = self.announcer(), self.site()
        if announcer is not None and announcer.active and site is not None:
            announcer.enter(site, backward=True)


def _apart(announcer: Announcer, site: Site | None, event: int, value: object) -> None:
    """Announce in Python, between two graphs: torch.compile does not trace this function."""
    if event in (BEGIN, ENTER):
        untraced(_begin)(announcer, site, False)
    else:
        untraced(_end)(announcer, site, value)


# torch.compile(fullgraph=True) has this text in its error.
vars(_apart)["_torchdynamo_disable"] = True
vars(_apart)["_torchdynamo_disable_msg"] = _BREAKS


# Few functions, and no bound methods: torch.compile makes guards for each one, and keeps them.
def _begin(announcer: Announcer, site: Site | None, in_python: bool) -> None:
    if site is None:
        announcer.end_compiled_round()
        announcer.begin_round()
    else:
        announcer.enter(site, in_python=in_python)


def _end(announcer: Announcer, site: Site | None, output: object) -> None:
    if site is None:
        announcer.end_round()
        return
    announcer.leave(site)
    if not torch.is_grad_enabled() or not site.parts:
        return
    reached = _Reached(announcer, site)
    for node in nodes_of(output):
        node.register_prehook(reached)
