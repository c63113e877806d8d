"""Memory from driver pools: when it is freed, in captures, threads and forked processes as well."""

import ctypes
import gc
import time
import weakref

import pytest

import c_heap
import managedmem
from calls import names
from constants import EMULATED, PAGE
from contents import contents
from dlpack import consume, run_deleter
from driver import CAPTURE_GLOBAL, CAPTURE_RELAXED, capturing, raw_driver
from foreign_objects import ProtocolStream
from live_memory import settle
from managedmem import Device, DeviceMemoryResource, ManagedMemoryResource, Stream, emulator
from pools import needs_pools, read
from programs import run_python
from threads import at_once

pytestmark = needs_pools


class TestClosing:
    def test_nothing_is_allocated_any_more(self, pool):
        pool.close()
        assert pool.close() is None
        assert pool.is_closed is True
        for use in (
            lambda: pool.allocate(PAGE),
            pool.trim,
            pool.__enter__,
            lambda: pool.attributes,
        ):
            with pytest.raises(RuntimeError, match="closed"):
                use()
        assert repr(pool)

    def test_without_a_pool_too(self):
        resource = ManagedMemoryResource()
        assert resource.is_closed is False
        resource.close()
        with pytest.raises(RuntimeError, match="closed"):
            resource.allocate(PAGE)

    def test_live_buffers_stay_as_they_are(self, pool):
        buffer = pool.allocate(PAGE)
        buffer.fill(4)
        pool.close()
        assert read(buffer) == b"\x04" * PAGE
        with pytest.raises(RuntimeError, match="closed"):
            buffer.copy_to()
        buffer.close()

    @pytest.mark.emulator_only
    def test_the_last_buffer_takes_the_pool_with_it(self, pool, eager):
        pools = emulator.live().pools
        buffers = [pool.allocate(PAGE) for _ in range(3)]
        pool.close()
        for buffer in buffers:
            assert emulator.live().pools == pools
            buffer.close()
        assert emulator.live().pools == pools - 1

    @pytest.mark.emulator_only
    def test_a_forgotten_resource_lives_in_its_buffers(self, eager):
        pools = emulator.live().pools
        buffer = DeviceMemoryResource(0).allocate(PAGE)
        gc.collect()
        assert emulator.live().pools == pools + 1
        assert buffer.memory_resource.device_id == 0
        part = buffer[0:16]
        del buffer
        part.fill(1)
        del part
        gc.collect()
        assert emulator.live().pools == pools

    def test_a_block_ends_it(self):
        with DeviceMemoryResource(0) as pool:
            assert pool.is_closed is False
        assert pool.is_closed is True

    def test_deallocate_by_address(self, pool, stream):
        buffer = pool.allocate(PAGE)
        copy = managedmem.ManagedBuffer.from_handle(buffer.handle, PAGE, mr=pool)
        Device(0).sync()
        copy.close(stream)
        # The memory is gone, so the driver refuses to free it again.
        with pytest.raises(managedmem.CUDAError):
            buffer.close()

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("function", ["cuMemFreeAsync", "cuMemPoolDestroy"])
    def test_a_failure_is_reported_once(self, pool, function):
        closing = pool.allocate(PAGE) if function == "cuMemFreeAsync" else pool
        emulator.fail(function, code=719, after=True)
        with pytest.raises(managedmem.CUDAError) as caught:
            closing.close()
        assert caught.value.function == function
        assert closing.is_closed
        assert closing.close() is None

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("after", [False, True])
    def test_a_failing_destroy_is_not_tried_again(self, after):
        """It may have acted, and its handle may belong to another pool by then."""
        pool = DeviceMemoryResource(0)
        emulator.fail("cuMemPoolDestroy", code=719, after=after)
        with emulator.recording() as calls:
            with pytest.raises(managedmem.CUDAError):
                pool.close()
            Device(0).sync()
            DeviceMemoryResource(0).close()
        destroyed = [c.args["pool"] for c in calls if c.name == "cuMemPoolDestroy"]
        assert len(destroyed) == 2
        if not after:
            raw_driver().cuMemPoolDestroy(ctypes.c_void_p(destroyed[0]))  # what is lost here

    @pytest.mark.emulator_only
    def test_by_the_last_buffer_as_well(self, pool, eager):
        buffer = pool.allocate(PAGE)
        pool.close()
        emulator.fail("cuMemPoolDestroy", code=719, after=True)
        with pytest.raises(managedmem.CUDAError):
            buffer.close()
        assert buffer.is_closed


