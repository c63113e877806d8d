"""Raw driver calls, for events that the library must notice but does not cause itself."""

import contextlib
import ctypes
import functools

from constants import PAGE

CAPTURE_RELAXED = 2
CAPTURE_GLOBAL = 0


def raw_driver():
    """The driver that the library opened, through ctypes."""
    import managedmem

    return _library(managedmem._managedmem._driver_info()["path"])


_library = functools.cache(ctypes.CDLL)  # each CDLL has function classes of its own


def checked(result):
    assert result == 0, f"raw driver call failed with {result}"


def make_context(ordinal=0):
    """A context that is not the primary one of the device, current in this thread."""
    context = ctypes.c_void_p()
    checked(raw_driver().cuCtxCreate_v2(ctypes.byref(context), 0, ordinal))
    return context


def destroy_context(context):
    checked(raw_driver().cuCtxDestroy_v2(context))


def pop_contexts(depth):
    """Shorten the stack of contexts to that depth.

    A push that acts, but is reported as failed, leaves its context on the stack, whose size is
    limited.
    """
    from managedmem import emulator

    context = ctypes.c_void_p()
    while emulator.live().context_depth > depth:
        checked(raw_driver().cuCtxPopCurrent_v2(ctypes.byref(context)))


class Capture:
    """A running stream capture; `result` is the status of its end (0: it survived)."""

    result = None


@contextlib.contextmanager
def capturing(stream, mode=CAPTURE_RELAXED):
    """Capture a graph on the stream while the block runs."""
    driver = raw_driver()
    handle = ctypes.c_void_p(stream.handle)
    graph = ctypes.c_void_p()
    checked(driver.cuStreamBeginCapture_v2(handle, mode))
    capture = Capture()
    try:
        yield capture
    finally:
        capture.result = driver.cuStreamEndCapture(handle, ctypes.byref(graph))
        if capture.result == 0 and graph:
            checked(driver.cuGraphDestroy(graph))


@contextlib.contextmanager
def _memory_of_driver(allocate, free, size):
    """The address of memory that these driver calls allocate and free."""
    import managedmem

    managedmem.Device(0).set_current()
    driver = raw_driver()
    pointer = ctypes.c_uint64()
    checked(getattr(driver, allocate)(ctypes.byref(pointer), ctypes.c_size_t(size)))
    try:
        yield pointer.value
    finally:
        checked(getattr(driver, free)(pointer))


def device_memory(size=PAGE):
    """The address of plain device memory, which no managed-memory operation may take."""
    return _memory_of_driver("cuMemAlloc_v2", "cuMemFree_v2", size)


def pinned_memory(size=PAGE):
    """The address of host memory that CUDA has pinned."""
    return _memory_of_driver("cuMemAllocHost_v2", "cuMemFreeHost", size)


def managed_memory(size=PAGE):
    """The address of managed memory that the library did not make; the caller frees it."""
    import managedmem

    managedmem.Device(0).set_current()
    pointer = ctypes.c_uint64()
    attach_global = 1
    checked(
        raw_driver().cuMemAllocManaged(
            ctypes.byref(pointer), ctypes.c_size_t(size), ctypes.c_uint(attach_global)
        )
    )
    return pointer.value
