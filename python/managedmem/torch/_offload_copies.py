"""What copies and pickles of a module have in place of hooks, handles and sliced parameters."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, cast

import torch
from torch import Tensor, nn


def inert() -> Callable[..., None]:
    return do_nothing


def do_nothing(*arguments: object) -> None:
    """The hook of a copied module or parameter."""


def plain_copy(parameter: Tensor, memo: dict[int, Any]) -> nn.Parameter:
    """A deep copy, as an nn.Parameter, of a parameter whose class was changed for a call."""
    if id(parameter) not in memo:
        copied = parameter.detach().clone(memory_format=torch.preserve_format)
        memo[id(parameter)] = nn.Parameter(copied, parameter.requires_grad)
    return cast(nn.Parameter, memo[id(parameter)])


class Handle:
    """A context manager that a module or optimizer keeps. Their copies and pickles have None."""

    def _remove(self) -> None:
        raise NotImplementedError

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._remove()
