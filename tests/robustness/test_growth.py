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
                with group.use(stream=stream, access=access):
                    pass
            made.remove(group)""",
    "streams that use a group that stays": """
            with Stream() as other, staying.use(stream=other):
                pass""",
    "streams that use a group for which there is no room": """
            with Stream() as other, large.use(stream=other):
                pass""",
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
    "memories of a trace with a limit": (3000, 5000),
    "names in a trace with a limit": (3000, 5000),
    "residency in a trace with a limit": (1500, 2000),
    "moves in a trace with a limit": (8500, 3500),  # events beyond the limit count in bundles
}

# Bytes of the emulated driver, which knows the handles of contexts and their events for ever.
KEPT = {"contexts that use a group that stays": 160}

pytestmark = [
    pytest.mark.emulator_only("counts the objects of the emulated driver, and its bytes"),
    pytest.mark.skipif(not c_heap.reader(), reason="malloc() counts nothing"),
]


@pytest.mark.parametrize("name", PATTERNS)
def test_nothing_is_left(name, monkeypatch):
    """Of 2,000 rounds or more: 8 bytes of each would be seen."""
    rounds = ROUNDS.get(name, (300, 2000))
    monkeypatch.setenv("GLIBC_TUNABLES", c_heap.KEEP_NO_FREED_BLOCKS)
    run_python(
        f"""
        import ctypes, gc
        import c_heap
        from driver import raw_driver
        from managedmem import *
        PAGE = 4096

        def in_use():
            Device(0).sync()
            gc.collect()
            emulator.clear_calls()
            return c_heap.reader()(), emulator.live().events

        buffer = empty(16 * PAGE)
        stream = Stream()
        made = WorkingSet(4 * PAGE, Device(0))
        groups = [made.add(buffer[2 * i * PAGE :][: 2 * PAGE], "write") for i in range(1, 4)]
        large = made.add(buffer[8 * PAGE :], "write")
        roomy = WorkingSet(4 * PAGE, Device(0)) # in which nothing is dropped
        staying = roomy.add(empty(PAGE), "write")
        driver = raw_driver()
        traced = trace(limit=1000)
        if "trace" in {name!r}:
            traced.start()
        for round in range({sum(rounds)}):
            {PATTERNS[name]}
            if round % 50 == 0:
                emulator.clear_calls()
            if round == {rounds[0]}:
                bytes, events = in_use()
        left, left_events = in_use()
        assert left - bytes < {rounds[1]} * {KEPT.get(name, 8)}, left - bytes
        assert left_events <= events + 8, left_events - events
        """
    )
