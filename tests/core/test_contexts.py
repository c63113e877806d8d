"""Contexts that a user made with cuCtxCreate: what works in them, and what stays as it was."""

import contextlib
import ctypes
import gc
import textwrap
import threading

import pytest

import managedmem
from constants import EMULATED, MIB, PAGE
from contents import contents, pattern, write
from driver import capturing, checked, destroy_context, make_context, raw_driver
from live_memory import settle
from managedmem import (
    CUDAError,
    Device,
    DeviceMemoryResource,
    Host,
    ManagedBuffer,
    ManagedMemoryResource,
    PrefetchPlan,
    Stream,
)
from programs import run_python

THREAD_LOCAL = 1  # a capture mode that nobody sets by default
INVALID_CONTEXT, CONTEXT_IS_DESTROYED = 201, 709
BLOCKING = 0
ZERO = Device(0)


def current():
    context = ctypes.c_void_p()
    checked(raw_driver().cuCtxGetCurrent(ctypes.byref(context)))
    return context.value


def exchange_mode(mode):
    value = ctypes.c_int(mode)
    checked(raw_driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(value)))
    return value.value


@contextlib.contextmanager
def pushed(context):
    driver, popped = raw_driver(), ctypes.c_void_p()
    checked(driver.cuCtxPushCurrent_v2(context))
    try:
        yield
    finally:
        checked(driver.cuCtxPopCurrent_v2(ctypes.byref(popped)))
    assert popped.value == context.value


@contextlib.contextmanager
def unchanged():
    """The current context and the capture mode of the thread are the same afterwards."""
    before, mode = current(), exchange_mode(THREAD_LOCAL)
    try:
        yield
        assert exchange_mode(THREAD_LOCAL) == THREAD_LOCAL
        assert current() == before
    finally:
        exchange_mode(mode)


@pytest.fixture
def context():
    """A context of device 0 that is not its primary one, current in the test."""
    ZERO.set_current()
    before, new = current(), make_context()
    assert current() == new.value != before
    yield new
    gc.collect()
    settle()
    destroy_context(new)
    assert current() == before


@pytest.fixture
def raw_stream(context):
    """A blocking stream of that context, which the library did not make."""
    stream = ctypes.c_void_p()
    checked(raw_driver().cuStreamCreate(ctypes.byref(stream), BLOCKING))
    yield Stream.from_handle(stream.value)
    checked(raw_driver().cuStreamSynchronize(stream))
    checked(raw_driver().cuStreamDestroy_v2(stream))


def context_of(stream):
    context = ctypes.c_void_p()
    checked(raw_driver().cuStreamGetCtx(ctypes.c_void_p(stream.handle), ctypes.byref(context)))
    return context.value


def synchronized(buffer):
    checked(raw_driver().cuCtxSynchronize())
    return bytes(buffer)


class TestTheDriver:
    """cuCtxCreate and cuCtxDestroy, as the following tests use them."""

    def test_a_new_context_is_current_until_it_is_destroyed(self):
        before = current()
        context = make_context()
        assert current() == context.value
        destroy_context(context)
        assert current() == before

    def test_a_device_that_does_not_exist(self):
        context, before = ctypes.c_void_p(), current()
        assert raw_driver().cuCtxCreate_v2(ctypes.byref(context), 0, 1000) == 101
        assert current() == before

    def test_a_primary_context_is_not_destroyed(self):
        ZERO.set_current()
        assert raw_driver().cuCtxDestroy_v2(ctypes.c_void_p(current())) == INVALID_CONTEXT

    def test_its_streams_are_of_it(self, context, raw_stream):
        assert context_of(raw_stream) == context.value

    @pytest.mark.emulator_only
    def test_is_counted_until_it_is_destroyed(self):
        before = managedmem.emulator.live()
        context = make_context()
        stream = ctypes.c_void_p()
        checked(raw_driver().cuStreamCreate(ctypes.byref(stream), BLOCKING))
        pointer = ctypes.c_uint64()
        checked(raw_driver().cuMemAllocManaged(ctypes.byref(pointer), ctypes.c_size_t(PAGE), 1))
        assert managedmem.emulator.live().contexts == before.contexts + 1
        destroy_context(context)
        assert managedmem.emulator.live() == before


def prefetch_with_a_plan(buffer):
    PrefetchPlan([(buffer, ZERO), (buffer, Host())]).execute()


def copy_and_drop(buffer):
    assert synchronized(buffer.copy_to()) == synchronized(buffer)


