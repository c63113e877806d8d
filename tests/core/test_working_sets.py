"""WorkingSet: its arguments, what it holds, what it moves, and that contents stay right."""

import contextlib
import gc
import random
import weakref

import pytest

import managedmem
from constants import EMULATED, PAGE
from contents import contents, pattern, write
from live_memory import settle
from managedmem import Device, Host, Stream, WorkingSet
from programs import run_python

SIZE = 16 * PAGE


@pytest.fixture
def layers(alloc):
    """16 buffers with contents of their own."""
    made = [alloc(SIZE) for _ in range(16)]
    for number, buffer in enumerate(made):
        write(buffer, pattern(SIZE, number))
    return made


@pytest.fixture
def working():
    with WorkingSet(4 * SIZE, Device(0)) as made:
        yield made


@pytest.fixture
def stream():
    with Stream() as made:
        yield made


class TestArguments:
    @pytest.mark.parametrize("budget", [0, -1, 1 << 63])
    def test_budget_must_be_bytes(self, budget):
        text = {0: "must be 1 byte or more", -1: "must be 0 bytes or more"}.get(budget, "")
        with pytest.raises(ValueError, match=f"budget .*{text}.*{budget}$"):
            WorkingSet(budget)

    @pytest.mark.parametrize("budget", ["64", 1.5, None, True])
    def test_budget_must_be_an_int(self, budget):
        with pytest.raises(TypeError, match="budget"):
            WorkingSet(budget)

    @pytest.mark.parametrize("device", [Host(), "cuda", 1.0])
    def test_device_must_be_one(self, device):
        with pytest.raises((TypeError, ValueError)):
            WorkingSet(SIZE, device)

    def test_device_that_does_not_exist(self):
        with pytest.raises(ValueError, match="99"):
            WorkingSet(SIZE, 99)

    def test_device_is_the_current_one_if_left_out(self, device1):
        device1.set_current()
        try:
            with WorkingSet(SIZE) as working:
                assert working.device is device1
        finally:
            Device(0).set_current()

    def test_attributes(self, working, layers):
        group = working.add(layers[0], name="first")
        assert (working.budget, working.device, working.nbytes) == (4 * SIZE, Device(0), 0)
        assert (group.nbytes, group.name, group.access) == (SIZE, "first", "read")
        assert group.set is working and not group.is_resident
        assert len(working) == 1 and [*working] == [group]
        assert repr(working) == f"<WorkingSet groups=1 nbytes=0 budget={4 * SIZE} Device(0)>"
        assert repr(group) == f"<WorkingGroup number=0 name='first' access=read nbytes={SIZE}>"
        assert repr(working.add(layers[1])).startswith("<WorkingGroup number=1 access=read")

    def test_pages_count_whole_and_once(self, working, alloc):
        buffer = alloc(4 * PAGE)
        assert working.add([buffer[10:20], buffer[30 : PAGE + 1], buffer[:1]]).nbytes == 2 * PAGE

    @pytest.mark.parametrize("access", ["", "Read", None, 1])
    def test_access_must_be_known(self, working, layers, access):
        with pytest.raises(ValueError, match=r"access must be .* got"):
            working.add(layers[0], access)
        assert len(working) == 0

    def test_name_must_be_text(self, working, layers):
        with pytest.raises(TypeError, match="name"):
            working.add(layers[0], name=3)

    @pytest.mark.parametrize("targets", [object(), None, [object()]])
    def test_targets_must_be_memory(self, working, targets):
        with pytest.raises(TypeError):
            working.add(targets)
        assert len(working) == 0

    def test_no_targets(self, working):
        group = working.add([])
        assert group.nbytes == 0
        with group.use():
            pass
        working.remove(group)

    def test_memory_that_is_not_managed(self, working):
        with pytest.raises(ValueError, match="managed-memory allocation"):
            working.add(bytearray(SIZE))

    def test_memory_of_another_group(self, working, layers):
        working.add(layers[0][:PAGE])
        working.add(layers[0][PAGE : 2 * PAGE])
        with pytest.raises(ValueError, match=r"share the page at 0x[0-9a-f]+ with group 1"):
            working.add([layers[1], layers[0][2 * PAGE - 1 :]])
        with pytest.raises(ValueError, match=r"share the page at .* with group [01] of the"):
            working.add(layers[0])
        assert len(working) == 2

    def test_memory_of_another_set(self, working, layers):
        layers[0].preferred_location = Device(0)
        working.add(layers[0][: 4 * PAGE])
        with WorkingSet(SIZE) as other:
            page = layers[0].handle + 3 * PAGE
            with pytest.raises(ValueError, match=f"{page:#x} with group 0 of another working set"):
                other.add([layers[1], layers[0][3 * PAGE :]])
            assert len(other) == 0
            other.add([layers[1], layers[0][4 * PAGE :]])
            working.close()
            other.add(layers[0][: 4 * PAGE])
        assert layers[0].preferred_location is Device(0)

    def test_memory_after_other_memory_that_was_closed(self, working, alloc):
        """New memory may have the addresses of memory that a group still counts."""
        for _ in range(4):
            buffer = alloc(SIZE)
            working.add(buffer)
            buffer.close()
        assert len(working) == 4

    def test_empty_targets(self, working, alloc):
        group = working.add([alloc(SIZE)[:0], managedmem.empty(0)])
        assert group.nbytes == 0
        assert group.acquire()
        group.release()

    def test_groups_are_made_by_sets_only(self):
        for kind in (managedmem.WorkingGroup, managedmem.WorkingUse):
            with pytest.raises(TypeError):
                kind()

    @pytest.mark.parametrize("bad", [3, "s0", 1.5])
    def test_stream_must_be_one(self, working, layers, bad):
        group = working.add(layers[0])
        for call in (group.use, group.acquire, group.release):
            if bad == 3:
                continue  # a handle, which only the driver knows
            with pytest.raises(TypeError):
                call(stream=bad)

    def test_too_few_and_too_many(self, working, layers):
        group = working.add(layers[0], name=None)
        assert group.name is None
        for call in (
            WorkingSet,
            working.add,
            lambda: group.acquire(None),
            lambda: group.release(None),
            lambda: group.use(streams=None),
        ):
            with pytest.raises(TypeError):
                call()

    def test_device_of_none_is_the_current_one(self):
        with WorkingSet(SIZE, None) as made:
            assert made.device is Device()


