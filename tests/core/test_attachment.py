"""buf.attach(), attach= of allocations, and the waits and refused fills that follow from them."""

import textwrap

import pytest

import managedmem
from calls import names
from constants import EMULATED, PAGE
from driver import CAPTURE_GLOBAL, capturing
from identifiers import label
from managedmem import (
    CUDAError,
    Device,
    DeviceMemoryResource,
    ManagedBuffer,
    ManagedMemoryResource,
    Stream,
)
from pools import needs_pools
from programs import run_python
from threads import at_once

FLAGS = {"global": 1, "host": 2, "single": 4}
LEGACY, PER_THREAD = 1, 2

# Ways to allocate PAGE bytes, with their contents.
WAYS = {
    "empty": (managedmem.empty, None),
    "empty_like": (
        lambda size, **more: managedmem.empty_like(None, "uint8", shape=size, **more),
        None,
    ),
    "allocate": (lambda size, **more: ManagedMemoryResource().allocate(size, **more), None),
    "zeros": (managedmem.zeros, bytes(PAGE)),
    "full": (lambda size, **more: managedmem.full(size, 7, "uint8", **more), b"\7" * PAGE),
    "asarray": (lambda size, **more: managedmem.asarray(b"\5" * size, **more), b"\5" * PAGE),
}


@pytest.fixture(params=WAYS)
def way(request):
    """`(make, contents)`."""
    if request.param == "asarray":
        pytest.importorskip("numpy", reason="needs NumPy")
    return WAYS[request.param]


class TestAttach:
    @pytest.mark.parametrize("to", FLAGS)
    def test_keeps_the_contents(self, stream, to):
        with managedmem.zeros(3 * PAGE + 1) as buffer:
            assert buffer.attach(to, stream=stream) is None
            stream.sync()
            assert bytes(buffer) == bytes(3 * PAGE + 1)
            buffer.attach("global", stream=stream)
            buffer.fill(9, stream=stream)
            stream.sync()
            assert bytes(buffer) == b"\11" * (3 * PAGE + 1)

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("to", FLAGS)
    def test_is_of_the_whole_allocation(self, stream, to):
        from managedmem import emulator

        with managedmem.empty((8, PAGE), "f4") as buffer:
            with emulator.recording() as calls:
                buffer.attach(to, stream=stream)
                buffer.view("int32", (PAGE, 8)).attach(to=to, stream=stream)
            made = [call.args for call in calls if call.name == "cuStreamAttachMemAsync"]
            at = {"stream": stream.handle, "ptr": buffer.handle, "length": 0}
            assert made == [at | {"flags": FLAGS[to]}] * 2

    def test_is_on_the_default_stream_without_one(self, buf):
        for stream in (None, LEGACY, PER_THREAD):
            buf.attach("host", stream=stream)
            buf.attach("global", stream=stream)

    @pytest.mark.emulator_only
    def test_may_be_to_the_default_stream_of_the_thread(self, buf):
        buf.attach("single", stream=PER_THREAD)
        buf.attach("global")

    def test_of_no_bytes(self, stream):
        with managedmem.empty(0, attach="host") as buffer:
            for to in FLAGS:
                buffer.attach(to, stream=stream)

    @pytest.mark.parametrize("size", [1, PAGE, PAGE + 1])
    def test_is_ordered_with_other_work(self, stream, size):
        with managedmem.empty(size) as buffer:
            for value in range(3):
                buffer.fill(value, stream=stream)
                buffer.attach("host", stream=stream)
                assert buffer.numpy(stream).tolist() == [value] * size
                buffer.attach("single", stream=stream)

    def test_may_follow_each_other_in_threads(self, buf):
        def attach(to):
            for _ in range(50):
                with Stream() as stream:
                    buf.attach(to, stream=stream)

        at_once(*[lambda to=to: attach(to) for to in [*FLAGS, *FLAGS]])
        buf.attach("global")
        assert len(bytes(buf)) == buf.nbytes


