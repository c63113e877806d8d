"""Python code in a host function of a stream, where CUDA allows no driver calls: memory that is
dropped there is freed later, and refused calls raise."""

import contextlib
import functools
import gc
import os
import threading

import pytest

import managedmem
from constants import EMULATED, FREE_THREADED, MIB, PAGE
from contents import contents, write
from dlpack import consume, run_deleter
from host_functions import end_inside, run_inside
from live_memory import settle
from managedmem import (
    Device,
    DeviceMemoryResource,
    Host,
    ManagedMemoryResource,
    MigrationPolicy,
    Stream,
    emulator,
)
from presets import functions
from programs import run_python
from races import race

POOLS = managedmem._managedmem._driver_info()["version"] >= 13000
needs_pools = pytest.mark.skipif(not POOLS, reason="pools of managed memory need CUDA 13.0")


def last_in_a_cycle(buffer):
    """A list in a garbage cycle."""
    cycle = [buffer]
    cycle.append(cycle)
    return cycle


class Tensor:
    """A consumer of DLPack that deletes its tensor at its end."""

    def __init__(self, buffer):
        self.tensor = consume(buffer.__dlpack__())

    def __del__(self):
        run_deleter(self.tensor)


def closed_view(buffer):
    """A view that is closed and outlives the buffer, with a view that is the last to hold it."""
    view, last = buffer[:PAGE], buffer[PAGE:]
    view.close()
    return [view, last]


HOLDERS = {
    "buffer": lambda buffer: [buffer],
    "view": lambda buffer: [buffer[PAGE:]],
    "closed view and another": closed_view,
    "cycle": last_in_a_cycle,
    "tensor": lambda buffer: [Tensor(buffer)],
    "capsule": lambda buffer: [buffer.__dlpack__()],
    "memoryview": lambda buffer: [memoryview(buffer)],
}


def allocate_in_a_pool(stream):
    with ManagedMemoryResource(pooled=True) as pool:
        return pool.allocate(2 * PAGE, stream=stream)


MEMORY = {
    "managed": lambda stream: ManagedMemoryResource().allocate(2 * PAGE),
    "pool": allocate_in_a_pool,
    "pool on the default stream": lambda stream: allocate_in_a_pool(None),
    "pool on a stream of its own": lambda stream: allocate_in_a_pool(Stream()),
}
ALL_MEMORY = [
    name if name == "managed" else pytest.param(name, marks=needs_pools) for name in MEMORY
]


def count_live():
    """Allocations and streams that the emulated driver has; nothing on a GPU."""
    return (emulator.live().allocations, emulator.live().streams) if EMULATED else None


