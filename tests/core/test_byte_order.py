"""Copies between a buffer and an array of the byte order that the machine does not have."""

import sys

import pytest

import managedmem
from contents import contents
from managedmem import Device

numpy = pytest.importorskip("numpy", reason="needs NumPy")

OTHER_ORDER = "<" if sys.byteorder == "big" else ">"


class TestByteOrder:
    """Buffers have the byte order of the machine, and copies convert nothing."""

    @pytest.fixture(params=["buffer protocol", "__cuda_array_interface__", "__array_interface__"])
    def shown(self, request):
        def make(array):
            if request.param == "buffer protocol":
                return array
            interface = dict(array.__array_interface__)
            shown = type("Shown", (), {"array": array})()
            if request.param == "__array_interface__":
                shown.__array_interface__ = interface
            else:
                shown.__cuda_array_interface__ = interface
            return shown

        return make

    def swapped(self, dtype):
        """In managed memory, so that each of the protocols can show it."""
        buffer = managedmem.empty(8 * numpy.dtype(dtype).itemsize)
        array = buffer.numpy().view(numpy.dtype(dtype).newbyteorder(OTHER_ORDER))
        array[:] = range(8)
        return array

    @pytest.mark.parametrize("dtype", ["float32", "int16", "complex64", "float64", "uint32"])
    def test_the_other_order_is_refused(self, shown, dtype):
        array, buffer = self.swapped(dtype), managedmem.zeros(8, dtype)
        for copy in (buffer.copy_from, buffer.copy_to):
            with pytest.raises(ValueError, match="other byte order"):
                copy(shown(array))
        assert buffer.numpy().tolist() == [0] * 8
        buffer.copy_from(array.astype(array.dtype.newbyteorder("=")))
        Device().sync()
        assert buffer.numpy().tolist() == list(range(8))

    def test_in_members_of_records(self):
        record = numpy.dtype([("a>b", "|u1"), ("x", OTHER_ORDER + "f4"), ("y", "|i1", 3)])
        with pytest.raises(ValueError, match="other byte order"):
            managedmem.zeros(2, "float64").copy_from(numpy.zeros(2, record))

    def test_names_of_members_are_no_byte_order(self):
        record = numpy.dtype([("a>b", "=f4"), ("!", "=f4")])
        managedmem.zeros(2, "float64").copy_from(numpy.zeros(2, record))

    def test_single_bytes_have_no_order(self, shown):
        array = numpy.arange(8, dtype=OTHER_ORDER + "u1")
        buffer = managedmem.zeros(4, "int16")
        buffer.copy_from(array)
        assert buffer.view("uint8").numpy().tolist() == list(range(8))

    def test_a_buffer_of_bytes_takes_them_as_they_are(self, shown):
        array, buffer = self.swapped("float32"), managedmem.zeros(32)
        buffer.copy_from(shown(array))
        Device().sync()
        assert contents(buffer) == array.tobytes()

    def test_hints_do_not_look_at_it(self, shown):
        managedmem.prefetch(shown(self.swapped("float32")), managedmem.Host())
