"""Working sets whose device memory is given back for a while: memory, contents, graphs, errors."""

import threading

import pytest

from calls import recorded
from constants import EMULATED, PAGE
from contents import contents, pattern
from driver import capturing
from graphs import Graph, capture_reads
from layers import SIZE, layer
from managedmem import CUDAError, Device, Stream, WorkingSet, emulator
from managedmem._managedmem import _Frames, _Slab

pytestmark = pytest.mark.usefixtures("current_device")

UNIT = 2 << 20  # of the driver
BUDGET = 4 * UNIT
COUNT = 4


def free():
    Device(0).sync()
    return Device(0).memory_info.free


def suspendable():
    return WorkingSet(BUDGET, Device(0), suspendable=True)


@pytest.fixture
def working():
    with suspendable() as made:
        yield made


def read(group, result, stream):
    """What a use of a group finds, and whether it was in a frame."""
    with group.use(stream=stream, access="read") as use:
        result.copy_from(use.arrays[0], stream=stream)
        stream.sync()
        return contents(result), use.is_resident


def write(group, source, stream):
    with group.use(stream=stream) as use:
        source.copy_to(use.arrays[0], stream=stream)


def test_memory_is_the_drivers_until_the_set_resumes(working, alloc):
    groups, result, stream = [working.add(layer(n)) for n in range(COUNT)], alloc(SIZE), Stream()
    assert read(groups[0], result, stream) == (pattern(SIZE, 0), True)
    before, moved = free(), working.stats()
    working.suspend()
    working.suspend()
    assert working.is_suspended and working.stats().kept == working.nbytes == 0
    assert repr(working).endswith(" suspended>")
    if EMULATED:  # nobody else uses this device
        assert free() == before + BUDGET
    for n, group in enumerate(groups):
        assert read(group, result, stream) == (pattern(SIZE, n), False)
    assert working.stats().bytes_home == moved.bytes_home == 0
    assert working.stats().bytes_loaded == moved.bytes_loaded
    working.resume()
    working.resume()
    assert not working.is_suspended and working.stats().kept == working.budget == BUDGET
    assert "suspended" not in repr(working)
    if EMULATED:
        assert free() == before
    for n, group in enumerate(groups):
        assert read(group, result, stream) == (pattern(SIZE, n), True)


def test_writes_are_at_home_before_and_found_afterwards(working, alloc):
    group = working.add(layer(0), "write")
    result, source, stream = alloc(SIZE), alloc(SIZE), Stream()
    source.copy_from(layer(1))
    write(group, source, stream)  # the copy home may wait for it
    working.suspend()
    assert read(group, result, stream) == (pattern(SIZE, 1), False)
    source.copy_from(layer(2))
    write(group, source, stream)
    working.resume()
    assert read(group, result, stream) == (pattern(SIZE, 2), True)
    with group.use_on_host() as (home,):
        assert contents(home) == pattern(SIZE, 2)


def test_graphs_are_right_without_device_memory_and_with_it_again(working, alloc):
    groups = [working.add(layer(n)) for n in range(COUNT)]
    results, stream, graph = [alloc(SIZE) for _ in groups], Stream(), Graph()
    Device(0).set_current()
    capture_reads(graph, groups, results, stream)
    for turn in (1, 2, 3):
        before = free()
        working.suspend()
        if EMULATED:
            assert free() == before + BUDGET
        for first in (10 * turn, 10 * turn + 5):
            for n, group in enumerate(groups):
                with group.use_on_host(access="write") as (home,):
                    home.numpy()[:] = memoryview(pattern(SIZE, first + n))
            graph.launch(stream)
            assert [*map(contents, results)] == [pattern(SIZE, first + n) for n in range(COUNT)]
            working.resume()  # the second launch is on the device
    assert working.stats().failures == 0
    graph.destroy()
    working.suspend()  # no graph needs memory of the host any more
    working.resume()
    assert read(groups[0], results[0], stream)[1]


def test_a_graph_captured_meanwhile_uses_groups_at_home(working, alloc):
    group, result, stream, graph = working.add(layer(0)), alloc(SIZE), Stream(), Graph()
    Device(0).set_current()
    working.suspend()
    capture_reads(graph, [group], [result], stream, is_resident=False)
    for _ in range(2):
        graph.launch(stream)
        assert contents(result) == pattern(SIZE, 0)
        working.resume()
    graph.destroy()


@pytest.mark.parametrize("kept", ["use", "array"])
def test_a_set_in_use_is_not_suspended(working, alloc, kept):
    group, result, stream = working.add(layer(0), "write"), alloc(SIZE), Stream()
    use = group.use(stream=stream)
    array = use.arrays[0]
    if kept == "array":
        use.close()
    else:
        del array
    with pytest.raises(RuntimeError, match="in use: end the uses, and drop the references"):
        working.suspend()
    assert not working.is_suspended and group.is_resident
    use.close()
    array = None
    working.suspend()
    assert read(group, result, stream) == (pattern(SIZE, 0), False)


