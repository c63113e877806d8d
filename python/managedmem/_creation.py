"""zeros(), full(), asarray() and empty_like(): new buffers with contents.

Contents are written where the memory will live: on a device that is the preferred location, else by
the host. Numbers of Python are converted here, so that NumPy is only needed for its own arrays.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from operator import index
from typing import Any, SupportsIndex

from managedmem._managedmem import (
    Device,
    DType,
    ManagedBuffer,
    MigrationPolicy,
    _synchronize,
    empty,
)

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
_KINDS = ("bool", "int64", "float64", "complex128")
"""The types of Python's numbers, each for those in front of it too."""

_BUFFER_KINDS = {
    "?": "bool",
    **dict.fromkeys("bhilqn", "int"),
    **dict.fromkeys("BHILQN", "uint"),
    **dict.fromkeys("efd", "float"),
    "Zf": "complex",
    "Zd": "complex",
}
"""The kind of number behind each format of the buffer protocol."""

_MOST_AXES = 8
_CHUNK = 1 << 20  # bytes that the host writes while other threads wait for it
_PATTERN_ON_DEVICE = 64 << 10  # bytes of a pattern that are copied to a device first


# --- numbers -------------------------------------------------------------------------------


def _kind(dtype: str) -> str:
    return dtype.rstrip("0123456789")


def _is_sequence(kind: type) -> bool:
    return issubclass(kind, Sequence) and not issubclass(kind, str | bytes | bytearray)


def _rank(kind: type) -> int:
    """The place in _KINDS of numbers of this Python type."""
    if issubclass(kind, bool):
        return 0
    for rank, method in enumerate(("__index__", "__float__", "__complex__"), start=1):
        if hasattr(kind, method):
            return rank
    raise TypeError(
        f"numbers, nested sequences of numbers, arrays and buffers are taken, not {kind.__name__}"
    )


def _common_dtype(values: Sequence[Any]) -> DType:
    """The element type that numbers of Python have together; float64 for none, as in NumPy."""
    rank = max(map(_rank, set(map(type, values))), default=2)
    if rank == 1 and max(map(index, values)) >= 1 << 63:
        return DType("uint64")
    return DType(_KINDS[rank])


def _refuse(values: Sequence[Any], dtype: DType) -> OverflowError:
    code = _CODES[dtype][0]
    for value in values:
        try:
            struct.pack(f"={code}", value)
        except (struct.error, OverflowError):
            return OverflowError(f"{value!r} does not fit {dtype}")
    raise AssertionError("every value fits")


def _pack(values: Sequence[Any], dtype: DType) -> bytes:
    """The bytes of numbers, converted as Python converts them."""
    for kind in set(map(type, values)):
        _rank(kind)
    converted = list(map(_CONVERT[_kind(dtype)], values))
    if _kind(dtype) == "complex":
        converted = [part for value in converted for part in (value.real, value.imag)]
    try:
        return struct.pack(f"={len(converted)}{_CODES[dtype][0]}", *converted)
    except (struct.error, OverflowError):
        raise _refuse(converted, dtype) from None


def _unpack(data: bytes, dtype: DType) -> list[Any]:
    code = _CODES[dtype]
    found = list(struct.unpack(f"={len(data) // struct.calcsize('=' + code[0])}{code[0]}", data))
    if len(code) == 1:
        return found
    return [complex(*pair) for pair in zip(found[::2], found[1::2], strict=True)]


def _flat(data: Any) -> tuple[tuple[int, ...], list[Any]] | None:
    """The shape and the numbers of nested sequences; None if there are arrays among them."""
    shape: tuple[int, ...] = ()
    level = [data]
    while True:
        kinds = set(map(type, level))
        if any(hasattr(kind, "__array__") for kind in kinds):
            return None
        if not any(map(_is_sequence, kinds)):
            return shape, level
        if len(shape) == _MOST_AXES:
            raise ValueError(f"nested sequences have more than {_MOST_AXES} axes")
        lengths = {len(item) if _is_sequence(type(item)) else None for item in level}
        if len(lengths) > 1:
            raise ValueError(
                f"nested sequences must have one shape, but behind {shape} there are items of "
                + " and ".join(
                    sorted("no length" if n is None else f"length {n}" for n in lengths)[:3]
                )
            )
        shape += (len(level[0]),)
        level = [each for item in level for each in item]


