"""Results as pictures, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .measure import Row
from .report import Report, columns_of

LINES = ("plain, call", "plain, end", "auto, call", "auto, end")
BYTES = {"KiB": 1 << 10}


def size_of(row: Row) -> int:
    """The bytes in the title of a row of the group "deferring"."""
    words = row.operation.split()
    return int(words[1]) * BYTES[words[2]]


def lines(axes: Any, rows: list[Row], where: str) -> None:
    """Thread time and end time by size, for one direction."""
    rows = sorted((r for r in rows if r.operation.endswith(where)), key=size_of)
    for name in LINES:
        found = [(size_of(r), r.results[name].median / 1e3) for r in rows if name in r.results]
        style = "--" if name.endswith("end") else "-"
        axes.plot(*zip(*found, strict=True), style, marker="o", markersize=3, label=name)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="us", title=f"prefetch to {where}")
    axes.axhline(20, color="grey", linewidth=0.5)
    axes.legend()


def bars(axes: Any, rows: list[Row]) -> None:
    """A bar for each way to do each job."""
    names = columns_of(rows)
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        found = [(at, r.results[name]) for at, r in enumerate(rows) if name in r.results]
        axes.barh(
            [at + i * height for at, _ in found],
            [result.median / 1e6 for _, result in found],
            height,
            xerr=[result.spread * result.median / 1e6 for _, result in found],
            label=name,
        )
    middle = 0.4 - height / 2
    axes.set_yticks([at + middle for at in range(len(rows))], [row.operation for row in rows])
    axes.set(xlabel="ms", title="whole jobs, 256 MiB")
    axes.invert_yaxis()
    axes.legend()


def draw(results: Report, path: Path) -> None:
    """Deferring as lines, jobs as bars: whichever of them was measured."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(
            f"benchmarks: --plot needs matplotlib (pip install matplotlib): {error}"
        ) from error
    deferring, jobs = results.groups.get("deferring", []), results.groups.get("jobs", [])
    drawings = [(lines, deferring, where) for where in ("device", "host") if deferring]
    count = len(drawings) + bool(jobs)
    if not count:
        raise SystemExit("benchmarks: --plot draws the groups deferring and jobs; neither is there")
    figure = Figure(figsize=(7 * count, 5), layout="constrained")
    places = list(figure.subplots(1, count, squeeze=False)[0])
    for axes, (draw_lines, rows, where) in zip(places, drawings, strict=False):
        draw_lines(axes, rows, where)
    if jobs:
        bars(places[-1], jobs)
    figure.suptitle(f"{results.machine['gpu']}, {results.machine['date']}")
    figure.savefig(path)
    print(f"written: {path}")
