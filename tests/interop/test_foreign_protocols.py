"""Objects that refuse to show their memory by one protocol and show it by another.

Also objects of classes that derive from those of other libraries.
"""

import ctypes

import pytest

import managedmem
from constants import EMULATED, PAGE
from contents import contents, write
from foreign_objects import CudaArray, bindings_object, foreign, numpy_bool
from managedmem import Device, Host

numpy = pytest.importorskip("numpy", reason="needs NumPy")

OPERATIONS = {
    "prefetch": lambda t: managedmem.prefetch(t, Host()),
    "prefetch in a list": lambda t: managedmem.prefetch([t], Host()),
    "advise": lambda t: managedmem.advise(t, "set_read_mostly"),
    "a plan": lambda t: managedmem.PrefetchPlan([(t, Host())]).execute(),
    "discard": managedmem.discard,
    "discard_prefetch": lambda t: managedmem.discard_prefetch(t, Host()),
    "a policy": lambda t: managedmem.MigrationPolicy(read_mostly=True).apply(t),
}
operations = pytest.mark.parametrize("operate", OPERATIONS.values(), ids=OPERATIONS)


class OnlyDLPack:
    """An array with DLPack and nothing else, of a producer that knows some of its keywords."""

    known = ("stream", "max_version", "dl_device", "copy")

    def __init__(self, buffer):
        self.buffer = buffer
        self.asked = []

    def __dlpack_device__(self):
        return self.buffer.__dlpack_device__()

    def __dlpack__(self, **keywords):
        unknown = [name for name in keywords if name not in self.known]
        if unknown:
            raise TypeError(f"__dlpack__() got an unexpected keyword argument {unknown[0]!r}")
        self.asked.append(keywords)
        return self.buffer.__dlpack__(**keywords)


class OldDLPack(OnlyDLPack):
    known = ("stream",)


class OldestDLPack(OnlyDLPack):
    known = ()


class OnlyArrayInterface:
    def __init__(self, buffer):
        self.buffer = buffer
        self.__array_interface__ = dict(buffer.numpy().__array_interface__)


class BufferInArrayInterface:
    """The entry "data" may be a buffer, with an offset into it."""

    def __init__(self, buffer):
        self.__array_interface__ = {
            "shape": (buffer.size - 16,),
            "typestr": "|u1",
            "data": memoryview(buffer),
            "offset": 16,
            "version": 3,
        }


class Refusing(OnlyDLPack):
    """Everything but DLPack raises, as JAX and torch do for some element types."""

    @property
    def __cuda_array_interface__(self):
        raise RuntimeError("no bfloat16 in this protocol")


class Unreadable(OnlyDLPack):
    """An interface of a later version, or of an element type that nothing describes."""

    @property
    def __cuda_array_interface__(self):
        return {"version": 9}


ONE_PROTOCOL = {
    "DLPack": OnlyDLPack,
    "DLPack before 1.0": OldDLPack,
    "DLPack without arguments": OldestDLPack,
    "__array_interface__": OnlyArrayInterface,
    "__array_interface__ with a buffer": BufferInArrayInterface,
    "an interface that raises": Refusing,
    "an interface that cannot be read": Unreadable,
}
one_protocol = pytest.mark.parametrize("make", ONE_PROTOCOL.values(), ids=ONE_PROTOCOL)


@one_protocol
class TestOneProtocol:
    @operations
    def test_is_enough(self, buf, make, operate):
        operate(make(buf))

    def test_shows_the_range(self, buf, make):
        managedmem.advise(make(buf), "set_preferred_location", Host())
        assert buf.preferred_location is Host()

    def test_is_copied_from_and_to(self, alloc, make):
        source, target = alloc(4 * PAGE), alloc(4 * PAGE)
        write(source, 7)
        write(target, 0)
        shown = make(source)
        if make is BufferInArrayInterface:
            target[16:].copy_from(shown)
            target[:16].copy_from(source[:16])
        else:
            target.copy_from(shown)
        Device().sync()
        assert contents(target) == contents(source)
        write(target, 9)
        target[-(4 * PAGE - 16) :].copy_to(shown) if make is BufferInArrayInterface else (
            target.copy_to(shown)
        )
        Device().sync()
        assert contents(source[16:]) == contents(target[16:])

    def test_of_a_closed_buffer_is_an_error(self, alloc, make):
        if make in (OnlyArrayInterface, BufferInArrayInterface):
            pytest.skip("the view keeps the memory")
        buffer = alloc(PAGE)
        shown = make(buffer)
        buffer.close()
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            managedmem.prefetch(shown, Host())


