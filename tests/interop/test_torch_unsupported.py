"""managedmem.torch with unsupported="skip": tensors that cannot take a hint are passed over."""

import pickle

import pytest

from constants import PAGE
from managedmem import Device, Host, ManagedMemoryResource
from programs import run_python
from tensors import last_prefetch, memory, mt, small_model, torch

ZERO, HOST = Device(0), Host()


def prefetch(targets, **more):
    return mt.prefetch(targets, HOST, **more)


def advise(targets, **more):
    return mt.advise(targets, "set_preferred_location", HOST, **more)


def took(call, tensor):
    """True if the hint reached a tensor."""
    if call is prefetch:
        return last_prefetch(tensor) is HOST
    return memory(tensor).preferred_location is HOST


each_call = pytest.mark.parametrize("call", [prefetch, advise])


def half_managed():
    """A model, with one of two layers and no buffer in managed memory."""
    model = small_model()
    mt.to_managed(model.second)
    return model


def system_memory_is_a_target():
    return Device().pageable_memory_access


@each_call
def test_tensors_outside_managed_memory(call):
    model = half_managed()
    names = [n for n, _ in model.named_parameters() if not n.startswith("second")]
    if system_memory_is_a_target():
        names = []
    result = call(model, unsupported="skip")
    assert result.names == tuple(names) and result.skipped == len(names)
    inside = [p for n, p in model.named_parameters() if n not in names]
    assert result == sum(p.nbytes for p in inside)
    assert all(took(call, p) for p in model.second.parameters())
    if names:
        with pytest.raises(mt.NotManagedError, match=r"first\.weight"):
            call(model)
    with_buffers = call(model, include_buffers=True, unsupported="skip")
    assert with_buffers.skipped >= result.skipped


@each_call
def test_nothing_is_passed_over_where_all_is_managed(call):
    layer = half_managed().second
    for more in ({}, {"unsupported": "raise"}, {"unsupported": "skip"}):
        result = call(layer, **more)
        assert result == sum(p.nbytes for p in layer.parameters())
        assert (result.skipped, result.names) == (0, ())


@each_call
def test_tensors_without_memory(call):
    strange = {
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
        "lazy": torch.nn.LazyLinear(3),
        "empty": torch.empty(0),
    }
    result = call(strange, unsupported="skip")
    assert result == 0 and result.names == ("sparse", "meta", "lazy.weight", "lazy.bias")
    for name in ("sparse", "meta"):
        with pytest.raises(ValueError, match=name):
            call(strange[name])


@each_call
def test_no_tensor_at_all(call):
    result = call([], unsupported="skip")
    assert (result, result.skipped) == (0, 0)


@each_call
def test_errors_stay(call):
    model = half_managed()
    plain = torch.ones(3)
    with pytest.raises(ValueError, match='unsupported must be "raise" or "skip", got None'):
        call(plain, unsupported=None)
    for wrong in (5, "x", [model, object()]):
        with pytest.raises(TypeError):
            call(wrong, unsupported="skip")
    for targets in (plain, model, model.second):
        with pytest.raises(TypeError, match="Device or Host"):
            mt.prefetch(targets, 0, unsupported="skip")
        with pytest.raises(ValueError, match="dispatch"):
            mt.prefetch(targets, HOST, dispatch="wrong", unsupported="skip")
        with pytest.raises(ValueError, match="there is no advice"):
            mt.advise(targets, "set_mostly", unsupported="skip")
        with pytest.raises(TypeError, match="one location for all"):
            mt.prefetch(targets, [HOST], unsupported="skip")


def test_advice_on_pool_memory_beside_other_memory():
    weight = half_managed().second.weight
    with ManagedMemoryResource(pooled=True) as pool, pool.allocate(PAGE) as pooled:
        array = torch.frombuffer(memoryview(pooled), dtype=torch.uint8)
        targets = {"weight": weight, "pooled": array, "view": array[:5]}
        result = advise(targets, unsupported="skip")
        if result.skipped:  # as with drivers of CUDA 13.0
            assert result.names == ("pooled", "view") and result == weight.nbytes
        else:
            assert result == weight.nbytes + array.nbytes
        assert took(advise, weight)
        del array, targets


def test_the_result_is_an_int_that_can_be_copied():
    result = mt.HintedBytes(12, ("a", "b"))
    copied = pickle.loads(pickle.dumps(result))
    assert copied == 12 and copied.names == ("a", "b") and copied.skipped == 2
    assert isinstance(result, int) and f"{result:,}" == "12"
    assert mt.HintedBytes(3).names == ()


def test_without_concurrent_access():
    run_python(
        """
        import warnings
        import torch, managedmem
        import managedmem.torch as mt
        from managedmem import Device, Host
        warnings.simplefilter("ignore")
        model = mt.to_managed(torch.nn.Linear(3, 5))
        for where in (Device(0), Host()):
            moved = mt.prefetch(model, where, unsupported="skip")
            assert moved == 0 and moved.names == ("weight", "bias"), (moved, moved.names)
            try:
                mt.prefetch(model, where)
            except managedmem.CUDAError:
                continue
            raise AssertionError("accepted")
        advised = mt.advise(model, "set_accessed_by", Device(0), unsupported="skip")
        assert (advised, advised.skipped) == (0, 2)
        advised = mt.advise(model, "set_accessed_by", Host(), unsupported="skip")
        assert (advised, advised.skipped) == (4 * (15 + 5), 0)
        """,
        emulator="profile=wsl",
    )
