"""The table of a trace as text: numbers in short units, columns as wide as they need to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from managedmem._trace_findings import findings_of
from managedmem._units import count_text, label_text, size_text, time_text, wrapped

if TYPE_CHECKING:
    from managedmem._trace_results import TraceMemory, TraceSums
    from managedmem._trace_view import TraceView

MOST_ROWS = 24
"""A table has at most this many memories; the others share a row."""
NOTHING = "No managed memory was seen; ordinary device memory is not traced."
"""The note of a table that is empty because the program has no managed memory."""


def share_text(part: int, whole: int) -> str:
    """A share in percent. 0 and 100 are shown only if exact, and "-" if `whole` is 0."""
    if whole == 0:
        return "-"
    percent = (200 * part + whole) // (2 * whole)
    if percent == 0 < part:
        return "<1%"
    return ">99%" if percent == 100 and part < whole else f"{percent}%"


def others_text(sums: TraceSums) -> str:
    """The sums that have no column of their own and are not 0."""
    viewed = sums.by_cause["host_view"][1]
    parts = [
        ("by numpy()", viewed and size_text(viewed)),
        ("between devices", sums.between_devices and size_text(sums.between_devices)),
        ("thrashing", sums.thrashing and size_text(sums.thrashing)),
        ("throttled", sums.throttled and time_text(sums.throttled)),
        ("remote", sums.remote_mapped and size_text(sums.remote_mapped)),
        ("duplicated", sums.duplicated and size_text(sums.duplicated)),
        ("evicted", sums.evicted and size_text(sums.evicted)),
    ]
    return ", ".join(f"{name} {text}" for name, text in parts if text)


class Row(NamedTuple):
    """The cells of one row, with the sums behind them; the row of totals has no last cell."""

    label: str
    size: str
    sums: TraceSums
    has_others: bool = True

    def cells(self) -> list[str]:
        """The texts of the columns."""
        sums, requested = self.sums, self.sums.by_cause["requested"]
        return [
            self.label,
            self.size,
            size_text(sums.to_device),
            share_text(requested[0], sums.to_device),
            size_text(sums.to_host),
            share_text(requested[1], sums.to_host),
            count_text(sums.host_faults),
            count_text(sums.device_faults),
            others_text(sums) if self.has_others else "",
        ]


def memory_row(memory: TraceMemory) -> Row:
    """The row of a memory, or of several with one label."""
    sizes = [size_text(size) for size in memory._sizes]
    size = sizes[0] if sizes[0] == sizes[-1] else f"{sizes[0]}-{sizes[-1]}"
    count = f"{len(sizes)} x " if len(sizes) > 1 else ""
    return Row(label_text(memory.label), f"{count}{size}", memory)


def rows_of(part: TraceView, most: int = MOST_ROWS) -> list[Row]:
    """The rows of the table: memories with events, the rest of them together, unknown, total."""
    groups = part._groups()
    shown = groups if len(groups) <= most else groups[: most - 1]
    rows = [memory_row(memory) for memory in shown]
    rest = groups[len(shown) :]
    if rest:
        rows.append(Row(f"({len(rest)} others)", "", part._together(rest)))
    unknown = part.unattributed
    if unknown.moved or unknown.host_faults or unknown.device_faults or others_text(unknown):
        rows.append(Row("(freed before it was seen)", "", unknown))
    return [*rows, Row("total", "", part.total, False)]


def heading(part: TraceView) -> str:
    """The line above the table."""
    state = "complete" if part.complete else "INCOMPLETE"
    return (
        f"{part._title()} of {time_text(part.duration)}, source {part.source} "
        f"({part.source_detail}), {state}"
    )


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns, the first and the last to the left, the others to the right."""
    heads = ["memory", "size", "moved", "requested", "moved", "requested", "host", "device", ""]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    groups = {2: "to device", 4: "to host", 6: "faults"}
    top = " " * (widths[0] + 2 + widths[1])
    for column, title in groups.items():
        top += "  " + title.center(widths[column] + 2 + widths[column + 1])
    top += "  other" if any(row[-1] for row in cells) else ""
    lines = [top.rstrip()]
    for row in [heads, *cells]:
        middle = [text.rjust(width) for text, width in zip(row[1:-1], widths[1:-1], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *middle, row[-1]]).rstrip())
    return lines


def notes(part: TraceView) -> list[str]:
    """The paragraphs below the table: lost events, no memory at all, and findings."""
    notes = [wrapped(f"note: {text}") for text in part.problems]
    if not part.memories and len(rows_of(part)) == 1:
        notes.append(NOTHING)
    for finding in findings_of(part):
        indent = " " * 4
        lines = [wrapped(finding.observation, later=indent)]
        if finding.advice:
            lines.append(wrapped(finding.advice, indent, indent))
        notes.append("\n".join(lines))
    return notes


def text_of(part: TraceView) -> str:
    """The heading, the table and the paragraphs below it."""
    rows = [row.cells() for row in rows_of(part)]
    table = "\n".join([heading(part), *aligned(rows)])
    return "\n\n".join([table, *notes(part)])
