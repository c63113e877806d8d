"""What is dead leaves nothing behind: neither bytes of the C heap nor objects of the driver."""

import pytest

import c_heap
from programs import run_python

# Each is run again and again. `made` is what was made before, by one of BEFORE.
PATTERNS = {
    "groups that are added and removed": "made.remove(made.add(buffer[: 2 * PAGE], 'write'))",
    "groups that are used once": """
            group = made.add(buffer[: 2 * PAGE], "write")
            for access in ("read", "write"):
                with group.use(stream=stream, access=access) as use:
                    use.arrays
            made.remove(group)""",
    "streams that use a group that stays": """
            with Stream() as other, staying.use(stream=other):
                pass""",
    "streams that use a group for which there is no room": """
            with Stream() as other, large.use(stream=other):
                pass""",
    "arrays that outlive their use": """
            use = staying.use(stream=stream)
            late = use.arrays
            use.close()
            del use, late""",
    "blocks of the host": """
            with staying.use_on_host(access="write") as home:
                home""",
    "orders": "made.order = groups * 2 if round % 2 else None",
    "sets": """
            with WorkingSet(PAGE, Device(0)) as other, other.add(buffer[:PAGE], "write").use():
                pass
            del other
            gc.collect()""",
    "groups of managed memory": """
            group = managed.add([buffer[: 2 * PAGE], buffer[2 * PAGE : 3 * PAGE]], "write")
            with group.use(stream=stream):
                pass
            managed.remove(group)""",
    "memories of a trace with a limit": "empty(PAGE).close()",
    "names in a trace with a limit": """
            wrapped = ManagedBuffer.from_handle(buffer.handle, PAGE, owner=buffer)
            wrapped.name = f"number {round}"
            buffer.name = f"number {round}" """,
    "moves in a trace with a limit": """
            with Stream() as other:
                buffer.prefetch(Device(0), stream=other)
                buffer.prefetch(Host(), stream=other)""",
    "residency in a trace with a limit": """
            empty(PAGE).close()
            buffer.residency()""",
    "contexts that use a group that stays": """
            context = ctypes.c_void_p()
            assert driver.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
            with Stream() as other, staying.use(stream=other):
                pass
            assert driver.cuCtxDestroy_v2(context) == 0""",
}

# Rounds before the bytes are counted, and after.
ROUNDS = {
    "sets": (100, 500),
    "memories of a trace with a limit": (3000, 5000),
    "names in a trace with a limit": (3000, 5000),
    "residency in a trace with a limit": (1500, 2000),
    "moves in a trace with a limit": (8500, 3500),  # events beyond the limit count in bundles
}

PARTS = 4  # in which bytes are counted

# Bytes of the emulated driver, which knows the handles of contexts and their events for ever.
KEPT = {"contexts that use a group that stays": 160}

pytestmark = [
    pytest.mark.emulator_only("counts the objects of the emulated driver, and its bytes"),
    pytest.mark.skipif(not c_heap.reader(), reason="malloc() counts nothing"),
]


@pytest.mark.parametrize("name", PATTERNS)
def test_nothing_is_left(name, monkeypatch):
    """Over 2,000 rounds or more: 8 bytes from each would be seen.

    Python's tables of strings and such grow at once in one of the parts.
    """
    rounds = ROUNDS.get(name, (300, 2000))
    monkeypatch.setenv("GLIBC_TUNABLES", c_heap.KEEP_NO_FREED_BLOCKS)
    run_python(f"""
        import ctypes, gc, time
        from itertools import pairwise
        import c_heap
        from driver import raw_driver
        from managedmem import *
        PAGE = 4096

        def counted():
            Device(0).sync()
            gc.collect()
            emulator.clear_calls()
            return c_heap.reader()(), emulator.live().events

        def in_use():
            "What stays when the thread of the trace has read what waits for it."
            before = None
            while before != (now := counted()):
                before = now
                time.sleep(0.02)
            return now

        buffer = empty(16 * PAGE)
        stream = Stream()
        made = WorkingSet(4 * PAGE, Device(0))
        groups = [made.add(buffer[2 * i * PAGE :][: 2 * PAGE], "write") for i in range(1, 4)]
        large = made.add(buffer[8 * PAGE :], "write")
        roomy = WorkingSet(4 * PAGE, Device(0)) # in which nothing is dropped
        staying = roomy.add(empty(PAGE), "write")
        managed = ManagedWorkingSet(4 * PAGE, Device(0))
        driver = raw_driver()
        found = []
        traced = trace(limit=1000)
        if "trace" in {name!r}:
            traced.start()
        for round in range({sum(rounds)}):
            {PATTERNS[name]}
            if round % 50 == 0:
                emulator.clear_calls()
            if round >= {rounds[0]} and (round - {rounds[0]}) % {rounds[1] // PARTS} == 0:
                found.append(in_use())
        left, events = zip(*found, in_use())
        grown = [after - before for before, after in pairwise(left)]
        assert min(grown) < {rounds[1] // PARTS} * {KEPT.get(name, 8)}, grown
        assert events[-1] <= events[0] + 8, events
    """)


def test_adding_takes_no_longer_in_a_large_set():
    """Of managed memory; the emulated driver looks through a list of all page-locked memory."""
    run_python("""
        import time
        from managedmem import *

        buffer = empty(4096)
        working = ManagedWorkingSet(1 << 20, Device(0))

        def seconds():
            found = []
            for _ in range(5):
                start = time.perf_counter()
                for _ in range(100):
                    working.add(buffer)
                found.append(time.perf_counter() - start)
            return min(found)

        first = seconds()
        for _ in range(3000):
            working.add(buffer)
        assert seconds() < 5 * first + 0.005
    """)
