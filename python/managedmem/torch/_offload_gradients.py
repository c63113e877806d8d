"""Gradients that live on the host while a module is offloaded, in page-locked memory.

A copy engine takes a gradient home while the backward pass goes on. The gradient keeps its memory
on the device until the stream of the pass has waited for the copy, because work on that stream may
still use it. The budget limits the bytes that wait.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from managedmem import CUDAError
from managedmem.torch._moving import _on
from managedmem.torch._offload_copies import inert
from managedmem.torch._offload_frames import Span
from managedmem.torch._offload_places import Target, host_memory
from managedmem.torch._offload_shares import Share
from managedmem.torch._tensors import extent_of

_TOGETHER = 16 << 20  # bytes of gradients whose copies are queued together


@dataclass(slots=True, eq=False)
class _Passing:
    """A gradient that goes home."""

    home: GradientHome
    grad: Tensor
    source: Tensor  # its memory on the device
    version: int
    stream: torch.cuda.Stream  # of the pass
    copied: torch.cuda.Event | None = None  # once the copy has been queued


class GradientRoom:
    """The memory at home for the gradients of one device, and the stream that fills it."""

    def __init__(self, target: Target, share: Share) -> None:
        self.target = target
        self.share = share
        self.homes: list[weakref.ref[GradientHome]] = []
        self.outward = torch.cuda.Stream(target.place) if target.place.type == "cuda" else None
        self.passing: deque[_Passing] = deque()
        self.passing_bytes = 0
        self.waiting: list[_Passing] = []  # those whose copies are still to be queued
        self.waiting_bytes = 0
        self.refused = False  # True once memory for all gradients was refused
        self.task = -1  # the backward pass that will call settle() at its end
        self.lock = threading.RLock()  # a collection while it is held may call remove()

    def provide(self, home: GradientHome, nbytes: int) -> None:
        """Give a gradient a place of this size. The first call takes memory for all that train."""
        with self.lock:
            if home.base is None and not self.refused:
                waiting = [h for ref in self.homes if (h := ref()) is not None and h.waits()]
                try:
                    self._allocate([(each, each.parameter.nbytes) for each in waiting])
                except (CUDAError, MemoryError):  # a single one may have room
                    self.refused = True
            if home.base is None or home.base.numel() != nbytes or home.is_kept():
                self._allocate([(home, nbytes)])

    def _allocate(self, wanted: list[tuple[GradientHome, int]]) -> None:
        if not wanted:
            return
        slab, offsets = host_memory(self.target, [nbytes for _, nbytes in wanted])
        for (home, nbytes), offset in zip(wanted, offsets, strict=True):
            home.place(Span(slab, offset, nbytes), self.target)

    def send(self, home: GradientHome, grad: Tensor) -> None:
        """Copy a gradient home. It has its memory there once the stream has waited for the copy."""
        source = grad.data
        if self.outward is None:
            home.copy_from(source)
            if home.active:  # else a collection has called remove() meanwhile
                grad.data = home.shown(source)  # the same object: the caller may have it
            return
        stream = torch.cuda.current_stream(self.target.place)
        version = -1 if grad.is_inference() else grad._version
        entry = _Passing(home, grad, source, version, stream)
        is_told = self._is_told_of_the_end(stream)
        with self.lock:
            home.latest = entry
            self.passing.append(entry)
            self.passing_bytes += source.nbytes
            self.waiting.append(entry)
            self.waiting_bytes += source.nbytes
            if self.waiting_bytes >= _TOGETHER or self.waiting[0].stream != stream:
                self._queue_copies()
        self.settle(self.share.may_pass if is_told else 0)

    def _queue_copies(self) -> None:
        """Queue the waiting copies together, which takes less time than to queue each by itself."""
        assert self.outward is not None
        waiting, self.waiting, self.waiting_bytes = self.waiting, [], 0
        for stream in {entry.stream for entry in waiting}:
            self.outward.wait_stream(stream)
        with torch.no_grad(), torch.cuda.stream(self.outward):
            for entry in waiting:
                entry.home.copy_from(entry.source)
            copied = self.outward.record_event()
        for entry in waiting:
            entry.copied = copied

    def settle(self, most: int = 0) -> None:
        """Let the current stream wait until at most this many bytes are on their way."""
        with self.lock, torch.no_grad():
            followed: list[tuple[torch.cuda.Event, torch.cuda.Stream]] = []
            while self.passing and self.passing_bytes > most:
                entry = self.passing.popleft()
                self.passing_bytes -= entry.source.nbytes
                self._finish(entry, followed)

    def _finish(
        self, entry: _Passing, followed: list[tuple[torch.cuda.Event, torch.cuda.Stream]]
    ) -> None:
        """Let a gradient lie at home. `followed` has the copies that streams wait for already."""
        if entry.copied is None:
            self._queue_copies()
        assert entry.copied is not None
        for stream in {entry.stream, torch.cuda.current_stream(self.target.place)}:
            if not any(each[0] is entry.copied and each[1] == stream for each in followed[-2:]):
                stream.wait_event(entry.copied)  # then the memory on the device may be used again
                followed.append((entry.copied, stream))
        home, grad, source = entry.home, entry.grad, entry.source
        if home.latest is not entry:  # it was added to, and copied again
            return
        home.latest = None
        if not home.active or home.parameter.grad is not grad or grad.layout is not torch.strided:
            return
        if grad.untyped_storage()._cdata != source.untyped_storage()._cdata:
            return
        if not grad.is_inference() and grad._version != entry.version:
            home.copy_from(source)
        grad.data = home.shown(source)

    def _is_told_of_the_end(self, stream: torch.cuda.Stream) -> bool:
        """True if the backward pass that goes on will call settle() at its end."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return False
        if task != self.task:
            end = EndOfPass(self, stream)
            torch.autograd.Variable._execution_engine.queue_callback(end)
            self.task = task
        return True


