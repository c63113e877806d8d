"""Budgets of device memory, as bytes and as text, and the host memory that is available."""

from __future__ import annotations

import operator
import re
from pathlib import Path
from typing import SupportsIndex


def read_budget(budget: SupportsIndex | str, name: str = "budget") -> int | None:
    """The bytes that an argument of this name gives; None for "auto"."""
    if isinstance(budget, str):
        return None if budget.strip().lower() == "auto" else _bytes_in(budget, name)
    if isinstance(budget, bool) or not hasattr(budget, "__index__"):
        raise TypeError(_needed(name, budget))
    limit = operator.index(budget)
    if limit <= 0:
        raise ValueError(f"{name} must be a positive number of bytes, got {limit}")
    return limit


def _needed(name: str, given: object) -> str:
    return f"{name} must be a number of bytes or text such as '4 GiB' or 'auto', got {given!r}"


def _bytes_in(text: str, name: str) -> int:
    """The bytes of a text such as "2.5 GiB"."""
    digits = r"\d{1,1000}"
    matched = re.fullmatch(
        rf"\s*({digits})(?:\.({digits}))?\s*([kmgt]?)(i?)b\s*", text, re.IGNORECASE
    )
    nbytes = 0
    if matched is not None:
        power = " kmgt".index(matched[3].lower() or " ")
        unit, places = (1024 if matched[4] else 1000) ** power, matched[2] or ""
        nbytes = int(matched[1] + places) * unit // 10 ** len(places)
    if nbytes <= 0:
        raise ValueError(_needed(name, text))
    return nbytes


def host_available() -> int | None:
    """Bytes of host memory that are available, within the limit of a container; None if unknown."""
    limits = [limit for limit in (_available(), _left_in_container()) if limit is not None]
    return min(limits, default=None)


def host_limit() -> int | None:
    """Bytes of host memory in all, within the limit of a container; None if unknown."""
    limits = [limit for limit in (_of_system("MemTotal"), _of_container()[0]) if limit is not None]
    return min(limits, default=None)


def _available() -> int | None:
    return _of_system("MemAvailable")


def _of_system(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(sizes[0]) * 1024 if sizes else None


def _left_in_container() -> int | None:
    return _of_container()[1]


def _of_container() -> tuple[int | None, int | None]:
    """The limit of the control group, of version 2 or 1, and the bytes that are left in it.

    Cached files that need no writing back count as free, because the kernel drops them.
    """
    for folder, limit, used, prefix in (
        (".", "memory.max", "memory.current", ""),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        root = Path("/sys/fs/cgroup") / folder
        try:
            most = (root / limit).read_text().strip()
            if most == "max":
                continue
            lines = (root / "memory.stat").read_text().splitlines()
            counts = {name: int(count) for name, count in map(str.split, lines)}
            cached = sum(counts.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active"))
            dirty = counts.get("file_dirty", counts.get(f"{prefix}dirty", 0))
            taken = int((root / used).read_text()) - max(0, cached - dirty)
            return int(most), max(0, int(most) - max(0, taken))
        except (OSError, ValueError):
            continue
    return None, None
