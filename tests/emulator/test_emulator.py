"""The controls of managedmem.emulator: fail(), residency() and touch(), and their errors."""

import re

import pytest

import managedmem
from managedmem import Device, Host, emulator

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
