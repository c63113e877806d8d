"""The arguments of offload(): checks them, and finds the tensors and the devices that they name."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn

import managedmem
from managedmem import Device
from managedmem.torch._moving import _check_movable
from managedmem.torch._offload_choice import Place
from managedmem.torch._offload_optimizer import innermost
from managedmem.torch._offload_places import Target
from managedmem.torch._offload_plan import is_called
from managedmem.torch._offload_together import kind_of
from managedmem.torch._tensors import Found


def asked_places(model: nn.Module, places: object) -> dict[int, Place]:
    """The requested places of tensors, by id; the most specific name wins."""
    if places is None:
        return {}
    if not isinstance(places, Mapping):
        raise TypeError(f"places must be a mapping of names to places, got {places!r}")
    modules = dict(model.named_modules())
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    asked: dict[int, Place] = {}
    for name, place in sorted(places.items(), key=lambda item: str(item[0]).count(".")):
        if place not in get_args(Place):
            wanted = ", ".join(map(repr, get_args(Place)))
            raise ValueError(f"places[{name!r}] must be one of {wanted}, got {place!r}")
        if name in tensors:
            asked[id(tensors[name])] = place
        elif name in modules:
            for tensor in (*modules[name].parameters(), *modules[name].buffers()):
                asked[id(tensor)] = place
        else:
            raise ValueError(
                f"places has {name!r}, which is not a submodule or tensor of the model"
            )
    return asked


def chosen_blocks(model: nn.Module, blocks: Iterable[str | nn.Module] | None) -> dict[int, str]:
    """The names of the submodules that the caller wants as blocks, by their ids."""
    if blocks is None:
        return {}
    if isinstance(blocks, str) or (
        isinstance(blocks, nn.Module) and not isinstance(blocks, Iterable)
    ):
        blocks = [blocks]
    if isinstance(blocks, nn.ModuleDict):  # its iterator gives keys
        blocks = blocks.values()
    if not isinstance(blocks, Iterable):
        kind = type(blocks).__name__
        raise TypeError(
            f"blocks must be an iterable of names or modules, got the {kind} {blocks!r}"
        )
    modules = dict(model.named_modules())
    names = {id(module): name for name, module in modules.items()}
    chosen: dict[int, str] = {}
    for block in blocks:
        for module in _called(_block(block, modules)):
            chosen[id(module)] = names[id(module)]
    _refuse_nested(modules, chosen)
    return chosen


def _block(block: object, modules: dict[str, nn.Module]) -> nn.Module:
    """The submodule that an element of blocks= names, or is."""
    if isinstance(block, str):
        if block not in modules:
            near = _like(block, modules)
            raise ValueError(f"blocks has {block!r}, which is not a submodule of the model{near}")
        return modules[block]
    if not isinstance(block, nn.Module):
        raise TypeError(f"blocks must hold names or modules, got {block!r}")
    if not any(block is module for module in modules.values()):
        raise ValueError(
            f"blocks has a {type(block).__name__} that is not a submodule of the model"
        )
    return block


def _like(name: object, names: Iterable[str]) -> str:
    """The end of an error message: the names of submodules that resemble an unknown name."""
    near = difflib.get_close_matches(str(name), names, n=3)
    return f": did you mean {' or '.join(map(repr, near))}?" if near else ""


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The module; or the members of a container, because a container is never called."""
    if is_called(module):
        yield module
    else:
        for child in module.children():
            yield from _called(child)


def _refuse_nested(modules: dict[str, nn.Module], chosen: dict[int, str]) -> None:
    for outer in modules.values():
        for inner in outer.modules() if id(outer) in chosen else ():
            if inner is not outer and id(inner) in chosen:
                raise ValueError(
                    f"blocks has {chosen[id(outer)]!r} and {chosen[id(inner)]!r}, which is a part "
                    "of it: name one of them"
                )


def tensors_of(model: nn.Module) -> Found:
    """The parameters and buffers, checked, each once."""
    named: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        _check_movable(name, tensor)
        named.setdefault(id(tensor), (name, tensor))
    if not any(isinstance(t, nn.Parameter) and t.numel() for _, t in named.values()):
        raise ValueError(f"model ({kind_of(model)}) has no parameters to offload")
    return list(named.values())


