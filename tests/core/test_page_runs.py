"""Sub-ranges by bytes, and page_runs(): what a buffer's pages have been told, run by run."""

import contextlib
import gc
import itertools
import random
import weakref

import pytest

import managedmem
from calls import range_queries
from constants import MIB, PAGE
from contents import contents
from driver import device_memory
from managedmem import Device, Host, ManagedBuffer, emulator
from managedmem.typing import PageRun
from memory_model import Page, merged

PAGES = 64


def check_cover(buffer, runs):
    assert runs[0].offset == 0
    for left, right in itertools.pairwise(runs):
        assert left.offset + left.nbytes == right.offset
        assert tuple(left[2:]) != tuple(right[2:])
    assert runs[-1].offset + runs[-1].nbytes == buffer.nbytes


class TestRange:
    def test_is_a_view_of_exactly_these_bytes(self, buf):
        part = buf.range(10, 100)
        assert (part.handle, part.nbytes) == (buf.handle + 10, 100)
        assert (part.dtype, part.shape) == ("uint8", (100,))
        part.fill(7)
        assert contents(buf)[:112] == bytes(10) + bytes([7]) * 100 + bytes(2)

    def test_counts_bytes_whatever_the_dtype(self, buf):
        part = buf.view("float32", (-(-MIB // 16), 4)).range(2, 3)
        assert (part.handle, part.nbytes, part.dtype) == (buf.handle + 2, 3, "uint8")

    def test_of_a_view_counts_from_the_view(self, buf):
        part = buf[PAGE : 3 * PAGE].range(PAGE, PAGE)
        assert (part.handle, part.nbytes) == (buf.handle + 2 * PAGE, PAGE)
        with pytest.raises(ValueError, match="not inside"):
            buf[PAGE : 3 * PAGE].range(PAGE, PAGE + 1)

    def test_the_whole_and_the_last_byte(self, buf):
        assert buf.range(0, MIB).nbytes == MIB
        assert buf.range(offset=MIB - 1, nbytes=1).handle == buf.handle + MIB - 1

    def test_keeps_its_parent_alive_and_is_closed_with_it(self, alloc):
        part = managedmem.empty(4 * PAGE).range(PAGE, PAGE)
        gc.collect()
        part.read_mostly = True
        buffer = alloc(PAGE)
        part = buffer.range(0, 10)
        buffer.close()
        assert part.is_closed
        with pytest.raises(RuntimeError, match="closed"):
            buffer.range(0, 1)
        with pytest.raises(RuntimeError, match="closed"):
            part.page_runs()

    def test_is_of_the_same_class(self):
        class Mine(ManagedBuffer):
            pass

        with managedmem.empty(PAGE) as buffer:
            assert type(Mine.from_handle(buffer.handle, PAGE).range(0, 1)) is Mine

    @pytest.mark.parametrize(
        ("offset", "nbytes"),
        [
            (0, -1),
            (MIB + 1, 0),
            (-1, 1),
            (-1, MIB),
            (0, MIB + 1),
            (1, MIB),
            (MIB, 1),
            (2**62, 2**62),
            (2**63 - 1, 2**63 - 1),
            (1, 2**63 - 1),
            (2**64, 1),
            (0, 2**64),
            (-(2**64), 1),
            (2**64 - 1, 2),
        ],
    )
    def test_what_is_not_inside_is_refused(self, buf, offset, nbytes):
        with pytest.raises(ValueError, match=r"not inside the buffer|0 bytes or more|out of range"):
            buf.range(offset, nbytes)

    @pytest.mark.parametrize("bad", [1.0, "1", None, True])
    def test_wants_ints(self, buf, bad):
        with pytest.raises(TypeError, match="offset must be an int"):
            buf.range(bad, 1)
        with pytest.raises(TypeError, match="nbytes must be an int"):
            buf.range(0, bad)

    def test_wants_both(self, buf):
        with pytest.raises(TypeError, match="nbytes"):
            buf.range(0)


class TestPageRuns:
    def test_a_fresh_buffer_is_one_run(self, alloc):
        buffer = alloc(PAGES * PAGE)
        assert buffer.page_runs() == ((0, PAGES * PAGE, *Page()),)

    def test_records_have_names(self, alloc, device0):
        buffer = alloc(2 * PAGE)
        buffer.read_mostly = True
        buffer.preferred_location = device0
        buffer.accessed_by = [device0, Host()]
        buffer.prefetch(Host())
        (run,) = buffer.page_runs()
        assert isinstance(run, PageRun)
        assert (run.offset, run.nbytes) == (0, 2 * PAGE)
        assert run.read_mostly is True
        assert run.preferred_location is device0
        assert run.accessed_by == {device0, Host()}
        assert isinstance(run.accessed_by, frozenset)
        assert run.last_prefetch_location is Host()
        assert hash(run) == hash(buffer.page_runs()[0])
        with pytest.raises(AttributeError):
            run.offset = 1

    def test_pages_that_differ_in_anything_are_apart(self, alloc, device0):
        buffer = alloc(8 * PAGE)
        part = buffer.range(PAGE, PAGE)
        part.read_mostly = True
        buffer.range(3 * PAGE, PAGE).preferred_location = device0
        buffer.range(5 * PAGE, PAGE).accessed_by = [Host()]
        buffer.range(7 * PAGE, PAGE).prefetch(Host())
        runs = buffer.page_runs()
        check_cover(buffer, runs)
        assert [run.nbytes for run in runs] == [PAGE] * 8
        assert [run.read_mostly for run in runs] == [i == 1 for i in range(8)]
        assert [run.preferred_location for run in runs].index(device0) == 3
        assert [len(run.accessed_by) for run in runs] == [0, 0, 0, 0, 0, 1, 0, 0]
        assert [run.last_prefetch_location for run in runs][6:] == [None, Host()]
        part.read_mostly = False
        assert buffer.page_runs()[0].nbytes == 3 * PAGE

    def test_a_view_that_begins_and_ends_inside_pages(self, alloc):
        buffer = alloc(4 * PAGE)
        buffer.range(PAGE, PAGE).read_mostly = True
        view = buffer.range(PAGE // 2, 2 * PAGE)
        assert view.page_runs() == (
            (0, PAGE // 2, *Page()),
            (PAGE // 2, PAGE, *Page(read_mostly=True)),
            (PAGE // 2 + PAGE, PAGE // 2, *Page()),
        )
        assert buffer.range(PAGE + 10, 5).page_runs() == ((0, 5, *Page(read_mostly=True)),)

    @pytest.mark.parametrize("seed", range(12))
    def test_equals_a_model(self, alloc, members, seed):
        rng = random.Random(seed)
        # Without records of freed memory.
        buffer = alloc(max(2 * MIB, PAGES * PAGE))[: PAGES * PAGE]
        places = [*Device.all(), Host()]
        pages = [Page()] * PAGES
        for _ in range(30):
            first = rng.randrange(PAGES)
            count = rng.choice([1, 1, 2, 5, rng.randrange(1, PAGES + 1)])
            last = min(first + count, PAGES)
            # Some ranges begin and end inside their pages.
            cut = rng.choice([0, 0, 1, PAGE // 2 - 1])
            part = buffer.range(first * PAGE + cut, (last - first) * PAGE - 2 * cut)
            each = [buffer.range(i * PAGE, PAGE) for i in range(first, last)]
            # For ranges, drivers record only what is set; the rest goes page by page.
            place = rng.choice(places)
            match rng.randrange(6):
                case 0:
                    value = rng.random() < 0.7
                    for one in [part] if value else each:
                        one.read_mostly = value
                    change = {"read_mostly": value}
                case 1:
                    value = rng.choice([place, place, None])
                    for one in [part] if value else each:
                        one.preferred_location = value
                    change = {"preferred_location": value}
                case 2:
                    for one in each:
                        one.prefetch(place)
                    change = {"last_prefetch_location": place}
                case kind:
                    member = rng.choice(members)
                    adds = kind < 5
                    for one in [part] if adds else each:
                        (one.accessed_by.add if adds else one.accessed_by.discard)(member)
                    for i in range(first, last):
                        had = pages[i].accessed_by
                        have = had | {member} if adds else had - {member}
                        pages[i] = pages[i]._replace(accessed_by=have)
                    change = {}
            pages[first:last] = [page._replace(**change) for page in pages[first:last]]
        runs = buffer.page_runs()
        check_cover(buffer, runs)
        assert list(runs) == merged(pages)
        begin, end = sorted(rng.sample(range(1, PAGES * PAGE), 2))
        view = buffer.range(begin, end - begin)
        inside = pages[begin // PAGE : (end - 1) // PAGE + 1]
        if len(inside) > 1:
            ends = (PAGE - begin % PAGE, (end - 1) % PAGE + 1)
            assert list(view.page_runs()) == merged(inside, *ends)
        Device(0).sync()

    def test_of_what_is_not_managed(self):
        with device_memory() as pointer, pytest.raises(ValueError, match="managed-memory"):
            ManagedBuffer.from_handle(pointer, PAGE).page_runs()

    def test_records_outlive_their_buffer(self):
        buffer = managedmem.empty(PAGE)
        runs, gone = buffer.page_runs(), weakref.ref(buffer)
        del buffer
        gc.collect()
        assert gone() is None
        assert runs[0].nbytes == PAGE

    def test_many_runs(self, alloc):
        count = 2000
        buffer = alloc(count * PAGE)
        for i in range(0, count, 2):
            buffer.range(i * PAGE, PAGE).read_mostly = True
        runs = buffer.page_runs()
        check_cover(buffer, runs)
        assert [run.read_mostly for run in runs] == [True, False] * (count // 2)

    @pytest.mark.emulator_only
    def test_costs_one_query_a_page(self, alloc):
        buffer = alloc(10 * PAGE)
        with emulator.recording() as calls:
            buffer.range(PAGE - 1, 2 * PAGE + 2).page_runs()
        assert len(calls) == len(range_queries(calls)) == 4
        assert {call.name for call in calls} == {"cuMemRangeGetAttributes"}

    @pytest.mark.emulator_only
    def test_numa_places(self, alloc):
        buffer = alloc(2 * PAGE)
        buffer.range(0, PAGE).preferred_location = Host(1)
        buffer.range(0, PAGE).prefetch(Host(0))
        buffer.range(PAGE, PAGE).prefetch(Host.numa_current())
        assert [run[3] for run in buffer.page_runs()] == [Host(1), None]
        assert [run[5] for run in buffer.page_runs()] == [Host(0), Host.numa_current()]


TAKEN_BACK = {
    "update": lambda buffers: buffers[0].accessed_by.update(Device.all(), [Host()]),
    "assign": lambda buffers: setattr(buffers[0], "accessed_by", [*Device.all(), Host()]),
    "swap": lambda buffers: setattr(buffers[1], "accessed_by", [Host()]),
    "clear": lambda buffers: buffers[1].accessed_by.clear(),
    "set read_mostly": lambda buffers: managedmem.advise(buffers, "set_read_mostly"),
    "unset read_mostly": lambda buffers: managedmem.advise(buffers, "unset_read_mostly"),
    "set preferred": lambda b: managedmem.advise(
        b, "set_preferred_location", [Host(), Device(0), Host()]
    ),
    "unset preferred": lambda b: managedmem.advise(b, "unset_preferred_location"),
    "set accessed_by": lambda b: managedmem.advise(b, "set_accessed_by", Host()),
    "unset accessed_by": lambda b: managedmem.advise(
        b, "unset_accessed_by", [Device(0), Host(), Device(0)]
    ),
    "overlapping": lambda b: managedmem.advise(
        [b[2], b[2].range(0, PAGE), b[0]], "set_preferred_location", [Host(), Device(0), Host()]
    ),
}


@pytest.mark.emulator_only
@pytest.mark.parametrize("after", [False, True], ids=["refused", "failed after the effect"])
@pytest.mark.parametrize("act", TAKEN_BACK.values(), ids=TAKEN_BACK)
def test_what_all_pages_had_is_back_where_the_driver_fails(alloc, act, after):
    """A change of several advices is all or nothing for targets whose pages are alike."""
    buffers = [alloc(4 * PAGE) for _ in range(3)]
    buffers[1].read_mostly = True
    buffers[1].preferred_location = Device(0)
    buffers[1].accessed_by = [Device(0)]
    buffers[2].preferred_location = Host()
    buffers[2].accessed_by = [Host(), Device(0)]
    before = [buffer.page_runs() for buffer in buffers]
    for nth in range(1, 10):
        emulator.fail("cuMemAdvise", nth=nth, code=999, after=after)
        try:
            act(buffers)
        except managedmem.CUDAError:
            assert [buffer.page_runs() for buffer in buffers] == before
        fired = emulator.failure_fired()
        emulator.clear_failures()
        if not fired:
            break
    assert nth > 1


@pytest.mark.emulator_only
@pytest.mark.parametrize("exact", [False, True], ids=["advise", "policy"])
def test_pages_that_differed_where_the_driver_fails(alloc, exact):
    """One query for a target says no more than that its pages have nothing in common; a policy asks
    each page."""
    mixed, other = alloc(4 * PAGE), alloc(4 * PAGE)
    mixed.range(PAGE, PAGE).preferred_location = Device(0)
    before = mixed.page_runs()
    emulator.fail("cuMemAdvise", nth=2, code=999)
    with pytest.raises(managedmem.CUDAError):
        if exact:
            managedmem.MigrationPolicy.prefer(Host()).apply([mixed, other])
        else:
            managedmem.advise([mixed, other], "set_preferred_location", Host())
    assert emulator.failure_fired()
    assert mixed.preferred_location is None
    assert (mixed.range(PAGE, PAGE).preferred_location is Device(0)) is exact
    if exact:
        assert mixed.page_runs() == before


@pytest.mark.emulator_only
@pytest.mark.parametrize(
    "act",
    [
        lambda members: members.add(Host()),
        lambda members: members.discard(Host()),
        lambda members: members.symmetric_difference_update([Device(0), Host()]),
    ],
    ids=["add", "discard", "swap"],
)
def test_a_last_advice_that_is_refused_leaves_pages_that_differ(alloc, act):
    buffer = alloc(4 * PAGE)
    buffer.accessed_by = [Device(0)]
    buffer.range(PAGE, PAGE).accessed_by.add(Host())
    before = buffer.page_runs()
    for nth in (1, 2):
        emulator.fail("cuMemAdvise", nth=nth, code=999)
        with contextlib.suppress(managedmem.CUDAError):
            act(buffer.accessed_by)
        if not emulator.failure_fired():
            break
        emulator.clear_failures()
        assert buffer.page_runs() == before
    assert nth == 2
