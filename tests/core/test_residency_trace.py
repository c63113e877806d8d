"""residency() while a trace runs: the devices that have pages, and pages that the host has too."""

import ctypes
import gc
import random
import signal
import threading

import pytest

import managedmem
from constants import EMULATED, MIB, PAGE
from driver import CAPTURE_GLOBAL, CAPTURE_RELAXED, capturing, managed_memory, raw_driver
from managedmem import Device, Host, ManagedBuffer
from page_map import mapped
from programs import run_python
from residencies import (
    BOTH,
    DEVICE,
    HINT,
    HOST,
    MAP,
    OFF,
    TRACE,
    check,
    load,
    residency,
    store,
)

SIZE = 4 * MIB
HALF = SIZE // 2
FOREIGN = "that other code allocated"

pytestmark = pytest.mark.usefixtures("eager")


@pytest.fixture
def eager():
    if EMULATED:
        from managedmem import emulator

        emulator.schedule("eager")
        yield
        emulator.disturb_queue()
    else:
        yield


@pytest.fixture
def trace():
    with managedmem.trace() as running:
        yield running


def places(target):
    """The runs without their last prefetches, joined: (bytes, where, evidence, devices)."""
    joined = []
    for run in residency(target).runs:
        found = (run.where, run.evidence, run.devices)
        if joined and joined[-1][1:] == found:
            joined[-1] = (joined[-1][0] + run.nbytes, *found)
        else:
            joined.append((run.nbytes, *found))
    return joined


def on_device(number, nbytes=SIZE):
    return (nbytes, DEVICE, TRACE, (Device(number),))


def on_both(nbytes=SIZE):
    return (nbytes, BOTH, TRACE, (Device(0),))


def on_host(nbytes=SIZE):
    return (nbytes, HOST, TRACE, ())


def on_host_by_map(nbytes=SIZE):
    """The host has it; whether a device has it too is not known."""
    return (nbytes, HOST, MAP, ())


