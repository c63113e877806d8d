"""Measuring a group: stderr says each row when it is done, and a failure ends only its group."""

from __future__ import annotations

import sys
import time
import traceback
from typing import Any

from .measure import UNFINISHED, Row, need_room, reason
from .report import Group, Report


def say(text: str) -> None:
    """A line on stderr, at once: the output may go to a file, and the run may be killed."""
    print(text, file=sys.stderr, flush=True)


def rows_of(name: str, group: Group, options: dict[str, Any]) -> list[Row]:
    """The rows of a group. If it fails: the rows before the failure, and one with the reason."""
    rows: list[Row] = []
    start = before = time.monotonic()
    say(f"{name}: {group.title}")
    try:
        need_room(group.need)
        for row in group.measure(**options):
            now = time.monotonic()
            say(f"  {row.operation}: {now - before:.1f} s")
            rows.append(row)
            before = now
    except Exception as error:
        traceback.print_exc()
        rows.append(Row(UNFINISHED, {}, note=reason(error)))
    say(f"{name}: {time.monotonic() - start:.0f} s in all")
    return rows


def broken(results: Report) -> list[str]:
    """What could not be measured and should have been, a line for each row."""
    return [
        f"{name}: {row.operation}: {', '.join(row.failed) or row.note}"
        for name, rows in results.groups.items()
        for row in rows
        if row.broken
    ]
