"""Subinterpreters: own GIL and own state from Python 3.12, shared GIL before.

Each case is a script in a process of its own. Inside, every interpreter has its own types and
interned locations, while driver, memory and streams are the process's.
"""

import sys

import pytest

from constants import FREE_THREADED
from interpreter_kinds import KINDS
from programs import run_python
from subinterpreters import PRELUDE
from whole_programs import run_to_the_end

pytestmark = pytest.mark.skipif(
    sys.implementation.name != "cpython", reason="subinterpreters are a CPython feature"
)

USE = """
import gc, pickle
import managedmem
from managedmem import Device, Host, ManagedBuffer, ManagedMemoryResource, PrefetchPlan, Stream
from program_checks import refused
assert Host(1) is Host(numa_id=1) and Device(0) is Device.all()[0]
assert pickle.loads(pickle.dumps(Host(1))) is Host(1)
stream = Stream()
buffer = ManagedMemoryResource().allocate(4 * 4096, name="there")
buffer.read_mostly = True
assert buffer[:8].name == buffer.name == "there"
buffer.name = "there again"
buffer.accessed_by = [Host(), Device(0)]
assert buffer.accessed_by == {Host(), Device(0)}
buffer.prefetch(Host(), stream=stream)
buffer[4096:8192].prefetch(Device(0))
managedmem.advise([buffer], "unset_read_mostly")
plan = PrefetchPlan([(buffer, Device(0)), (memoryview(buffer)[:9], Host())])
plan.execute(stream=stream)
assert [entry.location for entry in plan] == [Device(0), Host()] and plan.explain()
plan.clear()
plan.add(buffer, Host())
memoryview(buffer)[0] = 1
with refused(ValueError, "location"):
    buffer.prefetch(None)
class Sub(ManagedBuffer):
    pass
sub = Sub.from_handle(buffer.handle, buffer.size, name="wrapped there")
sub.me = sub
stream.sync()
"""
CLOSE = "\ndel sub; gc.collect()\nstream.close(); buffer.close()\n"


def run(code):
    run_to_the_end(PRELUDE + code)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("last", [CLOSE, ""], ids=["closed", "left open"])
def test_import_use_and_destroy_twenty_times(kind, last):
    run(f"""
import managedmem
from managedmem import emulator
managedmem.Device.count()
with managedmem.ManagedMemoryResource().allocate(4096) as warm:
    warm.discard()
live = emulator.live()
for _ in range(20):
    interpreter = create({kind!r})
    run(interpreter, {USE + last!r})
    interpreters.destroy(interpreter)
    assert emulator.live() == live, (emulator.live(), live)
""")


@pytest.mark.parametrize("kind", KINDS)
def test_the_main_interpreter_need_not_have_imported_it(kind):
    run(f"""
for _ in range(3):
    interpreter = create({kind!r})
    run(interpreter, {USE + CLOSE!r})
    interpreters.destroy(interpreter)
assert "managedmem" not in sys.modules
exec({USE + CLOSE!r})
""")


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_not_shared(kind):
    """Types differ by identity; a location made here is not the one made there."""
    run(f"""
import os
from managedmem import Host, Device, ManagedBuffer
read, write = os.pipe()
interpreter = create({kind!r})
run(interpreter, f'''
import os
from managedmem import Host, Device, ManagedBuffer
ids = [id(o) for o in (Host, Device, ManagedBuffer, Host(), Device(0))]
os.write({{write}}, repr(ids).encode())
''')
theirs = eval(os.read(read, 4096))
ours = [id(o) for o in (Host, Device, ManagedBuffer, Host(), Device(0))]
assert not set(theirs) & set(ours)
interpreters.destroy(interpreter)
assert Host() is Host() and Device(0) is Device(0)
""")


@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_one_can_be_wrapped_in_another(kind):
    run(f"""
from managedmem import Host, ManagedMemoryResource
buffer = ManagedMemoryResource().allocate(4096)
interpreter = create({kind!r})
run(interpreter, f'''
from managedmem import Host, ManagedBuffer
wrapped = ManagedBuffer.from_handle({{buffer.handle}}, {{buffer.size}})
wrapped.read_mostly = True
wrapped.prefetch(Host())
memoryview(wrapped)[0] = 42
''')
interpreters.destroy(interpreter)
assert buffer.read_mostly is True
assert buffer.last_prefetch_location is Host()
assert memoryview(buffer)[0] == 42
buffer.close()
""")


