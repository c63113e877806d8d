"""`buf.numpy()`: the right way to read a result. Ordered, brought to the host, zero-copy."""

import gc

import pytest

import managedmem
from calls import names
from constants import MIB, PAGE
from contents import contents, pattern, write
from driver import CAPTURE_GLOBAL, CAPTURE_RELAXED, capturing, device_memory, pinned_memory
from foreign_objects import ProtocolStream
from identifiers import label
from managedmem import Device, Host, ManagedBuffer, Stream, emulator
from programs import run_python
from races import race

numpy = pytest.importorskip("numpy", reason="needs NumPy")


class TestTheArray:
    @pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "float16", "float64", "complex64"])
    def test_has_the_dtype_and_shape(self, alloc, dtype):
        view = alloc(4096).view(dtype)
        array = view.numpy()
        assert type(array) is numpy.ndarray
        assert (array.dtype, array.shape) == (numpy.dtype(dtype), view.shape)

    def test_is_the_memory_itself_and_writable(self, alloc):
        buffer = alloc(4096).view("float32", (4, 16, 16))[1:3]
        array = buffer.numpy()
        assert array.ctypes.data == buffer.handle
        assert array.shape == (2, 16, 16)
        assert array.flags.writeable
        assert array.flags.c_contiguous
        array[:] = 2.5
        assert contents(buffer) == numpy.full(512, 2.5, "f4").tobytes()

    def test_counts_as_an_export(self, alloc):
        buffer = alloc(PAGE)
        array = buffer.numpy()
        part = array[10:20]
        del array
        gc.collect()
        with pytest.raises(BufferError):
            buffer.close()
        del part
        buffer.close()
        assert buffer.is_closed

    def test_keeps_the_memory_alive(self):
        array = managedmem.empty(PAGE, "uint8").numpy()
        gc.collect()
        array[:] = 7
        assert (array == 7).all()

    @pytest.mark.parametrize("copy", [True, numpy.True_])
    def test_a_copy_has_other_memory(self, alloc, device0, copy):
        buffer = alloc(4096).view("float32", (32, 32))
        buffer.fill(b"\x00\x00\x80\x3f")
        buffer.prefetch(device0)
        array = buffer.numpy(copy=copy)
        assert (array.dtype, array.shape) == (numpy.float32, (32, 32))
        assert array.ctypes.data != buffer.handle
        buffer.fill(0)
        buffer.close()
        assert buffer.is_closed
        assert (array == 1).all()

    @pytest.mark.parametrize("bad", [None, 1, "yes"], ids=label)
    def test_copy_is_a_bool(self, buf, bad):
        with pytest.raises(TypeError, match="copy"):
            buf.numpy(copy=bad)

    def test_of_a_subclass_and_of_wrapped_memory(self, buf):
        class Mine(ManagedBuffer):
            pass

        write(buf, pattern(buf.size))
        wrapped = Mine.from_handle(buf.handle, buf.size, owner=buf)
        assert wrapped.numpy().tobytes() == pattern(buf.size)


def streams(stream):
    return {
        "none": None,
        "own": stream,
        "handle": stream.handle,
        "protocol": ProtocolStream(stream.handle),
        "legacy": 1,
        "per thread": 2,
    }


class TestOrder:
    """Read without any other waiting; on the emulator work runs only when it is waited for."""

    @pytest.fixture(autouse=True)
    def lazily(self):
        if emulator.is_active():
            emulator.schedule("lazy")

    @pytest.mark.parametrize("name", streams(Stream.from_handle(0)))
    @pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
    def test_comes_after_the_stream(self, alloc, device0, stream, name, keyword):
        buffer = alloc(32 * MIB)
        chosen = streams(stream)[name]
        for value in range(1, 4):
            buffer.prefetch(device0, stream=chosen)
            buffer.fill(value, stream=chosen)
            array = buffer.numpy(stream=chosen) if keyword else buffer.numpy(chosen)
            assert (array == value).all()
            assert buffer.last_prefetch_location is Host()

    def test_the_pages_are_at_the_host(self, buf, device0, stream):
        buf.prefetch(device0, stream=stream)
        buf.numpy(stream)
        assert buf.last_prefetch_location is Host()
        if emulator.is_active():
            assert emulator.residency(buf) is Host()

    def test_just_the_range_is_moved(self, buf, device0):
        buf.prefetch(device0)
        buf[PAGE : 3 * PAGE].numpy()
        places = [buf[i * PAGE : (i + 1) * PAGE].last_prefetch_location for i in range(4)]
        assert places == [device0, Host(), Host(), device0]

    def test_a_stream_of_another_device(self, buf, device1, current_device):
        device1.set_current()
        with Stream() as elsewhere:
            Device(0).set_current()
            buf.fill(5, stream=elsewhere)
            assert (buf.numpy(elsewhere) == 5).all()


