"""Compares the memory that offload() needs with what devices and host have, before any move."""

from __future__ import annotations

import torch

from managedmem._limits import host_available
from managedmem.torch._offload_arguments import DeviceModule
from managedmem.torch._offload_places import Target, is_home
from managedmem.torch._tensors import Found

_RESERVE = 5  # a fifth of what is free stays for activations


def bytes_of_budget(budget: int | None, modules: list[DeviceModule]) -> int:
    """The budget in bytes; without one, the free memory of the fullest device, less a reserve."""
    return budget if budget is not None else min(left_free(m.target) for m in modules)


def left_free(target: Target) -> int:
    """The free memory of a device, less the reserve."""
    free = target.free()
    return max(1, free - free // _RESERVE)


def check_room(modules: list[DeviceModule], budget: int, suspendable: bool) -> None:
    """Raise if a device cannot hold its budget, or the host the rest.

    With `suspendable`, parameters that are on the device already need new memory as well.
    """
    at_home = 0
    for target, tensors in _by_target(modules).items():
        total = sum(tensor.nbytes for _, tensor in tensors)
        there = sum(t.nbytes for _, t in tensors if t.is_cuda and t.device == target.place)
        needed = max(0, min(budget, total) - (0 if suspendable else there))
        free = target.free()
        if needed > free:
            raise MemoryError(
                f"offload() needs {needed:,} bytes of {target.device} for parameters within the "
                f"budget of {budget:,}, and {free:,} are free: give a smaller budget, or 'auto'"
            )
        if needed > target.device.memory_info.free:
            torch.cuda.empty_cache()  # gives the driver what torch keeps for later
        at_home += max(0, total - budget - sum(t.nbytes for _, t in tensors if is_home(t)))
    check_host(at_home, budget)


def check_host(at_home: int, budget: int) -> None:
    """Raise if the host has no room for these bytes of parameters."""
    available = host_available()
    if available is not None and at_home > available:
        raise MemoryError(
            f"offload() needs {at_home:,} bytes of host memory for parameters beyond the budget of "
            f"{budget:,}, and {available:,} are available: give a larger budget"
        )


def _by_target(modules: list[DeviceModule]) -> dict[Target, Found]:
    result: dict[Target, Found] = {}
    for own in modules:
        result.setdefault(own.target, []).extend(own.tensors)
    return result
