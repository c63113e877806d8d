"""CUDA graphs over offloaded modules: a call that is captured once is right at each replay."""

import gc

import pytest

from offloaded import nn
from tensors import gpu_only, mt, torch

pytestmark = gpu_only

COUNT, WIDTH = 16, 1024
LAYER = 4 * WIDTH * WIDTH + 512
DEVICE = "cuda:0"


def model_of(count=COUNT):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(count))
    )


def inputs(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(4, WIDTH, generator=generator).to(DEVICE)


class Captured:
    """A call of a model that is captured once."""

    def __init__(self, model):
        self.input = inputs(0)
        for _ in range(3):
            model(self.input)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = model(self.input)

    def __call__(self, given):
        self.input.copy_(given)
        self.graph.replay()
        return self.output.clone()


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_replays_have_the_numbers_of_plain_calls(share):
    model = model_of()
    reference = model_of().to(DEVICE)
    with torch.inference_mode(), mt.offload(model, DEVICE, budget=int(share * COUNT * LAYER)) as h:
        assert h.stats()["streamed"] > 0
        captured = Captured(model)
        for seed in range(4):
            assert torch.equal(captured(inputs(seed)), reference(inputs(seed)))
            assert torch.equal(model(inputs(seed + 9)), reference(inputs(seed + 9)))
        assert h.last_error is None
        del captured
        gc.collect()
        assert torch.equal(model(inputs(1)), reference(inputs(1)))


def test_a_replay_sees_weights_that_were_written_at_home():
    model = model_of()
    reference = model_of().to(DEVICE)
    with torch.inference_mode(), mt.offload(model, DEVICE, budget=COUNT * LAYER // 4):
        captured = Captured(model)
        for layer, other in zip(model, reference, strict=True):
            layer[0].weight.mul_(0.5)
            other[0].weight.mul_(0.5)
        assert torch.equal(captured(inputs(1)), reference(inputs(1)))
