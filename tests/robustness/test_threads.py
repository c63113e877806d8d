"""Shared objects under many threads, and the GIL while the driver blocks.

Every race runs with a tiny switch interval from a barrier. What a race may end in is written down
in each test; anything else that a thread raises fails it.
"""

import ctypes
import os
import sys
import threading
import time

import pytest

import managedmem
from constants import FREE_THREADED, PAGE
from contents import write
from driver import raw_driver
from managedmem import Device, Host, ManagedBuffer, ManagedMemoryResource, Stream
from programs import run_python
from races import race
from whole_programs import run_to_the_end

THREADS = 6
ROUNDS = 25


@pytest.fixture(autouse=True)
def frantic_switching():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def until_closed(operation):
    """A worker that repeats the operation until the buffer says that it is closed."""

    def worker():
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                operation()
            except RuntimeError as error:
                assert "closed" in str(error), error
                return
        raise AssertionError("the buffer was never closed")

    return worker


def close_when_used(buffer, uses=20):
    """A worker that lets the others run a little, then closes, retrying while exports live."""

    def worker():
        for _ in range(uses):
            time.sleep(0)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                buffer.close()
                return
            except BufferError:
                time.sleep(0)
        raise AssertionError("the exports never ended")

    return worker


def operations(buffer):
    members = buffer.accessed_by
    other = ManagedMemoryResource().allocate(PAGE)
    parts = [buffer[:PAGE], other, buffer[PAGE:]] if buffer.nbytes > PAGE else [buffer, other]
    return {
        "prefetch": lambda: buffer.prefetch(Host()),
        "prefetch to a device": lambda: buffer.prefetch(Device(0)),
        "discard": buffer.discard,
        "discard_prefetch": lambda: buffer.discard_prefetch(Host()),
        "read_mostly": lambda: setattr(buffer, "read_mostly", not buffer.read_mostly),
        "preferred_location": lambda: setattr(buffer, "preferred_location", Host()),
        "last_prefetch_location": lambda: buffer.last_prefetch_location,
        "accessed_by": lambda: (members.add(Host()), len(members), members.clear()),
        "iteration": lambda: list(members),
        "fill": lambda: buffer.fill(1),
        "advise": lambda: managedmem.advise([buffer], "set_read_mostly"),
        "many prefetches": lambda: managedmem.prefetch([buffer, buffer], Host()),
        "among others": lambda: managedmem.prefetch([other, buffer], Host()),
        "parts among others": lambda: managedmem.prefetch(parts, Host()),
        "slice": lambda: buffer[0:PAGE].prefetch(Host()),
        "view": lambda: buffer.view("float32").prefetch(Host()),
        "dlpack": buffer.__dlpack__,
        "array interface": lambda: buffer.__cuda_array_interface__,
    }


OPERATIONS = list(operations(ManagedMemoryResource().allocate(PAGE)))


