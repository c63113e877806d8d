"""What an error tells: its class, the driver's answer, words that help; what it leaves undone.

Each single driver call fails in test_fault_sweeps; wrong arguments are in test_bad_input.
"""

import pickle

import pytest

import managedmem
from constants import PAGE
from contents import contents, pattern, write
from driver import managed_memory
from foreign_objects import torch_device
from managedmem import CUDAError, CUDAOutOfMemoryError, Device, Host, emulator
from programs import run_python

UNKNOWN = 999
# The driver may report the failure of earlier, asynchronous work from any call.
AFTER = pytest.mark.parametrize("after", [False, True], ids=["refused", "failed after the effect"])


class TestClasses:
    @pytest.mark.parametrize(
        ("cls", "bases"),
        [
            (CUDAError, [RuntimeError]),
            (CUDAOutOfMemoryError, [CUDAError, MemoryError]),
            (managedmem.DriverNotFoundError, [CUDAError]),
            (managedmem.DriverTooOldError, [CUDAError]),
            (managedmem.TraceUnavailableError, [RuntimeError]),
            (managedmem.TraceBusyError, [managedmem.TraceUnavailableError]),
        ],
    )
    def test_the_tree(self, cls, bases):
        assert all(issubclass(cls, base) for base in bases)
        assert cls.__module__ == "managedmem"
        assert cls.__doc__

    def test_no_driver_call_no_code(self):
        error = managedmem.DriverNotFoundError("words")
        assert (error.code, error.name, error.function) == (None, None, None)


@pytest.mark.emulator_only
class TestOutOfMemory:
    def test_is_a_memory_error_and_a_cuda_error(self):
        emulator.fail("cuMemAllocManaged", code=2)
        with pytest.raises(CUDAOutOfMemoryError) as error:
            managedmem.ManagedMemoryResource().allocate(PAGE)
        assert (error.value.code, error.value.name) == (2, "CUDA_ERROR_OUT_OF_MEMORY")
        assert error.value.function == "cuMemAllocManaged"
        assert str(PAGE) in str(error.value)

    @pytest.mark.parametrize(
        "call", [lambda b: managedmem.empty(8), lambda b: b.copy_to()], ids=["empty", "copy_to"]
    )
    def test_wherever_memory_is_made(self, buf, call):
        live = emulator.live()
        emulator.fail("cuMemAllocManaged", code=2)
        with pytest.raises(CUDAOutOfMemoryError):
            call(buf)
        assert emulator.live() == live

    @pytest.mark.parametrize("size", [1 << 62, (1 << 63) - 1], ids=hex)
    def test_more_than_any_machine_has(self, size):
        """Only here: a GPU is never asked for more than it has."""
        with pytest.raises(MemoryError):
            managedmem.ManagedMemoryResource().allocate(size)