@pytest.mark.emulator_only
class TestCalls:
    @pytest.mark.parametrize("size", [PAGE, 8 * MIB], ids=["a page", "what would be deferred"])
    @pytest.mark.parametrize("own", [False, True], ids=["legacy", "own stream"])
    def test_one_prefetch_and_one_wait(self, alloc, stream, size, own):
        buffer = alloc(size)
        with emulator.recording() as calls:
            buffer.numpy(stream if own else None)
        work = [c for c in calls if not c.name.startswith("cuPointerGetAttribute")]
        assert names(work) == ["cuMemPrefetchAsync", "cuStreamSynchronize"]
        assert (work[0].args["ptr"], work[0].args["count"]) == (buffer.handle, size)


class TestHostMemory:
    """Wrapped memory that is not managed: the stream is waited for, and no page moves."""

    def test_of_the_system(self, alloc, stream):
        array = numpy.arange(PAGE, dtype="i4")
        wrapped = ManagedBuffer.from_handle(array.ctypes.data, array.nbytes, owner=array)
        part = wrapped.view("int32")[8:16]
        assert part.numpy().tolist() == list(range(8, 16))
        part.numpy(stream)[0] = 5
        assert array[8] == 5
        assert (wrapped.numpy(copy=True) == array.view("u1")).all()

    def test_of_the_system_that_is_read_only(self):
        owner = bytes(range(64))
        address = numpy.frombuffer(owner, "u1").ctypes.data
        array = ManagedBuffer.from_handle(address, 64, owner=owner).numpy()
        assert bytes(array) == owner
        assert not array.flags.writeable

    def test_that_is_pinned(self, alloc, stream):
        with pinned_memory() as pointer:
            pinned = ManagedBuffer.from_handle(pointer, PAGE)
            source = alloc(PAGE)
            write(source, 7)
            source.copy_to(pinned, stream=stream)
            assert (pinned.numpy(stream) == 7).all()
            pinned.close()

    @pytest.mark.emulator_only
    def test_one_wait_and_no_prefetch(self, stream):
        array = numpy.ones(PAGE, "u1")
        wrapped = ManagedBuffer.from_handle(array.ctypes.data, PAGE, owner=array)
        with emulator.recording() as calls:
            wrapped.numpy(stream)
        work = [c for c in calls if not c.name.startswith("cuPointerGetAttribute")]
        assert names(work) == ["cuStreamSynchronize"]

    def test_a_capture_survives(self, stream):
        array = numpy.ones(PAGE, "u1")
        wrapped = ManagedBuffer.from_handle(array.ctypes.data, PAGE, owner=array)
        with capturing(stream, CAPTURE_RELAXED) as capture:
            with pytest.raises(managedmem.CUDAError, match="captur"):
                wrapped.numpy(stream)
        assert capture.result == 0


