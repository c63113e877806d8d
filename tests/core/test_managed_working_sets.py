"""ManagedWorkingSet: its arguments, its groups, their uses, and what the driver keeps."""

import gc
import random
import weakref

import pytest

import managedmem
from constants import EMULATED, MIB, PAGE
from contents import contents, pattern, write
from layers import use_all
from managedmem import Device, Host, ManagedWorkingSet, Stream, emulator
from programs import run_python

SIZE = 16 * PAGE

# The sets need devices that move pages one by one, which a few machines of the tests lack.
pytestmark = pytest.mark.skipif(
    not EMULATED and not Device(0).concurrent_managed_access, reason="needs concurrent access"
)


@pytest.fixture
def layers(alloc):
    """16 buffers with contents of their own."""
    made = [alloc(SIZE) for _ in range(16)]
    for number, buffer in enumerate(made):
        write(buffer, pattern(SIZE, number))
    return made


@pytest.fixture
def working():
    with ManagedWorkingSet(4 * SIZE, Device(0)) as made:
        yield made


@pytest.fixture
def groups(working, layers):
    return [working.add(layer, "write") for layer in layers]


class TestArguments:
    @pytest.mark.parametrize(
        ("limit", "error"),
        [(0, ValueError), (-1, ValueError), ("64", ValueError), (1.5, TypeError)],
    )
    def test_limit(self, limit, error):
        with pytest.raises(error, match="limit must be"):
            ManagedWorkingSet(limit)

    @pytest.mark.parametrize("limit", [1 << 62, 1 << 70])
    def test_more_than_is_free(self, limit):
        with pytest.raises(MemoryError, match=r"^ManagedWorkingSet needs [\d,]+ bytes of Device"):
            ManagedWorkingSet(limit, 0)

    def test_auto(self):
        free = Device(0).memory_info.free
        with ManagedWorkingSet("auto", 0) as working:
            assert 0 < working.limit < free
            assert working.stats().kept == 0

    def test_attributes(self, working, layers):
        group = working.add(layers[0], name="first")
        assert (working.limit, working.device, working.nbytes) == (4 * SIZE, Device(0), 0)
        assert (group.nbytes, group.name, group.access) == (SIZE, "first", "read")
        assert group.set is working and not group.is_resident and [*working] == [group]
        assert repr(working) == f"<ManagedWorkingSet groups=1 nbytes=0 limit={4 * SIZE} Device(0)>"
        assert repr(group) == f"<WorkingGroup name='first' access=read nbytes={SIZE}>"

    @pytest.mark.parametrize("targets", [object(), None, [object()], 5])
    def test_targets_must_be_memory(self, working, targets):
        with pytest.raises(TypeError):
            working.add(targets)
        assert len(working) == 0

    def test_system_memory(self, working, layers):
        for targets in (bytearray(SIZE), [layers[0], bytearray(SIZE)]):
            with pytest.raises(ValueError, match="managed-memory allocation"):
                working.add(targets)
        assert len(working) == 0

    @pytest.mark.parametrize("access", ["", "Read", None, 1])
    def test_access_must_be_known(self, working, layers, access):
        with pytest.raises(ValueError, match=r"access must be .* got"):
            working.add(layers[0], access)
        assert len(working) == 0

    @pytest.mark.emulator_only("counts the driver's objects")
    def test_nothing_is_left_after_a_refusal(self, working, layers):
        before = emulator.live()
        for nth in (1, 2, 3, 4):
            emulator.fail("cuEventCreate", nth, 719)
            with pytest.raises(managedmem.CUDAError):
                working.add(layers[:2])
            emulator.clear_failures()
            assert emulator.live() == before and len(working) == 0
        group = working.add(layers[:2])
        assert group.nbytes == 2 * SIZE

    @pytest.mark.emulator_only("needs a device of another kind")
    def test_a_device_without_concurrent_access(self):
        done = run_python(
            """
            import numpy
            from managedmem import ManagedWorkingSet, WorkingSet
            from outcomes import refusal
            print(refusal(NotImplementedError, ManagedWorkingSet, 4096))
            with WorkingSet(4096) as working:
                with working.add(numpy.zeros(9)).use() as use:
                    print(use.is_resident)
            """,
            emulator="profile=wsl",
        )
        assert done.stdout == (
            "ManagedWorkingSet needs concurrent_managed_access, which Device(0) lacks: its managed "
            "memory moves as a whole; WorkingSet works there\nTrue\n"
        )