@pytest.mark.emulator_only
class TestWhatTheDriverSaid:
    @pytest.mark.parametrize(
        ("code", "name"),
        [
            (1, "CUDA_ERROR_INVALID_VALUE"),
            (101, "CUDA_ERROR_INVALID_DEVICE"),
            (201, "CUDA_ERROR_INVALID_CONTEXT"),
            (700, "CUDA_ERROR_ILLEGAL_ADDRESS"),
            (801, "CUDA_ERROR_NOT_SUPPORTED"),
            (999, "CUDA_ERROR_UNKNOWN"),
        ],
    )
    def test_is_code_name_and_function(self, buf, stream, code, name):
        emulator.fail("cuMemPrefetchAsync", code=code)
        with pytest.raises(CUDAError) as error:
            buf.prefetch(Device(0), stream=stream)
        assert (error.value.code, error.value.name) == (code, name)
        assert error.value.function == "cuMemPrefetchAsync"
        assert name in str(error.value)
        assert "cuMemPrefetchAsync" in str(error.value)

    @pytest.mark.parametrize(
        ("code", "words"),
        [
            (2, "Free managed buffers"),
            (4, "The driver is shutting down"),
            *[(code, "restart the process") for code in (700, 714, 715, 716, 719)],
            *[(code, "make this call before the capture begins") for code in (900, 901)],
            (800, "CUDA allows no driver calls inside a host function"),
            *[(code, "stream or its context no longer exists") for code in (400, 709)],
        ],
    )
    def test_codes_that_users_meet_come_with_advice(self, buf, stream, code, words):
        emulator.fail("cuMemPrefetchAsync", code=code)
        with pytest.raises(CUDAError, match=words) as error:
            buf.prefetch(Device(0), stream=stream)
        assert error.value.code == code

    def test_a_deferred_prefetch(self, buf, stream):
        """Its host function comes first, and without that nothing is queued."""
        emulator.fail("cuLaunchHostFunc", code=719)
        with emulator.recording() as calls, pytest.raises(CUDAError) as error:
            buf.prefetch(Device(0), stream=stream, defer=True)
        assert error.value.function == "cuLaunchHostFunc"
        assert "cuMemPrefetchAsync" not in [call.name for call in calls]

    def test_a_resource_waits_before_it_frees(self, stream):
        """Memory that was allocated by hand stays where the wait fails."""
        resource = managedmem.ManagedMemoryResource()
        handle = managed_memory(PAGE)
        emulator.fail("cuStreamSynchronize", code=719)
        with pytest.raises(CUDAError) as error:
            resource.deallocate(handle, PAGE, stream=stream)
        assert error.value.function == "cuStreamSynchronize"
        resource.deallocate(handle, PAGE, stream=stream)

    @pytest.mark.parametrize("nth", [1, 2])
    def test_before_the_host_reads(self, nth):
        """Where the host must not read while a GPU works, all devices are waited for first."""
        run_python(
            f"""
            import managedmem as mm, pytest
            buffer = mm.empty(4096)
            for device in mm.Device.all():
                device.sync()
            mm.emulator.fail("cuCtxSynchronize", nth={nth}, code=719)
            with pytest.raises((mm.CUDAError, BufferError), match="cuCtxSynchronize"):
                memoryview(buffer)
            memoryview(buffer)[0]
            """,
            emulator="profile=wsl",
        )

    @pytest.mark.parametrize(
        ("function", "ask"),
        [
            ("cuDeviceGetName", lambda: Device(0).name),
            ("cuDeviceGetUuid", lambda: Device(0).uuid),
            ("cuDeviceGetAttribute", lambda: Device(0).concurrent_managed_access),
            ("cuDeviceGetAttribute", lambda: Device(0).host_numa_id),
            ("cuMemGetInfo", lambda: Device(0).memory_info),
            ("cuCtxSynchronize", lambda: Device(0).sync()),
            ("cuCtxGetDevice", Device),
            ("cuCtxGetDevice", lambda: Device(torch_device("cuda"))),
        ],
    )
    def test_about_a_device(self, function, ask):
        Device(0).set_current()
        emulator.fail(function, code=719)
        with pytest.raises(CUDAError) as error:
            ask()
        assert (error.value.code, error.value.function) == (719, function)
        ask()

    def test_an_unknown_code_comes_through(self, buf, stream):
        emulator.fail("cuMemPrefetchAsync", code=4242)
        with pytest.raises(CUDAError) as error:
            buf.prefetch(Device(0), stream=stream)
        assert error.value.code == 4242
        assert "4242" in str(error.value)

    @pytest.mark.parametrize(
        ("function", "use"),
        [
            ("cuMemPrefetchAsync", lambda b: b.prefetch(Device(0))),
            ("cuMemAdvise", lambda b: setattr(b, "read_mostly", True)),
            ("cuMemDiscardBatchAsync", lambda b: b.discard()),
            ("cuMemDiscardAndPrefetchBatchAsync", lambda b: b.discard_prefetch(Host())),
        ],
    )
    def test_invalid_value_is_explained(self, buf, function, use):
        """The driver's "invalid argument" means one of seven things: say more than that."""
        emulator.fail(function, code=1)
        with pytest.raises((CUDAError, ValueError)) as error:
            use(buf)
        text = str(error.value)
        bare = f"{function} failed with CUDA_ERROR_INVALID_VALUE (1): invalid argument"
        assert len(text) > len(bare) + 10, text

    def test_pickles_with_all_it_carries(self, buf, stream):
        emulator.fail("cuMemPrefetchAsync", code=UNKNOWN)
        with pytest.raises(CUDAError) as error:
            buf.prefetch(Device(0), stream=stream)
        again = pickle.loads(pickle.dumps(error.value))
        assert type(again) is type(error.value)
        assert str(again) == str(error.value)
        carried = (again.code, again.name, again.function)
        assert carried == (UNKNOWN, "CUDA_ERROR_UNKNOWN", "cuMemPrefetchAsync")


ADVICE = {
    "read_mostly": [True, False],
    "preferred_location": [Host(), Host(0), Host(1), Host.numa_current(), Device(0), None],
    "accessed_by": [[Device(0)], [Host()], [Device(0), Host()], []],
}


