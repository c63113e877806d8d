"""What the tests of traces share: touching memory, and sums that must add up."""

import ctypes
import weakref

import pytest

import managedmem

COUNTS = (
    *("host_faults", "host_write_faults", "device_faults", "device_write_faults", "remote_mapped"),
    *("thrashing", "duplicated", "evicted"),
)


def store(buffer, value=1):
    ctypes.memset(buffer.handle, value, buffer.nbytes)


def load(buffer):
    return ctypes.string_at(buffer.handle, buffer.nbytes)


def assert_memories_add_up(part):
    parts = [*part.memories, part.unattributed]
    for cause, moved in part.total.by_cause.items():
        assert tuple(map(sum, zip(*(m.by_cause[cause] for m in parts), strict=True))) == moved
    for name in COUNTS:
        if getattr(part.total, name) is not None:
            assert sum(getattr(m, name) for m in parts) == getattr(part.total, name), name
    throttled = sum(m.throttled for m in parts)
    assert throttled == pytest.approx(part.total.throttled)


def check_ended_traces(monkeypatch):
    """The body of a fixture that checks the sums of every trace that a test has ended."""
    traces = weakref.WeakSet()
    start = managedmem.typing.Trace.start

    def noted(trace):
        start(trace)
        traces.add(trace)

    monkeypatch.setattr(managedmem.typing.Trace, "start", noted)
    yield
    for trace in traces:
        if "ended" in repr(trace):
            for part in (trace, *trace.slices):
                assert_memories_add_up(part)
            for name in ("to_device", "to_host", "between_devices"):
                total = sum(getattr(part.total, name) for part in trace.slices)
                assert total == getattr(trace.total, name)
