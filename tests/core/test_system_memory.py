"""System memory as a target where every device reaches it: discards, beside advise and prefetch.

On the emulated driver these run in processes of their own, because devices of its default profile
do not reach system memory.
"""

import pytest

from programs import run_python

PAGEABLE = "pageable=1"
SETUP = """
import ctypes, mmap
import managedmem as mm
from managedmem import Device, Host, ManagedBuffer, PrefetchPlan, Stream
from outcomes import refusal
PAGE = mmap.PAGESIZE
LOST = 0xDB
def memory(pages=4):
    "Zeroed pages of the system, and a writable memoryview of them."
    return memoryview(mmap.mmap(-1, pages * PAGE))
def fill(view, value=7):
    view[:] = bytes([value]) * len(view)
def byte(view, page):
    values = set(view[page * PAGE : (page + 1) * PAGE])
    return values.pop() if len(values) == 1 else values
def address(view):
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
def refused(error, words, call):
    text = refusal(error, call)
    assert words in text, text
"""


def run(code, emulator=PAGEABLE):
    run_python(SETUP + code, emulator=emulator)


class TestWhereAllDevicesReachIt:
    def test_only_whole_pages_inside_lose_theirs(self):
        run("""
view = memory(); fill(view)
mm.discard(view[100 : 3 * PAGE - 100])
Device().sync()
assert [byte(view, i) for i in range(4)] == [7, LOST, 7, 7]
refused(ValueError, "no whole page", lambda: mm.discard(view[1 : PAGE + 1]))
""")

    def test_discard_prefetch(self):
        run("""
view = memory(); fill(view)
with Stream() as stream, mm.emulator.recording() as calls:
    mm.discard_prefetch(view[100:], Device(1), stream=stream)
    stream.sync()
assert [byte(view, i) for i in range(4)] == [7] + [LOST] * 3
assert sorted(c.name for c in calls if "Prefetch" in c.name) == [
    "cuMemDiscardAndPrefetchBatchAsync", "cuMemPrefetchAsync"]
""")

    def test_in_stream_order(self):
        run("""
view = memory(); fill(view)
mm.emulator.schedule("lazy")
with Stream() as stream:
    mm.discard(view, stream=stream)
    assert byte(view, 0) == 7
    stream.sync()
assert byte(view, 0) == LOST
""")

    def test_beside_managed_memory(self):
        run("""
view = memory(); fill(view)
with mm.empty(4 * PAGE) as buf:
    buf.fill(7)
    mm.discard([buf, view])
    mm.discard_prefetch([view, buf], [Host(), Device(0)])
    assert buf.last_prefetch_location is Device(0)
assert byte(view, 3) == LOST
""")

    def test_of_a_wrapped_pointer(self):
        run("""
view = memory(); fill(view)
buf = ManagedBuffer.from_handle(address(view), len(view), owner=view)
buf[PAGE : 2 * PAGE].discard()
buf.range(3 * PAGE, PAGE).discard_prefetch(Host())
Device().sync()
assert [byte(view, i) for i in range(4)] == [7, LOST, 7, LOST]
""")

    @pytest.mark.parametrize("options", [None, {"src_access_order": "stream"}])
    def test_copies_of_a_wrapped_pointer_are_complete(self, options):
        run(f"""
view = memory(); fill(view)
buf = ManagedBuffer.from_handle(address(view), len(view), owner=view)
with mm.empty(len(view)) as managed, Stream() as stream:
    for copy in (buf.copy_to, buf.copy_from, managed.copy_to, managed.copy_from):
        other = managed if copy.__self__ is buf else buf
        with mm.emulator.recording() as calls:
            copy(other, stream=stream, options={options})
        assert [c.name for c in calls][-2:] == ["cuMemcpyAsync", "cuStreamSynchronize"]
""")

    def test_of_a_numpy_array(self):
        pytest.importorskip("numpy", reason="needs NumPy")
        run("""
import numpy
array = numpy.ones(64 * PAGE, "u1")
mm.discard(array)
Device().sync()
assert (array == LOST).sum() >= 63 * PAGE
array[:] = 1
mm.discard(array[::1].reshape(64, PAGE))
refused(ValueError, "not contiguous", lambda: mm.discard(array[::2]))
""")

    def test_in_a_plan(self):
        run("""
view = memory(); fill(view)
plan = PrefetchPlan([(view[: 2 * PAGE], Device(0)), (view[2 * PAGE :], Host())])
plan.execute()
Device().sync()
assert [byte(view, i) for i in range(4)] == [7] * 4
plan.discard_prefetch()
Device().sync()
assert [byte(view, i) for i in range(4)] == [LOST] * 4
""")

    def test_overlaps_become_one_range(self):
        """In one batch call, their discards and prefetches would have no order."""
        run("""
view = memory(8); fill(view)
with mm.emulator.recording() as calls:
    mm.discard_prefetch([view[: 3 * PAGE], view[2 * PAGE : 5 * PAGE], view[5 * PAGE :]], Device(0))
batch, = [c for c in calls if c.name == "cuMemDiscardAndPrefetchBatchAsync"]
assert batch.args["count"] == 2, batch
Device().sync()
assert [byte(view, i) for i in range(8)] == [LOST] * 8
""")

    @pytest.mark.parametrize(
        ("mode", "byte"), [("poison", 0xDB), ("keep", 7), ("zero", 0)], ids=str
    )
    def test_the_emulator_discards_as_configured(self, mode, byte):
        run(
            f"view = memory(); fill(view); mm.discard(view); Device().sync(); "
            f"assert byte(view, 0) == {byte}\n",
            emulator=f"pageable=1,discard={mode}",
        )

    def test_read_only_objects_are_refused(self):
        """A discard would change immutable objects."""
        run("""
text = b"7" * (8 * PAGE)
view = memory(); fill(view)
for target in (text, memoryview(text), view.toreadonly()):
    for call in (
        lambda: mm.discard(target),
        lambda: mm.discard([view, target]),
        lambda: mm.discard_prefetch(target, Host()),
    ):
        refused(ValueError, "cannot be discarded: it is read-only", call)
    mm.prefetch(target, Device(0))
    plan = PrefetchPlan([(view, Host()), (target, Host())])
    plan.execute()
    refused(ValueError, "entry 1: cannot discard a read-only target", plan.discard_prefetch)
assert text == b"7" * (8 * PAGE)
assert byte(view, 0) == 7
""")

    def test_empty_read_only_objects_are_accepted(self):
        run("""
mm.discard(b"")
mm.discard_prefetch([b"", memory()], Host())
PrefetchPlan([(b"", Host())]).discard_prefetch()
""")

    def test_memory_that_is_gone_when_its_turn_comes(self):
        """The emulated driver must not crash on unmapped or read-only memory."""
        run("""
mapping = mmap.mmap(-1, 4 * PAGE)
view = memoryview(mapping)
mm.emulator.schedule("lazy")
with Stream() as stream:
    mm.discard(view, stream=stream)
    view.release()
    mapping.close()
    stream.sync()
""")

    def test_it_has_no_policy_that_could_be_read(self):
        run("""
view = memory()
refused(ValueError, "system memory", lambda: mm.MigrationPolicy.of(view))
""")

    def test_ranges_at_the_ends_of_the_address_space(self):
        """Nothing is there, but array interfaces can name any address."""
        run("""
class Array:
    def __init__(self, address, size, stride=1):
        self.__cuda_array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,),
                                         "strides": (stride,), "data": (address, False)}
last = Array(2**64 - 100, 50)
with mm.emulator.recording() as calls:
    for call in (
        lambda: mm.discard(last),
        lambda: mm.discard_prefetch(last, Host()),
        PrefetchPlan([(last, Host())]).discard_prefetch,
    ):
        refused(ValueError, "no whole page", call)
assert not [call for call in calls if "Discard" in call.name]
plan = PrefetchPlan([(Array(8, 2, stride=-8), Host())])
assert plan[0].pointer == 0 and plan[0].nbytes == 9
""")


