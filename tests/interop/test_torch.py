"""managedmem.torch against real torch: its CPU build on the emulated driver, CUDA on a GPU.

A CPU tensor over managed memory is the same to the library as a CUDA tensor, so most tests run for
each device that torch has. to_managed() is in test_torch_moving.py, pools in test_torch_pool.py.
"""

import inspect
import pickle

import pytest

import managedmem
from calls import advices, names
from constants import ADVICES, PAGE
from contents import contents
from identifiers import label
from managedmem import Device, Host, MigrationPolicy, emulator
from programs import run_python
from races import race_over
from tensors import DTYPES, gpu_only, last_prefetch, memory, mt, small_model, tensors_of, torch

# --- new buffers --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, MigrationPolicy.prefer(Device(0))], ids=label)
def test_tensors_can_be_brought_into_managed_memory(on, policy):
    tensor = torch.arange(24, dtype=torch.int16, device=on).reshape(2, 3, 4)
    with managedmem.asarray(tensor, policy=policy) as buffer:
        assert (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype)
        assert contents(buffer) == tensor.cpu().numpy().tobytes()
    with managedmem.empty_like(tensor, torch.float32) as buffer:
        assert (buffer.shape, buffer.dtype) == ((2, 3, 4), torch.float32)
    with managedmem.full(2, torch.tensor(1.5)) as buffer:
        assert buffer.dtype == torch.float32
        assert list(memoryview(buffer)) == [1.5, 1.5]


def test_tensors_on_the_cpu_are_converted():
    tensor = torch.arange(6).reshape(2, 3).T
    with managedmem.asarray(tensor, torch.float64) as buffer:
        assert (buffer.shape, buffer.dtype) == ((3, 2), "float64")
        assert contents(buffer) == tensor.double().numpy().tobytes()


class UnreadableByNumpy:
    dtype = "float32"

    def __array__(self, dtype=None, copy=None):
        raise TypeError("cannot resize")


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_tensors_of_other_types_stay_torchs(on):
    with pytest.raises(TypeError, match="complex32"):
        managedmem.asarray(torch.zeros(3, dtype=torch.complex32))
    with pytest.raises(TypeError, match="resize"):
        managedmem.asarray(UnreadableByNumpy())
    with pytest.raises(TypeError, match="complex32"):
        managedmem.empty_like(torch.zeros(3, dtype=torch.complex32))
    with pytest.raises(RuntimeError, match="grad"):
        managedmem.asarray(torch.zeros(3, requires_grad=True, device=on))


# --- the module ---------------------------------------------------------------------------


def test_importing_opens_no_driver():
    done = run_python(
        """
        import sys, managedmem
        assert "torch" not in sys.modules
        import managedmem.torch
        assert "torch" in sys.modules
        try:
            managedmem._managedmem._driver_info()
        except managedmem.DriverNotFoundError:
            print("not opened")
        """,
        driver="/nowhere/libcuda.so",
    )
    assert done.stdout == "not opened\n"


def test_without_torch_the_import_says_so():
    done = run_python("""
        import sys
        sys.modules["torch"] = None
        import managedmem
        try:
            import managedmem.torch
        except ImportError as error:
            print(error)
    """)
    assert "needs PyTorch" in done.stdout


