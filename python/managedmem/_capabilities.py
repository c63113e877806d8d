"""capabilities(): the operations that work on this system, and the reasons why others do not.

``python -m managedmem info`` prints from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from managedmem import _managedmem
from managedmem._managedmem import (
    CUDAError,
    Device,
    Host,
    Stream,
    TraceBusyError,
    TraceUnavailableError,
    empty,
)
from managedmem._trace import trace

if TYPE_CHECKING:
    from managedmem._managedmem import _Device

BATCHES = 13000
"""The first driver version with batch prefetches, discards and managed pools."""
LOCATIONS = 13040
"""The first driver version that says where pages are."""
PAGE_MAP = "/proc/self/pagemap"

PROBE = 64 << 10
"""Bytes that a device reads on the host."""

_reads_in_place: dict[Device, bool] = {}
_trace_detail = ""  # the source of events in words, once one was found


@dataclass(frozen=True, kw_only=True, repr=False)
class Capabilities:
    """The answer of capabilities(): an immutable, hashable object.

    An ability is True if all of ``devices`` have it. ``reasons`` has a sentence for each ability
    that is False. ``repr`` is a table. Objects with the same values are equal.

    ``advice`` (including advice that names a device), ``prefetch``, ``batch_prefetch``,
    ``discard``, ``traces`` and ``residency`` are operations of this library.
    ``memory_pools_supported`` is for DeviceMemoryResource, ``managed_pools`` for
    ManagedMemoryResource(pooled=True). A ManagedWorkingSet needs ``concurrent_managed_access``; a
    WorkingSet and managedmem.torch.offload() need none of these abilities.
    """

    devices: tuple[Device, ...]
    """The devices that were asked about."""
    driver_version: int
    """The version of the driver: 13000 is CUDA 13.0."""
    driver_path: str
    """The library that is the driver, by the name or path with which it was opened."""
    driver_attempts: tuple[str, ...]
    """Each attempt to open a driver, with its result."""
    emulated: bool
    """True for the emulated driver."""
    concurrent_managed_access: bool
    """Host and devices may use managed memory at the same time."""
    pageable_memory_access: bool
    """Devices reach system memory, which can then be advised and prefetched."""
    pageable_memory_access_uses_host_page_tables: bool
    """Devices reach system memory through the page tables of the host."""
    direct_managed_mem_access_from_host: bool
    """The host uses device memory in place."""
    memory_pools_supported: bool
    """Stream-ordered allocation of device memory works: DeviceMemoryResource."""
    managed_pools: bool
    """Stream-ordered allocation of managed memory works: ManagedMemoryResource(pooled=True)."""
    advice: bool
    """All advice works. If False, the driver refuses only advice that names a device."""
    prefetch: bool
    """Prefetches work."""
    batch_prefetch: bool
    """Several ranges can be prefetched in one driver call."""
    discard: bool
    """discard() and discard_prefetch() work."""
    traces: bool
    """trace() has a source of events."""
    residency: bool
    """residency() can tell which pages are on the host."""
    page_migration: bool
    """Pages move to all devices. If False, prefetch, read_mostly and discard do nothing on some."""
    mapped_access: bool
    """Devices reach host memory in place, as accessed_by asks. If False, each access moves it."""
    trace_source: str
    """The source of events in words; "" without one."""
    _reasons: tuple[tuple[str, str], ...] = field(default=())

    @property
    def reasons(self) -> dict[str, str]:
        """A sentence for each ability that is False, by its name."""
        return dict(self._reasons)

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self.devices))
        version = f"CUDA {self.driver_version // 1000}.{self.driver_version % 1000 // 10}"
        kind = " (emulated)" if self.emulated else ""
        rows = [f"Capabilities of {names} with {version}{kind}"]
        flags = [(f.name, getattr(self, f.name)) for f in fields(self) if f.type == "bool"]
        reasons = self.reasons
        for name, value in flags:
            if name != "emulated":
                text = "yes" if value else f"no   {reasons[name]}"
                rows.append(f"  {name:<44}  {text}")
        return "\n".join(rows)


def capabilities(device: _Device | None = None) -> Capabilities:
    """The abilities of this system, with a reason for each missing ability.

    Parameters
    ----------
    device : int, or a device of any library, optional
        The device; None for all devices. Managed pools, batch prefetches, discards and residency
        depend on all devices of the system, even if one is given.

    Every call asks the driver and the system. The answer is about the system, not about a piece of
    memory: an operation with unsupported="skip" also passes over memory that it cannot act on. The
    first call starts a short trace, to learn whether traces work, unless a trace() runs, which
    shows that they do. It also lets each device read 64 KiB of host memory in place, to learn
    whether the pages stay on the host.

    Raises DriverNotFoundError and DriverTooOldError without a usable driver, ValueError for a
    device that does not exist and for other objects. Safe from every thread. Driver:
    cuDeviceGetAttribute.
    """
    info = _managedmem._driver_info()
    every = Device.all()
    devices = every if device is None else (Device(device),)
    reasons = {name: _lacking(devices, name) for name in _ATTRIBUTES}
    access, all_access = (_lacking(d, "concurrent_managed_access") for d in (devices, every))
    old = ""
    if info["version"] < BATCHES:
        old = f"needs a driver with CUDA 13.0, this one has {info['version_string']}"
    detail, no_traces = _find_trace_source()
    reasons |= {
        "managed_pools": old or reasons["memory_pools_supported"] or all_access,
        "advice": access and f"{access}: advice that names a device is refused",
        "prefetch": access and f"{access}: pages move whole, at kernel launches",
        "batch_prefetch": old or all_access,
        "discard": old or all_access,
        "traces": no_traces,
        "residency": _residency_obstacle(every, info["version"]),
        "page_migration": access or _integrated_obstacle(devices),
        "mapped_access": access or _mapping_obstacle(devices),
    }
    flags: dict[str, Any] = {name: not reason for name, reason in reasons.items()}
    return Capabilities(
        devices=devices,
        driver_version=info["version"],
        driver_path=info["path"],
        driver_attempts=tuple(info["tried"]),
        emulated=info["emulated"],
        trace_source=detail,
        _reasons=tuple((name, reason) for name, reason in reasons.items() if reason),
        **flags,
    )


_ATTRIBUTES = (
    "concurrent_managed_access",
    "pageable_memory_access",
    "pageable_memory_access_uses_host_page_tables",
    "direct_managed_mem_access_from_host",
    "memory_pools_supported",
)


def _lacking(devices: Sequence[Device], name: str) -> str:
    """A sentence with the devices that lack an attribute, or ""."""
    lacking = ", ".join(repr(device) for device in devices if not getattr(device, name))
    return f"{name} is 0 on {lacking}" if lacking else ""


def _find_trace_source() -> tuple[str, str]:
    """The source of events in words, and the reason if there is none: one of the two is empty."""
    global _trace_detail  # noqa: PLW0603
    if not _trace_detail:
        attempt = trace(limit=1000, sync=False)
        try:
            attempt.start()
        except TraceBusyError:
            return "in use by a trace that runs", ""
        except (TraceUnavailableError, CUDAError) as error:
            tried = getattr(error, "tried", None)
            return "", " ".join((tried[-1][2] if tried else str(error)).split())
        try:
            _trace_detail = attempt.source_detail
        finally:
            attempt.stop()
    return _trace_detail, ""


def _integrated_obstacle(devices: Sequence[Device]) -> str:
    """A sentence with the devices that have the host's memory, or ""."""
    names = ", ".join(repr(device) for device in devices if device.integrated)
    return f"integrated is 1 on {names}: the memory is the host's" if names else ""


