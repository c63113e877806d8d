"""CUDAWarning: frees that the driver refuses where nothing can be raised."""

import gc
import sys
import warnings

import pytest

import managedmem
from managedmem import CUDAWarning, DeviceMemoryResource, ManagedMemoryResource, Stream, emulator
from races import in_thread

pytestmark = pytest.mark.emulator_only(reason="makes frees fail")
THINGS = {
    "cuMemFree": lambda: managedmem.empty(65536),
    "cuMemFreeAsync": lambda: ManagedMemoryResource(pooled=True).allocate(65536),
    "cuStreamDestroy": Stream,
    "cuMemPoolDestroy": lambda: DeviceMemoryResource(0),
}


def drop(call, code=999):
    thing = THINGS[call]()
    emulator.fail(call, code=code, after=True)  # so that the test leaks nothing
    del thing
    gc.collect()
    emulator.clear_failures()


@pytest.mark.parametrize("call", THINGS)
class TestDropping:
    def test_warns_with_the_error_and_what_leaks(self, call):
        with pytest.warns(CUDAWarning, match=rf"^{call} failed with .*\(999\).*leaked") as caught:
            drop(call)
        assert caught[0].filename == __file__
        assert call not in ("cuMemFree", "cuMemFreeAsync") or "65536 bytes" in str(
            caught[0].message
        )

    def test_once_for_each_line(self, call):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(3):
                drop(call)
        assert len(caught) == 1

    def test_a_driver_that_is_shut_down_is_not_reported(self, call):
        drop(call, code=4)  # a warning would be an error

    def test_as_an_error_goes_to_the_hook(self, call, monkeypatch):
        seen = []
        monkeypatch.setattr(sys, "unraisablehook", lambda args: seen.append(args.exc_type))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            drop(call)
            in_thread(lambda: drop(call))
        assert seen == [CUDAWarning] * 2
