"""FDTD-3D: some steps of finite differences, from one of two volumes to the other and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from .gpu import Gpu
from .program import FILL, Arrays, Placement, Program, Results

RADIUS = 4
FACTORS = np.array([0.4, 0.05, 0.025, 0.015, 0.01], np.float32)


class FiniteDifferences(Program):
    """Two volumes with the same contents at first, and the factors."""

    title = "FDTD-3D"
    placement = Placement(
        preferred=("factors", "second"),
        mapped=("factors", "second"),
        read_mostly=("factors",),
        to_device=("factors", "first", "second"),
        to_host=("second",),
    )
    copied_in = ("factors", "first", "second")
    copied_out = ("second",)
    overwritten: ClassVar[Mapping[str, str]] = dict.fromkeys(copied_in, FILL)

    def __init__(self, size: tuple[int, int, int] = (200, 200, 200), steps: int = 5) -> None:
        if steps % 2 == 0:
            raise ValueError("the number of steps must be odd, for the result is read from second")
        self.size, self.steps = size, steps
        outer = tuple(extent + 2 * RADIUS for extent in size)
        super().__init__(
            {
                "first": (outer, "float32"),
                "second": (outer, "float32"),
                "factors": (FACTORS.shape, "float32"),
            },
            (np.empty(outer, np.float32),),
        )
        self.volume = np.random.default_rng(4).random(outer, dtype=np.float32)

    def fill(self, host: Arrays) -> None:
        np.copyto(host["factors"], FACTORS)
        np.copyto(host["first"], self.volume)
        np.copyto(host["second"], self.volume)

    def compute(self, gpu: Gpu, device: Arrays) -> None:
        source, sizes = self.source(), np.array(self.size, np.int32)
        to, source_volume = device["second"], device["first"]
        for _ in range(self.steps):
            gpu.launch(
                source,
                "finite_differences",
                self.size,
                to,
                source_volume,
                device["factors"],
                *sizes,
            )
            to, source_volume = source_volume, to

    def read(self, host: Arrays) -> Results:
        np.copyto(self.results[0], host["second"])
        return self.results
