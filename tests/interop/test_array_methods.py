"""`buf.torch()` and `buf.cupy()`: the same memory as an array of that library, ready to be used.

Tests that need a GPU are in test_library_exports. Here torch works on the CPU, over memory of the
emulated driver or of a GPU; other tests check the errors without a library or a GPU.
"""

import gc
import weakref

import pytest

import managedmem
from constants import EMULATED, MIB, PAGE
from contents import contents, pattern, write
from driver import CAPTURE_RELAXED, capturing, device_memory
from managedmem import Device, DeviceMemoryResource, Host, ManagedBuffer, emulator
from programs import run_python

DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="needs torch")


class TestTorchOnTheCpu:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(), (6,), (2, 3), (0,), (0, 3), (3, 0)], ids=repr)
    def test_has_the_dtype_and_shape(self, torch, dtype, shape):
        with managedmem.empty(shape, dtype) as buffer:
            tensor = buffer.torch("cpu")
            assert tensor.dtype == getattr(torch, dtype)
            assert (tuple(tensor.shape), tensor.device) == (shape, torch.device("cpu"))
            assert tensor.is_contiguous()
            del tensor
            gc.collect()

    def test_is_the_memory_itself(self, torch, alloc):
        buffer = alloc(4096).view("float32", (4, 16, 16))
        write(buffer, 0)
        tensor = buffer[1:3].torch("cpu")
        assert tensor.data_ptr() == buffer[1].handle
        tensor.fill_(2.5)
        assert contents(buffer) == bytes(1024) + b"\x00\x00\x20\x40" * 512 + bytes(1024)

    @pytest.mark.parametrize("device", ["cpu", Host(), "torch.device"], ids=repr)
    def test_each_form_of_device(self, torch, alloc, device):
        buffer = alloc(PAGE)
        device = torch.device("cpu") if device == "torch.device" else device
        assert buffer.torch(device).data_ptr() == buffer.handle
        assert buffer.torch(device=device).device.type == "cpu"

    @pytest.mark.emulator_only
    def test_is_the_default_with_the_emulated_driver(self, torch, alloc):
        assert alloc(PAGE).torch().device == torch.device("cpu")

    def test_counts_as_an_export_and_keeps_the_memory(self, torch):
        buffer = managedmem.empty(PAGE)
        gone = weakref.ref(buffer)
        part = buffer.torch("cpu")[10:20]
        with pytest.raises(BufferError):
            buffer.close()
        buffer.fill(7)
        Device().sync()
        del buffer
        gc.collect()
        assert gone() is None
        assert part.tolist() == [7] * 10

    @pytest.mark.parametrize("own", [False, True], ids=["default", "own stream"])
    def test_comes_after_the_stream_and_brings_the_pages(self, torch, alloc, device0, stream, own):
        if EMULATED:
            emulator.schedule("lazy")
        chosen = stream if own else None
        buffer = alloc(4 * MIB)
        for value in range(1, 4):
            buffer.prefetch(device0, stream=chosen)
            buffer.fill(value, stream=chosen)
            assert (buffer.torch("cpu", stream=chosen) == value).all()
            assert buffer.last_prefetch_location is Host()
        gc.collect()

    def test_bfloat16_through_an_integer(self, torch, alloc):
        buffer = alloc(PAGE)
        tensor = buffer.view("int16").torch("cpu").view(torch.bfloat16)
        tensor.fill_(1.5)
        assert contents(buffer) == b"\xc0\x3f" * (PAGE // 2)

    def test_asarray_loses_the_shape_and_before_2_15_the_dtype(self, torch, alloc):
        """The documentation describes both; this test fails once torch keeps them."""
        version = tuple(int(part) for part in torch.__version__.split(".")[:2])
        buffer = alloc(16).view("int32", (2, 2))
        write(buffer, b"\x01\0\0\0" * 4)
        tensor = torch.asarray(buffer)
        assert tensor.shape == (4,)
        assert tensor.dtype == (torch.float32 if version < (2, 15) else torch.int32)
        assert (tensor.tolist() == [1] * 4) == (version >= (2, 15))
        assert buffer.torch("cpu").tolist() == [[1, 1], [1, 1]]
        del tensor
        gc.collect()

    def test_of_a_subclass_and_of_wrapped_memory(self, torch, buf):
        class Mine(ManagedBuffer):
            pass

        write(buf, pattern(buf.size))
        wrapped = Mine.from_handle(buf.handle, buf.size, owner=buf)
        assert bytes(wrapped.torch("cpu").numpy()) == pattern(buf.size)

    def test_of_host_memory_that_is_not_managed(self, torch):
        memory = bytearray(pattern(PAGE))
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        tensor = ManagedBuffer.from_handle(address, PAGE, owner=memory).torch("cpu")
        assert bytes(tensor.tolist()) == pattern(PAGE)
        tensor[0] = 9
        assert memory[0] == 9


class TestRefused:
    def test_a_closed_buffer(self, torch, alloc):
        buffer = alloc(PAGE)
        buffer.close()
        for call in (buffer.torch, lambda: buffer.torch("cpu"), buffer.cupy):
            with pytest.raises(RuntimeError, match="closed"):
                call()

    def test_another_kind_of_device(self, torch, alloc):
        with pytest.raises(ValueError, match="CUDA device or the CPU, got meta"):
            alloc(PAGE).torch("meta")

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, Device(0)], ids=repr)
    def test_memory_of_the_emulated_driver_on_a_gpu(self, torch, alloc, device):
        buffer = alloc(PAGE)
        with pytest.raises(RuntimeError, match="emulated driver"):
            buffer.torch(device)
        buffer.close()

    @pytest.mark.parametrize("bad", ["default", 1.5, Host()], ids=repr)
    def test_an_object_that_is_not_a_stream(self, torch, buf, device0, bad):
        buf.prefetch(device0)
        with pytest.raises(TypeError, match="stream"):
            buf.torch("cpu", stream=bad)
        assert buf.last_prefetch_location is device0

    def test_arguments(self, torch, buf):
        for call in (
            lambda: buf.torch("cpu", None),
            lambda: buf.torch(dtype="f4"),
            lambda: buf.cupy(None),
            lambda: buf.cupy(device=0),
        ):
            with pytest.raises(TypeError, match=r"torch\(\)|cupy\(\)"):
                call()

    def test_memory_of_a_device_on_the_cpu(self, torch):
        with DeviceMemoryResource(Device(0)) as resource, resource.allocate(PAGE) as buffer:
            with pytest.raises(ValueError, match="plain device memory"):
                buffer.torch("cpu")

    def test_wrapped_memory_that_is_not_managed(self, torch):
        with device_memory(PAGE) as pointer:
            wrapped = ManagedBuffer.from_handle(pointer, PAGE)
            with pytest.raises((ValueError, BufferError)):
                wrapped.torch("cpu")

    def test_a_capturing_stream_and_the_capture_survives(self, torch, alloc, stream):
        buffer = alloc(PAGE)
        with capturing(stream, CAPTURE_RELAXED) as capture:
            with pytest.raises(managedmem.CUDAError, match="captur"):
                buffer.torch("cpu", stream=stream)
        assert capture.result == 0
        buffer.close()

    @pytest.mark.parametrize(
        ("name", "advice"), [("torch", "pip install torch"), ("cupy", "cupy-")]
    )
    def test_without_the_library(self, name, advice):
        run_python(f"""
            import sys
            import managedmem as mm
            sys.modules[{name!r}] = None
            with mm.empty(4096) as buf:
                try:
                    buf.{name}()
                except ImportError as error:
                    assert {advice!r} in str(error) and error.name == {name!r}, error
                else:
                    raise AssertionError("accepted")
                assert buf.last_prefetch_location is None
        """)

    def test_an_import_error_inside_the_library_is_passed_on(self, tmp_path):
        (tmp_path / "torch.py").write_text("import no_such_part_of_torch")
        run_python(f"""
            import sys
            import managedmem as mm
            from program_checks import refused
            sys.path.insert(0, {str(tmp_path)!r})
            with mm.empty(4096) as buf:
                with refused(ModuleNotFoundError, "'no_such_part_of_torch'"):
                    buf.torch()
        """)

    def test_cupy_with_the_emulated_driver(self, tmp_path):
        (tmp_path / "cupy.py").write_text("")
        run_python(f"""
            import sys
            import managedmem as mm
            from program_checks import refused
            sys.path.insert(0, {str(tmp_path)!r})
            with mm.empty(4096) as buf:
                with refused(RuntimeError, "emulated driver"):
                    buf.cupy()
        """)

    def test_nothing_is_imported_before_the_call(self):
        run_python("""
            import sys
            import managedmem as mm
            with mm.empty(4096) as buf:
                pass
            assert not {"torch", "cupy", "managedmem._arrays"} & set(sys.modules)
        """)