class TestAttachment:
    def test_is_as_allocated_and_then_as_attached(self, way, stream):
        with way[0](PAGE) as one, way[0](PAGE, attach="host") as other:
            assert (one.attachment, other.attachment) == ("global", "host")
            for to in ["single", "host", "single", "global"]:
                one.attach(to, stream=stream)
                other.attach(to, stream=int(stream.handle))
                assert one.attachment == one[1:].attachment == other.attachment == to

    def test_is_of_a_whole_buffer(self, stream):
        with managedmem.empty((8, PAGE), "f4") as buffer:
            part = buffer.view("uint8", 32 * PAGE)[PAGE:]
            buffer.view("int32", (PAGE, 8)).attach("single", stream=stream)
            assert part.attachment == buffer.attachment == "single"

    def test_of_no_bytes(self, stream):
        with managedmem.empty(0, attach="host") as buffer:
            assert buffer.attachment == "host"
            for to in FLAGS:
                buffer.attach(to, stream=stream)
                assert buffer.attachment == to

    def test_of_memory_of_others_is_not_known(self, buf):
        buf.attach("host")
        wrapped = ManagedBuffer.from_handle(buf.handle, buf.nbytes, owner=buf)
        assert wrapped.attachment is None and wrapped[1:].attachment is None
        buf.attach("global")

    @needs_pools
    def test_of_pools(self, device0):
        with ManagedMemoryResource(pooled=True) as pool, pool.allocate(PAGE) as buffer:
            assert buffer.attachment == buffer[1:].attachment == "global"
        with DeviceMemoryResource(device0) as pool, pool.allocate(PAGE) as buffer:
            assert buffer.attachment is None

    def test_is_read_only_and_gone_with_the_memory(self, buf):
        with pytest.raises(AttributeError):
            buf.attachment = "host"
        part = buf[1:]
        buf.close()
        for closed in (buf, part):
            with pytest.raises(RuntimeError, match="closed"):
                _ = closed.attachment

    @pytest.mark.parametrize("profile", ["default", "wsl"])
    def test_outlives_the_stream_and_ends_with_a_refusal(self, profile):
        run(
            """
            assert buf.attachment == "global"
            buf.attach("single", stream=other)
            other.close()
            assert buf.attachment == "single"
            emulator.fail("cuStreamIsCapturing", code=719)
            refusal(mm.CUDAError, lambda: buf.attach("host", stream=stream))
            assert buf.attachment == "single"
            emulator.clear_failures()
            emulator.fail("cuStreamAttachMemAsync", code=719)
            refusal(mm.CUDAError, lambda: buf.attach("host", stream=stream))
            assert buf.attachment == "global"
            """,
            profile=profile,
        )

    def test_is_one_of_the_words_in_threads(self, buf):
        def attach(to):
            for _ in range(100):
                buf.attach(to)
                assert buf.attachment in FLAGS

        at_once(*[lambda to=to: attach(to) for to in ["host", "global", "host"]])
        buf.attach("global")


class TestAllocation:
    def test_has_the_contents(self, way):
        make, contents = way
        for attach in ("global", "host"):
            with make(PAGE, attach=attach) as buffer:
                assert contents is None or bytes(buffer) == contents
                buffer.attach("global")

    @pytest.mark.emulator_only
    def test_is_attached_from_the_start(self, way):
        from managedmem import emulator

        for more, flags in (({}, 1), ({"attach": "global"}, 1), ({"attach": "host"}, 2)):
            with emulator.recording() as calls:
                way[0](PAGE, **more).close()
            made = [call.args["flags"] for call in calls if call.name == "cuMemAllocManaged"]
            assert made == [flags] and "cuStreamAttachMemAsync" not in names(calls)

    def test_may_have_a_policy_and_a_prefetch(self, device0):
        policy = managedmem.MigrationPolicy.prefer(device0)
        with managedmem.empty(PAGE, attach="host", policy=policy, prefetch=device0) as buffer:
            assert buffer.preferred_location == buffer.last_prefetch_location == device0

    def test_copies_a_buffer_that_asarray_could_return(self):
        with managedmem.zeros(PAGE) as buffer:
            assert managedmem.asarray(buffer, attach="global") is buffer
            with managedmem.asarray(buffer, attach="host") as other:
                assert other is not buffer and bytes(other) == bytes(PAGE)
            with pytest.raises(ValueError, match="attach"):
                managedmem.asarray(buffer, attach="host", copy=False)


