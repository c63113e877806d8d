"""Working sets while driver calls fail: contents stay right, and nothing is left behind.

The emulated device works at once here, so that a kernel is an access by address, which makes no
call of the driver that could fail itself.
"""

import contextlib
import ctypes

import numpy
import pytest

import managedmem
from constants import PAGE
from contents import contents, pattern
from driver import pop_contexts, raw_driver
from managedmem import CUDAError, Device, ManagedWorkingSet, Stream, WorkingSet, emulator
from programs import run_python

pytestmark = pytest.mark.emulator_only("makes calls fail, and reads frames by their address")

SIZE = 4 * PAGE
KINDS = ["read", "write", "scratch", "write", "read"]
FAILED = 719
# The library cannot free an object if its creation was reported as failed.
MAKES = {"cuEventCreate", "cuStreamCreate", "cuMemAlloc", "cuCtxPushCurrent"}
# What these make or free stays with the driver if they fail.
FREES = {"cuEventDestroy", "cuStreamDestroy", "cuMemFree", "cuMemHostUnregister"}
# A second try, or another answer that is right, takes their place without a word.
REPLACED = {
    "cuCtxPopCurrent",
    "cuThreadExchangeStreamCaptureMode",
    "cuStreamIsCapturing",
    "cuStreamGetId",
    "cuEventQuery",
    "cuCtxGetId",
    "cuMemRangeGetAttribute",
    "cuCtxSynchronize",
}
# Without an answer of these the group is used at home, or nothing is loaded ahead.
REPLACED |= {"cuCtxPushCurrent", "cuStreamGetCtx", "cuCtxGetCurrent", "cuCtxGetDevice"}
PARTS = 6


class Framed:
    """Arrays at home in a WorkingSet."""

    def __init__(self, layers):
        self.arrays = [numpy.frombuffer(pattern(SIZE, n), "u1") for n in range(len(KINDS))]

    def renew(self):
        """Let the memory hold what it held at first."""

    def make(self):
        return WorkingSet(2 * SIZE, Device(0))

    def add(self, working, number):
        return working.add(self.arrays[number], KINDS[number])

    def address(self, use):
        return use.arrays[0].handle

    def found(self, number, group):
        with group.use_on_host() as (home,):
            return bytes(home)


class Managed(Framed):
    """The same of managed memory."""

    def __init__(self, layers):
        self.arrays = layers
        self.renew()

    def renew(self):
        for number, layer in enumerate(self.arrays):
            ctypes.memmove(layer.handle, pattern(SIZE, number), SIZE)

    def make(self):
        return ManagedWorkingSet(2 * SIZE, Device(0))

    def address(self, use):
        return use.arrays.handle

    def found(self, number, group):
        return contents(self.arrays[number])


@pytest.fixture(params=[Framed, Managed])
def memory(request, alloc):
    emulator.schedule("eager")
    return request.param([alloc(SIZE) for _ in KINDS])


def twice(call):
    """The second try succeeds, as only one call fails."""
    try:
        return call()
    except CUDAError:
        return call()


class Program:
    """Uses of a set while a call fails; keeps what each group must hold."""

    def __init__(self, memory, stream):
        self.memory, self.stream = memory, stream
        self.wanted = [pattern(SIZE, number) for number in range(len(KINDS))]
        self.raised = 0
        self.last_stats = None
        self.groups = {}

    def attempt(self, call):
        """The result, also of a second try, as only one call fails."""
        try:
            return call()
        except CUDAError as error:
            assert error.code == FAILED
            self.raised += 1
            return call()

    def run(self):
        working = self.attempt(self.memory.make)
        for number in range(len(KINDS)):
            self.groups[number] = self.attempt(lambda n=number: self.memory.add(working, n))
        for access in ("read", None, "read"):
            for number, group in self.groups.items():
                self.use(number, group, access if KINDS[number] == "write" else None)
        for number in (3, 0):
            self.attempt(lambda n=number: working.remove(self.groups[n]))
        self.attempt(lambda: self.write_on_host(1))
        self.use(1, self.groups[1], "read")
        self.attempt(working.close)
        self.last_stats = working.stats()

    def use(self, number, group, access):
        use = self.attempt(lambda: group.use(stream=self.stream, access=access))
        address = self.attempt(lambda: self.memory.address(use))
        if KINDS[number] != "scratch":
            assert ctypes.string_at(address, SIZE) == self.wanted[number], (number, access)
        if KINDS[number] != "read" and access is None:
            self.wanted[number] = bytes([number + 50]) * SIZE
            ctypes.memmove(address, self.wanted[number], SIZE)
        self.attempt(use.close)

    def write_on_host(self, number):
        with self.groups[number].use_on_host(access="write") as home:
            buffer = home[0] if isinstance(home, tuple) else home
            self.wanted[number] = bytes([99]) * SIZE
            ctypes.memmove(buffer.handle, self.wanted[number], SIZE)

    def check(self):
        for number, group in self.groups.items():
            if KINDS[number] != "scratch":
                assert self.memory.found(number, group) == self.wanted[number], number


