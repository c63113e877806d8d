"""The warning of systems where host and devices must not use managed memory at the same time."""

from __future__ import annotations

import sys
import warnings

TEXT = (
    "a device of this system has no concurrent_managed_access: the host must not touch managed "
    "memory while a device works, or the operating system ends the process. Synchronize before "
    "each access, as buf.numpy() does; prefetches, and advice that names a device, do not work"
)


def warn() -> None:
    """A UserWarning that names the first line outside of this package.

    zeros(), the pools for other libraries and others of this package call the extension too.
    """
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and _is_own(frame.f_globals.get("__name__")):
        level += 1
        frame = frame.f_back
    warnings.warn(TEXT, stacklevel=level)


def _is_own(name: object) -> bool:
    return isinstance(name, str) and name.partition(".")[0] == "managedmem"
