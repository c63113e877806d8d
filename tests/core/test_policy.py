"""MigrationPolicy: a value, and the advice that applying it gives to each page."""

import contextlib
import copy
import itertools
import pickle
import weakref

import pytest

import managedmem
from calls import advices, range_queries, recorded
from constants import EMULATED, MIB, PAGE
from driver import capturing, device_memory
from foreign_objects import CudaArray, numpy_bool
from managedmem import (
    CUDAError,
    Device,
    Host,
    ManagedBuffer,
    ManagedMemoryResource,
    MigrationPolicy,
    Stream,
    emulator,
)
from policies import samples, scramble, state
from programs import run_python
from threads import at_once

SET_RM, UNSET_RM, SET_PL, UNSET_PL, SET_AB, UNSET_AB = range(1, 7)
NUMA = [MigrationPolicy.prefer(Host(0)), MigrationPolicy.prefer(Host.numa_current())]


@contextlib.contextmanager
def pooled_memory(size):
    """A buffer from a pool, which takes no advice."""
    with ManagedMemoryResource(pooled=True) as pool, pool.allocate(size) as memory:
        yield memory


def made(calls):
    """The advices of a log as (advice, first byte, bytes)."""
    return [(c.args["advice"], c.args["ptr"], c.args["count"]) for c in advices(calls)]


