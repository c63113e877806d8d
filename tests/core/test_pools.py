"""Memory from driver pools: managed and a device's own; streams, numbers, names, refusals."""

import gc
import weakref
from types import SimpleNamespace

import pytest

import managedmem
from calls import names
from constants import ADVICES, MIB, PAGE
from contents import contents, pattern, write
from dlpack import consume, run_deleter
from identifiers import label
from managedmem import Device, DeviceMemoryResource, Host, ManagedMemoryResource, Stream, emulator
from pools import KINDS, needs_pools, read
from programs import run_python

KEEP_ALL = 2**64 - 1
pytestmark = needs_pools


class TestMaking:
    def test_what_a_pool_of_managed_memory_says(self):
        with ManagedMemoryResource(pooled=True, preferred_location=Device(0)) as pool:
            assert pool.is_managed is True
            assert pool.supports_advice is False
            assert pool.is_host_accessible is True
            assert pool.is_device_accessible is True
            assert pool.preferred_location is Device(0)
            assert pool.device_id == 0
            assert repr(pool) == (
                "ManagedMemoryResource(pooled=True, preferred_location=Device(0))"
            )

    def test_what_a_resource_without_a_pool_says(self):
        resource = ManagedMemoryResource()
        assert resource.supports_advice is True
        assert resource.preferred_location is None
        for use in (lambda: resource.attributes, resource.trim):
            with pytest.raises(RuntimeError, match="pooled=True"):
                use()

    def test_what_a_pool_of_a_device_says(self, device0):
        with DeviceMemoryResource(device0) as pool:
            assert pool.is_managed is False
            assert pool.supports_advice is False
            assert pool.is_host_accessible is False
            assert pool.is_device_accessible is True
            assert pool.device_id == 0
            assert repr(pool) == "DeviceMemoryResource(Device(0))"

    @pytest.mark.parametrize("place", [Device(0), Host(), Host(0)], ids=label)
    def test_preferred_locations(self, place):
        with ManagedMemoryResource(pooled=True, preferred_location=place) as pool:
            assert pool.preferred_location is place
            with pool.allocate(PAGE) as buffer:
                write(buffer, 3)
                assert contents(buffer) == b"\x03" * PAGE

    @pytest.mark.parametrize("last", [False, True])
    def test_devices_by_object_and_by_ordinal(self, last):
        device = Device.all()[-1 if last else 0]
        for name in (device, device.device_id):
            with DeviceMemoryResource(name) as pool, pool.allocate(PAGE) as buffer:
                assert pool.device_id == buffer.device_id == device.device_id

    @pytest.mark.parametrize("bad", [1, None, "yes", 0], ids=label)
    def test_pooled_is_a_bool(self, bad):
        with pytest.raises(TypeError, match="pooled"):
            ManagedMemoryResource(pooled=bad)

    @pytest.mark.parametrize("bad", [0, "cpu", object()], ids=label)
    def test_preferred_location_is_a_location(self, bad):
        with pytest.raises(TypeError, match="Device or Host"):
            ManagedMemoryResource(pooled=True, preferred_location=bad)

    @pytest.mark.parametrize("bad", [Host(), Host(0), None, True, "cuda:0", 0.0], ids=label)
    def test_a_device_pool_wants_a_device(self, bad):
        with pytest.raises(
            TypeError, match=r"a Device or its ordinal .*: pass 0, Device\(0\) or a"
        ):
            DeviceMemoryResource(bad)

    @pytest.mark.parametrize("bad", [-1, 63, 1 << 70])
    def test_a_device_that_is_not_there(self, bad):
        with pytest.raises(ValueError, match=r"device"):
            DeviceMemoryResource(bad)

    @pytest.mark.emulator_only
    @pytest.mark.parametrize(
        "options",
        [{"max_size": 64 * MIB}, SimpleNamespace(max_size=64 * MIB, ipc_enabled=False)],
        ids=["dict", "as cuda.core's"],
    )
    def test_the_size_of_a_device_pool_has_a_bound(self, device0, options):
        with DeviceMemoryResource(device0, options) as pool:
            assert pool.max_size == 64 * MIB
            pool.allocate(MIB).close()
            with pytest.raises(managedmem.CUDAOutOfMemoryError, match="a larger max_size"):
                pool.allocate(512 * MIB)
            pool.allocate(MIB).close()
        for unbounded in (None, {}, {"max_size": 0}, {"max_size": None, "ipc_enabled": False}):
            with DeviceMemoryResource(device0, options=unbounded) as pool:
                assert pool.max_size == 0
                pool.allocate(512 * MIB).close()

    def test_the_bound_is_read_back_as_given(self, device0):
        pool = DeviceMemoryResource(device0, {"max_size": MIB + 1})
        assert repr(pool) == f"DeviceMemoryResource(Device(0), {{'max_size': {MIB + 1}}})"
        with eval(repr(pool), {**vars(managedmem)}) as other:
            assert other.max_size == pool.max_size == MIB + 1
        with pytest.raises(AttributeError):
            pool.max_size = 0
        pool.close()
        assert pool.max_size == MIB + 1

    @pytest.mark.parametrize(
        "options, error",
        [
            ({"max_size": -1}, ValueError),
            ({"max_size": 1.5}, TypeError),
            ({"size": 1}, TypeError),
            (64 * MIB, TypeError),
            ({"ipc_enabled": 1}, TypeError),
            ({"ipc_enabled": True}, managedmem.IPCNotSupportedError),
        ],
        ids=repr,
    )
    def test_options_that_are_none(self, device0, options, error):
        with pytest.raises(error, match=r"max_size|ipc_enabled"):
            DeviceMemoryResource(device0, options)

    def test_an_old_driver_is_named_with_the_one_needed(self):
        done = run_python(
            """
            from managedmem import Device, DeviceMemoryResource, ManagedMemoryResource
            from outcomes import refusal
            print(refusal(NotImplementedError, lambda: ManagedMemoryResource(pooled=True)))
            with DeviceMemoryResource(Device(0)) as pool, pool.allocate(4096) as buffer:
                buffer.fill(1)
            """,
            emulator="driver=12020",
        )
        assert "13.0" in done.stdout
        assert "12.2" in done.stdout

    @pytest.mark.emulator_only
    def test_a_device_without_pools_says_what_is_missing(self):
        emulator.fail("cuMemPoolCreate", code=801)
        with pytest.raises(managedmem.CUDAError, match="memory_pools_supported"):
            DeviceMemoryResource(0)

    def test_managed_pools_need_concurrent_access(self):
        run_python(
            """
            from managedmem import Device, DeviceMemoryResource, ManagedMemoryResource, emulator
            from outcomes import refusal
            for place in (None, Device(0)):
                make = lambda: ManagedMemoryResource(pooled=True, preferred_location=place)
                with emulator.recording() as calls:
                    text = refusal(NotImplementedError, make)
                assert "concurrent_managed_access of every device" in text
                assert not [call for call in calls if call.name == "cuMemPoolCreate"]
            with DeviceMemoryResource(Device(0)) as pool, pool.allocate(4096) as buffer:
                buffer.fill(1)
            """,
            emulator="profile=wsl",
        )

    @pytest.mark.emulator_only
    def test_the_default_pools_are_left_alone(self):
        with emulator.recording() as calls:
            for make in KINDS.values():
                with make() as pool, pool.allocate(PAGE):
                    pass
        assert not [c for c in calls if "DefaultMemPool" in c.name or "SetMemPool" in c.name]
        made = {c.args["pool"] for c in calls if c.name == "cuMemPoolCreate"}
        used = {c.args["pool"] for c in calls if "pool" in c.args}
        assert used == made


