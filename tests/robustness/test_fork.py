"""Forked processes: refused clearly after the driver was opened, fine before.

Each case is a script in a process of its own, because forking the test runner would drag its
threads and its own driver along.
"""

import pytest

from forks import ASAN
from programs import run_python
from whole_programs import run_to_the_end

PRELUDE = """
import gc, os, sys
import foreign_objects
import managedmem
from managedmem import Device, Host, ManagedBuffer, ManagedMemoryResource, Stream
from program_checks import in_child, refused
"""

SETUP = """
resource = ManagedMemoryResource()
buf = resource.allocate(16 * 4096)
buf.read_mostly = True
members = buf.accessed_by
members.add(Host())
part = buf[0:4096]
stream = Stream()
device = Device(0)
wrapped = ManagedBuffer.from_handle(buf.handle, buf.size)
pooled = ManagedMemoryResource(pooled=True).allocate(4096)
pool = managedmem.DeviceMemoryResource(device)
block = pool.allocate(4096, stream=stream)
plan = managedmem.PrefetchPlan([(buf, Host())])
applied = managedmem.MigrationPolicy(read_mostly=True).applied(resource.allocate(4096))
applied.__enter__()
"""


def run(code):
    """A program with everything that SETUP makes."""
    run_to_the_end(PRELUDE + SETUP + code)


