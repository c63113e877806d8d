"""The references that a closed buffer releases, and the deallocation of buffers that own
buffers."""

import contextlib
import gc
import weakref

import pytest

from constants import PAGE
from contents import contents, pattern, write
from dlpack import consume, run_deleter
from managedmem import DeviceMemoryResource, Host, ManagedBuffer, ManagedMemoryResource, Stream
from programs import run_python
from races import race_over
from whole_programs import run_to_the_end


class Owner:
    """An object with a weak reference."""


class Tagged(ManagedBuffer):
    pass


def live():
    from managedmem import emulator

    gc.collect()
    return emulator.live().allocations


@pytest.fixture(params=[ManagedBuffer, Tagged], ids=["ManagedBuffer", "a subclass"])
def owned(request, buf):
    """A buffer, and a weak reference to its owner, which only the buffer keeps."""
    owner = Owner()
    return request.param.from_handle(buf.handle, buf.size, owner=owner), weakref.ref(owner)


class TestCloseReleases:
    def test_the_owner(self, owned):
        buffer, owner = owned
        assert buffer.owner is owner() is not None
        buffer.close()
        assert owner() is None
        assert buffer.owner is None

    def test_the_owner_of_a_view_too(self, owned):
        buffer, owner = owned
        view = buffer[:PAGE]
        assert view.owner is owner() is not None
        buffer.close()
        assert view.owner is None
        assert owner() is None

    def test_the_memory_resource(self):
        buffer = ManagedMemoryResource().allocate(PAGE)
        view = buffer[:16]
        assert buffer.memory_resource is view.memory_resource is not None
        buffer.close()
        assert buffer.memory_resource is None
        assert view.memory_resource is None

    def test_a_with_block_does_it(self, owned):
        buffer, owner = owned
        with buffer:
            assert owner() is not None
        assert owner() is None

    @pytest.mark.parametrize("part", [slice(None), slice(0, 16)], ids=["the buffer", "a view"])
    def test_an_exception_leaves_a_with_block_past_views(self, owned, part):
        """The frames that the exception holds keep the views: a BufferError would hide it."""
        buffer, owner = owned
        used = buffer if part == slice(None) else buffer[part]
        with pytest.raises(KeyError, match="mine"), used:
            kept = memoryview(used)
            raise KeyError("mine")
        assert not used.is_closed
        with pytest.raises(BufferError), used:
            assert kept.nbytes == used.size
        kept.release()
        with pytest.raises(KeyError), used:
            raise KeyError("mine")
        assert used.is_closed
        buffer.close()
        assert owner() is None

    @pytest.mark.emulator_only
    def test_memory_that_an_exception_left_open_goes_with_the_last_view(self):
        def use():
            with ManagedMemoryResource().allocate(PAGE) as buffer:
                view = memoryview(buffer)
                raise KeyError(view.nbytes)

        before, during = live(), None
        try:
            use()
        except KeyError:
            during = live()
        assert during == before + 1
        assert live() == before

    def test_properties_that_a_closed_buffer_keeps(self, owned):
        buffer, _ = owned
        size = buffer.size
        buffer.close()
        buffer.close()
        assert (buffer.size, buffer.handle, buffer.is_closed) == (size, 0, True)
        assert "closed" in repr(buffer)
        with pytest.raises(RuntimeError, match="closed"):
            buffer[:PAGE]

    def test_nothing_while_a_host_view_lives(self, owned):
        buffer, owner = owned
        with memoryview(buffer):
            with pytest.raises(BufferError):
                buffer.close()
            assert buffer.owner is owner() is not None
        buffer.close()
        assert owner() is None

    def test_nothing_while_a_tensor_lives(self, owned):
        buffer, owner = owned
        tensor = consume(buffer.__dlpack__())
        with pytest.raises(BufferError):
            buffer.close()
        assert owner() is not None
        run_deleter(tensor)
        buffer.close()
        assert owner() is None

    def test_an_owner_that_uses_the_closed_buffer(self, buf):
        """The owner's code runs after the buffer was closed, and may raise."""
        seen = []

        class Last:
            def __del__(self):
                seen.append(buffer.is_closed)
                buffer.close()
                seen.append(buffer.owner)

        buffer = ManagedBuffer.from_handle(buf.handle, buf.size, owner=Last())
        buffer.close()
        assert seen == [True, None]

    def test_a_stream_of_another_library(self):
        class Foreign:
            def __init__(self, stream):
                self.stream = stream

            def __cuda_stream__(self):
                return self.stream.__cuda_stream__()

        with Stream() as stream, DeviceMemoryResource(0) as pool:
            foreign = Foreign(stream)
            buffer = pool.allocate(PAGE, stream=foreign)
            gone = weakref.ref(foreign)
            del foreign
            assert gone() is not None
            buffer.close()
            assert gone() is None
            stream.sync()


