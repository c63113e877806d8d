"""The controls of managedmem.emulator: failures, memory, disturbed queues, and their errors."""

import errno
import os
import re

import pytest

import managedmem
from event_queue import EventQueue
from managedmem import Device, Host, emulator
from programs import run_python

pytestmark = pytest.mark.emulator_only


def refusal(function):
    with pytest.raises(ValueError) as error:
        emulator.fail(function)
    return str(error.value)


class TestFail:
    def test_names_the_function_that_is_not_there(self):
        assert "no function 'cuMemNope'" in refusal("cuMemNope")

    @pytest.mark.parametrize(
        ("wrong", "right"),
        [
            ("cuMemAdvize", "cuMemAdvise"),
            ("memAdvise", "cuMemAdvise"),
            ("cuMemAdvise_v2", "cuMemAdvise"),
            ("cuMemPrefetch", "cuMemPrefetchAsync"),
            ("cudaMemPrefetchAsync", "cuMemPrefetchAsync"),
        ],
    )
    def test_names_the_similar_function(self, wrong, right):
        assert re.search(rf"did you mean .*\b{right}\b", refusal(wrong))

    @pytest.mark.parametrize("wrong", ["", "zzz", "é", "cu" * 100], ids=ascii)
    def test_lists_all_names_where_none_is_near(self, wrong):
        text = refusal(wrong)
        for name in ("cuMemAdvise", "cuMemDiscardBatchAsync", "cuStreamCreate", '"*"'):
            assert name in text

    @pytest.mark.parametrize("name", ["cuGetProcAddress", "cuGetErrorName", "cuDriverGetVersion"])
    def test_functions_that_never_fail_are_refused(self, name):
        """They would wait for ever: no call of them looks for failures."""
        assert f"no function '{name}' that can fail" in refusal(name)

    def test_every_name_that_is_offered_is_taken(self):
        names = re.findall(r"\bcu[A-Z]\w+", refusal("zzz"))
        assert len(names) > 60
        for name in names:
            emulator.clear_failures()
            emulator.fail(name, nth=1000)

    def test_two_that_are_due_at_once_come_one_after_the_other(self, buf):
        emulator.fail("cuMemPrefetchAsync", code=719)
        emulator.fail("cuMemPrefetchAsync", code=720)
        for code in (719, 720):
            with pytest.raises(managedmem.CUDAError) as error:
                buf.prefetch(managedmem.Host())
            assert error.value.code == code
        buf.prefetch(managedmem.Host())

    def test_what_is_refused_is_not_set_up(self, buf):
        refusal("cuMemAdvice")
        buf.read_mostly = True
        assert not emulator.failure_fired()

    def test_too_many_say_how_to_go_on(self):
        for _ in range(64):
            emulator.fail("cuMemAdvise", nth=1000)
        with pytest.raises(ValueError, match=r"clear_failures\(\)"):
            emulator.fail("cuMemAdvise", nth=1000)
        emulator.clear_failures()
        emulator.fail("cuMemAdvise")
        with managedmem.empty(4096) as buffer, pytest.raises(managedmem.CUDAError):
            buffer.read_mostly = True

    @pytest.mark.parametrize(
        ("arguments", "error", "words"),
        [
            ((None,), TypeError, "function must be a str .*got None"),
            ((b"cuMemAdvise",), TypeError, "function must be a str"),
            (("cuMemAdvise", 0), ValueError, "nth counts from 1, got 0"),
            (("cuMemAdvise", 1.0), TypeError, "nth must be an int, got 1.0"),
            (("cuMemAdvise", True), TypeError, "nth must be an int, got True"),
            (("cuMemAdvise", 1, "x"), TypeError, "code must be an int, got 'x'"),
            (("cuMemAdvise", 1, 0), ValueError, "code must be the CUresult of a failure.*got 0"),
            (("cuMemAdvise", 1, 1 << 31), ValueError, "code must be the CUresult of a failure"),
        ],
    )
    def test_wrong_arguments_are_explained(self, arguments, error, words, buf):
        with pytest.raises(error, match=words):
            emulator.fail(*arguments)
        buf.read_mostly = True


class TestMemory:
    """The arguments of residency() and touch()."""

    @pytest.fixture(params=["residency", "touch"])
    def look(self, request):
        if request.param == "residency":
            return emulator.residency
        return lambda buffer: emulator.touch(buffer, Device(0))

    @pytest.mark.parametrize("value", [3, None, bytearray(4)], ids=repr)
    def test_refuses_other_objects(self, look, value):
        with pytest.raises(TypeError, match=f"needs a ManagedBuffer, got {type(value).__name__}"):
            look(value)

    def test_refuses_closed_buffers(self, look):
        for buffer in (managedmem.empty(4096), managedmem.empty(0)):
            buffer.close()
            with pytest.raises(ValueError, match=r"needs an open buffer, got .* closed"):
                look(buffer)

    def test_refuses_other_memory(self, look):
        with (
            managedmem.DeviceMemoryResource(0) as pool,
            pool.allocate(4096) as buffer,
            pytest.raises(ValueError, match="needs managed memory"),
        ):
            look(buffer)

    def test_an_empty_buffer_has_no_residency(self, buf):
        before = emulator.counters()
        for empty in (buf[:0], managedmem.empty(0)):
            emulator.touch(empty, Device(0))
            assert emulator.residency(empty) is None
        assert emulator.residency(buf) == Host()
        assert emulator.counters() == before


