"""Which state stays on the device in the steps of an optimizer, and which parts step together."""

import importlib
import random
from functools import partialmethod
from itertools import accumulate, chain

import pytest

from constants import EMULATED
from offloaded import layers, nn
from optimizers import FLAGS, make, skip_without_kernels
from tensors import mt, torch
from twins import Twins, total

PartialStep = importlib.import_module("managedmem.torch._offload_partial").PartialStep
SplitStep = importlib.import_module("managedmem.torch._offload_optimizer").SplitStep
Ring = importlib.import_module("managedmem.torch._offload_ring").Ring
shares = importlib.import_module("managedmem.torch._offload_shares")

WIDTH, COUNT, WIDE = 64, 24, 380
PART = WIDTH * WIDTH * 4  # a layer
RING = 300 << 10  # a third is the state of three layers
HALF = COUNT * PART + 2 * WIDE * WIDTH * 4  # of the state
PLACE = "cpu" if EMULATED else "cuda:0"


@pytest.fixture(autouse=True)
def small_ring(monkeypatch):
    monkeypatch.setattr("managedmem.torch._optimizer_state._PART", PART)
    monkeypatch.setattr("managedmem.torch._offload_optimizer.MOST_RING", RING)


def decoder():
    """Many layers, and two that are large for the ring."""
    return nn.Sequential(*layers(COUNT), nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)).to(PLACE)


class Trained(Twins):
    """Two models; one keeps half of its state on the host."""

    def __init__(self, name="AdamW", model=None, room=HALF, **flags):
        model = decoder() if model is None else model
        super().__init__(model, lambda parameters: make(parameters, name, **flags))
        device = 0 if EMULATED else None
        self.handle = mt.offload_optimizer(self.optimizer, budget=RING + room, device=device)

    def backward(self):
        given = torch.linspace(-1, 1, 4 * WIDTH, device=PLACE).view(4, WIDTH)
        for model, optimizer in self.sides:
            optimizer.zero_grad()
            model(given).square().mean().backward()

    def step(self):
        self.backward()
        for _, optimizer in self.sides:
            optimizer.step()

    def check(self):
        super().check()
        self.check_state()

    @property
    def parts(self):
        return self.handle._step.parts

    def stays(self):
        """For each part, in the order of the step, whether its state is on the device."""
        return [part.home is None for part in self.parts]

    def taken(self):
        """Bytes of the budget."""
        rings = self.handle._step.rings.values()
        return sum(ring.size for ring in rings) + self.handle.stats()["state_on_device"]

    def turns(self):
        """The parts of each turn of a step."""
        turns, original = [], PartialStep.run
        part_of = {id(p): part for part in self.parts for p in part.parameters}

        def run(partial, chosen, staged=None):
            turns.append(list({id(part_of[id(p)]): part_of[id(p)] for p in chosen}.values()))
            original(partial, chosen, staged)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PartialStep, "run", run)
            self.step()
        return turns

    def nbytes(self, parts):
        every = chain.from_iterable(part.parameters for part in parts)
        return sum(t.nbytes for p in every for _, t in shares.state_of(self.optimizer, p))


def unevenness(sizes, stays, share):
    """By how many bytes what stays is ahead of its share somewhere, or behind."""
    kept = accumulate(size * stay for size, stay in zip(sizes, stays, strict=True))
    return max(abs(k - share * s) for k, s in zip(kept, accumulate(sizes), strict=True))


