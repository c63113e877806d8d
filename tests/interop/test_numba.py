"""managedmem.numba: numba-cuda's device arrays in managed memory.

numba takes its memory manager once a process, so what runs on a GPU runs in processes of its own.
"""

import importlib

import pytest

from constants import EMULATED, PAGE
from managedmem import Device, ManagedBuffer
from programs import run_python

cuda = pytest.importorskip("numba.cuda", reason="needs numba-cuda")
mm_numba = importlib.import_module("managedmem.numba")

on_gpu = pytest.mark.skipif(
    EMULATED or not cuda.is_available(), reason="needs numba-cuda with a GPU and its driver"
)

PRELUDE = """
import gc, os
os.environ["NUMBA_CUDA_MEMORY_MANAGER"] = "managedmem.numba"
import numpy
from numba import cuda
import managedmem
from managedmem import Device, Host, ManagedBuffer

def is_managed(address):
    return ManagedBuffer.from_handle(address, 1).is_managed

def address_of(array):
    return array.__cuda_array_interface__["data"][0]
"""


def run(code):
    done = run_python(PRELUDE + code, driver="cuda")
    assert "Exception ignored" not in done.stderr, done.stderr


class Context:
    """All that a manager asks of numba's context: here, which device it is of."""

    class device:
        id = 0


@pytest.fixture
def manager():
    return mm_numba.ManagedMemoryManager(context=Context())


class TestManager:
    def test_is_what_numba_takes(self):
        assert mm_numba._numba_memory_manager is mm_numba.ManagedMemoryManager
        assert issubclass(mm_numba.ManagedMemoryManager, cuda.BaseCUDAMemoryManager)
        assert mm_numba.ManagedMemoryManager(context=None).interface_version == 1

    @pytest.mark.emulator_only
    def test_refuses_the_emulated_driver(self, manager):
        with pytest.raises(RuntimeError, match="emulated driver"):
            manager.initialize()

    def test_allocates_managed_memory_on_pages_of_its_own(self, manager):
        pointers = [manager.memalloc(100) for _ in range(2)]
        addresses = [int(pointer.device_pointer) for pointer in pointers]
        assert pointers[0].size == 100
        assert all(ManagedBuffer.from_handle(address, 100).is_managed for address in addresses)
        assert addresses[0] // PAGE != addresses[1] // PAGE
        address = addresses[0]
        pointers.clear()
        assert not ManagedBuffer.from_handle(address, 100).is_managed

    def test_views_keep_the_memory(self, manager):
        pointer = manager.memalloc(100)
        address = int(pointer.device_pointer)
        view = pointer.view(10, 20)
        del pointer
        assert ManagedBuffer.from_handle(address, 100).is_managed
        del view
        assert not ManagedBuffer.from_handle(address, 100).is_managed

    def test_frees_nothing_while_cleanup_is_deferred(self, manager):
        first, second = manager.memalloc(100), manager.memalloc(100)
        buffers = [ManagedBuffer.from_handle(int(p.device_pointer), 100) for p in (first, second)]
        with manager.defer_cleanup():
            del first
            with manager.defer_cleanup():
                del second
            assert all(buffer.is_managed for buffer in buffers)
        again = [ManagedBuffer.from_handle(buffer.handle, 100) for buffer in buffers]
        assert not any(buffer.is_managed for buffer in again)

    def test_says_that_there_is_no_memory_as_numba_does(self, manager):
        from numba.cuda.cudadrv.driver import CudaAPIError

        with pytest.raises(CudaAPIError, match="out of memory") as caught:
            manager.memalloc(1 << 50)
        assert caught.value.code == 2

    def test_knows_the_memory_of_the_device(self, manager):
        info = manager.get_memory_info()
        assert info.total == Device(0).memory_info.total
        assert 0 < info.free <= info.total

    def test_has_no_ipc(self, manager):
        with pytest.raises(NotImplementedError, match="IPC"):
            manager.get_ipc_handle(manager.memalloc(100))


@on_gpu
class TestOnGpu:
    def test_arrays_lie_in_managed_memory(self):
        """Without a kernel: numba cannot compile one with every version of NumPy."""
        run(
            """
host = numpy.arange(10_000, dtype="f4")
x = cuda.to_device(host)
assert is_managed(address_of(x))
managedmem.advise(x, "set_preferred_location", Device(0))
memory = ManagedBuffer.from_handle(address_of(x), x.nbytes, owner=x)
assert memory.preferred_location is Device(0)
stream = cuda.stream()
for location in (Host(), Device(0)):
    managedmem.prefetch(x, location, stream=stream)
    assert (x.copy_to_host(stream=stream) == host).all()
    assert memory.last_prefetch_location is location
x.copy_to_device(2 * host, stream=stream)
stream.synchronize()
assert (memory.view("f4").numpy() == 2 * host).all()
y = cuda.device_array((100, 100))
assert is_managed(address_of(y))
"""
        )

    def test_memory_goes_with_the_last_array(self):
        run(
            """
x = cuda.device_array(1000)
part, address = x[10:], address_of(x)
del x
gc.collect()
assert is_managed(address)
with cuda.defer_cleanup():
    del part
    gc.collect()
    assert is_managed(address)
assert not is_managed(address)
"""
        )

    def test_the_other_kinds_of_memory_stay_numbas(self):
        run(
            """
pinned = cuda.pinned_array(100)
mapped = cuda.mapped_array(100)
managed = cuda.managed_array(100)
managed[:] = 3
x = cuda.to_device(pinned)
assert not is_managed(mapped.device_ctypes_pointer.value)
assert is_managed(address_of(managed))
assert is_managed(address_of(x))
"""
        )

    def test_arrays_outlive_the_interpreter(self):
        run("x = cuda.to_device(numpy.ones(1000))")

    def test_can_be_set_by_hand_and_reports_a_lack_of_memory(self):
        run_python(
            """
            import managedmem.numba
            from numba import cuda
            from numba.cuda.cudadrv.driver import CudaAPIError
            cuda.set_memory_manager(managedmem.numba.ManagedMemoryManager)
            try:
                cuda.device_array(1 << 50, "u1")
            except CudaAPIError as error:
                assert error.code == 2, error
            else:
                raise AssertionError
            info = cuda.current_context().get_memory_info()
            assert info.total == managedmem.Device(0).memory_info.total
            assert cuda.to_device(__import__("numpy").ones(10)).copy_to_host().sum() == 10
            """,
            driver="cuda",
        )
