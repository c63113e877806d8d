"""The controls of managedmem.emulator: what `fail` takes, and what it says of what it does not."""

import re

import pytest

import managedmem
from managedmem import emulator

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
    def test_names_what_was_meant(self, wrong, right):
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
