"""conftest.py reports hangs in C, and shows tests that pass under one schedule only.

Each test here runs pytest in a process of its own over a small file of tests that break, with
conftest.py and the options of pyproject.toml.
"""

import concurrent.futures
import functools
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

import managedmem
import programs
from paths import ROOT, TESTS
from programs import run_program, run_python

pytestmark = pytest.mark.emulator_only

PACKAGES = Path(managedmem.__file__).resolve().parents[1]
IMPORTS = """
import ctypes
import os
import threading

import pytest

from driver import raw_driver
from managedmem import Stream, emulator
"""


def run_pytest_in(folder, text, *options, select="", **variables):
    """Run pytest over that text; the ended process."""
    path = folder / "test_seeded.py"
    path.write_text(IMPORTS + text)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MANAGEDMEM_", "PYTEST"))}
    env["PYTHONPATH"] = os.pathsep.join(
        filter(
            None, [str(PACKAGES), str(TESTS), str(TESTS / "support"), os.environ.get("PYTHONPATH")]
        )
    )
    env.update(variables)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider"]
    command += ["-p", "no:hypothesispytest"]  # its import takes most of the time of a short run
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    return run_program([*command, *options, f"{path}{select}"], env)


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

    def test_the_opposite_can_be_asked_for(self, run_pytest):
        usual = self.outcomes(run_pytest(self.WITHOUT_A_WAIT, "-rA"))
        opposite = self.outcomes(run_pytest(self.WITHOUT_A_WAIT, "-rA", "--schedule=opposite"))
        assert opposite == usual[::-1]

    def test_subprocesses_have_that_of_the_test(self, request):
        from conftest import schedule_of

        done = run_python("import os; print(os.environ['MANAGEDMEM_EMULATOR'])")
        assert done.stdout == f"schedule={schedule_of(request.node)}\n"


class TestSearches:
    FOUND = """
@pytest.mark.parametrize("seed", range(2))
def test_it(seed):
    assert seed not in (7000, 7001)
"""

    @pytest.mark.parametrize(("number", "failed"), [(7, 2), (8, 0)])
    def test_seeds_are_those_of_the_commit_or_asked_for(self, run_pytest, number, failed):
        done = run_pytest(self.FOUND, MANAGEDMEM_SEED=str(number))
        assert f"MANAGEDMEM_SEED={number}" in done.stdout
        assert done.stdout.count(f"MANAGEDMEM_SEED={number} --schedule=") == failed
        assert (done.returncode == 0) == (failed == 0)


def test_a_failing_program_shows_its_line():
    with pytest.raises(AssertionError, match=r'File "<string>", line 2, in f\n    1 / nothing\n'):
        run_python("def f(nothing):\n    1 / nothing\nf(0)", driver=None)


class TestProcesses:
    """With -n, pytest-xdist runs the tests in several processes."""

    WITH_A_SHARED_LIST = """
seen = []

@pytest.mark.parametrize("n", range(8))
def test_it(n):
    seen.append(n)
    assert seen == list(range(n + 1))
"""

    def test_a_file_stays_in_one(self, run_pytest):
        done = run_pytest(self.WITH_A_SHARED_LIST, "-n2")
        assert "8 passed" in done.stdout, done.stdout

    def test_a_gpu_has_one(self, run_pytest):
        done = run_pytest(self.WITH_A_SHARED_LIST, "-n2", MANAGEDMEM_DRIVER="cuda")
        assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
        assert "a GPU wants one process, whose memory has a limit: leave out -n" in done.stderr


