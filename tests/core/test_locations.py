"""Host and Device: identity, immutability, pickling, what a device tells about itself."""

import copy
import operator
import pickle
import weakref

import pytest

import managedmem
from foreign_objects import (
    bindings_object,
    cupy_device,
    foreign,
    jax_device,
    numba_device,
    torch_device,
)
from identifiers import label
from managedmem import Device, Host
from programs import run_python
from threads import at_once

HOSTS = ["Host()", "Host(numa_id=0)", "Host(numa_id=1)", "Host.numa_current()"]
LOCATIONS = [*HOSTS, "Device(0)"]


def build(text):
    return eval(text, {"Host": Host, "Device": Device})


@pytest.mark.parametrize("text", LOCATIONS)
class TestEveryLocation:
    def test_is_interned(self, text):
        assert build(text) is build(text)

    def test_repr_round_trips(self, text):
        assert repr(build(text)) == text

    def test_is_the_same_object_in_another_thread(self, text):
        assert at_once(lambda: build(text))[0] is build(text)

    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_pickles_to_itself(self, text, protocol):
        location = build(text)
        assert pickle.loads(pickle.dumps(location, protocol)) is location

    def test_copies_are_itself(self, text):
        location = build(text)
        assert copy.copy(location) is location
        assert copy.deepcopy([location])[0] is location

    def test_can_be_referenced_weakly(self, text):
        location = build(text)
        assert weakref.ref(location)() is location

    def test_hashes_and_equals_like_itself_only(self, text):
        location = build(text)
        others = [build(other) for other in LOCATIONS if other != text]
        assert hash(location) == hash(build(text))
        assert location == build(text)
        assert all(location != other for other in others)
        assert location not in set(others)

    @pytest.mark.parametrize("other", [0, -1, None, "Host()", (), object()], ids=label)
    def test_differs_from_what_is_no_location(self, text, other):
        assert build(text) != other

    @pytest.mark.parametrize("attribute", ["numa_id", "device_id", "is_numa_current", "colour"])
    def test_cannot_be_changed(self, text, attribute):
        location = build(text)
        with pytest.raises(AttributeError):
            setattr(location, attribute, 1)
        assert repr(location) == text

    def test_has_no_order(self, text):
        with pytest.raises(TypeError):
            operator.lt(build(text), build("Host()"))


def test_the_classes_are_public():
    assert {"Host", "Device"} <= set(managedmem.__all__)


