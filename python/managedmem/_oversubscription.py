"""The warnings about memory that devices, or devices and the host together, cannot hold."""

from __future__ import annotations

import warnings
from collections import defaultdict

from managedmem._call_site import caller
from managedmem._limits import host_available, host_limit
from managedmem._managedmem import Device, _device_memory

_ADDRESSES = 1 << 47  # bytes of address space of a process; the driver refuses such a size
_warned: set[tuple[str, int]] = set()  # files and lines


def warn_of_allocation(asked: int, living: int) -> int:
    """Warn if devices and the host together have no room for managed memory; return the bytes left.

    Living memory may have no pages yet. So the available bytes are compared with `asked` alone, and
    the bytes that the machine has with `asked` and `living` together.
    """
    totals = enumerate(_device_memory())
    devices = sum(total for number, total in totals if not Device(number).integrated)
    available, limit = host_available(), host_limit()
    if asked >= _ADDRESSES:
        return 0
    if available is None or limit is None:
        return asked + living  # unknown: a guess of what is left, which delays the next check
    left = min(devices + available - asked, devices + limit - asked - living)
    if left < 0:
        _warn(
            f"an allocation of {asked:,} bytes, beside {living:,} bytes of managed memory, makes "
            f"{asked + living:,} bytes. The devices have {devices:,} bytes, and {available:,} of "
            f"{limit:,} are available on the host, so not all of it can be used at once: free "
            "memory first, or allocate less"
        )
    return max(0, left)


def warn_of_places(places: list[tuple[int, int, int]]) -> None:
    """Warn of devices that are to hold more than they have, by (address, bytes, device)."""
    by_device = defaultdict(list)
    for start, nbytes, device in places:
        if nbytes < _ADDRESSES:
            by_device[device].append((start, start + nbytes))
    totals = _device_memory()
    for device, ranges in by_device.items():
        asked = _union(ranges)
        if asked > totals[device]:
            _warn(
                f"Device({device}) is to hold {asked:,} bytes of managed memory, and has "
                f"{totals[device]:,} in all: {asked - totals[device]:,} of them find no room, or "
                "drive others out. Give less, use PrefetchPlan.fit(), or a ManagedWorkingSet"
            )


def _union(ranges: list[tuple[int, int]]) -> int:
    """The bytes in ranges (start, end); overlaps count once."""
    total = covered = 0
    for start, end in sorted(ranges):
        total += max(0, end - max(start, covered))
        covered = max(covered, end)
    return total


def _warn(text: str) -> None:
    """A UserWarning, once for each line that calls this package; again if it was raised."""
    frame, level = caller()
    line = frame.f_code.co_filename, frame.f_lineno
    if line not in _warned:
        warnings.warn(text, stacklevel=level)
        _warned.add(line)
