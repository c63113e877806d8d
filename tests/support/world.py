"""The memory on which the tables of operations act, and an operation of a table."""

import dataclasses
import gc
from collections.abc import Callable

import managedmem
from constants import PAGE
from contents import contents, pattern, write
from managedmem import (
    Device,
    DeviceMemoryResource,
    Host,
    ManagedBuffer,
    ManagedMemoryResource,
    PrefetchPlan,
    Stream,
)

LAUNCH_FAILED = 719
OUT_OF_MEMORY = 2
PAGES = 4
SIZE = PAGES * PAGE
PATTERNS = [pattern(SIZE, start) for start in range(3)]
# These restore the caller's state, and are tried twice: one failure is not an error.
REPEATED = {"cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode"}
# Called before a stream is used or closed. A failure counts as a context that has not ended.
OF_STREAMS = {"cuCtxGetId"}
# A query that only decides how to dispatch: without its answer the operation takes another route.
DISPATCH_HINT = {"cuMemRangeGetAttribute"}
# What an operation may change when it fails.
MOVES = frozenset({"prefetched"})
WIPES = frozenset({"prefetched", "bytes"})
WRITES = frozenset({"bytes"})
HOST, ZERO, ONE = Host(), Device(0), Device.all()[-1]
EVERYTHING = managedmem.MigrationPolicy(
    read_mostly=True, preferred_location=ZERO, accessed_by=[ZERO, HOST]
)


class World:
    """Three buffers with contents and advice of their own, a view, a wrapper and a stream."""

    def __init__(self):
        resource = ManagedMemoryResource()
        self.a, self.b, self.c = self.buffers = [resource.allocate(SIZE) for _ in range(3)]
        self.stream = Stream()
        self.part = self.a[PAGE : 3 * PAGE]
        self.wrapped = ManagedBuffer.from_handle(self.c.handle, self.c.size)
        self.large = resource.allocate(1 << 20)
        self.plan = PrefetchPlan(zip(self.buffers, [ONE, ZERO, HOST], strict=True))
        self.plan.add(self.a, ONE, offset=PAGE, nbytes=PAGE + 100)
        self.large_plan = PrefetchPlan((self.large[i << 18 :][: 1 << 16], ZERO) for i in range(4))
        self.made = []
        for index, buffer in enumerate(self.buffers):
            write(buffer, PATTERNS[index])
        self.a.name, self.wrapped.name = "first", "third, wrapped"
        self.a.read_mostly = True
        self.a.preferred_location = Host()
        self.a.accessed_by = [Device(0), Host()]
        self.b.preferred_location = Device.all()[-1]
        self.b.accessed_by = [Device.all()[-1]]
        self.a.prefetch(Host())
        self.b.prefetch(Device.all()[-1])
        self.c.prefetch(Device(0))
        self.members = self.a.accessed_by
        self.pools = []

    def make_pools(self):
        """Make a managed pool, and a device pool that the last device can use; a buffer in each."""
        if not self.pools:
            self.pool = ManagedMemoryResource(pooled=True)
            self.own = DeviceMemoryResource(ZERO)
            self.pools = [self.pool, self.own]
            self.pooled = self.pool.allocate(SIZE)
            self.plain = self.own.allocate(SIZE)
        self.peers = self.own.peer_accessible_by
        self.own.peer_accessible_by = [ONE]
        self.plain.copy_from(PATTERNS[0])

    def access(self):
        return [frozenset(self.peers)] if self.pools else []

    def advice(self):
        """The advice of each page."""
        return [
            [run[2:-1] for run in b.page_runs() for _ in range(run.nbytes // PAGE)]
            for b in self.buffers
            if not b.is_closed
        ]

    def prefetched(self):
        return [b.last_prefetch_location for b in self.buffers if not b.is_closed]

    def bytes(self):
        return [contents(b) for b in self.buffers if not b.is_closed]

    def names(self):
        return [b.name for b in (*self.buffers, self.part, self.wrapped)]

    def state(self):
        """The state that a failing operation must not change."""
        return {
            "advice": self.advice(),
            "prefetched": self.prefetched(),
            "bytes": self.bytes(),
            "access": self.access(),
            "names": self.names(),
        }

    def live_objects(self):
        """The live objects of the driver, without the events that a pool keeps for later frees."""
        from managedmem import emulator

        live = emulator.live()
        return live._replace(events=0) if self.pools else live

    def made_by(self, resource, size):
        """Memory of that resource, held until the counting is done."""
        self.keep(resource.allocate(size))
        return self.made[-1]

    def keep(self, thing):
        """Hold a result until the counting is done."""
        self.made.append(thing)

    def drop_results(self):
        while self.made:
            getattr(self.made.pop(0), "close", bool)()
        gc.collect()
        managedmem.result_cache.clear()

    def end(self):
        self.drop_results()
        extra = [self.pooled, self.plain, *self.pools] if self.pools else []
        for thing in [*self.buffers, self.large, self.stream, *extra]:
            thing.close()


@dataclasses.dataclass
class Operation:
    """One use of the public surface, and what of the world it may change when it fails."""

    act: Callable
    covers: str = ""
    prepare: Callable = lambda w: None
    may_change: frozenset = frozenset()  # of "prefetched", "bytes"
    silent: frozenset = frozenset()  # functions whose failure need not surface
    faults: int = 1  # how many driver calls it makes at the least
    devices: int = 1  # how many it needs
    raises: type | None = None  # what it raises when nothing fails

    def make_world(self):
        """A world that is prepared for it."""
        w = World()
        self.prepare(w)
        return w

    def run(self, w):
        """Act, and check that an operation with `raises` raises that."""
        if self.raises is None:
            return self.act(w)
        try:
            self.act(w)
        except self.raises:
            return None
        raise AssertionError(f"{self.raises.__name__} was not raised")


def in_pools(act, covers="", **more):
    """An operation on the pools of the world."""
    return Operation(act, covers, prepare=lambda w: w.make_pools(), **more)
