"""Stream, every kind of stream argument, the order that the legacy stream promises, and capture."""

import contextlib
import ctypes
import operator

import pytest

import managedmem
from constants import MIB, PAGE
from contents import contents, pattern, write
from driver import CAPTURE_GLOBAL, CAPTURE_RELAXED, capturing
from foreign_objects import ProtocolStream, bindings_object, foreign
from identifiers import label
from managedmem import Device, Host, Stream, emulator


class TestStream:
    def test_has_a_handle_of_its_own(self):
        with Stream() as a, Stream() as b:
            assert a.handle > 2
            assert a.handle != b.handle

    def test_an_idle_stream_is_done(self, stream):
        assert stream.sync() is None
        assert stream.query() is True

    def test_speaks_the_stream_protocol(self, stream):
        assert stream.__cuda_stream__() == (0, stream.handle)

    def test_leaving_the_block_closes_it(self):
        with Stream() as stream:
            assert stream.is_closed is False
        assert stream.is_closed is True

    def test_closes_when_an_error_leaves_the_block(self):
        with pytest.raises(KeyError), Stream() as stream:
            raise KeyError
        assert stream.is_closed is True

    def test_closing_twice_is_safe(self):
        stream = Stream()
        stream.close()
        assert stream.close() is None

    @pytest.mark.parametrize(
        "use", [Stream.sync, Stream.query, Stream.__cuda_stream__, Stream.__enter__]
    )
    def test_a_closed_stream_refuses_work(self, use):
        stream = Stream()
        stream.close()
        with pytest.raises(RuntimeError, match="closed"):
            use(stream)

    def test_a_closed_stream_is_refused_as_an_argument(self, buf, device0):
        stream = Stream()
        stream.close()
        with pytest.raises(RuntimeError, match="closed"):
            buf.prefetch(device0, stream=stream)

    def test_repr_names_the_handle_and_survives_closing(self):
        stream = Stream()
        assert repr(stream) == f"<Stream handle={stream.handle:#x}>"
        assert repr(Stream.from_handle(0)) == "<Stream handle=0x0>"
        stream.close()
        assert repr(stream) == "<Stream closed>"

    @pytest.mark.emulator_only
    def test_a_forgotten_stream_is_destroyed(self):
        before = emulator.live().streams
        stream = Stream()
        assert emulator.live().streams == before + 1
        del stream
        assert emulator.live().streams == before


class TestFromHandle:
    @pytest.mark.parametrize("handle", [0, 1, 2], ids=["legacy", "legacy by number", "per thread"])
    def test_takes_the_special_handles(self, handle, buf, device0):
        wrapped = Stream.from_handle(handle)
        assert wrapped.handle == handle
        buf.prefetch(device0, stream=wrapped)
        wrapped.sync()
        assert buf.last_prefetch_location is device0

    def test_does_not_own_the_stream(self, stream):
        wrapped = Stream.from_handle(stream.handle)
        assert wrapped.handle == stream.handle
        wrapped.close()
        assert wrapped.is_closed
        assert stream.query() is True

    @pytest.mark.parametrize("bad", ["1", 1.0, None, b"", True], ids=label)
    def test_refuses_what_is_no_integer(self, bad):
        with pytest.raises(TypeError):
            Stream.from_handle(bad)

    @pytest.mark.parametrize("bad", [-1, 1 << 64], ids=label)
    def test_refuses_what_is_no_address(self, bad):
        with pytest.raises((ValueError, OverflowError)):
            Stream.from_handle(bad)


