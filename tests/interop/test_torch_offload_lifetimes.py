"""What lives on when an offloaded model is dropped: what a plain model leaves, and nothing else.

torch's C++ holds hooks and callbacks, through which the garbage collector cannot see.
"""

import copy
import gc
import weakref

import pytest

import managedmem
from live_memory import live_managed_bytes
from managedmem import emulator
from offloaded import LAYER, nn, same
from tensors import mt, torch

DEVICE = 0
COUNT = 6
BUDGETS = {"streamed": 2 * LAYER, "resident": (COUNT + 2) * LAYER, "everything": 100 * LAYER}
OPTIMIZERS = {
    "none": None,
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=1),
}
KEPT = [
    "nothing",
    "output in the module",
    "loss",
    "gradients of gradients",
    "state_dict",
    "parameter",
    "optimizer",
    "state of the optimizer",
    "scheduler before",
    "scheduler after",
    "handle in the module",
    "gradients",
]
FAULTS = ["forward", "inner module", "backward", "closure", "exception in the module"]


def quicken_collections():
    """They pass over what is here now: objects of the library, and of earlier tests.

    For good, because gc.unfreeze() would also show them what conftest.py hides.
    """
    gc.collect()
    if live_managed_bytes() == 0:
        gc.freeze()


class Net(nn.Module):
    """Layers, frozen and trained, with buffers; each may keep its last output."""

    def __init__(self, keeps):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(COUNT))
        self.norm = nn.BatchNorm1d(64)
        self.layers[0].requires_grad_(False)
        self.keeps = keeps

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs)
            if self.keeps:
                layer.last = inputs
        return self.norm(inputs)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError


def fail(model, optimizer, inputs, fault):
    """A call of the model, or of the optimizer, that ends with an exception."""
    if fault in ("forward", "exception in the module"):
        try:
            model(inputs[:, :3])
        except RuntimeError as error:
            if fault == "exception in the module":
                model.error = error
    elif fault == "inner module":
        hook = model.layers[3].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(inputs)
        hook.remove()
    elif fault == "backward":
        with pytest.raises(ZeroDivisionError):
            Failing.apply(model(inputs)).sum().backward()
    elif fault == "closure" and optimizer is not None:
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)


def train(model, optimizer, scheduler, inputs):
    """Two steps; the loss of another call."""

    def closure():
        if optimizer is not None:
            optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        if optimizer is None:
            model(inputs)
        else:
            optimizer.step(closure)
            if scheduler is not None:
                scheduler.step()
    return model(inputs).square().mean()


