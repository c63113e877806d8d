"""Reads weights from files straight into memory from which offload() streams, and writes files."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from managedmem import Device
from managedmem._limits import host_available
from managedmem._managedmem import _Slab
from managedmem.torch._files import Entry, check_writable, entries_of, stamp, write
from managedmem.torch._offload_arguments import target_of
from managedmem.torch._offload_frames import Span
from managedmem.torch._offload_places import ALIGNMENT
from managedmem.torch._ranks import Alone, ranks_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_Path: TypeAlias = "str | os.PathLike[str]"
_Device: TypeAlias = "Device | torch.device | str | int"
_PIECE = 16 << 20  # bytes that a thread reads at once
_THREADS = 16
_SHOWN = 3  # names in an error


def load_file(
    path: _Path,
    *,
    device: _Device | None = None,
    dtype: torch.dtype | None = None,
    group: ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Read safetensors files into page-locked memory of the host, from which offload() can stream.

    Parameters
    ----------
    path : str or path-like
        A file, an index of several files (``model.safetensors.index.json``), or a folder that has
        one of these.
    device : Device, torch.device, str or int, optional
        The GPU that will use them; by default the current one.
    dtype : torch.dtype, optional
        A floating-point dtype for all floating-point tensors; by default they keep their own.
    group : torch.distributed.ProcessGroup, optional
        Ranks that must all make this call, such as ``torch.distributed.group.WORLD``. The ranks of
        one host read the files together into memory that they share, as after share_memory(). An
        error in one rank is raised in all ranks; ValueError if they name different files or dtypes.
        By default this process reads alone.

    Threads read the files into one piece of memory of the tensors' size, without a second copy.
    Returns CPU tensors by name. The memory is freed with the last of them. If a module has these
    tensors, offload() streams a block whose tensors lie together where it is, without a copy.
    load_model() places them together.

    Raises ValueError for a file that is not a safetensors file, is cut off, is replaced meanwhile,
    or has a dtype that this torch lacks, and for an index that names a file outside of its folder,
    FileNotFoundError without the file, TypeError for other arguments, MemoryError if the host has
    no room, and CUDAError if the driver does not lock the memory. Safe from every thread. Driver:
    cuMemHostRegister.
    """

    def check() -> _Wanted:
        _check_dtype(dtype)
        return _Wanted(list(entries_of(path).values()), dtype, _device_of(device))

    ranks = ranks_of(group)
    return _read(_checked(ranks, check), ranks)


def load_model(
    model: nn.Module,
    path: _Path,
    *,
    device: _Device | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    group: ProcessGroup | None = None,
) -> tuple[list[str], list[str]]:
    """Give a module the tensors of a file, as load_file() reads them.

    Parameters
    ----------
    model : torch.nn.Module
        The module. Its parameters may be on the meta device, where they take no memory.
    path, device, dtype, group
        As for load_file(). The models of all ranks must need the same tensors.
    strict : bool
        False allows a file that lacks tensors of the model, or has further tensors.

    The tensors lie in the order of the modules, so that offload() streams them where they lie.
    Parameters that are tied before the call stay tied, also on the meta device; the file needs only
    one of their names. The module's load_state_dict() takes the tensors with assign=True:
    parameters are new objects, so make the optimizer afterwards.

    Returns the names that the file lacks, and those that the model lacks. Raises RuntimeError for
    names that one of them lacks if strict is true, and for shapes that differ, ValueError for a
    buffer on the meta device that is not persistent, because files lack it, and what load_file()
    raises; the module is unchanged then. No other thread may use the module during the call.
    Driver: cuMemHostRegister.
    """
    named: list[_Named] = []

    def check() -> _Wanted:
        _check_dtype(dtype)
        entries = entries_of(path)
        named.append(_named(model, entries, strict))
        names = [name for name in named[0].sources.values() if name is not None]
        if group is not None:  # shared memory has all parameters first, then the buffers
            state = named[0].state
            names.sort(key=lambda name: not isinstance(state[name], nn.Parameter))
        return _Wanted([entries[name] for name in names], dtype, _device_of(device))

    ranks = ranks_of(group)
    tensors = _read(_checked(ranks, check), ranks)
    return _assign(model, named[0], tensors)


