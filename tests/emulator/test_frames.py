"""The frames of devices on the emulated driver: when they are taken, kept, given back and evicted.

A real driver answers the same, but a device that is short of memory is tried here alone.
"""

import pytest

import managedmem
from constants import EMULATED, MIB, PAGE
from managedmem import Device, Host, emulator
from programs import run_python
from residencies import store

BLOCK = 2 * MIB
LEAVE = {
    "prefetch": lambda b: b.prefetch(Host()),
    "store": store,
    "discard": lambda b: b.discard(),
    "read_mostly": lambda b: setattr(b, "read_mostly", False),
}
"""The ways in which pages leave a device."""
SMALL = "devices=1,capacity_mib=64"
START = """
    import managedmem
    from managedmem import Device, Host, emulator
    from constants import MIB, PAGE
    from residencies import store
    ZERO = Device(0)
    with managedmem.trace():    # the first one prefetches a page to try its source
        pass
    emulator.clear_counters()
    def fill(buffer):
        store(buffer)
        return buffer
    def on_device(rows):
        ZERO.sync()
        return [i for i, row in enumerate(rows) if emulator.residency(row) == ZERO]
    def evicted(trace):
        return trace.total.by_cause["eviction"][1]
"""


def run_small(code, options=SMALL):
    run_python(START + code, emulator=options)


def free():
    Device(0).sync()
    return Device(0).memory_info.free


@pytest.fixture
def memory(alloc):
    buffer = alloc(64 * MIB)
    store(buffer)
    return buffer


