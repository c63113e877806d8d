"""The other libraries in the tests: importing one or skipping, its arrays, its streams.

Libraries that need a real GPU are skipped on the emulated driver.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import warnings

import pytest

import managedmem
from constants import EMULATED
from driver import raw_driver

# JAX would otherwise take most of a GPU's memory for itself at its first use.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@functools.cache
def find(module):
    """(module, None), or (None, reason) if the module is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = importlib.import_module(module)
    except ImportError as error:
        return None, f"needs {module}: {error}"
    if module == "jax" and not EMULATED:  # its search for devices makes the last one current
        found.devices()
        managedmem.Device(0).set_current()
    gc.collect()
    gc.freeze()  # as in conftest: collections need not visit a library's thousands of objects
    return found, None


def need(module):
    found, reason = find(module)
    if found is None:
        pytest.skip(reason)
    return found


def need_on_gpu(module, is_usable=lambda found: True):
    if EMULATED:
        pytest.skip(f"{module} works on real GPUs only: run with MANAGEDMEM_DRIVER=cuda")
    found = need(module)
    if not is_usable(found):
        pytest.skip(f"this {module} has no GPU")
    return found


def numpy():
    return need("numpy")


def torch():
    """torch with a GPU."""
    return need_on_gpu("torch", lambda found: found.cuda.is_available())


def cupy():
    return need_on_gpu("cupy", lambda found: found.cuda.is_available())


def numba_cuda():
    return need_on_gpu("numba.cuda", lambda found: found.is_available())


def cuda_core():
    """cuda.core, with device 0 current in it."""
    found = need_on_gpu("cuda.core")
    found.Device(0).set_current()
    return found


def cuda_core_device(ordinal):
    """A device of cuda.core, which needs the driver of a GPU."""
    core = need("cuda.core")
    try:
        return core.Device(ordinal)
    except Exception as error:
        if not EMULATED:
            raise
        pytest.skip(f"this cuda.core has no driver: {error}")


def jax():
    """JAX with a GPU."""
    return need_on_gpu("jax", lambda found: found.default_backend() == "gpu")


def is_managed(pointer):
    """True if the driver knows the address as managed memory; false once it is freed."""
    managedmem.Device(0).set_current()
    attribute_is_managed = 8
    answer = ctypes.c_uint()
    code = raw_driver().cuPointerGetAttribute(
        ctypes.byref(answer), attribute_is_managed, ctypes.c_uint64(pointer)
    )
    return code == 0 and answer.value == 1


# The operations of a library on its arrays. `fill` and `read` wait until the device is done.


class Torch:
    @staticmethod
    def pointer(tensor):
        return tensor.data_ptr()

    @staticmethod
    def fill(tensor, value):
        tensor.fill_(value)
        if tensor.is_cuda:
            torch().cuda.synchronize()

    @staticmethod
    def read(tensor):
        return tensor.cpu().numpy()


class CuPy:
    @staticmethod
    def pointer(array):
        return array.data.ptr

    @staticmethod
    def fill(array, value):
        array.fill(value)
        cupy().cuda.runtime.deviceSynchronize()

    @staticmethod
    def read(array):
        return array.get()


class Numba:
    """Uses copies, because a kernel would need a compiler for the device."""

    @staticmethod
    def pointer(array):
        return array.__cuda_array_interface__["data"][0]

    @staticmethod
    def fill(array, value):
        array.copy_to_device(numpy().full(array.shape, value, array.dtype))
        numba_cuda().synchronize()

    @staticmethod
    def read(array):
        copy = array.copy_to_host()
        numba_cuda().synchronize()
        return copy


class NumPy:
    @staticmethod
    def pointer(array):
        return array.ctypes.data

    @staticmethod
    def fill(array, value):
        array[...] = value

    @staticmethod
    def read(array):
        return array.copy()


class CudaCore:
    """Buffers of bytes, without the dtype of their source."""

    @staticmethod
    def pointer(buffer):
        return int(buffer.handle)

    @staticmethod
    def fill(buffer, value):
        stream = cuda_core().Device(0).create_stream()
        buffer.fill(value, stream=stream)
        stream.sync()

    @staticmethod
    def read(buffer):
        return numpy().from_dlpack(buffer).copy()


class CudaCoreView(CudaCore):
    """cuda.core's StridedMemoryView, which describes memory and does nothing with it."""

    fill = read = None

    @staticmethod
    def pointer(view):
        return view.ptr


class Jax:
    """Arrays that cannot be changed."""

    fill = None

    @staticmethod
    def pointer(array):
        return array.unsafe_buffer_pointer()

    @staticmethod
    def read(array):
        return numpy().asarray(array + array.dtype.type(0))


# Arguments for `stream=`. Each entry makes one, or skips.


def of_cupy(make):
    return lambda: make(cupy().cuda)


def of_torch(make):
    return lambda: make(torch().cuda)


def of_numba(name):
    def make():
        return getattr(numba_cuda(), name)()

    return make


@functools.cache
def lasting(name):
    """A stream that outlives the tests, for wrappers of its handle, which do not keep it alive."""
    return STREAMS[name]()


def torch_external():
    return torch().cuda.ExternalStream(handle_of(lasting("CuPy")))


def cupy_external():
    """CuPy 14 wraps an object, and deprecates the class that takes a handle."""
    cuda = cupy().cuda
    if hasattr(cuda.Stream, "from_external"):
        return cuda.Stream.from_external(lasting("torch"))
    return cuda.ExternalStream(handle_of(lasting("torch")))


def of_bindings(module, type_name):
    def make():
        bindings = need_on_gpu(f"cuda.bindings.{module}")
        return getattr(bindings, type_name)(handle_of(lasting("torch")))

    return make


STREAMS = {
    "None": lambda: None,
    "torch default": of_torch(lambda cuda: cuda.default_stream()),
    "torch": of_torch(lambda cuda: cuda.Stream()),
    "torch external": torch_external,
    "CuPy null": of_cupy(lambda cuda: cuda.Stream.null),
    "CuPy per thread": of_cupy(lambda cuda: cuda.Stream.ptds),
    "CuPy": of_cupy(lambda cuda: cuda.Stream()),
    "CuPy non-blocking": of_cupy(lambda cuda: cuda.Stream(non_blocking=True)),
    "CuPy external": cupy_external,
    "numba default": of_numba("default_stream"),
    "numba legacy": of_numba("legacy_default_stream"),
    "numba per thread": of_numba("per_thread_default_stream"),
    "numba": of_numba("stream"),
    "cuda.core default": lambda: cuda_core().Device(0).default_stream,
    "cuda.core": lambda: cuda_core().Device(0).create_stream(),
    "cuda.bindings driver": of_bindings("driver", "CUstream"),
    "cuda.bindings runtime": of_bindings("runtime", "cudaStream_t"),
    "managedmem": managedmem.Stream,
    "handle 1": lambda: 1,
    "handle 2": lambda: 2,
}


def handle_of(stream):
    """The handle of any of these streams; 0 is the legacy default stream."""
    if stream is None:
        return 0
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    return int(getattr(stream, "ptr", stream))


@contextlib.contextmanager
def torch_works_on(stream):
    """Let torch work on a stream of any library while the block runs."""
    cuda = torch().cuda
    handle = handle_of(stream)
    same = cuda.default_stream() if handle in (0, 1) else cuda.ExternalStream(handle)
    with cuda.stream(same):
        yield
    cuda.synchronize()
