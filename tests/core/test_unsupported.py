"""unsupported="skip": targets that cannot take a hint here are passed over and counted."""

import ctypes

import pytest

import managedmem
from calls import names
from constants import PAGE
from contents import contents, write
from driver import capturing, device_memory, pinned_memory
from foreign_objects import CudaArray
from managedmem import (
    CUDAError,
    Device,
    Host,
    ManagedBuffer,
    ManagedMemoryResource,
    MigrationPolicy,
    PrefetchPlan,
    Stream,
    emulator,
)
from programs import run_python

ZERO, HOST = Device(0), Host()
CALLS = {
    "prefetch": lambda targets, **more: managedmem.prefetch(targets, HOST, **more),
    "advise": lambda targets, **more: managedmem.advise(targets, "set_read_mostly", **more),
    "discard": managedmem.discard,
    "discard_prefetch": lambda targets, **more: managedmem.discard_prefetch(targets, HOST, **more),
}
METHODS = {
    "prefetch": lambda buffer, **more: buffer.prefetch(HOST, **more),
    "discard": lambda buffer, **more: buffer.discard(**more),
    "discard_prefetch": lambda buffer, **more: buffer.discard_prefetch(HOST, **more),
}


@pytest.fixture
def plain():
    """A wrapper of device memory, which takes no hint."""
    with device_memory(2 * PAGE) as pointer:
        with ManagedBuffer.from_handle(pointer, 2 * PAGE) as buffer:
            yield buffer


def refuses_advice(memory):
    """1 where the driver takes no advice for memory of this pool, else 0."""
    try:
        for advice in ("set_read_mostly", "unset_read_mostly"):
            managedmem.advise(memory, advice)
    except CUDAError as error:
        assert error.name == "CUDA_ERROR_NOT_SUPPORTED"
        return 1
    return 0


def each_call(calls):
    return pytest.mark.parametrize("call", calls.values(), ids=calls)


class TestTheResult:
    @each_call(CALLS)
    def test_it_counts_the_targets_that_were_passed_over(self, alloc, plain, call):
        good = alloc(PAGE)
        assert call(good, unsupported="skip") == 0
        assert call(plain, unsupported="skip") == 1
        assert call([plain, good, plain], unsupported="skip") == 2
        assert call([plain], unsupported="skip") == 1

    @each_call(CALLS)
    def test_it_is_none_by_default(self, alloc, call):
        good = alloc(PAGE)
        assert call(good) is None
        assert call(good, unsupported="raise") is None

    @each_call(METHODS)
    def test_of_the_methods(self, alloc, plain, call):
        good = alloc(PAGE)
        assert call(good, unsupported="skip") == 0
        assert call(plain, unsupported="skip") == 1
        assert call(good) is None and call(good, unsupported="raise") is None
        for more in ({}, {"unsupported": "raise"}):
            with pytest.raises(ValueError, match="plain device memory"):
                call(plain, **more)

    @each_call(CALLS)
    def test_empty_targets_do_not_count(self, alloc, plain, call):
        empty = alloc(PAGE)[:0]
        assert call([empty, plain[:0], plain], unsupported="skip") == 1
        assert call(plain[:0], unsupported="skip") == 0