@pytest.mark.parametrize("kind", KINDS)
def test_in_parallel_threads(kind):
    """With own GILs these really run at once: process-wide state must be ready for it."""
    run(f"""
from races import race
def work():
    for _ in range(5):
        interpreter = create({kind!r})
        run(interpreter, {USE + CLOSE!r})
        interpreters.destroy(interpreter)
race(*[work] * 4)
""")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the check came with 3.12")
def test_an_isolated_interpreter_is_strict():
    """The tests above mean something: here a module without the declaration is turned away."""
    pytest.importorskip("readline")
    done = run_python(
        PRELUDE
        + """
interpreter = create("isolated")
try:
    run(interpreter, "import readline")
except BaseException as error:
    print(error)
interpreters.destroy(interpreter)
"""
    )
    assert "does not support loading in subinterpreters" in done.stdout


OWNED = """
import os, sys
import managedmem
class Owner:
    def __init__(self, memory, written):
        self.memory, self.written, self.home = memory, written, id(sys.modules)
    def __del__(self):
        import sys  # asks the interpreter that runs this
        here = id(sys.modules) == self.home and "__main__" in sys.modules
        os.write(self.written, b"home" if here else b"away")
        if {leave}:
            os.read({leave}, 1)
memory = managedmem.empty(4096)
buffer = managedmem.ManagedBuffer.from_handle(
    memory.handle, memory.size, owner=Owner(memory, {written})
)
capsules = [buffer.__dlpack__() for _ in range({tensors})]
del buffer, memory
os.write({told}, " ".join(str(id(capsule)) for capsule in capsules).encode())
"""
"""An owner that writes the interpreter of its finalizer, behind tensors of several consumers. The
finalizer waits for a byte in the pipe `leave`, if there is one."""

TENSORS = (
    f"OWNED = {OWNED!r}"
    + """
import ctypes, os, time
python, process = ctypes.pythonapi, ctypes.CDLL(None)
python.PyCapsule_GetPointer.restype = ctypes.c_void_p
python.PyCapsule_GetPointer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
python.PyCapsule_SetName.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
process.pthread_create.argtypes = [ctypes.c_void_p] * 4
process.pthread_join.argtypes = [ctypes.c_ulong, ctypes.c_void_p]
USED = b"used_dltensor"

def consume(interpreter, tensors=1, leave=0):
    "(deleter, argument) of tensors that are made in the interpreter, and where the owner writes."
    ends, written = os.pipe()
    told, tell = os.pipe()
    run(interpreter, OWNED.format(written=written, told=tell, tensors=tensors, leave=leave))
    taken = []
    for capsule in map(int, os.read(told, 65536).split()):
        tensor = python.PyCapsule_GetPointer(capsule, b"dltensor")
        assert python.PyCapsule_SetName(capsule, USED) == 0
        deleter = ctypes.c_void_p.from_address(tensor + 48 + 8).value
        taken.append((deleter, tensor))
    run(interpreter, "capsules.clear()")
    return taken, ends

def start_thread(deleter, tensor):
    "A thread that Python does not know, with the deleter as all that it runs."
    thread = ctypes.c_ulong()
    assert process.pthread_create(ctypes.addressof(thread), None, deleter, tensor) == 0
    return thread

def destroy(interpreter):
    "The module looks at the threads of an interpreter before it begins to end it."
    while True:
        try:
            return interpreters.destroy(interpreter)
        except RuntimeError as error:
            assert "more than one thread" in str(error) or "running" in str(error), error
            time.sleep(0.001)  # 3.11: a thread of another interpreter cannot ask for the GIL

def join(thread):
    assert process.pthread_join(thread, None) == 0

DELETE = {
    "a plain thread": lambda *tensor: join(start_thread(*tensor)),
    "another interpreter": lambda deleter, tensor: (
        ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(deleter)(tensor)
    ),
    "without the GIL": lambda deleter, tensor: (
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deleter)(tensor)
    ),
}
"""
)


