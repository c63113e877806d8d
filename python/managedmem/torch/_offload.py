"""offload: streams the parameters of a module through a budget of device memory.

Owns the public function and its handle: the division of the budget, and the return of everything to
its place.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import managedmem
from managedmem import CUDAError, Device, ManagedBuffer
from managedmem.torch._moving import _blocks, _swap
from managedmem.torch._offload_arguments import (
    check_model,
    check_parameters,
    check_read_only,
    checked_budget,
    checked_optimizer,
    chosen_blocks,
    homes_of,
    tensors_of,
    warn_if_not_free,
)
from managedmem.torch._offload_children import Claim, check_claims
from managedmem.torch._offload_compiled import check_graphs, drop_compiled
from managedmem.torch._offload_coverage import Coverage, Watch
from managedmem.torch._offload_hooks import Announcer, Places, Versions, begin_use, end_use
from managedmem.torch._offload_optimizer import (
    GradientHome,
    SplitStep,
    StepPart,
    can_split,
)
from managedmem.torch._offload_places import Moved, Target, move_back, move_in
from managedmem.torch._offload_plan import (
    PACKED,
    Part,
    Plan,
    are_parameters,
    make_plan,
    size_of,
)
from managedmem.torch._offload_shares import Share
from managedmem.torch._tensors import Found

if TYPE_CHECKING:
    from managedmem import WorkingGroup, WorkingSet

_Device: TypeAlias = "Device | torch.device | str | int"
_KEPT = "_managedmem_offload"  # an attribute of each module, which keeps the handle


def offload(
    model: nn.Module,
    device: _Device | Mapping[str, _Device],
    *,
    budget: int,
    optimizer: torch.optim.Optimizer | None = None,
    blocks: Iterable[str | nn.Module] | None = None,
    read_only: bool = False,
) -> Offload:
    """Run a module on a device that holds only a part of its parameters at a time.

    Parameters
    ----------
    model : torch.nn.Module
        A module on the CPU or on a CUDA device. Its Parameter objects stay the same.
    device : Device, torch.device, str, int, or a mapping of submodule names to these
        Where the model runs. With a mapping, each submodule runs on its device, with a budget of
        its own; together they must hold every parameter.
    budget : int
        The most bytes of parameters on the device at any time. With an optimizer it also covers
        gradients and state that stay on the device. A UserWarning tells of a budget that
        holds no block, and of one that is not free on the device.
    optimizer : torch.optim.Optimizer, optional
        The optimizer that will train the model. Gradients and state for which the budget has no
        room live on the host; each step looks at its groups and at requires_grad. Without an
        optimizer, parameters are taken for memory that is only read, and gradients and state are
        not in the budget. A UserWarning tells of the first gradient of a streamed parameter.
    blocks : iterable of submodule names or submodules, optional
        Submodules that move as a whole; a ModuleList or ModuleDict stands for its members. By
        default these are submodules without submodules, and others of at most 64 MiB and a quarter
        of the budget.
    read_only : bool
        True promises that nothing writes a parameter while the module is offloaded. Streamed parts
        of more than 1 MiB load faster, unless they were in managed memory before. A write to such a
        part may be lost: the next call of its submodule raises RuntimeError, and remove() warns
        with UserWarning; both name the parameter. Not together with an optimizer.

    Parameters and buffers move into managed memory whose home is the host. A WorkingSet loads those
    of a submodule to the device before its forward and its backward call, in the order that it
    learns from the calls, and drops them afterwards. The device uses what does not fit over the
    bus. Calls read parameters, which are then dropped without a copy; the optimizer writes its own,
    which are copied home after the step. A forward call that writes such parameters is right too,
    but slow. If everything fits in the budget, everything is on the device from the start,
    without hooks of modules. A model that is dropped without remove() is freed as a plain one.

    Inputs must be on the device. On the emulated driver, where torch has no GPU, the tensors stay
    CPU tensors and the same calls move their memory.

    Returns a handle, which is a context manager. handle.remove() moves everything back to the
    device where it was. Raises TypeError and ValueError for arguments that cannot be offloaded,
    CUDAOutOfMemoryError when memory runs out, and CUDAError when the driver refuses; after an error
    the module is unchanged. No other thread may use the module during offload() and remove();
    between them, threads and streams may call it as they may call any module. Driver:
    cuMemAllocManaged, and those of WorkingSet.
    """
    limit = checked_budget(budget)
    check_model(model)
    _refuse_offloaded(model)
    optimizer = checked_optimizer(optimizer)
    chosen = chosen_blocks(model, blocks)
    found = tensors_of(model)
    check_claims(model, found)
    homes = homes_of(model, device, found)
    if optimizer is not None:
        check_parameters(model, optimizer)
    check_read_only(read_only, optimizer)
    warn_if_not_free(homes, limit)
    handle = object.__new__(Offload)
    handle._start(model, homes, limit, optimizer, chosen, read_only)
    return handle


def _refuse_offloaded(model: nn.Module) -> None:
    for key, module in model.named_modules():
        if Offload.of(module) is not None:
            name = repr(key) if key else "model"
            raise ValueError(
                f"{name} ({type(module).__name__}) is offloaded already: call remove() on its "
                "handle first, which managedmem.torch.Offload.of() returns"
            )


# --- one device ---------------------------------------------------------------------------


class _Lane:
    """What is streamed to one device."""

    def __init__(
        self,
        target: Target,
        model: nn.Module,
        found: Found,
        budget: int,
        optimizer: torch.optim.Optimizer | None,
        chosen: dict[int, str],
        read_only: bool,
    ) -> None:
        self.target = target
        self.budget = budget
        self.read_only = read_only
        all_blocks = _blocks(found, target.place)
        total = sum(size_of(block) for block in all_blocks)
        room = budget
        written: set[int] = set()
        if optimizer is not None:
            self.share = Share(optimizer, [t for _, t in found], total, budget)
            room = self.share.for_parameters()
            written = {id(p) for p in self.share.trained}
        self.plan: Plan = make_plan(model, all_blocks, written, room, chosen, read_only)
        check_graphs(model, [site.module for site in self.plan.sites])
        self.moved: list[Moved] = []
        self.residents: list[WorkingGroup] = []
        self.groups: dict[int, WorkingGroup] = {}
        self.ranges: dict[int, list[ManagedBuffer]] = {}  # the memory of the groups
        self.steps: dict[int, StepPart] = {}  # by the id of a part
        self.hooks: list[RemovableHandle] = []
        self.set: WorkingSet = managedmem.WorkingSet(room, target.device)
        announced = optimizer is not None and can_split(optimizer, optimizer.step)
        self.versions = Versions()
        self.places = Places(model, optimizer is not None)
        self.announcer = Announcer(target, self.groups, announced, self.versions, self.places)
        self.final: dict[str, int] | None = None

    def fill(self) -> None:
        """Move the tensors into managed memory, and what stays to the device."""
        for part in self.plan.resident + self.plan.streamed:
            stays = part in self.plan.resident
            fast = (
                self.read_only
                and not (stays or part.written)
                and part.nbytes > PACKED
                and are_parameters(part.blocks)
            )
            ranges, moved = move_in(part.blocks, self.target, by_device=fast)
            self.moved += moved
            access: Literal["read", "write"] = "write" if part.written else "read"
            # Blocks that were in managed memory already may have pages on a device.
            at_home = fast and len(moved) == len(part.blocks)
            group = self.set.add(ranges, access, name=part.name or None, at_home=at_home)
            if at_home:
                self.versions.watch(part)
            self.groups[id(part)] = group
            self.ranges[id(part)] = ranges
            if stays and begin_use(group, self.target.stream()) is not None:
                self.residents.append(group)
        for part in self.plan.streamed:
            self.places.note(part)
        self.target.wait()  # other streams use it too
        for site in self.plan.sites:
            self.hooks += self.announcer.attach(site)

    def watch(self, watch: Watch, name: str) -> None:
        """Count the calls of the streamed parts; `name` is that of the submodule on this device."""
        self.announcer.watch = watch
        acquired = {id(part) for site in self.plan.sites for part in site.parts}
        for part in self.plan.streamed:
            full = f"{name}.{part.name}" if name and part.name else name or part.name
            watch.add(part, full, self.announcer, id(part) in acquired)

    def step_parts(self) -> list[StepPart]:
        """The trained parameters, part by part, in the same objects each time."""
        index = {id(p): i for i, p in enumerate(self.share.trained)}
        streamed = set(map(id, self.plan.streamed))
        found: list[StepPart] = []
        for part in self.plan.resident + self.plan.streamed:
            tensors = [t for block in part.blocks for p in block.pieces for t in p.tensors]
            mine = sorted((t for t in tensors if id(t) in index), key=lambda t: index[id(t)])
            if not mine:
                continue
            if not part.written:
                self._let_write(part)
            step = self.steps.setdefault(id(part), StepPart(mine, self.target, None))
            step.parameters = mine
            step.group = self.groups.get(id(part)) if id(part) in streamed else None
            found.append(step)
        return found

    def _let_write(self, part: Part) -> None:
        """Make a part that was only read one that the optimizer writes; its group changes."""
        stream = self.target.stream()
        group = self.groups.pop(id(part), None)  # uses by other threads go over the bus meanwhile
        stays = part in self.plan.resident
        if group in self.residents:
            self.residents.remove(group)
            end_use(group, stream)
        try:
            if group is not None:
                self.set.remove(group)
        except RuntimeError:  # another thread uses it: at a later step
            assert group is not None
            self.groups[id(part)] = group
        else:
            try:
                group = self.set.add(self.ranges[id(part)], "write", name=part.name or None)
            except CUDAError:  # the memory is used where it is, until a later step
                return
            self.groups[id(part)] = group
            part.written, part.stepped = True, are_parameters(part.blocks)
        if stays and begin_use(group, stream) is not None:
            self.residents.append(group)

    def stop(self) -> None:
        """Remove the hooks, release everything, and close the working set."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.announcer.stop()
        stream = self.target.stream()
        while self.residents:
            end_use(self.residents.pop(), stream)
        if self.final is None:
            self.final = self.numbers()
        self.set.close()

    def forget(self) -> None:
        """Drop the references to the managed memory."""
        self.plan = Plan([], [], [])
        self.groups.clear()
        self.ranges.clear()
        self.steps.clear()
        self.moved.clear()
        self.versions.forget()

    def numbers(self) -> dict[str, int]:
        """The counters of this device, those of its end once it has one."""
        if self.final is not None:
            return self.final
        return {
            "budget": self.set.budget,
            "held": self.set.nbytes,
            "groups": len(self.plan.streamed),
            "streamed": sum(part.nbytes for part in self.plan.streamed),
            "resident": sum(part.nbytes for part in self.plan.resident),
            **_counters(self.set.stats()),
        }


