"""Run all that needs a GPU on the GPUs of this machine, and write a record of the results.

    python tools/gpu_suite.py whole files sanitizer benchmarks --record docs/results
    python tools/gpu_suite.py two_devices --record docs/results

- whole: the test suite in one process, with the conformance program among its tests
- files: each test file in a process of its own, in a random order that --seed repeats; also the
  files whose tests start programs, such as the examples
  (--jobs 3 runs three files at a time, each with a third of the memory that tests may hold;
  files that measure the whole device run alone, after the others)
- two_devices: the tests that one device skips
- sanitizer: the tests that copy or launch, under compute-sanitizer (memcheck)
- benchmarks: python -m benchmarks, all groups or those of --groups

The package must be importable (built in place with PYTHONPATH=python, or installed). Results stay
in the folder --log, so that runs can be made one by one; --record writes a page about all of them.
The exit status is 0 if every run passed.
"""

import argparse
import concurrent.futures
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import gpu_record

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "MANAGEDMEM_DRIVER": "cuda", "PYTHONUNBUFFERED": "1"}
NO_TESTS_RAN = 5  # pytest's status where a file skips as a whole
SANITIZER = ["compute-sanitizer", "--tool=memcheck", "--report-api-errors=no", "--error-exitcode=9"]
SANITIZED = [
    "core/test_capture",
    "core/test_copy_contents",
    "core/test_copy_kinds",
    "core/test_plan",
    "core/test_plan_execution",
    "core/test_streams",
    "interop/test_cupy",
    "interop/test_numba",
    "interop/test_torch_moving",
    "robustness/test_host_functions",
]
# Of tests/project, the files that run something on the device. The others read sources or compile,
# which a GPU does not change.
USING_A_GPU = {"test_benchmarks", "test_demo", "test_docs", "test_examples", "test_top_command"}
ALONE = {
    "test_docs",
    "test_frames",
    "test_torch_offload_budget",
}  # they measure times, or the free memory of the device
PLANTED_FAULT = """
import cupy
cupy.cuda.set_allocator(None)
source = 'extern "C" __global__ void far(int *p) { p[1 << 24] = 1; }'
cupy.RawKernel(source, "far")((1,), (1,), (cupy.zeros(16, "i4"),))
cupy.cuda.Device().synchronize()
"""


def run(command, output, timeout):
    """Run a command with its output in a file; its exit status, or "timeout"."""
    with output.open("w") as file:
        try:
            return subprocess.run(
                command, cwd=ROOT, env=ENVIRONMENT, stdout=file, stderr=file, timeout=timeout
            ).returncode
        except subprocess.TimeoutExpired:
            return "timeout"


def require_gpu():
    """Ends the command if no test could run."""
    code = "import managedmem; managedmem.Device(0)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    if done.returncode != 0:
        reason = done.stderr.partition("\nmanagedmem.")[2] or done.stderr
        sys.exit(f"gpu_suite.py needs the package and a GPU on this machine.\n{reason.strip()}")


def count_tests(report):
    """The counts, failed tests and reasons of skips in a JUnit report of pytest."""
    counts, failed, reasons = Counter(), [], Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        kind = next((k for k in ("failure", "error", "skipped") if k in kinds), "passed")
        counts[{"failure": "failed", "error": "failed"}.get(kind, kind)] += 1
        if kind in ("failure", "error"):
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        if kind == "skipped":
            reasons[case.find("skipped").get("message")] += 1
    return {"counts": dict(counts), "failed": failed, "reasons": dict(reasons)}


def telling_part(text):
    """The end of an output, or the start of a crash, whose stacks of threads can be long."""
    crash = text.rfind("Fatal Python error")
    begin = max(crash - 1000, 0) if crash >= 0 else max(len(text) - 4000, 0)
    return text[begin : begin + 4000]


