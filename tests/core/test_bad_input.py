"""Bad arguments, row by row: the type of the error, its words, and that nothing was done.

Bad ids and strings as locations of Host and Device are in test_locations; bad streams in
test_streams; bad members of accessed_by in test_accessed_by.
"""

import contextlib
import ctypes

import pytest

import managedmem
from constants import ADVICES, PAGE
from contents import contents, pattern, write
from driver import device_memory
from foreign_objects import CudaArray, foreign, torch_like
from identifiers import label
from managed_uses import USES
from managedmem import Device, Host, ManagedBuffer, ManagedMemoryResource
from programs import run_python

PLACED = {
    "preferred_location": lambda b, where: setattr(b, "preferred_location", where),
    "prefetch": lambda b, where: b.prefetch(where),
    "discard_prefetch": lambda b, where: b.discard_prefetch(where),
    "free advise": lambda b, where: managedmem.advise(b, "set_preferred_location", where),
    "free advise of a list": lambda b, where: managedmem.advise([b], "set_accessed_by", [where]),
    "free prefetch": managedmem.prefetch,
    "free prefetch of a list": lambda b, where: managedmem.prefetch([b], [where]),
    "free discard_prefetch": managedmem.discard_prefetch,
}


def state(buffer):
    """Everything that the driver tells about a buffer, and its bytes."""
    return (
        buffer.read_mostly,
        buffer.preferred_location,
        set(buffer.accessed_by),
        buffer.last_prefetch_location,
        contents(buffer),
    )


@pytest.fixture
def untouched(buf):
    """The buffer of the test, which must be the same after it."""
    write(buf, pattern(buf.size))
    before = state(buf)
    yield buf
    assert state(buf) == before


@pytest.mark.parametrize("use", PLACED.values(), ids=PLACED)
class TestLocations:
    @pytest.mark.parametrize(
        ("bad", "words"),
        [
            (0, r"got 0: write Device\(0\) or Host\(\); "),
            ("cuda:0", r"got 'cuda:0': write Device\(0\) or Host\(\); "),
            (1.5, r"must be a Device or Host, got 1\.5$"),
            *((bad, "Device or Host") for bad in [-1, 1, True, "cpu", b"", object(), Device]),
        ],
        ids=label,
    )
    def test_what_is_no_location(self, untouched, use, bad, words):
        with pytest.raises(TypeError, match=words):
            use(untouched, bad)

    def test_none_is_no_location_where_one_is_needed(self, alloc, use):
        if use is PLACED["preferred_location"]:
            pytest.skip("None unsets the preferred location")
        buffer = alloc(PAGE)
        with pytest.raises(ValueError, match="location is required"):
            use(buffer, None)
        assert buffer.last_prefetch_location is None


class TestLocationIsAnArgument:
    @pytest.mark.parametrize(
        "call",
        [
            lambda b: b.prefetch(),
            lambda b: b.discard_prefetch(),
            managedmem.prefetch,
            managedmem.discard_prefetch,
            managedmem.advise,
            lambda b: managedmem.advise(),
            lambda b: managedmem.discard(),
            lambda b: b.prefetch(Host(), colour="red"),
            lambda b: managedmem.prefetch(b, Host(), colour="red"),
            lambda b: managedmem.discard(b, Host()),
        ],
    )
    def test_missing_and_unknown_arguments(self, untouched, call):
        with pytest.raises(TypeError):
            call(untouched)


