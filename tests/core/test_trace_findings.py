"""The findings of a trace, of events that the tests write down."""

import pytest

import managedmem
from canned_recorder import Canned
from constants import MIB

KIB = 1 << 10
GIB = 1 << 30


def of_one(nbytes=8 * MIB, **options):
    """A recording, and the number of its memory "a"."""
    canned = Canned()
    return canned, canned.memory("a", nbytes, **options)


def only_finding(trace):
    (found,) = trace.findings()
    return found


def test_finding_of_bytes_that_arrive(traced):
    canned = Canned()
    canned.move(canned.memory("a", 8 * MIB), 3 * MIB, "to_device", "fault")
    canned.move(0, 4 * MIB, "to_device", "speculative", offset=3 * MIB)
    found = only_finding(traced(canned))
    assert str(found) == (
        "a: 7.0M went to the device by faults.\n"
        "    prefetch(Device(0)) before the work that uses it moves them at the speed of the link."
    )
    assert found.memory.label == "a"
    assert found.evidence == {"to_device": 7 * MIB, "device_faults": 0}


def test_finding_of_bytes_that_return(traced):
    canned, first = of_one()
    canned.move(first, 8 * MIB, "to_device").move(first, 8 * MIB, "to_host", "fault")
    found = only_finding(traced(canned))
    assert found.observation == (
        "a: 8.0M went to the host by faults, and 8.0M to the device as requested."
    )
    assert found.advice.startswith("prefetch(Host()) ")


def test_marks_do_not_hide_bytes_that_turn_back(traced):
    canned, first = of_one()
    for _ in range(3):
        canned.move(first, 8 * MIB, "to_device", "fault").part()
        canned.move(first, 8 * MIB, "to_host", "fault").part()
    trace = traced(canned)
    found = only_finding(trace)
    assert found.observation == (
        "a went to the device and back 3 times (24.0M each way) by faults."
    )
    assert found.evidence["turned_back"] == trace.total.turned_back == 40 * MIB
    assert [part["a"].turned_back for part in trace.slices] == [0] * 7
    assert only_finding(trace.slices[1]).observation == "a: 8.0M went to the host by faults."


@pytest.mark.parametrize(
    ("writes", "faults", "start"),
    [
        (0, True, "No fault of the device was a write. MigrationPolicy.read_duplicated()"),
        (2, True, "It is written (2 faults were writes), so read_mostly would not help"),
        (0, False, "MigrationPolicy.read_duplicated() would copy once if it is only read; else"),
    ],
)
def test_finding_of_bytes_that_turn_back(traced, writes, faults, start):
    canned, first = of_one()
    for _ in range(2):
        canned.move(first, 8 * MIB, "to_device", "fault")
        canned.move(first, 8 * MIB, "to_host", "fault")
    canned.faults(first, writes, access="write").faults(first, 5)
    found = only_finding(traced(canned, faults=faults))
    assert found.observation == (
        "a went to the device and back 2 times (16.0M each way) by faults."
    )
    assert found.advice.startswith(start)
    assert found.evidence["turned_back"] == 24 * MIB


def test_finding_of_a_small_part_that_turns_back(traced):
    canned, first = of_one(64 * MIB)
    for _ in range(10):
        canned.move(first, 2 * MIB, "to_device", "fault").move(first, 2 * MIB, "to_host", "fault")
    assert str(only_finding(traced(canned))) == (
        "a: 2.0M of 64.0M went to the device and back 10 times (20.0M each way) by faults.\n"
        "    preferred_location = Host() and accessed_by.add(Device(0)) let the device use the few "
        "pages in place."
    )


def test_finding_of_contested_pages(traced):
    canned, first = of_one(MIB)
    canned.add("thrashing", first, 4096).add("throttling", first, ms=3)
    assert only_finding(traced(canned)).observation == (
        "a: several processors compete for the same pages: 4.0K thrashed and processors waited "
        "3.000 ms for their turn."
    )


