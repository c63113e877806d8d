"""Writes through `parameter.data` in calls, which torch does not count: they are kept."""

import copy
import gc
import operator
import types

import pytest

from offloaded import LAYER, WIDTH, assert_same_module, batch, layers, nn, plain, same
from tensors import mt, torch

DEVICE = 0
map_tree = torch.utils._pytree.tree_map
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
        elif self.way == "what was kept before":
            for each in self.kept:
                each.mul_(1.5)
        elif self.way == "by a helper of torch":
            map_tree(operator.attrgetter("data"), [self.weight])[0].mul_(1.5)
        elif self.way == "behind the use":
            result = x @ self.weight + self.bias
            self.bias.data.copy_(x.detach().mean(0))
            return result
        return x @ self.weight + self.bias


WAYS = [
    "in place",
    "an item",
    "a result that is kept",
    "by a helper of torch",
    "behind the use",
]


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


@pytest.mark.parametrize("keep", [lambda data: data, lambda data: data.view(-1)[3:]])
def test_data_that_was_kept_before_the_calls_may_be_written_in_them(keep, on):
    model = nn.Sequential(*(Direct("what was kept before") for _ in range(5))).to(on)
    with mt.offload(model, DEVICE, budget=BUDGET) as handle, torch.no_grad():
        twin = plain(model, handle)
        for net in (model, twin):
            net[2].kept = [keep(net[2].weight.data)]
        for one, other in zip(loops(model, handle), loops(twin, handle), strict=True):
            assert same(one, other)
    assert_same_module(model, twin)


def scale(tensor):
    tensor.data.mul_(1.5)


def stepping(optimizer):
    def step(_):
        optimizer.step()
        optimizer.zero_grad()

    return step


def own_forward(module):
    def forward(self, x):
        self.weight.data.mul_(1.5)
        return nn.functional.linear(x, self.weight, self.bias)

    module.forward = types.MethodType(forward, module)


def helper(module):
    module.forward = lambda x: scale(module.weight) or nn.functional.linear(x, module.weight)


WRITERS = {
    "a forward of one module": own_forward,
    "a function that forward calls": helper,
    "a hook before": lambda m: m.register_forward_pre_hook(lambda m, _: scale(m.weight)),
    "a hook behind": lambda m: m.register_forward_hook(lambda m, *_: scale(m.bias)),
}


