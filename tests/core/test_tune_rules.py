"""The rules of tune(): patterns of use, the changes proposed for each, and those that are kept."""

import pytest

import managedmem
from canned_recorder import Canned
from constants import KIB, MIB
from managedmem import Device, Host, MigrationPolicy, _tune_rules
from managedmem._tune_rules import Advise, Discard, Material, PhaseEvidence, Prefetch, Setting
from step_costs import RUN, tuned

pytestmark = pytest.mark.emulator_only

DEVICE = Device(0)
IN_PLACE = MigrationPolicy(preferred_location=Host(), accessed_by=[DEVICE])
COPIES = MigrationPolicy.read_duplicated()


@pytest.fixture
def make():
    made = []

    def allocate(name, nbytes=2 * MIB):
        made.append(managedmem.empty(nbytes, name=name))
        return made[-1]

    yield allocate
    for buffer in made:
        buffer.close()


def proposed(result):
    """The rules of single changes, and of groups."""
    return {trial.rule for trial in result.trials} - {""}


def entries(plans):
    return {
        (phase, entry.target.name, str(entry.location))
        for phase, plan in plans.items()
        for entry in plan
    }


class TestPatterns:
    def test_r1_faults_to_a_device(self, make, clock, steps):
        x = make("x")

        def fill():
            x.prefetch(Host())
            DEVICE.sync()
            steps.host_writes(x)

        def compute():
            steps.device_uses(x)

        result = tuned([fill, compute], x, clock)
        assert proposed(result) == {"R1"}
        assert entries(result.plans) == {("compute", "x", "Device(0)")}
        assert result.policies == {}
        (trial,) = result.trials
        assert trial.verdict == "kept"
        assert trial.evidence["arrived"] == 2 * MIB
        assert trial.reason == "2.0M to the device by faults in compute"

    def test_r2_faults_to_the_host(self, make, clock, steps):
        x = make("x")

        def compute():
            x.prefetch(DEVICE)
            steps.device_uses(x, write=True)

        result = tuned([compute, ("read", lambda: steps.host_reads(x))], x, clock)
        assert proposed(result) == {"R2"}
        assert entries(result.plans) == {("read", "x", "Host()")}

    def test_r3_memory_that_is_only_read(self, make, clock, steps):
        table = make("table")
        steps.host_writes(table)

        step = [lambda: steps.device_uses(table), lambda: steps.host_reads(table)]
        result = tuned(step, table, clock)
        assert {"R1", "R2", "R3", "R5"} <= proposed(result)
        assert result.policies == {"table": COPIES}
        assert result.plans == {}

    def test_r4_memory_that_both_write(self, make, clock, steps):
        x = make("x")
        step = [
            ("fill", lambda: steps.host_writes(x)),
            ("compute", lambda: steps.device_uses(x, write=True)),
        ]
        clock.in_place = 1e-6  # a slow link, so that pages should move
        result = tuned(step, x, clock)
        assert "R3" not in proposed(result)
        assert result.policies == {}
        assert entries(result.plans) == {("compute", "x", "Device(0)"), ("fill", "x", "Host()")}

    def test_r5_a_small_part_that_comes_back(self, make, clock, steps):
        x = make("x", 8 * MIB)
        part = x[: 1536 * KIB]
        step = [lambda: steps.host_writes(part), lambda: steps.device_uses(part, write=True)]
        result = tuned(step, x, clock)
        assert result.policies == {"x": IN_PLACE}
        assert result.plans == {}
        kept = next(trial for trial in result.trials if trial.verdict == "kept")
        assert kept.rule == "R5"
        assert "only a part of 8.0M" in kept.reason

    def test_r8_contents_that_are_overwritten(self, make, clock, steps):
        y = make("y")
        step = [
            ("compute", lambda: steps.device_uses(y, write=True)),
            ("read", lambda: steps.host_reads(y)),
        ]
        clock.in_place = 1e-6
        result = tuned(step, y, clock, disposable=[y])
        assert entries(result.discards) == {("compute", "y", "Device(0)")}
        assert entries(result.plans) == {("read", "y", "Host()")}
        assert "R8" not in proposed(tuned(step, y, clock))

    def test_r9_requested_moves_only(self, make, clock, steps):
        x = make("x")

        def step():
            x.prefetch(DEVICE)
            steps.device_uses(x)

        result = tuned(step, x, clock)
        assert result.trials == ()
        assert result.speedup == 1.0
        assert result.notes[0] == "the runs moved nothing by faults that a change could avoid"

    def test_r10_requested_moves_that_turn_back(self, make, clock, steps):
        x = make("x")
        steps.host_writes(x)

        def step():
            x.prefetch(DEVICE)
            x.prefetch(Host())
            DEVICE.sync()
            clock.spend(RUN)

        result = tuned(step, x, clock)
        assert result.trials == ()
        assert result.notes[0].startswith("6.0M in 2 runs went back where they came from, all on")


