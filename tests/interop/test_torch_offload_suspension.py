"""Offloaded modules whose device memory is given back for a while."""

import pytest

import managedmem
from constants import EMULATED
from offloaded import LAYER, assert_same_module, batch, layers, nn, plain, same
from tensors import gpu_only, mt, torch

WIDTH, COUNT = 1024, 8
LARGE = 4 * WIDTH * WIDTH + 512 + 4 * WIDTH
DEVICE = "cuda:0"
UNIT = 2 << 20  # of the driver
BUDGETS = {"streamed": 4 * LAYER, "resident": 1 << 20}
SUSPENDED = "suspended: until resume(), all parts are used at home; then:"


def free():
    managedmem.Device(0).sync()
    return managedmem.Device(0).memory_info.free


def suspendable(model, budget, **options):
    return mt.offload(model, DEVICE, budget=budget, suspendable=True, **options)


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("read_only", [False, True])
def test_calls_are_right_before_meanwhile_and_after(budget, read_only):
    model = layers()
    with torch.inference_mode(), suspendable(model, budget, read_only=read_only) as handle:
        reference, x = plain(layers(), handle), batch(handle)
        wanted = reference(x)
        before, held = free(), handle.stats()["held"]
        places, explained = [p.data_ptr() for p in model.parameters()], handle.explain()
        for _ in range(2):
            assert same(model(x), wanted) and not handle.is_suspended
            moved = handle.stats()["bytes_home"]
            handle.suspend()
            assert handle.is_suspended and handle.stats()["held"] == handle.stats()["kept"] == 0
            assert repr(handle).endswith(", suspended>")
            told = handle.explain()
            assert told == explained and told.is_suspended
            assert str(told) == f"{SUSPENDED}\n{explained}"
            if EMULATED:  # nobody else uses this device
                parts = 2 if budget < 8 * LAYER and handle.stats()["resident"] else 1
                assert free() == before + parts * UNIT
            assert same(model(x), wanted) and handle.stats()["bytes_home"] == moved == 0
            assert_same_module(model, reference)
            handle.resume()
            assert "suspended" not in repr(handle)
            assert not handle.explain().is_suspended and str(handle.explain()) == str(explained)
            if EMULATED:
                assert free() == before
            assert [p.data_ptr() for p in model.parameters()] == places
        assert same(model(x), wanted)
        assert handle.stats()["held"] >= held and handle.last_error is None
    assert_same_module(model, layers())


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_training_goes_on(budget):
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with suspendable(model, budget, optimizer=optimizer) as handle:
        twin = plain(layers(), handle)
        theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
        for change in (handle.suspend, handle.resume, handle.suspend, lambda: None):
            for net, steps in ((model, optimizer), (twin, theirs)):
                steps.zero_grad()
                net(batch(handle)).sum().backward()
                steps.step()
            change()
            assert_same_module(model, twin)
        assert handle.is_suspended
    assert not handle.is_suspended
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert same(one, other)


def test_refusals():
    model = layers()
    with mt.offload(model, DEVICE, budget=4 * LAYER) as handle:
        with pytest.raises(RuntimeError, match="suspendable=True"):
            handle.suspend()
        handle.resume()
        assert not handle.is_suspended
    for call in (handle.suspend, handle.resume):
        with pytest.raises(RuntimeError, match="not offloaded any more"):
            call()
    with pytest.raises(TypeError, match="suspendable must be True or False, got 1"):
        mt.offload(model, DEVICE, budget=4 * LAYER, suspendable=1)
    with suspendable(model, 4 * LAYER) as handle:
        handle.suspend()
        with pytest.raises(RuntimeError, match="suspended: call resume"):
            handle.refresh()
        handle.resume()
        handle.refresh()


