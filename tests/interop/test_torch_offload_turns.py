"""Which state stays on the device in the steps of an optimizer."""

import importlib
import random
from functools import partialmethod
from itertools import accumulate, chain

import pytest

from constants import EMULATED
from offloaded import layers, nn
from optimizers import make
from tensors import mt, torch
from twins import Twins

PartialStep = importlib.import_module("managedmem.torch._offload_partial").PartialStep
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
    """Models of which one keeps a half of its state on the host."""

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
