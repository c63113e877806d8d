"""MigrationPolicy: a block in which a policy applies, and the advice that it restores."""

import contextlib
import ctypes
import functools
import gc
import pickle
import threading
import weakref

import pytest

import managedmem
from constants import PAGE
from driver import managed_memory, raw_driver
from foreign_objects import CudaArray
from managedmem import CUDAError, Host, ManagedBuffer, MigrationPolicy, emulator
from managedmem.typing import AppliedPolicy
from policies import samples, scramble, state
from threads import at_once


class TestApplied:
    def test_is_in_force_in_the_block_and_gone_behind_it(self, alloc):
        buffer = alloc(16 * PAGE)
        for seed, policy in enumerate(samples()):
            before = scramble(buffer, seed)
            with policy.applied(buffer) as block:
                assert isinstance(block, AppliedPolicy)
                assert block.policy is policy
                assert MigrationPolicy.of(buffer) == policy
            assert buffer.page_runs() == before

    def test_restores_whatever_the_block_did(self, alloc, device0):
        buffer = alloc(16 * PAGE)
        before = scramble(buffer, 1)
        with MigrationPolicy.prefer(device0).applied(buffer):
            scramble(buffer, 2)
        assert buffer.page_runs() == before

    def test_restores_when_the_block_raises(self, alloc, device0):
        buffer = alloc(4 * PAGE)
        before = scramble(buffer)
        with pytest.raises(LookupError, match="mine"):
            with MigrationPolicy.prefer(device0).applied(buffer):
                raise LookupError("mine")
        assert buffer.page_runs() == before

    def test_several_targets(self, alloc):
        buffers = [alloc(8 * PAGE) for _ in range(10)]
        before = [scramble(buffer, seed) for seed, buffer in enumerate(buffers)]
        parts = [buffer.range(PAGE * (i % 3), 4 * PAGE + 1) for i, buffer in enumerate(buffers)]
        with MigrationPolicy.shared().applied(reversed([*parts, *buffers[:3]])):
            assert MigrationPolicy.of(parts) == MigrationPolicy.shared()
        assert state(*buffers) == before

    def test_nested_blocks(self, alloc, device0):
        buffer = alloc(8 * PAGE)
        before = scramble(buffer)
        with MigrationPolicy.prefer(device0).applied(buffer):
            with MigrationPolicy.shared().applied(buffer.range(PAGE, PAGE)):
                with MigrationPolicy.default().applied([buffer]):
                    assert MigrationPolicy.of(buffer) == MigrationPolicy()
                assert len(buffer.page_runs()) == 3
            assert MigrationPolicy.of(buffer) == MigrationPolicy.prefer(device0)
        assert buffer.page_runs() == before

    def test_one_object_is_in_force_once(self, alloc, device0):
        buffer = alloc(PAGE)
        block = MigrationPolicy.prefer(device0).applied(buffer)
        for _ in range(2):
            with block:
                with pytest.raises(RuntimeError, match="applied its policy already"):
                    block.__enter__()
                assert buffer.preferred_location is device0
            assert buffer.preferred_location is None
        for leave in (block.restore, lambda: block.__exit__(None, None, None)):
            with pytest.raises(RuntimeError, match="nothing to restore"):
                leave()

    def test_applied_checks_its_targets_and_changes_nothing(self, alloc, device0):
        buffer = alloc(PAGE)
        block = MigrationPolicy.prefer(device0).applied(buffer)
        assert buffer.preferred_location is None
        buffer.close()
        with pytest.raises(RuntimeError, match="closed"):
            block.__enter__()
        with pytest.raises(RuntimeError, match="nothing to restore"):
            block.restore()

    def test_a_target_closed_in_the_block_is_left_out(self, alloc, device0):
        buffers = [alloc(4 * PAGE) for _ in range(12)]
        before = [scramble(buffer) for buffer in buffers]
        with MigrationPolicy.prefer(device0).applied(buffers):
            for buffer in buffers[::2]:
                buffer.close()
        assert state(*buffers[1::2]) == before[1::2]
        with MigrationPolicy.prefer(device0).applied(buffers[1]):
            buffers[1].close()

    def test_a_view_closed_in_the_block_is_restored(self, alloc, device0):
        buffer = alloc(8 * PAGE)
        before = scramble(buffer)
        views = [buffer.range(PAGE, PAGE), buffer.range(PAGE, 2 * PAGE)[PAGE:]]
        with MigrationPolicy.prefer(device0).applied(views) as block:
            for view in views:
                view.close()
        assert buffer.page_runs() == before
        with pytest.raises(RuntimeError, match="closed"):
            block.__enter__()
        with buffer.range(0, 3 * PAGE) as view:
            block = MigrationPolicy.prefer(device0).applied(view)
            block.__enter__()
        block.restore()
        assert buffer.page_runs() == before

    def test_a_view_of_a_closed_buffer_is_left_out(self, alloc, device0):
        kept, gone = alloc(2 * PAGE), alloc(2 * PAGE)
        with MigrationPolicy.prefer(device0).applied([gone.range(0, PAGE), kept]):
            gone.close()
        assert kept.preferred_location is None

    def test_wrapped_memory_freed_in_the_block_is_left_out(self, alloc, device0):
        pointer = managed_memory(4 * PAGE)
        buffer, wrapped = alloc(PAGE), ManagedBuffer.from_handle(pointer, 4 * PAGE)
        array = CudaArray(wrapped)
        with MigrationPolicy.prefer(device0).applied([wrapped, array, buffer]):
            assert raw_driver().cuMemFree_v2(ctypes.c_uint64(pointer)) == 0
        assert buffer.preferred_location is None

    def test_targets_stay_alive_in_the_block(self, device0):
        buffer = managedmem.empty(PAGE)
        view, gone = buffer.range(0, 10), weakref.ref(buffer)
        with MigrationPolicy.prefer(device0).applied(view):
            del buffer, view
            gc.collect()
            assert gone() is not None
        gc.collect()
        assert gone() is None

    def test_exported_targets_stay_exported_in_the_block(self, alloc, device0):
        buffer = alloc(PAGE)
        with memoryview(buffer) as view, MigrationPolicy.prefer(device0).applied(view):
            with pytest.raises(BufferError):
                buffer.close()
        buffer.close()

    def test_a_cycle_through_the_block_is_collected(self, device0):
        class Mine(ManagedBuffer):
            pass

        root = managedmem.empty(PAGE)
        buffer = Mine.from_handle(root.handle, PAGE, owner=root)
        buffer.block = MigrationPolicy.prefer(device0).applied([buffer])
        buffer.block.__enter__()
        gone = weakref.ref(buffer)
        del buffer
        gc.collect()
        assert gone() is None
        root.close()

    def test_repr_and_what_it_cannot(self, alloc):
        block = MigrationPolicy.read_duplicated().applied(alloc(PAGE))
        assert repr(block) == "<AppliedPolicy of MigrationPolicy(read_mostly=True)>"
        with block:
            assert repr(block).endswith(", in force>")
        with pytest.raises(TypeError, match="pickle its policy"):
            pickle.dumps(block)
        with pytest.raises(TypeError):
            AppliedPolicy()
        assert weakref.ref(block)() is block

    def test_threads_with_blocks_of_their_own(self, alloc):
        buffers = [alloc(4 * PAGE) for _ in range(4)]
        before = [scramble(buffer, seed) for seed, buffer in enumerate(buffers)]

        def work(buffer):
            for policy in samples() * 5:
                with policy.applied(buffer):
                    assert MigrationPolicy.of(buffer) == policy

        at_once(*(functools.partial(work, buffer) for buffer in buffers))
        assert state(*buffers) == before

    def test_threads_at_one_block(self, alloc, device0):
        """Of several that enter or leave at a time, one does, and the others are told."""
        buffer = alloc(64 * PAGE)
        before = scramble(buffer)
        block = MigrationPolicy.prefer(device0).applied(buffer)
        entered = []

        def work():
            for _ in range(30):
                with contextlib.suppress(RuntimeError):
                    entered.append(block.__enter__())
                with contextlib.suppress(RuntimeError):
                    block.restore()

        at_once(*[work] * 4)
        with contextlib.suppress(RuntimeError):
            block.restore()
        assert entered
        assert buffer.page_runs() == before

    def test_closing_races_with_leaving(self, alloc, device0):
        for _ in range(50):
            kept, other = alloc(16 * PAGE), alloc(16 * PAGE)
            with MigrationPolicy.prefer(device0).applied([other, kept]):
                thread = threading.Thread(target=other.close)
                thread.start()
            thread.join()
            assert kept.preferred_location is None
            kept.close()


