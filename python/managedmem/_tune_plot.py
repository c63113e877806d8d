"""The picture of a result of tune(): the gain of each change, as a part of a run."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from typing import Any

from managedmem import _colours as colours
from managedmem._extras import need
from managedmem._tune_values import COUNTS, KEPT, TuneTrial, TuneValues, interval_of

MOST_ROWS = 20
LABEL_WIDTH, LABEL_LINES = 48, 3
LOWEST = -100.0
"""In percent: the bar of a slower change ends here, and has its number as text."""
ROW = 0.6
"""The height of the bars of a change together."""
WON, LOST = colours.BLUE, colours.ORANGE

Row = tuple[str, Sequence[Sequence[tuple[float, float]]], bool]
"""The label of a change, the pairs of each of its bars, and True if it was kept."""


def bars_of(measured: TuneValues | TuneTrial) -> Sequence[Sequence[tuple[float, float]]]:
    """The pairs of each bar: of seconds, or of bytes and of faults if these decided."""
    if measured.counts is None:
        return [measured.pairs]
    return [[pair] for pair in measured.counts.values()]


def rows_of(result: TuneValues) -> list[Row]:
    """A row for each change: kept ones first, all together last."""
    tried = [trial for trial in result.trials if trial.pairs]
    tried.sort(key=lambda trial: trial.verdict != KEPT)
    rows: list[Row] = [(t.change, bars_of(t), t.verdict == KEPT) for t in tried[:MOST_ROWS]]
    if result._names():
        rows.append(("all kept changes", bars_of(result), True))
    return rows


def draw_row(axes: Any, place: int, row: Row) -> None:
    """Draw the bars of a row."""
    _, bars, kept = row
    height = ROW / len(bars)
    for number, pairs in enumerate(bars):
        at = place + (number + 0.5) * height - ROW / 2
        draw_bar(axes, at, height, pairs, WON if kept else LOST)


def draw_bar(
    axes: Any, place: float, height: float, pairs: Sequence[tuple[float, float]], colour: str
) -> None:
    """Draw a bar with its interval and its pairs."""
    from managedmem._plots import ink

    usual = statistics.median(first for first, _ in pairs) or 1.0
    gains = [100 * (first - second) / usual for first, second in pairs]
    bounds = interval_of(gains)
    axes.barh(place, max(bounds.median, LOWEST), height=height, color=colour)
    if bounds.median < LOWEST:
        axes.text(LOWEST + 2, place, f"{bounds.median:.0f} %", va="center", color=colours.BLACK)
        return
    low, high = max(bounds.low, LOWEST), max(bounds.high, LOWEST)
    axes.plot([low, high], [place, place], color=ink(axes), linewidth=1.5)
    shown = [gain for gain in gains if gain >= LOWEST]
    axes.plot(shown, [place] * len(shown), ".", color=ink(axes), markersize=4)


def draw(result: TuneValues, axes: Any) -> Any:
    """Draw on the Axes, or on new ones, and return them."""
    need("matplotlib", "plot()")
    from managedmem._plots import PLAIN, SMALL, axes_for, ink, legend_below, patch

    rows = rows_of(result)
    axes = axes_for(axes, 1.8 + 0.42 * max(len(rows), 1))
    for place, row in enumerate(rows):
        draw_row(axes, place, row)
    labels = [
        textwrap.fill(row[0], LABEL_WIDTH, max_lines=LABEL_LINES, placeholder=" ...")
        for row in rows
    ]
    axes.set_yticks(range(len(rows)), labels, **SMALL, **PLAIN)
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    noise = 100 * result.noise
    axes.axvspan(-noise, noise, color=colours.LIGHT, zorder=0, linewidth=0)
    axes.axvline(0, color=ink(axes), linewidth=0.8)
    title = f"tune(): {result.speedup:.2f} x as fast"
    label = "time that a run saves, % (bars: medians; dots: pairs of runs)"
    if result.counts is not None:
        title = f"tune(), judged by {COUNTS}"
        label = "bytes (upper bars) and faults (lower bars) that a run saves, %"
    axes.set_xlabel(label)
    axes.set_title(title if result._names() else "tune(): nothing was proved")
    legend_below(axes, [patch(WON, "kept"), patch(LOST, "not kept"), patch(colours.LIGHT, "noise")])
    return axes
