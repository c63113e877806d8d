"""PrefetchPlan: the memory that its entries keep, and plans that several threads use."""

import collections
import contextlib
import copy
import ctypes
import gc
import weakref

import pytest

import managedmem
from constants import KIB, MIB, PAGE
from contents import contents, pattern, write
from driver import managed_memory, raw_driver
from foreign_objects import CudaArray
from managedmem import Device, Host, PrefetchPlan, Stream
from plans import adjacent, place
from programs import run_python
from races import race

emulator_only = pytest.mark.emulator_only


def separate(buffer, count, size=PAGE):
    """Ranges with a gap of their size between them: nothing to merge."""
    return [buffer[2 * i * size : (2 * i + 1) * size] for i in range(count)]


class TestLifetimes:
    def test_keeps_targets_alive(self, device0):
        buffer = managedmem.ManagedMemoryResource().allocate(PAGE)
        gone = weakref.ref(buffer)
        plan = PrefetchPlan([(buffer[: PAGE // 2], device0)])
        del buffer
        gc.collect()
        assert gone() is not None
        plan.execute()
        plan.clear()
        gc.collect()
        assert gone() is None

    def test_the_end_of_a_plan_lets_them_go(self, alloc):
        array = CudaArray(alloc(PAGE))
        gone = weakref.ref(array)
        plan = PrefetchPlan([(array, Host())])
        plan.execute()
        weak = weakref.ref(plan)
        del array, plan
        gc.collect()
        assert gone() is None
        assert weak() is None

    def test_a_cycle_is_collected(self, alloc):
        array = CudaArray(alloc(PAGE))
        array.plan = PrefetchPlan([(array, Host())])
        array.plan.execute()
        gone = weakref.ref(array)
        del array
        gc.collect()
        assert gone() is None

    def test_a_buffer_in_a_plan_can_be_closed(self, alloc, stream):
        first, second = alloc(MIB), alloc(MIB)
        first.prefetch(Host())
        plan = PrefetchPlan([(first, Device(0)), (second, Device(0))])
        plan.execute(stream=stream)
        first.prefetch(Host())
        second.close()
        for call in (plan.execute, plan.discard_prefetch, plan.explain):
            with pytest.raises(RuntimeError, match="entry 1: ManagedBuffer is closed"):
                call(stream=stream)
        assert place(first) == Host()
        assert len(plan) == 2
        assert [e.target.is_closed for e in plan] == [False, True]

    def test_the_first_closed_entry_is_named(self, alloc):
        buffers = [alloc(PAGE) for _ in range(20)]
        plan = PrefetchPlan((b, Host()) for b in buffers)
        for i in (17, 3, 9):
            buffers[i].close()
        with pytest.raises(RuntimeError, match="entry 3: "):
            plan.execute()

    def test_a_closed_view_is_refused_though_its_memory_lives(self, buf):
        view = buf[:PAGE]
        plan = PrefetchPlan([(buf, Host()), (view, Host())])
        view.close()
        with pytest.raises(RuntimeError, match="entry 1: ManagedBuffer is closed"):
            plan.execute()
        buf.prefetch(Host())

    def test_nothing_is_held_after_an_execution(self, alloc):
        """Guards that were entered are left, even after a refusal: closing would wait for ever."""
        first, second = alloc(PAGE), alloc(PAGE)
        plan = PrefetchPlan([(first, Host()), (first[: PAGE // 2], Host()), (second, Host())])
        plan.execute()
        second.close()
        with pytest.raises(RuntimeError):
            plan.execute()
        first.close()

    def test_memory_of_others_that_was_freed_is_refused(self, buf):
        pointer = managed_memory(2 * MIB)
        array = CudaArray(buf, shape=(PAGE,), pointer=pointer)
        buf.prefetch(Host())
        plan = PrefetchPlan([(buf, Device(0)), (array, Host())])
        plan.execute()
        buf.prefetch(Host())
        assert raw_driver().cuMemFree_v2(ctypes.c_uint64(pointer)) == 0
        for call in (plan.execute, plan.discard_prefetch, plan.explain):
            with pytest.raises(ValueError, match=r"entry 1|\(entry 1\)"):
                call()
        assert place(buf) == Host()

    def test_exports_last_until_clear(self, alloc):
        buffer = alloc(PAGE)
        plan = PrefetchPlan([(memoryview(buffer), Host())])
        gc.collect()
        plan.execute()
        with pytest.raises(BufferError, match="still live"):
            buffer.close()
        plan.clear()
        buffer.close()

    def test_a_refused_target_leaves_no_export(self, alloc):
        buffer = alloc(PAGE)
        plan = PrefetchPlan()
        for bad in (None, 7):
            with pytest.raises((TypeError, ValueError)):
                plan.add(memoryview(buffer), bad)
            with pytest.raises((TypeError, ValueError)):
                PrefetchPlan([(memoryview(buffer), bad)])
        with pytest.raises(ValueError, match="nbytes"):
            plan.add(memoryview(buffer), Host(), nbytes=-1)
        gc.collect()
        buffer.close()

    def test_a_target_that_clears_the_plan_while_it_is_read(self, buf):
        plan = PrefetchPlan([(buf, Host())] * 9)

        class Sly:
            @property
            def __cuda_array_interface__(self):
                plan.clear()
                return CudaArray(buf).__cuda_array_interface__

        plan.add(Sly(), Host())
        assert len(plan) == 1
        plan.execute()

    def test_a_stream_that_changes_the_plan_while_it_is_read(self, buf):
        plan = PrefetchPlan([(buf, Host())])

        class Sly:
            def __cuda_stream__(self):
                plan.clear()
                return (0, 0)

        buf.prefetch(Device(0))
        plan.execute(stream=Sly())
        assert place(buf) == Host()
        assert len(plan) == 0

    def test_after_a_fork_it_is_refused(self):
        run_python(
            """
            import managedmem
            from managedmem import Host, PrefetchPlan
            from program_checks import in_child, refused
            buffer = managedmem.empty(4096)
            plan = PrefetchPlan([(buffer, Host())])
            plan.execute()
            def work():
                with refused(RuntimeError, "fork"):
                    plan.execute()
                len(plan), list(plan), plan.clear()
            assert in_child(work) == 0
            plan.execute()
            """,
            driver="emulator",
        )


class TestThreads:
    ROUNDS = 40

    def test_many_execute_at_once(self, alloc, device0):
        large = alloc(8 * MIB)
        write(large, pattern(8 * MIB))
        plan = PrefetchPlan((part, device0) for part in separate(large, 32, 128 * KIB))

        def work():
            with Stream() as stream:
                for _ in range(self.ROUNDS):
                    plan.execute(stream=stream)
                    plan.explain(stream=stream)
                stream.sync()

        race(*[work] * 4)
        assert {place(e.target) for e in plan} == {device0}
        assert contents(large) == pattern(8 * MIB)

    def test_adding_clearing_and_executing(self, buf, device0):
        plan = PrefetchPlan([(buf, device0)])

        def add():
            for _ in range(self.ROUNDS * 4):
                plan.add(buf[:PAGE], device0)

        def clear():
            for _ in range(self.ROUNDS):
                plan.clear()

        def use():
            for _ in range(self.ROUNDS):
                plan.execute()
                plan.discard_prefetch()
                plan.explain()
                for part in (plan[:], plan[::-1], copy.copy(plan)):
                    assert all(e.location is device0 for e in part)
                with contextlib.suppress(IndexError):
                    assert plan[-1].location is device0
                assert all(e.location is device0 for e in plan)
                assert len(plan) >= 0 <= plan.nbytes

        race(add, add, clear, use, use)

    def test_every_added_entry_arrives(self, buf):
        plan = PrefetchPlan()
        pages = adjacent(buf, 64)

        def add():
            for page in pages:
                plan.add(page, Host())

        race(*[add] * 4)
        seen = collections.Counter(e.pointer for e in plan)
        assert seen == {page.handle: 4 for page in pages}
        assert all(e.pointer == e.target.handle for e in plan)

    def test_closing_while_others_execute(self, device0):
        resource = managedmem.ManagedMemoryResource()
        for _ in range(self.ROUNDS):
            buffer = resource.allocate(4 * PAGE)
            plan = PrefetchPlan([(buffer[:PAGE], device0), (buffer[2 * PAGE :], Host())])

            def use(plan=plan):
                with pytest.raises(RuntimeError, match="entry 0: ManagedBuffer is closed"):
                    while True:
                        plan.execute()

            race(use, use, buffer.close)
