"""Fixtures that several files of this folder use: pools, working sets, and failing advice."""

import pytest

from managedmem import Device, ManagedMemoryResource, WorkingSet, emulator
from pools import KINDS


@pytest.fixture(params=KINDS)
def pool(request):
    with KINDS[request.param]() as made:
        yield made


@pytest.fixture
def managed_pool():
    with ManagedMemoryResource(pooled=True) as made:
        yield made


@pytest.fixture
def working():
    from layers import SIZE

    with WorkingSet(4 * SIZE, Device(0)) as made:
        yield made


@pytest.fixture
def groups(working):
    from layers import layer

    return [working.add(layer(number), name=f"layer {number}") for number in range(16)]


@pytest.fixture
def failing():
    """`failing(2, 3)`: the second and third advice from now on fail."""

    def fail(*nths, name="cuMemAdvise", after=False):
        for nth in nths:
            emulator.fail(name, nth=nth, code=999, after=after)

    yield fail
    emulator.clear_failures()
