"""Groups of a WorkingSet that are on the host when they are added."""

import pytest

from constants import PAGE
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


def test_contents_stay(working, layers):
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
def test_nothing_is_prefetched_home(working, layers, at_home, prefetches):
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
