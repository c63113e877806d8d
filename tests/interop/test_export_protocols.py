"""The doors for other libraries: `__cuda_array_interface__`, DLPack, the buffer protocol.

The libraries themselves are in test_library_exports.
"""

import contextlib
import ctypes
import gc
import io

import pytest

import managedmem
from constants import PAGE
from contents import contents, pattern, write
from dlpack import DLManagedTensorVersioned, capsule_name, capsule_struct, consume, run_deleter
from driver import device_memory, raw_driver
from foreign_objects import ProtocolStream
from identifiers import label
from managedmem import Host, ManagedBuffer
from programs import run_python
from races import in_thread
from whole_programs import run_to_the_end

CUDA_MANAGED = 13
VERSIONED = {"unversioned": {}, "versioned": {"max_version": (1, 0)}}
versions = pytest.mark.parametrize("arguments", VERSIONED.values(), ids=VERSIONED)

# dtype, typestr, DLPack (code, bits)
TYPES = [
    ("bool", "|b1", (6, 8)),
    ("int8", "|i1", (0, 8)),
    ("uint8", "|u1", (1, 8)),
    ("int16", "<i2", (0, 16)),
    ("uint16", "<u2", (1, 16)),
    ("int32", "<i4", (0, 32)),
    ("uint32", "<u4", (1, 32)),
    ("int64", "<i8", (0, 64)),
    ("uint64", "<u8", (1, 64)),
    ("float16", "<f2", (2, 16)),
    ("float32", "<f4", (2, 32)),
    ("float64", "<f8", (2, 64)),
    ("complex64", "<c8", (5, 64)),
    ("complex128", "<c16", (5, 128)),
]
types = pytest.mark.parametrize(("dtype", "typestr", "dlpack"), TYPES, ids=[t[0] for t in TYPES])


