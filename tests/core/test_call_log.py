"""Which driver calls an operation makes, and how many. Needs the emulator's call log."""

import pytest

import managedmem
from calls import advices, names, range_queries, recorded
from constants import MIB, PAGE
from managedmem import Host
from plans import adjacent, separate

pytestmark = pytest.mark.emulator_only

SET_ACCESSED_BY, UNSET_ACCESSED_BY = 5, 6


class TestProperties:
    @pytest.mark.parametrize(
        "name", ["read_mostly", "preferred_location", "last_prefetch_location"]
    )
    def test_a_read_is_one_query(self, buf, name):
        assert len(recorded(lambda: getattr(buf, name))) == 1

    def test_nothing_is_cached(self, buf):
        calls = recorded(lambda: [buf.read_mostly for _ in range(5)])
        assert len(range_queries(calls)) == 5

    @pytest.mark.parametrize("value", [True, False])
    def test_a_write_of_read_mostly_is_one_advice(self, buf, value):
        """One query before the advice finds the value to restore after a failure. After an advice
        that sets something new, another query checks the record."""
        asked = "cuMemRangeGetAttribute"
        calls = recorded(lambda: setattr(buf, "read_mostly", value))
        assert names(calls) == [asked, "cuMemAdvise", asked][: 2 + value]
        assert calls[1].args["advice"] == (1 if value else 2)
        calls = recorded(lambda: setattr(buf, "read_mostly", value))
        assert names(calls) == [asked, "cuMemAdvise"]

    @pytest.mark.parametrize("location", [Host(), Host(1), None], ids=repr)
    def test_a_write_of_preferred_location_is_one_advice(self, buf, location):
        """Queries as for read_mostly. A node, and the value to restore, are queried by type and
        number."""
        asked, both = "cuMemRangeGetAttribute", "cuMemRangeGetAttributes"
        before = {Host(): [asked, both], Host(1): [both, both], None: [both]}[location]
        behind = {Host(): [asked], Host(1): [both], None: []}[location]
        calls = recorded(lambda: setattr(buf, "preferred_location", location))
        assert names(calls) == [*before, "cuMemAdvise", *behind]
        (call,) = advices(calls)
        assert call.args["advice"] == (4 if location is None else 3)
        assert call.args["count"] == buf.size
        assert call.result == 0
        calls = recorded(lambda: setattr(buf, "preferred_location", location))
        assert names(calls) == [before[0], "cuMemAdvise"]

    def test_a_slice_names_just_its_range(self, buf):
        calls = recorded(lambda: setattr(buf[PAGE : 3 * PAGE], "read_mostly", True))
        (call,) = advices(calls)
        assert call.args["ptr"] == buf.handle + PAGE
        assert call.args["count"] == 2 * PAGE

    def test_the_host_is_a_host_and_never_a_device(self, buf):
        """CUDA 13 takes (HOST, 0); (DEVICE, -1) is what other libraries send."""
        (call,) = advices(recorded(lambda: setattr(buf, "preferred_location", Host())))
        assert call.args["type"] == 2
        calls = recorded(lambda: buf.prefetch(Host()))
        assert calls[-1].args["type"] == 2