def _name(part: Part) -> str:
    """A part's name in a message, and the reason if its parameters cannot be parted."""
    name = repr(part.name) if part.name else "the module's own parameters"
    shared = max(len(piece.tensors) for block in part.blocks for piece in block.pieces)
    return f"{name} ({shared} parameters in one storage)" if shared > 1 else name


def _counters(stats: Any) -> dict[str, int]:
    """The numbers of a working set."""
    names = getattr(stats, "_fields", None) or stats.__match_args__
    found = {name: getattr(stats, name) for name in names}
    return {name: value for name, value in found.items() if isinstance(value, int)}


# --- the handle ---------------------------------------------------------------------------


class Offload:
    """The handle of an offloaded module, which offload() returns.

    A context manager: the end of the block calls remove(). The module keeps its handle:
    Offload.of(module) returns it. A copy or pickle of a handle is None, because a copy of the
    module is plain. Safe from every thread; for remove() see offload().
    """

    def __init__(self) -> None:
        raise TypeError("Offload objects are made by offload()")

    def _start(
        self,
        model: nn.Module,
        homes: list[tuple[Target, nn.Module, str, Found]],
        budget: int,
        optimizer: torch.optim.Optimizer | None,
        chosen: dict[int, str],
        read_only: bool,
    ) -> None:
        self._kind = type(model).__name__  # no reference to the model, which keeps the handle
        self._optimizer_ref = None if optimizer is None else weakref.ref(optimizer)
        self._budget = budget
        self._lanes: list[_Lane] = []
        self._gradients: list[GradientHome] = []
        self._shares: list[Share] = []
        self._step: SplitStep | None = None
        self._removing = threading.Lock()
        self._removed = False
        self._lost = 0  # failures before remove()
        self._claim: Claim | None = None
        self._watch = Watch(model)
        self._watch_hooks: list[RemovableHandle] = []
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # those of the start
        self._origins = {id(p): (p, p.device) for p in model.parameters()}
        try:
            with torch.inference_mode(False), torch.no_grad():
                for target, module, name, found in homes:
                    lane = _Lane(target, module, found, budget, optimizer, chosen, read_only)
                    self._lanes.append(lane)
                    self._lanes[-1].fill()
                    lane.watch(self._watch, name)
                self._watch_hooks = self._watch.attach()
                if self._watch_hooks:
                    drop_compiled(model)
                self._follow()
                if optimizer is not None:
                    self._train(optimizer)
            self._warn_of_what_does_not_fit()
        except BaseException:
            self.remove()
            raise
        self._claim = Claim(self._kind, [entry for _, _, _, found in homes for entry in found])
        for module in model.modules():
            self._modules.add(module)
            vars(module)[_KEPT] = self

    def _warn_of_what_does_not_fit(self) -> None:
        """Called by _start(), so that nothing stays offloaded where warnings are errors."""
        for lane in self._lanes:
            room = lane.set.budget - sum(part.nbytes for part in lane.plan.resident)
            streamed = sorted(lane.plan.streamed, key=lambda part: part.nbytes)
            acquired = {id(part) for site in lane.plan.sites for part in site.parts}
            large = [part for part in streamed if part.nbytes > room and id(part) in acquired]
            if streamed and streamed[0].nbytes > room:
                warnings.warn(
                    f"nothing is streamed to {lane.target.device}: its kernels read parameters "
                    f"over the bus. The budget of {self._budget:,} bytes leaves {room:,} for them, "
                    f"and the smallest block, {_name(streamed[0])}, has {streamed[0].nbytes:,}: "
                    "give a larger budget",
                    stacklevel=4,
                )
            elif large:
                warnings.warn(
                    f"{len(large)} of {len(streamed)} blocks never fit on {lane.target.device}: "
                    f"kernels read them over the bus. The budget of {self._budget:,} bytes leaves "
                    f"{room:,} for parameters, and the largest block, {_name(large[-1])}, has "
                    f"{large[-1].nbytes:,}: give a larger budget",
                    stacklevel=4,
                )

    def _follow(self) -> None:
        """Gradients and state follow their parameters to another device."""
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
        """True if the optimizer counts the steps of a parameter on its device."""
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return any(
            (group.get("fused") or group.get("capturable"))
            and any(each is parameter for each in group["params"])
            for group in groups
        )

    @property
    def _optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, unless its owner has dropped it, and its state with it."""
        return None if self._optimizer_ref is None else self._optimizer_ref()

    def _train(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep gradients and state at home where the budget has no room for them."""
        self._shares = [lane.share for lane in self._lanes]
        lanes = [lane for lane in self._lanes if lane.share.can_be_exceeded()]
        for lane in lanes:
            for parameter in lane.share.all_that_may_train():
                home = GradientHome(parameter, lane.target, lane.share)
                self._gradients.append(home)
                lane.share.homes.append((parameter, home))
                home(parameter, is_older=True)
        if lanes:
            self._step = SplitStep(optimizer, lanes)
            self._step.begin()

    @staticmethod
    def of(module: nn.Module) -> Offload | None:
        """The handle of an offloaded module or of the model around it; None for other modules.

        Raises TypeError for what is not a module. Safe from every thread; no driver call.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        found: Offload | None = vars(module).get(_KEPT)
        return None if found is None or found._removed else found

    @property
    def device(self) -> torch.device:
        """The device where torch sees the parameters and inputs must be; the first of several."""
        return self._lanes[0].target.place

    def remove(self) -> None:
        """End the offloading: the module is as it was before, with its present values.

        Removes the hooks, and moves parameters, buffers, gradients and the optimizer's state to the
        device where they were, in plain memory; tensors that were in managed memory return to it.
        Waits for the device. A UserWarning tells of writes despite read_only=True. Does nothing the
        second time. After an error, such as too little memory on that device, everything can be
        used where it is, and remove() can be called again. Driver: those of WorkingSet.close(),
        cuCtxSynchronize, cuMemFree.
        """
        self._remove()

    def _remove(self) -> None:
        """End the offloading; the warning is for the caller of the caller."""
        if not self._removing.acquire(blocking=False):
            return
        try:
            if self._removed:
                return
            self._detach()
            written = [name for lane in self._lanes for name in lane.versions.written()]
            with torch.inference_mode(False), torch.no_grad():
                self._return()
            self._removed = True
        finally:
            self._removing.release()
        self._claim = None
        for module in self._modules:
            vars(module).pop(_KEPT, None)
        self._lost = self._failures() - sum(lane.announcer.failures for lane in self._lanes)
        self._gradients.clear()
        for share in self._shares:
            share.forget()
        self._origins.clear()
        if self._step is not None:
            self._step.forget()
        self._step = None
        for lane in self._lanes:
            lane.forget()
        if written:
            names = ", ".join(map(repr, written[:3])) + (", ..." if len(written) > 3 else "")
            warnings.warn(
                "written while the module was offloaded with read_only=True, so that the writes "
                f"may be lost: {names}",
                stacklevel=3,
            )

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
        changes: list[tuple[Tensor, Tensor]] = []
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

        budget and held are the bytes of parameters that may be, and are, on the devices: with an
        optimizer, a part of the given budget is kept for gradients and state. groups and streamed
        are the number and bytes of the parts that are streamed; resident the bytes of those that
        stay. The others are the counters of WorkingSet.stats(); failures also counts uses that the
        driver refused, gradients and state that stay on the device because there was no place on
        the host, and scratches for state that the device had no memory for. gradients_on_host and
        state_on_host are the bytes that lie there now. After remove(), the counters of its moment.
        """
        result: dict[str, int] = {}
        for lane in self._lanes:
            for name, value in lane.numbers().items():
                result[name] = result.get(name, 0) + value
        result["failures"] += self._failures()
        result["gradients_on_host"] = sum(gradient.nbytes for gradient in self._home_gradients())
        result["state_on_host"] = sum(tensor.nbytes for tensor in self._home_state())
        return result

    @property
    def coverage(self) -> dict[str, Coverage]:
        """The calls of each streamed part, by its name: seen ones, made ones, and bytes on the bus.

        The name of a part is that of the submodule that it belongs to, and "" for parameters of the
        module itself. Each value is a Coverage. What the budget keeps on the device is not listed.

        Hooks see the calls that they announce. Other uses are inferred: from the operations of the
        first call of the module that returns, and then for each later call like it; and from
        gradients that a backward pass leaves without an announcement. A UserWarning names the first
        such parts, once for a handle. Uses without a gradient are not noticed in methods that do
        not call the module, in compiled code, and by address, as extensions have them. Embeddings
        count the rows that they look up.

        After remove(), the numbers of its moment. Safe from every thread; no driver call.
        """
        return self._watch.result()

    @property
    def last_error(self) -> str | None:
        """The text of the latest failure in the thread of a working set; None without one.

        With several devices, that of the last device that has one.
        Safe from every thread; no driver call.
        """
        texts = [lane.set.stats().last_error for lane in self._lanes]
        return next((text for text in reversed(texts) if text is not None), None)

    def _failures(self) -> int:
        """Refused uses, gradients and state without a place at home, scratches without memory."""
        uses = sum(lane.announcer.failures for lane in self._lanes)
        step = self._step.failures if self._step is not None else 0
        return self._lost + uses + step + sum(home.failures for home in self._gradients)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A module that keeps its handle can be copied and pickled, as a plain module.
        return type(None), ()

    def __enter__(self) -> Offload:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._remove()

    def __repr__(self) -> str:
        devices = ", ".join(str(lane.target.device) for lane in self._lanes)
        start = f"<offload of {self._kind} on {devices}"
        if self._removed:
            return f"{start}, removed>"
        numbers = self.stats()
        return (
            f"{start}: {numbers['groups']} groups of {numbers['streamed']:,} bytes streamed, "
            f"{numbers['resident']:,} resident, budget {self._budget:,}>"
        )


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
