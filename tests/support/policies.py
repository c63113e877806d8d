"""Policies of each kind, and memory whose pages differ in advice."""

import random

from constants import PAGE
from managedmem import Device, Host, MigrationPolicy


def samples():
    last = Device.all()[-1]
    return [
        MigrationPolicy(),
        MigrationPolicy.read_duplicated(),
        MigrationPolicy.prefer(last),
        MigrationPolicy.prefer(Host()),
        MigrationPolicy.shared(),
        MigrationPolicy.shared([last]),
        MigrationPolicy(read_mostly=True, preferred_location=Host(), accessed_by={last, Host()}),
    ]


def state(*buffers):
    return [buffer.page_runs() for buffer in buffers]


def scramble(buffer, seed=0):
    """Give pages different advice; return the page runs."""
    rng = random.Random(seed)
    pages = buffer.nbytes // PAGE
    for _ in range(12):
        first = rng.randrange(pages)
        part = buffer.range(first * PAGE, rng.randrange(1, pages - first + 1) * PAGE)
        part.read_mostly = rng.random() < 0.5
        part.preferred_location = rng.choice([*Device.all(), Host(), None])
        part.accessed_by = rng.sample([*Device.all(), Host()], rng.randrange(3) % 2 + 1)
    return buffer.page_runs()
