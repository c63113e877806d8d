"""accessed_by is a live set: every method of `set`, held against a real set; all or nothing."""

import collections.abc
import copy
import gc
import operator
import random

import pytest

import managedmem
from constants import PAGE
from foreign_objects import cupy_device, torch_device
from identifiers import label
from managedmem import Device, DeviceMemoryResource, Host, ManagedBuffer, emulator
from outcomes import outcome


@pytest.fixture(params=["none", "one", "all"])
def start(request, members):
    """How full the set is before the operation."""
    return {"none": set(), "one": {members[0]}, "all": set(members)}[request.param]


@pytest.fixture
def pair(buf, start):
    """The proxy and the model set it must behave like."""
    buf.accessed_by = start
    return buf.accessed_by, set(start)


def operands(members):
    """Sets to combine with: nothing, each member, the host and the first, all, and strangers."""
    return [
        set(),
        *({member} for member in members),
        {members[0], members[-1]},
        set(members),
        {Host(0), members[0]},
    ]


class TestIsASet:
    def test_is_registered_as_a_mutable_set(self, buf):
        assert isinstance(buf.accessed_by, collections.abc.MutableSet)
        assert issubclass(managedmem.typing.AccessedBySetProxy, collections.abc.MutableSet)

    def test_has_every_public_method_of_set(self, buf):
        wanted = {name for name in dir(set) if not name.startswith("_")}
        wanted.discard("test_c_api")  # of a Python built with Py_DEBUG
        assert wanted <= set(dir(buf.accessed_by))

    def test_cannot_be_hashed(self, buf):
        with pytest.raises(TypeError, match="unhashable"):
            hash(buf.accessed_by)

    def test_cannot_be_made_by_hand(self):
        with pytest.raises(TypeError):
            managedmem.typing.AccessedBySetProxy()

    def test_repr_shows_the_members(self, pair):
        proxy, model = pair
        assert "AccessedBySetProxy" in repr(proxy)
        assert all(repr(member) in repr(proxy) for member in model)


