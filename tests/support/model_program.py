"""The base of random programs: memory, streams, and calls that may fail."""

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from constants import EMULATED, PAGE
from foreign_objects import ProtocolStream
from managedmem import CUDAError, Device, Stream
from memory_model import Page

if EMULATED:
    from managedmem import emulator


MOST_PIECES, MOST_STREAMS, MOST_PLANS, MOST_FAULTS = 12, 3, 3, 24
BATCH_CALLS_SINCE = 13000
# The driver calls that fail in each kind of operation. Those of MAKING fail only before they act,
# because otherwise their objects would be lost.
ADVISING = (
    "cuMemAdvise",
    "cuMemAdvise",
    "cuMemRangeGetAttribute",
    "cuMemRangeGetAttributes",
    "cuPointerGetAttributes",
)
MOVING = (
    *("cuMemPrefetchAsync", "cuMemPrefetchBatchAsync", "cuMemDiscardBatchAsync"),
    *("cuMemDiscardAndPrefetchBatchAsync", "cuLaunchHostFunc", "cuMemRangeGetAttributes"),
    *("cuStreamIsCapturing", "cuStreamWaitEvent", "cuEventRecord"),
)
WRITING = ("cuMemcpyAsync", "cuMemsetD8Async", "cuMemsetD16Async", "cuMemsetD32Async")
ENDING = ("cuStreamSynchronize", "cuStreamIsCapturing")
MAKING = ("cuMemAllocManaged", "cuMemAllocFromPoolAsync", "cuMemcpyAsync", "cuPointerGetAttributes")
CODES = (1, 2, 400, 719, 801, 999)
FAILURES = (CUDAError, ValueError, NotImplementedError)

