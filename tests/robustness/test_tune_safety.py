"""tune() puts every page's advice back: after errors of the step, of the driver, and interrupts."""

import gc
import itertools
import random
import signal
import sys

import pytest

import managedmem
from constants import KIB
from managedmem import CUDAError, Device, Host, MigrationPolicy, emulator
from managedmem._tune_report import apply_all
from managedmem._tune_rules import Advise, Setting
from managedmem._tune_search import Placement
from step_costs import StepClock, Steps, tuned

pytestmark = pytest.mark.emulator_only

SIZE = 128 * KIB
DEVICE = Device(0)
LAUNCH_FAILED = 719


class Tuned:
    """Two buffers with advice of their own, and a step that gains from changes of both."""

    def __init__(self):
        emulator.schedule("eager")
        self.clock = StepClock()
        self.clock.in_place = 0.0
        self.steps = Steps(self.clock)
        self.x, self.y = (managedmem.empty(SIZE, name=name) for name in "xy")
        self.x[: SIZE // 2].accessed_by = [Host()]
        self.y[SIZE // 4 :].accessed_by = [Device.all()[-1]]
        self.before = self.advice()
        self.runs = 0
        self.at_run = lambda: None

    def advice(self):
        return [[run[:5] for run in buffer.page_runs()] for buffer in (self.x, self.y)]

    def fill(self):
        self.runs += 1
        self.at_run()
        if not self.x.is_closed:
            self.steps.host_writes(self.x)

    def compute(self):
        if not self.x.is_closed:
            self.steps.device_uses(self.x)
        self.steps.device_uses(self.y, write=True)

    def tune(self, **more):
        more = {"min_gain": 0.0, "warmup": 0, "disposable": {"y": "compute"}, **more}
        return tuned([self.fill, self.compute], [self.x, self.y], self.clock, **more)

    def close(self):
        self.x.close()
        self.y.close()


@pytest.fixture
def case():
    made = Tuned()
    yield made
    emulator.clear_failures()
    made.close()


def test_the_case_changes_advice_and_plans(case):
    result = case.tune()
    assert result.policies
    assert case.advice() != case.before
    assert case.runs > 30


class Failure(Exception):
    pass


def test_errors_of_the_step(case):
    """In each run: the error passes through, and says which change was applied."""
    case.tune(keep=False)
    runs, notes = case.runs, set()

    def fail():
        if case.runs == failing:
            raise Failure("mine")

    case.at_run = fail
    for failing in range(1, runs + 1, 2):  # noqa: B007
        case.runs = 0
        with pytest.raises(Failure, match="mine") as caught:
            case.tune()
        assert case.advice() == case.before
        (note,) = caught.value.__notes__
        assert note.startswith("managedmem.tune(): in phase 'fill' with ")
        assert note.endswith(" applied; the earlier advice is back")
        notes.add(note)
    assert len(notes) >= 4
    assert any("with no change applied" in note for note in notes)
    assert any("everything that was kept" in note for note in notes)
    assert any("preferred_location=Host()" in note for note in notes)


def test_an_error_of_verify(case):
    def verify(before, after):
        raise Failure("mine")

    with pytest.raises(Failure):
        case.tune(verify=verify)
    assert case.advice() == case.before


def test_the_collector_is_on_after_errors(case):
    case.at_run = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        case.tune()
    assert gc.isenabled()


@pytest.mark.timeout(120)
def test_failures_of_driver_calls(case):
    """Any driver call fails once."""
    emulator.clear_calls()
    case.tune(keep=False)
    count = len(emulator.calls())
    assert 1000 < count < 65536
    raised = 0
    draw = random.Random(11)
    for _ in range(80):
        emulator.fail("*", nth=draw.randrange(1, count), code=LAUNCH_FAILED)
        try:
            case.tune(keep=False)
        except (CUDAError, managedmem.TraceUnavailableError, AssertionError) as error:
            raised += isinstance(error, CUDAError)
        finally:
            emulator.clear_failures()
        assert case.advice() == case.before
    assert raised > 15


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("function", ["cuMemAdvise", "cuMemRangeGetAttribute", "cuCtxSynchronize"])
def test_failures_of_one_function(case, function, after):
    with emulator.recording() as calls:
        case.tune(keep=False)
    count = sum(function in call.name for call in calls)
    assert count > 20
    for nth in range(1, count, max(count // 20, 1)):
        emulator.fail(function, nth=nth, code=LAUNCH_FAILED, after=after)
        try:
            case.tune(keep=False)
        except (CUDAError, managedmem.TraceUnavailableError):
            pass
        finally:
            emulator.clear_failures()
        assert case.advice() == case.before


def test_advice_that_cannot_be_put_back(case):
    """The note says so, and the error of the step passes through."""

    def fail():
        if case.advice() != case.before:
            emulator.fail("cuMemAdvise", code=LAUNCH_FAILED, lasting=True)
            raise Failure("mine")

    case.at_run = fail
    with pytest.raises(Failure) as caught:
        case.tune()
    (note,) = caught.value.__notes__
    assert "applied; not all of the earlier advice could be put back: " in note
    assert "719" in note


@pytest.mark.parametrize("run", [1, 2, 3])
def test_a_step_that_closes_a_buffer_early(case, run):
    """Before a change is tried, the error names the buffer."""

    def close():
        if case.runs == run:
            case.x.close()

    case.at_run = close
    with pytest.raises(RuntimeError, match=r"^buffer 'x': ManagedBuffer 'x' is closed"):
        case.tune(disposable=())


def test_a_source_that_ends_is_no_capture(case, monkeypatch):
    """The mark fails for its own reason, which the error says."""

    def refuse(trace, label):
        raise managedmem.TraceUnavailableError("delivers no events")

    monkeypatch.setattr(managedmem._trace.Trace, "mark", refuse)
    with pytest.raises(managedmem.TraceUnavailableError, match="delivers no events"):
        case.tune()
    assert case.advice() == case.before


class TestInterrupts:
    """Interrupts by the terminal, and by signal handlers that raise other errors."""

    def lines(self, frame, event, argument):
        if "/managedmem/_tune" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.count += 1
            if self.count == self.at:
                raise self.error
        return self.lines

    def traced(self, case, at, **more):
        """Tune, and interrupt at that line of the modules of tune()."""
        self.count, self.at = 0, at
        before = sys.gettrace()
        sys.settrace(self.lines)
        try:
            case.tune(**more)
        finally:
            sys.settrace(before)

    @pytest.mark.timeout(200)
    @pytest.mark.parametrize(
        ("keep", "error"),
        [(True, KeyboardInterrupt), (False, KeyboardInterrupt), (True, TimeoutError)],
    )
    def test_at_lines_of_the_search(self, case, keep, error):
        self.error = error
        self.traced(case, 0, keep=False)
        count = self.count
        assert count > 3000
        draw = random.Random(keep)
        chosen = [draw.randrange(1, count) for _ in range(40)]
        chosen += range(count - 40, count + 1)  # the end, where advice is left or put back
        for at in chosen:
            try:
                self.traced(case, at, keep=keep)
            except error:
                assert case.advice() == case.before, at
                assert gc.isenabled(), at
            else:  # the search went another way, and ended before this line
                MigrationPolicy.default().apply([case.x, case.y])
                case.close()
                case.__init__()

    def recorded_lines(self, frame, event, argument):
        """Those of the modules that look at runs, and of the trace."""
        path = frame.f_code.co_filename
        if not path.endswith(("/managedmem/_tune.py", "/managedmem/_trace.py")):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt
        return self.recorded_lines

    @pytest.mark.timeout(200)
    def test_leave_no_trace_running(self, case):
        """Even while the error, whose frames have the trace, is kept."""
        self.at = self.count = 0
        before = sys.gettrace()
        case.tune(keep=False, pairs=5)  # imports all that it needs
        for at in range(1, 600, 5):
            self.at, self.count = at, 0
            sys.settrace(self.recorded_lines)
            try:
                with pytest.raises(KeyboardInterrupt) as caught:
                    case.tune(keep=False, pairs=5)
            finally:
                sys.settrace(before)
            with managedmem.trace(faults=False):
                pass
            assert case.advice() == case.before
            del caught

    # Python loses the error of a handler in a callback of the collector; hypothesis has one.
    @pytest.mark.filterwarnings(
        "ignore:Exception ignored in. <function gc_cumulative_time:"
        "pytest.PytestUnraisableExceptionWarning"
    )
    @pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError, RuntimeError])
    def test_at_random_moments(self, case, error):
        def interrupt(number, frame):
            raise error

        earlier = signal.signal(signal.SIGALRM, interrupt)
        draw = random.Random(7)
        interrupted = 0
        case.tune(keep=False)  # imports all that it needs
        try:
            while interrupted < 15:  # runs that end earlier are as many as the machine is fast
                try:
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.0005, 0.06))
                    case.tune(keep=False)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except error:
                    interrupted += 1
                assert case.advice() == case.before
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, earlier)

    def test_of_the_step_without_a_note(self, case):
        def interrupt():
            if case.runs == 9:
                raise KeyboardInterrupt

        case.at_run = interrupt
        with pytest.raises(KeyboardInterrupt) as caught:
            case.tune()
        assert not hasattr(caught.value, "__notes__")
        assert case.advice() == case.before


