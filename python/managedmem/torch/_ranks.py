"""The ranks of a group of torch.distributed: what they decide together, and the memory of a host.

All ranks make the same collective calls in the same order, whatever fails in one of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from managedmem._managedmem import _Slab

_T = TypeVar("_T")
# In the other ranks, an error of one rank is raised as the first of these classes that fits.
_KINDS = (ValueError, TypeError, MemoryError, FileNotFoundError, OSError, RuntimeError)
_OWNER = "the ranks of a host must run as one user, in one container"


class Alone:
    """This process, as the only rank."""

    index = 0  # among the ranks of this host
    count = 1
    hosts: tuple[int, ...] = (0,)  # for each rank, the first rank of its host

    def agree(self, action: Callable[[], _T]) -> list[_T]:
        """The results of an action in all ranks; an error in one is raised in all."""
        return [action()]

    def host_memory(self, nbytes: int, device: int) -> _Slab:
        """Memory of zeros for the ranks of this host, to be page-locked for the device."""
        return _Slab(device, nbytes, True)


class Ranks(Alone):
    """The ranks of a group. Making it is a collective call, as all methods are."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "there is no process group: call torch.distributed.init_process_group() first"
            )
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("this process is not a rank of the group")
        self._group = group
        names = self.agree(_host)
        self.hosts = tuple(names.index(name) for name in names)
        self.leader = self.hosts[self.rank]
        mine = [other for other, leader in enumerate(self.hosts) if leader == self.leader]
        self.index, self.count = mine.index(self.rank), len(mine)

    def agree(self, action: Callable[[], _T]) -> list[_T]:
        value, error = None, None
        try:
            value = action()
        except BaseException as caught:
            error = caught
        outcomes: list[Any] = [None] * dist.get_world_size(self._group)
        try:
            dist.all_gather_object(outcomes, (value, _told(error)), group=self._group)
            if error is not None:
                raise error
        finally:
            error = None  # its traceback keeps this stack frame
        for rank, (_, failure) in enumerate(outcomes):
            if failure is not None:
                raise _KINDS[failure[0]](f"rank {rank}: {failure[1]}")
        return [value for value, _ in outcomes]

    def host_memory(self, nbytes: int, device: int) -> _Slab:
        made: list[_Slab] = []
        with contextlib.ExitStack() as files:  # until all have mapped it

            def make() -> tuple[int, int, tuple[int, ...]] | None:
                if self.index > 0:
                    return None
                file = _memory_file(nbytes)
                files.callback(os.close, file)
                return os.getpid(), file, _identity(file)

            def map_it() -> None:
                made.append(_mapped(places[self.leader], device))

            places = self.agree(make)
            self.agree(map_it)
        return made[0]


def ranks_of(group: dist.ProcessGroup | None) -> Alone:
    """The ranks of a group, or this process alone without a group."""
    return Alone() if group is None else Ranks(group)


def _told(error: BaseException | None) -> tuple[int, str] | None:
    """An error as another rank raises it."""
    if error is None:
        return None
    kind = next((i for i, kind in enumerate(_KINDS) if isinstance(error, kind)), len(_KINDS) - 1)
    return kind, str(error) or type(error).__name__


def _host() -> tuple[str, ...]:
    """What processes that can map each other's memory have in common."""
    boot = space = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return platform.node(), boot, space, str(os.geteuid())


def _memory_file(nbytes: int) -> int:
    """Memory without a name, which is freed with its last mapping and cannot change its size."""
    file = os.memfd_create("managedmem-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, nbytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(file)
        raise
    return file


def _identity(file: int) -> tuple[int, ...]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino, status.st_size


def _mapped(place: tuple[int, int, tuple[int, ...]] | None, device: int) -> _Slab:
    """Map the memory of the first rank of this host."""
    assert place is not None
    process, number, identity = place
    try:
        file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise OSError(f"no memory of process {process} can be mapped: {error}; {_OWNER}") from None
    try:
        if _identity(file) != identity:
            raise OSError(f"process {process} has no such memory: {_OWNER}")
        return _Slab.of_file(device, file)
    finally:
        os.close(file)
