"""offload(step_in_backward=True): steps in the backward pass, equal numbers, and refusals."""

import copy
import gc
import importlib
import weakref

import pytest

from offloaded import IN_GRAPHS, LAYER, assert_same_module, hooks_of, layers, nn, same
from optimizers import FLAGS, make, skip_without_kernels
from tensors import mt, torch
from twins import DEVICE, Twins, total

checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint
PartialStep = importlib.import_module("managedmem.torch._offload_partial").PartialStep
Ring = importlib.import_module("managedmem.torch._offload_ring").Ring
WIDTH = 64
COUNT = 6
STREAMED, RESIDENT, WHOLE = 4 * LAYER, (COUNT + 10) * LAYER, 6 * COUNT * LAYER


class Pair(Twins):
    """Two models that are trained alike, one of them offloaded."""

    def __init__(self, on, model=None, budget=STREAMED, optimizer=make, **options):
        super().__init__(layers(COUNT, on=on) if model is None else model, optimizer)
        self.handle = self.offload(budget, step_in_backward=True, **options)

    def backward(self, function=None, seed=0):
        for model, _ in self.sides:
            given = torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(seed))
            given = given.to(self.handle.device)
            output = model(given) if function is None else function(model, given)
            output.square().mean().backward()

    def step(self, function=None, seed=0):
        self.backward(function, seed)
        self.apply()

    def steps(self, count):
        for seed in range(count):
            self.step(seed=seed)

    def check(self):
        super().check()
        self.check_state()

    def counts(self):
        stats = self.handle.stats()
        assert stats["failures"] == 0
        return stats["steps_in_backward"], stats["gradients_on_host"]


def drop_pass():
    """Let torch drop what is left of a pass that has failed."""
    torch.ones(1, requires_grad=True).sum().backward()


