"""Shared by every test: the driver, the memory budget, and the check that nothing leaks.

The same tests run on the emulated driver (the default) and, with MANAGEDMEM_DRIVER=cuda, on a GPU.
"""

import faulthandler
import gc
import itertools
import os
import signal
import sys
import time
import zlib

os.environ.setdefault("MANAGEDMEM_DRIVER", "emulator")
# Threads of torch spin while they wait for each other: beside other tests that takes ten times as
# long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Products of MKL are else rounded by where the numbers lie: tests compare them bit by bit.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

import pytest

import programs
import searches
from constants import BUDGET, EMULATED, GIB, MIB, PAGE
from live_memory import live_managed_bytes, settle, warm_up
from programs import WAITING

FREE_MEMORY_REQUIRED = 2 * GIB
COLLECTION = 2  # times the limit of a test: pytest also compiles the tests, on a busy machine
PROCESSOR_SECONDS = 50  # that a test may take, unless it has a timeout mark
QUICK = {
    "core": "advice buffer capabilities creation driver functions plan pools streams trace"
    " working_sets",
    "emulator": "emulator",
    "interop": "export_protocols",
}
"""The files whose tests have the marker `quick`: together they show that an installation works."""
QUICK_FILES = {
    f"{folder}/test_{name}.py" for folder, names in QUICK.items() for name in names.split()
}


class Watch:
    """Ends a process that hangs outside of the tests, with the stacks of all threads.

    pytest's own limits (pyproject.toml) cover the tests themselves: one is a Python thread, and the
    other needs no GIL. This one covers the time before and after the tests, gives tests with a
    timeout mark their longer limit, and limits the processor time of a test.
    """

    def __init__(self, config):
        self.limit = float(config.getini("faulthandler_timeout"))
        self.stderr = os.dup(2)  # pytest replaces file descriptor 2 while tests run
        faulthandler.register(signal.SIGPROF, file=self.stderr, chain=True)  # which ends it

    def begin(self, limit=None):
        faulthandler.dump_traceback_later(limit or self.limit, exit=True, file=self.stderr)

    def limit_processor(self, seconds):
        """From now on; 0 is no limit. Programs that a test starts have their own."""
        signal.setitimer(signal.ITIMER_PROF, seconds)


WATCH = pytest.StashKey[Watch]()
SECONDS = pytest.StashKey[float]()  # of processor time, for a test with a timeout mark


def pytest_configure(config):
    config.stash[WATCH] = Watch(config)
    if config.getoption("numprocesses", None):  # of pytest-xdist; this process only waits for them
        prepare_processes(config)
    else:
        watch = config.stash[WATCH]
        watch.begin(COLLECTION * watch.limit)


def prepare_processes(config):
    """Give them whole files, because the tests of some files share one sweep.

    The run ends with the first process that hangs or crashes, as it does without the others.
    """
    if not EMULATED:
        raise pytest.UsageError("a GPU wants one process, whose memory has a limit: leave out -n")
    config.option.dist = "loadfile"
    config.option.maxworkerrestart = "0"


def give_more_time(item):
    """Timeout marks are processor time: pytest, which measures all time, gets another one."""
    mark = item.get_closest_marker("timeout")
    if mark is not None:
        item.stash[SECONDS] = mark.args[0]
        item.add_marker(pytest.mark.timeout(WAITING * mark.args[0]), append=False)


def pytest_runtest_setup(item):
    watch = item.config.stash[WATCH]
    watch.limit_processor(item.stash.get(SECONDS, PROCESSOR_SECONDS))
    if SECONDS in item.stash:
        watch.begin(WAITING * item.stash[SECONDS] + 10)


def pytest_sessionstart():
    """End a run on a GPU at once if the driver opens no device, because each test would fail."""
    if EMULATED:
        return
    import managedmem

    try:
        managedmem.Device(0)
    except (managedmem.CUDAError, ValueError) as error:
        pytest.exit(
            f"MANAGEDMEM_DRIVER=cuda needs a GPU; without that variable the tests run on the "
            f"emulated driver.\n{error}",
            returncode=pytest.ExitCode.USAGE_ERROR,
        )


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    config.stash[WATCH].limit_processor(0)
    config.stash[WATCH].begin()


SCHEDULES = ("eager", "lazy")
OPPOSITE = "opposite"


def pytest_addoption(parser):
    parser.addoption(
        "--schedule",
        choices=(*SCHEDULES, OPPOSITE),
        help="when the emulated driver runs queued operations (default: by the name of the test; "
        "opposite: the other one)",
    )
    parser.addoption(
        "--two-devices",
        action="store_true",
        help="only the tests that a machine with one device skips",
    )


def schedule_of(item):
    """The schedule of a test: half of the tests have each, and a test always has the same.

    It depends on the names of the file and of the test, not on the file's folder.
    """
    forced = item.config.getoption("schedule")
    name = "::".join([f"tests/{item.path.name}", *item.nodeid.split("::")[1:]])
    own = zlib.crc32(name.encode()) % len(SCHEDULES)
    return SCHEDULES[1 - own] if forced == OPPOSITE else forced or SCHEDULES[own]


