"""Ranges for plans, and the places of their pages."""

from constants import PAGE
from managedmem import Device


def adjacent(buffer, count, size=PAGE):
    return [buffer[i * size : (i + 1) * size] for i in range(count)]


def place(buffer):
    """Where a buffer was sent last, once that has happened."""
    Device().sync()
    return buffer.last_prefetch_location


def places(plan):
    return [entry.location for entry in plan]
