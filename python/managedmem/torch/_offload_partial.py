"""A step of an optimizer for some of its parameters, which other threads do not see.

An optimizer of the same class does it, with groups of its own and the same state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, optim

_OWN = ("step", "param_groups", "state")  # what the other optimizer has instead


class PartialStep:
    """One step of an optimizer in parts, with the hyper-parameters of its start."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.groups = list(optimizer.param_groups)
        self.options = [{k: v for k, v in g.items() if k != "params"} for g in self.groups]
        self.parameters = [list(group["params"]) for group in self.groups]
        self.group_of = {id(p): i for i, every in enumerate(self.parameters) for p in every}

    def run(self, chosen: list[Tensor], staged: Mapping[int, Tensor] | None = None) -> None:
        """Step these parameters. `staged` has tensors in the place of state, by its ids."""
        optimizer = self.optimizer
        mine: list[list[Tensor]] = [[] for _ in self.groups]
        for parameter in chosen:
            if (index := self.group_of.get(id(parameter))) is not None:
                mine[index].append(parameter)
        used = [i for i, parameters in enumerate(mine) if parameters]
        given = {name: value for name, value in vars(optimizer).items() if name not in _OWN}
        own = object.__new__(type(optimizer))
        vars(own).update(given)
        own.param_groups = [{"params": mine[i], **self.options[i]} for i in used]
        state = _Staged(optimizer, chosen, staged) if staged else None
        own.state = optimizer.state if state is None else state.own
        try:
            type(optimizer).step(own)
        finally:
            _write_back(vars(optimizer), given, vars(own), _OWN)
            for i, group in zip(used, own.param_groups, strict=True):
                _write_back(self.groups[i], self.options[i], group, ("params",))
                self.options[i] = {k: v for k, v in group.items() if k != "params"}
            if state is not None:
                state.write_back()


class _Staged:
    """A copy of the state of parameters, with other tensors in the place of some."""

    def __init__(
        self, optimizer: optim.Optimizer, chosen: list[Tensor], staged: Mapping[int, Tensor]
    ) -> None:
        self.public = optimizer.state
        self.own: defaultdict[Tensor, Any] = defaultdict(dict)
        self.before: dict[Tensor, dict[str, Any]] = {}
        for parameter in chosen:
            if parameter in self.public:
                state = self.public[parameter]
                self.own[parameter] = {k: staged.get(id(v), v) for k, v in state.items()}
                self.before[parameter] = dict(self.own[parameter])

    def write_back(self) -> None:
        """Give the optimizer what the step has put into the copy."""
        for parameter, state in self.own.items():
            _write_back(self.public[parameter], self.before.get(parameter, {}), state)


def _write_back(
    public: dict[str, Any],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    but: tuple[str, ...] = (),
) -> None:
    """Make the changes between two copies of a mapping in the mapping itself."""
    for name, value in after.items():
        if name not in but and (name not in before or value is not before[name]):
            public[name] = value
    for name in before:
        if name not in after:
            public.pop(name, None)
