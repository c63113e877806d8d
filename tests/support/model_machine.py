"""Random programs against a model; hypothesis makes them, and shrinks those that fail.

A program allocates, wraps, slices, advises, moves, discards, copies, fills, plans, exports, closes
and drops memory, on several streams, as a correct program does: before a stream or the host uses
memory, it waits for other streams that work on it. `memory_model.Memory` has the expected state.
`FaultyMachine` also lets driver calls fail, before or after they acted, and then asks for the state
that the documentation promises.

    PYTHONPATH=python MANAGEDMEM_DRIVER=emulator python tests/support/model_machine.py SEED PROGRAMS
"""

import contextlib
import gc
import itertools
import sys

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import managedmem
from constants import EMULATED, PAGE
from foreign_objects import ProtocolStream
from live_memory import settle, warm_up
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
from memory_model import Memory, Page

if EMULATED:
    from managedmem import emulator

STEPS = 40
MOST_PIECES, MOST_STREAMS, MOST_PLANS, MOST_FAULTS = 12, 3, 3, 24
BATCH_CALLS_SINCE = 13000
# The driver calls that fail in each kind of operation. Those of MAKING fail before they act,
# or their objects would be lost.
ADVISING = (
    "cuMemAdvise",
    "cuMemAdvise",
    "cuMemRangeGetAttribute",
    "cuMemRangeGetAttributes",
    "cuPointerGetAttributes",
)
MOVING = (
    "cuMemPrefetchAsync",
    "cuMemPrefetchBatchAsync",
    "cuMemDiscardBatchAsync",
    "cuMemDiscardAndPrefetchBatchAsync",
    "cuLaunchHostFunc",
    "cuMemRangeGetAttributes",
    "cuStreamIsCapturing",
    "cuStreamWaitEvent",
    "cuEventRecord",
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
        self.base = parent.root if parent else None  # what a view ends with; None: it was dropped
        self.host_views, self.tensors = [], []
        self.owners = parent.owners if parent else owners  # whose memory this one wraps

    @property
    def root(self):
        """The piece whose end is the end of this one; without a reference to itself."""
        return self.base if self.is_view else self

    @property
    def wrapper(self):
        """The buffer over another one's memory that this is, or is a view of."""
        return self.root if self.owners else None

    @property
    def whole(self):
        """The piece with the most of the memory that is still at hand."""
        return self.root or self


class Machine(RuleBasedStateMachine):
    # --- the program's own means

    def __init__(self):
        super().__init__()
        self.pieces, self.streams, self.plans, self.applied = [], [], [], []
        self.pools, self.closed = {}, []
        self.faults = []  # of the next calls, the next one last
        self.begin()

    def begin(self):
        warm_up()
        Device(0).set_current()
        self.before = emulator.live() if EMULATED else None
        version = managedmem.driver_info()["version"]
        self.has_batches = version >= BATCH_CALLS_SINCE
        devices = Device.all()
        self.devices = devices[:2]
        self.members = [*self.devices, Host()]
        nodes = [Host(0), Host(1)] if EMULATED and self.node_count() > 1 else []
        self.places = [*self.members, *nodes]
        self.pageable = all(device.pageable_memory_access for device in devices)
        for size in (4 * PAGE, 12 * PAGE):
            self.allocate(size, None, 0)

    def node_count(self):
        with ManagedMemoryResource().allocate(PAGE) as page:
            for node in (0, 1):
                try:
                    page.prefetch(Host(node))
                except ValueError:
                    return node
        Device(0).sync()
        return 2

    def piece(self, pick, *kinds):
        found = [p for p in self.pieces if not kinds or p.memory.kind in kinds]
        return found[pick % len(found)] if found else None

    def part(self, piece, span):
        """A range inside a piece: its offset there, and its size."""
        first, last, cut = min(span[:2]), max(span[:2]), span[2]
        start = min(first * PAGE + cut, piece.size)
        return start, max(0, min((last + 1) * PAGE - cut, piece.size) - start)

    def stream(self, pick):
        """A stream as it is given, and what the model calls it."""
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
        value, ok = None, True
        try:
            value = action()
        except (*FAILURES, *allowed) as error:
            ok = False
            if not isinstance(error, allowed) and not (fault and emulator.failure_fired()):
                raise
        finally:
            if fault is not None:
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
        """What the driver says of each page of a piece that has all of its memory."""
        self.wait(piece.memory)
        return [
            Page(*run[2:])
            for run in piece.buffer.page_runs()
            for _ in range(-(-run.nbytes // PAGE))
        ]

    def check_records(self, piece):
        memory = piece.memory
        if memory.kind != "managed" or piece.size != memory.size:
            return
        found = self.records(piece)
        if not EMULATED:  # a driver leaves some prefetches out of its records
            for i, page in enumerate(found):
                last = page.last_prefetch_location
                memory.pages[i] = {p._replace(last_prefetch_location=last) for p in memory.pages[i]}
        wanted = list(memory.pages)
        wrong = memory.wrong_page(found)
        assert wrong is None, f"page {wrong} says {found[wrong]}, may say {wanted[wrong]}"

    def check_piece(self, piece):
        self.check_bytes(piece)
        self.check_records(piece)

    def keep(self, piece):
        if len(self.pieces) < MOST_PIECES:
            self.pieces.append(piece)
        else:
            piece.buffer.close()

    @initialize(lazy=flags)
    def begin_with_schedule(self, lazy):
        self.schedule(lazy)

    # --- what begins and ends

    @rule(size=sizes, pool=st.sampled_from([None, None, None, "pooled", "device"]), on=picks)
    def allocate(self, size, pool, on):
        if len(self.pieces) >= MOST_PIECES:
            return
        given, key = self.stream(on) if pool else (None, None)
        if isinstance(key, Stream):
            given = key  # the block keeps the stream, which it could not behind another object
        if pool is None or not self.has_batches:
            kind, resource = "managed", ManagedMemoryResource()
        elif pool == "pooled":
            kind, resource = "pooled", self.pool(pool, lambda: ManagedMemoryResource(pooled=True))
        else:
            kind, resource = "device", self.pool(pool, lambda: DeviceMemoryResource(Device(0)))
        ok, buffer = self.attempt(lambda: resource.allocate(size, stream=given), MAKING)
        if ok:
            memory = Memory(size, kind=kind, skew=buffer.handle % PAGE)
            self.pieces.append(Piece(buffer, memory))
            if kind != "managed":
                memory.busy.add(key)
                buffer.fill(on % 256, stream=given)
                memory.write(0, bytes([on % 256]) * size)
            else:
                self.write_from_the_host(len(self.pieces) - 1, (0, 11, 0), on % 256)

    def pool(self, name, make):
        if name not in self.pools:
            self.pools[name] = make()
        return self.pools[name]

    @rule(name=st.sampled_from(["pooled", "device"]))
    def close_pool(self, name):
        """Its buffers stay."""
        if name in self.pools:
            self.pools.pop(name).close()

    @precondition(lambda self: self.pieces)
    @rule(pick=picks, span=spans)
    def take_view(self, pick, span):
        if (piece := self.piece(pick)) and len(self.pieces) < MOST_PIECES:
            start, size = self.part(piece, span)
            view = piece.buffer.range(start, size)
            self.pieces.append(Piece(view, piece.memory, piece.start + start, piece))

    @precondition(lambda self: self.pieces)
    @rule(pick=picks, span=spans, exported=flags)
    def wrap(self, pick, span, exported):
        """Other buffers over the same memory, as other libraries would have them."""
        piece = self.piece(pick, "managed")
        if piece is None or piece.size == 0 or len(self.pieces) >= MOST_PIECES:
            return
        start, size = self.part(piece, span)
        if size == 0:
            return
        owner = memoryview(piece.buffer) if exported else piece.buffer
        address = piece.buffer.handle + start
        buffer = ManagedBuffer.from_handle(address, size, owner=owner)
        owners = (piece, *piece.owners, *([piece.root] if piece.root else []))
        self.pieces.append(Piece(buffer, piece.memory, piece.start + start, owners=owners))

    @precondition(lambda self: self.pieces)
    @rule(pick=picks, waits=flags, on=picks)
    def close(self, pick, waits, on):
        """Buffers of which host views live stay open, and memory with an export."""
        piece = self.piece(pick)
        given, key = self.stream(on) if waits else (None, None)
        family = [p for p in self.pieces if p.root is piece] if piece.root is piece else [piece]
        if any(piece in other.owners for other in self.pieces):
            return  # a correct program does not take memory away under its wrappers
        if piece.memory.kind != "managed":
            self.wait(piece.memory, but=key)
        exported = any(p.host_views or (p.tensors and piece.root is piece) for p in family)
        ok, _ = self.attempt(
            lambda: piece.buffer.close(given), ENDING, (BufferError,) if exported else ()
        )
        assert not (ok and exported), "closed in spite of an export"
        if piece.buffer.is_closed:
            assert piece.buffer.handle == 0
            assert piece.buffer.owner is None
            assert all(p.buffer.is_closed for p in family)
            self.pieces = [p for p in self.pieces if p not in family]
            self.closed = [piece.buffer, *self.closed[:2]]
            if piece.root is not None and piece.root is not piece:
                piece.root.tensors += piece.tensors  # they hold the memory, not the view
            piece.tensors = []
        else:
            assert not ok
            self.check_piece(piece)

    @precondition(lambda self: self.pieces)
    @rule(pick=picks, cycle=flags)
    def drop(self, pick, cycle):
        """Lets go of a buffer without closing it, perhaps in a cycle of references."""
        piece = self.piece(pick)
        if piece.host_views or piece.tensors or (piece.owners and (self.plans or self.applied)):
            return
        if piece.memory.kind != "managed":
            self.wait(piece.memory)
        self.pieces.remove(piece)
        for other in self.pieces:
            if other.root is piece:
                other.base = None  # the memory lives on in its views
        if cycle and not piece.owners:
            knot = [piece.buffer]
            knot.append(knot)

    @rule()
    def collect(self):
        gc.collect(1)

    @precondition(lambda self: self.pieces)
    @rule(pick=picks, kind=st.sampled_from(["memoryview", "dlpack", "array"]))
    def export(self, pick, kind):
        piece = self.piece(pick, "managed", "pooled")
        if piece is None or piece.size == 0:
            return
        self.wait(piece.memory)
        if kind == "memoryview":
            piece.host_views.append(memoryview(piece.buffer))
        elif kind == "dlpack":
            piece.tensors.append(piece.buffer.__dlpack__(max_version=(1, 0)))
        else:
            piece.host_views.append(piece.buffer.numpy())
            self.prefetched(piece, 0, piece.size, Host(), certain=False)

    @rule(pick=picks)
    def release(self, pick):
        if exporting := [p for p in self.pieces if p.host_views or p.tensors]:
            chosen = exporting[pick % len(exporting)]
            chosen.host_views.clear()
            chosen.tensors.clear()

    @precondition(lambda self: self.closed)
    @rule(pick=picks, call=picks)
    def use_closed(self, pick, call):
        buffer = self.closed[pick % len(self.closed)]
        calls = (
            lambda: buffer.prefetch(Host()),
            lambda: buffer.fill(0),
            lambda: buffer.range(0, 0),
            lambda: setattr(buffer, "read_mostly", True),
            lambda: managedmem.prefetch([buffer], Host()),
            lambda: memoryview(buffer),
        )
        try:
            calls[call % len(calls)]()
        except (RuntimeError, BufferError):
            return
        raise AssertionError("a closed buffer was used")

    # --- streams

    @rule(on=picks)
    def make_stream(self, on):
        if len(self.streams) < MOST_STREAMS:
            self.streams.append(Stream())

    @precondition(lambda self: self.streams)
    @rule(pick=picks)
    def close_stream(self, pick):
        """Work that is queued on it still runs."""
        if self.streams:
            self.streams.pop(pick % len(self.streams)).close()

    @rule(pick=picks)
    def sync(self, pick):
        if pick % 2 and self.streams:
            self.streams[pick % len(self.streams)].sync()
        else:
            Device(0).sync()

    @rule(lazy=flags)
    def schedule(self, lazy):
        """When queued work runs: at once, or when something waits for it."""
        if EMULATED:
            emulator.schedule("lazy" if lazy else "eager")

    # --- bytes

    def revive(self, memory, piece, key, given):
        """On a GPU a write after a discard needs a prefetch, or it may be lost."""
        if memory.stale and not EMULATED:
            self.use(memory, key)
            piece.buffer.prefetch(Device(0), stream=given)
        memory.stale = False

    @precondition(lambda self: self.pieces)
    @rule(pick=picks, span=spans, byte=st.integers(0, 255))
    def write_from_the_host(self, pick, span, byte):
        piece = self.piece(pick, "managed", "pooled")
        if piece is None:
            return
        self.revive(piece.memory, piece.whole, "legacy", None)
        self.wait(piece.memory)
        start, size = self.part(piece, span)
        data = bytes((byte + 3 * i) & 255 for i in range(256)) * (size // 256 + 1)
        with memoryview(piece.buffer) as view, view.cast("B") as flat:
            flat[start : start + size] = data[:size]
        piece.memory.write(piece.start + start, data[:size])

    def written(self, ok, piece, before, start, size):
        """After a call that writes: what the model has now, or if it failed, either of both."""
        if not ok:
            found = self.found(piece, start, size)
            memory = piece.memory
            whole = bytearray(memory.data)
            whole[piece.start + start : piece.start + start + size] = found
            for i in range(memory.size):  # outside of the part, what is not known stays so
                if not memory.known[i] and not before.known[i]:
                    whole[i] = memory.data[i]
            wrong = memory.either(before, bytes(whole))
            assert wrong is None, f"byte {wrong} is neither as before nor as written"

    @precondition(lambda self: self.pieces)
    @rule(pick=picks, span=spans, pattern=patterns, on=picks)
    def fill(self, pick, span, pattern, on):
        piece = self.piece(pick)
        if piece is None:
            return
        given, key = self.stream(on)
        start, size = self.part(piece, span)
        pattern_bytes = bytes([pattern]) if isinstance(pattern, int) else pattern
        size -= size % len(pattern_bytes)
        memory, before = piece.memory, piece.memory.snapshot()
        self.revive(memory, piece.whole, key, given)
        self.use(memory, key)
        memory.write(piece.start + start, pattern_bytes * (size // len(pattern_bytes)))
        view = piece.buffer.range(start, size)
        ok, _ = self.attempt(lambda: view.fill(pattern, stream=given), WRITING)
        self.written(ok, piece, before, start, size)

    @precondition(lambda self: self.pieces)
    @rule(pick=picks, other=picks, span=spans, from_=spans, on=picks, back=flags)
    def copy(self, pick, other, span, from_, on, back):
        to, source = self.piece(pick), self.piece(other)
        if to is None:
            return
        given, key = self.stream(on)
        start, size = self.part(to, span)
        at, most = self.part(source, from_)
        size = min(size, most)
        begin, there = to.start + start, source.start + at
        if to.memory is source.memory and begin < there + size and there < begin + size:
            return  # an overlapping copy is not defined
        before = to.memory.snapshot()
        self.revive(to.memory, to.whole, key, given)
        self.use(to.memory, key)
        self.use(source.memory, key)
        to.memory.copy(begin, size, source.memory, there)
        target, origin = to.buffer.range(start, size), source.buffer.range(at, size)
        ok, _ = self.attempt(
            (lambda: origin.copy_to(target, stream=given))
            if back
            else (lambda: target.copy_from(origin, stream=given)),
            WRITING,
        )
        self.written(ok, to, before, start, size)

    @precondition(lambda self: self.pieces)
    @rule(pick=picks, span=spans, byte=st.integers(0, 255), on=picks)
    def copy_from_system_memory(self, pick, span, byte, on):
        """Waits, so that the array may be changed at once."""
        piece = self.piece(pick)
        if piece is None:
            return
        given, key = self.stream(on)
        start, size = self.part(piece, span)
        self.revive(piece.memory, piece.whole, key, given)
        self.use(piece.memory, key)
        source = bytearray((byte + i) & 255 for i in range(size))
        piece.memory.write(piece.start + start, source)
        piece.buffer.range(start, size).copy_from(source, stream=given)
        source[:] = bytes(size)

    @precondition(lambda self: self.pieces)
    @rule(pick=picks, span=spans, on=picks)
    def copy_to_system_memory(self, pick, span, on):
        piece = self.piece(pick)
        if piece is None:
            return
        given, key = self.stream(on)
        start, size = self.part(piece, span)
        self.use(piece.memory, key)
        out = bytearray(size)
        piece.buffer.range(start, size).copy_to(out, stream=given)
        wrong = piece.memory.wrong_byte(bytes(out), piece.start + start)
        assert wrong is None, f"byte {wrong} arrived as another"

    @precondition(lambda self: self.pieces)
    @rule(pick=picks)
    def copy_anew(self, pick):
        piece = self.piece(pick)
        if piece is None or len(self.pieces) >= MOST_PIECES:
            return
        self.wait(piece.memory)
        kind = piece.memory.kind
        closed = (RuntimeError,) if kind != "managed" else ()  # its resource may be
        ok, buffer = self.attempt(piece.buffer.copy_to, MAKING, closed)
        if not ok:
            return
        memory = Memory(buffer.size, kind=kind, skew=buffer.handle % PAGE)
        memory.busy.add("legacy")
        memory.copy(0, buffer.size, piece.memory, piece.start)
        piece.memory.busy.add("legacy")
        self.pieces.append(Piece(buffer, memory))

    @precondition(lambda self: self.pieces)
    @rule(pick=picks)
    def check(self, pick):
        self.check_piece(self.piece(pick))

    # --- moving

    def prefetched(self, piece, start, size, place, *, certain):
        """The record of a prefetch; where pages differ a driver may leave some as they were."""
        begin = piece.start + start
        piece.memory.tell(
            begin,
            size,
            lambda page: page._replace(last_prefetch_location=place),
            certain=certain and piece.memory.alike(begin, size),
        )

    @precondition(lambda self: self.pieces)
    @rule(pick=picks, span=spans, place=picks, on=picks, defer=defers)
    def prefetch(self, pick, span, place, on, defer):
        piece = self.piece(pick, "managed", "pooled")
        if piece is None:
            return
        given, key = self.stream(on)
        place = self.places[place % len(self.places)]
        start, size = self.part(piece, span)
        self.use(piece.memory, key)
        view = piece.buffer.range(start, size)
        ok, _ = self.attempt(lambda: view.prefetch(place, stream=given, defer=defer), MOVING)
        self.prefetched(piece, start, size, place, certain=ok)

    def chosen(self, those, key, *, least=0):
        """Views of managed memory, each with a place; a list of what the model needs as well."""
        found = []
        for pick, span, place in those:
            piece = self.piece(pick, "managed", "pooled")
            if piece is not None:
                start, size = self.part(piece, span)
                if least and piece.memory.whole_pages(piece.start + start, size)[1] < least:
                    continue
                found.append((piece, start, size, self.places[place % len(self.places)]))
        for piece, *_ in found:
            self.use(piece.memory, key)
        return found

    @precondition(lambda self: self.pieces)
    @rule(those=several, on=picks, dispatch=dispatches, defer=defers)
    def prefetch_several(self, those, on, dispatch, defer):
        given, key = self.stream(on)
        chosen = self.chosen(those, key)
        if not chosen or (dispatch == "batch" and not self.has_batches):
            return
        views = [piece.buffer.range(start, size) for piece, start, size, _ in chosen]
        places = [place for *_, place in chosen]
        ok, _ = self.attempt(
            lambda: managedmem.prefetch(
                views, places, stream=given, dispatch=dispatch, defer=defer
            ),
            MOVING,
        )
        for piece, start, size, place in chosen:
            self.prefetched(piece, start, size, place, certain=ok)

    @precondition(lambda self: self.pieces)
    @rule(those=several, on=picks, place=picks, moves=flags)
    def discard(self, those, on, place, moves):
        given, key = self.stream(on)
        chosen = self.chosen(those, key, least=PAGE)
        if not chosen:
            return
        views = [piece.buffer.range(start, size) for piece, start, size, _ in chosen]
        place = self.places[place % len(self.places)]
        refusal = () if self.has_batches else (NotImplementedError,)
        ok, _ = self.attempt(
            lambda: (
                managedmem.discard_prefetch(views, place, stream=given)
                if moves
                else managedmem.discard(views, stream=given)
            ),
            MOVING,
            refusal,
        )
        assert ok <= self.has_batches
        for piece, start, size, _ in chosen:
            if self.has_batches:
                whole = piece.memory.whole_pages(piece.start + start, size)
                piece.memory.forget(*whole)
                piece.memory.stale = True
                if moves:
                    # The pages at the ends go first, and then the pages of a range differ.
                    certain = ok and len(chosen) == 1 and whole == (piece.start + start, size)
                    self.prefetched(piece, start, size, place, certain=certain)
        if not ok:
            for piece, *_ in chosen:
                self.check_piece(piece)

    @precondition(lambda self: self.pieces)
    @rule(pick=picks, span=spans)
    def discard_less_than_a_page(self, pick, span):
        piece = self.piece(pick, "managed")
        if piece is None or not self.has_batches:
            return
        start, size = self.part(piece, span)
        if size and not piece.memory.whole_pages(piece.start + start, size)[1]:
            with contextlib.suppress(ValueError):
                piece.buffer.range(start, size).discard()
                raise AssertionError("a discard of less than a page")

    # --- advice

    def advised_parts(self, piece, start, size):
        """The ranges to advise: all at once, but on a GPU, which records less, page by page."""
        if EMULATED or size == 0:
            return [(start, size)]
        first = (piece.start + start) // PAGE * PAGE - piece.start
        borders = [start, *range(first + PAGE, start + size, PAGE), start + size]
        return [(a, b - a) for a, b in itertools.pairwise(borders)]

    def advise(self, pick, span, change, unset, act, *, sets):
        """One advice. If it fails, pages that were alike are as before; others may have it, or
        may have lost it."""
        piece = self.piece(pick, "managed")
        for start, size in self.advised_parts(piece, *self.part(piece, span)) if piece else ():
            memory, begin = piece.memory, piece.start + start
            alike = memory.alike(begin, size)
            view = piece.buffer.range(start, size)
            ok, _ = self.attempt(lambda view=view: act(view), ADVISING)
            if ok:
                memory.tell(begin, size, change, certain=sets or alike)
            elif not alike:
                memory.tell(begin, size, change, certain=False)
                memory.tell(begin, size, unset, certain=False)

    @precondition(lambda self: self.pieces)
    @rule(pick=picks, span=spans, on=flags)
    def read_mostly(self, pick, span, on):
        self.advise(
            pick,
            span,
            lambda page: page._replace(read_mostly=on),
            lambda page: page._replace(read_mostly=False),
            lambda view: setattr(view, "read_mostly", on),
            sets=on,
        )

    @precondition(lambda self: self.pieces)
    @rule(pick=picks, span=spans, place=picks, unset=flags)
    def preferred_location(self, pick, span, place, unset):
        place = None if unset else self.places[place % len(self.places)]
        self.advise(
            pick,
            span,
            lambda page: page._replace(preferred_location=place),
            lambda page: page._replace(preferred_location=None),
            lambda view: setattr(view, "preferred_location", place),
            sets=place is not None,
        )

    @precondition(lambda self: self.pieces)
    @rule(pick=picks, span=spans, member=picks, adds=flags)
    def change_accessed_by(self, pick, span, member, adds):
        """A member that not all pages have is not in the set: then nothing takes it out."""
        member = {self.members[member % len(self.members)]}

        def with_it(page):
            return page._replace(accessed_by=page.accessed_by | member)

        def without(page):
            return page._replace(accessed_by=page.accessed_by - member)

        def act(view):
            (view.accessed_by.update if adds else view.accessed_by.difference_update)(member)

        self.advise(pick, span, with_it if adds else without, without, act, sets=adds)

    @precondition(lambda self: self.pieces)
    @rule(pick=picks, span=spans, bits=st.integers(0, 7))
    def assign_accessed_by(self, pick, span, bits):
        """All or nothing, of pages that are alike."""
        piece = self.piece(pick, "managed")
        if piece is None:
            return
        start, size = self.part(piece, span)
        if not piece.memory.alike(piece.start + start, size):
            return
        members = frozenset(m for i, m in enumerate(self.members) if bits >> i & 1)
        view = piece.buffer.range(start, size)
        if self.attempt(lambda: setattr(view, "accessed_by", members), ADVISING)[0]:
            piece.memory.tell(
                piece.start + start,
                size,
                lambda page: page._replace(accessed_by=members),
                certain=EMULATED,
            )

    @precondition(lambda self: self.pieces)
    @rule(pick=picks, place=picks)
    def advise_pool_memory(self, pick, place):
        piece = self.piece(pick, "pooled")
        if piece is not None and piece.size:
            with contextlib.suppress(CUDAError):
                piece.buffer.preferred_location = self.places[place % len(self.places)]
                raise AssertionError("pool memory took advice")

    @precondition(lambda self: self.pieces)
    @rule(pick=picks, place=picks)
    def move_device_memory(self, pick, place):
        piece = self.piece(pick, "device")
        if piece is not None and piece.size:
            with contextlib.suppress(ValueError):
                piece.buffer.prefetch(self.places[place % len(self.places)])
                raise AssertionError("device memory was prefetched as managed memory")

    # --- policies

    def policy(self, place, bits):
        return MigrationPolicy(
            read_mostly=bool(bits & 8),
            preferred_location=None if bits & 16 else self.places[place % len(self.places)],
            accessed_by=[m for i, m in enumerate(self.members) if bits >> i & 1],
        )

    def tell_policy(self, targets, policy):
        said = policy.read_mostly, policy.preferred_location, policy.accessed_by
        for piece, start, size in targets:
            piece.memory.tell(
                piece.start + start,
                size,
                lambda page: Page(*said, page.last_prefetch_location),
                certain=True,
            )

    def targets(self, those):
        """Parts of managed memory that are not empty."""
        found = [(self.piece(pick, "managed"), span) for pick, span, _ in those]
        parts = [(piece, *self.part(piece, span)) for piece, span in found if piece]
        return [part for part in parts if part[2]]

    @precondition(lambda self: self.pieces)
    @rule(those=several, place=picks, bits=st.integers(0, 31))
    def apply_policy(self, those, place, bits):
        """All or nothing, on every page."""
        targets, policy = self.targets(those), self.policy(place, bits)
        if targets:
            views = [piece.buffer.range(start, size) for piece, start, size in targets]
            if self.attempt(lambda: policy.apply(views), ADVISING)[0]:
                self.tell_policy(targets, policy)
            else:
                for piece, *_ in targets:
                    self.check_records(piece.whole)

    @precondition(lambda self: self.pieces)
    @rule(those=several, place=picks, bits=st.integers(0, 31))
    def enter_policy(self, those, place, bits):
        targets, policy = self.targets(those), self.policy(place, bits)
        if not targets or len(self.applied) >= 2:
            return
        for piece, *_ in targets:
            self.check_records(piece.whole)  # so that one answer is left for each page
        if any(
            len(piece.memory.pages[i]) > 1
            for piece, start, size in targets
            for i in piece.memory.span(piece.start + start, size)
        ):
            return  # the whole memory is not at hand to look
        saved, holders = {}, {}
        for piece, start, size in targets:
            for i in piece.memory.span(piece.start + start, size):
                saved[piece.memory, i] = next(iter(piece.memory.pages[i]))
                holders.setdefault((piece.memory, i), []).append(piece.wrapper)
        views = [piece.buffer.range(start, size) for piece, start, size in targets]
        block = policy.applied(views)
        block.__enter__()
        self.tell_policy(targets, policy)
        self.applied.append((block, saved, holders))

    @precondition(lambda self: self.applied)
    @rule(pick=picks)
    def restore_policy(self, pick):
        """Every page has what it had, but for those of wrappers that were closed in the block;
        after a failure at the second attempt."""
        if not self.applied:
            return
        block, saved, holders = self.applied.pop(pick % len(self.applied))
        if not self.attempt(block.restore, ADVISING)[0]:
            block.restore()
        for (memory, i), page in saved.items():
            if all(holder and holder.buffer.is_closed for holder in holders[memory, i]):
                continue
            memory.pages[i] = {
                Page(*page[:3], now.last_prefetch_location) for now in memory.pages[i]
            }

    # --- plans

    @precondition(lambda self: self.pieces)
    @rule(those=several)
    def make_plan(self, those):
        chosen = []
        for pick, span, place in those:
            if piece := self.piece(pick, "managed", "pooled"):
                chosen.append(
                    (piece, *self.part(piece, span), self.places[place % len(self.places)])
                )
        if chosen and len(self.plans) < MOST_PLANS:
            plan = PrefetchPlan()
            for piece, start, size, place in chosen:
                plan.add(piece.buffer, place, offset=start, nbytes=size)
            self.plans.append((plan, chosen))

    @precondition(lambda self: self.plans)
    @rule(pick=picks, on=picks, dispatch=dispatches, defer=defers)
    def execute_plan(self, pick, on, dispatch, defer):
        if not self.plans or (dispatch == "batch" and not self.has_batches):
            return
        plan, entries = self.plans[pick % len(self.plans)]
        given, key = self.stream(on)
        gone = any(piece.buffer.is_closed for piece, *_ in entries)
        for piece, *_ in entries:
            self.use(piece.memory, key)
        ok, _ = self.attempt(
            lambda: plan.execute(stream=given, dispatch=dispatch, defer=defer),
            MOVING,
            (RuntimeError,) if gone else (),
        )
        assert not (ok and gone), "a plan with closed memory was executed"
        if not gone:
            for piece, start, size, place in entries:
                self.prefetched(piece, start, size, place, certain=ok)

    @precondition(lambda self: self.plans)
    @rule(pick=picks)
    def drop_plan(self, pick):
        if self.plans:
            self.plans.pop(pick % len(self.plans))

    # --- the end

    def teardown(self):
        self.faults.clear()
        if EMULATED:
            emulator.schedule("eager")
        Device(0).sync()
        for piece in self.pieces:
            self.check_piece(piece)
        while self.applied:
            self.restore_policy(0)
        for piece in self.pieces:
            self.check_records(piece)
            piece.host_views.clear()
            piece.tensors.clear()
        self.plans.clear()
        for piece in self.pieces:
            piece.owners = ()
        while self.pieces:
            self.pieces.pop().buffer.close()
        for stream in self.streams:
            stream.close()
        for pool in self.pools.values():
            pool.close()
        self.closed.clear()
        gc.collect(1)
        settle()
        if EMULATED:
            gc.collect()
            settle()
            after = emulator.live()
            # Fewer can be left where a program that failed before this one held some.
            assert all(a <= b for a, b in zip(after, self.before, strict=True)), (
                f"left behind: {after}, before {self.before}"
            )


class FaultyMachine(Machine):
    """Some of the calls of the library meet a failing driver call."""

    @initialize(drawn=faults)
    def choose_faults(self, drawn):
        self.faults = drawn[::-1]


def search(machine, programs, *, number=None, shrink=False):
    """Runs so many programs of a machine: of a seed, or without one always the same in a process
    with the same modules, because hypothesis draws some numbers from their sources.

    With `shrink`, one that fails is made smaller, which takes minutes.
    """
    gc.collect()
    gc.freeze()  # collections are frequent, and need not look at hypothesis
    run_state_machine_as_test(
        machine if number is None else seed(number)(machine),
        settings=settings(
            max_examples=programs,
            stateful_step_count=STEPS,
            derandomize=number is None,
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
            suppress_health_check=list(HealthCheck),
        ),
    )


def main():
    number, programs = (int(word) for word in sys.argv[1:])
    for machine in (Machine, FaultyMachine) if EMULATED else (Machine,):
        search(machine, programs, number=number, shrink=True)
        print(f"{machine.__name__}: {programs} programs agree", flush=True)


if __name__ == "__main__":
    main()