def test_finding_of_evictions(traced):
    canned = Canned()
    canned.add("eviction", canned.memory("a", 8 * MIB), 4 * MIB, source=0, destination=-1)
    found = only_finding(traced(canned))
    assert found.observation == "a: 4.0M were evicted, because a device was full."
    assert found.evidence == {"evicted": 4 * MIB}


def test_requested_moves_leave_nothing_to_gain(traced):
    canned, first = of_one()
    canned.move(first, 8 * MIB, "to_device")
    trace = traced(canned)
    assert trace.findings() == (
        (
            None,
            "All moves were requested, and no processor faulted: there is nothing to gain.",
            {"to_device": 8 * MIB, "to_host": 0, "host_faults": 0, "device_faults": 0},
            "",
        ),
    )
    assert str(trace).endswith("nothing to gain.")
    canned.faults(first, 1)
    assert traced(canned).findings() == ()


def test_requested_moves_that_turn_back_may_be_too_many(traced):
    canned = Canned()
    canned.move(canned.memory("once", 8 * MIB), 8 * MIB, "to_device")
    first = canned.memory("a", 8 * MIB)
    for _ in range(5):
        canned.move(first, 8 * MIB, "to_device").move(first, 8 * MIB, "to_host")
    found = only_finding(traced(canned))
    assert found.observation == (
        "All moves were requested, and no processor faulted. 72.0M went back where they came from."
    )
    assert found.evidence["turned_back"] == 72 * MIB
    assert found.advice == (
        "Leave out prefetches to where nothing uses the memory before it goes back: most of it, "
        "72.0M, is a."
    )


PREFETCH = 1


def prefetch_call(canned, memory):
    return canned.add("call", memory, MIB, cause=PREFETCH, destination=0)


def test_finding_of_a_prefetch_that_moved_nothing(traced):
    canned, first = of_one()
    prefetch_call(canned, canned.memory("moved", MIB)).move(1, MIB, "to_device")
    prefetch_call(canned, first).faults(first, 1)
    canned.add("call", canned.memory("advised", MIB), MIB, cause=0, extra=1)
    canned.part()
    prefetch_call(canned, 1)
    trace = traced(canned)
    found = only_finding(trace)
    assert found.memory.label == "a"
    assert str(found) == (
        "a: prefetches moved nothing.\n"
        "    A prefetch moves nothing if the pages are there already, were never used, or have no "
        "room on the device. residency() before the prefetch shows their places, "
        "and memory_info the room."
    )
    assert found.evidence == {"to_device": 0, "to_host": 0}
    assert [only_finding(part).memory.label for part in trace.slices] == ["a", "moved"]


def test_prefetches_of_many_memories_share_a_finding(traced):
    canned = Canned()
    for number in range(5):
        prefetch_call(canned, canned.memory(f"m{number}", MIB))
    found = only_finding(traced(canned))
    assert found.memory is None
    assert found.observation == "m0, m1, m2 and 2 more: prefetches moved nothing."


@pytest.mark.parametrize(
    ("report", "options"),
    [
        ({"lost": 1}, {}),
        ({"rejected": 1}, {}),
        ({"truncated": True}, {}),
        ({"waited": False}, {}),
        ({}, {"sync": False}),
    ],
)
def test_moves_that_may_be_missing_are_no_finding(traced, report, options):
    canned = Canned(**report)
    prefetch_call(canned, canned.memory("a", MIB))
    assert traced(canned, **options).findings() == ()


def test_small_moves_are_no_finding(traced):
    canned = Canned()
    canned.move(canned.memory("small", 64 * KIB), 60 * KIB, "to_device", "fault")
    canned.move(canned.memory("large", 64 * MIB), MIB, "to_device", "fault")
    assert traced(canned).findings() == ()


def test_the_five_most_costly_findings_are_told(traced):
    canned = Canned()
    for number in (3, 7, 5, 2, 4, 6):
        canned.move(canned.memory(f"m{number}", 64 * MIB), number * MIB, "to_device", "fault")
    labels = [f.memory.label for f in traced(canned).findings()]
    assert labels == ["m7", "m6", "m5", "m4", "m3"]


