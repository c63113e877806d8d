"""managedmem.trace() over the driver of the test run: sums against arithmetic, events, keys.

After every test the sums of the memories and of unattributed memory are compared with the total,
for each slice, direction, cause and kind of event.
"""

import ctypes
import itertools
import threading
import time

import pytest

import managedmem
from constants import EMULATED, KIB, MIB, PAGE
from driver import managed_memory, raw_driver
from managedmem import Device, Host, ManagedBuffer, emulator
from programs import run_python
from traces import check_ended_traces, load, store

SOURCE = "emulator" if EMULATED else "kernel"
HALF = MIB // 2
BLOCK = 2 * MIB  # shared with no other allocation, so its pages begin empty


@pytest.fixture(autouse=True)
def memories_add_up(monkeypatch):
    yield from check_ended_traces(monkeypatch)


@pytest.fixture
def foreign():
    """The address of 2 MiB with contents, which the library did not make; a test may free it."""
    address = managed_memory(BLOCK)
    ctypes.memset(address, 1, BLOCK)
    yield address
    if ManagedBuffer.from_handle(address, BLOCK).is_managed:
        free(address)


def free(address):
    raw_driver().cuMemFree_v2(ctypes.c_uint64(address))


def move_there(address):
    with ManagedBuffer.from_handle(address, BLOCK) as wrapped:
        wrapped.prefetch(Device(0))
    raw_driver().cuCtxSynchronize()


def by_fault(sums, direction):
    """Bytes that faults moved, with those that came along."""
    return sums.by_cause["fault"][direction] + sums.by_cause["speculative"][direction]


