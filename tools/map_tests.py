"""Prints the tests that tools/mutants.py runs against the changed lines of each source.

    python tools/map_tests.py >tests/tests_of_sources.txt

gcov counts the lines of src/_managedmem that each file of tests runs, which takes as long as the
suite. For each line, up to four files that reach it are chosen: those that run most lines, and run
them most often, in the least time.
"""

import gzip
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutants import ROOT, SOURCES, WORKERS, copy_tree, test_environment

FOLDERS = ("core", "emulator", "robustness")
COVER = 4  # files for each line
START = 5  # seconds, so that the shortest files are not always the first
TOO_LONG = 120  # seconds; the suite runs such files, and a mutant is not worth them


def build(tree):
    copy_tree(tree)
    environment = dict(os.environ, MANAGEDMEM_COVERAGE="1", MANAGEDMEM_DEBUG="1")
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", f"-j{WORKERS}"]
    subprocess.run(command, cwd=tree, env=environment, check=True)


def run(tree, counts, test):
    """Runs a file of tests, whose counts go to a folder of their own. Returns the seconds."""
    environment = test_environment(tree)
    environment["GCOV_PREFIX"] = str(counts)
    start = time.monotonic()
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts="]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, test],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 5):
        print(f"{test}: {done.stdout[-2000:]}", file=sys.stderr)
    return time.monotonic() - start


def weights(tree, counts):
    """{source: {line: its weight}} of the lines that ran, by the logarithm of how often they ran.

    gcov looks for the compiler's notes beside the counts, so a link there leads to them.
    """
    found = {}
    for data in counts.rglob("*.gcda"):
        notes = data.with_suffix(".gcno")
        notes.symlink_to("/" / notes.relative_to(counts))
        command = ["gcov", "--json-format", "--stdout", str(data)]
        text = subprocess.run(command, cwd=tree, capture_output=True, check=True).stdout
        if text.startswith(b"\x1f\x8b"):
            text = gzip.decompress(text)
        for entry in json.loads(text)["files"]:
            source = entry["file"].removeprefix(f"{SOURCES}/")
            if source != entry["file"]:
                lines = found.setdefault(source, Counter())
                for line in entry["lines"]:
                    lines[line["line_number"]] += math.log2(1 + line["count"])
    return {source: +lines for source, lines in found.items()}


def chosen(reached, seconds):
    """The files of tests for a source; `reached` has the weights of the lines that each runs."""
    need = dict.fromkeys(set().union(*reached.values()), COVER)
    files = []
    while True:
        gain = {
            test: sum(weight for line, weight in lines.items() if need[line] > 0)
            / (START + seconds[test])
            for test, lines in reached.items()
            if test not in files
        }
        best = max(gain, key=gain.get, default=None)
        if best is None or not gain[best]:
            return files
        files.append(best)
        for line in reached[best]:
            need[line] -= 1


def main():
    found = [path for name in FOLDERS for path in (ROOT / "tests" / name).glob("test_*.py")]
    tests = [str(path.relative_to(ROOT)) for path in found]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        build(tree)
        places = {test: Path(folder) / test.replace("/", "-") for test in tests}
        with ThreadPoolExecutor(WORKERS) as pool:
            times = list(pool.map(lambda test: run(tree, places[test], test), tests))
            maps = list(pool.map(lambda test: weights(tree, places[test]), tests))
    seconds = dict(zip(tests, times, strict=True))
    short = [(t, found) for t, found in zip(tests, maps, strict=True) if seconds[t] < TOO_LONG]
    for source in sorted(set().union(*maps)):
        reached = {test: found[source] for test, found in short if found.get(source)}
        print(f"{source}: {' '.join(chosen(reached, seconds))}")


if __name__ == "__main__":
    main()
