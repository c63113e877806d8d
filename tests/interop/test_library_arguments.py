"""Arrays, devices and streams of the other libraries as arguments of every function and method."""

import gc

import pytest

import libraries
import managedmem
from constants import PAGE
from contents import contents, pattern, write
from driver import capturing
from libraries import STREAMS, Numba
from managedmem import Host, ManagedBuffer, PrefetchPlan

ROW = 2 * PAGE
ROWS = 8


def host_torch():
    return libraries.need("torch")


def as_numpy(buffer):
    return libraries.numpy().asarray(buffer)


def on_host(buffer):
    return host_torch().from_numpy(as_numpy(buffer))


def on_gpu(buffer):
    return libraries.torch().as_tensor(buffer, device="cuda")


def parameter(tensor):
    torch = host_torch()
    return torch.nn.Parameter(tensor.view(torch.float32))


def on_jax(buffer):
    return libraries.jax().numpy.asarray(buffer)


def on_host_jax(buffer):
    jax = libraries.need("jax")
    return jax.dlpack.from_dlpack(as_numpy(buffer), device=jax.devices("cpu")[0])


# Arrays over a buffer, which the test holds.
ARRAYS = {
    "numpy": as_numpy,
    "torch on the CPU": on_host,
    "torch": on_gpu,
    "torch bfloat16 on the CPU": lambda b: on_host(b).view(host_torch().bfloat16),
    "torch bfloat16": lambda b: on_gpu(b).view(host_torch().bfloat16),
    "torch fp8": lambda b: on_gpu(b).view(host_torch().float8_e4m3fn),
    "torch parameter on the CPU": lambda b: parameter(on_host(b)),
    "torch parameter": lambda b: parameter(on_gpu(b)),
    "torch that requires grad": lambda b: on_gpu(b).view(host_torch().float32).requires_grad_(),
    "cupy.asarray": lambda b: libraries.cupy().asarray(b),
    "cupy.from_dlpack": lambda b: libraries.cupy().from_dlpack(b),
    "numba": lambda b: libraries.numba_cuda().as_cuda_array(b),
    "cuda.core Buffer": lambda b: libraries.cuda_core().Buffer.from_handle(
        b.handle, b.size, owner=b
    ),
    "cuda.core ManagedBuffer": lambda b: libraries.cuda_core().ManagedBuffer.from_handle(
        b.handle, b.size, owner=b
    ),
    "jax": on_jax,
    "jax on the CPU": on_host_jax,
}
arrays = pytest.mark.parametrize("make", ARRAYS.values(), ids=ARRAYS)
sliced_arrays = pytest.mark.parametrize(
    "make", [pytest.param(m, id=n) for n, m in ARRAYS.items() if not n.startswith(("cuda", "jax"))]
)
written_arrays = pytest.mark.parametrize(
    "make", [pytest.param(m, id=n) for n, m in ARRAYS.items() if not n.startswith("jax")]
)


@pytest.fixture
def rows(alloc):
    """A buffer of eight rows of two pages each, every byte 1."""
    buffer = alloc(ROWS * ROW)
    write(buffer, 1)
    return buffer.view("uint8", (ROWS, ROW))


def advised(buffer):
    return [buffer[i : i + 1].preferred_location for i in range(ROWS)]


def prefetched(buffer):
    return [buffer[i : i + 1].last_prefetch_location for i in range(ROWS)]


