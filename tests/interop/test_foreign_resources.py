"""Memory of another library's resource: `from_handle(mr=...)`, and its deallocation.

`Strict` is a resource as cuda.core describes it, with a keyword-only stream that must be a stream.
"""

import contextlib
import copy
import ctypes
import gc
import sys
import weakref

import pytest

import managedmem
from constants import FREE_THREADED, PAGE
from contents import contents, write
from driver import managed_memory, raw_driver
from foreign_objects import ProtocolStream, foreign
from identifiers import label
from managedmem import Host, ManagedBuffer, ManagedMemoryResource, Stream
from programs import run_python
from races import in_thread, race, race_over

LEGACY = 1


def handle_of(stream):
    version, handle = stream.__cuda_stream__()
    assert version == 0
    return handle


def free(pointer):
    return raw_driver().cuMemFree_v2(ctypes.c_uint64(pointer))


class Strict:
    """A resource of managed memory that checks each deallocation: once, with a stream object."""

    def __init__(self):
        self.lent = {}
        self.streams = []
        self.failing = None

    def allocate(self, size, *, stream):
        self.streams.append(handle_of(stream))
        pointer = managed_memory(size)
        self.lent[pointer] = size
        return ManagedBuffer.from_handle(pointer, size, mr=self, stream=stream)

    def deallocate(self, ptr, size, *, stream):
        handle = handle_of(stream)
        if self.failing is not None:
            raise self.failing
        assert self.lent.pop(ptr) == size
        self.streams.append(handle)
        assert free(ptr) == 0


@pytest.fixture
def resource():
    return Strict()


@pytest.fixture
def lend(resource):
    """`lend()`: a buffer over memory of the resource, by default without a stream."""

    def make(size=PAGE, cls=ManagedBuffer, **more):
        pointer = managed_memory(size)
        resource.lent[pointer] = size
        return cls.from_handle(pointer, size, mr=resource, **more)

    yield make
    gc.collect()
    for pointer in resource.lent:
        free(pointer)


@contextlib.contextmanager
def unraisable(monkeypatch):
    """The exceptions that reach sys.unraisablehook in the block."""
    caught = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: caught.append(args.exc_value))
    yield caught
    monkeypatch.undo()


class Tagged(ManagedBuffer):
    pass


class Final(ManagedBuffer):
    """Has a finalizer that calls the one of the base."""

    def __del__(self):
        self.note = self.size
        super().__del__()


class Rude(ManagedBuffer):
    """Has a finalizer that does not call the one of the base."""

    def __del__(self):
        self.note = self.size


CLASSES = {cls.__name__: cls for cls in (ManagedBuffer, Tagged, Final, Rude)}
classes = pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)


def close(box):
    box.pop().close()


def leave(box):
    with box.pop():
        pass


def drop(box):
    box.clear()


def in_a_cycle(box):
    buffer = box.pop()
    cycle = [buffer]
    cycle.append(cycle)
    del buffer, cycle
    gc.collect()


ENDS = {f.__name__: f for f in (close, leave, drop, in_a_cycle)}
ends = pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)


