"""offload() of experts in one parameter: a call loads the slices that it names, equal numbers."""

import copy
import gc
import importlib
import pickle
import weakref

import pytest

from offloaded import assert_same_module, nn, same, use_device
from races import race_over
from tensors import mt, torch

choice = importlib.import_module("managedmem.torch._offload_choice")

DEVICE = 0
WIDTH = 256
COUNT = 8
MIB = 1 << 20
BUDGET = 9 * MIB  # of 18
F = torch.nn.functional


class Experts(nn.Module):
    """The loop of transformers over the experts that a router has chosen."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.num_experts = COUNT
        self.gate_up = nn.Parameter(torch.randn(COUNT, 2 * width, width) / 16)
        self.down = nn.Parameter(torch.randn(COUNT, width, width) / 16)

    def forward(self, x, chosen):
        result = torch.zeros_like(x)
        mask = F.one_hot(chosen, num_classes=COUNT).permute(2, 1, 0)
        for number in (mask.sum(dim=(-1, -2)) > 0).nonzero():
            _, token = torch.where(mask[number[0]])
            gate, up = F.linear(x[token], self.gate_up[number[0]]).chunk(2, dim=-1)
            found = F.linear(torch.tanh(gate) * up, self.down[number[0]])
            result.index_add_(0, token, found)
        return result


class Layer(nn.Module):
    def __init__(self, experts=Experts):
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, COUNT, bias=False)
        self.experts = experts()

    def forward(self, x):
        x = torch.tanh(self.dense(x))
        return x + self.experts(x, self.router(x).topk(2).indices)


def mixture(on, experts=Experts, count=3):
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(experts) for _ in range(count))).to(on)


def batch(handle, seed=0, tokens=3):
    torch.manual_seed(seed)
    return torch.randn(tokens, WIDTH).to(handle.device)


def plain(model, handle):
    return copy.deepcopy(model).to(handle.device)


def sliced(handle):
    return [part for part in handle.explain() if part.reason == choice.LOADED_SLICES]


def shows_parameters(model):
    return not any(
        "gate_up" in vars(module) or "down" in vars(module) for module in model.modules()
    )


@pytest.fixture(params=[False, True], ids=["", "read only"])
def pair(request, on):
    """A mixture, a plain copy of it on the device, and the handle."""
    model = mixture(on)
    original = copy.deepcopy(model)
    with mt.offload(model, DEVICE, budget=BUDGET, read_only=request.param) as handle:
        yield model, original.to(handle.device), handle
    assert shows_parameters(model)


def second(on, kind=Experts):
    """A mixture whose last layer has a parameter that stays at home."""
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer(kind)).to(on)


class TestCalls:
    def test_numbers_and_coverage(self, pair):
        model, original, handle = pair
        assert sliced(handle)
        with torch.no_grad():
            for seed in range(6):
                assert same(model(batch(handle, seed)), original(batch(handle, seed)))
                assert shows_parameters(model)
                assert handle.stats()["held"] <= handle.stats()["budget"] <= BUDGET
        numbers = handle.stats()
        assert numbers["loads"] > 0 and numbers["mapped"] == numbers["failures"] == 0
        assert all(each == (6, 6, 0) for each in handle.coverage.values())

    def test_slices_stay_where_nothing_is_written(self, on):
        loaded = []
        for read_only in (False, True):
            model = mixture(on)
            with mt.offload(model, DEVICE, budget=BUDGET, read_only=read_only) as handle:
                with torch.no_grad():
                    for _ in range(4):
                        model(batch(handle, tokens=1))
                    before = handle.stats()["loads"]
                    model(batch(handle, tokens=1))
                loaded.append(handle.stats()["loads"] - before)
        assert loaded[0] >= 4 and loaded[1] == 0

    def test_gradients_of_what_comes_before(self, on):
        """Calls with gradients use the parameters, even those of experts that are not trained."""
        model = mixture(on)
        original = copy.deepcopy(model)
        for module in (model, original):
            for layer in module:
                layer.experts.requires_grad_(False)
        with mt.offload(model, DEVICE, budget=BUDGET) as handle:
            original = original.to(handle.device)
            for module in (model, original):
                module(batch(handle)).sum().backward()
            assert handle.stats()["loads"] == 0
            assert_same_module(model, original)

    @pytest.mark.filterwarnings("ignore:.*CUDA.*lazily:UserWarning")
    def test_training(self, on):
        """The parameters themselves are used, whose gradients are recorded."""
        models = [mixture(on), mixture(on)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        with mt.offload(models[0], DEVICE, budget=BUDGET, optimizer=optimizers[0]) as handle:
            models[1].to(handle.device)
            for seed in range(3):
                for model, optimizer in zip(models, optimizers, strict=True):
                    optimizer.zero_grad()
                    model(batch(handle, seed)).square().sum().backward()
                    optimizer.step()
                with torch.no_grad():
                    assert same(models[0](batch(handle)), models[1](batch(handle)))
        assert_same_module(*models)

    def test_compiled_code_names_no_slices(self, pair):
        model, original, handle = pair
        compiled = torch.compile(model, backend="eager")
        with torch.no_grad():
            for seed in range(2):
                assert same(compiled(batch(handle, seed)), original(batch(handle, seed)))
        assert shows_parameters(model)


class Indexed(Experts):
    """Uses its parameters as `use` says."""

    use = None

    def forward(self, x, chosen):
        return type(self).use(self, x)


def used(on, use, read_only=False, width=WIDTH):
    """What `use(module, x)` gives in an offloaded module and in a plain one."""

    class Using(Indexed):
        pass

    Using.use = use
    model = second(on, Using)
    original = copy.deepcopy(model)
    results = []
    with mt.offload(model, DEVICE, budget=BUDGET, read_only=read_only) as handle:
        assert [part.name for part in sliced(handle)] == ["0.experts", "1.experts"]
        original = original.to(handle.device)
        with torch.no_grad():
            for module in (model, original):
                x = batch(handle)
                try:
                    results.append(module[1].experts(x, None))
                except Exception as error:
                    results.append((type(error), str(error)))
        numbers = handle.stats()
    assert shows_parameters(model)
    assert_same_module(model, original)
    return *results, numbers


INDICES = {
    "int": 3,
    "negative": -2,
    "tensor": torch.tensor(3),
    "int32": torch.tensor(3, dtype=torch.int32),
}
OTHERS = {
    "tuple": (3, slice(0, 100)),
    "tuple of one": (2,),
    "row and columns": (1, torch.tensor([4, 7])),
    "bool": True,
    "mask": torch.tensor(1, dtype=torch.uint8),
    "slice": slice(1, 3),
    "all": ...,
    "none": None,
    "list": [1, 3],
    "tensor": torch.tensor([1, 3, 3]),
    "empty tuple": (),
    "columns": (slice(None), 2),
}


class TestIndices:
    @pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
    def test_numbers_load_a_slice(self, on, index):
        mine, others, numbers = used(on, lambda module, x: module.gate_up[index] + 0)
        assert same(mine, others)
        assert numbers["loads"] == 1

    @pytest.mark.parametrize("index", OTHERS.values(), ids=OTHERS)
    def test_others_read_at_home(self, on, index):
        mine, others, numbers = used(on, lambda module, x: module.gate_up[index] + 0)
        assert same(mine, others)
        assert numbers["loads"] == 0

    @pytest.mark.parametrize("index", [8, -9, "a", 1.5, torch.tensor(8), (9, 1)])
    def test_errors_are_torchs(self, on, index):
        mine, others, _ = used(on, lambda module, x: module.gate_up[index])
        assert mine == others and issubclass(mine[0], (IndexError, TypeError))

    def test_all_else_sees_the_parameter(self, on):
        def use(module, x):
            weight = module.gate_up
            first = weight[1]
            weight.note = 5
            assert (
                isinstance(weight, nn.Parameter)
                and weight is dict(module.named_parameters())["gate_up"]
            )
            assert (
                type(copy.deepcopy(weight)) is type(copy.deepcopy(module).gate_up) is nn.Parameter
            )
            assert type(pickle.loads(pickle.dumps(weight))) is nn.Parameter
            assert type(pickle.loads(pickle.dumps(module.state_dict()))["gate_up"]) is torch.Tensor
            assert vars(weight) == {"note": 5}
            module.gate_up = module.gate_up
            assert same(
                torch.vmap(lambda i: weight[i].amax())(torch.arange(4).to(x.device)),
                torch.stack([weight[i].amax() for i in range(4)]),
            )
            return torch.stack([first, weight.detach()[0], weight.unbind()[2], weight.mT[3].T])

        mine, others, _ = used(on, use)
        assert same(mine, others)

    def test_a_slice_is_a_tensor_of_its_own(self, on):
        def use(module, x):
            module.gate_up[1].note = 5
            module.gate_up[1].requires_grad_()
            again = module.gate_up[1]
            return again.requires_grad, hasattr(again, "note"), same(again, module.gate_up[3 - 2])

        mine, _, _ = used(on, use)
        assert mine == (False, False, True)

    @pytest.mark.filterwarnings("ignore:.*jit.script.* is deprecated:DeprecationWarning")
    @pytest.mark.parametrize("transform", ["jvp", "grad", "vmap"])
    def test_transforms(self, on, transform):
        def use(module, x):
            def work(x):
                return F.linear(x, module.gate_up[1])

            if transform == "jvp":
                return torch.func.jvp(work, (x,), (x,))[1]
            if transform == "vmap":
                return torch.vmap(work)(x)
            return torch.func.grad(lambda x: work(x).sum())(x)

        mine, others, _ = used(on, use)
        assert same(mine, others)

    def test_a_parameter_of_the_caller_is_used_instead(self, on):
        model = second(on)
        with mt.offload(model, DEVICE, budget=BUDGET) as handle, torch.no_grad():
            given = {"1.experts.gate_up": torch.zeros(COUNT, 2 * WIDTH, WIDTH).to(handle.device)}
            x = batch(handle)
            found = torch.func.functional_call(model, given, (x,))
            x = model[0](x)
            assert same(found, torch.tanh(model[1].dense(x)))


WRITES = {
    "the parameter": lambda module, first: module.gate_up.mul_(2),
    "an argument": lambda module, first: torch.mul(module.gate_up, 2, out=module.gate_up),
    "by another reference": lambda module, first: module._parameters["gate_up"].add_(1),
    "the slice": lambda module, first: first.mul_(2),
    "an item": lambda module, first: first.__setitem__(0, 1),
}


class TestWrites:
    @pytest.mark.parametrize("again", [None, 1, 2], ids=["", "same again", "another"])
    @pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
    def test_while_a_slice_is_used(self, on, write, again):
        """What was read between is not known: an error, and the write is kept."""

        def use(module, x):
            write(module, module.gate_up[1])
            if again is not None:
                module.gate_up[again]

        mine, others, _ = used(on, use)
        assert mine[0] is RuntimeError and "'1.experts.gate_up' was written in a call" in mine[1]
        assert others is None

    def test_before_a_slice_is_used(self, on):
        def use(module, x):
            module.gate_up.mul_(2)
            module.gate_up[1:3] = 1
            return torch.stack([module.gate_up[i] + 0 for i in range(4)])

        mine, others, _ = used(on, use)
        assert same(mine, others)

    @pytest.mark.parametrize("way", ["data", "set_", "to", "assign"])
    def test_a_parameter_that_is_elsewhere(self, on, way):
        """It is used where it is."""
        model = second(on)
        original = copy.deepcopy(model)
        with mt.offload(model, DEVICE, budget=BUDGET) as handle, torch.no_grad():
            original = original.to(handle.device)
            with pytest.warns(UserWarning, match="is not in the memory that offload"):
                for module in (model, original):
                    experts = module[1].experts
                    torch.manual_seed(1)
                    new = torch.randn(COUNT, 2 * WIDTH, WIDTH).to(handle.device)
                    if way == "data":
                        experts.gate_up.data = new
                    elif way == "set_":
                        experts.gate_up.set_(new)
                    elif way == "to":
                        module.double()
                    else:
                        experts.load_state_dict({"gate_up": new}, strict=False, assign=True)
                inputs = batch(handle)
                inputs = inputs.double() if way == "to" else inputs
                assert same(model(inputs), original(inputs))
            assert same(model(inputs), original(inputs))

    @pytest.mark.parametrize("way", ["counted", "data", "state_dict"])
    def test_between_two_calls(self, on, way):
        model = mixture(on)
        original = copy.deepcopy(model)
        with mt.offload(model, DEVICE, budget=BUDGET) as handle, torch.no_grad():
            original = original.to(handle.device)
            for seed in range(4):
                assert same(model(batch(handle)), original(batch(handle)))
                for module in (model, original):
                    torch.manual_seed(seed)
                    new = torch.randn(COUNT, WIDTH, WIDTH).to(handle.device)
                    for layer in module:
                        if way == "counted":
                            layer.experts.down.mul_(0.5)
                        elif way == "data":
                            layer.experts.down.data.copy_(new)
                        else:
                            layer.experts.load_state_dict({"down": new}, strict=False)

    def test_in_a_call_by_another_reference(self, on):
        """They are seen when the next slice is named."""
        model = second(on)
        original = copy.deepcopy(model)
        with mt.offload(model, DEVICE, budget=BUDGET) as handle, torch.no_grad():
            original = original.to(handle.device)
            for module in (model, original):

                def halve(_, __, own=module[1].experts.gate_up):
                    own.mul_(0.5)

                module[1].experts.register_forward_pre_hook(halve)
            for seed in range(3):
                assert same(model(batch(handle, seed)), original(batch(handle, seed)))

    def test_despite_read_only(self, on):
        model = second(on)
        with (
            pytest.warns(UserWarning, match=r"'1\.experts\.gate_up'"),
            mt.offload(model, DEVICE, budget=BUDGET, read_only=True) as handle,
            torch.no_grad(),
        ):
            model(batch(handle))
            model[1].experts.gate_up.mul_(2)
            with pytest.raises(RuntimeError, match=r"'1\.experts\.gate_up' was written"):
                model(batch(handle))


class TestLifetimes:
    def test_a_slice_that_outlives_its_call(self, on):
        kept = []
        model = second(on)
        handle = mt.offload(model, DEVICE, budget=BUDGET)
        model[1].experts.register_forward_hook(
            lambda module, *_: kept.extend(module.gate_up[i] for i in range(COUNT))
        )
        with torch.no_grad():
            for _ in range(3):
                model(batch(handle))
        for i, each in enumerate(kept):
            assert same(each, model[1].experts.gate_up[i % COUNT])
        handle.remove()
        assert all(
            same(each.cpu(), model[1].experts.gate_up[i % COUNT].cpu())
            for i, each in enumerate(kept)
        )

    @pytest.mark.parametrize("way", ["exception", "removed", "collected"])
    def test_a_call_that_does_not_end_well(self, on, way):
        model = second(on)
        original = copy.deepcopy(model)
        handle = mt.offload(model, DEVICE, budget=BUDGET)
        inputs = batch(handle)

        class Cycle:
            def __del__(self):
                handle.remove()

        def interrupt(module, arguments):
            first = module.gate_up[1]
            if way == "exception":
                raise ZeroDivisionError
            if way == "removed":
                handle.remove()
            else:
                cycle = Cycle()
                cycle.itself = cycle
                del cycle
                gc.collect()
            assert same(first.cpu(), original[1].experts.gate_up[1].cpu())

        model[1].experts.register_forward_pre_hook(interrupt)
        with torch.no_grad():
            if way == "exception":
                with pytest.raises(ZeroDivisionError):
                    model(inputs)
            elif torch.device(on) == inputs.device:
                assert same(model(inputs), original(inputs))
            else:  # the weights go home during the call, away from the inputs
                with pytest.raises(RuntimeError):
                    model(inputs)
        assert shows_parameters(model)
        handle.remove()

    def test_threads(self, on):
        model = mixture(on)
        original = copy.deepcopy(model)
        with mt.offload(model, DEVICE, budget=BUDGET) as handle:
            original = original.to(handle.device)

            def work(inputs):
                use_device(handle)
                with torch.no_grad():
                    for _ in range(5):
                        assert same(model(inputs), original(inputs))

            race_over(work, [batch(handle, seed) for seed in range(4)])
        assert shows_parameters(model)

    @pytest.mark.parametrize("is_interrupted", [False, True])
    def test_a_dropped_model_is_freed(self, on, is_interrupted):
        def interrupt(module, arguments):
            raise KeyboardInterrupt

        model = mixture(on)
        handle = mt.offload(model, DEVICE, budget=BUDGET)
        with torch.no_grad():
            model(batch(handle))
            if is_interrupted:
                model[-1].experts.register_forward_pre_hook(interrupt)
                with pytest.raises(KeyboardInterrupt):
                    model(batch(handle))
        parameters = [weakref.ref(p) for p in model.parameters()]
        del model, handle
        gc.collect()
        assert [each for each in parameters if each() is not None] == []


class TestChoice:
    def test_what_cannot_be_loaded_alone(self, on):
        class Touching(Experts):
            def forward(self, x, chosen):
                self.down.data[0] = 1
                return super().forward(x, chosen)

        class Small(Experts):
            def __init__(self):
                super().__init__(width=WIDTH // 2)

            def forward(self, x, chosen):
                return super().forward(x[:, : WIDTH // 2], chosen).repeat(1, 2)

        class Transposed(Experts):
            def __init__(self):
                super().__init__()
                self.gate_up = nn.Parameter(self.gate_up.data.mT.contiguous().mT)
                self.down = nn.Parameter(self.down.data.mT.contiguous().mT)

        for kind in (Touching, Small, Transposed):
            model = mixture(on, kind)
            original = copy.deepcopy(model)
            budget = sum(p.nbytes for p in model.parameters()) // 2
            with mt.offload(model, DEVICE, budget=budget) as handle, torch.no_grad():
                assert sliced(handle) == []
                original = original.to(handle.device)
                assert same(model(batch(handle)), original(batch(handle)))
                if kind is not Touching:  # it reads all of one parameter
                    call = {name: each.bus_bytes for name, each in handle.coverage.items()}
                    home = {part.name: 0 for part in handle.explain() if part.place == "home"}
                    assert home
                    for part in handle.explain():
                        if part.name in home and part.place == "home":
                            home[part.name] += part.nbytes
                    assert {n: 0 < call[n] < b for n, b in home.items()} == dict.fromkeys(
                        home, True
                    )

    def test_frames_of_slices(self):
        class Part:
            asked = None

            def __init__(self, use, nbytes, slice_nbytes=0):
                self.use, self.nbytes, self.slice_nbytes = use, nbytes, slice_nbytes

        def choose(room, keeps):
            parts = [
                Part("whole", 10 * MIB),
                *(Part("slices", 64 * MIB, 8 * MIB) for _ in range(4)),
            ]
            frames = choice.choose_places(parts, room * MIB, keeps_slices=keeps)
            return frames // MIB, [part.place for part in parts[1:]].count("device")

        assert choose(127, False) == (0, 1)  # four slices are much of it
        assert choose(128, False) == (32, 1)
        assert choose(128, True) == (118, 0)
        assert choose(265, False) == (32, 3)
        assert choose(265, True) == (255, 0)
        assert choose(266, True) == (0, 4)