class TestValue:
    def test_default_names_nothing(self):
        policy = MigrationPolicy()
        assert policy.read_mostly is False
        assert policy.preferred_location is None
        assert policy.accessed_by == frozenset()
        assert isinstance(policy.accessed_by, frozenset)
        assert policy == MigrationPolicy.default()

    def test_is_default_without_advice(self):
        assert MigrationPolicy().is_default is True
        assert MigrationPolicy.default().is_default is True
        assert MigrationPolicy(read_mostly=False, accessed_by=[]).is_default is True
        named = [p for p in samples() + NUMA if p != MigrationPolicy()]
        assert len(named) > 4
        assert all(policy.is_default is False for policy in named)

    def test_is_default_of_memory(self, buf):
        assert MigrationPolicy.of(buf).is_default is True
        buf.read_mostly = True
        assert MigrationPolicy.of(buf).is_default is False

    @pytest.mark.parametrize("name", ["bool", "bool_"])
    def test_read_mostly_takes_numpy_bools(self, name):
        assert MigrationPolicy(read_mostly=numpy_bool(True, name)).read_mostly is True
        assert MigrationPolicy(read_mostly=numpy_bool(False, name)).is_default is True

    def test_parts_are_read_back(self, device0):
        policy = MigrationPolicy(
            read_mostly=True, preferred_location=device0, accessed_by=iter([Host(), device0])
        )
        assert policy.read_mostly is True
        assert policy.preferred_location is device0
        assert policy.accessed_by == {device0, Host()}

    def test_named_constructors(self, device0):
        assert MigrationPolicy.read_duplicated() == MigrationPolicy(read_mostly=True)
        for place in (device0, Host(), Host(0), Host.numa_current()):
            policy = MigrationPolicy.prefer(place)
            assert policy == MigrationPolicy(preferred_location=place)
            assert policy.preferred_location is place
        assert MigrationPolicy.shared() == MigrationPolicy(accessed_by=[*Device.all(), Host()])
        assert MigrationPolicy.shared(None) == MigrationPolicy.shared()
        assert MigrationPolicy.shared([device0]).accessed_by == {device0}
        assert MigrationPolicy.shared(accessed_by=[]) == MigrationPolicy.default()

    def test_equal_where_all_parts_are(self):
        policies = samples() + NUMA
        for a, b in itertools.product(policies, policies):
            assert (a == b) is (a is b)
            assert (a != b) is (a is not b)
        twins = samples()
        assert twins == samples()
        assert len({*twins, *samples()}) == len(twins)
        assert MigrationPolicy() != 0
        assert MigrationPolicy() != (False, None, frozenset())
        with pytest.raises(TypeError):
            _ = MigrationPolicy() < MigrationPolicy()

    def test_repr_round_trips(self):
        names = {"MigrationPolicy": MigrationPolicy, "Device": Device, "Host": Host}
        for policy in samples() + NUMA:
            assert eval(repr(policy), names) == policy
        assert repr(MigrationPolicy()) == "MigrationPolicy()"
        policy = MigrationPolicy(
            read_mostly=True, preferred_location=Host(1), accessed_by=[Host(), Device(0)]
        )
        assert repr(policy) == (
            "MigrationPolicy(read_mostly=True, preferred_location=Host(numa_id=1), "
            "accessed_by={Device(0), Host()})"
        )

    def test_copies_and_pickles(self):
        for policy in samples() + NUMA:
            copies = [pickle.loads(pickle.dumps(policy, p)) for p in range(6)]
            for twin in [*copies, copy.copy(policy), copy.deepcopy(policy)]:
                assert twin == policy
                assert hash(twin) == hash(policy)

    def test_nothing_about_it_can_be_changed(self):
        policy = MigrationPolicy()
        for name in ("read_mostly", "preferred_location", "accessed_by", "more"):
            with pytest.raises(AttributeError):
                setattr(policy, name, True)
        with pytest.raises(TypeError):
            type("Sub", (MigrationPolicy,), {})
        with pytest.raises(TypeError):
            MigrationPolicy.default = None

    def test_weak_references(self):
        policy = MigrationPolicy(read_mostly=True)
        gone = weakref.ref(policy)
        del policy
        assert gone() is None

    def test_advice_lists_what_it_stands_for(self, device0):
        assert MigrationPolicy().advice() == []
        assert MigrationPolicy.read_duplicated().advice() == [("set_read_mostly", None)]
        policy = MigrationPolicy(
            read_mostly=True, preferred_location=Host(1), accessed_by=[Host(), device0]
        )
        assert policy.advice() == [
            ("set_preferred_location", Host(1)),
            ("set_read_mostly", None),
            ("set_accessed_by", device0),
            ("set_accessed_by", Host()),
        ]

    def test_advice_is_what_advise_takes(self, alloc):
        for policy in samples():
            one, other = alloc(PAGE), alloc(PAGE)
            for advice, location in policy.advice():
                managedmem.advise(one, advice, location)
            policy.apply(other)
            assert one.page_runs() == other.page_runs()

    @pytest.mark.parametrize("bad", [1, 0, None, "yes"])
    def test_read_mostly_is_a_bool(self, bad):
        with pytest.raises(TypeError, match="read_mostly takes a bool"):
            MigrationPolicy(read_mostly=bad)

    @pytest.mark.parametrize("bad", [0, -1, "cpu", True, 1.5, [], object()])
    def test_preferred_location_is_a_location(self, bad):
        with pytest.raises(TypeError, match="Device or Host"):
            MigrationPolicy(preferred_location=bad)
        with pytest.raises(TypeError, match="Device or Host"):
            MigrationPolicy.prefer(bad)

    def test_prefer_needs_a_location(self):
        with pytest.raises(ValueError, match="location is required"):
            MigrationPolicy.prefer(None)

    @pytest.mark.parametrize("make", [MigrationPolicy, MigrationPolicy.shared])
    def test_accessed_by_is_an_iterable_of_accessors(self, make, device0):
        for bad in (0, device0):
            with pytest.raises(TypeError, match="iterable"):
                make(accessed_by=bad)
        for bad in ([device0, 0], ["cpu"], "cpu", [True]):
            with pytest.raises(TypeError, match="Device or Host"):
                make(accessed_by=bad)
        for node in (Host(0), Host.numa_current()):
            with pytest.raises(ValueError, match="NUMA"):
                make(accessed_by=[device0, node])

        def broken():
            yield device0
            raise LookupError("half way")

        with pytest.raises(LookupError, match="half way"):
            make(accessed_by=broken())

    def test_arguments_are_keywords_it_knows(self):
        with pytest.raises(TypeError, match="positional"):
            MigrationPolicy(True)
        with pytest.raises(TypeError, match="unexpected keyword"):
            MigrationPolicy(preferred=Host())

    def test_takes_the_live_set_of_a_buffer(self, buf, members):
        buf.accessed_by = members
        assert MigrationPolicy(accessed_by=buf.accessed_by).accessed_by == set(members)

    def test_a_device_that_is_not_there(self):
        with pytest.raises(ValueError, match="there is no device 77"):
            MigrationPolicy.prefer(Device(77))

    @pytest.mark.emulator_only
    def test_unpickled_where_a_device_is_missing(self):
        script = """
            import pickle, sys
            from managedmem import Device, MigrationPolicy
            policy = MigrationPolicy(preferred_location=Device(4))
            print(pickle.dumps(policy).hex())
        """
        dumped = run_python(script, emulator="devices=5").stdout.strip()
        script = f"""
            import pickle
            try:
                pickle.loads(bytes.fromhex("{dumped}"))
            except ValueError as error:
                print(error)
        """
        found = run_python(script, emulator="devices=2").stdout
        assert found == "there is no device 4: this system has 2 devices\n"


