"""Graphs that streams capture, made and launched by calls of the driver."""

import contextlib
import ctypes

from driver import CAPTURE_GLOBAL, raw_driver
from layers import SIZE


class Graph:
    """An executable graph of the work that a stream is given in a block."""

    def __init__(self):
        self.handle = ctypes.c_void_p()

    @contextlib.contextmanager
    def capture(self, stream):
        driver, graph = raw_driver(), ctypes.c_void_p()
        handle = ctypes.c_void_p(stream.handle)
        assert driver.cuStreamBeginCapture_v2(handle, CAPTURE_GLOBAL) == 0
        try:
            yield
        finally:
            ended = driver.cuStreamEndCapture(handle, ctypes.byref(graph))
        assert ended == 0
        made = driver.cuGraphInstantiateWithFlags(
            ctypes.byref(self.handle), graph, ctypes.c_ulonglong(0)
        )
        assert made == 0
        assert driver.cuGraphDestroy(graph) == 0

    def launch(self, stream):
        assert raw_driver().cuGraphLaunch(self.handle, ctypes.c_void_p(stream.handle)) == 0
        stream.sync()

    def destroy(self):
        if self.handle:
            assert raw_driver().cuGraphExecDestroy(self.handle) == 0
            self.handle = ctypes.c_void_p()


def copy(target, source, stream):
    """A copy that stands for a kernel, also in a capture."""
    driver = raw_driver()
    addresses = (ctypes.c_uint64(target), ctypes.c_uint64(source))
    assert driver.cuMemcpyAsync(*addresses, ctypes.c_size_t(SIZE), ctypes.c_void_p(stream)) == 0


def capture_reads(graph, groups, results, stream, is_resident=True):
    """Capture uses that read groups, in frames or all at home."""
    with graph.capture(stream):
        for group, result in zip(groups, results, strict=True):
            with group.use(stream=stream) as use:
                assert use.is_resident == is_resident
                copy(result.handle, use.arrays[0].handle, stream.handle)
