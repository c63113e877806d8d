"""PrefetchPlan: its execution, the entries that fit a device, and memory that changed since."""

import ctypes
import types

import pytest

from constants import EMULATED, MIB, PAGE
from contents import contents, pattern, write
from driver import CAPTURE_GLOBAL, capturing, managed_memory, raw_driver
from foreign_objects import CudaArray
from managedmem import CUDAError, Device, Host, ManagedBuffer, PrefetchPlan, Stream, emulator
from plans import adjacent, place, places
from programs import run_python

emulator_only = pytest.mark.emulator_only


class TestExecute:
    def test_moves_every_entry(self, alloc, device0, stream):
        first, second, third = (alloc(2 * MIB) for _ in range(3))
        write(first, pattern(2 * MIB))
        plan = PrefetchPlan([(first, device0), (second, Host()), (third, device0)])
        assert plan.execute(stream=stream) is None
        stream.sync()
        assert place(first) == device0
        assert place(second) == Host()
        assert place(third) == device0
        assert contents(first) == pattern(2 * MIB)

    def test_can_be_repeated_and_changed(self, alloc, device0, stream):
        first, second = alloc(MIB), alloc(MIB)
        plan = PrefetchPlan([(first, device0)])
        for _ in range(3):
            plan.execute(stream=stream)
            first.prefetch(Host(), stream=stream)
        plan.add(second, device0).execute(stream=stream)
        assert place(first) == place(second) == device0
        plan.clear()
        plan.add(second, Host()).execute(stream=stream)
        assert place(first) == device0
        assert place(second) == Host()

    def test_a_part_leaves_the_rest(self, buf, device0, stream):
        buf.prefetch(Host(), stream=stream)
        PrefetchPlan().add(buf, device0, offset=2 * PAGE, nbytes=PAGE).execute(stream=stream)
        assert place(buf[2 * PAGE : 3 * PAGE]) == device0
        assert place(buf[: 2 * PAGE]) == Host()
        assert place(buf[3 * PAGE :]) == Host()

    @pytest.mark.parametrize("dispatch", ["auto", "batch", "loop"])
    def test_of_overlapping_entries_the_last_wins(self, buf, device0, stream, dispatch):
        plan = PrefetchPlan([(buf[PAGE : 9 * PAGE], device0), (buf[2 * PAGE : 3 * PAGE], Host())])
        plan.execute(stream=stream, dispatch=dispatch)
        assert place(buf[2 * PAGE : 3 * PAGE]) == Host()
        assert place(buf[3 * PAGE : 9 * PAGE]) == device0
        plan.add(buf, device0).execute(stream=stream, dispatch=dispatch)
        assert place(buf) == device0

    def test_goes_to_several_devices(self, alloc, device0, device1, stream):
        first, second = alloc(2 * MIB), alloc(2 * MIB)
        for dispatch in ("auto", "batch", "loop"):
            plan = PrefetchPlan([(first, device0), (second, device1)])
            plan.execute(stream=stream, dispatch=dispatch)
            assert place(first) == device0
            assert place(second) == device1
            first, second = second, first

    @pytest.mark.parametrize("defer", [None, True, False])
    def test_on_the_default_stream(self, alloc, device0, defer):
        buffers = [alloc(4 * MIB) for _ in range(3)]
        PrefetchPlan((b, device0) for b in buffers).execute(defer=defer)
        device0.sync()
        assert {place(b) for b in buffers} == {device0}

    def test_other_streams(self, buf, device0, stream):
        plan = PrefetchPlan([(buf, device0)])
        for given in (None, 0, 2, stream.handle, types.SimpleNamespace(__cuda_stream__=None)):
            if isinstance(given, types.SimpleNamespace):
                given.__cuda_stream__ = lambda: (0, stream.handle)
            plan.execute(stream=given)
        assert place(buf) == device0

    @pytest.mark.parametrize("empty", [False, True])
    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"dispatch": "both"}, ValueError),
            ({"defer": 1}, TypeError),
            ({"stream": "s"}, TypeError),
            ({"stream": -1}, ValueError),
        ],
    )
    def test_bad_arguments(self, buf, arguments, error, empty):
        buf.prefetch(Host())
        plan = PrefetchPlan([] if empty else [(buf, Device(0))])
        for call in (plan.execute, plan.discard_prefetch, plan.explain):
            with pytest.raises(error, match=next(iter(arguments))):
                call(**arguments)
            with pytest.raises(TypeError, match="positional"):
                call(None)
        assert place(buf) == Host()

    def test_an_empty_plan_does_nothing(self, stream):
        plan = PrefetchPlan()
        for arguments in ({}, {"stream": stream}, {"dispatch": "loop", "defer": True}):
            assert plan.execute(**arguments) is None
            assert plan.discard_prefetch(**arguments) is None
        assert plan.explain() == "0 driver calls: the plan is empty"
        assert plan.explain(discard=True) == plan.explain()

    @emulator_only
    def test_an_empty_plan_calls_nothing(self, stream):
        with emulator.recording() as calls:
            PrefetchPlan().execute(stream=stream, defer=True, dispatch="batch")
            PrefetchPlan().discard_prefetch()
        assert calls == []

    def test_an_empty_plan_refuses_a_closed_stream(self):
        closed = Stream()
        closed.close()
        for call in (PrefetchPlan().execute, PrefetchPlan().explain):
            with pytest.raises(RuntimeError, match="Stream is closed"):
                call(stream=closed)

    def test_a_capture_is_refused_and_survives(self, buf, stream, device0):
        plan = PrefetchPlan([(buf, device0), (buf[:PAGE], Host())])
        with capturing(stream, CAPTURE_GLOBAL) as capture:
            for call in (plan.execute, plan.discard_prefetch, plan.explain):
                with pytest.raises(CUDAError, match="cannot be recorded in a CUDA graph"):
                    call(stream=stream)
        assert capture.result == 0
        plan.execute(stream=stream)

    def test_another_stream_may_capture(self, buf, device0, stream):
        plan = PrefetchPlan([(buf, device0)])
        with Stream() as other, capturing(other, CAPTURE_GLOBAL) as capture:
            plan.execute(stream=stream)
            plan.explain(stream=stream)
        assert capture.result == 0
        assert place(buf) == device0