class TestReading:
    def test_length_truth_and_members(self, pair, members):
        proxy, model = pair
        assert len(proxy) == len(model)
        assert bool(proxy) == bool(model)
        assert sorted(proxy, key=repr) == sorted(model, key=repr)
        for member in members:
            assert (member in proxy) == (member in model)

    @pytest.mark.parametrize(
        "stranger", [Host(0), Host.numa_current(), 0, -1, None, "cpu", 1.5, object()], ids=label
    )
    def test_strangers_are_not_in_it(self, pair, stranger):
        assert (stranger in pair[0]) is False

    def test_foreign_devices_are_found(self, buf, device0):
        buf.accessed_by = {device0}
        assert torch_device("cuda", 0) in buf.accessed_by
        assert cupy_device(0) in buf.accessed_by
        assert torch_device("cpu") not in buf.accessed_by

    def test_copy_is_a_plain_set(self, pair):
        proxy, model = pair
        assert type(proxy.copy()) is set
        assert proxy.copy() == model

    @pytest.mark.parametrize("name", ["__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"])
    def test_compares_like_a_set(self, pair, members, name):
        proxy, model = pair
        for other in operands(members):
            for kind in (set, frozenset):
                expected = getattr(model, name)(kind(other))
                assert getattr(proxy, name)(kind(other)) is expected, (name, other)

    def test_compares_from_the_right_too(self, pair, members):
        proxy, model = pair
        for other in operands(members):
            assert (other == proxy) is (other == model)
            assert (other < proxy) is (other < model)
            assert (other >= proxy) is (other >= model)

    def test_compares_with_another_proxy(self, pair, alloc, members):
        proxy, model = pair
        other = alloc(PAGE)
        for value in operands(members)[:-1]:
            other.accessed_by = value
            assert (proxy == other.accessed_by) is (model == value)
            assert (proxy <= other.accessed_by) is (model <= value)
            assert proxy.isdisjoint(other.accessed_by) is model.isdisjoint(value)

    @pytest.mark.parametrize("other", [[], (), 0, None, "x"], ids=label)
    def test_differs_from_what_is_no_set(self, buf, other):
        assert (buf.accessed_by == other) is False
        assert (buf.accessed_by != other) is True
        with pytest.raises(TypeError):
            operator.lt(buf.accessed_by, other)

    @pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
    def test_copies_are_plain_sets(self, pair, buf, copier):
        """The live set belongs to its buffer; what is copied of it are its members."""
        proxy, model = pair
        copied = copier(proxy)
        assert type(copied) is set
        assert copied == model
        copied.add("something")
        assert set(buf.accessed_by) == model
        nested = copy.deepcopy({"members": proxy})
        assert nested == {"members": model}
        assert {id(m) for m in nested["members"]} == {id(m) for m in model}

    @pytest.mark.parametrize("name", ["issubset", "issuperset", "isdisjoint"])
    @pytest.mark.parametrize("kind", [set, list, tuple, iter, dict.fromkeys])
    def test_relations_take_any_iterable(self, pair, members, name, kind):
        proxy, model = pair
        for other in operands(members):
            assert getattr(proxy, name)(kind(other)) is getattr(model, name)(kind(other))

    @pytest.mark.parametrize(
        "name", ["union", "intersection", "difference", "symmetric_difference"]
    )
    @pytest.mark.parametrize("kind", [set, list, tuple, iter, dict.fromkeys])
    def test_new_sets_by_name(self, pair, members, name, kind):
        proxy, model = pair
        for other in operands(members):
            result = getattr(proxy, name)(kind(other))
            assert type(result) is set
            assert result == getattr(model, name)(kind(other))
        assert proxy == model

    @pytest.mark.parametrize("name", ["union", "intersection", "difference"])
    def test_new_sets_of_none_or_many(self, pair, members, name):
        proxy, model = pair
        assert getattr(proxy, name)() == getattr(model, name)() == model
        many = operands(members)
        assert getattr(proxy, name)(*many) == getattr(model, name)(*many)

    @pytest.mark.parametrize("name", ["and", "or", "sub", "xor", "rand", "ror", "rsub", "rxor"])
    def test_operators_give_plain_sets(self, pair, members, name):
        proxy, model = pair
        for other in operands(members):
            for kind in (set, frozenset):
                result = getattr(proxy, f"__{name}__")(kind(other))
                wanted = getattr(model, f"__{name}__")(kind(other))
                assert result == wanted
                assert type(result) is type(wanted), "as the left operand, as with sets"

    def test_operators_between_proxies(self, pair, alloc, members):
        proxy, model = pair
        other = alloc(PAGE)
        other.accessed_by = {members[0]}
        assert proxy | other.accessed_by == model | {members[0]}
        assert proxy & other.accessed_by == model & {members[0]}
        assert proxy - other.accessed_by == model - {members[0]}
        assert proxy ^ other.accessed_by == model ^ {members[0]}
        assert {Host(3)} | proxy == model | {Host(3)}

    @pytest.mark.parametrize("name", ["and", "or", "sub", "xor"])
    def test_operators_refuse_what_is_no_set(self, buf, name):
        assert getattr(buf.accessed_by, f"__{name}__")([Host()]) is NotImplemented


