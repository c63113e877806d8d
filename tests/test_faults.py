"""Every driver call of every public operation fails in turn.

For each operation the first, second, third ... driver call is made to fail until the operation
gets through without meeting the fault. After each failure the right exception must have come, with
the failing function's name; nothing may be leaked, the thread's context must be as before, advice
must be as before, and the same operation must succeed when tried again.
"""

import contextlib
import copy
import dataclasses
import gc
import inspect
import operator
import re
import types
from collections.abc import Callable

import pytest

import managedmem
from helpers import PAGE, CudaArray, contents, pattern, raw_driver, run_python, settle, write
from managedmem import (
    AccessedBySetProxy,
    CUDAError,
    CUDAOutOfMemoryError,
    Device,
    DeviceMemoryResource,
    Host,
    ManagedBuffer,
    ManagedMemoryResource,
    PeerAccessibleBySetProxy,
    PoolAttributes,
    PrefetchPlan,
    Stream,
)

pytestmark = pytest.mark.emulator_only

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
    except CUDAError:
        if "in force" in repr(block):
            block.restore()
        raise


# The operations that advise, for the sweep in which advice acts and then fails.
ADVISING = {
    *("set read_mostly", "set preferred_location", "unset preferred_location", "advice of a view"),
    *("advice of a wrapper", "assign accessed_by", "assign nothing to accessed_by", "add"),
    *("discard a member", "remove", "pop", "clear", "update", "intersection_update"),
    *("difference_update", "symmetric_difference_update", "|=", "&=", "-=", "^=", "advise one"),
    *("advise read_mostly on three", "advise no read_mostly on three"),
    *("advise preferred_location on three", "advise no preferred_location on three"),
    *("advise accessed_by on three", "advise no accessed_by on three", "advise twice the same"),
    *("advise overlapping parts", "policy apply", "policy applied"),
}
MOVING_CALLS = (
    "cuMemPrefetchAsync",
    "cuMemPrefetchBatchAsync",
    "cuMemDiscardBatchAsync",
    "cuMemDiscardAndPrefetchBatchAsync",
)
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
    """An operation on the set of peers; of a device alone, no driver is asked about any."""
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
MOVING = [
    name
    for name in OPERATIONS
    if re.match(r"(free |deferred |plan\.)?(prefetch|discard|execute|numpy)", name)
    and name != "discard a member"
]