class TestAClosedViewReleases:
    def test_its_parent_and_the_owner(self, buf):
        owner = Owner()
        buffer = ManagedBuffer.from_handle(buf.handle, buf.size, owner=owner)
        view = buffer[:PAGE]
        parent, owner = weakref.ref(buffer), weakref.ref(owner)
        del buffer
        gc.collect()
        assert parent() is not None
        view.close()
        assert view.owner is None
        assert parent() is None
        assert owner() is None

    @pytest.mark.emulator_only
    def test_the_memory_of_a_parent_that_is_gone(self):
        before = live()
        buffer = ManagedMemoryResource().allocate(PAGE)
        view = buffer[:16]
        del buffer
        assert live() == before + 1
        view.close()
        assert live() == before

    @pytest.mark.emulator_only
    def test_the_memory_when_the_parent_goes_later(self):
        before = live()
        buffer = ManagedMemoryResource().allocate(PAGE)
        views = [buffer[:16], buffer.view("float32"), buffer[:64][:32]]
        for view in views:
            view.close()
        assert live() == before + 1
        del buffer
        assert live() == before
        assert all(view.is_closed for view in views)

    @pytest.mark.emulator_only
    def test_not_the_memory_of_open_views(self):
        before = live()
        buffer = ManagedMemoryResource().allocate(2 * PAGE)
        write(buffer, pattern(2 * PAGE))
        first, second = buffer[:PAGE], buffer[PAGE:]
        first.close()
        del buffer
        assert live() == before + 1
        assert contents(second) == pattern(2 * PAGE)[PAGE:]
        second.prefetch(Host())
        second.close()
        assert live() == before

    @pytest.mark.emulator_only
    def test_not_the_memory_of_a_tensor(self):
        before = live()
        buffer = ManagedMemoryResource().allocate(PAGE)
        view = buffer[:16]
        tensor = consume(view.__dlpack__())
        view.close()
        del buffer
        assert live() == before + 1
        run_deleter(tensor)
        assert live() == before

    @pytest.mark.emulator_only
    def test_memory_of_a_pool(self, stream):
        with DeviceMemoryResource(0) as pool:
            buffer = pool.allocate(PAGE, stream=stream)
            view = buffer[:16]
            view.close()
            del buffer
            stream.sync()
            assert pool.attributes.used_mem_current == 0

    def test_views_of_closed_views_are_refused(self, buf):
        view = buf[:PAGE]
        view.close()
        with pytest.raises(RuntimeError, match="closed"):
            view[:16]
        with pytest.raises(RuntimeError, match="closed"):
            view.__dlpack__()

    def test_a_cycle_through_a_view(self, buf):
        owner = Owner()
        view = ManagedBuffer.from_handle(buf.handle, buf.size, owner=owner)[:PAGE]
        owner.view = view
        gone = weakref.ref(owner)
        view.close()
        del owner
        gc.collect()
        assert gone() is None


class TestThreads:
    ROUNDS = 200

    def run(self, *jobs):
        """Run the jobs at once; some find a buffer that is closed meanwhile, or exported."""

        def work(job):
            with contextlib.suppress(RuntimeError, BufferError):
                job()

        race_over(work, jobs)

    def test_views_closed_while_others_use_and_drop_them(self):
        class Box:
            buffer = None

        for _ in range(self.ROUNDS):
            box = Box()
            box.buffer = ManagedMemoryResource().allocate(4 * PAGE)
            view = box.buffer[:PAGE]

            def use(view=view):
                for _ in range(5):
                    view.prefetch(Host())
                    view.read_mostly = True
                    view[:16].close()

            def drop(box=box):
                del box.buffer

            self.run(use, use, view.close, view.close, drop)
            view.close()
            assert view.memory_resource is None

    def test_owners_outlive_calls_under_way(self, buf):
        """The owner goes when no call uses its memory any more."""

        class Watched:
            def __init__(self):
                self.calls = 0

            def __del__(self):
                ended.append(self.calls)

        for _ in range(self.ROUNDS):
            ended = []
            watched = Watched()
            buffer = ManagedBuffer.from_handle(buf.handle, buf.size, owner=watched)
            view = buffer[:PAGE]

            def use(view=view, watched=watched):
                for _ in range(5):
                    view.prefetch(Host())
                    watched.calls += 1

            self.run(use, view.close, buffer.close)
            del use, watched, buffer, view
            gc.collect()
            assert len(ended) == 1


