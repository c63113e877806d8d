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
    "contexts that use a group that stays": """
            context = ctypes.c_void_p()
            assert driver.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
            with Stream() as other, staying.use(stream=other):
                pass
            assert driver.cuCtxDestroy_v2(context) == 0""",
}

# Bytes of the emulated driver, which knows the handles of contexts and their events for ever.
KEPT = {"contexts that use a group that stays": 160}

pytestmark = [
    pytest.mark.emulator_only("counts the objects of the emulated driver, and its bytes"),
    pytest.mark.skipif(not c_heap.reader(), reason="malloc() counts nothing"),
]


@pytest.mark.parametrize("name", PATTERNS)
def test_nothing_is_left(name, monkeypatch):
    """Of 2,000 repetitions behind 300: 8 bytes of each would be seen."""
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
        for round in range(2300):
            {PATTERNS[name]}
            if round % 50 == 0:
                emulator.clear_calls()
            if round == 300:
                bytes, events = in_use()
        left, left_events = in_use()
        assert left - bytes < 2000 * {KEPT.get(name, 8)}, left - bytes
        assert left_events <= events + 8, left_events - events
        """
    )
