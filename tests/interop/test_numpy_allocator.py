"""`numpy_allocator()`: arrays that NumPy and those above it make have managed memory."""

import asyncio
import contextlib
import ctypes
import io
import os
import threading
import time

import pytest

import managedmem
from constants import EMULATED, KIB, MIB, PAGE
from managedmem import Host, MigrationPolicy, _managedmem, emulator, is_managed
from managedmem import numpy_allocator as allocator
from programs import run_python
from races import race

np = pytest.importorskip("numpy", reason="needs NumPy")

COUNT = 300 * KIB  # elements of 8 bytes
SIZE = 8 * COUNT
ORDER = np.arange(COUNT, dtype="i8")
# NumPy says it so in Python only here.
HANDLER_NAME = getattr(np, "_core", getattr(np, "core", None)).multiarray.get_handler_name


def saved(save):
    file = io.BytesIO()
    save(file, ORDER)
    file.seek(0)
    return file


def from_disk(folder):
    np.save(folder / "order.npy", ORDER)
    return np.load(folder / "order.npy")


def frame():
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({"a": ORDER, "b": ORDER})["b"].add(0).to_numpy()


def convolution():
    signal = pytest.importorskip("scipy.signal")
    return signal.lfilter([1.0], [1.0], ORDER)


class Handler(ctypes.Structure):
    """NumPy's PyDataMem_Handler, whose functions can be called without NumPy."""

    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("context", ctypes.c_void_p),
        ("allocate", ctypes.CFUNCTYPE(*[ctypes.c_void_p] * 2, ctypes.c_size_t)),
        ("zeroed", ctypes.CFUNCTYPE(*[ctypes.c_void_p] * 2, *[ctypes.c_size_t] * 2)),
        ("resize", ctypes.CFUNCTYPE(*[ctypes.c_void_p] * 3, ctypes.c_size_t)),
        ("free", ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2, ctypes.c_size_t)),
    )


@pytest.fixture(autouse=True)
def all_is_freed():
    """Wait for the threads that free what resize() left."""
    before, end = EMULATED and emulator.live().allocations, time.monotonic() + 30
    yield
    while EMULATED and emulator.live().allocations > before and time.monotonic() < end:
        time.sleep(0.001)


@pytest.fixture
def handler():
    capsule = _managedmem._numpy_handler(None, PAGE)
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    yield Handler.from_address(address(capsule, b"mem_handler"))
    del capsule