def types_without_a_buffer():
    names = ["M8[ns]", "m8[s]", "M8[D]"]
    try:
        import ml_dtypes
    except ImportError:
        return names
    return [
        *names,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
        ml_dtypes.int4,
        ml_dtypes.uint4,
    ]


@pytest.mark.parametrize("dtype", types_without_a_buffer(), ids=lambda t: str(numpy.dtype(t)))
class TestNumpyTypesWithoutABuffer:
    @operations
    def test_targets(self, buf, dtype, operate):
        operate(buf.numpy().view(dtype))

    def test_the_extent_of_a_strided_view(self, buf, dtype):
        view = buf.numpy().view(dtype)
        half = view[: view.size // 2 : 2]
        managedmem.advise(half, "set_preferred_location", Host())
        assert buf[: buf.size // 2].preferred_location is Host()
        assert buf[buf.size // 2 :].preferred_location is None
        with pytest.raises(ValueError, match="not contiguous"):
            managedmem.discard(half)

    def test_copies(self, alloc, dtype):
        source, target = alloc(PAGE), alloc(PAGE)
        write(source, 3)
        write(target, 0)
        target.copy_from(source.numpy().view(dtype))
        Device().sync()
        assert contents(target) == contents(source)

    def test_copies_of_system_memory(self, alloc, dtype):
        """The driver copies it on the host, so the array must hold it."""
        target = alloc(PAGE)
        write(target, 0)
        array = numpy.full(PAGE, 5, "uint8").view(dtype)
        target.copy_from(array)
        assert contents(target) == bytes([5]) * PAGE
        write(target, 8)
        assert target.copy_to(array) is array
        assert array.view("uint8").tobytes() == bytes([8]) * PAGE

    def test_read_only_arrays_are_not_discarded(self, buf, dtype):
        view = buf.numpy().view(dtype)
        view.flags.writeable = False
        managedmem.prefetch(view, Host())
        with pytest.raises(ValueError, match="read-only"):
            managedmem.discard(view)

    def test_an_owner_of_system_memory(self, dtype):
        """The host may read wrapped memory that its owner shows by any protocol."""
        array = numpy.full(PAGE, 6, "uint8").view(dtype)
        buffer = managedmem.ManagedBuffer.from_handle(array.ctypes.data, PAGE, owner=array)
        assert bytes(memoryview(buffer)[:4]) == bytes([6]) * 4


class TestDLPack:
    def test_hints_ask_for_no_order(self, buf):
        array = OnlyDLPack(buf)
        managedmem.prefetch(array, Host())
        managedmem.advise(array, "set_read_mostly")
        assert [keywords["stream"] for keywords in array.asked] == [-1, -1]

    def test_work_on_the_contents_is_ordered(self, buf, alloc):
        array = OnlyDLPack(buf)
        managedmem.discard(array)
        alloc(buf.size).copy_from(array)
        assert [keywords["stream"] for keywords in array.asked] == [1, 1]

    def test_a_tensor_on_the_host_gets_no_stream(self, alloc):
        class Shown(OnlyDLPack):
            def __dlpack__(self, **keywords):
                self.asked.append(keywords)
                return self.buffer.__dlpack__(**keywords)

        array = Shown(numpy.full(PAGE, 4, "uint8"))
        target = alloc(PAGE)
        target.copy_from(array)
        assert contents(target) == bytes([4]) * PAGE
        assert array.asked[0]["stream"] is None

    def test_read_only_arrays_are_not_written(self, alloc):
        array = numpy.zeros(PAGE, "uint8")
        array.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            alloc(PAGE).copy_to(OnlyDLPack(array))

    @pytest.mark.parametrize("answer", [None, 1, b"", (1, 0)])
    def test_what_is_no_capsule(self, buf, answer):
        class Odd(OnlyDLPack):
            def __dlpack__(self, **keywords):
                return answer

        with pytest.raises(TypeError, match="must return a new DLPack capsule"):
            managedmem.prefetch(Odd(buf), Host())

    def test_a_capsule_that_was_consumed(self, buf):
        class Consumed(OnlyDLPack):
            def __dlpack__(self, **keywords):
                capsule = self.buffer.__dlpack__()
                rename = ctypes.pythonapi.PyCapsule_SetName
                rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
                pointer = ctypes.pythonapi.PyCapsule_GetPointer
                pointer.restype, pointer.argtypes = (
                    ctypes.c_void_p,
                    [ctypes.py_object, ctypes.c_char_p],
                )
                deleter = ctypes.cast(
                    pointer(capsule, b"dltensor") + 56, ctypes.POINTER(ctypes.c_void_p)
                )
                ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deleter[0])(pointer(capsule, b"dltensor"))
                rename(capsule, b"used_dltensor")
                return capsule

        with pytest.raises(TypeError, match="must return a new DLPack capsule"):
            managedmem.prefetch(Consumed(buf), Host())

    def test_other_devices(self, buf):
        class Elsewhere(OnlyDLPack):
            def __dlpack_device__(self):
                return (10, 0)  # ROCm

            def __dlpack__(self, **keywords):
                raise BufferError("on a ROCm device")

        with pytest.raises(BufferError, match="ROCm"):
            managedmem.prefetch(Elsewhere(buf), Host())

    def test_an_array_is_one_target(self, buf):
        class Rows(OnlyDLPack):
            def __iter__(self):
                raise AssertionError("iterated over")

        managedmem.prefetch(Rows(buf), Host())
        assert buf.last_prefetch_location is Host()

    def test_the_tensor_is_released(self, alloc):
        buffer = alloc(PAGE)
        managedmem.prefetch(OnlyDLPack(buffer), Host())
        buffer.close()  # a BufferError while a tensor lives


class TestTheFirstRefusal:
    def test_is_raised_if_nothing_shows_the_memory(self):
        class Shy:
            @property
            def __cuda_array_interface__(self):
                raise RuntimeError("the first protocol")

            def __dlpack__(self, **keywords):
                raise BufferError("the second protocol")

        with pytest.raises(RuntimeError, match="the first protocol"):
            managedmem.prefetch(Shy(), Host())

    @pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RecursionError])
    def test_what_is_no_refusal_comes_through(self, buf, error):
        class Interrupted(OnlyDLPack):
            @property
            def __cuda_array_interface__(self):
                raise error

        with pytest.raises(error):
            managedmem.prefetch(Interrupted(buf), Host())

    def test_elements_outside_of_the_data(self, buf):
        shown = BufferInArrayInterface(buf)
        shown.__array_interface__["offset"] = 17
        with pytest.raises(ValueError, match="outside the data"):
            managedmem.prefetch(shown, Host())


