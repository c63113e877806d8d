"""offload() beside what callers do: gradients in buffers of theirs, a step() of theirs, wrapped
optimizers, and handles that a module keeps."""

import copy
import gc
import pickle
import weakref

import pytest

from offloaded import LAYER, assert_same_module, batch, layers, managed_tensors, nn, same
from races import race
from tensors import mt, torch

DEVICE = 0


def nothing(*_):
    return None


def trained(on, prepare=nothing, late=False, between=nothing, make=torch.optim.Adam):
    """An offloaded model and a plain one after the same steps: models, optimizers, and the handle.

    prepare(model, optimizer) runs before or, if it is late, after the model is offloaded;
    between() gets its result after each backward pass. The results are returned too.
    """
    models = [layers(4, on=on)]
    optimizers = [make(models[0].parameters())]
    early = None if late else prepare(models[0], optimizers[0])
    handle = mt.offload(models[0], DEVICE, budget=2 * LAYER, optimizer=optimizers[0])
    models.append(layers(4).to(handle.device))
    optimizers.append(make(models[1].parameters()))
    kept = [prepare(models[0], optimizers[0]) if late else early, prepare(models[1], optimizers[1])]
    for _ in range(3):
        for model, optimizer, own in zip(models, optimizers, kept, strict=True):
            model(batch(handle)).square().mean().backward()
            between(own)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return models, optimizers, kept, handle


class TestGradients:
    @pytest.mark.parametrize("kind", ["view", "detached", "data"])
    def test_in_a_flat_buffer(self, on, kind):
        """As a reduction or clipping by hand has them: the buffer is what the caller changes."""

        def flatten(model, _):
            parameters = list(model.parameters())
            sizes = [p.numel() for p in parameters]
            flat = torch.zeros(sum(sizes), device=parameters[0].device)
            for p, part in zip(parameters, flat.split(sizes), strict=True):
                if kind == "data":
                    p.grad = torch.zeros_like(p)
                    p.grad.data = part.view_as(p)
                else:
                    p.grad = part.view_as(p) if kind == "view" else part.view_as(p).detach()
            return flat

        models, _, (flat, other), handle = trained(
            on, flatten, late=True, between=lambda flat: flat.clamp_(-1e-3, 1e-3)
        )
        assert handle.stats()["gradients_on_host"] == 0
        memory = flat.untyped_storage().data_ptr()
        assert all(p.grad.untyped_storage().data_ptr() == memory for p in models[0].parameters())
        assert same(flat, other)
        handle.remove()
        assert_same_module(*models)

    @pytest.mark.parametrize("late", [False, True])
    def test_that_the_caller_refers_to(self, on, late):
        def list_gradients(model, _):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            return [p.grad for p in model.parameters()]

        models, _, (kept, _), handle = trained(
            on, list_gradients, late, between=lambda kept: torch._foreach_mul_(kept, 0.1)
        )
        assert handle.stats()["gradients_on_host"] == sum(p.nbytes for p in models[0].parameters())
        assert all(p.grad is mine for p, mine in zip(models[0].parameters(), kept, strict=True))
        handle.remove()
        assert all(p.grad is mine for p, mine in zip(models[0].parameters(), kept, strict=True))
        assert_same_module(*models)
        assert managed_tensors(models[0]) == []

    def test_with_a_view_of_the_caller(self, on):
        def list_views(model, _):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            return [p.grad.view(-1) for p in model.parameters()]

        models, _, _, handle = trained(
            on, list_views, late=True, between=lambda views: torch._foreach_mul_(views, 0.1)
        )
        handle.remove()
        assert_same_module(*models)

    def test_several_threads_that_accumulate(self, on):
        """They get no error. Torch adds the gradients of a GPU in one thread; on the CPU, sums may
        miss a part, as the documentation says."""
        model = layers(4, on=on)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = mt.offload(model, DEVICE, budget=2 * LAYER, optimizer=optimizer)

        def train():
            for _ in range(10):
                sum(p.sum() for p in model.parameters()).backward()

        for _ in range(5):
            race(train, train, train)
            if handle.device.type == "cuda":
                assert all(bool((p.grad == 30).all()) for p in model.parameters())
            model.zero_grad()
        handle.remove()

    def test_of_the_last_part_alone_without_the_optimizer(self, on):
        model = layers(4, on=on)
        model[2:].requires_grad_(False)
        with mt.offload(model, DEVICE, budget=2 * LAYER) as handle:
            with pytest.warns(UserWarning, match="'0.weight' has a gradient"):
                model(batch(handle)).sum().backward()

    def test_no_warning_for_a_handle_that_is_removed_meanwhile(self, on, monkeypatch):
        from managedmem.torch import _offload_hooks

        model = layers(4, on=on)
        handle = mt.offload(model, DEVICE, budget=2 * LAYER)
        if torch.device(on).type != handle.device.type:
            handle.remove()
            pytest.skip("the pass goes on where the parameters come from the same device")
        inputs, original = batch(handle), _offload_hooks.Places._places

        def removed(places, site):
            for number, found in enumerate(original(places, site)):
                if number == 1:  # as a collection may do
                    handle.remove()
                yield found

        monkeypatch.setattr(_offload_hooks.Places, "_places", removed)
        model(inputs)

    @pytest.mark.parametrize(
        ("read_only", "words"),
        [(False, r"offload\(\) was given no optimizer"), (True, "a step would be lost")],
    )
    def test_without_the_optimizer_there_is_a_warning(self, read_only, words, on):
        model = layers(4, on=on)
        with mt.offload(model, DEVICE, budget=2 * LAYER, read_only=read_only) as handle:
            loss = model(batch(handle)).sum()
            torch.autograd.grad(loss, model[0].weight)  # which nobody keeps
            with pytest.warns(UserWarning, match=words) as seen:
                for _ in range(2):
                    model.zero_grad()
                    model(batch(handle)).sum().backward()
            assert len(seen) == 1


