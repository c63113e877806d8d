"""Random programs agree with a model of managed memory, with and without failing driver calls."""

import pytest

import managedmem
from constants import EMULATED
from managedmem import Device
from programs import run_python
from searches import FIRST_SEED

pytest.importorskip("hypothesis", reason="needs hypothesis")

import advice_rules
import memory_rules
from model_machine import FaultyMachine, Machine, search

# With a sanitizer the programs take 21 s, and on a busy machine several times as long.
PATIENCE = 140
pytestmark = [pytest.mark.timeout(PATIENCE + 10), pytest.mark.search]
DRIVER = "emulator" if EMULATED else "cuda"
PROGRAMS, PROGRAMS_ELSEWHERE = 50, 15
SEEDS, PROGRAMS_OF_A_SEED = 8, 80  # for a planted fault, which the first or second one finds


def agree(machine, programs, emulator=None):
    """In a process of its own, so that the programs do not depend on the tests before."""
    script = f"""
        from model_machine import {machine.__name__}, search
        search({machine.__name__}, {programs}, number={FIRST_SEED})
        print("agree")
    """
    done = run_python(script, emulator=emulator, driver=DRIVER, patience=PATIENCE)
    assert done.stdout == "agree\n"


def test_programs_agree_with_the_model():
    agree(Machine, PROGRAMS)


@pytest.mark.emulator_only
def test_programs_whose_driver_calls_fail():
    agree(FaultyMachine, PROGRAMS)


@pytest.mark.emulator_only
@pytest.mark.parametrize("emulator", ["profile=h200-x2", "profile=old12", "devices=1,pageable=1"])
def test_programs_on_other_machines(emulator):
    agree(FaultyMachine, PROGRAMS_ELSEWHERE, emulator)


@pytest.mark.parametrize("on_the_memory_too", [False, True])
def test_a_wrapper_that_is_closed_in_a_policy_block(on_the_memory_too):
    machine = Machine()
    machine.wrap(pick=0, span=(1, 2, 0), exported=False)
    wrapper = len(machine.pieces) - 1
    targets = [(wrapper, (0, 3, 0), 0)] + [(0, (1, 1, 0), 0)] * on_the_memory_too
    machine.enter_policy(draws=targets, place=0, bits=4)
    machine.close(pick=wrapper, waits=False, on=0)
    machine.restore_policy(pick=0)
    left = [page.preferred_location for page in machine.records(machine.pieces[0])]
    machine.teardown()
    place = Device(0)
    assert left == [None, None if on_the_memory_too else place, place, None]


# Faults planted in single operations, which the search must find.

own_discard, own_prefetch = managedmem.discard, managedmem.prefetch


def discard_too_much(targets, **options):
    for view in targets:
        view[:1].fill(0xDB)
    own_discard(targets, **options)


def prefetch_only_the_first(targets, places, **options):
    own_prefetch(targets[:1], places[:1] if isinstance(places, list) else places, **options)


class PolicyOfTheFirstTarget:
    def __init__(self, **said):
        self.policy = managedmem.MigrationPolicy(**said)

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def apply(self, views):
        self.policy.apply(views[:1])


class PolicyWithoutUndo(PolicyOfTheFirstTarget):
    def apply(self, views):
        for view in views:
            self.policy.apply(view)


kept = []


class LeakingResource:
    def __init__(self, **options):
        self.resource = managedmem.ManagedMemoryResource(**options)

    def __getattr__(self, name):
        return getattr(self.resource, name)

    def allocate(self, size, **options):
        buffer = self.resource.allocate(size, **options)
        kept.append(buffer.range(0, 0))
        return buffer


def wait_for_nothing(machine, memory, but=None):
    """On a lazy schedule, work is then not done when it is looked at."""


PLANTED = {
    "discard": (Machine, managedmem, "discard", discard_too_much),
    "prefetch": (Machine, managedmem, "prefetch", prefetch_only_the_first),
    "policy": (Machine, advice_rules, "MigrationPolicy", PolicyOfTheFirstTarget),
    "no undo": (FaultyMachine, advice_rules, "MigrationPolicy", PolicyWithoutUndo),
    "leak": (Machine, memory_rules, "ManagedMemoryResource", LeakingResource),
    "no wait": (Machine, Machine, "wait", wait_for_nothing),
}


@pytest.mark.emulator_only
@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_is_found(monkeypatch, planted):
    machine, place, name, fault = planted
    monkeypatch.setattr(place, name, fault)
    try:
        with pytest.raises(AssertionError):
            for number in range(SEEDS):
                search(machine, PROGRAMS_OF_A_SEED, number=number)
    finally:
        while kept:
            kept.pop().close()
