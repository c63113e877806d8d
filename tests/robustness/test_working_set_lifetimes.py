"""Working sets that end with their object, their interpreter or their process, and forked children.

Each case is a program of its own, because most of them end one with a set at work.
"""

import sys

import pytest

from programs import run_python
from subinterpreters import PRELUDE as SUBINTERPRETERS

pytestmark = pytest.mark.emulator_only("ends processes, and counts objects of the driver")

PRELUDE = """
import atexit, gc, os, sys, threading, time, warnings
from array import array
import managedmem
from forks import fork_beside_sleepers
from managedmem import Device, ManagedWorkingSet, Stream, WorkingSet, emulator
from managedmem.typing import WorkingGroup
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


def run(code, **more):
    done = run_python(PRELUDE + code, **more)
    assert done.stderr == ""
    return done.stdout


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
    run(f"""
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
""")


@pytest.mark.parametrize("kind", ["WorkingSet", "ManagedWorkingSet"])
def test_a_set_and_its_groups_are_garbage_together(kind):
    assert (
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
print("fine")
""")
        == "fine\n"
    )


def test_collections_inside_of_calls():
    """They end uses of other groups and sets, and drop their arrays, whatever is under way."""
    assert (
        run("""
gc.set_threshold(3, 3, 3)
first, groups = at_work()
second, others = at_work()
def litter(group):
    use = group.use()
    cycle = [use, use.arrays]
    cycle.append(cycle)
failed = []
def work(groups, others):
    try:
        for round in range(60):
            for group, other in zip(groups, others[::-1]):
                litter(group)
                with other.use() as use:
                    use.arrays
                with group.use_on_host() as home:
                    home
    except BaseException as error:
        failed.append(error)
gc.collect()
workers = [
    threading.Thread(target=work, args=pair)
    for pair in ((groups[::2], others[::2]), (others[::2], groups[::2]))
]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
gc.collect()
assert not failed, failed
for working, members in ((first, groups), (second, others)):
    assert working.stats().failures == 0
    for group in members:
        working.remove(group)
print(contents(groups), contents(others))
""")
        == f"{[*range(8)]} {[*range(8)]}\n"
    )


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
print(contents(groups), working.stats().failures)
working.close()
"""
    FINE = "[0, 1, 2, 3, 4, 5, 6, 7] 0\n"

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
        assert run(self.CHILD.format(child=child, kind=kind)) == self.FINE

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
        child = f"""
    try:
        {call}
    except RuntimeError as error:
        assert "forked" in str(error), error
    else:
        os._exit(1)
"""
        assert run(self.CHILD.format(child=child, kind=kind)) == self.FINE

    def test_a_fork_inside_of_a_call_of_another_thread(self):
        """Which has a lock that nobody releases in the child."""
        assert (
            run("""
from managedmem import _working_group
working, groups = at_work()
held, done = threading.Event(), threading.Event()
def hold():
    with _working_group.WorkingGroup._lock:
        held.set()
        done.wait()
holder = threading.Thread(target=hold)
holder.start()
held.wait()
pid = fork_beside_sleepers()
if pid == 0:
    try:
        groups[0].use()
    except RuntimeError as error:
        os._exit("forked" not in str(error))
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
done.set()
holder.join()
print("fine")
""")
            == "fine\n"
        )


OWN_GIL = pytest.param(
    "isolated",
    marks=pytest.mark.skipif(
        sys.version_info < (3, 12), reason="own-GIL interpreters came with 3.12"
    ),
)


@pytest.mark.parametrize("type_", ["WorkingSet", "ManagedWorkingSet"])
@pytest.mark.parametrize("kind", [OWN_GIL, "legacy"])
def test_the_end_of_a_subinterpreter_ends_its_sets(kind, type_):
    assert (
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
print(contents(groups), working.stats().failures)
working.close()
"""
        )
        == "[0, 1, 2, 3, 4, 5, 6, 7] 0\n"
    )