class TestOrder:
    def test_is_none_until_it_is_given(self, working, layers):
        groups = [working.add(layer) for layer in layers]
        assert working.order is None
        working.order = iter(groups[::-1])
        assert working.order == tuple(groups[::-1])
        working.order = []
        assert working.order is None
        working.order = groups
        working.order = None
        assert working.order is None

    def test_takes_groups_of_the_set(self, working, layers):
        with WorkingSet(SIZE) as other:
            theirs = other.add(layers[0])
            ours = working.add(layers[1])
            with pytest.raises(ValueError, match=r"order\[1\] is a group of another working set"):
                working.order = [ours, theirs]
            with pytest.raises(TypeError, match=r"order\[0\] must be a WorkingGroup, got 1"):
                working.order = [1]
            with pytest.raises(AttributeError, match="None"):
                del working.order
        assert working.order is None

    def test_given_order_has_no_misses(self, working, layers, stream):
        groups = [working.add(layer) for layer in layers]
        working.order = odd = groups[1::2] + groups[::2]
        for group in odd * 3:
            with group.use(stream=stream):
                pass
        stats = working.stats()
        assert (stats.acquired, stats.hits, stats.loaded, stats.mapped) == (48, 47, 1, 0)

    def test_learned_order_has_no_misses_after_the_first_round(self, working, layers, stream):
        groups = [working.add(layer) for layer in layers]
        mixed = random.Random(3).sample(groups, 16)
        for group in mixed:
            with group.use(stream=stream):
                pass
        for group in mixed:  # the first group follows the last one for the first time
            with group.use(stream=stream):
                pass
        before = working.stats()
        for group in mixed * 4:
            with group.use(stream=stream):
                pass
        after = working.stats()
        assert after.hits - before.hits == after.acquired - before.acquired == 64

    def test_small_groups_are_loaded_farther_ahead(self, alloc, stream):
        """Until they have a quarter of the budget, so that many are left for another round."""
        memory = alloc(64 * PAGE)
        with WorkingSet(40 * PAGE, Device(0)) as working:
            groups = [working.add(memory[i * PAGE :][:PAGE]) for i in range(64)]
            with groups[0].use(stream=stream):
                pass
            assert working.stats().ahead == 10 and working.nbytes == 11 * PAGE

    def test_back_and_forth(self, working, layers, stream):
        groups = [working.add(layer) for layer in layers]
        for _ in range(2):
            for group in groups + groups[::-1]:
                with group.use(stream=stream):
                    pass
        before = working.stats()
        for group in (groups + groups[::-1]) * 3:
            with group.use(stream=stream):
                pass
        assert working.stats().hits - before.hits == 96


