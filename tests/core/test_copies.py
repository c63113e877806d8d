"""managedmem.copy() and the hints of copies: bytes, order, checks, and the driver's calls."""

import collections
import gc
import itertools
import sys
import weakref
from types import SimpleNamespace

import pytest

import managedmem
from calls import names, recorded
from constants import EMULATED, MIB, PAGE
from contents import contents, pattern, write
from driver import CAPTURE_RELAXED, capturing
from foreign_objects import CudaArray
from managedmem import CUDAError, Device, DeviceMemoryResource, Host, Stream, emulator
from pools import needs_pools, read
from programs import run_python

LAST = Device.all()[-1]
BLOCK = 3 * PAGE
PIECE = PAGE + 5
BLOCKS = 8
ORDERS = ("stream", "during_api_call", "any")
STREAM, DURING, ANY = 1, 2, 3  # of the driver, as its log has them
HOST_HINT = {"src_location": Host(), "dst_location": Device(0)}


def pieces(buffer):
    """Parts of a buffer that do not touch."""
    return [buffer[i * BLOCK : i * BLOCK + PIECE] for i in range(BLOCKS)]


@pytest.fixture
def whole(alloc):
    """Memory with a pattern."""
    made = alloc(BLOCKS * BLOCK)
    write(made, pattern(made.size))
    return made


@pytest.fixture
def empty(alloc):
    """Memory of the same size, filled with zeros."""
    made = alloc(BLOCKS * BLOCK)
    write(made, 0)
    return made


def copies_of(calls):
    return [call for call in calls if call.name.startswith("cuMemcpy")]


class TestBytes:
    @pytest.mark.parametrize("order", ORDERS)
    @pytest.mark.parametrize("hints", [{}, HOST_HINT], ids=["no hints", "hints"])
    @pytest.mark.parametrize("own", [True, False], ids=["own stream", "default stream"])
    def test_each_source_reaches_its_destination(self, whole, empty, stream, order, hints, own):
        turned = pieces(empty)[::-1]
        on = stream if own else None
        managedmem.copy(pieces(whole), turned, stream=on, order=order, **hints)
        assert [contents(b) for b in turned] == [contents(b) for b in pieces(whole)]
        assert contents(empty[PIECE:BLOCK]) == bytes(BLOCK - PIECE)

    def test_in_the_order_of_the_stream(self, whole, empty, stream):
        if EMULATED:
            emulator.schedule("lazy")
        whole.fill(1, stream=stream)
        managedmem.copy(pieces(whole), pieces(empty), stream=stream)
        whole.fill(9, stream=stream)
        stream.sync()
        assert {contents(b) for b in pieces(empty)} == {b"\1" * PIECE}

    def test_single_targets_other_sequences_and_nothing(self, whole, empty):
        managedmem.copy(whole[:PAGE], empty[:PAGE])
        managedmem.copy(iter([CudaArray(whole[PAGE : 2 * PAGE])]), (empty[PAGE : 2 * PAGE],))
        managedmem.copy([], [])
        managedmem.copy([whole[:0]], [empty[5:5]], src_location=Host())
        assert contents(empty) == contents(whole)[: 2 * PAGE] + bytes(empty.size - 2 * PAGE)

    def test_larger_copies_and_neighbours(self, alloc, stream):
        source, target = alloc(4 * MIB), alloc(4 * MIB)
        write(source, pattern(4 * MIB))
        parts = [slice(0, 2 * MIB), slice(2 * MIB, 2 * MIB + 7), slice(2 * MIB + 7, 4 * MIB)]
        managedmem.copy([source[p] for p in parts], [target[p] for p in parts], stream=stream)
        stream.sync()
        assert contents(target) == contents(source)

    @pytest.mark.parametrize("order", ORDERS)
    def test_system_memory_is_done_when_the_call_returns(self, whole, empty, stream, order):
        if EMULATED:
            emulator.schedule("lazy")
        host = bytearray(PAGE)
        managedmem.copy(
            [pattern(PAGE, start=7), whole[:PAGE], whole[PAGE : 2 * PAGE]],
            [empty[:PAGE], host, empty[PAGE : 2 * PAGE]],
            stream=stream,
            order=order,
        )
        assert host == pattern(PAGE)
        stream.sync()
        assert contents(empty[:PAGE]) == pattern(PAGE, start=7)
        assert contents(empty[PAGE : 2 * PAGE]) == contents(whole[PAGE : 2 * PAGE])

    @needs_pools
    def test_memory_of_pools(self, whole, current_device):
        """Without a stream the owner of the pool does the work."""
        with DeviceMemoryResource(LAST) as pool, pool.allocate(2 * PAGE) as plain:
            LAST.sync()
            managedmem.copy(
                [whole[:PAGE], whole[2 * PAGE : 3 * PAGE]], [plain[PAGE:], plain[:PAGE]]
            )
            both = contents(whole)
            assert read(plain) == both[2 * PAGE : 3 * PAGE] + both[:PAGE]

    @pytest.mark.parametrize("order", ORDERS)
    @pytest.mark.parametrize("own", [True, False], ids=["own stream", "default stream"])
    def test_of_a_buffer_with_options(self, whole, empty, stream, order, own):
        hints = {"src_location_hint": Host(), "dst_location_hint": Device(0)}
        options = SimpleNamespace(src_access_order=order, overlap_mode="default", **hints)
        on = stream if own else None
        empty.copy_from(whole, stream=on, options=options)
        (stream if own else Device()).sync()
        assert contents(empty) == pattern(empty.size)
        out = bytearray(PAGE)
        assert whole[PIECE : PIECE + PAGE].copy_to(out, stream=on, options=hints) is out
        assert out == pattern(whole.size)[PIECE : PIECE + PAGE]
        whole.copy_from(whole, options=hints)
        assert contents(whole) == contents(empty)


