"""Results as tables for people and as JSON for programs."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import managedmem

from . import peers
from .measure import PEERS, Result, Row

# The size of each unit in the measured unit (nanoseconds, bytes, instructions).
SCALES = {"ns": 1.0, "us": 1e3, "ms": 1e6, "kB": 1e3, "MB": 1e6, "bytes": 1.0}
SCALES |= {"instructions": 1.0, "x": 1.0, "loads": 1.0, "launches": 1.0, "times": 1.0, "GB/s": 1e9}
DECIMALS = {"us": 1, "ms": 1, "x": 2, "loads": 1, "launches": 1, "GB/s": 1}
# The lines of a page around the results.
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
# The order of columns; others follow.
COLUMNS = (
    "bare C",
    "untraced",
    "bare queue",
    "arithmetic",
    "loop",
    "batch",
    "one call",
    "ours",
    "ours, deferred",
    "ours, plain",
    "ours, read_only",
    "plan",
    *PEERS,
)


@dataclass(frozen=True)
class Group:
    """One table: title, description, the function that measures it, and the memory for that."""

    title: str
    description: str
    measure: Callable[..., Iterable[Row]]  # a row as soon as it is measured
    need: int = 0
    summary: Callable[[list[Row]], str] | None = None
    options: tuple[str, ...] = ()  # of the command line, that the function takes as keywords


@dataclass(frozen=True)
class Report:
    """Results, and the machine that they were measured on."""

    machine: dict[str, Any]
    groups: dict[str, list[Row]]

    def write(self, path: Path) -> None:
        """Write JSON with a line for each row, so that two runs can be compared by diff.

        The file is replaced whole: a run that is killed leaves what it wrote last.
        """
        groups = [
            f"{json.dumps(name)}: [\n"
            + ",\n".join(json.dumps(row.as_json(), ensure_ascii=False) for row in rows)
            + "\n]"
            for name, rows in self.groups.items()
        ]
        machine = json.dumps(self.machine, indent=1, ensure_ascii=False)
        text = f'{{\n"machine": {machine},\n"groups": {{\n' + ",\n".join(groups) + "\n}\n}\n"
        part = path.with_name(f"{path.name}.part")
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)

    @classmethod
    def read(cls, *paths: Path) -> Report:
        """The results of earlier runs; groups of later files replace those of earlier ones."""
        machine: dict[str, Any] = {}
        groups: dict[str, list[Row]] = {}
        for path in paths:
            found = json.loads(path.read_text(encoding="utf-8"))
            machine |= found["machine"]
            for name, rows in found["groups"].items():
                groups[name] = [Row.from_json(row) for row in rows]
        return cls(machine, groups)

    def heading(self) -> str:
        """The lines above the tables: date, GPU, driver and versions."""
        facts = self.machine
        versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
        return (
            f"{facts['date']}, {facts['gpu']}, CUDA driver {facts['driver']}, "
            f"Python {facts['python']}, {facts['machine']}\n{versions}"
            + (f"\n\n{facts['note']}" if "note" in facts else "")
        )


def driver_text() -> str:
    """The driver's version of CUDA, and its own version if the kernel module has one."""
    found = managedmem.capabilities()
    version = f"{found.driver_version // 1000}.{found.driver_version % 1000 // 10}"
    if found.emulated:
        return f"{version} (EMULATED)"
    kernel_module = Path("/sys/module/nvidia/version")
    own = f" ({kernel_module.read_text().strip()})" if kernel_module.exists() else ""
    return f"{version}{own}"


def new_page(path: Path, facts: dict[str, Any]) -> None:
    """Write a new page with a title and the two marks."""
    path.write_text(f"# {facts['gpu']}, {facts['date']}\n\n{BEGIN}\n{END}\n", encoding="utf-8")


def replace_between(path: Path, text: str) -> None:
    """Replace the text between the two marks of a page."""
    page = path.read_text(encoding="utf-8")
    if not (page.count(BEGIN) == page.count(END) == 1 and page.index(BEGIN) < page.index(END)):
        raise SystemExit(f"benchmarks: {path} lacks the lines {BEGIN} and {END}, in this order")
    before, after = page[: page.index(BEGIN)], page[page.index(END) :]
    path.write_text(f"{before}{BEGIN}\n\n{text}\n{after}", encoding="utf-8")


def machine() -> dict[str, Any]:
    """The machine and the versions that are measured."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "gpu": managedmem.Device(0).name,
        "driver": driver_text(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": peers.versions(),
    }


def number(value: float, unit: str) -> str:
    """A value in its unit, with decimals if it is short."""
    scaled = value / SCALES[unit]
    digits = DECIMALS.get(unit, 0) if abs(scaled) < 1000 else 0
    return f"{scaled:,.{digits}f}"


def cell(result: Result | None, unit: str) -> str:
    """A median with its spread, or a dash."""
    if result is None:
        return "-"
    spread = f" ±{result.spread:.0%}" if result.varies else ""
    return f"{number(result.median, unit)}{spread}"


def columns_of(rows: Sequence[Row]) -> list[str]:
    """The names of all contenders, in the usual order."""
    found = list(dict.fromkeys(name for row in rows for name in row.results))
    known = [name for name in COLUMNS if name in found]
    return known + [name for name in found if name not in known]


def compared(row: Row) -> list[str]:
    """Ours less the bare call, and the fastest peer as a multiple of ours."""
    ours, bare = row.results.get("ours"), row.results.get("bare C")
    peers_medians = [row.results[name].median for name in PEERS if name in row.results]
    above = "-" if not (ours and bare) else number(ours.median - bare.median, row.unit)
    ratio = "-" if not (ours and peers_medians) else f"{min(peers_medians) / ours.median:.1f}"
    return [above, ratio]


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table with a column for each contender."""
    names = columns_of(rows)
    extra = ["ours - bare", "best peer / ours"] if {"ours", "bare C"} <= set(names) else []
    lines = ["| operation | " + " | ".join([*names, *extra]) + " | unit | note |"]
    lines.append("|---|" + "---:|" * len([*names, *extra]) + "---|---|")
    for row in rows:
        cells = [cell(row.results.get(name), row.unit) for name in names]
        cells += compared(row) if extra else []
        lines.append(f"| {row.operation} | {' | '.join(cells)} | {row.unit} | {row.note} |")
    return "\n".join(lines)


def spread_text(rows: Sequence[Row]) -> str:
    """The spread of the measurements."""
    spreads = [r.spread for row in rows for r in row.results.values() if r.varies]
    if not spreads:
        return ""
    return (
        "± is half the distance between the quartiles, in parts of the median:"
        f" {statistics.median(spreads):.0%} in the middle, {max(spreads):.0%} at most."
    )


def failures_text(rows: Sequence[Row]) -> str:
    """The failures of contenders, each reason once."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for name, error in row.failed.items():
            found.setdefault(f"{name} cannot: {error}", []).append(row.operation)
    return "\n".join(
        f"{text} ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})"
        for text, names in found.items()
    )


def section(group: Group, rows: list[Row]) -> str:
    """A whole group: title, description, table, summary, spread and failures."""
    measured = [row for row in rows if row.results]
    parts = [
        f"## {group.title}",
        group.description,
        table(measured) if measured else "Nothing to measure here.",
        *(f"{row.operation}: {row.note}" for row in rows if not row.results),
    ]
    whole = measured and not any(row.broken for row in rows)
    parts += [group.summary(measured) if group.summary and whole else ""]
    parts += [spread_text(rows), failures_text(rows)]
    return "\n\n".join(part for part in parts if part) + "\n"