class TestCudaArrayInterface:
    def test_is_version_3(self, buf):
        interface = buf.__cuda_array_interface__
        assert interface["version"] == 3
        assert interface["shape"] == (buf.size,)
        assert interface["typestr"] == "|u1"
        assert interface["data"] == (buf.handle, False)
        assert interface.get("strides") is None

    def test_names_a_stream_that_is_legal(self, buf):
        """0 would be ambiguous, so the protocol forbids it."""
        stream = buf.__cuda_array_interface__["stream"]
        assert stream is None or (type(stream) is int and stream >= 1)

    @types
    def test_types(self, alloc, dtype, typestr, dlpack):
        interface = alloc(4096).view(dtype).__cuda_array_interface__
        assert interface["typestr"] == typestr
        assert interface["shape"] == (4096 // int(typestr[2:]),)

    def test_views(self, alloc):
        buffer = alloc(4096)
        interface = buffer.view("float32", (4, 16, 16))[1:3].__cuda_array_interface__
        assert interface["shape"] == (2, 16, 16)
        assert interface["data"] == (buffer.handle + 1024, False)

    def test_is_a_fresh_dict(self, buf):
        buf.__cuda_array_interface__["shape"] = None
        assert buf.__cuda_array_interface__["shape"] == (buf.size,)


class TestDlpackCapsule:
    def test_the_device_is_managed(self, buf):
        assert buf.__dlpack_device__() == (CUDA_MANAGED, 0)

    def test_names(self, buf):
        assert capsule_name(buf.__dlpack__()) == "dltensor"
        assert capsule_name(buf.__dlpack__(max_version=None)) == "dltensor"
        assert capsule_name(buf.__dlpack__(max_version=(0, 8))) == "dltensor"
        for version in ((1, 0), (1, 1), (2, 0)):
            assert capsule_name(buf.__dlpack__(max_version=version)) == "dltensor_versioned"

    def test_the_version_is_one_the_consumer_knows(self, buf):
        capsule = buf.__dlpack__(max_version=(1, 0))
        managed = capsule_struct(capsule)
        assert isinstance(managed, DLManagedTensorVersioned)
        assert managed.major == 1, "another minor version has the same layout"
        assert managed.flags & 1 == 0, "the memory is writable"

    @versions
    def test_describes_the_buffer(self, buf, arguments):
        capsule = buf.__dlpack__(**arguments)
        tensor = capsule_struct(capsule).tensor
        assert tensor.data + tensor.byte_offset == buf.handle
        assert (tensor.device.device_type, tensor.device.device_id) == (CUDA_MANAGED, 0)
        assert (tensor.ndim, tensor.shape[0]) == (1, buf.size)
        assert (tensor.code, tensor.bits, tensor.lanes) == (1, 8, 1)

    @versions
    @types
    def test_types(self, alloc, arguments, dtype, typestr, dlpack):
        capsule = alloc(4096).view(dtype).__dlpack__(**arguments)
        tensor = capsule_struct(capsule).tensor
        assert (tensor.code, tensor.bits) == dlpack
        assert tensor.shape[0] == 4096 * 8 // dlpack[1]

    @versions
    def test_shapes(self, alloc, arguments):
        buffer = alloc(4096)
        capsule = buffer.view("float32", (4, 16, 16))[1:3].__dlpack__(**arguments)
        tensor = capsule_struct(capsule).tensor
        assert tensor.ndim == 3
        assert [tensor.shape[i] for i in range(3)] == [2, 16, 16]
        if tensor.strides:
            assert [tensor.strides[i] for i in range(3)] == [256, 16, 1]
        assert tensor.data + tensor.byte_offset == buffer.handle + 1024

    @versions
    def test_an_unconsumed_capsule_frees_its_pin(self, alloc, arguments):
        buffer = alloc(PAGE)
        capsule = buffer.__dlpack__(**arguments)
        with pytest.raises(BufferError):
            buffer.close()
        del capsule
        buffer.close()
        assert buffer.is_closed

    @versions
    def test_a_consumed_capsule_leaves_the_pin_to_its_deleter(self, alloc, arguments):
        buffer = alloc(PAGE)
        capsule = buffer.__dlpack__(**arguments)
        managed = consume(capsule)
        del capsule
        with pytest.raises(BufferError):
            buffer.close()
        run_deleter(managed)
        buffer.close()
        assert buffer.is_closed

    @versions
    def test_the_tensor_outlives_the_python_object(self, arguments):
        buffer = managedmem.ManagedMemoryResource().allocate(PAGE)
        write(buffer, 7)
        managed = consume(buffer.__dlpack__(**arguments))
        pointer = managed.tensor.data
        del buffer
        gc.collect()
        assert ctypes.string_at(pointer, PAGE) == b"\x07" * PAGE
        run_deleter(managed)

    @versions
    def test_the_deleter_runs_in_any_thread(self, arguments, alloc):
        buffer = alloc(PAGE)
        managed = consume(buffer.__dlpack__(**arguments))
        in_thread(lambda: run_deleter(managed))
        buffer.close()
        assert buffer.is_closed

    def test_several_at_once(self, alloc):
        buffer = alloc(PAGE)
        capsules = [buffer.__dlpack__(), buffer.__dlpack__(max_version=(1, 0))]
        capsules.pop()
        with pytest.raises(BufferError):
            buffer.close()
        capsules.pop()
        buffer.close()
        assert buffer.is_closed


class TestDlpackArguments:
    @pytest.mark.parametrize("stream", [None, -1, 1, 2], ids=label)
    def test_streams_of_the_protocol(self, buf, stream):
        assert capsule_name(buf.__dlpack__(stream=stream)) == "dltensor"

    def test_a_stream_handle(self, buf, stream):
        assert capsule_name(buf.__dlpack__(stream=stream.handle)) == "dltensor"

    @pytest.mark.parametrize("stream", ["1", 1.5, object()], ids=label)
    def test_an_object_that_is_not_a_stream(self, alloc, stream):
        buffer = alloc(PAGE)
        with pytest.raises((TypeError, ValueError)):
            buffer.__dlpack__(stream=stream)
        buffer.close()
        assert buffer.is_closed

    def test_arguments_are_keyword_only(self, buf):
        with pytest.raises(TypeError):
            buf.__dlpack__(None)

    def test_its_own_device_may_be_asked_for(self, buf):
        assert capsule_name(buf.__dlpack__(dl_device=(CUDA_MANAGED, 0))) == "dltensor"
        assert capsule_name(buf.__dlpack__(dl_device=None)) == "dltensor"

    def test_a_cuda_device_may_be_asked_for(self, buf):
        """For consumers such as torch, which do not know managed memory."""
        for device in managedmem.Device.all():
            for version in (None, (1, 0)):
                where = (2, device.device_id)
                capsule = buf.__dlpack__(dl_device=where, max_version=version)
                tensor = capsule_struct(capsule).tensor
                assert (tensor.device.device_type, tensor.device.device_id) == where
                assert tensor.data == buf.handle

    @pytest.mark.parametrize(
        "device", [(7, 0), (10, 0), (CUDA_MANAGED, 99), (2, 99), (2, -1), (1, 1), (3, 1)], ids=label
    )
    def test_another_device_is_a_buffer_error(self, alloc, device):
        buffer = alloc(PAGE)
        with pytest.raises((BufferError, ValueError)):
            buffer.__dlpack__(dl_device=device)
        buffer.close()
        assert buffer.is_closed

    @pytest.mark.parametrize("device", ["cuda", (13,), 13, (13, "0")], ids=label)
    def test_a_malformed_device(self, buf, device):
        with pytest.raises((TypeError, ValueError)):
            buf.__dlpack__(dl_device=device)

    @pytest.mark.parametrize("stream", [0, -2, -(1 << 40)])
    def test_a_stream_that_the_protocol_excludes(self, buf, stream):
        """0 may mean the legacy stream or the one of the thread."""
        with pytest.raises(ValueError, match=f"got {stream}: 0 is ambiguous"):
            buf.__dlpack__(stream=stream)

    @pytest.mark.parametrize("copy", [0, 1, "yes"])
    def test_copy_is_no_number(self, buf, copy):
        with pytest.raises(TypeError, match=f"copy must be None, True or False, got {copy!r}"):
            buf.__dlpack__(copy=copy)

    @pytest.mark.parametrize("version", ["1.0", (1,), 1, ("1", "0")], ids=label)
    def test_a_malformed_version(self, buf, version):
        with pytest.raises((TypeError, ValueError)):
            buf.__dlpack__(max_version=version)

    @pytest.mark.parametrize("copy", [None, False])
    def test_no_copy_is_the_same_memory(self, buf, copy):
        capsule = buf.__dlpack__(copy=copy)
        assert capsule_struct(capsule).tensor.data == buf.handle

    def test_a_copy_is_refused_or_real(self, alloc):
        buffer = alloc(PAGE)
        try:
            capsule = buffer.__dlpack__(copy=True)
        except BufferError:
            buffer.close()
            assert buffer.is_closed
        else:
            assert capsule_struct(capsule).tensor.data != buffer.handle

    @pytest.mark.parametrize("answer", ["None", "5", "object()", "b''", "managedmem.Host()"])
    def test_a_copy_does_not_believe_an_override(self, answer):
        """Any object was read as a buffer, so this runs in a process of its own."""
        run_to_the_end(f"""
            import managedmem
            from dlpack import capsule_struct
            class Mine(managedmem.ManagedBuffer):
                def copy_to(self, dst=None, *, stream=None):
                    return {answer}
            with managedmem.empty(4096) as memory:
                memory.fill(7)
                buffer = Mine.from_handle(memory.handle, memory.size)
                tensor = capsule_struct(capsule := buffer.__dlpack__(copy=True)).tensor
                assert tensor.data != buffer.handle and tensor.shape[0] == 4096
                copied = managedmem.ManagedBuffer.from_handle(tensor.data, 4096)
                assert bytes(copied) == bytes([7]) * 4096
        """)


@contextlib.contextmanager
def pinned_memory(size):
    """The address of memory of the host that CUDA knows."""
    managedmem.Device(0).set_current()
    pointer = ctypes.c_void_p()
    assert raw_driver().cuMemAllocHost_v2(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0
    yield pointer.value
    assert raw_driver().cuMemFreeHost(pointer) == 0


class TestWrappedMemory:
    """An export names the kind of the memory, or is a BufferError."""

    @versions
    def test_of_the_system(self, device0, arguments):
        memory = ctypes.create_string_buffer(b"system", PAGE)
        wrapped = ManagedBuffer.from_handle(ctypes.addressof(memory), PAGE, owner=memory)
        assert wrapped.device_id == -1
        assert wrapped.__dlpack_device__() == (1, 0)
        tensor = capsule_struct(capsule := wrapped.__dlpack__(**arguments)).tensor
        assert (tensor.device.device_type, tensor.device.device_id) == (1, 0)
        assert tensor.data == wrapped.handle and capsule
        assert bytes(memoryview(wrapped)[:6]) == b"system"
        for device in ((13, 0), (2, 0), (3, 0), (1, 1)):
            with pytest.raises(BufferError, match="system memory"):
                wrapped.__dlpack__(dl_device=device)

    def test_the_array_interface_needs_a_device_that_reaches_it(self, device0):
        """Libraries ask with hasattr() and getattr(); an address would be read by a kernel."""
        memory = ctypes.create_string_buffer(PAGE)
        wrapped = ManagedBuffer.from_handle(ctypes.addressof(memory), PAGE, owner=memory)
        assert hasattr(wrapped, "__cuda_array_interface__") is device0.pageable_memory_access
        if device0.pageable_memory_access:
            return
        assert getattr(wrapped, "__cuda_array_interface__", None) is None
        with pytest.raises(BufferError, match="system memory") as caught:
            _ = wrapped[:9].__cuda_array_interface__
        assert type(caught.value) is managedmem.ExportError

    def test_system_memory_that_devices_reach(self):
        run_python(
            """
            import ctypes
            import managedmem
            memory = ctypes.create_string_buffer(4096)
            address = ctypes.addressof(memory)
            wrapped = managedmem.ManagedBuffer.from_handle(address, 4096)
            assert wrapped.__cuda_array_interface__["data"] == (address, False)
            assert wrapped.__dlpack_device__() == (1, 0)
            """,
            emulator="pageable=1",
        )

    @versions
    def test_of_a_device(self, device0, arguments):
        with device_memory(2 * PAGE) as pointer:
            wrapped = ManagedBuffer.from_handle(pointer, PAGE)
            assert wrapped.device_id == 0
            assert wrapped.__dlpack_device__() == (2, 0)
            tensor = capsule_struct(capsule := wrapped[9:].__dlpack__(**arguments)).tensor
            assert (tensor.device.device_type, tensor.device.device_id) == (2, 0)
            assert tensor.data == pointer + 9 and capsule
            assert wrapped.__cuda_array_interface__["data"] == (pointer, False)
            assert wrapped.__cuda_array_interface__["stream"] is None
            for device in ((13, 0), (1, 0), (2, 1)):
                with pytest.raises(BufferError, match="memory of a device"):
                    wrapped.__dlpack__(dl_device=device)
            with pytest.raises(BufferError, match="plain device memory"):
                memoryview(wrapped)

    @versions
    def test_pinned(self, arguments):
        with pinned_memory(PAGE) as pointer:
            wrapped = ManagedBuffer.from_handle(pointer, PAGE)
            assert wrapped.__dlpack_device__() == (3, 0)
            assert wrapped.__cuda_array_interface__["data"] == (pointer, False)
            assert wrapped.__cuda_array_interface__["stream"] is None
            for asked, kind in ((None, 3), ((3, 0), 3), ((1, 0), 1), ((2, 0), 2)):
                tensor = capsule_struct(
                    capsule := wrapped.__dlpack__(dl_device=asked, **arguments)
                ).tensor
                assert (tensor.device.device_type, tensor.device.device_id) == (kind, 0)
                assert tensor.data == pointer and capsule
            for device in ((13, 0), (2, 99)):
                with pytest.raises(BufferError, match="pinned memory"):
                    wrapped.__dlpack__(dl_device=device)

    def test_managed(self, buf):
        wrapped = ManagedBuffer.from_handle(buf.handle, buf.size)
        assert wrapped.__dlpack_device__() == (13, 0)
        capsule = wrapped.__dlpack__()
        assert capsule_struct(capsule).tensor.device.device_type == 13

    def test_more_than_its_allocation(self, buf):
        wrapped = ManagedBuffer.from_handle(buf.handle, buf.size + (64 << 20))
        for export in (
            wrapped.__dlpack__,
            wrapped.__dlpack_device__,
            lambda: wrapped.__cuda_array_interface__,
        ):
            with pytest.raises(BufferError, match="leaves its allocation"):
                export()

    def test_closed(self, buf):
        wrapped = ManagedBuffer.from_handle(buf.handle, buf.size)
        wrapped.close()
        for export in (
            wrapped.__dlpack__,
            wrapped.__dlpack_device__,
            lambda: wrapped.__cuda_array_interface__,
            lambda: memoryview(wrapped),
        ):
            with pytest.raises(RuntimeError, match="closed"):
                export()

    def test_only_managed_memory_is_copied(self, buf):
        memory = ctypes.create_string_buffer(b"system", PAGE)
        wrapped = ManagedBuffer.from_handle(ctypes.addressof(memory), PAGE, owner=memory)
        with pytest.raises(BufferError, match="cannot be copied"):
            wrapped.__dlpack__(copy=True)
        wrapped = ManagedBuffer.from_handle(buf.handle, buf.size)
        for device, kind in ((None, CUDA_MANAGED), ((1, 0), 1)):
            capsule = wrapped.__dlpack__(copy=True, dl_device=device)
            tensor = capsule_struct(capsule).tensor
            assert tensor.device.device_type == kind and tensor.data != buf.handle

    def test_a_copy_of_nothing_in_read_only_memory(self):
        """A resource may answer a request for no bytes with any empty buffer."""
        run_to_the_end("""
            import managedmem
            from managedmem import ManagedBuffer
            memory = managedmem.empty(4096)
            class Fixed:
                __cuda_array_interface__ = {"version": 3, "typestr": "|u1", "shape": (4096,),
                                            "data": (memory.handle, True)}
            class Resource:
                def allocate(self, size, *, stream):
                    return ManagedBuffer.from_handle(memory.handle, 4096, owner=Fixed())[0:0]
                def deallocate(self, ptr, size, *, stream):
                    pass
            lent = ManagedBuffer.from_handle(0, 0, mr=Resource())
            try:
                lent.__dlpack__(copy=True)
            except BufferError as error:
                assert "read-only" in str(error)
            lent.__dlpack__(copy=True, max_version=(1, 0))
        """)


class TestBufferProtocol:
    def test_read_only_memory_is_not_lent_for_writes(self):
        constant = bytes(PAGE)
        address = ctypes.cast(constant, ctypes.c_void_p).value
        wrapped = ManagedBuffer.from_handle(address, PAGE, owner=constant)
        with pytest.raises(TypeError, match="read-write"):  # in place of the BufferError
            io.BytesIO(b"written").readinto(wrapped)
        with memoryview(wrapped) as view:
            assert view.readonly is True
        assert constant == bytes(PAGE)

    def test_is_writable_memory(self, buf):
        with memoryview(buf) as view:
            assert view.readonly is False
            assert view.c_contiguous
            assert (view.format, view.itemsize, view.nbytes) == ("B", 1, buf.size)
            view[3] = 200
        assert contents(buf)[3] == 200

    def test_bytes_of_a_buffer(self, buf):
        write(buf, pattern(buf.size))
        assert bytes(buf) == pattern(buf.size)

    @pytest.mark.parametrize("place", ["device", "host"])
    def test_bytes_wherever_the_pages_are(self, buf, device0, place):
        write(buf, pattern(buf.size))
        buf.prefetch(device0 if place == "device" else Host())
        assert contents(buf) == pattern(buf.size)

    def test_of_a_row_view_is_two_dimensional(self, buf):
        with memoryview(buf.view("int32", (512, 512))) as view:
            assert view.ndim == 2
            view[1, 2] = -5
            assert view[1, 2] == -5
        assert contents(buf)[(512 + 2) * 4 : (512 + 3) * 4] == b"\xfb\xff\xff\xff"

    def test_of_a_slice_starts_there(self, buf):
        write(buf, pattern(buf.size))
        with memoryview(buf[100:200]) as view:
            assert view.tobytes() == pattern(buf.size)[100:200]

    def test_keeps_the_memory_alive(self):
        view = memoryview(managedmem.ManagedMemoryResource().allocate(PAGE))
        gc.collect()
        view[:] = b"\x01" * PAGE
        assert view.tobytes() == b"\x01" * PAGE

    def test_can_be_read_into(self, buf, tmp_path):
        file = tmp_path / "data"
        file.write_bytes(pattern(buf.size))
        with file.open("rb") as stream:
            assert stream.readinto(buf) == buf.size
        assert contents(buf) == pattern(buf.size)


class TestNumpy:
    @pytest.fixture(autouse=True)
    def numpy(self):
        return pytest.importorskip("numpy", reason="needs NumPy")

    def test_asarray_shares_the_memory(self, numpy, alloc):
        buffer = alloc(4096)
        array = numpy.asarray(buffer.view("float32", (32, 32)))
        array[:] = 2.5
        assert (array.dtype, array.shape) == (numpy.float32, (32, 32))
        assert array.ctypes.data == buffer.handle
        assert contents(buffer)[:4] == numpy.float32(2.5).tobytes()
        with pytest.raises(BufferError):
            buffer.close()
        del array
        buffer.close()
        assert buffer.is_closed

    @types
    def test_asarray_knows_the_type(self, numpy, alloc, dtype, typestr, dlpack):
        assert numpy.asarray(alloc(4096).view(dtype)).dtype == numpy.dtype(dtype)

    def test_from_dlpack_shares_the_memory(self, numpy, alloc):
        buffer = alloc(4096)
        array = numpy.from_dlpack(buffer.view("float32"))
        assert array.ctypes.data == buffer.handle
        assert array.flags.writeable
        array[:] = 1.5
        assert contents(buffer) == numpy.full(1024, 1.5, "f4").tobytes()
        with pytest.raises(BufferError):
            buffer.close()
        del array
        gc.collect()
        buffer.close()
        assert buffer.is_closed


def test_our_streams_speak_the_protocol_that_we_read(buf, stream, device0):
    buf.prefetch(device0, stream=ProtocolStream(*reversed(stream.__cuda_stream__())))
    stream.sync()
    assert buf.last_prefetch_location is device0


@pytest.mark.parametrize("busy", [0, 1], ids=["Device(0)", "the last device"])
def test_without_concurrent_access_a_host_view_waits_for_every_device(busy):
    """There the host must not touch managed memory while any device works."""
    run_python(
        f"""
        import ctypes
        import managedmem
        from managedmem import Device, Stream, emulator
        device = Device.all()[-{busy}]
        device.set_current()
        stream = Stream()
        with managedmem.empty(4096) as buffer, managedmem.empty(4096) as other:
            emulator.schedule("lazy")
            other.fill(7, stream=stream)
            Device(0).set_current()
            with memoryview(buffer):
                # Read without another wait, in memory that the view is not of.
                assert ctypes.string_at(other.handle, 4096) == b"\\x07" * 4096
        """,
        emulator="profile=wsl,devices=3",
    )
