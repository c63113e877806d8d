"""The public operations, in tables for all tests that go through each of them.

`OPERATIONS` make driver calls, `NO_DRIVER` make none, `ERRORS` raise, `LIVES` begin and end
objects, `PROTOCOLS` are called by Python itself. Each works on a `World`; `everything()` has all
of them. `uncovered()` compares them with the stub and the types: no new operation is forgotten.
"""

import ast
import contextlib
import copy
import ctypes
import dataclasses
import gc
import operator
import pickle
import types
from collections.abc import Callable
from pathlib import Path

import numpy

import managedmem
from constants import PAGE
from contents import contents, pattern, write
from foreign_objects import CudaArray
from managedmem import (
    AccessedBySetProxy,
    CUDAError,
    Device,
    DeviceMemoryResource,
    Host,
    ManagedBuffer,
    ManagedMemoryResource,
    MigrationPolicy,
    PeerAccessibleBySetProxy,
    PoolAttributes,
    PrefetchPlan,
    Stream,
)

LAUNCH_FAILED = 719
OUT_OF_MEMORY = 2
PAGES = 4
SIZE = PAGES * PAGE
PATTERNS = [pattern(SIZE, start) for start in range(3)]
# Putting the caller's state back is tried a second time; a fault that passes is not an error.
REPEATED = {"cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode"}
# A query that only decides how to dispatch: without its answer the operation takes another way.
DISPATCH_HINT = {"cuMemRangeGetAttribute"}


