"""The commands ``python -m managedmem demo`` and ``info``, run as a user runs them, and the data.

Every command runs in a process of its own: the driver is chosen once a process. What the demo needs
beside the emulated driver is NumPy at most, and it is also run without that.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import types
from array import array
from pathlib import Path

import pytest

import managedmem
from managedmem import digits
from managedmem._cli import demo, info, text

PACKAGE = Path(managedmem.__file__).resolve().parent
BLOCKED = "import sys; sys.modules['numpy'] = None; sys.argv = ['managedmem', *sys.argv[1:]]; "
RUN = "from managedmem.__main__ import main; sys.exit(main(sys.argv[1:]))"


def command(
    *arguments: str, code: str | None = None, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """Run a command on the emulated driver, or as the environment given here says (None: unset)."""
    changed = {"MANAGEDMEM_DRIVER": "emulator", "MANAGEDMEM_EMULATOR": None, **environment}
    variables = {k: v for k, v in {**os.environ, **changed}.items() if v is not None}
    paths = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    start = ["-c", code] if code else ["-m", "managedmem"]
    return subprocess.run(
        [sys.executable, *start, *arguments],
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def printed(*arguments: str, code: str | None = None, **environment: str | None) -> str:
    """What a command prints that succeeds."""
    done = command(*arguments, code=code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def cells(text: str, name: str) -> list[str]:
    """The cells after ``name`` in the only line of a report that begins with it."""
    lines = [line.split() for line in text.splitlines() if line.split()[:1] == [name]]
    assert len(lines) == 1, f"{name} in {len(lines)} lines of\n{text}"
    return lines[0][1:]


def accuracy_of(text: str) -> float:
    """The accuracy that a report prints."""
    found = re.search(r"^accuracy +([0-9.]+) on the 599 held-out images$", text, re.MULTILINE)
    assert found, text
    return float(found[1])


def test_a_reader_that_has_read_enough_sees_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(
        [sys.executable, "-m", "managedmem", "info", "--emulator"],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=120,
        check=False,
    )
    os.close(writing)
    assert (result.returncode, result.stderr) == (1, b"")


@pytest.fixture(scope="module")
def report() -> str:
    """What the demo prints on the emulated driver."""
    done = command("demo")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_demo_names_the_driver_first(report: str) -> None:
    first = report.splitlines()[0]
    assert "EMULATED" in first
    assert "as MANAGEDMEM_DRIVER=emulator asks" in first


def test_demo_accuracy(report: str) -> None:
    assert accuracy_of(report) > 0.9


def test_demo_shows_what_the_driver_says(report: str) -> None:
    assert cells(report, "weights.read_mostly") == ["True", "True"]
    assert cells(report, "weights.preferred_location") == ["Device(0)", "Device(0)"]
    assert cells(report, "inputs.last_prefetch_location") == ["Device(0)", "Device(0)"]
    assert cells(report, "labels.last_prefetch_location") == ["Host()", "Host()"]
    assert cells(report, "scores.discard()")[1] == "done,"


def test_demo_counts_instead_of_timing(report: str) -> None:
    lines = {line.split("  ")[1]: line for line in report.splitlines() if " ms" in line}
    assert set(lines) == {"with prefetch", "by page faults"}
    assert "to the device" in lines["with prefetch"]
    assert "gpu faults" not in lines["with prefetch"]
    assert "gpu faults" in lines["by page faults"]
    assert "times mean nothing" in report


def test_demo_without_numpy() -> None:
    text = printed("demo", code=BLOCKED + RUN)
    assert "plain Python on the host" in text
    assert accuracy_of(text) > 0.9


@pytest.mark.parametrize(
    ("name", "libraries"),
    [("demo", {"torch", "cupy", "jax"}), ("info", {"numpy", "torch", "cupy", "numba", "jax"})],
)
def test_no_other_library_is_imported(name: str, libraries: set[str]) -> None:
    printed(
        code="import sys\n"
        "from managedmem.__main__ import main\n"
        f"status = main([{name!r}])\n"
        f"loaded = {libraries} & set(sys.modules)\n"
        "sys.exit(f'imported {loaded}' if loaded else status)\n"
    )


def test_demo_takes_the_emulator_where_there_is_no_driver() -> None:
    first = printed("demo", MANAGEDMEM_DRIVER=None, CUDA_VISIBLE_DEVICES="").splitlines()[0]
    assert "EMULATED" in first
    assert "chosen because no usable CUDA driver with a GPU was found" in first


def test_demo_respects_a_driver_that_was_named(tmp_path: Path) -> None:
    missing = tmp_path / "libcuda.so.1"
    done = command("demo", MANAGEDMEM_DRIVER=str(missing))
    assert done.returncode == 1
    assert str(missing) in done.stderr
    assert "Traceback" not in done.stderr


def test_info_of_options_that_the_emulator_refuses() -> None:
    done = command("info", MANAGEDMEM_EMULATOR="devices=many")
    assert done.returncode == 1
    assert "MANAGEDMEM_EMULATOR: " in done.stdout
    assert "What to do:" not in done.stdout


def test_option_wins_over_the_environment(tmp_path: Path) -> None:
    text = printed("demo", "--emulator", MANAGEDMEM_DRIVER=str(tmp_path / "none"))
    assert "as --emulator asks" in text.splitlines()[0]


def test_demo_on_an_old_driver() -> None:
    text = printed("demo", MANAGEDMEM_EMULATOR="profile=old12")
    assert accuracy_of(text) > 0.9
    assert "refused" in " ".join(cells(text, "scores.discard()"))


def test_demo_without_concurrent_access() -> None:
    text = printed("demo", MANAGEDMEM_EMULATOR="profile=wsl")
    assert accuracy_of(text) > 0.9
    assert "refused" in " ".join(cells(text, "weights.preferred_location"))
    assert "refused" in " ".join(cells(text, "prefetch"))


def test_demo_on_a_driver_without_gpu_libraries(tmp_path: Path) -> None:
    """The emulated driver stands in for a real one: only this symbol tells them apart."""
    library = (PACKAGE / "libmanagedmem_emulator.so").read_bytes()
    driver = tmp_path / "libcuda.so.1"
    driver.write_bytes(library.replace(b"emu_log_count", b"emu_lot_count"))
    blocked = "import sys; sys.modules.update(torch=None, cupy=None); "
    text = printed("demo", code=blocked + RUN, MANAGEDMEM_DRIVER=str(driver))
    assert "EMULATED" not in text
    assert str(driver) in text.splitlines()[0]
    assert "neither torch nor CuPy can use the GPU here" in text
    assert "\nmilliseconds\n" in text
    assert cells(text, "inputs.last_prefetch_location") == ["Host()", "Host()"]
    assert accuracy_of(text) > 0.9


def test_usage() -> None:
    done = command()
    assert done.returncode == 2
    assert done.stderr.startswith("usage: python -m managedmem")
    assert command("demo", "--cuda", "--emulator").returncode == 2
    assert command("--help").returncode == 0


def test_info() -> None:
    text = printed("info")
    assert "libmanagedmem_emulator.so" in text
    assert "CUDA 13.0 (13000)" in text
    assert "Device(0): " in text and "Device(1): " in text
    assert re.search(r"^  concurrent_managed_access +yes +host and device may", text, re.MULTILINE)
    assert cells(text, "prefetch") == ["yes"]
    assert "pageable_memory_access is 0 on Device(0), Device(1)" in text
    assert "NUMA nodes of this machine" in text


def test_info_says_why_not() -> None:
    text = command("info", MANAGEDMEM_EMULATOR="profile=wsl").stdout
    assert "concurrent_managed_access is 0 on Device(0)" in text
    assert cells(text, "prefetch")[0] == "no"
    text = command("info", MANAGEDMEM_EMULATOR="profile=old12").stdout
    assert "needs a driver with CUDA 13.0, this one has 12.2" in text


def test_info_without_a_driver(tmp_path: Path) -> None:
    missing = tmp_path / "libcuda.so.1"
    done = command("info", MANAGEDMEM_DRIVER=str(missing))
    assert done.returncode == 1
    assert str(missing) in done.stdout
    assert "MANAGEDMEM_DRIVER=emulator" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("there", [True, False], ids=["there", "missing"])
def test_info_with_a_path_that_is_not_text(tmp_path: Path, there: bool) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.so")
    if there:
        shutil.copy(PACKAGE / "libmanagedmem_emulator.so", path)
    done = command("info", MANAGEDMEM_DRIVER=str(path))
    assert done.returncode == (0 if there else 1), done.stderr
    assert "caf\\udce9.so" in done.stdout
    assert "Traceback" not in done.stderr


def test_numa_nodes_are_read_from_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node, cpus in ((10, "8-15"), (2, "")):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        (folder / "cpulist").write_text(f"{cpus}\n")
        (folder / "meminfo").write_text(f"Node {node} MemTotal:       2097152 kB\n")
    (tmp_path / "node3").mkdir()
    monkeypatch.setattr(info, "NODES", tmp_path)
    assert info.numa_nodes() == [(2, "none", "2.0 GiB"), (10, "8-15", "2.0 GiB")]


def test_info_does_not_tell_the_emulated_nodes_by_those_of_this_machine() -> None:
    report = command("info", "--emulator")
    (line,) = re.findall(r"^ *location Host\(numa_id=N\) +(.*)$", report.stdout, re.MULTILINE)
    assert line.startswith("depends  on the NUMA nodes of the emulated driver")


def test_data() -> None:
    data = digits.load()
    assert len(data.labels) == 1797
    assert len(data.pixels) == 1797 * 64
    assert set(data.labels) == set(range(10))
    assert (min(data.pixels), max(data.pixels)) == (0, 16)
    floats = data.as_floats()
    assert (floats.typecode, min(floats), max(floats)) == ("f", 0.0, 1.0)
    assert repr(data) == "Digits(1797 images of 64 pixels)"


def test_data_is_that_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, labels = datasets.load_digits(return_X_y=True)
    assert digits.load() == (pixels.astype("uint8").tobytes(), labels.astype("uint8").tobytes())


def test_data_carries_its_licence() -> None:
    text = (PACKAGE / "data/LICENSE-digits.txt").read_text()
    assert "CC BY 4.0" in text
    assert "The scikit-learn developers" in text
    assert (PACKAGE / "data/digits.bin.gz").stat().st_size < 120_000


def test_accuracy_counts_held_out_images_only() -> None:
    labels = digits.load().labels
    wrong = bytearray((label + 1) % 10 for label in labels)
    assert digits.accuracy(bytes(wrong), labels) == 0.0
    wrong[digits.HELD_OUT] = labels[digits.HELD_OUT]
    assert digits.accuracy(bytes(wrong), labels) == 1.0
    assert digits.accuracy(bytes(wrong) + labels, labels) == 1.0
    with pytest.raises(ValueError, match="length"):
        digits.accuracy(labels[1:], labels)


def test_weights_come_from_the_training_images() -> None:
    """They are where training ends: the slope of the loss over the training images is flat."""
    path = PACKAGE.parent.parent / "tools/train_digits.py"
    if not path.exists():
        pytest.skip("the training script is not installed with the package")
    tool = types.ModuleType("train_digits")
    tool.__dict__["__file__"] = str(path)
    exec(compile(path.read_text(), str(path), "exec"), tool.__dict__)
    flat: array[float] = digits.load_weights()
    weights = [list(flat[digit::10]) for digit in range(10)]
    rows, labels = tool.images()
    slope = tool.gradient(weights, *tool.training_part(rows, labels))
    assert max(abs(value) for column in slope for value in column) < 1e-3
    assert len(tool.training_part(rows, labels)[0]) == 1198


def test_batch_stays_within_its_limit() -> None:
    class Fast:
        fast = True

    count = len(digits.load().labels)
    for free in (1 << 20, 1 << 28, 1 << 30, 1 << 38):
        times = demo.repeats(Fast, False, free)
        total = times * count * (4 * 64 + 4 * 10 + 1)
        assert times == 1 or total <= min(128 << 20, free // 8)
    assert demo.repeats(Fast, False, 1 << 38) == 145
    assert demo.repeats(Fast, True, 1 << 38) == 1


def test_table_and_sizes() -> None:
    assert text.table([("a", "bb", "c"), ("aaa", "b", "")]) == "  a    bb  c\n  aaa  b"
    assert [text.size_text(n) for n in (0, 1023, 1024, (1 << 20) - 1, 3 << 20, 5 << 40)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "1.0 MiB",
        "3.0 MiB",
        "5.0 TiB",
    ]
