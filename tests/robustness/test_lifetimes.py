"""Who keeps what alive: references of types, cycles, weak references, views, copies, exit.

Owns what happens to objects and their memory over time; what a single call does is tested beside
that call.
"""

import contextlib
import copy
import gc
import itertools
import pickle
import sys
import sysconfig
import types
import weakref

import pytest

import managedmem
from constants import PAGE
from contents import contents, pattern, write
from dlpack import consume, run_deleter
from foreign_objects import torch_device
from managedmem import (
    AppliedPolicy,
    Device,
    DeviceMemoryResource,
    Host,
    ManagedBuffer,
    ManagedMemoryResource,
    MigrationPolicy,
    PrefetchPlan,
    Stream,
    _managedmem,
)
from operations import NO_DRIVER, OPERATIONS
from programs import run_python
from world import EVERYTHING, World

ROUNDS = 1000
HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def view_and_drop(buffer):
    with memoryview(buffer):
        pass


def apply_for_a_while(buffer):
    with MigrationPolicy.read_duplicated().applied(buffer[:PAGE]):
        pass


# One maker per heap type of the extension: makes an object of it and lets it go again.
MAKERS = {
    "Host": lambda b: Host(numa_id=1),
    "Device": lambda b: Device(0),
    "Stream": lambda b: Stream().close(),
    "ManagedMemoryResource": lambda b: ManagedMemoryResource(),
    "ManagedBuffer": lambda b: ManagedBuffer.from_handle(b.handle, b.size),
    "AccessedBySetProxy": lambda b: b.accessed_by,
    "MemoryInfo": lambda b: Device(0).memory_info,
    "PrefetchPlan": lambda b: PrefetchPlan([(b, Host()), (memoryview(b), Device(0))]),
    "PlanEntry": lambda b: list(PrefetchPlan([(b, Host()), (b[:16], Device(0))])),
    "DeviceMemoryResource": lambda b: DeviceMemoryResource(0),
    "PeerAccessibleBySetProxy": lambda b: DeviceMemoryResource(0).peer_accessible_by,
    "PoolAttributes": lambda b: DeviceMemoryResource(0).attributes,
    "MigrationPolicy": lambda b: MigrationPolicy.prefer(Host()),
    "AppliedPolicy": lambda b: MigrationPolicy.prefer(Host()).applied([b, memoryview(b)]),
    "PageRun": lambda b: b.page_runs(),
    "DType": lambda b: (b.dtype, managedmem.DType("f4"), b.dtype == "f4", b.dtype == "f3"),
}
# Further ways to make and drop objects of those types.
MORE_MAKERS = {
    "allocated buffer": (ManagedBuffer, lambda b: ManagedMemoryResource().allocate(PAGE)),
    "closed buffer": (ManagedBuffer, lambda b: ManagedMemoryResource().allocate(PAGE).close()),
    "slice": (ManagedBuffer, lambda b: b[0:16]),
    "cast": (ManagedBuffer, lambda b: b.view("float32")),
    "memoryview": (ManagedBuffer, view_and_drop),
    "DLPack capsule": (ManagedBuffer, lambda b: b.__dlpack__()),
    "consumed capsule": (ManagedBuffer, lambda b: run_deleter(consume(b.__dlpack__()))),
    "array interface": (ManagedBuffer, lambda b: b.__cuda_array_interface__),
    "set operators": (managedmem.AccessedBySetProxy, lambda b: b.accessed_by | {Host()}),
    "set iteration": (managedmem.AccessedBySetProxy, lambda b: list(b.accessed_by)),
    "unfinished iteration": (managedmem.AccessedBySetProxy, lambda b: iter(b.accessed_by)),
    "all devices": (Device, lambda b: Device.all()),
    "unpickled host": (Host, lambda b: pickle.loads(pickle.dumps(Host(numa_id=1)))),
    "wrapped stream": (Stream, lambda b: Stream.from_handle(2)),
    "forgotten stream": (Stream, lambda b: Stream()),
    "executed plan": (PrefetchPlan, lambda b: PrefetchPlan([(memoryview(b), Host())]).execute()),
    "explained plan": (PrefetchPlan, lambda b: PrefetchPlan([(b, Host())] * 3).explain()),
    "cleared plan": (PrefetchPlan, lambda b: PrefetchPlan([(b, Host())] * 20).clear()),
    "fitted plan": (PrefetchPlan, lambda b: PrefetchPlan.fit([b, b[:16]], Device(0), 1)),
    "unfinished iteration of a plan": (PrefetchPlan, lambda b: iter(PrefetchPlan([(b, Host())]))),
    "pool memory": (ManagedBuffer, lambda b: DeviceMemoryResource(0).allocate(PAGE)),
    "pool": (ManagedMemoryResource, lambda b: ManagedMemoryResource(pooled=True)),
    "unpickled policy": (
        MigrationPolicy,
        lambda b: pickle.loads(pickle.dumps(MigrationPolicy.shared([Host()]))),
    ),
    "policy of memory": (MigrationPolicy, lambda b: MigrationPolicy.of([b])),
    "policy in force": (MigrationPolicy, apply_for_a_while),
    "policy that stays in force": (
        AppliedPolicy,
        lambda b: MigrationPolicy.prefer(Host()).applied(b[:PAGE]).__enter__(),
    ),
    "plan from a policy": (
        PrefetchPlan,
        lambda b: PrefetchPlan.from_policy([b, b[:16]], MigrationPolicy.prefer(Host())),
    ),
    "stream of pool memory": (
        Stream,
        lambda b: DeviceMemoryResource(0).allocate(PAGE, stream=Stream()),
    ),
}


