"""Weights of many experts in one parameter: each call loads the slices that it names.

While a call of their module runs in Python without gradients, the parameter is of another class. A
number as its index then gives a tensor of that slice, which is loaded into a frame as a part of its
own. All other operations use the whole parameter at home, which the device reads over the bus.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from managedmem._managedmem import _Frames, _Slab
from managedmem.torch._offload_copies import plain_copy
from managedmem.torch._offload_frames import FramedPart, FrameUse, Span, end_use
from managedmem.torch._offload_places import Target
from managedmem.torch._offload_plan import Part
from managedmem.torch._offload_seen import DataWatch

if TYPE_CHECKING:
    from managedmem.torch._offload_coverage import Watch

_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.int8)  # torch takes uint8 for a mask
_WRITTEN = (
    "{name!r} was written in a call that used slices of it on the device: the write is {fate}, and "
    "other uses in the call may not have seen it. Call remove(), and offload the module with "
    "places={{{name!r}: 'home'}}"
)
# By the id of the parameter. Weak: a call that Ctrl-C ended may never hide its slices.
_shown: weakref.WeakValueDictionary[int, SlicedPart] = weakref.WeakValueDictionary()


class SlicedParameter(nn.Parameter):
    """The class of a parameter during a call that may name its slices."""

    def __getitem__(self, index: Any) -> Any:
        sliced = _shown.get(id(self))
        slices = None if sliced is None else sliced.named(index)
        return super().__getitem__(index) if slices is None else slices

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return plain_copy(self, memo)


@dataclass(frozen=True, slots=True)
class _Held:
    """A slice in use, and the counts of writes at its beginning."""

    number: int
    use: FrameUse
    stream: int | None
    writes: tuple[int, int]  # of the slice, of the parameter


class SlicedPart:
    """A part whose slices are loaded, one by one. Safe from every thread."""

    def __init__(
        self,
        part: Part,
        frames: _Frames | None,
        slab: _Slab,
        offset: int,
        place: torch.device,
        call_of: Callable[[SlicedPart], SliceUses | None],
        in_round: Callable[[], bool] | None,
    ) -> None:
        piece = part.blocks[0].pieces[0]
        self.part = part
        self.parameter = piece.tensors[0]
        self.name = piece.names[0] if piece.names else part.name
        self.call_of = call_of  # in the present thread
        self.shown: list[None] = []  # an entry for each call that shows slices
        self.slices: list[tuple[Tensor, FramedPart]] = []
        if frames is not None and part.slice_nbytes:
            for number in range(self.parameter.shape[0]):
                start = offset + number * part.slice_nbytes
                self.slices.append(self._make(frames, slab, start, place))
        me = weakref.ref(self)  # weak: self keeps the watch
        watched = in_round is not None and self.slices and not part.is_shared
        self.in_round = in_round
        self.data = DataWatch([self.parameter] if watched else (), lambda _: _note_write(me))
        self.place = self._place()
        self.writes = self.count_writes() if self.slices else 0

    def _make(
        self, frames: _Frames, slab: _Slab, start: int, place: torch.device
    ) -> tuple[Tensor, FramedPart]:
        flat = Span(slab, start, self.part.slice_nbytes).tensor(place)
        tensor = flat.view(self.parameter.dtype).view(self.parameter.shape[1:])
        storages = [tensor.untyped_storage()]
        written = self.part.written
        return tensor, FramedPart(frames, slab, start, storages, [tensor], written, False)

    def _place(self) -> tuple[object, ...]:
        """Where the parameter is: to() and assignments to `data` change it."""
        p = self.parameter
        return p.data_ptr(), p.dtype, p.shape, p.stride()

    def show(self) -> None:
        """Give the parameter the class that looks at indices."""
        self.shown.append(None)
        _shown[id(self.parameter)] = self
        if type(self.parameter) is nn.Parameter:
            self.parameter.__class__ = SlicedParameter

    def hide(self) -> None:
        """Undo show(). The last call gives the parameter its own class back."""
        self.shown.pop()
        if not self.shown:
            _shown.pop(id(self.parameter), None)
            if type(self.parameter) is SlicedParameter:
                self.parameter.__class__ = nn.Parameter  # type: ignore[assignment]

    def named(self, index: object) -> Tensor | None:
        """The slice of a number, if it can be loaded; None for other indices."""
        number = self._number_of(index)
        call = None if number is None else self.call_of(self)
        if number is None or call is None:
            return None
        at_home = not self.slices or self.data.was_read or torch.is_grad_enabled()
        if at_home or self._place() != self.place:
            call.read_slice(self)
            return None
        return call.load(self, number)

    def follow_writes(self, stream: int | None) -> None:
        """If the parameter was written at home, drop the slices that were loaded before."""
        if self.count_writes() != self.writes:
            self.writes = self.count_writes()
            for _, part in self.slices:
                part.note_writes(stream)

    def go_home(self, place: torch.device) -> None:
        """Let all slices point home, as FramedPart.go_home()."""
        for _, part in self.slices:
            part.go_home(place)

    def count_writes(self) -> int:
        """The number of writes of the parameter that torch has counted."""
        return self.parameter._version

    def _number_of(self, index: object) -> int | None:
        if type(index) is Tensor and index.dim() == 0 and index.dtype in _NUMBERS:
            if torch._C._functorch.is_functorch_wrapped_tensor(index):
                return None
            index = int(index)
        count = self.parameter.shape[0]
        if type(index) is not int or not -count <= index < count:
            return None
        return index % count


def _note_write(ref: weakref.ref[SlicedPart]) -> None:
    """Note a write that torch does not count: from now on, calls read the slices at home."""
    sliced = ref()
    if sliced is not None and sliced.in_round and (sliced.shown or sliced.in_round()):
        sliced.data.was_read = True


class SliceUses:
    """The slices that a call holds: the latest one of each parameter."""

    def __init__(self, parts: Iterable[SlicedPart], target: Target, watch: Watch | None) -> None:
        self.parts = list(parts)
        self.target = target
        self.watch = watch
        self.is_open = True
        self.held: dict[SlicedPart, _Held] = {}
        self.named: set[SlicedPart] = set()  # the call uses others as a whole
        self.written: SlicedPart | None = None

    def show(self) -> None:
        """Begin the call: let it name slices."""
        for sliced in self.parts:
            sliced.show()

    def end(self) -> None:
        """End the call. Any thread may; the second time does nothing."""
        if self.is_open:
            self.is_open = False
            for sliced in self.parts:
                self._let_go(sliced)
                sliced.hide()
                if sliced not in self.named:
                    self._count(sliced, sliced.part.nbytes)

    def check(self) -> None:
        """Raise if a slice in use, or its parameter, was written."""
        if self.written is not None:
            sliced, self.written = self.written, None
            fate = "lost" if sliced.part.is_shared else "kept"
            raise RuntimeError(_WRITTEN.format(name=sliced.name, fate=fate))

    def load(self, sliced: SlicedPart, number: int) -> Tensor:
        """A slice in a frame, or at home if there is no room."""
        stream = self.target.stream()
        tensor, part = sliced.slices[number]
        held = self.held.get(sliced)
        self.named.add(sliced)
        if (
            held is None
            or held.number != number
            or held.stream != stream
            or _was_written(sliced, held)
        ):
            self._let_go(sliced)
            self.check()
            sliced.follow_writes(stream)
            writes = tensor._version, sliced.count_writes()
            use = part.acquire(stream, writes=False)
            if use is not None:
                self.held[sliced] = _Held(number, use, stream, writes)
            else:
                self.read_slice(sliced)
            if not self.is_open:  # ended by another thread meanwhile
                self._let_go(sliced)
        return tensor.detach()  # its own shape and requires_grad, the same storage

    def read_slice(self, sliced: SlicedPart) -> None:
        """Count a slice that is read at home."""
        self.named.add(sliced)
        self._count(sliced, sliced.part.nbytes // sliced.parameter.shape[0])

    def _let_go(self, sliced: SlicedPart) -> None:
        held = self.held.pop(sliced, None)
        if held is not None:
            if _was_written(sliced, held):
                self.written = sliced
            end_use(held.use, held.stream)

    def _count(self, sliced: SlicedPart, nbytes: int) -> None:
        if self.watch is not None:
            self.watch.read_at_home(sliced.part, nbytes)


def _was_written(sliced: SlicedPart, held: _Held) -> bool:
    return held.writes != (sliced.slices[held.number][0]._version, sliced.count_writes())
