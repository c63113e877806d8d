"""The line of Python that calls this package, for warnings."""

from __future__ import annotations

import sys
from types import FrameType


def caller() -> tuple[FrameType, int]:
    """The first frame outside of this package, and its stacklevel for the caller of this function.

    Frames of this package are skipped, because its own functions call the extension too, such as
    zeros() and the pools of torch and CuPy.
    """
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_own(frame.f_globals.get("__name__")):
        level += 1
        frame = frame.f_back
    return frame, level


def _is_own(name: object) -> bool:
    return isinstance(name, str) and name.partition(".")[0] == "managedmem"
