"""Both live sets: an object that names a member is one to every method and operator."""

import itertools

import pytest

from foreign_objects import bindings_object, cupy_device, foreign, jax_device, torch_device
from managedmem import Device, DeviceMemoryResource, Host

HOSTS = {
    "Host": Host(),
    "torch cpu": torch_device("cpu"),
    "jax cpu": jax_device("cpu", 0),
    "cuda.core Host": foreign("cuda.core._host", "Host", is_numa_current=False, numa_id=None),
}
DEVICES = {
    "Device": Device,
    "torch": lambda n: torch_device("cuda", n),
    "cupy": cupy_device,
    "jax": lambda n: jax_device("gpu", n),
    "cuda.core": lambda n: foreign("cuda.core._device", "Device", device_id=n),
    "CUdevice": lambda n: bindings_object("CUdevice", n),
}
STRANGERS = [
    "cpu",
    None,
    True,
    -1,
    1000,
    (),
    Host(numa_id=0),
    pytest.param(object(), id="an object"),
]


def peers_of(pool):
    """The set of peers with Device(1)."""
    if Device.count() < 2:
        pytest.skip("needs two devices")
    try:
        pool.peer_accessible_by.add(Device(1))
    except ValueError:
        pytest.skip("no peer access between the devices")
    return pool.peer_accessible_by


CASES = {
    **{f"accessed_by, {name}": (Host(), host) for name, host in HOSTS.items()},
    **{f"accessed_by, {name}": (Device(0), make(0)) for name, make in DEVICES.items()},
}
if Device.count() > 1:
    CASES |= {f"peers, {name}": (None, make(1)) for name, make in DEVICES.items()}
    CASES |= {"peers, an ordinal": (None, 1)}


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request, buf):
    """A set with one member, an object that names it, and one that names no member."""
    member, named = request.param
    other = torch_device("cpu") if member is not Host() else torch_device("cuda", 0)
    if member is None:
        with DeviceMemoryResource(Device(0)) as pool:
            yield peers_of(pool), named, other
    else:
        buf.accessed_by.add(member)
        yield buf.accessed_by, named, other


def test_relations(case):
    view, named, other = case
    assert named in view and other not in view
    for kind in (list, tuple, iter, set, frozenset):
        assert not view.isdisjoint(kind([named])) and view.isdisjoint(kind([other]))
        assert view.issuperset(kind([named])) and not view.issuperset(kind([named, other]))
        assert view.issubset(kind([named, other])) and not view.issubset(kind([other]))
    for kind in (set, frozenset):
        assert view == kind([named]) and view != kind([other])
        assert view >= kind([named]) and view <= kind([named]) and view < kind([named, other])
        assert not view > kind([named]) and view > kind()
        assert kind([named]) == view and kind([named]) <= view and kind([named, other]) > view


def test_new_sets(case):
    view, named, other = case
    member = next(iter(view))
    assert view & {named} == view.intersection([named]) == {named} & view == {member}
    assert view - {named} == view.difference([named]) == {named} - view == set()
    assert view ^ {named} == view.symmetric_difference([named]) == {named} ^ view == set()
    assert view | {named} == view.union([named]) == {named} | view == {member}
    assert view & {other} == set() and view - {other} == {member}
    assert view.union([named], [other], [named]) == view | {other}
    for result in (view & {named}, view | {named}, view.copy(), {named} | view):
        assert type(result) is set and all(type(each) in (Device, Host) for each in result)


def test_changes(case):
    view, named, other = case
    view -= {other}
    assert named in view
    view &= {named, other}
    assert named in view
    view ^= {named}
    assert len(view) == 0
    view |= {named}
    view.discard(other)
    assert set(view) == view and named in view
    view.remove(named)
    assert named not in view
    with pytest.raises(KeyError):
        view.remove(named)


@pytest.mark.parametrize("stranger", STRANGERS, ids=repr)
def test_what_names_no_location_is_no_member(case, stranger):
    view = case[0]
    assert stranger not in view
    assert view.isdisjoint([stranger]) and not view.issuperset([stranger])
    assert view & {stranger} == set() and view - {stranger} == set(view)
    assert view | {stranger} == {*view, stranger}
    assert view != {*view, stranger}


def test_items_that_cannot_be_hashed(case):
    for method in ("union", "issubset", "isdisjoint", "difference"):
        with pytest.raises(TypeError, match="unhashable"):
            getattr(case[0], method)([[]])


def test_an_interrupt_comes_through(case):
    class Interrupting:
        def __iter__(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        case[0].isdisjoint(Interrupting())


def test_random_operands_agree_with_in(case):
    """Every set of names counts, for each operator, as the members that `in` finds."""
    view, named, other = case
    names = [named, other, "cpu", 1000, next(iter(view))]
    for count in range(len(names) + 1):
        for chosen in itertools.combinations(names, count):
            found = [each for each in chosen if each in view]
            assert view.isdisjoint(chosen) is not bool(found)
            assert len(view & set(chosen)) == bool(found)
            assert len(view - set(chosen)) == 1 - bool(found)
            assert (view <= set(chosen)) is bool(found)
            assert (view >= set(chosen)) is (len(found) == count)


def test_members_of_the_other_kind_of_set(buf):
    with DeviceMemoryResource(Device(0)) as pool:
        buf.accessed_by.add(Device(0))
        assert buf.accessed_by.isdisjoint(pool.peer_accessible_by)
        assert buf.accessed_by | pool.peer_accessible_by == {Device(0)}
