"""Recordings of moves, faults and calls: sums against arithmetic, parts, memories, and bad uses."""

import functools
import gc
import struct
import time
from collections import Counter

import pytest

import managedmem
from constants import MIB, PAGE
from driver import CAPTURE_GLOBAL, CAPTURE_RELAXED, capturing
from managedmem import Device, Host, TraceBusyError, TraceUnavailableError, emulator
from managedmem._trace_results import FIELDS, TOTAL, read_rows
from outcomes import outcome
from threads import at_once

Recorder = managedmem._managedmem.Recorder
EVENT = struct.Struct("<4QI2h4BI")
MOVE, HOST_FAULT, DEVICE_FAULT, DUPLICATE, CALL = 0, 1, 2, 6, 9
ON_HOST, NOWHERE = -1, -2
ADVISE, PREFETCH, DISCARD, DISCARD_PREFETCH, HOST_VIEW = range(5)
BLOCK = 2 * MIB

pytestmark = pytest.mark.usefixtures("current_device")


@pytest.fixture
def recorder():
    made = Recorder()
    made.start()
    yield made
    made.stop()


class Result:
    """What attribute() returns, by names."""

    def __init__(self, recorder, named=()):
        self.memories, rows = recorder.attribute(list(named))
        rows = read_rows(rows)
        self.rows = {at: dict(zip(FIELDS, sums, strict=True)) for at, sums in rows.items()}
        self.events = list(EVENT.iter_unpack(recorder.events()))
        self.parts = recorder.parts()
        self.check_sums()

    def check_sums(self):
        """In each part the memories add up to the total, and no row is empty."""
        for part, memory in self.rows:
            assert any(self.rows[part, memory].values())
            assert part < len(self.parts)
            if memory == TOTAL:
                for field in set(FIELDS) - {"move_time"}:
                    each = [r[field] for (p, m), r in self.rows.items() if p == part and m != TOTAL]
                    assert sum(each) == self.rows[part, TOTAL][field], field
        assert sum(part[2] for part in self.parts) == len(self.events)

    def total(self, part=0):
        return Counter({k: v for k, v in self.rows.get((part, TOTAL), {}).items() if v})

    def of(self, kind=None, label=None, part=0):
        """The sums of the memories of that kind and label."""
        sums = Counter()
        for index, memory in enumerate(self.memories):
            if kind in (None, memory[0]) and label in (None, memory[1]):
                sums.update(self.rows.get((part, index), {}))
        return sums

    def at(self, buffer, part=0):
        """The sums of the memory that starts where the buffer does."""
        sums = Counter()
        for index, memory in enumerate(self.memories):
            if memory[2] == buffer.handle:
                sums.update(self.rows.get((part, index), {}))
        return sums

    def calls(self):
        """(operation, offset from the buffer, bytes, destination, advice) of each call."""
        return [
            (e[8], e[2], e[3], e[6], e[11])
            for e in sorted(self.events, key=lambda e: e[1])
            if e[7] == CALL
        ]


def moves(sums, direction):
    return {
        name.removeprefix(direction + "_"): value
        for name, value in sums.items()
        if name.startswith(direction) and value
    }


def read(buffer, *pages):
    """Read a byte of pages on the host."""
    view = memoryview(buffer).cast("B")
    return [view[page * PAGE] for page in pages]


def on_host(buffer):
    buffer.fill(1)
    buffer.prefetch(Host())
    Device(0).sync()
    read(buffer, 0)
    return buffer