class TestAdvice:
    @pytest.mark.parametrize(
        "bad", ["bogus", "", "SET_READ_MOSTLY", "read_mostly", "set_read_mostly\0", "é"], ids=label
    )
    def test_an_unknown_one_lists_the_six(self, untouched, bad):
        with pytest.raises(ValueError) as error:
            managedmem.advise(untouched, bad, Host())
        assert all(advice in str(error.value) for advice in ADVICES)

    @pytest.mark.parametrize("bad", [1, None, b"set_read_mostly", ["set_read_mostly"]], ids=label)
    def test_must_be_a_string(self, untouched, bad):
        with pytest.raises(TypeError, match="advice"):
            managedmem.advise(untouched, bad, Host())

    def test_targets_are_checked_first_then_the_advice_then_the_location(self, buf):
        with pytest.raises(TypeError, match=r"(?i)target|ManagedBuffer"):
            managedmem.advise([buf, 7], "bogus", 0)
        with pytest.raises(ValueError, match=r"set_read_mostly"):
            managedmem.advise(buf, "bogus", 0)
        with pytest.raises(TypeError, match="Device or Host"):
            managedmem.advise(buf, "set_accessed_by", 0)


sized = pytest.mark.parametrize(
    "make",
    [
        lambda size: ManagedMemoryResource().allocate(size),
        lambda size: ManagedBuffer.from_handle(4096, size),
    ],
    ids=["allocate", "from_handle"],
)


class TestSizes:
    @pytest.mark.parametrize("size", [-1, -(1 << 70)])
    @sized
    def test_negative(self, make, size):
        with pytest.raises(ValueError, match="size"):
            make(size)

    @pytest.mark.parametrize("size", ["4096", 4096.0, None, [4096], b""], ids=label)
    @sized
    def test_what_is_no_integer(self, make, size):
        with pytest.raises(TypeError):
            make(size)

    @pytest.mark.parametrize("digits", [bytearray, memoryview], ids=lambda make: make.__name__)
    def test_digits_are_not_an_address(self, digits):
        """int() reads them, as it does those of a str."""
        with pytest.raises(TypeError, match="an address must be an int"):
            ManagedBuffer.from_handle(digits(b"4096"), 1)

    def test_an_array_is_not_its_address(self):
        """NumPy's answer to int(array) would not say which argument is wrong."""
        array = type("Array", (), {"__int__": raising(TypeError)})()
        with pytest.raises(TypeError, match=r"an address must be an int, got .*Array"):
            ManagedBuffer.from_handle(array, 1)

    @pytest.mark.parametrize("size", [1 << 64, 1 << 80], ids=hex)
    def test_more_than_an_address_can_hold(self, size):
        with pytest.raises((OverflowError, ValueError)):
            ManagedMemoryResource().allocate(size)

    def test_wrapping_past_the_end_of_the_address_space(self):
        with pytest.raises((ValueError, OverflowError)):
            ManagedBuffer.from_handle((1 << 64) - 4096, 8192)


NEEDS_MANAGED = {
    **USES,
    "preferred_location = None": lambda b: setattr(b, "preferred_location", None),
    "accessed_by length": lambda b: len(b.accessed_by),
    "accessed_by in": lambda b: Host() in b.accessed_by,
    "accessed_by add": lambda b: b.accessed_by.add(Host()),
    "accessed_by discard": lambda b: b.accessed_by.discard(Host()),
    "slice prefetch": lambda b: b[:PAGE].prefetch(Host()),
}
needs_managed = pytest.mark.parametrize("use", NEEDS_MANAGED.values(), ids=NEEDS_MANAGED)


