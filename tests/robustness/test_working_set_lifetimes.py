"""Working sets that end with their object, their interpreter or their process, and forked children.

Each case is a program of its own, because most of them end one with a set at work.
"""

import sys

import pytest

from programs import run_python
from subinterpreters import PRELUDE as SUBINTERPRETERS

pytestmark = pytest.mark.emulator_only

PRELUDE = """
import atexit, gc, os, sys, threading, time, warnings
import managedmem
from forks import fork_beside_sleepers
from managedmem import Device, Host, Stream, WorkingGroup, WorkingSet, emulator
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
SIZE = 1 << 16

def threads(expected):
    "True if the process has so many threads; one that has ended is listed for a moment longer."
    for _ in range(1000):
        if len(os.listdir("/proc/self/task")) == expected:
            return True
        time.sleep(0.001)
    return False

buffers = [managedmem.empty(SIZE) for _ in range(8)]
for number, buffer in enumerate(buffers):
    buffer.fill(number)
Device(0).sync()

def at_work():
    "A set with uses behind it, and loads under way."
    working = WorkingSet(3 * SIZE, Device(0))
    groups = [working.add(b, ["read", "write"][i % 2]) for i, b in enumerate(buffers)]
    for group in groups * 3:
        with group.use():
            pass
    return working, groups
"""


def run(code, **more):
    done = run_python(PRELUDE + code, **more)
    assert done.stderr == ""
    return done.stdout


def test_the_thread_ends_with_the_set():
    assert (
        run("""
working, groups = at_work()
assert threads(2)
working.close()
assert threads(1)
working, groups = at_work()
del working, groups
gc.collect()
assert threads(1)
print("fine")
""")
        == "fine\n"
    )


@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit(0)",
        "atexit.register(working.close)",
        "groups[0].acquire()",
        "threading.Thread(target=use_on, daemon=True).start(); time.sleep(0.02)",
        "threading.Thread(target=make_others, daemon=True).start(); time.sleep(0.02)",
        "keep = [working]; keep.append(keep)",
        "sys.working = groups",
        "os._exit(0)",
        "del working; gc.collect()",
        "groups[0].acquire(stream=Stream())",
    ],
)
def test_the_process_ends_with_a_set_at_work(end):
    run(f"""
def use_on():
    try:
        while True:
            for group in groups:
                with group.use():
                    pass
    except RuntimeError as error: # the end of the interpreter was faster
        assert "closed" in str(error)

def make_others():
    others = []
    while True:
        try:
            others.append(WorkingSet(SIZE))
            others[-1].add(managedmem.empty(SIZE)).acquire()
        except RuntimeError as error:
            assert "closed" in str(error) or "interpreter ends" in str(error)

working, groups = at_work()
{end}
""")


def test_no_set_starts_after_the_end_of_the_interpreter():
    done = run_python("""
import atexit, os
def last():
    try:
        managedmem.WorkingSet(4096)
    except RuntimeError as error:
        print(error)
    working.close()
    print(working.is_closed)
atexit.register(last)
import managedmem
working = managedmem.WorkingSet(4096)
""")
    assert done.stdout == "a working set cannot start while the interpreter ends\nTrue\n"
    assert done.stderr == ""


class TestForks:
    CHILD = """
working, groups = at_work()
sys.stdout.flush()
pid = fork_beside_sleepers()
if pid == 0:
    {child}
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
for group in groups:
    with group.use():
        pass
working.close()
print(working.stats().failures)
"""

    @pytest.mark.parametrize(
        "child",
        [
            "pass",
            "working.close(); working.close()",
            "assert working.is_closed and 'parent' in repr(working); repr(groups[0])",
            "del working, groups; gc.collect()",
            "sys.exit(0)",
            "assert groups[0].nbytes == SIZE and groups[0].set is working",
        ],
    )
    def test_the_parent_goes_on(self, child):
        assert run(self.CHILD.format(child=child)) == "0\n"

    @pytest.mark.parametrize(
        "use",
        [
            "groups[0].acquire()",
            "groups[0].release()",
            "groups[0].is_resident",
            "groups[0].use().__enter__()",
            "working.add(buffers[0])",
            "working.remove(groups[0])",
            "working.stats()",
            "working.nbytes",
            "working.order = groups",
            "len(working)",
            "WorkingSet(SIZE)",
        ],
    )
    def test_the_child_is_refused(self, use):
        child = f"""
    try:
        {use}
    except RuntimeError as error:
        assert "forked" in str(error), error
    else:
        os._exit(1)
"""
        assert run(self.CHILD.format(child=child)) == "0\n"


OWN_GIL = pytest.param(
    "isolated",
    marks=pytest.mark.skipif(
        sys.version_info < (3, 12), reason="own-GIL interpreters came with 3.12"
    ),
)