class TestWriting:
    def test_assignment_of_another_proxy(self, pair, buf, alloc):
        other = alloc(PAGE)
        other.accessed_by = pair[0]
        assert set(other.accessed_by) == pair[1]
        peers = DeviceMemoryResource(0).peer_accessible_by
        buf.accessed_by = peers
        assert set(buf.accessed_by) == set(peers)

    @pytest.mark.parametrize("name", ["add", "discard", "remove"])
    def test_one_member(self, pair, members, name):
        proxy, model = pair
        for member in members:
            expected = outcome(getattr(model, name), member)
            assert outcome(getattr(proxy, name), member) == expected
            assert set(proxy) == model

    def test_remove_of_what_is_missing_names_it(self, buf):
        with pytest.raises(KeyError) as error:
            buf.accessed_by.remove(Host())
        assert error.value.args == (Host(),)

    @pytest.mark.parametrize("stranger", [Host(0), Host.numa_current(), 0, None, "x"], ids=label)
    def test_strangers_are_never_there_to_go(self, pair, stranger):
        proxy, model = pair
        assert proxy.discard(stranger) is None
        with pytest.raises(KeyError):
            proxy.remove(stranger)
        assert set(proxy) == model

    def test_pop_takes_members_until_it_is_empty(self, pair):
        proxy, model = pair
        popped = [proxy.pop() for _ in range(len(model))]
        assert set(popped) == model
        assert set(proxy) == set()
        with pytest.raises(KeyError):
            proxy.pop()

    def test_clear(self, pair):
        proxy, _ = pair
        assert proxy.clear() is None
        assert set(proxy) == set()

    @pytest.mark.parametrize(
        "name",
        ["update", "intersection_update", "difference_update", "symmetric_difference_update"],
    )
    @pytest.mark.parametrize("kind", [set, list, tuple, iter, dict.fromkeys])
    @pytest.mark.parametrize("which", range(6))
    def test_in_place_by_name(self, pair, members, name, kind, which):
        proxy, model = pair
        other = operands(members)[:-1][which % (len(members) + 3)]
        assert getattr(proxy, name)(kind(other)) is None
        getattr(model, name)(kind(other))
        assert set(proxy) == model

    @pytest.mark.parametrize("name", ["update", "intersection_update", "difference_update"])
    def test_in_place_of_none_or_many(self, pair, members, name):
        proxy, model = pair
        getattr(proxy, name)()
        assert set(proxy) == model
        many = [{members[0]}, [members[-1]], set(members)]
        getattr(proxy, name)(*many)
        getattr(model, name)(*many)
        assert set(proxy) == model

    @pytest.mark.parametrize("name", ["ior", "iand", "isub", "ixor"])
    @pytest.mark.parametrize("which", range(6))
    def test_in_place_operators_give_the_proxy(self, pair, members, name, which):
        proxy, model = pair
        other = operands(members)[:-1][which % (len(members) + 3)]
        assert getattr(proxy, f"__{name}__")(other) is proxy
        getattr(model, f"__{name}__")(other)
        assert set(proxy) == model

    @pytest.mark.parametrize("name", ["isub", "ixor", "iand", "ior"])
    def test_in_place_with_itself(self, pair, name):
        proxy, model = pair
        getattr(proxy, f"__{name}__")(proxy)
        getattr(model, f"__{name}__")(set(model))
        assert set(proxy) == model

    def test_the_property_takes_the_result_of_an_operator(self, buf, members):
        buf.accessed_by |= {members[0]}
        assert set(buf.accessed_by) == {members[0]}
        buf.accessed_by ^= set(members)
        assert set(buf.accessed_by) == set(members[1:])
        buf.accessed_by -= {Host()}
        assert set(buf.accessed_by) == set(members[1:-1])

    @pytest.mark.parametrize("kind", [set, frozenset, list, tuple, iter, dict.fromkeys])
    def test_assignment_takes_any_iterable(self, pair, buf, members, kind):
        for value in operands(members)[:-1]:
            buf.accessed_by = kind(value)
            assert set(buf.accessed_by) == value

    def test_assignment_of_another_buffers_set(self, pair, buf, alloc, members):
        other = alloc(PAGE)
        other.accessed_by = set(members)
        buf.accessed_by = other.accessed_by
        assert set(buf.accessed_by) == set(members)

    def test_repeated_members_count_once(self, buf, members):
        buf.accessed_by = [members[0], members[0], Host(), Host()]
        assert set(buf.accessed_by) == {members[0], Host()}

    def test_foreign_devices_are_members(self, buf, device0):
        buf.accessed_by.update([torch_device("cuda", 0), torch_device("cpu")])
        assert set(buf.accessed_by) == {device0, Host()}
        buf.accessed_by.remove(cupy_device(0))
        assert set(buf.accessed_by) == {Host()}

    def test_cannot_be_deleted(self, buf):
        with pytest.raises((AttributeError, TypeError)):
            del buf.accessed_by


@pytest.mark.parametrize("seed", range(12))
def test_random_operations_agree_with_a_model(buf, members, seed):
    """200 random operations, each with one or several members, against a set of locations."""
    rng = random.Random(seed)
    model = set()
    names = [
        "add",
        "discard",
        "remove",
        "pop",
        "clear",
        "update",
        "difference_update",
        "intersection_update",
        "symmetric_difference_update",
        "__ior__",
        "__iand__",
        "__isub__",
        "__ixor__",
        "assign",
    ]
    for step in range(200):
        name = rng.choice(names)
        chosen = set(rng.sample(members, rng.randrange(len(members) + 1)))
        proxy = buf.accessed_by
        if name == "pop":
            value = outcome(proxy.pop)
            assert value is KeyError if not model else value in model
            model.discard(value)
        elif name == "assign":
            buf.accessed_by = model = chosen
        else:
            one = name in ("add", "discard", "remove")
            arguments = () if name == "clear" else (rng.choice(members),) if one else (chosen,)
            wanted = outcome(getattr(model, name), *arguments)
            found = outcome(getattr(proxy, name), *arguments)
            assert (found is proxy) if wanted is model else (found == wanted), (step, name)
        assert set(proxy) == set(buf.accessed_by) == model, (step, name)
        assert len(proxy) == len(model)