ADVICE = """
from managedmem import MigrationPolicy
NAMES = ["", "set_read", "unset_read", "set_preferred", "unset_preferred", "set_by", "unset_by"]
def ordinal(args):
    return args["id"] if args["type"] == 1 else -1
def given(call):
    "The advice that a call gives: names and ordinals; -1 is the host."
    with mm.emulator.recording() as calls:
        call()
    return [(NAMES[c.args["advice"]], ordinal(c.args)) for c in calls if c.name == "cuMemAdvise"]
view = memory()
buf = ManagedBuffer.from_handle(address(view), len(view), owner=view)
NOTHING = [("unset_preferred", -1), ("unset_read", -1), ("unset_by", 0), ("unset_by", 1),
           ("unset_by", -1)]
SHARED = [*NOTHING[:2], ("set_by", 0), ("unset_by", 1), ("unset_by", -1)]
"""


def run_advice(code, emulator=PAGEABLE + ",devices=2"):
    run(ADVICE + code, emulator=emulator)


class TestAdvice:
    """It cannot be queried, so that all of it is given, each time."""

    def test_a_policy(self):
        run_advice("""
policy = MigrationPolicy.shared([Device(0)])
assert given(lambda: policy.apply(view)) == SHARED
assert given(lambda: policy.apply(buf)) == SHARED
assert given(lambda: policy.apply(view, unsupported="skip")) == SHARED
assert given(lambda: MigrationPolicy.prefer(Host(numa_id=0)).apply(view))[0] == (
    "set_preferred", -1)
""")

    def test_the_end_of_a_block_leaves_none(self):
        run_advice("""
applied = MigrationPolicy.shared([Device(0)]).applied(view)
assert given(applied.__enter__) == SHARED
assert given(applied.restore) == NOTHING
""")

    def test_a_policy_beside_managed_memory(self):
        run_advice("""
with mm.empty(4 * PAGE) as managed:
    managed.read_mostly = True
    with MigrationPolicy.shared([Device(0)]).applied([managed, view]):
        assert MigrationPolicy.of(managed) == MigrationPolicy.shared([Device(0)])
    assert MigrationPolicy.of(managed) == MigrationPolicy.read_duplicated()
""")

    def test_a_policy_that_fails(self):
        run_advice("""
def fails():
    mm.emulator.fail("cuMemAdvise", 3)
    refused(mm.CUDAError, "999", lambda: MigrationPolicy.shared([Device(0)]).apply(view))
assert given(fails) == SHARED[:3] + NOTHING
""")

    def test_accessed_by(self):
        run_advice("""
members = buf.accessed_by
assert given(lambda: members.add(Device(1))) == [("set_by", 1)]
assert given(lambda: members.update([Device(0), Host()])) == [("set_by", 0), ("set_by", -1)]
assert given(lambda: members.discard(Device(1))) == [("unset_by", 1)]
assert given(lambda: members.difference_update([Host()])) == [("unset_by", -1)]
assert given(lambda: members.intersection_update([Host()])) == [("unset_by", 0), ("unset_by", 1)]
assert given(members.clear) == NOTHING[2:]
def assign():
    buf.accessed_by = [Device(0)]
assert given(assign) == [("unset_by", 1), ("unset_by", -1), ("set_by", 0)]
for reads in (lambda: set(members), lambda: members.remove(Host()), members.pop,
              lambda: members.symmetric_difference_update([Host()])):
    assert given(lambda: refused(ValueError, "is system memory", reads)) == []
""")

    def test_an_assignment_that_fails_sets_nothing(self):
        run_advice("""
def assign():
    buf.accessed_by = [Device(0), Device(1)]
def fails():
    mm.emulator.fail("cuMemAdvise", 3)
    refused(mm.CUDAError, "999", assign)
assert given(fails) == [("unset_by", -1), ("set_by", 0), ("set_by", 1), ("unset_by", 0)]
""")

    def test_elsewhere(self):
        run_advice(
            """
policy = MigrationPolicy.shared([Device(0)])
words = "pageable_memory_access (Device(0) lacks it)"
refused(ValueError, words, lambda: policy.apply(view))
refused(ValueError, words, lambda: buf.accessed_by.add(Device(0)))
assert policy.apply(view, unsupported="skip") == 1
""",
            emulator="pageable=0,devices=2",
        )


class TestElsewhere:
    @pytest.mark.parametrize(
        "call",
        [
            "mm.discard(view)",
            "mm.discard_prefetch(view, Device(0))",
            "ManagedBuffer.from_handle(address(view), len(view)).discard()",
        ],
    )
    def test_the_error_names_the_missing_attribute(self, call):
        run(
            f"""
view = memory(); fill(view)
words = "every device has pageable_memory_access (Device(0) lacks it)"
refused(ValueError, words, lambda: {call})
Device().sync()
assert byte(view, 0) == 7
""",
            emulator="pageable=0",
        )

    def test_read_only_views_of_managed_memory_are_refused_too(self, buf):
        import managedmem

        with memoryview(buf) as view, view.toreadonly() as fixed:
            with pytest.raises(ValueError, match="cannot be discarded: it is read-only"):
                managedmem.discard(fixed)
            managedmem.discard(view)
