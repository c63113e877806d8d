"""PrefetchPlan: what it takes, what it does, what fits, and how long it lives."""

import collections
import contextlib
import copy
import ctypes
import gc
import pickle
import threading
import types
import weakref

import pytest

import libraries
import managedmem
from constants import EMULATED, KIB, MIB, PAGE
from contents import contents, pattern, write
from driver import CAPTURE_GLOBAL, capturing, device_memory, managed_memory, raw_driver
from foreign_objects import CudaArray, foreign
from managedmem import (
    CUDAError,
    Device,
    Host,
    ManagedBuffer,
    MigrationPolicy,
    PlanEntry,
    PrefetchPlan,
    Stream,
)
from programs import run_python

emulator_only = pytest.mark.emulator_only


def separate(buffer, count, size=PAGE):
    """Ranges with a gap of their size between them: nothing to merge."""
    return [buffer[2 * i * size : (2 * i + 1) * size] for i in range(count)]


def adjacent(buffer, count, size=PAGE):
    return [buffer[i * size : (i + 1) * size] for i in range(count)]


def place(buffer):
    """Where a buffer was sent last, once that has happened."""
    Device().sync()
    return buffer.last_prefetch_location


def places(plan):
    return [entry.location for entry in plan]


class TestAdd:
    def test_gives_the_plan_itself(self, buf, device0):
        plan = PrefetchPlan()
        assert plan.add(buf, device0) is plan
        assert len(plan.add(buf, Host()).add(buf, device0)) == 3

    def test_takes_all_of_a_target(self, buf, device0):
        (entry,) = PrefetchPlan().add(buf, device0)
        assert entry == (buf.handle, buf.size, device0)

    @pytest.mark.parametrize(
        ("part", "start", "size"),
        [
            ({"offset": PAGE}, PAGE, MIB - PAGE),
            ({"offset": 3, "nbytes": 5}, 3, 5),
            ({"nbytes": 1}, 0, 1),
            ({"offset": 7, "nbytes": None}, 7, MIB - 7),
            ({"offset": MIB - 1}, MIB - 1, 1),
            ({"nbytes": MIB}, 0, MIB),
            ({"nbytes": 0}, 0, 0),
            ({"offset": MIB}, MIB, 0),
        ],
    )
    def test_takes_a_part(self, buf, part, start, size):
        (entry,) = PrefetchPlan().add(buf, Host(), **part)
        assert (entry.pointer, entry.nbytes) == (buf.handle + start, size)

    @pytest.mark.parametrize(
        ("part", "error", "words"),
        [
            ({"offset": -1}, ValueError, "offset must be from 0 to 1048576"),
            ({"offset": MIB + 1}, ValueError, "the size of the target in bytes"),
            ({"offset": 2**63 - 1}, ValueError, "offset must be from 0"),
            ({"offset": 2**64}, ValueError, "offset is out of range"),
            ({"offset": None}, TypeError, "offset must be an int"),
            ({"offset": True}, TypeError, "offset must be an int"),
            ({"offset": 1.0}, TypeError, "offset must be an int"),
            ({"nbytes": -1}, ValueError, "nbytes must be 0 bytes or more"),
            ({"nbytes": MIB + 1}, ValueError, "nbytes must be at most 1048576"),
            ({"offset": 1, "nbytes": MIB}, ValueError, "nbytes must be at most 1048575"),
            ({"offset": 1, "nbytes": 2**63 - 1}, ValueError, "nbytes must be at most"),
            ({"offset": 1, "nbytes": 2**64 - 1}, ValueError, "nbytes is out of range"),
            ({"nbytes": "4"}, TypeError, "nbytes must be an int"),
            ({"nbytes": False}, TypeError, "nbytes must be an int"),
        ],
    )
    def test_refuses_what_is_no_part_of_it(self, buf, part, error, words):
        plan = PrefetchPlan([(buf, Host())])
        with pytest.raises(error, match=words):
            plan.add(buf, Host(), **part)
        assert len(plan) == 1

    @pytest.mark.parametrize("bad", [None, 0, -1, "cuda:0", "host", object()], ids=repr)
    def test_refuses_what_is_no_location(self, buf, bad):
        plan = PrefetchPlan()
        with pytest.raises((TypeError, ValueError), match=r"location|Device"):
            plan.add(buf, bad)
        assert len(plan) == 0

    @pytest.mark.parametrize("bad", [None, 7, "text", object()], ids=repr)
    def test_refuses_what_is_no_target(self, bad):
        with pytest.raises(TypeError, match="a target must be"):
            PrefetchPlan().add(bad, Host())

    def test_takes_one_target_at_a_time(self, buf):
        with pytest.raises(TypeError, match="a target must be"):
            PrefetchPlan().add([buf, buf], Host())

    def test_refuses_a_closed_buffer(self, alloc):
        closed = alloc(PAGE)
        closed.close()
        with pytest.raises(RuntimeError, match="closed"):
            PrefetchPlan().add(closed, Host())

    def test_refuses_memory_that_does_not_migrate(self):
        with device_memory() as pointer:
            outside = ManagedBuffer.from_handle(pointer, PAGE)
            with pytest.raises(ValueError, match="managed-memory allocation"):
                PrefetchPlan().add(outside, Host())

    def test_refuses_a_range_that_leaves_its_allocation(self, buf):
        with pytest.raises(ValueError, match="leaves its managed-memory allocation"):
            PrefetchPlan().add(CudaArray(buf, shape=(buf.size + 1,)), Host())

    def test_takes_arrays_of_other_libraries(self, buf, device0):
        array = CudaArray(buf, shape=(4, 8), typestr="<f4", offset=PAGE)
        (entry,) = PrefetchPlan().add(array, device0, offset=16)
        assert entry == (buf.handle + PAGE + 16, 4 * 8 * 4 - 16, device0)
        assert entry.target is array

    def test_takes_buffers_of_cuda_core(self, buf):
        other = foreign("cuda.core", "Buffer", handle=buf.handle, size=PAGE)
        assert places(PrefetchPlan().add(other, Host())) == [Host()]

    def test_takes_numpy_views(self, buf, device0):
        numpy = libraries.need("numpy")
        array = numpy.asarray(buf)[PAGE:]
        (entry,) = PrefetchPlan().add(array, device0)
        assert entry == (buf.handle + PAGE, MIB - PAGE, device0)

    def test_of_a_strided_target_it_takes_the_extent(self, buf):
        array = CudaArray(buf, shape=(4,), strides=(PAGE,))
        (entry,) = PrefetchPlan().add(array, Host())
        assert entry.nbytes == 3 * PAGE + 1

    def test_arguments_are_checked_by_name(self, buf):
        plan = PrefetchPlan()
        with pytest.raises(TypeError, match=r"add\(\) missing required argument 'location'"):
            plan.add(buf)
        with pytest.raises(TypeError, match="at most 2 positional"):
            plan.add(buf, Host(), 0)
        with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
            plan.add(buf, Host(), size=1)
        assert len(plan.add(target=buf, location=Host())) == 1


