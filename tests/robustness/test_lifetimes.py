"""Objects that keep others alive: interning, cycles, weak references, views, copies, exit.

Owns what happens to objects and their memory over time; what a single call does is tested beside
that call.
"""

import copy
import gc
import pickle
import weakref

import pytest

import managedmem
from constants import IMMORTALIZES, PAGE
from contents import contents, pattern, write
from dlpack import consume, run_deleter
from managedmem import Device, Host, ManagedBuffer, ManagedMemoryResource, Stream
from programs import run_python
from whole_programs import run_to_the_end

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


class Owner:
    """Something that a buffer can keep alive, and that can point back at the buffer."""


class TestInterning:
    def test_locations_come_back_as_themselves(self):
        assert Host() is Host()
        assert Host(1) is Host(numa_id=1)
        assert Host.numa_current() is Host(is_numa_current=True)
        assert Device(0) is Device(0) is Device.all()[0]

    def test_identity_survives_collection(self):
        """An interned object may go when nobody holds it; while one is held there is just one."""
        kept = Host(numa_id=1)
        gc.collect()
        assert Host(numa_id=1) is kept

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    @pytest.mark.parametrize(
        "location", [Host(), Host(0), Host(1), Host.numa_current(), Device(0)], ids=repr
    )
    def test_pickling_gives_the_same_object(self, location, protocol):
        assert pickle.loads(pickle.dumps(location, protocol)) is location

    @pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
    @pytest.mark.parametrize(
        "location", [Host(), Host(1), Host.numa_current(), Device(0)], ids=repr
    )
    def test_copying_gives_the_same_object(self, location, duplicate):
        assert duplicate(location) is location
        assert duplicate([location])[0] is location

    def test_pickled_device_arrives_in_another_process(self):
        data = pickle.dumps([Device(0), Host(1), Host.numa_current()])
        run_to_the_end(f"""
            import pickle
            from managedmem import Device, Host
            a, b, c = pickle.loads({data!r})
            assert a is Device(0) and b is Host(1) and c is Host.numa_current()
        """)


class TestNoCopies:
    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_buffers_are_not_picklable(self, buf, protocol):
        with pytest.raises(TypeError):
            pickle.dumps(buf, protocol)

    def test_subclasses_are_not_picklable_either(self, buf):
        with pytest.raises(TypeError):
            pickle.dumps(Sub.from_handle(buf.handle, buf.size))

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_streams_and_sets_are_not_picklable(self, buf, stream, protocol):
        for thing in (stream, buf.accessed_by):
            with pytest.raises(TypeError):
                pickle.dumps(thing, protocol)


class Sub(ManagedBuffer):
    """A subclass with an attribute and an override, at module level as pickle wants it."""

    label = "none"

    def prefetch(self, location, **kwargs):
        self.label = f"to {location!r}"
        return super().prefetch(location, **kwargs)


class TestSubclasses:
    def test_from_handle_gives_the_subclass(self, buf):
        sub = Sub.from_handle(buf.handle, buf.size)
        assert type(sub) is Sub
        assert isinstance(sub, ManagedBuffer)

    def test_overrides_and_attributes_work(self, buf):
        sub = Sub.from_handle(buf.handle, buf.size)
        sub.prefetch(Host())
        assert sub.label == "to Host()"
        assert sub.last_prefetch_location is Host()
        sub.anything = 1
        assert sub.anything == 1

    def test_is_refused_direct_construction_too(self):
        with pytest.raises(TypeError, match="from_handle"):
            Sub()

    def test_free_functions_take_it(self, buf):
        sub = Sub.from_handle(buf.handle, buf.size)
        managedmem.advise([sub], "set_read_mostly")
        assert buf.read_mostly is True

    def test_weak_references_and_collection(self, buf):
        sub = Sub.from_handle(buf.handle, buf.size)
        sub.me = sub
        gone = weakref.ref(sub)
        del sub
        gc.collect()
        assert gone() is None

    @pytest.mark.skipif(IMMORTALIZES, reason="this Python makes classes immortal")
    def test_the_class_itself_can_be_collected(self, buf):
        local = type("Local", (ManagedBuffer,), {})
        local.from_handle(buf.handle, buf.size)
        gone = weakref.ref(local)
        del local
        gc.collect()
        assert gone() is None

    def test_slots_without_a_dict(self, buf):
        class Slotted(ManagedBuffer):
            __slots__ = ("tag",)

        slotted = Slotted.from_handle(buf.handle, buf.size)
        slotted.tag = 7
        assert slotted.tag == 7

    def test_finalizer_runs_once_and_may_use_the_buffer(self, buf):
        seen = []

        class Last(ManagedBuffer):
            def __del__(self):
                seen.append(self.size)

        Last.from_handle(buf.handle, buf.size)
        gc.collect()
        assert seen == [buf.size]

    def test_locations_cannot_be_subclassed_into_impostors(self):
        """Identity is equality for locations; a subclass instance would break that silently."""
        for cls in (Host, Device):
            try:
                sub = type("Sub", (cls,), {})
            except TypeError:
                continue
            assert sub(0) == cls(0)