@pytest.mark.parametrize("kind", ["WorkingSet", "ManagedWorkingSet"])
class TestThreads:
    def test_they_use_one_set(self, kind):
        """Also one group, nested and on streams of their own; a thread adds groups meanwhile."""
        assert (
            run(f"""
working = {kind}(3 * SIZE, Device(0))
groups = [working.add(b, "write") for b in buffers[:4]]
failed = []

def use(number):
    try:
        with Stream() as stream:
            for i in range(150):
                first, second = groups[(i + number) % len(groups)], groups[i % 2]
                with first.use(stream=stream) as one, second.use(stream=stream):
                    if i % 3 == 0:
                        one.arrays
            stream.sync()
    except BaseException as error:
        failed.append(error)

workers = [threading.Thread(target=use, args=(n,)) for n in range(4)]
for worker in workers:
    worker.start()
for buffer in buffers[4:]:
    groups.append(working.add(buffer))
for worker in workers:
    worker.join()
stats = working.stats()
assert not failed and stats.acquired == 4 * 150 * 2 and stats.failures == 0, (failed, stats)
assert working.nbytes <= 3 * SIZE and [*working] == groups
print(contents(groups))
working.close()
""")
            == "[0, 1, 2, 3, 4, 5, 6, 7]\n"
        )

    def test_close_beside_an_add(self, kind):
        """Whichever comes first, nothing is left of a set that is gone."""
        assert (
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
print(all(ends), len(ends))
""")
            == "True 60\n"
        )

    def test_remove_beside_uses_and_adds(self, kind):
        """Each thread adds a group, uses it beside shared ones, and takes it out."""
        assert (
            run(f"""
working = {kind}(3 * SIZE, Device(0))
shared = [working.add(b, "write") for b in buffers[:4]]
failed = []

def come_and_go(buffer):
    try:
        with Stream() as stream:
            for i in range(60):
                group = working.add(buffer, ["read", "write"][i % 2])
                with group.use(stream=stream), shared[i % 4].use(stream=stream):
                    pass
                if i % 10 == 0:
                    working.order = [group, *shared]
                working.remove(group)
            stream.sync()
    except BaseException as error:
        failed.append(error)

def remove(group):
    try:
        working.remove(group)
        removed.append(group)
    except ValueError as error:
        assert "removed" in str(error)

workers = [threading.Thread(target=come_and_go, args=(b,)) for b in buffers[4:]]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
failed = [e for e in failed if "was removed" not in str(e)]
assert not failed and [*working] == shared and working.stats().failures == 0, failed
removed = []
workers = [threading.Thread(target=remove, args=(group,)) for group in shared * 2]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
assert len(removed) == 4 and len(working) == 0 and working.nbytes == 0
print(contents(shared))
working.close()
""")
            == "[0, 1, 2, 3]\n"
        )

    def test_close_beside_removals(self, kind):
        assert (
            run(f"""
for delay in range(30):
    working, groups = at_work({kind})
    failed = []
    def remove_all(groups):
        try:
            for group in groups:
                working.remove(group)
        except RuntimeError as error:
            failed.append(str(error))
    remover = threading.Thread(target=remove_all, args=(groups,))
    remover.start()
    time.sleep(delay * 2e-5)
    working.close()
    remover.join()
    assert failed in ([], ["{kind} is closed"]), failed
print(contents(groups))
""")
            == "[0, 1, 2, 3, 4, 5, 6, 7]\n"
        )

    def test_close_beside_uses(self, kind):
        assert (
            run(f"""
for _ in range(10):
    working, groups = at_work({kind})
    failed = []
    def use():
        try:
            while True:
                for group in groups:
                    with group.use():
                        pass
        except RuntimeError as error:
            failed.append(str(error))
    workers = [threading.Thread(target=use) for _ in range(3)]
    for worker in workers:
        worker.start()
    time.sleep(0.002)
    working.close()
    for worker in workers:
        worker.join()
    assert failed == ["{kind} is closed"] * 3
print(contents(groups))
""")
            == "[0, 1, 2, 3, 4, 5, 6, 7]\n"
        )

    def test_one_use_that_many_close(self, kind):
        assert (
            run(f"""
working, groups = at_work({kind})
for round in range(100):
    use = groups[round % 8].use()
    late = use.arrays if round % 2 else None
    start = threading.Barrier(3)
    def close():
        start.wait()
        use.close()
    workers = [threading.Thread(target=close) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    del late
del use, close, worker, workers
gc.collect()
for group in groups:
    working.remove(group)
print(contents(groups), working.stats().failures)
""")
            == "[0, 1, 2, 3, 4, 5, 6, 7] 0\n"
        )

    def test_the_host_beside_the_device(self, kind):
        """Neither finds what the other one has written in part."""
        assert (
            run(f"""
working = {kind}(2 * SIZE, Device(0))
groups = [working.add(b, "write") for b in buffers[:4]]
failed, ended = [], False

def on_host():
    try:
        for i in range(200):
            try:
                with groups[i % 4].use_on_host(access="write") as arrays:
                    array = arrays[0] if isinstance(arrays, tuple) else arrays
                    with memoryview(array) as view:
                        view[:] = bytes([i % 251]) * SIZE
            except RuntimeError as error:
                assert "the device uses" in str(error), error
    except BaseException as error:
        failed.append(error)

def on_device():
    result = managedmem.empty(SIZE)
    try:
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
    except BaseException as error:
        failed.append(error)

workers = [threading.Thread(target=work) for work in (on_host, on_device, on_device)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
assert not failed, failed
contents(groups)
print(working.stats().failures)
""")
            == "0\n"
        )


def test_objects_that_are_found_while_they_are_made():
    """gc.get_objects() shows them to other threads at any time."""
    assert (
        run("""
gc.disable()
gc.freeze()
ended = False
def make():
    while not ended:
        with WorkingSet(1 << 18) as working:
            use = working.add(buffers[:2]).use()
            use.arrays
            use.close()
maker = threading.Thread(target=make)
maker.start()
end = time.monotonic() + 1
while time.monotonic() < end:
    for found in gc.get_objects():
        if type(found) in (WorkingSet, managedmem.typing.WorkingUse, WorkingGroup):
            try:
                repr(found)
            except AttributeError:  # before __init__(), as of all classes in Python
                pass
ended = True
maker.join()
print("complete")
""")
        == "complete\n"
    )
