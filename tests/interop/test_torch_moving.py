"""to_managed() against real torch: what moves, what stays, and that it is all or nothing."""

import collections
import gc
import os

import pytest

import managedmem
from constants import EMULATED, MIB, PAGE
from managedmem import Device, Host, ManagedBuffer, emulator
from tensors import DTYPES, assert_same, gpu_only, mt, small_model, snapshot, tensors_of, torch
from whole_programs import run_to_the_end

named_before = set()


@pytest.fixture(autouse=True)
def memory_of_other_tests():
    named_before.clear()
    named_before.update(names_of_memory())


def names_of_memory():
    """The memories that got a name in this test and live: {address: (name, bytes)}."""
    gc.collect()
    found = [b for b in gc.get_objects() if isinstance(b, ManagedBuffer) and b.name]
    found = [b for b in found if b.handle not in named_before]
    # A view has its root's name, and is smaller.
    return {b.handle: (b.name, b.size) for b in sorted(found, key=lambda b: b.size)}


class TestToManaged:
    def test_objects_values_and_layout_stay(self, on):
        model = small_model(on)
        model.first.weight.requires_grad_(False)
        before = snapshot(model)
        keys = list(model.state_dict())
        assert mt.to_managed(model) is model
        assert_same(before, snapshot(model), places_too=False)
        assert all(mt.is_managed(t) for t in tensors_of(model))
        assert list(model.state_dict()) == keys
        assert model.tied.weight is model.first.weight

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype(self, on, dtype):
        bits = torch.arange(240, dtype=torch.uint8, device=on) % 2
        tensor = bits.view(dtype) if dtype != torch.bool else bits.bool()
        expected = tensor.cpu().view(torch.uint8).tolist()
        mt.to_managed(tensor)
        assert mt.is_managed(tensor)
        assert tensor.dtype == dtype
        assert tensor.device == torch.device(on)
        assert tensor.cpu().view(torch.uint8).tolist() == expected

    def test_strides(self, on):
        module = torch.nn.Module()
        module.last = torch.nn.Parameter(
            torch.rand(2, 3, 4, 5, device=on).to(memory_format=torch.channels_last)
        )
        module.register_buffer("flipped", torch.rand(6, 7, device=on).t())
        module.register_buffer("every_second", torch.rand(20, device=on)[1::2])
        module.register_buffer("wide", torch.rand(3, 1, device=on).expand(3, 9))
        before = snapshot(module)
        mt.to_managed(module)
        assert_same(before, snapshot(module), places_too=False)
        assert module.last.is_contiguous(memory_format=torch.channels_last)

    def test_what_shares_memory_shares_it_afterwards(self, on):
        base = torch.arange(3000.0, device=on)
        module = torch.nn.Module()
        module.whole = torch.nn.Parameter(base)
        module.part = torch.nn.Parameter(base[1000:1010])
        module.register_buffer("column", base.view(100, 30)[:, 3])
        module.register_buffer("bytes", base.view(torch.uint8)[4:8])
        mt.to_managed(module)
        with torch.no_grad():
            module.whole.mul_(2)
        assert module.part.tolist() == [2.0 * i for i in range(1000, 1010)]
        assert module.column[1].item() == 66.0
        assert module.bytes.view(torch.float32).item() == 2.0
        assert module.part.untyped_storage().data_ptr() == module.whole.untyped_storage().data_ptr()

    def test_different_storages_over_one_memory_stay_together(self):
        """Such as two arrays over one file: torch does not know that they overlap."""
        raw = bytearray(range(200))
        one = torch.frombuffer(raw, dtype=torch.uint8, offset=2, count=100)
        two = torch.frombuffer(raw, dtype=torch.int16, offset=52, count=50)
        module = torch.nn.Module()
        module.register_buffer("one", one)
        module.register_buffer("two", two)
        expected = two.tolist()
        mt.to_managed(module)
        assert module.two.data_ptr() - module.one.data_ptr() == 50
        assert module.two.tolist() == expected
        module.one[50:52] = 0
        assert module.two[0] == 0
        module.two[1] = 0x0101
        assert module.one[52:54].tolist() == [1, 1]

    def test_a_shorter_storage_at_the_same_address_comes_first(self):
        raw = bytearray(range(200))
        module = torch.nn.Module()
        for name, count in (("start", 10), ("whole", 200)):
            module.register_buffer(name, torch.frombuffer(raw, dtype=torch.uint8, count=count))
        mt.to_managed(module)
        assert module.whole.tolist() == [*range(200)]
        assert module.start.data_ptr() == module.whole.data_ptr()

    def test_only_the_used_part_of_a_storage_moves(self, on):
        base = torch.rand(4 * MIB, device=on)
        part = base[MIB : MIB + 10]
        expected = part.tolist()
        mt.to_managed(part)
        assert part.tolist() == expected
        assert part.untyped_storage().nbytes() < MIB
        assert not mt.is_managed(base)

    def test_most_of_a_storage_takes_the_rest_along(self, on):
        """As cuDNN's padding behind the weights of a recurrent network."""
        base = torch.rand(1000, device=on)
        part = base[10:900]
        mt.to_managed(part)
        assert part.untyped_storage().nbytes() == 4000
        assert part.storage_offset() == 10

    def test_storages_begin_on_pages_of_their_own(self, on):
        model = mt.to_managed(small_model(on))
        sizes = {t.data_ptr(): -(-t.nbytes // PAGE) * PAGE for t in tensors_of(model)}
        assert all(start % PAGE == 0 for start in sizes)
        ends = {start + size for start, size in sizes.items()}
        assert len(ends - set(sizes)) == 1  # nothing lies between them

    def test_managed_memory_stays_where_it_is(self, managed, on):
        module = torch.nn.Linear(3, 4).to(on)
        module.weight = torch.nn.Parameter(managed((4, 3)))
        there = module.weight.data_ptr()
        mt.to_managed(module)
        assert module.weight.data_ptr() == there
        before = snapshot(module)
        mt.to_managed(module)
        assert_same(before, snapshot(module))

    def test_memory_is_freed_with_the_last_tensor(self, on):
        model = mt.to_managed(small_model(on))
        kept = model.second.weight.detach()
        address = kept.data_ptr()
        del model
        gc.collect()
        assert mt.is_managed(kept)
        del kept
        gc.collect()
        assert not ManagedBuffer.from_handle(address, 1).is_managed

    def test_memory_has_the_qualified_names(self, on):
        model = mt.to_managed(small_model(on))
        names = names_of_memory()
        for name, tensor in model.named_parameters():
            assert names[tensor.data_ptr()] == (name, PAGE)
        for name, tensor in model.named_buffers():
            assert names[tensor.data_ptr()][0] == name
        del model, tensor
        gc.collect()
        assert names_of_memory() == {}

    def test_memory_that_tensors_share_has_all_their_names(self, on):
        base = torch.arange(3000.0, device=on)
        module = torch.nn.Module()
        for i in range(3):
            module.register_buffer(f"part{i}", base[1000 * i :][:1000])
        mt.to_managed(module)
        assert list(names_of_memory().values()) == [("part0, part1, part2", 3 * PAGE)]

    def test_long_names_are_shortened(self, on):
        def names_of(*names):
            base = torch.zeros(len(names), device=on)
            module = torch.nn.Module()
            for i, name in enumerate(names):
                module.register_buffer(name, base[i : i + 1])
            mt.to_managed(module)
            [(name, _)] = names_of_memory().values()
            return name

        assert names_of("x" * 200) == "x" * 200
        assert names_of("start" + "é" * 100) == "..." + "é" * 98
        assert names_of(*(f"tensor_number_{i}" for i in range(20))) == "tensor_number_0 and 19 more"
        assert names_of("a\0b\udc80") == "a?b?"

    def test_a_tensor_alone_has_no_name(self, on):
        tensor = mt.to_managed(torch.zeros(3, device=on))
        assert mt.is_managed(tensor)
        assert names_of_memory() == {}

    def test_at_interpreter_exit_tensors_may_live(self, on):
        run_to_the_end(
            f"""
            import torch, managedmem.torch
            model = managedmem.torch.to_managed(torch.nn.Linear(30, 40).to({on!r}))
            kept = [model, model.weight.detach()]
            kept.append(kept)
            torch.kept = model.bias.data
            """,
            driver=os.environ["MANAGEDMEM_DRIVER"],
        )

    def test_an_optimizer_keeps_working(self, on):
        """Same numbers as with a module that stays where it is, moved between two steps."""

        def train(move):
            model = small_model(on)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for step in range(6):
                if move and step == 3:
                    mt.to_managed(model)
                    mt.to_managed(optimizer)
                optimizer.zero_grad()
                torch.manual_seed(step)
                (model(torch.rand(8, 7, device=on)) ** 2).mean().backward()
                optimizer.step()
            return model, optimizer

        plain, _ = train(move=False)
        moved, optimizer = train(move=True)
        for a, b in zip(plain.parameters(), moved.parameters(), strict=True):
            assert torch.equal(a, b)
        for state in optimizer.state.values():
            assert mt.is_managed(state["exp_avg"])
            assert mt.is_managed(state["exp_avg_sq"])
            assert not mt.is_managed(state["step"])

    def test_hooks_and_gradients_stay(self, on):
        model = small_model(on)
        seen = []
        model.first.weight.register_hook(lambda gradient: seen.append(gradient.shape))
        model(torch.rand(4, 7, device=on)).sum().backward()
        gradient = model.first.weight.grad
        mt.to_managed(model)
        assert model.first.weight.grad is gradient
        model(torch.rand(4, 7, device=on)).sum().backward()
        assert seen == [(33, 7)] * 2
        assert model.first.weight.grad is gradient

    def test_moving_between_forward_and_backward(self, on):
        model = torch.nn.Linear(3, 2).to(on)
        x = torch.rand(5, 3, device=on, requires_grad=True)
        loss = model(x).sum()
        mt.to_managed(model)
        loss.backward()
        assert torch.allclose(x.grad, model.weight.sum(0).expand(5, 3))

    def test_a_recurrent_network_keeps_its_flat_weights(self, on):
        model = torch.nn.LSTM(4, 6, num_layers=2).to(on)
        x = torch.rand(3, 2, 4, device=on)
        with torch.no_grad():
            expected = model(x)[0]
            mt.to_managed(model)
            assert torch.equal(model(x)[0], expected)  # a warning about flat weights would fail

    def test_inside_of_inference_mode(self, on):
        model = torch.nn.Linear(3, 2).to(on)
        with torch.inference_mode():
            mt.to_managed(model)
        assert not model.weight.is_inference()
        model(torch.ones(1, 3, device=on)).sum().backward()
        assert model.weight.grad is not None

    def test_a_model_that_is_made_in_inference_mode(self, on):
        with torch.inference_mode():
            model = torch.nn.Linear(3, 2).to(on)
            expected = model(torch.ones(1, 3, device=on))
            mt.to_managed(model)
            assert model.weight.is_inference()
            assert torch.equal(model(torch.ones(1, 3, device=on)), expected)

    def test_empty_tensors_and_modules(self, on):
        module = torch.nn.Module()
        module.register_buffer("nothing", torch.empty(0, 3, device=on))
        assert mt.to_managed(module) is module
        assert module.nothing.shape == (0, 3)
        assert mt.to_managed(torch.nn.ReLU()) is not None

    def test_saved_and_loaded(self, on, tmp_path):
        model = mt.to_managed(small_model(on))
        torch.save(model.state_dict(), tmp_path / "model.pt")
        assert (tmp_path / "model.pt").stat().st_size < 64 * 1024
        other = mt.to_managed(small_model(on))
        with torch.no_grad():
            other.first.weight.zero_()
        places = [t.data_ptr() for t in tensors_of(other)]
        other.load_state_dict(torch.load(tmp_path / "model.pt"))
        assert [t.data_ptr() for t in tensors_of(other)] == places
        assert torch.equal(model.first.weight, other.first.weight)


class TestToManagedFails:
    """Whatever goes wrong, the module is as it was."""

    @pytest.fixture
    def model(self, on):
        model = small_model(on)
        before = snapshot(model)
        yield model
        assert_same(before, snapshot(model))

    @pytest.mark.emulator_only
    def test_out_of_memory(self, model):
        emulator.fail("cuMemAllocManaged", code=2)
        with pytest.raises(managedmem.CUDAOutOfMemoryError):
            mt.to_managed(model)
        assert not any(mt.is_managed(t) for t in tensors_of(model))

    @pytest.mark.emulator_only
    def test_every_driver_call_in_turn(self):
        with emulator.recording() as calls:
            kept = mt.to_managed(small_model())
        del kept
        made = collections.Counter()
        for call in calls:
            made[call.name] += 1
            model = small_model()
            before = snapshot(model)
            emulator.clear_failures()
            emulator.fail(call.name, nth=made[call.name])
            try:
                mt.to_managed(model)
            except managedmem.CUDAError:
                assert_same(before, snapshot(model))
            else:
                assert_same(before, snapshot(model), places_too=False)
            assert emulator.failure_fired()
        assert made["cuMemAllocManaged"] == 1

    def test_meta_and_lazy_parameters(self, model):
        both = torch.nn.ModuleDict({"good": model, "bad": torch.nn.Linear(2, 3, device="meta")})
        with pytest.raises(ValueError, match=r"'bad.weight'.*to_empty"):
            mt.to_managed(both)
        both["bad"] = torch.nn.LazyLinear(3)
        with pytest.raises(ValueError, match=r"'bad.weight'.*run the module once"):
            mt.to_managed(both)

    def test_sparse_buffers(self, model, on):
        both = torch.nn.ModuleDict({"good": model, "bad": torch.nn.Module()})
        both["bad"].register_buffer("graph", torch.eye(3, device=on).to_sparse())
        with pytest.raises(ValueError, match=r"'bad.graph'.*layout sparse_coo"):
            mt.to_managed(both)

    def test_lazy_conjugates(self, model, on):
        lazy = torch.ones(3, dtype=torch.complex64, device=on).conj()
        with pytest.raises(ValueError, match="resolve_conj"):
            mt.to_managed(lazy)

    def test_a_tensor_that_cannot_change(self, model, on):
        class Fixed(torch.nn.Parameter):
            @property
            def data(self):
                return self.detach()

            @data.setter
            def data(self, value):
                raise RuntimeError("fixed")

        both = torch.nn.ModuleDict({"good": model, "bad": torch.nn.Module()})
        both["bad"].register_parameter("last", Fixed(torch.ones(3, device=on)))
        before = snapshot(both)
        with pytest.raises(RuntimeError, match="fixed"):
            mt.to_managed(both)
        assert_same(before, snapshot(both))

    def test_storages_at_odd_distances(self):
        raw = bytearray(100)
        module = torch.nn.Module()
        module.register_buffer("bytes", torch.frombuffer(raw, dtype=torch.uint8, offset=1))
        module.register_buffer("words", torch.frombuffer(raw, dtype=torch.int32, offset=4))
        places = [t.data_ptr() for t in module.buffers()]
        with pytest.raises(ValueError, match="not a multiple of its element size"):
            mt.to_managed(module)
        assert [t.data_ptr() for t in module.buffers()] == places

    @pytest.mark.parametrize("bad", [None, 3, "module", [], {}], ids=repr)
    def test_what_is_no_module(self, bad):
        with pytest.raises(TypeError, match="a module, an optimizer or a tensor"):
            mt.to_managed(bad)

    @pytest.mark.parametrize(
        ("bad", "error", "text"),
        [
            ("meta", ValueError, "device must be the CPU or a CUDA device, got meta"),
            ("mps", ValueError, "device must be the CPU or a CUDA device, got mps"),
            ("nonsense", ValueError, "device must be the CPU or a CUDA device, got 'nonsense'"),
            (2.5, TypeError, "device must be a torch.device, a Device, a str or an int, got 2.5"),
        ],
    )
    def test_bad_devices(self, model, bad, error, text):
        with pytest.raises(error, match=text):
            mt.to_managed(model, device=bad)

    @pytest.mark.skipif(not EMULATED, reason="a GPU can have CUDA tensors")
    def test_no_cuda_tensors_over_the_emulated_driver(self, model):
        with pytest.raises(ValueError, match=r"no CUDA device|emulated driver"):
            mt.to_managed(model, device="cuda:0")
        with pytest.raises(ValueError, match=r"device is cuda:0, but .*(no CUDA|emulated driver)"):
            mt.to_managed(model, device=managedmem.Device(0))


# --- what needs a GPU ---------------------------------------------------------------------


@gpu_only
class TestOnGpu:
    def train(self, move):
        model = small_model("cuda")
        if move:
            mt.to_managed(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        torch.manual_seed(5)
        x = torch.rand(64, 7, device="cuda")
        losses = []
        for step in range(20):
            if move and step:
                mt.prefetch(model, Device(0), include_buffers=True)
                mt.prefetch(optimizer, Device(0))
            optimizer.zero_grad()
            loss = ((model(x) - x) ** 2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if move:
                mt.to_managed(optimizer)
                mt.prefetch(optimizer, Host())
                mt.prefetch(model, Host(), include_buffers=True)
        return losses

    def test_training_gives_the_same_numbers(self):
        plain, moved = self.train(False), self.train(True)
        assert moved == pytest.approx(plain, rel=1e-6)
        assert moved[-1] < 0.5 * moved[0]

    def test_a_cpu_module_becomes_a_cuda_module(self):
        model = small_model("cpu")
        model(torch.rand(4, 7)).sum().backward()
        before = snapshot(model)
        gradient = model.first.weight.grad
        expected = gradient.clone()
        mt.to_managed(model, device="cuda")
        after = snapshot(model)
        for name, old in before.items():
            assert after[name][0] == old[0]
            assert after[name][5] == torch.device("cuda:0")
            assert torch.equal(after[name][-1], old[-1])
        assert model.first.weight.grad is gradient
        assert mt.is_managed(gradient)
        assert torch.equal(gradient.cpu(), expected)
        model(torch.rand(4, 7, device="cuda")).sum().backward()

    def test_a_managed_module_changes_device_without_a_copy(self):
        model = mt.to_managed(small_model("cpu"))
        places = [t.data_ptr() for t in tensors_of(model)]
        first, second = model.first.weight.detach().clone(), model.second.weight.detach().clone()
        mt.to_managed(model, device="cuda:0")
        assert [t.data_ptr() for t in tensors_of(model)] == places
        assert all(t.is_cuda for t in tensors_of(model))
        with torch.no_grad():
            model.first.weight.add_(1)
        mt.to_managed(model, device="cpu")
        assert [t.data_ptr() for t in tensors_of(model)] == places
        assert torch.equal(model.first.weight, first + 1)
        gc.collect()  # what carried the memory in between is gone, and the memory is not
        assert torch.equal(model.second.weight, second)

    def test_the_wanted_device_is_the_one_torch_sees(self, device1, current_device):
        model = mt.to_managed(small_model("cpu"), device="cuda:1")
        assert {t.device for t in tensors_of(model)} == {torch.device("cuda:1")}
        assert torch.cuda.current_device() == 0
        model(torch.rand(4, 7, device="cuda:1"))