class TestTargets:
    def test_use_shows_the_targets(self, working, layers):
        for targets in (layers[0], layers[1:3], tuple(layers[3:5])):
            with working.add(targets).use() as use:
                assert use.arrays is targets

    def test_protocols(self, working, layers, stream):
        class Shown:
            def __init__(self, buffer):
                self.__cuda_array_interface__ = buffer.__cuda_array_interface__

        view = memoryview(layers[1])
        group = working.add([Shown(layers[0]), view, layers[2].numpy(), layers[3][PAGE:]], "write")
        assert group.nbytes == 4 * SIZE - PAGE
        with group.use(stream=stream) as use:
            assert use.is_resident
            layers[0].fill(3, stream=stream)
        with group.use_on_host():
            assert bytes(view) == pattern(SIZE, 1) and contents(layers[0]) == bytes([3]) * SIZE
        del use, view
        working.remove(group)

    def test_no_bytes(self, working, layers):
        for targets in ([], layers[0][:0], [managedmem.empty(0)]):
            group = working.add(targets)
            with group.use() as use:
                assert use.is_resident and group.is_resident and group.nbytes == 0
            working.remove(group)

    def test_several_targets_are_one_group(self, working, layers, stream):
        group = working.add(layers[:3])
        with group.use(stream=stream):
            assert working.nbytes == 3 * SIZE
        use_all([working.add(layer) for layer in layers[3:10]], stream)
        with group.use(stream=stream) as use:
            assert use.is_resident and group.is_resident

    def test_closed_memory(self, working, layers, stream):
        group = working.add(layers[:2])
        with group.use(stream=stream):
            pass
        layers[1].close()
        with pytest.raises(RuntimeError, match=r"memory of <WorkingGroup .* was closed: remove"):
            group.use(stream=stream)
        use_all([working.add(layer) for layer in layers[2:8]], stream)  # which drop it
        working.remove(group)
        assert working.stats().failures == 0

    @pytest.mark.parametrize("access", ["read", "write", "scratch"])
    def test_memory_in_place_of_closed_memory(self, working, layers, alloc, stream, access):
        """Drops of the closed memory do not touch that of the new owner."""
        group = working.add(layers[0], access)
        with group.use(stream=stream):
            pass
        stream.sync()
        layers[0].close()
        new = alloc(SIZE)
        write(new, 5)
        use_all([working.add(layer) for layer in layers[1:]], stream)
        stream.sync()
        Device(0).sync()
        assert contents(new) == bytes([5]) * SIZE

    def test_memory_closed_during_a_use(self, working, layers, stream):
        groups = [working.add(layer) for layer in layers[:8]]
        with groups[0].use(stream=stream):
            layers[0].close()
        use_all(groups[1:], stream)
        working.remove(groups[0])

    def test_targets_are_kept(self, working, layers):
        class Holder:
            def __init__(self, buffer):
                self.__cuda_array_interface__ = buffer.__cuda_array_interface__

        target = Holder(layers[0])
        gone = weakref.ref(target)
        group = working.add(target)
        del target
        gc.collect()
        assert gone() is not None
        working.remove(group)
        del group
        gc.collect()
        assert gone() is None