def test_random_settings_and_their_end(case):
    """Parts that share pages with each other: the last one applied decides, and all is put back."""
    draw = random.Random(2)
    cuts = [0, 5000, 9000, 30000, 65536, 70001, SIZE]
    parts = {f"{a}": case.x.range(a, b - a) for a, b in itertools.pairwise(cuts)}
    parts["y"] = case.y
    policies = [
        MigrationPolicy.read_duplicated(),
        MigrationPolicy.prefer(DEVICE),
        MigrationPolicy(preferred_location=Host(), accessed_by=[DEVICE]),
    ]
    placement = Placement(parts)
    for _ in range(60):
        chosen = draw.sample(sorted(parts), draw.randrange(len(parts) + 1))
        advised = {name: Advise(name, draw.choice(policies), False) for name in chosen}
        placement.use(Setting(advised))
        assert placement.use(Setting(advised)) is False
        found = {name: MigrationPolicy.of(parts[name].range(0, 1)) for name in ("y", "30000")}
        for name in found.keys() & advised.keys():
            if name == "y" or "9000" not in advised:
                assert found[name] == advised[name].policy
        if draw.random() < 0.3:
            placement.put_back()
            assert case.advice() == case.before
    placement.put_back()
    assert case.advice() == case.before


def test_memory_that_the_step_closes(case):
    def close():
        if case.runs == 20:
            case.x.close()

    case.at_run = close
    with pytest.raises((RuntimeError, ValueError)):
        case.tune()
    assert [run[:5] for run in case.y.page_runs()] == case.before[1]


