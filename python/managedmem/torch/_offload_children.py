"""Submodules and parameters that offload() cannot stream: refused by name before anything moves.

Owns the walk over the modules, and the list of the memory that offloaded models hold.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from managedmem.torch._offload_compiled import (
    compiles_again,
    is_compiled,
    is_compiled_in_place,
)
from managedmem.torch._offload_together import kind_of
from managedmem.torch._tensors import Found

_WRAPPERS = {"DataParallel", "DistributedDataParallel"}
_SHARDED = {"FullyShardedDataParallel", "FSDPModule"}


# --- submodules ---------------------------------------------------------------------------


def check_children(model: nn.Module) -> None:
    """Raise TypeError for the first module of the model that cannot be streamed."""
    if is_compiled(model):
        raise TypeError(
            "model is compiled by torch.compile already: call offload() on the module first, then "
            "compile it"
        )
    for name, module in model.named_modules():
        subject = repr(name) if name else "model"
        kinds = [kind.__name__ for kind in type(module).__mro__]
        for kind in _WRAPPERS.intersection(kinds):
            raise TypeError(
                f"{subject} is wrapped in {kind}, which keeps the addresses of parameters: call "
                "offload() on the module inside first, then wrap it"
            )
        for kind in _SHARDED.intersection(kinds):
            raise TypeError(
                f"{subject} is sharded by {kind}, which gathers parameters into memory of its own: "
                "offload_optimizer() keeps the state of its optimizer at home; offload() is for "
                "modules that are not sharded"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{subject} is a {kinds[0]}, whose calls no hook sees: offload the plain module"
            )
        if (is_compiled(module) or is_compiled_in_place(module)) and not compiles_again():
            raise TypeError(
                f"{subject} is compiled by torch.compile already, and this torch cannot compile it "
                "again: call offload() first, then compile"
            )
        for key, value in vars(module).items():
            if isinstance(value, torch.ScriptObject):
                raise TypeError(
                    f"{subject} ({kinds[0]}) is quantized: its weights are packed in {key!r}, "
                    "which is not a tensor. Offload the module before it is quantized"
                )


# --- parameters of other models -----------------------------------------------------------


class Claim:
    """The memory of one offloaded model, for as long as its handle keeps this object."""

    def __init__(self, model: str, tensors: Found, read_only: bool) -> None:
        self.model = model
        self.read_only = read_only
        self.names = {place: name for name, t in tensors if (place := _place(t))}
        self.storages = {t.untyped_storage()._cdata for _, t in tensors}
        with _lock:
            _claims.add(self)


_claims: weakref.WeakSet[Claim] = weakref.WeakSet()
_lock = threading.RLock()  # a collection while it is held may call remove()


def check_claims(
    model: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    own: Claim | None = None,
    read_only: bool = False,
) -> None:
    """Raise ValueError for the first parameter that another offloaded model holds.

    Models that are only read may share memory, if each has storages of its own over it.
    """
    for name, tensor in tensors:
        if (holder := holder_of(tensor, own, read_only)) is not None:
            other, kind = holder
            raise ValueError(
                f"{name!r} of the model ({kind_of(model)}) is in the memory of {other!r} "
                f"of another offloaded model ({kind}): call remove() on its handle first, or give "
                "one of them a copy of the parameter"
            )


def holder_of(
    tensor: Tensor, but: Claim | None = None, read_only: bool = False
) -> tuple[str, str] | None:
    """The offloaded parameter in whose memory a tensor is, and the class of its model; or None."""
    with _lock:
        claims = [claim for claim in _claims if claim is not but]
    place, storage = _place(tensor), tensor.untyped_storage()._cdata
    if read_only:
        claims = [claim for claim in claims if not claim.read_only or storage in claim.storages]
    return next(((c.names[place], c.model) for c in claims if place in c.names), None)


def _place(tensor: Tensor) -> int:
    """The address of a tensor's storage; 0 without memory."""
    return tensor.untyped_storage().data_ptr()
