"""Forks in programs of several threads, even where a sanitizer replaces malloc().

If another thread is in malloc() at the fork, malloc() of AddressSanitizer hangs in the child, and
that of glibc does not. Each thread allocates when it begins, even if it never calls malloc().
"""

import os
import threading
import time

ASAN = "libasan" in os.environ.get("LD_PRELOAD", "")


def _is_asleep(thread):
    try:
        with open(f"/proc/self/task/{thread}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "S"
    except (FileNotFoundError, ProcessLookupError):  # it ended after it was listed
        return False


def fork_beside_sleepers():
    """os.fork(); under AddressSanitizer, once all other threads have slept for a while."""
    asleep, end = 0, time.monotonic() + 10
    while ASAN and asleep < 20 and time.monotonic() < end:
        others = {int(task) for task in os.listdir("/proc/self/task")} - {threading.get_native_id()}
        asleep = asleep + 1 if all(map(_is_asleep, others)) else 0
        time.sleep(0.001)
    return os.fork()
