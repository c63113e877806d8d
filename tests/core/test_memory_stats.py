"""memory_stats() and live(): counts, peaks, kept memory, and the memories that live."""

import subprocess
import sys
import threading
import tracemalloc

import pytest

import managedmem
from constants import EMULATED, MIB, PAGE
from managedmem import (
    Device,
    DeviceMemoryResource,
    ManagedBuffer,
    ManagedMemoryResource,
    ManagedWorkingSet,
    Stream,
    WorkingSet,
    emulator,
    live,
    memory_stats,
)
from managedmem._units import size_text
from managedmem.typing import KeptMemory, MemoryCounts, MemoryStats
from threads import at_once

ZERO = Device(0)


class Freeing:
    """A memory resource that frees nothing, or fails."""

    broken = False

    def deallocate(self, ptr, size, *, stream):
        if self.broken:
            raise OSError("not now")


def growth(before, after):
    """How many memories began, how many live, and their bytes."""
    return (
        after.made - before.made,
        after.living - before.living,
        after.nbytes - before.nbytes,
    )


def found(buffer):
    """The memory of a buffer in live()."""
    (memory,) = (each for each in live() if each.address == buffer.handle)
    return memory


def test_managed_memory_counts_whole_pages_and_views_count_nothing(alloc):
    before = memory_stats()
    buffer = alloc(PAGE + 1)
    views = buffer[:1], buffer[:], ManagedBuffer.from_handle(buffer.handle, PAGE, name="view")
    after = memory_stats()
    assert growth(before.managed, after.managed) == (1, 1, 2 * PAGE)
    assert growth(before.total, after.total) == (1, 1, 2 * PAGE)
    for view in views:
        view.close()
    buffer.close()
    assert growth(before.managed, memory_stats().managed) == (1, 0, 0)


def test_peaks_last_until_they_are_reset(alloc):
    buffer = alloc(4 * MIB)
    high = memory_stats(reset_peaks=True)
    buffer.close()
    low = memory_stats(reset_peaks=True)
    assert high.managed.peak_nbytes >= high.managed.nbytes
    # the peak began anew at what lived then
    assert low.managed.peak_nbytes == high.managed.nbytes == low.managed.nbytes + 4 * MIB
    assert low.total.peak_nbytes == low.total.nbytes + 4 * MIB
    again = memory_stats()
    assert again.managed.peak_nbytes == again.managed.nbytes


def test_pools_count_by_device():
    device = Device.all()[-1]
    with DeviceMemoryResource(device) as own:
        before = memory_stats().device_pools.get(device, MemoryCounts())
        with own.allocate(100) as buffer:
            stats = memory_stats()
            assert growth(before, stats.device_pools[device]) == (1, 1, 100)
            assert stats.kept[device].pools >= 100
            assert (found(buffer).resource, found(buffer).device) == ("device pool", device)
        device.sync()
        own.trim()
        assert memory_stats().kept.get(device, (0, 0))[1] < stats.kept[device].pools


@pytest.mark.parametrize("preferred", [None, ZERO])
def test_managed_pools_count_by_the_device_that_they_prefer(preferred):
    if not managedmem.capabilities().managed_pools:
        pytest.skip("needs pools of managed memory")
    with ManagedMemoryResource(pooled=True, preferred_location=preferred) as pool:
        before = memory_stats().managed_pools.get(preferred, MemoryCounts())
        with pool.allocate(100) as buffer:
            after = memory_stats()
            assert growth(before, after.managed_pools[preferred]) == (1, 1, PAGE)
            assert after.kept[preferred].pools >= PAGE
            assert (found(buffer).resource, found(buffer).device) == ("managed pool", preferred)


def test_wrapped_memory_counts_until_its_resource_has_it_back():
    before = memory_stats().wrapped
    resource = Freeing()
    buffer = ManagedBuffer.from_handle(PAGE, 100, mr=resource, name="lent")
    assert growth(before, memory_stats().wrapped) == (1, 1, 100)
    assert found(buffer).resource == "wrapped"
    resource.broken = True
    with pytest.raises(OSError, match="not now"):
        buffer.close()
    assert growth(before, memory_stats().wrapped) == (1, 1, 100)
    resource.broken = False
    buffer.close()
    assert growth(before, memory_stats().wrapped) == (1, 0, 0)


@pytest.mark.emulator_only
def test_memory_whose_free_was_refused_still_counts(alloc):
    before = memory_stats().managed
    buffer = alloc(PAGE)
    emulator.fail("cuMemFree", code=800)  # as inside a host function
    with pytest.raises(managedmem.CUDAError):
        buffer.close()
    assert growth(before, memory_stats().managed) == (1, 1, PAGE)
    buffer.close()
    assert growth(before, memory_stats().managed) == (1, 0, 0)


def test_frames_are_kept_until_the_set_is_closed(alloc):
    def kept():
        return memory_stats().kept.get(ZERO, (0, 0))[0]

    before = kept()
    with WorkingSet(MIB, ZERO), ManagedWorkingSet(8 * MIB, ZERO) as working, Stream() as stream:
        assert kept() == before + MIB
        group = working.add(alloc(2 * MIB))
        with group.use(stream=stream):
            assert kept() == before + 3 * MIB
        stream.sync()
        assert working.stats().kept == 2 * MIB
    assert kept() == before


