"""The emulated driver sees the host's loads and stores, and the page map tells where pages are."""

import ctypes
import itertools
import os
import random
import resource
import textwrap
import threading

import pytest

import managedmem
from constants import MIB, PAGE
from driver import managed_memory, raw_driver
from managedmem import Device, Host, emulator
from page_map import count_mapped, mapped
from page_steps import AROUND
from programs import run_python
from traces import load, store

pytestmark = [pytest.mark.emulator_only, pytest.mark.usefixtures("eager")]

SIZE = 4 * MIB
PAGES = SIZE // PAGE


@pytest.fixture
def memory(alloc):
    """A buffer that the host has never touched."""
    return alloc(SIZE)


def moved():
    """The bytes that moved since the last time: to devices, to the host."""
    counters = emulator.counters()
    emulator.clear_counters()
    return counters.bytes_htod, counters.bytes_dtoh


class TestFirstTouchByADevice:
    """Measured on an H100: free device memory stays, and loads move the contents."""

    @pytest.mark.parametrize(
        ("advice", "place"),
        [
            ({}, Device(0)),
            ({"preferred_location": Host()}, Host()),
            ({"read_mostly": True}, Device(0)),
        ],
    )
    def test_is_where_the_policy_says(self, memory, advice, place):
        for name, value in advice.items():
            setattr(memory, name, value)
        moved()  # by tests before this one
        memory.fill(3)
        Device(0).sync()
        assert emulator.residency(memory) is place
        assert count_mapped(memory) == 0
        assert moved() == (0, 0)

    def test_pages_that_are_there_stay(self, memory):
        memory.prefetch(Device(0))
        memory.preferred_location = Host()
        memory.fill(3)
        Device(0).sync()
        assert emulator.residency(memory) is Device(0)


class TestPageMap:
    def test_of_one_page_that_comes_back_alone(self, memory):
        store(memory)
        memory.prefetch(Device(0))
        memory[20 * PAGE : 21 * PAGE].prefetch(Host())
        assert [page for page, here in enumerate(mapped(memory)) if here] == [20]

    def test_of_copies_by_the_device(self, alloc, memory):
        """The emulated device's own loads and stores are not the host's."""
        other = alloc(SIZE)
        store(memory, 7)
        memory.prefetch(Device(0))
        other.prefetch(Device(0))
        other.copy_from(memory)
        assert count_mapped(memory) == count_mapped(other) == 0
        assert emulator.residency(memory) == emulator.residency(other) == Device(0)
        assert set(load(other)) == {7}

    def test_of_evicted_pages(self, memory):
        """They are in host memory, and mapped when the host touches them."""
        store(memory, 5)
        memory.prefetch(Device(0))
        with managedmem.empty(1 << 30) as large:
            large.prefetch(Device(0))
            assert emulator.residency(memory) == Host()
            assert count_mapped(memory) == 0
        memory.prefetch(Host())
        assert count_mapped(memory) == PAGES
        assert set(load(memory)) == {5}

    def test_of_a_touch_by_call(self, memory):
        store(memory)
        memory.prefetch(Device(0))
        emulator.touch(memory, Host())
        assert count_mapped(memory) == PAGES

    @pytest.mark.parametrize("advice", range(2), ids=["plain", "read-mostly"])
    def test_of_pages_between_nodes_stays(self, memory, advice):
        store(memory)
        emulator.clear_counters()
        memory.read_mostly = bool(advice)
        memory.prefetch(Host(numa_id=1))
        memory.prefetch(Host(numa_id=0))
        assert count_mapped(memory) == PAGES
        assert moved() == (0, 0)


