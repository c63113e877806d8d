"""BlackScholes: the prices of options, computed many times over from inputs that stay the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from .gpu import Gpu
from .program import COMPUTE, FILL, Arrays, Placement, Program, Results

RATE, VOLATILITY = np.float32(0.02), np.float32(0.3)
INPUTS = ("stock", "strike", "years")
RESULTS = ("call", "put")


class BlackScholes(Program):
    """Five arrays of one size."""

    title = "BlackScholes"
    placement = Placement(
        preferred=(), mapped=(), read_mostly=INPUTS, to_device=(*INPUTS, *RESULTS), to_host=RESULTS
    )
    copied_in = INPUTS
    copied_out = RESULTS
    overwritten: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(INPUTS, FILL),
        **dict.fromkeys(RESULTS, COMPUTE),
    }

    def __init__(self, count: int = 4 << 20, iterations: int = 64) -> None:
        super().__init__(
            dict.fromkeys((*INPUTS, *RESULTS), ((count,), "float32")),
            tuple(np.empty(count, np.float32) for _ in RESULTS),
        )
        self.count, self.iterations = count, iterations
        random = np.random.default_rng(1)
        ranges = {"stock": (5, 30), "strike": (1, 100), "years": (0.25, 10)}
        self.inputs = {
            name: random.uniform(low, high, count).astype(np.float32)
            for name, (low, high) in ranges.items()
        }

    def fill(self, host: Arrays) -> None:
        for name, values in self.inputs.items():
            np.copyto(host[name], values)

    def compute(self, gpu: Gpu, device: Arrays) -> None:
        arguments = [device[name] for name in (*INPUTS, *RESULTS)]
        scalars = (RATE, VOLATILITY, np.int32(self.count))
        for _ in range(self.iterations):
            gpu.launch(self.source(), "black_scholes", (self.count,), *arguments, *scalars)

    def read(self, host: Arrays) -> Results:
        for name, copy in zip(RESULTS, self.results, strict=True):
            np.copyto(copy, host[name])
        return self.results