class TestSteps:
    def test_a_step_of_the_caller_is_called_once(self, on):
        """One that was put on the optimizer before, as clipping by hand does."""

        def patch(model, optimizer):
            seen, inner = [], optimizer.step

            def step(*given):
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                seen.append(len(parameters))
                torch.nn.utils.clip_grad_norm_(parameters, 0.01)
                return inner(*given)

            optimizer.step = step
            return seen

        models, optimizers, (seen, _), handle = trained(on, patch)
        assert seen == [8] * 3
        handle.remove()
        assert_same_module(*models)
        optimizers[0].step()
        assert seen == [8] * 4

    @pytest.mark.parametrize("late", [False, True])
    def test_under_a_scheduler_it_still_steps_in_parts(self, on, late):
        def schedule(_, optimizer):
            return torch.optim.lr_scheduler.StepLR(optimizer, 1)

        models, optimizers, _, handle = trained(on, schedule, late)
        seen = []
        original = torch.optim.Adam._init_group

        def look(optimizer, group, *rest):
            seen.append(len(group["params"]))
            return original(optimizer, group, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.Adam, "_init_group", look)
            optimizers[0].step()
        assert seen == [2] * 4
        optimizers[1].step()
        handle.remove()
        assert_same_module(*models)

    def test_a_scheduler_from_an_earlier_time(self, on):
        """It keeps a step() that was made while the module was offloaded."""
        model = layers(4, on=on)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.1)
        with mt.offload(model, DEVICE, budget=2 * LAYER, optimizer=optimizer):
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with mt.offload(model, DEVICE, budget=2 * LAYER, optimizer=optimizer) as handle:
            for _ in range(2):
                model(batch(handle)).sum().backward()
                optimizer.step()
                scheduler.step()
            assert all(part.home is not None for part in handle._step.parts)
        optimizer.step()
        scheduler.step()  # would warn about a step() that is not the one it has wrapped

    def test_two_models_with_one_optimizer(self, on):
        one, two = layers(4, on=on), layers(4, on=on)
        optimizer = torch.optim.Adam([*one.parameters(), *two.parameters()])
        handles = [mt.offload(m, DEVICE, budget=2 * LAYER, optimizer=optimizer) for m in (one, two)]
        for handle in handles:
            given = batch(handles[1]).to(one[0].weight.device)  # one is back there at first
            two(one(given).to(handles[1].device)).sum().backward()
            optimizer.step()
            handle.remove()
        assert "step" not in vars(optimizer)

    def test_without_memory_for_a_scratch(self, on, monkeypatch):
        def refuse(*given, **named):
            raise torch.cuda.OutOfMemoryError("planted")

        model = layers(4, on=on)
        optimizer = torch.optim.Adam(model.parameters())
        with mt.offload(model, DEVICE, budget=12 * LAYER, optimizer=optimizer) as handle:
            for planted in (True, False):
                model(batch(handle)).sum().backward()
                with monkeypatch.context() as patch:
                    if planted:
                        patch.setattr("managedmem.torch._offload_optimizer.Ring", refuse)
                    optimizer.step()
                assert handle.stats()["failures"] == 1
                assert bool(handle._step.rings) is not planted

    def test_parts_without_a_gradient_stay_home(self, on):
        model = layers(4, on=on)
        optimizer = torch.optim.Adam(model.parameters())
        for parameter in list(model.parameters())[:-2]:
            parameter.requires_grad_(False)
        with mt.offload(model, DEVICE, budget=2 * LAYER, optimizer=optimizer) as handle:
            home = []
            for _ in range(5):
                home.append(handle.stats()["bytes_home"])
                model(batch(handle)).sum().backward()
                optimizer.step()
        moved = handle.stats()["bytes_home"] - home[1]
        assert moved <= 5 * LAYER  # of one layer of four

    @pytest.mark.parametrize(
        "name",
        ["Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta", "ASGD", "Rprop"],
    )
    def test_a_sparse_gradient_that_is_refused_changes_nothing(self, on, name):
        torch.manual_seed(0)
        model = nn.Sequential(*layers(4, on=on), nn.Embedding(64, 64, sparse=True).to(on))
        groups = [{"params": model[:4].parameters()}, {"params": model[4:].parameters()}]
        optimizer = getattr(torch.optim, name)(groups)
        with mt.offload(model, DEVICE, budget=4 * LAYER, optimizer=optimizer) as handle:
            before = [p.detach().clone() for p in model.parameters()]
            model[:-1](batch(handle)).sum().backward()
            model[-1](torch.arange(3, device=handle.device)).sum().backward()
            with pytest.raises(RuntimeError, match="sparse"):
                optimizer.step()
            assert all(map(same, before, model.parameters())) and not optimizer.state

    def test_without_any_gradient_a_scheduler_sees_a_step(self, on):
        model = layers(4, on=on)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with mt.offload(model, DEVICE, budget=2 * LAYER, optimizer=optimizer):
            optimizer.step()
            scheduler.step()  # else it would warn

    def test_the_state_has_the_order_of_the_parameters(self, on):
        _, optimizers, _, handle = trained(on)
        keys = [list(optimizer.state_dict()["state"]) for optimizer in optimizers]
        handle.remove()
        assert keys[0] == keys[1]

    def test_one_large_part_does_not_keep_the_others_from_the_device(self, on):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(2000, 64), *layers(4)).to(on)
        optimizer = torch.optim.Adam(model.parameters())
        total = sum(p.nbytes for p in model.parameters())
        with mt.offload(model, DEVICE, budget=total + 8 * LAYER, optimizer=optimizer) as handle:
            tokens = torch.arange(4, device=handle.device)
            for _ in range(3):
                model(tokens).sum().backward()
                optimizer.step()
            (ring,) = handle._step.rings.values()
            assert ring.filled == 3 * 4

    def test_an_error_at_the_start_leaves_the_optimizer(self, on, monkeypatch):
        from managedmem.torch import _offload_optimizer

        model = layers(4, on=on)
        optimizer = torch.optim.Adam(model.parameters())
        reference = copy.deepcopy((model, optimizer))
        for m, o in ((model, optimizer), reference):
            m(torch.ones(2, 64, device=on)).sum().backward()
            o.step()
        original, calls = _offload_optimizer._home_of, []

        def interrupted(*given):
            calls.append(given)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return original(*given)

        monkeypatch.setattr(_offload_optimizer, "_home_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mt.offload(model, DEVICE, budget=2 * LAYER, optimizer=optimizer)
        assert "step" not in vars(optimizer)
        optimizer.step(), reference[1].step()
        assert_same_module(model, reference[0])


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one that never calls Optimizer.__init__(), as accelerate's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def state(self):
        return self.optimizer.state

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        return self.optimizer.step(closure)


def test_an_optimizer_in_a_wrapper(on):
    models, optimizers, _, handle = trained(
        on, make=lambda parameters: Wrapper(torch.optim.Adam(parameters))
    )
    assert handle.stats()["state_on_host"] == 2 * sum(p.nbytes for p in models[0].parameters())
    handle.remove()
    assert_same_module(*models)
    assert "step" not in vars(optimizers[0].optimizer)


class TestHandles:
    @pytest.mark.parametrize("budget", [LAYER, 100 * LAYER], ids=["streamed", "resident"])
    def test_a_dropped_module_is_freed_at_once(self, on, budget):
        """Even one that was never called."""
        model = layers(on=on)
        mt.offload(model, DEVICE, budget=budget)
        died = weakref.ref(model)
        gc.disable()
        try:
            del model
            assert died() is None
        finally:
            gc.enable()

    def test_a_dropped_handle_is_found_again(self, on):
        model = layers(on=on)
        before = set(vars(model[2]))
        assert mt.Offload.of(model) is None
        name = repr(mt.offload(model, DEVICE, budget=4 * LAYER))
        gc.collect()
        found = mt.Offload.of(model[2])
        assert found is mt.Offload.of(model) and repr(found) == name
        assert mt.Offload.of(copy.deepcopy(model)) is None
        shallow = copy.copy(model[2])
        inner = model[2]
        del model
        gc.collect()
        assert mt.Offload.of(inner) is found  # what is left of the model can be had back
        found.remove()
        assert mt.Offload.of(inner) is None and set(vars(inner)) == before
        assert mt.Offload.of(shallow) is None
        with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module, got int"):
            mt.Offload.of(3)

    def test_a_module_may_keep_it(self, on):
        model = layers(2, on=on)
        model.handle = mt.offload(model, DEVICE, budget=LAYER)
        for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert made.handle is None
            assert same(made(batch(model.handle)), model(batch(model.handle)))
            assert managed_tensors(made) == []
        model.handle.remove()

    def test_a_module_that_was_replaced_can_be_offloaded_again(self, on):
        model = layers(2, on=on)
        old = model[2]
        with mt.offload(model, DEVICE, budget=LAYER):
            model[2] = nn.Linear(64, 64, device=on)
        mt.offload(old, DEVICE, budget=LAYER).remove()
        mt.offload(model, DEVICE, budget=LAYER).remove()

    def test_removed_by_two_threads(self, on):
        for _ in range(20):
            model = layers(2, on=on)
            before = copy.deepcopy(model)
            handle = mt.offload(model, DEVICE, budget=LAYER)
            race(handle.remove, handle.remove)
            assert managed_tensors(model) == []
            assert_same_module(model, before)
