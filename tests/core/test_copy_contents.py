"""copy_from, copy_to and fill: which bytes end up where, and what is refused."""

import pytest

from constants import MIB
from contents import contents, pattern, write
from identifiers import label
from managedmem import Device, Host

PLACES = [Host(), Device(0), None]


class TestCopy:
    @pytest.mark.parametrize("source_place", PLACES, ids=label)
    @pytest.mark.parametrize("target_place", PLACES, ids=label)
    def test_copy_from_brings_every_byte(self, alloc, source_place, target_place):
        source, target = alloc(MIB + 3), alloc(MIB + 3)
        data = write(source, pattern(MIB + 3))
        for buffer, place in ((source, source_place), (target, target_place)):
            if place is not None:
                buffer.prefetch(place)
        assert target.copy_from(source) is None
        assert contents(target) == data
        assert contents(source) == data

    def test_copy_to_nothing_makes_a_buffer_of_the_same_resource(self, buf):
        write(buf, pattern(buf.size))
        with buf.copy_to() as new:
            assert type(new) is type(buf)
            assert new.handle != buf.handle
            assert new.size == buf.size
            assert new.memory_resource is buf.memory_resource
            assert contents(new) == pattern(buf.size)

    def test_between_types_of_the_same_size(self, alloc):
        source, target = alloc(4096), alloc(4096)
        write(source, pattern(4096))
        target.view("float64").copy_from(source.view("int16", (64, 32)))
        assert contents(target) == pattern(4096)

    @pytest.mark.parametrize("sizes", [(4096, 4095), (4095, 4096), (1, 2)])
    def test_sizes_must_agree(self, alloc, sizes):
        source, target = alloc(sizes[0]), alloc(sizes[1])
        write(target, 5)
        with pytest.raises(ValueError, match="bytes"):
            target.copy_from(source)
        with pytest.raises(ValueError, match="bytes"):
            source.copy_to(target)
        assert contents(target) == b"\x05" * sizes[1]

    @pytest.mark.parametrize("bad", [7, "buffer", object(), Host()], ids=label)
    def test_takes_buffers_only(self, buf, bad):
        with pytest.raises(TypeError):
            buf.copy_from(bad)
        with pytest.raises(TypeError):
            buf.copy_to(bad)

    def test_copy_from_needs_a_source(self, buf):
        with pytest.raises(TypeError):
            buf.copy_from(None)

    def test_with_a_closed_buffer(self, buf, alloc):
        closed = alloc(buf.size)
        closed.close()
        with pytest.raises(RuntimeError, match="closed"):
            buf.copy_from(closed)
        with pytest.raises(RuntimeError, match="closed"):
            buf.copy_to(closed)

    def test_between_devices(self, alloc, device0, device1):
        source, target = alloc(MIB), alloc(MIB)
        write(source, pattern(MIB))
        source.prefetch(device0)
        target.prefetch(device1)
        target.copy_from(source)
        assert contents(target) == pattern(MIB)


class TestFill:
    @pytest.mark.parametrize("value", [0, 1, 127, 255])
    def test_an_int_is_every_byte(self, buf, value):
        assert buf.fill(value) is None
        assert contents(buf) == bytes([value]) * buf.size

    @pytest.mark.parametrize("value", [b"\x07", b"\x01\x02", b"\x01\x02\x03\x04"], ids=label)
    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_bytes_are_a_pattern(self, alloc, value, kind):
        buffer = alloc(4096)
        buffer.fill(kind(value))
        assert contents(buffer) == value * (4096 // len(value))

    @pytest.mark.parametrize("place", PLACES, ids=label)
    def test_wherever_the_pages_are(self, buf, place):
        if place is not None:
            buf.prefetch(place)
        buf.fill(b"\x0a\x0b")
        assert contents(buf) == b"\x0a\x0b" * (buf.size // 2)

    def test_a_slice_at_an_odd_place(self, alloc):
        buffer = alloc(4096)
        write(buffer, 0)
        buffer[1:8].fill(9)
        assert contents(buffer) == b"\x00" + b"\x09" * 7 + bytes(4088)

    @pytest.mark.parametrize("value", [-1, 256, 1 << 80])
    def test_an_int_outside_a_byte_overflows(self, buf, value):
        with pytest.raises(OverflowError, match=r"sets each byte; .*numpy.uint16\(300\)"):
            buf.fill(value)
        assert contents(buf) == bytes(buf.size)

    @pytest.mark.parametrize("value", [b"", b"123", b"12345", b"12345678"], ids=label)
    def test_other_lengths_are_a_value_error(self, buf, value):
        with pytest.raises(ValueError, match="1, 2 or 4"):
            buf.fill(value)
        assert contents(buf) == bytes(buf.size)

    @pytest.mark.parametrize(("size", "value"), [(3, b"12"), (6, b"1234"), (4095, b"12")])
    def test_the_pattern_must_divide_the_size(self, alloc, size, value):
        buffer = alloc(size)
        write(buffer, 1)
        with pytest.raises(ValueError):
            buffer.fill(value)
        assert contents(buffer) == b"\x01" * size

    @pytest.mark.parametrize("value", ["1", 1.0, None, [1], object()], ids=label)
    def test_other_types_are_a_type_error(self, buf, value):
        with pytest.raises(TypeError, match="an int from 0 to 255 for every byte, or"):
            buf.fill(value)
        assert contents(buf) == bytes(buf.size)

    def test_a_typed_view_is_filled_bytewise(self, alloc):
        buffer = alloc(4096)
        buffer.view("float32").fill(1)
        assert contents(buffer) == b"\x01" * 4096


class TestOptions:
    """cuda.core's hints for copies; `test_copies.py` tests their effect."""

    def test_none_is_taken(self, buf, alloc):
        other = alloc(buf.size)
        other.copy_from(buf, options=None)
        assert buf.copy_to(other, options=None) is other

    def test_others_are_one_clear_error(self, buf, alloc):
        other = alloc(buf.size)
        write(buf, 1)
        write(other, 2)
        for error, named, options in (
            (TypeError, "src_access_order, src_location_hint", object()),
            (TypeError, "src_access_order, src_location_hint", "fast"),
            (TypeError, "got {'order': 'any'}", {"order": "any"}),
            (TypeError, "src_location_hint: .* got 0", {"src_location_hint": 0}),
            (ValueError, "src_access_order .* got 'first'", {"src_access_order": "first"}),
            (ValueError, "overlap_mode .* got 1", {"overlap_mode": 1}),
        ):
            with pytest.raises(error, match=named):
                other.copy_from(buf, options=options)
            with pytest.raises(error, match=named):
                buf.copy_to(other, options=options)
        assert contents(other) == b"\2" * other.size