class TestTheOthersGetIt:
    def test_a_prefetch(self, alloc, plain, stream):
        a, b = alloc(PAGE), alloc(PAGE)
        call = {"stream": stream, "defer": True, "unsupported": "skip"}
        with pinned_memory(PAGE) as pointer:
            pinned = ManagedBuffer.from_handle(pointer, PAGE)
            targets = [plain, a, pinned, b]
            assert managedmem.prefetch(targets, [ZERO, HOST, HOST, ZERO], **call) == 2
        stream.sync()
        assert (a.last_prefetch_location, b.last_prefetch_location) == (HOST, ZERO)

    @pytest.mark.parametrize("dispatch", ["auto", "loop", "batch"])
    def test_each_dispatch(self, alloc, plain, dispatch):
        buffers = [alloc(PAGE) for _ in range(9)]  # more than the inline capacity
        targets = [*buffers, plain]
        assert managedmem.prefetch(targets, ZERO, dispatch=dispatch, unsupported="skip") == 1
        assert {b.last_prefetch_location for b in buffers} == {ZERO}

    def test_advice(self, alloc, plain):
        a, b = alloc(PAGE), alloc(PAGE)
        skip = {"unsupported": "skip"}
        assert managedmem.advise([a, plain, b], "set_accessed_by", [ZERO, ZERO, HOST], **skip) == 1
        assert (a.accessed_by, b.accessed_by) == ({ZERO}, {HOST})
        assert managedmem.advise([plain, a], "unset_accessed_by", ZERO, **skip) == 1
        assert not a.accessed_by

    def test_a_discard_keeps_targets_without_a_whole_page(self, alloc):
        """They exist on machines with larger pages only."""
        buffer = alloc(3 * PAGE)
        write(buffer, bytes([7]) * buffer.size)
        parts = [buffer.range(100, PAGE), buffer[PAGE : 2 * PAGE], buffer.range(2 * PAGE + 1, 5)]
        for discard in (CALLS["discard"], CALLS["discard_prefetch"]):
            with pytest.raises(ValueError, match="no whole page"):
                discard(parts)
            assert discard(parts, unsupported="skip") == 2
            assert discard(parts[0], unsupported="skip") == 1
        Device().sync()
        kept = contents(buffer)
        assert kept[:PAGE] + kept[2 * PAGE :] == bytes([7]) * 2 * PAGE

    def test_a_discard_follows_the_producers_of_the_others(self, alloc, plain, stream):
        array = CudaArray(alloc(PAGE), members={"stream": 1})
        assert managedmem.discard([plain, array], stream=stream, unsupported="skip") == 1
        assert managedmem.discard(CudaArray(plain), stream=stream, unsupported="skip") == 1

    @pytest.mark.emulator_only
    def test_a_discard_does_not_follow_those_of_what_it_passes_over(self, alloc, plain, stream):
        passed_over = CudaArray(plain, members={"stream": stream.handle})
        with emulator.recording() as calls:
            assert managedmem.discard([alloc(PAGE), passed_over], unsupported="skip") == 1
        assert "cuStreamWaitEvent" not in names(calls)

    def test_advice_on_pool_memory_where_the_driver_refuses_it(self, alloc):
        """Drivers of CUDA 13.0 refuse; one that accepts passes over nothing."""
        with ManagedMemoryResource(pooled=True) as pool:
            with pool.allocate(PAGE) as first, pool.allocate(PAGE) as second:
                a, b = alloc(PAGE), alloc(PAGE)
                refused = refuses_advice(first)
                for targets in ([a, first, b, second], [first, second]):
                    count = managedmem.advise(targets, "set_read_mostly", unsupported="skip")
                    assert count == 2 * refused
                assert a.read_mostly and b.read_mostly
                wrapped = ManagedBuffer.from_handle(first.handle, PAGE)
                count = managedmem.advise([wrapped, a], "unset_read_mostly", unsupported="skip")
                assert count == refused and not a.read_mostly


