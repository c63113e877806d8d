"""offload_optimizer(): state at home and steps on the device, with the numbers of a plain step."""

import copy
import gc
import importlib
import pickle
import weakref

import pytest

from constants import EMULATED
from live_memory import live_managed_bytes
from managedmem import CUDAError, emulator
from offloaded import assert_same_module, layers, nn, same
from tensors import mt, torch

optimizer_state = importlib.import_module("managedmem.torch._optimizer_state")

WIDTH = 512  # a layer has 1 MiB
PLACE = "cpu" if EMULATED else "cuda:0"
DEVICE = 0 if EMULATED else None
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, foreach=False),
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
}
BUDGETS = [1, 4 << 20, 8 << 20, 1 << 30]  # over the bus, by the scratch of some parts, at once


def model():
    return layers(6, on=PLACE, width=WIDTH)


def train(module, optimizer, steps=3):
    for i in range(steps):
        module(torch.full((4, WIDTH), 0.25 + i, device=PLACE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same_state(one, other):
    pairs = zip(one.state_dict()["state"].items(), other.state_dict()["state"].items(), strict=True)
    for (key, state), (_, reference) in pairs:
        assert state.keys() == reference.keys()
        for name, value in state.items():
            is_tensor = isinstance(value, torch.Tensor)
            assert same(value, reference[name]) if is_tensor else value == reference[name], key


def nbytes_of(optimizer):
    return sum(t.nbytes for state in optimizer.state.values() for t in tensors_of(state))


def tensors_of(state):
    return [t for t in state.values() if isinstance(t, torch.Tensor) and t.dim()]


def offloaded(optimizer, budget=4 << 20):
    return mt.offload_optimizer(optimizer, budget=budget, device=DEVICE)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """A part is a layer, not the whole model."""
    monkeypatch.setattr(optimizer_state, "_PART", 1 << 20)


@pytest.fixture
def pair():
    """A model and its twin, each with its AdamW."""
    one = model()
    other = copy.deepcopy(one)
    return one, torch.optim.AdamW(one.parameters()), other, torch.optim.AdamW(other.parameters())


class TestSteps:
    @pytest.mark.parametrize("budget", BUDGETS)
    @pytest.mark.parametrize("kind", OPTIMIZERS)
    def test_have_the_numbers_of_plain_ones(self, kind, budget):
        one = model()
        other = copy.deepcopy(one)
        optimizer, reference = (OPTIMIZERS[kind](m.parameters()) for m in (one, other))
        train(one, optimizer, 1)
        train(other, reference, 1)
        stays = nbytes_of(optimizer) <= budget
        with offloaded(optimizer, budget) as handle:
            train(one, optimizer)
            train(other, reference)
            assert_same_module(one, other)
            assert_same_state(optimizer, reference)
            numbers = handle.stats()
            where = ("state_on_device", "state_on_host")[:: 1 if stays else -1]
            assert [numbers[name] for name in where] == [nbytes_of(optimizer), 0]
            assert numbers["failures"] == 0
        train(one, optimizer)
        train(other, reference)
        assert_same_module(one, other)
        assert_same_state(optimizer, reference)

    def test_of_large_parameters_come_in_slices(self):
        torch.manual_seed(0)
        one = nn.Linear(1024, 3 * 1024, device=PLACE)
        other = copy.deepcopy(one)
        optimizer, reference = (torch.optim.AdamW(m.parameters()) for m in (one, other))
        with offloaded(optimizer, 12 << 20) as handle:
            for module, each in ((one, optimizer), (other, reference)):
                for i in range(3):
                    module(torch.full((2, 1024), 0.5 + i, device=PLACE)).square().mean().backward()
                    each.step()
            assert handle.stats()["state_on_host"] == 2 * 4 * sum(
                p.numel() for p in one.parameters()
            )
            (ring,) = handle._step.rings.values()
            assert ring.size <= 12 << 20
            assert ring.filled > 6  # slices, in three steps
            assert_same_module(one, other)

    def test_keep_on_the_device_what_the_budget_has_room_for(self):
        one = nn.Sequential(*(nn.Linear(2048, 2048, device=PLACE) for _ in range(10)))
        optimizer = torch.optim.AdamW(one.parameters())
        with offloaded(optimizer, 300 << 20) as handle:
            for p in one.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            numbers = handle.stats()
            assert 0 < numbers["state_on_device"] <= 300 << 20
            assert numbers["state_on_host"] > 0

    def test_follow_groups_that_are_added(self, pair):
        one, optimizer, other, reference = pair
        with offloaded(optimizer):
            for module, each in ((one, optimizer), (other, reference)):
                train(module, each)
                torch.manual_seed(3)
                module.append(nn.Linear(WIDTH, WIDTH, device=PLACE))
                each.add_param_group({"params": module[-1].parameters(), "lr": 0.05})
                module[0].requires_grad_(False)
                train(module, each)
            assert_same_module(one, other)
            assert_same_state(optimizer, reference)

    def test_follow_schedulers_and_loaded_state(self, pair):
        one, optimizer, other, reference = pair
        with offloaded(optimizer) as handle:
            for module, each in ((one, optimizer), (other, reference)):
                scheduler = torch.optim.lr_scheduler.StepLR(each, 1)
                for _ in range(3):
                    train(module, each, 1)
                    scheduler.step()
                saved = copy.deepcopy(each.state_dict())
                train(module, each)
                each.load_state_dict(saved)
                train(module, each)
            assert_same_state(optimizer, reference)
            assert handle.stats()["state_on_device"] == 0
        assert_same_module(one, other)

    def test_call_closures_and_hooks(self, pair):
        one, optimizer, other, reference = pair
        called = []
        for each in (optimizer, reference):
            each.register_step_post_hook(lambda *_: called.append(1))
        with offloaded(optimizer):
            for module, each in ((one, optimizer), (other, reference)):

                def closure(module=module, each=each):
                    each.zero_grad()
                    loss = module(torch.ones(2, WIDTH, device=PLACE)).square().mean()
                    loss.backward()
                    return loss

                assert each.step(closure).item() > 0
            assert_same_module(one, other)
        assert len(called) == 2

    def test_clip_gradients(self, pair):
        one, optimizer, other, reference = pair
        with offloaded(optimizer):
            for module, each in ((one, optimizer), (other, reference)):
                for _ in range(2):
                    module(torch.ones(2, WIDTH, device=PLACE)).square().sum().backward()
                    nn.utils.clip_grad_norm_(module.parameters(), 0.1)
                    each.step()
            assert_same_module(one, other)


class TestHandle:
    def test_is_found_and_tells(self, pair):
        one, optimizer, *_ = pair
        assert mt.OffloadedOptimizer.of(optimizer) is None
        handle = offloaded(optimizer, "4 MiB")
        assert mt.OffloadedOptimizer.of(optimizer) is handle
        assert repr(handle).startswith("<offloaded state of AdamW: 0 bytes on the host")
        train(one, optimizer, 1)
        assert handle.stats()["state_on_host"] > 0
        handle.remove()
        handle.remove()
        assert mt.OffloadedOptimizer.of(optimizer) is None
        assert repr(handle) == "<offloaded state of AdamW, removed>"
        assert "step" not in vars(optimizer)

    @pytest.mark.emulator_only
    def test_can_be_removed_after_a_failure(self, pair):
        one, optimizer, other, reference = pair
        handle = offloaded(optimizer)
        train(one, optimizer, 1)
        train(other, reference, 1)
        emulator.fail("cuCtxSynchronize")
        with pytest.raises(CUDAError):
            handle.remove()
        assert mt.OffloadedOptimizer.of(optimizer) is handle
        train(one, optimizer, 1)
        train(other, reference, 1)
        handle.remove()
        assert mt.OffloadedOptimizer.of(optimizer) is None
        assert_same_state(optimizer, reference)

    def test_removed_state_has_plain_memory(self, pair):
        one, optimizer, *_ = pair
        before = live_managed_bytes()
        with offloaded(optimizer):
            train(one, optimizer, 1)
        kept = [t for state in optimizer.state.values() for t in tensors_of(state)]
        assert {t.device for t in kept} == {next(one.parameters()).device}
        gc.collect()
        assert live_managed_bytes() == before

    def test_a_dropped_optimizer_is_freed(self):
        one = model()
        optimizer = torch.optim.AdamW(one.parameters())
        offloaded(optimizer)
        train(one, optimizer, 1)
        state = weakref.ref(next(iter(optimizer.state.values()))["exp_avg"])
        del optimizer
        gc.collect()
        assert state() is None

    def test_copies_are_plain(self, pair):
        one, optimizer, *_ = pair
        with offloaded(optimizer):
            train(one, optimizer, 1)
            for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
                assert mt.OffloadedOptimizer.of(other) is None
                assert_same_state(other, optimizer)

    def test_ends_with_an_exception(self, pair):
        _, optimizer, *_ = pair
        with pytest.raises(KeyError), offloaded(optimizer):
            raise KeyError
        assert mt.OffloadedOptimizer.of(optimizer) is None


class Own(torch.optim.AdamW):
    pass


class TestRefusals:
    @pytest.mark.parametrize(
        ("make", "error", "text"),
        [
            (lambda m: None, TypeError, "optimizer must be a torch.optim.Optimizer, got None"),
            (
                lambda m: m,
                TypeError,
                "optimizer must be one torch.optim.Optimizer.* got Sequential",
            ),
            (lambda m: torch.optim.LBFGS(m.parameters()), ValueError, "got LBFGS"),
            (lambda m: Own(m.parameters()), ValueError, "must update each parameter .* got Own"),
            (
                lambda m: torch.optim.SGD([torch.ones(2, device="meta", requires_grad=True)]),
                ValueError,
                r"a parameter of shape \(2,\) is on meta",
            ),
        ],
    )
    def test_optimizers(self, make, error, text):
        with pytest.raises(error, match=text):
            offloaded(make(model()))

    @pytest.mark.emulator_only
    @pytest.mark.parametrize(
        ("device", "place"), [(None, "meta: move"), (0, r"meta, not on Device\(0\): move")]
    )
    def test_names_the_places(self, device, place):
        optimizer = torch.optim.SGD([torch.ones(2, device="meta", requires_grad=True)])
        with pytest.raises(ValueError, match=f"is on {place}"):
            mt.offload_optimizer(optimizer, budget=1 << 20, device=device)

    @pytest.mark.parametrize("budget", [0, -1, 1.5, "2GB?", None, True])
    def test_budgets(self, pair, budget):
        with pytest.raises((TypeError, ValueError), match="budget"):
            offloaded(pair[1], budget)
        assert mt.OffloadedOptimizer.of(pair[1]) is None

    def test_twice(self, pair):
        with offloaded(pair[1]), pytest.raises(ValueError, match="is offloaded already"):
            offloaded(pair[1])

    def test_together_with_offload(self, pair):
        one, optimizer, *_ = pair
        with (
            offloaded(optimizer),
            pytest.raises(ValueError, match=r"offloaded by offload_optimizer\(\)"),
        ):
            mt.offload(one, 0, budget="1 GiB", optimizer=optimizer)
        for given in (None, optimizer):
            with (
                mt.offload(one, 0, budget="1 GiB", optimizer=given),
                pytest.raises(ValueError, match=r"trains '0.weight' of an offloaded model"),
            ):
                offloaded(optimizer)

    @pytest.mark.skipif(not EMULATED, reason="the emulated driver makes calls fail")
    def test_of_the_driver_leave_the_state_on_the_device(self, pair):
        one, optimizer, other, reference = pair
        with offloaded(optimizer) as handle:
            emulator.fail("cuMemHostRegister", lasting=True)
            train(one, optimizer)
            emulator.clear_failures()
            assert handle.stats()["failures"] > 0
            train(one, optimizer)
            assert handle.stats()["state_on_host"] > 0
        train(other, reference)
        train(other, reference)
        assert_same_module(one, other)


def test_an_auto_budget_is_what_is_free_less_a_fifth(pair):
    _, optimizer, *_ = pair
    with offloaded(optimizer, "auto") as handle:
        assert handle.stats()["budget"] > 1 << 20