@pytest.mark.emulator_only
@AFTER
@pytest.mark.parametrize("name", ADVICE)
def test_a_failing_property_leaves_the_advice_as_it_was(buf, name, after):
    for before in ADVICE[name]:
        for value in ADVICE[name]:
            setattr(buf, name, before)
            runs = buf.page_runs()
            if name == "accessed_by" and set(before) == set(value):
                continue  # no advice at all
            emulator.fail("cuMemAdvise", code=UNKNOWN, after=after)
            with pytest.raises(CUDAError):
                setattr(buf, name, value)
            emulator.clear_failures()
            assert buf.page_runs() == runs, (before, value)


CALLS = {
    "read_mostly": lambda b: setattr(b, "read_mostly", True),
    "no read_mostly": lambda b: setattr(b, "read_mostly", False),
    "preferred_location": lambda b: setattr(b, "preferred_location", Device(0)),
    "no preferred_location": lambda b: setattr(b, "preferred_location", None),
    "accessed_by": lambda b: b.accessed_by.add(Device(0)),
    "advise": lambda b: managedmem.advise(b, "set_accessed_by", Device(0)),
    "advise two": lambda b: managedmem.advise(
        [b.range(0, 3 * PAGE), b.range(4 * PAGE, 4 * PAGE)], "set_read_mostly"
    ),
    "advise no two": lambda b: managedmem.advise(
        [b.range(0, 3 * PAGE), b.range(4 * PAGE, 4 * PAGE)], "unset_preferred_location"
    ),
}


class TestPagesThatDiffer:
    """The driver answers as if nothing were set, so there is no value to restore."""

    @pytest.fixture
    def mixed(self, alloc):
        buffer = alloc(8 * PAGE)
        for page in (1, 4, 5):
            part = buffer.range(page * PAGE, PAGE)
            part.read_mostly = True
            part.preferred_location = Host()
            part.accessed_by = [Device(0)]
        return buffer

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
    def test_a_refusal_leaves_them_as_they_are(self, mixed, call):
        before = mixed.page_runs()
        assert len(before) > 2
        emulator.fail("cuMemAdvise", code=UNKNOWN)
        with pytest.raises(CUDAError):
            call(mixed)
        emulator.clear_failures()
        assert mixed.page_runs() == before

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("several", [False, True])
    def test_where_the_driver_acted_they_have_none(self, mixed, several):
        parts = [mixed.range(0, 3 * PAGE), mixed.range(4 * PAGE, 4 * PAGE)]
        emulator.fail("cuMemAdvise", nth=1 + several, code=UNKNOWN, after=True)
        with pytest.raises(CUDAError):
            managedmem.advise(parts if several else mixed, "set_preferred_location", Device(0))
        emulator.clear_failures()
        assert [run.preferred_location for run in mixed.page_runs()] == [
            None for _ in mixed.page_runs()
        ]
        assert len(mixed.page_runs()) > 2


@pytest.mark.emulator_only
def test_advice_on_several_targets_in_system_memory():
    script = """
        import managedmem
        parts = [bytearray(1 << 16) for _ in range(3)]
        managedmem.advise(parts[0], "set_read_mostly")
        managedmem.advise(parts, "set_preferred_location", managedmem.Device(0))
        managedmem.emulator.fail("cuMemAdvise", nth=2)
        try:
            managedmem.advise(parts, "unset_read_mostly")
        except managedmem.CUDAError as error:
            print(error.function)
    """
    assert run_python(script, emulator="pageable=1").stdout == "cuMemAdvise\n"


