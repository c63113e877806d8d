"""No operation leaves a reference, a block or memory behind, whether it succeeds or fails.

references.py goes through the operations, without a fault and with each driver call failing, and
counts. On a Python that was built with Py_DEBUG (.ci/run references) it counts all references.
MANAGEDMEM_SWEEPS (tests/support/sweeps.py) chooses a quarter of the operations or all.
"""

import json
import sys

import pytest

import c_heap
import references
from all_operations import everything
from constants import FREE_THREADED
from managedmem import Device
from programs import build_allocations, explore, parameters_of, run_python
from sweeps import sample

pytestmark = pytest.mark.emulator_only

AT_ONCE = 100  # operations in a process
ALL_REFERENCES = hasattr(sys, "gettotalrefcount")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """What counts the blocks of the extension, or None where there is no compiler for it."""
    built = build_allocations(tmp_path_factory.mktemp("references"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLIBC_TUNABLES", c_heap.KEEP_NO_FREED_BLOCKS)
        if built is not None:
            patch.setenv("ALLOCATIONS_LIBRARY", str(built))
        yield built


@pytest.fixture(scope="module")
def findings(request, library):
    names = parameters_of(request, TestEveryOperation.test_leaves_nothing_behind)
    return explore("references", names, AT_ONCE, patience=150)  # beside three busy processes


@pytest.mark.timeout(300)  # the first one goes through all of them
class TestEveryOperation:
    @pytest.mark.parametrize("name", sample(everything()))
    def test_leaves_nothing_behind(self, name, findings):
        if Device.count() < everything()[name].devices:
            pytest.skip("needs two devices")
        assert findings[name] is None, findings[name]

    def test_names_of_operations_with_numpy_are_real(self):
        assert not references.USE_NUMPY - set(everything())


@pytest.fixture(scope="module")
def found(library):
    return explore("references", list(references.SEEDED), AT_ONCE)


class TestSeededLeaks:
    """Each kind of leak is found by the counter that is there for it."""

    FAULTS = len(references.FAULTS)

    def lines(self, text, counter):
        return [line for line in (text or "").splitlines() if line.endswith(counter)]

    @pytest.mark.parametrize("name", references.SEEDED)
    @pytest.mark.skipif(not ALL_REFERENCES, reason="needs a Python built with Py_DEBUG")
    def test_among_all_references(self, name, found):
        none = {"memory of C": 0, "blocks of the extension": 0}
        times = {"the name of an error": self.FAULTS, **none}.get(name, self.FAULTS + 1)
        assert len(self.lines(found[name], " references")) == times, found[name]

    @pytest.mark.parametrize(
        ("name", "counter"),
        [
            pytest.param(
                *("None", "references to None"),
                marks=pytest.mark.skipif(
                    sys.version_info >= (3, 12), reason="None is immortal from 3.12 on"
                ),
            ),
            ("a location", "references to Host()"),
            ("a result", "references to <class 'managedmem.ManagedBuffer'>"),
        ],
    )
    def test_among_references_to_shared_objects(self, name, counter, found):
        assert len(self.lines(found[name], counter)) == self.FAULTS + 1, found[name]

    def test_among_references_to_arguments(self, found):
        assert "references to <Stream" in found["an argument"]

    @pytest.mark.skipif(not sys.getallocatedblocks(), reason="the allocator counts no blocks")
    @pytest.mark.skipif(FREE_THREADED, reason="a free-threaded Python frees blocks in batches")
    @pytest.mark.parametrize(
        ("name", "times"),
        [
            ("an int", FAULTS + 1),
            ("a traceback", FAULTS + 1),
            ("the name of an error", FAULTS),
            ("a result", FAULTS + 1),
        ],
    )
    def test_among_blocks(self, name, times, found):
        assert len(self.lines(found[name], " blocks")) == times, found[name]

    @pytest.mark.skipif(not c_heap.reader(), reason="malloc() counts nothing")
    def test_in_the_c_heap(self, found):
        assert len(self.lines(found["memory of C"], " bytes of malloc()")) == 1

    @pytest.mark.skipif(not c_heap.reader(), reason="malloc() counts nothing")
    def test_freed_memory_of_c_is_not_counted(self, library):
        """A thread keeps seven freed blocks of a size, unless it is told not to."""
        done = run_python("""
            import c_heap, ctypes

            c = ctypes.CDLL(None)
            c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
            blocks = [c.malloc(560) for _ in range(14)]
            before = c_heap.reader()()
            for block in blocks[:7]:
                c.free(block)
            assert before - c_heap.reader()() >= 7 * 560
        """)
        assert done.stderr == ""

    def test_among_blocks_of_the_extension(self, found, library):
        if library is None:
            pytest.skip("no C compiler (cc) to build the counting allocators with")
        lines = self.lines(found["blocks of the extension"], " blocks of the extension")
        assert len(lines) == self.FAULTS + 1

    def test_what_happens_once_is_no_leak(self):
        """A cache that is filled once grows in the first rounds only."""
        done = run_python("""
            import json, references
            from world import Operation, World

            kept = []

            def fill(w):
                if len(kept) < references.WARM_UP + references.ROUNDS:
                    kept.append(object())

            counts = references.Counts(w := World(), True, True)
            print(json.dumps(counts.grown(lambda: references.once(Operation(fill), w))))
        """)
        assert json.loads(done.stdout) == {}
