"""The device that runs the programs: its arrays, kernels, sums and Fourier transforms, by CuPy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from numpy.typing import NDArray

from managedmem import ManagedBuffer

THREADS = 256


class Gpu(Protocol):
    """The operations that the programs need. All but dot() may return before the work is done."""

    def array(self, buf: ManagedBuffer) -> Any:
        """The buffer as an array of the device, over the same memory."""

    def launch(self, source: Path, kernel: str, shape: Sequence[int], *arguments: Any) -> None:
        """Run a kernel of a source file with at least one thread for each index of the shape."""

    def dot(self, x: Any, y: Any) -> float:
        """The scalar product of two arrays; waits for it."""

    def rfft2(self, source: Any, spectrum: Any) -> None:
        """Transform a real array of two dimensions."""

    def irfft2(self, spectrum: Any, result: Any) -> None:
        """Transform back, without a factor. The spectrum is lost."""

    def zero(self, array: Any) -> None:
        """Set an array to 0."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An array in plain device memory."""

    def pinned(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """An array in pinned memory of the host."""

    def copy_in(self, source: NDArray[Any], to: Any) -> None:
        """Copy a pinned array to the device."""

    def copy_out(self, source: Any, to: NDArray[Any]) -> None:
        """Copy an array of the device to a pinned one."""

    def wait(self) -> None:
        """Wait until all work is done."""


def blocks_of(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The grid and the block with a thread for each index; the last index is x."""
    first = min(THREADS, 1 << (shape[-1] - 1).bit_length())
    block = (first, THREADS // first, 1)
    extents = (*reversed(shape), 1, 1)[:3]
    return tuple(-(-extent // size) for extent, size in zip(extents, block, strict=True)), block


class CuPyGpu:
    """A device of this machine, through CuPy's current stream."""

    def __init__(self, cupy: ModuleType) -> None:
        self.cupy = cupy
        self.kernels: dict[tuple[Path, str], Any] = {}
        self.plans: dict[tuple[int, ...], tuple[Any, Any]] = {}
        self.product = cupy.ReductionKernel(
            "T x, T y", "float64 z", "(double)x * y", "a + b", "z = a", "0", "scalar_product"
        )

    def array(self, buf: ManagedBuffer) -> Any:
        return buf.cupy()

    def launch(self, source: Path, kernel: str, shape: Sequence[int], *arguments: Any) -> None:
        if (source, kernel) not in self.kernels:
            code = source.read_text(encoding="utf-8")
            self.kernels[source, kernel] = self.cupy.RawKernel(code, kernel)
        self.kernels[source, kernel](*blocks_of(shape), arguments)

    def dot(self, x: Any, y: Any) -> float:
        return float(self.product(x, y))

    def plans_for(self, real: Any, spectrum: Any) -> tuple[Any, Any]:
        """The two cuFFT plans of this shape, made once."""
        if real.shape not in self.plans:
            from cupyx.scipy.fft import get_fft_plan

            self.plans[real.shape] = (
                get_fft_plan(real, axes=(0, 1), value_type="R2C"),
                get_fft_plan(spectrum, shape=real.shape, axes=(0, 1), value_type="C2R"),
            )
        return self.plans[real.shape]

    def rfft2(self, source: Any, spectrum: Any) -> None:
        forward = self.cupy.cuda.cufft.CUFFT_FORWARD
        self.plans_for(source, spectrum)[0].fft(source, spectrum, forward)

    def irfft2(self, spectrum: Any, result: Any) -> None:
        backward = self.cupy.cuda.cufft.CUFFT_INVERSE
        self.plans_for(result, spectrum)[1].fft(spectrum, result, backward)

    def zero(self, array: Any) -> None:
        array.data.memset_async(0, array.nbytes)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.cupy.empty(shape, dtype)

    def pinned(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        from cupyx import empty_pinned

        array: NDArray[Any] = empty_pinned(shape, dtype)
        return array

    def copy_in(self, source: NDArray[Any], to: Any) -> None:
        to.set(source)

    def copy_out(self, source: Any, to: NDArray[Any]) -> None:
        source.get(out=to, blocking=False)

    def wait(self) -> None:
        self.cupy.cuda.get_current_stream().synchronize()
