"""The extent of the sweeps over all operations, which MANAGEDMEM_SWEEPS chooses.

Without it a sweep takes a quarter of the operations, which shows in seconds that each kind of
failure is survived. "single" takes all of them, and "all" adds pairs of faults, which take minutes.
"half" has the pairs of every other operation, by the seed, which is the commit's.
"""

import os

EXTENT = os.environ.get("MANAGEDMEM_SWEEPS")
SHARES = {None: 4, "single": 1, "half": 2, "all": 1}
assert EXTENT in SHARES, f"MANAGEDMEM_SWEEPS={EXTENT} is none of single, half and all"
SHARE = SHARES[EXTENT]
HAS_PAIRS = EXTENT in ("half", "all")
START = int(os.environ.get("MANAGEDMEM_SEED", "0")) if EXTENT == "half" else 0


def sample(operations, first=0):
    """Every SHARE-th operation, from the one with number `first` on."""
    return list(operations)[(START + first) % SHARE :: SHARE]