def gradients(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


def sliced_pair(on, monkeypatch):
    """With a parameter in the model that steps in slices."""
    for module in ("optimizer", "visits"):
        monkeypatch.setattr(f"managedmem.torch._offload_{module}.LEAST_SLICE", 16 << 10)
    monkeypatch.setattr("managedmem.torch._offload_visits._ROWS", 64)
    torch.manual_seed(0)
    wide = nn.Linear(WIDTH, 1000)
    model = nn.Sequential(*layers(COUNT), wide, nn.Linear(1000, WIDTH)).to(on)
    return Pair(on, model, budget=total(model) + wide.weight.nbytes)


class TestNumbers:
    @pytest.mark.parametrize(("name", "flags"), FLAGS)
    @pytest.mark.parametrize("budget", [STREAMED, RESIDENT])
    def test_of_plain_training(self, on, name, flags, budget):
        skip_without_kernels(on, name, flags)
        pair = Pair(on, budget=budget, optimizer=lambda p: make(p, name, **flags))
        for seed in range(4):
            pair.backward(seed=seed)
            assert gradients(pair.model) == []
            assert pair.counts() == ((seed + 1) * COUNT, 0)
            pair.apply()
            pair.check()
            assert pair.handle.stats()["held"] <= budget
        pair.handle.remove()
        pair.check()

    def test_where_everything_fits(self, on):
        pair = Pair(on, budget=WHOLE)
        pair.steps(3)
        pair.check()
        assert pair.counts() == (3 * COUNT, 0)
        assert pair.handle.stats()["state_on_host"] == 0

    def test_slices_of_a_large_parameter(self, on, monkeypatch):
        pair = sliced_pair(on, monkeypatch)
        pair.steps(4)
        pair.check()
        (ring,) = pair.handle._step.rings.values()
        assert ring.filled > 3 * (COUNT + 2)
        assert pair.counts() == (4 * (COUNT + 2), 0)

    def test_state_comes_through_the_ring_in_the_order_of_the_last_pass(self, on):
        pair = Pair(on, budget=RESIDENT)
        pair.step()
        (ring,) = pair.handle._step.rings.values()
        assert ring.filled == 0  # the first step has made the state
        pair.step()
        first = ring.filled
        pair.step()
        assert first > 0
        assert ring.filled == 2 * first

    def test_an_order_that_changes(self, on):
        def run(order):
            def function(model, given):
                for i in order:
                    given = model[2 * i](given).relu()
                return given

            return function

        pair = Pair(on)
        for order in (
            (0, 1, 2, 3, 4, 5),
            (5, 4, 3, 2, 1, 0),
            (2, 0, 5),
            (5, 3, 1),
            (0, 1, 2, 3, 4, 5),
        ):
            pair.step(run(order))
            assert gradients(pair.model) == []
        pair.check()
        assert pair.counts() == (24, 0)

    def test_a_module_that_is_called_twice(self, on):
        pair = Pair(on)
        for _ in range(3):
            pair.step(lambda model, given: model(model[0](model(given))))
        pair.check()
        assert pair.counts() == (3 * COUNT, 0)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpoints(self, on, reentrant):
        def function(model, given):
            given.requires_grad_()
            for start in range(0, 2 * COUNT, 4):
                given = checkpoint(model[start : start + 4], given, use_reentrant=reentrant)
            return given

        pair = Pair(on)
        for seed in range(3):
            pair.step(function, seed)
            pair.check()
        assert pair.counts() == (3 * COUNT, 0)


class Tied(nn.Module):
    """Two modules with one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = layers(1)[0], layers(3), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, given):
        return self.last(self.inner(self.first(given)))


class Branches(nn.Module):
    """One of two modules is used, and a parameter beside others is not."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(layers(1)[0] for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, given, number=0, bias=True):
        given = self.branches[number](given)
        return self.last(given) if bias else given @ self.last.weight


class TestParametersThatAreLeft:
    def test_tied_ones(self, on):
        torch.manual_seed(0)
        pair = Pair(on, Tied().to(on))
        for seed in range(3):
            pair.backward(seed=seed)
            assert len(gradients(pair.model)) == 1
            pair.apply()
            pair.check()

    def test_ones_without_a_gradient(self, on):
        torch.manual_seed(0)
        pair = Pair(on, Branches().to(on), budget=3 * LAYER)
        for number, bias in [(0, True), (1, True), (1, False), (0, False), (0, True), (1, True)]:
            pair.step(lambda model, given, n=number, b=bias: model(given, n, b))
            pair.check()

    def test_frozen_and_unfrozen_ones(self, on):
        pair = Pair(on)
        for frozen in ((0, 2), (2, 4), (), (8,)):
            for model, _ in pair.sides:
                model.requires_grad_(True)
                for i in frozen:
                    model[i].requires_grad_(False)
            for seed in range(2):
                pair.step(seed=seed)
                assert gradients(pair.model) == []
            assert_same_module(pair.model, pair.twin)

    def test_ones_that_are_frozen_at_first(self, on):
        pair = Pair(on, layers(COUNT, on=on).requires_grad_(False), optimizer=make)
        for model, _ in pair.sides:
            assert not any(parameter.requires_grad for parameter in model.parameters())
            model[2:].requires_grad_(True)
        pair.steps(2)
        assert gradients(pair.model) == []
        pair.check()

    def test_one_outside_of_the_model(self, on):
        place = "cuda:0" if torch.cuda.is_available() else "cpu"
        outer = [torch.ones(WIDTH, device=place, requires_grad=True) for _ in range(2)]
        found = iter(outer)
        pair = Pair(on, optimizer=lambda p: make([*p, next(found)]))
        every = dict(zip(map(id, (pair.model, pair.twin)), outer, strict=True))
        for _ in range(3):
            pair.step(lambda model, given: model(given) * every[id(model)])
        assert same(*outer)
        pair.check()

    def test_step_hooks_are_called_once(self, on):
        pair, calls = Pair(on, Tied().to(on)), []
        pair.optimizer.register_step_pre_hook(lambda *a: calls.append("before"))
        pair.optimizer.register_step_post_hook(lambda *a: calls.append("after"))
        pair.step()
        pair.step()
        assert calls == ["before", "after"] * 2
        pair.check()


class TestTheOptimizer:
    def test_scheduler_and_groups(self, on):
        def optimizer(parameters):
            every = list(parameters)
            groups = [
                {"params": every[::2], "weight_decay": 0.1},
                {"params": every[1::2], "lr": 0.1},
            ]
            return torch.optim.AdamW(groups, lr=0.01)

        pair = Pair(on, optimizer=optimizer)
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for _, o in pair.sides]
        for seed in range(5):
            pair.step(seed=seed)
            for scheduler in schedulers:
                scheduler.step()
        pair.check()
        assert pair.optimizer.param_groups[0]["lr"] == 0.01 / 4

    def test_state_dict(self, on):
        pair = Pair(on)
        pair.step()
        for model, optimizer in pair.sides:
            model.load_state_dict(copy.deepcopy(model.state_dict()))
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        pair.step(seed=1)
        pair.step(seed=2)
        pair.check()

    def test_zero_grad_is_harmless(self, on):
        pair = Pair(on)
        for _ in range(2):
            pair.backward()
            pair.optimizer.zero_grad(set_to_none=False)
            pair.apply()
        pair.check()

    def test_each_pass_is_a_step(self, on):
        pair = Pair(on)
        for seed in range(3):
            pair.backward(seed=seed)
            pair.other.step()
            pair.other.zero_grad()
        pair.check()