def test_live_has_the_largest_first_with_names_and_ages(alloc):
    small, large, equal = alloc(PAGE), alloc(4 * PAGE), alloc(PAGE)
    large.name = "weights"
    mine = {small.handle, large.handle, equal.handle}
    memories = [each for each in live() if each.address in mine]
    assert [each.address for each in memories] == [large.handle, small.handle, equal.handle]
    assert [each.nbytes for each in memories] == [4 * PAGE, PAGE, PAGE]
    assert memories[0].label == "weights" and memories[0].resource == "managed"
    assert memories[1].label == f"{PAGE / 1024:.1f}K #{memories[1].serial}"
    assert memories[1].serial < memories[0].serial < memories[2].serial
    assert memories[1].age >= memories[0].age >= memories[2].age >= 0
    assert found(small).age > memories[1].age and memories[0].device is None
    small.close()
    assert not [each for each in live() if each.serial == memories[1].serial]


def test_tracebacks_show_the_line_that_allocated():
    with pytest.raises(RuntimeError, match=r"tracemalloc\.start"):
        live(tracebacks=True)
    unknown = managedmem.empty(PAGE)
    tracemalloc.start(2)
    try:
        with managedmem.empty(PAGE) as buffer, unknown:
            view = buffer[:]  # a later object at the same address
            traces = {each.address: each.traceback for each in live(tracebacks=True)}
            assert found(buffer).traceback is None
            view.close()
            assert traces[unknown.handle] is None
            assert "empty(PAGE) as buffer" in traces[buffer.handle].format()[-1]
    finally:
        tracemalloc.stop()


def test_a_traceback_ends_where_this_package_is_called():
    tracemalloc.start(25)
    try:
        with managedmem.zeros(PAGE) as buffer:
            traces = {each.address: each.traceback for each in live(tracebacks=True)}
            trace = traces[buffer.handle]
            assert "zeros(PAGE) as buffer" in trace.format()[-1] and trace[-1].filename == __file__
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("value", [1, None, "no"])
def test_flags_are_true_or_false(value):
    before = memory_stats().total
    with pytest.raises(TypeError, match="reset_peaks must be True or False, got"):
        memory_stats(reset_peaks=value)
    with pytest.raises(TypeError, match="tracebacks must be True or False, got"):
        live(tracebacks=value)
    assert memory_stats().total == before


def test_results_do_not_change():
    stats = memory_stats()
    for name in ("kept", "device_pools", "managed_pools"):
        with pytest.raises(TypeError):
            getattr(stats, name)[ZERO] = None
    with pytest.raises(AttributeError):
        stats.total = None


def test_threads_lose_no_count():
    before = memory_stats().managed
    done = threading.Event()

    def make():
        for _ in range(50):
            managedmem.empty(PAGE, name="mine").close()
        done.set()

    def watch():
        while not done.is_set():
            assert all(each.nbytes for each in live())
            assert memory_stats().total.nbytes >= 0

    at_once(make, make, watch)
    assert growth(before, memory_stats().managed) == (100, 0, 0)


def test_a_repr_has_units():
    few, many = (
        MemoryCounts(MIB, 3 * MIB, 1, 12),
        MemoryCounts(5 * 1024 * MIB, 6 * 1024 * MIB, 3, 4),
    )
    kept = {ZERO: KeptMemory(0, 2 * MIB), None: KeptMemory(512, 0)}
    stats = MemoryStats(many, few, {None: few}, {ZERO: many}, MemoryCounts(), kept)
    assert repr(stats).splitlines() == [
        "memory                    bytes  peak  living  made",
        "managed                    1.0M  3.0M       1    12",
        "managed pools, no device   1.0M  3.0M       1    12",
        "device pools, Device(0)    5.0G  6.0G       3     4",
        "wrapped                       0     0       0     0",
        "total                      5.0G  6.0G       3     4",
        "",
        "kept       frames  pools",
        "Device(0)       0   2.0M",
        "no device    512B      0",
    ]
    assert repr(stats._replace(kept={})).splitlines()[-1].startswith("total ")
    assert repr(few) == "<MemoryCounts nbytes=1.0M peak_nbytes=3.0M living=1 made=12>"
    assert repr(kept[None]) == "<KeptMemory frames=512B pools=0>"


def test_a_repr_of_a_living_memory_has_units(alloc):
    memory = found(alloc(3 * PAGE))._replace(age=0.25, address=4096, label="a", serial=7)
    text = f"<LiveMemory label='a' nbytes={size_text(3 * PAGE)} resource='managed' device=None"
    assert repr(memory) == f"{text} serial=7 age=250.000 ms address=0x1000>"
    traced = memory._replace(traceback=tracemalloc.Traceback([("here.py", 3)]))
    assert repr(traced).endswith(f" traceback={traced.traceback!r}>")


@pytest.mark.skipif(not EMULATED, reason="a driver is chosen")
def test_no_driver_is_opened():
    code = (
        "import managedmem as m; from managedmem import emulator; m.live(); s = m.memory_stats();"
        "assert s.total == (0, 0, 0, 0) and not s.kept and s.managed == s.wrapped == s.total;"
        "emulator.enable(devices=3)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_a_truth_that_raises_is_passed_on():
    class Neither:
        def __bool__(self):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        managedmem._managedmem._memory_counts(Neither())