def read_advice(buffer):
    assert buffer.preferred_location in (None, ZERO)
    assert buffer.last_prefetch_location in (None, ZERO, Host())


def use_a_managed_pool(_):
    with ManagedMemoryResource(pooled=True) as pool, pool.allocate(MIB) as block:
        block.fill(5)
        assert set(synchronized(block)) == {5}


def use_device_memory(buffer):
    with DeviceMemoryResource(0) as pool, pool.allocate(buffer.size) as block:
        block.copy_from(buffer)
        block.copy_to(buffer)
        checked(raw_driver().cuCtxSynchronize())


def drop_an_allocation(_):
    managedmem.empty(PAGE)
    gc.collect()


def wrap(buffer):
    part = ManagedBuffer.from_handle(buffer.handle, buffer.size, owner=buffer)
    part.read_mostly = True
    part.read_mostly = False


OPERATIONS = {
    "allocate": lambda buffer: managedmem.empty(MIB).close(),
    "allocate and drop": drop_an_allocation,
    "a managed pool": use_a_managed_pool,
    "device memory": use_device_memory,
    "read_mostly": lambda buffer: setattr(buffer, "read_mostly", True),
    "preferred_location": lambda buffer: setattr(buffer, "preferred_location", ZERO),
    "accessed_by": lambda buffer: setattr(buffer, "accessed_by", [ZERO, Host()]),
    "read advice": read_advice,
    "wrap": wrap,
    "page_runs": lambda buffer: buffer.page_runs(),
    "residency": lambda buffer: managedmem.residency([buffer, buffer[:PAGE]]),
    "prefetch": lambda buffer: buffer.prefetch(ZERO),
    "prefetch to the host": lambda buffer: buffer.prefetch(Host()),
    "deferred prefetch": lambda buffer: buffer.prefetch(ZERO, defer=True),
    "prefetch in a batch": lambda buffer: managedmem.prefetch(
        [buffer[:PAGE], buffer[PAGE:]], ZERO, dispatch="batch"
    ),
    "prefetch with a plan": prefetch_with_a_plan,
    "discard": lambda buffer: buffer.discard(),
    "discard_prefetch": lambda buffer: buffer.discard_prefetch(ZERO),
    "fill": lambda buffer: buffer.fill(3),
    "copy": copy_and_drop,
    "the current device": lambda buffer: Device(),
    "Device.sync": lambda buffer: ZERO.sync(),
    "memory_info": lambda buffer: ZERO.memory_info,
    "a stream": lambda buffer: Stream().close(),
    "wait for a stream": lambda buffer: Stream.from_handle(0).sync(),
    "numpy": lambda buffer: buffer.numpy(),
}


class TestOperations:
    @pytest.mark.parametrize("of_the_primary_context", [False, True])
    @pytest.mark.parametrize("name", OPERATIONS)
    def test_works_and_leaves_the_thread_as_it_was(
        self, name, of_the_primary_context, buf, context
    ):
        if name == "numpy":
            pytest.importorskip("numpy")
        with managedmem.empty(MIB) as own:
            write(own, 1)
            with unchanged():
                OPERATIONS[name](buf if of_the_primary_context else own)
            checked(raw_driver().cuCtxSynchronize())

    def test_what_was_copied_and_filled_arrives(self, context, raw_stream):
        with managedmem.empty(MIB) as buffer, managedmem.empty(MIB) as other:
            write(buffer, pattern(MIB))
            with unchanged():
                buffer.prefetch(ZERO, stream=raw_stream)
                other.copy_from(buffer, stream=raw_stream)
                other[PAGE : 2 * PAGE].fill(9, stream=raw_stream)
                raw_stream.sync()
            data = pattern(MIB)
            assert bytes(other) == data[:PAGE] + bytes([9]) * PAGE + data[2 * PAGE :]

    def test_a_stream_of_it_is_used_in_the_primary_context(self, buf, context, raw_stream):
        """The driver wants the context of the stream for events and for pools."""
        popped = ctypes.c_void_p()
        checked(raw_driver().cuCtxPopCurrent_v2(ctypes.byref(popped)))
        try:
            with unchanged(), ManagedMemoryResource(pooled=True) as pool:
                block = pool.allocate(MIB, stream=raw_stream)
                buf.fill(7, stream=raw_stream)
                block.copy_from(buf, stream=raw_stream)
                block.prefetch(Host(), stream=raw_stream)
                raw_stream.sync()
                assert bytes(block[:3]) == b"\7\7\7"
                block.close()
                raw_stream.sync()
        finally:
            checked(raw_driver().cuCtxPushCurrent_v2(popped))

    def test_our_streams_are_of_the_current_context(self, context):
        with Stream() as stream:
            assert context_of(stream) == context.value


