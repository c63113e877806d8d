"""Imports libraries that the package does not require, with an error that names the extra."""

from __future__ import annotations

from importlib import import_module
from typing import Any


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
