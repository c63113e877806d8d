"""Imports libraries that the package does not require, with an error that names the extra."""

from __future__ import annotations

from importlib import import_module
from typing import Any

NAMES = {"matplotlib.pyplot": "matplotlib", "pandas": "pandas", "numpy": "NumPy"}


def need(module: str, user: str) -> Any:
    """Import a module of the extra ``plot`` for a function that uses it."""
    library = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        raise ImportError(
            f'{user} needs {NAMES[module]}, which is not installed: pip install "managedmem[plot]"',
            name=library,
        ) from None
