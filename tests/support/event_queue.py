"""An event queue of the emulated nvidia-uvm module, read through its system calls."""

import ctypes
import mmap
import os
import struct

import managedmem

PAGE = mmap.PAGESIZE
COUNT = 1024
RECORD = 64
HOST_FAULTS = 1 << 1
MAKE_QUEUE, ENABLE, FLUSH = 56, 58, 67


class EventQueue:
    """The faults of the host, in a queue of 1,024 records."""

    def open(self):
        self.library = ctypes.CDLL(managedmem._managedmem._driver_info()["path"], use_errno=True)
        self.library.emu_uvm_ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]
        self.memory = mmap.mmap(-1, PAGE + COUNT * RECORD)  # the control block, then the records
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.last = b"\0" * RECORD
        files = (ctypes.c_int * 4)()
        assert self.library.emu_uvm_files(files, 4) == 2
        self.space = files[1]
        self.file = self.library.emu_uvm_open(b"/dev/nvidia-uvm-tools", os.O_RDWR)
        if self.file < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        request = (self.start + PAGE, COUNT, self.start, b"", 1, self.space, 99, 1)
        self.request(self.file, MAKE_QUEUE, "<3Q16s4I", request, status_at=48)
        self.request(self.file, ENABLE, "<QI", (HOST_FAULTS, 99), status_at=8)
        return self

    def request(self, file, number, layout, values, status_at):
        argument = ctypes.create_string_buffer(struct.pack(layout, *values), 96)
        assert self.library.emu_uvm_ioctl(file, number, argument) == 0
        status = struct.unpack_from("<I", argument, status_at)[0]
        if status != 0:
            self.library.emu_uvm_close(self.file)
            raise OSError(f"status {status:#x}")

    def read(self):
        """Flush the queue, and take all records."""
        self.request(self.space, FLUSH, "<I", (99,), status_at=0)
        _, get, _, put = struct.unpack_from("<4I", self.memory)
        records = [
            self.memory[PAGE + i % COUNT * RECORD :][:RECORD]
            for i in range(get, put + COUNT * (put < get))
        ]
        struct.pack_into("<2I", self.memory, 0, put, put)
        self.last = records[-1] if records else self.last
        return records

    def store_pages(self, count):
        """Store into `count` fresh pages; return the numbers of records and of dropped ones."""
        dropped = self.dropped()
        with managedmem.empty(count * PAGE) as buffer:
            ctypes.memset(buffer.handle, 1, buffer.size)
            return len(self.read()), self.dropped() - dropped

    def dropped(self):
        return sum(struct.unpack_from("<64Q", self.memory, 16))

    def last_record(self):
        return self.last

    def __enter__(self):
        return self.open()

    def __exit__(self, *unused):
        self.library.emu_uvm_close(self.file)