class TestDropping:
    @pytest.mark.parametrize("held_by", HOLDERS)
    @pytest.mark.parametrize("memory", ALL_MEMORY)
    def test_the_memory_is_freed_later(self, memory, held_by, stream):
        before = count_live()
        buffer = MEMORY[memory](stream)
        buffer.fill(1, stream=stream)
        stream.sync()
        box = [HOLDERS[held_by](buffer)]
        del buffer
        full = count_live()
        end_inside(box, stream)
        if not (FREE_THREADED and held_by == "capsule"):  # freed by this thread, outside of the end
            assert count_live() == full
        Device(0).sync()
        assert count_live() == before

    @pytest.mark.emulator_only
    @pytest.mark.parametrize(
        "chance",
        [
            lambda stream: ManagedMemoryResource().allocate(PAGE),
            lambda stream: ManagedMemoryResource(pooled=True).allocate(PAGE),
            lambda stream: DeviceMemoryResource(0),
            lambda stream: stream.sync(),
            lambda stream: Device(0).sync(),
        ],
        ids=["allocate", "allocate from a pool", "pool", "stream.sync", "device.sync"],
    )
    @pytest.mark.parametrize("memory", MEMORY)
    def test_is_freed_at_each_of_these_calls(self, memory, chance, stream):
        box = [MEMORY[memory](stream)]
        start = box[0].handle
        end_inside(box, stream)
        with emulator.recording() as calls:
            kept = chance(stream)
        freed = [c.args["ptr"] for c in calls if c.name in ("cuMemFree", "cuMemFreeAsync")]
        assert freed == [start]
        del kept

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("end", ["close", "drop"])
    def test_is_freed_at_the_end_of_another_buffer(self, end, stream):
        other = ManagedMemoryResource().allocate(PAGE)
        box = [ManagedMemoryResource().allocate(PAGE) for _ in range(3)]
        starts = {other.handle, *(buffer.handle for buffer in box)}
        end_inside(box, stream)
        with emulator.recording() as calls:
            if end == "close":
                other.close()
            del other
        assert {c.args["ptr"] for c in calls if c.name == "cuMemFree"} == starts

    @pytest.mark.emulator_only
    def test_a_refused_attempt_is_made_again(self, stream):
        """The next call can be one in a host function as well."""
        live = count_live()
        box = [ManagedMemoryResource().allocate(PAGE)]
        end_inside(box, stream)
        for _ in range(2):
            with pytest.raises(managedmem.CUDAError):
                run_inside(lambda: ManagedMemoryResource().allocate(PAGE), stream)
        assert count_live() != live
        stream.sync()
        assert count_live() == live

    @needs_pools
    def test_on_a_stream_of_another_library(self):
        """The stream may be gone, so its handle is used only where it is given again."""
        live = count_live()
        for again in (True, False):
            stream = Stream()
            with ManagedMemoryResource(pooled=True) as pool:
                box = [pool.allocate(PAGE, stream=stream.handle)]
                end_inside(box, stream)
                if again:
                    pool.allocate(PAGE, stream=stream.handle).close()
                stream.close()
            for device in Device.all():
                device.sync()
            assert count_live() == live

    @needs_pools
    def test_a_pool_goes_with_its_last_buffer(self, stream):
        pools = emulator.live().pools if EMULATED else None
        box = [DeviceMemoryResource(0)]
        box.append(box[0].allocate(PAGE, stream=stream))
        end_inside(box, stream)
        Device(0).sync()
        settle()  # the free, which the first wait queued
        assert not EMULATED or emulator.live().pools == pools

    @needs_pools
    def test_closing_a_pool(self, stream):
        pool = DeviceMemoryResource(0)
        run_inside(pool.close, stream)
        assert pool.is_closed
        Device(0).sync()

    @pytest.mark.parametrize("end", [Stream.close, lambda stream: None], ids=["close", "drop"])
    def test_a_stream(self, end, stream):
        live = count_live()
        box = [Stream()]

        def act():
            end(box.pop())

        run_inside(act, stream)
        stream.sync()
        assert count_live() == live

    def test_a_block_of_an_allocator(self, stream):
        live = count_live()
        allocate, free = functions()
        block = allocate(PAGE)
        run_inside(lambda: free(block), stream)
        free(allocate(PAGE))
        assert count_live() == live

    @pytest.mark.emulator_only
    def test_a_block_of_an_allocator_says_nothing(self, stream, capfd):
        allocate, free = functions()
        block = allocate(PAGE)
        run_inside(lambda: free(block), stream)
        stream.sync()
        assert capfd.readouterr().err == ""

    def test_while_other_threads_allocate(self, stream):
        live = count_live()
        over = threading.Event()

        def work():
            while not over.is_set():
                ManagedMemoryResource().allocate(PAGE).close()

        def drop():
            for _ in range(50):
                box = [ManagedMemoryResource().allocate(PAGE) for _ in range(4)]
                run_inside(box.clear, stream)
            over.set()

        race(drop, work, work, work)
        stream.sync()
        assert count_live() == live


def test_a_forked_child_frees_nothing_of_it():
    done = run_python(
        """
        import managedmem
        from managedmem import Device, ManagedMemoryResource, Stream
        from host_functions import end_inside
        from program_checks import in_child, refused
        stream, device = Stream(), Device(0)
        end_inside([ManagedMemoryResource().allocate(4096)], stream)

        def work():
            for call in (device.sync, stream.sync, lambda: ManagedMemoryResource().allocate(4096)):
                with refused(RuntimeError, "forked"):
                    call()

        assert in_child(work) == 0
        Device(0).sync()
        print("fine")
        """,
        driver=os.environ["MANAGEDMEM_DRIVER"],
    )
    assert done.stdout == "fine\n"


