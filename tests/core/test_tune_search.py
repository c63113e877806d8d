"""How tune() decides: order statistics, the order of runs, noise, and time."""

import itertools
import math
import random

import pytest

import managedmem
from constants import MIB
from foreign_objects import CudaArray
from managedmem import Device, Host, MigrationPolicy, Stream, emulator
from managedmem._tune_rules import Setting
from managedmem._tune_search import Clock, TunedStep, waiter_of
from managedmem._tune_values import confidence, interval_of, order_index
from managedmem.typing import TuneUnstableError
from step_costs import RUN, Noise, StepClock, Steps, tuned

DEVICE = Device(0)


# From tables of the sign test: the index k of the 95 % interval for the median.
TABLE = {
    6: 1, 7: 1, 8: 1, 9: 2, 10: 2, 11: 2, 12: 3, 13: 3, 14: 3, 15: 4, 16: 4, 17: 5,
    18: 5, 19: 5, 20: 6, 25: 8, 30: 10, 35: 12, 40: 14, 50: 18, 100: 40,
}  # fmt: skip


class TestStatistics:
    @pytest.mark.parametrize(("count", "k"), TABLE.items())
    def test_index(self, count, k):
        assert order_index(count) == k

    def test_five_pairs_give_less(self):
        assert order_index(5) == 1
        assert confidence(5) == 1 - 2 / 32 == 0.9375

    @pytest.mark.parametrize("count", range(6, 60))
    def test_index_is_the_largest(self, count):
        def tail(k):
            return sum(math.comb(count, i) for i in range(k)) / 2**count

        k = order_index(count)
        assert tail(k) <= 0.025 < tail(k + 1)
        assert confidence(count) == pytest.approx(1 - 2 * tail(k))
        assert confidence(count) >= 0.95

    def test_interval(self):
        values = [9, 1, 5, 3, 7, 2, 8, 4, 6]
        assert interval_of(values) == (5, 2, 8)
        assert interval_of([3, 1, 2, 5, 4]) == (3, 1, 5)

    def test_coverage(self):
        draw = random.Random(3)
        hits = 0
        for _ in range(4000):
            _, low, high = interval_of([draw.random() for _ in range(9)])
            hits += low <= 0.5 <= high
        assert 0.95 < hits / 4000 < 0.97  # 96.1 %


class Waiter:
    def __init__(self, **methods):
        self.calls = []
        for name in methods:
            setattr(self, name, lambda name=name: self.calls.append(name))


class TestWaiting:
    @pytest.mark.parametrize("name", ["sync", "synchronize"])
    def test_streams_and_events(self, name):
        waiter = Waiter(**{name: True})
        waiter_of(waiter)()
        assert waiter.calls == [name]

    def test_other_values(self):
        for value in (None, 3, "sync", [Stream], Stream, {"sync": 1}, b""):
            assert waiter_of(value) is None

    def test_a_stream_by_its_protocol(self, stream):
        class Foreign:
            def __cuda_stream__(self):
                return 0, stream.handle

        waiter_of(Foreign())()
        assert waiter_of(stream) == stream.sync

    @pytest.mark.emulator_only
    def test_only_without_streams_the_device(self, stream):
        clock = Clock(StepClock(), {DEVICE})

        def calls(result, is_single):
            with emulator.recording() as made:
                clock.wait(result, is_single)
            return [call.name for call in made if "Synchronize" in call.name]

        assert calls(None, True) == calls((None, 3), False) == ["cuCtxSynchronize"]
        legacy_too = ["cuStreamSynchronize"] * 2
        assert calls(stream, True) == calls((None, stream), False) == legacy_too
        assert calls((stream, stream), False) == ["cuStreamSynchronize"] * 3
        assert calls((stream, 1), True) == ["cuCtxSynchronize"]  # a tuple that the step returned


@pytest.fixture
def x():
    with managedmem.empty(MIB, name="x") as buffer:
        yield buffer


