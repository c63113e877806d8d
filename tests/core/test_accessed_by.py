"""accessed_by is a live set: every method of `set`, held against a real set; all or nothing."""

import copy
import gc
import operator

import pytest

import live_sets
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
def assign(buf):
    return lambda value: setattr(buf, "accessed_by", value)


@pytest.fixture
def pair(buf, start):
    """The proxy and the model set it must behave like."""
    buf.accessed_by = start
    return buf.accessed_by, set(start)


@pytest.fixture
def universe(members):
    return members


@pytest.fixture
def others(members):
    """Every subset, and a set with a location that cannot be a member."""
    return [*live_sets.subsets(members), {Host(0), members[0]}]


class TestIsASet(live_sets.IsASet):
    def test_repr_shows_the_members(self, pair):
        proxy, model = pair
        assert "AccessedBySetProxy" in repr(proxy)
        assert all(repr(member) in repr(proxy) for member in model)


class TestReading(live_sets.Reading):
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

    def test_compares_with_another_proxy(self, pair, alloc, members):
        proxy, model = pair
        other = alloc(PAGE)
        for value in live_sets.subsets(members):
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

    def test_copies_within_others_have_the_same_members(self, pair):
        proxy, model = pair
        nested = copy.deepcopy({"members": proxy})
        assert nested == {"members": model}
        assert {id(m) for m in nested["members"]} == {id(m) for m in model}

    def test_operators_between_proxies(self, pair, alloc, members):
        proxy, model = pair
        other = alloc(PAGE)
        other.accessed_by = {members[0]}
        assert proxy | other.accessed_by == model | {members[0]}
        assert proxy & other.accessed_by == model & {members[0]}
        assert proxy - other.accessed_by == model - {members[0]}
        assert proxy ^ other.accessed_by == model ^ {members[0]}
        assert {Host(3)} | proxy == model | {Host(3)}


class TestWriting(live_sets.Writing):
    def test_assignment_of_another_proxy(self, pair, buf, alloc):
        other = alloc(PAGE)
        other.accessed_by = pair[0]
        assert set(other.accessed_by) == pair[1]
        peers = DeviceMemoryResource(0).peer_accessible_by
        buf.accessed_by = peers
        assert set(buf.accessed_by) == set(peers)

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

    def test_the_property_takes_the_result_of_an_operator(self, buf, members):
        buf.accessed_by |= {members[0]}
        assert set(buf.accessed_by) == {members[0]}
        buf.accessed_by ^= set(members)
        assert set(buf.accessed_by) == set(members[1:])
        buf.accessed_by -= {Host()}
        assert set(buf.accessed_by) == set(members[1:-1])

    def test_repeated_members_count_once(self, buf, members):
        buf.accessed_by = [members[0], members[0], Host(), Host()]
        assert set(buf.accessed_by) == {members[0], Host()}

    def test_foreign_devices_are_members(self, buf, device0):
        buf.accessed_by.update([torch_device("cuda", 0), torch_device("cpu")])
        assert set(buf.accessed_by) == {device0, Host()}
        buf.accessed_by.remove(cupy_device(0))
        assert set(buf.accessed_by) == {Host()}


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
