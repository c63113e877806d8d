"""The GIL is given up in every operation that advises, moves, allocates, frees or waits.

The emulated driver asks CPython in each of its calls whether the calling thread holds the GIL.
Every operation of OPERATIONS runs once, and so does everything that ends an object; the
calls that they make with the GIL held must be queries.
"""

import functools
import json

import pytest

from constants import FREE_THREADED
from operations import OPERATIONS
from programs import run_python

pytestmark = [
    pytest.mark.emulator_only,
    pytest.mark.skipif(FREE_THREADED, reason="there is no GIL"),
]

# Queries, which take no longer than giving the GIL up and taking it again, and the calls that make
# a context current for them.
QUERIES = {
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuDeviceCanAccessPeer",
    "cuDeviceGetAttribute",
    "cuDeviceGetName",
    "cuDeviceGetUuid",
    "cuDeviceTotalMem",
    "cuMemPoolGetAccess",
    "cuMemPoolGetAttribute",
    "cuMemRangeGetAttribute",
    "cuMemRangeGetAttributes",
    "cuPointerGetAttributes",
    "cuThreadExchangeStreamCaptureMode",
}
# The operations that only make queries, and keep the GIL. Each other one gives it up at least once.
ONLY_QUERIES = {
    *("get read_mostly", "get preferred_location", "get last_prefetch_location", "get of a view"),
    *("is_managed", "is_host_accessible", "is_device_accessible", "device_id", "memoryview"),
    "is_managed of an array",
    *("len of the set", "iteration", "in", "==", "!=", "<", "<=", ">", ">=", "|", "&", "-", "^"),
    *("reversed |", "reversed &", "reversed -", "reversed ^", "| of two sets", "union"),
    *("intersection", "difference", "symmetric_difference", "issubset", "issuperset"),
    *("isdisjoint", "copy of the set", "plan.add", "a plan of pairs"),
    *("PrefetchPlan.from_module", "PrefetchPlan.from_policy", "get reserved_mem_current"),
    *("get reserved_mem_high", "get used_mem_current", "get used_mem_high", "len of the peers"),
    *("in the peers", "iteration of the peers", "peers.union", "peers.intersection"),
    *("peers.difference", "peers.symmetric_difference", "peers.issubset", "peers.issuperset"),
    *("peers.isdisjoint", "peers.copy", "peers.add", "peers.update"),  # these let in who is in
}

