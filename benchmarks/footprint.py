"""The footprint of the library: import, memory, size on disk, bytes of one object."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import managedmem

from . import peers
from .measure import MIB, Contender, Result, Row, side_by_side

NEED = MIB
PACKAGES = {"ours": "managedmem", "cuda.core": "cuda.core", "CuPy": "cupy", "torch": "torch"}
PAGE = 4096
OBJECTS = 100_000

# For a fresh interpreter: prints the seconds and the added resident bytes of an import.
IMPORT = """
import sys, time
def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096
before, start = resident(), time.perf_counter()
import {package}
print(time.perf_counter() - start, resident() - before)
"""


def imported(package: str) -> tuple[float, float]:
    """Nanoseconds and resident bytes of one import in a fresh interpreter."""
    code = IMPORT.format(package=package)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, grown = found.stdout.split()
    return 1e9 * float(seconds), float(grown)


def is_here(package: str) -> bool:
    """True if the package can be imported; does not import it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def imports(repetitions: int) -> list[Row]:
    """The time and the memory of imports."""
    found, failed = {}, {}
    for name, package in PACKAGES.items():
        if not is_here(package):
            continue
        try:
            found[name] = [imported(package) for _ in range(repetitions)]
        except subprocess.CalledProcessError as error:
            if name == "ours":
                raise
            failed[name] = str(error.stderr).strip().splitlines()[-1]
    times = {name: Result.of([each[0] for each in values]) for name, values in found.items()}
    memory = {name: Result.of([each[1] for each in values]) for name, values in found.items()}
    return [
        Row("import", times, unit="ms", note="goal 10 ms", failed=failed),
        Row("resident memory of the import", memory, unit="kB"),
    ]


def size_on_disk() -> Row:
    """The installed package, without compiled Python files."""
    folder = Path(managedmem.__file__).parent
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    size = float(sum(path.stat().st_size for path in files))
    return Row("size on disk", {"ours": Result(size)}, unit="kB")


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * PAGE


def bytes_each(make: Callable[[], object]) -> Contender:
    """Measures the resident bytes of one object. All are kept, so that none reuses memory."""
    everything = []

    def run(count: int) -> float:
        kept: list[object] = [None] * count
        everything.append(kept)
        gc.collect()
        before = resident()
        for i in range(count):
            kept[i] = make()
        return (resident() - before) / count

    return run


def one_buffer(repetitions: int, objects: int) -> Row:
    """The memory of a ManagedBuffer that wraps an address."""
    with managedmem.empty(PAGE) as buf:
        contenders = {
            "ours": bytes_each(lambda: managedmem.ManagedBuffer.from_handle(buf.handle, PAGE))
        }
        core = peers.core_on_gpu()
        if core is not None:
            contenders["cuda.core"] = bytes_each(
                lambda: core.ManagedBuffer.from_handle(buf.handle, PAGE)
            )
        return side_by_side(
            "one ManagedBuffer", contenders, count=objects, repetitions=repetitions, unit="bytes"
        )


def measure(repetitions: int = 5, objects: int = OBJECTS) -> Iterator[Row]:
    """The rows of this group."""
    yield from imports(repetitions)
    yield size_on_disk()
    yield one_buffer(3, objects)
