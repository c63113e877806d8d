"""NPBench's CuPy programs over managed memory, before and after `tune()`.

NPBench (https://github.com/spcl/npbench) is not part of this repository: --npbench names a
checkout, and the programs run from its files, with the sizes of its preset S. The arguments are in
memory of CuPy's managed allocator. A step fills them on the host, runs the program, and reads its
results on the host.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

import managedmem
from managedmem import ManagedBuffer

from . import peers
from .interleaved import (
    HIGH,
    MEDIAN,
    Results,
    Step,
    Tune,
    interleaved,
    ratios,
    time_for,
    times_row,
    tuned,
)
from .measure import MIB, Row

NEED = 256 * MIB
PRESET = "S"
SECONDS = 15.0  # for tune() on one program
BEFORE, AFTER = "before", "after"
PROGRAMS = (
    "atax",
    "bicg",
    "compute",
    "gemm",
    "gemver",
    "gesummv",
    "hdiff",
    "jacobi_2d",
    "arc_distance",
    "softmax",
)


def module_at(path: Path) -> ModuleType:
    """The module in a file that is not installed."""
    spec = importlib.util.spec_from_file_location(f"npbench_file_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Source:
    """A program of a checkout: its description, and the folder of its files."""

    info: dict[str, Any]
    folder: Path

    @classmethod
    def of(cls, checkout: Path, name: str) -> Source:
        info = json.loads((checkout / "bench_info" / f"{name}.json").read_text())["benchmark"]
        return cls(info, checkout / "npbench" / "benchmarks" / info["relative_path"])

    def data(self) -> dict[str, Any]:
        """The parameters and the initial arguments by their names, arrays as NumPy's."""
        data = dict(self.info["parameters"][PRESET])
        init = self.info["init"]
        module = module_at(self.folder / f"{self.info['module_name']}.py")
        made = getattr(module, init["func_name"])(*(data[name] for name in init["input_args"]))
        names = init["output_args"]
        data.update(zip(names, made if len(names) > 1 else (made,), strict=True))
        return data

    def function(self) -> Callable[..., Any]:
        """The program for CuPy."""
        module = module_at(self.folder / f"{self.info['module_name']}_cupy.py")
        function: Callable[..., Any] = getattr(module, self.info["func_name"])
        return function


class ManagedArrays:
    """Arrays in memory of a managed CuPy pool, and their bytes as the host sees them."""

    def __init__(self, cupy: ModuleType) -> None:
        self.cupy = cupy
        self.pool = cupy.cuda.MemoryPool(cupy.cuda.malloc_managed)
        self.pool.set_limit(size=NEED)

    def allocating(self) -> Any:
        """A context in which CuPy allocates from the pool."""
        return self.cupy.cuda.using_allocator(self.pool.malloc)

    def empty(self, like: NDArray[Any]) -> Any:
        return self.cupy.empty(like.shape, like.dtype)

    def on_host(self, array: Any) -> NDArray[Any]:
        """The same memory as a NumPy array, which keeps the device's array alive."""
        if not array.flags.c_contiguous:
            raise ValueError("the array is not contiguous")
        memory = ManagedBuffer.from_handle(array.data.ptr, array.nbytes, owner=array)
        view: NDArray[Any] = np.asarray(memory).view(array.dtype).reshape(array.shape)
        return view

    def wait(self) -> None:
        self.cupy.cuda.get_current_stream().synchronize()

    def close(self) -> None:
        self.pool.free_all_blocks()


class Phases:
    """The three phases of a program over such arrays."""

    def __init__(self, source: Source, memory: ManagedArrays) -> None:
        self.memory, self.function = memory, source.function()
        data, self.names = source.data(), source.info["input_args"]
        self.initial = {name: np.asarray(data[name]) for name in source.info["array_args"]}
        with memory.allocating():
            self.arrays = {name: memory.empty(array) for name, array in self.initial.items()}
        self.host = {name: memory.on_host(array) for name, array in self.arrays.items()}
        self.arguments = [self.arrays.get(name, data.get(name)) for name in self.names]
        self.changed = [self.arrays[name] for name in source.info["output_args"]]
        self.outputs: list[Any] = []
        self.results: Results = ()

    def fill(self) -> None:
        for name, array in self.initial.items():
            np.copyto(self.host[name], array)

    def run(self) -> None:
        self.outputs.clear()  # so that their memory can be used again
        with self.memory.allocating():
            returned = self.function(*self.arguments)
        self.memory.wait()
        if returned is not None:
            self.outputs += returned if isinstance(returned, tuple | list) else (returned,)
        self.outputs += self.changed

    def read(self) -> Results:
        views = [self.memory.on_host(array) for array in self.outputs]
        if len(self.results) != len(views):
            self.results = tuple(map(np.empty_like, views))
        for copy, view in zip(self.results, views, strict=True):
            np.copyto(copy, view)
        return self.results

    def step(self) -> Results:
        self.fill()
        self.run()
        return self.read()

    def tuned(self, tune: Tune, seconds: float) -> tuple[Step, str]:
        """The step as tune() leaves it, and a note about the search."""
        return tuned(
            tune,
            [("fill", self.fill), ("run", self.run), ("read", self.read)],
            self.arrays,
            Step(self.step),
            lambda: self.results,
            max_seconds=time_for(seconds, self.step),
        )


def rows_of(name: str, phases: Phases, tune: Tune, repetitions: int, seconds: float) -> list[Row]:
    """The times before and after, and their ratio."""
    after, note = phases.tuned(tune, seconds)
    times = interleaved({BEFORE: Step(phases.step), AFTER: after}, repetitions)
    return [
        times_row(name, times, note),
        ratios(f"{name}: {BEFORE} / {AFTER}", times[BEFORE], times[AFTER]),
    ]


def summary(rows: Sequence[Row]) -> str:
    """The distribution of the ratios, and each loss."""
    found = {row.operation.partition(":")[0]: row.results for row in rows if row.unit == "x"}
    medians = sorted(results[MEDIAN].median for results in found.values())
    slower = [name for name, results in found.items() if results[HIGH].median < 1]
    middle = float(np.median(medians))
    return (
        f"{BEFORE} / {AFTER} of {len(medians)} programs: {medians[0]:.2f} at least,"
        f" {middle:.2f} in the middle, {medians[-1]:.2f} at most."
        f" Slower beyond noise: {', '.join(slower) or 'none'}."
    )


def measure(
    npbench: Path | None = None,
    *,
    make: Callable[[], ManagedArrays] | None = None,
    tune: Tune | None = None,
    programs: Sequence[str] = PROGRAMS,
    repetitions: int = 15,
    seconds: float = SECONDS,
) -> Iterator[Row]:
    """Two rows for each program of a checkout."""
    if npbench is None:
        yield Row("npbench", {}, note="needs --npbench CHECKOUT")
        return
    if make is None:
        cupy = peers.cupy_on_gpu()
        if cupy is None:
            yield Row("npbench", {}, note="needs CuPy and a GPU")
            return

        def make() -> ManagedArrays:
            return ManagedArrays(cupy)

    for name in programs:
        memory = make()
        try:
            phases = Phases(Source.of(npbench, name), memory)
            rows = rows_of(name, phases, tune or managedmem.tune, repetitions, seconds)
            del phases
        finally:
            memory.close()
        yield from rows