PRELUDE = """
import ctypes, gc, json
import managedmem
from managedmem import *
from dlpack import consume
from driver import raw_driver

def probe():
    "From now on each line of the log says whether the GIL was held."
    check = ctypes.cast(ctypes.pythonapi.PyGILState_Check, ctypes.c_void_p)
    driver = ctypes.CDLL(managedmem._managedmem.__file__.rpartition("/")[0]
        + "/libmanagedmem_emulator.so")
    driver.emu_log_verbose(1)
    driver.emu_log_probe(check)
    return driver

def watched(act):
    "(function, whether the GIL was held) of every driver call."
    driver.emu_log_clear()
    act()
    text = ctypes.create_string_buffer(4096)
    made = []
    while driver.emu_log_entry(len(made), text, len(text)) >= 0:
        line = text.value.decode()
        made.append((line.partition("(")[0].partition("_v")[0], line.endswith(" probed")))
    return made

driver = probe()
"""
OF_THE_TABLE = """
from operations import OPERATIONS
from world import World
found = {}
for name, operation in OPERATIONS.items():
    world = World()
    operation.prepare(world)
    found[name] = watched(lambda: operation.act(world))
    world.end()
print(json.dumps(found))
"""
# Statements that end an object or open the driver: (the code before, the statement).
OTHERS = {
    "open the driver": ("", "Device.count()"),
    "register an allocator": (
        "",
        "managedmem._managedmem._register_preset(Host(), [Device(0)], True, False)",
    ),
    "make an array of NumPy": (
        "import numpy\nmake = lambda: numpy.zeros(4096)\n"
        "block = managedmem.numpy_allocator(minimum=0); block.__enter__()",
        "global array; array = make()",
    ),
    "drop an array of NumPy": (
        "import numpy\nwith managedmem.numpy_allocator(minimum=0): array = numpy.zeros(4096)",
        "del array",
    ),
    "take out a location that only a part has": (
        "a = empty(3 * 4096); a[4096:8192].accessed_by.add(Device(0))",
        "a.accessed_by.discard(Device(0))",
    ),
    "close": ("a = empty(4096)", "a.close()"),
    "close on a stream": ("a, s = empty(4096), Stream()", "a.close(stream=s)"),
    "close a buffer of a pool": (
        "a = ManagedMemoryResource(pooled=True).allocate(4096)",
        "a.close()",
    ),
    "drop a buffer": ("a = empty(4096)", "del a"),
    "drop a closed view and its buffer": ("a = empty(4096); v = a[:]; v.close()", "del v, a"),
    "close the last view": ("v = empty(4096)[:]", "v.close()"),
    "drop a buffer of a pool": ("a = DeviceMemoryResource(0).allocate(4096)", "del a"),
    "collect a cycle": (
        "class Part(ManagedBuffer): pass\n"
        "a = ManagedMemoryResource().allocate(4096)\n"
        "v = Part.from_handle(a.handle, 4096, owner=a); v.self = v; del a",
        "del v; gc.collect()",
    ),
    "drop a memoryview": ("m = memoryview(empty(4096))", "del m"),
    "drop a capsule": ("c = empty(4096).__dlpack__()", "del c"),
    "delete a tensor": (
        "t = consume(empty(4096).__dlpack__())\n"
        "address = ctypes.cast(t.deleter, ctypes.c_void_p).value\n"
        "delete = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(address)",
        "delete(ctypes.addressof(t))",
    ),
    "deallocate": (
        "r = ManagedMemoryResource(); a = r.allocate(4096)\n"
        "raw = ctypes.c_uint64()\n"
        "assert raw_driver().cuMemAllocManaged(ctypes.byref(raw), ctypes.c_size_t(4096), 1) == 0",
        "r.deallocate(raw.value, 4096, stream=0)",
    ),
    "close a stream": ("s = Stream()", "s.close()"),
    "drop a stream": ("s = Stream()", "del s"),
    "close a resource": ("r = ManagedMemoryResource(pooled=True)", "r.close()"),
    "drop a resource": ("r = ManagedMemoryResource(pooled=True)", "del r"),
    "drop the attributes of a pool": (
        "r = DeviceMemoryResource(0); attributes = r.attributes; del r",
        "del attributes",
    ),
}


@functools.cache
def of_the_table():
    return json.loads(run_python(PRELUDE + OF_THE_TABLE, emulator="devices=2").stdout)


def calls_of(before, statement, emulator):
    """What watched() finds in a statement, in a process of its own."""
    program = f"print(json.dumps(watched(lambda: exec({statement!r}, globals()))))"
    return json.loads(run_python(f"{PRELUDE}\n{before}\n{program}", emulator=emulator).stdout)


def held(calls):
    return {function for function, with_gil in calls if with_gil}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name):
    calls = of_the_table()[name]
    assert held(calls) <= QUERIES
    assert name in ONLY_QUERIES or any(not with_gil for _, with_gil in calls)


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_of_the_driver(name):
    before, statement = OTHERS[name]
    if name != "open the driver":
        before = f"Device.count(); Device(0).set_current()\n{before}"
    calls = calls_of(before, statement, "devices=2")
    assert held(calls) <= QUERIES
    assert any(not with_gil for _, with_gil in calls), "no call that could block was made"