class TestRefusals:
    @pytest.fixture(autouse=True)
    def nothing_is_attached(self):
        if not EMULATED:
            yield
            return
        from managedmem import emulator

        with emulator.recording() as calls:
            yield
        assert "cuStreamAttachMemAsync" not in names(calls)

    @pytest.mark.parametrize("bad", ["", "Host", "hos\0t", b"host", 1, None, Device(0)], ids=label)
    def test_of_another_word(self, buf, bad):
        with pytest.raises(ValueError, match=r'"global", "host" or "single", got '):
            buf.attach(bad)
        for make, _ in WAYS.values():
            with pytest.raises(ValueError, match=r'"global" or "host", got '):
                make(PAGE, attach=bad)

    def test_of_an_allocation_for_one_stream(self, way):
        with pytest.raises(ValueError, match=r'buf\.attach\("single", stream=stream\)'):
            way[0](PAGE, attach="single")

    def test_of_a_slice(self, buf):
        for part in (buf[:1], buf[1:], buf[:0], buf.range(0, buf.nbytes - 1)):
            with pytest.raises(ValueError, match=rf"slice of {part.nbytes} of {buf.nbytes} bytes"):
                part.attach("host")

    @pytest.mark.parametrize("default", [None, 0, LEGACY])
    def test_of_the_default_stream_for_one_stream(self, buf, default):
        with pytest.raises(ValueError, match=r"stream=managedmem\.Stream\(\)"):
            buf.attach("single", stream=default)

    def test_of_memory_of_others(self, buf):
        with pytest.raises(ValueError, match="not allocated here"):
            ManagedBuffer.from_handle(buf.handle, buf.nbytes, owner=buf).attach("host")

    @needs_pools
    def test_of_a_pool(self, device0):
        for pool in (ManagedMemoryResource(pooled=True), DeviceMemoryResource(device0)):
            with pool, pool.allocate(PAGE, attach="global") as buffer:
                with pytest.raises(ValueError, match="part of a pool"):
                    buffer.attach("host")
                with pytest.raises(ValueError, match="memory without a pool"):
                    pool.allocate(PAGE, attach="host")

    def test_of_a_closed_buffer_and_a_closed_stream(self, buf):
        stream = Stream()
        stream.close()
        with pytest.raises(RuntimeError, match="closed"):
            buf.attach("host", stream=stream)
        part = buf[1:]
        buf.close()
        for closed in (buf, part):
            with pytest.raises(RuntimeError, match="closed"):
                closed.attach("host")

    def test_during_a_capture(self, buf, current_device, stream):
        with capturing(stream, CAPTURE_GLOBAL) as running:
            for to in FLAGS:
                with pytest.raises(CUDAError, match="an attachment of memory cannot be recorded"):
                    buf.attach(to, stream=stream)
        assert running.result == 0


def test_on_another_stream_during_a_capture(buf, current_device, stream):
    with Stream() as other, capturing(stream, CAPTURE_GLOBAL) as running:
        for to in FLAGS:
            buf.attach(to, stream=other)
            buf.attach("global")
        managedmem.empty(PAGE, attach="host").close()
    assert running.result == 0


# --- systems without concurrent access -----------------------------------------------------

SETUP = """
    import managedmem as mm
    from managedmem import Stream, emulator
    from driver import raw_driver
    from outcomes import refusal
    import warnings; warnings.simplefilter("ignore")
    mm.Device(0).set_current()
    buf = mm.zeros(8192)
    stream, other = Stream(), Stream()
    def waits(act=lambda: memoryview(buf).release()):
        "The streams that a host view waits for; 'all' for all devices."
        with emulator.recording() as calls:
            act()
        found = ["all" for call in calls if call.name == "cuCtxSynchronize"][:1]
        return found + [c.args["stream"] for c in calls if c.name == "cuStreamSynchronize"]
"""


