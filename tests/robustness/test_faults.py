"""Failing driver calls when objects end, in first uses, and where a thread's context changes.

fault_sweeps.py lets every driver call of every operation fail; here are the faults that its sweeps
do not reach, and the completeness of its tables.
"""

import gc
import inspect

import pytest

import managedmem
from all_operations import everything, uncovered
from constants import PAGE
from driver import raw_driver
from fault_sweeps import plain
from first_uses import FIRST_USE
from live_memory import settle
from managedmem import CUDAError, CUDAOutOfMemoryError, Device, Host, ManagedMemoryResource, Stream
from operations import NO_DRIVER
from programs import run_python
from world import (
    DISPATCH_HINT,
    LAUNCH_FAILED,
    OF_STREAMS,
    OUT_OF_MEMORY,
    REPEATED,
    SIZE,
    Operation,
    World,
)

pytestmark = pytest.mark.emulator_only


@pytest.fixture
def verbose_log():
    """Log the bookkeeping calls too, so that the log names whatever failed."""
    log = raw_driver()
    log.emu_log_verbose(1)
    yield
    log.emu_log_verbose(0)


def check_error(error, function, code):
    expected = CUDAOutOfMemoryError if code == OUT_OF_MEMORY else CUDAError
    assert type(error) is expected, error
    assert (error.code, error.function) == (code, function)
    assert isinstance(error, MemoryError) == (code == OUT_OF_MEMORY)
    assert function in str(error)
    assert error.name in str(error)


class TestClosing:
    """A failing free is reported once, by close(), and the buffer counts as closed."""

    CODES = (LAUNCH_FAILED, 999, OUT_OF_MEMORY)

    @pytest.mark.parametrize("code", CODES)
    def test_close_reports_and_closes(self, code):
        from managedmem import emulator

        buffer = ManagedMemoryResource().allocate(SIZE)
        emulator.fail("cuMemFree", code=code, after=True)
        with pytest.raises(CUDAError) as caught:
            buffer.close()
        assert (caught.value.code, caught.value.function) == (code, "cuMemFree")
        assert buffer.is_closed
        assert buffer.handle == 0
        assert buffer.close() is None

    def test_a_block_of_a_pool_that_could_not_be_freed_yet(self):
        """The free was not called, so the driver still has the block; it is freed later."""
        from managedmem import emulator

        with ManagedMemoryResource(pooled=True) as pool:
            buffer = pool.allocate(SIZE)
            before = emulator.live().allocations
            emulator.fail("cuThreadExchangeStreamCaptureMode", code=LAUNCH_FAILED)
            with pytest.raises(CUDAError):
                buffer.close()
            assert buffer.is_closed
            dropped = pool.allocate(SIZE)
            emulator.fail("cuThreadExchangeStreamCaptureMode", code=LAUNCH_FAILED)
            del dropped
            assert emulator.failure_fired()
            settle()  # frees them in the order of their stream,
            settle()  # which then gets there
            assert emulator.live().allocations == before - 1

    def test_leaving_the_block_reports(self):
        from managedmem import emulator

        with pytest.raises(CUDAError), ManagedMemoryResource().allocate(SIZE) as buffer:
            emulator.fail("cuMemFree", code=LAUNCH_FAILED, after=True)
        assert buffer.is_closed

    def test_an_error_inside_the_block_is_not_lost(self):
        from managedmem import emulator

        with pytest.raises(CUDAError) as caught, ManagedMemoryResource().allocate(SIZE):
            emulator.fail("cuMemFree", code=LAUNCH_FAILED, after=True)
            raise KeyError("inside")
        assert isinstance(caught.value.__context__, KeyError)

    @pytest.mark.parametrize("code", CODES)
    def test_dropping_never_raises(self, code, capfd):
        from managedmem import emulator

        buffer = ManagedMemoryResource().allocate(SIZE)
        emulator.fail("cuMemFree", code=code, after=True)
        del buffer
        gc.collect()
        assert emulator.failure_fired()
        assert capfd.readouterr().err == ""

    def test_dropping_keeps_the_exception_in_flight(self):
        from managedmem import emulator

        buffer = ManagedMemoryResource().allocate(SIZE)
        emulator.fail("cuMemFree", code=LAUNCH_FAILED, after=True)
        with pytest.raises(KeyError):
            try:
                raise KeyError
            finally:
                del buffer
        assert emulator.failure_fired()

    @pytest.mark.parametrize("code", CODES)
    def test_streams(self, code):
        from managedmem import emulator

        stream = Stream()
        emulator.fail("cuStreamDestroy", code=code, after=True)
        with pytest.raises(CUDAError) as caught:
            stream.close()
        assert (caught.value.code, caught.value.function) == (code, "cuStreamDestroy")
        assert stream.is_closed
        stream.close()
        emulator.clear_failures()
        stream = Stream()
        emulator.fail("cuStreamDestroy", code=code, after=True)
        del stream
        assert emulator.failure_fired()

    def test_deallocate(self):
        from managedmem import emulator

        buffer = ManagedMemoryResource().allocate(SIZE)
        resource = ManagedMemoryResource()
        with pytest.raises(CUDAError) as caught:
            emulator.fail("cuMemFree", code=LAUNCH_FAILED)
            resource.deallocate(buffer.handle, buffer.size)
        assert caught.value.function == "cuMemFree"
        buffer.close()

    def test_views_are_closed_with_a_root_that_fails_to_free(self):
        from managedmem import emulator

        buffer = ManagedMemoryResource().allocate(SIZE)
        part = buffer[0:PAGE]
        emulator.fail("cuMemFree", code=LAUNCH_FAILED, after=True)
        with pytest.raises(CUDAError):
            buffer.close()
        assert part.is_closed
        with pytest.raises(RuntimeError, match="closed"):
            part.prefetch(Host())


