"""A pytest fixture that fails a test which leaves memory of this package behind.

>>> pytest_plugins = ["managedmem.pytest"]  # in the topmost conftest.py

and @pytest.mark.usefixtures("no_managed_leaks") at a test, a class, or as pytestmark; for all tests
usefixtures = ["no_managed_leaks"] below [tool.pytest.ini_options] of pyproject.toml.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Generator, Iterator

import pytest

from managedmem._managedmem import _memory_kept
from managedmem._memory_stats import LiveMemory, live
from managedmem._units import size_text

_RAISED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note if a test or a fixture raises, even as expected: the traceback keeps its buffers."""
    report = yield
    if call.when != "teardown":
        item.stash[_RAISED] = call.excinfo is not None
    return report


@pytest.fixture
def no_managed_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if memory that it allocated lives on after it and after a garbage collection.

    The memory is that of live(), and the device memory of working sets and offloaded modules. The
    message names each memory with its size and, while tracemalloc traces, the allocation. Memory of
    the test that an earlier fixture frees counts as a leak, because that fixture ends later.
    @pytest.mark.usefixtures puts this fixture before those that a test names. A test that raises,
    even in a fixture, is not looked at. Driver: cuMemPoolGetAttribute, once for each pool.
    """
    before, frames_before = {memory.serial for memory in live()}, _frames()
    yield
    gc.collect()
    if request.node.stash.get(_RAISED, False):
        return
    leaked = [memory for memory in _living() if memory.serial not in before]
    frames = {
        device: more
        for device, kept in _frames().items()
        if (more := kept - frames_before.get(device, 0)) > 0
    }
    if leaked or frames:
        pytest.fail(_message(leaked, frames, str(request.node.path)), pytrace=False)


def _living() -> list[LiveMemory]:
    return live(tracebacks=tracemalloc.is_tracing())


def _frames() -> dict[int, int]:
    """The bytes of working sets and offloaded modules by device."""
    return {device: frames for device, frames, _ in _memory_kept()}


def _message(leaked: list[LiveMemory], frames: dict[int, int], path: str) -> str:
    total = sum(memory.nbytes for memory in leaked) + sum(frames.values())
    names = [memory.label for memory in leaked] + ["working sets"] * bool(frames)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    # The first line alone is in the summary of pytest.
    lines = [f"the test leaked {size_text(total)} of memory: {', '.join(names[:3])}{more}"]
    for memory in leaked:
        lines.append(f"{memory.label}: {size_text(memory.nbytes)} ({memory.resource})")
        lines += _calls(memory.traceback, path) if memory.traceback else []
    for device, nbytes in frames.items():
        lines.append(f"working sets or offloaded modules on Device({device}): {size_text(nbytes)}")
    if leaked and not tracemalloc.is_tracing():
        lines.append("python -X tracemalloc=25 -m pytest shows the line of each allocation")
    return "\n".join(lines)


def _calls(traceback: tracemalloc.Traceback, path: str) -> list[str]:
    """The calls from the file of the test on, without those of pytest before; or else all."""
    frames = [(frame.filename, frame.lineno) for frame in traceback]
    first = next((i for i, (filename, _) in enumerate(frames) if filename == path), 0)
    return tracemalloc.Traceback(frames[first:][::-1]).format()
