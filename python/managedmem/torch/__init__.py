"""Managed memory for PyTorch: memory pools, prefetch and advice for modules, moving modules.

>>> import torch
>>> from managedmem import Device
>>> from managedmem.torch import prefetch, to_managed
>>> model = to_managed(torch.nn.Linear(1024, 1024))  # the same parameters, in managed memory
>>> prefetch(model, Device(0))  # the number of bytes
4198400

Needs PyTorch; the import opens no driver. The names of Megatron-LM's unified_memory module are in
managedmem.megatron.
"""

import sys as _sys

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        "managedmem.torch needs PyTorch, which is not installed here: see https://pytorch.org"
    ) from error

if "managedmem._nvtx" in _sys.modules:  # it must wrap functions before the imports below
    from managedmem.torch import _nvtx as _nvtx

from managedmem.torch._load import load_file, load_model, save_file
from managedmem.torch._moving import to_managed
from managedmem.torch._offload import Offload, offload
from managedmem.torch._offload_coverage import Coverage
from managedmem.torch._offload_explain import Explanation, PartPlace
from managedmem.torch._operations import HintedBytes, advise, prefetch
from managedmem.torch._optimizer_state import OffloadedOptimizer, offload_optimizer
from managedmem.torch._pool import UnifiedMemoryUnsupportedError, managed_mempool
from managedmem.torch._results import to_host
from managedmem.torch._share import replicate, share_memory
from managedmem.torch._tensors import NotManagedError, is_managed

__all__ = [
    "Coverage",
    "Explanation",
    "HintedBytes",
    "NotManagedError",
    "Offload",
    "OffloadedOptimizer",
    "PartPlace",
    "UnifiedMemoryUnsupportedError",
    "advise",
    "is_managed",
    "load_file",
    "load_model",
    "managed_mempool",
    "offload",
    "offload_optimizer",
    "prefetch",
    "replicate",
    "save_file",
    "share_memory",
    "to_host",
    "to_managed",
]

# Error messages, pickles and help() name the public module.
for _name in __all__:
    globals()[_name].__module__ = __name__
del _name


def __dir__() -> list[str]:
    # Completion shows these: the public names.
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
