"""Thousands of ranges, such as the parameters of a model: the cost of each.

Each time is that of the whole call until the stream has done it, divided by the ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import managedmem
from managedmem import Device, Host

from . import bare, peers
from .batches import Cell, Layout
from .measure import KIB, Contender, Row, side_by_side

COUNTS = (100, 1000, 5000)
SIZE = 8 * KIB
NEED = 2 * SIZE * COUNTS[-1]

# Where the pages are before, where they go, and True for neighbours.
MOVES = (
    ("device", "device", True),
    ("device", "device", False),
    ("host", "device", True),
)


def per_range(contender: Contender, count: int) -> Contender:
    """The time of a contender, divided by the ranges."""
    return lambda n: contender(n) / count


def row_of(title: str, contenders: dict[str, Contender], count: int, repetitions: int) -> Row:
    """The times of all contenders, for one range."""
    each = {name: per_range(contender, count) for name, contender in contenders.items()}
    return side_by_side(title, each, count=1, repetitions=repetitions)


def layout_of(stream: managedmem.Stream, count: int, adjacent: bool) -> Layout:
    """`count` ranges in one allocation."""
    step = SIZE if adjacent else 2 * SIZE
    whole = managedmem.empty(step * count)
    ranges = [whole[i * step : i * step + SIZE] for i in range(count)]
    return Layout(whole, ranges, adjacent, stream, peers.cuda_core(stream, *ranges))


def move_row(before: str, after: str, layout: Layout, repetitions: int) -> Row:
    """A prefetch of all ranges; bare C is one call over neighbours, a loop over others."""
    cell = Cell("prefetch", before, after, layout)
    forms = cell.bare_forms()
    contenders = {"bare C": forms["one call" if layout.adjacent else "loop"]}
    contenders |= {**cell.ours(), **cell.peer_forms()}
    position = "neighbours" if layout.adjacent else "apart"
    title = f"prefetch {before} to {after}, {len(layout.ranges)} {position}"
    return row_of(title, contenders, len(layout.ranges), repetitions)


def advise_row(layout: Layout, repetitions: int) -> Row:
    """Advice for separate ranges, in turn for the device and the host."""
    ranges, stream = layout.ranges, layout.stream
    core_bufs: Sequence[Any] = layout.core.get("core_bufs", ())
    sequences = [bare.Sequence.of(ranges, stream, device, "advise") for device in (0, -1)]

    def core_loop(location: object) -> None:
        for each in core_bufs:
            each.preferred_location = location

    def ours(location: Device | Host) -> None:
        managedmem.advise(ranges, "set_preferred_location", location)

    def both(function: Any, *locations: object) -> Contender:
        def run(_: int) -> float:
            times = [bare.call_nanoseconds(stream.handle, function, each) for each in locations]
            return sum(times) / len(times)

        return run

    contenders: dict[str, Contender] = {
        "bare C": lambda _: sum(bare.sequence_nanoseconds(each, 0) for each in sequences) / 2,
        "ours": both(ours, Device(0), Host()),
    }
    if core_bufs:
        places = layout.core["core_device"], layout.core["core_host"]
        contenders["cuda.core"] = both(core_loop, *places)
    title = f"set_preferred_location, {len(ranges)} apart"
    return row_of(title, contenders, len(ranges), repetitions)


def module_row(stream: managedmem.Stream, count: int, repetitions: int) -> Row | None:
    """A torch module of `count` resident parameters; None without torch."""
    torch = peers.torch_on_gpu()
    if torch is None:
        return None
    from managedmem.torch import prefetch, to_managed

    parameter = torch.nn.Parameter
    module = torch.nn.ParameterList([parameter(torch.zeros(SIZE // 4)) for _ in range(count)])
    to_managed(module, device="cuda")
    tensors, runtime, device = list(module), peers.cupy_runtime(), Device(0)
    plan = managedmem.PrefetchPlan.from_module(module, device)
    plan.execute(stream=stream)
    stream.sync()

    def run(function: Any, *arguments: object, **named: object) -> Contender:
        return lambda _: bare.call_nanoseconds(stream.handle, function, *arguments, **named)

    def cupy_tensors(runtime: Any) -> None:
        for each in tensors:
            runtime.memPrefetchAsync(each.data_ptr(), each.nbytes, 0, stream.handle)

    contenders = {
        "ours": run(prefetch, module, device, stream=stream, defer=False),
        "plan": run(plan.execute, stream=stream, defer=False),
    }
    if runtime:
        contenders["CuPy"] = run(cupy_tensors, runtime)
    title = f"prefetch of a torch module that is there, {count} parameters"
    return row_of(title, contenders, count, repetitions)


def all_rows(repetitions: int, counts: Sequence[int]) -> Iterator[Row | None]:
    """All rows; those of the modules are None without torch."""
    with managedmem.Stream() as stream:
        for before, after, adjacent in MOVES:
            for count in counts:
                layout = layout_of(stream, count, adjacent)
                with layout.whole:
                    yield move_row(before, after, layout, repetitions)
        for count in counts:
            layout = layout_of(stream, count, adjacent=False)
            with layout.whole:
                yield advise_row(layout, repetitions)
        for count in counts:
            yield module_row(stream, count, repetitions)


def measure(repetitions: int = 9, counts: Sequence[int] = COUNTS) -> Iterator[Row]:
    """A row for each operation and count."""
    return (row for row in all_rows(repetitions, counts) if row is not None)