class TestEntries:
    def test_an_empty_plan(self):
        plan = PrefetchPlan()
        assert (len(plan), plan.nbytes, list(plan), bool(plan)) == (0, 0, [], False)
        assert repr(plan) == "<PrefetchPlan entries=0 nbytes=0>"

    def test_counts_and_bytes(self, buf):
        plan = PrefetchPlan().add(buf, Host()).add(buf, Host(), nbytes=3)
        assert (len(plan), plan.nbytes) == (2, MIB + 3)
        assert repr(plan) == f"<PrefetchPlan entries=2 nbytes={MIB + 3}>"

    def test_an_entry_is_a_record(self, buf, device0):
        (entry,) = PrefetchPlan([(buf, device0)])
        pointer, nbytes, location = entry
        assert isinstance(entry, PlanEntry)
        assert (entry.pointer, entry.nbytes, entry.location) == (pointer, nbytes, location)
        assert entry.location is device0
        assert entry.target is buf
        with pytest.raises(AttributeError):
            entry.location = Host()

    def test_an_entry_matches_by_position(self, buf):
        match next(iter(PrefetchPlan([(buf, Host())]))):
            case PlanEntry(pointer, nbytes, location):
                assert (pointer, nbytes, location) == (buf.handle, MIB, Host())

    def test_order_and_equal_entries_are_kept(self, buf, device0):
        plan = PrefetchPlan([(buf, device0), (buf, Host()), (buf, device0)])
        assert places(plan) == [device0, Host(), device0]

    def test_iteration_sees_the_entries_of_its_beginning(self, buf):
        plan = PrefetchPlan([(buf, Host()), (buf, Host())])
        for _ in plan:
            plan.add(buf, Host())
        assert len(plan) == 4
        entries = iter(plan)
        plan.clear()
        assert len(list(entries)) == 4

    def test_clear(self, buf):
        plan = PrefetchPlan([(buf, Host())])
        assert plan.clear() is None
        assert (len(plan), plan.nbytes, list(plan)) == (0, 0, [])
        plan.execute()
        plan.add(buf, Host()).execute()
        assert plan.clear() is plan.clear()

    def test_many_entries(self, buf):
        plan = PrefetchPlan((page, Host()) for page in adjacent(buf, MIB // PAGE))
        assert (len(plan), plan.nbytes) == (MIB // PAGE, MIB)
        assert [e.pointer for e in plan] == list(range(buf.handle, buf.handle + MIB, PAGE))

    def test_cannot_be_copied_deeply_or_subclassed(self, buf):
        plan = PrefetchPlan([(buf, Host())])
        for copier in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError):
                copier(plan)
        with pytest.raises(TypeError):
            type("Mine", (PrefetchPlan,), {})


class TestIndexing:
    @pytest.fixture
    def pages(self, buf):
        return adjacent(buf, 5)

    @pytest.fixture
    def plan(self, pages, device0):
        return PrefetchPlan((page, [device0, Host()][i % 2]) for i, page in enumerate(pages))

    def test_an_index_gives_the_entry(self, plan, pages):
        entries = list(plan)
        assert [plan[i] for i in range(5)] == entries
        assert [plan[i - 5] for i in range(5)] == entries
        assert plan[1] == (pages[1].handle, PAGE, Host())
        assert plan[-1].target is pages[-1]
        assert isinstance(plan[0], PlanEntry)

    def test_anything_with_an_index_counts(self, plan):
        class Third:
            def __index__(self):
                return 2

        assert plan[Third()] == list(plan)[2]
        assert plan[True] == list(plan)[1]

    @pytest.mark.parametrize("index", [5, -6, 1 << 40, -(1 << 40), 1 << 70, -(1 << 70)])
    def test_one_that_is_not_there(self, plan, index):
        with pytest.raises(IndexError):
            plan[index]
        with pytest.raises(IndexError, match="index 0 is outside the plan, which has length 0"):
            PrefetchPlan()[0]
        with pytest.raises(IndexError, match="index -6 is outside the plan, which has length 5"):
            plan[-6]

    @pytest.mark.parametrize("index", [None, 1.0, "1", (0, 1), Host()], ids=repr)
    def test_a_key_that_is_not_an_index(self, plan, index):
        with pytest.raises(TypeError, match="int or a slice"):
            plan[index]

    def test_reversed_and_membership(self, plan):
        assert list(reversed(plan)) == list(plan)[::-1]
        assert plan[3] in plan
        assert (0, 1, Host()) not in plan

    def test_entries_cannot_be_assigned(self, plan):
        with pytest.raises(TypeError):
            plan[0] = plan[1]
        with pytest.raises(TypeError):
            del plan[0]

    @pytest.mark.parametrize("step", [None, 1, 2, 7, -1, -2, -7])
    def test_slices_are_those_of_a_list(self, plan, step):
        entries = list(plan)
        bounds = [None, 0, 1, 4, 5, 9, -1, -5, -9]
        for start in bounds:
            for stop in bounds:
                part = plan[start:stop:step]
                assert list(part) == entries[start:stop:step]
                assert part.nbytes == PAGE * len(part)

    def test_a_step_of_zero(self, plan):
        with pytest.raises(ValueError, match="step cannot be zero"):
            plan[::0]

    def test_a_slice_is_a_plan_of_its_own(self, plan, pages, device0, stream):
        part = plan[2:4]
        assert isinstance(part, PrefetchPlan)
        assert [e.target for e in part] == pages[2:4]
        part.execute(stream=stream)
        stream.sync()
        assert [place(page) for page in pages] == [None, None, device0, Host(), None]
        part.add(pages[0], Host())
        assert (len(part), len(plan)) == (3, 5)
        plan.clear()
        assert len(part) == 3

    @pytest.mark.parametrize("copier", [copy.copy, lambda p: p[:]], ids=["copy", "slice"])
    def test_a_copy_is_independent(self, plan, pages, stream, copier):
        plan.execute(stream=stream)
        other = copier(plan)
        assert other is not plan
        assert list(other) == list(plan)
        assert [e.target for e in other] == pages
        plan.clear()
        other.add(pages[0], Host())
        assert (len(plan), len(other)) == (0, 6)
        plan.add(pages[1], Host())
        assert (len(plan), len(other)) == (1, 6)
        other.execute(stream=stream)
        stream.sync()
        assert place(pages[0]) == Host()

    def test_a_copy_of_an_empty_plan(self, buf):
        other = copy.copy(PrefetchPlan())
        assert len(other) == 0
        assert len(other.add(buf, Host())) == 1

    def test_a_copy_keeps_targets_and_exports_alive(self, alloc):
        buffer = alloc(PAGE)
        view = memoryview(buffer)
        plan = PrefetchPlan([(view, Host())])
        other = copy.copy(plan)
        plan.clear()
        view.release()
        with pytest.raises(BufferError):
            buffer.close()
        other.clear()
        buffer.close()

    def test_of_a_copy_a_closed_buffer_is_noticed_too(self, alloc, device0):
        buffer = alloc(4 * PAGE)
        other = copy.copy(PrefetchPlan([(buffer[:PAGE], device0), (buffer[2 * PAGE :], Host())]))
        buffer.close()
        with pytest.raises(RuntimeError, match="entry 0: ManagedBuffer is closed"):
            other.execute()

    def test_a_copy_outlives_its_plan(self, buf):
        plan = PrefetchPlan([(buf, Host())])
        other, reference = plan[:], weakref.ref(plan)
        del plan
        gc.collect()
        assert reference() is None
        other.execute()
        assert other[0].target is buf


class TestMaking:
    def test_from_pairs(self, buf, device0):
        pairs = [(buf, device0), [buf[:PAGE], Host()]]
        for entries in (pairs, tuple(pairs), iter(pairs), dict(pairs[:1]).items()):
            plan = PrefetchPlan(entries)
            assert places(plan) == [device0, Host()][: len(plan)]
            assert len(plan) > 0
        assert len(PrefetchPlan(entries=pairs)) == 2
        assert len(PrefetchPlan([])) == 0

    @pytest.mark.parametrize(
        ("bad", "error", "words"),
        [
            (lambda b: [(b, Host()), b], TypeError, r"entries\[1\]: .* is not a pair"),
            (lambda b: [(b,)], TypeError, r"entries\[0\]: a pair .* is needed, got 1 items"),
            (lambda b: [(b, Host(), 0)], TypeError, r"entries\[0\]: a pair .* got 3 items"),
            (lambda b: [(b, Host()), (b, 0)], TypeError, r"entries\[1\]: a location must be"),
            (lambda b: [(b, None)], ValueError, r"entries\[0\]: location is required"),
            (lambda b: [(7, Host())], TypeError, r"entries\[0\]: a target must be"),
            (lambda b: 7, TypeError, "is not an iterable of pairs"),
            (lambda b: None, TypeError, "is not an iterable of pairs"),
        ],
    )
    def test_a_bad_pair_is_named(self, buf, bad, error, words):
        with pytest.raises(error, match=words):
            PrefetchPlan(bad(buf))

    def test_an_error_of_the_iterable_is_passed_on(self, buf):
        def pairs():
            yield buf, Host()
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            PrefetchPlan(pairs())

    @pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, TypeError, ValueError])
    def test_an_error_of_its_iter_is_passed_on(self, error):
        class Pairs:
            def __iter__(self):
                raise error("mine")

        with pytest.raises(error, match="mine"):
            PrefetchPlan(Pairs())

    def test_the_entries_of_a_sequence(self, buf):
        class Pairs:
            def __getitem__(self, index):
                return [(buf, Host())][index]

        assert len(PrefetchPlan(Pairs())) == 1

    def test_no_entry_is_lost_behind_a_bad_one(self, buf):
        tensor = foreign(
            "torch",
            "Tensor",
            data_ptr=lambda: buf.handle,
            shape=(2, 2),
            stride=lambda: (1,),
            element_size=lambda: 4,
        )
        with pytest.raises(TypeError, match=r"entries\[1\]: .* of different length"):
            PrefetchPlan([(buf, Host()), (tensor, Host()), (buf, Host())])

    def test_from_a_module(self, alloc, device0):
        tensors = [CudaArray(alloc(PAGE)) for _ in range(3)]
        module = types.SimpleNamespace(
            parameters=lambda: iter(tensors[:2]), buffers=lambda: iter(tensors[2:])
        )
        plan = PrefetchPlan.from_module(module, device0)
        assert [e.target for e in plan] == tensors
        assert set(places(plan)) == {device0}

    def test_from_a_torch_module(self, alloc, device0, stream):
        torch, numpy = libraries.need("torch"), libraries.need("numpy")
        module = torch.nn.BatchNorm1d(PAGE)
        before = dict(module.state_dict())
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                memory = numpy.asarray(alloc(8 * PAGE)).view(str(tensor.dtype)[6:])
                tensor.set_(torch.from_numpy(memory[: tensor.numel()]).view_as(tensor))
        plan = PrefetchPlan.from_module(module, device0)
        assert len(plan) == len(before) == 5
        assert next(e.target for e in plan) is module.weight
        plan.execute(stream=stream)
        stream.sync()

    def test_a_bad_module(self, buf):
        for wrong in (object(), types.SimpleNamespace(parameters=lambda: [buf])):
            with pytest.raises(
                TypeError, match=r"is not a module: .* parameters\(\) and buffers\(\)"
            ):
                PrefetchPlan.from_module(wrong, Host())
        broken = types.SimpleNamespace(parameters=lambda: 1 / 0, buffers=lambda: [])
        with pytest.raises(ZeroDivisionError):
            PrefetchPlan.from_module(broken, Host())
        nothing = types.SimpleNamespace(parameters=lambda: [], buffers=lambda: [])
        with pytest.raises(ValueError, match="targets is empty"):
            PrefetchPlan.from_module(nothing, Host())
        mixed = types.SimpleNamespace(parameters=lambda: [buf, 7], buffers=lambda: [])
        with pytest.raises(TypeError, match=r"targets\[1\]: a target must be"):
            PrefetchPlan.from_module(mixed, Host())
        with pytest.raises(TypeError, match="a location must be"):
            PrefetchPlan.from_module(mixed, 0)

    @pytest.mark.parametrize("place", [Device(0), Host(), Host(0), Host.numa_current()], ids=repr)
    def test_from_a_policy(self, buf, place):
        policy = MigrationPolicy(
            read_mostly=True, preferred_location=place, accessed_by=Device.all()
        )
        assert places(PrefetchPlan.from_policy([buf, buf[:PAGE]], policy)) == [place, place]
        assert places(PrefetchPlan.from_policy(buf, MigrationPolicy.prefer(place))) == [place]

    def test_a_policy_that_memory_has_takes_it_there(self, buf, device0, stream):
        MigrationPolicy.prefer(device0).apply(buf)
        PrefetchPlan.from_policy(buf, MigrationPolicy.of(buf)).execute(stream=stream)
        stream.sync()
        assert place(buf) == device0

    def test_from_a_policy_of_somebody_else(self, buf, device0):
        policy = types.SimpleNamespace(preferred_location=device0)
        assert places(PrefetchPlan.from_policy(buf, policy)) == [device0]

    @pytest.mark.parametrize(
        "policy",
        [MigrationPolicy(), MigrationPolicy.read_duplicated(), MigrationPolicy.shared([Host()])],
        ids=repr,
    )
    def test_a_policy_that_prefers_nothing(self, buf, policy):
        with pytest.raises(ValueError, match="nowhere to prefetch to") as error:
            PrefetchPlan.from_policy(buf, policy)
        assert repr(policy) in str(error.value)

    def test_a_bad_policy(self, buf):
        with pytest.raises(TypeError, match="is not a policy"):
            PrefetchPlan.from_policy(buf, object())
        with pytest.raises(TypeError, match="a location must be"):
            PrefetchPlan.from_policy(buf, types.SimpleNamespace(preferred_location=0))
        with pytest.raises(ValueError, match="targets is empty"):
            PrefetchPlan.from_policy([], types.SimpleNamespace(preferred_location=Host()))


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

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"dispatch": "both"}, ValueError),
            ({"defer": 1}, TypeError),
            ({"stream": "s"}, TypeError),
            ({"stream": -1}, ValueError),
        ],
    )
    def test_bad_arguments(self, buf, arguments, error):
        buf.prefetch(Host())
        plan = PrefetchPlan([(buf, Device(0))])
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
        from managedmem import emulator

        with emulator.recording() as calls:
            PrefetchPlan().execute(stream=stream, defer=True, dispatch="batch")
            PrefetchPlan().discard_prefetch()
        assert calls == []

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"dispatch": "fast"}, ValueError),
            ({"defer": 1}, TypeError),
            ({"stream": "default"}, TypeError),
            ({"stream": -1}, ValueError),
        ],
    )
    def test_an_empty_plan_checks_its_arguments(self, arguments, error):
        plan = PrefetchPlan()
        for call in (plan.execute, plan.discard_prefetch, plan.explain):
            with pytest.raises(error, match=next(iter(arguments))):
                call(**arguments)

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
        data = pattern(MIB)
        write(buf, data)
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
        # What went to the host stays there, also when it comes again.
        plan = PrefetchPlan.fit([a, b, b, a], device0, MIB)
        assert places(plan) == [device0, Host(), Host(), device0]

    def test_many_targets(self, buf, device0):
        pages = adjacent(buf, MIB // PAGE)
        plan = PrefetchPlan.fit(pages, device0, 100 * PAGE + 1)
        assert places(plan) == [device0] * 100 + [Host()] * (MIB // PAGE - 100)

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
            ("1", TypeError, "budget must be an int"),
            (2**64, ValueError, "budget is out of range"),
        ],
    )
    def test_bad_budgets(self, buf, device0, budget, error, words):
        with pytest.raises(error, match=words):
            PrefetchPlan.fit([buf], device0, budget)

    def test_bad_targets_and_devices(self, buf, device0):
        with pytest.raises(ValueError, match=r"needs a Device.*got Host\(\)"):
            PrefetchPlan.fit([buf], Host())
        with pytest.raises(TypeError, match="a location must be"):
            PrefetchPlan.fit([buf], 0)
        with pytest.raises(ValueError, match="location is required"):
            PrefetchPlan.fit([buf], None)
        with pytest.raises(ValueError, match="targets is empty"):
            PrefetchPlan.fit([], device0)
        with pytest.raises(TypeError, match=r"targets\[1\]: a target must be"):
            PrefetchPlan.fit([buf, 3], device0)


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
        """Guards that were entered are left, also after a refusal: closing would wait for ever."""
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
            import os, managedmem
            from managedmem import Host, PrefetchPlan
            buffer = managedmem.empty(4096)
            plan = PrefetchPlan([(buffer, Host())])
            plan.execute()
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    plan.execute()
                except RuntimeError as error:
                    status = 0 if "fork" in str(error) else 2
                len(plan), list(plan), plan.clear()
                os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            plan.execute()
            """,
            driver="emulator",
        )


def race(*workers):
    """Run the workers at once; raise what any of them raised."""
    barrier = threading.Barrier(len(workers))
    failures = []

    def run(worker):
        try:
            barrier.wait(30)
            worker()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if failures:
        raise failures[0]


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


class TestOtherDrivers:
    def test_before_batch_calls(self):
        run_python(
            """
            import managedmem, re
            from managedmem import Device, Host, PrefetchPlan, emulator
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
                try:
                    call()
                except NotImplementedError as error:
                    assert "12.2" in str(error) and "13.0" in str(error)
                else:
                    raise AssertionError
            """,
            emulator="profile=old12",
        )

    def test_without_concurrent_access(self):
        run_python(
            """
            import managedmem
            from managedmem import CUDAError, Device, PrefetchPlan
            buffer = managedmem.empty(8 << 20)
            plan = PrefetchPlan([(buffer[: 1 << 20], Device(0)), (buffer[2 << 20 :], Device(0))])
            assert "concurrent_managed_access" in plan.explain()
            try:
                plan.execute()
            except CUDAError as error:
                assert "concurrent_managed_access" in str(error)
            else:
                raise AssertionError
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
        from managedmem import emulator

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