@pytest.mark.emulator_only
class TestOrderOfFrees:
    """A free comes after the work of the stream that the memory was allocated on."""

    def freed_on(self, action):
        with emulator.recording() as calls:
            action()
            gc.collect()
        return [c.args["stream"] for c in calls if c.name == "cuMemFreeAsync"]

    def test_of_the_stream_it_was_allocated_on(self, pool, stream):
        assert self.freed_on(lambda: pool.allocate(PAGE, stream=stream)) == [stream.handle]
        assert self.freed_on(pool.allocate(PAGE, stream=stream).close) == [stream.handle]

    def test_of_the_stream_it_is_closed_on(self, pool, stream):
        buffer = pool.allocate(PAGE)
        assert self.freed_on(lambda: buffer.close(stream)) == [stream.handle]

    @pytest.mark.parametrize("default", [None, 1, 2])
    def test_of_the_default_stream(self, pool, default):
        assert self.freed_on(lambda: pool.allocate(PAGE, stream=default)) == [0]

    def test_a_closed_stream_lives_on_in_its_memory(self, pool):
        streams = emulator.live().streams
        with Stream() as stream:
            handle = stream.handle
            buffer = pool.allocate(PAGE, stream=stream)
        assert stream.is_closed
        assert emulator.live().streams == streams + 1
        assert self.freed_on(buffer.close) == [handle]
        assert emulator.live().streams == streams

    def test_a_foreign_stream_is_kept(self, pool, stream):
        foreign = ProtocolStream(stream.handle)
        gone = weakref.ref(foreign)
        buffer = pool.allocate(PAGE, stream=foreign)
        tensor = consume(buffer[0:16].__dlpack__())
        del foreign, buffer
        gc.collect()
        assert gone() is not None
        assert self.freed_on(lambda: run_deleter(tensor)) == [stream.handle]
        gc.collect()
        assert gone() is None

    def test_queued_work_is_done_before_the_memory_is_gone(self, pool, stream):
        emulator.schedule("lazy")
        buffer = pool.allocate(PAGE, stream=stream)
        buffer.fill(6, stream=stream)
        with ManagedMemoryResource().allocate(PAGE) as target:
            buffer.copy_to(target, stream=stream)
            buffer.close(stream)
            stream.sync()
            assert contents(target) == b"\x06" * PAGE


