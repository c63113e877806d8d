"""Instructions of one call, counted by valgrind's callgrind on the emulated driver: no GPU needed.

Counts hardly vary between runs, so two commits can be compared. The emulated driver's own
instructions do not count. One process under valgrind runs each operation of the group "overhead" a
few times and then many times, and marks the ends of both runs. valgrind writes the count between
two marks; the difference of the two counts has only the repeated part.

python -m benchmarks.instructions LIBRARY is that process; it is useless outside valgrind.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import managedmem

from . import overhead
from .measure import KIB, Result, Row, reason
from .report import Report

DESCRIPTION = (
    "Counted by callgrind on the emulated driver, whose own instructions are left out: Python's and"
    " the library's, for one call."
)
FEW, MANY = 50, 150  # runs of an operation
WARM_UP = 64  # enough for the interpreter to specialise the code
SOURCE = Path(__file__).with_name("counted.c")
# The function in it that Python calls, and the one at whose start valgrind writes a file.
MARK, MARKED = "benchmarks_mark", "benchmarks_marked"
EMULATOR = "libmanagedmem_emulator.so"
LOOP = "pass"  # the loop itself, whose count is subtracted

# Growth by more than both of these fails.
ALLOWED_PART, ALLOWED_COUNT = 0.05, 50


def available() -> bool:
    """True if valgrind is installed."""
    return shutil.which("valgrind") is not None


# --- the process under valgrind ------------------------------------------------------------


def statements() -> dict[str, tuple[str, int]]:
    """Our statement of each operation, and the size of its buffer, by title."""
    found = {
        overhead.title_of(each): (each.statements["ours"], each.size)
        for each in overhead.OPERATIONS
    }
    return {LOOP: ("pass", 4 * KIB), **found}


def counted(code: str, names: dict[str, Any], mark: Callable[[], object]) -> None:
    """Run a statement a few times and many times, with marks at the ends."""
    timer = timeit.Timer(code, globals=names)
    timer.timeit(WARM_UP)
    mark()
    timer.timeit(FEW)
    mark()
    timer.timeit(MANY)
    mark()


def run_all(library: str) -> None:
    """Run every operation; print the names of those that this version of the library has."""
    mark = getattr(ctypes.CDLL(library), MARK)
    done, failed = [], {}
    with managedmem.Stream() as stream:
        for title, (code, size) in statements().items():
            names = overhead.own_names(size, stream)
            with names["buf"]:
                try:
                    exec(code, names)
                except (AttributeError, TypeError, ValueError) as error:
                    failed[title] = reason(error)
                    continue
                counted(code, names, mark)
                stream.sync()
            done.append(title)
    print(json.dumps({"done": done, "failed": failed}))


# --- reading the counts --------------------------------------------------------------------


def without_emulator(lines: Iterator[str]) -> int:
    """The instructions in one file of callgrind, less those of the emulated driver."""
    total = inside = 0
    caller = callee = ""
    for line in lines:
        key, _, value = line.rstrip("\n").partition("=")
        if key == "ob":
            caller = callee = value
        elif key == "cob":
            callee = value
        elif key == "calls":  # the next line has the inclusive cost of the call
            cost = int(next(lines).split()[1])
            if callee.endswith(EMULATOR) and not caller.endswith(EMULATOR):
                inside += cost
            callee = caller
        elif line.startswith("totals:"):
            total = int(line.split()[1])
    return total - inside


def count_between(folder: Path, mark: int) -> int:
    """The instructions between the previous mark and this one (the first is 1)."""
    (path,) = folder.glob(f"*.{mark}")
    with path.open() as file:
        return without_emulator(iter(file))


def compiled(folder: Path) -> str:
    """counted.c, compiled."""
    output = str(folder / "counted.so")
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", output, str(SOURCE)], check=True)
    return output


def execute(folder: Path) -> dict[str, Any]:
    """Run the process under valgrind, its files in the folder; return its report."""
    options = ["--tool=callgrind", f"--dump-before={MARKED}", "--compress-strings=no"]
    options += ["--compress-pos=no", f"--callgrind-out-file={folder}/counts"]
    command = ["valgrind", "-q", *options, sys.executable, "-m", "benchmarks.instructions"]
    command.append(compiled(folder))
    environment = {**os.environ, "MANAGEDMEM_DRIVER": "emulator", "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"benchmarks: valgrind failed\n{done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def measure() -> list[Row]:
    """A row for each operation."""
    if not available():
        raise SystemExit("benchmarks: --emulator counts with valgrind, which is not installed")
    with tempfile.TemporaryDirectory() as name:
        answer = execute(Path(name))
        counts = {}
        for i, title in enumerate(answer["done"]):
            few, many = (count_between(Path(name), 3 * i + mark) for mark in (2, 3))
            counts[title] = (many - few) / (MANY - FEW)
    loop = counts.pop(LOOP)
    rows = [
        Row(title, {"ours": Result(round(count - loop))}, unit="instructions")
        for title, count in counts.items()
    ]
    return rows + [
        Row(t, {}, unit="instructions", note=text) for t, text in answer["failed"].items()
    ]


# --- comparing -----------------------------------------------------------------------------


def grown(before: float, after: float) -> bool:
    """True if the growth is above both limits."""
    return after > before * (1 + ALLOWED_PART) and after > before + ALLOWED_COUNT


def compare(before: Report, after: Report) -> int:
    """Print both counts of each operation; return the exit status, 1 if one has grown."""
    old = {row.operation: row for row in before.groups.get("instructions", [])}
    bad = []
    print(f"{'before':>8} {'after':>8}")
    for row in after.groups.get("instructions", []):
        pair = [each.results.get("ours") for each in (old.get(row.operation, row), row)]
        if row.operation not in old or pair[0] is None or pair[1] is None:
            print(f"{'-':>8} {'-':>8}  {row.operation} (not in both)")
            continue
        was, now = pair[0].median, pair[1].median
        mark = "  GREW" if grown(was, now) else ""
        print(f"{was:8,.0f} {now:8,.0f}  {row.operation}{mark}")
        bad += [row.operation] if mark else []
    if bad:
        print(f"more than {ALLOWED_PART:.0%} and {ALLOWED_COUNT} instructions above: {len(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    run_all(sys.argv[1])
