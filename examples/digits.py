"""Classify handwritten digits in managed memory: a script to copy from.

    python examples/digits.py                              on a machine with an NVIDIA GPU
    MANAGEDMEM_DRIVER=emulator python examples/digits.py   anywhere

The images and the weights of the classifier come with the package. With torch and a GPU, torch does
the product there; otherwise NumPy or plain Python does it on the host, over the same memory.
"""

from array import array
from operator import mul

import managedmem
from managedmem import Device, Host, digits


def multiply_on_device(torch, inputs, weights, scores, labels, stream):
    """Multiply with torch, over the buffers without a copy."""
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle)):
        x = torch.as_tensor(inputs, device="cuda")
        w = torch.as_tensor(weights, device="cuda")
        s = torch.as_tensor(scores, device="cuda")
        torch.addmm(w[64], x, w[:64], out=s)
        torch.as_tensor(labels, device="cuda").copy_(s.argmax(dim=1))


def multiply_on_host(inputs, weights, scores, labels, stream):
    """Multiply with NumPy, or with plain Python if NumPy is missing."""
    stream.sync()  # the host does not wait for a stream by itself
    try:
        import numpy as np
    except ImportError:
        return multiply_slowly(inputs, weights, scores, labels)
    w = np.asarray(weights)
    s = np.asarray(scores)
    np.matmul(np.asarray(inputs), w[:64], out=s)
    s += w[64]
    np.asarray(labels)[...] = s.argmax(axis=1)


def multiply_slowly(inputs, weights, scores, labels):
    """Multiply with the standard library: a memoryview over a buffer is a view of its memory."""
    x, w = memoryview(inputs).tolist(), memoryview(weights).tolist()
    columns = list(zip(*w, strict=True))
    with memoryview(scores).cast("B") as raw, raw.cast("f") as s, memoryview(labels) as out:
        for i, pixels in enumerate(x):
            found = [sum(map(mul, pixels, column), column[64]) for column in columns]
            s[10 * i : 10 * i + 10] = array("f", found)
            out[i] = found.index(max(found))


def torch_with_gpu():
    """The torch module if it can use the driver's GPU, else None."""
    if managedmem.emulator.is_active():
        return None
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def main():
    data = digits.load()
    count = len(data.labels)
    device, torch = Device(0), torch_with_gpu()
    print(f"{count} images, {device.name}, product by {'torch' if torch else 'the host'}")

    with (
        managedmem.Stream() as stream,
        managedmem.empty((count, 64), "float32") as inputs,
        managedmem.empty((65, 10), "float32") as weights,
        managedmem.empty((count, 10), "float32") as scores,
        managedmem.empty(count, "uint8") as labels,
    ):
        # Managed memory is ordinary memory to the host: fill it through the buffer protocol.
        with memoryview(inputs).cast("B") as view:
            view[:] = data.as_floats().tobytes()
        with memoryview(weights).cast("B") as view:
            view[:] = digits.load_weights().tobytes()

        # Advice: each reader may keep a copy of the weights; their home is the GPU.
        weights.read_mostly = True
        weights.preferred_location = device

        # Move the data before the product needs it, both buffers in one call. The old scores are
        # not needed, so their pages move without a copy. A driver before CUDA 13.0 cannot discard:
        # "skip" then leaves the discard out, and the program is only slower.
        managedmem.prefetch([inputs, weights], device, stream=stream)
        scores.discard_prefetch(device, stream=stream, unsupported="skip")

        if torch:
            multiply_on_device(torch, inputs, weights, scores, labels, stream)
        else:
            multiply_on_host(inputs, weights, scores, labels, stream)

        # Move the answer back while the host does something else, and discard the scratch.
        labels.prefetch(Host(), stream=stream)
        scores.discard(stream=stream, unsupported="skip")
        stream.sync()

        print(f"weights: read_mostly {weights.read_mostly}, home {weights.preferred_location}")
        print(f"labels: last sent to {labels.last_prefetch_location}")
        with memoryview(labels) as view:
            found = digits.accuracy(view.tobytes(), data.labels)
        print(f"accuracy {found:.4f} on the held-out images")


if __name__ == "__main__":
    main()
