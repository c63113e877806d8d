"""residency() on drivers that say where pages are, which CUDA 13.4 is the first to do."""

from struct import Struct

import pytest

from driver import CAPTURE_GLOBAL, CAPTURE_RELAXED
from managedmem import Device, _capabilities
from managedmem._residency import make
from programs import run_python

pytestmark = pytest.mark.emulator_only

PRELUDE = """
import ctypes, pickle
import managedmem
from constants import MIB, PAGE
from managedmem import Device, Host, ManagedBuffer, emulator
from residencies import DRIVER, HOST, MAP, NOWHERE, OFF, load, residency, store
D0, D1 = "Device(0)", "Device(1)"
"""


def run(code, options=""):
    """What the code prints on an emulated driver of CUDA 13.4."""
    lines = [line.removeprefix(" " * 8) for line in code.splitlines()]
    return run_python(
        PRELUDE + "\n".join(lines), emulator=f"driver=13040,schedule=eager,{options}".rstrip(",")
    ).stdout


def test_each_page_has_its_place():
    run(
        """
        buffer = managedmem.empty(8 * MIB)
        assert residency(buffer).runs == ((0, 8 * MIB, NOWHERE, DRIVER, None),)
        store(buffer.range(0, 4 * MIB))
        buffer.range(MIB, MIB).prefetch(Device(0))
        buffer.range(2 * MIB, MIB).prefetch(Device(1))
        found = residency(buffer)
        assert found.runs == (
            (0, MIB, HOST, MAP, None),
            (MIB, MIB, D0, DRIVER, None),
            (2 * MIB, MIB, D1, DRIVER, None),
            (3 * MIB, MIB, HOST, MAP, None),
            (4 * MIB, 4 * MIB, NOWHERE, DRIVER, None),
        )
        assert [run.device for run in found.runs] == [None, Device(0), Device(1), None, None]
        assert found.devices == {Device(0): MIB, Device(1): MIB} and found.nowhere == 4 * MIB
        assert (found.on_host, found.not_on_host, found.last_asked_to) == (2 * MIB, 6 * MIB, {})
        part = residency(buffer.range(MIB - 3, MIB + 5))
        assert [run[1:4] for run in part.runs] == [
            (3, HOST, MAP), (MIB, D0, DRIVER), (2, D1, DRIVER)
        ]
        assert residency(buffer.range(MIB + 7, 9)).runs == ((0, 9, D0, DRIVER, None),)
        assert residency(buffer[3:3]).runs == ()
        again = pickle.loads(pickle.dumps(found))
        assert (again.runs, again.devices) == (found.runs, found.devices)
        """,
        "devices=3",
    )


def test_pages_move_without_a_prefetch():
    """The last prefetch was to the host, then a device took half."""
    run("""
        buffer = managedmem.empty(2 * MIB)
        store(buffer)
        buffer.prefetch(Host())
        emulator.touch(buffer.range(0, MIB), Device(1), write=True)
        assert [run.where for run in residency(buffer).runs] == [D1, HOST]
        load(buffer)
        assert residency(buffer).runs == ((0, 2 * MIB, HOST, MAP, None),)
    """)


def test_evicted_pages_are_on_the_host_unmapped():
    run(
        """
        rows = managedmem.empty((4, 8 * MIB))
        for row in rows:
            store(row)
            row.prefetch(Device(0))
        found = [residency(row) for row in rows]
        assert [f.runs for f in found] == [((0, 8 * MIB, HOST, DRIVER, None),)] * 2 + [
            ((0, 8 * MIB, D0, DRIVER, None),)
        ] * 2
        assert found[0].on_host == 8 * MIB and found[0].devices == {}
        """,
        "capacity_mib=16",
    )


def test_copies_on_the_host_count():
    run("""
        buffer = managedmem.empty(MIB)
        store(buffer)
        buffer.read_mostly = True
        buffer.prefetch(Device(0))
        found = residency(buffer)
        assert found.runs == ((0, MIB, HOST, MAP, None),) and found.devices == {}
    """)