class TestDiscardPrefetch:
    def test_moves_pages_without_their_bytes(self, alloc, device0, stream):
        first, second = alloc(2 * MIB), alloc(2 * MIB)
        plan = PrefetchPlan([(first, device0), (second, Host())])
        assert plan.discard_prefetch(stream=stream) is None
        stream.sync()
        assert place(first) == device0
        assert place(second) == Host()

    def test_neighbours_keep_every_byte(self, buf, device0):
        data = write(buf, pattern(MIB))
        start, size = 2 * PAGE + 100, 3 * PAGE
        plan = PrefetchPlan().add(buf, device0, offset=start, nbytes=size)
        plan.discard_prefetch()
        now = contents(buf)
        assert now[:start] == data[:start]
        assert now[start + size :] == data[start + size :]
        # Also within: only whole pages are lost.
        assert now[start : 3 * PAGE] == data[start : 3 * PAGE]
        assert now[5 * PAGE : start + size] == data[5 * PAGE : start + size]

    def test_less_than_a_page_is_refused_before_anything(self, buf, device0):
        write(buf, 7)
        plan = PrefetchPlan([(buf, device0)]).add(buf, device0, nbytes=PAGE - 1)
        with pytest.raises(ValueError, match=r"no whole page.*\(entry 1\)"):
            plan.discard_prefetch()
        assert contents(buf) == bytes([7]) * MIB
        plan.execute()

    def test_gaps_are_refused(self, buf):
        plan = PrefetchPlan().add(CudaArray(buf, shape=(4,), strides=(2 * PAGE,)), Host())
        with pytest.raises(ValueError, match="entry 0: cannot discard a target that is not cont"):
            plan.discard_prefetch()
        plan.execute()


