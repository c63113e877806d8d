"""A random search for pages on which a policy is not applied or restored exactly.

Each case prepares a few pages with prefetches, discards, advice and policies, over one range and
over several, through the library and directly; applies a policy to some of the pages, and restores
them. The record of each of these pages must then agree with the policy, and after the restoration
with its earlier record; other pages must not change. On the emulated driver, some cases fail at an
advice, before or after it acted; then every page must have its earlier record.

    PYTHONPATH=python MANAGEDMEM_DRIVER=emulator \\
        python tests/support/policy_search.py FIRST_SEED CASES
"""

import ctypes
import random
import sys

import managedmem
from constants import EMULATED, PAGE
from driver import raw_driver
from managedmem import CUDAError, Device, Host, MigrationPolicy

MOST_PAGES = 12
SET_PREFERRED = 3


class Location(ctypes.Structure):
    """A CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Machine:
    """The devices, nodes and policies that cases choose from."""

    def __init__(self):
        from managedmem import emulator

        self.emulator = emulator if EMULATED else None
        self.resource = managedmem.ManagedMemoryResource()
        self.driver = raw_driver()
        Device(0).set_current()
        self.accessors = [*Device.all(), Host()]
        self.nodes = self.count_nodes()
        numbered = [Host(node) for node in range(self.nodes)]
        self.places = [*self.accessors, *numbered, Host.numa_current()]

    def count_nodes(self):
        with self.resource.allocate(PAGE) as page:
            for node in range(64):
                try:
                    page.prefetch(Host(node))
                except ValueError:
                    return node
        return 64

    def kept(self, place):
        """The location that reads back after it was preferred: with one node, the host."""
        if not isinstance(place, Host) or place is Host():
            return place
        if self.nodes == 1:
            return Host()
        return Host(0) if place is Host.numa_current() else place


class Case:
    def __init__(self, machine, seed):
        self.machine = machine
        self.rng = random.Random(seed)
        self.pages = self.rng.randrange(2, MOST_PAGES + 1)
        self.made = []

    def a_range(self):
        """A range of pages, sometimes without parts of its first and last page."""
        first = self.rng.randrange(self.pages)
        last = self.rng.randrange(first, self.pages)
        start, end = first * PAGE, (last + 1) * PAGE
        if self.rng.randrange(4) == 0:
            start, end = start + self.rng.randrange(PAGE // 2), end - self.rng.randrange(PAGE // 2)
        return start, end - start

    def views(self, ranges):
        return [self.buffer.range(*r) for r in ranges]

    def ranges(self, most=4):
        return [self.a_range() for _ in range(self.rng.randrange(1, most + 1))]

    def policy(self):
        rng = self.rng
        return MigrationPolicy(
            read_mostly=rng.random() < 0.5,
            preferred_location=rng.choice([None, None, *self.machine.places]),
            accessed_by=[a for a in self.machine.accessors if rng.random() < 0.3],
        )

    # Steps. Each returns its arguments, so that a failing case can be printed.

    def prefetch(self):
        places = self.machine.places
        ranges = self.ranges()
        if len(ranges) == 1 and self.rng.random() < 0.5:
            self.views(ranges)[0].prefetch(place := self.rng.choice(places))
            return ranges, place
        chosen = [self.rng.choice(places) for _ in ranges]
        dispatch = self.rng.choice(["auto", "batch", "loop"])
        managedmem.prefetch(self.views(ranges), chosen, dispatch=dispatch)
        return ranges, chosen, dispatch

    def discard_prefetch(self):
        ranges = [r for r in self.ranges() if r[1] >= 2 * PAGE]
        chosen = [self.rng.choice(self.machine.places) for _ in ranges]
        if ranges:
            managedmem.discard_prefetch(self.views(ranges), chosen)
        return ranges, chosen

    def advise(self):
        ranges = self.ranges()
        advice = self.rng.choice(
            [v + n for v in ("set_", "unset_") for n in ("read_mostly", "preferred_location")]
        )
        chosen = [self.rng.choice(self.machine.places) for _ in ranges]
        managedmem.advise(self.views(ranges), advice, chosen)
        return ranges, advice, chosen

    def advise_past_the_library(self):
        """Advise through the driver, without the library's workaround for missing records."""
        start, size = self.a_range()
        advice = self.rng.randrange(1, 7)
        devices = [Location(1, device.device_id) for device in Device.all()]
        nodes = [Location(3, node) for node in range(self.machine.nodes)]
        hosts = [Location(2, 0), *(nodes if advice == SET_PREFERRED else [])]
        place = self.rng.choice(devices + hosts)
        result = self.machine.driver.cuMemAdvise_v2(
            ctypes.c_uint64(self.buffer.handle + start), ctypes.c_size_t(size), advice, place
        )
        assert result == 0, result
        return start, size, advice, (place.type, place.id)

    def assign_accessed_by(self):
        (part,) = self.views([r := self.a_range()])
        part.accessed_by = members = self.policy().accessed_by
        return r, members

    def apply(self):
        ranges, policy = self.ranges(), self.policy()
        policy.apply(self.views(ranges))
        return ranges, policy

    STEPS = (
        prefetch,
        prefetch,
        discard_prefetch,
        discard_prefetch,
        advise,
        advise,
        advise_past_the_library,
        advise_past_the_library,
        assign_accessed_by,
        apply,
    )

    def prepare(self):
        for _ in range(self.rng.randrange(1, 10)):
            step = self.rng.choice(self.STEPS)
            self.made.append((step.__name__, step(self)))

    def state(self):
        """The record of each page."""
        return [run[2:] for run in self.buffer.page_runs() for _ in range(run.nbytes // PAGE)]

    def check(self, found, expected):
        for page, (now, then) in enumerate(zip(found, expected, strict=True)):
            assert now == then, f"page {page} of {self.pages}: {now}, not {then}\n{self.tell()}"

    def tell(self):
        return "\n".join(str(step) for step in self.made)

    def touched(self, ranges):
        return {page for a, n in ranges for page in range(a // PAGE, -(-(a + n) // PAGE))}

    def after(self, before, ranges, policy):
        """The expected records with the policy, without the last prefetch."""
        advice = (policy.read_mostly, self.machine.kept(policy.preferred_location))
        touched = self.touched(ranges)
        return [
            (*advice, policy.accessed_by, then[3]) if page in touched else then
            for page, then in enumerate(before)
        ]

    def apply_and_restore(self):
        before, ranges, policy = self.state(), self.ranges(), self.policy()
        self.made.append(("the policy", ranges, policy))
        with policy.applied(self.views(ranges)):
            self.check(self.state(), self.after(before, ranges, policy))
            if self.rng.random() < 0.3:
                self.prepare()
            inside, touched = self.state(), self.touched(ranges)
        expected = [
            (*then[:3], now[3]) if page in touched else now
            for page, (then, now) in enumerate(zip(before, inside, strict=True))
        ]
        self.check(self.state(), expected)

    def fail_in_the_middle(self):
        before, ranges, policy = self.state(), self.ranges(), self.policy()
        nth, after = self.rng.randrange(1, 8), self.rng.random() < 0.5
        self.made.append(("the policy that fails", ranges, policy, nth, after))
        self.machine.emulator.fail("cuMemAdvise", nth=nth, code=719, after=after)
        try:
            policy.apply(self.views(ranges))
        except CUDAError:
            self.check(self.state(), before)
        else:
            assert not self.machine.emulator.failure_fired(), self.tell()
            self.check(self.state(), self.after(before, ranges, policy))
        finally:
            self.machine.emulator.clear_failures()

    def run(self):
        with self.machine.resource.allocate(self.pages * PAGE) as self.buffer:
            self.prepare()
            if self.machine.emulator and self.rng.random() < 0.25:
                self.fail_in_the_middle()
            else:
                self.apply_and_restore()


def search(first, cases):
    """Runs a case for each seed; an AssertionError describes the first that is not exact."""
    machine = Machine()
    for seed in range(first, first + cases):
        try:
            Case(machine, seed).run()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def main():
    first, cases = (int(word) for word in sys.argv[1:])
    step = 1000
    for start in range(first, first + cases, step):
        search(start, min(step, first + cases - start))
        print(start + step, "exact", flush=True)


if __name__ == "__main__":
    main()
