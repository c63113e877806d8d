"""Every script and notebook in examples/ runs from start to end.

On the driver that the environment names; what needs a library that is missing is skipped.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import managedmem
import run_notebook
from paths import ROOT

pytestmark = pytest.mark.timeout(300)  # they train small networks, and some start Jupyter
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
DISTRIBUTED = str(EXAMPLES / "distributed.py")
OFFLOAD = str(EXAMPLES / "offload.py")
SEEING = EXAMPLES / "seeing.ipynb"
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
NEEDS = {SEEING: ["numpy", "matplotlib", "pandas"]}


def need(*names: str) -> None:
    """Skip the test if one of the libraries is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}, which is not installed")


@functools.cache
def run(*command: str) -> str:
    """Run a script with the package that is under test; its output, once it has succeeded."""
    paths = [str(Path(managedmem.__file__).resolve().parent.parent), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def able_driver() -> None:
    """The examples discard and prefetch; a driver that cannot is no fault of theirs."""
    code = (
        "import managedmem as m; i = m._managedmem._driver_info(); d = m.Device.all()\n"
        "print(i['version'] >= 13000 and all(x.concurrent_managed_access for x in d))"
    )
    try:
        able = run("-c", code).strip()
    except AssertionError as error:
        if "DriverNotFoundError" not in str(error):
            raise
        pytest.skip("no driver: set MANAGEDMEM_DRIVER=emulator")
    if able != "True":
        pytest.skip("the driver in use has no discard or no concurrent access")


def test_there_are_examples() -> None:
    assert SCRIPTS
    assert NOTEBOOKS
    text = (EXAMPLES / "README.md").read_text()
    assert [path.name for path in SCRIPTS + NOTEBOOKS if f"[{path.name}]" not in text] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_example_runs(script: Path) -> None:
    if str(script) in (DISTRIBUTED, OFFLOAD):
        need("torch")
    assert run(str(script)).strip()


def test_digits_are_told_apart() -> None:
    text = run(str(EXAMPLES / "digits.py"))
    found = re.search(r"^accuracy ([0-9.]+) on the held-out images$", text, re.MULTILINE)
    assert found, text
    assert float(found[1]) > 0.9
    assert "read_mostly True" in text


def test_digits_without_numpy() -> None:
    path = str(EXAMPLES / "digits.py")
    code = (
        "import runpy, sys; sys.modules.update(numpy=None, torch=None)\n"
        f"runpy.run_path({path!r}, run_name='__main__')"
    )
    assert "product by the host" in run("-c", code)


def test_digits_where_the_driver_cannot_discard() -> None:
    path = str(EXAMPLES / "digits.py")
    code = (
        "import os, runpy\n"
        "os.environ.update(MANAGEDMEM_DRIVER='emulator', MANAGEDMEM_EMULATOR='profile=old12')\n"
        f"runpy.run_path({path!r}, run_name='__main__')"
    )
    assert "accuracy 0.9" in run("-c", code)


def test_pipeline_times_both_loops() -> None:
    text = run(str(EXAMPLES / "pipeline.py"))
    found = re.findall(r"^ *(\w+): +[0-9.]+ ms, +[0-9.]+ ms of it in", text, re.MULTILINE)
    assert found == ["plain", "deferred"], text
    assert ("times mean nothing" in text) == managedmem.emulator.is_active()


@pytest.mark.emulator_only
def test_pipeline_with_peers_says_that_they_need_a_gpu() -> None:
    text = run(str(EXAMPLES / "pipeline_peers.py"))
    assert re.findall(r"^ *([\w.]+): +[0-9.]+ ms", text, re.MULTILINE) == ["plain", "deferred"]
    assert "cannot use the emulated driver" in text


@pytest.mark.skipif(managedmem.emulator.is_active(), reason="needs a GPU")
def test_pipeline_with_every_peer_that_is_here() -> None:
    text = run(str(EXAMPLES / "pipeline_peers.py"))
    found = re.findall(r"^ *([\w.]+): +[0-9.]+ ms, +[0-9.]+ ms of it in", text, re.MULTILINE)
    missing = re.findall(r"^ *([\w.]+): not here", text, re.MULTILINE)
    assert found[:2] == ["plain", "deferred"]
    assert sorted(found[2:] + missing) == ["CuPy", "cuda.bindings", "cuda.core"], text


def check_ranks(text: str, processes: int) -> None:
    ranks = re.findall(rf"^rank (\d+) of {processes}: Device\(\d+\)", text, re.MULTILINE)
    assert sorted(map(int, ranks)) == list(range(processes)), text


def check_training(text: str) -> None:
    """What the distributed example prints must say that it did what it is for."""
    moved = re.findall(r"^step \d+: loss [0-9.]+, ([0-9,]+) bytes prefetched$", text, re.MULTILINE)
    parameters = re.search(r"^parameters: ([0-9,]+) bytes", text, re.MULTILINE)
    assert moved and parameters, text
    # Adam keeps two numbers for each parameter.
    sizes = {int(each.replace(",", "")) for each in moved}
    assert min(sizes) >= 2 * 0.99 * int(parameters[1].replace(",", ""))
    assert "optimizer state: home Host(), last sent to Host()" in text
    found = re.search(r"^accuracy ([0-9.]+) on the held-out images$", text, re.MULTILINE)
    assert found and float(found[1]) > 0.9, text


def test_distributed_starts_a_process_for_each_gpu() -> None:
    need("torch")
    emulated = managedmem.emulator.is_active()
    text = run(DISTRIBUTED)
    check_ranks(text, 2 if emulated else managedmem.Device.count())
    check_training(text)


def test_distributed_under_torchrun_streams_what_does_not_fit() -> None:
    need("torch")
    processes = min(2, managedmem.Device.count())
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    text = run(*launcher, DISTRIBUTED, "--offload")
    check_ranks(text, processes)
    streamed = re.search(r"^parameters: ([0-9,]+) bytes streamed to each GPU$", text, re.MULTILINE)
    held = re.findall(r"^step \d+: loss [0-9.]+, ([0-9,]+) bytes held$", text, re.MULTILINE)
    state = re.search(r"^optimizer state: ([0-9,]+) bytes on the host;", text, re.MULTILINE)
    found = re.search(r"^accuracy ([0-9.]+) on the held-out images$", text, re.MULTILINE)
    assert streamed and state and found and len(held) == 6, text
    size = int(streamed[1].replace(",", ""))
    assert all(0 < int(each.replace(",", "")) <= size // 2 for each in held)
    assert int(state[1].replace(",", "")) >= 2 * 0.99 * size
    assert float(found[1]) > 0.9, text


def refused(script: str, before: str) -> list[str]:
    """What an example prints, its errors too, until it ends with a status, which comes last."""
    code = f"""
import contextlib, runpy, sys
{before}
try:
    with contextlib.redirect_stderr(sys.stdout):
        runpy.run_path({script!r}, run_name="__main__")
except SystemExit as end:
    print("status", end.code)
"""
    return run("-c", code).splitlines()


@pytest.mark.parametrize("script", [DISTRIBUTED, OFFLOAD], ids=lambda path: Path(path).stem)
def test_help_and_unknown_arguments_run_nothing(script: str) -> None:
    need("torch")
    shown = run(script, "--help")
    assert shown.startswith(f"usage: {Path(script).name} [-h]")
    assert f"python examples/{Path(script).name}   " in shown
    lines = refused(script, f"sys.argv = [{script!r}, '--ofload']")
    assert lines[-2].endswith("error: unrecognized arguments: --ofload")
    assert lines[-1] == "status 2"


def test_distributed_keeps_the_state_of_shards_on_the_host() -> None:
    need("torch")
    emulated = managedmem.emulator.is_active()
    text = run(DISTRIBUTED, "--shard")
    check_ranks(text, 2 if emulated else managedmem.Device.count())
    shards = re.search(r"^parameters: ([0-9,]+) bytes are the shards", text, re.MULTILINE)
    hosted = re.findall(r"^step \d+: loss [0-9.]+, ([0-9,]+) bytes of state", text, re.MULTILINE)
    found = re.search(r"^accuracy ([0-9.]+) on the held-out images$", text, re.MULTILINE)
    assert shards and found and len(hosted) == 6, text
    size = int(shards[1].replace(",", ""))
    assert {int(each.replace(",", "")) for each in hosted} == {2 * size}
    assert "optimizer state: 0 bytes on the GPU" in text
    assert float(found[1]) > 0.9, text


@pytest.mark.skipif(
    not managedmem.emulator.is_active() and managedmem.Device.count() < 2, reason="needs two GPUs"
)
def test_distributed_shares_one_model_and_traces_all_processes(tmp_path: Path) -> None:
    need("torch")
    target = tmp_path / "all.json"
    text = run(DISTRIBUTED, "--share", "--trace", str(target))
    world = 2 if managedmem.emulator.is_active() else managedmem.Device.count()
    check_ranks(text, world)
    assert re.search(r"^parameters: [0-9,]+ bytes on the host for the processes", text, re.M), text
    assert "all processes give the same outputs: True" in text
    stats = re.findall(r"^stats of rank (\d+): (\{.*\})$", text, re.MULTILINE)
    assert [int(rank) for rank, _ in stats] == list(range(world))
    for _, shown in stats:
        counters = ast.literal_eval(shown)
        assert 0 < counters["held"] <= counters["budget"]
        assert counters["failures"] == 0
    events = json.loads(target.read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [name.partition(" on ")[0] for name in names] == [f"rank {n}" for n in range(world)]


def test_distributed_without_torch() -> None:
    lines = refused(DISTRIBUTED, 'sys.modules["torch"] = None')
    assert lines[0].startswith("this example needs torch: ")
    assert lines[1:] == ["status 2"]


def test_offload_keeps_the_budget_and_the_numbers() -> None:
    need("torch")
    text = run(OFFLOAD)
    assert re.findall(r"equal: (\w+)$|same loss: (\w+)$", text, re.MULTILINE) == [
        ("True", ""),
        ("", "True"),
    ]
    budget = re.search(r"^inference: .* at most ([0-9,]+) on the GPU$", text, re.MULTILINE)
    held = re.search(r"^  held at the end: ([0-9,]+) bytes; over the bus: 0 calls$", text, re.M)
    assert budget and held, text
    assert 0 < int(held[1].replace(",", "")) <= int(budget[1].replace(",", ""))
    state = re.findall(r"^training .*: [0-9.]+ ms a step, ([0-9,]+) bytes of state", text, re.M)
    assert len(state) == 2 and state[0] == "0" and int(state[1].replace(",", "")) > 0, text
    assert ("times mean nothing" in text) == managedmem.emulator.is_active()


def read(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The cells of a notebook, and those with code."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    cells = notebook["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert not [cell["id"] for cell in cells if cell["metadata"]]
    return cells, code


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
class TestNotebooks:
    def test_is_committed_as_it_should_be(self, path: Path) -> None:
        """With the results of one run from top to bottom."""
        _, code = read(path)
        assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))

    def test_cells_run_in_order(self, path: Path) -> None:
        need(*NEEDS.get(path, ["numpy"]))
        text = run("-W", "error", "-c", RUN_CELLS, str(path))
        emulated = managedmem.emulator.is_active()
        assert text.startswith("EMULATED driver" if emulated else "CUDA driver")

    def test_first_cell_chooses_a_driver_by_itself(self, path: Path) -> None:
        need(*NEEDS.get(path, ["numpy"]))
        code = (
            "import os\n"
            "for name in [name for name in os.environ if name.startswith('MANAGEDMEM_')]:\n"
            "    del os.environ[name]\n" + RUN_CELLS
        )
        assert re.match("EMULATED driver|CUDA driver", run("-c", code, str(path)))

    def test_runs_in_jupyter(self, path: Path) -> None:
        need(*NEEDS.get(path, ["numpy"]), "nbclient", "ipykernel")
        code = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=nbformat.NO_CONVERT)
nbformat.validate(notebook)
nbclient.NotebookClient(notebook, timeout=240).execute()
print(next(cell for cell in notebook.cells if cell.id == "choose").outputs[0].text)
"""
        assert "driver" in run("-c", code, str(path))


class Results(NamedTuple):
    """A notebook, and the outputs of its cells."""

    path: Path
    outputs: list[dict[str, Any]]

    @property
    def texts(self) -> list[str]:
        found = []
        for output in self.outputs:
            data = {"text/plain": output.get("text", ""), **output.get("data", {})}
            found += ["".join(value) for kind, value in data.items() if kind != run_notebook.PNG]
        return found


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.name)
def results(request: pytest.FixtureRequest) -> Results:
    outputs = [output for cell in read(request.param)[1] for output in cell["outputs"]]
    return Results(request.param, outputs)


def prints(source: str) -> bool:
    """True if a cell ends with a value, or calls print() outside of its functions."""
    body = ast.parse(source).body
    if isinstance(body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        return True
    calls = [node for part in body if not isinstance(part, DEFINITIONS) for node in ast.walk(part)]
    return any(isinstance(c, ast.Name) and c.id in ("print", "pyplot") for c in calls)


class TestCommittedResults:
    """tools/run_notebook.py makes them."""

    def test_are_results_and_no_errors(self, results: Results) -> None:
        kinds = {output["output_type"] for output in results.outputs}
        assert kinds <= {"stream", "execute_result", "display_data"}
        assert {output["name"] for output in results.outputs if "name" in output} == {"stdout"}

    def test_are_there_where_a_cell_prints(self, results: Results) -> None:
        code = read(results.path)[1]
        printing = [cell for cell in code if prints("".join(cell["source"]))]
        assert len(printing) > len(code) / 2
        assert [cell["id"] for cell in printing if not cell["outputs"]] == []

    def test_have_pictures(self, results: Results) -> None:
        assert any(run_notebook.PNG in output.get("data", ()) for output in results.outputs)

    def test_say_that_they_are_of_the_emulated_driver(self, results: Results) -> None:
        assert results.texts[0] == "EMULATED driver, no GPU is used\n"
        introduction = "".join(read(results.path)[0][0]["source"])
        assert "**The outputs below are from the emulated driver**" in introduction

    def test_have_no_path_of_a_machine(self, results: Results) -> None:
        for text in results.texts:
            paths = set(re.findall(r"(?<![<\w/])/\w[\w./-]*", text))
            assert paths <= {"/dev/nvidia-uvm-tools"}, text

    def test_are_small(self, results: Results) -> None:
        assert results.path.stat().st_size < 400_000


def test_are_pages_of_the_documentation() -> None:
    docs = ROOT / "docs"
    listed = (docs / "index.rst").read_text(encoding="utf-8")
    assert [path.stem for path in NOTEBOOKS if f"   examples/{path.stem}\n" not in listed] == []
    assert [path.name for path in NOTEBOOKS if not (docs / "examples" / path.name).is_file()] == []


def test_pictures_of_the_pages_are_those_of_the_notebooks() -> None:
    found: dict[str, bytes] = {}
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        found |= run_notebook.shown(run_notebook.pictures(notebook, path.stem))
    folder = ROOT / "docs" / "pictures"
    assert {path.name: path.read_bytes() for path in folder.glob("*.png")} == found
    assert len(found) == 4


# Stands in for Jupyter: the code cells in order, in one namespace; tracebacks name the cell.
RUN_CELLS = """
import json, pathlib, sys
namespace = {"__name__": "__main__"}
for cell in json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), namespace)
"""


def test_examples_stay_short() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in SCRIPTS}
    assert lengths["digits.py"] < 120
    assert lengths["pipeline.py"] < 120
    assert lengths["pipeline_peers.py"] < 120
    assert lengths["distributed.py"] < 300  # three ways of training, and one copy of a model
    assert lengths["offload.py"] < 140
