"""The socket between ``managedmem top`` and a process that it shows: its address and its peer."""

from __future__ import annotations

import socket
import struct

_PEER = struct.Struct("3i")


def address_of(process: int) -> str:
    """The address of the socket of a process, in the abstract namespace: no file is left behind."""
    return f"\0managedmem-top-{process}"


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end, as the kernel knows them."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    process, user, _ = _PEER.unpack(credentials)
    return process, user
