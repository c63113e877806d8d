"""The driver of a command: opens the requested one, and describes it in one line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import managedmem
from managedmem._cli.text import printable

VARIABLE = "MANAGEDMEM_DRIVER"


def apply_request(request: str | None) -> None:
    """Let ``--cuda`` or ``--emulator`` override the environment; None changes nothing."""
    if request is not None:
        # The first use of the driver reads it; no command has used the driver yet.
        os.environ[VARIABLE] = request


def choice_reason(request: str | None) -> str:
    """A few words on the option or variable that named the driver; empty if neither did."""
    if request is not None:
        return f"as --{request} asks"
    named = os.environ.get(VARIABLE)
    return f"as {VARIABLE}={printable(named)} asks" if named else ""


def open_driver(request: str | None) -> tuple[Mapping[str, Any], str]:
    """Open the requested driver; without a request CUDA's, or the emulated one where there is none.

    Returns ``_driver_info()`` and the reason for this driver. A requested driver that is missing,
    and any driver that is too old, is an error.
    """
    apply_request(request)
    reason = choice_reason(request)
    try:
        return managedmem._managedmem._driver_info(), reason
    except managedmem.DriverNotFoundError:
        if reason:
            raise
    managedmem.emulator.enable()
    reason = "chosen because no usable CUDA driver with a GPU was found"
    return managedmem._managedmem._driver_info(), reason


def describe_driver(info: Mapping[str, Any], reason: str) -> str:
    """One line on the driver in use: emulated or its path, its version, and the reason."""
    version, count = info["version_string"], info["device_count"]
    devices = f"{count} device" if count == 1 else f"{count} devices"
    if info["emulated"]:
        text = f"EMULATED driver (CUDA {version}, {devices})"
    else:
        text = f"{printable(info['path'])} (CUDA {version}, {devices})"
    return f"{text}, {reason}" if reason else text
