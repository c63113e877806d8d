"""Every driver call of every operation fails: before and after it acts, in pairs, and lastingly.

fault_sweeps.py makes the faults, in processes of its own; each sweep is one test. MANAGEDMEM_SWEEPS
(tests/support/sweeps.py) chooses the operations, and whether there are sweeps with two faults.
"""

import json

import pytest

import fault_sweeps
from managedmem import Device
from programs import run_python
from sweeps import HAS_PAIRS, SHARE, sample

pytestmark = pytest.mark.emulator_only

LONG = {"two", "two, the first after", "mixed, two"}
FEWEST = {"mixed, before": 300, "mixed, after": 300, "mixed, two": 3000}  # attempts, else 1000
# A broken device loses the memory that it does not free, so it needs enough.
EMULATOR = f"devices={Device.count()},capacity_mib=1000000"


def findings(code):
    """The number of attempts and the failures that the program tells."""
    done = run_python(code, emulator=EMULATOR, check=False, patience=300)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines, done.stderr
    wrong = [f"{line[0]}: {line[2]}" for line in lines if len(line) == 3 and line[2]]
    if done.returncode != 0:
        wrong.append(f"the process ended in {lines[-1]}:\n{done.stderr}")
    return sum(line[1] for line in lines if len(line) == 3), wrong


