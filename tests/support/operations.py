"""Operations that make driver calls, and reads that make none, each on a `World`."""

import contextlib
import copy
import functools
import operator
import os
import types

import numpy

import managedmem
from constants import PAGE
from foreign_objects import CudaArray
from managedmem import (
    CUDAError,
    DeviceMemoryResource,
    Host,
    ManagedBuffer,
    ManagedMemoryResource,
    MigrationPolicy,
    PrefetchPlan,
    Stream,
    asarray,
    empty_like,
    full,
    zeros,
)
from managedmem.typing import PoolAttributes
from world import (
    DISPATCH_HINT,
    EVERYTHING,
    HOST,
    MOVES,
    ONE,
    PAGES,
    PATTERNS,
    SIZE,
    WIPES,
    WRITES,
    ZERO,
    Operation,
    in_pools,
)

Recorder = managedmem._managedmem.Recorder
_Watch = managedmem._managedmem._Watch
FOREIGN = bytearray(4 * PAGE)


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
    """If the restoration fails, the policy is still in force and restore() tries again."""
    block = EVERYTHING.applied(w.buffers)
    try:
        with block:
            pass
    except (CUDAError, MemoryError):
        if "in force" in repr(block):
            block.restore()
        raise


def record(w):
    """A whole recording; a failure leaves none behind."""
    recorder = Recorder()
    recorder.start()
    w.a.prefetch(ONE)
    recorder.mark()
    recorder.stop()
    recorder.attribute([(w.b.handle, 64, "b")])
    assert recorder.events().nbytes % 48 == 0
    assert len(recorder.parts()) == 2 and not recorder.running and not recorder.report()["lost"]
    return recorder.clock(), recorder.source, recorder.source_detail


@functools.cache
def record_once():
    """The first recording of a process makes calls that later ones do not.

    Each recording takes 4 MiB of new memory from the kernel.
    """
    recorder = Recorder(limit=1000, faults=False, sync=False)
    recorder.start()
    recorder.stop()


def drop_a_recorder(w):
    Recorder().start()


def watch(w):
    """The events of a process, here of this one."""
    watched = _Watch(os.getpid())
    w.a.prefetch(ONE)
    events, lost, rejected = watched.read()
    watched.close()
    assert len(events) % 48 == 0 and not lost and not rejected


# The calls before a copy to page-locked memory. If one fails, the copy is in ordinary memory.
TAKING = frozenset(
    {
        *("cuCtxGetCurrent", "cuCtxGetDevice", "cuCtxPushCurrent", "cuMemFreeHost"),
        *("cuMemHostAlloc", "cuPointerGetAttributes", "cuStreamGetCtx", "cuStreamIsCapturing"),
    }
)


def numpy_copy_in_place_of_another(w):
    """An idle block of another size has to go, because both do not fit."""
    before = managedmem.result_cache.max_nbytes
    managedmem.result_cache.max_nbytes = 1 << 20
    try:
        w.large[: 1 << 18].numpy(copy=True)
        w.keep(w.large.numpy(copy=True))
        assert managedmem._managedmem._results_usage()[1] <= 1 << 20
    finally:
        managedmem.result_cache.max_nbytes = before


