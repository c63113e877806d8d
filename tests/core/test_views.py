"""Slices and typed views: the same memory, just that range, and alive as long as they are used."""

import ctypes
import gc
import random
import re
import struct

import pytest

import managedmem
from constants import EMULATED, PAGE
from contents import contents, pattern, write
from identifiers import label
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
            (slice(0, 4097), 0, 4096),
            (slice(5000, 6000), 4096, 4096),
            (slice(4096, 4097), 4096, 4096),
            (slice(-4097, None), 0, 4096),
            (slice(0, 1 << 70), 0, 4096),
            (slice(-(1 << 70), -4000), 0, 96),
            (slice(3, 3), 3, 3),
            (slice(5, 2), 5, 5),
            (slice(4096, None), 4096, 4096),
        ],
        ids=str,
    )
    def test_ends_are_clamped_as_those_of_lists(self, alloc, key, start, stop):
        buffer = alloc(4096)
        view = buffer[key]
        assert view.handle == buffer.handle + start
        assert (view.size, view.shape, len(view)) == (stop - start, (stop - start,), stop - start)

    @pytest.mark.parametrize("step", [2, -1, 0, 4096])
    @pytest.mark.parametrize("stop", [None, 0, 1])
    def test_only_step_one(self, alloc, step, stop):
        with pytest.raises(ValueError, match="step"):
            alloc(4096)[0:stop:step]

    @pytest.mark.parametrize(
        "key", ["a", 1.0, None, ..., True, (slice(0, 1),) * 2, (0, 0), [0]], ids=label
    )
    def test_anything_else_is_a_type_error(self, alloc, key):
        with pytest.raises(TypeError, match="an int or a slice"):
            alloc(4096)[key]

    @pytest.mark.parametrize("key", [0, slice(0, 4), "a"], ids=label)
    def test_writing_says_what_does_it(self, alloc, key):
        buffer = alloc(4096)
        with pytest.raises(TypeError, match=r"numpy\(\)\[.*\.fill\(value\).*\.copy_from\("):
            buffer[key] = 5
        with pytest.raises(TypeError, match="size of memory is fixed"):
            del buffer[key]
        assert bytes(buffer) == bytes(4096)

    def test_writing_names_the_key_as_it_is_written(self, alloc):
        buffer = alloc(4096)
        for key, text in (
            (slice(None), ":"),
            (slice(1, 3), "1:3"),
            (slice(None, None, 2), "::2"),
            (slice(-5, None, -1), "-5::-1"),
            ((slice(None), ..., 3), ":, ..., 3"),
            ((), "()"),
            ("a", "'a'"),
        ):
            words = rf"numpy\(\)\[{re.escape(text)}\] = .*buf\[{re.escape(text)}\]\.fill"
            with pytest.raises(TypeError, match=words):
                buffer[key] = 5

        class Unprintable:
            def __repr__(self):
                raise ZeroDivisionError

        for key in (Unprintable(), slice(Unprintable()), (0, Unprintable())):
            with pytest.raises(ZeroDivisionError):
                buffer[key] = 5

    @pytest.mark.parametrize("key", [slice("a", None), slice(0, 1.5)], ids=str)
    def test_bounds_are_integers(self, alloc, key):
        with pytest.raises(TypeError):
            alloc(4096)[key]

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