# These make no driver call at all; that is tested, not believed.
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
    "ManagedBuffer.ipc_descriptor": lambda w: expect_error(lambda: w.a.ipc_descriptor),
    "ManagedBuffer.from_ipc_descriptor": (
        lambda w: expect_error(lambda: ManagedBuffer.from_ipc_descriptor(None, None))
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
# Swept by tests of their own.
ELSEWHERE = {
    "ManagedBuffer.close",
    "Stream.close",
    "ManagedMemoryResource.deallocate",
    "Device.set_current",
    "ManagedBuffer.cupy",
    "ManagedMemoryResource.device_id",
    "ManagedMemoryResource.close",
    "DeviceMemoryResource.close",
    "DeviceMemoryResource.deallocate",
}
# Reads of facts that never change may be remembered from before, so these are swept in a process
# of their own: see TestFirstUse.
FIRST_USE = {
    "Device.count": "Device.count()",
    "Device": "Device(1)",
    "Device.all": "Device.all()",
    "current device": "Device()",
    "Device.name": "Device(1).name",
    "Device.uuid": "Device(1).uuid",
    "Device.memory_info": "Device(1).memory_info",
    "Device.host_numa_id": "Device(1).host_numa_id",
    "Device.concurrent_managed_access": "Device(1).concurrent_managed_access",
    "Device.pageable_memory_access": "Device(1).pageable_memory_access",
    "Device.pageable_memory_access_uses_host_page_tables": (
        "Device(1).pageable_memory_access_uses_host_page_tables"
    ),
    "Device.direct_managed_mem_access_from_host": "Device(1).direct_managed_mem_access_from_host",
    "Device.managed_memory": "Device(1).managed_memory",
    "Device.memory_pools_supported": "Device(1).memory_pools_supported",
    "Device.set_current": "Device(1).set_current()",
    "Device.sync": "Device(1).sync()",
    "Stream": "Stream().close()",
    "driver_info": "managedmem.driver_info()",
    "empty": "managedmem.empty(4).close()",
    "allocate": "ManagedMemoryResource().allocate(4096).close()",
    "pool of a device": "managedmem.DeviceMemoryResource(1).close()",
    "prefetch": "use(lambda b: b.prefetch(Device(1)))",
    "deferred prefetch": "use(lambda b: managedmem.prefetch(b, Device(1), defer=True))",
    "discard on the legacy stream": "use(lambda b: b.discard())",
    "batch on the legacy stream": (
        "use(lambda b: managedmem.prefetch([b[0:4096], b[8192:12288]], Host(), dispatch='batch'))"
    ),
    "accessed_by": "use(lambda b: setattr(b, 'accessed_by', [Host(), Device(1)]))",
    "fill": "use(lambda b: b.fill(1))",
    "copy": "use(lambda b: b.copy_to().close())",
    "device_id": "use(lambda b: b.device_id)",
    "is_managed of a wrapper": (
        "use(lambda b: ManagedBuffer.from_handle(b.handle, b.size).is_managed)"
    ),
    "dlpack": "use(lambda b: b.__dlpack__())",
    "dlpack device": "use(lambda b: b.__dlpack_device__())",
    "array interface": "use(lambda b: b.__cuda_array_interface__)",
}


def plain(name):
    """A function's name without the version suffix of its exported symbol."""
    return re.sub(r"_v\d+$", "", name)


@pytest.fixture
def verbose_log():
    """Log the bookkeeping calls too, so that the log names whatever failed."""
    log = raw_driver()
    log.emu_log_verbose(1)
    yield
    log.emu_log_verbose(0)


def attempt(operation, w, n, code, name="*", after=False):
    """Run the operation with the nth driver call failing: (exception or None, failed function)."""
    from managedmem import emulator

    error = None
    emulator.clear_calls()
    emulator.fail(name, nth=n, code=code, after=after)
    try:
        operation.act(w)
    except Exception as caught:
        error = caught.with_traceback(None)
    fired = emulator.failure_fired()
    emulator.clear_failures()
    if not fired:
        return error, None
    return error, plain(next(c.name for c in emulator.calls() if c.result == code))


def only_asks_what_was_recorded(code):
    """True if the failed call is a query beside an advice, which has its effect anyway."""
    from managedmem import emulator

    calls = [(plain(call.name), call.result) for call in emulator.calls()]
    failed = next(i for i, (_, result) in enumerate(calls) if result == code)
    asked = ("cuMemRangeGetAttribute", "cuMemRangeGetAttributes")
    return calls[failed][0] in asked and ("cuMemAdvise", 0) in calls


def check_error(error, function, code):
    expected = CUDAOutOfMemoryError if code == OUT_OF_MEMORY else CUDAError
    assert type(error) is expected, error
    assert (error.code, error.function) == (code, function)
    assert isinstance(error, MemoryError) == (code == OUT_OF_MEMORY)
    assert function in str(error)
    assert error.name in str(error)


def state_of(w):
    return {
        "advice": w.advice(),
        "prefetched": w.prefetched(),
        "bytes": w.bytes(),
        "access": w.access(),
    }


def live_objects(w):
    """The live objects of the driver; a pool keeps the events of its frees for later frees."""
    from managedmem import emulator

    settle()
    live = emulator.live()
    return live._replace(events=0) if w.pools else live


def sweep(operation, code, name="*", after=False):
    """Fail each call (of that name) in turn, without its effect or after it.

    Returns the names of the functions that failed.
    """
    failed = []
    for n in range(1, 200):
        w = World()
        operation.prepare(w)
        before = state_of(w)
        live = live_objects(w)
        error, function = attempt(operation, w, n, code, name, after)
        if function is None:
            assert error is None, "the operation fails without a fault"
            w.end()
            return failed
        failed.append(function)
        if error is None:
            assert function in REPEATED | operation.silent or only_asks_what_was_recorded(code), (
                f"a failing {function} went unnoticed"
            )
            w.drop_results()
            # Nothing is left behind on the thread; what the operation made is gone again.
            assert live_objects(w) == live
        else:
            check_error(error, function, code)
            w.drop_results()
            assert live_objects(w) == live
            now = state_of(w)
            for what in set(now) - operation.may_change:
                assert now[what] == before[what], (
                    f"{what} changed when {function} (call {n}) failed"
                )
            operation.prepare(w)
            operation.act(w)
        w.end()
    raise AssertionError("the fault was met two hundred times: it is never got past")


class TestEveryOperation:
    @pytest.mark.parametrize("code", [LAUNCH_FAILED, OUT_OF_MEMORY])
    @pytest.mark.parametrize("name", OPERATIONS)
    def test_each_call_in_turn(self, name, code, verbose_log):
        if Device.count() < OPERATIONS[name].devices:
            pytest.skip("needs two devices")
        failed = sweep(OPERATIONS[name], code)
        assert len(failed) >= OPERATIONS[name].faults

    @pytest.mark.parametrize("name", OPERATIONS)
    def test_each_advice_that_acts_and_then_fails(self, name, verbose_log):
        """As when the driver reports a failure of earlier work: the advice is restored."""
        if Device.count() < OPERATIONS[name].devices:
            pytest.skip("needs two devices")
        failed = sweep(OPERATIONS[name], LAUNCH_FAILED, "cuMemAdvise", after=True)
        # The last device is a member already where it is the only one.
        advises = name in ADVISING and (Device.count() > 1 or name not in {"add", "|="})
        assert bool(failed) == advises

    @pytest.mark.parametrize("name", MOVING)
    def test_each_move_that_acts_and_then_fails(self, name, verbose_log):
        """Pages may have moved, and a discard may have discarded; nothing else is lost."""
        failed = []
        for call in MOVING_CALLS:
            allowed = WIPES if "Discard" in call else OPERATIONS[name].may_change | MOVES
            operation = dataclasses.replace(OPERATIONS[name], may_change=allowed)
            failed += sweep(operation, LAUNCH_FAILED, call, after=True)
        assert failed

    def test_sweep_notices_a_swallowed_fault(self, verbose_log):
        def careless(w):
            with contextlib.suppress(CUDAError):
                w.a.read_mostly = False

        with pytest.raises(AssertionError, match="went unnoticed"):
            sweep(Operation(careless), LAUNCH_FAILED)

    def test_sweep_notices_half_done_advice(self, verbose_log):
        def two_steps(w):
            w.c.read_mostly = True
            w.c.preferred_location = Host()

        with pytest.raises(AssertionError, match="advice changed"):
            sweep(Operation(two_steps), LAUNCH_FAILED)


class TestClosing:
    """A failing free is reported once, by close(), and the buffer counts as closed."""

    CODES = (LAUNCH_FAILED, 999, OUT_OF_MEMORY)

    @pytest.mark.parametrize("code", CODES)
    def test_close_reports_and_closes(self, code):
        from managedmem import emulator

        buffer = ManagedMemoryResource().allocate(SIZE)
        emulator.fail("cuMemFree", code=code, after=True)
        with pytest.raises(CUDAError) as caught:
            buffer.close()
        assert (caught.value.code, caught.value.function) == (code, "cuMemFree")
        assert buffer.is_closed
        assert buffer.handle == 0
        assert buffer.close() is None

    def test_leaving_the_block_reports(self):
        from managedmem import emulator

        with pytest.raises(CUDAError), ManagedMemoryResource().allocate(SIZE) as buffer:
            emulator.fail("cuMemFree", code=LAUNCH_FAILED, after=True)
        assert buffer.is_closed

    def test_an_error_inside_the_block_is_not_lost(self):
        from managedmem import emulator

        with pytest.raises(CUDAError) as caught, ManagedMemoryResource().allocate(SIZE):
            emulator.fail("cuMemFree", code=LAUNCH_FAILED, after=True)
            raise KeyError("inside")
        assert isinstance(caught.value.__context__, KeyError)

    @pytest.mark.parametrize("code", CODES)
    def test_dropping_never_raises(self, code, capfd):
        from managedmem import emulator

        buffer = ManagedMemoryResource().allocate(SIZE)
        emulator.fail("cuMemFree", code=code, after=True)
        del buffer
        gc.collect()
        assert emulator.failure_fired()
        assert capfd.readouterr().err == ""

    def test_dropping_keeps_the_exception_in_flight(self):
        from managedmem import emulator

        buffer = ManagedMemoryResource().allocate(SIZE)
        emulator.fail("cuMemFree", code=LAUNCH_FAILED, after=True)
        with pytest.raises(KeyError):
            try:
                raise KeyError
            finally:
                del buffer
        assert emulator.failure_fired()

    @pytest.mark.parametrize("code", CODES)
    def test_streams(self, code):
        from managedmem import emulator

        stream = Stream()
        emulator.fail("cuStreamDestroy", code=code, after=True)
        with pytest.raises(CUDAError) as caught:
            stream.close()
        assert (caught.value.code, caught.value.function) == (code, "cuStreamDestroy")
        assert stream.is_closed
        stream.close()
        emulator.clear_failures()
        stream = Stream()
        emulator.fail("cuStreamDestroy", code=code, after=True)
        del stream
        assert emulator.failure_fired()

    def test_deallocate(self):
        from managedmem import emulator

        buffer = ManagedMemoryResource().allocate(SIZE)
        resource = ManagedMemoryResource()
        with pytest.raises(CUDAError) as caught:
            emulator.fail("cuMemFree", code=LAUNCH_FAILED)
            resource.deallocate(buffer.handle, buffer.size)
        assert caught.value.function == "cuMemFree"
        buffer.close()

    def test_views_are_closed_with_a_root_that_fails_to_free(self):
        from managedmem import emulator

        buffer = ManagedMemoryResource().allocate(SIZE)
        part = buffer[0:PAGE]
        emulator.fail("cuMemFree", code=LAUNCH_FAILED, after=True)
        with pytest.raises(CUDAError):
            buffer.close()
        assert part.is_closed
        with pytest.raises(RuntimeError, match="closed"):
            part.prefetch(Host())


class TestCurrentDevice:
    @pytest.mark.parametrize("code", [LAUNCH_FAILED, OUT_OF_MEMORY])
    def test_set_current(self, code, device1, current_device, verbose_log):
        operation = Operation(lambda w: device1.set_current())
        Device(0).set_current()
        from managedmem import emulator

        for n in range(1, 20):
            emulator.fail("*", nth=n, code=code)
            emulator.clear_calls()
            try:
                operation.act(None)
            except CUDAError as error:
                check_error(error, plain(emulator.calls()[-1].name), code)
            fired = emulator.failure_fired()
            emulator.clear_failures()
            if not fired:
                break
            assert Device() is Device(0), "a failed call left another device current"
        assert n > 1
        assert Device() is device1


class TestFirstUse:
    """Opening the driver, retaining contexts, making internal streams: once a process each.

    A parent that has only imported the package forks a child for each fault.
    """

    SCRIPT = """
import ctypes, os, pathlib, sys
import managedmem
from managedmem import CUDAError, Device, Host, ManagedBuffer, ManagedMemoryResource, Stream
from managedmem import emulator

library = ctypes.CDLL(pathlib.Path(managedmem.__file__).with_name("libmanagedmem_emulator.so"))

def use(work):
    with ManagedMemoryResource().allocate(4 * 4096) as buffer:
        work(buffer)

def operation():
    {operation}

def attempt(n, code):
    "0: the fault was not met; 2: met, reported and got over; anything else is a bug."
    # Not through managedmem.emulator, which would open the driver before the operation does.
    library.emu_log_verbose(1)
    library.emu_fail(b"*", n, code, 0)
    met = None
    try:
        operation()
    except CUDAError as error:
        met = error
    fired = library.emu_fail_fired()
    library.emu_fail_clear()
    if not fired:
        assert met is None, met
        return 0
    if met is not None and met.code is not None:
        assert met.code == code and met.function and met.function in str(met), met
    elif met is None:
        failed = next(c.name for c in emulator.calls() if c.result == code)
        assert failed in {repeated!r}, "a failing " + failed + " went unnoticed"
    depth = emulator.live().context_depth
    assert depth <= 1, depth
    # Nothing half done was kept: the next try works, and is complete.
    operation()
    assert Device.count() == 2 and Device(0).concurrent_managed_access
    operation()
    live = emulator.live()
    # What the driver refused to free it still has; one stream a device is kept for the next time.
    refused = met is not None and met.function == "cuMemFree"
    assert live.allocations == refused and live.events == 0 and live.streams <= 2, live
    return 2

n = met = 0
while True:
    n += 1
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = attempt(n, {code})
        except BaseException as error:
            import traceback
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 0:
        break
    assert status == 2, f"call {{n}}: status {{status}}"
    met += 1
    assert n < 200
print(met)
"""

    @pytest.mark.parametrize("code", [LAUNCH_FAILED, OUT_OF_MEMORY])
    @pytest.mark.parametrize("name", FIRST_USE)
    def test_each_call_in_turn(self, name, code):
        # The last query of a set that grew is not missed: the advice holds all the same.
        unnoticed = REPEATED | (DISPATCH_HINT if name == "accessed_by" else set())
        done = run_python(
            self.SCRIPT.format(operation=FIRST_USE[name], code=code, repeated=unnoticed)
        )
        assert done.stderr == ""
        # At least the initialisation, the device count and the attributes of two devices.
        assert int(done.stdout) >= 4


class TestCoverage:
    """No public operation without a sweep: a new one has to be named above or below."""

    @pytest.mark.parametrize("name", NO_DRIVER)
    def test_needs_no_driver_call(self, name, verbose_log):
        from managedmem import emulator

        w = World()
        try:
            w.make_pools()
            emulator.clear_calls()
            NO_DRIVER[name](w)
            assert not emulator.calls()
        finally:
            w.end()

    def test_every_public_operation_is_swept(self):
        surface = {
            f"{cls.__name__}.{name}"
            for cls in (
                ManagedBuffer,
                AccessedBySetProxy,
                Stream,
                Host,
                Device,
                ManagedMemoryResource,
                PrefetchPlan,
                managedmem.MigrationPolicy,
                managedmem.AppliedPolicy,
                DeviceMemoryResource,
                PeerAccessibleBySetProxy,
                PoolAttributes,
            )
            for name in vars(cls)
            if not name.startswith("_")
        }
        surface |= {
            name
            for name in managedmem.__all__
            if isinstance(getattr(managedmem, name), types.BuiltinFunctionType)
        }
        covered = {operation.covers for operation in OPERATIONS.values()}
        covered |= set(NO_DRIVER) | ELSEWHERE | set(FIRST_USE)
        assert not surface - covered

    def test_tables_name_things_that_exist(self):
        """A name above that is no more would let a sweep be counted for nothing."""
        for name in [*NO_DRIVER, *ELSEWHERE, *(o.covers for o in OPERATIONS.values())]:
            thing = managedmem
            for part in filter(None, name.split(".")):
                thing = inspect.getattr_static(thing, part)


def expect_error(read):
    with pytest.raises((RuntimeError, NotImplementedError)):
        read()
