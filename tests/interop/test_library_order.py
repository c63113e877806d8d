"""The order of work on the streams of other libraries: where it is wrong, so are the numbers.

A stream is kept busy first, so that whatever does not wait for it runs too early and is seen to
have done so. Discarded pages read 0 or something old after a prefetch, but not what was written
last.
"""

import ctypes
import time

import pytest

import libraries
import managedmem
from constants import MIB
from driver import raw_driver
from libraries import STREAMS, handle_of, torch_works_on
from managedmem import Host

SLEEP = 80_000_000  # cycles: some 40 ms on a GPU at 2 GHz
CHUNK = 2 * MIB
CHUNKS = 8
OLD, NEW = 3, 5
EVEN, ODD = slice(0, None, 2), slice(1, None, 2)

streams = pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)


@pytest.fixture
def torch():
    return libraries.torch()


class Memory:
    """A buffer of 8 chunks, also as a tensor; operations act on the even ones, not adjacent."""

    def __init__(self, torch, buffer):
        self.buffer = buffer
        self.chunks = [buffer[i : i + CHUNK] for i in range(0, CHUNKS * CHUNK, 2 * CHUNK)]
        self.tensor = torch.as_tensor(buffer, device="cuda").view(CHUNKS, CHUNK)
        self.callbacks = []  # what a stream still has to call

    def write_late(self, stream):
        """Queue a host function that writes NEW everywhere after a while."""

        @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        def write(_):
            time.sleep(0.04)
            ctypes.memset(self.buffer.handle, NEW, self.buffer.nbytes)

        self.callbacks.append(write)
        assert raw_driver().cuLaunchHostFunc(ctypes.c_void_p(handle_of(stream)), write, None) == 0

    def even(self):
        return values(self.tensor[::2])

    def odd(self):
        return values(self.tensor[1::2])


def values(array):
    """The smallest and the largest number in an array: one, where all are the same."""
    return {int(array.min()), int(array.max())}


def on_host(buffer, chunks=slice(None)):
    """The same of these chunks, as the host reads them now."""
    return values(libraries.numpy().asarray(buffer).reshape(CHUNKS, CHUNK)[chunks])


@pytest.fixture
def memory(torch, alloc):
    """All bytes OLD, on the device."""
    made = Memory(torch, alloc(CHUNKS * CHUNK))
    # Each kernel of the tests runs once, because the first call loads it and so waits for the GPU.
    made.tensor.fill_(OLD)
    made.tensor[::2].fill_(OLD)
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    return made


@pytest.fixture
def on_the_host(memory):
    """The same on the host, from where discarded pages lose what the host wrote."""
    memory.buffer.prefetch(Host())
    managedmem.Device().sync()
    return memory


@pytest.fixture
def remote(memory):
    """Pages that stay on the host, where the GPU reads and writes them.

    What is then discarded and prefetched to the device is lost for certain.
    """
    memory.buffer.preferred_location = Host()
    memory.buffer.accessed_by = [managedmem.Device()]
    memory.buffer.prefetch(Host())
    managedmem.Device().sync()
    return memory


# Each forgets what chunks hold and provides new pages on the current device, in a stream's order.


def discard_then_prefetch(targets, stream, dispatch="auto", defer=None):
    managedmem.discard(targets, stream=stream, dispatch=dispatch)
    here = managedmem.Device()
    managedmem.prefetch(targets, here, stream=stream, dispatch=dispatch, defer=defer)


def discard_prefetch(targets, stream, **options):
    managedmem.discard_prefetch(targets, managedmem.Device(), stream=stream, **options)


def by_two_methods(targets, stream):
    for target in targets:
        target.discard(stream=stream)
        target.prefetch(managedmem.Device(), stream=stream)


def by_one_method(targets, stream):
    for target in targets:
        target.discard_prefetch(managedmem.Device(), stream=stream)


def with_options(forget, **options):
    return lambda targets, stream: forget(targets, stream, **options)


FORGET = {
    "discard": discard_then_prefetch,
    "discard_prefetch": discard_prefetch,
    "deferred discard_prefetch": with_options(discard_prefetch, defer=True),
}
MORE = {
    "discard by method": by_two_methods,
    "discard batch": with_options(discard_then_prefetch, dispatch="batch"),
    "discard and deferred prefetch": with_options(discard_then_prefetch, defer=True),
    "discard and prefetch at once": with_options(discard_then_prefetch, defer=False),
    "discard loop": with_options(discard_then_prefetch, dispatch="loop"),
    "discard_prefetch by method": by_one_method,
    "discard_prefetch batch": with_options(discard_prefetch, dispatch="batch"),
    "discard_prefetch loop": with_options(discard_prefetch, dispatch="loop"),
    "discard_prefetch not deferred": with_options(discard_prefetch, defer=False),
}
# After these the numbers do not tell the order: the driver often keeps what one call discards and
# another prefetches, and often loses what the host writes between discard and a late prefetch.
SILENT = {"discard by method", "discard loop", "deferred discard_prefetch"}


