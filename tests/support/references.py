"""The program behind test_references.py: what a round of every public operation leaves behind.

Usage: python references.py NAME..., with names of everything() or SEEDED. Prints a line of JSON for
each: its name and what grew, or null. On a Python that was built with Py_DEBUG it counts the
references to all objects, on others only those to objects that calls return, take or raise.
"""

import contextlib
import copy
import ctypes
import functools
import gc
import json
import os
import sys

import c_heap
import managedmem
from all_operations import everything
from constants import FREE_THREADED
from driver import pop_contexts
from live_memory import settle
from managedmem import Device, Host, emulator
from world import LAUNCH_FAILED, OUT_OF_MEMORY, Operation, World

WARM_UP = 3
ROUNDS = 4
# A leak grows in each attempt. Caches of CPython (strings, free lists) grow in some only.
ATTEMPTS = 10
MOST_CALLS = 500
# NumPy is built for a Python without Py_DEBUG, so the count of all references lacks its own.
USE_NUMPY = {
    *("numpy", "numpy of a wrapper", "numpy copy", "numpy of plain memory", "wait for an array"),
    *("buffer array", "array of other type", "dlpack to a consumer"),
    *("numpy copy of much", "numpy copy of much, again", "numpy copy in place of another"),
    *("clear the results", "asarray of numbers", "asarray of a buffer on a device"),
    *("asarray of an array", "words as an array", "a ragged list", "numpy_allocator"),
}
FAULTS = {
    "each call failing": (LAUNCH_FAILED, False),
    "each call out of memory": (OUT_OF_MEMORY, False),
    "each call failing after it acted": (LAUNCH_FAILED, True),
}


# CPython keeps the names of the latest attribute look-ups, even those made for one look-up.
clear_type_cache = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache


@functools.cache
def allocations():
    """The library that counts the blocks of the extension (tests/c/allocations.c), or None."""
    path = os.environ.get("ALLOCATIONS_LIBRARY")
    if path is None:
        return None
    library = ctypes.PyDLL(path)
    library.live.restype = ctypes.c_long
    extension = ctypes.CDLL(managedmem._managedmem.__file__)
    library.watch_extension(ctypes.cast(extension.PyInit__managedmem, ctypes.c_void_p))
    return library


def shared_objects():
    """Objects that exist before calls return, take or raise them."""
    singletons = [None, True, False, NotImplemented, (), "", b"", *range(-1, 3)]
    classes = [TypeError, ValueError, RuntimeError, BufferError, KeyError, IndexError, MemoryError]
    classes += [object, int, str, tuple, list, dict, set]
    locations = [Host(), Host(1), Host.numa_current(), *Device.all()]
    return [*singletons, *classes, *locations, *vars(managedmem._managedmem).values()]


# From 3.12 on some objects are immortal. CPython does not count their references, but code that was
# built with headers of 3.11 does.
IMMORTAL = 1 << 28
SHARED = [thing for thing in shared_objects() if sys.getrefcount(thing) < IMMORTAL]


class Counts:
    """References, blocks of Python's allocators and bytes of the C heap, at two times."""

    def __init__(self, w, all_references, heap):
        of_the_world = [thing for thing in vars(w).values() if sys.getrefcount(thing) < IMMORTAL]
        self.things = [*SHARED, *of_the_world]
        self.readers = {} if FREE_THREADED else {"blocks": sys.getallocatedblocks}
        if all_references and hasattr(sys, "gettotalrefcount"):
            self.readers["references"] = sys.gettotalrefcount
        if allocations():
            self.readers["blocks of the extension"] = functools.partial(allocations().live, 0)
        if heap and c_heap.reader():
            self.readers["bytes of malloc()"] = c_heap.reader()
        # Arrays of C numbers, because a list of int would count itself.
        size = len(self.things) + len(self.readers)
        self.before, self.after = (ctypes.c_ssize_t * size)(), (ctypes.c_ssize_t * size)()

    def read(self, numbers):
        settle()  # operations that the emulated driver has queued are on the C heap
        clear_type_cache()
        gc.collect()
        emulator.clear_calls()  # with the calls of the collection
        at = 0
        for thing in self.things:
            numbers[at] = sys.getrefcount(thing)
            at += 1
        for reader in self.readers.values():
            numbers[at] = reader()
            at += 1

    def names(self):
        return [f"references to {thing!r}" for thing in self.things] + list(self.readers)

    def grown(self, turn):
        """The changes over ROUNDS turns, by name: the least of all attempts."""
        least = None
        self.read(self.after)
        for _ in range(ATTEMPTS):
            self.read(self.before)
            for _ in range(ROUNDS):
                turn()
            self.read(self.after)
            now = [after - before for before, after in zip(self.before, self.after, strict=True)]
            least = [min(pair, key=abs) for pair in zip(least or now, now, strict=True)]
            if not any(least):
                break
        return {name: number for name, number in zip(self.names(), least, strict=True) if number}


