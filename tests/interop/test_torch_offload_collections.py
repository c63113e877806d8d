"""remove() by a garbage collection inside of other calls of an offloaded module."""

import contextlib
import copy
import gc
import sys

import pytest

from managedmem import ManagedBuffer
from offloaded import LAYER, batch, layers, managed_tensors, same
from tensors import mt, torch

DEVICE = "cuda:0"


class Garbage:
    """A cycle whose finalizer removes a handle."""

    def __init__(self, handle):
        self.handle, self.cycle = handle, self

    def __del__(self):
        gc.set_threshold(*self.thresholds)
        self.handle.remove()


@contextlib.contextmanager
def collected_in(function, event, handle, caller=None, nth=1):
    """The collector finds the garbage at this event of the function, and not before."""
    Garbage.thresholds = gc.get_threshold()
    left = nth

    def watch(frame, seen, _):
        nonlocal left
        if seen != event or frame.f_code.co_name != function:
            return
        if caller is None or frame.f_back.f_code.co_name == caller:
            left -= 1
            if left == 0:
                sys.setprofile(None)
                Garbage(handle)
                gc.set_threshold(1, 1, 1)

    gc.collect()
    sys.setprofile(watch)
    try:
        yield
        assert left <= 0, f"{function} was not called"
    finally:
        sys.setprofile(None)
        gc.set_threshold(*Garbage.thresholds)
        handle.remove()


def offloaded(model, on, **options):
    handle = mt.offload(model, DEVICE, **options)
    if on != handle.device.type:
        handle.remove()
        pytest.skip("the rest of the round would meet parameters of another device")
    return handle


@pytest.mark.parametrize("nth", [1, 2, 4])
@pytest.mark.parametrize("caller", ["enter", "leave"])
def test_in_a_forward_pass(on, caller, nth):
    model = layers(4, on=on)
    reference = copy.deepcopy(model)
    handle = offloaded(model, on, budget=2 * LAYER)
    inputs = batch(handle)
    with torch.no_grad(), collected_in("_uses", "return", handle, caller, nth):
        assert same(model(inputs), reference(inputs))
    assert managed_tensors(model) == []


def is_plain(tensor):
    """True for memory of torch alone, with a storage of its own."""
    memory = ManagedBuffer.from_handle(tensor.data_ptr(), tensor.nbytes)
    mine = tensor.untyped_storage().nbytes() == tensor.nbytes
    return mine and not memory.is_managed and memory.is_device_accessible is tensor.is_cuda


@pytest.mark.parametrize(
    ("function", "budget"),
    [("_home_of", 50 << 10), ("provide", 50 << 10), ("empty", 240 << 10), ("adam", 220 << 10)],
)
def test_in_a_training_step(on, function, budget):
    models = [layers(4, on=on)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    handle = offloaded(models[0], on, budget=budget, optimizer=optimizers[0])
    inputs = batch(handle)

    def train(number):
        optimizers[number].zero_grad()
        models[number](inputs).square().mean().backward()
        optimizers[number].step()

    if budget > 200 << 10:  # the second step finds the state at home
        train(0)
        train(1)
    with collected_in(function, "call", handle):
        train(0)
    train(1)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert same(one, other) and same(one.grad, other.grad)
        assert is_plain(one.grad)
    for one, other in zip(*(each.state.values() for each in optimizers), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert same(one[name], other[name]) and is_plain(one[name])
