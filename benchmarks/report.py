"""Results as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import managedmem

from . import peers
from .measure import Row

SCALES = {"ns": 1.0, "us": 1e3, "ms": 1e6, "kB": 1.0, "bytes": 1.0}


def machine() -> dict[str, Any]:
    """What the numbers are true of."""
    info = managedmem.driver_info()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "gpu": managedmem.Device(0).name,
        "driver": f"{info['version_string']}{' (EMULATED)' if info['emulated'] else ''}",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": peers.versions(),
    }


def cell(row: Row, name: str) -> str:
    """A median with its spread, or a dash."""
    samples = row.samples.get(name)
    if samples is None:
        return "-"
    return f"{samples.median / SCALES[row.unit]:,.{1 if row.unit in ('us', 'ms') else 0}f}"


def table(title: str, rows: list[Row]) -> str:
    """The rows of one group, as a Markdown table with a column for each contender."""
    names = list(dict.fromkeys(name for row in rows for name in row.samples))
    lines = [f"### {title}", "", "| operation | " + " | ".join(names) + " | unit | note |"]
    lines.append("|---|" + "---:|" * len(names) + "---|---|")
    for row in rows:
        cells = " | ".join(cell(row, name) for name in names)
        lines.append(f"| {row.operation} | {cells} | {row.unit} | {row.note} |")
    widest = max((s.spread for row in rows for s in row.samples.values()), default=0.0)
    return "\n".join([*lines, "", f"Largest spread (half the quartiles' distance): {widest:.0%}."])


def write_json(path: Path, groups: dict[str, list[Row]]) -> None:
    """Everything that was measured."""
    found = {name: [row.as_json() for row in rows] for name, rows in groups.items()}
    path.write_text(json.dumps({"machine": machine(), "groups": found}, indent=1) + "\n")