def in_place(optimizer):
    optimizer.param_groups[0]["lr"].fill_(0.5)


def replace(optimizer):
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = torch.tensor(0.5)
    optimizer.load_state_dict(state)


class TestRefusals:
    def test_options_that_change_behind_the_pass(self, on):
        pair = Pair(on)
        pair.step()
        pair.backward()
        pair.optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(RuntimeError, match=r"'lr' of a group changed .* from 0\.01 to 0\.5"):
            pair.optimizer.step()
        pair.optimizer.param_groups[0]["lr"] = 0.01
        pair.apply()
        for change in (in_place, replace):
            pair = Pair(on, optimizer=lambda p: make(p, lr=torch.tensor(0.01), foreach=False))
            pair.step()
            pair.optimizer.param_groups[0]["betas"] = [0.9, 0.999]  # no change
            pair.step()
            pair.backward()
            change(pair.optimizer)
            with pytest.raises(
                RuntimeError, match=r"'lr' of a group changed .* from tensor\(0\.01"
            ):
                pair.optimizer.step()
        pair = Pair(on)
        for seed, rate in enumerate([0.5, 0.1]):  # before the pass
            for _, optimizer in pair.sides:
                optimizer.param_groups[0]["lr"] = rate
            pair.step(seed=seed)
        pair.check()

    @pytest.mark.parametrize(
        ("wanted", "kind", "error", "text"),
        [
            (1, "AdamW", TypeError, "step_in_backward must be True or False, got 1"),
            (True, None, ValueError, "needs an optimizer="),
            (True, "LBFGS", ValueError, "got LBFGS"),
            (True, "Muon", ValueError, "got Muon"),
        ],
    )
    def test_arguments(self, on, wanted, kind, error, text):
        model = layers(2, on=on)
        make_it = getattr(torch.optim, kind) if kind else lambda _: None
        optimizer = make_it([p for p in model.parameters() if p.dim() == 2])
        before = [p.data_ptr() for p in model.parameters()]
        with pytest.raises(error, match=text):
            mt.offload(model, DEVICE, budget=LAYER, optimizer=optimizer, step_in_backward=wanted)
        assert [p.data_ptr() for p in model.parameters()] == before
        assert hooks_of(model) == 0

    @pytest.mark.parametrize("how", ["subclass", "step", "differentiable"])
    def test_optimizers_that_step_as_a_whole(self, on, how):
        model = layers(2, on=on)
        kind = type("Mine", (torch.optim.Adam,), {}) if how == "subclass" else torch.optim.Adam
        optimizer = kind(model.parameters(), differentiable=how == "differentiable")
        if how == "step":
            optimizer.step = lambda: None
        with pytest.raises(ValueError, match="updates each parameter by itself"):
            mt.offload(model, DEVICE, budget=LAYER, optimizer=optimizer, step_in_backward=True)

    def test_a_gradient_from_before(self, on):
        pair = Pair(on)
        pair.step()
        before = copy.deepcopy(pair.model.state_dict())
        for i in (0, -2):  # the first and the last gradient of a pass
            weight = pair.model[i].weight
            weight.grad = torch.zeros_like(weight)
            with pytest.raises(RuntimeError, match="has a gradient from before this backward pass"):
                pair.backward()
            assert all(same(v, before[k]) for k, v in pair.model.state_dict().items())
            for _, optimizer in pair.sides:
                optimizer.zero_grad()
        pair.step()
        pair.check()

    def test_gradients_without_a_pass_are_allowed(self, on):
        pair = Pair(on)
        loss = pair.model(torch.rand(4, WIDTH, device=pair.handle.device)).sum()
        weight = pair.model[0].weight
        weight.grad = torch.zeros_like(weight)
        found = torch.autograd.grad(loss, list(pair.model.parameters()), create_graph=True)
        assert all(grad is not None for grad in found)
        assert pair.counts() == (0, 0)

    def test_create_graph(self, on):
        pair = Pair(on)
        loss = pair.model(torch.rand(4, WIDTH, device=pair.handle.device)).sum()
        with pytest.raises(RuntimeError, match="create_graph=True makes a graph that needs"):
            loss.backward(create_graph=True)
        pair.optimizer.zero_grad()  # the gradient has the graph
        drop_pass()
        assert pair.counts() == (0, 0)

    def test_a_second_pass_over_one_graph(self, on):
        pair = Pair(on)
        loss = pair.model(torch.rand(4, WIDTH, device=pair.handle.device)).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_closures(self, on):
        pair = Pair(on)
        for given, named in (([lambda: 0], {}), ([], {"closure": lambda: 0})):
            with pytest.raises(ValueError, match="takes no closure"):
                pair.optimizer.step(*given, **named)

    @pytest.mark.parametrize("fused", [False, True])
    def test_grad_scaler(self, on, fused):
        pair = Pair(on, optimizer=lambda p: make(p, fused=fused))
        scaler = torch.amp.GradScaler(pair.handle.device.type)
        given = torch.rand(4, WIDTH, device=pair.handle.device)
        scaler.scale(pair.model(given).sum()).backward()
        with pytest.raises((RuntimeError, AssertionError)) as caught:
            scaler.step(pair.optimizer)
        text = "GradScaler looks at all gradients" if fused else "No inf checks were recorded"
        assert text in str(caught.value)

    def test_a_checkpoint_that_brings_a_gradient_in_pieces(self, on):
        def function(model, given):
            given.requires_grad_()
            for _ in range(2):
                given = checkpoint(model, given, use_reentrant=True)
            return given

        pair = Pair(on)
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            pair.backward(function)
        drop_pass()

    def test_distributed_data_parallel(self, on):
        dist = pytest.importorskip("torch.distributed")
        if not (dist.is_available() and dist.is_gloo_available()):
            pytest.skip("needs a torch with gloo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            pair = Pair(on)
            wrapped = nn.parallel.DistributedDataParallel(pair.model)
            with pytest.raises(RuntimeError, match="DistributedDataParallel reduces gradients"):
                wrapped(torch.rand(4, WIDTH, device=pair.handle.device))
        finally:
            dist.destroy_process_group()


class Late(Ring):
    """A ring whose copies home are as late as those of a stream that nothing waits for."""

    def __init__(self, *given):
        super().__init__(*given)
        self.late = []

    def arrive(self, regions=()):
        late, self.late = self.late, []
        for region, copy_home in late:
            if region in regions:
                self.late.append((region, copy_home))
            else:
                with torch.no_grad():
                    copy_home(region.scratch)

    def empty(self, region, copy_home):
        self.late.append((region, copy_home))
        region.is_over = True

    def fill(self, nbytes, copy_inward):
        def behind(scratch):
            self.arrive(self.regions)
            copy_inward(scratch)

        return super().fill(nbytes, behind)

    def follow_home(self):
        self.arrive()
        super().follow_home()

    def followed(self):
        self.arrive()
        super().followed()


def test_copies_in_wait_for_the_copies_home(monkeypatch):
    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            waits.append((self.name, other.name))

    waits = []
    ring = Ring(Pair("cpu").handle._lanes[0].target, 64)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("current"))
    ring.inward, ring.outward = Stream("inward"), Stream("outward")
    ring.follow_home()
    assert waits == [("current", "outward"), ("inward", "current")]