class TestUses:
    def test_no_misses_after_the_first_round(self, working, groups, stream):
        use_all(groups * 2, stream)
        before = working.stats()
        use_all(groups * 4, stream)
        after = working.stats()
        assert after.hits - before.hits == 64 and after.failures == 0
        assert working.nbytes <= working.limit

    def test_given_order(self, working, groups, stream):
        working.order = odd = groups[1::2] + groups[::2]
        use_all(odd * 3, stream)
        assert working.stats().hits == 47

    def test_without_room(self, working, groups, layers, stream, alloc):
        uses = [group.use(stream=stream) for group in groups[:6]]
        assert [use.is_resident for use in uses] == [True] * 4 + [False] * 2
        result = alloc(SIZE)
        result.copy_from(layers[5], stream=stream)
        stream.sync()
        assert contents(result) == pattern(SIZE, 5)
        for use in uses:
            use.close()
        assert working.stats().mapped == 2

    @pytest.mark.emulator_only("reads where pages are")
    def test_where_groups_are(self, working, groups, layers, stream):
        for number, group in enumerate(groups):
            with group.use(stream=stream):
                stream.sync()
                assert emulator.residency(layers[number]) is Device(0)
        Device(0).sync()
        there = [emulator.residency(layer) is Device(0) for layer in layers]
        assert there == [group.is_resident for group in groups] and sum(there) <= 4

    @pytest.mark.emulator_only("counts the bytes that move")
    def test_scratch_is_discarded(self, working, alloc, stream):
        buffers = [alloc(SIZE) for _ in range(8)]
        groups = [working.add(buffer, "scratch") for buffer in buffers]
        for buffer in buffers:
            write(buffer, 1)
        use_all(groups, stream)
        stream.sync()
        Device(0).sync()
        emulator.clear_counters()
        use_all(groups * 2, stream)
        Device(0).sync()
        assert emulator.counters().bytes_dtoh == 0
        assert working.stats().failures == 0

    @pytest.mark.emulator_only("needs a driver of its own")
    def test_a_driver_without_discards_keeps_scratch_contents(self):
        run_python(
            """
            import managedmem as mm
            from contents import contents, pattern, write
            buffers = [mm.empty(4096) for _ in range(2)]
            for number, buffer in enumerate(buffers):
                write(buffer, pattern(4096, number))
            with mm.ManagedWorkingSet(4096) as working:
                for group in [working.add(buffer, "scratch") for buffer in buffers] * 3:
                    with group.use():
                        pass
                mm.Device(0).sync()
                assert working.stats().failures == 0
            for number, buffer in enumerate(buffers):
                assert contents(buffer) == pattern(4096, number)
            """,
            emulator="driver=12080",
        )

    def test_kept_is_what_was_there_once(self, layers, stream):
        with ManagedWorkingSet(2 * SIZE, 0) as working:
            groups = [working.add(layer) for layer in layers[:6]]
            for number, group in enumerate(groups):
                with group.use(stream=stream):
                    pass
                assert (number + 1) * SIZE <= working.stats().kept <= 6 * SIZE
            assert working.stats().kept == 6 * SIZE and working.nbytes <= 2 * SIZE
            working.remove(groups[0])
            assert working.stats().kept == 5 * SIZE

    @pytest.mark.emulator_only("counts frames of the emulated driver")
    def test_the_limit_is_kept_at_every_call(self, alloc, stream):
        """Of memory in frames of its own; the driver keeps those that pages have left."""
        buffers = [alloc(2 * MIB) for _ in range(8)]
        for buffer in buffers:
            write(buffer, 1)
        before = emulator.frames(Device(0)).used
        with ManagedWorkingSet(6 * MIB, 0) as working:
            groups = [
                working.add(buffer, ["read", "write"][n % 2]) for n, buffer in enumerate(buffers)
            ]
            for group in (groups + groups[::-1]) * 3:
                with group.use(stream=stream):
                    stream.sync()
                    Device(0).sync()
                    assert emulator.frames(Device(0)).used - before <= 6 * MIB
            assert working.stats().kept == 16 * MIB
            assert emulator.frames(Device(0)).kept >= 10 * MIB

    def test_exceptions_removals_and_late_targets(self, working, groups, layers, stream):
        with pytest.raises(KeyError), groups[0].use(stream=stream) as use:
            late = use.arrays
            raise KeyError
        working.remove(groups[0])  # the targets are the caller's
        assert late is layers[0]
        with groups[1].use(), pytest.raises(RuntimeError, match="in use"):
            working.remove(groups[1])
        use = groups[2].use()
        del use
        gc.collect()
        working.remove(groups[2])
        with pytest.raises(RuntimeError, match="was removed"):
            groups[2].use()
        assert len(working) == 14

    def test_the_end(self, working, groups, layers, stream):
        use_all(groups, stream)
        use = groups[0].use(stream=stream)
        working.close()
        working.close()
        assert working.is_closed and working.nbytes == 0
        layers[0].fill(7, stream=stream)
        use.close()
        for call in (groups[1].use, lambda: working.add(layers[0]), working.__enter__):
            with pytest.raises(RuntimeError, match="ManagedWorkingSet is closed"):
                call()
        with groups[0].use_on_host() as home:
            assert bytes(home) == bytes([7]) * SIZE

    @pytest.mark.emulator_only("looks at calls")
    def test_uses_of_a_closed_set_load_nothing(self, layers, stream):
        """Its memory may be closed by then."""
        working = ManagedWorkingSet(4 * SIZE, Device(0))
        groups = [working.add(layer) for layer in layers]
        use_all(groups * 2, stream)
        use = groups[0].use(stream=stream)
        working.close()
        before = len(emulator.calls())
        use.close()
        assert "cuMemPrefetchAsync" not in [call.name for call in emulator.calls()[before:]]