class TestClosing:
    @pytest.mark.parametrize("name", OPERATIONS)
    def test_against_one_operation(self, name):
        for _ in range(ROUNDS):
            buffer = ManagedMemoryResource().allocate(16 * PAGE)
            operation = until_closed(operations(buffer)[name])
            race(operation, operation, close_when_used(buffer))
            assert buffer.is_closed
            assert buffer.handle == 0

    def test_against_all_operations(self):
        for _ in range(ROUNDS // 5):
            buffer = ManagedMemoryResource().allocate(16 * PAGE)
            race(*map(until_closed, operations(buffer).values()), close_when_used(buffer, 50))
            assert buffer.is_closed

    def test_what_was_entered_with_it_is_let_go(self):
        for _ in range(ROUNDS):
            first, middle, last = (ManagedMemoryResource().allocate(2 * PAGE) for _ in range(3))
            targets = [first[:PAGE], first[PAGE:], middle, last, first[:PAGE]]
            operation = until_closed(lambda targets=targets: managedmem.prefetch(targets, Host()))
            race(operation, operation, close_when_used(middle))
            race(first.close, last.close)  # waits for calls that have it

    def test_many_closers(self):
        for _ in range(ROUNDS):
            buffer = ManagedMemoryResource().allocate(PAGE)
            race(*[buffer.close] * THREADS)
            assert buffer.is_closed

    def test_against_memoryviews(self):
        """A view that exists is good until released, whatever the closer does meanwhile."""
        for _ in range(ROUNDS):
            buffer = ManagedMemoryResource().allocate(PAGE)
            write(buffer, 5)

            def read(buffer=buffer):
                with memoryview(buffer) as view:
                    assert view[0] == view[PAGE - 1] == 5

            worker = until_closed(read)
            race(worker, worker, close_when_used(buffer))
            assert buffer.is_closed

    def test_against_views_of_views(self):
        for _ in range(ROUNDS):
            buffer = ManagedMemoryResource().allocate(4 * PAGE)

            def slice_and_close(buffer=buffer):
                with buffer[PAGE : 3 * PAGE] as part:
                    part.prefetch(Host())

            race(
                until_closed(slice_and_close),
                until_closed(slice_and_close),
                close_when_used(buffer),
            )

    def test_stream_closers_against_users(self):
        for _ in range(ROUNDS):
            stream = Stream()
            buffer = ManagedMemoryResource().allocate(PAGE)

            def use(stream=stream, buffer=buffer):
                buffer.prefetch(Host(), stream=stream)
                stream.sync()
                stream.query()

            race(until_closed(use), until_closed(use), stream.close)
            assert stream.is_closed
            buffer.close()

    def test_last_reference_goes_in_another_thread(self):
        """The buffer, its view and its capsule are each dropped by a different thread."""
        for _ in range(ROUNDS):
            buffer = ManagedMemoryResource().allocate(2 * PAGE)
            held = [[buffer], [buffer[0:PAGE]], [buffer.__dlpack__()], [memoryview(buffer)]]
            del buffer
            race(*[box.clear for box in held])


class TestAdvice:
    def test_setting_and_clearing_against_iteration(self, buf, members):
        proxy = buf.accessed_by
        stop = threading.Event()

        def change():
            for _ in range(200):
                proxy.update(members)
                proxy.clear()
            stop.set()

        def look():
            while not stop.is_set():
                assert set(proxy) <= set(members)
                assert 0 <= len(proxy) <= len(members)
                assert (proxy | set()) <= set(members)

        race(change, look, look)
        assert proxy == set()

    def test_each_thread_keeps_its_own_member(self, buf, members):
        """Adding and removing one member never disturbs another thread's member."""
        proxy = buf.accessed_by

        def mine(member):
            def worker():
                for _ in range(200):
                    proxy.add(member)
                    assert member in proxy
                    proxy.discard(member)
                    assert member not in proxy

            return worker

        race(*map(mine, members))

    def test_pages_apart_do_not_disturb_each_other(self, alloc):
        buffer = alloc(THREADS * PAGE)

        def mine(index):
            part = buffer[index * PAGE : (index + 1) * PAGE]
            place = Host() if index % 2 else Device(0)

            def worker():
                for _ in range(100):
                    part.preferred_location = place
                    part.read_mostly = True
                    assert part.preferred_location is place
                    assert part.read_mostly is True
                    part.preferred_location = None
                    part.read_mostly = False
                    assert part.preferred_location is None
                    assert part.read_mostly is False

            return worker

        race(*map(mine, range(THREADS)))


class TestSharedObjects:
    def test_locations_are_one_object_for_all_threads(self):
        for n in range(100, 100 + ROUNDS):
            results = race(
                *[lambda n=n: (Host(numa_id=n), Host.numa_current(), Device(0))] * THREADS
            )
            for other in results[1:]:
                assert all(a is b for a, b in zip(results[0], other, strict=True))

    def test_interning_while_objects_go(self):
        """Finding a dying object in the table must not bring it back half dead."""

        def churn():
            for n in range(2000):
                host = Host(numa_id=50 + n % 3)
                assert host.numa_id == 50 + n % 3
                assert host is Host(numa_id=50 + n % 3)

        race(*[churn] * THREADS)

    def test_allocating_from_one_resource(self):
        resource = ManagedMemoryResource()

        def work():
            for _ in range(100):
                with resource.allocate(PAGE) as buffer:
                    write(buffer, 9)
                    assert buffer.is_managed

        race(*[work] * THREADS)

    def test_one_stream(self, stream, alloc):
        buffers = [alloc(PAGE) for _ in range(THREADS)]

        def work(buffer):
            def worker():
                for _ in range(50):
                    buffer.prefetch(Device(0), stream=stream)
                    buffer.prefetch(Host(), stream=stream)
                stream.sync()
                assert buffer.last_prefetch_location is Host()

            return worker

        race(*map(work, buffers))

    def test_current_device_is_each_threads_own(self, device1):
        def work(device):
            def worker():
                device.set_current()
                for _ in range(100):
                    assert Device() is device
                    with ManagedMemoryResource().allocate(PAGE) as buffer:
                        assert buffer.device_id == device.device_id

            return worker

        race(*map(work, [Device(0), device1] * 2))

    def test_owner_dropped_while_used(self, buf):
        def work():
            for _ in range(300):
                wrapped = ManagedBuffer.from_handle(buf.handle, buf.size, owner=object())
                assert wrapped[0:PAGE].owner is not None or wrapped.owner is not None

        race(*[work] * THREADS)


class TestFirstUse:
    def test_many_threads_open_the_driver_once(self):
        run_to_the_end("""
            import sys
            sys.setswitchinterval(1e-6)
            import managedmem
            from managedmem import emulator
            from races import race
            seen = race(*[lambda: (managedmem.Device.count(), managedmem.Device(0))] * 8)
            assert seen == [(2, managedmem.Device(0))] * 8, seen
            assert sum(c.name == "cuInit" for c in emulator.calls()) == 1
        """)

    def test_threads_that_never_touched_cuda(self, buf):
        """A fresh thread has no context; operations bring what they need and leave nothing."""
        stream = Stream()

        def work():
            buf.read_mostly = True
            assert buf.read_mostly is True
            buf.prefetch(Host())
            buf.prefetch(Host(), stream=stream)
            buf.discard()
            with ManagedMemoryResource().allocate(PAGE) as other:
                other.accessed_by.add(Host())
            stream.sync()
            Device(0).sync()
            context = ctypes.c_void_p()
            assert raw_driver().cuCtxGetCurrent(ctypes.byref(context)) == 0
            return context.value

        assert race(work, work) == [None, None]
        stream.close()


WHILE_A_CALL_WAITS = """
import ctypes, faulthandler, threading
from dlpack import consume
from driver import raw_driver
from host_functions import Gate
from managedmem import *

def drop_capsule():
    capsule = box.pop().__dlpack__()
    del capsule  # the last that kept the memory

def delete_tensor():
    "With the GIL, as NumPy and torch do."
    tensor = consume(box.pop().__dlpack__())
    address = ctypes.cast(tensor.deleter, ctypes.c_void_p).value
    ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(address)(ctypes.addressof(tensor))

def wait_with_the_gil():
    wait = ctypes.cast(raw_driver().cuStreamSynchronize, ctypes.c_void_p).value
    faulthandler.dump_traceback_later(0.5, exit=True)
    ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(wait)(stream.handle)

stream, box = Stream(), [empty(4096)]
gate = Gate(stream)
# Freeing waits for what is queued on the memory, and this is queued behind the gate.
box[0].prefetch(Host(), stream=stream)
waiting = threading.Thread(target=lambda: {blocking})
faulthandler.dump_traceback_later(30, exit=True)
waiting.start()
gate.wait_until_reached()
print("Python runs", flush=True)
gate.open()
waiting.join()
print("the call returned")
"""
"""Python code that runs while another thread is inside the blocking call."""


def run_while_a_call_waits(blocking):
    code = WHILE_A_CALL_WAITS.format(blocking=blocking)
    return run_python(code, emulator="schedule=lazy", check=False)


@pytest.mark.emulator_only
@pytest.mark.skipif(FREE_THREADED, reason="there is no GIL")
class TestTheGilIsReleased:
    @pytest.mark.parametrize(
        "blocking",
        [
            *("stream.sync()", "Device(0).sync()", "box[0].close()", "box.pop()"),
            *("drop_capsule()", "delete_tensor()"),
        ],
    )
    def test_while_the_driver_blocks(self, blocking):
        done = run_while_a_call_waits(blocking)
        assert done.stdout == "Python runs\nthe call returned\n", done.stderr

    def test_the_measure_itself_can_fail(self):
        """A call that keeps the GIL stops all Python code, so the test above means something."""
        done = run_while_a_call_waits("wait_with_the_gil()")
        assert (done.returncode, done.stdout) == (1, "")
        assert "in wait_with_the_gil" in done.stderr


@pytest.mark.parametrize("last", ["tensor", "array"])
def test_a_tensor_is_dropped_while_a_host_function_waits_for_python(last):
    """Freeing waits for the host function, which waits for another thread. With the GIL held the
    process would hang, so this runs in a process of its own."""
    pytest.importorskip("numpy", reason="needs NumPy")
    done = run_python(
        f"""
        import ctypes, threading, time
        import numpy
        import managedmem
        from constants import EMULATED
        from dlpack import consume
        from driver import raw_driver
        process = ctypes.CDLL(None)
        free = ctypes.create_string_buffer(64)
        assert process.sem_init(free, 0, 0) == 0
        stream = managedmem.Stream()
        buffer = managedmem.empty(4096)
        if {last!r} == "array":
            array = numpy.from_dlpack(buffer)
        else:
            tensor = consume(buffer.__dlpack__())
        if EMULATED:
            managedmem.emulator.schedule("lazy")
        wait = ctypes.cast(process.sem_wait, ctypes.c_void_p)
        handle = ctypes.c_void_p(stream.handle)
        assert raw_driver().cuLaunchHostFunc(handle, wait, free) == 0
        del buffer

        def let_go():
            time.sleep(0.2)
            process.sem_post(free)

        threading.Thread(target=let_go).start()
        if {last!r} == "array":
            del array
        else:
            address = ctypes.cast(tensor.deleter, ctypes.c_void_p).value
            ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(address)(ctypes.addressof(tensor))
        stream.sync()
        print("fine")
        """,
        driver=os.environ["MANAGEDMEM_DRIVER"],
    )
    assert done.stdout == "fine\n"


READS = {
    "read_mostly": "buf.read_mostly",
    "preferred_location": "buf.preferred_location",
    "last_prefetch_location": "buf.last_prefetch_location",
    "accessed_by": "len(members)",
    "is_managed": "wrapped.is_managed",
    "device_id": "wrapped.device_id",
    "first look-up": "ManagedBuffer.from_handle(buf.handle, PAGE).read_mostly",
    "query of the stream": "stream.query()",
    "query of another stream": "other.query()",
    "pool attributes": "pool.attributes.used_mem_current",
    "pool peers": "len(pool.peer_accessible_by)",
    "current device": "Device()",
    "device name": "Device(0).name",
    "device attribute": "Device(0).concurrent_managed_access",
    "plan": "PrefetchPlan([(buf, Host())])",
    "array interface": "buf.__cuda_array_interface__",
    "DLPack": "buf.__dlpack__(stream=-1)",
}


@pytest.mark.parametrize("waits", ["stream.sync()", "Device(0).sync()", "victim.close()"])
def test_reads_while_a_host_function_in_python_is_waited_for(waits):
    """One thread waits in the driver for a host function, which needs the GIL. A read in another
    thread that held the GIL and waited for the driver would hang."""
    done = run_python(
        f"""
        import ctypes, faulthandler, sys, threading, time
        import managedmem
        from constants import EMULATED, PAGE
        from driver import raw_driver
        from managedmem import *
        buf, victim = empty(16 * PAGE), empty(16 * PAGE)
        wrapped = ManagedBuffer.from_handle(buf.handle, buf.size)
        members, pool = buf.accessed_by, DeviceMemoryResource(0)
        stream, other = Stream(), Stream()
        reads = {READS!r}
        for read in reads.values():
            eval(read)
        if EMULATED:
            managedmem.emulator.schedule("lazy")

        @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        def host_function(_):
            for _ in range(10):
                time.sleep(0.01)  # gives the GIL up and takes it again

        def wait():
            victim.prefetch(Host(), stream=stream)
            started.set()
            {waits}

        for name, read in reads.items():
            started = threading.Event()
            if victim.is_closed:
                victim = empty(16 * PAGE)
            handle = ctypes.c_void_p(stream.handle)
            assert raw_driver().cuLaunchHostFunc(handle, host_function, None) == 0
            waiting = threading.Thread(target=wait)
            waiting.start()
            started.wait()
            time.sleep(0.03)
            print(name, flush=True)
            faulthandler.dump_traceback_later(10, exit=True)
            sys.setswitchinterval(100)  # gives the GIL up when a call does, and not before
            read = eval(read)
            sys.setswitchinterval(0.005)
            faulthandler.cancel_dump_traceback_later()
            del read
            waiting.join()
        print("done")
        """,
        driver=os.environ["MANAGEDMEM_DRIVER"],
        check=False,
    )
    assert done.stdout.splitlines() == [*READS, "done"], done.stderr


@pytest.mark.emulator_only
@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_emulated_host_functions_run_in_a_thread_of_the_driver(schedule, stream, buf):
    """As on a GPU: not in the waiting thread, and without driver calls."""
    from managedmem import emulator

    seen = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def host_function(_):
        seen.append(threading.get_ident())
        seen.append(Host(numa_id=1))
        try:
            seen.append(buf.read_mostly)
        except managedmem.CUDAError as error:
            seen.append(error.name)

    emulator.schedule(schedule)
    handle = ctypes.c_void_p(stream.handle)
    assert raw_driver().cuLaunchHostFunc(handle, host_function, None) == 0
    stream.sync()
    emulator.schedule("eager")
    thread, *rest = seen
    assert thread != threading.get_ident()
    assert rest == [Host(1), "CUDA_ERROR_NOT_PERMITTED"]