class TestDevices:
    def test_the_current_device_is_that_of_the_context(self, context):
        assert Device() == ZERO

    def test_of_another_device(self, device1):
        ZERO.set_current()
        context = make_context(1)
        try:
            with unchanged():
                assert Device() == device1
                managedmem.empty(PAGE).prefetch(device1)
                device1.sync()
        finally:
            destroy_context(context)
        assert Device() == ZERO

    def test_set_current_takes_the_primary_context(self, context):
        """As cudaSetDevice does: it replaces the context on the top of the stack."""
        ZERO.set_current()
        assert current() != context.value
        checked(raw_driver().cuCtxSetCurrent(context))
        assert Device() == ZERO


PREFETCHES = (
    "buf.prefetch(late)",
    "buf.prefetch(late, stream=stream, defer=True)",
    "managedmem.prefetch([buf[:n], buf[n:]], late)",
    "managedmem.prefetch([buf[:n], buf[n:]], late, stream=stream, dispatch='loop')",
    "managedmem.prefetch([buf[:n], buf[n:]], [Device(0), late], dispatch='batch')",
    "managedmem.prefetch(buf, late, unsupported='skip')",
    "managedmem.PrefetchPlan([(buf, late)]).execute(stream=stream)",
    "buf.discard_prefetch(late)",
)


class TestDestinations:
    """Drivers accept prefetches to devices without a context, and move nothing."""

    PROGRAM = """
        import ctypes
        import managedmem
        from driver import raw_driver
        from managedmem import Device, Stream

        buf, n = managedmem.empty(1 << 20), 1 << 19
        memoryview(buf)[:] = b"1" * buf.size
        late, stream = Device(1), Stream()

        def has_primary_context():
            flags, active = ctypes.c_uint(), ctypes.c_int()
            state = raw_driver().cuDevicePrimaryCtxGetState(
                1, ctypes.byref(flags), ctypes.byref(active)
            )
            assert state == 0
            return active.value == 1

        assert not has_primary_context()
        """

    def run(self, code):
        driver = "emulator" if EMULATED else "cuda"
        run_python(textwrap.dedent(self.PROGRAM) + textwrap.dedent(code), driver=driver)

    @pytest.mark.parametrize("call", PREFETCHES)
    def test_they_get_their_primary_context(self, device1, call):
        self.run(f"""
            {call}
            Device(0).sync()
            late.sync()
            assert has_primary_context()
            assert buf.residency().on_host == 0
            if managedmem.emulator.is_active():
                assert managedmem.emulator.residency(buf[n:]) == late
        """)

    def test_the_driver_ignores_a_prefetch_to_one(self, device1):
        self.run("""
            Device(0).set_current()
            assert raw_driver().cuMemPrefetchAsync(
                ctypes.c_uint64(buf.handle), ctypes.c_size_t(buf.size), 1, None
            ) == 0
            Device(0).sync()
            assert buf.last_prefetch_location == late
            assert buf.residency().on_host == buf.size
        """)

    def test_a_current_context_of_the_program_is_enough(self, device1):
        self.run("""
            context = ctypes.c_void_p()
            assert raw_driver().cuCtxCreate_v2(ctypes.byref(context), 0, 1) == 0
            buf.prefetch(late, stream=stream)
            stream.sync()
            assert not has_primary_context()
            assert buf.residency().on_host == 0
        """)

    def test_others_get_none(self, device1):
        self.run("""
            buf.prefetch(Device(0))
            managedmem.prefetch([buf[:n], buf[n:]], managedmem.Host())
            buf.discard()
            Device(0).sync()
            assert not has_primary_context()
        """)


USES = {
    "prefetch": lambda buffer: buffer.prefetch(ZERO),
    "prefetch on 0": lambda buffer: buffer.prefetch(ZERO, stream=0),
    "deferred prefetch": lambda buffer: buffer.prefetch(ZERO, defer=True),
    "discard": lambda buffer: buffer.discard(),
    "discard_prefetch": lambda buffer: buffer.discard_prefetch(ZERO),
}


