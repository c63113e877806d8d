"""Every script in examples/ runs from start to end, on the driver that the environment names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import managedmem

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


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
        "import managedmem as m; i = m.driver_info(); d = m.Device.all()\n"
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
    text = (EXAMPLES / "README.md").read_text()
    assert [path.name for path in SCRIPTS if f"[{path.name}]" not in text] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_example_runs(script: Path) -> None:
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


def test_examples_stay_short() -> None:
    assert len((EXAMPLES / "digits.py").read_text().splitlines()) < 120
