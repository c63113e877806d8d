"""A clock for tune() on the emulated driver: seconds that follow from counted moves and faults.

Times of the emulated driver mean nothing, so a step gets its price from what it moved.
"""

import ctypes
import random

from constants import PAGE
from managedmem import Device, Host, _tune, emulator

MOVED, COPIED = 1 / 20e9, 1 / 20e9
FAULT_OF_HOST, FAULT_OF_DEVICE = 1e-6 * PAGE / 4096, 32e-6  # for a page, and for 64 KiB
IN_PLACE = 1 / 10e9  # for each byte that a device uses on the host
RUN = 1e-3


class StepClock:
    """Virtual seconds: the emulated driver's counters times prices, and what steps spend."""

    def __init__(self):
        self.seconds = 0.0
        self.last = emulator.counters()
        self.in_place = IN_PLACE

    def __call__(self):
        now = emulator.counters()
        htod, dtoh, dtod, host, device, copies = (
            a - b for a, b in zip(now, self.last, strict=True)
        )
        self.last = now
        self.seconds += (htod + dtoh + dtod) * MOVED + copies * PAGE * COPIED
        self.seconds += host * FAULT_OF_HOST + device * FAULT_OF_DEVICE
        return self.seconds

    def spend(self, seconds):
        """A price that no counter shows."""
        self.seconds += seconds


class Noise:
    """Random prices of a run, always the same for a seed."""

    def __init__(self, clock, seed, share=0.05):
        self.clock, self.random, self.share = clock, random.Random(seed), share

    def __call__(self):
        self.clock.spend(RUN * abs(self.random.gauss(1, self.share)))


class Steps:
    """What phases of tests do with memory, and what it costs."""

    def __init__(self, clock):
        self.clock = clock

    def host_writes(self, buffer, value=1):
        ctypes.memset(buffer.handle, value, buffer.nbytes)
        Device(0).sync()  # the driver notices it
        self.clock.spend(RUN)

    def host_reads(self, buffer):
        ctypes.string_at(buffer.handle, buffer.nbytes)
        Device(0).sync()
        self.clock.spend(RUN)

    def device_uses(self, buffer, write=False):
        emulator.touch(buffer, Device(0), write=write)
        if emulator.residency(buffer) is Host():
            self.clock.spend(buffer.nbytes * self.clock.in_place)
        self.clock.spend(RUN)


def tuned(step, buffers, clock, *, keep=True, disposable=(), points=None, **limits):
    """managedmem.tune() with a clock of the caller."""
    limits = {
        "max_seconds": 60.0,
        "pairs": 5,
        "min_gain": 0.03,
        "warmup": 1,
        "max_noise": 0.25,
        "verify": None,
        **limits,
    }
    tuning = _tune.prepared(step, buffers, disposable, points, _tune.Limits(**limits), clock=clock)
    return tuning.run(keep)
