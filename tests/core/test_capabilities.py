"""capabilities() says of each operation what the operation itself says."""

import pickle
import types

import pytest

import managedmem
from calls import names
from managedmem import CUDAError, Device, Host, _capabilities, capabilities, emulator
from managedmem.typing import Capabilities
from programs import run_python

FLAGS = {
    *("concurrent_managed_access", "pageable_memory_access"),
    *("pageable_memory_access_uses_host_page_tables", "direct_managed_mem_access_from_host"),
    *("memory_pools_supported", "managed_pools", "advice", "prefetch", "batch_prefetch", "discard"),
    *("traces", "residency", "page_migration", "mapped_access"),
}

AGREEMENT = """
    import sys, warnings
    import managedmem as mm
    from managedmem import Device, Host
    warnings.simplefilter("ignore")
    found = mm.capabilities()
    buf = mm.empty(1 << 16)
    parts = [buf[: 1 << 14], buf[1 << 15 :]]
    def works(act):
        try:
            act()
        except (mm.CUDAError, NotImplementedError, mm.TraceUnavailableError, ValueError):
            return False
        return True
    def record():
        with mm.trace():
            pass
    acts = {
        "managed_pools": lambda: mm.ManagedMemoryResource(pooled=True).close(),
        "memory_pools_supported": lambda: mm.DeviceMemoryResource(Device(0)).close(),
        "advice": lambda: mm.advise(buf, "set_accessed_by", Device(0)),
        "prefetch": lambda: mm.prefetch(parts, Host()),
        "batch_prefetch": lambda: mm.prefetch(parts, Device(0), dispatch="batch"),
        "discard": lambda: mm.discard(buf),
        "pageable_memory_access": lambda: mm.prefetch(memoryview(bytearray(1 << 16)), Host()),
        "traces": record,
        "residency": buf.residency,
    }
    def stays(act):
        act()
        Device(0).sync()
        return buf.residency().on_host == buf.size
    if found.prefetch and found.residency:
        memoryview(buf)[:] = bytes(buf.size)
        assert stays(lambda: buf.prefetch(Device(0))) != found.page_migration
        memoryview(buf)[:] = bytes(buf.size)
        buf.preferred_location = Host()
        buf.accessed_by = [Device(0)]
        with mm.empty(buf.size) as copy:
            copy.preferred_location = Device(0)
            assert stays(lambda: buf.copy_to(copy)) == found.mapped_access
        buf.preferred_location, buf.accessed_by = None, ()
    for name, act in acts.items():
        assert works(act) == getattr(found, name), name
    assert works(lambda: buf.discard_prefetch(Host())) == found.discard
    for device in Device.all():
        one = mm.capabilities(device)
        assert one.devices == (device,)
        assert one.concurrent_managed_access == device.concurrent_managed_access
        assert one.reasons.keys() == found.reasons.keys()
    print(*sorted(found.reasons), sep=",")
"""
NO_ACCESS = {"concurrent_managed_access", "advice", "prefetch", "batch_prefetch"}
NO_ACCESS |= {"discard", "managed_pools", "traces", "residency", "page_migration", "mapped_access"}
PLAIN = {"pageable_memory_access", "pageable_memory_access_uses_host_page_tables"}
PLAIN |= {"direct_managed_mem_access_from_host"}
OLD = {"managed_pools", "batch_prefetch", "discard"}


@pytest.mark.parametrize(
    "system, lacking",
    [
        ("profile=default", PLAIN),
        ("profile=h200", PLAIN),
        ("profile=wsl", PLAIN | NO_ACCESS),
        ("profile=old12", PLAIN | OLD),
        ("profile=old12,concurrent=0", PLAIN | NO_ACCESS | OLD),
        ("pageable=1", PLAIN - {"pageable_memory_access"}),
        ("integrated=1", PLAIN | {"page_migration", "traces"}),
        ("confidential=1", PLAIN | {"mapped_access"}),
        ("queue_absent=1", PLAIN | {"traces"}),
        ("queue_denied=1", PLAIN | {"traces"}),
    ],
)
def test_it_agrees_with_the_operations(system, lacking):
    done = run_python(AGREEMENT, emulator=system)
    assert set(done.stdout.strip().split(",")) == lacking


def test_it_agrees_with_the_driver_in_use():
    found = capabilities()
    info = managedmem._managedmem._driver_info()
    assert (found.driver_version, found.emulated) == (info["version"], info["emulated"])
    assert (found.driver_path, list(found.driver_attempts)) == (info["path"], info["tried"])
    assert found.devices == Device.all()
    for name in _capabilities._ATTRIBUTES:
        assert getattr(found, name) == all(getattr(d, name) for d in Device.all())
    assert found.reasons.keys() == {name for name in FLAGS if not getattr(found, name)}
    assert bool(found.trace_source) == found.traces


def test_reasons_name_what_is_lacking():
    done = run_python(
        """
        import managedmem as mm
        print(mm.capabilities().reasons)
        print(mm.capabilities(mm.Device(1)).reasons)
        """,
        emulator="profile=wsl",
    )
    both, one = map(eval, done.stdout.splitlines())
    access = "concurrent_managed_access is 0 on Device(0), Device(1)"
    assert both["discard"] == one["discard"] == one["batch_prefetch"] == access
    assert both["managed_pools"] == one["managed_pools"] == access
    assert both["concurrent_managed_access"] == access
    assert one["concurrent_managed_access"] == "concurrent_managed_access is 0 on Device(1)"
    assert "advice that names a device is refused" in one["advice"]
    assert "Device(0)" not in one["prefetch"] and "concurrent" in one["traces"]
    old = run_python(
        "import managedmem as mm; print(mm.capabilities().reasons['discard'])",
        emulator="profile=old12",
    )
    assert old.stdout == "needs a driver with CUDA 13.0, this one has 12.2\n"