class TestUses:
    def test_use_gives_the_group(self, working, layers, stream):
        group = working.add(layers[0])
        use = group.use(stream=stream)
        for _ in range(2):
            with use as given, use:
                assert given is group

    def test_acquire_says_if_there_is_room(self, working, layers):
        groups = [working.add(layer) for layer in layers[:6]]
        assert [group.acquire() for group in groups] == [True] * 4 + [False] * 2
        assert groups[0].acquire()
        for group in [*groups, groups[0]]:
            group.release()
        assert working.stats().mapped == 2
        assert groups[5].acquire()
        groups[5].release()

    def test_a_group_larger_than_the_budget_stays_at_home(self, working, layers):
        group = working.add(layers[:5])
        assert set(layers[4].accessed_by) == {Device(0)}
        for _ in range(3):
            assert not group.acquire()
            group.release()
        assert working.stats()[:5] == (3, 0, 0, 3, 0) and working.nbytes == 0

    def test_is_resident(self, working, layers, stream):
        group = working.add(layers[0])
        assert not group.is_resident
        with group.use(stream=stream):
            stream.sync()
            assert group.is_resident
        with working.add(layers[1:5]).use(stream=stream):
            stream.sync()
        assert not group.is_resident

    @pytest.mark.emulator_only
    def test_a_trace_has_its_calls(self, working, layers, stream):
        groups = [working.add(layer, "write") for layer in layers[:8]]
        with managedmem.trace() as trace:
            for group in groups:
                with group.use(stream=stream):
                    pass
            stream.sync()
        moved = trace.total.to_device  # with what was loaded ahead meanwhile
        assert moved >= 8 * SIZE and moved % SIZE == 0

    @pytest.mark.emulator_only
    def test_a_driver_without_discards_keeps_scratch_contents(self):
        run_python(
            """
            import managedmem as mm
            from contents import contents, pattern, write
            buffers = [mm.empty(4096) for _ in range(2)]
            for number, buffer in enumerate(buffers):
                write(buffer, pattern(4096, number))
            with mm.WorkingSet(4096) as working:
                for group in [working.add(buffer, "scratch") for buffer in buffers] * 3:
                    with group.use():
                        pass
                mm.Device(0).sync()
            for number, buffer in enumerate(buffers):
                assert contents(buffer) == pattern(4096, number)
            """,
            emulator="driver=12080",
        )

    def test_release_without_acquire(self, working, layers):
        group = working.add(layers[0])
        with pytest.raises(RuntimeError, match="not acquired"):
            group.release()
        group.acquire()
        group.release()
        with pytest.raises(RuntimeError, match="not acquired"):
            group.release()

    def test_an_exception_releases(self, working, layers):
        group = working.add(layers[0])
        with pytest.raises(KeyError), group.use():
            raise KeyError
        with pytest.raises(RuntimeError, match="not acquired"):
            group.release()

    def test_closed_stream(self, working, layers):
        group = working.add(layers[0])
        stream = Stream()
        stream.close()
        with pytest.raises(RuntimeError, match="Stream is closed"):
            group.acquire(stream=stream)
        group.acquire()
        with pytest.raises(RuntimeError, match="Stream is closed"):
            group.release(stream=stream)
        group.release()

    def test_stream_closed_during_a_use(self, working, layers):
        group = working.add(layers[0], "scratch")
        stream = Stream()
        with pytest.raises(RuntimeError, match="Stream is closed"), group.use(stream=stream):
            stream.close()
        with pytest.raises(RuntimeError, match="group 0 is not acquired"):
            group.release()
        with working.add(layers[1:5]).use():
            pass  # which drops the group, with its contents
        Device(0).sync()
        assert contents(layers[0]) == pattern(SIZE, 0)

    def test_closed_memory(self, working, layers, stream):
        group = working.add(layers[:2])
        with group.use(stream=stream):
            pass
        layers[1].close()
        with pytest.raises(RuntimeError, match=r"group 0: targets\[1\]: ManagedBuffer is closed"):
            group.acquire(stream=stream)
        with working.add(layers[2:5]).use(stream=stream), working.add(layers[5]).use():
            pass  # which drops the group

    def test_memory_closed_during_a_use(self, working, layers, stream):
        groups = [working.add(layer) for layer in layers[:8]]
        with groups[0].use(stream=stream):
            layers[0].close()
        for group in groups[1:]:
            with group.use(stream=stream):
                pass

    def test_many_streams(self, working, layers):
        groups = [working.add(layer, "write") for layer in layers]
        streams = [Stream() for _ in range(5)]
        chosen = random.Random(5)
        for _ in range(200):
            number, stream = chosen.randrange(16), chosen.choice(streams)
            with groups[number].use(stream=stream):
                layers[number].fill(number, stream=stream)
        for stream in streams:
            stream.sync()
            stream.close()
        for number, layer in enumerate(layers):
            assert contents(layer) in (pattern(SIZE, number), bytes([number]) * SIZE)


