"""What having the library costs: import, memory, size on disk, bytes of one object."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import managedmem

from . import peers
from .measure import Row, Samples, side_by_side

PACKAGES = {"ours": "managedmem", "cuda.core": "cuda.core", "CuPy": "cupy", "torch": "torch"}

# A fresh interpreter each time; it prints the seconds of the import and the resident bytes added.
IMPORT = """
import sys, time
def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096
before, start = resident(), time.perf_counter()
import {package}
print(time.perf_counter() - start, resident() - before)
"""

OBJECTS = 100_000


def imported(package: str) -> tuple[float, float]:
    """Nanoseconds and resident bytes of one import in a fresh interpreter."""
    code = IMPORT.format(package=package)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, resident = found.stdout.split()
    return 1e9 * float(seconds), float(resident)


def imports(repetitions: int) -> list[Row]:
    here = {name: package for name, package in PACKAGES.items() if peers.optional(package)}
    times = {name: Samples() for name in here}
    memory = {name: Samples() for name in here}
    for _ in range(repetitions):
        for name, package in here.items():
            nanoseconds, resident = imported(package)
            times[name].values.append(nanoseconds)
            memory[name].values.append(resident / 1e3)
    return [
        Row("import", times, unit="ms", note="goal 10 ms"),
        Row("resident memory of the import", memory, unit="kB"),
    ]


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def bytes_each(make: Callable[[], object]) -> Callable[[int], float]:
    """A measurement of the resident bytes of one object."""

    def run(count: int) -> float:
        before = resident()
        kept = [make() for _ in range(count)]
        grown = resident() - before
        return grown / len(kept) - sys.getsizeof([]) / len(kept)

    return run


def measure(repetitions: int = 9) -> list[Row]:
    """The rows of this group."""
    rows = imports(repetitions)
    folder = Path(managedmem.__file__).parent
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.suffix != ".pyc")
    rows.append(Row("size on disk", {"ours": Samples([size / 1e3])}, unit="kB"))
    buf = managedmem.empty(4096)
    contenders = {
        "ours": bytes_each(lambda: managedmem.ManagedBuffer.from_handle(buf.handle, 4096))
    }
    core = peers.optional("cuda.core")
    if core is not None and hasattr(core, "ManagedBuffer"):
        core.Device(0).set_current()
        contenders["cuda.core"] = bytes_each(
            lambda: core.ManagedBuffer.from_handle(buf.handle, 4096)
        )
    samples = side_by_side(contenders, count=OBJECTS, repetitions=3)
    rows.append(Row("one ManagedBuffer", samples, unit="bytes"))
    return rows
