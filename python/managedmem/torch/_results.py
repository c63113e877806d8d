"""to_host: copies of tensors in page-locked host memory that is used again."""

from __future__ import annotations

import torch
from torch import Tensor

from managedmem import ManagedBuffer
from managedmem._managedmem import _synchronize
from managedmem.torch._operations import current_stream
from managedmem.torch._tensors import check_dense, describe, extent_of, is_managed, is_wrapper


def to_host(tensor: Tensor) -> Tensor:
    """A copy of a tensor in page-locked memory of the CPU; pages on the device stay there.

    Parameters
    ----------
    tensor : torch.Tensor
        A CUDA tensor, in managed memory or not, or a CPU tensor, whose pages may be on a device.

    Copies behind the work on torch's current stream of the tensor's device, at the speed of the
    link, and returns when the copy is complete. ``tensor.cpu()`` copies to ordinary memory, which
    takes many times as long for a tensor in managed memory. The first calls allocate page-locked
    memory, which later calls use again when earlier results have died.

    The copy of a CUDA tensor has page-locked memory of torch. Before torch uses that memory again,
    it waits for copies from it with ``non_blocking=True``. The copy of a contiguous CPU tensor of
    64 KiB or more in managed memory has memory of managedmem.result_cache, which does not wait:
    keep the result until such copies are done. Other CPU tensors are copied by the host. Copies
    have ordinary memory where no page-locked memory is available.

    Returns a tensor of the same shape and dtype, outside of autograd. Raises TypeError for other
    objects and for tensor subclasses that hold other tensors, ValueError for a tensor that is
    sparse, meta or not initialised, RuntimeError while the stream captures a graph,
    ImportError for CPU tensors in managed memory without NumPy. Safe from every thread. Driver:
    cuMemcpyAsync, cuStreamSynchronize.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"to_host() takes one tensor, got {type(tensor).__name__}")
    if is_wrapper(tensor):
        raise TypeError(f"{describe('', tensor)} holds other tensors: pass them one by one")
    check_dense("", tensor)
    with torch.no_grad():
        return _copy_of_device(tensor) if tensor.is_cuda else _copy_of_host(tensor.detach())


def _empty_like(tensor: Tensor) -> Tensor:
    """Memory of torch for a copy, page-locked if possible."""
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
    except RuntimeError:  # including torch's errors for lack of memory
        return torch.empty_like(tensor, device="cpu", requires_grad=False)


def _copy_of_device(tensor: Tensor) -> Tensor:
    stream = torch.cuda.current_stream(tensor.device)
    with torch.cuda.stream(stream):  # on the tensor's device
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "to_host() waits for the stream, which captures a graph: call it after the capture"
            )
        # copy_() would conjugate or negate on the host, before the contents are there.
        resolved = tensor.resolve_conj().resolve_neg()
        copy = _empty_like(resolved).copy_(resolved, non_blocking=True)
    stream.synchronize()
    return copy


def _copy_of_host(tensor: Tensor) -> Tensor:
    if not is_managed(tensor):
        return tensor.clone()
    extent = extent_of("", tensor)
    assert extent is not None  # is_managed() is False for empty tensors
    memory = ManagedBuffer.from_handle(extent[0], extent[1] - extent[0], owner=tensor)
    stream = current_stream()
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():  # not just its bytes
        _synchronize(memory, stream, True)
        return tensor.clone()
    array = memory.numpy(stream, copy=True)
    return torch.from_numpy(array).view(tensor.dtype).view(tensor.shape)
