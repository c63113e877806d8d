"""policy= of empty(), allocate() and resources: memory is advised before anything touches it."""

import copy
import functools
import gc
import itertools
import weakref

import pytest

import managedmem
from calls import advices, names, range_queries
from constants import EMULATED, MIB, PAGE
from identifiers import label
from managedmem import (
    CUDAError,
    Device,
    DeviceMemoryResource,
    Host,
    ManagedMemoryResource,
    MigrationPolicy,
    emulator,
)
from policies import samples, scramble
from pools import needs_pools
from programs import run_python
from threads import at_once
from world import EVERYTHING

LARGE = 4 * MIB  # never has records of freed memory


# Ways to allocate `size` bytes with a policy.
WAYS = {
    "empty": lambda size, policy: managedmem.empty((size,), policy=policy),
    "allocate": lambda size, policy: ManagedMemoryResource().allocate(size, policy=policy),
    "resource": lambda size, policy: ManagedMemoryResource(policy=policy).allocate(size),
}


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


@pytest.fixture(params=[PAGE // 2, 3 * PAGE + 1, LARGE], ids=["part", "pages", "large"])
def size(request):
    return request.param


class TestAdvice:
    def test_is_that_of_the_policy(self, way, size):
        for policy in samples():
            with way(size, policy) as buffer:
                assert MigrationPolicy.of(buffer) == policy

    def test_none_is_none(self, way, size):
        with way(size, None) as buffer:
            assert buffer.nbytes == size
        with ManagedMemoryResource().allocate(LARGE) as buffer:
            assert MigrationPolicy.of(buffer).is_default

    def test_numa_hosts(self, way, size):
        """With one node the driver records none; the host as a whole is then the same place."""
        for place in (Host(0), Host.numa_current()):
            with way(size, MigrationPolicy.prefer(place)) as buffer:
                assert buffer.preferred_location in {Host(0), Host()}

    def test_reaches_no_neighbour(self, alloc):
        neighbours = [alloc(PAGE) for _ in range(4)]
        for neighbour in neighbours:
            MigrationPolicy.default().apply(neighbour)
        with managedmem.empty(PAGE, policy=EVERYTHING) as buffer:
            assert MigrationPolicy.of(buffer) == EVERYTHING
            assert all(MigrationPolicy.of(each).is_default for each in neighbours)

    def test_moves_nothing(self, way):
        with way(LARGE, EVERYTHING) as buffer:
            assert buffer.last_prefetch_location is None
            assert buffer.residency().on_host == 0
            assert len(buffer.page_runs()) == 1

    def test_of_no_bytes(self, way):
        with way(0, EVERYTHING) as buffer:
            assert (buffer.nbytes, buffer.handle) == (0, 0)
            assert MigrationPolicy.of(buffer).is_default

    def test_with_shape_type_and_name(self):
        with managedmem.empty((8, 1024), "f4", name="weights", policy=EVERYTHING) as buffer:
            assert (buffer.shape, buffer.dtype, buffer.name) == ((8, 1024), "float32", "weights")
            assert MigrationPolicy.of(buffer) == EVERYTHING

    def test_replaces_records_of_freed_memory(self, alloc):
        """Small memory can have them where pages differed, if a neighbour keeps the block."""
        neighbours = [alloc(PAGE)]
        left = 0
        for policy in [None, *samples()] * 3:
            first = [managedmem.empty(16 * PAGE) for _ in range(4)]
            neighbours.append(alloc(PAGE))
            for seed, buffer in enumerate(first):
                scramble(buffer, seed)
                buffer.close()
            second = [managedmem.empty(16 * PAGE, policy=policy) for _ in range(4)]
            left += sum(len(buffer.page_runs()) > 1 for buffer in second if policy is None)
            assert policy is None or all(MigrationPolicy.of(b) == policy for b in second)
            for buffer in second:
                buffer.close()
        assert left > 0 or not EMULATED

    def test_can_be_changed_later(self, way):
        with way(LARGE, EVERYTHING) as buffer:
            buffer.read_mostly = False
            MigrationPolicy.prefer(Host()).apply(buffer.range(0, PAGE))
            assert [run.nbytes for run in buffer.page_runs()] == [PAGE, LARGE - PAGE]

    @pytest.mark.parametrize(
        "bad", ["prefer", 0, Device(0), MigrationPolicy, EVERYTHING.advice()], ids=label
    )
    def test_other_objects_are_refused(self, bad):
        for make in WAYS.values():
            with pytest.raises(TypeError, match="policy must be a MigrationPolicy or None, got"):
                make(PAGE, bad)

    def test_in_several_threads(self):
        def work(policies):
            for policy in itertools.islice(itertools.cycle(policies), 40):
                with managedmem.empty(3 * PAGE, policy=policy) as buffer:
                    assert MigrationPolicy.of(buffer) == policy

        at_once(*(functools.partial(work, samples()[n:]) for n in range(4)))


@pytest.mark.emulator_only
class TestCalls:
    def calls(self, *arguments, **more):
        with emulator.recording() as calls, managedmem.empty(*arguments, **more):
            pass
        return calls

    @pytest.mark.parametrize("policy", samples(), ids=label)
    @pytest.mark.parametrize("size", [4 * PAGE, LARGE])
    def test_are_one_for_each_advice(self, size, policy):
        assert len(advices(self.calls(size, policy=policy))) == len(policy.advice())

    def test_do_not_grow_with_large_memory(self):
        counts = {len(self.calls(n * MIB, policy=EVERYTHING)) for n in (4, 32)}
        assert len(counts) == 1
        assert not range_queries(self.calls(LARGE, policy=EVERYTHING))

    def test_come_between_the_allocation_and_all_else(self):
        made = [name for name in names(self.calls(LARGE, policy=EVERYTHING)) if "Mem" in name]
        assert made == ["cuMemAllocManaged"] + ["cuMemAdvise"] * 4 + ["cuMemFree"]

    def test_are_those_without_a_policy(self):
        assert names(self.calls(LARGE, policy=None)) == names(self.calls(LARGE))

    def test_are_in_a_trace(self):
        with managedmem.trace() as t:
            buffer = managedmem.empty(LARGE, name="weights", policy=EVERYTHING)
        called = list(t.events("call", of=buffer))
        assert [event.nbytes for event in called] == [LARGE] * len(EVERYTHING.advice())
        buffer.close()


@pytest.mark.emulator_only
class TestFailures:
    @pytest.mark.parametrize("size", [4 * PAGE, LARGE])
    @pytest.mark.parametrize("after", [False, True])
    def test_of_any_advice_leave_no_memory(self, way, size, after):
        before = emulator.live()
        for nth in range(1, len(EVERYTHING.advice()) + 1):
            emulator.fail("cuMemAdvise", nth=nth, code=719, after=after)
            with pytest.raises(CUDAError) as caught:
                way(size, EVERYTHING)
            emulator.clear_failures()
            assert (caught.value.code, caught.value.function) == (719, "cuMemAdvise")
            assert emulator.live() == before
        way(size, EVERYTHING).close()

    def test_of_the_allocation_advise_nothing(self, way):
        emulator.fail("cuMemAllocManaged", code=2)
        with emulator.recording() as calls, pytest.raises(MemoryError):
            way(LARGE, EVERYTHING)
        emulator.clear_failures()
        assert not advices(calls)

    def test_of_a_read_leave_no_memory(self, way):
        before = emulator.live()
        emulator.fail("cuMemRangeGetAttributes", nth=3, code=719)
        with pytest.raises(CUDAError):
            way(4 * PAGE, EVERYTHING)
        emulator.clear_failures()
        assert emulator.live() == before

    def test_of_a_system_without_advice_say_so(self):
        run_python(
            """
            import managedmem, pytest
            from managedmem import Device, MigrationPolicy, emulator
            managedmem.empty(4096).close()
            before = emulator.live()
            for size in (4096, 4 << 20):
                managedmem.empty(size, policy=MigrationPolicy()).close()
                with pytest.raises(managedmem.CUDAError, match="concurrent_managed_access"):
                    managedmem.empty(size, policy=MigrationPolicy.prefer(Device(0)))
            assert emulator.live() == before
            """,
            emulator="profile=wsl",
        )


class TestResources:
    def test_say_their_policy(self):
        for policy in samples():
            resource = ManagedMemoryResource(policy=policy)
            assert resource.policy == policy
            assert resource.preferred_location is policy.preferred_location
            assert resource.supports_advice is True
        assert ManagedMemoryResource().policy is None
        assert ManagedMemoryResource(policy=None).policy is None

    @pytest.mark.parametrize("place", [Device(0), Host(), Host(0)], ids=label)
    def test_prefer_a_location_without_a_pool(self, place):
        resource = ManagedMemoryResource(preferred_location=place)
        assert resource.preferred_location is place
        assert resource.policy == MigrationPolicy.prefer(place)
        with resource.allocate(PAGE) as small, resource.allocate(LARGE) as large:
            for buffer in (small, large):
                assert buffer.preferred_location in {place, Host()}
                assert buffer.memory_resource is resource
                buffer.preferred_location = None
                assert buffer.preferred_location is None

    def test_prefer_a_device_whose_id_they_have(self, device1):
        resource = ManagedMemoryResource(preferred_location=device1)
        assert resource.device_id == device1.device_id
        assert ManagedMemoryResource(preferred_location=Host()).device_id == Device().device_id

    def test_give_way_to_the_policy_of_an_allocation(self):
        resource = ManagedMemoryResource(policy=EVERYTHING)
        for policy in samples():
            with resource.allocate(PAGE, policy=policy) as buffer:
                assert MigrationPolicy.of(buffer) == policy
        assert resource.policy == EVERYTHING

    def test_advise_copies_too(self):
        resource = ManagedMemoryResource(policy=EVERYTHING)
        with resource.allocate(PAGE) as buffer:
            buffer.fill(3)
            for duplicate in (buffer.copy_to(), copy.copy(buffer), copy.copy(buffer[:100])):
                Device().sync()
                assert MigrationPolicy.of(duplicate) == EVERYTHING
                assert bytes(duplicate[:9]) == b"\x03" * 9
                duplicate.close()

    @pytest.mark.parametrize(
        "more",
        [
            {},
            {"preferred_location": Host(1)},
            {"policy": MigrationPolicy()},
            {"policy": MigrationPolicy.shared()},
            {"policy": EVERYTHING},
            {"pooled": False, "preferred_location": Device(0)},
        ],
        ids=label,
    )
    def test_can_be_made_again_from_their_text(self, more):
        resource = ManagedMemoryResource(**more)
        again = eval(repr(resource), vars(managedmem))
        assert repr(again) == repr(resource)
        assert again.policy == resource.policy
        assert again.preferred_location is resource.preferred_location

    def test_of_one_preferred_location_have_a_short_text(self):
        short = "ManagedMemoryResource(preferred_location=Device(0))"
        assert repr(ManagedMemoryResource(preferred_location=Device(0))) == short
        assert repr(ManagedMemoryResource(policy=MigrationPolicy.prefer(Device(0)))) == short

    @pytest.mark.parametrize("bad", [0, "cpu", object()], ids=label)
    def test_take_only_locations(self, bad):
        with pytest.raises(TypeError, match="Device or Host"):
            ManagedMemoryResource(preferred_location=bad)

    def test_take_one_of_the_two(self):
        with pytest.raises(ValueError, match="policy or preferred_location, not both"):
            ManagedMemoryResource(preferred_location=Host(), policy=EVERYTHING)

    def test_open_no_driver(self):
        run_python(
            """
            from managedmem import Host, ManagedMemoryResource, MigrationPolicy
            ManagedMemoryResource(preferred_location=Host())
            ManagedMemoryResource(policy=MigrationPolicy.read_duplicated())
            assert "libmanagedmem_emulator" not in open("/proc/self/maps").read()
            """
        )

    def test_do_not_keep_the_policy(self):
        policy = MigrationPolicy(read_mostly=True, accessed_by=[Host()])
        gone = weakref.ref(policy)
        resource = ManagedMemoryResource(policy=policy)
        with resource.allocate(PAGE, policy=policy), managedmem.empty(PAGE, policy=policy):
            del policy
            gc.collect()
            assert gone() is None
        assert resource.policy.read_mostly is True

    def test_that_are_closed_refuse(self):
        resource = ManagedMemoryResource(policy=EVERYTHING)
        resource.close()
        assert resource.policy == EVERYTHING
        with pytest.raises(RuntimeError, match="closed"):
            resource.allocate(PAGE, policy=EVERYTHING)


@needs_pools
class TestPools:
    def test_take_no_policy(self):
        with pytest.raises(ValueError, match="pooled=False"):
            ManagedMemoryResource(pooled=True, policy=EVERYTHING)
        for pool in (ManagedMemoryResource(pooled=True), DeviceMemoryResource(Device(0))):
            with pool:
                for policy in (EVERYTHING, MigrationPolicy()):
                    with pytest.raises(ValueError, match="without a pool"):
                        pool.allocate(PAGE, policy=policy)
                pool.allocate(PAGE, policy=None).close()

    def test_have_none(self):
        with ManagedMemoryResource(pooled=True, preferred_location=Host()) as pool:
            assert pool.policy is None
            assert pool.preferred_location is Host()