class TestFit:
    def test_the_order_decides(self, alloc, device0):
        a, b, c, d = alloc(4 * MIB), alloc(2 * MIB), alloc(4 * MIB), alloc(MIB)
        plan = PrefetchPlan.fit([a, b, c, d], device0, 7 * MIB)
        # c does not fit behind a and b; d, which is smaller, does.
        assert places(plan) == [device0, device0, Host(), device0]
        assert [e.target for e in plan] == [a, b, c, d]
        assert places(PrefetchPlan.fit([c, a, b], device0, budget=8 * MIB)) == [
            device0,
            device0,
            Host(),
        ]

    def test_can_be_executed(self, alloc, device0, stream):
        a, b = alloc(2 * MIB), alloc(4 * MIB)
        PrefetchPlan.fit([a, b], device0, 3 * MIB).execute(stream=stream)
        assert place(a) == device0
        assert place(b) == Host()

    def test_one_target(self, buf, device0):
        assert places(PrefetchPlan.fit(buf, device0)) == [device0]
        assert places(PrefetchPlan.fit(targets=buf, device=device0, budget=MIB - 1)) == [Host()]
        assert places(PrefetchPlan.fit(buf, device0, MIB)) == [device0]

    def test_no_budget_at_all(self, buf, device0):
        assert places(PrefetchPlan.fit([buf, buf[:1]], device0, 0)) == [Host(), Host()]

    def test_whole_pages_count(self, buf, device0):
        assert places(PrefetchPlan.fit([buf[1:3]], device0, PAGE - 1)) == [Host()]
        assert places(PrefetchPlan.fit([buf[1:3]], device0, PAGE)) == [device0]
        across = buf[PAGE - 1 : PAGE + 1]
        assert places(PrefetchPlan.fit([across], device0, 2 * PAGE - 1)) == [Host()]

    def test_equal_targets_count_once(self, alloc, device0):
        a, b = alloc(MIB), alloc(MIB)
        plan = PrefetchPlan.fit([a, CudaArray(a), b, a, b], device0, 2 * MIB)
        assert set(places(plan)) == {device0}
        # What went to the host stays there, even when it comes again.
        plan = PrefetchPlan.fit([a, b, b, a], device0, MIB)
        assert places(plan) == [device0, Host(), Host(), device0]

    def test_many_targets(self, buf, device0):
        pages = adjacent(buf, MIB // PAGE)
        plan = PrefetchPlan.fit(pages, device0, 10 * PAGE + 1)
        assert places(plan) == [device0] * 10 + [Host()] * (MIB // PAGE - 10)

    def test_never_more_than_is_free(self, alloc, device0):
        """Views of one buffer stand for more than there is; nothing is moved."""
        large = alloc(64 * MIB)
        free = device0.memory_info.free
        # Ranges that differ, so that each counts.
        count = free // (63 * MIB) + 2
        targets = [large[i * PAGE :] for i in range(min(count, 200))]
        if sum(t.size for t in targets) <= free:
            pytest.skip("200 views of 64 MiB do not fill this device")
        for budget in (None, free * 4, 2**63 - 1):
            plan = PrefetchPlan.fit(targets, device0, budget)
            used = sum(e.nbytes for e in plan if e.location == device0)
            assert 0 < used <= device0.memory_info.free
            assert Host() in places(plan)

    @emulator_only
    def test_without_a_budget_a_sixteenth_is_left_alone(self, alloc, device0):
        free, total = device0.memory_info
        large = alloc(256 * MIB)
        targets = [large[i * PAGE :] for i in range(8)]
        plan = PrefetchPlan.fit(targets, device0)
        used = sum(e.nbytes for e in plan if e.location == device0)
        assert free - total // 16 - 256 * MIB < used <= free - total // 16

    @emulator_only
    def test_memory_on_the_device_is_not_free(self, alloc, device0, stream):
        large = alloc(256 * MIB)
        free = device0.memory_info.free
        large.prefetch(device0, stream=stream)
        stream.sync()
        assert device0.memory_info.free <= free - 256 * MIB
        targets = [large[i * PAGE :] for i in range(8)]
        used = sum(
            e.nbytes for e in PrefetchPlan.fit(targets, device0, free) if e.location == device0
        )
        assert used <= free - 256 * MIB

    @pytest.mark.parametrize(
        ("budget", "error", "words"),
        [
            (-1, ValueError, "budget must be 0 bytes or more, got -1"),
            (True, TypeError, "budget must be an int"),
            (1.5, TypeError, "budget must be an int"),
            ("1", TypeError, "budget must be an int, the number of bytes, got '1': 4 GiB is 4 <<"),
            (2**64, ValueError, "budget is out of range"),
        ],
    )
    def test_bad_budgets(self, buf, device0, budget, error, words):
        with pytest.raises(error, match=words):
            PrefetchPlan.fit([buf], device0, budget)

    def test_takes_the_ordinal_of_a_device(self, buf, device0):
        assert PrefetchPlan.fit([buf], 0)[0].location is device0

    def test_bad_targets_and_devices(self, buf, device0):
        for bad in (Host(), None, True, "cuda:0"):
            with pytest.raises(TypeError, match="a Device or its ordinal is needed, got"):
                PrefetchPlan.fit([buf], bad)
        assert len(PrefetchPlan.fit([], device0)) == 0
        with pytest.raises(TypeError, match=r"targets\[1\]: a target must be"):
            PrefetchPlan.fit([buf, 3], device0)


class TestOtherDrivers:
    def test_before_batch_calls(self):
        run_python(
            """
            import managedmem, re
            from managedmem import Device, Host, PrefetchPlan, emulator
            from outcomes import refusal
            buffer = managedmem.empty(8 << 20)
            parts = [buffer[2 * i << 20 : (2 * i + 1) << 20] for i in range(4)]
            plan = PrefetchPlan((part, Device(0)) for part in parts)
            assert "4 x cuMemPrefetchAsync" in plan.explain()
            assert "this driver has no batch call" in plan.explain()
            with emulator.recording() as calls:
                plan.execute()
            assert [c.name for c in calls] == ["cuMemPrefetchAsync"] * 4, calls
            for call in (
                lambda: plan.execute(dispatch="batch"),
                plan.discard_prefetch,
                lambda: plan.explain(discard=True),
            ):
                text = refusal(NotImplementedError, call)
                assert "12.2" in text and "13.0" in text
            """,
            emulator="profile=old12",
        )

    def test_without_concurrent_access(self):
        run_python(
            """
            import managedmem
            from managedmem import CUDAError, Device, PrefetchPlan
            from outcomes import refusal
            buffer = managedmem.empty(8 << 20)
            plan = PrefetchPlan([(buffer[: 1 << 20], Device(0)), (buffer[2 << 20 :], Device(0))])
            assert "concurrent_managed_access" in plan.explain()
            assert "concurrent_managed_access" in refusal(CUDAError, plan.execute)
            """,
            emulator="profile=wsl",
        )

    def test_system_memory_where_the_device_reaches_it(self):
        run_python(
            """
            import mmap
            from managedmem import Device, Host, PrefetchPlan
            memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
            plan = PrefetchPlan([(memory, Device(0))]).add(memory, Host(), nbytes=mmap.PAGESIZE)
            plan.execute()
            assert plan.explain().startswith("2 driver calls")
            memory[:] = b"7" * len(memory)
            plan.discard_prefetch()
            Device().sync()
            assert bytes(memory) == b"\\xdb" * len(memory)
            plan.clear()
            memory.close()
            """,
            emulator="pageable=1",
        )

    def test_elsewhere_system_memory_is_refused(self):
        if EMULATED or not Device(0).pageable_memory_access:
            with pytest.raises(ValueError, match="pageable_memory_access"):
                PrefetchPlan([(bytearray(8 * PAGE), Host())])

    @pytest.mark.parametrize("devices", [1, 2, 5])
    def test_any_number_of_devices(self, devices):
        run_python(
            """
            import managedmem
            from managedmem import Device, Host, PrefetchPlan
            buffer = managedmem.empty(64 << 20)
            parts = [buffer[2 * i << 20 : (2 * i + 1) << 20] for i in range(30)]
            everywhere = [*Device.all(), Host(), Host(0)]
            for turn in range(len(everywhere)):
                where = [everywhere[(i + turn) % len(everywhere)] for i in range(30)]
                plan = PrefetchPlan(zip(parts, where))
                for dispatch in ("auto", "loop", "batch"):
                    plan.execute(dispatch=dispatch)
                    Device.all()[0].sync()
                    assert [p.last_prefetch_location for p in parts] == where
                plan.discard_prefetch()
            last = Device.all()[-1]
            assert [e.location for e in PrefetchPlan.fit(parts, last, 3 << 20)] == (
                [last] * 3 + [Host()] * 27
            )
            """,
            emulator=f"devices={devices}",
        )


class TestMemoryOfOthersThatChanged:
    """Plans look at foreign memory again before each execution."""

    @staticmethod
    def free(address):
        assert raw_driver().cuMemFree_v2(ctypes.c_uint64(address)) == 0

    @staticmethod
    def array(address, size):
        """An array of another library, which does not keep its memory alive."""
        members = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
        return types.SimpleNamespace(__cuda_array_interface__=members)

    @pytest.mark.parametrize("call", ["execute", "discard_prefetch", "explain"])
    def test_freed_and_the_address_given_to_others(self, call):
        """The new memory is valid, but it is not what was added."""
        live = [managed_memory(PAGE)]  # keeps the block of small allocations, which share it
        whole = managed_memory(8 * PAGE)
        second = whole + 4 * PAGE
        plan = PrefetchPlan([(self.array(second, PAGE), Host())])
        plan.execute()
        self.free(whole)
        live += [managed_memory(4 * PAGE) for _ in range(2)]
        try:
            if second not in live:
                pytest.skip("the driver gave no new memory that begins at this address")
            with pytest.raises(ValueError, match=f"entry 0: the memory at {second:#x} was freed"):
                getattr(plan, call)()
        finally:
            for address in live:
                self.free(address)

    @pytest.mark.parametrize("call", ["execute", "discard_prefetch", "explain"])
    def test_freed(self, alloc, call):
        address = managed_memory(PAGE)
        buffer = alloc(PAGE)
        plan = PrefetchPlan([(buffer, Host()), (self.array(address, PAGE), Host())])
        self.free(address)
        with pytest.raises(ValueError, match=r"entry 1\b"):
            getattr(plan, call)()
        buffer.close()  # would wait if the plan still held it

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("call", ["execute", "discard_prefetch", "explain"])
    def test_the_second_look_fails(self, alloc, call):
        first, last, other = alloc(PAGE), alloc(PAGE), alloc(PAGE)
        plan = PrefetchPlan([(first, Host()), (CudaArray(other), Host()), (last, Host())])
        emulator.fail("cuPointerGetAttributes", code=719)
        with pytest.raises(CUDAError, match=r"cuPointerGetAttributes.*entry 1") as error:
            getattr(plan, call)()
        assert error.value.code == 719
        getattr(plan, call)()
        for buffer in (first, last):
            buffer.close()

    def test_two_wrappers_that_nobody_looked_at(self, alloc):
        """Their allocations are not known when they are added; neighbours of two must not merge."""
        owner = alloc(4 * PAGE)
        wrap = ManagedBuffer.from_handle
        pairs = [(wrap(owner.handle + i * PAGE, PAGE, owner=owner), Host()) for i in (0, 1)]
        second = alloc(PAGE)
        pairs.append((wrap(second.handle, PAGE, owner=second), Host()))
        plan = PrefetchPlan(pairs)
        plan.execute()
        assert [b.last_prefetch_location for b, _ in pairs] == [Host()] * 3
        pairs[1][0].close()
        with pytest.raises(RuntimeError, match="entry 1: ManagedBuffer is closed"):
            plan.execute()