def run(code, profile="wsl"):
    code = textwrap.dedent(SETUP) + textwrap.dedent(code)
    return run_python(code, emulator=f"profile={profile}")


class TestHostViews:
    def test_wait_for_all_devices(self):
        run("""
        assert waits() == ["all"]
        buf.attach("single", stream=stream)
        buf.attach("global", stream=other)
        assert waits() == waits() == ["all"]
        """)

    def test_wait_once_for_the_stream_of_an_attachment_to_the_host(self):
        run("""
        for s, handle in ((stream, stream.handle), (None, 0), (other, other.handle)):
            buf.attach("host", stream=s)
            assert waits() == [handle], s
            assert waits() == waits() == []
        buf.attach("host", stream=2)  # of the thread, whose handle means others elsewhere
        assert waits() == ["all"] and waits() == []
        buf.attach("host", stream=int(stream.handle))
        assert waits() == ["all"] and waits() == []
        """)

    def test_wait_each_time_for_the_one_stream(self):
        run("""
        buf.attach("single", stream=stream)
        assert waits() == waits() == [stream.handle]
        buf.attach("single", stream=other)
        assert waits() == [other.handle]
        for stranger in (int(stream.handle), 2):
            buf.attach("single", stream=stranger)
            assert waits() == waits() == ["all"]
        """)

    def test_wait_for_nothing_in_memory_allocated_for_the_host(self):
        run("""
        buf = mm.empty(8192, attach="host")
        view = lambda: memoryview(buf).release()
        assert waits(view) == []
        part = buf[4096:]
        assert waits(lambda: bytes(part)) == waits(lambda: buf.__dlpack__(dl_device=(1, 0))) == []
        assert waits(lambda: buf.numpy(stream)) == [stream.handle]
        buf.attach("global")
        assert waits(view) == ["all"]
        assert waits(lambda: mm.zeros(4096, attach="host").close()) == []
        assert waits(lambda: mm.zeros(4096).close()) == ["all"]
        """)

    def test_do_not_forget_a_stream_that_was_closed(self):
        run("""
        handle, before = other.handle, emulator.live().streams
        buf.attach("single", stream=other)
        other.close()
        assert emulator.live().streams == before
        assert waits() == [handle]
        buf.attach("host", stream=stream)
        assert emulator.live().streams == before - 1
        buf.attach("single", stream=stream)
        stream.close()
        assert waits() != []
        buf.close()
        assert emulator.live().streams == before - 2
        """)

    def test_of_a_stream_that_ended_with_its_context_wait_for_all_devices(self):
        run("""
        import ctypes
        raw, context = raw_driver(), ctypes.c_void_p()
        assert raw.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
        theirs = Stream()
        buf.attach("single", stream=theirs)
        assert waits() == [theirs.handle]
        assert raw.cuCtxDestroy_v2(context) == 0
        assert waits() == ["all"]
        """)

    def test_take_no_legacy_stream_for_that_of_another_context(self):
        run("""
        from driver import destroy_context, make_context
        def calls_of(act):
            "The waits of a host view."
            with emulator.recording() as calls:
                act()
            return [c.name for c in calls if c.name in ("cuStreamSynchronize", "cuCtxSynchronize")]
        view = lambda: memoryview(buf).release()
        everything = 2 * ["cuCtxSynchronize"]  # in the current context, and in the primary one
        buf.attach("host")
        theirs = make_context()
        assert calls_of(view) == ["cuStreamSynchronize"]
        assert calls_of(view) == []
        own = Stream()
        for unseen in (None, int(own.handle), 2):
            buf.attach("host", stream=unseen)
            assert calls_of(view) == calls_of(view) == everything, unseen
        buf.attach("host", stream=own)
        assert waits() == [own.handle] and waits() == []
        own.close()
        destroy_context(theirs)
        """)

    def test_do_not_end_a_capture(self):
        run("""
        from driver import CAPTURE_RELAXED, capturing
        buf.attach("single", stream=stream)
        with capturing(stream, CAPTURE_RELAXED) as running:
            assert "graph" in refusal(mm.CUDAError, lambda: memoryview(buf))
        assert running.result == 0
        assert waits() == [stream.handle]
        for more in ({"stream": 2}, {}):  # waits for all devices
            buf.attach("global", **more)
            with capturing(other, CAPTURE_RELAXED) as running:
                assert "before the capture" in refusal(mm.CUDAError, lambda: memoryview(buf))
            assert running.result == 0
            assert waits() == ["all"]
        """)

    def test_are_not_there_while_the_memory_is_closed(self):
        run("""
        buf.attach("single", stream=stream)
        buf.close()
        for act in (lambda: memoryview(buf), buf.numpy, lambda: buf.attach("global")):
            assert "closed" in refusal(RuntimeError, act)
        """)


