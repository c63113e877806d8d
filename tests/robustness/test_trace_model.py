"""Random programs under trace(): sums against the emulated driver's counters and each other.

Allocations, frees, prefetches, accesses, advice, discards, names and marks, with failing driver
calls, disturbed queues, limits and threads. Each program runs in a process of its own.
"""

import pytest

from searches import FIRST_SEED
from whole_programs import run_to_the_end

pytestmark = [pytest.mark.emulator_only, pytest.mark.search]

PRELUDE = """
import gc, random, sys, time, warnings
from functools import partial
import managedmem
from managedmem import CUDAError, Device, Host, emulator
from races import race

warnings.simplefilter("ignore", managedmem.CUDAWarning)  # frees fail here, too

SIZES = (1, 4095, 4097, 65536, (1 << 20) + 1, 2 << 20, 5 << 20)
NAMES = ("a\\nb", "x" * 180, "<b>&amp;", "\\x1b[31m", "name (rest)", "#7", "\\u65e5\\u672c")
DIRECTIONS = ("to_device", "to_host", "between_devices")
COUNTS = ("host_faults", "device_faults", "remote_mapped", "duplicated", "evicted")

def moved():
    found = emulator.counters()
    return [found.bytes_htod, found.bytes_dtoh, found.bytes_dtod]

def sums(part):
    return [getattr(part, direction) for direction in DIRECTIONS]

def check_memories(part):
    parts = [*part.memories, part.unattributed]
    for cause, expected in part.total.by_cause.items():
        found = zip(*(memory.by_cause[cause] for memory in parts), strict=True)
        assert tuple(map(sum, found)) == expected, cause
    for name in COUNTS:
        assert sum(getattr(memory, name) for memory in parts) == getattr(part.total, name), name

class Program:
    def __init__(self, seed, first=0):
        self.random = random.Random(seed)
        self.buffers, self.made = [], first

    def pick(self):
        if not self.buffers:
            self.allocate()
        return self.random.choice(self.buffers)

    def part_of(self, buffer):
        start, end = sorted(self.random.choices(range(buffer.size + 1), k=2))
        return buffer[start:end] if start < end else buffer

    def place(self):
        return self.random.choice([Device(0), Device(1), Host()])

    def allocate(self):
        self.made += 1
        name = f"{self.random.choice(NAMES)}{self.made}"
        self.buffers.append(managedmem.empty(self.random.choice(SIZES), name=name))

    def free(self):
        buffer = self.pick()
        self.buffers.remove(buffer)
        if self.random.random() < 0.5:
            buffer.close()

    def prefetch(self):
        self.part_of(self.pick()).prefetch(self.place())

    def touch(self):
        emulator.touch(self.part_of(self.pick()), self.place(), self.random.random() < 0.5)

    def store(self):
        buffer = self.pick()
        with memoryview(buffer) as view:
            view[self.random.randrange(buffer.size)] = 1

    def advise(self):
        part = self.part_of(self.pick())
        if self.random.random() < 0.5:
            part.read_mostly = self.random.random() < 0.5
        else:
            part.preferred_location = self.random.choice([None, self.place()])

    def discard(self):
        buffer = self.pick()
        if buffer.size >= 4096:
            buffer.discard_prefetch(self.place())

    def step(self):
        name = self.random.choice((
            "allocate", "allocate", "free", "prefetch", "prefetch", "prefetch", "touch", "store",
            "advise", "discard",
        ))
        getattr(self, name)()

def run(seed, *, fails=False, disturbed=None, names=False, limit=10**6, steps=60):
    program = Program(seed)
    for _ in range(10):
        program.step()
    t = managedmem.trace(limit=limit)
    t.start()
    before, ends = moved(), []
    if disturbed:
        emulator.disturb_queue(**{disturbed: program.random.choice([1, 2, 7])})
    for step in range(steps):
        if fails and step % 5 == 0:
            code = program.random.choice([1, 2, 700, 800, 999])
            emulator.fail("*", program.random.randrange(1, 6), code, program.random.random() < 0.3)
        try:
            program.step()
            if step % 20 == 10:
                part = t.mark("part")
                ends.append(moved())
                check_memories(part)
            if names and step % 15 == 5:
                t.name(program.part_of(program.pick()), program.random.choice(NAMES))
        except (CUDAError, MemoryError):
            assert fails
    emulator.clear_failures()
    t.stop()
    after = moved()
    emulator.disturb_queue()
    check_memories(t)
    for part in t.slices:
        check_memories(part)
    if not disturbed:
        assert t.complete, t.problems
        assert sums(t.total) == [b - a for a, b in zip(before, after, strict=True)]
    if not disturbed and not fails:
        assert t.unattributed.moved == 0
        for part, a, b in zip(t.slices, [before, *ends], [*ends, after], strict=True):
            assert sums(part.total) == [y - x for x, y in zip(a, b, strict=True)]
    if not t.truncated:
        moves = [event.nbytes for event in t.events("move")]
        assert sum(moves) == t.total.moved
    t.summary(), t.to_dict(), t._repr_html_()
    assert disturbed != "drop" or t.lost > 0 or t.total.moved == 0

"""


@pytest.mark.parametrize(
    "options",
    [
        "",
        "names=True",
        "limit=1000, names=True, steps=150",
        "fails=True",
        "disturbed='drop'",
        "disturbed='lose'",
        "disturbed='garbage'",
        "disturbed='late'",
        "disturbed='garbage', fails=True, limit=1000, names=True",
    ],
)
def test_random_programs(options):
    seeds = f"range({FIRST_SEED}, {FIRST_SEED + 15})"
    run_to_the_end(PRELUDE + f"for seed in {seeds}: run(seed, {options})")


def test_programs_of_threads():
    """With marks of others meanwhile; no event of own memory is unattributed."""
    run_to_the_end(
        PRELUDE
        + f"seeds = range({FIRST_SEED}, {FIRST_SEED + 4})"
        + """
sys.setswitchinterval(1e-4)
for seed in seeds:
    programs = [Program(10 * seed + i, 1000 * i) for i in range(3)]
    left = programs.copy()

    def work(program):
        try:
            for _ in range(80):
                program.step()
            program.buffers.clear()
        finally:
            left.remove(program)

    def mark():
        while left:
            time.sleep(0.002)
            part = t.mark("part")
            sums(part.total), part.memories

    t = managedmem.trace(limit=1000 if seed % 2 else 10**6)
    t.start()
    before = moved()
    race(mark, *(partial(work, program) for program in programs))
    t.stop()
    assert sums(t.total) == [b - a for a, b in zip(before, moved(), strict=True)]
    assert t.complete and t.unattributed.moved == 0, t.unattributed
    for part in (t, *t.slices):
        check_memories(part)
"""
    )