@arrays
class TestTargets:
    def test_advise(self, make, buf):
        target = make(buf)
        managedmem.advise(target, "set_preferred_location", Host())
        assert buf.preferred_location is Host()
        managedmem.advise([target], "set_read_mostly")
        assert buf.read_mostly is True

    def test_prefetch(self, make, buf, device0):
        target = make(buf)
        write(buf, 5)
        managedmem.prefetch(target, device0)
        assert buf.last_prefetch_location is device0
        managedmem.prefetch([target], [Host()])
        assert buf.last_prefetch_location is Host()
        assert contents(buf) == b"\x05" * buf.size

    def test_plan(self, make, buf, device0):
        target = make(buf)
        write(buf, 5)
        plan = PrefetchPlan([(target, device0)])
        assert plan.nbytes == buf.size
        plan.add(target, Host(), nbytes=PAGE)
        del target
        gc.collect()
        plan.execute()
        assert buf[PAGE:].last_prefetch_location is device0
        assert buf[:PAGE].last_prefetch_location is Host()
        assert contents(buf) == b"\x05" * buf.size
        plan.clear()

    def test_discard(self, make, buf, device0):
        target = make(buf)
        if make in (on_jax, on_host_jax):  # its arrays are constant
            write(buf, 5)
            for discard in (managedmem.discard, lambda t: managedmem.discard_prefetch(t, device0)):
                with pytest.raises(ValueError, match="read-only"):
                    discard(target)
            assert contents(buf) == b"\x05" * buf.size
            return
        managedmem.discard(target)
        managedmem.discard_prefetch(target, device0)
        assert buf.last_prefetch_location is device0
        buf.fill(8)
        assert contents(buf) == b"\x08" * buf.size

    def test_copy_from(self, make, buf, alloc):
        source = alloc(buf.size)
        write(source, pattern(buf.size))
        buf.copy_from(make(source))
        assert contents(buf) == pattern(buf.size)


@written_arrays
def test_copy_to_writes_into_an_array(make, buf, alloc):
    destination = alloc(buf.size)
    write(buf, pattern(buf.size))
    target = make(destination)
    assert buf.copy_to(target) is target
    assert contents(destination) == pattern(buf.size)


@sliced_arrays
class TestViewsActOnTheirOwnExtent:
    """Rows 2 and 3 of a larger array: the storage around them keeps its advice and contents."""

    def test_advise(self, make, rows):
        middle = make(rows)[2:4]
        managedmem.advise(middle, "set_preferred_location", Host())
        assert advised(rows) == [None, None, Host(), Host(), None, None, None, None]

    def test_prefetch(self, make, rows, device0):
        middle = make(rows)[2:4]
        managedmem.prefetch(middle, device0)
        assert prefetched(rows) == [None, None, device0, device0, None, None, None, None]

    def test_discard_prefetch(self, make, rows, device0):
        middle = make(rows)[2:4]
        managedmem.discard_prefetch(middle, device0)
        assert prefetched(rows) == [None, None, device0, device0, None, None, None, None]
        rows[2:4].fill(9)
        assert contents(rows) == b"\x01" * 2 * ROW + b"\x09" * 2 * ROW + b"\x01" * 4 * ROW

    def test_copies(self, make, rows, alloc):
        middle = make(rows)[2:4]
        other = alloc(2 * ROW)
        write(other, 7)
        other.copy_to(middle)
        assert contents(rows) == b"\x01" * 2 * ROW + b"\x07" * 2 * ROW + b"\x01" * 4 * ROW
        write(rows, 3)
        other.copy_from(middle)
        assert contents(other) == b"\x03" * 2 * ROW


STRIDED = {
    "numpy": lambda b: as_numpy(b)[:, 8:],
    "torch on the CPU": lambda b: on_host(b)[:, 8:],
    "torch": lambda b: on_gpu(b)[:, 8:],
    "cupy": lambda b: libraries.cupy().asarray(b)[:, 8:],
    "numba": lambda b: libraries.numba_cuda().as_cuda_array(b)[:, 8:],
}


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
def test_a_strided_view_is_prefetched_whole_and_never_discarded(make, rows, device0):
    view = make(rows)
    managedmem.prefetch(view, device0)
    assert prefetched(rows) == [device0] * ROWS
    for call in (
        lambda: managedmem.discard(view),
        lambda: managedmem.discard_prefetch(view, Host()),
        lambda: rows.copy_from(view),
    ):
        with pytest.raises(ValueError, match="contiguous"):
            call()
    assert contents(rows) == b"\x01" * ROWS * ROW
    assert prefetched(rows) == [device0] * ROWS


