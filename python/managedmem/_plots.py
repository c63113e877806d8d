"""The pictures of traces and residencies, drawn with matplotlib.

Each function returns the Axes and shows nothing: notebooks show the figures of a cell themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from managedmem import _colours as colours
from managedmem import _page_history as history
from managedmem import _trace_grid as grid
from managedmem._extras import need
from managedmem._managedmem import Device, Host
from managedmem._strips import Columns, styles_of
from managedmem._units import size_text, time_text

if TYPE_CHECKING:
    from managedmem._trace_view import TraceView

WIDTH = 8.0
"""Inches: the width of a notebook."""
HALF = 0.34
"""The most that bars take of a lane on each side of its middle."""
EDGE, TICK = 0.45, 0.08
"""Ticks of faults end at EDGE from the middle of a lane, and are TICK long."""
HATCH = "/////"
"""The hatch of hints in a strip."""
STRIP = 512
"""The number of columns of a strip of memory."""
LEAST = 0.12
"""A column with moves has at least this part of the full height, to be seen."""
PAD = 16
"""Points between an axis and its title if labels of marks lie between the two."""
PLAIN: dict[str, Any] = {"parse_math": False, "usetex": False}
"""Labels from users are not formulas."""
SMALL: dict[str, Any] = {"fontsize": 8}

MOVES = {
    grid.TO_DEVICE: (colours.TO_DEVICE, "to a device, requested"),
    grid.TO_DEVICE_BY_FAULT: (colours.TO_DEVICE_BY_FAULT, "to a device, by faults"),
    grid.BETWEEN_DEVICES: (colours.BETWEEN_DEVICES, "between devices"),
    grid.TO_HOST: (colours.TO_HOST, "to the host, requested"),
    grid.TO_HOST_BY_FAULT: (colours.TO_HOST_BY_FAULT, "to the host, by faults"),
    grid.EVICTED: (colours.EVICTED, "to the host, evicted"),
    grid.VIEWED: (colours.VIEWED, "to the host, by numpy()"),
}
UPWARDS = (grid.TO_DEVICE, grid.TO_DEVICE_BY_FAULT, grid.BETWEEN_DEVICES)
DOWNWARDS = (grid.TO_HOST, grid.TO_HOST_BY_FAULT, grid.EVICTED, grid.VIEWED)
POINTS: dict[int, tuple[str, dict[str, Any]]] = {
    grid.CALLS: (
        "call of prefetch, advise, ...",
        {"marker": "v", "markersize": 5, "markeredgewidth": 0},
    ),
    grid.REMOTE: (
        "mapped remotely",
        {"marker": "D", "color": colours.GREY, "markersize": 4, "markeredgewidth": 0},
    ),
    grid.CONTESTED: (
        "thrashing",
        {"marker": "x", "markersize": 4},
    ),
}


def axes_for(axes: Any, height: float) -> Any:
    """The given Axes, or new ones."""
    if axes is not None:
        if not hasattr(axes, "set_xlim"):
            raise TypeError(f"ax must be one matplotlib Axes, got {type(axes).__name__}")
        return axes
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(WIDTH, height), layout="constrained")[1]


def legend_below(axes: Any, handles: Sequence[Any], columns: int = 3) -> None:
    """A legend below the axis, where it hides nothing."""
    from matplotlib.transforms import ScaledTranslation

    if not handles:
        return
    below = axes.transAxes + ScaledTranslation(0, -0.45, axes.figure.dpi_scale_trans)
    axes.legend(
        handles=handles,
        loc="upper right",
        bbox_to_anchor=(1, 0),
        bbox_transform=below,
        ncols=columns,
        frameon=False,
        borderaxespad=0,
        handlelength=1.2,
        **SMALL,
    )


def ink(axes: Any) -> Any:
    """The colour of the axes themselves: black, or white in a dark style."""
    return axes.spines["left"].get_edgecolor()


def patch(colour: str, label: str, hatch: str | None = None) -> Any:
    """A rectangle of a colour for a legend."""
    from matplotlib.patches import Patch

    edge = "white" if hatch else "none"
    return Patch(facecolor=colour, edgecolor=edge, linewidth=0, hatch=hatch, label=label)


def time_unit(nanoseconds: float) -> tuple[float, str]:
    """A unit in which a length of time has few digits, as nanoseconds and by name."""
    for unit, name in ((1e9, "s"), (1e6, "ms")):
        if nanoseconds >= 2 * unit:
            return unit, name
    return 1e3, "us"


def title(axes: Any, text: str, part: TraceView, has_marks: bool = False) -> None:
    """A title, which says so if results are missing."""
    if not part.complete:
        text += " (INCOMPLETE)"
    elif part.truncated:
        text += " (first events only: limit=)"
    axes.set_title(text, loc="left", fontsize=10, pad=PAD if has_marks else 6, **PLAIN)


def marks(axes: Any, labels: Sequence[tuple[float, str]], unit: float) -> None:
    """Dotted lines at marks, with the labels that have room above the axis."""
    low, high = axes.get_xlim()
    inches = WIDTH * 0.75 / max(high - low, 1e-30)
    free = drawn = float("-inf")
    for time, label in labels:
        at = time / unit
        if at - drawn < (high - low) / grid.COLUMNS:
            continue
        axes.axvline(at, color=ink(axes), linewidth=0.8, linestyle=":", zorder=4)
        drawn = at
        shown = grid.short_label(label, 16)
        width = 0.065 * len(shown) / inches
        if at - width >= free:
            axes.annotate(
                shown,
                (at, 1),
                (-2, 2),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="right",
                va="bottom",
                annotation_clip=False,
                fontsize=7,
                **PLAIN,
            )
            free = at


# --- timeline ---------------------------------------------------------------------------------


def stacked(line: grid.Timeline, lane: int, kinds: Sequence[int], full: float) -> Iterator[Any]:
    """The bars of a lane on one side of its middle: the kind of each, and its two ends."""
    heights = line.moved[lane, list(kinds)] / full
    total = heights.sum(axis=0)
    factor = (total**0.5).clip(min=LEAST) / total.clip(min=1e-300)
    below = 0.0 * total
    for kind, height in zip(kinds, heights, strict=True):
        above = below + height * factor
        if height.any():
            yield kind, below, above
        below = above


def bars(axes: Any, line: grid.Timeline, edges: Any) -> tuple[list[int], float]:
    """Draw the moves; return the kinds that occur, and the bytes that have the full height."""
    sides = (line.moved[:, list(kinds)].sum(axis=1) for kinds in (UPWARDS, DOWNWARDS))
    full = max(float(side.max(initial=0)) for side in sides)
    from matplotlib.patches import StepPatch

    seen = set()
    for lane in range(len(line.lanes)):
        for kinds, sign in ((UPWARDS, -HALF), (DOWNWARDS, HALF)):
            for kind, low, high in stacked(line, lane, kinds, full or 1.0):
                # Unlike stairs(), this does not compute the limits of the axes, which takes long.
                axes.add_artist(
                    StepPatch(
                        lane + sign * high,
                        edges,
                        baseline=lane + sign * low,
                        fill=True,
                        color=MOVES[kind][0],
                        linewidth=0,
                        zorder=3,
                        label=MOVES[kind][1],
                    )
                )
                seen.add(kind)
    return sorted(seen), full


def fault_ticks(axes: Any, line: grid.Timeline, centres: Any) -> list[Any]:
    """Draw the faults as ticks at the edges of the lanes, darker where they are many."""
    import numpy as np
    from matplotlib.collections import LineCollection
    from matplotlib.lines import Line2D

    counts = line.counted[:, [grid.DEVICE_FAULTS, grid.HOST_FAULTS]]
    most = np.log1p(counts.max(initial=0))
    lanes, side, column = counts.nonzero()
    if not len(lanes):
        return []
    sign = np.where(side == 0, -1, 1)
    outer, inner = lanes + sign * EDGE, lanes + sign * (EDGE - TICK)
    at = centres[column]
    alpha = 0.2 + 0.6 * np.log1p(counts[lanes, side, column]) / most
    shades = np.column_stack([np.tile(ink(axes)[:3], (len(at), 1)), alpha])
    segments: Any = np.stack([np.column_stack([at, outer]), np.column_stack([at, inner])], axis=1)
    axes.add_collection(LineCollection(segments, colors=shades, linewidths=1.0, zorder=3))
    label = "page faults (top: device, bottom: host)"
    return [Line2D([], [], color=ink(axes), marker="|", linestyle="none", label=label)]


def points(axes: Any, line: grid.Timeline, centres: Any) -> list[Any]:
    """Draw the other events as points on the lanes."""
    handles = []
    for kind, (label, style) in POINTS.items():
        lanes, column = line.counted[:, kind].nonzero()
        if len(lanes):
            shift = -EDGE + TICK / 2 if kind == grid.CALLS else 0
            common = {"color": ink(axes), "linestyle": "none", "zorder": 5, "clip_on": False}
            handles += axes.plot(centres[column], lanes + shift, label=label, **{**common, **style})
    return handles


def timeline(part: TraceView, axes: Any) -> Any:
    """Draw the timeline of a trace or a slice."""
    need("matplotlib", "plot()")
    line = grid.timeline_of(part)
    lanes = max(len(line.lanes), 1)
    axes = axes_for(axes, 1.5 + 0.36 * lanes if lanes > 1 else 2.2)
    unit, name = time_unit(line.edges[-1])
    edges = line.edges / unit
    centres = (edges[1:] + edges[:-1]) / 2
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(lanes - 0.5, -0.5)
    kinds, full = bars(axes, line, edges)
    handles = [patch(*MOVES[kind]) for kind in kinds]
    handles += points(axes, line, centres) + fault_ticks(axes, line, centres)
    for lane in range(len(line.lanes)):
        axes.axhline(lane, color=colours.GREY, linewidth=0.5, zorder=2)
        if lane:
            axes.axhline(lane - 0.5, color=colours.PALE, linewidth=0.8, zorder=1)
    axes.set_yticks(range(len(line.lanes)), [lane.label for lane in line.lanes], **SMALL, **PLAIN)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel(f"time from the start of the {kind_of(part)} ({name})", **SMALL)
    marks(axes, line.marks, unit)
    title(axes, f"{name_of(part)}: moves", part, bool(line.marks))
    if full:
        highest = f"{size_text(round(full))} in {time_text(line.edges[1] / 1e9)}"
        note = f"height: square root of bytes, up to {highest}"
        axes.set_title(note, loc="right", fontsize=7, pad=PAD if line.marks else 6)
    nothing(axes, bool(line.lanes), "nothing moved")
    legend_below(axes, handles)
    return axes


def name_of(part: TraceView) -> str:
    """The words for a trace or a slice at the beginning of a title."""
    emulated = ", emulated driver" if part.source == "emulator" else ""
    return f"{part._title()} of {time_text(part.duration)}{emulated}"


def kind_of(part: TraceView) -> str:
    """The word for a trace or a slice."""
    return part._title().split()[0]


def nothing(axes: Any, something: bool, text: str) -> None:
    """Say in the middle of an empty picture that it is empty."""
    if not something:
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center")


# --- places of pages --------------------------------------------------------------------------


def place_styles(ordinals: Sequence[int]) -> list[tuple[str, str]]:
    """Colours and names by place."""
    styles = [
        ("none", "not allocated"),
        (colours.UNKNOWN, "unknown"),
        (colours.HOST, "on the host"),
        (colours.COPIES, "copies on several"),
        (colours.MIXED, "mixed, or to and fro"),
    ]
    names = history.device_names(ordinals)
    shades = [colours.DEVICES[i % len(colours.DEVICES)] for i in range(len(names))]
    return styles + list(zip(shades, names, strict=True))


def size_axis(axis: Any, nbytes: int) -> None:
    """Ticks of an axis of bytes at round binary sizes."""
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    step = 1
    while nbytes > 5 * step:
        step *= 2
    axis.set_major_locator(MultipleLocator(step))
    axis.set_major_formatter(FuncFormatter(lambda value, _: size_text(abs(round(value)))))


def image(
    axes: Any, cells: Any, extent: tuple[float, ...], styles: Sequence[tuple[str, str]]
) -> None:
    """Draw cells of places, and a legend of those that occur."""
    import numpy as np
    from matplotlib.colors import ListedColormap

    axes.imshow(
        cells,
        cmap=ListedColormap([colour for colour, _ in styles]),
        vmin=-0.5,
        vmax=len(styles) - 0.5,
        extent=extent,
        aspect="auto",
        interpolation="nearest",
    )
    seen = [int(place) for place in np.unique(cells) if place != history.NO_MEMORY]
    order = sorted(seen, key=lambda place: (place != history.HOST, place < history.DEVICE, place))
    legend_below(axes, [patch(*styles[place]) for place in order], columns=4)


def pages(part: TraceView, target: Any, axes: Any) -> Any:
    """Draw the places of the pages of a memory over time."""
    need("matplotlib", "plot_pages()")
    drawn = history.History(part, target)
    places = history.grid_of(drawn)
    axes = axes_for(axes, 4.0)
    length = max(drawn.window[1] - drawn.window[0], 1)
    unit, name = time_unit(length)
    nbytes = max(places.nbytes, 1)
    image(axes, places.cells, (0, length / unit, nbytes, 0), place_styles(places.ordinals))
    size_axis(axes.yaxis, nbytes)
    border = 0
    for low, high in places.runs[:-1]:
        border += high - low
        axes.axhline(border, color="white", linewidth=1)
    axes.set_ylabel("offset in the memory", **SMALL)
    axes.set_xlabel(f"time from the start of the {kind_of(part)} ({name})", **SMALL)
    axes.tick_params(labelsize=8)
    labels = part._whole()._labels
    ends = part._results().parts
    times = [
        (float(ends[p][1] - drawn.window[0]), labels[p]) for p in part._parts() if p < len(labels)
    ]
    marks(axes, times, unit)
    label = grid.short_label(drawn.label, 40)
    title(axes, f"{label}, {size_text(places.nbytes)}: places of its pages", part, bool(times))
    return axes


# --- causes -----------------------------------------------------------------------------------


def label_sizes(axes: Any, ends: Sequence[tuple[int, int]]) -> None:
    """Write the bytes at both ends of the bars of each lane."""
    for lane, (left, right) in enumerate(ends):
        for at, align, shift in ((left, "right", -3), (right, "left", 3)):
            if at:
                axes.annotate(
                    size_text(abs(at)),
                    (at, lane),
                    (shift, 0),
                    textcoords="offset points",
                    ha=align,
                    va="center",
                    fontsize=7,
                )


def causes(part: TraceView, axes: Any) -> Any:
    """Draw the bytes of each memory by cause, to the host leftwards and to devices rightwards."""
    need("matplotlib", "plot_causes()")
    lanes = [lane for lane in grid.lanes_of(part) if lane.sums.moved]
    axes = axes_for(axes, 1.6 + 0.32 * max(len(lanes), 1))
    ends = [(0, 0)] * len(lanes)
    handles = []
    for cause, colour in colours.CAUSES.items():
        moved = [lane.sums.by_cause[cause] for lane in lanes]
        if not any(map(sum, moved)):
            continue
        out = [there + across for there, _, across in moved]
        back = [home for _, home, _ in moved]
        style = {"height": 0.7, "color": colour, "edgecolor": "white", "linewidth": 0.5}
        axes.barh(range(len(lanes)), out, left=[end[1] for end in ends], **style)
        axes.barh(range(len(lanes)), [-n for n in back], left=[end[0] for end in ends], **style)
        ends = [(low - n, high + m) for (low, high), n, m in zip(ends, back, out, strict=True)]
        handles.append(patch(colour, cause.replace("_", " ")))
    left = max((-low for low, _ in ends), default=0)
    right = max((high for _, high in ends), default=0)
    label_sizes(axes, ends)
    room = 0.07 * (left + right + max(left, right, 1))  # for the sizes
    axes.set_xlim(-left - room, right + room)
    size_axis(axes.xaxis, left + right)
    axes.axvline(0, color=ink(axes), linewidth=0.8)
    axes.set_ylim(max(len(lanes), 1) - 0.5, -0.5)
    axes.set_yticks(range(len(lanes)), [lane.label for lane in lanes], **SMALL, **PLAIN)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("\u2190 to the host     bytes moved     to devices \u2192", **SMALL)
    title(axes, f"{name_of(part)}: bytes by cause", part)
    nothing(axes, bool(lanes), "nothing moved")
    legend_below(axes, handles, columns=6)
    return axes


# --- residency --------------------------------------------------------------------------------


def strip(
    columns: Columns[str],
    hints: Mapping[Device | Host, Sequence[tuple[int, int]]],
    nbytes: int,
    text: str,
    axes: Any,
) -> Any:
    """Draw where the memory is, and where bytes that are not on the host were last prefetched to.

    Hints are offsets and sizes in bytes, by the destination of the prefetch.
    """
    need("matplotlib", "plot()")
    axes = axes_for(axes, 1.7)
    nbytes = max(nbytes, 1)
    handles = []
    for where, style in styles_of(columns).items():
        spans = [
            (at * nbytes / STRIP, count * nbytes / STRIP)
            for at, count, kind in columns
            if kind == where
        ]
        if spans:
            axes.broken_barh(spans, (-0.4, 0.8), facecolors=style.colour, linewidth=0)
            handles.append(patch(style.colour, style.name))
    ordinals = sorted(to.device_id for to in hints if isinstance(to, Device))
    for to, asked in sorted(hints.items(), key=lambda each: str(each[0])):
        shade = colours.HOST
        if isinstance(to, Device):
            shade = colours.DEVICES[ordinals.index(to.device_id) % 5]
        axes.broken_barh(
            asked, (0.6, 0.4), facecolors=shade, hatch=HATCH, edgecolor="white", linewidth=0
        )
        handles.append(patch(shade, f"last prefetched to {to}", HATCH))
    axes.set_xlim(0, nbytes)
    axes.set_ylim(1.1 if hints else 0.5, -0.5)
    labels = {0.0: "place", 0.8: "last prefetch"} if hints else {0.0: "place"}
    axes.set_yticks(list(labels), list(labels.values()), **SMALL)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    size_axis(axes.xaxis, nbytes)
    axes.set_xlabel("offset in the memory", **SMALL)
    axes.set_title(text, loc="left", fontsize=10)
    legend_below(axes, handles, columns=4)
    return axes