class TestBytes:
    def test_reads_of_the_host(self, alloc, device0, recorder):
        buffer = on_host(alloc(BLOCK))
        buffer.prefetch(device0)
        recorder.mark()
        read(buffer, *range(0, BLOCK // PAGE, 16))
        recorder.stop()
        sums = Result(recorder).at(buffer, 1)
        assert sums["host_faults"] > 0
        assert BLOCK // 16 <= sums["to_host_fault"] + sums["to_host_speculative"] <= BLOCK
        assert not moves(sums, "to_device")

    def test_read_mostly_memory_is_duplicated(self, alloc, device0, recorder):
        buffer = on_host(alloc(BLOCK))
        buffer.read_mostly = True
        recorder.mark()
        buffer.prefetch(device0)
        recorder.stop()
        sums = Result(recorder).at(buffer, 1)
        assert sums["duplicated"] == BLOCK

    def test_nothing_moves_by_a_discard(self, alloc, device0, recorder):
        buffer = on_host(alloc(BLOCK))
        buffer.prefetch(device0)
        recorder.mark()
        buffer.discard()
        recorder.stop()
        result = Result(recorder)
        assert not moves(result.at(buffer, 1), "to_host")
        assert not moves(result.at(buffer, 1), "to_device")


class TestCalls:
    def test_each_range_of_each_operation(self, alloc, device0, recorder):
        a, b = alloc(4 * PAGE), alloc(4 * PAGE)
        recorder.mark()
        a.prefetch(device0)
        managedmem.prefetch([a[:PAGE], b], [Host(), device0])
        a.discard()
        a[PAGE:].discard_prefetch(device0)
        plan = managedmem.PrefetchPlan([(b, Host())])
        plan.execute()
        a.numpy()
        recorder.stop()
        calls = [c for c in Result(recorder).calls() if c[0] != ADVISE]
        assert sorted(calls[:3]) == sorted(
            [
                (PREFETCH, a.handle, 4 * PAGE, 0, 0),
                (PREFETCH, a.handle, PAGE, ON_HOST, 0),
                (PREFETCH, b.handle, 4 * PAGE, 0, 0),
            ]
        )
        assert calls[3:] == [
            (DISCARD, a.handle, 4 * PAGE, NOWHERE, 0),
            (DISCARD_PREFETCH, a.handle + PAGE, 3 * PAGE, 0, 0),
            (PREFETCH, b.handle, 4 * PAGE, ON_HOST, 0),
            (HOST_VIEW, a.handle, 4 * PAGE, ON_HOST, 0),
        ]

    def test_advice(self, alloc, device0, recorder):
        a, b = alloc(4 * PAGE), alloc(4 * PAGE)
        a.read_mostly = True
        a.preferred_location = device0
        a.preferred_location = None
        a.accessed_by = [device0, Host()]
        a.accessed_by.discard(Host())
        managedmem.advise([a, b], "set_preferred_location", [device0, Host()])
        managedmem.MigrationPolicy(read_mostly=True).apply(b)
        recorder.stop()
        whole = [
            (operation, address, advice, where)
            for operation, address, nbytes, where, advice in Result(recorder).calls()
            if nbytes == 4 * PAGE
        ]
        assert whole == [
            (ADVISE, a.handle, 1, NOWHERE),
            (ADVISE, a.handle, 3, 0),
            (ADVISE, a.handle, 4, NOWHERE),
            (ADVISE, a.handle, 5, 0),
            (ADVISE, a.handle, 5, ON_HOST),
            (ADVISE, a.handle, 6, ON_HOST),
            (ADVISE, a.handle, 3, 0),
            (ADVISE, b.handle, 3, ON_HOST),
            (ADVISE, b.handle, 4, NOWHERE),
            (ADVISE, b.handle, 1, NOWHERE),
        ]

    @pytest.mark.emulator_only
    def test_failed_calls_are_left_out(self, buf, device0, recorder):
        emulator.fail("cuMemPrefetchAsync")
        with pytest.raises(managedmem.CUDAError):
            buf.prefetch(device0)
        with pytest.raises(ValueError, match="location"):
            buf.prefetch(None)
        recorder.stop()
        assert not Result(recorder).calls()

    def test_times(self, buf, device0, recorder):
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        buf.prefetch(device0)
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        recorder.stop()
        (call,) = (e for e in Result(recorder).events if e[7] == CALL)
        assert before <= call[0] < call[1] <= after


class TestParts:
    def test_times_and_numbers(self, buf, device0, recorder):
        buf.prefetch(device0)
        recorder.mark()
        assert [part[2] for part in recorder.parts()] == [0]
        result = Result(recorder)
        assert recorder.running
        assert len(result.parts) == 1
        recorder.stop()
        first, second = recorder.parts()
        assert first[0] < first[1] == second[0] <= second[1]
        assert (first[2], second[2]) == (len(result.events), 0)
        assert Result(recorder).total(0) == result.total(0)

    def test_many_parts(self, buf, device0, recorder):
        on_host(buf)
        for _ in range(20):
            buf.prefetch(device0)
            buf.prefetch(Host())
            recorder.mark()
        recorder.stop()
        result = Result(recorder)
        assert len(result.parts) == 21
        for part in range(1, 20):
            assert result.at(buf, part)["to_device_requested"] == MIB
            assert result.at(buf, part)["to_host_requested"] == MIB
            assert result.at(buf, part)["turned_back"] >= MIB
            assert result.at(buf, part)["turned_across"] == MIB

    def test_the_clocks(self, recorder):
        before = time.perf_counter_ns()
        recorder.mark()
        after = time.perf_counter_ns()
        raw, monotonic, marked_raw, marked = recorder.clock()
        assert monotonic < before < marked < after
        assert abs((marked_raw - raw) - (marked - monotonic)) < 5_000_000

    @pytest.mark.emulator_only
    @pytest.mark.skipif(4 * BLOCK // PAGE < 2000, reason="needs a fault for each of 2,048 pages")
    def test_the_limit(self, alloc, device0):
        recorder = Recorder(limit=1000, faults=True)
        buffer = alloc(4 * BLOCK)
        on_host(buffer)
        buffer.prefetch(device0)
        recorder.start()
        read(buffer, *range(4 * BLOCK // PAGE))
        recorder.mark()
        buffer.prefetch(device0)
        recorder.stop()
        result = Result(recorder)
        assert recorder.report()["truncated"] is True
        assert recorder.report()["lost"] == 0
        assert len(result.events) == 1000
        assert result.at(buffer)["host_faults"] == 4 * BLOCK // PAGE
        assert result.at(buffer)["to_host_fault"] == 4 * BLOCK
        assert result.at(buffer, 1)["to_device_requested"] == 4 * BLOCK


class TestMemories:
    def test_kinds_and_labels(self, alloc, device0, recorder):
        named, plain = alloc(BLOCK), managedmem.empty((512, 256), "float32", name="weights")
        on_host(named)
        plain.fill(0)
        plain.prefetch(Host())
        recorder.mark()
        named.prefetch(device0)
        plain.prefetch(device0)
        recorder.stop()
        result = Result(recorder, [(named.handle, MIB, "first half"), (named.handle, PAGE, "page")])
        assert result.of("named", "first half", 1)["to_device_requested"] == MIB - PAGE
        assert result.of("named", "page", 1)["to_device_requested"] == PAGE
        assert result.of("buffer", "weights", 1)["to_device_requested"] == plain.nbytes
        assert result.at(plain, 1)["to_device_requested"] == plain.nbytes
        plain.close()

    @pytest.mark.parametrize(
        ("named", "error"),
        [
            (5, TypeError),
            ([5], TypeError),
            ([(1, 2)], TypeError),
            ([(4096, 4096, 3)], TypeError),
            ([(4096, 4096, "a\0b")], TypeError),
            ([(4096, -1, "x")], ValueError),
            ([("x", 1, "x")], TypeError),
            ([(0, 1, "x")], ValueError),
        ],
    )
    def test_bad_named_ranges(self, recorder, named, error):
        recorder.mark()
        with pytest.raises(error):
            recorder.attribute(named)
        assert recorder.attribute([]) is not None


class TestEvents:
    def test_a_view_outlives_later_calls_and_the_recorder(self, buf, device0):
        recorder = Recorder()
        recorder.start()
        assert recorder.events().nbytes == 0
        buf.prefetch(device0)
        recorder.mark()
        recorder.attribute([])
        view = recorder.events()
        kept = bytes(view)
        assert view.readonly
        assert len(kept) % EVENT.size == 0
        assert kept
        buf.prefetch(Host())
        recorder.stop()
        recorder.attribute([])
        assert recorder.events().nbytes > view.nbytes
        del recorder
        gc.collect()
        assert bytes(view) == kept

    def test_events_lie_in_their_memories(self, alloc, device0, recorder):
        buffers = [alloc(BLOCK) for _ in range(4)]
        for buffer in buffers:
            on_host(buffer)
        managedmem.prefetch(buffers, device0)
        recorder.stop()
        result = Result(recorder)
        for event in result.events:
            start, end, address, amount, memory = event[:5]
            assert start <= end
            _, _, base, nbytes, *_ = result.memories[memory]
            assert base <= address <= address + amount <= base + nbytes


class TestUses:
    def test_the_course_of_a_recorder(self):
        recorder = Recorder()
        assert recorder.running is False
        for use in (
            recorder.mark,
            recorder.stop,
            recorder.parts,
            recorder.clock,
            recorder.report,
            lambda: recorder.attribute([]),
            lambda: recorder.source,
            lambda: recorder.source_detail,
        ):
            with pytest.raises(RuntimeError, match="was not started"):
                use()
        recorder.start()
        assert recorder.running is True
        emulated = managedmem.emulator.is_active()
        assert recorder.source == ("emulator" if emulated else "kernel")
        assert "/dev/nvidia-uvm-tools, layout 1" in recorder.source_detail
        with pytest.raises(RuntimeError, match="was started already"):
            recorder.start()
        recorder.stop()
        recorder.stop()
        assert recorder.running is False
        with pytest.raises(RuntimeError, match="has ended"):
            recorder.mark()
        with pytest.raises(RuntimeError, match="was started already"):
            recorder.start()

    def test_one_at_a_time(self, recorder):
        other = Recorder()
        with pytest.raises(TraceBusyError, match="already running in this process") as error:
            other.start()
        assert list(error.value.tried) == []
        recorder.stop()
        other.start()
        assert recorder.running is False
        assert other.running is True
        other.stop()

    def test_fields(self):
        assert len(FIELDS) == len(set(FIELDS)) == 33
        assert FIELDS[:2] == ("to_device_unknown", "to_device_requested")
        assert FIELDS[-2:] == ("turned_back", "turned_across")

    @pytest.mark.parametrize(
        ("arguments", "error", "words"),
        [
            ({"limit": 999}, ValueError, "limit must be from 1000 to 1000000000, got 999"),
            ({"limit": 10**9 + 1}, ValueError, "got 1000000001"),
            ({"limit": 1 << 70}, ValueError, "out of range"),
            ({"limit": "x"}, TypeError, "limit must be an int"),
            ({"limit": True}, TypeError, "limit must be an int"),
            ({"faults": 1}, TypeError, "faults takes a bool"),
            ({"sync": None}, TypeError, "sync takes a bool"),
            ({"depth": 1}, TypeError, "depth"),
        ],
    )
    def test_bad_arguments(self, arguments, error, words):
        with pytest.raises(error, match=words):
            Recorder(**arguments)

    def test_the_largest_limit(self):
        recorder = Recorder(limit=10**9)
        try:
            recorder.start()
        except MemoryError:
            pytest.skip("this system does not reserve 48 GB of address space")
        recorder.stop()

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("wait", [True, False])
    def test_a_start_waits_on_request(self, wait):
        recorder = Recorder()
        with emulator.recording() as calls:
            recorder.start(wait=wait)
        assert any(call.name == "cuCtxSynchronize" for call in calls) is wait
        recorder.stop()

    def test_arguments_of_stop(self, recorder):
        with pytest.raises(TypeError):
            recorder.stop(False)
        with pytest.raises(TypeError):
            recorder.stop(wait=1)
        recorder.stop(wait=False)
        assert recorder.report()["waited"] is False

    def test_the_report(self, recorder):
        recorder.stop()
        report = recorder.report()
        assert report.pop("overhead") > 0
        assert report.pop("waited") is True
        assert report == {
            "lost": 0,
            "rejected": 0,
            "ambiguous": 0,
            "fault_overflows": 0,
            "fatal_faults": 0,
            "unlisted": 0,
            "truncated": False,
        }

    def test_a_recorder_in_a_cycle_ends(self):
        holder = [Recorder()]
        holder.append(holder)
        holder[0].start()
        del holder
        gc.collect()
        again = Recorder()
        again.start()
        again.stop()


class TestCaptures:
    @pytest.mark.parametrize("mode", [CAPTURE_GLOBAL, CAPTURE_RELAXED], ids=["global", "relaxed"])
    def test_a_capture_survives(self, buf, device0, stream, mode):
        buf.prefetch(Host())
        with capturing(stream, mode) as running:
            recorder = Recorder()
            recorder.start()
            buf.prefetch(device0)
            with pytest.raises(RuntimeError, match="mark before or after it, or trace with sync=F"):
                recorder.mark()
            recorder.stop()
            recorder.attribute([])
        assert running.result == 0
        assert recorder.report()["waited"] is False
        assert len(recorder.parts()) == 1

    def test_without_sync_marks_are_allowed(self, stream):
        recorder = Recorder(sync=False)
        with capturing(stream, CAPTURE_GLOBAL) as running:
            recorder.start()
            recorder.mark()
            recorder.stop()
        assert running.result == 0
        assert len(recorder.parts()) == 2

    def test_after_the_capture(self, stream, recorder):
        with capturing(stream, CAPTURE_GLOBAL), pytest.raises(RuntimeError):
            recorder.mark()
        recorder.mark()
        recorder.stop()
        assert recorder.report()["waited"] is True
        assert len(recorder.parts()) == 2


@pytest.mark.emulator_only
class TestDisturbedQueues:
    @pytest.mark.parametrize("switch", ["absent", "denied", "refused"])
    def test_no_queue(self, switch):
        emulator.disturb_queue(**{switch: True})
        recorder = Recorder()
        with pytest.raises(TraceUnavailableError) as error:
            recorder.start()
        ((source, code, sentence),) = error.value.tried
        assert source == "emulator"
        assert code > 0
        assert str(error.value) == (
            f"no source of unified-memory events. Tried:\n  emulator: {sentence}"
        )
        assert type(error.value) is TraceUnavailableError
        emulator.disturb_queue()
        recorder.start()
        recorder.stop()

    def test_dropped_records_are_counted(self, alloc, device0):
        buffer = on_host(alloc(BLOCK))
        buffer.prefetch(device0)
        recorder = Recorder()
        recorder.start()
        emulator.disturb_queue(drop=4)
        read(buffer, *range(BLOCK // PAGE))
        recorder.stop()
        sums = Result(recorder).at(buffer)
        # A fault for each page and one move, which can be among the records that are dropped.
        seen, made = sums["host_faults"] + sums["to_host_fault"] // BLOCK, BLOCK // PAGE + 1
        assert recorder.report()["lost"] == made - seen
        assert seen in {made - made // 4, made - made // 4 - 1}

    def test_garbage_is_rejected(self, alloc, device0):
        buffer = on_host(alloc(BLOCK))
        buffer.prefetch(device0)
        recorder = Recorder()
        recorder.start()
        emulator.disturb_queue(garbage=5)
        read(buffer, *range(BLOCK // PAGE))
        recorder.stop()
        assert recorder.report()["rejected"] > 0
        sums = Result(recorder).at(buffer)
        assert (sums["host_faults"], sums["to_host_fault"]) == (BLOCK // PAGE, BLOCK)

    @pytest.mark.parametrize("flushes", [1, 2])
    def test_late_records_arrive(self, alloc, device0, flushes):
        buffer = on_host(alloc(BLOCK))
        recorder = Recorder()
        recorder.start()
        emulator.disturb_queue(late=flushes)
        buffer.prefetch(device0)
        recorder.mark()
        recorder.stop()
        assert Result(recorder).at(buffer)["to_device_requested"] == BLOCK


class TestThreads:
    def test_one_of_several_starts(self):
        recorders = [Recorder() for _ in range(6)]
        answers = at_once(*(functools.partial(outcome, each.start) for each in recorders))
        assert answers.count(None) == 1
        assert answers.count(TraceBusyError) == 5

    def test_one_recorder_started_by_several(self):
        recorder = Recorder()
        answers = at_once(*[lambda: outcome(recorder.start)] * 6)
        assert answers.count(RuntimeError) == 5
        recorder.stop()

    def test_marks_and_stops_of_several(self, alloc, device0):
        recorder = Recorder()
        recorder.start()
        buffers = [alloc(64 * PAGE) for _ in range(4)]

        def work(buffer):
            try:
                for _ in range(20):
                    buffer.prefetch(device0)
                    recorder.mark()
                    recorder.attribute([(buffer.handle, PAGE, "x")])
                    recorder.report()
                    buffer.prefetch(Host())
                if buffer is buffers[0]:
                    recorder.stop()
            except RuntimeError as error:
                assert "has ended" in str(error)

        at_once(*(functools.partial(work, buffer) for buffer in buffers))
        assert recorder.running is False
        result = Result(recorder)
        assert len(result.parts) >= 20