class Twice(nn.Module):
    """The gradient of the second parameter comes after that of the first one, in some passes."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.first, self.second = (nn.Parameter(torch.randn(width, width) / 8) for _ in range(2))

    def forward(self, given, both):
        given, rest = given[:, : self.width], given[:, self.width :]
        given = given @ self.second if both else given
        return torch.cat([(given @ self.first).relu() + given, rest], 1)


class Rounds(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.blocks = nn.ModuleList(Twice(16 if i < 3 else WIDTH) for i in range(count))
        self.both = True

    def forward(self, given):
        for block in self.blocks:
            given = block(given, self.both)
        return given


@pytest.mark.emulator_only("its copies stand for those of streams, which the CPU does not have")
def test_a_part_that_steps_again_follows_its_copies_home(monkeypatch):
    """Parameters without gradients for a while come back: their parts step twice in that pass."""
    monkeypatch.setattr("managedmem.torch._offload_optimizer.Ring", Late)
    torch.manual_seed(0)
    count = 30
    blocks = [f"blocks.{i}" for i in range(count)]
    pair = Pair("cpu", Rounds(count), 880_000, lambda p: make(p, "Adam"), blocks=blocks)
    steps = 0
    for seed, (both, expected) in enumerate(
        [(1, 1), (1, 1), (0, 0), (0, 1), (1, 2), (1, 1), (0, 0), (1, 2)]
    ):
        pair.model.both = pair.twin.both = bool(both)
        pair.step(seed=seed)
        pair.check()
        steps += expected * count
        assert pair.handle.stats()["steps_in_backward"] == steps


@pytest.mark.skipif(not IN_GRAPHS, reason="needs torch 2.13 or later")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_in_one_graph_of_compiled_code(on):
    torch._dynamo.reset()
    pair = Pair(on)
    compiled = torch.compile(pair.model, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        pair.step(lambda model, x: (compiled if model is pair.model else model)(x), seed=seed)
    pair.check()
    assert pair.counts() == (3 * COUNT, 0)
    pair.handle.remove()
    torch._dynamo.reset()


class TestTheEnd:
    def test_explain_and_hooks(self, on):
        model = layers(COUNT, on=on)
        before = hooks_of(model)
        pair = Pair(on, model)
        assert all("steps in the backward pass" in place.reason for place in pair.handle.explain())
        pair.step()
        pair.handle.remove()
        assert hooks_of(model) == before
        assert not any(p._backward_hooks for p in model.parameters())
        assert pair.counts() == (COUNT, 0)
        if not str(pair.handle.device).startswith(on):
            return  # the model is elsewhere now
        pair.backward()
        assert len(gradients(model)) == 2 * COUNT
        for _, optimizer in pair.sides:
            optimizer.step()
        pair.check()

    @pytest.mark.parametrize("budget", [STREAMED, RESIDENT])
    def test_removed_in_the_middle_of_a_pass(self, on, budget):
        pair = Pair(on, budget=budget)
        pair.step()

        def function(model, given):
            given = model[:6](given)
            if model is pair.model:
                given.register_hook(lambda _: pair.handle.remove())
            return model[6:](given)

        if str(pair.handle.device).startswith(on):  # or else the rest of the pass is elsewhere
            pair.step(function, seed=1)
            pair.step(seed=2)
            pair.check()

    def test_an_exception_between_slices(self, on, monkeypatch):
        """No element is stepped twice."""
        pair = sliced_pair(on, monkeypatch)
        pair.steps(2)
        run, cuts = PartialStep.run, []

        def fail(self, chosen, staged=None):
            cut = None if staged is None else staged.cut
            cuts.extend([] if cut is None else [cut])
            if len(cuts) == 3:
                raise ZeroDivisionError
            return run(self, chosen, staged)

        monkeypatch.setattr(PartialStep, "run", fail)
        given = torch.rand(4, WIDTH, device=pair.handle.device)
        with pytest.raises(ZeroDivisionError):
            pair.model(given).square().mean().backward()
        monkeypatch.setattr(PartialStep, "run", run)
        sliced = pair.model[-1].weight  # the gradient of the last layer comes first
        assert sliced.grad is None
        before = sliced.detach().clone()
        pair.optimizer.step()
        assert same(sliced, before)
        pair.step(seed=2)  # until the next pass torch keeps the graph of one that failed
        assert not same(sliced, before)

    def test_memory_is_free_without_a_collection(self, on):
        pair = Pair(on)
        pair.step()
        found = weakref.ref(pair.handle._step), weakref.ref(pair.handle._step.visits)
        gc.disable()
        try:
            pair.handle.remove()
            del pair.handle
            assert [each() for each in found] == [None, None]
        finally:
            gc.enable()

    @pytest.mark.parametrize("budget", [STREAMED, RESIDENT])
    def test_an_exception_in_a_pass(self, on, budget):
        """What was stepped stays stepped, and the rest trains on."""
        pair = Pair(on, budget=budget)
        pair.step()
        given = torch.rand(4, WIDTH, device=pair.handle.device)
        middle = pair.model[:6](given)
        middle.register_hook(lambda _: 1 / 0)
        before = copy.deepcopy(pair.model.state_dict())
        with pytest.raises(ZeroDivisionError):
            pair.model[6:](middle).sum().backward()
        changed = {k for k, v in pair.model.state_dict().items() if not same(v, before[k])}
        assert changed == {f"{i}.{name}" for i in (6, 8, 10) for name in ("weight", "bias")}
        pair.twin.load_state_dict(pair.model.state_dict())
        pair.other.load_state_dict(copy.deepcopy(pair.optimizer.state_dict()))
        for _, optimizer in pair.sides:
            optimizer.zero_grad()
        pair.step()
        pair.step()
        pair.check()
        assert pair.handle.stats()["failures"] == 0

    def test_a_copy_is_plain(self, on):
        pair = Pair(on)
        pair.step()
        made = copy.deepcopy(pair.model)
        made(torch.rand(4, WIDTH, device=pair.handle.device)).sum().backward()
        assert len(gradients(made)) == 2 * COUNT
