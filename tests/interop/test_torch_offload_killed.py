"""A rank is killed in a step, a save or a load: the other one ends, and a restart resumes."""

import importlib
import json
import signal
import subprocess
import sys

import pytest

from constants import EMULATED
from tensors import torch

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("needs a torch with gloo", allow_module_level=True)
if not hasattr(importlib.import_module("torch.distributed.fsdp"), "fully_shard"):
    pytest.skip("needs a torch with fully_shard", allow_module_level=True)
if not EMULATED:
    pytest.skip("gloo has the CPU: python -m benchmarks distributed", allow_module_level=True)

killed_ranks = importlib.import_module("killed_ranks")
WHOLE = 6  # the step of the last whole checkpoint, which the last start resumes


@pytest.mark.timeout(300)
@pytest.mark.parametrize("wrapper", ["fully_shard", "DistributedDataParallel"])
def test_the_other_rank_ends_and_a_restart_has_the_losses_of_no_kill(wrapper, tmp_path):
    command = [sys.executable, killed_ranks.__file__, wrapper, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    whole, *starts = map(json.loads, done.stdout.splitlines())
    expected = [rank["losses"] for rank in whole]
    assert [len(losses) for losses in expected] == [killed_ranks.STEPS] * 2
    assert len(starts) == len(killed_ranks.STARTS)
    for found, (end, victim) in zip(starts[:-1], killed_ranks.STARTS, strict=False):
        assert found[victim] == {"signal": signal.SIGKILL}, end
        other = found[1 - victim]
        assert "error" in other, (end, other)
        assert other["after"] < killed_ranks.TIMEOUT
    for rank, found in enumerate(starts[-1]):
        assert found["at home"] > 0
        assert found["losses"] == {
            step: loss for step, loss in expected[rank].items() if int(step) > WHOLE
        }
