"""Views that IPython keeps in Out and _: the error of close() names them."""

import sys
import types

import pytest

import managedmem
from constants import PAGE
from managedmem import ManagedBuffer
from programs import run_python

numpy = pytest.importorskip("numpy", reason="needs NumPy")


@pytest.fixture
def shell(monkeypatch):
    """A stand-in for IPython's shell, with the names that a user has."""
    names = {"Out": {}, "_": "", "In": [""]}
    active = types.SimpleNamespace(user_ns=names)
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: active
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return active


def refusal(buffer):
    with pytest.raises(BufferError) as caught:
        buffer.close()
    assert "views" in str(caught.value) or "view(s)" in str(caught.value)
    return str(caught.value)


VIEWS = {
    "array": lambda b: b.numpy(),
    "part of an array": lambda b: numpy.asarray(b)[PAGE // 2 :].reshape(2, -1),
    "dlpack": numpy.from_dlpack,
    "memoryview": memoryview,
    "memoryview of a part": lambda b: memoryview(b[9:]),
    "memoryview of an array": lambda b: memoryview(b.numpy()),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
class TestNames:
    def test_a_result(self, alloc, shell, view):
        buffer = alloc(PAGE)
        shell.user_ns["Out"] = {1: 5, 2: numpy.ones(9), 7: view(buffer)}
        message = refusal(buffer)
        assert "IPython keeps views in Out[7]: `%xdel _7`" in message
        shell.user_ns["Out"].clear()
        buffer.close()

    def test_a_variable_comes_once(self, alloc, shell, view):
        buffer = alloc(PAGE)
        kept = view(buffer)
        shell.user_ns.update(mine=kept, _=kept, _3=kept, Out={3: kept})
        assert "IPython keeps views in mine: `%xdel mine`" in refusal(buffer)
        shell.user_ns.clear()
        del kept

    def test_not_of_another_buffer(self, alloc, shell, view):
        buffer, other = alloc(PAGE), alloc(PAGE)
        unseen = view(buffer)
        shell.user_ns["other"] = view(other)
        message = refusal(buffer)
        assert "other" not in message and "Out, _, __ and ___: `%xdel _N`" in message
        shell.user_ns.clear()
        del unseen


def test_many_are_counted(alloc, shell):
    buffer = alloc(PAGE)
    shell.user_ns["Out"] = {n: memoryview(buffer) for n in range(1, 9)}
    assert "Out[5] and 3 more" in refusal(buffer)
    shell.user_ns["Out"].clear()


def test_a_view_of_a_buffer(alloc, shell):
    part = alloc(PAGE)[9:]
    shell.user_ns["Out"] = {4: memoryview(part)}
    assert "`%xdel _4`" in refusal(part)
    shell.user_ns["Out"].clear()
    part.close()


def test_the_end_of_a_with_block(shell):
    with pytest.raises(BufferError, match=r"Out\[2\]"):
        with managedmem.empty(PAGE) as buffer:
            shell.user_ns["Out"][2] = memoryview(buffer)
    shell.user_ns["Out"].clear()
    buffer.close()


@pytest.mark.parametrize("absent", ["not loaded", "no shell"])
def test_outside_ipython(alloc, shell, monkeypatch, absent):
    if absent == "not loaded":
        monkeypatch.delitem(sys.modules, "IPython")
    else:
        monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: None)
    buffer = alloc(PAGE)
    view = memoryview(buffer)
    assert "IPython" not in refusal(buffer)
    view.release()


def test_a_hint_that_fails_leaves_the_error(alloc, shell):
    shell.user_ns = None
    buffer = alloc(PAGE)
    view = memoryview(buffer)
    assert "IPython" not in refusal(buffer)
    view.release()


def test_an_interrupt_is_passed_on(alloc, shell, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", interrupted)
    buffer = alloc(PAGE)
    view = memoryview(buffer)
    with pytest.raises(KeyboardInterrupt):
        buffer.close()
    view.release()


class Lent(BufferError):
    """What a memory resource raises about itself."""


class Keeping:
    def deallocate(self, ptr, size, *, stream):
        if self.keeps:
            raise Lent("mine", ptr)

    keeps = True


def test_an_error_of_a_memory_resource_stays_as_it_is(shell):
    resource = Keeping()
    buffer = ManagedBuffer.from_handle(PAGE, PAGE, mr=resource)
    with pytest.raises(Lent) as caught:
        buffer.close()
    assert caught.value.args == ("mine", PAGE)
    resource.keeps = False
    buffer.close()


def test_with_ipython():
    """The command of the hint works: the result is gone from Out, _ and IPython's own copies."""
    pytest.importorskip("IPython", reason="needs IPython")
    done = run_python(
        """
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()

        def cell(text):
            error = shell.run_cell(text, store_history=True).error_in_exec
            return "" if error is None else f"{type(error).__name__}: {error}"

        cell("import managedmem; buffer = managedmem.empty(4096)")
        number = shell.execution_count
        cell("buffer.numpy()")
        refused = cell("buffer.close()")
        assert refused.startswith("BufferError") and f"Out[{number}]" in refused, refused
        command = refused.split("`")[1]
        assert command == f"%xdel _{number}", refused
        assert cell(command) == ""
        assert cell("buffer.close()") == ""
        assert shell.user_ns["buffer"].is_closed
        """
    )
    assert done.returncode == 0