class TestAllocating:
    @pytest.mark.parametrize("size", [1, 100, PAGE, PAGE + 1, MIB])
    def test_memory_holds_what_is_put_there(self, pool, size):
        with pool.allocate(size) as buffer:
            assert (buffer.size, buffer.dtype, buffer.shape) == (size, "uint8", (size,))
            assert buffer.memory_resource is pool
            buffer.copy_from(pattern(size))
            assert read(buffer) == pattern(size)

    def test_on_a_stream(self, pool, stream):
        buffer = pool.allocate(PAGE, stream=stream)
        buffer.fill(b"\x01\x02", stream=stream)
        assert read(buffer, stream) == b"\x01\x02" * (PAGE // 2)
        buffer.close(stream)
        assert buffer.is_closed

    def test_views_share_the_memory(self, pool):
        with pool.allocate(4 * PAGE) as buffer:
            buffer.fill(0)
            buffer[PAGE : 2 * PAGE].view("float32").fill(7)
            assert read(buffer) == bytes(PAGE) + b"\x07" * PAGE + bytes(2 * PAGE)

    def test_buffers_do_not_overlap(self, pool):
        buffers = [pool.allocate(100 + i) for i in range(20)]
        for i, buffer in enumerate(buffers):
            buffer.fill(i)
        assert [read(b) for b in buffers] == [bytes([i]) * (100 + i) for i in range(20)]
        for buffer in buffers:
            buffer.close()

    def test_managed_buffers_are_on_pages_of_their_own(self, managed_pool):
        buffers = [managed_pool.allocate(100) for _ in range(5)]
        pages = {b.handle // PAGE for b in buffers}
        assert len(pages) == 5
        for buffer in buffers:
            buffer.close()

    def test_freed_memory_is_used_again(self, pool, stream):
        first = pool.allocate(MIB, stream=stream)
        first.close(stream)
        reserved = pool.attributes.reserved_mem_current
        with pool.allocate(MIB, stream=stream):
            assert pool.attributes.reserved_mem_current == reserved

    def test_a_size_below_zero(self, pool):
        with pytest.raises(ValueError, match="0 bytes or more"):
            pool.allocate(-1)

    @pytest.mark.parametrize("bad", ["1", 1.0, None, True], ids=label)
    def test_sizes_are_ints(self, pool, bad):
        with pytest.raises(TypeError):
            pool.allocate(bad)

    @pytest.mark.parametrize("bad", ["s", 1.5, object()], ids=label)
    def test_streams_are_streams(self, pool, bad):
        with pytest.raises(TypeError, match="stream"):
            pool.allocate(PAGE, stream=bad)

    @pytest.mark.emulator_only
    def test_no_memory_left(self, pool):
        emulator.fail("cuMemAllocFromPoolAsync", code=2)
        with pytest.raises(managedmem.CUDAOutOfMemoryError, match=f"{PAGE} bytes"):
            pool.allocate(PAGE)

    @pytest.mark.emulator_only
    def test_an_allocation_is_one_call_and_so_is_a_free(self, pool, stream):
        with emulator.recording() as calls:
            buffer = pool.allocate(PAGE, stream=stream)
            buffer.close(stream)
        wanted = [c for c in calls if c.name in ("cuMemAllocFromPoolAsync", "cuMemFreeAsync")]
        assert names(wanted) == ["cuMemAllocFromPoolAsync", "cuMemFreeAsync"]
        assert {c.args["stream"] for c in wanted} == {stream.handle}

    @pytest.mark.emulator_only
    def test_frees_of_one_stream_share_an_event(self, pool, stream):
        with emulator.recording() as calls:
            for _ in range(5):
                pool.allocate(PAGE, stream=stream).close(stream)
        assert names(calls).count("cuEventCreate") == 1
        assert names(calls).count("cuEventRecord") == 5

    @pytest.mark.emulator_only
    def test_events_of_many_streams_are_given_back(self, pool):
        events = emulator.live().events
        for _ in range(100):
            with Stream() as short:
                pool.allocate(PAGE, stream=short).close(short)
        assert emulator.live().events - events <= 16

    def test_copy_to_nothing_draws_from_the_same_pool(self, pool, stream):
        with pool.allocate(PAGE, stream=stream) as buffer:
            buffer.fill(5, stream=stream)
            with buffer.view("int32", (2, PAGE // 8)).copy_to(stream=stream) as copy:
                assert copy.memory_resource is pool
                assert (copy.dtype, copy.shape) == ("int32", (2, PAGE // 8))
                assert read(copy, stream) == b"\x05" * PAGE


class TestKindsOfMemory:
    def test_managed_memory_is_managed(self, managed_pool, stream):
        with managed_pool.allocate(PAGE) as buffer:
            assert buffer.is_managed is True
            assert buffer.is_host_accessible is True
            assert buffer.is_device_accessible is True
            write(buffer, 9)
            buffer.prefetch(Device(0))
            assert buffer.last_prefetch_location is Device(0)
            buffer.prefetch(Host())
            assert contents(buffer) == b"\x09" * PAGE
            assert buffer.__dlpack_device__() == (13, 0)

    @pytest.mark.parametrize("advice", ADVICES)
    def test_advice_on_a_pool_names_the_memory_and_the_alternative(self, managed_pool, advice):
        location = Device(0) if "location" in advice else Host()
        with managed_pool.allocate(PAGE) as buffer:
            with pytest.raises(managedmem.CUDAError) as caught:
                managedmem.advise([managed_pool.allocate(0), buffer], advice, location)
            assert f"({PAGE} bytes at {buffer.handle:#x})" in str(caught.value)
        assert caught.value.name == "CUDA_ERROR_NOT_SUPPORTED"
        assert "ManagedMemoryResource().allocate()" in str(caught.value)

    def test_properties_refuse_in_the_same_way(self, managed_pool):
        with managed_pool.allocate(PAGE) as buffer:
            for name, value in (
                ("read_mostly", True),
                ("preferred_location", Host()),
                ("accessed_by", [Host()]),
            ):
                with pytest.raises(managedmem.CUDAError, match="takes no advice"):
                    setattr(buffer, name, value)
            assert buffer.read_mostly is False
            assert buffer.preferred_location is None

    def test_memory_of_a_device_does_not_migrate(self, device0):
        with DeviceMemoryResource(device0) as pool, pool.allocate(2 * PAGE) as buffer:
            assert buffer.is_managed is False
            assert buffer.is_host_accessible is False
            assert buffer.is_device_accessible is True
            for use in (
                lambda: buffer.prefetch(Host()),
                buffer.discard,
                lambda: buffer.read_mostly,
                lambda: setattr(buffer, "read_mostly", True),
                lambda: managedmem.prefetch([buffer], device0),
                lambda: managedmem.advise(buffer, "set_read_mostly"),
            ):
                with pytest.raises(ValueError, match="device memory"):
                    use()
            with pytest.raises(BufferError, match="device memory"):
                memoryview(buffer)

    @pytest.mark.parametrize("last", [False, True])
    def test_dlpack_tells_the_device(self, last):
        device = Device.all()[-1 if last else 0]
        with DeviceMemoryResource(device) as pool:
            buffer = pool.allocate(PAGE)
            assert buffer.__dlpack_device__() == (2, device.device_id)
            for version in (None, (1, 0)):
                tensor = consume(buffer.__dlpack__(max_version=version))
                place = tensor.tensor.device
                assert (place.device_type, place.device_id) == (2, device.device_id)
                with pytest.raises(BufferError):
                    buffer.close()
                run_deleter(tensor)
            buffer.close()

    def test_dlpack_goes_nowhere_else(self, device0):
        with DeviceMemoryResource(device0) as pool, pool.allocate(PAGE) as buffer:
            for place in ((1, 0), (13, 0), (2, 7)):
                with pytest.raises(BufferError, match="memory of a device"):
                    buffer.__dlpack__(dl_device=place)
            run_deleter(consume(buffer.__dlpack__(dl_device=(2, 0), copy=True)))

    def test_the_array_interface_has_the_address(self, pool):
        with pool.allocate(PAGE) as buffer:
            assert buffer.__cuda_array_interface__["data"] == (buffer.handle, False)


class TestNumbers:
    def test_a_pool_keeps_what_is_freed(self, pool):
        assert pool.attributes.release_threshold == KEEP_ALL
        pool.allocate(MIB).close()
        Device(0).sync()
        assert pool.attributes.reserved_mem_current >= MIB
        assert pool.attributes.used_mem_current == 0

    def test_used_and_reserved(self, pool):
        numbers = pool.attributes
        assert numbers.used_mem_current == numbers.used_mem_high == 0
        with pool.allocate(MIB):
            assert numbers.used_mem_current == MIB
            assert numbers.reserved_mem_current >= MIB
        Device(0).sync()
        assert numbers.used_mem_current == 0
        assert numbers.used_mem_high == MIB
        assert numbers.reserved_mem_high >= MIB

    def test_trim_gives_memory_back(self, pool):
        pool.allocate(4 * MIB).close()
        Device(0).sync()
        assert pool.trim() is None
        assert pool.attributes.reserved_mem_current == 0

    def test_trim_keeps_what_is_asked_and_what_is_used(self, pool):
        with pool.allocate(MIB) as buffer:
            buffer.copy_from(pattern(MIB))
            pool.trim()
            assert pool.attributes.reserved_mem_current >= MIB
            assert read(buffer) == pattern(MIB)
        Device(0).sync()
        before = pool.attributes.reserved_mem_current
        pool.trim(keep=before)
        assert pool.attributes.reserved_mem_current == before

    def test_the_threshold_can_be_set(self, pool):
        for value in (0, 2 * MIB, KEEP_ALL):
            pool.attributes.release_threshold = value
            assert pool.attributes.release_threshold == value

    @pytest.mark.parametrize("bad", [-1, 2**64])
    def test_thresholds_have_64_bits(self, managed_pool, bad):
        with pytest.raises(ValueError, match="2\\*\\*64"):
            managed_pool.attributes.release_threshold = bad
        assert managed_pool.attributes.release_threshold == KEEP_ALL

    @pytest.mark.parametrize("bad", ["1", 1.0, None, True], ids=label)
    def test_thresholds_are_ints(self, managed_pool, bad):
        with pytest.raises(TypeError, match="int"):
            managed_pool.attributes.release_threshold = bad

    def test_the_rest_is_read_only(self, managed_pool):
        with pytest.raises(AttributeError):
            managed_pool.attributes.used_mem_current = 0
        with pytest.raises(AttributeError):
            del managed_pool.attributes.release_threshold

    @pytest.mark.parametrize("bad", [-1, 1 << 70])
    def test_trim_to_less_than_nothing(self, managed_pool, bad):
        with pytest.raises(ValueError, match="keep"):
            managed_pool.trim(bad)

    def test_trim_takes_ints(self, managed_pool):
        with pytest.raises(TypeError, match="keep"):
            managed_pool.trim("all")

    def test_numbers_keep_their_pool(self):
        numbers = DeviceMemoryResource(0).attributes
        gc.collect()
        assert numbers.used_mem_current == 0
        numbers.release_threshold = 5
        assert numbers.release_threshold == 5

    def test_numbers_of_a_closed_resource(self, pool, stream):
        numbers = pool.attributes
        buffer = pool.allocate(PAGE, stream=stream)
        pool.close()
        assert numbers.used_mem_current >= PAGE
        with pytest.raises(RuntimeError, match="closed"):
            _ = pool.attributes
        buffer.close()
        stream.sync()
        assert numbers.used_mem_current == 0

    @pytest.mark.emulator_only
    def test_the_pool_goes_with_its_numbers(self):
        resource = DeviceMemoryResource(0)
        numbers = resource.attributes
        with emulator.recording() as calls:
            resource.close()
        assert "cuMemPoolDestroy" not in names(calls)
        with emulator.recording() as calls:
            del numbers
        assert "cuMemPoolDestroy" in names(calls)

    def test_repr_shows_the_values(self, pool):
        numbers = pool.attributes
        numbers.release_threshold = 12345
        fields = dict(part.split("=") for part in repr(numbers).strip("<>").split()[1:])
        assert fields == {name: str(getattr(numbers, name)) for name in fields}
        assert fields["release_threshold"] == "12345"
        assert len(fields) == 5

    @pytest.mark.emulator_only
    def test_repr_of_a_pool_that_cannot_be_queried(self, pool):
        emulator.fail("cuMemPoolGetAttribute", code=719)
        assert repr(pool.attributes) == "<PoolAttributes of a pool that cannot be queried>"


class TestNamesOfCudaCore:
    """Properties that cuda.core's resources have."""

    def test_a_pool(self, pool):
        assert isinstance(pool.handle, int)
        assert pool.handle != 0
        assert pool.is_handle_owned is True
        pool.close()
        assert pool.handle == 0
        assert pool.is_handle_owned is False

    @pytest.mark.emulator_only
    def test_the_handle_is_the_driver_s(self, pool):
        with emulator.recording() as calls:
            pool.trim()
        (trim,) = [call for call in calls if call.name == "cuMemPoolTrimTo"]
        assert trim.args["pool"] == pool.handle

    def test_no_pool(self):
        resource = ManagedMemoryResource()
        assert resource.handle == 0
        assert resource.is_handle_owned is False

    @pytest.mark.parametrize("make", [ManagedMemoryResource, lambda: DeviceMemoryResource(0)])
    def test_no_sharing(self, make):
        resource = make()
        assert resource.is_ipc_enabled is False
        assert resource.is_mapped is False
        assert resource.uuid is None

    @pytest.mark.parametrize("make", [ManagedMemoryResource, lambda: DeviceMemoryResource(0)])
    def test_weak_references(self, make):
        resource = make()
        fired = []
        reference = weakref.ref(resource, fired.append)
        buffer = resource.allocate(PAGE)
        del resource
        assert reference() is buffer.memory_resource
        buffer.close()
        gc.collect()
        assert reference() is None
        assert fired == [reference]


@pytest.mark.parametrize("preferred", [None, 0, 1])
def test_the_device_of_a_managed_pool_is_the_preferred_one(preferred, device1, current_device):
    for current in Device.all()[:2]:
        current.set_current()
        place = None if preferred is None else Device(preferred)
        with ManagedMemoryResource(pooled=True, preferred_location=place) as pool:
            expected = current.device_id if preferred is None else preferred
            assert pool.device_id == expected


@pytest.mark.emulator_only
def test_managed_pool_memory_is_known_from_the_start(managed_pool, device0):
    """The driver is not asked what it is: the allocation said so."""
    buffer = managed_pool.allocate(PAGE)
    with emulator.recording() as calls:
        buffer.prefetch(device0)
    assert "cuPointerGetAttributes" not in names(calls)
    buffer.close()
