"""``python -m managedmem info``: the driver, its devices, NUMA nodes, and the operations that work
here, with reasons.

Each call asks the driver and the system. Without a usable driver it prints what was tried and what
to do, and the exit status is 1.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import managedmem
from managedmem import Device
from managedmem._capabilities import Capabilities
from managedmem._cli import driver
from managedmem._cli.output import program_name
from managedmem._cli.text import printable, size_text, table

NODES = Path("/sys/devices/system/node")
"""Where Linux lists the NUMA nodes."""

ATTRIBUTES = (
    (
        "integrated",
        "it shares the host's memory, and prefetch, read_mostly and discard have no effect",
        "the device has memory of its own",
    ),
    (
        "concurrent_managed_access",
        "host and device may use managed memory at the same time",
        "the host must wait for the device before it touches managed memory",
    ),
    (
        "pageable_memory_access",
        "the device reaches malloc and NumPy memory",
        "the device does not reach malloc and NumPy memory",
    ),
    (
        "pageable_memory_access_uses_host_page_tables",
        "it does so through the page tables of the host",
        "the device has page tables of its own",
    ),
    (
        "direct_managed_mem_access_from_host",
        "the host uses device memory in place",
        "a host access moves pages away from the device",
    ),
    (
        "memory_pools_supported",
        "stream-ordered allocation works",
        "there is no stream-ordered allocation",
    ),
)
"""Attributes of a device, each with the meaning of yes and of no."""

HELP = """\
What to do:
  on a machine with an NVIDIA GPU   install or update its driver (535 or newer; 580 or newer for
                                    batches and discards), and in a container start with GPU access
  on a machine without one          take the emulated driver that comes with this package:
                                      {program} info --emulator
                                      MANAGEDMEM_DRIVER=emulator python your_script.py
                                      managedmem.emulator.enable()   before the first use
  with a driver in another place    MANAGEDMEM_DRIVER=/path/to/libcuda.so.1"""


def yes_no(value: object) -> str:
    """A driver's truth value in words."""
    return "yes" if value else "no"


def package_version(name: str) -> str:
    """The installed version of a package, or "" without it; does not import the package."""
    try:
        if importlib.util.find_spec(name) is None:
            return ""
    except ValueError:  # a module in sys.modules that has no specification
        return "version unknown"
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
    # CuPy's distributions have the CUDA version in their names and need a slower search.
    for distribution in importlib.metadata.packages_distributions().get(name, []):
        return importlib.metadata.version(distribution)
    return "version unknown"


