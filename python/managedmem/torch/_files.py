"""Safetensors files: finds where each tensor lies in a file, and writes files."""

from __future__ import annotations

import ctypes
import json
import math
import os
import secrets
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_LENGTH = struct.Struct("<Q")
_MOST_HEADER = 100_000_000  # bytes, the limit of the format's own reader
_METADATA = "__metadata__"
_INDEX = ".safetensors.index.json"
# The exceptions that json and unexpected contents raise.
_NOT_SO = (KeyError, TypeError, AttributeError, ValueError, RecursionError)
_MOST = (1 << 63) - 1  # the largest size, stride or number of elements in torch
_PIECE = 64 << 20  # bytes that are written at once
_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_DTYPES = {key: getattr(torch, name) for key, name in _NAMES.items() if hasattr(torch, name)}
_KEYS = {dtype: key for key, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    start: int  # the offset of its bytes in the file
    nbytes: int
    file: tuple[int, ...]  # the stamp() of the file


def stamp(file: int) -> tuple[int, ...]:
    """Numbers that differ between two open files, and change when a file is written."""
    status = os.fstat(file)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def entries_of(path: str | os.PathLike[str]) -> dict[str, Entry]:
    """The tensors by name, of a file, an index of files, or a folder that has one of these."""
    chosen = Path(os.fspath(path))
    if not chosen.exists():
        raise FileNotFoundError(
            f"{chosen} is not a file or folder of this machine; for the name of a model on a "
            "hub, huggingface_hub.snapshot_download(name) returns the folder"
        )
    if chosen.is_dir():
        chosen = _file_in(chosen)
    if not chosen.name.endswith(".json"):
        return {entry.name: entry for entry in _read_header(chosen)}
    entries: dict[str, Entry] = {}
    places = _read_index(chosen)
    for name in sorted(set(places.values())):
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise ValueError(f"{chosen} names {name!r}, a file outside of its folder")
        entries |= {entry.name: entry for entry in _read_header(chosen.parent / name)}
    lost = sorted(name for name in places if name not in entries)
    if lost:
        raise ValueError(f"{chosen} names {lost[0]!r}, which {places[lost[0]]} does not have")
    return {name: entries[name] for name in places}


def _file_in(folder: Path) -> Path:
    """The only index in a folder; without an index, the only safetensors file."""
    for ending in (_INDEX, ".safetensors"):
        files = sorted(file for file in folder.iterdir() if file.name.endswith(ending))
        if len(files) == 1:
            return files[0]
        if files:
            names = ", ".join(file.name for file in files[:3])
            raise ValueError(
                f"{folder} has {len(files)} files that may be meant ({names}): name one"
            )
    raise FileNotFoundError(f"{folder} has no file whose name ends in .safetensors")


def _read_index(path: Path) -> dict[str, str]:
    """The name of the file of each tensor, by the name of the tensor."""
    try:
        places = json.loads(path.read_bytes())["weight_map"]
        if all(isinstance(file, str) for file in places.values()):
            return dict(places)
    except _NOT_SO:
        pass
    raise ValueError(f"{path} is not a safetensors index: it has no weight_map of names to files")


def _read_header(path: Path) -> Iterator[Entry]:
    """The tensors of one file; ValueError if it is not a whole file of safetensors."""
    with path.open("rb") as file:
        mark = stamp(file.fileno())
        size = os.fstat(file.fileno()).st_size
        head = file.read(_LENGTH.size)
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else _MOST_HEADER + 1
        if length > min(_MOST_HEADER, size - _LENGTH.size):
            raise ValueError(f"{path} is not a safetensors file, or it was cut off in its header")
        text = file.read(length)
    try:
        header = json.loads(text)
        rows = [(name, *_read_row(row)) for name, row in header.items() if name != _METADATA]
    except _NOT_SO as error:
        raise ValueError(f"{path} has no valid safetensors header: {error}") from None
    used = _check_order(path, rows)
    first = _LENGTH.size + length
    for name, key, shape, begin, end in rows:
        dtype = _DTYPES.get(key)
        if dtype is None:
            raise ValueError(f"{path}: {name!r} has dtype {key}, which this torch does not have")
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(
                f"{path}: {name!r} has {end - begin} bytes for {math.prod(shape)} elements of {key}"
            )
        if first + end > size:
            raise ValueError(
                f"{path} was cut off: {name!r} ends at {first + end:,} of {size:,} bytes"
            )
        yield Entry(name, dtype, shape, path, first + begin, end - begin, mark)
    if first + used < size:
        raise ValueError(f"{path} has {size - first - used:,} bytes behind its last tensor")


def _check_order(path: Path, rows: list[tuple[str, str, tuple[int, ...], int, int]]) -> int:
    """Raise ValueError unless the tensors lie without gaps and overlaps; return the bytes of all.

    If tensors could overlap, a small file could list so many that they take all memory of the host.
    """
    last, before = 0, ""
    for begin, end, name in sorted((row[3], row[4], row[0]) for row in rows if row[4] > row[3]):
        if begin < last:
            raise ValueError(f"{path}: {name!r} and {before!r} overlap, by {last - begin:,} bytes")
        if begin > last:
            raise ValueError(f"{path} has {begin - last:,} bytes of no tensor in front of {name!r}")
        last, before = end, name
    return last


def _read_row(row: Any) -> tuple[str, tuple[int, ...], int, int]:
    shape, (begin, end) = row["shape"], row["data_offsets"]
    numbers = [*shape, begin, end]
    are_counts = all(type(number) is int and 0 <= number <= _MOST for number in numbers)
    if not are_counts or begin > end or math.prod(max(n, 1) for n in shape) > _MOST:
        raise ValueError(f"bad shape {shape} or data_offsets {[begin, end]} of a tensor")
    return str(row["dtype"]), tuple(shape), begin, end


# --- writing ------------------------------------------------------------------------------


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a temporary file beside the path, and rename it to the path when it is complete."""
    if path.exists() and not path.is_file():  # the rename would replace a device or a pipe
        raise ValueError(f"{path} is not a regular file: name a file in a folder")
    header: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    at = 0
    # Tensors with larger elements come first, so that each one is aligned to its elements.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _KEYS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    # The name is random, so that no other thread or program has it, and short, because the path may
    # be nearly as long as the system allows.
    unfinished = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with unfinished.open("xb") as file:
            file.write(_LENGTH.pack(len(text)) + text)
            for tensor in tensors.values():
                for piece in _pieces(tensor):
                    file.write(piece)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor on any device, at most _PIECE of them at a time."""
    flat = tensor.detach().reshape(-1)
    count = max(1, _PIECE // flat.element_size())
    for first in range(0, flat.numel(), count):
        piece = flat[first : first + count].resolve_conj().resolve_neg().cpu().contiguous()
        yield memoryview((ctypes.c_uint8 * piece.nbytes).from_address(piece.data_ptr()))


def check_writable(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor that the format cannot hold."""
    if name == _METADATA:
        raise ValueError(f"a tensor cannot be named {name!r}: the format has text there")
    if tensor.is_meta or tensor.layout is not torch.strided:
        kind = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
        raise ValueError(f"{name!r} is {kind}, which a file of safetensors cannot have")
    if tensor.dtype not in _KEYS:
        raise ValueError(f"{name!r} has {tensor.dtype}, which a file of safetensors cannot have")
