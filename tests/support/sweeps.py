"""The extent of the sweeps over all operations, which MANAGEDMEM_SWEEPS chooses.

Without it a sweep takes a quarter of the operations, which shows in seconds that each kind of
failure is survived. "single" takes all of them, and "all" adds pairs of faults, which take minutes.
"""

import os

EXTENT = os.environ.get("MANAGEDMEM_SWEEPS")
assert EXTENT in (None, "single", "all"), f"MANAGEDMEM_SWEEPS={EXTENT} is neither single nor all"
SHARE = 1 if EXTENT else 4


def sample(operations, first=0):
    """One of SHARE operations, from the one with that number on."""
    return list(operations)[first % SHARE :: SHARE]