class TestCurrentDevice:
    @pytest.mark.parametrize("code", [LAUNCH_FAILED, OUT_OF_MEMORY])
    def test_set_current(self, code, device1, current_device, verbose_log):
        operation = Operation(lambda w: device1.set_current())
        Device(0).set_current()
        from managedmem import emulator

        for n in range(1, 20):
            emulator.fail("*", nth=n, code=code)
            emulator.clear_calls()
            try:
                operation.act(None)
            except CUDAError as error:
                check_error(error, plain(emulator.calls()[-1].name), code)
            fired = emulator.failure_fired()
            emulator.clear_failures()
            if not fired:
                break
            assert Device() is Device(0), "a failed call left another device current"
        assert n > 1
        assert Device() is device1


class TestFirstUse:
    """Opening the driver, retaining contexts, making internal streams: once a process each.

    A parent that has only imported the package forks a child for each fault.
    """

    SCRIPT = """
import ctypes, os, pathlib, sys
import managedmem
from managedmem import CUDAError, Device, Host, ManagedBuffer, ManagedMemoryResource, Stream
from managedmem import emulator

library = ctypes.CDLL(pathlib.Path(managedmem.__file__).with_name("libmanagedmem_emulator.so"))

def use(work):
    with ManagedMemoryResource().allocate(4 * 4096) as buffer:
        work(buffer)

def operation():
    {operation}

def attempt(n, code):
    "0: the fault was not met; 2: met, reported and got over; anything else is a bug."
    # Not through managedmem.emulator, which would open the driver before the operation does.
    library.emu_log_verbose(1)
    library.emu_fail(b"*", n, code, 0)
    met = None
    try:
        operation()
    except CUDAError as error:
        met = error
    fired = library.emu_fail_fired()
    library.emu_fail_clear()
    if not fired:
        assert met is None, met
        return 0
    if met is not None and met.code is not None:
        assert met.code == code and met.function and met.function in str(met), met
    elif met is None:
        failed = next(c.name for c in emulator.calls() if c.result == code)
        assert failed in {repeated!r}, "a failing " + failed + " went unnoticed"
    depth = emulator.live().context_depth
    assert depth <= 1, depth
    # Nothing half done was kept: the next try works, and is complete.
    operation()
    assert Device.count() == 2 and Device(0).concurrent_managed_access
    operation()
    live = emulator.live()
    # What the driver refused to free it still has; one stream a device is kept for the next time.
    refused = met is not None and met.function == "cuMemFree"
    assert live.allocations == refused and live.events == 0 and live.streams <= 2, live
    return 2

n = met = 0
while True:
    n += 1
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = attempt(n, {code})
        except BaseException as error:
            import traceback
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 0:
        break
    assert status == 2, f"call {{n}}: status {{status}}"
    met += 1
    assert n < 200
print(met)
"""

    @pytest.mark.parametrize("code", [LAUNCH_FAILED, OUT_OF_MEMORY])
    @pytest.mark.parametrize("name", FIRST_USE)
    def test_each_call_in_turn(self, name, code):
        # The last query of a set that grew is not missed: the advice holds all the same.
        unnoticed = REPEATED | OF_STREAMS | (DISPATCH_HINT if name == "accessed_by" else set())
        done = run_python(
            self.SCRIPT.format(operation=FIRST_USE[name], code=code, repeated=unnoticed)
        )
        assert done.stderr == ""
        # At least the initialisation, the device count and the attributes of two devices.
        assert int(done.stdout) >= 4


class TestCoverage:
    """No public operation without a sweep: a new one has to be named above or below."""

    @pytest.mark.parametrize("name", NO_DRIVER)
    def test_needs_no_driver_call(self, name, verbose_log):
        from managedmem import emulator

        w = World()
        try:
            w.make_pools()
            emulator.clear_calls()
            NO_DRIVER[name](w)
            assert not emulator.calls()
        finally:
            w.end()

    def test_every_public_operation_is_in_a_table(self):
        assert not uncovered()

    def test_an_operation_that_no_table_has_is_noticed(self, monkeypatch):
        reads = {name: act for name, act in NO_DRIVER.items() if name != "ManagedBuffer.strides"}
        monkeypatch.setattr("all_operations.NO_DRIVER", reads)
        assert uncovered() == {"ManagedBuffer.strides"}

    def test_tables_name_things_that_exist(self):
        """A name above that is no more would let a sweep be counted for nothing."""
        newer = {"ManagedBuffer.__buffer__", "ManagedBuffer.__release_buffer__"}  # Python 3.12
        for operation in everything().values():
            for name in {*operation.covers.split()} - newer:
                thing = managedmem._managedmem
                for part in name.split("."):
                    thing = inspect.getattr_static(thing, part)


def test_a_context_that_was_made_current_is_taken_back_when_relaxing_fails():
    """In a thread without a context of its own, where each call brings one."""
    run_python("""
        from managedmem import CUDAError, ManagedMemoryResource, Stream, emulator
        from races import in_thread
        buffer, stream = ManagedMemoryResource().allocate(4096), Stream()
        depths = []

        def work():
            for use in (
                lambda: setattr(buffer, "read_mostly", True),
                lambda: buffer.copy_from(bytes(4096), stream=stream),
                lambda: ManagedMemoryResource().allocate(4096),
                stream.sync,
            ):
                emulator.fail("cuThreadExchangeStreamCaptureMode")
                try:
                    use()
                except CUDAError as error:
                    assert error.function == "cuThreadExchangeStreamCaptureMode", error
                    depths.append(emulator.live().context_depth)

        in_thread(work)
        assert depths == [0] * 4, depths
    """)
