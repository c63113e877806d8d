"""MANAGEDMEM_NVTX=1: NVTX ranges and the marks of torch.profiler, and nothing without it."""

from importlib.util import find_spec

import pytest

from programs import run_python
from subinterpreters import PRELUDE
from whole_programs import run_to_the_end

START = "import nvtx_recorder\nnvtx = nvtx_recorder.start()\n"
TORCH = """
from tensors import mt, torch
from offloaded import LAYER, batch, layers
"""

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")


def ranges_of(code):
    run_python(START + code)


class TestWorkingSets:
    def test_uses_have_the_names_of_groups(self):
        ranges_of("""
import managedmem, numpy
with managedmem.WorkingSet(4096) as working:
    a, b = (working.add(numpy.ones(1024, "f4"), name=name) for name in "ab")
    a.use().close()
    assert nvtx.lines() == ["load a", "release a", "  ! drop a", "  ! ahead b"]
    b.use().close()
    assert nvtx.lines() == ["hit b", "release b", "  ! drop b", "  ! ahead a"]
    b.use().close()
    assert nvtx.lines()[:2] == ["load b", "  ! drop a"]
    with a.use_on_host():
        assert nvtx.lines() == ["wait a"]
assert nvtx.lines() == ["close WorkingSet"]
assert len(nvtx.made) == len(set(nvtx.made))
""")

    def test_writes_go_home_and_large_groups_stay_there(self):
        ranges_of("""
import managedmem, numpy, warnings
with managedmem.WorkingSet(8192) as working:
    working.add(numpy.ones(1024, "f4"), access="write").use().close()
    assert nvtx.lines() == ["load group 0", "home group 0"]
    warnings.simplefilter("ignore")
    large = working.add(numpy.ones(4096, "f4"), name="large")
    large.use().close()
    assert nvtx.lines() == ["load large", "  ! at home large", "release large"]
""")

    def test_managed_groups(self):
        ranges_of("""
import managedmem
first, second = (managedmem.empty(4 << 20) for _ in range(2))
with managedmem.ManagedWorkingSet(8 << 20) as working:
    group = working.add([first, second], name="pair")
    group.use().close()
    group.use().close()
assert nvtx.lines() == [
    "load pair", "release pair", "hit pair", "release pair", "close ManagedWorkingSet"
]
""")

    def test_a_part_with_the_number_of_a_removed_one(self):
        ranges_of("""
import managedmem, numpy
with managedmem.WorkingSet(4096) as working:
    a = working.add(numpy.ones(1024, "f4"), name="a")
    a.use().close()
    working.remove(a)
    b, c = (working.add(numpy.ones(1024, "f4"), name=name) for name in "bc")
    assert b._numbers == [0]
    nvtx.lines()
    c.use().close()
    assert nvtx.lines()[:3] == ["load c", "  ! drop a", "release c"]
""")

    def test_threads_have_their_own(self):
        ranges_of("""
import managedmem, numpy, threading
def work():
    b.use().close()
    found.append(nvtx.lines())
with managedmem.WorkingSet(2 * 4096) as working:
    a, b = (working.add(numpy.ones(1024, "f4"), name=name) for name in "ab")
    found, thread = [], threading.Thread(target=work)
    nvtx.push_range(nvtx.get_event_attributes("outer"))
    thread.start()
    thread.join()
    nvtx.pop_range()
assert found[0][0] == "load b"
assert nvtx.lines() == ["outer", "close WorkingSet"]
""")


class TestBuffers:
    def test_results_have_the_names_of_buffers(self):
        ranges_of("""
import managedmem
buf = managedmem.full(16, 1.0, "float32")
nvtx.lines()
buf.name = "weights"
assert buf.numpy(copy=True).sum() == 16
assert nvtx.lines() == ["result weights"]
assert buf.numpy().sum() == 16
assert nvtx.lines() == ["view weights"]
""")

    def test_ranges_end_after_errors(self):
        ranges_of("""
import managedmem, pytest
buf = managedmem.empty(16)
buf.close()
for bad in (lambda: buf.numpy(), lambda: buf.numpy(copy=True), lambda: buf.numpy(1, 2, 3)):
    with pytest.raises((RuntimeError, TypeError)):
        bad()
    assert len(nvtx.lines()) == 1
""")


