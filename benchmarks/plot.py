"""Draws results in a column that is readable on a telephone: calls and jobs with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .bars import picture
from .measure import Row
from .report import Report

LINES = ("plain, call", "plain, end", "auto, call", "auto, end")
BYTES = {"KiB": 1 << 10}
OTHERS = ("page faults", "pinned copy")  # methods without this library


def size_of(row: Row) -> int:
    """The bytes in the title of a row of the group "deferring"."""
    words = row.operation.split()
    return int(words[1]) * BYTES[words[2]]


def lines(axes: Any, rows: list[Row], side: str) -> None:
    """Thread time and end time by size, for one direction."""
    rows = sorted((r for r in rows if r.operation.endswith(side)), key=size_of)
    for name in LINES:
        found = [(size_of(r), r.results[name].median / 1e3) for r in rows if name in r.results]
        style = "--" if name.endswith("end") else "-"
        axes.plot(*zip(*found, strict=True), style, marker="o", markersize=3, label=name)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="us", title=f"prefetch to {side}")
    axes.axhline(20, color="grey", linewidth=0.5)
    axes.legend()


def bars(axes: Any, rows: list[Row]) -> None:
    """A bar for each method of each job, as a part of the slowest one, job by job."""
    at = 0
    for row in rows:
        slowest = max(result.median for result in row.results.values())
        axes.text(0, at, row.operation, weight="bold", va="center")
        for name, result in row.results.items():
            at += 1
            length = result.median / slowest
            axes.barh(at, length, color="#8c8c8c" if name in OTHERS else "#0072b2")
            axes.text(length + 0.03, at, f"{result.median / 1e6:.3g} ms  {name}", va="center")
        at += 2
    axes.set(xlim=(0, 2.2), title="Jobs over 256 MiB, with managedmem in blue")
    axes.invert_yaxis()
    axes.set_axis_off()


def draw(results: Report, path: Path) -> None:
    """Draw language models; or else deferring as lines, with jobs as bars below."""
    if results.groups.get("language"):
        path.write_text(picture(results), encoding="utf-8")
        print(f"written: {path}")
        return
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(
            f"benchmarks: --plot needs matplotlib (pip install matplotlib): {error}"
        ) from error
    deferring, jobs = results.groups.get("deferring", []), results.groups.get("jobs", [])
    heights = [3.0, 3.0] * bool(deferring) + [0.3 * (5 * len(jobs) + 1)] * bool(jobs)
    if not heights:
        raise SystemExit("benchmarks: --plot draws language, deferring and jobs; none is there")
    figure = Figure(figsize=(4.4, sum(heights)), layout="constrained")
    column = figure.subplots(len(heights), height_ratios=heights, squeeze=False)[:, 0]
    if deferring:
        lines(column[0], deferring, "device")
        lines(column[1], deferring, "host")
    if jobs:
        bars(column[-1], jobs)
    figure.suptitle(f"{results.machine['gpu']}, {results.machine['date']}", fontsize="medium")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "managedmem"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    print(f"written: {path}")
