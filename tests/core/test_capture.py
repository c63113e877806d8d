"""What may happen in a thread that is capturing a CUDA graph, without breaking the capture.

A global capture forbids its thread to allocate, free, advise and wait, and is destroyed by the
attempt; the garbage collector runs when it likes. The library relaxes the thread's capture mode
around its own calls.
"""

import ctypes
import gc

import pytest

import managedmem
from constants import MIB
from driver import CAPTURE_GLOBAL, CAPTURE_RELAXED, capturing, raw_driver
from managedmem import Host, ManagedMemoryResource, MigrationPolicy, Stream
from world import EVERYTHING

pytestmark = pytest.mark.usefixtures("current_device")


@pytest.fixture
def capture(stream):
    """A global capture on `stream`; the test fails if it did not survive."""
    with capturing(stream, CAPTURE_GLOBAL) as running:
        yield running
    assert running.result == 0, f"the capture ended with {running.result}"


@pytest.fixture
def other():
    with Stream() as made:
        yield made


def test_allocating_and_closing(capture):
    ManagedMemoryResource().allocate(MIB).close()


@pytest.mark.parametrize("size", [MIB, 4 * MIB])
def test_allocating_with_a_policy(capture, size):
    with managedmem.empty(size, policy=EVERYTHING) as buffer:
        assert MigrationPolicy.of(buffer) == EVERYTHING


def test_allocating_with_contents(device0, capture):
    for policy in (None, MigrationPolicy.prefer(Host()), MigrationPolicy.prefer(device0)):
        for make in (
            managedmem.zeros,
            lambda size, policy: managedmem.full(size, 0.1, policy=policy),
        ):
            make(MIB, policy=policy).close()
        managedmem.asarray(b"abc", policy=MigrationPolicy.prefer(Host())).close()


def test_the_garbage_collector_frees_a_buffer(alloc, capture):
    cycle = [managedmem.empty(MIB)]
    cycle.append(cycle)
    del cycle
    gc.collect()


def test_the_last_reference_goes(capture):
    buffer = managedmem.empty(MIB)
    del buffer


def test_advice(buf, device0, capture):
    buf.read_mostly = True
    buf.preferred_location = device0
    buf.accessed_by = {device0, Host()}
    assert buf.read_mostly is True
    buf.accessed_by.clear()
    buf.preferred_location = None
    buf.read_mostly = False


@pytest.mark.parametrize("on_legacy", [False, True], ids=["another stream", "legacy stream"])
def test_work_on_another_stream(buf, device0, other, capture, on_legacy):
    stream = None if on_legacy else other
    buf.prefetch(device0, stream=stream)
    buf.discard(stream=stream)
    buf.discard_prefetch(device0, stream=stream)
    assert buf.last_prefetch_location is device0


def test_making_and_ending_a_stream(capture):
    Stream().close()


def test_waiting_for_another_stream(buf, device0, other, capture):
    buf.prefetch(device0, stream=other)
    other.sync()
    assert other.query() is True


def test_closing_after_a_stream(device0, other, capture):
    buffer = managedmem.empty(MIB)
    buffer.prefetch(device0, stream=other)
    buffer.close(stream=other)
    assert buffer.is_closed


@pytest.fixture
def blocking():
    """A stream that the legacy stream waits for, unlike those that the library makes."""
    driver, handle = raw_driver(), ctypes.c_void_p()
    managedmem.Device(0).set_current()
    assert driver.cuStreamCreate(ctypes.byref(handle), 0) == 0
    yield Stream.from_handle(handle.value)
    assert driver.cuStreamDestroy_v2(handle) == 0


USES_OF_THE_LEGACY_STREAM = {
    "prefetch": lambda buffer, plan: buffer.prefetch(Host()),
    "prefetch of two": lambda buffer, plan: managedmem.prefetch([buffer[:1], buffer[-1:]], Host()),
    "discard": lambda buffer, plan: buffer.discard(),
    "discard_prefetch": lambda buffer, plan: buffer.discard_prefetch(Host()),
    "plan": lambda buffer, plan: plan.execute(),
    "numpy": lambda buffer, plan: buffer.numpy(),
    "copy of system memory": lambda buffer, plan: buffer.copy_from(bytes(MIB)),
}


@pytest.mark.parametrize("mode", [CAPTURE_GLOBAL, CAPTURE_RELAXED], ids=["global", "relaxed"])
@pytest.mark.parametrize("name", USES_OF_THE_LEGACY_STREAM)
def test_the_legacy_stream_while_a_blocking_stream_captures(buf, device0, blocking, name, mode):
    """It would wait for the capturing stream, so drivers refuse it and destroy the capture."""
    if name == "numpy":
        pytest.importorskip("numpy", reason="needs NumPy")
    plan = managedmem.PrefetchPlan([(buf, device0)])
    with capturing(blocking, mode) as running:
        with pytest.raises(
            managedmem.CUDAError, match="cannot be recorded in a CUDA graph"
        ) as error:
            USES_OF_THE_LEGACY_STREAM[name](buf, plan)
        assert error.value.code == 900
    assert running.result == 0
    USES_OF_THE_LEGACY_STREAM[name](buf, plan)