@needs_torch
class TestOffload:
    def test_forward_passes_name_parts(self):
        ranges_of(
            TORCH
            + """
model = layers(3)
with mt.offload(model, 0, budget=LAYER) as handle, torch.no_grad():
    assert nvtx.lines()[0] == "offload Sequential"
    model(batch(handle))
    assert nvtx.lines() == [
        "load 0", "release 0", "  ! drop 0", "  ! ahead 2",
        "hit 2", "release 2", "  ! drop 2", "  ! ahead 4",
        "hit 4", "release 4", "  ! drop 4", "  ! ahead 0",
    ]
assert "wait Device(0)" in nvtx.lines()
"""
        )

    def test_a_training_step(self):
        ranges_of(
            TORCH
            + """
model = layers(6)
optimizer = torch.optim.AdamW(model.parameters())
with mt.offload(model, 0, budget=3 * LAYER, optimizer=optimizer) as handle:
    for _ in range(2):
        model(batch(handle)).sum().backward()
        passed = nvtx.lines()
        optimizer.step()
        stepped = nvtx.lines()
        optimizer.zero_grad()
assert passed.count("home gradient 2") == 2, passed
assert passed.index("home gradient 10") < passed.index("home gradient 0")
assert stepped[0] == "step AdamW"
turns = [i for i, line in enumerate(stepped) if line.startswith("  step ")]
assert [stepped[i] for i in turns] == [f"  step {part}" for part in range(0, 12, 2)]
for start, end, part in zip(turns, [*turns[1:], len(stepped)], range(0, 12, 2)):
    turn = [line for line in stepped[start + 1 : end] if "!" not in line]
    assert turn[0] in (f"    load {part}", f"    hit {part}"), turn
    assert turn[1:] == [f"    wait state {part}", f"    home {part}"], turn
"""
        )

    def test_state_that_visits_the_device(self):
        ranges_of(
            TORCH
            + """
parameters = [torch.zeros(4 << 20, requires_grad=True) for _ in range(2)]
optimizer = torch.optim.AdamW(parameters)
with mt.offload_optimizer(optimizer, budget="40 MiB"):
    assert nvtx.lines() == ["offload state of AdamW"]
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        stepped = nvtx.lines()
first, second = (stepped.index(f"  step parameter {number}") for number in (0, 1))
for number, lines in enumerate((stepped[first:second], stepped[second:])):
    waits = [line for line in lines if line.startswith("    wait state ")]
    assert waits[0].startswith(f"    wait state parameter {number}[0:")
    assert waits[-1].endswith(":4194304]")
    assert lines.count("    home state") == len(waits) > 1
loads = [line.strip() for line in stepped if "load state parameter" in line]
assert [load.replace("load", "wait") for load in loads] == [
    line.strip() for line in stepped if "wait state" in line
]
"""
        )

    def test_waits_for_gradients(self):
        """Only on a GPU do gradients wait: the test sets the counter of their bytes."""
        ranges_of(
            TORCH
            + """
from managedmem.torch._offload_arguments import target_of
from managedmem.torch._offload_gradients import GradientRoom
room = GradientRoom(target_of(0), None)
room.passing_bytes = 8
room.settle(8)
assert nvtx.lines() == []
room.settle()
assert nvtx.lines() == ["wait gradients"]
"""
        )

    def test_the_state_of_a_first_step_goes_home(self):
        ranges_of(
            TORCH
            + """
parameter = torch.zeros(1 << 20, requires_grad=True)
parameter.grad = torch.ones_like(parameter)
optimizer = torch.optim.AdamW([parameter])
with mt.offload_optimizer(optimizer, budget=1024):
    nvtx.lines()
    optimizer.step()
    assert nvtx.lines() == [
        "step AdamW", "  step parameter 0", "    wait state parameter 0", "    home state"
    ]
"""
        )

    def test_slices_of_experts(self):
        ranges_of(
            TORCH
            + """
class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = 8
        self.stack = torch.nn.Parameter(torch.ones(8, 256, 256))
    def forward(self, x):
        return x @ self.stack[5] @ self.stack[2]
model = torch.nn.Sequential(*(Experts() for _ in range(6)))
with mt.offload(model, 0, budget="5 MiB"), torch.no_grad():
    model(torch.ones(4, 256))
    found = nvtx.lines()
assert found.index("load 1[5]") < found.index("load 1[2]"), found
"""
        )

    def test_ranges_end_when_a_layer_raises(self):
        ranges_of(
            TORCH
            + """
import pytest
model = layers(3)
with mt.offload(model, 0, budget=LAYER) as handle:
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.ones(4, 3))
    found = nvtx.lines()
    assert found[-4:-2] == ["load 0", "release 0"], found
    with pytest.raises(ValueError, match="no hook"):
        model[1].register_forward_pre_hook(lambda *_: exec("raise ValueError('no hook')"))
        model(batch(handle))
    assert nvtx.lines()[:3] == ["load 0", "  ! drop 2", "release 0"]
"""
        )


