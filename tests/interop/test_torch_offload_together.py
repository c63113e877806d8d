"""offload() of several modules, which share one budget, beside the same modules without it."""

import copy
import gc
import types
import weakref

import pytest

from offloaded import LAYER, assert_same_module, batch, hooks_of, layers, nn, plain, same
from tensors import mt, torch

DEVICE = 0
BUDGET = 4 * LAYER


def pipeline(**components):
    """As diffusers has it: modules among other things."""
    return types.SimpleNamespace(components={"scheduler": object(), "limit": 3, **components})


FORMS = {
    "a list": lambda one, two: [one, two],
    "a generator": lambda one, two: (module for module in (one, two)),
    "a dict": lambda one, two: {"0": one, "1": two},
    "a pipeline": lambda one, two: pipeline(**{"0": one, "1": two}),
    "a ModuleList": lambda one, two: nn.ModuleList([one, two]),
}


class TestOneBudget:
    @pytest.mark.parametrize("form", FORMS)
    def test_of_modules_in(self, form, on):
        one, two = layers(6, on=on), layers(6, on=on)
        with mt.offload(FORMS[form](one, two), DEVICE, budget=BUDGET) as handle:
            references = plain(one, handle), plain(two, handle)
            assert mt.Offload.of(one[0]) is mt.Offload.of(two) is handle
            assert {part.name.split(".")[0] for part in handle.explain()} == {"0", "1"}
            with torch.no_grad():
                for _ in range(3):
                    x = batch(handle)
                    assert same(two(one(x)), references[1](references[0](x)))
            numbers = handle.stats()
            assert numbers["budget"] <= BUDGET
            assert numbers["held"] <= BUDGET
            assert numbers["streamed"] + numbers["resident"] == 12 * LAYER
            assert set(handle.coverage.values()) == {mt.Coverage(3, 3, 0)}
        assert mt.Offload.of(one) is mt.Offload.of(two) is None
        assert hooks_of(one) == hooks_of(two) == 0
        assert_same_module(two, references[1])

    def test_counts_a_shared_module_once(self, on):
        shared = nn.Linear(64, 64)
        one, two = (
            nn.Sequential(shared, nn.Linear(64, 64)),
            nn.Sequential(nn.Linear(64, 64), shared),
        )
        with mt.offload({"one": one.to(on), "two": two.to(on)}, DEVICE, budget="1 GiB") as handle:
            assert handle.stats()["resident"] == 3 * LAYER

    def test_each_on_a_device_of_its_own(self, device1):
        one, two = layers(4), layers(4)
        places = {"one": DEVICE, "two": device1}
        with mt.offload({"one": one, "two": two}, places, budget=2 * LAYER) as handle:
            reference = copy.deepcopy(two).cpu()
            assert handle.stats()["budget"] <= 4 * LAYER
            with torch.no_grad():
                x = batch(handle).to(next(two.parameters()).device)
                assert same(two(x), reference.to(x.device)(x))


def train(modules, optimizer, device):
    trunk, actor, critic = modules
    for i in range(4):
        features = trunk(torch.full((4, 64), 0.25 + i, device=device))
        (actor(features).square().mean() + critic(features).abs().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def adam(modules):
    return torch.optim.AdamW([p for module in modules for p in module.parameters()])


@pytest.mark.parametrize("early", [False, True], ids=["step", "step in backward"])
def test_training_of_an_actor_and_a_critic_with_one_optimizer(early, on):
    modules = [layers(count, on=on) for count in (4, 2, 2)]
    copies = copy.deepcopy(modules)
    optimizer = adam(modules)
    with mt.offload(
        dict(zip(["trunk", "actor", "critic"], modules, strict=True)),
        DEVICE,
        budget=BUDGET,
        optimizer=optimizer,
        step_in_backward=early,
    ) as handle:
        for module in copies:
            module.to(handle.device)
        train(copies, adam(copies), handle.device)
        train(modules, optimizer, handle.device)
        assert handle.stats()["failures"] == 0
        assert (handle.stats()["steps_in_backward"] > 0) == early
        for module, reference in zip(modules, copies, strict=True):
            assert_same_module(module, reference)


class Unannounced(nn.Module):
    """Uses the weight of its child without calling it."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(64, 64)
        self.other = nn.Linear(64, 64)

    def forward(self, x):
        return self.other(x) @ self.child.weight


def test_the_uses_that_no_hook_sees_are_found_in_each_module(on):
    first, second = layers(4, on=on), Unannounced().to(on)
    with mt.offload({"first": first, "second": second}, DEVICE, budget=2 * LAYER) as handle:
        with torch.no_grad(), pytest.warns(UserWarning, match="'second.child' was used without"):
            for _ in range(2):
                first(batch(handle))
                second(batch(handle))
        coverage = handle.coverage
    assert coverage["second.child"][:2] == (0, 2)
    assert coverage["first.0"][:2] == (2, 2)


@pytest.mark.parametrize("ends", [True, False], ids=["removed", "not removed"])
def test_dropped_modules_are_freed(ends, on):
    models = [layers(4, on=on), layers(4, on=on)]
    handle = mt.offload(models, DEVICE, budget=2 * LAYER)
    with torch.no_grad():
        for model in models:
            model(batch(handle))
    if ends:
        handle.remove()
    refs = [weakref.ref(model) for model in models]
    del models, model, handle
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_one_of_them_may_be_dropped_alone(on):
    one, two = layers(4, on=on), layers(4, on=on)
    with mt.offload([one, two], DEVICE, budget=2 * LAYER) as handle, torch.no_grad():
        expected = plain(two, handle)(batch(handle))
        del one
        gc.collect()
        assert same(two(batch(handle)), expected)


def test_a_module_that_is_offloaded_already_is_named(on):
    one, two = layers(2, on=on), layers(2, on=on)
    with (
        mt.offload(two, DEVICE, budget=LAYER),
        pytest.raises(ValueError, match=r"'two' \(Sequential\) is offloaded already"),
    ):
        mt.offload({"one": one, "two": two}, DEVICE, budget=LAYER)
    assert hooks_of(one) == 0


@pytest.mark.parametrize("name", ["kind", "type", "forward", "training", "_modules", "a b", "é"])
def test_any_word_is_a_name(name, on):
    one, two = layers(2, on=on), layers(2, on=on)
    with mt.offload({name: one, "two": two}, DEVICE, budget=LAYER) as handle:
        assert f"{name}.0" in {part.name for part in handle.explain()}
        handle.refresh()
        with torch.no_grad():
            assert same(one(batch(handle)), plain(one, handle)(batch(handle)))


def test_parametrized_modules_can_be_copied_before_their_first_call(on):
    model = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)).to(on)
    with mt.offload([model, layers(2, on=on)], DEVICE, budget=2 * LAYER) as handle:
        twin = copy.deepcopy(model)
        assert mt.Offload.of(twin) is None
        with torch.no_grad():
            assert same(model(batch(handle)), twin.to(handle.device)(batch(handle)))
