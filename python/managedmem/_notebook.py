"""Finds views of a buffer that IPython keeps in ``Out``, ``_`` and variables.

The extension calls ``hint`` if IPython is loaded and views prevent a ``close()``.
"""

from __future__ import annotations

import sys
from typing import Any

from managedmem._managedmem import ManagedBuffer

MOST_NAMED = 5
"""A message names at most this many views."""


def _address(value: object) -> int:
    """The address of a host view or a tensor; 0 for other objects."""
    if isinstance(value, memoryview):
        # A memoryview has no address of its own, only the object behind it.
        return value.obj.handle if isinstance(value.obj, ManagedBuffer) else _address(value.obj)
    library = type(value).__module__.partition(".")[0]
    if library == "numpy":
        interface = getattr(value, "__array_interface__", None)
        return int(interface["data"][0]) if interface else 0
    if library == "torch" and hasattr(value, "data_ptr"):
        return int(value.data_ptr())
    return 0


def _holders(shell: Any, buffer: ManagedBuffer) -> dict[str, str]:
    """The places where IPython keeps views of the buffer, each with the name that deletes it."""
    start, stop = buffer.handle, buffer.handle + max(buffer.nbytes, 1)
    candidates = [(n, n, v) for n, v in list(shell.user_ns.items()) if not n.startswith("_")]
    results = shell.user_ns.get("Out", {})
    candidates += [(f"Out[{n}]", f"_{n}", v) for n, v in list(results.items())]
    holders, seen = {}, set()
    for place, name, value in candidates:
        if start <= _address(value) < stop and id(value) not in seen:
            seen.add(id(value))
            holders[place] = name
    return holders


def hint(buffer: ManagedBuffer) -> str:
    """The end of the error message, on views that IPython keeps; empty outside IPython."""
    shell = sys.modules["IPython"].get_ipython()
    if shell is None:
        return ""
    holders = _holders(shell, buffer)
    if not holders:
        return (
            ". IPython keeps the results of cells in Out, _, __ and ___: `%xdel _N` deletes Out[N] "
            "everywhere, `del` does not"
        )
    more = f" and {len(holders) - MOST_NAMED} more" if len(holders) > MOST_NAMED else ""
    names = list(holders)[:MOST_NAMED]
    commands = ", ".join(f"`%xdel {holders[name]}`" for name in names)
    return (
        f". IPython keeps views in {', '.join(names)}{more}: {commands} deletes them everywhere, "
        "in Out and _ too; `del` does not"
    )