class TestTheStream:
    @ends
    def test_is_the_default_one(self, lend, resource, end):
        end([lend()])
        assert resource.lent == {}
        assert resource.streams == [LEGACY]

    @ends
    @pytest.mark.parametrize("none", [{}, {"stream": None}], ids=["nothing", "None"])
    def test_none_is_the_default_one(self, lend, resource, end, none):
        end([lend(**none)])
        assert resource.streams == [LEGACY]

    def test_is_an_object_that_can_be_used(self, lend, monkeypatch):
        seen = []
        monkeypatch.setattr(Strict, "deallocate", lambda self, *_, stream: seen.append(stream))
        lend().close()
        (stream,) = seen
        assert isinstance(stream, Stream)
        stream.sync()
        assert stream == Stream.from_handle(LEGACY)

    @ends
    def test_is_the_one_of_from_handle(self, lend, resource, stream, end):
        end([lend(stream=stream)])
        assert resource.streams == [stream.handle]

    @ends
    def test_is_the_one_that_was_set(self, lend, resource, stream, end):
        with Stream() as other:
            buffer = lend(stream=other)
            buffer[:16].set_deallocation_stream(stream)
            box = [buffer]
            del buffer
            end(box)
        assert resource.streams == [stream.handle]

    def test_a_failing_query_leaves_the_buffer_open(self, lend, resource):
        class Moody:
            failing = False

            @property
            def __cuda_stream__(self):
                if self.failing:
                    raise OSError("not now")
                return lambda: (0, 2)

        moody = Moody()
        buffer = lend(stream=moody)
        moody.failing = True
        with pytest.raises(OSError, match="not now"):
            buffer.close()
        assert not buffer.is_closed
        moody.failing = False
        buffer.close()
        assert resource.streams == [2]

    def test_is_the_one_of_close(self, lend, resource, stream):
        with Stream() as other:
            lend(stream=other).close(stream)
        lend(stream=stream).close(None)
        lend().close(stream=ProtocolStream(2))
        assert resource.streams == [stream.handle, stream.handle, 2]

    @ends
    @pytest.mark.parametrize(
        "given, handle",
        [
            (ProtocolStream(2), 2),
            (ProtocolStream(0), 0),
            (2, 2),
            (0, LEGACY),
            (foreign("torch", "Stream", cuda_stream=2), 2),
        ],
        ids=["protocol", "protocol 0", "int", "int 0", "older torch"],
    )
    def test_of_every_kind(self, lend, resource, end, given, handle):
        end([lend(stream=given)])
        assert resource.streams == [handle]

    def test_other_libraries_get_their_own_object(self, lend, monkeypatch, resource):
        seen = []
        given = ProtocolStream(2)
        monkeypatch.setattr(Strict, "deallocate", lambda self, *_, stream: seen.append(stream))
        lend(stream=given).close()
        lend().close(stream=given)
        assert seen == [given, given]

    @ends
    def test_lives_on_when_its_stream_is_closed(self, lend, resource, end):
        stream = Stream()
        handle = stream.handle
        buffer = lend(stream=stream)
        stream.close()
        box = [buffer]
        del buffer
        end(box)
        assert resource.streams == [handle]

    def test_is_kept_alive(self, lend, resource):
        given = ProtocolStream(2)
        gone = weakref.ref(given)
        buffer = lend(stream=given)
        del given
        assert gone() is not None
        buffer.close()
        assert gone() is None
        assert resource.streams == [2]

    @pytest.mark.parametrize("bad", ["s", object(), 1.5, ProtocolStream(1, version=3)], ids=label)
    def test_bad_ones_change_nothing(self, lend, resource, bad):
        with pytest.raises(TypeError):
            lend(stream=bad)
        buffer = lend()
        with pytest.raises(TypeError):
            buffer.close(bad)
        with pytest.raises(TypeError):
            buffer.set_deallocation_stream(bad)
        assert not buffer.is_closed
        buffer.close()
        assert resource.streams == [LEGACY]

    def test_closed_ones_are_refused(self, lend, resource):
        stream = Stream()
        stream.close()
        buffer = lend()
        with pytest.raises(RuntimeError, match="closed"):
            buffer.close(stream)
        with pytest.raises(RuntimeError, match="closed"):
            buffer.set_deallocation_stream(stream)
        buffer.close()
        assert resource.lent == {}

    @pytest.mark.skipif(FREE_THREADED, reason="the thread that made the buffer frees it")
    def test_works_on_threads_without_a_context(self, lend, resource):
        """Driver calls of the resource on a default stream need a context, and a new thread has
        none; cuCtxGetCurrent shows the one that it gets."""
        found = []

        def look(self, ptr, size, *, stream):
            context = ctypes.c_void_p()
            assert raw_driver().cuCtxGetCurrent(ctypes.byref(context)) == 0
            found.append(context.value)

        resource.deallocate = look.__get__(resource)
        box = [lend(), lend()]

        def work():
            box.pop().close()
            box.clear()
            context = ctypes.c_void_p()
            raw_driver().cuCtxGetCurrent(ctypes.byref(context))
            found.append(context.value)

        in_thread(work)
        assert found[0] is not None
        assert found[1] is not None
        assert found[2] is None, "the thread is left as it was"


