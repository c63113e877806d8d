"""zeros(), full(), asarray() and empty_like(): new buffers with contents.

Contents are written where the memory will live: on a device that it is prefetched to or that is the
preferred location, else by the host. NumPy converts what asarray() takes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

from managedmem._managedmem import (
    Device,
    DType,
    Host,
    ManagedBuffer,
    MigrationPolicy,
    _synchronize,
    empty,
)
from managedmem._narrow_floats import is_narrow, numpy_type, pack

if TYPE_CHECKING:
    from managedmem._managedmem import _Location, _NewAttachment

_CODES = {
    "bool": "?",
    "int8": "b",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float16": "e",
    "float32": "f",
    "float64": "d",
    "complex64": "ff",
    "complex128": "dd",
}
"""The codes of `struct` for an element of each type."""

_CONVERT: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "int": int,
    "uint": int,
    "float": float,
    "complex": complex,
}
_NUMBERS = ("__index__", "__float__", "__complex__")
"""A type with one of these methods is a number."""

_NO_NUMBER_KINDS = "OUS"  # the kinds of dtypes that NumPy gives to objects and text

_HOST_DLPACK_DEVICES = (1, 3, 13)  # kDLCPU, kDLCUDAHost, kDLCUDAManaged

_CHUNK = 1 << 20  # bytes that the host writes at a time, while it holds the GIL
_PATTERN_ON_DEVICE = 64 << 10  # bytes of a pattern from the host, which the device then repeats


def _check_number(value: Any) -> None:
    if not any(hasattr(type(value), method) for method in _NUMBERS):
        raise TypeError(f"fill_value must be a number, got {type(value).__name__}")


def _pack(value: Any, dtype: DType) -> bytes:
    """The bytes of a number, converted as Python converts it."""
    if is_narrow(dtype):
        return pack(value, dtype)
    converted = _CONVERT[dtype.rstrip("0123456789")](value)
    parts = (converted.real, converted.imag) if isinstance(converted, complex) else (converted,)
    try:
        return struct.pack(f"={_CODES[dtype]}", *parts)
    except (struct.error, OverflowError):
        raise OverflowError(f"{value!r} does not fit {dtype}") from None


# --- placement -----------------------------------------------------------------------------


class _Memory(NamedTuple):
    """The arguments name, policy, prefetch and attach of a new buffer."""

    name: str | None
    policy: MigrationPolicy | None
    prefetch: Device | Host | None
    attach: _NewAttachment

    def writing_device(self) -> Device | None:
        """The device that writes the first contents; None for the host."""
        place = self.prefetch
        if place is None and isinstance(self.policy, MigrationPolicy):  # empty() refuses others
            place = self.policy.preferred_location
        return place if isinstance(place, Device) else None


def _memory(
    name: str | None,
    policy: MigrationPolicy | None,
    prefetch: _Location | None,
    attach: _NewAttachment,
) -> _Memory:
    place = None if prefetch is None else MigrationPolicy.prefer(prefetch).preferred_location
    return _Memory(name, policy, place, attach)


# --- writing -------------------------------------------------------------------------------


def _store_on_host(buffer: ManagedBuffer, pieces: Iterable[bytes | memoryview]) -> None:
    """Write pieces that together have the size of the buffer."""
    with memoryview(buffer.range(0, buffer.nbytes)) as host:
        start = 0
        for piece in pieces:
            host[start : start + len(piece)] = piece
            start += len(piece)


def _store(buffer: ManagedBuffer, by_device: bool, data: memoryview) -> None:
    """Write `data`, which has as many bytes as the buffer."""
    if not by_device:
        _store_on_host(buffer, (data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK)))
        return
    buffer.copy_from(data)
    _synchronize(buffer, None, False)


def _fill_on_device(buffer: ManagedBuffer, pattern: bytes) -> None:
    for width in (1, 2, 4):
        if pattern == pattern[:width] * (len(pattern) // width):
            buffer.fill(pattern[:width])
            return
    whole = buffer.range(0, buffer.nbytes)
    done = min(len(whole), _PATTERN_ON_DEVICE)
    whole[:done].copy_from(pattern * (done // len(pattern)))
    while done < len(whole):
        step = min(done, len(whole) - done)
        whole[done : done + step].copy_from(whole[:step])
        done += step


def _fill(buffer: ManagedBuffer, by_device: bool, pattern: bytes) -> None:
    """Repeat the bytes of one element over the buffer."""
    if not by_device:
        size = buffer.nbytes
        chunk = memoryview(pattern * (min(size, _CHUNK) // len(pattern)))
        _store_on_host(buffer, (chunk[: size - at] for at in range(0, size, len(chunk))))
        return
    _fill_on_device(buffer, pattern)
    _synchronize(buffer, None, False)


def _made(
    shape: Any,
    dtype: Any,
    memory: _Memory,
    write: Callable[[ManagedBuffer, bool], None],
    is_copied: bool = False,
) -> ManagedBuffer:
    """Allocate a buffer and write its contents, which are complete on return.

    The host writes, unless the place is a device or the driver copies. A failure frees the buffer.
    """
    device = memory.writing_device()
    place = device if memory.prefetch is None else memory.prefetch
    buffer = empty(
        shape,
        dtype,
        name=memory.name,
        policy=memory.policy,
        prefetch=place,
        attach=memory.attach,
    )
    if buffer.nbytes == 0:
        return buffer
    by_device = is_copied or device is not None
    try:
        write(buffer, by_device)
        # The writes may have moved the pages to the current device, away from the wanted place.
        if by_device and memory.prefetch not in (None, Device()):
            buffer.prefetch(memory.prefetch)
    except BaseException:
        buffer.close()
        raise
    return buffer


# --- sources -------------------------------------------------------------------------------


def _numpy_dtype(dtype: Any) -> Any:
    """The type for NumPy; None for None."""
    if dtype is None:
        return None
    name = DType(dtype)
    return numpy_type(name) if is_narrow(name) else str(name)


def _is_known_to_numpy(source: Any) -> bool:
    """True if numpy.asarray() finds the elements itself, or the source has no DLPack."""
    if not hasattr(type(source), "__dlpack__"):
        return True
    return any(hasattr(source, f"__array{rest}__") for rest in ("", "_interface", "_struct"))


def _imported_dlpack(numpy: Any, source: Any) -> Any:
    """NumPy's view of an object that has only DLPack: numpy.asarray() would make it one element."""
    kind = int(source.__dlpack_device__()[0])
    if kind not in _HOST_DLPACK_DEVICES:
        raise TypeError(
            f"asarray() takes DLPack arrays in host memory, but {type(source).__name__} is on a "
            f"device of DLPack type {kind}: give an array with __cuda_array_interface__, or a copy "
            "on the host"
        )
    return numpy.from_dlpack(source)