def test_without_a_gpu_one_sentence_says_so(run_pytest):
    done = run_pytest(
        "def test_one(stream): pass\ndef test_two(stream): pass\n",
        MANAGEDMEM_DRIVER="cuda",
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    assert "MANAGEDMEM_DRIVER=cuda needs a GPU" in done.stderr
    assert "test_one" not in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


SLEEPS_IN_A_STREAM = """
def test_waits_for_a_host_function(stream):
    pause = ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p)
    assert raw_driver().cuLaunchHostFunc(ctypes.c_void_p(stream.handle), pause, None) == 0
    stream.sync()
"""
KEEPS_THE_GIL = """
def test_keeps_the_gil():
    ctypes.PyDLL(None).pause()
"""
KEEPS_THE_GIL_BESIDE_THE_TEST = """
def test_waits_for_a_thread():
    threading.Thread(target=ctypes.PyDLL(None).pause).start()
"""
HANGS_BEFORE_THE_TESTS = """
ctypes.PyDLL(None).pause()

def test_nothing():
    pass
"""
HANGS_AT_THE_END = """
def test_nothing():
    import atexit

    atexit.register(ctypes.PyDLL(None).pause)
"""
HAS_A_MARK = """
@pytest.mark.timeout(60)
def test_takes_longer():
    ctypes.PyDLL(None).sleep(17)
"""
SPINS = """
@pytest.mark.timeout(2)
def test_computes_for_ever():
    while True:
        pass
"""
HANGS = {
    "without the GIL": SLEEPS_IN_A_STREAM,
    "with the GIL": KEEPS_THE_GIL,
    "in a thread with the GIL": KEEPS_THE_GIL_BESIDE_THE_TEST,
    "in one of several processes": KEEPS_THE_GIL,
    "in an import": HANGS_BEFORE_THE_TESTS,
    "at the end": HANGS_AT_THE_END,
    "with a mark": HAS_A_MARK,
    "with the processor": SPINS,
}
# Longer than the beginnings of these processes at once take on a busy machine.
SHORT = ("--timeout=6", "-o", "faulthandler_timeout=15")


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    """The outputs of the hanging tests, which run side by side."""

    def run(name):
        options = [*SHORT, "--schedule=lazy", *(["-n1"] if "several processes" in name else [])]
        return run_pytest_in(tmp_path_factory.mktemp("hang"), HANGS[name], *options)

    with concurrent.futures.ThreadPoolExecutor(len(HANGS)) as pool:
        return dict(zip(HANGS, pool.map(run, HANGS), strict=True))


@pytest.mark.timeout(120)  # the first one runs all of the programs
class TestHangs:
    """The stack is printed and the process ends, whether the thread in C has the GIL or not."""

    @pytest.mark.parametrize(
        ("name", "frame"),
        [
            ("without the GIL", 'test_seeded.py", line N, in test_waits_for_a_host_function'),
            ("with the GIL", 'test_seeded.py", line N in test_keeps_the_gil'),
            ("in one of several processes", 'test_seeded.py", line N in test_keeps_the_gil'),
            ("in a thread with the GIL", 'threading.py", line N in _bootstrap'),
            ("in an import", 'test_seeded.py", line N in <module>'),
        ],
    )
    def test_a_hang_in_c(self, endings, name, frame):
        done = endings[name]
        assert done.returncode == 1
        stacks = done.stdout + done.stderr
        assert frame in re.sub(r"line \d+", "line N", stacks), stacks
        assert " passed" not in done.stdout

    def test_a_hang_at_the_end_of_the_process(self, endings):
        done = endings["at the end"]
        assert done.returncode == 1
        assert "1 passed" in done.stdout
        assert "Timeout" in done.stderr

    def test_a_loop_ends_by_its_processor_time(self, endings):
        done = endings["with the processor"]
        assert done.returncode == -signal.SIGPROF
        assert "in test_computes_for_ever" in done.stderr
        assert "Timeout" not in done.stdout + done.stderr

    def test_a_mark_gives_a_test_more_time(self, endings):
        assert endings["with a mark"].returncode == 0, endings["with a mark"].stderr

    def test_a_hang_in_a_subprocess(self):
        command = [sys.executable, "-X", "faulthandler", "-c"]
        command += ["import ctypes\ndef hang():\n    ctypes.PyDLL(None).pause()\nhang()"]
        with pytest.raises(AssertionError, match=r"within 0.5 s(.|\n)*line 3 in hang\n"):
            run_program(command, dict(os.environ), patience=0.5)

    def test_a_hang_in_a_forked_child(self):
        """It keeps the pipes open, so their end must not be waited for."""
        program = "import os, time\nos.fork() or time.sleep(30)\nos.wait()"
        command = [sys.executable, "-X", "faulthandler", "-c", program]
        begun = time.monotonic()
        with pytest.raises(AssertionError, match=r"within 0.5 s(.|\n)*line 3 in <module>"):
            run_program(command, dict(os.environ), patience=0.5)
        assert time.monotonic() - begun < 20


@pytest.fixture(scope="class", params=range(8))
def schedule_of_a_fixture(request):
    return programs.schedule_of_subprocesses


def test_processes_of_a_wide_fixture_do_not_depend_on_the_test_before(schedule_of_a_fixture):
    assert schedule_of_a_fixture == "eager"


def test_a_program_behind_the_return_of_a_helper_is_refused():
    helper = "    def two():\n        return 2\n"
    with pytest.raises(AssertionError, match="this never runs"):
        run_python(helper + "        assert two() == 3\n")
    assert run_python(helper + "    print(two())\n").stdout == "2\n"
