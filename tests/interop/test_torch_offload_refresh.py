"""handle.refresh(): what a model got since offload(), beside a plain twin with the same changes."""

import contextlib
import gc
import random
import weakref

import pytest

import managedmem
from constants import EMULATED
from managedmem import emulator
from offloaded import LAYER, assert_same_module, batch, hooks_of, layers, nn, plain, same
from tensors import gpu_only, mt, torch
from twins import DEVICE, Twins

WIDTH = 64
BUDGET = 4 * LAYER
STEP = "managedmem.torch._offload_optimizer.SplitStep"


class Adapted(nn.Module):
    """A layer with a small one beside it, as adapters are."""

    def __init__(self, inner, rank=4):
        super().__init__()
        self.inner = inner
        place = next(inner.parameters()).device
        self.down = nn.Linear(WIDTH, rank, bias=False, device=place)
        self.up = nn.Linear(rank, WIDTH, bias=False, device=place)

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))


def fresh(seed, place):
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, WIDTH).to(place)


def adapters(model, seed, place):
    torch.manual_seed(seed)
    for i in (0, 4):
        model[i] = Adapted(model[i])


def new_layers(model, seed, place):
    for i in range(3):
        model.append(fresh(seed + i, place))


def replaced_layers(model, seed, place):
    model[2], model[6] = fresh(seed, place), fresh(seed + 1, place)


def replaced_parameters(model, seed, place):
    model[0].weight = fresh(seed, place).weight


def converted(model, seed, place):
    model[2].to(torch.float64).to(torch.float32)


def other_memory(model, seed, place):
    model[4].weight.data = fresh(seed, place).weight.data
    model[4].bias.data = fresh(seed, place).bias.data


def other_parameters_over_the_same_memory(model, seed, place):
    model[2].weight = nn.Parameter(model[2].weight.data)
    model[0].bias = nn.Parameter(model[0].bias.data)


