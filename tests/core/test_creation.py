"""zeros(), full(), asarray() and empty_like(): contents, types, shapes, places, refusals."""

import array
import collections
import ctypes
import decimal
import itertools
import math
import mmap

import pytest

import managedmem
from calls import names
from constants import EMULATED, MIB, PAGE
from contents import contents, pattern, write
from foreign_objects import CudaArray
from identifiers import label
from managedmem import (
    CUDAError,
    Device,
    Host,
    ManagedBuffer,
    ManagedMemoryResource,
    MigrationPolicy,
    asarray,
    empty_like,
    emulator,
    full,
    zeros,
)
from pools import needs_pools
from programs import run_python
from world import EVERYTHING

numpy = pytest.importorskip("numpy")

DTYPES = ["bool", "float16", "float32", "float64", "complex64", "complex128"]
DTYPES += [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
ON_DEVICE = MigrationPolicy.prefer(Device(0))
PLACES = {
    "nowhere": None,
    "host": MigrationPolicy.prefer(Host()),
    "node": MigrationPolicy.prefer(Host(0)),
    "mostly": MigrationPolicy.read_duplicated(),
    "device": ON_DEVICE,
    "everything": EVERYTHING,
}


@pytest.fixture(params=["nowhere", "node", "device"])
def policy(request):
    return PLACES[request.param]


class DLPackOnly:
    """An array of a library that has no other protocol; `device` is a DLPack device type."""

    def __init__(self, data, device=1):
        self.data, self.device = data, device

    def __dlpack__(self, **options):
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self):
        return (self.device, 0)


def bytes_of(buffer):
    """The contents, read at once: the call has waited. The buffer is closed."""
    with buffer:
        return contents(buffer)


def array_of(buffer):
    """A copy as a NumPy array. The buffer is closed."""
    with buffer:
        return numpy.array(memoryview(buffer)).astype(str(buffer.dtype), copy=True)


class TestZeros:
    @pytest.mark.parametrize("shape", [(), 1, 5, (3, 4), (2, 0, 3), PAGE + 1, [2, 3]], ids=str)
    def test_of_any_shape(self, shape, policy):
        buffer = zeros(shape, "float32", policy=policy)
        expected = numpy.zeros(shape, "float32")
        assert (buffer.shape, buffer.dtype, buffer.nbytes) == (
            expected.shape,
            "float32",
            expected.nbytes,
        )
        assert not any(bytes_of(buffer))

    @pytest.mark.parametrize("dtype", [{}, {"dtype": None}], ids=str)
    def test_are_bytes_like_those_of_empty(self, dtype):
        with zeros(7, **dtype) as buffer, managedmem.empty(7, **dtype) as other:
            assert (buffer.dtype, buffer.nbytes) == (other.dtype, 7)

    def test_replace_what_memory_had_before(self, policy):
        for size in (3 * PAGE, 3 * MIB + 5):
            for _ in range(3):
                with managedmem.empty(size) as used:
                    used.fill(0xEE)
                    Device().sync()
                assert bytes_of(zeros(size, policy=policy)) == bytes(size)

    def test_have_name_and_policy(self):
        with zeros((2, 3), name="bias", policy=EVERYTHING) as buffer:
            assert buffer.name == "bias"
            assert MigrationPolicy.of(buffer) == EVERYTHING

    @pytest.mark.parametrize("bad", [-1, "3", None, (1.5,), (1,) * 9], ids=label)
    def test_refuse_what_empty_refuses(self, bad):
        with pytest.raises((TypeError, ValueError)) as expected:
            managedmem.empty(bad)
        with pytest.raises(expected.type) as caught:
            zeros(bad)
        assert str(caught.value) == str(expected.value)

    def test_refuse_other_policies(self):
        for make in (zeros, lambda shape, policy: full(shape, 1, policy=policy)):
            with pytest.raises(TypeError, match="MigrationPolicy or None"):
                make(3, policy="device")


SCALARS = [numpy.float32(0.1), numpy.int16(-3), numpy.bool_(True), numpy.complex64(1j)]


