"""Every allocation of the first use of the driver in a process fails, one at a time.

Each attempt is in a forked child. Prints lines as allocations.py does.
"""

import gc
import os
import sys
import types

import managedmem
from constants import PAGE
from failing import KINDS, MOST, Wrong, attempt, is_memory_error, prepare, tell
from managedmem import emulator

# The library caches values that never change, so each of these runs in a process that has used no
# driver yet. `use(work)` calls `work` with a buffer.
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
    "Device.integrated": "Device(1).integrated",
    "Device.managed_memory": "Device(1).managed_memory",
    "Device.nearest_host": "Device(1).nearest_host",
    "Device.memory_pools_supported": "Device(1).memory_pools_supported",
    "Device.set_current": "Device(1).set_current()",
    "Device.sync": "Device(1).sync()",
    "Stream": "Stream().close()",
    "driver_info": "managedmem._managedmem._driver_info()",
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
    "residency": "use(lambda b: b.residency())",
    "is_managed of a wrapper": (
        "use(lambda b: ManagedBuffer.from_handle(b.handle, b.size).is_managed)"
    ),
    "dlpack": "use(lambda b: b.__dlpack__())",
    "dlpack device": "use(lambda b: b.__dlpack_device__())",
    "array interface": "use(lambda b: b.__cuda_array_interface__)",
}


def use(work):
    with managedmem.ManagedMemoryResource().allocate(4 * PAGE) as buffer:
        work(buffer)


def use_first(allocations, code, kind, n):
    """Run it in a process that has used no driver; return whether it reached the allocation."""
    run = eval(f"lambda w: {code}", {**vars(managedmem), "managedmem": managedmem, "use": use})
    operation = types.SimpleNamespace(run=run)
    _, error, text, reached = attempt(allocations, operation, None, kind, n)
    if error is not None and not (reached and is_memory_error(error)):
        raise Wrong(f"{error.__name__}: {text}")
    for _ in range(2):  # nothing half done was kept
        run(None)
    gc.collect()
    live = emulator.live()
    if live.allocations or live.events or live.streams > 2 or live.context_depth > 1:
        raise Wrong(f"{live} is left")
    return reached


def in_child(work):
    """Call it in a forked child; return the child's exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = work()
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def sweep_first_use(allocations, name, code, kind):
    for n in range(1, MOST):
        tell(name, kind, n)
        status = in_child(lambda n=n: 2 if use_first(allocations, code, kind, n) else 0)
        if status == 0:
            return n, None
        if status != 2:
            return n, f"the process ended with {status}"
    return n, "its allocations do not end"


def sweep(library, names):
    allocations = prepare(library)
    for name in names:
        for kind in KINDS:
            tell(name, kind, *sweep_first_use(allocations, name, FIRST_USE[name], kind))
