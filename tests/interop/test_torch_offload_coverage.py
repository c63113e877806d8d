"""handle.coverage: the calls of each part that were announced, and one warning of the others."""

import copy
import pickle

import pytest

from offloaded import LAYER, WIDTH, assert_same_module, batch, layers, nn, same, use_device
from races import race
from tensors import mt, torch

DEVICE = 0
F = torch.nn.functional
# The warning of gradients that are outside of the budget is another one.
pytestmark = pytest.mark.filterwarnings("ignore:.* was given no optimizer")


class User(nn.Module):
    """Uses the parameters of its children, some of which it calls."""

    def __init__(self, used=(1, 3), function=None):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.used = used
        self.function = function or (lambda part, x: F.linear(x, part.weight, part.bias))

    def forward(self, x):
        for i, part in enumerate(self.parts):
            x = self.function(part, x) if i in self.used else part(x)
            x = torch.tanh(x)
        return x


WAYS = {
    "weight and bias": None,
    "transposed": lambda part, x: x @ part.weight.t() + part.bias,
    "forward": lambda part, x: part.forward(x),
    "in a list": lambda part, x: F.linear(x, torch.stack([part.weight, part.weight])[0], part.bias),
    "named parameters": lambda part, x: F.linear(x, *dict(part.named_parameters()).values()),
    "unbound": nn.Linear.forward,
    "under a mode": lambda part, x: torch.utils.checkpoint.checkpoint(
        lambda x: F.linear(x, part.weight, part.bias), x, use_reentrant=False
    ),
}