class TestSetDeallocationStream:
    def test_wants_a_stream(self, lend, buf):
        for buffer in (lend(), buf, buf[:PAGE]):
            with pytest.raises(TypeError, match="required"):
                buffer.set_deallocation_stream(None)
            with pytest.raises(TypeError):
                buffer.set_deallocation_stream()

    def test_of_memory_without_a_pool_is_checked_only(self, buf, stream):
        assert buf.set_deallocation_stream(stream) is None
        assert ManagedBuffer.from_handle(buf.handle, 16).set_deallocation_stream(2) is None
        with pytest.raises(TypeError):
            buf.set_deallocation_stream("stream")

    def test_closed_buffers_refuse(self, lend, stream):
        for buffer in (lend(), ManagedMemoryResource().allocate(PAGE)):
            view = buffer[:16]
            buffer.close()
            with pytest.raises(RuntimeError, match="closed"):
                buffer.set_deallocation_stream(stream)
            with pytest.raises(RuntimeError, match="closed"):
                view.set_deallocation_stream(stream)

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("end", [close, drop], ids=["close", "drop"])
    def test_memory_of_a_pool_is_freed_on_it(self, end):
        from managedmem import emulator

        with managedmem.DeviceMemoryResource(0) as pool, Stream() as first, Stream() as second:
            buffer = pool.allocate(PAGE, stream=first)
            buffer[:16].set_deallocation_stream(second)
            first.close()
            box = [buffer]
            del buffer
            with emulator.recording() as calls:
                end(box)
            (free,) = [call for call in calls if call.name == "cuMemFreeAsync"]
            assert free.args["stream"] == second.handle

    def test_streams_of_other_libraries_are_kept(self, stream):
        class Other:
            __cuda_stream__ = stream.__cuda_stream__

        with managedmem.DeviceMemoryResource(0) as pool:
            buffer = pool.allocate(PAGE)
            given = Other()
            gone = weakref.ref(given)
            buffer.set_deallocation_stream(given)
            del given
            assert gone() is not None
            buffer.set_deallocation_stream(stream)
            assert gone() is None
            buffer.close()

    def test_streams_of_other_libraries_must_not_be_outlived(self, stream):
        with managedmem.DeviceMemoryResource(0) as pool:
            buffer = pool.allocate(PAGE)
            capsule = buffer.__dlpack__()
            with pytest.raises(BufferError, match="deallocation stream"):
                buffer.set_deallocation_stream(ProtocolStream(stream.handle))
            buffer.set_deallocation_stream(stream)
            del capsule
            buffer.close()
            stream.sync()


@classes
class TestItGoesBackOnce:
    @ends
    def test_in_every_way(self, lend, resource, end, cls):
        end([lend(cls=cls)])
        assert resource.lent == {}
        assert len(resource.streams) == 1

    def test_closed_twice(self, lend, resource, cls):
        buffer = lend(cls=cls)
        buffer.close()
        buffer.close()
        del buffer
        gc.collect()
        assert len(resource.streams) == 1

    def test_not_before_the_last_view(self, lend, resource, cls):
        buffer = lend(cls=cls)
        view, other = buffer[:16], buffer.view("float32")
        del buffer
        gc.collect()
        write(view, 3)
        assert len(resource.lent) == 1
        view.close()
        assert len(resource.lent) == 1
        del other
        assert resource.lent == {}

    def test_closed_views_do_not_hold_it_up(self, lend, resource, cls):
        buffer = lend(cls=cls)
        view = buffer[:16]
        view.close()
        del buffer
        gc.collect()
        assert resource.lent == {}
        assert view.is_closed

    def test_not_under_a_host_view(self, lend, resource, cls):
        buffer = lend(cls=cls)
        view = memoryview(buffer)
        with pytest.raises(BufferError):
            buffer.close()
        assert not buffer.is_closed
        assert buffer.memory_resource is resource
        del buffer
        gc.collect()
        assert len(resource.lent) == 1
        view.release()
        assert resource.lent == {}

    def test_in_a_cycle_with_a_host_view(self, lend, resource, cls):
        box = [lend(cls=cls)]
        box.append(memoryview(box[0]))
        box.append(box)
        del box
        gc.collect()
        assert resource.lent == {}


@pytest.mark.parametrize("cls", [ManagedBuffer, Tagged, Final])
class TestGarbageWithItsResource:
    """deallocate() is called before the resource is cleared: its attributes exist."""

    def test_a_cycle_with_the_resource(self, cls):
        resource, pointer = Strict(), managed_memory()
        resource.lent[pointer] = PAGE
        resource.buffer = cls.from_handle(pointer, PAGE, mr=resource)
        streams, gone = resource.streams, weakref.ref(resource)
        resource.holder = [resource]
        del resource
        gc.collect()
        assert streams == [LEGACY]
        assert gone() is None

    def test_a_cycle_with_the_stream(self, lend, resource, cls):
        given = ProtocolStream(2)
        given.buffer = lend(cls=cls, stream=given)
        del given
        gc.collect()
        assert resource.streams == [2]

    def test_many_at_once(self, cls):
        streams = []
        for _ in range(100):
            resource, pointer = Strict(), managed_memory()
            resource.streams = streams
            resource.lent[pointer] = PAGE
            resource.buffer = cls.from_handle(pointer, PAGE, mr=resource)
            resource.view = resource.buffer[:16]
        del resource
        gc.collect()
        assert streams == [LEGACY] * 100