class TestApply:
    def test_makes_the_advice_equal_whatever_it_was(self, alloc):
        buffer = alloc(16 * PAGE)
        for before, after in itertools.permutations(samples(), 2):
            before.apply(buffer)
            after.apply(buffer)
            assert MigrationPolicy.of(buffer) == after
            assert buffer.read_mostly is after.read_mostly
            assert buffer.preferred_location is after.preferred_location
            assert buffer.accessed_by == after.accessed_by

    @pytest.mark.parametrize("seed", range(6))
    def test_makes_mixed_pages_equal(self, alloc, seed):
        buffer = alloc(32 * PAGE)
        policy = samples()[seed % len(samples())]
        assert len(scramble(buffer, seed)) > 1
        policy.apply(buffer)
        assert MigrationPolicy.of(buffer) == policy
        assert len(buffer.page_runs()) == 1

    def test_a_preferred_device_is_the_one_that_was_named(self, buf):
        for device in Device.all():
            MigrationPolicy.prefer(device).apply(buf)
            assert buf.preferred_location is device

    def test_leaves_the_last_prefetch_alone(self, buf, device0):
        buf.prefetch(device0)
        samples()[-1].apply(buf)
        assert buf.last_prefetch_location is device0

    def test_of_a_view_acts_on_its_pages(self, alloc, device0):
        buffer = alloc(4 * PAGE)
        MigrationPolicy.prefer(device0).apply(buffer.range(PAGE + 5, PAGE))
        assert [run[:2] for run in buffer.page_runs()] == [
            (0, PAGE),
            (PAGE, 2 * PAGE),
            (3 * PAGE, PAGE),
        ]

    def test_several_targets(self, alloc):
        buffers = [alloc(4 * PAGE) for _ in range(12)]
        targets = [b.range(PAGE, PAGE) if i % 3 else b for i, b in enumerate(buffers)]
        targets += targets[:2]
        for policy in samples():
            policy.apply(iter(targets))
            assert all(MigrationPolicy.of(target) == policy for target in targets)
            assert MigrationPolicy.of(targets) == policy

    def test_targets_of_other_libraries(self, alloc, device0):
        buf = alloc(2 * MIB)  # without records of freed memory
        array = CudaArray(buf, shape=(PAGE,), offset=PAGE)
        MigrationPolicy.prefer(device0).apply([array, memoryview(buf)[3 * PAGE : 4 * PAGE]])
        assert [run.preferred_location for run in buf.page_runs()] == [None, device0] * 2 + [None]
        assert MigrationPolicy.of(array) == MigrationPolicy.prefer(device0)

    def test_numa_hosts(self, alloc):
        """With one node the driver records none; the host as a whole is then the same place."""
        buffer = alloc(2 * PAGE)
        for policy, before in itertools.product(NUMA, samples()):
            before.apply(buffer)
            policy.apply(buffer)
            assert buffer.preferred_location in {Host(0), Host()}
            assert not buffer.read_mostly
            assert not buffer.accessed_by

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("nodes", [1, 2])
    def test_numa_hosts_by_number_of_nodes(self, nodes):
        script = """
            from managedmem import Device, Host, ManagedMemoryResource, MigrationPolicy
            buffer = ManagedMemoryResource().allocate(4096)
            for place in (Host(0), Host.numa_current()):
                buffer.preferred_location = Device(0)
                policy = MigrationPolicy.prefer(place)
                with policy.applied(buffer):
                    print(buffer.preferred_location, end=" ")
                assert buffer.preferred_location is Device(0)
            """
        found = run_python(script, emulator=f"devices=1,numa_nodes={nodes}").stdout
        assert found == ("Host() Host() " if nodes == 1 else "Host(numa_id=0) Host(numa_id=0) ")

    def test_a_node_that_is_not_there(self, alloc, device0):
        buffer = alloc(4 * PAGE)
        before = scramble(buffer)
        policy = MigrationPolicy(read_mostly=True, preferred_location=Host(999))
        with pytest.raises(ValueError, match="no NUMA node 999"):
            policy.apply(buffer)
        assert buffer.page_runs() == before

    def test_bad_targets_change_nothing(self, alloc):
        buffer, closed = alloc(2 * PAGE), alloc(PAGE)
        before = scramble(buffer)
        closed.close()
        with device_memory() as pointer:
            plain = ManagedBuffer.from_handle(pointer, PAGE)
            for bad, error, words in [
                (closed, RuntimeError, r"targets\[1\].*closed"),
                (plain, ValueError, r"targets\[1\].*managed-memory"),
                (3, TypeError, r"targets\[1\].*a target must be"),
                (bytearray(PAGE), ValueError, r"targets\[1\].*managed-memory"),
            ]:
                for use in (MigrationPolicy().apply, MigrationPolicy().applied, MigrationPolicy.of):
                    with pytest.raises(error, match=words):
                        use([buffer, bad])
        assert buffer.page_runs() == before

    def test_of_mixed_pages_points_at_page_runs(self, alloc):
        buffer = alloc(2 * PAGE)
        buffer.range(0, 1).read_mostly = True
        with pytest.raises(ValueError, match=r"not the same on all pages.*page_runs\(\)"):
            MigrationPolicy.of(buffer)
        with pytest.raises(ValueError, match="not the same on all pages"):
            MigrationPolicy.of([buffer.range(0, PAGE), buffer.range(PAGE, PAGE)])
        assert MigrationPolicy.of(buffer.range(PAGE, PAGE)) == MigrationPolicy()

    def test_pages_that_differ_only_in_where_they_went_have_one_policy(self, alloc):
        buffer = alloc(2 * PAGE)
        buffer.range(0, PAGE).prefetch(Host())
        assert len(buffer.page_runs()) == 2
        assert MigrationPolicy.of(buffer) == MigrationPolicy()

    def test_pool_memory_is_refused_in_one_sentence(self, alloc):
        """Nothing is said to be unrestored: what refuses all advice is as it was."""
        buffer = alloc(2 * PAGE)
        with pooled_memory(PAGE) as memory:
            before = state(buffer, memory)
            for targets in (memory, [buffer, memory], [memory, buffer]):
                with pytest.raises(CUDAError) as error:
                    MigrationPolicy.read_duplicated().apply(targets)
                with pytest.raises(CUDAError), MigrationPolicy.shared().applied(targets):
                    pytest.fail("the block was entered")
                assert str(error.value).count("takes no advice") == 1
                assert "Not restored" not in str(error.value)
                assert state(buffer, memory) == before

    def test_pool_memory_is_not_advised_where_nothing_differs(self):
        with pooled_memory(PAGE) as memory:
            MigrationPolicy.default().apply(memory)
            assert MigrationPolicy.of(memory) == MigrationPolicy.default()

    def test_while_a_graph_is_captured(self, alloc, device0):
        buffer = alloc(2 * PAGE)
        with Stream() as stream:
            with capturing(stream, mode=0) as capture:
                MigrationPolicy.prefer(device0).apply(buffer)
            assert capture.result == 0
        assert MigrationPolicy.of(buffer) == MigrationPolicy.prefer(device0)

    def test_from_a_thread_without_a_context(self, alloc, device0):
        buffer = alloc(2 * PAGE)
        at_once(lambda: MigrationPolicy.prefer(device0).apply(buffer))
        assert buffer.preferred_location is device0


