"""The program behind test_allocations.py: every allocation of every operation fails, one at a time.

`operations()` sweeps the operations of all_operations.everything(), `imports()` the creation of
a module. They print a line of JSON for each attempt, [name, kind, n], and one more for each
operation and kind, [name, kind, n, failure or null]. After a crash, the last line names the
allocation.
"""

import _imp
import ctypes
import functools
import gc
import sys
import types
from importlib.machinery import ExtensionFileLoader, ModuleSpec

import managedmem
from all_operations import everything
from failing import KINDS, MOST, Wrong, attempt, is_memory_error, prepare, tell
from live_memory import settle, warm_up
from managedmem import Device
from world import HOST, ONE, ZERO

ATTEMPTS = 6  # a leak grows in each of them; what CPython caches does not
# CPython 3.11 raises nothing if it has no memory for the frame of a Python function. The caller
# turns that into a SystemError; a debug build aborts.
FRAME_OF_CPYTHON = ("cupy is missing", "torch is missing")
# PyList_New() of a free-threaded CPython frees items that it has not set yet.
LIST_OF_CPYTHON = ("read PrefetchPlan.__copy__",)
# Other exceptions than MemoryError that an operation may raise, and the reason.
OTHERS_RAISE = {
    # NumPy tries several protocols, and raises ValueError when the last one fails too.
    **dict.fromkeys(
        [
            *("numpy", "numpy of a wrapper", "numpy of plain memory", "numpy copy of much"),
            *("numpy copy of much, again", "numpy copy in place of another", "clear the results"),
        ],
        ValueError,
    ),
    **dict.fromkeys(FRAME_OF_CPYTHON, SystemError),
}
# Operations in which CPython itself loses references when memory runs out: a list or tuple that is
# made from an iterable keeps the items, or the iterable, when it cannot grow.
LEAKS_OF_CPYTHON = {"many targets", "many foreign targets", "PrefetchPlan.from_module"}
# Results that can be compared with those of another call, also in groups.
PLAIN = (bool, int, str, bytes)
GROUPS = (tuple, list, set, frozenset)
# Objects outside of the world that an operation may keep a reference to.
LASTING = [
    HOST,
    ZERO,
    ONE,
    *(t for t in vars(managedmem._managedmem).values() if isinstance(t, type)),
]


def state(w):
    """The state that must not change: advice, contents, access, open objects, driver objects."""
    settle()
    return {
        "driver": w.live_objects(),
        **w.state(),
        "open": [thing.is_closed for thing in vars(w).values() if hasattr(thing, "is_closed")],
        "plans": [len(w.plan), len(w.large_plan)],
        "device": Device(),
    }


def references(w):
    """How many references there are to the objects of the world, to locations and to types."""
    things = [thing for thing in vars(w).values() if hasattr(thing, "is_closed")]
    return sum(map(sys.getrefcount, [*things, *LASTING]))


def is_plain(result):
    """False for objects such as views, which never equal those of another call."""
    if isinstance(result, dict):
        return is_plain([*result, *result.values()])
    return isinstance(result, PLAIN) or (isinstance(result, GROUPS) and all(map(is_plain, result)))


def difference(before, now, allowed=frozenset()):
    return [name for name in before if name not in allowed and before[name] != now[name]]


