"""WorkingGroup and WorkingUse: memory that a device uses together, and one use of it.

A use asks the engine, _Frames, for each part of its group, and shows the arrays at their present
address. Arrays that outlive their use keep the parts acquired, so that nothing else gets their
memory.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

from managedmem._managedmem import DType, ManagedBuffer, _Frames, _Slab

if TYPE_CHECKING:
    from managedmem._working_set import ManagedWorkingSet, WorkingSet

Access = Literal["read", "write", "scratch"]


class WorkingGroup:
    """Memory that is used together, in a WorkingSet or a ManagedWorkingSet.

    Made by add() of the set. Safe from every thread.
    """

    # One lock for all sets: a garbage collection under the lock may end uses of groups of other
    # sets, so that threads could take the locks of several sets in different orders.
    _lock = threading.RLock()
    _ACCESS_THAT_STAYS: tuple[Access, ...] = ()

    def __init__(
        self, owner: WorkingSet | ManagedWorkingSet, name: str | None, access: Access
    ) -> None:
        self._owner = owner
        self._name = name
        self._access: Access = access
        self._numbers: list[int] = []  # of its parts in the engine
        self._users = 0  # uses by the device, as long as their arrays are referenced
        self._writers = 0  # open uses by the device that write
        self._users_at_home = 0  # open uses by the device that found no room
        self._host_users = 0
        self._host_writers = 0
        self._is_removed = False

    @property
    def set(self) -> WorkingSet | ManagedWorkingSet:
        """The set of the group."""
        return self._owner

    @property
    def name(self) -> str | None:
        """The name that add() was given."""
        return self._name

    @property
    def access(self) -> Access:
        """The access of uses: "read", "write" or "scratch"."""
        return self._access

    @property
    def nbytes(self) -> int:
        """The bytes that the group takes on the device."""
        raise NotImplementedError

    @property
    def is_resident(self) -> bool:
        """True if the group is on the device, or on the way there. Driver: none."""
        frames = self._owner._frames
        return frames is not None and not self._is_removed and all(map(frames.has, self._numbers))

    def use(self, *, stream: Any = None, access: Access | None = None) -> WorkingUse:
        """Bring the group to the device for work on the stream, until the use is closed.

        Parameters
        ----------
        stream : Stream, a stream object of another library, or a handle
            The stream of the work. None is the legacy default stream.
        access : {'read', 'write'}, optional
            Whether this use writes a group with access='write'. None is the access of the group.

        Returns a WorkingUse; the end of its with block closes it. Until then, work that uses
        use.arrays can be queued on the stream. Uses may nest and overlap. If the groups in use
        leave no room, or after a failure of the driver, the arrays are at home: the device reaches
        them over the bus, or by page faults if they are managed. In a WorkingSet, a group with
        access='write' that is used at home waits for the copies home first. If the stream captures
        a graph, the graph copies the group at each launch, if the half of the budget for graphs has
        room; the first use in a capture waits for the copies of the set. In a ManagedWorkingSet,
        the group is at home in a capture.

        Raises RuntimeError for a closed set, stream or buffer, a removed group, while the host
        writes the group, and while it reads a group that the use writes; ValueError for another
        access; CUDAError if a wait fails. Driver: cuStreamWaitEvent, cuMemcpyAsync, in a capture
        cuGraphAddMemcpyNode, cuStreamUpdateCaptureDependencies, cuUserObjectCreate and
        cuStreamSynchronize, or for managed memory cuMemPrefetchAsync.
        """
        return WorkingUse(self, stream, self._writes(access))

    @contextmanager
    def use_on_host(self, *, access: Literal["read", "write"] = "read") -> Iterator[Any]:
        """Let the host use the arrays of the group where their home is, in a with block.

        Parameters
        ----------
        access : {'read', 'write'}
            'write' if the host writes the arrays, which it may do with every access of the group.
            With 'read', arrays of a WorkingSet are read-only.

        The block waits until the writes of the device are at home, and with access='write' until
        the device has done its work. Its value has the form of use.arrays. In a WorkingSet these
        are buffers in page-locked memory, of which numpy() and memoryview() make arrays. Do not use
        them after the block: the device may write there, and later writes may be lost. The block
        works after the set is closed, too.

        Raises RuntimeError while the device writes the group, and with access='write' also while
        the device reads the group or an array of a use is referenced; ValueError for another
        access; CUDAError if the driver fails. Driver: cuEventRecord, cuEventSynchronize,
        cuCtxSynchronize.
        """
        if access not in ("read", "write"):
            raise ValueError(f"access must be 'read' or 'write', got {access!r}")
        writes = access == "write"
        self._begin_on_host(writes)
        frames = self._owner._frames
        try:
            self._wait_for_home(frames, writes)
            yield self._arrays_for_host(writes)
        finally:
            try:
                if writes and frames is not None:
                    self._forget_copies(frames, None)
            finally:
                with WorkingGroup._lock:
                    self._host_users -= 1
                    self._host_writers -= writes

    def _wait_for_home(self, frames: _Frames | None, writes: bool) -> None:
        """Wait until the host may use the memory. In a closed set, whose `frames` is None, uses may
        have ended after the close, so wait for all work of the device."""
        if frames is None:
            self._owner.device.sync()
        elif writes or self._is_written_at_home():
            frames.synchronize()
        else:
            frames.wait()

    def _forget_copies(self, frames: _Frames, stream: Any) -> None:
        """Note that the work on a stream has written the memory at home."""
        for number in [*self._numbers]:
            frames.changed(number, stream)

    def _begin_on_host(self, writes: bool) -> None:
        self._owner._end_lost()
        with WorkingGroup._lock:
            if self._writers or (writes and self._users):
                raise RuntimeError(
                    f"the device uses {self!r}: close its uses, and drop the references to their "
                    "arrays"
                )
            self._host_users += 1
            self._host_writers += writes

    def _writes(self, access: Access | None) -> bool:
        """True if a use with this access writes the group."""
        if access is None or access == self._access:
            return self._access != "read"
        if self._access == "write" and access == "read":
            return False
        allowed = "'read' or 'write'" if self._access == "write" else repr(self._access)
        raise ValueError(
            f"access must be None or {allowed} for a group that was added with "
            f"access={self._access!r}, got {access!r}"
        )

    def _begin(self, writes: bool) -> _Frames:
        """Count a use by the device; returns the engine."""
        self._check_memory()
        self._owner._end_lost()
        with WorkingGroup._lock:
            frames = self._owner._open()
            if self._is_removed:
                raise RuntimeError(f"{self!r} was removed from its set: add its memory again")
            if self._host_writers or (writes and self._host_users):
                raise RuntimeError(f"the host uses {self!r}: leave use_on_host() first")
            self._users += 1
            self._writers += writes
        return frames

    def _end(self, users: int, writers: int) -> None:
        with WorkingGroup._lock:
            self._users -= users
            self._writers -= writers

    def _begin_removal(self) -> None:
        self._owner._end_lost()
        with WorkingGroup._lock:
            if self._is_removed:
                raise ValueError(f"{self!r} was removed before")
            if self._users or self._host_users:
                raise RuntimeError(
                    f"{self!r} is in use: close its uses, and drop the references to their arrays"
                )
            self._is_removed = True

    def _check_memory(self) -> None:
        """Raise RuntimeError if the memory was closed."""

    def _is_written_at_home(self) -> bool:
        """True if the device may have written the memory where the host finds it."""
        raise NotImplementedError

    def _stays_at_home(self) -> bool:
        """True if open uses found the memory at home, and later uses must see their writes."""
        with WorkingGroup._lock:
            stays = self._access in self._ACCESS_THAT_STAYS and self._users_at_home > 0
            self._owner._kept_at_home += stays
        return stays

    def _begin_at_home(self, frames: _Frames, writes: bool) -> None:
        """Count a use by the device at home, for lack of room."""
        with WorkingGroup._lock:
            self._users_at_home += 1

    def _end_at_home(self, frames: _Frames, writes: bool, stream: Any) -> None:
        """End a use at home after the work that is queued on a stream."""
        with WorkingGroup._lock:
            self._users_at_home -= 1

    def _arrays_at(self, start: int, owner: object) -> Any:
        """The arrays for an address of the device; they keep `owner` alive."""
        raise NotImplementedError

    def _arrays_at_home(self) -> Any:
        raise NotImplementedError

    def _arrays_for_host(self, writes: bool) -> Any:
        """The arrays at home, read-only unless the host writes them."""
        return self._arrays_at_home()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a WorkingGroup cannot be copied or pickled")

    def __repr__(self) -> str:
        name = "" if self._name is None else f" name={self._name!r}"
        removed = " removed" if self._is_removed else ""
        return f"<WorkingGroup{name} access={self._access} nbytes={self.nbytes}{removed}>"


def _renew_lock() -> None:
    """Replace the lock in a forked child, which lacks the thread that may hold it."""
    WorkingGroup._lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class _ReadOnly:
    """The owner of buffers over memory that must not be written: its interface says read-only."""

    def __init__(self, slab: _Slab) -> None:
        self.slab = slab

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": (self.slab.nbytes,),
            "typestr": "|u1",
            "data": (self.slab.handle, True),
            "version": 3,
        }


class Home(NamedTuple):
    """Page-locked memory of the host, and the arrays in it."""

    slab: _Slab
    nbytes: int
    layout: list[tuple[int, int, tuple[int, ...], DType]]  # offset, bytes, shape, type
    pack: Callable[[list[ManagedBuffer]], Any]  # makes what add() was given: a dict or a tuple

    def arrays(self, start: int, owner: object) -> Any:
        """Arrays with this layout over the memory at an address."""
        return self.pack(
            [
                ManagedBuffer.from_handle(start + offset, nbytes, owner=owner).view(dtype, shape)
                for offset, nbytes, shape, dtype in self.layout
            ]
        )


class FramedGroup(WorkingGroup):
    """A group of a WorkingSet."""

    _ACCESS_THAT_STAYS = ("write", "scratch")

    _home: Home
    _was_written_at_home = False

    @property
    def nbytes(self) -> int:
        return self._home.nbytes

    def _is_written_at_home(self) -> bool:
        return self._was_written_at_home

    def _begin_at_home(self, frames: _Frames, writes: bool) -> None:
        if self._access == "write":
            frames.wait()  # by the host: a stream that captures cannot follow the copies home
        self._was_written_at_home |= writes
        super()._begin_at_home(frames, writes)

    def _end_at_home(self, frames: _Frames, writes: bool, stream: Any) -> None:
        if writes:
            self._forget_copies(frames, stream)
        super()._end_at_home(frames, writes, stream)

    def _arrays_at(self, start: int, owner: object) -> Any:
        return self._home.arrays(start, owner)

    def _arrays_at_home(self) -> Any:
        return self._home.arrays(self._home.slab.handle, self._home.slab)

    def _arrays_for_host(self, writes: bool) -> Any:
        slab = self._home.slab
        return self._home.arrays(slab.handle, slab if writes else _ReadOnly(slab))


class ManagedGroup(WorkingGroup):
    """A group of a ManagedWorkingSet."""

    _ACCESS_THAT_STAYS = ("scratch",)  # bringing it to the device would discard its contents

    _nbytes = 0
    _targets: Any = ()
    _kept: tuple[tuple[Any, ...], Any] = ((), None)  # the targets, and exports of their memory

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def _is_written_at_home(self) -> bool:
        return True

    def _check_memory(self) -> None:
        for item in self._kept[0]:
            if isinstance(item, ManagedBuffer) and item.is_closed:
                raise RuntimeError(f"memory of {self!r} was closed: remove the group")

    def _arrays_at(self, start: int, owner: object) -> Any:
        return self._targets

    def _arrays_at_home(self) -> Any:
        return self._targets


# --- uses -----------------------------------------------------------------------------------


class _Parts:
    """The parts of a use that are on the device. Arrays of the use keep this object alive, even
    when the use is over."""

    outlives = False
    is_over = False

    def __init__(self, group: WorkingGroup, frames: _Frames) -> None:
        self.group = group
        self.frames = frames
        self.numbers: list[int] = []  # filled by the engine, so that a signal cannot lose them
        self.stream: Any = None

    def __del__(self) -> None:
        self.is_over = True  # for close() of a use that is garbage together with its arrays
        if self.outlives:
            end_without_caller(self, self.frames)

    def _end(self) -> None:
        self.frames.release(self.numbers, False, self.stream, False)
        self.group._end(1, 0)

    def _end_late(self) -> None:
        self.stream = None
        self._end()


def end_without_caller(ended: _Parts | WorkingUse, frames: _Frames) -> None:
    """End uses that the garbage collector has found, now or with a later call of their set."""
    try:
        try:
            ended._end()
        except (RuntimeError, TypeError, ValueError):  # the stream is closed, or not a stream
            frames.synchronize()
            ended._end_late()
    except Exception:  # such as in a host function, where the driver refuses calls
        ended.group._owner._lost.append((ended, frames))


class WorkingUse:
    """The use of a WorkingGroup by work on a stream, until it is closed; a context manager.

    Made by WorkingGroup.use(). Safe from every thread.
    """

    _is_open = False
    _is_counted = False
    _is_at_home = False
    _start: int | None = None
    _shown: Any = None

    def __init__(self, group: WorkingGroup, stream: Any, writes: bool) -> None:
        self._group = group
        self._stream = stream
        self._writes = writes
        self._parts: _Parts | None = _Parts(group, group._begin(writes))
        self._is_counted = self._is_open = True
        try:
            self._acquire(self._parts)
        except BaseException:
            end_without_caller(self, self._parts.frames)
            raise

    @property
    def group(self) -> WorkingGroup:
        """The group."""
        return self._group

    @property
    def is_resident(self) -> bool:
        """True if use.arrays are on the device, False if they are at home."""
        return self._start is not None or not self._group._numbers

    @property
    def arrays(self) -> Any:
        """The arrays for work on the stream, as a dict or a tuple.

        In a WorkingSet: buffers in a frame of the device, or at home if there is no room. A dict if
        add() was given names, else a tuple. Libraries that read __cuda_array_interface__ or DLPack
        take them without a copy. While one of them, or an array over it, is referenced, the group
        keeps its frame after the use. Do not write the array after the use: the write does not go
        home. In a ManagedWorkingSet: the targets themselves.

        Raises RuntimeError once the use is closed.
        """
        with WorkingGroup._lock:
            if not self._is_open:
                raise RuntimeError(f"the use of {self._group!r} is closed")
            if self._shown is None:
                self._shown = (
                    self._group._arrays_at_home()
                    if self._start is None
                    else self._group._arrays_at(self._start, self._parts)
                )
            return self._shown

    def close(self, *, stream: Any = None) -> None:
        """End the use after the work that is now queued on a stream; None is the stream of the use.

        The writes of the use go home behind that work. Closing again does nothing. Raises
        RuntimeError for a closed stream, CUDAError if the driver refuses; the use then stays open.
        Driver: cuEventRecord, cuMemcpyAsync.
        """
        stream = self._stream if stream is None else stream
        with WorkingGroup._lock:
            if not self._is_open:
                return
            parts, self._parts = self._parts, None
            self._is_open = False
            self._shown = None
        assert parts is not None
        frames, numbers, seen = parts.frames, parts.numbers, weakref.ref(parts)
        del parts  # now only arrays of the caller can reference it
        kept = seen()
        self._close(frames, numbers, None if kept is None or kept.is_over else kept, stream)

    def _close(self, frames: _Frames, numbers: list[int], kept: _Parts | None, stream: Any) -> None:
        try:
            self._release(frames, numbers, kept is not None, stream)
        except BaseException:
            if kept is None:
                kept = _Parts(self._group, frames)
                kept.numbers = numbers
            self._parts = kept
            self._is_open = True
            raise
        if kept is not None:
            kept.stream = stream
            kept.outlives = True

    def _acquire(self, parts: _Parts) -> None:
        """Acquire all parts. If one has no room on the device, the use is at home."""
        group = self._group
        numbers = () if group._stays_at_home() else group._numbers
        acquired = parts.frames.acquire(numbers, self._writes, self._stream, parts.numbers)
        if acquired and all(acquired):
            self._start = acquired[0]
            return
        group._begin_at_home(parts.frames, self._writes)
        self._is_at_home = True

    def _release(self, frames: _Frames, numbers: list[int], goes_on: bool, stream: Any) -> None:
        frames.release(numbers, self._writes, stream, goes_on)
        if self._is_at_home:
            self._group._end_at_home(frames, self._writes, stream)
            self._is_at_home = False
        if self._is_counted:
            self._is_counted = False
            self._group._end(not goes_on, self._writes)

    def __enter__(self) -> WorkingUse:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._is_open and self._parts is not None:
            end_without_caller(self, self._parts.frames)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a WorkingUse cannot be copied or pickled")

    def _end(self) -> None:
        self.close()

    def _end_late(self) -> None:
        self._stream = None
        self.close()

    def __repr__(self) -> str:
        state = "" if self._is_open else " closed"
        return f"<WorkingUse of {self._group!r}{state}>"
