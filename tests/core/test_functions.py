"""advise, prefetch, discard and discard_prefetch as functions: targets, locations, dispatch."""

import collections
import contextlib
import itertools
import random
import textwrap

import pytest

import managedmem
from constants import EMULATED, MIB, PAGE
from contents import contents, pattern, write
from foreign_objects import CudaArray, numpy_bool
from identifiers import label
from live_memory import settle
from managedmem import Device, Host, emulator
from programs import run_python

LOCATED = {
    "advise": lambda t, where: managedmem.advise(t, "set_preferred_location", where),
    "prefetch": managedmem.prefetch,
    "discard_prefetch": managedmem.discard_prefetch,
}
located = pytest.mark.parametrize("function", LOCATED.values(), ids=LOCATED)
EVERY = {
    "advise": lambda t: managedmem.advise(t, "set_read_mostly"),
    "prefetch": lambda t: managedmem.prefetch(t, Host()),
    "discard": managedmem.discard,
    "discard_prefetch": lambda t: managedmem.discard_prefetch(t, Host()),
}
every = pytest.mark.parametrize("function", EVERY.values(), ids=EVERY)
DISPATCH = ["auto", "loop", "batch"]


def where_is(function, target):
    """Where the function under test put the target."""
    Device().sync()
    if function is LOCATED["advise"]:
        return target.preferred_location
    return target.last_prefetch_location


def pages(buffer, *numbers):
    return [buffer[n * PAGE : (n + 1) * PAGE] for n in numbers]