@pytest.mark.emulator_only
class TestBatchesThatTheDriverRefuses:
    """The driver returns INVALID_VALUE for a whole batch; the error names the fault."""

    def test_the_node_that_is_not_there_is_named(self, alloc):
        parts = [alloc(PAGE), alloc(PAGE), alloc(PAGE)]
        with pytest.raises(ValueError, match=r"Host\(numa_id=9\): this system has no NUMA node 9"):
            managedmem.prefetch(parts, [Host(), Host(9), Host()], dispatch="batch")

    def test_one_of_several_nodes(self, alloc):
        parts = [alloc(PAGE), alloc(PAGE)]
        with pytest.raises(
            ValueError, match=r"lacks a NUMA node of the batch: Host\(numa_id=9\) or another"
        ):
            managedmem.prefetch(parts, [Host(9), Host(1)], dispatch="batch")

    @pytest.mark.parametrize("function", ["prefetch", "discard", "discard_prefetch"])
    def test_without_a_visible_fault_the_batch_is_described(self, alloc, function):
        parts = [alloc(PAGE) for _ in range(3)]
        places = [] if function == "discard" else [[Device(0), Host(), Device(0)]]
        for name in ("Prefetch", "Discard", "DiscardAndPrefetch"):
            emulator.fail(f"cuMem{name}BatchAsync", code=1)
        with pytest.raises(CUDAError, match="refused a batch of 3 ranges from 0x") as error:
            getattr(managedmem, function)(parts, *places, dispatch="batch")
        emulator.clear_failures()
        assert f"from {min(p.handle for p in parts):#x} to" in str(error.value)
        assert f"to {max(p.handle for p in parts) + PAGE:#x}." in str(error.value)

    @pytest.mark.parametrize("function", ["discard", "discard_prefetch"])
    def test_one_range_is_described_with_its_location_if_it_has_one(self, buf, function):
        for name in ("Discard", "DiscardAndPrefetch"):
            emulator.fail(f"cuMem{name}BatchAsync", code=1)
        arguments = {"discard": [], "discard_prefetch": [Device(0)]}[function]
        text = f"refused {buf.size} bytes at {buf.handle:#x}{' with .*' if arguments else ''}[.]$"
        with pytest.raises(CUDAError, match=text):
            getattr(buf, function)(*arguments)
        emulator.clear_failures()


@pytest.mark.emulator_only
class TestContentsAfterAFailedDiscard:
    """discard_prefetch prefetches the pages at the ends first; the error says how much is lost."""

    def test_the_first_page_that_cannot_move(self, buf, device0):
        data = write(buf, pattern(buf.size))
        targets = [buf.range(100, 2 * PAGE), buf.range(8 * PAGE + 100, 2 * PAGE)]
        for given in (targets, targets[0]):
            for nth in (1, 2):
                emulator.fail("cuMemPrefetchAsync", nth=nth, code=UNKNOWN)
                with pytest.raises(CUDAError, match=r"Nothing was discarded\.$"):
                    managedmem.discard_prefetch(given, device0)
                emulator.clear_failures()
        assert contents(buf) == data

    def test_targets_that_go_one_by_one(self, buf, device0):
        """They share a page and go to different places: four prefetches of edges, two discards."""
        data = write(buf, pattern(buf.size))
        targets = [buf.range(100, 3 * PAGE), buf.range(3 * PAGE + 200, 3 * PAGE)]
        for nth, words in [
            (1, "Nothing was"),
            (2, "Nothing was"),
            (3, "1 range had been"),
            (4, "1 r"),
        ]:
            emulator.fail("cuMemPrefetchAsync", nth=nth, code=UNKNOWN)
            with pytest.raises(CUDAError, match=f"{words}.*discarded"):
                managedmem.discard_prefetch(targets, [device0, Host()])
            emulator.clear_failures()
            now = contents(buf)
            assert now[3 * PAGE :] == data[3 * PAGE :]
            assert (now == data) is (nth < 3)

    def test_a_discard_in_the_middle_of_a_loop(self, buf):
        buffers = [buf.range(2 * i * PAGE, PAGE) for i in range(3)]
        emulator.fail("cuMemDiscardBatchAsync", nth=3, code=UNKNOWN)
        with pytest.raises(CUDAError, match="2 ranges had been discarded before"):
            managedmem.discard(buffers, dispatch="loop")


@pytest.mark.emulator_only
def test_memory_that_runs_out_while_an_error_is_made():
    """Each allocation of CPython for the exception fails in turn."""
    pytest.importorskip("_testcapi", reason="needs CPython's test module")
    done = run_python(
        """
        import _testcapi
        from managedmem import CUDAError, Host, emulator, empty

        raised = set()
        with empty(4096) as buffer:
            for nth in range(40):
                emulator.fail("cuMemPrefetchAsync", code=999)
                _testcapi.set_nomemory(nth, nth + 1)
                try:
                    buffer.prefetch(Host())
                except (CUDAError, MemoryError) as error:
                    caught = error
                finally:
                    _testcapi.remove_mem_hooks()
                    emulator.clear_failures()
                raised.add((type(caught).__name__, getattr(caught, "name", None)))
        print(sorted(raised))
        """
    )
    assert done.stdout == "[('CUDAError', 'CUDA_ERROR_UNKNOWN'), ('MemoryError', None)]\n"