class TestTheStreamZero:
    @pytest.mark.parametrize("stream", [0, numpy.uint64(0)])
    def test_does_not_matter_to_hints(self, buf, stream):
        array = CudaArray(buf, members={"stream": stream})
        managedmem.prefetch(array, Host())
        managedmem.advise([array], "set_read_mostly")
        managedmem.PrefetchPlan([(array, Host())]).execute()
        assert buf.last_prefetch_location is Host()
        assert buf.read_mostly

    @pytest.mark.parametrize(
        "operate",
        [
            managedmem.discard,
            lambda t: managedmem.discard_prefetch(t, Host()),
            lambda t: managedmem.empty(t.buffer.size).copy_from(t),
            lambda t: managedmem.empty(t.buffer.size).copy_to(t),
        ],
    )
    def test_is_refused_where_the_order_matters(self, buf, operate):
        with pytest.raises(ValueError, match="0 is ambiguous"):
            operate(CudaArray(buf, members={"stream": 0}))


class View:
    """As a StridedMemoryView of cuda.core shows itself: strides count elements."""

    def __init__(self, buffer, shape, strides, itemsize, offset=0, readonly=False):
        self.ptr = buffer.handle + offset
        self.shape, self.strides = shape, strides
        self.dtype, self.layout = None, foreign("cuda.core._layout", "Layout", itemsize=itemsize)
        self.readonly = readonly
        self.device_id, self.is_device_accessible, self.exporting_obj = 0, True, buffer


def core_view(*arguments, **options):
    cls = type("StridedMemoryView", (View,), {"__module__": "cuda.core._memoryview"})
    return cls(*arguments, **options)


