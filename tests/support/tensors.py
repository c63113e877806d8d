"""Shared by the tests of torch: tensors over managed memory, and a model.

Importing it skips a test file where torch is missing.
"""

import importlib

import pytest

from constants import EMULATED, MIB
from managedmem import Device, ManagedBuffer

torch = pytest.importorskip("torch", reason="needs torch")
mt = importlib.import_module("managedmem.torch")
megatron = importlib.import_module("managedmem.megatron")

HAS_CUDA = not EMULATED and torch.cuda.is_available()
gpu_only = pytest.mark.skipif(
    not HAS_CUDA, reason="needs a GPU and torch with CUDA: run with MANAGEDMEM_DRIVER=cuda"
)
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def memory(tensor):
    """The memory from the first byte of a tensor to its last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    size = (last + 1) * tensor.element_size()
    return ManagedBuffer.from_handle(tensor.data_ptr(), size, owner=tensor)


def last_prefetch(tensor):
    torch.cuda.synchronize() if tensor.is_cuda else Device().sync()
    return memory(tensor).last_prefetch_location


def small_model(on="cpu"):
    """Layers of odd sizes, a tied weight, persistent and other buffers.

    With scratch they take more than 2 MiB: smaller memory can have the driver's records of freed
    memory, which spoil those of a prefetch.
    """

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(7, 33)
            self.norm = torch.nn.BatchNorm1d(33)
            self.second = torch.nn.Linear(33, 7)
            self.tied = torch.nn.Linear(7, 33, bias=False)
            self.tied.weight = self.first.weight
            self.register_parameter("absent", None)
            self.register_buffer("scratch", torch.ones(600_000), persistent=False)

        def forward(self, x):
            return self.second(torch.relu(self.norm(self.first(x) + self.tied(x))))

    torch.manual_seed(1)
    return Model().to(on)


def tensors_of(module):
    return [*module.parameters(), *module.buffers()]


def snapshot(module):
    """All that torch can tell about a module's tensors."""
    return {
        name: (
            id(t),
            t.data_ptr(),
            t.shape,
            t.stride(),
            t.dtype,
            t.device,
            t.requires_grad,
            t.detach().cpu().clone(),
        )
        for name, t in [*module.named_parameters(), *module.named_buffers()]
    }


def assert_same(before, after, places_too=True):
    """Compare two snapshots. The addresses are the same, all differ (False), or either (None)."""
    assert before.keys() == after.keys()
    for name, old in before.items():
        new = after[name]
        assert old[0] == new[0]
        assert places_too is None or (old[1] == new[1]) is places_too, name
        assert old[2:-1] == new[2:-1]
        assert torch.equal(old[-1], new[-1])


def is_managed(address):
    """True if the driver knows the address as managed memory; false once it is freed."""
    return ManagedBuffer.from_handle(address, 1).is_managed


def in_pool(pool, elements=MIB // 4):
    with torch.cuda.use_mem_pool(pool):
        return torch.zeros(elements, device="cuda")
