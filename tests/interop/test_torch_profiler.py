"""torch's profiler beside a trace: its source serves one client, so a trace uses another one."""

import pytest

import managedmem
from contents import write
from tensors import gpu_only, torch

pytestmark = [gpu_only, pytest.mark.filterwarnings("ignore:.*Profiler clears events")]


def gpu_events():
    """The names and the counts of what the profiler sees on the GPU in one step."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    x = torch.ones((64, 64), device="cuda")
    with torch.profiler.profile(activities=activities) as profile:
        torch.softmax(x @ x, 1).sum().cpu()
        torch.cuda.synchronize()
    return sorted(
        (event.key, event.count)
        for event in profile.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )


def test_sees_the_same_before_during_and_after(buf, device0):
    gpu_events()  # the first one also sees how libraries start
    before = gpu_events()
    if not before:
        pytest.skip("torch's profiler sees no GPU here, without a trace either")
    write(buf, 1)
    with managedmem.trace() as trace:
        buf.prefetch(device0)
        during = gpu_events()
        device0.sync()
    after = gpu_events()
    assert before == during == after
    assert trace.complete
    assert trace[buf].to_device == buf.size