class TestCounts:
    def test_of_a_model_whose_calls_are_all_seen(self, on):
        model = layers(on=on)
        with mt.offload(model, DEVICE, budget=4 * LAYER) as handle:
            names = list(handle.coverage)
            assert len(names) == handle.stats()["groups"] > 4
            assert set(handle.coverage.values()) == {mt.Coverage(0, 0, 0)}
            with torch.no_grad():
                for _ in range(3):
                    model(batch(handle))
            assert set(handle.coverage.values()) == {mt.Coverage(3, 3, 0)}
            model(batch(handle)).sum().backward()
            before = handle.coverage
            assert all(each.seen == each.made == 5 for each in before.values())
            assert before[names[0]] == mt.Coverage(seen=5, made=5, bus_bytes=0)
        assert handle.coverage == before

    def test_what_stays_is_not_listed(self, on):
        with mt.offload(layers(2, on=on), DEVICE, budget=100 * LAYER) as handle:
            assert handle.coverage == {}

    def test_bytes_over_the_bus_where_the_budget_has_no_room(self, on):
        model = layers(2, on=on)
        large = nn.Linear(4 * WIDTH, 4 * WIDTH)
        model.append(nn.Linear(WIDTH, 4 * WIDTH)).append(large).to(on)
        with pytest.warns(UserWarning, match="1 of [1-4] blocks never fit"):
            handle = mt.offload(model, DEVICE, budget=6 * LAYER)
        with torch.no_grad():
            for _ in range(2):
                model(batch(handle))
        found = handle.coverage
        handle.remove()
        nbytes = sum(-(-p.nbytes // 512) * 512 for p in large.parameters())
        assert found["5"] == mt.Coverage(2, 2, 2 * nbytes)
        others = [each for name, each in found.items() if name != "5"]
        assert all(each == mt.Coverage(2, 2, 0) for each in others)

    @pytest.mark.parametrize("bag", [False, True])
    def test_rows_of_embeddings(self, on, bag):
        torch.manual_seed(0)
        first = nn.EmbeddingBag(1000, WIDTH) if bag else nn.Embedding(1000, WIDTH)
        model = nn.Sequential(first, *layers(4)).to(on)
        with mt.offload(model, DEVICE, budget=3 * LAYER) as handle:
            tokens = torch.arange(6, device=handle.device).view(2, 3)
            with torch.no_grad():
                for _ in range(3):
                    model(tokens)
            model(tokens).sum().backward()  # a gradient that needs no announcement
            assert handle.coverage["0"] == mt.Coverage(4, 4, 4 * 6 * WIDTH * 4)

    def test_names_with_several_devices(self, on):
        model = nn.Sequential(layers(2), layers(2)).to(on)
        with mt.offload(model, {"0": 0, "1": 0}, budget=LAYER) as handle:
            assert list(handle.coverage) == ["0.0", "0.2", "1.0", "1.2"]

    def test_as_a_table(self, on):
        pandas = pytest.importorskip("pandas")
        model = layers(2, on=on)
        with mt.offload(model, DEVICE, budget=LAYER) as handle, torch.no_grad():
            model(batch(handle))
            table = pandas.DataFrame.from_dict(handle.coverage, orient="index")
        assert list(table.columns) == ["seen", "made", "bus_bytes"]
        assert list(table.index) == ["0", "2"] and list(table["made"]) == [1, 1]


class TestWarnings:
    @pytest.mark.parametrize("way", [way for way in WAYS if way != "under a mode"])
    def test_parameters_that_a_parent_uses(self, on, way):
        model = User(function=WAYS[way]).to(on)
        reference = copy.deepcopy(model)
        with mt.offload(model, DEVICE, budget=3 * LAYER) as handle, torch.no_grad():
            reference.to(handle.device)
            text = r"'parts\.1', 'parts\.3' were used without a call that offload\(\) sees"
            with pytest.warns(UserWarning, match=text) as caught:
                for _ in range(3):
                    assert same(model(batch(handle)), reference(batch(handle)))
            assert len(caught) == 1
            found = handle.coverage
            assert all(each.seen == 3 for name, each in found.items() if int(name[-1]) % 2 == 0)
            assert found["parts.1"] == found["parts.3"] == mt.Coverage(0, 3, 3 * LAYER)

    def test_the_warning_names_the_user(self, on):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), User([2])).to(on)
        with mt.offload(model, DEVICE, budget=LAYER) as handle, torch.no_grad():
            with pytest.warns(UserWarning, match=r"name '1' in blocks=, or call '1\.parts\.2'"):
                model(batch(handle))
        with mt.offload(model, DEVICE, budget=7 * LAYER - 1, blocks=["1"]) as handle:
            with torch.no_grad():
                model(batch(handle))
            assert handle.coverage["1"].seen == handle.coverage["1"].made == 1

    @pytest.mark.parametrize("way", WAYS)
    def test_in_training(self, on, way):
        model = User(function=WAYS[way]).to(on)
        reference = copy.deepcopy(model)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
        with mt.offload(model, DEVICE, budget=3 * LAYER, optimizer=optimizers[0]) as handle:
            reference.to(handle.device)
            with pytest.warns(UserWarning, match=r"'parts\.1', 'parts\.3' were used") as caught:
                for _ in range(3):
                    for m, optimizer in zip((model, reference), optimizers, strict=True):
                        m(batch(handle)).sum().backward()
                        optimizer.step()
                        optimizer.zero_grad()
            assert len(caught) == 1
            found = handle.coverage
            assert found["parts.0"].seen == found["parts.0"].made == 6
            assert found["parts.1"].seen == 0 and found["parts.1"].made == 6
            assert found["parts.1"].bus_bytes == 6 * LAYER
        assert_same_module(model, reference.to(on))

    @pytest.mark.parametrize("clear", [True, False])
    def test_a_backward_pass_that_no_output_shows(self, on, clear):
        """The layer keeps its output where nobody looks."""

        class Closure(nn.Linear):
            def forward(self, x):
                y = super().forward(x)
                return lambda: y

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.layers = nn.ModuleList(
                    (Closure if i == 1 else nn.Linear)(WIDTH, WIDTH) for i in range(4)
                )

            def forward(self, x):
                for layer in self.layers:
                    x = layer(x)
                    x = torch.tanh(x() if callable(x) else x)
                return x

        model = Model().to(on)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mt.offload(model, DEVICE, budget=3 * LAYER, optimizer=optimizer) as handle:
            with pytest.warns(
                UserWarning, match=r"^'layers\.1' was used .* no backward call was announced"
            ) as caught:
                for _ in range(3):
                    model(batch(handle)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=clear)
            assert len(caught) == 1
            assert handle.coverage["layers.1"] == mt.Coverage(3, 6, 3 * LAYER)
            assert handle.coverage["layers.0"].made == 6

    def test_none_for_modules_that_are_not_called(self, on):
        """Experts: some in the first call, others later, in forward and backward passes."""

        class Experts(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

            def forward(self, x, order):
                for i in order:
                    x = torch.tanh(self.parts[i](x))
                return x

        model = Experts().to(on)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mt.offload(model, DEVICE, budget=3 * LAYER, optimizer=optimizer) as handle:
            for order in ([0, 1], [2, 3], [], [4, 4], [0, 3]):
                with torch.no_grad():
                    model(batch(handle), order)
                if order:
                    model(batch(handle), order).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)
            found = handle.coverage
        assert all(each.seen == each.made for each in found.values())
        assert found["parts.5"] == mt.Coverage(0, 0, 0)

    @pytest.mark.parametrize("what", ["shape", "view", "state_dict", "norm after the call"])
    def test_none_for_what_reads_no_parameter_in_a_call(self, on, what):
        class Model(User):
            def forward(self, x):
                for part in self.parts:
                    if what == "shape":
                        x = x.to(part.weight.dtype) * (part.weight.shape[0] / WIDTH)
                    elif what == "view":
                        part.weight.view(-1).t().detach()
                    elif what == "state_dict":
                        part.state_dict()
                    x = part(x)
                return x

        model = Model().to(on)
        with mt.offload(model, DEVICE, budget=3 * LAYER) as handle, torch.no_grad():
            for _ in range(2):
                model(batch(handle))
            if what == "norm after the call":
                torch.nn.utils.get_total_norm(model.parameters())
            assert set(handle.coverage.values()) == {mt.Coverage(2, 2, 0)}

    def test_none_for_tied_weights_that_are_looked_up(self, on):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.embed = nn.Embedding(256, WIDTH)
                self.middle = layers(4)
                self.head = nn.Linear(WIDTH, 256, bias=False)
                self.head.weight = self.embed.weight

            def forward(self, tokens):
                return self.head(self.middle(self.embed(tokens)))

        model = Model().to(on)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mt.offload(model, DEVICE, budget=6 * LAYER, optimizer=optimizer) as handle:
            tokens = torch.arange(8, device=handle.device)
            for _ in range(2):
                model(tokens).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            found = handle.coverage["embed"]
        assert found.seen == found.made == 2 * 3
        assert found.bus_bytes % (8 * WIDTH * 4) == 0

    def test_none_when_threads_train_at_once(self, on):
        model = layers(on=on)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mt.offload(model, DEVICE, budget=6 * LAYER, optimizer=optimizer) as handle:
            inputs = batch(handle)

            def work():
                use_device(handle)
                for _ in range(5):
                    model(inputs).sum().backward()

            race(work, work, work)
            assert all(each.seen == each.made for each in handle.coverage.values())