def test_a_function_that_the_collector_has_cleared():
    """Where a view in the same garbage shows the memory, it goes back when objects are cleared."""
    done = run_python("""
import gc, types
from managedmem import ManagedBuffer

def deallocate(self, ptr, size, *, stream):
    print("back")

def text(self):
    return str(self)

names = {}
members = {
    "deallocate": types.FunctionType(deallocate.__code__, names),
    "__repr__": types.FunctionType(text.__code__, names),
}
lender = type("Lender", (), members)()
names["buffer"] = ManagedBuffer.from_handle(4096, 0, mr=lender)
names["view"] = memoryview(names["buffer"])
del names, members, lender
gc.collect()
print("end")
    """)
    assert done.stdout == "end\n"
    assert "Lender'>" in done.stderr
    if not FREE_THREADED:  # whose collector clears the class before the buffer
        assert "RuntimeError: the memory cannot be deallocated" in done.stderr


class TestFailures:
    @pytest.mark.parametrize("error", [ValueError("not now"), KeyboardInterrupt(), SystemExit(3)])
    def test_close_leaves_the_buffer_open(self, lend, resource, error):
        buffer = lend()
        view = buffer[:16]
        resource.failing = error
        with pytest.raises(type(error)):
            buffer.close()
        assert not buffer.is_closed
        assert buffer.memory_resource is resource
        buffer.read_mostly = True
        write(view, 7)
        assert contents(view) == b"\7" * 16
        resource.failing = None
        buffer.close()
        assert resource.lent == {}
        assert view.is_closed

    def test_a_with_block_raises_too(self, lend, resource):
        resource.failing = OSError("gone")
        with pytest.raises(OSError, match="gone"):
            with lend() as buffer:
                pass
        resource.failing = None
        buffer.close()
        assert resource.lent == {}

    @pytest.mark.parametrize("end", [drop, in_a_cycle], ids=["drop", "in a cycle"])
    @classes
    def test_at_the_end_the_hook_is_told_once(self, lend, resource, monkeypatch, end, cls):
        box = [lend(cls=cls)]
        resource.failing = ValueError("not now")
        with unraisable(monkeypatch) as caught:
            end(box)
            # Its frames keep a buffer alive whose class has a finalizer of its own.
            resource.failing.__traceback__ = None
            gc.collect()
        assert caught == [resource.failing]

    def test_an_exception_on_its_way_is_kept(self, lend, resource, monkeypatch):
        def work():
            buffer = lend()  # noqa: F841
            raise KeyError("mine")

        resource.failing = ValueError("not now")
        with unraisable(monkeypatch) as caught:
            with pytest.raises(KeyError, match="mine") as raised:
                work()
            del raised
            gc.collect()
        assert caught == [resource.failing]

    def test_resources_must_be_able_to_take_memory_back(self, buf):
        for bad in (object(), 5, foreign("x", "Resource", deallocate=3)):
            with pytest.raises(TypeError, match="deallocate"):
                ManagedBuffer.from_handle(buf.handle, PAGE, mr=bad)

    def test_a_stream_needs_a_resource(self, buf):
        with pytest.raises(ValueError, match="stream needs mr"):
            ManagedBuffer.from_handle(buf.handle, PAGE, stream=2)
        with pytest.raises(ValueError, match="stream needs mr"):
            ManagedBuffer.from_handle(buf.handle, PAGE, owner=buf, stream=2)
        assert ManagedBuffer.from_handle(buf.handle, PAGE, stream=None).owner is None

    def test_the_stream_is_keyword_only(self, buf, resource):
        with pytest.raises(TypeError, match="positional"):
            ManagedBuffer.from_handle(buf.handle, PAGE, resource, None, 2)

    def test_a_resource_that_closes_the_buffer_again(self, lend, resource):
        def again(ptr, size, *, stream):
            assert buffer.is_closed
            buffer.close()
            Strict.deallocate(resource, ptr, size, stream=stream)

        resource.deallocate = again
        buffer = lend()
        buffer.close()
        assert resource.lent == {}


