"""What a processor or the driver does with a buffer, in words that names of tests can show."""

import managedmem
from constants import KIB, PAGE
from managedmem import Device, Host
from residencies import load, store

AROUND = max(64 * KIB, PAGE)  # bytes that one read of the host moves, on Linux and on an H100


class Script:
    """The steps by their names, with spaces for underscores."""

    def __init__(self, buffer):
        self.buffer = buffer

    def run(self, step):
        getattr(self, step.replace(" ", "_"))()

    def host_reads_all(self):
        load(self.buffer)

    def host_reads_half(self):
        load(self.buffer[: self.buffer.size // 2])

    def host_reads_a_quarter(self):
        load(self.buffer[: self.buffer.size // 4])

    def host_reads_one(self):
        load(self.buffer[AROUND : AROUND + 1])

    def host_writes_all(self):
        store(self.buffer)

    def host_writes_a_quarter(self):
        store(self.buffer[: self.buffer.size // 4])

    def prefetch_D(self):
        self.buffer.prefetch(Device(0))

    def prefetch_H(self):
        self.buffer.prefetch(Host())

    def device_reads_all(self):
        managedmem.emulator.touch(self.buffer, Device(0))

    def device_writes_half(self):
        managedmem.emulator.touch(self.buffer[: self.buffer.size // 2], Device(0), write=True)

    def device_fills_all(self):
        self.buffer.fill(3)

    def set_read_mostly(self):
        self.buffer.read_mostly = True

    def unset_read_mostly(self):
        self.buffer.read_mostly = False

    def prefer_H_for_D(self):
        self.buffer.preferred_location = Host()
        self.buffer.accessed_by.add(Device(0))

    def prefer_D_for_H(self):
        self.buffer.preferred_location = Device(0)
        self.buffer.accessed_by.add(Host())

    def discard(self):
        self.buffer.discard()