def test_a_broken_torch_keeps_its_own_error(tmp_path):
    (tmp_path / "torch.py").write_text("import a_library_of_torch")
    done = run_python(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import managedmem.torch
        """,
        check=False,
    )
    assert "No module named 'a_library_of_torch'" in done.stderr
    assert "needs PyTorch" not in done.stderr


def test_all_names_are_there_and_documented():
    assert set(mt.__all__) <= set(dir(mt))
    for name in mt.__all__:
        value = getattr(mt, name)
        assert value.__doc__ and len(value.__doc__.split()) >= 3, name
        assert isinstance(value, type) or inspect.signature(value) is not None


@pytest.mark.parametrize("name", mt.__all__)
def test_names_and_pickles_name_no_file_of_the_package(name):
    value = getattr(mt, name)
    assert (value.__module__, value.__qualname__) == ("managedmem.torch", name)
    written = pickle.dumps(value)
    assert b"managedmem.torch" in written and b"managedmem.torch." not in written
    assert pickle.loads(written) is value


# --- is_managed ---------------------------------------------------------------------------


class TestIsManaged:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_managed_memory_is_recognised(self, managed, dtype):
        tensor = managed((3, 5), dtype)
        assert mt.is_managed(tensor) is True
        assert mt.is_managed(tensor[1:]) is True
        assert mt.is_managed(tensor.t()) is True

    def test_other_memory_is_not(self, on):
        assert mt.is_managed(torch.zeros(10, device=on)) is False

    def test_parameters_are_tensors(self, managed):
        assert mt.is_managed(torch.nn.Parameter(managed())) is True

    def test_what_has_no_memory_is_not(self, managed, on):
        values = managed((4,))
        sparse = values.to_sparse()
        assert mt.is_managed(sparse) is False
        assert mt.is_managed(torch.empty(3, device="meta")) is False
        assert mt.is_managed(managed()[:0]) is False
        assert mt.is_managed(torch.nn.LazyLinear(3).weight) is False

    @pytest.mark.parametrize("bad", [None, 3, [1.0], "tensor"], ids=label)
    def test_what_is_no_tensor(self, bad):
        with pytest.raises(TypeError, match="takes a tensor"):
            mt.is_managed(bad)


# --- prefetch and advise ------------------------------------------------------------------


class TestPrefetch:
    def test_one_tensor(self, managed, device0):
        tensor = managed()
        assert mt.prefetch(tensor, device0) == tensor.nbytes
        assert last_prefetch(tensor) == device0
        assert mt.prefetch(tensor, Host()) == tensor.nbytes
        assert last_prefetch(tensor) == Host()

    def test_tensors_that_require_grad_and_any_dtype(self, managed, device0):
        leaf = torch.nn.Parameter(managed((8, 8), torch.bfloat16))
        eighths = managed((64,), torch.float8_e4m3fn)
        assert mt.prefetch([leaf, eighths], device0) == 128 + 64
        assert last_prefetch(leaf) == last_prefetch(eighths) == device0

    def test_nested_sequences_sets_and_generators(self, managed, device0):
        a, b, c, d = (managed() for _ in range(4))
        assert mt.prefetch([a, (b, [c]), (t for t in [d])], device0) == 4 * a.nbytes
        assert {last_prefetch(t) for t in (a, b, c, d)} == {device0}
        assert mt.prefetch({id(t): t for t in (a, b)}.values(), Host()) == 2 * a.nbytes
        assert mt.prefetch(frozenset([c]), Host()) == c.nbytes
        assert {last_prefetch(t) for t in (a, b, c)} == {Host()}
        assert last_prefetch(d) == device0

    def test_a_module_with_and_without_its_buffers(self, on, device0):
        model = mt.to_managed(small_model(on))
        parameters = sum(p.nbytes for p in model.parameters())
        buffers = sum(b.nbytes for b in model.buffers())
        before = [last_prefetch(b) for b in model.buffers()]
        assert mt.prefetch(model, device0) == parameters
        assert {last_prefetch(p) for p in model.parameters()} == {device0}
        assert [last_prefetch(b) for b in model.buffers()] == before
        other = mt.to_managed(small_model(on))
        assert mt.prefetch(other, Host(), include_buffers=True) == parameters + buffers
        assert {last_prefetch(t) for t in tensors_of(other)} == {Host()}

    def test_modules_in_a_sequence(self, on, device0):
        models = [mt.to_managed(torch.nn.Linear(3, 4).to(on)) for _ in range(2)]
        assert mt.prefetch(models, device0) == 2 * (12 + 4) * 4

    def test_a_state_dict(self, on, device0):
        model = mt.to_managed(small_model(on))
        state = {"model": model.state_dict(), "epoch": 3, "notes": ["text", None], "lr": 0.1}
        # scratch is not persistent; the tied weight is one memory under two names
        expected = sum(t.nbytes for t in tensors_of(model)) - model.scratch.nbytes
        assert mt.prefetch(state, device0) == expected
        assert last_prefetch(model.norm.num_batches_tracked) == device0

    def test_an_optimizer(self, on, device0):
        model = mt.to_managed(small_model(on))
        optimizer = torch.optim.Adam(model.parameters())
        assert mt.prefetch(optimizer, device0) == 0
        model(torch.rand(4, 7, device=on)).sum().backward()
        optimizer.step()
        mt.to_managed(optimizer)
        expected = sum(2 * p.nbytes for p in model.parameters())
        assert mt.prefetch(optimizer, Host()) == expected
        assert mt.prefetch(optimizer.state_dict(), device0) == expected
        moments = [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        assert {last_prefetch(t) for t in moments} == {device0}

    def test_lists_inside_of_optimizer_state(self, on, device0):
        model = mt.to_managed(torch.nn.Linear(3, 4).to(on))
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

        def closure():
            optimizer.zero_grad()
            loss = (model(torch.ones(2, 3, device=on)) ** 2).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        assert any(isinstance(v, list) and v for s in optimizer.state.values() for v in s.values())
        mt.to_managed(optimizer)
        assert mt.prefetch(optimizer, device0) > 16 * 4

    def test_what_is_shared_counts_once(self, managed, device0):
        tensor = managed((64, 16))
        parts = [tensor, tensor, tensor[:10], tensor[5:20], tensor.t(), tensor.detach()]
        assert mt.prefetch(parts, device0) == tensor.nbytes
        assert mt.prefetch([tensor[:10], tensor[5:20]], device0) == 20 * 16 * 4

    def test_views_that_are_not_contiguous_cover_their_extent(self, managed, device0):
        tensor = managed((4, PAGE))  # rows of 4 pages
        column = tensor[1:3, 10:20]
        assert not column.is_contiguous()
        assert mt.prefetch(column, device0) == (PAGE + 10) * 4
        assert last_prefetch(column) == device0
        assert memory(tensor[0]).last_prefetch_location is None
        assert memory(tensor[3]).last_prefetch_location is None
        assert mt.prefetch(tensor[0, :7].expand(3, 7), Host()) == 7 * 4

    def test_empty_tensors_are_skipped(self, managed, on, device0):
        tensor = managed()
        empty = torch.empty(0, 4, device=on)
        assert mt.prefetch([empty, tensor, tensor[:0]], device0) == tensor.nbytes
        assert mt.prefetch(empty, device0) == 0
        assert mt.prefetch([], device0) == 0
        assert mt.prefetch(torch.nn.ReLU(), device0) == 0

    def test_names_of_other_libraries_for_locations(self, managed, device0):
        tensor = managed()
        mt.prefetch(tensor, torch.device("cuda", 0))
        assert last_prefetch(tensor) == device0
        mt.prefetch(tensor, torch.device("cpu"))
        assert last_prefetch(tensor) == Host()

    def test_options_go_through(self, managed, device0, stream):
        tensor = managed()
        assert mt.prefetch(tensor, device0, stream=stream, dispatch="loop", defer=True) > 0
        stream.sync()
        assert last_prefetch(tensor) == device0
        with pytest.raises(ValueError, match="dispatch"):
            mt.prefetch(tensor, device0, dispatch="none")

    def test_values_stay(self, managed, device0):
        tensor = managed((100,), torch.int64)
        tensor += torch.arange(100, device=tensor.device)
        mt.prefetch(tensor, device0)
        mt.prefetch(tensor, Host())
        assert tensor.cpu().tolist() == list(range(100))

    @pytest.mark.emulator_only
    def test_the_default_stream_of_the_emulated_driver(self, managed, streams_used, device0):
        mt.prefetch(managed(), device0)
        assert streams_used == [None]

    @pytest.mark.emulator_only
    def test_a_module_is_one_driver_call(self, device0, stream):
        """Its storages begin on pages of their own, and nothing but padding lies between them."""
        model = mt.to_managed(small_model())
        with emulator.recording() as calls:
            mt.prefetch(model, device0, include_buffers=True, stream=stream)
        assert names(calls).count("cuMemPrefetchAsync") == 1
        assert not any("Batch" in name for name in names(calls))

    @pytest.mark.emulator_only
    def test_cost_grows_with_the_number_of_parameters_only(self, device0, stream):
        """The number of driver queries is linear; nothing is moved more than once."""

        def queries(layers):
            linear = [torch.nn.Linear(2, 2) for _ in range(layers)]
            model = mt.to_managed(torch.nn.Sequential(*linear))
            with emulator.recording() as calls:
                mt.prefetch(model, device0, stream=stream)
            return len(calls)

        few, many = queries(10), queries(100)
        assert many <= 10 * few


class TestAdvise:
    @pytest.mark.parametrize("advice", ADVICES)
    def test_every_advice(self, managed, device0, advice):
        tensor = managed()
        location = None if "read_mostly" in advice else device0
        if advice.startswith("unset"):
            mt.advise(tensor, advice.removeprefix("un"), location)
        assert mt.advise(tensor, advice, location) == tensor.nbytes
        on_now = not advice.startswith("unset")
        facts = memory(tensor)
        assert facts.read_mostly is (on_now and "read_mostly" in advice)
        assert (facts.preferred_location == device0) is (on_now and "preferred" in advice)
        assert (device0 in facts.accessed_by) is (on_now and "accessed" in advice)

    def test_a_module(self, on):
        model = mt.to_managed(small_model(on))
        before = [memory(b).preferred_location for b in model.buffers()]
        size = mt.advise(model, "set_preferred_location", Host())
        assert size == sum(p.nbytes for p in model.parameters())
        assert {memory(p).preferred_location for p in model.parameters()} == {Host()}
        assert [memory(b).preferred_location for b in model.buffers()] == before
        mt.advise(model, "set_read_mostly", include_buffers=True)
        assert all(memory(t).read_mostly for t in tensors_of(model))

    def test_advice_on_one_parameter_stays_there(self, on):
        model = mt.to_managed(small_model(on))
        MigrationPolicy.default().apply(model.parameters())  # removes records of freed memory
        mt.advise(model.first, "set_read_mostly")
        marked = {name for name, p in model.named_parameters() if memory(p).read_mostly}
        assert marked == {"first.weight", "first.bias"}

    @pytest.mark.parametrize(
        "nothing", [[], (), {}, torch.nn.ReLU(), [torch.nn.ReLU(), {}]], ids=str
    )
    @pytest.mark.parametrize("unsupported", ["raise", "skip"])
    def test_nothing_to_do(self, device0, nothing, unsupported):
        """Not an error; the other arguments are checked."""
        assert mt.advise(nothing, "set_read_mostly", unsupported=unsupported) == 0
        assert mt.prefetch(nothing, device0, unsupported=unsupported) == 0
        with pytest.raises(ValueError, match="no advice"):
            mt.advise(nothing, "set_everything", unsupported=unsupported)
        with pytest.raises(TypeError, match="a location must be"):
            mt.prefetch(nothing, "cuda:0", unsupported=unsupported)

    def test_a_generator_of_locations_is_not_one(self, managed, device0):
        tensor = managed()
        with pytest.raises(TypeError, match="one location for all tensors"):
            mt.prefetch([tensor, tensor], iter([device0, device0]))

    def test_bad_advice_and_locations(self, managed, device0):
        tensor = managed()
        with pytest.raises(ValueError, match="no advice"):
            mt.advise(tensor, "set_everything")
        with pytest.raises(ValueError, match="location is required"):
            mt.advise(tensor, "set_accessed_by")
        with pytest.raises(TypeError, match="one location"):
            mt.advise([tensor, tensor], "set_accessed_by", [device0, device0])


OPERATIONS = {
    "prefetch": lambda targets, **more: mt.prefetch(targets, Host(), **more),
    "advise": lambda targets, **more: mt.advise(targets, "set_read_mostly", **more),
}


@pytest.mark.parametrize("use", OPERATIONS.values(), ids=OPERATIONS)
class TestRefusals:
    """All is read before the first driver call, so what stands in front stays as it was."""

    @pytest.fixture
    def untouched(self, managed):
        tensor = managed()
        yield tensor
        assert last_prefetch(tensor) is None
        assert not memory(tensor).read_mostly

    def test_memory_that_is_not_managed(self, untouched, use, on):
        if on == "cpu" and Device().pageable_memory_access:
            pytest.skip("system memory is a fair target here")
        plain = torch.zeros(2, 3, dtype=torch.float64, device=on)
        words = r"targets\[1\].*\(2, 3\), torch.float64, on (cpu|cuda:0).*to_managed.*mempool"
        with pytest.raises(ValueError, match=words):
            use([untouched, plain])
        with pytest.raises(ValueError, match=r"^the tensor \(shape"):
            use(plain)

    def test_a_parameter_is_named(self, untouched, use, on):
        if on == "cpu" and Device().pageable_memory_access:
            pytest.skip("system memory is a fair target here")
        model = mt.to_managed(small_model(on))
        model.second.bias = torch.nn.Parameter(torch.zeros(7, device=on))
        with pytest.raises(mt.NotManagedError, match=r"'second\.bias'") as caught:
            use(model)
        assert isinstance(caught.value, ValueError)
        assert caught.value.tensor is model.second.bias
        copied = pickle.loads(pickle.dumps(caught.value))
        assert (str(copied), copied.name) == (str(caught.value), "second.bias")
        with pytest.raises(ValueError, match=r"'targets\[1\]\[0\].second.bias'"):
            use([untouched, [model]])
        with pytest.raises(ValueError, match=r"'weights\.second\.bias'"):
            use({"kept": untouched, "weights": model.state_dict()})
        model.second.bias = None
        use(model)
        model.scratch = torch.zeros(5, device=on)
        use(model)
        with pytest.raises(ValueError, match="'scratch'"):
            use(model, include_buffers=True)

    def test_optimizer_state_is_named(self, use, on):
        if on == "cpu" and Device().pageable_memory_access:
            pytest.skip("system memory is a fair target here")
        model = mt.to_managed(torch.nn.Linear(2, 3).to(on))
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
        model(torch.ones(1, 2, device=on)).sum().backward()
        optimizer.step()
        with pytest.raises(ValueError, match=r"'state\[0\].momentum_buffer'"):
            use(optimizer)

    def test_sparse_and_meta(self, untouched, use, on):
        sparse = torch.eye(3, device=on).to_sparse()
        with pytest.raises(ValueError, match="layout sparse_coo"):
            use([untouched, sparse])
        with torch.device("meta"):
            model = torch.nn.Linear(2, 3)
        with pytest.raises(ValueError, match=r"'weight'.*to_empty"):
            use({"good": untouched, "weight": model.weight})
        with pytest.raises(ValueError, match=r"targets\[1\].weight.*to_empty"):
            use([untouched, model])
        with pytest.raises(ValueError, match="run the module once"):
            use([untouched, torch.nn.LazyLinear(3)])

    @pytest.mark.parametrize("bad", [None, 3, "tensor", b"tensor", object()], ids=label)
    def test_what_is_no_tensor(self, untouched, use, bad):
        with pytest.raises(TypeError, match=r"targets\[1\] must be a tensor"):
            use([untouched, bad])
        with pytest.raises(TypeError, match="targets must be a tensor"):
            use(bad)

    def test_a_buffer_is_for_the_functions_of_managedmem(self, untouched, use, buf):
        with pytest.raises(TypeError, match="must be a tensor"):
            use([untouched, buf])


@pytest.mark.parametrize("bad", [None, 0, -1, "cuda", [Host()], (Host(), Host())], ids=label)
def test_what_is_no_location(managed, bad):
    tensor = managed()
    with pytest.raises((TypeError, ValueError), match="location"):
        mt.prefetch(tensor, bad)
    assert last_prefetch(tensor) is None


def test_devices_of_one_module_may_differ(managed, on, device0):
    """Managed memory has one address for all devices: one batch serves them."""
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(managed())
    module.b = torch.nn.Parameter(mt.to_managed(torch.ones(5)))  # on the CPU for torch
    assert mt.prefetch(module, device0) == module.a.nbytes + module.b.nbytes
    assert last_prefetch(module.a) == last_prefetch(module.b) == device0


def test_system_memory_where_the_device_reaches_it():
    done = run_python(
        """
        import torch
        from managedmem import Device
        import managedmem.torch as mt
        assert Device(0).pageable_memory_access
        model = torch.nn.Linear(64, 64)
        print(mt.prefetch(model, Device(0)), mt.is_managed(model.weight))
        """,
        emulator="pageable=1",
    )
    assert done.stdout.split() == [str((64 * 64 + 64) * 4), "False"]


class Wrapper(torch.Tensor):
    """A tensor that only holds another one, as DTensor does."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        raise NotImplementedError(f"{function} of a Wrapper")

    __torch_function__ = torch._C._disabled_torch_function_impl


@pytest.fixture
def mesh():
    """The mesh of this process alone."""
    dist = pytest.importorskip("torch.distributed")
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("needs a torch with gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield pytest.importorskip("torch.distributed.device_mesh").init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_shards_of_a_dtensor_are_looked_into(managed, mesh, device0):
    from torch.distributed.tensor import DTensor, Replicate

    tensor = managed()
    if tensor.is_cuda:
        pytest.skip("the mesh is one of CPUs")
    whole = DTensor.from_local(tensor, mesh, [Replicate()])
    assert mt.is_managed(whole) is True
    assert mt.prefetch({"weight": whole}, device0) == tensor.nbytes
    assert last_prefetch(tensor) == device0


def test_wrappers_are_looked_into(managed, on, device0):
    tensor = managed()
    wrapped = Wrapper(tensor)
    assert mt.is_managed(wrapped) is True
    assert mt.prefetch([wrapped], device0) == tensor.nbytes
    assert last_prefetch(tensor) == device0
    plain = Wrapper(torch.zeros(3, device=on))
    assert mt.is_managed(plain) is False
    if not Device().pageable_memory_access:
        with pytest.raises(ValueError, match=r"targets\[0\].inner"):
            mt.prefetch([plain], device0)
    with pytest.raises(TypeError, match=r"Wrapper.*before it is wrapped"):
        mt.to_managed(wrapped)


@pytest.mark.emulator_only
def test_advice_that_fails_in_the_middle_is_taken_back(managed, alloc):
    tensors = [managed() for _ in range(3)]
    emulator.fail("cuMemAdvise", nth=2)
    with pytest.raises(managedmem.CUDAError), emulator.recording() as calls:
        mt.advise(tensors, "set_read_mostly")
    assert len(advices(calls)) >= 2
    assert not any(memory(t).read_mostly for t in tensors)


def test_threads_prefetch_one_module(on, device0):
    model = mt.to_managed(small_model(on))
    expected = sum(p.nbytes for p in model.parameters())

    def work(location):
        return [mt.prefetch(model, location) for _ in range(20)]

    assert race_over(work, (device0, Host()) * 2) == [[expected] * 20] * 4


# --- the documented lines -----------------------------------------------------------------


def test_asarray_of_bfloat16(on):
    tensor = torch.tensor([1.5, -2.0], dtype=torch.bfloat16, device=on)
    with managedmem.asarray(tensor) as buffer:
        assert (buffer.shape, buffer.dtype) == ((2,), "bfloat16")
        assert contents(buffer.view("uint8")) == b"\xc0\x3f\x00\xc0"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_types_that_only_torch_has_come_through_an_integer_view(alloc, on, dtype):
    name = {1: "uint8", 2: "uint16"}[dtype.itemsize]
    buf = alloc(PAGE)
    if on == "cpu":
        tensor = torch.frombuffer(buf.view(name), dtype=getattr(torch, name)).view(dtype)
    else:
        tensor = torch.as_tensor(buf.view(name), device="cuda").view(dtype)
    assert tensor.data_ptr() == buf.handle
    assert tensor.shape == (PAGE // dtype.itemsize,)
    tensor.fill_(1.5)
    torch.cuda.synchronize() if on != "cpu" else None
    expected = torch.tensor([1.5], dtype=dtype).view(torch.uint8).tolist()
    assert contents(buf) == bytes(expected) * tensor.numel()


# --- what needs a GPU ---------------------------------------------------------------------


@gpu_only
class TestOnGpu:
    def test_the_default_stream_is_the_current_one_of_torch(self, streams_used):
        tensor = mt.to_managed(torch.zeros(PAGE, device="cuda"))
        side = torch.cuda.Stream()
        mt.prefetch(tensor, Host())
        with torch.cuda.stream(side):
            mt.prefetch(tensor, Device(0))
        mt.prefetch(tensor, Host(), stream=side)
        assert [s.cuda_stream for s in streams_used] == [0, side.cuda_stream, side.cuda_stream]

    def test_a_failed_call_leaves_no_error_behind(self):
        plain = torch.ones(10, device="cuda")
        for use in OPERATIONS.values():
            with pytest.raises(ValueError, match="not in managed memory"):
                use(plain)
            assert (plain + 1).sum().item() == 20
        torch.cuda.synchronize()

    def test_a_graph_replays_after_its_memory_moved(self):
        model = mt.to_managed(torch.nn.Linear(64, 64).cuda())
        x = torch.rand(8, 64, device="cuda")
        with torch.no_grad():
            expected = model(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = model(x)
            for location in (Host(), Device(0), Host()):
                mt.prefetch(model, location)
                result.zero_()
                graph.replay()
                torch.cuda.synchronize()
                assert torch.allclose(result, expected)

    def test_a_prefetch_in_a_capture_is_refused_and_the_capture_survives(self):
        model = mt.to_managed(torch.nn.Linear(64, 64).cuda())
        x = torch.rand(8, 64, device="cuda")
        with torch.no_grad():
            expected = model(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                with pytest.raises(managedmem.CUDAError, match="graph"):
                    mt.prefetch(model, Host())
                result = model(x)
            graph.replay()
            torch.cuda.synchronize()
        assert torch.allclose(result, expected)
