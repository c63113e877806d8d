"""Arrays for groups of working sets, and uses of all groups."""

import numpy

from constants import PAGE
from contents import pattern

SIZE = 16 * PAGE


def layer(number, size=SIZE):
    """An array with contents of its own."""
    return numpy.frombuffer(pattern(size, number), dtype="uint8")


def use_all(groups, stream=None):
    for group in groups:
        with group.use(stream=stream):
            pass
