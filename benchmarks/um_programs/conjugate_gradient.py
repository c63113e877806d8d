"""Conjugate gradient on a sparse matrix; the host checks the solution against the matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .gpu import Gpu
from .program import COMPUTE, FILL, Arrays, Placement, Program, Results

MATRIX = ("first", "columns", "values")
CHUNK = 1 << 15  # rows that the host checks at a time, so that they stay in its cache


def tridiagonal(rows: int) -> dict[str, NDArray[Any]]:
    """A symmetric, positive definite matrix by rows: -1 beside a diagonal of 2.05 to 2.15."""
    diagonal = np.random.default_rng(2).uniform(2.05, 2.15, rows)
    columns = np.arange(rows, dtype=np.int32)[:, None] + np.array([-1, 0, 1], np.int32)
    values = np.stack([np.full(rows, -1.0), diagonal, np.full(rows, -1.0)], axis=1)
    inside = (columns >= 0) & (columns < rows)
    first = np.concatenate([[0], np.cumsum(inside.sum(axis=1))]).astype(np.int32)
    return {
        "first": first,
        "columns": columns[inside],
        "values": values[inside].astype(np.float32),
    }


class ConjugateGradient(Program):
    """The matrix, the solution x, the right side, and three vectors of the method."""

    title = "conjugate gradient"
    placement = Placement(
        preferred=(*MATRIX, "x", "rest", "direction", "product"),
        mapped=(*MATRIX, "x"),
        read_mostly=MATRIX,
        to_device=("rest", *MATRIX),
        to_host=(*MATRIX, "x"),
    )
    copied_in = (*MATRIX, "x", "rest")
    copied_out = ("x",)
    overwritten: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys((*copied_in, "right"), FILL),
        "direction": COMPUTE,
        "product": COMPUTE,
    }

    def __init__(self, rows: int = 3 << 19, iterations: int = 50) -> None:
        self.inputs = tridiagonal(rows)
        vectors = ("x", "right", "rest", "direction", "product")
        super().__init__(
            {name: (values.shape, str(values.dtype)) for name, values in self.inputs.items()}
            | dict.fromkeys(vectors, ((rows,), "float32")),
            (np.empty(rows, np.float32), np.empty(1, np.float32)),
        )
        self.rows, self.iterations = rows, iterations

    def fill(self, host: Arrays) -> None:
        for name, values in self.inputs.items():
            np.copyto(host[name], values)
        host["x"].fill(0)
        host["right"].fill(1)
        host["rest"].fill(1)

    def compute(self, gpu: Gpu, device: Arrays) -> None:
        source, shape, rows = self.source(), (self.rows,), np.int32(self.rows)
        matrix = [device[name] for name in MATRIX]
        x, rest = device["x"], device["rest"]
        direction, product = device["direction"], device["product"]

        def add(a: float, vector: object, to: object) -> None:
            gpu.launch(source, "add_multiple", shape, np.float32(a), vector, to, rows)

        gpu.launch(source, "multiply", shape, *matrix, x, product, rows)
        add(-1.0, product, rest)
        gpu.zero(direction)
        before, square = 1.0, gpu.dot(rest, rest)
        for k in range(self.iterations):
            factor = np.float32(square / before if k else 0.0)
            gpu.launch(source, "multiply_and_add", shape, factor, rest, direction, rows)
            gpu.launch(source, "multiply", shape, *matrix, direction, product, rows)
            length = square / gpu.dot(direction, product)
            add(length, direction, x)
            add(-length, product, rest)
            before, square = square, gpu.dot(rest, rest)

    def read(self, host: Arrays) -> Results:
        first, columns, values, x = (host[name] for name in (*MATRIX, "x"))
        solution, error = self.results
        error[0] = 0
        for start in range(0, self.rows, CHUNK):
            rows = slice(start, min(start + CHUNK, self.rows))
            offsets = first[rows]
            entries = slice(offsets[0], first[rows.stop])
            products = values[entries] * x[columns[entries]]
            sums = np.add.reduceat(products, offsets - offsets[0])
            error[0] = max(error[0], np.abs(sums - host["right"][rows]).max())
        np.copyto(solution, x)
        return self.results
