"""Targets that overlap or share a page: the last one given wins, as if given one by one."""

import ctypes
import random

import pytest

import managedmem
from constants import MIB, PAGE
from contents import contents, pattern, write
from driver import managed_memory, raw_driver
from foreign_objects import CudaArray
from live_memory import settle
from managedmem import Device, Host, PrefetchPlan, emulator

HALF = PAGE // 2
DISPATCH = ["auto", "batch", "loop"]
emulator_only = pytest.mark.emulator_only


def advise(targets, places, **_):
    managedmem.advise(targets, "set_preferred_location", places)


def execute_plan(targets, places, **options):
    PrefetchPlan(zip(targets, places, strict=True)).execute(**options)


def execute_discarding_plan(targets, places, **options):
    PrefetchPlan(zip(targets, places, strict=True)).discard_prefetch(**options)


MOVES = {
    "prefetch": managedmem.prefetch,
    "plan": execute_plan,
    "discard_prefetch": managedmem.discard_prefetch,
    "plan, discarding": execute_discarding_plan,
}
DISCARDING = (managedmem.discard_prefetch, execute_discarding_plan)
FUNCTIONS = {"advise": advise, **MOVES}
each_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
each_move = pytest.mark.parametrize("function", MOVES.values(), ids=MOVES)
each_dispatch = pytest.mark.parametrize("dispatch", DISPATCH)


def went_to(function, page):
    Device().sync()
    return page.preferred_location if function is advise else page.last_prefetch_location


def fresh(alloc):
    """Pages without records in separate blocks, because drivers leave out records where neighbours
    differ."""
    return alloc(2 * MIB)


@each_dispatch
@each_function
class TestTwoOfOnePage:
    """The page in the middle of three is shared; discards need a whole page each beside it."""

    @pytest.mark.parametrize("swapped", [False, True], ids=["ascending", "descending"])
    def test_the_last_wins(self, alloc, device0, function, dispatch, swapped):
        for places in ([device0, Host()], [Host(), device0]):
            buffer = fresh(alloc)[: 3 * PAGE]
            parts = [buffer[: PAGE + HALF], buffer[PAGE + HALF :]]
            function(parts[::-1] if swapped else parts, places, dispatch=dispatch)
            found = [went_to(function, buffer[i * PAGE :][:PAGE]) for i in range(3)]
            ends = places[::-1] if swapped else places
            assert found == [ends[0], places[-1], ends[1]]

    def test_an_overlap_in_the_middle_of_pages(self, alloc, device0, function, dispatch):
        if function in DISCARDING:
            pytest.skip(
                "drivers record a part of it only; test_as_if_one_by_one looks at the pages"
            )
        for first, last in ((device0, Host()), (Host(), device0)):
            for swapped in (False, True):
                buffer = fresh(alloc)[: 4 * PAGE]
                parts = [buffer[: 2 * PAGE + HALF], buffer[PAGE + HALF :]]
                function(parts[::-1] if swapped else parts, [first, last], dispatch=dispatch)
                found = [went_to(function, buffer[i * PAGE :][:PAGE]) for i in range(4)]
                assert found == ([last] * 3 + [first] if swapped else [first] + [last] * 3)


class TestAllocationsOfOnePage:
    """The driver packs allocations of up to 1 MiB 512 bytes apart."""

    @pytest.mark.parametrize("function", [advise, managedmem.prefetch, execute_plan])
    @each_dispatch
    def test_the_last_wins(self, buf, device0, function, dispatch):
        pointers = [managed_memory(512) for _ in range(3)]
        arrays = [CudaArray(buf, shape=(512,), pointer=pointer) for pointer in pointers]
        pages = [managedmem.ManagedBuffer.from_handle(pointer, 512) for pointer in pointers]
        pairs = [i for i in (0, 1) if pointers[i] // PAGE == pointers[i + 1] // PAGE]
        assert pairs
        first, second = arrays[pairs[0] : pairs[0] + 2]
        for targets in ([first, second], [second, first]):
            for places in ([device0, Host()], [Host(), device0]):
                function(targets, places, dispatch=dispatch)
                assert went_to(function, pages[pairs[0]]) is places[-1]
        for pointer in pointers:
            assert raw_driver().cuMemFree_v2(ctypes.c_uint64(pointer)) == 0


PAGES = 12


def random_targets(rng, whole_page):
    """Random ranges, most of which share pages."""
    chosen = []
    while len(chosen) < 2 or rng.randrange(8):
        start = rng.randrange(PAGES * 4) * (PAGE // 4) + rng.choice([0, 0, 1])
        end = start + rng.randrange(1, 16) * (PAGE // 4) - rng.choice([0, 0, 1])
        first, last = -(-start // PAGE), end // PAGE
        if end <= PAGES * PAGE and (first < last or not whole_page):
            chosen.append((start, end))
    return chosen


@emulator_only
@each_dispatch
@each_function
def test_as_if_one_by_one(alloc, function, dispatch):
    """Against the plain definition, over random targets: where pages are, and what is kept."""
    rng = random.Random(f"{function.__name__} {dispatch}")
    buffer, data = alloc(PAGES * PAGE), pattern(PAGES * PAGE)
    for _ in range(50):
        write(buffer, data)
        buffer.prefetch(Host())
        managedmem.MigrationPolicy.default().apply(buffer)
        ranges = random_targets(rng, function in DISCARDING)
        places = [rng.choice([*Device.all(), Host()]) for _ in ranges]
        function([buffer.range(a, z - a) for a, z in ranges], places, dispatch=dispatch)
        settle()
        wanted = [None if function is advise else Host()] * PAGES
        kept = set(range(PAGES * PAGE))
        for (start, end), place in zip(ranges, places, strict=True):
            first, last = start // PAGE, -(-end // PAGE)
            wanted[first:last] = [place] * (last - first)
            if function in DISCARDING:
                kept -= set(range(-(-start // PAGE) * PAGE, end // PAGE * PAGE))
        look = went_to if function is advise else lambda _, page: emulator.residency(page)
        found = [look(function, buffer.range(i * PAGE, PAGE)) for i in range(PAGES)]
        assert found == wanted, (ranges, places)
        now = contents(buffer)
        assert all(now[i] == data[i] for i in kept)


@emulator_only
@each_move
def test_ranges_of_pages_of_their_own_still_go_together(alloc, device0, device1, function, stream):
    buffer = alloc(2 * MIB)
    parts = [buffer[i << 17 :][: 1 << 16] for i in range(8)]
    with emulator.recording() as calls:
        function(parts[::-1], [device0, device1] * 4, stream=stream)
    assert [c.name for c in calls if "Batch" in c.name or "Prefetch" in c.name] == [
        "cuMemDiscardAndPrefetchBatchAsync" if function in DISCARDING else "cuMemPrefetchBatchAsync"
    ]


def test_explain_says_that_the_order_decides(buf, device0):
    parts = [buf[: PAGE + HALF], buf[PAGE + HALF : 3 * PAGE]]
    plan = PrefetchPlan(zip(parts, [device0, Host()], strict=True))
    assert "ranges share pages and have different locations" in plan.explain()
    text = plan.explain(discard=True, dispatch="batch")
    assert "4 driver calls for 2 entries" in text
    assert "2 x cuMemPrefetchAsync" in text
    assert text.count("ranges share pages and have different locations") == 2
