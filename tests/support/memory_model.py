"""A model of managed memory in plain Python: the bytes, and the advice of each page.

It does not use the library. `Memory` holds what an operation must have done. Where drivers may
differ, it keeps every allowed state until an observed state decides.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from constants import PAGE


class Page(NamedTuple):
    """The advice and the last prefetch that one page is expected to have."""

    read_mostly: bool = False
    preferred_location: object = None
    accessed_by: frozenset = frozenset()
    last_prefetch_location: object = None


def merged(pages, first_bytes=PAGE, last_bytes=PAGE):
    """Expected pages as the runs that page_runs() gives; the ends may be parts of pages."""
    sizes = [first_bytes, *[PAGE] * (len(pages) - 2), last_bytes][: len(pages)]
    runs = []
    offset = 0
    for page, size in zip(pages, sizes, strict=True):
        if runs and tuple(runs[-1][2:]) == tuple(page):
            runs[-1][1] += size
        else:
            runs.append([offset, size, *page])
        offset += size
    return [tuple(run) for run in runs]


class Memory:
    """One allocation. Ranges are offsets and sizes in bytes."""

    def __init__(self, size, *, kind="managed", skew=0):
        self.size, self.kind = size, kind
        self.skew = skew  # of the first byte in its page
        self.data = bytearray(size)
        self.known = bytearray(size)  # 1 for each byte whose value is certain
        self.pages = [{Page()} for _ in range(-(-size // PAGE))]  # the allowed states of each page
        self.busy = set()  # the streams that may still work on it
        self.stale = False  # discarded since the last prefetch

    # --- bytes

    def write(self, start, data):
        self.data[start : start + len(data)] = data
        self.known[start : start + len(data)] = b"\1" * len(data)

    def forget(self, start, size):
        self.known[start : start + size] = bytes(size)

    def copy(self, start, size, source, source_start):
        target, origin = slice(start, start + size), slice(source_start, source_start + size)
        self.data[target], self.known[target] = source.data[origin], source.known[origin]

    def restore(self, other):
        self.data[:], self.known[:] = other.data, other.known

    def snapshot(self):
        copied = Memory(self.size)
        copied.restore(self)
        return copied

    def wrong_byte(self, found, start=0):
        """The offset of the first byte that differs from a known one; None if all agree."""
        size = len(found)
        known, expected = self.known[start : start + size], self.data[start : start + size]
        if found == expected:
            return None
        pairs = enumerate(zip(found, expected, known, strict=True))
        return next((start + i for i, (is_, must, sure) in pairs if sure and is_ != must), None)

    def either(self, before, found):
        """After a write that failed: the offset of a byte that is neither as before nor as written,
        or None. Takes over the bytes that were found. Bytes that were unknown stay unknown: their
        pages may still be discarded, and change once more.
        """
        for i, value in enumerate(found):
            old = not before.known[i] or before.data[i] == value
            new = not self.known[i] or self.data[i] == value
            if not old and not new:
                return i
        self.data[:], self.known[:] = found, before.known
        return None

    def whole_pages(self, start, size):
        """The part of a range that is whole pages, as (start, size); the size may be 0."""
        first = -(-(self.skew + start) // PAGE) * PAGE - self.skew
        end = (self.skew + start + size) // PAGE * PAGE - self.skew
        return first, max(0, end - first)

    # --- pages

    def span(self, start, size):
        return range(start // PAGE, (start + size - 1) // PAGE + 1) if size else range(0)

    def alike(self, start, size):
        """True if all pages of a range are known and the same."""
        return len(set().union(*(self.pages[i] for i in self.span(start, size)))) <= 1

    def tell(self, start, size, change: Callable[[Page], Page], *, certain: bool):
        """Changes the pages of a range. If not certain, each page may also stay as it is."""
        for i in self.span(start, size):
            new = {change(page) for page in self.pages[i]}
            self.pages[i] = new if certain else new | self.pages[i]

    def may_have(self, other_pages: Iterable[set[Page]]):
        """Allows each page the states of these pages as well."""
        self.pages = [a | b for a, b in zip(self.pages, other_pages, strict=True)]

    def wrong_page(self, found: list[Page]):
        """The first page whose state is not allowed, or None; keeps the states that were found."""
        for i, (page, allowed) in enumerate(zip(found, self.pages, strict=True)):
            if page not in allowed:
                return i
            self.pages[i] = {page}
        return None
