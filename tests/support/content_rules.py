"""Rules of a random program that read, write, prefetch and discard bytes."""

import contextlib

import hypothesis.strategies as st
from hypothesis.stateful import precondition, rule

import managedmem
from constants import EMULATED, PAGE
from managedmem import Device
from memory_model import Memory
from model_program import (
    MAKING,
    MOST_PIECES,
    MOVING,
    WRITING,
    Piece,
    Program,
    defers,
    dispatches,
    flags,
    patterns,
    picks,
    several,
    spans,
)


class ContentRules(Program):
    # --- bytes

    def revive(self, memory, piece, key, stream):
        """On a GPU a write after a discard needs a prefetch, or it may be lost."""
        if memory.stale and not EMULATED:
            self.use(memory, key)
            piece.buffer.prefetch(Device(0), stream=stream)
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
        """Check a call that writes: if it failed, each byte is as before or as written."""
        if not ok:
            found = self.found(piece, start, size)
            memory = piece.memory
            whole = bytearray(memory.data)
            whole[piece.start + start : piece.start + start + size] = found
            for i in range(memory.size):  # unknown bytes outside of the part stay unknown
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
        stream, key = self.stream(on)
        start, size = self.part(piece, span)
        pattern_bytes = bytes([pattern]) if isinstance(pattern, int) else pattern
        size -= size % len(pattern_bytes)
        memory, before = piece.memory, piece.memory.snapshot()
        self.revive(memory, piece.whole, key, stream)
        self.use(memory, key)
        memory.write(piece.start + start, pattern_bytes * (size // len(pattern_bytes)))
        view = piece.buffer.range(start, size)
        ok, _ = self.attempt(lambda: view.fill(pattern, stream=stream), WRITING)
        self.written(ok, piece, before, start, size)

    @precondition(lambda self: self.pieces)
    @rule(pick=picks, other=picks, span=spans, from_=spans, on=picks, back=flags)
    def copy(self, pick, other, span, from_, on, back):
        to, source = self.piece(pick), self.piece(other)
        if to is None:
            return
        stream, key = self.stream(on)
        start, size = self.part(to, span)
        at, most = self.part(source, from_)
        size = min(size, most)
        begin, source_begin = to.start + start, source.start + at
        if to.memory is source.memory and abs(begin - source_begin) < size:
            return  # an overlapping copy is not defined
        before = to.memory.snapshot()
        self.revive(to.memory, to.whole, key, stream)
        self.use(to.memory, key)
        self.use(source.memory, key)
        to.memory.copy(begin, size, source.memory, source_begin)
        target, origin = to.buffer.range(start, size), source.buffer.range(at, size)
        ok, _ = self.attempt(
            (lambda: origin.copy_to(target, stream=stream))
            if back
            else (lambda: target.copy_from(origin, stream=stream)),
            WRITING,
        )
        self.written(ok, to, before, start, size)

    @precondition(lambda self: self.pieces)
    @rule(pick=picks, span=spans, byte=st.integers(0, 255), on=picks)
    def copy_from_system_memory(self, pick, span, byte, on):
        """The copy waits, so that the array may be changed at once."""
        piece = self.piece(pick)
        if piece is None:
            return
        stream, key = self.stream(on)
        start, size = self.part(piece, span)
        self.revive(piece.memory, piece.whole, key, stream)
        self.use(piece.memory, key)
        source = bytearray((byte + i) & 255 for i in range(size))
        piece.memory.write(piece.start + start, source)
        piece.buffer.range(start, size).copy_from(source, stream=stream)
        source[:] = bytes(size)

    @precondition(lambda self: self.pieces)
    @rule(pick=picks, span=spans, on=picks)
    def copy_to_system_memory(self, pick, span, on):
        piece = self.piece(pick)
        if piece is None:
            return
        stream, key = self.stream(on)
        start, size = self.part(piece, span)
        self.use(piece.memory, key)
        out = bytearray(size)
        piece.buffer.range(start, size).copy_to(out, stream=stream)
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
        closed = (RuntimeError,) if kind != "managed" else ()  # its resource may be closed
        ok, buffer = self.attempt(piece.buffer.copy_to, MAKING, closed)
        if not ok:
            return
        memory = Memory(buffer.size, kind=kind, skew=buffer.handle % PAGE)
        memory.busy.add("legacy")
        memory.copy(0, buffer.size, piece.memory, piece.start)
        piece.memory.busy.add("legacy")
        self.pieces.append(Piece(buffer, memory))
        if kind == "managed":
            self.take_records(self.pieces[-1])

    @precondition(lambda self: self.pieces)
    @rule(pick=picks)
    def check(self, pick):
        self.check_piece(self.piece(pick))

    # --- prefetching and discarding

    @precondition(lambda self: self.pieces)
    @rule(pick=picks, span=spans, place=picks, on=picks, defer=defers)
    def prefetch(self, pick, span, place, on, defer):
        piece = self.piece(pick, "managed", "pooled")
        if piece is None:
            return
        stream, key = self.stream(on)
        place = self.places[place % len(self.places)]
        start, size = self.part(piece, span)
        self.use(piece.memory, key)
        view = piece.buffer.range(start, size)
        ok, _ = self.attempt(lambda: view.prefetch(place, stream=stream, defer=defer), MOVING)
        self.prefetched(piece, start, size, place, certain=ok)

    def chosen(self, draws, key, *, least=0):
        """Parts of managed memory, each with a location."""
        found = []
        for pick, span, place in draws:
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
    @rule(draws=several, on=picks, dispatch=dispatches, defer=defers)
    def prefetch_several(self, draws, on, dispatch, defer):
        stream, key = self.stream(on)
        chosen = self.chosen(draws, key)
        if not chosen or (dispatch == "batch" and not self.has_batches):
            return
        views = [piece.buffer.range(start, size) for piece, start, size, _ in chosen]
        places = [place for *_, place in chosen]
        ok, _ = self.attempt(
            lambda: managedmem.prefetch(
                views, places, stream=stream, dispatch=dispatch, defer=defer
            ),
            MOVING,
        )
        self.prefetched_together(chosen, certain=ok)

    @precondition(lambda self: self.pieces)
    @rule(draws=several, on=picks, place=picks, moves=flags)
    def discard(self, draws, on, place, moves):
        stream, key = self.stream(on)
        chosen = self.chosen(draws, key, least=PAGE)
        if not chosen:
            return
        views = [piece.buffer.range(start, size) for piece, start, size, _ in chosen]
        place = self.places[place % len(self.places)]
        refusal = () if self.has_batches else (NotImplementedError,)
        ok, _ = self.attempt(
            lambda: (
                managedmem.discard_prefetch(views, place, stream=stream)
                if moves
                else managedmem.discard(views, stream=stream)
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
                    # The pages at the ends are prefetched first, so the pages differ.
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
