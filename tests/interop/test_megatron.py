"""managedmem.megatron: the names of unified_memory, their forms, return values and errors."""

import inspect
import itertools

import pytest

from calls import names
from constants import PAGE
from managedmem import Device, Host, emulator
from programs import run_python
from tensors import HAS_CUDA, gpu_only, last_prefetch, megatron, memory, mt, small_model, torch

CPU = -1
TENSOR_CALLS = {
    "prefetch": megatron.prefetch_managed_tensor,
    "preferred": megatron.advise_managed_tensor_preferred_location,
    "accessed": megatron.advise_managed_tensor_accessed_by,
}
MODULE_CALLS = {
    "prefetch": megatron.prefetch_managed_module_parameters,
    "preferred": megatron.advise_managed_module_parameters_preferred_location,
}
tensor_calls = pytest.mark.parametrize("call", TENSOR_CALLS.values(), ids=TENSOR_CALLS)
module_calls = pytest.mark.parametrize("call", MODULE_CALLS.values(), ids=MODULE_CALLS)


def in_place(tensor):
    """Where a tensor was told to be, by prefetch and by advice."""
    facts = memory(tensor)
    return last_prefetch(tensor), facts.preferred_location, set(facts.accessed_by)


UNTOUCHED = (None, None, set())


class TestForms:
    @pytest.mark.parametrize(
        ("name", "form"),
        [
            ("compile_allocator", "()"),
            ("create_unified_mempool", "()"),
            ("prefetch_managed_tensor", "(tensor, *, device, stream=None)"),
            ("advise_managed_tensor_preferred_location", "(tensor, *, device)"),
            ("advise_managed_tensor_accessed_by", "(tensor, *, device)"),
            ("prefetch_managed_module_parameters", "(module, *, device, include_buffers=False)"),
            (
                "advise_managed_module_parameters_preferred_location",
                "(module, *, device, include_buffers=False)",
            ),
        ],
    )
    def test_arguments(self, name, form):
        signature = inspect.signature(getattr(megatron, name))
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        assert str(inspect.Signature(bare)) == form

    def test_states_and_errors(self):
        assert [state.name for state in megatron.CompilationState] == [
            "UNATTEMPTED",
            "FAILURE",
            "SUCCESS",
        ]
        assert issubclass(
            megatron.UnifiedMemoryCompileTimeoutError, mt.UnifiedMemoryUnsupportedError
        )
        assert not issubclass(mt.UnifiedMemoryUnsupportedError, ValueError | RuntimeError)

    def test_the_module_as_a_whole_takes_the_other_ones_place(self):
        from managedmem import megatron as unified_memory

        assert set(unified_memory.__all__) <= set(dir(unified_memory))


