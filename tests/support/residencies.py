"""What residency() says, checked; and loads and stores of the host."""

import ctypes

import managedmem
from managedmem import Device
from managedmem.typing import ResidencyRun

HOST, OFF, NOWHERE = "host", "not on host", "nowhere"
MAP, HINT, DRIVER = "page map", "page map + prefetch", "driver"


def store(buffer, value=1):
    Device(0).sync()
    ctypes.memset(buffer.handle, value, buffer.size)


def load(buffer):
    Device(0).sync()
    return ctypes.string_at(buffer.handle, buffer.size)


def residency(target):
    """The residency of the target, once the devices have done their work."""
    Device(0).sync()
    found = managedmem.residency(target)
    check(found)
    return found


def check(found):
    """Check that the numbers of an answer agree with each other."""
    runs = found.runs
    assert found.on_host + found.not_on_host == found.nbytes
    assert sum(run.nbytes for run in runs) == found.nbytes
    assert sum(run.nbytes for run in runs if run.where == HOST) == found.on_host
    at = 0
    for run in runs:
        assert isinstance(run, ResidencyRun)
        assert run.offset == at
        assert run.nbytes > 0
        at += run.nbytes
        check_evidence(run)
    assert sum(found.last_asked_to.values()) <= found.not_on_host
    assert sum(found.devices.values()) + found.nowhere <= found.not_on_host
    assert found.numa is None or sum(found.numa.values()) <= found.on_host


def check_evidence(run):
    if run.evidence == DRIVER:
        assert run.where in (HOST, OFF, NOWHERE) or run.where == str(run.device)
        assert run.last_prefetch_location is None
        return
    assert run.where in (HOST, OFF)
    assert run.where == OFF or run.last_prefetch_location is None
    to_device = isinstance(run.last_prefetch_location, Device)
    assert run.evidence == (HINT if to_device else MAP)
