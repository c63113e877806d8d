"""Frames that end with their object, their interpreter or their process, and forked children.

Each case is a program of its own, because most of them end one with frames in use.
"""

import pytest

from programs import run_python

pytestmark = pytest.mark.emulator_only

PRELUDE = """
import atexit, gc, os, sys, threading, warnings
from managedmem import Stream, emulator
from program_checks import in_child, refused
from managedmem._managedmem import _Frames, _Slab
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
SIZE = 1 << 16
home = _Slab(0, 4 * SIZE, True)
home.lock()
frames = _Frames(0, 2 * SIZE, False)
for part in range(4):
    frames.add(home.handle + part * SIZE, SIZE, "write")
stream = Stream()

def use(part):
    held = []
    frames.acquire([part], True, stream.handle, held)
    frames.release(held, True, stream.handle, False)

frames.begin_round(stream.handle)
for part in (0, 1, 2, 3) * 3:
    use(part)
"""


def run(code):
    done = run_python(PRELUDE + code)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    "end",
    [
        "",
        "frames.acquire([0], True, stream.handle, [])",
        "sys.exit(0)",
        "atexit.register(frames.close)",
        "keep = [frames, home]; keep.append(keep); del frames, home",
        "sys.frames = frames, home",
        "frames.acquire([0], True, stream.handle, []); frames.close()",
        "threading.Thread(target=lambda: [use(0) for _ in range(10**6)], daemon=True).start()",
    ],
)
def test_the_interpreter_ends(end):
    run(end)


def test_all_goes_with_the_objects():
    run("""
stream.sync()
frames.acquire([0], True, stream.handle, [])
before = emulator.live().allocations
del frames, home
gc.collect()
stream.close()
live = emulator.live()
assert (before, live.allocations, live.streams, live.events) == (1, 0, 0, 0), (before, live)
""")


def test_calls_after_the_end():
    run("""
frames.close()
frames.close()
assert frames.acquire([0], True, stream.handle, []) == (0,)
frames.changed(0, stream.handle)
frames.end_round()
frames.end_round()
frames.begin_round(stream.handle)
frames.end_round()
frames.remove([3])
frames.give_order((0,))
frames.wait()
assert not frames.has(0)
numbers, _ = frames.stats()
assert numbers["room"] == numbers["present"] == 0 and numbers["parts"] == 4
""")


@pytest.mark.parametrize(
    "call",
    [
        "frames.acquire([0], True, 0, [])",
        "frames.release([0], True, 0, False)",
        "frames.changed(0, 0)",
        "frames.begin_round(0)",
        "frames.end_round()",
        "frames.settle(0)",
        "frames.stats()",
        "frames.add(home.handle, SIZE, 'read')",
        "frames.remove([0])",
        "frames.has(0)",
        "frames.give_order((0,))",
        "frames.wait()",
        "frames.add_targets(home, 'read', [])",
        "home.fill(0, 1, b'a')",
        "home.lock()",
        "_Slab(0, SIZE, True)",
        "_Slab.of_file(0, 0)",
        "home.add_reader(0)",
        "_Frames(0, SIZE, True)",
    ],
)
def test_a_forked_child_is_refused(call):
    run(f"""
def work():
    global frames, home
    with refused(RuntimeError, "fork"):
        {call}
    frames.close()
    del frames, home
    gc.collect()
assert in_child(work) == 0
use(0)
frames.settle(stream.handle)
stream.sync()
""")


def test_freeing_a_home_waits_for_its_readers():
    run("""
waits = []
for reader in (None, 1):
    shared = _Slab(0, SIZE, True)
    shared.lock()
    if reader is not None:
        shared.add_reader(reader)
    with emulator.recording() as calls:
        del shared
    waits.append([call.name for call in calls].count("cuCtxSynchronize"))
assert waits == [1, 2], waits
""")