class TestTheLegacyStream:
    """Each context has one of its own, which waits for its blocking streams only."""

    @pytest.mark.parametrize("name", USES)
    def test_is_that_of_the_current_context(self, name, context, raw_stream):
        with managedmem.empty(MIB) as buffer:
            with capturing(raw_stream) as capture:
                with unchanged(), pytest.raises(RuntimeError, match="captur"):
                    USES[name](buffer)
            assert capture.result == 0

    @pytest.mark.parametrize("name", USES)
    def test_a_capture_in_the_primary_context_is_another_matter(self, name, context):
        popped, stream = ctypes.c_void_p(), ctypes.c_void_p()
        driver = raw_driver()
        checked(driver.cuCtxPopCurrent_v2(ctypes.byref(popped)))
        checked(driver.cuStreamCreate(ctypes.byref(stream), BLOCKING))
        checked(driver.cuCtxPushCurrent_v2(popped))
        with managedmem.empty(MIB) as buffer:
            with capturing(Stream.from_handle(stream.value)) as capture, unchanged():
                USES[name](buffer)
            assert capture.result == 0
        checked(driver.cuStreamDestroy_v2(stream))

    def test_a_deferred_prefetch_is_in_its_order(self, context):
        """What the default stream writes before and after it is there."""
        with managedmem.empty(MIB) as buffer:
            buffer.fill(1)
            with unchanged():
                buffer.prefetch(ZERO, defer=True)
            buffer[:PAGE].fill(2)
            data = synchronized(buffer)
        assert data == bytes([2]) * PAGE + bytes([1]) * (MIB - PAGE)

    @pytest.mark.emulator_only
    def test_a_stand_in_does_not_stay(self, context):
        """The context may end at any time, and what the library would keep with it."""
        emulator = managedmem.emulator
        with managedmem.empty(MIB) as buffer:
            before = emulator.live().streams
            with emulator.recording() as calls:
                buffer.discard()
            assert "cuStreamDestroy" in [call.name for call in calls]
            assert emulator.live().streams == before

    @pytest.mark.parametrize(
        "pool", [lambda: ManagedMemoryResource(pooled=True), lambda: DeviceMemoryResource(0)]
    )
    def test_of_a_pool(self, pool, context, raw_stream):
        """Blocks come and go in the order of the default stream that the caller's work is in."""
        with pool() as resource, resource.allocate(MIB) as block:
            with capturing(raw_stream) as capture:
                with unchanged(), pytest.raises(RuntimeError, match="captur"):
                    resource.allocate(MIB)
            assert capture.result == 0
            assert not block.is_closed

    @pytest.mark.emulator_only
    def test_a_free_of_a_pool_waits_for_it(self, context):
        """Work of the default stream of this context uses the block until it has run."""
        managedmem.emulator.schedule("lazy")
        with ManagedMemoryResource(pooled=True) as pool:
            before = managedmem.emulator.live().allocations
            block = pool.allocate(MIB)
            block.fill(1)
            block.close()
            managedmem.emulator.schedule("lazy")
            assert managedmem.emulator.live().allocations == before + 1
            checked(raw_driver().cuCtxSynchronize())
            assert managedmem.emulator.live().allocations == before


