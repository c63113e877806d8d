"""managedmem.cupy: arguments everywhere that CuPy imports, allocators and pools on a GPU."""

import gc
import importlib

import pytest

import managedmem
from constants import EMULATED, MIB, PAGE
from managedmem import CUDAError, Device, Host, ManagedBuffer, MigrationPolicy
from programs import run_python

cupy = pytest.importorskip("cupy", reason="needs CuPy")
mm_cupy = importlib.import_module("managedmem.cupy")

on_gpu = pytest.mark.skipif(
    EMULATED or not cupy.cuda.is_available(), reason="needs CuPy with a GPU and its driver"
)
FACTORIES = [mm_cupy.make_allocator, mm_cupy.managed_mempool]
PETABYTE = 1 << 50


def memory_of(array):
    """The array's own bytes; CuPy's interface would only describe its extent."""
    return ManagedBuffer.from_handle(array.data.ptr, array.nbytes, owner=array)


def is_managed(address):
    """What the driver says of the address now; freed memory is not managed."""
    return ManagedBuffer.from_handle(address, 1).is_managed


class TestArguments:
    @pytest.mark.parametrize("make", FACTORIES)
    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            ({"preferred_location": 0}, TypeError, "Device or Host"),
            ({"preferred_location": Host(numa_id=99)}, ValueError, "no NUMA node 99"),
            ({"accessed_by": None}, TypeError, "not iterable"),
            ({"accessed_by": [Host(0)]}, ValueError, "NUMA host"),
            ({"read_mostly": 1}, TypeError, "bool"),
            ({"policy": Host()}, TypeError, "policy must be a MigrationPolicy"),
            ({"policy": MigrationPolicy(), "read_mostly": True}, ValueError, "but not both"),
        ],
        ids=repr,
    )
    def test_are_checked_when_the_allocator_is_made(self, make, arguments, error, text):
        with pytest.raises(error, match=text):
            make(**arguments)

    @pytest.mark.parametrize("make", FACTORIES)
    def test_are_keyword_only(self, make):
        with pytest.raises(TypeError):
            make(Host())

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("make", FACTORIES)
    def test_the_emulated_driver_is_refused(self, make):
        with pytest.raises(RuntimeError, match="emulated driver"):
            make(preferred_location=Host(), accessed_by=[Device(0)], read_mostly=True)

    @pytest.mark.emulator_only
    def test_what_the_driver_refuses_is_known_when_the_allocator_is_made(self):
        from managedmem import emulator

        emulator.fail("cuMemAdvise", code=719)
        with pytest.raises(CUDAError) as caught:
            mm_cupy.make_allocator(preferred_location=Host())
        assert caught.value.code == 719

    def test_everything_public_is_documented(self):
        for name in mm_cupy.__all__:
            assert getattr(mm_cupy, name).__doc__


@pytest.fixture
def use():
    """`use(function)`: CuPy allocates with it until the test ends."""
    before = cupy.cuda.get_allocator()
    yield cupy.cuda.set_allocator
    gc.collect()
    cupy.cuda.set_allocator(before)
    cupy.cuda.runtime.deviceSynchronize()


@on_gpu
class TestAllocators:
    def test_give_managed_memory(self, use):
        use(mm_cupy.allocator)
        array = cupy.arange(1000, dtype="f4")
        assert memory_of(array).is_managed
        assert array.data.ptr % PAGE == 0
        assert array.sum().item() == 499500
        assert array.device == cupy.cuda.Device(0)

    def test_give_their_advice(self, use):
        use(
            mm_cupy.make_allocator(
                preferred_location=Host(), accessed_by=[Device(0)], read_mostly=True
            )
        )
        memory = memory_of(cupy.zeros(1000))
        assert memory.preferred_location is Host()
        assert memory.accessed_by == {Device(0)}
        assert memory.read_mostly is True

    def test_free_with_the_last_array(self, use):
        use(mm_cupy.allocator)
        array = cupy.zeros(1000)
        part, address = array[10:], array.data.ptr
        del array
        gc.collect()
        assert is_managed(address)
        assert part.sum().item() == 0
        del part
        gc.collect()
        assert not is_managed(address)

    def test_may_be_asked_for_nothing(self, use):
        use(mm_cupy.make_allocator(preferred_location=Host()))
        assert cupy.empty(0).data.ptr == 0
        assert mm_cupy.allocator(0).ptr == 0

    def test_say_that_there_is_no_memory_as_cupy_does(self):
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError) as caught:
            mm_cupy.allocator(PETABYTE)
        assert caught.value.status == 2
        assert "1125899906842624 bytes" in str(caught.value.__cause__)
        assert cupy.ones(10).sum().item() == 10

    def test_outlive_the_interpreter(self):
        done = run_python(
            """
            import cupy, managedmem.cupy
            pool = managedmem.cupy.managed_mempool()
            cupy.cuda.set_allocator(pool.malloc)
            array = cupy.ones(1000)
            cupy.cuda.set_allocator(managedmem.cupy.allocator)
            other = cupy.ones(1000)
            """,
            driver="cuda",
        )
        assert "Exception ignored" not in done.stderr