@pytest.mark.filterwarnings("ignore:.*over the bus")  # by hooks that run outside of the uses
class TestCodeOutsideOfTheClass:
    @pytest.mark.parametrize("is_early", [True, False])
    @pytest.mark.parametrize("writer", WRITERS)
    def test_in_calls_of_the_module(self, writer, is_early, on):
        model = layers(5, on=on)
        twin = copy.deepcopy(model)

        def write(sequence):
            for module in (each for each in sequence if isinstance(each, nn.Linear)):
                WRITERS[writer](module)

        write(twin)
        if is_early:
            write(model)
        with mt.offload(model, DEVICE, budget=BUDGET) as handle, torch.no_grad():
            if not is_early:
                write(model)
            twin.to(handle.device)
            for one, other in zip(loops(model, handle), loops(twin, handle), strict=True):
                assert same(one, other)
        assert_same_module(model, twin)

    @pytest.mark.parametrize("index", [0, 2, -1])
    def test_in_calls_of_the_module_around(self, index, on):
        def write(module, _):
            for parameter in module[index].parameters():
                parameter.data.clamp_(-0.01, 0.01).add_(0.001)

        model = nn.Sequential(*(nn.Sequential(layers(1, on=on)[0]) for _ in range(6)))
        with mt.offload(model, DEVICE, budget=BUDGET) as handle, torch.no_grad():
            twin = plain(model, handle)
            for module in (model, twin):
                module.register_forward_pre_hook(write)
            for one, other in zip(loops(model, handle), loops(twin, handle), strict=True):
                assert same(one, other)
        assert_same_module(model, twin)

    @pytest.mark.filterwarnings("ignore:.*has a gradient, but offload")
    def test_in_a_backward_pass(self, on):
        def step(parameter):
            parameter.data.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None

        model = layers(5, on=on)
        with mt.offload(model, DEVICE, budget=BUDGET) as handle:
            twin = plain(model, handle)
            for parameter in (p for m in (model, twin) for p in m.parameters()):
                parameter.register_post_accumulate_grad_hook(step)
            for _ in range(3):
                for module in (model, twin):
                    module(batch(handle)).square().mean().backward()
            assert_same_module(model, twin)

    @pytest.mark.filterwarnings("ignore:.*has a gradient, but offload")
    @pytest.mark.parametrize("fused", [False, True])
    def test_steps_of_other_optimizers_in_a_backward_pass(self, fused, on):
        model = layers(5, on=on)
        with mt.offload(model, DEVICE, budget=BUDGET) as handle:
            twin = plain(model, handle)
            for parameter in (p for m in (model, twin) for p in m.parameters()):
                optimizer = torch.optim.AdamW([parameter], lr=0.01, fused=fused)
                parameter.register_post_accumulate_grad_hook(stepping(optimizer))
            for _ in range(3):
                for module in (model, twin):
                    module(batch(handle)).square().mean().backward()
            assert_same_module(model, twin)
            before = handle.stats()["bytes_home"]
            with torch.no_grad():
                list(loops(model, handle))
            assert handle.stats()["bytes_home"] == before

    def test_between_calls_of_a_round(self, on):
        model = layers(5, on=on)
        with mt.offload(model, DEVICE, budget=BUDGET) as handle, torch.no_grad():
            twin = plain(model, handle)
            for _ in range(3):
                x = y = batch(handle)
                with handle.round():
                    for mine, other in zip(model, twin, strict=True):
                        for parameter in (*model[-2].parameters(), *twin[-2].parameters()):
                            scale(parameter)
                        x, y = mine(x), other(y)
                assert same(x, y)

    def test_a_step_that_writes_through_data_is_no_read_of_a_call(self, on):
        class Plain(torch.optim.Optimizer):
            def __init__(self, parameters):
                super().__init__(parameters, {})

            def step(self, closure=None):
                for parameter in (p for group in self.param_groups for p in group["params"]):
                    if parameter.grad is not None:
                        parameter.data.sub_(parameter.grad.data, alpha=0.1)

        model = layers(5, on=on)
        optimizer = Plain(model.parameters())
        with mt.offload(model, DEVICE, budget=BUDGET, optimizer=optimizer) as handle:
            twin = plain(model, handle)
            other = Plain(twin.parameters())
            for _ in range(3):
                for module, each in ((model, optimizer), (twin, other)):
                    module(batch(handle)).square().mean().backward()
                    each.step()
                    each.zero_grad()
            assert_same_module(model, twin)
            before = handle.stats()["bytes_home"]
            with torch.no_grad():
                list(loops(model, handle))
            assert handle.stats()["bytes_home"] == before


def test_the_class_of_parameters_is_as_before_in_the_end(on):
    model = adapted(on)
    seen = []
    model[2].inner.register_forward_hook(lambda m, *_: seen.append(type(m.weight)))
    with mt.offload(model, DEVICE, budget=BUDGET) as handle, torch.no_grad():
        list(loops(model, handle, 2))
        assert {type(p) for p in model.parameters()} == {nn.Parameter}
        copied = copy.deepcopy(model)
        assert {type(p) for p in copied.parameters()} == {nn.Parameter}
        assert "data" in vars(nn.Parameter)
    assert "data" not in vars(nn.Parameter)
    assert seen == [nn.Parameter] * 2
    assert mt.offload(model, DEVICE, budget=BUDGET) is not None  # dropped without remove()
    del model, copied, handle
    gc.collect()
    assert "data" not in vars(nn.Parameter)


def test_a_parameter_that_left_the_model_is_left_alone(on):
    model, seen = adapted(on), []
    with mt.offload(model, DEVICE, budget=BUDGET) as handle, torch.no_grad():
        old = model[2].inner.weight
        model[2].inner.weight = nn.Parameter(torch.ones(WIDTH, WIDTH, device=old.device))
        old.data = torch.zeros(3, device=old.device)  # for something else
        handle.refresh()
        hook = model[2].inner.register_forward_pre_hook(lambda m, _: seen.append(old.data))
        list(loops(model, handle, 2))
        assert len(seen) == 2
        assert handle.stats()["bytes_home"] == 0
        hook.remove()
        model[4].inner.register_forward_pre_hook(lambda m, _: seen.append(m.bias.data))
        list(loops(model, handle, 2))
        assert handle.stats()["bytes_home"] > 0


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