class TestErrorsStay:
    @each_call(CALLS | {f"method {name}": call for name, call in METHODS.items()})
    def test_a_closed_buffer_and_bad_options(self, alloc, plain, call):
        for wrong in ("ignore", None, True, b"skip"):
            with pytest.raises(ValueError, match='unsupported must be "raise" or "skip", got'):
                call(plain, unsupported=wrong)
        plain.close()
        with pytest.raises(RuntimeError, match="closed"):
            call(plain, unsupported="skip")

    @each_call(CALLS)
    def test_objects_without_memory(self, plain, call):
        for wrong in (5, None, [plain, object()], "memory"):
            with pytest.raises(TypeError):
                call(wrong, unsupported="skip")
        assert call([], unsupported="skip") == 0

    def test_locations(self, alloc, plain):
        skip = {"unsupported": "skip"}
        with pytest.raises(TypeError, match="Device or Host"):
            managedmem.prefetch(plain, 0, **skip)
        with pytest.raises(ValueError, match="length"):
            managedmem.prefetch([plain, plain], [HOST], **skip)
        with pytest.raises(ValueError, match="there is no device 99"):
            managedmem.prefetch(plain, Device(99), **skip)
        with pytest.raises(ValueError, match="required"):
            managedmem.advise(plain, "set_preferred_location", **skip)
        with pytest.raises(ValueError, match="NUMA"):
            managedmem.advise(plain, "set_accessed_by", Host(0), **skip)
        with pytest.raises(TypeError, match="Device or Host"):
            plain.prefetch("cuda", **skip)

    @each_call(CALLS)
    def test_a_range_that_leaves_its_allocation(self, call):
        with managedmem.empty(PAGE) as buffer:
            longer = ManagedBuffer.from_handle(buffer.handle, 64 * PAGE)
            with pytest.raises(ValueError, match="leaves its managed-memory allocation"):
                call(longer, unsupported="skip")

    def test_a_discard_that_would_lose_other_contents(self):
        constant = bytes(4 * PAGE)
        address = ctypes.cast(constant, ctypes.c_void_p).value
        wrapped = ManagedBuffer.from_handle(address, len(constant), owner=constant)
        for target in (wrapped, constant, memoryview(bytearray(constant))[::2]):
            for call in (CALLS["discard"], CALLS["discard_prefetch"]):
                with pytest.raises(ValueError, match="cannot be discarded"):
                    call(target, unsupported="skip")
        with pytest.raises(ValueError, match="cannot be discarded"):
            wrapped.discard(unsupported="skip")

    @each_call({k: v for k, v in CALLS.items() if k != "advise"})
    def test_streams(self, alloc, plain, stream, call):
        ended = Stream()
        ended.close()
        with pytest.raises(RuntimeError, match="Stream is closed"):
            call(plain, stream=ended, unsupported="skip")
        with capturing(stream) as capture:
            with pytest.raises(CUDAError, match="captur"):
                call([alloc(PAGE), plain], stream=stream, unsupported="skip")
        assert capture.result == 0

    @pytest.mark.emulator_only
    @each_call(CALLS)
    def test_nothing_is_called_before_all_is_checked(self, alloc, plain, call):
        good, closed = alloc(PAGE), alloc(PAGE)
        closed.close()
        with emulator.recording() as calls, pytest.raises(RuntimeError, match="closed"):
            call([good, plain, closed], unsupported="skip")
        assert {c.name for c in calls} <= {"cuPointerGetAttributes", "cuDeviceGetAttribute"}

    @pytest.mark.emulator_only
    @pytest.mark.parametrize(
        "function, call",
        [
            ("cuMemPrefetchAsync", CALLS["prefetch"]),
            ("cuMemAdvise", CALLS["advise"]),
            ("cuMemDiscardBatchAsync", CALLS["discard"]),
            ("cuMemDiscardAndPrefetchBatchAsync", CALLS["discard_prefetch"]),
        ],
    )
    @pytest.mark.parametrize("code", [1, 101, 801, 999])
    def test_a_driver_that_fails(self, alloc, function, call, code):
        """Even with the codes that stand for a missing ability, where nothing is missing."""
        good = alloc(PAGE)
        emulator.fail(function, nth=1, code=code)
        with pytest.raises(CUDAError) as caught:
            call(good, unsupported="skip")
        assert caught.value.code == code and caught.value.function == function

    @pytest.mark.emulator_only
    @pytest.mark.parametrize(
        "function", ["cuPointerGetAttributes", "cuMemRangeGetAttribute", "cuMemAdvise"]
    )
    def test_a_driver_that_fails_where_pool_memory_is_tried(self, alloc, function):
        with ManagedMemoryResource(pooled=True) as pool, pool.allocate(PAGE) as pooled:
            good = alloc(PAGE)
            emulator.fail(function, nth=1, code=999)
            with pytest.raises(CUDAError) as caught:
                managedmem.advise([pooled, good], "set_read_mostly", unsupported="skip")
            assert caught.value.code == 999 and not good.read_mostly


