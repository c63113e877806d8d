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
MOST_LABEL = 44
WON, OTHER, DOTS = "#0072b2", "#e69f00", "#7f7f7f"
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


def draw(result: TuneResult, ax: Any) -> Any:
    """Draw on the Axes, or on new ones, and return them."""
    rows = rows_of(result)
    if ax is None:
        pyplot = need("matplotlib.pyplot", "plot()")
        _, ax = pyplot.subplots(figsize=(9, 1.2 + 0.5 * max(len(rows), 1)), layout="constrained")
    for place, (_, pairs, kept) in enumerate(rows):
        usual = statistics.median(first for first, _ in pairs) or 1.0
        gains = [100 * (first - second) / usual for first, second in pairs]
        bounds = interval_of(gains)
        colour = WON if kept else OTHER
        ax.barh(place, bounds.median, height=0.6, color=colour, alpha=0.8)
        ax.plot([bounds.low, bounds.high], [place, place], color="black", linewidth=1.5)
        ax.plot(gains, [place] * len(gains), ".", color=DOTS, markersize=5)
    ax.set_yticks(range(len(rows)), [textwrap.shorten(r[0], MOST_LABEL) for r in rows])
    ax.invert_yaxis()
    ax.axvline(0, color="black", linewidth=0.8)
    noise = 100 * result.noise
    ax.axvspan(-noise, noise, color=DOTS, alpha=0.2, linewidth=0)
    ax.set_xlabel("time that a run saves, % (dots: pairs of runs; grey: noise)")
    ax.set_title(f"tune(): {result.speedup:.2f} x as fast" if result.pairs else "tune(): no gain")
    return ax