class TestTensors:
    @tensor_calls
    def test_to_the_cpu_and_to_a_gpu(self, managed, call):
        for number, location in [(CPU, Host()), (0, Device(0))]:
            tensor = managed()
            assert call(tensor, device=number) is None
            expected = {
                "prefetch": (location, None, set()),
                "preferred": (None, location, set()),
                "accessed": (None, None, {location}),
            }
            (name,) = (n for n, c in TENSOR_CALLS.items() if c is call)
            assert in_place(tensor) == expected[name]

    @tensor_calls
    def test_nothing_to_do(self, managed, on, call):
        assert call(None, device=0) is None
        assert call(torch.empty(0, device=on), device=0) is None
        assert call(managed()[:0], device=CPU) is None

    @tensor_calls
    def test_what_is_no_tensor(self, call):
        for bad in (3, [torch.ones(3)], "tensor"):
            with pytest.raises(TypeError, match=r"torch\.Tensor or None"):
                call(bad, device=0)

    @tensor_calls
    def test_memory_that_is_not_managed(self, on, call):
        """On the CPU a ValueError, as for every CPU tensor there; on CUDA a RuntimeError."""
        if on == "cpu" and Device().pageable_memory_access:
            pytest.skip("system memory is a fair target here")
        with pytest.raises(ValueError if on == "cpu" else RuntimeError, match="not in managed"):
            call(torch.ones(3, device=on), device=0)

    @tensor_calls
    def test_bad_devices(self, managed, call):
        tensor = managed()
        for bad in ("cuda:0", 1.5, None, True, Device(0), torch.device("cuda")):
            with pytest.raises(TypeError, match="number of a GPU, or -1"):
                call(tensor, device=bad)
        for bad in (-2, Device.count()):
            with pytest.raises(ValueError, match="device"):
                call(tensor, device=bad)
        assert in_place(tensor) == UNTOUCHED

    @tensor_calls
    def test_views_cover_their_extent(self, managed, call):
        tensor = managed((4, PAGE))
        call(tensor[1:3, 5:9], device=0)
        assert in_place(tensor[1:3, 5:9]) != UNTOUCHED
        assert in_place(tensor[1, 9:]) != UNTOUCHED
        assert in_place(tensor[0]) == in_place(tensor[3]) == UNTOUCHED

    @tensor_calls
    def test_other_tensors_without_one_memory(self, on, call):
        if on == "cpu":
            with pytest.raises(ValueError, match="to_empty"):
                call(torch.ones(3, device="meta"), device=0)
        with pytest.raises(ValueError, match="layout sparse_coo"):
            call(torch.eye(3, device=on).to_sparse(), device=0)

    def test_a_stream_can_be_given(self, managed, stream, device0):
        tensor = managed()
        megatron.prefetch_managed_tensor(tensor, device=0, stream=stream)
        stream.sync()
        assert last_prefetch(tensor) == device0

    @pytest.mark.emulator_only
    @pytest.mark.parametrize(
        ("call", "function", "words"),
        [
            (TENSOR_CALLS["prefetch"], "cuMemPrefetchAsync", "prefetch a tensor"),
            (TENSOR_CALLS["preferred"], "cuMemAdvise", "preferred location"),
            (TENSOR_CALLS["accessed"], "cuMemAdvise", "accessed by"),
        ],
        ids=TENSOR_CALLS,
    )
    def test_errors_name_what_was_tried(self, managed, call, function, words):
        tensor = managed()
        emulator.fail(function)
        with pytest.raises(RuntimeError, match=function) as caught:
            call(tensor, device=0)
        assert any(words in note for note in caught.value.__notes__)


class TestModules:
    def test_prefetch_gives_the_number_of_bytes(self, on, device0):
        model = mt.to_managed(small_model(on))
        parameters = sum(p.nbytes for p in model.parameters())
        buffers = sum(b.nbytes for b in model.buffers())
        prefetch = megatron.prefetch_managed_module_parameters
        assert prefetch(model, device=0) == parameters
        assert {last_prefetch(p) for p in model.parameters()} == {device0}
        assert {last_prefetch(b) for b in model.buffers()} == {None}
        model = mt.to_managed(small_model(on))
        assert prefetch(model, device=CPU, include_buffers=True) == parameters + buffers
        tensors = itertools.chain(model.parameters(), model.buffers())
        assert {last_prefetch(t) for t in tensors} == {Host()}

    def test_preferred_location(self, on):
        model = mt.to_managed(small_model(on))
        advise = megatron.advise_managed_module_parameters_preferred_location
        assert advise(model, device=CPU) is None
        assert {memory(p).preferred_location for p in model.parameters()} == {Host()}
        assert {memory(b).preferred_location for b in model.buffers()} == {None}
        advise(model, device=0, include_buffers=True)
        assert {memory(b).preferred_location for b in model.buffers()} == {Device(0)}

    @module_calls
    def test_nothing_to_do(self, on, call):
        nothing = 0 if call is MODULE_CALLS["prefetch"] else None
        assert call(None, device=0) is nothing
        assert call(torch.nn.ReLU(), device=0) is nothing
        # Plain parameters on the CPU are none of its business.
        assert call(torch.nn.Linear(2, 3), device=0) is nothing

    @module_calls
    def test_what_is_no_module(self, call):
        with pytest.raises(TypeError, match=r"torch\.nn\.Module or None"):
            call([torch.ones(3)], device=0)

    def test_parts_of_other_parts_count_once(self, managed):
        module = torch.nn.Module()
        whole = managed((16, 8))
        module.whole = torch.nn.Parameter(whole)
        module.row = torch.nn.Parameter(whole[3])
        module.register_buffer("columns", whole[:, 2:5])
        size = megatron.prefetch_managed_module_parameters(module, device=0, include_buffers=True)
        assert size == whole.nbytes

    @pytest.mark.emulator_only
    def test_a_module_is_one_driver_call(self):
        model = mt.to_managed(small_model())
        with emulator.recording() as calls:
            megatron.prefetch_managed_module_parameters(model, device=0, include_buffers=True)
        assert names(calls).count("cuMemPrefetchAsync") == 1