class TestEquality:
    def test_streams_over_one_handle_are_equal_and_hash_alike(self, stream):
        wrapped = Stream.from_handle(stream.handle)
        assert wrapped is not stream
        assert wrapped == stream
        assert hash(wrapped) == hash(stream)
        assert len({stream, wrapped, Stream.from_handle(stream.handle)}) == 1

    def test_streams_over_different_handles_differ(self, stream):
        with Stream() as other:
            assert stream != other
            assert {stream: 1, other: 2} == {other: 2, stream: 1}
        assert Stream.from_handle(1) != Stream.from_handle(2)

    def test_every_handle_can_be_hashed(self):
        """-1 is CPython's sign for an error in a hash function."""
        handles = [0, 1, 2, 2**63 - 1, 16, 17]
        streams = [Stream.from_handle(h) for h in handles]
        assert len(set(streams)) == len(handles)
        assert all(s in set(streams) for s in map(Stream.from_handle, handles))

    def test_a_closed_stream_keeps_its_hash_and_equals_only_itself(self, stream):
        wrapped = Stream.from_handle(stream.handle)
        twin = Stream.from_handle(stream.handle)
        kept = {wrapped: "kept"}
        before = hash(wrapped)
        wrapped.close()
        twin.close()
        assert hash(wrapped) == before
        assert operator.eq(wrapped, wrapped)
        assert kept[wrapped] == "kept"
        assert wrapped != stream
        assert stream != wrapped
        assert wrapped != twin

    def test_a_new_stream_with_the_handle_of_a_closed_one_is_another(self):
        closed = Stream()
        handle = closed.handle
        closed.close()
        assert Stream.from_handle(handle) != closed

    @pytest.mark.parametrize("other", [None, 0, "stream", object()], ids=label)
    def test_other_objects_differ(self, stream, other):
        assert stream != other

    def test_a_stream_of_another_library_decides_by_itself(self, stream):
        class Anything:
            def __eq__(self, other):
                return True

            __hash__ = None

        assert stream == Anything()
        assert stream != ProtocolStream(stream.handle)

    def test_streams_have_no_order(self, stream):
        with pytest.raises(TypeError):
            operator.lt(stream, stream)


def numba_stream(handle):
    """A stream of numba-cuda from before it had `__cuda_stream__`."""
    return foreign("numba.cuda.cudadrv.driver", "Stream", handle=handle)


class WithIndex:
    """Like NumPy's integers: not an int, but with __index__."""

    def __init__(self, number):
        self.number = number

    def __index__(self):
        return self.number


FORMS = {
    "none": lambda s: None,
    "own": lambda s: s,
    "wrapped": lambda s: Stream.from_handle(s.handle),
    "protocol": lambda s: ProtocolStream(s.handle),
    "legacy protocol": lambda s: ProtocolStream(0),
    "integer": lambda s: s.handle,
    "object with an index": lambda s: WithIndex(s.handle),
    "torch": lambda s: foreign("torch.cuda.streams", "Stream", cuda_stream=s.handle),
    "torch default": lambda s: foreign("torch.cuda.streams", "Stream", cuda_stream=0),
    "torch of any backend": lambda s: foreign("torch", "Stream", native_handle=s.handle),
    "cupy": lambda s: foreign("cupy.cuda.stream", "Stream", ptr=s.handle),
    "numba int": lambda s: numba_stream(s.handle),
    "numba pointer": lambda s: numba_stream(ctypes.c_void_p(s.handle)),
    "numba null pointer": lambda s: numba_stream(ctypes.c_void_p()),
    "numba CUstream": lambda s: numba_stream(bindings_object("CUstream", s.handle)),
    "CUstream": lambda s: bindings_object("CUstream", s.handle),
    "CUstream in the protocol": lambda s: ProtocolStream(bindings_object("CUstream", s.handle)),
    "legacy": lambda s: 0,
    "legacy by number": lambda s: 1,
    "per thread": lambda s: 2,
}
"""Every form in which a user may name a stream."""


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
class TestEveryFormOfStream:
    def test_prefetch(self, form, buf, stream, device0):
        buf.prefetch(device0, stream=form(stream))
        device0.sync()
        assert buf.last_prefetch_location is device0

    def test_discard_prefetch(self, form, buf, stream, device0):
        buf.discard_prefetch(device0, stream=form(stream))
        device0.sync()
        assert buf.last_prefetch_location is device0

    def test_discard_then_fill(self, form, buf, stream, device0):
        """With a prefetch between: a write alone need not end the discarded state."""
        chosen = form(stream)
        buf.discard(stream=chosen)
        buf.prefetch(device0, stream=chosen)
        buf.fill(9, stream=chosen)
        assert contents(buf) == b"\x09" * buf.size

    def test_copy(self, form, buf, alloc, stream):
        write(buf, pattern(buf.size))
        other = alloc(buf.size)
        other.copy_from(buf, stream=form(stream))
        assert contents(other) == contents(buf)

    def test_free_functions(self, form, buf, stream, device0):
        chosen = form(stream)
        pages = [buf[:PAGE], buf[2 * PAGE : 3 * PAGE]]
        managedmem.discard(pages, stream=chosen)
        managedmem.discard_prefetch(pages, device0, stream=chosen)
        managedmem.prefetch(pages, Host(), stream=chosen)
        device0.sync()
        assert [p.last_prefetch_location for p in pages] == [Host(), Host()]

    def test_allocate_and_close(self, form, stream):
        chosen = form(stream)
        buffer = managedmem.ManagedMemoryResource().allocate(PAGE, stream=chosen)
        buffer.close(chosen)
        assert buffer.is_closed