class TestPlans:
    def test_nothing_is_passed_over_where_prefetches_work(self, alloc, stream):
        a, b = alloc(PAGE), alloc(PAGE)
        plan = PrefetchPlan([(a, ZERO), (b, HOST), (a[:0], HOST)])
        for dispatch in ("auto", "loop"):
            call = {"dispatch": dispatch, "stream": stream, "unsupported": "skip"}
            assert plan.execute(**call) == 0
        stream.sync()
        assert (a.last_prefetch_location, b.last_prefetch_location) == (ZERO, HOST)
        assert plan.execute() is None and plan.execute(unsupported="raise") is None
        assert PrefetchPlan().execute(unsupported="skip") == 0

    def test_errors_stay(self, alloc, stream):
        a = alloc(PAGE)
        plan = PrefetchPlan([(a, HOST)])
        with pytest.raises(ValueError, match='unsupported must be "raise" or "skip", got None'):
            plan.execute(unsupported=None)
        with pytest.raises(TypeError, match="unsupported"):
            plan.discard_prefetch(unsupported="skip")
        with capturing(stream), pytest.raises(CUDAError, match="captur"):
            plan.execute(stream=stream, unsupported="skip")
        a.close()
        with pytest.raises(RuntimeError, match="entry 0: ManagedBuffer is closed"):
            plan.execute(unsupported="skip")


NEAR = MigrationPolicy(preferred_location=ZERO, accessed_by=[HOST])


class TestPolicies:
    def test_memory_that_takes_none(self, alloc, plain):
        a, b = alloc(PAGE), alloc(PAGE)
        system = memoryview(bytearray(PAGE))
        targets = [plain, a, system, b, plain[:0]]
        with pytest.raises(ValueError, match=r"targets\[0\]"):
            NEAR.apply(targets)
        assert NEAR.apply(targets, unsupported="skip") == 2
        assert MigrationPolicy.of([a, b]) == NEAR
        assert NEAR.apply(plain, unsupported="skip") == 1
        assert NEAR.apply(a) is None and NEAR.apply(a, unsupported="raise") is None

    def test_a_block_restores_the_others(self, alloc, plain):
        a, b = alloc(PAGE), alloc(PAGE)
        b.read_mostly = True
        block = NEAR.applied([a, plain, b], unsupported="skip")
        assert block.skipped == 0
        with block:
            assert block.skipped == 1 and MigrationPolicy.of([a, b]) == NEAR
        assert block.skipped == 1
        assert MigrationPolicy.of(a).is_default
        assert MigrationPolicy.of(b) == MigrationPolicy.read_duplicated()
        with pytest.raises(ValueError, match="plain device memory"):
            NEAR.applied([a, plain])

    def test_a_block_over_nothing(self, plain):
        with NEAR.applied(plain, unsupported="skip") as block:
            assert block.skipped == 1

    def test_pool_memory_where_the_driver_refuses_advice(self, alloc):
        with ManagedMemoryResource(pooled=True) as pool:
            with pool.allocate(PAGE) as first, pool.allocate(PAGE) as second:
                a, b = alloc(PAGE), alloc(PAGE)
                refused = refuses_advice(first)
                for _ in range(2):  # an accepting driver has the policy the second time
                    assert NEAR.apply([a, first, b, second], unsupported="skip") == 2 * refused
                assert MigrationPolicy.of([a, b]) == NEAR
                default = MigrationPolicy.default()
                assert default.apply([first, a, second], unsupported="skip") == 0
                assert default.apply([first, second], unsupported="skip") == 0
                assert MigrationPolicy.of(a).is_default
                with NEAR.applied([first, a], unsupported="skip") as block:
                    assert block.skipped == refused
                assert MigrationPolicy.of([first, a]).is_default

    def test_errors_stay(self, alloc):
        a = alloc(PAGE)
        for call in (NEAR.apply, NEAR.applied):
            with pytest.raises(ValueError, match='unsupported must be "raise" or "skip", got 1'):
                call(a, unsupported=1)
            with pytest.raises(TypeError):
                call(a, "skip")
            with pytest.raises(TypeError):
                call(unsupported="skip")
            with pytest.raises(TypeError):
                call([a, object()], unsupported="skip")
        closed = alloc(PAGE)
        closed.close()
        with pytest.raises(RuntimeError, match="closed"):
            NEAR.apply([a, closed], unsupported="skip")
        assert MigrationPolicy.of(a).is_default

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("code", [101, 801, 999])
    def test_a_driver_that_fails(self, alloc, code):
        """All or nothing, even with the codes that stand for a missing ability."""
        a, b = alloc(PAGE), alloc(PAGE)
        for nth in (1, 2):
            emulator.fail("cuMemAdvise", nth=nth, code=code)
            with pytest.raises(CUDAError) as caught:
                NEAR.apply([a, b], unsupported="skip")
            assert caught.value.code == code and MigrationPolicy.of([a, b]).is_default

    @pytest.mark.emulator_only
    @pytest.mark.parametrize(
        "function, nth",
        [
            ("cuPointerGetAttributes", 1),
            ("cuMemRangeGetAttributes", 1),
            ("cuMemAdvise", 1),
            ("cuMemAdvise", 2),
        ],
    )
    def test_a_driver_that_fails_where_pool_memory_is_asked(self, alloc, function, nth):
        with ManagedMemoryResource(pooled=True) as pool, pool.allocate(PAGE) as pooled:
            a = alloc(PAGE)
            emulator.fail(function, nth=nth, code=999)
            with pytest.raises(CUDAError) as caught:
                NEAR.apply([pooled, a], unsupported="skip")
            assert caught.value.code == 999 and MigrationPolicy.of(a).is_default


