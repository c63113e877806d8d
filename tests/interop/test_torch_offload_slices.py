"""offload() in training: large parameters step in slices, small parts together, equal numbers."""

import importlib

import pytest

from offloaded import LAYER, layers, nn
from optimizers import FLAGS, make, skip_without_kernels
from tensors import mt, torch
from twins import DEVICE, Twins, total

PartialStep = importlib.import_module("managedmem.torch._offload_partial").PartialStep
Visits = importlib.import_module("managedmem.torch._offload_visits").Visits

WIDTH = 64
ROWS = 1000  # of the table of an embedding, which is large for the ring
TABLE = ROWS * WIDTH * 4


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    for module in ("optimizer", "visits"):
        monkeypatch.setattr(f"managedmem.torch._offload_{module}.LEAST_SLICE", 16 << 10)
    monkeypatch.setattr("managedmem.torch._offload_visits._ROWS", 64)


class Trained(Twins):
    """Models with a large table."""

    def __init__(self, on, name="Adam", flags=None, model=None):
        if model is None:
            inner = layers(4)
            model = nn.Sequential(nn.Embedding(ROWS, WIDTH), *inner, nn.Linear(WIDTH, ROWS)).to(on)
        super().__init__(model, lambda parameters: make(parameters, name, **(flags or {})))

    def step(self):
        for model, stepped in self.sides:
            stepped.zero_grad()
            given = torch.arange(0, ROWS, 7, device=next(model.parameters()).device)
            if not isinstance(model[0], nn.Embedding):
                given = torch.nn.functional.one_hot(given % WIDTH, WIDTH).float()
            model(given).square().mean().backward()
            stepped.step()

    def check(self):
        super().check()
        self.check_state()


def ring_of(handle):
    (ring,) = handle._step.rings.values()
    return ring


