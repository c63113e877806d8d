"""ManagedBuffer and ManagedMemoryResource: making, describing, wrapping, closing."""

import ctypes
import gc
import weakref

import pytest

import managedmem
from constants import MIB, PAGE
from contents import contents, write
from driver import device_memory, managed_memory
from managed_uses import USES
from managedmem import Device, Host, ManagedBuffer, ManagedMemoryResource, emulator
from threads import at_once


def keeps(buffer):
    """A second name for the same memory, as C code that knows only the pointer would have it."""
    return (ctypes.c_ubyte * buffer.size).from_address(buffer.handle)


class TestAllocate:
    def test_describes_plain_bytes(self, alloc):
        buffer = alloc(3 * PAGE)
        assert buffer.size == buffer.nbytes == len(buffer) == 3 * PAGE
        assert buffer.shape == (3 * PAGE,)
        assert buffer.dtype == "uint8"
        assert buffer.itemsize == 1
        assert buffer.handle != 0
        assert buffer.is_closed is False

    def test_is_managed_and_accessible_from_both_sides(self, buf):
        assert buf.is_managed is True
        assert buf.is_host_accessible is True
        assert buf.is_device_accessible is True

    def test_knows_its_resource_and_device(self, alloc):
        resource = ManagedMemoryResource()
        buffer = resource.allocate(PAGE)
        assert buffer.memory_resource is resource
        assert buffer.device_id == Device().device_id == resource.device_id
        assert buffer.owner is None
        buffer.close()

    def test_follows_the_current_device(self, current_device, device1):
        device1.set_current()
        with ManagedMemoryResource().allocate(PAGE) as buffer:
            assert buffer.device_id == 1

    def test_has_default_advice(self, buf):
        assert buf.read_mostly is False
        assert buf.preferred_location is None
        assert set(buf.accessed_by) == set()
        assert buf.last_prefetch_location is None

    @pytest.mark.parametrize("size", [1, 2, 100, PAGE - 1, PAGE, PAGE + 1, MIB + 7])
    def test_any_size_is_usable_to_its_last_byte(self, alloc, size):
        buffer = alloc(size)
        write(buffer, 0xAB)
        assert contents(buffer) == b"\xab" * size

    def test_buffers_do_not_overlap(self, alloc):
        buffers = [alloc(100) for _ in range(20)]
        for i, buffer in enumerate(buffers):
            write(buffer, i)
        assert [contents(b) for b in buffers] == [bytes([i]) * 100 for i in range(20)]

    def test_size_must_be_named(self):
        with pytest.raises(TypeError):
            ManagedMemoryResource().allocate()

    def test_stream_is_keyword_only(self, stream):
        with pytest.raises(TypeError):
            ManagedMemoryResource().allocate(PAGE, stream)


class TestResource:
    def test_is_accessible_from_both_sides(self):
        resource = ManagedMemoryResource()
        assert resource.is_host_accessible is True
        assert resource.is_device_accessible is True

    def test_repr_says_what_it_is(self):
        assert "ManagedMemoryResource" in repr(ManagedMemoryResource())

    def test_deallocate_frees_a_pointer(self, stream):
        """For memory that was made elsewhere; what allocate() gave is closed instead."""
        resource = ManagedMemoryResource()
        for how in ({}, {"stream": stream}):
            pointer = managed_memory()
            wrapped = ManagedBuffer.from_handle(pointer, PAGE)
            assert wrapped.is_managed is True
            wrapped.close()
            assert resource.deallocate(pointer, PAGE, **how) is None
            assert ManagedBuffer.from_handle(pointer, PAGE).is_managed is False

    def test_from_handle_with_a_resource_frees_through_it(self):
        pointer = managed_memory()
        with ManagedBuffer.from_handle(pointer, PAGE, mr=ManagedMemoryResource()) as wrapped:
            write(wrapped, 1)
        assert ManagedBuffer.from_handle(pointer, PAGE).is_managed is False

    @pytest.mark.parametrize("bad", [("1", PAGE), (None, PAGE), (4096, "1"), (4096,)], ids=repr)
    def test_deallocate_wants_a_pointer_and_a_size(self, bad):
        with pytest.raises(TypeError):
            ManagedMemoryResource().deallocate(*bad)

    def test_a_resource_lives_as_long_as_its_buffers(self):
        buffer = ManagedMemoryResource().allocate(PAGE)
        gc.collect()
        assert isinstance(buffer.memory_resource, ManagedMemoryResource)
        buffer.close()