class TestFull:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_of_any_type(self, dtype, policy):
        for value, shape in itertools.product((0, 1, 77), ((), 3, (5, 1001))):
            expected = numpy.full(shape, value, dtype)
            buffer = full(shape, value, dtype, policy=policy)
            assert (buffer.dtype, buffer.shape) == (dtype, expected.shape)
            assert bytes_of(buffer) == expected.tobytes()

    @pytest.mark.parametrize(
        "value", [True, 7, -1, 1.5, -0.0, math.inf, 2 - 3j, *SCALARS], ids=label
    )
    def test_has_the_type_of_its_value(self, value):
        expected = numpy.full(3, value)
        buffer = full(3, value)
        assert buffer.dtype == expected.dtype
        assert bytes_of(buffer) == expected.tobytes()

    def test_of_nan(self):
        assert numpy.isnan(array_of(full(3, math.nan))).all()

    @pytest.mark.parametrize("value", [0.1, 1 + 0.1j, 7.0], ids=label)
    @pytest.mark.parametrize("shape", [1, 8191, 8192, 8193, 20_000, 3 * MIB // 8 + 1])
    def test_of_long_patterns_on_a_device(self, value, shape):
        """The driver fills with at most four bytes, so longer ones are copied."""
        expected = numpy.full(shape, value).tobytes()
        assert bytes_of(full(shape, value, policy=ON_DEVICE)) == expected

    def test_is_written_by_the_host_in_pieces(self):
        expected = numpy.full(3 * MIB // 16 + 3, 1 + 0.1j).tobytes()
        assert bytes_of(full(3 * MIB // 16 + 3, 1 + 0.1j)) == expected

    @pytest.mark.parametrize(
        "value, dtype, expected",
        [
            (1.9, "int32", 1),
            (-1.9, "int8", -1),
            (3, "bool", 1),
            (0.0, "bool", 0),
            (True, "float32", 1.0),
            (decimal.Decimal("0.5"), "float64", 0.5),
            (2, "complex64", 2),
        ],
    )
    def test_converts_as_python_does(self, value, dtype, expected):
        assert array_of(full(2, value, dtype)).tolist() == [expected] * 2

    @pytest.mark.parametrize(
        "value, dtype",
        [
            (256, "uint8"),
            (-1, "uint8"),
            (-129, "int8"),
            (2**64, "uint64"),
            (2**63, "int64"),
            (1e6, "float16"),
            (1e39, "float32"),
            (1e39j, "complex64"),
            (math.inf, "int32"),
        ],
    )
    def test_refuses_what_does_not_fit(self, value, dtype):
        with pytest.raises(OverflowError):
            full(3, value, dtype)

    @pytest.mark.parametrize("bad", ["7", b"7", None, [1], (1, 2), {}, object()], ids=label)
    def test_refuses_what_is_no_number(self, bad):
        for dtype in (None, "int32"):
            with pytest.raises(TypeError, match="must be a number"):
                full(3, bad, dtype)

    def test_refuses_other_conversions(self):
        with pytest.raises(TypeError, match="complex"):
            full(3, 1j, "float64")
        with pytest.raises(ValueError, match="NaN"):
            full(3, math.nan, "int32")
        with pytest.raises(TypeError, match="dtype of a buffer"):
            full(3, 1, "float4_e2m1fn")


NESTED = [
    *(0, 2.5, 1j, True),
    *([], [[], []], [[[]]], [[[[[[[[7]]]]]]]]),
    *([1, 2, 3], (1, 2.0), [True, False], [True, 2], range(1000), collections.deque([1, 2])),
    *([[1, 2], (3, 4)], [range(3), [4, 5, 6]], [2**63, 2**64 - 1], [[1.5], [2j]]),
]
BUFFERS = [
    b"",
    b"abc",
    bytearray(range(256)),
    array.array("i", [-1, 0, 1]),
    array.array("d", range(5000)),
    array.array("L", [2**63]),
    memoryview(bytes(range(24))).cast("B", (2, 3, 4)),
    memoryview(bytes(range(24)))[::3],
    memoryview(b"\0\1\1").cast("?"),
    (ctypes.c_int16 * 3)(1, 2, 3),
    (ctypes.c_float * 2 * 3)((1, 2), (3, 4), (5, 6)),
    ctypes.c_double(2.5),
]


def same(buffer, expected):
    assert buffer.shape == expected.shape
    assert buffer.dtype == expected.dtype.newbyteorder("=")
    assert bytes_of(buffer) == expected.astype(expected.dtype.newbyteorder("=")).tobytes()


class TestSequences:
    @pytest.mark.parametrize("data", NESTED, ids=str)
    def test_are_what_numpy_makes_of_them(self, data, policy):
        same(asarray(data, policy=policy), numpy.asarray(data))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_of_another_type(self, dtype, policy):
        data = [[0, 1, 2], [3, 100, 127]]
        same(asarray(data, dtype, policy=policy), numpy.asarray(data).astype(dtype))

    @pytest.mark.parametrize(
        "data",
        [
            [numpy.float32(1), numpy.float32(2)],
            [numpy.arange(3), numpy.arange(3)],
            [numpy.arange(3), [4, 5, 6]],
            [[1, 2], numpy.arange(2)],
        ],
        ids=str,
    )
    def test_with_arrays_inside(self, data):
        same(asarray(data), numpy.asarray(data))

    @pytest.mark.parametrize("data", [[1, [2]], [[1, 2], [3]]], ids=str)
    def test_have_one_shape(self, data):
        with pytest.raises(ValueError, match="inhomogeneous"):
            asarray(data)

    def test_have_at_most_eight_axes(self):
        with pytest.raises(ValueError, match="at most 8 axes"):
            asarray([[[[[[[[[7]]]]]]]]])

    @pytest.mark.parametrize(
        "bad", ["abc", [b"a"], [None], None, {}, object(), iter([1])], ids=label
    )
    def test_have_only_numbers(self, bad):
        with pytest.raises(TypeError) as error:
            asarray(bad)
        name = type(bad).__name__
        assert f"asarray() cannot convert {name} to numbers: give an array" in str(error.value)
        assert ("numpy.load('abc'" in str(error.value)) == (bad == "abc")

    def test_are_not_the_path_of_a_file(self, tmp_path):
        path = tmp_path / "big.npy"
        numpy.save(path, numpy.arange(6.0))
        for given in (path, str(path)):
            words = r"; of a file numpy\.load\('.*', mmap_mode=\"r\"\)"
            with pytest.raises(TypeError, match=words):
                asarray(given)


class TestFiles:
    @pytest.fixture(params=["C", "F", "swapped"])
    def saved(self, request, tmp_path):
        """`(path, array)` of a file of some MiB."""
        array = numpy.arange(3 * MIB // 8, dtype="f8").reshape(-1, 16)
        array = numpy.asarray(array, ">f8" if request.param == "swapped" else "<f8")
        array = numpy.asarray(array, order="F" if request.param == "F" else "C")
        numpy.save(tmp_path / "big.npy", array)
        return tmp_path / "big.npy", array

    @pytest.mark.parametrize("place", [None, Device(0)], ids=label)
    def test_of_numpy_come_in_as_memory_maps(self, saved, place):
        path, array = saved
        with asarray(numpy.load(path, mmap_mode="r"), prefetch=place) as buffer:
            assert (buffer.shape, buffer.dtype) == (array.shape, "float64")
            assert contents(buffer) == numpy.asarray(array, "<f8").tobytes()
        part = numpy.load(path, mmap_mode="r")[100:200]
        with asarray(part, "float32", prefetch=place) as buffer:
            assert contents(buffer) == numpy.asarray(array[100:200], "<f4").tobytes()

    @pytest.mark.parametrize("place", [None, Device(0)], ids=label)
    def test_of_bytes_come_in_as_memory_maps(self, tmp_path, place):
        path = tmp_path / "big.bin"
        path.write_bytes(pattern(MIB + 3))
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with mapped, asarray(mapped, prefetch=place) as buffer:
            assert (buffer.shape, buffer.dtype) == ((MIB + 3,), "uint8")
            assert contents(buffer) == pattern(MIB + 3)
        mapped = numpy.memmap(path, "uint16", "r", offset=2, shape=(3, 5))
        with asarray(mapped, prefetch=place) as buffer:
            assert (buffer.shape, buffer.dtype) == ((3, 5), "uint16")
            assert contents(buffer) == pattern(MIB)[2:32]


def test_only_asarray_needs_numpy():
    done = run_python(
        """
        import sys
        sys.modules["numpy"] = None
        from managedmem import MigrationPolicy, Device, asarray, empty_like, full, zeros
        from outcomes import refusal
        for policy in (None, MigrationPolicy.prefer(Device(0))):
            half = full(2, 0.5, policy=policy)
            print(list(memoryview(half)), list(memoryview(asarray(half, policy=policy))))
            print(empty_like(zeros((2, 3), "i2"), policy=policy).shape)
        for data in ([1], bytearray(1)):
            print(refusal(ImportError, asarray, data))
        """
    )
    assert done.stdout == (
        2 * "[0.5, 0.5] [0.5, 0.5]\n(2, 3)\n"
        + "asarray() of list needs NumPy, which is not installed: pip install numpy\n"
        + "asarray() of bytearray needs NumPy, which is not installed: pip install numpy\n"
    )


class TestBuffers:
    @pytest.mark.parametrize("data", BUFFERS, ids=lambda data: f"{type(data).__name__}")
    def test_are_what_numpy_makes_of_them(self, data, policy):
        expected = numpy.asarray(memoryview(data))
        same(asarray(data, policy=policy), expected)

    @pytest.mark.parametrize("dtype", ["float32", "int64", "complex64", "bool"])
    @pytest.mark.parametrize("data", BUFFERS[1:4] + BUFFERS[6:], ids=lambda d: type(d).__name__)
    def test_of_another_type(self, data, dtype, policy):
        expected = numpy.asarray(memoryview(data)).astype(dtype)
        same(asarray(data, dtype, policy=policy), expected)

    def test_of_complex_numbers(self, policy):
        source = numpy.array([1 + 2j, 3 - 4j], "complex64")
        view = memoryview(source)
        same(asarray(view, policy=policy), source)
        same(asarray(view, "complex128", policy=policy), source.astype("complex128"))

    @pytest.mark.parametrize(
        "data", [memoryview(b"ab").cast("c"), (ctypes.c_char * 2)()], ids=label
    )
    def test_of_other_formats_are_refused(self, data):
        with pytest.raises(TypeError, match=r"cannot convert .* to numbers"):
            asarray(data)

    def test_may_change_afterwards(self, policy):
        data = bytearray(pattern(PAGE))
        with asarray(data, policy=policy) as buffer:
            data[:] = bytes(PAGE)
            assert contents(buffer) == pattern(PAGE)
        data.append(0)  # nothing holds its buffer


class TestArrays:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_of_any_type(self, dtype, policy):
        data = numpy.arange(24).reshape(2, 3, 4).astype(dtype)
        parts = (data[:, ::2], data[0, 0, 0], data[1:1])
        for each in (data, data.T, *parts, numpy.asfortranarray(data)):
            same(asarray(each, policy=policy), numpy.asarray(each))

    def test_with_dlpack_only(self, policy):
        data = numpy.arange(6, dtype="float32").reshape(2, 3).T
        same(asarray(DLPackOnly(data), policy=policy), data)
        same(asarray(DLPackOnly(data), "int16"), data.astype("int16"))

    def test_with_dlpack_only_on_a_device_are_refused(self):
        with pytest.raises(TypeError, match="DLPackOnly is on a device of DLPack type 2: give"):
            asarray(DLPackOnly(numpy.arange(3), device=2))

    def test_are_converted_as_numpy_does(self, policy):
        data = numpy.array([-1.5, 0.0, 300.7])
        for dtype in ("int32", "float16", "bool", "complex128"):
            same(asarray(data, dtype, policy=policy), data.astype(dtype))

    def test_of_other_byte_orders(self, policy):
        data = numpy.arange(5, dtype=">i4")
        same(asarray(data, policy=policy), numpy.arange(5, dtype="i4"))

    def test_that_are_large(self, policy):
        data = numpy.arange(3 * MIB // 8 + 6).reshape(-1, 2)[::-1]
        same(asarray(data, policy=policy), data)

    @pytest.mark.parametrize(
        "data",
        [
            numpy.array(["a"]),
            numpy.array([object()]),
            numpy.array(["2020"], "M8[D]"),
            numpy.zeros(2, "i4,f4"),
            numpy.zeros(2, numpy.longdouble),
        ],
        ids=lambda data: str(data.dtype),
    )
    def test_of_other_types_are_refused(self, data):
        with pytest.raises(TypeError, match="not a dtype of a buffer"):
            asarray(data)

    def test_that_only_can_be_made_arrays(self):
        class Series:
            def __array__(self, dtype=None, copy=None):
                return numpy.arange(3)

        same(asarray(Series()), numpy.arange(3))
        same(asarray([Series()]), numpy.arange(3).reshape(1, 3))

    def test_of_devices_are_copied_by_the_driver(self, alloc, policy):
        source = alloc(PAGE)
        write(source, pattern(PAGE))
        for shape, typestr in ((PAGE,), "|u1"), ((4, PAGE // 16), "<f4"):
            with asarray(CudaArray(source, shape=shape, typestr=typestr), policy=policy) as buffer:
                assert (buffer.shape, buffer.dtype) == (shape, managedmem.typing.DType(typestr))
                assert contents(buffer) == pattern(PAGE)

    def test_of_devices_are_not_converted(self, alloc):
        given = CudaArray(alloc(PAGE), shape=(PAGE // 4,), typestr="<f4")
        asarray(given, "float32").close()
        with pytest.raises(TypeError, match="float64 instead of float32"):
            asarray(given, "float64")

    @pytest.mark.parametrize(
        ("shape", "strides", "offset"),
        [((8,), (2,), 0), ((3, 2), (1, 3), 0), ((8,), (-1,), 7), ((2, 1, 4), (1, 9, 2), 0)],
        ids=["gaps", "transposed", "reversed", "permuted"],
    )
    def test_of_devices_are_c_contiguous(self, alloc, shape, strides, offset):
        given = CudaArray(alloc(PAGE), shape=shape, strides=strides, offset=offset)
        with pytest.raises(ValueError, match="not C-contiguous"):
            asarray(given)

    @pytest.mark.parametrize(
        ("shape", "strides"), [((2, 1, 4), (4, 99, 1)), ((3, 0), (7, 7)), ((0, 5), (1, 7))]
    )
    def test_strides_of_axes_without_steps_do_not_matter(self, alloc, shape, strides):
        given = CudaArray(alloc(PAGE), shape=shape, strides=strides)
        assert asarray(given).shape == shape

    @pytest.mark.parametrize("interface", [{"shape": (4,)}, {"typestr": "|u1"}, 5])
    def test_of_devices_describe_themselves(self, interface):
        class Array:
            __cuda_array_interface__ = interface

        with pytest.raises(TypeError, match="Array must have shape and typestr"):
            asarray(Array())


class TestManagedBuffers:
    def test_are_given_back_as_they_are(self, buf):
        part = buf.view("f4", (2, buf.nbytes // 8))
        for buffer in (buf, part):
            assert asarray(buffer) is buffer
            assert asarray(buffer, str(buffer.dtype)) is buffer
            assert asarray(buffer, copy=False) is buffer

    def test_are_copied_where_something_else_is_needed(self, alloc, policy):
        source = alloc(PAGE)
        write(source, pattern(PAGE))
        for more in ({"copy": True}, {"name": "x"}, {"policy": EVERYTHING}):
            with asarray(source[:100], **{"policy": policy, "copy": True, **more}) as buffer:
                assert buffer.handle != source.handle
                assert (buffer.shape, buffer.dtype) == ((100,), "uint8")
                assert contents(buffer) == pattern(PAGE)[:100]

    def test_are_converted(self, policy):
        with asarray([1, 2, 300], "int16") as source:
            same(asarray(source, "float64", policy=policy), numpy.array([1.0, 2, 300]))

    def test_are_converted_behind_the_work_of_the_default_stream(self):
        with managedmem.empty(1 << 20) as source:
            source.fill(9)
            same(asarray(source, "float32"), numpy.full(1 << 20, 9, "float32"))

    @needs_pools
    def test_of_pools(self):
        with ManagedMemoryResource(pooled=True) as pool, pool.allocate(8) as source:
            write(source, pattern(8))
            assert bytes_of(asarray(source, copy=True)) == pattern(8)
        with managedmem.DeviceMemoryResource(0) as pool, pool.allocate(8) as source:
            source.copy_from(pattern(8))
            assert bytes_of(asarray(source, policy=ON_DEVICE)) == pattern(8)

    def test_that_are_closed_are_refused(self, alloc):
        buffer = alloc(8)
        buffer.close()
        for more in ({"copy": True}, {"dtype": "f4"}):
            with pytest.raises(RuntimeError, match="closed"):
                asarray(buffer, **more)

    def test_copy_is_never_made_where_it_is_refused(self, buf):
        for given, more in ((buf, {"dtype": "f4"}), (buf, {"name": "x"}), ([1], {}), (b"a", {})):
            with pytest.raises(ValueError, match="copy=False"):
                asarray(given, copy=False, **more)


class TestEmptyLike:
    @pytest.mark.parametrize(
        "prototype",
        [numpy.zeros((2, 3), "f4"), numpy.float64(1), numpy.zeros((0, 2), "?")],
        ids=str,
    )
    def test_has_shape_and_type(self, prototype):
        with empty_like(prototype) as buffer:
            assert (buffer.shape, buffer.dtype) == (prototype.shape, prototype.dtype)
            with empty_like(buffer) as again:
                assert (again.shape, again.dtype) == (buffer.shape, buffer.dtype)
                assert again.handle != buffer.handle or buffer.nbytes == 0

    def test_takes_what_is_given_instead(self):
        given = {"shape": (4, 4), "name": "like", "policy": EVERYTHING}
        with empty_like(numpy.zeros(3), "i2", **given) as buffer:
            assert (buffer.shape, buffer.dtype, buffer.name) == ((4, 4), "int16", "like")
            assert MigrationPolicy.of(buffer) == EVERYTHING

    def test_needs_shape_and_type(self):
        for bad in (3, [1, 2], b"abc", array.array("i")):
            with pytest.raises(TypeError, match="shape and dtype"):
                empty_like(bad)
        with pytest.raises(TypeError, match="dtype of a buffer"):
            empty_like(numpy.zeros(3, "M8[D]"))


class TestPlaces:
    @pytest.mark.skipif(not EMULATED, reason="other programs may move pages of a real device")
    @pytest.mark.parametrize("policy", PLACES.values(), ids=PLACES)
    def test_are_those_where_the_memory_will_live(self, policy):
        on_device = policy is not None and policy.preferred_location == Device(0)
        for make in (
            lambda: zeros(2 * MIB, policy=policy),
            lambda: full(MIB, 0.1, policy=policy),
            lambda: asarray(bytes(2 * MIB), policy=policy),
        ):
            with make() as buffer:
                assert buffer.residency().on_host == (0 if on_device else buffer.nbytes)

    @pytest.mark.emulator_only
    def test_of_the_host_need_no_stream(self):
        with emulator.recording() as calls:
            zeros(PAGE).close()
            full(PAGE, 0.1, policy=MigrationPolicy.prefer(Host())).close()
            asarray([1, 2]).close()
        assert not {name for name in names(calls) if "Async" in name or "Synchronize" in name}

    @pytest.mark.emulator_only
    def test_of_a_device_are_complete(self):
        for make in (
            lambda: zeros(PAGE, policy=ON_DEVICE),
            lambda: full(PAGE, 0.1, policy=ON_DEVICE),
            lambda: asarray(b"abc", policy=ON_DEVICE),
        ):
            with emulator.recording() as calls:
                make().close()
            made = names(calls)
            assert made.index("cuMemPrefetchAsync") < made.index("cuStreamSynchronize")

    def test_of_a_second_device(self, device1):
        policy = MigrationPolicy.prefer(device1)
        assert bytes_of(full(PAGE, 0.1, policy=policy)) == numpy.full(PAGE, 0.1).tobytes()
        assert bytes_of(asarray(pattern(PAGE), policy=policy)) == pattern(PAGE)


@pytest.mark.emulator_only
class TestFailures:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: zeros(PAGE, policy=ON_DEVICE),
            lambda: full(20_000, 0.1, policy=ON_DEVICE),
            lambda: asarray(pattern(PAGE), policy=ON_DEVICE),
            lambda: asarray([1, 2], policy=ON_DEVICE),
        ],
    )
    @pytest.mark.parametrize("name", ["cuMemAdvise", "cuMemPrefetchAsync", "cuStreamSynchronize"])
    def test_leave_no_memory(self, make, name):
        make().close()
        before = emulator.live()
        emulator.fail(name, code=719)
        with pytest.raises(CUDAError) as caught:
            make()
        emulator.clear_failures()
        assert (caught.value.code, caught.value.function) == (719, name)
        assert emulator.live() == before

    def test_of_the_source_leave_no_memory(self):
        before = emulator.live()
        for bad in (["x"], [1, [2]], [300], memoryview(b"a").cast("c")):
            with pytest.raises((TypeError, ValueError, OverflowError)):
                asarray(bad, "uint8")
        assert emulator.live() == before


def test_names_are_imported_at_first_use():
    done = run_python(
        """
        import sys
        import managedmem
        assert "managedmem._creation" not in sys.modules
        from managedmem import asarray, empty_like, full, zeros
        assert "numpy" not in sys.modules
        print(managedmem.zeros is zeros, "libmanagedmem_emulator" in open("/proc/self/maps").read())
        """
    )
    assert done.stdout == "True False\n"


def test_results_are_managed_buffers():
    for buffer in (zeros(1), full(1, 1), asarray([1]), empty_like(numpy.zeros(1))):
        with buffer:
            assert type(buffer) is ManagedBuffer
            assert buffer.is_managed
