"""What several test files need: subprocesses, raw driver calls, other libraries' stand-ins."""

import contextlib
import ctypes
import functools
import gc
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import types
from pathlib import Path

from paths import TESTS

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
PAGE = mmap.PAGESIZE
BUDGET = 512 * MIB
EMULATED = os.environ.get("MANAGEDMEM_DRIVER", "cuda") != "cuda"
ADVICES = tuple(
    verb + name
    for name in ("read_mostly", "preferred_location", "accessed_by")
    for verb in ("set_", "unset_")
)
CAPTURE_RELAXED = 2
CAPTURE_GLOBAL = 0


@functools.cache
def warm_up():
    """Make the library create its internal streams now, so that a test's own leaks stand out."""
    import managedmem

    for device in reversed(managedmem.Device.all()):
        device.set_current()
        with contextlib.suppress(managedmem.CUDAError, NotImplementedError):
            with managedmem.ManagedMemoryResource().allocate(4 * PAGE) as buffer:
                buffer.discard()
                managedmem.prefetch(buffer, device, defer=True)
                device.sync()


def settle():
    """Wait for all devices, after which pools without buffers are destroyed."""
    import managedmem

    with contextlib.suppress(managedmem.CUDAError):
        for device in managedmem.Device.all():
            device.sync()


def live_managed_bytes():
    """Bytes under all open ManagedBuffer objects; views of one buffer count once."""
    import managedmem

    ranges = sorted(
        (o.handle, o.handle + o.size)
        for o in gc.get_objects()
        # isinstance would ask __class__, which deprecated names of torch answer with a warning
        if issubclass(type(o), managedmem.ManagedBuffer) and not o.is_closed
    )
    total = end = 0
    for start, stop in ranges:
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def contents(buffer):
    """The bytes of a buffer, after everything queued has run."""
    import managedmem

    managedmem.Device().sync()
    return bytes(buffer)


def write(buffer, data):
    """Write bytes from the host; a single int is repeated over the whole buffer."""
    with memoryview(buffer) as view, view.cast("B") as flat:
        flat[:] = bytes([data]) * len(flat) if isinstance(data, int) else data


