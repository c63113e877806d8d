"""NVTX ranges of managedmem.torch: their names, and the functions that they surround.

torch.profiler shows them, too. This module is imported only with MANAGEDMEM_NVTX=1. A range has the
name of a part of the model, or in offload_optimizer() the number of a parameter. It ends when its
thread has queued the copies, which may still run.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from managedmem import _nvtx
from managedmem._nvtx import Moves, prefixed, replace
from managedmem.torch import _load, _offload_optimizer, _optimizer_state, _results
from managedmem.torch._offload_frames import FramedPart, FrameUse
from managedmem.torch._offload_gradients import GradientRoom
from managedmem.torch._offload_lane import DeviceLane
from managedmem.torch._offload_optimizer import SplitStep
from managedmem.torch._offload_places import Target
from managedmem.torch._offload_visits import Stay, Turn, Visits, _Plan
from managedmem.torch._targets import join_name

# Dispatch modes, such as those of checkpoints, see torch.profiler.record_function, because it calls
# an operator. They do not see this class.
_Recorded: Any = torch._C._profiler._RecordFunctionFast
_OWN = "own parameters"  # the label of parameters of the model itself


class _Span(_nvtx.Span):
    """A range, also for torch.profiler."""

    __slots__ = ("_recorded",)

    def __enter__(self) -> None:
        super().__enter__()
        self._recorded = _Recorded(prefixed(self.name))
        self._recorded.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._recorded.__exit__(*exception)
        super().__exit__(*exception)


def _around(owner: Any, name: str, title: Callable[..., str | None]) -> None:
    _nvtx.around(owner, name, title, _Span)


def _mark(text: str) -> None:
    _nvtx.mark(text)
    with _Recorded(prefixed(text)):
        pass


# --- parts --------------------------------------------------------------------------------

_moves: weakref.WeakKeyDictionary[DeviceLane, Moves] = weakref.WeakKeyDictionary()
_parts: weakref.WeakKeyDictionary[FramedPart, tuple[str, Moves]] = weakref.WeakKeyDictionary()
_labels = WeakTensorKeyDictionary()  # of parameters: the labels of their parts


def _make_parts(original: Callable[..., None], lane: DeviceLane, plan: Any, homes: Any) -> None:
    """Learn the names of parts and of their slices."""
    original(lane, plan, homes)
    moves = _moves.setdefault(lane, Moves())

    def name_part(part: FramedPart, label: str) -> None:
        moves.names[part.number] = label
        _parts[part] = label, moves

    for part in (*plan.resident, *plan.streamed):
        label = (join_name(lane.name, part.name) if part.name else lane.name) or _OWN
        for piece in (piece for block in part.blocks for piece in block.pieces):
            for tensor in piece.tensors:
                _labels[tensor] = label
        if id(part) in lane.groups:
            name_part(lane.groups[id(part)], label)
        sliced = lane.announcer.sliced.get(id(part))
        for index, (_, framed) in enumerate(sliced.slices if sliced is not None else ()):
            name_part(framed, f"{label}[{index}]")


def _name_of(part: FramedPart) -> tuple[str, Moves]:
    return _parts.setdefault(part, (f"part {part.number}", Moves()))


def _acquire(original: Callable[..., Any], part: FramedPart, *given: Any, **named: Any) -> Any:
    label, moves = _name_of(part)
    is_there = part.frames.has(part.number)
    with _Span(f"{'hit' if is_there else 'load'} {label}"):
        use = original(part, *given, **named)
        if use is None:
            _mark(f"at home {label}")
        elif not is_there:
            moves.note_loads([part.number])
        moves.show(part.frames, _mark)
        return use


def _release(
    original: Callable[..., bool], part: FramedPart, use: FrameUse, stream: object, written: bool
) -> bool:
    label, moves = _name_of(part)
    with _Span(f"{'home' if written else 'release'} {label}"):
        sends = original(part, use, stream, written)
        moves.show(part.frames, _mark)
        return sends


replace(DeviceLane, "_make_parts", _make_parts)
replace(FramedPart, "acquire", _acquire)
replace(FramedPart, "release", _release)
# offload() has no range: with a wrapper around it, its warnings would name the wrapper's line.
_around(DeviceLane, "fill", lambda _, own: f"offload {type(own.module).__name__}")
_around(DeviceLane, "take_in", lambda _, model, __: f"refresh {type(model).__name__}")
_around(Target, "wait", lambda target: f"wait {target.device}")


# --- gradients and state ------------------------------------------------------------------


class _Coming(threading.local):
    """The label of the parameters whose state a thread loads."""

    label = ""


_coming = _Coming()


def _label_of(parameters: Iterable[Tensor]) -> str:
    labels = [*dict.fromkeys(_labels.get(p, f"parameter {tuple(p.shape)}") for p in parameters)]
    return " to ".join(labels if len(labels) < 2 else (labels[0], labels[-1]))


def _label_of_stay(stay: Stay) -> str:
    cut = "" if stay.cut is None else f"[{stay.cut.start}:{stay.cut.stop}]"
    return _label_of(stay.parameters) + cut


def _step(step: SplitStep, *_: object, **__: object) -> str:
    return f"step {type(step.optimizer).__name__}"


def _step_turn(_: object, turn: Turn, *__: object) -> str:
    return f"step {_label_of(p for part in turn.parts for p in part.parameters)}"


def _comes(original: Callable[..., bool], visits: Visits, stay: Stay) -> bool:
    _coming.label = _label_of_stay(stay)
    return original(visits, stay)


def _take(original: Callable[..., Any], lane: Any, parameter: Tensor) -> Any:
    _labels[parameter] = f"parameter {len(lane._part_of)}"
    return original(lane, parameter)


def _settle(room: GradientRoom, most: int = 0) -> str | None:
    return "wait gradients" if room.passing_bytes > most else None


_around(SplitStep, "step", _step)
_around(SplitStep, "begin", lambda step: f"offload state of {type(step.optimizer).__name__}")
_around(SplitStep, "_step_turn", _step_turn)
_around(_offload_optimizer, "_home_of", lambda *_: "home state")
replace(Visits, "_comes", _comes)
_around(_Plan, "copy", lambda *_: f"load state {_coming.label}")
_around(Visits, "begin", lambda _, stay: f"wait state {_label_of_stay(stay)}")
_around(Visits, "end", lambda *_: "home state")
_around(GradientRoom, "send", lambda _, home, grad: f"home gradient {_label_of([home.parameter])}")
_around(GradientRoom, "settle", _settle)
replace(_optimizer_state._Lane, "_take", _take)


# --- functions ----------------------------------------------------------------------------


def _of_path(name: str) -> Callable[..., str]:
    def title(*given: Any, **named: Any) -> str:
        path = named.get("path", given[-1] if given else None)
        shown = os.path.basename(path) if isinstance(path, (str, os.PathLike)) else path
        return f"{name} {shown}"

    return title


_around(_load, "load_file", _of_path("load_file"))
_around(_load, "load_model", _of_path("load_model"))
for _name in ("_copy_of_device", "_copy_of_host"):  # of to_host(), after its checks
    _around(_results, _name, lambda tensor: f"result {tuple(tensor.shape)}")