class TestViewsOfCudaCore:
    @operations
    def test_targets(self, buf, operate):
        operate(core_view(buf, (buf.size // 4,), None, 4))

    def test_strides_count_elements(self, buf):
        managedmem.prefetch(core_view(buf, (3, 2), (PAGE // 2, 1), 2, offset=PAGE), Host())
        assert buf[PAGE : 4 * PAGE].last_prefetch_location is Host()
        assert buf[4 * PAGE :].last_prefetch_location is None
        assert buf[:PAGE].last_prefetch_location is None

    def test_read_only(self, buf):
        with pytest.raises(ValueError, match="read-only"):
            managedmem.discard(core_view(buf, (buf.size,), None, 1, readonly=True))

    def test_without_elements(self, buf):
        managedmem.prefetch(core_view(buf, (0, 4), None, 4), Host())
        assert buf.last_prefetch_location is None

    @pytest.mark.parametrize("view", ["from_cuda_array_interface", "from_dlpack", "from_buffer"])
    def test_of_the_installed_library(self, buf, view):
        utils = pytest.importorskip("cuda.core.utils", reason="needs cuda.core")
        core = pytest.importorskip("cuda.core")
        cls = utils.StridedMemoryView
        if not hasattr(cls, view):
            pytest.skip("an older cuda.core")
        if EMULATED and view != "from_dlpack":
            pytest.skip("cuda.core asks the driver of the system")
        if view == "from_buffer":
            source = core.Buffer.from_handle(buf.handle, buf.size, owner=buf)
            target = cls.from_buffer(source, (buf.size // 4,), itemsize=4)
        else:
            target = getattr(cls, view)(buf, -1)
        if view == "from_buffer" and target.dtype is None:
            pytest.skip("this cuda.core makes views without a dtype, which have no size")
        managedmem.prefetch(target, Host())
        assert buf.last_prefetch_location is Host()
        managedmem.advise([target], "set_read_mostly")
        assert buf.read_mostly


# --- base classes -------------------------------------------------------------------------------


def derived(value, depth):
    """The same object with a class of this module that derives from its own, after another base."""
    cls = type(value)
    for _ in range(depth):
        cls = type("Mine", (type("Mixin", (), {}), cls), {"__module__": __name__})
    mine = cls.__new__(cls)
    if hasattr(value, "__dict__"):
        mine.__dict__.update(value.__dict__)
    return mine


@pytest.mark.parametrize("depth", [0, 1, 2])
class TestDerivedClasses:
    @pytest.mark.parametrize("name", ["Buffer", "ManagedBuffer"])
    @operations
    def test_buffers_of_cuda_core(self, buf, depth, name, operate):
        shown = foreign("cuda.core._memory._buffer", name, handle=buf.handle, size=buf.size)
        operate(derived(shown, depth))

    def test_views_of_cuda_core(self, buf, depth):
        view = core_view(buf, (buf.size,), None, 1)
        managedmem.prefetch(derived(view, depth), Host())
        assert buf.last_prefetch_location is Host()

    @pytest.mark.parametrize(
        "location",
        [
            foreign("cuda.core._device", "Device", device_id=0),
            foreign("cuda.core._host", "Host", is_numa_current=False, numa_id=None),
            foreign("torch", "device", type="cuda", index=0),
            foreign("torch", "device", type="cpu", index=None),
            foreign("cupy.cuda.device", "Device", id=0),
            foreign("numba.cuda.cudadrv.driver", "Device", id=0),
            foreign("jaxlib._jax", "Device", platform="gpu", local_hardware_id=0),
            bindings_object("CUdevice", 0),
        ],
        ids=lambda value: f"{type(value).__module__}.{type(value).__name__}",
    )
    def test_locations(self, buf, depth, location):
        expected = Host() if getattr(location, "type", "") == "cpu" else Device(0)
        expected = Host() if type(location).__name__ == "Host" else expected
        managedmem.prefetch(buf, derived(location, depth))
        assert buf.last_prefetch_location is expected

    @pytest.mark.parametrize(
        ("module", "attribute"),
        [
            ("torch.cuda.streams", "cuda_stream"),
            ("torch", "native_handle"),
            ("cupy.cuda.stream", "ptr"),
            ("numba.cuda.cudadrv.driver", "handle"),
        ],
    )
    def test_streams(self, buf, stream, depth, module, attribute):
        theirs = foreign(module, "Stream", **{attribute: stream.handle})
        buf.prefetch(Host(), stream=derived(theirs, depth))
        stream.sync()
        assert buf.last_prefetch_location is Host()

    def test_flags_of_numpy(self, buf, depth):
        buf.read_mostly = derived(numpy_bool(True), depth)
        assert buf.read_mostly

    def test_one_target_though_it_can_be_iterated_over(self, buf, depth):
        shown = foreign("cuda.core._memory._buffer", "Buffer", handle=buf.handle, size=buf.size)
        type(shown).__iter__ = lambda self: iter(())
        managedmem.prefetch(derived(shown, depth), Host())
        assert buf.last_prefetch_location is Host()


def test_a_buffer_derived_from_one_of_the_installed_cuda_core(buf):
    core = pytest.importorskip("cuda.core", reason="needs cuda.core")
    if not hasattr(core, "ManagedBuffer"):
        pytest.skip("needs cuda.core 1.1")

    class Mine(core.ManagedBuffer):
        pass

    managedmem.prefetch(Mine.from_handle(buf.handle, buf.size, owner=buf), Host())
    assert buf.last_prefetch_location is Host()