def assigned(model, seed, place):
    torch.manual_seed(seed)
    state = {name: torch.rand(t.shape).to(place) for name, t in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def fewer_layers(model, seed, place):
    del model[4:]


def buffers(model, seed, place):
    torch.manual_seed(seed)
    model[2].register_buffer("seen", torch.rand(WIDTH).to(place))


CHANGES = [
    adapters,
    new_layers,
    replaced_layers,
    replaced_parameters,
    converted,
    other_memory,
    other_parameters_over_the_same_memory,
    assigned,
    fewer_layers,
    buffers,
]
BUDGETS = {"most streamed": BUDGET, "most there": 7 * LAYER, "everything": 100 * LAYER}


class Trained(Twins):
    """A model that is offloaded with its optimizer, and changed and trained as its twin is."""

    def __init__(self, on, count=8):
        super().__init__(layers(count, on=on), lambda p: torch.optim.AdamW(p, lr=1e-2))
        self.device = next(self.twin.parameters()).device

    def change(self, change, seed):
        """Change both; their optimizers then train what there is, with the state that is there."""
        for model, optimizer in self.sides:
            with torch.no_grad():
                change(model, seed, self.device)
            optimizer.param_groups[0]["params"][:] = list(model.parameters())

    def train(self):
        for i in range(3):
            given = torch.full((4, WIDTH), 0.25 + i, device=self.device)
            for model, _ in self.sides:
                model(given).square().mean().backward()
            self.apply()
        self.check()


def check_numbers(model, handle):
    """The module gives the numbers of a plain copy."""
    with torch.no_grad():
        assert same(model(batch(handle)), plain(model, handle)(batch(handle)))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("change", CHANGES)
class TestChanges:
    def test_in_inference(self, change, budget, on):
        model = layers(on=on)
        with mt.offload(model, DEVICE, budget=BUDGETS[budget]) as handle, torch.no_grad():
            twin = plain(model, handle)
            for place in (handle.device, on):
                change(model, 7, place)
                change(twin, 7, handle.device)
                handle.refresh()
                for _ in range(3):
                    assert same(model(batch(handle)), twin(batch(handle)))
                assert {str(p.device) for p in model.parameters()} == {str(handle.device)}
                if handle.stats()["streamed"]:
                    assert handle.stats()["held"] <= BUDGETS[budget]
            assert all(mt.Offload.of(module) is handle for module in model.modules())
        assert_same_module(model, twin)
        assert hooks_of(model) == 0
        assert all(mt.Offload.of(module) is None for module in model.modules())

    @pytest.mark.parametrize("early", [False, True], ids=["step", "step in backward"])
    def test_in_training(self, change, budget, early, on):
        pair = Trained(on)
        with pair.offload(BUDGETS[budget], step_in_backward=early) as handle:
            for seed in (7, 9):
                pair.change(change, seed)
                handle.refresh()
                pair.train()
            assert handle.stats()["failures"] == 0
        pair.check()
        if torch.device(on).type == handle.device.type:  # else what is new is on the device still
            pair.train()


@pytest.mark.parametrize("early", [False, True], ids=["step", "step in backward"])
@pytest.mark.parametrize("order", ["group first", "refresh first", "after a pass"])
def test_add_param_group_comes_before_or_after(order, early, on):
    pair = Trained(on)
    with pair.offload(BUDGET, step_in_backward=early) as handle:
        for model, _ in pair.sides:
            adapters(model, 7, handle.device)
        if order != "group first":
            handle.refresh()
        if order == "after a pass":
            pair.train()
            for model, _ in pair.sides:
                model.zero_grad()
        for model, optimizer in pair.sides:
            new = [p for name, p in model.named_parameters() if ".down." in name or ".up." in name]
            assert len(new) == 4
            optimizer.add_param_group({"params": new, "lr": 0.02})
        if order == "group first":
            handle.refresh()
        pair.train()
        assert handle.stats()["failures"] == 0
    pair.check()


class TestPlaces:
    def test_of_adapters_in_the_room_that_is_left(self, on):
        model = layers(on=on)
        with mt.offload(model, DEVICE, budget=5 * LAYER + LAYER // 2) as handle:
            adapters(model, 0, on)
            handle.refresh()
            places = {part.name: part.place for part in handle.explain()}
            assert handle.stats()["held"] <= 5 * LAYER + LAYER // 2
        assert "device" in places.values()
        assert "frames" in places.values()

    def test_of_buffers_is_in_the_budget(self, on):
        model = layers(on=on)
        with mt.offload(model, DEVICE, budget=BUDGET) as handle, torch.no_grad():
            for i in range(0, 16, 2):
                model[i].register_buffer("seen", torch.full((WIDTH * 4,), float(i), device=on))
            handle.refresh()
            twin = plain(model, handle)
            for _ in range(2):
                assert same(model(batch(handle)), twin(batch(handle)))
            model[4].seen.add_(1)
            twin[4].seen.add_(1)
            assert handle.stats()["held"] <= BUDGET
        assert_same_module(model, twin)

    def test_of_parameters_without_elements(self, on):
        model = layers(on=on)
        with mt.offload(model, DEVICE, budget=BUDGET) as handle:
            model[0].register_parameter("nothing", nn.Parameter(torch.empty(0, device=on)))
            model[1].register_buffer("none", torch.empty(0, 3, device=on))
            before = model[0].nothing.device
            for _ in range(2):
                handle.refresh()
                assert model[0].nothing.device == model[1].none.device == handle.device
            model(batch(handle))
        assert model[0].nothing.device == model[1].none.device == before

    def test_nothing_else_moves(self, on):
        model = layers(on=on)
        with mt.offload(model, DEVICE, budget=BUDGET) as handle:
            before = {name: p.data_ptr() for name, p in model.named_parameters()}
            new_layers(model, 0, on)
            handle.refresh()
            after = {name: p.data_ptr() for name, p in model.named_parameters()}
            assert before.items() <= after.items()

    def test_of_parameters_with_other_memory(self, on):
        model = layers(on=on)
        with mt.offload(model, DEVICE, budget=BUDGET) as handle:
            other_memory(model, 0, on)
            before = model[4].weight.data_ptr(), model[4].bias.data_ptr()
            handle.refresh()
            after = model[4].weight.data_ptr(), model[4].bias.data_ptr()
            assert all(old != new for old, new in zip(before, after, strict=True))
            assert [part.name for part in handle.explain()].count("4") == 2

    def test_a_part_that_is_larger_than_the_frames_is_told(self, on):
        model = layers(on=on)
        with mt.offload(model, DEVICE, budget=BUDGET) as handle:
            model.append(nn.Linear(WIDTH, 40 * WIDTH, device=on))
            words = "1 of 1 blocks never fit|nothing is streamed"
            with pytest.warns(UserWarning, match=words) as told:
                handle.refresh()
            assert told[0].filename == __file__
            assert model(batch(handle)).shape[1] == 40 * WIDTH

    def test_frames_are_made_once_there_is_something_for_them(self, on):
        model = layers(on=on)
        with mt.offload(model, DEVICE, budget=12 * LAYER) as handle, torch.no_grad():
            assert handle.stats()["streamed"] == 0
            for i in range(8):
                model.append(fresh(i, on))
            handle.refresh()
            assert handle.stats()["streamed"] > 0
            assert handle.stats()["held"] <= 12 * LAYER
            for _ in range(3):
                check_numbers(model, handle)
            assert handle.stats()["loads"] > 0

    def test_parts_that_left_the_model_are_not_loaded(self, on):
        model = layers(on=on)
        with mt.offload(model, DEVICE, budget=2 * LAYER) as handle, torch.no_grad():
            model(batch(handle))
            for i in range(0, 16, 2):
                model[i].weight, model[i].bias = fresh(i, on).parameters()
            handle.refresh()
            before = handle.stats()
            model(batch(handle))
            after = handle.stats()
            assert after["bytes_loaded"] - before["bytes_loaded"] <= 10 * LAYER

    def test_of_several_modules(self, on):
        one, two = layers(4, on=on), layers(4, on=on)
        with mt.offload({"one": one, "two": two}, DEVICE, budget=BUDGET) as handle:
            two.append(fresh(0, on))
            handle.refresh()
            assert "two.8" in {part.name for part in handle.explain()}
            check_numbers(two, handle)

    def test_on_the_device_of_its_submodule(self, device1):
        model = nn.Sequential(layers(4), layers(4))
        with mt.offload(model, {"0": DEVICE, "1": device1}, budget=2 * LAYER) as handle:
            model[1].append(nn.Linear(WIDTH, WIDTH))
            handle.refresh()
            assert len({p.device for p in model[1].parameters()}) == 1
            model.append(nn.Linear(WIDTH, WIDTH))
            with pytest.raises(ValueError, match=r"'2.weight' belongs to no submodule"):
                handle.refresh()

    def test_is_one_for_each_parameter(self, device1):
        model = nn.Sequential(layers(4), layers(4))
        with mt.offload(model, {"0": DEVICE, "1": device1}, budget=2 * LAYER) as handle:
            model[1][0].weight = model[0][0].weight
            with pytest.raises(ValueError, match=r"'0.0.weight' belongs to '0' and to '1'"):
                handle.refresh()


def moved(model):
    other = nn.Linear(WIDTH, WIDTH)
    other.weight, other.bias = model[4].weight, model[4].bias
    model[4] = other


def wrapped(model):
    model[4] = nn.Sequential(model[4])


def tied(model):
    model[4].weight, model[4].bias = model[6].weight, model[6].bias


def gone_and_back(model, handle):
    layer, model[4] = model[4], nn.Identity()
    handle.refresh()
    model[4] = layer


class TestUsers:
    """The modules that use the memory that there is already."""

    @pytest.mark.parametrize("read_only", [False, True])
    @pytest.mark.parametrize("change", [moved, wrapped, tied, gone_and_back])
    def test_are_announced(self, change, read_only, on):
        model = layers(on=on)
        with mt.offload(model, DEVICE, budget=2 * LAYER, read_only=read_only) as handle:
            with torch.no_grad():
                model(batch(handle))
                change(*(model, handle)[: change.__code__.co_argcount])
                handle.refresh()
                before = handle.stats()["acquired"]
                check_numbers(model, handle)
            assert handle.stats()["acquired"] == before + 8
            assert all(mt.Offload.of(module) is handle for module in model.modules())
            assert {c.bus_bytes for c in handle.coverage.values()} == {0}
        assert hooks_of(model) == 0

    def test_hooks_stay_where_nothing_has_changed(self, on):
        model = layers(on=on)
        with mt.offload(model, DEVICE, budget=2 * LAYER) as handle:
            before = hooks_of(model)
            model.append(nn.Identity())
            handle.refresh()
            assert hooks_of(model) == before

    def test_a_part_that_has_left_is_not_counted(self, on):
        model = layers(on=on)
        with mt.offload(model, DEVICE, budget=2 * LAYER) as handle:
            del model[4]
            handle.refresh()
            assert "4" not in handle.coverage

    @pytest.mark.filterwarnings("error")
    def test_blocks_stay_what_calls_announce(self, on):
        class Pair(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

            def forward(self, x):
                return nn.functional.linear(self.a(x), self.b.weight, self.b.bias)

        model = nn.Sequential(*[Pair() for _ in range(4)]).to(on)
        budget = 3 * LAYER
        with mt.offload(model, DEVICE, budget=budget, blocks=["0", "1", "2", "3"]) as handle:
            model[2].b.weight = fresh(0, on).weight
            handle.refresh()
            check_numbers(model, handle)
            assert {c.bus_bytes for c in handle.coverage.values()} == {0}


class TestErrors:
    def test_after_remove(self, on):
        handle = mt.offload(layers(2, on=on), DEVICE, budget=LAYER)
        handle.remove()
        with pytest.raises(RuntimeError, match="not offloaded any more"):
            handle.refresh()

    @pytest.mark.parametrize("several", [False, True])
    def test_of_a_module_that_has_been_freed(self, several, on):
        model = layers(2, on=on)
        handle = mt.offload([model] if several else model, DEVICE, budget=LAYER)
        del model
        gc.collect()
        with pytest.raises(RuntimeError, match="has been freed"):
            handle.refresh()
        handle.remove()

    def test_a_module_that_is_offloaded_otherwise(self, on):
        model, other = layers(4, on=on), layers(2, on=on)
        with mt.offload(model, DEVICE, budget=2 * LAYER) as handle:
            with mt.offload(other, DEVICE, budget=LAYER):
                model.append(other)
                with pytest.raises(ValueError, match=r"'8' \(Sequential\) is offloaded already"):
                    handle.refresh()
            handle.refresh()
            assert mt.Offload.of(other) is handle

    @pytest.mark.parametrize(
        ("call", "budget"),
        [
            ("cuMemAlloc", 100 * LAYER),
            ("cuMemHostRegister", 3 * LAYER),
            ("cuCtxSynchronize", 3 * LAYER),
        ],
    )
    @pytest.mark.skipif(not EMULATED, reason="the emulated driver makes calls fail")
    def test_of_the_driver_change_nothing(self, call, budget):
        model = layers(4)
        with mt.offload(model, DEVICE, budget=budget) as handle:
            twin = plain(model, handle)
            new_layers(model, 0, "cpu")
            new_layers(twin, 0, "cpu")
            memory = [p.data_ptr() for p in model[8:].parameters()]
            emulator.fail(call)
            with pytest.raises((MemoryError, managedmem.CUDAError)):
                handle.refresh()
            emulator.clear_failures()
            assert memory == [p.data_ptr() for p in model[8:].parameters()]
            assert same(model(batch(handle)), twin(batch(handle)))
            handle.refresh()
            assert same(model(batch(handle)), twin(batch(handle)))
            assert mt.Offload.of(model[8]) is handle
        assert_same_module(model, twin)

    @pytest.mark.parametrize("budget", [2 * LAYER, 8 * LAYER], ids=["frames", "new frames"])
    @pytest.mark.skipif(not EMULATED, reason="the emulated driver makes calls fail")
    def test_at_any_call_of_the_driver(self, budget):
        fired, nth = True, 0
        while fired:
            nth += 1
            model = layers(6)
            with mt.offload(model, DEVICE, budget=budget, read_only=True) as handle:
                new_layers(model, 0, "cpu")
                emulator.fail("*", nth)
                with contextlib.suppress(MemoryError, managedmem.CUDAError):
                    handle.refresh()
                fired = emulator.failure_fired()
                emulator.clear_failures()
                twin = plain(model, handle)
                assert same(model(batch(handle)), twin(batch(handle)))
                handle.refresh()
                places = [part.place for part in handle.explain()]
                assert handle.stats()["groups"] == places.count("frames") > 0
                assert same(model(batch(handle)), twin(batch(handle)))
            assert hooks_of(model) == 0
        assert nth > 10

    def test_an_interrupt_before_the_step_knows_the_parts(self, on, monkeypatch):
        pair = Trained(on)
        with pair.offload(BUDGET) as handle:
            pair.change(new_layers, 0)

            def interrupted(step, part):
                monkeypatch.undo()
                raise KeyboardInterrupt

            monkeypatch.setattr(f"{STEP}._note_size", interrupted)
            with pytest.raises(KeyboardInterrupt):
                handle.refresh()
            pair.train()


@gpu_only
def test_gradients_of_parameters_over_the_same_memory_return_with_them():
    pair = Trained("cpu", 4)
    model, optimizer = pair.sides[0]
    with pair.offload("1 GiB") as handle:
        pair.change(other_parameters_over_the_same_memory, 0)
        handle.refresh()
        model(batch(handle)).sum().backward()
        optimizer.step()
    for parameter in model.parameters():
        state = (t for t in optimizer.state[parameter].values() if t.dim() > 0)
        assert {t.device.type for t in (parameter, parameter.grad, *state)} == {"cpu"}


def test_does_nothing_without_a_change(on):
    model = layers(on=on)
    with mt.offload(model, DEVICE, budget=BUDGET) as handle:
        model(batch(handle))
        before, hooks = handle.stats(), hooks_of(model)
        handle.refresh()
        assert handle.stats() == before
        assert hooks_of(model) == hooks


def test_writes_of_read_only_models_are_noticed_in_new_parts(on):
    model = layers(on=on)
    with mt.offload(model, DEVICE, budget=BUDGET, read_only=True) as handle, torch.no_grad():
        new_layers(model, 0, on)
        handle.refresh()
        check_numbers(model, handle)
        streamed = {p.name for p in handle.explain() if p.place == "frames"} & {"16", "17", "18"}
        model[int(min(streamed))].weight.mul_(2)
        with pytest.raises(RuntimeError, match="was written although"):
            model(batch(handle))
        with pytest.warns(UserWarning, match="written while the module was offloaded"):
            handle.remove()


def test_writes_before_refresh_are_noticed_in_read_only_models(on):
    model = layers(on=on)
    with mt.offload(model, DEVICE, budget=BUDGET, read_only=True) as handle, torch.no_grad():
        model[4].weight.mul_(2)
        model[4].bias = nn.Parameter(model[4].bias.data)
        handle.refresh()
        with pytest.raises(RuntimeError, match=r"'4.weight' was written although"):
            model(batch(handle))
        with pytest.warns(UserWarning, match="written while the module was offloaded"):
            handle.remove()


@pytest.mark.parametrize("read_only", [False, True])
def test_writes_of_another_parameter_over_the_same_memory_are_seen(read_only, on):
    model = layers(40, on=on)
    with mt.offload(model, DEVICE, budget=6 * LAYER, read_only=read_only) as handle:
        name = next(part.name for part in handle.explain() if part.place == "frames")
        layer = model[int(name)]
        with torch.no_grad(), handle.round():
            for _ in range(5):
                layer(batch(handle))
            assert handle.stats()["hits"] > 0
            other = nn.Parameter(layer.weight.data)
            other.mul_(2)
            layer.weight = other
            handle.refresh()
            check_numbers(layer, handle)


@pytest.mark.filterwarnings("error")
def test_parameters_that_left_a_read_only_model_may_be_written(on):
    model = layers(on=on)
    with mt.offload(model, DEVICE, budget=2 * LAYER, read_only=True) as handle, torch.no_grad():
        old, model[4].weight = model[4].weight, fresh(0, on).weight
        handle.refresh()
        old.mul_(2)
        check_numbers(model, handle)


@pytest.mark.filterwarnings("ignore:.* was given no optimizer")
def test_dropped_models_are_freed(on):
    model = layers(4, on=on)
    handle = mt.offload(model, DEVICE, budget=2 * LAYER)
    adapters(model, 0, on)
    handle.refresh()
    model(batch(handle)).sum().backward()
    ref, inner = weakref.ref(model), weakref.ref(model[0].inner)
    del model, handle
    gc.collect()
    assert ref() is None
    assert inner() is None


@pytest.mark.filterwarnings("ignore:.* kernels read such parameters over the bus")
@pytest.mark.parametrize("seed", range(12))
def test_random_changes(seed, on):
    chance = random.Random(seed)
    pair = Trained(on, 6)
    budget = chance.choice([2, 4, 8, 40]) * LAYER
    with pair.offload(budget, step_in_backward=chance.random() < 0.3) as handle:
        for step in range(12):
            change = chance.choice([c for c in CHANGES if c is not fewer_layers])
            if chance.random() < 0.5 and not isinstance(pair.model[0], Adapted):
                pair.change(change, step)
                handle.refresh()
            elif chance.random() < 0.5:
                pair.train()
            else:
                with torch.no_grad():
                    assert same(pair.model(batch(handle)), pair.twin(batch(handle)))
            pair.check()
    pair.check()
