"""Slices and typed views: the same memory, just that range, and alive as long as they are used."""

import ctypes
import gc
import struct

import pytest

import managedmem
from helpers import PAGE, contents, pattern, write
from managedmem import Device, Host, emulator

# dtype name, memoryview format, item size
DTYPES = [
    ("bool", "?", 1),
    ("int8", "b", 1),
    ("uint8", "B", 1),
    ("int16", "h", 2),
    ("uint16", "H", 2),
    ("int32", "i", 4),
    ("uint32", "I", 4),
    ("int64", ("q", "l"), 8),
    ("uint64", ("Q", "L"), 8),
    ("float16", "e", 2),
    ("float32", "f", 4),
    ("float64", "d", 8),
    ("complex64", ("Zf", "F"), 8),
    ("complex128", ("Zd", "D"), 16),
]
NAMES = [row[0] for row in DTYPES]


class TestSlice:
    @pytest.mark.parametrize(
        ("key", "start", "stop"),
        [
            (slice(None), 0, 4096),
            (slice(0, 4096), 0, 4096),
            (slice(10, 20), 10, 20),
            (slice(4095, 4096), 4095, 4096),
            (slice(None, 7), 0, 7),
            (slice(7, None), 7, 4096),
            (slice(-6, None), 4090, 4096),
            (slice(None, -6), 0, 4090),
            (slice(-6, -2), 4090, 4094),
            (slice(1, 3, 1), 1, 3),
        ],
        ids=str,
    )
    def test_is_the_range_it_names(self, alloc, key, start, stop):
        buffer = alloc(4096)
        data = pattern(4096)
        write(buffer, data)
        view = buffer[key]
        assert view.handle == buffer.handle + start
        assert (view.size, view.shape) == (stop - start, (stop - start,))
        assert contents(view) == data[start:stop]

    @pytest.mark.parametrize(
        "key",
        [
            slice(0, 4097),
            slice(5000, 6000),
            slice(4096, 4097),
            slice(-4097, None),
            slice(0, 1 << 70),
        ],
        ids=str,
    )
    def test_outside_is_an_index_error(self, alloc, key):
        with pytest.raises(IndexError):
            alloc(4096)[key]

    @pytest.mark.parametrize("key", [slice(3, 3), slice(5, 2), slice(4096, None)], ids=str)
    def test_empty_is_a_value_error(self, alloc, key):
        with pytest.raises(ValueError):
            alloc(4096)[key]

    @pytest.mark.parametrize("step", [2, -1, 0, 4096])
    def test_only_step_one(self, alloc, step):
        with pytest.raises(ValueError, match="step"):
            alloc(4096)[::step]

    @pytest.mark.parametrize("key", [0, -1, "a", 1.0, None, ..., (slice(0, 1),) * 2], ids=repr)
    def test_anything_but_a_slice_is_a_type_error(self, alloc, key):
        with pytest.raises(TypeError):
            alloc(4096)[key]

    @pytest.mark.parametrize("key", [slice("a", None), slice(0, 1.5)], ids=str)
    def test_bounds_are_integers(self, alloc, key):
        with pytest.raises(TypeError):
            alloc(4096)[key]

    def test_of_a_slice_starts_where_that_starts(self, alloc):
        buffer = alloc(4096)
        inner = buffer[1000:2000][100:200]
        assert inner.handle == buffer.handle + 1100
        with pytest.raises(IndexError):
            buffer[1000:2000][0:1001]

    def test_cuts_the_first_axis_in_whole_rows(self, alloc):
        rows = alloc(4096).view("float32", (16, 64))
        part = rows[3:5]
        assert part.shape == (2, 64)
        assert part.dtype == "float32"
        assert part.handle == rows.handle + 3 * 64 * 4
        assert len(part) == 2

    def test_shares_the_bytes(self, alloc):
        buffer = alloc(4096)
        write(buffer, 0)
        write(buffer[100:200], 8)
        assert contents(buffer) == bytes(100) + b"\x08" * 100 + bytes(4096 - 200)

    def test_keeps_the_memory_alive(self, device0):
        view = managedmem.ManagedMemoryResource().allocate(4 * PAGE)[PAGE : 2 * PAGE]
        gc.collect()
        write(view, 6)
        view.prefetch(device0)
        assert contents(view) == b"\x06" * PAGE

    def test_knows_the_resource(self, buf):
        assert buf[:PAGE].memory_resource is buf.memory_resource
        assert buf[:PAGE].device_id == buf.device_id
        assert buf[:PAGE].is_managed is True

    def test_of_a_subclass_has_the_class(self, buf):
        class Mine(managedmem.ManagedBuffer):
            pass

        assert isinstance(Mine.from_handle(buf.handle, buf.size)[:PAGE], managedmem.ManagedBuffer)


