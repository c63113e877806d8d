"""Suspending the memory that offload() has on devices, and resuming it, for all lanes or none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from operator import methodcaller

import torch

from managedmem._limits import host_available
from managedmem.torch._offload_lane import DeviceLane
from managedmem.torch._offload_places import Target


def check_suspendable(suspendable: object) -> None:
    """Raise TypeError for an argument of offload() that is not a bool."""
    if not isinstance(suspendable, bool):
        raise TypeError(f"suspendable must be True or False, got {suspendable!r}")


def suspend(lanes: Sequence[DeviceLane]) -> None:
    """Give the memory of all lanes back to the driver; after an error, all is as it was."""
    if present := [memory for lane in lanes for memory in lane.memory(False)]:
        _check_host(lanes)
        _change(lanes, present, methodcaller("suspend"), methodcaller("resume"))


def resume(lanes: Sequence[DeviceLane]) -> None:
    """Take memory for all lanes again; after an error, all is as it was."""
    if away := [memory for lane in lanes for memory in lane.memory(True)]:
        _check_room(lanes)
        _change(lanes, away, methodcaller("resume"), methodcaller("suspend"))


def _change(
    lanes: Sequence[DeviceLane],
    memories: Sequence[object],
    change: Callable[[object], object],
    undo: Callable[[object], object],
) -> None:
    """Change each memory, when the devices have no more work; undo all after an error."""
    try:
        for lane in lanes:
            lane.target.wait()
        for memory in memories:
            change(memory)
    except BaseException:
        for memory in memories:
            with contextlib.suppress(Exception):  # the memory works as it is, too
                undo(memory)
        raise


def _check_host(lanes: Sequence[DeviceLane]) -> None:
    """Raise MemoryError if the host has no room for the parts that stay on the device."""
    slabs = (slab for lane in lanes for slab in lane.slabs())
    needed = sum(slab.nbytes for slab in slabs if not slab.has_home)
    available = host_available()
    if available is not None and needed > available:
        raise MemoryError(
            f"suspend() needs {needed:,} bytes of host memory for the parts that stay on the "
            f"device, and {available:,} are available: free other memory, or stream more parts"
        )


def _check_room(lanes: Sequence[DeviceLane]) -> None:
    """Raise MemoryError with the sum if a device has no room; torch gives back what it keeps."""
    needed: dict[Target, int] = {}
    for lane in lanes:
        needed[lane.target] = needed.get(lane.target, 0) + lane.bytes_suspended()
    for target, nbytes in needed.items():
        free = target.free()
        if nbytes > free:
            raise MemoryError(
                f"resume() needs {nbytes:,} bytes of {target.device}, and {free:,} are free: free "
                "other memory first. The module stays suspended"
            )
        if nbytes > target.device.memory_info.free:
            torch.cuda.empty_cache()  # gives the driver what torch keeps for later
