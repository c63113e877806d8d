"""Text of the commands: aligned columns, sizes in readable units, paths that can be printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from managedmem._units import scaled


def printable(text: object) -> str:
    """The text with escapes for bytes of a path that cannot be printed."""
    return str(text).encode(errors="backslashreplace").decode()


def table(rows: Iterable[Sequence[object]], indent: str = "  ") -> str:
    """Rows as text in columns as wide as their widest cell; the last column has no padding."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in cells), strict=True)]
    lines = []
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)]
        lines.append((indent + "  ".join([*padded, row[-1]])).rstrip())
    return "\n".join(lines)


def size_text(nbytes: int) -> str:
    """A number of bytes in the largest unit, up to TiB, in which it reaches 1."""
    if nbytes < 1024:
        return f"{nbytes} bytes"
    return scaled(nbytes, 1024, (" KiB", " MiB", " GiB", " TiB"))
