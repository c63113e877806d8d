"""Shared by the tests of offload(): models, rounds, and their comparison with plain modules."""

import copy
import importlib

from tensors import mt, torch

nn = torch.nn
# True if code of torch.compile has the hooks in its graph.
IN_GRAPHS = importlib.import_module("managedmem.torch._offload_operators").can_announce()
WIDTH = 64
LAYER = 64 * 64 * 4 + 512  # one Linear of this width: weights and bias, each at 512 bytes


def layers(count=8, on="cpu", width=WIDTH):
    """Linear layers, with activations that work in place."""
    torch.manual_seed(0)
    made = []
    for _ in range(count):
        made += [nn.Linear(width, width), nn.ReLU(inplace=True)]
    return nn.Sequential(*made).to(on)


def batch(handle, rows=4, width=WIDTH):
    """An input on the device of an offloaded module."""
    generator = torch.Generator().manual_seed(rows)
    return torch.rand(rows, width, generator=generator).to(handle.device)


def plain(model, handle):
    """A copy of a model that stays on the device of the offloaded one."""
    return copy.deepcopy(model).to(handle.device)


def use_device(handle):
    """Make the device current in a thread: cuBLAS warns where a thread has no context."""
    if handle.device.type == "cuda":
        torch.cuda.set_device(handle.device)


def same(one, other):
    """True if two tensors have the same bits."""
    return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())


def assert_same_module(model, reference):
    """Parameters, buffers and gradients of two modules have the same bits."""
    pairs = zip(model.named_parameters(), reference.named_parameters(), strict=True)
    for (name, one), (_, other) in pairs:
        assert same(one, other), name
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or same(one.grad, other.grad), f"the gradient of {name}"
    for (name, one), (_, other) in zip(
        model.named_buffers(), reference.named_buffers(), strict=True
    ):
        assert same(one, other), name


def hooks_of(model):
    """How many hooks the modules and parameters have."""
    count = 0
    for module in model.modules():
        count += len(module._forward_hooks) + len(module._forward_pre_hooks)
        count += len(module._forward_hooks_always_called) + len(module._backward_hooks)
    for parameter in model.parameters():
        count += len(parameter._post_accumulate_grad_hooks or ())
    return count


def managed_tensors(model):
    """The names of tensors, and gradients, in managed memory."""
    found = [name for name, t in model.state_dict().items() if mt.is_managed(t)]
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and mt.is_managed(parameter.grad):
            found.append(f"{name}.grad")
    return found