class TestArrays:
    @pytest.mark.parametrize(
        "make",
        [
            lambda folder: ORDER.copy(),
            lambda folder: np.load(saved(np.save)),
            lambda folder: np.load(saved(np.savez))["arr_0"],
            from_disk,
            lambda folder: np.fromiter(range(COUNT), "i8"),
            lambda folder: ORDER + np.zeros(COUNT),
            lambda folder: frame(),
            lambda folder: convolution(),
        ],
        ids=["copy", "npy", "npz", "file", "iterator", "sum", "pandas", "scipy"],
    )
    def test_are_targets(self, make, tmp_path, device0):
        with allocator():
            array = make(tmp_path)
        assert is_managed(array)
        managedmem.advise(array, "set_preferred_location", Host())
        managedmem.prefetch(array, device0)
        managedmem.prefetch(array, Host())
        device0.sync()
        assert MigrationPolicy.of(array) == MigrationPolicy.prefer(Host())
        assert managedmem.residency(array).nbytes >= SIZE
        assert (array == ORDER).all()

    def test_have_pages_of_their_own_and_the_policy(self, members):
        policy = MigrationPolicy(preferred_location=Host(), accessed_by=members)
        with allocator(policy=policy, minimum=0):
            arrays = [np.zeros(3), np.empty((), "i1"), np.empty(0), np.ones(PAGE)]
        for array in arrays:
            assert array.ctypes.data % PAGE == 0
        assert all(MigrationPolicy.of(array) == policy for array in arrays if array.size)

    def test_of_objects_keep_their_references(self, device0):
        with allocator():
            array = np.full(COUNT, None)
        managedmem.prefetch(array, device0)
        with pytest.raises(ValueError, match="refers to Python objects"):
            managedmem.discard(array)
        with pytest.raises(ValueError, match="refers to Python objects"):
            managedmem.zeros(SIZE).copy_to(array)
        assert set(array) == {None}

    def test_of_fewer_bytes_have_system_memory(self):
        with allocator(minimum=PAGE):
            sizes = [*range(1, 3000), PAGE - 16, PAGE - 1, PAGE, PAGE + 1]
            arrays = [np.full(size, 7, "u1") for size in sizes]
            assert [is_managed(a) for a in arrays] == [a.nbytes >= PAGE for a in arrays]
            assert not is_managed(np.zeros(PAGE - 1, "u1"))
        for array in arrays:
            address = array.ctypes.data
            assert address % 16 == 0
            assert (address % PAGE == 0) == (array.nbytes >= PAGE)  # which tells them apart
            assert (array == 7).all()
        with allocator():
            assert [is_managed(np.empty(n, "u1")) for n in (MIB - 1, MIB)] == [False, True]

    def test_of_zeros_are_zero_where_other_contents_were(self):
        with allocator():
            for _ in range(3):
                array = np.zeros(MIB, "u1")
                assert not array.any()
                array[:] = 255

    @pytest.mark.emulator_only
    def test_are_freed_with_their_last_view(self):
        before = emulator.live().allocations
        with allocator():
            array = np.zeros(MIB, "u1")
        view = array[5:]
        del array
        assert HANDLER_NAME(view.base) == "managedmem"
        assert emulator.live().allocations == before + 1
        del view
        assert emulator.live().allocations == before


