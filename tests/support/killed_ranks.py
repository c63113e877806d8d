"""Two ranks that train, save and resume, of which one kills itself in a step, a save or a load.

As a program: forks the ranks of each start, because torch takes seconds to import, and prints what
became of each start as a line of JSON.
"""

import json
import os
import select
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import managedmem.torch as mt

WIDTH, STEPS, SAVED = 128, 8, 3
TIMEOUT = 30  # seconds of torch.distributed
# For each start, the place where a rank ends, and that rank. Step 5 comes after a checkpoint, and
# step 6 is saved. The last start ends by itself.
STARTS = (("step 5", 1), ("save 6", 0), ("load 3", 1), ("save 6", 1), ("step 8", 0), ("", 0))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class DyingWriter(dcp.FileSystemWriter):
    """Kills its process after the data, and before the metadata that makes a checkpoint whole."""

    def write_data(self, *arguments):
        super().write_data(*arguments).wait()
        die()


class DyingReader(dcp.FileSystemReader):
    """Kills its process when it has read a part."""

    def read_data(self, *arguments):
        super().read_data(*arguments).wait()
        die()


def trained(wrapper, rank):
    """The module as it is called, the blocks of it, its optimizer, and the handle."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*blocks)
    if wrapper == "fully_shard":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in (*blocks, model):
            fully_shard(block, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, blocks, optimizer, mt.offload_optimizer(optimizer, budget=1, device=rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    budget = sum(p.nbytes for p in model.parameters()) // 2
    handle = mt.offload(model, rank, budget=budget, optimizer=optimizer)
    return nn.parallel.DistributedDataParallel(model), blocks, optimizer, handle


def state_of(model, optimizer):
    of_model, of_optimizer = states.get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def load(model, optimizer, path, reader):
    loaded = state_of(model, optimizer)
    dcp.load(loaded, storage_reader=reader(path))
    states.set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )


def train(wrapper, rank, folder, end):
    """Train from the last whole checkpoint on; returns the losses by step, and state at home."""
    model, blocks, optimizer, handle = trained(wrapper, rank)
    step = max((int(each.parent.name) for each in folder.glob("*/.metadata")), default=0)
    dist.barrier()  # all have looked
    if step:
        reader = DyingReader if end == f"load {step}" else dcp.FileSystemReader
        load(model, optimizer, folder / str(step), reader)
    losses = {}
    while step < STEPS:
        step += 1
        if end == f"step {step}":  # some gradients are averaged, and others are not
            blocks[1].register_full_backward_hook(lambda *_: die())
        optimizer.zero_grad()
        loss = model(torch.full((2, WIDTH), 0.1 * step + rank, requires_grad=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses[step] = loss.item().hex()
        if step % SAVED == 0:
            writer = DyingWriter if end == f"save {step}" else dcp.FileSystemWriter
            dcp.save(state_of(model, optimizer), storage_writer=writer(folder / str(step)))
    return {"losses": losses, "at home": handle.stats()["state_on_host"]}


def rank_of(wrapper, rank, folder, meeting, end):
    """Run a rank in a forked process; return its result or its error."""
    begin = time.monotonic()
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=TIMEOUT),
        )
        begin = time.monotonic()
        return train(wrapper, rank, folder, end)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "after": time.monotonic() - begin}


def forked(*arguments):
    """Fork a rank; return its process, and the pipe for its result."""
    get, put = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(put, json.dumps(rank_of(*arguments)).encode())
        finally:
            os._exit(0)
    os.close(put)
    return pid, get


def result_of(pid, get):
    """What a rank has found, or the signal that has ended it; it must end."""
    if not select.select([get], [], [], 2 * TIMEOUT)[0]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return {"hangs": True}
    text = os.read(get, 1 << 16)
    status = os.waitpid(pid, 0)[1]
    return json.loads(text) if text else {"signal": os.WTERMSIG(status)}


def main(wrapper, folder):
    for number, (end, victim) in enumerate((("", 0), *STARTS)):
        saved = folder / ("with kills" if number else "without")
        saved.mkdir(exist_ok=True)
        ends = [end if rank == victim else "" for rank in (0, 1)]
        meeting = folder / f"meeting-{number}"
        ranks = [forked(wrapper, rank, saved, meeting, ends[rank]) for rank in (0, 1)]
        print(json.dumps([result_of(*rank) for rank in ranks]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