def _from_numpy(source: Any, dtype: Any, memory: _Memory, given: Any) -> ManagedBuffer:
    """A buffer from anything that NumPy makes an array of; `given` is the argument of asarray()."""
    try:
        numpy = import_module("numpy")
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise ImportError(
            f"asarray() of {type(given).__name__} needs NumPy, which is not installed: "
            "pip install numpy",
            name="numpy",
        ) from None
    if not _is_known_to_numpy(source):
        source = _imported_dlpack(numpy, source)
    try:
        array = numpy.asarray(source, _numpy_dtype(dtype))
    except TypeError:
        if hasattr(source, "dtype"):
            DType(source.dtype)  # raises, with advice, for a type that buffers do not have
        raise
    if array.dtype.kind in _NO_NUMBER_KINDS and not hasattr(given, "dtype"):
        is_path = isinstance(given, str | PathLike)
        of_file = f'; of a file numpy.load({str(given)!r:.200}, mmap_mode="r")' if is_path else ""
        raise TypeError(
            f"asarray() cannot convert {type(given).__name__} to numbers: give an array, a number "
            f"or a nested sequence of numbers{of_file}"
        )
    own = DType(array.dtype.newbyteorder("="))
    return _from_array(numpy.ascontiguousarray(array, _numpy_dtype(own)), array.shape, own, memory)


def _from_array(array: Any, shape: Any, own: DType, memory: _Memory) -> ManagedBuffer:
    """From the bytes of an array of NumPy that is C-contiguous."""
    data = memoryview(array.reshape(-1).view("u1"))
    return _made(shape, own, memory, lambda buffer, by_device: _store(buffer, by_device, data))


def _from_narrow_tensor(tensor: Any, own: DType, dtype: Any, memory: _Memory) -> ManagedBuffer:
    """From a tensor of torch whose type NumPy lacks."""
    if not tensor.is_cpu:
        return _from_device_array(tensor, own, dtype, memory, tensor.shape)
    torch = import_module("torch")
    bits = tensor.contiguous().view(torch.uint8 if own.itemsize == 1 else torch.int16).numpy()
    if dtype is None or own == DType(dtype):
        return _from_array(bits, bits.shape, own, memory)
    return _from_numpy(bits.view(numpy_type(own)), dtype, memory, tensor)


def _narrow_type(data: Any) -> DType | None:
    """The type of an array or tensor if NumPy lacks it."""
    try:
        dtype = DType(data.dtype)
    except (AttributeError, TypeError):
        return None
    return dtype if is_narrow(dtype) else None


