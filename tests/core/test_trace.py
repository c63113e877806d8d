"""managedmem.trace() over the driver of the test run: sums against arithmetic, keys, ends, errors.

After every test the sums of the memories and of unattributed memory are compared with the total,
for each slice, direction, cause and kind of event.
"""

import ctypes
import itertools
import threading
import time
import weakref

import pytest

import managedmem
from constants import EMULATED, MIB, PAGE
from driver import capturing, managed_memory, raw_driver
from managedmem import Device, Host, ManagedBuffer, Stream, emulator
from programs import run_python

SOURCE = "emulator" if EMULATED else "kernel"
COUNTS = (
    "host_faults",
    "host_write_faults",
    "device_faults",
    "device_write_faults",
    "remote_mapped",
    "thrashing",
    "duplicated",
    "evicted",
)
HALF = MIB // 2


def store(buffer, value=1):
    ctypes.memset(buffer.handle, value, buffer.nbytes)


def load(buffer):
    return ctypes.string_at(buffer.handle, buffer.nbytes)


def interrupt():
    raise KeyboardInterrupt


def assert_memories_add_up(part):
    parts = [*part.memories, part.unattributed]
    for cause, moved in part.total.by_cause.items():
        assert tuple(map(sum, zip(*(m.by_cause[cause] for m in parts), strict=True))) == moved
    for name in COUNTS:
        if getattr(part.total, name) is not None:
            assert sum(getattr(m, name) for m in parts) == getattr(part.total, name), name
    throttled = sum(m.throttled for m in parts)
    assert throttled == pytest.approx(part.total.throttled)


@pytest.fixture(autouse=True)
def memories_add_up(monkeypatch):
    """Check the sums of every trace that a test has ended."""
    traces = weakref.WeakSet()
    start = managedmem.Trace.start

    def noted(trace):
        start(trace)
        traces.add(trace)

    monkeypatch.setattr(managedmem.Trace, "start", noted)
    yield
    for trace in traces:
        if "ended" in repr(trace):
            for part in (trace, *trace.slices):
                assert_memories_add_up(part)
            for name in ("to_device", "to_host", "between_devices"):
                total = sum(getattr(part.total, name) for part in trace.slices)
                assert total == getattr(trace.total, name)


@pytest.fixture
def undisturbed():
    """Mends the emulated event queues after a test that disturbs them."""
    yield
    emulator.disturb_queue()


def by_fault(sums, direction):
    """Bytes that faults moved, with those that came along."""
    return sums.by_cause["fault"][direction] + sums.by_cause["speculative"][direction]


