"""Short texts: binary sizes, decimal counts, times, records, labels, keys of an index; lines."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

WIDTH = 100
"""The longest line of printed sentences."""
NAME_BYTES = 200
"""The longest name of a memory in UTF-8; the extension refuses longer ones of buffers."""
MOST_LABEL = 40
"""A label is cut to this many characters."""
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:s|ms|us|x)\b)")


def scaled(number: int, step: int, units: Sequence[str]) -> str:
    """A number of at least one step with one decimal, in the largest unit in which it reaches 1.

    Each unit is ``step`` times the previous unit. A number that would round up to a whole step
    takes the next unit.
    """
    value = number / step
    unit = 0
    while round(value, 1) >= step and unit + 1 < len(units):
        value /= step
        unit += 1
    return f"{value:.1f}{units[unit]}"


def size_text(nbytes: int) -> str:
    """A number of bytes, as in 0, 512B, 1.5K and 64.0M, in binary units."""
    if nbytes < 1024:
        return f"{nbytes}B" if nbytes else "0"
    return scaled(nbytes, 1024, "KMGTPE")


def count_text(count: int | None) -> str:
    """A number of events, as in 999 and 24.6k, in decimal units; empty for None."""
    if count is None:
        return ""
    return str(count) if count < 1000 else scaled(count, 1000, "kMGTPE")


def time_text(seconds: float) -> str:
    """Seconds as s, ms or us, with four digits or so."""
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def record_text(record: Any, *named: str, **shown: Callable[[Any], str]) -> str:
    """A named tuple as <Type field=text ...>: all of its fields, or the named ones.

    ``shown`` has the functions that make the texts of fields; the others are shown as by repr.
    """
    texts = (f"{n}={shown.get(n, repr)(getattr(record, n))}" for n in named or record._fields)
    return f"<{type(record).__name__} {' '.join(texts)}>"


def label_text(label: str, most: int = MOST_LABEL) -> str:
    """A label without characters that a terminal could act on, cut in the middle."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in label)
    if len(shown) <= most:
        return shown
    return f"{shown[:16]}...{shown[19 - most :]}"


def wrapped(text: str, first: str = "", later: str = "") -> str:
    """Text in lines of `WIDTH`, with indents; numbers keep their units, and labels stay whole."""
    lines = textwrap.fill(
        _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=later,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return lines.replace("\N{NO-BREAK SPACE}", " ")


def key_text(key: object) -> str:
    """A key as it stands between brackets, such as ``::2, ...``."""
    items = key if isinstance(key, tuple) and key else (key,)
    return ", ".join(map(_item_text, items))


def _item_text(item: object) -> str:
    if isinstance(item, slice):
        start, stop, step = (
            "" if bound is None else repr(bound) for bound in (item.start, item.stop, item.step)
        )
        return f"{start}:{stop}:{step}" if step else f"{start}:{stop}"
    return "..." if item is ... else repr(item)
