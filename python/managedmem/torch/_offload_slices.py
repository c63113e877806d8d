"""Weights of many experts in one parameter: each call loads the slices that it names.

While a call of their module runs, the module shows a stand-in in place of the parameter. A number
as its index gives a tensor of that slice, which is a part of its own in the frames. Every other
operation gets the parameter, which the device reads at home, over the bus.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from managedmem._managedmem import _Frames, _Slab
from managedmem.torch._offload_frames import FramedPart, FrameUse, Span, end_use
from managedmem.torch._offload_places import Target
from managedmem.torch._offload_plan import Part

if TYPE_CHECKING:
    from managedmem.torch._offload_coverage import Watch

_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.int8)  # torch takes uint8 for a mask
# They read no contents.
_QUESTIONS = frozenset(
    {"__get__", "__len__", "data_ptr", "dim", "element_size", "get_device", "is_contiguous"}
    | {"is_floating_point", "ndimension", "nelement", "numel", "size", "storage_offset", "stride"}
)


class StandIn(Tensor):
    """Stands for a parameter in its module."""

    _is_param = True  # so that it is an instance of Parameter
    sliced: SlicedPart

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        first = args[0] if args else None
        if isinstance(first, StandIn) and func is Tensor.__getitem__:
            named = first.sliced.named(args[1])
            if named is not None:
                return named
        if func.__name__ not in _QUESTIONS:
            for value in args:
                if isinstance(value, StandIn):
                    value.sliced.used_as_a_whole()
        named_arguments = {name: _plain(value) for name, value in (kwargs or {}).items()}
        return func(*map(_plain, args), **named_arguments)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return copy.deepcopy(self.sliced.parameter, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.sliced.parameter.__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        if name == "sliced":
            raise AttributeError(name)
        return getattr(self.sliced.parameter, name)


def _plain(value: Any) -> Any:
    """The parameter in place of its stand-in."""
    if isinstance(value, StandIn):
        return value.sliced.parameter
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


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
    ) -> None:
        self.part = part
        self.parameter = part.blocks[0].pieces[0].tensors[0]
        self.frames = frames if part.slice_nbytes else None
        self.slab = slab
        self.offset = offset
        self.place = place
        self.call_of = call_of  # in the present thread
        self.shown = [0] * 0  # an entry for each call that shows the stand-in
        self.slices: dict[int, tuple[Tensor, FramedPart]] = {}
        self.writes = self._count_writes()
        self.lock = threading.RLock()  # a collection may end uses in it
        self.stand_in = self.parameter.detach().as_subclass(StandIn)
        self.stand_in.sliced = self

    def show(self) -> None:
        """Let the modules show the stand-in, unless they have another parameter by now."""
        self.shown.append(0)
        for module, key in self.part.owners:
            if module._parameters.get(key) is self.parameter:
                vars(module)[key] = self.stand_in

    def hide(self) -> None:
        """End what show() began. Another thread may still show it, or use the parameter."""
        self.shown.pop()
        for module, key in self.part.owners if not self.shown else ():
            if vars(module).get(key) is self.stand_in:
                vars(module).pop(key, None)

    def named(self, index: Any) -> Tensor | None:
        """What an index gives if it begins with the number of a slice, and None for others."""
        first, rest = (index[0], index[1:]) if type(index) is tuple and index else (index, ())
        number = self._number_of(first)
        call = self.call_of(self)
        if number is None or call is None:
            return None
        found = None if self._is_recorded() else call.load(self, number)
        if found is None:
            call.read_slice(self)
            found = self.parameter[number]
        return found[rest] if rest else found

    def used_as_a_whole(self) -> None:
        """An operation reads or writes the parameter at home."""
        call = self.call_of(self)
        if call is not None:
            call.read_all(self)

    def slice(self, number: int, stream: int | None) -> tuple[Tensor, FramedPart] | None:
        """A slice for work on the stream; None if slices have no frames."""
        if self.frames is None:
            return None
        with self.lock:
            if self._count_writes() != self.writes:
                self.writes = self._count_writes()
                for _, part in self.slices.values():
                    part.note_writes(stream)
            if number not in self.slices:
                self.slices[number] = self._make(self.frames, number)
            return self.slices[number]

    def _make(self, frames: _Frames, number: int) -> tuple[Tensor, FramedPart]:
        start = self.offset + number * self.part.slice_nbytes
        with torch.inference_mode(False), torch.no_grad():
            flat = Span(self.slab, start, self.part.slice_nbytes).tensor(self.place)
            tensor = flat.view(self.parameter.dtype).view(self.parameter.shape[1:])
        storages = [tensor.untyped_storage()]
        written = self.part.written
        part = FramedPart(frames, self.slab, start, storages, [tensor], written, False)
        return tensor, part

    def go_home(self, place: torch.device) -> None:
        """Let all slices point home, as FramedPart.go_home()."""
        for _, part in self.slices.values():
            part.go_home(place)

    def _number_of(self, index: object) -> int | None:
        if type(index) is Tensor and index.dim() == 0 and index.dtype in _NUMBERS:
            index = int(index)
        count = self.parameter.shape[0]
        if type(index) is not int or not -count <= index < count:
            return None
        return index % count

    def _is_recorded(self) -> bool:
        """True if a backward pass may ask for the gradient of the parameter."""
        return torch.is_grad_enabled() and self.parameter.requires_grad

    def _count_writes(self) -> int:
        return 0 if self.parameter.is_inference() else self.parameter._version


class SliceUses:
    """The slices that a call holds: the latest one of each parameter."""

    def __init__(self, parts: Iterable[SlicedPart], target: Target, watch: Watch | None) -> None:
        self.parts = list(parts)
        self.target = target
        self.watch = watch
        self.is_open = True
        self.held: dict[SlicedPart, tuple[int, FrameUse, int | None]] = {}

    def show(self) -> None:
        """Begin the call."""
        for sliced in self.parts:
            sliced.show()

    def end(self) -> None:
        """End the call, from any thread; once."""
        if self.is_open:
            self.is_open = False
            for sliced in self.parts:
                self._let_go(sliced)
                sliced.hide()

    def load(self, sliced: SlicedPart, number: int) -> Tensor | None:
        """A slice in a frame, or at home if there is no room; None if slices have no frames."""
        stream = self.target.stream()
        try:
            found = sliced.slice(number, stream)
        except BaseException:
            if self.is_open:  # else remove() has closed the frames
                raise
            found = None
        if found is None:
            return None
        tensor, part = found
        held = self.held.get(sliced)
        if held is not None and held[0] == number and held[2] == stream:
            return tensor
        self._let_go(sliced)
        use = part.acquire(stream, writes=False)
        if use is None:
            self.read_slice(sliced)
        else:
            self.held[sliced] = number, use, stream
        if not self.is_open:  # ended by another thread meanwhile
            self._let_go(sliced)
        return tensor

    def read_slice(self, sliced: SlicedPart) -> None:
        """A slice is read at home."""
        self._count(sliced, sliced.part.nbytes // sliced.parameter.shape[0])

    def read_all(self, sliced: SlicedPart) -> None:
        """The parameter is read or written at home, where slices in use must be too."""
        self._let_go(sliced)
        self._count(sliced, sliced.part.nbytes)

    def _let_go(self, sliced: SlicedPart) -> None:
        held = self.held.pop(sliced, None)
        if held is not None:
            end_use(held[1], held[2])

    def _count(self, sliced: SlicedPart, nbytes: int) -> None:
        if self.watch is not None:
            self.watch.read_at_home(sliced.part, nbytes)
