"""The budget of offload() is memory: bytes that the driver gives, and what a round has to load."""

import gc

import pytest

from constants import BUDGET, PAGE
from managedmem import Device, emulator
from offloaded import LAYER, batch, layers
from removed_handles import offload_for_a_test
from tensors import mt, torch

DEVICE = "cuda:0"
offloaded = pytest.fixture(offload_for_a_test)


def taken():
    """Bytes of the first device that the driver has given away."""
    info = Device(0).memory_info
    return info.total - info.free


def test_the_budget_is_kept_in_every_layer(on, offloaded):
    model = layers(on=on)
    handle = offloaded(model, budget=5 * LAYER)
    held = []
    for layer in model:
        layer.register_forward_hook(lambda *_: held.append(handle.stats()["held"]))
    for _ in range(3):
        model(batch(handle))
    assert 0 < max(held) <= 5 * LAYER


@pytest.mark.parametrize("fit", [3, 4, 6, 7])
def test_a_round_loads_what_does_not_fit(on, offloaded, fit):
    """And at most the frames for one part in use, and for the next one."""
    model = layers(on=on)
    handle = offloaded(model, budget=fit * LAYER)
    loaded = []
    with torch.no_grad():
        for _ in range(6):
            model(batch(handle))
            loaded.append(handle.stats()["bytes_loaded"])
    numbers = handle.stats()
    assert numbers["streamed"] + numbers["resident"] == 8 * LAYER
    assert numbers["streamed"] <= (8 - fit + 2) * LAYER
    assert loaded[5] - loaded[2] <= 3 * numbers["streamed"]


@pytest.mark.emulator_only
@pytest.mark.parametrize("fit", [1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize("kind", ["inference", "training"])
@pytest.mark.filterwarnings("ignore:.*(nothing is streamed|without a call that)")
def test_the_device_gives_at_most_the_budget(offloaded, kind, fit):
    """As cuMemGetInfo has it, at every moment."""
    model = layers()
    budget = fit * LAYER
    optimizer = torch.optim.Adam(model.parameters()) if kind == "training" else None
    start = taken()
    emulator.clear_counters()  # the peak is that of every moment from here on
    handle = offloaded(model, 0, budget=budget, optimizer=optimizer)
    for _ in range(3):
        loss = model(batch(handle)).square().mean()
        if optimizer is not None:
            loss.backward()
            optimizer.step()
    assert handle.stats()["budget"] <= budget
    handle.remove()
    most = emulator.frames(Device(0)).peak - start
    assert most <= budget + 2 * PAGE  # of two allocations, in whole pages
    assert most >= budget // 2 or fit == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: a model of 8 GB")
def test_of_a_model_of_8_gb():
    if BUDGET < 512 << 20:
        pytest.skip("other tests run at the same time, and the driver counts their memory too")
    if Device(0).memory_info.free < 24 << 30:
        pytest.skip("needs 24 GiB of free memory on the GPU")
    width, budget, most = 8192, 2 << 30, [0]
    inputs = torch.ones(1, width, dtype=torch.bfloat16, device="cuda")
    (inputs @ torch.ones(width, 64, dtype=torch.bfloat16, device="cuda")).sum().item()
    gc.collect()
    torch.cuda.empty_cache()
    start = taken()
    with torch.device("meta"):
        each = [torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(60)]
    model = torch.nn.Sequential(*each).to_empty(device="cpu")
    for number, layer in enumerate(model):
        layer.weight.detach().fill_(2.0 ** -(number % 2) / width)
        layer.register_forward_hook(lambda *_: most.append(taken() - start))
    with mt.offload(model, DEVICE, budget=budget) as handle, torch.inference_mode():
        for _ in range(3):
            output = model(inputs)
        torch.cuda.synchronize()
        assert handle.stats()["streamed"] > 5 << 30
        assert max(most) <= 1.05 * budget
        assert torch.equal(output, torch.full_like(output, 2.0**-30))
    gc.collect()
    torch.cuda.empty_cache()
    assert taken() - start < 1 << 28
