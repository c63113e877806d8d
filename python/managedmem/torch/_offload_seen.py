"""Writes through `parameter.data`, which torch does not count: the class of a parameter sees them.

While modules whose code reads `data` are called, the parameters below are of another class, for
which that attribute is a property. A call that does not read it has written nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

from torch import Tensor, nn

from managedmem.torch._offload_copies import plain_copy

# By the ids of parameters. Weak, as a call that Ctrl-C has ended may be open for long.
_watches: weakref.WeakValueDictionary[int, DataWatch] = weakref.WeakValueDictionary()


class WatchedParameter(nn.Parameter):
    """The class of a parameter during a call that may write it through `data`."""

    @property
    def data(self) -> Tensor:
        watch = _watches.get(id(self))
        if watch is not None:
            watch.on_read()
        return cast(Tensor, Tensor.data.__get__(self))  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return plain_copy(self, memo)


class DataWatch:
    """Watches the parameters of a part during its uses. Its owner has the lock."""

    def __init__(self, parameters: Iterable[Tensor], on_read: Callable[[], None]) -> None:
        self.parameters = list(parameters)
        self.on_read = on_read
        self.was_read = False
        self.uses = 0

    def sees_all(self) -> bool:
        """False if writes may be unseen: of other classes, or through a `data` that was kept."""
        kinds = (nn.Parameter, WatchedParameter)
        return not self.was_read and all(type(each) in kinds for each in self.parameters)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Watch only parameters that are among these."""
        wanted = set(map(id, tensors))
        for parameter in self.parameters:
            if id(parameter) not in wanted:
                _unwatch(parameter)
        self.parameters = [each for each in self.parameters if id(each) in wanted]

    def show(self) -> None:
        """Begin a use."""
        self.uses += 1
        for parameter in self.parameters:
            _watches[id(parameter)] = self
            if type(parameter) is nn.Parameter:
                parameter.__class__ = WatchedParameter

    def hide(self) -> None:
        """End a use; none after end()."""
        self.uses = max(0, self.uses - 1)
        if self.uses == 0:
            self.end()

    def end(self) -> None:
        """Let the parameters be of their own class."""
        self.uses = 0
        for parameter in self.parameters:
            _unwatch(parameter)


def _unwatch(parameter: Tensor) -> None:
    """Let a parameter be of its own class."""
    _watches.pop(id(parameter), None)
    if type(parameter) is WatchedParameter:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
