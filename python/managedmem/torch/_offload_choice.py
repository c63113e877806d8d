"""Chooses where each part of an offloaded model is kept: on the device, in frames, or at home.

Knows only the sizes and uses of parts, and gives a reason for each place. A part in frames is
loaded for each use. A part at home is read over the bus.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol, TypeAlias, TypeVar

MIB = 1 << 20
TINY = MIB  # parts up to this, and up to a 64th of the budget, stay on the device
IN_TRANSIT = 64 * MIB  # bytes of frames for loads under way, where parts are small
# A part that comes later is at home if it is smaller than this fraction of the frames: calls of
# other parts may be nested in its call, which would hold its frame for long.
NESTED = 8
SLICES = 4  # in frames: two are used, of two parameters, while two are loaded

TOO_LARGE = "larger than the frames"
EVERYTHING = "everything fits"
SMALL_PART = "small"
ROOM_LEFT = "the budget has room left"
LOADED_SLICES = "the slices that a call names are loaded for it"

Place: TypeAlias = Literal["device", "frames", "home"]
Use: TypeAlias = Literal["whole", "rows", "slices"]


class Choosable(Protocol):
    """A part as this module sees it."""

    use: Use  # what a call needs of it
    asked: Place | None  # by the caller
    place: Place
    reason: str
    slice_nbytes: int  # of a slice that can be loaded alone, or 0

    @property
    def nbytes(self) -> int: ...


_Part = TypeVar("_Part", bound=Choosable)


def choose_places(parts: list[_Part], budget: int, keeps_slices: bool = False) -> int:
    """Give each part a place within the budget; return the bytes of frames.

    `parts` has the order of the model. Room goes to requested parts first, then to small ones. Of
    the parts that calls need as a whole, as many stay as the frames leave room for, evenly along
    the model, so that the link always has something to load. A part of which a call needs little
    stays at home if no room is left: a kernel then reads only the bytes that it needs. Slices that
    can be loaded alone get frames. With `keeps_slices`, frames keep slices between calls, and get
    more room.
    """
    room = budget
    fits = sum(part.nbytes for part in parts) <= room
    if fits and all(part.asked in (None, "device") for part in parts):
        _put(parts, "device", EVERYTHING)
        return 0
    room -= _put([p for p in parts if p.asked == "device"], "device", "asked for")
    if room < 0:
        raise ValueError(
            f"places asks for {budget - room:,} bytes on the device, more than the {budget:,} that "
            "the budget has for parameters"
        )
    _put([p for p in parts if p.asked == "home"], "home", "asked for")
    free = [part for part in parts if part.asked is None]
    small = _small_parts(free, room)
    room -= _put(small, "device", SMALL_PART)
    free = _without(free, small)
    streamed = [p for p in parts if p.asked == "frames"]
    whole = [part for part in free if part.use == "whole"]
    slices = _frames_for_slices(free, room)
    room -= slices
    large, frames = _largest_that_stay(whole, streamed, room)
    room -= frames + _put(large, "device", "frames for it would take twice its bytes")
    even = _spread(_without(whole, large), room)
    room -= _put(even, "device", "as many as the budget holds, evenly along the model")
    streamed += _without(_without(whole, large), even)
    _put([p for p in streamed if p.nbytes <= frames], "frames", "loaded for each use")
    _put([p for p in streamed if p.nbytes > frames], "home", TOO_LARGE)
    if slices:
        loaded = [part for part in free if part.slice_nbytes]
        extra = min(room, sum(part.nbytes for part in loaded) - slices) if keeps_slices else 0
        slices, room = slices + extra, room - extra
        kept = _spread(loaded, room)
        room -= _put(kept, "device", ROOM_LEFT)
        _put(_without(loaded, kept), "home", LOADED_SLICES)
        free = _without(free, loaded)
    for use in ("slices", "rows"):
        little = [part for part in free if part.use == use]
        kept = _spread(little, room)
        room -= _put(kept, "device", ROOM_LEFT)
        _put(_without(little, kept), "home", f"a call reads a few of its {use} over the bus")
    return frames + slices


def choose_later(parts: list[_Part], room: int, frames: int) -> None:
    """Give places to parts that come after the frames were made, with `room` bytes left."""
    small = [part for part in parts if part.nbytes <= TINY]
    kept = _spread(sorted(small, key=lambda part: part.nbytes), room)
    room -= _put(kept, "device", SMALL_PART)
    large = _spread(_without(parts, kept), room)
    _put(large, "device", ROOM_LEFT)
    for part in _without(parts, kept + large):
        if part.use != "whole":
            _put([part], "home", f"a call reads a few of its {part.use} over the bus")
        elif part.nbytes > frames:
            _put([part], "home", TOO_LARGE)
        elif part.nbytes > frames // NESTED:
            _put([part], "frames", "loaded for each use")
        else:
            _put([part], "home", "small beside the frames: calls read it over the bus")


def _frames_for_slices(parts: list[_Part], room: int) -> int:
    """The bytes of frames for slices that are loaded one by one; 0 above a quarter of the room."""
    wanted = SLICES * max((part.slice_nbytes for part in parts), default=0)
    return wanted if wanted <= room // 4 else 0


def _put(parts: Iterable[_Part], place: Place, reason: str) -> int:
    """Give parts a place and its reason; return their bytes."""
    taken = 0
    for part in parts:
        part.place = place
        part.reason = reason
        taken += part.nbytes
    return taken


def _without(parts: list[_Part], others: list[_Part]) -> list[_Part]:
    left_out = set(map(id, others))
    return [part for part in parts if id(part) not in left_out]


def _small_parts(parts: list[_Part], budget: int) -> list[_Part]:
    """Small parts, whose loads cost more than their memory; at most an eighth of the budget."""
    chosen: list[_Part] = []
    room = budget // 8
    for part in sorted(parts, key=lambda part: part.nbytes):
        if part.nbytes > min(TINY, budget // 64) or part.nbytes > room:
            break
        chosen.append(part)
        room -= part.nbytes
    return chosen


def _frames_for(parts: list[_Part], room: int) -> int:
    """The bytes of frames for parts: two of the largest, one to be loaded while one is used."""
    sizes = [part.nbytes for part in parts if part.nbytes <= room]
    wanted = max(2 * max(sizes, default=0), min(IN_TRANSIT, room // 4))
    return min(wanted, room, sum(sizes))


def _largest_that_stay(
    parts: list[_Part], streamed: list[_Part], room: int
) -> tuple[list[_Part], int]:
    """The largest parts, if the frames get smaller when these stay; and the bytes of frames."""
    ordered = sorted(parts, key=lambda part: -part.nbytes)
    best: tuple[list[_Part], int] = [], _frames_for(parts + streamed, room)
    taken = 0
    for count, part in enumerate(ordered, 1):
        taken += part.nbytes
        frames = _frames_for(ordered[count:] + streamed, room)
        if taken > room - frames:
            break
        if frames < best[1]:
            best = ordered[:count], frames
    return best


def _spread(parts: list[_Part], room: int) -> list[_Part]:
    """Parts of at most `room` bytes in all, spread evenly along the list, from its start."""
    total = sum(part.nbytes for part in parts)
    share = min(1.0, room / total) if total else 0.0
    chosen: list[_Part] = []
    owed = parts[0].nbytes * (1 - share) if parts else 0.0
    for part in parts:
        owed += part.nbytes * share
        if owed >= part.nbytes and part.nbytes <= room:
            chosen.append(part)
            owed -= part.nbytes
            room -= part.nbytes
    for part in _without(parts, chosen):  # what still fits
        if part.nbytes <= room:
            chosen.append(part)
            room -= part.nbytes
    return chosen