class TestCapture:
    def test_copies_become_nodes_and_system_memory_is_refused(self, whole, empty, stream):
        with capturing(stream, CAPTURE_RELAXED) as capture:
            managedmem.copy(pieces(whole), pieces(empty), stream=stream, **HOST_HINT)
            empty.copy_from(whole, stream=stream, options={"src_access_order": "any"})
            for refused in ({"order": "during_api_call"}, {}):
                source = whole[:PAGE] if refused else bytes(PAGE)
                with pytest.raises(CUDAError, match="cannot be recorded"):
                    managedmem.copy(source, empty[:PAGE], stream=stream, **refused)
        assert capture.result == 0
        assert contents(empty) == bytes(empty.size)


class TestChecks:
    @pytest.mark.parametrize(
        "sources, destinations, error, message",
        [
            ("[a[:9], a[9:20]]", "[b[:9], b[9:19]]", ValueError, "pair 1: .* 11 bytes, .* 10"),
            ("[a[:9]]", "[b[:9], b[9:]]", ValueError, "sources has length 1, and destinations 2"),
            ("[a[:9], a[9:18]]", "[b[4:13], b[:9]]", ValueError, "of pair 0 and .* 1 share 5"),
            ("[a[:9], b[8:12]]", "[b[:9], c[:4]]", ValueError, "source of pair 1 .* 0 share 1 "),
            ("a", "a", ValueError, "source of pair 0 and the destination of pair 0 share"),
            ("[a[:9], bytes(4)]", "[b[:9], bytes(4)]", ValueError, r"ions\[1\]: .* read-only"),
            ("[a[:9], 5]", "[b[:9], b[9:]]", TypeError, r"sources\[1\]: "),
            ("a", "np.zeros((a.size, 2), 'u1')[:, 0]", ValueError, "not C-contiguous"),
            ("np.zeros(4, '>i4')", "b[:16]", ValueError, "other byte order"),
            ("np.array([None])", "b[:8]", ValueError, "refers to Python objects"),
            ("a[:16]", "np.zeros(1, 'O, i8')", ValueError, "refers to Python objects"),
            ("a[:16]", "np.zeros(1, 'O, M8[D]')", ValueError, "refers to Python objects"),
            ("closed", "b", RuntimeError, "closed"),
        ],
    )
    def test_nothing_is_copied(
        self, whole, empty, alloc, stream, sources, destinations, error, message
    ):
        numpy = pytest.importorskip("numpy")
        closed = managedmem.empty(1)
        closed.close()
        here = {"a": whole, "b": empty, "c": alloc(PAGE), "np": numpy, "closed": closed}
        before = contents(whole)
        with pytest.raises(error, match=message):
            managedmem.copy(eval(sources, here), eval(destinations, here), stream=stream)
        assert contents(whole) == before and contents(empty) == bytes(empty.size)

    def test_a_refusal_keeps_no_source(self, whole):
        source = CudaArray(whole[:PAGE])
        seen = weakref.ref(source)
        with pytest.raises(TypeError, match=r"destinations\[0\]"):
            managedmem.copy([source], [5])
        del source
        gc.collect()
        assert seen() is None

    def test_ranges_that_touch_do_not_overlap(self, whole, stream):
        before = contents(whole)
        spans = [(0, 9), (20, 29), (40, 42), (20, 25)]
        targets = [(9, 18), (29, 38), (38, 40), (49, 54)]
        managedmem.copy(
            [whole[a:b] for a, b in spans], [whole[a:b] for a, b in targets], stream=stream
        )
        stream.sync()
        wanted = bytearray(before)
        for (a, b), (to, end) in zip(spans, targets, strict=True):
            wanted[to:end] = before[a:b]
        assert contents(whole) == wanted

    @pytest.mark.parametrize(
        "bad, error",
        [
            ({"order": "first"}, ValueError),
            ({"order": None}, ValueError),
            ({"src_location": 0}, TypeError),
            ({"dst_location": [Host()]}, ValueError),
        ],
        ids=repr,
    )
    def test_of_hints(self, whole, empty, bad, error):
        with pytest.raises(error, match=next(iter(bad))):
            managedmem.copy(pieces(whole), pieces(empty), **bad)
        assert contents(empty) == bytes(empty.size)

    def test_of_several_hints_for_one_pair(self, whole, empty):
        with pytest.raises(TypeError, match=r"dst_location: .* destinations is a single target"):
            managedmem.copy(whole, empty, dst_location=[Host()])

    @pytest.mark.parametrize("options", ["3", "{'any': 1}"])
    def test_bad_options_are_named(self, monkeypatch, options):
        """The names live until the message is made: this allocator overwrites what is freed."""
        monkeypatch.setenv("PYTHONMALLOC", "debug")
        done = run_python(f"""
            import managedmem
            with managedmem.empty(8) as buffer:
                try:
                    buffer.copy_from(buffer, options={options})
                except TypeError as error:
                    print(error)
        """)
        assert done.stdout == (
            "options must be None, an object with some of these attributes, or a dict with only "
            "these keys: src_access_order, src_location_hint, dst_location_hint, overlap_mode; "
            f"got {options}\n"
        )

    def test_options_are_left_as_they_are(self, whole, empty):
        options = collections.defaultdict(lambda: "any", src_access_order="any")
        empty.copy_from(whole, options=options)
        assert options == {"src_access_order": "any"}

    @pytest.mark.emulator_only  # nobody has asked a driver whether it checks a batch in the call
    @needs_pools
    @pytest.mark.skipif(LAST is Device(0), reason="needs two devices")
    @pytest.mark.usefixtures("current_device")
    @pytest.mark.parametrize("hints", [{}, {"src_location": Host()}], ids=repr)
    def test_a_refused_copy_has_the_number_of_its_pair(self, whole, alloc, hints):
        targets = [alloc(PAGE) for _ in range(2)]
        with DeviceMemoryResource(Device(0)) as pool, pool.allocate(PAGE) as plain:
            Device(0).sync()
            LAST.set_current()
            with Stream() as other, pytest.raises(CUDAError, match="peer_accessible_by") as found:
                managedmem.copy([whole[:PAGE], plain], targets, stream=other, **hints)
            assert found.value.name == "CUDA_ERROR_INVALID_VALUE"
            assert "(pair 1)" in str(found.value)


