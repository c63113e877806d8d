"""Writes through `parameter.data` in calls, which torch does not count: they are kept."""

import copy

import pytest

from offloaded import LAYER, WIDTH, assert_same_module, batch, layers, nn, plain, same
from tensors import mt, torch

DEVICE = 0
BUDGET = 3 * LAYER


class Merging(nn.Module):
    """As adapters are: it can write a weight through `data`, and its calls do if they are told."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.delta = nn.Parameter(torch.full((WIDTH, WIDTH), 0.01))
        self.merges = False

    def merge(self):
        self.inner.weight.data += self.delta.detach()

    def forward(self, x):
        if self.merges:
            self.merge()
            return self.inner(x)
        return self.inner(x) + x @ self.delta.t()


class Direct(nn.Module):
    """Writes its weight in each call, in one of several ways."""

    def __init__(self, way):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH) / WIDTH)
        self.bias = nn.Parameter(torch.rand(WIDTH))
        self.way = way
        self.kept = []

    def forward(self, x):
        if self.way == "in place":
            self.weight.data.mul_(1.5)
        elif self.way == "an item":
            self.weight.data[0] = 0.5
        elif self.way == "a result that is kept":
            if not self.kept:
                self.kept.append(self.weight.data)
            self.kept[0].add_(0.125)
        elif self.way == "behind the use":
            result = x @ self.weight + self.bias
            self.bias.data.copy_(x.detach().mean(0))
            return result
        return x @ self.weight + self.bias


WAYS = ["in place", "an item", "a result that is kept", "behind the use"]


def adapted(on, count=6):
    model = layers(count, on=on)
    for i in range(0, 2 * count, 2):
        model[i] = Merging(model[i]).to(on)
    return model


def loops(model, handle, count=3):
    for _ in range(count):
        yield model(batch(handle))


class TestAdapters:
    def test_calls_that_do_not_write_copy_nothing_home(self, on):
        model = adapted(on)
        with mt.offload(model, DEVICE, budget=BUDGET) as handle, torch.no_grad():
            twin = plain(model, handle)
            for one, other in zip(loops(model, handle), loops(twin, handle), strict=True):
                assert same(one, other)
            assert handle.stats()["bytes_home"] == 0
            assert handle.stats()["loads"] > 0

    def test_training_copies_home_what_is_trained(self, on):
        model = adapted(on)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("delta" in name)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained)
        with mt.offload(model, DEVICE, budget=BUDGET, optimizer=optimizer) as handle:
            twin = plain(model, handle)
            reference = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad])
            for _ in range(3):
                for module, each in ((model, optimizer), (twin, reference)):
                    module(batch(handle)).square().mean().backward()
                    each.step()
                    each.zero_grad()
            assert_same_module(model, twin)
            sizes = sum(p.nbytes + 512 for p in trained)
            assert handle.stats()["bytes_home"] <= 3 * sizes

    def test_a_call_that_merges_is_kept(self, on):
        model = adapted(on)
        with mt.offload(model, DEVICE, budget=BUDGET) as handle, torch.no_grad():
            twin = plain(model, handle)
            for merges in (False, True, False, True):
                for module in (model, twin):
                    module[4].merges = merges
                for one, other in zip(loops(model, handle), loops(twin, handle), strict=True):
                    assert same(one, other)
        assert_same_module(model, twin)

    def test_a_merge_between_calls_is_kept(self, on):
        model = adapted(on)
        with mt.offload(model, DEVICE, budget=BUDGET) as handle, torch.no_grad():
            twin = plain(model, handle)
            for _ in range(3):
                assert same(model(batch(handle)), twin(batch(handle)))
                for module in (model, twin):
                    module[2].merge()
        assert_same_module(model, twin)

    def test_read_only_copies_nothing_home(self, on):
        model = adapted(on)
        with mt.offload(model, DEVICE, budget=BUDGET, read_only=True) as handle, torch.no_grad():
            list(loops(model, handle))
            assert handle.stats()["bytes_home"] == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("trains", [False, True])
def test_writes_in_a_call_are_kept(way, trains, on):
    torch.manual_seed(0)
    model = nn.Sequential(*(Direct(way) for _ in range(5))).to(on)
    with mt.offload(model, DEVICE, budget=BUDGET) as handle, torch.set_grad_enabled(trains):
        if trains:
            model.requires_grad_(False)
        twin = plain(model, handle)
        for _ in range(4):
            x = batch(handle).requires_grad_(trains)
            y = x.detach().clone().requires_grad_(trains)
            one, other = model(x), twin(y)
            assert same(one, other)
    assert_same_module(model, twin)


def test_the_class_of_a_parameter_is_its_own_outside_of_calls(on):
    model = adapted(on)
    seen = []
    model[2].inner.register_forward_hook(lambda m, *_: seen.append(type(m.weight)))
    with mt.offload(model, DEVICE, budget=BUDGET) as handle, torch.no_grad():
        list(loops(model, handle, 2))
        assert {type(p) for p in model.parameters()} == {nn.Parameter}
        copied = copy.deepcopy(model)
        assert {type(p) for p in copied.parameters()} == {nn.Parameter}
    assert len(seen) == 2


def test_a_parameter_that_left_the_model_is_left_alone(on):
    model, seen = adapted(on), []
    with mt.offload(model, DEVICE, budget=BUDGET) as handle, torch.no_grad():
        old = model[2].inner.weight
        model[2].inner.weight = nn.Parameter(torch.ones(WIDTH, WIDTH, device=old.device))
        old.data = torch.zeros(3, device=old.device)  # for something else
        handle.refresh()
        model[2].inner.register_forward_pre_hook(
            lambda m, _: seen.append((type(old), type(m.bias)))
        )
        list(loops(model, handle, 2))
    assert [one is nn.Parameter for one, _ in seen] == [True, True]
    assert [other is nn.Parameter for _, other in seen] == [False, False]  # as it is watched


def test_a_copy_in_a_call_is_plain(on):
    class Copying(Direct):
        def forward(self, x):
            self.copies = [copy.deepcopy(self.weight), self.weight.data]
            return super().forward(x)

    model = nn.Sequential(*(Copying("none") for _ in range(5))).to(on)
    with mt.offload(model, DEVICE, budget=BUDGET) as handle, torch.no_grad():
        model(batch(handle))
        assert type(model[3].copies[0]) is nn.Parameter
        assert type(model[3].copies[1]) is torch.Tensor


def test_compiled_calls_are_kept_too(on):
    torch.manual_seed(0)
    model = nn.Sequential(*(Direct("in place") for _ in range(4))).to(on)
    with mt.offload(model, DEVICE, budget=BUDGET) as handle, torch.no_grad():
        twin = plain(model, handle)
        compiled = torch.compile(model, backend="eager")
        for _ in range(3):
            assert same(compiled(batch(handle)), twin(batch(handle)))
    assert_same_module(model, twin)


def test_code_that_is_compiled_inside_of_a_call(on):
    class Inside(Direct):
        def __init__(self):
            super().__init__("none")
            self.run = torch.compile(lambda x, w: torch.tanh(x @ w), backend="eager")

        def forward(self, x):
            return self.run(x, self.weight) + self.bias

    torch.manual_seed(0)
    model = nn.Sequential(*(Inside() for _ in range(4))).to(on)
    with mt.offload(model, DEVICE, budget=BUDGET) as handle, torch.no_grad():
        expected = batch(handle)
        for layer in model:
            expected = torch.tanh(expected @ layer.weight) + layer.bias
        for _ in range(2):
            assert same(model(batch(handle)), expected)
        assert handle.stats()["bytes_home"] == 0