class TestTheEnd:
    def test_everything_is_a_runtime_error(self, working, layers):
        group = working.add(layers[0])
        with group.use():
            pass
        working.close()
        working.close()
        assert working.nbytes == 0 and not group.is_resident
        assert working.is_closed and repr(working).endswith(", closed>")
        assert len(working) == 1 and working.stats().acquired == 1
        for call in (group.acquire, group.use().__enter__, working.__enter__):
            with pytest.raises(RuntimeError, match="WorkingSet is closed"):
                call()
        with pytest.raises(RuntimeError, match="WorkingSet is closed"):
            working.add(layers[1])

    def test_a_use_ends_with_its_set(self, working, layers):
        group = working.add(layers[0])
        with group.use():
            working.close()
        group.release()

    def test_restores_the_advice(self, layers):
        layers[0].read_mostly = True
        layers[1].preferred_location = Device(0)
        layers[2].accessed_by = [Host()]
        layers[3][:PAGE].preferred_location = Host()
        before = [layer.page_runs() for layer in layers[:4]]
        with WorkingSet(2 * SIZE) as working:
            groups = [
                working.add(layers[0]),
                working.add(layers[1:3], "write"),
                working.add(layers[3], "scratch"),
            ]
            for layer in layers[:4]:
                assert layer.preferred_location is Device(0).nearest_host
                assert not layer.accessed_by
            for group in groups * 3:
                with group.use():
                    pass
        after = [layer.page_runs() for layer in layers[:4]]
        assert [[run[2:5] for run in runs] for runs in after] == [
            [run[2:5] for run in runs] for runs in before
        ]
        assert layers[0].read_mostly and layers[1].preferred_location is Device(0)
        assert set(layers[2].accessed_by) == {Host()}
        assert layers[3].preferred_location is None
        assert layers[3][:PAGE].preferred_location is Host()

    def test_restores_nothing_of_closed_memory(self, working, layers):
        working.add(layers[:3])
        layers[1].close()
        working.close()
        assert layers[0].preferred_location is None

    def test_releases_the_targets(self, layers):
        class Holder:
            def __init__(self, buffer):
                self.__cuda_array_interface__ = buffer.__cuda_array_interface__

        target = Holder(layers[0])
        gone = weakref.ref(target)
        working = WorkingSet(SIZE)
        group = working.add(target)
        del target
        gc.collect()
        assert gone() is not None and group.acquire()
        working.close()
        gc.collect()
        assert gone() is None

    def test_a_set_without_references(self, layers):
        working = WorkingSet(2 * SIZE)
        groups = [working.add(layer) for layer in layers]
        for group in groups:
            group.acquire()
        gone = weakref.ref(working)
        del working, groups, group
        gc.collect()
        assert gone() is None
        settle()
        assert layers[0].preferred_location is None

    def test_a_group_keeps_its_set(self, layers):
        group = WorkingSet(2 * SIZE).add(layers[0])
        gc.collect()
        with group.use():
            assert group.set.nbytes == SIZE
        group.set.close()


