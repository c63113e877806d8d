"""Backward passes through layers that return objects: found in attributes, slots and containers."""

import collections
import dataclasses
import types

import pytest

from offloaded import LAYER, assert_same_module, batch, layers, nn, same
from tensors import mt, torch

DEVICE = 0
COUNT = 6


class Plain:
    def __init__(self, value):
        self.value = value


class Slots:
    __slots__ = ("__hidden", "empty", "value")

    def __init__(self, value):
        self.value = value
        self.__hidden = None


class SlotsOfABase(Slots):
    __slots__ = ("more",)


class Refusing:
    """Raises for every attribute that is asked for in the usual way."""

    def __init__(self, value):
        object.__setattr__(self, "value", value)

    def __getattribute__(self, name):
        raise RuntimeError(name)


class ListWithMore(list):
    def __init__(self, value):
        super().__init__([1, "text", None])
        self.value = value


class MappingWithMore(dict):
    def __init__(self, value):
        super().__init__(one=1)
        self.value = value


@dataclasses.dataclass
class Data:
    value: object


@dataclasses.dataclass(slots=True, frozen=True)
class FrozenSlots:
    value: object


Named = collections.namedtuple("Named", "value other")


def in_a_circle(value):
    made = Plain(value)
    made.itself = [made]
    return made


def deep(value):
    for _ in range(20):
        value = Plain([value])
    return value


def undo_deep(output):
    for _ in range(20):
        output = output.value[0]
    return output


def attribute(output):
    return output.value


KINDS = {
    "plain": (Plain, attribute),
    "slots": (Slots, attribute),
    "slots of a base": (SlotsOfABase, attribute),
    "refusing": (Refusing, lambda o: object.__getattribute__(o, "value")),
    "list with more": (ListWithMore, attribute),
    "mapping with more": (MappingWithMore, attribute),
    "data": (Data, attribute),
    "frozen": (FrozenSlots, attribute),
    "named": (lambda value: Named(value, 3), attribute),
    "namespace": (lambda value: types.SimpleNamespace(value=value), attribute),
    "queue": (lambda value: collections.deque([1, value]), lambda o: o[1]),
    "set": (lambda value: {value}, lambda o: next(iter(o))),
    "user's dictionary": (lambda value: collections.UserDict(value=value), lambda o: o["value"]),
    "circle": (in_a_circle, attribute),
    "deep": (deep, undo_deep),
    "nested": (lambda value: Plain({"a": (Slots(value),)}), lambda o: o.value["a"][0].value),
}


class Layers(nn.Module):
    """Layers that return objects, and a call that takes the tensors out."""

    def __init__(self, kind):
        super().__init__()
        make, self.take = KINDS[kind]

        class Layer(nn.Linear):
            def forward(self, x):
                return make(super().forward(x))

        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(64, 64) for _ in range(COUNT))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(self.take(layer(x)))
        return x


@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_backward_passes_are_announced(on, kind):
    model, reference = Layers(kind).to(on), Layers(kind).to(on)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    with mt.offload(model, DEVICE, budget=4 * LAYER, optimizer=optimizers[0]) as handle:
        reference.to(handle.device)
        for _ in range(2):
            before = handle.stats()["acquired"]
            outputs = [m(batch(handle)) for m in (model, reference)]
            assert same(*outputs)
            for output, optimizer in zip(outputs, optimizers, strict=True):
                output.sum().backward()
                if optimizer is optimizers[0]:
                    assert handle.stats()["acquired"] - before >= 2 * COUNT - 1
                optimizer.step()
                optimizer.zero_grad()
    assert_same_module(model, reference.to(on))


def test_views_that_an_activation_overwrites(on):
    """A linear layer returns a view for inputs of three dimensions."""
    model, reference = layers(COUNT, on=on), layers(COUNT, on=on)
    optimizer = torch.optim.SGD(model.parameters())
    with mt.offload(model, DEVICE, budget=4 * LAYER, optimizer=optimizer) as handle:
        reference.to(handle.device)
        for m in (model, reference):
            m(batch(handle, rows=6).view(2, 3, -1)).sum().backward()
        assert handle.stats()["acquired"] >= 2 * COUNT - 1
    assert_same_module(model, reference.to(on))