class World:
    """Three buffers with contents and advice of their own, a view, a wrapper and a stream."""

    def __init__(self):
        resource = ManagedMemoryResource()
        self.a, self.b, self.c = self.buffers = [resource.allocate(SIZE) for _ in range(3)]
        self.stream = Stream()
        self.part = self.a[PAGE : 3 * PAGE]
        self.wrapped = ManagedBuffer.from_handle(self.c.handle, self.c.size)
        self.large = resource.allocate(1 << 20)
        self.plan = PrefetchPlan(zip(self.buffers, [ONE, ZERO, HOST], strict=True))
        self.plan.add(self.a, ONE, offset=PAGE, nbytes=PAGE + 100)
        self.large_plan = PrefetchPlan((self.large[i << 18 :][: 1 << 16], ZERO) for i in range(4))
        self.made = []
        for index, buffer in enumerate(self.buffers):
            write(buffer, PATTERNS[index])
        self.a.read_mostly = True
        self.a.preferred_location = Host()
        self.a.accessed_by = [Device(0), Host()]
        self.b.preferred_location = Device.all()[-1]
        self.b.accessed_by = [Device.all()[-1]]
        self.a.prefetch(Host())
        self.b.prefetch(Device.all()[-1])
        self.c.prefetch(Device(0))
        self.members = self.a.accessed_by
        self.pools = []

    def make_pools(self):
        """A managed pool and one of a device that lets all others in, with a buffer each."""
        if not self.pools:
            self.pool = ManagedMemoryResource(pooled=True)
            self.own = DeviceMemoryResource(ZERO)
            self.pools = [self.pool, self.own]
            self.pooled = self.pool.allocate(SIZE)
            self.plain = self.own.allocate(SIZE)
        self.peers = self.own.peer_accessible_by
        self.own.peer_accessible_by = [ONE]
        self.plain.copy_from(PATTERNS[0])

    def access(self):
        return [frozenset(self.peers)] if self.pools else []

    def advice(self):
        """All advice there is, page by page."""
        return [
            [run[2:-1] for run in b.page_runs() for _ in range(run.nbytes // PAGE)]
            for b in self.buffers
            if not b.is_closed
        ]

    def prefetched(self):
        return [b.last_prefetch_location for b in self.buffers if not b.is_closed]

    def bytes(self):
        return [contents(b) for b in self.buffers if not b.is_closed]

    def state(self):
        """What an operation that fails must leave as it was."""
        return {
            "advice": self.advice(),
            "prefetched": self.prefetched(),
            "bytes": self.bytes(),
            "access": self.access(),
        }

    def live_objects(self):
        """The live objects of the driver, without the events that a pool keeps for later frees."""
        from managedmem import emulator

        live = emulator.live()
        return live._replace(events=0) if self.pools else live

    def made_by(self, resource, size):
        """Memory of that resource, held until the counting is done."""
        self.keep(resource.allocate(size))
        return self.made[-1]

    def keep(self, thing):
        """Hold a result until the counting is done."""
        self.made.append(thing)

    def drop_results(self):
        for thing in self.made:
            if hasattr(thing, "close"):
                thing.close()
        self.made.clear()
        gc.collect()

    def end(self):
        self.drop_results()
        extra = [self.pooled, self.plain, *self.pools] if self.pools else []
        for thing in [*self.buffers, self.large, self.stream, *extra]:
            thing.close()


@dataclasses.dataclass
class Operation:
    """One use of the public surface, and what of the world it may change when it fails."""

    act: Callable
    covers: str = ""
    prepare: Callable = lambda w: None
    may_change: frozenset = frozenset()  # of "prefetched", "bytes"
    silent: frozenset = frozenset()  # functions whose failure need not surface
    faults: int = 1  # how many driver calls it makes at the least
    devices: int = 1  # how many it needs
    raises: type | None = None  # what it raises when nothing fails

    def make_world(self):
        """A world that is prepared for it."""
        w = World()
        self.prepare(w)
        return w

    def run(self, w):
        """Act; an operation that raises must do so."""
        if self.raises is None:
            return self.act(w)
        try:
            self.act(w)
        except self.raises:
            return None
        raise AssertionError(f"{self.raises.__name__} was not raised")


def setting(target, name, value):
    return lambda w: setattr(target(w), name, value)


def update_in_place(symbol, members):
    """`buffer.accessed_by |= members`, which is both an operator and an assignment."""

    def act(w):
        w.a.accessed_by = symbol(w.a.accessed_by, members)

    return act


def mix_pages(w):
    w.part.read_mostly = False
    w.part.preferred_location = ONE
    w.part.accessed_by = [ONE]


def apply_for_a_block(w):
    """Where putting back failed, the policy is still in force and restore() tries again."""
    block = EVERYTHING.applied(w.buffers)
    try:
        with block:
            pass
    except (CUDAError, MemoryError):
        if "in force" in repr(block):
            block.restore()
        raise


MOVES = frozenset({"prefetched"})
WIPES = frozenset({"prefetched", "bytes"})
WRITES = frozenset({"bytes"})
HOST, ZERO, ONE = Host(), Device(0), Device.all()[-1]
EVERYTHING = managedmem.MigrationPolicy(
    read_mostly=True, preferred_location=ZERO, accessed_by=[ZERO, HOST]
)

OPERATIONS = {
    # Queries.
    "get read_mostly": Operation(lambda w: w.a.read_mostly, "ManagedBuffer.read_mostly"),
    "get preferred_location": Operation(
        lambda w: w.a.preferred_location, "ManagedBuffer.preferred_location"
    ),
    "get last_prefetch_location": Operation(
        lambda w: w.a.last_prefetch_location, "ManagedBuffer.last_prefetch_location"
    ),
    "get of a view": Operation(lambda w: w.part.read_mostly),
    "is_managed": Operation(lambda w: w.wrapped.is_managed, "ManagedBuffer.is_managed"),
    "is_host_accessible": Operation(
        lambda w: w.wrapped.is_host_accessible, "ManagedBuffer.is_host_accessible"
    ),
    "is_device_accessible": Operation(
        lambda w: w.wrapped.is_device_accessible, "ManagedBuffer.is_device_accessible"
    ),
    "device_id": Operation(lambda w: w.wrapped.device_id, "ManagedBuffer.device_id"),
    "memoryview": Operation(lambda w: memoryview(w.wrapped).release()),
    "numpy": Operation(
        lambda w: w.keep(w.a.numpy(w.stream)), "ManagedBuffer.numpy", may_change=MOVES, faults=2
    ),
    # The part of buf.torch() and buf.cupy() that needs no library.
    "wait for an array": Operation(
        lambda w: managedmem._managedmem._synchronize(w.a, w.stream, False), "ManagedBuffer.torch"
    ),
    "numpy of a wrapper": Operation(
        lambda w: w.keep(w.wrapped.numpy()), may_change=MOVES, faults=3
    ),
    "len of the set": Operation(lambda w: len(w.members), "AccessedBySetProxy.__len__"),
    "iteration": Operation(lambda w: list(w.members), "AccessedBySetProxy.__iter__"),
    "in": Operation(lambda w: ZERO in w.members, "AccessedBySetProxy.__contains__"),
    "==": Operation(lambda w: w.members == {HOST}, "AccessedBySetProxy.__eq__"),
    "!=": Operation(lambda w: w.members != {HOST}, "AccessedBySetProxy.__ne__"),
    "<": Operation(lambda w: w.members < {HOST}, "AccessedBySetProxy.__lt__"),
    "<=": Operation(lambda w: w.members <= {HOST}, "AccessedBySetProxy.__le__"),
    ">": Operation(lambda w: w.members > {HOST}, "AccessedBySetProxy.__gt__"),
    ">=": Operation(lambda w: w.members >= {HOST}, "AccessedBySetProxy.__ge__"),
    "|": Operation(lambda w: w.members | {ONE}, "AccessedBySetProxy.__or__"),
    "&": Operation(lambda w: w.members & {ONE}, "AccessedBySetProxy.__and__"),
    "-": Operation(lambda w: w.members - {ONE}, "AccessedBySetProxy.__sub__"),
    "^": Operation(lambda w: w.members ^ {ONE}, "AccessedBySetProxy.__xor__"),
    "reversed |": Operation(lambda w: {ONE} | w.members, "AccessedBySetProxy.__ror__"),
    "reversed &": Operation(lambda w: {ONE} & w.members, "AccessedBySetProxy.__rand__"),
    "reversed -": Operation(lambda w: {ONE} - w.members, "AccessedBySetProxy.__rsub__"),
    "reversed ^": Operation(lambda w: {ONE} ^ w.members, "AccessedBySetProxy.__rxor__"),
    "| of two sets": Operation(lambda w: w.members | w.b.accessed_by, faults=2),
    "union": Operation(lambda w: w.members.union([ONE], [HOST]), "AccessedBySetProxy.union"),
    "intersection": Operation(
        lambda w: w.members.intersection([ONE]), "AccessedBySetProxy.intersection"
    ),
    "difference": Operation(lambda w: w.members.difference([ONE]), "AccessedBySetProxy.difference"),
    "symmetric_difference": Operation(
        lambda w: w.members.symmetric_difference([ONE]), "AccessedBySetProxy.symmetric_difference"
    ),
    "issubset": Operation(lambda w: w.members.issubset([ONE]), "AccessedBySetProxy.issubset"),
    "issuperset": Operation(lambda w: w.members.issuperset([ONE]), "AccessedBySetProxy.issuperset"),
    "isdisjoint": Operation(lambda w: w.members.isdisjoint([ONE]), "AccessedBySetProxy.isdisjoint"),
    "copy of the set": Operation(lambda w: w.members.copy(), "AccessedBySetProxy.copy"),
    # Advice: all or nothing.
    "set read_mostly": Operation(setting(lambda w: w.a, "read_mostly", False)),
    "set preferred_location": Operation(setting(lambda w: w.a, "preferred_location", ONE)),
    "unset preferred_location": Operation(setting(lambda w: w.a, "preferred_location", None)),
    "advice of a view": Operation(setting(lambda w: w.part, "read_mostly", False)),
    "advice of a wrapper": Operation(setting(lambda w: w.wrapped, "read_mostly", True), faults=2),
    "assign accessed_by": Operation(
        setting(lambda w: w.a, "accessed_by", [ONE]), "ManagedBuffer.accessed_by", faults=4
    ),
    "assign nothing to accessed_by": Operation(setting(lambda w: w.a, "accessed_by", []), faults=3),
    "add": Operation(lambda w: w.members.add(ONE), "AccessedBySetProxy.add"),
    "discard a member": Operation(lambda w: w.members.discard(HOST), "AccessedBySetProxy.discard"),
    "remove": Operation(
        lambda w: w.members.remove(HOST),
        "AccessedBySetProxy.remove",
        prepare=lambda w: w.members.add(HOST),
        faults=2,
    ),
    "pop": Operation(
        lambda w: w.members.pop(),
        "AccessedBySetProxy.pop",
        prepare=lambda w: w.members.update([ZERO, HOST]),
        faults=2,
    ),
    "clear": Operation(lambda w: w.members.clear(), "AccessedBySetProxy.clear", faults=3),
    "update": Operation(
        lambda w: w.b.accessed_by.update([ZERO], [HOST]), "AccessedBySetProxy.update", faults=3
    ),
    "intersection_update": Operation(
        lambda w: w.members.intersection_update([ONE]),
        "AccessedBySetProxy.intersection_update",
        faults=3,
    ),
    "difference_update": Operation(
        lambda w: w.members.difference_update([ZERO, HOST]),
        "AccessedBySetProxy.difference_update",
        faults=3,
    ),
    "symmetric_difference_update": Operation(
        lambda w: w.members.symmetric_difference_update([ONE, HOST]),
        "AccessedBySetProxy.symmetric_difference_update",
        faults=3,
    ),
    "|=": Operation(update_in_place(operator.ior, {ONE}), "AccessedBySetProxy.__ior__", faults=2),
    "&=": Operation(update_in_place(operator.iand, {ONE}), "AccessedBySetProxy.__iand__", faults=3),
    "-=": Operation(
        update_in_place(operator.isub, {ZERO, HOST}), "AccessedBySetProxy.__isub__", faults=3
    ),
    "^=": Operation(
        update_in_place(operator.ixor, {ONE, HOST}), "AccessedBySetProxy.__ixor__", faults=3
    ),
    "advise one": Operation(lambda w: managedmem.advise(w.a, "unset_read_mostly"), "advise"),
    "advise read_mostly on three": Operation(
        lambda w: managedmem.advise(w.buffers, "set_read_mostly"), faults=3
    ),
    "advise no read_mostly on three": Operation(
        lambda w: managedmem.advise(w.buffers, "unset_read_mostly"), faults=3
    ),
    "advise preferred_location on three": Operation(
        lambda w: managedmem.advise(w.buffers, "set_preferred_location", [ZERO, ZERO, HOST]),
        faults=3,
    ),
    "advise no preferred_location on three": Operation(
        lambda w: managedmem.advise(w.buffers, "unset_preferred_location"), faults=3
    ),
    "advise accessed_by on three": Operation(
        lambda w: managedmem.advise(w.buffers, "set_accessed_by", [ONE, HOST, ZERO]), faults=3
    ),
    "advise no accessed_by on three": Operation(
        lambda w: managedmem.advise(w.buffers, "unset_accessed_by", [ZERO, ONE, HOST]), faults=3
    ),
    "advise twice the same": Operation(
        lambda w: managedmem.advise([w.b, w.b, w.b], "set_preferred_location", [HOST, ZERO, ONE]),
        faults=3,
    ),
    "advise overlapping parts": Operation(
        lambda w: managedmem.advise([w.a, w.part], "set_preferred_location", [ZERO, ONE]), faults=2
    ),
    "page_runs": Operation(
        lambda w: w.a.page_runs(), "ManagedBuffer.page_runs", prepare=mix_pages, faults=PAGES
    ),
    # Policies: all or nothing, and what a block found is there again behind it.
    "policy of": Operation(
        lambda w: managedmem.MigrationPolicy.of(w.a), "MigrationPolicy.of", faults=PAGES
    ),
    # More ranges than the lists of them have room for at first.
    "policy of many parts": Operation(
        lambda w: EVERYTHING.apply([w.large[i << 15 :][:PAGE] for i in range(6)]), faults=9
    ),
    "policy apply": Operation(
        lambda w: EVERYTHING.apply(w.buffers),
        "MigrationPolicy.apply",
        prepare=mix_pages,
        faults=3 * PAGES + 4,
    ),
    "policy applied": Operation(
        apply_for_a_block, "AppliedPolicy.restore", prepare=mix_pages, faults=6 * PAGES + 8
    ),
    # Moves.
    "prefetch": Operation(lambda w: w.a.prefetch(ZERO), "ManagedBuffer.prefetch"),
    "prefetch on a stream": Operation(lambda w: w.a.prefetch(ZERO, stream=w.stream)),
    "prefetch of a view": Operation(lambda w: w.part.prefetch(ZERO)),
    "prefetch of a wrapper": Operation(lambda w: w.wrapped.prefetch(HOST), faults=2),
    "free prefetch of one": Operation(lambda w: managedmem.prefetch(w.a, ZERO), "prefetch"),
    "deferred prefetch": Operation(lambda w: managedmem.prefetch(w.a, ZERO, defer=True), faults=2),
    "prefetch of three by loop": Operation(
        lambda w: managedmem.prefetch(w.buffers, [ZERO, HOST, ONE], dispatch="loop"),
        may_change=MOVES,
        faults=3,
    ),
    "prefetch of three by batch": Operation(
        lambda w: managedmem.prefetch(w.buffers, [ZERO, HOST, ONE], dispatch="batch"), faults=1
    ),
    "prefetch of three by choice": Operation(
        lambda w: managedmem.prefetch(w.buffers, [ONE, ZERO, ONE], stream=w.stream, defer=True),
        may_change=MOVES,
        silent=DISPATCH_HINT,
        faults=2,
    ),
    # Discards: what was to be lost may be lost.
    "discard": Operation(lambda w: w.a.discard(), "ManagedBuffer.discard", may_change=WRITES),
    "discard on a stream": Operation(lambda w: w.a.discard(stream=w.stream), may_change=WRITES),
    "discard of a view": Operation(lambda w: w.part.discard(), may_change=WRITES),
    "discard_prefetch": Operation(
        lambda w: w.a.discard_prefetch(ZERO), "ManagedBuffer.discard_prefetch", may_change=WRITES
    ),
    "free discard": Operation(
        lambda w: managedmem.discard(w.buffers), "discard", may_change=WRITES
    ),
    "free discard by loop": Operation(
        lambda w: managedmem.discard(w.buffers, dispatch="loop"), may_change=WRITES, faults=3
    ),
    "free discard_prefetch": Operation(
        lambda w: managedmem.discard_prefetch(w.buffers, [HOST, ZERO, ONE], defer=True),
        "discard_prefetch",
        may_change=WIPES,
        silent=DISPATCH_HINT,
        faults=2,
    ),
    # The pages at the ends come first: no contents are lost before the discard itself.
    "discard_prefetch with edges": Operation(
        lambda w: w.a.range(100, 3 * PAGE).discard_prefetch(ZERO), may_change=MOVES, faults=3
    ),
    "free discard_prefetch with edges": Operation(
        lambda w: managedmem.discard_prefetch(
            [b.range(100, 3 * PAGE) for b in w.buffers], ONE, dispatch="batch", stream=w.stream
        ),
        may_change=MOVES,
        faults=7,
    ),
    "plan.discard_prefetch with edges": Operation(
        lambda w: PrefetchPlan((b.range(100, 3 * PAGE), ONE) for b in w.buffers).discard_prefetch(
            dispatch="batch"
        ),
        may_change=MOVES,
        faults=7,
    ),
    # Plans.
    "plan.add": Operation(lambda w: PrefetchPlan().add(w.wrapped, ZERO), "PrefetchPlan.add"),
    "a plan of pairs": Operation(lambda w: PrefetchPlan([(w.a, ZERO), (w.wrapped, ONE)])),
    "plan.execute": Operation(
        lambda w: w.plan.execute(),
        "PrefetchPlan.execute",
        may_change=MOVES,
        silent=DISPATCH_HINT,
        faults=3,
    ),
    "plan.execute on a stream": Operation(
        lambda w: w.plan.execute(stream=w.stream, defer=True, dispatch="batch"), faults=2
    ),
    "plan.discard_prefetch": Operation(
        lambda w: w.plan.discard_prefetch(defer=True),
        "PrefetchPlan.discard_prefetch",
        may_change=WIPES,
        silent=DISPATCH_HINT,
        faults=5,
    ),
    "plan.explain": Operation(
        lambda w: w.large_plan.explain(), "PrefetchPlan.explain", silent=DISPATCH_HINT, faults=3
    ),
    "plan.execute of large ranges": Operation(
        lambda w: w.large_plan.execute(), silent=DISPATCH_HINT, faults=4
    ),
    "plan of another library's memory": Operation(
        lambda w: PrefetchPlan([(memoryview(w.b), HOST)]).execute(), faults=3
    ),
    "PrefetchPlan.fit": Operation(
        lambda w: PrefetchPlan.fit(w.buffers, ONE, SIZE), "PrefetchPlan.fit"
    ),
    "PrefetchPlan.from_module": Operation(
        lambda w: PrefetchPlan.from_module(
            types.SimpleNamespace(parameters=lambda: [w.a], buffers=lambda: [w.wrapped]), ONE
        ),
        "PrefetchPlan.from_module",
    ),
    "PrefetchPlan.from_policy": Operation(
        lambda w: PrefetchPlan.from_policy(
            w.wrapped, types.SimpleNamespace(preferred_location=HOST)
        ),
        "PrefetchPlan.from_policy",
    ),
    # Contents.
    "fill": Operation(lambda w: w.a.fill(7), "ManagedBuffer.fill", may_change=WRITES),
    "fill two bytes": Operation(lambda w: w.a.fill(b"ab", stream=w.stream), may_change=WRITES),
    "fill four bytes": Operation(lambda w: w.part.fill(b"abcd"), may_change=WRITES),
    "copy_from of a producer's array": Operation(
        lambda w: w.a.copy_from(CudaArray(w.b, members={"stream": 1}), stream=w.stream),
        may_change=WRITES,
        silent=frozenset({"cuEventDestroy"}),
    ),
    "discard of a producer's array": Operation(
        lambda w: managedmem.discard(CudaArray(w.b, members={"stream": 1}), stream=w.stream),
        may_change=WRITES,
        silent=frozenset({"cuEventDestroy"}),
    ),
    "copy_from": Operation(
        lambda w: w.a.copy_from(w.b), "ManagedBuffer.copy_from", may_change=WRITES
    ),
    "copy_to": Operation(lambda w: w.a.copy_to(w.b), "ManagedBuffer.copy_to", may_change=WRITES),
    "copy_to a new buffer": Operation(lambda w: w.keep(w.a.copy_to()), faults=2),
    # Things that come into being.
    "allocate": Operation(
        lambda w: w.keep(ManagedMemoryResource().allocate(SIZE)), "ManagedMemoryResource.allocate"
    ),
    "allocate on a stream": Operation(
        lambda w: w.keep(ManagedMemoryResource().allocate(SIZE, stream=w.stream))
    ),
    "empty": Operation(lambda w: w.keep(managedmem.empty((2, 8), "float32")), "empty"),
    "Stream": Operation(lambda w: w.keep(Stream()), "Stream"),
    # Streams and devices.
    "stream.sync": Operation(lambda w: w.stream.sync(), "Stream.sync"),
    "stream.query": Operation(lambda w: w.stream.query(), "Stream.query"),
    "device.sync": Operation(lambda w: ONE.sync(), "Device.sync"),
    "memory_info": Operation(lambda w: ONE.memory_info, "Device.memory_info"),
}


def pooled(act, covers="", faults=1, devices=1):
    """An operation on the pools of the world."""
    return Operation(act, covers, lambda w: w.make_pools(), faults=faults, devices=devices)


def with_peers(act, covers="", faults=1):
    """An operation on the set of peers; a device alone has no peers to ask the driver about."""
    return pooled(act, covers, faults, devices=2)


def peer_operation(name, *arguments, faults=1):
    """A method of the set of peers."""
    return with_peers(
        lambda w: getattr(w.peers, name)(*arguments), f"PeerAccessibleBySetProxy.{name}", faults
    )


OPERATIONS |= {
    # Pools.
    "make a managed pool": Operation(
        lambda w: w.keep(ManagedMemoryResource(pooled=True, preferred_location=ZERO)), faults=2
    ),
    "make a device pool": Operation(lambda w: w.keep(DeviceMemoryResource(ONE)), faults=3),
    "allocate managed pool memory": pooled(lambda w: w.keep(w.pool.allocate(SIZE))),
    "allocate device memory": pooled(
        lambda w: w.keep(w.own.allocate(SIZE)), "DeviceMemoryResource.allocate"
    ),
    "allocate device memory on a stream": pooled(
        lambda w: w.keep(w.own.allocate(SIZE, stream=w.stream)), faults=2
    ),
    "trim a managed pool": pooled(lambda w: w.pool.trim(), "ManagedMemoryResource.trim"),
    "trim a device pool": pooled(lambda w: w.own.trim(PAGE), "DeviceMemoryResource.trim"),
    "set the deallocation stream": pooled(
        lambda w: w.pooled.set_deallocation_stream(0), "ManagedBuffer.set_deallocation_stream"
    ),
    "set release_threshold": pooled(
        lambda w: setattr(w.pool.attributes, "release_threshold", 0),
        "PoolAttributes.release_threshold",
    ),
    **{
        f"get {name}": pooled(
            lambda w, name=name: getattr(w.own.attributes, name), f"PoolAttributes.{name}"
        )
        for name in vars(PoolAttributes)
        if not name.startswith("_") and name != "release_threshold"
    },
    "fill device memory": pooled(lambda w: w.plain.fill(b"ab"), faults=2),
    "copy device memory on a stream": pooled(
        lambda w: w.pooled.copy_from(w.plain, stream=w.stream), faults=3
    ),
    "copy device memory to the host": pooled(lambda w: w.plain.copy_to(bytearray(SIZE)), faults=3),
    "copy device memory to a new buffer": pooled(lambda w: w.keep(w.plain.copy_to()), faults=3),
    "dlpack of device memory": pooled(lambda w: w.keep(w.plain.__dlpack__(stream=99)), faults=1),
    # Peers.
    "let in nobody": with_peers(
        lambda w: setattr(w.own, "peer_accessible_by", []),
        "DeviceMemoryResource.peer_accessible_by",
        faults=2,
    ),
    "len of the peers": with_peers(lambda w: len(w.peers)),
    "in the peers": with_peers(lambda w: ONE in w.peers),
    "iteration of the peers": with_peers(lambda w: list(w.peers)),
    **{
        f"peers.{name}": peer_operation(name, [ONE])
        for name in (
            "union",
            "intersection",
            "difference",
            "symmetric_difference",
            "issubset",
            "issuperset",
            "isdisjoint",
        )
    },
    "peers.copy": peer_operation("copy"),
    "peers.add": peer_operation("add", ONE, faults=2),
    "peers.update": peer_operation("update", [ONE], faults=2),
    "peers.discard": peer_operation("discard", ONE, faults=2),
    "peers.remove": peer_operation("remove", ONE, faults=2),
    "peers.pop": peer_operation("pop", faults=2),
    "peers.clear": peer_operation("clear", faults=2),
    "peers.intersection_update": peer_operation("intersection_update", [], faults=2),
    "peers.difference_update": peer_operation("difference_update", [ONE], faults=2),
    "peers.symmetric_difference_update": peer_operation(
        "symmetric_difference_update", [ONE], faults=3
    ),
}


def refused(read):
    """Call something that no buffer supports, and expect its NotImplementedError."""
    with contextlib.suppress(NotImplementedError):
        read()
        raise AssertionError("it was not refused")


# Operations without a driver call, as test_faults.py checks.
NO_DRIVER = {
    "ManagedBuffer.handle": lambda w: w.a.handle,
    "ManagedBuffer.size": lambda w: w.a.size,
    "ManagedBuffer.nbytes": lambda w: w.a.nbytes,
    "ManagedBuffer.shape": lambda w: w.a.shape,
    "ManagedBuffer.dtype": lambda w: w.a.dtype,
    "ManagedBuffer.itemsize": lambda w: w.a.itemsize,
    "ManagedBuffer.ndim": lambda w: w.a.ndim,
    "ManagedBuffer.strides": lambda w: w.a.strides,
    "ManagedBuffer.owner": lambda w: w.a.owner,
    "ManagedBuffer.memory_resource": lambda w: w.a.memory_resource,
    "ManagedBuffer.is_closed": lambda w: w.a.is_closed,
    "ManagedBuffer.is_mapped": lambda w: w.a.is_mapped,
    "ManagedBuffer.view": lambda w: w.a.view("float32"),
    "ManagedBuffer.range": lambda w: w.a.range(1, 2),
    "MigrationPolicy.is_default": lambda w: managedmem.MigrationPolicy().is_default,
    "MigrationPolicy.default": lambda w: managedmem.MigrationPolicy.default(),
    "MigrationPolicy.read_duplicated": lambda w: managedmem.MigrationPolicy.read_duplicated(),
    "MigrationPolicy.prefer": lambda w: managedmem.MigrationPolicy.prefer(ZERO),
    "MigrationPolicy.shared": lambda w: managedmem.MigrationPolicy.shared([ZERO]),
    "MigrationPolicy.read_mostly": lambda w: EVERYTHING.read_mostly,
    "MigrationPolicy.preferred_location": lambda w: EVERYTHING.preferred_location,
    "MigrationPolicy.accessed_by": lambda w: EVERYTHING.accessed_by,
    "MigrationPolicy.advice": lambda w: EVERYTHING.advice(),
    "MigrationPolicy.applied": lambda w: EVERYTHING.applied(w.buffers),
    "AppliedPolicy.policy": lambda w: EVERYTHING.applied(w.buffers).policy,
    "ManagedBuffer.from_handle": lambda w: ManagedBuffer.from_handle(w.a.handle, w.a.size),
    "ManagedBuffer.set_deallocation_stream": lambda w: w.a.set_deallocation_stream(w.stream),
    "ManagedBuffer.ipc_descriptor": lambda w: refused(lambda: w.a.ipc_descriptor),
    "ManagedBuffer.from_ipc_descriptor": (
        lambda w: refused(lambda: ManagedBuffer.from_ipc_descriptor(None, None))
    ),
    "ManagedBuffer.__cuda_array_interface__": lambda w: w.a.__cuda_array_interface__,
    "PrefetchPlan.nbytes": lambda w: w.plan.nbytes,
    "PrefetchPlan.clear": lambda w: w.plan.clear(),
    "PrefetchPlan.__getitem__": lambda w: (w.plan[-1], w.plan[1:], w.plan[::-2]),
    "PrefetchPlan.__copy__": lambda w: copy.copy(w.plan),
    "Stream.__eq__": lambda w: w.stream == Stream.from_handle(w.stream.handle),
    "Stream.__hash__": lambda w: hash(w.stream),
    "Stream.handle": lambda w: w.stream.handle,
    "Stream.is_closed": lambda w: w.stream.is_closed,
    "Stream.from_handle": lambda w: Stream.from_handle(2),
    "Host.numa_id": lambda w: Host(1).numa_id,
    "Host.is_numa_current": lambda w: Host().is_numa_current,
    "Host.numa_current": lambda w: Host.numa_current(),
    "Device.device_id": lambda w: ZERO.device_id,
    "ManagedMemoryResource.is_host_accessible": (
        lambda w: ManagedMemoryResource().is_host_accessible
    ),
    "ManagedMemoryResource.is_device_accessible": (
        lambda w: ManagedMemoryResource().is_device_accessible
    ),
    **{
        f"{cls.__name__}.{name}": lambda w, at=at, name=name: getattr(w.pools[at], name)
        for at, cls in enumerate((ManagedMemoryResource, DeviceMemoryResource))
        for name in (
            "is_closed",
            "is_managed",
            "supports_advice",
            "attributes",
            "handle",
            "is_handle_owned",
            "is_ipc_enabled",
            "is_mapped",
            "uuid",
        )
    },
    "ManagedMemoryResource.preferred_location": lambda w: w.pool.preferred_location,
    "DeviceMemoryResource.device_id": lambda w: w.own.device_id,
    "DeviceMemoryResource.is_host_accessible": lambda w: w.own.is_host_accessible,
    "DeviceMemoryResource.is_device_accessible": lambda w: w.own.is_device_accessible,
}


# Operations that raise without a fault.
PLAIN_MEMORY = ctypes.create_string_buffer(4 * PAGE)


def unmanaged():
    return ManagedBuffer.from_handle(ctypes.addressof(PLAIN_MEMORY), 2 * PAGE, owner=PLAIN_MEMORY)


class Vouching:
    """A resource that says that the host can use its memory."""

    is_host_accessible = True

    def deallocate(self, ptr, size, *, stream):
        pass


def vouched(**more):
    return ManagedBuffer.from_handle(ctypes.addressof(PLAIN_MEMORY), 2 * PAGE, **more)


CONSTANT = bytes(2 * PAGE)


def constant():
    """A buffer that is read-only, as its owner is."""
    view = ManagedBuffer.from_handle(
        ctypes.cast(CONSTANT, ctypes.c_void_p).value, len(CONSTANT), owner=CONSTANT
    )
    return ManagedBuffer.from_handle(view.handle, view.size, owner=view)


def on_unmanaged(act):
    """An operation on memory that is not managed, which raises after the guard was entered."""
    return Operation(lambda w: act(w, unmanaged()), raises=ValueError)


def closed(thing):
    thing.close()
    return thing


def on_closed_stream(act):
    return Operation(lambda w: act(w, closed(Stream())), raises=RuntimeError)


def wrong(act, error=TypeError):
    return Operation(act, raises=error)


def close_exported(w):
    with memoryview(w.b):
        w.b.close()


ON_PLAIN_MEMORY = {
    "read of plain memory": on_unmanaged(lambda w, b: b.read_mostly),
    "location of plain memory": on_unmanaged(lambda w, b: b.preferred_location),
    "set of plain memory": on_unmanaged(lambda w, b: len(b.accessed_by)),
    "advice on plain memory": on_unmanaged(lambda w, b: setattr(b, "read_mostly", True)),
    "prefetch of plain memory": on_unmanaged(lambda w, b: b.prefetch(ZERO, stream=w.stream)),
    "discard of plain memory": on_unmanaged(lambda w, b: b.discard(stream=w.stream)),
    "discard_prefetch of plain memory": on_unmanaged(
        lambda w, b: b.discard_prefetch(ZERO, stream=w.stream)
    ),
    "numpy of plain memory": Operation(lambda w: unmanaged().numpy(w.stream)),
    "runs of plain memory": on_unmanaged(lambda w, b: b.page_runs()),
    "dlpack of plain memory": Operation(lambda w: unmanaged().__dlpack__()),
    "interface of plain memory": Operation(
        lambda w: unmanaged().__cuda_array_interface__, raises=BufferError
    ),
    "policy on plain memory": on_unmanaged(lambda w, b: EVERYTHING.apply([w.a, b])),
    "advise of plain memory": on_unmanaged(
        lambda w, b: managedmem.advise([w.a, b], "set_read_mostly")
    ),
}
HOST_ACCESS = {
    "host view for an owner": Operation(lambda w: bytes(unmanaged())),
    "host view for the caller": Operation(lambda w: bytes(vouched(is_host_accessible=True))),
    "host view for a resource": Operation(lambda w: bytes(vouched(mr=Vouching()))),
    "host access of an owner": Operation(lambda w: unmanaged().is_host_accessible),
    "copy from plain memory": Operation(
        lambda w: w.part.copy_from(unmanaged(), stream=w.stream), may_change=WRITES
    ),
    "copy to plain memory": Operation(lambda w: w.part.copy_to(unmanaged(), stream=w.stream)),
    "host view of an unknown address": wrong(
        lambda w: memoryview(ManagedBuffer.from_handle(8, PAGE)), BufferError
    ),
    "host view beyond the end": wrong(
        lambda w: memoryview(ManagedBuffer.from_handle(w.a.handle, 1 << 40)), BufferError
    ),
    "copy of an unknown address": wrong(
        lambda w: w.part.copy_from(ManagedBuffer.from_handle(8, 2 * PAGE)), ValueError
    ),
    "host view of read-only memory": Operation(lambda w: bytes(constant())),
    "tensor of read-only memory": Operation(lambda w: constant().__dlpack__(max_version=(1, 0))),
    "discard of read-only memory": wrong(lambda w: constant().discard(), ValueError),
    "fill of read-only memory": wrong(lambda w: constant().fill(1), ValueError),
    "discard of several, one read-only": wrong(
        lambda w: managedmem.discard([w.a, constant()]), ValueError
    ),
}
ON_CLOSED_STREAMS = {
    "prefetch on a closed stream": on_closed_stream(lambda w, s: w.a.prefetch(ZERO, stream=s)),
    "discard on a closed stream": on_closed_stream(lambda w, s: w.a.discard(stream=s)),
    "copy on a closed stream": on_closed_stream(lambda w, s: w.a.copy_from(w.b, stream=s)),
    "fill on a closed stream": on_closed_stream(lambda w, s: w.a.fill(1, stream=s)),
    "numpy on a closed stream": on_closed_stream(lambda w, s: w.a.numpy(s)),
    "prefetch of many on a closed stream": on_closed_stream(
        lambda w, s: managedmem.prefetch(w.buffers, ZERO, stream=s)
    ),
    "plan on a closed stream": on_closed_stream(lambda w, s: w.plan.execute(stream=s)),
    "close on a closed stream": on_closed_stream(lambda w, s: w.a.close(s)),
    "sync of a closed stream": on_closed_stream(lambda w, s: s.sync()),
    "query of a closed stream": on_closed_stream(lambda w, s: s.query()),
    "allocate on a closed stream": on_closed_stream(lambda w, s: w.pool.allocate(PAGE, stream=s)),
}
ON_CLOSED_STREAMS["allocate on a closed stream"].prepare = lambda w: w.make_pools()
ERRORS = {
    **ON_PLAIN_MEMORY,
    **HOST_ACCESS,
    **ON_CLOSED_STREAMS,
    "an int as a location": wrong(lambda w: w.a.prefetch(0)),
    "no location": wrong(lambda w: w.a.prefetch(None), ValueError),
    "a location too many": wrong(
        lambda w: managedmem.prefetch(w.buffers, [HOST, ZERO]), ValueError
    ),
    "a device too many": wrong(lambda w: Device(99), ValueError),
    "a float as a device": wrong(lambda w: Device(1.5), ValueError),
    "a negative node": wrong(lambda w: Host(-1), ValueError),
    "an unknown advice": wrong(lambda w: managedmem.advise(w.a, "cherish"), ValueError),
    "a word as a stream": wrong(lambda w: w.a.discard(stream="fast")),
    "a word as a target": wrong(lambda w: managedmem.discard([w.a, "b"])),
    "no targets": wrong(lambda w: managedmem.discard([]), ValueError),
    "a large byte": wrong(lambda w: w.a.fill(256), OverflowError),
    "three bytes": wrong(lambda w: w.a.fill(b"abc"), ValueError),
    "copy of another size": wrong(lambda w: w.a.copy_from(w.part), ValueError),
    "an index too large": wrong(lambda w: w.a[SIZE], IndexError),
    "every second byte": wrong(lambda w: w.a[::2], ValueError),
    "an unknown dtype": wrong(lambda w: w.a.view("f5")),
    "a shape that does not fit": wrong(lambda w: w.a.view("u1", (3, 5)), ValueError),
    "a range that is too long": wrong(lambda w: w.a.range(PAGE, SIZE), ValueError),
    "an unknown keyword": wrong(lambda w: w.a.prefetch(ZERO, speed=9)),
    "a missing argument": wrong(lambda w: w.a.prefetch()),
    "an attribute that is fixed": wrong(lambda w: setattr(w.a, "size", 1), AttributeError),
    "a set with a node": wrong(lambda w: w.members.add(Host(1)), ValueError),
    "remove what is not in the set": wrong(lambda w: w.b.accessed_by.remove(HOST), KeyError),
    "an unhashable set": wrong(lambda w: hash(w.members)),
    "an unhashable set of peers": Operation(
        lambda w: hash(w.peers), prepare=lambda w: w.make_pools(), raises=TypeError
    ),
    **{
        f"construct {cls.__name__}": Operation(
            lambda w, cls=cls: cls(), cls.__name__, raises=TypeError
        )
        for cls in (
            ManagedBuffer,
            AccessedBySetProxy,
            PeerAccessibleBySetProxy,
            PoolAttributes,
            managedmem.AppliedPolicy,
        )
    },
    "use of a closed buffer": wrong(
        lambda w: closed(managedmem.empty(PAGE)).prefetch(HOST), RuntimeError
    ),
    "use of a closed pool": wrong(
        lambda w: closed(ManagedMemoryResource(pooled=True)).allocate(PAGE), RuntimeError
    ),
    "close under an export": wrong(close_exported, BufferError),
    "too much memory": wrong(lambda w: ManagedMemoryResource().allocate(1 << 60), MemoryError),
    "an interface without data": wrong(
        lambda w: managedmem.discard(
            types.SimpleNamespace(__cuda_array_interface__={"shape": (1,)})
        )
    ),
    "a resource without deallocate": wrong(
        lambda w: ManagedBuffer.from_handle(w.a.handle, SIZE, mr=object())
    ),
    "a policy for words": wrong(lambda w: MigrationPolicy(accessed_by=["x"])),
    "a plan of words": wrong(lambda w: PrefetchPlan(["x"])),
    "a plan of wrong pairs": wrong(lambda w: PrefetchPlan([(w.a, ZERO), (w.b, "x")])),
    "peers that are hosts": Operation(
        lambda w: w.peers.add(HOST), prepare=lambda w: w.make_pools(), raises=TypeError
    ),
    "deallocate what is not there": wrong(
        lambda w: ManagedMemoryResource().deallocate(8, PAGE), CUDAError
    ),
}


# Operations that begin and end objects.
class Lender:
    """Another library's memory resource."""

    def __init__(self):
        self.inner = ManagedMemoryResource()
        self.lent = {}

    def allocate(self, size, *, stream=None):
        buffer = self.inner.allocate(size)
        self.lent[buffer.handle] = buffer
        return ManagedBuffer.from_handle(buffer.handle, size, mr=self)

    def deallocate(self, ptr, size, *, stream):
        self.lent.pop(ptr).close()


class Lends:
    """A memory resource whose memory stays."""

    def deallocate(self, ptr, size, *, stream):
        pass


class Named(ManagedBuffer):
    """A subclass, whose objects have a dict."""


def close_pool_memory(w):
    buffer = w.pool.allocate(PAGE, stream=w.stream)
    buffer[:8].fill(1)
    buffer.close()


def close_under_views(w):
    buffer = managedmem.empty((4, PAGE))
    row = buffer[1]
    buffer.close()
    row.close()


def drop_a_cycle(w):
    buffer = Named.from_handle(w.a.handle, SIZE, owner=w.b)
    buffer.itself = buffer
    del buffer
    gc.collect()


def chain(w):
    buffer = w.a
    for _ in range(40):
        buffer = ManagedBuffer.from_handle(buffer.handle, SIZE, owner=buffer)


def restore_a_policy(w):
    applied = EVERYTHING.applied([w.a, w.part])
    applied.__enter__()
    try:
        applied.restore()
    except (CUDAError, MemoryError):
        applied.restore()
        raise


def leave_with(make):
    """A `with` block around an object that is made for it, and closed at its end."""

    def act(w):
        with make(w):
            pass

    return act


def in_pools(act, covers="", **more):
    return Operation(act, covers, prepare=lambda w: w.make_pools(), **more)


LIVES = {
    "Host": Operation(lambda w: Host(1000), "Host"),
    "Host.numa_current again": Operation(lambda w: Host(is_numa_current=True), "Host"),
    "Device again": Operation(lambda w: Device(0), "Device"),
    "current Device": Operation(lambda w: Device(), "Device"),
    "Device.all": Operation(lambda w: Device.all(), "Device.all Device.count"),
    "Device.set_current": Operation(lambda w: ZERO.set_current(), "Device.set_current"),
    **{
        f"Device.{name}": Operation(lambda w, name=name: getattr(ZERO, name), f"Device.{name}")
        for name in (
            "concurrent_managed_access",
            "direct_managed_mem_access_from_host",
            "host_numa_id",
            "managed_memory",
            "memory_pools_supported",
            "name",
            "pageable_memory_access",
            "pageable_memory_access_uses_host_page_tables",
            "uuid",
        )
    },
    "driver_info": Operation(lambda w: managedmem.driver_info(), "driver_info"),
    "DType": Operation(lambda w: managedmem.DType("float32"), "DType"),
    "a stream's life": Operation(lambda w: Stream().close(), "Stream.close"),
    "a stream dropped": Operation(lambda w: w.a.prefetch(ZERO, stream=Stream()), may_change=MOVES),
    "a resource": Operation(lambda w: ManagedMemoryResource(), "ManagedMemoryResource"),
    "close a resource": Operation(
        lambda w: ManagedMemoryResource().close(), "ManagedMemoryResource.close"
    ),
    "close a managed pool": Operation(lambda w: ManagedMemoryResource(pooled=True).close()),
    "close a device pool": Operation(
        lambda w: DeviceMemoryResource(ONE).close(),
        "DeviceMemoryResource DeviceMemoryResource.close",
    ),
    "drop a pool before its block": Operation(
        lambda w: w.keep(ManagedMemoryResource(pooled=True).allocate(PAGE))
    ),
    "close a buffer": Operation(lambda w: managedmem.empty(PAGE).close(), "ManagedBuffer.close"),
    "close a buffer on a stream": Operation(lambda w: managedmem.empty(PAGE).close(w.stream)),
    "close pool memory": in_pools(close_pool_memory),
    "set another deallocation stream": in_pools(
        lambda w: w.pool.allocate(PAGE).set_deallocation_stream(w.stream)
    ),
    "close a root under a view": Operation(close_under_views),
    "drop a garbage cycle": Operation(drop_a_cycle),
    "a chain of owners": Operation(chain),
    "from_handle of a subclass": Operation(
        lambda w: Named.from_handle(w.a.handle, SIZE, owner=w.a)
    ),
    "lent memory": Operation(lambda w: Lender().allocate(PAGE).close(w.stream)),
    "lent memory dropped": Operation(lambda w: Lender().allocate(PAGE)[8:].prefetch(HOST)),
    "copy_to lent memory": Operation(
        lambda w: w.keep(w.made_by(Lender(), SIZE).copy_to()), may_change=WRITES
    ),
    "deallocate": Operation(
        lambda w: ManagedMemoryResource().deallocate(0, 0, stream=w.stream),
        "ManagedMemoryResource.deallocate",
    ),
    "deallocate from a pool": in_pools(
        lambda w: w.own.deallocate(8, PAGE), "DeviceMemoryResource.deallocate", raises=CUDAError
    ),
    "ManagedMemoryResource.device_id": in_pools(
        lambda w: (w.pool.device_id, w.pool.handle), "ManagedMemoryResource.device_id"
    ),
    "from_handle on a stream": Operation(
        lambda w: ManagedBuffer.from_handle(w.a.handle, SIZE, mr=Lends(), stream=w.stream)
    ),
    "MigrationPolicy": Operation(
        lambda w: MigrationPolicy(preferred_location=HOST, accessed_by=[ZERO]), "MigrationPolicy"
    ),
    "restore a policy": Operation(restore_a_policy),
    "PrefetchPlan": Operation(lambda w: PrefetchPlan(), "PrefetchPlan"),
    "a plan that grows": Operation(
        lambda w: PrefetchPlan((w.a[i * 64 :][:64], HOST) for i in range(40))
    ),
    "clear a plan": Operation(lambda w: PrefetchPlan([(w.a, ZERO)]).clear()),
    "many targets": Operation(
        lambda w: managedmem.prefetch(
            (b[i * PAGE :] for b in w.buffers for i in range(PAGES)), HOST
        ),
        may_change=MOVES,
    ),
    "policy on many targets": Operation(
        lambda w: EVERYTHING.apply([b[i * PAGE :] for b in w.buffers for i in range(PAGES)])
    ),
    "many foreign targets": Operation(
        lambda w: managedmem.prefetch(
            [CudaArray(b, members={"stream": 1}) for b in w.buffers], HOST
        ),
        may_change=MOVES,
    ),
    "an error object": Operation(
        lambda w: [
            error("x")
            for error in (
                CUDAError,
                managedmem.CUDAOutOfMemoryError,
                managedmem.DriverNotFoundError,
                managedmem.DriverTooOldError,
                managedmem.ExportError,
                managedmem.IPCNotSupportedError,
            )
        ],
        "CUDAError CUDAOutOfMemoryError DriverNotFoundError DriverTooOldError ExportError "
        "IPCNotSupportedError",
    ),
    "_register_preset": Operation(
        lambda w: managedmem._managedmem._register_preset(HOST, [ZERO], True, False),
        "_register_preset",
    ),
    "_select_driver": wrong(lambda w: managedmem._managedmem._select_driver("cuda"), RuntimeError),
    "_synchronize": Operation(
        lambda w: managedmem._managedmem._synchronize(w.a, None, True), "_synchronize"
    ),
}
LIVES["_select_driver"].covers = "_select_driver"


# Operations that Python's own functions and operators call.
def same_set(kind, members, other):
    """The protocols of a set of locations that the other tables do not have."""
    name = f"{kind}.{{}}".format

    def on(act, covers, may_raise=None, may_change=frozenset()):
        return Operation(
            lambda w: act(members(w), other),
            " ".join(map(name, covers.split())),
            prepare=lambda w: w.make_pools(),
            raises=may_raise,
            may_change=may_change,
            devices=2,
        )

    def put_back(change):
        """Change the set, and make it what it was; a failure between these leaves it changed."""

        def act(s, o):
            before = s.copy()
            change(s, o)
            s.update(before)
            s.intersection_update(before)

        return act

    operators = [
        "lt",
        "le",
        "gt",
        "ge",
        "eq",
        "ne",
        "or",
        "and",
        "sub",
        "xor",
        "ror",
        "rand",
        "rsub",
        "rxor",
    ]
    in_place = ["ior", "iand", "isub", "ixor"]
    return {
        **{
            f"{kind} {symbol}": on(
                lambda s, o, symbol=symbol: getattr(s, f"__{symbol}__")({o}), f"__{symbol}__"
            )
            for symbol in operators
        },
        **{
            f"{kind} {symbol}": on(
                put_back(lambda s, o, symbol=symbol: getattr(s, f"__{symbol}__")({o})),
                f"__{symbol}__",
                may_change=frozenset({"advice", "access"}),
            )
            for symbol in in_place
        },
        f"{kind} repr": on(lambda s, o: repr(s), "__repr__"),
        f"{kind} iter": on(lambda s, o: list(s), "__iter__"),
        f"{kind} len": on(lambda s, o: len(s), "__len__"),
        f"{kind} in": on(lambda s, o: o in s, "__contains__"),
        f"{kind} copy.copy": on(lambda s, o: copy.copy(s), "__copy__"),
        f"{kind} copy.deepcopy": on(lambda s, o: copy.deepcopy(s), "__deepcopy__"),
        f"{kind} pickle": on(lambda s, o: pickle.dumps(s), "__reduce__", TypeError),
    }


def reduce(thing, covers):
    return Operation(lambda w: pickle.loads(pickle.dumps(thing(w))), covers)


PROTOCOLS = {
    **same_set("AccessedBySetProxy", lambda w: w.members, ZERO),
    **same_set("PeerAccessibleBySetProxy", lambda w: w.peers, ONE),
    "buffer repr": Operation(lambda w: repr(w.part), "ManagedBuffer.__repr__"),
    "buffer len": Operation(lambda w: len(w.a), "ManagedBuffer.__len__"),
    "buffer bool": Operation(lambda w: bool(w.a), "ManagedBuffer.__bool__"),
    "buffer int": Operation(lambda w: int(w.a), "ManagedBuffer.__int__", raises=TypeError),
    "buffer float": Operation(lambda w: float(w.a), "ManagedBuffer.__float__", raises=TypeError),
    "buffer in": Operation(lambda w: 1 in w.a, "ManagedBuffer.__contains__", raises=TypeError),
    "buffer item =": Operation(
        lambda w: operator.setitem(w.a, 0, 5), "ManagedBuffer.__setitem__", raises=TypeError
    ),
    "del buffer item": Operation(
        lambda w: operator.delitem(w.a, 0), "ManagedBuffer.__delitem__", raises=TypeError
    ),
    "buffer index": Operation(lambda w: w.a.view("u1", (4, PAGE))[-1], "ManagedBuffer.__getitem__"),
    "buffer slice": Operation(lambda w: w.a[8:-8][1:]),
    "buffer view": Operation(lambda w: w.a.view("f4", (PAGES, PAGE // 4))),
    "buffer iter": Operation(lambda w: list(w.a.view("u1", (4, PAGE))), "ManagedBuffer.__iter__"),
    "buffer copy": Operation(
        lambda w: w.keep(copy.copy(w.a)), "ManagedBuffer.__copy__", may_change=MOVES
    ),
    "buffer deepcopy": Operation(
        lambda w: w.keep(copy.deepcopy(w.part)), "ManagedBuffer.__deepcopy__", may_change=MOVES
    ),
    "buffer pickle": Operation(
        lambda w: pickle.dumps(w.a), "ManagedBuffer.__reduce__", raises=TypeError
    ),
    "buffer with": Operation(
        leave_with(lambda w: managedmem.empty(PAGE)),
        "ManagedBuffer.__enter__ ManagedBuffer.__exit__",
    ),
    "buffer del": Operation(lambda w: managedmem.empty(PAGE).__del__(), "ManagedBuffer.__del__"),
    "array interface": Operation(
        lambda w: w.part.view("f4").__cuda_array_interface__,
        "ManagedBuffer.__cuda_array_interface__",
    ),
    "buffer array": Operation(
        lambda w: w.keep(w.a.__array__()), "ManagedBuffer.__array__", may_change=MOVES
    ),
    "array of other type": Operation(lambda w: w.keep(w.a.__array__("float32")), may_change=MOVES),
    "numpy copy": Operation(lambda w: w.keep(w.a.numpy(copy=True)), may_change=MOVES),
    "dlpack": Operation(lambda w: w.a.__dlpack__(), "ManagedBuffer.__dlpack__"),
    "dlpack of a version": Operation(lambda w: w.a.__dlpack__(max_version=(1, 1), stream=1)),
    "dlpack for the host": Operation(
        lambda w: w.a.view("u2", (PAGES, PAGE // 2)).__dlpack__(dl_device=(1, 0))
    ),
    "dlpack copy": Operation(lambda w: w.a.__dlpack__(copy=True)),
    "dlpack to a consumer": Operation(lambda w: w.keep(numpy.from_dlpack(w.a)), may_change=MOVES),
    "dlpack device": Operation(
        lambda w: w.a.__dlpack_device__(), "ManagedBuffer.__dlpack_device__"
    ),
    "host view": Operation(
        lambda w: memoryview(w.a.view("f4", (PAGES, PAGE // 4))).cast("B").release(),
        "ManagedBuffer.__buffer__ ManagedBuffer.__release_buffer__",
    ),
    "location repr": Operation(
        lambda w: (repr(HOST), repr(Host(1)), repr(ZERO)), "Host.__repr__ Device.__repr__"
    ),
    "host pickle": reduce(lambda w: Host(1), "Host.__reduce__"),
    "device pickle": reduce(lambda w: ZERO, "Device.__reduce__"),
    "policy pickle": reduce(lambda w: EVERYTHING, "MigrationPolicy.__reduce__"),
    "policy repr": Operation(lambda w: repr(EVERYTHING), "MigrationPolicy.__repr__"),
    "policy hash": Operation(lambda w: hash(EVERYTHING), "MigrationPolicy.__hash__"),
    "policy ==": Operation(
        lambda w: [
            MigrationPolicy.default() == EVERYTHING,
            MigrationPolicy.default() != EVERYTHING,
            MigrationPolicy.__lt__(EVERYTHING, EVERYTHING),
        ],
        "MigrationPolicy.__eq__ MigrationPolicy.__ne__ MigrationPolicy.__lt__ "
        "MigrationPolicy.__le__ MigrationPolicy.__gt__ MigrationPolicy.__ge__",
    ),
    "applied policy": Operation(
        apply_for_a_block,
        "AppliedPolicy.__enter__ AppliedPolicy.__exit__",
    ),
    "applied policy repr": Operation(
        lambda w: repr(EVERYTHING.applied([w.a])), "AppliedPolicy.__repr__"
    ),
    "applied policy pickle": Operation(
        lambda w: pickle.dumps(EVERYTHING.applied([w.a])),
        "AppliedPolicy.__reduce__",
        raises=TypeError,
    ),
    "plan repr": Operation(lambda w: repr(w.plan), "PrefetchPlan.__repr__"),
    "plan iter": Operation(lambda w: [entry.target for entry in w.plan], "PrefetchPlan.__iter__"),
    "plan len": Operation(lambda w: len(w.plan), "PrefetchPlan.__len__"),
    "stream repr": Operation(lambda w: repr(w.stream), "Stream.__repr__"),
    "stream protocol": Operation(lambda w: w.stream.__cuda_stream__(), "Stream.__cuda_stream__"),
    "stream with": Operation(leave_with(lambda w: Stream()), "Stream.__enter__ Stream.__exit__"),
    "stream ==": Operation(
        lambda w: (w.stream != w.stream, Stream.__lt__(w.stream, w.stream)),
        "Stream.__ne__ Stream.__lt__ Stream.__le__ Stream.__gt__ Stream.__ge__",
    ),
    "resource repr": in_pools(
        lambda w: (repr(w.pool), repr(w.own), repr(w.own.attributes)),
        "ManagedMemoryResource.__repr__ DeviceMemoryResource.__repr__ PoolAttributes.__repr__",
    ),
    "resource with": Operation(
        leave_with(lambda w: ManagedMemoryResource(pooled=True)),
        "ManagedMemoryResource.__enter__ ManagedMemoryResource.__exit__",
    ),
    "device resource with": Operation(
        leave_with(lambda w: DeviceMemoryResource(ZERO)),
        "DeviceMemoryResource.__enter__ DeviceMemoryResource.__exit__",
    ),
    "dtype": Operation(
        lambda w: (
            w.a.dtype == "uint8",
            w.a.dtype != "f4",
            managedmem.DType.__lt__(w.a.dtype, "x"),
            hash(w.a.dtype),
        ),
        "DType.__eq__ DType.__ne__ DType.__lt__ DType.__le__ DType.__gt__ DType.__ge__ "
        "DType.__hash__",
    ),
    "dtype pickle": reduce(lambda w: w.a.dtype, "DType.__reduce__"),
    "cupy is missing": Operation(lambda w: arrays(w.a.cupy), "ManagedBuffer.cupy"),
    "torch is missing": Operation(lambda w: arrays(w.a.torch), "ManagedBuffer.torch"),
}


def arrays(make):
    """An array of another library, or the error that says that it cannot be made."""
    with contextlib.suppress(ImportError, RuntimeError, BufferError, ValueError):
        make()


def everything():
    """Every operation of all tables, by name."""
    reads = {f"read {name}": in_pools(act, name) for name, act in NO_DRIVER.items()}
    tables = [OPERATIONS, reads, ERRORS, LIVES, PROTOCOLS]
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names)), "two operations have one name"
    return {name: operation for table in tables for name, operation in table.items()}


# --- completeness -------------------------------------------------------------------------------

EXTENSION = managedmem._managedmem
# Written by CPython, from the fields of a tuple or the base class alone.
INHERITED = {"MemoryInfo", "PageRun", "PlanEntry"}
NO_CALL = {"__doc__", "__module__", "__weakref__", "__new__", "__match_args__", "__dict__"}


def stub_names():
    """The classes and functions of the stub, and `class.member`."""
    stub = ast.parse(Path(EXTENSION.__file__).with_name("_managedmem.pyi").read_text())
    for node in stub.body:
        hints = {ast.unparse(d) for d in getattr(node, "decorator_list", ())}
        if "type_check_only" in hints:
            continue
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield node.name
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    yield f"{node.name}.{member.name}"


def type_names():
    """The same of the types, which have more special methods than the stub."""
    for name, thing in vars(EXTENSION).items():
        if isinstance(thing, type):
            yield name
            for member, value in vars(thing).items():
                if value is not None:
                    yield f"{name}.{member}"
        elif isinstance(thing, types.BuiltinFunctionType) and not name.startswith("__"):
            yield name


def uncovered():
    """Names of the surface that no operation covers."""
    surface = {
        name
        for name in {*stub_names(), *type_names()}
        if name.partition(".")[0] not in INHERITED
        and name.rpartition(".")[2] not in NO_CALL
        and not (name.endswith("__hash__") and "SetProxy" in name)
    }
    return surface - {name for o in everything().values() for name in o.covers.split()}
