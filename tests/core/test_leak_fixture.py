"""no_managed_leaks: the pytest fixture of managedmem.pytest, in a suite of its own."""

import pytest

pytest_plugins = ["pytester"]

CONFTEST = """
import pytest
import managedmem

pytest_plugins = ["managedmem.pytest"]

@pytest.fixture
def freed_later():
    buffers = []
    yield buffers
    for buffer in buffers:
        buffer.close()

@pytest.fixture
def fails():
    buffer = managedmem.empty(4096, name="of the traceback")
    assert not buffer
"""
SUITE = """
import managedmem
import pytest

kept = [managedmem.empty(4096, name="before all tests")]
pytestmark = pytest.mark.usefixtures("no_managed_leaks")

def test_leaks():
    kept.append(managedmem.empty((512, 1024), "float32", name="weights"))
    kept.append(managedmem.empty(4096, name="later"))

def test_closes():
    kept.pop().close()
    managedmem.empty(4096, name="again")

def test_leaves_a_cycle():
    class Node(managedmem.ManagedBuffer):
        pass
    buffer = managedmem.empty(4096)
    node = Node.from_handle(buffer.handle, 4096, owner=buffer)
    node.self = node

def test_lets_a_fixture_free(freed_later):
    freed_later.append(managedmem.empty(4096))

def test_fails_with_a_buffer():
    buffer = managedmem.empty(4096, name="of the traceback")
    assert not kept

@pytest.mark.xfail(strict=True)
def test_fails_as_expected():
    buffer = managedmem.empty(4096, name="of the traceback")
    assert not kept

def test_has_a_fixture_that_fails(fails):
    pass
"""
WORKING_SETS = """
import managedmem
import pytest

kept = []
pytestmark = pytest.mark.usefixtures("no_managed_leaks")

def test_keeps_one():
    kept.append(managedmem.WorkingSet(4 << 20))

def test_closes_another():
    with managedmem.WorkingSet(4 << 20):
        kept.pop().close()
"""


@pytest.fixture
def suite(pytester, monkeypatch):
    """Runs the suite with these options of Python and returns its result."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeconftest(CONFTEST)
    path = pytester.makepyfile(test_suite=SUITE)

    def run(*options, path=path):
        return pytester.run(
            *(pytester._getpytestargs()[0], *options, "-m", "pytest", "-v", "-p", "no:xdist"), path
        )

    return run


def test_a_leak_is_an_error_of_the_test_that_made_it(suite):
    result = suite()
    result.assert_outcomes(passed=4, failed=1, xfailed=1, errors=2)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_leaks*",
            "the test leaked 2.0M of memory: weights, later",
            "weights: 2.0M (managed)",
            "later: 4.0K (managed)",
            "python -X tracemalloc=25 -m pytest shows the line of each allocation",
        ],
        consecutive=False,
    )
    result.stdout.no_fnmatch_line("of the traceback: *")
    result.stdout.no_fnmatch_line("before all tests: *")


def test_with_tracemalloc_the_line_of_the_allocation_is_shown(suite):
    result = suite("-X", "tracemalloc=4")  # deeper than the test, and not slow
    result.assert_outcomes(passed=4, failed=1, xfailed=1, errors=2)
    result.stdout.fnmatch_lines(
        ["weights: 2.0M (managed)", '  File "*test_suite.py", line 8', '*name="weights"*'],
        consecutive=True,
    )
    result.stdout.no_fnmatch_line("python -X tracemalloc*")


def test_a_working_set_that_stays_open_is_a_leak(suite, pytester):
    result = suite(path=pytester.makepyfile(test_sets=WORKING_SETS))
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_keeps_one*",
            "the test leaked 4.0M of memory: working sets",
            "working sets or offloaded modules on Device(0): 4.0M",
        ],
        consecutive=True,
    )
    result.stdout.no_fnmatch_line("python -X tracemalloc*")


def test_a_setting_gives_it_to_all_tests(suite, pytester):
    pytester.makepyprojecttoml('[tool.pytest.ini_options]\nusefixtures = ["no_managed_leaks"]\n')
    path = pytester.path / "test_suite.py"
    path.write_text(SUITE.replace("pytestmark", "unused"))
    suite().assert_outcomes(passed=4, failed=1, xfailed=1, errors=2)
