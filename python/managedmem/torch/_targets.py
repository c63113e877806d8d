"""The tensors in what torch users have: modules, optimizers, mappings, sequences.

Owns the walk, and the name that an error message gives each tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from managedmem import ManagedBuffer
from managedmem.torch._tensors import Found, inner_tensors, is_managed

Tensors: TypeAlias = (
    "Tensor | torch.nn.Module | torch.optim.Optimizer | Mapping[Any, Any] | Iterable[Any]"
)
# These are iterable, but do not hold tensors.
NO_CONTAINER = (str, bytes, bytearray, memoryview, ManagedBuffer)


def find_tensors(targets: Tensors, include_buffers: bool = False) -> Found:
    """Every tensor in the targets, with the name that an error message gives it."""
    return list(_walk(targets, "", include_buffers, chosen=True))


def _walk(
    what: Any, name: str, include_buffers: bool, chosen: bool
) -> Iterator[tuple[str, Tensor]]:
    """Tensors below `what`; not `chosen` is what only lies in the same dict, such as a step count.

    What was chosen must be a tensor in managed memory. The rest of a state dict or of an
    optimizer's state may hold anything: there only tensors count, and scalars only if managed.
    """
    if isinstance(what, Tensor):
        if chosen or what.dim() > 0 or is_managed(what):
            yield from inner_tensors(name, what)
    elif isinstance(what, torch.nn.Module):
        yield from _walk_module(what, name, include_buffers)
    elif isinstance(what, torch.optim.Optimizer):
        yield from _walk_optimizer(what, name, include_buffers)
    elif isinstance(what, Mapping):
        for key, value in what.items():
            yield from _walk(value, join_name(name, key), include_buffers, False)
    elif isinstance(what, Iterable) and not isinstance(what, NO_CONTAINER):
        for i, value in enumerate(what):
            yield from _walk(value, f"{name or 'targets'}[{i}]", include_buffers, chosen)
    elif chosen:
        raise TypeError(
            f"{name or 'targets'} must be a tensor, a module, an optimizer, or a mapping, sequence "
            f"or other iterable of them; got {what!r}"
        )


def _walk_module(
    module: torch.nn.Module, name: str, include_buffers: bool
) -> Iterator[tuple[str, Tensor]]:
    for key, parameter in module.named_parameters():
        yield from inner_tensors(join_name(name, key), parameter)
    if include_buffers:
        for key, buffer in module.named_buffers():
            yield from inner_tensors(join_name(name, key), buffer)


def _walk_optimizer(
    optimizer: torch.optim.Optimizer, name: str, include_buffers: bool
) -> Iterator[tuple[str, Tensor]]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    numbers = {id(parameter): i for i, parameter in enumerate(parameters)}
    for key, state in optimizer.state.items():
        label = join_name(name, f"state[{numbers.get(id(key), key)!r}]")
        yield from _walk(state, label, include_buffers, False)


def join_name(name: str, key: object) -> str:
    """The dotted name of what stands under the key, as in a state dict."""
    return f"{name}.{key}" if name else str(key)