# --- reads and writes by numpy() ----------------------------------------------------------------

READ_ONCE = "MigrationPolicy.read_duplicated()"
OVERWRITTEN = (
    "if the host overwrites the whole array, discard_prefetch(Host()) of its range before numpy() "
    "moves nothing"
)


def read_in_turn(canned, memory, access="read", rounds=4):
    for _ in range(rounds):
        canned.faults(memory, 3, access=access).move(memory, 8 * MIB, "to_device", "fault")
        canned.move(memory, 8 * MIB, "to_host", "host_view")
    return canned


def test_numpy_reads_as_faults_of_the_host_do(traced):
    canned = Canned()
    read_in_turn(canned, canned.memory("a", 8 * MIB))
    trace = traced(canned)
    assert str(only_finding(trace)) == (
        "a went to the device and back 4 times (32.0M each way) by faults and numpy().\n"
        "    No fault of the device was a write. MigrationPolicy.read_duplicated() would copy once "
        f"if it is only read; {OVERWRITTEN}; else prefetch it before each use."
    )
    assert trace.total.by_cause["host_view"] == (0, 32 * MIB, 0)
    assert "by numpy() 32.0M" in str(trace)


def test_memory_that_a_device_writes_is_read_by_numpy(traced):
    canned, first = of_one()
    read_in_turn(canned, first, "write").faults(first, 1)
    assert only_finding(traced(canned)).advice.startswith("It is written (12 faults were writes)")


def test_no_advice_for_memory_of_pools(traced):
    canned, first = of_one(pooled=True)
    read_in_turn(canned, first).add("thrashing", first, 2 * MIB)
    canned.add("eviction", first, 2 * MIB, source=0, destination=-1)
    trace = traced(canned)
    trace.name((trace["a"].address, 8 * MIB), "part")
    for label in ("a", "part"):
        texts = [f.advice for f in trace.findings()]
        assert len(texts) == 3
        for word in ("read_duplicated", "read_mostly", "preferred_location", "accessed_by"):
            assert not any(word in text for text in texts), (label, texts)


def test_memory_of_pools_has_no_small_part(traced):
    canned, first = of_one(64 * MIB, pooled=True)
    for _ in range(4):
        canned.move(first, 2 * MIB, "to_device", "fault").move(first, 2 * MIB, "to_host", "fault")
    assert only_finding(traced(canned)).advice == (
        "Prefetch it before each use. Drivers refuse advice on memory of pools."
    )


def test_memory_of_others_may_be_from_a_pool(traced):
    canned = Canned()
    read_in_turn(canned, canned.memory("a", 8 * MIB, "foreign"))
    advice = only_finding(traced(canned)).advice
    assert READ_ONCE in advice
    assert advice.endswith(" Drivers refuse advice on memory of pools.")


def test_read_mostly_is_not_advised_twice(traced):
    canned, first = of_one()
    read_in_turn(canned, first).add("duplicate", first, 8 * MIB)
    assert only_finding(traced(canned)).advice == "Prefetch it before each use."


@pytest.mark.parametrize("born", [0, 1])
def test_numpy_may_bring_what_is_overwritten(traced, born):
    canned, first = of_one(born=born)
    canned.move(first, 8 * MIB, "to_device").move(first, 8 * MIB, "to_host", "host_view")
    assert str(only_finding(traced(canned))) == (
        "a: 8.0M went to the host for numpy(), and 8.0M to the device as requested.\n"
        f"    {OVERWRITTEN[0].upper()}{OVERWRITTEN[1:]}."
    )


def test_numpy_reads_what_a_device_made(traced):
    written, made, small = (Canned() for _ in range(3))
    first = written.memory("a", 8 * MIB)
    written.move(first, 8 * MIB, "to_host", "host_view").faults(first, 1, access="write")
    first = made.memory("a", 8 * MIB, born=1)
    made.move(first, 8 * MIB, "to_host", "host_view")
    first = small.memory("a", MIB)
    small.move(first, MIB, "to_host", "host_view")
    for canned in (written, made, small):
        assert traced(canned).findings() == ()