class TestCapture:
    @pytest.mark.parametrize("mode", [CAPTURE_GLOBAL, CAPTURE_RELAXED])
    def test_allocating_and_freeing_there_is_refused(self, pool, stream, mode):
        buffer = pool.allocate(PAGE, stream=stream)
        with capturing(stream, mode) as capture:
            for use in (lambda: pool.allocate(PAGE, stream=stream), buffer.close):
                with pytest.raises(managedmem.CUDAError, match="captures a CUDA graph") as caught:
                    use()
                assert caught.value.code == 900
            assert not buffer.is_closed
            with pytest.raises(managedmem.CUDAError, match="captures a CUDA graph"):
                pool.deallocate(buffer.handle, PAGE, stream=stream)
        assert capture.result == 0
        buffer.close()

    def test_another_stream_is_fine(self, pool, stream):
        with capturing(stream, CAPTURE_GLOBAL) as capture, Stream() as other:
            buffer = pool.allocate(PAGE, stream=other)
            buffer.close()
            pool.allocate(PAGE).close()
            pool.trim()
            pool.attributes.release_threshold = pool.attributes.reserved_mem_high
            with DeviceMemoryResource(0) as own:
                assert own.peer_accessible_by == set()
        assert capture.result == 0

    @pytest.mark.emulator_only
    def test_a_dropped_buffer_waits_for_the_end_of_the_capture(self, pool, stream, eager):
        buffer = pool.allocate(PAGE, stream=stream)
        start, live = buffer.handle, emulator.live().allocations
        with capturing(stream, CAPTURE_GLOBAL) as capture:
            del buffer
            gc.collect()
            pool.allocate(PAGE).close()
            assert emulator.live().allocations == live
        assert capture.result == 0
        with emulator.recording() as calls:
            pool.allocate(PAGE).close()
        first = next(call for call in calls if call.name == "cuMemFreeAsync")
        assert (first.args["ptr"], first.args["stream"]) == (start, stream.handle)
        assert emulator.live().allocations == live - 1

    @pytest.mark.emulator_only
    def test_such_a_buffer_on_a_foreign_stream_waits_for_an_allocation_there(self, pool, stream):
        buffer = pool.allocate(PAGE, stream=stream.handle)
        live = emulator.live().allocations
        with capturing(stream, CAPTURE_GLOBAL) as capture:
            del buffer
            gc.collect()
        assert capture.result == 0
        pool.allocate(PAGE).close()
        assert raw_driver().cuCtxSynchronize() == 0  # settle() would free the buffer
        assert emulator.live().allocations == live, "freed in another stream's order"
        pool.allocate(PAGE, stream=stream.handle).close()
        settle()
        assert emulator.live().allocations == live - 1

    @pytest.mark.emulator_only
    def test_a_dropped_buffer_waits_for_the_end_of_the_pool(self, pool, stream):
        live = emulator.live()
        buffer = pool.allocate(PAGE, stream=stream)
        with capturing(stream, CAPTURE_GLOBAL) as capture:
            del buffer
            pool.close()
        assert capture.result == 0
        assert emulator.live().pools == live.pools
        Device(0).sync()
        settle()  # the free, which the first wait queued
        assert emulator.live().allocations == live.allocations
        assert emulator.live().pools == live.pools - 1

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("ended", [False, True])
    def test_such_a_buffer_on_a_foreign_stream_waits_for_idle_devices(self, pool, ended):
        """The handle of a stream object that is gone must not reach the driver."""
        live = emulator.live()
        stream = Stream()
        buffer = pool.allocate(PAGE, stream=stream.handle)
        with capturing(stream, CAPTURE_GLOBAL) as capture:
            del buffer
            if ended:
                pool.close()
        assert capture.result == 0
        stream.close()
        pool.close()
        with emulator.recording() as calls:
            assert emulator.live().pools == live.pools
            for device in Device.all():
                device.sync()
        assert [c.args["stream"] for c in calls if c.name == "cuMemFreeAsync"] == [0]
        settle()  # the free, which the first wait queued
        assert emulator.live().allocations == live.allocations
        assert emulator.live().pools == live.pools - 1


@pytest.fixture
def lazy():
    emulator.schedule("lazy")


END_BEHIND_QUEUED_FREES = """
    import managedmem as mm
    from managedmem import Device, Host

    held = []
    for make in (
        lambda: mm.ManagedMemoryResource(pooled=True, preferred_location=Host()),
        lambda: mm.ManagedMemoryResource(pooled=True),
        lambda: mm.DeviceMemoryResource(0),
    ):
        for _ in range(6):
            with make() as pool:
                last = pool.allocate(4096)
            last.fill(1)
            last.close()
            # What the driver frees too early is used by others.
            held += [bytes([0xA5]) * (16 + 7919 * i % 3000) for i in range(3000)]
        Device(0).sync()
    for _ in range(4):
        with mm.DeviceMemoryResource(0) as pool, pool.allocate(1 << 18) as buffer:
            Device(0).sync()
        Device(0).sync()
    print("through")
"""


