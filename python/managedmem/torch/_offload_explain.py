"""Offload.explain(): the places of the parts of an offloaded module, which print as a table."""

from __future__ import annotations

from typing import NamedTuple

from managedmem._units import size_text


class PartPlace(NamedTuple):
    """A part of an offloaded module: its name, bytes, place and the reason for it.

    `place` is "device", "frames" (on the device for the time of each use) or "home" (read over the
    bus, where it is).
    """

    name: str
    nbytes: int
    place: str
    reason: str


class Explanation(tuple[PartPlace, ...]):
    """The places of all parts. str() gives a table, a row for each place and reason.

    Attributes
    ----------
    is_suspended : bool
        True if the module was suspended: the devices then use all parts at home until resume(),
        after which each part is in its `place`.
    """

    is_suspended = False

    def __str__(self) -> str:
        rows: dict[tuple[str, str], list[PartPlace]] = {}
        for part in self:
            rows.setdefault((part.place, part.reason), []).append(part)
        lines = [f"{'place':8}{'parts':>6}{'size':>9}  reason"]
        if self.is_suspended:
            lines.insert(0, "suspended: until resume(), all parts are used at home; then:")
        for (place, reason), parts in rows.items():
            size = size_text(sum(part.nbytes for part in parts))
            names = ", ".join(part.name for part in parts[:2]) + (", ..." if len(parts) > 2 else "")
            lines.append(f"{place:8}{len(parts):6}{size:>9}  {reason}: {names}")
        return "\n".join(lines)

    __repr__ = __str__
