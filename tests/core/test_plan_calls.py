"""PrefetchPlan: which driver calls an execution makes, and that explain() says so beforehand."""

import collections
import re
import time

import pytest

import managedmem
from calls import names
from constants import KIB, MIB, PAGE
from foreign_objects import CudaArray
from managedmem import Device, Host, PrefetchPlan, Stream, emulator
from managedmem._plan_text import RESIDENT, explanation
from plans import adjacent, separate
from programs import run_python

pytestmark = pytest.mark.emulator_only

QUERIES = {"cuMemRangeGetAttribute", "cuPointerGetAttributes"}


def recorded(call):
    """The calls that move something, in order."""
    with emulator.recording() as calls:
        call()
    return [c for c in calls if c.name not in QUERIES]


def discard_function(parts, where):
    """The function on the same parts, to be called as a plan's method is."""
    return lambda **named: managedmem.discard_prefetch(parts, where, **named)


class TestCalls:
    """How many driver calls, and which."""

    def test_adding_calls_nothing_for_a_buffer(self, buf):
        assert recorded(lambda: PrefetchPlan([(buf, Host())]).add(buf[:PAGE], Host())) == []

    def test_neighbours_in_any_order_take_one_call(self, buf, device0, stream):
        pages = adjacent(buf, 8)
        plan = PrefetchPlan((pages[i], device0) for i in (3, 0, 7, 1, 6, 2, 5, 4))
        for _ in range(2):
            calls = recorded(lambda: plan.execute(stream=stream))
            assert [(c.name, c.args["count"]) for c in calls] == [("cuMemPrefetchAsync", 8 * PAGE)]

    def test_what_moves_to_devices_takes_one_batch_call(self, alloc, device0, stream):
        large = alloc(32 * MIB)
        plan = PrefetchPlan((part, device0) for part in separate(large, 16, MIB))
        calls = recorded(lambda: plan.execute(stream=stream, defer=False))
        assert [(c.name, c.args["count"]) for c in calls] == [("cuMemPrefetchBatchAsync", 16)]
        # They are there now: a call each costs less.
        calls = recorded(lambda: plan.execute(stream=stream, defer=False))
        assert names(calls) == ["cuMemPrefetchAsync"] * 16

    @pytest.mark.skipif(PAGE >= 64 * KIB, reason="a page of this system is no small range")
    def test_small_ranges_go_together_only_without_their_contents(self, buf, device0, stream):
        parts = separate(buf, 8)
        plan = PrefetchPlan((part, device0) for part in parts)
        calls = recorded(lambda: managedmem.prefetch(parts, device0, stream=stream))
        assert names(calls) == ["cuMemPrefetchAsync"] * 8
        assert "below 64 KiB" in plan.explain(stream=stream)
        for function in (plan.discard_prefetch, discard_function(parts, device0)):
            managedmem.prefetch(parts, Host(), stream=stream, dispatch="loop")
            text = plan.explain(stream=stream, discard=True)
            assert "over 8 ranges: to a device" in text
            assert "KiB or" not in text
            calls = recorded(lambda function=function: function(stream=stream))
            counts = [(c.name, c.args["count"]) for c in calls]
            assert counts == [("cuMemDiscardAndPrefetchBatchAsync", 8)]

    def test_an_execution_follows_where_pages_are(self, alloc, device0, stream):
        large = alloc(32 * MIB)
        parts = separate(large, 16, MIB)
        plan = PrefetchPlan((part, device0) for part in parts)
        plan.execute(stream=stream)
        for part in parts[5:]:
            part.prefetch(Host(), stream=stream)
        calls = recorded(lambda: plan.execute(stream=stream, defer=False))
        assert names(calls) == ["cuMemPrefetchBatchAsync"] + ["cuMemPrefetchAsync"] * 5
        assert calls[0].args["count"] == 11
        assert {c.args["ptr"] for c in calls[1:]} == {p.handle for p in parts[:5]}

    @pytest.mark.parametrize(("dispatch", "count"), [("batch", 1), ("loop", 5)])
    def test_dispatch_can_be_forced(self, buf, device0, stream, dispatch, count):
        plan = PrefetchPlan((part, device0) for part in separate(buf, 5))
        for _ in range(2):
            assert len(recorded(lambda: plan.execute(stream=stream, dispatch=dispatch))) == count
            calls = recorded(lambda: plan.discard_prefetch(stream=stream, dispatch=dispatch))
            assert names(calls) == ["cuMemDiscardAndPrefetchBatchAsync"] * count
            assert sum(c.args["count"] for c in calls) == 5

    def test_a_plan_calls_what_the_function_calls(self, alloc, device0, stream):
        """The same shapes, through the same code: the logs are equal."""
        large = alloc(32 * MIB)
        for shape in SHAPES.values():
            pairs = shape(large)
            targets, where = [t for t, _ in pairs], [w for _, w in pairs]
            plan = PrefetchPlan(pairs)
            logs = []
            for act in (
                lambda plan=plan: plan.execute(stream=stream),
                lambda targets=targets, where=where: managedmem.prefetch(
                    targets, where, stream=stream
                ),
            ):
                while large.last_prefetch_location is not Host():  # drivers may record it in parts
                    large.prefetch(Host(), stream=stream)
                logs.append(recorded(act))
            assert logs[0] == logs[1]

    def test_equal_entries_beside_another_place_are_one_range(self, alloc, device0, stream):
        first, second = alloc(MIB), alloc(MIB)
        plan = PrefetchPlan([(first, device0), (first, device0), (second, Host())])
        assert len(recorded(lambda: plan.execute(stream=stream, defer=False))) == 2

    def test_one_host_function_defers_all(self, alloc, device0, stream):
        large = alloc(64 * MIB)
        plan = PrefetchPlan((part, device0) for part in separate(large, 16, 2 * MIB))
        calls = recorded(lambda: plan.execute(stream=stream))
        assert names(calls) == ["cuLaunchHostFunc", "cuMemPrefetchBatchAsync"]

    def test_memory_of_others_is_looked_at_once_for_each_allocation(self, alloc, stream):
        first, second = alloc(MIB), alloc(MIB)
        plan = PrefetchPlan()
        for i in range(4):
            plan.add(CudaArray(first, shape=(PAGE,), offset=2 * i * PAGE), Host())
            plan.add(CudaArray(second, shape=(PAGE,), offset=2 * i * PAGE), Host())
        with emulator.recording() as calls:
            plan.execute(stream=stream)
        assert names(calls).count("cuPointerGetAttributes") == 2

    def test_a_refusal_comes_before_every_call(self, alloc, device0, stream):
        first, second = alloc(MIB), alloc(MIB)
        plan = PrefetchPlan([(first, device0), (second, device0)])
        second.close()

        def use():
            for call in (plan.execute, plan.discard_prefetch, plan.explain):
                with pytest.raises(RuntimeError, match="entry 1: ManagedBuffer is closed"):
                    call(stream=stream)

        assert recorded(use) == []


