"""`python -m benchmarks`: measure everything on the GPU, print tables, write JSON."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import managedmem

from . import (
    advice,
    attribution,
    batches,
    copies,
    deferring,
    experts,
    footprint,
    instructions,
    jobs,
    many,
    models,
    npbench,
    overhead,
    pipeline,
    progress,
    report,
    residency,
    results,
    tracing,
    tuning,
)
from .report import Group, Report
from .um_programs import PROGRAMS

GROUPS = {
    "overhead": Group(
        "One call",
        "Until the call returns; the stream is waited for between measurements. numba has no public"
        " call that advises or prefetches; it gives memory back later, several at once.",
        overhead.measure,
        overhead.NEED,
    ),
    "deferring": Group(
        "Prefetches that return at once",
        "call: until it returns; end: until the stream has done it; busy: a call on a stream with"
        " work before it. plain is defer=False, queued defer=True, auto the default.",
        deferring.measure,
        deferring.NEED,
    ),
    "advice": Group(
        "Advice on pages that are there",
        "Until the call returns, after which the advice holds. The pages have just been prefetched"
        " to where they are.",
        advice.measure,
        advice.NEED,
    ),
    "pipeline": Group(
        "A pipeline over several buffers",
        "The host writes a buffer, the GPU works on the one before, the one before that comes home"
        " and is read. CuPy has no name for the host on CUDA 13: there, pages come home by faults.",
        pipeline.measure,
        pipeline.NEED,
    ),
    "jobs": Group(
        "Whole jobs",
        "256 MiB, arithmetic by torch, from the first call to the end of the work. The pinned copy"
        " moves the same bytes from or to pinned host memory: the limit. Advice is given before the"
        " first call, once.",
        jobs.measure,
        jobs.NEED,
    ),
    "results": Group(
        "Results to the host",
        results.DESCRIPTION,
        results.measure,
        results.NEED,
    ),
    "footprint": Group(
        "Import and memory",
        "Imports in fresh interpreters; memory is what the process gained.",
        footprint.measure,
        footprint.NEED,
    ),
    "batches": Group(
        "Several ranges",
        "From the call to the end of the work on the stream, timed by the same C code for all."
        " loop, batch and one call are bare C; ours is one call with the buffers; plan is"
        " PrefetchPlan.execute, its ranges laid out before, as those of bare C are. cuda.core is"
        " its *_batch, CuPy a loop over its memPrefetchAsync.",
        batches.measure,
        batches.NEED,
        batches.summary,
    ),
    "copies": Group(
        "Many copies",
        "From the call to the end of the work on the stream. loop is copy_from() for each pair;"
        " hint is src_location=; cuda.core is its copy_batch.",
        copies.measure,
        copies.NEED,
    ),
    "many": Group(
        "Thousands of ranges",
        "Each with 8 KiB: the time until the stream has done all, for one of them. bare C is one"
        " call over neighbours and a loop over others; advice goes to the device and the host in"
        " turn, and ours asks for the old one first, to take all back if one fails.",
        many.measure,
        many.NEED,
    ),
    "attribution": Group("Events of a trace", attribution.DESCRIPTION, attribution.measure),
    "residency": Group(
        "Where pages are",
        "One call of residency(). Bare C reads the page map and counts the bytes on the host;"
        " ours also makes runs of them and asks the driver for the last prefetch of the others.",
        residency.measure,
        residency.NEED,
    ),
    "tracing": Group("Traces", tracing.DESCRIPTION, tracing.measure, tracing.NEED, tracing.summary),
    **models.GROUPS,
    "experts": Group("Experts", experts.DESCRIPTION, experts.measure, experts.NEED),
    "tuning": Group(
        "tune() and the placements of experts",
        "Steps of four programs: the host fills arrays, the device computes, the host reads the"
        " results. hints and prefetch are the placements of um-apps (Chien and others, 2019)."
        " Advice is given before the steps. Ratios are those of neighbouring measurements, with"
        " the interval of their median.",
        tuning.measure,
        tuning.NEED,
        tuning.summary,
        ("program",),
    ),
    "npbench": Group(
        "Programs of others, before and after tune()",
        "NPBench's CuPy programs, preset S, over CuPy's managed allocator: the host fills the"
        " arguments, the program runs, the host reads the results.",
        npbench.measure,
        npbench.NEED,
        npbench.summary,
        ("npbench",),
    ),
}
# The groups that the emulated driver can run, because they check bytes too.
EMULATED_GROUPS = {"attribution", "experts", "tracing", *models.GROUPS}
# Includes the group that only --emulator measures.
ALL_GROUPS = {
    **GROUPS,
    "instructions": Group(
        "Instructions of one call", instructions.DESCRIPTION, instructions.measure
    ),
}


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("groups", nargs="*", metavar="GROUP", help=f"only these groups: {', '.join(GROUPS)}")
    add("--json", type=Path, metavar="FILE", help="file to write (default: benchmarks-DATE.json)")
    add("--read", type=Path, metavar="FILE", action="append", help="tables of an earlier run")
    add("--into", type=Path, metavar="FILE.md", help="put the tables into a page, or a new one")
    add("--plot", type=Path, metavar="FILE", help="draw language, or deferring and jobs")
    add("--program", action="append", choices=PROGRAMS, help="tuning: only this program")
    add("--npbench", type=Path, metavar="FOLDER", help="npbench: a checkout of spcl/npbench")
    add("--emulator", action="store_true", help="count instructions, on the emulated driver")
    add(
        "--against",
        type=Path,
        metavar="FILE",
        help="fail if calls take more instructions than in this file",
    )
    found = parser.parse_args(arguments)
    if unknown := set(found.groups) - GROUPS.keys():
        parser.error(f"no such group: {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    if found.against and not (found.emulator or found.read):
        parser.error("--against compares instructions: give --emulator, or --read a file of them")
    return found


def file_of(results: Report, options: argparse.Namespace) -> Path:
    """The file to write."""
    kind = "instructions" if options.emulator else "benchmarks"
    return options.json or Path(f"{kind}-{results.machine['date']}.json")


def measured(names: list[str], options: argparse.Namespace) -> Report:
    """Measure the groups; print each and write the file when one is done."""
    results = Report(report.machine(), {})
    if managedmem.emulator.is_active() and names != ["instructions"]:
        results.machine["note"] = "Emulated driver: times mean nothing."
    print(results.heading(), "\n", flush=True)
    for name in names:
        group = ALL_GROUPS[name]
        results.groups[name] = progress.rows_of(
            name, group, {name: getattr(options, name) for name in group.options}
        )
        results.write(file_of(results, options))
        print(report.section(group, results.groups[name]), flush=True)
    return results


def read(paths: list[Path], names: list[str]) -> Report:
    """The results of earlier runs, in the usual order."""
    found = Report.read(*paths)
    chosen = [name for name in ALL_GROUPS if name in found.groups and name in (names or ALL_GROUPS)]
    return Report(found.machine, {name: found.groups[name] for name in chosen})


def text_of(results: Report) -> str:
    """All tables, below their machine and versions."""
    sections = [report.section(ALL_GROUPS[name], rows) for name, rows in results.groups.items()]
    return "\n".join([f"{results.heading()}\n", *sections])


def main(arguments: list[str] | None = None) -> int:
    """Measure, or read earlier results; return the exit status, 1 if something failed."""
    options = parsed(arguments)
    if options.read:
        results = read(options.read, options.groups)
        print(text_of(results))
    elif options.emulator:
        os.environ["MANAGEDMEM_DRIVER"] = "emulator"
        results = measured(["instructions"], options)
    else:
        names = options.groups or list(GROUPS)
        if managedmem.emulator.is_active() and not EMULATED_GROUPS.issuperset(names):
            raise SystemExit(
                "benchmarks: times on the emulated driver mean nothing; use --emulator, or one of"
                f" the groups {', '.join(sorted(EMULATED_GROUPS))}"
            )
        managedmem.Device(0).set_current()  # the bare calls need a context
        results = measured(names, options)
    if not options.read or options.json:
        results.write(file_of(results, options))
        print(f"written: {file_of(results, options)}")
    if options.into:
        if not options.into.exists():
            report.new_page(options.into, results.machine)
        report.replace_between(options.into, text_of(results))
    if options.plot:
        from . import plot

        plot.draw(results, options.plot)
    grown = options.against and instructions.compare(Report.read(options.against), results)
    failed = [] if options.read else progress.broken(results)
    for line in failed:
        progress.say(f"benchmarks: failed: {line}")
    return 1 if grown or failed else 0


if __name__ == "__main__":
    sys.exit(main())
