"""Random programs against a model; hypothesis makes them, and shrinks those that fail.

A program allocates, wraps, slices, advises, moves, discards, copies, fills, plans, exports, closes
and drops memory, on several streams, as a correct program does: before a stream or the host uses
memory, it waits for other streams that work on it. `memory_model.Memory` has the expected state.
`FaultyMachine` also lets driver calls fail, before or after they acted, and then asks for the state
that the documentation promises.

    PYTHONPATH=python MANAGEDMEM_DRIVER=emulator python tests/support/model_machine.py SEED PROGRAMS
"""

import gc
import sys

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

import managedmem
from advice_rules import AdviceRules
from constants import EMULATED, PAGE
from content_rules import ContentRules
from live_memory import settle, warm_up
from managedmem import Device, Host, ManagedMemoryResource, PrefetchPlan
from memory_rules import MemoryRules
from model_program import (
    BATCH_CALLS_SINCE,
    MOST_PLANS,
    MOVING,
    defers,
    dispatches,
    faults,
    picks,
    several,
)

if EMULATED:
    from managedmem import emulator


STEPS = 40


class Machine(MemoryRules, ContentRules, AdviceRules):
    # --- the beginning

    def __init__(self):
        super().__init__()
        warm_up()
        Device(0).set_current()
        self.before = emulator.live() if EMULATED else None
        version = managedmem._managedmem._driver_info()["version"]
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

    # --- plans

    @precondition(lambda self: self.pieces)
    @rule(draws=several)
    def make_plan(self, draws):
        chosen = []
        for pick, span, place in draws:
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
        stream, key = self.stream(on)
        gone = any(piece.buffer.is_closed for piece, *_ in entries)
        for piece, *_ in entries:
            self.use(piece.memory, key)
        ok, _ = self.attempt(
            lambda: plan.execute(stream=stream, dispatch=dispatch, defer=defer),
            MOVING,
            (RuntimeError,) if gone else (),
        )
        assert not (ok and gone), "a plan with closed memory was executed"
        if not gone:
            self.prefetched_together(entries, certain=ok)

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
            # Fewer may be left, because an earlier program that failed may have held some.
            assert all(a <= b for a, b in zip(after, self.before, strict=True)), (
                f"left behind: {after}, before {self.before}"
            )


class FaultyMachine(Machine):
    """Some of the calls of the library meet a failing driver call."""

    @initialize(drawn=faults)
    def choose_faults(self, drawn):
        self.faults = drawn[::-1]


def search(machine, programs, *, number=None, shrink=False):
    """Run that many programs of a machine, from the seed `number`. Without a seed, the programs are
    the same in all processes with the same modules: hypothesis draws numbers from their sources.

    With `shrink`, a program that fails is made smaller, which takes minutes.
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
