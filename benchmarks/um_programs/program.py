"""The form of the programs: arrays, the phases of a step, and the placement that was published."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .gpu import Gpu

Arrays = Mapping[str, Any]
Results = tuple[NDArray[Any], ...]

FILL, COMPUTE, READ = "fill", "compute", "read"  # the phases of a step


@dataclass(frozen=True)
class Placement:
    """The arrays that the published versions advise and prefetch, each at its point."""

    preferred: tuple[str, ...]  # before the fill: the device is the preferred location
    mapped: tuple[str, ...]  # before the fill: accessed by the host
    read_mostly: tuple[str, ...]  # after the fill
    to_device: tuple[str, ...]  # prefetched after the fill
    to_host: tuple[str, ...]  # prefetched after the computation


class Program(ABC):
    """A step: the host fills arrays, the device computes, the host reads the results."""

    title: ClassVar[str]
    placement: ClassVar[Placement]
    copied_in: ClassVar[tuple[str, ...]]  # by explicit copies, after the fill
    copied_out: ClassVar[tuple[str, ...]]  # by explicit copies, before the results are read
    zeroed: ClassVar[tuple[str, ...]] = ()  # before the computation, by the host or on the device
    # The phase that overwrites a whole array: nobody reads its earlier contents from there on.
    overwritten: ClassVar[Mapping[str, str]]

    def __init__(self, arrays: Mapping[str, tuple[tuple[int, ...], str]], results: Results) -> None:
        self.arrays = dict(arrays)  # shape and element type of each, by its name
        self.results = results  # what the last step read

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(prod(shape) * np.dtype(dtype).itemsize for shape, dtype in self.arrays.values())

    @classmethod
    def source(cls) -> Path:
        """The file of the kernels, beside the module of the program."""
        return Path(__file__).with_name(f"{cls.__module__.rpartition('.')[2]}.cu")

    @abstractmethod
    def fill(self, host: Arrays) -> None:
        """Write the inputs, on the host."""

    @abstractmethod
    def compute(self, gpu: Gpu, device: Arrays) -> None:
        """Queue the work of the device."""

    @abstractmethod
    def read(self, host: Arrays) -> Results:
        """Copy the results out of the arrays into `results`, on the host."""
