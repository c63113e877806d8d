"""Says whether the Python that runs it can build and test the package.

    CANDIDATE tools/probe_python.py

Prints its version (with t if it is free-threaded), 1 if it has the headers for extensions and else
0, and its path. Prints nothing and fails for a Python that is older than 3.11, no final release,
not CPython, or without the modules that make virtual environments.
"""

import ensurepip  # noqa: F401
import os
import sys
import sysconfig
import venv  # noqa: F401


def main():
    if sys.version_info < (3, 11) or sys.version_info.releaselevel != "final":
        return 1
    if sys.implementation.name != "cpython":
        return 1
    free_threaded = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    major, minor = sys.version_info[:2]
    print(f"{major}.{minor}{free_threaded}", int(os.path.exists(header)), sys.executable)
    return 0


if __name__ == "__main__":
    sys.exit(main())
