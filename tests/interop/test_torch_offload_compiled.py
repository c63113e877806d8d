"""Modules and callers that torch.compile saw before offload(): uses are announced."""

import warnings

import pytest

from offloaded import IN_GRAPHS, LAYER, assert_same_module, batch, nn, same
from tensors import mt, torch

pytest.importorskip("torch._dynamo")

# torch's own, while it compiles for a backward pass.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
DEVICE = 0
COUNT = 4
KINDS = [
    "root in place",
    "blocks in place",
    "layers in place",
    "blocks wrapped",
    "layers wrapped",
    "forward of the root",
    "forward of the blocks",
    "caller",
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return torch.relu(self.layer(x)) * 2


def blocks(on):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(COUNT))).to(on)


def compiled(model, kind, **options):
    """Compile a part of a model; returns the function that calls the model."""
    options = {"backend": "eager", **options}
    if kind == "root in place":
        model.compile(**options)
    elif kind == "forward of the root":
        model.forward = torch.compile(model.forward, **options)
    elif kind == "caller":
        return torch.compile(lambda x: model(x) + 0, **options)
    for i in range(COUNT):
        if kind == "blocks in place":
            model[i].compile(**options)
        elif kind == "layers in place":
            model[i].layer.compile(**options)
        elif kind == "blocks wrapped":
            model[i] = torch.compile(model[i], **options)
        elif kind == "layers wrapped":
            model[i].layer = torch.compile(model[i].layer, **options)
        elif kind == "forward of the blocks":
            model[i].forward = torch.compile(model[i].forward, **options)
    return model


@pytest.fixture(autouse=True)
def fresh():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where torch has CUDA, the import warns of other packages
        torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        *((kind, "eager") for kind in KINDS),
        ("blocks wrapped", "aot_eager"),
        ("caller", "aot_eager"),
    ],
)
def test_uses_are_announced(on, kind, backend):
    model, reference = blocks(on), blocks(on)
    call = compiled(model, kind, backend=backend)
    before = torch.ones(4, 64, device=on)
    with torch.no_grad():
        call(before)  # compiles it without hooks
    with mt.offload(model, DEVICE, budget=2 * LAYER) as handle:
        reference.to(handle.device)
        with torch.no_grad():
            for _ in range(3):
                assert same(call(batch(handle)), reference(batch(handle)))
        assert handle.stats()["acquired"] == 3 * COUNT
    with torch.no_grad():
        assert same(call(before), reference.to(on)(before))


@pytest.mark.parametrize("kind", KINDS)
def test_backward_passes_are_announced(on, kind):
    model, reference = blocks(on), blocks(on)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    call = compiled(model, kind)
    call(torch.ones(4, 64, device=on))
    with mt.offload(model, DEVICE, budget=3 * LAYER, optimizer=optimizers[0]) as handle:
        reference.to(handle.device)
        for _ in range(3):
            call(batch(handle)).sum().backward()
            reference(batch(handle)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert handle.stats()["acquired"] >= 3 * (2 * COUNT - 1)
    assert_same_module(model, reference.to(on))


@pytest.mark.skipif(not IN_GRAPHS, reason="needs torch 2.13 or later")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "layers in place"])
def test_one_graph(on, kind):
    model, reference = blocks(on), blocks(on)
    call = compiled(model, kind, fullgraph=True)
    with torch.no_grad():
        call(torch.ones(4, 64, device=on))
    chosen = [f"{i}" for i in range(COUNT)] if kind == "blocks wrapped" else None
    with mt.offload(model, DEVICE, budget=2 * LAYER, blocks=chosen) as handle:
        reference.to(handle.device)
        with torch.no_grad():
            for _ in range(2):
                assert same(call(batch(handle)), reference(batch(handle)))
        assert handle.stats()["acquired"] == 2 * COUNT
        assert {each.seen for each in handle.coverage.values()} == {2}


@pytest.mark.skipif(not IN_GRAPHS, reason="needs torch 2.13 or later")
def test_a_forward_that_its_class_compiles(on):
    class Compiled(Block):
        @torch.compile(backend="eager", fullgraph=True)
        def forward(self, x):
            return torch.relu(self.layer(x)) * 2

    torch.manual_seed(0)
    model, reference = nn.Sequential(*(Compiled() for _ in range(COUNT))).to(on), blocks(on)
    with torch.no_grad():
        model(torch.ones(4, 64, device=on))
    with mt.offload(model, DEVICE, budget=2 * LAYER) as handle, torch.no_grad():
        assert same(model(batch(handle)), reference.to(handle.device)(batch(handle)))
        assert {each.seen for each in handle.coverage.values()} == {1}


def test_other_compiled_code_stays(on):
    """Only code that has seen modules of these classes is compiled again."""
    counts = {"other": 0, "model": 0}

    def backend(name):
        def count(graph, inputs):
            counts[name] += 1
            return graph.forward

        return count

    other = torch.compile(lambda x: x * 2, backend=backend("other"))
    model = blocks(on)
    model.compile(backend=backend("model"))
    inputs = torch.ones(4, 64, device=on)
    other(inputs), model(inputs)
    before = dict(counts)
    with mt.offload(model, DEVICE, budget=2 * LAYER) as handle:
        other(inputs), model(batch(handle))
    assert counts["other"] == before["other"]
    assert counts["model"] > before["model"]