class TestKept:
    """As an H100 with driver 580 answered for 1 GiB."""

    @pytest.mark.parametrize("way", LEAVE)
    def test_until_the_free_after_pages_have_left(self, alloc, way):
        before = free()
        memory = alloc(64 * MIB)
        store(memory)
        memory.read_mostly = way == "read_mostly"
        memory.prefetch(Device(0))
        there = free()
        LEAVE[way](memory)
        assert free() <= there
        if EMULATED:  # a GPU may keep frames of freed memory a while, and use them again
            assert before - there >= 64 * MIB
            memory.close()
            assert before - free() < 64 * MIB

    @pytest.mark.emulator_only
    def test_what_memory_info_shows_is_the_sum(self, memory):
        total, before = Device(0).memory_info.total, emulator.frames(Device(0))
        memory.prefetch(Device(0))
        memory[: 10 * MIB].prefetch(Host())
        assert free() == total - emulator.frames(Device(0)).taken
        now = emulator.frames(Device(0))
        assert (now.used - before.used, now.kept - before.kept) == (54 * MIB, 10 * MIB)

    @pytest.mark.emulator_only
    def test_a_page_takes_a_block(self, memory):
        before = emulator.frames(Device(0)).used
        for page in (5, 6, MIB // PAGE, BLOCK // PAGE - 1):
            memory[page * PAGE : (page + 1) * PAGE].prefetch(Device(0))
            assert free() and emulator.frames(Device(0)).used - before == BLOCK
        memory[BLOCK : BLOCK + PAGE].prefetch(Device(0))
        assert free() and emulator.frames(Device(0)).used - before == 2 * BLOCK

    @pytest.mark.emulator_only
    def test_pages_that_come_again_take_their_frames(self, memory):
        memory.prefetch(Device(0))
        before = free()
        for location in (Host(), Device(0), Host(), Device(0)):
            memory.prefetch(location)
            assert free() == before

    @pytest.mark.emulator_only
    def test_each_device_has_its_own(self, memory, device1):
        before = [emulator.frames(device) for device in Device.all()]
        for device in (Device(0), device1):
            memory.prefetch(device)
            Device(0).sync()
        now = [emulator.frames(device) for device in Device.all()]
        assert now[0].kept - before[0].kept == now[1].used - before[1].used == 64 * MIB

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("act", ["fill", "copy", "touch"])
    def test_every_way_to_the_device_takes_them(self, alloc, memory, act):
        other, before = alloc(64 * MIB), emulator.frames(Device(0)).used
        if act == "fill":
            other.fill(1)
        elif act == "copy":
            other.copy_from(memory)
        else:
            emulator.touch(other, Device(0))
        free()
        used = emulator.frames(Device(0)).used - before
        assert used == (128 if act == "copy" else 64) * MIB

    @pytest.mark.emulator_only
    def test_access_in_place_takes_none(self, memory):
        memory.accessed_by = {Device(0)}
        before = emulator.frames(Device(0))
        emulator.touch(memory, Device(0))
        assert emulator.frames(Device(0))[:3] == before[:3]

    @pytest.mark.emulator_only
    def test_plain_memory_and_the_peak(self, memory):
        emulator.clear_counters()
        before = emulator.frames(Device(0))
        assert before.peak == before.taken
        memory.prefetch(Device(0))
        with managedmem.DeviceMemoryResource(Device(0)).allocate(4 * MIB) as plain:
            plain.fill(0)
            free()
            now = emulator.frames(Device(0))
            assert now.plain - before.plain == 4 * MIB
        memory.close()
        free()
        after = emulator.frames(Device(0))
        assert after.peak == now.taken == now.peak
        emulator.clear_counters()
        assert emulator.frames(Device(0)).peak == after.taken

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("wrong", [0, None, "cuda", Host()], ids=str)
    def test_frames_wants_a_device(self, wrong):
        with pytest.raises(TypeError, match="must be a Device"):
            emulator.frames(wrong)


@pytest.mark.emulator_only
class TestEviction:
    def test_blocks_of_one_allocation_give_way_to_each_other(self):
        run_small(
            """
    big = fill(managedmem.empty((10, 16 * MIB), name="big"))
    with managedmem.trace() as t:
        for row in big:
            row.prefetch(ZERO)
            ZERO.sync()
            emulator.touch(row, ZERO)
    assert on_device(big) == [6, 7, 8, 9]
    assert t.total.to_device == t.total.by_cause["requested"][0] == 160 * MIB, t.total
    assert evicted(t) == t.total.to_host == 96 * MIB, t.total
    assert t.total.device_faults == 0
    assert emulator.frames(ZERO)[:3] == (64 * MIB, 0, 0)
    assert ZERO.memory_info.free == 0
    big.prefetch(ZERO)
    assert on_device(big) == [6, 7, 8, 9]
    big[3].prefetch(ZERO)
    assert on_device(big) == [3, 7, 8, 9]
    assert all(bytes(row.numpy()[:2]) == b"\\1\\1" for row in big)
            """
        )

    @pytest.mark.parametrize("act", ["fill", "copy", "touch", "kernel"])
    def test_every_way_to_the_device_evicts(self, act):
        run_small(
            f"""
    import ctypes
    big = managedmem.empty((10, 16 * MIB))
    act = {act!r}
    if act == "fill":
        big.fill(7)
    elif act == "touch":
        emulator.touch(big, ZERO, write=True)
    elif act == "copy":
        import numpy
        big.copy_from(numpy.full((10, 16 * MIB), 7, "B"))
    else:
        kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
            lambda _: ctypes.memset(big.handle, 7, big.nbytes) and None)
        library = emulator._library()
        ZERO.set_current()
        assert library.emu_launch(None, kernel, None) == 0
    ZERO.sync()
    frames = emulator.frames(ZERO)
    assert frames[:3] == (64 * MIB, 0, 0) and frames.peak == 64 * MIB, frames
    assert on_device(big) == [6, 7, 8, 9]
    if act != "touch":
        assert all(bytes(row.numpy()[-2:]) == b"\\7\\7" for row in big)
            """
        )

    def test_the_frames_that_pages_have_left_go_first(self):
        run_small(
            """
    old, left, new = (fill(managedmem.empty(24 * MIB)) for _ in range(3))
    for each in (old, left):
        each.prefetch(ZERO)
    left.prefetch(Host())
    with managedmem.trace() as t:
        new.prefetch(ZERO)
        ZERO.sync()
    assert t.total.moved == 24 * MIB and evicted(t) == 0
    assert on_device([old, left, new]) == [0, 2]
    assert emulator.frames(ZERO)[:3] == (48 * MIB, 16 * MIB, 0)
            """
        )

    def test_then_discarded_blocks_which_move_nothing(self):
        run_small(
            """
    old, thrown, new = (fill(managedmem.empty(24 * MIB)) for _ in range(3))
    for each in (old, thrown):
        each.prefetch(ZERO)
    thrown.discard()
    with managedmem.trace() as t:
        new.prefetch(ZERO)
        ZERO.sync()
    assert t.total.moved == 24 * MIB
    assert on_device([old, new]) == [0, 1]
            """
        )

    def test_then_those_that_came_longest_ago(self):
        run_small(
            """
    first, second, third = (fill(managedmem.empty(24 * MIB)) for _ in range(3))
    for each in (first, second, first):    # a prefetch counts though nothing moves,
        each.prefetch(ZERO)
    ZERO.sync()
    emulator.touch(second, ZERO)           # and an access without a fault does not
    third.prefetch(ZERO)
    assert on_device([first, second, third]) == [0, 2]
    assert emulator.residency(second) == "mixed" == emulator.residency(second[: 10 * MIB])
    assert emulator.residency(second[: 8 * MIB]) == Host()
            """
        )

    def test_plain_memory_makes_room(self):
        run_small(
            """
    memory = fill(managedmem.empty(64 * MIB))
    memory.prefetch(ZERO)
    ZERO.sync()
    with managedmem.trace() as t:
        plain = managedmem.DeviceMemoryResource(ZERO).allocate(20 * MIB)
        plain.fill(0)
        ZERO.sync()
    frames = emulator.frames(ZERO)
    assert frames[:3] == (64 * MIB - frames.plain, 0, frames.plain) and frames.plain >= 20 * MIB
    assert evicted(t) == frames.plain == frames.taken - frames.used
    try:
        managedmem.DeviceMemoryResource(ZERO).allocate(50 * MIB)
    except managedmem.CUDAError as error:
        assert error.code == 2
    else:
        raise AssertionError("44 MiB are left at most")
    assert emulator.frames(ZERO) == frames
    """
        )

    def test_a_device_full_of_plain_memory_gets_no_pages(self):
        run_small(
            """
    memory = fill(managedmem.empty(4 * MIB))
    plain = managedmem.DeviceMemoryResource(ZERO).allocate(64 * MIB)
    memory.prefetch(ZERO)
    ZERO.sync()
    assert emulator.residency(memory) == Host()
    with managedmem.trace() as t:
        emulator.touch(memory, ZERO)
        emulator.touch(memory, ZERO, write=True)
    assert emulator.residency(memory) == Host()
    assert (t.total.moved, t.total.remote_mapped) == (0, 4 * MIB)
    fresh = managedmem.empty(4 * MIB)
    emulator.touch(fresh, ZERO)
    assert emulator.residency(fresh) == Host()
            """
        )

    def test_an_eviction_ends_the_copies_on_other_devices(self):
        """As in the kernel module: the host gets the pages, and nobody else has them."""
        run_small(
            """
    first, second = (fill(managedmem.empty(64 * MIB)) for _ in range(2))
    first.read_mostly = True
    for device in (ZERO, Device(1)):
        first.prefetch(device)
        ZERO.sync()
    second.prefetch(ZERO)
    assert on_device([second]) == [0]
    assert emulator.residency(first) == Host()
    assert emulator.frames(Device(1))[:3] == (0, 64 * MIB, 0)
            """,
            "devices=2,capacity_mib=64",
        )

    def test_what_the_host_wrote_is_not_evicted(self):
        run_small(
            """
    first, second = (fill(managedmem.empty(64 * MIB)) for _ in range(2))
    first.prefetch(ZERO)
    ZERO.sync()
    with managedmem.trace() as t:
        store(first[: 16 * MIB], 2)
        second[: 16 * MIB].prefetch(ZERO)
        ZERO.sync()
    assert t.total.by_cause["fault"][1] == 16 * MIB and evicted(t) == 0
            """
        )
