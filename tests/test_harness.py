"""The harness finds what it is there for: tests that only pass under one schedule.

Each test here runs pytest in a process of its own over a small file of tests that break, with
conftest.py and the options of pyproject.toml.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import managedmem
from helpers import run_python

pytestmark = pytest.mark.emulator_only

TESTS = Path(__file__).resolve().parent
PACKAGES = Path(managedmem.__file__).resolve().parents[1]
IMPORTS = """
import pytest
"""


def run_pytest_in(folder, text, *options, select=""):
    """Run pytest over that text; the ended process."""
    path = folder / "test_seeded.py"
    path.write_text(IMPORTS + text)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MANAGEDMEM_", "PYTEST"))}
    env["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(PACKAGES), str(TESTS), os.environ.get("PYTHONPATH")])
    )
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider"]
    command += ["-c", str(TESTS.parent / "pyproject.toml"), "--rootdir", str(folder)]
    return subprocess.run(
        [*command, *options, f"{path}{select}"], env=env, capture_output=True, text=True
    )


@pytest.fixture
def run_pytest(tmp_path):
    return functools.partial(run_pytest_in, tmp_path)


class TestSchedules:
    WITHOUT_A_WAIT = """
@pytest.mark.parametrize("n", range(8))
def test_fill(alloc, n):
    buffer = alloc(4096)
    buffer.fill(7)
    with memoryview(buffer) as view:
        assert view[0] == 7
"""

    def outcomes(self, done):
        """The numbers of the tests that passed and of those that failed."""
        found = {"PASSED": set(), "FAILED": set()}
        for outcome, number in re.findall(r"^(PASSED|FAILED) .*\[(\d)\]", done.stdout, re.M):
            found[outcome].add(int(number))
        return found["PASSED"], found["FAILED"]

    def test_a_test_that_fails_under_one_only_is_seen(self, run_pytest):
        done = run_pytest(self.WITHOUT_A_WAIT, "-rA")
        passed, failed = self.outcomes(done)
        assert passed and failed and passed | failed == set(range(8)), done.stdout
        assert done.stdout.count("--schedule=lazy") == len(failed)
        # A test that runs alone does the same.
        good, bad = min(passed), min(failed)
        again = run_pytest(self.WITHOUT_A_WAIT, "-rA", select=f"::test_fill[{good}]")
        assert self.outcomes(again) == ({good}, set())
        again = run_pytest(self.WITHOUT_A_WAIT, "-rA", select=f"::test_fill[{bad}]")
        assert self.outcomes(again) == (set(), {bad})

    @pytest.mark.parametrize(("schedule", "passes"), [("eager", True), ("lazy", False)])
    def test_one_can_be_asked_for(self, run_pytest, schedule, passes):
        done = run_pytest(self.WITHOUT_A_WAIT, "-rA", f"--schedule={schedule}")
        assert self.outcomes(done)[0 if passes else 1] == set(range(8)), done.stdout

    def test_subprocesses_have_that_of_the_test(self, request):
        from conftest import schedule_of

        done = run_python("import os; print(os.environ['MANAGEDMEM_EMULATOR'])")
        assert done.stdout == f"schedule={schedule_of(request.node)}\n"
