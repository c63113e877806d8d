"""offload: streams the parameters of a module through a budget of device memory.

Owns the public function and its handle, and the return of everything to its place.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from managedmem import Device
from managedmem._limits import read_budget
from managedmem.torch._moving import _swap
from managedmem.torch._offload_arguments import (
    DeviceModule,
    asked_places,
    check_parameters,
    check_read_only,
    checked_optimizer,
    chosen_blocks,
    device_modules,
    shared_out,
    tensors_of,
)
from managedmem.torch._offload_backward_step import (
    BackwardStep,
    check_step_in_backward,
    whole_parameters,
)
from managedmem.torch._offload_children import Claim, check_children, check_claims
from managedmem.torch._offload_choice import TOO_LARGE, Place
from managedmem.torch._offload_compiled import drop_compiled
from managedmem.torch._offload_copies import Handle
from managedmem.torch._offload_coverage import Coverage, Watch
from managedmem.torch._offload_explain import Explanation, PartPlace
from managedmem.torch._offload_frames import can_move_storages
from managedmem.torch._offload_gradients import GradientHome
from managedmem.torch._offload_lane import DeviceLane
from managedmem.torch._offload_optimizer import SplitStep
from managedmem.torch._offload_places import is_home, move_back
from managedmem.torch._offload_plan import Part, direct_tensors
from managedmem.torch._offload_room import bytes_of_budget, check_host, check_room
from managedmem.torch._offload_shares import Share
from managedmem.torch._offload_suspension import check_suspendable, resume, suspend
from managedmem.torch._offload_together import Members, as_one, kind_of, roots_of
from managedmem.torch._optimizer_state import OffloadedOptimizer
from managedmem.torch._tensors import Found

_Device: TypeAlias = "Device | torch.device | str | int"


class _HasComponents(Protocol):
    @property
    def components(self) -> Mapping[str, Any]: ...


_WRITTEN = (
    "written while the module was offloaded with read_only=True: {}. The writes are kept: offload "
    "the module without read_only if they are meant",
    "written in memory that other processes have too: {}. Writes during a call are lost; other "
    "writes reach all processes",
)
_KEPT = "_managedmem_offload"  # the attribute of each module that keeps the handle


def offload(
    model: nn.Module | Mapping[str, nn.Module] | Iterable[nn.Module] | _HasComponents,
    device: _Device | Mapping[str, _Device],
    *,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    blocks: Iterable[str | nn.Module] | None = None,
    places: Mapping[str, Place] | None = None,
    read_only: bool = False,
    step_in_backward: bool = False,
    suspendable: bool = False,
) -> Offload:
    """Run a module on a device that holds only a part of its parameters at a time.

    Parameters
    ----------
    model : torch.nn.Module, pipeline, mapping or iterable of modules
        A module on the CPU or on a CUDA device. Its Parameter objects stay the same. Several
        modules, such as an encoder and a decoder, can share the budget: give them in a list or a
        dict, or give an object that has them in `components`, such as a pipeline of diffusers. The
        name of a module, or its number in the list, is the first part of the names of its
        submodules. A parameter that two modules have counts once.
    device : Device, torch.device, str, int, or a mapping of submodule names to these
        Where the model runs. With a mapping, each submodule runs on its device, with a budget of
        its own; together these submodules must hold every parameter.
    budget : int or str
        The most bytes of parameters on the device at any time, as the driver counts them. Give a
        number, text such as "2 GiB", or "auto" for what is free, less a fifth of it for
        activations. With an optimizer the budget also covers gradients and state that stay on the
        device. MemoryError if the device has less free, or the host has no room for the rest; a
        UserWarning tells of blocks that are too large for the budget.
    optimizer : torch.optim.Optimizer, optional
        The optimizer that will train the model. Gradients and state for which the budget has no
        room live on the host. Each step looks at the groups of the optimizer and at requires_grad
        anew. Without an optimizer, uses count as reads, and only writes that torch counts are
        copied home; gradients and state are outside of the budget, and a UserWarning tells of the
        first gradient of a streamed parameter.
    blocks : iterable of submodule names or submodules, optional
        Submodules that move as a whole; a ModuleList or ModuleDict stands for its members. By
        default these are submodules without submodules, and others of at most 64 MiB and a quarter
        of the budget.
    places : mapping of names of submodules or tensors to places, optional
        Where these are kept: "device", "frames" (loaded for each use) or "home" (read over the
        bus). offload() chooses the places of the others, which handle.explain() lists.
    read_only : bool
        True promises that nothing writes a parameter while the module is offloaded. Frames then
        keep their contents from one call to the next, such as the experts that are used most. After
        a write that torch has counted, the next call of its submodule raises RuntimeError, and
        remove() warns with UserWarning; both name the parameter. Not together with an optimizer.
    step_in_backward : bool
        True steps each part of the parameters in the backward pass, once its gradients are
        complete, and then frees these gradients. optimizer.step() must follow each pass, and steps
        the remaining parameters. This is for optimizers of torch that step part by part. It does
        not work with gradient clipping, GradScaler, gradients that accumulate over passes, closures
        and DistributedDataParallel.
    suspendable : bool
        True lets handle.suspend() give the device memory of the parameters back for a while. This
        memory comes in whole units of the driver, of 2 MiB, and other devices cannot reach it.
        Parameters that are on the device already are copied into it, for which the device needs
        room.

    Parts that do not stay on the device have their home in page-locked memory of the host, of
    exactly their size. Before the forward and the backward call of a submodule, its parameters are
    copied to frames, which are memory of the device. Where the order of calls is known, the copies
    run ahead of the call. For the time of the call the tensors point to the frames. If one
    parameter holds several experts, a call without gradients loads only the slices that it indexes.
    Streams wait for each other: no call waits for the device, except the first one in a captured
    graph, and there is no thread. Writes of a call or the optimizer are copied home afterwards. A
    use outside of these calls reads the parameter at home, over the bus. If everything fits in the
    budget, everything is on the device from the start, and modules have no hooks. A model that is
    dropped without remove() is freed like a plain one.

    Inputs must be on the device. On the emulated driver, where torch has no GPU, the tensors stay
    CPU tensors and the same calls move their memory.

    Returns a handle, which is a context manager. handle.remove() moves everything back to the
    device where it was. Raises TypeError and ValueError for arguments that cannot be offloaded,
    MemoryError, such as CUDAOutOfMemoryError, when memory runs out, and CUDAError when the driver
    refuses; after an error the module is unchanged. No other thread may use the module
    during offload() and remove(); between them, threads and streams may call it as they may call
    any module. Driver: cuMemAlloc, cuMemHostRegister, cuMemcpyAsync, cuEventRecord,
    cuStreamWaitEvent.
    """
    if not can_move_storages():
        raise RuntimeError(
            f"torch {torch.__version__} keeps the pointers of storages at a place that offload() "
            "does not know: use another version of torch, and report this one"
        )
    wanted = read_budget(budget)
    whole = as_one(model)
    check_children(whole)
    _refuse_offloaded(whole)
    optimizer = checked_optimizer(optimizer)
    if optimizer is not None and OffloadedOptimizer.of(optimizer) is not None:
        raise ValueError(
            "the state of the optimizer is offloaded by offload_optimizer(): call remove() on its "
            "handle, which managedmem.torch.OffloadedOptimizer.of() returns"
        )
    chosen = chosen_blocks(whole, blocks)
    tensors = tensors_of(whole)
    modules = device_modules(whole, device, tensors)
    if optimizer is not None:
        check_parameters(whole, optimizer)
    check_read_only(read_only, optimizer)
    check_claims(whole, tensors, read_only=read_only)
    check_step_in_backward(step_in_backward, optimizer)
    check_suspendable(suspendable)
    asked = asked_places(whole, places)
    limit = bytes_of_budget(wanted, modules)
    check_room(modules, limit, suspendable)
    handle = object.__new__(Offload)
    handle._suspendable, handle._suspended = suspendable, False
    handle._start(whole, modules, limit, optimizer, chosen, asked, read_only, step_in_backward)
    return handle


def _refuse_offloaded(model: nn.Module, own: Offload | None = None) -> None:
    for key, module in model.named_modules():
        if Offload.of(module) not in (None, own):
            name = repr(key) if key else "model"
            raise ValueError(
                f"{name} ({type(module).__name__}) is offloaded already: call remove() on its "
                "handle first, which managedmem.torch.Offload.of() returns"
            )


def _name(part: Part) -> str:
    """A part's name for a message, with the number of its parameters if they share one storage."""
    name = repr(part.name) if part.name else "the module's own parameters"
    shared = max(len(piece.tensors) for block in part.blocks for piece in block.pieces)
    return f"{name} ({shared} parameters in one storage)" if shared > 1 else name