class TestHost:
    @pytest.mark.parametrize(
        ("text", "numa_id", "current"),
        [
            ("Host()", None, False),
            ("Host(numa_id=0)", 0, False),
            ("Host(numa_id=1)", 1, False),
            ("Host.numa_current()", None, True),
        ],
    )
    def test_says_what_it_names(self, text, numa_id, current):
        host = build(text)
        assert host.numa_id == numa_id
        assert host.is_numa_current is current

    def test_takes_its_node_by_position_or_name(self):
        assert Host(3) is Host(numa_id=3)
        assert Host(None) is Host()

    def test_numa_current_has_two_spellings(self):
        assert Host(is_numa_current=True) is Host.numa_current()
        assert Host(is_numa_current=False) is Host()

    @pytest.mark.parametrize("numa_id", [0, 1])
    def test_a_node_and_the_current_node_exclude_each_other(self, numa_id):
        with pytest.raises(ValueError, match=r"numa_current|numa_id"):
            Host(numa_id, is_numa_current=True)

    def test_is_numa_current_is_keyword_only(self):
        with pytest.raises(TypeError):
            Host(None, True)

    def test_many_nodes_from_many_threads_are_the_same_objects(self):
        first, *others = at_once(*[lambda: [Host(node) for node in range(200)]] * 8)
        for other in others:
            assert all(a is b for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("bad", [True, False, -1, 1.0, 0.5, "0", "", b"0", 2**31, 2**80], ids=label)
@pytest.mark.parametrize("cls", [Host, Device], ids=["Host", "Device"])
def test_a_bad_id_is_a_value_error(cls, bad):
    with pytest.raises(ValueError):
        cls(bad)


def cuda_core_host(numa_id=None, current=False):
    return foreign("cuda.core", "Host", numa_id=numa_id, is_numa_current=current)


class TestOfALocation:
    """Device() and Host() accept device and host objects."""

    @pytest.mark.parametrize("text", HOSTS)
    def test_a_host_of_a_host_is_that_host(self, text):
        assert Host(build(text)) is build(text)
        assert Host(numa_id=build(text)) is build(text)

    def test_a_device_of_a_device_is_that_device(self):
        for device in Device.all():
            assert Device(device) is device
            assert Device(device_id=device) is device

    @pytest.mark.parametrize(
        "make",
        [
            lambda n: torch_device("cuda", n),
            cupy_device,
            numba_device,
            lambda n: jax_device("gpu", n),
            lambda n: bindings_object("CUdevice", n),
            lambda n: foreign("cuda.core", "Device", device_id=n),
        ],
        ids=["torch", "cupy", "numba", "jax", "CUdevice", "cuda.core"],
    )
    def test_devices_of_other_libraries(self, make):
        for device in Device.all():
            assert Device(make(device.device_id)) is device
        with pytest.raises(ValueError, match=rf"\b{Device.count()}\b"):
            Device(make(Device.count()))
        with pytest.raises(ValueError, match="numa_id must be an int or a host"):
            Host(make(0))

    @pytest.mark.parametrize(
        ("module", "attributes"),
        [
            ("torch", {"type": "cuda", "index": 0}),
            ("cuda.core", {"device_id": 0}),
            ("cupy.cuda.device", {"id": 0}),
            ("numba.cuda.cudadrv.driver", {"id": 0}),
            ("jaxlib._jax", {"platform": "gpu", "local_hardware_id": 0}),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_the_module_of_a_class_is_read_once(self, module, attributes):
        """Not once for each library that it could be from."""
        reads = []

        class Counting(type):
            def __getattribute__(cls, name):
                reads.append(name)
                return super().__getattribute__(name)

        device = Counting("Device", (), {"__module__": module, **attributes})()
        reads.clear()
        assert Device(device) is Device(0)
        assert reads.count("__module__") == 1

    def test_a_class_that_derives_from_a_known_one(self):
        """CUdevice is known by its name, as CUstream is, so it may be a base defined elsewhere."""
        base = type(bindings_object("CUdevice", 0))
        assert Device(type("Mine", (base,), {})()) is Device(0)

    def test_torch_cuda_without_an_index_is_the_current_device(self, current_device):
        for device in Device.all():
            device.set_current()
            assert Device(torch_device("cuda")) is device

    def test_hosts_of_other_libraries(self):
        assert Host(torch_device("cpu")) is Host()
        assert Host(jax_device("cpu", 0)) is Host()
        assert Host(cuda_core_host()) is Host()
        assert Host(cuda_core_host(1)) is Host(1)
        assert Host(cuda_core_host(current=True)) is Host.numa_current()

    @pytest.mark.parametrize("node", [-1, 1 << 31, (1 << 32) + 1, 1 - (1 << 32), 1 << 63], ids=str)
    def test_a_foreign_number_that_no_node_has(self, buf, node):
        """Cut to 32 bits it would be another node, or another kind of location."""
        with pytest.raises(ValueError, match="numa_id"):
            buf.prefetch(cuda_core_host(node))
        with pytest.raises(ValueError, match="numa_id"):
            Host(cuda_core_host(node))

    @pytest.mark.parametrize(
        "host", [Host(), torch_device("cpu"), cuda_core_host(1)], ids=["own", "torch", "cuda.core"]
    )
    def test_a_host_is_not_a_device(self, host):
        with pytest.raises(ValueError, match="device_id must be an int or a device, got"):
            Device(host)

    @pytest.mark.parametrize(
        "bad", [torch_device("meta"), object(), [], torch_device("cuda", "0")], ids=label
    )
    @pytest.mark.parametrize("cls", [Host, Device], ids=["Host", "Device"])
    def test_objects_that_are_neither(self, cls, bad):
        with pytest.raises(ValueError, match="must be an int or a"):
            cls(bad)

    @pytest.mark.parametrize("call", [Device, managedmem.capabilities])
    def test_a_name_of_a_device_is_told_what_to_pass(self, call):
        with pytest.raises(ValueError, match=r"got 'cuda:0': pass 0 or a torch\.device$"):
            call("cuda:0")

    def test_a_host_excludes_the_current_node_too(self):
        with pytest.raises(ValueError, match="exclude"):
            Host(Host(), is_numa_current=True)

    def test_an_exception_of_the_object_is_passed_on(self):
        class Broken:
            __module__ = "cupy.cuda.device"

            @property
            def id(self):
                raise LookupError("from the device")

        with pytest.raises(LookupError, match="from the device"):
            Device(Broken())

    def test_hosts_need_no_driver(self):
        run_python(
            "from managedmem import Host; assert Host(Host(1)) is Host(1)",
            driver="/nowhere/libcuda.so.1",
        )


class TestDevice:
    def test_all_lists_every_device_in_order(self):
        devices = Device.all()
        assert isinstance(devices, tuple)
        assert [d.device_id for d in devices] == list(range(Device.count()))
        assert all(d is Device(d.device_id) for d in devices)
        assert Device.count() >= 1

    def test_one_too_many_is_a_value_error_that_names_the_count(self):
        count = Device.count()
        with pytest.raises(ValueError, match=rf"\b{count}\b"):
            Device(count)

    def test_without_an_id_is_the_current_one(self, current_device):
        for device in Device.all():
            device.set_current()
            assert Device() is device
            assert Device(None) is device

    def test_set_current_counts_for_the_calling_thread_only(self, current_device, device1):
        Device(0).set_current()
        at_once(device1.set_current)
        assert Device() is Device(0)

    def test_a_fresh_thread_has_a_device(self):
        assert at_once(Device) == [Device(0)]

    def test_sync_gives_nothing(self, device0):
        assert device0.sync() is None

    def test_sync_leaves_the_current_device(self, current_device, device1):
        Device(0).set_current()
        device1.sync()
        assert Device() is Device(0)

    @pytest.mark.parametrize(
        "name",
        [
            "concurrent_managed_access",
            "pageable_memory_access",
            "pageable_memory_access_uses_host_page_tables",
            "direct_managed_mem_access_from_host",
            "memory_pools_supported",
        ],
    )
    def test_abilities_are_bools(self, device0, name):
        assert isinstance(getattr(device0, name), bool)

    def test_host_numa_id_is_a_node_or_minus_one(self, device0):
        assert type(device0.host_numa_id) is int
        assert device0.host_numa_id >= -1

    def test_has_a_name(self, device0):
        assert isinstance(device0.name, str)
        assert device0.name

    def test_uuids_tell_devices_apart(self):
        uuids = [d.uuid for d in Device.all()]
        assert all(isinstance(u, str) and len(u.replace("-", "")) >= 32 for u in uuids)
        assert len(set(uuids)) == Device.count()

    @pytest.mark.emulator_only
    def test_integrated_devices_share_the_memory_of_the_host(self):
        run_python(
            """
            import re
            import managedmem as mm
            from managedmem import Device, Host, emulator

            def available():
                text = open("/proc/meminfo").read()
                return int(re.search(r"MemAvailable: +([0-9]+) kB", text)[1]) * 1024

            device = Device(0)
            assert device.integrated
            free, total = device.memory_info
            assert free == min(total, available()) or abs(free - available()) < 256 << 20
            assert free > total // 2  # which is what the driver says
            buf = mm.empty(1 << 20, name="buf")
            memoryview(buf)[:] = b"1" * buf.size
            buf.read_mostly = True
            emulator.clear_counters()
            buf.prefetch(device)
            buf.discard()
            emulator.touch(buf, device)
            device.sync()
            assert bytes(buf[:4]) == b"1111"
            assert buf.residency().on_host == buf.size
            counted = emulator.counters()
            assert (counted.bytes_htod, counted.bytes_dtoh, counted.gpu_faults) == (0, 0, 0)
            """,
            emulator="integrated=1",
        )

    def test_the_nearest_host_has_the_node_of_the_device(self, device0):
        nearest = device0.nearest_host
        assert nearest in (Host(), Host(device0.host_numa_id))
        with managedmem.empty(1 << 16) as buffer:
            buffer.preferred_location = nearest
            assert buffer.preferred_location in (nearest, None)  # a driver with one node forgets

    @pytest.mark.emulator_only
    @pytest.mark.parametrize(
        "system, hosts",
        [("numa_nodes=1", "Host(), Host()"), ("numa_nodes=2", "Host(numa_id=0), Host(numa_id=1)")],
    )
    def test_one_node_is_the_host(self, system, hosts):
        done = run_python(
            """
            from managedmem import Device
            print(*(device.nearest_host for device in Device.all()), sep=", ")
            """,
            emulator=f"devices=2,{system}",
        )
        assert done.stdout.strip() == hosts

    def test_memory_info_has_free_and_total(self, device0):
        info = device0.memory_info
        assert 0 < info.free <= info.total
        assert tuple(info) == (info.free, info.total)
        assert type(info).__name__ == "MemoryInfo"


@pytest.mark.emulator_only
def test_the_default_emulator_is_a_capable_machine():
    """In a process of its own, because this one may have been given another configuration."""
    run_python("""
        from managedmem import Device
        assert Device.count() == 2
        for device in Device.all():
            assert device.concurrent_managed_access is True
            assert device.pageable_memory_access is False
            assert device.memory_info.total >= 1 << 30
    """)


def test_a_real_torch_device_without_an_index(current_device):
    """torch itself asks CUDA for the current device, without which its own answer is unknown."""
    torch = pytest.importorskip("torch", reason="needs torch")
    for device in Device.all():
        device.set_current()
        assert Device(torch.device("cuda")) is device
        assert managedmem.Device(torch.device("cuda", 0)) is Device(0)
    with managedmem.empty(4096) as buffer:
        buffer.preferred_location = torch.device("cuda")
        assert buffer.preferred_location is Device.all()[-1]
        buffer.prefetch(torch.device("cuda"))
        assert buffer.last_prefetch_location is Device.all()[-1]


def test_the_largest_numa_node():
    largest = (1 << 31) - 1
    assert Host(largest).numa_id == largest
    assert repr(Host(largest)) == f"Host(numa_id={largest})"


@pytest.mark.parametrize(
    "call", [lambda: Device(0, 1), lambda: Device(ordinal=0), lambda: Device(0, device_id=0)]
)
def test_arguments_that_a_device_does_not_take(call):
    with pytest.raises(TypeError, match=r"Device\(\)"):
        call()