class TestFillsAndCopies:
    def test_a_fill_needs_memory_that_its_stream_may_use(self):
        run("""
        for to, last, refused in (("host", stream, (None, 2, stream, other)),
                                  ("single", stream, (None, 2, other)),
                                  ("global", stream, ())):
            buf.attach(to, stream=last)
            for s in (None, 2, stream, other):
                act = lambda: buf[4096:].fill(b"\\1\\2", stream=s)
                with emulator.recording() as calls:
                    text = refusal(RuntimeError, act) if s in refused else act()
                made = [c.name for c in calls if c.name.startswith("cuMemset")]
                if s in refused:
                    words = {"host": "attached to the host", "single": "to another stream"}[to]
                    assert words in text and 'attach("single")' in text and made == [], text
                else:
                    assert made == ["cuMemsetD16Async"]
        assert bytes(buf) == bytes(4096) + 2048 * b"\\1\\2"
        """)

    def test_copies_reach_memory_of_the_host(self):
        run("""
        own, target = mm.full(8192, 7, "uint8", attach="host"), mm.zeros(8192, attach="host")
        target.copy_from(own, stream=stream)
        buf.copy_from(target, stream=stream)
        own.attach("single", stream=other)
        mm.copy([own[:4096]], [buf[4096:]], stream=stream)
        stream.sync()
        assert bytes(target) == bytes(buf) == bytes(own.copy_to(stream=stream)) == b"\\7" * 8192
        """)

    def test_the_driver_decides_about_other_streams_and_wrapped_memory(self):
        run("""
        wrapped = mm.ManagedBuffer.from_handle(buf.handle, buf.nbytes, owner=buf)
        number = int(other.handle)
        def refuse(b, s):
            assert "attach() of the" in refusal(mm.CUDAError, lambda: b.fill(1, stream=s))
        buf.attach("single", stream=number)
        refuse(buf, stream), refuse(wrapped, stream)
        buf.fill(1, stream=number), wrapped.fill(2, stream=other)
        other.close()  # and with it the attachment
        buf.fill(3, stream=stream), wrapped.fill(4, stream=stream)
        own = mm.empty(8192, attach="host")
        with Stream() as last:
            own.attach("single", stream=int(last.handle))
            own.fill(1, stream=last)
        refuse(own, stream)
        """)

    def test_the_emulated_driver_refuses_what_a_device_may_not_reach(self):
        run("""
        import ctypes
        raw, host = raw_driver(), ctypes.create_string_buffer(8192)
        at, s = ctypes.c_uint64(buf.handle), ctypes.c_void_p(stream.handle)
        n = ctypes.c_size_t(8192)
        def answers():
            return [raw.cuMemsetD8Async(at, 1, n, s),
                    raw.cuMemcpyHtoDAsync_v2(at, host, n, s),
                    raw.cuMemcpyDtoHAsync_v2(host, at, n, s),
                    raw.cuMemcpyDtoDAsync_v2(at, at, n, s),
                    raw.cuMemcpyAsync(at, at, n, s)]
        assert answers() == [0, 0, 0, 0, 0]
        buf.attach("host", stream=stream)
        assert answers() == [1, 1, 1, 1, 0]
        buf.attach("single", stream=other)
        assert answers() == [1, 1, 1, 1, 0]
        buf.attach("single", stream=stream)
        assert answers() == [0, 0, 0, 0, 0]
        """)

    def test_concurrent_access_rules_out_nothing(self):
        run(
            """
            own = mm.empty(8192, attach="host")
            own.fill(1, stream=stream)
            own.attach("single", stream=other)
            own.fill(2, stream=stream)
            stream.sync()
            assert bytes(own) == b"\\2" * 8192
            """,
            profile="default",
        )

    def test_a_failed_query_fills_nothing(self):
        run("""
        buf.attach("host", stream=stream)
        for function in ("cuCtxGetDevice", "cuDeviceGetAttribute"):
            emulator.fail(function, code=719)
            assert function in refusal(mm.CUDAError, lambda: buf.fill(1, stream=stream))
            emulator.clear_failures()
        assert bytes(buf) == bytes(8192)
        """)