# What can query each page of a slice.
SEARCHES = (
    *("read_mostly", "preferred_location", "last_prefetch_location", "accessed_by.copy()"),
    "accessed_by.discard(Host())",
)


@pytest.mark.parametrize("read", SEARCHES)
def test_queries_of_many_pages_give_up_the_gil(read):
    calls = calls_of("a = empty(8 << 20)[65536:]", f"a.{read}", "devices=2")
    queries = [with_gil for function, with_gil in calls if function.startswith("cuMemRangeGet")]
    assert queries and not any(queries)


# Without concurrent access the host waits for the device: (the code before, the statement).
WAITS_FOR_THE_DEVICE = {
    "memoryview": ("a = empty(4096)", "memoryview(a)"),
    "numpy": ("a = empty(4096)", "a.numpy()"),
    "dlpack": ("a = empty(4096)", "a.__dlpack__(dl_device=(1, 0))"),
}


@pytest.mark.parametrize("name", WAITS_FOR_THE_DEVICE)
def test_waits_of_the_host(name):
    calls = calls_of(*WAITS_FOR_THE_DEVICE[name], "concurrent=0")
    assert held(calls) <= QUERIES
    assert ["cuCtxSynchronize", False] in calls, "nothing was waited for"


def test_the_probe_sees_the_gil():
    """The driver called through ctypes, once with and once without the GIL."""
    done = run_python(
        PRELUDE
        + """
path = managedmem._managedmem._driver_info()["path"]
calls = watched(lambda: [load(path).cuCtxSynchronize() for load in (ctypes.PyDLL, ctypes.CDLL)])
print(calls)
"""
    )
    assert done.stdout == "[('cuCtxSynchronize', True), ('cuCtxSynchronize', False)]\n"


def test_the_end_of_the_interpreter_waits_without_the_gil():
    """A thread of another library releases the last tensor while the interpreter ends. It needs the
    GIL for the owner's finalizer, so the process would hang if the end held it."""
    done = run_python("""
        import atexit, ctypes, threading, time
        from dlpack import consume
        from managedmem import ManagedBuffer, empty
        inside = threading.Event()

        class Owner:
            def __init__(self):
                self.memory = empty(4096)

            def __del__(self):
                inside.set()
                time.sleep(0.3)  # gives the GIL up, and takes it again
                print("released", flush=True)

        owner = Owner()
        tensor = consume(
            ManagedBuffer.from_handle(owner.memory.handle, 4096, owner=owner).__dlpack__()
        )
        del owner
        address = ctypes.cast(tensor.deleter, ctypes.c_void_p).value
        delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
        thread = threading.Thread(target=delete, args=(ctypes.addressof(tensor),), daemon=True)
        thread.start()
        inside.wait()
    """)
    assert done.stdout == "released\n"


def test_a_watch_runs_without_the_gil():
    """It makes system calls, during which no driver can look at the GIL. Threads take turns only
    where one gives the GIL up: the other one sees where."""
    done = run_python("""
        import os, sys, threading, time
        import managedmem
        from managedmem._managedmem import _Watch
        managedmem.Device.count()
        gate, here, seen = threading.Lock(), "", set()

        def look():
            while here != "over":
                gate.acquire()
                seen.add(here)

        def during(name, act):
            global here
            here = name
            if gate.locked():
                gate.release()
            result = act()
            here = ""
            return result

        sys.setswitchinterval(1000)
        thread = threading.Thread(target=look)
        thread.start()
        deadline = time.monotonic() + 20
        while not {"open", "read", "close", "drop"} <= seen and time.monotonic() < deadline:
            watch = during("open", lambda: _Watch(os.getpid()))
            during("read", watch.read)
            during("close", watch.close)
            kept = [_Watch(os.getpid())]
            during("drop", kept.clear)
        here = "over"
        if gate.locked():
            gate.release()
        thread.join()
        print(*sorted(seen - {"", "over"}))
    """)
    assert done.stdout == "close drop open read\n"
