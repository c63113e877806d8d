"""A step of an optimizer for some of its parameters, which other threads do not see.

Another optimizer of the same class makes the step, with groups of its own and the same state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim

from managedmem.torch._tensors import shard_of

_OWN = ("step", "param_groups", "state")  # attributes of which the other optimizer has its own


class PartialStep:
    """One step of an optimizer in parts, with the hyper-parameters of its start."""

    def __init__(self, optimizer: optim.Optimizer, hooks: bool = True) -> None:
        """`hooks`: let the step call the hooks of the optimizer, if it has some."""
        self.optimizer = optimizer
        step = type(optimizer).step
        self.step: Callable[..., Any] = step if hooks else getattr(step, "__wrapped__", step)
        self.groups = list(optimizer.param_groups)
        self.options = [{k: v for k, v in g.items() if k != "params"} for g in self.groups]
        self.seen = [_seen(options) for options in self.options]
        self.parameters = [list(group["params"]) for group in self.groups]
        self.group_of = {id(p): i for i, every in enumerate(self.parameters) for p in every}

    def changed(self) -> tuple[str, object, object] | None:
        """The name, old and new value of an option that changed since the step."""
        groups = self.optimizer.param_groups
        if len(groups) < len(self.seen):
            return "param_groups", len(self.seen), len(groups)
        for group, seen in zip(groups, self.seen, strict=False):  # later ones are new
            for name, old in seen.items():
                if not _is_same(group.get(name), old):
                    return name, old.value, group.get(name)
        return None

    def run(self, chosen: list[Tensor], staged: Staged | None = None) -> None:
        """Step these parameters, with their staged tensors."""
        optimizer = self.optimizer
        mine: list[list[Tensor]] = [[] for _ in self.groups]
        state = None if staged is None else _PartState(optimizer, chosen, staged)
        for parameter in chosen:
            if (index := self.group_of.get(id(parameter))) is not None:
                own_name = parameter if state is None else state.names[id(parameter)]
                mine[index].append(own_name)
        used = [i for i, parameters in enumerate(mine) if parameters]
        given = {name: value for name, value in vars(optimizer).items() if name not in _OWN}
        own = object.__new__(type(optimizer))
        vars(own).update(given)
        own.param_groups = [{"params": mine[i], **self.options[i]} for i in used]
        own.state = optimizer.state if state is None else state.own
        try:
            self.step(own)
        finally:
            _write_back(vars(optimizer), given, vars(own), _OWN)
            for i, group in zip(used, own.param_groups, strict=True):
                _write_back(self.groups[i], self.options[i], group, ("params",))
                self.options[i] = {k: v for k, v in group.items() if k != "params"}
                self.seen[i] = _seen(self.options[i])
            if state is not None:
                state.write_back()


@dataclass(frozen=True, slots=True)
class Cut:
    """Some elements of a contiguous tensor, in the order of its memory."""

    start: int
    stop: int
    is_last: bool  # nothing of the tensor comes behind it

    def of(self, tensor: Tensor) -> Tensor:
        """These elements of a tensor."""
        return tensor.detach().view(-1)[self.start : self.stop]

    def bytes_of(self, memory: Tensor, tensor: Tensor) -> Tensor:
        """The bytes of these elements, in memory that begins with the bytes of the tensor."""
        size = tensor.element_size()
        return memory[self.start * size : self.stop * size]


@dataclass(slots=True, eq=False)
class Staged:
    """Tensors that a step uses in the place of others."""

    state: dict[int, Tensor]  # by the ids of tensors of the state
    gradients: dict[int, Tensor]  # by the ids of parameters
    cut: Cut | None = None  # the elements of the one parameter that are stepped


class _PartState:
    """The parameters of a part with staged gradients, and a copy of their state."""

    def __init__(self, optimizer: optim.Optimizer, chosen: list[Tensor], staged: Staged) -> None:
        self.public = optimizer.state
        self.staged = staged
        self.own: defaultdict[Tensor, Any] = defaultdict(dict)
        self.before: dict[Tensor, dict[str, Any]] = {}
        self.parameters: dict[Tensor, Tensor] = {}
        self.names: dict[int, Tensor] = {}  # by the ids of parameters
        for parameter in chosen:
            name = self._name_of(parameter)
            self.names[id(parameter)] = name
            self.parameters[name] = parameter
            if parameter in self.public:
                state = self.public[parameter]
                self.own[name] = {k: self._own_of(v, parameter) for k, v in state.items()}
                self.before[name] = dict(self.own[name])

    def _name_of(self, parameter: Tensor) -> Tensor:
        """The tensor that the other optimizer steps, with the parameter's memory and version."""
        gradient = self.staged.gradients.get(id(parameter))
        cut, shard = self.staged.cut, shard_of(parameter)
        own = None if parameter.grad is None else shard_of(parameter.grad)
        if cut is not None:
            name = cut.of(shard)
            gradient = cut.of(own) if gradient is None and own is not None else gradient
        elif gradient is not None or shard is not parameter:
            name = shard.detach()
            gradient = own if gradient is None else gradient
        else:
            return parameter
        name.grad = gradient  # which other threads do not see
        return name

    def _own_of(self, value: Any, parameter: Tensor) -> Any:
        """A state value for the other optimizer. Of several cuts, only the last counts the step."""
        value = shard_of(value) if isinstance(value, Tensor) else value
        staged = self.staged.state.get(id(value))
        cut = self.staged.cut
        if staged is not None or cut is None or not isinstance(value, Tensor):
            return value if staged is None else staged
        if value.shape == shard_of(parameter).shape and value.dim() > 0:
            return cut.of(value)
        return value if cut.is_last else value.clone()

    def write_back(self) -> None:
        """Give the optimizer the state that the step has put into the copy."""
        for name, state in self.own.items():
            parameter, before = self.parameters[name], self.before.get(name, {})
            for key, value in state.items():
                if value is not before.get(key):
                    state[key] = _like(value, parameter)
            _write_back(self.public[parameter], before, state)


