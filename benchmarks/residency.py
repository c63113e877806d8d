"""`residency()` beside a bare C program that reads the same page map."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import managedmem
from managedmem import Device, Host

from . import bare
from .measure import MIB, Contender, Row, elapsed, side_by_side

SIZE = 256 * MIB
NEED = SIZE
GOAL = "goal 0.7 ms"
BLOCK = 2 * MIB

Arrange = Callable[[managedmem.ManagedBuffer], None]


def on_the_host(buf: managedmem.ManagedBuffer) -> None:
    """All pages are on the host."""
    buf.prefetch(Host())


def on_the_device(buf: managedmem.ManagedBuffer) -> None:
    """All pages are on the device."""
    buf.prefetch(Device(0))


def half_of_each(buf: managedmem.ManagedBuffer) -> None:
    """The first half is on the device, the other on the host."""
    buf.prefetch(Host())
    buf.range(0, buf.nbytes // 2).prefetch(Device(0))


def blocks_in_turn(buf: managedmem.ManagedBuffer) -> None:
    """Every other block of 2 MiB is on the device."""
    buf.prefetch(Host())
    for offset in range(0, buf.nbytes, 2 * BLOCK):
        buf.range(offset, min(BLOCK, buf.nbytes - offset)).prefetch(Device(0))


def by_faults(buf: managedmem.ManagedBuffer) -> None:
    """All pages came to the device by faults: without a prefetch, hints need a query for each
    block."""
    on_the_host(buf)
    buf.fill(1)


STATES: dict[str, Arrange] = {
    "on the host": on_the_host,
    "on the device": on_the_device,
    "half of each": half_of_each,
    "blocks of 2 MiB in turn": blocks_in_turn,
    "moved by a fill": by_faults,
}


def page_map(buf: managedmem.ManagedBuffer, scan: bool) -> Contender:
    """The bytes on the host, counted in C by PAGEMAP_SCAN or by the entries of the page map."""
    library = bare.libraries()[0]
    function = library.bare_page_map
    function.restype = ctypes.c_double
    function.argtypes = (ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    on_host = ctypes.c_uint64()

    def run(_: int) -> float:
        time: float = function(buf.handle, buf.nbytes, int(scan), ctypes.byref(on_host))
        if time < 0:
            raise RuntimeError(f"the page map cannot be read: errno {-time:.0f}")
        if on_host.value != buf.residency().on_host:
            raise RuntimeError("residency() and bare C differ")
        return time

    return run


def has_scan(buf: managedmem.ManagedBuffer) -> bool:
    """True if the kernel has PAGEMAP_SCAN."""
    try:
        page_map(buf, scan=True)(1)
    except RuntimeError:
        return False
    return True


def measure(repetitions: int = 21, size: int = SIZE) -> Iterator[Row]:
    """A row for each state of the pages."""
    with managedmem.empty(size) as buf:
        scan = has_scan(buf)
        for name, arrange in STATES.items():
            arrange(buf)
            Device(0).sync()
            contenders = {"page map, entries": page_map(buf, scan=False)}
            if scan:
                contenders["page map, scan"] = page_map(buf, scan=True)
            contenders["ours"] = lambda _: elapsed(buf.residency)
            title = f"{size // MIB} MiB {name}"
            yield side_by_side(
                title, contenders, count=1, repetitions=repetitions, unit="us", note=GOAL
            )
