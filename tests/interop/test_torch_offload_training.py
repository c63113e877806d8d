"""offload() in training: gradients and optimizer state at home, steps in parts, equal numbers."""

import collections
import copy
import gc
import pickle

import pytest

import managedmem
from constants import PAGE
from managedmem import CUDAError, emulator
from offloaded import LAYER, batch, hooks_of, layers, managed_tensors, nn, same
from tensors import mt, torch
from twins import DEVICE, Twins

WEIGHT = 64 * 65 * 4  # the bytes of one layer's parameters, without the rest of their pages
COUNT = 4
# Of 4 layers: what is streamed and what stays, from nothing to everything.
BUDGETS = {
    "streamed": 2 * LAYER,
    "parameters": COUNT * LAYER,
    "parameters and gradients": COUNT * (LAYER + WEIGHT),
    "some state": COUNT * (LAYER + 2 * WEIGHT) + LAYER,
    "everything": COUNT * (LAYER + 4 * WEIGHT),
}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.01, max_iter=2),
}


def _is_tested(name, budget):
    """Every optimizer where most moves, and each budget with a few."""
    return name in ("momentum", "Adam", "LBFGS") or budget in ("streamed", "some state")


class Pair(Twins):
    def __init__(self, on, make=OPTIMIZERS["Adam"], model=None):
        super().__init__(layers(COUNT, on=on) if model is None else model, make)

    def step(self, rows=4):
        def run(model, optimizer):
            inputs = torch.rand(rows, 64, generator=torch.Generator().manual_seed(rows))
            inputs = inputs.to(next(model.parameters()).device)

            def closure():
                optimizer.zero_grad()
                loss = model(inputs).square().mean()
                loss.backward()
                return loss.detach()

            return optimizer.step(closure)

        self.each(run)


def hosted_state(optimizer):
    """How many tensors of an optimizer's state the host and devices reach, and how many not."""
    tensors = [
        t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)
    ]
    large = [t for t in tensors if t.dim() > 0]
    places = [managedmem.ManagedBuffer.from_handle(t.data_ptr(), t.nbytes) for t in large]
    there = sum(p.is_host_accessible and p.is_device_accessible for p in places)
    return there, len(large) - there


def hosted_gradients(model):
    """The gradients that the host and devices reach."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    places = [(g, managedmem.ManagedBuffer.from_handle(g.data_ptr(), g.nbytes)) for g in grads]
    return [g for g, p in places if p.is_host_accessible and p.is_device_accessible]


def lists_of(optimizer):
    """The tensors in lists of an optimizer's state, as LBFGS has them."""
    values = [v for state in optimizer.state.values() for v in state.values()]
    return [t for v in values if isinstance(v, list) for t in v if t is not None]


