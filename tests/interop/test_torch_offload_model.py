"""Random programs over an offloaded module and a twin that is not: the same bits at every step."""

import contextlib
import copy
import random

import pytest

from offloaded import assert_same_module, nn, same
from tensors import mt, torch

checkpoint = torch.utils.checkpoint.checkpoint

WIDTH = 24
PARTS = 9
BUDGETS = [3_000, 9_000, 16_000, 30_000, 200_000]
STEPS = 30


class Planted(Exception):
    """Raised in the middle of a pass."""


class Writing(nn.Module):
    """Its calls write its parameter and a buffer in place."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH), requires_grad=False)
        self.register_buffer("count", torch.zeros(WIDTH))

    def forward(self, inputs):
        with torch.no_grad():
            self.weight.mul_(0.75)
            self.count += 1
        return inputs @ self.weight.clone() + self.count


class Keeping(nn.Module):
    """Its calls use a view that an earlier call has made, and a view of another module's weight."""

    def __init__(self, other):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH) / WIDTH)
        self.views = []
        self.others = [other]  # not a submodule

    def forward(self, inputs):
        if not self.views:
            self.views = [self.weight.detach().t(), self.others[0].weight.detach()[1:]]
        rows = torch.cat([self.views[1], self.views[1][:1]])
        return inputs @ self.views[0] + (inputs @ self.weight[0])[:, None] + rows.sum() / 99


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH) / WIDTH)

    def forward(self, inputs):
        return inputs @ self.weight[:, : WIDTH // 2].repeat(1, 2) + inputs @ self.weight.t()


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, inputs):
        return self.attention(inputs, inputs, inputs)[0]


