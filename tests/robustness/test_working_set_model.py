"""Random programs over a WorkingSet, beside a model in NumPy: every byte is the right one.

Work is queued on several streams, and waited for when its result is looked at. A stream waits for
another one only where the caller has to see to that: between uses of one group.
"""

import random

import numpy
import pytest

import managedmem
from constants import EMULATED, PAGE
from contents import write
from managedmem import Device, Stream, WorkingSet, emulator

DTYPES = ["u1", "i2", "f4", "f8", "c16", "?"]
MOST = 6 * PAGE  # bytes of an array
SLOTS = 24
SEEDS = 12 if EMULATED else 4
STEPS = 250


def listed(arrays):
    return [*arrays.values()] if isinstance(arrays, dict) else [*arrays]


class Member:
    """A group, the bytes that its arrays must hold, and the stream of its latest uses."""

    def __init__(self, group, arrays, kind):
        self.group = group
        self.kind = kind
        self.bytes = [bytearray(array.tobytes()) for array in arrays]
        self.known = kind != "scratch"  # scratch: once it was written in a use
        self.stream = None
        self.open = 0
        self.open_writers = 0
        self.late = []  # arrays that outlive their use


class Program:
    """One random program. Reads are looked at when their slot is needed again."""

    def __init__(self, seed):
        self.chosen = random.Random(seed)
        self.streams = [Stream() for _ in range(3)]
        self.working = WorkingSet(self.chosen.choice([6, 14, 30]) * PAGE, Device(0))
        self.members = []
        self.results = managedmem.empty(SLOTS * MOST)
        self.sources = managedmem.empty(SLOTS * MOST)
        self.read = [None] * SLOTS  # stream and bytes
        self.written = [None] * SLOTS  # stream
        self.log = []
        self.turn = 0
        if EMULATED:
            emulator.schedule(self.chosen.choice(["eager", "lazy"]))

    def close(self):
        for stream in self.streams:
            stream.sync()
            stream.close()
        self.working.close()
        self.members.clear()
        self.results.close()
        self.sources.close()

    def run(self):
        for _ in range(4):
            self.add()
        kinds = {
            self.add: 6,
            self.use: 60,
            self.on_host: 10,
            self.remove: 4,
            self.give_order: 3,
            self.drop_late: 8,
            self.read_late: 8,
            self.look: 6,
        }
        for _ in range(STEPS):
            (act,) = self.chosen.choices([*kinds], [*kinds.values()])
            self.log.append(act.__name__)
            act()
            assert self.working.nbytes <= self.working.budget
        self.finish()

    # --- groups ---

    def add(self):
        if len(self.members) >= 14:
            return
        arrays = [self.make_array() for _ in range(self.chosen.randrange(1, 4))]
        kind = self.chosen.choice(["read", "write", "write", "scratch"])
        form = self.chosen.choice(["sequence", "mapping"])
        given = arrays if form == "sequence" else {f"a{i}": a for i, a in enumerate(arrays)}
        self.members.append(Member(self.working.add(given, kind), arrays, kind))

    def make_array(self):
        dtype = numpy.dtype(self.chosen.choice(DTYPES))
        count = self.chosen.choice([0, 1, 5, PAGE, self.chosen.randrange(1, MOST)])
        count = min(count, MOST // dtype.itemsize)
        data = self.chosen.randbytes(count * dtype.itemsize)
        if dtype == "?":
            data = bytes(byte & 1 for byte in data)
        return numpy.frombuffer(data, dtype).reshape(self.chosen.choice([(-1,), (count, 1)]))

    def remove(self):
        member = self.pick()
        if member is None or len(self.members) < 4:
            return
        if member.open or member.late:
            with pytest.raises(RuntimeError, match="in use"):
                self.working.remove(member.group)
            return
        self.working.remove(member.group)
        self.check_home(member)
        self.members.remove(member)

    def give_order(self):
        groups = [member.group for member in self.members]
        count = self.chosen.randrange(1, 20)
        self.working.order = self.chosen.choice([None, self.chosen.choices(groups, k=count)])

    def pick(self):
        """A loop over the groups, with leaps."""
        if not self.members:
            return None
        if self.chosen.random() < 0.3:
            return self.chosen.choice(self.members)
        self.turn += 1
        return self.members[self.turn % len(self.members)]

    # --- the device ---

    def use(self, depth=0):
        member = self.pick()
        if member is None:
            return
        stream = self.chosen.choice(self.streams)
        writes = member.kind != "read" and self.chosen.random() < 0.7
        access = "read" if member.kind == "write" and not writes else None
        if member.kind == "scratch" and not member.open and not member.late:
            member.known = False
        self.follow(member, stream)
        use = member.group.use(stream=stream, access=access)
        member.open += 1
        member.open_writers += access is None and member.kind != "read"
        arrays = listed(use.arrays)
        if member.kind == "scratch":
            self.write_all(member, arrays, stream)
        for _ in range(self.chosen.randrange(3)):
            if writes and self.chosen.random() < 0.6:
                self.write_part(member, arrays, stream)
            else:
                self.queue_read(member, arrays, stream)
        if depth < 2 and self.chosen.random() < 0.4:
            self.use(depth + 1)
            self.follow(member, stream)
            self.queue_read(member, arrays, stream)
        if use.is_resident and member.kind != "scratch" and self.chosen.random() < 0.15:
            number = self.chosen.randrange(len(arrays))
            if arrays[number].nbytes:
                member.late += [arrays[number], number]
        del arrays
        use.close()
        member.open -= 1
        member.open_writers -= access is None and member.kind != "read"

    def follow(self, member, stream):
        """What the caller has to do between streams."""
        if member.stream not in (None, stream):
            member.stream.sync()
        member.stream = stream

    def write_all(self, member, arrays, stream):
        for number, array in enumerate(arrays):
            self.queue_write(member, number, array, 0, array.nbytes, stream)
        member.known = True

    def write_part(self, member, arrays, stream):
        number = self.chosen.randrange(len(arrays))
        nbytes = arrays[number].nbytes
        start = self.chosen.randrange(nbytes + 1)
        self.queue_write(
            member, number, arrays[number], start, self.chosen.randrange(start, nbytes + 1), stream
        )

    def queue_write(self, member, number, array, start, stop, stream):
        if stop == start:
            return
        slot = self.chosen.randrange(SLOTS)
        if self.written[slot] is not None:
            self.written[slot].sync()
        data = self.chosen.randbytes(stop - start)
        source = self.sources[slot * MOST :][: stop - start]
        write(source, data)
        source.copy_to(array.view("uint8", (array.nbytes,))[start:stop], stream=stream)
        self.written[slot] = stream
        member.bytes[number][start:stop] = data

    def queue_read(self, member, arrays, stream):
        number = self.chosen.randrange(len(arrays))
        if member.known and arrays[number].nbytes:
            self.queue_read_of(arrays[number], bytes(member.bytes[number]), stream)

    def queue_read_of(self, array, wanted, stream):
        slot = self.chosen.randrange(SLOTS)
        self.look_at(slot)
        self.results[slot * MOST :][: array.nbytes].copy_from(array, stream=stream)
        self.read[slot] = (stream, wanted)

    def look(self):
        self.look_at(self.chosen.randrange(SLOTS))

    def look_at(self, slot):
        if self.read[slot] is not None:
            stream, wanted = self.read[slot]
            stream.sync()
            assert bytes(self.results[slot * MOST :][: len(wanted)]) == wanted, self.log
            self.read[slot] = None

    # --- arrays that outlive their use ---

    def read_late(self):
        for member in self.members:
            if member.late and not member.open:
                stream = self.chosen.choice(self.streams)
                self.follow(member, stream)
                array, number = member.late[:2]
                if array.nbytes:
                    self.queue_read_of(array, bytes(member.bytes[number]), stream)

    def drop_late(self):
        member = self.pick()
        if member is not None and not member.open:
            if member.stream is not None:
                member.stream.sync()  # which may read them still
            member.late.clear()

    # --- the host ---

    def on_host(self):
        member = self.pick()
        if member is None or member.kind == "scratch":
            return
        access = self.chosen.choice(["read", "write"])
        if member.open_writers or (access == "write" and (member.open or member.late)):
            with pytest.raises(RuntimeError, match="the device uses"):
                member.group.use_on_host(access=access).__enter__()
            return
        with member.group.use_on_host(access=access) as arrays:
            for number, array in enumerate(listed(arrays)):
                assert bytes(array) == member.bytes[number], self.log
                if access == "write" and array.nbytes:
                    data = self.chosen.randbytes(array.nbytes)
                    write(array, data)
                    member.bytes[number][:] = data

    def check_home(self, member):
        if member.kind != "scratch":
            with member.group.use_on_host() as arrays:
                assert [bytes(array) for array in listed(arrays)] == member.bytes, self.log

    def finish(self):
        for slot in range(SLOTS):
            self.look_at(slot)
        stats = self.working.stats()
        assert stats.failures == 0, stats
        assert stats.acquired >= stats.hits + stats.mapped
        assert stats.kept == self.working.budget
        for member in self.members:
            member.late.clear()
        if self.chosen.random() < 0.5:
            self.working.close()
        for member in self.members:
            self.check_home(member)


@pytest.mark.filterwarnings("ignore:a group of .* exceeds the budget")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_programs(seed):
    program = Program(seed)
    try:
        program.run()
    finally:
        program.close()