def heap_types():
    return {
        name: value
        for name, value in vars(_managedmem).items()
        if isinstance(value, type) and value.__flags__ & HEAP_TYPE
    }


def references_grown(cls, make, buffer):
    """How many more references the type has after many rounds; a leak is one a round."""
    for _ in range(10):
        make(buffer)
    gc.collect()
    before = sys.getrefcount(cls)
    for _ in range(ROUNDS):
        make(buffer)
    gc.collect()
    return sys.getrefcount(cls) - before


class Owner:
    """Something that a buffer can keep alive, and that can point back at the buffer."""


class TestReferencesOfTypes:
    def test_every_heap_type_has_a_maker(self):
        plain = {n for n, t in heap_types().items() if not issubclass(t, BaseException)}
        assert plain == set(MAKERS)

    @pytest.mark.parametrize("name", MAKERS)
    def test_flat(self, name, buf):
        cls = getattr(_managedmem, name)
        buf.accessed_by.add(Host())
        assert references_grown(cls, MAKERS[name], buf) == 0

    @pytest.mark.parametrize("name", MORE_MAKERS)
    def test_flat_in_other_ways(self, name, buf):
        cls, make = MORE_MAKERS[name]
        buf.accessed_by.add(Host())
        assert references_grown(cls, make, buf) == 0

    @pytest.mark.parametrize(
        "error, provoke",
        [
            (TypeError, lambda b: managedmem.AccessedBySetProxy()),
            (TypeError, lambda b: ManagedBuffer()),
            (ValueError, lambda b: b.prefetch(None)),
            (TypeError, lambda b: b.prefetch(0)),
            (ValueError, lambda b: b.accessed_by.add(Host(numa_id=0))),
            (IndexError, lambda b: b[b.size]),
            (ValueError, lambda b: b[::2]),
            (ValueError, lambda b: ManagedMemoryResource().allocate(-1)),
            (ValueError, lambda b: PrefetchPlan([(b, Host())]).add(b, Host(), offset=b.size + 1)),
            (TypeError, lambda b: PrefetchPlan([(memoryview(b), Host()), (b, 0)])),
            (ValueError, lambda b: PrefetchPlan([(b[:1], Host())]).discard_prefetch()),
        ],
    )
    def test_flat_when_calls_fail(self, error, provoke, buf):
        def make(buffer):
            with pytest.raises(error):
                provoke(buffer)

        counts = {cls: sys.getrefcount(cls) for cls in heap_types().values()}
        for _ in range(ROUNDS // 10):
            make(buf)
        gc.collect()
        grown = {cls: sys.getrefcount(cls) - before for cls, before in counts.items()}
        # A leak is one reference a round; traceback machinery may hold one or two objects.
        assert max(grown.values()) < ROUNDS // 20

    @pytest.mark.emulator_only
    def test_flat_for_driver_errors(self, buf):
        from managedmem import emulator

        def make(buffer):
            emulator.fail("cuMemAdvise", code=719)
            try:
                buffer.read_mostly = True
            except managedmem.CUDAError:
                return
            raise AssertionError("the fault did not come through")

        assert references_grown(managedmem.CUDAError, make, buf) == 0

    def test_flat_for_none_and_small_objects(self, buf):
        """Results that are handed out as new references: one forgotten drop would show."""
        buf.preferred_location = None
        location = Host()
        before = sys.getrefcount(location), sys.getrefcount(buf)
        for _ in range(ROUNDS):
            buf.preferred_location = location
            buf.preferred_location  # noqa: B018
            buf.accessed_by.add(location)
            buf.accessed_by.discard(location)
            buf.prefetch(location)
            buf.last_prefetch_location  # noqa: B018
            managedmem.advise([buf], "set_read_mostly")
            managedmem.prefetch([buf], [location])
        after = sys.getrefcount(location), sys.getrefcount(buf)
        assert abs(after[0] - before[0]) < 5
        assert abs(after[1] - before[1]) < 5


@pytest.mark.emulator_only
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="from 3.12 on these objects are immortal")
class TestReferencesOfSingletons:
    """None and the bools are counted on 3.11, so a wheel built on a later Python must count too."""

    def test_flat_for_everything_that_the_fault_sweep_does(self):
        singletons = (None, True, False, NotImplemented, (), 0, "")

        for name, operation in OPERATIONS.items():
            if operation.devices > Device.count():
                continue
            w = World()
            before = None
            for n in range(60):
                if n == 10:
                    before = [sys.getrefcount(thing) for thing in singletons]
                operation.prepare(w)
                operation.act(w)
                w.drop_results()
            after = [sys.getrefcount(thing) for thing in singletons]
            w.end()
            assert all(abs(a - b) < 25 for a, b in zip(after, before, strict=True)), name

    @pytest.mark.parametrize("name", NO_DRIVER)
    def test_flat_for_reads(self, name):
        w = World()
        w.make_pools()
        read = NO_DRIVER[name]
        before = [sys.getrefcount(thing) for thing in (None, True, False)]
        for _ in range(50):
            read(w)
        after = [sys.getrefcount(thing) for thing in (None, True, False)]
        w.end()
        assert all(abs(a - b) < 25 for a, b in zip(after, before, strict=True))


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
        done = run_python(
            f"""
            import pickle
            from managedmem import Device, Host
            a, b, c = pickle.loads({data!r})
            assert a is Device(0) and b is Host(1) and c is Host.numa_current()
            print("same")
            """
        )
        assert done.stdout == "same\n"


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

    @pytest.mark.skipif(
        sysconfig.get_config_var("Py_GIL_DISABLED") == 1 and sys.version_info < (3, 14),
        reason="a free-threaded 3.13 makes classes immortal once a thread has run",
    )
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

    def test_cycle_through_a_view(self, buf):
        owner = Owner()
        owner.view = ManagedBuffer.from_handle(buf.handle, buf.size, owner=owner)[0:PAGE]
        gone = weakref.ref(owner)
        del owner
        gc.collect()
        assert gone() is None

    def test_cycle_through_the_live_set(self, buf):
        owner = Owner()
        owner.members = ManagedBuffer.from_handle(buf.handle, buf.size, owner=owner).accessed_by
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
        done = run_python(
            """
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
            print("fine")
            """
        )
        assert (done.stdout, done.stderr) == ("fine\n", "")

    def test_imported_twice_under_fresh_state(self):
        """A second module object in one interpreter has its own types and state."""
        done = run_python(
            """
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
            print("fine")
            """
        )
        assert (done.stdout, done.stderr) == ("fine\n", "")