def page_policies(buffer):
    return [MigrationPolicy.of(buffer.range(at, PAGE)) for at in range(0, buffer.nbytes, PAGE)]


@pytest.mark.emulator_only
@pytest.mark.parametrize("seed", range(28))
def test_what_is_applied_holds_and_is_recorded(alloc, stream, device0, seed):
    """After advice over ranges whose parts differed, what the driver records is not what holds."""
    buffer, policy = alloc(32 * PAGE), samples()[seed % len(samples())]
    scramble(buffer, seed)
    # A policy that agrees with every record changes nothing, right or wrong as the records are.
    buffer.range(0, PAGE).read_mostly = not policy.read_mostly
    before = page_policies(buffer)
    with policy.applied(buffer):
        assert page_policies(buffer) == [policy] * 32
        emulator.touch(buffer, Host(), write=True)
        buffer.prefetch(device0, stream=stream)
        stream.sync()
        copies = {emulator.residency(buffer.range(i * PAGE, PAGE)) for i in range(32)}
        assert copies == {"mixed" if policy.read_mostly else device0}
    assert page_policies(buffer) == before


@pytest.mark.emulator_only
class TestCalls:
    def test_nothing_is_advised_where_nothing_differs(self, alloc):
        buffer = alloc(8 * PAGE)
        for policy in samples():
            policy.apply(buffer)
            calls = recorded(lambda policy=policy: policy.apply(buffer))
            assert advices(calls) == []
            assert len(range_queries(calls)) == len(calls) == 8

    def test_one_advice_for_each_part_that_differs(self, alloc, device0, device1):
        buffer = alloc(8 * PAGE)
        policy = MigrationPolicy(
            read_mostly=True, preferred_location=device1, accessed_by=[device0, Host()]
        )
        whole = (buffer.handle, buffer.nbytes)
        calls = made(recorded(lambda: policy.apply(buffer)))
        assert calls == [(a, *whole) for a in (SET_PL, SET_RM, SET_AB, SET_AB)]
        other = MigrationPolicy(preferred_location=Host(), accessed_by=[device0, device1])
        calls = made(recorded(lambda: other.apply(buffer)))
        assert calls == [(a, *whole) for a in (SET_PL, UNSET_RM, SET_AB, UNSET_AB)]
        calls = made(recorded(lambda: MigrationPolicy.default().apply(buffer)))
        assert calls == [(a, *whole) for a in (UNSET_PL, UNSET_AB, UNSET_AB)]

    def test_the_location_of_each_advice(self, alloc, device0, device1):
        """A preferred device is advised by its ordinal, the host as the host."""
        buffer = alloc(PAGE)
        for place, found in ((device1, (1, 1)), (device0, (1, 0)), (Host(), (2, 0))):
            (call,) = advices(recorded(lambda p=place: MigrationPolicy.prefer(p).apply(buffer)))
            assert (call.args["type"], call.args["id"]) == found

    def test_mixed_pages_take_one_advice_over_all_that_want_the_same(self, alloc, device0):
        buffer = alloc(8 * PAGE)
        for page in (3, 5):
            buffer.range(page * PAGE, PAGE).preferred_location = device0
        whole = (SET_PL, buffer.handle, 8 * PAGE)
        calls = made(recorded(lambda: MigrationPolicy.prefer(device0).apply(buffer)))
        assert calls[0] == whole
        buffer.range(2 * PAGE, PAGE).preferred_location = None
        buffer.range(6 * PAGE, PAGE).preferred_location = Host()
        first, *again = made(recorded(lambda: MigrationPolicy.prefer(device0).apply(buffer)))
        assert first == whole
        # The driver left out what it did not record: that is given once more.
        assert again == [(SET_PL, buffer.handle + 6 * PAGE, PAGE)]

    def test_neighbours_are_advised_together(self, alloc):
        buffer = alloc(8 * PAGE)
        parts = [buffer.range(i * PAGE, PAGE) for i in (3, 1, 0, 2, 2, 6)]
        calls = recorded(lambda: MigrationPolicy.read_duplicated().apply(parts))
        assert made(calls) == [
            (SET_RM, buffer.handle, 4 * PAGE),
            (SET_RM, buffer.handle + 6 * PAGE, PAGE),
        ]
        assert len(range_queries(calls)) == 5

    def test_the_block_makes_the_advice_and_takes_it_back(self, alloc, device0):
        buffer = alloc(4 * PAGE)
        buffer.accessed_by = [Host()]
        whole = (buffer.handle, buffer.nbytes)
        block = MigrationPolicy.prefer(device0).applied(buffer)
        assert made(recorded(block.__enter__)) == [(SET_PL, *whole), (UNSET_AB, *whole)]
        assert made(recorded(block.restore)) == [(UNSET_PL, *whole), (SET_AB, *whole)]

    def test_bad_arguments_reach_no_driver(self, buf):
        def refused():
            for bad in ({"read_mostly": 1}, {"accessed_by": [Host(0)]}):
                with pytest.raises((TypeError, ValueError)):
                    MigrationPolicy(**bad)

        assert recorded(refused) == []


