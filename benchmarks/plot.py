"""Draws results: language models as bars, calls and jobs with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import bars
from .measure import Row
from .report import Report, columns_of

LINES = ("plain, call", "plain, end", "auto, call", "auto, end")
BYTES = {"KiB": 1 << 10}
LABEL: dict[str, Any] = {"xytext": (8, -3), "textcoords": "offset points", "fontsize": "small"}


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


def dots(axes: Any, rows: list[Row]) -> None:
    """A dot for each method of each job, job by job."""
    names = columns_of(rows)
    colors = {name: f"C{i}" for i, name in enumerate(names)}
    at, ticks = 0, []
    for row in rows:
        done = [(name, row.results[name]) for name in names if name in row.results]
        ticks.append(at + (len(done) - 1) / 2)
        for name, result in done:
            middle = result.median / 1e6
            axes.errorbar(middle, at, xerr=result.spread * middle, fmt="o", color=colors[name])
            axes.annotate(name, (middle, at), **LABEL)
            at += 1
        at += 1
    axes.set_yticks(ticks, [row.operation for row in rows])
    axes.set(xlabel="ms", xscale="log", title="whole jobs, 256 MiB")
    axes.margins(x=0.15)
    axes.grid(axis="x", alpha=0.3)
    axes.invert_yaxis()


def draw(results: Report, path: Path) -> None:
    """Language models; or deferring as lines, and jobs as dots below them."""
    if results.groups.get("language"):
        path.write_text(bars.picture(results), encoding="utf-8")
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
    mosaic = [["device", "host"]] * bool(deferring) + [["jobs", "jobs"]] * bool(jobs)
    if not mosaic:
        raise SystemExit("benchmarks: --plot draws language, deferring and jobs; none is there")
    figure = Figure(figsize=(10, 4.5 * len(mosaic)), layout="constrained")
    places: dict[str, Any] = figure.subplot_mosaic(mosaic)
    for name, axes in places.items():
        if name == "jobs":
            dots(axes, jobs)
        else:
            lines(axes, deferring, name)
    figure.suptitle(f"{results.machine['gpu']}, {results.machine['date']}")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "managedmem"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    print(f"written: {path}")