SETUP = """
    import managedmem as mm
    from managedmem import Device, Host, emulator
    from constants import PAGE
    buf = mm.ManagedMemoryResource().allocate(16 * PAGE)
    parts = [buf[i * 2 * PAGE :][:PAGE] for i in range(4)]
    skip = {"unsupported": "skip"}
    MOVES = {"cuMemPrefetchBatchAsync", "cuMemDiscardBatchAsync", "cuLaunchHostFunc",
             "cuMemDiscardAndPrefetchBatchAsync", "cuStreamWaitEvent"}
    def refused(call):
        try:
            call()
        except (mm.CUDAError, NotImplementedError):
            return True
        return False
"""


def run(profile, code):
    run_python(SETUP + code, emulator=f"profile={profile}")


class TestWithoutConcurrentAccess:
    def test_prefetches_and_discards(self):
        run(
            "wsl",
            """
    for where in (Device(0), Host()):
        with emulator.recording() as calls:
            assert mm.prefetch(parts, where, **skip) == 4
            assert mm.prefetch(parts, [where] * 4, dispatch="loop", **skip) == 4
            assert mm.prefetch(buf, where, dispatch="batch", **skip) == 1
            assert mm.prefetch(parts, where, dispatch="batch", **skip) == 4
            assert mm.discard_prefetch(parts, where, **skip) == 4
            assert buf.prefetch(where, **skip) == buf.discard_prefetch(where, **skip) == 1
            assert mm.discard(parts, **skip) == 4 and buf.discard(**skip) == 1
        assert not MOVES & {call.name for call in calls}, calls
        assert refused(lambda: buf.prefetch(where)) and refused(lambda: buf.discard())
    large = mm.empty(4 << 20)
    with emulator.recording() as calls:
        assert large.prefetch(Host(), **skip) == 1
    assert "cuLaunchHostFunc" not in {call.name for call in calls}
    with emulator.recording() as calls:
        assert large.prefetch(Host(), defer=True, **skip) == 1
    assert "cuLaunchHostFunc" in {call.name for call in calls}
    emulator.fail("cuMemPrefetchAsync", nth=1, code=999)
    assert refused(lambda: buf.prefetch(Host(), **skip))
    assert mm.prefetch(memoryview(bytearray(PAGE)), Host(), **skip) == 1
    """,
        )

    def test_advice_that_names_a_device(self):
        run(
            "wsl",
            """
    for advice in ("set_preferred_location", "set_accessed_by", "unset_accessed_by"):
        assert refused(lambda: mm.advise(parts, advice, Device(0)))
        assert mm.advise(parts, advice, Device(0), **skip) == 4
        assert mm.advise(parts, advice, [Host(), Device(0), Host(), Device(1)], **skip) == 2
        assert mm.advise([buf, buf[:0]], advice, Device(0), **skip) == 1
        assert mm.advise(parts, advice, Host(), **skip) == 0
    assert mm.advise(parts, "set_read_mostly", **skip) == 0
    assert mm.advise(parts, "unset_preferred_location", **skip) == 0
    emulator.fail("cuDeviceGetAttribute", nth=1, code=999)
    assert refused(lambda: mm.advise(parts, "set_accessed_by", Device(0), **skip))
    """,
        )

    def test_plans(self):
        run(
            "wsl",
            """
    # Neighbours with one location, which an execution otherwise merges, and an empty entry.
    entries = [(buf[:PAGE], Device(0)), (buf[PAGE : 2 * PAGE], Device(0)), (buf[:0], Host())]
    plan = mm.PrefetchPlan([*entries, (buf[4 * PAGE :], Host())])
    with emulator.recording() as calls:
        assert plan.execute(**skip) == 3
        assert plan.execute(dispatch="batch", **skip) == 3
        assert plan[:0].execute(**skip) == 0
    assert not MOVES & {call.name for call in calls}, calls
    assert refused(plan.execute)
    emulator.fail("cuMemPrefetchAsync", nth=2, code=999)
    assert refused(lambda: plan.execute(**skip))
    buf.close()
    from outcomes import refusal
    text = refusal(RuntimeError, lambda: plan.execute(**skip))
    assert "entry 0: ManagedBuffer is closed" in text
    """,
        )

    def test_policies_that_name_a_device(self):
        run(
            "wsl",
            """
    Policy = mm.MigrationPolicy
    for policy in (Policy.prefer(Device(0)), Policy.shared(), Policy.shared([Device(1)])):
        assert refused(lambda: policy.apply(parts))
        assert policy.apply([*parts, buf[:0]], **skip) == 4
        with policy.applied(parts, **skip) as block:
            assert block.skipped == 4
    for policy in (Policy.prefer(Host()), Policy.shared([Host()]), Policy.read_duplicated()):
        assert policy.apply(parts, **skip) == 0
    emulator.fail("cuDeviceGetAttribute", nth=1, code=999)
    assert refused(lambda: Policy.shared().apply(parts, **skip))
    """,
        )

    def test_a_stream_that_captures_stays_an_error(self):
        run(
            "wsl",
            """
    from driver import capturing
    with mm.Stream() as stream, capturing(stream) as capture:
        assert refused(lambda: buf.prefetch(Host(), stream=stream, **skip))
    assert capture.result == 0
    """,
        )


