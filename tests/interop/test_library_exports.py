"""A buffer in the hands of the other libraries: the same memory, both ways, for as long as needed.

The capsules and dicts that they are given are in test_interop; here the libraries themselves speak.
"""

import contextlib
import gc
import time
from typing import NamedTuple

import pytest

import libraries
import managedmem
from constants import EMULATED, PAGE
from contents import contents, pattern, write
from driver import device_memory
from libraries import CudaCore, CudaCoreView, CuPy, Jax, Numba, NumPy, Torch, is_managed
from managedmem import ManagedBuffer

COUNT = 2 * PAGE


class OnHost:
    """Managed memory as a consumer of CPU memory sees it: DLPack with the device (1, 0)."""

    def __init__(self, buffer):
        self.buffer = buffer

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **arguments):
        return self.buffer.__dlpack__(**(arguments | {"dl_device": (1, 0)}))


class Way(NamedTuple):
    """One way to hand a buffer over.

    counted: close() refuses while the consumer lives. flat: the consumer asks for no shape.
    """

    library: type
    give: object
    counted: bool = False
    flat: bool = False


def host_torch():
    return libraries.need("torch")


def on_host_jax(buffer):
    jax = libraries.need("jax")
    return jax.dlpack.from_dlpack(libraries.numpy().asarray(buffer), device=jax.devices("cpu")[0])


def torch_of(buffer):
    libraries.torch()
    return buffer.torch()


def cupy_of(buffer):
    libraries.cupy()
    return buffer.cupy()