class TestAccessedBy:
    def test_reading_is_one_query(self, buf, device0):
        for read in (set, len, bool, lambda p: device0 in p, lambda p: p == {device0}):
            assert len(recorded(lambda read=read: read(buf.accessed_by))) == 1

    def test_getting_the_proxy_asks_nothing(self, buf):
        assert recorded(lambda: buf.accessed_by) == []

    def test_strangers_are_never_advised(self, buf, members):
        buf.accessed_by = members
        for use in (lambda p: Host(0) in p, lambda p: p.discard(Host(0)), lambda p: p.discard(7)):
            calls = recorded(lambda use=use: use(buf.accessed_by))
            assert advices(calls) == []
            assert len(calls) <= 1

    @pytest.mark.parametrize(
        ("before", "change", "added", "removed"),
        [
            ("", lambda b, m: b.accessed_by.update(m), "012", ""),
            ("0", lambda b, m: b.accessed_by.update(m), "12", ""),
            ("012", lambda b, m: b.accessed_by.update(m), "", ""),
            ("012", lambda b, m: b.accessed_by.clear(), "", "012"),
            ("", lambda b, m: b.accessed_by.clear(), "", ""),
            ("01", lambda b, m: setattr(b, "accessed_by", [m[1], m[2]]), "2", "0"),
            ("01", lambda b, m: setattr(b, "accessed_by", m[:2]), "", ""),
            ("01", lambda b, m: b.accessed_by.difference_update([m[0], m[2]]), "", "0"),
            ("01", lambda b, m: b.accessed_by.intersection_update([m[1], m[2]]), "", "0"),
            ("01", lambda b, m: b.accessed_by.symmetric_difference_update(m[1:]), "2", "1"),
            ("01", lambda b, m: b.accessed_by.__ior__({m[1], m[2]}), "2", ""),
            ("01", lambda b, m: b.accessed_by.__isub__({m[1], m[2]}), "", "1"),
            ("01", lambda b, m: b.accessed_by.__iand__({m[1], m[2]}), "", "0"),
            ("01", lambda b, m: b.accessed_by.__ixor__({m[1], m[2]}), "2", "1"),
        ],
    )
    def test_bulk_is_one_query_and_only_the_needed_advice(
        self, buf, members, device1, before, change, added, removed
    ):
        """And one more query, for whether what was added is recorded."""
        buf.accessed_by = [members[int(i)] for i in before]
        calls = recorded(lambda: change(buf, members))
        queries = 2 if added else 1
        assert len(range_queries(calls)) == queries
        made = [call.args["advice"] for call in advices(calls)]
        assert made.count(SET_ACCESSED_BY) == len(added)
        assert made.count(UNSET_ACCESSED_BY) == len(removed)
        assert len(calls) == queries + len(added) + len(removed)

    @pytest.mark.parametrize("there", [True, False])
    def test_discard_is_one_query_and_one_advice(self, buf, there):
        """Even where the member does not show: some of the pages may have it."""
        buf.accessed_by = [Host()] if there else []
        calls = recorded(lambda: buf.accessed_by.discard(Host()))
        assert names(calls) == ["cuMemRangeGetAttribute", "cuMemAdvise"]
        assert calls[1].args["advice"] == UNSET_ACCESSED_BY

    def test_an_operator_on_the_property_works_once(self, buf, members):
        """`buf.accessed_by |= x` also assigns the proxy back: that must ask and advise nothing."""
        calls = recorded(lambda: exec("buf.accessed_by |= x", {"buf": buf, "x": set(members)}))
        assert len(range_queries(calls)) == 2
        assert len(advices(calls)) == len(members)

    @pytest.mark.parametrize("values", [[0], [Host(0)]], ids=repr)
    def test_bad_members_reach_no_driver(self, buf, members, values):
        def assign():
            with pytest.raises((TypeError, ValueError)):
                buf.accessed_by = [*members, *values]

        assert recorded(assign) == []


class TestPrefetch:
    def test_one_target_is_one_call_per_range(self, buf, device0, stream):
        calls = recorded(lambda: buf.prefetch(device0, stream=stream))
        assert names(calls) == ["cuMemPrefetchAsync"]
        assert calls[0].args["count"] == buf.size

    @pytest.mark.parametrize("order", [range(8), (3, 0, 7, 1, 6, 2, 5, 4)])
    def test_neighbours_in_any_order_become_one_call(self, buf, device0, stream, order):
        pages = [adjacent(buf, 8)[i] for i in order]
        calls = recorded(lambda: managedmem.prefetch(pages, device0, stream=stream))
        assert names(calls) == ["cuMemPrefetchAsync"]
        assert calls[0].args["count"] == 8 * PAGE

    def test_gaps_inside_a_page_are_bridged(self, buf, device0, stream):
        parts = [page[: PAGE - 100] for page in adjacent(buf, 3)]
        calls = recorded(lambda: managedmem.prefetch(parts, device0, stream=stream))
        assert [c.args["count"] for c in calls] == [3 * PAGE - 100]

    def test_neighbours_with_different_locations_stay_apart(self, buf, device0, stream):
        pages = adjacent(buf, 4)
        where = [device0, device0, Host(), Host()]
        calls = recorded(lambda: managedmem.prefetch(pages, where, stream=stream, dispatch="loop"))
        assert [c.args["count"] for c in calls if c.name == "cuMemPrefetchAsync"] == [2 * PAGE] * 2

    def test_different_allocations_are_never_merged(self, alloc, device0, stream):
        buffers = [alloc(2 * MIB) for _ in range(3)]
        calls = recorded(
            lambda: managedmem.prefetch(buffers, device0, stream=stream, dispatch="loop")
        )
        assert names(calls).count("cuMemPrefetchAsync") == 3

    def test_the_loop_is_one_call_a_range(self, buf, device0, stream):
        calls = recorded(
            lambda: managedmem.prefetch(separate(buf, 5), device0, stream=stream, dispatch="loop")
        )
        assert names(calls) == ["cuMemPrefetchAsync"] * 5

    @pytest.mark.parametrize("count", [1, 5])
    def test_the_batch_is_one_call(self, buf, device0, stream, count):
        ranges = separate(buf, count)
        calls = recorded(
            lambda: managedmem.prefetch(ranges, device0, stream=stream, dispatch="batch")
        )
        assert names(calls) == ["cuMemPrefetchBatchAsync"]
        assert calls[0].args["count"] == count

    def test_auto_takes_one_of_them(self, buf, device0, stream):
        calls = recorded(lambda: managedmem.prefetch(separate(buf, 5), device0, stream=stream))
        made = [name for name in names(calls) if "Prefetch" in name]  # it may ask for places first
        assert made in (["cuMemPrefetchAsync"] * 5, ["cuMemPrefetchBatchAsync"])

    def test_a_deferred_prefetch_goes_through_a_host_function(self, buf, device0, stream):
        calls = recorded(lambda: managedmem.prefetch(buf, device0, stream=stream, defer=True))
        assert "cuLaunchHostFunc" in names(calls)
        assert names(calls).count("cuMemPrefetchAsync") == 1

    def test_defer_can_be_forbidden(self, alloc, device0, stream):
        large = alloc(64 * MIB)
        calls = recorded(lambda: managedmem.prefetch(large, device0, stream=stream, defer=False))
        assert names(calls) == ["cuMemPrefetchAsync"]