@pytest.mark.parametrize("kind", [OWN_GIL, "legacy"])
def test_the_end_of_a_subinterpreter_ends_its_sets(kind):
    assert (
        run(
            SUBINTERPRETERS
            + f"""
working, groups = at_work()
one = create({kind!r})
run(one, '''
import managedmem
buffer = managedmem.empty(1 << 16)
working = managedmem.WorkingSet(1 << 16)
group = working.add(buffer)
group.acquire()
''')
assert threads(3)
interpreters.destroy(one)
assert threads(2)
for group in groups:
    with group.use():
        pass
working.close()
print(working.stats().failures)
"""
        )
        == "0\n"
    )


class TestThreads:
    def test_they_use_one_set(self):
        """Also one group, nested and on streams of their own; a thread adds groups meanwhile."""
        assert (
            run("""
working = WorkingSet(3 * SIZE, Device(0))
groups = [working.add(b, "write") for b in buffers[:4]]
failed = []

def use(number):
    try:
        with Stream() as stream:
            for i in range(150):
                first, second = groups[(i + number) % len(groups)], groups[i % 2]
                with first.use(stream=stream), second.use(stream=stream):
                    pass
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
working.close()
print([memoryview(b)[0] for b in buffers])
""")
            == "[0, 1, 2, 3, 4, 5, 6, 7]\n"
        )

    def test_close_beside_an_add(self):
        """Whichever comes first, the closed set keeps no target."""
        assert (
            run("""
import contextlib, weakref
ends = []
for delay in range(60):
    whole = managedmem.empty(64 * SIZE)
    end, added = weakref.ref(whole), []
    working, about_to_add = WorkingSet(SIZE, Device(0)), threading.Event()

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
    del adder
    ends.append((len(added), end() is None))
print([end for end in ends if not end[1]])
""")
            == "[]\n"
        )

    def test_remove_beside_uses_and_adds(self):
        """Each thread adds a group, uses it beside shared ones, and takes it out."""
        assert (
            run("""
working = WorkingSet(3 * SIZE, Device(0))
shared = [working.add(b, "write") for b in buffers[:4]]
failed = []

def come_and_go(buffer):
    try:
        with Stream() as stream:
            for i in range(60):
                group = working.add(buffer, ["read", "write"][i % 2])
                with group.use(stream=stream), shared[i % 4].use(stream=stream):
                    pass
                working.remove(group)
            stream.sync()
    except BaseException as error:
        failed.append(error)

def remove(group):
    try:
        working.remove(group)
        removed.append(group)
    except RuntimeError as error:
        assert "removed" in str(error)

workers = [threading.Thread(target=come_and_go, args=(b,)) for b in buffers[4:]]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
assert not failed and [*working] == shared and working.stats().failures == 0, failed
removed = []
workers = [threading.Thread(target=remove, args=(group,)) for group in shared * 2]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
assert len(removed) == 4 and len(working) == 0 and working.nbytes == 0
working.close()
print([memoryview(b)[0] for b in buffers])
""")
            == "[0, 1, 2, 3, 4, 5, 6, 7]\n"
        )

    def test_close_beside_removals(self):
        assert (
            run("""
for delay in range(30):
    working, groups = at_work()
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
    assert failed in ([], ["WorkingSet is closed"]), failed
    assert all(b.preferred_location is None and not b.read_mostly for b in buffers)
print([memoryview(b)[SIZE - 1] for b in buffers])
""")
            == "[0, 1, 2, 3, 4, 5, 6, 7]\n"
        )

    def test_close_beside_uses(self):
        assert (
            run("""
for _ in range(10):
    working, groups = at_work()
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
    assert failed == ["WorkingSet is closed"] * 3
print([memoryview(b)[SIZE - 1] for b in buffers])
""")
            == "[0, 1, 2, 3, 4, 5, 6, 7]\n"
        )

    def test_objects_that_are_found_while_they_are_made(self):
        """They are made without the GIL; gc.get_objects() shows them once they are complete."""
        assert (
            run("""
import gc
gc.disable()
gc.freeze()
pages = [b[i : i + 4096] for b in buffers for i in range(0, SIZE, 8192)]
ended = False
def make():
    while not ended:
        with WorkingSet(1 << 20) as working:
            working.add(pages)
maker = threading.Thread(target=make)
maker.start()
end = time.monotonic() + 2
while time.monotonic() < end:
    for found in gc.get_objects():
        if type(found) is WorkingSet:
            repr(found)
        elif type(found) is WorkingGroup:
            assert found.is_resident in (True, False)
ended = True
maker.join()
print("complete")
""")
            == "complete\n"
        )
