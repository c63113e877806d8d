"""WorkingSet and ManagedWorkingSet: groups of memory that a device holds in turn.

A WorkingSet copies its groups into frames, one piece of device memory that is its budget. A
ManagedWorkingSet prefetches managed memory, which keeps its address.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from typing import Any, Generic, NamedTuple, NoReturn, Self, SupportsIndex, TypeVar, get_args

from managedmem._limits import host_available, read_budget
from managedmem._managedmem import Device, DType, _Frames, _Slab
from managedmem._units import record_text, size_text
from managedmem._working_group import (
    Access,
    FramedGroup,
    Home,
    ManagedGroup,
    WorkingGroup,
    end_without_caller,
)

Group = TypeVar("Group", bound=WorkingGroup)

_ALIGNMENT = 512  # bytes: the alignment of arrays in a group, as in torch's memory
_RESERVE = 5  # "auto" leaves a fifth of what is free to other memory


class WorkingSetStats(NamedTuple):
    """Counters of a working set, from its beginning.

    Attributes
    ----------
    acquired : int
        Uses of groups; in a ManagedWorkingSet, uses of their targets.
    hits : int
        Uses among these that found the group on the device, or on its way there.
    mapped : int
        Acquired uses that were at home: without room, after a failure, or in a ManagedWorkingSet in
        a stream that captures.
    loads : int
        Loads to the device, those ahead of a use included.
    ahead : int
        Loads among these that were queued before the use.
    drops : int
        Groups or targets that left the device.
    bytes_loaded, bytes_home : int
        Bytes that were brought to the device, and home.
    kept : int
        Bytes of device memory that the set takes: its frames, and 0 while it is suspended. In a
        ManagedWorkingSet, the bytes of all its memory that was on the device once: the driver keeps
        the frames until other memory needs them.
    failures : int
        Failures of driver calls, after which groups may be used at home.
    last_error : str or None
        The text of the last failure.
    """

    acquired: int
    hits: int
    mapped: int
    loads: int
    ahead: int
    drops: int
    bytes_loaded: int
    bytes_home: int
    kept: int
    failures: int
    last_error: str | None

    def __repr__(self) -> str:
        sizes = dict.fromkeys(("bytes_loaded", "bytes_home", "kept"), size_text)
        return record_text(self, **sizes)


class _GroupSet(Generic[Group]):
    """The common base of both sets: groups, their order, counters and close()."""

    def __init__(
        self, given: int | None, device: Device, is_managed: bool, suspendable: bool = False
    ) -> None:
        self._device = device
        self._process = os.getpid()
        self._lost: deque[Any] = deque()  # uses that ended where the driver refused calls
        self._kept_at_home = 0  # uses at home because an open use had found its group there
        self._groups: dict[Group, None] = {}
        self._order: tuple[Group, ...] | None = None
        free = self._device.memory_info.free
        self._room = room = max(1, free - free // _RESERVE) if given is None else given
        if room > free:
            raise MemoryError(
                f"{type(self).__name__} needs {room:,} bytes of {self._device}, and {free:,} are "
                "free: give less, or 'auto'"
            )
        self._frames: _Frames | None = _Frames(
            self._device.device_id, room, False, is_managed, suspendable
        )
        self._frames.begin_round(None)
        self._last_stats: WorkingSetStats | None = None

    @property
    def device(self) -> Device:
        """The device that works on the groups."""
        return self._device

    @property
    def nbytes(self) -> int:
        """The bytes of groups that are on the device, or on the way there. Driver: none."""
        frames = self._frames
        return 0 if frames is None else int(frames.stats()[0]["present"])

    @property
    def order(self) -> tuple[Group, ...] | None:
        """The order of uses, as a tuple of groups that repeats. None: the set learns it.

        Groups may come several times, or not at all. Uses in another order are slower, not wrong.
        TypeError or ValueError for anything but groups of this set. Driver: none.
        """
        return self._order

    @order.setter
    def order(self, value: Iterable[Group] | None) -> None:
        order = None if value is None else tuple(value)
        for group in order or ():
            self._check_own(group)
        numbers = tuple(number for group in order or () for number in group._numbers)
        with WorkingGroup._lock:
            self._open().give_order(numbers)
            self._order = order or None

    def remove(self, group: Group) -> None:
        """Take a group out of the set. Its contents stay at home, or at their managed address.

        Raises TypeError or ValueError if it is not a group of this set, RuntimeError if it is in
        use or its arrays are referenced, CUDAError if the driver fails; the group then stays. Safe
        from every thread. Driver: cuStreamWaitEvent, cuEventDestroy.
        """
        self._check_own(group)
        frames = self._open()
        group._begin_removal()
        try:
            frames.remove(group._numbers)
        except BaseException:
            group._is_removed = not group._numbers  # an interrupt can come after the removal
            raise
        finally:
            if group._is_removed:
                self._unlist(group)

    def stats(self) -> WorkingSetStats:
        """Counters since the beginning, final once the set is closed. Driver: none."""
        frames = self._frames
        if frames is None:
            assert self._last_stats is not None
            return self._last_stats
        counters, error = frames.stats()
        for name in ("acquired", "mapped"):
            counters[name] += self._kept_at_home
        names = WorkingSetStats._fields[:-1]
        return WorkingSetStats(**{name: counters[name] for name in names}, last_error=error)

    @property
    def is_closed(self) -> bool:
        """True once the set is closed, and in a forked child."""
        return self._frames is None or self._is_of_parent()

    def close(self) -> None:
        """End the set, and free its device memory. Contents stay as they are.

        Waits for the copies home. The frames stay while a use is open or an array of a use is
        referenced, and are freed with the last of these. Closing again does nothing. Raises
        CUDAError if the driver fails; the set then stays open. Safe from every thread. Driver:
        cuEventSynchronize, cuMemFree.
        """
        frames = self._frames
        if frames is None or self._is_of_parent():
            return
        frames.wait()
        with WorkingGroup._lock:
            self._last_stats = self.stats()
            self._frames = None
        frames.end_round()  # uses that are still open load nothing ahead

    def _end_lost(self) -> None:
        """Try again to end the uses that were lost where the driver refused calls."""
        for _ in range(len(self._lost)):
            with suppress(IndexError):  # another thread was faster
                end_without_caller(*self._lost.popleft())

    def _is_of_parent(self) -> bool:
        """True in a forked child, which has no part in the set."""
        return os.getpid() != self._process

    def _open(self) -> _Frames:
        frames = self._frames
        if frames is None:
            raise RuntimeError(f"{type(self).__name__} is closed")
        return frames

    def _check_own(self, group: Group) -> None:
        if not isinstance(group, WorkingGroup):
            raise TypeError(f"a WorkingGroup is needed, got {group!r}")
        if group._owner is not self:
            raise ValueError(f"{group!r} is a group of another set")
        if group._is_removed:
            raise ValueError(f"{group!r} was removed from the set")

    def _added(self, group: Group, add: Callable[[_Frames], object]) -> Group:
        """List a new group, which keeps its memory, and add its parts to the engine, or neither."""
        frames = self._open()
        self._groups[group] = None
        try:
            add(frames)
        except BaseException:
            frames.remove(group._numbers)
            self._unlist(group)
            raise
        return group

    def _unlist(self, group: Group) -> None:
        with WorkingGroup._lock:
            self._groups.pop(group, None)
            if self._order is not None:
                self._order = tuple(each for each in self._order if each is not group) or None

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled")

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        with WorkingGroup._lock:
            return iter([*self._groups])

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _described(self, room: str) -> str:
        if self._is_of_parent():
            return f"<{type(self).__name__} of the parent process>"
        is_suspended = isinstance(self, WorkingSet) and self.is_suspended
        state = " closed" if self.is_closed else " suspended" * is_suspended
        return (
            f"<{type(self).__name__} groups={len(self)} nbytes={self.nbytes} {room}={self._room} "
            f"{self._device}{state}>"
        )


class WorkingSet(_GroupSet[FramedGroup]):
    """Arrays of the host that a device works on in turn, in frames within a budget of its memory.

    Parameters
    ----------
    budget : int or str
        Bytes of device memory: as a number, as text such as "2 GiB", or "auto" for what is free
        now, less a fifth. The set takes them at once, and never more.
    device : Device, a device object of another library, or an ordinal
        None is the calling thread's current device.
    suspendable : bool
        True lets suspend() give the memory back for a while. The set then takes whole units of the
        driver, of 2 MiB, and other devices do not reach arrays in frames.

    Work that is queued on the stream of a use finds use.arrays in frames, which lie in the budget.
    Copies to frames go ahead of the uses, in an order that the set learns or is given. The groups
    whose next use is farthest away make room; if no order is known, the groups that are used least
    do. Results are right in any order of uses. A stream that reads what another stream wrote must
    wait for that stream, as with other memory.

    Use the set in a with block, or close() it. len() is the number of groups, iteration yields
    them. A use that loads takes time in proportion to the number of groups, so a set is meant for a
    few thousand.

    Raises TypeError and ValueError for bad arguments, MemoryError if less than the budget is free,
    NotImplementedError if the device cannot suspend memory. In a forked child, uses raise
    RuntimeError. Safe from every thread. Driver: cuMemAlloc, or cuMemCreate and cuMemMap;
    cuStreamCreate, cuEventCreate.
    """

    def __init__(
        self, budget: SupportsIndex | str, device: Any = None, *, suspendable: bool = False
    ) -> None:
        super().__init__(read_budget(budget), Device(device), False, suspendable)
        self._has_warned = False  # of a group that is larger than the budget

    @property
    def budget(self) -> int:
        """The bytes of device memory that the set takes."""
        return self._room

    def add(self, arrays: Any, access: Access = "read", name: str | None = None) -> WorkingGroup:
        """Copy arrays that are used together into page-locked memory of the host, as a group.

        Parameters
        ----------
        arrays : mapping of names to arrays, iterable of arrays, or one array
            C-contiguous arrays of the host or a device, of a dtype that buffers have: NumPy's,
            torch's, CuPy's, a ManagedBuffer, and others with shape and dtype that show their
            memory. They are not needed afterwards.
        access : {'read', 'write', 'scratch'}
            'read': uses do not write the arrays. 'write': writes of uses go home. 'scratch':
            nothing is copied; uses find undefined contents.
        name : str, optional
            For messages and repr.

        Returns the group. The device uses a group larger than the budget at home, over the bus: a
        UserWarning tells of the first one. Add a large array in parts, such as its rows.

        Raises TypeError and ValueError for bad arguments, RuntimeError for a closed set or buffer,
        MemoryError if the host lacks the memory, CUDAError if it cannot be page-locked; then
        nothing is added. Safe from every thread; releases the GIL while it copies. Driver:
        cuMemHostRegister, cuEventCreate, and cuMemcpyAsync for arrays of a device.
        """
        self._open()
        group = FramedGroup(self, _checked_name(name), _checked_access(access))
        group._home = home = _home_of(arrays, self._device)
        self._warn_of_size(home.nbytes)
        if not home.nbytes:
            return self._added(group, lambda frames: None)
        return self._added(
            group,
            lambda frames: frames.add(home.slab.handle, home.nbytes, access, group._numbers),
        )

    def suspend(self) -> None:
        """Give the device memory of the set back to the driver, until resume().

        Waits for the device; contents are at home then. The set works on while it is suspended,
        with all uses at home. Graphs that were captured in it may be launched, too: page-locked
        memory of the host takes the place of their half of the budget, and the set keeps it for the
        next time. Suspending again does nothing.

        Raises RuntimeError for a set that was made without suspendable=True or is closed, while a
        use holds a frame, or an array of a use is referenced, and while a stream captures;
        CUDAError if the driver fails, or the host lacks that memory. The set is not suspended then.
        Safe from every thread; during the call, no graph may run on a context of another library.
        Driver: cuCtxSynchronize, cuMemUnmap, cuMemRelease.
        """
        self._open().suspend()

    def resume(self) -> None:
        """Take the memory of the budget again, at the same addresses: graphs use it again.

        Raises RuntimeError for a closed set and while a stream captures, MemoryError if the device
        has less free, CUDAError if the driver fails; the set then stays suspended. Does nothing
        unless it is suspended. Safe from every thread; no graph of the set may run during the call.
        Driver: cuMemCreate, cuMemMap, cuMemSetAccess.
        """
        self._open().resume()

    @property
    def is_suspended(self) -> bool:
        """True between suspend() and resume(). Driver: none."""
        frames = self._frames
        return frames is not None and frames.stats()[0]["kept"] == 0

    def _warn_of_size(self, nbytes: int) -> None:
        """Called before a group is listed, so that nothing is added where warnings are errors."""
        if nbytes > self._room and not self._has_warned:
            warnings.warn(
                f"a group of {nbytes:,} bytes exceeds the budget of {self._room:,}: the device "
                "uses it at home, over the bus. Add it in parts, as in [working.add(row) for row "
                "in array], or give a larger budget",
                stacklevel=3,
            )
            self._has_warned = True

    def __repr__(self) -> str:
        return self._described("budget")


class ManagedWorkingSet(_GroupSet[ManagedGroup]):
    """Managed memory that a device works on in turn, and that keeps its address.

    Parameters
    ----------
    limit : int or str
        The most bytes of groups that the set brings to the device at a time, given as the budget of
        a WorkingSet is. It is not a budget: the driver keeps the frames of pages that have left
        until other memory needs them. stats().kept has the bytes of all groups that were on the
        device.
    device : Device, a device object of another library, or an ordinal
        None is the calling thread's current device.

    It is for programs whose addresses must not change, such as data with pointers. For others, a
    WorkingSet takes no more memory than its budget. Groups are prefetched ahead of their uses, and
    home when they make room. Without room, the device reaches a group by page faults.

    Raises TypeError and ValueError for bad arguments, MemoryError if less than the limit is free,
    NotImplementedError for a device without concurrent_managed_access. In a forked child, uses
    raise RuntimeError. Safe from every thread. Driver: cuStreamCreate, cuEventCreate.
    """

    def __init__(self, limit: SupportsIndex | str, device: Any = None) -> None:
        nbytes, place = read_budget(limit, "limit"), Device(device)
        if not place.concurrent_managed_access:
            raise NotImplementedError(
                f"ManagedWorkingSet needs concurrent_managed_access, which {place} lacks: its "
                "managed memory moves as a whole; WorkingSet works there"
            )
        super().__init__(nbytes, place, True)

    @property
    def limit(self) -> int:
        """The bytes of groups that the set brings to the device at once."""
        return self._room

    def add(self, targets: Any, access: Access = "read", name: str | None = None) -> WorkingGroup:
        """Add managed memory that is used together, as a group.

        Parameters
        ----------
        targets : a target or a sequence of them
            As for prefetch(), but no system memory. The set keeps them.
        access : {'read', 'write', 'scratch'}
            Groups with 'read' and 'write' are prefetched home when they make room. 'scratch':
            contents are not needed after a use, and whole pages are discarded where the driver can.
            A graph that was captured in a use must not use scratch.
        name : str, optional
            For messages and repr.

        Returns the group. Raises TypeError and ValueError for bad arguments, RuntimeError for a
        closed set or buffer; then nothing is added. Safe from every thread. Driver:
        cuPointerGetAttributes, cuEventCreate.
        """
        self._open()
        group = ManagedGroup(self, _checked_name(name), _checked_access(access))

        def add(frames: _Frames) -> None:
            sizes = frames.add_targets(targets, access, group._numbers)
            group._nbytes, group._kept = sizes[0], (sizes[1], sizes[2])
            group._targets = targets

        return self._added(group, add)

    def __repr__(self) -> str:
        return self._described("limit")


# --- homes ----------------------------------------------------------------------------------


def _checked_access(access: Access) -> Access:
    if isinstance(access, str) and access in get_args(Access):
        return access
    given = repr(access) if isinstance(access, str) else type(access).__name__
    raise ValueError(
        f"access must be 'read', 'write' or 'scratch', got {given}; pass several arrays as one list"
    )


def _checked_name(name: str | None) -> str | None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a str or None, got {name!r}")
    return name


def _home_of(arrays: Any, device: Device) -> Home:
    """Page-locked memory with the contents of the arrays, and their layout."""
    names: list[Any] | None = None
    if isinstance(arrays, Mapping):
        names, items = [*arrays], [*arrays.values()]
    elif (
        hasattr(arrays, "dtype")
        or isinstance(arrays, (str, bytes, bytearray))
        or not isinstance(arrays, Iterable)
    ):
        items = [arrays]
    else:
        items = [*arrays]
    layout, used = [], 0
    for number, item in enumerate(items):
        with _naming(number if names is None else names[number]):
            shape, dtype = _form_of(item)
        nbytes = prod(shape) * dtype.itemsize
        used = (used + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        layout.append((used, nbytes, shape, dtype))
        used += nbytes
    slab = _filled(names or range(len(items)), items, layout, used, device)
    pack = tuple if names is None else lambda made: dict(zip(names, made, strict=True))
    home = Home(slab, used, layout, pack)
    home.arrays(slab.handle, slab)  # raises for a form that a buffer cannot have
    return home


@contextmanager
def _naming(name: object) -> Iterator[None]:
    """Note in errors which array they are about."""
    try:
        yield
    except (TypeError, ValueError) as error:
        error.add_note(f"This is about arrays[{name!r}].")
        raise


def _form_of(array: Any) -> tuple[tuple[int, ...], DType]:
    try:
        shape, dtype = array.shape, array.dtype
    except AttributeError:
        raise TypeError(
            f"an array with shape and dtype is needed, got {type(array).__name__}"
        ) from None
    return tuple(map(int, shape)), DType(dtype)


def _filled(
    names: Iterable[Any], items: list[Any], layout: list[Any], nbytes: int, device: Device
) -> _Slab:
    """Page-locked memory with the contents of the arrays: filled first, as this locks faster."""
    available = host_available()
    if available is not None and nbytes > available:
        raise MemoryError(
            f"the group needs {nbytes:,} bytes of host memory, and {available:,} are available: "
            "free other memory, or add less"
        )
    slab = _Slab(device.device_id, max(nbytes, 1), True)
    for name, item, (offset, size, _, _) in zip(names, items, layout, strict=True):
        with _naming(name):
            if size:
                slab.fill(offset, size, item)
    slab.lock()
    return slab