class TestSupport:
    @pytest.mark.skipif(HAS_CUDA, reason="this system can have pools")
    def test_without_support_it_says_why(self):
        done = run_python("""
            import warnings
            from managedmem.megatron import *
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                compile_allocator()
                compile_allocator()
            assert len(caught) == 1, caught
            for _ in range(2):
                try:
                    create_unified_mempool()
                except UnifiedMemoryUnsupportedError as error:
                    print(error)
                    assert str(error) in str(caught[0].message)
        """)
        assert len(done.stdout.splitlines()) == 2
        assert "without CUDA" in done.stdout or "GPU" in done.stdout

    def test_without_a_driver_it_is_unsupported(self):
        done = run_python(
            """
            import torch
            from managedmem.megatron import *
            try:
                prefetch_managed_tensor(torch.ones(3), device=0)
            except UnifiedMemoryUnsupportedError as error:
                print(error)
            """,
            driver="/nowhere/libcuda.so",
        )
        assert "/nowhere/libcuda.so" in done.stdout

    @gpu_only
    def test_a_pool_prefers_its_device_and_is_mapped_there(self, device0):
        megatron.compile_allocator()
        pool = megatron.create_unified_mempool()
        assert pool is not megatron.create_unified_mempool()
        with torch.cuda.use_mem_pool(pool):
            tensor = torch.zeros(1000, device="cuda")
        assert mt.is_managed(tensor)
        assert in_place(tensor)[1:] == (device0, {device0})
        megatron.prefetch_managed_tensor(tensor, device=CPU)
        assert last_prefetch(tensor) == Host()
        megatron.advise_managed_tensor_accessed_by(tensor, device=CPU)
        assert set(memory(tensor).accessed_by) == {device0, Host()}

    @gpu_only
    def test_a_parameter_outside_the_pool_is_named(self):
        model = mt.to_managed(small_model("cuda"))
        model.second.bias = torch.nn.Parameter(torch.zeros(7, device="cuda"))
        with pytest.raises(RuntimeError, match=r"'second\.bias'.*\(7,\), torch\.float32, on cuda"):
            megatron.prefetch_managed_module_parameters(model, device=CPU)
        assert last_prefetch(model.first.weight) is None

    @gpu_only
    def test_the_default_stream_is_that_of_the_tensors_device(self, device1, streams_used):
        one, two = (mt.to_managed(torch.zeros(PAGE, device=f"cuda:{i}")) for i in range(2))
        module = torch.nn.ParameterList([one, two])
        side = torch.cuda.Stream(device="cuda:1")
        with torch.cuda.stream(side), torch.cuda.device(0):
            megatron.prefetch_managed_tensor(two, device=1)
            megatron.prefetch_managed_module_parameters(module, device=1)
        assert [s.cuda_stream for s in streams_used] == [side.cuda_stream, 0, side.cuda_stream]
        side.synchronize()
        assert last_prefetch(one) == last_prefetch(two) == device1
