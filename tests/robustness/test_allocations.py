"""Every allocation of every operation fails, one at a time: the extension's, and CPython's for it.

Each failure must be a MemoryError that leaves no block behind and everything as it was.
allocations.py and first_uses.py run in processes of their own: a crash names its allocation.
MANAGEDMEM_SWEEPS (tests/support/sweeps.py) chooses a quarter of the operations or all.
"""

import json
import sys

import pytest

from all_operations import everything
from allocations import FRAME_OF_CPYTHON, LIST_OF_CPYTHON
from constants import FREE_THREADED
from first_uses import FIRST_USE
from managedmem import Device
from programs import build_allocations, parameters_of, run_python
from sweeps import sample

# The first of some tests goes through all operations.
pytestmark = [pytest.mark.emulator_only, pytest.mark.timeout(300)]

AT_ONCE = 150  # operations in a process


# CPython itself, built for debugging or without the GIL, would end the process in their attempts.
ENDED = {
    *(FRAME_OF_CPYTHON if hasattr(sys, "gettotalrefcount") else ()),
    *(LIST_OF_CPYTHON if FREE_THREADED else ()),
}
NAMES = [
    pytest.param(
        name, marks=[pytest.mark.skip("CPython ends the process")] if name in ENDED else []
    )
    for name in sample(everything(), first=2)
]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The allocators that fail, built for this run."""
    built = build_allocations(tmp_path_factory.mktemp("allocations"))
    if built is None:
        pytest.skip("no C compiler (cc) to build the failing allocators with")
    return built


def results(call):
    """The findings that a call prints, by operation: {name: {kind: (attempts, failure)}}."""
    done = run_python(f"import {call.partition('.')[0]}; {call}", check=False)
    found = {}
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines, done.stderr
    for name, kind, n, *wrong in lines:
        found.setdefault(name, {})[kind] = (n, *(wrong or ["the process ended in it"]))
    if done.returncode != 0:
        name, kind, n = lines[-1][:3]
        found[name][kind] = (n, f"the process ended in it:\n{done.stderr}")
    return found


def sweep_of(library, names, defect=None):
    return f"allocations.operations({str(library)!r}, {names!r}, defect={defect!r})"


def explore(call, names):
    """The findings for all names, in as many processes as it takes."""
    found = {}
    while left := [name for name in names if name not in found]:
        more = results(call(left[:AT_ONCE]))
        # The last one may have ended the process before its other kind of allocation.
        found |= more
        assert more, "nothing was tried"
    return found


def check(found):
    for kind, (n, wrong) in found.items():
        assert wrong is None, f"allocation {n} of {kind}: {wrong}"


@pytest.fixture(scope="module")
def findings(request, library):
    names = parameters_of(request, TestEveryOperation.test_each_allocation_in_turn)
    names = [name for name in names if name not in ENDED]
    return explore(lambda left: sweep_of(library, left), names)


@pytest.fixture(scope="module")
def first_findings(request, library):
    names = parameters_of(request, TestFirstUse.test_each_allocation_of_the_first)
    return explore(lambda left: f"first_uses.sweep({str(library)!r}, {left!r})", names)


class TestEveryOperation:
    @pytest.mark.parametrize("name", NAMES)
    def test_each_allocation_in_turn(self, name, findings):
        if everything()[name].devices > Device.count():
            pytest.skip("needs two devices")
        check(findings[name])

    def test_allocations_are_met(self, library):
        """As many as these calls make, no fewer."""
        all_found = results(sweep_of(library, ["allocate", "a plan that grows", "policy apply"]))
        found = {name: [n - 1 for n, _ in kinds.values()] for name, kinds in all_found.items()}
        assert found["allocate"][0] == 1
        assert found["allocate"][1] >= 1
        assert found["a plan that grows"][0] >= 4
        assert found["policy apply"][0] >= 3

    def test_no_pool_is_created_without_an_object_for_it(self, library):
        """There would be none to release it in time, and without the GIL."""
        done = run_python(f"""
            import types
            from failing import attempt, prepare
            from managedmem import ManagedMemoryResource, emulator

            allocations = prepare({str(library)!r})
            make = types.SimpleNamespace(run=lambda w: ManagedMemoryResource(pooled=True))
            emulator.clear_calls()
            _, error, _, reached = attempt(allocations, make, None, "python", 1)
            assert reached and error is MemoryError
            print([call.name for call in emulator.calls() if "Pool" in call.name])
        """)
        assert done.stdout == "[]\n"


class TestImport:
    @pytest.mark.skipif(
        sys.version_info >= (3, 13),
        reason="CPython 3.13 crashes with a dict that could not grow while a type was made",
    )
    def test_each_allocation_of_the_module(self, library):
        check(results(f"allocations.imports({str(library)!r})")["import"])


class TestFirstUse:
    @pytest.mark.parametrize("name", FIRST_USE)
    def test_each_allocation_of_the_first(self, name, first_findings):
        check(first_findings[name])


class TestTheSweepItself:
    """Defects are found: of the extension as a whole, and in operations that are made for it."""

    PLANTED = """
        import allocations
        from world import HOST, Operation
        kept = []

        def answers_wrongly(w):
            try:
                return len(w.plan.__copy__())
            except MemoryError:
                return 0

        def raises_another(w):
            try:
                w.plan.__copy__()
            except MemoryError:
                raise ValueError from None

        def changes_first(w):
            w.c.read_mostly = True
            w.plan.__copy__()

        def keeps_a_reference(w):
            try:
                w.plan.__copy__()
            except MemoryError:
                kept.append(w.stream)
                raise

        def keeps_a_block(w):
            try:
                w.plan.__copy__()
            except MemoryError:
                kept.append(bytearray(100))
                raise

        def closes(w):
            try:
                w.plan.__copy__()
            except MemoryError:
                w.part.close()
                raise
    """

    @pytest.mark.parametrize(
        ("defect", "operation", "message"),
        [
            ("keep_blocks", "copy_to a new buffer", "leaked: "),
            ("do_not_check", "allocate", "Segmentation fault"),
            ("do_not_check", "many targets", "Segmentation fault"),
        ],
    )
    def test_a_defect_of_the_extension(self, defect, operation, message, library):
        found = results(sweep_of(library, [operation], defect))
        assert message in str(found[operation])

    @pytest.mark.skipif(FREE_THREADED, reason="CPython ends the process in the planted operations")
    @pytest.mark.parametrize(
        ("operation", "message"),
        [
            ("answers_wrongly", "it raised nothing and returned 0"),
            ("raises_another", "ValueError and not MemoryError"),
            ("changes_first", "advice changed though it raised"),
            ("keeps_a_reference", "references"),
            ("keeps_a_block", "leaked: "),
            ("closes", "open changed though it raised"),
        ],
    )
    def test_a_defect_of_an_operation(self, operation, message, library):
        code = self.PLANTED + (
            f"\n        table = {{'planted': Operation({operation})}}"
            f"\n        allocations.operations({str(library)!r}, ['planted'], table)"
        )
        done = run_python(code)
        assert message in done.stdout