class TestPlaces:
    def test_of_prefetches(self, alloc, trace):
        buffer = alloc(SIZE)
        assert places(buffer) == [(SIZE, OFF, MAP, ())]
        store(buffer)
        assert places(buffer) == [on_host_by_map()]
        buffer.prefetch(Device(0))
        assert places(buffer) == [on_device(0)]
        buffer[:HALF].prefetch(Host())
        assert places(buffer) == [on_host(HALF), on_device(0, HALF)]

    def test_of_loads(self, alloc, trace):
        buffer = alloc(SIZE)
        store(buffer)
        buffer.prefetch(Device(0))
        load(buffer[:HALF])
        assert places(buffer) == [on_host(HALF), on_device(0, HALF)]
        store(buffer[HALF:], 2)
        assert places(buffer) == [on_host()]

    def test_of_a_fill(self, alloc, trace):
        """A write of the device, by faults."""
        buffer = alloc(SIZE)
        store(buffer)
        buffer.fill(3)
        Device(0).sync()
        assert {(run.where, run.devices) for run in residency(buffer).runs} == {
            (DEVICE, (Device(0),))
        }

    def test_of_duplicates(self, alloc, trace):
        buffer = alloc(SIZE)
        buffer.read_mostly = True
        store(buffer)
        assert places(buffer) == [on_host_by_map()]
        buffer.prefetch(Device(0))
        assert places(buffer) == [on_both()]
        buffer[:HALF].read_mostly = False
        found = residency(buffer[:HALF])
        assert {(run.where, run.evidence) for run in found.runs} <= {(HOST, TRACE), (DEVICE, TRACE)}
        assert places(buffer[HALF:]) == [on_both(HALF)]

    def test_of_duplicates_that_a_write_ends(self, alloc, trace):
        buffer = alloc(SIZE)
        buffer.read_mostly = True
        store(buffer)
        buffer.prefetch(Device(0))
        buffer[:HALF].fill(7)
        assert places(buffer) == [on_device(0, HALF), on_both(HALF)]

    @pytest.mark.emulator_only
    def test_of_kernels(self, alloc, device1, trace):
        from managedmem import emulator

        buffer = alloc(SIZE)
        store(buffer)
        emulator.touch(buffer[:HALF], device1)
        assert places(buffer) == [on_device(1, HALF), on_host_by_map(HALF)]
        emulator.touch(buffer[:HALF], Device(0), write=True)
        assert places(buffer) == [on_device(0, HALF), on_host_by_map(HALF)]

    @pytest.mark.emulator_only
    def test_of_copies_on_several_devices(self, alloc, device1, trace):
        from managedmem import emulator

        buffer = alloc(SIZE)
        buffer.read_mostly = True
        store(buffer)
        emulator.touch(buffer, Device(0))
        emulator.touch(buffer[:HALF], device1)
        found = residency(buffer)
        assert places(buffer) == [
            (HALF, BOTH, TRACE, (Device(0), device1)),
            (HALF, BOTH, TRACE, (Device(0),)),
        ]
        assert found.on_device == {Device(0): SIZE, device1: HALF}
        assert str(found) == (
            "4.0M: 4.0M on the host (2.0M also on Device(0) and Device(1), "
            "2.0M also on Device(0)), 0 not on the host"
        )
        emulator.touch(buffer, device1, write=True)
        assert places(buffer) == [on_device(1)]

    def test_of_pages_that_slices_cut(self, alloc, trace):
        buffer = alloc(8 * PAGE)
        store(buffer)
        buffer.range(2 * PAGE, PAGE).prefetch(Device(0))
        assert places(buffer.range(PAGE + 100, 2 * PAGE)) == [
            on_host_by_map(PAGE - 100),
            on_device(0, PAGE),
            on_host_by_map(100),
        ]
        assert places(buffer.range(2 * PAGE + 7, 9)) == [on_device(0, 9)]

    def test_of_several_targets(self, alloc, trace):
        first, second = alloc(SIZE), alloc(8 * PAGE)
        store(first)
        store(second)
        first.prefetch(Device(0))
        second[: 2 * PAGE].prefetch(Device(0))
        found = residency([second[PAGE:], first[:0], first[HALF:], second, memoryview(first)[5:9]])
        assert found.problem is None
        assert [part.on_device for part in found.parts] == [
            {Device(0): PAGE},
            None,
            {Device(0): HALF},
            {Device(0): 2 * PAGE},
            {Device(0): 4},
        ]
        assert found.on_device == {Device(0): HALF + 3 * PAGE + 4}

    def test_of_pool_memory(self, trace):
        with (
            managedmem.ManagedMemoryResource(pooled=True) as pool,
            pool.allocate(SIZE) as block,
        ):
            Device(0).sync()
            store(block)
            block.prefetch(Device(0))
            assert places(block) == [on_device(0)]

    def test_as_text_and_values(self, alloc, trace):
        buffer = alloc(SIZE)
        store(buffer)
        buffer[:HALF].prefetch(Device(0))
        found = residency(buffer)
        assert str(found) == "4.0M: 2.0M on the host, 2.0M on Device(0)"
        values = found.to_dict()
        assert values["on_device"] == {"Device(0)": HALF}
        assert values["problem"] is None
        assert values["runs"][0]["devices"] == ["Device(0)"]
        assert values["runs"][0]["where"] == DEVICE
        assert values["runs"][1]["devices"] == []
        assert found.last_asked_to == {Device(0): HALF}
        assert found.not_on_host == HALF


