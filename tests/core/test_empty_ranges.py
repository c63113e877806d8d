"""Empty ranges: allowed for every operation, which then does nothing.

The properties of an empty buffer, every operation on it, and empty targets, alone or among others.
All other arguments are still checked.
"""

import gc
import itertools

import pytest

import managedmem
from constants import EMULATED, PAGE
from contents import contents, pattern, write
from driver import capturing, device_memory
from foreign_objects import CudaArray
from managedmem import (
    Device,
    DeviceMemoryResource,
    Host,
    ManagedBuffer,
    ManagedMemoryResource,
    MigrationPolicy,
    PrefetchPlan,
    emulator,
)
from programs import run_python

EMPTIES = {
    "empty(0)": lambda b: managedmem.empty(0),
    "empty((0, 3))": lambda b: managedmem.empty((0, 3), "float32"),
    "empty((3, 0))": lambda b: managedmem.empty((3, 0), "complex128"),
    "allocate(0)": lambda b: ManagedMemoryResource().allocate(0),
    "from_handle(0, 0)": lambda b: ManagedBuffer.from_handle(0, 0),
    "slice at the start": lambda b: b[0:0],
    "slice in the middle": lambda b: b[100:100],
    "slice behind the end": lambda b: b[b.size :],
    "range": lambda b: b.range(7, 0),
    "slice of wrapped memory": lambda b: ManagedBuffer.from_handle(b.handle, 8, owner=b)[4:4],
    "view": lambda b: b[:0].view("float64", (0, 5)),
}
TARGETS = EMPTIES | {
    "array interface": lambda b: CudaArray(b, shape=(4, 0)),
    "array interface at 0": lambda b: CudaArray(b, shape=(0,), pointer=0),
    "bytearray": lambda b: bytearray(),
    "memoryview": lambda b: memoryview(b)[:0],
    "memoryview of nothing": lambda b: memoryview(managedmem.empty((0, 2))),
}
buffers = pytest.mark.parametrize("make", EMPTIES.values(), ids=EMPTIES)
targets = pytest.mark.parametrize("make", TARGETS.values(), ids=TARGETS)


@pytest.fixture
def nothing_called():
    """On the emulated driver: no call that works on memory was made."""
    if not EMULATED:
        yield
        return
    with emulator.recording() as calls:
        yield
    quiet = ("cuStream", "cuCtx", "cuThread", "cuEvent", "cuPointer", "cuMemGetInfo")
    assert [c.name for c in calls if not c.name.startswith(quiet)] == []


class TestProperties:
    @pytest.mark.parametrize("shape", [0, (0,), (0, 3), (3, 0), (2, 0, 4), (0,) * 8], ids=repr)
    @pytest.mark.parametrize("dtype", ["uint8", "bool", "complex128"])
    def test_describes_itself(self, shape, dtype):
        buffer = managedmem.empty(shape, dtype)
        expected = shape if isinstance(shape, tuple) else (shape,)
        assert (buffer.shape, buffer.dtype, buffer.ndim) == (expected, dtype, len(expected))
        assert (buffer.size, buffer.nbytes, len(buffer)) == (0, 0, expected[0])
        assert bool(buffer) is False
        assert buffer.handle == 0
        assert repr(expected) in repr(buffer)
        assert "handle=0x0" in repr(buffer)
        buffer.close()
        assert "closed" in repr(buffer)

    @pytest.mark.parametrize("part", [lambda b: b[2], lambda b: b[1:], lambda b: b[1:][1]])
    def test_parts_have_no_address_either(self, part):
        view = part(managedmem.empty((3, 0), "float32"))
        assert view.handle == 0
        assert managedmem.prefetch(view, Host()) is None

    def test_takes_no_memory(self):
        before = emulator.live() if EMULATED else None
        resources = [ManagedMemoryResource(), DeviceMemoryResource(Device(0))]
        held = [managedmem.empty(0), *(r.allocate(0) for r in resources)]
        if EMULATED:
            assert emulator.live().allocations == before.allocations
        for buffer in held:
            buffer.close()
            assert buffer.is_closed
            with pytest.raises(RuntimeError, match="closed"):
                buffer.prefetch(Host())

    @buffers
    def test_is_managed_memory_without_advice(self, make, buf):
        buf.read_mostly = True
        buf.preferred_location = Host()
        buf.accessed_by.add(Device(0))
        buf.prefetch(Host())
        buffer = make(buf)
        assert buffer.is_managed is True
        assert buffer.is_host_accessible is True
        assert buffer.is_device_accessible is True
        assert buffer.device_id == Device().device_id
        assert buffer.read_mostly is False
        assert buffer.preferred_location is None
        assert set(buffer.accessed_by) == set()
        assert buffer.last_prefetch_location is None
        assert buffer.page_runs() == ()

    def test_of_a_devices_pool_is_that_devices_memory(self):
        resource = DeviceMemoryResource(Device(0))
        for buffer in (resource.allocate(0), resource.allocate(PAGE)[PAGE:]):
            assert buffer.is_managed is False
            assert buffer.is_host_accessible is False
            assert buffer.device_id == 0
            assert buffer.__dlpack_device__() == (2, 0)
        buffer.close()
        del buffer
        gc.collect()
        resource.close()

    @pytest.mark.parametrize("pooled", [False, True])
    def test_an_address_and_a_size_of_zero_can_be_deallocated(self, pooled):
        with ManagedMemoryResource(pooled=pooled) as resource:
            buffer = resource.allocate(0)
            assert resource.deallocate(buffer.handle, buffer.size) is None
            with ManagedBuffer.from_handle(0, 0, mr=resource) as wrapped:
                assert wrapped.memory_resource is resource

    def test_bytes_at_address_zero_stay_an_error(self):
        with pytest.raises(ValueError, match="address"):
            ManagedBuffer.from_handle(0, 1)
        with pytest.raises(ValueError, match="address"):
            ManagedMemoryResource().deallocate(0, 1)
        with pytest.raises(ValueError, match="address"):
            ManagedBuffer.from_handle(-1, 0)

    @buffers
    def test_a_view_of_it_is_empty_too(self, make, buf):
        buffer = make(buf)
        assert buffer.view("uint8").size == 0
        assert buffer.view("float64", (0, 7)).shape == (0, 7)
        assert buffer.range(0, 0).size == 0
        assert buffer[:5].shape == (min(5, len(buffer)), *buffer.shape[1:])
        with pytest.raises(ValueError):
            buffer.view(shape=1)
        with pytest.raises(ValueError):
            buffer.range(0, 1)


