"""share_memory(), load_model(group=...) and replicate(): one home for several ranks or devices."""

import gc
import importlib
import json
import threading

import pytest

import managedmem
from constants import EMULATED
from offloaded import LAYER, assert_same_module, batch, layers, nn, plain, same
from programs import run_python
from tensors import mt, torch

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs a torch with gloo", allow_module_level=True)

_Slab = managedmem._managedmem._Slab
frames = importlib.import_module("managedmem.torch._offload_frames")
places = importlib.import_module("managedmem.torch._offload_places")
DEVICE = 0
BUDGET = 3 * LAYER
SCENARIOS = (
    "one_copy_for_a_rank_with_weights_and_one_without",
    "each_may_drop_it_at_any_time",
    "ranks_read_files_together",
    "other_models_are_refused_by_all",
    "an_error_of_one_is_raised_in_all",
    "trained_parameters_are_private",
    "nothing_writes_shared_memory",
    "each_host_has_a_copy",
    "rank_0_killed_in_a_load_read_piece",
    "rank_0_killed_in_a_load_mapped",
    "rank_0_killed_in_a_share_mapped",
    "rank_1_killed_in_a_load_read_piece",
    "rank_1_killed_in_a_load_mapped",
    "rank_1_killed_in_a_share_mapped",
    "rank_0_killed_in_a_load_memory_file",
    "rank_0_killed_in_a_share_copy",
    "rank_1_killed_in_a_share_compared",
    "rank_0_killed_in_a_round",
    "rank_1_killed_in_a_round",
    "all_killed_leave_nothing",
    "each_ends_as_a_program_does",
)


@pytest.fixture(scope="module")
def findings():
    """What went wrong in each scenario: one program, as each import of torch takes seconds."""
    if not EMULATED:
        pytest.skip("the ranks are forked on the emulated driver")
    done = run_python("import sharing; sharing.main(sharing.SCENARIOS)", patience=180)
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks(findings, name):
    assert findings[name] is None, findings[name]


def test_all_scenarios_are_tests(findings):
    assert list(findings) == list(SCENARIOS)


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def model(tmp_path):
    """Layers in memory of load_model()."""
    model = layers()
    mt.save_file(model, tmp_path / "model.safetensors")
    mt.load_model(model, tmp_path / "model.safetensors", device=DEVICE)
    return model