def test_concurrent_access_needs_no_record():
    run(
        """
        assert mm.Device(0).concurrent_managed_access
        emulator.fail("cuCtxGetDevice", code=719)  # asked for the record only
        live = emulator.live().streams
        buf.attach("single", stream=other)
        other.close()
        assert emulator.live().streams == live - 1
        """,
        profile="default",
    )


class TestFailures:
    @pytest.mark.emulator_only
    def test_of_the_driver(self, buf, stream):
        from managedmem import emulator

        emulator.fail("cuStreamAttachMemAsync", code=719)
        with pytest.raises(CUDAError) as caught:
            buf.attach("single", stream=stream)
        assert (caught.value.code, caught.value.function) == (719, "cuStreamAttachMemAsync")

    def test_leave_the_attachment_as_it_was(self):
        run("""
        buf.attach("single", stream=stream)
        live = emulator.live()
        for function in ("cuStreamGetCtx", "cuCtxGetDevice", "cuStreamIsCapturing"):
            for to in ("global", "host", "single"):
                emulator.fail(function, code=719)
                assert function in refusal(mm.CUDAError, lambda: buf.attach(to, stream=other))
                emulator.clear_failures()
                assert waits() == waits() == [stream.handle]
        assert emulator.live() == live
        """)

    @pytest.mark.parametrize("after", [False, True])
    def test_of_the_attachment_itself_make_views_wait_for_all(self, after):
        run(f"""
        for before, to in (("host", "global"), ("single", "host"), ("host", "single")):
            buf.attach(before, stream=stream)
            assert waits() == [stream.handle]
            emulator.fail("cuStreamAttachMemAsync", code=719, after={after})
            refusal(mm.CUDAError, lambda: buf.attach(to, stream=other))
            emulator.clear_failures()
            assert waits() == waits() == ["all"]
        """)

    def test_of_a_wait_come_again(self):
        run("""
        calls = ("cuThreadExchangeStreamCaptureMode", "cuStreamIsCapturing", "cuStreamSynchronize")
        for function in calls:
            buf.attach("host", stream=stream)
            emulator.fail(function, code=719)
            assert function in refusal(mm.CUDAError, lambda: memoryview(buf))
            emulator.clear_failures()
            assert waits() == [stream.handle] and waits() == []
        buf.attach("global")
        for function in ("cuStreamIsCapturing", "cuCtxSynchronize"):
            emulator.fail(function, code=719)
            assert function in refusal(mm.CUDAError, lambda: memoryview(buf))
            emulator.clear_failures()
            assert waits() == waits() == ["all"]
        """)

    def test_of_an_allocation_leave_nothing(self):
        run("""
        live = emulator.live()
        emulator.fail("cuMemAllocManaged", code=2)
        refusal(mm.CUDAOutOfMemoryError, lambda: mm.empty(4096, attach="host"))
        assert emulator.live() == live
        """)


def test_attachments_and_views_of_several_threads():
    """Streams are closed while others wait for them."""
    run("""
    from threads import at_once
    def attach(to):
        for _ in range(100):
            with Stream() as own:
                buf.attach(to, stream=own)
    def look():
        for _ in range(200):
            with memoryview(buf) as view:
                assert view[0] == 0
    at_once(*[lambda to=to: attach(to) for to in ("host", "single", "global")], look, look)
    live = emulator.live().streams
    buf.attach("global")
    assert emulator.live().streams <= live and waits() == ["all"]
    """)
