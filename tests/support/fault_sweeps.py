"""The program behind test_fault_sweeps.py: faults of every call of every operation.

A fault comes before the call acts or after it, alone or with a second one, on pages whose advice
is the same or differs, and for one call or for all calls from then on. Each sweep takes names of
operations and prints a line of JSON for each attempt, [name, attempt], and one more for each
operation, [name, attempts, failure or null].
"""

import ctypes
import dataclasses
import faulthandler
import gc
import re
import sys

import managedmem
from all_operations import everything
from constants import PAGE
from driver import CAPTURE_RELAXED, pop_contexts, raw_driver
from failing import Wrong, tell
from live_memory import settle, warm_up
from managedmem import CUDAError, CUDAOutOfMemoryError, Device, emulator
from operations import OPERATIONS
from world import (
    DISPATCH_HINT,
    HOST,
    LAUNCH_FAILED,
    MOVES,
    OF_STREAMS,
    ONE,
    OUT_OF_MEMORY,
    REPEATED,
    WIPES,
    WRITES,
    ZERO,
)

READ_MOSTLY, PREFERRED_LOCATION, ACCESSED_BY = range(3)  # the columns of World.advice()
# The advice of operations whose names do not tell it; for other names it is accessed_by.
ADVISED = {
    "advice of a view": READ_MOSTLY,
    "advice of a wrapper": READ_MOSTLY,
    "advise one": READ_MOSTLY,
    "advise twice the same": PREFERRED_LOCATION,
    "advise overlapping parts": PREFERRED_LOCATION,
}
SECOND = 700  # the code of the second fault
MOST = 400
# The distances in calls between two faults. Beyond a dozen, the calls repeat themselves.
DISTANCES = [*range(1, 13), *range(13, MOST, 9)]
# The library cannot free an object if its creation was reported as failed.
MAKES = {
    *("cuCtxPushCurrent", "cuDevicePrimaryCtxRetain", "cuEventCreate", "cuMemAllocFromPoolAsync"),
    *("cuMemAddressReserve", "cuMemAlloc", "cuMemAllocManaged", "cuMemCreate", "cuMemHostAlloc"),
    *("cuMemPoolCreate", "cuStreamCreate"),
}
# When one of these fails, the object stays with the driver.
FREES = {
    *("cuEventDestroy", "cuMemAddressFree", "cuMemFree", "cuMemFreeAsync", "cuMemFreeHost"),
    *("cuMemPoolDestroy", "cuMemRelease", "cuMemUnmap", "cuStreamDestroy"),
}
# Queries whose answers decide only the text of a message, or how to dispatch.
HINTS = DISPATCH_HINT | {"cuMemRangeGetAttributes"}
# These restore a policy, which stays in force when they fail.
RESTORING = {"applied policy", "policy applied", "restore a policy"}
# Memory of another library stays open when its deallocate() fails.
FOREIGN = {"copy_to foreign memory", "foreign memory", "foreign memory dropped"}
# Calls that are made when objects are dropped, where a failure cannot be raised.
DROPPING = {
    *("cuCtxGetCurrent", "cuCtxGetDevice", "cuCtxGetId", "cuCtxPushCurrent", "cuEventCreate"),
    *("cuEventQuery", "cuEventRecord", "cuMemPoolGetAttribute", "cuMemPoolTrimTo"),
    *("cuPointerGetAttributes", "cuStreamGetCtx", "cuStreamGetId"),
    *("cuStreamIsCapturing", "cuDeviceGetAttribute"),
}
# The changes that a call may have made before it failed.
DONE = (("Discard", WIPES), ("Prefetch", MOVES), ("Memcpy", WRITES), ("Memset", WRITES))


def plain(name):
    """A function's name without the version suffix of its exported symbol."""
    return re.sub(r"_v\d+$", "", name)