class Settled(Protocol):
    """Work that a stream waits for at the end of a backward pass."""

    def settle(self) -> None:
        """Let the current stream wait for the work."""


class EndOfPass:
    """A callback for the end of a backward pass, which torch drops after an error."""

    def __init__(self, room: Settled, stream: torch.cuda.Stream | None = None) -> None:
        self.room = weakref.ref(room)
        self.stream = stream
        self.is_over = False

    def __call__(self) -> None:
        self.is_over = True
        if (room := self.room()) is not None:
            room.settle()

    def __del__(self) -> None:
        try:
            if not self.is_over and torch.cuda is not None:
                with torch.cuda.stream(self.stream):
                    self()
        except Exception:
            pass  # contextlib.suppress() may be gone at exit


class GradientHome:
    """The place of one parameter's gradient on the host."""

    def __init__(self, parameter: Tensor, room: GradientRoom) -> None:
        self.parameter = parameter
        self.room = room
        self.base: Tensor | None = None
        self.host: Tensor | None = None  # the same bytes as a CPU tensor, for copies
        # Tensors with the layout of the parameter, over `base` and over `host`.
        self.usual: tuple[Tensor, Tensor] | None = None
        self.alone = 0  # _users(base) while nothing else refers to it
        self.latest: _Passing | None = None
        self.failures = 0
        self.active = True
        self.lock = threading.RLock()  # a collection while it is held may call remove()
        room.homes.append(weakref.ref(self))
        self.handle = _hooked(parameter, _GradientHook(self))

    def __call__(self, parameter: Tensor, is_older: bool = False) -> None:
        """Move a new gradient home. A gradient that is there has accumulated in place.

        `is_older`: the gradient was made before the latest backward pass.
        """
        grad = parameter.grad
        if not self.active or grad is None or self.is_home(grad):
            return
        if not self.room.share.sends_home(parameter):
            return
        with self.lock, torch.no_grad():
            if self.is_home(grad) or not _is_plain(grad):
                return  # another thread may have moved it
            if self.latest is None and _is_shared(grad, is_older):
                return
            try:
                self._place(grad.nbytes)
            except (CUDAError, MemoryError):  # the gradient stays on the device
                self.failures += 1
                return
            if self.active:  # else a collection has called remove() meanwhile
                self.room.send(self, grad)

    def stop(self) -> None:
        """Leave gradients alone from now on."""
        self.active = False
        self.handle.remove()

    @property
    def nbytes(self) -> int:
        """The bytes of its place."""
        return 0 if self.base is None else self.base.numel()

    def waits(self) -> bool:
        """True if its gradient will need a place."""
        return self.active and self.base is None and self.room.share.trains(self.parameter)

    def is_home(self, grad: Tensor) -> bool:
        """True if a gradient lies in its place."""
        if self.base is None or grad.layout is not torch.strided:
            return False
        return grad.untyped_storage().data_ptr() == self.base.untyped_storage().data_ptr()

    def copy_from(self, source: Tensor) -> None:
        """Copy a gradient to its place, on the current stream."""
        assert self.host is not None
        if self._is_usual(source):
            assert self.usual is not None
            self.usual[1].copy_(source, non_blocking=True)
        else:
            self.host.copy_(_bytes_of(source), non_blocking=True)

    def shown(self, source: Tensor) -> Tensor:
        """A tensor with the layout of a gradient, over its place."""
        assert self.base is not None
        if self._is_usual(source):
            assert self.usual is not None
            return self.usual[0]
        return _on(self.base, source, 0)

    def _is_usual(self, source: Tensor) -> bool:
        """True for a gradient with the dtype, shape and strides of its parameter."""
        if self.usual is None or source.is_inference():
            return False
        usual = self.usual[0]
        likes = source.dtype == usual.dtype and source.shape == usual.shape
        return likes and source.stride() == usual.stride()

    def is_kept(self) -> bool:
        """True if something else refers to the memory."""
        return self.base is not None and _users(self.base) != self.alone

    def place(self, span: Span, target: Target) -> None:
        """Take memory for the gradient."""
        self.base = span.tensor(target.place)
        cpu = torch.device("cpu")
        self.host = self.base if target.place == cpu else span.tensor(cpu)
        self.usual = None
        parameter = self.parameter
        is_dense = parameter.layout is torch.strided and parameter.is_contiguous()
        if is_dense and parameter.nbytes == span.nbytes and not parameter.is_inference():
            self.usual = _on(self.base, parameter, 0), _on(self.host, parameter, 0)
        self.alone = _users(self.base)

    def _place(self, nbytes: int) -> None:
        """Memory for a gradient, reused unless something else refers to it."""
        if self.base is None or self.base.numel() != nbytes or self.is_kept():
            self.room.provide(self, nbytes)


