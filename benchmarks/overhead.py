"""The cost of one call: ours, the bare driver call, and each peer's."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import managedmem
from managedmem import Device, Host

from . import bare, peers
from .measure import KIB, MIB, Contender, Row, side_by_side, statement

NEED = 4 * MIB  # ours and CuPy's


@dataclass(frozen=True)
class Operation:
    """One operation: its loop in bare.c, and the statement of each contender."""

    title: str
    loop: str | None
    size: int
    goal: float | None  # ns above the bare call; without a bare call, ns in all
    statements: dict[str, str]


OPERATIONS = [
    Operation(
        "buf.read_mostly",
        "read_mostly",
        4 * KIB,
        60,
        {
            "ours": "buf.read_mostly",
            "cuda.core": "core_buf.read_mostly",
            "cuda.bindings": "drv.cuMemRangeGetAttribute(4, READ_MOSTLY, address, size)",
            "ctypes": "raw_attribute(answer_address, 4, 1, address, size)",
        },
    ),
    Operation(
        "buf.preferred_location",
        "preferred_location",
        4 * KIB,
        None,
        {"ours": "buf.preferred_location", "cuda.core": "core_buf.preferred_location"},
    ),
    Operation(
        "device in buf.accessed_by",
        "accessed_by",
        4 * KIB,
        100,
        {"ours": "device in buf.accessed_by", "cuda.core": "core_device in core_buf.accessed_by"},
    ),
    Operation(
        "buf.read_mostly = True",
        "set_read_mostly",
        2 * MIB,
        90,
        {
            "ours": "buf.read_mostly = True",
            "cuda.core": "core_buf.read_mostly = True",
            "cuda.bindings": "drv.cuMemAdvise(address, size, SET_READ_MOSTLY, on_device)",
            "CuPy": "cupy_memory.advise(1, cupy_device)",
        },
    ),
    Operation(
        "buf.preferred_location = device",
        "set_preferred_location",
        2 * MIB,
        90,
        {
            "ours": "buf.preferred_location = device",
            "cuda.core": "core_buf.preferred_location = core_device",
        },
    ),
    Operation(
        "accessed_by.add + discard",
        "set_accessed_by_twice",
        2 * MIB,
        None,
        {
            "ours": "buf.accessed_by.add(host); buf.accessed_by.discard(host)",
            "cuda.core": "core_buf.accessed_by.add(core_host);"
            " core_buf.accessed_by.discard(core_host)",
        },
    ),
    Operation(
        "buf.prefetch(device, stream=s), resident",
        "prefetch",
        4 * KIB,
        120,
        {
            "ours": "buf.prefetch(device, stream=stream)",
            "cuda.core": "core_buf.prefetch(core_device, stream=core_stream)",
            "cuda.bindings": "drv.cuMemPrefetchAsync(address, size, on_device, 0, cu_stream)",
            "ctypes": "raw_prefetch(address, size, 0, stream_handle)",
            "CuPy": "cupy_memory.prefetch(cupy_stream)",
        },
    ),
    Operation(
        "buf.prefetch(device, stream=s), resident",
        "prefetch",
        2 * MIB,
        120,
        {
            "ours": "buf.prefetch(device, stream=stream)",
            "cuda.core": "core_buf.prefetch(core_device, stream=core_stream)",
            "cuda.bindings": "drv.cuMemPrefetchAsync(address, size, on_device, 0, cu_stream)",
            "ctypes": "raw_prefetch(address, size, 0, stream_handle)",
            "CuPy": "cupy_memory.prefetch(cupy_stream)",
        },
    ),
    Operation(
        "managedmem.prefetch(buf, device, stream=s)",
        "prefetch",
        4 * KIB,
        None,
        {"ours": "prefetch(buf, device, stream=stream)"},
    ),
    Operation(
        "buf.fill(1, stream=s)",
        "fill",
        4 * KIB,
        None,
        {"ours": "buf.fill(1, stream=stream)", "cuda.core": "core_buf.fill(1, stream=core_stream)"},
    ),
    Operation(
        "allocate and close",
        "allocate",
        2 * MIB,
        None,
        {
            "ours": "resource.allocate(size).close()",
            "cuda.bindings": "drv.cuMemFree(drv.cuMemAllocManaged(size, ATTACH_GLOBAL)[1])",
            "CuPy": "cupy_cuda.ManagedMemory(size)",
            "numba": "numba_cuda.managed_array(size, 'uint8')",
        },
    ),
    Operation(
        "Host(numa_id=1)",
        None,
        4 * KIB,
        60,
        {"ours": "Host(numa_id=1)", "cuda.core": "core.Host(numa_id=1)"},
    ),
    Operation(
        "ManagedBuffer.from_handle(address, size)",
        None,
        4 * KIB,
        150,
        {
            "ours": "from_handle(address, size)",
            "cuda.core": "core.ManagedBuffer.from_handle(address, size)",
        },
    ),
]


def names_in(code: str) -> set[str]:
    """The global names that a statement reads."""
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}


def contenders(operation: Operation, names: dict[str, Any]) -> dict[str, Contender]:
    """The contenders of an operation that can run here, by name; the bare call first."""
    target = bare.Target(names["address"], operation.size, names["stream_handle"], 0)
    found: dict[str, Contender] = {}
    if operation.loop == "set_accessed_by_twice":
        found["bare C"] = lambda n: 2 * bare.nanoseconds("set_accessed_by", target, 2 * n)
    elif operation.loop is not None:
        loop = operation.loop
        found["bare C"] = lambda n: bare.nanoseconds(loop, target, n)
    for name, code in operation.statements.items():
        if names_in(code) <= names.keys():
            found[name] = statement(code, names)
    return found


def own_names(size: int, stream: managedmem.Stream) -> dict[str, Any]:
    """The names for our statements, with a buffer of this size on the device."""
    resource = managedmem.ManagedMemoryResource()
    buf = resource.allocate(size)
    device = Device(0)
    buf.prefetch(device, stream=stream)
    stream.sync()
    return {
        "buf": buf,
        "address": buf.handle,
        "size": size,
        "device": device,
        "host": Host(),
        "Host": Host,
        "stream": stream,
        "stream_handle": stream.handle,
        "resource": resource,
        "prefetch": managedmem.prefetch,
        "from_handle": managedmem.ManagedBuffer.from_handle,
    }


def peers_names(names: dict[str, Any]) -> dict[str, Any]:
    """The further names for the statements of peers."""
    return {
        **peers.cuda_core(names["stream"], names["buf"]),
        **peers.bindings(names["stream"]),
        **peers.raw(),
        **peers.cupy(names["size"]),
        **peers.numba(),
    }


def note_for(operation: Operation) -> str:
    """The goal, or ""."""
    if operation.goal is None:
        return ""
    return f"goal {'bare + ' if operation.loop else ''}{operation.goal:.0f} ns"


def title_of(operation: Operation) -> str:
    """The operation and the size of its buffer, a unique title."""
    return f"{operation.title}, {operation.size // KIB} KiB"


def row(operation: Operation, stream: managedmem.Stream, count: int, repetitions: int) -> Row:
    """One operation, by all of its contenders here."""
    names = own_names(operation.size, stream)
    names |= peers_names(names)

    def finish() -> None:
        """Wait, so that queued work does not slow down the next contender."""
        stream.sync()
        if "cupy_stream" in names:
            names["cupy_stream"].synchronize()

    with names["buf"]:
        return side_by_side(
            title_of(operation),
            contenders(operation, names),
            count=count,
            repetitions=repetitions,
            after=finish,
            note=note_for(operation),
        )


def measure(count: int = 1000, repetitions: int = 21) -> Iterator[Row]:
    """A row for each operation."""
    with managedmem.Stream() as stream:
        for operation in OPERATIONS:
            yield row(operation, stream, count, repetitions)
