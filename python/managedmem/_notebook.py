"""What IPython keeps: the values of cells in ``Out`` and ``_``, which may be views of a buffer.

The extension asks for ``hint`` when ``close()`` is refused because views live, and IPython is
loaded.
"""

from __future__ import annotations

import sys
from typing import Any

from managedmem import ManagedBuffer

MOST_NAMED = 5
"""More names than this make a message that nobody reads."""


def _address(value: object) -> int:
    """Where the memory of a host view or a tensor begins; 0 for what is neither."""
    if isinstance(value, memoryview):
        # NumPy and torch say their address, a memoryview only what it is of.
        return value.obj.handle if isinstance(value.obj, ManagedBuffer) else _address(value.obj)
    library = type(value).__module__.partition(".")[0]
    if library == "numpy":
        interface = getattr(value, "__array_interface__", None)
        return int(interface["data"][0]) if interface else 0
    if library == "torch" and hasattr(value, "data_ptr"):
        return int(value.data_ptr())
    return 0


def _holders(shell: Any, buffer: ManagedBuffer) -> dict[str, str]:
    """Where IPython has views of the buffer, each view once, and the name that deletes it."""
    start, stop = buffer.handle, buffer.handle + max(buffer.nbytes, 1)
    places = [(n, n, v) for n, v in list(shell.user_ns.items()) if not n.startswith("_")]
    results = shell.user_ns.get("Out", {})
    places += [(f"Out[{n}]", f"_{n}", v) for n, v in list(results.items())]
    found, seen = {}, set()
    for place, name, value in places:
        if start <= _address(value) < stop and id(value) not in seen:
            seen.add(id(value))
            found[place] = name
    return found


def hint(buffer: ManagedBuffer) -> str:
    """What to do about views that IPython keeps, to follow the message; empty outside IPython."""
    shell = sys.modules["IPython"].get_ipython()
    if shell is None:
        return ""
    found = _holders(shell, buffer)
    if not found:
        return (
            ". IPython keeps what cells returned, in Out, _, __ and ___: `%xdel _N` lets go of "
            "Out[N] everywhere, which `del` does not"
        )
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    names = list(found)[:MOST_NAMED]
    commands = ", ".join(f"`%xdel {found[name]}`" for name in names)
    return (
        f". IPython has views in {', '.join(names)}{more}: {commands} lets go of them everywhere, "
        "in Out and _ too, which `del` does not"
    )
