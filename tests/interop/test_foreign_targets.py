"""Targets of other libraries: torch tensors, asked natively, and arrays that tell lies.

torch's CPU build is enough here: a tensor made with torch.frombuffer lies in managed memory.
"""

import contextlib
import ctypes
import gc
import warnings

import pytest

import managedmem
from constants import EMULATED, PAGE
from contents import contents, pattern, write
from driver import device_memory, managed_memory, raw_driver
from foreign_objects import CudaArray
from managedmem import Device, Host, emulator

ROWS = 16  # of one page each, in what `matrix` gives

FUNCTIONS = {
    "advise": lambda t: managedmem.advise(t, "set_preferred_location", Host()),
    "prefetch": lambda t: managedmem.prefetch(t, Host()),
    "discard": managedmem.discard,
    "discard_prefetch": lambda t: managedmem.discard_prefetch(t, Host()),
}
functions = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


@pytest.fixture(scope="module")
def torch():
    module = pytest.importorskip("torch", reason="needs torch")
    gc.collect()
    gc.freeze()  # torch's objects would slow down the collections around every test
    return module


@pytest.fixture
def no_system_memory(device0):
    if device0.pageable_memory_access:
        pytest.skip("this machine takes every address of the process for a target")


def matrix(torch, buffer):
    """The first pages of the buffer as a float tensor with a page in each row."""
    return torch.frombuffer(buffer[: ROWS * PAGE], dtype=torch.float32).view(ROWS, -1)


def moved_pages(buffer):
    """The pages of the buffer that were last asked to go to Device(0)."""
    Device().sync()
    pages = [buffer[i * PAGE : (i + 1) * PAGE] for i in range(ROWS + 2)]
    return [i for i, page in enumerate(pages) if page.last_prefetch_location is Device(0)]


@contextlib.contextmanager
def nothing_done(buffer):
    """Advice, place and bytes of the buffer stay, and the driver is asked for none of them."""
    write(buffer, pattern(buffer.size))
    with emulator.recording() if EMULATED else contextlib.nullcontext([]) as calls:
        yield
    words = ("Prefetch", "Discard", "Advise", "Memcpy", "Memset", "LaunchHostFunc")
    assert not [c.name for c in calls if any(word in c.name for word in words)]
    assert buffer.last_prefetch_location is None
    assert buffer.preferred_location is None
    assert contents(buffer) == pattern(buffer.size)


def subclass(torch, tensor):
    class Tagged(torch.Tensor):
        """What users write: a class of another module, through which every method goes."""

        @classmethod
        def __torch_function__(cls, function, kinds, args=(), kwargs=None):
            return super().__torch_function__(function, kinds, args, kwargs or {})

        def __repr__(self, **options):
            raise AssertionError("a message must not read the tensor")

    return tensor.as_subclass(Tagged)


def mixed_in(torch, tensor):
    class Mixin:
        pass

    cls = type("Mixed", (Mixin, torch.nn.Parameter), {})
    return tensor.as_subclass(cls)


