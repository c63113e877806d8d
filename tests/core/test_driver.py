"""Which driver is opened, when, and what is said when there is none; a process for each case."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import managedmem
from constants import EMULATED
from programs import run_python

SHOW_ERROR = """
import managedmem as mm
try:
    mm.{call}
except mm.{error} as error:
    print("type", type(error).__name__)
    print("code", error.code, error.name, error.function)
    print("text", error)
else:
    raise SystemExit("no error")
"""
USES = ["capabilities()", "Device.count()", "Device(0)", "Stream()", "empty(4096)"]


def show_error(call, error="CUDAError", **how):
    return run_python(SHOW_ERROR.format(call=call, error=error), **how).stdout


class TestImport:
    def test_loads_no_driver(self):
        run_python(
            """
            import managedmem, managedmem.emulator
            managedmem.Host(1); managedmem.Host.numa_current()
            maps = open("/proc/self/maps").read()
            assert "libcuda.so" not in maps, "libcuda is loaded"
            assert "libmanagedmem_emulator" not in maps, "the emulator is loaded"
            managedmem._managedmem._driver_info()
            assert "libmanagedmem_emulator" in open("/proc/self/maps").read()
            """
        )

    def test_works_without_any_driver(self):
        run_python(
            """
            import pickle
            import managedmem as mm
            hosts = [mm.Host(), mm.Host(3), mm.Host.numa_current()]
            assert pickle.loads(pickle.dumps(hosts)) == hosts
            mm.ManagedMemoryResource
            assert mm.ManagedBuffer.__doc__
            """,
            driver="/nonexistent/libcuda.so.1",
        )


class TestSelection:
    def test_the_emulator_by_name(self):
        run_python(
            """
            import managedmem as mm
            info = mm._managedmem._driver_info()
            assert info["emulated"] is True
            assert info["path"].endswith("libmanagedmem_emulator.so"), info
            assert mm.emulator.is_active()
            """
        )

    def test_a_path_that_is_not_text(self, tmp_path):
        """A path may hold any bytes. It reads as os.fsdecode() gives it, and can be opened
        again."""
        path = os.path.join(os.fsencode(tmp_path), b"caf\xe9-emulator.so")
        shutil.copy(Path(managedmem.__file__).parent / "libmanagedmem_emulator.so", path)
        run_python(
            f"""
            import ctypes, os
            import managedmem as mm
            info = mm._managedmem._driver_info()
            assert os.fsencode(info["path"]) == {path!r}
            assert info["tried"] == [info["path"] + ": opened"]
            assert mm.emulator.live()  # opens the library under that name
            """,
            driver=os.fsdecode(path),
        )
        run_python(
            f"""
            import os
            import managedmem as mm
            from outcomes import refusal
            mm._managedmem._select_driver(os.fsdecode({path!r}))
            assert mm.emulator.is_active() is True
            text = refusal(RuntimeError, mm._managedmem._select_driver, "cuda")
            assert os.fsdecode({path!r}) in text
            """,
            driver=None,
        )

    @pytest.mark.parametrize("name", [b"caf\xe9.so", 450 * "é".encode()], ids=["bytes", "long"])
    def test_a_missing_path_that_is_not_text(self, name):
        """A message that is too long may be cut inside a character."""
        path = os.fsdecode(b"/nonexistent/" + name)
        run_python(
            f"""
            import os
            import managedmem as mm
            from outcomes import refusal
            text = refusal(mm.DriverNotFoundError, mm._managedmem._driver_info)
            assert os.fsdecode({os.fsencode(path)[:61]!r}) in text, text
            """,
            driver=path,
        )

    def test_a_file_by_its_path(self):
        path = run_python(
            "import managedmem as mm; print(mm._managedmem._driver_info()['path'])"
        ).stdout.strip()
        run_python(
            f"""
            import managedmem as mm
            assert mm._managedmem._driver_info()["path"] == {path!r}
            assert mm.Device.count() == 2
            """,
            driver=path,
        )

    @pytest.mark.parametrize("name", ["nonsense", "libcuda.so.1", "EMULATOR"])
    def test_another_word_is_refused_with_the_choices(self, name):
        done = run_python(
            "import managedmem as mm; mm._managedmem._driver_info()", driver=name, check=False
        )
        assert done.returncode == 1
        assert name in done.stderr
        assert "emulator" in done.stderr
        assert "MANAGEDMEM_DRIVER" in done.stderr

    def test_another_word_from_python_keeps_the_choice(self):
        run_python(
            """
            import managedmem as mm
            from outcomes import refusal
            for word in ("nonsense", "", "libcuda.so.1"):
                text = refusal(ValueError, mm._managedmem._select_driver, word)
                assert f'got "{word}"' in text, text
            assert mm.emulator.is_active() is True
            """
        )

    def test_the_variable_is_read_at_the_first_use(self):
        run_python(
            """
            import os
            import managedmem as mm
            os.environ["MANAGEDMEM_DRIVER"] = "emulator"
            assert mm.emulator.is_active() is True
            os.environ["MANAGEDMEM_DRIVER"] = "/nonexistent/libcuda.so"
            assert mm.Device.count() == 2
            """,
            driver="/nonexistent/libcuda.so.1",
        )

    def test_from_python_before_the_first_use(self):
        run_python(
            """
            import managedmem as mm
            from managedmem import _managedmem
            _managedmem._select_driver("emulator")
            assert mm.emulator.is_active() is True
            """,
            driver="/nonexistent/libcuda.so.1",
        )

    def test_from_python_after_the_first_use_is_too_late(self):
        run_python(
            """
            import managedmem as mm
            from managedmem import _managedmem, emulator
            from outcomes import refusal
            mm._managedmem._driver_info()
            for late, name in ((_managedmem._select_driver, "cuda"), (emulator.enable, "wsl")):
                text = refusal(RuntimeError, late, name)
                assert "open" in text or "already" in text, text
            """
        )

    @pytest.mark.parametrize("bad", ["7", "None", "b'emulator'"])
    def test_from_python_takes_a_string(self, bad):
        done = run_python(
            f"from managedmem import _managedmem; _managedmem._select_driver({bad})", check=False
        )
        assert "TypeError" in done.stderr

    def test_enable_sets_the_machine_up(self):
        run_python(
            """
            import managedmem as mm
            mm.emulator.enable(devices=3, numa_nodes=4, driver_version=12080)
            assert mm.Device.count() == 3
            assert mm._managedmem._driver_info()["version_string"] == "12.8"
            assert mm.emulator.is_active()
            """,
            driver=None,
        )

    def test_enable_may_be_repeated(self):
        """As a cell of a notebook is."""
        run_python(
            """
            import managedmem as mm
            from outcomes import refusal
            for settings in ({"devices": 3, "schedule": "lazy"}, {}):
                mm.emulator.enable(devices=3, schedule="lazy")
                assert mm.Device.count() == 3
                mm.emulator.enable(**settings)
            text = refusal(RuntimeError, lambda: mm.emulator.enable(devices=2))
            assert "'devices=3,schedule=lazy'" in text and "'devices=2'" in text
            assert mm.Device.count() == 3
            """,
            driver=None,
        )

    def test_threads_open_it_once(self):
        run_python(
            """
            import managedmem as mm
            from threads import at_once
            seen = at_once(*[lambda: mm._managedmem._driver_info()["path"]] * 8)
            assert len(set(seen)) == 1, seen
            """
        )


class TestNoDriver:
    @pytest.mark.parametrize("call", USES)
    def test_every_first_use_says_what_was_tried_and_mentions_the_emulator(self, call):
        path = "/nonexistent/libcuda.so.1"
        shown = show_error(call, "DriverNotFoundError", driver=path)
        assert "type DriverNotFoundError" in shown
        assert "code None None None" in shown
        assert path in shown
        assert "MANAGEDMEM_DRIVER=emulator" in shown

    def test_of_the_system(self):
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            pass
        else:
            pytest.skip("this machine has a driver")
        for driver in (None, "cuda", ""):
            shown = show_error("Device.count()", "DriverNotFoundError", driver=driver)
            assert "libcuda.so.1" in shown

    def test_a_second_attempt_fails_the_same_way(self):
        run_python(
            """
            import managedmem as mm
            from outcomes import refusal
            first, second = (refusal(mm.DriverNotFoundError, mm.Device.count) for _ in range(2))
            assert first == second
            """,
            driver="/nonexistent/libcuda.so.1",
        )

    def test_a_file_that_is_no_library(self, tmp_path):
        file = tmp_path / "libcuda.so.1"
        file.write_text("not a library")
        shown = show_error("Device.count()", "DriverNotFoundError", driver=file)
        assert str(file) in shown

    def test_a_library_that_is_no_driver(self):
        path = managedmem._managedmem.__file__
        shown = show_error("Device.count()", driver=path)
        assert path in shown

    def test_a_driver_without_a_device(self):
        shown = show_error("Device.count()", emulator="noinit=1")
        assert "CUDA_ERROR_NO_DEVICE" in shown
        assert "100" in shown


OLD_DRIVER = """
typedef int CUresult;
CUresult cuInit(unsigned flags) { (void)flags; return 0; }
CUresult cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
CUresult cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags)
{
    (void)name; (void)version; (void)flags;
    *function = 0;
    return 500; /* CUDA_ERROR_NOT_FOUND */
}
CUresult cuGetProcAddress_v2(const char *name, void **function, int version,
                             unsigned long long flags, int *status)
{
    if (status) *status = 1;
    (void)cuGetProcAddress(name, function, version, flags);
    return 0;
}
"""


@pytest.mark.parametrize(("version", "words"), [(12010, "12.1"), (11080, "11.8"), (9020, "9.2")])
def test_a_driver_that_is_too_old_names_both_versions(tmp_path, version, words):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source, library = tmp_path / "old.c", tmp_path / "libcuda_old.so"
    source.write_text(OLD_DRIVER)
    subprocess.run(
        [compiler, "-shared", "-fPIC", f"-DVERSION={version}", source, "-o", library], check=True
    )
    shown = show_error("Device.count()", "DriverTooOldError", driver=library)
    assert "type DriverTooOldError" in shown
    assert words in shown
    assert "12.2" in shown
    assert str(library) in shown


class TestEmulatorConfiguration:
    @pytest.mark.parametrize(
        ("config", "taken"),
        [
            ("devices=0", "devices is a number from 1 to 16"),
            ("devices=x", "devices is a number from 1 to 16"),
            ("devices", "devices is a number from 1 to 16"),
            ("driver=9000", "driver is a number from 12020 to 13050"),
            ("driver=13060", "driver is a number from 12020 to 13050"),
            ("page=5000", "page is a power of two from 4096 to 65536"),
            ("schedule=now", "schedule is eager or lazy"),
            ("discard=2", "discard is poison, keep or zero"),
            ("queue_absent=2", "queue_absent is a number from 0 to 1"),
            ("queue_drop=-1", "queue_drop is a number from 0 to 1048576"),
        ],
    )
    def test_a_wrong_configuration_is_explained(self, config, taken):
        code = "import managedmem as mm; mm.Device.count()"
        done = run_python(code, emulator=config, check=False)
        assert done.returncode == 1
        error = done.stderr.strip().splitlines()[-1]
        assert "DriverNotFoundError" in error
        assert f"MANAGEDMEM_EMULATOR: cannot use '{config}'; {taken}" in error

    def test_the_error_lists_keys_and_profiles(self):
        for config, taken in [
            ("colour=red", ["profile", "schedule", "discard", "devices", "noinit", "queue_late"]),
            ("profile=nowhere", managedmem.emulator.PROFILES),
            ("profile=" + "x" * 4000, managedmem.emulator.PROFILES),
        ]:
            done = run_python(
                "import managedmem; managedmem.Device.count()", emulator=config, check=False
            )
            words = done.stderr.strip().splitlines()[-1].partition("; ")[2]
            assert all(word in words for word in taken)

    @pytest.mark.parametrize(
        ("config", "check"),
        [
            ("devices=1", "mm.Device.count() == 1"),
            ("devices=4", "len(mm.Device.all()) == 4"),
            ("driver=12020", "mm._managedmem._driver_info()['version'] == 12020"),
            ("driver=12080", "mm._managedmem._driver_info()['version_string'] == '12.8'"),
            ("driver=13010", "mm._managedmem._driver_info()['version_string'] == '13.1'"),
            ("driver=13050", "mm._managedmem._driver_info()['version'] == 13050"),
            ("concurrent=0", "mm.Device(0).concurrent_managed_access is False"),
            ("pageable=1", "mm.Device(0).pageable_memory_access is True"),
            ("capacity_mib=64", "mm.Device(0).memory_info.total == 64 << 20"),
            ("profile=h200", "mm.Device.count() == 1"),
            ("profile=h200-x2", "mm.Device.count() == 2"),
            ("profile=h200,devices=3", "mm.Device.count() == 3"),
        ],
    )
    def test_each_key_counts(self, config, check):
        run_python(f"import managedmem as mm; assert {check}", emulator=config)

    @pytest.mark.parametrize("version", [13000, 13010, 13020, 13030, 13040, 13050])
    def test_newer_drivers_have_the_functions_of_13_0_and_newer_forms(self, version):
        """A host function launched by the form of 13.1 has one more argument, the mode."""
        run_python(
            f"""
            import ctypes
            import managedmem as mm

            assert mm._managedmem._driver_info()["version"] == {version}
            driver = ctypes.CDLL(mm._managedmem._driver_info()["path"])

            def look_up(name, version):
                found, status = ctypes.c_void_p(1), ctypes.c_int(9)
                code = driver.cuGetProcAddress_v2(
                    name, ctypes.byref(found), version, ctypes.c_uint64(0), ctypes.byref(status)
                )
                return code, status.value, found.value

            untouched = 1, 9, 1
            for asked in range(13000, 13070, 10):
                advise, launch = look_up(b"cuMemAdvise", asked), look_up(b"cuLaunchHostFunc", asked)
                if asked > {version}:
                    assert (advise, launch) == (untouched, untouched)
                    continue
                assert advise == look_up(b"cuMemAdvise", 12020)
                old = look_up(b"cuLaunchHostFunc", 10000)
                assert launch[:2] == old[:2] == (0, 0)
                assert (launch == old) is (asked < 13010)
                if launch != old:
                    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ran := [].append)
                    call = ctypes.CFUNCTYPE(
                        ctypes.c_int,
                        ctypes.c_void_p,
                        ctypes.c_void_p,
                        ctypes.c_void_p,
                        ctypes.c_uint,
                    )(launch[2])
                    mm.Device(0).set_current()
                    pointer = ctypes.cast(function, ctypes.c_void_p)
                    with mm.emulator.recording() as calls:
                        results = [call(None, pointer, 7, mode) for mode in range(3)]
                    mm.Device(0).sync()
                    assert results == [0, 0, 1]
                    assert ran.__self__ == [7, 7]
                    assert [c.name for c in calls] == ["cuLaunchHostFunc"] * 3
            """,
            emulator=f"driver={version}",
        )

    def test_one_numa_node_forgets_the_node(self):
        run_python(
            """
            import managedmem as mm
            with mm.empty(4096) as buf:
                buf.preferred_location = mm.Host(0)
                assert buf.preferred_location in (mm.Host(), None)
            """,
            emulator="profile=h200",
        )

    def test_pageable_machines_take_system_memory(self):
        pytest.importorskip("numpy", reason="needs NumPy")
        run_python(
            """
            import numpy
            import managedmem as mm
            array = numpy.ones(1 << 20, dtype="u1")
            mm.advise(array, "set_read_mostly")
            mm.advise(array, "set_preferred_location", mm.Device(0))
            mm.prefetch(array, mm.Device(0))
            mm.Device(0).sync()
            assert (array == 1).all()
            """,
            emulator="pageable=1",
        )


class TestDriverInfo:
    def test_says_what_was_opened(self):
        info = managedmem._managedmem._driver_info()
        assert set(info) >= {
            "path",
            "version",
            "version_string",
            "emulated",
            "device_count",
            "tried",
        }
        assert info["emulated"] is EMULATED
        assert info["device_count"] == managedmem.Device.count()
        major, minor = info["version"] // 1000, info["version"] % 1000 // 10
        assert info["version_string"] == f"{major}.{minor}"
        assert info["version"] >= 12020
        assert isinstance(info["path"], str)
        assert isinstance(info["tried"], list)

    def test_agrees_with_the_emulator_module(self):
        assert managedmem.emulator.is_active() is managedmem.capabilities().emulated


def test_the_interpreter_ends_cleanly_with_everything_open():
    done = run_python(
        """
        import managedmem as mm
        buf = mm.empty((4, 4096), "float32")
        view, stream, proxy = memoryview(buf), mm.Stream(), buf.accessed_by
        capsule = buf[1:].__dlpack__()
        buf.prefetch(mm.Device(0), stream=stream)
        """
    )
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("length", "error"), [(4095, "DriverNotFoundError"), (4096, "ValueError"), (9999, "ValueError")]
)
def test_the_longest_path_of_a_driver(length, error):
    """A path takes 4096 bytes with the one that ends it; a longer one would be another file's."""
    path = "/" + "x" * (length - 1)
    done = run_python(
        """
        import managedmem
        try:
            managedmem.Device.count()
        except Exception as error:
            print(type(error).__name__, "is longer than 4096 bytes" in str(error))
        """,
        driver=path,
    )
    assert done.stdout.split() == [error, str(error == "ValueError")]


def test_what_was_tried_can_be_asked_again_and_again():
    """The record is read in turn with openings: a turn that is never given back hangs the next."""
    done = run_python(
        """
        import faulthandler
        import managedmem
        faulthandler.dump_traceback_later(30, exit=True)
        for _ in range(3):
            print(len(managedmem._managedmem._driver_info()["tried"]))
        """
    )
    assert done.stdout.split() == ["1"] * 3