@pytest.mark.emulator_only
class TestCalls:
    def run(self, *arguments, **options):
        return copies_of(recorded(lambda: managedmem.copy(*arguments, **options)))

    def test_small_copies_share_a_call(self, whole, empty, stream):
        (call,) = self.run(pieces(whole), pieces(empty), stream=stream)
        assert call.name == "cuMemcpyBatchAsync" and call.args["count"] == BLOCKS
        assert call.args["attrs"] == f"[{STREAM}:0>0:0@0]"

    def test_a_copy_without_hints_is_the_plain_call(self, whole, empty, stream):
        (call,) = self.run([whole], [empty], stream=stream)
        assert call.name == "cuMemcpyAsync"

    def test_neighbours_are_one_copy(self, whole, empty, stream):
        parts = [slice(i * PAGE, (i + 1) * PAGE) for i in (2, 0, 1)]
        (call,) = self.run([whole[p] for p in parts], [empty[p] for p in parts], stream=stream)
        assert (call.name, call.args["count"]) == ("cuMemcpyAsync", 3 * PAGE)
        order = [empty[p] for p in reversed(parts)]
        (call,) = self.run([whole[p] for p in parts], order, stream=stream)
        assert (call.name, call.args["count"]) == ("cuMemcpyBatchAsync", 3)

    def test_neighbours_with_other_hints_are_two(self, whole, empty, stream):
        parts = [slice(0, PAGE), slice(PAGE, 2 * PAGE), slice(2 * PAGE, 3 * PAGE)]
        (call,) = self.run(
            [whole[p] for p in parts],
            [empty[p] for p in parts],
            stream=stream,
            src_location=[Host(), Device(0), Device(0)],
        )
        assert call.args["count"] == 2
        host, device = (int(kind) for kind in (2, 1))  # of a location
        assert call.args["attrs"] == f"[{STREAM}:{host}>0:0@0 {STREAM}:{device}>0:0@1]"

    def test_large_copies_go_alone_and_with_hints_together(self, alloc, stream):
        source, target = alloc(4 * MIB), alloc(4 * MIB)
        spans = [slice(0, MIB), slice(2 * MIB, 3 * MIB)]
        sides = [source[s] for s in spans], [target[s] for s in spans]
        assert names(self.run(*sides, stream=stream)) == ["cuMemcpyAsync"] * 2
        assert names(self.run(*sides, stream=stream, order="any")) == ["cuMemcpyBatchAsync"]

    def test_on_the_legacy_stream(self, whole, empty):
        """A batch is refused there; with hints another stream stands in."""
        assert names(self.run(pieces(whole), pieces(empty))) == ["cuMemcpyAsync"] * BLOCKS
        (call,) = self.run(pieces(whole), pieces(empty), **HOST_HINT)
        assert call.name == "cuMemcpyBatchAsync" and call.args["stream"] != 0

    def test_hints_are_not_kept(self, whole, empty):
        order = "".join(["during", "_api_call"])  # not the interpreter's constant
        options = SimpleNamespace(src_access_order=order)
        before = sys.getrefcount(order)
        empty.copy_from(whole, options=options)
        assert sys.getrefcount(order) == before

    @pytest.mark.parametrize("order, number", [*zip(ORDERS, (STREAM, DURING, ANY), strict=True)])
    def test_options_of_a_buffer(self, whole, empty, stream, order, number):
        """A stand-in for cuda.core's CopyOptions, whose names of an order are a StrEnum."""
        options = SimpleNamespace(
            src_access_order=order,
            src_location_hint=None,
            dst_location_hint=Host(),
            overlap_mode="prefer_overlap_with_compute",
        )
        calls = recorded(lambda: empty.copy_from(whole, stream=stream, options=options))
        (call,) = copies_of(calls)
        assert call.args["attrs"] == f"[{number}:0>2:1@0]"
        assert "cuStreamSynchronize" not in names(calls)
        plain = recorded(lambda: empty.copy_from(whole, stream=stream, options={}))
        assert names(copies_of(plain)) == ["cuMemcpyAsync"]

    def test_the_producer_of_an_array_comes_first(self, whole, empty, stream):
        with Stream() as producer:
            array = CudaArray(whole[:PAGE], members={"stream": producer.handle})
            calls = names(recorded(lambda: managedmem.copy([array], [empty[:PAGE]], stream=stream)))
        assert calls.index("cuStreamWaitEvent") < calls.index("cuMemcpyAsync")

    def test_parts_of_one_allocation_are_looked_up_together(self, whole, empty, stream):
        """Beside the check of each array that the driver knows its memory."""
        arrays = [CudaArray(part) for part in pieces(whole)]
        calls = recorded(lambda: managedmem.copy(arrays, pieces(empty), stream=stream))
        assert names(calls).count("cuPointerGetAttributes") <= 1 + len(arrays)

    @pytest.mark.parametrize(
        "driver, single, several",
        [
            ("12020", "cuMemcpyAsync", ["cuMemcpyAsync"] * 2),
            ("12080", "cuMemcpyBatchAsync", ["cuMemcpyBatchAsync"]),
            ("13000", "cuMemcpyBatchAsync", ["cuMemcpyBatchAsync"]),
            ("13020", "cuMemcpyWithAttributesAsync", ["cuMemcpyBatchAsync"]),
            ("13000,concurrent=0", "cuMemcpyAsync", ["cuMemcpyAsync"] * 2),
        ],
    )
    def test_of_each_driver(self, driver, single, several):
        """Without a call that takes an order, the read during the call is a wait."""
        run_python(
            f"""
            import managedmem
            from calls import names, recorded
            a, b, stream = managedmem.empty(8192), managedmem.empty(8192), managedmem.Stream()
            a.fill(5)
            managedmem.Device().sync()
            now = {{"order": "during_api_call", "stream": stream}}
            wait = ["cuStreamSynchronize"] if {single!r} == "cuMemcpyAsync" else []
            wanted = {{"cuStreamSynchronize", *{several!r}, {single!r}}}
            made = lambda act: [n for n in names(recorded(act)) if n in wanted]
            one = made(lambda: managedmem.copy(a[:10], b[:10], **now))
            assert one == [{single!r}, *wait], one
            two = made(lambda: managedmem.copy([a[:9], a[20:30]], [b[30:39], b[:10]], **now))
            assert two == [*{several!r}, *wait], two
            stream.sync()
            assert bytes(b)[:10] + bytes(b)[30:39] == b"\\5" * 19
            """,
            emulator=f"driver={driver}",
        )


@pytest.mark.parametrize("count", [1, 300])
def test_random_pairs_are_as_a_loop(alloc, stream, count):
    """Sorted, shuffled and touching pairs, against copies one by one on the host."""
    source, target = alloc(MIB), alloc(MIB)
    write(source, pattern(MIB))
    write(target, 0)
    spots = [(i * 7919 % count, i) for i in range(count)]
    size = MIB // count // 2
    spans = list(itertools.starmap(lambda to, at: (to * 2 * size, at * size), spots))
    managedmem.copy(
        [source[at : at + size] for _, at in spans],
        [target[to : to + size] for to, _ in spans],
        stream=stream,
    )
    stream.sync()
    wanted, bytes_of = bytearray(MIB), pattern(MIB)
    for to, at in spans:
        wanted[to : to + size] = bytes_of[at : at + size]
    assert contents(target) == wanted


def test_an_offset_of_no_number_is_refused(empty):
    interface = {"shape": (8,), "typestr": "|u1", "version": 3, "data": bytearray(8), "offset": "x"}
    with pytest.raises(TypeError, match="offset of an array interface"):
        empty[:8].copy_from(SimpleNamespace(__array_interface__=interface))
