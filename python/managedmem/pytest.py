"""A pytest fixture that fails a test which leaves memory of this package behind.

>>> pytest_plugins = ["managedmem.pytest"]  # in the uppermost conftest.py

and @pytest.mark.usefixtures("no_managed_leaks") at a test, a class, or as pytestmark; for all tests
usefixtures = ["no_managed_leaks"] below [tool.pytest.ini_options] of pyproject.toml.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Generator, Iterator

import pytest

from managedmem._memory_stats import LiveMemory, live
from managedmem._units import size_text

_RAISED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note if a test or a fixture raises, also as expected: the traceback keeps its buffers."""
    report = yield
    if call.when != "teardown":
        item.stash[_RAISED] = call.excinfo is not None
    return report


@pytest.fixture
def no_managed_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if memory that it allocated lives after it, and after a garbage collection.

    The memory is that of live(), so the frames of working sets are not among it. The message names
    each memory with its size and, while tracemalloc traces, the allocation. What fixtures before
    this one free is a leak at its end: @pytest.mark.usefixtures puts it before the fixtures that a
    test names. A test that raises, also in a fixture, is not looked at. Driver: none.
    """
    before = {memory.serial for memory in live()}
    yield
    gc.collect()
    if request.node.stash.get(_RAISED, False):
        return
    leaked = [
        memory
        for memory in live(tracebacks=tracemalloc.is_tracing())
        if memory.serial not in before
    ]
    if leaked:
        pytest.fail(_message(leaked), pytrace=False)


def _message(leaked: list[LiveMemory]) -> str:
    total = size_text(sum(memory.nbytes for memory in leaked))
    lines = [f"the test leaked {total} of memory:"]
    for memory in leaked:
        lines.append(f"{memory.label}: {size_text(memory.nbytes)} ({memory.resource})")
        lines += memory.traceback.format() if memory.traceback else []
    if not tracemalloc.is_tracing():
        lines.append("python -X tracemalloc=25 -m pytest shows the line of each allocation")
    return "\n".join(lines)