TENSORS = {
    "plain": lambda torch, t: t,
    "parameter": lambda torch, t: torch.nn.Parameter(t),
    "requires grad": lambda torch, t: t.detach().requires_grad_(),
    "in a graph": lambda torch, t: t.detach().requires_grad_().view(-1),
    "subclass": subclass,
    "subclass with another base": mixed_in,
    "bfloat16": lambda torch, t: t.view(torch.bfloat16),
    "float8_e4m3fn": lambda torch, t: t.view(torch.float8_e4m3fn),
    "float8_e5m2": lambda torch, t: t.view(torch.float8_e5m2),
    "complex": lambda torch, t: t.view(torch.complex64),
    "conjugate": lambda torch, t: t.view(torch.complex64).conj(),
    "bool": lambda torch, t: t.view(torch.bool),
    "transposed": lambda torch, t: t.t(),
    "three axes": lambda torch, t: t.view(2, ROWS // 2, -1),
    "permuted": lambda torch, t: t.view(2, ROWS // 2, -1).permute(2, 0, 1),
    "axes of one element": lambda torch, t: t[None, :, None],
}
tensors = pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)


@tensors
class TestTorchTensors:
    def test_prefetch(self, torch, buf, device0, make):
        managedmem.prefetch(make(torch, matrix(torch, buf)), device0)
        assert moved_pages(buf) == list(range(ROWS))

    def test_prefetch_in_a_list(self, torch, buf, device0, make):
        targets = [make(torch, matrix(torch, buf)), buf[(ROWS + 1) * PAGE :]]
        managedmem.prefetch(targets, [device0, Host()])
        assert moved_pages(buf) == list(range(ROWS))

    def test_advise(self, torch, buf, device0, make):
        managedmem.advise(make(torch, matrix(torch, buf)), "set_preferred_location", device0)
        assert buf[: ROWS * PAGE].preferred_location is device0
        assert buf[ROWS * PAGE :].preferred_location is None

    def test_discard(self, torch, buf, make):
        write(buf, pattern(buf.size))
        managedmem.discard(make(torch, matrix(torch, buf)))
        assert contents(buf)[ROWS * PAGE :] == pattern(buf.size)[ROWS * PAGE :]

    def test_discard_prefetch(self, torch, buf, device0, make):
        managedmem.discard_prefetch(make(torch, matrix(torch, buf)), device0)
        assert moved_pages(buf) == list(range(ROWS))


VIEWS = {
    "row": (lambda t: t[3], [3]),
    "rows": (lambda t: t[3:5], [3, 4]),
    "every other row": (lambda t: t[2:7:2], [2, 3, 4, 5, 6]),
    "columns": (lambda t: t[:, 1:3], list(range(ROWS))),
    "narrowed": (lambda t: t.narrow(0, 14, 2), [14, 15]),
    "expanded row": (lambda t: t[3].expand(5, -1), [3]),
    "diagonal": (lambda t: t[:3].diagonal(), [0, 1, 2]),
    "one element": (lambda t: t[9, 7], [9]),
    "halves": (lambda t: t.view(2, 8, -1)[1], list(range(8, 16))),
}


@pytest.mark.parametrize(("view", "pages"), VIEWS.values(), ids=VIEWS)
def test_a_view_acts_on_its_own_extent(torch, buf, device0, view, pages):
    managedmem.prefetch(view(matrix(torch, buf)), device0)
    assert moved_pages(buf) == pages


@functions
def test_a_tensor_is_one_target_and_no_sequence_of_rows(torch, buf, function):
    with nothing_done(buf), pytest.raises(TypeError, match="Device or Host"):
        managedmem.prefetch(matrix(torch, buf), [Host()] * ROWS)
    assert function(matrix(torch, buf)) is None


@pytest.mark.parametrize("discard", [managedmem.discard, FUNCTIONS["discard_prefetch"]])
@pytest.mark.parametrize("name", ["every other row", "columns", "expanded row", "diagonal"])
def test_a_view_with_gaps_is_not_discarded(torch, buf, discard, name):
    view = VIEWS[name][0](matrix(torch, buf))
    for targets in (view, [buf, view], subclass(torch, view)):
        with nothing_done(buf), pytest.raises(ValueError, match="not contiguous"):
            discard(targets)


class TestCopies:
    def test_from_a_tensor_of_managed_memory(self, torch, buf, alloc):
        write(buf, pattern(buf.size))
        other = alloc(2 * PAGE)
        other.copy_from(matrix(torch, buf)[2:4])
        assert contents(other) == pattern(buf.size)[2 * PAGE : 4 * PAGE]

    def test_from_and_to_a_cpu_tensor(self, torch, alloc):
        buffer = alloc(PAGE)
        source = torch.arange(PAGE // 4, dtype=torch.int32)
        buffer.copy_from(source)
        target = torch.zeros_like(source)
        assert buffer.copy_to(target) is target
        assert torch.equal(target, source)

    def test_refuses_gaps_and_other_sizes(self, torch, buf):
        tensor = matrix(torch, buf)
        with nothing_done(buf):
            with pytest.raises(ValueError, match=r"not C-contiguous; .* numpy.ascontiguousarray"):
                buf[: 8 * PAGE].copy_from(tensor[::2])
            with pytest.raises(ValueError, match="not C-contiguous; copy into memory that is"):
                buf[: 8 * PAGE].copy_to(tensor[::2])
            with pytest.raises(ValueError, match="not C-contiguous"):
                buf.copy_from(tensor.t())
            with pytest.raises(ValueError, match="bytes"):
                buf[:PAGE].copy_to(tensor)


def fake(torch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(4)


def freed(torch):
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def wrapper(torch):
    """As a DTensor is made: its elements lie in tensors inside it."""

    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function, kinds, args=(), kwargs=None):
            raise NotImplementedError

    return torch.Tensor._make_wrapper_subclass(Wrapper, (4,))


def nested(torch):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


BAD_TENSORS = {
    "sparse": (lambda torch: torch.eye(3).to_sparse(), TypeError, r"torch\.sparse_coo.*values"),
    "sparse rows": (lambda torch: torch.eye(3).to_sparse_csr(), TypeError, r"torch\.sparse_csr"),
    "nested": (nested, TypeError, "no strided memory"),
    "uninitialised": (
        lambda torch: torch.nn.parameter.UninitializedParameter(),
        TypeError,
        "uninitialized",
    ),
    "meta": (lambda torch: torch.ones(4, device="meta"), ValueError, "device meta holds no memory"),
    "fake": (fake, (TypeError, ValueError), "FakeTensor.*no (strided )?memory"),
    "freed": (freed, ValueError, "holds no memory"),
    "wrapper": (wrapper, (TypeError, ValueError), "no (strided )?memory"),
}


@functions
@pytest.mark.parametrize(("make", "error", "words"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_a_tensor_without_memory(torch, buf, function, make, error, words):
    with warnings.catch_warnings():
        # torch calls some of these kinds experimental, and warns of reading a fake tensor.
        warnings.simplefilter("ignore")
        tensor = make(torch)
        with nothing_done(buf), pytest.raises(error, match=words):
            function(tensor)
        with nothing_done(buf), pytest.raises(error, match=rf"targets\[1\]: .*{words}"):
            function([buf, tensor])


@functions
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_is_done_for_an_empty_tensor(torch, buf, function, device):
    empty = torch.ones(0, 4, device=device)
    with nothing_done(buf):
        function(empty)
        function([empty, buf[:0]])


def test_an_interrupt_while_a_tensor_is_read_comes_through(torch, buf):
    class Interrupted(torch.Tensor):
        def data_ptr(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        managedmem.prefetch(matrix(torch, buf).as_subclass(Interrupted), Host())


class TestCpuTensors:
    @functions
    def test_need_a_device_that_reaches_system_memory(self, torch, buf, no_system_memory, function):
        tensor = torch.ones(4 * PAGE)
        with nothing_done(buf), pytest.raises(ValueError, match="system memory"):
            function([buf, tensor])
        assert (tensor == 1).all()

    @pytest.mark.parametrize("discard", [managedmem.discard, FUNCTIONS["discard_prefetch"]])
    def test_are_not_discarded_there(self, torch, no_system_memory, discard):
        tensor = torch.ones(4 * PAGE)
        with pytest.raises(ValueError, match="system memory"):
            discard(tensor)
        assert (tensor == 1).all()


class TestArraysThatLie:
    @functions
    def test_plain_device_memory(self, buf, function):
        with device_memory(4 * PAGE) as pointer:
            array = CudaArray(buf, shape=(4 * PAGE,), pointer=pointer)
            with nothing_done(buf), pytest.raises(ValueError, match="plain device memory"):
                function([buf, array])

    @functions
    @pytest.mark.parametrize("offset", [0, PAGE], ids=["from the start", "from the middle"])
    def test_more_bytes_than_there_are(self, buf, function, offset):
        array = CudaArray(buf, shape=(1 << 40,), offset=offset)
        with nothing_done(buf), pytest.raises(ValueError, match="leaves its managed-memory"):
            function(array)

    @functions
    def test_strides_that_reach_below_the_allocation(self, buf, no_system_memory, function):
        array = CudaArray(buf, shape=(1 << 40,), strides=(-1,))
        with nothing_done(buf), pytest.raises(ValueError, match="managed-memory allocation"):
            function(array)

    @functions
    def test_a_pointer_that_has_expired(self, no_system_memory, function):
        pointer = managed_memory(4 * PAGE)
        with managedmem.ManagedBuffer.from_handle(pointer, 4 * PAGE) as wrapped:
            array = CudaArray(wrapped)
        assert raw_driver().cuMemFree_v2(ctypes.c_uint64(pointer)) == 0
        with pytest.raises(ValueError, match="managed-memory allocation"):
            function(array)

    @functions
    def test_a_closed_buffer_behind_a_live_consumer(self, alloc, no_system_memory, function):
        """The array interface is not counted, so closing is possible."""
        buffer = alloc(4 * PAGE)
        consumer = CudaArray(buffer)
        buffer.close()
        with pytest.raises(ValueError, match="managed-memory allocation"):
            function(consumer)

    def test_the_interface_is_not_computed_to_tell_one_from_many(self, buf, device0):
        class Counting:
            asked = 0

            @property
            def __cuda_array_interface__(self):
                type(self).asked += 1
                return buf.__cuda_array_interface__

        managedmem.prefetch(Counting(), device0)
        assert Counting.asked == 1


class NoisyArray(CudaArray):
    def __repr__(self):
        raise AssertionError("a message must not read the array")


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (0, -1)},
        {"shape": (1 << 62, 1 << 62)},
        {"strides": (1, 1)},
        {"shape": (4, PAGE), "strides": (2 * PAGE, 1)},
        {"data": None},
    ],
    ids=repr,
)
def test_messages_do_not_read_arrays(buf, change):
    """The repr of an array on a GPU waits for it, copies it and breaks a capture."""
    array = NoisyArray(buf)
    array.__cuda_array_interface__.update(change)
    with nothing_done(buf), pytest.raises((TypeError, ValueError), match="NoisyArray"):
        managedmem.discard(array)