def in_parts(kind):
    """The operations in groups, so that a process for each ends in a few seconds."""
    table = fault_sweeps.everything()
    names = [n for n in fault_sweeps.SWEEPS[kind][1] if table[n].devices <= Device.count()]
    names = sample(names, first=list(fault_sweeps.SWEEPS).index(kind))  # not the same for all kinds
    size = 4 if kind in LONG else 25 if kind == "lasting" else 250
    return [names[at : at + size] for at in range(0, len(names), size)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", fault_sweeps.SWEEPS)
def test_every_call_of_every_operation(kind):
    if kind in LONG and not HAS_PAIRS:
        pytest.skip("takes a minute: set MANAGEDMEM_SWEEPS=all")
    parts = [
        findings(f"import fault_sweeps; fault_sweeps.sweep({kind!r}, {part!r})")
        for part in in_parts(kind)
    ]
    assert not [wrong for _, found in parts for wrong in found]
    attempts = sum(attempts for attempts, _ in parts)
    assert attempts >= FEWEST.get(kind, 1000) // (2 * SHARE - 1)
    print(f"{kind}: {attempts} faults")


class TestTheSweepsThemselves:
    """Operations with defects, which the sweeps must find."""

    PLANTED = """
        import fault_sweeps, managedmem
        from managedmem import CUDAError
        from world import HOST, ONE, Operation

        def swallows(w):
            try:
                w.a.prefetch(ONE)
            except CUDAError:
                pass

        def does_not_restore(w):
            w.a.read_mostly = False
            w.b.read_mostly = True

        def says_the_second(w):
            try:
                w.a.fill(1)
            except CUDAError:
                w.b.fill(2)

        def forgets_the_first(w):
            try:
                w.a.fill(1)
            except CUDAError:
                failed = True
            else:
                return
            w.b.fill(2)
            raise CUDAError

        kept = []

        def keeps(w):
            buffer = managedmem.empty(4096)
            try:
                w.a.fill(1)
            except CUDAError:
                kept.append(buffer)
                raise

        def keeps_when_two_fail(w):
            buffer = managedmem.empty(4096)
            try:
                w.a.fill(1)
            except CUDAError:
                try:
                    w.b.fill(2)
                except CUDAError:
                    kept.append(buffer)
                raise

        def raises_another(w):
            try:
                w.a.fill(1)
            except CUDAError:
                raise ValueError from None

        def raises_the_base_class(w):
            try:
                w.a.fill(1)
            except managedmem.CUDAOutOfMemoryError as error:
                base = CUDAError(str(error))
                base.name, base.code, base.function = error.name, error.code, error.function
                raise base from None

        def says_nothing(w):
            try:
                w.a.fill(1)
            except CUDAError as error:
                error.args = ("failed",)
                raise

        def swallows_a_query(w):
            try:
                w.a.read_mostly
            except CUDAError:
                pass
    """

    @pytest.mark.parametrize(
        ("kind", "operation", "message"),
        [
            ("before", "swallows", "went unnoticed"),
            ("after", "swallows", "went unnoticed"),
            ("before", "does_not_restore", "advice changed"),
            ("after", "does_not_restore", "advice changed"),
            ("mixed, before", "does_not_restore", "advice changed"),
            ("before", "keeps", "allocations, bytes kept"),
            ("before", "says_nothing", "does not say"),
            ("out of memory", "raises_the_base_class", "the error is a CUDAError"),
            ("two", "keeps_when_two_fail", "kept when"),
            ("two", "forgets_the_first", "the error is"),
            ("two, the first after", "forgets_the_first", "the error is"),
            ("two", "raises_another", "ValueError"),
            ("mixed, two", "raises_another", "ValueError"),
        ],
    )
    def test_a_defect(self, kind, operation, message):
        code = self.PLANTED + (
            f"\n        table = {{'policy': Operation({operation}, may_change={{'bytes'}})}}"
            f"\n        fault_sweeps.sweep({kind!r}, ['policy'], table)"
        )
        _, wrong = findings(code)
        assert message in "".join(wrong)

    @pytest.mark.parametrize(
        ("operation", "message"),
        [
            ("Operation(swallows_a_query)", "went unnoticed"),
            ("Operation(lambda w: w.a.read_mostly, faults=9)", "calls, not 9"),
        ],
    )
    def test_a_defect_of_an_operation_of_the_main_table(self, operation, message):
        code = self.PLANTED + (
            f"\n        table = {{'get read_mostly': {operation}}}"
            "\n        fault_sweeps.sweep('before', ['get read_mostly'], table)"
        )
        _, wrong = findings(code)
        assert message in "".join(wrong)

    def test_a_stream_that_stays_open_on_a_broken_device(self):
        code = """
            import fault_sweeps
            from managedmem import CUDAError
            from world import ONE, Operation

            class Stubborn:
                is_closed = False

                def close(self):
                    pass

            def act(w):
                w.keep(Stubborn())
                w.a.prefetch(ONE)

            table = {"planted": Operation(act)}
            fault_sweeps.sweep("lasting", ["planted"], table)
            """
        _, wrong = findings(code)
        assert "stays open" in "".join(wrong)


class TestABrokenDeviceAtTheEnd:
    """The process ends normally, whatever objects are open when all calls fail."""

    OBJECTS = """
        import managedmem
        from managedmem import Device, Host, MigrationPolicy, Stream, emulator
        from lifetime_operations import ForeignResource
        from world import EVERYTHING, World

        w = World()
        w.make_pools()
        w.memory = memoryview(w.a)
        w.capsule = w.b.__dlpack__()
        w.policy = EVERYTHING.applied([w.c])
        w.policy.__enter__()
        w.foreign = ForeignResource().allocate(4096)
        w.queued = w.pool.allocate(4096, stream=w.stream)
        emulator.schedule("lazy")
        w.large.prefetch(Device(0), stream=w.stream)
        emulator.fail("*", code=719, lasting=True)
    """

    @pytest.mark.parametrize("end", ["", "del w", "w.itself = w; del w", "import os; os.fork()"])
    def test_the_end(self, end):
        done = run_python(f"{self.OBJECTS}\n        {end}")
        ignored = [line for line in done.stderr.splitlines() if "Fatal" in line]
        assert not ignored

    def test_each_object_says_what_broke(self):
        done = run_python(
            self.OBJECTS
            + """
        calls = [w.stream.sync, Device(0).sync, w.plan.execute,
                 w.policy.restore, lambda: w.pool.allocate(4096), lambda: managedmem.empty(4096),
                 lambda: w.c.prefetch(Host()), lambda: w.c.fill(1), lambda: list(w.members),
                 lambda: w.own.peer_accessible_by.clear(), w.pool.trim, Stream]
        for call in calls:
            try:
                call()
            except managedmem.CUDAError as error:
                assert error.code == 719, error
            else:
                raise AssertionError(call)
        """
        )
        assert done.stdout == ""