class TestCycles:
    def test_owner_pointing_back_is_collected(self, buf):
        owner = Owner()
        owner.buffer = ManagedBuffer.from_handle(buf.handle, buf.size, owner=owner)
        gone = weakref.ref(owner)
        del owner
        assert gone() is not None, "without the collector the cycle must still be there"
        gc.collect()
        assert gone() is None

    @pytest.mark.parametrize(
        "link", [lambda b: b[0:PAGE], lambda b: b.accessed_by], ids=["a view", "the live set"]
    )
    def test_cycle_through(self, buf, link):
        owner = Owner()
        owner.link = link(ManagedBuffer.from_handle(buf.handle, buf.size, owner=owner))
        gone = weakref.ref(owner)
        del owner
        gc.collect()
        assert gone() is None

    @pytest.mark.emulator_only
    def test_a_collected_cycle_frees_its_memory(self):
        from managedmem import emulator

        class Node(ManagedBuffer):
            pass

        before = emulator.live()
        base = ManagedMemoryResource().allocate(PAGE)
        node = Node.from_handle(base.handle, base.size, owner=base)
        node.me = node
        del base, node
        assert emulator.live().allocations == before.allocations + 1
        gc.collect()
        assert emulator.live() == before

    def test_the_collector_sees_every_reference(self, buf):
        owner = Owner()
        wrapped = ManagedBuffer.from_handle(buf.handle, buf.size, owner=owner)
        assert owner in gc.get_referents(wrapped)
        assert wrapped in gc.get_referents(wrapped.accessed_by)
        for thing in (wrapped, wrapped.accessed_by, Host(), Device(0)):
            assert gc.is_tracked(thing)
            assert type(thing) in gc.get_referents(thing)


class TestWeakReferences:
    @pytest.mark.parametrize(
        "make",
        [
            lambda b: ManagedBuffer.from_handle(b.handle, b.size),
            lambda b: b[0:PAGE],
            lambda b: Stream.from_handle(2),
            lambda b: Host(numa_id=12345),
        ],
        ids=["buffer", "view", "stream", "host"],
    )
    def test_fire_when_the_object_goes(self, make, buf):
        fired = []
        thing = make(buf)
        reference = weakref.ref(thing, fired.append)
        assert reference() is thing
        del thing
        gc.collect()
        assert fired == [reference] or (reference() is not None and isinstance(reference(), Host))

    def test_work_as_dictionary_keys(self):
        table = weakref.WeakKeyDictionary({Host(): 1, Device(0): 2})
        assert table[Host()] == 1
        assert table[Device(0)] == 2


