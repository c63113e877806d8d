"""Mounts that a program of a test sees alone, in namespaces of its own."""

import ctypes

NAMESPACES = 0x10020000  # of a user, and of mounts
PRIVATE, BIND = 1 << 18 | 1 << 14, 1 << 12


def mount_alone(source, target, kind=None, flags=0):
    """Mount it, in namespaces of its own. Where that is not allowed, say so and end the program."""
    libc = ctypes.CDLL(None)
    if (
        libc.unshare(NAMESPACES) != 0
        or libc.mount(b"none", b"/", None, PRIVATE, None) != 0
        or libc.mount(source, target, kind, flags, None) != 0
    ):
        print("no namespaces")
        raise SystemExit


def hide_proc():
    mount_alone(b"none", b"/proc", b"tmpfs")