def of_members(name, *arguments, faults=1, prepare=lambda w: None):
    """A method of the set of locations with access."""
    return Operation(
        lambda w: getattr(w.members, name)(*arguments),
        f"AccessedBySetProxy.{name}",
        prepare=prepare,
        faults=faults,
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
    # Into page-locked memory, or without it into ordinary memory.
    "numpy copy of much": Operation(
        lambda w: w.keep(w.large.numpy(w.stream, copy=True)), silent=TAKING, faults=3
    ),
    "numpy copy of much, again": Operation(
        lambda w: (w.large.numpy(copy=True).shape, w.keep(w.large.numpy(copy=True))),
        silent=TAKING,
        faults=6,
    ),
    "numpy copy in place of another": Operation(
        numpy_copy_in_place_of_another, "_results_limit _results_usage", silent=TAKING, faults=8
    ),
    "clear the results": Operation(
        lambda w: (w.large.numpy(copy=True).shape, managedmem.result_cache.clear()),
        "_results_trim",
        silent=TAKING,
        faults=4,
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
    "union": of_members("union", [ONE], [HOST]),
    "intersection": of_members("intersection", [ONE]),
    "difference": of_members("difference", [ONE]),
    "symmetric_difference": of_members("symmetric_difference", [ONE]),
    "issubset": of_members("issubset", [ONE]),
    "issuperset": of_members("issuperset", [ONE]),
    "isdisjoint": of_members("isdisjoint", [ONE]),
    "copy of the set": of_members("copy"),
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
    "add": of_members("add", ONE),
    "discard a member": of_members("discard", HOST),
    "remove": of_members("remove", HOST, prepare=lambda w: w.members.add(HOST), faults=2),
    "pop": of_members("pop", prepare=lambda w: w.members.update([ZERO, HOST]), faults=2),
    "clear": of_members("clear", faults=3),
    "update": Operation(
        lambda w: w.b.accessed_by.update([ZERO], [HOST]), "AccessedBySetProxy.update", faults=3
    ),
    "intersection_update": of_members("intersection_update", [ONE], faults=3),
    "difference_update": of_members("difference_update", [ZERO, HOST], faults=3),
    "symmetric_difference_update": of_members("symmetric_difference_update", [ONE, HOST], faults=3),
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
    "is_managed of an array": Operation(
        lambda w: managedmem.is_managed(CudaArray(w.a)), "is_managed"
    ),
    "memory_stats": in_pools(
        lambda w: managedmem.memory_stats(), "_memory_counts _memory_kept", faults=2
    ),
    # Pages that the host never touched. Without a common answer, the driver is asked for each page.
    "residency": Operation(
        lambda w: w.large[: 4 * PAGE].residency(), "ManagedBuffer.residency", faults=5
    ),
    "residency of several": Operation(
        lambda w: managedmem.residency([w.a, w.part, w.wrapped, memoryview(w.large)[: 4 * PAGE]]),
        "residency",
        faults=6,
    ),
    # Policies: all or nothing; a block restores the earlier advice.
    "policy of": Operation(
        lambda w: managedmem.MigrationPolicy.of(w.a), "MigrationPolicy.of", faults=PAGES
    ),
    # More ranges than the initial capacity of their lists.
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
    # Prefetches.
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
    # Discards: the discarded contents may be lost.
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
    # Targets that cannot take a hint are passed over. A failure of the driver is still an error.
    "prefetch or skip": Operation(
        lambda w: managedmem.prefetch(
            [w.a, memoryview(FOREIGN), w.b], [ZERO, HOST, ONE], stream=w.stream, unsupported="skip"
        ),
        may_change=MOVES,
        silent=DISPATCH_HINT,
        faults=2,
    ),
    "discard or skip": Operation(
        lambda w: managedmem.discard([w.a, w.b.range(1, 9)], unsupported="skip"), may_change=WRITES
    ),
    "discard_prefetch or skip": Operation(
        lambda w: w.a.discard_prefetch(ZERO, unsupported="skip"), may_change=WRITES
    ),
    "advise or skip": Operation(
        lambda w: managedmem.advise(
            [memoryview(FOREIGN), *(w.large[i << 15 :][:PAGE] for i in range(9)), w.a],
            "set_accessed_by",
            ONE,
            unsupported="skip",
        ),
        faults=12,
    ),
    "advise preferred_location or skip pool memory": in_pools(
        lambda w: managedmem.advise(
            [w.a, w.pooled, w.b], "set_preferred_location", HOST, unsupported="skip"
        ),
        faults=7,
    ),
    "plan.execute or skip": Operation(
        lambda w: w.plan.execute(stream=w.stream, unsupported="skip"),
        may_change=MOVES,
        silent=DISPATCH_HINT,
        faults=3,
    ),
    "policy apply or skip": Operation(
        lambda w: EVERYTHING.apply([w.a, memoryview(FOREIGN), w.b], unsupported="skip"),
        prepare=mix_pages,
        faults=3 * PAGES + 4,
    ),
    "policy apply or skip pool memory": in_pools(
        lambda w: MigrationPolicy.prefer(HOST).apply([w.a, w.pooled, w.b], unsupported="skip"),
        faults=3 * PAGES + 6,
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
    # Recordings.
    "a recording": Operation(
        record,
        "Recorder Recorder.start Recorder.mark Recorder.stop Recorder.attribute Recorder.events "
        "Recorder.parts Recorder.report Recorder.clock Recorder.running Recorder.source "
        "Recorder.source_detail",
        prepare=lambda w: record_once(),
        may_change=MOVES,
        faults=8,
    ),
    "a recording dropped": Operation(drop_a_recorder, prepare=lambda w: record_once(), faults=3),
    "a watch": Operation(watch, "_Watch _Watch.read _Watch.close", may_change=MOVES),
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
    "copy of several": Operation(
        lambda w: managedmem.copy([w.a, w.b[:9]], [w.c, w.large[:9]], stream=w.stream),
        "copy",
        may_change=WRITES,
        faults=2,
    ),
    "copy of system memory and a producer's array": Operation(
        lambda w: managedmem.copy(
            [bytes(9), CudaArray(w.b, members={"stream": 1})],
            [w.large[:9], w.a],
            stream=w.stream,
            order="during_api_call",
        ),
        may_change=WRITES,
        silent=frozenset({"cuEventDestroy"}),
        faults=6,
    ),
    "copy_from with hints on the default stream": Operation(
        lambda w: w.a.copy_from(w.b, options={"src_location_hint": HOST}), may_change=WRITES
    ),
    "copy_to a new buffer": Operation(lambda w: w.keep(w.a.copy_to()), faults=2),
    # Objects that are created.
    "allocate": Operation(
        lambda w: w.keep(ManagedMemoryResource().allocate(SIZE)), "ManagedMemoryResource.allocate"
    ),
    "allocate on a stream": Operation(
        lambda w: w.keep(ManagedMemoryResource().allocate(SIZE, stream=w.stream))
    ),
    "empty": Operation(lambda w: w.keep(managedmem.empty((2, 8), "float32")), "empty"),
    "empty with a policy": Operation(
        lambda w: w.keep(managedmem.empty(SIZE, policy=EVERYTHING)), faults=PAGES + 5
    ),
    "empty and large with a policy": Operation(
        lambda w: w.keep(managedmem.empty(4 << 20, policy=EVERYTHING)), faults=5
    ),
    "allocate with the policy of a resource": Operation(
        lambda w: w.keep(ManagedMemoryResource(policy=EVERYTHING).allocate(SIZE)), faults=PAGES + 5
    ),
    "allocate with a policy": Operation(
        lambda w: w.keep(ManagedMemoryResource().allocate(SIZE, policy=EVERYTHING)),
        faults=PAGES + 5,
    ),
    "attach": Operation(
        lambda w: w.b.attach("single", stream=w.stream), "ManagedBuffer.attach", faults=2
    ),
    "attach to the host": Operation(lambda w: w.b.attach("host")),
    "empty for the host": Operation(lambda w: w.keep(managedmem.empty(SIZE, attach="host"))),
    "empty with a prefetch": Operation(
        lambda w: w.keep(managedmem.empty(SIZE, prefetch=ZERO)), faults=2
    ),
    "allocate with a prefetch": Operation(
        lambda w: w.keep(ManagedMemoryResource().allocate(SIZE, stream=w.stream, prefetch=ONE)),
        faults=2,
    ),
    "empty_like": Operation(lambda w: w.keep(empty_like(w.a, "f4", shape=9))),
    "zeros": Operation(lambda w: w.keep(zeros(SIZE, name="zeros"))),
    "zeros on a device": Operation(
        lambda w: w.keep(zeros(SIZE, policy=EVERYTHING)), faults=PAGES + 8
    ),
    "full of long elements on a device": Operation(
        lambda w: w.keep(full((3, 5000), 0.1, policy=MigrationPolicy.prefer(ZERO))), faults=6
    ),
    "zeros with a prefetch": Operation(lambda w: w.keep(zeros(SIZE, prefetch=ONE)), faults=5),
    "asarray of numbers": Operation(lambda w: w.keep(asarray([[1, 2], [3, 4.5]]))),
    "asarray of a buffer on a device": Operation(
        lambda w: w.keep(asarray(PATTERNS[0], policy=MigrationPolicy.prefer(ZERO))), faults=5
    ),
    "asarray of an array": Operation(lambda w: w.keep(asarray(numpy.arange(9)[::2], "f4"))),
    "asarray of a device array": Operation(lambda w: w.keep(asarray(CudaArray(w.b))), faults=3),
    "asarray of another policy": Operation(
        lambda w: w.keep(asarray(w.a, policy=EVERYTHING)), faults=PAGES + 8
    ),
    "Stream": Operation(lambda w: w.keep(Stream()), "Stream"),
    # Streams and devices.
    "stream.sync": Operation(lambda w: w.stream.sync(), "Stream.sync"),
    "stream.query": Operation(lambda w: w.stream.query(), "Stream.query"),
    "device.sync": Operation(lambda w: ONE.sync(), "Device.sync"),
    "memory_info": Operation(lambda w: ONE.memory_info, "Device.memory_info"),
}


def with_peers(act, covers="", faults=1):
    """An operation on the set of peers; a single device has no peers to query."""
    return in_pools(act, covers, faults=faults, devices=2)


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
    "allocate managed pool memory": in_pools(lambda w: w.keep(w.pool.allocate(SIZE))),
    "allocate device memory": in_pools(
        lambda w: w.keep(w.own.allocate(SIZE)), "DeviceMemoryResource.allocate"
    ),
    "allocate device memory on a stream": in_pools(
        lambda w: w.keep(w.own.allocate(SIZE, stream=w.stream)), faults=2
    ),
    "trim a managed pool": in_pools(lambda w: w.pool.trim(), "ManagedMemoryResource.trim"),
    "trim a device pool": in_pools(lambda w: w.own.trim(PAGE), "DeviceMemoryResource.trim"),
    "set the deallocation stream": in_pools(
        lambda w: w.pooled.set_deallocation_stream(0), "ManagedBuffer.set_deallocation_stream"
    ),
    "set release_threshold": in_pools(
        lambda w: setattr(w.pool.attributes, "release_threshold", 0),
        "PoolAttributes.release_threshold",
    ),
    **{
        f"get {name}": in_pools(
            lambda w, name=name: getattr(w.own.attributes, name), f"PoolAttributes.{name}"
        )
        for name in vars(PoolAttributes)
        if not name.startswith("_") and name != "release_threshold"
    },
    "fill device memory": in_pools(lambda w: w.plain.fill(b"ab"), faults=2),
    "copy device memory on a stream": in_pools(
        lambda w: w.pooled.copy_from(w.plain, stream=w.stream), faults=3
    ),
    "copy device memory to the host": in_pools(
        lambda w: w.plain.copy_to(bytearray(SIZE)), faults=3
    ),
    "copy device memory to a new buffer": in_pools(lambda w: w.keep(w.plain.copy_to()), faults=3),
    "dlpack of device memory": in_pools(lambda w: w.keep(w.plain.__dlpack__(stream=99)), faults=1),
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
            *("union", "intersection", "difference", "symmetric_difference", "issubset"),
            *("issuperset", "isdisjoint"),
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
    "_memory_living": lambda w: managedmem.live(),
    "_device_memory": lambda w: managedmem._managedmem._device_memory(),
    "ManagedBuffer.name": (
        lambda w: (w.a.name, ManagedBuffer.from_handle(w.a.handle, w.a.size).name)  # and None
    ),
    **{
        f"ManagedBuffer.{name}": lambda w, name=name: getattr(w.a, name)
        for name in (
            *("handle", "size", "nbytes", "shape", "dtype", "itemsize", "ndim", "strides"),
            *("owner", "memory_resource", "is_closed", "is_mapped", "attachment"),
        )
    },
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
    "AppliedPolicy.skipped": lambda w: EVERYTHING.applied(w.buffers).skipped,
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
    "PrefetchPlan.__deepcopy__": lambda w: copy.deepcopy(w.plan),
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
            *("is_closed", "is_managed", "supports_advice", "attributes", "handle"),
            *("is_handle_owned", "is_ipc_enabled", "is_mapped", "uuid"),
        )
    },
    "ManagedMemoryResource.preferred_location": lambda w: w.pool.preferred_location,
    "DType.itemsize": lambda w: w.a.dtype.itemsize,
    "ManagedMemoryResource.policy": (
        lambda w: ManagedMemoryResource(preferred_location=HOST, policy=None).policy
    ),
    "DeviceMemoryResource.device_id": lambda w: w.own.device_id,
    "DeviceMemoryResource.max_size": lambda w: w.own.max_size,
    "DeviceMemoryResource.is_host_accessible": lambda w: w.own.is_host_accessible,
    "DeviceMemoryResource.is_device_accessible": lambda w: w.own.is_device_accessible,
}