class TestWhatKeepsMemory:
    def test_a_slice_keeps_its_parent(self, alloc):
        parent = ManagedMemoryResource().allocate(4 * PAGE)
        write(parent, pattern(4 * PAGE))
        part = parent[PAGE : 2 * PAGE]
        del parent
        gc.collect()
        assert contents(part) == pattern(4 * PAGE)[PAGE : 2 * PAGE]
        part.prefetch(Host())

    def test_a_slice_of_a_slice(self):
        parent = ManagedMemoryResource().allocate(4 * PAGE)
        write(parent, pattern(4 * PAGE))
        part = parent[PAGE : 3 * PAGE][PAGE : 2 * PAGE]
        del parent
        gc.collect()
        assert contents(part) == pattern(4 * PAGE)[2 * PAGE : 3 * PAGE]

    def test_a_memoryview_keeps_the_buffer(self):
        buffer = ManagedMemoryResource().allocate(PAGE)
        write(buffer, 7)
        view = memoryview(buffer)
        del buffer
        gc.collect()
        assert view.tobytes() == b"\7" * PAGE
        view.release()

    def test_the_live_set_keeps_the_buffer(self):
        buffer = ManagedMemoryResource().allocate(PAGE)
        members = buffer.accessed_by
        del buffer
        gc.collect()
        members.add(Host())
        assert members == {Host()}

    def test_an_unfinished_iterator_is_safe_after_close(self, alloc):
        buffer = alloc(PAGE)
        buffer.accessed_by = [Host(), Device(0)]
        iterator = iter(buffer.accessed_by)
        buffer.close()
        assert set(iterator) <= {Host(), Device(0)}

    def test_the_owner_lives_as_long_as_the_buffer_and_its_views(self, buf):
        owner = Owner()
        gone = weakref.ref(owner)
        wrapped = ManagedBuffer.from_handle(buf.handle, buf.size, owner=owner)
        part = wrapped[0:PAGE]
        assert wrapped.owner is owner
        del owner, wrapped
        gc.collect()
        assert gone() is not None
        del part
        gc.collect()
        assert gone() is None

    def test_closing_a_wrapper_does_not_free(self, buf):
        write(buf, 3)
        ManagedBuffer.from_handle(buf.handle, buf.size).close()
        assert contents(buf) == b"\3" * buf.size

    @pytest.mark.emulator_only
    def test_a_consumed_tensor_outlives_its_buffer(self):
        from managedmem import emulator

        before = emulator.live().allocations
        buffer = ManagedMemoryResource().allocate(PAGE)
        tensor = consume(buffer.__dlpack__())
        del buffer
        gc.collect()
        assert emulator.live().allocations == before + 1
        run_deleter(tensor)
        assert emulator.live().allocations == before

    @pytest.mark.emulator_only
    def test_an_unconsumed_capsule_lets_go(self):
        from managedmem import emulator

        before = emulator.live().allocations
        capsule = ManagedMemoryResource().allocate(PAGE).__dlpack__()
        assert emulator.live().allocations == before + 1
        del capsule
        assert emulator.live().allocations == before

    def test_a_resource_may_go_before_its_buffers(self):
        buffer = ManagedMemoryResource().allocate(PAGE)
        gc.collect()
        buffer.read_mostly = True
        assert isinstance(buffer.memory_resource, ManagedMemoryResource)


