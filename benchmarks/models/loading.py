"""Weights of files: read to where offload() uses them, beside dd and safetensors."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import managedmem.torch as ours

from .common import GIB, Job, Measured, Meter, Place
from .process import library

NEED = (2 * GIB, 12 * GIB)  # of the device and of the host, at full size
COPIES = 3  # measurements of each contender


class Files:
    """A file with the weights of layers, and the contenders that read it."""

    def __init__(self, place: Place, folder: str, width: int = 0, count: int = 0) -> None:
        self.place = place
        self.width = width or (64 if place.tiny else 4096)
        self.count = count or place.layers(4 if place.tiny else 128)
        self.path = Path(folder, "model.safetensors")
        self.nbytes = self.width**2 * 2 * self.count
        self.write()

    def write(self) -> None:
        """Layer n has the number n + 1 in each element; nothing here makes a context of CUDA."""
        size, header = self.width**2 * 2, {}
        for number in range(self.count):
            offsets = [number * size, (number + 1) * size]
            shape = [self.width, self.width]
            entry = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
            header[f"{number}.weight"] = entry
        text = json.dumps(header).encode()
        with self.path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for number in range(self.count):
                row = torch.full((self.width,), number + 1, dtype=torch.bfloat16)
                file.write(row.view(torch.uint8).numpy().tobytes() * self.width)

    def model(self) -> Any:
        layers = (nn.Linear(self.width, self.width, bias=False) for _ in range(self.count))
        with torch.device("meta"):
            return nn.Sequential(*layers).to(torch.bfloat16)

    def measured(self, read: Callable[[], list[Any]]) -> Measured:
        """The time of each reading, the most memory of the first, and the first number of each
        tensor."""
        times, most, sums = [], 0.0, []
        for _ in range(COPIES):
            forget_most()
            before = host_bytes("VmRSS")
            begin = time.perf_counter_ns()
            tensors = read()
            times.append(float(time.perf_counter_ns() - begin))
            most = most or host_bytes("VmHWM") - before
            sums = [tensor.detach().view(-1)[:1].clone() for tensor in tensors]
            del tensors
        values = {("reading", "ms"): times, ("host memory, most", "MB"): [most]}
        return Measured(values | {("host memory, most@the file", "MB"): [self.nbytes]}, sums)

    def dd(self, meter: Meter) -> Measured:
        def read() -> list[Any]:
            command = ["dd", f"if={self.path}", "of=/dev/null", "bs=16M"]
            subprocess.run(command, check=True, capture_output=True)
            return []

        times = self.measured(read).values["reading", "ms"]
        return Measured({("reading", "ms"): times})

    def safetensors(self, meter: Meter) -> Measured:
        """Every page is touched: torch would read the file at the first use."""
        load = library("safetensors.torch").load_file

        def read() -> list[Any]:
            tensors = load(self.path)
            for tensor in tensors.values():
                tensor.view(torch.uint8).view(-1)[::4096].sum()
            return [tensors[f"{number}.weight"] for number in range(self.count)]

        return self.measured(read)

    def ours(self, meter: Meter) -> Measured:
        def read() -> list[Any]:
            model = self.model()
            ours.load_model(model, self.path)
            return [layer.weight for layer in model]

        found = self.measured(read)
        model = self.model()
        ours.load_model(model, self.path)
        begin = time.perf_counter_ns()
        budget = max(self.nbytes // 4, 1)
        meter.watch(lambda: ours.offload(model, "cuda:0", budget=budget))
        found.values["offload() afterwards", "ms"] = [float(time.perf_counter_ns() - begin)]
        return found


def host_bytes(name: str) -> float:
    """The bytes in a line of the status of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (each for each in lines if each.startswith(f"{name}:"))
    return float(line.split()[1]) * 1024


def forget_most() -> None:
    """Let VmHWM begin at the present memory."""
    Path("/proc/self/clear_refs").write_text("5")


def jobs(place: Place) -> Iterator[Job]:
    """One file of 4 GiB, in the page cache."""
    with tempfile.TemporaryDirectory(prefix="managedmem-") as folder:
        files = Files(place, folder)
        contenders: dict[str, Callable[[Meter], Measured]] = {}
        if library("safetensors.torch") is not None:
            contenders["safetensors"] = files.safetensors
        contenders |= {"ours": files.ours, "dd": files.dd}
        yield Job(f"weights, {files.nbytes / 1e9:.1f} GB", contenders, ("dd",))
