"""WorkingSet: arrays that outlive their use, groups that are removed, and the end of a set."""

import gc
import weakref

import pytest

from constants import PAGE
from contents import pattern
from kernels import read_by_device, write_by_device
from layers import SIZE, layer, use_all
from managedmem import Device, Stream, WorkingSet, emulator


class TestLateArrays:
    """Arrays that outlive their use keep their frame and their contents."""

    def test_others_come_and_go(self, working, groups, stream):
        with groups[0].use(stream=stream) as use:
            late = use.arrays[0]
        use_all(groups[1:] * 2, stream)
        assert groups[0].is_resident
        assert read_by_device(late, stream) == pattern(SIZE, 0)
        with pytest.raises(RuntimeError, match="drop the references to their arrays"):
            working.remove(groups[0])
        del late
        use_all(groups[1:], stream)
        assert not groups[0].is_resident
        working.remove(groups[0])

    def test_views_keep_the_frame_too(self, working, groups, stream):
        use = groups[0].use(stream=stream)
        view = use.arrays[0][PAGE : 2 * PAGE].view("float32")
        use.close()
        del use
        use_all(groups[1:], stream)
        assert read_by_device(view, stream) == pattern(SIZE, 0)[PAGE : 2 * PAGE]

    def test_what_was_written_is_at_home_all_the_same(self, working, stream):
        group = working.add(layer(0), "write")
        with group.use(stream=stream) as use:
            write_by_device(use.arrays[0], 5, stream)
            late = use.arrays
        with group.use_on_host() as (home,):
            assert bytes(home) == bytes([5]) * SIZE
        with (
            pytest.raises(RuntimeError, match="the device uses"),
            group.use_on_host(access="write"),
        ):
            raise AssertionError
        with group.use(stream=stream) as use:
            assert use.arrays[0].handle == late[0].handle
            write_by_device(use.arrays[0], 6, stream)
        with group.use_on_host() as (home,):
            assert bytes(home) == bytes([6]) * SIZE

    def test_after_the_stream_was_closed(self, working, groups):
        with Stream() as stream:
            with groups[0].use(stream=stream) as use:
                late = use.arrays
            stream.sync()
        del late, use
        working.remove(groups[0])

    def test_after_the_set(self, stream):
        working = WorkingSet(2 * SIZE, 0)
        group = working.add(layer(7))
        with group.use(stream=stream) as use:
            late = use.arrays[0]
        gone = weakref.ref(working)
        working.close()
        del working, group, use
        gc.collect()
        assert read_by_device(late, stream) == pattern(SIZE, 7)
        del late
        gc.collect()
        assert gone() is None


class TestRemove:
    def test_the_others_go_on(self, working, groups, stream):
        working.order = groups
        use_all(groups * 2, stream)
        working.remove(groups[3])
        others = groups[:3] + groups[4:]
        assert len(working) == 15 and [*working] == others and working.order == tuple(others)
        before = working.stats()
        use_all(others * 3, stream)
        after = working.stats()
        assert after.hits - before.hits == after.acquired - before.acquired == 45

    @pytest.mark.parametrize("number", [0, 7, 15])
    def test_the_learned_order_goes_on(self, working, groups, stream, number):
        """Even at the turns of a loop that goes forward and then back."""
        use_all((groups + groups[::-1]) * 2, stream)
        working.remove(groups.pop(number))
        before = working.stats()
        use_all((groups + groups[::-1]) * 2, stream)
        assert working.stats().hits - before.hits == 60

    def test_a_later_use_names_the_group(self, working, groups):
        group = groups[0]
        with group.use():
            pass
        working.remove(group)
        for call in (group.use, lambda: working.add(layer(0)) and group.use(access="read")):
            with pytest.raises(RuntimeError, match=r"^<WorkingGroup name='layer 0' .*was removed"):
                call()
        with pytest.raises(ValueError, match="was removed from the set"):
            working.remove(group)
        with pytest.raises(ValueError, match="was removed from the set"):
            working.order = [group]
        assert group.set is working and group.nbytes == SIZE and not group.is_resident
        assert repr(group).endswith(f"nbytes={SIZE} removed>")

    def test_contents_stay(self, working, stream):
        group = working.add(layer(0), "write")
        with group.use(stream=stream) as use:
            write_by_device(use.arrays[0], 4, stream)
        working.remove(group)
        assert working.nbytes == 0
        with group.use_on_host() as (home,):
            assert bytes(home) == bytes([4]) * SIZE

    def test_a_group_in_use_stays(self, working, groups):
        with groups[0].use(), pytest.raises(RuntimeError, match="is in use: close its uses"):
            working.remove(groups[0])
        with groups[0].use_on_host(), pytest.raises(RuntimeError, match="is in use"):
            working.remove(groups[0])
        assert len(working) == 16
        working.remove(groups[0])

    def test_the_given_order_forgets(self, working, groups):
        working.order = [*groups[:3], groups[1]]
        working.remove(groups[1])
        assert working.order == (groups[0], groups[2])
        working.remove(groups[0])
        working.remove(groups[2])
        assert working.order is None

    def test_takes_groups_of_the_set(self, working):
        with WorkingSet(SIZE, 0) as other:
            theirs = other.add(layer(0))
            with pytest.raises(ValueError, match=r"<WorkingGroup .* is a group of another set"):
                working.remove(theirs)
            for bad in (None, 0, working):
                with pytest.raises(TypeError, match="a WorkingGroup is needed, got"):
                    working.remove(bad)
        with pytest.raises(RuntimeError, match="WorkingSet is closed"):
            other.remove(theirs)

    def test_a_removed_group_is_garbage_without_its_set(self, working, groups):
        group = groups.pop(0)
        with group.use():
            pass
        working.remove(group)
        gone = weakref.ref(group)
        del group
        gc.collect()
        assert gone() is None
        use_all(groups)

    def test_many_come_and_go(self, working, stream):
        for number in range(100):
            group = working.add(layer(number), ["read", "write"][number % 2])
            with group.use(stream=stream) as use:
                assert use.is_resident
                assert read_by_device(use.arrays[0], stream) == pattern(SIZE, number)
            working.remove(group)
        assert len(working) == 0 and working.nbytes == 0 and working.stats().failures == 0


