"""The exported functions for other libraries' allocators, called by name as torch calls them."""

import ctypes

import pytest

import managedmem
from constants import EMULATED, PAGE
from driver import CAPTURE_GLOBAL, capturing
from managedmem import Device, Host, ManagedBuffer, _managedmem
from presets import LIBRARY, functions
from programs import run_python
from races import race_over


def seen(pointer, size=PAGE):
    return ManagedBuffer.from_handle(pointer, size)


class TestBlocks:
    def test_are_managed_memory_on_whole_pages(self):
        allocate, free = functions()
        pointers = [allocate(100), allocate(PAGE + 1)]
        try:
            for pointer in pointers:
                assert pointer % PAGE == 0
                assert seen(pointer, 100).is_managed
                ctypes.memset(pointer, 7, 100)
                assert bytes(seen(pointer, 100)) == b"\x07" * 100
            assert len({pointer // PAGE for pointer in pointers}) == 2
        finally:
            for pointer in pointers:
                free(pointer)

    def test_have_the_advice_of_their_preset(self, members):
        allocate, free = functions(Host(), members, True)
        plain, _ = functions()
        advised, bare = allocate(3 * PAGE), plain(3 * PAGE)
        try:
            block = seen(advised, 3 * PAGE)
            assert block.preferred_location is Host()
            assert block.accessed_by == set(members)
            assert block.read_mostly is True
            block = seen(bare, 3 * PAGE)
            assert (block.preferred_location, block.read_mostly) == (None, False)
            assert not block.accessed_by
        finally:
            free(advised)
            free(bare)

    @pytest.mark.parametrize("ordinal", [0, 1])
    def test_may_prefer_the_device_they_are_for(self, ordinal):
        if ordinal >= Device.count():
            pytest.skip("needs two devices")
        before = Device()
        allocate, free = functions(own_device=True)
        pointer = allocate(PAGE, ordinal)
        try:
            assert seen(pointer).preferred_location is Device(ordinal)
            assert seen(pointer).accessed_by == {Device(ordinal)}
            assert seen(pointer).device_id == ordinal
            assert Device() is before, "the caller's current device has changed"
        finally:
            free(pointer)

    def test_can_be_had_while_the_thread_captures_a_graph(self, stream):
        allocate, free = functions(Host(), [Device(0)])
        with capturing(stream, CAPTURE_GLOBAL) as capture:
            pointer = allocate(PAGE)
            assert pointer
            free(pointer)
        assert capture.result == 0

    def test_several_threads(self):
        def work(location):
            allocate, free = functions(location)
            for _ in range(20):
                pointer = allocate(PAGE)
                assert seen(pointer).preferred_location is location
                free(pointer)

        race_over(work, [Host(), Device(0)] * 2)


class TestRefusals:
    @pytest.mark.parametrize("device", [-1, 99])
    def test_no_such_device(self, device, capfd):
        allocate, _ = functions()
        assert allocate(PAGE, device) is None
        assert f"there is no device {device}\n" in capfd.readouterr().err

    def test_more_memory_than_there_can_be_is_left_to_the_caller_to_report(self, capfd):
        allocate, _ = functions()
        assert allocate(1 << 62) is None
        assert capfd.readouterr().err == ""

    def test_a_pointer_that_is_not_managed_is_not_freed(self, capfd):
        _, free = functions()
        text = ctypes.create_string_buffer(8)
        free(ctypes.addressof(text))
        assert "is not managed memory" in capfd.readouterr().err
        free(None)
        assert capfd.readouterr().err == ""

    @pytest.mark.emulator_only
    def test_a_refused_advice_gives_the_block_back(self, capfd):
        from managedmem import emulator

        allocate, _ = functions(Host(), [Device(0)])
        before = emulator.live()
        for nth in (1, 2):
            emulator.fail("cuMemAdvise", nth=nth, code=719)
            assert allocate(PAGE) is None
            assert emulator.live() == before
            text = capfd.readouterr().err
            assert text.startswith(
                f"managedmem: cannot allocate {PAGE} bytes of managed memory for Device(0): "
            )
            assert "cuMemAdvise failed with CUDA_ERROR_LAUNCH_FAILED (719)" in text
            assert text.count("\n") == 1

    def test_after_a_fork(self):
        done = run_python("""
            import os
            from managedmem import Host
            from presets import functions
            allocate, free = functions(Host())
            pointer = allocate(4096)
            child = os.fork()
            if child == 0:
                free(pointer)
                os._exit(allocate(4096) is not None)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            free(pointer)
        """)
        assert "forked" in done.stderr


class TestPresets:
    def test_equal_ones_share_their_functions(self):
        first = _managedmem._register_preset(Host(), [Device(0), Host()], False, False)
        assert first == _managedmem._register_preset(Host(), {Host(), Device(0)}, False, False)
        assert first != _managedmem._register_preset(Host(), [Device(0)], False, False)
        assert first[1] == "managedmem_free"

    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            ((0, (), False, False), TypeError, "Device or Host"),
            ((None, None, False, False), TypeError, "iterable"),
            ((None, [None], False, False), ValueError, "location is required"),
            ((None, [Host(0)], False, False), ValueError, "NUMA host"),
            ((None, (), 1, False), TypeError, "read_mostly takes a bool"),
            ((Host(numa_id=99), (), False, False), ValueError, "no NUMA node 99"),
        ],
        ids=repr,
    )
    def test_are_checked_before_the_first_block(self, arguments, error, text):
        with pytest.raises(error, match=text):
            _managedmem._register_preset(*arguments)

    def test_take_what_the_set_of_a_buffer_gives(self, buf):
        buf.accessed_by = [Device(0)]
        allocate, free = functions(None, buf.accessed_by)
        pointer = allocate(PAGE)
        assert seen(pointer).accessed_by == {Device(0)}
        free(pointer)

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("function", ["cuMemAllocManaged", "cuMemAdvise", "cuMemFree"])
    def test_say_what_the_driver_refuses(self, function):
        from managedmem import CUDAError, emulator

        # The free happens, so that nothing is left behind, and reports an error nevertheless.
        emulator.fail(function, code=719, after=function == "cuMemFree")
        with pytest.raises(CUDAError) as caught:
            functions(Host(), [Device(0)], True)
        assert (caught.value.code, caught.value.function) == (719, function)

    def test_have_an_end(self):
        run_python(
            """
            from itertools import combinations
            from managedmem import Device, Host, _managedmem
            locations = [Device(0), Device(1), Host()]
            made = []
            try:
                for read_mostly in (False, True):
                    for count in range(4):
                        for accessed_by in combinations(locations, count):
                            for preferred in (None, *locations):
                                made.append(_managedmem._register_preset(
                                    preferred, accessed_by, read_mostly, False))
            except RuntimeError as error:
                assert "all 32 allocators are taken" in str(error), error
            assert len(set(made)) == len(made) == 32
            assert _managedmem._register_preset(None, (), False, False) == made[0]
            """,
            emulator="devices=2",
        )

    def test_are_shared_by_subinterpreters(self):
        run_python("""
            from subinterpreters import PRELUDE
            exec(PRELUDE)
            from managedmem import Host, _managedmem
            names = _managedmem._register_preset(Host(), (), True, False)
            interpreter = create("legacy")
            run(interpreter, "from managedmem import Host, _managedmem\\n"
                f"assert _managedmem._register_preset(Host(), (), True, False) == {names!r}")
        """)


def test_the_library_can_be_opened_again_by_its_path():
    """torch opens it by path and must get the functions that know the presets."""
    name, _ = _managedmem._register_preset(Host(), (), False, False)
    again = ctypes.CDLL(_managedmem.__file__)
    address = ctypes.cast(getattr(again, name), ctypes.c_void_p).value
    assert address == ctypes.cast(getattr(LIBRARY, name), ctypes.c_void_p).value


@pytest.mark.skipif(not EMULATED, reason="the driver's shutdown is up to CUDA here")
def test_blocks_may_live_until_the_interpreter_has_gone():
    done = run_python("""
        import atexit, threading
        from presets import functions
        allocate, free = functions()
        pointer = allocate(4096)
        atexit.register(free, pointer)
    """)
    assert done.stderr == ""


def test_the_trial_leaves_no_current_device_behind():
    before = managedmem.Device()
    functions(Host(), [Device(0)])
    assert managedmem.Device() is before
