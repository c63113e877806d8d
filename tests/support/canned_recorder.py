"""A recorder with the events that a test writes down, in place of the extension's.

It follows the protocol of _managedmem.Recorder and adds up its events by itself, so that tables and
findings can be compared with exact texts. Its sums are of whole events: none may lie across the
border of two parts.
"""

from managedmem._trace_results import CAUSES, FIELDS, KINDS, RECORD, ROW, TOTAL

DIRECTIONS = ("to_device", "to_host", "between_devices")
ACCESSES = {None: 0, "read": 1, "write": 2, "atomic": 3}
HOST, NONE, OTHER = -1, -2, 0x7FFF
NOT_A_BUFFER = 0xFFFFFFFF
MS = 1_000_000
RAW, MONOTONIC = 5_000_000_000, 7_000_000_000
REPORT = {
    "lost": 0,
    "rejected": 0,
    "ambiguous": 0,
    "fault_overflows": 0,
    "fatal_faults": 0,
    "unlisted": 0,
    "truncated": False,
    "waited": True,
    "overhead": 250_000,
}


class Canned:
    """Memories, and events in parts; `recorder` makes the recorder that reports them."""

    def __init__(self, *, length_ms=1000, source="kernel", **report):
        self.memories = []
        self.events = [[]]
        self.ends = []
        self.time = RAW
        self.length = length_ms * MS
        self.source = source
        self.report = {**REPORT, **report}
        self.calls = []
        self.failing = {}

    def memory(self, label, nbytes, kind="buffer", *, born=0, died=-1, address=None, pooled=False):
        """Add a memory and return its index; times are in ms from the start."""
        last = self.memories[-1] if self.memories else ("", "", 1 << 40, 0)
        start = address or last[2] + -(-last[3] // (1 << 21)) * (1 << 21)
        when = [t if t in (0, -1) else RAW + t * MS for t in (born, died)]
        self.memories.append((kind, label, start, nbytes, *when, pooled))
        return len(self.memories) - 1

    def add(self, kind, memory, nbytes=1, offset=0, **more):
        """Add an event of 1 ms; `more`: source, destination, cause, access, extra, ms."""
        start = self.time
        self.time += more.get("ms", 1) * MS
        address = self.memories[memory][2] if memory < len(self.memories) else 0
        code = more.get("cause", 0)
        record = (
            start,
            self.time if kind in ("move", "throttling") else start,
            address + offset,
            nbytes,
            memory,
            more.get("source", NONE),
            more.get("destination", NONE),
            KINDS.index(kind),
            CAUSES.index(code) if isinstance(code, str) else code,
            ACCESSES[more.get("access")],
            0,
            more.get("extra", 0),
        )
        self.events[-1].append(record)
        return self

    def move(self, memory, nbytes, direction, cause="requested", **more):
        """Add a move "to_device", "to_host" or "between_devices", from or to device 0."""
        places = {"to_device": (HOST, 0), "to_host": (0, HOST), "between_devices": (0, OTHER)}
        source, destination = places[direction]
        more = {"source": source, "destination": destination, **more}
        return self.add("move", memory, nbytes, cause=cause, **more)

    def faults(self, memory, count, side="device", access="read"):
        """Add faults of one side, at the start of the memory."""
        for _ in range(count):
            source = 0 if side == "device" else HOST
            self.add(f"{side}_fault", memory, 1, source=source, access=access, ms=0, extra=77)
        return self

    def part(self):
        """End a part, as a mark does."""
        self.time += 1
        self.ends.append(self.time)
        self.events.append([])
        return self

    def recorder(self, *, limit=1_000_000, faults=True, sync=True):
        """The recorder that stands for the result of _managedmem.Recorder()."""
        self.calls.append(("new", limit, faults, sync))
        return CannedRecorder(self)


class CannedRecorder:
    """The recorder of a `Canned`."""

    def __init__(self, canned):
        self.canned = canned
        self.running = False
        self.source = canned.source
        self.source_detail = "/dev/nvidia-uvm-tools, layout 1"
        self.marks = 0

    def _call(self, name):
        self.canned.calls.append((name,))
        error = self.canned.failing.pop(name, None)
        if error is not None:
            raise error

    def start(self, wait=True):
        self.running = not isinstance(self.canned.failing.get("start"), Exception)
        self._call("start" if wait else "start without a wait")

    def mark(self):
        self._call("mark")
        self.marks += 1

    def stop(self, wait=True):
        self.running = False
        self._call("stop" if wait else "stop without a wait")

    def attribute(self, named):
        base = self.canned.memories
        self.memories = [
            *base,
            *(("named", label, start, n, 0, -1, False) for start, n, label in named),
        ]
        self.pieces = [[self._owned(e, len(base)) for e in part] for part in self._finished()]
        rows = {}
        before = {}
        for part, events in enumerate(self.pieces):
            turned = {}
            for event in events:
                for memory in {event[4], TOTAL}:
                    row = rows.setdefault((part, memory), dict.fromkeys(FIELDS, 0))
                    count(row, event)
                    within = turning(turned, memory, event)
                    row["turned_back"] += within
                    row["turned_across"] += turning(before, memory, event) - within
        packed = (ROW.pack(*key, *row.values()) for key, row in rows.items())
        return self.memories, b"".join(packed)

    def _owned(self, event, first):
        for index in range(len(self.memories) - 1, first - 1, -1):
            _, _, start, nbytes, *_ = self.memories[index]
            if start <= event[2] < start + nbytes:
                return (*event[:4], index, *event[5:])
        return event

    def _finished(self):
        return self.canned.events[: self.marks] if self.running else self.canned.events

    def events(self):
        return memoryview(b"".join(RECORD.pack(*e) for part in self.pieces for e in part))

    def parts(self):
        end = RAW + self.canned.length
        borders = [RAW, *self.canned.ends, end]
        finished = self._finished()
        return [(borders[i], borders[i + 1], len(part)) for i, part in enumerate(finished)]

    def clock(self):
        return RAW, MONOTONIC, RAW + self.canned.length, MONOTONIC + self.canned.length

    def report(self):
        return dict(self.canned.report)


def count(row, event):
    """Add an event to the sums of a row."""
    start, end, _, nbytes, _, source, destination, number, cause, access, _, _ = event
    kind = KINDS[number]
    if kind == "move":
        direction = DIRECTIONS[1 if destination == HOST else 0 if source == HOST else 2]
        row[f"{direction}_{CAUSES[cause]}"] += nbytes
        row["move_time"] += end - start
    elif kind in ("host_fault", "device_fault"):
        row[f"{kind}s"] += 1
        row[kind.replace("_", "_write_") + "s"] += access >= 2
    elif kind == "throttling":
        row["throttled"] += end - start
    names = {
        "remote_map": "remote_mapped",
        "thrashing": "thrashing",
        "duplicate": "duplicated",
        "eviction": "evicted",
    }
    if kind in names:
        row[names[kind]] += nbytes


def turning(turned, memory, event):
    """The bytes of a move back to where the same bytes came from."""
    if KINDS[event[7]] != "move":
        return 0
    key = (memory, event[2], event[3])
    before, turned[key] = turned.get(key), (event[5], event[6])
    return event[3] if before == (event[6], event[5]) else 0
