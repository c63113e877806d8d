"""The processes that ``top`` can show, and their numbers: answers of a server, or mapped memory."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from managedmem._cli.output import program_name
from managedmem._cli.text import printable
from managedmem._cli.top_watch import MappedMoves
from managedmem._top_socket import address_of, peer_of
from managedmem._units import label_text

MANAGED = "/dev/nvidia-uvm"
"""The file whose mappings are managed memory."""
MOST_REASON = 1000
"""A reason from a process is cut to this many characters. A terminal acts on none of them."""
PATIENCE = 10.0
"""Seconds for an answer."""
START = "start it with MANAGEDMEM_TOP=1 in its environment, which `import managedmem` reads"
UNSEEN = (
    f"for moves, faults and names, {START}. Its memory is listed by address, as the system maps it"
)


class SourceError(ValueError):
    """A sentence on a process that cannot be shown, with advice."""


class Ended(Exception):
    """The process has ended, or the thread in it that serves."""


class Source(Protocol):
    """Gives the numbers of a process."""

    def read(self) -> dict[str, Any]:
        """The numbers now, as a server answers. Raises Ended, or SourceError."""

    def close(self) -> None:
        """End the connection."""


def command_of(process: int) -> str:
    """The command line of a process; empty if it cannot be read."""
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            words = file.read().rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    return printable(b" ".join(words).decode(errors="surrogateescape"))


# --- processes that serve -----------------------------------------------------------------


class Served:
    """A process that was started with MANAGEDMEM_TOP=1. Raises OSError for any other."""

    def __init__(self, process: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(PATIENCE)
        try:
            self._socket.connect(address_of(process))
            self._check_peer(process)
        except BaseException:
            self._socket.close()
            raise
        self._process = process

    def close(self) -> None:
        """End the connection. With its last connection, the process ends its recording."""
        self._socket.close()

    def _check_peer(self, process: int) -> None:
        """Check with the kernel who answers, as any process can take the name of the socket.

        The user is that of the time when the socket was opened: root, if the process has changed
        its user since.
        """
        peer, user = peer_of(self._socket)
        if peer != process or user not in (0, owner_of(process)):
            raise SourceError(
                f"the socket of process {process} belongs to process {peer} of user {user}: its "
                "answers would not be those of the process"
            )

    def read(self) -> dict[str, Any]:
        try:
            self._socket.sendall(b"\n")
            line = b""
            while not line.endswith(b"\n") and (more := self._socket.recv(1 << 16)):
                line += more
        except TimeoutError:
            raise SourceError(
                f"process {self._process} has not answered for {PATIENCE:.0f} s: it is stopped, or "
                "keeps the GIL"
            ) from None
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise Ended
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            reason = label_text(answer["error"], MOST_REASON)
            raise SourceError(f"process {self._process} cannot read its memory: {reason}")
        return answer


def serving() -> list[int]:
    """The processes that answer at their sockets and that this user may read, without this one."""
    processes = []
    for process in _of_this_user():
        with contextlib.suppress(OSError, SourceError):
            Served(process).close()
            processes.append(process)
    return processes


# --- mapped memory ------------------------------------------------------------------------


def mapping() -> list[int]:
    """The processes of this user that map managed memory, without this one."""
    processes = []
    for process in _of_this_user():
        with contextlib.suppress(OSError), open(f"/proc/{process}/maps", "rb") as file:
            if f" {MANAGED}\n".encode() in file.read():
                processes.append(process)
    return processes


class Mapped:
    """A process that does not serve: the mappings of the module's file, and the module's events."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._moves: MappedMoves | None = None
        self._unseen: str | None = None

    def watch(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record the events too, if the system lets this user. The rows are the mappings now."""
        try:
            self._moves = MappedMoves(self._process, rows)
        except (OSError, RuntimeError) as error:
            self._unseen = f"{error}: {UNSEEN}"

    def read(self) -> dict[str, Any]:
        try:
            rows = list(self._rows())
        except (FileNotFoundError, ProcessLookupError):
            raise Ended from None
        except PermissionError:
            raise SourceError(
                f"the system does not let this user read the mappings of process {self._process}: "
                f"run {program_name()} top as root, or {START}"
            ) from None
        total = {"nbytes": sum(row["nbytes"] for row in rows), "living": len(rows)}
        head = {"version": 1, "pid": self._process, "time": time.monotonic(), "total": total}
        rows.sort(key=lambda row: -row["nbytes"])
        head |= {"kept": [], "live": rows, "left_out": 0, "moves": None, "reason": self._unseen}
        return {**head, **self._moves.read(rows)} if self._moves is not None else head

    def close(self) -> None:
        """End the recording."""
        if self._moves is not None:
            self._moves.close()

    def _rows(self) -> Iterator[dict[str, Any]]:
        """A row for each mapping; Rss are the bytes in the page tables of the host."""
        row: dict[str, Any] | None = None
        with open(f"/proc/{self._process}/smaps", encoding="utf-8", errors="replace") as file:
            for line in file:
                words = line.split(maxsplit=5)
                if row is not None and words[0] == "Rss:":
                    yield {**row, "on_host": int(words[1]) * 1024}
                    row = None
                elif len(words) == 6 and words[5].rstrip("\n") == MANAGED:
                    start, end = (int(text, 16) for text in words[0].split("-"))
                    row = {"label": f"{start:#x}", "nbytes": end - start, "resource": "mapped"}
                    row |= {"device": None, "address": start, "allocated_at": None}


# --- the choice ---------------------------------------------------------------------------


def owner_of(process: int) -> int | None:
    """The user of a process, None if there is no such process."""
    try:
        return os.stat(f"/proc/{process}").st_uid
    except OSError:
        return None


def _of_this_user() -> Iterator[int]:
    """The processes that this user may read, without this one."""
    for process in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        if process != os.getpid() and os.geteuid() in (0, owner_of(process)):
            yield process


def only_process() -> int:
    """The only process that serves, or else the only one that maps managed memory.

    Raises SourceError for none and for several.
    """
    served = serving()
    processes = served or mapping()
    if len(processes) == 1:
        return processes[0]
    if not processes:
        raise SourceError(
            f"no process of this user serves its numbers, and none maps managed memory: {START}"
        )
    act = "serve their numbers" if served else "map managed memory"
    lines = "".join(
        f"\n  {process}  {label_text(command_of(process), 60)}" for process in processes
    )
    raise SourceError(f"{len(processes)} processes {act}: name one of them{lines}")


def source_of(process: int) -> Source:
    """The numbers of a process. Raises SourceError with the reason if there are none."""
    user = owner_of(process)
    if user is None:
        raise SourceError(f"there is no process {process}")
    if os.geteuid() not in (0, user):
        raise SourceError(
            f"process {process} belongs to user {user}: its user and root can show it, and you are "
            f"user {os.geteuid()}"
        )
    try:
        return Served(process)
    except OSError:
        mapped = Mapped(process)
    try:
        rows = mapped.read()["live"]
    except Ended:
        raise SourceError(f"process {process} has ended") from None
    if not rows:
        raise SourceError(
            f"process {process} neither serves its numbers nor maps managed memory: {START}"
        )
    mapped.watch(rows)
    return mapped
