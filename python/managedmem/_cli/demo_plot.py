"""The timings of the demo, and their picture: the bars of the terminal, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from managedmem import Device, Host
from managedmem import _colours as colours

COLOURS = (colours.ORANGE, colours.BLUE)
"""Without and with the prefetch."""


class Timing(NamedTuple):
    """A variant of the job, its time, the counts of the emulated driver, and its page faults."""

    variant: str
    seconds: float
    counted: str
    faults: int | None
    """Faults of the processor that works; None where nothing counts them."""


def draw_bars(axes: Any, names: Sequence[str], values: Sequence[float], form: str) -> None:
    """Draw horizontal bars, each with its number, the first one on top."""
    bars = axes.barh(names, values, color=COLOURS[: len(names)])
    axes.bar_label(bars, labels=[form.format(value) for value in values], padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.spines[["top", "right"]].set_visible(False)


def draw(path: str, timings: Sequence[Timing], work: Device | Host, emulated: bool) -> None:
    """Write the picture to a file, in the format that its name says.

    The emulated driver counts faults, and its times mean nothing: they are left out.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [each.variant for each in timings]
    counts = [each.faults for each in timings if each.faults is not None]
    counted = len(counts) == len(timings)
    rows = counted + (not emulated)
    figure = Figure(figsize=(8, 1.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, squeeze=False)[:, 0]
    if counted:
        draw_bars(panels[0], names, counts, "{:,.0f} faults")
        panels[0].set_title(f"page faults of {work}", loc="left")
    if not emulated:
        draw_bars(panels[-1], names, [each.seconds * 1e3 for each in timings], "{:.2f} ms")
        panels[-1].set_title("milliseconds", loc="left")
    figure.savefig(path, dpi=150)
