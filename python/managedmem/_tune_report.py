"""The result of tune(): policies, plans and their evidence, as text, HTML, picture and data."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from managedmem._managedmem import AppliedPolicy, Device, Host, MigrationPolicy, PrefetchPlan
from managedmem._tune_arguments import named_targets, phases_of
from managedmem._tune_search import TunedStep, plans_of
from managedmem._tune_values import (
    COUNTS,
    FEW,
    KEPT,
    SECONDS,
    CountPairs,
    Entries,
    Location,
    TuneTime,
    TuneTrial,
    TuneValues,
    counts_text,
    signed,
)
from managedmem._units import time_text, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from managedmem._managedmem import _Target
    from managedmem._tune_arguments import _Step

VERSION = 1
"""The version of the JSON form."""
_LOCATION = re.compile(r"(Device|Host)\((?:(?:numa_id=)?(\d+))?\)")


class TuneResult(TuneValues):
    """The result of `tune`: the advice and the prefetches that were proved, and the evidence.

    ``before`` and ``after`` are the seconds of a run, ``gain`` the seconds that a run saves, all
    measured in alternating pairs at the end; ``speedup`` is the ratio of their medians. Without a
    proved change, ``speedup`` is 1.0 and ``gain`` is None. These are also the values on the
    emulated driver, whose times mean nothing: there ``judged_by`` is "bytes and faults", and
    ``counts`` has the bytes and faults of a run. ``noise`` is the part of a run by which unchanged
    runs differ. ``evidence`` is the source of the counters behind the proposals, "none" without
    one; ``notes`` are sentences. ``seconds`` is how long the search took. ``phases`` are the names
    of the phases, and ``trials`` a `TuneTrial` for each change that was considered.

    Safe from every thread.
    """

    _plans: dict[str, PrefetchPlan] | None = None
    _discards: dict[str, PrefetchPlan] | None = None
    _step: Callable[[], Any] | None = None

    def __init__(self, **values: Any) -> None:
        """Made by `tune` and `from_json`."""
        super().__init__(**values)

    @property
    def plans(self) -> dict[str, PrefetchPlan]:
        """The plan to execute before each phase, by the name of the phase.

        Raises RuntimeError for a result of `from_json` that was not applied yet.
        """
        return self._bound(self._plans)

    @property
    def discards(self) -> dict[str, PrefetchPlan]:
        """The plans whose ``discard_prefetch()`` comes before a phase, by the name of the phase.

        Wait for the device before and after that call if the step uses other streams. Raises
        RuntimeError for a result of `from_json` that was not applied yet.
        """
        return self._bound(self._discards)

    @property
    def step(self) -> Callable[[], Any]:
        """A callable that runs the phases with the plans before them.

        Returns the result of the phase; with several phases a tuple. It does not apply policies,
        and does not wait at the end. Raises RuntimeError for a result of `from_json` that was not
        applied with ``step=``.
        """
        if self._step is None:
            raise RuntimeError("this result was loaded: apply(buffers, step=...) gives it a step")
        return self._step

    def _bound(self, plans: dict[str, PrefetchPlan] | None) -> dict[str, PrefetchPlan]:
        if plans is None:
            raise RuntimeError("this result was loaded: apply(buffers) gives it its memory")
        return plans

    def _bind(
        self,
        plans: dict[str, PrefetchPlan],
        discards: dict[str, PrefetchPlan],
        step: Callable[[], Any] | None,
    ) -> None:
        """Give the result its plans, and perhaps a step."""
        self._plans, self._discards, self._step = plans, discards, step

    def apply(
        self,
        buffers: _Target | Iterable[_Target] | Mapping[str, _Target],
        *,
        step: _Step | None = None,
    ) -> TuneResult:
        """Apply the policies to memory, and make the plans over it; returns the result itself.

        Parameters
        ----------
        buffers : target, several, or dict of names and targets
            Named as for `tune`. All names in the result must be there.
        step : callable or sequence of phases, optional
            As for `tune`, with the same names of phases; makes `step` available.

        The prefetches of the plans are not executed. Policies are applied all or none.
        Raises ValueError or TypeError for other arguments, before anything is applied; CUDAError if
        the driver refuses, with the earlier advice put back. Driver: cuMemAdvise,
        cuMemRangeGetAttributes.
        """
        phases = None if step is None else phases_of(step)
        if phases is not None and tuple(phase.name for phase in phases) != self.phases:
            raise ValueError(
                f"step must have the phases {', '.join(self.phases)}, got "
                f"{', '.join(phase.name for phase in phases)}"
            )
        targets = named_targets(buffers)
        missing = sorted(self._names() - targets.keys())
        if missing:
            raise ValueError(f"buffers lacks {', '.join(map(repr, missing))}, which the result has")
        plans = plans_of(_keyed(self._prefetch_entries), targets)
        discards = plans_of(_keyed(self._discard_entries), targets)
        apply_all(self.policies, targets)
        self._bind(plans, discards, TunedStep(phases, plans, discards) if phases else None)
        return self

    # --- text -----------------------------------------------------------------------------------

    def __str__(self) -> str:
        lines = [self._headline(), self._circumstances()]
        for title, wanted in (("kept", True), ("not kept", False)):
            chosen = [trial for trial in self.trials if (trial.verdict == KEPT) is wanted]
            if chosen:
                lines += ["", f"{title}:"]
                lines += [line for trial in chosen for line in _trial_lines(trial)]
        lines += [f"\nnote: {note}" for note in self.notes]
        return "\n".join(lines)

    def _circumstances(self) -> str:
        tried = sum(bool(trial.pairs) for trial in self.trials)
        return (
            f"noise {self.noise:.1%} of a run, evidence {self.evidence}, {tried} changes tried, "
            f"{time_text(self.seconds)}"
        )

    def __repr__(self) -> str:
        kept = sum(trial.verdict == KEPT for trial in self.trials)
        judged = f"speedup={self.speedup:.2f}"
        if self.counts is not None:
            sides = (f"{name}={a}->{b}" for name, (a, b) in self.counts.items())
            judged = f"judged by {COUNTS}: {' '.join(sides)}"
        return f"<TuneResult {judged} kept={kept} trials={len(self.trials)}>"

    def _repr_html_(self) -> str:
        """The result as a table for notebooks, without scripts."""
        from html import escape

        rows = []
        for trial in sorted(self.trials, key=lambda each: each.verdict != KEPT):
            gain = "" if trial.gain is None else signed(trial.gain.median)
            if trial.counts is not None:
                gain = " -> ".join(counts_text(trial.counts, side) for side in (0, 1))
            texts = (trial.change, trial.reason, gain, trial.verdict)
            cells = (f'<td style="text-align:left">{escape(text)}</td>' for text in texts)
            rows.append(f"<tr>{''.join(cells)}</tr>")
        heads = "".join(f"<th>{h}</th>" for h in ("change", "reason", "gain", "verdict"))
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        table = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        return (
            f"<div><p>{escape(self._headline())}</p><p>{escape(self._circumstances())}</p>"
            f"{table if rows else ''}{notes}</div>"
        )

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Draw the gain of each change that was tried, and of all together; return the Axes.

        Gains are parts of a run. Bars are medians with their intervals, dots are pairs of runs.
        ``ax`` are the matplotlib Axes to draw on; without it there is a new figure. Raises
        ImportError without matplotlib, which the extra ``plot`` installs.
        """
        from managedmem._tune_plot import draw

        drawn: Axes = draw(self, ax)
        return drawn

    # --- data -----------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The result as dict, list, str and numbers, for JSON."""
        return {
            "version": VERSION,
            "phases": list(self.phases),
            "policies": {name: policy_to_dict(policy) for name, policy in self.policies.items()},
            "prefetches": _entries_to_dict(self._prefetch_entries),
            "discards": _entries_to_dict(self._discard_entries),
            "before": self.before._asdict(),
            "after": self.after._asdict(),
            "gain": self.gain and self.gain._asdict(),
            "pairs": [list(pair) for pair in self.pairs],
            "judged_by": self.judged_by,
            "counts": _counts_to_dict(self.counts),
            "noise": self.noise,
            "evidence": self.evidence,
            "notes": list(self.notes),
            "seconds": self.seconds,
            "machine": self.machine,
            "trials": [
                {
                    **trial._asdict(),
                    "pairs": [list(pair) for pair in trial.pairs],
                    "gain": trial.gain and trial.gain._asdict(),
                    "counts": _counts_to_dict(trial.counts),
                }
                for trial in self.trials
            ],
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict()` to a file."""
        values = self.to_dict()
        with open(os.fspath(path), "w", encoding="utf-8") as file:
            json.dump(values, file, indent=1)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> TuneResult:
        """Read a file that `to_json` wrote. Then call `apply` with the memory to use it on.

        Raises ValueError for any other file, and for a device that this machine lacks.
        """
        name = os.fsdecode(path)
        with open(name, encoding="utf-8") as file:
            try:
                values = json.load(file)
            except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
                raise ValueError(f"{name} is not a result of tune(): not JSON, {error}") from error
        if not isinstance(values, dict) or values.get("version") != VERSION:
            raise ValueError(
                f"{name} is not a result of tune() that this version can read: it needs "
                f'"version": {VERSION}'
            )
        try:
            return cls(**_values_of(values))
        except KeyError as error:
            raise ValueError(f"{name} is not a result of tune(): it lacks {error}") from error
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{name} is not a result of tune(): {error}") from error

    def to_python(self) -> str:
        """The proved changes as source text to paste into a program.

        It needs ``buffers``, a dict of the memories by their names, and functions with the names of
        the phases. Phases whose names cannot be names of functions there are looked up in a dict
        ``phases``. It applies the policies, and defines ``tuned_step()``.
        """
        from managedmem._tune_source import source_of

        return source_of(self)


# --- parts --------------------------------------------------------------------------------------


def apply_all(policies: Mapping[str, MigrationPolicy], targets: Mapping[str, Any]) -> None:
    """Apply a policy to each memory, all or none."""
    blocks: list[AppliedPolicy] = []
    try:
        for name, policy in policies.items():
            blocks.append(policy.applied([targets[name]]))
            blocks[-1].__enter__()
    except BaseException:
        for block in reversed(blocks[:-1]):
            block.restore()
        raise


def _keyed(entries: Entries) -> dict[tuple[str, str], Location]:
    return {(phase, name): location for phase, pairs in entries.items() for name, location in pairs}


def entries_of(places: Mapping[tuple[str, str], Location], phases: Sequence[str]) -> Entries:
    """Prefetches by phase, in the order of the phases."""
    return {
        phase: pairs
        for phase in phases
        if (pairs := [(name, place) for (p, name), place in places.items() if p == phase])
    }


def policy_to_dict(policy: MigrationPolicy) -> dict[str, Any]:
    """A policy for JSON; locations as str such as "Device(0)"."""
    preferred = policy.preferred_location
    return {
        "read_mostly": policy.read_mostly,
        "preferred_location": None if preferred is None else str(preferred),
        "accessed_by": sorted(map(str, policy.accessed_by)),
    }


def location_of(text: str) -> Location:
    """The location of a text such as "Device(0)", "Host()" or "Host(numa_id=1)"."""
    match = _LOCATION.fullmatch(text)
    if match is None or (match[1] == "Device" and match[2] is None):
        raise ValueError(f"{text!r} is not a location")
    if match[1] == "Device":
        return Device(int(match[2]))
    return Host() if match[2] is None else Host(int(match[2]))


def _policy_of(value: Any) -> MigrationPolicy:
    policy = _typed(value, dict, "each of policies")
    preferred = policy["preferred_location"]
    if preferred is not None:
        preferred = location_of(_typed(preferred, str, "preferred_location"))
    return MigrationPolicy(
        read_mostly=policy["read_mostly"],
        preferred_location=preferred,
        accessed_by=[location_of(each) for each in _texts_of(policy["accessed_by"], "accessed_by")],
    )


def _entries_to_dict(entries: Entries) -> dict[str, list[list[str]]]:
    return {
        phase: [[name, str(location)] for name, location in pairs]
        for phase, pairs in entries.items()
    }


def _counts_to_dict(counts: CountPairs | None) -> dict[str, list[int]] | None:
    return None if counts is None else {name: list(pair) for name, pair in counts.items()}


def _counts_of(value: Any) -> CountPairs | None:
    """The counts of a file; None if it has none, as files of earlier versions."""
    if value is None:
        return None
    counts = _typed(value, dict, "counts")
    pairs = {name: tuple(_typed(counts[name], list, "counts")) for name in ("bytes", "faults")}
    for pair in pairs.values():
        if len(pair) != 2:
            raise TypeError(f"each of counts must have 2 numbers, got {len(pair)}")
        for each in pair:
            _typed(each, int, "each of counts")
    return pairs


def _typed(value: Any, wanted: type | tuple[type, ...], place: str) -> Any:
    """A value of a file, if it has the wanted type. Raises TypeError for other types."""
    if isinstance(value, bool) or not isinstance(value, wanted):
        needed = f"a {wanted.__name__}" if isinstance(wanted, type) else "a number"
        raise TypeError(f"{place} must be {needed}, got {type(value).__name__}")
    if isinstance(value, int):
        float(value)  # an int that no float can hold is an OverflowError
    return value


def _number_of(value: Any, place: str) -> float:
    return _typed(value, (int, float), place)  # type: ignore[no-any-return]


def _texts_of(value: Any, place: str) -> tuple[str, ...]:
    return tuple(_typed(each, str, f"each of {place}") for each in _typed(value, list, place))


def _phases_from(value: Any) -> tuple[str, ...]:
    phases = _texts_of(value, "phases")
    if not phases or "" in phases or len(set(phases)) < len(phases):
        raise TypeError("phases must be different names, one at least")
    return phases


def _entries_from(value: Any, place: str, phases: Sequence[str]) -> Entries:
    entries: Entries = {}
    for phase, pairs in _typed(value, dict, place).items():
        if phase not in phases:
            raise TypeError(f"{place} has {phase!r}, which is not a phase")
        texts = [_texts_of(pair, place) for pair in _typed(pairs, list, place)]
        if any(len(pair) != 2 for pair in texts):
            raise TypeError(f"{place} must have pairs of a name and a location")
        entries[phase] = [(name, location_of(text)) for name, text in texts]
    return entries


def _time_of(value: Any, place: str) -> TuneTime:
    values = _typed(value, dict, place)
    return TuneTime(**{name: _number_of(each, place) for name, each in values.items()})


def _gain_of(value: Any) -> TuneTime | None:
    return None if value is None else _time_of(value, "gain")


def _pairs_of(value: Any) -> tuple[tuple[float, float], ...]:
    items = []
    for pair in _typed(value, list, "pairs"):
        if len(_typed(pair, list, "each of pairs")) != 2:
            raise TypeError(f"each of pairs must have 2 numbers, got {len(pair)}")
        items.append((_number_of(pair[0], "pairs"), _number_of(pair[1], "pairs")))
    return tuple(items)


def _trial_of(value: Any) -> TuneTrial:
    values = dict(_typed(value, dict, "each of trials"))
    for name in ("change", "rule", "reason", "verdict"):
        _typed(values[name], str, name)
    for name, each in _typed(values["evidence"], dict, "evidence").items():
        _number_of(each, name)
    if values["estimate"] is not None:
        _number_of(values["estimate"], "estimate")
    _number_of(values["cost"], "cost")
    values["pairs"], values["gain"] = _pairs_of(values["pairs"]), _gain_of(values["gain"])
    values["counts"] = _counts_of(values.get("counts"))
    if values["gain"] is not None and not values["pairs"]:
        raise TypeError("a trial without pairs has a gain")
    return TuneTrial(**values)


def _values_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a result from its JSON form; TypeError, KeyError or ValueError for others."""
    phases = _phases_from(document["phases"])
    policies = _typed(document["policies"], dict, "policies")
    return {
        "phases": phases,
        "policies": {name: _policy_of(each) for name, each in policies.items()},
        "_prefetch_entries": _entries_from(document["prefetches"], "prefetches", phases),
        "_discard_entries": _entries_from(document["discards"], "discards", phases),
        "before": _time_of(document["before"], "before"),
        "after": _time_of(document["after"], "after"),
        "gain": _gain_of(document["gain"]),
        "pairs": _pairs_of(document["pairs"]),
        "judged_by": _typed(document.get("judged_by", SECONDS), str, "judged_by"),
        "counts": _counts_of(document.get("counts")),
        "noise": _number_of(document["noise"], "noise"),
        "evidence": _typed(document["evidence"], str, "evidence"),
        "notes": _texts_of(document["notes"], "notes"),
        "seconds": _number_of(document["seconds"], "seconds"),
        "machine": _typed(document["machine"], dict, "machine"),
        "trials": tuple(map(_trial_of, _typed(document["trials"], list, "trials"))),
    }


def _trial_lines(trial: TuneTrial) -> list[str]:
    first = wrapped(trial.change, "  ", " " * 4)
    details = [trial.reason]
    if trial.gain is not None:
        usual = statistics.median(first for first, _ in trial.pairs)
        few = len(trial.pairs) < FEW
        gain = f"gain {signed(trial.gain.median) if few else trial.gain}"
        details.append(f"{gain}, {trial.gain.median / usual:+.1%} of a run" if usual else gain)
    if trial.counts is not None:
        details.append(" -> ".join(counts_text(trial.counts, side) for side in (0, 1)))
    if trial.verdict != KEPT:
        details.append(trial.verdict)
    indent = " " * 6
    return [first, wrapped("; ".join(details), indent, indent)]