class TestEmpty:
    @pytest.mark.parametrize(
        ("shape", "dtype", "expected"),
        [
            (16, "uint8", (16,)),
            ((1,) * 8, "int8", (1,) * 8),
            ((16,), "float32", (16,)),
            ((4, 8), "float64", (4, 8)),
            ([2, 3, 5], "int16", (2, 3, 5)),
        ],
    )
    def test_has_the_shape_and_dtype(self, shape, dtype, expected):
        with managedmem.empty(shape, dtype) as buffer:
            assert buffer.shape == expected
            assert buffer.dtype == dtype
            count = 1
            for extent in expected:
                count *= extent
            assert buffer.size == count * buffer.itemsize
            assert len(buffer) == expected[0]

    def test_is_bytes_by_default(self):
        with managedmem.empty(10) as buffer:
            assert (buffer.dtype, buffer.shape, buffer.size) == ("uint8", (10,), 10)

    @pytest.mark.parametrize(
        "shape", [-1, (4, -4), (0, -1), (1 << 62, 8), (0, 1 << 62, 8), (1,) * 9], ids=repr
    )
    def test_refuses_shapes_that_no_array_has(self, shape):
        with pytest.raises(ValueError, match="shape"):
            managedmem.empty(shape, "float64")

    def test_without_axes_is_one_element(self):
        with managedmem.empty((), "float64") as buffer:
            assert (buffer.shape, buffer.strides, buffer.ndim, buffer.size) == ((), (), 0, 8)
            write(buffer, 7)
            assert contents(buffer) == b"\x07" * 8

    @pytest.mark.parametrize("shape", [10.5, None, object, "10MB", "4"], ids=repr)
    def test_the_error_describes_a_shape(self, shape):
        with pytest.raises(TypeError, match=r"a shape is an int or a sequence of ints.*got "):
            managedmem.empty(shape)

    def test_an_array_of_lengths_is_a_shape(self):
        """NumPy's arrays have an __index__ too, which works only for one number."""

        class Lengths(list):
            def __index__(self):
                if len(self) != 1:
                    raise TypeError("only one number is an index")
                return self[0]

        for lengths, shape in [((2, 3), (2, 3)), ((3,), (3,)), ((), ())]:
            with managedmem.empty(Lengths(lengths)) as buffer:
                assert buffer.shape == shape
                assert buffer.view(shape=Lengths(lengths)).shape == shape

    def test_a_failure_to_tell_the_length_is_passed_on(self):
        class Broken(list):
            def __index__(self):
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            managedmem.empty(Broken([1]))

    def test_lengths_by_position_are_a_tuple(self):
        """The second argument is the dtype, where torch.empty() takes a length."""
        with pytest.raises(TypeError, match=r"one tuple, empty\(\(10, 20\)\)"):
            managedmem.empty(10, 20)
        with pytest.raises(TypeError, match=r"empty\(\(10, 20, ...\)\)"):
            managedmem.empty(10, 20, 30)
        with pytest.raises(TypeError, match="20 is not a dtype"):
            managedmem.empty(10, dtype=20)

    @pytest.mark.parametrize("shape", ["4", 4.0, (4, 1.5), None, (4, "2")], ids=repr)
    def test_refuses_what_is_no_shape(self, shape):
        with pytest.raises(TypeError):
            managedmem.empty(shape)


def test_is_not_a_number(buf):
    """int() and float() read the bytes of an object with the buffer protocol as text."""
    part = buf[:2]
    write(part, ord("1"))
    for convert in (int, float, complex):
        with pytest.raises(TypeError, match=r"not a number: buf\.numpy\(\)\.item\(\)"):
            convert(part)