class TestRemove:
    def test_the_others_go_on(self, working, layers, stream):
        groups = [working.add(layer, name=f"layer {i}") for i, layer in enumerate(layers)]
        working.order = groups
        for group in groups * 2:
            with group.use(stream=stream):
                pass
        working.remove(groups[3])
        others = groups[:3] + groups[4:]
        assert len(working) == 15 and [*working] == others and working.order == tuple(others)
        before = working.stats()
        for group in others * 3:
            with group.use(stream=stream):
                pass
        after = working.stats()
        assert after.hits - before.hits == after.acquired - before.acquired == 45
        assert repr(groups[4]).startswith("<WorkingGroup number=4 ")
        assert repr(working).startswith("<WorkingSet groups=15 ")

    @pytest.mark.parametrize("number", [0, 7, 15])
    def test_the_learned_order_goes_on(self, working, layers, stream, number):
        """Also at the turns of a loop that goes forward and then back."""
        groups = [working.add(layer) for layer in layers]
        for group in (groups + groups[::-1]) * 2:
            with group.use(stream=stream):
                pass
        working.remove(groups.pop(number))
        before = working.stats()
        for group in (groups + groups[::-1]) * 2:
            with group.use(stream=stream):
                pass
        assert working.stats().hits - before.hits == 60

    def test_a_later_use_names_the_group(self, working, layers):
        first, second = working.add(layers[0], name="first"), working.add(layers[1])
        use = first.use()
        for group, named in ((first, "group 0, 'first',"), (second, "group 1")):
            working.remove(group)
            for call in (group.acquire, group.use().__enter__):
                with pytest.raises(RuntimeError, match=f"^{named} was removed from the working"):
                    call()
            with pytest.raises(RuntimeError, match="not acquired"):
                group.release()
            with pytest.raises(RuntimeError, match="was removed"):
                working.remove(group)
            assert group.set is working and group.nbytes == SIZE and not group.is_resident
            assert repr(group).endswith(f"nbytes={SIZE}, removed>")
        with pytest.raises(RuntimeError, match="removed"), use:
            pass

    def test_a_group_that_is_acquired_stays(self, working, layers, stream):
        group = working.add(layers[0], "write")
        group.acquire(stream=stream)
        with group.use(stream=stream):
            pass
        with pytest.raises(RuntimeError, match="group 0 is acquired: it can be removed once"):
            working.remove(group)
        assert [*working] == [group] and layers[0].preferred_location is Device(0).nearest_host
        group.release(stream=stream)
        working.remove(group)
        assert layers[0].preferred_location is None and len(working) == 0

    def test_restores_the_advice_and_leaves_contents(self, working, layers, stream):
        layers[0].read_mostly = True
        layers[1].preferred_location = Device(0)
        layers[2][:PAGE].accessed_by = [Host()]
        before = [layer.page_runs() for layer in layers[:3]]
        kinds = ["read", "write", "scratch", "write"]
        groups = [working.add(*pair) for pair in zip(layers, kinds, strict=False)]
        for group in groups * 3:
            with group.use(stream=stream):
                pass
        with groups[1].use(stream=stream):
            layers[1].fill(9, stream=stream)
        for group in groups[:3]:
            working.remove(group)
        after = [layer.page_runs() for layer in layers[:3]]
        assert [[run[2:5] for run in runs] for runs in after] == [
            [run[2:5] for run in runs] for runs in before
        ]
        assert layers[3].preferred_location is Device(0).nearest_host
        stream.sync()
        assert contents(layers[0]) == pattern(SIZE, 0)
        assert contents(layers[1]) == bytes([9]) * SIZE
        assert working.nbytes in (0, SIZE)

    @pytest.mark.parametrize("kind", ["read", "write", "scratch"])
    def test_memory_is_the_callers_again(self, working, layers, stream, kind):
        """Nothing that the set has queued, such as a discard, comes after the removal."""
        for round_ in range(20):
            groups = [working.add(layer, kind) for layer in layers[:6]]
            for group in groups * 2:
                with group.use(stream=stream):
                    pass
            for number, group in enumerate(groups):
                working.remove(group)
                write(layers[number], pattern(SIZE, number + round_))
            stream.sync()
            Device(0).sync()
            for number in range(6):
                assert contents(layers[number]) == pattern(SIZE, number + round_)
        assert len(working) == 0 and working.stats().failures == 0

    def test_memory_can_be_added_again(self, working, layers):
        first = working.add(layers[0])
        with WorkingSet(SIZE) as other:
            with pytest.raises(ValueError, match="another working set"):
                other.add(layers[0])
            working.remove(first)
            theirs = other.add(layers[0])
            assert theirs.acquire()
            theirs.release()
            other.remove(theirs)
        again = working.add(layers[0], "write")
        assert repr(again).startswith("<WorkingGroup number=1 ")
        with again.use():
            Device(0).sync()
            assert again.is_resident and not first.is_resident

    def test_the_given_order_forgets(self, working, layers):
        groups = [working.add(layer) for layer in layers[:3]]
        working.order = [*groups, groups[1]]
        working.remove(groups[1])
        assert working.order == (groups[0], groups[2])
        with pytest.raises(ValueError, match=r"order\[1\] was removed from the working set: <Work"):
            working.order = groups
        assert working.order == (groups[0], groups[2])
        working.remove(groups[0])
        working.remove(groups[2])
        assert working.order is None
        working.order = None

    def test_takes_groups_of_the_set(self, working, layers):
        with WorkingSet(SIZE) as other:
            theirs = other.add(layers[0])
            with pytest.raises(ValueError, match="another working set: <WorkingGroup"):
                working.remove(theirs)
            for bad in (None, 0, working, layers[0]):
                with pytest.raises(TypeError, match="group must be a WorkingGroup, got"):
                    working.remove(bad)
            assert len(other) == 1
        with pytest.raises(RuntimeError, match="WorkingSet is closed"):
            other.remove(theirs)
        with pytest.raises(TypeError):
            working.remove()

    def test_memory_that_was_closed(self, working, layers):
        group = working.add(layers[:2])
        with group.use():
            layers[1].close()
        working.remove(group)
        assert layers[0].preferred_location is None

    def test_an_empty_group_and_one_larger_than_the_budget(self, working, layers, alloc):
        empty, large = working.add(alloc(PAGE)[:0]), working.add(layers[:5])
        for group in (empty, large):
            with group.use():
                pass
            working.remove(group)
        assert not layers[4].accessed_by

    def test_releases_the_targets(self, working, layers):
        class Holder:
            def __init__(self, buffer):
                self.__cuda_array_interface__ = buffer.__cuda_array_interface__

        target = Holder(layers[0])
        gone = weakref.ref(target)
        group = working.add(target)
        del target
        with group.use():
            pass
        gc.collect()
        assert gone() is not None
        working.remove(group)
        gc.collect()
        assert gone() is None

    def test_a_removed_group_may_be_garbage_without_its_set(self, working, layers):
        group, other = working.add(layers[0]), working.add(layers[1])
        working.remove(group)
        cycle = [group]
        cycle.append(cycle)
        gone = weakref.ref(group)
        del group, cycle
        gc.collect()
        assert gone() is None and not working.is_closed
        with other.use():
            pass

    def test_many_come_and_go(self, working, layers):
        for number in range(300):
            group = working.add(layers[number % 16], ["read", "write"][number % 2])
            with group.use():
                pass
            working.remove(group)
        assert len(working) == 0 and working.nbytes == 0
        for number, layer in enumerate(layers):
            assert contents(layer) == pattern(SIZE, number)


