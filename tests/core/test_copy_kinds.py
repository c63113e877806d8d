"""Copies and fills between managed memory, pools, devices and the host; the access they need."""

import copy
import ctypes
import gc
import itertools
import os
import pickle

import pytest

import managedmem
from calls import names
from constants import EMULATED, MIB, PAGE
from contents import contents, pattern, write
from driver import CAPTURE_RELAXED, capturing, raw_driver
from foreign_objects import CudaArray
from managedmem import Device, DeviceMemoryResource, Host, ManagedMemoryResource, Stream, emulator
from pools import needs_pools, read
from programs import run_python

LAST = Device.all()[-1]
SIZE = MIB + 3
KINDS = {
    "managed": ManagedMemoryResource,
    "managed pool": lambda: ManagedMemoryResource(pooled=True),
    "device pool": lambda: DeviceMemoryResource(Device(0)),
    "pool of the last device": lambda: DeviceMemoryResource(LAST),
}
needs_two = pytest.mark.skipif(LAST is Device(0), reason="needs two devices")
pytestmark = [pytest.mark.usefixtures("current_device"), needs_pools]


def resource_of(kind):
    """A resource of that kind, open to every device where that is needed."""
    resource = KINDS[kind]()
    if isinstance(resource, DeviceMemoryResource):
        resource.peer_accessible_by = Device.all()
    return resource


@pytest.fixture(params=itertools.product(KINDS, KINDS), ids=" to ".join)
def both(request):
    """A source and a target, of every kind each."""
    with resource_of(request.param[0]) as one, resource_of(request.param[1]) as two:
        with one.allocate(SIZE) as source, two.allocate(SIZE) as target:
            settle()
            yield source, target


@pytest.fixture(params=KINDS)
def buffer(request):
    with resource_of(request.param) as resource, resource.allocate(SIZE) as made:
        settle()
        yield made


def settle():
    for device in Device.all():
        device.sync()


@pytest.fixture
def late(stream):
    """A stream with slow work: later work on it has not run yet."""
    if EMULATED:
        emulator.schedule("lazy")
    nap = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
    handle = ctypes.c_void_p(stream.handle)
    assert raw_driver().cuLaunchHostFunc(handle, nap, ctypes.c_void_p(200_000)) == 0
    yield stream
    stream.sync()
    if EMULATED:
        emulator.schedule("eager")


def stream_of(device):
    """A new stream of that device."""
    before = Device()
    device.set_current()
    try:
        return Stream()
    finally:
        before.set_current()


class TestEveryPair:
    def test_copy_to(self, both):
        source, target = both
        source.copy_from(pattern(SIZE))
        settle()
        assert source.copy_to(target) is target
        settle()
        assert read(target) == pattern(SIZE)

    def test_in_the_order_of_a_stream(self, both, stream):
        source, target = both
        source.fill(1, stream=stream)
        target.copy_from(source, stream=stream)
        source.fill(9, stream=stream)
        assert read(target, stream) == b"\x01" * SIZE

    def test_of_parts(self, both):
        source, target = both
        source.copy_from(pattern(SIZE))
        target.fill(0)
        settle()
        target[100:200].copy_from(source[PAGE : PAGE + 100])
        settle()
        assert read(target[:300]) == bytes(100) + pattern(SIZE)[PAGE : PAGE + 100] + bytes(100)

    def test_whichever_device_is_current(self, both):
        source, target = both
        for device in {Device(0), LAST}:
            device.set_current()
            source.copy_from(pattern(SIZE, start=device.device_id))
            settle()
            target.copy_from(source)
            settle()
            assert read(target) == pattern(SIZE, start=device.device_id)

    def test_sizes_must_agree(self, both):
        source, target = both
        with pytest.raises(ValueError, match="bytes"):
            target.copy_from(source[1:])
        with pytest.raises(ValueError, match="bytes"):
            source[1:].copy_to(target)