class TestMemoryThatIsNotManaged:
    @needs_managed
    def test_device_memory(self, use):
        with device_memory(4 * PAGE) as pointer:
            wrapped = ManagedBuffer.from_handle(pointer, 4 * PAGE)
            with pytest.raises(ValueError, match="managed-memory allocation"):
                use(wrapped)

    @needs_managed
    def test_host_memory_without_pageable_access(self, use, device0):
        if device0.pageable_memory_access:
            pytest.skip("this machine can take system memory")
        memory = ctypes.create_string_buffer(8 * PAGE)
        start = (ctypes.addressof(memory) + PAGE - 1) // PAGE * PAGE
        wrapped = ManagedBuffer.from_handle(start, 4 * PAGE)
        assert wrapped.is_managed is False
        with pytest.raises(ValueError, match="managed-memory allocation"):
            use(wrapped)

    def test_in_the_middle_of_a_list_stops_all(self, untouched):
        first, last = untouched[:PAGE], untouched[4 * PAGE :]
        with device_memory(4 * PAGE) as pointer:
            wrapped = ManagedBuffer.from_handle(pointer, 4 * PAGE)
            for call in (
                lambda t: managedmem.advise(t, "set_read_mostly"),
                lambda t: managedmem.prefetch(t, Device(0)),
                lambda t: managedmem.prefetch(t, Device(0), dispatch="batch"),
                managedmem.discard,
                lambda t: managedmem.discard_prefetch(t, Device(0)),
            ):
                with pytest.raises(ValueError, match="managed-memory allocation"):
                    call([first, wrapped, last])

    @pytest.mark.parametrize(
        "call",
        [
            lambda t: managedmem.advise(t, "set_read_mostly"),
            lambda t: managedmem.prefetch(t, Device(0)),
        ],
        ids=["advise", "prefetch"],
    )
    def test_a_numpy_array_names_the_missing_ability(self, call, device0):
        numpy = pytest.importorskip("numpy", reason="needs NumPy")
        array = numpy.ones(4 * PAGE, dtype="u1")
        if device0.pageable_memory_access:
            call(array)
        else:
            with pytest.raises(ValueError, match="pageable"):
                call(array)
        assert (array == 1).all()

    @pytest.mark.parametrize(
        "discard", [managedmem.discard, lambda t: managedmem.discard_prefetch(t, Host())]
    )
    def test_a_numpy_array_is_discarded_where_all_devices_reach_it_only(self, discard):
        if all(device.pageable_memory_access for device in Device.all()):
            pytest.skip("this machine can discard system memory")
        numpy = pytest.importorskip("numpy", reason="needs NumPy")
        array = numpy.ones(4 * PAGE, dtype="u1")
        with pytest.raises(ValueError):
            discard(array)
        assert (array == 1).all()

    def test_memory_of_a_closed_buffer(self, alloc):
        buffer = alloc(PAGE)
        wrapped = ManagedBuffer.from_handle(buffer.handle, PAGE)
        buffer.close()
        with pytest.raises(ValueError, match="managed-memory allocation"):
            _ = wrapped.read_mostly

    def test_a_range_that_runs_past_its_allocation(self, buf, alloc):
        alloc(PAGE)
        wrapped = ManagedBuffer.from_handle(buf.handle, buf.size + (64 << 20))
        with pytest.raises(ValueError, match="managed-memory allocation"):
            _ = wrapped.read_mostly


class BrokenInterface:
    def __init__(self, value):
        self.__cuda_array_interface__ = value


class RaisingInterface:
    @property
    def __cuda_array_interface__(self):
        raise LookupError("from the property")


