"""One graph of torch.compile over an offloaded model: no break, the same uses, the same numbers."""

import warnings

import pytest

from offloaded import IN_GRAPHS, LAYER, assert_same_module, batch, nn, same
from tensors import mt, torch

pytest.importorskip("torch._dynamo")
pytestmark = pytest.mark.skipif(not IN_GRAPHS, reason="needs torch 2.13 or later")
checkpoint = torch.utils.checkpoint.checkpoint
DEVICE = 0
COUNT = 3


class Attention(nn.Module):
    """Several modules share an input; one changes what it gets, and returns it in a dictionary."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x, *, scale):
        q, k, v = self.q(x), self.k(x), self.v(x)
        x = x.clone()
        x.add_(torch.softmax(q @ k.T * scale, -1) @ v)
        return {"x": [x], "scale": scale}


class Model(nn.Module):
    def __init__(self, checkpoints=False):
        super().__init__()
        self.checkpoints = checkpoints
        self.layers = nn.ModuleList(Attention() for _ in range(COUNT))

    def forward(self, x):
        for layer in self.layers:
            if self.checkpoints:
                x = checkpoint(layer, x, scale=0.1, use_reentrant=False)["x"][0]
            else:
                x = layer(x, scale=0.1)["x"][0]
        return x


class Lone(nn.Module):
    """Its calls have no arguments, which leaves nothing to tie them to."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64, 64) / 8)

    def forward(self):
        return self.weight * 2


class Lonely(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Lone() for _ in range(COUNT))

    def forward(self, x):
        for layer in self.layers:
            x = x @ layer()
        return x


def made(kind, on, **options):
    torch.manual_seed(0)
    return kind(**options).to(on)


@pytest.fixture(autouse=True)
def fresh():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def rounds(model, call, handle, trains):
    """The results of two rounds, and the uses of each."""
    results, uses = [], []
    for _ in range(2):
        before = handle.stats()["acquired"]
        with torch.set_grad_enabled(trains):
            results.append(call(batch(handle)))
        if trains:
            model.zero_grad()
            results[-1].square().sum().backward()
        uses.append(handle.stats()["acquired"] - before)
    return results, uses


@pytest.mark.filterwarnings("ignore:.*has a gradient, but offload")
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_uses_are_those_of_python(on, backend, trains, checkpoints):
    model, reference = (made(Model, on, checkpoints=checkpoints) for _ in range(2))
    with mt.offload(model, DEVICE, budget=3 * LAYER) as handle:
        reference.to(handle.device)
        wanted, _ = rounds(reference, reference, handle, trains)
        _, by_python = rounds(model, model, handle, trains)
        torch._dynamo.utils.counters.clear()
        call = torch.compile(model, backend=backend, fullgraph=True)
        found, in_graphs = rounds(model, call, handle, trains)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert not torch._dynamo.utils.counters["graph_break"]
        assert in_graphs == by_python
        assert all(map(same, found, wanted))
        assert handle.stats()["bytes_home"] == 0
    assert_same_module(model, reference.to(on))
    with torch.no_grad():
        inputs = torch.ones(4, 64, device=on)
        assert same(call(inputs), reference(inputs))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:TensorFloat32")  # of another device
def test_inductor_keeps_the_order(on):
    """Kernels with parameters lie between the operators of their module, without copies."""
    if on != "cpu":
        pytest.skip("the text of code for the CPU")
    code = pytest.importorskip("torch._inductor.utils")
    model = made(Model, on)
    with mt.offload(model, DEVICE, budget=3 * LAYER) as handle, torch.no_grad():
        wanted = model(batch(handle))
        call = torch.compile(lambda x: model(x) + 0, fullgraph=True)
        found, (text,) = code.run_and_get_code(call, batch(handle))
    torch.testing.assert_close(found, wanted)
    marks = [
        "addmm" if "addmm(" in line else line.rstrip().removesuffix(")")[-1]
        for line in text.splitlines()
        if "managedmem.order.default(" in line or "extern_kernels.addmm(" in line
    ]
    assert (
        "".join(marks) == "0" + ("2addmm3" * 3 + "addmm") * COUNT + "1"
    )  # and one without parameters


def test_a_call_without_tensors_breaks(on):
    model, reference = (made(Lonely, on) for _ in range(2))
    with mt.offload(model, DEVICE, budget=2 * LAYER) as handle:
        reference.to(handle.device)
        call = torch.compile(model, backend="eager")
        with torch.no_grad():
            assert same(call(batch(handle)), reference(batch(handle)))
            assert {each.seen for each in handle.coverage.values()} == {1}
            torch._dynamo.reset()
            with pytest.raises(RuntimeError, match="its arguments or its output have no tensor"):
                torch.compile(model, backend="eager", fullgraph=True)(batch(handle))
