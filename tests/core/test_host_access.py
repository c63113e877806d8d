"""Wrapped memory that the host may not read, and memory that nobody may write.

Reading a wrong address ends the process, so tests with one run in a process of their own.
"""

import contextlib
import copy
import ctypes
import gc
import mmap
import sys
from types import SimpleNamespace

import pytest

import managedmem
from constants import EMULATED, PAGE
from contents import contents
from dlpack import capsule_struct
from driver import device_memory, managed_memory, pinned_memory, raw_driver
from foreign_objects import CudaArray
from managedmem import Device, DeviceMemoryResource, Host, ManagedBuffer, PrefetchPlan, emulator
from programs import run_python

DRIVER = "emulator" if EMULATED else "cuda"
READ_ONLY = 1

PRELUDE = """
import ctypes, copy
import managedmem as mm
from managedmem import ManagedBuffer

from outcomes import refusal as refused

def views(buffer):
    acts = [memoryview, bytes, lambda b: b.__dlpack__(), lambda b: b.__dlpack__(dl_device=(1, 0))]
    acts += [lambda b: bytes(b[1:9]), lambda b: bytes(b.view("int16")), ctypes.c_char.from_buffer]
    try:
        import numpy
    except ModuleNotFoundError:
        pass
    else:
        acts += [numpy.asarray, numpy.array, numpy.from_dlpack, lambda b: b.__array__()]
    return [lambda act=act: act(buffer) for act in acts]

own = mm.empty(4096)
copies = [own.copy_from, own.copy_to, lambda b: b.copy_from(own), lambda b: b.copy_to(own)]
copies += [lambda b: b.copy_to(), copy.copy, copy.deepcopy, lambda b: b.fill(1)]
"""


def run(code, **options):
    return run_python(PRELUDE + code, driver=DRIVER, **options)


def wrap(memory, **more):
    """A buffer over the memory of an object with the buffer protocol."""
    view = memoryview(memory)
    array = (ctypes.c_char * view.nbytes).from_buffer(memory)
    return ManagedBuffer.from_handle(ctypes.addressof(array), view.nbytes, **more)


class TestAnAddressThatNobodyVouchesFor:
    @pytest.mark.parametrize("address", [8, 4096, (1 << 47) - 8192, (1 << 64) - 8192], ids=hex)
    def test_is_not_shown_to_the_host(self, address):
        run(f"""
buffer = ManagedBuffer.from_handle({address}, 4096)
assert buffer.is_host_accessible is False
for view in views(buffer):
    assert "is_host_accessible=True" in refused(BufferError, view)
assert "is_host_accessible=True" in refused(BufferError, buffer.numpy)
assert buffer.is_closed is False
buffer.close()
""")

    @pytest.mark.parametrize("emulated", ["", "pageable=1"])
    def test_is_not_copied(self, emulated):
        run(
            """
buffer = ManagedBuffer.from_handle(8, 4096)
for act in copies:
    assert "does not know it" in refused(ValueError, lambda: act(buffer))
assert bytes(own) == bytes(4096)
from foreign_objects import CudaArray, foreign
bad = foreign("cuda.core", "Buffer", handle=8, size=4096)
for other in (bad, CudaArray(own, pointer=8, shape=(4096,))):
    for act in (own.copy_from, own.copy_to):
        assert "does not know it" in refused(ValueError, lambda: act(other))
""",
            emulator=emulated or None,
        )

    def test_of_memory_that_was_freed(self):
        run("""
buffer = mm.empty(4096)
wrapped = ManagedBuffer.from_handle(buffer.handle, 4096)
assert wrapped.is_host_accessible is True
buffer.close()
for view in views(wrapped):
    refused(BufferError, view)
""")

    def test_of_nothing(self):
        assert bytes(ManagedBuffer.from_handle(8, 0)) == b""
        assert bytes(ManagedBuffer.from_handle(8, 4096)[3:3]) == b""


