"""Operations that raise without a failing driver call."""

import ctypes
import types

import managedmem
from constants import PAGE
from managedmem import (
    CUDAError,
    Device,
    Host,
    ManagedBuffer,
    ManagedMemoryResource,
    MigrationPolicy,
    PrefetchPlan,
    Stream,
)
from managedmem.typing import AccessedBySetProxy, PeerAccessibleBySetProxy, PoolAttributes
from world import EVERYTHING, HOST, SIZE, WRITES, ZERO, Operation

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
    "residency of plain memory": on_unmanaged(lambda w, b: b.residency()),
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
    "copy of several on a closed stream": on_closed_stream(
        lambda w, s: managedmem.copy([w.a, w.b], [w.c, w.large[: w.a.size]], stream=s)
    ),
    "copy on a closed stream": on_closed_stream(lambda w, s: w.a.copy_from(w.b, stream=s)),
    "attach on a closed stream": on_closed_stream(lambda w, s: w.a.attach("host", stream=s)),
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
    "a large byte": wrong(lambda w: w.a.fill(256), OverflowError),
    "three bytes": wrong(lambda w: w.a.fill(b"abc"), ValueError),
    "copy of overlapping pairs": wrong(
        lambda w: managedmem.copy([w.b[:9], bytes(9)], [w.a[:9], w.a[4:13]]), ValueError
    ),
    "copy of another size": wrong(lambda w: w.a.copy_from(w.part), ValueError),
    "an index too large": wrong(lambda w: w.a[SIZE], IndexError),
    "every second byte": wrong(lambda w: w.a[::2], ValueError),
    "an unknown dtype": wrong(lambda w: w.a.view("f5")),
    "a shape that does not fit": wrong(lambda w: w.a.view("u1", (3, 5)), ValueError),
    "a range that is too long": wrong(lambda w: w.a.range(PAGE, SIZE), ValueError),
    "an unknown keyword": wrong(lambda w: w.a.prefetch(ZERO, speed=9)),
    "a missing argument": wrong(lambda w: w.a.prefetch()),
    "words as an array": wrong(lambda w: managedmem.asarray(["a", "b"])),
    "a ragged list": wrong(lambda w: managedmem.asarray([[1], [2, 3]]), ValueError),
    "a number that does not fit": wrong(lambda w: managedmem.full(3, 300, "u1"), OverflowError),
    "a word as a policy": wrong(lambda w: managedmem.empty(PAGE, policy="prefer")),
    "a policy for a pool": Operation(
        lambda w: w.pool.allocate(PAGE, policy=EVERYTHING),
        prepare=lambda w: w.make_pools(),
        raises=ValueError,
    ),
    "a pool with a policy": wrong(
        lambda w: ManagedMemoryResource(pooled=True, policy=EVERYTHING), ValueError
    ),
    "a policy and a preferred location": wrong(
        lambda w: ManagedMemoryResource(preferred_location=HOST, policy=EVERYTHING), ValueError
    ),
    "bytes as a name": wrong(lambda w: setattr(w.a, "name", b"weights")),
    "a long name": wrong(lambda w: managedmem.empty(PAGE, name="x" * 201), ValueError),
    "a name without UTF-8": wrong(
        lambda w: ManagedBuffer.from_handle(8, 8, name="\udc80"), ValueError
    ),
    "a name for a part": wrong(lambda w: setattr(w.part, "name", "part"), ValueError),
    "a name once closed": wrong(
        lambda w: setattr(closed(managedmem.empty(PAGE)), "name", "late"), RuntimeError
    ),
    "no name left": wrong(lambda w: delattr(w.a, "name"), AttributeError),
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
            managedmem.typing.AppliedPolicy,
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