class TestOperations:
    @buffers
    def test_do_nothing(self, make, buf, device0, stream, nothing_called):
        buffer = make(buf)
        for options in ({}, {"stream": stream}):
            buffer.prefetch(device0, **options)
            buffer.prefetch(Host(), defer=True, **options)
            buffer.fill(3, **options)
            buffer.fill(b"abcd", **options)
            buffer.discard(**options)
            buffer.discard_prefetch(device0, **options)
        buffer.read_mostly = True
        buffer.preferred_location = device0
        buffer.preferred_location = None
        buffer.accessed_by = [device0, Host()]
        buffer.accessed_by.add(device0)
        buffer.accessed_by.discard(Host())
        assert buffer.read_mostly is False

    @buffers
    def test_copies(self, make, buf, stream):
        buffer = make(buf)
        with buffer.copy_to(stream=stream) as copy:
            assert (copy.shape, copy.dtype, copy.size) == (buffer.shape, buffer.dtype, 0)
        buffer.copy_from(b"")
        buffer.copy_from(managedmem.empty(0))
        target = bytearray()
        assert buffer.copy_to(target) is target
        for other in (b"x", managedmem.empty(1), buf):
            with pytest.raises(ValueError, match="bytes"):
                buffer.copy_from(other)

    @buffers
    @pytest.mark.parametrize(
        ("error", "bad"),
        [
            (TypeError, lambda b: b.prefetch(0)),
            (ValueError, lambda b: b.prefetch(None)),
            (TypeError, lambda b: b.prefetch(Host(), stream="x")),
            (TypeError, lambda b: b.prefetch(Host(), defer=1)),
            (TypeError, lambda b: b.discard(stream="x")),
            (OverflowError, lambda b: b.fill(256)),
            (ValueError, lambda b: b.fill(b"abc")),
            (TypeError, lambda b: setattr(b, "read_mostly", 1)),
            (TypeError, lambda b: setattr(b, "preferred_location", "cpu")),
            (ValueError, lambda b: b.accessed_by.add(Host(numa_id=0))),
        ],
    )
    def test_still_check_their_arguments(self, make, buf, error, bad):
        with pytest.raises(error):
            bad(make(buf))

    def test_a_capturing_stream_is_still_refused(self, stream):
        buffer = managedmem.empty(0)
        with capturing(stream) as capture:
            for call in (
                lambda: buffer.prefetch(Host(), stream=stream),
                lambda: buffer.discard(stream=stream),
                lambda: managedmem.prefetch([buffer, buffer], Host(), stream=stream),
            ):
                with pytest.raises(managedmem.CUDAError, match="captur"):
                    call()
        assert capture.result == 0

    def test_memory_that_operations_otherwise_refuse(self):
        """An empty range of it is accepted."""
        with device_memory(PAGE) as pointer:
            wrapped = ManagedBuffer.from_handle(pointer, PAGE)
            wrapped[:0].prefetch(Host())
            managedmem.discard([wrapped[PAGE:]])


