"""`buf.numpy(copy=True)` and `result_cache`: copies of results into memory that is used again."""

import copy
import ctypes
import gc
import pickle

import pytest

import managedmem
from calls import names
from constants import KIB, MIB, PAGE
from contents import contents, pattern, write
from driver import CAPTURE_GLOBAL, CAPTURE_RELAXED, capturing, raw_driver
from managedmem import ManagedBuffer, emulator, result_cache
from programs import run_python
from races import race_over

numpy = pytest.importorskip("numpy", reason="needs NumPy")

SIZE = 256 * KIB
SMALLEST = 64 * KIB
BYTES = pattern(SIZE)


@pytest.fixture(autouse=True)
def own_cache():
    """Each test begins with an empty cache and the limit that a process begins with."""
    result_cache.clear()
    result_cache.max_nbytes = 256 * MIB
    yield
    result_cache.max_nbytes = 256 * MIB


@pytest.fixture
def result(alloc, device0):
    """A buffer with contents on the device."""
    buffer = alloc(SIZE)
    write(buffer, BYTES)
    buffer.prefetch(device0)
    return buffer


def address(array):
    return array.ctypes.data


class TestTheArray:
    @pytest.mark.parametrize("dtype", ["bool", "uint16", "float16", "float64", "complex64"])
    def test_has_the_dtype_shape_and_contents(self, result, dtype):
        view = result.view(dtype).view(dtype, (2, 16, SIZE // 32 // result.view(dtype).itemsize))
        array = view.numpy(copy=True)
        assert type(array) is numpy.ndarray
        assert (array.dtype, array.shape) == (numpy.dtype(dtype), view.shape)
        assert array.flags.c_contiguous and array.flags.writeable
        assert array.tobytes() == BYTES

    def test_of_a_part(self, result):
        part = result[PAGE + 1 : PAGE + 1 + SMALLEST]
        assert part.numpy(copy=True).tobytes() == BYTES[PAGE + 1 :][:SMALLEST]

    def test_has_memory_of_its_own(self, result):
        array = result.numpy(copy=True)
        array[:] = 1
        assert contents(result) == BYTES
        result.fill(2)
        managedmem.Device().sync()
        assert (array == 1).all()

    def test_does_not_keep_the_buffer_open(self, result):
        array = result.numpy(copy=True)
        result.close()
        assert array.tobytes() == BYTES

    def test_follows_the_work_on_the_stream(self, result, stream):
        for value in (5, 6):
            result.fill(value, stream=stream)
            assert (result.numpy(stream, copy=True) == value).all()

    @pytest.mark.emulator_only
    def test_the_pages_stay_on_the_device(self, result, device0):
        result.numpy(copy=True)
        assert emulator.residency(result) == device0
        assert result.last_prefetch_location is device0

    @pytest.mark.emulator_only
    def test_a_small_one_is_copied_by_the_host(self, result):
        with emulator.recording() as calls:
            array = result[: SMALLEST - 1].numpy(copy=True)
        assert "cuMemPrefetchAsync" in names(calls) and "cuMemHostAlloc" not in names(calls)
        assert array.tobytes() == BYTES[: SMALLEST - 1]

    def test_of_host_memory(self):
        source = numpy.arange(SIZE, dtype="u1")
        wrapped = ManagedBuffer.from_handle(source.ctypes.data, SIZE, owner=source)
        array = wrapped.numpy(copy=True)
        assert (array == source).all() and array.flags.owndata
        assert result_cache.nbytes == 0

    def test_of_device_memory_is_refused(self, device0):
        with managedmem.DeviceMemoryResource(device0) as resource:
            buffer = resource.allocate(SIZE)
            for copy in (False, True):
                with pytest.raises(ValueError, match=r"plain device memory; buf\.copy_to\(array\)"):
                    buffer.numpy(copy=copy)
            buffer.close()

    def test_of_a_closed_buffer_is_refused(self, result):
        result.close()
        with pytest.raises(RuntimeError, match="closed"):
            result.numpy(copy=True)

    def test_pickles_and_copies(self, result):
        array = result.numpy(copy=True)
        for other in (pickle.loads(pickle.dumps(array)), copy.copy(array), array.copy()):
            assert (other == array).all()
            other[:] = 0
        assert array.tobytes() == BYTES


class TestMemoryIsUsedAgain:
    def test_after_the_array(self, result):
        first = address(result.numpy(copy=True))
        gc.collect()
        array = result.numpy(copy=True)
        assert address(array) == first
        assert array.tobytes() == BYTES
        assert (result_cache.nbytes, result_cache.idle_nbytes) == (SIZE, 0)

    @pytest.mark.emulator_only
    def test_with_one_copy_and_one_wait(self, result, stream):
        result.numpy(stream, copy=True)
        with emulator.recording() as calls:
            result.numpy(stream, copy=True)
        work = [c for c in calls if not c.name.startswith("cuPointerGetAttribute")]
        assert names(work) == ["cuMemcpyAsync", "cuStreamSynchronize"]

    def test_not_while_a_view_of_the_array_lives(self, result):
        view = result.numpy(copy=True)[3:5]
        other = result.numpy(copy=True)
        other[:] = 0
        assert view.tobytes() == BYTES[3:5]
        assert result_cache.nbytes == 2 * SIZE

    def test_for_a_smaller_result_but_not_for_a_much_smaller_one(self, result):
        large = address(result.numpy(copy=True))
        array = result[: SIZE // 2 + PAGE].numpy(copy=True)
        assert address(array) == large
        del array
        assert address(small := result[:SMALLEST].numpy(copy=True)) != large
        assert small.tobytes() == BYTES[:SMALLEST]

    @pytest.mark.emulator_only
    def test_not_if_the_memory_has_gone_with_its_context(self, result):
        gone = ctypes.c_void_p(address(result.numpy(copy=True)))
        assert raw_driver().cuMemFreeHost(gone) == 0
        array = result.numpy(copy=True)
        assert array.tobytes() == BYTES
        assert (result_cache.nbytes, result_cache.idle_nbytes) == (SIZE, 0)

    @pytest.mark.emulator_only
    def test_not_after_a_copy_that_failed(self, result):
        """The device may still write to it."""
        emulator.fail("cuStreamSynchronize", code=719)
        with pytest.raises(managedmem.CUDAError, match="cuStreamSynchronize"):
            result.numpy(copy=True)
        assert result_cache.idle_nbytes == SIZE
        array = result.numpy(copy=True)
        assert result_cache.nbytes == 2 * SIZE
        assert array.tobytes() == BYTES
        result_cache.clear()
        assert result_cache.nbytes == SIZE

    def test_by_threads(self, alloc):
        buffers = [alloc(SIZE) for _ in range(4)]

        def read(buffer, value):
            for _ in range(20):
                write(buffer, value)
                assert (buffer.numpy(copy=True) == value).all()

        race_over(read, buffers, range(1, 5))
        # Each thread drops its array after it has the next.
        assert result_cache.nbytes == result_cache.idle_nbytes <= 8 * SIZE


class TestDeath:
    """An array can die anywhere: in a garbage collection, in a capture, in a child."""

    @pytest.mark.emulator_only
    def test_makes_no_driver_call(self, result):
        array = result.numpy(copy=True)
        with emulator.recording() as calls:
            del array
            gc.collect()
        assert names(calls) == []

    @pytest.mark.parametrize("mode", [CAPTURE_GLOBAL, CAPTURE_RELAXED], ids=["global", "relaxed"])
    def test_in_a_capture(self, result, stream, mode):
        array = result.numpy(copy=True)
        cycle = [array]
        cycle.append(cycle)
        with capturing(stream, mode) as capture:
            del array, cycle
            gc.collect()
            with pytest.raises(managedmem.CUDAError, match="captur"):
                result.numpy(stream, copy=True)
            result_cache.clear()
        assert capture.result == 0
        assert result_cache.idle_nbytes == SIZE
        result_cache.clear()
        assert result_cache.nbytes == 0

    def test_in_a_forked_child(self):
        done = run_python("""
            import os
            import managedmem

            buffer = managedmem.empty(1 << 20)
            array = buffer.numpy(copy=True)
            child = os.fork()
            if child == 0:
                del array
                cache = managedmem.result_cache
                cache.max_nbytes = 0
                cache.clear()
                os._exit(cache.nbytes != 0)
            assert os.waitpid(child, 0)[1] == 0
            assert managedmem.result_cache.max_nbytes > 0
            array[:] = 1
            print(managedmem.result_cache.nbytes)
        """)
        assert int(done.stdout) == MIB

    def test_at_the_end_of_the_process(self):
        run_python("""
            import managedmem

            buffer = managedmem.empty(1 << 20)
            arrays = [buffer.numpy(copy=True) for _ in range(3)]
            arrays.pop()
        """)


class TestTheLimit:
    def test_bounds_arrays_that_live(self, result):
        result_cache.max_nbytes = 2 * SIZE
        arrays = [result.numpy(copy=True) for _ in range(5)]
        assert result_cache.nbytes == 2 * SIZE
        assert all(array.tobytes() == BYTES for array in arrays)
        del arrays
        assert result_cache.nbytes == result_cache.idle_nbytes == 2 * SIZE

    def test_idle_memory_goes_first(self, result):
        result_cache.max_nbytes = SIZE + SMALLEST
        arrays = [result[:SMALLEST].numpy(copy=True) for _ in range(2)]
        del arrays[0]
        array = result.numpy(copy=True)
        assert (result_cache.nbytes, result_cache.idle_nbytes) == (SIZE + SMALLEST, 0)
        assert array.tobytes() == BYTES and arrays[0].tobytes() == BYTES[:SMALLEST]

    def test_of_zero_gives_ordinary_memory(self, result):
        result_cache.max_nbytes = 0
        assert result.numpy(copy=True).tobytes() == BYTES
        assert result_cache.nbytes == 0

    def test_that_is_lowered_frees_idle_memory(self, result):
        arrays = [result.numpy(copy=True) for _ in range(3)]
        del arrays[0]
        result_cache.max_nbytes = SIZE
        assert (result_cache.nbytes, result_cache.idle_nbytes) == (2 * SIZE, 0)
        arrays.clear()
        result_cache.clear(keep=SIZE)
        assert result_cache.nbytes == result_cache.idle_nbytes == SIZE

    def test_that_is_lowered_holds_for_memory_in_use(self, result):
        array = result.numpy(copy=True)
        result_cache.max_nbytes = 0
        for _ in range(2):
            del array
            array = result.numpy(copy=True)
            assert result_cache.nbytes == 0 and array.tobytes() == BYTES

    @pytest.mark.parametrize("bad", [-1, 2**64])
    def test_of_a_bad_size(self, bad):
        before = result_cache.max_nbytes
        with pytest.raises(ValueError, match="max_nbytes"):
            result_cache.max_nbytes = bad
        with pytest.raises(ValueError, match="keep"):
            result_cache.clear(bad)
        assert result_cache.max_nbytes == before

    @pytest.mark.parametrize("bad", ["1", 1.5, None, True], ids=repr)
    def test_of_a_bad_type(self, bad):
        with pytest.raises(TypeError, match="max_nbytes"):
            result_cache.max_nbytes = bad

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("code", [2, 800, 1])
    def test_page_locked_memory_that_cannot_be_had(self, result, code):
        emulator.fail("cuMemHostAlloc", code=code)
        assert result.numpy(copy=True).tobytes() == BYTES
        assert result_cache.nbytes == 0

    @pytest.mark.emulator_only
    def test_idle_memory_that_cannot_be_freed_now(self, result, stream):
        """In a capture: the new result has ordinary memory, so that the limit is kept."""
        result_cache.max_nbytes = SIZE
        result[:SMALLEST].numpy(copy=True)
        with capturing(stream, CAPTURE_RELAXED) as capture:
            assert result.numpy(copy=True).tobytes() == BYTES
        assert capture.result == 0
        assert (result_cache.nbytes, result_cache.idle_nbytes) == (SMALLEST, SMALLEST)


class TestCopies:
    """An array of numpy(copy=True) is a host array to copies: they are complete at the return."""

    def test_into_it(self, result, stream):
        array = result.numpy(copy=True)
        where = address(array)
        result.fill(7, stream=stream)
        assert result.copy_to(array, stream=stream) is array
        assert (array == 7).all() and address(array) == where

    def test_from_it(self, result, alloc, stream):
        array = result.numpy(copy=True)
        other = alloc(SIZE)
        other.copy_from(array, stream=stream)
        array[:] = 0
        del array
        assert contents(other) == BYTES

    @pytest.mark.emulator_only
    def test_wait_for_the_stream(self, result, stream):
        array = result.numpy(copy=True)
        with emulator.recording() as calls:
            result.copy_to(array[:], stream=stream)
        assert names(calls)[-2:] == ["cuMemcpyAsync", "cuStreamSynchronize"]

    def test_a_view_of_a_buffer_is_none(self, result, alloc, stream):
        other = alloc(SIZE)
        result.copy_to(other, stream=stream)
        stream.sync()
        assert contents(other) == BYTES


class TestTheCache:
    def test_describes_itself(self, result):
        array = result.numpy(copy=True)
        assert (
            repr(result_cache)
            == "<ResultCache of at most 256.0M: 256.0K page-locked, 0 of it idle>"
        )
        assert array is not None

    def test_there_is_one(self):
        assert copy.copy(result_cache) is result_cache
        assert pickle.loads(pickle.dumps(result_cache)) is result_cache
        with pytest.raises(AttributeError):
            result_cache.limit = 5

    def test_needs_no_driver(self):
        run_python("""
            import managedmem

            managedmem.result_cache.max_nbytes = 5
            managedmem.result_cache.clear()
            assert managedmem.result_cache.max_nbytes == 5
            assert managedmem.result_cache.nbytes == managedmem.result_cache.idle_nbytes == 0
            assert managedmem._managedmem._results_usage() == (5, 0, 0)
        """)
