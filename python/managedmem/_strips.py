"""Strips of memory from its first byte to its last: runs as columns and as SVG, and their looks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from html import escape
from typing import NamedTuple, TypeVar

from managedmem import _colours as colours

MIXED = "mixed"
"""The kind of a column that has several kinds."""
COLUMNS = 256
_ALL = 1 - 1e-6

Kind = TypeVar("Kind", bound=Hashable)
Columns = list[tuple[int, int, Kind]]
"""First column, number of columns, and their kind."""


class Style(NamedTuple):
    """The looks of a place in pictures: colour, sign in a terminal, and name."""

    colour: str
    sign: str
    name: str


STYLES = {
    "host": Style(colours.HOST, "#", "on the host"),
    "not on host": Style(colours.UNKNOWN, ".", "not on the host"),
    "nowhere": Style(colours.PALE, "_", "nowhere"),
    MIXED: Style(colours.MIXED, "+", "mixed"),
}
"""The looks of all places except devices."""


def styles_of(columns: Columns[str]) -> dict[str, Style]:
    """The looks of the places of a strip, with devices such as "Device(0)" after the host."""
    seen = {where for _, _, where in columns}
    host = {"host": STYLES["host"]}
    devices = {
        f"Device({n})": Style(colours.DEVICES[n % 5], str(n % 10), f"on Device({n})")
        for n in sorted(int(where[7:-1]) for where in seen - STYLES.keys())
    }
    return {where: style for where, style in (host | devices | STYLES).items() if where in seen}


def fold(
    runs: Iterable[tuple[int, int, Kind]], nbytes: int, mixed: Kind, columns: int = COLUMNS
) -> Columns[Kind]:
    """The columns of runs, each of which is an offset, a number of bytes and a kind."""
    parts: dict[Kind, list[float]] = {}
    scale = columns / nbytes if nbytes else 0.0
    for offset, size, kind in runs:
        if kind not in parts:
            parts[kind] = [0.0] * columns
        _fill(parts[kind], offset * scale, (offset + size) * scale)
    strip: Columns[Kind] = []
    for column in range(columns if nbytes else 0):
        kind = next((kind for kind, part in parts.items() if part[column] > _ALL), mixed)
        if strip and strip[-1][2] == kind:
            strip[-1] = strip[-1][0], strip[-1][1] + 1, kind
        else:
            strip.append((column, 1, kind))
    return strip


def _fill(columns: list[float], start: float, end: float) -> None:
    """Add the part of each column that lies between two places."""
    first, last = int(start), min(int(end), len(columns) - 1)
    if first == last:  # nearly all runs, if there are many; faster than min() and max()
        columns[first] += end - start
        return
    for column in range(first, last + 1):
        columns[column] += max(min(end, column + 1) - max(start, column), 0.0)


def html_of(columns: Columns[str], styles: Mapping[str, tuple[str, str]], text: str) -> str:
    """A strip with a legend below it. Styles are a colour and a name; the text is a description."""
    bars = "".join(
        f'<rect x="{first}" width="{count}" height="14" fill="{styles[kind][0]}"/>'
        for first, count, kind in columns
    )
    seen = {kind for _, _, kind in columns}
    legend = "".join(
        f'<span style="margin-right:1em"><span style="color:{colour}">&#9632;</span> '
        f"{escape(name)}</span>"
        for kind, (colour, name) in styles.items()
        if kind in seen
    )
    return (
        f'<svg width="512" height="14" viewBox="0 0 {COLUMNS} 14" preserveAspectRatio="none" '
        f'role="img"><title>{escape(text)}</title>{bars}</svg><div>{legend}</div>'
    )
