"""The program behind test_reentry.py: operations during which the garbage collector runs, again and
again, and finalizers close what the operation uses.

Usage: python reentry.py NAME..., with names of CASES. Prints a line of JSON for each: its name and
the failure, or null. Exits at the first operation that hangs, because its thread cannot be stopped.
"""

import contextlib
import faulthandler
import gc
import json
import os
import sys
import threading

import managedmem
from constants import PAGE
from error_operations import ON_CLOSED_STREAMS, ON_PLAIN_MEMORY
from foreign_objects import CudaArray
from lifetime_operations import ForeignResource
from managedmem import Device, Host, MigrationPolicy, emulator
from operations import OPERATIONS
from world import LAUNCH_FAILED, Operation, World

PATIENCE = 10  # seconds; an operation takes a few milliseconds
MOST_COLLECTIONS = 200
MOST_CALLS = 200
HOST, ZERO = Host(), Device(0)
# The errors that an operation may raise after a finalizer closed its objects, or the driver failed.
EXPECTED = (RuntimeError, ValueError, BufferError)


class DropsWith(CudaArray):
    """A target whose finalizer closes other objects."""

    def __init__(self, buffer, world):
        super().__init__(buffer)
        self.world = world

    def __del__(self):
        for close in closers(self.world):
            with contextlib.suppress(*EXPECTED):
                close()


class ClosingResource(ForeignResource):
    """Another library's memory resource whose deallocate() closes other objects."""

    def __init__(self, world):
        super().__init__()
        self.world = world

    def deallocate(self, ptr, size, *, stream):
        for close in [*closers(self.world), self.allocated.pop(ptr).close]:
            with contextlib.suppress(*EXPECTED):
                close()


def close_foreign(w):
    """Close foreign memory, drop some, and leave some in a garbage cycle."""
    resource = ClosingResource(w)
    resource.allocate(PAGE).close(w.stream)
    view = resource.allocate(PAGE)[: PAGE // 2]
    view.prefetch(HOST)
    view.close()
    resource.cycle = resource.allocate(PAGE)
    with contextlib.suppress(*EXPECTED):
        resource.cycle.set_deallocation_stream(w.stream)
    del resource


# Besides the operations of the fault sweep: calls that fail for other reasons, and deallocations.
CASES = {
    **OPERATIONS,
    **ON_PLAIN_MEMORY,
    **ON_CLOSED_STREAMS,
    "copy in both directions": Operation(
        lambda w: w.a.copy_from(w.b, stream=w.stream) or w.a.copy_to(w.c, stream=w.stream)
    ),
    "close on a stream": Operation(lambda w: w.a.close(w.stream)),
    "close of pool memory on a stream": Operation(
        lambda w: w.pooled.close(w.stream), prepare=lambda w: w.make_pools()
    ),
    "close of a view": Operation(lambda w: w.part.close()),
    "close of a stream": Operation(lambda w: w.stream.close()),
    "close of a pool": Operation(lambda w: w.pool.close(), prepare=lambda w: w.make_pools()),
    "foreign memory": Operation(close_foreign),
    "deallocation stream": Operation(
        lambda w: w.pooled.set_deallocation_stream(w.stream), prepare=lambda w: w.make_pools()
    ),
    "a view outlives its root": Operation(lambda w: w.part[:PAGE].close() or w.a.close()),
    "targets that close when they are dropped": Operation(
        lambda w: managedmem.prefetch((DropsWith(w.b, w) for _ in range(2)), ZERO, stream=w.stream)
    ),
    "policy for targets that close when they are dropped": Operation(
        lambda w: MigrationPolicy.of(DropsWith(w.b, w) for _ in range(2))
    ),
}


def closers(w):
    """A call for each object of the world, which closes it."""
    things = [w.b, w.stream, w.part, w.a, w.wrapped, w.c, w.large]
    if w.pools:
        things += [w.pooled, w.pool, w.plain, w.own]
    return [w.plan.clear, *(thing.close for thing in things), w.large_plan.clear]


class Collector:
    """Makes the collector run as often as possible, with a finalizer that acts in each run.

    `act(n)` is called in the nth run. On 3.11 the runs are inside of allocations, also those that C
    code makes; on later versions they are between two instructions.
    """

    def __init__(self, act):
        self.act = act
        self.runs = 0
        self.armed = False

    def __enter__(self):
        gc.collect()
        gc.disable()
        self.threshold = gc.get_threshold()
        self.armed = True
        self.leave_garbage()
        gc.set_threshold(1)
        gc.enable()
        return self

    def __exit__(self, *exception):
        self.armed = False
        gc.set_threshold(*self.threshold)

    def leave_garbage(self):
        class Garbage:
            def __del__(_):
                if self.armed:
                    self.runs += 1
                    with contextlib.suppress(*EXPECTED):
                        self.act(self.runs)
                    leave()

        def leave():
            garbage = Garbage()
            garbage.itself = garbage

        leave()


def act_under(collector, operation, w):
    """Run the operation; return a description of an unexpected exception, or None."""
    try:
        try:
            raise KeyError  # while it is handled, each new exception is made an object at once
        except KeyError:
            with collector:
                operation.act(w)
    except EXPECTED:
        pass
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def close_one_by_one(operation, order):
    """From the nth run of the collector on, each run closes one more object; for every n."""
    for start in range(1, MOST_COLLECTIONS):
        w = World()
        operation.prepare(w)
        calls = order(closers(w))

        def close(run, first=start, calls=calls):
            if first <= run < first + len(calls):
                calls[run - first]()

        collector = Collector(close)
        wrong = act_under(collector, operation, w)
        w.end()
        if wrong is not None or collector.runs < start:
            return wrong
    return None


def close_after_a_fault(operation):
    """Each driver call fails in turn, and the first runs of the collector after it close all."""
    for nth in range(1, MOST_CALLS):
        w = World()
        operation.prepare(w)

        def close(run, w=w):
            if emulator.failure_fired():
                for call in closers(w):
                    with contextlib.suppress(*EXPECTED):
                        call()

        emulator.fail("*", nth=nth, code=LAUNCH_FAILED)
        wrong = act_under(Collector(close), operation, w)
        fired = emulator.failure_fired()
        emulator.clear_failures()
        w.end()
        if wrong is not None or not fired:
            return wrong
    return None


def explore(name):
    operation = CASES[name]
    if operation.devices > Device.count():
        return None
    return (
        close_one_by_one(operation, list)
        or close_one_by_one(operation, lambda calls: calls[::-1])
        or close_after_a_fault(operation)
    )


def run(name):
    """A description of the failure, or None; and True if the operation returned."""
    answer = []
    worker = threading.Thread(target=lambda: answer.append(explore(name)), daemon=True)
    worker.start()
    worker.join(PATIENCE)
    if worker.is_alive():
        faulthandler.dump_traceback(all_threads=True)
        return "it waits for ever", False
    return (answer[0] if answer else "its thread ended with an exception"), True


def main(names):
    gc.collect()
    gc.freeze()  # objects of the imports are not garbage and make collections slow
    for name in names:
        print(json.dumps([name]), flush=True)
        wrong, back = run(name)
        print(json.dumps([name, wrong]), flush=True)
        if not back:
            os._exit(1)


if __name__ == "__main__":
    faulthandler.enable()
    main(sys.argv[1:])
