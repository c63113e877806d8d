"""Operations that begin and end objects."""

import gc

import numpy

import managedmem
from constants import PAGE
from error_operations import wrong
from foreign_objects import CudaArray
from managedmem import (
    CUDAError,
    Device,
    DeviceMemoryResource,
    Host,
    ManagedBuffer,
    ManagedMemoryResource,
    MigrationPolicy,
    PrefetchPlan,
    Stream,
)
from world import EVERYTHING, HOST, MOVES, ONE, PAGES, SIZE, WRITES, ZERO, Operation, in_pools


class ForeignResource:
    """Another library's memory resource."""

    def __init__(self):
        self.inner = ManagedMemoryResource()
        self.allocated = {}

    def allocate(self, size, *, stream=None):
        buffer = self.inner.allocate(size)
        self.allocated[buffer.handle] = buffer
        return ManagedBuffer.from_handle(buffer.handle, size, mr=self)

    def deallocate(self, ptr, size, *, stream):
        self.allocated.pop(ptr).close()


class KeepingResource:
    """A memory resource that frees nothing."""

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


def make_a_small_array():
    """A larger array could meet a failure of the driver, which NumPy cannot report."""
    with managedmem.numpy_allocator(policy=EVERYTHING):
        return numpy.ones(3)


def leave_with(make):
    """A `with` block around an object that is made for it, and closed at its end."""

    def act(w):
        with make(w):
            pass

    return act


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
            *("concurrent_managed_access", "direct_managed_mem_access_from_host", "host_numa_id"),
            *("integrated", "nearest_host", "managed_memory", "memory_pools_supported", "name"),
            *("pageable_memory_access", "pageable_memory_access_uses_host_page_tables", "uuid"),
        )
    },
    "_driver_info": Operation(lambda w: managedmem._managedmem._driver_info(), "_driver_info"),
    "DType": Operation(lambda w: managedmem.typing.DType("float32"), "DType"),
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
    "change a name": Operation(lambda w: setattr(w.a, "name", "another" * 20)),
    "give a name": Operation(lambda w: setattr(w.b, "name", "second")),
    "remove a name": Operation(lambda w: setattr(w.a, "name", None)),
    "name wrapped memory": Operation(
        lambda w: setattr(ManagedBuffer.from_handle(w.a.handle, SIZE), "name", "later")
    ),
    "empty with a name": Operation(lambda w: w.keep(managedmem.empty((2, 8), "f4", name="é"))),
    "allocate with a name": in_pools(
        lambda w: [r.allocate(PAGE, stream=w.stream, name="x").close() for r in w.pools]
    ),
    "from_handle with a name": Operation(
        lambda w: ManagedBuffer.from_handle(w.a.handle, SIZE, owner=w.a, name="part")
    ),
    "foreign memory with a name": Operation(
        lambda w: ManagedBuffer.from_handle(
            w.a.handle, SIZE, mr=KeepingResource(), name="theirs"
        ).close()
    ),
    "foreign memory": Operation(lambda w: ForeignResource().allocate(PAGE).close(w.stream)),
    "foreign memory dropped": Operation(
        lambda w: ForeignResource().allocate(PAGE)[8:].prefetch(HOST)
    ),
    "copy_to foreign memory": Operation(
        lambda w: w.keep(w.made_by(ForeignResource(), SIZE).copy_to()), may_change=WRITES
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
        lambda w: ManagedBuffer.from_handle(w.a.handle, SIZE, mr=KeepingResource(), stream=w.stream)
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
                managedmem.TraceUnavailableError,
                managedmem.CUDAWarning,
                managedmem.TraceBusyError,
            )
        ],
        "CUDAError CUDAOutOfMemoryError CUDAWarning DriverNotFoundError DriverTooOldError "
        "ExportError "
        "IPCNotSupportedError TraceBusyError TraceUnavailableError TraceUnavailableError.tried",
    ),
    "_register_preset": Operation(
        lambda w: managedmem._managedmem._register_preset(HOST, [ZERO], True, False),
        "_register_preset",
    ),
    "numpy_allocator": Operation(
        lambda w: make_a_small_array(), "_numpy_handler _set_numpy_handler", faults=4
    ),
    "_select_driver": wrong(lambda w: managedmem._managedmem._select_driver("cuda"), RuntimeError),
    "_synchronize": Operation(
        lambda w: managedmem._managedmem._synchronize(w.a, None, True), "_synchronize"
    ),
}
LIVES["_select_driver"].covers = "_select_driver"
