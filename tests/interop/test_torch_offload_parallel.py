"""offload() inside of torch's wrappers: DistributedDataParallel, DataParallel, torch.compile."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import managedmem
from constants import EMULATED
from offloaded import IN_GRAPHS, LAYER, assert_same_module, batch, layers, nn, same
from programs import run_python
from tensors import mt, torch

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs a torch with gloo", allow_module_level=True)

DEVICE = "cuda:0"
PATIENCE = 180  # seconds for programs that import torch, on a busy machine
STEPS = 3


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(model, optimizer, wrapped, place):
    """Steps that keep the gradients of some; returns the losses."""
    chance = torch.Generator().manual_seed(1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step != 1)
        inputs = torch.rand(4, 64, generator=chance).to(place)
        loss = wrapped(inputs).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(on, budget=None, **options):
    """A model after steps inside of DistributedDataParallel, its losses, and the counters."""
    model = layers(on=on)
    optimizer = torch.optim.Adam(model.parameters())
    if budget is None:
        place = torch.device("cpu" if EMULATED else DEVICE)
        model.to(place)
    else:
        handle = mt.offload(model, DEVICE, budget=budget, optimizer=optimizer)
        place = handle.device
    wrapped = nn.parallel.DistributedDataParallel(model, **options)
    losses = train(model, optimizer, wrapped, place)
    if budget is None:
        return model, losses, {}
    numbers = handle.stats()
    del wrapped
    handle.remove()
    return model, losses, numbers


class TestDistributed:
    @pytest.mark.parametrize(
        ("budget", "options"),
        [
            (3 * LAYER, {}),
            (8 * LAYER, {}),
            (20 * LAYER, {}),
            (100 * LAYER, {}),
            (3 * LAYER, {"gradient_as_bucket_view": True}),
            (3 * LAYER, {"static_graph": True}),
        ],
    )
    def test_numbers_of_the_plain_module(self, alone, on, budget, options):
        model, losses, numbers = trained(on, budget, **options)
        reference, expected, _ = trained(on, **options)
        assert losses == expected
        assert_same_module(model, reference.to(on))
        assert numbers["failures"] == 0
        assert numbers["held"] <= budget
        assert (numbers["groups"] > 0) == (budget < 8 * LAYER)

    def test_one_that_accumulates_without_communication(self, alone, on):
        model, reference = layers(on=on), layers(on=on)
        with mt.offload(
            model, DEVICE, budget=3 * LAYER, optimizer=torch.optim.SGD(model.parameters())
        ) as handle:
            reference.to(handle.device)
            for each in (model, reference):
                wrapped = nn.parallel.DistributedDataParallel(each)
                with wrapped.no_sync():
                    wrapped(batch(handle)).sum().backward()
                wrapped(batch(handle)).sum().backward()
            for one, other in zip(model.parameters(), reference.parameters(), strict=True):
                assert same(one.grad, other.grad)
                place = managedmem.ManagedBuffer.from_handle(one.grad.data_ptr(), one.grad.nbytes)
                assert place.is_host_accessible and place.is_device_accessible

    def test_a_wrapped_module_is_refused(self, alone, on):
        wrapped = nn.parallel.DistributedDataParallel(layers(2, on=on))
        with pytest.raises(TypeError, match=r"call offload\(\) on the module inside first"):
            mt.offload(wrapped, DEVICE, budget=LAYER)

    @pytest.mark.parametrize(
        "kind", ["DistributedDataParallel", "FullyShardedDataParallel", "FSDP"]
    )
    def test_a_wrapped_child_is_refused_by_name(self, alone, kind):
        inner = nn.Linear(64, 64)
        if kind == "DistributedDataParallel":
            inner = nn.parallel.DistributedDataParallel(inner)
        elif kind == "FullyShardedDataParallel":
            fsdp = pytest.importorskip("torch.distributed.fsdp")
            with pytest.warns(UserWarning):  # of one process
                inner = fsdp.FullyShardedDataParallel(inner, device_id=torch.device("cpu"))
        else:
            fsdp = pytest.importorskip("torch.distributed.fsdp")
            mesh = dist.init_device_mesh("cpu", (1,))
            inner = fsdp.fully_shard(inner, mesh=mesh)
        model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.ReLU(), inner))
        with pytest.raises(TypeError, match=rf"'1.1' is (wrapped in|sharded by) {kind}"):
            mt.offload(model, DEVICE, budget=LAYER)
        assert not mt.is_managed(model[0].weight)

    @pytest.mark.timeout(PATIENCE + 20)
    def test_two_processes_have_the_numbers_of_plain_modules(self, on, tmp_path):
        """Gradients are reduced while parts leave, the last layers' first, and at home too."""

        def run(rank):
            return run_python(
                f"""
                import os
                from offloaded import LAYER, assert_same_module, batch, layers, nn
                from tensors import mt, torch
                import torch.distributed as dist

                meeting = "file://{tmp_path}/meeting"
                dist.init_process_group("gloo", init_method=meeting, rank={rank}, world_size=2)
                wrap = nn.parallel.DistributedDataParallel
                for budget, options in (
                    (3 * LAYER, dict(bucket_cap_mb=2 * LAYER / 2**20)),
                    (3 * LAYER, dict(gradient_as_bucket_view=True)),
                    (9 * LAYER, dict(find_unused_parameters=True)),
                ):
                    model, reference = layers(on={on!r}), layers()
                    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
                    handle = mt.offload(model, 0, budget=budget, optimizer=optimizer)
                    reference.to(handle.device)
                    plain = torch.optim.Adam(reference.parameters(), lr=0.01)
                    both = [
                        (wrap(each, **options), steps)
                        for each, steps in ((model, optimizer), (reference, plain))
                    ]
                    for step in range(4):
                        losses = []
                        for wrapped, steps in both:
                            loss = wrapped(batch(handle, rows=4 + 2 * {rank} + step)).sum()
                            loss.backward()
                            steps.step()
                            steps.zero_grad(set_to_none=step != 2)
                            losses.append(loss.item())
                        assert losses[0] == losses[1], (budget, step, losses)
                    numbers = handle.stats()
                    assert numbers["failures"] == 0 and numbers["held"] <= numbers["budget"]
                    assert budget > 8 * LAYER or numbers["acquired"] >= 4 * 2 * 8
                    del wrapped, both
                    handle.remove()
                    assert_same_module(model, reference.to({on!r}))
                    whole = [torch.empty_like(model[0].weight.detach().cpu()) for _ in range(2)]
                    dist.all_gather(whole, model[0].weight.detach().cpu())
                    assert torch.equal(*whole)
                dist.barrier()
                os._exit(0)  # gloo's threads could abort Python's shutdown
                """,
                driver="emulator" if EMULATED else "cuda",
                patience=PATIENCE,
            )

        with ThreadPoolExecutor(2) as both:
            for done in both.map(run, range(2)):
                assert "Error" not in done.stderr