def test_a_transposed_tensor_has_no_gaps(rows, device0):
    tensor = on_gpu(rows).t()
    managedmem.discard_prefetch(tensor, device0)
    assert prefetched(rows) == [device0] * ROWS


# Managed memory that the other library allocated itself.
THEIR_OWN = {
    "cupy": lambda: cupy_managed(libraries.cupy()),
    "numba": lambda: libraries.numba_cuda().managed_array(64 * PAGE, "u1"),
    "cuda.core": lambda: (
        libraries.cuda_core()
        .ManagedMemoryResource()
        .allocate(64 * PAGE, stream=libraries.cuda_core().Device(0).default_stream)
    ),
}


def cupy_managed(cupy):
    memory = cupy.cuda.malloc_managed(64 * PAGE)
    return cupy.ndarray(64 * PAGE, cupy.uint8, memory)


@pytest.mark.parametrize("make", THEIR_OWN.values(), ids=THEIR_OWN)
def test_managed_memory_that_they_allocated(make, device0):
    array = make()
    managedmem.prefetch(array, device0)
    managedmem.discard_prefetch(array, Host())
    device0.sync()
    pointer = int(array.handle) if hasattr(array, "handle") else Numba.pointer(array)
    wrapped = ManagedBuffer.from_handle(pointer, 64 * PAGE, owner=array)
    assert wrapped.is_managed
    assert wrapped.last_prefetch_location is Host()
    wrapped.fill(3)
    assert contents(wrapped) == b"\x03" * 64 * PAGE


# Devices

LOCATIONS = {
    "torch cuda:0": (lambda: host_torch().device("cuda", 0), "device"),
    "torch cuda": (lambda: host_torch().device("cuda"), "device"),
    "torch cpu": (lambda: host_torch().device("cpu"), "host"),
    "cupy": (lambda: libraries.cupy().cuda.Device(0), "device"),
    "numba gpus[0]": (lambda: libraries.numba_cuda().gpus[0], "device"),
    "numba current": (lambda: libraries.numba_cuda().get_current_device(), "device"),
    "cuda.core Device": (lambda: libraries.cuda_core().Device(0), "device"),
    "cuda.core Host": (lambda: libraries.cuda_core().Host(), "host"),
    "jax gpu": (lambda: libraries.jax().devices()[0], "device"),
    "jax cpu": (lambda: libraries.need("jax").devices("cpu")[0], "host"),
}


@pytest.mark.parametrize(("make", "expected"), LOCATIONS.values(), ids=LOCATIONS)
class TestLocations:
    @pytest.fixture
    def where(self, make):
        return make()

    @pytest.fixture
    def here(self, expected, device0):
        return device0 if expected == "device" else Host()

    def test_of_prefetches(self, where, here, buf):
        calls = (
            lambda: buf.prefetch(where),
            lambda: buf.discard_prefetch(where),
            lambda: managedmem.prefetch(buf, where),
            lambda: managedmem.prefetch([buf[:PAGE], buf[PAGE:]], [where, where]),
            lambda: managedmem.discard_prefetch(buf, where),
        )
        away = Host() if here is not Host() else managedmem.Device(0)
        for call in calls:
            buf.prefetch(away)
            call()
            assert buf.last_prefetch_location is here

    def test_of_advice(self, where, here, buf):
        buf.preferred_location = where
        assert buf.preferred_location is here
        managedmem.advise(buf, "unset_preferred_location")
        managedmem.advise(buf, "set_preferred_location", where)
        assert buf.preferred_location is here

    def test_of_accessed_by(self, where, here, buf):
        buf.accessed_by.add(where)
        assert buf.accessed_by == {here}
        assert where in buf.accessed_by
        buf.accessed_by.discard(where)
        assert buf.accessed_by == set()
        buf.accessed_by = [where]
        managedmem.advise(buf, "unset_accessed_by", where)
        assert buf.accessed_by == set()


