"""Memory of another library's resource in forked processes, and at the end of a process."""

import pytest

from programs import run_python

SCRIPT = """
import gc, os, sys
from managedmem import *
from program_checks import in_child

class Strict:
    def deallocate(self, ptr, size, *, stream):
        assert stream.__cuda_stream__()[0] == 0
        print("back", ptr, size, stream.__cuda_stream__()[1], flush=True)

def lend(number, **more):
    return ManagedBuffer.from_handle(4096 * number, 4096, mr=Strict(), **more)
"""


class TestFork:
    @pytest.mark.parametrize("first", ["", "Device.count()"], ids=["no driver", "a driver"])
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_a_child_leaves_the_memory_of_its_parent(self, first):
        done = run_python(
            SCRIPT
            + f"""
{first}
closed, dropped, cycle = lend(1), lend(2), [lend(3)]
cycle.append(cycle)
at_exit = lend(4)
pid = os.fork()
if pid == 0:
    closed.close()
    assert closed.is_closed and closed.memory_resource is None
    del dropped, cycle
    gc.collect()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print("parent", flush=True)
closed.close()
del dropped, cycle
gc.collect()
"""
        )
        wanted = ["parent", *(f"back {4096 * i} 4096 1" for i in (1, 2, 3, 4))]
        assert done.stdout.splitlines() == wanted
        assert done.stderr == ""

    def test_a_child_gives_its_own_memory_back(self):
        done = run_python(
            SCRIPT
            + """
assert in_child(lambda: lend(1).close()) == 0
"""
        )
        assert done.stdout == "back 4096 4096 1\n"


class TestExit:
    @pytest.mark.parametrize(
        "code",
        [
            "buffer = lend(1)",
            "buffer = lend(1); buffer2 = buffer[:16]",
            "buffer = lend(1); buffer.memory_resource.buffer = buffer",
            "import builtins; builtins.kept = lend(1)",
            "import managedmem; managedmem._managedmem.kept = lend(1)",
            "buffer = lend(1, stream=Stream.from_handle(1))",
            "class Sub(ManagedBuffer): pass\n"
            "buffer = Sub.from_handle(4096, 4096, mr=Strict()); buffer.me = buffer",
        ],
    )
    def test_live_buffers_go_back(self, code):
        done = run_python(SCRIPT + code)
        assert (done.stdout, done.stderr) == ("back 4096 4096 1\n", "")