@pytest.mark.parametrize("pooled", [False, True])
def test_numpy_and_prefetches_in_rounds(traced, pooled):
    canned, first = of_one(pooled=pooled)
    for _ in range(3):
        canned.move(first, 8 * MIB, "to_device").move(first, 8 * MIB, "to_host", "host_view")
    found = only_finding(traced(canned))
    text = "if a device overwrites it, discard_prefetch(Device(0)) in place of prefetch() moves"
    assert text in found.advice
    assert (READ_ONCE in found.advice) is not pooled


def test_moves_of_numpy_beside_requests(traced):
    canned = Canned()
    first, second = canned.memory("a", 8 * MIB), canned.memory("b", MIB, born=1)
    canned.move(first, 8 * MIB, "to_device").move(second, MIB, "to_host", "host_view")
    assert only_finding(traced(canned)).observation == (
        "All moves were requested or those of numpy(), and no processor faulted: there is nothing "
        "to gain."
    )


def test_calls_of_numpy_are_no_prefetches(traced):
    canned = Canned()
    canned.add("call", canned.memory("a", MIB), MIB, cause=4, destination=-1)
    trace = traced(canned)
    assert trace.findings() == ()
    assert [event.cause for event in trace.events("call")] == ["host_view"]


# --- outputs ------------------------------------------------------------------------------------


def written_output(canned, memory, nbytes=8 * MIB, access="write", direction="to_device"):
    canned.faults(memory, 4, access=access).move(memory, nbytes // 2, direction, "fault")
    return canned.move(memory, nbytes // 2, direction, "speculative", offset=nbytes // 2)


OUTPUT = (
    "No fault of the device was a read: if it overwrites all of it, discard_prefetch(Device(0)) "
    "before that brings pages without their contents; else prefetch(Device(0)) moves them at the "
    "speed of the link."
)


@pytest.mark.parametrize("back", [None, "fault", "host_view"])
def test_finding_of_an_output(traced, back):
    canned, first = of_one()
    for _ in range(2):
        written_output(canned, first)
        if back:
            canned.move(first, 4 * MIB, "to_host", back)
            canned.move(first, 4 * MIB, "to_host", back, offset=4 * MIB)
    trace = traced(canned)
    assert only_finding(trace).advice == OUTPUT
    trace.name((trace["a"].address, 4 * MIB), "half")
    half, rest = (
        next(f for f in trace.findings() if f.memory.label == label)
        for label in ("half", "a (rest)")
    )
    assert half.advice == OUTPUT
    assert rest.advice != OUTPUT


def test_outputs_with_one_label(traced):
    canned = Canned()
    for _ in range(3):
        written_output(canned, canned.memory("a", 8 * MIB))
    assert only_finding(traced(canned)).advice == OUTPUT
    canned.faults(canned.memory("a", 8 * MIB), 1, access="write")
    assert only_finding(traced(canned)).advice != OUTPUT


@pytest.mark.parametrize(
    "odd", ["read", "atomic", "part", "no faults", "limit", "lost", "duplicates", "two devices"]
)
def test_what_is_no_output(traced, odd):
    canned = Canned(truncated=odd == "limit", fault_overflows=int(odd == "lost"))
    first = canned.memory("a", 8 * MIB)
    if odd == "part":
        written_output(canned, first, 6 * MIB)
    else:
        written_output(canned, first)
    if odd in ("read", "atomic"):
        canned.faults(first, 1, access=odd)
    elif odd == "duplicates":
        canned.add("duplicate", first, MIB)
    elif odd == "two devices":
        if managedmem.Device.count() < 2:
            pytest.skip("needs two devices")
        canned.add("device_fault", first, source=1, access="write")
    found = only_finding(traced(canned, faults=odd != "no faults"))
    device = "device" if odd == "two devices" else "Device(0)"
    assert found.advice == (
        f"prefetch({device}) before the work that uses it moves them at the speed of the link."
    )


# --- HTML ---------------------------------------------------------------------------------------
