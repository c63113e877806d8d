"""The output of the commands: the name that was typed, readers that stop, progress."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import TextIO


def program_name() -> str:
    """The program as it was typed, for usage lines: the console command, or Python with -m."""
    name = os.path.basename(sys.argv[0])
    return name if name == "managedmem" else "python -m managedmem"


def write_to_nothing(stream: TextIO) -> None:
    """Let a stream without a reader write to /dev/null, as Python flushes it once more at exit."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)


def flushed(stream: TextIO) -> bool:
    """Flush a stream; False if its reader, such as head, has read enough."""
    try:
        stream.flush()
    except BrokenPipeError:
        write_to_nothing(stream)
        return False
    return True


@contextlib.contextmanager
def readers_may_stop() -> Iterator[None]:
    """End the process silently with status 1 when the reader of stdout has read enough.

    A stdout that the shell has closed counts as one without a reader.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        write_to_nothing(sys.stdout)
        raise SystemExit(1) from None


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """Show a line on stderr, if that is a terminal, while the block takes longer than a second."""
    if not sys.stderr.isatty():
        yield
        return
    done, shown = threading.Event(), threading.Event()

    def show() -> None:
        if not done.wait(1.0):
            shown.set()
            print(f"{text} ...", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if shown.is_set():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