class Sweep:
    """One operation, and one kind of allocation."""

    def __init__(self, allocations, name, operation, kind):
        self.allocations, self.name = allocations, name
        self.operation, self.kind = operation, kind

    @functools.cached_property
    def after_success(self):
        w = self.operation.make_world()
        self.operation.run(w)
        w.drop_results()
        after = state(w)
        w.end()
        return after

    def once(self, w, n):
        """One attempt; returns whether the allocation was reached, and the world to go on with."""
        before = state(w)
        result, error, text, reached = attempt(self.allocations, self.operation, w, self.kind, n)
        if not reached:
            if error is not None:
                raise Wrong(f"it fails without a failed allocation: {error.__name__}: {text}")
            w.drop_results()
            return False, w
        other = OTHERS_RAISE.get(self.name)
        if error not in (None, other) and not is_memory_error(error):
            raise Wrong(f"{error.__name__} and not MemoryError: {text}")
        if error is None:
            return True, self.check_success(w, before, result)
        w.drop_results()
        changed = difference(before, state(w), self.operation.may_change)
        if changed:
            raise Wrong(f"{', '.join(changed)} changed though it raised")
        return True, w

    def check_success(self, w, before, result):
        """Without an exception, the operation must have had its usual effect."""
        plain = is_plain(result)
        w.drop_results()
        now = state(w)
        changed = difference(self.after_success, now)
        if changed:
            raise Wrong(f"it raised nothing, but {', '.join(changed)} are not as after success")
        if plain and not difference(before, now) and self.operation.run(w) != result:
            raise Wrong(f"it raised nothing and returned {result!r}")
        w.end()
        return self.operation.make_world()

    def count_live(self, w):
        """The numbers of blocks of the extension, of blocks of CPython and of references."""
        w.drop_results()
        settle()
        gc.collect()  # also frees what CPython keeps for later objects
        ctypes.pythonapi.PyType_ClearCache()  # it holds names of attributes
        return [*map(self.allocations.live, KINDS), references(w)]

    def check_leaks(self, w, n):
        """Attempt it again: neither blocks nor references may grow each time."""
        kept = [sys.maxsize] * 3
        before = self.count_live(w)
        for _ in range(ATTEMPTS):
            attempt(self.allocations, self.operation, w, self.kind, n)
            now = self.count_live(w)
            kept = [min(k, a - b) for k, a, b in zip(kept, now, before, strict=True)]
            if max(kept) <= 0:
                return
            before = now
        if kept[0] > 0 or self.kind != "python" or self.name not in LEAKS_OF_CPYTHON:
            wrong = "leaked: {} blocks of the extension, {} of CPython, {} references"
            raise Wrong(wrong.format(*kept))

    def run(self):
        """How many attempts there were, and the failure or None."""
        self.after_success  # noqa: B018 (caches of the process are filled now)
        w = self.operation.make_world()
        n = 0
        try:
            for n in range(1, MOST):
                tell(self.name, self.kind, n)
                reached, w = self.once(w, n)
                if not reached:
                    w.end()
                    return n, None
                self.check_leaks(w, n)
            raise Wrong("its allocations do not end")
        except Wrong as wrong:
            return n, str(wrong)


def operations(library, names, table=None, defect=None):
    allocations = prepare(library, defect)
    warm_up()
    gc.collect()
    gc.freeze()
    gc.disable()
    table = table or everything()
    for name in names:
        if table[name].devices <= Device.count():
            for kind in KINDS:
                n, wrong = Sweep(allocations, name, table[name], kind).run()
                tell(name, kind, n, wrong)


# --- the module ---------------------------------------------------------------------------------


def make_module(_):
    """Create the extension's module again; return its contents."""
    name, path = managedmem._managedmem.__name__, managedmem._managedmem.__file__
    module = _imp.create_dynamic(ModuleSpec(name, ExtensionFileLoader(name, path), origin=path))
    _imp.exec_dynamic(module)
    return {
        key: sorted(vars(value)) if isinstance(value, type) else type(value).__name__
        for key, value in vars(module).items()
    }


def sweep_module(allocations, kind):
    operation = types.SimpleNamespace(run=make_module)
    complete = make_module(None)
    for n in range(1, 10 * MOST):
        tell("import", kind, n)
        found, error, text, reached = attempt(allocations, operation, None, kind, n)
        if error is not None and not is_memory_error(error):
            return n, f"{error.__name__} and not MemoryError: {text}"
        if error is None and found != complete:
            return n, "the module is not complete"
        if error is not None and n % 50 == 0:
            gc.collect()
        if not reached:
            return n, None
    return n, "its allocations do not end"


def imports(library, defect=None):
    allocations = prepare(library, defect)
    for kind in KINDS:
        tell("import", kind, *sweep_module(allocations, kind))
