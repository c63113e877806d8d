"""The entry points of Megatron-LM's unified_memory module, over this library.

>>> from managedmem import megatron as unified_memory

Owns the names, argument forms and return values of that module: a device is an int, -1 is the CPU,
None in place of a tensor or module does nothing. Needs PyTorch; the import opens no driver.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, SupportsIndex

import managedmem.torch  # isort: skip  # first: it raises the error that says what to install
import torch
from torch import Tensor

from managedmem import Device, DriverNotFoundError, DriverTooOldError, Host, ManagedBuffer
from managedmem.torch._operations import current_stream
from managedmem.torch._pool import (
    UnifiedMemoryUnsupportedError,
    own_device_mempool,
    unsupported_reasons,
)
from managedmem.torch._targets import find_tensors
from managedmem.torch._tensors import Found, NotManagedError, is_managed, ranges_of

if TYPE_CHECKING:
    from managedmem._managedmem import _Advice, _Stream

__all__ = [
    "CompilationState",
    "UnifiedMemoryCompileTimeoutError",
    "UnifiedMemoryUnsupportedError",
    "advise_managed_module_parameters_preferred_location",
    "advise_managed_tensor_accessed_by",
    "advise_managed_tensor_preferred_location",
    "compile_allocator",
    "create_unified_mempool",
    "prefetch_managed_module_parameters",
    "prefetch_managed_tensor",
]


class CompilationState(Enum):
    """The result of compile_allocator(), which compiles nothing."""

    UNATTEMPTED = auto()
    FAILURE = auto()
    SUCCESS = auto()


class UnifiedMemoryCompileTimeoutError(UnifiedMemoryUnsupportedError):
    """Never raised, because nothing is compiled; it exists for callers that catch it."""


_lock = threading.Lock()
_compilation_state = CompilationState.UNATTEMPTED
_compilation_error = ""


def _check_support() -> str:
    """The reason why there can be no pool, or ""; checks only once, as Megatron-LM does."""
    global _compilation_state, _compilation_error  # noqa: PLW0603
    with _lock:
        if _compilation_state is CompilationState.UNATTEMPTED:
            _compilation_error = "; ".join(unsupported_reasons())
            failed = bool(_compilation_error)
            _compilation_state = CompilationState.FAILURE if failed else CompilationState.SUCCESS
        return _compilation_error


def compile_allocator() -> None:
    """Check once if torch can have managed memory here, and warn if not.

    Compiles nothing: this library exports the allocator's functions. So no rank needs a compiler or
    waits for a lock file. There is no collective: torch.distributed need not be initialised, and
    not every rank has to call this.
    """
    first = _compilation_state is CompilationState.UNATTEMPTED
    if (reason := _check_support()) and first:
        warnings.warn(f"torch cannot have managed memory here: {reason}", stacklevel=2)


def create_unified_mempool() -> torch.cuda.MemPool:
    """Make a pool over managed memory that prefers, and is accessed by, its own device.

    Works as managedmem.torch.managed_mempool() with this advice. Raises
    UnifiedMemoryUnsupportedError, with the reason, where torch cannot have managed memory.
    """
    if reason := _check_support():
        raise UnifiedMemoryUnsupportedError(reason)
    return own_device_mempool()


# --- tensors and modules ------------------------------------------------------------------


def _location(device: Any) -> Device | Host:
    if isinstance(device, bool) or not isinstance(device, SupportsIndex):
        raise TypeError(f"device must be the number of a GPU, or -1 for the CPU; got {device!r}")
    return Host() if device.__index__() == -1 else Device(device)


@contextmanager
def _errors_of(action: str) -> Iterator[None]:
    """Raise UnifiedMemoryUnsupportedError for a missing driver; note the action on CUDAErrors."""
    try:
        yield
    except (DriverNotFoundError, DriverTooOldError) as error:
        raise UnifiedMemoryUnsupportedError(str(error)) from error
    except managedmem.CUDAError as error:
        error.add_note(f"This was to {action}.")
        raise


def _find_in_tensor(tensor: Any) -> Found:
    if tensor is not None and not isinstance(tensor, Tensor):
        raise TypeError(f"expected a torch.Tensor or None, got {tensor!r}")
    return [] if tensor is None or tensor.numel() == 0 else find_tensors(tensor)


def _find_in_module(module: Any, include_buffers: bool) -> Found:
    """The module's parameters (and buffers), without those in plain host memory."""
    if module is not None and not isinstance(module, torch.nn.Module):
        raise TypeError(f"expected a torch.nn.Module or None, got {module!r}")
    tensors = [] if module is None else find_tensors(module, include_buffers)
    return [(name, tensor) for name, tensor in tensors if tensor.is_cuda or is_managed(tensor)]