@pytest.mark.parametrize("host", ["Host()", "Host(numa_id=1)"])
def test_nodes_of_the_host(host):
    run(f"""
        buffer = managedmem.empty(MIB)
        buffer.preferred_location = {host}
        buffer.accessed_by.add(Device(0))
        emulator.touch(buffer, Device(0), write=True)  # on the host, which has not mapped it
        assert residency(buffer).runs == ((0, MIB, HOST, DRIVER, None),)
    """)


def test_memory_of_pools_and_of_other_contexts():
    run("""
        with managedmem.ManagedMemoryResource(pooled=True) as pool, pool.allocate(MIB) as block:
            block.prefetch(Device(1))
            Device(1).sync()
            assert residency(block).devices == {Device(1): MIB}
            wrapped = ManagedBuffer.from_handle(block.handle + 5, PAGE)
            assert residency(wrapped).runs == ((0, PAGE, D1, DRIVER, None),)
        Device(0).sync()
        cuda = ctypes.CDLL(managedmem._managedmem._driver_info()["path"])
        context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
        assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 1) == 0
        assert cuda.cuMemAllocManaged(ctypes.byref(pointer), ctypes.c_size_t(MIB), 1) == 0
        other = ManagedBuffer.from_handle(pointer.value, MIB)
        assert residency(other).nowhere == MIB
        assert cuda.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
        other.prefetch(Device(0))
        assert residency(other).devices == {Device(0): MIB}
    """)


def test_system_memory_that_devices_reach():
    run(
        """
        import mmap
        memory = mmap.mmap(-1, 4 * PAGE)
        memory[PAGE : 2 * PAGE] = bytes(PAGE)
        assert managedmem.residency(memory).runs == (
            (0, PAGE, NOWHERE, DRIVER, None),
            (PAGE, PAGE, HOST, MAP, None),
            (2 * PAGE, 2 * PAGE, NOWHERE, DRIVER, None),
        )
        kept = ctypes.c_char.from_buffer(memory)
        wrapped = ManagedBuffer.from_handle(ctypes.addressof(kept), 2 * PAGE)
        assert wrapped.residency().on_host == PAGE
        """,
        "pageable=1",
    )


def test_system_memory_that_they_do_not_reach():
    run("""
        for target in (bytearray(PAGE), ManagedBuffer.from_handle(id(PRELUDE := "x"), 8)):
            try:
                managedmem.residency(target)
            except ValueError as error:
                assert "is system memory; this needs a managed-memory allocation" in str(error)
            else:
                raise AssertionError
    """)


def test_without_concurrent_access():
    run(
        """
        try:
            managedmem.empty(PAGE).residency()
        except NotImplementedError as error:
            assert "concurrent_managed_access" in str(error)
        else:
            raise AssertionError
        """,
        "concurrent=0",
    )


def test_a_driver_that_does_not_support_it():
    run("""
        buffer = managedmem.empty(MIB)
        buffer.prefetch(Device(1))
        not_supported = 801
        emulator.fail("cuMemGetLocationInfo", code=not_supported)
        (run,) = residency(buffer).runs
        assert run == (0, MIB, OFF, "page map + prefetch", Device(1)) and run.device is None
        assert residency(buffer).devices == {Device(1): MIB}
        emulator.fail("cuMemGetLocationInfo", code=999)
        try:
            buffer.residency()
        except managedmem.CUDAError as error:
            assert error.code == 999 and "cuMemGetLocationInfo" in str(error)
        else:
            raise AssertionError
    """)