class TestTheOrderOfLooks:
    def test_the_protocol_comes_before_the_attribute_of_a_library(self, buf, stream, device0):
        """The streams of newer versions have both."""
        cls = type(
            "Stream", (ProtocolStream,), {"__module__": "torch.cuda.streams", "cuda_stream": "no"}
        )
        buf.prefetch(device0, stream=cls(stream.handle))
        stream.sync()
        assert buf.last_prefetch_location is device0

    def test_the_module_of_a_class_is_read_once(self, buf, stream, device0):
        """Not once for each library that it could be from; with the protocol not at all."""
        reads = []

        class Counting(type):
            def __getattribute__(cls, name):
                reads.append(name)
                return super().__getattribute__(name)

        members = {"__module__": "numba.cuda.cudadrv.driver", "handle": stream.handle}
        numba = Counting("Stream", (), members)()
        with_protocol = Counting("Stream", (ProtocolStream,), {})(stream.handle)
        reads.clear()
        buf.prefetch(device0, stream=with_protocol)
        assert "__module__" not in reads
        buf.prefetch(device0, stream=numba)
        assert reads.count("__module__") == 1


OPERATIONS = {
    "prefetch": lambda b, s: b.prefetch(Device(0), stream=s),
    "discard": lambda b, s: b.discard(stream=s),
    "discard_prefetch": lambda b, s: b.discard_prefetch(Device(0), stream=s),
    "free prefetch": lambda b, s: managedmem.prefetch([b], Device(0), stream=s),
    "free prefetch of two": lambda b, s: managedmem.prefetch(
        [b[:PAGE], b[2 * PAGE :]], [Device(0), Host()], stream=s
    ),
    "deferred prefetch": lambda b, s: managedmem.prefetch(b, Device(0), stream=s, defer=True),
    "free discard": lambda b, s: managedmem.discard([b], stream=s),
    "free discard_prefetch": lambda b, s: managedmem.discard_prefetch(b, Device(0), stream=s),
}
operations = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)


class Raising:
    def __cuda_stream__(self):
        raise LookupError("from the protocol")


