"""Two models that are trained alike: one to offload, and its twin, which stays on the device."""

import copy

from managedmem import emulator
from offloaded import assert_same_module, same
from tensors import mt, torch

DEVICE = 0


class Twins:
    """A model and its twin, with an optimizer of make() for each."""

    def __init__(self, model, make):
        self.model = model
        self.twin = copy.deepcopy(model).to("cpu" if emulator.is_active() else "cuda:0")
        self.optimizer, self.other = (make(m.parameters()) for m in (self.model, self.twin))
        self.sides = ((self.model, self.optimizer), (self.twin, self.other))

    def offload(self, budget, **options):
        return mt.offload(self.model, DEVICE, budget=budget, optimizer=self.optimizer, **options)

    def each(self, function):
        """Call function(model, optimizer) for both, and compare the tensors that it returns."""
        one, other = (function(*side) for side in self.sides)
        assert one is None or same(one, other)

    def steps(self, count):
        """Call step() of a subclass `count` times."""
        for _ in range(count):
            self.step()

    def apply(self):
        """Let both optimizers step, and drop the gradients."""
        for _, optimizer in self.sides:
            assert optimizer.step() is None
            optimizer.zero_grad()

    def check(self):
        assert_same_module(self.model, self.twin)

    def check_state(self):
        for one, other in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            state, expected = self.optimizer.state.get(one, {}), self.other.state.get(other, {})
            assert state.keys() == expected.keys()
            for key, value in state.items():
                is_tensor = torch.is_tensor(value)
                assert same(value, expected[key]) if is_tensor else value == expected[key], key


def total(model):
    """The bytes that the parameters of a model take when it is offloaded."""
    return sum(-(-p.nbytes // 512) * 512 for p in model.parameters())
