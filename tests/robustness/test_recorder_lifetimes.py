"""Recorders that end with their object, their interpreter or their process, and in forked children.

Each case is a program of its own, because most of them end one with a recorder that runs.
"""

import pytest

from forks import ASAN
from interpreter_kinds import KINDS
from programs import run_python
from subinterpreters import PRELUDE as SUBINTERPRETERS
from whole_programs import run_to_the_end

pytestmark = pytest.mark.emulator_only

THREADS = """
import os, time
def threads(expected):
    "True once the process has so many threads; one that has ended is listed for a moment longer."
    end = time.monotonic() + 20
    while len(os.listdir("/proc/self/task")) != expected and time.monotonic() < end:
        time.sleep(0.001)
    return len(os.listdir("/proc/self/task")) == expected
"""

PRELUDE = (
    THREADS
    + """
import atexit, gc, os, signal, sys, threading, time, warnings
import managedmem
from forks import fork_beside_sleepers
from managedmem import Device, Host, emulator
from program_checks import in_child, refused
from managedmem._trace_results import FIELDS, TOTAL, read_rows
Recorder = managedmem._managedmem.Recorder
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)

def on_host():
    buffer = managedmem.empty(1 << 20)
    buffer.fill(1)
    buffer.prefetch(Host())
    Device(0).sync()
    return buffer

def requested(recorder):
    _, rows = recorder.attribute([])
    field = FIELDS.index("to_device_requested")
    return sum(sums[field] for (_, memory), sums in read_rows(rows).items() if memory == TOTAL)
"""
)


def run(code):
    run_to_the_end(PRELUDE + code)


class TestTheThread:
    def test_ends_with_the_recording(self):
        run("""
recorder = Recorder()
recorder.start()
assert threads(2)
recorder.stop()
assert threads(1)
recorder = Recorder()
recorder.start()
del recorder
assert threads(1)
""")

    def test_is_not_interrupted_by_signals(self):
        """Python's handler runs, and system calls of the main thread are interrupted as usual."""
        run("""
seen = []
signal.signal(signal.SIGALRM, lambda *_: seen.append(threading.get_native_id()))
buffer = on_host()
recorder = Recorder()
recorder.start()
for n in range(20):
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    buffer.prefetch(Device(0)); buffer.prefetch(Host())
    while len(seen) == n:
        time.sleep(0.001)
recorder.stop()
assert len(seen) == 20 and set(seen) == {threading.get_native_id()}
assert requested(recorder) >> 20 == 20
""")


class TestKeyboardInterrupts:
    def test_between_and_in_calls(self):
        """The recorder stays usable, and its parts whole."""
        run("""
armed = False
def interrupt(*_):
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt

recorder = Recorder()
recorder.start()
interrupted = 0
signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
while interrupted < 20:
    try:
        armed = True
        recorder.mark()
        recorder.attribute([])
        armed = False
    except KeyboardInterrupt:
        interrupted += 1
try:
    armed = True
    recorder.stop()
    armed = False
except KeyboardInterrupt:
    pass
signal.setitimer(signal.ITIMER_REAL, 0)
recorder.stop() # if it was interrupted before it began
parts = recorder.parts()
assert all(a[1] == b[0] for a, b in zip(parts, parts[1:]))
assert not recorder.running and threads(1)
""")


class TestTheEndOfTheProcess:
    @pytest.mark.parametrize(
        "end",
        [
            "",
            "sys.exit(0)",
            "atexit.register(recorder.stop)",
            "atexit.register(lambda: recorder.attribute([]))",
            "threading.Thread(target=recorder.report, daemon=True).start()",
            "threading.Thread(target=mark, daemon=True).start()",
            "keep = [recorder]; keep.append(keep)",
            "sys.recorder = recorder",
            "os._exit(0)",
        ],
    )
    def test_with_a_recorder_that_runs(self, end):
        done = run_python(
            PRELUDE
            + f"""
def mark():
    try:
        recorder.mark()
    except RuntimeError: # the end of the interpreter was faster
        pass

buffer = managedmem.empty(1 << 20)
recorder = Recorder()
recorder.start()
buffer.prefetch(Device(0))
{end}
"""
        )
        assert done.stderr == ""

    def test_with_a_daemon_thread_that_records(self):
        run("""
def work():
    while True:
        try:
            recorder = Recorder()
            recorder.start()
            recorder.mark()
            recorder.attribute([])
            recorder.stop()
        except RuntimeError as error: # the end of the interpreter ends recordings
            assert "has ended" in str(error) or "interpreter ends" in str(error)

threading.Thread(target=work, daemon=True).start()
time.sleep(0.05)
""")

    def test_the_end_of_the_interpreter_ends_it(self):
        """Callbacks that were registered before the import run after the module's own."""
        done = run_python(
            THREADS
            + """
import atexit
def last():
    print(recorder.running, threads(1))
    recorder.stop()
    print(recorder.parts(), recorder.attribute([])[1])
atexit.register(last)
import managedmem
recorder = managedmem._managedmem.Recorder()
recorder.start()
print(recorder.running)
"""
        )
        assert done.stdout == "True\nFalse True\n[] b''\n"
        assert done.stderr == ""

    def test_none_starts_after_it(self):
        done = run_python(
            THREADS
            + """
import atexit
def last():
    try:
        recorder.start()
    except RuntimeError as error:
        print(error, recorder.running, threads(1))
atexit.register(last)
import managedmem
recorder = managedmem._managedmem.Recorder()
"""
        )
        assert done.stdout == "a trace cannot start while the interpreter ends False True\n"
        assert done.stderr == ""