def _mapping_obstacle(devices: Sequence[Device]) -> str:
    """A sentence with the devices whose reads move host pages, which they should not, or ""."""
    for device in devices:
        if device not in _reads_in_place:
            try:
                _reads_in_place[device] = _reads_host_in_place(device)
            except (CUDAError, MemoryError, OSError, NotImplementedError) as error:
                return f"no read of {device!r} could show it: {error}"
    names = ", ".join(repr(device) for device in devices if not _reads_in_place[device])
    if not names:
        return ""
    return f"a read by {names} moved pages of the host, as in confidential computing"


def _reads_host_in_place(device: Device) -> bool:
    """True if pages stay on the host while the device copies from them."""
    if device.direct_managed_mem_access_from_host:
        return True  # host and device are coherent, and the page map does not show places
    with ThreadPoolExecutor(1) as thread:  # set_current() must not change the caller's device
        return thread.submit(_read_on_current_device, device).result()


def _read_on_current_device(device: Device) -> bool:
    device.set_current()
    with empty(PROBE) as source, empty(PROBE) as copy, Stream() as stream:
        memoryview(source)[:] = bytes(PROBE)
        source.preferred_location = Host()
        source.accessed_by.add(device)
        copy.preferred_location = device  # so that the device copies
        source.copy_to(copy, stream=stream)
        stream.sync()
        return source.residency().on_host == PROBE


def _residency_obstacle(every: Sequence[Device], version: int = 0) -> str:
    """The reason why residency() raises here, or ""."""
    if lacking := _lacking(every, "concurrent_managed_access"):
        return f"{lacking}: pages move as a whole at launches"
    direct = [device for device in every if device.direct_managed_mem_access_from_host]
    if direct and version >= LOCATIONS:
        return ""
    if direct:
        names = ", ".join(map(repr, direct))
        return f"direct_managed_mem_access_from_host is 1 on {names}: the page map does not show it"
    try:
        with open(PAGE_MAP, "rb"):
            return ""
    except OSError as error:
        return str(error)