class TestSumsAreThoseOfArithmetic:
    def test_prefetches(self, alloc):
        buffer = alloc(BLOCK)
        store(buffer[:MIB])
        with managedmem.trace() as t:
            buffer.prefetch(Device(0))
            t.mark("there")
            buffer.prefetch(Device(0))
            t.mark("again")
            buffer.prefetch(Host())
        there, again, back = (part[buffer] for part in t.slices)
        assert there.by_cause["requested"] == (MIB, 0, 0)
        assert (again.moved, again.host_faults, again.device_faults) == (0, 0, 0)
        assert back.by_cause["requested"][1] == back.to_host == back.moved
        assert back.to_host >= MIB
        assert there.turned_back == again.turned_back == back.turned_back == 0
        assert t[buffer].turned_back == t.total.turned_back == MIB
        assert t.total.host_faults == t.total.device_faults == 0
        assert t[buffer].devices == (Device(0),)

    def test_memory_without_contents_does_not_move(self, alloc):
        buffer = alloc(BLOCK)
        with managedmem.trace() as t:
            buffer.prefetch(Device(0))
        assert t.total.moved == 0
        assert t[buffer].moved == 0

    def test_host_faults(self, buf):
        buf.prefetch(Device(0))
        with managedmem.trace() as t:
            load(buf)
        assert by_fault(t[buf], 1) == t.total.moved == MIB
        assert 1 <= t[buf].host_faults <= MIB // PAGE
        assert t.total.host_faults == t[buf].host_faults
        if EMULATED:  # a container can number its threads otherwise than the module
            assert {e.thread for e in t.events("host_fault")} == {threading.get_native_id()}

    @pytest.mark.emulator_only
    def test_device_faults(self, buf, device1):
        with managedmem.trace() as t:
            emulator.touch(buf[:HALF], device1)
            emulator.touch(buf[HALF:], Device(0), write=True)
        assert by_fault(t[buf], 0) == t.total.moved == MIB
        assert t[buf].devices == (Device(0), device1)
        assert t[buf].device_faults == 2 * t[buf].device_write_faults > 0
        assert t[buf].host_faults == 0

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("first", [0, PAGE, 63 * KIB])
    def test_the_counters_count_faults_as_a_trace(self, alloc, first):
        """A page of the host, and 64 KiB of a device: they begin anew at each multiple of these."""
        memory = alloc(2 * MIB)
        part = memory[first : MIB + 8 * KIB]
        with managedmem.trace() as t:
            emulator.clear_counters()
            store(part)
            emulator.touch(part, Device(0))
            load(memory)
            counted = emulator.counters()
        assert counted.gpu_faults == t.total.device_faults == t[memory].device_faults
        assert counted.gpu_faults == 17 - first // (64 * KIB)
        assert counted.cpu_faults == t.total.host_faults > MIB // PAGE

    @pytest.mark.emulator_only
    def test_moves_between_devices(self, buf, device1):
        buf.prefetch(Device(0))
        with managedmem.trace() as t:
            buf.prefetch(device1)
            buf.prefetch(Device(0))
        assert t.total.by_cause["requested"] == (0, 0, 2 * MIB)
        assert t[buf].turned_back == MIB

    def test_read_mostly_copies_once(self, buf):
        buf.read_mostly = True
        with managedmem.trace() as t:
            buf.prefetch(Device(0))
            t.mark("copy")
            load(buf)
        copy, rest = t.slices
        assert copy[buf].to_device == MIB
        assert rest.total.moved == rest.total.host_faults == 0

    @pytest.mark.parametrize(
        "advise",
        [
            lambda buffer: setattr(buffer, "preferred_location", Device(0)),
            lambda buffer: buffer.accessed_by.add(Device(0)),
            lambda buffer: setattr(buffer, "read_mostly", True),
        ],
    )
    def test_advice_moves_nothing(self, buf, advise):
        with managedmem.trace() as t:
            advise(buf)
        assert t.total.moved == 0

    @pytest.mark.emulator_only
    def test_access_in_place_is_a_remote_map(self, buf):
        buf.preferred_location = Host()
        buf.accessed_by.add(Device(0))
        with managedmem.trace() as t:
            emulator.touch(buf, Device(0))
        assert t.total.moved == 0
        remote = list(t.events("remote_map"))
        assert t[buf].remote_mapped == sum(e.nbytes for e in remote)

    def test_pages_that_go_back_are_turned_back(self, buf):
        with managedmem.trace() as t:
            for _ in range(3):
                buf.prefetch(Device(0))
                buf[:HALF].prefetch(Host())
        assert t[buf].to_device == MIB + 2 * HALF
        assert t[buf].to_host == 3 * HALF
        assert t[buf].turned_back == 5 * HALF
        assert t[buf[:HALF]].turned_back == 5 * HALF
        assert t[buf[HALF:]].turned_back == 0

    @pytest.mark.parametrize("marks", [False, True])
    def test_marks_do_not_hide_what_turns_back(self, buf, marks):
        store(buf)
        with managedmem.trace() as t:
            for _ in range(3):
                buf.prefetch(Device(0))
                if marks:
                    t.mark("device")
                buf.prefetch(Host())
                if marks:
                    t.mark("host")
        assert t[buf].turned_back == t[str(t[buf].label)].turned_back == 5 * MIB
        assert t.total.turned_back == 5 * MIB
        assert t[buf[:HALF]].turned_back == 5 * HALF
        if marks:
            assert [part.total.turned_back for part in t.slices] == [0] * 7
        moves = sum(e.duration for e in t.events("move"))
        assert 0 <= t.total.move_time <= moves * 1.001  # NTP slews the clock of events

    @pytest.mark.emulator_only
    def test_evictions(self):
        run_python(
            """
            import ctypes, managedmem
            from managedmem import Device
            MIB = 1 << 20
            first, second = managedmem.empty(3 * MIB), managedmem.empty(3 * MIB)
            for buffer in (first, second):
                ctypes.memset(buffer.handle, 1, buffer.nbytes)
            with managedmem.trace() as t:
                first.prefetch(Device(0))
                second.prefetch(Device(0))
                Device(0).sync()
            assert t.total.by_cause["requested"] == (6 * MIB, 0, 0), t.total
            evicted = t.total.by_cause["eviction"][1]
            assert evicted == t[first].to_host == t[first].evicted >= 2 * MIB, t.total
            assert "evicted" in str(t)
            """,
            emulator="capacity_mib=4",
        )


