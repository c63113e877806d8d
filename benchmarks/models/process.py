"""Runs the contenders of a job, each in a process of its own, and makes rows of what they measured.

A server without a context of CUDA imports the libraries once and forks a process for each
contender, so that each begins with clean memory. On the emulated driver, where this does not
matter, all run in the caller's process.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ..measure import Result, Row, reason

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0  # that a contender may take
MARK = "ROW "  # before each row on the output of the server, to which libraries write too
SHARES = (1.0, 0.5, 0.25)  # the sizes of models that are tried
SPARE = 8 << 30  # left free on the device and on the host
FACTS = {  # for the environment of a server, before it imports torch
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # a look for the GPU makes no context
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # steps that can be repeated
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}

Found = dict[str, Any]


def library(name: str) -> Any:
    """A module of a library, or None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def ended(pid: int, end: float, get: int) -> bytes:
    """What a process writes until it ends. Kills it, and raises TimeoutError, when its time is
    over."""
    data = b""
    while True:
        if not select.select([get], [], [], max(0.0, end - time.monotonic()))[0]:
            os.kill(pid, signal.SIGKILL)
            raise TimeoutError(f"not done after {SECONDS:.0f} s")
        part = os.read(get, 1 << 16)
        if not part:
            return data
        data += part


def in_fork(work: Callable[[], Found]) -> Found:
    """The result of a function in a process of its own, or {"failed": reason}."""
    get, put = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(put, json.dumps(guarded(work)).encode())
            sys.stderr.flush()
        finally:
            os._exit(0)
    os.close(put)
    try:
        data = ended(pid, time.monotonic() + SECONDS, get)
    except TimeoutError as error:
        return {"failed": reason(error)}
    finally:
        os.close(get)
        status = os.waitpid(pid, 0)[1]
    return dict(json.loads(data)) if data else {"failed": f"the process died, status {status}"}


def guarded(work: Callable[[], Found]) -> Found:
    """The result of a function, or {"failed": reason}."""
    try:
        return work()
    except Exception as error:
        traceback.print_exc()
        return {"failed": reason(error)}


def measured(place: Any, contender: Any, path: Path, reference: Path) -> Found:
    """Run a contender, keep its numbers in a file, and compare them with those in `reference`."""
    import torch

    from .common import Meter

    meter = Meter(place)
    found = contender(meter)
    numbers = [tensor.detach().float().cpu() for tensor in found.numbers]
    torch.save(numbers, path)
    values = [[*figure, each] for figure, each in found.values.items()]
    compared = numbers and path != reference and reference.exists()
    other = difference(numbers, torch.load(reference)) if compared else None
    return {"values": values, "taken": meter.taken, "difference": other}


def difference(mine: list[Any], theirs: list[Any]) -> float:
    """The largest difference of tensors, as a part of the largest number of each; 0 if equal."""
    return max(
        float((a - b).abs().max() / b.abs().max().clamp_min(1e-9))
        for a, b in zip(mine, theirs, strict=False)
    )


def ratios(results: dict[str, Result], by_hand: tuple[str, ...]) -> str:
    """The medians and the least values, as multiples of those of the fastest by hand.

    On a machine that others use, the least ones say more.
    """
    medians = {name: found.median for name, found in results.items()}
    hand = min(medians.keys() & set(by_hand), key=medians.__getitem__, default=None)
    if hand is None or not medians[hand]:
        return ""
    note = f"in times {hand}: {multiples(medians, hand)}"
    least = {name: found.least for name, found in results.items() if found.least is not None}
    return f"{note} (the least values: {multiples(least, hand)})" if hand in least else note


def multiples(values: Mapping[str, float], unit: str) -> str:
    return "; ".join(f"{name} {value / values[unit]:.2f}" for name, value in values.items())