class TestTheFirstCall:
    """Its operations are watched, which nothing else may notice."""

    def test_after_an_exception_the_next_one_is_watched(self, on):
        model = User().to(on)
        with mt.offload(model, DEVICE, budget=3 * LAYER) as handle, torch.no_grad():
            for error in (KeyboardInterrupt, RuntimeError):

                def fail(*_, error=error):
                    raise error

                hook = model.parts[4].register_forward_pre_hook(fail)
                with pytest.raises(error):
                    model(batch(handle))
                hook.remove()
                modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
                assert modes == []
            with pytest.warns(UserWarning, match=r"'parts\.1', 'parts\.3' were used"):
                model(batch(handle))

    def test_leaves_no_trace_on_the_module(self, on):
        model = layers(2, on=on)
        before = set(vars(model))
        handle = mt.offload(model, DEVICE, budget=LAYER)
        made = [copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))]
        assert same(made[0](batch(handle)), made[2](batch(handle)))
        expected = made[0](batch(handle))
        assert same(model(batch(handle)), expected) and same(made[1](batch(handle)), expected)
        handle.remove()
        assert set(vars(model)) == before
        assert vars(model)["_forward_hooks"] == {} == vars(model)["_forward_pre_hooks"]

    def test_a_replica_is_refused(self, on):
        model = layers(2, on=on)
        with mt.offload(model, DEVICE, budget=LAYER) as handle:
            replica = model._replicate_for_data_parallel()
            replica[0] = model[0]._replicate_for_data_parallel()
            with pytest.raises(RuntimeError, match="DataParallel copies all"):
                replica(batch(handle))

    def test_in_several_threads_at_once(self, on):
        model = User().to(on)
        with mt.offload(model, DEVICE, budget=3 * LAYER) as handle:
            inputs = batch(handle)

            def work():
                use_device(handle)
                with torch.no_grad():
                    model(inputs)

            with pytest.warns(UserWarning, match=r"'parts\.1', 'parts\.3' were used") as caught:
                race(work, work, work)
            assert len(caught) == 1
            assert handle.coverage["parts.1"].made == 3
