"""Builds bare.c and calls its loops: the cost of a driver call without Python."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import managedmem

SOURCE = Path(__file__).with_name("bare.c")


class Target(ctypes.Structure):
    """The arguments of a loop; the fields are those of bare.c."""

    _fields_ = (
        ("pointer", ctypes.c_uint64),
        ("size", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("device", ctypes.c_int),
    )


class Sequence(ctypes.Structure):
    """Several ranges and their operation; the fields are those of bare.c."""

    OPERATIONS = ("prefetch", "discard", "discard_prefetch", "advise")

    _fields_ = (
        ("pointers", ctypes.POINTER(ctypes.c_uint64)),
        ("sizes", ctypes.POINTER(ctypes.c_size_t)),
        ("count", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("device", ctypes.c_int),
        ("operation", ctypes.c_int),
    )

    @classmethod
    def of(
        cls,
        ranges: Collection[managedmem.ManagedBuffer],
        stream: managedmem.Stream,
        device: int,
        operation: str,
    ) -> Sequence:
        """The sequence of these buffers; the device is -1 for the host."""
        return cls(
            (ctypes.c_uint64 * len(ranges))(*(each.handle for each in ranges)),
            (ctypes.c_size_t * len(ranges))(*(each.nbytes for each in ranges)),
            len(ranges),
            stream.handle,
            device,
            cls.OPERATIONS.index(operation),
        )


def include_folder() -> str | None:
    """The folder of cuda.h, in a toolkit or in NVIDIA's header package, or None."""
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    roots += [str(Path(nvcc).resolve().parents[1]) if nvcc else None, "/usr/local/cuda"]
    roots += [f"{entry}/nvidia/cu13" for entry in sys.path]
    found = (f"{root}/include" for root in roots if root)
    return next((each for each in found if Path(each, "cudaTypedefs.h").exists()), None)


@functools.cache
def libraries() -> tuple[ctypes.CDLL, ctypes.PyDLL]:
    """The compiled loops, to call without the GIL, and with it."""
    include = include_folder()
    if include is None:
        raise SystemExit("benchmarks: no cudaTypedefs.h found; set CUDA_HOME to a CUDA 13 toolkit")
    with tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/bare.so"
        flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra"]
        flags += ["-I", include, "-I", sysconfig.get_path("include")]
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, *flags, "-o", output, str(SOURCE), "-ldl"], check=True)
        found = ctypes.CDLL(output), ctypes.PyDLL(output)
    if not found[0].bare_open(managedmem.capabilities().driver_path.encode()):
        raise SystemExit("benchmarks: the driver cannot be opened a second time")
    for name in ("call", "sequence"):
        for library in found:
            getattr(library, f"bare_{name}").restype = ctypes.c_double
    return found


def checked(name: str, found: float) -> float:
    """The nanoseconds that a function of bare.c returned; RuntimeError for an error code."""
    if found < 0:
        raise RuntimeError(f"{name} failed with CUDA error {-found:.0f}")
    return found


def nanoseconds(loop: str, target: Target, count: int) -> float:
    """The time of one call in a loop of bare.c."""
    function = getattr(libraries()[0], f"bare_{loop}")
    function.restype = ctypes.c_double
    return checked(loop, function(ctypes.byref(target), count))


def sequence_nanoseconds(sequence: Sequence, form: int) -> float:
    """The time of an operation on all ranges: 0 a loop, 1 a batch, 2 one call over all."""
    return checked("sequence", libraries()[0].bare_sequence(ctypes.byref(sequence), form))


def call_nanoseconds(
    handle: int, function: Callable[..., object], /, *arguments: object, **named: object
) -> float:
    """The time of a call of a Python function, until the stream of that handle is done.

    C code reads the clock, calls the function and waits for the stream, as for
    sequence_nanoseconds, so the overhead is the function's own.
    """
    call: Any = libraries()[1].bare_call
    call.argtypes = [ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.c_void_p]
    everything = (*arguments, *named.values())
    return checked("call", call(function, everything, tuple(map(sys.intern, named)), handle))