class TestStateThatStays:
    @pytest.mark.parametrize("seed", range(20))
    def test_has_an_even_share_everywhere(self, seed):
        numbers = random.Random(seed)
        sizes = [numbers.choice([0, 1, 7, 40, 100]) for _ in range(200)]
        room = numbers.randrange(sum(sizes))
        stays = shares.spread(sizes, [True] * 200, room)
        kept = [size * stay for size, stay in zip(sizes, stays, strict=True)]
        assert room - sum(kept) < min(s for s, k in zip(sizes, stays, strict=True) if not k)
        assert sum(kept) <= room
        assert unevenness(sizes, stays, room / sum(sizes)) <= max(sizes)

    @pytest.mark.parametrize(
        ("sizes", "room", "stays"),
        [
            ([], 5, []),
            ([0, 0], 0, [True, True]),
            ([3, 3], 0, [False, False]),
            ([3, 0, 3], 6, [True, True, True]),
            ([3, 3, 3, 3], 6, [False, True, False, True]),
            ([3, 3, 3, 3], 8, [False, True, True, False]),
            ([9, 3, 3, 1], 4, [False, True, False, True]),
        ],
    )
    def test_is_chosen_by_its_size(self, sizes, room, stays):
        assert shares.spread(sizes, [True] * len(sizes), room) == stays

    def test_is_none_that_cannot_stay(self):
        assert shares.spread([2, 2, 2], [False, True, False], 6) == [False, True, False]

    def test_is_the_same_once_the_others_are_at_home(self):
        sizes, every = [5, 3, 8, 1, 6, 2] * 5, [True] * 30
        for room in range(sum(sizes)):
            stays = shares.spread(sizes, every, room)
            assert shares.spread(sizes, stays, room) == stays

    def test_is_spread_over_a_step(self):
        trained = Trained()
        trained.step()
        stays = trained.stays()
        sizes = [trained.nbytes([part]) for part in trained.parts]
        assert unevenness(sizes, stays, HALF / sum(sizes)) <= max(sizes) < 0.2 * sum(sizes)
        trained.steps(2)
        assert trained.stays() == stays
        trained.check()

    def test_is_spread_in_the_order_of_the_optimizer(self):
        """The order of the model is another one."""

        def apart(parameters):
            every = list(parameters)  # of every third layer, then of the next ones
            return make([p for i in range(6) for p in every[i::6]])

        model = layers(COUNT)
        ours = Twins(model, apart)
        with ours.offload(3 * total(model) + RING // 2) as handle:
            for each, optimizer in ours.sides:
                each(torch.ones(4, WIDTH, device=PLACE)).square().mean().backward()
                optimizer.step()
            parts = handle._step.parts
            stays = [part.home is None for part in parts]
            assert 0.2 < sum(stays) / len(stays) < 0.8
            assert unevenness([1] * len(stays), stays, sum(stays) / len(stays)) <= 2
            ours.check()

    def test_is_in_the_budget_at_each_copy(self, monkeypatch):
        trained = Trained()
        trained.step()
        seen = []
        for owner, name in ((Ring, "fill"), (Ring, "empty"), (PartialStep, "run")):

            def watched(*given, original):
                seen.append(trained.taken())
                return original(*given)

            watch = partialmethod(watched, original=getattr(owner, name))
            monkeypatch.setattr(owner, name, watch)
        trained.steps(2)
        assert len(seen) >= 40
        assert 0.95 * (RING + HALF) < max(seen) <= RING + HALF

    @pytest.mark.parametrize("name", ["AdamW", "amsgrad", "RMSprop"])
    def test_takes_what_the_ring_does_not(self, monkeypatch, name):
        """Even in the first step, before which the size of the state is an estimate."""
        monkeypatch.setattr("managedmem.torch._offload_optimizer.MOST_RING", 256 << 20)
        trained = Trained(name, layers(COUNT, on=PLACE), room=COUNT * PART - RING)
        for _ in range(3):
            trained.step()
            budget = trained.handle.stats()["budget"]
            assert 0 <= budget - trained.taken() < max(trained.nbytes([p]) for p in trained.parts)
            assert len({part.home is None for part in trained.parts}) == 2
        trained.check()

    def test_leaves_no_memory_of_a_ring_that_grows(self, monkeypatch):
        """The smaller ring is freed, and torch's cache emptied, before the larger one is made."""
        original, seen = SplitStep._make_ring, []

        def watched(step, *given):
            seen.append(len(step.rings))
            original(step, *given)

        monkeypatch.setattr(SplitStep, "_make_ring", watched)
        trained = Trained(model=layers(COUNT, on=PLACE), room=0)
        trained.steps(2)
        for model, optimizer in trained.sides:
            model.extend(decoder()[-2:])
            optimizer.add_param_group({"params": model[-2:].parameters()})
        trained.steps(2)
        assert seen == [0, 1]
        assert trained.taken() <= trained.handle.stats()["budget"]
        trained.check()

    def test_follows_groups_and_parameters_that_are_frozen(self):
        trained = Trained()
        trained.steps(2)
        for model, optimizer in trained.sides:
            model[4].requires_grad_(False)
            model.extend(layers(6, on=PLACE))
            optimizer.add_param_group({"params": model[-12:].parameters(), "lr": 0.02})
        trained.steps(3)
        trained.check()
        assert trained.taken() <= trained.handle.stats()["budget"]
        assert 0 < sum(trained.stays()[-6:]) < 6

    def test_goes_on_with_loaded_state_and_schedulers(self):
        trained = Trained()
        schedulers = [
            torch.optim.lr_scheduler.StepLR(optimizer, 1) for _, optimizer in trained.sides
        ]
        trained.steps(2)
        stays = trained.stays()
        for _, optimizer in trained.sides:
            optimizer.load_state_dict(optimizer.state_dict())
        for _ in range(2):
            for scheduler in schedulers:
                scheduler.step()
            trained.step()
        assert trained.stays() == stays
        assert trained.taken() <= trained.handle.stats()["budget"]
        trained.check()


class TestTurns:
    @pytest.mark.parametrize("room", [HALF, int(1.4 * HALF)])
    def test_are_of_state_that_visits_and_of_state_that_stays(self, room):
        """As much of each as the ring has room for three times."""
        trained = Trained(room=room)
        trained.steps(2)
        turns = trained.turns()
        most = RING // 3
        every = [part for turn in turns for part in turn]
        assert sorted(map(id, every)) == sorted(map(id, trained.parts))
        assert len(turns) < 0.4 * len(every)
        mixed = 0
        for turn in turns:
            there = [part.home is None for part in turn]
            mixed += len(set(there)) > 1
            sizes = [trained.nbytes(p for p in turn if (p.home is None) == stay) for stay in (0, 1)]
            assert len(turn) == 1 or max(sizes) <= most
        assert mixed > 0.6 * len(turns)
        trained.check()

    def test_are_of_one_part_where_it_is_large(self):
        """Even if its state stays: temporaries of kernels are as large."""
        trained = Trained(room=int(1.4 * HALF))
        trained.steps(2)
        large = [p for p in trained.parts if trained.nbytes([p]) > RING // 3]
        assert {part.home is None for part in large} == {True, False}
        turns = trained.turns()
        assert [turn for turn in turns if set(map(id, turn)) & set(map(id, large))] == [
            [part] for part in large
        ]
        trained.check()

    def test_are_of_one_part_before_it_has_state(self):
        trained = Trained()
        assert trained.turns() == [[part] for part in trained.parts]

    @pytest.mark.parametrize(("name", "flags"), FLAGS)
    def test_have_the_numbers_of_a_whole_step(self, name, flags):
        skip_without_kernels(PLACE, name, flags)
        trained = Trained(name, room=HALF // 4, **flags)
        for _ in range(4):
            trained.step()
            trained.check()
        assert name == "SGD" or 0 < sum(trained.stays()) < len(trained.parts)
        assert trained.handle.stats()["failures"] == 0
        trained.handle.remove()
        trained.step()
        trained.check()

    def test_that_fail_end_the_step(self, monkeypatch):
        """The earlier ones keep it, with and without a visit, and the next step goes on."""
        trained = Trained()
        trained.steps(2)
        trained.backward()
        original, done = PartialStep.run, []

        def run(partial, chosen, staged=None):
            if len(done) == 3:
                raise KeyError
            original(partial, chosen, staged)
            done.append(chosen)

        with monkeypatch.context() as patch:
            patch.setattr(PartialStep, "run", run)
            with pytest.raises(KeyError):
                trained.optimizer.step()
        stepped = set(map(id, chain.from_iterable(done)))
        pairs = zip(trained.model.parameters(), trained.twin.parameters(), strict=True)
        later = {other: other.grad for one, other in pairs if id(one) not in stepped}
        for other in later:
            other.grad = None
        trained.other.step()
        for other, grad in later.items():
            other.grad = grad
        trained.check()
        trained.steps(2)
        trained.check()

    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")
    def test_with_sparse_gradients(self):
        model = nn.Sequential(nn.Embedding(50, WIDTH, sparse=True), *decoder()).to(PLACE)
        trained = Trained("Adagrad", model, room=HALF // 4, foreach=False)
        for i in range(4):
            for each, optimizer in trained.sides:
                each(torch.arange(i, 50, 7, device=PLACE)).square().mean().backward()
                assert each[0].weight.grad.is_sparse
                optimizer.step()
                optimizer.zero_grad()
            trained.check()

    def test_in_backward_passes_are_as_without_state_that_stays(self):
        """So that gradients wait for no others."""
        model = decoder()
        ours = Twins(model, make)
        with ours.offload(3 * total(model) + RING, step_in_backward=True) as handle:
            for seed in range(4):
                for each, optimizer in ours.sides:
                    given = torch.full((4, WIDTH), 0.1 + seed, device=PLACE)
                    each(given).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                turns = [turn.parts for turn in handle._step.visits.turns]
                ours.check()
            stays = [turn for turn in turns if any(part.home is None for part in turn)]
            assert len(stays) > 5
            assert all(len(turn) == 1 for turn in stays)
            assert len(turns) < len(handle._step.parts)