class TestWithAnOldDriver:
    def test_discards_are_passed_over_and_the_rest_works(self):
        run(
            "old12",
            """
    from foreign_objects import CudaArray
    with emulator.recording() as calls:
        assert mm.discard(parts, **skip) == 4
        assert mm.discard(CudaArray(buf, members={"stream": 1}), **skip) == 1
        assert mm.discard([buf[:0], buf], **skip) == 1 and mm.discard(buf[:0], **skip) == 0
        assert mm.discard_prefetch(parts, [Host(), Device(0)] * 2, **skip) == 4
        assert buf.discard(**skip) == buf.discard_prefetch(Host(), **skip) == 1
        assert mm.prefetch(parts, Host(), dispatch="batch", **skip) == 4
    assert {call.name for call in calls} <= {"cuPointerGetAttributes"}, calls
    assert refused(lambda: mm.discard(parts)) and refused(lambda: buf.discard())
    assert mm.prefetch(parts, [Device(0), Host()] * 2, **skip) == 0
    assert [p.last_prefetch_location for p in parts] == [Device(0), Host()] * 2
    plan = mm.PrefetchPlan(zip(parts, [Host(), Device(0)] * 2))
    assert plan.execute(dispatch="batch", **skip) == 4 and plan.execute(**skip) == 0
    assert [p.last_prefetch_location for p in parts] == [Host(), Device(0)] * 2
    assert mm.advise(parts, "set_preferred_location", Device(0), **skip) == 0
    assert buf[:PAGE].preferred_location is Device(0)
    """,
        )