def pytest_report_header():
    return f"random searches: MANAGEDMEM_SEED={searches.SEED}"


def is_search(item):
    """True for a test with a parameter `seed`."""
    return "seed" in getattr(getattr(item, "callspec", None), "params", {})


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    if is_search(item):
        item.funcargs["seed"] += searches.FIRST_SEED


def needs_two_devices(item):
    """True if its fixture or its mark says so."""
    reasons = (str(mark.kwargs.get("reason")) for mark in item.iter_markers("skipif"))
    return "device1" in item.fixturenames or "needs two devices" in reasons


def is_quick(path):
    return f"{path.parent.name}/{path.name}" in QUICK_FILES


def pytest_ignore_collect(collection_path, config):
    """With `-m quick` the other files are not read, which would take longer than the tests."""
    if config.option.markexpr == "quick" and collection_path.name.startswith("test_"):
        return not is_quick(collection_path) or None
    return None


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(config, items):
    for item in items:
        give_more_time(item)
        if is_quick(item.path):
            item.add_marker("quick")
        if is_search(item):
            item.add_marker("search")
    if config.getoption("two_devices"):
        rest = [item for item in items if not needs_two_devices(item)]
        config.hook.pytest_deselected(items=rest)
        items[:] = [item for item in items if item not in set(rest)]
    if EMULATED:
        return
    reason = "needs the emulated driver: call log, fault injection or residency"
    for item in items:
        if item.get_closest_marker("emulator_only"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.when == "call":
        item.call_failed = report.failed
    if report.failed and EMULATED:
        options = f"--schedule={schedule_of(item)}"
        if is_search(item):
            options = f"MANAGEDMEM_SEED={searches.SEED} {options}"
        report.sections.append(("Emulated driver", options))
    return report


HEAVY = ("torch", "jax", "cupy", "numba")
TESTS_UNTIL_FREEZE = 32
frozen = set()
tests_begun = itertools.count(1)


def freeze_lasting_objects():
    """Hide the objects of earlier tests from the collector, which makes collections fast.

    These are the objects that a heavy library's import made, and pytest's reports so far.
    Memory that is still managed stays in sight, for the budget.
    """
    new = {name for name in HEAVY if name in sys.modules} - frozen
    frozen.update(new)
    if (new or next(tests_begun) % TESTS_UNTIL_FREEZE == 0) and live_managed_bytes() == 0:
        gc.freeze()


def pytest_collection_finish():
    """Hide the thousands of collected tests from the collections after every test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def managed_budget(request):
    """Keep shared GPUs safe: enough memory free before a test, no more than the budget after it."""
    managedmem = sys.modules.get("managedmem")
    if managedmem is None:
        yield
        return
    if not EMULATED:
        free = managedmem.Device(0).memory_info.free
        assert free >= FREE_MEMORY_REQUIRED, f"only {free // MIB} MiB of the GPU are free"
        current = managedmem.Device()
    yield
    if not EMULATED and (now := managedmem.Device()) is not current:
        current.set_current()
        pytest.fail(f"the test left {now} current, and no longer {current}")
    assert live_managed_bytes() <= BUDGET
    gc.collect()
    settle()
    live = live_managed_bytes()
    if live > left_behind[-1][0]:
        left_behind.append((live, request.node.nodeid))
    freeze_lasting_objects()


left_behind = [(0, "the start")]  # bytes that live, and the test after which they grew


def pytest_terminal_summary(terminalreporter):
    """Drivers keep records for blocks that small allocations share, so memory that one test leaves
    can appear in others. On the emulated driver it fails the test itself."""
    for (before, _), (live, test) in itertools.pairwise(left_behind):
        if live > before:
            terminalreporter.write_line(f"{live - before} managed bytes live on after {test}")


@pytest.fixture(autouse=True)
def nothing_leaks(request):
    """On the emulator: every allocation, stream, event and pushed context is released.

    A test begins under schedule_of(); one that needs a certain schedule sets it itself.
    """
    if not EMULATED or "managedmem" not in sys.modules:
        yield
        return
    from managedmem import emulator

    warm_up()
    emulator.clear_failures()
    gc.collect()
    before = emulator.live()
    programs.schedule_of_subprocesses = schedule_of(request.node)
    emulator.schedule(schedule_of(request.node))
    yield
    emulator.clear_failures()
    emulator.disturb_queue()
    emulator.schedule("eager")
    programs.schedule_of_subprocesses = "eager"  # for fixtures of modules, which come first
    gc.collect()
    sys.modules["managedmem"].result_cache.clear()
    settle()
    if getattr(request.node, "call_failed", True):
        return  # the traceback of a failed test keeps its buffers alive
    assert emulator.live() == before


def close_when_released(buffer):
    """Close a buffer; JAX releases its exports in threads of its own, a moment later."""
    end = time.monotonic() + (5 if "jax" in sys.modules else 0)
    while True:
        try:
            return buffer.close()
        except BufferError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.01)


@pytest.fixture
def alloc():
    """`alloc(size)`: a ManagedBuffer that counts against the budget, closed after the test."""
    import managedmem

    resource = managedmem.ManagedMemoryResource()
    buffers = []

    def allocate(size=MIB, *, stream=None):
        live = sum(b.size for b in buffers if not b.is_closed)
        assert live + size <= BUDGET, "a test asked for more managed memory than the budget"
        buffers.append(resource.allocate(size, stream=stream))
        return buffers[-1]

    yield allocate
    gc.collect()
    for buffer in buffers:
        close_when_released(buffer)


@pytest.fixture
def buf(alloc):
    """One buffer of 1 MiB, with every byte 0."""
    buffer = alloc(MIB)
    with memoryview(buffer) as view:
        view[:] = bytes(MIB)
    return buffer


@pytest.fixture
def traced(monkeypatch):
    """`traced(canned, ...)`: an ended trace of canned events."""

    import managedmem

    def make(canned, **options):
        monkeypatch.setattr(managedmem._managedmem, "Recorder", canned.recorder)
        trace = managedmem.trace(**options)
        trace.start()
        for number in range(len(canned.ends)):
            trace.mark(f"part {number}")
        trace.stop()
        return trace

    return make


@pytest.fixture
def there_and_back(alloc):
    """A buffer named "w" and its trace: all of it to the device on request, then back by faults."""
    import managedmem
    from residencies import load, store

    buffer = alloc(4 * MIB)
    buffer.name = "w"
    store(buffer)
    with managedmem.trace() as trace:
        buffer.prefetch(managedmem.Device(0))
        trace.mark("there")
        load(buffer)
    return buffer, trace


@pytest.fixture
def clock():
    """Virtual seconds for tune(): the prices of what the emulated driver moves."""
    from managedmem import emulator
    from step_costs import StepClock

    emulator.schedule("eager")
    return StepClock()


@pytest.fixture
def steps(clock):
    """Uses of memory by phases of tune(), at the prices of the clock."""
    from step_costs import Steps

    return Steps(clock)


@pytest.fixture
def eager():
    """On the emulated driver, queued work runs at once."""
    if EMULATED:
        from managedmem import emulator

        emulator.schedule("eager")


@pytest.fixture
def device0():
    import managedmem

    return managedmem.Device(0)


@pytest.fixture
def device1():
    import managedmem

    if managedmem.Device.count() < 2:
        pytest.skip("needs two devices")
    return managedmem.Device(1)


@pytest.fixture
def members():
    """Every location that accessed_by can hold on this machine."""
    import managedmem

    return [*managedmem.Device.all()[:2], managedmem.Host()]


@pytest.fixture
def stream():
    import managedmem

    with managedmem.Stream() as new:
        yield new
        new.sync()


@pytest.fixture
def current_device():
    """Restore the thread's current device after a test that changes it."""
    import managedmem

    before = managedmem.Device()
    yield before
    before.set_current()


@pytest.fixture(params=["cpu"] if EMULATED else ["cpu", "cuda:0"])
def on(request):
    """The device on which torch sees the tensors of a test."""
    from tensors import HAS_CUDA

    if request.param != "cpu" and not HAS_CUDA:
        pytest.skip("torch has no CUDA")
    return request.param


@pytest.fixture
def managed(alloc, on):
    """`managed(shape, dtype)`: a tensor of zeros over a ManagedBuffer."""
    from managedmem import Device
    from tensors import torch

    def make(shape=(PAGE // 4,), dtype=torch.float32):
        size = torch.Size(shape).numel() * dtype.itemsize
        buffer = alloc(-(-size // PAGE) * PAGE)
        buffer.fill(0)
        Device().sync()
        if on == "cpu":
            memory = torch.frombuffer(buffer, dtype=torch.uint8)
        else:
            memory = torch.as_tensor(buffer, device=on)
        return memory[:size].view(dtype).view(shape)

    return make


@pytest.fixture
def streams_used(monkeypatch):
    """The `stream` of every call of managedmem.prefetch in the test."""
    import managedmem

    used = []
    prefetch = managedmem.prefetch

    def record(*arguments, stream=None, **more):
        used.append(stream)
        return prefetch(*arguments, stream=stream, **more)

    monkeypatch.setattr(managedmem, "prefetch", record)
    return used


@pytest.fixture(params=["managed", "managed on a device", "managed on the host", "device"])
def pool(request):
    from pools import KINDS

    with KINDS[request.param]() as made:
        yield made


@pytest.fixture
def managed_pool():
    from managedmem import ManagedMemoryResource

    with ManagedMemoryResource(pooled=True) as made:
        yield made


@pytest.fixture
def working():
    from layers import SIZE
    from managedmem import Device, WorkingSet

    with WorkingSet(4 * SIZE, Device(0)) as made:
        yield made


@pytest.fixture
def groups(working):
    from layers import layer

    return [working.add(layer(number), name=f"layer {number}") for number in range(16)]


@pytest.fixture
def failing():
    """`failing(2, 3)`: the second and third advice from now on fail."""
    from managedmem import emulator

    def fail(*nths, name="cuMemAdvise", after=False):
        for nth in nths:
            emulator.fail(name, nth=nth, code=999, after=after)

    yield fail
    emulator.clear_failures()
