"""The garbage collector sees the references that objects hold, their cycles, and the module.

A cycle with a reference that its type does not show to the collector is never freed.
"""

import gc
import sys

import pytest

import managedmem
from constants import IMMORTALIZES, PAGE
from managedmem import (
    DeviceMemoryResource,
    Host,
    ManagedBuffer,
    ManagedMemoryResource,
    MigrationPolicy,
    PrefetchPlan,
    Stream,
    _managedmem,
)
from managedmem.typing import DType
from programs import run_python


@pytest.fixture
def see_all():
    """conftest.py hides what stays from the collector, which hides it from `get_referrers` too."""
    gc.unfreeze()
    yield
    gc.freeze()  # or each later collection goes through all of them


def is_seen(held, holder):
    return any(referrer is holder for referrer in gc.get_referrers(held))


class TestReferences:
    """`gc.get_referrers` asks each object for what it refers to, until the first match."""

    def test_of_a_buffer(self, alloc):
        class Owner:
            pass

        buffer, owner = alloc(PAGE), Owner()
        wrapped = ManagedBuffer.from_handle(buffer.handle, PAGE, owner=owner)
        assert is_seen(buffer, buffer[:1])
        assert is_seen(owner, wrapped)
        assert is_seen(buffer.memory_resource, buffer)
        assert is_seen(buffer, buffer.accessed_by)

    def test_of_a_buffer_to_the_stream_of_another_library(self, device0):
        class Theirs:
            def __init__(self, stream):
                self.stream = stream

            def __cuda_stream__(self):
                return (0, self.stream.handle)

        with Stream() as stream:
            theirs = Theirs(stream)
            with DeviceMemoryResource(device0).allocate(PAGE, stream=theirs) as buffer:
                assert is_seen(theirs, buffer)

    def test_of_a_resource_to_none_but_its_peers_to_it(self, device0):
        with DeviceMemoryResource(device0) as resource:
            assert is_seen(resource, resource.peer_accessible_by)

    def test_of_a_plan(self, alloc):
        buffer = alloc(PAGE)
        plan = PrefetchPlan([(buffer, Host())])
        kept = [thing for thing in gc.get_referents(plan) if isinstance(thing, list)]
        assert len(kept) == 1 and is_seen(kept[0], plan)
        assert any(buffer in pair for pair in kept[0])

    def test_of_an_applied_policy(self, alloc):
        buffer, policy = alloc(PAGE), MigrationPolicy(read_mostly=True)
        applied = policy.applied([buffer, memoryview(buffer)])
        assert is_seen(policy, applied)
        assert self.seen_members(applied) == [ManagedBuffer, memoryview]
        with applied:  # keeps the buffers under its targets as well, and exports of the views
            assert self.seen_members(applied)[2:] == [ManagedBuffer, memoryview, memoryview]

    def seen_members(self, holder):
        """The types of what is in the tuples and lists that an object holds, in their order."""
        held = [thing for thing in gc.get_referents(holder) if type(thing) in (tuple, list)]
        assert all(is_seen(thing, holder) for thing in held)
        return [type(member) for thing in held for member in thing]

    @pytest.mark.parametrize(
        "make",
        [
            Host,
            lambda: Host(1),
            lambda: managedmem.Device(0),
            lambda: Stream.from_handle(0),
            ManagedMemoryResource,
            MigrationPolicy,
            lambda: DType("float32"),
            PrefetchPlan,
            lambda: managedmem.empty(1),
            lambda: managedmem.empty(1).accessed_by,
            lambda: MigrationPolicy().applied(managedmem.empty(1)),
        ],
        ids=[
            *["any host", "host", "device", "stream", "resource", "policy", "dtype", "plan"],
            *["buffer", "set", "applied policy"],
        ],
    )
    def test_of_every_object_to_its_type(self, make):
        thing = make()
        assert type(thing) in gc.get_referents(thing)

    @pytest.mark.skipif(IMMORTALIZES, reason="the collector does not see immortal modules")
    def test_of_the_module(self, see_all):
        held = gc.get_referents(_managedmem)
        assert {ManagedBuffer, DType, managedmem.CUDAError} <= {*filter(callable, held)}
        assert is_seen(ManagedBuffer, _managedmem)


END = """
import gc, sys, weakref, atexit
import managedmem
from managedmem import Device, Host, MigrationPolicy, PrefetchPlan
buffer = managedmem.empty((4, 4), "float32")
applied = MigrationPolicy(read_mostly=True).applied([buffer])
with applied:
    plan = PrefetchPlan([(buffer, Host(1)), (buffer[1:], Device(0))])
    plan.execute()
buffer.dtype, buffer.accessed_by, buffer.page_runs(), buffer.residency()
ends = [weakref.ref(sys.modules["managedmem._managedmem"])]
ends += [weakref.ref(kind) for kind in vars(ends[0]()).values() if isinstance(kind, type)]
names = [str(end()) for end in ends]
del buffer, applied, plan, managedmem, Device, Host, MigrationPolicy, PrefetchPlan
"""


class TestTheModule:
    def test_ends_with_its_interpreter(self):
        """Otherwise each subinterpreter that imported it would leave its types behind."""
        run_python(
            END
            + """
for name in [name for name in sys.modules if name.split(".")[0] == "managedmem"]:
    del sys.modules[name]
atexit._clear()  # as the interpreter's end does
for _ in range(3):
    gc.collect()
left = [name for name, end in zip(names, ends, strict=True) if end() is not None]
assert not left, left
"""
        )

    def test_can_be_imported_again(self):
        run_python(
            END
            + """
for name in [name for name in sys.modules if name.split(".")[0] == "managedmem"]:
    del sys.modules[name]
import managedmem
with managedmem.empty((4, 4), "float32") as buffer:
    buffer.prefetch(managedmem.Host())
    assert buffer.dtype == "float32" and type(buffer) is not ends[0]().ManagedBuffer
"""
        )

    def test_can_be_collected_from_while_it_is_imported(self):
        """The collector then visits types and a module that are not complete."""
        run_python("""
            import gc, sys
            from collections import abc  # so that the package does not import it below
            import contextlib, ctypes, dataclasses, typing
            gc.set_threshold(1, 1, 1)
            from managedmem import _managedmem
            gc.set_threshold(700, 10, 10)
            import managedmem
            assert managedmem.Host(1) is managedmem.Host(1)
            with managedmem.empty(4096) as buffer:
                assert buffer.read_mostly is False
        """)


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="counts of CPython's collector")
def test_a_dtype_survives_collections(alloc):
    """It is a str, whose objects are not collected, with a type that is."""
    name = alloc(PAGE).view("int16").dtype
    for _ in range(3):
        gc.collect()
    assert name == "int16" and repr(name) == "'int16'" and name is DType("i2")
