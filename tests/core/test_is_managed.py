"""managedmem.is_managed(): of buffers and of objects of other libraries."""

import array
import ctypes
import itertools

import pytest

import managedmem
from constants import PAGE
from foreign_objects import CudaArray
from identifiers import label
from managedmem import DeviceMemoryResource, ManagedBuffer, emulator, is_managed


class TestBuffers:
    def test_of_this_library(self, buf):
        for each in (buf, buf[:PAGE], buf.view("float32")[1:2], managedmem.empty(0)):
            assert is_managed(each) is each.is_managed is True

    def test_of_a_device(self):
        with DeviceMemoryResource(0) as pool, pool.allocate(PAGE) as buffer:
            assert is_managed(buffer) is False

    def test_of_wrapped_memory(self, buf):
        assert is_managed(ManagedBuffer.from_handle(buf.handle, buf.size)) is True
        plain = ctypes.create_string_buffer(PAGE)
        assert is_managed(ManagedBuffer.from_handle(ctypes.addressof(plain), PAGE)) is False

    def test_that_are_closed(self, alloc):
        buffer = alloc(PAGE)
        buffer.close()
        with pytest.raises(RuntimeError, match="closed"):
            is_managed(buffer)

    @pytest.mark.emulator_only
    def test_count_every_byte(self):
        made = sorted((managedmem.empty(PAGE) for _ in range(16)), key=lambda b: b.handle)
        below, above = next(
            pair for pair in itertools.pairwise(made) if pair[1].handle - pair[0].handle == PAGE
        )
        both = ManagedBuffer.from_handle(below.handle, 2 * PAGE)
        assert is_managed(both) is both.is_managed is True
        assert is_managed(CudaArray(both)) is True
        above.close()
        assert is_managed(both) is both.is_managed is False
        assert is_managed(ManagedBuffer.from_handle(below.handle, PAGE)) is True


class TestOtherObjects:
    def test_over_managed_memory(self, buf):
        assert is_managed(memoryview(buf)) is True
        assert is_managed(CudaArray(buf)) is True

    def test_of_numpy(self, buf):
        numpy = pytest.importorskip("numpy", reason="needs NumPy")
        view = numpy.asarray(buf)
        assert is_managed(view) is is_managed(view[::-3]) is True
        assert is_managed(view[:0]) is False
        assert is_managed(view.copy()) is False
        del view

    def test_of_the_host(self):
        for plain in (b"abc", bytearray(4), array.array("d", [1]), ctypes.c_int(4)):
            assert is_managed(plain) is False

    def test_of_torch(self, buf):
        torch = pytest.importorskip("torch", reason="needs torch")
        tensor = torch.frombuffer(buf, dtype=torch.float32)
        assert is_managed(tensor) is is_managed(tensor[::2].requires_grad_()) is True
        assert is_managed(torch.zeros(3)) is is_managed(tensor[:0]) is False
        del tensor
        with pytest.raises(ValueError, match="meta"):
            is_managed(torch.empty(3, device="meta"))
        with pytest.raises(TypeError, match="sparse"):
            is_managed(torch.eye(3).to_sparse())

    @pytest.mark.parametrize("bad", [None, 5, 1.0, "x", [b"x"], object(), managedmem], ids=label)
    def test_without_memory(self, bad):
        with pytest.raises(TypeError, match="a target must be"):
            is_managed(bad)


@pytest.mark.emulator_only
def test_touches_no_page():
    with managedmem.empty(4 * PAGE) as buffer:
        with emulator.recording() as calls:
            assert is_managed(buffer)
            assert is_managed(CudaArray(buffer))
        assert {call.name for call in calls} == {"cuPointerGetAttributes"}
        assert emulator.residency(buffer) is None


@pytest.mark.emulator_only
def test_asks_once_for_memory_of_one_allocation(buf):
    plain = ctypes.create_string_buffer(PAGE)
    foreign = ManagedBuffer.from_handle(ctypes.addressof(plain), PAGE)
    for each in (buf, foreign):
        with emulator.recording() as calls:
            is_managed(each)
        assert [call.name for call in calls] == ["cuPointerGetAttributes"]