class TestItem:
    @pytest.mark.parametrize("index", [4096, -4097, 1 << 70, -(1 << 70)])
    def test_outside_is_an_index_error(self, alloc, index):
        with pytest.raises(IndexError):
            alloc(4096)[index]

    def test_takes_numpys_integers(self, alloc):
        numpy = pytest.importorskip("numpy", reason="needs NumPy")
        buffer = alloc(64)
        assert buffer[numpy.int64(-2)].handle == buffer.handle + 62

    def test_iteration_gives_every_row_and_ends(self, alloc):
        rows = alloc(64).view("uint8", (4, 16))
        handles = [rows.handle + 16 * i for i in range(4)]
        assert [row.handle for row in rows] == handles
        assert [row.handle for row in reversed(rows)] == handles[::-1]
        first, *_, last = rows
        assert (first.handle, last.handle) == (handles[0], handles[-1])
        assert list(rows[:0]) == []

    def test_iteration_over_a_closed_buffer_is_an_error(self, alloc):
        buffer = alloc(64)
        rows = iter(buffer)
        next(rows)
        buffer.close()
        with pytest.raises(RuntimeError, match="closed"):
            next(rows)

    def test_elements_are_not_searched(self, alloc):
        """Views compare by identity, so `in` would be False for every number."""
        with pytest.raises(TypeError, match=r"buf\.numpy"):
            0 in alloc(64)  # noqa: B015

    def test_one_element_has_no_axes(self, alloc):
        element = alloc(64)[3]
        assert bool(element) is True
        for use in (len, iter, list):
            with pytest.raises(TypeError, match="0-dimensional"):
                use(element)
        for key in (0, slice(None)):
            with pytest.raises(IndexError, match="0-dimensional"):
                element[key]
        assert element.view(shape=(1,)).handle == element.handle
        assert element.view(shape=()).shape == ()

    def test_is_true_unless_empty(self, alloc):
        buffer = alloc(64)
        assert bool(buffer) is True
        assert bool(buffer[:0]) is False
        buffer.close()
        assert bool(buffer) is True

    def test_a_host_view_of_one_element(self, alloc):
        buffer = alloc(64).view("int32")
        write(buffer, pattern(64))
        with memoryview(buffer[3]) as shown:
            assert (shown.ndim, shown.shape, shown.strides, shown.nbytes) == (0, (), (), 4)
            assert shown[()] == struct.unpack("<i", pattern(64)[12:16])[0]


class TestAgainstNumPy:
    """Shapes, strides, addresses and contents as NumPy has them, for random arrays and keys."""

    @staticmethod
    def key(draw, length):
        """An index or a slice; one in four reaches outside."""

        def end():
            return draw.choice([None, draw.randint(-length - 3, length + 3)])

        if draw.random() < 0.4:
            return draw.randint(-length - 1, length)
        return slice(end(), end(), draw.choice([None, 1]))

    @staticmethod
    def address(array):
        """The address of the first element; for empty arrays NumPy has no rule."""
        if array.nbytes == 0:
            return None
        ours = isinstance(array, managedmem.ManagedBuffer)
        return array.handle if ours else array.__array_interface__["data"][0]

    @staticmethod
    def chosen(array, key):
        try:
            return array[key]
        except IndexError:
            return IndexError

    @pytest.mark.parametrize("seed", range(40))
    def test_random_keys(self, alloc, seed):
        numpy = pytest.importorskip("numpy", reason="needs NumPy")
        draw = random.Random(seed)
        root = alloc(4096)
        write(root, pattern(4096))
        for _ in range(50):
            dtype = draw.choice(NAMES)
            shape = tuple(draw.randint(0, 5) for _ in range(draw.randint(0, 3)))
            size = numpy.empty(shape, dtype).nbytes
            ours = root.range(16 * draw.randint(0, 64), size).view(dtype, shape)
            theirs = numpy.ndarray(shape, dtype, root, ours.handle - root.handle)
            for step in range(4):
                assert ours.shape == theirs.shape, (seed, step)
                assert ours.ndim == theirs.ndim
                assert ours.size == ours.nbytes == theirs.nbytes
                assert self.address(ours) == self.address(theirs)
                assert bytes(ours) == theirs.tobytes()
                if theirs.size and theirs.flags.c_contiguous:
                    assert ours.strides == theirs.strides
                again = numpy.asarray(ours)
                assert (again.shape, again.dtype) == (theirs.shape, theirs.dtype)
                if theirs.ndim == 0:
                    break
                assert len(ours) == len(theirs)
                assert [self.address(row) for row in ours] == [
                    self.address(theirs[i, ...]) for i in range(len(theirs))
                ]
                key = self.key(draw, len(theirs))
                ours, theirs = self.chosen(ours, key), self.chosen(theirs, (key, ...))
                assert (ours is IndexError) == (theirs is IndexError), (seed, step, key)
                if ours is IndexError:
                    break

    @pytest.mark.parametrize(
        ("shape", "strides"),
        [
            ((2, 3, 4), (48, 16, 4)),
            ((1, 1), (4, 4)),
            ((), ()),
            ((0,), (4,)),
            ((3, 0), (4, 4)),
            ((0, 3), (12, 4)),
            ((2, 0, 4), (16, 16, 4)),
        ],
    )
    def test_strides(self, shape, strides):
        """Lengths of 0 count as 1, as in torch; there NumPy's own differ by its version."""
        with managedmem.empty(shape, "float32") as buffer:
            assert buffer.strides == strides