class _GradientHook:
    """A hook with a weak reference: the collector cannot see cycles through torch's C++."""

    def __init__(self, home: GradientHome) -> None:
        self.home = weakref.ref(home)

    def __call__(self, parameter: Tensor) -> None:
        home = self.home()
        if home is not None:
            home(parameter)

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return inert, ()


def _hooked(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Hook a parameter, which may begin to require gradients later."""
    required = parameter.requires_grad
    try:
        parameter.requires_grad_(True)  # else torch refuses the hook
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
        return handle
    finally:
        parameter.requires_grad_(required)


def _users(tensor: Tensor) -> int:
    """The number of references to its memory, plus a constant."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _bytes_of(tensor: Tensor) -> Tensor:
    """A dense tensor as bytes."""
    storage = tensor.untyped_storage()
    offset = tensor.data_ptr() - storage.data_ptr()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, offset, (tensor.nbytes,), (1,))


def _is_shared(grad: Tensor, is_older: bool) -> bool:
    """True if the caller has the memory too, such as a flat buffer.

    A new gradient may share memory with other gradients of this pass. So references are counted
    only for a gradient from before the pass, and for one that was added to.
    """
    if grad._is_view():  # torch makes no such gradients
        return True
    if not (is_older or grad.is_inference() or grad._version > 0):
        return False
    alone = torch.empty(1)  # memory with one reference
    return _users(grad) != _users(alone)


def _is_plain(grad: Tensor) -> bool:
    """True for dense memory that is not part of a graph."""
    if type(grad) is not Tensor or grad.layout is not torch.strided or grad.requires_grad:
        return False
    if grad.is_contiguous():
        return True
    extent = extent_of("", grad)
    return extent is not None and extent[1] - extent[0] == grad.nbytes
