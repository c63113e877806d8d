"""The view of ``top``: totals, rows and rates, made of two answers of a process; as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from managedmem._cli.top_source import MOST_REASON, command_of
from managedmem._units import count_text, label_text, size_text, wrapped

RATES = ("to_device", "to_host", "between_devices", "host_faults", "device_faults", "evicted")
HEADS = ("memory", "size", "kind", "to device/s", "to host/s", "faults/s", "evicted/s", "")
MOST_ROWS = 40
"""Rows of the table; the JSON has all."""
Answer = Mapping[str, Any]
Key = tuple[str, int]
Row = dict[str, Any]
NO_MOVES: Answer = dict.fromkeys(RATES, 0)


def rates_of(now: Answer | None, before: Answer | None, seconds: float) -> dict[str, float] | None:
    """Bytes and events a second between two readings of the same sums; None without two."""
    if now is None or before is None or seconds <= 0:
        return None
    # The sums of a memory can begin anew; those of the process never fall.
    return {name: max(0, now[name] - before[name]) / seconds for name in RATES}


def _by_memory(answer: Answer | None) -> dict[Key, Answer]:
    moves = answer and answer["moves"]
    return {(each["label"], each["address"]): each for each in moves["memories"]} if moves else {}


class View:
    """A process at one moment. ``before`` is the previous answer, None for the first view."""

    def __init__(self, now: Answer, before: Answer | None) -> None:
        self._now = now
        self.seconds: float = now["time"] - before["time"] if before else 0.0
        self.rates = rates_of(now["moves"], before and before["moves"], self.seconds)
        self.rows = self._made_rows(_by_memory(now), _by_memory(before))

    def _made_rows(
        self, sums: Mapping[Key, Answer], sums_before: Mapping[Key, Answer]
    ) -> list[Row]:
        """Memories that live, and others that moved, by moved bytes and then by size."""
        living = {(each["label"], each["address"]): each for each in self._now["live"]}
        rows = []
        for key, each in {**sums, **living}.items():
            row: Row = {name: value for name, value in each.items() if name not in RATES}
            rates = None
            if self.rates is not None:
                now, before = sums.get(key, NO_MOVES), sums_before.get(key, NO_MOVES)
                rates = rates_of(now, before, self.seconds)
            if key in living or (rates and any(rates.values())):
                rows.append({**row, "rates": rates})
        return sorted(rows, key=lambda row: (-_moved(row["rates"]), -row["nbytes"]))

    @property
    def title(self) -> str:
        """The process and its memory in a line."""
        total = self._now["total"]
        peak = f", at most {size_text(total['peak_nbytes'])}" if "peak_nbytes" in total else ""
        name = label_text(command_of(self._now["pid"]), 60)
        text = f"{self._now['pid']} {name}: {size_text(total['nbytes'])} in {total['living']}"
        return f"{text} memor{'y' if total['living'] == 1 else 'ies'}{peak}"

    @property
    def notes(self) -> list[str]:
        """Kept memory of devices, and the limits of the numbers."""
        notes = [_kept_text(each) for each in self._now["kept"]]
        if self._now["left_out"]:
            notes.append(f"{self._now['left_out']} smaller memories are not listed")
        if self._now["reason"]:
            notes.append(f"no moves: {label_text(self._now['reason'], MOST_REASON)}")
        elif self._now["moves"]["lost"]:
            lost = count_text(self._now["moves"]["lost"])
            notes.append(f"{lost} events came faster than they could be read: rates are too small")
        return notes

    def cells(self) -> list[list[str]]:
        """The rows as text, the total last."""
        shown = [_cells(row) for row in self.rows[:MOST_ROWS]]
        if left := len(self.rows) - len(shown):
            shown.append([f"({left} others)", *[""] * (len(HEADS) - 1)])
        total = {"label": "total", "nbytes": self._now["total"]["nbytes"], "rates": self.rates}
        return [*shown, _cells(total)]

    def to_dict(self) -> dict[str, Any]:
        """The view as dicts, lists, numbers and texts, for JSON; rates are per second."""
        moves = self._now["moves"]
        return {
            **{name: self._now[name] for name in ("version", "pid", "total", "kept", "left_out")},
            "command": command_of(self._now["pid"]),
            "seconds": self.seconds,
            "sums": moves and {name: moves[name] for name in (*RATES, "lost")},
            "rates": self.rates,
            "reason": self._now["reason"],
            "memories": self.rows,
        }

    def for_page(self) -> dict[str, Any]:
        """The texts of the table, for the page."""
        return {"title": self.title, "heads": HEADS, "rows": self.cells(), "notes": self.notes}

    def __str__(self) -> str:
        lines = aligned([HEADS, *self.cells()])
        return "\n".join([self.title, *lines, *(wrapped(note, later="  ") for note in self.notes)])


def _moved(rates: Mapping[str, float] | None) -> float:
    return rates["to_device"] + rates["to_host"] + rates["between_devices"] if rates else 0.0


def _kept_text(kept: Answer) -> str:
    place = "managed pools" if kept["device"] is None else f"Device({kept['device']})"
    frames, pools = size_text(kept["frames"]), size_text(kept["pools"])
    return f"{place} keeps {frames} in frames of working sets, {pools} in pools"


def _cells(row: Row) -> list[str]:
    rates = row["rates"]
    moves = ["-"] * 4
    if rates is not None:
        faults = rates["host_faults"] + rates["device_faults"]
        to_device = rates["to_device"] + rates["between_devices"]
        sizes = [size_text(round(n)) for n in (to_device, rates["to_host"], rates["evicted"])]
        moves = [*sizes[:2], count_text(round(faults)), sizes[2]]
    place = row.get("allocated_at") or ""
    if "on_host" in row:
        place = f"{size_text(row['on_host'])} on the host"
    kind = row.get("resource", "")
    if row.get("device") is not None:
        kind += f" {row['device']}"
    names = label_text(row["label"]), size_text(row["nbytes"]), label_text(kind)
    return [*names, *moves, label_text(place, 60)]


def is_left(column: int) -> bool:
    """True for the columns of words: memory, kind and place. The others are numbers."""
    return column in (0, 2, len(HEADS) - 1)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns: words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if is_left(at) else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
