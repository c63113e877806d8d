"""Code of torch.compile: finds it, and drops code that was compiled before offload() had hooks.

Owns all that offload() knows of torch._dynamo. Compiled code does not look for hooks that come
later.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
# Returns None while no call of a compiled function is under way.
_compiling: Callable[[], object] | None = getattr(_eval_frame, "get_eval_frame_callback", None)


def in_compiled_code() -> bool:
    """True in a call of a compiled function, even where that runs uncompiled code."""
    return _compiling is not None and _compiling() is not None


def is_compiled(module: nn.Module) -> bool:
    """True for a module that torch.compile returned."""
    return type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules


def is_compiled_in_place(module: nn.Module) -> bool:
    """True after module.compile(), or if its forward is compiled."""
    forward = vars(module).get("forward")
    return module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")


def compiles_again() -> bool:
    """False for a torch whose compiled code cannot be dropped."""
    return _dynamo() is None or hasattr(_dynamo(), "reset_code")


def drop_compiled(model: nn.Module) -> None:
    """Drop compiled code that may call modules of the model, so that it is compiled with hooks."""
    dynamo = _dynamo()
    if dynamo is None or not hasattr(dynamo, "reset_code"):
        return
    names = {type(module).__name__ for module in model.modules()}
    with dynamo.convert_frame.compile_lock:
        for weak in list(dynamo.convert_frame.input_codes.seen):
            code = weak()
            if code is not None and _mentions(code, names):
                dynamo.reset_code(code)


def leave_to_python(function: Any) -> None:
    """Let torch.compile inline a function, but not compile it alone."""
    if hasattr(_eval_frame, "set_code_exec_strategy"):
        skip, default = _eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT
        strategy = _eval_frame._FrameExecStrategy(skip, default)
        _eval_frame.set_code_exec_strategy(function.__code__, strategy)


_known_untraced: dict[Callable[..., None], Callable[..., None]] = {}


def untraced(function: Callable[..., None]) -> Callable[..., None]:
    """The function, or a wrapper that torch.compile does not trace. Never imports torch._dynamo."""
    if _compiling is not None and _compiling() is None:
        return function
    dynamo = _dynamo()
    if dynamo is None:
        return function
    untraced = _known_untraced.get(function)
    if untraced is None:
        untraced = _known_untraced[function] = dynamo.disable(function)
    return untraced


def _mentions(code: Any, names: Iterable[str]) -> bool:
    """True if a guard of compiled code names one of the classes."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    texts = [str(entry.guard_manager) for entry in _debug_get_cache_entry_list(code)]
    return any(name in text for text in texts for name in names)


def _dynamo() -> Any:
    """torch._dynamo, if it has been imported completely; else None."""
    module = sys.modules.get("torch._dynamo")
    return module if hasattr(module, "disable") else None