def run_program(memory, *fault):
    """The program, and its calls, without and with a fault."""
    memory.renew()
    with Stream() as stream:
        program = Program(memory, stream)
        emulator.clear_calls()
        if fault:
            emulator.fail("*", *fault)
        program.run()
        emulator.clear_failures()
        stream.sync()
    return program, emulator.calls()


@pytest.fixture
def all_calls():
    """The log has the calls that only ask something, too."""
    raw_driver().emu_log_verbose(1)
    yield
    raw_driver().emu_log_verbose(0)


@pytest.mark.usefixtures("all_calls")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_one_call_fails(memory, after, part):
    """Each call, before it acts or after; those that free memory have test_fault_sweeps.py."""
    without = FREES | MAKES if after else FREES
    run_program(memory)
    names = [call.name for call in run_program(memory)[1]]
    assert len(names) > 200
    depth, silent = emulator.live().context_depth, set()
    for nth in range(part + 1, len(names), PARTS):
        if names[nth - 1] in without:
            continue
        program, calls = run_program(memory, nth, FAILED, after)
        failed = [call.name for call in calls if call.result == FAILED]
        program.check()
        known = program.raised + program.last_stats.failures
        silent.update([] if known else failed[:1])
        pop_contexts(depth)
    assert silent <= REPLACED, silent


@pytest.mark.parametrize(
    "function", ["cuMemcpyAsync", "cuEventRecord", "cuStreamWaitEvent", "cuMemPrefetchAsync"]
)
def test_many_calls_fail(memory, function):
    """The set counts the failures, goes on, and finds its way back to the device."""
    if (function, type(memory)) in {("cuMemcpyAsync", Managed), ("cuMemPrefetchAsync", Framed)}:
        pytest.skip("it does not call that")
    with memory.make() as working, Stream() as stream:
        groups = [memory.add(working, number) for number in range(len(KINDS))]
        for nth in range(2, 40, 2):
            emulator.fail(function, nth, 2)
        for group in groups * 4:
            with contextlib.suppress(CUDAError):
                use = group.use(stream=stream, access=None)
                twice(use.close)
        del use
        emulator.clear_failures()
        for group in groups * 2:
            with group.use(stream=stream) as use:
                assert use.is_resident
        stats = working.stats()
        assert stats.failures > 0 and function in stats.last_error
        assert working.nbytes <= 2 * SIZE


def test_a_close_that_fails_goes_on(memory):
    """Contents are not lost: the frame stays that of the use."""
    with memory.make() as working, Stream() as stream:
        group = memory.add(working, 1)
        use = group.use(stream=stream)
        address = memory.address(use)
        ctypes.memmove(address, bytes([8]) * SIZE, SIZE)
        emulator.fail("cuEventRecord", 1, FAILED)
        emulator.fail("cuCtxSynchronize", 1, FAILED)
        with pytest.raises(CUDAError):
            use.close()
        assert memory.address(use) == address
        with pytest.raises(RuntimeError, match="in use"):
            working.remove(group)
        for number in (0, 2, 3, 4) * 2:
            with memory.add(working, number).use(stream=stream):
                pass
        assert ctypes.string_at(address, SIZE) == bytes([8]) * SIZE
        use.close()
        working.remove(group)
        assert memory.found(1, group) == bytes([8]) * SIZE


@pytest.mark.parametrize("kind", ["WorkingSet", "ManagedWorkingSet"])
def test_a_broken_device(kind):
    """Every later call fails: nothing hangs, and the set ends with the process.

    Work that was queued on a broken device never runs. Here it would, at the end of the process, in
    an order that no device has; the program leaves it behind.
    """
    done = run_python(f"""
        import gc, os
        import managedmem
        from managedmem import CUDAError, Device, emulator
        layers = [managedmem.full(1 << 16, n, "uint8") for n in range(5)]
        kinds = ["read", "write", "scratch", "write", "read"]
        for lasting in range(1, 60):
            working = managedmem.{kind}(2 << 16, Device(0))
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
                assert error.code == 719 and not working.is_closed
            del group
            emulator.clear_failures()
            gc.collect()
            working.close()
            assert working.is_closed
            del groups, working
        print("fine", flush=True)
        os._exit(0)
    """)
    assert done.stdout == "fine\n"


def test_more_than_the_device_has_after_all():
    """Another process may take what was free a moment ago."""
    emulator.fail("cuMemAlloc", 1, 2)
    with pytest.raises(managedmem.CUDAOutOfMemoryError, match="4096 bytes of Device"):
        WorkingSet(4096, 0)
