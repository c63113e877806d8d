"""Graphs that are captured in uses of a working set: contents at each launch, and memory."""

import contextlib
import ctypes
import gc

import pytest

from contents import contents, pattern
from graphs import Graph, capture_reads, copy
from kernels import read_by_device
from layers import SIZE, layer
from managedmem import Device, ManagedWorkingSet, Stream, WorkingSet, emulator

pytestmark = pytest.mark.usefixtures("current_device")

COUNT = 6


@pytest.fixture
def graph():
    Device(0).set_current()  # driver calls of the test need a context
    made = Graph()
    yield made
    made.destroy()


def add_groups(working, access="read"):
    return [working.add(layer(n), access) for n in range(COUNT)]


@pytest.fixture
def results(alloc):
    return [alloc(SIZE) for _ in range(COUNT)]


def rewrite(groups, first):
    """Change all homes; return what they hold."""
    for n, group in enumerate(groups):
        with group.use_on_host(access="write") as (home,):
            home.numpy()[:] = memoryview(pattern(SIZE, first + n))
    return [pattern(SIZE, first + n) for n in range(len(groups))]


def test_each_launch_reads_what_is_at_home(graph, results, stream):
    with WorkingSet(4 * SIZE, Device(0)) as working:
        groups = add_groups(working)
        capture_reads(graph, groups, results, stream)
        assert working.stats().mapped == 0
        for launch in range(3):
            wanted = rewrite(groups, 10 * launch + 10)
            graph.launch(stream)
            assert [contents(result) for result in results] == wanted
            for group, result in zip(groups, results, strict=True):  # and uses without it
                with group.use(stream=stream) as use:
                    assert use.is_resident
                    copy(result.handle, use.arrays[0].handle, stream.handle)
            stream.sync()
            assert [contents(result) for result in results] == wanted
        assert working.stats().failures == 0
        assert working.stats().kept == 4 * SIZE


def test_writes_go_home_at_each_launch(graph, alloc, stream):
    source = alloc(SIZE)
    with WorkingSet(4 * SIZE, Device(0)) as working:
        groups = add_groups(working, "write")
        with graph.capture(stream):
            for group in groups:
                with group.use(stream=stream) as use:
                    copy(use.arrays[0].handle, source.handle, stream.handle)
        for launch in range(2):
            ctypes.memmove(source.handle, pattern(SIZE, 50 + launch), SIZE)
            graph.launch(stream)
            for group in groups:
                with group.use(stream=stream, access="read") as use:
                    copy(source.handle, use.arrays[0].handle, stream.handle)
                stream.sync()
                assert contents(source) == pattern(SIZE, 50 + launch)
                with group.use_on_host() as (home,):
                    assert bytes(home.numpy()) == pattern(SIZE, 50 + launch)


def test_half_of_the_budget_is_lent_to_graphs(graph, results, stream):
    with WorkingSet(4 * SIZE, Device(0)) as working:
        groups = add_groups(working)
        capture_reads(graph, groups, results, stream)

        def uses_in_frames():
            with contextlib.ExitStack() as open_uses:
                uses = [open_uses.enter_context(g.use(stream=stream)) for g in groups[:4]]
                return sum(use.is_resident for use in uses)

        assert uses_in_frames() == 2
        graph.destroy()
        assert uses_in_frames() == 4


def test_memory_outlives_the_set(graph, results, stream):
    working = WorkingSet(4 * SIZE, Device(0))
    groups = add_groups(working)
    capture_reads(graph, groups, results, stream)
    working.remove(groups[0])
    working.close()
    del working, groups
    gc.collect()
    graph.launch(stream)
    assert [contents(result) for result in results] == [pattern(SIZE, n) for n in range(COUNT)]
    graph.launch(stream)


@pytest.mark.emulator_only("the driver of a GPU counts more than this")
def test_memory_is_freed_behind_the_last_graph(graph, results, stream):
    before = emulator.live().allocations
    working = WorkingSet(4 * SIZE, Device(0))
    capture_reads(graph, add_groups(working), results, stream)
    working.close()
    del working
    gc.collect()
    assert emulator.live().allocations > before
    graph.destroy()
    WorkingSet(SIZE, Device(0)).close()  # frees what was left
    assert emulator.live().allocations == before


def test_an_array_that_is_kept_keeps_its_frame(graph, results, stream):
    with WorkingSet(4 * SIZE, Device(0)) as working:
        groups = add_groups(working)
        with graph.capture(stream):
            with groups[0].use(stream=stream) as use:
                kept = use.arrays[0]
            for group, result in zip(groups, results, strict=True):
                with group.use(stream=stream) as use:
                    copy(result.handle, use.arrays[0].handle, stream.handle)
            copy(results[1].handle, kept.handle, stream.handle)
        del kept, use
        graph.launch(stream)
        assert contents(results[1]) == pattern(SIZE, 0)
        assert [contents(r) for r in results[2:]] == [pattern(SIZE, n) for n in range(2, COUNT)]


def test_managed_groups_stay_at_their_address(graph, results, alloc, stream):
    layers = [alloc(SIZE) for _ in range(COUNT)]
    for n, each in enumerate(layers):
        ctypes.memmove(each.handle, pattern(SIZE, n), SIZE)
    if not Device(0).concurrent_managed_access:
        pytest.skip("ManagedWorkingSet needs concurrent managed access")
    with ManagedWorkingSet(4 * SIZE, Device(0)) as working:
        groups = [working.add(each) for each in layers]
        with graph.capture(stream):
            for group, result in zip(groups, results, strict=True):
                with group.use(stream=stream) as use:
                    assert not use.is_resident
                    copy(result.handle, use.arrays.handle, stream.handle)
        graph.launch(stream)
        assert [contents(result) for result in results] == [pattern(SIZE, n) for n in range(COUNT)]


