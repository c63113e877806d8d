"""Controls of the emulated CUDA driver: choose it, read its calls, make them fail.

The emulated driver is a library of this package that behaves like the CUDA driver of a machine
with GPUs, for managed memory. It needs no GPU. ``MANAGEDMEM_DRIVER=emulator``, or ``enable()``
before the first use of the driver, selects it; the library never chooses it by itself.

>>> import managedmem
>>> managedmem.emulator.enable(devices=2)
>>> buffer = managedmem.empty(4096)
>>> with managedmem.emulator.recording() as calls:
...     buffer.prefetch(managedmem.Device(0))
>>> calls[-1].name, calls[-1].args["count"]
('cuMemPrefetchAsync', 4096)

The host's own loads and stores move pages, as on a GPU: the driver notices them at its next call.
``touch()`` stands for the accesses of kernels.

Every function is safe from every thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import functools
import itertools
import operator
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, NoReturn, SupportsIndex

from managedmem import _managedmem

if TYPE_CHECKING:
    from managedmem._managedmem import Device, Host, ManagedBuffer

__all__ = [
    "PROFILES",
    "Call",
    "Counters",
    "Frames",
    "Live",
    "calls",
    "clear_calls",
    "clear_counters",
    "clear_failures",
    "counters",
    "disturb_queue",
    "enable",
    "fail",
    "failure_fired",
    "frames",
    "is_active",
    "live",
    "recording",
    "residency",
    "schedule",
    "touch",
]

PROFILES = ("default", "h200", "h200-x2", "wsl", "old12")
"""The profiles of `enable`: two devices and two NUMA nodes; one H200 as measured; two of them; a
machine without concurrent managed access; a driver of CUDA 12.2."""

_CONFIGURATION = "MANAGEDMEM_EMULATOR"
_LIMITS = {
    "devices": (1, 16),
    "numa_nodes": (1, 16),
    "driver_version": (12020, 13050),
    "capacity_mib": (1, 1 << 20),
}
_KEYS = {
    "driver_version": "driver",
    "concurrent_managed_access": "concurrent",
    "pageable_memory_access": "pageable",
    "integrated": "integrated",
    "confidential": "confidential",
}
_SCHEDULES = ("eager", "lazy")
_DISCARDS = ("poison", "keep", "zero")
_LINE = re.compile(r"(\w+)\((.*)\) -> (-?\d+)", re.DOTALL)
_TEXT_SIZE = 1024
_HOST_ORDINAL = -1
_UNKNOWN_NAME = -2
_FAIL_AFTER, _FAIL_LASTING = 1, 2
_DEVICE_TYPE, _HOST_TYPE, _UNPOPULATED = 1, 2, -1
_MOST_RECORDS = 1 << 20
_LAST_BRANCH = 999


class Call(NamedTuple):
    """One driver call: its name without version suffix, its arguments by name, its result code.

    Numbers and handles are int; the lists of a batch call are str. The arguments include returned
    values, such as ``ptr``.
    """

    name: str
    args: dict[str, int | str]
    result: int


class Live(NamedTuple):
    """The objects that are not freed: counts, bytes, and the depth of the context stack.

    Default streams, default pools and primary contexts do not count. The context depth belongs to
    the calling thread.
    """

    allocations: int
    bytes: int
    streams: int
    events: int
    pools: int
    context_depth: int
    contexts: int


class Counters(NamedTuple):
    """Bytes moved since `clear_counters`, by direction; faults; read-mostly copies, in pages.

    Faults have the unit of traces: one for each page that the host touches, and one for each 64 KiB
    that a device touches. Loads and stores of the host count, even the first ones of a page.
    """

    bytes_htod: int
    bytes_dtoh: int
    bytes_dtod: int
    cpu_faults: int
    gpu_faults: int
    duplications: int


class Frames(NamedTuple):
    """The memory of a device in use, in bytes.

    Managed memory takes frames of 2 MiB: one for each block of 2 MiB of addresses, from its first
    page on the device on. Allocations of up to 1 MiB share blocks.
    """

    used: int
    """Bytes in frames that hold pages of managed memory."""
    kept: int
    """Bytes in frames whose pages have all left the device. Freeing the memory gives these frames
    back, and so does anything that needs room on the device."""
    plain: int
    """Bytes in memory that is not managed: of ``cuMemAlloc``, and of pools on the device."""
    peak: int
    """The most that was taken at once since `clear_counters`."""

    @property
    def taken(self) -> int:
        """The sum, as ``cuMemGetInfo`` shows it: ``used + kept + plain``."""
        return self.used + self.kept + self.plain


class _Counters(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in Counters._fields]


class _Frames(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in Frames._fields]


_PROTOTYPES = {
    "emu_log_clear": (None, []),
    "emu_log_count": (ctypes.c_size_t, []),
    "emu_log_entry": (ctypes.c_int, [ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]),
    "emu_fail": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_uint, ctypes.c_int, ctypes.c_int]),
    "emu_fail_name": (ctypes.c_char_p, [ctypes.c_size_t]),
    "emu_fail_clear": (None, []),
    "emu_fail_fired": (ctypes.c_int, []),
    "emu_live_allocations": (ctypes.c_size_t, []),
    "emu_live_bytes": (ctypes.c_size_t, []),
    "emu_live_streams": (ctypes.c_size_t, []),
    "emu_live_events": (ctypes.c_size_t, []),
    "emu_live_pools": (ctypes.c_size_t, []),
    "emu_live_contexts": (ctypes.c_size_t, []),
    "emu_context_depth": (ctypes.c_size_t, []),
    "emu_residency": (
        ctypes.c_int,
        [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p],
    ),
    "emu_touch": (ctypes.c_int, [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]),
    "emu_frames": (ctypes.c_int, [ctypes.c_int, ctypes.c_void_p]),
    "emu_counters": (None, [ctypes.c_void_p]),
    "emu_counters_clear": (None, []),
    "emu_used_in_place": (ctypes.c_uint64, []),
    "emu_schedule": (None, [ctypes.c_int]),
    "emu_uvm_disturb": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_uint]),
}


@functools.cache
def _library() -> ctypes.CDLL:
    """The emulated driver that the process uses; opens the driver if none is open."""
    info = _managedmem._driver_info()
    if not info["emulated"]:
        raise RuntimeError(
            "the emulated driver is not in use: set MANAGEDMEM_DRIVER=emulator or call "
            "managedmem.emulator.enable() before the first use of the driver"
        )
    library = ctypes.CDLL(info["path"])
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value


def _check_number(name: str, value: int) -> int:
    low, high = _LIMITS[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low} to {high}, got {value}")
    return value


def _as_int(name: str, value: SupportsIndex) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {value!r}")
    return operator.index(value)


def _check_flag(name: str, value: bool) -> int:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return int(value)


def enable(
    profile: str | None = None,
    *,
    devices: int | None = None,
    numa_nodes: int | None = None,
    driver_version: int | None = None,
    concurrent_managed_access: bool | None = None,
    pageable_memory_access: bool | None = None,
    integrated: bool | None = None,
    confidential: bool | None = None,
    capacity_mib: int | None = None,
    schedule: str | None = None,
    discard: str | None = None,
) -> None:
    """Use the emulated driver in this process, configured as the arguments say.

    If the emulated driver is open already, a call with the same arguments, or with none, does
    nothing.

    Parameters
    ----------
    profile : str, optional
        One of `PROFILES`; the other arguments change single settings of it.
    devices, numa_nodes : int, optional
        The number of each in the machine (1 to 16).
    driver_version : int, optional
        12020 (CUDA 12.2) to 13050 (CUDA 13.5). Batch and discard calls exist from 13000 on.
        From 13040 on, cuMemGetLocationInfo says where pages are; all else behaves like CUDA 13.0.
    concurrent_managed_access, pageable_memory_access : bool, optional
        These attributes of every device.
    integrated : bool, optional
        The devices are parts of the processor, and share its memory: nothing moves.
    confidential : bool, optional
        Confidential computing: devices reach no memory of the host in place, so that it moves.
    capacity_mib : int, optional
        The memory of each device in MiB.
    schedule : {"eager", "lazy"}, optional
        See `schedule()`.
    discard : {"poison", "keep", "zero"}, optional
        Discarded pages hold the byte 0xDB, the contents that they would have on an H200, or zeros.

    Raises RuntimeError if another driver, or the emulated one with other settings, is open
    already, TypeError or ValueError for bad arguments.
    """
    settings: list[str] = []
    if profile is not None:
        settings.append(f"profile={_check_choice('profile', profile, PROFILES)}")
    numbers = {
        "devices": devices,
        "numa_nodes": numa_nodes,
        "driver_version": driver_version,
        "capacity_mib": capacity_mib,
    }
    flags = {
        "concurrent_managed_access": concurrent_managed_access,
        "pageable_memory_access": pageable_memory_access,
        "integrated": integrated,
        "confidential": confidential,
    }
    for name, number in numbers.items():
        if number is not None:
            settings.append(f"{_KEYS.get(name, name)}={_check_number(name, number)}")
    for name, flag in flags.items():
        if flag is not None:
            settings.append(f"{_KEYS[name]}={_check_flag(name, flag)}")
    if schedule is not None:
        settings.append(f"schedule={_check_choice('schedule', schedule, _SCHEDULES)}")
    if discard is not None:
        settings.append(f"discard={_check_choice('discard', discard, _DISCARDS)}")
    wanted = ",".join(settings)
    # Without arguments, the configuration in the environment stays.
    if _select(wanted) and (settings or _CONFIGURATION not in os.environ):
        os.environ[_CONFIGURATION] = wanted


def _select(wanted: str) -> bool:
    """Choose the emulated driver; False if it is open with these settings already."""
    try:
        _managedmem._select_driver("emulator")
    except RuntimeError:
        if not is_active():
            raise
        present = os.environ.get(_CONFIGURATION, "")
        if wanted not in ("", present):
            raise RuntimeError(
                f"the emulated driver is already open with the settings {present!r}, and takes no "
                f"others, got {wanted!r}: call enable() before the first use, or set "
                f"{_CONFIGURATION}={wanted} in the environment"
            ) from None
        return False
    return True


def is_active() -> bool:
    """True if the process uses the emulated driver; opens the driver if none is open."""
    try:
        return bool(_managedmem._driver_info()["emulated"])
    except (_managedmem.DriverNotFoundError, _managedmem.DriverTooOldError):
        return False


def _number_or_text(text: str) -> int | str:
    try:
        return int(text, 0)
    except ValueError:
        return text


def _parse(line: str) -> Call:
    match = _LINE.fullmatch(line)
    if match is None:
        raise RuntimeError(f"the emulated driver logged a line that is not a call: {line!r}")
    name, arguments, result = match.groups()
    pairs = (item.partition("=") for item in arguments.split(", ") if item)
    return Call(name, {key: _number_or_text(value) for key, _, value in pairs}, int(result))


def _calls_from(start: int) -> list[Call]:
    library = _library()
    text = ctypes.create_string_buffer(_TEXT_SIZE)
    calls = []
    index = start
    while library.emu_log_entry(index, text, len(text)) >= 0:
        calls.append(_parse(text.value.decode()))
        index += 1
    return calls


def calls() -> list[Call]:
    """The driver calls since `clear_calls`, oldest first, up to the last 65,536.

    Queries about the calling thread (current context, capture state) are not recorded.
    Raises RuntimeError when another driver is in use.
    """
    return _calls_from(0)


def clear_calls() -> None:
    """Forget all recorded calls. Raises RuntimeError when another driver is in use."""
    _library().emu_log_clear()


@contextlib.contextmanager
def recording() -> Iterator[list[Call]]:
    """``with recording() as made:`` fills the list ``made`` with the calls of the block at its end.

    It includes calls of other threads. Raises RuntimeError when another driver is in use.
    """
    library = _library()
    made: list[Call] = []
    start = library.emu_log_count()
    if start > 1 << 15:
        # A full log drops its oldest lines, which would shift positions.
        library.emu_log_clear()
        start = 0
    try:
        yield made
    finally:
        made.extend(_calls_from(start if library.emu_log_count() >= start else 0))


def _names_like(name: str) -> str:
    """The function names similar to an unknown one, or all names."""
    texts = map(_library().emu_fail_name, itertools.count())
    names = sorted({text.decode() for text in itertools.takewhile(bool, texts)})
    near = difflib.get_close_matches(name, names, n=3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f'the names are "*" and {", ".join(names)}'


def fail(
    function: str, nth: int = 1, code: int = 999, after: bool = False, *, lasting: bool = False
) -> None:
    """Make a driver call fail.

    Parameters
    ----------
    function : str
        The driver function, such as ``"cuMemAdvise"``, or ``"*"`` for any.
    nth : int
        The call that fails, counted from the next, which is 1.
    code : int
        The CUresult that it returns; 999 is CUDA_ERROR_UNKNOWN.
    after : bool
        False: the call has no effect. True: it does its work and then reports the failure.
    lasting : bool
        True: from then until `clear_failures`, every call that needs a working context fails with
        the same code, as after a fault of a kernel. Device queries and context switches succeed.
        Memory that cannot be freed stays in `live`.

    Up to 64 failures can wait; each happens once. Raises ValueError for an unknown name (the
    message lists similar names), for nth or code below 1, and when too many wait; TypeError for
    arguments of other types; RuntimeError when another driver is in use.
    """
    if not isinstance(function, str):
        raise TypeError(f"function must be a str such as 'cuMemAdvise', got {function!r}")
    nth, code = _as_int("nth", nth), _as_int("code", code)
    if nth < 1:
        raise ValueError(f"nth counts from 1, got {nth}")
    if not 0 < code < 1 << 31:
        raise ValueError(f"code must be the CUresult of a failure, 1 or more, got {code}")
    flags = (_FAIL_AFTER if after else 0) | (_FAIL_LASTING if lasting else 0)
    status = _library().emu_fail(function.encode(), nth, code, flags)
    if status == _UNKNOWN_NAME:
        raise ValueError(
            f"the emulated driver has no function {function!r} that can fail; "
            f"{_names_like(function)}"
        )
    if status != 0:
        raise ValueError(
            f"cannot make {function!r} fail: too many failures wait; clear_failures() removes them"
        )


def clear_failures() -> None:
    """Remove pending and lasting failures, and reset `failure_fired`.

    Raises RuntimeError when another driver is in use.
    """
    _library().emu_fail_clear()


def failure_fired() -> bool:
    """True if a failure set up by `fail` has happened since `clear_failures`."""
    return bool(_library().emu_fail_fired())


def live() -> Live:
    """The objects that exist, to find leaks. Raises RuntimeError when another driver is in use."""
    library = _library()
    return Live(
        library.emu_live_allocations(),
        library.emu_live_bytes(),
        library.emu_live_streams(),
        library.emu_live_events(),
        library.emu_live_pools(),
        library.emu_context_depth(),
        library.emu_live_contexts(),
    )


def _check_buffer(caller: str, buffer: ManagedBuffer) -> None:
    if not isinstance(buffer, _managedmem.ManagedBuffer):
        raise TypeError(
            f"{caller}() needs a ManagedBuffer, got {type(buffer).__name__}; "
            "ManagedBuffer.from_handle() wraps the memory of other objects"
        )
    if buffer.is_closed:
        raise ValueError(f"{caller}() needs an open buffer, got {buffer!r}")


def _refuse_memory(caller: str, buffer: ManagedBuffer) -> NoReturn:
    raise ValueError(f"{caller}() needs managed memory, got {buffer!r}")


def residency(buffer: ManagedBuffer) -> Device | Host | str | None:
    """The present location of the pages of a buffer.

    Returns the Device; Host() for the first NUMA node, else Host(numa_id=n); None if the buffer is
    empty or no page was ever touched; "mixed" if the pages are in several places or have several
    copies. Queued operations do not count. Raises TypeError for an object that is not a
    ManagedBuffer, ValueError if it is closed or its memory is not managed, RuntimeError when
    another driver is in use.
    """
    _check_buffer("residency", buffer)
    if buffer.size == 0:
        return None
    place, number = ctypes.c_int(), ctypes.c_int()
    status = _library().emu_residency(
        buffer.handle, buffer.size, ctypes.byref(place), ctypes.byref(number)
    )
    if status != 0:
        _refuse_memory("residency", buffer)
    if place.value == _DEVICE_TYPE:
        return _managedmem.Device(number.value)
    if place.value == _HOST_TYPE:
        return _managedmem.Host(number.value) if number.value else _managedmem.Host()
    return None if place.value == _UNPOPULATED else "mixed"


def touch(buffer: ManagedBuffer, location: Device | Host, write: bool = False) -> None:
    """Let a processor read or write a whole buffer: pages fault, move or are copied, and count.

    The contents do not change. Raises TypeError for other types, ValueError if the buffer is closed
    or its memory is not managed, RuntimeError when another driver is in use.
    """
    _check_buffer("touch", buffer)
    if isinstance(location, _managedmem.Device):
        ordinal = location.device_id
    elif isinstance(location, _managedmem.Host):
        ordinal = _HOST_ORDINAL
    else:
        raise TypeError(f"location must be a Device or Host, got {location!r}")
    if buffer.size and _library().emu_touch(buffer.handle, buffer.size, ordinal, int(write)) != 0:
        _refuse_memory("touch", buffer)


def counters() -> Counters:
    """The counters since `clear_counters`. Raises RuntimeError when another driver is in use."""
    numbers = _Counters()
    _library().emu_counters(ctypes.byref(numbers))
    return Counters(*(getattr(numbers, name) for name in Counters._fields))


def frames(device: Device) -> Frames:
    """The memory of the device in use now, and the peak since `clear_counters`.

    Raises TypeError if `device` is not a Device, RuntimeError when another driver is in use.
    """
    if not isinstance(device, _managedmem.Device):
        raise TypeError(f"device must be a Device, got {device!r}")
    numbers = _Frames()
    _library().emu_frames(device.device_id, ctypes.byref(numbers))
    return Frames(*(getattr(numbers, name) for name in Frames._fields))


def clear_counters() -> None:
    """Set all counters to zero, and the peaks of `frames` to the memory in use now.

    Raises RuntimeError when another driver is in use.
    """
    _library().emu_counters_clear()


def _run_counts() -> tuple[int, int]:
    """The bytes over the bus, moved or used in place, and the faults so far, for tune()."""
    counted = counters()
    moved = counted.bytes_htod + counted.bytes_dtoh + counted.bytes_dtod
    return moved + _library().emu_used_in_place(), counted.cpu_faults + counted.gpu_faults


def schedule(when: str) -> None:
    """Choose when queued operations run.

    "eager" (the default): at once, when nothing is queued before them. "lazy": when something waits
    for them (synchronise, query, free, a dependent operation on another stream). Lazy finds a
    missing synchronisation. A change to eager runs queued operations.

    Raises ValueError for another word, RuntimeError when another driver is in use.
    """
    _library().emu_schedule(int(_check_choice("schedule", when, _SCHEDULES) == "lazy"))


def disturb_queue(
    *,
    absent: bool | int = False,
    denied: bool | int = False,
    refused: bool | int = False,
    layout: bool | int = False,
    drop: int = 0,
    lose: int = 0,
    garbage: int = 0,
    late: int = 0,
    branch: int = 0,
    unlisted: int = 0,
) -> None:
    """Disturb the event queues of the emulated nvidia-uvm module, from which traces are made.

    Each call replaces earlier calls, and the keys ``queue_*`` of ``MANAGEDMEM_EMULATOR``; without
    arguments it ends all disturbances.

    Parameters
    ----------
    absent, denied : bool
        There is no ``/dev/nvidia-uvm-tools``, or it may not be opened.
    refused : bool
        The module makes no queue, and delivers nothing into those that exist.
    layout : bool
        Records have a layout that no module is known to write.
    drop, lose : int
        Every nth record is missing. The queue counts those of ``drop``, and not those of ``lose``.
        0: none is missing.
    garbage : int
        A record of random bytes comes before every nth record. 0: never.
    late : int
        Records arrive with the nth flush after they were made. 0: at once.
    branch : int
        The branch of the module, 535 to 999. Its requests differ before 560, from 560 on, and from
        565 on. 0: the newest.
    unlisted : int
        1: the module lists a device only once it has a context. 2: it lists only the first one.
        0: all of them.

    Raises TypeError or ValueError for bad arguments (n is at most 1,048,576) before anything is
    changed, RuntimeError when another driver is in use.
    """
    flags = {"absent": absent, "denied": denied, "refused": refused, "layout": layout}
    records = {"drop": drop, "lose": lose, "garbage": garbage, "late": late}
    counts = {name: (count, _MOST_RECORDS) for name, count in records.items()}
    counts |= {"branch": (branch, _LAST_BRANCH), "unlisted": (unlisted, 2)}
    values = {}
    for name, flag in flags.items():
        if flag not in (0, 1):
            raise TypeError(f"{name} must be True or False, got {flag!r}")
        values[name] = int(flag)
    for name, (count, most) in counts.items():
        values[name] = _as_int(name, count)
        if not 0 <= values[name] <= most:
            raise ValueError(f"{name} must be from 0 to {most}, got {count}")
    library = _library()
    for name, value in values.items():
        library.emu_uvm_disturb(name.encode(), value)