class TestIsLive:
    def test_shows_what_others_change(self, buf, device0):
        proxy = buf.accessed_by
        ManagedBuffer.from_handle(buf.handle, buf.size).accessed_by.add(device0)
        assert set(proxy) == {device0}

    def test_a_loop_may_change_what_it_runs_over(self, buf, members):
        buf.accessed_by = members
        for member in buf.accessed_by:
            buf.accessed_by.discard(member)
        assert set(buf.accessed_by) == set()

    def test_a_member_counts_only_over_the_whole_range(self, buf, device0):
        buf[:PAGE].accessed_by.add(device0)
        assert device0 not in buf.accessed_by
        buf.accessed_by.add(device0)
        assert device0 in buf.accessed_by

    def test_discard_takes_a_partial_member_everywhere(self, buf, device0):
        buf[:PAGE].accessed_by.add(device0)
        buf.accessed_by.discard(device0)
        assert device0 not in buf[:PAGE].accessed_by

    @pytest.mark.emulator_only
    def test_a_discard_that_is_refused_sets_nothing(self, buf, device0):
        from managedmem import emulator

        for members in ([], [device0]):
            buf.accessed_by = members
            emulator.fail("cuMemAdvise", code=999)
            with pytest.raises(managedmem.CUDAError):
                buf.accessed_by.discard(device0)
            assert emulator.failure_fired()
            emulator.clear_failures()
            assert set(buf.accessed_by) == set(buf[:PAGE].accessed_by) == set(members)

    def test_keeps_its_buffer_alive(self, device0):
        proxy = managedmem.ManagedMemoryResource().allocate(PAGE).accessed_by
        gc.collect()
        proxy.add(device0)
        assert set(proxy) == {device0}

    def test_of_a_closed_buffer_refuses(self, alloc, device0):
        buffer = alloc(PAGE)
        proxy = buffer.accessed_by
        buffer.close()
        for use in (len, list, proxy.add, proxy.discard, proxy.update, proxy.__contains__):
            argument = [device0] if use == proxy.update else device0
            with pytest.raises(RuntimeError, match="closed"):
                use(proxy if use in (len, list) else argument)

    def test_repr_of_a_closed_buffer_is_safe(self, alloc):
        buffer = alloc(PAGE)
        proxy = buffer.accessed_by
        buffer.close()
        assert "AccessedBySetProxy" in repr(proxy)


NO_LOCATIONS = [0, -1, True, "cpu", 1.5, object(), [], ()]
BULK = {
    "update": lambda b, v: b.accessed_by.update(v),
    "|=": lambda b, v: b.accessed_by.__ior__(set(v)),
    "symmetric_difference_update": lambda b, v: b.accessed_by.symmetric_difference_update(v),
    "^=": lambda b, v: b.accessed_by.__ixor__(set(v)),
    "assignment": lambda b, v: setattr(b, "accessed_by", v),
}


