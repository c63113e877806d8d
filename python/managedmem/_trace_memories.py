"""The memories of a trace: their ranges, their labels, and the parts of them that have names."""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from managedmem._managedmem import Device
from managedmem._units import size_text

SYSTEM_MEMORY = "(system memory)"
"""The label of memory that is not CUDA's, where devices reach it."""
MAPS = "/proc/self/maps"
REST = " (rest)"
"""Added to the label of a memory that stands for its bytes outside of its named parts."""


class RawMemory(NamedTuple):
    """A memory as the recorder reports it, with times in nanoseconds of its clock."""

    kind: str
    label: str
    address: int
    nbytes: int
    born: int
    died: int
    pooled: bool = False
    unnamed: int | None = None
    """The bytes outside of its named parts; None without such parts."""

    @property
    def end(self) -> int:
        """The address behind the last byte."""
        return self.address + self.nbytes

    @property
    def size(self) -> int:
        """The bytes of its row."""
        return self.nbytes if self.unnamed is None else self.unnamed


def with_tails(
    named: list[tuple[int, int, str]], memories: Iterable[tuple[Any, ...]]
) -> list[tuple[int, int, str]]:
    """The named ranges. One that ends in the last page of a buffer is extended to that page's end.

    No other buffer uses the page, and it moves as a whole. If another range begins in the page,
    nothing is extended.
    """
    ends = {address + nbytes for kind, _, address, nbytes, *_ in memories if kind == "buffer"}
    starts = sorted(address for address, _, _ in named)
    ranges = []
    for address, nbytes, label in named:
        end = address + nbytes
        last = page_end(end)
        alone = bisect.bisect_left(starts, end) == bisect.bisect_left(starts, last)
        ranges.append((address, (last if last in ends and alone else end) - address, label))
    return ranges


def _reaches_system_memory() -> bool:
    return any(device.pageable_memory_access for device in Device.all())


def _mapped_spans() -> list[tuple[int, int]]:
    """The addresses that the process has mapped, without files of devices, in order."""
    spans = []
    with open(MAPS, encoding="utf-8", errors="replace") as file:
        for line in file:
            addresses, access, _, _, _, *path = line.split(maxsplit=5)
            if access != "---p" and not (path and path[0].startswith("/dev/nvidia")):
                start, end = (int(text, 16) for text in addresses.split("-"))
                spans.append((start, end))
    return spans


def with_system_memory(memories: list[RawMemory]) -> list[RawMemory]:
    """The memories, with a name for addresses that the system knows and the driver does not."""
    unknown = [i for i, memory in enumerate(memories) if memory.kind == "unknown"]
    if not unknown or not _reaches_system_memory():
        return memories
    spans = _mapped_spans()
    for i in unknown:
        memory = memories[i]
        at = bisect.bisect_left(spans, (memory.end, 0))
        if at > 0 and spans[at - 1][1] > memory.address:
            memories[i] = memory._replace(kind="system", label=SYSTEM_MEMORY)
    return memories


def labelled(memory: RawMemory) -> RawMemory:
    """The memory, with a label made of its kind, size and address if it has none."""
    if memory.label:
        return memory
    return memory._replace(label=f"{memory.kind} {size_text(memory.nbytes)} at {memory.address:#x}")


def with_rests(
    memories: list[RawMemory], active: Collection[int]
) -> tuple[list[RawMemory], frozenset[int]]:
    """The memories, marked if a part has a name of its own, and the indices of fully named ones.

    Events beyond the limit count for the memory and not for a name. So a memory in `active`, which
    has such events, is not among the fully named ones.
    """
    named = joined((m.address, m.end) for m in memories if m.kind == "named")
    covered = set()
    for i, memory in enumerate(memories):
        if not named or memory.kind not in ("buffer", "foreign"):
            continue
        at = bisect.bisect_right(named, (memory.address, 1 << 64))
        before = at > 0 and named[at - 1][1] > memory.address
        if before and named[at - 1][1] >= memory.end and i not in active:
            covered.add(i)
        elif before or (at < len(named) and named[at][0] < memory.end):
            inside = overlap(named, memory.address, memory.end)
            memories[i] = memory._replace(label=memory.label + REST, unnamed=memory.nbytes - inside)
    return memories, frozenset(covered)


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges, sorted and made separate."""
    spans: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((start, end))
    return spans


def overlap(ranges: Sequence[tuple[int, int]], start: int, end: int) -> int:
    """How many bytes between two addresses lie in ranges, which are sorted and separate."""
    nbytes, at = 0, max(bisect.bisect_right(ranges, (start, 1 << 64)) - 1, 0)
    while at < len(ranges) and ranges[at][0] < end:
        nbytes += max(0, min(ranges[at][1], end) - max(ranges[at][0], start))
        at += 1
    return nbytes


def part_label(memories: Sequence[RawMemory], start: int, end: int) -> str:
    """The label of a part of a memory, by the named part that contains it if there is one."""
    around = [m for m in memories if m.address <= start and end <= m.end]
    around = [m for m in around if m.kind == "named"][-1:] or around
    if len(around) != 1:
        return f"{end - start} bytes at {start:#x}"
    first = around[0]
    label = first.label.removesuffix(REST)
    return f"{label}[{start - first.address}:{end - first.address}]"


def page_end(address: int) -> int:
    return -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
