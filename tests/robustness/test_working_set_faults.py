"""Working sets while driver calls fail: contents and advice stay right, and nothing is left behind.

The set's thread makes its calls beside those of the caller, so that the nth call is not always the
same one; whichever it is, the promises below hold.
"""

import contextlib

import pytest

from constants import PAGE
from contents import contents, pattern, write
from managedmem import CUDAError, Device, Host, Stream, WorkingSet, emulator
from programs import run_python

pytestmark = pytest.mark.emulator_only

SIZE = 4 * PAGE
KINDS = ["read", "write", "scratch", "write", "read"]
READS = ["read", "read", None, "read", None]  # the access of uses that only read
# What these make stays with the driver if they act and then report a failure.
MAKES = {"cuEventCreate", "cuStreamCreate", "cuCtxPushCurrent"}
CALLS = (
    "cuMemAdvise",
    "cuMemPrefetchAsync",
    "cuMemDiscardAndPrefetchBatchAsync",
    "cuStreamWaitEvent",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventCreate",
    "cuStreamQuery",
    "cuStreamGetId",
    "cuStreamGetCtx",
    "cuStreamIsCapturing",
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuMemRangeGetAttributes",
    "cuMemRangeGetAttribute",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuThreadExchangeStreamCaptureMode",
    "cuPointerGetAttributes",
    "cuDeviceGetAttribute",
)


@pytest.fixture
def layers(alloc):
    made = [alloc(SIZE) for _ in KINDS]
    for number, buffer in enumerate(made):
        write(buffer, pattern(SIZE, number))
    return made


def without_release(use):
    """A use whose end may have failed; the group is released all the same."""
    with contextlib.suppress(CUDAError), use:
        pass


def remove(working, group):
    """Removes a group, at the second try if need be."""
    try:
        working.remove(group)
    except CUDAError:
        with pytest.raises(RuntimeError, match="removed"):
            group.acquire()
        working.remove(group)


def act(layers, stream):
    """Use a set; True if a call raised. Contents that are written are written again if need be."""
    raised = False
    working = WorkingSet(2 * SIZE, Device(0))
    try:
        groups = [working.add(*pair) for pair in zip(layers, KINDS, strict=True)]
        for access in ("read", None, "read"):
            for number, group in enumerate(groups):
                try:
                    with group.use(stream=stream, access=access and READS[number]):
                        if access is None and KINDS[number] == "write":
                            layers[number].fill(number + 50, stream=stream)
                except CUDAError:
                    raised = True
        for number in (3, 0, 2):
            remove(working, groups[number])
    finally:
        try:
            working.close()
        except CUDAError:
            working.close()
            raised = True
    return raised


def check(layers):
    for number, kind in enumerate(KINDS):
        wanted = [bytes([number + 50]) * SIZE] if kind == "write" else []
        if kind != "scratch":
            assert contents(layers[number]) in [pattern(SIZE, number), *wanted], (number, kind)
        runs = layers[number].page_runs()
        assert [tuple(run[2:5]) for run in runs] == [(False, None, frozenset())], (number, kind)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("function", CALLS)
def test_one_call_fails(layers, function, after):
    """The nth call of each kind, for every n up to the last."""
    if after and function in MAKES:
        pytest.skip("the library cannot free what it was not given")
    fired = True
    for nth in (*range(1, 12), *range(12, 60, 7)):
        if not fired:
            break
        with Stream() as stream:
            emulator.fail(function, nth, 719, after)
            with contextlib.suppress(CUDAError):
                act(layers, stream)
            fired = emulator.failure_fired()
            emulator.clear_failures()
            stream.sync()
        check(layers)


def test_the_event_of_a_removed_group_outlives_an_add_that_fails(layers):
    """A thread may be about to query it, as is_resident does."""
    with WorkingSet(2 * SIZE, Device(0)) as working:
        removed = working.add(layers[0])
        working.remove(removed)
        before = emulator.live().events
        emulator.fail("cuMemAdvise")
        with pytest.raises(CUDAError):
            working.add(layers[1])
        assert emulator.live().events == before
        working.add(layers[1])
        assert emulator.live().events == before
    check(layers)


