"""Working sets and offload() where a signal, a capture or a host function comes between."""

import copy
import ctypes
import gc

import numpy
import pytest

from constants import EMULATED, MIB, PAGE
from driver import capturing, raw_driver
from kernels import read_by_device, write_by_device
from managedmem import Device, ManagedWorkingSet, Stream, WorkingSet, emulator


class Interrupted:
    """The engine of a set, behind one call of which a signal arrives."""

    def __init__(self, engine, name):
        self.engine, self.name, self.armed = engine, name, False

    def __getattr__(self, name):
        found = getattr(self.engine, name)
        if name != self.name:
            return found

        def call(*arguments):
            result = found(*arguments)
            if self.armed:
                self.armed = False
                raise KeyboardInterrupt
            return result

        return call


def interrupted(working, name):
    working._frames = Interrupted(working._frames, name)
    return working._frames


def layer(value, nbytes=PAGE):
    return numpy.full(nbytes, value, "uint8")


class TestSignals:
    def test_in_add(self, stream):
        with WorkingSet(4 * PAGE, Device(0)) as working:
            engine = interrupted(working, "add")
            engine.armed = True
            with pytest.raises(KeyboardInterrupt):
                working.add(layer(1))
            assert len(working) == 0 and working._frames.stats()[0]["parts"] == 0
            group = working.add(layer(2))
            with group.use(stream=stream) as use:
                assert set(read_by_device(use.arrays[0], stream)) == {2}

    def test_in_add_of_managed_memory(self, alloc):
        with ManagedWorkingSet(4 * PAGE, Device(0)) as working:
            interrupted(working, "add_targets").armed = True
            with pytest.raises(KeyboardInterrupt):
                working.add([alloc(PAGE), alloc(PAGE)])
            assert len(working) == 0 and working._frames.stats()[0]["parts"] == 0

    @pytest.mark.parametrize("is_late", [False, True])
    def test_in_close_of_a_use(self, stream, is_late):
        with WorkingSet(PAGE, Device(0)) as working:
            engine = interrupted(working, "release")
            group, other = working.add(layer(1)), working.add(layer(2))
            kept = group.use(stream=stream)
            use = group.use(stream=stream)
            late = use.arrays if is_late else None
            engine.armed = True
            with pytest.raises(KeyboardInterrupt):
                use.close()
            del use
            gc.collect()
            other.use(stream=stream).close()
            assert set(read_by_device(kept.arrays[0], stream)) == {1}
            kept.close()
            del late, kept
            gc.collect()
            working.remove(group)
            with other.use(stream=stream) as use:
                assert use.is_resident

    def test_in_remove(self, stream):
        with WorkingSet(PAGE, Device(0)) as working:
            engine = interrupted(working, "remove")
            group = working.add(layer(1))
            engine.armed = True
            with pytest.raises(KeyboardInterrupt):
                working.remove(group)
            other = working.add(layer(2, 100))
            assert [*working] == [other]
            with pytest.raises(RuntimeError, match="was removed"):
                group.use(stream=stream)

    def test_in_use(self, stream):
        with WorkingSet(PAGE, Device(0)) as working:
            engine = interrupted(working, "acquire")
            group, other = working.add(layer(1), "write"), working.add(layer(2))
            engine.armed = True
            with pytest.raises(KeyboardInterrupt):
                group.use(stream=stream)
            with other.use(stream=stream) as use:
                assert use.is_resident
            working.remove(group)

    def test_in_a_call_of_an_offloaded_model(self):
        torch = pytest.importorskip("torch", reason="needs torch")
        if not EMULATED:
            pytest.skip("the model is on the CPU")
        from managedmem.torch import offload

        model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(8)])
        before = [parameter.clone() for parameter in model.parameters()]
        blocks = [str(number) for number in range(8)]
        handle = offload(model, 0, budget=6000, blocks=blocks)
        parts = list(handle._lanes[0].groups.values())
        inputs = torch.ones(1, 16)
        with torch.no_grad():
            expected = model(inputs)
            for name in ("acquire", "release"):
                engine = Interrupted(parts[1].frames, name)
                for part in parts:
                    part.frames = engine
                engine.armed = True
                with pytest.raises(KeyboardInterrupt):
                    model(inputs)
                assert torch.equal(model(inputs), expected)
        handle.remove()
        assert all(map(torch.equal, model.parameters(), before))