class TestSumsAreThoseOfArithmetic:
    def test_prefetches(self, alloc):
        buffer = alloc(MIB)
        store(buffer[:HALF])
        with managedmem.trace() as t:
            buffer.prefetch(Device(0))
            t.mark("there")
            buffer.prefetch(Device(0))
            t.mark("again")
            buffer.prefetch(Host())
        there, again, back = (part[buffer] for part in t.slices)
        assert there.by_cause["requested"] == (HALF, 0, 0)
        assert (again.moved, again.host_faults, again.device_faults) == (0, 0, 0)
        assert back.by_cause["requested"][1] == back.to_host == back.moved
        assert back.to_host >= HALF
        assert there.turned_back == again.turned_back == back.turned_back == 0
        assert t[buffer].turned_back == t.total.turned_back == HALF
        assert t.total.host_faults == t.total.device_faults == 0
        assert t[buffer].devices == (Device(0),)

    def test_memory_without_contents_does_not_move(self, alloc):
        buffer = alloc(MIB)
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
        assert 0 <= t.total.move_time <= moves + 1e-9

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

    def test_marks_are_events(self, buf):
        with managedmem.trace() as t:
            buf.prefetch(Device(0))
            t.mark("half")
            buf.prefetch(Host())
        kinds = [e.kind for e in t.events() if e.kind in ("move", "mark")]
        at = kinds.index("mark")
        assert 0 < at < len(kinds) - 1
        assert kinds.count("mark") == 1
        assert list(t.slices[1].events("mark")) == []

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
        with pytest.raises(KeyError, match="no memory named 'weights'"):
            t["weights"]
        with pytest.raises(ValueError, match="kind must be one of"):
            t.events("moves")

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
        """Also where no driver call lies between the two."""
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

    def test_foreign_memory_has_a_row(self):
        address = managed_memory(2 * MIB)
        ctypes.memset(address, 1, 2 * MIB)
        try:
            with managedmem.trace() as t:
                wrapped = ManagedBuffer.from_handle(address, 2 * MIB)
                wrapped.prefetch(Device(0))
                wrapped.close()
                raw_driver().cuCtxSynchronize()
            foreign = [m for m in t.memories if m.kind == "foreign"]
            found = t[address, 2 * MIB]
            assert found.to_device == 2 * MIB
            t.name((address, 2 * MIB), "theirs")
            assert t["theirs"].to_device == 2 * MIB
            assert foreign == [] or foreign[0].address == address
        finally:
            raw_driver().cuMemFree_v2(ctypes.c_uint64(address))

    def test_foreign_memory_that_is_only_touched_has_a_row(self):
        address = managed_memory(2 * MIB)
        ctypes.memset(address, 1, 2 * MIB)
        location = Device(0)
        buffer = ManagedBuffer.from_handle(address, 2 * MIB)
        buffer.prefetch(location)
        location.sync()
        buffer.close()
        try:
            with managedmem.trace() as t:
                ctypes.string_at(address, 2 * MIB)
            (foreign,) = [m for m in t.memories if m.to_host]
            assert (foreign.kind, foreign.address, foreign.nbytes) == ("foreign", address, 2 * MIB)
            assert foreign.to_host == by_fault(foreign, 1) == t.total.to_host == 2 * MIB
            assert t[address, 2 * MIB].label == foreign.label
            assert t.unattributed.moved == 0
        finally:
            raw_driver().cuMemFree_v2(ctypes.c_uint64(address))

    def test_foreign_memory_that_was_freed_is_unattributed(self):
        location = Device(0)
        address = managed_memory(2 * MIB)
        ctypes.memset(address, 1, 2 * MIB)
        buffer = ManagedBuffer.from_handle(address, 2 * MIB)
        buffer.prefetch(location)
        location.sync()
        buffer.close()
        with managedmem.trace() as t:
            ctypes.string_at(address, 2 * MIB)
            raw_driver().cuMemFree_v2(ctypes.c_uint64(address))
        assert t.unattributed.to_host == t.total.to_host == 2 * MIB
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


