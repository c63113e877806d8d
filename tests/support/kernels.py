"""Work on a stream that reads and writes memory of a device, in place of kernels.

Copies from and to managed memory do that on the emulated driver and on a GPU alike.
"""

import managedmem
from contents import write


def read_by_device(array, stream=None):
    """The bytes that work on the stream finds in an array."""
    if array.nbytes == 0:
        return b""
    with managedmem.empty(array.nbytes) as copy:
        copy.copy_from(array, stream=stream)
        _wait(stream)
        return bytes(copy)


def write_by_device(array, data, stream=None):
    """Write bytes to an array, or an int as each of its bytes."""
    with managedmem.empty(array.nbytes) as source:
        write(source, data)
        source.copy_to(array, stream=stream)
        _wait(stream)


def _wait(stream):
    if stream is None:
        managedmem.Device().sync()
    else:
        stream.sync()


class Sources:
    """Buffers that hold one value each, from which writes are queued and not waited for."""

    def __init__(self, nbytes):
        self._nbytes = nbytes
        self._made = {}

    def queue(self, array, value, stream):
        """Queue a write of the value to each byte of the array."""
        if value not in self._made:
            self._made[value] = managedmem.empty(self._nbytes)
            write(self._made[value], value)
        self._made[value][: array.nbytes].copy_to(array, stream=stream)

    def close(self):
        for buffer in self._made.values():
            buffer.close()