class Offload(Handle):
    """The handle of an offloaded module, which offload() returns.

    A context manager: the end of the block calls remove(). The module keeps its handle:
    Offload.of(module) returns it. A copy or pickle of a handle is None, because a copy of the
    module is not offloaded. Safe from every thread; for remove() see offload().
    """

    _suspendable: bool
    _suspended: bool

    def __init__(self) -> None:
        raise TypeError("Offload objects are made by offload()")

    def _start(
        self,
        model: nn.Module,
        modules: list[DeviceModule],
        budget: int,
        optimizer: torch.optim.Optimizer | None,
        chosen: dict[int, str],
        asked: dict[int, Place],
        read_only: bool,
        step_in_backward: bool,
    ) -> None:
        self._kind = kind_of(model)  # no reference to the model, which keeps the handle
        self._optimizer_ref = None if optimizer is None else weakref.ref(optimizer)
        self._budget = budget
        self._lanes: list[DeviceLane] = []
        self._gradients: list[GradientHome] = []
        self._shares: list[Share] = []
        self._step: SplitStep | None = None
        self._removing = threading.Lock()
        self._removed = False
        self._lost = 0  # failures before remove()
        self._ended = 0  # steps in backward passes before remove()
        self._claim: Claim | None = None
        self._layout: list[tuple[int, ...]] = []
        self._watch = Watch(model)
        self._watch_hooks: list[RemovableHandle] = []
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # all that got the handle
        self._origins = {id(p): (p, p.device) for p in model.parameters()}
        self._members = Members(model)
        self._steps_in_backward = step_in_backward
        try:
            with torch.inference_mode(False), torch.no_grad():
                for own in modules:
                    lane = DeviceLane(
                        own, budget, optimizer, chosen, asked, read_only, self._suspendable
                    )
                    self._lanes.append(lane)
                    lane.fill(own)
                    lane.watch(self._watch)
                self._watch_hooks = self._watch.attach()
                if self._watch_hooks:
                    drop_compiled(model)
                self._follow()
                if optimizer is not None:
                    self._train(optimizer, model)
            for lane in self._lanes:
                self._warn_of_what_does_not_fit(lane, lane.plan.streamed, 4)
        except BaseException:
            self.remove()
            raise
        self._keep(model, [pair for own in modules for pair in own.tensors])

    def _keep(self, model: nn.Module, tensors: Found) -> None:
        """Let the modules keep the handle, and let no other model offload their memory."""
        names = {id(tensor): name for name, tensor in tensors}
        entries = (entry for lane in self._lanes for entry in lane.moved)
        kept = [pair for entry in entries for pair in entry.kept]  # tensors, their earlier memory
        before = [(names[id(t)], old) for t, old in kept if id(t) in names]
        self._claim = Claim(self._kind, before + tensors, self._lanes[0].read_only)
        self._layout = _layout_of(model)
        for module in model.modules():
            self._modules.add(module)
            vars(module)[_KEPT] = self

    def _warn_of_what_does_not_fit(
        self, lane: DeviceLane, parts: list[Part], stacklevel: int
    ) -> None:
        """Warn of blocks that are larger than the frames.

        _start() calls it in its `try`, so that nothing stays offloaded where warnings are errors.
        """
        large = [part for part in parts if part.reason == TOO_LARGE]
        if not large:
            return
        streams = any(part.place == "frames" for part in parts)
        start = (
            f"{len(large)} of {len(parts)} blocks never fit on"
            if streams
            else "nothing is streamed to"
        )
        warnings.warn(
            f"{start} {lane.target.device}: kernels read such parameters over the bus. The budget "
            f"of {self._budget:,} bytes leaves {lane.plan.frames:,} for frames, and the largest "
            f"block, {_name(large[-1])}, has {large[-1].nbytes:,}: give a larger budget",
            stacklevel=stacklevel,
        )

    def _follow(self) -> None:
        """Move gradients and state to the device to which their parameter has moved."""
        changes: list[tuple[Tensor, Tensor]] = []
        for parameter, origin in self._origins.values():
            place = parameter.device
            for tensor in self._companions(parameter) if place != origin else ():
                if tensor.device == origin and (
                    tensor.dim() > 0 or self._steps_on_device(parameter)
                ):
                    changes.append((tensor, tensor.data.to(place)))
        _swap(changes)

    def _companions(self, parameter: Tensor) -> Iterator[Tensor]:
        """The gradient and the optimizer's state of a parameter."""
        if parameter.grad is not None:
            yield parameter.grad
        state = self._optimizer.state.get(parameter, {}) if self._optimizer is not None else {}
        yield from _tensors_in(state)

    def _steps_on_device(self, parameter: Tensor) -> bool:
        """True if the optimizer keeps the step count of a parameter on the parameter's device."""
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return any(
            (group.get("fused") or group.get("capturable"))
            and any(each is parameter for each in group["params"])
            for group in groups
        )

    @property
    def _optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; None if there is none, or its owner has dropped it and so its state."""
        return None if self._optimizer_ref is None else self._optimizer_ref()

    def _train(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Keep gradients and state at home where the budget has no room for them.

        refresh() calls it again. It leaves alone the parameters whose gradients have a home
        already, and those that step in backward passes.
        """
        self._shares = [lane.share for lane in self._lanes]
        lanes = [lane for lane in self._lanes if lane.can_be_exceeded()]
        early = whole_parameters(model, self._shares) if self._steps_in_backward else []
        known = {id(home.parameter) for home in self._gradients} | set(map(id, early))
        homes = [home for lane in lanes for home in lane.gradient_homes(known)]
        self._gradients += homes
        for home in homes:
            home(home.parameter, is_older=True)
        if self._step is not None:
            self._step.take_in(self._lanes if self._steps_in_backward else lanes, homes, early)
        elif self._steps_in_backward:
            self._step = BackwardStep(optimizer, self._lanes, self._gradients, model, early)
        elif lanes:
            self._step = SplitStep(optimizer, lanes, self._gradients)
        if self._step is not None:
            self._step.begin()

    @staticmethod
    def of(module: nn.Module) -> Offload | None:
        """The handle of an offloaded module or of the model around it; None for other modules.

        Raises TypeError if the argument is not a module. Safe from every thread; no driver call.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        handle: Offload | None = vars(module).get(_KEPT)
        return None if handle is None or handle._removed else handle

    @property
    def device(self) -> torch.device:
        """The device for inputs, where torch sees the parameters; of several devices, the first."""
        return self._lanes[0].target.place

    def refresh(self) -> None:
        """Take in parameters and buffers that the model has got since offload().

        These are adapters, replaced layers, resized embeddings, and parameters that half(), to() or
        load_state_dict(assign=True) gave other memory. Until refresh() they stay where they are,
        outside of the budget, and a UserWarning names a parameter of a streamed part that has other
        memory. The optimizer's add_param_group() may come before or after refresh(). Modules that
        have got parameters of other modules, such as tied weights, announce their calls from now
        on. Nothing else moves. A new part is on the device if the budget has room left, or else in
        the frames that exist, or at home if it is larger than these. A part whose parameters have
        all left the model is not loaded again, and keeps its memory until remove(). After a change
        of most of the model, call remove() and offload() instead.

        Does nothing if nothing has changed. Raises the errors of offload(), after which everything
        can be used where it is, and refresh() can be called again; RuntimeError while the module is
        suspended, after remove(), or once the module has been freed. No other thread may use the
        module during the call. Driver: as offload().
        """
        self._check_offloaded()
        if self._suspended:
            raise RuntimeError("the module is suspended: call resume() first")
        model = self._members.again()
        if model is None:
            raise RuntimeError("the module has been freed: only remove() is left for its handle")
        check_children(model)
        _refuse_offloaded(model, self)
        tensors = tensors_of(model)
        known = {id(t) for lane in self._lanes for *_, t in lane.present()}
        new = [(name, t) for name, t in tensors if id(t) not in known and t.numel()]
        empty = [(name, t) for name, t in tensors if not t.numel()]
        if not new and self._layout == _layout_of(model):
            return
        self._layout = []  # so that a call after an error does not return here
        check_claims(model, new, self._claim, self._lanes[0].read_only)
        shared_out = self._shared_out(model, tensors, new)
        check_host(sum(t.nbytes for _, t in new if not is_home(t)), self._budget)
        for lane in self._lanes:
            lane.let_go()  # a tensor with other memory belongs to its new part
        origins = {memory: origin for lane in self._lanes for memory, origin in lane.origins()}
        for parameter in model.parameters():
            memory = parameter.untyped_storage()._cdata  # perhaps that of another parameter
            origin = origins.get(memory, parameter.device)
            self._origins.setdefault(id(parameter), (parameter, origin))
        parts: list[tuple[DeviceLane, list[Part]]] = []
        try:
            with torch.inference_mode(False), torch.no_grad():
                for lane, module, mine in shared_out:
                    parts.append((lane, lane.take_in(module, mine)))
                for lane, _, mine in self._shared_out(model, tensors, empty):
                    lane.move_empty(mine)
        finally:
            self._follow_model(model, tensors)
        for lane, arrived in parts:
            self._warn_of_what_does_not_fit(lane, arrived, 3)

    def _check_offloaded(self) -> None:
        if self._removed:
            raise RuntimeError("the module is not offloaded any more: call offload() again")

    def suspend(self) -> None:
        """Give the device memory of the parameters back to the driver, until resume().

        Streamed parts have their contents at home and are not copied. Parts that stay on the device
        are copied to page-locked memory of the host, which is kept for the next time. Every address
        stays valid. Until resume() the module may be called, and captured graphs may be replayed:
        they read the parameters over the bus. Gradients, state of an optimizer and activations are
        in torch's memory and stay; torch.cuda.empty_cache() gives back what torch keeps. Suspending
        again does nothing.

        Waits for the device. Raises RuntimeError without suspendable=True, after remove(), while a
        part is in a frame for a call, and while a stream captures; MemoryError if the host lacks
        memory, CUDAError if the driver fails. After an error the module is not suspended. No
        other thread may use the module during the call. Driver: cuCtxSynchronize, cuMemCreate,
        cuMemcpyAsync, cuMemUnmap, cuMemRelease.
        """
        self._check_offloaded()
        if not self._suspendable:
            raise RuntimeError("the module cannot be suspended: offload it with suspendable=True")
        suspend(self._lanes)
        self._suspended = True

    def resume(self) -> None:
        """Take device memory again, with the contents and the addresses from before suspend().

        Waits for the device. Raises MemoryError, with the bytes, if a device has no room for them,
        RuntimeError after remove() and while a stream captures, CUDAError if the driver fails; the
        module stays suspended then. Does nothing unless it is suspended. No other thread may use
        the module during the call. Driver: cuMemCreate, cuMemMap, cuMemcpyAsync.
        """
        self._check_offloaded()
        resume(self._lanes)
        self._suspended = False

    @property
    def is_suspended(self) -> bool:
        """True between suspend() and resume()."""
        return self._suspended and not self._removed

    def _shared_out(
        self, model: nn.Module, tensors: Found, new: Found
    ) -> list[tuple[DeviceLane, nn.Module, Found]]:
        """Each lane that gets new tensors, with its submodule and these tensors."""
        modules = dict(model.named_modules())
        places = {lane.name: modules[lane.name] for lane in self._lanes if lane.name in modules}
        wanted = {id(t) for _, t in new}
        lanes = {lane.name: lane for lane in self._lanes}
        shares = [
            (lanes[name], places[name], [(key, t) for key, t in mine if id(t) in wanted])
            for name, mine in shared_out(places, tensors)
        ]
        return [share for share in shares if share[2]]

    def _follow_model(self, model: nn.Module, tensors: Found) -> None:
        """Announce, count and train what the model has now."""
        present = {id(t) for _, t in tensors}
        modules = dict(model.named_modules())
        for hook in self._watch_hooks:
            hook.remove()
        self._watch.know(model)
        for lane in self._lanes:
            gone = {id(t) for *_, t in lane.present()} - present
            lane.follow(modules.get(lane.name, nn.Module()), self._watch, gone)
        with torch.inference_mode(False), torch.no_grad():
            self._watch_hooks = self._watch.attach()
            if self._watch_hooks:
                drop_compiled(model)
            self._follow()
            if self._optimizer is not None:
                self._train(self._optimizer, model)
        self._keep(model, tensors)

    def remove(self) -> None:
        """End the offloading: the module is as it was before, with its present values.

        Removes the hooks, and moves parameters, buffers, gradients and the optimizer's state to the
        device where they were, in plain memory. Tensors of the module that were in managed memory
        return to it. The optimizer's state does not: call to_managed() with the optimizer again.
        Waits for the device. A UserWarning tells of writes despite read_only=True. Does nothing the
        second time. After an error, such as too little memory on that device, everything can be
        used where it is, and remove() can be called again. Driver: cuMemcpyAsync, cuCtxSynchronize,
        cuMemHostUnregister, cuMemFree.
        """
        self._remove()

    def _remove(self) -> None:
        """End the offloading. Warnings name the line of remove(), or of the `with` block."""
        if not self._removing.acquire(blocking=False):
            return
        try:
            if self._removed:
                return
            self._detach()
            written = [lane.written() for lane in self._lanes]
            with torch.inference_mode(False), torch.no_grad():
                self._return()
            self._removed = True
        finally:
            self._removing.release()
        self._claim = None
        for module in self._modules:
            vars(module).pop(_KEPT, None)
        self._lost, self._ended = self._failures(), self._stepped()
        self._gradients.clear()
        for share in self._shares:
            share.forget()
        self._origins.clear()
        if self._step is not None:
            self._step.forget()
        self._step = None
        for lane in self._lanes:
            lane.forget()
        for text, lists in zip(_WRITTEN, zip(*written, strict=True), strict=False):
            names = [repr(name) for each in lists for name in each]
            if names:
                some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
                warnings.warn(text.format(some), stacklevel=3)

    def _detach(self) -> None:
        """Stop everything that acts by itself."""
        for hook in self._watch_hooks:
            hook.remove()
        self._watch.stop()
        for gradient in self._gradients:
            gradient.stop()
        if self._step is not None:
            self._step.stop()
        for lane in self._lanes:
            lane.stop()

    def _return(self) -> None:
        """Move everything to where it was."""
        for lane in self._lanes:
            lane.target.wait()
        at_home = {id(tensor) for tensor in (*self._home_gradients(), *self._home_state())}
        places = {id(parameter): parameter.device for parameter, _ in self._origins.values()}
        move_back([entry for lane in self._lanes for entry in lane.moved])
        changes = [pair for lane in self._lanes for pair in lane.empty_returns()]
        for parameter, origin in self._origins.values():
            place = places[id(parameter)]
            for tensor in self._companions(parameter):
                if id(tensor) in at_home or (tensor.device == place != origin):
                    changes.append((tensor, _plain(tensor, origin)))
        _swap(changes)

    def _home_gradients(self) -> Iterator[Tensor]:
        """The gradients that lie on the host."""
        for home in self._gradients:
            gradient = home.parameter.grad
            if gradient is not None and home.is_home(gradient):
                yield gradient

    def _home_state(self) -> Iterator[Tensor]:
        """The optimizer's state that lies on the host."""
        return self._step.in_home() if self._step is not None else iter(())

    def stats(self) -> dict[str, int]:
        """Counters since the start, the sums of all devices.

        `budget` has the bytes of parameters that may be on the devices, and `held` the bytes that
        are there. With an optimizer, `budget` is less than the given budget, of which a part is
        kept for gradients and state. `groups` and `streamed` are the number and bytes of the parts
        that are streamed, `resident` the bytes of the parts that stay on the device.
        `gradients_on_host` and `state_on_host` are the bytes that lie on the host now.
        `steps_in_backward` counts parts that backward passes have stepped. The others are the
        counters of WorkingSet.stats(). Here, `failures` also counts uses that the driver refused,
        gradients and state that stay on the device because there was no place on the host, and
        scratches for state that the device had no memory for. After remove(), the counters as they
        were then.
        """
        result: dict[str, int] = {}
        for lane in self._lanes:
            for name, value in lane.numbers().items():
                result[name] = result.get(name, 0) + value
        result["failures"] += self._failures()
        result["gradients_on_host"] = sum(gradient.nbytes for gradient in self._home_gradients())
        result["state_on_host"] = sum(tensor.nbytes for tensor in self._home_state())
        result["steps_in_backward"] = self._stepped()
        return result

    def explain(self) -> Explanation:
        """Where each part is kept, and why: a sequence of PartPlace, which prints as a table.

        places= of offload() chooses other places. Between suspend() and resume(), is_suspended of
        the result is True, and the places are those after resume(). Empty after remove(). Safe from
        every thread; no driver call.
        """
        places = Explanation(
            PartPlace(part.name or "model", part.nbytes, part.place, self._reason(part))
            for lane in self._lanes
            for part in (*lane.plan.resident, *lane.plan.streamed)
        )
        places.is_suspended = self.is_suspended
        return places

    def _reason(self, part: Part) -> str:
        step = self._step
        tensors = (t for block in part.blocks for p in block.pieces for t in p.tensors)
        early = step is not None and any(map(step.steps_in_backward, tensors))
        return f"{part.reason}; steps in the backward pass" if early else part.reason

    def _stepped(self) -> int:
        """How many times backward passes have stepped a part."""
        return self._ended + (self._step.stepped_in_backward() if self._step is not None else 0)

    @property
    def coverage(self) -> dict[str, Coverage]:
        """The calls of each streamed part, by its name: how many were announced, and how many made.

        A part has the name of its submodule, and "" for parameters of the module itself. Each value
        is a Coverage, which also has the bytes on the bus. Parts that the budget keeps on the
        device are not listed.

        Hooks announce the calls of modules. Other uses are inferred in two ways. The operations of
        the first call of the module that returns are watched: if one of them uses a part without an
        announcement, a use is counted, and again for each later call that announces the part as
        rarely. After a backward pass, each new gradient without an announcement counts as a use. A
        UserWarning names the first such parts, once for a handle. Uses without a gradient are not
        noticed in methods that do not call the module, in compiled code, and in extensions that use
        a parameter by its address. Embeddings count the rows that they look up.

        After remove(), the numbers as they were then. Safe from every thread; no driver call.
        """
        return self._watch.result()

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """A `with` block in which parts are loaded ahead, as in a call of the module.

        Use it for loops that call submodules one by one. Each call of the module, each backward
        pass and each step is a round by itself. Safe from every thread.
        """
        for lane in self._lanes:
            lane.announcer.begin_round()
        try:
            yield
        finally:
            for lane in self._lanes:
                lane.announcer.end_round()

    @property
    def last_error(self) -> str | None:
        """The driver's message at its latest refusal that left a part at home; or None.

        With several devices, the message of the last device that has one.
        Safe from every thread; no driver call.
        """
        for lane in self._lanes:
            lane.numbers()
        texts = [lane.last_error for lane in self._lanes]
        return next((text for text in reversed(texts) if text is not None), None)

    def _failures(self) -> int:
        """How often gradients or state had no place at home, or scratch had no memory."""
        step = self._step.failures if self._step is not None else 0
        return self._lost + step + sum(home.failures for home in self._gradients)

    def __repr__(self) -> str:
        devices = ", ".join(str(lane.target.device) for lane in self._lanes)
        start = f"<offload of {self._kind} on {devices}"
        if self._removed:
            return f"{start}, removed>"
        numbers = self.stats()
        state = ", suspended" * self._suspended
        return (
            f"{start}: {numbers['groups']} groups of {numbers['streamed']:,} bytes streamed, "
            f"{numbers['resident']:,} resident, budget {self._budget:,}{state}>"
        )


