"""Live managed memory, and the state to compare it in, before and after a test."""

import contextlib
import functools
import gc

from constants import PAGE


@functools.cache
def warm_up():
    """Make the library create now what it keeps, such as its internal streams.

    Only a test's own leaks show then.
    """
    import managedmem

    for device in reversed(managedmem.Device.all()):
        device.set_current()
        with contextlib.suppress(managedmem.CUDAError, NotImplementedError):
            with managedmem.ManagedMemoryResource().allocate(4 * PAGE) as buffer:
                buffer.discard()
                managedmem.prefetch(buffer, device, defer=True)
                device.sync()
            managedmem.WorkingSet(1, device).close()
            managedmem.ManagedWorkingSet(1, device).close()


def settle():
    """Wait for all devices, after which pools without buffers are destroyed."""
    import managedmem

    with contextlib.suppress(managedmem.CUDAError):
        for device in managedmem.Device.all():
            device.sync()


def live_managed_bytes():
    """Bytes under all open ManagedBuffer objects; views of one buffer count once."""
    import managedmem

    ranges = sorted(
        (o.handle, o.handle + o.size)
        for o in gc.get_objects()
        # isinstance would read __class__, on which deprecated names of torch warn
        if issubclass(type(o), managedmem.ManagedBuffer) and not o.is_closed
    )
    total = end = 0
    for start, stop in ranges:
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