NAMED = {
    "prefetch": (
        "buf.prefetch(ZERO)",
        "mm.prefetch([buf, other], ZERO)",
        "mm.prefetch([buf, other], ZERO, dispatch='batch')",
        "mm.PrefetchPlan([(buf, ZERO)]).execute()",
        "mm.empty(4096, prefetch=ZERO)",
    ),
    "discard": ("buf.discard()", "mm.discard([buf, other])"),
    "discard_prefetch": ("buf.discard_prefetch(ZERO)", "mm.discard_prefetch([buf, other], ZERO)"),
    "advise": (
        "mm.advise(buf, 'set_accessed_by', ZERO)",
        "buf.accessed_by.add(ZERO)",
        "setattr(buf, 'preferred_location', ZERO)",
        "mm.MigrationPolicy.prefer(ZERO).apply([buf, other])",
    ),
}


class TestTheError:
    @pytest.mark.parametrize("function", NAMED)
    def test_names_the_function_that_skips_without_concurrent_access(self, function):
        self.check("profile=wsl", function, NAMED[function])

    @pytest.mark.parametrize("function", ["discard", "discard_prefetch"])
    def test_names_the_function_that_skips_on_an_old_driver(self, function):
        self.check("profile=old12", function, NAMED[function])

    def test_names_the_function_that_skips_batches_on_an_old_driver(self):
        self.check("profile=old12", "prefetch", [NAMED["prefetch"][2]])

    def test_of_a_missing_node_names_none(self):
        run_python(
            """
            import warnings; warnings.simplefilter("ignore")
            import managedmem as mm
            from outcomes import refusal
            buf, nowhere = mm.empty(4096), mm.Host(numa_id=9)
            for given in ("raise", "skip"):
                for act in (lambda: mm.prefetch(buf, nowhere, unsupported=given),
                            lambda: mm.advise(buf, "set_preferred_location", nowhere,
                                              unsupported=given)):
                    assert "skip" not in refusal(mm.CUDAError, act)
            """,
            emulator="profile=wsl",
        )

    def test_of_a_query_names_none(self):
        run_python(
            """
            import warnings; warnings.simplefilter("ignore")
            import managedmem as mm
            from managedmem import emulator
            from outcomes import refusal
            buf = mm.empty(4096)
            emulator.fail("cuMemRangeGetAttribute", code=1)
            text = refusal(mm.CUDAError, lambda: buf.read_mostly)
            assert "concurrent_managed_access" in text and "skip" not in text, text
            """,
            emulator="profile=wsl",
        )

    def check(self, profile, function, acts):
        run_python(
            f"""
            import warnings; warnings.simplefilter("ignore")
            import managedmem as mm
            from outcomes import refusal
            ZERO = mm.Device(0)
            buf, other = mm.empty(8192), mm.empty(8192)
            arguments = dict(advise=["set_accessed_by", ZERO], discard=[]).get({function!r}, [ZERO])
            assert mm.{function}(buf, *arguments, unsupported="skip") in (0, 1)
            for act in {list(acts)!r}:
                text = refusal((mm.CUDAError, NotImplementedError), lambda: eval(act))
                named = 'managedmem.{function}(..., unsupported="skip") skips what is unsupported'
                assert named in text, text
            """,
            emulator=profile,
        )
