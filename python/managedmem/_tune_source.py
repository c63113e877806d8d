"""The result of tune() as Python source text that a user pastes into a program."""

from __future__ import annotations

import keyword
import pprint
import re
import unicodedata

from managedmem._tune_values import Entries, TuneValues
from managedmem._units import WIDTH, time_text

RESERVED = {"buffers", "phases", "tuned_step", "Device", "Host", "MigrationPolicy", "PrefetchPlan"}
"""Names that the text uses. Phases with these names are looked up in ``phases``."""
PLANS = ("before_", "discards_before_")


def _is_name(phase: str) -> bool:
    """True if Python takes this name as it is: it normalizes some characters of names (NFKC)."""
    return phase.isidentifier() and unicodedata.is_normalized("NFKC", phase)


def _variable(start: str, phase: str, number: int) -> str:
    return f"{start}_{phase if _is_name(phase) else number}"


def _call(phase: str) -> str:
    taken = phase in RESERVED or phase.startswith(PLANS) or keyword.iskeyword(phase)
    return f"{phase}()" if _is_name(phase) and not taken else f"phases[{phase!r}]()"


def _plan_lines(result: TuneValues, entries: Entries, start: str) -> list[str]:
    lines = []
    for number, phase in enumerate(result.phases, start=1):
        if phase in entries:
            lines.append(f"{_variable(start, phase, number)} = PrefetchPlan(")
            lines.append("    [")
            lines += [f"        (buffers[{name!r}], {place})," for name, place in entries[phase]]
            lines += ["    ]", ")"]
    return lines


def _policy_lines(result: TuneValues) -> list[str]:
    groups: dict[str, list[str]] = {}
    for name, policy in result.policies.items():
        groups.setdefault(repr(policy), []).append(name)
    lines = []
    for policy_text, names in groups.items():
        targets = [f"buffers[{name!r}]" for name in names]
        line = f"{policy_text}.apply([{', '.join(targets)}])"
        if len(line) <= WIDTH:
            lines.append(line)
        else:
            lines += [f"{policy_text}.apply(", "    [", *(f"        {each}," for each in targets)]
            lines += ["    ]", ")"]
    return lines


def _step_lines(result: TuneValues) -> list[str]:
    lines = ["def tuned_step():"]
    for number, phase in enumerate(result.phases, start=1):
        if phase in result._discard_entries:
            devices = sorted({str(place) for _, place in result._discard_entries[phase]})
            waits = [f"    {device}.sync()" for device in devices if device.startswith("Device")]
            waits = waits or ["    Device().sync()"]
            plan = _variable("discards_before", phase, number)
            comment = "  # other streams may use the memory"
            lines += [waits[0] + comment, *waits[1:], f"    {plan}.discard_prefetch()", *waits]
        if phase in result._prefetch_entries:
            lines.append(f"    {_variable('before', phase, number)}.execute()")
        start = "return " if len(result.phases) == 1 else ""
        lines.append(f"    {start}{_call(phase)}")
    return lines


def _comment(result: TuneValues) -> list[str]:
    used = sorted(result._names())
    if not used:
        return ["# managedmem.tune() proved no change."]
    times = f"{time_text(result.before.median)} -> {time_text(result.after.median)}"
    measured = f"# Measured by managedmem.tune(): {times} per run, {result.speedup:.2f} x as fast."
    if result.counts is not None:
        measured = f"# managedmem.tune() on the emulated driver: {result._headline()}."
    looked_up = [repr(phase) for phase in result.phases if _call(phase).startswith("phases[")]
    functions = (
        [f"# `phases` maps names to functions: {', '.join(looked_up)}."] if looked_up else []
    )
    return [
        measured,
        *(f"# {line}" for line in pprint.pformat(result.machine, width=90).splitlines()),
        f"# `buffers` maps names to memory: {', '.join(map(repr, used))}.",
        *functions,
    ]


def source_of(result: TuneValues) -> str:
    """The policies, the plans, and a step that executes them."""
    names = ["Device", "Host", "MigrationPolicy", "PrefetchPlan"]
    blocks = [
        _policy_lines(result),
        _plan_lines(result, result._prefetch_entries, "before"),
        _plan_lines(result, result._discard_entries, "discards_before"),
    ]
    step = _step_lines(result)
    text = "\n".join(line for block in [*blocks, step] for line in block)
    used = [name for name in names if re.search(rf"\b{name}[.(]", text)]
    head = [f"from managedmem import {', '.join(used)}"] if used else []
    parts = ["\n".join(part) for part in (_comment(result), head, *blocks) if part]
    return "\n\n".join(parts) + "\n\n\n" + "\n".join(step) + "\n"