class TestDiscard:
    @pytest.mark.parametrize("count", [1, 5])
    def test_is_one_batch_call(self, buf, stream, count):
        calls = recorded(lambda: managedmem.discard(separate(buf, count), stream=stream))
        assert names(calls) == ["cuMemDiscardBatchAsync"]
        assert calls[0].args["count"] == count

    def test_neighbours_become_one_range(self, buf, stream):
        calls = recorded(lambda: managedmem.discard(adjacent(buf, 5), stream=stream))
        assert names(calls) == ["cuMemDiscardBatchAsync"]
        assert calls[0].args["count"] == 1

    def test_gaps_inside_a_page_are_left_alone(self, buf, stream):
        """The bytes in them are somebody else's."""
        parts = [buf[: 2 * PAGE - 100], buf[2 * PAGE : 4 * PAGE]]
        calls = recorded(lambda: managedmem.discard(parts, stream=stream))
        assert [c.args["count"] for c in calls] == [2]

    @pytest.mark.parametrize(("dispatch", "count"), [("batch", 1), ("loop", 5)])
    def test_discard_prefetch_is_one_call_for_both(self, buf, device0, stream, dispatch, count):
        calls = recorded(
            lambda: managedmem.discard_prefetch(
                separate(buf, 5), device0, stream=stream, dispatch=dispatch
            )
        )
        assert names(calls) == ["cuMemDiscardAndPrefetchBatchAsync"] * count
        assert sum(call.args["count"] for call in calls) == 5

    def test_never_reaches_the_legacy_stream(self, buf, device0):
        """The driver refuses it there: an internal stream carries the work."""
        calls = recorded(lambda: (buf.discard(), buf.discard_prefetch(device0)))
        batches = [c for c in calls if "Batch" in c.name]
        assert len(batches) == 2
        assert all(c.result == 0 for c in batches)


class TestAdvise:
    """A query for each range comes first, for the value to restore after a failure. After each
    advice that sets something new, a query checks the record."""

    def test_one_target_is_one_call(self, buf):
        asked = "cuMemRangeGetAttribute"
        calls = recorded(lambda: managedmem.advise(buf, "set_read_mostly"))
        assert names(calls) == [asked, "cuMemAdvise", asked]
        calls = recorded(lambda: managedmem.advise(buf, "unset_read_mostly"))
        assert names(calls) == [asked, "cuMemAdvise"]

    def test_neighbours_become_one_call(self, buf):
        calls = recorded(lambda: managedmem.advise(adjacent(buf, 6), "set_read_mostly"))
        assert [call.args["count"] for call in advices(calls)] == [6 * PAGE]

    def test_gaps_inside_a_page_are_bridged(self, buf):
        parts = [page[: PAGE - 100] for page in adjacent(buf, 3)]
        calls = recorded(lambda: managedmem.advise(parts, "set_read_mostly"))
        assert [call.args["count"] for call in advices(calls)] == [3 * PAGE - 100]

    def test_ranges_apart_are_a_call_each(self, buf):
        calls = recorded(lambda: managedmem.advise(separate(buf, 6), "set_read_mostly"))
        assert [call.args["count"] for call in advices(calls)] == [PAGE] * 6
        assert len(range_queries(calls)) == 12
        calls = recorded(lambda: managedmem.advise(separate(buf, 6), "unset_read_mostly"))
        assert len(advices(calls)) == len(range_queries(calls)) == 6

    def test_pages_are_not_asked(self, alloc):
        buffers = [alloc(4 * PAGE) for _ in range(3)]
        for buffer in buffers:
            buffer.range(PAGE, PAGE).read_mostly = True
        calls = recorded(lambda: managedmem.advise(buffers, "unset_read_mostly"))
        assert names(calls) == ["cuMemRangeGetAttribute"] * 3 + ["cuMemAdvise"] * 3

    def test_what_merges_into_one_range_asks_once(self, buf):
        calls = recorded(lambda: managedmem.advise(adjacent(buf, 4), "unset_read_mostly"))
        assert names(calls) == ["cuMemRangeGetAttribute", "cuMemAdvise"]