class TestTouches:
    """A load or a store of the host moves pages, noticed at the next call of the driver."""

    def test_a_store_moves_its_page(self, memory):
        store(memory)
        memory.prefetch(Device(0))
        emulator.clear_counters()
        page = memory[9 * PAGE : 10 * PAGE]
        store(page, 2)
        assert emulator.residency(page) == Host()
        assert emulator.residency(memory[: 9 * PAGE]) == Device(0)
        assert emulator.residency(memory[10 * PAGE :]) == Device(0)
        assert emulator.counters()[:4] == (0, PAGE, 0, 1)

    def test_a_load_moves_the_pages_around_too(self, memory):
        store(memory)
        memory.prefetch(Device(0))
        emulator.clear_counters()
        load(memory[20 * PAGE : 20 * PAGE + 1])
        assert moved() == (0, AROUND)
        assert emulator.residency(memory[16 * PAGE : 32 * PAGE]) == Host()
        assert emulator.residency(memory[32 * PAGE :]) == Device(0)

    def test_there_and_back_counts_each_time(self, memory):
        store(memory)
        emulator.clear_counters()
        for _ in range(5):
            memory.prefetch(Device(0))
            store(memory)
        assert moved() == (5 * SIZE, 5 * SIZE)

    def test_a_first_touch_populates(self, memory):
        emulator.clear_counters()
        store(memory[PAGE : 3 * PAGE])
        assert emulator.residency(memory[PAGE : 3 * PAGE]) == Host()
        assert emulator.residency(memory[3 * PAGE :]) is None
        assert emulator.counters().cpu_faults == 2
        memory.prefetch(Device(0))
        assert moved() == (2 * PAGE, 0)

    def test_a_load_of_a_read_mostly_page_copies_it(self, memory):
        store(memory)
        memory.prefetch(Device(0))
        memory.read_mostly = True
        emulator.clear_counters()
        load(memory)
        assert emulator.residency(memory) == "mixed"
        assert emulator.counters().duplications == PAGES
        memory.prefetch(Device(0))
        assert moved() == (0, SIZE)
        memory.read_mostly = False
        assert emulator.residency(memory) == Host()

    def test_advice_follows_the_touches_before_it(self, memory):
        store(memory)
        memory.prefetch(Device(0))
        store(memory)
        memory.read_mostly = True
        assert emulator.residency(memory) == Host()

    def test_another_device_takes_pages_from_where_they_are(self, memory, device1):
        store(memory)
        memory.prefetch(Device(0))
        store(memory[:PAGE])
        emulator.clear_counters()
        memory.prefetch(device1)
        counters = emulator.counters()
        assert (counters.bytes_htod, counters.bytes_dtod) == (PAGE, SIZE - PAGE)

    def test_before_the_memory_is_freed_count(self):
        with managedmem.empty(SIZE) as buffer:
            store(buffer)
            buffer.prefetch(Device(0))
            emulator.clear_counters()
            store(buffer)
        assert moved() == (0, SIZE)

    def test_of_small_allocations_in_one_page(self):
        """Those of other libraries: the memory of this one shares no page."""
        pointers = [managed_memory(512) for _ in range(16)]
        small = [managedmem.ManagedBuffer.from_handle(pointer, 512) for pointer in pointers]
        first, second = next(
            (one, other)
            for one, other in itertools.pairwise(small)
            if one.handle // PAGE == other.handle // PAGE
        )
        for number, buffer in enumerate(small):
            store(buffer, number)
        first.prefetch(Device(0))
        assert emulator.residency(second) == Device(0)
        store(second, small.index(second))
        assert emulator.residency(first) == Host()
        assert [load(buffer)[0] for buffer in small] == list(range(16))
        for buffer, pointer in zip(small, pointers, strict=True):
            buffer.close()
            assert raw_driver().cuMemFree_v2(ctypes.c_uint64(pointer)) == 0

    def test_of_memory_from_a_pool(self):
        with managedmem.ManagedMemoryResource(pooled=True) as pool, pool.allocate(SIZE) as buffer:
            store(buffer)
            buffer.prefetch(Device(0))
            assert count_mapped(buffer) == 0
            store(buffer[:PAGE], 2)
            assert emulator.residency(buffer[:PAGE]) == Host()
            assert load(buffer) == b"\2" * PAGE + b"\1" * (SIZE - PAGE)

    def test_of_system_calls(self, memory, tmp_path):
        """The kernel reads for the host, too."""
        store(memory, 65)
        memory.prefetch(Device(0))
        path = tmp_path / "written"
        with memoryview(memory) as view:
            path.write_bytes(view)
        assert emulator.residency(memory) == Host()
        assert path.read_bytes() == b"A" * SIZE