class TestDataParallel:
    @pytest.mark.filterwarnings("ignore:.* was given no optimizer")
    def test_one_device_works(self, on):
        model, reference = layers(on=on), layers(on=on)
        with mt.offload(model, DEVICE, budget=3 * LAYER) as handle:
            reference.to(handle.device)
            wrapped = nn.DataParallel(model, device_ids=[0])
            for _ in range(2):
                one, other = wrapped(batch(handle)), reference(batch(handle))
                one.sum().backward(), other.sum().backward()
                assert same(one, other)
            assert_same_module(model, reference)

    def test_replicas_are_refused(self, on):
        """DataParallel makes them this way on several devices."""
        model = layers(on=on)
        with mt.offload(model, DEVICE, budget=3 * LAYER) as handle:
            streamed = next(layer for layer in model if layer._forward_pre_hooks)
            replica = streamed._replicate_for_data_parallel()
            with pytest.raises(RuntimeError, match="use DistributedDataParallel with one process"):
                replica(batch(handle))
            model(batch(handle))
            assert handle.stats()["acquired"] == len(model) // 2 > handle.stats()["groups"] > 0


@pytest.mark.skipif(not IN_GRAPHS, reason="needs torch 2.13 or later")
class TestCompile:
    @pytest.mark.timeout(PATIENCE + 20)
    def test_fullgraph(self, on):
        done = run_python(
            f"""
            from offloaded import LAYER, batch, layers, same
            from tensors import mt, torch

            model, reference = layers(2, on={on!r}), layers(2)
            handle = mt.offload(model, 0, budget=LAYER)
            reference.to(handle.device)
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            assert same(compiled(batch(handle)), reference(batch(handle)))
            assert same(model(batch(handle)), reference(batch(handle)))
            handle.remove()
            torch._dynamo.reset()
            handle = mt.offload(model, 0, budget=2 * LAYER)
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            assert same(compiled(batch(handle)), reference(batch(handle)))
            """,
            driver="emulator" if EMULATED else "cuda",
            patience=PATIENCE,
        )
        assert done.stderr == ""