class TestContents:
    @pytest.mark.parametrize("schedule", ["eager", "lazy"] if EMULATED else ["a GPU"])
    def test_the_host_waits_for_the_device(self, groups, layers, stream, schedule):
        if EMULATED:
            emulator.schedule(schedule)
        with groups[0].use(stream=stream) as use:
            use.arrays.fill(9, stream=stream)
        with groups[0].use_on_host() as home:
            assert home is layers[0]
            assert bytes(home) == bytes([9]) * SIZE
        with groups[0].use_on_host(access="write") as home:
            write(home, 4)
        with groups[0].use(stream=stream) as use:
            pass
        assert contents(layers[0]) == bytes([4]) * SIZE

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
        with ManagedWorkingSet(20 * PAGE, Device(0)) as working:
            groups = [working.add(*pair) for pair in zip(layers, kinds, strict=True)]
            if seed % 2:
                working.order = groups
            for step in range(300):
                number = step % 12 if chosen.random() < 0.7 else chosen.randrange(12)
                stream = chosen.choice(streams)
                with groups[number].use(stream=stream), groups[chosen.randrange(12)].use():
                    if kinds[number] != "read":
                        value = chosen.randrange(256)
                        layers[number].fill(value, stream=stream)
                        wanted[number] = bytes([value]) * sizes[number]
                    part = result[: sizes[number]]
                    part.copy_from(layers[number], stream=stream)
                    stream.sync()
                    if kinds[number] != "read" or step % 5 == 0:
                        assert contents(part) == wanted[number]
            assert working.stats().failures == 0
        Device(0).sync()
        for number, kind in enumerate(kinds):
            if kind != "scratch":
                assert contents(layers[number]) == wanted[number]
        for stream in streams:
            stream.close()

    def test_advice_stays(self, layers, stream):
        layers[0].read_mostly = True
        layers[1].preferred_location = Device(0)
        layers[2].accessed_by = [Host()]
        before = [[run[2:5] for run in layer.page_runs()] for layer in layers[:3]]
        with ManagedWorkingSet(SIZE, 0) as working:
            use_all([working.add(layer, "write") for layer in layers[:3]] * 2, stream)
        after = [[run[2:5] for run in layer.page_runs()] for layer in layers[:3]]
        assert after == before
        assert [contents(layer) for layer in layers[:3]] == [pattern(SIZE, n) for n in range(3)]
