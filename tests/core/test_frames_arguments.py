"""Arguments of the private types _Slab and _Frames that are wrong."""

import fcntl
import os

import pytest

from constants import PAGE
from frames_operations import memory_file
from managedmem import Device
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
    "a file that is no number": lambda: _Slab.of_file(0, "1"),
    "a file of a device that is no number": lambda: _Slab.of_file("0", 1),
    "a file that is not open": lambda: _Slab.of_file(0, 1 << 20),
    "a reader that is no number": lambda: _Slab(0, PAGE, True).add_reader("1"),
    "a reader that is no device": lambda: _Slab(0, PAGE, True).add_reader(Device.count()),
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


@pytest.fixture
def shared():
    """Opens files of shared memory, and closes them."""
    files = []

    def make(*arguments):
        files.append(memory_file(*arguments))
        return files[-1]

    yield make
    for file in files:
        os.close(file)


class TestSharedSlabs:
    """Of files of memfd_create."""

    def test_have_one_memory(self, shared):
        file = shared(PAGE + 1)
        one, other = _Slab.of_file(0, file), _Slab.of_file(0, file)
        one.fill(0, 3, b"abc")
        assert one.nbytes == 2 * PAGE and one.is_shared and one.handle != other.handle
        assert os.pread(file, 3, 0) == b"abc"
        other.fill(1, 1, b"x")
        assert os.pread(file, 3, 0) == b"axc"
        assert _Slab.at(one.handle, 1).is_shared

    @pytest.mark.parametrize(
        ("nbytes", "seals"), [(PAGE, 0), (PAGE, fcntl.F_SEAL_GROW), (0, fcntl.F_SEAL_SHRINK)]
    )
    def test_are_refused_if_they_could_be_cut_off(self, shared, nbytes, seals):
        file = shared(nbytes, seals)
        with pytest.raises(ValueError, match=f"{file} is not memory .* sealed with F_SEAL_SHRINK"):
            _Slab.of_file(0, file)

    def test_are_refused_if_nothing_can_be_written(self, shared):
        file = shared()
        reading = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
        try:
            with pytest.raises(ValueError, match="Permission denied"):
                _Slab.of_file(0, reading)
        finally:
            os.close(reading)
        assert not _Slab.of_file(0, file).add_reader(0)

    def test_of_a_file_on_a_disk_are_refused(self, tmp_path):
        with (tmp_path / "file").open("wb+") as file:
            file.truncate(PAGE)
            with pytest.raises(ValueError, match="must come from memfd_create"):
                _Slab.of_file(0, file.fileno())


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
