"""The host as the device for the programs of benchmarks/: kernels run as C, in loops.

With the emulated driver it also touches the arrays, so that their pages move as a device's would.
"""

import ctypes
import os
import re
import subprocess
from itertools import product
from math import prod

import numpy as np

from benchmarks.um_programs.gpu import blocks_of
from managedmem import Device, emulator

# CUDA's words in C; one thread runs at a time.
WORDS = """
#include <math.h>
#define __global__
#define __device__
struct index { unsigned x, y, z; };
static struct index blockIdx, blockDim, threadIdx;
static inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678f); }
void set_indices(const unsigned *numbers)
{
    blockIdx = (struct index){numbers[0], numbers[1], numbers[2]};
    blockDim = (struct index){numbers[3], numbers[4], numbers[5]};
}
"""
# All threads of a block.
LOOP = """
void block_of_{name}({parameters})
{{
    for (threadIdx.z = 0; threadIdx.z < blockDim.z; threadIdx.z++)
        for (threadIdx.y = 0; threadIdx.y < blockDim.y; threadIdx.y++)
            for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)
                {name}({arguments});
}}
"""
KERNEL = re.compile(r'extern "C" __global__ void\s+(\w+)\(([^)]*)\)')


def compiled(source, folder):
    """The kernels of a file as a library."""
    text = source.read_text()
    loops = []
    for name, parameters in KERNEL.findall(text):
        arguments = ", ".join(re.findall(r"(\w+)(?:,|$)", parameters))
        loops.append(LOOP.format(name=name, parameters=parameters, arguments=arguments))
    program, library = folder / f"{source.stem}.c", folder / f"{source.stem}.so"
    program.write_text(WORDS + text.replace('extern "C" ', "") + "".join(loops))
    flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-lm"]
    command = [os.environ.get("CC", "cc"), *flags[:-1], "-o", str(library), str(program), flags[-1]]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def as_argument(value):
    """An argument of a kernel for ctypes."""
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data)
    return {"f": ctypes.c_float, "i": ctypes.c_int}[value.dtype.kind](value.item())


class HostGpu:
    """The operations of benchmarks.um_programs.gpu.Gpu, by NumPy and compiled C."""

    def __init__(self, folder):
        self.folder, self.libraries, self.bufs = folder, {}, {}

    def array(self, buf):
        array = np.asarray(buf)
        self.bufs[array.ctypes.data] = buf
        return array

    def touch(self, *arrays):
        """Move the pages of managed arrays to the device."""
        for array in arrays:
            buf = self.bufs.get(array.ctypes.data)
            if buf is not None and emulator.is_active():
                emulator.touch(buf, Device(0), write=True)

    def launch(self, source, kernel, shape, *arguments):
        self.touch(*(value for value in arguments if isinstance(value, np.ndarray)))
        if source not in self.libraries:
            self.libraries[source] = compiled(source, self.folder)
        library = self.libraries[source]
        grid, block = blocks_of(shape)
        given = [as_argument(value) for value in arguments]
        assert prod(block) <= 1024
        for z, y, x in product(*(range(extent) for extent in reversed(grid))):
            library.set_indices((ctypes.c_uint * 6)(x, y, z, *block))
            library[f"block_of_{kernel}"](*given)

    def dot(self, x, y):
        self.touch(x, y)
        return float(np.dot(x.astype(np.float64), y))

    def rfft2(self, source, spectrum):
        self.touch(source, spectrum)
        spectrum[:] = np.fft.rfft2(source)

    def irfft2(self, spectrum, result):
        self.touch(spectrum, result)
        result[:] = np.fft.irfft2(spectrum, s=result.shape) * result.size
        spectrum[:] = np.nan

    def zero(self, array):
        self.touch(array)
        array[:] = 0

    def empty(self, shape, dtype):
        return np.full(shape, 7, dtype)

    def pinned(self, shape, dtype):
        return np.full(shape, 7, dtype)

    def copy_in(self, source, to):
        np.copyto(to, source)

    def copy_out(self, source, to):
        np.copyto(to, source)

    def wait(self):
        Device(0).sync()