class TestOverlaps:
    @pytest.mark.parametrize("step", [1, PAGE, 2 * PAGE - 1])
    def test_are_refused(self, buffer, step):
        """The driver's copies are undefined there."""
        before = pattern(SIZE)
        buffer.copy_from(before)
        low, high = buffer[: 2 * PAGE], buffer[step : step + 2 * PAGE]
        for copy_it in (low.copy_from, low.copy_to, high.view().copy_from, high.copy_to):
            other = high if copy_it.__self__ is low else low
            with pytest.raises(
                ValueError, match=f"share {2 * PAGE - step} of their {2 * PAGE} bytes"
            ):
                copy_it(other)
        assert read(buffer) == before

    def test_neighbours_and_identical_ranges_are_accepted(self, buffer):
        buffer[:PAGE].fill(1)
        buffer[PAGE : 2 * PAGE].copy_from(buffer[:PAGE])
        buffer[:PAGE].copy_from(buffer[PAGE : 2 * PAGE])
        buffer[:PAGE].copy_from(buffer[:PAGE])
        buffer[1:1].copy_from(buffer[:0])
        assert read(buffer[: 2 * PAGE]) == bytes([1]) * 2 * PAGE

    def test_of_arrays_too(self, alloc):
        buffer = alloc(4 * PAGE)
        with memoryview(buffer) as view, pytest.raises(ValueError, match=f"share {PAGE} of"):
            buffer[: 2 * PAGE].copy_from(view[PAGE : 3 * PAGE])
        with pytest.raises(ValueError, match=f"share {PAGE} of"):
            buffer[: 2 * PAGE].copy_to(CudaArray(buffer[PAGE : 3 * PAGE]))


class TestHostMemory:
    @pytest.mark.emulator_only
    def test_each_copy_waits_for_its_stream(self, buffer, stream):
        """The host's memory may be gone right after the call."""
        host = bytearray(SIZE)
        with emulator.recording() as calls:
            buffer.copy_from(host, stream=stream)
            buffer.copy_to(host, stream=stream)
        waits = [c.args["stream"] for c in calls if c.name == "cuStreamSynchronize"]
        assert waits == [stream.handle] * 2

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_sources(self, buffer, kind):
        buffer.copy_from(kind(pattern(SIZE)))
        assert read(buffer) == pattern(SIZE)

    def test_numpy_both_ways(self, buffer):
        numpy = pytest.importorskip("numpy")
        source = numpy.frombuffer(pattern(SIZE), "uint8")
        target = numpy.zeros(SIZE, "uint8")
        buffer.copy_from(source)
        assert buffer.copy_to(target) is target
        assert (source == target).all()

    @pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1])
    def test_sizes_must_agree(self, buffer, size):
        with pytest.raises(ValueError, match="bytes"):
            buffer.copy_from(bytes(size))
        with pytest.raises(ValueError, match="bytes"):
            buffer.copy_to(bytearray(size))

    def test_what_is_read_only_is_no_target(self, buffer):
        with pytest.raises(ValueError, match="read-only"):
            buffer.copy_to(bytes(SIZE))

    def test_refused_on_a_stream_that_captures(self, buffer, stream):
        with capturing(stream, CAPTURE_RELAXED) as capture:
            with pytest.raises(managedmem.CUDAError, match="system memory"):
                buffer.copy_from(bytes(SIZE), stream=stream)
        assert capture.result == 0

    def test_foreign_arrays(self, buffer, alloc):
        other = alloc(SIZE)
        write(other, pattern(SIZE))
        buffer.copy_from(CudaArray(other))
        settle()
        write(other, 0)
        buffer.copy_to(CudaArray(other))
        settle()
        assert contents(other) == pattern(SIZE)


