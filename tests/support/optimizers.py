"""Optimizers of torch that step in parts, with the flags that choose their kernels."""

import pytest

from tensors import torch

OPTIMIZERS = {
    "SGD": {"lr": 0.1},
    "momentum": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.01},
    "amsgrad": {"lr": 0.01, "amsgrad": True, "maximize": True, "weight_decay": 0.1},
    "AdamW": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01, "decoupled_weight_decay": True},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Adagrad": {"lr": 0.01, "lr_decay": 0.1},
    "Adadelta": {"lr": 0.5, "weight_decay": 0.1},
    "ASGD": {"lr": 0.01, "t0": 2},
    "Rprop": {"lr": 0.01},
}
KINDS = {"momentum": "SGD", "amsgrad": "Adam"}
FUSED = ("SGD", "momentum", "Adam", "amsgrad", "AdamW", "Adagrad")
FLAGS = [
    (name, flags)
    for name in OPTIMIZERS
    for flags in ({}, {"foreach": True}, {"fused": True}, {"capturable": True})
    if ("fused" not in flags or name in FUSED)
    and ("capturable" not in flags or name in ("Adam", "NAdam", "Adamax"))
]


def make(parameters, name="AdamW", **flags):
    return getattr(torch.optim, KINDS.get(name, name))(parameters, **{**OPTIMIZERS[name], **flags})


def skip_without_kernels(on, name, flags):
    if "capturable" in flags and on == "cpu":
        pytest.skip("state of a CPU optimizer cannot be captured")
    if name == "Adagrad" and "fused" in flags and torch.cuda.is_available():
        pytest.skip("torch has no fused Adagrad for GPUs")
