"""prefetch= of empty(), allocate(), zeros(), full(), asarray() and empty_like()."""

from types import SimpleNamespace

import pytest

import managedmem
from calls import names
from constants import MIB, PAGE
from identifiers import label
from managedmem import (
    CUDAError,
    Device,
    DeviceMemoryResource,
    Host,
    ManagedMemoryResource,
    MigrationPolicy,
    Stream,
    emulator,
)
from pools import needs_pools

SIZE = 4 * MIB
PATTERN = bytes(range(256)) * (SIZE // 256)


def copied(data, **place):
    with managedmem.asarray(data) as source:
        return managedmem.asarray(source, copy=True, **place)


# Ways to make a buffer of SIZE bytes that is prefetched, with what it then contains.
WAYS = {
    "empty": (managedmem.empty, None),
    "empty_like": (
        lambda size, **place: managedmem.empty_like(
            SimpleNamespace(shape=(size,), dtype="uint8"), **place
        ),
        None,
    ),
    "allocate": (lambda size, **place: ManagedMemoryResource().allocate(size, **place), None),
    "zeros": (managedmem.zeros, bytes(SIZE)),
    "full": (lambda size, **place: managedmem.full(size, 7, "uint8", **place), b"\7" * SIZE),
    "asarray": (lambda _, **place: managedmem.asarray(PATTERN, **place), PATTERN),
    "asarray of a buffer": (lambda _, **place: copied(PATTERN, **place), PATTERN),
}


def places():
    return [*Device.all(), Host()]


@pytest.fixture(params=WAYS)
def way(request):
    """`(make, contents)`."""
    if request.param == "asarray":
        pytest.importorskip("numpy", reason="needs NumPy")
    return WAYS[request.param]


class TestPlace:
    def test_has_the_pages(self, way):
        make, contents = way
        for place in places():
            with make(SIZE, prefetch=place) as buffer:
                Device(0).sync()
                assert buffer.last_prefetch_location == place
                assert place == Host() or buffer.residency().on_host == 0
                assert contents is None or bytes(buffer) == contents

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("policy", [None, MigrationPolicy.prefer(Host())], ids=label)
    def test_is_the_one_that_was_given(self, way, policy):
        for place in [*places(), Host(0)]:
            with way[0](SIZE, prefetch=place, policy=policy) as buffer:
                Device(0).sync()
                assert emulator.residency(buffer) == (Host() if place == Host(0) else place)

    def test_is_not_the_preferred_location(self):
        policy = MigrationPolicy.prefer(Host())
        with managedmem.empty(SIZE, prefetch=Device(0), policy=policy) as buffer:
            Device(0).sync()
            assert buffer.preferred_location == Host()
            assert buffer.residency().on_host == 0

    def test_is_nowhere_without_it(self):
        for place in ({}, {"prefetch": None}):
            with managedmem.empty(SIZE, **place) as buffer:
                assert buffer.last_prefetch_location is None

    def test_may_be_of_another_library(self, way):
        torch = pytest.importorskip("torch", reason="needs torch")
        with way[0](SIZE, prefetch=torch.device("cuda", 0)) as buffer:
            assert buffer.last_prefetch_location == Device(0)

    def test_of_no_bytes(self):
        for make in (managedmem.empty, managedmem.zeros, ManagedMemoryResource().allocate):
            with make(0, prefetch=Device(0)) as buffer:
                assert buffer.nbytes == 0

    def test_of_an_array_that_is_in_managed_memory_already(self):
        with managedmem.zeros(SIZE) as buffer:
            assert managedmem.asarray(buffer, prefetch=Device(0)) is buffer
            Device(0).sync()
            assert buffer.residency().on_host == 0

    @needs_pools
    def test_of_a_pool(self):
        with (
            Stream() as stream,
            ManagedMemoryResource(pooled=True).allocate(
                SIZE, stream=stream, prefetch=Device(0)
            ) as buffer,
        ):
            stream.sync()
            assert buffer.last_prefetch_location == Device(0)

    @pytest.mark.emulator_only
    def test_is_reached_in_the_order_of_the_stream(self):
        with Stream() as stream, emulator.recording() as calls:
            ManagedMemoryResource().allocate(PAGE, stream=stream, prefetch=Device(0)).close()
            managedmem.empty(PAGE, prefetch=Device(0)).close()
            handle = stream.handle
        streams = [call.args["stream"] for call in calls if call.name == "cuMemPrefetchAsync"]
        assert streams == [handle, 0]


@pytest.mark.emulator_only
def test_is_no_prefetch_that_moved_nothing(way):
    """New memory has no pages that could move, and a trace does not blame that."""
    with managedmem.trace() as trace:
        for place in (Device(0), Host(1)):
            way[0](SIZE, prefetch=place).close()
    assert not [each for each in trace.findings() if "moved nothing" in each.observation]


class TestRefusals:
    @pytest.mark.emulator_only
    @pytest.mark.parametrize(
        "bad", [0, -1, "cuda", "host", [Device(0)], MigrationPolicy], ids=label
    )
    def test_come_before_the_allocation(self, way, bad):
        before = emulator.live()
        with emulator.recording() as calls, pytest.raises(TypeError, match="Device or Host"):
            way[0](PAGE, prefetch=bad)
        assert emulator.live() == before
        assert "cuMemPrefetchAsync" not in names(calls)

    def test_are_of_memory_that_cannot_move(self):
        with (
            DeviceMemoryResource(0) as pool,
            pytest.raises(ValueError, match="prefetch needs managed memory"),
        ):
            pool.allocate(PAGE, prefetch=Device(0))

    @pytest.mark.emulator_only
    def test_of_the_driver_leave_no_memory(self, way):
        managedmem.zeros(PAGE, prefetch=Device(0)).close()
        before = emulator.live()
        for place in places():
            emulator.fail("cuMemPrefetchAsync", code=719)
            with pytest.raises(CUDAError) as caught:
                way[0](SIZE, prefetch=place)
            emulator.clear_failures()
            assert (caught.value.code, caught.value.function) == (719, "cuMemPrefetchAsync")
            assert emulator.live() == before

    @pytest.mark.emulator_only
    def test_of_a_closed_stream_leave_no_memory(self):
        stream = Stream()
        stream.close()
        before = emulator.live()
        with pytest.raises(RuntimeError, match="closed"):
            ManagedMemoryResource().allocate(PAGE, stream=stream, prefetch=Device(0))
        assert emulator.live() == before