class TestDestroyed:
    """CUDA frees what was allocated in a context with it: the buffer must not be used any more."""

    def test_a_buffer_of_it_can_still_be_closed(self):
        context = make_context()
        buffer = managedmem.empty(MIB)
        destroy_context(context)
        with unchanged(), contextlib.suppress(CUDAError):
            buffer.close()
        assert buffer.is_closed
        buffer.close()

    def test_a_buffer_of_it_can_be_dropped(self):
        context = make_context()
        buffer = managedmem.empty(MIB)
        destroy_context(context)
        with unchanged():
            del buffer
            gc.collect()

    def test_buffers_of_others_stay(self, buf):
        write(buf, 4)
        context = make_context()
        buf.prefetch(ZERO)
        buf.read_mostly = True
        destroy_context(context)
        with unchanged():
            assert contents(buf) == bytes([4]) * MIB
            assert buf.read_mostly
            buf.prefetch(ZERO)
            buf.discard()

    def test_memory_of_pools_stays(self):
        """A pool belongs to a device."""
        with ManagedMemoryResource(pooled=True) as pool:
            context = make_context()
            block = pool.allocate(MIB)
            write(block, 6)
            destroy_context(context)
            with unchanged():
                block.prefetch(ZERO)
                ZERO.sync()
                assert set(bytes(block)) == {6}
                block.close()
                ZERO.sync()

    def test_the_library_works_in_the_next_one(self):
        """Nothing of the first is left in use, whatever was called in it."""
        for _ in range(3):
            context = make_context()
            with managedmem.empty(MIB) as buffer:
                buffer.fill(8)
                buffer.prefetch(ZERO, defer=True)
                buffer[:PAGE].discard()
                assert set(synchronized(buffer[PAGE:])) == {8}
            destroy_context(context)

    def test_a_thread_in_which_it_is_current(self, buf):
        """Calls there say that it is destroyed."""
        context, errors, made, gone = make_context(), [], threading.Event(), threading.Event()

        def other():
            checked(raw_driver().cuCtxSetCurrent(context))
            made.set()
            gone.wait(20)
            try:
                managedmem.empty(PAGE)
            except CUDAError as error:
                errors.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        made.wait(20)
        destroy_context(context)
        gone.set()
        thread.join()
        assert [error.code for error in errors] == [CONTEXT_IS_DESTROYED]

    def test_a_stream_of_it(self, buf):
        """A call with it is refused, because a driver would crash; close() needs no call."""
        context = make_context()
        stream = Stream()
        destroy_context(context)
        for call in (stream.sync, stream.query, lambda: buf.prefetch(ZERO, stream=stream)):
            with unchanged(), pytest.raises(CUDAError, match="make another Stream") as error:
                call()
            assert error.value.code == CONTEXT_IS_DESTROYED
        stream.close()
        assert stream.is_closed

    def test_a_stream_of_it_in_a_trace(self):
        """A trace looks for captures in all streams that live."""
        context = make_context()
        stream = Stream()
        destroy_context(context)
        with managedmem.trace() as trace:
            trace.mark("a part")
        assert trace.complete
        del stream

    def test_a_stream_of_it_can_be_dropped(self):
        """The next context often has the handle of the last one."""
        for _ in range(3):
            context = make_context()
            stream = Stream()
            destroy_context(context)
            other = make_context()
            with unchanged():
                del stream
                gc.collect()
            destroy_context(other)

    @pytest.mark.parametrize("kind", ["WorkingSet", "ManagedWorkingSet"])
    def test_a_stream_of_it_in_a_working_set(self, alloc, kind):
        """The ends of uses are events, which end with the context too."""
        buffers = [alloc(MIB) for _ in range(3)]
        for number, buffer in enumerate(buffers):
            write(buffer, number)
        with getattr(managedmem, kind)(MIB, ZERO) as working:
            groups = [working.add(buffer) for buffer in buffers]
            for _ in range(2):
                context = make_context()
                stream = Stream()
                for group in groups:
                    with group.use(stream=stream):
                        pass
                destroy_context(context)
                with groups[0].use():
                    pass
            context = make_context()
            stream = Stream()
            with pytest.raises(CUDAError, match="Stream"), groups[1].use(stream=stream):
                destroy_context(context)
            gc.collect()
            for number, group in enumerate(groups):
                with group.use() as use, group.use_on_host() as home:
                    assert use.is_resident
                    assert set(bytes(home[0] if kind == "WorkingSet" else home)) == {number}
                del use
                working.remove(group)
            assert working.stats().failures == 0

    @pytest.mark.parametrize("kind", ["WorkingSet", "ManagedWorkingSet"])
    def test_a_stream_of_it_at_the_end_of_a_use(self, alloc, kind):
        """The call raises, and the use goes on; it can end on another stream, or be lost."""
        with getattr(managedmem, kind)(2 * MIB, ZERO) as working:
            groups = [working.add(alloc(MIB), "write") for _ in range(2)]
            context = make_context()
            stream = Stream()
            use, lost = (group.use(stream=stream) for group in groups)
            late = lost.arrays
            destroy_context(context)
            for each in (use, lost):
                with pytest.raises(CUDAError, match="Stream"):
                    each.close()
            use.close(stream=Stream.from_handle(0))
            del each, lost
            del late
            gc.collect()
            for group in groups:
                working.remove(group)

    @pytest.mark.parametrize("end", ["close", "drop", "close on another stream"])
    def test_memory_of_a_pool_in_its_order(self, end):
        """The order of the free ended with the stream, and all work before it."""
        with ManagedMemoryResource(pooled=True) as pool:
            context = make_context()
            block = pool.allocate(MIB, stream=Stream())
            destroy_context(context)
            with unchanged():
                if end == "drop":
                    del block
                    gc.collect()
                else:
                    block.close(Stream() if end != "close" else None)
                ZERO.sync()
            assert pool.attributes.used_mem_current == 0