def mix_everything(w):
    """Give each page of each buffer different advice."""
    for at, buffer in enumerate(w.buffers):
        pages = [buffer[page * PAGE :][:PAGE] for page in range(buffer.size // PAGE)]
        for page, view in enumerate(pages):
            view.read_mostly = (page + at) % 2 == 0
            view.preferred_location = [None, HOST, ZERO, ONE][(page + at) % 4]
            view.accessed_by = [[], [HOST], [ZERO], [HOST, ONE]][(page + 2 * at) % 4]


def mixed(operation):
    def prepare_mixed(w):
        mix_everything(w)
        operation.prepare(w)

    return dataclasses.replace(operation, prepare=prepare_mixed)


def state(w):
    return {**w.state(), "capture mode": capture_mode()}


def capture_mode():
    """The thread's capture mode, which the driver returns only in exchange for another."""
    exchange, mode = raw_driver().cuThreadExchangeStreamCaptureMode, ctypes.c_int(CAPTURE_RELAXED)
    exchange(ctypes.byref(mode))
    found = mode.value
    exchange(ctypes.byref(mode))
    return found


def live(w):
    settle()  # makes late frees, which a lazy driver runs at the next wait
    settle()
    return w.live_objects()


@dataclasses.dataclass
class Outcome:
    error: Exception | None
    failed: list  # functions, in the order of their failure
    before: dict
    now: dict
    kept: list  # names of counts of live objects that grew
    advised: bool  # some advice took effect


def without_traces(error):
    """The error, without its traceback and those of its contexts, which keep objects."""
    earlier = error
    while earlier is not None:
        earlier.__traceback__ = None
        earlier = earlier.__context__
    return error


def attempt(operation, w, *faults):
    """Act with these faults; None if not all of them fired."""
    before, alive = state(w), live(w)
    error = None
    emulator.clear_calls()
    for fault in faults:
        emulator.fail("*", **fault)
    try:
        operation.run(w)
    except Exception as caught:
        error = without_traces(caught)
    fired = emulator._library().emu_fail_fired()
    emulator.clear_failures()
    if fired < len(faults):
        pop_contexts(alive.context_depth)  # a push that acted and failed
        return None
    codes = {fault["code"] for fault in faults}
    calls = [(plain(call.name), call.result) for call in emulator.calls()]
    failed = [name for name, result in calls if result in codes]
    w.drop_results()
    now = live(w)
    kept = [name for name in now._fields if getattr(now, name) != getattr(alive, name)]
    pop_contexts(alive.context_depth)
    return Outcome(error, failed, before, state(w), kept, ("cuMemAdvise", 0) in calls)


def may_be_silent(operation, name, *functions):
    """Whether the operation may succeed although these functions failed."""
    silent = REPEATED | operation.silent | FREES | HINTS | OF_STREAMS
    if name not in OPERATIONS:
        silent |= DROPPING
    if operation.raises is not None and issubclass(CUDAError, operation.raises):
        return True
    return silent >= {*functions}


def codes(error):
    """The codes of an error, and of those that were being handled when it was raised."""
    while error is not None:
        yield getattr(error, "code", None)
        error = error.__context__


def advised(operation_name):
    """The column of the advice that an operation changes; a policy changes and restores all."""
    if "read_mostly" in operation_name:
        return READ_MOSTLY
    if "preferred_location" in operation_name:
        return PREFERRED_LOCATION
    return ADVISED.get(operation_name, ACCESSED_BY)


def others(advice, column):
    """The advice of all pages without that column."""
    return [[run[:column] + run[column + 1 :] for run in pages] for pages in advice]


def must_raise(operation, name, outcome):
    """True if the failure must raise: in the main table only these calls may fail unnoticed."""
    silent = REPEATED | OF_STREAMS | operation.silent
    if outcome.advised:  # the last query of a set: the advice holds without it
        silent |= {"cuMemRangeGetAttribute", "cuMemRangeGetAttributes"}
    return name in OPERATIONS and outcome.failed[0] not in silent


def check_error(outcome, operation, name, code, after):
    """The caller must learn of the first failure, by the right class and text."""
    error, first = outcome.error, outcome.failed[0]
    expected = CUDAOutOfMemoryError if code == OUT_OF_MEMORY else CUDAError
    if error is None:
        if operation.raises is not None and issubclass(expected, operation.raises):
            return
        strict = not after and must_raise(operation, name, outcome)
        if strict or not may_be_silent(operation, name, first):
            raise Wrong(f"a failing {first} went unnoticed")
    elif not isinstance(error, CUDAError):
        raise Wrong(f"{type(error).__name__}: {error}")
    elif error.code != code or error.function not in outcome.failed:
        raise Wrong(f"{first} failed with {code}, but the error is: {error}")
    elif type(error) is not expected:
        raise Wrong(f"{first} failed with {code}, but the error is a {type(error).__name__}")
    elif error.function not in str(error) or error.name not in str(error):
        raise Wrong(f"{first} failed with {code}, which the error does not say: {error}")


def done_by(function):
    """What a call may have changed before it failed."""
    return {change for words, done in DONE if words in function for change in done}


def check_state(outcome, allowed, mixed_name=None):
    """Check that only allowed changes were made.

    On pages that differ, the advice of the operation may have changed, too.
    """
    before, now = dict(outcome.before), dict(outcome.now)
    if mixed_name is not None and not mixed_name.startswith("policy"):
        before["advice"] = others(before["advice"], advised(mixed_name))
        now["advice"] = others(now["advice"], advised(mixed_name))
    for name in set(before) - allowed:
        if before[name] != now[name]:
            raise Wrong(f"{name} changed when {', '.join(outcome.failed)} failed")


def go_on(operation, w):
    """The operation succeeds after it failed."""
    operation.prepare(w)
    operation.run(w)
    w.end()


# --- the sweeps ---------------------------------------------------------------------------------


def one_fault(operation, name, after=False, is_mixed=False, code=LAUNCH_FAILED):
    """Each call fails: before it acts, or after."""
    fewest = operation.faults if name in OPERATIONS and not is_mixed else 0
    for n in range(1, MOST):
        tell(name, n)
        w = operation.make_world()
        outcome = attempt(operation, w, {"nth": n, "code": code, "after": after})
        if outcome is None:
            w.end()
            if n - 1 < fewest:
                raise Wrong(f"it makes {n - 1} calls, not {fewest}")
            return n - 1
        if not outcome.failed:  # the call has failed with an error of its own
            w.end()
            continue
        check_error(outcome, operation, name, code, after)
        first = outcome.failed[0]
        allowed = set(operation.may_change) | (done_by(first) if after else set())
        if outcome.error is not None:
            check_state(outcome, allowed, name if is_mixed else None)
        if outcome.kept and first not in FREES and not (after and first in MAKES):
            raise Wrong(f"{', '.join(outcome.kept)} kept when {first} failed")
        go_on(operation, w)
    raise Wrong("its calls do not end")


def two_faults(operation, name, after=False, is_mixed=False):
    """Each call fails, and then a later one: among these are the calls that restore the state."""
    attempts = 0
    for n in range(1, MOST):
        for k in DISTANCES:
            tell(name, (n, k))
            w = operation.make_world()
            outcome = attempt(
                operation,
                w,
                {"nth": n, "code": LAUNCH_FAILED, "after": after},
                {"nth": n + k, "code": SECOND},
            )
            if outcome is None:
                w.end()
                break
            attempts += 1
            if len(outcome.failed) < 2:
                w.end()
                continue
            check_pair(outcome, operation, after, name, is_mixed)
            go_on(operation, w)
        if k == 1 and calls_of(operation) <= n:
            return attempts
    raise Wrong("its calls do not end")


def calls_of(operation):
    w = operation.make_world()
    emulator.clear_calls()
    operation.run(w)
    count = len(emulator.calls())
    w.end()
    return count


def check_pair(outcome, operation, after, name, is_mixed):
    first, second = outcome.failed
    error = outcome.error
    if error is None:
        if not may_be_silent(operation, name, first, second):
            raise Wrong(f"failing {first} and {second} went unnoticed")
    elif not isinstance(error, CUDAError):
        raise Wrong(f"{type(error).__name__}: {error}")
    elif LAUNCH_FAILED not in codes(error) and not may_be_silent(operation, name, first):
        raise Wrong(f"{first} failed, then {second}, but the error is: {error}")
    allowed = done_by(first) | set(operation.may_change) if after else set(operation.may_change)
    if second.startswith(("cuMemAdvise", "cuMemRange", "cuCtx", "cuThread")):
        allowed.add("advice")
    if name in RESTORING:  # it tries again, and meets the second fault
        allowed.add("advice")
    if {first, second} & REPEATED:  # both tries failed
        allowed.add("capture mode")
    if second.startswith(("cuMemPool", "cuCtx", "cuThread", "cuDevice")):
        allowed.add("access")
    if error is not None:
        check_state(outcome, allowed, name if is_mixed else None)
    if outcome.kept and not {first, second} & (FREES | REPEATED) and not (after and first in MAKES):
        raise Wrong(f"{', '.join(outcome.kept)} kept when {first} and {second} failed")


def lasting_fault(operation, name):
    """From each call on, all calls fail: objects still close, without a crash or a hang."""
    count = calls_of(operation)  # the late frees of earlier attempts add calls
    for n in range(1, count + 1):
        tell(name, n)
        w = operation.make_world()
        depth = emulator.live().context_depth
        emulator.clear_calls()
        emulator.fail("*", nth=n, code=LAUNCH_FAILED, lasting=True)
        error = raised(lambda w=w: operation.run(w))
        if not emulator.failure_fired():
            raise Wrong(f"call {n} did not fail")
        if error is not None and error.code != LAUNCH_FAILED:
            raise Wrong(f"the error is: {error}")
        if raised(Device().sync) is None:
            raise Wrong("a broken device counts as synchronised")
        for thing in [*w.made, *w.buffers, w.large, w.wrapped, w.stream, *w.pools]:
            raised(getattr(thing, "close", gc.collect))
            if getattr(thing, "is_closed", True) is not True and name not in FOREIGN:
                raise Wrong(f"{thing!r} stays open")
        if emulator.live().context_depth != depth:
            raise Wrong("a context stays on the stack")
        del thing, w
        emulator.clear_failures()
        gc.collect()
        managedmem.result_cache.clear()
        settle()  # late frees are made now
    return count


def raised(call):
    """The CUDAError of a call, or None; other exceptions are passed on."""
    try:
        call()
    except CUDAError as error:
        return error.with_traceback(None)
    return None


# The operations that depend on the advice of pages.
ADVISING = [
    name
    for name in OPERATIONS
    if OPERATIONS[name].covers.startswith("AccessedBySetProxy.")
    or name.startswith(("advi", "set ", "unset ", "assign", "policy"))
]
MIXED = sorted({*ADVISING} - {"policy of", "set release_threshold", "set the deallocation stream"})
ALL = [*everything()]


def on_mixed(sweep_one, **more):
    return lambda operation, name: sweep_one(mixed(operation), name, is_mixed=True, **more)


# The sweeps by name, with the operations that each is for.
SWEEPS = {
    "before": (one_fault, ALL),
    "out of memory": (lambda operation, name: one_fault(operation, name, code=OUT_OF_MEMORY), ALL),
    "after": (lambda operation, name: one_fault(operation, name, after=True), ALL),
    "two": (two_faults, ALL),
    "two, the first after": (lambda operation, name: two_faults(operation, name, True), ALL),
    "lasting": (lasting_fault, ALL),
    "mixed, before": (on_mixed(one_fault, after=False), MIXED),
    "mixed, after": (on_mixed(one_fault, after=True), MIXED),
    "mixed, two": (on_mixed(two_faults), MIXED),
}


def sweep(kind, names, table=None):
    warm_up()
    raw_driver().emu_log_verbose(1)
    gc.collect()
    gc.freeze()
    gc.disable()
    sys.unraisablehook = lambda raised: None  # from deallocate() of other libraries
    table = table or everything()
    for name in names:
        if table[name].devices <= Device.count():
            try:
                tell(name, SWEEPS[kind][0](table[name], name), None)
            except Wrong as wrong:
                emulator.clear_failures()
                tell(name, 0, str(wrong))


if __name__ == "__main__":
    faulthandler.enable()
    sweep(sys.argv[1], sys.argv[2:] or SWEEPS[sys.argv[1]][1])
