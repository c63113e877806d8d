"""Serves the numbers of this process to ``managedmem top``, on a Unix socket for its user.

The package imports this module only with MANAGEDMEM_TOP=1: without the variable there is no thread
and no socket. Each line from a client is a request, and gets a line of JSON as its answer.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import selectors
import signal
import socket
import threading
import time
import tracemalloc
import warnings
from contextlib import nullcontext, suppress
from typing import Any

from managedmem import _trace
from managedmem._interpreter import is_main
from managedmem._managedmem import Device
from managedmem._memory_stats import LiveMemory, live, memory_stats
from managedmem._top_moves import Moves
from managedmem._top_socket import address_of, peer_of

VARIABLE = "MANAGEDMEM_TOP"
_MOST_ROWS = 1000
_PATIENCE = 2.0
"""Seconds for a client to take an answer; other clients wait meanwhile."""
_PAUSE = 0.1
"""Seconds between attempts to take a client while the system refuses."""
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
"""Errors of accept() that pass, such as those of a process that has opened too many files."""


# --- the numbers --------------------------------------------------------------------------


def _ordinal(device: Device | None) -> int | None:
    return None if device is None else device.device_id


class Numbers:
    """The answer to a request."""

    def __init__(self) -> None:
        self.moves = Moves()
        self._sites: dict[int, str | None] = {}

    def read(self) -> dict[str, Any]:
        """The memory of this package and its moves, for JSON, or the error of the driver."""
        head = {"version": 1, "pid": os.getpid(), "time": time.monotonic()}
        try:
            stats, memories = memory_stats(), live()
        except Exception as error:  # goes into the answer, because the thread must live on
            return {**head, "error": " ".join(f"{type(error).__name__}: {error}".split())}
        kept = [{"device": _ordinal(d), **each._asdict()} for d, each in stats.kept.items()]
        return {
            **head,
            "total": stats.total._asdict(),
            "kept": kept,
            "live": self._rows(memories[:_MOST_ROWS]),
            "left_out": len(memories[_MOST_ROWS:]),
            **self.moves.read(),
        }

    def _rows(self, memories: list[LiveMemory]) -> list[dict[str, Any]]:
        self._find_sites(memories)
        return [
            {
                "label": memory.label,
                "nbytes": memory.nbytes,
                "resource": memory.resource,
                "device": _ordinal(memory.device),
                "address": memory.address,
                "allocated_at": self._sites.get(memory.serial),
            }
            for memory in memories
        ]

    def _find_sites(self, memories: list[LiveMemory]) -> None:
        """Find the line that allocated each memory, once for each, if tracemalloc runs."""
        if not tracemalloc.is_tracing() or all(memory.serial in self._sites for memory in memories):
            return
        try:
            tracebacks = {memory.serial: memory.traceback for memory in live(tracebacks=True)}
        except RuntimeError:  # tracemalloc has ended meanwhile
            return
        self._sites = {n: str(frames[-1]) if frames else None for n, frames in tracebacks.items()}


# --- the server ---------------------------------------------------------------------------


def _file_of(connection: socket.socket) -> tuple[int, int]:
    status = os.fstat(connection.fileno())
    return status.st_dev, status.st_ino


class Server:
    """A socket, and a daemon thread that answers its clients."""

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._numbers = Numbers()
        self._clients: list[socket.socket] = []
        self._files = {self._listener: _file_of(self._listener)}
        self._is_stopped = False
        self._thread = threading.Thread(target=self._serve, name="managedmem-top", daemon=True)
        try:
            self._listener.bind(address_of(os.getpid()))
            self._listener.listen()
            _trace.before_start = self._numbers.moves
            self._thread.start()
        except (OSError, RuntimeError):  # RuntimeError: no thread can start
            self._listener.close()
            raise

    def _serve(self) -> None:
        # The program's threads get the signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        with selectors.PollSelector() as selector:  # without a file that a child would inherit
            selector.register(self._listener, selectors.EVENT_READ)
            try:
                while self._serve_once(selector):
                    pass
            finally:
                self.abandon()
                self._numbers.moves.end()

    def _serve_once(self, selector: selectors.BaseSelector) -> bool:
        """Wait for clients and serve each that has come; False at the end."""
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            if not self._is_open(self._listener):
                return False
            if key.fileobj is self._listener:
                if not self._accept(selector):
                    return False
            elif not self._is_open(key.fileobj) or not self._answer(key.fileobj):
                self._drop(key.fileobj, selector)
        return True

    def _accept(self, selector: selectors.BaseSelector) -> bool:
        """Take a client of this user, or of root; False at the end."""
        try:
            client, _ = self._listener.accept()
        except OSError as error:
            if self._is_stopped or error.errno not in _PASSING:
                return False
            time.sleep(_PAUSE)
            return True
        if peer_of(client)[1] not in (0, os.geteuid()):
            client.close()
            return True
        client.settimeout(_PATIENCE)
        self._files[client] = _file_of(client)
        self._clients.append(client)
        selector.register(client, selectors.EVENT_READ)
        return True

    def _answer(self, client: socket.socket) -> bool:
        """Answer the requests that have come; False if the client has gone, or does not read."""
        try:
            requests = client.recv(64).count(b"\n")
            for _ in range(requests):
                client.sendall(json.dumps(self._numbers.read()).encode() + b"\n")
        except OSError:
            return False
        return requests > 0

    def _drop(self, client: socket.socket, selector: selectors.BaseSelector) -> None:
        selector.unregister(client)
        self._clients.remove(client)
        self._close(client)
        del self._files[client]
        if not self._clients:
            self._numbers.moves.end()

    def abandon(self) -> None:
        """Close the sockets, at the end or, in a forked child, those of the parent."""
        for connection in (self._listener, *self._clients):
            self._close(connection)

    def _is_open(self, connection: socket.socket) -> bool:
        """False if the program has closed the file, as daemons do: another may have its number."""
        with suppress(OSError):
            return _file_of(connection) == self._files.get(connection)
        return False

    def _close(self, connection: socket.socket) -> None:
        if self._is_open(connection):
            connection.close()
        else:
            connection.detach()

    def stop(self) -> None:
        """End the thread, while the driver is still usable."""
        self._is_stopped = True
        if not self._is_open(self._listener):  # nothing wakes a thread that waits for a closed file
            self._numbers.moves.end()
            self.abandon()
            return
        with suppress(OSError):  # the thread has ended meanwhile
            self._listener.shutdown(socket.SHUT_RDWR)  # accept() fails
        self._thread.join(_PATIENCE)


_server: Server | None = None


def _start() -> None:
    global _server  # noqa: PLW0603
    try:
        _server = Server()
    except (OSError, RuntimeError) as error:
        text = f"{VARIABLE}=1: managedmem top cannot show this process: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _start_again() -> None:
    """In a forked child: serve its numbers in place of the parent's."""
    global _server
    if _server is not None:
        _server.abandon()
        _server, _trace.before_start = None, nullcontext()  # the parent may have held the lock
        _start()


def _stop() -> None:
    if _server is not None:
        _server.stop()


if (_value := os.environ[VARIABLE]) != "1":
    raise ValueError(f'{VARIABLE} must be "0" or "1", got "{_value}"')
if is_main():
    _start()
    os.register_at_fork(after_in_child=_start_again)
    atexit.register(_stop)