class TestEndBehindQueuedFrees:
    """Driver 580 crashes or hangs after a pool was destroyed behind a queued free."""

    def test_pools_end_and_others_go_on(self):
        """On a GPU this crashed or hung, so it runs in a process of its own."""
        driver = "emulator" if EMULATED else "cuda"
        assert run_python(END_BEHIND_QUEUED_FREES, driver=driver).stdout.split() == ["through"]

    @pytest.mark.emulator_only
    def test_the_pool_waits_for_its_last_free(self, pool, lazy):
        pools = emulator.live().pools
        buffer = pool.allocate(PAGE)
        buffer.fill(1)
        pool.close()
        with emulator.recording() as calls:
            buffer.close()
        assert "cuMemPoolDestroy" not in names(calls)
        assert not {"cuCtxSynchronize", "cuStreamSynchronize"} & set(names(calls))
        assert emulator.live().pools == pools
        Device(0).sync()
        assert emulator.live().pools == pools - 1

    @pytest.mark.emulator_only
    def test_of_every_stream(self, pool, lazy):
        pools = emulator.live().pools
        with Stream() as one, Stream() as two:
            for stream in (one, two):
                pool.allocate(PAGE, stream=stream).close(stream)
            pool.close()
            one.sync()
            two.sync()
            assert emulator.live().pools == pools - 1

    @pytest.mark.emulator_only
    def test_of_a_stream_that_was_closed(self, pool, lazy):
        pools = emulator.live().pools
        with Stream() as short:
            buffer = pool.allocate(PAGE, stream=short)
        pool.close()
        buffer.close()
        Device(0).sync()
        assert emulator.live().pools == pools - 1

    @pytest.mark.emulator_only
    def test_pools_do_not_pile_up_without_a_wait(self, lazy):
        pools = emulator.live().pools
        for _ in range(50):
            with DeviceMemoryResource(0) as pool:
                pool.allocate(PAGE).close()
        assert emulator.live().pools - pools < 5

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("call", ["cuEventCreate", "cuEventRecord"])
    def test_a_free_without_an_event(self, pool, call):
        """The pool then ends when the driver reports that no memory is left in it."""
        live = emulator.live()
        buffer = pool.allocate(PAGE)
        emulator.fail(call, code=2)
        buffer.close()
        pool.close()
        assert emulator.live().pools == live.pools
        Device(0).sync()
        assert emulator.live().pools == live.pools - 1

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("call", ["cuMemPoolTrimTo", "cuMemPoolGetAttribute"])
    def test_a_failing_query_is_repeated(self, pool, call):
        live = emulator.live()
        buffer = pool.allocate(PAGE)
        emulator.fail("cuEventRecord", code=2)
        buffer.close()
        emulator.fail(call, code=719)
        with pytest.raises(managedmem.CUDAError, match=call):
            pool.close()
        assert pool.is_closed
        Device(0).sync()
        assert emulator.live().pools == live.pools - 1


class TestThreads:
    def test_closing_while_others_allocate(self, pool):
        """Each allocation works or says that the resource is closed; nothing else happens."""

        def work():
            try:
                for _ in range(1000):
                    buffer = pool.allocate(PAGE)
                    buffer.fill(1)
                    assert pool.attributes.used_mem_current >= PAGE
                    del buffer
            except RuntimeError as error:
                assert "closed" in str(error)

        def close():
            time.sleep(0.02)
            pool.close()

        at_once(close, *[work] * 4)

    def test_one_buffer_is_freed_once(self, pool, stream):
        for _ in range(50):
            buffer = pool.allocate(PAGE, stream=stream)
            at_once(*[lambda buffer=buffer: buffer.close(stream)] * 3)
            assert buffer.is_closed
        stream.sync()
        assert pool.attributes.used_mem_current == 0


