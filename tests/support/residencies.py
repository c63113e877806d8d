"""What residency() says, checked; and loads and stores of the host."""

import ctypes

import managedmem
from managedmem import Device, ResidencyRun

HOST, OFF, BOTH, DEVICE = "host", "not on host", "host and device", "device"
MAP, HINT, TRACE = "page map", "page map + prefetch", "page map + trace"


def store(buffer, value=1):
    Device(0).sync()
    ctypes.memset(buffer.handle, value, buffer.size)


def load(buffer):
    Device(0).sync()
    return ctypes.string_at(buffer.handle, buffer.size)


def residency(target):
    """That of the target, once the devices have done their work."""
    Device(0).sync()
    found = managedmem.residency(target)
    check(found)
    return found


def check(found):
    """Whatever the answer, its numbers agree with each other."""
    runs, on_device = found.runs, {}
    assert found.on_host + found.not_on_host == found.nbytes
    assert sum(run.nbytes for run in runs) == found.nbytes
    assert sum(run.nbytes for run in runs if run.where in (HOST, BOTH)) == found.on_host
    at = 0
    for run in runs:
        assert isinstance(run, ResidencyRun)
        assert run.offset == at
        assert run.nbytes > 0
        at += run.nbytes
        check_evidence(run)
        for device in run.devices:
            on_device[device] = on_device.get(device, 0) + run.nbytes
    assert sum(found.last_asked_to.values()) <= found.not_on_host
    assert (found.on_device or {}) == on_device
    assert found.untouched is None
    assert found.numa is None or sum(found.numa.values()) <= found.on_host


def check_evidence(run):
    assert run.where in (HOST, OFF, BOTH, DEVICE)
    assert run.where in (OFF, DEVICE) or run.last_prefetch_location is None
    assert bool(run.devices) == (run.where in (BOTH, DEVICE))
    to_device = isinstance(run.last_prefetch_location, Device)
    if run.where in (BOTH, DEVICE):
        assert run.evidence == TRACE
    elif run.where == OFF:
        assert run.evidence == (HINT if to_device else MAP)
    else:
        assert run.evidence in (MAP, TRACE)