def mixed(large):
    device = Device(0)
    parts = separate(large, 12, MIB)
    return (
        [(part, device) for part in parts[:4]]
        + [(part, Host()) for part in parts[4:7]]
        + [(part[:PAGE], device) for part in parts[7:10]]
        + [(parts[10], Device.all()[-1]), (parts[11], Host(1))]
    )


SHAPES = {
    "one": lambda large: [(large, Device(0))],
    "one to the host": lambda large: [(large[:MIB], Host())],
    "neighbours": lambda large: [(part, Device(0)) for part in adjacent(large, 16, MIB)],
    "two": lambda large: [(part, Device(0)) for part in separate(large, 2, MIB)],
    "many small": lambda large: [(part, Device(0)) for part in separate(large, 40)],
    "many to the host": lambda large: [(part, Host()) for part in separate(large, 12, MIB)],
    "many": lambda large: [(part, Device(0)) for part in separate(large, 6, MIB)],
    "two places": lambda large: [
        (part, Device.all()[-(i % 2)]) for i, part in enumerate(separate(large, 6, 128 * KIB))
    ],
    "mixed": mixed,
    "one gains": lambda large: [(large[:MIB], Device(0)), (large[2 * MIB : 3 * MIB], Host())],
    "conflict": lambda large: [(large[:MIB], Device(0)), (large[PAGE : 2 * PAGE], Host())],
    "contained": lambda large: [(large[:MIB], Device(0)), (large[PAGE : 2 * PAGE], Device(0))],
    "odd ends": lambda large: [
        (large[100 + 4 * i * PAGE : 5000 + (4 * i + 1) * PAGE], Device(0)) for i in range(3)
    ],
}