class TestForks:
    CHILD = """
buffer = on_host()
recorder = Recorder()
recorder.start()
buffer.prefetch(Device(0))
sys.stdout.flush()
pid = fork_beside_sleepers()
if pid == 0:
    {child}
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert recorder.running
buffer.prefetch(Host()); buffer.prefetch(Device(0))
recorder.stop()
assert (requested(recorder) >> 20, recorder.report()["lost"]) == (2, 0)
"""

    @pytest.mark.parametrize(
        "child",
        [
            "pass",
            "assert not recorder.running; recorder.stop(); recorder.stop()",
            "del recorder; gc.collect()",
            "recorder.report(), recorder.clock(); assert recorder.parts() == []",
            "assert recorder.events().nbytes == 0",
            "sys.exit(0)",
            "del buffer; gc.collect()",
        ],
    )
    def test_the_parent_goes_on(self, child):
        run(self.CHILD.format(child=child))

    @pytest.mark.parametrize(
        "use", ["recorder.mark()", "recorder.attribute([])", "Recorder().start()"]
    )
    def test_the_child_is_refused(self, use):
        run(self.CHILD.format(child=f"with refused(RuntimeError, 'forked'): {use}"))

    @pytest.mark.skipif(
        ASAN, reason="its malloc() hangs after a fork beside a thread that allocates"
    )
    def test_forks_while_records_are_drained(self):
        """A child must find no lock taken."""
        run("""
buffer = managedmem.empty(4 << 20)
recorder = Recorder(limit=1000)
recorder.start()
over = False
def work():
    while not over:
        buffer.prefetch(Device(0)); buffer.prefetch(Host())
        recorder.mark()
        recorder.attribute([])
thread = threading.Thread(target=work)
thread.start()
for _ in range(30):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        recorder.report(); recorder.clock(); recorder.parts(); recorder.stop()
        del recorder
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
over = True
thread.join()
recorder.stop()
assert not recorder.running
""")

    def test_a_fork_before_the_first_use_of_the_driver(self):
        run("""
recorder = Recorder()
def work():
    recorder.start()
    on_host().prefetch(Device(0))
    recorder.stop()
    assert requested(recorder) > 0
assert in_child(work) == 0
recorder.start()
recorder.stop()
""")


@pytest.mark.parametrize("kind", KINDS)
class TestSubinterpreters:
    def test_they_share_one_recording(self, kind):
        run(
            SUBINTERPRETERS
            + f"""
interpreter = create({kind!r})
recorder = Recorder()
recorder.start()
run(interpreter, '''
import managedmem
from managedmem import Device, TraceBusyError
from program_checks import refused
with refused(TraceBusyError, "already running"):
    managedmem._managedmem.Recorder().start()
buffer = managedmem.empty(1 << 20)
buffer.fill(1); buffer.prefetch(managedmem.Host()); buffer.prefetch(Device(0))
''')
recorder.mark()
interpreters.destroy(interpreter)
assert recorder.running
recorder.stop()
assert requested(recorder) >> 20 == 1
"""
        )

    def test_the_end_of_one_ends_its_own_recording_only(self, kind):
        run(
            SUBINTERPRETERS
            + f"""
other = create({kind!r})
for _ in range(5):
    interpreter = create({kind!r})
    run(interpreter, '''
import managedmem, sys
sys.recorder = managedmem._managedmem.Recorder()
sys.recorder.start()
''')
    run(other, "import managedmem")
    interpreters.destroy(interpreter)
    assert threads(1)
    recorder = Recorder()
    recorder.start()
    interpreters.destroy(other)
    assert recorder.running
    recorder.stop()
    other = create({kind!r})
"""
        )
