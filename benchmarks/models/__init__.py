"""Models at the size of real ones, larger than their budget: the groups and their descriptions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import managedmem

from ..measure import MIB, Row
from ..report import Group
from . import process

NEED = 64 * MIB  # of managed memory; the contenders with page faults check theirs themselves
BY_HAND = (
    " By hand is pinned memory and a side stream. Each contender has a process of its own; taken is"
    " the most memory of the device that the driver says is taken"
    " beyond the context, sampled in passes that are not timed."
)


def measure(group: str) -> Iterator[Row]:
    """The rows of a group; tiny models on the emulated driver."""
    try:
        import torch
    except ImportError:
        return
    if managedmem.emulator.is_active():
        if group in OF_RANKS:
            yield from process.from_server(group, MANAGEDMEM_DRIVER="emulator")
        else:
            yield from process.here(group)
    elif torch.cuda.is_available():
        yield from process.from_server(group)


OF_RANKS = {"distributed"}  # groups whose servers start ranks, on the emulated driver too


def group_of(name: str, title: str, description: str) -> Group:
    return Group(title, description + BY_HAND, partial(measure, name), NEED)


GROUPS = {
    "language": group_of(
        "language",
        "Language models",
        "A prompt of 512 tokens, and tokens in a loop with a wait after each. The processor time of"
        " the caller ends before the wait. Page faults: all weights come from the host, without a"
        " budget. offload() itself is of weights in ordinary memory, or in page-locked memory."
        " Loaded are the bytes of a call, beside those of what is not on the device. Launches are"
        " of a kernel on 64 numbers, four after each layer.",
    ),
    "captured": group_of(
        "captured",
        "Captured decoding",
        "Tokens of a decoder of GPT-2's shape with a static cache, and a wait after each; half of"
        " its weights are in the budget. Captured: one call is captured, and replayed.",
    ),
    "suspending": group_of(
        "suspending",
        "Weights that leave the device and come back",
        "All weights go to memory of the host, and the driver has the memory of the device"
        " meanwhile, as cuMemGetInfo says. Suspended by suspend() of the handle of offload();"
        " torch_memory_saver keeps a backup on the host.",
    ),
    "mixture": group_of(
        "mixture",
        "A mixture of experts",
        "Two of 16 experts in each layer. The experts of a layer are two tensors, or modules. By"
        " hand keeps those of the latest uses on the device.",
    ),
    "training": group_of(
        "training",
        "Training steps",
        "AdamW; the budget is a share of parameters, gradients and state. By hand has no budget:"
        " parameters stay on the device, and gradients until they are used; the state passes"
        " through buffers, in step() or while the backward pass goes on.",
    ),
    "diffusion": group_of("diffusion", "A diffusion model", "Four steps of a UNet."),
    "loading": group_of(
        "loading",
        "Weights of files",
        "A file of safetensors in the page cache, read to where it can be used: to memory of the"
        " host, or by load_model() to the page-locked memory from which offload() streams. The"
        " memory is what the process has more at its height, beside the bytes of the file.",
    ),
    "distributed": group_of(
        "distributed",
        "Two ranks of torch.distributed",
        "Two GPUs of one machine; on the emulated driver, two processes with gloo. PSS counts"
        " memory that ranks share once; less available is what the system has less, page-locked"
        " memory included. AdamW. Under fully_shard the budget is a part of the state, under"
        " DistributedDataParallel an eighth of parameters, gradients and state; outside of it, the"
        " buckets hold the gradients, which are views of them or copies. CPUOffloadPolicy"
        " steps on the CPU, fused and with all its cores, or with one thread. Ranks are killed at"
        " random points, in several jobs at once.",
    ),
    "sets": group_of(
        "sets",
        "Loads of a WorkingSet",
        "A round over all groups with an eighth of them in the budget; the device sums each.",
    ),
}
