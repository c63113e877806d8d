"""Operations of slabs and frames, over which working sets and managedmem.torch stream."""

import fcntl
import gc
import os

from constants import PAGE
from managedmem._managedmem import _Frames, _Slab
from world import SIZE, Operation

PARTS = 3
# Calls that are tried a second time after a failure.
UNMAPPING = frozenset({"cuMemAddressFree", "cuMemRelease", "cuMemUnmap"})
# If one of these fails, a part is used at home, or its frame is not freed at the first try.
AT_HOME = frozenset(
    {
        "cuCtxSynchronize",
        "cuEventCreate",
        "cuEventDestroy",
        "cuEventRecord",
        "cuEventSynchronize",
        "cuMemHostUnregister",
        "cuMemcpyAsync",
        "cuStreamDestroy",
        "cuStreamGetCaptureInfo",  # of a stream that did not say whether it captures
        "cuStreamGetId",
        "cuStreamWaitEvent",
    }
)


def parts_of(room, host_waits=False):
    """Frames for parts of one page each, and their home, which the caller must keep."""
    home = _Slab(0, PARTS * PAGE, True)
    home.lock()
    frames = _Frames(0, room, host_waits)
    for number in range(PARTS):
        assert (
            frames.add(home.handle + number * PAGE, PAGE, "read" if number else "write") == number
        )
    return frames, home


def use_parts(w, host_waits=False):
    frames, _home = parts_of(2 * PAGE, host_waits)
    stream = w.stream.handle
    frames.begin_round(stream)
    for part in range(PARTS):
        held = []
        frames.acquire([part], part == 0, stream, held)
        frames.release(held, part == 0, stream, False)
    frames.end_round()
    frames.settle(stream)
    frames.changed(1, stream)
    frames.wait()
    w.stream.sync()
    frames.close()
    assert frames.acquire([0], False, stream, []) == (0,)
    return frames.stats()[0]["room"]


def change_parts(w):
    frames, _home = parts_of(2 * PAGE)
    frames.give_order((2, 1))
    removed = [1]
    frames.remove(removed)
    assert removed == []
    held = []
    frames.acquire([0, 2], False, w.stream, held)
    frames.release(held, False, w.stream, False)
    frames.synchronize()
    frames.has(0)  # False if the driver or the host lacks something: it is used at home then
    return frames.stats()[0]["parts"]


def add_managed_parts(w):
    frames, numbers = _Frames(0, 2 * PAGE, False, True), []
    try:
        nbytes, _items, _exports = frames.add_targets([w.a[:PAGE], w.b[:PAGE]], "read", numbers)
        assert (nbytes, numbers) == (2 * PAGE, [0, 1])
    finally:
        frames.close()


def fill_a_slab(w):
    slab = _Slab(0, PAGE, True)
    slab.fill(0, 3, b"abc")
    slab.fill(3, PAGE - 3, w.a[3:PAGE])


def drop_in_use(w):
    frames, home = parts_of(PAGE)
    frames.acquire([0], True, w.stream.handle, [])
    del frames, home
    gc.collect()


def read_a_slab(w):
    slab = _Slab(0, PAGE + 1, True)
    assert slab.nbytes == 2 * PAGE and slab.handle % PAGE == 0
    assert _Slab.at(slab.handle + 1, PAGE).device_id == slab.device_id
    assert _Slab.at(slab.handle, 3 * PAGE) is None
    return _Slab(0, PAGE + 1, False).nbytes


def suspend_a_slab(w):
    slab = _Slab(0, SIZE, False, True)
    slab.suspend()
    assert slab.is_suspended and slab.has_home
    slab.resume()
    return slab.is_suspended


def memory_file(nbytes=PAGE, seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW):
    """A file of memory over which several slabs can be made; the caller closes it."""
    file = os.memfd_create("frames_operations", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, nbytes)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def share_a_slab(w):
    file = memory_file(PAGE)
    try:
        one, other = _Slab.of_file(0, file), _Slab.of_file(0, file)
    finally:
        os.close(file)
    one.lock()
    other.lock()
    one.add_reader(1)
    one.fill(0, 3, b"abc")
    assert one.is_shared and not _Slab(0, PAGE, True).is_shared
    return other.nbytes


FRAMES = {
    "use parts in frames": Operation(
        use_parts,
        "_Slab _Slab.lock _Frames _Frames.add _Frames.acquire _Frames.release _Frames.changed "
        "_Frames.begin_round _Frames.end_round _Frames.settle _Frames.wait _Frames.stats "
        "_Frames.close",
        silent=AT_HOME,
    ),
    "change parts": Operation(
        change_parts,
        "_Frames.remove _Frames.synchronize _Frames.has _Frames.give_order",
        silent=AT_HOME,
    ),
    "add managed parts": Operation(add_managed_parts, "_Frames.add_targets", silent=AT_HOME),
    "share a slab": Operation(
        share_a_slab, "_Slab.of_file _Slab.add_reader _Slab.is_shared", silent=AT_HOME
    ),
    "suspend a slab": Operation(
        suspend_a_slab,
        "_Slab.suspend _Slab.resume _Slab.is_suspended _Slab.has_home",
        silent=UNMAPPING | {"cuCtxSynchronize"},
    ),
    "fill a slab": Operation(fill_a_slab, "_Slab.fill"),
    "use parts on the host": Operation(lambda w: use_parts(w, True), silent=AT_HOME),
    "frames dropped in use": Operation(drop_in_use, silent=AT_HOME),
    "read a slab": Operation(read_a_slab, "_Slab.at _Slab.device_id _Slab.handle _Slab.nbytes"),
    "a part that is none": Operation(
        lambda w: parts_of(PAGE)[0].acquire([PARTS], False, 0, []),
        raises=ValueError,
        silent=AT_HOME,
    ),
    "frames of no bytes": Operation(lambda w: _Frames(0, -1, False), raises=ValueError, faults=0),
}