class TestLastingFailures:
    """As after a fault of a kernel, nothing that needs the context works any more."""

    def test_every_later_call_fails_until_it_is_cleared(self, buf):
        stream = managedmem.Stream()
        emulator.fail("cuStreamSynchronize", code=719, lasting=True)
        buf.prefetch(managedmem.Host())
        for call in (stream.sync, stream.query, lambda: buf.prefetch(managedmem.Host())):
            with pytest.raises(managedmem.CUDAError) as caught:
                call()
            assert caught.value.code == 719
        assert emulator.failure_fired()
        emulator.clear_failures()
        stream.sync()
        stream.close()

    def test_devices_still_answer(self, buf):
        emulator.fail("cuMemAdvise", code=719, lasting=True)
        with pytest.raises(managedmem.CUDAError):
            buf.read_mostly = True
        assert managedmem.Device.count() >= 1
        managedmem.Device(0).set_current()
        emulator.clear_failures()
        assert not buf.read_mostly


class TestDisturbedQueues:
    """An event queue whose moves are counted in C, through the emulated system calls."""

    @pytest.fixture
    def queue(self):
        with EventQueue() as queue:
            yield queue

    def test_undisturbed_every_page_has_its_record(self, queue):
        assert queue.store_pages(100) == (100, 0)

    @pytest.mark.parametrize(
        ("disturbance", "records", "dropped"),
        [
            ({"drop": 10}, 90, 10),
            ({"drop": 1}, 0, 100),
            ({"lose": 4}, 75, 0),
            ({"garbage": 5}, 120, 0),
            ({"late": 1}, 100, 0),
            ({"late": 2}, 0, 0),
        ],
    )
    def test_records_are_missing_or_more(self, queue, disturbance, records, dropped):
        emulator.disturb_queue(**disturbance)
        assert queue.store_pages(100) == (records, dropped)

    def test_each_call_replaces_the_one_before(self, queue):
        emulator.disturb_queue(drop=2)
        emulator.disturb_queue(lose=5)
        assert queue.store_pages(100) == (80, 0)
        emulator.disturb_queue()
        assert queue.store_pages(100) == (100, 0)

    @pytest.mark.parametrize(("name", "code"), [("absent", errno.ENOENT), ("denied", errno.EACCES)])
    def test_the_device_can_be_away(self, name, code):
        for value in (True, 1):
            emulator.disturb_queue(**{name: value})
            with pytest.raises(OSError, match=os.strerror(code)):
                EventQueue().open()
        emulator.disturb_queue(**{name: False})
        with EventQueue():
            pass

    def test_queues_can_be_refused(self):
        emulator.disturb_queue(refused=True)
        with pytest.raises(OSError, match="status 0x56"):
            EventQueue().open()
        emulator.disturb_queue()

    def test_a_layout_can_be_unknown(self, queue):
        queue.store_pages(1)
        ours = queue.last_record()
        emulator.disturb_queue(layout=True)
        queue.store_pages(1)
        theirs = queue.last_record()
        assert len(ours) == len(theirs) == 64
        assert ours[0] == theirs[0] == 1  # a fault of the host
        assert ours[1] == 1  # the kind of access
        assert theirs[1] == 0

    @pytest.mark.parametrize(
        ("arguments", "error", "words"),
        [
            ({"absent": 2}, TypeError, "absent must be True or False, got 2"),
            ({"layout": "x"}, TypeError, "layout must be True or False, got 'x'"),
            ({"drop": -1}, ValueError, "drop must be from 0 to 1048576, got -1"),
            ({"late": (1 << 20) + 1}, ValueError, "late must be from 0 to 1048576, got 1048577"),
            ({"lose": 1.5}, TypeError, "lose must be an int, got 1.5"),
            ({"garbage": True}, TypeError, "garbage must be an int, got True"),
        ],
    )
    def test_wrong_arguments_change_nothing(self, queue, arguments, error, words):
        emulator.disturb_queue(drop=10)
        with pytest.raises(error, match=words):
            emulator.disturb_queue(**arguments)
        assert queue.store_pages(100) == (90, 10)

    @pytest.mark.parametrize(
        ("config", "printed"),
        [
            ("queue_absent=1", "[Errno 2]"),
            ("queue_denied=1", "[Errno 13]"),
            ("queue_refused=1", "status 0x56"),
            ("queue_layout=1", "(100, 0) 0"),
            ("queue_drop=10", "(90, 10) 1"),
            ("queue_lose=4", "(75, 0) 1"),
            ("queue_garbage=5", "(120, 0) 1"),
            ("queue_late=2", "(0, 0) 0"),
            ("queue_drop=0,queue_late=1", "(100, 0) 1"),
        ],
    )
    def test_each_key_counts(self, config, printed):
        done = run_python(
            """
            from event_queue import EventQueue
            try:
                with EventQueue() as queue:
                    print(queue.store_pages(100), queue.last_record()[1])
            except OSError as error:
                print(error)
            """,
            emulator=config,
        )
        assert printed in done.stdout
