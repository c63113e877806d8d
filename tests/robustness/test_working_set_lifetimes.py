"""Working sets that end with their object, their interpreter or their process, and forked children.

Each case is a program of its own, because most of them end one with a set at work.
"""

import pytest

from interpreter_kinds import KINDS
from programs import run_python
from subinterpreters import PRELUDE as SUBINTERPRETERS
from whole_programs import run_to_the_end

pytestmark = pytest.mark.emulator_only("ends processes, and counts objects of the driver")

PRELUDE = """
import atexit, gc, os, sys, threading, time, warnings
from array import array
import managedmem
from forks import fork_beside_sleepers
from managedmem import Device, ManagedWorkingSet, Stream, WorkingSet, emulator
from managedmem.typing import WorkingGroup
from program_checks import in_child, refused
from races import race, race_over
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
SIZE = 1 << 16
buffers = [managedmem.full(SIZE, number, "uint8") for number in range(8)]
Device(0).sync()

def at_work(kind=WorkingSet):
    "A set with uses behind it, and loads under way."
    working = kind(3 * SIZE, Device(0))
    groups = [working.add(b, ["read", "write"][i % 2]) for i, b in enumerate(buffers)]
    for group in groups * 3:
        with group.use() as use:
            use.arrays
    return working, groups

def contents(groups):
    found = []
    for group in groups:
        with group.use_on_host() as arrays:
            array = arrays[0] if isinstance(arrays, tuple) else arrays
            assert len(set(bytes(array))) == 1
            found.append(bytes(array)[0])
    return found
"""


def run(code):
    run_to_the_end(PRELUDE + code)


def test_no_thread_of_its_own():
    run("""
before = len(os.listdir("/proc/self/task"))
working, groups = at_work()
assert len(os.listdir("/proc/self/task")) == before
""")


@pytest.mark.parametrize("kind", ["WorkingSet", "ManagedWorkingSet"])
@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit(0)",
        "atexit.register(working.close)",
        "use = groups[0].use()",
        "late = groups[0].use().arrays; del groups, working",
        "use = groups[0].use(); late = use.arrays; working.close()",
        "threading.Thread(target=use_on, daemon=True).start(); time.sleep(0.02)",
        "threading.Thread(target=make_others, daemon=True).start(); time.sleep(0.02)",
        "keep = [working]; keep.append(keep)",
        "sys.working = groups",
        "os._exit(0)",
        "del working; gc.collect()",
        "use = groups[0].use(stream=Stream())",
        "block = groups[0].use_on_host(access='write'); block.__enter__()",
    ],
)
def test_the_process_ends_with_a_set_at_work(end, kind):
    done = run_python(
        PRELUDE
        + f"""
def use_on():
    try:
        while True:
            for group in groups:
                with group.use() as use:
                    use.arrays
    except RuntimeError as error: # the end of the interpreter was faster
        assert "closed" in str(error) or "interpreter" in str(error), error

def make_others():
    others = []
    while len(others) < 500:
        try:
            others.append({kind}(SIZE))
            others[-1].add(managedmem.empty(SIZE)).use()
        except RuntimeError as error:
            assert "closed" in str(error) or "interpreter" in str(error), error

working, groups = at_work({kind})
{end}
"""
    )
    assert done.stderr == ""


@pytest.mark.parametrize("kind", ["WorkingSet", "ManagedWorkingSet"])
def test_a_set_and_its_groups_are_garbage_together(kind):
    run(f"""
for buffer in buffers:
    buffer.prefetch(managedmem.Host())
at_work({kind})
gc.collect()
Device(0).sync()
before = emulator.live()
for round in range(20):
    working, groups = at_work({kind})
    use = groups[2].use()
    late = use.arrays
    working.itself = [groups, use, late]
    if round % 2:
        working.close()
    del working, groups, use, late
    gc.collect()
Device(0).sync()
assert emulator.live() == before, (emulator.live(), before)
""")


def test_collections_inside_of_calls():
    """They end uses of other groups and sets, and drop their arrays, whatever is under way."""
    run("""
gc.set_threshold(3, 3, 3)
first, groups = at_work()
second, others = at_work()
def litter(group):
    use = group.use()
    cycle = [use, use.arrays]
    cycle.append(cycle)
def work(groups, others):
    for round in range(60):
        for group, other in zip(groups, others[::-1]):
            litter(group)
            with other.use() as use:
                use.arrays
            with group.use_on_host() as home:
                home
gc.collect()
race_over(work, (groups[::2], others[::2]), (others[::2], groups[::2]))
gc.collect()
for working, members in ((first, groups), (second, others)):
    assert working.stats().failures == 0
    for group in members:
        working.remove(group)
assert contents(groups) == contents(others) == [*range(8)]
""")