def before_offload(module: nn.Module) -> dict[int, tuple[Tensor | None, torch.device]]:
    """The memory that offloaded tensors had, or None if it was not kept, and their device, by id.

    Raise ValueError unless the module is read-only: kept memory may have old contents otherwise.
    """
    handles = {h: None for inner in module.modules() if (h := Offload.of(inner)) is not None}
    lanes = [lane for handle in handles for lane in handle._lanes]
    if not all(lane.read_only for lane in lanes):
        raise ValueError("the module is offloaded without read_only=True: call remove() first")
    before: dict[int, tuple[Tensor | None, torch.device]] = {}
    for entry in (entry for lane in lanes for entry in lane.moved):
        kept = {id(tensor): old for tensor, old in entry.kept}
        before |= {id(t): (kept.get(id(t)), entry.origin) for t in entry.tensors()}
    return before


def _layout_of(model: nn.Module) -> list[tuple[int, ...]]:
    """The ids of the modules, each with those of its own tensors."""
    modules = (module for root in roots_of(model) for module in root.modules())
    return [(id(module), *map(id, direct_tensors(module))) for module in modules]


def _tensors_in(state: Any) -> Iterator[Tensor]:
    """All tensors of an optimizer's state, which may be in lists."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, (dict, list, tuple)):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _tensors_in(value)


def _plain(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy in ordinary memory, with the same strides."""
    if tensor.layout is not torch.strided:
        return tensor.data.to(device, copy=True)
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return new.copy_(tensor.data)
