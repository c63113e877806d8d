"""Rules of a random program that begin and end memory, exports and streams."""

import gc

import hypothesis.strategies as st
from hypothesis.stateful import initialize, precondition, rule

import managedmem
from constants import EMULATED, PAGE
from managedmem import (
    Device,
    DeviceMemoryResource,
    Host,
    ManagedBuffer,
    ManagedMemoryResource,
    Stream,
)
from memory_model import Memory
from model_program import (
    ENDING,
    MAKING,
    MOST_PIECES,
    MOST_STREAMS,
    Piece,
    Program,
    flags,
    picks,
    sizes,
    spans,
)

if EMULATED:
    from managedmem import emulator


class MemoryRules(Program):
    @initialize(lazy=flags)
    def begin_with_schedule(self, lazy):
        self.schedule(lazy)

    # --- allocating and closing

    @rule(size=sizes, pool=st.sampled_from([None, None, None, "pooled", "device"]), on=picks)
    def allocate(self, size, pool, on):
        if len(self.pieces) >= MOST_PIECES:
            return
        stream, key = self.stream(on) if pool else (None, None)
        if isinstance(key, Stream):
            stream = key  # the block keeps a Stream alive, but not another object
        if pool is None or not self.has_batches:
            kind, resource = "managed", ManagedMemoryResource()
        elif pool == "pooled":
            kind, resource = "pooled", self.pool(pool, lambda: ManagedMemoryResource(pooled=True))
        else:
            kind, resource = "device", self.pool(pool, lambda: DeviceMemoryResource(Device(0)))
        ok, buffer = self.attempt(lambda: resource.allocate(size, stream=stream), MAKING)
        if ok:
            memory = Memory(size, kind=kind, skew=buffer.handle % PAGE)
            self.pieces.append(Piece(buffer, memory))
            if kind != "managed":
                memory.busy.add(key)
                buffer.fill(on % 256, stream=stream)
                memory.write(0, bytes([on % 256]) * size)
            else:
                self.take_records(self.pieces[-1])
                self.write_from_the_host(len(self.pieces) - 1, (0, 11, 0), on % 256)

    def pool(self, name, make):
        if name not in self.pools:
            self.pools[name] = make()
        return self.pools[name]

    @rule(name=st.sampled_from(["pooled", "device"]))
    def close_pool(self, name):
        """Close a pool; its buffers stay open."""
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
        """Buffers with live host views stay open, and so does memory with an export."""
        piece = self.piece(pick)
        stream, key = self.stream(on) if waits else (None, None)
        family = [p for p in self.pieces if p.root is piece] if piece.root is piece else [piece]
        if any(piece in other.owners for other in self.pieces):
            return  # a correct program does not free memory under its wrappers
        if piece.memory.kind != "managed":
            self.wait(piece.memory, but=key)
        exported = any(p.host_views or (p.tensors and piece.root is piece) for p in family)
        ok, _ = self.attempt(
            lambda: piece.buffer.close(stream), ENDING, (BufferError,) if exported else ()
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
        """Drops a buffer without closing it, perhaps in a cycle of references."""
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
