"""Run and train a model with a part of its weights on the GPU.

    python examples/offload.py                              the CUDA driver
    MANAGEDMEM_DRIVER=emulator python examples/offload.py   the emulated driver, no GPU needed

``managedmem.torch.offload(model, device, budget=...)`` is the one line. Within the budget, some
layers stay on the GPU. The others live in page-locked host memory, and are copied to the GPU
while the layers before them run. The numbers are those of the plain model. For training, pass the
optimizer: gradients and state for which the budget has no room live on the host too.
"""

import argparse
import copy
import sys
import time

import managedmem

try:
    import torch
    from torch import nn
except ImportError as error:
    print(f"this example needs torch: {error}", file=sys.stderr)
    sys.exit(2)

import managedmem.torch

# Parsed before the driver is opened, which --help does not need.
argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
).parse_args()

MIB = 1 << 20
EMULATED = managedmem.emulator.is_active()
if not EMULATED and not torch.cuda.is_available():
    print("this example needs a torch with CUDA, or MANAGEDMEM_DRIVER=emulator", file=sys.stderr)
    sys.exit(2)
PLACE = torch.device("cpu" if EMULATED else "cuda:0")  # the emulated driver runs no kernels
WIDTH = 128 if EMULATED else 2048  # 16 MiB for each layer on a GPU
ROUNDS = 3 if EMULATED else 10


def make_model(depth):
    torch.manual_seed(0)
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(*layers)


def timed(step):
    """Milliseconds of one call, after one that is not counted, and what the last call returns."""
    result = step()
    if not EMULATED:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(ROUNDS):
        result = step()
    if not EMULATED:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / ROUNDS, result


def is_on_host(tensor):
    """True for memory that the host and the GPU reach: offload() keeps the state there."""
    memory = managedmem.ManagedBuffer.from_handle(tensor.data_ptr(), tensor.nbytes)
    return memory.is_host_accessible and memory.is_device_accessible


def infer():
    """A forward pass with a third of the weights on the GPU."""
    model = make_model(12)
    resident = copy.deepcopy(model).to(PLACE)
    size = sum(p.nbytes for p in model.parameters())
    inputs = torch.rand(256, WIDTH, device=PLACE)
    with torch.inference_mode():
        plain, expected = timed(lambda: resident(inputs))
        with managedmem.torch.offload(model, "cuda:0", budget=size // 3) as handle:
            offloaded, found = timed(lambda: model(inputs))
            numbers = handle.stats()
    print(f"inference: {size:,} bytes of weights, at most {size // 3:,} on the GPU")
    print(f"  on the GPU {plain:.2f} ms, offloaded {offloaded:.2f} ms")
    print(f"  {size / offloaded / 1e6:.1f} GB/s of weights, equal: {torch.equal(found, expected)}")
    print(f"  held at the end: {numbers['held']:,} bytes; over the bus: {numbers['mapped']} calls")


def train():
    """Steps of Adam with a budget for the parameters and their gradients, but not for its state."""
    losses = {}
    for name in ("on the GPU", "offloaded"):
        model = make_model(3)
        size = sum(p.nbytes for p in model.parameters())
        if name == "on the GPU":
            model.to(PLACE)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        inputs = torch.rand(256, WIDTH, device=PLACE)
        handle = None
        if name == "offloaded":
            handle = managedmem.torch.offload(
                model, "cuda:0", budget=5 * size // 2, optimizer=optimizer
            )

        def step(model=model, optimizer=optimizer, inputs=inputs):
            optimizer.zero_grad()
            loss = (model(inputs) - inputs).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        duration, loss = timed(step)
        losses[name] = loss.item()
        state = [t for each in optimizer.state.values() for t in each.values() if t.dim()]
        there = sum(t.nbytes for t in state if is_on_host(t))
        print(f"training {name}: {duration:.2f} ms a step, {there:,} bytes of state on the host")
        if handle is not None:
            handle.remove()  # the model is on the CPU again, the state too
    print(f"  the same loss: {losses['on the GPU'] == losses['offloaded']}")


def main():
    name = "emulated driver, times mean nothing" if EMULATED else torch.cuda.get_device_name(PLACE)
    print(name)
    infer()
    train()


if __name__ == "__main__":
    main()
