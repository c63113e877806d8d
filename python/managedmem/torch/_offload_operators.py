"""Operators with which a graph of torch.compile announces the calls of modules, without a break.

Owns the schemas of these operators, and their order among the kernels of a graph. Compilers order
work by its data. So an operator claims to change the activations at its place, and also a token
that all operators of a graph share: kernels then stay before or behind it. In fact it changes
nothing, and autograd ignores it. A kernel on the wrong side would read the memory at home, which is
slow, but right.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from managedmem.torch._offload_outputs import nodes_of

BEGIN, END, ENTER, LEAVE, REACHED = range(5)  # a round, a call, a node of a backward pass


class Point(Protocol):
    """A place in a model that has something to announce."""

    def happen(self, event: int) -> None:
        """One of the events above, on the current stream."""


_points: weakref.WeakValueDictionary[int, Point] = weakref.WeakValueDictionary()
_keys = itertools.count(1)
_tokens: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()  # by the tracing mode


def can_announce() -> bool:
    """True if this torch can have the operators in its graphs.

    torch must tell compilation from export. In older versions, guards find hooks in another order
    than that of their calls, and fail.
    """
    recent = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
    return recent and hasattr(torch.compiler, "_is_exporting_flag")


def key_of(point: Point) -> int:
    """The number by which operators name a point. It does not keep the point alive."""
    key = next(_keys)
    _points[key] = point
    return key


# --- in traced code -----------------------------------------------------------------------


def announce(key: int, place: torch.device, event: int, value: object) -> bool:
    """Announce in a graph; False if the arguments or the output have no tensor to tie it to."""
    tensors = _tensors(value)
    if not tensors and event in (ENTER, LEAVE):
        return False
    if event == ENTER:  # one is enough: the work of a call follows its arguments
        tensors = [t for t in tensors if t.is_floating_point()][:1] or tensors[:1]
    torch.ops.managedmem.announce(tensors, key, event, place)
    return True


def _tensors(value: object) -> list[Tensor]:
    """The tensors in containers, by functions that a compiler can trace."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return []
    return [tensor for each in value for tensor in _tensors(each)]


# --- the operators ------------------------------------------------------------------------


@cache
def define() -> torch.library.Library:
    """Define the operators, once."""
    library = torch.library.Library("managedmem", "FRAGMENT")
    library.define("announce(Tensor[] tensors, SymInt key, int event, Device place) -> ()")
    library.define(
        "order(Tensor(a!)[] after, Tensor[] before, Tensor(b!) token, SymInt key, int event) -> ()"
    )
    library.impl("announce", _announce, "CompositeImplicitAutograd")
    library.impl("order", _order, "CompositeExplicitAutograd")
    library.impl("order", torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake("managedmem::order", _nothing, lib=library)
    return library


def _announce(tensors: Sequence[Tensor], key: int, event: int, place: torch.device) -> None:
    """Announce now, or in the graph that AOTAutograd makes."""
    functional = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    if functional is not None:
        token = _tokens.get(functional)
        if token is None:
            token = _tokens[functional] = torch.empty(1, device=place)
        after, before = _sides(tensors, event)
        torch.ops.managedmem.order(after, before, token, key, event)
    elif torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
        _order((), (), None, key, event)
    if event == LEAVE and torch.is_grad_enabled():
        reached = _Reached(key)
        for node in nodes_of(tensors):
            node.register_prehook(reached)


def _sides(tensors: Iterable[Tensor], event: int) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator claims to change, and the tensors that it claims to read."""
    after: list[Tensor] = []
    before: list[Tensor] = []
    for tensor in {id(t): t for t in tensors}.values():
        # A claimed write of memory that a backward pass needs would make a copy of it.
        is_saved = event == ENTER and tensor.requires_grad and torch.is_grad_enabled()
        (before if is_saved or not _is_made_in_graph(tensor) else after).append(tensor)
    return after, before


def _order(after: object, before: object, token: object, key: int, event: int) -> None:
    """Announce an event. This runs in place of a kernel."""
    point = _points.get(int(key))
    if point is not None:  # None once the model is not offloaded any more
        point.happen(event)


def _nothing(*arguments: object) -> None:
    """The operator while shapes are inferred: it has no outputs."""


def _is_functional(tensor: Tensor) -> bool:
    """True while AOTAutograd makes a graph without writes in place."""
    return type(tensor).__name__ == "FunctionalTensor"


def _is_made_in_graph(tensor: Tensor) -> bool:
    """False for memory of the caller, for which a claimed write would count as a real one."""
    if not _is_functional(tensor):
        return True
    if any(
        step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        return False  # elements that share memory cannot be written
    try:
        fake: Any = torch._from_functional_tensor(tensor.elem)  # type: ignore[attr-defined]
        memory = fake.untyped_storage()._cdata
        given = fake.fake_mode.fake_tensor_converter.meta_converter.storage_memo
        return all(storage._cdata != memory for storage in list(given.values()))
    except AttributeError:
        return False


class _Reached:
    """A hook of a node, which a compiler traces into the graph of the backward pass."""

    def __init__(self, key: int) -> None:
        self.key = key

    def __call__(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
        indices = [i for i, gradient in enumerate(gradients) if gradient is not None]
        if not indices:
            return None
        first = gradients[indices[0]]
        assert first is not None
        if not _is_functional(first):
            _order((), (), None, self.key, REACHED)
            return None
        changed = list(gradients)
        changed[indices[0]] = first = first.clone()  # it may be an input of the graph
        torch.ops.managedmem.order([], [], first, self.key, REACHED)
        return tuple(changed)
