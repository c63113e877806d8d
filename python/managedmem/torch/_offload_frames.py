"""Parts that offload() streams: homes on the host, frames on the device, and the change between.

The tensors of a part keep their storages. While a part is in use, its storages point to a frame,
and otherwise to the home. Views and saved tensors follow, because torch reads the pointer whenever
it queues work. The pointer is a word of a private struct of torch, which a trial finds.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from managedmem import CUDAError
from managedmem._managedmem import _Frames, _Slab
from managedmem.torch._offload_seen import DataWatch

_DLPACK_CUDA = 2
_TRIALS = 4
_UNKNOWN = -1  # a count of writes that differs from all others
_WORDS = 16  # of the struct behind a storage; one of them is the pointer


class Span:
    """Bytes of a slab, from which torch makes tensors. It keeps the slab."""

    def __init__(self, slab: _Slab, offset: int, nbytes: int) -> None:
        self.slab = slab
        self.address = slab.handle + offset
        self.nbytes = nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }

    def tensor(self, place: torch.device) -> Tensor:
        """A tensor of bytes with a storage of its own, which keeps the slab."""
        if self.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=place)
        if place.type == "cuda" and place.index == self.slab.device_id:
            return torch.as_tensor(self, device=place)
        if place.type == "cuda":
            return _on_another(self.tensor(torch.device("cpu")), place.index)
        array = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        array.span = self  # type: ignore[attr-defined]
        return torch.frombuffer(array, dtype=torch.uint8)


def _on_another(tensor: Tensor, device: int) -> Tensor:
    """The same memory as a tensor of another device than the one it was page-locked for first.

    By the address alone, torch would take it for memory of that first device, and copy it. A DLPack
    struct names the device in the words behind the address, so these are changed.
    """
    capsule = tensor.__dlpack__()
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    words = (ctypes.c_int32 * 4).from_address(address(capsule, b"dltensor"))
    words[2], words[3] = _DLPACK_CUDA, device
    return torch.utils.dlpack.from_dlpack(capsule)


# --- the pointer of a storage -------------------------------------------------------------


@cache
def _word_of_pointer() -> int | None:
    """The index of the word that is the pointer; None if this torch has the pointer elsewhere."""
    # Several structs are compared: the words behind one may have its pointer too, left there by an
    # earlier struct.
    memory = [(ctypes.c_uint8 * 64)(*[7] * 64) for _ in range(_TRIALS)]
    bases = [torch.frombuffer(each, dtype=torch.uint8) for each in memory]
    structs = [(ctypes.c_uint64 * _WORDS).from_address(b.untyped_storage()._cdata) for b in bases]
    starts = [ctypes.addressof(each) for each in memory]
    pairs = list(zip(structs, starts, strict=True))
    places = [i for i in range(_WORDS) if all(words[i] == start for words, start in pairs)]
    if len(places) != 1:
        return None
    base, words, (place,) = bases[0], structs[0], places
    ctypes.memset(starts[0], 0, 64)
    view = base.view(torch.int16)[4:]
    words[place] = starts[1]
    followed = base.data_ptr() == starts[1] and view.data_ptr() == starts[1] + 8
    followed = followed and int(view[0]) == 0x707
    words[place] = starts[0]
    return place if followed and base.data_ptr() == starts[0] else None


def can_move_storages() -> bool:
    """True if the pointers of storages can be changed with this torch."""
    return _word_of_pointer() is not None


def _pointer_of(storage: torch.UntypedStorage) -> ctypes.c_uint64:
    """The pointer in the struct of a storage. The caller must keep the storage."""
    index = _word_of_pointer()
    assert index is not None
    return ctypes.c_uint64.from_address(storage._cdata + 8 * index)


# --- a part -------------------------------------------------------------------------------


@dataclass(slots=True)  # frozen would take longer to make
class FrameUse:
    """A use of a part in a frame. Uses in the same frame are equal."""

    part: FramedPart
    number: int
    address: int
    is_watched: bool = field(default=False, compare=False)  # for writes through `data`


class FramedPart:
    """A part with its home, in a set of frames. Safe from every thread."""

    def __init__(
        self,
        frames: _Frames,
        slab: _Slab,
        offset: int,
        storages: Iterable[torch.UntypedStorage],
        tensors: Iterable[Tensor],
        is_written: bool,
        is_unwatched: bool,
        in_round: Callable[[], bool] | None = None,
    ) -> None:
        """With `in_round`, watch for writes through `data`, in uses and while in_round()."""
        self.frames = frames
        self.slab = slab
        self.is_shared = slab.is_shared  # with other processes: nothing may be written at home
        self.start = slab.handle + offset
        self.storages = list(storages)
        self.pointers = [(_pointer_of(s), s.data_ptr() - self.start) for s in self.storages]
        self.nbytes = max(s.data_ptr() - self.start + s.nbytes() for s in self.storages)
        every = list(tensors)
        # Tensors that were made in inference mode count no writes.
        self.tensors = [t for t in every if not t.is_inference()]
        self.number = frames.add(self.start, self.nbytes, "write" if is_written else "read")
        self.uses: list[FrameUse] = []  # open ones, the latest one last
        self.written: set[int] = set()  # the numbers of uses whose frames were written
        self.is_unwatched = is_unwatched  # its uses may write in a way that torch does not count
        me = weakref.ref(self)  # weak: self keeps the watch
        self.in_round = in_round
        self.data = DataWatch(every if in_round else (), lambda data: _note_write(me, data))
        self.is_below = False  # True if calls of a module around it may write through `data`
        self.is_settled_later = False  # by a backward pass that has stepped it
        self.lock = threading.RLock()  # a collection while it is held may end uses
        self.writes = self._count_writes()

    def acquire(self, stream: int | None, writes: bool, in_python: bool = False) -> FrameUse | None:
        """Let the tensors point to a frame for work on the stream; None if they stay at home.

        The caller must release() the result. With `in_python`, the use notices reads of `data`.
        """
        with self.lock:
            if self.data.keeps_data():
                self.data.was_read = self.is_unwatched = True
            was_read = self.data.was_read or (self.is_below and not in_python)
            if not self.uses and (was_read or self._count_writes() != self.writes):
                self.note_writes(stream)
        held: list[int] = []  # changed in C, where no signal interrupts
        use = None
        try:
            (address,) = self.frames.acquire([self.number], writes, stream or 0, held)
            if address == 0:
                return None
            is_watched = in_python and self.is_unwatched and self.data.sees_all()
            use = FrameUse(self, held[0], address, is_watched)
            with self.lock:
                self._note_counted()
                self.uses.append(use)
                self._point_to(address)
        except BaseException:
            self._remove(use)
            self.frames.release(held, False, stream or 0, False)
            raise
        return use

    def release(self, use: FrameUse, stream: int | None, written: bool) -> bool:
        """End a use; True if the part is on its way home. settle() waits for its arrival.

        If the driver refuses, the part stays in its frame. A part that is shared is never written
        at home: its written frame is dropped.
        """
        with self.lock:
            self._note_counted()
            if written or (self.is_unwatched and not use.is_watched):
                self.written.add(use.number)
            ends_writes = use.number in self.written and self.uses.count(use) == 1
            sends = ends_writes and not self.is_shared
            held = [use.number]
            try:
                self.frames.release(held, sends, stream or 0, False)
            finally:
                if not held:  # released, even if a signal came then
                    if ends_writes:
                        self.written.discard(use.number)
                    self._remove(use)
            if ends_writes and self.is_shared:
                self.note_writes(stream)
        return sends

    def _note_counted(self) -> None:
        """Note writes that torch has counted since as writes of the frame that the tensors use."""
        if self.uses and (counted := self._count_writes()) != self.writes:
            self.written.add(self.uses[-1].number)
            self.writes = counted

    def _remove(self, use: FrameUse | None) -> None:
        """Forget a known use. The tensors point to the frame of the latest other one, or home."""
        with self.lock:
            self.uses = [each for each in self.uses if each is not use]
            self._point_to(self.uses[-1].address if self.uses else self.start)

    def follow(self, tensor: Tensor) -> None:
        """Watch another tensor of the part for writes. Its writes before this call count, too."""
        if not tensor.is_inference():
            with self.lock:
                self.tensors.append(tensor)
                if self.in_round:
                    self.data.add(tensor)

    def keep(self, tensors: list[Tensor]) -> None:
        """Look for writes of these tensors alone."""
        with self.lock:
            is_written = self._count_writes() != self.writes
            self.tensors = [t for t in tensors if not t.is_inference()]
            self.writes = self._count_writes() - is_written
            self.data.keep(tensors)

    def note_writes(self, stream: int | None) -> None:
        """Note that work on the stream may have written the tensors at home."""
        self.writes = self._count_writes()
        with contextlib.suppress(CUDAError):  # the device was waited for instead
            self.frames.changed(self.number, stream or 0)

    def leave_frames(self) -> None:
        """Give the part's number back. No use may be open, and none may begin later."""
        self.data.end()
        with contextlib.suppress(CUDAError):
            self.frames.remove([self.number])

    def go_home(self, place: torch.device) -> None:
        """Let the tensors point home. Contents that the driver refused to send home are copied."""
        with self.lock:
            for storage, (_, offset) in zip(self.storages, self.pointers, strict=True):
                if storage.data_ptr() != self.start + offset and not self.is_shared:
                    home = Span(self.slab, self.start + offset - self.slab.handle, storage.nbytes())
                    frame = torch.empty(0, dtype=torch.uint8, device=place).set_(storage)
                    home.tensor(place).copy_(frame)
            self._point_to(self.start)

    def _count_writes(self) -> int:
        return sum([t._version for t in self.tensors])

    def _point_to(self, start: int) -> None:
        for pointer, offset in self.pointers:
            pointer.value = start + offset


def _note_write(ref: weakref.ref[FramedPart], data: Tensor | None) -> None:
    """Note a write that torch does not count, or a read of `data`, through which writes may come.

    Between rounds, a read matters only if its `data` is kept, because each round loads what is at
    home when it begins.
    """
    part = ref()
    if part is not None and part.in_round is not None:
        with part.lock:
            if part.uses or part.in_round():
                part.written.update(use.number for use in part.uses)
                part.writes = _UNKNOWN
                if data is not None:
                    part.data.was_read = part.is_unwatched = True
            elif data is not None and not part.data.was_read:
                part.data.keeps_data()  # forgets those that are gone
                part.data.kept.append(weakref.ref(data))


def end_use(use: FrameUse, stream: int | None, written: bool = False) -> None:
    """Release a part, and ignore a refusal of the driver.

    Later work on the stream follows the copy home, if there is one. Callers whose uses are known to
    write settle these together instead.
    """
    part = use.part
    with contextlib.suppress(CUDAError):
        if part.release(use, stream, written) and not (written or part.is_settled_later):
            part.frames.settle(stream or 0)