class Model(nn.Module):
    """Parts in a random order, some of them twice, the last one with the weights of the first."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        chance = random.Random(seed)
        first = nn.Linear(WIDTH, WIDTH)
        parts = [first]
        for _ in range(PARTS):
            parts.append(
                chance.choice(
                    [
                        lambda: nn.Linear(WIDTH, WIDTH),
                        lambda: nn.Sequential(
                            nn.Linear(WIDTH, 3 * WIDTH), nn.ReLU(), nn.Linear(3 * WIDTH, WIDTH)
                        ),
                        lambda: nn.LayerNorm(WIDTH),
                        lambda: nn.GRUCell(WIDTH, WIDTH),
                        lambda: nn.BatchNorm1d(WIDTH),
                        lambda: nn.Bilinear(WIDTH, WIDTH // 8, WIDTH),
                        Scaled,
                        Whole,
                        Writing,
                        lambda: Keeping(first),
                    ]
                )()
            )
        last = nn.Linear(WIDTH, WIDTH)
        last.weight = first.weight
        self.parts = nn.ModuleList([*parts, last])
        self.order = [*range(PARTS + 2), *chance.sample(range(PARTS + 2), 2)]

    def forward(self, inputs, fail_at=None, checked=frozenset()):
        for place, number in enumerate(self.order):
            if place == fail_at:
                raise Planted
            part = self.parts[number]
            given = (
                (inputs, inputs[:, : WIDTH // 8]) if isinstance(part, nn.Bilinear) else (inputs,)
            )
            if place in checked:
                inputs = checkpoint(part, *given, use_reentrant=False)
            else:
                inputs = part(*given)
            inputs = torch.tanh(inputs)
        return inputs


class Fuzzer:
    """One program: each step does the same to both modules."""

    def __init__(self, seed, on):
        self.chance = random.Random(seed)
        self.seed, self.on = seed, on
        self.models = [Model(seed).to(on), Model(seed).to(on)]
        trains = self.chance.random() < 0.5
        make = self.chance.choice([torch.optim.Adam, torch.optim.SGD])
        self.optimizers = [make(m.parameters(), lr=0.01) for m in self.models] if trains else []
        self.handle = None
        self.views = ([], [])
        self.done = []

    def begin(self):
        self.handle = mt.offload(
            self.models[0],
            "cuda:0",
            budget=self.chance.choice(BUDGETS),
            optimizer=self.optimizers[0] if self.optimizers else None,
        )
        if self.handle.device.type != self.on:
            self.models[1].to(self.handle.device)

    def run(self):
        self.begin()
        steps = [name for name in dir(self) if name.startswith("step_")]
        try:
            for _ in range(STEPS):
                name = self.chance.choice(steps)
                self.done.append(name)
                getattr(self, name)()
                if self.chance.random() < 0.5:
                    assert_same_module(*self.models)
        finally:
            self.handle.remove()
        assert_same_module(*self.models)

    def inputs(self):
        rows = self.chance.choice([2, 5])
        generator = torch.Generator().manual_seed(rows)
        return torch.rand(rows, WIDTH, generator=generator).to(
            self.models[1].parts[0].weight.device
        )

    def each(self, function):
        one, other = (function(model) for model in self.models)
        assert same(one, other), self.done

    def parameter(self):
        names = [name for name, _ in self.models[1].named_parameters()]
        name = self.chance.choice(names)
        return [dict(model.named_parameters())[name] for model in self.models]

    # --- what happens ---------------------------------------------------------------------

    def step_forward(self):
        inputs = self.inputs()
        with torch.no_grad():
            self.each(lambda model: model(inputs))

    def step_backward(self):
        inputs = self.inputs()
        checked = set(self.chance.sample(range(PARTS + 4), self.chance.choice([0, 0, 4])))

        def run(model):
            loss = model(inputs, checked=checked).square().mean()
            loss.backward()
            return loss.detach()

        self.each(run)

    def step_two_graphs(self):
        inputs = self.inputs()

        def run(model):
            losses = [model(inputs).sum(), model(inputs * 2).sum()]
            losses[1].backward()
            losses[0].backward()
            return losses[0].detach()

        if not any(isinstance(part, nn.BatchNorm1d | Writing) for part in self.models[0].parts):
            self.each(run)

    def step_optimizer(self):
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def step_exception(self):
        inputs, place = self.inputs(), self.chance.randrange(PARTS + 4)
        for model in self.models:
            with contextlib.suppress(Planted):
                model(inputs, fail_at=place)

    def step_exception_in_backward(self):
        inputs = self.inputs()
        number = self.chance.randrange(PARTS + 2)

        def fail(_):
            raise Planted

        def plant(module, given, output):
            if output.requires_grad:
                output.register_hook(fail)

        for model in self.models:
            model.zero_grad()
            hook = model.parts[number].register_forward_hook(plant)
            with contextlib.suppress(Planted):
                model(inputs).sum().backward()
            hook.remove()

    def step_write(self):
        factor = self.chance.choice([0.5, 1.25])
        with torch.no_grad():
            for parameter in self.parameter():
                parameter.mul_(factor)

    def step_write_data(self):
        """torch counts no such write: the next call of the whole model sees them."""
        for parameter in self.parameter():
            parameter.data.add_(0.125)
        self.step_forward()

    def step_write_view(self):
        for views, parameter in zip(self.views, self.parameter(), strict=True):
            views.append(parameter.detach().view(-1)[::2])
        kept = self.chance.randrange(len(self.views[0]))
        for views in self.views:
            views[kept].mul_(0.5)

    def step_load(self):
        state = {name: t.clone() * 0.5 for name, t in self.models[1].state_dict().items()}
        for model in self.models:
            model.load_state_dict(state)

    def step_part_alone(self):
        number = self.chance.randrange(PARTS + 2)
        if not isinstance(self.models[0].parts[number], nn.Bilinear):
            inputs = self.inputs()
            with torch.no_grad():
                self.each(lambda model: model.parts[number](inputs))

    def step_copy(self):
        made = copy.deepcopy(self.models[0].state_dict())
        for name, tensor in self.models[1].state_dict().items():
            assert same(made[name], tensor), (name, self.done)

    def step_again(self):
        """Earlier views keep the earlier memory."""
        if self.chance.random() < 0.5:
            self.handle.remove()
            self.begin_again()

    def step_remove_in_a_pass(self):
        if self.handle.device.type != self.on:
            return  # the rest of the pass would meet parameters of another device
        inputs, backward = self.inputs(), self.chance.random() < 0.5
        part = self.models[0].parts[self.chance.randrange(PARTS + 2)]

        def remove(*_):
            self.handle.remove()

        def plant(module, given, output):
            if backward and output.requires_grad:
                output.register_hook(remove)
            else:
                remove()

        hook = part.register_forward_hook(plant)
        self.forget_views()  # those of the module in this pass too

        def run(model):
            loss = model(inputs).square().mean()
            loss.backward()
            return loss.detach()

        self.each(run)
        hook.remove()
        self.handle.remove()
        self.begin_again()

    def begin_again(self):
        self.forget_views()
        assert_same_module(*self.models)
        self.begin()

    def forget_views(self):
        for views, model in zip(self.views, self.models, strict=True):
            views.clear()
            for part in model.parts:
                if isinstance(part, Keeping):
                    part.views = []


@pytest.mark.filterwarnings(
    "ignore:.*(was given no optimizer|never fit|nothing is streamed|without a call that)"
)
@pytest.mark.parametrize("seed", range(24))
def test_random_programs(on, seed):
    Fuzzer(seed, on).run()
