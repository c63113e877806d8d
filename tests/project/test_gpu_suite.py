"""tools/gpu_suite.py and gpu_record.py: nothing that failed on a GPU is missing from a record."""

import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

SUITE = """
    import pytest
    def test_good(): pass
    def test_bad(): assert False
    @pytest.fixture
    def broken(): raise OSError
    def test_unprepared(broken): pass
    @pytest.mark.parametrize("n", [1, 2])
    def test_elsewhere(n): pytest.skip("needs two | devices")
    """
FACTS = {
    "date": "2026-11-22",
    "gpu": "NVIDIA H100 80GB HBM3",
    "devices": 2,
    "driver": "13.0 (580.1)",
    "python": "3.12.3",
    "machine": "x86_64",
    "kernel": "6.1",
    "versions": {"torch": "2.11.0"},
}


@pytest.fixture(scope="module")
def tools():
    suite, record = map(importlib.import_module, ("gpu_suite", "gpu_record"))
    return SimpleNamespace(suite=suite, record=record)


def test_without_a_gpu_nothing_is_run(tools, tmp_path, monkeypatch):
    log = tmp_path / "log"
    absent = {**tools.suite.ENVIRONMENT, "MANAGEDMEM_DRIVER": str(tmp_path / "libcuda.so.1")}
    monkeypatch.setattr(tools.suite, "ENVIRONMENT", absent)
    monkeypatch.setattr(sys, "argv", ["gpu_suite.py", "whole", "--log", str(log)])
    with pytest.raises(SystemExit) as ended:
        tools.suite.main()
    said = str(ended.value)
    assert said.startswith("gpu_suite.py needs") and "no usable CUDA driver" in said
    assert not log.exists()


def run_tests(tools, tmp_path, text):
    file = tmp_path / "test_a.py"
    file.write_text("\n".join(line[4:] for line in text.splitlines()))
    arguments = [str(file), "--rootdir", str(tmp_path), "-c", "/dev/null"]
    return tools.suite.run_tests("a", arguments, tmp_path, 60)


def test_one_process_leaves_out_the_tests_of_programs(tools, tmp_path, monkeypatch):
    options = tools.suite.argparse.Namespace(log=tmp_path, timeout=60)
    ran = []
    monkeypatch.setattr(
        tools.suite, "run_tests", lambda name, files, *_: ran.extend(files) or {"counts": {}}
    )
    monkeypatch.setattr(tools.suite, "need_passed", lambda name, found: found)
    tools.suite.run_whole(options)
    left_out = {file.stem for file in tools.suite.files_of_tests() if str(file) not in ran}
    assert left_out == tools.suite.USING_A_GPU


def test_tests_are_counted_by_their_end(tools, tmp_path):
    found = run_tests(tools, tmp_path, SUITE)
    assert found["counts"] == {"passed": 1, "failed": 2, "skipped": 2}
    assert [name.split("::")[1] for name in found["failed"]] == ["test_bad", "test_unprepared"]
    assert found["reasons"] == {"needs two | devices": 2}


def test_a_process_that_ends_early_failed(tools, tmp_path):
    for end, status in (("os._exit(0)", 0), ("os.abort()", -6)):
        found = run_tests(tools, tmp_path, f"    import os\n    def test_a(): {end}")
        assert found["failed"] == [f"a ended with {status}"]


@pytest.mark.parametrize(
    ("name", "run"), [(run, f"run_{run}") for run in ("whole", "files", "two_devices", "sanitizer")]
)
def test_a_run_in_which_nothing_passed_failed(tools, tmp_path, monkeypatch, name, run):
    skipped = {"counts": {"skipped": 9}, "failed": [], "reasons": {"no GPU": 9}, "seconds": 1}
    monkeypatch.setattr(tools.suite, "run_tests", lambda *arguments: dict(skipped))
    planted = "Invalid __global__ write"
    monkeypatch.setattr(tools.suite, "SANITIZER", [sys.executable, "-c", "pass"])
    monkeypatch.setattr(
        tools.suite, "run", lambda command, output, limit: output.write_text(planted)
    )
    options = SimpleNamespace(log=tmp_path, timeout=60, seed=1, from_file=0, jobs=2)
    assert getattr(tools.suite, run)(options)["failed"] == [f"{name}: no test passed"]


def test_a_page_names_what_failed_and_why_tests_were_skipped(tools):
    results = {
        "whole": {
            "counts": {"passed": 8, "failed": 1, "skipped": 2},
            "failed": ["tests.test_a::test_b"],
            "reasons": {"needs two | devices": 2},
            "seconds": 5,
        },
        "benchmarks": {"failed": ["benchmarks ended with 1"], "text": "| a table |"},
    }
    page = tools.record.text_of(results, FACTS, "abc")
    assert page.startswith("# 2026-11-22: 2 x NVIDIA H100 80GB HBM3\n")
    for line in (
        "| whole | 8 | 1 | 2 | 5 |  |",
        "| benchmarks |  | 1 |  |  |  |",
        "- `tests.test_a::test_b`",
        "- `benchmarks ended with 1`",
        "| needs two \\| devices | 2 |",
        "| a table |",
        "| commit | abc |",
    ):
        assert line in page.splitlines()


def test_only_tests_for_two_devices(request):
    files = [f"tests/core/test_{name}.py" for name in ("residency", "peers", "dtype")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "--two-devices", *files],
        cwd=request.config.rootpath,
        capture_output=True,
        text=True,
        check=True,
    )
    names = done.stdout.splitlines()
    assert any("test_residency.py::TestPrefetchHints::test_name_each_device" in n for n in names)
    assert any("test_peers.py" in n for n in names)
    assert not any("test_dtype.py" in n for n in names)