class TestForks:
    CHILD = """
working, groups = at_work({kind})
use = groups[0].use()
late = use.arrays
sys.stdout.flush()
pid = fork_beside_sleepers()
if pid == 0:
    {child}
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
use.close()
del late, use
for group in groups:
    with group.use():
        pass
assert contents(groups) == [*range(8)] and working.stats().failures == 0
working.close()
"""

    @pytest.mark.parametrize("kind", ["WorkingSet", "ManagedWorkingSet"])
    @pytest.mark.parametrize(
        "child",
        [
            "pass",
            "working.close(); working.close()",
            "assert working.is_closed and 'parent' in repr(working); repr(groups[0]); repr(use)",
            "del working, groups, use, late; gc.collect()",
            "sys.exit(0)",
            "assert groups[0].nbytes == SIZE and groups[0].set is working and len(working) == 8",
            "with working: sys.exit(0)",
        ],
    )
    def test_the_parent_goes_on(self, child, kind):
        if child.startswith("with"):
            child = "working.__exit__(None, None, None); sys.exit(0)"
        run(self.CHILD.format(child=child, kind=kind))

    @pytest.mark.parametrize(
        "call",
        [
            "groups[0].use()",
            "groups[0].is_resident",
            "use.close()",
            "groups[1].use_on_host().__enter__()",
            "working.add(buffers[0])",
            "working.remove(groups[1])",
            "working.stats()",
            "working.nbytes",
            "working.order = groups",
            "WorkingSet(SIZE)",
            "ManagedWorkingSet(SIZE)",
        ],
    )
    @pytest.mark.parametrize("kind", ["WorkingSet", "ManagedWorkingSet"])
    def test_the_child_is_refused(self, call, kind):
        child = f"with refused(RuntimeError, 'forked'): {call}"
        run(self.CHILD.format(child=child, kind=kind))

    def test_a_fork_inside_of_a_call_of_another_thread(self):
        """Which has a lock that nobody releases in the child."""
        run("""
from managedmem import _working_group
working, groups = at_work()
held, done = threading.Event(), threading.Event()
def hold():
    with _working_group.WorkingGroup._lock:
        held.set()
        done.wait()
def use():
    with refused(RuntimeError, "forked"):
        groups[0].use()
holder = threading.Thread(target=hold)
holder.start()
held.wait()
assert in_child(use, fork_beside_sleepers) == 0
done.set()
holder.join()
""")


