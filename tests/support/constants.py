"""Sizes, and the kinds of driver and Python, that many test files use."""

import mmap
import os
import sys
import sysconfig

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
PAGE = mmap.PAGESIZE
# Bytes of managed memory for this process; tools/gpu_suite.py --jobs divides them.
BUDGET = int(os.environ.get("MANAGEDMEM_TEST_BUDGET", "512")) * MIB
EMULATED = os.environ.get("MANAGEDMEM_DRIVER", "cuda") != "cuda"
# A free-threaded Python frees objects on the threads that made them, and some memory in batches.
FREE_THREADED = sysconfig.get_config_var("Py_GIL_DISABLED") == 1
# Such a Python also makes functions, classes and modules immortal once a thread has run.
IMMORTALIZES = FREE_THREADED and sys.version_info < (3, 14)
ADVICES = tuple(
    verb + name
    for name in ("read_mostly", "preferred_location", "accessed_by")
    for verb in ("set_", "unset_")
)