def drop_results(w):
    """World.drop_results() without its collection, because read() makes one."""
    while w.made:
        getattr(w.made.pop(0), "close", bool)()
    managedmem.result_cache.clear()


def once(operation, w):
    operation.prepare(w)
    operation.run(w)
    drop_results(w)


def with_faults(operation, w, code, after):
    """Run it with the first driver call failing, with the second and so on."""
    depth = emulator.live().context_depth
    for nth in range(1, MOST_CALLS):
        operation.prepare(w)
        emulator.fail("*", nth=nth, code=code, after=after)
        with contextlib.suppress(Exception):
            operation.run(w)
        fired = emulator.failure_fired()
        emulator.clear_failures()
        pop_contexts(depth)
        drop_results(w)
        if not fired:
            return
    raise AssertionError(f"the operation still meets the fault after {MOST_CALLS} calls")


NO_FAULT = "without a fault"


def circumstances(operation):
    yield NO_FAULT, functools.partial(once, operation)
    for text, (code, after) in FAULTS.items():
        yield text, functools.partial(with_faults, operation, code=code, after=after)


def examine(name, operation):
    """A description of what grows, or None."""
    found = []
    for text, act in circumstances(operation):
        w = World()
        turn = functools.partial(act, w)
        for _ in range(WARM_UP):
            turn()
        # The emulated driver keeps memory for resources that a fault left behind.
        counts = Counts(w, name not in USE_NUMPY, heap=text == NO_FAULT)
        found += [
            f"{text}, {ROUNDS} rounds: {number:+} {counted}"
            for counted, number in counts.grown(turn).items()
        ]
        w.end()
    return "\n".join(found) or None


# Operations with a leak of each kind, which examine() must find.


def keep(thing):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def keep_the_name(w):
    try:
        w.a.read_mostly = False
    except managedmem.CUDAError as error:
        keep(error.name)
        raise


def keep_the_traceback(w):
    try:
        w.a.fill(256)
    except OverflowError as error:
        keep(error.__traceback__)


def keep_blocks_of_the_extension(w):
    allocations().keep_blocks()
    copy.copy(w.plan)


SEEDED = {
    "None": Operation(lambda w: keep(None)),
    "a location": Operation(lambda w: keep(w.a.preferred_location)),
    "an argument": Operation(lambda w: keep(w.stream)),
    "a result": Operation(lambda w: keep(w.part.view("f4"))),
    "an int": Operation(lambda w: keep(w.a.handle)),
    "the name of an error": Operation(keep_the_name),
    "a traceback": Operation(keep_the_traceback),
    "memory of C": Operation(lambda w: ctypes.CDLL(None).malloc(1)),
    # The last one, because nothing is freed from then on.
    "blocks of the extension": Operation(keep_blocks_of_the_extension),
}


def main(names):
    table = {**everything(), **SEEDED}
    sys.unraisablehook = lambda unraisable: None  # finalizers meet the faults as well
    for name in names:
        gc.collect()
        gc.freeze()  # the objects of imports stay, and visiting them takes the most time
        print(json.dumps([name]), flush=True)
        print(json.dumps([name, examine(name, table[name])]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