@on_gpu
class TestPool:
    @pytest.fixture
    def pool(self, use):
        pool = mm_cupy.managed_mempool(preferred_location=Device(0))
        use(pool.malloc)
        yield pool
        gc.collect()
        for number in range(Device.count()):  # the pool keeps blocks for each device
            with cupy.cuda.Device(number):
                pool.free_all_blocks()

    def test_gives_each_array_pages_of_its_own(self, pool):
        big = cupy.empty(MIB, "u1")
        del big  # what follows is cut from its block
        arrays = [cupy.zeros(10 + n, "u1") for n in range(5)]
        pages = [array.data.ptr // PAGE for array in arrays]
        assert all(array.data.ptr % PAGE == 0 for array in arrays)
        assert len(set(pages)) == 5
        assert all(memory_of(array).preferred_location is Device(0) for array in arrays)

    def test_is_one_of_cupys(self, pool):
        assert isinstance(pool, cupy.cuda.MemoryPool)
        array = cupy.zeros(1000, "u1")
        assert pool.used_bytes() == PAGE
        address = array.data.ptr
        del array
        assert pool.used_bytes() == 0
        assert cupy.zeros(PAGE, "u1").data.ptr == address
        pool.free_all_blocks()
        assert pool.total_bytes() == 0
        assert not is_managed(address)

    def test_may_be_asked_for_nothing(self, pool):
        assert cupy.empty((0, 4)).size == 0

    def test_frees_what_it_keeps_before_it_gives_up(self, pool):
        kept = cupy.zeros(MIB, "u1")
        address = kept.data.ptr
        del kept
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            cupy.empty(PETABYTE, "u1")
        assert not is_managed(address)

    def test_prefetch_moves_one_array_and_not_its_neighbours(self, pool):
        a, b, c = (cupy.zeros(1000) for _ in range(3))
        for array in (a, b, c):
            mm_cupy.prefetch(array, Device(0))
        mm_cupy.prefetch(b, Host())
        cupy.cuda.runtime.deviceSynchronize()
        assert memory_of(a).last_prefetch_location is Device(0)
        assert memory_of(b).last_prefetch_location is Host()
        assert memory_of(c).last_prefetch_location is Device(0)

    def test_advice_reaches_one_array_and_not_its_neighbours(self, pool):
        arrays = [cupy.zeros(1000) for _ in range(3)]
        mm_cupy.advise(arrays[1], "set_read_mostly")
        assert [memory_of(array).read_mostly for array in arrays] == [False, True, False]
        mm_cupy.advise(arrays, "set_preferred_location", Host())
        assert all(memory_of(array).preferred_location is Host() for array in arrays)

    @pytest.mark.parametrize("cut", [slice(None, None, 3), slice(None, None, -1)], ids=repr)
    def test_strided_views_cover_their_extent(self, pool, cut):
        array = cupy.zeros(4 * PAGE, "u1")
        mm_cupy.prefetch(array, Device(0))
        mm_cupy.prefetch(array[PAGE : 3 * PAGE][cut], Host())
        cupy.cuda.runtime.deviceSynchronize()
        pages = [memory_of(array[n * PAGE : (n + 1) * PAGE]) for n in range(4)]
        places = [page.last_prefetch_location for page in pages]
        assert places == [Device(0), Host(), Host(), Device(0)]

    def test_prefetch_between_kernels_of_the_current_stream(self, pool):
        array = cupy.zeros(4 * MIB, "f4")
        with cupy.cuda.Stream(non_blocking=True):
            for number in range(5):
                array += 1
                mm_cupy.prefetch(array, Host() if number % 2 else Device(0))
            total = float(array.sum())
        assert total == 5 * array.size
        assert memory_of(array).last_prefetch_location is Device(0)

    def test_another_stream_can_be_named(self, pool, stream):
        array = cupy.zeros(1000)
        cupy.cuda.runtime.deviceSynchronize()
        mm_cupy.prefetch([array], Host(), stream=stream, defer=True)
        stream.sync()
        assert memory_of(array).last_prefetch_location is Host()

    def test_a_capturing_current_stream_is_refused(self, pool):
        """Nothing would be refused on another stream."""
        array = cupy.zeros(1000)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            try:
                with pytest.raises(CUDAError, match="captur"):
                    mm_cupy.prefetch(array, Host())
            finally:
                stream.end_capture()

    def test_plain_memory_is_refused(self, use):
        use(cupy.cuda.MemoryPool().malloc)
        array = cupy.zeros(1000)
        with pytest.raises(ValueError, match="plain device memory"):
            mm_cupy.prefetch(array, Host())
        assert cupy.ones(10).sum().item() == 10

    def test_pools_of_two_devices(self, pool, device1):
        with cupy.cuda.Device(1):
            array = cupy.zeros(1000)
            assert memory_of(array).is_managed
            mm_cupy.prefetch(array, device1)
            cupy.cuda.runtime.deviceSynchronize()
            assert array.sum().item() == 0
        assert array.device == cupy.cuda.Device(1)
        assert managedmem.Device() is Device(0)
