"""offload() in forward passes: the numbers of the plain module, the budget, and the way back."""

import collections
import contextlib
import copy
import gc
import pickle
import random
import weakref

import pytest

import managedmem
from constants import EMULATED, PAGE
from managedmem import emulator
from offloaded import (
    LAYER,
    assert_same_module,
    batch,
    hooks_of,
    layers,
    managed_tensors,
    nn,
    plain,
    same,
    use_device,
)
from programs import run_python
from races import in_thread, race, race_over
from removed_handles import offload_for_a_test
from tensors import assert_same, mt, small_model, snapshot, torch
from whole_programs import run_to_the_end

DEVICE = "cuda:0"
NOTHING_FITS = r"nothing is streamed to Device\(0\): .* The budget of 4,096 bytes leaves "
PATIENCE = 180  # seconds for programs that import torch, on a busy machine

offloaded = pytest.fixture(offload_for_a_test)


@pytest.fixture
def beside_plain(offloaded):
    """`beside_plain(model, ...)`: a handle, and a plain copy of the module on its device."""

    def make(model, *device, **options):
        original = copy.deepcopy(model)
        handle = offloaded(model, *device, **options)
        return handle, plain(original, handle)

    return make


def check_rounds(model, handle, reference, rounds=3):
    """The module gives the numbers of a plain one."""
    inputs = batch(handle)
    with torch.no_grad():
        expected = reference(inputs)
        for _ in range(rounds):
            assert same(model(inputs), expected)