FUNCTIONS = {
    "set_read_mostly": lambda t: managedmem.advise(t, "set_read_mostly"),
    "set_accessed_by": lambda t: managedmem.advise(t, "set_accessed_by", Device(0)),
    "prefetch": lambda t: managedmem.prefetch(t, Device(0)),
    "prefetch by batch": lambda t: managedmem.prefetch(t, Device(0), dispatch="batch"),
    "prefetch by loop": lambda t: managedmem.prefetch(t, Device(0), dispatch="loop", defer=True),
    "discard": managedmem.discard,
    "discard_prefetch": lambda t: managedmem.discard_prefetch(t, Device(0)),
    "policy": lambda t: MigrationPolicy.read_duplicated().apply(t),
}
functions = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


class TestTargets:
    @targets
    @functions
    def test_alone_and_several(self, make, function, buf, nothing_called):
        target = make(buf)
        function(target)
        function([target])
        function([target] * 20)

    @functions
    @pytest.mark.parametrize("place", [0, 1, 2, 5])
    def test_between_others(self, function, place, buf, device0):
        """The calls for the others are the same as without it, in every order."""
        write(buf, pattern(buf.size))
        parts = [buf[i * PAGE : (i + 1) * PAGE] for i in (6, 0, 2, 3, 9)]
        for count, make in itertools.product((1, 5), TARGETS.values()):
            mixed = parts[:count]
            mixed.insert(place, make(buf))
            function(mixed)
        done = [part.page_runs()[0][2:] for part in parts]
        assert len(set(done)) == 1
        assert done[0] != (False, None, frozenset(), None) or function is managedmem.discard
        untouched = (False, None, frozenset(), None)
        for i in (1, 4, 5, 7, 8, 10):
            assert buf[i * PAGE : (i + 1) * PAGE].page_runs()[0][2:] == untouched

    def test_each_has_its_location(self, buf, device0):
        targets = [buf[:0], buf[:PAGE], b"", buf[PAGE : 2 * PAGE]]
        managedmem.prefetch(targets, [device0, Host(), Host(), device0])
        assert buf[:PAGE].last_prefetch_location is Host()
        assert buf[PAGE : 2 * PAGE].last_prefetch_location is device0
        with pytest.raises(ValueError, match="length"):
            managedmem.prefetch(targets, [device0] * 2)

    def test_too_small_for_a_discard_is_named_by_its_place(self, buf):
        with pytest.raises(ValueError, match=r"target 1"):
            managedmem.discard([buf[:0], buf[:5]])

    @pytest.mark.parametrize("place", range(4))
    def test_among_targets_that_share_a_page(self, place, buf, device0):
        """Where the order counts, each range goes behind its own edges: none may be mixed up."""
        data = write(buf, pattern(buf.size))
        mixed = [(buf[: 2 * PAGE + 100], device0), (buf[2 * PAGE + 50 : 4 * PAGE], Host())]
        mixed.append((buf[6 * PAGE + 1 : 8 * PAGE], device0))
        mixed.insert(place, (buf[9 * PAGE + 7 :][:0], Host()))
        for plan in (False, True):
            buf.prefetch(Host())
            if plan:
                PrefetchPlan(mixed).discard_prefetch()
            else:
                managedmem.discard_prefetch(*map(list, zip(*mixed, strict=True)))
            device0.sync()
            placed = [buf[i * PAGE :][:PAGE].last_prefetch_location for i in range(9)]
            assert placed[:4] == [device0, device0, Host(), Host()]
            assert placed[6:] == [device0, device0, Host()]
            seen = contents(buf)
            assert seen[2 * PAGE : 3 * PAGE] == data[2 * PAGE : 3 * PAGE]
            assert seen[6 * PAGE : 7 * PAGE] == data[6 * PAGE : 7 * PAGE]
            assert seen[9 * PAGE :] == data[9 * PAGE :]

    def test_one_that_is_closed_is_refused(self, buf):
        closed = managedmem.empty(0)
        closed.close()
        for function in FUNCTIONS.values():
            with pytest.raises(RuntimeError, match="closed"):
                function([buf, closed])

    @functions
    def test_numpys(self, function, buf, nothing_called):
        numpy = pytest.importorskip("numpy", reason="needs NumPy")
        function(numpy.asarray(buf)[:0])
        function([numpy.zeros((0, 3)), numpy.zeros((3, 4))[:, :0]])
        gc.collect()


class TestPolicies:
    @targets
    def test_applied_and_taken_back(self, make, buf):
        policy = MigrationPolicy(preferred_location=Host(), read_mostly=True)
        with policy.applied(make(buf)):
            pass
        with policy.applied([buf[:PAGE], make(buf)]):
            assert buf[:PAGE].read_mostly is True
        assert buf[:PAGE].read_mostly is False
        gc.collect()

    @targets
    def test_of_it_is_the_default(self, make, buf):
        assert MigrationPolicy.of(make(buf)) == MigrationPolicy()
        buf[:PAGE].read_mostly = True
        assert MigrationPolicy.of([make(buf), buf[:PAGE]]).read_mostly is True
        gc.collect()