def save_file(
    tensors: nn.Module | Mapping[str, Tensor],
    path: _Path,
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the tensors of a module, or named tensors, to a file of safetensors.

    Parameters
    ----------
    tensors : torch.nn.Module or mapping of names to tensors
        A module stands for its state_dict(). It may be offloaded: each tensor is read where it is,
        64 MiB at a time.
    path : str or path-like
        The file. It appears when it is complete; an older file of this name stays until then.
        ValueError if the path is no regular file, but for instance a folder or a pipe.
    metadata : mapping of str to str, optional
        Text for the file's header, such as ``{"format": "pt"}``, which Transformers expects.

    Tied parameters are in the file once, under their first name. Raises TypeError and ValueError
    for what a file cannot hold, before anything is written, and OSError if the file cannot be
    written. Nothing may write the tensors during the call. Driver: cuMemcpyDtoHAsync, by torch.
    """
    if isinstance(tensors, nn.Module):
        tensors = {
            name: value
            for name, value in tensors.state_dict(keep_vars=True).items()
            if isinstance(value, Tensor)
        }
    elif not isinstance(tensors, Mapping):
        raise TypeError(f"tensors must be a module or a mapping, got {type(tensors).__name__}")
    texts = {} if metadata is None else dict(metadata)
    if not all(isinstance(text, str) for item in texts.items() for text in item):
        raise TypeError(f"metadata must map str to str, got {metadata!r}")
    distinct: dict[int, tuple[str, Tensor]] = {}
    for name, value in tensors.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise TypeError(f"tensors must have tensors by name, got {name!r}: {value!r}")
        check_writable(name, value)
        distinct.setdefault(id(value), (name, value))
    write(Path(os.fspath(path)), dict(distinct.values()), texts)


# --- what is loaded -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Tensors of files, and how they are read."""

    entries: list[Entry]
    dtype: torch.dtype | None
    device: int

    def description(self) -> tuple[list[object], list[object]]:
        """What must be equal in all ranks, and what must be equal in the ranks of one host."""
        rows: list[object] = [(e.name, e.dtype, e.shape, e.start, e.nbytes) for e in self.entries]
        return [*rows, self.dtype], [entry.file for entry in self.entries]


@dataclass(frozen=True, slots=True)
class _Named:
    """The tensors of a model, and the name that each has in the files."""

    state: dict[str, Tensor]
    tied: dict[int, list[str]]  # the names of each tensor, by its id
    sources: dict[int, str | None]
    missing: list[str]
    unexpected: list[str]


def _named(model: nn.Module, entries: Mapping[str, Entry], strict: bool) -> _Named:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(strict, bool):
        raise TypeError(f"strict must be True or False, got {strict!r}")
    state = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }
    tied: dict[int, list[str]] = {}
    for name, value in state.items():
        tied.setdefault(id(value), []).append(name)
    sources = {key: next((n for n in names if n in entries), None) for key, names in tied.items()}
    missing = [tied[key][0] for key, source in sources.items() if source is None]
    unexpected = [name for name in entries if name not in state]
    if strict:
        _check_names(model, missing, unexpected)
    _check_shapes({n: state[n] for n in sources.values() if n is not None}, entries)
    _check_buffers(model, state)
    return _Named(state, tied, sources, missing, unexpected)


def _assign(
    model: nn.Module, named: _Named, tensors: Mapping[str, Tensor]
) -> tuple[list[str], list[str]]:
    assigned: dict[str, Tensor] = {}
    for key, source in named.sources.items():
        if source is not None:
            loaded = tensors[source]
            if isinstance(named.state[source], nn.Parameter):
                loaded = nn.Parameter(loaded, requires_grad=named.state[source].requires_grad)
            assigned |= dict.fromkeys(named.tied[key], loaded)
    model.load_state_dict(assigned, strict=False, assign=True)
    return named.missing, named.unexpected


def _checked(ranks: Alone, check: Callable[[], _Wanted]) -> _Wanted:
    """The result of a check. Raise ValueError in all ranks if it differs between them."""
    mine: list[_Wanted] = []

    def describe() -> tuple[list[object], list[object]]:
        mine.append(check())
        return mine[0].description()

    every = ranks.agree(describe)
    for rank, (common, files) in enumerate(every):
        first = ranks.hosts[rank]
        if common != every[0][0]:
            raise ValueError(f"rank {rank} loads other tensors than rank 0, or another dtype")
        if files != every[first][1]:
            raise ValueError(f"rank {rank} loads other files than rank {first}")
    return mine[0]


# --- checks -------------------------------------------------------------------------------


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point torch.dtype or None, got {dtype!r}")


def _device_of(device: _Device | None) -> int:
    return target_of("cuda" if device is None else device).device.device_id


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


def _check_names(model: nn.Module, missing: list[str], unexpected: list[str]) -> None:
    problems = [f"the file lacks {_some(missing)}"] if missing else []
    problems += [f"the model lacks {_some(unexpected)}"] if unexpected else []
    if not problems:
        return
    advice = "strict=False ignores it"
    if missing and callable(getattr(model, "tie_weights", None)):
        advice = f"If it is tied, call model.tie_weights() before load_model(); {advice}"
    raise RuntimeError(f"load_model(): {'; '.join(problems)}. {advice}")