def pattern(size, start=1):
    """Bytes that differ from page to page and from their neighbours, never 0."""
    cycle = bytes(range(1, 256)) * (PAGE // 255 + 2)
    pages = (cycle[(page * (PAGE + 1) + start) % 255 :][:PAGE] for page in range(-(-size // PAGE)))
    return b"".join(pages)[:size]


def names(calls):
    return [call.name for call in calls]


def advices(calls):
    return [call for call in calls if call.name == "cuMemAdvise"]


def range_queries(calls):
    return [call for call in calls if call.name.startswith("cuMemRangeGetAttribute")]


# Subprocesses: driver selection happens once a process.

schedule_of_subprocesses = "eager"  # conftest.py sets that of the present test


def build_allocations(folder):
    """The allocators of tests/c/allocations.c, or None where there is no compiler for them."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    source = TESTS / "c" / "allocations.c"
    built = folder / "liballocations.so"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-fPIC"]
    done = subprocess.run(
        [compiler, *flags, "-shared", str(source), "-o", str(built), "-lpthread", "-ldl"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return built


def run_python(code, *, driver="emulator", emulator=None, check=True):
    """Run code in a fresh interpreter with that MANAGEDMEM_DRIVER (None: unset).

    The emulated driver has the schedule of the present test, unless `emulator` names one.
    """
    import managedmem

    env = {k: v for k, v in os.environ.items() if not k.startswith("MANAGEDMEM_")}
    package_parent = str(Path(managedmem.__file__).resolve().parents[1])
    paths = [package_parent, str(TESTS / "support"), env.get("PYTHONPATH")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if driver is not None:
        env["MANAGEDMEM_DRIVER"] = str(driver)
    options = [emulator] if emulator else []
    if driver == "emulator" and "schedule" not in (emulator or ""):
        options.append(f"schedule={schedule_of_subprocesses}")
    if emulator is not None or options:
        env["MANAGEDMEM_EMULATOR"] = ",".join(options)
    done = run_program([sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)], env)
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


def parameters_of(request, test):
    """The names that a test is parametrized with in this run."""
    items = [item for item in request.session.items if item.originalname == test.__name__]
    return [item.callspec.params["name"] for item in items]


def explore(module, names, at_once):
    """The findings of main() of a module of tests/, by operation: a text or None.

    It runs in processes of its own, because an operation may end or stop its process. It prints
    lines of JSON: a list with the name before an operation, and with name and finding after it.
    """
    found = {}
    while names:
        done = run_python(f"import {module}; {module}.main({names[:at_once]!r})", check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert lines, done.stderr
        for name, *wrong in lines:
            found[name] = wrong[0] if wrong else f"the process ended in it:\n{done.stderr}"
        if found[lines[-1][0]] is not None:
            found[lines[-1][0]] += f"\n{done.stderr}"
        names = [name for name in names if name not in found]
    return found


def run_program(command, env, patience=40):
    """Run a Python program to its end; if it hangs, fail with the stacks of all its threads.

    The program must have faulthandler enabled, which writes them when the program is aborted, even
    if a thread waits in C and keeps the GIL.
    """
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, err = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            try:
                out, err = process.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
            raise AssertionError(f"it did not end within {patience} s\n{out}\n{err}") from None
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


# Raw driver calls, for what the library must notice but does not do itself.


def raw_driver():
    """The driver that the library opened, through ctypes."""
    import managedmem

    return ctypes.CDLL(managedmem.driver_info()["path"])


def _checked(result):
    assert result == 0, f"raw driver call failed with {result}"


class Capture:
    """A running stream capture; `result` is what ending it gave (0: it survived)."""

    result = None


@contextlib.contextmanager
def capturing(stream, mode=CAPTURE_RELAXED):
    """Capture a graph on the stream while the block runs."""
    driver = raw_driver()
    handle = ctypes.c_void_p(stream.handle)
    graph = ctypes.c_void_p()
    _checked(driver.cuStreamBeginCapture_v2(handle, mode))
    capture = Capture()
    try:
        yield capture
    finally:
        capture.result = driver.cuStreamEndCapture(handle, ctypes.byref(graph))
        if capture.result == 0 and graph:
            _checked(driver.cuGraphDestroy(graph))


@contextlib.contextmanager
def _memory_of_driver(allocate, free, size):
    """The address of memory that these calls of the driver make and free."""
    import managedmem

    managedmem.Device(0).set_current()
    driver = raw_driver()
    pointer = ctypes.c_uint64()
    _checked(getattr(driver, allocate)(ctypes.byref(pointer), ctypes.c_size_t(size)))
    try:
        yield pointer.value
    finally:
        _checked(getattr(driver, free)(pointer))


def device_memory(size=PAGE):
    """The address of plain device memory, which no managed-memory operation may take."""
    return _memory_of_driver("cuMemAlloc_v2", "cuMemFree_v2", size)


def pinned_memory(size=PAGE):
    """The address of host memory that CUDA has pinned."""
    return _memory_of_driver("cuMemAllocHost_v2", "cuMemFreeHost", size)


def managed_memory(size=PAGE):
    """The address of managed memory that the library did not make; the caller frees it."""
    import managedmem

    managedmem.Device(0).set_current()
    pointer = ctypes.c_uint64()
    attach_global = 1
    _checked(
        raw_driver().cuMemAllocManaged(
            ctypes.byref(pointer), ctypes.c_size_t(size), ctypes.c_uint(attach_global)
        )
    )
    return pointer.value


# Stand-ins for the objects of other libraries.


class CudaArray:
    """What torch, CuPy and numba arrays look like: `__cuda_array_interface__` and an owner."""

    def __init__(
        self,
        buffer,
        shape=None,
        strides=None,
        typestr="|u1",
        offset=0,
        pointer=None,
        readonly=False,
        members=(),
    ):
        self.buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": (buffer.size,) if shape is None else shape,
            "strides": strides,
            "typestr": typestr,
            "data": (buffer.handle + offset if pointer is None else pointer, readonly),
            "version": 3,
            **dict(members),
        }


class ProtocolStream:
    """A stream of another library: nothing but `__cuda_stream__`."""

    def __init__(self, handle, version=0):
        self.answer = (version, handle)

    def __cuda_stream__(self):
        return self.answer


def foreign(module, name, **attributes):
    """An object whose class claims to come from that module of another library."""
    cls = type(name, (types.SimpleNamespace,), {"__module__": module})
    return cls(**attributes)


def torch_device(kind, index=None):
    return foreign("torch", "device", type=kind, index=index)


def cupy_device(ordinal):
    return foreign("cupy.cuda.device", "Device", id=ordinal)


def numba_device(ordinal):
    return foreign("numba.cuda.cudadrv.driver", "Device", id=ordinal)


def jax_device(platform, local_hardware_id, index=7):
    """JAX counts the devices of all its processes; the driver's ordinal is another number."""
    return foreign(
        "jaxlib._jax",
        "Device",
        platform=platform,
        local_hardware_id=local_hardware_id,
        id=index,
    )


def numpy_bool(value, name="bool"):
    """A NumPy bool: its class is called bool_ before NumPy 2."""
    return type(name, (), {"__module__": "numpy", "__bool__": lambda self: value})()


def bindings_object(name, number):
    """A CUdevice, CUstream or the like: what cuda.bindings makes of a C value."""
    cls = type(name, (), {"__module__": "cuda.bindings.driver", "__int__": lambda self: number})
    return cls()


# DLPack, as a consumer sees it.


class DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
DLManagedTensor._fields_ = [
    ("tensor", DLTensor),
    ("context", ctypes.c_void_p),
    ("deleter", _Deleter),
]


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


_capsule = ctypes.pythonapi
_capsule.PyCapsule_GetPointer.restype = ctypes.c_void_p
_capsule.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule.PyCapsule_GetName.restype = ctypes.c_char_p
_capsule.PyCapsule_GetName.argtypes = [ctypes.py_object]
_capsule.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
_KINDS = {
    b"dltensor": (DLManagedTensor, b"used_dltensor"),
    b"dltensor_versioned": (DLManagedTensorVersioned, b"used_dltensor_versioned"),
}


def capsule_name(capsule):
    return _capsule.PyCapsule_GetName(capsule).decode()


def capsule_struct(capsule):
    """The managed tensor inside a fresh capsule, still owned by it."""
    name = _capsule.PyCapsule_GetName(capsule)
    return _KINDS[name][0].from_address(_capsule.PyCapsule_GetPointer(capsule, name))


def consume(capsule):
    """Take the tensor out of a capsule as a consumer does; the caller runs its deleter."""
    managed = capsule_struct(capsule)
    name = _capsule.PyCapsule_GetName(capsule)
    # The capsule keeps the pointer to its name; the table keeps the name alive.
    _capsule.PyCapsule_SetName(capsule, _KINDS[name][1])
    return managed


def run_deleter(managed):
    managed.deleter(ctypes.addressof(managed))