@pytest.mark.emulator_only
class TestRestoreThatFails:
    def test_the_rest_is_restored_and_the_error_names_what_is_not(self, alloc, failing, device0):
        buffer = alloc(4 * PAGE)
        buffer.accessed_by = [Host()]
        before = buffer.page_runs()
        block = MigrationPolicy(preferred_location=device0, read_mostly=True).applied(buffer)
        with pytest.raises(CUDAError) as error:
            with block:
                failing(2)
        assert (error.value.code, error.value.function) == (999, "cuMemAdvise")
        text = f"Not restored: unset_read_mostly of {4 * PAGE} bytes at {buffer.handle:#x}."
        assert text in str(error.value)
        assert buffer.read_mostly is True
        assert (buffer.preferred_location, set(buffer.accessed_by)) == (None, {Host()})
        assert repr(block).endswith(", in force>")
        block.restore()
        assert buffer.page_runs() == before

    def test_each_call_of_a_restore_fails_in_turn(self, alloc, failing):
        buffers = [alloc(4 * PAGE) for _ in range(2)]
        for name in ("cuMemAdvise", "cuMemRangeGetAttributes", "cuPointerGetAttributes"):
            for nth in range(1, 100):
                before = [scramble(buffer, seed) for seed, buffer in enumerate(buffers)]
                block = MigrationPolicy.shared().applied(buffers)
                block.__enter__()
                failing(nth, name=name)
                with contextlib.suppress(CUDAError):
                    block.restore()
                fired = emulator.failure_fired()
                emulator.clear_failures()
                if not fired:
                    break
                block.restore()
                assert state(*buffers) == before
            assert nth > 2

    def test_many_failures_are_counted(self, alloc, failing):
        buffer = alloc(16 * PAGE)
        for page in range(0, 16, 2):
            buffer.range(page * PAGE, PAGE).read_mostly = True
        before = buffer.page_runs()
        block = MigrationPolicy.default().applied(buffer)
        with pytest.raises(CUDAError, match=r"Not restored: set_read_mostly .* And 5 more\."):
            with block:
                failing(*range(1, 9))
        assert MigrationPolicy.of(buffer) == MigrationPolicy.default()
        block.restore()
        assert buffer.page_runs() == before

    def test_three_failures_are_all_named(self, alloc, failing):
        buffer = alloc(6 * PAGE)
        for page in range(0, 6, 2):
            buffer.range(page * PAGE, PAGE).read_mostly = True
        block = MigrationPolicy.default().applied(buffer)
        with pytest.raises(CUDAError) as error:
            with block:
                failing(1, 2, 3)
        assert str(error.value).count("set_read_mostly of") == 3
        assert "more." not in str(error.value)
        block.restore()

    def test_the_error_of_the_block_is_kept(self, alloc, failing, device0):
        buffer = alloc(PAGE)
        with pytest.raises(CUDAError) as error:
            with MigrationPolicy.prefer(device0).applied(buffer):
                failing(1)
                raise LookupError("mine")
        assert isinstance(error.value.__context__, LookupError)