class TestActsOnJustThatRange:
    @pytest.fixture
    def parts(self, buf):
        """The page acted on and both neighbours."""
        return buf[:PAGE], buf[PAGE : 2 * PAGE], buf[2 * PAGE : 3 * PAGE]

    @pytest.mark.parametrize(
        ("name", "value", "none"),
        [
            ("read_mostly", True, False),
            ("preferred_location", Host(), None),
            ("accessed_by", {Device(0)}, set()),
        ],
    )
    def test_advice(self, parts, buf, name, value, none):
        setattr(parts[1], name, value)
        assert [getattr(p, name) for p in parts] == [none, value, none]
        assert getattr(buf, name) == none

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
    @pytest.mark.parametrize("resident", [Host(), Device(0)], ids=label)
    def test_discard_leaves_the_neighbours_bytes(self, buf, operation, extra, resident):
        data = write(buf, pattern(buf.size))
        buf.prefetch(resident)
        start, stop = 4 * PAGE - extra[0], 8 * PAGE + extra[1]
        getattr(buf[start:stop], operation)(*(() if operation == "discard" else (Host(),)))
        # Only pages wholly inside the range may change: the partial first and last page stay.
        seen = contents(buf)
        assert seen[: 4 * PAGE] == data[: 4 * PAGE]
        assert seen[8 * PAGE :] == data[8 * PAGE :]

    @pytest.mark.parametrize("size", [1, 100, PAGE - 1, PAGE, PAGE + 100, 2 * PAGE - 2])
    def test_discard_of_less_than_a_whole_page_is_refused(self, buf, size):
        data = write(buf, pattern(buf.size))
        with pytest.raises(ValueError, match="page"):
            buf[PAGE + 1 : PAGE + 1 + size].discard()
        assert contents(buf) == data

    @pytest.mark.emulator_only
    def test_discard_really_discards_every_whole_page(self, buf):
        data = write(buf, pattern(buf.size))
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
        ids=label,
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
        "bad", ["float31", "", "O", "U4", ">f4", "f4,f4", 4, object(), str], ids=label
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
            with pytest.raises(TypeError, match="not a dtype"):
                alloc(4096).view(text)
        finally:
            length.value = len(name) + 3

    def test_the_size_must_be_whole_items(self, alloc):
        with pytest.raises(ValueError, match=r"4095 bytes as float32: .* not a multiple of 4$"):
            alloc(4095).view("float32")

    def test_a_shape_that_does_not_fit_is_told_both_sizes(self, alloc):
        with pytest.raises(ValueError, match=r"float32 of shape \(7, 3\), which has 84 bytes$"):
            alloc(100).view("float32", (7, 3))

    @pytest.mark.parametrize("shape", [(10, 10), [10, 10], 100], ids=label)
    def test_a_shape_in_the_place_of_the_dtype(self, alloc, shape):
        with pytest.raises(TypeError) as error:
            alloc(100).view(shape)
        assert str(error.value).endswith(f"got {shape}: name the shape, as in view(shape={shape})")

    @pytest.mark.parametrize("shape", [(1023,), (1025,), (0,), (32, 33), (-4, -256), ()], ids=label)
    def test_the_shape_must_fit_exactly(self, alloc, shape):
        with pytest.raises(ValueError):
            alloc(4096).view("float32", shape)

    @pytest.mark.parametrize("shape", ["1024", 1.0, (1024.0,)], ids=label)
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
    @pytest.mark.parametrize("of_a_view", [False, True])
    def test_of_the_root_waits_for_an_export(self, alloc, export, of_a_view):
        buffer = alloc(4 * PAGE)
        held = export(buffer[PAGE:] if of_a_view else buffer)
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


