"""Ranges for plans, and the locations of their pages."""

from constants import PAGE
from managedmem import Device


def separate(buffer, count, size=PAGE):
    """Ranges with a gap of their size between them: nothing to merge."""
    return [buffer[2 * i * size : (2 * i + 1) * size] for i in range(count)]


def adjacent(buffer, count, size=PAGE):
    return [buffer[i * size : (i + 1) * size] for i in range(count)]


def place(buffer):
    """The destination of a buffer's last prefetch, after queued work has run."""
    Device().sync()
    return buffer.last_prefetch_location


def places(plan):
    return [entry.location for entry in plan]