@pytest.mark.parametrize("mode", [CAPTURE_GLOBAL, CAPTURE_RELAXED], ids=["global", "relaxed"])
def test_captures_survive(mode):
    run(f"""
        from driver import capturing
        Device(0).set_current()
        buffer = managedmem.empty(MIB)
        with managedmem.Stream() as stream, capturing(stream, {mode}) as capture:
            assert buffer.residency().nowhere == MIB
            assert managedmem.residency([buffer, memoryview(buffer)]).nbytes == 2 * MIB
        assert capture.result == 0
    """)


def test_calls_are_few():
    """None for memory on the host; for other memory, up to 4096 pages a call."""
    run("""
        buffer = managedmem.empty(64 * MIB)
        store(buffer)
        with emulator.recording() as calls:
            buffer.residency()
        assert not calls
        buffer.prefetch(Device(0))
        with emulator.recording() as calls:
            assert residency(buffer).devices == {Device(0): 64 * MIB}
        calls = [call for call in calls if call.name == "cuMemGetLocationInfo"]
        assert 64 * MIB // (4096 * PAGE) <= len(calls) <= 64 * MIB // (4096 * PAGE) + 1
        assert sum(call.args["size"] for call in calls) == 64 * MIB
    """)


class TestPresentation:
    """A Residency of 8 pages: 4 on the host, 2 on devices, 1 nowhere, 1 of another process."""

    RUNS = ((0, 4, 0, 0, 0), (4, 1, 3, 2, 1), (5, 1, 3, 2, 2), (6, 1, 2, 2, 0), (7, 1, 1, 2, 0))

    def found(self, *runs):
        runs = runs or self.RUNS
        packed = b"".join(Struct("<QQBBB5x").pack(*run) for run in runs)
        record = (0, sum(run[1] for run in runs), 4, packed, None)
        return make((record,), (Device(0), Device(1)))

    def test_text(self, device1):
        assert str(self.found()) == (
            "8B: 4B on the host, 1B on Device(0), 1B on Device(1), 1B nowhere, 1B not on the host"
        )
        assert str(self.found(*self.RUNS[:3])) == (
            "6B: 4B on the host, 1B on Device(0), 1B on Device(1)"
        )
        hinted = self.found(*self.RUNS[:2], (5, 3, 1, 1, 2))
        assert str(hinted) == (
            "8B: 4B on the host, 1B on Device(0), 3B not on the host (last asked to Device(1))"
        )

    def test_bar(self, device1):
        legend = "# on the host, 0 on Device(0), 1 on Device(1), . not on the host, _ nowhere"
        assert self.found().bar(8).splitlines()[1] == f"[####01_.]  {legend}"
        shared = self.found((0, 4, 0, 0, 0), (4, 4, 3, 2, 1), (8, 3, 3, 2, 2), (11, 1, 2, 2, 0))
        assert "[#0+]" in shared.bar(3)

    def test_html(self, device1):
        html = self.found()._repr_html_()
        assert "on Device(1)" in html and "nowhere" in html
        assert html.count("<rect") == 5

    def test_plain_values(self, device1):
        values = self.found().to_dict()
        assert values["devices"] == {"Device(0)": 1, "Device(1)": 1}
        assert values["nowhere"] == 1 and values["last_asked_to"] == {}
        assert values["runs"][1] == {
            "offset": 4,
            "nbytes": 1,
            "where": "Device(0)",
            "evidence": "driver",
            "last_prefetch_location": None,
        }
        assert "devices" not in self.found((0, 4, 0, 0, 0)).to_dict()

    def test_plot(self, device1):
        pytest.importorskip("matplotlib")
        labels = [text.get_text() for text in self.found().plot().get_legend().get_texts()]
        assert labels == [
            "on the host",
            "on Device(0)",
            "on Device(1)",
            "not on the host",
            "nowhere",
        ]


def test_coherent_devices_are_no_obstacle():
    class Coherent:
        concurrent_managed_access = direct_managed_mem_access_from_host = True

    obstacle = _capabilities._residency_obstacle
    assert obstacle([Coherent()], 13040) == ""
    assert "page map does not show it" in obstacle([Coherent()], 13030)
