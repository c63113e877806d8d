"""offload() with an optimizer whose groups change, or are looked at by other threads."""

import pytest

from offloaded import LAYER, assert_same_module, batch, layers, managed_tensors, nn, same
from races import in_thread
from tensors import mt, torch
from twins import DEVICE, Twins

COUNT = 4
WEIGHT = 64 * 65 * 4  # the bytes of one layer's parameters
BUDGETS = {
    "streamed": 2 * LAYER,
    "parameters": COUNT * LAYER,
    "some gradients": COUNT * LAYER + WEIGHT,
    "the gradients": COUNT * (LAYER + WEIGHT),
    "some state": COUNT * (LAYER + 2 * WEIGHT) + LAYER,
    "everything": COUNT * (LAYER + 4 * WEIGHT),
}


def linear(model):
    return [module for module in model if isinstance(module, nn.Linear)]


def nbytes(parameters):
    return sum(p.nbytes for p in parameters)


class Pair(Twins):
    """At first, only the last layer of the models is trained."""

    def __init__(self, on, make, all_in_groups):
        model = layers(COUNT, on=on)
        model.requires_grad_(False)
        linear(model)[-1].requires_grad_(True)

        def make_groups(parameters):
            every = list(parameters)
            return make(every if all_in_groups else every[-2:])

        super().__init__(model, make_groups)

    def train(self, handle, rows):
        for model, optimizer in self.sides:
            optimizer.zero_grad()
            model(batch(handle, rows)).square().mean().backward()
        gradients = handle.stats()["gradients_on_host"]
        for _, optimizer in self.sides:
            optimizer.step()
        assert_same_module(self.model, self.twin)
        return gradients

    def check(self):
        super().check()
        self.check_state()


MAKERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


class TestChanges:
    @pytest.mark.parametrize("budget", BUDGETS)
    @pytest.mark.parametrize("all_in_groups", [True, False])
    @pytest.mark.parametrize("name", MAKERS)
    def test_layers_that_train_later(self, on, name, all_in_groups, budget):
        """Layer by layer, as in gradual unfreezing; then the last one is frozen again."""
        pair = Pair(on, MAKERS[name], all_in_groups)
        copies = 2 if name == "Adam" else 1
        with pair.offload(BUDGETS[budget]) as handle:
            pair.train(handle, 2)
            for count in range(2, COUNT + 1):

                def thaw(model, optimizer, count=count):
                    layer = linear(model)[-count].requires_grad_(True)
                    if not all_in_groups:
                        group = {"params": list(layer.parameters()), "lr": 0.05}
                        optimizer.add_param_group(group)

                pair.each(thaw)
                gradients = pair.train(handle, 1 + count)
                room = BUDGETS[budget] - COUNT * LAYER
                fits = count * WEIGHT <= room
                assert gradients == (0 if fits else count * WEIGHT)
                if (1 + copies) * count * WEIGHT > room:
                    assert handle.stats()["state_on_host"] == copies * count * WEIGHT
                assert handle.stats()["held"] <= BUDGETS[budget]
            linear(pair.model)[-1].requires_grad_(False)
            linear(pair.twin)[-1].requires_grad_(False)
            gradients = pair.train(handle, 7)
            assert gradients in (0, (COUNT - 1) * WEIGHT)
            pair.check()
        pair.check()
        assert managed_tensors(pair.model) == []
        assert all("step" not in vars(optimizer) for _, optimizer in pair.sides)

    def test_gradients_before_the_first_step(self, on):
        pair = Pair(on, MAKERS["Adam"], True)
        with pair.offload(BUDGETS["parameters"]) as handle:
            pair.model.requires_grad_(True)
            pair.model(batch(handle)).sum().backward()
            assert handle.stats()["gradients_on_host"] == nbytes(pair.model.parameters())

    def test_a_group_of_parameters_that_have_gradients(self, on):
        pair = Pair(on, MAKERS["Adam"], False)
        with pair.offload(BUDGETS["streamed"]) as handle:
            for model, optimizer in pair.sides:
                model.requires_grad_(True)
                model(batch(handle)).sum().backward()
                rest = [p for layer in linear(model)[:-1] for p in layer.parameters()]
                optimizer.add_param_group({"params": rest})
                optimizer.step()
            assert handle.stats()["gradients_on_host"] == nbytes(pair.model.parameters())
            assert handle.stats()["state_on_host"] == 2 * nbytes(pair.model.parameters())
            pair.check()

    def test_a_group_that_is_taken_out(self, on):
        """Its state stays in the optimizer, and comes back at the end."""
        pair = Pair(on, MAKERS["Adam"], False)
        with pair.offload(BUDGETS["streamed"]) as handle:
            pair.train(handle, 2)

            def exchange(model, optimizer):
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[0].parameters())})
                del optimizer.param_groups[0]

            pair.each(exchange)
            pair.train(handle, 3)
            pair.check()
            assert handle.stats()["state_on_host"] == 4 * WEIGHT
        pair.check()
        for state in pair.optimizer.state.values():
            assert state["exp_avg"].untyped_storage().nbytes() == state["exp_avg"].nbytes

    def test_parameters_that_train_later_are_copied_home_once_a_step(self, on):
        """As all that the optimizer writes."""
        pair = Pair(on, MAKERS["momentum"], False)
        home, steps = [], 4
        with pair.offload(BUDGETS["streamed"]) as handle:

            def thaw(model, optimizer):
                for layer in linear(model)[:-1]:
                    layer.requires_grad_(True)
                    optimizer.add_param_group({"params": list(layer.parameters())})

            pair.each(thaw)
            for rows in range(2, 4 + steps):
                home.append(handle.stats()["bytes_home"])
                pair.train(handle, rows)
        moved = handle.stats()["bytes_home"] - home[2]
        assert (steps - 2) * COUNT * LAYER <= moved <= (steps + 1) * COUNT * LAYER


OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "fused": True},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Adagrad": {"lr": 0.01},
    "Adadelta": {"lr": 0.01},
    "ASGD": {"lr": 0.01},
    "Rprop": {"lr": 0.01},
}


def two_groups(parameters, name):
    """An optimizer whose groups have other learning rates."""
    parameters = list(parameters)
    groups = [{"params": parameters[:4], "lr": 0.1}, {"params": parameters[4:], "lr": 0.2}]
    return getattr(torch.optim, name)(groups, **OPTIMIZERS[name])


class TestOtherThreads:
    @pytest.mark.parametrize("budget", ["streamed", "some state"])
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_whole_groups_at_every_moment(self, on, name, budget, monkeypatch):
        """Each part of a step is a moment, which the class's own code for a group shows."""
        model = layers(COUNT, on=on)
        optimizer = two_groups(model.parameters(), name)
        kind, seen = getattr(torch.optim, name), []
        original = kind._init_group

        def look():
            state = optimizer.state_dict()
            seen.append(
                (
                    [len(group["params"]) for group in state["param_groups"]],
                    [group["lr"] for group in optimizer.param_groups],
                    [id(p) for group in optimizer.param_groups for p in group["params"]],
                )
            )

        def observed(*given):
            in_thread(look)
            return original(*given)

        with mt.offload(model, DEVICE, budget=BUDGETS[budget], optimizer=optimizer) as handle:
            groups = optimizer.param_groups
            monkeypatch.setattr(kind, "_init_group", observed)
            for _ in range(2):
                model(batch(handle)).square().mean().backward()
                optimizer.step()
            assert optimizer.param_groups is groups
        assert len(seen) >= 4
        everything = ([4, 4], [0.1, 0.2], [id(p) for p in model.parameters()])
        assert all(each == everything for each in seen)

    def test_state_of_its_own_parameter(self, on, monkeypatch):
        """The state that a reader sees in a step is that of before it or of after it."""
        model = layers(COUNT, on=on)
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=1.0)
        with mt.offload(
            model, DEVICE, budget=BUDGETS["parameters"] + 2 * LAYER, optimizer=optimizer
        ) as handle:
            seen = []
            original = torch.optim.SGD._init_group

            def observed(*given):
                seen.append([optimizer.state[p]["momentum_buffer"].clone() for p in parameters])
                return original(*given)

            for step in range(3):
                for number, p in enumerate(parameters):
                    p.grad = torch.full_like(p, number + 1)
                if step == 1:
                    monkeypatch.setattr(torch.optim.SGD, "_init_group", observed)
                optimizer.step()
            assert handle.stats()["state_on_host"] == nbytes(parameters)
        assert len(seen) == 2 * COUNT
        for each in seen:
            for number, buffer in enumerate(each):
                assert {float(v) for v in buffer.unique()} <= {(number + 1) * i for i in (1, 2, 3)}


class TestWhatAStepWrites:
    @pytest.mark.parametrize("budget", ["streamed", "some state"])
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_state_and_options(self, on, name, budget):
        """As with a plain optimizer, in the same order."""
        pair = Twins(layers(COUNT, on=on), lambda parameters: two_groups(parameters, name))
        optimizers = pair.optimizer, pair.other
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers]
        with pair.offload(BUDGETS[budget]) as handle:
            for rows in (2, 3, 4):
                for model, optimizer in pair.sides:
                    optimizer.zero_grad()
                    model(batch(handle, rows)).square().mean().backward()
                    optimizer.step()
                for scheduler in schedulers:
                    scheduler.step()
            pair.check()
            one, other = (optimizer.state_dict() for optimizer in optimizers)
            assert one["param_groups"] == other["param_groups"]
            assert list(one["state"]) == list(other["state"])
            for number, state in one["state"].items():
                assert list(state) == list(other["state"][number])
                for key, value in state.items():
                    assert same(
                        torch.as_tensor(value), torch.as_tensor(other["state"][number][key])
                    )
            assert set(vars(optimizers[0])) - {"step"} == set(vars(optimizers[1])) - {"step"}

    def test_attributes_of_a_gradient_scaler(self, on):
        """It puts them on the optimizer for the time of a fused step."""
        model = layers(COUNT, on=on)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = two_groups(model.parameters(), "AdamW")
        with mt.offload(model, DEVICE, budget=BUDGETS["streamed"], optimizer=optimizer) as handle:
            model(batch(handle)).sum().backward()
            optimizer.grad_scale = torch.ones((), device=handle.device)
            optimizer.found_inf = torch.ones((), device=handle.device)
            optimizer.step()
            assert all(map(same, before, model.parameters()))
            del optimizer.grad_scale, optimizer.found_inf
            optimizer.step()
            assert not any(map(same, before, model.parameters()))
