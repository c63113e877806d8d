"""What a WorkingSet moves by the access of its groups and uses, and that contents stay right."""

import time

import pytest

from constants import EMULATED, PAGE
from contents import contents, pattern, write
from managedmem import Device, Host, Stream, WorkingSet, emulator

SIZE = 16 * PAGE


@pytest.fixture
def layers(alloc):
    """16 buffers with contents of their own."""
    made = [alloc(SIZE) for _ in range(16)]
    for number, buffer in enumerate(made):
        write(buffer, pattern(SIZE, number))
    return made


@pytest.fixture
def working():
    with WorkingSet(4 * SIZE, Device(0)) as made:
        yield made


@pytest.fixture
def groups(working, layers):
    return [working.add(layer, "write") for layer in layers]


@pytest.fixture
def stream():
    with Stream() as made:
        yield made


@pytest.mark.parametrize(
    ("kind", "bad", "message"),
    [
        ("write", "scratch", r'must be None, "read" or "write", got \'scratch\'$'),
        ("write", "Read", "got 'Read'$"),
        ("write", 1, "got 1$"),
        (
            "read",
            "write",
            'added with access="read" must be None or "read", got \'write\': add',
        ),
        ("scratch", "read", 'access="scratch" must be None or "scratch", got \'read\''),
    ],
)
def test_access_of_a_use_must_be_one_of_the_group(working, layers, kind, bad, message):
    group = working.add(layers[0], kind)
    for call in (group.acquire, group.use):
        with pytest.raises(ValueError, match=message):
            call(access=bad)
    with pytest.raises(RuntimeError, match="not acquired"):
        group.release()
    for good in (None, kind):
        with group.use(access=good):
            pass


def test_uses_that_read_move_nothing_home(working, layers, groups, stream, alloc):
    result = alloc(SIZE)
    for _ in range(3):
        for number, group in enumerate(groups):
            with group.use(stream=stream, access="read"):
                result.copy_from(layers[number], stream=stream)
                stream.sync()
                assert contents(result) == pattern(SIZE, number)
    stats = working.stats()
    assert stats.bytes_home == 0 and stats.drops >= 44 and stats.failures == 0
    assert stats.bytes_loaded >= 40 * SIZE


def test_what_is_written_goes_home_once(working, layers, groups, stream):
    for value in range(3):
        for access in ("read", None, "read"):
            for layer, group in zip(layers, groups, strict=True):
                with group.use(stream=stream, access=access):
                    if access is None:
                        layer.fill(value, stream=stream)
    stream.sync()
    working.close()
    assert [contents(layer) for layer in layers] == [bytes([2]) * SIZE] * 16
    assert working.stats().failures == 0


@pytest.mark.parametrize("given", [False, True])
def test_a_training_loop_moves_each_group_home_once(working, groups, stream, given):
    """Forward and backward read, the step writes: access is foreseen as the order is."""
    if given:
        working.order = groups + groups[::-1] + groups
    demanded = []
    for _ in range(12):
        demanded.append(working.stats().loaded)
        for group in groups + groups[::-1]:
            with group.use(stream=stream, access="read"):
                pass
        for group in groups:
            with group.use(stream=stream):
                pass
    stream.sync()
    working.close()
    stats = working.stats()
    first = 3 * 16  # of the first round, in which the set learns
    assert 11 * 16 * SIZE <= stats.bytes_home <= (11 * 16 + first) * SIZE
    assert stats.loaded == demanded[2] and stats.mapped == 0


def test_a_read_of_what_was_written_finds_it(working, layers, groups, stream, alloc):
    """It stays as it is, and goes home when it is dropped."""
    result = alloc(SIZE)
    working.order = groups[:4]
    with groups[0].use(stream=stream):
        layers[0].fill(7, stream=stream)
    loads = working.stats().loaded
    with groups[0].use(stream=stream, access="read"):
        result.copy_from(layers[0], stream=stream)
    assert working.stats().loaded == loads
    with groups[0].use(stream=stream, access="read"), groups[0].use(stream=stream):
        layers[0][:PAGE].fill(8, stream=stream)
    for group in groups[4:8]:
        group.acquire(stream=stream)
    stream.sync()
    assert contents(result) == bytes([7]) * SIZE
    assert contents(layers[0]) == bytes([8]) * PAGE + bytes([7]) * (SIZE - PAGE)
    for group in groups[4:8]:
        group.release(stream=stream)


