"""Dividing the events of a trace among memories: time and memory. Needs no GPU and no driver.

The program of attribution.c makes a trace in which every event belongs to a different memory from
the one before, one memory in four takes the address of an earlier one, and one event in eight is
late.

python -m benchmarks.attribution prints this table alone.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from . import report
from .bare import include_folder
from .measure import Result, Row

SOURCE = Path(__file__).with_name("attribution.c")
EXTENSION = SOURCE.parents[1] / "src" / "_managedmem"
# What attribution.c uses of the extension.
PARTS = (
    "trace/address_map",
    "trace/attribution",
    "trace/block_table",
    "trace/event_order",
    "trace/foreign_search",
    "trace/host_views",
    "trace/memory_index",
    "trace/page_replay",
    "trace/sums",
    "trace/traced_memories",
    "driver/status",
)
DESCRIPTION = (
    "Each event belongs to another memory than the one before; half are moves, one in eight is"
    " late. The bytes are the most that were allocated beside the events."
)


def program(folder: str) -> str:
    """The compiled program."""
    include = include_folder()
    if include is None:
        raise SystemExit("benchmarks: no cudaTypedefs.h found; set CUDA_HOME to a CUDA 13 toolkit")
    output = f"{folder}/attribution"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-DNDEBUG", "-Wall", "-Wextra"]
    flags += ["-I", str(EXTENSION), "-isystem", include]
    flags += [f"-Wl,--wrap={name}" for name in ("malloc", "calloc", "realloc", "free")]
    sources = [str(SOURCE), *(str(EXTENSION / f"{part}.c") for part in PARTS)]
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, *flags, "-o", output, *sources], check=True)
    return output


def measure(events: int = 1_000_000, memories: int = 10_000, rounds: int = 9) -> list[Row]:
    """A row for each step, and one for the memory."""
    with tempfile.TemporaryDirectory() as folder:
        command = [program(folder), str(events), str(memories), str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [line.split() for line in done.stdout.splitlines()]
    for *_, added, expected in found:
        if added != expected:
            raise RuntimeError(f"the sums are {added} bytes, not {expected}")

    def row(operation: str, column: int, unit: str, scale: float) -> Row:
        values = [scale * float(line[column]) for line in found]
        return Row(operation, {"ours": Result.of(values)}, unit)

    return [
        row(f"index {memories:,} memories", 0, "ms", 1e6),
        row(f"add {events:,} events", 1, "ms", 1e6),
        row(f"add {events:,} events, keep their pieces", 2, "ms", 1e6),
        row("memory for that", 3, "kB", 1),
    ]


if __name__ == "__main__":
    print(report.section(report.Group("Events of a trace", DESCRIPTION, measure), measure()))