class TestSynchronize:
    """_synchronize(), which buf.torch() and buf.cupy() wait with."""

    def test_waits_for_the_stream_and_moves_nothing(self, buf, device0, stream):
        if EMULATED:
            emulator.schedule("lazy")
        buf.prefetch(device0, stream=stream)
        buf.fill(5, stream=stream)
        managedmem._managedmem._synchronize(buf, stream, False)
        assert stream.query()
        assert buf.last_prefetch_location is device0

    def test_of_a_devices_own_memory(self, stream):
        with DeviceMemoryResource(Device(0)) as resource:
            with resource.allocate(PAGE, stream=stream) as buffer:
                buffer.fill(5, stream=stream)
                managedmem._managedmem._synchronize(buffer, stream, False)
                assert stream.query()

    def test_a_capturing_stream(self, buf, stream):
        with capturing(stream, CAPTURE_RELAXED) as capture:
            with pytest.raises(managedmem.CUDAError, match="captur"):
                managedmem._managedmem._synchronize(buf, stream, False)
        assert capture.result == 0

    @pytest.mark.parametrize("bad", [(1, None, True), (b"", None, False), ()], ids=repr)
    def test_arguments(self, bad):
        with pytest.raises(TypeError):
            managedmem._managedmem._synchronize(*bad)