WAYS = {
    "buf.numpy": Way(NumPy, lambda b: libraries.numpy() and b.numpy(), True),
    "buf.torch": Way(Torch, torch_of, True),
    "buf.torch on the CPU": Way(Torch, lambda b: host_torch() and b.torch("cpu"), True),
    "buf.cupy": Way(CuPy, cupy_of, True),
    "numpy.asarray": Way(NumPy, lambda b: libraries.numpy().asarray(b), True),
    "numpy.from_dlpack": Way(NumPy, lambda b: libraries.numpy().from_dlpack(b), True),
    "torch.from_numpy": Way(
        Torch, lambda b: host_torch().from_numpy(libraries.numpy().asarray(b)), True
    ),
    "torch.from_dlpack as CPU memory": Way(
        Torch, lambda b: host_torch().from_dlpack(b.__dlpack__(dl_device=(1, 0))), True
    ),
    "torch.from_dlpack of a versioned CPU tensor": Way(
        Torch, lambda b: host_torch().from_dlpack(OnHost(b)), True
    ),
    "torch.frombuffer": Way(
        Torch, lambda b: host_torch().frombuffer(b, dtype=getattr(host_torch(), b.dtype)), flat=True
    ),
    "torch.as_tensor": Way(Torch, lambda b: libraries.torch().as_tensor(b, device="cuda")),
    "cupy.asarray": Way(CuPy, lambda b: libraries.cupy().asarray(b)),
    "cupy.from_dlpack": Way(CuPy, lambda b: libraries.cupy().from_dlpack(b), True),
    "numba.cuda.as_cuda_array": Way(Numba, lambda b: libraries.numba_cuda().as_cuda_array(b)),
    "cuda.core Buffer": Way(
        CudaCore, lambda b: libraries.cuda_core().Buffer.from_handle(b.handle, b.size, owner=b)
    ),
    "cuda.core ManagedBuffer": Way(
        CudaCore,
        lambda b: libraries.cuda_core().ManagedBuffer.from_handle(b.handle, b.size, owner=b),
    ),
    "cuda.core StridedMemoryView": Way(
        CudaCoreView,
        lambda b: libraries.cuda_core().utils.StridedMemoryView.from_dlpack(b, stream_ptr=-1),
        True,
    ),
    "jax on the CPU": Way(Jax, on_host_jax, True),
    "jax.dlpack of a torch tensor": Way(
        Jax,
        lambda b: libraries.jax().dlpack.from_dlpack(libraries.torch().as_tensor(b, device="cuda")),
    ),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
typed_ways = pytest.mark.parametrize(
    "way", [pytest.param(w, id=n) for n, w in WAYS.items() if not issubclass(w.library, CudaCore)]
)


def new(count=COUNT, dtype="uint8"):
    """A buffer that only the caller holds."""
    return managedmem.empty(count, dtype)


def soon(condition):
    """Whether it comes true; JAX lets go of memory in a thread of its own, a little later."""
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return condition()


def freed(pointer):
    return soon(lambda: not is_managed(pointer))


def closes(buffer):
    with contextlib.suppress(BufferError):
        buffer.close()
    return buffer.is_closed


@ways
class TestEveryWay:
    def test_has_the_same_address(self, way):
        buffer = new()
        assert way.library.pointer(way.give(buffer)) == buffer.handle

    def test_its_writes_are_seen_here(self, way, alloc):
        if way.library.fill is None:
            pytest.skip("this consumer cannot write")
        buffer = alloc(COUNT)
        write(buffer, 1)
        way.library.fill(way.give(buffer), 77)
        assert contents(buffer) == b"\x4d" * COUNT

    def test_writes_here_are_seen_there(self, way, alloc):
        if way.library.read is None:
            pytest.skip("this consumer cannot read")
        buffer = alloc(COUNT)
        write(buffer, 1)
        consumer = way.give(buffer)
        for value in (5, 99):
            buffer.fill(value)
            managedmem.Device().sync()
            assert bytes(way.library.read(consumer)) == bytes([value]) * COUNT
        write(buffer, 7)
        assert bytes(way.library.read(consumer)) == b"\x07" * COUNT

    def test_keeps_the_memory_as_long_as_it_lives(self, way):
        buffer = new()
        pointer = buffer.handle
        write(buffer, 55)
        consumer = way.give(buffer)
        del buffer
        gc.collect()
        assert is_managed(pointer)
        if way.library.read is not None:
            assert bytes(way.library.read(consumer)) == b"\x37" * COUNT
        del consumer
        assert freed(pointer)

    def test_close_refuses_where_the_consumer_is_counted(self, way):
        """Elsewhere closing is allowed and ends the memory under the consumer."""
        buffer = new()
        consumer = way.give(buffer)
        pointer = buffer.handle
        if way.counted:
            with pytest.raises(BufferError):
                buffer.close()
            assert is_managed(pointer)
            del consumer
        assert soon(lambda: closes(buffer))
        assert not is_managed(pointer)

    def test_a_slice_starts_where_it_starts(self, way, buf):
        consumer = way.give(buf[PAGE : 3 * PAGE])
        assert way.library.pointer(consumer) == buf.handle + PAGE
        if way.library.fill is not None:
            way.library.fill(consumer, 9)
            zeros = bytes(PAGE)
            assert contents(buf)[: 4 * PAGE] == zeros + b"\x09" * (2 * PAGE) + zeros

    def test_a_slice_keeps_all_of_the_memory(self, way):
        buffer = new()
        write(buffer, 3)
        pointer = buffer.handle
        consumer = way.give(buffer[PAGE:])
        del buffer
        gc.collect()
        assert is_managed(pointer)
        del consumer
        assert freed(pointer)

    def test_a_closed_buffer_is_not_given_away(self, way):
        buffer = new()
        buffer.close()
        if way.library is CudaCore:
            pytest.skip("cuda.core is given an address by the caller, here 0, and asks nothing")
        with pytest.raises((RuntimeError, TypeError, ValueError, BufferError)):
            way.give(buffer)


@typed_ways
class TestTypedViews:
    def test_shape_and_type_arrive(self, way, alloc):
        buffer = alloc(4096)
        write(buffer, bytes(4096))
        consumer = way.give(buffer.view("float32", (4, 16, 16))[1:3])
        assert tuple(consumer.shape) == ((512,) if way.flat else (2, 16, 16))
        assert str(consumer.dtype).removeprefix("torch.") == "float32"
        assert way.library.pointer(consumer) == buffer.handle + 1024
        if way.library.fill is not None:
            way.library.fill(consumer, 1.5)
            written = b"\x00\x00\xc0\x3f" * 512
            assert contents(buffer) == bytes(1024) + written + bytes(1024)

    @pytest.mark.parametrize(
        "dtype", ["bool", "int8", "uint16", "float16", "int32", "float64", "int64", "complex64"]
    )
    def test_types(self, way, dtype, alloc):
        if way.library is Jax and dtype in ("float64", "int64"):
            pytest.skip("JAX narrows 64-bit types unless jax_enable_x64 is set, which copies")
        buffer = alloc(4096)
        write(buffer, bytes(4096))
        consumer = way.give(buffer.view(dtype))
        assert str(consumer.dtype).removeprefix("torch.") == dtype
        assert way.library.pointer(consumer) == buffer.handle
        if way.library.fill is not None:
            way.library.fill(consumer, 1)
            one = libraries.numpy().ones(4096 // buffer.view(dtype).itemsize, dtype)
            assert contents(buffer) == one.tobytes()


class TestTorchTypesThatNumPyLacks:
    """bfloat16 and fp8 have no letter in the array interface: they travel as integers."""

    @pytest.mark.parametrize("where", ["cpu", "cuda"])
    @pytest.mark.parametrize(
        ("carrier", "name", "one_and_a_half"),
        [
            ("int16", "bfloat16", b"\xc0\x3f"),
            ("uint8", "float8_e4m3fn", b"\x3c"),
            ("uint8", "float8_e5m2", b"\x3e"),
        ],
    )
    def test_as_a_view_of_an_integer(self, alloc, where, carrier, name, one_and_a_half):
        torch = libraries.torch() if where == "cuda" else host_torch()
        buffer = alloc(4096)
        given = buffer.view(carrier)
        whole = torch.as_tensor(libraries.numpy().asarray(given) if where == "cpu" else given)
        tensor = whole.view(getattr(torch, name))
        assert tensor.data_ptr() == buffer.handle
        Torch.fill(tensor, 1.5)
        assert contents(buffer) == one_and_a_half * (4096 // len(one_and_a_half))


class TestByName:
    """buf.torch() and buf.cupy() on a GPU; on the CPU they are in test_arrays."""

    @pytest.mark.parametrize("give", [torch_of, cupy_of])
    @pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (2, 3)], ids=repr)
    @pytest.mark.parametrize("dtype", ["bool", "uint8", "float16", "float32", "complex128"])
    def test_any_shape_and_type(self, give, shape, dtype):
        with managedmem.empty(shape, dtype) as buffer:
            array = give(buffer)
            assert tuple(array.shape) == shape
            assert str(array.dtype).removeprefix("torch.") == dtype
            del array
            gc.collect()

    def test_the_device_is_the_current_one_or_the_one_that_is_asked_for(self, buf):
        torch = libraries.torch()
        assert buf.torch().device == torch.device("cuda", torch.cuda.current_device())
        for device in managedmem.Device.all():
            for name in (device, device.device_id, f"cuda:{device.device_id}"):
                tensor = buf.torch(name)
                assert tensor.device == torch.device("cuda", device.device_id)
                assert tensor.data_ptr() == buf.handle

    def test_cupys_device_is_its_current_one(self, buf):
        cupy = libraries.cupy()
        for device in managedmem.Device.all():
            with cupy.cuda.Device(device.device_id):
                assert buf.cupy().device.id == device.device_id

    @pytest.mark.parametrize("give", [torch_of, cupy_of])
    def test_of_a_devices_own_memory(self, give):
        library = Torch if give is torch_of else CuPy
        with managedmem.DeviceMemoryResource(managedmem.Device(0)) as resource:
            with resource.allocate(COUNT) as buffer:
                array = give(buffer)
                assert library.pointer(array) == buffer.handle
                library.fill(array, 3)
                assert bytes(library.read(array)) == b"\x03" * COUNT
                del array
                gc.collect()

    @pytest.mark.parametrize(
        "give", [lambda b, s: b.torch(stream=s), lambda b, s: b.cupy(stream=s)]
    )
    def test_a_stream_is_waited_for(self, give, buf, stream):
        libraries.torch(), libraries.cupy()
        for value in range(1, 20):
            buf.fill(value, stream=stream)
            assert (give(buf, stream) == value).all()

    def test_work_on_the_default_stream_comes_first(self, buf):
        torch = libraries.torch()
        with torch.cuda.stream(torch.cuda.Stream()):
            for value in range(1, 20):
                buf.fill(value)
                assert (buf.torch() == value).all()

    def test_torch_takes_it_from_dlpack_when_asked_for_a_gpu(self, buf):
        torch = libraries.torch()
        tensor = torch.from_dlpack(buf.__dlpack__(dl_device=(2, 0)))
        assert (tensor.data_ptr(), tensor.device) == (buf.handle, torch.device("cuda:0"))


class TestTorch:
    def test_from_dlpack_refuses_managed_memory(self, alloc):
        """torch knows no such device; nothing here may call it plain device memory instead."""
        buffer = alloc(PAGE)
        with pytest.raises(BufferError, match="Unsupported device_type: 13"):
            host_torch().from_dlpack(buffer)
        gc.collect()
        buffer.close()
        assert buffer.is_closed

    def test_from_dlpack_to_the_cpu_depends_on_the_version(self, alloc):
        """Some versions ask us for CPU memory, others ask for the device and give up."""
        buffer = alloc(PAGE)
        try:
            tensor = host_torch().from_dlpack(buffer, device="cpu")
        except BufferError as error:
            assert "Unsupported device_type: 13" in str(error)
        else:
            assert tensor.data_ptr() == buffer.handle

    def test_another_device_is_a_copy(self, alloc):
        torch = libraries.torch()
        buffer = alloc(PAGE)
        write(buffer, 4)
        tensor = torch.as_tensor(buffer, device="cpu")
        assert tensor.data_ptr() != buffer.handle
        tensor.fill_(9)
        assert contents(buffer) == b"\x04" * PAGE

    def test_the_device_is_the_one_that_is_asked_for(self, device1, current_device):
        """Managed memory is every device's, whichever was current when it was allocated."""
        torch = libraries.torch()
        device1.set_current()
        with new() as buffer:
            current_device.set_current()
            assert buffer.device_id == 1
            for name in ("cuda:0", "cuda:1"):
                tensor = torch.as_tensor(buffer, device=name)
                assert tensor.data_ptr() == buffer.handle
                assert tensor.device == torch.device(name)

    def test_a_parameter_over_a_buffer_trains(self, alloc):
        torch = libraries.torch()
        buffer = alloc(4096)
        parameter = torch.nn.Parameter(torch.as_tensor(buffer.view("float32"), device="cuda"))
        with torch.no_grad():
            parameter.fill_(1.0)
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        parameter.sum().backward()
        optimizer.step()
        assert parameter.data_ptr() == buffer.handle
        assert contents(buffer) == b"\x00\x00\x00\x3f" * 1024


class TestCudaCore:
    @pytest.fixture
    def core_buffer(self):
        core = libraries.cuda_core()
        device = core.Device(0)
        stream = device.create_stream()
        buffer = core.ManagedMemoryResource().allocate(COUNT, stream=stream)
        stream.sync()
        yield buffer
        buffer.close(stream)
        stream.sync()

    def test_its_buffers_become_ours(self, core_buffer):
        ours = ManagedBuffer.from_handle(core_buffer.handle, core_buffer.size, owner=core_buffer)
        assert (ours.handle, ours.size) == (int(core_buffer.handle), core_buffer.size)
        assert ours.owner is core_buffer
        assert ours.is_managed
        write(ours, 8)
        assert bytes(CudaCore.read(core_buffer)) == b"\x08" * COUNT
        CudaCore.fill(core_buffer, 9)
        assert contents(ours) == b"\x09" * COUNT

    def test_its_advice_and_ours_are_one(self, alloc):
        core = libraries.cuda_core()
        buffer = alloc(COUNT)
        theirs = core.ManagedBuffer.from_handle(buffer.handle, buffer.size, owner=buffer)
        theirs.read_mostly = True
        assert buffer.read_mostly is True
        buffer.preferred_location = managedmem.Host()
        assert theirs.preferred_location == core.Host()
        theirs.accessed_by.add(core.Device(0))
        assert buffer.accessed_by == {managedmem.Device(0)}


class TestJax:
    """JAX knows no managed memory in DLPack; the array interface it takes, but keeps nobody."""

    @pytest.mark.parametrize(
        "call",
        [
            lambda jax, b: jax.dlpack.from_dlpack(b),
            lambda jax, b: jax.numpy.from_dlpack(b),
            lambda jax, b: jax.numpy.from_dlpack(b, copy=True),
            lambda jax, b: jax.numpy.from_dlpack(b, device=jax.devices("cpu")[0]),
        ],
        ids=["jax.dlpack", "jax.numpy", "copy", "device=cpu"],
    )
    def test_dlpack_is_refused(self, alloc, call):
        jax = libraries.need("jax")
        buffer = alloc(PAGE)
        with pytest.raises(TypeError, match=r"unsupported device type \(DLDeviceType: 13"):
            call(jax, buffer)
        gc.collect()
        buffer.close()
        assert buffer.is_closed

    def test_cupy_arrays_of_it_are_refused_as_well(self, alloc):
        jax, array = libraries.jax(), libraries.cupy().asarray(alloc(PAGE))
        with pytest.raises(TypeError, match=r"unsupported device type \(DLDeviceType: 13"):
            jax.dlpack.from_dlpack(array)

    def test_asarray_takes_the_array_interface(self, alloc):
        jax = libraries.jax()
        buffer = alloc(4096)
        buffer.fill(b"\x00\x00\x80\x3f")
        managedmem.Device().sync()
        array = jax.numpy.asarray(buffer.view("float32"))
        assert array.unsafe_buffer_pointer() == buffer.handle
        assert Jax.read(array).tolist() == [1.0] * 1024

    def test_asarray_keeps_nothing_alive(self):
        """The documentation tells users to hold the buffer; this fails once JAX does it itself."""
        jax = libraries.jax()
        buffer = new()
        pointer = buffer.handle
        array = jax.numpy.asarray(buffer)
        del buffer
        gc.collect()
        assert not is_managed(pointer)
        del array

    def test_array_copies(self, alloc):
        jax = libraries.jax()
        buffer = alloc(PAGE)
        write(buffer, 6)
        array = jax.numpy.array(buffer)
        assert array.unsafe_buffer_pointer() != buffer.handle
        assert bytes(Jax.read(array)) == b"\x06" * PAGE

    def test_asarray_of_a_host_view_copies_to_the_gpu(self, alloc):
        jax = libraries.jax()
        buffer = alloc(PAGE)
        write(buffer, 6)
        array = jax.numpy.asarray(libraries.numpy().asarray(buffer))
        assert array.unsafe_buffer_pointer() != buffer.handle
        assert bytes(Jax.read(array)) == b"\x06" * PAGE

    def test_device_put_does_not_know_buffers(self, alloc):
        jax = libraries.need("jax")
        with pytest.raises(TypeError, match="not a valid JAX type"):
            jax.device_put(alloc(PAGE))


class TestNumPyDlpack:
    """What NumPy asks for beyond the defaults."""

    @pytest.mark.parametrize("copy", [None, False])
    def test_as_cpu_memory_without_a_copy(self, alloc, copy):
        buffer = alloc(4096)
        array = libraries.numpy().from_dlpack(buffer.view("int32"), device="cpu", copy=copy)
        assert array.ctypes.data == buffer.handle
        array[:] = 5
        assert contents(buffer) == array.tobytes()

    def test_a_copy_is_its_own_memory(self, alloc):
        buffer = alloc(4096)
        write(buffer, pattern(4096))
        array = libraries.numpy().from_dlpack(buffer, copy=True)
        buffer.close()
        assert array.tobytes() == pattern(4096)

    def test_plain_device_memory_never_passes_for_managed(self):
        numpy = libraries.numpy()
        with device_memory(PAGE) as pointer:
            wrapped = ManagedBuffer.from_handle(pointer, PAGE)
            with pytest.raises((BufferError, RuntimeError)):  # by its version
                numpy.from_dlpack(wrapped)
            with pytest.raises(BufferError, match="plain device memory"):
                numpy.asarray(wrapped)


class TestOwners:
    def test_a_tensor_lives_as_long_as_the_buffer_over_it(self):
        torch = host_torch() if EMULATED else libraries.torch()
        storage = new()
        pointer = storage.handle
        tensor = (
            torch.from_numpy(libraries.numpy().asarray(storage))
            if EMULATED
            else torch.as_tensor(storage, device="cuda")
        )
        nbytes = tensor.numel() * tensor.element_size()
        buffer = ManagedBuffer.from_handle(tensor.data_ptr(), nbytes, owner=tensor)
        del storage, tensor
        gc.collect()
        assert is_managed(pointer)
        write(buffer, 3)
        assert contents(buffer) == b"\x03" * COUNT
        buffer.close()
        del buffer
        assert freed(pointer)