def keep_captured(graph, group, stream):
    """An array of a use that is over, and was captured."""
    with graph.capture(stream), group.use(stream=stream, access="read") as use:
        assert use.is_resident
        return use.arrays[0]


def test_a_write_beside_a_kept_array_of_a_capture_goes_home(graph, alloc, stream):
    source = alloc(SIZE)
    source.fill(9)
    Device(0).sync()
    with WorkingSet(8 * SIZE, Device(0)) as working:
        (group, *_) = add_groups(working, "write")
        kept = keep_captured(graph, group, stream)
        with group.use(stream=stream) as use:
            copy(use.arrays[0].handle, source.handle, stream.handle)
        del use
        with group.use_on_host() as (home,):
            assert set(bytes(home)) == {9}
        del kept
        working.remove(group)
        assert working.stats().failures == 0


@pytest.mark.parametrize("in_use", [False, True])
def test_an_array_that_outlives_its_graph_ends_no_other_use(graph, stream, in_use):
    with WorkingSet(2 * SIZE, Device(0)) as working, Stream() as other:
        group, *rest = add_groups(working)
        kept = keep_captured(graph, group, stream)
        graph.destroy()
        opened = [group.use(stream=other)] if in_use else []
        del kept
        opened += [each.use(stream=other) for each in rest[: 3 - in_use]]
        assert [each.is_resident for each in opened] == [True, True, False]
        if in_use:
            assert read_by_device(opened[0].arrays[0], other) == pattern(SIZE, 0)
        for use in opened:
            use.close()
        opened.clear()
        del use
        working.remove(group)


def test_an_end_elsewhere_takes_no_frame_from_a_later_use(graph, alloc, results, stream):
    """Its frame has no work that others could follow, so that a later use gets another one."""
    result = alloc(SIZE)
    with WorkingSet(8 * SIZE, Device(0)) as working, Stream() as other:
        group, *rest = add_groups(working)
        with graph.capture(stream):
            first, second = group.use(stream=stream), group.use(stream=stream)
            first.close(stream=other)
            with group.use(stream=stream) as use:
                source = use.arrays[0].handle
                second.close()
                for each in rest:
                    with each.use(stream=stream) as one:
                        assert one.arrays[0].handle != source
                del one
                copy(result.handle, source, stream.handle)
        graph.launch(stream)
        assert contents(result) == pattern(SIZE, 0)
        del use, first, second
        graph.destroy()


def test_a_use_that_ends_behind_its_graph_writes_no_frame_home(graph, stream):
    with WorkingSet(2 * SIZE, Device(0)) as working:
        group, other, *_ = add_groups(working, "write")
        with graph.capture(stream):
            late = group.use(stream=stream)
        graph.destroy()
        with other.use(stream=stream):
            pass
        late.close()
        assert working.stats().failures == 1
        assert "a graph capture ended after it" in working.stats().last_error
        with group.use_on_host() as (home,):
            assert bytes(home) == pattern(SIZE, 0)


@pytest.mark.parametrize("destroyed", [False, True])
def test_an_array_that_outlives_its_use_does_not_hide_what_a_launch_wrote(
    graph, alloc, stream, destroyed
):
    source = alloc(SIZE)
    source.fill(7)
    Device(0).sync()
    with WorkingSet(4 * SIZE, Device(0)) as working, Stream() as other:
        (group, *_) = add_groups(working, "write")
        with group.use(stream=other, access="read") as use:
            late = use.arrays
        with graph.capture(stream), group.use(stream=stream) as use:
            assert use.is_resident
            copy(use.arrays[0].handle, source.handle, stream.handle)
        graph.launch(stream)
        if destroyed:
            graph.destroy()
        for _ in range(2):
            with group.use(stream=other, access="read") as use:
                assert not use.is_resident
                assert set(read_by_device(use.arrays[0], other)) == {7}
        del late
        with group.use(stream=other, access="read") as use:
            assert use.is_resident
            assert set(read_by_device(use.arrays[0], other)) == {7}


def test_a_use_that_ends_behind_the_capture_is_told_if_it_writes(graph, alloc, stream):
    with WorkingSet(4 * SIZE, Device(0)) as working:
        (group, *_) = add_groups(working, "write")
        with graph.capture(stream):
            use = group.use(stream=stream)
        use.close()
        assert working.stats().failures == 1
        assert "began in a graph capture ended after it" in working.stats().last_error
        graph.launch(stream)
        with group.use_on_host() as (home,):
            assert bytes(home.numpy()) == pattern(SIZE, 0)


def test_the_whole_set_may_be_dropped_in_a_capture(graph, results, stream):
    with graph.capture(stream):
        with WorkingSet(4 * SIZE, Device(0)) as working:
            (group, *_) = add_groups(working)
            with group.use(stream=stream) as use:
                copy(results[0].handle, use.arrays[0].handle, stream.handle)
            del use
        del working, group
        gc.collect()
    graph.launch(stream)
    assert contents(results[0]) == pattern(SIZE, 0)