class TestArrayInterfaces:
    @pytest.mark.parametrize(
        "change",
        [
            *({"shape": bad} for bad in (None, "4", (-1,), (1.5,), (1 << 62, 1 << 62))),
            *({"data": bad} for bad in (None, (PAGE,), [PAGE, False], ("x", False), (-1, False))),
            *({"typestr": bad} for bad in (None, b"<f4", "", "float", "=f4", "4f4", "<x4", "<t8")),
            *({"typestr": "<f" + size} for size in ("", "x", "04", "-4", " 4", "4x", "4[ns]")),
            *({"typestr": bad} for bad in ("<", "<M8[", "<m8[s", "|O8", "<f" + 20 * "9")),
            {"strides": (1, 1)},
            {"strides": "x"},
            {"shape": (2, 2), "strides": (-(1 << 63), (1 << 63) - 2)},
        ],
        ids=label,
    )
    def test_malformed(self, untouched, change):
        array = CudaArray(untouched)
        array.__cuda_array_interface__.update(change)
        with pytest.raises((TypeError, ValueError)):
            managedmem.prefetch(array, Host())

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            ({"mask": ()}, ValueError, "has a mask"),
            ({"version": 4}, ValueError, "must be 0 to 3, got 4"),
            ({"version": -1}, ValueError, "must be 0 to 3, got -1"),
            ({"version": 1 << 70}, ValueError, "version .* out of range"),
            ({"version": None}, TypeError, "version .* must be an int"),
            ({"version": "3"}, TypeError, "version .* must be an int"),
            ({"shape": (4, -1)}, ValueError, "negative length"),
            ({"shape": (0, -1)}, ValueError, "negative length"),
            ({"shape": (1 << 63,)}, ValueError, "out of range"),
            ({"data": ((1 << 64) - 8, False), "shape": (PAGE,)}, ValueError, "outside the address"),
            ({"data": (PAGE, False), "strides": (-PAGE,)}, ValueError, "outside the address"),
            ({"data": (1 << 64, False)}, ValueError, "not an address"),
        ],
        ids=str,
    )
    def test_the_error_names_the_entry(self, untouched, change, error, words):
        array = CudaArray(untouched)
        array.__cuda_array_interface__.update(change)
        for call in (
            lambda: managedmem.prefetch(array, Host()),
            lambda: managedmem.advise(array, "set_read_mostly"),
            lambda: managedmem.discard(array),
            lambda: untouched.copy_from(array),
            lambda: untouched.copy_to(array),
        ):
            with pytest.raises(error, match=words):
                call()

    @pytest.mark.parametrize("strides", [(PAGE,), (-1,)])
    def test_strides_that_leave_the_memory(self, untouched, strides):
        array = CudaArray(untouched, strides=strides)
        with pytest.raises(ValueError, match=r"leaves its managed|managed-memory allocation"):
            managedmem.prefetch(array, Host())

    @pytest.mark.parametrize(
        "change",
        [
            {"version": 0, "mask": None},
            {"version": 1},
            {"version": 2},
            {"typestr": ">f4", "shape": (PAGE // 4,)},
            {"typestr": "|b1"},
            {"typestr": "|V16", "shape": (PAGE // 16,)},
            {"typestr": "<M8[ns]", "shape": (PAGE // 8,)},
            {"typestr": "<m8[s]", "shape": (PAGE // 8,)},
            {"typestr": "<U4", "shape": (PAGE // 16,)},
            {"typestr": "|S4", "shape": (PAGE // 4,)},
        ],
        ids=str,
    )
    def test_what_the_protocol_allows(self, alloc, change):
        """Each of them covers exactly the first page, `<U4` with four bytes a character."""
        target, source = alloc(2 * PAGE), alloc(PAGE)
        array = CudaArray(target, shape=(PAGE,))
        array.__cuda_array_interface__.update(change)
        managedmem.prefetch(array, Host())
        assert target[:PAGE].last_prefetch_location is Host()
        source.fill(7)
        source.copy_to(array)
        assert contents(target) == bytes([7]) * PAGE + bytes(PAGE)

    @pytest.mark.parametrize("missing", ["shape", "data", "typestr", "version"])
    def test_incomplete(self, untouched, missing):
        array = CudaArray(untouched)
        del array.__cuda_array_interface__[missing]
        with pytest.raises((TypeError, ValueError, KeyError), match=missing):
            managedmem.prefetch(array, Host())

    @pytest.mark.parametrize("value", [None, 7, [], "dict"], ids=label)
    def test_no_dict(self, value):
        with pytest.raises(TypeError):
            managedmem.prefetch(BrokenInterface(value), Host())

    def test_an_error_inside_comes_through(self):
        with pytest.raises(LookupError, match="from the property"):
            managedmem.prefetch(RaisingInterface(), Host())

    def test_nothing_is_done_for_an_empty_array(self, untouched):
        managedmem.prefetch(CudaArray(untouched, shape=(0,)), Host())


@pytest.mark.parametrize(
    "iterator", [lambda b: iter([b]), lambda b: (x for x in [b])], ids=["iterator", "generator"]
)
def test_one_shot_iterables_are_refused_or_done_in_full(buf, iterator):
    """A sequence is asked for; what comes instead must not be half done."""
    try:
        managedmem.prefetch(iterator(buf), Host())
    except TypeError:
        assert buf.last_prefetch_location is None
    else:
        assert buf.last_prefetch_location is Host()


class ChangesTheList(list):
    """A list that empties itself while it is read."""

    def __getitem__(self, index):
        item = super().__getitem__(index)
        self.clear()
        return item


def test_a_list_that_changes_while_it_is_read(buf):
    pages = [buf[:PAGE], buf[2 * PAGE : 3 * PAGE]]
    targets = ChangesTheList(pages)
    with contextlib.suppress(IndexError, RuntimeError, ValueError):
        managedmem.prefetch(targets, Host())
    found = {page.last_prefetch_location for page in pages}
    assert found in ({Host()}, {None}), "both or neither"


def test_an_array_interface_that_changes_while_it_is_read(buf, device0):
    """The numbers of an interface may be objects whose __index__ empties the dict."""

    class Length:
        def __index__(self):
            interface.clear()
            return 4096

    class Array:
        @property
        def __cuda_array_interface__(self):
            return interface

    for _ in range(20):
        interface = {
            "shape": (Length(),),
            "typestr": "|u" + str(1),
            "data": (buf.handle, False),
            "strides": (1,),
            "version": 3,
        }
        managedmem.prefetch(Array(), device0)
    assert buf[:4096].last_prefetch_location is device0


@pytest.mark.parametrize("name", ["", "x", "streams", "stream\0", "stream\0" + 99 * "x", "\udc80"])
def test_names_that_no_parameter_has(untouched, name):
    """Even names that begin with an existing name, and go on behind a NUL."""
    for function in (untouched.prefetch, untouched.fill, managedmem.PrefetchPlan):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            function(**{name: None})


def test_an_argument_by_position_and_by_name(untouched):
    for call, words in [
        (lambda: untouched.prefetch(Host(), location=Host()), r"prefetch\(\).*'location'"),
        (lambda: Host(1, numa_id=1), r"Host\(\).*'numa_id'"),
        (lambda: Device(0, device_id=0), r"Device\(\).*'device_id'"),
    ]:
        with pytest.raises(TypeError, match="got multiple values for argument") as error:
            call()
        error.match(words)


@pytest.mark.parametrize("key", [int, 5, None, b"numa_id"], ids=label)
def test_keywords_that_are_not_strings(key):
    """A constructor gets any dict as keywords. A key was read as if it were a str, so each case
    runs in a process of its own."""
    done = run_python(
        f"""
        import functools
        import managedmem
        with managedmem.empty(16) as buffer:
            functions = [
                managedmem.Host, managedmem.Device, managedmem.Stream,
                managedmem.ManagedMemoryResource, managedmem.DeviceMemoryResource,
                managedmem.PrefetchPlan, managedmem.MigrationPolicy, managedmem.ManagedBuffer,
                managedmem.empty, managedmem.prefetch, buffer.prefetch, buffer.close,
            ]
            for function in functions:
                for call in (function, functools.partial(function)):
                    try:
                        call(**{{{key!r}: 2}})
                    except TypeError as error:
                        if function is not managedmem.ManagedBuffer:
                            assert "keywords must be strings" in str(error), (function, error)
                    else:
                        raise AssertionError(function)
        print("fine")
        """.replace(repr(int), "int")
    )
    assert done.stdout == "fine\n"


def raising(error):
    def member(*_):
        raise error("mine")

    return member


@pytest.mark.parametrize("shape", [(), (2,), (2, 2)], ids=label)
@pytest.mark.parametrize("strides", [(), (1,), (2, 1)], ids=label)
def test_a_tensor_with_strides_for_other_axes(untouched, shape, strides):
    tensor = torch_like(untouched, shape=shape, stride=lambda: strides)
    if len(shape) == len(strides):
        managedmem.advise(tensor, "unset_read_mostly")
    else:
        with pytest.raises(TypeError, match="different length"):
            managedmem.prefetch(tensor, Host())
        with pytest.raises(TypeError, match=r"targets\[1\]: .* different length"):
            managedmem.prefetch([untouched, tensor], Host())


def test_a_tensor_with_elements_below_a_byte(untouched):
    size = -(1 << 40)
    tensor = torch_like(untouched, element_size=lambda: size, layout="strided", device="cpu")
    with pytest.raises(TypeError, match="element_size"):
        managedmem.prefetch(tensor, Host())


def test_a_tensor_that_reaches_beyond_all_addresses(untouched):
    far = torch_like(untouched, shape=(2,), stride=lambda: (1 << 61,), element_size=lambda: 8)
    with pytest.raises(ValueError, match="more memory than there can be"):
        managedmem.prefetch(far, Host())


def test_a_tensor_without_memory(untouched):
    """The elements of a meta tensor have no address."""
    tensor = torch_like(untouched, data_ptr=lambda: 0, device="meta")
    with pytest.raises(ValueError, match="on device meta holds no memory"):
        managedmem.prefetch(tensor, Host())


def test_a_buffer_of_cuda_core_that_has_not_all(untouched):
    """It is known by its handle and size; what lacks one of them is no target."""
    for members in ({"handle": untouched.handle}, {"size": untouched.size}, {}):
        with pytest.raises(TypeError, match="target"):
            managedmem.prefetch(foreign("cuda.core._memory", "Buffer", **members), Host())
    whole = foreign("cuda.core._memory", "Buffer", handle=untouched.handle, size=untouched.size)
    managedmem.advise(whole, "unset_read_mostly")


def test_a_tensor_without_elements_is_nothing_to_do(untouched):
    tensor = torch_like(untouched, shape=(3, 0), stride=lambda: (1, 1), data_ptr=lambda: 0)
    managedmem.prefetch(tensor, Host())


def test_a_tensor_vouches_for_its_memory():
    """Memory that nobody knows may be read where its owner holds it, and not beyond."""
    array = (ctypes.c_uint8 * PAGE)(*range(100))
    address = ctypes.addressof(array)
    held = torch_like(ManagedBuffer.from_handle(address, 100))
    with ManagedBuffer.from_handle(address, 100, owner=held) as buffer:
        assert bytes(buffer) == bytes(range(100))
    with ManagedBuffer.from_handle(address, 101, owner=held) as buffer:
        with pytest.raises(BufferError):
            memoryview(buffer)


def test_a_pattern_with_gaps(untouched):
    with pytest.raises(BufferError, match="contiguous"):
        untouched.fill(memoryview(b"abcdefgh")[::2])


def test_a_stream_that_is_none_allocates_nothing():
    with pytest.raises(TypeError, match="stream"):
        ManagedMemoryResource().allocate(PAGE, stream="stream")


@pytest.mark.parametrize("method", ["torch", "cupy", "numpy"])
def test_no_array_of_a_closed_buffer(alloc, method):
    buffer = alloc(PAGE)
    buffer.close()
    with pytest.raises(RuntimeError, match="closed"):
        getattr(buffer, method)()


class Failing:
    """A number, or a flag, that cannot be read."""

    __index__ = __int__ = __bool__ = raising(OSError)


@pytest.mark.parametrize(
    "call",
    [
        lambda b: Host(Failing()),
        lambda b: Host(is_numa_current=Failing()),
        lambda b: Device(Failing()),
        lambda b: ManagedBuffer.from_handle(Failing(), 1),
        lambda b: ManagedBuffer.from_handle(b.handle, Failing()),
        lambda b: ManagedMemoryResource().allocate(Failing()),
        lambda b: b.fill(Failing()),
        lambda b: b.range(Failing(), 1),
        lambda b: b.prefetch(foreign("torch", "device", type=Failing())),
        lambda b: b.__dlpack__(stream=Failing()),
        lambda b: b.__dlpack__(dl_device=(Failing(), 0)),
        lambda b: managedmem.PrefetchPlan.fit([b], Device(0), budget=Failing()),
        lambda b: managedmem.PrefetchPlan([(b, Host())])[Failing()],
    ],
)
def test_a_number_that_cannot_be_read_says_so_itself(untouched, call):
    with pytest.raises((OSError, TypeError, ValueError)) as error:
        call(untouched)
    assert error.type is OSError or "Failing" in str(error.value)


@pytest.mark.parametrize("module", ["torchvision", "torc", "cudafoo.core", "jaxlibs._jax"])
def test_a_device_of_a_library_with_a_similar_name(untouched, module):
    for name in ("device", "Device"):
        place = foreign(module, name, type="cuda", index=0, platform="gpu", local_hardware_id=0)
        with pytest.raises(TypeError, match="Device or Host"):
            untouched.prefetch(place)


class FailingPlace:
    """A device of another library whose kind cannot be read."""

    type = platform = property(raising(OSError))


@pytest.mark.parametrize(("module", "name"), [("torch", "device"), ("jaxlib._jax", "Device")])
def test_a_device_that_cannot_be_read_says_so_itself(untouched, module, name):
    place = type(name, (FailingPlace,), {"__module__": module})()
    with pytest.raises(OSError, match="mine"):
        untouched.prefetch(place)


@pytest.mark.parametrize(
    "call",
    [
        lambda b: b.close(Host(), Host()),
        lambda b: b.torch(1, 2, 3),
        lambda b: b.cupy(1, 2, 3),
        lambda b: managedmem.MigrationPolicy.shared([Host()], 1),
        lambda b: managedmem.MigrationPolicy.of(),
        lambda b: managedmem.PrefetchPlan.from_module(),
        lambda b: managedmem.PrefetchPlan.fit(),
        lambda b: managedmem.prefetch(),
        lambda b: managedmem.empty(),
        lambda b: ManagedMemoryResource().deallocate(b.handle),
    ],
)
def test_too_few_and_too_many_arguments(untouched, call):
    with pytest.raises(TypeError, match="argument"):
        call(untouched)


class Unequal(str):
    """A key that cannot be compared."""

    __hash__ = str.__hash__
    __eq__ = raising(KeyboardInterrupt)


class Address:
    __index__ = __int__ = lambda self: 4096
    __bool__ = raising(KeyboardInterrupt)


class HasIter:
    __iter__ = raising(KeyboardInterrupt)


class Meta(type):
    __cuda_array_interface__ = property(raising(KeyboardInterrupt))


class OfMeta(metaclass=Meta):
    pass


@pytest.mark.parametrize(
    ("target", "error"),
    [
        (lambda b: torch_like(b, data_ptr=raising(KeyboardInterrupt)), KeyboardInterrupt),
        (lambda b: torch_like(b, data_ptr=raising(MemoryError)), MemoryError),
        (lambda b: torch_like(b, stride=raising(RecursionError)), RecursionError),
        (lambda b: torch_like(b, data_ptr=Address), KeyboardInterrupt),
        (lambda b: CudaArray(b, members={Unequal("data"): (0, False)}), KeyboardInterrupt),
        (lambda b: HasIter(), KeyboardInterrupt),
        (lambda b: OfMeta(), KeyboardInterrupt),
    ],
)
def test_an_error_that_is_not_about_the_target_is_passed_on(untouched, target, error):
    with pytest.raises(error):
        managedmem.prefetch(target(untouched), Host())