class TestDroppedInForce:
    """Nothing is put back, because the block was never left; nothing is kept either."""

    @pytest.fixture
    def dropped(self, alloc, device0):
        buffers = [alloc(4 * PAGE) for _ in range(2)]
        buffers[0].range(PAGE, PAGE).read_mostly = True
        block = MigrationPolicy(preferred_location=device0).applied(buffers)
        assert block.__enter__() is block
        gone = weakref.ref(block)
        del block
        gc.collect()
        assert gone() is None
        return buffers

    def test_the_policy_stays(self, dropped, device0):
        for buffer in dropped:
            assert MigrationPolicy.of(buffer) == MigrationPolicy(preferred_location=device0)

    def test_the_buffers_can_be_closed(self, dropped):
        for buffer in dropped:
            buffer.close()
            assert buffer.is_closed

    def test_another_policy_can_be_applied(self, dropped, device0):
        with MigrationPolicy.read_duplicated().applied(dropped):
            assert dropped[0].read_mostly is True
        assert dropped[0].preferred_location is device0
        assert dropped[0].read_mostly is False

    def test_the_targets_are_let_go(self, device0):
        buffer = managedmem.empty(PAGE)
        gone = weakref.ref(buffer)
        block = MigrationPolicy.prefer(device0).applied(buffer)
        block.__enter__()
        del buffer
        gc.collect()
        assert gone() is not None
        del block
        gc.collect()
        assert gone() is None