def cases(silent):
    """Every stream with the three kinds, and the other forms of them with a stream of each sort."""
    return [
        pytest.param(forget, STREAMS[stream], id=f"{name}-{stream}")
        for names, forms in ((STREAMS, FORGET), (("None", "torch", "handle 2"), MORE))
        for stream in names
        for name, forget in forms.items()
        if silent or name not in SILENT
    ]


every_form = pytest.mark.parametrize("forget", (FORGET | MORE).values(), ids=FORGET | MORE)
telling = {name: forget for name, forget in (FORGET | MORE).items() if name not in SILENT}


class TestForgetting:
    @pytest.mark.parametrize(("forget", "make"), cases(silent=False))
    def test_comes_after_a_write_that_was_queued_before(self, on_the_host, forget, make):
        given = make()
        with torch_works_on(given):
            on_the_host.write_late(given)
            forget(on_the_host.chunks, given)
        assert NEW not in on_host(on_the_host.buffer, EVEN)
        assert on_the_host.odd() == {NEW}

    @pytest.mark.parametrize(("forget", "make"), cases(silent=True))
    def test_comes_before_a_write_that_is_queued_after(self, torch, remote, forget, make):
        given = make()
        with torch_works_on(given):
            torch.cuda._sleep(SLEEP)
            forget(remote.chunks, given)
            remote.tensor[::2].fill_(NEW)
        assert remote.even() == {NEW}
        assert remote.odd() == {OLD}
        # Pages that were still discarded would lose it on the way back.
        managedmem.prefetch(remote.chunks, Host())
        torch.cuda.synchronize()
        assert on_host(remote.buffer, EVEN) == {NEW}
        assert on_host(remote.buffer, ODD) == {OLD}


class TestAWrongOrderShows:
    """The controls: without them the tests above could pass whatever the order is."""

    @pytest.mark.parametrize("forget", telling.values(), ids=telling)
    def test_forgetting_too_early_leaves_what_is_written(self, on_the_host, stream, forget):
        with torch_works_on(None):
            on_the_host.write_late(None)
            forget(on_the_host.chunks, stream)
            stream.sync()
        assert NEW in on_host(on_the_host.buffer, EVEN)

    @every_form
    def test_forgetting_too_late_destroys_what_is_written(self, torch, remote, stream, forget):
        early = torch.cuda.Stream()
        with torch_works_on(stream):
            torch.cuda._sleep(SLEEP)
            forget(remote.chunks, stream)
            with torch.cuda.stream(early):
                remote.tensor[::2].fill_(NEW)
            early.synchronize()
            assert not stream.query(), "the sleep was too short to prove anything"
        assert remote.even() != {NEW}


class TestTheCurrentStreamOfTorch:
    @pytest.mark.parametrize("own", [False, True], ids=["default", "inside a stream block"])
    def test_is_a_stream_argument(self, torch, on_the_host, own):
        with torch.cuda.stream(torch.cuda.Stream() if own else torch.cuda.default_stream()):
            current = torch.cuda.current_stream()
            on_the_host.write_late(current)
            discard_prefetch(on_the_host.chunks, current)
            current.synchronize()
        assert NEW not in on_host(on_the_host.buffer, EVEN)
        assert on_the_host.odd() == {NEW}

    def test_none_is_the_default_stream_also_inside_a_stream_block(self, torch, on_the_host):
        """As documented: `stream=None` does not look at what torch's block says."""
        on_the_host.write_late(None)
        with torch.cuda.stream(torch.cuda.Stream()):
            discard_prefetch(on_the_host.chunks, None)
        torch.cuda.synchronize()
        assert NEW not in on_host(on_the_host.buffer, EVEN)
        assert on_the_host.odd() == {NEW}


