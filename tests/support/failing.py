"""One attempt with a failing allocation, and its controls, for the sweeps of allocations.

This module and its imports use no driver, because first_uses.py tests the first use.
"""

import ctypes
import faulthandler
import json

import managedmem

KINDS = ("extension", "python")
MOST = 2000  # allocations of one operation


class Allocations:
    """The controls of allocations.c."""

    def __init__(self, path):
        self.library = ctypes.PyDLL(path)
        self.library.live.restype = ctypes.c_long
        self.library.arm.argtypes = [ctypes.c_long, ctypes.c_long]
        extension = ctypes.CDLL(managedmem._managedmem.__file__)
        self.replaced = self.library.watch_extension(address(extension.PyInit__managedmem))
        python = ctypes.pythonapi
        self.library.watch_python(
            address(python.PyMem_GetAllocator),
            address(python.PyMem_SetAllocator),
            address(python._PyEval_EvalFrameDefault),
        )
        self.disarm = self.library.disarm

    def arm(self, kind, n):
        self.library.arm(n if kind == "extension" else 0, n if kind == "python" else 0)

    def fired(self):
        return bool(self.library.fired())

    def live(self, kind):
        """How many blocks live."""
        return self.library.live(KINDS.index(kind))


def is_memory_error(error):
    """True for MemoryError and NumPy's subclass of it; False for CUDAOutOfMemoryError."""
    return issubclass(error, MemoryError) and not issubclass(error, managedmem.CUDAError)


def tell(*values):
    print(json.dumps(values), flush=True)


def address(function):
    return ctypes.cast(function, ctypes.c_void_p)


class Wrong(Exception):
    """A fault has an effect that it must not have."""


def attempt(allocations, operation, w, kind, n):
    """Runs the operation with the nth allocation of a kind failing.

    Returns (result, type of the exception, its text, whether the allocation was reached).
    """
    result = error = None
    text = ""
    try:
        try:
            allocations.arm(kind, n)
            result = operation.run(w)
        finally:
            allocations.disarm()
    except Exception as caught:
        error, text = type(caught), str(caught)
    return result, error, text, allocations.fired()


def prepare(library, defect=None):
    """The controls; `defect` names a defect of the extension that the sweep must find."""
    faulthandler.enable()
    allocations = Allocations(library)
    if defect:
        getattr(allocations.library, defect)()
    return allocations