def run_with_tensors(code):
    run(TENSORS + code)


DELETERS = ["a plain thread", "another interpreter", "without the GIL"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("caller", DELETERS)
def test_an_owner_ends_in_its_own_interpreter(kind, caller):
    run_with_tensors(f"""
import select
interpreter = create({kind!r})
[first, last], ends = consume(interpreter, tensors=2)
DELETE[{caller!r}](*first)
assert select.select([ends], [], [], 0.05)[0] == [], "the second tensor still keeps the owner"
DELETE[{caller!r}](*last)
assert select.select([ends], [], [], 60)[0] == [ends]
assert os.read(ends, 100) == b"home"
destroy(interpreter)
""")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("caller", DELETERS)
def test_a_tensor_outlives_its_interpreter(kind, caller):
    """No interpreter can run the owner's code, so the owner is left alone."""
    run_with_tensors(f"""
interpreter = create({kind!r})
[tensor], ends = consume(interpreter)
interpreters.destroy(interpreter)
DELETE[{caller!r}](*tensor)
""")


@pytest.mark.skipif(
    sys.version_info < (3, 12), reason="3.11 ends an interpreter with any thread state of it"
)
@pytest.mark.parametrize("kind", KINDS)
def test_an_interpreter_ends_while_threads_attach(kind):
    """A thread state at the wrong moment would abort the process: "not the last thread".

    The first thread stays in its finalizer until the interpreter ends, so that the others never
    find an interpreter without thread states: before 3.14 CPython itself crashes if a thread takes
    the first one while another thread deletes it (python/cpython issue 126914).
    """
    done = run_python(
        PRELUDE
        + TENSORS
        + f"""
for _ in range(10):
    interpreter = create({kind!r})
    leave, end = os.pipe()
    [first], ends = consume(interpreter, leave=leave)
    threads = [start_thread(*first)]
    assert os.read(ends, 100) == b"home"
    tensors, ends = consume(interpreter, tensors=40)
    run(interpreter, f"import atexit; atexit.register(os.write, {{end}}, b'.')")
    threads += [start_thread(*tensor) for tensor in tensors]
    destroy(interpreter)
    for thread in threads:
        join(thread)
print("fine")
"""
    )
    assert done.stdout == "fine\n"
    if not FREE_THREADED:  # where a finalizer may run too late to import anything
        assert done.stderr == ""


def test_tensors_of_the_main_interpreter():
    """The last one is released after the interpreter has begun to end."""
    done = run_python(
        PRELUDE
        + TENSORS
        + """
def run(interpreter, script):
    exec(script, globals())
def let_go():
    DELETE["a plain thread"](*late)
    print("fine", flush=True)
import atexit
atexit.register(let_go)  # the first comes last
for caller in DELETE.values():
    [tensor], ends = consume(None)
    caller(*tensor)
    assert os.read(ends, 100) == b"home"
[late], ends = consume(None)
"""
    )
    assert (done.stdout, done.stderr) == ("fine\n", "")


@pytest.mark.emulator_only
@pytest.mark.skipif(
    sys.version_info < (3, 12) or FREE_THREADED,
    reason="immortal objects with a count of 64 bits are those of 3.12 and later with a GIL",
)
def test_no_operation_writes_the_count_of_an_immortal_object():
    """Interpreters that run in parallel share these counts, so that writes would be lost."""
    run_python("""
        import ctypes
        from all_operations import everything
        from managedmem import Device

        def count(thing):
            return ctypes.c_uint64.from_address(id(thing)).value

        immortal = [None, True, False, NotImplemented, ..., (), "", b"", *range(-5, 257)]
        before = [count(thing) for thing in immortal]
        assert all(n & 1 << 31 for n in before)
        for name, operation in everything().items():
            if operation.devices <= Device.count():
                world = operation.make_world()
                operation.run(world)
                world.end()
                assert [count(thing) for thing in immortal] == before, name
    """)
