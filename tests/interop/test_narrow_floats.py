"""Buffers of bfloat16 and the 8-bit floats: names, DLPack, torch, ml_dtypes, contents."""

import gc
import io

import pytest

import managedmem
from constants import PAGE
from dlpack import capsule_struct
from identifiers import label
from managedmem import Device, WorkingSet
from managedmem.typing import DType
from programs import run_python

CODES = {  # of DLPack
    "bfloat16": 4,
    "float8_e3m4": 7,
    "float8_e4m3": 8,
    "float8_e4m3b11fnuz": 9,
    "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11,
    "float8_e5m2": 12,
    "float8_e5m2fnuz": 13,
    "float8_e8m0fnu": 14,
}
OF_TORCH = ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
every_name = pytest.mark.parametrize("name", CODES)
torchs_names = pytest.mark.parametrize("name", OF_TORCH)


@pytest.fixture(scope="module")
def ml_dtypes():
    return pytest.importorskip("ml_dtypes", reason="needs ml_dtypes")


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="needs torch")


def itemsize(name):
    return 2 if name == "bfloat16" else 1


def contents(buffer):
    return bytes(buffer.view("uint8"))


class TestBuffer:
    @every_name
    def test_has_type_and_size(self, name):
        with managedmem.empty((3, 5), name) as buffer:
            assert (buffer.dtype, buffer.shape) == (name, (3, 5))
            assert buffer.itemsize == buffer.dtype.itemsize == itemsize(name)
            assert buffer.nbytes == 15 * itemsize(name)
            assert f"dtype={name} " in repr(buffer)
            assert buffer[1:].dtype is buffer[0].dtype is managedmem.empty_like(buffer).dtype
            assert buffer.view("uint8").view(name, (3, 5)).shape == (3, 5)

    @every_name
    def test_is_exported_by_the_code_of_dlpack(self, name):
        with managedmem.empty(3, name) as buffer:
            for version in (None, (1, 0)):
                capsule = buffer.__dlpack__(max_version=version)
                tensor = capsule_struct(capsule).tensor
                assert (tensor.code, tensor.bits) == (CODES[name], 8 * itemsize(name))
                assert tensor.lanes == 1
                del capsule

    @every_name
    def test_is_plain_bytes_in_the_array_interface(self, name):
        with managedmem.zeros(3, name) as buffer:
            typestr = buffer.__cuda_array_interface__["typestr"]
            assert typestr[1:] == f"V{itemsize(name)}"

    @every_name
    def test_has_no_format_in_the_buffer_protocol(self, name):
        bits = f"uint{8 * itemsize(name)}"
        words = rf'no format for {name}: use buf.numpy\(\), .* buf.view\("{bits}"\)'
        with managedmem.zeros(3, name) as buffer:
            with pytest.raises(BufferError, match=words):
                memoryview(buffer)
            with io.BytesIO() as file:  # asks for bytes without a format
                assert file.write(buffer) == buffer.nbytes

    @every_name
    def test_of_zeros_needs_no_library(self, name):
        done = run_python(f"""
            import sys
            sys.modules["ml_dtypes"] = sys.modules["numpy"] = sys.modules["torch"] = None
            import managedmem
            from managedmem import Device
            for place in (None, Device(0)):
                buffer = managedmem.zeros(70001, {name!r}, prefetch=place)
                print(any(bytes(buffer.view("uint8"))), buffer.copy_to().dtype)
        """)
        assert done.stdout == f"False {name}\n" * 2