def test_a_call_under_way_is_refused_and_goes_on():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 64))

        def forward(self, x):
            with pytest.raises(RuntimeError, match="in use"):
                handle.suspend()
            return x @ self.weight

    model = nn.Sequential(nn.Linear(64, 64), Inside(), nn.Linear(64, 64))
    with torch.inference_mode(), suspendable(model, 2 * LAYER, places={"0": "device"}) as handle:
        reference = plain(nn.Sequential(model[0], nn.Identity(), model[2]), handle)
        x = torch.ones(2, 64).to(handle.device)
        assert same(model(x), reference[2](reference[0](x) @ torch.ones_like(model[1].weight)))
        assert not handle.is_suspended and handle.stats()["held"] > 0


@pytest.mark.parametrize("is_suspended", [False, True])
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_calls_with_nothing_to_do_change_nothing(budget, is_suspended, monkeypatch):
    def refuse(target):
        raise RuntimeError("no answer")

    with suspendable(layers(), budget) as handle:
        if is_suspended:
            handle.suspend()
        held = free()
        with monkeypatch.context() as patch:
            patch.setattr("managedmem.torch._offload_places.Target.wait", refuse)
            (handle.suspend if is_suspended else handle.resume)()
            with pytest.raises(RuntimeError, match="no answer"):
                (handle.resume if is_suspended else handle.suspend)()
        assert handle.is_suspended == is_suspended
        if EMULATED:
            assert free() == held


@pytest.mark.emulator_only("fills the device")
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_a_device_without_room_leaves_the_module_suspended(budget, monkeypatch):
    model = layers()
    with torch.inference_mode(), suspendable(model, budget) as handle:
        x = batch(handle)
        wanted = model(x)
        handle.suspend()
        taken = managedmem.WorkingSet(free() - 1000, 0)
        with taken, pytest.raises(MemoryError, match=r"resume\(\) needs [\d,]+ bytes of .*free"):
            handle.resume()
        monkeypatch.setattr("managedmem.torch._offload_suspension._check_room", lambda lanes: None)
        with managedmem.WorkingSet(free() - UNIT // 2, 0), pytest.raises(MemoryError):
            handle.resume()  # the driver finds none
        assert handle.is_suspended and handle.stats()["held"] == 0 and same(model(x), wanted)
        handle.resume()
        assert same(model(x), wanted)


def test_a_host_without_room_is_refused_the_first_time(monkeypatch):
    model = layers()
    with suspendable(model, BUDGETS["resident"]) as handle:
        monkeypatch.setattr("managedmem.torch._offload_suspension.host_available", lambda: 1000)
        with pytest.raises(MemoryError, match=r"suspend\(\) needs 1[\d,]+ .* and 1,000 are"):
            handle.suspend()
        assert not handle.is_suspended and handle.stats()["held"] > 0
        monkeypatch.undo()
        handle.suspend()
        handle.resume()
        monkeypatch.setattr("managedmem.torch._offload_suspension.host_available", lambda: 1000)
        handle.suspend()  # the host has the memory


@gpu_only
@pytest.mark.parametrize("share", [0.5, 2.0], ids=BUDGETS)
def test_captured_graphs_replay(share):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(COUNT)))
    total = COUNT * LARGE
    with torch.inference_mode(), suspendable(model, int(share * total)) as handle:
        reference, given = plain(model, handle), torch.rand(4, WIDTH, device=DEVICE)
        for _ in range(3):
            model(given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = model(given)
        got = {handle.suspend: [], handle.resume: []}  # bytes that came free
        for change in (handle.suspend, handle.resume) * 4:
            before = free()
            change()
            got[change].append(free() - before)
            given.copy_(torch.rand(4, WIDTH))
            graph.replay()
            assert torch.equal(output, reference(given))
        for change, sign in ((handle.suspend, 1), (handle.resume, -1)):
            wanted = sign * min(share, 1) * total
            # Once at least: other programs may use the device.
            assert min(abs(each - wanted) for each in got[change]) < 8 * UNIT, got
        assert handle.last_error is None
        del graph