def run(name, kept, end, fault="none", budget="streamed"):
    """What is kept of a model that has been used, and references to all that it had.

    `end` None: the model is not offloaded.
    """
    model = Net(kept == "output in the module")
    place = "cpu" if emulator.is_active() else "cuda:0"
    make = OPTIMIZERS[name]
    optimizer = None if make is None else make(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR
    scheduler = schedule(optimizer, 1) if kept == "scheduler before" else None
    if end is None:
        model.to(place)
    else:
        handle = mt.offload(model, DEVICE, budget=BUDGETS[budget], optimizer=optimizer)
        if kept == "handle in the module":
            model.handle = handle
    if kept == "scheduler after":
        scheduler = schedule(optimizer, 1)
    inputs = torch.ones(4, 64, device=place)
    loss = train(model, optimizer, scheduler, inputs)
    fail(model, optimizer, inputs, fault)
    trained = [p for p in model.parameters() if p.requires_grad]
    found = {
        "loss": lambda: loss,
        "gradients of gradients": lambda: torch.autograd.grad(loss, trained, create_graph=True),
        "state_dict": model.state_dict,
        "parameter": lambda: model.layers[3].weight,
        "optimizer": lambda: optimizer,
        "state of the optimizer": getattr(optimizer, "state_dict", None),
        "scheduler before": lambda: scheduler,
        "scheduler after": lambda: scheduler,
        "gradients": lambda: [p.grad for p in model.parameters()],
    }.get(kept, lambda: None)()
    if end == "removed":
        handle.remove()
    return found, references(model, optimizer)


def references(model, optimizer):
    """Weak references to modules, parameters, buffers, the optimizer and its state, by name."""
    things = [*model.named_modules(), *model.named_parameters(), *model.named_buffers()]
    if optimizer is not None:
        things.append(("optimizer", optimizer))
        for number, state in enumerate(optimizer.state.values()):
            things += [(f"{n} {number}", v) for n, v in state.items() if torch.is_tensor(v)]
    return [(name, weakref.ref(thing)) for name, thing in things]


def living(seen):
    return [name for name, reference in seen if reference() is not None]


def check(name, kept, **named):
    """The same things live as with a plain model, while something is kept and afterwards."""
    found, seen = run(name, kept, None, **named)
    gc.collect()
    plain = living(seen)
    del found
    gc.collect()
    managedmem.result_cache.clear()
    before = live_managed_bytes(), emulator.is_active() and emulator.live()
    for end in ("never removed", "removed"):
        case = name, kept, end, named
        found, seen = run(name, kept, end, **named)
        gc.collect()
        assert living(seen) == plain, case
        assert kept != "nothing" or live_managed_bytes() == before[0], case
        del found
        gc.collect()
        assert living(seen) == [], case
        assert (live_managed_bytes(), emulator.is_active() and emulator.live()) == before, case


NEED_AN_OPTIMIZER = ("optimizer", "state of the optimizer", "scheduler before", "scheduler after")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_dropped_model(name):
    quicken_collections()
    for kept in KEPT:
        if name != "none" or kept not in NEED_AN_OPTIMIZER:
            check(name, kept)


@pytest.mark.parametrize("kept", ["nothing", "output in the module", "loss", "state_dict"])
def test_after_an_exception(kept):
    quicken_collections()
    for fault in FAULTS:
        # An exception in the module has frames, and they have the loss.
        if fault != "exception in the module" or kept != "loss":
            check("Adam", kept, fault=fault)


@pytest.mark.parametrize("budget", ["resident", "everything"])
def test_with_a_larger_budget(budget):
    quicken_collections()
    for kept in ("nothing", "output in the module", "optimizer"):
        check("Adam", kept, budget=budget)


@pytest.mark.parametrize("kept", ["loss", "optimizer"])
def test_what_is_kept_can_be_used(kept):
    """A backward pass through a loss, and steps of the optimizer, after the model."""
    place = "cpu" if emulator.is_active() else "cuda:0"
    model = Net(False)
    model.layers[0].requires_grad_(True)
    reference = copy.deepcopy(model).to(place)
    parameters = [list(each.parameters()) for each in (model, reference)]
    optimizers = [torch.optim.Adam(each) for each in parameters]
    mt.offload(model, DEVICE, budget=2 * LAYER, optimizer=optimizers[0])
    losses = []
    for each, optimizer in zip((model, reference), optimizers, strict=True):
        train(each, optimizer, None, torch.ones(4, 64, device=place))
        losses.append(each(torch.ones(4, 64, device=place)).square().mean())
    died = weakref.ref(model)
    del model, each
    gc.collect()
    assert died() is None
    for loss, optimizer in zip(losses, optimizers, strict=True):
        if kept == "loss":
            loss.backward()
        optimizer.step()
    for one, other in zip(*parameters, strict=True):
        assert same(one, other) and same(one.grad, other.grad)


def test_an_optimizer_that_is_dropped_first(on):
    """Its state goes with it, and the model goes on."""
    model = Net(False).to(on)
    optimizer = torch.optim.Adam(model.parameters())
    handle = mt.offload(model, DEVICE, budget=2 * LAYER, optimizer=optimizer)
    inputs = torch.ones(4, 64, device=handle.device)
    train(model, optimizer, None, inputs)
    assert handle.stats()["state_on_host"] > 0
    seen = references(nn.Module(), optimizer)
    del optimizer
    gc.collect()
    assert living(seen) == [] or living(seen) == [""]
    assert handle.stats()["state_on_host"] == 0
    model(inputs).sum().backward()
    handle.remove()


def test_a_handle_that_is_kept_after_its_end(on):
    model = Net(False).to(on)
    optimizer = torch.optim.Adam(model.parameters())
    handle = mt.offload(model, DEVICE, budget=2 * LAYER, optimizer=optimizer)
    train(model, optimizer, None, torch.ones(4, 64, device=handle.device))
    handle.remove()
    seen = references(model, optimizer)
    del model, optimizer
    gc.collect()
    assert living(seen) == []
    assert handle.stats()["state_on_host"] == 0


def test_a_second_offload_with_the_optimizer_of_a_dropped_model(on):
    """Its step() is still in the way of the optimizer's own."""
    first, second = Net(False).to(on), Net(False).to(on)
    reference = copy.deepcopy(second)
    optimizer = torch.optim.Adam(first.parameters())
    mt.offload(first, DEVICE, budget=2 * LAYER, optimizer=optimizer)
    del first
    gc.collect()
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": list(second.parameters())})
    handle = mt.offload(second, DEVICE, budget=2 * LAYER, optimizer=optimizer)
    reference.to(handle.device)
    inputs = torch.ones(4, 64, device=handle.device)
    train(second, optimizer, None, inputs)
    assert handle.stats()["state_on_host"] > 0
    handle.remove()
    train(reference, torch.optim.Adam(reference.parameters()), None, inputs)
    assert all(map(same, second.parameters(), reference.parameters()))