@operations
class TestWhatIsNoStream:
    @pytest.mark.parametrize(
        "bad",
        [
            *("default", 1.5, object(), [], b"0", True, Host()),
            numba_stream("0"),
            numba_stream(ctypes.c_char_p(b"0")),
            bindings_object("CUdevice", 0),
            foreign("elsewhere", "Stream", __cuda_stream__=(0, 0)),
        ],
        ids=label,
    )
    def test_is_a_type_error_that_speaks_of_streams(self, operation, bad, buf):
        with pytest.raises(TypeError, match="stream"):
            operation(buf, bad)
        assert buf.last_prefetch_location is None

    @pytest.mark.parametrize("bad", [Stream, ProtocolStream, int, type])
    def test_a_class_is_no_stream(self, operation, bad, buf):
        with pytest.raises(TypeError, match=r"a stream must be .*: pass an object of the class"):
            operation(buf, bad)

    @pytest.mark.parametrize(
        "answer",
        [None, 7, (0,), (0, 1, 2), (0, "x"), ("0", 1), (1, 0), (0, -1), (0, None)],
        ids=label,
    )
    def test_a_malformed_protocol_answer(self, operation, answer, buf):
        broken = ProtocolStream(0)
        broken.answer = answer
        with pytest.raises((TypeError, ValueError), match="__cuda_stream__"):
            operation(buf, broken)

    def test_an_error_of_the_protocol_comes_through(self, operation, buf):
        with pytest.raises(LookupError, match="from the protocol"):
            operation(buf, Raising())


@pytest.mark.parametrize(
    "call",
    [
        lambda b, s: b.prefetch(Device(0), s),
        lambda b, s: b.discard(s),
        lambda b, s: b.discard_prefetch(Device(0), s),
        lambda b, s: b.copy_from(b, s),
        lambda b, s: b.fill(0, s),
        lambda b, s: managedmem.prefetch(b, Device(0), s),
        managedmem.discard,
        lambda b, s: managedmem.discard_prefetch(b, Device(0), s),
    ],
)
def test_stream_is_keyword_only(call, buf, stream):
    with pytest.raises(TypeError):
        call(buf, stream)


class TestStreamOfAnotherDevice:
    """The stream decides where the work is queued; memory and location belong to no stream."""

    @pytest.fixture
    def elsewhere(self, device1, current_device):
        device1.set_current()
        with Stream() as made:
            Device(0).set_current()
            yield made
            made.sync()

    @operations
    def test_works(self, operation, buf, elsewhere):
        write(buf, 7)
        operation(buf, elsewhere)
        buf.prefetch(Host(), stream=elsewhere)
        buf.fill(3, stream=elsewhere)
        elsewhere.sync()
        assert Device() is Device(0)
        assert contents(buf) == b"\x03" * buf.size

    def test_copies(self, buf, alloc, elsewhere):
        write(buf, pattern(buf.size))
        other = alloc(buf.size)
        other.copy_from(buf, stream=elsewhere)
        elsewhere.sync()
        assert contents(other) == contents(buf)


class TestRealStreams:
    def test_cuda_bindings(self, buf, stream, device0):
        driver = pytest.importorskip("cuda.bindings.driver", reason="needs cuda.bindings")
        runtime = pytest.importorskip("cuda.bindings.runtime", reason="needs cuda.bindings")
        for made in (driver.CUstream(stream.handle), runtime.cudaStream_t(stream.handle)):
            for where in (device0, Host()):
                buf.prefetch(where, stream=made)
                stream.sync()
                assert buf.last_prefetch_location is where

    def test_numba(self, buf, stream, device0):
        driver = pytest.importorskip("numba.cuda.cudadrv.driver", reason="needs numba-cuda")
        buf.prefetch(device0, stream=driver.Stream(stream.handle))
        stream.sync()
        assert buf.last_prefetch_location is device0