# --- writing -------------------------------------------------------------------------------


def _writing_device(policy: MigrationPolicy | None) -> Device | None:
    """The device that writes the first contents; None for the host."""
    place = None if policy is None else policy.preferred_location
    return place if isinstance(place, Device) else None


def _store_on_host(buffer: ManagedBuffer, pieces: Iterable[bytes | memoryview]) -> None:
    """Write pieces that together have the size of the buffer."""
    with memoryview(buffer.range(0, buffer.nbytes)) as host:
        start = 0
        for piece in pieces:
            host[start : start + len(piece)] = piece
            start += len(piece)


def _store(buffer: ManagedBuffer, device: Device | None, data: memoryview) -> None:
    """Write bytes of the size of the buffer."""
    if device is None:
        _store_on_host(buffer, (data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK)))
        return
    buffer.prefetch(device)
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


def _fill(buffer: ManagedBuffer, device: Device | None, pattern: bytes) -> None:
    """Repeat the bytes of one element over the buffer."""
    if device is None:
        size = buffer.nbytes
        chunk = memoryview(pattern * (min(size, _CHUNK) // len(pattern)))
        _store_on_host(buffer, (chunk[: size - at] for at in range(0, size, len(chunk))))
        return
    buffer.prefetch(device)
    _fill_on_device(buffer, pattern)
    _synchronize(buffer, None, False)


def _made(
    shape: Any,
    dtype: Any,
    name: str | None,
    policy: MigrationPolicy | None,
    write: Callable[[ManagedBuffer, Device | None], None],
) -> ManagedBuffer:
    """A buffer whose contents are written and complete; nothing is left of one that fails."""
    buffer = empty(shape, dtype, name=name, policy=policy)
    if buffer.nbytes == 0:
        return buffer
    try:
        write(buffer, _writing_device(policy))
    except BaseException:
        buffer.close()
        raise
    return buffer


def _made_of(
    shape: Any, dtype: Any, name: str | None, policy: MigrationPolicy | None, data: Any
) -> ManagedBuffer:
    """A buffer with these bytes."""
    return _made(
        shape, dtype, name, policy, lambda buffer, device: _store(buffer, device, memoryview(data))
    )


# --- sources -------------------------------------------------------------------------------


def _from_buffer(
    data: memoryview, dtype: Any, name: str | None, policy: MigrationPolicy | None
) -> ManagedBuffer:
    code = data.format.lstrip("@=<|")
    if code not in _BUFFER_KINDS:
        raise TypeError(
            f"a buffer of format {data.format!r} has no elements that a ManagedBuffer has"
        )
    kind = _BUFFER_KINDS[code]
    own = DType(kind if kind == "bool" else f"{kind}{8 * data.itemsize}")
    wanted = own if dtype is None else DType(dtype)
    shape: Any = data.shape
    if wanted != own:
        return _made_of(shape, wanted, name, policy, _pack(_unpack(data.tobytes(), own), wanted))
    if data.nbytes == 0:
        return empty(shape, wanted, name=name, policy=policy)
    try:
        plain = data.cast("B")
    except (TypeError, ValueError):  # not contiguous, or in a format that has no cast
        plain = memoryview(data.tobytes())
    return _made_of(shape, wanted, name, policy, plain)


def _from_numpy(
    data: Any, dtype: Any, name: str | None, policy: MigrationPolicy | None
) -> ManagedBuffer:
    """From what NumPy makes an array of."""
    try:
        numpy = import_module("numpy")
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise ImportError(f"asarray() of {type(data).__name__} needs NumPy", name="numpy") from None
    array = numpy.asarray(data)
    wanted = DType(array.dtype.newbyteorder("=") if dtype is None else dtype)
    plain = numpy.ascontiguousarray(array, str(wanted)).reshape(-1).view(numpy.uint8)
    return _made_of(array.shape, wanted, name, policy, plain)


def _from_device_array(
    data: Any, own: DType, dtype: Any, name: str | None, policy: MigrationPolicy | None, shape: Any
) -> ManagedBuffer:
    """From memory that the driver copies."""
    if dtype is not None and own != DType(dtype):
        raise TypeError(
            f"asarray() does not convert memory of devices: make the {own} a {DType(dtype)} first"
        )

    def write(buffer: ManagedBuffer, device: Device | None) -> None:
        if device is not None:
            buffer.prefetch(device)
        buffer.copy_from(data)
        _synchronize(buffer, None, False)

    return _made(shape, own, name, policy, write)


def _from_own(
    data: ManagedBuffer, dtype: Any, name: str | None, policy: MigrationPolicy | None
) -> ManagedBuffer:
    if dtype is None or data.dtype == DType(dtype):
        return _from_device_array(data, data.dtype, None, name, policy, data.shape)
    with memoryview(data) as host:
        return _from_buffer(host, dtype, name, policy)


def _from_any(
    data: Any, dtype: Any, name: str | None, policy: MigrationPolicy | None
) -> ManagedBuffer:
    if isinstance(data, ManagedBuffer):
        return _from_own(data, dtype, name, policy)
    interface = getattr(data, "__cuda_array_interface__", None)
    if interface is not None:
        own = DType(interface["typestr"])
        return _from_device_array(data, own, dtype, name, policy, interface["shape"])
    if hasattr(type(data), "__array__"):
        return _from_numpy(data, dtype, name, policy)
    try:
        view = memoryview(data)
    except TypeError:  # has no buffer protocol
        flat = _flat(data)
    else:
        with view:
            return _from_buffer(view, dtype, name, policy)
    if flat is None:
        return _from_numpy(data, dtype, name, policy)
    shape, values = flat
    wanted = _common_dtype(values) if dtype is None else DType(dtype)
    return _made_of(shape, wanted, name, policy, _pack(values, wanted))


# --- functions -----------------------------------------------------------------------------


def zeros(
    shape: SupportsIndex | Sequence[SupportsIndex],
    dtype: Any = "uint8",
    *,
    name: str | None = None,
    policy: MigrationPolicy | None = None,
) -> ManagedBuffer:
    """Allocate managed memory for an array and fill it with 0.

    Parameters are those of empty(). The memory is filled where it will live: if the policy prefers
    a device, the pages are prefetched there and the current device fills them; otherwise the host
    does. The contents are complete when the call returns, for every stream and for the host.

    Raises as empty() does, and CUDAError when the driver fails; the memory is then freed. Safe from
    every thread. Driver: cuMemAllocManaged, cuMemAdvise, cuMemPrefetchAsync, cuMemsetD8Async,
    cuStreamSynchronize.
    """
    return full(shape, 0, dtype, name=name, policy=policy)


def full(
    shape: SupportsIndex | Sequence[SupportsIndex],
    fill_value: Any,
    dtype: Any = None,
    *,
    name: str | None = None,
    policy: MigrationPolicy | None = None,
) -> ManagedBuffer:
    """Allocate managed memory for an array and fill it with a number.

    Parameters
    ----------
    shape : int or sequence of int
        As for empty().
    fill_value : bool, int, float or complex, or a scalar of NumPy
        The value of each element.
    dtype : str, NumPy or torch dtype, Python type, optional
        The element type; None takes that of the value: bool, int64 (uint64 from 2**63 on), float64,
        complex128, or the one of a NumPy scalar.
    name : str, optional
        The name of the buffer, as ManagedBuffer.name has it.
    policy : MigrationPolicy, optional
        The advice that the memory has from the start.

    The value is converted as Python converts it: 1.5 is 1 as an int. The memory is filled where it
    will live, and complete when the call returns, as in zeros().

    Raises TypeError for a value that is not a number, OverflowError for one that the element type
    does not hold, and as zeros() does. Safe from every thread. Driver: cuMemAllocManaged,
    cuMemAdvise, cuMemPrefetchAsync, cuMemsetD8Async, cuMemsetD16Async, cuMemsetD32Async,
    cuMemcpyAsync, cuStreamSynchronize.
    """
    if dtype is None:
        dtype = getattr(fill_value, "dtype", None) or _common_dtype([fill_value])
    pattern = _pack([fill_value], DType(dtype))
    return _made(shape, dtype, name, policy, lambda buffer, device: _fill(buffer, device, pattern))


def asarray(
    a: Any,
    dtype: Any = None,
    *,
    copy: bool | None = None,
    name: str | None = None,
    policy: MigrationPolicy | None = None,
) -> ManagedBuffer:
    """Bring an array into managed memory.

    Parameters
    ----------
    a : array, buffer, number or nested sequence of numbers
        A NumPy array or an object with __array__, such as a torch tensor on the CPU; an object with
        the buffer protocol, such as bytes or array.array; an array with __cuda_array_interface__,
        which must have no gaps; lists and tuples of one shape; a ManagedBuffer.
    dtype : str, NumPy or torch dtype, Python type, optional
        The element type. None keeps that of an array or buffer; numbers of Python become bool,
        int64 (uint64 from 2**63 on), float64 or complex128.
    copy : bool, optional
        None gives a ManagedBuffer back as it is if dtype, name and policy ask for nothing else.
        True always copies. False never does: a ValueError where a copy is needed.
    name : str, optional
        The name of the buffer, as ManagedBuffer.name has it.
    policy : MigrationPolicy, optional
        The advice that the memory has from the start.

    The contents are copied to where the memory will live: if the policy prefers a device, the pages
    are prefetched there first; otherwise the host writes them. Arrays with __cuda_array_interface__
    and a ManagedBuffer of the same dtype are copied by the driver, behind the work on the default
    stream. The contents are complete when the call returns.

    NumPy converts objects with __array__, as its own asarray() does. Everything else is converted
    as Python converts numbers, element by element, and needs no NumPy. Arrays with
    __cuda_array_interface__ are not converted.

    Raises TypeError for other objects and element types, ValueError for sequences of different
    lengths and for arrays with gaps, OverflowError for numbers that the element type does not hold,
    and as empty() does; CUDAError when the driver fails; the memory is then freed. Safe from every
    thread. Driver: cuMemAllocManaged, cuMemAdvise, cuMemPrefetchAsync, cuMemcpyAsync,
    cuStreamSynchronize.
    """
    same = isinstance(a, ManagedBuffer) and (dtype is None or a.dtype == DType(dtype))
    if same and not copy and name is None and policy is None:
        kept: ManagedBuffer = a
        return kept
    if copy is False:
        raise ValueError(
            "copy=False allows only a ManagedBuffer of the same dtype, without name and policy"
        )
    return _from_any(a, dtype, name, policy)


def empty_like(
    prototype: Any,
    dtype: Any = None,
    *,
    shape: SupportsIndex | Sequence[SupportsIndex] | None = None,
    name: str | None = None,
    policy: MigrationPolicy | None = None,
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
    name, policy
        As for empty().

    Raises TypeError for an object without shape or dtype, and as empty() does. Safe from every
    thread. Driver: cuMemAllocManaged, cuMemAdvise.
    """
    try:
        shape = prototype.shape if shape is None else shape
        dtype = prototype.dtype if dtype is None else dtype
    except AttributeError:
        raise TypeError(
            f"empty_like() needs an object with shape and dtype, got {type(prototype).__name__}"
        ) from None
    return empty(shape, dtype, name=name, policy=policy)
