"""Operations of working sets.

Those in WORKING end without a command that a set's thread has to carry out, so that the number of
their driver calls is certain. THREADED has the others.
"""

import gc

from constants import PAGE
from managedmem import CUDAError, WorkingSet
from world import MOVES, SIZE, ZERO, Operation


def ended(act):
    """An operation on a set of its own, which is closed at the end, or at the second try."""

    def act_and_end(w):
        working = WorkingSet(2 * SIZE, ZERO)
        try:
            act(w, working)
        finally:
            try:
                working.close()
            except (CUDAError, MemoryError):
                working.close()
                raise

    return act_and_end


def use_all(w, working):
    groups = [
        working.add(w.a, "read", "a", at_home=True),
        working.add([w.b[:PAGE], w.b[PAGE : 2 * PAGE]], "write"),
        working.add(w.large[:PAGE], "scratch"),
    ]
    working.order = groups
    with groups[0].use(stream=w.stream):
        groups[1].acquire(access="read")
        groups[1].release(stream=w.stream)
    with groups[2].use():
        pass
    with groups[1].use(access="write"):
        pass
    working.remove(groups[1])
    w.stream.sync()


def use_to_write(w, working):
    working.add(w.a).use(access="write")


def drop_a_set(w):
    WorkingSet(SIZE, ZERO).add(w.a).acquire(stream=w.stream)
    w.stream.sync()  # the thread has loaded the group
    gc.collect()


def read_a_group(w, working):
    group = working.add(w.a, name="a")
    assert [*working] == [group] and len(working) == 1
    return (
        *(group.name, group.nbytes, group.access, group.is_resident, repr(group)),
        group.set is working,
    )


def read_a_set(w):
    with WorkingSet(SIZE, ZERO) as working:
        assert working.budget == SIZE and working.device == ZERO and working.nbytes == 0
        assert working.order is None and not working.is_closed and len(working) == 0
        working.order = []
        return working.stats(), repr(working), [*working]


# A set goes on, or ends, without these.
WITHOUT = frozenset({"cuStreamQuery"})
WORKING = {
    "a working set without groups": Operation(
        read_a_set,
        "WorkingSet WorkingSet.budget WorkingSet.device WorkingSet.nbytes WorkingSet.order "
        "WorkingSet.is_closed WorkingSet.__len__ WorkingSet.__iter__ WorkingSet.stats "
        "WorkingSet.__repr__ WorkingSet.__enter__ WorkingSet.__exit__ WorkingSet.close",
        silent=WITHOUT,
    ),
    "a working set of no bytes": Operation(lambda w: WorkingSet(0), raises=ValueError),
    "a group of no memory": Operation(
        ended(lambda w, working: working.add(object())), raises=TypeError, silent=WITHOUT
    ),
}
THREADED = {
    "use a working set": Operation(
        ended(use_all),
        "WorkingSet.add WorkingGroup WorkingGroup.use WorkingGroup.acquire WorkingGroup.release "
        "WorkingSet.remove "
        "WorkingUse WorkingUse.__enter__ WorkingUse.__exit__",
        may_change=MOVES,
    ),
    "read a group": Operation(
        ended(read_a_group),
        "WorkingGroup.name WorkingGroup.nbytes WorkingGroup.access WorkingGroup.is_resident "
        "WorkingGroup.set WorkingGroup.__repr__",
        may_change=MOVES,
    ),
    "an access that a group does not have": Operation(
        ended(use_to_write), raises=ValueError, may_change=MOVES
    ),
    "a working set dropped": Operation(drop_a_set, may_change=MOVES),
}
