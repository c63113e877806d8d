"""What the commands of ``python -m managedmem`` share: choosing the driver, and aligned text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import managedmem

VARIABLE = "MANAGEDMEM_DRIVER"


def apply_request(request: str | None) -> None:
    """Make ``--cuda`` or ``--emulator`` win over the environment; None leaves that as it is."""
    if request is not None:
        # Read at the first use of the driver, which no command has made at this point.
        os.environ[VARIABLE] = request


def why_chosen(request: str | None) -> str:
    """Say in a few words who named the driver, empty when nobody did."""
    if request is not None:
        return f"as --{request} asks"
    named = os.environ.get(VARIABLE)
    return f"as {VARIABLE}={printable(named)} asks" if named else ""


def open_driver(request: str | None) -> tuple[Mapping[str, Any], str]:
    """Open the driver that was asked for, else CUDA, else the emulated one.

    Returns ``driver_info()`` and the reason for this driver. Only a machine without a usable CUDA
    driver gets the emulated one unasked; a driver that was named and is not there stays an error,
    and so does one that is too old.
    """
    apply_request(request)
    reason = why_chosen(request)
    try:
        return managedmem.driver_info(), reason
    except managedmem.DriverNotFoundError:
        if reason:
            raise
    managedmem.emulator.enable()
    return managedmem.driver_info(), "chosen because no usable CUDA driver with a GPU was found"


def printable(text: object) -> str:
    """The text with escapes for bytes of a path that cannot be printed."""
    return str(text).encode(errors="backslashreplace").decode()


def describe_driver(info: Mapping[str, Any], reason: str) -> str:
    """One line on the driver in use: emulated or real, which, and why."""
    version, count = info["version_string"], info["device_count"]
    devices = f"{count} device" if count == 1 else f"{count} devices"
    if info["emulated"]:
        text = f"EMULATED driver (CUDA {version}, {devices})"
    else:
        text = f"{printable(info['path'])} (CUDA {version}, {devices})"
    return f"{text}, {reason}" if reason else text


def table(rows: Iterable[Sequence[object]], indent: str = "  ") -> str:
    """Rows as text in columns that are as wide as their widest cell; the last one runs free."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in cells), strict=True)]
    lines = []
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)]
        lines.append((indent + "  ".join([*padded, row[-1]])).rstrip())
    return "\n".join(lines)


def size_text(count: int) -> str:
    """A number of bytes in the largest unit that leaves at least one before the point."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{count} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