@needs_torch
class TestFiles:
    def test_load_and_results(self, tmp_path):
        ranges_of(
            TORCH
            + f"""
import pytest
model, path = layers(2), {str(tmp_path / "model.safetensors")!r}
mt.save_file(model, path)
nvtx.lines()
mt.load_model(model, path)
mt.load_file(path=path)
with pytest.raises(FileNotFoundError):
    mt.load_file(path + "x")
mt.to_host(model[0].weight)
assert nvtx.lines() == [
    "load_model model.safetensors", "load_file model.safetensors", "load_file model.safetensorsx",
    "result (64, 64)",
]
"""
        )


@needs_torch
class TestProfiler:
    CODE = (
        TORCH
        + """
model = layers(3)
with mt.offload(model, 0, budget=LAYER) as handle, torch.no_grad():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(batch(handle))
found = [event.key for event in profile.key_averages()]
for name in ("load 0", "release 0", "drop 0", "ahead 2", "hit 2"):
    assert f"managedmem: {name}" in found, found
"""
    )

    def test_shows_the_same(self):
        ranges_of(self.CODE)

    def test_modes_see_no_operators(self):
        """Checkpoints would take the marks for operators that the first pass did not have."""
        ranges_of(
            TORCH
            + """
from torch.utils._python_dispatch import TorchDispatchMode
seen = set()
class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, given=(), named=None):
        seen.add(function.namespace)
        return function(*given, **(named or {}))
model = layers(3)
with mt.offload(model, 0, budget=LAYER) as handle, torch.no_grad():
    nvtx.lines()
    with Mode():
        model(batch(handle))
assert nvtx.lines()[0] == "load 0"
assert seen == {"aten"}, seen
"""
        )

    def test_needs_no_other_library(self):
        code = "import os, sys, warnings\nsys.modules['nvtx'] = None\n"
        code += "os.environ['MANAGEDMEM_NVTX'] = '1'\nwarnings.simplefilter('ignore')\n"
        run_python(code + self.CODE)


