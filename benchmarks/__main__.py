"""`python -m benchmarks`: measure everything on the GPU, print tables, write JSON."""

from __future__ import annotations

import argparse
from pathlib import Path

import managedmem

from . import batches, deferring, footprint, jobs, overhead, report
from .measure import Row

GROUPS = {
    "overhead": ("One call", overhead.measure),
    "batches": ("Several ranges", batches.measure),
    "deferring": ("Prefetches that return at once", deferring.measure),
    "jobs": ("Whole jobs", jobs.measure),
    "footprint": ("Import and memory", footprint.measure),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []], help="only these groups")
    parser.add_argument("--json", type=Path, default=None, help="write all results there")
    arguments = parser.parse_args()
    if managedmem.driver_info()["emulated"]:
        parser.error("times on the emulated driver mean nothing; see --emulator")
    managedmem.Device(0).set_current()  # the bare calls need a context
    about = report.machine()
    print(f"{about['date']}, {about['gpu']}, CUDA {about['driver']}, Python {about['python']}")
    print(", ".join(f"{name} {version}" for name, version in about["versions"].items()), "\n")
    results: dict[str, list[Row]] = {}
    for name in arguments.groups or GROUPS:
        title, measure = GROUPS[name]
        results[name] = measure()
        print(report.table(title, results[name]), "\n", flush=True)
    if arguments.json:
        report.write_json(arguments.json, results)


if __name__ == "__main__":
    main()
