"""The ranks of a job in files for Perfetto: the name of each process, and one file of several.

A rank is known by the variables of the launcher: torchrun, Open MPI, MPICH, Slurm. Merging reads
files of ``to_chrome_trace()``, which have an event on each line, and needs no driver.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from managedmem import _managedmem

VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
STRIDE = 1_000_000  # between the numbers of two files' processes and rows
ARROWS = 1 << 32  # between the ids of arrows, as numbers: Perfetto reads text as hexadecimal


def rank_of_process() -> int | None:
    """The number that the launcher has given this process, or None."""
    texts = (os.environ.get(name, "") for name in VARIABLES)
    return next((int(text) for text in texts if text.isdecimal()), None)


def process_name() -> str:
    """The name of this process in a trace; for a rank, with its number, host and device."""
    rank = rank_of_process()
    if rank is None:
        return f"managed memory, process {os.getpid()}"
    try:
        device = f", {_managedmem.Device()}"
    except _managedmem.CUDAError:
        device = ""
    return f"rank {rank} on {platform.node()}{device}: managed memory, process {os.getpid()}"


def clock_name() -> str:
    """What processes with the same monotonic clock have in common: the boot of their host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def merge(paths: Sequence[str], target: str) -> None:
    """Write the events of several files to one.

    Files of the first file's host keep their times; times of other hosts are shifted by the
    difference of the hosts' realtime clocks. Raises ValueError for a file that
    ``to_chrome_trace()`` has not written, or whose end is missing, and OSError; the target is then
    left as it was.
    """
    headers = [header_of(path) for path in paths]
    first = headers[0]
    part = Path(target).with_name(f".{secrets.token_hex(8)}.tmp")  # a name that nobody else has
    try:
        with part.open("x", encoding="utf-8") as file:
            whole = {key: first[key] for key in ("displayTimeUnit", "baseTimeNanoseconds")}
            whole["otherData"] = {"files": [header["otherData"] for header in headers]}
            file.write(f'{json.dumps(whole)[:-1]},"traceEvents":[\n')
            separator = ""
            for number, path in enumerate(paths):
                for event in moved(path, headers[number], first, number):
                    file.write(separator + json.dumps(event, ensure_ascii=False))
                    separator = ",\n"
            file.write("\n]}\n")
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def header_of(path: str) -> dict[str, Any]:
    """The first line of a file as a dict: it describes the trace."""
    try:
        with open(path, encoding="utf-8") as file:
            header: dict[str, Any] = json.loads(f"{file.readline(1 << 20)}]}}")
        header["baseTimeNanoseconds"] + 0, header["displayTimeUnit"], header["otherData"]["clock"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{path} is not a file of to_chrome_trace()") from None
    return header


def moved(
    path: str, header: dict[str, Any], first: dict[str, Any], number: int
) -> Iterator[dict[str, Any]]:
    """The events of a file, with the numbers and times that they have in the merged file."""
    shift = 0.0
    if header["otherData"]["clock"] != first["otherData"]["clock"]:
        shift = (header["baseTimeNanoseconds"] - first["baseTimeNanoseconds"]) / 1e3
    end = ""
    with open(path, encoding="utf-8") as file:
        next(file)
        for line in file:
            end = line.strip()
            if not end.startswith("{"):
                continue
            try:
                event = renumbered(json.loads(end.removesuffix(",")), number, shift)
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ValueError(
                    f"{path} has an event that to_chrome_trace() does not write: {end[:60]!r}"
                ) from None
            yield event
            if event["name"] == "process_name":
                order = header["otherData"].get("rank")
                place = {"sort_index": number if order is None else order}
                yield {**event, "name": "process_sort_index", "args": place}
    if end != "]}":
        raise ValueError(f"{path} has no end: it is not written yet, or cut off")


def renumbered(event: dict[str, Any], number: int, shift: float) -> dict[str, Any]:
    """An event with the numbers and the time that it has in the merged file."""
    copy = {**event, "name": event["name"], "pid": event["pid"] + number * STRIDE}
    copy["tid"] = event["tid"] + number * STRIDE
    if "ts" in event:
        copy["ts"] = round(event["ts"] + shift, 3)
    if "id" in event:
        copy["id"] = event["id"] + number * ARROWS
    return copy
