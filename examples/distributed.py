"""Training with torch.distributed, the optimizer's state on the host; or one model for all ranks.

    python examples/distributed.py                              one process for each GPU here
    torchrun --nproc-per-node 8 examples/distributed.py         the same, by torchrun
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
        examples/distributed.py                                 on each of two machines
    MANAGEDMEM_DRIVER=emulator python examples/distributed.py   two processes on the CPU, no GPU
    python examples/distributed.py --offload                   parameters on the host, too
    python examples/distributed.py --shard                     parameters in parts, one a process
    python examples/distributed.py --share                     no training: one copy of a model
    python examples/distributed.py --trace all.json             also the moves, for Perfetto

Every process has the parameters and Adam's two averages in managed memory. The parameters stay on
its GPU. The averages are twice their size and only ``optimizer.step()`` needs them: they live on
the host, move to the GPU during the backward pass, and back during the next forward pass. So the
GPU has room for a batch or a model that is larger by as much.

With ``--offload``, ``managedmem.torch.offload()`` keeps the parameters of a deeper model on the
host too, and at most half of their bytes on each GPU.

With ``--shard``, torch's ``fully_shard()`` gives each process a part of the parameters, and
``managedmem.torch.offload_optimizer()`` keeps the averages for that part on the host. A step copies
some of them at a time to the GPU, and back.

With ``--share``, one process has a model, and ``managedmem.torch.share_memory()`` gives it to all
processes of its machine. There is one copy in host memory, and each GPU holds half of it at a time.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import managedmem
from managedmem import Device, Host, ManagedBuffer, digits

try:
    import torch
    import torch.distributed as dist
    from torch import nn
except ImportError as error:
    print(f"this example needs torch: {error}", file=sys.stderr)
    sys.exit(2)

import managedmem.torch

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
ways = parser.add_mutually_exclusive_group()
ways.add_argument("--offload", action="store_true", help="keep the parameters on the host, too")
ways.add_argument("--shard", action="store_true", help="divide the parameters among the processes")
ways.add_argument("--share", action="store_true", help="run one model that all processes share")
parser.add_argument("--trace", metavar="FILE", help="write the moves of all processes for Perfetto")
WAYS = parser.parse_args()  # also in the processes that main() starts
# About 17 MiB of parameters and 33 MiB of optimizer state in each process; 6 and 13 MiB to offload.
WIDTH, HIDDEN = (512, 6) if WAYS.offload else (2048, 1)
STEPS = 120
BATCH = 64  # images of each process in a step


class HostedState:
    """An optimizer's state that lives on the host, and moves to the GPU for each step."""

    def __init__(self, optimizer, place, device):
        self.optimizer, self.place, self.device = optimizer, place, device
        # On a stream of its own the pages move beside the kernels. The emulated driver needs none:
        # it has moved them when the call returns.
        self.stream = torch.cuda.Stream(place) if place.type == "cuda" else None

    def bring(self):
        """Start to move the state to the GPU; say how much."""
        moved = managedmem.torch.prefetch(self.optimizer, self.device, stream=self.stream)
        return f"{moved:,} bytes prefetched"

    def step(self):
        """Update the parameters when the state is there, then start to move it back."""
        first = not self.optimizer.state  # the optimizer makes it now
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)
        self.optimizer.step()
        if first:
            managedmem.torch.to_managed(self.optimizer, device=self.place)
            managedmem.torch.advise(self.optimizer, "set_preferred_location", Host())
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())
        managedmem.torch.prefetch(self.optimizer, Host(), stream=self.stream)

    def describe(self):
        """The driver's record of the largest tensor: preferred and last prefetch location."""
        tensors = [value for state in self.optimizer.state.values() for value in state.values()]
        largest = max(tensors, key=lambda tensor: tensor.nbytes)
        buffer = ManagedBuffer.from_handle(largest.data_ptr(), largest.nbytes, owner=largest)
        return f"home {buffer.preferred_location}, last sent to {buffer.last_prefetch_location}"