class TestTheCaller:
    def test_says_that_the_host_can_read_it(self):
        memory = bytearray(b"abc" * PAGE)
        buffer = wrap(memory, is_host_accessible=True)
        assert buffer.is_host_accessible is True
        assert bytes(buffer[:3]) == b"abc"
        with memoryview(buffer) as view:
            view[1] = ord("x")
        assert memory[:3] == b"axc"
        with managedmem.empty(buffer.size) as own:
            own.copy_from(buffer)
            assert bytes(own[:3]) == b"axc"
        capsule = buffer.__dlpack__()
        assert capsule_struct(capsule).tensor.data == buffer.handle

    def test_says_that_it_cannot(self):
        with managedmem.empty(PAGE) as own:
            buffer = ManagedBuffer.from_handle(own.handle, PAGE, is_host_accessible=False)
            assert buffer.is_host_accessible is False and buffer.is_managed is True
            with pytest.raises(BufferError, match="is_host_accessible=False"):
                memoryview(buffer[:8])
            buffer.prefetch(Host())
            buffer.fill(3)
            assert buffer.__dlpack_device__() == (13, 0)
            with pytest.raises(BufferError, match="is_host_accessible=False"):
                buffer.__dlpack__(dl_device=(1, 0))

    def test_says_that_it_cannot_of_pinned_memory(self):
        with pinned_memory() as pointer:
            buffer = ManagedBuffer.from_handle(pointer, PAGE, is_host_accessible=False)
            for act in (memoryview, lambda b: b.__dlpack__()):
                with pytest.raises(BufferError, match="is_host_accessible=False"):
                    act(buffer)

    def test_cannot_make_device_memory_readable(self):
        with device_memory() as pointer:
            buffer = ManagedBuffer.from_handle(pointer, PAGE, is_host_accessible=True)
            assert buffer.is_host_accessible is False
            with pytest.raises(BufferError, match=r"plain device memory; copy_from"):
                memoryview(buffer)

    def test_memory_of_a_device_pool_is_read_by_a_copy(self):
        with DeviceMemoryResource(0) as resource, resource.allocate(PAGE) as buffer:
            with pytest.raises(
                BufferError, match=r"device memory; buf\.copy_to\(array\) reads it$"
            ):
                memoryview(buffer)
            buffer.fill(3)
            copy = bytearray(PAGE)
            buffer.copy_to(copy)
            Device().sync()
            assert copy == bytes([3]) * PAGE

    @pytest.mark.parametrize("bad", [1, 0, "yes", "", 1.0], ids=repr)
    def test_says_so_with_a_bool(self, bad):
        with pytest.raises(TypeError, match="is_host_accessible"):
            ManagedBuffer.from_handle(8, 4096, is_host_accessible=bad)

    def test_may_say_nothing_and_only_by_name(self):
        assert ManagedBuffer.from_handle(8, 1, is_host_accessible=None).is_host_accessible is False
        with pytest.raises(TypeError, match="is_host_accessible="):
            ManagedBuffer.from_handle(8, 1, None, None, True)

    def test_is_heard_by_views_and_with_a_resource(self):
        memory = bytearray(PAGE)
        buffer = wrap(memory, mr=Resource(False), is_host_accessible=True)
        assert bytes(buffer[4:8].view("int32")) == bytes(4)
        buffer.close()


