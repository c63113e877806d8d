"""Drivers unlike the emulated one: without an entry point, with too many devices, unaligned.

tests/c/proxy_driver.c passes each call on to the emulated driver, with the change that a test asks
for.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

import managedmem
from constants import EMULATED
from paths import TESTS
from programs import run_python

SOURCE = TESTS / "c" / "proxy_driver.c"
EMULATOR = Path(managedmem.__file__).parent / "libmanagedmem_emulator.so"
PRELUDE = f"""
import ctypes
import managedmem as mm
from constants import PAGE
from managedmem import Device, Host, ManagedMemoryResource
emulated = ctypes.CDLL({str(EMULATOR)!r})

def error(call, kind):
    try:
        call()
    except kind as met:
        return str(met)
    raise SystemExit("no error")
"""

pytestmark = pytest.mark.skipif(not EMULATED, reason="is about other drivers")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """`compiled(*flags)`: the path of the proxy driver."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")

    def build(*flags):
        library = tmp_path_factory.mktemp("proxy") / "libproxy.so"
        command = [compiler, "-std=c11", "-D_GNU_SOURCE", "-shared", "-fPIC"]
        subprocess.run([*command, *flags, SOURCE, "-o", library, "-ldl"], check=True)
        return library

    return build


@pytest.fixture(scope="module")
def driver(compiled):
    return compiled()


@pytest.fixture
def with_proxy(driver, monkeypatch):
    """`with_proxy(change, code)`: what the code prints under the driver with that change."""

    def run(change, code, library=driver):
        monkeypatch.setenv("PROXY", change)
        monkeypatch.setenv("PROXIED", str(EMULATOR))
        # An indented script would not go together with what comes before it.
        lines = [line.removeprefix(" " * 12) for line in code.splitlines()]
        return run_python(PRELUDE + "\n".join(lines), driver=library).stdout

    return run


SAY_ERROR = """
            print(error(Device.count, mm.DriverNotFoundError))
            """


class TestOpening:
    def test_a_driver_that_nobody_knows_is_one(self, with_proxy):
        with_proxy(
            "",
            """
            assert mm.emulator.is_active() is False
            with mm.empty(4096) as buffer:
                buffer.prefetch(Host())
            """,
        )

    @pytest.mark.parametrize("count", [0, 64])
    def test_too_few_and_too_many_devices(self, with_proxy, count):
        shown = with_proxy(f"devices={count}", SAY_ERROR)
        assert f"has {count} devices; 1 to 63 can be used" in shown

    @pytest.mark.parametrize(
        "function", ["cuInit", "cuDeviceGetCount", "cuDeviceGetAttribute", "cuDeviceTotalMem"]
    )
    def test_a_call_that_fails_is_named(self, with_proxy, function):
        shown = with_proxy(f"{function}=3", SAY_ERROR)
        assert f"{function} failed with CUDA_ERROR_NOT_INITIALIZED (3)" in shown

    def test_a_code_that_has_no_name(self, with_proxy):
        assert "cuInit failed with ? (123456)" in with_proxy("cuInit=123456", SAY_ERROR)

    def test_a_version_that_cannot_be_told(self, with_proxy):
        assert "cuDriverGetVersion failed with 3" in with_proxy("version=3", SAY_ERROR)

    @pytest.mark.parametrize("name", ["cuMemFree", "cuLaunchHostFunc"])
    def test_a_needed_entry_point_that_is_missing(self, with_proxy, name):
        assert f"has no {name} of version" in with_proxy(f"-{name}", SAY_ERROR)

    def test_a_library_that_cannot_be_searched(self, with_proxy, compiled):
        shown = with_proxy("", SAY_ERROR, library=compiled("-DWITHOUT_SEARCH"))
        assert "has no cuGetProcAddress_v2" in shown

    def test_a_failure_can_be_followed_by_another_choice(self, with_proxy):
        with_proxy(
            "devices=0",
            """
            error(Device.count, mm.DriverNotFoundError)
            mm.emulator.enable()
            assert Device.count() == 2
            """,
        )