class TestShareMemory:
    def test_of_one_rank(self, alone):
        model, reference = layers(), layers()
        mine = list(model.parameters())
        gradient = mine[0].grad = torch.ones(64, 64)
        assert mt.share_memory(model, device=DEVICE) == sum(p.nbytes for p in mine)
        assert all(a is b for a, b in zip(mine, model.parameters(), strict=True))
        slab = _Slab.at(mine[0].data_ptr(), 1)
        assert slab.is_shared and _Slab.at(mine[-1].data_ptr(), 1).handle == slab.handle
        assert mine[0].grad is gradient
        mine[0].grad = None
        assert_same_module(model, reference)
        assert mt.share_memory(model) > 0  # into another memory
        assert _Slab.at(mine[0].data_ptr(), 1).handle != slab.handle
        assert mt.share_memory(nn.ReLU()) == 0

    def test_the_meta_device_needs_somebody_with_contents(self, alone):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4))
        with pytest.raises(ValueError, match=r"'0.weight' .* on the meta device in all ranks"):
            mt.share_memory(model)

    def test_an_offloaded_module_is_refused(self, alone, model):
        other = mt.replicate(model)
        with mt.offload(model, DEVICE, budget=BUDGET, read_only=True):
            with pytest.raises(ValueError, match=r"is offloaded: call remove\(\)"):
                mt.share_memory(model)
            with pytest.raises(ValueError, match=r"memory of '0.weight' of another offloaded"):
                mt.share_memory(other)

    def test_needs_a_group(self):
        with pytest.raises(RuntimeError, match="there is no process group"):
            mt.share_memory(layers())

    def test_a_sparse_tensor_is_refused(self, alone):
        model = layers(1)
        model.register_buffer("sparse", torch.eye(3).to_sparse())
        with pytest.raises(ValueError, match=r"'sparse' .* layout"):
            mt.share_memory(model)

    def test_adapters_that_train_beside_a_frozen_base(self, alone):
        """A module with both is two parts: the base stays."""

        class Adapted(nn.Module):
            def __init__(self):
                super().__init__()
                self.base = nn.Linear(64, 64)
                self.adapter = nn.Linear(64, 64, bias=False)
                self.base.requires_grad_(False)

            def forward(self, x):
                return self.base(x) + self.adapter(x)

        torch.manual_seed(0)
        model = nn.Sequential(*(Adapted() for _ in range(6)))
        mt.share_memory(model, device=DEVICE)
        home = _Slab.at(model[0].base.weight.data_ptr(), 1)
        with mt.offload(model, DEVICE, budget=5 * LAYER, blocks=list(model)) as handle:
            parts = handle._lanes[0].plan.streamed
            assert {part.is_shared for part in parts} == {False, True}
            reference = plain(model, handle)
            assert same(model(batch(handle)), reference(batch(handle)))
        assert _Slab.at(model[0].base.weight.data_ptr(), 1).handle == home.handle

    def test_a_module_that_may_write_through_data_has_a_copy(self, alone):
        class Writing(nn.Linear):
            def forward(self, x):
                self.weight.data.add_(1)
                return super().forward(x)

        torch.manual_seed(0)
        model = nn.Sequential(*(Writing(64, 64) for _ in range(6))).requires_grad_(False)
        before = [layer.weight.clone() for layer in model]
        mt.share_memory(model, device=DEVICE)
        memory = [layer.weight.data for layer in model]
        with mt.offload(model, DEVICE, budget=BUDGET) as handle:
            model(batch(handle))
        for layer, old, kept in zip(model, before, memory, strict=True):
            assert same(kept, old) and same(layer.weight, old + 1)

    @pytest.mark.parametrize("budget", [BUDGET, 100 * LAYER])
    def test_statistics_return_in_memory_of_their_own(self, alone, budget):
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), *layers(4))
        reference = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), *layers(4))
        reference.load_state_dict(model.state_dict())
        mt.share_memory(model, device=DEVICE)
        shared = model[1].running_mean.data
        weight = model[0].weight.data_ptr()
        for each in (model, reference):
            each.requires_grad_(False)
        handle = mt.offload(model, DEVICE, budget=budget)
        inputs = batch(handle)
        assert same(model(inputs), reference.to(handle.device)(inputs))
        handle.remove()
        assert_same_module(model, reference)
        assert not shared.any() and model[1].running_mean.data_ptr() != shared.data_ptr()
        assert model[0].weight.data_ptr() == weight