def told(text):
    """What an explanation announces: calls by name, ranges in the batch call, bytes by place."""
    calls = collections.Counter()
    for count, name in re.findall(r"^(\d+) x (cu\w+)", text, re.MULTILINE):
        calls[name] += int(count)
    batch = re.search(r"over (\d+) range", text)
    units = {"bytes": 1, "KiB": KIB, "MiB": MIB}
    moved = collections.Counter()
    for size, unit, place in re.findall(r"(\d+) (bytes|KiB|MiB) to ((?:Device|Host)\(.*?\))", text):
        moved[place] += int(size) * units[unit]
    return calls, int(batch[1]) if batch else 0, moved


def place_of(kind, number):
    return {1: f"Device({number})", 2: "Host()", 3: f"Host(numa_id={number})"}[int(kind)]


def batch_places(call):
    """Bytes by place of one batch call; None where the log cuts its list short."""
    sizes = [int(size) for size in re.findall(r"\+(\d+)", call.args["ranges"])]
    where = re.findall(r"(\d+):(-?\d+)@(\d+)", call.args["locs"])
    if len(sizes) < call.args["count"]:
        return None
    moved = collections.Counter()
    for i, (kind, number, first) in enumerate(where):
        last = int(where[i + 1][2]) if i + 1 < len(where) else len(sizes)
        moved[place_of(kind, number)] += sum(sizes[int(first) : last])
    return moved


def logged(calls):
    """The same three from a call log; for prefetches after a discard, only their number."""
    batches = [c for c in calls if "ranges" in c.args]
    by_batch = [batch_places(c) for c in batches]
    moved = None
    if None not in by_batch:
        moved = sum(by_batch, collections.Counter())
        for call in calls:
            if call.name == "cuMemPrefetchAsync" and not any("Discard" in c.name for c in calls):
                moved[place_of(call.args["type"], call.args["id"])] += call.args["count"]
    ranges = max((c.args["count"] for c in batches), default=0)
    return collections.Counter(names(calls)), ranges, moved


