"""Rules of a random program that advise pages and apply policies."""

import contextlib
import itertools

import hypothesis.strategies as st
from hypothesis.stateful import precondition, rule

from constants import EMULATED, PAGE
from managedmem import CUDAError, MigrationPolicy
from memory_model import Page
from model_program import ADVISING, Program, flags, picks, several, spans


class AdviceRules(Program):
    # --- advice

    def advised_parts(self, piece, start, size):
        """The ranges to advise: all at once. A GPU may then lack records: there, page by page."""
        if EMULATED or size == 0:
            return [(start, size)]
        first = (piece.start + start) // PAGE * PAGE - piece.start
        borders = [start, *range(first + PAGE, start + size, PAGE), start + size]
        return [(a, b - a) for a, b in itertools.pairwise(borders)]

    def advise(self, pick, span, change, unset, act, *, sets):
        """Give one advice. After a failure, pages that were alike are as before, and pages that
        differed may have gained or lost the advice. If it succeeds in spite of a failure, records
        may be missing."""
        piece = self.piece(pick, "managed")
        for start, size in self.advised_parts(piece, *self.part(piece, span)) if piece else ():
            memory, begin = piece.memory, piece.start + start
            alike = memory.alike(begin, size)
            view = piece.buffer.range(start, size)
            ok, _ = self.attempt(lambda view=view: act(view), ADVISING)
            if ok:
                certain = (sets or alike) and not self.has_fired
                memory.tell(begin, size, change, certain=certain)
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
        """A member that only some pages have is not in the set, so nothing removes it."""
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
        """All or nothing, on pages that are alike."""
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
                certain=EMULATED and not self.has_fired,
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
        advice = policy.read_mostly, policy.preferred_location, policy.accessed_by
        for piece, start, size in targets:
            piece.memory.tell(
                piece.start + start,
                size,
                lambda page: Page(*advice, page.last_prefetch_location),
                certain=not self.has_fired,
            )

    def targets(self, draws):
        """Parts of managed memory that are not empty."""
        found = [(self.piece(pick, "managed"), span) for pick, span, _ in draws]
        parts = [(piece, *self.part(piece, span)) for piece, span in found if piece]
        return [part for part in parts if part[2]]

    @precondition(lambda self: self.pieces)
    @rule(draws=several, place=picks, bits=st.integers(0, 31))
    def apply_policy(self, draws, place, bits):
        """All or nothing, on every page."""
        targets, policy = self.targets(draws), self.policy(place, bits)
        if targets:
            views = [piece.buffer.range(start, size) for piece, start, size in targets]
            if self.attempt(lambda: policy.apply(views), ADVISING)[0]:
                self.tell_policy(targets, policy)
            else:
                for piece, *_ in targets:
                    self.check_records(piece.whole)

    @precondition(lambda self: self.pieces)
    @rule(draws=several, place=picks, bits=st.integers(0, 31))
    def enter_policy(self, draws, place, bits):
        targets, policy = self.targets(draws), self.policy(place, bits)
        if not targets or len(self.applied) >= 2:
            return
        for piece, *_ in targets:
            self.check_records(piece.whole)  # leaves one possible state for each page
        if any(
            len(piece.memory.pages[i]) > 1
            for piece, start, size in targets
            for i in piece.memory.span(piece.start + start, size)
        ):
            return  # the state is unknown, because no piece shows the whole memory
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
        """Every page has its earlier advice, except those of wrappers that were closed in the
        block. A restoration that failed is tried again."""
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
