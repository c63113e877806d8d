"""Memory of cuda.core's own resources, on the emulated driver and on a GPU.

On the emulated driver its loader is shown a folder with a libcuda.so.1.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import managedmem
from constants import EMULATED

CORE = """
import gc, sys, threading, warnings
import cuda.core as core
import managedmem
from managedmem import *

device = core.Device(0)
device.set_current()
default = core.LEGACY_DEFAULT_STREAM

class Counting(core.MemoryResource):
    "A resource as users write one: over a pool, and counting."
    def __init__(self):
        self.pool, self.streams = core.DeviceMemoryResource(0), []
        self.out = {}
    def allocate(self, size, *, stream):
        buffer = self.pool.allocate(size, stream=stream)
        self.out[int(buffer.handle)] = buffer
        return core.Buffer.from_handle(buffer.handle, size, mr=self, stream=stream)
    def deallocate(self, ptr, size, *, stream):
        self.out.pop(int(ptr)).close(stream)
        self.streams.append(int(stream.handle))
    is_device_accessible = True
    is_host_accessible = False
    device_id = 0

mr = Counting()

def lend(size=4096, **more):
    buffer = mr.pool.allocate(size, stream=default)
    mr.out[int(buffer.handle)] = buffer
    return ManagedBuffer.from_handle(int(buffer.handle), size, mr=mr, **more)
"""


CORE_ENDS = {
    "close": "lend().close()",
    "with": "with lend(): pass",
    "drop": "lend()",
    "cycle": "c = [lend()]; c.append(c); del c; gc.collect()",
    "cycle with the resource": "mr.buffer = lend(); mr.me = mr; out, streams = mr.out, mr.streams\n"
    "class mr: pass\n"
    "mr.out, mr.streams = out, streams\ngc.collect()",
    "thread": "box = [lend(), lend()]\n"
    "t = threading.Thread(target=lambda: (box.pop().close(), box.clear()))\n"
    "t.start(); t.join(); mr.streams.pop()",
}


def run_core(code, tmp_path):
    """Run code after CORE in a process in which cuda.core finds the same driver."""
    pytest.importorskip("cuda.core", reason="needs cuda.core")
    env = dict(os.environ)
    if EMULATED:
        library = managedmem._managedmem._driver_info()["path"]
        (tmp_path / "libcuda.so.1").symlink_to(library)
        env["LD_LIBRARY_PATH"] = str(tmp_path)
    env["PYTHONPATH"] = str(Path(managedmem.__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-c", CORE + code], env=env, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


class TestCudaCore:
    @pytest.mark.parametrize("name", CORE_ENDS)
    def test_gets_its_own_default_stream(self, name, tmp_path):
        run_core(CORE_ENDS[name] + "\nassert mr.out == {}\nassert mr.streams == [1]", tmp_path)

    def test_gets_streams_of_any_kind(self, tmp_path):
        run_core(
            """
with Stream() as stream:
    other = core.PER_THREAD_DEFAULT_STREAM
    lend(stream=stream).close()
    lend().close(stream)
    lend(stream=other).close()
    buffer = lend()
    buffer.set_deallocation_stream(other)
    del buffer
    lend(stream=2).close()
    assert mr.streams == [stream.handle] * 2 + [int(other.handle)] * 2 + [2], mr.streams
""",
            tmp_path,
        )

    def test_its_options_say_the_same_here(self, tmp_path):
        """And its buffers are the sides of copies."""
        run_core(
            """
from cuda.core.utils import CopyOptions, MemcpySrcAccessOrder as Order
a, b = empty(8192), empty(8192)
a.fill(5); b.fill(0)
for order in (None, *Order):
    options = CopyOptions(order or "any", core.Host(), core.Device(0))
    b.copy_from(a, stream=default, options=options)
    assert b.copy_to(a, options=options) is a
    lent = mr.pool.allocate(8192, stream=default)
    managedmem.copy(a, lent, order=order or "any", src_location=core.Host())
    b.fill(0)
    managedmem.copy([lent], [b], dst_location=device)
    Device(0).sync()
    assert bytes(b) == bytes([5]) * 8192
    lent.close(default)
with DeviceMemoryResource(0, core.DeviceMemoryResourceOptions(max_size=1 << 26)) as bounded:
    assert bounded.max_size == 1 << 26 and not bounded.is_ipc_enabled
    bounded.allocate(8192).close()
    try:
        bounded.allocate(1 << 29)
    except CUDAOutOfMemoryError:
        Device(0).sync()
    else:
        raise AssertionError("no bound")
""",
            tmp_path,
        )

    @pytest.mark.parametrize(
        "make",
        [
            "core.DeviceMemoryResource(0)",
            "core.DeviceMemoryResource(0, core.DeviceMemoryResourceOptions())",
            "core.ManagedMemoryResource(core.ManagedMemoryResourceOptions())",
            "core.LegacyPinnedMemoryResource()",
        ],
    )
    def test_copy_to_takes_its_buffers(self, make, tmp_path):
        run_core(
            f"""
mr = {make}
source = empty(4096)
source.fill(7)
Device().sync()
class Lender(Counting):
    "Lends what we allocate, and allocates what cuda.core's resource does."
    def allocate(self, size, *, stream):
        return mr.allocate(size, stream=stream)
    def deallocate(self, ptr, size, *, stream):
        self.streams.append(int(stream.handle))
lender = Lender()
with Stream() as stream:
    buffer = ManagedBuffer.from_handle(source.handle, 4096, mr=lender, stream=stream)
    copy = buffer.copy_to(stream=stream)
    assert isinstance(copy.owner, core.Buffer), copy.owner
    assert copy.memory_resource is lender
    result = empty(4096)
    result.copy_from(copy.owner, stream=stream)
    stream.sync()
    assert bytes(result) == bytes([7]) * 4096
    copy.close()
    assert copy.owner is None
    buffer.close()
    assert lender.streams == [stream.handle]
    stream.sync()
""",
            tmp_path,
        )

    def test_its_pools_take_memory_back(self, tmp_path):
        """A pool as the resource, and the memory that it allocates for copy_to()."""
        run_core(
            """
import ctypes
pool = core.ManagedMemoryResource(core.ManagedMemoryResourceOptions())
driver = ctypes.CDLL(capabilities().driver_path)
def raw():
    pointer = ctypes.c_uint64()
    assert 0 == driver.cuMemAllocFromPoolAsync(
        ctypes.byref(pointer), ctypes.c_size_t(4096), ctypes.c_void_p(int(pool.handle)),
        ctypes.c_void_p(1))
    return ManagedBuffer.from_handle(pointer.value, 4096, mr=pool)
raw().close()
raw()
buffer = raw()
with Stream() as stream:
    copy = buffer.copy_to(stream=stream)
    assert copy.memory_resource is pool
    copy.close()
    stream.sync()
box = [buffer]
del buffer, copy
t = threading.Thread(target=box.clear); t.start(); t.join()
Device().sync()
assert pool.attributes.used_mem_current == 0, pool.attributes
""",
            tmp_path,
        )

    def test_live_buffers_at_exit(self, tmp_path):
        """cuda.core imports modules in its calls. At exit that fails, and is not reported."""
        run_core("buffer = lend()", tmp_path)
