"""PrefetchPlan: its entries, and how it is made."""

import copy
import gc
import pickle
import sys
import types
import weakref

import pytest

import libraries
from constants import MIB, PAGE
from driver import device_memory
from foreign_objects import CudaArray, foreign, torch_like
from identifiers import label
from managedmem import Device, Host, ManagedBuffer, MigrationPolicy, PrefetchPlan
from managedmem.typing import PlanEntry
from plans import adjacent, place, places


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

    @pytest.mark.parametrize("bad", [None, 0, -1, "cuda:0", "host", object()], ids=label)
    def test_refuses_what_is_no_location(self, buf, bad):
        plan = PrefetchPlan()
        with pytest.raises((TypeError, ValueError), match=r"location|Device"):
            plan.add(buf, bad)
        assert len(plan) == 0

    @pytest.mark.parametrize("bad", [None, 7, "text", object(), [bytearray(1)] * 2], ids=label)
    def test_refuses_what_is_no_target(self, bad):
        with pytest.raises(TypeError, match="a target must be"):
            PrefetchPlan().add(bad, Host())

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

    def test_a_deep_copy_is_over_the_same_memory(self, buf):
        plan = PrefetchPlan([(buf, Host()), (buf[:PAGE], Device(0))])
        for copied in (copy.deepcopy(plan), copy.deepcopy({"a": [plan]})["a"][0]):
            assert list(copied) == list(plan) and copied is not plan
            assert copied[0].target is buf
            copied.clear()
        assert len(plan) == 2

    def test_cannot_be_pickled_or_subclassed(self, buf):
        plan = PrefetchPlan([(buf, Host())])
        with pytest.raises(TypeError):
            pickle.dumps(plan)
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

    @pytest.mark.parametrize("index", [None, 1.0, "1", (0, 1), Host()], ids=label)
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
        tensor = torch_like(buf, shape=(2, 2), element_size=lambda: 4)
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

    def test_a_parameter_of_a_torch_module_outside_managed_memory_is_named(self):
        torch = libraries.need("torch")
        module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        if Device().pageable_memory_access:
            assert len(PrefetchPlan.from_module(module, Host())) == 7
            return
        words = r"'0\.weight' \(shape \(3, 3\), .*move it there with managedmem\.torch\.to_managed"
        with pytest.raises(ValueError, match=words) as caught:
            PrefetchPlan.from_module(module, Device(0))
        assert type(caught.value).__name__ == "NotManagedError"
        assert caught.value.tensor is module[0].weight and caught.value.__context__ is None
        assert len(PrefetchPlan.from_module(torch.nn.ReLU(), Device(0))) == 0

    @pytest.mark.emulator_only
    def test_an_error_about_a_torch_module_is_kept_where_no_parameter_can_be_named(
        self, monkeypatch
    ):
        def fail(module):
            raise ZeroDivisionError

        kind = type("Module", (), {"__module__": "torch.nn"})
        module = kind()
        module.parameters, module.buffers = lambda: [bytearray(PAGE)], lambda: []
        for refusal_of, words in (
            (lambda module: ValueError(f"named {module is not None}"), "named True"),
            (lambda module: None, r"targets\[0\]: .* system memory"),
            (fail, r"targets\[0\]: .* system memory"),
            (None, r"targets\[0\]: .* system memory"),
        ):
            functions = refusal_of and types.SimpleNamespace(refusal_of=refusal_of)
            monkeypatch.setitem(sys.modules, "managedmem.torch._targets", functions)
            with pytest.raises(ValueError, match=words):
                PrefetchPlan.from_module(module, Device(0))

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
        assert len(PrefetchPlan.from_module(nothing, Host())) == 0
        mixed = types.SimpleNamespace(parameters=lambda: [buf, 7], buffers=lambda: [])
        with pytest.raises(TypeError, match=r"targets\[1\]: a target must be"):
            PrefetchPlan.from_module(mixed, Host())
        with pytest.raises(TypeError, match="a location must be"):
            PrefetchPlan.from_module(mixed, 0)

    @pytest.mark.parametrize("place", [Device(0), Host(), Host(0), Host.numa_current()], ids=label)
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
        ids=label,
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
        nothing = PrefetchPlan.from_policy([], types.SimpleNamespace(preferred_location=Host()))
        assert len(nothing) == 0
