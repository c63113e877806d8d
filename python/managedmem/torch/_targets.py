"""The tensors in modules, optimizers, mappings and sequences.

Owns the walk, and the name that an error message gives each tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from managedmem import ManagedBuffer
from managedmem.torch._tensors import Found, inner_tensors, is_managed, ranges_of

Tensors: TypeAlias = (
    "Tensor | torch.nn.Module | torch.optim.Optimizer | Mapping[Any, Any] | Iterable[Any]"
)
# These are iterable, but do not hold tensors.
NO_CONTAINER = (str, bytes, bytearray, memoryview, ManagedBuffer)


def find_tensors(targets: Tensors, include_buffers: bool = False) -> Found:
    """Every tensor in the targets, with its name for error messages."""
    return list(_walk(targets, "", include_buffers, chosen=True))


def refusal_of(module: torch.nn.Module) -> ValueError | None:
    """The error for the first parameter or buffer that a prefetch cannot act on."""
    try:
        ranges_of(find_tensors(module, include_buffers=True))
    except ValueError as error:
        return error.with_traceback(None)
    return None


def _walk(
    value: Any, name: str, include_buffers: bool, chosen: bool
) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a value; `chosen` is False inside a mapping or an optimizer's state.

    Chosen values must be tensors in managed memory. Elsewhere other objects are skipped, and so are
    scalars outside managed memory, such as a step count.
    """
    if isinstance(value, Tensor):
        if chosen or value.dim() > 0 or is_managed(value):
            yield from inner_tensors(name, value)
    elif isinstance(value, torch.nn.Module):
        yield from _walk_module(value, name, include_buffers)
    elif isinstance(value, torch.optim.Optimizer):
        yield from _walk_optimizer(value, name, include_buffers)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(item, join_name(name, key), include_buffers, False)
    elif isinstance(value, Iterable) and not isinstance(value, NO_CONTAINER):
        for i, item in enumerate(value):
            yield from _walk(item, f"{name or 'targets'}[{i}]", include_buffers, chosen)
    elif chosen:
        raise TypeError(
            f"{name or 'targets'} must be a tensor, a module, an optimizer, or a mapping, sequence "
            f"or other iterable of them, got {value!r}"
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
    """The dotted name of the value under a key, as in a state dict."""
    return f"{name}.{key}" if name else str(key)