class OffloadedModel:
    """Parameters, gradients and state that live on the host; hooks load what the model uses."""

    def __init__(self, model, optimizer, device):
        budget = sum(p.nbytes for p in model.parameters()) // 2
        self.handle = managedmem.torch.offload(model, device, budget=budget, optimizer=optimizer)
        self.state, self.step = optimizer.state, optimizer.step  # a step goes part by part

    def bring(self):
        """Say how much is on the GPU: the hooks bring it."""
        return f"{self.handle.stats()['held']:,} bytes held"

    def describe(self):
        """Where the state is, and the uses of parameters for which the budget had no room."""
        tensors = [value for state in self.state.values() for value in state.values()]
        places = [ManagedBuffer.from_handle(t.data_ptr(), t.nbytes) for t in tensors]
        hosted = sum(p.nbytes for p in places if p.is_host_accessible and p.is_device_accessible)
        return f"{hosted:,} bytes on the host; over the bus: {self.handle.stats()['mapped']} uses"


class ShardedState:
    """The state of a process's shards, which lives on the host and visits the GPU in each step."""

    def __init__(self, optimizer, device):
        own = device if managedmem.emulator.is_active() else None
        self.handle = managedmem.torch.offload_optimizer(optimizer, budget="4 MiB", device=own)
        self.step = optimizer.step

    def bring(self):
        """Say how much is on the host: steps bring it."""
        return f"{self.handle.stats()['state_on_host']:,} bytes of state on the host"

    def describe(self):
        """What stays on the GPU between steps."""
        return f"{self.handle.stats()['state_on_device']:,} bytes on the GPU"


