"""A picture convolved with a small kernel by Fourier transforms; its border repeats outside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from .gpu import Gpu
from .program import COMPUTE, FILL, Arrays, Placement, Program, Results

KERNEL, CENTRE = (7, 6), (3, 4)


def transform_size(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


class FFTConvolution(Program):
    """The picture, the kernel, padded copies of both, and the spectra of the copies."""

    title = "FFT convolution"
    placement = Placement(
        preferred=("padded_kernel", "padded_data", "data_spectrum", "kernel_spectrum"),
        mapped=("padded_data",),
        read_mostly=("data", "kernel"),
        to_device=("data", "kernel"),
        to_host=("padded_data",),
    )
    copied_in = ("data", "kernel")
    copied_out = ("padded_data",)
    zeroed = ("padded_kernel", "padded_data", "kernel_spectrum")
    overwritten: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys((*copied_in, "padded_kernel"), FILL),
        **dict.fromkeys(("padded_data", "data_spectrum", "kernel_spectrum"), COMPUTE),
    }

    def __init__(self, height: int = 2000, width: int = 2000) -> None:
        self.size = (height, width)
        self.padded = (
            transform_size(height + KERNEL[0] - 1),
            transform_size(width + KERNEL[1] - 1),
        )
        spectrum = (self.padded[0], self.padded[1] // 2 + 1)
        super().__init__(
            {
                "data": (self.size, "float32"),
                "kernel": (KERNEL, "float32"),
                "padded_data": (self.padded, "float32"),
                "padded_kernel": (self.padded, "float32"),
                "data_spectrum": (spectrum, "complex64"),
                "kernel_spectrum": (spectrum, "complex64"),
            },
            (np.empty(self.size, np.float32),),
        )
        random = np.random.default_rng(3)
        self.inputs = {
            "data": random.integers(0, 16, self.size).astype(np.float32),
            "kernel": random.integers(0, 16, KERNEL).astype(np.float32),
        }

    def fill(self, host: Arrays) -> None:
        for name, values in self.inputs.items():
            np.copyto(host[name], values)

    def compute(self, gpu: Gpu, device: Arrays) -> None:
        source, padded = self.source(), np.array(self.padded, np.int32)
        sizes = (*np.array([*KERNEL, *CENTRE], np.int32), *padded)
        gpu.launch(source, "pad_kernel", KERNEL, device["kernel"], device["padded_kernel"], *sizes)
        sizes = (*np.array([*self.size, *CENTRE], np.int32), *padded)
        gpu.launch(source, "pad_data", self.padded, device["data"], device["padded_data"], *sizes)
        spectra = device["data_spectrum"], device["kernel_spectrum"]
        gpu.rfft2(device["padded_kernel"], device["kernel_spectrum"])
        gpu.rfft2(device["padded_data"], device["data_spectrum"])
        factor, count = 1 / (self.padded[0] * self.padded[1]), spectra[0].size
        scalars = np.float32(factor), np.int32(count)
        gpu.launch(source, "multiply_spectra", (count,), *spectra, *scalars)
        gpu.irfft2(device["data_spectrum"], device["padded_data"])

    def read(self, host: Arrays) -> Results:
        np.copyto(self.results[0], host["padded_data"][: self.size[0], : self.size[1]])
        return self.results