class TestSlices:
    @pytest.mark.parametrize(("name", "flags"), FLAGS)
    def test_numbers_of_a_whole_step(self, on, name, flags):
        skip_without_kernels(on, name, flags)
        trained = Trained(on, name, flags)
        with trained.offload(total(trained.model) + TABLE) as handle:
            trained.steps(4)
            trained.check()
            assert handle.stats()["failures"] == 0
            if name != "SGD":  # without state, a gradient fits in the ring
                assert ring_of(handle).filled > 4 * 6
        trained.check()

    def test_parts_that_are_streamed(self, on, monkeypatch):
        monkeypatch.setattr("managedmem.torch._offload_optimizer.LEAST_SLICE", 4 << 10)
        monkeypatch.setattr("managedmem.torch._offload_visits.LEAST_SLICE", 4 << 10)
        trained = Trained(on, model=layers(12, on=on))
        with trained.offload(10 * LAYER) as handle:
            trained.steps(3)
            trained.check()
            assert handle.stats()["groups"] > 0
            cut = [stay for stay in _stays(trained, handle) if stay.cut is not None]
            assert sum(stay.parts[0].group is not None for stay in cut) > 12
        trained.check()

    def test_slices_are_copied_once_each_way(self, on):
        trained = Trained(on)
        with trained.offload(total(trained.model) + 2 * TABLE) as handle:
            trained.step()
            ring = ring_of(handle)
            before, sizes = ring.filled, []
            original = ring.fill
            ring.fill = lambda nbytes, copied: sizes.append(nbytes) or original(nbytes, copied)
            trained.step()
            taken = [s for s, r in zip(sizes, range(ring.filled - before), strict=False)]
            assert ring.filled - before > 6
            assert max(taken) <= ring.size // 3
            trained.check()

    def test_parts_that_stay_step_together(self, on):
        """Where several fit in a third of the ring."""
        trained = Trained(on)
        with trained.offload(total(trained.model) + 4 * TABLE) as handle:
            trained.steps(2)
            calls = [stay for stay in _stays(trained, handle) if stay.cut is None]
            assert sum(len(stay.parts) for stay in calls) == 4
            assert len(calls) < 4
            trained.step()
            trained.check()

    @pytest.mark.parametrize("kind", ["Adam", "SGD"])
    def test_gradients_that_fused_kernels_unscale(self, on, kind):
        """In the ring, and then at home."""
        trained = Trained(on, name=kind, flags={"fused": True})
        with trained.offload(total(trained.model) + TABLE) as handle:
            scalers = [torch.amp.GradScaler(handle.device.type, init_scale=8.0) for _ in range(2)]
            for _ in range(3):
                for (model, optimizer), scaler in zip(trained.sides, scalers, strict=True):
                    optimizer.zero_grad()
                    given = torch.arange(0, ROWS, 7, device=handle.device)
                    scaler.scale(model(given).square().mean()).backward()
                    scaler.step(optimizer)
                    scaler.update()
                trained.check()

    def test_state_that_stays_where_the_budget_has_room(self, on, monkeypatch):
        """Beside a ring of the greatest size; and it is in the budget."""
        monkeypatch.setattr("managedmem.torch._offload_optimizer.MOST_RING", TABLE)
        trained = Trained(on, name="AdamW")
        size_of_all = total(trained.model)
        size = sum(p.nbytes for p in trained.model.parameters())
        with trained.offload(2 * size_of_all + 4 * TABLE) as handle:
            places = []
            for _ in range(4):
                trained.step()
                places.append([part.home is None for part in handle._step.parts])
            trained.check()
            ring, stats = ring_of(handle), handle.stats()
            there = 2 * size - stats["state_on_host"]
            assert TABLE - 3 < ring.size <= TABLE
            assert 2 * TABLE <= there <= 3 * TABLE  # of the state, beside parameters and gradients
            assert stats["gradients_on_host"] == 0
            assert all(each == places[0] for each in places)
            trained.optimizer.load_state_dict(trained.optimizer.state_dict())
            trained.other.load_state_dict(trained.other.state_dict())
            trained.step()
            trained.check()
        trained.check()
        devices = {v.device for s in trained.optimizer.state.values() for v in s.values()}
        assert {device.type for device in devices} <= {"cpu", on.split(":")[0]}

    def test_removed_between_two_slices(self, on):
        if on == "cpu" and torch.cuda.is_available():
            pytest.skip("the reference is on the other device")
        trained = Trained(on)
        handle = trained.offload(total(trained.model) + TABLE)
        trained.step()
        original, calls = PartialStep.run, []

        def run(*given):
            original(*given)
            calls.append(given)
            if len(calls) == 2:
                handle.remove()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PartialStep, "run", run)
            trained.step()
        assert len(calls) > 4
        trained.check()
        trained.step()
        trained.check()


def _stays(trained, handle):
    split = handle._step
    visits = Visits(trained.optimizer, split.parts, split.rings, split.gradients, lambda: True)
    return [stay for turn in visits.turns for stay in turn.stays]


class TestSubmodulesOfOneDevice:
    """They have one ring, whichever comes last."""

    @pytest.mark.parametrize("order", [("0", "1"), ("1", "0")])
    def test_the_ring_holds_visits_of_the_larger(self, on, order):
        wide = [nn.Linear(4 * WIDTH, 4 * WIDTH, bias=False) for _ in range(4)]
        narrow = [nn.Linear(4 * WIDTH, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(60))]
        model = nn.Sequential(nn.Sequential(*wide), nn.Sequential(*narrow)).to(on)
        trained = Twins(model, lambda parameters: make(parameters, "Adam"))
        visit = 3 * wide[0].weight.nbytes  # a gradient and two moments
        places, optimizer = dict.fromkeys(order, DEVICE), trained.optimizer
        with mt.offload(model, places, budget=3 * total(model) // 2, optimizer=optimizer) as handle:
            for _ in range(2):
                for side, _ in trained.sides:
                    device = next(side.parameters()).device
                    side(torch.ones(4, 4 * WIDTH, device=device)).square().mean().backward()
                trained.apply()
            trained.check()
            assert handle._step.largest == {next(iter(handle._step.rings)): visit}
        trained.check()
