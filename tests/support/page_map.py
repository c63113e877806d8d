"""The kernel's page map: the pages of memory that this process has mapped."""

import struct

from constants import PAGE

PRESENT = 1 << 63


def mapped(buffer):
    """A list of bools, one for each page of a buffer that begins at a page."""
    assert buffer.handle % PAGE == 0
    count = -(-buffer.size // PAGE)
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(buffer.handle // PAGE * 8)
        entries = struct.unpack(f"{count}Q", file.read(count * 8))
    return [bool(entry & PRESENT) for entry in entries]


def count_mapped(buffer):
    """The number of its pages that are mapped."""
    return sum(mapped(buffer))
