"""What a WorkingSet moves by the access of groups and uses, and that contents are right.

Work of the device is queued and not waited for, so that each order that is not kept shows under the
lazy schedule of the emulated driver.
"""

import itertools

import numpy
import pytest

import managedmem
from constants import EMULATED, MIB, PAGE
from contents import pattern
from kernels import Sources, read_by_device, write_by_device
from layers import SIZE, layer
from managedmem import Device, Stream, WorkingSet, emulator


def all_are(value, array):
    return bytes(array) == bytes([value]) * SIZE


@pytest.fixture(params=["eager", "lazy"] if EMULATED else ["a GPU"])
def schedule(request):
    if EMULATED:
        emulator.schedule(request.param)


@pytest.fixture
def working(schedule):
    with WorkingSet(4 * SIZE, Device(0)) as made:
        yield made


@pytest.fixture
def groups(working):
    return [working.add(layer(number), "write") for number in range(16)]


@pytest.fixture
def sources():
    made = Sources(SIZE)
    yield made
    Device(0).sync()
    made.close()


@pytest.fixture
def result(alloc):
    return alloc(SIZE)


@pytest.fixture
def other():
    with Stream() as made:
        yield made
        made.sync()


def without_room(working, stream):
    """Uses of other groups, which take all frames."""
    return [working.add(layer(0)).use(stream=stream) for _ in range(4)]


@pytest.mark.parametrize(
    ("read", "error"), [(memoryview, BufferError), (lambda array: array.numpy(), ValueError)]
)
def test_the_host_reads_copies_of_frames(read, error, groups, stream):
    with groups[3].use(stream=stream, access="read") as use:
        with pytest.raises(error, match=r"copy_from\(buf\) of managedmem.empty_like\(buf\)"):
            read(use.arrays[0])
        copy = managedmem.empty_like(use.arrays[0])
        copy.copy_from(use.arrays[0], stream=stream)
    stream.sync()
    assert bytes(copy) == pattern(SIZE, 3)


# --- what moves -----------------------------------------------------------------------------


def test_uses_that_read_move_nothing_home(working, groups, stream):
    for _ in range(3):
        for number, group in enumerate(groups):
            with group.use(stream=stream, access="read") as use:
                assert read_by_device(use.arrays[0], stream) == pattern(SIZE, number)
    stats = working.stats()
    assert stats.bytes_home == 0 and stats.drops >= 32 and stats.failures == 0
    assert stats.bytes_loaded == stats.loads * SIZE


@pytest.mark.parametrize("given", [False, True])
def test_a_training_loop_moves_each_group_home_once(working, groups, stream, given):
    """Forward and backward read, the step writes: access is foreseen as the order is."""
    if given:
        working.order = groups + groups[::-1] + groups
    demanded = []
    for _ in range(12):
        stats = working.stats()
        demanded.append(stats.loads - stats.ahead)
        for group in groups + groups[::-1]:
            with group.use(stream=stream, access="read"):
                pass
        for group in groups:
            with group.use(stream=stream):
                pass
    stream.sync()
    working.close()
    stats = working.stats()
    assert stats.bytes_home == 12 * 16 * SIZE
    assert stats.loads - stats.ahead == demanded[2] and stats.mapped == 0


def test_what_is_written_is_read_by_later_uses(working, groups, stream, sources, result):
    for turn in range(3):
        for number, group in enumerate(groups):
            with group.use(stream=stream) as use:
                sources.queue(use.arrays[0], (turn + number) % 7, stream)
        for number, group in enumerate(groups):
            with group.use(stream=stream, access="read") as use:
                result.copy_from(use.arrays[0], stream=stream)
            if number % 5 == 0:
                stream.sync()
                assert all_are((turn + number) % 7, result)
    for number, group in enumerate(groups):
        with group.use_on_host() as (home,):
            assert all_are((2 + number) % 7, home)


def test_a_write_of_a_part_keeps_the_rest(working, groups, stream, sources):
    with groups[0].use(stream=stream, access="read"), groups[0].use(stream=stream) as use:
        sources.queue(use.arrays[0][PAGE : 2 * PAGE], 9, stream)
    wanted = bytearray(pattern(SIZE, 0))
    wanted[PAGE : 2 * PAGE] = bytes([9]) * PAGE
    with groups[0].use_on_host() as (home,):
        assert bytes(home) == wanted


def test_scratch_is_not_copied(working, stream, sources, result):
    groups = [working.add(layer(number), "scratch") for number in range(8)]
    before = len(emulator.calls()) if EMULATED else 0
    for group in groups * 3:
        with group.use(stream=stream):
            pass
    if EMULATED:
        names = [call.name for call in emulator.calls()[before:]]
        assert "cuMemcpyAsync" not in names
    assert working.stats().bytes_home == 0 and working.stats().drops > 0
    for value, group in enumerate(groups):
        with group.use(stream=stream) as use:
            sources.queue(use.arrays[0], value, stream)
            with group.use(stream=stream) as same:
                result.copy_from(same.arrays[0], stream=stream)
            stream.sync()
            assert all_are(value, result)