class TestOrder:
    """The user sees one queue per stream, the legacy one included; lazily run to be sure."""

    @pytest.fixture(autouse=True, params=["eager", "lazy"])
    def schedule(self, request):
        if emulator.is_active():
            emulator.schedule(request.param)
        elif request.param == "lazy":
            pytest.skip("a GPU has its own schedule")

    @pytest.fixture(params=["legacy", "own stream"])
    def chosen(self, request, stream):
        return stream if request.param == "own stream" else None

    def test_a_copy_before_a_discard_sees_the_old_bytes(self, buf, alloc, chosen):
        data = write(buf, pattern(buf.size))
        copy = alloc(buf.size)
        copy.copy_from(buf, stream=chosen)
        buf.discard(stream=chosen)
        assert contents(copy) == data

    def test_a_fill_after_a_discard_wins(self, buf, device0, chosen):
        write(buf, 1)
        buf.discard(stream=chosen)
        buf.prefetch(device0, stream=chosen)
        buf.fill(5, stream=chosen)
        assert contents(buf) == b"\x05" * buf.size

    def test_fill_after_a_batched_discard_prefetch_wins(self, buf, device0, chosen):
        pages = [buf[i * PAGE : (i + 1) * PAGE] for i in range(0, 16, 2)]
        managedmem.discard_prefetch(pages, device0, stream=chosen)
        buf.fill(6, stream=chosen)
        managedmem.prefetch(pages, Host(), stream=chosen, dispatch="batch")
        assert contents(buf) == b"\x06" * buf.size

    def test_a_deferred_prefetch_keeps_its_place(self, alloc, device0, stream):
        buf = alloc(2 * MIB)  # without records of freed memory
        buf.fill(3, stream=stream)
        managedmem.prefetch(buf, device0, stream=stream, defer=True)
        buf.prefetch(Host(), stream=stream)
        stream.sync()
        assert buf.last_prefetch_location is Host()
        assert contents(buf) == b"\x03" * buf.size

    def test_a_deferred_prefetch_survives_closing_the_buffer(self, alloc, device0, stream):
        buffer = alloc(MIB)
        managedmem.prefetch(buffer, device0, stream=stream, defer=True)
        buffer.close()
        stream.sync()
        assert buffer.is_closed


@pytest.mark.emulator_only
class TestLazySchedule:
    def test_a_prefetch_moves_nothing_before_its_turn(self, buf, device0, stream):
        write(buf, 1)
        emulator.schedule("lazy")
        buf.prefetch(device0, stream=stream)
        assert emulator.residency(buf) is Host()
        assert stream.query() is False
        stream.sync()
        assert stream.query() is True
        assert emulator.residency(buf) is device0


@pytest.mark.parametrize("mode", [CAPTURE_GLOBAL, CAPTURE_RELAXED], ids=["global", "relaxed"])
@operations
def test_a_capturing_stream_is_refused_and_the_capture_survives(operation, mode, buf, stream):
    write(buf, 7)
    with capturing(stream, mode) as capture:
        with pytest.raises(managedmem.CUDAError, match="captur") as error:
            operation(buf, stream)
    assert capture.result == 0
    assert error.value.code == 900
    assert error.value.name == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    assert buf.last_prefetch_location is None
    assert contents(buf) == b"\x07" * buf.size


@pytest.mark.emulator_only
@operations
def test_a_capturing_stream_is_refused_before_the_driver_is_called(operation, buf, stream):
    with capturing(stream), emulator.recording() as calls:
        with contextlib.suppress(managedmem.CUDAError):
            operation(buf, stream)
    assert not [c for c in calls if "Prefetch" in c.name or "Discard" in c.name]
    assert not [c for c in calls if c.name == "cuLaunchHostFunc"]


def test_work_goes_on_after_a_refused_capture(buf, device0, stream):
    with capturing(stream):
        with pytest.raises(managedmem.CUDAError):
            buf.prefetch(device0, stream=stream)
    buf.prefetch(device0, stream=stream)
    stream.sync()
    assert buf.last_prefetch_location is device0


def test_a_closed_stream_has_no_handle():
    stream = Stream()
    assert stream.handle != 0
    stream.close()
    assert stream.handle == 0
    borrowed = Stream.from_handle(2)
    borrowed.close()
    assert borrowed.handle == 0