@pytest.mark.emulator_only
@pytest.mark.parametrize("way", ["promise", "nested"])
def test_a_copy_that_is_written_loses_no_byte_and_no_room(working, layers, groups, stream, way):
    """The written pages are on the device only, and leave it with the others."""
    group, others = groups[0], groups[8:12]
    with group.use(stream=stream, access="read"):
        stream.sync()
        assert emulator.residency(layers[0][:PAGE]) not in (Device(0), Host())  # both have it
        with group.use(stream=stream, access="write" if way == "nested" else "read"):
            layers[0][: 4 * PAGE].fill(9, stream=stream)
        stream.sync()
        assert emulator.residency(layers[0][: 4 * PAGE]) is Device(0)
    for other in others:
        assert other.acquire(stream=stream)
    stream.sync()
    Device(0).sync()
    assert emulator.residency(layers[0]) is Host()
    assert not layers[0].read_mostly
    assert contents(layers[0]) == bytes([9]) * 4 * PAGE + pattern(SIZE, 0)[4 * PAGE :]
    for other in others:
        other.release(stream=stream)


def test_a_write_replaces_a_copy(working, layers, groups, stream):
    with groups[0].use(stream=stream, access="read"):
        pass
    loads = working.stats().loaded
    with groups[0].use(stream=stream, access="write"):
        layers[0].fill(3, stream=stream)
        stream.sync()
        assert groups[0].is_resident and not layers[0].read_mostly
    assert working.stats().loaded == loads + 1
    assert working.nbytes <= working.budget
    working.remove(groups[0])
    assert contents(layers[0]) == bytes([3]) * SIZE


def test_the_end_of_a_set_restores_the_advice_of_copies(working, layers, groups, stream):
    uses = [group.use(stream=stream, access="read") for group in groups[:3]]
    for use in uses:
        use.__enter__()
    stream.sync()
    assert all(layer.read_mostly for layer in layers[:3])
    uses[0].__exit__(None, None, None)
    working.remove(groups[0])
    assert not layers[0].read_mostly
    working.close()
    assert not any(layer.read_mostly for layer in layers)
    assert [contents(layer) for layer in layers[:3]] == [pattern(SIZE, n) for n in range(3)]


# --- groups that are at home when they are added ------------------------------------------


def test_contents_of_groups_at_home_stay(working, layers):
    groups = [working.add(layer, at_home=True) for layer in layers]
    with Stream() as stream:
        for group in groups * 2:
            with group.use(stream=stream):
                assert working.nbytes <= working.budget
        stream.sync()
    assert working.stats().failures == 0
    working.close()
    assert all(contents(layer) == pattern(SIZE, i) for i, layer in enumerate(layers))


@pytest.mark.emulator_only
@pytest.mark.parametrize(("at_home", "prefetches"), [(False, 2), (True, 1)])
def test_what_is_at_home_is_not_prefetched_there(working, layers, at_home, prefetches):
    with emulator.recording() as calls:
        with working.add(layers[0], at_home=at_home).use():
            pass
        working.close()
    assert [call.name for call in calls].count("cuMemPrefetchAsync") == prefetches


@pytest.mark.emulator_only
def test_what_a_device_has_written_first_is_at_home(working, alloc):
    memory = alloc(16 * SIZE)
    memory.preferred_location = Host()
    memory.fill(7)
    Device(0).sync()
    assert emulator.residency(memory) is Host()
    parts = [memory[i * SIZE : (i + 1) * SIZE] for i in range(16)]
    for group in [working.add(part, at_home=True) for part in parts]:
        with group.use():
            pass
    working.close()
    assert emulator.residency(memory) is Host()  # the copies are gone, and all else stayed there
    assert contents(memory) == bytes([7]) * memory.size


@pytest.mark.parametrize("access", ["write", "scratch"])
def test_at_home_is_for_what_is_only_read(working, layers, access):
    with pytest.raises(ValueError, match=f'access="read", got "{access}"'):
        working.add(layers[0], access, at_home=True)
    working.add(layers[0], access, at_home=False)
    assert len(working) == 1


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_at_home_must_be_a_bool(working, layers, value):
    with pytest.raises(TypeError, match="at_home takes a bool"):
        working.add(layers[0], at_home=value)
    assert len(working) == 0


@pytest.mark.parametrize("access", ["read", "write", "scratch"])
@pytest.mark.parametrize("ordinal", [0, 1])
def test_homes_are_near_the_device(layers, stream, access, ordinal):
    if Device.count() <= ordinal:
        pytest.skip("needs two devices")
    device = Device(ordinal)
    home = device.nearest_host
    with WorkingSet(2 * SIZE, device) as working:
        first = working.add(layers[:2], access)
        second = working.add(layers[2:4], access)  # in place of the first
        for group in (first, second):
            with group.use(stream=stream):
                pass
        assert all(layer.preferred_location is home for layer in layers[:4])
        device.sync()
        if EMULATED:
            expected = home if home.numa_id else Host()
            end = time.monotonic() + 10  # the thread of the set may have the move still to do
            while emulator.residency(layers[0]) is not expected and time.monotonic() < end:
                device.sync()
            assert emulator.residency(layers[0]) is expected