def _check_shapes(wanted: Mapping[str, Tensor], entries: Mapping[str, Entry]) -> None:
    for name, tensor in wanted.items():
        if tuple(tensor.shape) != entries[name].shape:
            raise RuntimeError(
                f"load_model(): {name!r} has shape {tuple(tensor.shape)} in the model and "
                f"{entries[name].shape} in the file"
            )


def _check_buffers(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in state:
            raise ValueError(
                f"load_model(): the buffer {name!r} is on the meta device, and files have only "
                "persistent buffers: put only the parameters on the meta device, as "
                "accelerate.init_empty_weights(include_buffers=False) does"
            )


# --- reading ------------------------------------------------------------------------------


def _read(wanted: _Wanted, ranks: Alone) -> dict[str, Tensor]:
    """Read the tensors into one piece of memory, in the order of the entries."""
    entries, dtypes = wanted.entries, [_dtype_of(e, wanted.dtype) for e in wanted.entries]
    offsets: list[int] = []
    used = 0
    for entry, dtype in zip(entries, dtypes, strict=True):
        offsets.append(used)
        size = entry.nbytes // entry.dtype.itemsize * dtype.itemsize
        used += -(-size // ALIGNMENT) * ALIGNMENT
    if not used:
        return {e.name: torch.empty(e.shape, dtype=d) for e, d in zip(entries, dtypes, strict=True)}
    ranks.agree(lambda: check_room(used))
    slab = ranks.host_memory(used, wanted.device)
    tensors: list[Tensor] = []

    def fill() -> None:
        places = zip(entries, offsets, dtypes, strict=True)
        tensors.extend(tensor_at(slab, at, entry.shape, dtype) for entry, at, dtype in places)
        _fill(entries, tensors, ranks)

    ranks.agree(fill)
    ranks.agree(slab.lock)
    return {entry.name: tensor for entry, tensor in zip(entries, tensors, strict=True)}


def check_room(nbytes: int) -> None:
    """Raise MemoryError if the host has no room for the tensors."""
    available = host_available()
    if available is not None and nbytes > available:
        raise MemoryError(
            f"the tensors take {nbytes:,} bytes of host memory, and {available:,} are available"
        )


def _dtype_of(entry: Entry, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype


def tensor_at(
    slab: _Slab,
    offset: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    """A dense tensor in the slab, with a storage of its own, which keeps the slab."""
    tensor = torch.empty(0, dtype=dtype)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if nbytes == 0:
        return tensor.reshape(shape)
    base = Span(slab, offset, nbytes).tensor(torch.device("cpu"))
    if strides is None:
        strides = torch.empty(shape, dtype=dtype, device="meta").stride()
    return tensor.set_(base.untyped_storage(), 0, shape, strides)


def _fill(entries: Iterable[Entry], tensors: Iterable[Tensor], ranks: Alone) -> None:
    """Read this rank's pieces of the files in threads, because one reads at a third of the rate."""
    threads = min(_THREADS, max(1, (os.cpu_count() or 1) // ranks.count))
    with ExitStack() as stack, ThreadPoolExecutor(threads) as pool:
        files: dict[Path, int] = {}
        jobs = []
        for entry, tensor in zip(entries, tensors, strict=True):
            if entry.path not in files:
                files[entry.path] = stack.enter_context(entry.path.open("rb")).fileno()
                if stamp(files[entry.path]) != entry.file:
                    raise ValueError(f"{entry.path} was replaced while it was read: load it again")
            for first in range(0, entry.nbytes, _PIECE):
                size = min(_PIECE, entry.nbytes - first)
                jobs.append((files[entry.path], entry, first, size, tensor))
        mine = jobs[ranks.index :: ranks.count]
        for _ in pool.map(lambda job: _read_piece(*job), mine):
            pass


def _read_piece(file: int, entry: Entry, first: int, size: int, tensor: Tensor) -> None:
    """Read some bytes of a tensor, and convert them if it has another dtype."""
    if tensor.dtype == entry.dtype:
        _read_bytes(file, entry, first, size, tensor.data_ptr() + first)
        return
    piece = torch.empty(size // entry.dtype.itemsize, dtype=entry.dtype)
    _read_bytes(file, entry, first, size, piece.data_ptr())
    begin = first // entry.dtype.itemsize
    tensor.view(-1)[begin : begin + piece.numel()].copy_(piece)


def _read_bytes(file: int, entry: Entry, first: int, size: int, address: int) -> None:
    memory = memoryview((ctypes.c_uint8 * size).from_address(address))
    done = 0
    while done < size:
        count = os.preadv(file, [memory[done:]], entry.start + first + done)
        if count == 0:
            raise ValueError(f"{entry.path} was cut off while {entry.name!r} was read")
        done += count