class TestUnalignedAddresses:
    """Parts that begin and end at any byte."""

    @pytest.mark.parametrize("size", [0, 4, 8, 12, 64, 2 * PAGE], ids=str)
    @pytest.mark.parametrize("start", [1, 2, 3, PAGE - 1, PAGE + 5], ids=str)
    @pytest.mark.parametrize("value", [b"\x01", b"\x01\x02", b"\x01\x02\x03\x04"], ids=bytes.hex)
    def test_fill(self, alloc, start, size, value):
        buffer = alloc(4 * PAGE)
        write(buffer, 0xEE)
        buffer.range(start, size).fill(value)
        expected = bytearray(b"\xee" * buffer.size)
        expected[start : start + size] = value * (size // len(value))
        assert contents(buffer) == expected

    @pytest.mark.parametrize(("dtype", "size"), [("int16", 2), ("int32", 4), ("complex128", 16)])
    @pytest.mark.parametrize("start", [0, 1, 2, 3, 4, 8, 12, 16], ids=str)
    def test_elements_stand_at_multiples_of_their_size(self, alloc, start, dtype, size):
        buffer = alloc(PAGE)
        wrapped = managedmem.ManagedBuffer.from_handle(buffer.handle + start, 64, owner=buffer)
        for part in (buffer.range(start, 64), wrapped):
            if start % size:
                with pytest.raises(ValueError, match=f"the address is not a multiple of {size}"):
                    part.view(dtype)
            else:
                part.view(dtype).copy_from(pattern(64))
                assert contents(part) == pattern(64)

    @pytest.mark.emulator_only
    def test_operations_act_on_the_pages_around(self, alloc, device0):
        buffer = alloc(4 * PAGE)
        part = buffer.range(PAGE + 1, PAGE)  # on two pages
        part.read_mostly = True
        part.prefetch(device0)
        states = [(run.read_mostly, run.last_prefetch_location) for run in buffer.page_runs()]
        assert states == [(False, None), (True, device0), (False, None)]
        assert [run.nbytes // PAGE for run in buffer.page_runs()] == [1, 2, 1]

    @pytest.mark.parametrize("cut", ["front", "back", "both"])
    def test_a_discard_prefetch_moves_the_partial_pages_too(self, alloc, device0, cut):
        """Whole pages lose their contents, the one or two partial ones keep theirs; all move."""
        buffer, data = alloc(4 * PAGE), pattern(4 * PAGE)
        write(buffer, data)
        buffer.prefetch(Host())
        front, back = 100 * (cut != "back"), 100 * (cut != "front")
        part = buffer.range(front, 4 * PAGE - front - back)
        part.discard_prefetch(device0)
        device0.sync()
        if EMULATED:  # a real driver may record the place of a small allocation for a part of it
            assert [run.last_prefetch_location for run in buffer.page_runs()] == [device0]
            assert emulator.residency(buffer) is device0
        kept = [page for page, lost in ((0, not front), (3, not back)) if not lost]
        seen = contents(buffer)
        for page in kept:
            assert seen[page * PAGE :][:PAGE] == data[page * PAGE :][:PAGE]
        if EMULATED:  # a real driver may keep what was discarded
            assert all(seen[p * PAGE] == 0xDB for p in range(4) if p not in kept)