def _from_device_array(
    data: Any, own: DType, dtype: Any, memory: _Memory, shape: Any
) -> ManagedBuffer:
    """From memory that the driver copies."""
    if dtype is not None and own != DType(dtype):
        raise TypeError(
            f"asarray() does not convert arrays of devices: give it {DType(dtype)} instead of {own}"
        )

    def write(buffer: ManagedBuffer, _: bool) -> None:
        buffer.copy_from(data)
        _synchronize(buffer, None, False)

    return _made(shape, own, memory, write, is_copied=True)


def _from_buffer(buffer: ManagedBuffer, dtype: Any, memory: _Memory) -> ManagedBuffer:
    if dtype is None or buffer.dtype == DType(dtype):
        return _from_device_array(buffer, buffer.dtype, None, memory, buffer.shape)
    if is_narrow(buffer.dtype):
        return _from_numpy(buffer.numpy(), dtype, memory, buffer)
    _synchronize(buffer, None, True)  # NumPy does not wait for the default stream
    return _from_numpy(buffer, dtype, memory, buffer)


def _from_any(data: Any, dtype: Any, memory: _Memory) -> ManagedBuffer:
    if isinstance(data, ManagedBuffer):
        return _from_buffer(data, dtype, memory)
    narrow = _narrow_type(data)
    if narrow is not None and str(data.dtype).startswith("torch."):
        return _from_narrow_tensor(data, narrow, dtype, memory)
    interface = getattr(data, "__cuda_array_interface__", None)
    if interface is not None:
        if not isinstance(interface, dict) or not {"typestr", "shape"} <= interface.keys():
            raise TypeError(
                f"{type(data).__name__} must have shape and typestr in its __cuda_array_interface__"
            )
        own = narrow or DType(interface["typestr"])
        return _from_device_array(data, own, dtype, memory, interface["shape"])
    if hasattr(type(data), "__array__"):
        return _from_numpy(data, dtype, memory, data)
    try:
        view = memoryview(data)  # NumPy would take bytes for text, not for elements
    except TypeError:
        return _from_numpy(data, dtype, memory, data)
    with view:
        return _from_numpy(view, dtype, memory, data)


# --- functions -----------------------------------------------------------------------------


def zeros(
    shape: SupportsIndex | Sequence[SupportsIndex],
    dtype: Any = "uint8",
    *,
    name: str | None = None,
    policy: MigrationPolicy | None = None,
    prefetch: _Location | None = None,
    attach: _NewAttachment = "global",
) -> ManagedBuffer:
    """Allocate managed memory for an array and fill it with 0.

    Parameters are those of empty(). The memory is filled where it will live. If ``prefetch`` is a
    device, or without it the policy prefers one, the pages are prefetched there and the current
    device fills them; otherwise the host fills them. The contents are complete when the call
    returns, for every stream and for the host. If ``prefetch`` is not the current device, the
    filled pages are prefetched to it again, in the default stream.

    Raises as empty() does, and CUDAError when the driver fails; the memory is then freed. Safe from
    every thread. Driver: cuMemAllocManaged, cuMemAdvise, cuMemPrefetchAsync, cuMemsetD8Async,
    cuStreamSynchronize.
    """
    wanted = DType("uint8" if dtype is None else dtype)
    memory = _memory(name, policy, prefetch, attach)
    return _made(shape, wanted, memory, lambda buffer, by_device: _fill(buffer, by_device, b"\0"))


def full(
    shape: SupportsIndex | Sequence[SupportsIndex],
    fill_value: Any,
    dtype: Any = None,
    *,
    name: str | None = None,
    policy: MigrationPolicy | None = None,
    prefetch: _Location | None = None,
    attach: _NewAttachment = "global",
) -> ManagedBuffer:
    """Allocate managed memory for an array and fill it with a number.

    Parameters
    ----------
    shape : int or sequence of int
        As for empty().
    fill_value : bool, int, float or complex, or a scalar of NumPy
        The value of each element.
    dtype : str, NumPy or torch dtype, Python type, optional
        The element type; None takes the value's: bool, int64, float64, complex128, or a NumPy
        scalar's.
    name : str, optional
        The name of the buffer, as ManagedBuffer.name has it.
    policy : MigrationPolicy, optional
        The advice that the memory has from the start.
    prefetch : Device or Host, optional
        Where the pages are when the default stream has reached this call.
    attach : str
        "global" or "host", as for empty().

    The value is converted as Python converts it: 1.5 is 1 as an int. The memory is filled where it
    will live, and complete when the call returns, as in zeros().

    Raises TypeError if the value is not a number, OverflowError if the element type does not hold
    it, ValueError for NaN as an int, and the errors of zeros(). Safe from every thread. Driver:
    cuMemAllocManaged, cuMemAdvise, cuMemPrefetchAsync, cuMemsetD8Async, cuMemsetD16Async,
    cuMemsetD32Async, cuMemcpyAsync, cuStreamSynchronize.
    """
    _check_number(fill_value)
    wanted = DType(getattr(fill_value, "dtype", type(fill_value)) if dtype is None else dtype)
    pattern = _pack(fill_value, wanted)
    memory = _memory(name, policy, prefetch, attach)
    return _made(shape, wanted, memory, lambda buffer, by_device: _fill(buffer, by_device, pattern))


