"""Libraries that the package does not require: imports, and errors that say what to install."""

from __future__ import annotations

from importlib import import_module
from typing import Any

CUPY = "CuPy, which is not installed: pip install cupy-cuda13x, or the one for your CUDA version"


def need(module: str, user: str) -> Any:
    """Import a library of the extra ``plot``, or a module of it, for a function that uses it."""
    library = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        raise ImportError(
            f'{user} needs {library}, which is not installed: pip install "managedmem[plot]"',
            name=library,
        ) from None