class TestStates:
    def test_results_of_a_running_trace(self, buf):
        with managedmem.trace() as t:
            for read in (
                lambda: t.total,
                lambda: t.memories,
                lambda: t[buf],
                lambda: t.duration,
                lambda: t.complete,
                t.summary,
                t.findings,
                t.to_dict,
                t.events,
            ):
                with pytest.raises(RuntimeError, match="can be read after its end"):
                    read()
            assert str(t) == f"<managedmem.Trace, running, source {SOURCE}>"
            assert t._repr_html_() is None

    def test_a_trace_is_used_once(self):
        t = managedmem.trace()
        assert repr(t) == "<managedmem.Trace, not started>"
        for early in (lambda: t.total, t.stop, lambda: t.mark("x")):
            with pytest.raises(RuntimeError, match="not started"):
                early()
        t.start()
        with pytest.raises(RuntimeError, match="used once"):
            t.start()
        t.stop()
        t.stop()
        with pytest.raises(RuntimeError, match="used once"):
            t.start()
        with pytest.raises(RuntimeError, match="has ended"):
            t.mark("x")

    def test_a_second_trace_is_refused(self):
        with managedmem.trace() as t:
            with pytest.raises(managedmem.TraceBusyError, match="already") as caught:
                managedmem.trace().start()
            assert isinstance(caught.value, managedmem.TraceUnavailableError)
            found = []

            def work():
                try:
                    managedmem.trace().start()
                except managedmem.TraceBusyError as error:
                    found.append(error)

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            assert len(found) == 1
        with managedmem.trace() as second:
            pass
        assert t.complete
        assert second.complete

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
    def test_an_error_in_the_body_ends_the_trace(self, buf, error):
        with pytest.raises(error) as caught:
            with managedmem.trace() as t:
                buf.prefetch(Device(0))
                raise error
        assert t[buf].to_device == MIB
        assert not hasattr(caught.value, "__notes__")

    @pytest.mark.emulator_only
    def test_a_failing_end_is_a_note(self, buf):
        emulator.schedule("eager")
        with pytest.raises(ZeroDivisionError) as caught:
            with managedmem.trace() as t:
                buf.prefetch(Device(0))
                emulator.fail("cuCtxSynchronize", code=700)
                1 / 0  # noqa: B018
        assert emulator.failure_fired()
        assert "cuCtxSynchronize" in caught.value.__notes__[0]
        assert not t.complete
        assert "cuCtxSynchronize" in t.problems[-1]
        assert t.total.to_device == MIB

    def test_a_running_trace_that_is_dropped_ends(self, buf):
        t = managedmem.trace()
        t.start()
        buf.prefetch(Device(0))
        del t  # without the garbage collector
        with managedmem.trace() as other:
            pass
        assert other.complete

    def test_interrupts_behind_the_end_of_a_part(self, buf, monkeypatch):
        """As a KeyboardInterrupt can come between any two steps."""
        t = managedmem.trace()
        t.start()
        for end in (lambda: t.mark("interrupted"), t.stop):
            with monkeypatch.context() as patched:
                patched.setattr(t, "_note_overhead", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    end()
        assert [s.label for s in t.slices] == ["interrupted", "end"]
        assert 0 <= t.slices[0].overhead <= t.overhead
        assert t.slices[1].overhead >= 0
        assert t.to_dict()["complete"]

    def test_all_threads_are_recorded(self, alloc):
        buffers = [alloc(MIB) for _ in range(4)]
        for buffer in buffers:
            store(buffer)

        def work(buffer):
            for _ in range(5):
                buffer.prefetch(Device(0))
                buffer.prefetch(Host())
            Device(0).sync()

        with managedmem.trace() as t:
            threads = [threading.Thread(target=work, args=[b]) for b in buffers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for buffer in buffers:
            assert (t[buffer].to_device, t[buffer].to_host) == (5 * MIB, 5 * MIB)
            assert t[buffer].turned_back == 9 * MIB

    def test_marks_of_threads_make_as_many_slices(self, buf):
        with managedmem.trace() as t:
            threads = [threading.Thread(target=t.mark, args=[f"m{n}"]) for n in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert sorted(s.label for s in t.slices) == ["end", *(f"m{n}" for n in range(8))]
        times = [e.time for e in t.events("mark")]
        assert times == sorted(times)
        assert len(times) == 8


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            ({"source": "nsys"}, ValueError, '"auto", "kernel" or "emulator", got \'nsys\''),
            ({"source": "cupti"}, ValueError, "got 'cupti'"),
            ({"source": None}, ValueError, "got None"),
            ({"limit": 999}, ValueError, "from 1000 to 1000000000, got 999"),
            ({"limit": 10**9 + 1}, ValueError, "got 1000000001"),
            ({"limit": 1e6}, TypeError, "limit must be an int, got 1000000.0"),
            ({"limit": True}, TypeError, "limit must be an int"),
            ({"faults": 1}, TypeError, "faults must be True or False, got 1"),
            ({"sync": None}, TypeError, "sync must be True or False, got None"),
        ],
    )
    def test_bad_options(self, arguments, error, text):
        with pytest.raises(error, match=text):
            managedmem.trace(**arguments)

    def test_ranges_that_no_memory_has_are_not_named(self, buf):
        """A name that was taken must not spoil the results later."""
        with managedmem.trace() as t:
            buf.prefetch(Device(0))
        for refused in ((PAGE, 1 << 63), (1, (1 << 64) - 1), ((1 << 64) - PAGE, PAGE), (0, 1)):
            with pytest.raises(ValueError, match="must be a range of addresses"):
                t.name(refused, "refused")
        for named in ((PAGE, (1 << 63) - 1), ((1 << 64) - PAGE, PAGE - 1)):
            t.name(named, "anything")
        assert t["anything"].to_device == t.total.to_device == MIB

    def test_marks_need_labels(self):
        with managedmem.trace() as t, pytest.raises(TypeError, match="label must be a str, got 3"):
            t.mark(3)

    def test_the_source_of_the_other_driver(self):
        other = "kernel" if EMULATED else "emulator"
        with pytest.raises(managedmem.TraceUnavailableError, match="this process uses") as caught:
            managedmem.trace(source=other).start()
        assert [t[0] for t in caught.value.tried] == [other]

    def test_the_own_source(self):
        with managedmem.trace(source=SOURCE) as t:
            pass
        assert t.source == SOURCE
        assert t.source_detail

    def test_the_import_of_the_package_does_not_import_traces(self):
        run_python(
            """
            import sys, managedmem
            assert not [name for name in sys.modules if name.startswith("managedmem._trace")]
            assert "dataclasses" not in sys.modules and "json" not in sys.modules
            assert managedmem.trace is managedmem.trace
            assert "managedmem._trace" in sys.modules
            from managedmem import *
            assert trace is managedmem.trace and Finding._fields
            """
        )


@pytest.mark.emulator_only
class TestHostileQueues:
    @pytest.mark.parametrize("name", ["absent", "denied", "refused", "layout"])
    def test_no_source(self, name):
        text = run_python(
            """
            import managedmem
            try:
                managedmem.trace().start()
            except managedmem.TraceUnavailableError as error:
                print(error)
                ((source, code, sentence),) = error.tried
                assert source == "emulator" and (code is None or code > 0), error.tried
                assert sentence in str(error)
            else:
                raise SystemExit("no error")
            managedmem.emulator.disturb_queue()
            with managedmem.trace() as t:
                pass
            assert t.complete
            """,
            emulator=f"queue_{name}=1",
        ).stdout
        assert text.startswith("no source of unified-memory events. Tried:\n  emulator: ")
        words = {"absent": "--device /dev/nvidia-uvm-tools", "denied": "needs permission"}
        assert words.get(name, "") in text

    def test_garbage_is_counted(self, buf, undisturbed):
        with managedmem.trace() as t:
            emulator.disturb_queue(garbage=1)
            buf.prefetch(Device(0))
        assert t.rejected > 0
        assert not t.complete
        assert ", INCOMPLETE" in str(t)
        assert t[buf].to_device == MIB
        assert f"{t.rejected} records of the source were not understood" in t.problems[0]

    def test_lost_events_are_counted(self, buf, undisturbed):
        with managedmem.trace() as t:
            emulator.disturb_queue(drop=1)
            buf.prefetch(Device(0))
        assert t.lost > 0
        assert not t.complete
        assert t.total.moved == 0
        assert f"{t.lost} events were lost" in t.problems[0]

    def test_late_events_belong_to_the_slice(self, buf, undisturbed):
        emulator.disturb_queue(late=1)
        with managedmem.trace() as t:
            buf.prefetch(Device(0))
            t.mark("first")
        assert [part.total.to_device for part in t.slices] == [MIB, 0]


class TestProcesses:
    def test_the_first_start_after_small_memory_was_freed_on_a_device(self):
        """Its pages stay there, also for the memory that gets the address next."""
        run_python(
            """
            import ctypes, managedmem
            kept = managedmem.empty(4096)
            buf = managedmem.empty(256 << 10)
            ctypes.memset(buf.handle, 1, buf.nbytes)
            buf.prefetch(managedmem.Device(0))
            buf.close()
            with managedmem.trace() as t:
                pass
            assert t.total.moved == 0
            """
        )

    def test_a_fork_inside_does_not_record(self):
        run_python(
            """
            import os, sys, ctypes, managedmem
            from managedmem import Device
            buf = managedmem.empty(1 << 20)
            ctypes.memset(buf.handle, 1, buf.nbytes)
            t = managedmem.trace()
            with t:
                buf.prefetch(Device(0))
                child = os.fork()
                if child == 0:
                    t.stop()
                    try:
                        t.total
                    except RuntimeError as error:
                        os._exit(0 if "fork" in str(error) else 3)
                    os._exit(4)
                assert os.waitpid(child, 0)[1] == 0
            assert t.total.to_device == 1 << 20
            """
        )

    def test_forks_while_other_threads_mark(self):
        """A thread that is in a call at the fork does not exist in the child, its lock does."""
        run_python(
            """
            import os, signal, threading, warnings, managedmem
            warnings.simplefilter("ignore", DeprecationWarning)
            buf = managedmem.empty(1 << 20)
            t = managedmem.trace()
            over = threading.Event()
            def work():
                while not over.is_set():
                    t.mark("part")

            def refused(call):
                try:
                    call()
                except RuntimeError as error:
                    return "fork" in str(error)

            def use_in_child():
                t.stop()
                return all(map(refused, (
                    lambda: t.mark("child"),
                    lambda: t.name(buf, "child"),
                    lambda: t.total,
                )))

            with t:
                threads = [threading.Thread(target=work) for _ in range(2)]
                for thread in threads:
                    thread.start()
                results = []
                for _ in range(5):
                    child = os.fork()
                    if child == 0:
                        signal.alarm(10)
                        os._exit(0 if use_in_child() else 3)
                    results.append(os.waitpid(child, 0)[1])
                over.set()
                for thread in threads:
                    thread.join()
            assert results == [0] * 5, results
            assert t.total.moved == 0
            """
        )

    @pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)", "pass"])
    def test_an_exit_inside_does_not_hang(self, end):
        run_python(
            f"""
            import os, sys, managedmem
            from managedmem import Device
            buf = managedmem.empty(1 << 20)
            t = managedmem.trace()
            t.start()
            buf.prefetch(Device(0))
            {end}
            """
        )

    def test_the_end_of_the_interpreter_leaves_the_finished_slices(self):
        """A callback that was registered before the import runs after the extension's own."""
        done = run_python(
            """
            import atexit, ctypes
            def last():
                t.stop()
                print(t)
                print(first.total.to_device, t.slices[0].total.to_device)
                for read in (lambda: t.total, lambda: t.slices[-1].duration, t.to_dict):
                    try:
                        read()
                    except RuntimeError as error:
                        print(error)
            atexit.register(last)
            import managedmem
            from managedmem import Device
            buf = managedmem.empty(1 << 20)
            ctypes.memset(buf.handle, 1, buf.nbytes)
            t = managedmem.trace()
            t.start()
            buf.prefetch(Device(0))
            first = t.mark("first")
            buf.prefetch(managedmem.Host())
            """
        )
        lines = done.stdout.splitlines()
        assert lines[0] == f"<managedmem.Trace, ended, source {SOURCE}>"
        assert lines[1] == f"{MIB} {MIB}"
        assert (
            lines[2:]
            == ["the interpreter ended while the trace ran, and its last slice with it"] * 3
        )
        assert done.stderr == ""

    def test_streams_that_capture_refuse_marks(self, buf):
        with Stream() as stream, managedmem.trace() as t:
            with capturing(stream) as capture:
                with pytest.raises(RuntimeError, match="captur"):
                    t.mark("inside")
            assert capture.result == 0
            t.mark("after")
        assert [s.label for s in t.slices] == ["after", "end"]

    def test_an_end_in_a_capture_does_not_wait(self, buf):
        with Stream() as stream, capturing(stream) as capture:
            with managedmem.trace() as t:
                pass
        assert capture.result == 0
        assert t.problems == (
            "the end did not wait for the device, because a stream was capturing: unfinished work "
            "is not counted",
        )