def asarray(
    a: Any,
    dtype: Any = None,
    *,
    copy: bool | None = None,
    name: str | None = None,
    policy: MigrationPolicy | None = None,
    prefetch: _Location | None = None,
    attach: _NewAttachment = "global",
) -> ManagedBuffer:
    """Bring an array into managed memory.

    Parameters
    ----------
    a : array, buffer, number or nested sequence of numbers
        A ManagedBuffer; a C-contiguous array that has __cuda_array_interface__; an object with the
        buffer protocol, such as bytes or array.array; an object with __dlpack__ in memory of the
        host; anything else that numpy.asarray() takes, such as lists and memory maps of files;
        torch tensors that do not require grad.
    dtype : str, NumPy or torch dtype, Python type, optional
        The element type. None keeps the type that NumPy gives the array.
    copy : bool, optional
        None returns a ManagedBuffer itself, without a copy, if name and policy are None, attach is
        "global" and dtype is None or its own. True always copies. False never copies, and raises
        ValueError where a copy is needed.
    name : str, optional
        The name of the buffer, as ManagedBuffer.name has it.
    policy : MigrationPolicy, optional
        The advice that the memory has from the start.
    prefetch : Device or Host, optional
        As for full(). A ManagedBuffer that is returned itself is prefetched too.
    attach : str
        "global" or "host", as for empty().

    The contents are copied to where the memory will live. If ``prefetch`` is a device, or without
    it the policy prefers one, the pages are prefetched there first; otherwise the host writes them.
    The driver copies arrays with __cuda_array_interface__ and a ManagedBuffer of the same dtype,
    behind the work on the default stream. The contents are complete when the call returns.

    NumPy converts everything else, and must be installed for that. Arrays with
    __cuda_array_interface__ are not converted to another dtype.

    Raises TypeError for element types that a buffer does not have, ValueError for arrays of devices
    that are not C-contiguous, ImportError without NumPy, and as numpy.asarray() and empty() do;
    CUDAError when the driver fails; the memory is then freed. Safe from every thread. Driver:
    cuMemAllocManaged, cuMemAdvise, cuMemPrefetchAsync, cuMemcpyAsync, cuStreamSynchronize.
    """
    same = isinstance(a, ManagedBuffer) and (dtype is None or a.dtype == DType(dtype))
    if same and not copy and name is None and policy is None and attach == "global":
        kept: ManagedBuffer = a
        if prefetch is not None:
            kept.prefetch(prefetch)
        return kept
    if copy is False:
        raise ValueError(
            "copy=False allows only a ManagedBuffer of the same dtype, without name, policy and "
            "attach"
        )
    return _from_any(a, dtype, _memory(name, policy, prefetch, attach))


def empty_like(
    prototype: Any,
    dtype: Any = None,
    *,
    shape: SupportsIndex | Sequence[SupportsIndex] | None = None,
    name: str | None = None,
    policy: MigrationPolicy | None = None,
    prefetch: _Location | None = None,
    attach: _NewAttachment = "global",
) -> ManagedBuffer:
    """Allocate managed memory for an array like another one, with undefined contents.

    Parameters
    ----------
    prototype : object with shape and dtype
        A ManagedBuffer, or an array of another library. Only these attributes are read.
    dtype : str, NumPy or torch dtype, Python type, optional
        Another element type.
    shape : int or sequence of int, optional
        Another shape.
    name, policy, prefetch, attach
        As for empty().

    Raises TypeError for an object without shape or dtype, and as empty() does. Safe from every
    thread. Driver: cuMemAllocManaged, cuMemAdvise, cuMemPrefetchAsync.
    """
    try:
        shape = prototype.shape if shape is None else shape
        dtype = prototype.dtype if dtype is None else dtype
    except AttributeError:
        raise TypeError(
            f"empty_like() needs an object with shape and dtype, got {type(prototype).__name__}"
        ) from None
    return empty(shape, dtype, name=name, policy=policy, prefetch=prefetch, attach=attach)