class DeviceModule(NamedTuple):
    """The submodule that one device holds, its name in the model, and its tensors."""

    target: Target
    module: nn.Module
    name: str
    tensors: Found


def device_modules(model: nn.Module, device: object, tensors: Found) -> list[DeviceModule]:
    """The submodule of each device."""
    if not isinstance(device, Mapping):
        return [DeviceModule(_target(device), model, "", tensors)]
    modules = dict(model.named_modules())
    for name in device:
        if name not in modules:
            near = _like(name, modules)
            raise ValueError(f"device has {name!r}, which is not a submodule of the model{near}")
    shares = shared_out({name: modules[name] for name in device}, tensors)
    return [
        DeviceModule(_target(device[name]), modules[name], name, mine)
        for name, mine in shares
        if mine
    ]


def shared_out(modules: Mapping[str, nn.Module], tensors: Found) -> list[tuple[str, Found]]:
    """The name and the tensors of each module that has a device.

    Raise ValueError unless each tensor has one device.
    """
    holder: dict[int, str] = {}
    result: list[tuple[str, Found]] = []
    for name, module in modules.items():
        mine = {id(t) for t in [*module.parameters(), *module.buffers()]}
        for key, tensor in tensors:
            if id(tensor) in mine and holder.setdefault(id(tensor), name) != name:
                raise ValueError(
                    f"{key!r} belongs to {holder[id(tensor)]!r} and to {name!r}: each parameter "
                    "needs one device"
                )
        result.append((name, [(key, t) for key, t in tensors if id(t) in mine]))
    for key, tensor in tensors:
        if id(tensor) not in holder:
            raise ValueError(f"{key!r} belongs to no submodule that device= of offload() names")
    return result


def _target(device: object) -> Target:
    target = target_of(device)
    if target.device.integrated:
        warnings.warn(
            f"{target.device} has the memory of the host: offload() frees none of it, and its "
            "copies take time. Run the model without it",
            stacklevel=4,
        )
    return target


_NO_DEVICE = (
    "device must be a CUDA device, such as Device(0) or 'cuda:0', got {}: also on the "
    "emulated driver, whose tensors stay on the CPU"
)


def target_of(device: object) -> Target:
    """The device that an argument names."""
    if isinstance(device, bool) or not isinstance(device, Device | torch.device | str | int):
        raise TypeError(
            "device must be a Device, a torch.device, a str or an int, or a mapping of submodule "
            f"names to these, got {device!r}"
        )
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError:
            raise ValueError(_NO_DEVICE.format(repr(device))) from None
    if isinstance(device, torch.device):
        if device.type != "cuda":
            raise ValueError(_NO_DEVICE.format(device))
        device = _current_index() if device.index is None else device.index
    chosen = device if isinstance(device, Device) else Device(device)
    emulated = managedmem._managedmem._driver_info()["emulated"]
    if not emulated and not torch.cuda.is_available():
        raise ValueError(f"device is {chosen}, but this torch has no CUDA device")
    if emulated:
        return Target(chosen, torch.device("cpu"))
    return Target(chosen, torch.device("cuda", chosen.device_id))


def _current_index() -> int:
    return torch.cuda.current_device() if torch.cuda.is_available() else Device().device_id


def checked_optimizer(optimizer: object) -> torch.optim.Optimizer | None:
    """The innermost optimizer of a wrapper, if one is given."""
    if optimizer is None:
        return None
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(
            f"optimizer must be one torch.optim.Optimizer or None, got {kind}: give one "
            "optimizer that has all groups of parameters"
        )
    return innermost(optimizer)


def check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    mine = {id(p) for p in model.parameters()}
    if not any(id(p) in mine for p in parameters_of(optimizer)):
        raise ValueError(f"optimizer ({type(optimizer).__name__}) has no parameter of the model")


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def check_read_only(read_only: object, optimizer: torch.optim.Optimizer | None) -> None:
    if not isinstance(read_only, bool):
        raise TypeError(f"read_only must be True or False, got {read_only!r}")
    if read_only and optimizer is not None:
        raise ValueError("read_only=True is for inference: the optimizer writes parameters")