def test_refusals():
    with WorkingSet(BUDGET, Device(0)) as plain:
        with pytest.raises(
            RuntimeError, match="the set cannot be suspended: make it with suspendable=True"
        ):
            plain.suspend()
        plain.resume()
        assert not plain.is_suspended
    for call in (plain.suspend, plain.resume):
        with pytest.raises(RuntimeError, match="WorkingSet is closed"):
            call()
    assert not plain.is_suspended
    with pytest.raises(TypeError, match="suspendable"):
        WorkingSet(BUDGET, Device(0), suspendable=1)


def test_a_capture_is_not_broken(working, alloc):
    group, result, stream = working.add(layer(0)), alloc(SIZE), Stream()
    read(group, result, stream)
    with capturing(stream), pytest.raises(RuntimeError, match="while a stream captures a graph"):
        working.suspend()
    assert read(group, result, stream) == (pattern(SIZE, 0), True)
    working.suspend()
    with capturing(stream), pytest.raises(RuntimeError, match="while a stream captures a graph"):
        working.resume()
    assert working.is_suspended


def test_a_suspended_set_can_be_closed(working, alloc):
    group, result, stream = working.add(layer(0)), alloc(SIZE), Stream()
    working.suspend()
    use = group.use(stream=stream)
    working.close()
    result.copy_from(use.arrays[0], stream=stream)
    use.close()
    stream.sync()
    assert contents(result) == pattern(SIZE, 0) and not working.is_suspended


@pytest.mark.emulator_only("fills the device")
def test_a_device_without_room_leaves_the_set_suspended(working, alloc):
    group, result, stream = working.add(layer(0)), alloc(SIZE), Stream()
    working.suspend()
    room = free() - BUDGET // 2
    with WorkingSet(room, Device(0), suspendable=True):
        with pytest.raises(MemoryError, match=f"{BUDGET} bytes of Device.0. .* and 4194304 are"):
            working.resume()
        assert working.is_suspended
        assert read(group, result, stream) == (pattern(SIZE, 0), False)
    working.resume()
    assert read(group, result, stream) == (pattern(SIZE, 0), True)


# After their work, as nothing can free memory whose creation was reported as failed.
REPORTED = ["cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuCtxSynchronize"]


@pytest.mark.emulator_only("makes driver calls fail")
@pytest.mark.parametrize("function", ["*", *REPORTED])
def test_each_call_may_fail(alloc, function):
    """The set is suspended or it is not; contents and graphs are right in both."""
    result, stream, failed = alloc(SIZE), Stream(), 0
    Device(0).set_current()
    for number in range(1, 100):
        working, graph, happened = suspendable(), Graph(), False
        group = working.add(layer(0), "write")
        capture_reads(graph, [group], [result], stream)
        for call in (working.suspend, working.resume):
            emulator.fail(function, number, after=function != "*")
            try:
                call()
            except CUDAError as error:
                assert error.code == 999
                failed += 1
            happened |= emulator.failure_fired()
            emulator.clear_failures()
            graph.launch(stream)
            assert contents(result) == pattern(SIZE, 0)
            assert read(group, result, stream) == (pattern(SIZE, 0), not working.is_suspended)
            call()
            assert working.is_suspended == (call == working.suspend)
        graph.destroy()
        working.close()
        if not happened:
            assert failed or function == "cuMemRelease"  # it is called again
            return
    raise AssertionError("its calls do not end")


def test_threads_use_the_set_meanwhile(working, alloc):
    results = [alloc(SIZE) for _ in range(COUNT)]
    groups = [working.add(layer(n), "write") for n in range(COUNT)]
    wrong, ended = [], threading.Event()

    def use(number):
        with Stream() as stream:
            while not ended.is_set():
                if read(groups[number], results[number], stream)[0] != pattern(SIZE, number):
                    wrong.append(number)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(COUNT)]
    for thread in threads:
        thread.start()
    done = 0
    for _ in range(2000):
        try:
            working.suspend()
            working.resume()
            done += 1
        except RuntimeError:
            continue  # in use
        if done == 5:
            break
    ended.set()
    for thread in threads:
        thread.join()
    assert not wrong and working.stats().failures == 0


class TestMemoryOfTheSet:
    """Slabs and frames, of which sets and offload() are made."""

    def test_the_second_time_changes_nothing(self):
        slab = _Slab(0, PAGE, False, True)
        for change, is_suspended in ((slab.suspend, True), (slab.resume, False)):
            change()
            calls = recorded(change) if EMULATED else change() or []
            assert not [call for call in calls if call.name.startswith("cuMem")]
            assert slab.is_suspended == is_suspended

    def test_plain_memory_is_refused(self):
        with pytest.raises(RuntimeError, match="it was made without suspendable=True"):
            _Slab(0, PAGE, False).suspend()

    def test_a_closed_set_is_refused(self):
        frames = _Frames(0, PAGE, False, False, True)
        frames.close()
        for change in (frames.suspend, frames.resume):
            with pytest.raises(RuntimeError, match="closed"):
                change()

    @pytest.mark.parametrize("place", [("x", PAGE), (0, "x")])
    def test_a_place_of_no_number_is_refused(self, place):
        with pytest.raises(TypeError, match="must be an int"):
            _Slab.at(*place)
