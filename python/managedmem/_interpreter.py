"""Whether this is the main interpreter: libraries and names of the process belong to it alone."""

from __future__ import annotations

from importlib import import_module


def is_main() -> bool:
    """True in the main interpreter."""
    try:
        c = import_module("ctypes")
    except ImportError:  # a subinterpreter with its own GIL, in Python 3.12
        return False
    get, number = c.pythonapi.PyInterpreterState_Get, c.pythonapi.PyInterpreterState_GetID
    get.restype, number.restype, number.argtypes = c.c_void_p, c.c_int64, [c.c_void_p]
    return bool(number(get()) == 0)
