"""The warnings about memory that devices, or devices and the host together, cannot hold."""

import textwrap

import pytest

from programs import run_python

pytestmark = pytest.mark.emulator_only

PRELUDE = """
import warnings
import managedmem
from managedmem import *
from managedmem import _oversubscription as check, emulator

MIB = 1 << 20
ZERO, ONE = Device.all()
check.host_available, check.host_limit = lambda: 40 * MIB, lambda: 64 * MIB

def warned(act):
    "The texts of the warnings of a call, from this line again."
    check._warned.clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        act()
    assert all(each.category is UserWarning and each.filename == "<string>" for each in seen)
    return [str(each.message) for each in seen]

large, half, other = (managedmem.empty(n * MIB) for n in (20, 10, 9))
policy = MigrationPolicy.prefer(ZERO)
"""


def run(program):
    """Devices of 16 MiB, and a host of 64 MiB, of which 40 MiB are available."""
    code = PRELUDE + textwrap.dedent(program)
    return run_python(code, emulator="devices=2,capacity_mib=16").stdout


OVERFILLING = [
    "large.prefetch(ZERO)",
    "large.discard_prefetch(ZERO)",
    "setattr(large, 'preferred_location', ZERO)",
    "managedmem.prefetch([half, other], ZERO)",
    "managedmem.discard_prefetch([half, other], ZERO)",
    "managedmem.prefetch([half, other], ZERO, unsupported='skip')",
    "managedmem.advise([half, other], 'set_preferred_location', ZERO)",
    "policy.apply([half, other])",
    "policy.apply([half, other], unsupported='skip')",
    "policy.applied(large).__enter__()",
    "PrefetchPlan([(half, ZERO), (other, ZERO)]).execute()",
    "PrefetchPlan([(half, ZERO), (other, ZERO)]).discard_prefetch()",
    "managedmem.empty(17 * MIB, prefetch=ZERO)",
    "managedmem.zeros(17 * MIB, policy=policy)",
]


@pytest.mark.parametrize("act", OVERFILLING)
def test_a_device_that_is_to_hold_more_than_it_has(act):
    assert run(f"print(*warned(lambda: {act}))").startswith("Device(0) is to hold ")


@pytest.mark.parametrize("act", OVERFILLING)
def test_a_warning_that_is_an_error_comes_before_any_change(act):
    out = run(f"""
        def state():
            pages = [buffer.page_runs() for buffer in (large, half, other)]
            return pages, managedmem.memory_stats().managed.nbytes
        before = state()
        warnings.simplefilter("error")
        try:
            {act}
        except UserWarning as error:
            print(error)
        assert state() == before
    """)
    assert out.startswith("Device(0) is to hold ")


@pytest.mark.parametrize(
    "act",
    [
        "large[: 16 * MIB].prefetch(ZERO)",
        "large.prefetch(Host())",
        "large.discard()",
        "setattr(large, 'preferred_location', Host())",
        "managedmem.prefetch([half, half, half[: 4 * MIB]], ZERO)",  # bytes that are shared
        "managedmem.prefetch([half, other], [ZERO, ONE])",
        "managedmem.advise([half, other], 'set_accessed_by', ZERO)",
        "managedmem.advise([half, other], 'set_read_mostly')",
        "MigrationPolicy(accessed_by=[ZERO]).apply([half, other])",
        "MigrationPolicy.prefer(Host()).apply([half, other])",
        "PrefetchPlan.fit([half, other], ZERO).execute()",
        "managedmem.empty(20 * MIB)",
        "managedmem.empty(20 * MIB, prefetch=Host())",
    ],
)
def test_what_fits_is_no_warning(act):
    assert run(f"print(warned(lambda: {act}))") == "[]\n"


def test_what_the_driver_refuses_is_an_error_and_no_warning():
    assert run(
        """
        import pytest
        def allocate(**options):
            with pytest.raises(MemoryError):
                managedmem.empty(1 << 50, **options)
        print(warned(allocate), warned(lambda: allocate(policy=policy, prefetch=ZERO)))
        """
    ) == ("[] []\n")


def test_the_text_has_the_sums():
    assert run("print(*warned(lambda: managedmem.prefetch([half, other], ONE)))") == (
        "Device(1) is to hold 19,922,944 bytes of managed memory, and has 16,777,216 in all: "
        "3,145,728 of them find no room, or drive others out. Give less, use PrefetchPlan.fit(), "
        "or a ManagedWorkingSet\n"
    )


def test_an_allocation_that_devices_and_host_have_no_room_for():
    """The machine has 96 MiB in all; 39 live."""
    assert run(
        """
        kept = []
        def allocate(size, **options):
            return warned(lambda: kept.append(managedmem.empty(size * MIB, **options)))
        assert not allocate(57)
        print(*allocate(1))
        kept.clear()
        pool = ManagedMemoryResource(pooled=True)
        assert not warned(lambda: kept.append(pool.allocate(57 * MIB)))
        assert "1,048,576 bytes, beside 100,663,296" in warned(lambda: pool.allocate(MIB))[0]
        kept.clear()
        check.host_available = lambda: 0
        for each in (large, half, other):
            each.close()
        check.host_limit = lambda: 1 << 40
        assert "and 0 of 1,099,511,627,776 are available" in allocate(300)[0]
        """
    ) == (
        "an allocation of 1,048,576 bytes, beside 100,663,296 bytes of managed memory, makes "
        "101,711,872 bytes. The devices have 33,554,432 bytes, and 41,943,040 of 67,108,864 are "
        "available on the host, so not all of it can be used at once: free memory first, or "
        "allocate less\n"
    )


def test_the_host_is_looked_at_seldom_while_there_is_room():
    assert run(
        """
        looks = []
        check.host_available = lambda: looks.append(1) or 1 << 40
        check.host_limit = lambda: 1 << 40
        kept = [managedmem.empty(MIB) for _ in range(100)]
        print(len(looks))
        """
    ) == ("1\n")


def test_devices_that_share_the_memory_of_the_host_add_none():
    code = PRELUDE + "print(len(warned(lambda: managedmem.empty(30 * MIB))))"
    settings = "devices=2,capacity_mib=16,integrated=1"
    assert run_python(code, emulator=settings).stdout == "1\n"


def test_each_line_warns_once_and_errors_refuse_every_call():
    run(
        """
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for part in (large, large[: 18 * MIB]):
                part.prefetch(ZERO)
            large.prefetch(ZERO)
        assert len(seen) == 2
        plan = PrefetchPlan([(half, ONE), (other, ONE)])
        warnings.simplefilter("error")
        for act in (
            lambda: large.prefetch(ONE),
            lambda: managedmem.prefetch([half, other], ONE),
            plan.execute,
            lambda: managedmem.empty(1 << 40),
        ):
            for _ in range(2):
                emulator.clear_calls()
                try:
                    act()
                except UserWarning:
                    assert not {"cuMemPrefetchAsync", "cuMemAllocManaged"} & {
                        call.name for call in emulator.calls()
                    }
                else:
                    raise AssertionError("it was not refused")
        """
    )