def material(sizes, **more):
    fields = {
        "phases": ["fill", "compute"],
        "points": frozenset({"fill", "compute"}),
        "sizes": sizes,
        "base": dict.fromkeys(sizes, MigrationPolicy.default()),
        "advisable": frozenset(sizes),
        "disposable": {},
        "free": {DEVICE: 100 * MIB},
        **more,
    }
    return Material(**fields)


def seen_by(trace, phase, *names):
    return list(_tune_rules.evidence_in(phase, [trace], {name: [trace[name]] for name in names}))


class TestContested:
    """R6, of canned events: the emulated driver has no thrashing."""

    @pytest.fixture
    def canned(self):
        canned = Canned()
        first = canned.memory("a", MIB)
        return canned.add("thrashing", first, 4096).add("throttling", first, ms=3)

    @pytest.mark.parametrize("device_faults", [2, 9])
    def test_the_host_keeps_it(self, traced, canned, device_faults):
        canned.faults(0, device_faults).faults(0, 3, side="host")
        (found,) = _tune_rules.propose(
            material({"a": MIB}), seen_by(traced(canned), "compute", "a")
        )
        assert found.items == (Advise("a", IN_PLACE, True),)
        assert found.rule == "R6"
        assert found.reason == (
            f"4.0K thrashed, 3.000 ms throttled; {device_faults} faults of the device, "
            "3 of the host"
        )

    @pytest.mark.parametrize(
        ("host_faults", "mapped", "expected"),
        [
            (1, [DEVICE], MigrationPolicy(preferred_location=DEVICE, accessed_by=[Host()])),
            (1, [], IN_PLACE),
            (5, [DEVICE], IN_PLACE),
        ],
    )
    def test_the_side_with_more_faults_has_it(self, host_faults, mapped, expected):
        seen = PhaseEvidence(
            "a", "fill", MIB, DEVICE, throttled=1.0, device_faults=5, host_faults=host_faults
        )
        given = material({"a": MIB}, mapped=frozenset(mapped))
        (found,) = _tune_rules.propose(given, [seen])
        assert found.items == (Advise("a", expected, True),)


class TestCrowded:
    """R7: more memory than the device has."""

    def seen(self, **evicted):
        return [
            PhaseEvidence(name, "compute", size * MIB, DEVICE, arrived=size * MIB, **evicted)
            for name, size in (("a", 40), ("b", 80), ("c", 30))
        ]

    def test_prefetches_fit_the_free_memory(self):
        sizes = {"a": 40 * MIB, "b": 80 * MIB, "c": 30 * MIB}
        found = _tune_rules.propose(material(sizes), self.seen())
        for candidate in found:
            bound = sum(sizes[i.name] for i in candidate.items if isinstance(i, Prefetch))
            assert bound <= 90 * MIB
        crowded = [c for c in found if c.rule == "R7"]
        assert [c.items for c in crowded if isinstance(c.items[0], Advise)] == [
            (Advise("a", IN_PLACE, True), Advise("c", IN_PLACE, True))
        ]
        assert {c.names for c in found} == {
            frozenset(names) for names in (["a"], ["b"], ["c"], ["a", "c"])
        }

    def test_evictions(self):
        sizes = {"a": 10 * MIB, "b": 20 * MIB}
        seen = [
            PhaseEvidence("a", "compute", 10 * MIB, DEVICE, arrived=10 * MIB, evicted=5 * MIB),
            PhaseEvidence("b", "compute", 20 * MIB, DEVICE, arrived=2 * MIB),
        ]
        found = [c for c in _tune_rules.propose(material(sizes), seen) if c.rule == "R7"]
        assert [c.items for c in found if isinstance(c.items[0], Advise)] == [
            (Advise("b", IN_PLACE, True),)  # the coldest
        ]
        assert "5.0M were evicted" in found[0].reason