picks = st.integers(0, 1 << 12)
# The first and the last page of a range, and bytes that are taken off both ends.
spans = st.tuples(
    st.integers(0, 11), st.integers(0, 11), st.sampled_from([0, 0, 0, 0, 1, 100, PAGE // 2])
)
several = st.lists(st.tuples(picks, spans, picks), min_size=1, max_size=5)
flags = st.booleans()
sizes = st.sampled_from([PAGE, 2 * PAGE, 3 * PAGE + 100, 6 * PAGE, 12 * PAGE, 1, 1000, 0])
patterns = st.one_of(
    st.integers(0, 255), st.sampled_from([b"a", b"bc", b"\0\xff", b"defg", b"\1\2\3\4"])
)
dispatches = st.sampled_from(["auto", "loop", "batch"])
defers = st.sampled_from([None, True, False])
faults = st.lists(
    st.one_of(
        st.none(), st.tuples(picks, st.integers(1, 4), st.sampled_from(CODES), st.booleans())
    ),
    min_size=MOST_FAULTS // 2,
    max_size=MOST_FAULTS,
)


class Piece:
    """A buffer of the program: the bytes of a memory from `start` on."""

    def __init__(self, buffer, memory, start=0, parent=None, owners=()):
        self.buffer, self.memory, self.start, self.size = buffer, memory, start, buffer.size
        self.is_view = parent is not None
        self.base = parent.root if parent else None  # the root of a view; None once it was dropped
        self.host_views, self.tensors = [], []
        self.owners = parent.owners if parent else owners  # whose memory this one wraps

    @property
    def root(self):
        """The piece that ends this one when it ends; computed, to avoid a reference to itself."""
        return self.base if self.is_view else self

    @property
    def wrapper(self):
        """The root, if it wraps another buffer's memory; else None."""
        return self.root if self.owners else None

    @property
    def whole(self):
        """The root, or this piece if the root was dropped."""
        return self.root or self


class Program(RuleBasedStateMachine):
    """The state of a program, its calls of the library, and its comparisons with the model."""

    def __init__(self):
        super().__init__()
        self.pieces, self.streams, self.plans, self.applied = [], [], [], []
        self.pools, self.closed = {}, []
        self.faults = []  # of the next calls, the next one last
        self.has_fired = False  # True if the latest call met its fault

    def piece(self, pick, *kinds):
        found = [p for p in self.pieces if not kinds or p.memory.kind in kinds]
        return found[pick % len(found)] if found else None

    def part(self, piece, span):
        """A range inside a piece: its offset there, and its size."""
        first, last, cut = min(span[:2]), max(span[:2]), span[2]
        start = min(first * PAGE + cut, piece.size)
        return start, max(0, min((last + 1) * PAGE - cut, piece.size) - start)

    def stream(self, pick):
        """A stream argument, and the model's key for the stream."""
        made = self.streams
        choice = pick % (3 + 2 * len(made))
        if choice < 3:
            return ((None, "legacy"), (1, "legacy"), (2, "thread"))[choice]
        chosen = made[(choice - 3) // 2]
        return (chosen if choice % 2 else ProtocolStream(chosen.handle)), chosen

    def wait(self, memory, but=None):
        """Waits for the work of all other streams on a memory."""
        for key in memory.busy - {but}:
            if isinstance(key, Stream) and not key.is_closed:
                key.sync()
            else:
                Device(0).sync()
        memory.busy &= {but}

    def use(self, memory, key):
        self.wait(memory, but=key)
        memory.busy.add(key)

    def attempt(self, action, calls, allowed=()):
        """Makes a call of the library while one of these driver calls fails. Returns whether it
        succeeded, and its result. Raises errors that are neither the fault's nor allowed."""
        fault = self.faults.pop() if self.faults else None
        if fault is not None:
            pick, nth, code, after = fault
            after = after and calls is not MAKING
            emulator.fail(calls[pick % len(calls)], nth=nth, code=code, after=after)
        value, ok, self.has_fired = None, True, False
        try:
            value = action()
        except (*FAILURES, *allowed) as error:
            ok = False
            if not isinstance(error, allowed) and not (fault and emulator.failure_fired()):
                raise
        finally:
            if fault is not None:
                self.has_fired = emulator.failure_fired()
                emulator.clear_failures()
        return ok, value

    def found(self, piece, start=0, size=None):
        """The bytes that are there now."""
        size = piece.size - start if size is None else size
        self.wait(piece.memory)
        if piece.memory.kind == "device":
            out = bytearray(size)
            piece.buffer.range(start, size).copy_to(out)
            return bytes(out)
        with memoryview(piece.buffer) as view, view.cast("B") as flat:
            return bytes(flat[start : start + size])

    def check_bytes(self, piece, start=0, size=None):
        wrong = piece.memory.wrong_byte(self.found(piece, start, size), piece.start + start)
        assert wrong is None, f"byte {wrong} of {piece.memory.kind} memory of {piece.memory.size}"

    def records(self, piece):
        """The driver's record of each page, for a piece that spans its whole memory."""
        self.wait(piece.memory)
        return [
            Page(*run[2:])
            for run in piece.buffer.page_runs()
            for _ in range(-(-run.nbytes // PAGE))
        ]

    def take_records(self, piece):
        """Take over the records of new memory, which can be those of freed memory (topic of the
        conformance program: records of freed memory)."""
        piece.memory.pages = [{page} for page in self.records(piece)]

    def check_records(self, piece):
        memory = piece.memory
        if memory.kind != "managed" or piece.size != memory.size:
            return
        found = self.records(piece)
        if not EMULATED:  # a driver leaves some prefetches out of its records
            for i, page in enumerate(found):
                last = page.last_prefetch_location
                memory.pages[i] = {p._replace(last_prefetch_location=last) for p in memory.pages[i]}
        expected = list(memory.pages)
        wrong = memory.wrong_page(found)
        assert wrong is None, f"page {wrong} says {found[wrong]}, may say {expected[wrong]}"

    def check_piece(self, piece):
        self.check_bytes(piece)
        self.check_records(piece)

    def keep(self, piece):
        if len(self.pieces) < MOST_PIECES:
            self.pieces.append(piece)
        else:
            piece.buffer.close()

    def prefetched_together(self, entries, *, certain):
        """Record a prefetch of ranges. Adjacent ones are merged, and their pages may differ."""
        states = {}
        for piece, start, size, _ in entries:
            pages = piece.memory.span(piece.start + start, size)
            states.setdefault(id(piece.memory), set()).update(
                *(piece.memory.pages[i] for i in pages)
            )
        for piece, start, size, place in entries:
            alike = len(states[id(piece.memory)]) == 1
            self.prefetched(piece, start, size, place, certain=certain and alike)

    def prefetched(self, piece, start, size, place, *, certain):
        """Record a prefetch. Where pages differ, a driver may leave some records unchanged."""
        begin = piece.start + start
        piece.memory.tell(
            begin,
            size,
            lambda page: page._replace(last_prefetch_location=place),
            certain=certain and piece.memory.alike(begin, size),
        )