def heading_rows() -> list[Sequence[object]]:
    """This package, Python and the system."""
    version = getattr(managedmem, "__version__", "") or package_version("managedmem")
    return [
        ("managedmem", version),
        ("Python", f"{platform.python_version()} ({sys.implementation.name})"),
        ("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
    ]


def print_device(device: Device) -> None:
    """Print identity, memory and attributes of one device, each attribute with its meaning."""
    free, total = device.memory_info
    identity = [
        ("uuid", device.uuid),
        ("memory", f"{size_text(total)}, {size_text(free)} free"),
        ("host NUMA node", device.host_numa_id if device.host_numa_id >= 0 else "not known"),
    ]
    section(f"{device}: {device.name}", identity)
    rows = []
    for name, can, cannot in ATTRIBUTES:
        has = getattr(device, name)
        rows.append((name, yes_no(has), can if has else cannot))
    print(table(rows))


def numa_nodes() -> list[tuple[int, str, str]]:
    """Number, processors and memory of each NUMA node that the system lists, in order."""
    rows = []
    for folder in NODES.glob("node[0-9]*"):
        try:
            processors = (folder / "cpulist").read_text().strip()
            meminfo = (folder / "meminfo").read_text()
        except OSError:
            continue
        total = re.search(r"MemTotal:\s+(\d+) kB", meminfo)
        memory = size_text(int(total[1]) * 1024) if total else "memory unknown"
        rows.append((int(folder.name[4:]), processors or "none", memory))
    return sorted(rows)


def abilities(system: Capabilities) -> list[Sequence[object]]:
    """The abilities of managed memory here: yes or no, and the reason or the consequence."""
    reasons = system.reasons
    concurrent = reasons.get("concurrent_managed_access", "")
    advice = "yes" if system.advice else "in part"
    host = yes_no(system.concurrent_managed_access)
    return [
        ("allocate and share", "yes", "managedmem.empty(), __cuda_array_interface__, DLPack"),
        ("advice", advice, reasons.get("advice", "")),
        ("prefetch", yes_no(system.prefetch), reasons.get("prefetch", "")),
        ("host access beside kernels", host, concurrent and f"{concurrent}: synchronise first"),
        _row("batch prefetch in one call", system, "batch_prefetch"),
        _row("discard, discard_prefetch", system, "discard"),
        _row("pools of managed memory", system, "managed_pools"),
        ("system memory as target", yes_no(system.pageable_memory_access), _system_memory(system)),
        _row("residency()", system, "residency"),
        _row("pages move to the devices", system, "page_migration"),
        _row("access to the host in place", system, "mapped_access"),
        ("location Host(numa_id=N)", *_numa_ability(system.emulated)),
    ]


def _row(label: str, system: Capabilities, name: str) -> Sequence[object]:
    return label, yes_no(getattr(system, name)), system.reasons.get(name, "")


def _system_memory(system: Capabilities) -> str:
    if reason := system.reasons.get("pageable_memory_access"):
        return f"{reason}: malloc and NumPy memory stays out of reach"
    if system.pageable_memory_access_uses_host_page_tables:
        return "malloc and NumPy memory, through the page tables of the host"
    return "malloc and NumPy memory, by the kernel's heterogeneous memory management"


def _numa_ability(emulated: bool) -> tuple[str, str]:
    if emulated:
        return "depends", "on the NUMA nodes of the emulated driver, not on those of this machine"
    nodes = numa_nodes()
    if len(nodes) > 1:
        return "yes", f"{len(nodes)} nodes"
    return "no gain", "one node: the driver reports such a preferred location as Host() or unset"


def event_sources(system: Capabilities) -> list[Sequence[object]]:
    """The sources of events for ``trace()``: yes with details, or no with the reason."""
    own, other = ("emulator", "kernel") if system.emulated else ("kernel", "emulator")
    in_use = "the emulated driver" if system.emulated else "a CUDA driver"
    detail = system.trace_source or system.reasons["traces"]
    return [(own, yes_no(system.traces), detail), (other, "no", f"this process uses {in_use}")]


def library_rows() -> list[Sequence[object]]:
    """The libraries that can share managed memory, each with its installed version."""
    return [
        (name, package_version(name) or "not installed")
        for name in ("numpy", "torch", "cupy", "numba", "jax")
    ]


def section(title: str, rows: Sequence[Sequence[object]]) -> None:
    """Print a title and its rows, a blank line first."""
    print(f"\n{title}")
    print(table(rows))


def print_nodes(emulated: bool) -> None:
    """Print the NUMA nodes of this machine; the emulated driver may have others."""
    rows = [(f"node {node}", f"cpus {cpus}", memory) for node, cpus, memory in numa_nodes()]
    title = "NUMA nodes of this machine"
    if emulated:
        title += " (the emulated driver has its own: MANAGEDMEM_EMULATOR=numa_nodes=N)"
    section(title, rows or [("none listed by the system",)])


def print_driver(info: Mapping[str, Any], reason: str) -> None:
    """Print the path, the version and the number of devices of the open driver."""
    kind = "emulated: it moves no data and runs no kernels" if info["emulated"] else "CUDA"
    rows = [
        ("driver", kind + (f" ({reason})" if reason else "")),
        ("path", info["path"]),
        ("version", f"CUDA {info['version_string']} ({info['version']})"),
        ("devices", info["device_count"]),
    ]
    section("driver", rows)


def report_failure(error: managedmem.CUDAError) -> None:
    """Print why no driver is usable, with all that was tried, and what to do."""
    print("\ndriver")
    for line in str(error).splitlines():
        print(f"  {printable(line)}")
    print_nodes(emulated=False)
    section("libraries that can share managed memory", library_rows())
    if "MANAGEDMEM_EMULATOR:" not in str(error):  # an error about it says itself what to do
        print("\n" + HELP.format(program=program_name()))


def run(request: str | None = None) -> int:
    """Report on the driver ``request`` ("cuda", "emulator" or None); return the exit status."""
    print(table(heading_rows(), ""))
    driver.apply_request(request)
    try:
        info = managedmem._managedmem._driver_info()
    except managedmem.CUDAError as error:
        report_failure(error)
        return 1
    print_driver(info, driver.choice_reason(request))
    for device in Device.all():
        print_device(device)
    system = managedmem.capabilities()
    section("what managed memory can do here", abilities(system))
    section("sources of events for managedmem.trace()", event_sources(system))
    print_nodes(bool(info["emulated"]))
    section("libraries that can share managed memory", library_rows())
    return 0