class TestCaptures:
    """What the collector ends, and what fails, leaves the captures of the caller alone."""

    @pytest.mark.parametrize("lost", ["array", "use"])
    def test_an_end_on_the_stream_that_captures(self, stream, lost):
        with WorkingSet(8 * PAGE, Device(0)) as working:
            group = working.add(layer(1))
            use = group.use(stream=stream)
            box = [use if lost == "use" else use.arrays]
            if lost == "array":
                use.close()
            del use
            with capturing(stream) as captured:
                box.clear()
            assert captured.result == 0
            group.use(stream=stream).close()
            working.remove(group)

    def test_a_close_on_the_stream_that_captures(self, stream):
        with WorkingSet(8 * PAGE, Device(0)) as working:
            use = working.add(layer(1)).use(stream=stream)
            with capturing(stream) as captured, pytest.raises(RuntimeError, match="end of a use"):
                use.close()
            assert captured.result == 0
            use.close()

    @pytest.mark.emulator_only("injects a fault")
    def test_a_failed_load_beside_it(self, stream):
        with WorkingSet(8 * PAGE, Device(0)) as working, Stream() as other:
            group = working.add(layer(3))
            with capturing(stream) as captured:
                emulator.fail("cuMemcpyAsync")
                group.use(stream=other).close()
                emulator.clear_failures()
            assert captured.result == 0
            with group.use(stream=other) as use:
                assert use.is_resident and set(read_by_device(use.arrays[0], other)) == {3}


def test_scratch_of_an_open_use_is_not_discarded(stream, alloc):
    nbytes = 2 * MIB
    scratch, first, second, values, found = [alloc(nbytes) for _ in range(5)]
    values.fill(7)
    with ManagedWorkingSet(2 * nbytes, Device(0)) as working:
        mine = working.add(scratch, "scratch")
        others = [working.add(each) for each in (first, second)]
        with others[0].use(stream=stream), others[1].use(stream=stream):
            use = mine.use(stream=stream)  # no room: by page faults
            values.copy_to(scratch, stream=stream)
        mine.use(stream=stream).close()
        for group in 2 * others:
            group.use(stream=stream).close()
        found.copy_from(scratch, stream=stream)
        stream.sync()
        assert set(bytes(found)) == {7}
        use.close()


@pytest.mark.emulator_only("injects a fault")
@pytest.mark.parametrize("calls", [1, 2])
def test_a_use_beside_one_whose_order_is_refused(stream, calls):
    with WorkingSet(4 * PAGE, Device(0)) as working:
        group = working.add(layer(1), "write")
        first = group.use(stream=stream, access="read")
        for name in ("cuStreamWaitEvent", "cuEventSynchronize")[:calls]:
            emulator.fail(name)
        second = group.use(stream=stream)
        emulator.clear_failures()
        write_by_device(second.arrays[0], 7, stream)
        second.close()
        first.close()
        with group.use(stream=stream) as use:
            assert set(read_by_device(use.arrays[0], stream)) == {7}
        with group.use_on_host() as arrays:
            assert set(bytes(arrays[0])) == {7}


def test_a_write_in_a_capture_beside_a_late_array(stream):
    """The array keeps the frame, whose contents are old once the capture's work is known."""
    with WorkingSet(4 * PAGE, Device(0)) as working, Stream() as other:
        group = working.add(layer(1), "write")
        with group.use(stream=other, access="read") as use:
            late = use.arrays
        with capturing(stream), group.use(stream=stream) as use:
            assert use.is_resident  # in a frame of the graph, which writes the home
        with group.use(stream=other) as use:
            assert not use.is_resident
        del late
        with group.use(stream=other) as use:
            assert use.is_resident


@pytest.mark.emulator_only("injects a fault, and chooses the schedule")
def test_a_failure_beside_a_host_function_that_drops_an_array(stream):
    emulator.schedule("lazy")
    with WorkingSet(8 * PAGE, Device(0)) as working:
        group, other = working.add(layer(1)), working.add(layer(2))
        with group.use(stream=stream) as use:
            box = [use.arrays]
        del use
        stream.sync()

        @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        def drop(_):
            box.clear()

        assert raw_driver().cuLaunchHostFunc(ctypes.c_void_p(stream.handle), drop, None) == 0
        emulator.fail("cuMemcpyAsync")
        other.use(stream=stream).close()
        emulator.clear_failures()
        stream.sync()
        working.remove(group)


@pytest.mark.filterwarnings("ignore:a group of .* exceeds the budget")
@pytest.mark.parametrize("bad", ["text", 1.5])
def test_a_bad_stream_of_a_use_at_home(stream, bad):
    with WorkingSet(4 * PAGE, Device(0)) as working:
        for group in (working.add(layer(1, 8 * PAGE), "write"), working.add([])):
            with group.use(stream=stream), pytest.raises(TypeError):
                group.use(stream=bad)
            working.remove(group)


def test_copies_are_refused():
    with WorkingSet(4 * PAGE, Device(0)) as working:
        group = working.add(layer(1))
        for made in (working, group, group.use()):
            for duplicate in (copy.copy, copy.deepcopy):
                with pytest.raises(TypeError, match="cannot be copied"):
                    duplicate(made)