OWNERS = {
    "bytearray": lambda: bytearray(b"\1" * PAGE),
    "ctypes array": lambda: (ctypes.c_char * PAGE)(*(b"\1" * PAGE)),
    "mmap": lambda: fill(mmap.mmap(-1, PAGE)),
    "memoryview": lambda: memoryview(bytearray(b"\1" * PAGE)),
    "NumPy array": lambda: pytest.importorskip("numpy").ones(PAGE, "u1"),
    "NumPy array of two axes": lambda: pytest.importorskip("numpy").ones((2, PAGE // 2), "u1"),
}


class Shows:
    """An object whose memory is that of another one; Python 3.12 asks __buffer__."""

    def __init__(self, inner):
        self.inner = inner

    def __buffer__(self, flags):
        return memoryview(self.inner)


def fill(memory):
    memory[:] = b"\1" * PAGE
    return memory


class TestTheOwner:
    @pytest.mark.parametrize("make", OWNERS.values(), ids=OWNERS)
    def test_holds_the_memory(self, make):
        owner = make()
        buffer = wrap(owner, owner=owner)
        assert buffer.is_host_accessible is True
        assert bytes(buffer[8:]) == b"\1" * (PAGE - 8)
        own = managedmem.empty(PAGE)
        own.copy_from(buffer)
        assert bytes(own) == b"\1" * PAGE

    def test_holds_less(self):
        memory = bytearray(PAGE)
        address = wrap(memory).handle
        buffer = ManagedBuffer.from_handle(address, PAGE + 1, owner=memory)
        with pytest.raises(BufferError, match="owner"):
            memoryview(buffer)
        assert bytes(buffer[:PAGE]) == bytes(PAGE), "this part is held"
        with pytest.raises(BufferError, match="owner"):
            memoryview(ManagedBuffer.from_handle(address - 1, 2, owner=memory))

    def test_holds_it_no_more(self):
        memory = memoryview(bytearray(PAGE))
        buffer = wrap(memory, owner=memory)
        assert buffer.is_host_accessible is True
        memory.release()
        assert buffer.is_host_accessible is False
        with pytest.raises(BufferError):
            memoryview(buffer)

    @pytest.mark.parametrize("owner", [object(), "text", 7], ids=["object", "str", "int"])
    def test_holds_no_memory(self, owner):
        memory = bytearray(PAGE)
        with pytest.raises(BufferError, match="the present owner does not show"):
            memoryview(wrap(memory, owner=owner))

    def test_is_a_tensor(self):
        torch = pytest.importorskip("torch", reason="needs torch")
        tensor = torch.full((PAGE,), 7, dtype=torch.uint8)
        buffer = ManagedBuffer.from_handle(tensor.data_ptr(), PAGE, owner=tensor)
        assert bytes(buffer) == b"\7" * PAGE
        del buffer
        short = ManagedBuffer.from_handle(tensor.data_ptr(), PAGE, owner=tensor[: PAGE // 2])
        with pytest.raises(BufferError):
            memoryview(short)

    def test_is_a_buffer(self):
        memory = bytearray(b"\1" * PAGE)
        first = wrap(memory, is_host_accessible=True)
        second = ManagedBuffer.from_handle(first.handle, 8, owner=first)
        assert bytes(second) == b"\1" * 8
        other = ManagedBuffer.from_handle(first.handle, 8, owner=wrap(memory))
        assert other.is_host_accessible is False
        more = ManagedBuffer.from_handle(first.handle + 8, PAGE, owner=first)
        assert more.is_host_accessible is False, "the owner ends before"
        first.close()
        assert second.is_host_accessible is False

    def test_is_a_long_chain_of_buffers(self):
        run("""
buffer = ManagedBuffer.from_handle(8, 8)
for _ in range(100_000):
    buffer = ManagedBuffer.from_handle(8, 8, owner=buffer)
refused(BufferError, lambda: memoryview(buffer))
refused(ValueError, lambda: own[:8].copy_from(buffer))
memory = bytearray(8)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
buffer = ManagedBuffer.from_handle(address, 8, owner=memory)
for _ in range(100_000):
    buffer = ManagedBuffer.from_handle(address, 8, owner=buffer)
assert bytes(buffer) == bytes(8)
""")

    @pytest.mark.skipif(sys.version_info < (3, 12), reason="needs __buffer__")
    def test_is_a_long_chain_of_objects(self):
        memory = bytearray(PAGE)
        address = wrap(memory).handle
        inner = ManagedBuffer.from_handle(address, PAGE, owner=memory)
        for _ in range(3):
            inner = ManagedBuffer.from_handle(address, PAGE, owner=Shows(inner))
        assert bytes(inner) == bytes(PAGE)
        chain = ManagedBuffer.from_handle(address, PAGE, owner=memory)
        with pytest.raises((RecursionError, BufferError)):
            for _ in range(20_000):
                chain = ManagedBuffer.from_handle(address, PAGE, owner=Shows(chain))
            memoryview(chain)

    def test_error_is_passed_on(self):
        class Interrupts(bytearray):
            def __buffer__(self, flags):
                raise KeyboardInterrupt

        memory = bytearray(PAGE)
        try:
            memoryview(Interrupts(1))
        except KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                memoryview(wrap(memory, owner=Interrupts(1)))
        except BufferError:
            pass
        # Python 3.11 has no __buffer__.


class Resource:
    def __init__(self, answer):
        self.answer = answer

    @property
    def is_host_accessible(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def deallocate(self, ptr, size, *, stream):
        pass


class TestTheResource:
    @pytest.mark.parametrize("answer", [True, False])
    def test_says_so(self, answer):
        memory = bytearray(PAGE)
        buffer = wrap(memory, mr=Resource(answer))
        assert buffer.is_host_accessible is answer
        with pytest.raises(BufferError) if not answer else contextlib.nullcontext():
            assert bytes(buffer) == bytes(PAGE)
        buffer.close()

    def test_error_is_passed_on(self):
        memory = bytearray(PAGE)
        buffer = wrap(memory, mr=Resource(LookupError("broken")))
        with pytest.raises(LookupError, match="broken"):
            memoryview(buffer)
        with pytest.raises(LookupError, match="broken"):
            _ = buffer.is_host_accessible
        buffer.close()

    def test_says_nothing(self):
        class Silent:
            def deallocate(self, ptr, size, *, stream):
                pass

        memory = bytearray(PAGE)
        with wrap(memory, mr=Silent()) as buffer, pytest.raises(BufferError):
            memoryview(buffer)


class Closing:
    """A stream whose handle is asked for after the memory was checked."""

    def __init__(self, act):
        self.act = act

    def __cuda_stream__(self):
        self.act()
        return (0, 1)


def tensor_of(buffer, **options):
    pytest.importorskip("numpy", reason="needs NumPy")
    return buffer.__dlpack__(dl_device=(1, 0), **options)


KEEPERS = {
    "memoryview": memoryview,
    "memoryview of a part": lambda b: memoryview(b[8:16]),
    "NumPy": lambda b: pytest.importorskip("numpy").asarray(b),
    "DLPack": tensor_of,
    "versioned DLPack": lambda b: tensor_of(b, max_version=(1, 0)),
    "ctypes": (ctypes.c_char * 8).from_buffer,
}


@pytest.mark.parametrize("keep", KEEPERS.values(), ids=KEEPERS)
class TestWhileAViewLives:
    def test_the_owner_keeps_its_memory(self, keep):
        memory = bytearray(PAGE)
        buffer = wrap(memory, owner=memory)
        view = keep(buffer)
        for shrink in (memory.clear, lambda: memory.extend(bytes(PAGE * 64))):
            with pytest.raises(BufferError, match="export"):
                shrink()
        del view
        gc.collect()
        memory.clear()
        assert buffer.is_host_accessible is False
        with pytest.raises(BufferError):
            memoryview(buffer)

    def test_the_owner_of_the_owner_keeps_its_memory(self, keep):
        memory = bytearray(PAGE)
        outer = wrap(memory, owner=memory)
        buffer = ManagedBuffer.from_handle(outer.handle + 64, 64, owner=outer)
        view = keep(buffer)
        outer.close()
        with pytest.raises(BufferError, match="export"):
            memory.clear()
        del view
        gc.collect()
        memory.clear()

    def test_an_owner_that_is_a_buffer_stays_open(self, keep):
        with managedmem.empty(PAGE) as managed:
            inner = ManagedBuffer.from_handle(managed.handle, PAGE, owner=managed)
            buffer = ManagedBuffer.from_handle(managed.handle + 64, 64, owner=inner)
            view = keep(buffer)
            with pytest.raises(BufferError, match="cannot be closed"):
                managed.close()
            inner.close()
            del view
            gc.collect()

    def test_a_buffer_of_a_resource_stays_open(self, keep):
        memory = bytearray(PAGE)
        lent = wrap(memory, mr=Resource(True))
        view = keep(ManagedBuffer.from_handle(lent.handle, 64, owner=lent))
        with pytest.raises(BufferError, match="cannot be closed"):
            lent.close()
        del view
        gc.collect()
        lent.close()


class TestWhileACopyRuns:
    @pytest.mark.parametrize("into", [False, True], ids=["copy_from", "copy_to"])
    def test_the_owner_keeps_its_memory(self, into):
        memory = bytearray(b"\5" * PAGE)
        buffer = wrap(memory, owner=memory)
        own = managedmem.empty(PAGE)
        stream = Closing(memory.clear)
        with pytest.raises(BufferError, match="export"):
            (own.copy_to if into else own.copy_from)(buffer, stream=stream)
        (own.copy_to if into else own.copy_from)(buffer)
        memory.clear()

    def test_of_wrapped_memory_leaves_nothing_held(self):
        memory = bytearray(PAGE)
        buffer = wrap(memory, owner=memory)
        for act in (
            lambda: buffer.fill(1),
            lambda: buffer.fill(b"123"),
            lambda: buffer.copy_from(object()),
            lambda: managedmem.empty(8).copy_from(buffer),
            lambda: managedmem.empty(PAGE).copy_from(buffer, stream="none"),
        ):
            with contextlib.suppress(Exception):
                act()
        memory.clear()


class TestTheDriver:
    @pytest.mark.parametrize("memory", [managed_memory, pinned_memory])
    def test_knows_where_it_ends(self, memory):
        with contextlib.ExitStack() as stack:
            managed = memory is managed_memory
            pointer = managed_memory() if managed else stack.enter_context(pinned_memory())
            buffer = ManagedBuffer.from_handle(pointer, 1 << 30)
            for view in (memoryview, bytes, lambda b: b.__dlpack__(dl_device=(1, 0))):
                with pytest.raises(BufferError, match="leaves its allocation"):
                    view(buffer)
            assert buffer[:PAGE].is_host_accessible is True
            with managedmem.empty(PAGE) as own:
                own.copy_from(buffer[:PAGE])
                assert contents(own) == bytes(buffer[:PAGE])
            if managed:
                assert raw_driver().cuMemFree_v2(ctypes.c_uint64(pointer)) == 0

    @pytest.mark.emulator_only
    def test_error_is_raised(self):
        buffer = ManagedBuffer.from_handle(8, 8)
        for view in (memoryview, lambda b: b.copy_to(managedmem.empty(8))):
            emulator.fail("cuPointerGetAttributes", code=999)
            with pytest.raises(managedmem.CUDAError, match="cuPointerGetAttributes"):
                view(buffer)


@pytest.fixture
def constant():
    """Memory that its owner shows for reading only, and a buffer over it."""
    numpy = pytest.importorskip("numpy", reason="needs NumPy")
    owner = managedmem.empty(4 * PAGE)
    owner.fill(7)
    array = owner.numpy()
    array.flags.writeable = False
    assert numpy.asarray(array).flags.writeable is False
    buffer = ManagedBuffer.from_handle(array.ctypes.data, array.nbytes, owner=array)
    yield buffer
    buffer.close()


def plan_of(buffer):
    plan = PrefetchPlan()
    plan.add(buffer, Host())
    return plan


WRITERS = {
    "of a buffer whose owner has the array interface": lambda b, o: ManagedBuffer.from_handle(
        b.handle, b.size, owner=CudaArray(b, readonly=True)
    ).fill(1),
    "discard": lambda b, o: b.discard(),
    "discard of a part": lambda b, o: b[PAGE:].discard(),
    "discard_prefetch": lambda b, o: b.discard_prefetch(Host()),
    "fill": lambda b, o: b.fill(1),
    "copy_from": lambda b, o: b.copy_from(o),
    "copy_to": lambda b, o: o.copy_to(b),
    "copy_to a view": lambda b, o: o.copy_to(b.view("int32")),
    "free discard": lambda b, o: managedmem.discard(b),
    "free discard of several": lambda b, o: managedmem.discard([o, b]),
    "free discard_prefetch": lambda b, o: managedmem.discard_prefetch([o, b[PAGE:]], Host()),
    "plan": lambda b, o: plan_of(b).discard_prefetch(),
    "copy of a plan": lambda b, o: copy.copy(plan_of(b)).discard_prefetch(),
    "of a buffer over it": lambda b, o: ManagedBuffer.from_handle(
        b.handle, b.size, owner=b
    ).discard(),
}


FOREIGN = {
    "array interface": lambda b: CudaArray(b, readonly=True),
    "array interface with 1": lambda b: CudaArray(b, readonly=1),
    "array interface of two axes": lambda b: CudaArray(b, shape=(4, PAGE), readonly=True),
    "array interface of JAX": lambda b: CudaArray(b, readonly=True, members={"version": 2}),
    "memoryview": lambda b: memoryview(b).toreadonly(),
    "NumPy array": lambda b: locked(b.numpy()),
    "view of a NumPy array": lambda b: locked(b.numpy())[PAGE:],
    "buffer": lambda b: ManagedBuffer.from_handle(
        b.handle, b.size, owner=memoryview(b).toreadonly()
    ),
}
FOREIGN_WRITERS = {
    "discard": lambda t, o: managedmem.discard(t),
    "discard of several": lambda t, o: managedmem.discard([o, t]),
    "discard in a loop": lambda t, o: managedmem.discard([o, t], dispatch="loop"),
    "discard_prefetch": lambda t, o: managedmem.discard_prefetch(t, Host()),
    "discard_prefetch of several": lambda t, o: managedmem.discard_prefetch([t, o], Host()),
    "copy_to": lambda t, o: o[: memoryview_size(t)].copy_to(t),
    "plan": lambda t, o: plan_of(t).discard_prefetch(),
    "slice of a plan": lambda t, o: plan_of(t)[0:1].discard_prefetch(),
    "plan of a part": lambda t, o: PrefetchPlan([(o, Host()), (t, Host())]).discard_prefetch(),
}


def locked(array):
    array.flags.writeable = False
    return array


def memoryview_size(target):
    if isinstance(target, CudaArray):
        return 4 * PAGE
    return memoryview(target).nbytes


class TestReadOnly:
    @pytest.mark.parametrize("act", FOREIGN_WRITERS.values(), ids=FOREIGN_WRITERS)
    @pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
    def test_of_another_library(self, make, act):
        pytest.importorskip("numpy", reason="needs NumPy")
        own, other = managedmem.empty(4 * PAGE), managedmem.empty(4 * PAGE)
        own.fill(7)
        other.fill(9)
        managedmem.Device().sync()
        with pytest.raises(ValueError, match="read-only"):
            act(make(own), other)
        managedmem.Device().sync()
        assert bytes(own) == b"\7" * own.size
        assert bytes(other) == b"\x09" * other.size

    @pytest.mark.parametrize("act", WRITERS.values(), ids=WRITERS)
    def test_is_neither_written_nor_discarded(self, constant, act):
        other = managedmem.empty(constant.size)
        other.fill(9)
        with pytest.raises(ValueError, match="read-only"):
            act(constant, other)
        managedmem.Device().sync()
        assert bytes(constant) == b"\7" * constant.size
        assert bytes(other) == b"\x09" * other.size

    def test_exports_say_so(self, constant):
        with memoryview(constant) as view:
            assert view.readonly
        assert memoryview(constant[PAGE:].view("f4")).readonly
        assert constant.numpy().flags.writeable is False
        assert constant.__cuda_array_interface__["data"] == (constant.handle, True)
        managed = capsule_struct(capsule := constant.__dlpack__(max_version=(1, 0)))
        assert managed.flags & READ_ONLY
        del capsule
        with pytest.raises(BufferError, match="read-only"):
            constant.__dlpack__()
        with pytest.raises((BufferError, TypeError)):
            (ctypes.c_char * 8).from_buffer(constant)

    def test_a_copy_is_writable(self, constant):
        assert not memoryview(copy.copy(constant)).readonly
        managed = capsule_struct(capsule := constant.__dlpack__(max_version=(1, 0), copy=True))
        assert not managed.flags & READ_ONLY
        assert constant.__dlpack__(copy=True) and capsule

    def test_takes_hints_and_is_read(self, constant):
        constant.read_mostly = True
        constant.prefetch(Host())
        plan_of(constant).execute()
        with constant.copy_to() as other:
            managedmem.Device().sync()
            assert bytes(other) == b"\7" * constant.size

    def test_an_owner_elsewhere_does_not_matter(self):
        with managedmem.empty(PAGE) as own:
            for owner in (b"a token", memoryview(b"another")):
                buffer = ManagedBuffer.from_handle(own.handle, PAGE, owner=owner)
                buffer.fill(1)
                assert not memoryview(buffer).readonly

    def test_array_interface_of_an_owner(self):
        with managedmem.empty(PAGE) as own:
            own.fill(7)
            for readonly in (True, False):
                owner = CudaArray(own, readonly=readonly)
                buffer = ManagedBuffer.from_handle(own.handle, PAGE, owner=owner)
                with (
                    pytest.raises(ValueError, match="read-only")
                    if readonly
                    else (contextlib.nullcontext())
                ):
                    buffer.fill(1)
            owner = CudaArray(own, members={"version": 9}, readonly=True)
            ManagedBuffer.from_handle(own.handle, PAGE, owner=owner).fill(2)

    def test_owners_that_have_other_bytes_only(self):
        """Read-only memory just before and behind that of the buffer, then with one byte of it."""
        with managedmem.empty(3 * PAGE) as own:
            for start, nbytes, is_constant in (
                (0, PAGE, False),
                (2 * PAGE, PAGE, False),
                (0, PAGE + 1, True),
                (2 * PAGE - 1, PAGE, True),
            ):
                owner = CudaArray(own.range(start, nbytes), readonly=True)
                buffer = ManagedBuffer.from_handle(own.handle + PAGE, PAGE, owner=owner)
                assert memoryview(buffer).readonly is is_constant

    def test_a_resource_does_not_allocate_it(self):
        class Constant:
            def allocate(self, size, *, stream=None):
                self.given = bytes(size)
                return self.given

            def deallocate(self, ptr, size, *, stream):
                pass

        resource = Constant()
        with managedmem.empty(PAGE) as own:
            own.fill(7)
            source = ManagedBuffer.from_handle(own.handle, PAGE, mr=resource)
            for act in (source.copy_to, lambda: copy.copy(source)):
                with pytest.raises(TypeError, match="can be written"):
                    act()
                assert resource.given == bytes(PAGE)
            source.close()

    def test_bytes_stay_as_they_are(self):
        constant = b"constant" * PAGE
        address = ctypes.cast(constant, ctypes.c_void_p).value
        buffer = ManagedBuffer.from_handle(address, len(constant), owner=constant)
        with memoryview(buffer) as view, pytest.raises(TypeError, match="read-only"):
            view[0] = 0
        with managedmem.empty(len(constant)) as own, pytest.raises(ValueError, match="read-only"):
            own.copy_to(buffer)
        assert constant == b"constant" * PAGE


class TestRepr:
    """Names the kind of memory that is not managed, but keeps the name of the class."""

    @pytest.mark.parametrize(
        ("memory", "kind"),
        [
            (device_memory, "device memory in ManagedBuffer"),
            (pinned_memory, "pinned host memory in ManagedBuffer"),
        ],
        ids=["device", "pinned"],
    )
    def test_of_wrapped_memory(self, memory, kind):
        with memory(PAGE) as pointer:
            buffer = ManagedBuffer.from_handle(pointer, PAGE)
            assert repr(buffer) == f"<{kind} shape=({PAGE},) dtype=uint8 handle={pointer:#x}>"
            assert repr(buffer[8:]).startswith(f"<{kind} shape=({PAGE - 8},) ")
            buffer.close()
        assert repr(buffer) == f"<ManagedBuffer shape=({PAGE},) dtype=uint8 closed>"

    def test_of_wrapped_managed_memory(self, buf):
        wrapped = ManagedBuffer.from_handle(buf.handle, buf.nbytes, owner=buf)
        assert repr(wrapped) == repr(buf)
        assert repr(buf).startswith("<ManagedBuffer shape=")

    def test_of_system_memory(self):
        memory = ctypes.create_string_buffer(8)
        buffer = ManagedBuffer.from_handle(ctypes.addressof(memory), 8, owner=memory)
        assert repr(buffer).startswith("<system memory in ManagedBuffer shape=(8,) ")

    def test_of_a_pool_of_the_device(self):
        with DeviceMemoryResource(0) as pool, pool.allocate(PAGE) as buffer:
            assert repr(buffer).startswith(f"<device memory in ManagedBuffer shape=({PAGE},) ")

    @pytest.mark.emulator_only
    def test_of_memory_that_the_driver_does_not_describe(self):
        """No error, and no claim."""
        with device_memory(PAGE) as pointer:
            buffer = ManagedBuffer.from_handle(pointer, PAGE)
            emulator.fail("cuPointerGetAttributes")
            assert repr(buffer).startswith("<ManagedBuffer shape=")
            assert repr(buffer).startswith("<device memory in ")

    @pytest.mark.emulator_only
    def test_of_managed_memory_of_ours_asks_no_driver(self, buf):
        with emulator.recording() as calls:
            assert repr(buf).startswith("<ManagedBuffer shape=")
        assert calls == []


def test_a_type_that_numpy_lacks_is_kept_by_its_arrays_alone(buf, monkeypatch):
    np = pytest.importorskip("numpy", reason="needs NumPy")
    kind = np.dtype([("bits", "u2")])
    monkeypatch.setitem(sys.modules, "ml_dtypes", SimpleNamespace(bfloat16=kind))
    before = sys.getrefcount(kind)
    with DeviceMemoryResource(0) as pool, pool.allocate(64) as plain:
        for _ in range(10):
            assert buf.view("bfloat16").numpy().dtype == kind
            with pytest.raises(ValueError, match="plain device memory"):
                plain.view("bfloat16").numpy()
    assert sys.getrefcount(kind) == before
