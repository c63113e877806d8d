"""Arguments of the private types _Slab and _Frames that are wrong."""

import pytest

from constants import PAGE
from managedmem._managedmem import _Frames, _Slab

SLABS = {
    "a device that is no number": lambda: _Slab("0", PAGE, True),
    "a size that is no number": lambda: _Slab(0, "1", True),
    "a flag that is no bool": lambda: _Slab(0, PAGE, "yes"),
    "too few": lambda: _Slab(0),
    "an offset that is no number": lambda: _Slab(0, PAGE, True).fill("0", 1, b"1"),
    "a length that is no number": lambda: _Slab(0, PAGE, True).fill(0, "1", b"1"),
    "a source without memory": lambda: _Slab(0, PAGE, True).fill(0, 1, object()),
    "a source of another size": lambda: _Slab(0, PAGE, True).fill(0, 2, b"1"),
    "a source that is not in C order": lambda: _Slab(0, PAGE, True).fill(
        0, 2, memoryview(b"1234")[::2]
    ),
    "bytes beyond the end": lambda: _Slab(0, PAGE, True).fill(PAGE, 1, b"1"),
    "an offset beyond the end": lambda: _Slab(0, PAGE, True).fill(PAGE + 1, 1, b"1"),
    "memory of a device": lambda: _Slab(0, PAGE, False).fill(0, 1, b"1"),
}
FRAMES = {
    "a device that is no number": lambda f: _Frames("0", PAGE, False),
    "a size that is no number": lambda f: _Frames(0, "1", False),
    "a flag that is no bool": lambda f: _Frames(0, PAGE, 1.5),
    "another flag that is no bool": lambda f: _Frames(0, PAGE, False, 1.5),
    "an address that is no number": lambda f: f.add("0", PAGE, "read"),
    "an access that is none": lambda f: f.add(PAGE, PAGE, "all"),
    "an access that is no text": lambda f: f.add(PAGE, PAGE, 0),
    "targets without memory": lambda f: f.add_targets([object()], "read", []),
    "targets with an access that is none": lambda f: f.add_targets([], "all", []),
    "a part that is no number": lambda f: f.acquire(["0"], False, None, []),
    "a change of no part": lambda f: f.changed(7, None),
    "a change on no stream": lambda f: f.changed(0, "stream"),
    "a round on no stream": lambda f: f.begin_round("stream"),
    "parts that are no sequence": lambda f: f.acquire(7, False, None, []),
    "parts of which one is none": lambda f: f.acquire([0, 7], False, None, []),
    "all on no stream": lambda f: f.acquire([0], False, "stream", []),
    "all with a write that is no bool": lambda f: f.acquire([0], 1.5, None, []),
    "numbers that are no list": lambda f: f.acquire([0], False, None, ()),
    "held parts of which one is none": lambda f: f.release([7], False, None, False),
    "held parts on no stream": lambda f: f.release([0], False, "stream", False),
    "held parts with a write that is no bool": lambda f: f.release([0], 1.5, None, False),
    "held parts that go on or not": lambda f: f.release([0], False, None, 1.5),
    "a removal of no part": lambda f: f.remove([7]),
    "a removal of no sequence": lambda f: f.remove(7),
    "a second removal": lambda f: (f.remove([0]), f.remove([0])),
    "an order of no parts": lambda f: f.give_order((7,)),
    "a question about no part": lambda f: f.has(7),
}
WRONG = (TypeError, ValueError, RuntimeError, SystemError)


@pytest.fixture
def frames():
    """Frames with one part, whose home lives as long."""
    home = _Slab(0, PAGE, True)
    home.lock()
    home.lock()  # the second time does nothing
    made = _Frames(0, 2 * PAGE, False)
    made.add(home.handle, PAGE, "read")
    yield made
    made.close()
    del home


@pytest.mark.parametrize("call", SLABS.values(), ids=SLABS)
def test_of_slabs(call):
    with pytest.raises(WRONG):
        call()


@pytest.mark.parametrize("call", FRAMES.values(), ids=FRAMES)
def test_of_frames(frames, call):
    with pytest.raises(WRONG):
        call(frames)
    assert frames.stats()[0]["failures"] == 0


def test_a_closed_set_takes_no_part(frames):
    frames.close()
    with pytest.raises(RuntimeError, match="closed"):
        frames.add(PAGE, PAGE, "read")
    frames.remove([0])
    frames.wait()
    frames.synchronize()
    frames.release([0], False, None, False)