class TestLibraries:
    @needs_torch
    def test_torch_with_cuda_takes_ranges(self):
        run_python("""
import os, sys, torch
from types import SimpleNamespace
found = []
torch.cuda.nvtx = SimpleNamespace(
    range_push=found.append, range_pop=lambda: found.append("end"), mark=found.append
)
torch.backends.cuda.is_built = lambda: True
sys.modules["nvtx"] = None
os.environ["MANAGEDMEM_NVTX"] = "1"
import managedmem
buf = managedmem.empty(16)
buf.name = "weights"
buf.numpy()
assert found == ["managedmem: view weights", "end"]
""")

    @pytest.mark.parametrize("missing", ["ModuleType('nvtx')", "None"])
    def test_one_warning_without_any(self, missing):
        run_python(f"""
import os, sys, warnings
from types import ModuleType
sys.modules["nvtx"], sys.modules["torch"] = {missing}, None
os.environ["MANAGEDMEM_NVTX"] = "1"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import managedmem
    assert managedmem.full(4, 1, "int32").numpy(copy=True).sum() == 4
assert type(managedmem.ManagedBuffer.numpy).__name__ == "method_descriptor"
(warning,) = caught
assert warning.category is RuntimeWarning and warning.filename == "<string>", warning
assert 'pip install "managedmem[nvtx]"' in str(warning.message)
""")

    def test_the_package_nvtx_takes_ranges(self):
        pytest.importorskip("nvtx", reason="needs the package nvtx")
        run_python("""
import os, warnings
os.environ["MANAGEDMEM_NVTX"] = "1"
warnings.simplefilter("error")
import managedmem
assert managedmem.full(4, 1, "int32").numpy(copy=True).sum() == 4
""")

    def test_names_without_end_are_not_kept(self):
        ranges_of("""
import gc, managedmem
from nvtx_recorder import Attributes
buf = managedmem.empty(16)
for number in range(5000):
    buf.name = str(number)
    buf.numpy()
nvtx.made.clear()
gc.collect()
assert sum(type(each) is Attributes for each in gc.get_objects()) <= 4096
""")

    def test_a_subinterpreter_imports_no_torch(self):
        """Where the package nvtx is in use by the main interpreter; the import can hang."""
        run_to_the_end(
            PRELUDE
            + """
import os
os.environ["MANAGEDMEM_NVTX"] = "1"
sub = create("legacy")
run(sub, '''
import sys, warnings
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "nvtx":
            raise ImportError("this module can only be loaded into one interpreter")
        assert name != "torch"
sys.meta_path.insert(0, Finder)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import managedmem
assert managedmem.full(4, 1, "int32").name is None and managedmem._nvtx._found is None
assert "in this subinterpreter" in str(caught[0].message), caught
''')
interpreters.destroy(sub)
"""
        )

    def test_another_value_is_refused(self):
        done = run_python(
            "import os\nos.environ['MANAGEDMEM_NVTX'] = 'yes'\nimport managedmem", check=False
        )
        assert 'ValueError: MANAGEDMEM_NVTX must be "0" or "1", got "yes"' in done.stderr


WRAPPED = """
import os, sys
from types import FunctionType
os.environ["MANAGEDMEM_NVTX"] = {value!r}
import managedmem, managedmem.torch, managedmem._working_set
wrapped = set()
for module in [m for n, m in sys.modules.items() if n.partition(".")[0] == "managedmem"]:
    for holder in (module, *(v for v in vars(module).values() if isinstance(v, type))):
        for name, value in vars(holder).items():
            if isinstance(value, FunctionType) and hasattr(value, "__wrapped__"):
                if value.__code__.co_filename.endswith("_nvtx.py"):
                    wrapped.add(name)
imported = [n for n in sys.modules if n.startswith("managedmem.") and n.endswith("._nvtx")]
"""


@needs_torch
@pytest.mark.parametrize("value", ["", "0"])
def test_off_the_methods_are_those_of_their_classes(value):
    run_python(
        WRAPPED.format(value=value)
        + """
assert not wrapped and not imported
assert type(managedmem.ManagedBuffer.numpy).__name__ == "method_descriptor"
"""
    )


@needs_torch
def test_on_they_are_wrapped():
    """Shows that the test before this one can fail."""
    ranges_of(
        WRAPPED.format(value="1")
        + """
assert wrapped >= {"numpy", "_acquire", "acquire", "release", "_step_turn", "load_file"}
assert len(imported) == 2
"""
    )
