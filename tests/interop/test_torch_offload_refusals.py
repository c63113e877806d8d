"""What offload() and its handle refuse, with the module unchanged."""

import warnings

import pytest

from constants import EMULATED, PAGE
from managedmem import Device
from offloaded import LAYER, hooks_of, layers, managed_tensors, nn
from programs import run_python
from tensors import assert_same, mt, snapshot, torch

DEVICE = "cuda:0"


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            ({"budget": 0}, ValueError, "budget must be a positive number of bytes, got 0"),
            ({"budget": -5}, ValueError, "budget must be a positive number of bytes, got -5"),
            ({"budget": 1.5}, TypeError, "budget must be a number of bytes or text .* got 1.5"),
            ({"budget": True}, TypeError, "budget must be a number of bytes or text .* got True"),
            ({"device": "cpu"}, ValueError, r"CUDA device, such as Device\(0\).*, got cpu: "),
            ({"device": "gpu"}, ValueError, r"CUDA device, such as Device\(0\).*, got 'gpu': "),
            ({"device": None}, TypeError, "device must be a Device.*got None"),
            ({"device": 99}, ValueError, "99"),
            ({"device": {"nobody": 0}}, ValueError, "device has 'nobody'"),
            ({"device": {"0": 0}}, ValueError, "'2.weight' belongs to no submodule"),
            ({"device": {"": 0, "0": 0}}, ValueError, "'0.weight' belongs to '' and to '0'"),
            ({"model": None}, TypeError, "model must be a torch.nn.Module, .* got NoneType"),
            ({"model": "gpt2"}, TypeError, "several in a list or a dict.* got str"),
            ({"model": {}}, ValueError, r"model \(dict\) has no modules"),
            ({"model": [nn.ReLU()]}, ValueError, r"model \(list\) has no parameters"),
            ({"model": [nn.ReLU(), 3]}, TypeError, r"model\['1'\] must be .*Module, got int"),
            ({"model": {"a.b": nn.Linear(3, 3)}}, ValueError, "the name 'a.b': use a word"),
            ({"model": nn.ReLU()}, ValueError, r"model \(ReLU\) has no parameters"),
            ({"model": nn.LazyLinear(3)}, ValueError, "'weight'.*run the module once"),
            ({"model": nn.Linear(3, 3, device="meta")}, ValueError, "'weight'.*has no memory"),
            ({"blocks": ["nobody"]}, ValueError, "blocks has 'nobody'"),
            ({"blocks": ["0."]}, ValueError, "'0.', .* of the model: did you mean '0'\\?"),
            ({"device": {"00": 0}}, ValueError, "'00', .* of the model: did you mean '0'\\?"),
            ({"blocks": [nn.ReLU()]}, ValueError, "blocks has a ReLU that is not a submodule"),
            ({"blocks": "nobody"}, ValueError, "blocks has 'nobody'"),
            ({"blocks": ["", "0"]}, ValueError, "blocks has '' and '0', which is a part of it"),
            ({"blocks": 3}, TypeError, "blocks must be an iterable of names .* got the int 3"),
            ({"blocks": [3]}, TypeError, "blocks must hold names or modules, got 3"),
            ({"read_only": 1}, TypeError, "read_only must be True or False, got 1"),
            (
                {"optimizer": 3},
                TypeError,
                "optimizer must be one torch.optim.Optimizer or None, got int",
            ),
        ],
    )
    def test_arguments(self, arguments, error, text):
        model = layers(2)
        given = {"model": model, "device": 0, "budget": LAYER, **arguments}
        with pytest.raises(error, match=text):
            mt.offload(**given)
        assert managed_tensors(model) == []
        assert hooks_of(model) == 0

    def test_read_only_with_an_optimizer(self):
        model = layers(2)
        optimizer = torch.optim.SGD(model.parameters())
        with pytest.raises(ValueError, match="read_only=True is for inference"):
            mt.offload(model, 0, budget=LAYER, optimizer=optimizer, read_only=True)
        assert managed_tensors(model) == []

    def test_twice(self, on):
        model = layers(on=on)
        with mt.offload(model, DEVICE, budget=4 * LAYER):
            with pytest.raises(ValueError, match=r"model \(Sequential\) is offloaded already"):
                mt.offload(model, DEVICE, budget=4 * LAYER)
            with pytest.raises(ValueError, match=r"'0' \(Linear\) is offloaded already"):
                mt.offload(nn.Sequential(model[0], nn.Linear(3, 3)), DEVICE, budget=4 * LAYER)
        mt.offload(model, DEVICE, budget=4 * LAYER).remove()

    def test_wrapped_and_scripted_modules(self):
        with pytest.raises(TypeError, match="model is wrapped in DataParallel"):
            mt.offload(nn.DataParallel(layers(2)), DEVICE, budget=LAYER)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scripts are deprecated altogether
            traced = torch.jit.trace(layers(2), torch.rand(1, 64))
        with pytest.raises(TypeError, match="whose calls no hook sees"):
            mt.offload(traced, DEVICE, budget=LAYER)

    @pytest.mark.emulator_only
    def test_a_budget_that_is_not_free(self):
        """Refused with the sum, before anything moves."""
        run_python(
            """
            import warnings
            import torch
            from managedmem.torch import offload
            model = torch.nn.Linear(1024, 1024)  # 4 MiB and a bias
            memory = model.weight.data_ptr()
            try:
                offload(model, 0, budget=1 << 30)
            except MemoryError as error:
                text = str(error)
            assert "4,198,400 bytes of Device(0)" in text and "4,194,304 are free" in text, text
            assert model.weight.data_ptr() == memory
            warnings.simplefilter("ignore")  # a layer of 4 MiB does not fit
            with offload(model, 0, budget=1 << 20), torch.no_grad():
                model(torch.rand(2, 1024))
            with offload(model, 0, budget="auto") as handle:
                assert handle.stats()["budget"] <= 4 << 20
            """,
            emulator="capacity_mib=4",
            patience=180,  # it imports torch
        )

    def test_handles_are_made_by_the_function(self):
        with pytest.raises(TypeError, match=r"made by offload\(\)"):
            mt.Offload()

    def test_a_warning_that_is_an_error_leaves_the_model(self, on):
        model = layers(2, on=on)
        before = snapshot(model)
        with pytest.raises(UserWarning, match="nothing is streamed"):
            mt.offload(model, DEVICE, budget=PAGE)
        assert_same(before, snapshot(model), places_too=None)
        assert managed_tensors(model) == []

    def test_an_optimizer_of_another_model(self):
        optimizer = torch.optim.SGD(layers(2).parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"optimizer \(SGD\) has no parameter of the model"):
            mt.offload(layers(2), DEVICE, budget=LAYER, optimizer=optimizer)

    def test_a_device_without_concurrent_access(self):
        """Copies and page-locked memory need none."""
        run_python(
            """
            import copy, torch
            from managedmem.torch import offload
            model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
            models = [model, copy.deepcopy(model)]
            optimizers = [torch.optim.Adam(m.parameters()) for m in models]
            with offload(model, 0, budget=2 * 64 * 65 * 4, optimizer=optimizers[0]):
                for m, optimizer in zip(models, optimizers):
                    for _ in range(2):
                        optimizer.zero_grad()
                        m(torch.ones(3, 64)).sum().backward()
                        optimizer.step()
            for one, other in zip(*(m.parameters() for m in models)):
                assert torch.equal(one, other) and torch.equal(one.grad, other.grad)
            """,
            emulator="profile=wsl",
        )

    def test_an_integrated_device(self):
        run_python(
            """
            import torch, warnings
            from managedmem.torch import offload
            model = torch.nn.Linear(4, 4)
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                offload(model, 0, budget=1 << 20).remove()
            (text,) = [str(w.message) for w in seen]
            assert text.startswith("Device(0) has the memory of the host"), text
            assert seen[0].filename == "<string>", seen[0].filename
            """,
            emulator="integrated=1",
        )

    @pytest.mark.skipif(EMULATED or torch.cuda.is_available(), reason="torch has CUDA")
    def test_torch_without_cuda(self):
        with pytest.raises(ValueError, match="this torch has no CUDA device"):
            mt.offload(layers(2), Device(0), budget=LAYER)