class TestForward:
    @pytest.mark.parametrize("budget", [LAYER, 3 * LAYER, 5 * LAYER, 8 * LAYER, 100 * LAYER])
    def test_numbers_of_the_plain_module(self, on, beside_plain, budget):
        model = layers(on=on)
        handle, reference = beside_plain(model, budget=budget)
        check_rounds(model, handle, reference)
        assert handle.stats()["held"] <= budget

    def test_after_the_first_round_the_order_is_known(self, on, offloaded):
        model = layers(on=on)
        handle = offloaded(model, budget=5 * LAYER)
        with torch.no_grad():
            for _ in range(4):
                model(batch(handle))
        numbers = handle.stats()
        assert numbers["groups"] < 8  # some stay, and their calls count as well
        assert numbers["acquired"] == 4 * 8
        assert numbers["hits"] >= 3 * 8
        assert numbers["mapped"] == 0

    def test_all_that_fits_stays_without_hooks(self, on, offloaded):
        model = layers(on=on)
        before = hooks_of(model)
        handle = offloaded(model, budget=8 * LAYER)
        first = handle.stats()
        assert hooks_of(model) == before
        for _ in range(3):
            model(batch(handle))
        assert handle.stats()["acquired"] == first["acquired"]  # no hook counts a use
        assert first["resident"] == 8 * LAYER == first["held"]

    def test_a_layer_above_the_budget_is_used_over_the_bus(self, on):
        model = layers(2, on=on)
        original = copy.deepcopy(model)
        with pytest.warns(UserWarning, match=NOTHING_FITS) as warned:
            handle = mt.offload(model, DEVICE, budget=PAGE)
        assert "the largest block, '2', has 16,896: give a larger" in str(warned[0].message)
        assert warned[0].filename == __file__
        check_rounds(model, handle, plain(original, handle))
        assert handle.stats()["budget"] == handle.stats()["held"] == 0
        handle.remove()

    def test_tied_weights(self, on, beside_plain):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(64, 64)
                self.middle = layers(4)
                self.head = nn.Linear(64, 64, bias=False)
                self.head.weight = self.table.weight

            def forward(self, inputs):
                tokens = (inputs * 63).long()[:, 0]
                return self.head(self.middle(self.table(tokens)))

        model = Tied().to(on)
        handle, reference = beside_plain(model, budget=3 * LAYER)
        assert model.head.weight is model.table.weight
        assert handle.stats()["streamed"] > 0
        check_rounds(model, handle, reference)
        handle.remove()
        assert model.head.weight is model.table.weight

    def test_modules_called_twice_and_not_at_all(self, on, beside_plain):
        class Odd(nn.Module):
            def __init__(self):
                super().__init__()
                self.parts = layers(6)
                self.unused = nn.Linear(64, 64)

            def forward(self, inputs):
                for i in (0, 2, 2, 10, 0, 2):
                    inputs = self.parts[i](inputs)
                return self.parts(inputs)

        model = Odd().to(on)
        handle, reference = beside_plain(model, budget=4 * LAYER)
        check_rounds(model, handle, reference)
        assert handle.stats()["acquired"] >= 3 * handle.stats()["groups"]
        assert handle.stats()["mapped"] == 0

    def test_experts_that_are_chosen_at_run_time(self, on, beside_plain):
        class Experts(nn.Module):
            def __init__(self):
                super().__init__()
                self.gate = nn.Linear(64, 6)
                self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

            def forward(self, inputs):
                chosen = self.gate(inputs).argmax(1)
                rows = [self.experts[int(i)](x) for i, x in zip(chosen, inputs, strict=True)]
                return torch.stack(rows)

        torch.manual_seed(0)
        model = Experts().to(on)
        handle, reference = beside_plain(model, budget=4 * LAYER)
        for seed in range(5):
            torch.manual_seed(seed)
            inputs = torch.randn(9, 64).to(handle.device)
            assert same(model(inputs), reference(inputs))
        assert handle.stats()["held"] <= 4 * LAYER

    def test_a_generation_loop(self, on, beside_plain):
        class Words(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(50, 64)
                self.blocks = layers(5)
                self.head = nn.Linear(64, 50)

            def forward(self, tokens):
                return self.head(self.blocks(self.table(tokens)).mean(0))

        def generate(model, device):
            tokens = torch.tensor([1, 2], device=device)
            for _ in range(12):
                word = model(tokens).argmax().view(1)
                tokens = torch.cat([tokens, word])
            return tokens

        torch.manual_seed(0)
        model = Words().to(on)
        handle, reference = beside_plain(model, budget=4 * LAYER)
        with torch.inference_mode():
            found = generate(model, handle.device)
            assert same(found, generate(reference, handle.device))
        assert handle.stats()["mapped"] == 0

    def test_autocast(self, on, beside_plain):
        model = layers(on=on)
        handle, reference = beside_plain(model, budget=3 * LAYER)
        with torch.autocast(handle.device.type, dtype=torch.bfloat16):
            check_rounds(model, handle, reference)

    def test_a_model_that_is_made_in_inference_mode(self, on, offloaded):
        with torch.inference_mode():
            model = layers(on=on)
            original = copy.deepcopy(model)
            handle = offloaded(model, budget=3 * LAYER)
            check_rounds(model, handle, plain(original, handle))
            handle.remove()
            assert model[0].weight.is_inference()
            assert_same_module(model, original)

    def test_parameters_of_modules_that_contain_others(self, on, offloaded):
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.before = nn.Parameter(torch.rand(64, 64))
                self.scales = nn.ParameterList(torch.rand(64, 64) for _ in range(2))
                self.inner = layers(6)

            def forward(self, inputs):
                inputs = self.inner(inputs @ self.before)
                return inputs @ self.scales[0] @ self.scales[1]

        model = Scaled().to(on)
        original = copy.deepcopy(model)
        for fit in (3, 6, 8):
            handle = offloaded(model, budget=fit * LAYER)
            check_rounds(model, handle, plain(original, handle))
            handle.remove()

    def test_statistics_that_a_forward_pass_writes(self, on, offloaded):
        model = nn.Sequential(*layers(4), nn.BatchNorm1d(64), *layers(4)).to(on)
        original = copy.deepcopy(model)
        handle = offloaded(model, budget=4 * LAYER)
        check_rounds(model, handle, plain(original, handle).eval(), rounds=0)
        reference = plain(original, handle)
        for _ in range(3):
            model(batch(handle))
            reference(batch(handle))
        assert same(model[8].running_mean, reference[8].running_mean)
        handle.remove()
        assert same(model[8].running_var, reference[8].running_var)
        assert model[8].num_batches_tracked.item() == 3

    def test_chosen_blocks(self, on, offloaded):
        """A block moves as a whole."""
        model = nn.ModuleDict({"a": layers(4), "b": layers(4)}).to(on)
        original = copy.deepcopy(model)
        with mt.offload(model, DEVICE, budget=5 * LAYER, blocks=["a"]) as handle:
            assert handle.stats()["streamed"] >= 4 * LAYER
            reference = plain(original, handle)
            for _ in range(3):
                assert same(model["a"](batch(handle)), reference["a"](batch(handle)))
            assert handle.stats()["acquired"] == 3
        with mt.offload(model, DEVICE, budget=4 * LAYER, blocks=model.values()) as handle:
            assert handle.stats()["streamed"] % (4 * LAYER) == 0
            for name in ("a", "b", "a"):
                assert same(model[name](batch(handle)), reference[name](batch(handle)))
            assert handle.stats()["bytes_loaded"] == handle.stats()["loads"] * (4 * LAYER - 256)

    @pytest.mark.parametrize("how", ["name", "names", "module", "members"])
    def test_a_container_stands_for_its_members(self, on, how):
        model = nn.ModuleDict({"h": nn.ModuleList(layers(2) for _ in range(4))}).to(on)
        blocks = {"name": "h", "names": ["h"], "module": [model["h"]], "members": model["h"]}[how]
        with mt.offload(model, DEVICE, budget=4 * LAYER, blocks=blocks) as handle:
            assert handle.stats()["groups"] == 4

    def test_a_dictionary_of_modules_stands_for_its_members(self, on):
        members = nn.ModuleDict({"a": layers(2), "b": layers(2)})
        model = nn.ModuleDict({"a": layers(1), "d": members}).to(on)
        with mt.offload(model, DEVICE, budget=3 * LAYER, blocks=members) as handle:
            assert handle.stats()["groups"] == 3

    def test_threads_and_streams(self, on, beside_plain):
        model = layers(on=on)
        handle, reference = beside_plain(model, budget=4 * LAYER)

        def work(rows):
            inputs = batch(handle, rows)
            with torch.no_grad():
                expected = reference(inputs)
                stream = None
                if handle.device.type == "cuda":
                    stream = torch.cuda.Stream()
                    stream.wait_stream(torch.cuda.current_stream())  # for inputs and expected
                with torch.cuda.stream(stream):
                    for _ in range(4):
                        assert same(model(inputs), expected)

        race_over(work, (1, 2, 3))
        assert handle.stats()["acquired"] >= 3 * 4 * handle.stats()["groups"] > 0

    def test_random_rounds(self, on, beside_plain):
        """Any order, forward and backward, in three threads, with exceptions: the same bits."""

        class Choice(nn.Module):
            def __init__(self):
                super().__init__()
                self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

            def forward(self, inputs, order):
                for i in order:
                    inputs = torch.relu(self.parts[i](inputs))
                return inputs

        torch.manual_seed(0)
        model = Choice().to(on)
        handle, reference = beside_plain(model, budget=3 * LAYER)
        inputs = batch(handle)

        def gradient(module, order):
            mine = inputs.clone().requires_grad_()
            return torch.autograd.grad(module(mine, order).sum(), mine)[0]

        def work(seed):
            use_device(handle)
            chance = random.Random(seed)
            for _ in range(40):
                order = [chance.randrange(8) for _ in range(chance.randrange(1, 9))]
                if chance.random() < 0.1:
                    with contextlib.suppress(IndexError):
                        model(inputs, [*order, 99])
                function = chance.choice([forward, gradient])
                assert same(function(model, order), function(reference, order)), (seed, order)

        def forward(module, order):
            return module(inputs, order).detach()

        race_over(work, range(3))
        assert handle.stats()["held"] <= 3 * LAYER

    def test_two_devices(self, device1, on, offloaded):
        model = nn.Sequential(layers(4), layers(4)).to(on)
        original = copy.deepcopy(model)
        handle = offloaded(model, {"0": 0, "1": device1}, budget=3 * LAYER)
        assert handle.stats()["budget"] == 6 * LAYER
        if EMULATED:
            check_rounds(model, handle, plain(original, handle))
        else:
            assert {p.device.index for p in model[1].parameters()} == {1}
            middle = model[0](batch(handle)).to("cuda:1")
            expected = plain(original, handle)(batch(handle))
            assert same(model[1](middle), expected)


class TestExceptions:
    def test_in_a_forward_pass(self, on, beside_plain):
        model = layers(on=on)
        handle, reference = beside_plain(model, budget=5 * LAYER)
        for error in (ValueError, KeyboardInterrupt):
            for number in (0, 4, 7, 14):

                def fail(*_, error=error):
                    raise error

                hook = model[number].register_forward_hook(fail)
                with pytest.raises(error):
                    model(batch(handle))
                hook.remove()
        check_rounds(model, handle, reference)
        assert handle.stats()["mapped"] == 0  # nothing is held for ever

    @pytest.mark.filterwarnings("ignore:.* was given no optimizer")
    def test_in_a_backward_pass(self, on, offloaded):
        model = layers(on=on)
        handle = offloaded(model, budget=5 * LAYER)
        for _ in range(3):
            output = model[:8](batch(handle))

            def fail(gradient):
                raise ValueError("planted")

            output.register_hook(fail)
            with pytest.raises(ValueError, match="planted"):
                model[8:](output).sum().backward()
            del output
        gc.collect()
        before = handle.stats()["mapped"]
        with torch.no_grad():
            model(batch(handle))
        assert handle.stats()["mapped"] == before == 0

    def test_in_a_thread_that_ends(self, on, offloaded):
        model = layers(on=on)
        handle = offloaded(model, budget=5 * LAYER)

        def fail(*_):
            raise SystemExit

        def run():
            with contextlib.suppress(SystemExit):  # no hook of a module sees it
                model(batch(handle))

        for number in (0, 2, 4, 6, 8):
            hook = model[number].register_forward_hook(fail)
            in_thread(run)
            hook.remove()
        gc.collect()
        with torch.no_grad():
            model(batch(handle))
        assert handle.stats()["mapped"] == 0


class TestRemove:
    def test_the_module_is_as_it_was(self, on):
        model = small_model(on)
        model.first.weight.requires_grad_(False)
        model(torch.rand(4, 7, device=on)).sum().backward()
        gradient = model.second.weight.grad
        before, value = snapshot(model), gradient.cpu().clone()
        hooks = hooks_of(model)
        with pytest.warns(UserWarning, match="(never fit on|nothing is streamed to) Device.0.: "):
            handle = mt.offload(model, DEVICE, budget=3 * PAGE)
        assert handle.stats()["streamed"] > 0
        handle.remove()
        assert_same(before, snapshot(model), places_too=None)
        assert model.tied.weight is model.first.weight
        assert model.second.weight.grad is gradient
        assert gradient.device == torch.device(on)
        assert same(gradient, value)
        assert managed_tensors(model) == []
        assert hooks_of(model) == hooks

    def test_twice_and_in_every_form(self, on):
        model = layers(on=on)
        with mt.offload(model, DEVICE, budget=4 * LAYER) as handle:
            model(batch(handle))
            handle.remove()
            numbers = handle.stats()
            assert not managed_tensors(model)
            handle.remove()
        assert handle.stats() == numbers
        assert repr(handle) == "<offload of Sequential on Device(0), removed>"
        with pytest.raises(ZeroDivisionError):
            with mt.offload(model, DEVICE, budget=4 * LAYER):
                raise ZeroDivisionError
        assert not managed_tensors(model)
        assert hooks_of(model) == 0

    @pytest.mark.parametrize("number", [0, 5, 14])
    def test_in_the_middle_of_a_round(self, on, number):
        model = layers(on=on)
        expected = copy.deepcopy(model)
        handle = mt.offload(model, DEVICE, budget=4 * LAYER)
        if on != handle.device.type:
            pytest.skip("the rest of the round would meet parameters of another device")
        reference = plain(expected, handle)

        def remove(*_):
            hook.remove()
            handle.remove()

        hook = model[number].register_forward_hook(remove)
        assert same(model(batch(handle)), reference(batch(handle)))
        assert same(model(batch(handle)), reference(batch(handle)))
        assert managed_tensors(model) == []

    def test_between_forward_and_backward(self, on):
        model = layers(on=on)
        expected = copy.deepcopy(model)
        handle = mt.offload(model, DEVICE, budget=4 * LAYER)
        if on != handle.device.type:
            pytest.skip("the gradients would be on another device than the parameters")
        reference = plain(expected, handle)
        loss = model(batch(handle)).sum()
        handle.remove()
        loss.backward()
        reference(batch(handle)).sum().backward()
        assert_same_module(model, reference)

    def test_after_an_exception(self, on):
        model = layers(on=on)
        before = snapshot(model)
        handle = mt.offload(model, DEVICE, budget=4 * LAYER)
        with pytest.raises(RuntimeError):
            model(batch(handle, width=3))
        handle.remove()
        assert_same(before, snapshot(model), places_too=None)

    def test_by_another_thread(self, on):
        model = layers(on=on)
        before = snapshot(model)
        handle = mt.offload(model, DEVICE, budget=4 * LAYER)
        model(batch(handle))
        race(*[handle.remove] * 4)
        assert_same(before, snapshot(model), places_too=None)

    def test_in_a_garbage_collection(self, on):
        model = layers(on=on)
        before = snapshot(model)
        handle = mt.offload(model, DEVICE, budget=4 * LAYER)
        model(batch(handle))

        class Removes:
            def __init__(self):
                self.itself = self

            def __del__(self):
                handle.remove()

        Removes()
        gc.collect()
        assert_same(before, snapshot(model), places_too=None)

    def test_in_a_collection_while_another_call_has_a_lock(self, on):
        """Adding to weak references allocates, and may start a collection."""
        model, other = layers(2, on=on), layers(3, on=on)

        def collect():
            while removed:
                removed.pop().remove()

        class Collecting(weakref.WeakSet):
            def add(self, item):
                collect()
                super().add(item)

        removed = [mt.offload(model, DEVICE, budget=LAYER)]
        handle = mt.offload(other, DEVICE, budget=LAYER)
        for lane in handle._lanes:
            lane.announcer._all = Collecting()
        removed.append(handle)
        if handle.device.type == on:
            assert other(batch(handle)).shape == (4, 64)
        collect()
        assert managed_tensors(model) == managed_tensors(other) == []

    def test_a_dropped_handle_leaves_the_module_offloaded(self, on):
        model = layers(on=on)
        mt.offload(model, DEVICE, budget=4 * LAYER)
        gc.collect()
        assert mt.Offload.of(model).stats()["streamed"] > 0
        model(torch.rand(2, 64).to(model[0].weight.device))
        del model  # all memory goes with it: the fixture of every test checks that

    @pytest.mark.parametrize("how", ["parameter", "data", "load_state_dict"])
    def test_replaced_parameters_stay(self, on, how):
        model = layers(on=on)
        with mt.offload(model, DEVICE, budget=4 * LAYER) as handle:
            new = torch.ones(64, 64, device=handle.device)
            if how == "parameter":
                model[2].weight = nn.Parameter(new)
            elif how == "data":
                model[2].weight.data = new
            else:
                model.load_state_dict({"2.weight": new}, strict=False, assign=True)
            with pytest.warns(UserWarning, match="'2.weight' is not in the memory"):
                model(batch(handle))
            model(batch(handle))  # warns once
        assert model[2].weight.data_ptr() == new.data_ptr()
        assert bool((model[2].weight == 1).all())

    def test_functional_call_is_not_a_replacement(self, on):
        model = layers(on=on)
        with mt.offload(model, DEVICE, budget=4 * LAYER) as handle:
            other = {name: p.detach() * 2 for name, p in model.named_parameters()}
            inputs = batch(handle)
            parameters = {name: nn.Parameter(tensor) for name, tensor in other.items()}
            with torch.no_grad():
                found = torch.func.functional_call(model, other, (inputs,))
                assert same(found, torch.func.functional_call(model, parameters, (inputs,)))
                model.load_state_dict(other)
                assert same(found, model(inputs))

    def test_memory_that_was_managed_is_so_again(self, on):
        model = mt.to_managed(layers(on=on))
        before = snapshot(model)
        with mt.offload(model, DEVICE, budget=4 * LAYER) as handle:
            with torch.no_grad():
                model[0].weight.add_(1)
            model(batch(handle))
        after = snapshot(model)
        assert torch.equal(after["0.weight"][-1], before["0.weight"][-1] + 1)
        del before["0.weight"], after["0.weight"]
        assert_same(before, after)

    def test_managed_memory_that_shares_pages(self, on, managed):
        model = layers(2, on=on)
        memory = managed((2 * 64 * 64,))
        memory.copy_(torch.rand(2 * 64 * 64))
        for i in (0, 2):
            model[i].weight = nn.Parameter(memory[i * 2048 + 8 :][: 60 * 64].view(60, 64))
        model[2].weight = nn.Parameter(memory[60 * 64 + 8 :][: 64 * 60].view(64, 60))
        model[0].bias = model[2].bias = None
        before = snapshot(model)
        expected = copy.deepcopy(model)
        with mt.offload(model, DEVICE, budget=2 * LAYER) as handle:
            assert same(model(batch(handle)), plain(expected, handle)(batch(handle)))
        assert_same(before, snapshot(model))

    @pytest.mark.emulator_only
    def test_memory_is_freed(self, on):
        before = emulator.live()
        model = layers(on=on)
        handle = mt.offload(model, DEVICE, budget=4 * LAYER)
        held = handle.stats()["budget"]
        assert 0 < held <= emulator.live().bytes - before.bytes < held + 2 * PAGE
        handle.remove()
        assert emulator.live() == before


class TestWhileItIsOn:
    def test_state_dicts(self, on, offloaded, tmp_path):
        model = layers(on=on)
        original = copy.deepcopy(model)
        handle = offloaded(model, budget=4 * LAYER)
        model(batch(handle))
        torch.save(model.state_dict(), tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", map_location=on)
        assert all(same(loaded[name], t) for name, t in original.state_dict().items())
        other = layers(on=on)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2)
        model.load_state_dict(other.state_dict())
        check_rounds(model, handle, plain(other, handle))

    def test_copies_are_plain(self, on, offloaded):
        model = layers(on=on)
        handle = offloaded(model, budget=4 * LAYER)
        for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert managed_tensors(made) == []
            before = handle.stats()["acquired"]
            assert same(made(batch(handle)), made(batch(handle)))
            assert handle.stats()["acquired"] == before
            check_rounds(model, handle, made)

    def test_repr_and_numbers(self, on, offloaded):
        handle = offloaded(layers(on=on), budget=4 * LAYER)
        numbers = handle.stats()
        assert repr(handle) == (
            f"<offload of Sequential on Device(0): {numbers['groups']} groups of "
            f"{numbers['streamed']:,} bytes streamed, {numbers['resident']:,} resident, "
            "budget 67,584>"
        )
        assert numbers["resident"] < numbers["budget"] <= 4 * LAYER
        assert numbers["streamed"] + numbers["resident"] == 8 * LAYER
        assert numbers["streamed"] == numbers["groups"] * LAYER
        assert all(isinstance(value, int) for value in numbers.values())

    @pytest.mark.timeout(PATIENCE + 20)
    def test_compiled_by_torch(self, on):
        done = run_python(
            f"""
            import warnings
            from offloaded import batch, layers, same
            from tensors import mt, torch

            warnings.filterwarnings("ignore", ".* was given no optimizer")
            model, reference = layers(on={on!r}), layers()
            handle = mt.offload(model, "cuda:0", budget=70_000)
            reference.to(handle.device)
            compiled = torch.compile(model, backend="eager")
            for _ in range(3):
                loss, other = compiled(batch(handle)).sum(), reference(batch(handle)).sum()
                loss.backward(), other.backward()
                assert same(loss, other)
            for one, two in zip(model.parameters(), reference.parameters(), strict=True):
                assert same(one.grad, two.grad)
            print(handle.stats()["acquired"] / handle.stats()["groups"])
            handle.remove()
            """,
            driver="emulator" if EMULATED else "cuda",
            patience=PATIENCE,
        )
        assert done.stderr == ""
        assert float(done.stdout) >= 3

    @pytest.mark.timeout(PATIENCE + 20)
    def test_at_interpreter_exit_a_module_may_be_offloaded(self, on):
        run_to_the_end(
            f"""
            from offloaded import batch, layers
            from tensors import mt, torch

            model = layers(on={on!r})
            optimizer = torch.optim.Adam(model.parameters())
            handle = mt.offload(model, "cuda:0", budget=70_000, optimizer=optimizer)
            model(batch(handle)).sum().backward()
            optimizer.step()
            torch.kept = [model, handle, model(batch(handle))]
            torch.kept.append(torch.kept)
            """,
            driver="emulator" if EMULATED else "cuda",
            patience=PATIENCE,
        )

    @pytest.mark.emulator_only
    def test_the_text_of_a_failure(self, offloaded):
        model = layers(4)
        handle = offloaded(model, 0, budget=2 * LAYER)
        assert handle.last_error is None
        emulator.fail("cuMemcpyAsync", code=999)
        check_rounds(model, handle, plain(layers(4), handle))
        emulator.clear_failures()
        assert handle.stats()["failures"] > 0
        assert "cuMemcpyAsync" in handle.last_error and "UNKNOWN" in handle.last_error
        handle.remove()
        assert "cuMemcpyAsync" in handle.last_error

    @pytest.mark.emulator_only
    def test_every_driver_call_in_turn(self):
        """Faults make it slower, or offload() fails; numbers and the way back stay right."""
        inputs = torch.rand(3, 64)
        original = layers(4)
        expected = original(inputs)
        with emulator.recording() as calls:
            model = layers(4)
            with mt.offload(model, DEVICE, budget=2 * LAYER):
                model(inputs)
            del model
            gc.collect()
        counts = collections.Counter(call.name for call in calls)
        assert "cuMemAllocManaged" not in counts
        del counts["cuMemFree"]  # what cannot be freed stays
        places = [(name, nth) for name, count in counts.items() for nth in {1, count // 2 + 1}]
        for name, nth in places:
            model = layers(4)
            emulator.clear_failures()
            emulator.fail(name, nth=nth)
            try:
                with mt.offload(model, DEVICE, budget=2 * LAYER):
                    assert same(model(inputs), expected)
            except managedmem.CUDAError:
                assert same(model(inputs), expected)
            emulator.clear_failures()
            assert hooks_of(model) == 0, (name, nth)
            assert_same_module(model, original)

    def test_pageable_memory_passes_through_page_locked_memory(self, monkeypatch):
        monkeypatch.setattr("managedmem.torch._offload_places._STAGED", 1000)
        model, original = layers(4), layers(4)
        with emulator.recording() if EMULATED else contextlib.nullcontext() as calls:
            handle = mt.offload(model, DEVICE, budget=1 << 20)
        assert not EMULATED or [c.name for c in calls].count("cuMemHostRegister") == 1
        assert handle.stats()["resident"] == 4 * LAYER
        for name, tensor in original.state_dict().items():
            assert torch.equal(model.state_dict()[name].cpu(), tensor)

    @pytest.mark.emulator_only
    def test_pageable_memory_moves_where_none_can_be_page_locked(self, monkeypatch):
        monkeypatch.setattr("managedmem.torch._offload_places._STAGED", 1000)
        model, original = layers(4), layers(4)
        emulator.fail("cuMemHostRegister", nth=1)
        handle = mt.offload(model, DEVICE, budget=1 << 20)
        assert emulator.failure_fired()
        assert handle.stats()["resident"] == 4 * LAYER
        assert_same_module(model, original)

    def test_the_memory_of_before_is_let_go(self):
        class Bytes(bytearray):
            """A bytearray with weak references."""

        memory = Bytes(64 * 64 * 4)
        alive = weakref.ref(memory)
        model = nn.Linear(64, 64, bias=False)
        model.weight = nn.Parameter(torch.frombuffer(memory, dtype=torch.float32).view(64, 64))
        del memory
        with mt.offload(model, DEVICE, budget=LAYER):
            assert alive() is None