def test_a_device_that_is_not_there(buf):
    torch = host_torch()
    with pytest.raises(ValueError, match="no device 99"):
        buf.prefetch(torch.device("cuda", 99))
    with pytest.raises(TypeError, match="Device or Host"):
        buf.prefetch(torch.device("meta"))


def test_the_second_device_of_each_library(buf, device0, device1):
    for second in (
        libraries.torch().device("cuda", 1),
        libraries.cupy().cuda.Device(1),
        libraries.numba_cuda().gpus[1],
        libraries.cuda_core().Device(1),
        libraries.jax().devices()[1],
    ):
        device0.set_current()  # a library that starts can leave another one
        buf.prefetch(Host())
        buf.prefetch(second)
        assert buf.last_prefetch_location is device1
        assert managedmem.Device() is device0


# Streams

STREAM_USES = {
    "prefetch": lambda b, s: b.prefetch(managedmem.Device(0), stream=s),
    "deferred prefetch": lambda b, s: b.prefetch(Host(), stream=s, defer=True),
    "discard": lambda b, s: b.discard(stream=s),
    "discard_prefetch": lambda b, s: b.discard_prefetch(managedmem.Device(0), stream=s),
    "fill": lambda b, s: b.fill(1, stream=s),
    "copy_from": lambda b, s: b[:PAGE].copy_from(b[PAGE : 2 * PAGE], stream=s),
    "copy_to": lambda b, s: b.copy_to(stream=s).close(s),
    "function prefetch": lambda b, s: managedmem.prefetch(
        [b[:PAGE], b[2 * PAGE :]], Host(), stream=s, dispatch="batch"
    ),
    "function discard": lambda b, s: managedmem.discard([b], stream=s),
    "function discard_prefetch": lambda b, s: managedmem.discard_prefetch(b, Host(), stream=s),
    "allocate": lambda b, s: b.memory_resource.allocate(PAGE, stream=s).close(s),
}


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("use", STREAM_USES.values(), ids=STREAM_USES)
def test_streams(make, use, buf, device0):
    given = make()
    use(buf, given)
    device0.sync()
    buf.discard_prefetch(device0, stream=given)
    buf.fill(4, stream=given)
    assert contents(buf) == b"\x04" * buf.size


def test_torch_s_current_stream(buf, device0):
    torch = libraries.torch()
    for block in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(block):
            buf.discard_prefetch(device0, stream=torch.cuda.current_stream())
            buf.fill(6, stream=torch.cuda.current_stream())
        assert contents(buf) == b"\x06" * buf.size


# What is refused


def cupy_plain():
    cupy = libraries.cupy()
    return cupy.ndarray(64 * PAGE, cupy.uint8, cupy.cuda.alloc(64 * PAGE))


PLAIN = {
    "torch": lambda: libraries.torch().ones(64 * PAGE, dtype=host_torch().uint8, device="cuda"),
    "torch parameter": lambda: libraries.torch().nn.Linear(64, 64, device="cuda").weight,
    "cupy": cupy_plain,
    "numba": lambda: libraries.numba_cuda().device_array(64 * PAGE, "u1"),
    "cuda.core": lambda: (
        libraries.cuda_core()
        .Device(0)
        .allocate(64 * PAGE, stream=libraries.cuda_core().Device(0).default_stream)
    ),
    "jax": lambda: libraries.jax().numpy.ones(64 * PAGE, "u1"),
}
REFUSED_USES = {
    "advise": lambda t: managedmem.advise(t, "set_read_mostly"),
    "prefetch": lambda t: managedmem.prefetch(t, managedmem.Device(0)),
    "prefetch on the host": lambda t: managedmem.prefetch(t, Host(), defer=True),
    "discard": managedmem.discard,
    "discard_prefetch": lambda t: managedmem.discard_prefetch(t, Host(), dispatch="batch"),
}
refused_uses = pytest.mark.parametrize("use", REFUSED_USES.values(), ids=REFUSED_USES)