def test_contents_stay(case):
    """Only disposable memory may change."""
    data = bytes(range(256)) * (SIZE // 256)
    memoryview(case.y)[:] = data
    case.tune(disposable=())
    assert memoryview(case.y).tobytes() == data


def test_policies_are_applied_all_or_none(case):
    policies = {
        "x": MigrationPolicy.read_duplicated(),
        "y": MigrationPolicy(preferred_location=Host(), accessed_by=[DEVICE]),
    }
    targets = {"x": case.x, "y": case.y}
    with emulator.recording() as calls:
        apply_all(policies, targets)
    count = sum(call.name == "cuMemAdvise" for call in calls)
    assert [MigrationPolicy.of(targets[name]) for name in "xy"] == list(policies.values())
    assert count > 3
    case.close()
    for nth in range(1, count + 1):
        again = Tuned()
        emulator.fail("cuMemAdvise", nth=nth, code=LAUNCH_FAILED)
        with pytest.raises(CUDAError):
            apply_all(policies, {"x": again.x, "y": again.y})
        emulator.clear_failures()
        assert again.advice() == again.before
        again.close()


def test_refused_advice_is_not_taken_for_applied(case):
    placement = Placement({"x": case.x})
    setting = Setting({"x": Advise("x", MigrationPolicy.read_duplicated(), False)})
    for _ in range(2):
        emulator.fail("cuMemAdvise", code=801)
        with pytest.raises(CUDAError):
            placement.use(setting)
    assert placement.use(setting) is True
    assert case.x.read_mostly
    placement.put_back()
    assert case.advice() == case.before