def test_direct_construction_says_what_to_call():
    with pytest.raises(TypeError, match=r"allocate|from_handle|empty"):
        ManagedBuffer()


def test_repr_shows_size_and_state(alloc):
    buffer = alloc(3 * PAGE)
    assert "ManagedBuffer" in repr(buffer)
    assert str(3 * PAGE) in repr(buffer)
    assert "closed" not in repr(buffer)
    buffer.close()
    assert "closed" in repr(buffer)


class TestFromHandle:
    def test_wraps_the_same_memory(self, buf):
        wrapped = ManagedBuffer.from_handle(buf.handle, buf.size)
        assert (wrapped.handle, wrapped.size) == (buf.handle, buf.size)
        assert wrapped.is_managed is True
        write(wrapped, 4)
        assert contents(buf) == b"\x04" * buf.size

    def test_does_not_own_what_it_wraps(self, buf):
        wrapped = ManagedBuffer.from_handle(buf.handle, buf.size)
        wrapped.close()
        write(buf, 1)
        assert contents(buf) == b"\x01" * buf.size

    def test_has_no_resource_and_no_owner_unless_given(self, buf):
        wrapped = ManagedBuffer.from_handle(buf.handle, buf.size)
        assert wrapped.owner is None
        assert wrapped.memory_resource is None

    def test_keeps_its_owner_alive_as_long_as_it_and_its_views(self, buf):
        owner = type("Owner", (), {})()
        gone = weakref.ref(owner)
        wrapped = ManagedBuffer.from_handle(buf.handle, buf.size, owner=owner)
        assert wrapped.owner is owner
        view = wrapped[:PAGE]
        del owner, wrapped
        gc.collect()
        assert gone() is view.owner is not None
        del view
        gc.collect()
        assert gone() is None

    def test_gives_the_memory_back_to_its_resource_once(self, buf):
        calls = []

        class Resource:
            def deallocate(self, ptr, size, stream=None):
                calls.append((ptr, size))

        resource = Resource()
        wrapped = ManagedBuffer.from_handle(buf.handle, buf.size, mr=resource)
        assert wrapped.memory_resource is resource
        wrapped.close()
        wrapped.close()
        assert calls == [(buf.handle, buf.size)]

    def test_resource_and_owner_exclude_each_other(self, buf):
        with pytest.raises(ValueError, match="owner"):
            ManagedBuffer.from_handle(
                buf.handle, buf.size, mr=ManagedMemoryResource(), owner=object()
            )

    def test_an_owner_may_hold_the_buffer(self, buf):
        """A cycle through the owner is garbage, not a leak."""
        freed = []

        class Owner:
            def __del__(self):
                freed.append(True)

        owner = Owner()
        owner.buffer = ManagedBuffer.from_handle(buf.handle, buf.size, owner=owner)
        del owner
        gc.collect()
        assert freed == [True]

    @pytest.mark.parametrize("bad", ["0x10", 1.0, None, b"", [1]], ids=repr)
    def test_the_pointer_must_be_an_integer(self, bad):
        with pytest.raises(TypeError):
            ManagedBuffer.from_handle(bad, PAGE)

    @pytest.mark.parametrize("bad", [-1, 1 << 64], ids=repr)
    def test_the_pointer_must_be_an_address(self, bad):
        with pytest.raises((ValueError, OverflowError)):
            ManagedBuffer.from_handle(bad, PAGE)

    def test_memory_that_is_not_managed_can_be_wrapped(self):
        with device_memory() as pointer:
            wrapped = ManagedBuffer.from_handle(pointer, PAGE)
            assert wrapped.is_managed is False
            wrapped.close()


