"""Checks the arguments of tune(): the phases of the step, the memories by name, and limits."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from managedmem._managedmem import Host, ManagedBuffer, MigrationPolicy, PrefetchPlan
from managedmem._trace_results import target_range

if TYPE_CHECKING:
    from typing import TypeAlias

    from managedmem._managedmem import _Target

    _Phase: TypeAlias = Callable[[], Any] | tuple[str, Callable[[], Any]]
    _Step: TypeAlias = _Phase | Sequence[_Phase]
    _Disposable: TypeAlias = str | _Target | Iterable[str | _Target] | Mapping[Any, str]

LEAST_PAIRS = 5


class Phase(NamedTuple):
    """A named part of the step."""

    name: str
    run: Callable[[], Any]


class Limits(NamedTuple):
    """The arguments of tune() that bound the search."""

    max_seconds: float
    pairs: int
    min_gain: float
    warmup: int
    max_noise: float
    verify: Callable[[Any, Any], Any] | None


def _phase_of(given: Any, place: str, default: str) -> Phase:
    name = None
    if _is_pair(given):
        name, given = given
        if not name:
            raise ValueError(f"{place} has an empty name")
    if not callable(given):
        raise TypeError(f"{place} must be callable, or a pair (name, callable), got {given!r}")
    if inspect.iscoroutinefunction(given):
        raise TypeError(f"{place} must not be a coroutine function: nobody would await it")
    if name is None:
        own_name = getattr(given, "__name__", default)
        name = default if own_name == "<lambda>" else str(own_name)
    return Phase(name, given)


def _is_pair(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str)


def phases_of(step: Any) -> tuple[Phase, ...]:
    """The phases of a step: a callable, a pair (name, callable), or a sequence of these."""
    if callable(step) or _is_pair(step):
        return (_phase_of(step, "step", "step"),)
    if not isinstance(step, list | tuple):
        raise TypeError(f"step must be callable, or a list or tuple of callables, got {step!r}")
    if not step:
        raise ValueError("step has no phases: give a callable, or several")
    phases = tuple(_phase_of(each, f"step[{i}]", f"phase_{i + 1}") for i, each in enumerate(step))
    names = [phase.name for phase in phases]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(
                f"step[{names.index(name)}] and step[{i}] are both named {name!r}: give pairs "
                "(name, callable) with different names"
            )
    return phases


def _is_one_target(given: Any) -> bool:
    protocols = ("__cuda_array_interface__", "__array_interface__", "__dlpack__")
    if any(hasattr(type(given), name) for name in protocols) or not isinstance(given, Iterable):
        return True
    try:
        memoryview(given)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _names_for(targets: Sequence[Any]) -> list[str]:
    """The names of whole buffers; for other targets, their places in the list."""
    names = [
        each.name if isinstance(each, ManagedBuffer) and not each.is_closed else None
        for each in targets
    ]
    places = [f"buffers[{i}]" for i in range(len(targets))]
    if any(name in places for name in names):
        return places
    return [
        name if name and names.count(name) == 1 else place
        for name, place in zip(names, places, strict=True)
    ]


def named_targets(buffers: Any) -> dict[str, Any]:
    """The targets by name. Each of them must be open and in managed memory.

    Raises ValueError or TypeError.
    """
    if isinstance(buffers, Mapping):
        named = dict(buffers)
        for name in named:
            if not isinstance(name, str) or not name:
                raise TypeError(f"the names of buffers must be non-empty str, got {name!r}")
    else:
        given = [buffers] if _is_one_target(buffers) else list(buffers)
        named = dict(zip(_names_for(given), given, strict=True))
    for name, target in named.items():
        try:
            MigrationPolicy.default().applied([target])  # checks the target, and applies nothing
        except (TypeError, ValueError, RuntimeError) as error:
            start = f"buffer {name!r}: "
            error.args = (start + str(error).removeprefix("targets[0]: "), *error.args[1:])
            raise
    return named


def extents_of(targets: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Address and size of each target; no two may overlap."""
    extents = {name: target_range(target) for name, target in targets.items()}
    last, end = "", 0
    ordered = sorted(extents.items(), key=lambda each: (each[1][0], -each[1][1]))
    for name, (start, nbytes) in ordered:
        if nbytes and start < end:
            raise ValueError(f"buffers {last!r} and {name!r} overlap: give each byte once")
        if start + nbytes > end:
            last, end = name, start + nbytes
    return extents


def disposable_of(
    given: Any, targets: Mapping[str, Any], phases: Sequence[Phase]
) -> dict[str, str | None]:
    """The disposable memories by name, with the phase that overwrites them where it is given."""
    if isinstance(given, Mapping):
        pairs = list(given.items())
    else:
        is_single = isinstance(given, str) or _is_one_target(given)
        pairs = [(each, None) for each in ([given] if is_single else given)]
    obstacles: dict[str, str | None] = {}
    names = [phase.name for phase in phases]
    for each, phase in pairs:
        same = (key for key, target in targets.items() if target is each)
        name = each if isinstance(each, str) else next(same, "")
        if name not in targets:
            raise ValueError(f"disposable has {each!r}, which buffers does not have")
        if phase is not None and phase not in names:
            raise ValueError(
                f"disposable says that phase {phase!r} overwrites {name!r}; the phases are "
                f"{', '.join(names)}"
            )
        obstacles[name] = phase
    return obstacles


def check_discards(names: Iterable[str], targets: Mapping[str, Any]) -> None:
    """Raise ValueError for memory that is read-only, has gaps, or contains no whole page."""
    for name in names:
        try:
            PrefetchPlan([(targets[name], Host())]).explain(discard=True)
        except ValueError as error:
            text = str(error).removeprefix("entry 0: ").removesuffix(" (entry 0)")
            raise ValueError(f"disposable {name!r}: {text}") from None


def points_of(given: Any, phases: Sequence[Phase]) -> frozenset[str]:
    names = [phase.name for phase in phases]
    if given is None:
        return frozenset(names)
    if not isinstance(given, Iterable):
        raise TypeError(f"points must be names of phases ({', '.join(names)}), got {given!r}")
    chosen = [given] if isinstance(given, str) else list(given)
    for point in chosen:
        if point not in names:
            raise ValueError(f"points has {point!r}; the phases are {', '.join(names)}")
    return frozenset(chosen)


def _number(name: str, value: Any, least: float, most: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not least <= value < most:
        limit = f"at least {least:g}" + (f" and below {most:g}" if most < math.inf else "")
        raise ValueError(f"{name} must be {limit} and finite, got {value}")
    return float(value)


def _count(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value


def limits_of(
    max_seconds: Any, pairs: Any, min_gain: Any, warmup: Any, max_noise: Any, verify: Any
) -> Limits:
    limits = Limits(
        _number("max_seconds", max_seconds, 0),
        _count("pairs", pairs, LEAST_PAIRS),
        _number("min_gain", min_gain, 0, 1),
        _count("warmup", warmup, 0),
        _number("max_noise", max_noise, 0),
        verify,
    )
    if verify is not None and not callable(verify):
        raise TypeError(f"verify must be callable or None, got {verify!r}")
    return limits