class TestReplicate:
    def test_two_devices_stream_one_home(self, model):
        if managedmem.Device.count() < 2:
            pytest.skip("needs two devices")
        reference = layers()
        homes = [p.data_ptr() for p in model.parameters()]
        handles = [mt.offload(model, 0, budget=BUDGET, read_only=True)]
        second = mt.replicate(model)  # of a module that is offloaded, too
        assert mt.Offload.of(second) is None and type(second) is type(model)
        assert [p.data_ptr() for p in second.parameters()] == homes
        handles.append(mt.offload(second, 1, budget=BUDGET, read_only=True))
        expected = [plain(reference, handle)(batch(handle)) for handle in handles]
        wrong = []

        def run(each, handle, result):
            with torch.no_grad():
                for _ in range(10):
                    if not same(each(batch(handle)), result):
                        wrong.append(handle)

        threads = [
            threading.Thread(target=run, args=arguments)
            for arguments in zip((model, second), handles, expected, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        for handle in handles:
            numbers = handle.stats()
            assert numbers["loads"] and not numbers["failures"] and not numbers["bytes_home"]
        handles[0].remove()
        with torch.no_grad():
            assert same(second(batch(handles[1])), expected[1])
        handles[1].remove()
        assert [p.data_ptr() for p in second.parameters()] == homes
        assert_same_module(second, reference)
        del model, handle, handles
        gc.collect()
        assert_same_module(second, reference)

    def test_what_lies_elsewhere_is_copied(self, model):
        model.extra = nn.Linear(3, 3)
        model[0].weight.mark = "kept"
        model[2].weight = model[0].weight
        model.eval()
        second = mt.replicate(model)
        assert_same_module(second, model)
        assert second.extra.weight.data_ptr() != model.extra.weight.data_ptr()
        assert second[0].weight.mark == "kept" and second[2].weight is second[0].weight
        assert second[0].weight is not model[0].weight and not second.training
        with mt.offload(model, DEVICE, budget=BUDGET, read_only=True):
            third = mt.replicate(model)
            assert third.extra.weight.device.type == "cpu"
            assert third[0].weight.data_ptr() == second[0].weight.data_ptr()
            assert_same_module(third, second)

    def test_of_modules_that_are_offloaded_one_by_one(self, model, tmp_path):
        both = nn.Sequential(model, layers())
        mt.save_file(both[1], tmp_path / "second.safetensors")
        mt.load_model(both[1], tmp_path / "second.safetensors", device=DEVICE)
        homes = [p.data_ptr() for p in both.parameters()]
        with mt.offload(both[0], DEVICE, budget=BUDGET, read_only=True):
            with mt.offload(both[1], DEVICE, budget=BUDGET, read_only=True):
                assert [p.data_ptr() for p in mt.replicate(both).parameters()] == homes
            with mt.offload(both[1], DEVICE, budget=BUDGET):
                with pytest.raises(ValueError, match="is offloaded without read_only=True"):
                    mt.replicate(both)

    def test_parameters_that_are_written_have_one_module(self, model):
        second = mt.replicate(model)
        with mt.offload(model, DEVICE, budget=BUDGET, read_only=True):
            with pytest.raises(ValueError, match=r"'0.weight' of another offloaded model"):
                mt.offload(second, DEVICE, budget=BUDGET)
        with mt.offload(model, DEVICE, budget=BUDGET):
            with pytest.raises(ValueError, match=r"'0.weight' of another offloaded model"):
                mt.offload(second, DEVICE, budget=BUDGET, read_only=True)
            with pytest.raises(ValueError, match="is offloaded without read_only=True"):
                mt.replicate(model)
        with mt.offload(model, DEVICE, budget=BUDGET, read_only=True):
            third = nn.Sequential(model[0])
            with pytest.raises(ValueError, match="is offloaded already"):
                mt.offload(third, DEVICE, budget=BUDGET, read_only=True)
            third = nn.Sequential(nn.Linear(64, 64))
            third[0].weight.data = model[0].weight.data
            with pytest.raises(ValueError, match=r"'0.weight' of another offloaded model"):
                mt.offload(third, DEVICE, budget=BUDGET, read_only=True)

    @pytest.mark.parametrize(
        ("argument", "error", "words"),
        [
            (7, TypeError, "module must be a torch.nn.Module, got int"),
            (nn.Linear(2, 2), ValueError, "no tensor of the module is in memory of load_model"),
        ],
    )
    def test_bad_arguments(self, argument, error, words):
        with pytest.raises(error, match=words):
            mt.replicate(argument)


def test_a_tensor_of_another_device_has_the_same_memory(model, monkeypatch):
    """On a GPU it is one of that device; here, of the CPU."""
    weight = model[0].weight.detach()
    if EMULATED:
        monkeypatch.setattr(frames, "_DLPACK_CUDA", 1)
    second = frames._on_another(weight, 0)
    assert second.data_ptr() == weight.data_ptr() and same(second, weight)
    expected = weight.clone()
    del model, weight
    gc.collect()
    assert same(second, expected)