@pytest.fixture
def both_ways(x, steps):
    """Phases in which faults move x to the device and back."""
    return [("fill", lambda: steps.host_writes(x)), ("compute", lambda: steps.device_uses(x))]


@pytest.fixture
def pooled():
    with managedmem.ManagedMemoryResource(pooled=True) as pool, pool.allocate(MIB) as buffer:
        yield buffer


@pytest.mark.emulator_only
class TestDecisions:
    def test_the_order_of_runs(self, x, clock):
        """Warm-up, first, settle, second; second, settle, first; and so on."""
        seen = []
        search = managedmem._tune_search
        limits = managedmem._tune.Limits(60, 5, 0.03, 2, 0.25, None)
        found = search.Search((), {}, limits, search.Clock(clock, set()))
        first, second = Setting(), Setting()

        def run(setting):
            seen.append("A" if setting is first else "B")
            return 1.0, None

        found.run = run
        pairs = found.pairs(first, second)
        assert "".join(seen) == "AAABBBBAAABBBAAABB"
        assert pairs.seconds == [(1.0, 1.0)] * 5

    def test_a_lost_comparison_ends_early(self, x, both_ways, clock):
        result = tuned(both_ways, x, clock, pairs=9)
        lost = [t for t in result.trials if t.verdict.startswith("rejected")]
        assert lost
        assert all(len(t.pairs) == 2 for t in lost)
        kept = [t for t in result.trials if t.verdict == "kept"]
        assert all(len(t.pairs) == 9 for t in kept)

    def test_a_change_that_makes_it_much_slower_has_one_pair(self, x, both_ways, clock):
        clock.in_place = 1e-6
        result = tuned(both_ways, x, clock, pairs=9)
        slow = [t for t in result.trials if "preferred_location" in t.change and t.pairs]
        assert slow
        for trial in slow:
            ((before, after),) = trial.pairs
            assert trial.verdict == f"rejected: a run took {after / before:.1f} times as long"

    def test_gains_below_the_least_are_rejected(self, x, both_ways, clock):
        result = tuned(both_ways, x, clock, min_gain=0.99)
        assert result.speedup == 1.0
        assert {t.verdict for t in result.trials} == {"rejected: 0 of 2 pairs gained enough"}
        assert MigrationPolicy.of(x) == MigrationPolicy.default()

    def test_verify_rejects(self, x, both_ways, clock):
        seen = []

        def verify(before, after):
            seen.append((before, after))
            return False

        counter = itertools.count()
        step = [*both_ways, ("number", lambda: next(counter))]
        result = tuned(step, x, clock, verify=verify)
        assert result.speedup == 1.0
        tried = [t for t in result.trials if t.pairs]
        assert {t.verdict for t in tried} == {"verify() refused its result"}
        assert len(seen) == len(tried)
        for before, after in seen:
            assert before[:2] == after[:2] == (None, None)
            assert after[2] > before[2]

    def test_verify_sees_the_result_of_a_single_phase(self, x, steps, clock):
        def step():
            steps.host_writes(x)
            steps.device_uses(x)
            return "result"

        seen = set()
        tuned(step, x, clock, verify=lambda *results: seen.add(results) or True)
        assert seen == {("result", "result")}

    def test_the_time_runs_out(self, x, both_ways, clock):
        long = tuned(both_ways, x, clock)
        again = next(t for t in long.trials if t.pairs)
        runs = 5 * 3 + 2
        needed = again.pairs[0][0] * (3 * runs + 8)
        MigrationPolicy.default().apply(x)
        result = tuned(both_ways, x, clock, max_seconds=needed)
        verdicts = [t.verdict for t in result.trials]
        assert "not tried: the time was up" in verdicts
        assert any(t.pairs for t in result.trials)
        count = verdicts.count("not tried: the time was up")
        assert f"{count} changes were not tried to the end within max_seconds=" in str(result)

    def test_points_limit_the_prefetches(self, x, both_ways, clock):
        clock.in_place = 1e-6
        result = tuned(both_ways, x, clock, points=["fill"], keep=False)
        assert set(result.plans) <= {"fill"}
        result = tuned(both_ways, x, clock, points=(), keep=False)
        assert result.plans == {}
        assert not [t for t in result.trials if "prefetch" in t.change]

    def test_keep_false_puts_all_back(self, x, both_ways, clock):
        x[: MIB // 2].read_mostly = True
        before = x.page_runs()
        result = tuned(both_ways, x, clock, keep=False)
        assert result.policies
        assert [run[:5] for run in x.page_runs()] == [run[:5] for run in before]
        assert "the pages of x differ in their advice" in result.notes[0]

    def test_everything_together_must_gain(self, x, clock, monkeypatch):
        """Changes that win alone, and lose in the last comparison, are put back."""
        search = managedmem._tune_search.Search
        monkeypatch.setattr(
            search, "_verdict", lambda self, found: "kept" if self.trials == [] else "rejected"
        )
        steps = Steps(clock)
        clock.in_place = 1e-3  # access in place is very slow
        step = [("fill", lambda: steps.host_writes(x)), ("use", lambda: steps.device_uses(x))]
        result = tuned(step, x, clock)
        assert (result.speedup, result.policies, result.gain) == (1.0, {}, None)
        verdicts = [t.verdict for t in result.trials]
        assert verdicts[0] == "put back: all kept changes together gained nothing"
        assert MigrationPolicy.of(x) == MigrationPolicy.default()

    def test_a_change_that_came_in_with_others_is_left_out(self, clock, steps):
        with managedmem.empty(MIB, name="a") as a, managedmem.empty(MIB, name="b") as b:

            def fill():
                steps.host_writes(a)
                steps.host_writes(b)

            def compute():
                steps.device_uses(a, write=True)
                steps.device_uses(b, write=True)
                if b.preferred_location is Host():
                    clock.spend(RUN / 2)

            result = tuned([fill, compute], [a, b], clock)
            assert any(t.change.startswith("without: ") for t in result.trials)

    def test_small_gains_of_many_count_together(self, clock, steps):
        whole = managedmem.empty((12, 128 * 1024))
        buffers = {f"b{i}": part for i, part in enumerate(whole)}

        def fill():
            for buffer in buffers.values():
                steps.host_writes(buffer)

        def compute():
            for buffer in buffers.values():
                steps.device_uses(buffer, write=True)

        result = tuned([fill, compute], buffers, clock, min_gain=0.03)
        assert len(result.policies) == 12
        assert result.speedup > 1.03
        whole.close()

    def test_without_a_source_of_events(self, x, both_ways, clock):
        with managedmem.trace():
            result = tuned(both_ways, x, clock)
        assert result.evidence == "none"
        assert "nothing could be recorded: a trace" in result.notes[0]
        assert result.speedup > 1.4
        assert {t.estimate for t in result.trials} == {None}
        assert {"R1", "R2", "R3", "R5"} <= {t.rule for t in result.trials}

    def test_pool_memory_gets_no_advice(self, pooled, clock, steps):
        clock.in_place = 1e-6
        step = [lambda: steps.host_writes(pooled), lambda: steps.device_uses(pooled)]
        result = tuned(step, {"pooled": pooled}, clock)
        assert {t.rule for t in result.trials} <= {"R1", "R2", "R1+R2", ""}
        assert result.speedup > 1.05

    def test_foreign_memory_whose_advice_is_refused(self, pooled, clock, steps):
        step = [lambda: steps.host_writes(pooled), lambda: steps.device_uses(pooled)]
        result = tuned(step, {"array": CudaArray(pooled)}, clock)
        refused = [t for t in result.trials if t.verdict.startswith("the driver refuses it")]
        assert refused
        assert not [t for t in refused if t.pairs]

    def test_memory_that_is_empty(self, x, both_ways, clock):
        with managedmem.empty(0) as empty:
            assert tuned(both_ways, {"x": x, "empty": empty}, clock).speedup > 1.4


@pytest.mark.emulator_only
class TestNoise:
    def test_changes_without_effect_are_rejected(self, clock):
        """200 candidates that change nothing: at most 5 % may be accepted."""
        accepted = tried = 0
        for seed in range(25):
            accepted_now, tried_now = self.search(clock, seed)
            accepted, tried = accepted + accepted_now, tried + tried_now
        assert tried >= 200
        assert accepted <= 0.05 * tried

    def search(self, clock, seed):
        rules, search_of = managedmem._tune_rules, managedmem._tune_search
        noise = Noise(clock, seed, share=0.1)
        limits = managedmem._tune.Limits(1e9, 9, 0.0, 0, 1.0, None)
        buffers = {f"b{i}": managedmem.empty(4096) for i in range(8)}
        phase = search_of.Phase("step", noise)
        search = search_of.Search([phase], buffers, limits, search_of.Clock(clock, set()))
        search.measure_noise()
        search.noise = 0.0  # the test of the pairs alone
        material = rules.Material(
            ["step"], frozenset(["step"]), dict.fromkeys(buffers, 4096), {}, frozenset(), {}, {}
        )
        candidates = [
            rules.Candidate("", name, (rules.Prefetch(name, "step", Host()),), {}, "", frozenset())
            for name in buffers
        ]
        search.go_through(candidates, material)
        for buffer in buffers.values():
            buffer.close()
        verdicts = [trial.verdict for trial in search.trials]
        return verdicts.count("kept"), len(verdicts)

    def test_a_drift_gains_nothing(self, x, clock, steps):
        """Each run is slower than the one before; pairs alternate, so that it cancels."""
        slower = itertools.count()

        def step():
            clock.spend(RUN * (1 + 0.002 * next(slower)))
            steps.device_uses(x)

        result = tuned(step, x, clock, pairs=9)
        assert result.speedup == 1.0

    def test_one_slow_run_in_ten_is_not_noise(self, x, clock):
        times = itertools.cycle([1, 1, 1, 1, 1, 1, 1, 1, 1, 8])
        result = tuned(lambda: clock.spend(RUN * next(times)), x, clock, pairs=20)
        assert result.noise < 0.01

    @pytest.mark.parametrize(("allowed", "text"), [(0.1, "10%"), (0.0001, "0.01%")], ids=str)
    def test_a_step_that_cannot_be_measured(self, x, clock, allowed, text):
        draw = random.Random(5)
        with pytest.raises(TuneUnstableError) as caught:
            tuned(lambda: clock.spend(RUN * draw.uniform(1, 4)), x, clock, max_noise=allowed)
        assert str(caught.value).startswith("the step varies too much to be tuned: over 5 pairs of")
        assert f"at most {text} is allowed by max_noise" in str(caught.value)
        assert not hasattr(caught.value, "__notes__")


class TestSteps:
    def test_a_step_without_plans(self):
        phase = managedmem._tune_search.Phase
        assert TunedStep([phase("a", lambda: 3)], {}, {})() == 3
        assert TunedStep([phase("a", lambda: 3), phase("b", lambda: 4)], {}, {})() == (3, 4)
        assert repr(TunedStep([phase("a", id)], {}, {})) == "<tuned step of a>"

    @pytest.mark.emulator_only
    def test_discards_wait_for_other_streams(self, x):
        phase = managedmem._tune_search.Phase
        plan = managedmem.PrefetchPlan([(x, DEVICE)])
        step = TunedStep([phase("a", lambda: None)], {}, {"a": plan})
        with emulator.recording() as calls:
            step()
        names = [call.name for call in calls]
        first, last = names.index("cuCtxSynchronize"), names[::-1].index("cuCtxSynchronize")
        discards = [i for i, name in enumerate(names) if "Discard" in name]
        assert discards
        assert first < min(discards)
        assert max(discards) < len(names) - 1 - last
