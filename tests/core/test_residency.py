"""residency(): where pages are, byte for byte, with the evidence, for buffers and other memory."""

import copy
import ctypes
import pickle
import random
import threading

import pytest

import managedmem
from constants import EMULATED, MIB, PAGE
from driver import CAPTURE_GLOBAL, CAPTURE_RELAXED, capturing, device_memory
from foreign_objects import CudaArray
from managedmem import Device, Host, ManagedBuffer, emulator
from managedmem.typing import Residency
from page_map import mapped
from page_steps import AROUND, Script
from programs import run_python
from residencies import HINT, HOST, MAP, OFF, check, load, residency, store

pytestmark = pytest.mark.usefixtures("eager")

SIZE = 4 * MIB
PAGES = SIZE // PAGE


def bytes_on_host(buffer, pages):
    """What the page map says, counted by its entries: `pages` are those of the whole memory."""
    first = buffer.handle - buffer.handle % PAGE
    last = buffer.handle + buffer.size
    return sum(
        min(last, at + PAGE) - max(buffer.handle, at)
        for at, here in zip(range(first, last, PAGE), pages, strict=False)
        if here
    )


# Steps; the bytes on the host after them and the last prefetch, on an H100 with driver 580.
RECORDED = [
    ("", 0, None),
    ("host reads a quarter", SIZE // 4, None),
    ("host writes a quarter", SIZE // 4, None),
    ("host writes all", SIZE, None),
    ("host writes all, prefetch D", 0, "D"),
    ("host writes all, prefetch D, host reads one", AROUND, "D"),
    ("host writes all, prefetch D, host reads half", SIZE // 2, "D"),
    ("host writes all, prefetch D, host reads one, host reads half", SIZE // 2, "D"),
    ("host writes all, prefetch D, host reads half, prefetch H", SIZE, "H"),
    ("host writes all, prefetch H, device reads all", 0, "H"),
    ("prefetch D", 0, "D"),
    ("prefetch H", SIZE, "H"),
    ("device reads all", 0, None),
    ("host writes all, set read mostly", SIZE, None),
    ("host writes all, set read mostly, device reads all", SIZE, None),
    ("set read mostly, host writes all", SIZE, None),
    ("set read mostly, host writes all, device reads all", SIZE, None),
    ("set read mostly, host writes all, device reads all, device writes half", SIZE // 2, None),
    (
        "set read mostly, host writes all, device reads all, device writes half, unset read mostly",
        SIZE // 2,
        None,
    ),
    ("set read mostly, host writes all, prefetch D", SIZE, "D"),
    ("prefer H for D, device reads all", 0, None),
    ("prefer H for D, device reads all, host reads all", SIZE, None),
    ("prefer D for H, host writes all", SIZE, None),
    ("host writes all, discard", 0, None),
    ("host writes all, discard, host reads all", SIZE, None),
    ("host writes all, prefetch D, discard", 0, "D"),
    ("host writes all, device fills all", 0, None),
    ("host writes all, prefetch D, device fills all", 0, "D"),
]
NAMES = {"D": Device(0), "H": Host(), None: None}


@pytest.mark.parametrize(
    ("steps", "on_host", "asked"), RECORDED, ids=[steps or "-" for steps, *_ in RECORDED]
)
def test_is_that_of_an_h100(alloc, steps, on_host, asked):
    if not EMULATED and ("device reads" in steps or "device writes" in steps):
        pytest.skip("needs a kernel")
    buffer = alloc(SIZE)
    script = Script(buffer)
    for step in filter(None, steps.split(", ")):
        script.run(step)
    found = residency(buffer)
    assert (found.nbytes, found.on_host, found.not_on_host) == (SIZE, on_host, SIZE - on_host)
    asked = NAMES[asked]
    assert found.last_asked_to == ({asked: SIZE - on_host} if asked and on_host < SIZE else {})
    assert found.fraction_on_host == on_host / SIZE


class TestBytes:
    def test_of_alternate_pages(self, alloc):
        buffer = alloc(SIZE)
        store(buffer)
        for page in range(0, PAGES, 2):
            buffer.range(page * PAGE, PAGE).prefetch(Device(0))
        found = residency(buffer)
        assert found.runs == tuple(
            (page * PAGE, PAGE, HOST, MAP, None)
            if page % 2
            else (page * PAGE, PAGE, OFF, HINT, Device(0))
            for page in range(PAGES)
        )

    def test_of_slices_that_cut_pages(self, alloc):
        buffer = alloc(8 * PAGE)
        store(buffer)
        buffer.range(2 * PAGE, PAGE).prefetch(Device(0))
        part = buffer.range(PAGE + 100, 2 * PAGE)
        assert residency(part).runs == (
            (0, PAGE - 100, HOST, MAP, None),
            (PAGE - 100, PAGE, OFF, HINT, Device(0)),
            (2 * PAGE - 100, 100, HOST, MAP, None),
        )
        assert residency(buffer.range(2 * PAGE + 7, 9)).runs == ((0, 9, OFF, HINT, Device(0)),)
        assert residency(buffer[-1:]).on_host == 1

    def test_of_an_empty_buffer(self, alloc):
        for empty in (managedmem.empty(0), alloc(PAGE)[3:3]):
            found = residency(empty)
            assert (found.nbytes, found.on_host, found.runs) == (0, 0, ())
            assert found.fraction_on_host == 0
            assert str(found) == "0: 0 on the host, 0 not on the host"
            assert "<rect" not in found._repr_html_()

    def test_of_an_array(self):
        with managedmem.empty((100, 3), "float64") as buffer:
            store(buffer)
            assert residency(buffer[10:20]).on_host == 10 * 3 * 8
            assert buffer.residency().nbytes == 2400

    def test_of_wrapped_memory_and_of_a_pool(self, alloc):
        with (
            managedmem.ManagedMemoryResource(pooled=True) as pool,
            pool.allocate(4 * PAGE) as block,
        ):
            wrapped = ManagedBuffer.from_handle(block.handle + 5, 2 * PAGE)
            store(block)
            assert residency(block).on_host == 4 * PAGE
            assert residency(wrapped).on_host == 2 * PAGE

    @pytest.mark.parametrize("seed", range(8))
    def test_equals_the_entries_of_the_page_map(self, alloc, seed):
        chance = random.Random(seed)
        buffer = alloc(SIZE)
        for _ in range(40):
            first = chance.randrange(SIZE)
            part = buffer[first : first + chance.choice([1, 300, 5 * PAGE, SIZE // 3])]
            step = chance.choice(["store", "load", "D", "H"])
            if step == "store":
                store(part)
            elif step == "load":
                load(part)
            else:
                part.prefetch(Device(0) if step == "D" else Host())
        Device(0).sync()
        pages = mapped(buffer)
        found = residency(buffer)
        assert found.on_host == sum(pages) * PAGE
        assert [run.where == HOST for run in found.runs for _ in range(run.nbytes // PAGE)] == pages
        for _ in range(20):
            first, end = sorted(chance.sample(range(SIZE), 2))
            part = buffer[first:end]
            assert residency(part).on_host == bytes_on_host(part, pages[first // PAGE :])

    def test_no_page_is_touched(self, alloc):
        buffer = alloc(SIZE)
        store(buffer[: SIZE // 2])
        buffer[: SIZE // 4].prefetch(Device(0))
        Device(0).sync()
        before = mapped(buffer)
        for _ in range(3):
            residency(buffer)
        assert mapped(buffer) == before

    @pytest.mark.emulator_only
    def test_of_many_runs(self):
        run_python("""
            import ctypes, managedmem
            count, page = 20_000, 4096
            buffer = managedmem.empty(2 * count * page)
            for i in range(count):
                ctypes.memset(buffer.handle + 2 * i * page, 1, 1)
            found = buffer.residency()
            assert found.on_host == count * page
            assert [run.nbytes for run in found.runs] == [page] * (2 * count)
            assert {run.where for run in found.runs[::2]} == {"host"}
            assert len(found._repr_html_()) < 20_000
        """)


class TestPrefetchHints:
    def test_are_never_promoted(self, alloc):
        buffer = alloc(SIZE)
        buffer.prefetch(Device(0))
        (run,) = residency(buffer).runs
        assert run == (0, SIZE, OFF, HINT, Device(0))

    def test_of_pages_that_moved_since(self, alloc):
        """The host's pages have none; a fault of the host undoes a prefetch."""
        buffer = alloc(2 * AROUND)
        buffer.prefetch(Device(0))
        store(buffer[:AROUND])
        assert residency(buffer).runs == (
            (0, AROUND, HOST, MAP, None),
            (AROUND, AROUND, OFF, HINT, Device(0)),
        )

    def test_name_each_device(self, alloc, device0, device1):
        buffer = alloc(2 * MIB)[: 6 * PAGE]  # shares its block with no other allocation
        buffer.range(0, PAGE).prefetch(device0)
        buffer.range(2 * PAGE, 3 * PAGE).prefetch(device1)
        found = residency(buffer)
        assert [tuple(run[1:]) for run in found.runs] == [
            (PAGE, OFF, HINT, device0),
            (PAGE, OFF, MAP, None),
            (3 * PAGE, OFF, HINT, device1),
            (PAGE, OFF, MAP, None),
        ]
        assert found.last_asked_to == {device0: PAGE, device1: 3 * PAGE}
        assert str(found) == (
            "24.0K: 0 on the host, 24.0K not on the host "
            "(4.0K last asked to Device(0), 12.0K last asked to Device(1))"
        )

    @pytest.mark.emulator_only
    def test_cost_two_queries_where_pages_are_alike(self, alloc):
        buffer = alloc(SIZE)
        store(buffer)
        with emulator.recording() as calls:
            buffer.residency()
        assert not calls
        buffer[SIZE // 2 :].prefetch(Device(0))
        with emulator.recording() as calls:
            buffer.residency()
        assert [call.name for call in calls] == [
            "cuMemRangeGetAttributes",
            "cuMemRangeGetAttribute",
        ]
        with emulator.recording() as calls:
            managedmem.residency([buffer, buffer[:PAGE], CudaArray(buffer)])
        names = [call.name for call in calls]
        assert names.count("cuMemRangeGetAttributes") == 2
        assert names.count("cuMemRangeGetAttribute") == 2
        assert names.count("cuPointerGetAttributes") == 1
        assert len(names) == 5

    @pytest.mark.emulator_only
    @pytest.mark.emulator_only
    @pytest.mark.parametrize("function", ["cuMemRangeGetAttributes", "cuMemRangeGetAttribute"])
    @pytest.mark.parametrize("after", [False, True])
    def test_a_query_that_fails_is_an_error(self, alloc, function, after):
        buffer = alloc(SIZE)
        store(buffer)
        buffer[SIZE // 2 :].prefetch(Device(0))
        emulator.fail(function, after=after)
        with pytest.raises(managedmem.CUDAError, match=f"{function} failed"):
            buffer.residency()

    def test_of_numa_hosts(self, alloc):
        buffer = alloc(2 * PAGE)
        store(buffer)
        try:
            buffer.prefetch(Host(numa_id=1))
        except ValueError:
            pytest.skip("needs a second NUMA node")
        emulator.touch(buffer, Device(0), write=True)
        (run,) = residency(buffer).runs
        assert run == (0, 2 * PAGE, OFF, MAP, Host(numa_id=1))


class TestTargets:
    def test_several(self, alloc):
        first, second = alloc(SIZE), alloc(2 * PAGE)
        store(first)
        first[: SIZE // 2].prefetch(Device(0))
        second.prefetch(Device(0))
        found = residency([first, second, first[:0], second[PAGE:]])
        assert (found.nbytes, found.on_host) == (SIZE + 3 * PAGE, SIZE // 2)
        assert found.runs == (
            (0, SIZE // 2, OFF, HINT, Device(0)),
            (SIZE // 2, SIZE // 2, HOST, MAP, None),
            (SIZE, 2 * PAGE, OFF, HINT, Device(0)),
            (SIZE + 2 * PAGE, PAGE, OFF, HINT, Device(0)),
        )
        assert [part.nbytes for part in found.parts] == [SIZE, 2 * PAGE, 0, PAGE]
        assert [part.on_host for part in found.parts] == [SIZE // 2, 0, 0, 0]
        for part in found.parts:
            check(part)
            assert part.parts == (part,)
        assert found.last_asked_to == {Device(0): SIZE // 2 + 3 * PAGE}

    def test_many(self, alloc):
        buffer = alloc(600 * PAGE)
        store(buffer)
        buffer.range(300 * PAGE, PAGE).prefetch(Device(0))
        found = residency(buffer.range(i * PAGE, PAGE) for i in range(600))
        assert len(found.parts) == 600
        assert [i for i, part in enumerate(found.parts) if not part.on_host] == [300]

    @pytest.mark.parametrize("kind", ["memoryview", "array interface", "NumPy"])
    def test_of_other_libraries(self, alloc, kind):
        buffer = alloc(4 * PAGE)
        store(buffer)
        if kind == "NumPy":
            target = pytest.importorskip("numpy").asarray(buffer)[PAGE + 1 :]
        elif kind == "memoryview":
            target = memoryview(buffer)[PAGE + 1 :]
        else:
            target = CudaArray(buffer, shape=(3 * PAGE - 1,), offset=PAGE + 1)
        buffer[: 2 * PAGE].prefetch(Device(0))
        assert residency(target).runs == (
            (0, PAGE - 1, OFF, HINT, Device(0)),
            (PAGE - 1, 2 * PAGE, HOST, MAP, None),
        )
        del target

    def test_a_strided_array_stands_for_its_extent(self, alloc):
        buffer = alloc(8 * PAGE)
        store(buffer)
        array = CudaArray(buffer, shape=(4,), strides=(2 * PAGE,))
        assert residency(array).nbytes == 6 * PAGE + 1

    @pytest.mark.parametrize("bad", [None, 3, "text", 1.5, object()])
    def test_that_are_none(self, bad):
        with pytest.raises(TypeError):
            managedmem.residency(bad)
        with pytest.raises(TypeError, match=r"targets\[1\]"):
            managedmem.residency([managedmem.empty(4), bad])

    def test_without_one(self):
        nothing = managedmem.residency([])
        assert (nothing.nbytes, nothing.on_host, len(nothing.parts)) == (0, 0, 0)
        with pytest.raises(TypeError, match="targets"):
            managedmem.residency()

    def test_of_a_closed_buffer(self, alloc):
        buffer = alloc(PAGE)
        view, other = buffer[:10], alloc(PAGE)
        buffer.close()
        for closed in (buffer, view):
            with pytest.raises(RuntimeError, match="closed"):
                closed.residency()
            with pytest.raises(RuntimeError, match=r"targets\[1\]: ManagedBuffer is closed"):
                managedmem.residency([other, closed])

    def test_of_memory_that_is_not_managed(self):
        with device_memory() as pointer:
            wrapped = ManagedBuffer.from_handle(pointer, PAGE)
            with pytest.raises(ValueError, match=r"not in a managed-memory.*plain device"):
                wrapped.residency()
            with pytest.raises(ValueError, match="plain device"):
                managedmem.residency(wrapped)
        with pytest.raises(
            ValueError,
            match=r"is system memory; .*managedmem\.asarray\(array\) copies an array to one",
        ):
            managedmem.residency(bytearray(PAGE))


class TestSystems:
    @pytest.mark.emulator_only
    def test_without_concurrent_access(self):
        run_python(
            """
            import managedmem
            from outcomes import refusal
            buffer = managedmem.empty(8 << 20)
            for call in (buffer.residency, lambda: managedmem.residency([buffer])):
                text = refusal(NotImplementedError, call)
                assert "concurrent_managed_access" in text, text
                assert "the page map says nothing" in text, text
            assert buffer[:0].residency().nbytes == 0
            """,
            emulator="profile=wsl",
        )

    @pytest.mark.emulator_only
    def test_without_proc(self):
        done = run_python("""
            import managedmem, pytest
            from namespaces import hide_proc
            buffer = managedmem.empty(1 << 20)
            assert buffer.residency().on_host == 0
            hide_proc()
            for call in (buffer.residency, lambda: managedmem.residency([buffer])):
                with pytest.raises(FileNotFoundError) as error:
                    call()
                assert (error.value.filename, error.value.errno) == ("/proc/self/pagemap", 2)
            buffer.close()
        """)
        if "no namespaces" in done.stdout:
            pytest.skip("this process may not make namespaces")

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("nodes", ["0-1", "0,3", "0"])
    def test_with_several_numa_nodes(self, nodes, tmp_path):
        """A file over that of the kernel makes this machine one of two nodes; its pages are on one
        of those that it has."""
        listed = tmp_path / "has_memory"
        listed.write_text(f"{nodes}\n")
        done = run_python(f"""
            import ctypes, managedmem
            from namespaces import BIND, mount_alone
            file = b"/sys/devices/system/node/has_memory"
            mount_alone({str(listed)!r}.encode(), file, flags=BIND)
            buffer = managedmem.empty(1 << 20)
            ctypes.memset(buffer.handle, 1, 1 << 19)
            parts = [buffer[5:], buffer[: 1 << 19], buffer[:0], buffer[1 << 19 :]]
            found = managedmem.residency(parts)
            if {nodes!r} == "0":
                assert found.numa is None
            else:
                if found.numa is None:
                    print("no namespaces")  # the process may not ask
                    raise SystemExit
                assert sum(found.numa.values()) == found.on_host == (1 << 20) - 5, found.numa
                assert [sum((part.numa or {{}}).values()) for part in found.parts] == [
                    (1 << 19) - 5, 1 << 19, 0, 0
                ]
                assert found.parts[2].numa is None and found.parts[3].numa == {{}}
        """)
        if "no namespaces" in done.stdout:
            pytest.skip("this process may not make namespaces, or ask for nodes")

    def test_without_a_descriptor_left(self):
        run_python("""
            import errno, os, resource, managedmem
            from outcomes import refusal
            buffer = managedmem.empty(1 << 20)
            buffer.residency()
            before = len(os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (before + 5, before + 5))
            held = []
            try:
                while True:
                    held.append(os.dup(0))
            except OSError:
                pass
            assert os.strerror(errno.EMFILE) in refusal(OSError, buffer.residency)
            os.close(held.pop())
            for _ in range(10):
                buffer.residency()  # which gives the descriptor back
        """)

    def test_of_a_process_that_may_not_be_inspected(self):
        """The kernel then lets nobody but root read the page map; the error says so."""
        run_python("""
            import ctypes, managedmem
            buffer = managedmem.empty(1 << 20)
            libc, no_dump = ctypes.CDLL(None), 4
            assert libc.prctl(no_dump, 0, 0, 0, 0) == 0
            try:
                buffer.residency()
            except PermissionError as error:
                assert error.filename == "/proc/self/pagemap"
            buffer.close()
        """)

    @pytest.mark.parametrize("mode", [CAPTURE_GLOBAL, CAPTURE_RELAXED], ids=["global", "relaxed"])
    @pytest.mark.usefixtures("current_device")
    def test_captures_survive(self, buf, stream, mode):
        with capturing(stream, mode) as capture:
            assert buf.residency().nbytes == MIB
            assert managedmem.residency([buf, memoryview(buf)]).nbytes == 2 * MIB
        assert capture.result == 0

    def test_objects_outlive_their_memory(self):
        buffer = managedmem.empty(PAGE)
        store(buffer)
        found = buffer.residency()
        buffer.close()
        assert found.runs == ((0, PAGE, HOST, MAP, None),)
        again = pickle.loads(pickle.dumps(copy.copy(found)))
        assert (again.runs, again.to_dict()) == (found.runs, found.to_dict())

    @pytest.mark.parametrize("name", ["on_host", "numa", "runs", "other"])
    def test_objects_do_not_change(self, name):
        found = managedmem.empty(PAGE).residency()
        with pytest.raises(AttributeError):
            setattr(found, name, 3)

    def test_types_are_imported_when_used(self):
        run_python("""
            import sys, managedmem
            assert "managedmem._residency" not in sys.modules
            assert managedmem.typing.Residency.__module__ == "managedmem._residency"
            assert isinstance(managedmem.empty(4).residency(), managedmem.typing.Residency)
        """)
        assert isinstance(managedmem.empty(4).residency(), Residency)


class TestThreads:
    def test_that_move_pages_meanwhile(self, alloc):
        """Each answer is one that the page map gave; all its bytes are somewhere."""
        buffer = alloc(SIZE)
        store(buffer)
        over = threading.Event()

        def move(first):
            part = buffer[first : first + SIZE // 2]
            while not over.is_set():
                part.prefetch(Device(0))
                ctypes.memset(part.handle, 3, part.size)
                part.prefetch(Host())

        threads = [threading.Thread(target=move, args=(i * SIZE // 2,)) for i in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(100):
                check(buffer.residency())
                check(managedmem.residency([buffer[:PAGE], buffer]))
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def test_that_close_the_buffer_meanwhile(self):
        for _ in range(50):
            buffer = managedmem.empty(SIZE)
            answers = []

            def ask(buffer=buffer, answers=answers):
                try:
                    while True:
                        answers.append(buffer.residency())
                except RuntimeError as error:
                    answers.append(str(error))

            thread = threading.Thread(target=ask)
            thread.start()
            while not answers:
                pass
            buffer.close()
            thread.join()
            assert answers[-1] == "ManagedBuffer is closed"