@pytest.mark.parametrize(
    "system, ability, reason",
    [
        (
            "integrated=1",
            "page_migration",
            "integrated is 1 on Device(0): the memory is the host's",
        ),
        ("integrated=1", "traces", "every device is integrated: it shares the memory of the host"),
        ("confidential=1", "mapped_access", "a read by Device(0) moved pages of the host, as in"),
    ],
)
def test_reasons_of_what_moves(system, ability, reason):
    done = run_python(
        f"import managedmem as mm; print(mm.capabilities().reasons[{ability!r}])",
        emulator=f"devices=1,{system}",
    )
    assert done.stdout.startswith(reason)


def test_the_answer_is_a_value():
    found = capabilities()
    assert found == capabilities() and hash(found) == hash(capabilities())
    assert pickle.loads(pickle.dumps(found)) == found
    assert isinstance(found, Capabilities)
    for name in ("discard", "reasons", "other"):
        with pytest.raises(AttributeError):
            setattr(found, name, True)
    found.reasons.clear()
    assert found == capabilities() and found.reasons == capabilities().reasons


def test_its_text_is_a_table():
    lines = repr(capabilities()).splitlines()
    assert lines[0].startswith("Capabilities of Device(0)") and "with CUDA 1" in lines[0]
    assert ("(emulated)" in lines[0]) == managedmem.emulator.is_active()
    table = {line.split()[0]: line.split()[1] for line in lines[1:]}
    found = capabilities()
    assert table == {name: "yes" if getattr(found, name) else "no" for name in FLAGS}
    assert all(reason in repr(found) for reason in found.reasons.values())


def test_the_device():
    assert capabilities(Device(0)).devices == (Device(0),)
    assert capabilities(0) == capabilities(Device(0))
    with pytest.raises(ValueError, match="there is no device 99"):
        capabilities(99)
    for wrong in (Host(), "cuda", -1, True):
        with pytest.raises(ValueError):
            capabilities(wrong)


def test_without_a_driver(tmp_path):
    run_python(
        """
        import managedmem as mm
        from outcomes import refusal
        refusal(mm.DriverNotFoundError, mm.capabilities)
        """,
        driver=tmp_path / "libcuda.so.1",
    )


def test_during_a_trace():
    before = capabilities()
    if not before.traces:
        pytest.skip("no trace works here")
    with managedmem.trace():
        assert capabilities().traces
    run_python("""
        import managedmem as mm
        with mm.trace():
            found = mm.capabilities()
            assert found.traces and found.trace_source == "in use by a trace that runs", found
        assert "emulated" in mm.capabilities().trace_source
        with mm.trace() as t:
            assert "emulated" in mm.capabilities().trace_source
        """)


def test_obstacles_of_residency(tmp_path, monkeypatch):
    def device(name, concurrent, direct):
        members = {
            "concurrent_managed_access": concurrent,
            "direct_managed_mem_access_from_host": direct,
        }
        return type("Fake", (types.SimpleNamespace,), {"__repr__": lambda _: name})(**members)

    plain, direct = device("plain", True, False), device("direct", True, True)
    obstacle = _capabilities._residency_obstacle
    assert obstacle([plain]) == ""
    assert "is 1 on direct" in obstacle([plain, direct])
    assert "concurrent_managed_access is 0 on old" in obstacle([device("old", False, True), direct])
    monkeypatch.setattr(_capabilities, "PAGE_MAP", str(tmp_path / "missing"))
    assert "No such file" in obstacle([plain]) and "missing" in obstacle([plain])


@pytest.mark.emulator_only
def test_a_read_in_place_that_fails(monkeypatch):
    monkeypatch.setattr(_capabilities, "_reads_in_place", {})
    emulator.fail("cuMemcpyAsync", code=700)
    found = capabilities()
    assert emulator.failure_fired()
    assert not found.mapped_access
    assert found.reasons["mapped_access"].startswith(
        "no read of Device(0) could show it: cuMemcpyA"
    )
    assert capabilities().mapped_access


def test_the_read_in_place_leaves_nothing(monkeypatch):
    monkeypatch.setattr(_capabilities, "_reads_in_place", {})
    Device(0).set_current()
    assert capabilities().mapped_access == (not capabilities().reasons.get("mapped_access"))
    assert Device() is Device(0)


@pytest.mark.emulator_only
def test_a_query_that_fails():
    capabilities()  # the first one also reads in place
    with emulator.recording() as calls:
        capabilities()
    for nth in range(1, 1 + names(calls).count("cuDeviceGetAttribute")):
        emulator.fail("cuDeviceGetAttribute", nth=nth, code=999)
        with pytest.raises(CUDAError) as caught:
            capabilities()
        assert caught.value.code == 999
    assert capabilities().prefetch


def test_importing_the_package_does_not_import_it():
    run_python("""
        import sys, managedmem
        assert "managedmem._capabilities" not in sys.modules
        assert "dataclasses" not in sys.modules
        managedmem.typing.Capabilities
        assert "managedmem._capabilities" in sys.modules
        """)