class TestClosing:
    @pytest.mark.parametrize("given", [False, True], ids=["", "on a stream"])
    @pytest.mark.parametrize("memory", ALL_MEMORY)
    def test_is_refused_and_leaves_the_buffer_open(self, memory, given, stream):
        live = count_live()
        buffer = MEMORY[memory](stream)
        buffer.fill(7, stream=stream)
        start = buffer.handle
        part = buffer[PAGE:]
        with pytest.raises(managedmem.CUDAError, match="inside a host function") as caught:
            run_inside(functools.partial(buffer.close, *[stream] * given), stream)
        assert caught.value.code == 800
        assert "after the stream has been synchronized" in str(caught.value)
        assert not buffer.is_closed
        assert (buffer.handle, buffer.memory_resource is None) == (start, False)
        assert contents(part) == b"\x07" * PAGE
        buffer.prefetch(Device(0), stream=stream)
        buffer.close()
        assert buffer.is_closed
        Device(0).sync()
        del part, buffer
        assert count_live() == live

    def test_again_and_then_dropped(self, stream):
        live = count_live()
        box = [ManagedMemoryResource().allocate(PAGE)]
        for _ in range(2):
            with pytest.raises(managedmem.CUDAError, match="inside a host function"):
                run_inside(box[0].close, stream)
        end_inside(box, stream)
        stream.sync()
        assert count_live() == live

    def test_a_stream_that_is_waited_for(self):
        """The wait ends after the host function, and closing would wait for the wait."""
        done = run_python(
            """
            import ctypes, faulthandler, threading, time
            import managedmem
            from constants import EMULATED
            from driver import raw_driver
            from managedmem import *
            stream, waiting, said = Stream(), threading.Event(), []
            if EMULATED:
                managedmem.emulator.schedule("lazy")

            @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
            def host_function(_):
                waiting.wait()
                time.sleep(0.2)
                try:
                    stream.close()
                except CUDAError as error:
                    said.append(error)

            def wait():
                waiting.set()
                stream.sync()

            handle = ctypes.c_void_p(stream.handle)
            assert raw_driver().cuLaunchHostFunc(handle, host_function, None) == 0
            faulthandler.dump_traceback_later(20, exit=True)
            thread = threading.Thread(target=wait)
            thread.start()
            thread.join()
            assert said[0].code == 800, said
            assert "may wait for the host function" in str(said[0])
            assert not stream.is_closed
            stream.close()
            print("fine")
            """,
            driver=os.environ["MANAGEDMEM_DRIVER"],
            check=False,
        )
        assert done.stdout == "fine\n", done.stderr

    def test_with_statement(self, stream):
        def use(buffer):
            with buffer:
                pass

        buffer = ManagedMemoryResource().allocate(PAGE)
        with pytest.raises(managedmem.CUDAError, match="inside a host function"):
            run_inside(lambda: use(buffer), stream)
        assert not buffer.is_closed
        buffer.close()

    def test_memory_that_is_wrapped(self, stream, buf):
        """It frees nothing, so nothing is refused."""
        wrapped = managedmem.ManagedBuffer.from_handle(buf.handle, buf.size, owner=buf)
        run_inside(wrapped.close, stream)
        assert wrapped.is_closed

    def test_memory_that_goes_back_to_a_resource(self, stream):
        resource = ManagedMemoryResource()
        lent = resource.allocate(PAGE)
        start = lent.handle

        class Lender:
            def deallocate(self, ptr, size, *, stream):
                lent.close()

        buffer = managedmem.ManagedBuffer.from_handle(start, PAGE, mr=Lender())
        with pytest.raises(managedmem.CUDAError, match="inside a host function"):
            run_inside(buffer.close, stream)
        assert not buffer.is_closed
        buffer.close()
        assert lent.is_closed