def test_a_use_that_fails_to_begin_keeps_contents(layers):
    """The first use of scratch memory ends what it holds, but not one that failed."""
    for nth in range(1, 4):
        write(layers[2], pattern(SIZE, 2))
        with WorkingSet(SIZE, Device(0)) as working, Stream() as stream:
            scratch, other = working.add(layers[2], "scratch"), working.add(layers[0])
            emulator.fail("cuStreamWaitEvent", nth)
            try:
                scratch.acquire(stream=stream)
            except CUDAError:
                used = False
            else:
                scratch.release(stream=stream)
                used = True
            emulator.clear_failures()
            for group in (other, other):
                with group.use(stream=stream):
                    pass
            stream.sync()
        assert used or contents(layers[2]) == pattern(SIZE, 2), nth


@pytest.mark.parametrize("function", ["cuMemAdvise", "cuMemPrefetchAsync", "cuEventRecord"])
def test_many_calls_of_the_thread_fail(layers, function):
    """The set counts the failures, goes on, and never holds more than its budget."""
    with WorkingSet(2 * SIZE, Device(0)) as working, Stream() as stream:
        groups = [working.add(*pair) for pair in zip(layers, KINDS, strict=True)]
        for nth in range(2, 40, 2):
            emulator.fail(function, nth, 2)
        for turn, group in enumerate(groups * 4):
            reads = READS[turn % 5] if turn % 3 else None
            without_release(group.use(stream=stream, access=reads))
        stream.sync()
        emulator.clear_failures()
        for group in groups * 4:
            with group.use(stream=stream):
                pass
        stats = working.stats()
        assert stats.failures > 0 and function in stats.last_error
        assert working.nbytes <= 2 * SIZE
    check(layers)


def test_a_broken_device():
    """Every later call fails: nothing hangs, and the set ends.

    Work that was queued on a broken device never runs. Here it would, at the end of the process, in
    an order that no device has; the program leaves it behind.
    """
    done = run_python(
        """
        import os
        import managedmem
        from managedmem import CUDAError, Device, WorkingSet, emulator
        layers = [managedmem.empty(1 << 16) for _ in range(5)]
        for lasting in range(1, 60):
            working = WorkingSet(2 << 16, Device(0))
            kinds = ["read", "write", "scratch", "write", "read"]
            groups = [working.add(*pair) for pair in zip(layers, kinds, strict=True)]
            emulator.fail("*", lasting, 719, lasting=True)
            try:
                for group in groups * 3:
                    with group.use():
                        pass
            except CUDAError as error:
                assert error.code == 719
            else:
                assert not emulator.failure_fired() or working.stats().failures > 0
            try:
                working.close()
            except CUDAError as error:
                assert error.code == 719
            assert working.is_closed
            emulator.clear_failures()
            working.close()
            assert layers[0].preferred_location is None and not layers[4].read_mostly
        print("fine", flush=True)
        os._exit(0)
        """
    )
    assert done.stdout == "fine\n"


def test_a_device_without_concurrent_access():
    done = run_python(
        """
        from managedmem import WorkingSet
        try:
            WorkingSet(4096)
        except NotImplementedError as error:
            print(error)
        """,
        emulator="profile=wsl",
    )
    assert done.stdout == (
        "a working set needs concurrent_managed_access, which Device(0) lacks: its memory moves "
        "as a whole\n"
    )


def held_bytes(calls, layers):
    """The most bytes that the device held, by the calls in their order, page by page."""
    there, most = set(), 0
    for call in calls:
        if call.result != 0 or "count" not in call.args:
            continue
        first, count = call.args["ptr"] // PAGE, -(-call.args["count"] // PAGE)
        pages = set(range(first, first + count))
        if call.name == "cuMemPrefetchAsync" and call.args["type"] == 1:
            there |= pages
        elif call.name == "cuMemPrefetchAsync" or call.args.get("advice") == 2:
            there -= pages
        most = max(most, len(there) * PAGE)
    return most


@pytest.mark.parametrize("accesses", ["own", "both"])
@pytest.mark.parametrize("budget", [2, 3])
def test_the_budget_is_kept_at_every_call(layers, budget, accesses):
    for layer in layers:
        layer.prefetch(Host())
    with WorkingSet(budget * SIZE, Device(0)) as working, Stream() as stream:
        groups = [
            working.add(layer, kind.replace("scratch", "write"))
            for layer, kind in zip(layers, KINDS, strict=True)
        ]
        emulator.clear_calls()
        for turn, group in enumerate((groups + groups[::-1]) * 6):
            reads = accesses == "both" and turn % 15 < 10
            with group.use(stream=stream, access="read" if reads else None):
                pass
        stream.sync()
        calls = emulator.calls()
        assert held_bytes(calls, layers) == budget * SIZE
    check(layers)