def run_tests(name, arguments, log, timeout, before=()):
    """Run pytest, print its counts or how it ended, and return the results."""
    start = time.monotonic()
    output, report = log / f"{name}.txt", log / f"{name}.xml"
    report.unlink(missing_ok=True)
    command = [*before, sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider"]
    command += ["--durations=20"]
    command += ["--capture=sys"]  # what C code writes before it ends the process is kept
    status = run([*command, f"--junitxml={report}", *arguments], output, timeout)
    complete = report.exists()  # not if the process ended before pytest did
    found = count_tests(report) if complete else {"counts": {}, "failed": [], "reasons": {}}
    found["seconds"] = round(time.monotonic() - start)
    if not found["failed"] and not (complete and status in (0, NO_TESTS_RAN)):
        found["failed"] = [f"{name} ended with {status}"]
    print(f"{name:32s} {found['counts']} in {found['seconds']} s", flush=True)
    if found["failed"]:
        print(telling_part(output.read_text(errors="replace")), flush=True)
    return found


def need_passed(name, found):
    """A run in which no test passed shows nothing, so it failed."""
    if not found["counts"].get("passed") and not found["failed"]:
        found["failed"] = [f"{name}: no test passed"]
    return found


def files_of_tests():
    """The test files that use a GPU."""
    found = sorted((ROOT / "tests").glob("**/test_*.py"))
    return [f for f in found if f.parent.name != "project" or f.stem in USING_A_GPU]


def run_whole(options):
    files = [str(file) for file in files_of_tests() if file.parent.name != "project"]
    found = run_tests("whole", files, options.log, options.timeout)
    return need_passed("whole", found)


def run_two_devices(options):
    found = run_tests("two_devices", ["--two-devices"], options.log, options.timeout)
    return need_passed("two_devices", found)


def run_files(options):
    seed = options.seed if options.seed is not None else random.randrange(10**6)
    files = files_of_tests()
    random.Random(seed).shuffle(files)
    print(f"{len(files)} files in the order of seed {seed}", flush=True)
    counts, reasons, failed, start = Counter(), Counter(), [], time.monotonic()
    files = files[options.from_file :]
    alone = [file for file in files if options.jobs > 1 and file.stem in ALONE]

    def run_file(file):
        return run_tests(file.stem, [str(file)], options.log, options.timeout)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(run_file, [file for file in files if file not in alone]))
    for found in [*results, *map(run_file, alone)]:
        counts.update(found["counts"])
        reasons.update(found["reasons"])
        failed += found["failed"]
    note = f"seed {seed}" + (f", from file {options.from_file}" if options.from_file else "")
    note += f", {options.jobs} at a time" if options.jobs > 1 else ""
    found = {
        "counts": dict(counts),
        "failed": failed,
        "reasons": dict(reasons),
        "seconds": round(time.monotonic() - start),
        "note": note,
    }
    return need_passed("files", found)


def run_sanitizer(options):
    """Run a kernel that writes out of bounds, which must be found, and then the tests."""
    if shutil.which(SANITIZER[0]) is None:
        return {"failed": [f"{SANITIZER[0]} is not on the PATH"]}
    planted = options.log / "planted.txt"
    run([*SANITIZER, sys.executable, "-c", PLANTED_FAULT], planted, options.timeout)
    if "Invalid __global__ write" not in planted.read_text(errors="replace"):
        print(planted.read_text(errors="replace")[-2000:])
        return {"failed": ["the planted write out of bounds was not found"]}
    before = [*SANITIZER, "--target-processes=application-only"]
    files = [f"tests/{name}.py" for name in SANITIZED]
    found = run_tests("sanitizer", files, options.log, options.timeout, before)
    found["note"] = "memcheck; finds a planted write; " + ", ".join(SANITIZED)
    return need_passed("sanitizer", found)


def run_benchmarks(options):
    start = time.monotonic()
    output, results = options.log / "benchmarks.txt", options.log / "benchmarks.json"
    command = [sys.executable, "-m", "benchmarks", *options.groups, f"--json={results}"]
    status = run(command, output, options.timeout)
    print(output.read_text(errors="replace")[-8000:], flush=True)
    return {
        "failed": [] if status == 0 else [f"benchmarks ended with {status}"],
        "seconds": round(time.monotonic() - start),
        "text": output.read_text(errors="replace"),
    }


RUNS = {
    "whole": run_whole,
    "files": run_files,
    "two_devices": run_two_devices,
    "sanitizer": run_sanitizer,
    "benchmarks": run_benchmarks,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("runs", nargs="*", choices=RUNS)
    add("--seed", type=int, help="of the order of the files")
    add("--from-file", type=int, default=0, help="where to go on in that order")
    add("--jobs", type=int, default=1, help="files at a time")
    add("--budget", type=int, default=512, help="MiB of managed memory that all jobs may hold")
    add("--groups", nargs="*", default=[], help="of the benchmarks")
    add("--timeout", type=float, default=1800, help="seconds for each process")
    add("--log", type=Path, default=ROOT / ".gpu-suite", help="folder of outputs and results")
    add("--record", type=Path, metavar="FOLDER", help="write a dated page about all results there")
    add("--commit", help="of the sources, if they are not a clone")
    options = parser.parse_args()
    ENVIRONMENT["MANAGEDMEM_TEST_BUDGET"] = str(options.budget // options.jobs)
    if options.runs:
        require_gpu()
    options.log.mkdir(parents=True, exist_ok=True)
    path = options.log / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for name in options.runs:
        results[name] = RUNS[name](options)
        path.write_text(json.dumps(results, indent=1))
    if options.record:
        print("written:", gpu_record.write(results, options.record, options.commit))
    return 1 if any(result["failed"] for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