def test_import_opens_no_driver():
    done = run_python(
        """
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
        """
    )
    assert done.stderr == ""


def test_makers_are_functions():
    """The tables above are read by name; a typo that made a maker a value would test nothing."""
    assert all(isinstance(m, types.FunctionType) for m in MAKERS.values())
    assert all(isinstance(m, types.FunctionType) for _, m in MORE_MAKERS.values())


# Each makes strings, lists, tuples or ints on its way.
CALLS = {
    "iteration": lambda w: list(w.members),
    "a refused target": lambda w: refused(lambda: managedmem.prefetch(object(), Host())),
    "a refused array": lambda w: refused(lambda: managedmem.advise(NO_ARRAY, "set_read_mostly")),
    "refused targets": lambda w: refused(lambda: managedmem.discard([w.a, object()])),
    "explain": lambda w: w.plan.explain(),
    "repr of a policy": lambda w: repr(EVERYTHING),
    "locations of a policy": lambda w: EVERYTHING.accessed_by,
    "a location of torch": lambda w: Device(TORCH_DEVICE),
    "a closed buffer": lambda w: refused(lambda: closed_buffer().discard()),
    "page_runs": lambda w: w.a.page_runs(),
    "plan entries": lambda w: list(w.plan),
    "dtype": lambda w: str(w.a.view("float32").dtype),
}
TORCH_DEVICE = torch_device("cuda", 0)
NO_ARRAY = types.SimpleNamespace(
    __cuda_array_interface__={
        "shape": (-1,),
        "typestr": "|u1",
        "data": (4096, False),
        "version": 3,
    }
)