@pytest.mark.emulator_only
class TestAllOrNothing:
    @pytest.mark.parametrize("after", [False, True], ids=["refused", "failed after the effect"])
    @pytest.mark.parametrize("mixed", [False, True], ids=["uniform", "mixed"])
    def test_every_advice_fails_in_turn(self, alloc, failing, mixed, after):
        buffers = [alloc(8 * PAGE) for _ in range(3)]
        policy = samples()[-1]
        for nth in range(1, 100):
            for seed, buffer in enumerate(buffers):
                MigrationPolicy.shared([Host()]).apply(buffer)
                if mixed:
                    scramble(buffer, seed)
            before = state(*buffers)
            failing(nth, after=after)
            with contextlib.suppress(CUDAError):
                policy.apply(buffers)
            fired = emulator.failure_fired()
            emulator.clear_failures()
            if not fired:
                break
            assert state(*buffers) == before
        assert nth > 6
        assert MigrationPolicy.of(buffers) == policy

    def test_a_query_that_fails_changes_nothing(self, alloc, failing):
        buffers = [alloc(2 * PAGE) for _ in range(2)]
        before = [scramble(buffer) for buffer in buffers]
        for nth in range(1, 5):
            failing(nth, name="cuMemRangeGetAttributes")
            with pytest.raises(CUDAError) as error:
                MigrationPolicy.shared().apply(buffers)
            assert error.value.function == "cuMemRangeGetAttributes"
            assert state(*buffers) == before

    def test_what_cannot_be_taken_back_is_named(self, alloc, failing, device0):
        """The driver fails at the second advice and goes on to fail: the first one stays."""
        buffer = alloc(2 * PAGE)
        failing(2, 3, 4)
        with pytest.raises(CUDAError) as error:
            MigrationPolicy(preferred_location=device0, read_mostly=True).apply(buffer)
        text = f"Not restored: unset_preferred_location of {2 * PAGE} bytes at {buffer.handle:#x}."
        assert text in str(error.value)
        assert buffer.preferred_location is device0