def test_scratch_brings_no_bytes(working, stream):
    with working.add(layer(0), "scratch").use(stream=stream):
        pass
    assert working.stats().bytes_loaded == 0


def test_many_streams(working, groups, sources):
    """A use on one stream does not wait for the host between it and another one."""
    streams = [Stream() for _ in range(5)]
    for turn, number in itertools.product(range(6), range(16)):
        stream = streams[number % 5]
        with groups[number].use(stream=stream) as use:
            sources.queue(use.arrays[0], (turn * number) % 11, stream)
    for number, group in enumerate(groups):
        with group.use_on_host() as (home,):
            assert all_are(5 * number % 11, home)
    for stream in streams:
        stream.close()


@pytest.mark.emulator_only("counts frames of the emulated driver")
@pytest.mark.parametrize("order", ["given", "learned", "random"])
def test_the_budget_is_kept_at_every_call(order):
    chosen = numpy.random.default_rng(3)
    nbytes, granularity = 5 * MIB // 2, 2 * MIB
    emulator.clear_counters()
    before = emulator.frames(Device(0))
    with WorkingSet(nbytes, Device(0)) as working, Stream() as stream:
        kinds = ["read", "write", "scratch"]
        groups = [
            working.add(numpy.zeros(chosen.integers(1, MIB), "u1"), kinds[n % 3]) for n in range(12)
        ]
        if order == "given":
            working.order = groups
        for turn in range(120):
            number = int(chosen.integers(12)) if order == "random" else turn % 12
            with groups[number].use(stream=stream), groups[number // 2].use():
                assert working.nbytes <= nbytes
            if turn % 20 == 0:
                working.remove(groups[5])
                groups[5] = working.add(numpy.zeros(MIB, "u1"))
                if order == "given":
                    working.order = groups
        stream.sync()
        now = emulator.frames(Device(0))
        assert now.plain - before.plain == nbytes == working.stats().kept
        assert now.used == before.used
        assert now.peak - before.taken <= nbytes + granularity
    assert emulator.frames(Device(0)).plain == before.plain


# --- at home for want of room ------------------------------------------------------------------


def test_writes_at_home_are_read_from_frames(working, stream, other, sources, result):
    """The group is loaded behind the work that wrote it, and not by what it was before."""
    group = working.add(layer(1), "write")
    uses = without_room(working, other)
    with group.use(stream=stream) as use:
        assert not use.is_resident
        sources.queue(use.arrays[0], 5, stream)
    for each in uses:
        each.close()
    with group.use(stream=stream, access="read") as use:
        assert use.is_resident
        result.copy_from(use.arrays[0], stream=stream)
    with working.add(layer(2)).use(stream=other):
        other.sync()  # after which all is loaded, if it does not wait for the other stream
    stream.sync()
    assert all_are(5, result)


def test_a_load_ahead_beside_a_write_at_home(working, stream, other, sources, result):
    group = working.add(layer(1), "write")
    small = working.add(layer(2, PAGE))
    for each in [small, group] * 4:
        with each.use(stream=other):
            pass
    uses = without_room(working, other)
    use = group.use(stream=stream)
    assert not use.is_resident
    for each in uses:
        each.close()
    for each in [small] * 3:
        with each.use(stream=other):
            other.sync()
    assert group.is_resident  # now that there is room; that is what it was before the write
    sources.queue(use.arrays[0], 6, stream)
    use.close()
    with group.use(stream=stream, access="read") as use:
        result.copy_from(use.arrays[0], stream=stream)
    stream.sync()
    assert all_are(6, result)


def test_uses_inside_of_one_at_home_are_there_too(working, stream, other, sources, result):
    group = working.add(layer(1), "write")
    uses = without_room(working, other)
    with group.use(stream=stream) as outer:
        for each in uses:
            each.close()
        with group.use(stream=stream) as inner:
            assert not inner.is_resident
            sources.queue(inner.arrays[0], 3, stream)
        result.copy_from(outer.arrays[0], stream=stream)
        stream.sync()
        assert all_are(3, result)
        sources.queue(outer.arrays[0], 4, stream)
        with group.use(stream=stream, access="read") as inner:
            result.copy_from(inner.arrays[0], stream=stream)
        stream.sync()
        assert all_are(4, result)
    with group.use(stream=stream, access="read") as use:
        assert use.is_resident
        result.copy_from(use.arrays[0], stream=stream)
    stream.sync()
    assert all_are(4, result)


def test_a_use_at_home_finds_what_was_written_in_a_frame(working, stream, other, sources, result):
    group = working.add(layer(1), "write")
    with group.use(stream=stream) as use:
        assert use.is_resident
        sources.queue(use.arrays[0], 7, stream)
    uses = without_room(working, other)
    with group.use(stream=stream, access="read") as use:
        assert not use.is_resident
        result.copy_from(use.arrays[0], stream=stream)
    stream.sync()
    assert all_are(7, result)
    for each in uses:
        each.close()


def test_the_host_finds_what_was_written_at_home(working, stream, other, sources):
    group = working.add(layer(1), "write")
    uses = without_room(working, other)
    with group.use(stream=stream) as use:
        sources.queue(use.arrays[0], 8, stream)
    with group.use_on_host() as (home,):
        assert all_are(8, home)
    for each in uses:
        each.close()


# --- the host ----------------------------------------------------------------------------------


def test_the_host_finds_what_was_written(working, groups, stream, sources):
    with groups[0].use(stream=stream) as use:
        sources.queue(use.arrays[0], 5, stream)
    with groups[0].use_on_host() as (home,):
        assert all_are(5, home)


def test_the_device_finds_what_the_host_wrote(working, groups, stream, result):
    for _ in range(2):
        for group in groups[:6]:  # loads some ahead
            with group.use(stream=stream):
                pass
    for number, group in enumerate(groups):
        with group.use_on_host(access="write") as (home,):
            home.numpy()[:] = number
    for number, group in enumerate(groups):
        with group.use(stream=stream, access="read") as use:
            result.copy_from(use.arrays[0], stream=stream)
        stream.sync()
        assert all_are(number, result)


def test_the_host_writes_groups_that_are_only_read(working, stream, result):
    group = working.add({"a": layer(1), "b": layer(2)})
    with group.use(stream=stream) as use:
        result.copy_from(use.arrays["b"], stream=stream)
    with group.use_on_host(access="write") as arrays:
        assert [*arrays] == ["a", "b"]
        arrays["b"].numpy()[:] = 3
    stream.sync()
    assert bytes(result) == pattern(SIZE, 2)  # the use came first
    with group.use(stream=stream) as use:
        assert read_by_device(use.arrays["a"], stream) == pattern(SIZE, 1)
        assert read_by_device(use.arrays["b"], stream) == bytes([3]) * SIZE


def test_a_block_of_the_host_that_raises_has_written(working, groups, stream, result):
    with groups[0].use(stream=stream):
        pass
    stream.sync()
    with pytest.raises(KeyError), groups[0].use_on_host(access="write") as (home,):
        home.numpy()[:] = 4
        raise KeyError
    with groups[0].use(stream=stream, access="read") as use:
        result.copy_from(use.arrays[0], stream=stream)
    stream.sync()
    assert all_are(4, result)


def test_refusals(working, groups, stream):
    group = groups[0]
    device, host = "the device uses <WorkingGroup .*: close its uses", "the host uses <WorkingGroup"
    with group.use(stream=stream):
        for access in ("read", "write"):
            with pytest.raises(RuntimeError, match=device), group.use_on_host(access=access):
                raise AssertionError
    with group.use(stream=stream, access="read"):
        with pytest.raises(RuntimeError, match=device), group.use_on_host(access="write"):
            raise AssertionError
        with group.use_on_host() as (home,):
            assert bytes(home) == pattern(SIZE, 0)
    with group.use_on_host():
        with pytest.raises(RuntimeError, match=host):
            group.use(stream=stream)
        with group.use(stream=stream, access="read"), group.use_on_host():
            pass
    with group.use_on_host(access="write"):
        for access in ("read", "write"):
            with pytest.raises(RuntimeError, match=host):
                group.use(access=access)
        with groups[1].use():
            pass
    with group.use(), pytest.raises(RuntimeError, match=device), group.use_on_host():
        raise AssertionError
    with group.use(stream=stream):
        pass
    working.remove(group)


def test_a_block_of_the_host_outlives_the_set(stream, sources):
    working = WorkingSet(2 * SIZE, Device(0))
    group = working.add(layer(0), "write")
    with group.use(stream=stream) as use:
        sources.queue(use.arrays[0], 2, stream)
    with group.use_on_host(access="write") as (home,):
        working.close()
        assert all_are(2, home)
        home.numpy()[:] = 3
    with group.use_on_host() as (again,):
        assert all_are(3, again)


def test_arrays_of_the_host_outlive_everything():
    with WorkingSet(2 * SIZE, Device(0)) as working:
        with working.add(layer(3)).use_on_host() as (home,):
            pass
    del working
    assert bytes(home) == pattern(SIZE, 3)


def test_writes_by_the_device_reach_the_host_after_a_close(stream, sources):
    """The copy home of a use that ends when its set is closed may still be under way."""
    working = WorkingSet(2 * SIZE, Device(0))
    group = working.add(layer(0), "write")
    use = group.use(stream=stream)
    late = use.arrays[0]
    working.close()
    sources.queue(late, 6, stream)
    use.close()
    with group.use_on_host() as (home,):
        assert all_are(6, home)
    write_by_device(late, 1, stream)
