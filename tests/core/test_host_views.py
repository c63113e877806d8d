"""Moves to the host that numpy() and torch("cpu") make: they are no prefetches of the user."""

import pytest

import managedmem
from constants import MIB
from managedmem import Device, Host, ManagedMemoryResource, Stream

np = pytest.importorskip("numpy", reason="needs NumPy")

pytestmark = pytest.mark.usefixtures("current_device")
PAGE = 64 << 10


def on_device(alloc, nbytes=4 * MIB, name="x"):
    """A buffer whose pages are on the device."""
    buffer = alloc(nbytes)
    buffer.name = name
    memoryview(buffer).cast("B")[:] = bytes(buffer.nbytes)
    buffer.prefetch(Device(0))
    Device(0).sync()
    return buffer


def causes(sums):
    """The bytes by cause, without zeros."""
    return {cause: moved for cause, moved in sums.by_cause.items() if any(moved)}


def torch_on_cpu(buffer):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    assert buffer.torch("cpu").untyped_storage().nbytes() == buffer.nbytes
    return torch


@pytest.mark.parametrize("view", [lambda b: b.numpy(), torch_on_cpu], ids=["numpy", "torch"])
def test_views_are_no_requests(alloc, view):
    x = on_device(alloc)
    with managedmem.trace() as trace:
        view(x)
    assert causes(trace["x"]) == causes(trace.total) == {"host_view": (0, 4 * MIB, 0)}
    assert [event.cause for event in trace.events("call")] == ["host_view"]
    assert {event.cause for event in trace.events("move")} == {"host_view"}
    assert trace["x"].to_host == 4 * MIB
    assert not any("prefetches moved nothing" in str(each) for each in trace.findings())


def test_a_view_that_moves_nothing_is_no_idle_prefetch(alloc):
    x = on_device(alloc)
    x.numpy()
    with managedmem.trace() as trace:
        x.numpy()
    assert causes(trace.total) == {}
    assert trace.findings() == ()


@pytest.mark.parametrize("defer", [True, False])
def test_a_prefetch_of_the_user_stays_one(alloc, defer):
    x = on_device(alloc)
    with Stream() as stream, managedmem.trace() as trace:
        x.prefetch(Host(), stream=stream, defer=defer)
        x.numpy(stream)
        x.prefetch(Device(0), stream=stream)
    assert causes(trace["x"]) == {"requested": (4 * MIB, 4 * MIB, 0)}


def test_a_view_of_a_part(alloc):
    x = on_device(alloc)
    with managedmem.trace() as trace:
        x[MIB : 2 * MIB].numpy()
        trace.mark("part")
        x.numpy()
    part, rest = trace.slices
    assert causes(part["x"]) == {"host_view": (0, MIB, 0)}
    assert causes(rest["x"]) == {"host_view": (0, 3 * MIB, 0)}


def test_views_beyond_the_limit_are_told_apart_as_far_as_their_calls_are_known(alloc):
    x = on_device(alloc, 32 * MIB)
    with managedmem.trace(limit=1000) as trace:
        for at in range(0, 32 * MIB, PAGE):
            x[at : at + PAGE].numpy()
            x[at : at + PAGE].prefetch(Device(0))
    assert trace.truncated
    found = causes(trace["x"])
    assert found["requested"][0] == trace["x"].to_host == 32 * MIB
    assert found["requested"][1] + found.get("host_view", (0, 0))[1] == 32 * MIB


@pytest.mark.usefixtures("device1")
def test_views_of_memory_on_another_device(alloc):
    x = on_device(alloc)
    x.prefetch(Device(1))
    Device(1).sync()
    with managedmem.trace() as trace:
        x.numpy()
    assert causes(trace["x"]) == {"host_view": (0, 4 * MIB, 0)}


def test_a_view_during_a_capture_is_refused_while_recording(alloc, stream):
    from driver import capturing

    x = on_device(alloc)
    with managedmem.trace(), capturing(stream) as capture:
        with pytest.raises(managedmem.CUDAError, match="captur"):
            x.numpy(stream)
    assert capture.result == 0


@pytest.mark.emulator_only
class TestPrograms:
    """Loops that tell the emulated driver the device's accesses; on a GPU these are kernels."""

    @staticmethod
    def findings(prepare, body, rounds=3, resource=None):
        with (resource or ManagedMemoryResource()).allocate(4 * MIB) as x:
            x.name = "x"
            prepare(x)
            with managedmem.trace() as trace:
                for _ in range(rounds):
                    body(x)
            return trace, " ".join(map(str, trace.findings()))

    @staticmethod
    def fill(x):
        memoryview(x).cast("B")[:] = bytes(x.nbytes)

    @staticmethod
    def use(x, write=False, device=0):
        managedmem.emulator.touch(x, Device(device), write=write)

    def test_a_table_read_in_turn(self):
        def body(x):
            self.use(x)
            x.numpy().sum()

        trace, text = self.findings(self.fill, body)
        assert (trace.total.to_device, trace.total.to_host) == (12 * MIB, 12 * MIB)
        assert (
            "x went to the device and back 3 times (12.0M each way) by faults and numpy()" in text
        )
        assert "MigrationPolicy.read_duplicated()" in text

        def duplicated(x):
            self.fill(x)
            x.read_mostly = True

        trace, text = self.findings(duplicated, body)
        assert (trace.total.to_device, trace.total.to_host) == (4 * MIB, 0)
        assert "read_duplicated" not in text
        try:
            pooled = ManagedMemoryResource(pooled=True)
        except managedmem.CUDAError:
            return
        _, text = self.findings(self.fill, body, resource=pooled)
        assert "Drivers refuse advice on memory of pools" in text
        assert "read_duplicated" not in text

    def test_an_output(self):
        def body(x):
            self.use(x, write=True)
            x.numpy().sum()

        _, text = self.findings(self.fill, body)
        assert "discard_prefetch(Device(0)) before that brings pages without" in text
        assert "read_duplicated" not in text

        def better(x):
            x.discard_prefetch(Device(0))
            Device(0).sync()
            body(x)

        trace, _ = self.findings(self.fill, better)
        assert trace.total.to_device == 0

    @pytest.mark.parametrize("shape", ["part", "both devices", "in place"])
    def test_what_is_no_output(self, shape, device1):
        def body(x):
            if shape == "part":
                self.use(x[: 2 * MIB], write=True)
            elif shape == "in place":
                self.use(x[: 2 * MIB])
                self.use(x, write=True)
            else:
                self.use(x, write=True)
                self.use(x, device=device1.device_id)
            x.numpy().sum()

        _, text = self.findings(self.fill, body)
        assert "discard_prefetch" not in text
        assert "read_duplicated" not in text

    def test_contents_that_numpy_moves_and_the_host_overwrites(self):
        def body(x):
            x.prefetch(Device(0))
            x.numpy()[:] = 3

        _, text = self.findings(self.fill, body, 1)
        assert "discard_prefetch(Host()) of its range before numpy() moves nothing" in text

        def better(x):
            x.prefetch(Device(0))
            x.discard_prefetch(Host())
            x.numpy()[:] = 3

        trace, text = self.findings(self.fill, better, 1)
        assert trace.total.to_host == 0
        assert "discard_prefetch" not in text

    def test_a_result_that_a_device_has_made_is_read(self):
        with managedmem.trace() as trace, managedmem.empty(4 * MIB, name="y") as y:
            self.use(y, write=True)
            y.numpy().sum()
        assert trace.total.to_host == 4 * MIB
        assert trace.findings() == ()
