"""The share of gradients and optimizer state in a device's budget.

Decides which tensors stay on the device. It follows the optimizer's groups, and what trains.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import compress

from torch import Tensor, nn, optim

from managedmem.torch._targets import find_tensors

MOST_RING = 256 << 20  # bytes of scratch; the rest of the budget keeps state on the device


def state_of(optimizer: optim.Optimizer, parameter: Tensor) -> list[tuple[str, Tensor]]:
    """The state of one parameter, without scalars such as step counts and empty tensors."""
    entries = optimizer.state.get(parameter, {})
    if all(type(value) is Tensor for value in entries.values()):
        return [(name, t) for name, t in entries.items() if t.dim() > 0 and t.numel() > 0]
    state = {
        name: value
        for name, value in entries.items()
        if not isinstance(value, Tensor) or value.dim() > 0
    }
    return [(name, t) for name, t in find_tensors(state) if t.dim() > 0 and t.numel() > 0]


def copies_of(optimizer: optim.Optimizer) -> int:
    """The state of a parameter in copies of the parameter; an estimate."""
    if type(optimizer) is optim.SGD:
        return int(any(group["momentum"] for group in optimizer.param_groups))
    if type(optimizer) is optim.RMSprop:
        options = ("momentum", "centered")
        return 1 + sum(any(g[each] for g in optimizer.param_groups) for each in options)
    return 3 if any(group.get("amsgrad") for group in optimizer.param_groups) else 2


def spread(sizes: Sequence[int], can_stay: Sequence[bool], room: int) -> list[bool]:
    """Whether each memory stays on the device: an even share of it does, in the order of the step.

    So the link that copies the others is equally busy from the start of a step to its end, in both
    directions.
    """
    total, due, stays = sum(sizes), 0, [False] * len(sizes)
    for i, size in enumerate(sizes):
        due += size * room
        if can_stay[i] and size * total <= due:
            stays[i] = True
            due -= size * total
    left = room - sum(compress(sizes, stays))
    for i, size in enumerate(sizes):  # what is left goes to the first that still fit
        if can_stay[i] and not stays[i] and size <= left:
            stays[i] = True
            left -= size
    return stays


def _trains(tensor: Tensor) -> bool:
    return tensor.requires_grad or tensor.grad is not None


def _may_train(tensor: Tensor) -> bool:
    """True for a tensor that has gradients, now or once it requires them."""
    if not tensor.is_leaf or tensor.is_inference():
        return False
    floats = tensor.is_floating_point() or tensor.is_complex()
    return tensor.requires_grad or (isinstance(tensor, nn.Parameter) and floats)


class Share:
    """The division of one device's budget."""

    def __init__(
        self, optimizer: optim.Optimizer, tensors: list[Tensor], total: int, budget: int
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._mine = {id(t) for t in tensors}
        self._tensors = [t for t in tensors if _may_train(t)]
        self.total = total  # bytes of parameters
        self.budget = budget
        self.trained: list[Tensor] = []  # in the order of the optimizer
        self.gradients_stay = self.state_stays = True
        self.room = 0  # bytes of scratch for the optimizer, and of state that stays
        self.may_pass = 0  # bytes of gradients whose copies home may be under way
        self._scratch = 0  # the room if the parameters exceed the budget
        self.divisions = 0  # how many times it was divided
        # The parameters, with functions that send home a gradient that exists already.
        self.homes: list[tuple[Tensor, Callable[[Tensor, bool], None]]] = []
        self._ids: set[int] = set()  # of the trained
        self._counted: set[int] = set()  # of those that trained at the last division
        self._groups: list[tuple[int, int]] = []
        self._seen: object = None
        self.follow()

    def take_in(self, tensors: list[Tensor], nbytes: int, taken: int) -> int:
        """Count tensors that have come to the model, and return the bytes for parameters.

        `nbytes` is their new memory; parameters and frames have `taken` bytes already.
        """
        new = [t for t in tensors if id(t) not in self._mine]
        self._mine |= set(map(id, new))
        self._tensors += filter(_may_train, new)
        self.total += nbytes
        self._seen = None
        self.follow()
        room = self.for_parameters(taken)
        self._seen = None
        self.follow()
        return room

    def for_parameters(self, taken: int = 0) -> int:
        """The bytes of the budget for parameters, of which they have `taken` bytes already."""
        if self.total <= self.budget:
            return self.total
        kept, quarter = self._for_gradients(self.trained), self.budget // 4
        # The frames of parameters come first.
        frames = 4 * max((p.nbytes for p in self.trained), default=0)
        most = min(quarter, MOST_RING) * bool(frames)
        self._scratch = min(most, max(0, self.budget - kept - max(frames, taken)))
        self.room = self._scratch
        return self.budget - kept - self._scratch

    def _for_gradients(self, trained: list[Tensor]) -> int:
        """The bytes for gradients on the device, until their copies home have ended."""
        largest = max((p.nbytes for p in trained), default=0)
        kept = min(2 * largest, self.budget // 4)
        self.may_pass = max(0, kept - largest)
        return kept

    def forget(self) -> None:
        """Drop the references to tensors."""
        self._tensors, self.trained, self.homes = [], [], []
        self._mine.clear()

    def can_be_exceeded(self) -> bool:
        """False if there is room for the gradients and state of everything."""
        optimizer = self._optimizer()
        copies = 3 if optimizer is None else max(3, copies_of(optimizer))
        every = sum(t.nbytes for t in self.all_that_may_train())
        return self.total + (1 + copies) * every > self.budget

    def all_that_may_train(self) -> list[Tensor]:
        """Each tensor that may have a gradient at some time."""
        trained = filter(_may_train, self.trained)
        return list({id(t): t for t in (*self._tensors, *trained)}.values())

    def follow(self) -> None:
        """Divide again if the groups or what requires gradients have changed."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        groups = optimizer.param_groups
        every = [p for group in groups for p in group["params"] if id(p) in self._mine]
        seen = [(id(p), _trains(p)) for p in every], len(optimizer.state), copies_of(optimizer)
        if seen == self._seen:
            return
        self._groups = _lists_of(optimizer)
        self.trained, self._ids = every, {id(p) for p in every}
        self._counted = {id(p) for p in every if _trains(p)}
        self._divide(optimizer)
        self._seen = seen
        self.divisions += 1
        if not self.gradients_stay:
            for parameter, home in self.homes:
                home(parameter, True)

    def _divide(self, optimizer: optim.Optimizer) -> None:
        gradients = sum(p.nbytes for p in self.trained if id(p) in self._counted)
        state = self._state_bytes(optimizer)
        left = self.budget - self.total
        self.gradients_stay = gradients <= left
        self.state_stays = gradients + state <= left
        if self.total > self.budget:
            self.room = self._scratch
        elif self.gradients_stay:
            self.room = left - gradients
        else:
            kept = self._for_gradients([p for p in self.trained if id(p) in self._counted])
            if kept > left // 2:
                kept, self.may_pass = left // 2, 0
            self.room = left - kept

    def _state_bytes(self, optimizer: optim.Optimizer) -> int:
        """The bytes of the state, with an estimate where the first step is still to come."""
        copies = copies_of(optimizer)
        known = {id(p): sum(t.nbytes for _, t in state_of(optimizer, p)) for p in self.trained}
        some = any(known.values())
        return sum(
            known[id(p)] or (copies * p.nbytes if id(p) in self._counted or not some else 0)
            for p in self.trained
        )

    def trains(self, parameter: Tensor) -> bool:
        """True for a parameter of the optimizer that has a gradient, or will."""
        return id(parameter) in self._ids and _trains(parameter)

    def sends_home(self, parameter: Tensor) -> bool:
        """True if there is no room for the gradient of a parameter; it may be its first one."""
        optimizer = self._optimizer()
        key = id(parameter)
        if optimizer is not None and (
            (key in self._ids and key not in self._counted)
            or (key not in self._ids and _lists_of(optimizer) != self._groups)
        ):
            self.follow()
        return key in self._ids and not self.gradients_stay


def _lists_of(optimizer: optim.Optimizer) -> list[tuple[int, int]]:
    """The id and length of each list of parameters, to find a change without a walk."""
    return [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]
