"""A model that fully_shard() divides among the processes of a group, its steps and its checkpoints.

As a program, with a folder and a rank: one of two that train with offload_optimizer() and save.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import managedmem.torch as mt


def sharded(layers=6, width=512):
    """The model, and its AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps=3, width=512):
    for i in range(steps):
        model(torch.full((2, width), 0.25 + i)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def checkpoint_of(model, optimizer):
    model_state, optimizer_state = states.get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def resume(model, optimizer, folder):
    """Load a checkpoint, of any number of processes."""
    loaded = checkpoint_of(model, optimizer)
    dcp.load(loaded, checkpoint_id=folder)
    states.set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )


def main(folder, rank):
    store = dist.FileStore(f"{folder}.store", 2)
    patience = timedelta(seconds=60)
    dist.init_process_group("gloo", timeout=patience, world_size=2, rank=int(rank), store=store)
    model, optimizer = sharded()
    handle = mt.offload_optimizer(optimizer, budget="1 MiB")
    train(model, optimizer)
    assert handle.stats()["state_on_host"] > 0
    dcp.save(checkpoint_of(model, optimizer), checkpoint_id=folder)
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads outlive the group, and could abort Python's shutdown


if __name__ == "__main__":
    main(*sys.argv[1:])