EXITS = {
    "nothing used": "",
    "a live buffer": "b = ManagedMemoryResource().allocate(1 << 20)",
    "a buffer in a cycle": "b = [ManagedMemoryResource().allocate(4096)]; b.append(b)",
    "a live memoryview": "v = memoryview(ManagedMemoryResource().allocate(4096))",
    "a live capsule": "c = ManagedMemoryResource().allocate(4096).__dlpack__()",
    "a consumed capsule never released": (
        "t = dlpack.consume(ManagedMemoryResource().allocate(4096).__dlpack__())"
    ),
    "a live stream with work": (
        "s = Stream(); b = ManagedMemoryResource().allocate(4096); b.prefetch(Host(), stream=s)"
    ),
    "a live set and iterator": (
        "p = ManagedMemoryResource().allocate(4096).accessed_by; p.add(Host()); i = iter(p)"
    ),
    "a view of a closed buffer": (
        "b = ManagedMemoryResource().allocate(8192); v = b[0:4096]; b.close()"
    ),
    "an attribute of the module": (
        "managedmem.kept = ManagedMemoryResource().allocate(4096)\n"
        "managedmem._managedmem.kept = managedmem.kept[0:16]"
    ),
    "a finalizer that uses the buffer": (
        "class Late:\n"
        "    def __init__(self): self.b = ManagedMemoryResource().allocate(4096)\n"
        "    def __del__(self): self.b.read_mostly = True; self.b.close()\n"
        "late = Late()\nlate.me = late"
    ),
    "an atexit handler": (
        "import atexit\nb = ManagedMemoryResource().allocate(4096)\natexit.register(b.close)"
    ),
    "a daemon thread at work": (
        "import threading\n"
        "b = ManagedMemoryResource().allocate(1 << 20)\n"
        "started = threading.Event()\n"
        "def work():\n"
        "    while True:\n"
        "        b.prefetch(Host()); b.prefetch(Device(0)); b.read_mostly = True\n"
        "        ManagedMemoryResource().allocate(4096)\n"
        "        started.set()\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "assert started.wait(30)"
    ),
    "a thread that ends last": (
        "import threading, time\n"
        "b = ManagedMemoryResource().allocate(4096)\n"
        "def work():\n"
        "    time.sleep(0.2); b.prefetch(Host()); b.close()\n"
        "threading.Thread(target=work).start()"
    ),
    "os._exit": "import os\nb = ManagedMemoryResource().allocate(4096)\nos._exit(0)",
    "sys.exit in a block": (
        "import sys\nwith ManagedMemoryResource().allocate(4096) as b:\n    sys.exit(0)"
    ),
}


class TestExit:
    @pytest.mark.parametrize("name", EXITS)
    def test_interpreter_ends_quietly(self, name):
        done = run_python(
            "import managedmem, dlpack\n"
            "from managedmem import Device, Host, ManagedBuffer, ManagedMemoryResource, Stream\n"
            + EXITS[name],
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")

    def test_module_and_types_can_be_dropped(self):
        run_to_the_end("""
            import gc, sys, weakref
            import managedmem
            from managedmem import Host, Device, ManagedMemoryResource
            b = ManagedMemoryResource().allocate(4096)
            b.accessed_by.add(Host())
            kept = Device(0)
            for name in [n for n in sys.modules if n.split(".")[0] == "managedmem"]:
                del sys.modules[name]
            del managedmem, Host, Device, ManagedMemoryResource
            gc.collect()
            # The objects still work without their module's name anywhere.
            b.prefetch(kept)
            assert len(b.accessed_by) == 1
            b.close()
            del b, kept
            gc.collect()
        """)

    def test_imported_twice_under_fresh_state(self):
        """A second module object in one interpreter has its own types and state."""
        run_to_the_end("""
            import sys
            from managedmem import _managedmem as first
            del sys.modules["managedmem._managedmem"]
            import importlib
            second = importlib.import_module("managedmem._managedmem")
            assert second is not first
            assert second.Host is not first.Host
            a, b = (m.ManagedMemoryResource().allocate(4096) for m in (first, second))
            a.accessed_by.add(first.Host()); b.accessed_by.add(second.Host())
            b.close(); a.close()
        """)


def test_import_opens_no_driver():
    run_to_the_end("""
        import managedmem
        with open("/proc/self/maps") as maps:
            text = maps.read()
        assert "libcuda" not in text and "managedmem_emulator" not in text
        managedmem.Host(1)
        with open("/proc/self/maps") as maps:
            text = maps.read()
        assert "libcuda" not in text and "managedmem_emulator" not in text
        managedmem.Device.count()
        with open("/proc/self/maps") as maps:
            assert "managedmem_emulator" in maps.read()
    """)


def test_the_callback_at_exit_is_held_by_atexit_only():
    run_to_the_end("""
        import atexit, gc
        import managedmem

        def callbacks():
            return [o for o in gc.get_objects() if getattr(o, "__name__", "") == "_end_interpreter"]

        assert len(callbacks()) == 1
        atexit._clear()
        gc.collect()
        assert not callbacks()
    """)
