"""The picture of a result of tune(): the gain of each change, as a part of a run."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from managedmem._extras import need
from managedmem._tune_report import KEPT
from managedmem._tune_search import interval_of

if TYPE_CHECKING:
    from managedmem._tune_report import TuneResult

MOST_ROWS = 20
LABEL_WIDTH, LABEL_LINES = 40, 2
LOWEST = -100.0
"""In percent; what is slower ends here, with its number."""
WON, LOST, DOTS = "#0072b2", "#e69f00", "#404040"
"""Two colours that colour-blind people can distinguish, and grey."""

Row = tuple[str, Sequence[tuple[float, float]], bool]


def rows_of(result: TuneResult) -> list[Row]:
    """A label, the pairs and whether it was kept: kept changes first, all together last."""
    tried = [trial for trial in result.trials if trial.pairs]
    tried.sort(key=lambda trial: trial.verdict != KEPT)
    rows: list[Row] = [(t.change, t.pairs, t.verdict == KEPT) for t in tried[:MOST_ROWS]]
    if result.pairs:
        rows.append(("all kept changes", result.pairs, True))
    return rows


def draw_row(ax: Any, place: int, row: Row) -> None:
    """Draw a bar with its interval and its pairs."""
    _, pairs, kept = row
    usual = statistics.median(first for first, _ in pairs) or 1.0
    gains = [100 * (first - second) / usual for first, second in pairs]
    bounds = interval_of(gains)
    ax.barh(place, max(bounds.median, LOWEST), height=0.6, color=WON if kept else LOST)
    if bounds.median < LOWEST:
        ax.text(LOWEST + 2, place, f"{bounds.median:.0f} %", va="center")
        return
    low, high = max(bounds.low, LOWEST), max(bounds.high, LOWEST)
    ax.plot([low, high], [place, place], color="black", linewidth=1.5)
    shown = [gain for gain in gains if gain >= LOWEST]
    ax.plot(shown, [place] * len(shown), ".", color=DOTS, markersize=5)


def draw(result: TuneResult, ax: Any) -> Any:
    """Draw on the Axes, or on new ones, and return them."""
    rows = rows_of(result)
    if ax is None:
        pyplot = need("matplotlib.pyplot", "plot()")
        _, ax = pyplot.subplots(figsize=(9, 1.4 + 0.45 * max(len(rows), 1)), layout="constrained")
    for place, row in enumerate(rows):
        draw_row(ax, place, row)
    labels = [
        textwrap.fill(row[0], LABEL_WIDTH, max_lines=LABEL_LINES, placeholder=" ...")
        for row in rows
    ]
    ax.set_yticks(range(len(rows)), labels)
    ax.invert_yaxis()
    noise = 100 * result.noise
    ax.axvspan(-noise, noise, color="0.8", zorder=0, linewidth=0, label="noise")
    ax.axvline(0, color="black", linewidth=0.8)
    ax.barh(0, 0, color=WON, label="kept")
    ax.barh(0, 0, color=LOST, label="not kept")
    ax.legend(loc="best")
    ax.set_xlabel("time that a run saves, % (bars: medians; dots: pairs of runs)")
    ax.set_title(
        f"tune(): {result.speedup:.2f} x as fast" if result.pairs else "tune(): nothing was proved"
    )
    return ax
