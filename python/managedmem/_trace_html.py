"""The table of a trace as HTML for notebooks: the same cells, with bars, without scripts."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from managedmem import _colours as colours
from managedmem import _trace_table as text

if TYPE_CHECKING:
    from managedmem._trace_view import TraceView

MOST_ROWS = 16
"""The most memories: with them, a table of the longest labels stays below 20 kB."""

_TITLES = (("", 2), ("to device", 2), ("to host", 2), ("faults", 2), ("other", 1))
_HEADS = ("memory", "size", "moved", "requested", "moved", "requested", "host", "device", "")


def _bar(shown: str, part: int, whole: int, colour: str) -> str:
    """A cell with a bar of the share below its text."""
    percent = 100 * part / whole if whole else 0
    bar = f'<div style="height:4px;background:{colour};width:{percent:.0f}%"></div>'
    return f'<td style="min-width:6em">{shown}{bar if percent >= 0.5 else ""}</td>'


def _row(row: text.Row, most: int, tag: str) -> str:
    cells = [escape(cell) for cell in row.cells()]
    tags = [f'<{tag} style="text-align:left">{cells[0]}</{tag}>', f"<td>{cells[1]}</td>"]
    for at, moved, colour in (
        (2, row.sums.to_device, colours.DEVICE),
        (4, row.sums.to_host, colours.HOST),
    ):
        tags += [_bar(cells[at], moved, most, colour), f"<td>{cells[at + 1]}</td>"]
    tags += [f"<td>{cell}</td>" for cell in cells[6:8]]
    return f'<tr>{"".join(tags)}<td style="text-align:left">{cells[8]}</td></tr>'


def html_of(part: TraceView) -> str:
    """The heading, the table and the paragraphs below it, at most 20 kB."""
    rows = text.rows_of(part, MOST_ROWS)
    most = max(max(row.sums.to_device, row.sums.to_host) for row in rows)
    titles = "".join(f'<th colspan="{n}" style="text-align:center">{t}</th>' for t, n in _TITLES)
    heads = "".join(f"<th>{head}</th>" for head in _HEADS)
    body = [_row(row, most, "td") for row in rows[:-1]] + [_row(rows[-1], most, "th")]
    below = []
    for note in text.notes(part):
        first, _, rest = note.partition("\n    ")
        rest = " ".join(rest.split())
        below.append(f"<p>{escape(first)}{f'<br><em>{escape(rest)}</em>' if rest else ''}</p>")
    return (
        f"<div><p>{escape(text.heading(part))}</p><table><thead><tr>{titles}</tr>"
        f"<tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table>{''.join(below)}</div>"
    )