class TestTheEnd:
    def test_everything_is_a_runtime_error(self, working, groups):
        use_all(groups[:2])
        working.close()
        working.close()
        assert working.nbytes == 0 and not groups[0].is_resident
        assert working.is_closed and repr(working).endswith(" closed>")
        assert len(working) == 16 and working.stats().acquired == 2
        for call in (
            groups[0].use,
            working.__enter__,
            lambda: working.add(layer(0)),
            lambda: working.remove(groups[0]),
            lambda: setattr(working, "order", groups),
        ):
            with pytest.raises(RuntimeError, match="WorkingSet is closed"):
                call()
        with groups[1].use_on_host() as (home,):
            assert bytes(home) == pattern(SIZE, 1)

    def test_uses_go_on(self, stream):
        working = WorkingSet(2 * SIZE, 0)
        group, other = working.add(layer(0), "write"), working.add(layer(1), "write")
        use, late = group.use(stream=stream), other.use(stream=stream)
        working.close()
        for each, value in ((use, 8), (late, 9)):
            write_by_device(each.arrays[0], value, stream)
        late_array = late.arrays[0]
        use.close()
        late.close()
        for each, value in ((group, 8), (other, 9)):
            with each.use_on_host() as (home,):
                assert bytes(home) == bytes([value]) * SIZE
        assert read_by_device(late_array, stream) == bytes([9]) * SIZE

    @pytest.mark.emulator_only("counts the driver's objects")
    def test_frames_are_freed_with_the_last_array(self, stream):
        start = emulator.live().allocations
        working = WorkingSet(2 * SIZE, 0)
        group = working.add(layer(0))
        use = group.use(stream=stream)
        late = use.arrays
        working.close()
        assert emulator.frames(Device(0)).plain > 0
        use.close()
        assert emulator.live().allocations == start + 1
        del late, use
        assert emulator.live().allocations == start

    def test_a_set_without_references(self):
        working = WorkingSet(2 * SIZE, 0)
        groups = [working.add(layer(number), "write") for number in range(3)]
        uses = [group.use() for group in groups]
        gone = weakref.ref(working)
        del working, groups
        gc.collect()
        assert gone() is not None
        del uses
        gc.collect()
        assert gone() is None

    def test_a_group_keeps_its_set(self):
        group = WorkingSet(2 * SIZE, 0).add(layer(0))
        gc.collect()
        with group.use():
            assert group.set.nbytes == SIZE
        group.set.close()

    def test_it_has_room_for_the_next_one(self):
        for _ in range(3):
            with WorkingSet("16 MiB", 0) as working:
                use_all([working.add(layer(n), "write") for n in range(3)])