@streams
class TestReadingOnTheHost:
    def test_after_a_prefetch_to_the_host(self, torch, memory, make):
        given = make()
        wanted = managedmem.Stream.from_handle(handle_of(given))
        with torch_works_on(given):
            for defer in (False, True):
                torch.cuda._sleep(SLEEP)
                memory.tensor.fill_(NEW + defer)
                memory.buffer.prefetch(Host(), stream=given, defer=defer)
                wanted.sync()
                assert on_host(memory.buffer) == {NEW + defer}

    def test_numpy_waits_for_the_stream(self, torch, memory, make):
        given = make()
        with torch_works_on(given):
            torch.cuda._sleep(SLEEP)
            memory.tensor.fill_(NEW)
            array = memory.buffer.numpy(stream=given)
            found = values(array)
        assert found == {NEW}
        assert array.ctypes.data == memory.buffer.handle
        assert memory.buffer.last_prefetch_location is Host()

    def test_numpy_of_a_slice_leaves_the_rest(self, torch, memory, make):
        given = make()
        memory.buffer.prefetch(managedmem.Device())
        managedmem.Device().sync()
        with torch_works_on(given):
            torch.cuda._sleep(SLEEP)
            memory.tensor[2].fill_(NEW)
            found = values(memory.buffer[2 * CHUNK : 3 * CHUNK].numpy(stream=given))
        assert found == {NEW}
        assert memory.buffer[:CHUNK].last_prefetch_location is managedmem.Device(0)


def test_reading_without_waiting_shows_old_numbers(torch, memory):
    """The control of the class above."""
    torch.cuda._sleep(SLEEP)
    memory.tensor.fill_(NEW)
    early = int(libraries.numpy().asarray(memory.buffer)[-1])
    torch.cuda.synchronize()
    assert early == OLD


CONSUMERS = {
    "cupy.asarray": lambda b: libraries.cupy().asarray(b),
    "cupy.from_dlpack": lambda b: libraries.cupy().from_dlpack(b),
}


@pytest.mark.parametrize("give", CONSUMERS.values(), ids=CONSUMERS)
def test_a_consumer_on_another_stream_sees_the_default_stream_s_work(torch, memory, give):
    cupy = libraries.cupy()
    with cupy.cuda.Stream(non_blocking=True):
        torch.cuda._sleep(SLEEP)
        memory.buffer.fill(NEW)
        found = values(give(memory.buffer).get())
    assert found == {NEW}


def test_numba_waits_for_the_default_stream(torch, memory):
    torch.cuda._sleep(SLEEP)
    memory.buffer.fill(NEW)
    array = libraries.numba_cuda().as_cuda_array(memory.buffer)
    other = libraries.numba_cuda().stream()
    found = array.copy_to_host(stream=other)
    other.synchronize()
    assert values(found) == {NEW}


class TestTwoDevices:
    @pytest.fixture(autouse=True)
    def second(self, torch, device1, current_device):
        self.cuda1 = torch.device("cuda", 1)

    @pytest.mark.parametrize("own", [False, True], ids=["default", "own stream"])
    @every_form
    def test_a_stream_of_the_other_device(self, torch, on_the_host, own, forget):
        with torch.cuda.device(self.cuda1):
            block = torch.cuda.Stream() if own else torch.cuda.current_stream()
            with torch.cuda.stream(block):
                on_the_host.write_late(block)
                forget(on_the_host.chunks, block)
                for chunk in on_the_host.chunks:
                    chunk.fill(OLD, stream=block)
            torch.cuda.synchronize()
        assert on_the_host.even() == {OLD}
        assert on_the_host.odd() == {NEW}

    def test_a_stream_of_a_device_that_is_not_current(self, torch, memory, device0, device1):
        """The current device is 0 all the time: the stream alone says where the work goes."""
        other = torch.cuda.Stream(device=self.cuda1)
        memory.buffer.discard_prefetch(device1, stream=other)
        memory.buffer.fill(NEW, stream=other)
        managedmem.prefetch(memory.chunks, device0, stream=other, dispatch="batch")
        other.synchronize()
        assert torch.cuda.current_device() == 0
        assert values(memory.tensor) == {NEW}

    def test_a_tensor_on_the_other_device(self, torch, alloc, device0, device1):
        """Inside the device's block: the handle of a default stream, 0, is the current device's."""
        with torch.cuda.device(self.cuda1):
            device1.set_current()
            buffer = alloc(2 * CHUNK)
            tensor = torch.as_tensor(buffer, device=self.cuda1)
            assert tensor.data_ptr() == buffer.handle
            stream = torch.cuda.current_stream()
            managedmem.prefetch(tensor, tensor.device, stream=stream)
            assert buffer.last_prefetch_location is device1
            torch.cuda._sleep(SLEEP)
            managedmem.discard_prefetch([tensor[:CHUNK]], torch.device("cuda", 0), stream=stream)
            tensor.fill_(NEW)
            torch.cuda.synchronize()
        assert values(tensor) == {NEW}
        assert buffer[:CHUNK].last_prefetch_location is device0
        assert buffer[CHUNK:].last_prefetch_location is device1
