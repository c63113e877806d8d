"""managedmem.trace(): starts and ends, arguments, disturbed queues, other processes."""

import contextlib
import functools
import linecache
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import managedmem
from constants import EMULATED, MIB, PAGE
from driver import capturing
from forks import ASAN
from managedmem import Device, Host, Stream, emulator
from programs import run_python
from threads import at_once
from traces import check_ended_traces, store

SOURCE, DRIVER = ("emulator", "emulator") if EMULATED else ("kernel", "cuda")
HALF = MIB // 2


@pytest.fixture(autouse=True)
def memories_add_up(monkeypatch):
    yield from check_ended_traces(monkeypatch)


def interrupt():
    raise KeyboardInterrupt


class OtherRecorder:
    """A recorder with some methods replaced."""

    def __init__(self, real, **methods):
        self.real = real
        vars(self).update(methods)

    def __getattr__(self, name):
        return getattr(self.real, name)


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
            assert str(t) == f"<Trace, running, source {SOURCE}>"
            assert t._repr_html_() is None

    def test_a_trace_is_used_once(self):
        t = managedmem.trace()
        assert repr(t) == "<Trace, not started>"
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
            with pytest.raises(managedmem.TraceBusyError):
                at_once(managedmem.trace().start)
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

    def trace_once(self, *arguments):
        """In a thread: Python goes on handling an interrupt that came as a handler ended."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self.trace_here, *arguments).result()

    def trace_here(self, at, first=None, acts=True):
        """Trace, with an interrupt at that line of the trace's code; how many lines there were.

        With `first`, that method of the recorder is interrupted before, when it begins or when it
        has acted, and the lines behind it count.
        """
        count = 0
        begun = first is None

        def lines(frame, event, argument):
            nonlocal count
            path = frame.f_code.co_filename
            if not path.endswith("/managedmem/_trace.py"):
                return None
            # Python looks for signals at calls and loops, not where a block begins.
            statement = linecache.getline(path, frame.f_lineno).strip()
            if event == "line" and begun and statement != "try:":
                count += 1
                if count == at:
                    raise KeyboardInterrupt
            return lines

        def interrupted(**options):
            nonlocal begun
            if begun or acts:
                getattr(real, first)(**options)
            if not begun:
                begun = True
                raise KeyboardInterrupt

        self.kept = t = managedmem.trace()  # one that is dropped would end by that
        if first is not None:
            real = t._recorder
            t._recorder = OtherRecorder(real, **{first: interrupted})
        before = sys.gettrace()
        sys.settrace(lines)
        try:
            with contextlib.suppress(KeyboardInterrupt), t:
                t.mark("a")
        finally:
            sys.settrace(before)
        return count

    def check_nothing_runs(self):
        with managedmem.trace(faults=False) as t:
            pass
        assert t.complete

    def test_interrupts_at_lines_leave_nothing_running(self, buf):
        count = self.trace_once(0)
        assert count > 50
        for at in range(1, count + 1):
            assert self.trace_once(at) >= at
            self.check_nothing_runs()

    @pytest.mark.parametrize("acts", [False, True])
    @pytest.mark.parametrize("first", ["start", "mark", "stop"])
    def test_second_interrupts_leave_nothing_running(self, buf, first, acts):
        """While the first one is handled."""
        count = self.trace_once(0, first, acts)
        assert count > 5
        for at in range(1, count + 1):
            assert self.trace_once(at, first, acts) >= at
            self.check_nothing_runs()

    def test_an_interrupt_beside_a_thread_that_waits(self, buf):
        """The thread has the lock. It learns that the trace has ended, and makes no slice."""
        found = []

        def mark():
            try:
                t.mark("late")
            except RuntimeError as error:
                found.append(str(error))

        class Lock:
            """An interrupt comes while the main thread waits for it."""

            def __enter__(self):
                if threading.current_thread() is threading.main_thread():
                    raise KeyboardInterrupt

            def __exit__(self, *_):
                pass

        def wait_and_mark():
            inside.set()
            assert go_on.wait(30)
            real.mark()

        inside, go_on = threading.Event(), threading.Event()
        thread = threading.Thread(target=mark)
        with pytest.raises(KeyboardInterrupt):
            with managedmem.trace() as t:
                t.mark("first")
                real = t._recorder
                t._recorder = OtherRecorder(real, mark=wait_and_mark)
                lock, t._lock = t._lock, Lock()
                thread.start()
                assert inside.wait(30)
        assert not real.running
        self.check_nothing_runs()
        go_on.set()
        thread.join()
        t._lock = lock
        assert found == ["the trace has ended"]
        assert [s.label for s in t.slices] == ["first", "end"]
        assert t.slices[1].total.moved == t.total.moved == 0

    def test_stop_ends_a_trace_whose_start_was_interrupted_twice(self, buf, monkeypatch):
        def start(wait):
            real.start(wait=wait)
            raise KeyboardInterrupt

        t = managedmem.trace()
        real = t._recorder
        t._recorder = OtherRecorder(real, start=start)
        with monkeypatch.context() as patched:
            patched.setattr(t, "_end_at_least", interrupt)
            with pytest.raises(KeyboardInterrupt):
                t.start()
        assert real.running
        t.stop()
        assert not real.running
        self.check_nothing_runs()

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
            at_once(*(functools.partial(work, buffer) for buffer in buffers))
        for buffer in buffers:
            assert (t[buffer].to_device, t[buffer].to_host) == (5 * MIB, 5 * MIB)
            assert t[buffer].turned_back == 9 * MIB

    def test_marks_of_threads_make_as_many_slices(self, buf):
        with managedmem.trace() as t:
            at_once(*(functools.partial(t.mark, f"m{n}") for n in range(8)))
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
            assert trace is managedmem.trace
            """
        )