class TestSteps:
    @pytest.mark.parametrize(
        ("name", "budget"),
        [(name, budget) for name in OPTIMIZERS for budget in BUDGETS if _is_tested(name, budget)],
    )
    def test_numbers_of_plain_training(self, on, name, budget):
        pair = Pair(on, OPTIMIZERS[name])
        before = hooks_of(pair.model)
        with pair.offload(BUDGETS[budget]) as handle:
            for rows in (2, 3, 4):
                pair.step(rows)
                assert handle.stats()["held"] <= BUDGETS[budget]
            pair.check()
        pair.check()
        assert hooks_of(pair.model) == before
        assert "step" not in vars(pair.optimizer)
        assert managed_tensors(pair.model) == []
        assert hosted_state(pair.optimizer)[0] == 0
        assert {p.device.type for p in pair.model.parameters()} == {torch.device(on).type}

    def test_places_by_budget(self, on):
        found = {}
        for name, budget in BUDGETS.items():
            pair = Pair(on)
            with pair.offload(budget) as handle:
                pair.step()
                grads = len(hosted_gradients(pair.model))
                found[name] = (handle.stats()["groups"], grads, hosted_state(pair.optimizer))
        assert found == {
            "streamed": (4, 8, (16, 0)),
            "parameters": (0, 8, (16, 0)),
            "parameters and gradients": (0, 0, (16, 0)),
            "some state": (0, 0, (16, 0)),
            "everything": (0, 0, (0, 16)),
        }

    def test_bytes_on_the_host_by_budget(self, on):
        found = {}
        for name, budget in BUDGETS.items():
            pair = Pair(on)
            with pair.offload(budget) as handle:
                pair.step()
                stats = handle.stats()
                size = sum(p.nbytes for p in pair.model.parameters())
                found[name] = (stats["gradients_on_host"] / size, stats["state_on_host"] / size)
            assert handle.stats()["state_on_host"] == 0
        assert found == {
            "streamed": (1, 2),
            "parameters": (1, 2),
            "parameters and gradients": (0, 2),
            "some state": (0, 2),
            "everything": (0, 0),
        }

    def test_offloaded_between_two_steps(self, on):
        """State and gradients that are there go home, and come back."""
        pair = Pair(on)
        for budget in BUDGETS.values():
            with pair.offload(budget):
                pair.steps(2)
            pair.check()
            assert managed_tensors(pair.model) == []

    def test_state_visits_the_device_when_there_is_room(self, on):
        pair = Pair(on)
        with pair.offload(BUDGETS["some state"]):
            pair.step()
            homes = [s["exp_avg"].data_ptr() for s in pair.optimizer.state.values()]
            seen = []
            original = torch.optim.Adam._init_group

            def look(optimizer, group, *rest):
                seen.extend(
                    optimizer.state[p]["exp_avg"].data_ptr() in homes for p in group["params"]
                )
                return original(optimizer, group, *rest)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.optim.Adam, "_init_group", look)
                pair.step()
            assert len(seen) == 2 * 2 * COUNT
            assert not any(seen[: 2 * COUNT])  # in a scratch, not at home
            assert homes == [s["exp_avg"].data_ptr() for s in pair.optimizer.state.values()]
            pair.check()

    def test_state_and_gradients_without_page_locked_memory(self, on, monkeypatch):
        """They stay on the device, and are counted."""

        def refuse(*given):
            raise MemoryError

        for budget in ("streamed", "some state"):
            pair = Pair(on)
            with pair.offload(BUDGETS[budget]) as handle, monkeypatch.context() as patch:
                for module in ("optimizer", "places"):
                    patch.setattr(f"managedmem.torch._offload_{module}._Slab", refuse)
                pair.steps(2)
                assert hosted_state(pair.optimizer) == (0, 16)
                assert hosted_gradients(pair.model) == []
                assert handle.stats()["failures"] > 0
                pair.check()
            pair.check()

    @pytest.mark.emulator_only  # copies of CPU tensors are seen one by one
    def test_bytes_that_a_step_copies(self, monkeypatch):
        """Gradients and state go home once and come once; a bias of state takes 512 bytes."""
        pair = Pair("cpu", model=layers(12, on="cpu"))
        size = sum(p.nbytes for p in pair.model.parameters())
        original, counts = torch.Tensor.copy_, {"home": 0, "device": 0}
        with pair.offload(size + 8 * LAYER) as handle:
            pair.steps(2)
            homes = [home.host for home in handle._gradients]
            homes += [part.home.host for part in handle._step.parts]
            starts = {home.data_ptr() for home in homes}

            def counted(to, source, *options, **named):
                counts["home"] += to.nbytes * (to.data_ptr() in starts)
                counts["device"] += to.nbytes * (source.data_ptr() in starts)
                return original(to, source, *options, **named)

            monkeypatch.setattr(torch.Tensor, "copy_", counted)
            pair.step()
            monkeypatch.undo()
            (ring,) = handle._step.rings.values()
            assert ring.filled == 3 * 12
            assert handle.stats()["failures"] == 0
            pair.check()
        assert counts["home"] == counts["device"] == 3 * size + 12 * 2 * 256

    def test_state_is_beside_the_limit_of_results(self, on):
        """And what is too much for it is freed with the handle."""
        cache = managedmem.result_cache
        cache.clear()
        limit = cache.max_nbytes
        pair = Pair(on)
        handle = pair.offload(BUDGETS["streamed"])
        pair.step()
        assert cache.nbytes == 0
        cache.max_nbytes = 0
        try:
            handle.remove()
            assert cache.nbytes == 0
        finally:
            cache.max_nbytes = limit
        pair.check()

    def test_earlier_homes_of_state_are_freed(self, on):
        """LBFGS makes new tensors in each step, and so does load_state_dict()."""
        cache = managedmem.result_cache
        cache.clear()
        pair = Pair(on, OPTIMIZERS["LBFGS"])
        with pair.offload(BUDGETS["streamed"]):
            for rows in range(2, 12):
                pair.step(rows)
                state = 3 * COUNT * WEIGHT + sum(t.nbytes for t in lists_of(pair.optimizer))
                assert cache.nbytes <= 2 * state
        assert cache.nbytes == 0
        pair = Pair(on)
        with pair.offload(BUDGETS["streamed"]):
            for _ in range(4):
                pair.step()
                pair.optimizer.load_state_dict(copy.deepcopy(pair.optimizer.state_dict()))
                assert cache.nbytes <= COUNT * 2 * LAYER
            pair.check()

    def test_lists_of_state_come_back(self, on):
        pair = Pair(on, OPTIMIZERS["LBFGS"])
        handle = pair.offload(BUDGETS["streamed"])
        for rows in (2, 3, 4):
            pair.step(rows)
        handle.remove()
        mine, others = (lists_of(optimizer) for _, optimizer in pair.sides)
        assert mine and all(map(same, mine, others))
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in mine)
        if on == handle.device.type:  # else the processor's sums differ from the GPU's
            pair.step()
        pair.check()

    def test_a_pickle_of_the_state_has_each_byte_once(self, on):
        pair = Pair(on)
        with pair.offload(BUDGETS["streamed"]):
            pair.step()
            mine, others = (pickle.dumps(optimizer.state_dict()) for _, optimizer in pair.sides)
            assert len(mine) < 1.1 * len(others)
            saved = pickle.loads(mine)["state"]
            known = pair.other.state_dict()["state"]
            assert all(same(saved[i]["exp_avg"], known[i]["exp_avg"]) for i in known)

    def test_empty_state_makes_no_new_home(self, on):
        pair = Pair(on)
        with pair.offload(BUDGETS["streamed"]):
            pair.step()
            for state in pair.optimizer.state.values():
                state["unused"] = torch.zeros(0, device=state["exp_avg"].device)
            homes = [s["exp_avg"].data_ptr() for s in pair.optimizer.state.values()]
            pair.step()
            assert homes == [s["exp_avg"].data_ptr() for s in pair.optimizer.state.values()]

    @pytest.mark.parametrize("budget", BUDGETS)
    def test_a_parameter_without_elements(self, on, budget):
        class WithNothing(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = layers(COUNT, on=on)
                self.nothing = nn.Parameter(torch.empty(0, device=on))

            def forward(self, inputs):
                return self.inner(inputs) + self.nothing.sum()

        pair = Pair(on, model=WithNothing())
        before = pair.model.nothing.device
        with pair.offload(BUDGETS[budget]) as handle:
            assert pair.model.nothing.device == handle.device
            pair.steps(3)
            pair.check()
            pair.check_state()
            assert handle.stats()["failures"] == 0
        assert pair.model.nothing.device == before
        pair.check()

    @pytest.mark.parametrize("budget", ["streamed", "parameters"])
    def test_a_closure_may_remove_the_handle(self, on, budget):
        pair = Pair(on, OPTIMIZERS["momentum"])
        handle = pair.offload(BUDGETS[budget])
        pair.step()

        def run(model, optimizer):
            def closure():
                optimizer.zero_grad()
                inputs = torch.ones(2, 64, device=next(model.parameters()).device)
                loss = model(inputs).square().mean()
                loss.backward()
                if model is pair.model:
                    handle.remove()
                return loss.detach()

            return optimizer.step(closure)

        if not emulator.is_active():
            pair.model.to(DEVICE)  # where remove() leaves the parameters, beside the loss
        pair.each(run)
        pair.check()

    @pytest.mark.emulator_only
    def test_a_query_of_state_that_fails_ends_no_step(self, on):
        pair = Pair(on)
        with pair.offload(BUDGETS["streamed"]) as handle:
            pair.step()
            emulator.fail("cuPointerGetAttributes", nth=1, lasting=True)
            try:
                pair.optimizer.step()
            finally:
                emulator.clear_failures()
            pair.other.step()
            pair.check()
            assert handle.stats()["failures"] == 0  # it asks about no scalar

    def test_operations_on_page_locked_state(self, on):
        pair = Pair(on)
        with pair.offload(BUDGETS["streamed"]):
            pair.step()
            for operation in (
                lambda: mt.prefetch(pair.optimizer, managedmem.Device(DEVICE)),
                lambda: mt.advise(pair.optimizer, "set_read_mostly"),
            ):
                with pytest.raises(mt.NotManagedError, match="page-locked memory, which does not"):
                    operation()

    @pytest.mark.parametrize("name", ["SGD", "Adam", "LBFGS"])
    def test_a_step_moves_each_layer_home_once(self, on, name):
        """After the optimizer has written it; not after the passes, which only read it."""
        count, steps = 12, 6
        pair = Pair(on, OPTIMIZERS[name], layers(count, on=on))
        home = []
        with pair.offload(4 * LAYER) as handle:
            streamed = handle.stats()["streamed"]
            assert streamed >= (count - 4) * LAYER
            for _ in range(steps + 2):
                home.append(handle.stats()["bytes_home"])
                pair.step()
            pair.check()
        moved = handle.stats()["bytes_home"] - home[2]  # two steps teach the order
        if name == "LBFGS":  # which writes them at home, without a use
            assert moved == 0
        else:  # a part has no padding at its end
            assert 0.98 * (steps - 1) * streamed <= moved <= (steps + 1) * streamed
        pair.check()

    def test_a_forward_call_that_writes_its_parameters(self, on):
        """Which offload() does not expect: the values are right all the same."""

        class Clamped(nn.Linear):
            def forward(self, inputs):
                with torch.no_grad():
                    self.weight.clamp_(-0.05, 0.05)
                return super().forward(inputs)

        torch.manual_seed(0)
        model = nn.Sequential(*(Clamped(64, 64) for _ in range(8))).to(on)
        pair = Pair(on, model=model)
        with pair.offload(3 * LAYER) as handle:
            for _ in range(4):
                pair.step()
                assert handle.stats()["held"] <= 3 * LAYER
            pair.check()
        pair.check()

    def test_large_buffers_of_a_trained_module(self, on):
        """Forward calls write them."""

        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("sums", torch.zeros(64, 64))
                self.inner = nn.Linear(64, 64)

            def forward(self, inputs):
                self.sums += 1
                return self.inner(inputs) + self.sums.mean()

        torch.manual_seed(0)
        pair = Pair(on, model=nn.Sequential(*(Counting() for _ in range(6))).to(on))
        with pair.offload(6 * LAYER):
            pair.steps(3)
            pair.check()
        pair.check()

    def test_an_exception_in_a_step(self, on):
        """What the plain optimizer has done by then is done, and the next step works."""
        pair = Pair(on)

        def failing_step(model, optimizer):
            last = list(model.parameters())[-1]
            state = optimizer.state.pop(last)
            optimizer.state[last] = {"step": state["step"]}
            with pytest.raises(KeyError):
                optimizer.step()
            optimizer.state[last] = state

        with pair.offload(BUDGETS["some state"]) as handle:
            pair.step()
            failing_step(pair.model, pair.optimizer)
            groups = pair.optimizer.param_groups
            assert [len(group["params"]) for group in groups] == [2 * COUNT]
            assert hosted_state(pair.optimizer) == (16, 0)
            pair.model(batch(handle)).sum().backward()
            pair.optimizer.step()


class TestGradients:
    def test_accumulation(self, on):
        pair = Pair(on)
        with pair.offload(BUDGETS["streamed"]) as handle:
            for rows in (2, 3):

                def backward(model, optimizer, rows=rows):
                    model(batch(handle, rows)).sum().backward()

                pair.each(backward)
            pair.check()
            assert len(hosted_gradients(pair.model)) == 2 * COUNT
            pair.each(lambda model, optimizer: optimizer.step())
            pair.each(lambda model, optimizer: optimizer.zero_grad(set_to_none=False))
            pair.step()
            pair.check()

    def test_memory_is_used_again_unless_somebody_has_it(self, on):
        pair = Pair(on)
        weight = pair.model[0].weight
        with pair.offload(BUDGETS["streamed"]):
            pair.step()
            first = weight.grad.data_ptr()
            pair.step()
            assert weight.grad.data_ptr() == first
            kept, value = weight.grad, weight.grad.clone()
            pair.step(rows=7)
            assert weight.grad.data_ptr() != first
            assert same(kept, value)
            view = weight.grad[1:3]
            value = view.clone()
            pair.step(rows=9)
            assert same(view, value)

    def test_clipping_and_norms(self, on):
        pair = Pair(on)
        with pair.offload(BUDGETS["streamed"]) as handle:

            def step(model, optimizer):
                model(batch(handle)).sum().backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                return norm

            pair.each(step)
            pair.check()

    def test_of_gradients(self, on):
        """Gradients that are part of a graph stay where they are."""
        pair = Pair(on)
        with pair.offload(BUDGETS["streamed"]) as handle:

            def twice(model, optimizer):
                inputs = batch(handle).requires_grad_()
                (first,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
                first.square().sum().backward()
                return inputs.grad

            pair.each(twice)
            pair.check()

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpoints(self, on, reentrant):
        from torch.utils.checkpoint import checkpoint

        pair = Pair(on)
        with pair.offload(BUDGETS["streamed"]) as handle:

            def step(model, optimizer):
                inputs = batch(handle).requires_grad_()
                middle = checkpoint(model[:4], inputs, use_reentrant=reentrant)
                loss = checkpoint(model[4:], middle, use_reentrant=reentrant).sum()
                loss.backward()
                optimizer.step()
                return loss.detach()

            for _ in range(3):
                pair.each(step)
            pair.check()
            assert handle.stats()["mapped"] <= handle.stats()["acquired"] // 2


class TestModels:
    def test_frozen_parameters_are_only_read(self, on):
        """As with adapters: the optimizer has the small part."""

        class Adapted(nn.Module):
            def __init__(self):
                super().__init__()
                self.frozen = nn.Linear(64, 64).requires_grad_(False)
                self.down, self.up = nn.Linear(64, 2), nn.Linear(2, 64)

            def forward(self, inputs):
                return self.frozen(inputs) + self.up(self.down(inputs))

        torch.manual_seed(0)
        model = nn.Sequential(*(Adapted() for _ in range(6))).to(on)

        def make(parameters):
            return torch.optim.Adam([p for p in parameters if p.requires_grad], lr=0.01)

        pair = Pair(on, make, model)
        with pair.offload(4 * (LAYER + 4 * PAGE), blocks=model):
            pair.steps(3)
            assert model[0].frozen.weight.grad is None
            pair.check()
        pair.check()

    def test_tied_and_repeated_modules(self, on):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(64, 64)
                self.middle = layers(3)
                self.head = nn.Linear(64, 64, bias=False)
                self.head.weight = self.table.weight

            def forward(self, inputs):
                tokens = (inputs * 63).long()[:, 0]
                return self.head(self.middle(self.middle(self.table(tokens))))

        pair = Pair(on, model=Tied().to(on))
        with pair.offload(4 * LAYER):
            pair.steps(3)
            pair.check()

    def test_attention(self, on):
        """Which uses the parameters of a submodule that it does not call."""
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        model = nn.Sequential(*(copy.deepcopy(layer) for _ in range(3))).to(on)
        pair = Pair(on, model=model)
        with pair.offload(40 * PAGE) as handle:
            pair.steps(3)
            pair.check()
            assert handle.stats()["groups"] > 3

    def test_autocast(self, on):
        pair = Pair(on)
        with pair.offload(BUDGETS["streamed"]) as handle:

            def step(model, optimizer):
                with torch.autocast(handle.device.type, dtype=torch.bfloat16):
                    loss = model(batch(handle)).float().square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            for _ in range(2):
                pair.each(step)
            pair.check()

    @pytest.mark.filterwarnings("ignore:.* was given no optimizer")
    def test_without_the_optimizer_it_is_right_too(self, on):
        """The parameters are then written although they were said to be read."""
        pair = Pair(on)
        with mt.offload(pair.model, DEVICE, budget=2 * LAYER):
            pair.steps(3)
            pair.check()
        pair.check()

    def test_a_second_optimizer_is_right_too(self, on):
        """The parameters of that one are written although they were said to be read."""
        pair = Pair(on, lambda parameters: torch.optim.Adam(list(parameters)[:4], lr=0.01))
        others = {m: torch.optim.Adam(list(m.parameters())[4:], lr=0.01) for m, _ in pair.sides}

        def step_second(model, _):
            others[model].step()
            others[model].zero_grad()

        before = [p.detach().clone() for p in pair.model.parameters()]
        with pair.offload(BUDGETS["streamed"]):
            for _ in range(3):
                pair.step()
                pair.each(step_second)
            pair.check()
        pair.check()
        assert not any(map(same, before, pair.model.parameters()))


class TestOptimizers:
    def test_schedulers_from_before_and_after(self, on):
        for early in (True, False):
            pair = Pair(on)
            schedulers = []

            def schedule(model, optimizer, schedulers=schedulers):
                schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))

            if early:
                pair.each(schedule)
            handle = pair.offload(BUDGETS["streamed"])
            if not early:
                pair.each(schedule)
            for _ in range(3):
                pair.step()
                for scheduler in schedulers:
                    scheduler.step()
            assert pair.optimizer.param_groups[0]["lr"] == 0.01 / 8
            pair.check()
            handle.remove()
            pair.check()
            if on == handle.device.type:
                pair.step()
                pair.check()

    def test_hooks_of_the_caller_see_one_step(self, on):
        pair = Pair(on)
        seen = []
        pair.optimizer.register_step_pre_hook(
            lambda optimizer, *_: seen.append(len(optimizer.param_groups[0]["params"]))
        )
        with pair.offload(BUDGETS["streamed"]):
            pair.steps(2)
            assert seen == [2 * COUNT] * 2
            assert hosted_state(pair.optimizer) == (16, 0)
            pair.check()

    def test_groups_with_options_of_their_own(self, on):
        def make(parameters):
            parameters = list(parameters)
            return torch.optim.SGD(
                [
                    {"params": parameters[::2], "lr": 0.1},
                    {"params": parameters[1::2], "lr": 0.2, "momentum": 0.5},
                ],
                lr=1.0,
            )

        pair = Pair(on, make)
        with pair.offload(BUDGETS["streamed"]):
            pair.steps(3)
            pair.check()

    def test_parameters_that_the_model_does_not_have(self, on):
        extra = {}

        def make(parameters):
            own = torch.ones(3, requires_grad=True)
            optimizer = torch.optim.Adam([*parameters, own], lr=0.1)
            extra[id(optimizer)] = own
            return optimizer

        pair = Pair(on, make)
        with pair.offload(BUDGETS["streamed"]):
            for own in extra.values():
                own.grad = torch.ones(3)

            def step(model, optimizer):
                optimizer.step()
                return extra[id(optimizer)].detach()

            pair.each(step)

    def test_state_dicts(self, on):
        pair = Pair(on)
        with pair.offload(BUDGETS["streamed"]):
            pair.step()
            saved = [copy.deepcopy(o.state_dict()) for _, o in pair.sides]
            pair.step()
            for (_, optimizer), state in zip(pair.sides, saved, strict=True):
                optimizer.load_state_dict(state)
            pair.step()
            pair.check()
            assert hosted_state(pair.optimizer) == (16, 0)

    def test_removed_in_the_middle_of_an_iteration(self, on):
        for moment in range(3):
            pair = Pair(on)
            handle = pair.offload(BUDGETS["streamed"])
            if on != handle.device.type:
                pytest.skip("the reference is on the other device")
            pair.step()

            def step(model, optimizer, pair=pair, handle=handle, moment=moment):
                removal = moment if model is pair.model else None
                optimizer.zero_grad()
                loss = model(batch(handle)).sum()
                if removal == 0:
                    handle.remove()
                loss.backward()
                if removal == 1:
                    handle.remove()
                optimizer.step()
                if removal == 2:
                    handle.remove()
                return loss.detach()

            pair.each(step)
            pair.check()
            pair.step()
            pair.check()
            assert hosted_state(pair.optimizer)[0] == 0

    @pytest.mark.emulator_only
    def test_every_driver_call_in_turn(self):
        """Faults leave offload() undone, or training right; remove() can be called again."""
        with emulator.recording() as calls:
            pair = Pair("cpu")
            handle = pair.offload(BUDGETS["streamed"])
            pair.step()
            handle.remove()
            del pair, handle
            gc.collect()
        counts = collections.Counter(call.name for call in calls)
        del counts["cuMemFree"], counts["cuMemHostUnregister"]  # what cannot be freed stays
        lost = 0
        places = [(name, nth) for name, n in counts.items() for nth in {1, n // 2 + 1}]
        for name, nth in places:
            pair = Pair("cpu")
            emulator.clear_failures()
            emulator.fail(name, nth=nth)
            try:
                handle = pair.offload(BUDGETS["streamed"])
            except CUDAError:
                pair.check()
                continue
            pair.steps(2)
            pair.check()
            try:
                handle.remove()
            except CUDAError:
                handle.remove()
            emulator.clear_failures()
            lost += handle.stats()["failures"]
            pair.check()
            assert managed_tensors(pair.model) == []
            assert hooks_of(pair.model) == 0, (name, nth)
        assert lost > 0

    @pytest.mark.emulator_only
    def test_memory_is_freed(self, on):
        before = emulator.live()
        pair = Pair(on)
        handle = pair.offload(BUDGETS["some state"])
        pair.step()
        handle.remove()
        managedmem.result_cache.clear()
        assert emulator.live() == before