# The objects between a buffer and the buffer that it owns.
LINKS = {
    "nothing": "lambda b: b",
    "a view": "lambda b: b[:16]",
    "a list": "lambda b: [b]",
    "an instance": "Holder",
    "its set of accessors": "lambda b: b.accessed_by",
    "a plan": "lambda b: PrefetchPlan([(b, Host())])",
    "a policy that was applied": "lambda b: MigrationPolicy.prefer(Host()).applied(b)",
    "a memoryview": "memoryview",
    "a capsule": "lambda b: b.__dlpack__()",
    "a view of a subclass": "lambda b: Tagged.from_handle(address, PAGE, owner=b)[:16]",
}

CHAIN = """
import gc, sys, threading
from managedmem import *

PAGE, DEPTH = 4096, 60_000

class Tagged(ManagedBuffer):
    pass

class Holder:
    def __init__(self, buffer):
        self.buffer = buffer

class Last:
    def __del__(self):
        ended.append(True)

ended = []
root = ManagedMemoryResource().allocate(PAGE)
address = root.handle

def chain(count, link, cls=ManagedBuffer, last=None):
    buffer = cls.from_handle(address, PAGE, owner=last or Last())
    for _ in range(count):
        buffer = cls.from_handle(address, PAGE, owner=link(buffer))
    return buffer
"""


class TestDeepChains:
    """Buffers that own buffers that own buffers: the C stack holds a few thousand at most."""

    @pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
    def test_end(self, link):
        run_to_the_end(CHAIN + f"buffer = chain(DEPTH, {link})\ndel buffer\nassert ended == [True]")

    @pytest.mark.parametrize(
        "end",
        [
            "buffer.close()",
            "with buffer:\n    pass",
            "last.buffer = buffer\ndel last, buffer\ngc.collect()",
            "threading.stack_size(64 * 1024)\n"
            "box = [buffer]\n"
            "del buffer, last\n"
            "thread = threading.Thread(target=box.clear)\nthread.start()\nthread.join()",
        ],
        ids=["close", "with", "garbage cycle", "thread with a small stack"],
    )
    @pytest.mark.parametrize("cls", ["ManagedBuffer", "Tagged"])
    def test_end_in_other_ways(self, end, cls):
        made = f"last = Last()\nbuffer = chain(DEPTH, lambda b: b, {cls}, last)\n"
        run_to_the_end(CHAIN + made + end + "\nlast = None\nassert ended == [True]")

    def test_end_on_several_threads_at_once(self):
        run_to_the_end(
            CHAIN
            + """
from races import race
boxes = [[chain(50_000, lambda b: b)] for _ in range(4)]
race(*(box.clear for box in boxes))
assert len(ended) == 4
"""
        )

    def test_code_that_runs_in_the_middle_may_end_others(self):
        """An owner deep inside the chain drops chains of its own."""
        run_to_the_end(
            CHAIN
            + """
class Middle(Holder):
    def __del__(self):
        del self.other[:]
        ended.append("middle")

count = 0
def link(buffer):
    global count
    count += 1
    if count % 5_000:
        return buffer
    middle = Middle(buffer)
    middle.other = [chain(2_000, lambda b: b)]
    return middle

buffer = chain(50_000, link)
del buffer
assert (ended.count("middle"), ended.count(True)) == (10, 11)
"""
        )


def test_at_exit():
    run_to_the_end(CHAIN + "buffer = chain(DEPTH, lambda b: b)")


def test_a_closed_buffer_keeps_no_array():
    """The closed buffer was the only owner of a large array."""
    np = pytest.importorskip("numpy")
    array = np.zeros(8 << 20, np.uint8)
    buffer = ManagedBuffer.from_handle(array.ctypes.data, array.nbytes, owner=array)
    gone = weakref.ref(array)
    del array
    buffer.close()
    assert gone() is None


def test_close_is_safe_without_a_driver():
    done = run_python(
        """
        import managedmem
        class Owner: pass
        buffer = managedmem.ManagedBuffer.from_handle(4096, 4096, owner=Owner())
        view = buffer[:16]
        view.close(); buffer.close()
        print(buffer.owner, view.owner, managedmem.ManagedBuffer.from_handle(4096, 1).owner)
        """,
        driver="/nonexistent/libcuda.so",
    )
    assert done.stdout == "None None None\n"
