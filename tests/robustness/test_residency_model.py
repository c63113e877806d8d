"""Random programs under trace(): residency() against the pages of the emulated driver.

Host stores and loads, prefetches, kernels, discards, advice, frees and marks, on parts of pages
too. What residency() says is compared page by page with the emulated driver's own books, which no
event shows. It must say the place of every page that moved since the trace began, unless it was
discarded. Each group of programs runs in a process of its own.
"""

import pytest

from programs import run_python
from searches import FIRST_SEED

pytestmark = [pytest.mark.emulator_only, pytest.mark.search]

PRELUDE = """
import ctypes, random, sys, threading
import managedmem
from managedmem import Device, Host, emulator

PAGE = 4096
SIZES = (1, 4095, 4097, 65536, (1 << 20) + 1, 2 << 20, 5 << 20)
HOST = {"host", "host and device"}
library = ctypes.CDLL(managedmem.driver_info()["path"])
library.emu_places.restype = ctypes.c_long
library.emu_places.argtypes = [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t]

def books(buffer):
    "What the emulated driver knows: for each page the devices that have it, and if the host does."
    count = -(-buffer.size // PAGE)
    places = (ctypes.c_uint64 * count)()
    assert library.emu_places(buffer.handle, buffer.size, places, count) == count
    return [(each & 0xffffffff, each >> 32 != 0) for each in places]

class Tracked:
    "A buffer, its pages after the last step, and those whose place the trace must know."
    def __init__(self, buffer):
        self.buffer = buffer
        self.pages = books(buffer)
        self.known = [False] * len(self.pages)

    def follow(self):
        now = books(self.buffer)
        for i, (before, after) in enumerate(zip(self.pages, now, strict=True)):
            if before != after and before != (0, False) and after != (0, False):
                self.known[i] = True
        self.pages = now

class Program:
    def __init__(self, seed, discards):
        self.random = random.Random(seed)
        self.discards = discards
        self.tracked = []
        self.said = {}

    def pick(self):
        if not self.tracked:
            self.allocate()
        return self.random.choice(self.tracked)

    def part_of(self, tracked):
        size = tracked.buffer.size
        start, end = sorted(self.random.choices(range(size + 1), k=2))
        return tracked.buffer[start:end] if start < end else tracked.buffer

    def part(self):
        return self.part_of(self.pick())

    def place(self):
        return self.random.choice([Device(0), Device(1), Host()])

    def allocate(self):
        size = self.random.choice(SIZES)
        name = self.random.choice([None, "named"])
        self.tracked.append(Tracked(managedmem.empty(size, name=name)))

    def free(self):
        tracked = self.pick()
        self.tracked.remove(tracked)
        if self.random.random() < 0.5:
            tracked.buffer.close()

    def store(self):
        part = self.part()
        ctypes.memset(part.handle, self.random.randrange(1, 256), part.size)

    def load(self):
        part = self.part()
        ctypes.string_at(part.handle, part.size)

    def prefetch(self):
        self.part().prefetch(self.place())

    def prefetch_several(self):
        parts = [self.part() for _ in range(self.random.randrange(1, 5))]
        managedmem.prefetch(parts, self.place())

    def kernel(self):
        emulator.touch(self.part(), self.place(), self.random.random() < 0.5)

    def fill(self):
        self.part().fill(self.random.randrange(256))

    def read_mostly(self):
        self.part().read_mostly = self.random.random() < 0.7

    def preferred(self):
        self.part().preferred_location = self.random.choice([None, self.place()])

    def accessed_by(self):
        self.part().accessed_by.add(self.random.choice([Device(0), Device(1)]))

    def discard(self):
        if not self.discards:
            return
        tracked = self.pick()
        part = self.part_of(tracked)
        part = part if part.size >= 2 * PAGE else tracked.buffer
        if part.size < 2 * PAGE:
            return
        if self.random.random() < 0.5:
            part.discard()
        else:
            part.discard_prefetch(self.place())

    STEPS = (
        ("allocate", 3), ("free", 1), ("store", 4), ("load", 3), ("prefetch", 6),
        ("prefetch_several", 2), ("kernel", 5), ("fill", 1), ("read_mostly", 3), ("preferred", 1),
        ("accessed_by", 1), ("discard", 2),
    )

    def step(self):
        names, weights = zip(*self.STEPS, strict=True)
        getattr(self, self.random.choices(names, weights)[0])()
        for tracked in self.tracked:
            tracked.follow()

    def check(self):
        "All buffers at once, and a part of one."
        if not self.tracked:
            return
        whole = managedmem.residency([tracked.buffer for tracked in self.tracked])
        assert whole.problem is None
        for tracked, part in zip(self.tracked, whole.parts, strict=True):
            self.compare(tracked, 0, part)
        tracked = self.pick()
        part = self.part_of(tracked)
        self.compare(tracked, part.handle - tracked.buffer.handle, part.residency())

    def compare(self, tracked, start, found):
        assert found.nbytes == sum(run.nbytes for run in found.runs)
        on_device = {}
        for run in found.runs:
            first = (start + run.offset) // PAGE
            end = -(-(start + run.offset + run.nbytes) // PAGE)
            for device in run.devices:
                on_device[device] = on_device.get(device, 0) + run.nbytes
            for page in range(first, end):
                self.compare_page(tracked, page, run)
            self.said[run[2:4]] = self.said.get(run[2:4], 0) + 1
        assert found.on_device == on_device

    def compare_page(self, tracked, page, run):
        devices, host = tracked.pages[page]
        said = sum(1 << device.device_id for device in run.devices)
        where = (page, run, tracked.pages[page])
        if run.evidence == "page map + trace":
            assert said == devices, where
            assert (run.where in HOST) == host, where
            assert run.where == {(0, True): "host", (1, True): "host and device",
                                 (1, False): "device"}[(int(devices != 0), host)], where
        else:
            assert not run.devices
            assert host or run.where == "not on host", where
            # After a discard of other pages the trace may know less, but nothing that is wrong.
            assert self.discards or not tracked.known[page] or host, where

def run(seed, *, discards=False, steps=80, said=None):
    emulator.schedule("eager")
    program = Program(seed, discards)
    for _ in range(12):
        program.step()
    for tracked in program.tracked:
        tracked.known = [False] * len(tracked.known)
    with managedmem.trace(faults=seed % 3 != 0, sync=seed % 2 == 0) as t:
        for step in range(steps):
            program.step()
            if step % 3 == 0:
                program.check()
            if step % 20 == 10:
                t.mark("part")
        program.check()
    assert t.complete, t.problems
    for key, count in program.said.items():
        said[key] = said.get(key, 0) + count
"""


def passes(code):
    done = run_python(PRELUDE + code + "\nprint('fine')\n")
    assert done.stdout == "fine\n"
    assert done.stderr == ""


@pytest.mark.parametrize("first", range(0, 32, 8))
def test_random_programs(first):
    passes(f"""
said = {{}}
for seed in range({FIRST_SEED + first}, {FIRST_SEED + first + 8}): run(seed, said=said)
by_trace = {{where for where, evidence in said if evidence == "page map + trace"}}
assert by_trace == {{"host", "device", "host and device"}}, said
""")


@pytest.mark.parametrize("first", range(0, 16, 8))
def test_random_programs_that_discard(first):
    passes(f"""
said = {{}}
for seed in range({FIRST_SEED + first}, {FIRST_SEED + first + 8}):
    run(seed, discards=True, said=said)
assert ("device", "page map + trace") in said, said
""")
