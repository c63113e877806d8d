"""Writes that torch does not count: through `parameter.data`, and by steps of fused optimizers.

While parameters are watched, `data` of nn.Parameter is a property, which tells the watch of reads.
Code that does not read `data` cannot write through it. A hook of all optimizers tells of steps.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import cast

from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

_TORCH_READERS = ("torch._", "torch.nn.")
_hooks: list[RemovableHandle] = []  # one while parameters are watched
# By the ids of parameters, which a watch keeps.
_watches: weakref.WeakValueDictionary[int, DataWatch] = weakref.WeakValueDictionary()
_lock = threading.RLock()  # a collection while it is held may end a watch


def _read(parameter: nn.Parameter) -> Tensor:
    watch = _watches.get(id(parameter))
    data = cast(Tensor, Tensor.data.__get__(parameter))  # type: ignore[attr-defined]
    if watch is not None and not watch.pauses and not _is_torch(sys._getframe(1)):
        watch.note(data)
    return data


def _is_torch(frame: FrameType) -> bool:
    """True for code of torch that reads `data` to copy and to compile, and writes nothing.

    Other packages of torch, such as torch.ao, write through `data`, or call code of users.
    """
    return str(frame.f_globals.get("__name__")).startswith(_TORCH_READERS)


def _assign(parameter: nn.Parameter, value: Tensor) -> None:
    Tensor.data.__set__(parameter, value)  # type: ignore[attr-defined]


_seen = property(_read, _assign, doc=Tensor.data.__doc__)


def note_step(optimizer: optim.Optimizer, *arguments: object) -> None:
    """The hook of all optimizers: note that a step writes the watched parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            watch = _watches.get(id(parameter))
            if watch is not None and not watch.pauses:
                watch.note(None)


class DataWatch:
    """Watches the parameters of a part.

    Calls `note` with each `data` that was read, and with None for a step. Its owner has a lock.
    """

    def __init__(self, tensors: Iterable[Tensor], note: Callable[[Tensor | None], None]) -> None:
        self.tensors: list[Tensor] = []
        self.note = note
        self.was_read = False
        self.kept: list[weakref.ref[Tensor]] = []  # `data` that were read; a view keeps its `data`
        self.pauses = 0
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        """Watch another tensor. Writes are noticed only for parameters."""
        self.tensors.append(tensor)
        with _lock:
            if isinstance(tensor, nn.Parameter):
                _watches[id(tensor)] = self
                nn.Parameter.data = _seen  # type: ignore[assignment]
                if not _hooks:
                    _hooks.append(register_optimizer_step_pre_hook(note_step))

    def sees_all(self) -> bool:
        """False if writes may go unseen: of other classes, or through a `data` that was read."""
        return not self.was_read and all(
            getattr(type(each), "data", None) is _seen for each in self.tensors
        )

    def keeps_data(self) -> bool:
        """True if a `data` that was read between rounds still exists."""
        self.kept = [each for each in self.kept if each() is not None]
        return bool(self.kept)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Watch only tensors that are among these."""
        wanted = set(map(id, tensors))
        with _lock:
            for tensor in self.tensors:
                if id(tensor) not in wanted and _watches.get(id(tensor)) is self:
                    del _watches[id(tensor)]
            if not _watches and _hooks:
                del nn.Parameter.data
                _hooks.pop().remove()
        self.tensors = [each for each in self.tensors if id(each) in wanted]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A `with` block in which nothing is noted, because its writes are known."""
        self.pauses += 1
        try:
            yield
        finally:
            self.pauses -= 1

    def end(self) -> None:
        """Watch no tensor any more."""
        self.keep(())

    def __del__(self) -> None:
        try:  # noqa: SIM105
            self.end()
        except Exception:
            pass  # modules may be gone at exit
