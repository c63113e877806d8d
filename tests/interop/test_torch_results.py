"""`managedmem.torch.to_host`: copies of tensors on the CPU, in memory that is used again."""

import gc

import pytest

import managedmem
from constants import KIB, MIB
from managedmem import emulator, result_cache
from tensors import DTYPES, gpu_only, last_prefetch, mt, torch

SHAPE = (64, 2048)  # 128 Ki elements


@pytest.fixture(autouse=True)
def own_cache():
    result_cache.clear()
    result_cache.max_nbytes = 256 * MIB


@pytest.fixture
def filled(managed):
    """`filled(dtype)`: a tensor over managed memory whose elements differ."""

    def make(dtype=torch.float32, shape=SHAPE):
        tensor = managed(shape, dtype)
        count = torch.Size(shape).numel()
        values = (torch.arange(count) % 13 % (2 if dtype is torch.bool else 13)).to(dtype)
        tensor.copy_(values.view(shape))
        return tensor

    return make


def bits(tensor):
    """The elements as bytes; float8 tensors have no comparison."""
    return tensor.detach().cpu().reshape(-1).view(torch.uint8)


def same(a, b):
    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(bits(a), bits(b))


class TestTheCopy:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_has_the_dtype_shape_and_contents(self, filled, dtype):
        tensor = filled(dtype)
        copy = mt.to_host(tensor)
        assert copy.device.type == "cpu" and not copy.requires_grad
        assert same(copy, tensor)

    def test_has_memory_of_its_own(self, filled):
        tensor = filled()
        copy = mt.to_host(tensor)
        kept = copy.clone()
        tensor.fill_(7)
        assert same(copy, kept)
        copy.fill_(8)
        assert (mt.to_host(tensor) == 7).all()

    @pytest.mark.parametrize(
        "part",
        [
            lambda t: t.t(),
            lambda t: t[::2, 5:],
            lambda t: t[3],
            lambda t: t[:1].expand(4, SHAPE[1]),
            lambda t: t[:0],
            lambda t: t[2, 2],
        ],
        ids=["transposed", "strided", "row", "expanded", "empty", "scalar"],
    )
    def test_of_a_view(self, filled, part):
        view = part(filled())
        assert same(mt.to_host(view), view)

    def test_of_a_conjugate(self, filled):
        tensor = filled(torch.complex64)
        tensor.imag.fill_(3)
        assert torch.equal(mt.to_host(tensor.conj()).resolve_conj(), tensor.cpu().conj_physical())

    def test_of_a_parameter_has_no_gradient(self, filled):
        parameter = torch.nn.Parameter(filled())
        copy = mt.to_host(parameter)
        assert type(copy) is torch.Tensor and not copy.requires_grad
        assert same(copy, parameter.detach())

    def test_of_plain_memory(self, on):
        tensor = torch.arange(MIB, device=on)
        copy = mt.to_host(tensor)
        assert same(copy, tensor) and copy.data_ptr() != tensor.data_ptr()

    def test_the_pages_stay(self, filled, device0):
        tensor = filled()
        managedmem.torch.prefetch(tensor, device0)
        mt.to_host(tensor)
        assert last_prefetch(tensor) is device0

    @pytest.mark.emulator_only
    def test_the_pages_stay_on_the_emulated_device(self, filled, device0):
        tensor = filled()
        managedmem.torch.prefetch(tensor, device0)
        copy = mt.to_host(tensor)
        assert (
            emulator.residency(
                managedmem.ManagedBuffer.from_handle(tensor.data_ptr(), tensor.nbytes, owner=tensor)
            )
            == device0
        )
        assert copy.data_ptr() != tensor.data_ptr()


class TestMemoryIsUsedAgain:
    def test_after_the_copy(self, filled):
        tensor = filled()
        first = mt.to_host(tensor).data_ptr()
        gc.collect()
        if tensor.is_cuda:
            torch.cuda.synchronize()  # torch waits for events before it uses memory again
        assert mt.to_host(tensor).data_ptr() == first

    def test_not_while_a_view_lives(self, filled):
        tensor = filled()
        view = mt.to_host(tensor)[2:4]
        other = mt.to_host(tensor)
        other.fill_(0)
        assert same(view, tensor[2:4])

    @pytest.mark.emulator_only
    def test_of_the_result_cache(self, filled):
        copy = mt.to_host(filled())
        assert result_cache.nbytes == 512 * KIB
        del copy
        assert result_cache.idle_nbytes == 512 * KIB

    @gpu_only
    def test_it_is_page_locked(self, filled):
        assert mt.to_host(filled()).is_pinned()

    @gpu_only
    def test_a_capture_survives(self, filled):
        tensor = filled()
        if not tensor.is_cuda:
            pytest.skip("the default stream does not capture")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tensor.add_(1)
            with pytest.raises(RuntimeError, match="captures a graph"):
                mt.to_host(tensor)
        graph.replay()


class TestRefused:
    @pytest.mark.parametrize("bad", [None, 5, [1.0], torch.nn.Linear(2, 2)], ids=repr)
    def test_other_objects(self, bad):
        with pytest.raises(TypeError, match=rf"takes one tensor, got {type(bad).__name__}$"):
            mt.to_host(bad)

    @pytest.mark.parametrize(
        "bad",
        [torch.empty(3, device="meta"), torch.eye(3).to_sparse(), torch.nn.LazyLinear(3).weight],
        ids=["meta", "sparse", "lazy"],
    )
    def test_tensors_without_memory(self, bad):
        with pytest.raises(ValueError):
            mt.to_host(bad)

    def test_tensors_that_hold_others(self, filled):
        from torch.testing._internal.two_tensor import TwoTensor

        with pytest.raises(TypeError, match="one by one"):
            mt.to_host(TwoTensor(filled(), filled()))


def test_memory_that_cannot_be_locked(filled, monkeypatch):
    """torch raises RuntimeError, or a subclass, where it cannot lock pages."""
    results = __import__("managedmem.torch._results", fromlist=["_empty_like"])
    plain, asked = torch.empty_like, []

    def empty_like(tensor, *, pin_memory=False, **more):
        asked.append(pin_memory)
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return plain(tensor, **more)

    monkeypatch.setattr(results.torch, "empty_like", empty_like)
    tensor = filled()
    made = results._empty_like(tensor)
    assert asked == [True, False]
    assert (made.shape, made.dtype, made.device.type) == (tensor.shape, tensor.dtype, "cpu")