class TestProcesses:
    @pytest.mark.parametrize(
        "make", ["ManagedMemoryResource(pooled=True)", "DeviceMemoryResource(0)"]
    )
    def test_a_forked_child_leaves_the_pool_alone(self, make):
        done = run_python(
            f"""
            import gc, os, warnings
            from managedmem import DeviceMemoryResource, ManagedMemoryResource, Stream
            from outcomes import refusal
            warnings.simplefilter("ignore", DeprecationWarning)  # of fork, with threads
            stream = Stream()
            pool = {make}
            buffer = pool.allocate(4096, stream=stream)
            numbers = pool.attributes
            pid = os.fork()
            if pid == 0:
                for use in (lambda: pool.allocate(1), lambda: numbers.used_mem_high, pool.trim,
                            lambda: buffer.fill(1)):
                    assert "fork" in refusal(RuntimeError, use)
                buffer.close(); pool.close(); stream.close()
                del buffer, numbers, pool, stream
                gc.collect()
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            buffer.fill(1); buffer.close(); pool.close()
            """,
            driver="emulator" if EMULATED else "cuda",
        )
        assert done.stderr == ""

    def test_the_end_of_the_process_is_quiet(self):
        done = run_python(
            """
            from managedmem import DeviceMemoryResource, ManagedMemoryResource, Stream
            stream = Stream()
            pools = [ManagedMemoryResource(pooled=True), DeviceMemoryResource(0)]
            kept = [pool.allocate(4096, stream=s) for pool in pools for s in (None, stream)]
            kept += [b[0:16] for b in kept] + [b.__dlpack__() for b in kept]
            """,
            driver="emulator" if EMULATED else "cuda",
        )
        assert done.stderr == ""


class TestDefaultStreamsOfTwoDevices:
    """A dropped buffer is freed in the order of the default stream of its own device."""

    @pytest.fixture
    def blocking(self, device1, current_device):
        """A stream of device 0 that its legacy stream waits for."""
        Device(0).set_current()
        handle = ctypes.c_void_p()
        assert raw_driver().cuStreamCreate(ctypes.byref(handle), 0) == 0
        yield Stream.from_handle(handle.value)
        assert raw_driver().cuStreamDestroy_v2(handle) == 0

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("current", [0, 1])
    def test_only_that_of_the_capturing_device_waits(self, blocking, device1, current):
        with DeviceMemoryResource(0) as first, DeviceMemoryResource(1) as second:
            buffers = {0: first.allocate(PAGE), 1: second.allocate(PAGE)}
            handles = {number: buffer.handle for number, buffer in buffers.items()}
            with capturing(blocking) as capture:
                Device(current).set_current()
                with emulator.recording() as calls:
                    buffers.clear()
                    gc.collect()
                freed = [c.args["ptr"] for c in calls if c.name == "cuMemFreeAsync"]
                assert freed == [handles[1]]
                Device(0).set_current()
            assert capture.result == 0
            with emulator.recording() as calls:
                first.allocate(PAGE).close()
            freed = [c.args["ptr"] for c in calls if c.name == "cuMemFreeAsync"]
            assert freed[0] == handles[0]
            assert len(freed) == 2
            assert second.attributes.used_mem_current == 0


@pytest.mark.skipif(not c_heap.reader(), reason="malloc() counts nothing")
def test_a_forked_child_frees_the_records_of_queued_frees(monkeypatch):
    """They are host memory; what the driver holds is the parent's."""
    monkeypatch.setenv("GLIBC_TUNABLES", c_heap.KEEP_NO_FREED_BLOCKS)
    done = run_python(
        """
        import gc, os, warnings
        import c_heap
        from managedmem import DeviceMemoryResource, Stream, emulator
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork, with threads
        emulator.schedule("lazy")

        in_use = c_heap.reader()
        streams = [Stream() for _ in range(15)]  # of more, a pool drops the records itself
        pools = [DeviceMemoryResource(0) for _ in range(100)]
        for pool in pools:
            for stream in streams:
                pool.allocate(4096, stream=stream).close()
        del pool
        pid = os.fork()
        if pid == 0:
            gc.collect()
            before = in_use()
            pools.clear()
            freed = before - in_use()
            print(freed, flush=True)
            os._exit(0 if freed >= 100 * 15 * 40 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        """
    )
    assert done.stderr == ""
