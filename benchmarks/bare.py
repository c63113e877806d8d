"""Builds bare.c and gives its loops to Python: what a driver call costs without Python."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import managedmem

SOURCE = Path(__file__).with_name("bare.c")


class Target(ctypes.Structure):
    """What a loop works on; the fields are those of bare.c."""

    _fields_ = (
        ("pointer", ctypes.c_uint64),
        ("size", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("device", ctypes.c_int),
    )


class Sequence(ctypes.Structure):
    """Several ranges and what to do with them; the fields are those of bare.c."""

    _fields_ = (
        ("pointers", ctypes.POINTER(ctypes.c_uint64)),
        ("sizes", ctypes.POINTER(ctypes.c_size_t)),
        ("count", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("device", ctypes.c_int),
        ("operation", ctypes.c_int),
    )


def include_folder() -> str:
    """Where cuda.h is: a toolkit's, or the one of NVIDIA's header package."""
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    roots += [str(Path(nvcc).resolve().parents[1]) if nvcc else None, "/usr/local/cuda"]
    roots += [f"{entry}/nvidia/cu13" for entry in sys.path]
    for root in filter(None, roots):
        if Path(root, "include", "cudaTypedefs.h").exists():
            return f"{root}/include"
    raise SystemExit("benchmarks: no cudaTypedefs.h found; set CUDA_HOME to a CUDA 13 toolkit")


@functools.cache
def library() -> ctypes.CDLL:
    """The loops, compiled for this process."""
    with tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/bare.so"
        compiler = os.environ.get("CC", "cc")
        flags = ["-std=c11", "-O2", "-shared", "-fPIC", "-Wall", "-I", include_folder()]
        subprocess.run([compiler, *flags, "-o", output, str(SOURCE), "-ldl"], check=True)
        loops = ctypes.CDLL(output)
    if not loops.bare_open(managedmem.driver_info()["path"].encode()):
        raise SystemExit("benchmarks: the driver cannot be opened a second time")
    return loops


def checked(name: str, *arguments: object) -> float:
    """Call a function of bare.c that gives nanoseconds, or minus an error code."""
    function = getattr(library(), name)
    function.restype = ctypes.c_double
    found: float = function(*arguments)
    if found < 0:
        raise RuntimeError(f"{name} failed with CUDA error {-found:.0f}")
    return found


def nanoseconds(loop: str, target: Target, count: int) -> float:
    """The time of one call in a loop of bare.c."""
    return checked(f"bare_{loop}", ctypes.byref(target), count)


def sequence_nanoseconds(sequence: Sequence, form: int) -> float:
    """The time of an operation on all ranges: 0 a loop, 1 a batch, 2 one call over all."""
    return checked("bare_sequence", ctypes.byref(sequence), form)
