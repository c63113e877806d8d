"""A pipeline over several buffers: the host prepares one while others move and the GPU works.

    python examples/pipeline.py                              on a machine with an NVIDIA GPU
    MANAGEDMEM_DRIVER=emulator python examples/pipeline.py   anywhere; the times mean nothing there

Each step fills a buffer on the host, prefetches it to the GPU and starts work on it. Then it checks
the answer for the previous buffer, and prefetches that buffer to the host. At last it reads the
buffer before that one. The loop runs with plain prefetches, for which the thread does part of the
driver's work (for the host, all of it), and with deferred ones, which return at once.

With torch and a GPU, torch doubles and sums the numbers there; otherwise the host does.
"""

import time
from array import array
from contextlib import ExitStack

import managedmem
from managedmem import Device, Host

BUFFERS = 8
PASSES = 5  # of each kind, in turn; the fastest counts
A_PAGE = 4096 // 8  # numbers of 8 bytes


class Stage:
    """A buffer with a stream of its own and the work on it."""

    def __init__(self, buf, stream, torch):
        self.buf, self.stream, self.torch = buf, stream, torch
        self.answer = None
        self.held = 0.0  # seconds that the thread spent in calls of prefetch
        if torch:
            self.tensor = torch.as_tensor(buf, device="cuda")
            self.torch_stream = torch.cuda.ExternalStream(stream.handle)

    def move(self, location, defer):
        start = time.perf_counter()
        self.buf.prefetch(location, stream=self.stream, defer=defer)
        self.held += time.perf_counter() - start

    def fill(self, source):
        with memoryview(self.buf) as view:
            view[:] = source

    def start_work(self):
        """Double the numbers and sum them: on the GPU, queued behind the prefetch."""
        if self.torch:
            with self.torch.cuda.stream(self.torch_stream):
                self.answer = self.tensor.mul_(2).sum()
            return
        self.stream.sync()  # the host does not wait for a stream by itself
        with memoryview(self.buf) as view:
            view[:] = array("q", [2 * number for number in view])
            self.answer = sum(view)

    def read(self):
        """The sum of a number from each page, as a check."""
        self.stream.sync()
        with memoryview(self.buf) as view:
            return sum(view[::A_PAGE])


def run(stages, source, expected, defer):
    """One pass over all buffers."""
    device, count = Device(0), len(stages)
    for i in range(count + 2):
        if i < count:
            stages[i].fill(source)
            stages[i].move(device, defer)
            stages[i].start_work()
        if 1 <= i <= count:
            stages[i - 1].stream.sync()
            assert int(stages[i - 1].answer) == expected, "the GPU saw other numbers"
            stages[i - 1].move(Host(), defer)
        if i >= 2:
            assert stages[i - 2].read() == 2 * sum(source[::A_PAGE])


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
    torch = torch_with_gpu()
    numbers = (32 << 20) // 8 if torch else 4096  # 256 MiB in all on a GPU
    source = array("q", range(numbers))
    expected = numbers * (numbers - 1)
    print(f"{BUFFERS} buffers of {8 * numbers >> 10} KiB, {Device(0).name}", end=", ")
    print(f"work by {'torch' if torch else 'the host'}")
    if managedmem.emulator.is_active():
        print("EMULATED driver: the times mean nothing")

    best = {}
    with ExitStack() as stack:
        bufs = [stack.enter_context(managedmem.empty(numbers, "int64")) for _ in range(BUFFERS)]
        streams = [stack.enter_context(managedmem.Stream()) for _ in range(BUFFERS)]
        stages = [Stage(buf, stream, torch) for buf, stream in zip(bufs, streams, strict=True)]
        for _ in range(PASSES):
            for name, defer in (("plain", False), ("deferred", True)):
                before = sum(stage.held for stage in stages)
                start = time.perf_counter()
                run(stages, source, expected, defer)
                whole = time.perf_counter() - start
                held = sum(stage.held for stage in stages) - before
                best[name] = min(best.get(name, (whole, held)), (whole, held))
    for name, (whole, held) in best.items():
        print(f"{name:>8}: {1e3 * whole:7.2f} ms, {1e3 * held:6.2f} ms of it in prefetch calls")


if __name__ == "__main__":
    main()
