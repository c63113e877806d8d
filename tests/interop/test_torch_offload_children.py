"""Submodules and parameters that offload() cannot stream: refused by name before anything moves."""

import gc
import warnings

import pytest

from offloaded import LAYER, assert_same_module, batch, hooks_of, layers, managed_tensors, nn, same
from tensors import mt, torch

DEVICE = 0


class Outer(nn.Module):
    """A child deep inside, between layers that can be streamed."""

    def __init__(self, child):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.inner = nn.ModuleDict({"list": nn.ModuleList([nn.Linear(64, 64), child])})
        self.last = nn.Linear(64, 64)

    def forward(self, x):
        for layer in (self.first, *self.inner["list"], self.last):
            x = layer(x)
        return x


NAME = "inner.list.1"


def scripted():
    return torch.jit.script(nn.Linear(64, 64))


def traced():
    return torch.jit.trace(nn.Sequential(nn.Linear(64, 64)), torch.ones(1, 64))


def with_a_scripted_child():
    return nn.Sequential(nn.ReLU(), torch.jit.script(nn.Linear(64, 64)))


def packed():
    plain = nn.Sequential(nn.Linear(64, 64))
    return torch.ao.quantization.quantize_dynamic(plain, {nn.Linear})


def with_parameter(make):
    def child():
        module = nn.Linear(64, 64)
        module.weight = nn.Parameter(make(), requires_grad=False)
        return module

    return child


def with_buffer(make):
    def child():
        module = nn.Linear(64, 64)
        module.register_buffer("table", make())
        return module

    return child


def quantized():
    return torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8)


class TestChildren:
    @pytest.mark.parametrize(
        ("make", "error", "name", "text"),
        [
            (lambda: nn.DataParallel(nn.Linear(64, 64)), TypeError, NAME, "wrapped in DataPara"),
            (scripted, TypeError, NAME, "RecursiveScriptModule, whose calls no hook sees"),
            (traced, TypeError, NAME, "TracedModule, whose calls no hook sees"),
            (with_a_scripted_child, TypeError, f"{NAME}.1", "whose calls no hook sees"),
            (packed, TypeError, f"{NAME}.0._packed_params", "quantized: its weights are packed"),
            (lambda: nn.LazyLinear(3), ValueError, f"{NAME}.weight", "has no shape yet"),
            (lambda: nn.Linear(3, 3, device="meta"), ValueError, f"{NAME}.weight", "has no memory"),
            (
                with_parameter(lambda: torch.eye(64).to_sparse()),
                ValueError,
                f"{NAME}.weight",
                "has layout sparse_coo",
            ),
            (
                with_buffer(lambda: torch.eye(64).to_sparse_csr()),
                ValueError,
                f"{NAME}.table",
                "has layout sparse_csr",
            ),
            (with_buffer(quantized), ValueError, f"{NAME}.table", "is quantized"),
            (with_parameter(quantized), ValueError, f"{NAME}.weight", "is quantized"),
        ],
    )
    def test_refused_by_name_with_the_model_unchanged(self, make, error, name, text):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scripts and quantization here are deprecated
            model = Outer(make())
        with pytest.raises(error, match=rf"^'{name}'.*{text}"):
            mt.offload(model, DEVICE, budget=LAYER)
        for module in (model.first, model.inner["list"][0], model.last):
            assert managed_tensors(module) == [] and hooks_of(module) == 0
        assert mt.Offload.of(model) is None

    @pytest.mark.parametrize("kind", ["parametrized", "hooked", "spectral", "tied"])
    def test_reparametrized_and_tied_layers_work(self, on, kind):
        def make():
            torch.manual_seed(0)
            child = nn.Linear(64, 64)
            if kind == "parametrized":
                nn.utils.parametrizations.weight_norm(child)
            elif kind == "hooked":
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # deprecated for the other one
                    nn.utils.weight_norm(child)
            elif kind == "spectral":
                nn.utils.parametrizations.spectral_norm(child).eval()
            model = Outer(child)
            if kind == "tied":
                child.weight = model.first.weight
            return model.to(on)

        model, reference = make(), make()
        with mt.offload(model, DEVICE, budget=3 * LAYER) as handle:
            reference.to(handle.device)
            with torch.no_grad():
                for _ in range(2):
                    assert same(model(batch(handle)), reference(batch(handle)))
            assert handle.stats()["acquired"] >= 2 * 4
        assert_same_module(model, reference.to(on))


class TestParametersOfOtherModels:
    @pytest.mark.parametrize("budget", [LAYER, 100 * LAYER])
    @pytest.mark.parametrize("kind", ["parameter", "slice", "buffer"])
    def test_refused_with_both_names(self, on, budget, kind):
        one, two = layers(2, on=on), Outer(nn.Linear(64, 64)).to(on)
        handle = mt.offload(one, DEVICE, budget=budget)
        two.to(handle.device)
        child = two.inner["list"][1]
        if kind == "parameter":
            child.weight = one[2].weight
        elif kind == "slice":
            child.weight = nn.Parameter(one[2].weight.data[:32])
        else:
            child.register_buffer("table", one[2].weight.data)
        name = f"{NAME}.table" if kind == "buffer" else f"{NAME}.weight"
        with pytest.raises(
            ValueError, match=rf"^'{name}'.*\(Outer\).*'2.weight'.*\(Sequential\).*remove\(\)"
        ):
            mt.offload(two, DEVICE, budget=budget)
        assert managed_tensors(two.first) == [] and hooks_of(two) == 0
        assert same(one(batch(handle)), layers(2).to(handle.device)(batch(handle)))
        handle.remove()
        if kind == "parameter":
            mt.offload(two.to(on), DEVICE, budget=budget).remove()

    def test_a_model_that_is_gone_refuses_nothing(self, on):
        one, two = layers(2, on=on), layers(2, on=on)
        handle = mt.offload(one, DEVICE, budget=LAYER)
        handle.remove()
        two[0].weight = one[0].weight
        del one, handle
        gc.collect()
        mt.offload(two, DEVICE, budget=LAYER).remove()