class TestLateDevices:
    @pytest.mark.parametrize("branch", [535, 560, 580])
    @pytest.mark.parametrize("unlisted", [0, 1])
    def test_a_device_whose_context_comes_later(self, device1, branch, unlisted):
        driver = "emulator" if EMULATED else "cuda"
        options = f"queue_branch={branch},queue_unlisted={unlisted}"
        run_python(
            """
            import managedmem
            from managedmem import Device
            buf = managedmem.empty(1 << 20, name="buf")
            memoryview(buf)[:] = bytes(buf.size)
            buf.prefetch(Device(0))
            Device(0).sync()
            with managedmem.trace() as t:
                buf.prefetch(Device(1))
            assert t.complete, t.problems
            # Without peers, the pages go by way of the host.
            assert t["buf"].between_devices + t["buf"].to_device == buf.size, str(t)
            assert t["buf"].devices == (Device(0), Device(1))
            """,
            driver=driver,
            emulator=options if EMULATED else None,
        )


@pytest.mark.emulator_only
class TestHostileQueues:
    @pytest.mark.parametrize("name", ["absent", "denied", "refused", "layout"])
    def test_no_source(self, name):
        text = run_python(
            """
            import managedmem, pytest
            with pytest.raises(managedmem.TraceUnavailableError) as caught:
                managedmem.trace().start()
            print(caught.value)
            ((source, code, sentence),) = caught.value.tried
            assert source == "emulator" and (code is None or code > 0), caught.value.tried
            assert sentence in str(caught.value)
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

    def test_garbage_is_counted(self, buf):
        with managedmem.trace() as t:
            emulator.disturb_queue(garbage=1)
            for _ in range(20):  # some garbage looks like records that a trace does not need
                buf.prefetch(Device(0))
                buf.prefetch(Host())
        assert t.rejected > 0
        assert not t.complete
        assert ", INCOMPLETE" in str(t)
        assert t[buf].to_device == 20 * MIB
        assert f"{t.rejected} records of the source were not understood" in t.problems[0]

    def test_a_device_that_stays_unknown_is_missing(self, buf, device1):
        emulator.disturb_queue(unlisted=2)
        with managedmem.trace() as t:
            buf.prefetch(device1)
        assert t.rejected == 1
        assert not t.complete
        assert t.findings() == ()
        assert f"{t.rejected} records of the source were not understood" in t.problems[0]

    def test_lost_events_are_counted(self, buf):
        with managedmem.trace() as t:
            emulator.disturb_queue(drop=1)
            buf.prefetch(Device(0))
        assert t.lost > 0
        assert not t.complete
        assert t.total.moved == 0
        assert f"{t.lost} events were lost" in t.problems[0]


class TestProcesses:
    def test_the_first_start_after_small_memory_was_freed_on_a_device(self):
        """Its pages stay there, even for the memory that gets the address next."""
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
            from forks import fork_beside_sleepers
            from managedmem import Device
            from outcomes import refusal
            buf = managedmem.empty(1 << 20)
            ctypes.memset(buf.handle, 1, buf.nbytes)
            t = managedmem.trace()
            with t:
                buf.prefetch(Device(0))
                child = fork_beside_sleepers()
                if child == 0:
                    t.stop()
                    os._exit(0 if "fork" in refusal(RuntimeError, lambda: t.total) else 3)
                assert os.waitpid(child, 0)[1] == 0
            assert t.total.to_device == 1 << 20
            """
        )

    def test_a_fork_while_another_thread_starts_it(self):
        """The child has the taken lock, but not the thread."""
        done = run_python(
            """
            import os, threading
            from forks import fork_beside_sleepers
            from outcomes import refusal
            import managedmem

            t = managedmem.trace()
            inside, go_on = threading.Event(), threading.Event()

            def check_driver():
                inside.set()
                go_on.wait()

            t._check_driver = check_driver
            thread = threading.Thread(target=t.start)
            thread.start()
            inside.wait()
            child = fork_beside_sleepers()
            if child == 0:
                t.stop()
                refusals = [refusal(RuntimeError, call) for call in (t.start, lambda: t.mark("x"))]
                os._exit(0 if all("forked child" in text for text in refusals) else 2)
            assert os.waitpid(child, 0)[1] == 0
            go_on.set()
            thread.join()
            t.stop()
            print(t.total.moved)
            """,
            driver=DRIVER,
        )
        assert done.stdout == "0\n"

    @pytest.mark.skipif(
        ASAN, reason="its malloc() hangs after a fork beside a thread that allocates"
    )
    def test_forks_while_other_threads_mark(self):
        """A thread that is in a call at the fork does not exist in the child, its lock does."""
        run_python(
            """
            import os, signal, threading, warnings, managedmem
            from outcomes import refusal
            warnings.simplefilter("ignore", DeprecationWarning)
            buf = managedmem.empty(1 << 20)
            t = managedmem.trace()
            over = threading.Event()
            def work():
                while not over.is_set():
                    t.mark("part")

            def use_in_child():
                t.stop()
                uses = (lambda: t.mark("child"), lambda: t.name(buf, "child"), lambda: t.total)
                return all("fork" in refusal(RuntimeError, use) for use in uses)

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
            from outcomes import refusal
            def last():
                t.stop()
                print(t)
                print(first.total.to_device, t.slices[0].total.to_device)
                for read in (lambda: t.total, lambda: t.slices[-1].duration, t.to_dict):
                    print(refusal(RuntimeError, read))
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
            """,
            driver=DRIVER,
        )
        lines = done.stdout.splitlines()
        assert lines[0] == f"<Trace, ended, source {SOURCE}>"
        assert lines[1] == f"{MIB} {MIB}"
        reason = (
            "the last slice is missing: an interrupt or the end of the interpreter came before the "
            "end of the trace"
        )
        assert lines[2:] == [reason] * 3
        assert done.stderr == ""

    def test_an_end_in_a_capture_does_not_wait(self, buf):
        with Stream() as stream, capturing(stream) as capture:
            with managedmem.trace() as t:
                pass
        assert capture.result == 0
        assert t.problems == (
            "the end did not wait for the device, because a stream was capturing: unfinished work "
            "is not counted",
        )