class TestNames:
    @every_name
    def test_of_ml_dtypes(self, name, ml_dtypes):
        numpy = pytest.importorskip("numpy")
        kind = getattr(ml_dtypes, name)
        for other in (kind, numpy.dtype(kind), kind(1).dtype):
            assert DType(other) is DType(name)
            assert DType(name) == other
            assert DType("float16") != other

    @torchs_names
    def test_of_torch(self, name, torch):
        assert DType(getattr(torch, name)) is DType(f"torch.{name}") is DType(name)
        assert getattr(torch, DType(name)) == DType(name)

    @pytest.mark.parametrize(
        "bad", ["V2", "<V2", "V1", "|V1", "f1", "<f1", "2s", "float8", "bfloat", "float4_e2m1fn"]
    )
    def test_of_bytes_are_none(self, bad):
        with pytest.raises(TypeError, match=r"bfloat16, and the 8-bit floats .* float8_e4m3fn"):
            DType(bad)

    @pytest.mark.parametrize("bad", ["V2", "V1", ">f4", "f4,f4"])
    def test_of_numpys_bytes_are_none(self, bad):
        numpy = pytest.importorskip("numpy")
        with pytest.raises(TypeError, match="dtype of a buffer"):
            DType(numpy.dtype(bad))


class TestNumPy:
    @every_name
    @pytest.mark.parametrize("copy", [False, True])
    @pytest.mark.parametrize("shape", [(), (0,), (2, 3), (100_000,)], ids=label)
    def test_gives_the_type_of_ml_dtypes(self, name, copy, shape, ml_dtypes):
        kind = getattr(ml_dtypes, name)
        with managedmem.full(shape, 2.0, name) as buffer:
            array = buffer.numpy(copy=copy)
            assert (array.dtype, array.shape) == (kind, shape)
            assert (array == kind(2)).all()
            if not copy and array.size:
                array[...] = kind(4)
                assert contents(buffer) == kind(4).tobytes() * array.size
            del array
            gc.collect()

    @every_name
    def test_gives_arrays_to_numpy(self, name, ml_dtypes):
        numpy = pytest.importorskip("numpy")
        kind = getattr(ml_dtypes, name)
        with managedmem.full((2, 3), 2.0, name) as buffer:
            for array in (numpy.asarray(buffer), numpy.array(buffer)):
                assert (array.dtype, array.shape) == (kind, (2, 3))
                assert (array == kind(2)).all()
            assert numpy.asarray(buffer).ctypes.data == buffer.handle
            assert numpy.array(buffer).ctypes.data != buffer.handle
            assert numpy.asarray(buffer, "float32").tolist() == [[2.0] * 3] * 2
            with pytest.raises(ValueError, match="copy"):
                buffer.__array__("float32", copy=False)
            array = None
            gc.collect()

    def test_says_what_to_install(self):
        done = run_python("""
            import sys
            sys.modules["ml_dtypes"] = None
            import managedmem
            buffer = managedmem.zeros(4, "bfloat16")
            for use in (
                buffer.numpy,
                buffer.__array__,
                lambda: managedmem.full(1, 1, "bfloat16"),
                lambda: managedmem.asarray([1], "bfloat16"),
            ):
                try:
                    use()
                except ImportError as error:
                    print(error)
        """)
        (line,) = {*done.stdout.splitlines()}
        assert "pip install ml_dtypes" in line
        assert 'buf.view("uint16").numpy()' in line
        assert done.stdout.count("\n") == 4