class TestEvents:
    def test_times_are_those_of_perf_counter(self, buf):
        before = time.perf_counter()
        with managedmem.trace() as t:
            start = time.perf_counter()
            buf.prefetch(Device(0))
            Device(0).sync()
            end = time.perf_counter()
        after = time.perf_counter()
        slack = 20e-6  # of the conversion between two clocks
        calls = [e for e in t.events("call") if e.cause == "prefetch"]
        moves = list(t.events("move"))
        assert [(e.memory, e.offset, e.nbytes, e.destination) for e in calls] == [
            (t[buf].label, 0, MIB, Device(0))
        ]
        for event in (*calls, *moves):
            assert start - slack <= event.time
            assert event.time + event.duration <= end + slack
        assert sum(e.nbytes for e in moves) == MIB
        assert {(e.source, e.destination, e.cause) for e in moves} == {
            (Host(), Device(0), "requested")
        }
        assert 0 < t.duration <= after - before
        assert 0 < t.overhead <= after - before

    def test_calls_are_named(self, buf):
        with managedmem.trace() as t:
            buf.read_mostly = True
            buf.preferred_location = Host()
            buf.prefetch(Device(0))
        assert [e.cause for e in t.events("call", of=buf)] == [
            "set_read_mostly",
            "set_preferred_location",
            "prefetch",
        ]

    def test_results_are_keys(self, buf):
        """Sums without equal fields differ, and equal ones have one hash."""
        with managedmem.trace() as t:
            for _ in range(4):
                buf.prefetch(Device(0))
                buf.prefetch(Host())
        event = next(t.events())
        assert {t.total: 1, t[buf]: 2, event: 3}[t[buf]] == 2
        assert t[buf] == t[buf] and hash(t[buf]) == hash(t[buf])
        assert len({*t.memories, *t.memories}) == len(t.memories)
        assert {t.total, t.slices[0].total} == {t.total}
        assert t.findings()
        assert len({*t.findings(), *t.findings()}) == len(t.findings())

    @pytest.mark.emulator_only
    def test_memories_beyond_the_limit_have_no_label(self, buf):
        """The others, and those that were there before, do; the totals have all events."""
        with managedmem.trace(limit=1000) as t:
            for number in range(1002):
                with managedmem.empty(PAGE) as passing:
                    passing.name = f"number {number}"
                    memoryview(passing)[0] = 1
                    if number in (999, 1000):
                        passing.prefetch(Device(0))
            buf.prefetch(Device(0))
        assert t.complete
        assert t.total.to_device == buf.nbytes + 2 * PAGE
        assert (t["number 999"].to_device, t.unattributed.to_device) == (PAGE, PAGE)
        assert t[buf].to_device == buf.nbytes
        with pytest.raises(KeyError):
            t["number 1000"]
        assert t.problems[-1].startswith("2 memories were allocated after limit= new ones:")
        with managedmem.trace() as later:
            buf.prefetch(Host())
        assert later.problems == ()

    @pytest.mark.emulator_only
    def test_sums_go_on_beyond_the_limit(self, buf):
        with managedmem.trace(limit=1000) as t:
            for _ in range(600):
                buf[:PAGE].prefetch(Device(0))
                buf[:PAGE].prefetch(Host())
        assert t.truncated
        assert t.complete
        assert t.problems[0].startswith("there were more events than limit=")
        assert len(list(t.events())) == 1000
        assert t[buf].to_device == t.total.to_device == 600 * PAGE
        assert t[buf].to_host == 600 * PAGE
        with pytest.raises(RuntimeError, match="higher limit"):
            t[buf[:PAGE]]

    @pytest.mark.emulator_only
    def test_events_beyond_the_limit_have_no_names(self, buf, alloc):
        """They count for the named memory, which is not hidden then."""
        other = alloc(4 * PAGE)
        store(other)
        with managedmem.trace(limit=1000) as t:
            for _ in range(600):
                buf[:PAGE].prefetch(Device(0))
                buf[:PAGE].prefetch(Host())
            other.prefetch(Device(0))
        before = t[buf].to_device
        t.name(buf, "all")
        t.name(other, "other")
        assert "names given by name() have the first ones" in t.problems[0]
        assert 0 < t["all"].to_device < before
        assert t["other"].moved == 0
        assert t[buf].to_device == before
        assert t[other].to_device == other.nbytes
        assert {m.label for m in t.memories} >= {"all", "other"}
        assert sum(m.moved for m in t.memories) == t.total.moved

    @pytest.mark.emulator_only
    def test_without_faults(self, buf):
        with managedmem.trace(faults=False) as t:
            emulator.touch(buf, Device(0))
        assert by_fault(t[buf], 0) == MIB
        assert t.total.device_faults is t[buf].host_write_faults is None
        assert list(t.events("device_fault")) == []