class TestBuffer:
    def test_allocation_and_release(self):
        buffer = None

        def allocate():
            nonlocal buffer
            buffer = managedmem.ManagedMemoryResource().allocate(PAGE)

        assert names(recorded(allocate)).count("cuMemAllocManaged") == 1
        assert names(recorded(buffer.close)).count("cuMemFree") == 1
        assert recorded(buffer.close) == []

    def test_wrapping_and_slicing_ask_nothing(self, buf):
        def use():
            wrapped = managedmem.ManagedBuffer.from_handle(buf.handle, buf.size)
            wrapped[:PAGE].view("float32", (PAGE // 4,))

        assert recorded(use) == []

    @pytest.mark.parametrize(
        "call",
        [
            lambda b: managedmem.prefetch([b, 7], Host()),
            lambda b: managedmem.prefetch([b, b], [Host()]),
            lambda b: managedmem.advise([b, None], "set_read_mostly"),
            lambda b: managedmem.advise(b, "bogus"),
            lambda b: managedmem.advise(b, "set_accessed_by", Host(0)),
            lambda b: managedmem.discard([b, "x"]),
            lambda b: managedmem.discard_prefetch([b, b], [Host(), 0]),
            lambda b: b.prefetch(None),
            lambda b: b.prefetch(0),
            lambda b: b.fill(256),
        ],
    )
    def test_bad_arguments_reach_no_driver(self, buf, call):
        def use():
            with pytest.raises((TypeError, ValueError, OverflowError)):
                call(buf)

        assert [n for n in names(recorded(use)) if "Attribute" not in n] == []


class TestThresholds:
    """The sizes from which a prefetch is deferred or shares a batch call, as measurements say."""

    @pytest.fixture
    def large(self, alloc):
        return alloc(40 * MIB)

    @pytest.mark.parametrize(
        ("size", "deferred"),
        [(2 * MIB - 1, False), (2 * MIB, True), (2 * MIB + 1, True)],
        ids=["below", "at", "above"],
    )
    @pytest.mark.parametrize("where", [Host(), Host(numa_id=0)], ids=repr)
    def test_deferral_to_the_host(self, large, stream, where, size, deferred):
        self.check_deferral(large, where, size, deferred, stream)

    @pytest.mark.parametrize(
        ("size", "deferred"),
        [(16 * MIB - 1, False), (16 * MIB, True), (16 * MIB + 1, True)],
        ids=["below", "at", "above"],
    )
    def test_deferral_to_a_device(self, large, device0, stream, size, deferred):
        self.check_deferral(large, device0, size, deferred, stream)

    @staticmethod
    def check_deferral(large, where, size, deferred, stream):
        part, half = large.range(0, size), size // 2
        several = [large.range(0, half), large.range(20 * MIB, size - half)]
        for call in (
            lambda: part.prefetch(where, stream=stream),
            lambda: managedmem.prefetch(part, where, stream=stream),
            lambda: managedmem.prefetch(several, where, stream=stream),
            lambda: managedmem.PrefetchPlan((b, where) for b in several).execute(stream=stream),
        ):
            assert names(recorded(call)).count("cuLaunchHostFunc") == deferred

    def test_the_two_directions_are_not_added_up(self, large, device0, stream):
        parts = [large.range(0, 2 * MIB - PAGE), large.range(20 * MIB, 16 * MIB - PAGE)]
        calls = recorded(lambda: managedmem.prefetch(parts, [Host(), device0], stream=stream))
        assert "cuLaunchHostFunc" not in names(calls)

    @pytest.mark.parametrize(
        ("size", "batched"),
        [((64 << 10) - 1, False), (64 << 10, True), ((64 << 10) + 1, True)],
        ids=["below", "at", "above"],
    )
    def test_a_batch_call_of_prefetches(self, large, device0, stream, size, batched):
        parts = [large.range(i * MIB, size) for i in range(3)]
        calls = recorded(lambda: managedmem.prefetch(parts, device0, stream=stream))
        expected = ["cuMemPrefetchBatchAsync"] if batched else ["cuMemPrefetchAsync"] * 3
        assert [name for name in names(calls) if "Prefetch" in name] == expected

    def test_one_range_that_would_gain_goes_alone(self, large, device0, stream):
        parts = [large.range(i * MIB, (64 << 10) - (i != 1)) for i in range(3)]
        calls = recorded(lambda: managedmem.prefetch(parts, device0, stream=stream))
        assert names(calls).count("cuMemPrefetchAsync") == 3
        assert "cuMemPrefetchBatchAsync" not in names(calls)