def has_whole_page(part):
    return -(-part.handle // PAGE) * PAGE + PAGE <= part.handle + part.size


class TestExplain:
    @pytest.mark.parametrize("discard", [False, True])
    @pytest.mark.parametrize("defer", [None, True, False])
    @pytest.mark.parametrize("dispatch", ["auto", "batch", "loop"])
    @pytest.mark.parametrize("name", SHAPES)
    def test_comes_true(self, alloc, name, dispatch, defer, discard):
        large = alloc(32 * MIB)
        pairs = SHAPES[name](large)
        used = large[: max(part.handle + part.size for part, _ in pairs) - large.handle]
        options = {"dispatch": dispatch, "defer": defer}
        for target in (None, Stream()):
            plan = PrefetchPlan(pairs)
            if discard and not all(has_whole_page(part) for part, _ in pairs):
                pytest.skip("no whole page to discard")
            used.prefetch(Host())
            act = plan.discard_prefetch if discard else plan.execute
            for residency in ("host", "as before", "half of it"):
                if residency == "half of it":
                    used[: used.size // 2].prefetch(Host())
                text = plan.explain(discard=discard, stream=target, **options)
                calls = recorded(lambda act=act, t=target: act(stream=t, **options))
                announced, in_batch, places_told = told(text)
                happened, ranges, places_logged = logged(calls)
                assert announced == happened, text
                assert places_logged in (None, places_told), text
                assert text.startswith(f"{len(calls)} driver call"), text
                if in_batch:
                    assert in_batch == ranges, text
                else:
                    assert ranges <= 1, text

    def test_moves_nothing(self, buf, device0):
        buf.prefetch(Host())
        plan = PrefetchPlan([(buf, device0)])
        assert recorded(plan.explain) == []
        assert recorded(lambda: plan.explain(discard=True)) == []
        assert buf.last_prefetch_location == Host()

    def test_reasons(self, alloc, device0, stream):
        large = alloc(32 * MIB)
        large.prefetch(Host())

        def reason(pairs, **options):
            return PrefetchPlan(pairs).explain(stream=stream, **options)

        parts = separate(large, 4, MIB)
        to_device = [(part, device0) for part in parts]
        assert "4 ranges, 4 MiB to Device(0)" in reason(to_device)
        assert 'dispatch="batch" requests it' in reason(to_device, dispatch="batch")
        assert 'dispatch="loop" requests' in reason(to_device, dispatch="loop")
        assert "one range needs no batch call" in reason(to_device[:1])
        assert "this is the only one" in reason([to_device[0], (parts[1], Host())])
        assert "to the host, single calls" in reason([(part, Host()) for part in parts])
        assert "below 64 KiB" in reason([(part[:KIB], device0) for part in parts])
        assert "are issued in order" in reason([(large, device0), (parts[0], Host())])
        assert "defer=True requests it" in reason(to_device, defer=True)
        assert "32 MiB to devices are queued" in reason([(large, device0)])
        assert "4 MiB to the host are queued" in reason([(part, Host()) for part in parts])
        pages = [(page, device0) for page in adjacent(large, 3)]
        assert "3 entries are merged into 1 range:" in reason(pages)

    def test_entries_without_bytes(self, buf, device0, stream):
        """They are not merged with anything, but left out."""
        nothing = (buf[:0], device0)
        text = PrefetchPlan([nothing, (buf, device0)]).explain(stream=stream)
        assert "1 entry without bytes needs no call" in text.splitlines()
        assert "merged" not in text
        for discard in (False, True):
            text = PrefetchPlan([nothing] * 3).explain(stream=stream, discard=discard)
            assert text.splitlines() == [
                "0 driver calls for 3 entries, 0 bytes:",
                "3 entries without bytes need no call",
            ]
        text = PrefetchPlan([nothing, (buf, Host()), (buf, Host())]).explain(stream=stream)
        assert "2 entries are merged into 1 range:" in text

    def test_names_the_entries_that_were_prefetched_there(self, alloc, device0, stream):
        large = alloc(64 * MIB)
        parts = separate(large, 32, MIB)
        large.prefetch(Host(), stream=stream)
        plan = PrefetchPlan((part, device0) for part in parts)
        assert "Last prefetched" not in plan.explain(stream=stream)
        for i in (4, 7):
            parts[i].prefetch(device0, stream=stream)
        text = plan.explain(stream=stream)
        assert "Last prefetched to their destination: entries 4, 7" in text.splitlines()
        plan.execute(stream=stream)
        assert "14, 15 and 16 more" in plan.explain(stream=stream)

    def test_thousands_of_entries_that_were_prefetched_there(self):
        """In a time that grows with their number, not with its square."""
        ranges = tuple((RESIDENT, "Device(0)", 8192 * i, 4096) for i in range(8000))
        begin = time.process_time()
        text = explanation(False, ranges, ranges, (), None, False, False, False)
        assert time.process_time() - begin < 1
        assert "14, 15 and 7984 more" in text

    def test_says_which_stream_takes_what_the_default_one_refuses(self, buf, stream):
        plan = PrefetchPlan([(buf, Host())])
        assert "stream of the library" in plan.explain(discard=True)
        assert "stream of the library" not in plan.explain(discard=True, stream=stream)
        assert "stream of the library" not in plan.explain()

    def test_a_truth_value_is_read(self, buf):
        class Undecided:
            def __bool__(self):
                raise KeyError("mine")

        plan = PrefetchPlan([(buf, Host())])
        assert "Discard" in plan.explain(discard=1)
        with pytest.raises(KeyError, match="mine"):
            plan.explain(discard=Undecided())


def test_sizes_are_told_in_mebibytes_at_most():
    """The ranges are parts of 1.5 GiB, of which no page is touched."""
    run_python(
        """
        import managedmem
        from managedmem import Device, PrefetchPlan
        with managedmem.empty(3 << 29) as buffer:
            text = PrefetchPlan([(buffer[: 1 << 30], Device(0))]).explain(defer=True)
            assert "1024 MiB" in text, text
            text = PrefetchPlan([(buffer[: (1 << 20) + 1024], Device(0))]).explain(defer=True)
            assert "1025 KiB" in text, text
        """,
        emulator="capacity_mib=4096",
    )