class TestKeys:
    def test_slices_of_buffers(self, alloc):
        buffer = managedmem.empty((8, PAGE), "uint8")
        store(buffer)
        with managedmem.trace() as t:
            buffer[2:5].prefetch(Device(0))
        assert t[buffer].to_device == 3 * PAGE
        assert t[buffer[3:5]].to_device == 2 * PAGE
        assert t[buffer[4]].to_device == PAGE
        assert t[buffer[0:2]].moved == 0
        assert t[buffer[:]].to_device == 3 * PAGE
        assert t[buffer[3:5]].nbytes == 2 * PAGE
        assert t[buffer.range(3 * PAGE - 1, 2)].to_device == 2 * PAGE

    def test_arrays_over_a_buffer(self, buf):
        np = pytest.importorskip("numpy")
        with managedmem.trace() as t:
            buf.prefetch(Device(0))
            Device(0).sync()
        array = np.asarray(buf)
        assert t[array].to_device == t[memoryview(buf)].to_device == MIB
        assert t[array[: 2 * PAGE]].to_device == 2 * PAGE
        assert t[buf.handle, buf.nbytes].to_device == MIB

    def test_names(self, buf):
        with managedmem.trace() as t:
            t.name(buf[HALF:], "right")
            buf.prefetch(Device(0))
        t.name(buf[: HALF // 2], "left")
        assert t["right"].to_device == HALF
        assert t["left"].to_device == HALF // 2
        rest = [m for m in t.memories if m.label.endswith(" (rest)")]
        assert [(m.to_device, m.kind) for m in rest] == [(HALF // 2, "buffer")]
        assert t[buf].to_device == MIB
        assert "right" in str(t)
        t.name(buf, "all")
        assert t["all"].to_device == MIB
        assert [m.label for m in t.memories if m.to_device] == ["all"]

    def test_a_named_buffer_has_its_last_page(self):
        buffer = managedmem.empty(PAGE + 100)
        store(buffer)
        with managedmem.trace() as t:
            buffer.prefetch(Device(0))
        t.name(buffer, "a")
        assert t["a"].to_device == t.total.to_device == 2 * PAGE

    def test_labels_tell_type_shape_and_number(self):
        buffer = managedmem.empty((4, PAGE), "float32")
        store(buffer)
        with managedmem.trace() as t:
            buffer.prefetch(Device(0))
        label = t[buffer].label
        assert label.startswith(f"float32[4,{PAGE}] #")
        assert t[label].to_device == buffer.nbytes
        with pytest.raises(KeyError, match=r"there are: .*float32"):
            t["float32"]

    def test_memory_without_events_has_zeros(self, buf, alloc):
        quiet = alloc(PAGE)
        with managedmem.trace() as t:
            buf.prefetch(Device(0))
        assert (t[quiet].moved, t[quiet].host_faults, t[quiet].kind) == (0, 0, "buffer")
        assert t[quiet].devices == ()
        late = alloc(PAGE)
        assert t[late].moved == 0

    def test_bad_keys(self, buf, alloc):
        with managedmem.trace() as t:
            pass
        closed = managedmem.empty(PAGE)
        closed.close()
        with pytest.raises(ValueError, match="its label finds its results"):
            t[closed]
        with pytest.raises(TypeError, match=r"^a target must be"):
            t[3]
        with pytest.raises(TypeError, match=r"^a target must be") as error:
            t[[buf] * 1000]
        assert len(str(error.value)) < 400

    def test_a_memory_of_an_earlier_reading_is_a_key(self, buf):
        with managedmem.trace() as t:
            buf.prefetch(Device(0))
            whole, part = (t.mark("there")[key] for key in (buf, buf[:HALF]))
            buf.prefetch(Host())
        t.name(buf[:PAGE], "first page")
        for memory, nbytes in ((whole, 2 * MIB), (part, MIB)):
            assert t[memory].moved == nbytes
            assert sum(e.nbytes for e in t.events("move", of=memory)) >= nbytes

    def test_names_of_nothing_change_nothing(self, buf):
        with managedmem.trace() as t:
            t.name(buf[:0], "nothing")
            buf.prefetch(Device(0))
        assert "nothing" not in [m.label for m in t.memories]
        assert t.total.to_device == MIB


class TestLives:
    def test_freed_memory_stays_in_the_results(self, alloc):
        with managedmem.trace() as t:
            for _ in range(4):
                buffer = managedmem.empty((MIB,), "uint8")
                store(buffer)
                buffer.prefetch(Device(0))
                Device(0).sync()
                buffer.close()
        freed = sorted((m for m in t.memories if m.to_device), key=lambda m: m.born)
        assert [m.to_device for m in freed] == [MIB] * 4
        for memory in freed:
            assert 0 < memory.born < memory.died < t.duration
        for earlier, later in itertools.pairwise(freed):
            assert earlier.died < later.born
        assert len({m.label for m in freed}) == 4

    def test_work_that_the_free_waits_for_belongs_to_the_memory(self, alloc):
        if EMULATED:
            emulator.schedule("lazy")
        buffer = alloc(8 * MIB)
        buffer.name = "freed at once"
        store(buffer)
        with managedmem.trace() as t:
            buffer.prefetch(Device(0))
            buffer.close()
        assert t["freed at once"].to_device == t.total.to_device == 8 * MIB
        assert t["freed at once"].died is not None
        assert t.unattributed.moved == 0

    @pytest.mark.parametrize("size", [8 * PAGE, 4 * MIB])
    def test_host_accesses_just_before_the_free_belong_to_the_memory(self, alloc, size):
        """Even where no driver call lies between the two."""
        buffer, neighbour = alloc(size), alloc(size)
        buffer.name = "read and freed"
        store(buffer)
        buffer.prefetch(Device(0))
        with managedmem.trace() as t:
            store(buffer)
            buffer.close()
            time.sleep(0.001)
        assert t["read and freed"].to_host == t.total.to_host == size
        assert t[neighbour].moved == t.unattributed.moved == 0

    def test_memory_of_before_is_not_born(self, buf):
        with managedmem.trace() as t:
            buf.prefetch(Device(0))
        assert (t[buf].born, t[buf].died) == (None, None)

    def test_foreign_memory_has_a_row(self, foreign):
        with managedmem.trace() as t:
            move_there(foreign)
        rows = [m for m in t.memories if m.kind == "foreign"]
        assert t[foreign, BLOCK].to_device == BLOCK
        t.name((foreign, BLOCK), "theirs")
        assert t["theirs"].to_device == BLOCK
        assert rows == [] or rows[0].address == foreign

    def test_foreign_memory_that_is_only_touched_has_a_row(self, foreign):
        move_there(foreign)
        with managedmem.trace() as t:
            ctypes.string_at(foreign, BLOCK)
        (row,) = [m for m in t.memories if m.to_host]
        assert (row.kind, row.address, row.nbytes) == ("foreign", foreign, BLOCK)
        assert row.to_host == by_fault(row, 1) == t.total.to_host == BLOCK
        assert t[foreign, BLOCK].label == row.label
        assert t.unattributed.moved == 0

    def test_foreign_memory_that_was_freed_is_unattributed(self, foreign):
        move_there(foreign)
        with managedmem.trace() as t:
            ctypes.string_at(foreign, BLOCK)
            free(foreign)
        assert t.unattributed.to_host == t.total.to_host == BLOCK
        assert "(freed before it was seen)" in str(t)


class TestSlices:
    def test_results_can_be_read_while_the_trace_runs(self, buf):
        with managedmem.trace() as t:
            buf.prefetch(Device(0))
            first = t.mark("first")
            assert first.total.to_device == MIB
            assert first[buf].by_cause["requested"] == (MIB, 0, 0)
            assert "1.0M" in str(first)
            buf.prefetch(Host())
            second = t.mark("second")
            assert second.total.to_host == MIB
            assert first.total.to_host == 0
            assert [s.label for s in t.slices] == ["first", "second"]
        assert [s.label for s in t.slices] == ["first", "second", "end"]
        assert first.total.to_device == MIB
        assert sum(s.duration for s in t.slices) == pytest.approx(t.duration, rel=1e-3)
        assert sum(s.overhead for s in t.slices) == pytest.approx(t.overhead, rel=1e-6)

    def test_queued_work_belongs_to_the_slice_in_which_it_was_queued(self, buf, stream):
        with managedmem.trace() as t:
            buf.prefetch(Device(0), stream=stream, defer=True)
            t.mark("first")
        assert [s.total.to_device for s in t.slices] == [MIB, 0]

    def test_work_that_was_queued_before_the_start_is_not_counted(self, buf, stream):
        buf.prefetch(Device(0), stream=stream, defer=True)
        with managedmem.trace() as t:
            pass
        assert t.total.moved == 0
