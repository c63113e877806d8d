"""Replaces the hooks of offload() in a copy or a pickle of a module, and does nothing."""

from __future__ import annotations

from collections.abc import Callable


def inert() -> Callable[..., None]:
    return do_nothing


def do_nothing(*arguments: object) -> None:
    """The hook of a copied module or parameter."""
