"""CUDA graphs over offloaded modules: a call that is captured once is right at each replay."""

import gc
import importlib

import pytest

from driver import capturing
from managedmem import Device, _managedmem
from offloaded import nn
from tensors import gpu_only, mt, torch

of_frames = importlib.import_module("managedmem.torch._offload_frames")
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


@gpu_only
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


@gpu_only
def test_a_replay_sees_weights_that_were_written_at_home():
    model = model_of()
    reference = model_of().to(DEVICE)
    with torch.inference_mode(), mt.offload(model, DEVICE, budget=COUNT * LAYER // 4):
        captured = Captured(model)
        for layer, other in zip(model, reference, strict=True):
            layer[0].weight.mul_(0.5)
            other[0].weight.mul_(0.5)
        assert torch.equal(captured(inputs(1)), reference(inputs(1)))


def framed_part(size=4096):
    """A set of frames, a part in it, and the tensor of the part."""
    device = Device(0)
    place = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    slab = _managedmem._Slab(device.device_id, size, True)
    tensor = of_frames.Span(slab, 0, size).tensor(place)
    frames = _managedmem._Frames(device.device_id, 4 * size, False)
    storages = [tensor.untyped_storage()]
    return frames, of_frames.FramedPart(frames, slab, 0, storages, [tensor], True, False), tensor


def test_a_captured_use_inside_of_a_plain_one_has_a_frame_of_its_own(stream):
    """The tensors point to the frame of the latest use that is open."""
    frames, part, tensor = framed_part()
    home = tensor.data_ptr()
    outer = part.acquire(None, False)
    with capturing(stream):
        inner = part.acquire(stream.handle, False)
        assert [tensor.data_ptr(), outer.address != inner.address] == [inner.address, True]
        assert not part.release(inner, stream.handle, False)
        assert tensor.data_ptr() == outer.address
        inner = part.acquire(stream.handle, False)
        part.release(outer, None, False)  # not the latest one
        assert tensor.data_ptr() == inner.address
        part.release(inner, stream.handle, False)
    assert tensor.data_ptr() == home
    frames.remove([part.number])  # it is in no use


def test_a_write_goes_home_from_the_frame_that_has_it(stream):
    frames, part, tensor = framed_part()
    outer = part.acquire(None, True)
    tensor.add_(1)
    with capturing(stream):
        inner = part.acquire(stream.handle, False)
        assert not part.release(inner, stream.handle, False)  # it read
    assert part.release(outer, None, False)
    again = part.acquire(None, False)
    assert not part.release(again, None, False)  # what it read was home
    frames.remove([part.number])


def test_an_exception_behind_the_begin_of_a_use_ends_it(monkeypatch):
    frames, part, tensor = framed_part()
    home = tensor.data_ptr()
    point = part._point_to

    def fail(start):
        point(start)
        if start != home:
            raise ZeroDivisionError

    monkeypatch.setattr(part, "_point_to", fail)
    with pytest.raises(ZeroDivisionError):
        part.acquire(None, False)
    monkeypatch.undo()
    assert part.uses == [] and tensor.data_ptr() == home
    frames.remove([part.number])