def _like(value: Any, parameter: Tensor) -> Any:
    """A tensor that a step has made for a shard, as a DTensor like the parameter."""
    shard = shard_of(parameter)
    if shard is parameter or not isinstance(value, Tensor) or value.shape != shard.shape:
        return value
    whole: Any = parameter
    return type(whole.data).from_local(
        value,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _write_back(
    public: dict[str, Any],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    but: tuple[str, ...] = (),
) -> None:
    """Make the changes from `before` to `after` in `public`, except for the names in `but`."""
    for name, value in after.items():
        if name not in but and (name not in before or value is not before[name]):
            public[name] = value
    for name in before:
        if name not in after:
            public.pop(name, None)


@dataclass(frozen=True, slots=True)
class _Seen:
    """An option as it was; tensors may be written in place."""

    option: object
    value: object
    version: int | None


def _seen(options: Mapping[str, object]) -> dict[str, _Seen]:
    return {
        name: _Seen(value, value.detach().clone(), value._version)
        if isinstance(value, Tensor)
        else _Seen(value, value, None)
        for name, value in options.items()
    }


def _is_same(option: Any, seen: _Seen) -> bool:
    """True if an option is as it was seen; False for values that cannot be compared."""
    version = option._version if isinstance(option, Tensor) else None
    if option is seen.option and version == seen.version:
        return True
    old: Any = seen.value
    try:
        if isinstance(option, Tensor) or isinstance(old, Tensor):
            return bool((torch.as_tensor(option) == torch.as_tensor(old)).all())
        sequences = isinstance(option, (list, tuple)) and isinstance(old, (list, tuple))
        return list(option) == list(old) if sequences else bool(option == old)
    except (RuntimeError, TypeError, ValueError):
        return False