class TestDiscards:
    def rules(self, seen, **more):
        given = material({"y": 8 * MIB}, disposable={"y": None}, **more)
        return [c.items[0] for c in _tune_rules.propose(given, seen) if c.rule == "R8"]

    def seen(self, phase="compute", **faults):
        return PhaseEvidence("y", phase, 8 * MIB, DEVICE, arrived=8 * MIB, **faults)

    def test_all_faults_must_be_writes(self):
        assert self.rules([self.seen(device_faults=9, device_write_faults=9)]) == [
            Discard("y", "compute", DEVICE)
        ]
        assert not self.rules([self.seen(device_faults=9, device_write_faults=8)])
        assert not self.rules([self.seen(device_faults=9, device_write_faults=0)])
        assert not self.rules([self.seen(device_faults=None, device_write_faults=None)])

    def test_two_writing_phases_are_ambiguous(self):
        faults = {"device_faults": 9, "device_write_faults": 9}
        both = [self.seen(**faults), self.seen("fill", **faults)]
        assert not self.rules(both)

    def test_the_named_phase_counts(self):
        given = material({"y": 8 * MIB}, disposable={"y": "fill"})
        seen = [self.seen(), self.seen("fill")]
        found = [c.items for c in _tune_rules.propose(given, seen) if c.rule == "R8"]
        assert found == [(Discard("y", "fill", DEVICE),)]

    def test_a_single_phase_is_the_one(self):
        assert self.rules([self.seen()], phases=["compute"]) == [Discard("y", "compute", DEVICE)]

    def test_the_host_overwrites_too(self):
        one = PhaseEvidence(
            "y", "fill", 8 * MIB, DEVICE, returned=8 * MIB, host_faults=5, host_write_faults=5
        )
        assert self.rules([one]) == [Discard("y", "fill", Host())]


class TestSettings:
    """Changes take the place of those that contradict them."""

    PREFETCH = Prefetch("x", "compute", DEVICE)
    BACK = Prefetch("x", "read", Host())
    STAYS = Advise("x", IN_PLACE, True)
    COPIED = Advise("x", COPIES, False)
    LOST = Discard("x", "compute", DEVICE)

    @pytest.mark.parametrize(
        ("items", "left"),
        [
            ([PREFETCH, BACK], [PREFETCH, BACK]),
            ([PREFETCH, BACK, STAYS], [STAYS]),
            ([PREFETCH, BACK, COPIED], [PREFETCH, COPIED]),
            ([STAYS, PREFETCH], [PREFETCH]),
            ([COPIED, PREFETCH], [PREFETCH, COPIED]),
            ([STAYS, COPIED], [COPIED]),
            ([PREFETCH, LOST], [LOST]),
            ([LOST, PREFETCH], [PREFETCH]),
            ([STAYS, LOST], [LOST]),
        ],
    )
    def test_items(self, items, left):
        other = Prefetch("other", "compute", DEVICE)
        setting = Setting().with_items([other, *items])
        everything = [other, self.PREFETCH, self.BACK, self.STAYS, self.COPIED, self.LOST]
        assert [item for item in everything if setting.has(item)] == [other, *left]
        for item in left:
            assert not setting.without(item).has(item)
        assert setting.without(left[0]).has(other)

    def test_devices(self):
        setting = Setting().with_items([self.PREFETCH, self.BACK, Discard("y", "read", DEVICE)])
        assert setting.on_devices() == {DEVICE: {"x", "y"}}


def test_advice_that_is_there_is_not_proposed():
    seen = [
        PhaseEvidence("a", "fill", 8 * MIB, DEVICE, returned=8 * MIB),
        PhaseEvidence("a", "compute", 8 * MIB, DEVICE, arrived=8 * MIB),
    ]

    def advice(base):
        given = material({"a": 8 * MIB}, base={"a": base})
        found = _tune_rules.propose(given, seen)
        return {i.policy for c in found for i in c.items if isinstance(i, Advise)}

    assert advice(MigrationPolicy.default()) == {IN_PLACE, COPIES}
    both = MigrationPolicy(read_mostly=True, preferred_location=Host(), accessed_by=[DEVICE])
    assert advice(IN_PLACE) == {both}
    assert advice(COPIES) == advice(both) == {IN_PLACE}