class TestContents:
    def test_scratch_keeps_its_contents_until_its_first_use(self, layers, stream):
        with WorkingSet(2 * SIZE, Device(0)) as working:
            kinds = ["read", "scratch", "read", "read"]
            groups = [working.add(*pair) for pair in zip(layers, kinds, strict=False)]
            for number in [0, 2, 3] * 3:  # the scratch group is loaded ahead, and dropped
                with groups[number].use(stream=stream):
                    pass
            stream.sync()
        assert contents(layers[1]) == pattern(SIZE, 1)

    @pytest.mark.parametrize("seed", range(4))
    def test_random_uses(self, alloc, seed):
        """Reads, fills and copies on several streams, nested and not, of groups of all kinds."""
        chosen = random.Random(seed)
        sizes = [chosen.randrange(1, 12) * PAGE - chosen.randrange(3) for _ in range(12)]
        layers = [alloc(size) for size in sizes]
        kinds = [chosen.choice(["read", "write", "write", "scratch"]) for _ in layers]
        wanted = [pattern(size, number) for number, size in enumerate(sizes)]
        for layer, value in zip(layers, wanted, strict=True):
            write(layer, value)
        streams = [Stream(), Stream()]
        result = alloc(12 * PAGE)
        with WorkingSet(20 * PAGE, Device(0)) as working:
            groups = [working.add(*pair) for pair in zip(layers, kinds, strict=True)]
            if seed % 2:
                working.order = groups
            for step in range(300):
                number = step % 12 if chosen.random() < 0.7 else chosen.randrange(12)
                stream = chosen.choice(streams)
                with random_use(chosen, groups[number], stream):
                    other = groups[chosen.randrange(12)]
                    with random_use(chosen, other, stream):
                        if kinds[number] != "read":
                            value = chosen.randrange(256)
                            layers[number].fill(value, stream=stream)
                            wanted[number] = bytes([value]) * sizes[number]
                        part = result[: sizes[number]]
                        part.copy_from(layers[number], stream=stream)
                        stream.sync()
                        if kinds[number] != "read" or step % 5 == 0:
                            assert contents(part) == wanted[number]
        for number, kind in enumerate(kinds):
            if kind != "scratch":
                assert contents(layers[number]) == wanted[number]
        for stream in streams:
            stream.close()

    def test_many_random_rounds(self, alloc):
        """Ten thousand on the emulated driver, a thousand on a GPU: every byte is the right one.

        Fills and copies of parts, in groups that nest, leave the set and come again; on several
        streams. The contents of scratch memory count from its addition to the end of its first use,
        and in each use from the first fill on.
        """
        rounds = 10000 if EMULATED else 1000
        chosen = random.Random(rounds)
        kinds = ["read", "write", "write", "scratch"] * 3
        layers = [alloc(chosen.randrange(1, 9) * PAGE - chosen.randrange(3)) for _ in kinds]
        wanted = [bytearray(pattern(layer.size, number)) for number, layer in enumerate(layers)]
        for layer, value in zip(layers, wanted, strict=True):
            write(layer, value)
        known = [True] * 12
        with contextlib.ExitStack() as ends:
            streams = [ends.enter_context(Stream()) for _ in range(3)]
            stream = streams[0]
            working = ends.enter_context(WorkingSet(16 * PAGE, Device(0)))
            groups = [working.add(*pair) for pair in zip(layers, kinds, strict=True)]

            def fill(number):
                value = chosen.randrange(256)
                layers[number].fill(value, stream=stream)
                wanted[number][:] = bytes([value]) * layers[number].size

            for step in range(rounds):
                if chosen.random() < 0.05:
                    stream.sync()
                    stream = chosen.choice(streams)
                number = step % 12 if chosen.random() < 0.7 else chosen.randrange(12)
                other = chosen.randrange(12)
                first = random_use(chosen, groups[number], stream)
                with first, random_use(chosen, groups[other], stream):
                    for one in (number, other):
                        if not known[one] or (kinds[one] == "write" and chosen.random() < 0.1):
                            fill(one)
                        known[one] = True
                    source, target = sorted((number, other), key=lambda n: kinds[n] == "write")
                    if kinds[target] == "write" and source != target:
                        copy_part(chosen, layers, wanted, target, source, stream)
                known[number] = kinds[number] != "scratch"
                known[other] = kinds[other] != "scratch"
                if chosen.random() < 0.02:
                    working.remove(groups[number])
                    fill(number)
                    known[number] = True
                    groups[number] = working.add(layers[number], kinds[number])
            stream.sync()
            assert working.stats().failures == 0
        for number in range(12):
            if known[number]:
                assert contents(layers[number]) == wanted[number]


def random_use(chosen, group, stream):
    """A use that promises at times to only read, also when it will write: contents stay right."""
    reads = group.access == "write" and chosen.random() < 0.5
    return group.use(stream=stream, access="read" if reads else None)


def copy_part(chosen, layers, wanted, target, source, stream):
    """Copies a part of one layer to a part of another one."""
    size = chosen.randrange(1, min(layers[target].size, layers[source].size))
    to = chosen.randrange(layers[target].size - size)
    start = chosen.randrange(layers[source].size - size)
    part = layers[source].range(start, size)
    layers[target].range(to, size).copy_from(part, stream=stream)
    wanted[target][to : to + size] = wanted[source][start : start + size]
