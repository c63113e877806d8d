"""Bytes of malloc() in use, for tests that host memory does not grow."""

import ctypes
import functools

# glibc counts the freed blocks that a thread keeps, up to seven of a size, as blocks in use. Their
# number depends on the layout of the heap. Programs that count bytes run with this GLIBC_TUNABLES.
KEEP_NO_FREED_BLOCKS = "glibc.malloc.tcache_count=0"
SAMPLE = 1 << 12


class MallInfo(ctypes.Structure):
    """The result of glibc's mallinfo2(), from version 2.33 on."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@functools.cache
def reader():
    """A function that returns the bytes of malloc() in use, or None where nothing counts them."""
    c = ctypes.CDLL(None)
    if not hasattr(c, "mallinfo2"):
        return None
    c.mallinfo2.restype = MallInfo
    c.malloc.restype = ctypes.c_void_p
    c.free.argtypes = [ctypes.c_void_p]

    def used():
        info = c.mallinfo2()
        return info.uordblks + info.hblkhd

    before = used()
    block = c.malloc(SAMPLE)
    grown = used() - before
    c.free(block)
    return used if grown >= SAMPLE else None  # a sanitizer has a malloc() of its own
