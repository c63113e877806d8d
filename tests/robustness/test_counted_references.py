"""References and blocks that calls leave behind: of types, singletons and ordinary objects."""

import contextlib
import gc
import itertools
import os
import pickle
import sys
import types

import pytest

import c_heap
import managedmem
from constants import PAGE
from dlpack import consume, run_deleter
from foreign_objects import torch_device
from frames_operations import memory_file
from managedmem import (
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
from managedmem.typing import AppliedPolicy
from operations import NO_DRIVER, OPERATIONS
from programs import run_python
from world import EVERYTHING, World

ROUNDS = 1000
HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def view_and_drop(buffer):
    with memoryview(buffer):
        pass


def apply_for_a_while(buffer):
    with MigrationPolicy.read_duplicated().applied(buffer[:PAGE]):
        pass


def use_a_working_set(buffer, kind=managedmem.WorkingSet):
    with kind(buffer.size, Device(0)) as working:
        group = working.add(buffer[:PAGE], "write")
        with group.use() as use:
            late = use.arrays
        with group.use_on_host() as home:
            return working.stats(), late is home


def use_and_collect(kind):
    """A set and its groups refer to each other."""

    def use_it(buffer):
        found = use_a_working_set(buffer, kind)
        gc.collect(0)
        return found

    return use_it


def fill_a_slab(buffer):
    slab = _managedmem._Slab(0, PAGE, True)
    slab.fill(0, PAGE, buffer[:PAGE])
    slab.fill(0, 3, b"abc")
    with contextlib.suppress(ValueError):
        slab.fill(0, 4, b"abc")


def share_a_slab(buffer):
    file = memory_file()
    try:
        slab = _managedmem._Slab.of_file(0, file)
    finally:
        os.close(file)
    slab.add_reader(0)
    with contextlib.suppress(ValueError):
        slab.add_reader(63)
    return slab.is_shared


def add_targets(buffer):
    frames, numbers = _managedmem._Frames(0, PAGE, False, True), []
    kept = frames.add_targets([buffer[:PAGE], memoryview(buffer)[PAGE : 2 * PAGE]], "read", numbers)
    for number in numbers:
        frames.remove([number])
    return kept


# One maker per heap type of the extension: makes an object of it and lets it go again.
MAKERS = {
    "_Slab": lambda b: _managedmem._Slab(0, 4096, True),
    "_Frames": lambda b: _managedmem._Frames(0, 4096, True),
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
    "Recorder": lambda b: managedmem._managedmem.Recorder(),
    "_Watch": lambda b: managedmem._managedmem._Watch(os.getpid()),
    "DType": lambda b: (b.dtype, managedmem.typing.DType("f4"), b.dtype == "f4", b.dtype == "f3"),
}
# Further ways to make and drop objects of those types.
MORE_MAKERS = {
    "filled slab": (_managedmem._Slab, fill_a_slab),
    "shared slab": (_managedmem._Slab, share_a_slab),
    "frames of managed memory": (_managedmem._Frames, add_targets),
    "working set": (_managedmem._Frames, use_and_collect(managedmem.WorkingSet)),
    "managed working set": (_managedmem._Frames, use_and_collect(managedmem.ManagedWorkingSet)),
    "allocated buffer": (ManagedBuffer, lambda b: ManagedMemoryResource().allocate(PAGE)),
    "closed buffer": (ManagedBuffer, lambda b: ManagedMemoryResource().allocate(PAGE).close()),
    "slice": (ManagedBuffer, lambda b: b[0:16]),
    "cast": (ManagedBuffer, lambda b: b.view("float32")),
    "memoryview": (ManagedBuffer, view_and_drop),
    "DLPack capsule": (ManagedBuffer, lambda b: b.__dlpack__()),
    "consumed capsule": (ManagedBuffer, lambda b: run_deleter(consume(b.__dlpack__()))),
    "array interface": (ManagedBuffer, lambda b: b.__cuda_array_interface__),
    "set operators": (managedmem.typing.AccessedBySetProxy, lambda b: b.accessed_by | {Host()}),
    "set iteration": (managedmem.typing.AccessedBySetProxy, lambda b: list(b.accessed_by)),
    "unfinished iteration": (managedmem.typing.AccessedBySetProxy, lambda b: iter(b.accessed_by)),
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
            (TypeError, lambda b: managedmem.typing.AccessedBySetProxy()),
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
    "residency": lambda w: managedmem.residency([w.a, w.b, memoryview(w.c)]).runs,
    "plan entries": lambda w: list(w.plan),
    "dtype": lambda w: str(w.a.view("float32").dtype),
}
TORCH_DEVICE = torch_device("cuda", 0)
NO_ARRAY = types.SimpleNamespace(
    __cuda_array_interface__={"shape": (-1,), "typestr": "|u1", "data": (4096, False), "version": 3}
)


class TestReferencesOfOrdinaryObjects:
    @pytest.mark.parametrize("name", CALLS)
    def test_no_block_stays(self, name):
        call = CALLS[name]
        w = World()
        blocks = []
        for _ in range(8):
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
        """cuda.core, which is looked at for the stream that another library's resource gets."""
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
@pytest.mark.skipif(not c_heap.reader(), reason="malloc() counts nothing")
@pytest.mark.parametrize("name", MANY_TARGETS)
def test_the_c_heap_stays_flat_with_many_targets(name, monkeypatch):
    """More than fit into what is on the stack. A leaked table of them would be 100 KiB a half.

    A table of Python's allocator, of 128 KiB, grows in one of them.
    """
    monkeypatch.setenv("GLIBC_TUNABLES", c_heap.KEEP_NO_FREED_BLOCKS)
    run_python(f"""
        import contextlib, gc
        import c_heap, managedmem
        from managedmem import *
        PAGE = 4096

        def in_use():
            gc.collect()
            emulator.clear_calls()
            return c_heap.reader()()

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
        found = []
        for round in range(250):
            if round in (50, 150):
                found.append(in_use())
            {MANY_TARGETS[name]}
            policies[1].apply(buffer)
            Device(0).sync()  # or queued work would add up
        before, between, after = *found, in_use()
        assert min(between - before, after - between) < 100 * 200, (*found, after)
    """)
