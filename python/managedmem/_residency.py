"""The result of residency(): Residency and ResidencyRun, with their text and their picture."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

from managedmem._managedmem import Device, Host
from managedmem._strips import COLUMNS, MIXED, STYLES, Columns, Style, fold, html_of
from managedmem._units import size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_RUN = Struct("<QQBBB5x")
_WHERE = ("host", "not on host")
_EVIDENCE = ("page map", "page map + prefetch")


# Address, nbytes, bytes on the host, runs as structs, bytes by NUMA nodes.
_Record = tuple[int, int, int, bytes, dict[int, int] | None]


class ResidencyRun(NamedTuple):
    """Neighbouring pages with equal answers."""

    offset: int
    """Bytes from the start of the memory; of several targets, as if they lay end to end."""
    nbytes: int
    where: str
    """"host" or "not on host". Pages on the host can have copies on devices too."""
    evidence: str
    """"page map", or "page map + prefetch" where the last prefetch, a hint, was to a device."""
    last_prefetch_location: Device | Host | None
    """For pages that are not on the host, the destination of their last prefetch. None if there was
    none or it is not known."""


class Residency:
    """Where the pages of managed memory were when residency() was called.

    A page is on the host if the host has it mapped; the kernel's page map shows that with
    certainty. All other bytes are not on the host: on a device, never used, discarded, or in host
    memory that the host has not touched, after an eviction or where a device wrote first to pages
    that prefer the host. No driver call distinguishes these. The last
    prefetch of such pages is a hint, because they can have moved since.

    Sizes are in bytes. Bytes of a page that lie outside of the memory do not count.
    """

    __slots__ = (
        "_hints",
        "_records",
        "nbytes",
        "numa",
        "on_host",
    )

    _records: tuple[_Record, ...]
    _hints: tuple[Device | Host, ...]
    nbytes: int
    """The size of the memory; of several targets the sum."""
    on_host: int
    """Bytes that are on the host, those included that devices have too."""
    numa: dict[int, int] | None
    """The bytes on the host by NUMA node. None on a machine with one node, and where this process
    may not ask."""

    def __init__(self, records: tuple[_Record, ...], hints: tuple[Device | Host, ...]) -> None:
        values = {
            "_records": records,
            "_hints": hints,
            "nbytes": sum(record[1] for record in records),
            "on_host": sum(record[2] for record in records),
            "numa": _sums(record[4] for record in records),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Residency cannot be changed")

    def __reduce__(self) -> tuple[Any, ...]:
        return Residency, (self._records, self._hints)

    @property
    def not_on_host(self) -> int:
        """Bytes that are not on the host."""
        return self.nbytes - self.on_host

    @property
    def fraction_on_host(self) -> float:
        """The part of the bytes that is on the host, from 0 to 1; 0 for empty memory."""
        return self.on_host / self.nbytes if self.nbytes else 0.0

    @property
    def runs(self) -> tuple[ResidencyRun, ...]:
        """The memory in order, without gaps. Neighbours in one target differ."""
        return tuple(
            ResidencyRun(
                offset,
                nbytes,
                _WHERE[where],
                _EVIDENCE[evidence],
                self._hints[hint - 1] if hint else None,
            )
            for offset, nbytes, where, evidence, hint in self._raw_runs()
        )

    @property
    def parts(self) -> tuple[Residency, ...]:
        """One for each target."""
        if len(self._records) == 1:
            return (self,)
        return tuple(Residency((record,), self._hints) for record in self._records)

    @property
    def last_asked_to(self) -> dict[Device | Host, int]:
        """The bytes that are not on the host by the location of their last prefetch."""
        asked: dict[Device | Host, int] = {}
        for _, nbytes, _, _, hint in self._raw_runs():
            if hint:
                location = self._hints[hint - 1]
                asked[location] = asked.get(location, 0) + nbytes
        return asked

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values for JSON; locations as str such as "Device(0)"."""
        asked = self.last_asked_to.items()
        return {
            "version": 1,
            "nbytes": self.nbytes,
            "on_host": self.on_host,
            "not_on_host": self.not_on_host,
            "fraction_on_host": self.fraction_on_host,
            "numa": None if self.numa is None else {str(node): n for node, n in self.numa.items()},
            "last_asked_to": {str(location): nbytes for location, nbytes in asked},
            "runs": [
                run._asdict()
                | {"last_prefetch_location": _text_or_none(run.last_prefetch_location)}
                for run in self.runs
            ],
        }

    def __str__(self) -> str:
        return self._text()

    def _text(self, *, hints: bool = True) -> str:
        """The bytes by place; with hints, also where the rest was last prefetched to."""
        sizes = map(size_text, (self.nbytes, self.on_host, self.not_on_host))
        text = "{}: {} on the host, {} not on the host".format(*sizes)
        return text + self._hint_text() if hints else text

    def _hint_text(self) -> str:
        asked = {to: n for to, n in self.last_asked_to.items() if isinstance(to, Device)}
        if list(asked.values()) == [self.not_on_host]:
            return f" (last asked to {next(iter(asked))})"
        texts = [f"{size_text(nbytes)} last asked to {to}" for to, nbytes in asked.items()]
        return f" ({', '.join(texts)})" if texts else ""

    def __repr__(self) -> str:
        return f"<Residency {self}>"

    def bar(self, width: int = 64) -> str:
        """The text, and below it a bar of the memory from its first byte to its last.

        ``#`` is on the host, ``.`` is not, ``+`` is mixed. ``width`` is the number of signs, 1 to
        4096. Raises ValueError for others, TypeError unless it is an int.
        """
        if isinstance(width, bool) or not isinstance(width, int):
            raise TypeError(f"width must be an int, got {width!r}")
        if not 1 <= width <= 4096:
            raise ValueError(f"width must be from 1 to 4096, got {width}")
        columns = self._columns(width)
        signs = "".join(STYLES[where].sign * count for _, count, where in columns)
        legend = ", ".join(f"{style.sign} {style.name}" for style in _styles(columns))
        return f"{self}\n[{signs}]  {legend}" if signs else str(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The text with its bar, for IPython in a terminal."""
        printer.text(self.bar())

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Draw a strip of the memory, from its first byte to its last; return the matplotlib Axes.

        Below it, where pages that are not on the host were last prefetched to. Several targets lie
        end to end. ``ax`` are the Axes to draw on; without it there is a new figure. Raises
        ImportError without matplotlib, which the extra ``plot`` installs.
        """
        from managedmem._plots import STRIP, strip

        hints: dict[Device | Host, list[tuple[int, int]]] = {}
        for run in self.runs:
            if run.last_prefetch_location is not None:
                hints.setdefault(run.last_prefetch_location, []).append((run.offset, run.nbytes))
        title = self._text(hints=False)
        drawn: Axes = strip(self._columns(STRIP), hints, self.nbytes, title, ax)
        return drawn

    def _repr_html_(self) -> str:
        """The text, and a strip of the memory from its first byte to its last."""
        from html import escape

        return f"<div><div>{escape(str(self))}</div>{self._strip()}</div>"

    def _strip(self) -> str:
        """The strip with its legend as HTML; empty for empty memory."""
        columns = self._columns()
        styles = {where: (style.colour, style.name) for where, style in STYLES.items()}
        return html_of(columns, styles, str(self)) if columns else ""

    def _raw_runs(self) -> Iterator[tuple[int, int, int, int, int]]:
        starts = accumulate((record[1] for record in self._records), initial=0)
        for start, record in zip(starts, self._records, strict=False):
            for offset, *rest in _RUN.iter_unpack(record[3]):
                yield (start + offset, *rest)

    def _columns(self, columns: int = COLUMNS) -> Columns[str]:
        """The strip: first column, number of columns, and their place, or "mixed"."""
        runs = ((run[0], run[1], run[2]) for run in self._raw_runs())
        strip = fold(runs, self.nbytes, len(_WHERE), columns)
        return [(first, count, (*_WHERE, MIXED)[where]) for first, count, where in strip]


def _styles(columns: Columns[str]) -> list[Style]:
    """The looks of the places of a strip."""
    seen = {where for _, _, where in columns}
    return [style for where, style in STYLES.items() if where in seen]


def _sums(all_bytes: Iterator[dict[int, int] | None]) -> dict[int, int] | None:
    """The sums by node; None if no target has any."""
    by_node: dict[int, int] = {}
    known = False
    for each in all_bytes:
        if each is None:
            continue
        known = True
        for node, nbytes in each.items():
            by_node[node] = by_node.get(node, 0) + nbytes
    return by_node if known else None


def _text_or_none(location: Device | Host | None) -> str | None:
    return None if location is None else str(location)


def make(records: tuple[_Record, ...], hints: tuple[Device | Host, ...]) -> Residency:
    """A Residency for the extension, from the places of its targets."""
    return Residency(records, hints)
