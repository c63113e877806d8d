"""The tensors in a module's output, at any depth, and the nodes where backward passes meet them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Set
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

_MOST = 10_000  # objects that are looked at in one output, the outermost first
_CONTAINERS = (list, tuple, deque, Set)
# Objects of these types hold no tensor of a call, or belong to all calls.
_OTHERS = (str, bytes, bytearray, int, float, complex, type, FunctionType, ModuleType, nn.Module)


def nodes_of(output: Any) -> set[Node]:
    """The nodes of the tensors in an output.

    The node of a view's base is among them, because it remains when the view is overwritten.
    """
    nodes: set[Node | None] = set()
    for tensor in tensors_in(output):
        nodes.add(tensor.grad_fn)
        if tensor._is_view() and tensor._base is not None:
            nodes.add(tensor._base.grad_fn)
    return {node for node in nodes if node is not None}


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Each tensor once, at any depth, even in an output that contains itself."""
    pending: deque[Any] = deque([output])
    seen: dict[int, Any] = {}  # keeps temporary objects, so that each id is of one object
    for _ in range(_MOST):
        if not pending:
            return
        value = pending.popleft()
        kind = type(value)  # isinstance() would run code of the object
        if value is None or issubclass(kind, _OTHERS) or id(value) in seen:
            continue
        seen[id(value)] = value
        if issubclass(kind, Tensor):
            yield value
            continue
        if issubclass(kind, Mapping):
            pending += value.values()
        elif issubclass(kind, _CONTAINERS):
            pending += value
        pending += _attributes(value)


def _attributes(value: object) -> Iterator[Any]:
    """The values in the __dict__ and the slots of an object, without running code of its own."""
    with contextlib.suppress(AttributeError):
        yield from object.__getattribute__(value, "__dict__").values()
    for kind in type(value).__mro__:
        for slot in vars(kind).values():
            if type(slot) is _Slot:
                with contextlib.suppress(AttributeError):  # nothing is in it
                    yield slot.__get__(value)


class _Slotted:
    __slots__ = ("one",)


_Slot = type(vars(_Slotted)["one"])