@located
class TestOneTarget:
    def test_a_buffer(self, buf, device0, function):
        assert function(buf, device0) is None
        assert where_is(function, buf) is device0

    def test_a_slice(self, buf, device0, function):
        function(buf[PAGE : 3 * PAGE], device0)
        found = [where_is(function, page) for page in pages(buf, 0, 1, 2, 3)]
        assert found == [None, device0, device0, None]

    def test_a_typed_view(self, buf, device0, function):
        function(buf.view("float32", (MIB // PAGE, PAGE // 4))[:1], device0)
        assert [where_is(function, p) for p in pages(buf, 0, 1)] == [device0, None]

    def test_an_object_with_the_cuda_array_interface(self, buf, device0, function):
        function(CudaArray(buf, shape=(2, PAGE), offset=PAGE), device0)
        found = [where_is(function, page) for page in pages(buf, 0, 1, 2, 3)]
        assert found == [None, device0, device0, None]

    def test_item_size_counts(self, buf, device0, function):
        function(CudaArray(buf, shape=(PAGE // 4,), typestr="<f4"), device0)
        assert [where_is(function, p) for p in pages(buf, 0, 1)] == [device0, None]

    def test_a_numpy_view(self, buf, device0, function):
        numpy = pytest.importorskip("numpy", reason="needs NumPy")
        array = numpy.frombuffer(buf, dtype="float32")[PAGE // 4 : 2 * PAGE // 4]
        function(array, device0)
        assert [where_is(function, p) for p in pages(buf, 0, 1, 2)] == [None, device0, None]

    def test_an_array_from_a_memoryview(self, buf, device0, function):
        numpy = pytest.importorskip("numpy", reason="needs NumPy")
        function(numpy.asarray(memoryview(buf)).reshape(64, -1), device0)
        assert where_is(function, buf) is device0

    def test_every_location(self, buf, members, function):
        for member in members:
            function(buf, member)
            assert where_is(function, buf) is member

    @pytest.mark.parametrize("host", [Host(0), Host.numa_current()], ids=label)
    def test_a_numa_host(self, buf, function, host):
        function(buf, host)
        if function is LOCATED["advise"]:  # a one-node driver forgets the node
            assert where_is(function, buf) in {Host(), None, *(Host(n) for n in range(64))}
        else:
            assert where_is(function, buf) is host

    def test_a_list_of_locations_needs_a_list_of_targets(self, buf, device0, function):
        with pytest.raises(TypeError, match="Device or Host"):
            function(buf, [device0])
        assert where_is(function, buf) is None
        function([buf], [device0])
        assert where_is(function, buf) is device0


@located
class TestSeveralTargets:
    @pytest.mark.parametrize("kind", [list, tuple])
    def test_one_location_for_all(self, buf, device0, function, kind):
        function(kind(pages(buf, 0, 2, 4)), device0)
        found = [where_is(function, page) for page in pages(buf, 0, 1, 2, 3, 4)]
        assert found == [device0, None, device0, None, device0]

    @pytest.mark.parametrize(
        "kind", [list, tuple, iter, lambda p: (each for each in p), collections.deque]
    )
    def test_a_location_each(self, buf, members, function, kind):
        wanted = [members[i % len(members)] for i in range(8)]
        function(pages(buf, *range(8)), kind(wanted))
        assert [where_is(function, page) for page in pages(buf, *range(8))] == wanted

    def test_several_allocations(self, alloc, members, function):
        buffers = [alloc(2 * MIB) for _ in members]
        function(buffers, members)
        assert [where_is(function, buffer) for buffer in buffers] == members

    def test_targets_of_different_kinds(self, alloc, device0, function):
        numpy = pytest.importorskip("numpy", reason="needs NumPy")
        buffers = [alloc(MIB) for _ in range(3)]
        targets = [buffers[0], CudaArray(buffers[1]), numpy.frombuffer(buffers[2], dtype="u1")]
        function(targets, device0)
        assert [where_is(function, buffer) for buffer in buffers] == [device0] * 3
        del targets

    def test_the_same_target_twice(self, buf, device0, function):
        function([buf, buf], device0)
        assert where_is(function, buf) is device0

    def test_ranges_in_any_order(self, buf, members, function):
        order = list(range(16))
        random.Random(4).shuffle(order)
        wanted = [members[n // 4 % len(members)] for n in order]
        function(pages(buf, *order), wanted)
        assert [where_is(function, page) for page in pages(buf, *order)] == wanted
        assert where_is(function, buf[16 * PAGE :]) is None

    @pytest.mark.parametrize(("targets", "places"), [(1, 2), (2, 1), (2, 3), (3, 2), (2, 0)])
    def test_other_lengths_are_a_value_error(self, buf, device0, function, targets, places):
        with pytest.raises(ValueError, match="length"):
            function(pages(buf, *range(targets)), [device0] * places)
        assert where_is(function, buf[:PAGE]) is None

    def test_a_generator_without_end_has_another_length(self, buf, device0, function):
        with pytest.raises(ValueError, match="length 3 or more, but there are 2 targets"):
            function(pages(buf, 0, 1), itertools.cycle([device0]))
        assert where_is(function, buf[:PAGE]) is None

    def test_the_exception_of_a_generator(self, buf, device0, function):
        with pytest.raises(ZeroDivisionError):
            function(pages(buf, 0, 1), (1 // n and device0 for n in (1, 0)))
        assert where_is(function, buf[:PAGE]) is None

    @pytest.mark.parametrize("bad", [0, None, "cpu"], ids=label)
    def test_one_bad_location_stops_all(self, buf, device0, function, bad):
        with pytest.raises(ValueError if bad is None else TypeError, match=r"^location\[1\]: "):
            function(pages(buf, 0, 1, 2), [device0, bad, device0])
        assert [where_is(function, page) for page in pages(buf, 0, 1, 2)] == [None] * 3

    @pytest.mark.parametrize("kind", [list, tuple, iter])
    def test_one_target_takes_one_location(self, buf, device0, function, kind):
        for places in ([device0], [device0, device0], []):
            with pytest.raises(TypeError, match="targets is a single target"):
                function(buf, kind(places))
        assert where_is(function, buf) is None

    @pytest.mark.parametrize("kind", [set, frozenset])
    def test_a_set_of_locations_has_no_order(self, buf, device0, function, kind):
        with pytest.raises(TypeError, match=r"a set, which has no order: .* one for each target"):
            function(pages(buf, 0, 1), kind([device0, Host()]))
        with pytest.raises(TypeError, match=r"got .*\}\)?: pass one location, not several$"):
            function(buf, kind([device0]))
        assert where_is(function, buf) is None


@every
class TestTargets:
    @pytest.mark.parametrize("nothing", [list, tuple, set, dict, lambda: iter(())], ids=label)
    def test_an_empty_list_is_nothing_to_do(self, function, nothing):
        with emulator.recording() if EMULATED else contextlib.nullcontext([]) as calls:
            assert function(nothing()) is None
        assert not [c for c in calls if c.function.startswith(("cuMemAdvise", "cuMemPrefetch"))]

    @pytest.mark.parametrize(
        "bad", [None, 7, 1.5, object(), "buffer", Host(), Device(0)], ids=label
    )
    def test_what_is_no_target(self, function, bad):
        with pytest.raises(TypeError):
            function(bad)

    @pytest.mark.parametrize("place", [0, 1, 2])
    @pytest.mark.parametrize("bad", [None, 7, object(), "x"], ids=label)
    def test_one_bad_target_stops_all(self, buf, function, place, bad):
        data = write(buf, pattern(buf.size))
        targets = [*pages(buf, 0, 2)]
        targets.insert(place, bad)
        with pytest.raises(TypeError):
            function(targets)
        assert contents(buf) == data
        assert buf[:PAGE].last_prefetch_location is None
        assert buf[:PAGE].read_mostly is False

    def test_a_closed_buffer_among_them_stops_all(self, buf, alloc, function):
        closed = alloc(PAGE)
        closed.close()
        with pytest.raises(RuntimeError, match="closed"):
            function([buf, closed])
        assert buf.last_prefetch_location is None
        assert buf.read_mostly is False

    def test_the_keys_of_a_dict_are_no_targets(self, buf, function):
        with pytest.raises(
            TypeError, match=r"targets\[0\]: .*got 'a'\. .*: pass the values\(\) of the dict"
        ):
            function({"a": buf})
        with pytest.raises(TypeError, match=r"got 7$"):
            function([7])


class TestStrided:
    """4 rows of one page each, a page apart."""

    @pytest.fixture
    def rows(self, buf):
        return CudaArray(buf, shape=(4, PAGE), strides=(2 * PAGE, 1))

    @located
    def test_the_extent_is_covered(self, buf, rows, device0, function):
        if function is managedmem.discard_prefetch:
            with pytest.raises(ValueError, match="contiguous"):
                function(rows, device0)
            assert buf.last_prefetch_location is None
            return
        function(rows, device0)
        assert where_is(function, buf[: 7 * PAGE]) is device0
        assert where_is(function, buf[7 * PAGE :]) is None

    def test_discard_would_destroy_the_gaps(self, buf, rows):
        data = write(buf, pattern(buf.size))
        with pytest.raises(ValueError, match="contiguous"):
            managedmem.discard(rows)
        with pytest.raises(ValueError, match="contiguous"):
            managedmem.discard([buf[:PAGE], rows])
        assert contents(buf) == data

    def test_broadcasting_does_not_fill_the_gaps(self, buf):
        """As many elements as the extent has bytes, but they lie on pages 0 and 5 only."""
        data = write(buf, pattern(buf.size))
        array = CudaArray(buf, shape=(2, 3, PAGE), strides=(5 * PAGE, 0, 1))
        with pytest.raises(ValueError, match="contiguous"):
            managedmem.discard(array)
        assert contents(buf) == data

    def test_strides_of_a_contiguous_array_are_fine(self, buf, device0):
        array = CudaArray(buf, shape=(MIB // PAGE, PAGE // 4), strides=(PAGE, 4), typestr="<f4")
        managedmem.discard_prefetch(array, device0)
        assert where_is(managedmem.prefetch, buf) is device0

    def test_axes_of_one_element_do_not_count(self, buf, device0):
        array = CudaArray(buf, shape=(1, PAGE), strides=(12345, 1))
        managedmem.discard_prefetch(array, device0)
        assert where_is(managedmem.prefetch, buf[:PAGE]) is device0

    def test_transposed_is_still_without_gaps(self, buf, device0):
        array = CudaArray(buf, shape=(PAGE // 64, 128), strides=(1, PAGE // 64))
        managedmem.prefetch(array, device0)
        assert where_is(managedmem.prefetch, buf[: 2 * PAGE]) is device0

    def test_negative_strides_reach_backwards(self, buf, device0):
        array = CudaArray(buf, shape=(2 * PAGE,), strides=(-1,), offset=4 * PAGE - 1)
        managedmem.prefetch(array, device0)
        found = [where_is(managedmem.prefetch, p) for p in pages(buf, 1, 2, 3, 4)]
        assert found == [None, device0, device0, None]

    def test_numpy_slices_with_a_step(self, buf, device0):
        numpy = pytest.importorskip("numpy", reason="needs NumPy")
        array = numpy.frombuffer(buf, dtype="u1")[: 8 * PAGE].reshape(8, PAGE)[::2]
        managedmem.prefetch(array, device0)
        assert where_is(managedmem.prefetch, buf[: 7 * PAGE]) is device0
        with pytest.raises(ValueError, match="contiguous"):
            managedmem.discard(array)
        del array


class TestDispatch:
    @pytest.mark.parametrize("dispatch", DISPATCH)
    @pytest.mark.parametrize("stream_kind", ["default", "own"])
    def test_every_way_prefetches_the_same(self, buf, members, stream, dispatch, stream_kind):
        wanted = [members[i % len(members)] for i in range(8)]
        chosen = stream if stream_kind == "own" else None
        targets = pages(buf, *range(0, 16, 2))
        managedmem.prefetch(targets, wanted, stream=chosen, dispatch=dispatch)
        Device().sync()
        assert [t.last_prefetch_location for t in targets] == wanted
        assert buf[PAGE : 2 * PAGE].last_prefetch_location is None

    @pytest.mark.parametrize("dispatch", DISPATCH)
    def test_every_way_keeps_the_bytes(self, buf, device0, dispatch):
        data = write(buf, pattern(buf.size))
        managedmem.prefetch(pages(buf, 0, 2, 5, 6), device0, dispatch=dispatch)
        assert contents(buf) == data

    @pytest.mark.parametrize("dispatch", ["auto", "batch"])
    def test_discard_and_discard_prefetch(self, buf, device0, dispatch):
        data = write(buf, pattern(buf.size))
        managedmem.discard(pages(buf, 0, 2), dispatch=dispatch)
        managedmem.discard_prefetch(pages(buf, 4, 6), device0, dispatch=dispatch)
        seen = contents(buf)
        for kept in (1, 3, 5):
            assert seen[kept * PAGE : (kept + 1) * PAGE] == data[kept * PAGE : (kept + 1) * PAGE]
        assert [p.last_prefetch_location for p in pages(buf, 4, 6)] == [device0] * 2

    @pytest.mark.parametrize(
        "call",
        [
            lambda b, d: managedmem.prefetch(b, Host(), dispatch=d),
            lambda b, d: managedmem.discard(b, dispatch=d),
            lambda b, d: managedmem.discard_prefetch(b, Host(), dispatch=d),
        ],
        ids=["prefetch", "discard", "discard_prefetch"],
    )
    def test_another_word_is_a_value_error_that_lists_them(self, buf, call):
        with pytest.raises(ValueError, match=r"(?s)auto.*batch.*loop|auto.*loop.*batch"):
            call(buf, "fastest")
        with pytest.raises((TypeError, ValueError)):
            call(buf, 1)
        assert buf.last_prefetch_location is None


class TestDefer:
    @pytest.mark.parametrize("defer", [None, True, False])
    @pytest.mark.parametrize("size", [PAGE, 64 * MIB])
    def test_ends_in_the_same_place(self, alloc, device0, stream, defer, size):
        buffer = alloc(size)
        write(buffer[:PAGE], 9)
        managedmem.prefetch(buffer, device0, stream=stream, defer=defer)
        stream.sync()
        assert buffer.last_prefetch_location is device0
        assert contents(buffer[:PAGE]) == b"\x09" * PAGE

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("name", ["bool", "bool_"])
    @pytest.mark.parametrize("value", [True, False])
    def test_takes_bools_of_numpy(self, buf, device0, stream, value, name):
        defer = numpy_bool(value, name)
        for call in (
            lambda: buf.prefetch(device0, stream=stream, defer=defer),
            lambda: buf.discard_prefetch(device0, stream=stream, defer=defer),
            lambda: managedmem.prefetch([buf], device0, stream=stream, defer=defer),
            lambda: managedmem.PrefetchPlan([(buf, device0)]).execute(stream=stream, defer=defer),
        ):
            with emulator.recording() as calls:
                call()
            assert [c.name for c in calls].count("cuLaunchHostFunc") == value

    @pytest.mark.parametrize(
        "bad",
        [1, 0, "yes", 1.0, numpy_bool(True, "int64")],
        ids=["1", "0", "text", "float", "another type"],
    )
    def test_other_values_are_a_type_error(self, buf, device0, bad):
        with pytest.raises(TypeError, match="defer must be None, True or False"):
            managedmem.prefetch(buf, device0, defer=bad)
        assert buf.last_prefetch_location is None

    def test_of_discard_prefetch(self, alloc, device0, stream):
        buffer = alloc(MIB)
        managedmem.discard_prefetch(buffer, device0, stream=stream, defer=True)
        stream.sync()
        assert buffer.last_prefetch_location is device0

    def test_of_several_targets(self, alloc, members, stream):
        buffers = [alloc(MIB) for _ in members]
        managedmem.prefetch(buffers, members, stream=stream, defer=True)
        stream.sync()
        assert [b.last_prefetch_location for b in buffers] == members


@pytest.mark.emulator_only
class TestResidency:
    def test_a_prefetch_moves_the_pages(self, buf, members):
        write(buf, 1)
        assert emulator.residency(buf) is Host()
        for member in members:
            buf.prefetch(member)
            settle()
            assert emulator.residency(buf) is member


@pytest.mark.parametrize(("own_first", "shared"), [*itertools.product([False, True], repeat=2)])
def test_adjacent_pages_that_overlap_are_all_reached(buf, device0, own_first, shared):
    first, second = buf[: 3 * PAGE], buf[(2 if shared else 3) * PAGE : 5 * PAGE]
    managedmem.prefetch([first, second] if own_first else [second, first], device0)
    assert where_is(managedmem.prefetch, buf[: 5 * PAGE]) is device0
    assert buf[5 * PAGE :].last_prefetch_location is None


class TestOlderDrivers:
    """Before 13.0 there are no batch calls: prefetch loops, the rest says what is missing."""

    HEADER = """
        import managedmem as mm
        from constants import PAGE
        from outcomes import refusal
        buf = mm.ManagedMemoryResource().allocate(16 * PAGE)
        pages = [buf[:PAGE], buf[2 * PAGE : 3 * PAGE]]
    """

    def check(self, line):
        code = textwrap.dedent(self.HEADER) + "\n" + line
        run_python(code, emulator="profile=old12")

    def test_prefetch_loops(self):
        self.check(
            "mm.prefetch(pages, [mm.Device(0), mm.Host()])\n"
            "assert [p.last_prefetch_location for p in pages] == [mm.Device(0), mm.Host()]"
        )

    def test_advice_works(self):
        self.check(
            "buf.preferred_location = mm.Host(1)\nassert buf.preferred_location is mm.Host(1)"
        )

    @pytest.mark.parametrize(
        "call",
        [
            "mm.prefetch(pages, mm.Host(), dispatch='batch')",
            "mm.discard(pages)",
            "mm.discard_prefetch(pages, mm.Host())",
            "buf.discard()",
            "buf.discard_prefetch(mm.Host())",
        ],
    )
    def test_the_rest_names_both_versions(self, call):
        self.check(
            f"text = refusal(NotImplementedError, lambda: {call})\n"
            "assert '12.2' in text and '13.0' in text, text\n"
            "assert buf.last_prefetch_location is None"
        )


class TestWithoutConcurrentAccess:
    @pytest.mark.parametrize(
        "call", ["buf.prefetch(mm.Device(0))", "setattr(buf, 'preferred_location', mm.Device(0))"]
    )
    def test_the_error_names_the_missing_ability(self, call):
        run_python(
            f"""
            import managedmem as mm, pytest
            buf = mm.ManagedMemoryResource().allocate(4096)
            assert mm.Device(0).concurrent_managed_access is False
            with pytest.raises(mm.CUDAError, match="concurrent") as error:
                {call}
            assert error.value.code == 101, error.value.code
            """,
            emulator="profile=wsl",
        )


def test_keyword_only_parameters_are_named(buf):
    for call, words in [
        (
            lambda: buf.prefetch(Host(), None),
            r"at most 1 .*\(2 given\); by name only: stream=, defer=",
        ),
        (
            lambda: buf.discard(None),
            r"takes no positional arguments \(1 given\); by name only: stream=",
        ),
        (lambda: managedmem.discard(buf, None), "by name only: stream=, dispatch="),
        (
            lambda: buf.prefetch(device=Device(0)),
            "unexpected keyword argument 'device'; "
            "there are: location=, stream=, defer=, unsupported=$",
        ),
        (lambda: managedmem.advise(buf, "set_read_mostly", None, None), r"\(4 given\)"),
    ]:
        with pytest.raises(TypeError, match=words):
            call()


@pytest.mark.parametrize("name", ["Module", "Optimizer"])
def test_torch_modules_and_optimizers_are_explained(buf, name):
    """A module is not a target, and its repr would fill the message."""
    base = type(name, (), {"__module__": "torch.somewhere", "__repr__": lambda self: "x" * 10000})
    mine = type("Mine", (base,), {"__module__": "__main__"})
    for targets, words in [
        (mine(), "__main__.Mine is no"),
        ([buf, mine()], r"targets\[1\]: .*Mine"),
    ]:
        with pytest.raises(TypeError, match=words + r".*managedmem\.torch\.prefetch") as error:
            managedmem.prefetch(targets, Host())
        assert len(str(error.value)) < 200
