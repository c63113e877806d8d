"""The result of residency(): Residency and ResidencyRun, with their text and their picture."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

from managedmem._managedmem import Device, Host
from managedmem._strips import COLUMNS, MIXED, Columns, fold, html_of, styles_of
from managedmem._units import size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_RUN = Struct("<QQBBB5x")
_WHERE = ("host", "not on host", "nowhere", "device")
_NOWHERE, _DEVICE = 2, 3
_EVIDENCE = ("page map", "page map + prefetch", "driver")
_DRIVER = 2


# Address, nbytes, bytes on the host, runs as structs, bytes by NUMA nodes.
_Record = tuple[int, int, int, bytes, dict[int, int] | None]


class ResidencyRun(NamedTuple):
    """Neighbouring pages with equal answers."""

    offset: int
    """Bytes from the start of the memory; for several targets, as if they lay end to end."""
    nbytes: int
    where: str
    """"host" or "not on host"; where the driver says it, also a device, such as "Device(0)", or
    "nowhere" for pages that no memory holds. Pages on the host can have copies on devices too."""
    evidence: str
    """How the place is known: "driver" if the driver said it, from CUDA 13.4 on; else "page map",
    or "page map + prefetch" if the last prefetch, a hint, was to a device."""
    last_prefetch_location: Device | Host | None
    """For pages that are not on the host, the destination of their last prefetch. None if there was
    no prefetch, if it is not known, and where the driver says where the pages are."""

    @property
    def device(self) -> Device | None:
        """The device that has the pages, as the driver says; None for all other runs."""
        number = self.where.removeprefix("Device(").removesuffix(")")
        return Device(int(number)) if number.isdigit() else None


class Residency:
    """Where the pages of managed memory were when residency() was called.

    A page is on the host if the host has it mapped; the kernel's page map shows that with
    certainty. From CUDA 13.4 on, the driver says where the other pages are: on a device, nowhere,
    or in host memory that the host has not touched, after an eviction or where a device wrote first
    to pages that prefer the host. Older drivers have no call that tells these apart. There the last
    prefetch is only a hint, because the pages can have moved since.

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
    """The size of the memory; for several targets, the sum."""
    on_host: int
    """Bytes that are on the host, including pages of which devices have copies."""
    numa: dict[int, int] | None
    """The bytes that the host has mapped, by NUMA node. None on a machine with one node, with
    direct_managed_mem_access_from_host, and where this process may not ask."""

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
                self._where((place, hint)),
                _EVIDENCE[evidence],
                self._hints[hint - 1] if hint and place != _DEVICE else None,
            )
            for offset, nbytes, place, evidence, hint in self._raw_runs()
        )

    @property
    def parts(self) -> tuple[Residency, ...]:
        """A Residency for each target."""
        if len(self._records) == 1:
            return (self,)
        return tuple(Residency((record,), self._hints) for record in self._records)

    @property
    def last_asked_to(self) -> dict[Device | Host, int]:
        """The bytes that are not on the host by the location of their last prefetch."""
        return self._by_location(of_devices=False)

    @property
    def devices(self) -> dict[Device | Host, int]:
        """The bytes that each device has, as the driver says. Empty where no device has any, and
        with drivers older than CUDA 13.4."""
        return self._by_location(of_devices=True)

    @property
    def nowhere(self) -> int:
        """Bytes that no memory holds, as the driver says: pages that were never used."""
        return sum(run[1] for run in self._raw_runs() if run[2] == _NOWHERE)

    def _by_location(self, *, of_devices: bool) -> dict[Device | Host, int]:
        totals: dict[Device | Host, int] = {}
        for _, nbytes, place, _, hint in self._raw_runs():
            if hint and (place == _DEVICE) is of_devices:
                location = self._hints[hint - 1]
                totals[location] = totals.get(location, 0) + nbytes
        return totals

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values for JSON; locations as str such as "Device(0)".

        ``devices`` and ``nowhere`` are included if the driver said them.
        """
        answers = {"devices": _by_text(self.devices), "nowhere": self.nowhere}
        answered = any(run[3] == _DRIVER for run in self._raw_runs())
        return {
            "version": 1,
            "nbytes": self.nbytes,
            "on_host": self.on_host,
            "not_on_host": self.not_on_host,
            "fraction_on_host": self.fraction_on_host,
            "numa": None if self.numa is None else {str(node): n for node, n in self.numa.items()},
            "last_asked_to": _by_text(self.last_asked_to),
            **(answers if answered else {}),
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
        known = [f"{size_text(nbytes)} on {device}" for device, nbytes in self.devices.items()]
        if self.nowhere:
            known.append(f"{size_text(self.nowhere)} nowhere")
        rest = self.not_on_host - self.nowhere - sum(self.devices.values())
        if rest or not known:
            known.append(f"{size_text(rest)} not on the host")
        places = ", ".join([f"{size_text(self.on_host)} on the host", *known])
        return f"{size_text(self.nbytes)}: {places}" + (self._hint_text(rest) if hints else "")

    def _hint_text(self, rest: int) -> str:
        asked = {to: n for to, n in self.last_asked_to.items() if isinstance(to, Device)}
        if list(asked.values()) == [rest]:
            return f" (last asked to {next(iter(asked))})"
        texts = [f"{size_text(nbytes)} last asked to {to}" for to, nbytes in asked.items()]
        return f" ({', '.join(texts)})" if texts else ""

    def __repr__(self) -> str:
        return f"<Residency {self}>"

    def bar(self, width: int = 64) -> str:
        """The text, and below it a bar of the memory from its first byte to its last.

        ``#`` is on the host, ``.`` is not, ``+`` is mixed; where the driver says it, a digit is a
        device, and ``_`` is nowhere. ``width`` is the number of signs, 1 to
        4096. Raises ValueError for other numbers, TypeError unless it is an int.
        """
        if isinstance(width, bool) or not isinstance(width, int):
            raise TypeError(f"width must be an int, got {width!r}")
        if not 1 <= width <= 4096:
            raise ValueError(f"width must be from 1 to 4096, got {width}")
        columns = self._columns(width)
        styles = styles_of(columns)
        signs = "".join(styles[where].sign * count for _, count, where in columns)
        legend = ", ".join(f"{style.sign} {style.name}" for style in styles.values())
        return f"{self}\n[{signs}]  {legend}" if signs else str(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The text with its bar, for IPython in a terminal."""
        printer.text(self.bar())

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Draw a strip of the memory, from its first byte to its last; return the matplotlib Axes.

        A second strip below shows where pages that are not on the host were last prefetched to.
        Several targets lie end to end. ``ax`` are the Axes to draw on; without it there is a new
        figure. Raises ImportError without matplotlib, which the extra ``plot`` installs.
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
        styles = {k: (style.colour, style.name) for k, style in styles_of(columns).items()}
        return html_of(columns, styles, str(self)) if columns else ""

    def _raw_runs(self) -> Iterator[tuple[int, int, int, int, int]]:
        starts = accumulate((record[1] for record in self._records), initial=0)
        for start, record in zip(starts, self._records, strict=False):
            for offset, *rest in _RUN.iter_unpack(record[3]):
                yield (start + offset, *rest)

    def _columns(self, columns: int = COLUMNS) -> Columns[str]:
        """The strip: first column, number of columns, and their place, or "mixed"."""
        runs = (
            (at, nbytes, (place, hint if place == _DEVICE else 0))
            for at, nbytes, place, _, hint in self._raw_runs()
        )
        strip = fold(runs, self.nbytes, (len(_WHERE), 0), columns)
        return [(first, count, self._where(kind)) for first, count, kind in strip]

    def _where(self, kind: tuple[int, int]) -> str:
        """A place in words. `kind` is the place and, for a device, its index in the hints + 1."""
        place, hint = kind
        return str(self._hints[hint - 1]) if place == _DEVICE else (*_WHERE, MIXED)[place]


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


def _by_text(sizes: dict[Device | Host, int]) -> dict[str, int]:
    return {str(location): nbytes for location, nbytes in sizes.items()}


def _text_or_none(location: Device | Host | None) -> str | None:
    return None if location is None else str(location)


def make(records: tuple[_Record, ...], hints: tuple[Device | Host, ...]) -> Residency:
    """A Residency for the extension, from the places of its targets."""
    return Residency(records, hints)