class TestSubclass:
    class Tagged(ManagedBuffer):
        tag = "mine"

        def doubled(self):
            return self.size * 2

    def test_from_handle_gives_the_class_it_is_called_on(self, buf):
        wrapped = self.Tagged.from_handle(buf.handle, buf.size)
        assert type(wrapped) is self.Tagged
        assert wrapped.doubled() == 2 * buf.size
        wrapped.note = "attributes work"
        assert wrapped.note == "attributes work"

    def test_works_like_its_base(self, buf, device0):
        wrapped = self.Tagged.from_handle(buf.handle, buf.size)
        wrapped.read_mostly = True
        assert buf.read_mostly is True
        managedmem.prefetch(wrapped, device0)
        device0.sync()
        assert buf.last_prefetch_location is device0

    def test_cannot_be_constructed_either(self):
        with pytest.raises(TypeError):
            self.Tagged()


ACTIVE = {
    **USES,
    "fill": lambda b: b.fill(0),
    "copy_to": lambda b: b.copy_to(),
    "copy_from": lambda b: b.copy_from(b),
    "slice": lambda b: b[:PAGE],
    "view": lambda b: b.view("uint8"),
    "memoryview": memoryview,
    "bytes": bytes,
    "__cuda_array_interface__": lambda b: b.__cuda_array_interface__,
    "__dlpack__": lambda b: b.__dlpack__(),
}


class TestClose:
    @pytest.mark.parametrize("use", ACTIVE.values(), ids=ACTIVE)
    def test_a_closed_buffer_refuses_work(self, alloc, use):
        buffer = alloc(2 * PAGE)
        buffer.close()
        with pytest.raises(RuntimeError, match="closed"):
            use(buffer)

    @pytest.mark.parametrize("use", ACTIVE.values(), ids=ACTIVE)
    def test_an_open_buffer_takes_it(self, alloc, use):
        result = use(alloc(2 * PAGE))
        del result
        gc.collect()

    def test_what_only_looks_stays_safe(self, alloc):
        buffer = alloc(2 * PAGE)
        buffer.close()
        assert buffer.is_closed is True
        assert buffer.handle == 0
        assert buffer.size == 2 * PAGE
        assert buffer.close() is None
        assert "closed" in repr(buffer)

    def test_leaving_the_block_closes(self):
        with ManagedMemoryResource().allocate(PAGE) as buffer:
            assert buffer.is_closed is False
        assert buffer.is_closed is True
        buffer = ManagedMemoryResource().allocate(PAGE)
        buffer.__exit__()
        assert buffer.is_closed is True

    def test_takes_a_stream_by_position_or_name(self, stream):
        resource = ManagedMemoryResource()
        for close in (lambda b: b.close(stream), lambda b: b.close(stream=stream)):
            buffer = resource.allocate(PAGE)
            close(buffer)
            assert buffer.is_closed

    def test_of_an_unsynchronised_prefetch_is_safe(self, stream, device0):
        buffer = ManagedMemoryResource().allocate(MIB)
        buffer.prefetch(device0, stream=stream)
        buffer.close(stream)
        stream.sync()
        assert buffer.is_closed

    @pytest.mark.emulator_only
    def test_frees_the_memory_once(self):
        before = emulator.live().allocations
        buffer = ManagedMemoryResource().allocate(PAGE)
        assert emulator.live().allocations == before + 1
        buffer.close()
        buffer.close()
        assert emulator.live().allocations == before

    @pytest.mark.emulator_only
    def test_a_forgotten_buffer_is_freed(self):
        before = emulator.live().allocations
        buffer = ManagedMemoryResource().allocate(PAGE)
        assert emulator.live().allocations == before + 1
        del buffer
        gc.collect()
        assert emulator.live().allocations == before

    def test_from_many_threads_is_safe(self):
        """Exactly one thread closes; the others find it closed."""
        resource = ManagedMemoryResource()
        for _ in range(20):
            buffer = resource.allocate(PAGE)
            at_once(*[buffer.close] * 4)
            assert buffer.is_closed