@pytest.mark.emulator_only
@pytest.mark.parametrize("devices", [1, 2, 5])
def test_with_several_numbers_of_devices(devices):
    script = f"""
        from constants import PAGE
        from managedmem import Device, Host, ManagedMemoryResource, MigrationPolicy
        buffer = ManagedMemoryResource().allocate(16 * PAGE)
        everyone = {{*Device.all(), Host()}}
        assert len(everyone) == {devices} + 1
        policy = MigrationPolicy.shared()
        assert policy.accessed_by == everyone
        for i, device in enumerate(Device.all()):
            buffer.range(2 * i * PAGE, PAGE).preferred_location = device
            buffer.range(2 * i * PAGE, PAGE).accessed_by = [device, Host()]
        before = buffer.page_runs()
        assert len(before) == 2 * {devices}
        with policy.applied(buffer):
            assert set(buffer.accessed_by) == everyone
            for device in Device.all():
                MigrationPolicy.prefer(device).apply(buffer)
                assert buffer.preferred_location is device and not buffer.accessed_by
        assert buffer.page_runs() == before
        print("done")
    """
    assert run_python(script, emulator=f"devices={devices}").stdout == "done\n"


def test_a_large_buffer(alloc, device0):
    buffer = alloc(64 * MIB)
    buffer.range(3 * MIB, PAGE).read_mostly = True
    with MigrationPolicy.prefer(device0).applied(buffer):
        assert MigrationPolicy.of(buffer) == MigrationPolicy.prefer(device0)
    assert [run.nbytes for run in buffer.page_runs()] == [3 * MIB, PAGE, 61 * MIB - PAGE]


@pytest.mark.parametrize(
    "act",
    ["MigrationPolicy.of([stale, new])", "MigrationPolicy(read_mostly=True).apply([stale, new])"],
)
def test_a_wrapper_of_freed_memory_beside_new_memory(act):
    """It remembers another allocation over the same addresses, so both are targets."""
    script = f"""
        import managedmem
        from constants import PAGE
        from managedmem import ManagedBuffer, MigrationPolicy
        size = 8 * PAGE
        buffers = sorted((managedmem.empty(size) for _ in range(16)), key=lambda b: b.handle)
        pairs = zip(buffers, buffers[1:])
        low, high = next(pair for pair in pairs if pair[0].handle + size == pair[1].handle)
        start = low.handle
        stale = ManagedBuffer.from_handle(high.handle + PAGE, 4 * PAGE)
        assert not stale.read_mostly
        low.close()
        high.close()
        new = managedmem.empty(2 * size)
        {act}
        assert MigrationPolicy.of(new).read_mostly is {".apply" in act}
        print(new.handle == start)
    """
    assert run_python(script).stdout == "True\n"


def test_removes_records_of_freed_memory():
    """A free leaves the record of a page, because a neighbour keeps the block alive."""
    resource = ManagedMemoryResource()
    with resource.allocate(PAGE):
        with resource.allocate(12 * PAGE) as freed:
            freed.range(PAGE, PAGE).read_mostly = True
        with resource.allocate(12 * PAGE) as new:
            if EMULATED:
                assert [run.read_mostly for run in new.page_runs()] == [False, True, False]
            MigrationPolicy.default().apply(new)
            assert [run[2:5] for run in new.page_runs()] == [(False, None, frozenset())]