@pytest.mark.parametrize("type_", ["WorkingSet", "ManagedWorkingSet"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_subinterpreter_ends_its_sets(kind, type_):
    run(
        SUBINTERPRETERS
        + f"""
working, groups = at_work()
before = emulator.live().allocations
one = create({kind!r})
run(one, '''
import managedmem
buffer = managedmem.empty(1 << 16)
working = managedmem.{type_}(1 << 16)
group = working.add(buffer)
use = group.use()
late = use.arrays
''')
interpreters.destroy(one)
assert emulator.live().allocations == before, emulator.live()
for group in groups:
    with group.use():
        pass
assert contents(groups) == [*range(8)] and working.stats().failures == 0
working.close()
"""
    )


@pytest.mark.parametrize("kind", ["WorkingSet", "ManagedWorkingSet"])
class TestThreads:
    def test_they_use_one_set(self, kind):
        """Even one group, nested and on streams of their own; a thread adds groups meanwhile."""
        run(f"""
working = {kind}(3 * SIZE, Device(0))
groups = [working.add(b, "write") for b in buffers[:4]]

def use(number):
    with Stream() as stream:
        for i in range(150):
            first, second = groups[(i + number) % len(groups)], groups[i % 2]
            with first.use(stream=stream) as one, second.use(stream=stream):
                if i % 3 == 0:
                    one.arrays
        stream.sync()

def add():
    for buffer in buffers[4:]:
        groups.append(working.add(buffer))

race(add, *(lambda n=n: use(n) for n in range(4)))
stats = working.stats()
assert stats.acquired == 4 * 150 * 2 and stats.failures == 0, stats
assert working.nbytes <= 3 * SIZE and [*working] == groups
assert contents(groups) == [*range(8)]
working.close()
""")

    def test_close_beside_an_add(self, kind):
        """Whichever comes first, nothing is left of a set that is gone."""
        run(f"""
import contextlib, weakref
ends = []
for delay in range(60):
    whole = managedmem.empty(64 * SIZE)
    end, added = weakref.ref(whole), []
    working, about_to_add = {kind}(64 * SIZE, Device(0)), threading.Event()

    def add(targets):
        about_to_add.set()
        with contextlib.suppress(RuntimeError):
            added.append(working.add(targets))

    targets = [whole[i * SIZE:(i + 1) * SIZE] for i in range(64)]
    adder = threading.Thread(target=add, args=(targets,))
    del targets, whole
    adder.start()
    about_to_add.wait()
    time.sleep(delay * 5e-6)
    working.close()
    adder.join()
    del adder, working
    added.clear()
    gc.collect()
    ends.append(end() is None)
assert ends == [True] * 60
""")

    def test_remove_beside_uses_and_adds(self, kind):
        """Each thread adds a group, uses it beside shared ones, and takes it out."""
        run(f"""
working = {kind}(3 * SIZE, Device(0))
shared = [working.add(b, "write") for b in buffers[:4]]
removed = []

def come_and_go(buffer):
    with Stream() as stream:
        for i in range(60):
            group = working.add(buffer, ["read", "write"][i % 2])
            with group.use(stream=stream), shared[i % 4].use(stream=stream):
                pass
            if i % 10 == 0:
                working.order = [group, *shared]
            working.remove(group)
        stream.sync()

def remove(group):
    try:
        working.remove(group)
        removed.append(group)
    except ValueError as error:
        assert "removed" in str(error)

race_over(come_and_go, buffers[4:])
assert [*working] == shared and working.stats().failures == 0
race_over(remove, shared * 2)
assert len(removed) == 4 and len(working) == 0 and working.nbytes == 0
assert contents(shared) == [*range(4)]
working.close()
""")

    def test_close_beside_removals(self, kind):
        run(f"""
for delay in range(30):
    working, groups = at_work({kind})
    def remove_all():
        try:
            for group in groups:
                working.remove(group)
        except RuntimeError as error:
            assert str(error) == "{kind} is closed", error
    def close():
        time.sleep(delay * 2e-5)
        working.close()
    race(remove_all, close)
assert contents(groups) == [*range(8)]
""")

    def test_close_beside_uses(self, kind):
        run(f"""
for _ in range(10):
    working, groups = at_work({kind})
    def use():
        try:
            while True:
                for group in groups:
                    with group.use():
                        pass
        except RuntimeError as error:
            return str(error)
    def close():
        time.sleep(0.002)
        working.close()
    assert race(close, use, use, use) == [None, *["{kind} is closed"] * 3]
assert contents(groups) == [*range(8)]
""")

    def test_one_use_that_many_close(self, kind):
        run(f"""
working, groups = at_work({kind})
for round in range(100):
    use = groups[round % 8].use()
    late = use.arrays if round % 2 else None
    race(*[use.close] * 3)
    del late
del use
gc.collect()
for group in groups:
    working.remove(group)
assert contents(groups) == [*range(8)] and working.stats().failures == 0
""")

    def test_the_host_beside_the_device(self, kind):
        """Neither finds what the other one has written in part."""
        run(f"""
working = {kind}(2 * SIZE, Device(0))
groups = [working.add(b, "write") for b in buffers[:4]]

def on_host():
    for i in range(200):
        try:
            with groups[i % 4].use_on_host(access="write") as arrays:
                array = arrays[0] if isinstance(arrays, tuple) else arrays
                with memoryview(array) as view:
                    view[:] = bytes([i % 251]) * SIZE
        except RuntimeError as error:
            assert "the device uses" in str(error), error

def on_device():
    result = managedmem.empty(SIZE)
    with Stream() as stream:
        for i in range(200):
            try:
                with groups[i % 4].use(stream=stream, access="read") as use:
                    array = use.arrays[0] if isinstance(use.arrays, tuple) else use.arrays
                    result.copy_from(array, stream=stream)
                    stream.sync()
            except RuntimeError as error:
                assert "the host uses" in str(error), error
                continue
            finally:
                use = array = None
            assert len(set(bytes(result))) == 1, set(bytes(result))

race(on_host, on_device, on_device)
contents(groups)
assert working.stats().failures == 0
""")


def test_objects_that_are_found_while_they_are_made():
    """gc.get_objects() shows them to other threads at any time."""
    run("""
gc.disable()
gc.freeze()
end = time.monotonic() + 1
def make():
    while time.monotonic() < end:
        with WorkingSet(1 << 18) as working:
            use = working.add(buffers[:2]).use()
            use.arrays
            use.close()
def look():
    while time.monotonic() < end:
        for found in gc.get_objects():
            if type(found) in (WorkingSet, managedmem.typing.WorkingUse, WorkingGroup):
                try:
                    repr(found)
                except AttributeError:  # before __init__(), as of all classes in Python
                    pass
race(make, look)
""")