def shard(model, place):
    """Give each process a part of every layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(place.type, (dist.get_world_size(),))
    for part in [*model.children(), model]:
        fully_shard(part, mesh=mesh)


def load_digits(place):
    """Images and labels to train with, then images and labels that are held out."""
    data = digits.load()
    images = torch.tensor(data.as_floats()).view(-1, digits.FEATURES).to(place)
    labels = torch.tensor(list(data.labels)).to(place)
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    held_out[digits.HELD_OUT] = True
    return images[~held_out], labels[~held_out], images[held_out], labels[held_out]


def train(place, device, say):
    """Train a classifier of digits, each process on its share of the images."""
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels, unseen_images, unseen_labels = load_digits(place)
    mine = torch.arange(rank, len(labels), world)

    torch.manual_seed(0)  # from some starts, a deep model learns badly
    sizes = [digits.FEATURES] + [WIDTH] * (HIDDEN + 1)
    layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, digits.CLASSES))
    if WAYS.shard:  # before the optimizer, which gets the shards
        shard(model.to(place), place)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if WAYS.shard:
        state = ShardedState(optimizer, device)
        size = sum(p.to_local().nbytes for p in model.parameters())
        say(f"parameters: {size:,} bytes are the shards of each GPU")
    elif WAYS.offload:  # before DistributedDataParallel, which keeps the addresses of parameters
        state = OffloadedModel(model, optimizer, device)
        say(f"parameters: {state.handle.stats()['streamed']:,} bytes streamed to each GPU")
    else:
        managedmem.torch.to_managed(model, device=place)
        managedmem.torch.advise(model, "set_preferred_location", device)
        size = managedmem.torch.prefetch(model, device)
        say(f"parameters: {size:,} bytes in managed memory on each GPU")
        state = HostedState(optimizer, place, device)

    # Averages the gradients over all processes while the backward pass computes them.
    parallel = model
    if not WAYS.shard:
        parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    chance = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        batch = mine[torch.randint(len(mine), (BATCH,), generator=chance)].to(place)
        loss = nn.functional.cross_entropy(parallel(images[batch]), labels[batch])
        news = state.bring()  # on its own stream, beside the backward pass
        optimizer.zero_grad()
        loss.backward()
        state.step()
        if step % 20 == 19:
            dist.all_reduce(loss.detach_())
            say(f"step {step + 1}: loss {loss.item() / world:.4f}, {news}")
    say(f"optimizer state: {state.describe()}")
    if WAYS.shard or WAYS.offload:
        say_stats(state.handle, say)

    with torch.no_grad():
        right = (model(unseen_images[rank::world]).argmax(1) == unseen_labels[rank::world]).sum()
    dist.all_reduce(right)
    say(f"accuracy {right.item() / len(unseen_labels):.4f} on the held-out images")


def say_stats(handle, say):
    """The counters of all processes."""
    found = [{}] * dist.get_world_size()
    dist.all_gather_object(found, handle.stats())
    for number, stats in enumerate(found):
        say(f"stats of rank {number}: {stats}")


def infer(place, device, say):
    """Run one model that the processes of a machine share, each on its part of the images."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    sizes = [digits.FEATURES, *[WIDTH] * 4, digits.CLASSES]
    # One process of a machine has the weights; the others have only their shapes.
    with torch.device("cpu" if int(os.environ["LOCAL_RANK"]) == 0 else "meta"):
        model = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(sizes)))
    size = managedmem.torch.share_memory(model, device=device)
    say(f"parameters: {size:,} bytes on the host for the processes of a machine")
    handle = managedmem.torch.offload(model, device, budget=size // 2, read_only=True)
    images = load_digits(place)[0]
    with torch.inference_mode():
        model(images[rank::world])
        outputs = model(images[:BATCH])
    sums = [0.0] * world
    dist.all_gather_object(sums, outputs.double().sum().item())
    say(f"all processes give the same outputs: {len(set(sums)) == 1}")
    say_stats(handle, say)


def merge_traces(trace, say):
    """Write the trace of each process beside the file, and make one of them."""
    paths = [f"{WAYS.trace}.{number}" for number in range(dist.get_world_size())]
    trace.to_chrome_trace(paths[dist.get_rank()])
    dist.barrier()
    if dist.get_rank() == 0:
        command = [sys.executable, "-m", "managedmem", "merge", WAYS.trace, *paths]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        say(f"trace: {WAYS.trace}")


def work(local, rank, world, meeting):
    """Run one process of the job, which has these numbers; `meeting` is the rendezvous of all."""
    emulated = managedmem.emulator.is_active()
    device = Device(local % Device.count() if emulated else local)
    if emulated:
        place, backend = torch.device("cpu"), "gloo"
    else:
        place, backend = torch.device("cuda", local), "nccl"
        torch.cuda.set_device(place)
    names = {"init_method": meeting, "rank": rank, "world_size": world}
    dist.init_process_group(backend, device_id=None if emulated else place, **names)
    name = "emulated, computing on the CPU" if emulated else device.name
    try:
        places = [""] * world
        dist.all_gather_object(places, f"{device} ({name}), {backend}")
        say = partial(print, flush=True) if rank == 0 else lambda text: None  # one process prints
        for number, text in enumerate(places):
            say(f"rank {number} of {world}: {text}")
        with managedmem.trace() if WAYS.trace else nullcontext() as trace:
            (infer if WAYS.share else train)(place, device, say)
        if trace:
            merge_traces(trace, say)
        dist.barrier()  # no process leaves while others communicate
    finally:
        dist.destroy_process_group()
    if backend == "gloo":  # its threads outlive the group, and could abort Python's shutdown
        os._exit(0)


def work_alone(local, world, meeting):
    """One process of a job on this machine alone, with the environment that torchrun sets."""
    os.environ.update(RANK=str(local), LOCAL_RANK=str(local))
    work(local, local, world, meeting)


def main():
    """Run the process that torchrun has started, or start one for each GPU of this machine."""
    if "RANK" in os.environ:
        local, rank, world = (int(os.environ[n]) for n in ("LOCAL_RANK", "RANK", "WORLD_SIZE"))
        work(local, rank, world, "env://")
        return
    world = 2 if managedmem.emulator.is_active() else Device.count()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: the processes share the CPU
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work_alone, (world, f"file://{folder}/meeting"), nprocs=world)


if __name__ == "__main__":
    main()