class TestTorch:
    @torchs_names
    @pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=label)
    def test_gives_its_type_over_the_same_memory(self, name, shape, torch):
        with managedmem.empty(shape, name) as buffer:
            tensor = buffer.torch("cpu")
            assert (tensor.dtype, tuple(tensor.shape)) == (getattr(torch, name), shape)
            assert tensor.numel() == 0 or tensor.data_ptr() == buffer.handle
            tensor.view(torch.uint8 if itemsize(name) == 1 else torch.int16).fill_(60)
            del tensor
            gc.collect()
            one = (60).to_bytes(itemsize(name), "little")
            assert contents(buffer) == one * (buffer.nbytes // len(one))

    def test_refuses_a_type_that_it_lacks(self, torch):
        with (
            managedmem.empty(3, "float8_e3m4") as buffer,
            pytest.raises(TypeError, match=r"torch has no float8_e3m4: .*view\(\"uint8\"\)"),
        ):
            buffer.torch()

    @torchs_names
    def test_keeps_the_memory_open(self, name, torch):
        with managedmem.empty(3, name) as buffer:
            tensor = buffer.torch("cpu")
            with pytest.raises(BufferError):
                buffer.close()
            del tensor
            gc.collect()


class TestFull:
    @every_name
    @pytest.mark.parametrize("place", [None, Device(0)], ids=label)
    def test_has_the_nearest_element(self, name, place, ml_dtypes):
        kind = getattr(ml_dtypes, name)
        with managedmem.full((3, 7), 1.06, name, prefetch=place) as buffer:
            assert contents(buffer) == kind(1.06).tobytes() * 21

    @pytest.mark.parametrize("name", [n for n in CODES if n.startswith("float8_e4")])
    def test_refuses_what_does_not_fit(self, name, ml_dtypes):
        with pytest.raises(OverflowError, match=f"1000.0 does not fit {name}"):
            managedmem.full(3, 1000.0, name)

    def test_takes_the_type_of_a_scalar(self, ml_dtypes):
        with managedmem.full(3, ml_dtypes.bfloat16(1.5)) as buffer:
            assert buffer.dtype == "bfloat16"
            assert contents(buffer) == b"\xc0\x3f" * 3


class TestAsarray:
    @every_name
    @pytest.mark.parametrize("place", [None, Device(0)], ids=label)
    def test_of_ml_dtypes_arrays(self, name, place, ml_dtypes):
        numpy = pytest.importorskip("numpy")
        array = numpy.array([[1, 2, 4], [8, 2, 1]], getattr(ml_dtypes, name))
        for given in (array, array.T, array[:, ::2], array[0, 0]):
            with managedmem.asarray(given, prefetch=place) as buffer:
                assert (buffer.dtype, buffer.shape) == (name, given.shape)
                assert contents(buffer) == given.tobytes()

    @torchs_names
    @pytest.mark.parametrize("place", [None, Device(0)], ids=label)
    def test_of_tensors(self, name, place, torch):
        tensor = torch.tensor([[1.0, 2, 4], [8, 2, 1]]).to(getattr(torch, name))
        for given in (tensor, tensor.t(), tensor[0, 0], tensor[:0]):
            with managedmem.asarray(given, prefetch=place) as buffer:
                assert (buffer.dtype, buffer.shape) == (name, tuple(given.shape))
                assert torch.equal(buffer.torch("cpu").float(), given.float())
                gc.collect()

    @torchs_names
    def test_converts(self, name, torch, ml_dtypes):
        expected = [1.0, 2.0, 4.0]
        tensor = torch.tensor(expected).to(getattr(torch, name))
        with managedmem.asarray(expected, name) as narrow:
            assert narrow.dtype == name
            for given in (tensor, narrow):
                with managedmem.asarray(given, "float64") as wide:
                    assert memoryview(wide).tolist() == expected

    def test_of_a_device_array_that_names_its_type(self, ml_dtypes):
        class Array:
            """An array of a library that, as torch, shows bfloat16 as two bytes."""

            def __init__(self, buffer):
                self.dtype = ml_dtypes.bfloat16
                self.buffer = buffer
                self.__cuda_array_interface__ = buffer.__cuda_array_interface__

        with managedmem.full(PAGE, 1.5, "bfloat16") as source:
            with managedmem.asarray(Array(source)) as buffer:
                assert buffer.dtype == "bfloat16"
                assert contents(buffer) == contents(source)
            with pytest.raises(TypeError, match="float32 instead of bfloat16"):
                managedmem.asarray(Array(source), "float32")


@torchs_names
def test_working_sets_take_tensors(name, torch):
    tensor = torch.arange(10.0).to(getattr(torch, name))
    with WorkingSet(1 << 20) as working:
        group = working.add([tensor, tensor[:3]])
        with group.use() as use:
            assert [array.dtype for array in use.arrays] == [name, name]
            assert [array.shape for array in use.arrays] == [(10,), (3,)]
            copied = managedmem.empty_like(use.arrays[0])
            copied.copy_from(use.arrays[0])
            Device(0).sync()
    assert contents(copied) == tensor.view(torch.uint8).numpy().tobytes()


@every_name
def test_a_closed_buffer_says_so(name):
    """Not that it has no format."""
    buf = managedmem.empty(2, dtype=name)
    buf.close()
    with pytest.raises(RuntimeError, match="closed"):
        memoryview(buf)
