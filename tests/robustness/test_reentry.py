"""Finalizers that close objects while the same thread uses them in a call.

While an operation has entered buffers and streams, no Python code may run in its thread: code that
closes them would wait for its own thread. reentry.py makes the collector run as often as possible
during every operation; this file has one test for each operation.
"""

import pytest

import reentry
from constants import FREE_THREADED
from programs import explore, parameters_of, run_python
from whole_programs import run_to_the_end

pytestmark = pytest.mark.emulator_only

AT_ONCE = 30  # operations in a process


@pytest.fixture(scope="module")
def findings(request):
    names = parameters_of(request, TestCollectorDuringOperations.test_nothing_waits_for_itself)
    return explore("reentry", names, AT_ONCE)


@pytest.mark.timeout(300)  # the first one explores all of them
class TestCollectorDuringOperations:
    @pytest.mark.parametrize("name", reentry.CASES)
    def test_nothing_waits_for_itself(self, name, findings):
        assert findings[name] is None, findings[name]

    @pytest.mark.skipif(FREE_THREADED, reason="its collector waits until Python code runs again")
    def test_the_collector_does_run_during_operations(self):
        """A finalizer that closes a buffer is seen by the operation that uses it."""
        run_to_the_end("""
            import reentry, managedmem
            w = reentry.World()
            closed = []

            def operate(w):
                for _ in range(3):
                    closed.append({"closed": w.a.is_closed})
                    w.a.prefetch(managedmem.Host(), stream=w.stream)

            operation = reentry.Operation(operate)
            collector = reentry.Collector(lambda run: w.a.close())
            assert reentry.act_under(collector, operation, w) is None
            assert collector.runs > 0 and w.a.is_closed, collector.runs
            w.end()
        """)


class TestOwnersOfTensors:
    @pytest.mark.parametrize("released", [True, False], ids=["without the GIL", "with the GIL"])
    def test_an_owner_that_is_called_through_c(self, released):
        """C code takes the GIL with the thread's first thread state, so the owner must be dropped
        in it."""
        run_to_the_end(f"""
            import ctypes, faulthandler
            import managedmem
            from dlpack import consume

            faulthandler.dump_traceback_later(30, exit=True)
            seen = []
            through_c = ctypes.PYFUNCTYPE(None)(lambda: seen.append("called"))

            class Owner:
                def __del__(self):
                    through_c()

            root = managedmem.empty(4096)
            buffer = managedmem.ManagedBuffer.from_handle(root.handle, 4096, owner=Owner())
            tensor = consume(buffer.__dlpack__())
            del buffer
            kind = ctypes.CFUNCTYPE if {released} else ctypes.PYFUNCTYPE
            address = ctypes.cast(tensor.deleter, ctypes.c_void_p).value
            kind(None, ctypes.c_void_p)(address)(ctypes.addressof(tensor))
            assert seen == ["called"]
        """)


class TestEndOfTheInterpreter:
    def test_closing_a_stream_that_a_daemon_thread_waits_for(self):
        """The thread never returns to Python, but leaves the guard of the stream."""
        done = run_python("""
            import ctypes, faulthandler, threading, time
            from driver import raw_driver
            from managedmem import Stream, emulator

            class ClosesAtTheEnd:
                def __init__(self, stream):
                    self.stream = stream

                def __del__(self):
                    self.stream.close()
                    print("closed")

            faulthandler.dump_traceback_later(30, exit=True)
            stream = Stream()
            emulator.schedule("lazy")
            nap = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
            handle, time_to_nap = ctypes.c_void_p(stream.handle), ctypes.c_void_p(600_000)
            assert raw_driver().cuLaunchHostFunc(handle, nap, time_to_nap) == 0
            threading.Thread(target=stream.sync, daemon=True).start()
            time.sleep(0.2)
            last = ClosesAtTheEnd(stream)
        """)
        assert (done.stdout, done.stderr) == ("closed\n", "")