class TestResize:
    @pytest.mark.parametrize(
        ("before", "after"),
        [(1, 8), (8, 1), (1, 2), (16, 64), (64, 48), (64, 16), (16, 1), (4, 4)],
    )
    def test_keeps_the_contents(self, before, after):
        """In quarters of the least size of managed memory."""
        with allocator(minimum=4 * PAGE):
            array = np.arange(before * PAGE // 8)
            array.resize(after * PAGE // 8, refcheck=False)
            grown = max(0, after - before) * PAGE // 8
            common = min(before, after) * PAGE // 8
            assert array.tolist() == [*range(common), *[0] * grown]
            assert is_managed(array) == (after >= 4)

    @pytest.mark.emulator_only
    @pytest.mark.parametrize(
        ("function", "code", "told"),
        [
            ("cuMemAllocManaged", 2, ""),
            ("cuPointerGetAttributes", 719, "cuPointerGetAttributes failed with CUDA_ERROR_LAUNCH"),
        ],
    )
    def test_that_fails_leaves_the_array(self, function, code, told, capfd):
        with allocator():
            array = np.full(MIB, 7, "u1")
            emulator.fail(function, code=code)
            with pytest.raises(MemoryError):
                array.resize(2 * MIB, refcheck=False)
        assert array.nbytes == MIB
        assert (array == 7).all()
        text = capfd.readouterr().err
        assert told in text and bool(told) == bool(text)

    def test_keeps_the_gil(self):
        """Another thread must not take the memory after resize() has checked its references."""
        run_python(
            """
            import ctypes, managedmem, numpy
            check = ctypes.cast(ctypes.pythonapi.PyGILState_Check, ctypes.c_void_p)
            folder = managedmem._managedmem.__file__.rpartition("/")[0]
            driver = ctypes.CDLL(folder + "/libmanagedmem_emulator.so")
            driver.emu_log_verbose(1)
            driver.emu_log_probe(check)
            with managedmem.numpy_allocator():
                array = numpy.zeros(1 << 20, "u1")
                driver.emu_log_clear()
                array.resize(1 << 22)
            line = ctypes.create_string_buffer(4096)
            lines = []
            while driver.emu_log_entry(len(lines), line, len(line)) >= 0:
                lines.append(line.value.decode())
            (made,) = [line for line in lines if line.startswith("cuMemAllocManaged")]
            assert made.endswith(" probed"), made
            assert not any("cuMemFree" in line and "probed" in line for line in lines), lines
            """
        )


class TestBlocks:
    def test_nest_and_end_by_exceptions(self):
        def small():
            return is_managed(np.zeros(PAGE, "u1"))

        with allocator():
            with pytest.raises(KeyError), allocator(minimum=0):
                assert small()
                raise KeyError
            assert not small()
            assert is_managed(np.zeros(MIB, "u1"))
        assert not is_managed(np.zeros(MIB, "u1"))

    def test_one_that_is_entered_again_is_refused(self):
        block = allocator()
        with block, pytest.raises(RuntimeError, match=r"call numpy_allocator\(\) for each"):
            block.__enter__()
        with pytest.raises(RuntimeError, match="was entered before"):
            block.__enter__()
        assert not is_managed(np.zeros(MIB, "u1"))

    def test_decorate_functions(self):
        @allocator()
        def made():
            return np.zeros(MIB, "u1")

        assert is_managed(made()) and is_managed(made())
        assert not is_managed(np.zeros(MIB, "u1"))

    def test_are_of_a_thread(self):
        entered, looked = threading.Event(), threading.Event()

        def inside():
            with allocator():
                entered.set()
                assert looked.wait(60)
                return is_managed(np.zeros(MIB, "u1"))

        def outside():
            assert entered.wait(60)
            found = is_managed(np.zeros(MIB, "u1"))
            looked.set()
            return found

        assert race(inside, outside) == [True, False]

    def test_are_of_a_task(self):
        async def work(minimum):
            with contextlib.nullcontext() if minimum is None else allocator(minimum=minimum):
                found = []
                for _ in range(3):
                    await asyncio.sleep(0)
                    found.append(is_managed(np.zeros(PAGE, "u1")))
            return found

        async def all_works():
            return await asyncio.gather(work(0), work(None), work(MIB), work(PAGE))

        assert asyncio.run(all_works()) == [[True] * 3, [False] * 3, [False] * 3, [True] * 3]

    def test_several_threads_make_and_drop(self):
        def work():
            with allocator(minimum=PAGE):
                for _ in range(30):
                    arrays = [np.full(size, 3, "u1") for size in (10, PAGE, 5 * PAGE)]
                    arrays[1].resize(9 * PAGE, refcheck=False)
                    assert all((array[:10] == 3).all() for array in arrays)

        race(*[work] * 4)


class TestFailures:
    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            ({"policy": Host()}, TypeError, "policy must be a MigrationPolicy or None"),
            ({"minimum": 1.5}, TypeError, "minimum must be an int"),
            ({"minimum": -1}, ValueError, "minimum must be 0 bytes or more"),
        ],
        ids=["policy", "minimum", "negative"],
    )
    def test_bad_arguments(self, arguments, error, text):
        with pytest.raises(error, match=text):
            allocator(**arguments)

    @pytest.mark.emulator_only
    def test_refused_advice_is_known_at_once(self):
        emulator.fail("cuMemAdvise", code=719)
        with pytest.raises(managedmem.CUDAError):
            allocator(policy=MigrationPolicy.prefer(Host()))

    def test_more_memory_than_there_can_be(self, capfd):
        with allocator(), pytest.raises(MemoryError):
            np.empty(1 << 58, "u1")
        assert capfd.readouterr().err == ""

    @pytest.mark.emulator_only
    @pytest.mark.parametrize(
        ("function", "nth"), [("cuMemAllocManaged", 1), ("cuMemAdvise", 1), ("cuMemAdvise", 3)]
    )
    def test_of_the_driver_are_on_the_standard_error(self, function, nth, device0, capfd):
        before = emulator.live()
        policy = MigrationPolicy(preferred_location=Host(), accessed_by=[device0], read_mostly=True)
        with allocator(policy=policy):
            emulator.fail(function, nth=nth, code=719)
            with pytest.raises(MemoryError):
                np.zeros(2 * MIB, "u1")
        assert emulator.live() == before
        text = capfd.readouterr().err
        start = f"managedmem: cannot allocate {2 * MIB} bytes of managed memory for NumPy: "
        assert text.startswith(f"{start}{function} failed with CUDA_ERROR_LAUNCH_FAILED (719)")
        assert text.count("\n") == 1

    def test_without_numpy(self):
        run_python("""
            import sys
            sys.modules["numpy"] = None
            import managedmem
            from outcomes import refusal
            made = managedmem.numpy_allocator()
            assert "pip install numpy" in str(refusal(ImportError, made.__enter__))
        """)

    def test_with_an_old_numpy(self):
        run_python("""
            import ctypes, sys, types
            table = (ctypes.c_void_p * 212)()
            version = ctypes.CFUNCTYPE(ctypes.c_uint)(lambda: 14)
            table[211] = ctypes.cast(version, ctypes.c_void_p).value
            make = ctypes.pythonapi.PyCapsule_New
            make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3
            core = types.ModuleType("numpy.core._multiarray_umath")
            core._ARRAY_API = make(ctypes.addressof(table), None, None)
            for name in ("numpy", "numpy.core"):
                sys.modules[name] = types.ModuleType(name)
                sys.modules[name].__path__ = []
            sys.modules[core.__name__] = core
            import managedmem
            from outcomes import refusal
            made = managedmem.numpy_allocator()
            assert "NumPy 1.22 or newer" in str(refusal(ImportError, made.__enter__))
        """)


