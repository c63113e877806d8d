"""The implementation of buf.torch() and buf.cupy(): arrays of these libraries over the same memory.

Each call imports its library. Each array holds a DLPack export, which keeps the memory alive.
"""

from importlib import import_module
from typing import Any

from managedmem._extras import CUPY
from managedmem._managedmem import Device, Host, ManagedBuffer, _driver_info, _synchronize
from managedmem._narrow_floats import is_narrow, numpy_type

CPU, CUDA = 1, 2
LEGACY_STREAM = 1


def _library(name: str, requirement: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(f"{name}() needs {requirement}", name=name) from None


def _refuse_emulated(name: str, buffer: ManagedBuffer) -> None:
    if _driver_info()["emulated"]:
        way = 'buf.numpy() or buf.torch("cpu")'
        if not buffer.is_host_accessible:
            way = "a copy: managedmem.empty_like(buf).copy_from(buf)"
        raise RuntimeError(f"{name} cannot use memory of the emulated driver on a GPU: use {way}")


def _own_device(buffer: ManagedBuffer) -> int | None:
    """The device that owns the memory of a device pool; None for managed and host memory."""
    kind, ordinal = buffer.__dlpack_device__()
    return ordinal if kind == CUDA else None


def _torch_device(torch: Any, buffer: ManagedBuffer, device: Any) -> Any:
    if isinstance(device, Host):
        return torch.device("cpu")
    if isinstance(device, Device):
        return torch.device("cuda", device.device_id)
    if isinstance(device, int):
        return torch.device("cuda", device)  # torch.device(0) needs a GPU
    if device is not None:
        return torch.device(device)
    own = _own_device(buffer)
    if own is not None:
        return torch.device("cuda", own)
    has_gpu = not _driver_info()["emulated"] and torch.cuda.is_available()
    return torch.device("cuda" if has_gpu else "cpu")


def to_torch(buffer: ManagedBuffer, device: Any, stream: Any) -> Any:
    torch = _library(
        "torch",
        "PyTorch, which is not installed: pip install torch, or see https://pytorch.org",
    )
    if not is_narrow(buffer.dtype):
        return _torch_tensor(torch, buffer, device, stream)
    dtype = getattr(torch, buffer.dtype, None)
    if dtype is None:
        raise TypeError(
            f'torch has no {buffer.dtype}: use the bits, as in buf.view("uint8").torch()'
        )
    # Older versions of torch know no 8-bit float in DLPack.
    bits = buffer.view("uint8" if buffer.itemsize == 1 else "int16", buffer.shape)
    return _torch_tensor(torch, bits, device, stream).view(dtype)


def _torch_tensor(torch: Any, buffer: ManagedBuffer, device: Any, stream: Any) -> Any:
    target = _torch_device(torch, buffer, device)
    if target.type == "cpu":
        _synchronize(buffer, stream, True)
        return torch.from_dlpack(buffer.__dlpack__(dl_device=(CPU, 0)))
    if target.type != "cuda":
        raise ValueError(f"device must be a CUDA device or the CPU, got {target}")
    _refuse_emulated("torch", buffer)
    ordinal = torch.cuda.current_device() if target.index is None else target.index
    if stream is not None:
        _synchronize(buffer, stream, False)
    consumer = torch.cuda.current_stream(ordinal).cuda_stream or LEGACY_STREAM
    # torch refuses DLPack's device type for managed memory, so the export names the GPU.
    return torch.from_dlpack(buffer.__dlpack__(stream=consumer, dl_device=(CUDA, ordinal)))


def to_cupy(buffer: ManagedBuffer, stream: Any) -> Any:
    cupy = _library("cupy", CUPY)
    _refuse_emulated("CuPy", buffer)
    own = _own_device(buffer)
    ordinal = cupy.cuda.runtime.getDevice() if own is None else own
    if stream is not None:
        _synchronize(buffer, stream, False)
    consumer = cupy.cuda.get_current_stream().ptr or LEGACY_STREAM
    capsule = buffer.__dlpack__(stream=consumer)
    memory = cupy.cuda.UnownedMemory(buffer.handle, buffer.nbytes, capsule, ordinal)
    dtype = numpy_type(buffer.dtype) if is_narrow(buffer.dtype) else str(buffer.dtype)
    return cupy.ndarray(buffer.shape, dtype, cupy.cuda.MemoryPointer(memory, 0))