class TestFill:
    @pytest.mark.parametrize("value", [7, b"\x01", b"\x01\x02", b"\x01\x02\x03\x04"], ids=repr)
    def test_patterns(self, buffer, value):
        part = buffer[: SIZE - 3]
        part.fill(value)
        cycle = bytes([value]) if isinstance(value, int) else value
        assert read(part) == cycle * (part.size // len(cycle))

    @pytest.mark.parametrize("value", [b"\x01\x02", b"\x01\x02\x03\x04"], ids=repr)
    def test_at_an_odd_place(self, buffer, value):
        buffer[:16].fill(0)
        buffer[1:9].fill(value)
        assert read(buffer[:16]) == b"\x00" + value * (8 // len(value)) + bytes(7)

    def test_on_a_stream_of_the_other_device(self, buffer):
        with stream_of(LAST) as stream:
            buffer[:PAGE].fill(b"\x05\x06", stream=stream)
            assert read(buffer[:PAGE], stream) == b"\x05\x06" * (PAGE // 2)


@pytest.mark.emulator_only
class TestCalls:
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_copy_is_one_copy(self, kind, stream, alloc):
        with resource_of(kind) as resource, resource.allocate(PAGE) as buffer:
            other = alloc(PAGE)
            with emulator.recording() as calls:
                buffer.copy_from(other, stream=stream)
            assert [n for n in names(calls) if n.startswith("cuMemcpy")] == ["cuMemcpyAsync"]

    @needs_two
    def test_without_a_stream_the_owner_does_the_work(self):
        """The default stream of the device whose memory it is, and the thread's own afterwards."""
        with DeviceMemoryResource(LAST) as pool, pool.allocate(PAGE) as buffer:
            Device(0).set_current()
            buffer.fill(1)
            buffer.copy_from(bytes(PAGE))
            assert Device() is Device(0)
            assert read(buffer) == bytes(PAGE)


@needs_two
class TestAccess:
    """A stream of the last device works on memory of the first one's pool, and the reverse."""

    @pytest.fixture
    def pool(self):
        with DeviceMemoryResource(Device(0)) as made:
            yield made

    @pytest.fixture
    def mine(self, pool):
        with pool.allocate(PAGE) as made:
            made.fill(3)
            settle()
            yield made

    @pytest.fixture
    def theirs(self):
        with DeviceMemoryResource(LAST) as pool, pool.allocate(PAGE) as made:
            made.fill(4)
            settle()
            yield made

    def test_a_copy_works_while_the_set_grants_it(self, pool, mine, theirs):
        with stream_of(LAST) as stream:
            for _ in range(2):
                with pytest.raises(managedmem.CUDAError, match="peer_accessible_by") as caught:
                    theirs.copy_from(mine, stream=stream)
                assert caught.value.name == "CUDA_ERROR_INVALID_VALUE"
                assert f"Device({LAST.device_id}), has no access" in str(caught.value)
                assert read(theirs) == b"\x04" * PAGE
                pool.peer_accessible_by |= {LAST}
                theirs.copy_from(mine, stream=stream)
                assert read(theirs, stream) == b"\x03" * PAGE
                theirs.fill(4, stream=stream)
                stream.sync()
                pool.peer_accessible_by.remove(LAST)

    def test_a_fill_too(self, pool, mine):
        with stream_of(LAST) as stream:
            with pytest.raises(managedmem.CUDAError, match="peer_accessible_by"):
                mine.fill(4, stream=stream)
            pool.peer_accessible_by.add(LAST)
            mine.fill(4, stream=stream)
            stream.sync()
        assert read(mine) == b"\x04" * PAGE

    def test_the_other_way_too(self, pool, mine, theirs):
        with stream_of(LAST) as stream:
            with pytest.raises(managedmem.CUDAError, match="peer_accessible_by"):
                theirs.copy_to(mine, stream=stream)
            pool.peer_accessible_by.add(LAST)
            theirs.copy_to(mine, stream=stream)
            stream.sync()
        assert read(mine) == b"\x04" * PAGE

    def test_of_the_pool_and_not_of_the_device(self, mine, theirs):
        """Letting a device into one pool does nothing for another pool of the same device."""
        with DeviceMemoryResource(Device(0)) as other, stream_of(LAST) as stream:
            other.peer_accessible_by.add(LAST)
            with pytest.raises(managedmem.CUDAError, match="peer_accessible_by"):
                theirs.copy_from(mine, stream=stream)
            with other.allocate(PAGE) as open_to_all:
                open_to_all.fill(8)
                settle()
                theirs.copy_from(open_to_all, stream=stream)
                assert read(theirs, stream) == b"\x08" * PAGE

    def test_memory_that_is_allocated_later_is_open_as_well(self, pool, theirs):
        pool.peer_accessible_by.add(LAST)
        with pool.allocate(PAGE) as later, stream_of(LAST) as stream:
            later.fill(6)
            settle()
            theirs.copy_from(later, stream=stream)
            assert read(theirs, stream) == b"\x06" * PAGE

    def test_a_host_copy_needs_access(self, pool, mine):
        with stream_of(LAST) as stream:
            with pytest.raises(managedmem.CUDAError, match="peer_accessible_by"):
                mine.copy_from(bytes(PAGE), stream=stream)
            assert read(mine) == b"\x03" * PAGE

    def test_managed_memory_needs_none(self, alloc):
        buffer = alloc(PAGE)
        with stream_of(LAST) as stream:
            buffer.fill(2, stream=stream)
            stream.sync()
        assert contents(buffer) == b"\x02" * PAGE

    @pytest.mark.parametrize("act", ["b.copy_from(a, stream=stream)", "a.fill(1, stream=stream)"])
    def test_a_refusal_harms_nothing(self, act):
        """In a process of its own: a fault on the device would end the context for good."""
        done = run_python(
            f"""
            import managedmem
            from managedmem import Device, DeviceMemoryResource, Stream
            first, last = Device(0), Device.all()[-1]
            one, two = DeviceMemoryResource(first), DeviceMemoryResource(last)
            a, b = one.allocate(4096), two.allocate(4096)
            a.fill(1); b.fill(2)
            last.set_current()
            stream = Stream()
            for device in Device.all():
                device.sync()
            try:
                {act}
            except managedmem.CUDAError as error:
                print(error.name)
            one.peer_accessible_by = [last]
            {act}
            b.copy_from(a, stream=stream)
            stream.sync()
            out = bytearray(4096)
            b.copy_to(out, stream=stream)
            assert out == b"\\x01" * 4096
            """,
            driver="emulator" if EMULATED else "cuda",
            emulator=os.environ.get("MANAGEDMEM_EMULATOR"),
        )
        assert done.stdout.split() == ["CUDA_ERROR_INVALID_VALUE"]


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
class TestCopyModule:
    def test_has_contents_and_layout_and_memory_of_its_own(self, make, buffer):
        typed = buffer.range(0, MIB).view("float32", (4, 256, 256))
        typed.copy_from(pattern(MIB))
        with make(typed) as other:
            assert type(other) is managedmem.ManagedBuffer
            assert (other.shape, other.dtype) == (typed.shape, typed.dtype)
            assert other.handle != typed.handle
            assert other.memory_resource is buffer.memory_resource
            typed.fill(0)
            seen = bytearray(MIB)
            other.copy_to(seen)
            assert seen == pattern(MIB)

    def test_of_a_view_is_just_its_part(self, make, alloc):
        buffer = alloc(MIB)
        write(buffer, pattern(MIB))
        row = buffer.view("uint8", (MIB // 64, 64))[-1]
        with make(row) as other:
            assert (other.shape, other.size) == ((64,), 64)
            assert contents(other) == pattern(MIB)[-64:]
            row.close()
            assert not other.is_closed

    @pytest.mark.parametrize("shape", [(), 0, (0, 3)], ids=repr)
    def test_of_one_element_and_of_none(self, make, shape):
        with managedmem.empty(shape, "int16") as buffer:
            buffer.fill(3)
            with make(buffer) as other:
                assert (other.shape, other.dtype) == (buffer.shape, "int16")
                assert contents(other) == contents(buffer)

    def test_is_done_when_it_returns_and_behind_the_default_stream(self, make, alloc):
        if EMULATED:
            emulator.schedule("lazy")
        buffer = alloc(4 * MIB)
        buffer.fill(7)
        with make(buffer) as other, memoryview(other) as seen:
            assert seen == b"\x07" * (4 * MIB)

    def test_of_wrapped_memory(self, make, alloc):
        owner = alloc(PAGE)
        write(owner, 5)
        wrapped = managedmem.ManagedBuffer.from_handle(owner.handle, PAGE, owner=owner)
        with make(wrapped) as other:
            assert other.owner is None
            assert contents(other) == b"\x05" * PAGE

    def test_of_a_closed_buffer(self, make, alloc):
        buffer = alloc(PAGE)
        buffer.close()
        with pytest.raises(RuntimeError, match="closed"):
            make(buffer)

    def test_in_a_list(self, make, alloc):
        buffer = alloc(PAGE)
        write(buffer, 9)
        first, second = copy.deepcopy([buffer, buffer])
        assert first is second is not buffer
        assert contents(first) == b"\x09" * PAGE
        first.close()

    def test_pickle_still_says_what_to_do(self, make, alloc):
        with pytest.raises(TypeError, match="bytes"):
            pickle.dumps(alloc(PAGE))

    @pytest.mark.emulator_only
    def test_leaves_nothing_when_the_driver_fails(self, make, alloc):
        buffer = alloc(PAGE)
        for name in ("cuMemAllocManaged", "cuMemcpyAsync", "cuStreamSynchronize"):
            before = emulator.live()
            emulator.fail(name, code=719)
            with pytest.raises(managedmem.CUDAError, match=name):
                make(buffer)
            gc.collect()
            assert emulator.live() == before


class TestArrayInterfaceEntries:
    """Entries of `__cuda_array_interface__` beside the layout: the producer's stream, read-only."""

    HINTS = (
        lambda array: managedmem.prefetch(array, Host()),
        lambda array: managedmem.advise(array, "unset_read_mostly"),
    )

    @staticmethod
    def array(buffer, **members):
        return CudaArray(buffer, members=members)

    def test_a_copy_comes_after_the_producer(self, alloc, late):
        source, target = alloc(PAGE), alloc(PAGE)
        with Stream() as own:
            source.fill(7, stream=late)
            target.copy_from(self.array(source, stream=late.handle), stream=own)
            own.sync()
        assert bytes(target) == bytes([7]) * PAGE

    def test_a_copy_into_an_array_comes_after_the_producer(self, alloc, late):
        source, target = alloc(PAGE), alloc(PAGE)
        with Stream() as own:
            source.fill(8, stream=own)
            target.fill(7, stream=late)
            source.copy_to(self.array(target, stream=late.handle), stream=own)
            own.sync()
            late.sync()
        assert bytes(target) == bytes([8]) * PAGE

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("several", [False, True])
    def test_a_discard_comes_after_the_producer(self, alloc, late, device0, several):
        source, target = alloc(4 * PAGE), alloc(4 * PAGE)
        source.fill(7)
        device0.sync()
        with Stream() as own:
            target.copy_from(source, stream=late)
            array = self.array(source, stream=late.handle)
            managedmem.discard([array, source] if several else array, stream=own)
            own.sync()
            late.sync()
        assert bytes(target) == bytes([7]) * 4 * PAGE

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("named", [None, "same", 1, 2])
    def test_order_of_producer_and_stream(self, alloc, stream, named):
        source, target = alloc(PAGE), alloc(PAGE)
        handle = stream.handle if named == "same" else named
        for own in (stream, None):
            with emulator.recording() as calls:
                target.copy_from(self.array(source, stream=handle), stream=own)
            made = names(calls)
            same = (named, own) in ((None, stream), (None, None), ("same", stream), (1, None))
            assert (made.count("cuEventRecord"), made.count("cuStreamWaitEvent")) == (
                (0, 0) if same else (1, 1)
            )
            if not same:
                record, wait = (
                    c for c in calls if c.name in ("cuEventRecord", "cuStreamWaitEvent")
                )
                assert record.args["stream"] == handle
                assert wait.args["stream"] == (own.handle if own else 0)
                assert made.index("cuStreamWaitEvent") < made.index("cuMemcpyAsync")

    @pytest.mark.emulator_only
    def test_producers_of_several_targets_count_once(self, alloc, stream):
        arrays = [self.array(alloc(PAGE), stream=2 if i == 5 else 1) for i in range(20)]
        with emulator.recording() as calls:
            managedmem.discard(arrays, stream=stream)
        assert [c.args["stream"] for c in calls if c.name == "cuEventRecord"] == [1, 2]

    @pytest.mark.emulator_only
    def test_hints_do_not_wait(self, buf, stream):
        array = self.array(buf, stream=stream.handle)
        with emulator.recording() as calls:
            for hint in self.HINTS:
                hint(array)
        assert not [c for c in calls if "Event" in c.name or "Synchronize" in c.name]

    @pytest.mark.parametrize("capturing_one", ["producer", "own"])
    def test_a_capture_survives(self, alloc, stream, capturing_one):
        source, target = alloc(PAGE), alloc(PAGE)
        with Stream() as other:
            own, producer = (other, stream) if capturing_one == "producer" else (stream, other)
            with capturing(stream) as capture:
                with pytest.raises(managedmem.CUDAError, match="captur"):
                    target.copy_from(self.array(source, stream=producer.handle), stream=own)
            assert capture.result == 0

    @pytest.mark.parametrize(
        ("stream", "error"),
        [(0, ValueError), (-1, ValueError), (False, TypeError), ("1", TypeError), (1.0, TypeError)],
    )
    def test_streams_that_the_protocol_forbids(self, alloc, stream, error):
        array, buffer = self.array(alloc(PAGE), stream=stream), alloc(PAGE)
        hints = self.HINTS if stream != 0 or stream is False else ()  # hints use no stream
        for use in (*hints, buffer.copy_from, buffer.copy_to):
            with pytest.raises(error, match="stream"):
                use(array)

    def test_read_only_memory_is_read_and_moved(self, alloc, device0):
        memory, buffer = alloc(PAGE), alloc(PAGE)
        write(memory, 5)
        array = CudaArray(memory, readonly=True)
        for hint in self.HINTS:
            hint(array)
        assert contents(buffer.copy_from(array) or buffer) == bytes([5]) * PAGE
        managedmem.PrefetchPlan([(array, Host())]).execute()
        device0.sync()

    def test_an_exception_of_the_read_only_flag(self, buf):
        class Unknown:
            def __bool__(self):
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            managedmem.prefetch(CudaArray(buf, readonly=Unknown()), Host())


class TestHostMemoryUnderSlowWork:
    """A copy of system memory is done when the call returns, even behind queued work."""

    def test_the_source_can_be_overwritten(self, alloc, late):
        buffer, source = alloc(SIZE), bytearray(pattern(SIZE))
        buffer.copy_from(source, stream=late)
        source[:] = bytes(SIZE)
        late.sync()
        assert bytes(buffer) == pattern(SIZE)

    def test_the_destination_can_be_read(self, alloc, late):
        buffer, target = alloc(SIZE), bytearray(SIZE)
        buffer.fill(7, stream=late)
        buffer.copy_to(target, stream=late)
        assert target == b"\x07" * SIZE


@pytest.mark.emulator_only
@pytest.mark.parametrize("count", [1, 2, 3, 100])
def test_many_producers_are_waited_for(alloc, count):
    """Each array names a stream of its own."""
    buffer = alloc(count * PAGE)
    streams = [Stream() for _ in range(count)]
    arrays = [
        CudaArray(buffer, shape=(PAGE,), offset=i * PAGE, members={"stream": stream.handle})
        for i, stream in enumerate(streams)
    ]
    with Stream() as own, emulator.recording() as calls:
        for _ in range(20):
            managedmem.discard_prefetch(arrays, Host(), stream=own)
    assert names(calls).count("cuStreamWaitEvent") == 20 * count
    for stream in streams:
        stream.close()