OPERATIONS = {
    "allocate": "resource.allocate(4096)",
    "allocate on a stream": "resource.allocate(4096, stream=stream)",
    "empty": "managedmem.empty((4,), 'float32')",
    "prefetch": "buf.prefetch(Host())",
    "prefetch on a stream": "buf.prefetch(device, stream=stream)",
    "prefetch of a slice": "part.prefetch(Host())",
    "prefetch of wrapped memory": "wrapped.prefetch(Host())",
    "discard": "buf.discard()",
    "discard_prefetch": "buf.discard_prefetch(Host())",
    "fill": "buf.fill(0)",
    "copy_from": "buf.copy_from(wrapped)",
    "copy_to": "buf.copy_to()",
    "set_deallocation_stream": "pooled.set_deallocation_stream(stream)",
    "get read_mostly": "buf.read_mostly",
    "set read_mostly": "buf.read_mostly = False",
    "get preferred_location": "buf.preferred_location",
    "set preferred_location": "buf.preferred_location = None",
    "get last_prefetch_location": "buf.last_prefetch_location",
    "set accessed_by": "buf.accessed_by = [device]",
    "set.add": "members.add(device)",
    "set.discard": "members.discard(Host())",
    "set.clear": "members.clear()",
    "set.update": "members.update([device])",
    "iterate": "list(members)",
    "len": "len(members)",
    "in": "Host() in members",
    "equal": "members == set()",
    "union": "members | set()",
    "advise": "managedmem.advise(buf, 'set_read_mostly')",
    "free prefetch": "managedmem.prefetch([buf, wrapped], Host())",
    "free discard": "managedmem.discard([buf])",
    "free discard_prefetch": "managedmem.discard_prefetch([buf], Host())",
    "dlpack": "buf.__dlpack__()",
    "dlpack for the CPU": "buf.__dlpack__(dl_device=(1, 0))",
    "memory_info": "device.memory_info",
    "device name": "device.name",
    "device attribute": "device.concurrent_managed_access",
    "device.sync": "device.sync()",
    "set_current": "device.set_current()",
    "Device.count": "Device.count()",
    "Device.all": "Device.all()",
    "dlpack after a stream": "buf.__dlpack__(stream=12345)",
    "len of a set": "len(members)",
    "location of torch": "buf.prefetch(foreign_objects.torch_device('cuda'))",
    "device of a resource": "resource.device_id",
    "device of a buffer": "wrapped.device_id",
    "is_managed": "wrapped.is_managed",
    "peers": "list(pool.peer_accessible_by)",
    "change peers": "pool.peer_accessible_by.clear()",
    "device uuid": "device.uuid",
    "shared policy": "managedmem.MigrationPolicy.shared()",
    "release threshold": "setattr(pool.attributes, 'release_threshold', 0)",
    "pool attributes": "pool.attributes.used_mem_current",
    "a pool": "managedmem.DeviceMemoryResource(device)",
    "deallocate": "pool.deallocate(buf.handle, buf.size)",
    "set_deallocation_stream of a block": "block.set_deallocation_stream(stream)",
    "plan execute": "plan.execute()",
    "plan entry": "plan.explain()",
    "plan add": "plan.add(buf, Host())",
    "plan fit": "managedmem.PrefetchPlan.fit([buf], device, budget=1 << 20)",
    "policy apply": "managedmem.MigrationPolicy(read_mostly=True).apply(buf)",
    "policy of": "managedmem.MigrationPolicy.of(buf)",
    "policy applied": "managedmem.MigrationPolicy().applied(buf)",
    "restore a policy": "applied.restore()",
    "a working set": "managedmem.WorkingSet(1 << 20)",
    "a managed working set": "managedmem.ManagedWorkingSet(1 << 20)",
    "page runs": "buf.page_runs()",
    "residency": "buf.residency()",
    "residency of several": "managedmem.residency([buf, wrapped])",
    "numpy": "buf.numpy()",
    "attach": "buf.attach('host')",
    "current device": "Device()",
    "a new Device": "Device(1)",
    "Stream()": "Stream()",
    "stream.sync": "stream.sync()",
    "stream.query": "stream.query()",
    "driver_info": "managedmem._managedmem._driver_info()",
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_refused_after_a_fork(name):
    run(f"""
def work():
    # One line may be an assignment, so it is executed as text.
    with refused(RuntimeError, "fork"):
        exec({OPERATIONS[name]!r}, globals())
assert in_child(work) == 0
# The parent goes on as if nothing had happened.
assert buf.read_mostly is True and members == {{Host()}}
buf.prefetch(Host()); applied.restore(); stream.sync(); block.close(); stream.close(); buf.close()
""")


@pytest.mark.parametrize("name", ["memoryview(buf)", "memoryview(part)"])
def test_host_views_are_refused_after_a_fork(name):
    """The kernel does not copy managed memory into a child: touching it would kill the process."""
    run(f"""
def work():
    with refused((RuntimeError, BufferError), "fork"):
        {name}
assert in_child(work) == 0
assert len(memoryview(buf)) == buf.size
""")


def test_letting_go_is_harmless():
    """Dropping and closing in a child neither fails nor touches the parent's driver."""
    run("""
from managedmem import emulator
capsule = buf.__dlpack__()
other = resource.allocate(4096)
held = resource.allocate(4096)

def work():
    global buf, part, wrapped, stream, members, capsule, held
    live = emulator.live()
    emulator.clear_calls()
    del held, capsule
    other.close()
    assert other.is_closed
    stream.close()
    del buf, part, wrapped, stream, members
    gc.collect()
    assert emulator.live() == live, "the child freed what belongs to its parent"
    assert not emulator.calls()

live = emulator.live()
assert in_child(work) == 0
assert emulator.live() == live
del capsule
other.close(); held.close(); stream.close(); buf.close()
""")


def test_harmless_things_stay_possible():
    run("""
def work():
    assert Host() is Host() and Host(1) is Host(numa_id=1)
    assert buf.size == 16 * 4096 and len(part) == 4096 and not buf.is_closed
    for thing in (buf, part, stream, members, device, resource, Host()):
        assert isinstance(repr(thing), str)
    assert hash(device) == hash(device) and device == device
assert in_child(work) == 0
""")


def test_a_child_that_ends_normally_is_quiet():
    """Not os._exit: the child runs its whole interpreter shutdown with inherited buffers."""
    run("""
view = memoryview(buf)
pid = os.fork()
if pid == 0:
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
view.release()
buf.close()
""")


def test_a_grandchild_is_refused_too():
    run("""
def work():
    with refused(RuntimeError, "fork"):
        Device.count()
def grandchild():
    assert in_child(work) == 0
assert in_child(grandchild) == 0
""")


def test_forking_before_first_use_works_in_both():
    done = run_python(
        PRELUDE
        + """
def work():
    with ManagedMemoryResource().allocate(4096) as buffer:
        buffer.prefetch(Host())
        assert buffer.last_prefetch_location is Host()
        memoryview(buffer)[0] = 1
assert in_child(work) == 0
work()
# The parent's driver is open now, so from here on children are refused.
assert in_child(work) == 1
work()
""",
        check=False,
    )
    assert done.returncode == 0
    lines = done.stderr.strip().splitlines()
    assert lines and lines[0].startswith("child:") and "fork" in done.stderr


def test_a_child_may_open_its_own_driver_many_times():
    run_to_the_end(
        PRELUDE
        + """
for _ in range(5):
    assert in_child(lambda: Device(1).memory_info) == 0
"""
    )


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_worker_processes_of_the_recommended_kind_work(method, tmp_path):
    script = tmp_path / "workers.py"
    script.write_text(
        f"""
import multiprocessing
from managedmem import Device, Host, ManagedMemoryResource

def work(location):
    with ManagedMemoryResource().allocate(4096) as buffer:
        buffer.prefetch(location)
        return buffer.last_prefetch_location

if __name__ == "__main__":
    Device.count()
    with multiprocessing.get_context({method!r}).Pool(2) as pool:
        print(pool.map(work, [Host(), Device(1)]) == [Host(), Device(1)])
"""
    )
    done = run_python(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')")
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_letting_go_of_what_a_thread_of_the_parent_was_using():
    """The thread that holds the stream and the buffer does not exist in the child: no waiting."""
    run("""
import signal, threading, warnings
from forks import fork_beside_sleepers
from host_functions import Gate
from managedmem import emulator
warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point here
emulator.schedule("lazy")
gate = Gate(stream)
buf.prefetch(Host(), stream=stream)
syncing = threading.Thread(target=stream.sync)
syncing.start()
gate.wait_until_reached()

def work():
    signal.alarm(10)  # a child that waits for ever is killed
    global stream
    stream.close()
    del stream
    buf.close()
assert in_child(work, fork_beside_sleepers) == 0
assert syncing.is_alive()
gate.open()
syncing.join()
stream.close(); buf.close()
""")


@pytest.mark.skipif(ASAN, reason="its malloc() hangs after a fork beside a thread that allocates")
def test_letting_go_of_a_watch_that_threads_of_the_parent_were_reading():
    run("""
import signal, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point here
watch = managedmem._managedmem._Watch(os.getpid())
over = False

def read():
    while not over:
        watch.read()

def work():
    signal.alarm(10)  # a child that waits for ever is killed
    global watch
    with refused(RuntimeError, "closed"):
        watch.read()
    watch.close()
    del watch
    gc.collect()

reading = [threading.Thread(target=read) for _ in range(2)]
for thread in reading:
    thread.start()
for _ in range(30):
    assert in_child(work) == 0
over = True
for thread in reading:
    thread.join()
assert watch.read()[1:] == (0, 0)
""")


@pytest.mark.parametrize("failed", ["/nowhere/libcuda.so.1", "a file that is no driver"])
def test_forking_after_an_opening_that_failed(failed, tmp_path):
    """Nothing was opened, so the parent and its children may each open a driver of their own."""
    path = tmp_path / "libcuda.so.1"
    path.write_text("no library")
    done = run_python(
        PRELUDE
        + """
from managedmem import emulator
with refused(managedmem.DriverNotFoundError, ""):
    Device.count()

def work():
    emulator.enable()
    with ManagedMemoryResource().allocate(4096) as buffer:
        buffer.prefetch(Host())
        assert buffer.last_prefetch_location is Host()

assert in_child(work) == 0
work()
def count():
    with refused(RuntimeError, "fork"):
        Device.count()
assert in_child(count) == 0
""",
        driver=failed if failed.startswith("/") else path,
    )
    assert done.stderr == ""