class TestReferencesOfOrdinaryObjects:
    @pytest.mark.parametrize("name", CALLS)
    def test_no_block_stays(self, name):
        call = CALLS[name]
        w = World()
        blocks = []
        for _ in range(4):
            for _ in range(100):
                call(w)
            gc.collect()
            blocks.append(sys.getallocatedblocks())
        w.end()
        assert min(b - a for a, b in itertools.pairwise(blocks)) < 50

    def test_the_members_of_a_set_are_released(self):
        member = Host(1000)  # no other object has it
        policy = managedmem.MigrationPolicy(
            accessed_by=[Device(0), Host()], preferred_location=member
        )
        things = [member, Device(0), Host()]
        before = [sys.getrefcount(thing) for thing in things]
        for _ in range(100):
            assert len(policy.accessed_by) == 2
            assert policy.preferred_location is member
        assert [sys.getrefcount(thing) for thing in things] == before

    def test_the_name_of_a_foreign_module_is_released(self):
        name = "".join(["tor", "ch"])
        place = type("device", (), {"__module__": name, "type": "cuda", "index": 0})()
        assert type(place).__module__ is name
        before = sys.getrefcount(name)
        for _ in range(100):
            assert Device(place) is Device(0)
        assert sys.getrefcount(name) == before

    def test_the_module_of_another_library_is_released(self, monkeypatch):
        """cuda.core, which is looked at for the stream that a resource of others gets."""
        core = types.ModuleType("cuda.core")
        core.Stream = Stream

        class MemoryResource:
            def deallocate(self, ptr, size, *, stream):
                assert stream.handle in (0, 1)

        core.MemoryResource = MemoryResource
        monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.core", core)
        memory = managedmem.empty(1)
        before = sys.getrefcount(core)
        for _ in range(100):
            ManagedBuffer.from_handle(memory.handle, 1, mr=MemoryResource()).close()
        assert sys.getrefcount(core) == before
        memory.close()


def refused(call):
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        call()
        raise AssertionError("accepted")


def closed_buffer():
    buffer = managedmem.empty(1)
    buffer.close()
    return buffer


def test_the_callback_at_exit_is_held_by_atexit_only():
    run_python(
        """
        import atexit, gc
        import managedmem

        def callbacks():
            return [o for o in gc.get_objects() if getattr(o, "__name__", "") == "_end_interpreter"]

        assert len(callbacks()) == 1
        atexit._clear()
        gc.collect()
        assert not callbacks()
        """
    )


MANY_TARGETS = {
    "advise": "managedmem.advise(parts, 'set_read_mostly')",
    "prefetch": "managedmem.prefetch(parts, Host())",
    "discard": "managedmem.discard(parts)",
    "discard_prefetch": "managedmem.discard_prefetch(parts, Host())",
    "policy": "policy.apply(parts)",
    "policy for a block": "policy.applied(parts).__enter__().restore()",
    "reading a policy": "MigrationPolicy.of(parts)",
    "plan": "PrefetchPlan((part, Host()) for part in parts).execute()",
    "a refused one": "refused(lambda: managedmem.prefetch([*parts, other], Host()))",
    "advice that the driver refuses": "failing('cuMemAdvise', lambda: policy.apply(parts))",
}


@pytest.mark.emulator_only
@pytest.mark.parametrize("name", MANY_TARGETS)
def test_the_c_heap_stays_flat_with_many_targets(name):
    """More than fit into what is on the stack. A leaked table of them would be 200 KiB here."""
    run_python(
        f"""
        import contextlib, ctypes, gc
        import managedmem
        from managedmem import *
        PAGE = 4096

        class Info(ctypes.Structure):
            _fields_ = [(name, ctypes.c_size_t) for name in (
                "arena", "ordblks", "smblks", "hblks", "hblkhd",
                "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

        def in_use():
            gc.collect()
            emulator.clear_calls()
            heap = ctypes.CDLL(None).mallinfo2
            heap.restype = Info
            return heap().uordblks

        def refused(call):
            with contextlib.suppress(ValueError):
                call()

        def failing(function, call):
            emulator.fail(function, nth=20)
            with contextlib.suppress(CUDAError):
                call()

        buffer = empty(100 * PAGE)
        parts = [buffer[2 * i * PAGE :][:PAGE] for i in range(50)]
        other = bytearray(PAGE)
        policy = MigrationPolicy(read_mostly=True, preferred_location=Device(0))
        policies = [policy, MigrationPolicy()]
        for round in range(250):
            if round == 50:
                before = in_use()
            {MANY_TARGETS[name]}
            policies[1].apply(buffer)
            Device(0).sync()  # or queued work would add up
        assert in_use() - before < 200 * 200, in_use() - before
        """
    )
