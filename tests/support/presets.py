"""The extension's functions for other libraries' allocators, by their exported names."""

import ctypes

from managedmem import _managedmem

LIBRARY = ctypes.CDLL(_managedmem.__file__)


def functions(preferred_location=None, accessed_by=(), read_mostly=False, own_device=False):
    """`allocate(size, device)` and `free(pointer)` of a preset."""
    names = _managedmem._register_preset(preferred_location, accessed_by, read_mostly, own_device)
    allocate, free = (getattr(LIBRARY, name) for name in names)
    allocate.restype = ctypes.c_void_p
    allocate.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    free.restype = None
    free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    return (
        lambda size, device=0: allocate(size, device, None),
        lambda pointer: free(pointer, 0, 0, None),
    )