class TestActsOnJustThatRange:
    @pytest.fixture
    def parts(self, buf):
        """The page acted on and both neighbours."""
        return buf[:PAGE], buf[PAGE : 2 * PAGE], buf[2 * PAGE : 3 * PAGE]

    def test_read_mostly(self, parts, buf):
        parts[1].read_mostly = True
        assert [p.read_mostly for p in parts] == [False, True, False]
        assert buf.read_mostly is False

    def test_preferred_location(self, parts, buf):
        parts[1].preferred_location = Host()
        assert [p.preferred_location for p in parts] == [None, Host(), None]
        assert buf.preferred_location is None

    def test_accessed_by(self, parts, buf, device0):
        parts[1].accessed_by = {device0}
        assert [set(p.accessed_by) for p in parts] == [set(), {device0}, set()]
        assert set(buf.accessed_by) == set()

    def test_prefetch(self, parts, buf, device0):
        parts[1].prefetch(device0)
        assert [p.last_prefetch_location for p in parts] == [None, device0, None]
        assert buf.last_prefetch_location is None

    def test_fill(self, parts, buf):
        parts[1].fill(3)
        assert contents(buf) == bytes(PAGE) + b"\x03" * PAGE + bytes(buf.size - 2 * PAGE)

    def test_copy_to(self, parts, buf):
        data = pattern(PAGE)
        write(parts[1], data)
        with parts[1].copy_to() as copy:
            assert contents(copy) == data
            assert copy.size == PAGE

    @pytest.mark.parametrize("operation", ["discard", "discard_prefetch"])
    @pytest.mark.parametrize("extra", [(0, 0), (1, 0), (0, 1), (100, 100), (PAGE - 1, PAGE - 1)])
    @pytest.mark.parametrize("resident", [Host(), Device(0)], ids=repr)
    def test_discard_leaves_the_neighbours_bytes(self, buf, operation, extra, resident):
        data = pattern(buf.size)
        write(buf, data)
        buf.prefetch(resident)
        start, stop = 4 * PAGE - extra[0], 8 * PAGE + extra[1]
        getattr(buf[start:stop], operation)(*(() if operation == "discard" else (Host(),)))
        # Only pages wholly inside the range may change: the partial first and last page stay.
        seen = contents(buf)
        assert seen[: 4 * PAGE] == data[: 4 * PAGE]
        assert seen[8 * PAGE :] == data[8 * PAGE :]

    @pytest.mark.parametrize("size", [1, 100, PAGE - 1, PAGE, PAGE + 100, 2 * PAGE - 2])
    def test_discard_of_less_than_a_whole_page_is_refused(self, buf, size):
        data = pattern(buf.size)
        write(buf, data)
        with pytest.raises(ValueError, match="page"):
            buf[PAGE + 1 : PAGE + 1 + size].discard()
        assert contents(buf) == data

    @pytest.mark.emulator_only
    def test_discard_really_discards_every_whole_page(self, buf):
        data = pattern(buf.size)
        write(buf, data)
        buf[PAGE - 1 : 4 * PAGE + 1].discard()
        seen = contents(buf)
        for page in range(1, 4):
            assert seen[page * PAGE : (page + 1) * PAGE] != data[page * PAGE : (page + 1) * PAGE]


