"""Bars of numbers for terminals: of blocks or, without these, of ASCII; with colours on a tty."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import NamedTuple, TextIO

EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"
BLOCK = "\u2588"
WIDEST = 100
COLOURS = ("33", "34")
"""Codes of ECMA-48: orange or yellow for the first bar, blue for the second, as in pictures."""


class Bar(NamedTuple):
    """A bar: its name, its length on the scale of the others, and its number as text."""

    name: str
    value: float
    text: str


def has_blocks(stream: TextIO) -> bool:
    """True if the encoding of the stream has the signs of bars."""
    try:
        (BLOCK + EIGHTHS).encode(getattr(stream, "encoding", None) or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def has_colours(stream: TextIO) -> bool:
    """True for a terminal, unless NO_COLOR or TERM=dumb is in the environment."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def drawn(part: float, width: int, blocks: bool) -> str:
    """A bar of a part of the width; at least one sign unless the part is 0."""
    if not blocks:
        return "#" * (max(1, round(part * width)) if part else 0)
    eighths = max(1, round(part * width * 8)) if part else 0
    return (BLOCK * (eighths // 8) + EIGHTHS[eighths % 8]).rstrip()


def lines_of(bars: Sequence[Bar], stream: TextIO, columns: int | None = None) -> list[str]:
    """The bars as lines for a stream, as wide as its terminal; the longest one fills its line."""
    columns = min(columns or shutil.get_terminal_size().columns, WIDEST)
    names = max(len(bar.name) for bar in bars)
    width = max(8, columns - names - max(len(bar.text) for bar in bars) - len("      "))
    most = max(bar.value for bar in bars)
    blocks, coloured = has_blocks(stream), has_colours(stream)
    lines = []
    for number, bar in enumerate(bars):
        signs = drawn(bar.value / most if most else 0.0, width, blocks)
        gap = "  " if signs else ""
        if coloured and signs:
            signs = f"\x1b[{COLOURS[number % len(COLOURS)]}m{signs}\x1b[0m"
        lines.append(f"  {bar.name.ljust(names)}  {signs}{gap}{bar.text}")
    return lines
