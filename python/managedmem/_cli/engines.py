"""The engines of the demo: torch or CuPy on the GPU, NumPy or plain Python on the host.

Each engine works on the four ManagedBuffers of a job in place, without a copy: a GPU library takes
them by ``__cuda_array_interface__``, the host ones by the buffer protocol. An engine is a function
``engine(inputs, weights, scores, labels, stream)`` that fills ``scores`` and ``labels``. It must
not keep an array over a buffer after it returns: a buffer with a live host view cannot be closed.
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable
from operator import mul
from types import ModuleType
from typing import NamedTuple

from managedmem import Device, ManagedBuffer, Stream
from managedmem.digits import CLASSES, FEATURES

Multiply = Callable[[ManagedBuffer, ManagedBuffer, ManagedBuffer, ManagedBuffer, Stream], None]


class Engine(NamedTuple):
    """A function that does the product, and its properties."""

    name: str
    on_device: bool
    fast: bool
    multiply: Multiply
    note: str = ""


def _optional(name: str) -> ModuleType | None:
    """Import an optional package; None if it is missing or broken."""
    try:
        return importlib.import_module(name)
    except Exception:
        return None


def _torch(torch: ModuleType, device: Device) -> Multiply:
    place = torch.device("cuda", device.device_id)

    def multiply(
        inputs: ManagedBuffer,
        weights: ManagedBuffer,
        scores: ManagedBuffer,
        labels: ManagedBuffer,
        stream: Stream,
    ) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle, device=place)):
            x, w, s, out = (
                torch.as_tensor(buffer, device=place)
                for buffer in (inputs, weights, scores, labels)
            )
            torch.addmm(w[FEATURES], x, w[:FEATURES], out=s)
            out.copy_(s.argmax(dim=1))

    return multiply


def _cupy(cupy: ModuleType, device: Device) -> Multiply:
    def multiply(
        inputs: ManagedBuffer,
        weights: ManagedBuffer,
        scores: ManagedBuffer,
        labels: ManagedBuffer,
        stream: Stream,
    ) -> None:
        with cupy.cuda.Device(device.device_id), cupy.cuda.ExternalStream(stream.handle):
            x, w, s, out = (cupy.asarray(buffer) for buffer in (inputs, weights, scores, labels))
            cupy.matmul(x, w[:FEATURES], out=s)
            s += w[FEATURES]
            out[...] = s.argmax(axis=1)

    return multiply


def _numpy(numpy: ModuleType) -> Multiply:
    def multiply(
        inputs: ManagedBuffer,
        weights: ManagedBuffer,
        scores: ManagedBuffer,
        labels: ManagedBuffer,
        stream: Stream,
    ) -> None:
        stream.sync()  # the host computes next, after all work of the stream
        x, w, s, out = (numpy.asarray(buffer) for buffer in (inputs, weights, scores, labels))
        numpy.matmul(x, w[:FEATURES], out=s)
        s += w[FEATURES]
        out[...] = s.argmax(axis=1)

    return multiply


def _plain(
    inputs: ManagedBuffer,
    weights: ManagedBuffer,
    scores: ManagedBuffer,
    labels: ManagedBuffer,
    stream: Stream,
) -> None:
    stream.sync()
    with (
        memoryview(inputs).cast("B") as x_bytes,
        memoryview(weights).cast("B") as w_bytes,
        memoryview(scores).cast("B") as s_bytes,
        memoryview(labels).cast("B") as out,
        x_bytes.cast("f") as x,
        w_bytes.cast("f") as w,
        s_bytes.cast("f") as s,
    ):
        columns = [w[digit : FEATURES * CLASSES : CLASSES].tolist() for digit in range(CLASSES)]
        start = w[FEATURES * CLASSES :].tolist()
        for row in range(len(out)):
            pixels = x[row * FEATURES : (row + 1) * FEATURES].tolist()
            sums = [
                sum(map(mul, pixels, column), bias)
                for column, bias in zip(columns, start, strict=True)
            ]
            s[row * CLASSES : (row + 1) * CLASSES] = array("f", sums)
            out[row] = sums.index(max(sums))


def choose(emulated: bool, device: Device) -> Engine:
    """The best engine here: a GPU library on a real driver, else NumPy, else plain Python."""
    note = ""
    if not emulated:
        torch = _optional("torch")
        if torch is not None and torch.cuda.is_available():
            name = f"torch {torch.__version__} on {device}"
            return Engine(name, True, True, _torch(torch, device))
        cupy = _optional("cupy")
        if cupy is not None and cupy.cuda.is_available():
            name = f"CuPy {cupy.__version__} on {device}"
            return Engine(name, True, True, _cupy(cupy, device))
        note = "neither torch nor CuPy can use the GPU here, so the host computes"
    numpy = _optional("numpy")
    if numpy is not None:
        return Engine(f"NumPy {numpy.__version__} on the host", False, True, _numpy(numpy), note)
    return Engine("plain Python on the host", False, False, _plain, note)
