"""The warning on systems where host and devices must not use managed memory at the same time."""

from __future__ import annotations

import warnings

from managedmem._call_site import caller

TEXT = (
    "a device of this system has no concurrent_managed_access: the host must not touch managed "
    "memory while a device works, or the operating system ends the process. Synchronize before "
    "each access, as buf.numpy() does, or attach() the memory; prefetches, and advice that names a "
    "device, do not work"
)


def warn() -> None:
    """A UserWarning that names the first line outside of this package."""
    warnings.warn(TEXT, stacklevel=caller()[1])