class TestCalls:
    @pytest.mark.parametrize(
        "call",
        [
            lambda buffer, stream: ManagedMemoryResource().allocate(PAGE),
            lambda buffer, stream: setattr(buffer, "read_mostly", True),
            lambda buffer, stream: buffer.accessed_by.add(Host()),
            lambda buffer, stream: Device(0).sync(),
        ],
        ids=["allocate", "advise", "accessed_by", "sync"],
    )
    @pytest.mark.emulator_only
    def test_a_refused_one_says_what_to_do(self, call, buf, stream):
        with pytest.raises(managedmem.CUDAError, match=r"inside a host function.*another thread"):
            run_inside(lambda: call(buf, stream), stream)

    def test_a_prefetch_on_a_stream_works(self, buf, stream):
        """Seen on an H100 with driver 580."""
        with Stream() as other:
            run_inside(lambda: buf.prefetch(Device(0), stream=other), stream)
            other.sync()
        assert buf.last_prefetch_location is Device(0)

    def test_those_without_the_driver_work(self, buf, stream):
        write(buf, 3)
        with memoryview(buf) as bytes_of_it:
            seen = run_inside(
                lambda: (buf.size, buf[PAGE:].shape, bytes_of_it[PAGE], Host(numa_id=1)), stream
            )
        assert seen == (buf.size, (buf.size - PAGE,), 3, Host(numa_id=1))

    @pytest.mark.parametrize("end", ["exit", "drop"])
    def test_a_policy_is_put_back_or_an_error(self, end, buf, stream):
        """No hang and no crash; the policy can be restored afterwards."""
        applied = MigrationPolicy(read_mostly=True).applied(buf)
        applied.__enter__()
        assert buf.read_mostly is True
        box = [applied]
        if end == "drop":
            del applied
            end_inside(box, stream)
            buf.read_mostly = False
        else:
            try:
                run_inside(lambda: applied.__exit__(None, None, None), stream)
                assert not EMULATED, "the emulated driver allows it"
            except managedmem.CUDAError as error:
                assert error.code == 800
                assert buf.read_mostly is True
                applied.__exit__(None, None, None)
        assert buf.read_mostly is False


SET_CALLS = {
    "add": lambda working, groups, use, more: working.add(more),
    "use": lambda working, groups, use, more: groups[0].use().close(),
    "arrays": lambda working, groups, use, more: use.arrays,
    "close a use": lambda working, groups, use, more: use.close(),
    "remove": lambda working, groups, use, more: working.remove(groups[1]),
    "on the host": lambda working, groups, use, more: groups[0].use_on_host().__enter__(),
    "write on the host": lambda working, groups, use, more: (
        groups[1].use_on_host(access="write").__enter__()
    ),
    "stats": lambda working, groups, use, more: (working.stats(), groups[0].is_resident),
    "order": lambda working, groups, use, more: setattr(working, "order", groups),
    "close": lambda working, groups, use, more: working.close(),
}


class TestWorkingSets:
    """Calls either work or raise, without a hang, and the set goes on."""

    @pytest.mark.parametrize("kind", ["WorkingSet", "ManagedWorkingSet"])
    @pytest.mark.parametrize("name", SET_CALLS)
    def test_calls(self, stream, alloc, name, kind):
        buffers = [alloc(MIB) for _ in range(3)]
        for buffer in buffers:
            write(buffer, 5)
        with getattr(managedmem, kind)(MIB, Device(0)) as working:
            groups = [working.add(buffer) for buffer in buffers[:2]]
            use = groups[0].use(stream=stream)
            call = functools.partial(SET_CALLS[name], working, groups, use, buffers[2])
            with contextlib.suppress(managedmem.CUDAError):
                run_inside(call, stream)
            del call
            stream.sync()
            use.close()
            del use
            gc.collect()
            for group in [] if working.is_closed else [*working]:
                with group.use(stream=stream):
                    pass
                working.remove(group)
            with groups[0].use_on_host() as arrays:
                assert set(bytes(arrays[0] if kind == "WorkingSet" else arrays)) == {5}

    @pytest.mark.parametrize("kind", ["WorkingSet", "ManagedWorkingSet"])
    def test_a_set_is_lost(self, stream, alloc, kind):
        """Its device memory, streams and events are freed with a later call."""
        buffer = alloc(MIB)
        box = [getattr(managedmem, kind)(MIB, Device(0))]
        box[0].add(buffer).use(stream=stream).close()
        end_inside(box, stream)
        managedmem.empty(PAGE).close()

    @pytest.mark.parametrize("kind", ["WorkingSet", "ManagedWorkingSet"])
    @pytest.mark.parametrize("last", ["use", "arrays", "group"])
    def test_the_last_reference_goes(self, stream, alloc, last, kind):
        buffer = alloc(MIB)
        working = getattr(managedmem, kind)(MIB, Device(0))
        group = working.add(buffer, "write")
        use = group.use(stream=stream)
        box = [use] if last == "use" else [use.arrays]
        if last != "use":
            use.close()
        if last == "group":
            box = [group]
            working.remove(group)
        del use, group
        end_inside(box, stream)
        stream.sync()
        gc.collect()
        for group in working:
            with group.use(stream=stream):
                pass
            working.remove(group)
        working.close()
        settle()
