"""The seeds of random searches: another range of them at each commit.

A test whose parameter is named `seed` gets numbers from FIRST_SEED on. MANAGEDMEM_SEED repeats the
search of an earlier run, which printed it in its first lines.
"""

import os
import subprocess

from paths import ROOT

APART = 1000  # more than any test has seeds


def commit_number():
    """A number of the commit; 0 in a tree without git."""
    try:
        found = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(found.stdout.strip()[:6], 16)


# For the processes of pytest-xdist too, which read it from the environment.
SEED = os.environ.setdefault("MANAGEDMEM_SEED", str(commit_number()))
FIRST_SEED = int(SEED) * APART
