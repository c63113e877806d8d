"""One UserWarning in a process whose devices lack concurrent_managed_access."""

import warnings

import pytest

import managedmem
from constants import PAGE
from programs import run_python

SETUP = """
    import warnings
    import managedmem as mm
    from managedmem import emulator
    from outcomes import refusal
    def caught(act):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            act()
        assert all(w.category is UserWarning for w in found)
        assert all("concurrent_managed_access" in str(w.message) for w in found)
        return [(w.filename, w.lineno) for w in found]
"""


def run(code, profile="wsl"):
    run_python(SETUP + code, emulator=f"profile={profile}")


@pytest.mark.parametrize(
    "allocation",
    [
        "mm.empty(4096)",
        "mm.empty(0)",
        "mm.ManagedMemoryResource().allocate(4096)",
        "(mm._managedmem._driver_info(), mm.ManagedMemoryResource())",
        "mm.ManagedBuffer.from_handle(1 << 20, 4096).copy_to()",
    ],
)
def test_the_first_use_warns(allocation):
    run(f"""
    def act():
        try:
            {allocation}
        except ValueError:  # of the copy
            pass
    (place,) = caught(act)
    assert place[0] == "<string>", place
    assert caught(act) == caught(lambda: mm.empty(9)) == []
    """)


def test_the_warning_names_the_line_of_the_caller():
    run("""
    def call(): return mm.empty(4096)
    assert caught(call) == [("<string>", call.__code__.co_firstlineno)]
    """)


@pytest.mark.parametrize(
    "allocation",
    [
        "mm.zeros(4096)",
        "mm.empty_like(None, 'f4', shape=3)",
        "mm._managedmem._register_preset(None, (), False, False)",
        "mm.numpy_allocator()",
        "inside()",
    ],
)
def test_the_line_is_outside_of_the_package(allocation):
    run(f"""
    names = {{"__name__": "managedmem.torch._pool", "mm": mm}}
    exec("def inner(): return mm.empty(9)\\ndef outer(): return inner()", names)
    inside = names["outer"]
    def call(): return {allocation}
    assert caught(call) == [("<string>", call.__code__.co_firstlineno)]
    """)


@pytest.mark.parametrize("names", ["{'__name__': 'managedmemory', 'mm': mm}", "{'mm': mm}"])
def test_code_of_other_names_is_outside(names):
    run(f"""
    code = compile("def act(): mm.empty(9)", "other.py", "exec")
    names = {names}
    exec(code, names)
    assert caught(names["act"]) == [("other.py", 1)]
    """)


def test_what_allocates_nothing_does_not_warn():
    run("""
    def act():
        resource = mm.ManagedMemoryResource()  # opens no driver
        mm.Device(0).concurrent_managed_access
        mm._managedmem._driver_info()
        mm.ManagedBuffer.from_handle(1 << 20, 4096).close()
        mm.DeviceMemoryResource(mm.Device(0)).allocate(4096).close()
        mm.Stream().close()
    assert caught(act) == []
    assert len(caught(lambda: mm.empty(4))) == 1
    """)


def test_a_pool_warns_before_it_is_made():
    run("""
    def act():
        try:
            mm.ManagedMemoryResource(pooled=True)
        except NotImplementedError:
            pass
    assert len(caught(act)) == 1
    """)


def test_as_an_error_it_refuses_each_allocation():
    run("""
    mm._managedmem._driver_info()
    warnings.simplefilter("error")
    for act in (lambda: mm.empty(4096), mm.ManagedMemoryResource) * 2:
        before = emulator.live()
        refusal(UserWarning, act)
        assert emulator.live() == before
    assert len(caught(lambda: mm.empty(4096))) == 1
    assert caught(lambda: mm.empty(4096)) == []
    mm.empty(4096)
    """)


def test_threads_get_one_warning():
    run("""
    from threads import at_once
    assert len(caught(lambda: at_once(*[lambda: mm.empty(4096)] * 8))) == 1
    """)


def test_an_allocation_at_the_end_of_the_interpreter():
    """Nothing can be imported any more."""
    done = run_python(
        """
        import sys
        import managedmem
        class Late:
            def __del__(self, empty=managedmem.empty, say=__import__("os").write):
                say(1, b"%d" % empty(4096).nbytes)
        managedmem.Device.count()  # opens the driver
        sys.late = Late()
        """,
        emulator="profile=wsl",
    )
    assert done.stdout == "4096"


def test_other_systems_get_none():
    if not all(device.concurrent_managed_access for device in managedmem.Device.all()):
        pytest.skip("this is such a system")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        managedmem.empty(PAGE).close()
        managedmem.ManagedMemoryResource().allocate(PAGE).close()