@pytest.mark.parametrize("name", ["Prefetch", "Discard", "DiscardAndPrefetch"])
def test_a_driver_with_some_of_the_batch_calls_is_used_like_one_with_none(with_proxy, name):
    with_proxy(
        f"-cuMem{name}BatchAsync",
        """
            several = [mm.empty(PAGE) for _ in range(2)]
            mm.prefetch(several, Host())
            for call in (
                lambda: mm.prefetch(several, Host(), dispatch="batch"),
                lambda: mm.discard(several),
                lambda: mm.discard_prefetch(several, Host()),
                lambda: mm.PrefetchPlan([(several[0], Host())]).discard_prefetch(),
            ):
                assert "13.0" in error(call, NotImplementedError)
            """,
    )


@pytest.mark.parametrize("device", [0, 1])
def test_residency_needs_a_page_map_that_tells(with_proxy, device):
    """Where the host maps memory of a device, a mapped page may be there."""
    with_proxy(
        f"direct_access={device}",
        f"""
            buffer = mm.empty(4096)
            assert Device({device}).direct_managed_mem_access_from_host
            for call in (buffer.residency, lambda: mm.residency([buffer])):
                shown = error(call, NotImplementedError)
                assert "direct_managed_mem_access_from_host" in shown
            assert buffer[:0].residency().nbytes == 0
            buffer.prefetch(Host())
            """,
    )


class TestUnalignedMemory:
    """A driver may begin managed memory inside a page, which it could share with other memory."""

    def test_buffers_begin_at_pages(self, with_proxy):
        with_proxy(
            "unaligned=512",
            """
            Device(0).sync()
            buffers = [ManagedMemoryResource().allocate(size) for size in (1, PAGE, PAGE + 904)]
            assert all(buffer.handle % PAGE == 0 for buffer in buffers)
            assert emulated.emu_live_allocations() == 3
            for value, buffer in enumerate(buffers, 1):
                buffer.fill(value)
                buffer.read_mostly = True
            Device(0).sync()
            for value, buffer in enumerate(buffers, 1):
                assert bytes(buffer) == bytes([value]) * buffer.size and buffer.read_mostly
                buffer.close()
            assert emulated.emu_live_allocations() == 0
            """,
        )

    def test_no_memory_for_the_second_attempt(self, with_proxy):
        """The first allocation is still there then, so that it is not just given again."""
        with_proxy(
            "unaligned=512",
            """
            Device(0).sync()
            out_of_memory = 2
            emulated.emu_fail(b"cuMemAllocManaged", 2, out_of_memory, 0)
            shown = error(lambda: ManagedMemoryResource().allocate(4096), MemoryError)
            assert "cuMemAllocManaged" in shown, shown
            assert emulated.emu_live_allocations() == 0
            ManagedMemoryResource().allocate(4096).close()
            """,
        )


class TestRecordsThatChangeWhileTheyAreRead:
    """A driver can read the type and the id of a location one after the other."""

    def test_are_read_again(self, with_proxy):
        with_proxy(
            "torn=2",
            """
            buffer = ManagedMemoryResource().allocate(4096)
            buffer.preferred_location = Device(0)
            buffer.prefetch(Host())
            Device(0).sync()
            assert buffer.last_prefetch_location is Host()
            """,
        )

    def test_that_always_change_are_none(self, with_proxy):
        with_proxy(
            "torn=1000000",
            """
            buffer = ManagedMemoryResource().allocate(8192)
            buffer.prefetch(Device(0))
            Device(0).sync()
            assert buffer.last_prefetch_location is None
            assert buffer.preferred_location is None
            (run,) = buffer.page_runs()
            assert run.preferred_location is None and run.last_prefetch_location is None
            assert buffer.residency().last_asked_to == {}
            mm.MigrationPolicy.of(buffer)
            """,
        )