class TestRefused:
    def test_a_closed_buffer(self, alloc):
        buffer = alloc(2 * PAGE)
        part = buffer[:PAGE]
        buffer.close()
        for closed in (buffer, part):
            with pytest.raises(RuntimeError, match="closed"):
                closed.numpy()

    @pytest.mark.parametrize("bad", ["default", 1.5, object(), Host()], ids=label)
    def test_an_object_that_is_not_a_stream(self, buf, device0, bad):
        buf.prefetch(device0)
        with pytest.raises(TypeError, match="stream"):
            buf.numpy(bad)
        assert buf.last_prefetch_location is device0

    def test_arguments(self, buf):
        for call in (lambda: buf.numpy(None, True), lambda: buf.numpy(dtype="f4")):
            with pytest.raises(TypeError, match="numpy"):
                call()

    def test_device_memory(self):
        with device_memory(PAGE) as pointer:
            wrapped = ManagedBuffer.from_handle(pointer, PAGE)
            with pytest.raises(ValueError, match="plain device memory; copy_from"):
                wrapped.numpy()

    @pytest.mark.parametrize("emulated", [None, "pageable=1"])
    def test_system_memory_that_nobody_vouches_for(self, emulated):
        run_python(
            """
            import numpy
            import managedmem as mm
            from program_checks import refused
            array = numpy.ones(4096, "u1")
            wrapped = mm.ManagedBuffer.from_handle(array.ctypes.data, 4096)
            with refused(BufferError, "is_host_accessible=True"):
                wrapped.numpy()
            """,
            emulator=emulated,
        )

    @pytest.mark.parametrize("mode", [CAPTURE_GLOBAL, CAPTURE_RELAXED], ids=["global", "relaxed"])
    def test_a_capturing_stream_and_the_capture_survives(self, alloc, stream, mode):
        buffer = alloc(PAGE)
        write(buffer, 7)
        with capturing(stream, mode) as capture:
            with pytest.raises(managedmem.CUDAError, match="captur"):
                buffer.numpy(stream)
        assert capture.result == 0
        assert buffer.last_prefetch_location is None
        assert (buffer.numpy(stream) == 7).all()
        buffer.close()

    def test_without_numpy(self):
        run_python("""
            import sys
            import managedmem as mm
            from program_checks import refused
            sys.modules["numpy"] = None
            with mm.empty(4096) as buf:
                with refused(ImportError, "pip install numpy"):
                    buf.numpy()
                assert buf.last_prefetch_location is None
        """)

    def test_numpy_is_imported_by_the_call_and_not_before(self):
        run_python("""
            import sys
            import managedmem as mm
            with mm.empty(4096) as buf:
                assert "numpy" not in sys.modules
                buf.numpy()
                assert "numpy" in sys.modules
        """)


class TestArrayOfABuffer:
    """`numpy.asarray` uses the buffer protocol, and `__array__` where that refuses."""

    @pytest.mark.parametrize("make", [numpy.asarray, numpy.array, numpy.atleast_1d])
    def test_of_a_closed_buffer(self, alloc, make):
        buffer = alloc(PAGE)
        buffer.close()
        with pytest.raises(RuntimeError, match="closed"):
            make(buffer)

    def test_of_device_memory(self):
        with device_memory(PAGE) as pointer:
            wrapped = ManagedBuffer.from_handle(pointer, PAGE)
            with pytest.raises(BufferError, match="plain device memory"):
                numpy.asarray(wrapped)

    def test_called_by_name(self, alloc):
        buffer = alloc(PAGE).view("float32")
        assert buffer.__array__().ctypes.data == buffer.handle
        assert buffer.__array__("float64").dtype == numpy.float64
        assert buffer.__array__(copy=True).ctypes.data != buffer.handle
        assert buffer.__array__(dtype=numpy.float32, copy=None).ctypes.data == buffer.handle


class TestWithoutConcurrentAccess:
    """The host may not touch managed memory while a device works, and nothing can be prefetched."""

    def run(self, code):
        run_python(code, emulator="concurrent=0,schedule=lazy")

    def test_other_streams_are_waited_for_too_and_nothing_is_prefetched(self):
        self.run(
            """
            import managedmem as mm
            from managedmem import emulator
            with mm.empty(4096) as buf, mm.Stream() as stream, mm.Stream() as other:
                buf[:2048].fill(3, stream=stream)
                buf[2048:].fill(4, stream=other)
                with emulator.recording() as calls:
                    array = buf.numpy(stream)
                assert other.query()
                assert array.tolist() == [3] * 2048 + [4] * 2048
                assert not [c for c in calls if "Prefetch" in c.name], calls
                del array
            """
        )

    def test_a_capturing_stream_is_refused_and_the_capture_survives(self):
        self.run(
            """
            import managedmem as mm
            from program_checks import refused
            from driver import capturing
            with mm.empty(4096) as buf, mm.Stream() as stream:
                with capturing(stream) as capture:
                    with refused(mm.CUDAError, "captur"):
                        buf.numpy(stream)
                assert capture.result == 0
            """
        )


def test_closing_in_another_thread_is_seen_or_refused(alloc):
    """Either the array comes first and closing is refused, or the buffer is closed."""
    buffers = [alloc(PAGE) for _ in range(50)]
    arrays, outcomes = [], []

    def close():
        for buffer in buffers:
            try:
                buffer.close()
                outcomes.append("closed")
            except BufferError:
                outcomes.append("in use")

    def view():
        for buffer in buffers:
            try:
                arrays.append(buffer.numpy())
                arrays[-1][:] = 1
            except RuntimeError as error:
                assert "closed" in str(error)

    race(close, view)
    assert len(arrays) == sum(not buffer.is_closed for buffer in buffers)
    assert outcomes.count("in use") == len(arrays)
