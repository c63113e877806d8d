"""The modules that share one budget, as one module for the walks over them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping

from torch import nn


class Together(nn.Module):
    """Modules by name. It is never called, and nothing keeps it after offload()."""

    def __init__(self, kind: str, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.kind = kind  # of the object that had them
        self._modules.update(modules)  # add_module() refuses names of its own methods


def as_one(models: object) -> nn.Module:
    """A module, or a Together of the modules in a pipeline, a mapping or an iterable.

    Raises TypeError for anything else, and ValueError for names that no submodule can have.
    """
    if isinstance(models, nn.Module):
        return models
    kind = type(models).__name__
    parts = getattr(models, "components", None)
    if isinstance(parts, Mapping):  # of a pipeline, which has tokenizers and schedulers too
        modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    elif isinstance(models, Mapping):
        modules = dict(models)
    elif isinstance(models, Iterable) and not isinstance(models, str | bytes):
        modules = {str(i): module for i, module in enumerate(models)}
    else:
        raise TypeError(
            "model must be a torch.nn.Module, several in a list or a dict, or a pipeline with "
            f"components, got {kind}"
        )
    for name, module in modules.items():
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"model[{name!r}] must be a torch.nn.Module, got {type(module).__name__}"
            )
        if not isinstance(name, str) or not name or "." in name:
            raise ValueError(f"model has the name {name!r}: use a word without a dot")
    if not modules:
        raise ValueError(f"model ({kind}) has no modules")
    return Together(kind, modules)


class Members:
    """Weak references to a module, or to the modules of a Together."""

    def __init__(self, model: nn.Module) -> None:
        self._kind = model.kind if isinstance(model, Together) else None
        members = dict(model.named_children()) if self._kind else {"": model}
        self._members = {name: weakref.ref(module) for name, module in members.items()}

    def again(self) -> nn.Module | None:
        """The module, or a Together of the modules that are alive; None if none is."""
        alive = {name: m for name, ref in self._members.items() if (m := ref()) is not None}
        return Together(self._kind, alive) if self._kind and alive else alive.get("")


def kind_of(model: nn.Module) -> str:
    """The class of what was given to offload()."""
    return model.kind if isinstance(model, Together) else type(model).__name__


def roots_of(model: nn.Module) -> Iterator[nn.Module]:
    """The modules whose calls count as calls of the model."""
    if isinstance(model, Together):
        yield from model.children()
    else:
        yield model