class TestPlans:
    @targets
    def test_executes_the_rest(self, make, buf, device0, stream):
        plan = PrefetchPlan([(make(buf), device0), (buf[:PAGE], device0), (make(buf), Host())])
        assert [entry.nbytes for entry in plan] == [0, PAGE, 0]
        assert plan.nbytes == PAGE
        assert "1 driver call" in plan.explain()
        for options in ({}, {"stream": stream, "dispatch": "batch"}):
            plan.execute(**options)
        assert buf[:PAGE].last_prefetch_location is device0
        plan.discard_prefetch()
        plan.clear()
        gc.collect()

    @targets
    def test_of_nothing_else(self, make, buf, device0, stream, nothing_called):
        plan = PrefetchPlan([(make(buf), device0)] * 3)
        for options in ({}, {"stream": stream, "defer": True}, {"dispatch": "loop"}):
            plan.execute(**options)
            plan.discard_prefetch(**options)
            assert plan.explain(**options).startswith("0 driver calls for 3 entries")
        plan.clear()
        gc.collect()

    def test_a_part_of_a_target(self, buf, device0, nothing_called):
        plan = PrefetchPlan().add(buf, device0, offset=buf.size).add(buf, device0, nbytes=0)
        assert [(e.pointer - buf.handle, e.nbytes) for e in plan] == [(buf.size, 0), (0, 0)]
        plan.execute()

    def test_a_closed_buffer_is_refused(self, buf, device0):
        empty, view = managedmem.empty(0), buf[:0]
        for target in (empty, view):
            plan = PrefetchPlan([(buf[:PAGE], device0), (target, device0)])
            target.close()
            with pytest.raises(RuntimeError, match="entry 1: ManagedBuffer is closed"):
                plan.execute()

    def test_takes_nothing_of_a_budget(self, buf, device0):
        plan = PrefetchPlan.fit([buf[5:5], buf[:PAGE], buf[PAGE:]], device0, budget=PAGE)
        assert [entry.location for entry in plan] == [device0, device0, Host()]


class TestExports:
    @buffers
    def test_the_buffer_protocol(self, make, buf):
        buffer = make(buf)
        with memoryview(buffer) as shown:
            assert (shown.shape, shown.nbytes, shown.ndim) == (buffer.shape, 0, buffer.ndim)
            assert bytes(shown) == b""
        assert bytes(buffer) == b""

    @buffers
    def test_numpy(self, make, buf, stream):
        numpy = pytest.importorskip("numpy", reason="needs NumPy")
        buffer = make(buf)
        for array in (
            numpy.asarray(buffer),
            buffer.numpy(),
            buffer.numpy(stream),
            numpy.from_dlpack(buffer),
            numpy.asfortranarray(buffer),
        ):
            assert (array.shape, array.dtype) == (buffer.shape, numpy.dtype(buffer.dtype))
        del array
        gc.collect()
        buffer.close()

    @buffers
    def test_counted_as_others(self, make, buf):
        buffer = make(buf)
        shown = memoryview(buffer)
        with pytest.raises(BufferError):
            buffer.close()
        shown.release()
        buffer.close()

    @buffers
    def test_dlpack_and_array_interface_have_a_null_pointer(self, make, buf):
        """As both specifications ask for."""
        from dlpack import capsule_struct

        buffer = make(buf)
        interface = buffer.__cuda_array_interface__
        assert (interface["data"], interface["shape"]) == ((0, False), buffer.shape)
        for version in (None, (1, 0)):
            capsule = buffer.__dlpack__(max_version=version)
            tensor = capsule_struct(capsule).tensor
            assert (tensor.data, tensor.ndim) == (None, buffer.ndim)
            assert tuple(tensor.shape[: buffer.ndim]) == buffer.shape
            del tensor, capsule
        assert buffer.__dlpack_device__() == (13, 0)
        gc.collect()


def test_of_a_pool(stream):
    with ManagedMemoryResource(pooled=True) as resource:
        buffer = resource.allocate(0, stream=stream)
        buffer.fill(1, stream=stream)
        assert contents(buffer) == b""
        with buffer.copy_to(stream=stream) as copy:
            assert copy.size == 0
        buffer.close(stream)


def test_on_a_driver_without_batch_calls():
    run_python(
        """
        import managedmem as mm
        from outcomes import refusal
        empty = mm.empty(0)
        mm.prefetch([empty, empty], mm.Host())
        for call in (empty.discard, lambda: mm.discard([empty, empty])):
            refusal(NotImplementedError, call)
        """,
        emulator="driver=12020",
    )