def torch_works():
    """torch picks up no error that somebody else left behind."""
    torch = libraries.torch()
    assert torch.ones(1024, device="cuda").sum().item() == 1024
    torch.cuda.synchronize()


@refused_uses
@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_plain_device_memory(make, use, buf):
    plain = make()
    for targets in (plain, [buf, plain]):
        # JAX's arrays are constant, which is noticed first.
        with pytest.raises(ValueError, match=r"managed-memory|is read-only"):
            use(targets)
    assert buf.read_mostly is False
    assert buf.last_prefetch_location is None
    torch_works()


@refused_uses
class TestTensorsWithoutManagedMemory:
    def test_a_plain_cpu_tensor(self, use, device0):
        if device0.pageable_memory_access:
            pytest.skip("this machine can take system memory")
        with pytest.raises(ValueError, match="managed-memory"):
            use(host_torch().ones(64 * PAGE))

    def test_a_sparse_tensor(self, use):
        with pytest.raises((TypeError, ValueError), match="sparse"):
            use(host_torch().eye(64).to_sparse())

    def test_a_meta_tensor(self, use):
        with pytest.raises((TypeError, ValueError), match="meta"):
            use(host_torch().ones(64 * PAGE, device="meta"))

    def test_nothing_is_done_for_an_empty_tensor(self, use):
        use(host_torch().ones(0))

    def test_a_list_names_the_one(self, use, buf):
        with pytest.raises((TypeError, ValueError), match=r"targets\[1\]"):
            use([buf, host_torch().ones(64 * PAGE, device="meta")])
        assert buf.last_prefetch_location is None


BEHIND = {
    "torch": on_gpu,
    "cupy": lambda b: libraries.cupy().asarray(b),
    "numba": lambda b: libraries.numba_cuda().as_cuda_array(b),
    "cuda.core": lambda b: libraries.cuda_core().ManagedBuffer.from_handle(
        b.handle, b.size, owner=b
    ),
}


@refused_uses
@pytest.mark.parametrize("make", BEHIND.values(), ids=BEHIND)
def test_a_closed_buffer_behind_a_live_array(make, use):
    buffer = managedmem.empty(64 * PAGE)
    array = make(buffer)
    buffer.close()
    with pytest.raises(ValueError, match="managed-memory"):
        use(array)
    torch_works()
    del array
    gc.collect()


class TestAFailedCallLeavesTorchUsable:
    """The driver keeps some errors until somebody asks; none of ours may reach torch."""

    def test_a_graph_capture(self, buf, stream):
        libraries.torch()
        with capturing(stream):
            for call in (
                lambda: buf.prefetch(Host(), stream=stream),
                lambda: managedmem.discard(buf, stream=stream),
                lambda: managedmem.discard_prefetch([buf], Host(), stream=stream, defer=True),
            ):
                with pytest.raises(managedmem.CUDAError, match="captur"):
                    call()
        torch_works()

    def test_out_of_memory(self):
        libraries.torch()
        with pytest.raises(managedmem.CUDAOutOfMemoryError):
            managedmem.empty(1 << 50)
        torch_works()

    def test_bad_arguments(self, buf, alloc):
        torch = libraries.torch()
        small = torch.as_tensor(alloc(PAGE), device="cuda")[: PAGE // 2]
        for call in (
            lambda: managedmem.discard(small),
            lambda: managedmem.prefetch(small, torch.device("cuda", 99)),
            lambda: managedmem.prefetch([small, 7], Host()),
            lambda: managedmem.prefetch(small, Host(), stream="default"),
            lambda: buf.copy_from(small),
            lambda: ManagedBuffer.from_handle(small.data_ptr(), 1 << 30).prefetch(Host()),
        ):
            with pytest.raises((TypeError, ValueError)):
                call()
            torch_works()
