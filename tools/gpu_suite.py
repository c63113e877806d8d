"""Run the test suite on the GPU of this machine: whole in one process, and file by file.

    python tools/gpu_suite.py whole files --seed 7 --log FOLDER

The package must be importable (built in place with PYTHONPATH=python, or installed). Each file runs
in a process of its own, in a random order that the seed repeats. The exit status is 0 if every run
passed.
"""

import argparse
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed)\b")


def run(name, arguments, log, timeout):
    """Run pytest; return its counts, or what ended it, and whether it passed."""
    start = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    env = {**os.environ, "MANAGEDMEM_DRIVER": "cuda", "PYTHONUNBUFFERED": "1"}
    path = log / f"{name.replace(' ', '-')}.txt"
    with path.open("w") as output:
        try:
            status = subprocess.run(
                command, cwd=ROOT, env=env, stdout=output, stderr=output, timeout=timeout
            ).returncode
        except subprocess.TimeoutExpired:
            status = "timeout"
    counts = {}
    for number, word in COUNTS.findall((path.read_text().splitlines() or [""])[-1]):
        counts[word.rstrip("s")] = int(number)
    passed = status == 0 or (status == 5 and not counts.get("failed"))  # 5: all was skipped
    seconds = time.monotonic() - start
    print(f"{name:32s} {counts or f'ended with {status}'} in {seconds:.0f} s", flush=True)
    if not passed:
        print(path.read_text()[-4000:], flush=True)
    return counts, passed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", choices=["whole", "files"])
    parser.add_argument("--seed", type=int, default=None, help="of the order of the files")
    parser.add_argument("--log", type=Path, default=ROOT / ".gpu-suite")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for each process")
    parser.add_argument("--from-file", type=int, default=0, help="where to go on in that order")
    options = parser.parse_args()
    options.log.mkdir(parents=True, exist_ok=True)
    ok = True
    if "whole" in options.runs:
        ok = run("whole", ["-ra"], options.log, options.timeout)[1]
    if "files" in options.runs:
        seed = options.seed if options.seed is not None else random.randrange(10**6)
        files = sorted((ROOT / "tests").glob("**/test_*.py"))
        random.Random(seed).shuffle(files)
        total = {}
        print(f"{len(files)} files in the order of seed {seed}", flush=True)
        for number, file in enumerate(files[options.from_file :], options.from_file):
            counts, passed = run(f"{number} {file.stem}", [str(file)], options.log, options.timeout)
            ok = ok and passed
            total = {k: total.get(k, 0) + counts.get(k, 0) for k in {*total, *counts}}
        print(f"all files: {total}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