def rows_of(job: Any, found: dict[str, Found]) -> Iterator[Row]:
    """A row for each figure, and one for the memory that was taken."""
    failed = {name: each["failed"] for name, each in found.items() if "failed" in each}
    done = {name: each for name, each in found.items() if name not in failed}
    figures: dict[tuple[str, str], dict[str, Result]] = {}
    for contender, each in done.items():
        for figure, unit, values in each["values"]:
            name, _, other = figure.partition("@")
            figures.setdefault((name, unit), {})[other or contender] = Result.of(values)
    for (name, unit), results in figures.items():
        note = ratios(results, job.by_hand) if unit in ("ms", "us") else ""
        yield Row(f"{job.title}: {name}", results, unit, note)
    different = {name: each["difference"] for name, each in done.items()}
    equal = [
        f"{name} {f'{most:.1e}' if most else 'equal'}"
        for name, most in different.items()
        if most is not None
    ]
    taken = {name: Result(each["taken"]) for name, each in done.items()}
    note = f"numbers beside {next(iter(found))}: {'; '.join(equal)}" if equal else ""
    yield Row(f"{job.title}: taken", taken, "MB", note, failed)


def rows_of_job(job: Any, place: Any) -> Iterator[Row]:
    """Run all contenders of a job, and compare their numbers with those of the first."""
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{number}.pt") for number in range(len(job.contenders))]
        for (name, contender), path in zip(job.contenders.items(), paths, strict=True):
            begin = time.monotonic()
            work = partial(measured, place, contender, path, paths[0])
            found[name] = guarded(work) if place.tiny else in_fork(work)
            said = found[name].get("failed", f"{time.monotonic() - begin:.1f} s")
            print(f"  {job.title}: {name}: {said}", file=sys.stderr, flush=True)
    yield from rows_of(job, found)


def module_of(group: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{group}")


def free_memory(devices: int) -> Found:
    """The free bytes of the device that has the fewest, and of the host."""
    import torch

    from managedmem._limits import host_available

    free = min(torch.cuda.mem_get_info(ordinal)[0] for ordinal in range(devices))
    return {"device": free, "host": host_available() or 1 << 62}


def share_of(need: tuple[int, int], devices: int = 1) -> float:
    """The largest share of the full size of models for which devices and host have room."""
    free = in_fork(partial(free_memory, devices))
    if "failed" in free:
        raise RuntimeError(free["failed"])
    room = free["device"] - SPARE, free["host"] - SPARE
    for share in SHARES:
        if all(share * wanted <= has for wanted, has in zip(need, room, strict=True)):
            return share
    least = [(SHARES[-1] * wanted + SPARE) / 1e9 for wanted in need]
    raise RuntimeError(
        f"at least {least[0]:.0f} GB must be free on the device and {least[1]:.0f} GB on the host;"
        f" {free['device'] / 1e9:.0f} and {free['host'] / 1e9:.0f} GB are"
    )


def serve(group: str) -> None:
    """Measure a group and print its rows: the work of a server."""
    module = module_of(group)
    rows = module.rows() if hasattr(module, "rows") else rows_of_jobs(module)
    for row in rows:
        print(MARK + json.dumps(row.as_json()), flush=True)


def rows_of_jobs(module: ModuleType) -> Iterator[Row]:
    from .common import Place

    place = Place(tiny=False, share=share_of(module.NEED))
    for job in module.jobs(place):
        yield from rows_of_job(job, place)


def from_server(group: str, **variables: str) -> Iterator[Row]:
    """The rows of a group, measured by a server with these variables of the environment."""
    command = [sys.executable, "-m", __package__, group]
    environment = {**os.environ, **FACTS, **variables}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        last = ""
        for line in server.stdout:
            last = line.strip() or last
            if line.startswith(MARK):
                yield Row.from_json(json.loads(line[len(MARK) :]))
    if server.returncode:
        raise RuntimeError(last or f"the process of this group ended with {server.returncode}")


def here(group: str) -> Iterator[Row]:
    """The rows of a group on the emulated driver."""
    from .common import Place

    place = Place(tiny=True)
    for job in module_of(group).jobs(place):
        yield from rows_of_job(job, place)