def _ranges_of(tensors: Found) -> list[ManagedBuffer]:
    """The distinct ranges. RuntimeError for an unmanaged CUDA tensor, as Megatron-LM raises it."""
    try:
        return ranges_of(tensors)
    except NotManagedError as error:
        raise RuntimeError(str(error)) if error.tensor.is_cuda else error from None


def _prefetch(tensors: Found, device: Any, stream: _Stream | None = None) -> int:
    """Prefetch one batch per torch device of the tensors, by default on its current stream."""
    location = _location(device)
    groups: dict[torch.device, Found] = {}
    for name, tensor in tensors:
        groups.setdefault(tensor.device, []).append((name, tensor))
    batches = {home: _ranges_of(group) for home, group in groups.items()}
    for home, ranges in batches.items():
        if ranges:
            own = current_stream(home if home.type == "cuda" else None)
            managedmem.prefetch(ranges, location, stream=own if stream is None else stream)
    return sum(buffer.size for ranges in batches.values() for buffer in ranges)


def _advise(tensors: Found, advice: _Advice, device: Any) -> None:
    location = _location(device)
    if ranges := _ranges_of(tensors):
        managedmem.advise(ranges, advice, location)


def prefetch_managed_tensor(
    tensor: Any, *, device: SupportsIndex, stream: _Stream | None = None
) -> None:
    """Prefetch a tensor to GPU number `device`, or to the CPU with -1.

    Skips None and empty tensors. The default `stream` is the current stream of the tensor's own
    device. Raises TypeError for other objects, ValueError for a tensor in plain host memory,
    RuntimeError for a CUDA tensor that is not in managed memory, UnifiedMemoryUnsupportedError
    without a driver, and the errors of managedmem.prefetch().
    """
    with _errors_of("prefetch a tensor"):
        if tensors := _find_in_tensor(tensor):
            _prefetch(tensors, device, stream)


def advise_managed_tensor_preferred_location(tensor: Any, *, device: SupportsIndex) -> None:
    """Let a tensor's pages prefer GPU number `device`, or the CPU with -1.

    Skips and raises as prefetch_managed_tensor() does.
    """
    with _errors_of("set a tensor's preferred location"):
        if tensors := _find_in_tensor(tensor):
            _advise(tensors, "set_preferred_location", device)


def advise_managed_tensor_accessed_by(tensor: Any, *, device: SupportsIndex) -> None:
    """Keep a tensor's pages mapped for GPU number `device`, or for the CPU with -1.

    Skips and raises as prefetch_managed_tensor() does.
    """
    with _errors_of("set what a tensor is accessed by"):
        if tensors := _find_in_tensor(tensor):
            _advise(tensors, "set_accessed_by", device)


def prefetch_managed_module_parameters(
    module: Any, *, device: SupportsIndex, include_buffers: bool = False
) -> int:
    """Prefetch a module's parameters to GPU number `device`, or to the CPU with -1.

    Skips empty parameters and those in plain host memory; None in place of the module does nothing.
    Works on the current stream of the tensors' own device.

    Returns the number of distinct bytes. Before anything moves, raises TypeError for other objects,
    and RuntimeError, with the parameter's name, for a CUDA tensor that is not in managed memory.
    Otherwise raises as prefetch_managed_tensor() does.
    """
    with _errors_of("prefetch a module's parameters"):
        tensors = _find_in_module(module, include_buffers)
        return _prefetch(tensors, device) if tensors else 0


def advise_managed_module_parameters_preferred_location(
    module: Any, *, device: SupportsIndex, include_buffers: bool = False
) -> None:
    """Let the pages of a module's parameters prefer GPU number `device`, or the CPU with -1.

    Skips and raises as prefetch_managed_module_parameters() does. All or nothing.
    """
    with _errors_of("set the preferred location of a module's parameters"):
        if tensors := _find_in_module(module, include_buffers):
            _advise(tensors, "set_preferred_location", device)
