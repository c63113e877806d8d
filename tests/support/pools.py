"""Pools of each kind, and the bytes of their memory."""

import pytest

import managedmem
from managedmem import Device, DeviceMemoryResource, Host, ManagedMemoryResource

needs_pools = pytest.mark.skipif(
    managedmem._managedmem._driver_info()["version"] < 13000,
    reason="pools of managed memory need CUDA 13.0",
)

KINDS = {
    "managed": lambda: ManagedMemoryResource(pooled=True),
    "managed on a device": lambda: ManagedMemoryResource(pooled=True, preferred_location=Device(0)),
    "managed on the host": lambda: ManagedMemoryResource(pooled=True, preferred_location=Host()),
    "device": lambda: DeviceMemoryResource(Device(0)),
}


def read(buffer, stream=None):
    """The bytes of a buffer of any kind."""
    out = bytearray(buffer.size)
    buffer.copy_to(out, stream=stream)
    return bytes(out)
