"""The driver of a command: the one that was asked for, and one line that describes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import managedmem
from managedmem._cli.text import printable

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


def describe_driver(info: Mapping[str, Any], reason: str) -> str:
    """One line on the driver in use: emulated or real, which, and why."""
    version, count = info["version_string"], info["device_count"]
    devices = f"{count} device" if count == 1 else f"{count} devices"
    if info["emulated"]:
        text = f"EMULATED driver (CUDA {version}, {devices})"
    else:
        text = f"{printable(info['path'])} (CUDA {version}, {devices})"
    return f"{text}, {reason}" if reason else text
