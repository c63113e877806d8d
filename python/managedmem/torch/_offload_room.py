"""The memory that offload() needs, beside what devices and the host have, before anything moves."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from managedmem.torch._offload_places import Target
from managedmem.torch._tensors import Found

_RESERVE = 5  # a fifth of what is free stays for activations


def bytes_of_budget(budget: int | None, homes: list[tuple[Target, nn.Module, str, Found]]) -> int:
    """The budget in bytes; without one, what is free on the fullest device, less a reserve."""
    if budget is not None:
        return budget
    free = min(target.free() for target, *_ in homes)
    return max(1, free - free // _RESERVE)


def check_room(homes: list[tuple[Target, nn.Module, str, Found]], budget: int) -> None:
    """Raise if a device cannot hold its budget, or the host the rest."""
    at_home = 0
    for target, found in _by_target(homes).items():
        total = sum(tensor.nbytes for _, tensor in found)
        there = sum(t.nbytes for _, t in found if t.is_cuda and t.device == target.place)
        needed = max(0, min(budget, total) - there)
        free = target.free()
        if needed > free:
            raise MemoryError(
                f"offload() needs {needed:,} bytes of {target.device} for parameters within the "
                f"budget of {budget:,}, and {free:,} are free: give a smaller budget, or 'auto'"
            )
        if needed > target.device.memory_info.free:
            torch.cuda.empty_cache()  # the driver does not have what torch keeps for later
        at_home += max(0, total - budget)
    available = host_available()
    if available is not None and at_home > available:
        raise MemoryError(
            f"offload() needs {at_home:,} bytes of host memory for parameters beyond the budget of "
            f"{budget:,}, and {available:,} are available: give a larger budget"
        )


def _by_target(homes: list[tuple[Target, nn.Module, str, Found]]) -> dict[Target, Found]:
    result: dict[Target, Found] = {}
    for target, _, _, found in homes:
        result.setdefault(target, []).extend(found)
    return result


def host_available() -> int | None:
    """Bytes of host memory that can be had, within the limit of a container; None if unknown."""
    found = [each for each in (_available(), _left_in_container()) if each is not None]
    return min(found, default=None)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(sizes[0]) * 1024 if sizes else None


def _left_in_container() -> int | None:
    """What the limit of the control group leaves, of version 2 or 1."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        root = Path("/sys/fs/cgroup")
        try:
            most = (root / limit).read_text().strip()
            if most != "max":
                return max(0, int(most) - int((root / used).read_text()))
        except (OSError, ValueError):
            continue
    return None
