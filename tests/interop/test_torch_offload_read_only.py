"""offload(read_only=True): a check that nothing writes parameters."""

import copy
import warnings

import pytest

from offloaded import assert_same_module, managed_tensors, nn, plain, same
from offloaded import batch as make_batch
from offloaded import layers as make_layers
from tensors import mt, torch

DEVICE = "cuda:0"
WIDTH = 520  # so that a layer has more than 1 MiB
LAYER = WIDTH * WIDTH * 4 + 2560  # with a bias, each at 512 bytes


def layers(count=8, on="cpu"):
    return make_layers(count, on, WIDTH)


def batch(handle):
    return make_batch(handle, 4, WIDTH)


@pytest.mark.parametrize("budget", [2 * LAYER, 5 * LAYER, 100 * LAYER])
def test_numbers_of_the_plain_module(on, budget):
    model = layers(on=on)
    original = copy.deepcopy(model)
    with mt.offload(model, DEVICE, budget=budget, read_only=True) as handle:
        reference, inputs = plain(original, handle), batch(handle)
        with torch.inference_mode():
            for _ in range(3):
                assert same(model(inputs), reference(inputs))
                assert handle.stats()["held"] <= budget
        assert_same_module(model, original)
    assert_same_module(model, original)
    assert managed_tensors(model) == []


def test_memory_that_is_managed_already(on):
    model = layers(4, on=on)
    original = copy.deepcopy(model)
    mt.to_managed(model[0])
    with mt.offload(model, DEVICE, budget=2 * LAYER, read_only=True) as handle:
        reference, inputs = plain(original, handle), batch(handle)
        with torch.no_grad():
            assert same(model(inputs), reference(inputs))
    assert_same_module(model, original)


class TestWrites:
    """They are errors afterwards, and are kept."""

    @pytest.mark.parametrize("inference", [False, True])
    def test_the_next_call_of_the_module_names_the_parameter(self, on, inference):
        model = layers(4, on=on)
        want = model[2].bias.detach().cpu() + 1
        handle = mt.offload(model, DEVICE, budget=2 * LAYER, read_only=True)
        inputs = batch(handle)
        model(inputs)
        with torch.inference_mode(inference), torch.no_grad():
            model[2].bias.add_(1)
            with pytest.raises(RuntimeError, match=r"'2.bias' was written although .*=True"):
                model(inputs)
        with pytest.warns(UserWarning, match=r"read_only=True: '2.bias'\. The writes are kept"):
            handle.remove()
        assert same(model[2].bias.detach().cpu(), want)
        assert managed_tensors(model) == []

    def test_of_a_state_dict(self, on):
        model = layers(4, on=on)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        handle = mt.offload(model, DEVICE, budget=2 * LAYER, read_only=True)
        model.load_state_dict(state)
        with pytest.raises(RuntimeError, match=r"'0.weight' was written"):
            model(batch(handle))
        with pytest.warns(UserWarning, match=r"True: '0.weight', '0.bias', '2.weight', \.\.\."):
            handle.remove()

    def test_the_warning_is_for_the_line_of_the_program(self, on):
        model = layers(4, on=on)
        with pytest.warns(UserWarning, match="written while the module was offloaded") as warned:
            with mt.offload(model, DEVICE, budget=2 * LAYER, read_only=True), torch.no_grad():
                model[2].bias.add_(1)
        assert [warning.filename for warning in warned] == [__file__]

    def test_what_stays_on_the_device_may_be_written(self, on):
        model = layers(4, on=on)
        want = model[2].weight.detach().cpu() + 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with mt.offload(model, DEVICE, budget=100 * LAYER, read_only=True) as handle:
                model(batch(handle))
                with torch.no_grad():
                    model[2].weight.add_(1)
                model(batch(handle))
        assert same(model[2].weight.cpu(), want)

    def test_statistics_may_be_written(self, on):
        """Small buffers stay on the device, and are copied home."""
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        ).to(on)
        original = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with mt.offload(model, DEVICE, budget=2 * LAYER, read_only=True) as handle:
                reference, inputs = plain(original, handle), batch(handle)
                for _ in range(3):
                    assert same(model(inputs), reference(inputs))
        assert_same_module(model, reference)