class TestDiscards:
    @pytest.fixture
    def discarded(self, memory):
        store(memory)
        memory.discard()
        emulator.clear_counters()
        return memory

    def test_nothing_moves(self, discarded):
        discarded.prefetch(Device(0))
        assert moved() == (0, 0)

    def test_what_is_written_after_it_moves(self, discarded):
        store(discarded[: 3 * PAGE], 2)
        discarded.prefetch(Device(0))
        assert moved() == (3 * PAGE, 0)
        assert load(discarded[: 3 * PAGE]) == b"\2" * (3 * PAGE)

    def test_what_is_only_read_does_not(self, discarded):
        load(discarded)
        discarded.prefetch(Device(0))
        assert moved() == (0, 0)

    def test_of_device_pages_then_a_read(self, memory):
        store(memory)
        memory.prefetch(Device(0))
        memory.discard()
        emulator.clear_counters()
        assert set(load(memory)) == {0xDB}
        assert emulator.residency(memory) == Host()
        assert moved() == (0, 0)


class TestContents:
    """No move loses a byte."""

    OPERATIONS = ("D0", "D1", "H", "store", "fill", "copy", "touch", "advise", "load", "free")

    @pytest.mark.parametrize("seed", range(8))
    @pytest.mark.parametrize("schedule", ["eager", "lazy"])
    def test_of_random_programs(self, alloc, seed, schedule):
        chance = random.Random(seed)
        sizes = [700, 3 * PAGE, 100 * PAGE, SIZE]
        buffers = [alloc(size) for size in sizes]
        model = [bytearray(size) for size in sizes]
        for buffer in buffers:
            store(buffer, 0)
        emulator.schedule(schedule)
        for _ in range(150):
            index = chance.randrange(len(buffers))
            self.step(chance, buffers[index], model[index])
        managedmem.Device().sync()
        assert [load(buffer) for buffer in buffers] == [bytes(expected) for expected in model]

    def step(self, chance, buffer, expected):
        first = chance.randrange(buffer.size)
        end = min(buffer.size, first + 1 + chance.randrange(20 * PAGE))
        part, value = buffer[first:end], chance.randrange(256)
        operation = chance.choice(self.OPERATIONS)
        if operation in ("D0", "D1", "H"):
            ordinal = int(operation[1:] or 0) % Device.count()
            part.prefetch(Host() if operation == "H" else Device(ordinal))
        elif operation == "store":
            managedmem.Device().sync()
            store(part, value)
            expected[first:end] = bytes([value]) * (end - first)
        elif operation == "fill":
            part.fill(value)
            expected[first:end] = bytes([value]) * (end - first)
        elif operation == "copy":
            part.copy_from(bytes([value]) * (end - first))
            expected[first:end] = bytes([value]) * (end - first)
        elif operation == "touch":
            toucher = chance.choice([*Device.all(), Host()])
            emulator.touch(part, toucher, write=value > 127)
        elif operation == "advise":
            buffer.read_mostly = value > 127
            buffer.preferred_location = chance.choice([None, *Device.all(), Host()])
        elif operation == "load":
            managedmem.Device().sync()
            assert load(part) == expected[first:end]
        else:
            managedmem.empty(SIZE).close()


HOLD_FILES = """
        managedmem.Device(0).sync()
        held_files = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        try:
            while True:
                held_files.append(open("/dev/null"))
        except OSError:
            pass
"""
IMPORTS = """
import ctypes, os, resource
import managedmem
from managedmem import Device, Host, emulator
from page_map import count_mapped
"""
TOUCHED = """
emulator.schedule("eager")

def touched():
    buffer = managedmem.empty(1 << 22)
    ctypes.memset(buffer.handle, 7, buffer.size)
    buffer.prefetch(Device(0))
    return buffer
"""


def run(code, **options):
    """Run code that can call touched(), which returns a buffer on the device, full of 7."""
    return run_python(IMPORTS + TOUCHED + textwrap.dedent(code), **options)


LIMITS = {
    "none": "",
    "no descriptor left": HOLD_FILES,
    "one descriptor left": HOLD_FILES + "        held_files.pop().close()",
    "size of files": "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))",
    "addresses": "resource.setrlimit(resource.RLIMIT_AS, (9 << 30, 9 << 30))",
    "memory locked before": "ctypes.CDLL(None).mlockall(2)",
    "memory locked after": """
        managedmem.empty(1).close()
        ctypes.CDLL(None).mlockall(3)
    """,
}


few_addresses = pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer takes more addresses"
)


