"""NVTX ranges and marks of the package: the library that takes them, and the wrapped methods.

The package imports this module only with MANAGEDMEM_NVTX=1. managedmem.torch imports its own _nvtx
module only if this one is loaded. Without the variable nothing is wrapped, and no call checks a
switch.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from functools import lru_cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from managedmem._interpreter import is_main
from managedmem._managedmem import ManagedBuffer, _Frames
from managedmem._working_group import WorkingGroup, WorkingUse
from managedmem._working_set import _GroupSet

NAME = "managedmem"
_VARIABLE = "MANAGEDMEM_NVTX"
_NAMES = 1 << 12  # the most that are kept, because a program may make ever new names of buffers
_MISSING = (
    f"{_VARIABLE}=1 needs the package nvtx 0.2.13 or newer, or torch with CUDA, to show ranges: "
    'pip install "managedmem[nvtx]". Without one, only torch.profiler shows what managedmem.torch '
    "does"
)
_TAKEN = f"{_VARIABLE}=1 shows nothing in this subinterpreter: nvtx works in one interpreter alone"


# --- the library --------------------------------------------------------------------------


class _Library(NamedTuple):
    """Functions that begin a range of this thread, end the latest one, and set a mark."""

    push: Callable[[str], object]
    pop: Callable[[], object]
    mark: Callable[[str], object]


def _of_nvidia() -> _Library | None:
    """The package nvtx, in a domain of its own."""
    try:
        domain = import_module("nvtx").get_domain(NAME)
        push, pop, mark = domain.push_range, domain.pop_range, domain.mark
    except (ImportError, AttributeError):  # older versions lack some of these
        return None

    @lru_cache(_NAMES)  # ranges are fastest with attributes that exist already
    def attributes(name: str) -> Any:
        return domain.get_event_attributes(message=name)

    return _Library(lambda name: push(attributes(name)), pop, lambda name: mark(attributes(name)))


def _of_torch() -> _Library | None:
    """torch's functions, which know no domains. In a subinterpreter, importing torch may hang."""
    if not is_main() or find_spec("torch") is None:
        return None
    torch = import_module("torch")
    if not torch.backends.cuda.is_built():
        return None
    functions = torch.cuda.nvtx
    return _Library(
        lambda name: functions.range_push(prefixed(name)),
        functions.range_pop,
        lambda name: functions.mark(prefixed(name)),
    )


def prefixed(name: str) -> str:
    """The name with a prefix, for ranges without domains, where names of all libraries mix."""
    return f"{NAME}: {name}"


def _nothing(*_: object) -> None:
    pass


def _chosen() -> _Library | None:
    if (value := os.environ[_VARIABLE]) != "1":
        raise ValueError(f'{_VARIABLE} must be "0" or "1", got "{value}"')
    library = _of_nvidia() or _of_torch()
    if library is None:
        text = _MISSING if is_main() else _TAKEN
        warnings.warn(text, RuntimeWarning, stacklevel=4)  # at the import of the package
    return library


_found = _chosen()
_library = _found or _Library(_nothing, _nothing, _nothing)
mark = _library.mark


class Span:
    """A range around a block, in the thread that runs it."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        _library.push(self.name)

    def __exit__(self, *exception: object) -> None:
        _library.pop()


# --- methods in ranges --------------------------------------------------------------------


def replace(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function by a wrapper, which gets the original before the arguments."""
    original = getattr(owner, name)

    @wraps(original)
    def replaced(*given: Any, **named: Any) -> Any:
        return wrapper(original, *given, **named)

    setattr(owner, name, replaced)


def around(
    owner: Any, name: str, title: Callable[..., str | None], span: type[Span] = Span
) -> None:
    """Put a range around the calls of a function. `title` returns its name; None: no range."""

    def call(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if (text := title(*given, **named)) is None:
            return original(*given, **named)
        with span(text):
            return original(*given, **named)

    replace(owner, name, call)


class Moves:
    """The names of the parts in frames, and the marks of parts that came or left."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}  # by the numbers of parts
        self._held: set[tuple[int, str]] = set()  # with names, because numbers are used again
        self._counted = 0, 0
        self._lock = threading.RLock()  # reentrant: a garbage collection under it may end uses

    def show(self, frames: _Frames, mark: Callable[[str], object]) -> None:
        """Mark the parts that left, and those that came ahead of a use, since the last call.

        Other threads may have moved them. A part that both left and came has no mark.
        """
        counters = frames.stats()[0]
        counted = counters["loads"], counters["drops"]
        with self._lock:
            if counted == self._counted:
                return
            held = {part for part in [*self.names.items()] if frames.has(part[0])}
            left, came = sorted(self._held - held), sorted(held - self._held)
            self._held, self._counted = held, counted
            texts = [f"drop {name}" for _, name in left] + [f"ahead {name}" for _, name in came]
        for text in dict.fromkeys(texts):  # once for all targets of a group
            mark(text)

    def note_loads(self, numbers: Iterable[int]) -> None:
        """Let show() leave out parts whose loads have a range."""
        with self._lock:
            self._held.update((n, self.names[n]) for n in numbers if n in self.names)


# --- buffers and working sets -------------------------------------------------------------

_moves: weakref.WeakKeyDictionary[_GroupSet[Any], Moves] = weakref.WeakKeyDictionary()


def _label(group: WorkingGroup) -> str:
    return group.name or "group " + "-".join(map(str, group._numbers[:1]))


def _moves_of(group: WorkingGroup) -> Moves:
    moves = _moves.setdefault(group._owner, Moves())
    moves.names.update(dict.fromkeys(group._numbers, _label(group)))
    return moves


def _added(original: Callable[..., Any], owner: _GroupSet[Any], *given: Any) -> Any:
    group = original(owner, *given)
    _moves_of(group)
    return group


def _acquire(original: Callable[..., None], use: WorkingUse, parts: Any) -> None:
    group, moves = use._group, _moves_of(use._group)
    is_there = all(map(parts.frames.has, group._numbers))
    with Span(f"{'hit' if is_there else 'load'} {_label(group)}"):
        original(use, parts)
        if use._is_at_home:
            mark(f"at home {_label(group)}")
        elif not is_there:
            moves.note_loads(group._numbers)
        moves.show(parts.frames, mark)


def _release(original: Callable[..., None], use: WorkingUse, frames: _Frames, *given: Any) -> None:
    with Span(f"{'home' if use._writes else 'release'} {_label(use._group)}"):
        original(use, frames, *given)
        _moves_of(use._group).show(frames, mark)


def _title_of_array(buffer: ManagedBuffer, *_: object, copy: object = False, **__: object) -> str:
    return f"{'result' if copy else 'view'} {buffer.name or 'buffer'}"


if _found is not None:
    replace(_GroupSet, "_added", _added)
    replace(WorkingUse, "_acquire", _acquire)
    replace(WorkingUse, "_release", _release)
    around(WorkingGroup, "_wait_for_home", lambda group, *_: f"wait {_label(group)}")
    around(_GroupSet, "close", lambda owner: f"close {type(owner).__name__}")
    for _method in ("numpy", "torch", "cupy"):
        around(ManagedBuffer, _method, _title_of_array)