class TestThreads:
    def test_one_of_many_gives_it_back(self, lend, resource):
        for _ in range(50):
            buffer = lend()
            view = buffer[:16]

            def work(job):
                with contextlib.suppress(RuntimeError):  # closed meanwhile
                    job()

            jobs = [
                buffer.close,
                buffer.close,
                view.close,
                lambda b=buffer: b.close(Stream.from_handle(2)),
                lambda b=buffer: b.set_deallocation_stream(2),
                lambda v=view: v.prefetch(Host()),
            ]
            race_over(work, jobs)
            assert buffer.is_closed
            assert resource.lent == {}

    def test_the_last_reference_goes_while_a_closed_view_is_used(self, lend, resource):
        for _ in range(50):
            box = [lend(16 * PAGE)]
            view = box[0][:PAGE]

            def use(view=view):
                with contextlib.suppress(RuntimeError):
                    for _ in range(10):
                        view.prefetch(Host())

            def end(view=view, box=box):
                view.close()
                box.clear()

            race(use, use, end)
            assert resource.lent == {}


class TestCopyTo:
    def test_the_resource_gets_the_stream(self, resource, stream):
        with resource.allocate(PAGE, stream=stream) as buffer:
            write(buffer, 5)
            copy = buffer.copy_to(stream=stream)
            stream.sync()
            assert resource.streams == [stream.handle] * 2
            assert contents(copy) == b"\5" * PAGE
            assert copy.memory_resource is resource
            del copy
        assert resource.lent == {}
        assert resource.streams == [stream.handle] * 4

    def test_without_one_the_default_one(self, lend, resource):
        buffer = lend().view("float32", (32, 32))
        copy = buffer.copy_to()
        assert (copy.shape, copy.dtype) == (buffer.shape, buffer.dtype)
        assert resource.streams == [LEGACY]
        del copy, buffer
        assert resource.lent == {}

    def test_takes_buffers_of_the_resource_s_own_kind(self, lend, resource, stream):
        """Like those of cuda.core: an address, a size, and an object that frees them."""

        class Lent:
            def __init__(self, pointer, size):
                self.handle, self.size = pointer, size

            def __del__(self):
                resource.deallocate(self.handle, self.size, stream=Stream.from_handle(LEGACY))

        Lent.__module__ = "cuda.core._memory._buffer"

        def allocate(size, *, stream):
            resource.streams.append(handle_of(stream))
            pointer = managed_memory(size)
            resource.lent[pointer] = size
            return Lent(pointer, size)

        resource.allocate = allocate
        buffer = lend().view("float32", (32, 32))
        write(buffer, 9)
        copy = buffer.copy_to(stream=stream)
        stream.sync()
        assert type(copy) is ManagedBuffer
        assert (copy.shape, copy.dtype) == (buffer.shape, buffer.dtype)
        assert contents(copy) == b"\t" * PAGE
        assert isinstance(copy.owner, Lent)
        assert copy.memory_resource is resource
        assert resource.streams == [stream.handle]
        again = copy.copy_to(stream=stream)
        assert again.memory_resource is resource
        stream.sync()
        copy.close()
        again.close()
        assert len(resource.lent) == 1
        assert resource.streams == [stream.handle, stream.handle, LEGACY, LEGACY]

    @pytest.mark.parametrize("bad", [None, 5, b"", b"abc", "x"], ids=label)
    def test_an_object_that_is_not_a_buffer_is_refused(self, lend, resource, bad):
        resource.allocate = lambda size, *, stream: bad
        with pytest.raises((TypeError, ValueError)):
            lend().copy_to()

    def test_a_resource_that_only_deallocates(self, lend, resource):
        freed = []

        class Frees:
            def deallocate(self, ptr, size, *, stream):
                freed.append(ptr)

        backing = lend()
        buffer = ManagedBuffer.from_handle(backing.handle, backing.size, mr=Frees())
        for make in (buffer.copy_to, lambda: copy.copy(buffer)):
            with pytest.raises(TypeError, match=r"no method allocate\(.*a destination"):
                make()
        assert buffer.copy_to(bytearray(buffer.size))
        buffer.close()
        assert freed == [backing.handle]

    def test_too_small_a_buffer_is_refused(self, lend, resource):
        resource.allocate = lambda size, *, stream: lend(size // 2)
        buffer = lend()
        with pytest.raises(TypeError, match=r"allocate\(4096\) must return a buffer of that size"):
            buffer.copy_to()
        buffer.close()
        gc.collect()
        assert resource.lent == {}

    def test_errors_of_the_resource_are_passed_on(self, lend, resource):
        def allocate(size, *, stream):
            raise MemoryError("full")

        resource.allocate = allocate
        with pytest.raises(MemoryError, match="full"):
            lend().copy_to()