class TestView:
    @pytest.mark.parametrize(("name", "code", "itemsize"), DTYPES, ids=NAMES)
    def test_reads_the_bytes_as_that_type(self, alloc, name, code, itemsize):
        view = alloc(4096).view(name)
        assert view.dtype == name
        assert view.itemsize == itemsize
        assert view.shape == (4096 // itemsize,)
        assert len(view) == 4096 // itemsize
        assert view.nbytes == view.size == 4096
        with memoryview(view) as shown:
            assert shown.format.lstrip("<@=") in code
            assert shown.itemsize == itemsize
            assert shown.shape == view.shape
            assert shown.strides == (itemsize,)
            assert shown.readonly is False

    def test_takes_a_shape(self, alloc):
        view = alloc(4096).view("float32", (4, 16, 16))
        assert view.shape == (4, 16, 16)
        with memoryview(view) as shown:
            assert shown.ndim == 3
            assert shown.strides == (1024, 64, 4)
            assert shown.c_contiguous

    def test_takes_a_shape_alone(self, alloc):
        view = alloc(4096).view(shape=(64, 64))
        assert (view.dtype, view.shape) == ("uint8", (64, 64))

    def test_without_arguments_is_the_same_layout(self, alloc):
        typed = alloc(4096).view("int16", (2, 1024))
        again = typed.view()
        assert (again.dtype, again.shape, again.handle) == ("int16", (2, 1024), typed.handle)

    def test_a_number_is_a_shape_of_one_axis(self, alloc):
        assert alloc(4096).view("int32", 1024).shape == (1024,)

    def test_writes_reach_the_memory(self, alloc):
        buffer = alloc(4096)
        with memoryview(buffer.view("float32")) as shown:
            shown[1] = 1.5
        assert contents(buffer)[4:8] == struct.pack("<f", 1.5)

    @pytest.mark.parametrize(
        ("given", "name"),
        [
            (float, "float64"),
            (int, "int64"),
            (bool, "bool"),
            (complex, "complex128"),
            ("f4", "float32"),
            ("<f4", "float32"),
            ("<i8", "int64"),
            ("|u1", "uint8"),
            ("u2", "uint16"),
        ],
        ids=repr,
    )
    def test_dtype_spellings(self, alloc, given, name):
        assert alloc(4096).view(given).dtype == name

    @pytest.mark.parametrize("name", NAMES)
    def test_numpy_dtypes(self, alloc, name):
        numpy = pytest.importorskip("numpy", reason="needs NumPy")
        buffer = alloc(4096)
        assert buffer.view(numpy.dtype(name)).dtype == name
        scalar = numpy.bool_ if name == "bool" else getattr(numpy, name)
        assert buffer.view(scalar).dtype == name

    def test_torch_dtypes(self, alloc):
        torch = pytest.importorskip("torch", reason="needs torch")
        buffer = alloc(4096)
        assert buffer.view(torch.float16).dtype == "float16"
        assert buffer.view(torch.int64).dtype == "int64"

    @pytest.mark.parametrize(
        "bad", ["float31", "", "O", "U4", ">f4", "f4,f4", 4, object(), str], ids=repr
    )
    def test_refuses_other_types(self, alloc, bad):
        with pytest.raises((TypeError, ValueError), match="dtype"):
            alloc(4096).view(bad)

    @pytest.mark.parametrize("name", ["", "torch."])
    def test_nothing_behind_the_end_of_a_name_is_read(self, alloc, name):
        """The bytes that follow the text in memory spell a type; its length is cut by hand."""
        text = f"{name}\0f4".encode().decode()
        length = ctypes.c_ssize_t.from_address(id(text) + object.__basicsize__)
        assert length.value == len(name) + 3
        length.value = len(name)
        try:
            with pytest.raises(TypeError, match="no dtype"):
                alloc(4096).view(text)
        finally:
            length.value = len(name) + 3

    def test_the_size_must_be_whole_items(self, alloc):
        with pytest.raises(ValueError):
            alloc(4095).view("float32")

    @pytest.mark.parametrize("shape", [(1023,), (1025,), (0,), (32, 33), (-4, -256), ()], ids=repr)
    def test_the_shape_must_fit_exactly(self, alloc, shape):
        with pytest.raises(ValueError):
            alloc(4096).view("float32", shape)

    @pytest.mark.parametrize("shape", ["1024", 1.0, (1024.0,)], ids=repr)
    def test_the_shape_must_be_integers(self, alloc, shape):
        with pytest.raises(TypeError):
            alloc(4096).view("float32", shape)


class TestClosing:
    def test_of_a_view_closes_just_the_view(self, buf):
        view = buf[:PAGE]
        view.close()
        assert view.is_closed is True
        assert buf.is_closed is False
        write(buf, 1)
        with pytest.raises(RuntimeError, match="closed"):
            _ = view.read_mostly

    def test_of_the_root_closes_every_view(self, alloc, device0):
        buffer = alloc(4 * PAGE)
        views = [buffer[:PAGE], buffer[PAGE:][:PAGE], buffer.view("float32")]
        buffer.close()
        for view in views:
            assert view.is_closed is True
            assert view.handle == 0
            with pytest.raises(RuntimeError, match="closed"):
                view.prefetch(device0)

    @pytest.mark.emulator_only
    def test_of_a_view_frees_nothing(self, buf):
        before = emulator.live().allocations
        buf[:PAGE].close()
        assert emulator.live().allocations == before

    @pytest.mark.parametrize("export", [memoryview, lambda b: b.__dlpack__()])
    def test_of_the_root_waits_for_an_export_of_a_view(self, alloc, export):
        buffer = alloc(4 * PAGE)
        held = export(buffer[PAGE:])
        with pytest.raises(BufferError):
            buffer.close()
        assert buffer.is_closed is False
        del held
        gc.collect()
        buffer.close()
        assert buffer.is_closed is True

    def test_of_a_view_waits_for_its_own_export(self, buf):
        view = buf[:PAGE]
        with memoryview(view):
            with pytest.raises(BufferError):
                view.close()
        view.close()
        assert view.is_closed

    def test_of_a_middle_view_leaves_its_slices(self, buf):
        middle = buf[PAGE : 4 * PAGE]
        inner = middle[:PAGE]
        middle.close()
        assert buf.is_closed is False
        assert inner.handle in (0, buf.handle + PAGE)

    def test_a_block_around_a_view_keeps_the_root(self, buf):
        with buf[:PAGE] as view:
            write(view, 2)
        assert view.is_closed
        assert contents(buf)[:PAGE] == b"\x02" * PAGE
