"""The visits of gradients and state to a ring of scratch, in a step of the optimizer.

Parts whose parameters stay on the device step together if several fit. A part that is large for the
ring steps in slices of its parameters. So the link copies for one visit while another is updated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn, optim

from managedmem.torch._moving import _on
from managedmem.torch._offload_frames import FramedPart
from managedmem.torch._offload_gradients import GradientHome
from managedmem.torch._offload_partial import Cut, Staged
from managedmem.torch._offload_places import ALIGNMENT, Target
from managedmem.torch._offload_ring import Region, Ring
from managedmem.torch._offload_shares import state_of
from managedmem.torch._tensors import shard_of

VISITORS = 3  # one part comes, one is updated, one goes
LEAST_SLICE = 4 << 20  # bytes; smaller slices cost more calls for each byte
_ROWS = 4096  # elements; slices begin at multiples of this


@dataclass(slots=True, eq=False)
class Entry:
    """A tensor of the state. Its storage is its own, so that it is pickled without the others."""

    tensor: Tensor
    own: Tensor  # the bytes of its storage at home
    place: int  # the offset of these bytes in the home
    offset: int  # of the tensor in its storage


@dataclass(slots=True, eq=False)
class StateHome:
    """The state of a part of the parameters, in one piece of page-locked memory."""

    start: int
    host: Tensor  # its bytes, for copies
    entries: list[Entry]

    def holds(self, tensor: Tensor) -> bool:
        """True if a tensor lies in it."""
        return 0 <= tensor.data_ptr() - self.start < self.host.numel()


@dataclass(slots=True, eq=False)
class StepPart:
    """Parameters that are updated together."""

    parameters: list[Tensor]
    target: Target
    group: FramedPart | None  # of the parameters, if they are streamed
    home: StateHome | None = None
    keeps_state: bool = False  # on the device, unless it has a home


@dataclass(slots=True, eq=False)
class Stay:
    """Parts, or a slice of one parameter of a part, that visit the ring together."""

    parts: list[StepPart]
    parameters: list[Tensor]
    cut: Cut | None = None
    has_begun: bool = False  # the optimizer has begun to step them


@dataclass(slots=True, eq=False)
class Turn:
    """Parts whose parameters are on the device until all of their visits are over."""

    parts: list[StepPart]
    stays: list[Stay]

    def add(self, part: StepPart) -> None:
        """Add a part to the only visit."""
        (stay,) = self.stays
        stay.parts.append(part)
        stay.parameters += part.parameters
        self.parts.append(part)


@dataclass(slots=True, eq=False)
class _Copy:
    """Bytes at home, their copy in a region, and the tensors over both."""

    host: Tensor
    scratch: Tensor
    tensors: list[tuple[Tensor, Tensor]]
    version: int | None = None  # of a gradient, before the step: if it is written, it goes home

    def must_go_home(self) -> bool:
        return self.version is None or self.tensors[0][1]._version != self.version


@dataclass(slots=True, eq=False)
class Visit:
    """The state and the gradients of a stay in a region of the ring."""

    ring: Ring
    region: Region
    cut: Cut | None
    copies: list[_Copy]
    staged: Staged

    def copy_home(self, _: Tensor) -> None:
        """Queue the copies of written tensors."""
        for each in self.copies:
            if each.must_go_home():
                each.host.copy_(each.scratch, non_blocking=True)

    def copy_back(self) -> None:
        """Copy the writes into the tensors, wherever they are."""
        with torch.no_grad():
            for each in filter(_Copy.must_go_home, self.copies):
                for tensor, view in each.tensors:
                    whole = tensor.data
                    (whole if self.cut is None else self.cut.of(whole)).copy_(view)


class Visits:
    """The turns of one step, and their visits to the rings. Some visits are copied ahead."""

    def __init__(
        self,
        optimizer: optim.Optimizer,
        parts: Iterable[StepPart],
        rings: Mapping[Target, Ring],
        homes: Mapping[int, GradientHome],
        is_active: Callable[[], bool],
        coming: frozenset[int] = frozenset(),
    ) -> None:
        """`coming`: the ids of parameters whose gradients are still to come, on the device."""
        self.optimizer = optimizer
        self.coming = coming
        self.rings = dict(rings)
        self.homes = homes  # of gradients, by the ids of parameters
        self.is_active = is_active
        # Fused kernels unscale gradients in place, and count no write.
        self.unscales = getattr(optimizer, "grad_scale", None) is not None
        self.turns: list[Turn] = []
        self.queues: dict[Target, deque[Stay]] = {}
        self.there: dict[int, Visit] = {}  # by the ids of stays
        self._take_turns(parts)
        for turn in self.turns:
            if turn.parts[0].target in self.rings:
                self.queues.setdefault(turn.parts[0].target, deque()).extend(turn.stays)

    def begin(self, stay: Stay) -> Visit | None:
        """The visit of a stay whose turn it is; None if its memory is reached over the bus."""
        self.look_ahead(stay.parts[0].target)
        visit = self.there.pop(id(stay), None)
        if visit is None or not self.is_active():  # a collection has called remove()
            return None
        visit.ring.use(visit.region)
        return visit

    def look_ahead(self, target: Target) -> None:
        """Bring as many parts as the ring of a device has room for."""
        queue = self.queues.get(target)
        while queue and self.is_active() and self._comes(queue[0]):
            queue.popleft()

    def skip(self, turn: Turn) -> None:
        """Drop the visits of a turn that have not ended."""
        for stay in turn.stays:
            if (visit := self.there.pop(id(stay), None)) is not None:
                visit.region.is_over = True  # without a copy home
            elif stay in (queue := self.queues.get(stay.parts[0].target, deque())):
                queue.remove(stay)

    def call(self, turn: Turn) -> None:
        """Put a turn in front of the queue of visits to come. It may have been stepped before."""
        target = turn.parts[0].target
        if (queue := self.queues.get(target)) is not None:
            self.rings[target].follow_home()
            queue.extendleft(reversed(turn.stays))

    def end(self, visit: Visit) -> None:
        """Copy home the writes of the step."""
        if self.is_active():
            visit.ring.empty(visit.region, visit.copy_home)
        if not self.is_active():  # a collection has called remove() meanwhile
            visit.copy_back()

    # --- who visits together --------------------------------------------------------------

    def _take_turns(self, parts: Iterable[StepPart]) -> None:
        """Parts share a turn as long as the ring has room for three such turns.

        Parts whose state stays on the device join them, up to the same bytes: their kernels run
        while the link copies for the next turn. The limit also keeps temporaries small, which are
        as large as the state of a turn.
        """
        opened: dict[Target, tuple[Turn, int, int]] = {}  # with the bytes that visit and that stay
        for part in parts:
            ring = self.rings.get(part.target)
            size, most = (0, 0) if ring is None else (self._size_of(part), ring.size // VISITORS)
            if size > max(most, LEAST_SLICE) and self._can_be_cut(part):
                cut = self._cut(part, max(most // 2, LEAST_SLICE))
                self.turns.append(Turn([part], list(cut)))
                continue
            kept = self._kept_bytes(part)
            joins = part.group is None and 0 < max(size, kept) <= most
            last = opened.get(part.target) if joins else None
            if last is not None and last[1] + size <= most and last[2] + kept <= most:
                last[0].add(part)
                opened[part.target] = last[0], last[1] + size, last[2] + kept
                continue
            turn = Turn([], [Stay([], [])])
            turn.add(part)
            self.turns.append(turn)
            if joins:
                opened[part.target] = turn, size, kept

    def _size_of(self, part: StepPart) -> int:
        """The bytes that the whole part takes in a ring."""
        return _bytes_of(part.home) + sum(aligned(h.nbytes) for _, _, h in self._coming(part))

    def _kept_bytes(self, part: StepPart) -> int:
        """The bytes of state that stays on the device and may join a turn; 0 in backward passes,
        where the gradients of the part would wait for those of others."""
        if self.coming or part.home is not None or not part.keeps_state:
            return 0
        return sum(t.nbytes for p in part.parameters for _, t in state_of(self.optimizer, p))

    def _coming(self, part: StepPart) -> list[tuple[Tensor, Tensor, GradientHome]]:
        """The gradients of a part that lie at home."""
        homes = self.homes
        gradients = [(p, p.grad, homes[id(p)]) for p in part.parameters if id(p) in homes]
        return [(p, g, h) for p, g, h in gradients if g is not None and _can_visit(p, g, h)]

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        """The gradient of a parameter, or a tensor with the shape of a gradient to come."""
        comes = id(parameter) in self.coming and parameter.requires_grad
        if comes or parameter.grad is None:
            return parameter if comes else None
        return shard_of(parameter.grad)

    def _can_be_cut(self, part: StepPart) -> bool:
        """True if each tensor has an element for each one of its parameter, in the same order."""
        home = part.home
        for parameter in part.parameters:
            if (grad := self._gradient(parameter)) is None:
                continue
            shard = shard_of(parameter)
            if not _is_plain(shard) or not _is_plain(grad):
                return False
            state = [t for _, t in state_of(self.optimizer, parameter)]
            for tensor in (grad, *state):
                if tensor.shape != shard.shape or not tensor.is_contiguous():
                    return False
            # A first step in slices would make state of the size of a slice.
            there = bool(state) if home is None else all(map(home.holds, state))
            if not there or not shard.is_contiguous():
                return False
        return True

    def _cut(self, part: StepPart, most: int) -> Iterable[Stay]:
        """Slices of the parameters of a part, whose visits take at most `most` bytes."""
        for parameter in part.parameters:
            if (grad := self._gradient(parameter)) is None:
                continue
            state = [t for _, t in state_of(self.optimizer, parameter)]
            of_element = grad.element_size() + sum(t.element_size() for t in state)
            numel = shard_of(parameter).numel()
            count = -(-numel * of_element // most)
            rows = -(-numel // (max(count, 1) * _ROWS)) * _ROWS
            for start in range(0, numel, rows):
                stop = min(start + rows, numel)
                cut = Cut(start, stop, stop == numel)
                yield Stay([part], [parameter], cut)

    # --- arrivals -------------------------------------------------------------------------

    def _comes(self, stay: Stay) -> bool:
        """Bring the tensors of a stay, unless it is too large; False if it has to wait."""
        ring = self.rings[stay.parts[0].target]
        plan = _Plan()
        for part in stay.parts:
            self._add_state(plan, part, stay)
            for parameter, grad, home in self._coming(part):
                if stay.cut is None or parameter is stay.parameters[0]:
                    plan.add_gradient(parameter, grad, home, stay.cut)
        if not 0 < plan.size <= ring.size:
            return True
        if (region := ring.fill(plan.size, plan.copy)) is None:
            return False
        self.there[id(stay)] = plan.visit(ring, region, stay.cut, self.unscales)
        return True

    def _add_state(self, plan: _Plan, part: StepPart, stay: Stay) -> None:
        if part.home is None:
            return
        if stay.cut is None:
            plan.add_home(part.home)
            return
        wanted = {id(t) for _, t in state_of(self.optimizer, stay.parameters[0])}
        for entry in part.home.entries:
            if id(entry.tensor) in wanted:
                plan.add_slice(part.home, entry, stay.cut)


@dataclass(slots=True, eq=False)
class _Planned:
    """Bytes at home that come to a place in a region, with the tensors over them."""

    host: Tensor
    place: int
    tensors: list[tuple[Tensor, int]]  # each with its offset in these bytes
    parameter: Tensor | None = None  # whose gradient it is


@dataclass(slots=True, eq=False)
class _Plan:
    """The tensors for a region."""

    size: int = 0
    planned: list[_Planned] = field(default_factory=list)

    def _add(self, planned: _Planned) -> None:
        self.planned.append(planned)
        self.size += aligned(planned.host.numel())

    def add_home(self, home: StateHome) -> None:
        """Add all state of a part."""
        present = [(e.tensor, e.place + e.offset) for e in home.entries if home.holds(e.tensor)]
        self._add(_Planned(home.host, self.size, present))

    def add_slice(self, home: StateHome, entry: Entry, cut: Cut) -> None:
        """Add a slice of a tensor of the state."""
        start = entry.place + entry.offset
        host = cut.bytes_of(home.host[start:], entry.tensor)
        self._add(_Planned(host, self.size, [(entry.tensor, 0)]))

    def add_gradient(
        self, parameter: Tensor, grad: Tensor, home: GradientHome, cut: Cut | None
    ) -> None:
        """Add a gradient that lies at home, or a slice of it."""
        assert home.base is not None and home.host is not None
        inside = grad.data_ptr() - home.base.data_ptr()
        host = home.host
        if cut is not None:
            host, inside = cut.bytes_of(host[inside:], grad), 0
        self._add(_Planned(host, self.size, [(grad, inside)], parameter))

    def copy(self, scratch: Tensor) -> None:
        """Queue the copies into the region."""
        for each in self.planned:
            to = scratch[each.place : each.place + each.host.numel()]
            to.copy_(each.host, non_blocking=True)

    def visit(self, ring: Ring, region: Region, cut: Cut | None, unscales: bool) -> Visit:
        """The memory that the step uses in place of the tensors."""
        visit = Visit(ring, region, cut, [], Staged({}, {}, cut))
        for each in self.planned:
            scratch = region.scratch[each.place : each.place + each.host.numel()]
            place = region.start + each.place
            pairs = [(t, _view(region.scratch, t, place + at, cut)) for t, at in each.tensors]
            if each.parameter is None:
                visit.copies.append(_Copy(each.host, scratch, pairs))
                visit.staged.state.update((id(t), view) for t, view in pairs)
            else:
                (_, view) = pairs[0]
                visit.copies.append(
                    _Copy(each.host, scratch, pairs, None if unscales else view._version)
                )
                visit.staged.gradients[id(each.parameter)] = view
        return visit


def _view(memory: Tensor, tensor: Tensor, offset: int, cut: Cut | None) -> Tensor:
    """A view of other memory with the layout of a tensor, or of its slice."""
    return _on(memory, tensor if cut is None else cut.of(tensor.data), offset)


def _can_visit(parameter: Tensor, grad: Tensor, home: GradientHome) -> bool:
    """True if a gradient lies at home, and a plain tensor can stand for its parameter."""
    return _is_plain(parameter) and not grad.is_inference() and home.is_home(grad)


def _is_plain(tensor: Tensor) -> bool:
    is_known = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_known and not tensor.is_inference()


def _bytes_of(home: StateHome | None) -> int:
    return 0 if home is None else aligned(home.host.numel())


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