class TestLimits:
    """The emulated driver needs no descriptors, no large files and few addresses."""

    @pytest.mark.parametrize(
        "limit",
        [
            pytest.param(name, marks=few_addresses) if name == "addresses" else name
            for name in LIMITS
        ],
    )
    def test_of_the_process(self, limit):
        code = """
            buffer = touched()
            for file in globals().pop("held_files", []):
                file.close()
            assert emulator.residency(buffer) == Device(0), emulator.residency(buffer)
            assert count_mapped(buffer) == 0
            ctypes.memset(buffer.handle, 8, 4096)
            assert emulator.residency(buffer[:4096]) == Host()
            assert emulator.residency(buffer[4096:]) == Device(0)
            found = ctypes.string_at(buffer.handle, buffer.size)
            assert found == bytes([8]) * 4096 + bytes([7]) * (buffer.size - 4096)
        """
        run_python(IMPORTS + textwrap.dedent(LIMITS[limit]) + TOUCHED + textwrap.dedent(code))

    @few_addresses
    def test_of_addresses_are_met_by_using_them_again(self):
        """Used again, memory begins with zeros."""
        run_python("""
            import resource
            resource.setrlimit(resource.RLIMIT_AS, (9 << 30, 9 << 30))
            import ctypes, managedmem
            from managedmem import Device
            addresses = set()
            for _ in range(40):
                buffer = managedmem.empty(300 << 20)
                addresses.add(buffer.handle)
                assert ctypes.string_at(buffer.handle + (100 << 20), 4096) == bytes(4096)
                ctypes.memset(buffer.handle + (100 << 20), 9, 4096)
                buffer.prefetch(Device(0))
                buffer.close()
            assert len(addresses) < 40
        """)

    @pytest.mark.skipif(
        0 <= resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] < 2 * SIZE and os.geteuid() != 0,
        reason="this process may not lock as much memory",
    )
    def test_of_memory_that_the_kernel_wants_back(self):
        """Pages that it unmapped would look as if the host had not touched them."""
        run("""
            PAGEOUT = 21
            advise = ctypes.CDLL(None).madvise
            advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            buffer = touched()
            for n in range(3):
                buffer.prefetch(Device(0))
                assert count_mapped(buffer) == 0
                ctypes.memset(buffer.handle, n, 1 << 21)
                advise(buffer.handle, buffer.size, PAGEOUT)
                assert count_mapped(buffer) == 512
                assert emulator.residency(buffer[: 1 << 21]) == Host()
                assert emulator.residency(buffer[1 << 21 :]) == Device(0)
        """)

    def test_of_memory_that_is_freed(self):
        """Its pages go back to the system, though they were locked."""
        run_python("""
            import ctypes, managedmem

            def resident():
                with open("/proc/self/status") as status:
                    [line] = [line for line in status if line.startswith("RssShmem")]
                return int(line.split()[1]) << 10

            before = resident()
            with managedmem.empty(1 << 26) as buffer:
                ctypes.memset(buffer.handle, 7, buffer.size)
                assert resident() >= before + buffer.size
            assert resident() < before + (1 << 24)
            managedmem.empty(1 << 26).close()
            assert resident() < before + (1 << 24)
        """)

    def test_of_locked_memory(self):
        """Where no memory may be locked, all works but for what the kernel unmaps."""
        run("""
            def locked():
                with open("/proc/self/status") as status:
                    return [line for line in status if line.startswith("VmLck")]

            first, before = managedmem.empty(1), locked()
            _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, most))
            if os.geteuid() == 0:
                os.seteuid(65534)
            buffer = managedmem.empty(1 << 22)
            assert locked() == before
            buffer.prefetch(Device(0))
            ctypes.memset(buffer.handle, 7, buffer.size)
            assert emulator.residency(buffer) == Host()
            buffer.prefetch(Device(0))
            assert emulator.residency(buffer) == Device(0)
            buffer.close()
            os.seteuid(os.getuid())
        """)

    def test_of_a_lost_descriptor(self):
        """A program may close every descriptor that it does not know, and use the number again."""
        run("""
            buffer = touched()
            os.closerange(3, 1000)
            for _ in range(20):
                os.open("/dev/zero", os.O_RDONLY)
            assert emulator.residency(buffer) == Device(0)
            ctypes.memset(buffer.handle, 8, 4096)
            assert emulator.residency(buffer[:4096]) == Host()
            os.fstat(22)
        """)

    def test_without_a_page_map(self):
        """Where the kernel shows none, first touches are noticed, and no others."""
        done = run("""
            from namespaces import hide_proc
            hide_proc()
            buffer = managedmem.empty(1 << 22)
            assert emulator.residency(buffer) is None
            ctypes.memset(buffer.handle, 7, 1 << 21)
            assert emulator.residency(buffer[: 1 << 21]) == Host()
            assert emulator.residency(buffer[1 << 21 :]) is None
            buffer.prefetch(Device(0))
            assert emulator.counters().bytes_htod == 1 << 21
            ctypes.memset(buffer.handle, 8, 4096)
            assert emulator.residency(buffer) == Device(0)
            text = ctypes.string_at(buffer.handle, 1 << 21)
            assert text == bytes([8]) * 4096 + bytes([7]) * ((1 << 21) - 4096)
        """)
        if "no namespaces" in done.stdout:
            pytest.skip("this process may not make namespaces")

    def test_large_sparse_memory_stays_sparse(self):
        done = run(
            """
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            buffer = managedmem.empty(1 << 36)
            for offset in range(0, 1 << 36, 1 << 32):
                ctypes.memset(buffer.handle + offset, 7, 1)
            for _ in range(3):
                buffer.prefetch(Device(0))
                buffer.prefetch(Host())
            buffer.prefetch(Device(0))
            assert emulator.residency(buffer) == Device(0)
            ctypes.memset(buffer.handle + (5 << 32), 8, 1)
            assert emulator.residency(buffer[5 << 32 : (5 << 32) + 4096]) == Host()
            assert ctypes.string_at(buffer.handle + (4 << 32), 1) == bytes([7])
            buffer.read_mostly = True
            buffer.close()
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
            """,
            emulator="capacity_mib=1000000",
        )
        assert int(done.stdout) < 100 * 1024

    def test_many_allocations(self):
        with managedmem.ManagedMemoryResource() as resource:
            small = [resource.allocate(3000) for _ in range(3000)]
            large = [resource.allocate(SIZE // 2) for _ in range(300)]
            for number, buffer in enumerate(small):
                store(buffer, number % 251)
            managedmem.prefetch(small, Device(0))
            managedmem.prefetch(large, Device(0))
            for number, buffer in enumerate(small):
                assert load(buffer) == bytes([number % 251]) * 3000
            for buffer in small + large:
                buffer.close()

    def test_a_fork_does_not_disturb(self):
        run("""
            buffer = touched()
            child = os.fork()
            if child == 0:
                emulator.counters()
                os._exit(5)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
            assert emulator.residency(buffer) == Device(0)
            assert set(ctypes.string_at(buffer.handle, buffer.size)) == {7}
            assert emulator.residency(buffer) == Host()
        """)

    @pytest.mark.parametrize("page", [4096, 65536])
    def test_larger_pages(self, page):
        run(
            f"""
            buffer = touched()
            ctypes.memset(buffer.handle + 5 * {page} + 4095, 8, 1)
            assert emulator.residency(buffer[5 * {page} : 6 * {page}]) == Host()
            assert emulator.residency(buffer[: 5 * {page}]) == Device(0)
            assert emulator.residency(buffer[6 * {page} :]) == Device(0)
            assert emulator.counters().bytes_dtoh == {page}
            """,
            emulator=f"page={page}",
        )

    def test_threads_that_touch_while_pages_move(self, memory):
        """Whatever the order, no store is lost."""
        store(memory, 0)
        over = threading.Event()

        def write(first):
            number = 0
            while not over.is_set():
                number = number % 250 + 1
                for page in range(first, PAGES, 8):
                    ctypes.memset(memory.handle + page * PAGE + first, number, 1)
                for page in range(first, PAGES, 8):
                    seen = ctypes.string_at(memory.handle + page * PAGE + first, 1)[0]
                    lost.extend([page] if seen != number else [])

        lost = []
        threads = [threading.Thread(target=write, args=(first,)) for first in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(150):
                memory.prefetch(Device(0))
                memory.prefetch(Host())
                emulator.touch(memory[: SIZE // 2], Device(0))
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert not lost
