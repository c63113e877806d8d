"""Operations of working sets, over frames and over managed memory."""

import gc
from array import array

from constants import PAGE
from contents import pattern
from frames_operations import AT_HOME, UNMAPPING
from managedmem import ManagedWorkingSet, WorkingSet
from world import MOVES, SIZE, WRITES, ZERO, Operation

# If one of these fails, managed memory is not prefetched, and its use meets page faults.
BY_FAULTS = AT_HOME | {
    "cuLaunchHostFunc",
    "cuMemDiscardAndPrefetchBatchAsync",
    "cuMemPrefetchAsync",
    "cuPointerGetAttributes",
}


class Doubles:
    """An array of the host with `__array_interface__`, because NumPy may be missing."""

    def __init__(self, count):
        self._memory = array("d", [0.5] * count)
        start, _ = self._memory.buffer_info()
        self.shape, self.dtype = (count,), "float64"
        self.__array_interface__ = {
            "version": 3,
            "shape": self.shape,
            "typestr": "<f8",
            "data": (start, False),
        }


def groups_of(w, working):
    """Groups of each access, of memory of the host and of the device."""
    return [
        working.add(w.a, name="a"),
        working.add({"w": w.b, "x": Doubles(PAGE)}, "write"),
        working.add([w.large[:SIZE]], "scratch"),
    ]


def managed_groups_of(w, working):
    return [
        working.add(w.c, name="c"),
        working.add([w.large[:PAGE], w.large[PAGE : 2 * PAGE]], "write"),
        working.add(w.large[4 * PAGE :][:SIZE], "scratch"),
    ]


def use_all(working, groups, stream):
    working.order = groups
    for group in groups:
        use = group.use(stream=stream)
        late = use.arrays
        use.close()
        del use, late
    with groups[1].use_on_host():
        pass
    working.remove(groups[1])
    stream.sync()


def use_nested(w):
    with WorkingSet(SIZE, ZERO) as working:
        first, second = working.add(w.a, "write"), working.add(w.b, "write")
        with first.use(stream=w.stream), second.use(access="read"), second.use():
            pass
        with second.use_on_host(access="write"):
            pass


def use_a_set(w):
    with WorkingSet(2 * SIZE, ZERO) as working:
        use_all(working, groups_of(w, working), w.stream)


def use_a_managed_set(w):
    with ManagedWorkingSet(2 * SIZE, ZERO) as working:
        use_all(working, managed_groups_of(w, working), w.stream)


def drop_a_set(w):
    use = WorkingSet(SIZE, ZERO).add(w.a, "write").use(stream=w.stream)
    late = use.arrays
    del use, late
    gc.collect()


def suspend_a_set(w):
    with WorkingSet(SIZE, ZERO, suspendable=True) as working:
        group = working.add(w.a, "write")
        for change in (working.suspend, working.resume):
            change()
            with group.use(stream=w.stream):
                pass
        w.stream.sync()


def read_a_set(w):
    with WorkingSet(SIZE, ZERO) as working:
        assert working.budget == SIZE and working.device == ZERO and working.nbytes == 0
        working.order = []
        group = working.add(w.a, name="a")
        with group.use_on_host() as (home,):
            assert bytes(home) == pattern(SIZE, 0) or bytes(home) == pattern(SIZE, 1)
        return working.stats(), repr(working), [*working], group.is_resident, repr(group)


WORKING = {
    "use a working set": Operation(use_a_set, silent=AT_HOME),
    "use a working set without room": Operation(use_nested, silent=AT_HOME),
    "use a managed working set": Operation(
        use_a_managed_set, silent=BY_FAULTS, may_change=MOVES | WRITES
    ),
    "suspend a working set": Operation(
        suspend_a_set, "_Frames.suspend _Frames.resume", silent=AT_HOME | UNMAPPING
    ),
    "a working set without groups": Operation(
        lambda w: WorkingSet(PAGE, ZERO).close(), silent=AT_HOME
    ),
    "read a working set": Operation(read_a_set, silent=AT_HOME),
    "a working set dropped in use": Operation(drop_a_set, silent=AT_HOME),
    "a working set of no bytes": Operation(
        lambda w: WorkingSet(0, ZERO), raises=ValueError, faults=0
    ),
    "a group of no memory": Operation(
        lambda w: WorkingSet(PAGE, ZERO).add(object()), raises=TypeError, silent=AT_HOME
    ),
}