class TestBadMembers:
    @pytest.mark.parametrize("bad", NO_LOCATIONS, ids=label)
    def test_add_of_what_is_no_location(self, pair, bad):
        proxy, model = pair
        with pytest.raises(TypeError, match=r"Device or Host"):
            proxy.add(bad)
        assert set(proxy) == model

    def test_add_of_none(self, pair):
        with pytest.raises((TypeError, ValueError), match=r"location is required|Device or Host"):
            pair[0].add(None)

    @pytest.mark.parametrize("bad", [Host(0), Host(1), Host.numa_current()], ids=label)
    def test_add_of_a_numa_host(self, pair, bad):
        proxy, model = pair
        with pytest.raises(ValueError, match=r"(?i)numa"):
            proxy.add(bad)
        assert set(proxy) == model

    @pytest.mark.parametrize("bulk", BULK.values(), ids=BULK)
    @pytest.mark.parametrize("place", [0, 1, 2])
    @pytest.mark.parametrize("bad", [0, "cpu", Host(0), Host.numa_current()], ids=label)
    def test_one_bad_member_stops_the_whole_operation(self, buf, start, members, bulk, place, bad):
        buf.accessed_by = start
        values = [members[0], members[-1]]
        values.insert(place, bad)
        with pytest.raises(ValueError if isinstance(bad, Host) else TypeError):
            bulk(buf, values)
        assert set(buf.accessed_by) == start

    @pytest.mark.parametrize("bad", [0, None, Host(), Device(0)], ids=label)
    @pytest.mark.parametrize("name", ["update", "intersection_update", "difference_update"])
    def test_bulk_operations_want_iterables(self, pair, name, bad):
        proxy, model = pair
        with pytest.raises(TypeError):
            getattr(proxy, name)(bad)
        assert set(proxy) == model

    @pytest.mark.parametrize("bad", [0, None, Host(), "cpu"], ids=label)
    def test_assignment_wants_an_iterable_of_locations(self, pair, buf, bad):
        with pytest.raises((TypeError, ValueError)):
            buf.accessed_by = bad
        assert set(buf.accessed_by) == pair[1]

    @pytest.mark.parametrize(
        ("location", "written"),
        [(Device(0), "{Device(0)}"), (Host(), "{Host()}"), (torch_device("cuda", 0), "{device(")],
        ids=["device", "host", "torch"],
    )
    def test_a_single_location_must_be_wrapped_in_a_set(self, pair, buf, location, written):
        for use in (
            lambda: setattr(buf, "accessed_by", location),
            lambda: buf.accessed_by.update(location),
            lambda: managedmem.MigrationPolicy(accessed_by=location),
        ):
            with pytest.raises(TypeError) as error:
                use()
            assert f"wrap it in a set, {written}" in str(error.value)
        assert set(buf.accessed_by) == pair[1]

    @pytest.mark.parametrize("bad", [0, None, Host(0), 1.5], ids=label)
    def test_a_value_that_is_not_iterable_is_explained(self, pair, buf, bad):
        with pytest.raises(TypeError, match=r"iterable of locations is needed.*set\(\)"):
            buf.accessed_by = bad
        assert set(buf.accessed_by) == pair[1]

    def test_an_iterable_that_raises_changes_nothing(self, pair, buf, members):
        def broken():
            yield members[0]
            raise LookupError("half way")

        for use in (buf.accessed_by.update, lambda v: setattr(buf, "accessed_by", v)):
            with pytest.raises(LookupError, match="half way"):
                use(broken())
            assert set(buf.accessed_by) == pair[1]

    def test_an_object_whose_class_cannot_be_told(self, pair, buf):
        class Broken:
            @property
            def __class__(self):
                raise LookupError("no class")

        for use in (
            lambda v: buf.accessed_by == v,
            lambda v: buf.accessed_by <= v,
            lambda v: buf.accessed_by | v,
            lambda v: v - buf.accessed_by,
            buf.accessed_by.__ior__,
        ):
            with pytest.raises(LookupError, match="no class"):
                use(Broken())
            assert set(buf.accessed_by) == pair[1]


CHANGES = {
    "update": lambda b, m: b.accessed_by.update(m),
    "|=": lambda b, m: b.accessed_by.__ior__(set(m)),
    "^=": lambda b, m: b.accessed_by.__ixor__(set(m)),
    "assignment": lambda b, m: setattr(b, "accessed_by", m),
    "swap": lambda b, m: setattr(b, "accessed_by", set(m) - set(b.accessed_by)),
    "clear": lambda b, m: b.accessed_by.clear(),
    "-=": lambda b, m: b.accessed_by.__isub__(set(m)),
    "&=": lambda b, m: b.accessed_by.__iand__(set()),
}


@pytest.mark.emulator_only
class TestAllOrNothing:
    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    @pytest.mark.parametrize("after", [False, True], ids=["refused", "failed after the effect"])
    @pytest.mark.parametrize("nth", [1, 2, 3])
    def test_a_failing_driver_leaves_the_set_as_it_was(
        self, buf, start, members, change, nth, after
    ):
        buf.accessed_by = start
        emulator.fail("cuMemAdvise", nth=nth, code=999, after=after)
        result = outcome(change, buf, members)
        fired = emulator.failure_fired()
        emulator.clear_failures()
        if fired:
            assert result is managedmem.CUDAError
            assert set(buf.accessed_by) == start
        else:
            assert result is not managedmem.CUDAError

    def test_the_error_is_the_drivers_own(self, buf, members):
        emulator.fail("cuMemAdvise", nth=2, code=999)
        with pytest.raises(managedmem.CUDAError) as error:
            buf.accessed_by.update(members)
        assert (error.value.code, error.value.function) == (999, "cuMemAdvise")
        assert error.value.name == "CUDA_ERROR_UNKNOWN"


class Tagged(set):
    pass


class FrozenTagged(frozenset):
    pass


@pytest.mark.parametrize("kind", [set, frozenset, Tagged, FrozenTagged])
def test_every_kind_of_set_can_stand_beside_it(pair, members, kind):
    proxy, model = pair
    for operand in map(kind, operands(members)):
        assert (proxy == operand) == (model == operand)
        assert (proxy <= operand) == (model <= operand)
        assert proxy | operand == model | operand == operand | proxy
        assert proxy - operand == model - operand
        assert operand - proxy == operand - model
        assert proxy ^ operand == model ^ operand