class TestIpc:
    def test_is_never_mapped(self, buf):
        assert buf.is_mapped is False

    def test_has_no_descriptor_and_says_why(self, buf):
        with pytest.raises(RuntimeError, match=r"(?i)ipc"):
            _ = buf.ipc_descriptor

    @pytest.mark.parametrize(
        "error",
        [managedmem.IPCNotSupportedError, NotImplementedError, AttributeError, RuntimeError],
    )
    def test_one_error_for_all_of_it(self, buf, error):
        for use in (
            lambda: buf.ipc_descriptor,
            lambda: buf[:16].ipc_descriptor,
            lambda: ManagedBuffer.from_ipc_descriptor(None, None),
            lambda: buf.from_ipc_descriptor(ManagedMemoryResource(), object(), stream=None),
        ):
            with pytest.raises(error, match="no IPC for managed memory"):
                use()

    def test_can_be_asked_for(self, buf):
        assert not hasattr(buf, "ipc_descriptor")
        assert getattr(buf, "ipc_descriptor", None) is None

    def test_importing_has_the_parameters_of_cuda_core(self):
        with pytest.raises(TypeError, match="ipc_descriptor"):
            ManagedBuffer.from_ipc_descriptor(None)


def test_the_host_sees_writes_through_any_name(buf):
    keeps(buf)[5] = 99
    assert bytes(buf)[5] == 99


def test_threads_may_share_one_buffer(buf, device0):
    def work():
        for _ in range(50):
            buf.read_mostly = True
            buf.prefetch(device0)
            assert buf.read_mostly is True
            buf.prefetch(Host())

    at_once(*[work] * 4)
    device0.sync()
    assert buf.last_prefetch_location in (device0, Host())


class TestHostViewsThatAreRefused:
    """A refusal leaves no export behind, so the buffer can be closed."""

    def test_of_device_memory(self):
        with device_memory() as address:
            buffer = ManagedBuffer.from_handle(address, PAGE)
            part = buffer[:100]
            for refused in (buffer, part):
                for _ in range(3):
                    with pytest.raises(BufferError, match="the host cannot reach"):
                        memoryview(refused)
            part.close()
            buffer.close()
            assert buffer.is_closed

    @pytest.mark.emulator_only
    def test_because_the_driver_fails(self, alloc):
        buffer = alloc(PAGE)
        part = buffer[:100]
        for refused in (buffer, part):
            emulator.fail("cuPointerGetAttributes", code=719)
            with pytest.raises(managedmem.CUDAError):
                memoryview(refused)
        part.close()
        buffer.close()

    @pytest.mark.parametrize("which", ["buffer", "view"])
    def test_of_a_closed_one(self, alloc, which):
        buffer = alloc(PAGE)
        part = buffer[:100]
        closed = buffer if which == "buffer" else part
        if which == "buffer":
            part.close()
        closed.close()
        for _ in range(3):
            with pytest.raises(RuntimeError, match="closed"):
                memoryview(closed)
        buffer.close()

    def test_for_a_layout_it_does_not_have(self, alloc):
        """Fortran order is asked for through ctypes: no Python code can."""
        buffer = alloc(4096)
        matrix = buffer.view("uint8", (64, 64))
        view = ctypes.create_string_buffer(256)
        get = ctypes.pythonapi.PyObject_GetBuffer
        get.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int]
        fortran = 0x40 | 0x18
        with pytest.raises(BufferError, match="not Fortran"):
            get(matrix, view, fortran)
        for both in (buffer, buffer[:0].view("uint8", (0, 64))):  # of one axis, and empty
            assert get(both, view, fortran) == 0
            ctypes.pythonapi.PyBuffer_Release(view)
        matrix.close()
        buffer.close()


def test_the_largest_shape_that_can_be_described(buf):
    """The size of the shape is counted before it is compared."""
    largest = (1 << 63) - 1
    with pytest.raises(ValueError, match=f"has {largest} bytes"):
        buf.view("uint8", (largest,))
    with pytest.raises(ValueError, match=f"has {(largest // 8) * 8} bytes"):
        buf.view("int64", (largest // 8,))
    for dtype, length in (("uint8", largest // 2 + 1), ("int64", largest // 16 + 1)):
        with pytest.raises(ValueError, match="too many bytes"):
            buf.view(dtype, (length, 2))


def test_a_dtype_by_name_is_no_second_length():
    with pytest.raises(TypeError) as error:
        managedmem.empty(4, dtype=8)
    assert "one tuple" not in str(error.value)
    assert "dtype" in str(error.value)