class Shadow:
    """A buffer with contents, the pages that have moved, and random uses of its parts."""

    def __init__(self, buffer, seed, read_mostly):
        self.buffer, self.random = buffer, random.Random(seed)
        self.moved = [False] * (buffer.size // PAGE)
        self.on_host = mapped(buffer)
        self.copies = read_mostly
        self.unknown = []  # runs that moved, and have no evidence of the trace
        if read_mostly:
            buffer.read_mostly = True

    def step(self):
        first, end = sorted(self.random.choices(range(self.buffer.size + 1), k=2))
        part = self.buffer[first:end] if end - first > 2 * PAGE else self.buffer
        use = self.random.choice([store, load, self.to_device, self.to_device, self.to_host, fill])
        use(part)
        Device(0).sync()
        now = mapped(self.buffer)
        for page, (before, after) in enumerate(zip(self.on_host, now, strict=True)):
            self.moved[page] = self.moved[page] or before != after
        self.on_host = now

    def to_device(self, part):
        part.prefetch(Device(0))

    def to_host(self, part):
        part.prefetch(Host())

    def check(self):
        """A page that moved has a place, which the page map does not contradict."""
        start = self.random.randrange(self.buffer.size - PAGE)
        found = residency(self.buffer[start:])
        assert found.problem is None
        for run in found.runs:
            first = (start + run.offset) // PAGE
            end = -(-(start + run.offset + run.nbytes) // PAGE)
            assert self.on_host[first:end] == [run.where in (HOST, BOTH)] * (end - first)
            assert run.devices in ((), (Device(0),))
            if run.evidence != TRACE and any(self.moved[first:end]):
                self.unknown.append(run)
            assert self.copies or run.where != BOTH


def fill(part):
    part.fill(9)


class TestRandomUses:
    """Without the emulated driver's books, which tests/robustness has, so also on a GPU."""

    @pytest.mark.parametrize("read_mostly", [False, True])
    @pytest.mark.parametrize("seed", range(3))
    def test_of_parts(self, alloc, seed, read_mostly):
        buffer = alloc(SIZE)
        store(buffer)
        with managedmem.trace() as t:
            shadow = Shadow(buffer, seed, read_mostly)
            for step in range(40):
                shadow.step()
                if step % 15 == 7:
                    t.mark("part")
                shadow.check()
        assert any(shadow.moved)
        assert t.complete
        # Pages that thrash stay on the host, where it need not map them.
        assert t.total.thrashing > 0 or not shadow.unknown, shadow.unknown[0]


class TestEvidence:
    def test_from_before_the_trace_is_none(self, alloc):
        buffer = alloc(SIZE)
        store(buffer)
        buffer[:HALF].prefetch(Device(0))
        with managedmem.trace():
            found = residency(buffer)
            assert [run.evidence for run in found.runs] == [HINT, MAP]
            assert found.on_device == {}
            assert found.problem is None
            buffer[HALF:].prefetch(Device(0))
            assert places(buffer) == [(HALF, OFF, HINT, ()), on_device(0, HALF)]

    def test_ends_with_the_trace(self, alloc):
        buffer = alloc(SIZE)
        store(buffer)
        with managedmem.trace() as t:
            buffer.prefetch(Device(0))
            t.mark("there")
            assert places(buffer) == [on_device(0)]
        found = residency(buffer)
        assert [run.where for run in found.runs] == [OFF]
        assert (found.on_device, found.problem) == (None, None)
        with managedmem.trace():
            assert residency(buffer).on_device == {}

    def test_is_not_that_of_earlier_memory_at_the_address(self):
        """Freed addresses come back; their moves belong to other memory."""
        with managedmem.trace():
            buffer = managedmem.empty(SIZE)
            address = buffer.handle
            store(buffer)
            buffer.prefetch(Device(0))
            Device(0).sync()
            buffer.close()
            held = []
            for _ in range(20):
                held.append(managedmem.empty(SIZE))
                assert places(held[-1]) == [(SIZE, OFF, MAP, ())]
                if held[-1].handle == address:
                    break

    def test_of_discarded_pages_is_none(self, alloc, trace):
        if managedmem.driver_info()["version"] < 13000:
            pytest.skip("the driver has no discard")
        buffer = alloc(SIZE)
        store(buffer)
        buffer.prefetch(Device(0))
        buffer[:HALF].discard()
        Device(0).sync()
        assert [run[1:3] for run in residency(buffer).runs][-1] == (HALF, DEVICE)
        assert residency(buffer[:HALF]).on_device == {}
        buffer[:HALF].prefetch(Device(0))
        assert residency(buffer[:HALF]).on_device == {}  # whatever was moved

    def test_of_memory_of_other_code_is_none(self, trace):
        address = managed_memory(SIZE)
        try:
            plain = ManagedBuffer.from_handle(address, SIZE)
            store(plain)
            plain.prefetch(Device(0))
            found = residency(plain)
            assert [run[1:4] for run in found.runs] == [(SIZE, OFF, HINT)]
            assert found.on_device is None
            assert FOREIGN in found.problem
            plain.name = "named"  # it is known from now on
            assert places(plain) == [on_device(0)]
            assert residency(plain).problem is None
        finally:
            raw_driver().cuMemFree_v2(ctypes.c_uint64(address))

    @pytest.mark.emulator_only
    @pytest.mark.parametrize(
        ("fault", "reason"),
        [("drop", "of its events were lost"), ("garbage", "records of its source were not")],
    )
    def test_with_missing_events_is_none(self, alloc, fault, reason):
        from managedmem import emulator

        buffer = alloc(SIZE)
        store(buffer)
        with managedmem.trace():
            buffer.prefetch(Device(0))
            emulator.disturb_queue(**{fault: 1})
            for i in range(4):  # every second record of garbage has a type that is known
                buffer[i * HALF // 4 : (i + 1) * HALF // 4].prefetch(Host())
            emulator.disturb_queue()
            found = residency(buffer)
            assert [run.where for run in found.runs] == [HOST, OFF]
            assert found.on_device is None
            assert found.problem.startswith("the running trace does not show the places of pages: ")
            assert reason in found.problem
            assert found.to_dict()["problem"] == found.problem
        assert residency(buffer).problem is None

    @pytest.mark.emulator_only
    def test_of_a_queue_that_delivers_nothing_is_none(self, alloc):
        from managedmem import emulator

        buffer = alloc(SIZE)
        store(buffer)
        with managedmem.trace() as t:
            buffer.prefetch(Device(0))
            emulator.disturb_queue(refused=True)
            found = residency(buffer)
            emulator.disturb_queue()
            assert [run.where for run in found.runs] == [OFF]
            assert "delivers no events" in found.problem
            assert places(buffer) == [on_device(0)]  # nothing was lost
        assert t.complete

    def test_beyond_the_limit_is_none(self, alloc):
        buffer = alloc(PAGE)
        store(buffer)
        with managedmem.trace(limit=1000):
            for _ in range(510):
                buffer.prefetch(Device(0))
                buffer.prefetch(Host())
            assert "more events than its limit of 1000" in residency(buffer).problem


class TestTrace:
    def test_goes_on_as_before(self, alloc):
        """residency() takes nothing from the trace, and adds no event."""
        buffer = alloc(SIZE)
        store(buffer)
        with managedmem.trace() as t:
            for _ in range(3):
                buffer.prefetch(Device(0))
                assert residency(buffer).on_device == {Device(0): SIZE}
                buffer.prefetch(Host())
                residency(buffer)
            t.mark("half")
            buffer.prefetch(Device(0))
        assert t.complete
        assert t.total.by_cause["requested"] == (4 * SIZE, 3 * SIZE, 0)
        assert t.slices[0].total.moved == 6 * SIZE
        assert t.slices[1].total.moved == SIZE

    @pytest.mark.parametrize("mode", [CAPTURE_GLOBAL, CAPTURE_RELAXED], ids=["global", "relaxed"])
    @pytest.mark.usefixtures("current_device")
    def test_captures_survive(self, buf, stream, mode, trace):
        buf.prefetch(Device(0))
        Device(0).sync()
        with capturing(stream, mode) as capture:
            assert buf.residency().on_device == {Device(0): MIB}
            assert managedmem.residency([buf, memoryview(buf)]).nbytes == 2 * MIB
        assert capture.result == 0

    def test_marks_and_ends_meanwhile(self, alloc):
        """Threads read while another one starts, marks and stops traces; nothing waits for ever."""
        buffers = [alloc(16 * PAGE) for _ in range(3)]
        over, errors = threading.Event(), []

        def work(buffer):
            try:
                while not over.is_set():
                    store(buffer)
                    buffer.prefetch(Device(0))
                    found = residency(buffer)
                    assert found.on_host == 0
                    assert found.on_device in (None, {}, {Device(0): 16 * PAGE})
                    assert found.problem is None
                    buffer.prefetch(Host())
                    assert residency(buffer).on_device in (None, {})
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=[buffer]) for buffer in buffers]
        for thread in threads:
            thread.start()
        try:
            for i in range(12):
                with managedmem.trace() as t:
                    for label in "abc"[: i % 4]:
                        t.mark(label)
                assert t.complete
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert not errors, errors

    def test_interrupts_come_through(self, alloc, trace):
        """An interrupt is raised behind the call, and leaves the trace as it is."""
        buffer = alloc(SIZE)
        store(buffer)
        buffer.prefetch(Device(0))
        armed = False

        def interrupt(number, frame):
            nonlocal armed
            if armed:
                armed = False
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        caught = 0
        gc.disable()  # Python loses the error of a handler in a callback of the collector
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
            while caught < 20:
                try:
                    armed = True
                    while True:
                        check(buffer.residency())
                except KeyboardInterrupt:
                    caught += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            gc.enable()
        assert places(buffer) == [on_device(0)]

    @pytest.mark.emulator_only
    def test_in_a_forked_child(self):
        """The child has neither the driver nor the trace; nothing hangs, and the parent goes on."""
        run_python("""
            import os, ctypes, managedmem
            from managedmem import Device
            buffer = managedmem.empty(1 << 20)
            ctypes.memset(buffer.handle, 1, buffer.size)
            with managedmem.trace():
                buffer.prefetch(Device(0))
                child = os.fork()
                if child == 0:
                    try:
                        buffer.residency()
                    except RuntimeError as error:
                        os._exit(0 if "fork" in str(error) else 1)
                    os._exit(2)
                assert os.waitpid(child, 0)[1] == 0
                Device(0).sync()
                assert buffer.residency().on_device == {Device(0): 1 << 20}
        """)