class TestFunctions:
    """Of the handler, called from C without the GIL, as NumPy may."""

    def test_of_both_kinds_of_memory(self, handler):
        for size in (100, 3 * PAGE):
            block = handler.zeroed(handler.context, size, 1)
            assert ctypes.string_at(block, size) == bytes(size)
            ctypes.memset(block, 7, size)
            block = handler.resize(handler.context, block, 5 * size)
            assert ctypes.string_at(block, size) == b"\7" * size
            handler.free(handler.context, block, 1)  # a wrong size, as of an array that changed

    def test_of_no_memory(self, handler):
        handler.free(handler.context, None, 0)
        block = handler.resize(handler.context, None, PAGE)
        assert block % PAGE == 0
        handler.free(handler.context, block, PAGE)
        block = handler.allocate(handler.context, 0)
        assert block
        handler.free(handler.context, block, 0)

    def test_of_too_much_memory(self, handler):
        assert handler.zeroed(handler.context, 1 << 40, 1 << 40) is None
        assert handler.allocate(handler.context, (1 << 64) - 1) is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_after_a_fork():
    run_python("""
        import os, managedmem, numpy
        with managedmem.numpy_allocator(minimum=0):
            old = numpy.zeros(4096)
            child = os.fork()
            if child == 0:
                new = numpy.zeros(1 << 20)
                new.resize(1 << 21)
                assert not new.any()
                try:
                    old.resize(1 << 20)
                except MemoryError:
                    del old
                    os._exit(0)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            old.resize(1 << 20)
            assert managedmem.is_managed(old)
    """)


@pytest.mark.skipif(not EMULATED, reason="the driver's shutdown is up to CUDA here")
def test_arrays_may_live_until_the_interpreter_has_gone():
    done = run_python("""
        import sys, managedmem, numpy
        with managedmem.numpy_allocator(minimum=0):
            kept = numpy.zeros(4096)
            sys.last, sys.cycle = numpy.ones(10), [numpy.ones(10)]
            sys.cycle.append(sys.cycle)
        block = managedmem.numpy_allocator()  # a block that never ends
        block.__enter__()
        late = numpy.zeros(1 << 20)
    """)
    assert done.stderr == ""
