"""Operations that Python's own functions and operators call."""

import copy
import operator
import pickle

import numpy

import managedmem
from constants import PAGE
from lifetime_operations import leave_with
from managedmem import DeviceMemoryResource, Host, ManagedMemoryResource, MigrationPolicy, Stream
from operations import apply_for_a_block
from world import EVERYTHING, HOST, MOVES, ONE, PAGES, ZERO, Operation, in_pools


def same_set(kind, members, other):
    """The protocols of a set of locations that the other tables do not have."""
    name = f"{kind}.{{}}".format

    def on(act, covers, may_raise=None, may_change=frozenset()):
        return Operation(
            lambda w: act(members(w), other),
            " ".join(map(name, covers.split())),
            prepare=lambda w: w.make_pools(),
            raises=may_raise,
            may_change=may_change,
            devices=2,
        )

    def changed_and_restored(change):
        """Change the set and restore it; a failure in between leaves it changed."""

        def act(s, o):
            before = s.copy()
            change(s, o)
            s.update(before)
            s.intersection_update(before)

        return act

    operators = [
        *("lt", "le", "gt", "ge", "eq", "ne", "or", "and", "sub", "xor", "ror", "rand"),
        *("rsub", "rxor"),
    ]
    in_place = ["ior", "iand", "isub", "ixor"]
    return {
        **{
            f"{kind} {symbol}": on(
                lambda s, o, symbol=symbol: getattr(s, f"__{symbol}__")({o}), f"__{symbol}__"
            )
            for symbol in operators
        },
        **{
            f"{kind} {symbol}": on(
                changed_and_restored(lambda s, o, symbol=symbol: getattr(s, f"__{symbol}__")({o})),
                f"__{symbol}__",
                may_change=frozenset({"advice", "access"}),
            )
            for symbol in in_place
        },
        f"{kind} repr": on(lambda s, o: repr(s), "__repr__"),
        f"{kind} iter": on(lambda s, o: list(s), "__iter__"),
        f"{kind} len": on(lambda s, o: len(s), "__len__"),
        f"{kind} in": on(lambda s, o: o in s, "__contains__"),
        f"{kind} copy.copy": on(lambda s, o: copy.copy(s), "__copy__"),
        f"{kind} copy.deepcopy": on(lambda s, o: copy.deepcopy(s), "__deepcopy__"),
        f"{kind} pickle": on(lambda s, o: pickle.dumps(s), "__reduce__", TypeError),
    }


def reduce(thing, covers):
    return Operation(lambda w: pickle.loads(pickle.dumps(thing(w))), covers)


def show_in_a_notebook(w):
    """Return nothing to compare, because the HTML has the message of a failure in it."""
    w.a._repr_html_()


PROTOCOLS = {
    **same_set("AccessedBySetProxy", lambda w: w.members, ZERO),
    **same_set("PeerAccessibleBySetProxy", lambda w: w.peers, ONE),
    "buffer repr": Operation(lambda w: repr(w.part), "ManagedBuffer.__repr__"),
    "buffer html": Operation(
        show_in_a_notebook,
        "ManagedBuffer._repr_html_",
        silent=frozenset({"cuMemRangeGetAttributes"}),
        faults=2,
    ),
    "buffer len": Operation(lambda w: len(w.a), "ManagedBuffer.__len__"),
    "buffer bool": Operation(lambda w: bool(w.a), "ManagedBuffer.__bool__"),
    "buffer int": Operation(lambda w: int(w.a), "ManagedBuffer.__int__", raises=TypeError),
    "buffer float": Operation(lambda w: float(w.a), "ManagedBuffer.__float__", raises=TypeError),
    "buffer in": Operation(lambda w: 1 in w.a, "ManagedBuffer.__contains__", raises=TypeError),
    "buffer item =": Operation(
        lambda w: operator.setitem(w.a, 0, 5), "ManagedBuffer.__setitem__", raises=TypeError
    ),
    "buffer slices =": Operation(
        lambda w: operator.setitem(w.a, (slice(1, 3), slice(None, None, 2)), 5), raises=TypeError
    ),
    "del buffer item": Operation(
        lambda w: operator.delitem(w.a, 0), "ManagedBuffer.__delitem__", raises=TypeError
    ),
    "buffer index": Operation(lambda w: w.a.view("u1", (4, PAGE))[-1], "ManagedBuffer.__getitem__"),
    "buffer slice": Operation(lambda w: w.a[8:-8][1:]),
    "buffer view": Operation(lambda w: w.a.view("f4", (PAGES, PAGE // 4))),
    "buffer iter": Operation(lambda w: list(w.a.view("u1", (4, PAGE))), "ManagedBuffer.__iter__"),
    "buffer copy": Operation(
        lambda w: w.keep(copy.copy(w.a)), "ManagedBuffer.__copy__", may_change=MOVES
    ),
    "buffer deepcopy": Operation(
        lambda w: w.keep(copy.deepcopy(w.part)), "ManagedBuffer.__deepcopy__", may_change=MOVES
    ),
    "buffer pickle": Operation(
        lambda w: pickle.dumps(w.a), "ManagedBuffer.__reduce__", raises=TypeError
    ),
    "buffer with": Operation(
        leave_with(lambda w: managedmem.empty(PAGE)),
        "ManagedBuffer.__enter__ ManagedBuffer.__exit__",
    ),
    "buffer del": Operation(lambda w: managedmem.empty(PAGE).__del__(), "ManagedBuffer.__del__"),
    "array interface": Operation(
        lambda w: w.part.view("f4").__cuda_array_interface__,
        "ManagedBuffer.__cuda_array_interface__",
    ),
    "buffer array": Operation(
        lambda w: w.keep(w.a.__array__()), "ManagedBuffer.__array__", may_change=MOVES
    ),
    "array of other type": Operation(lambda w: w.keep(w.a.__array__("float32")), may_change=MOVES),
    "numpy copy": Operation(lambda w: w.keep(w.a.numpy(copy=True)), may_change=MOVES),
    "dlpack": Operation(lambda w: w.a.__dlpack__(), "ManagedBuffer.__dlpack__"),
    "dlpack of a version": Operation(lambda w: w.a.__dlpack__(max_version=(1, 1), stream=1)),
    "dlpack for the host": Operation(
        lambda w: w.a.view("u2", (PAGES, PAGE // 2)).__dlpack__(dl_device=(1, 0))
    ),
    "dlpack copy": Operation(lambda w: w.a.__dlpack__(copy=True)),
    "dlpack to a consumer": Operation(lambda w: w.keep(numpy.from_dlpack(w.a)), may_change=MOVES),
    "dlpack device": Operation(
        lambda w: w.a.__dlpack_device__(), "ManagedBuffer.__dlpack_device__"
    ),
    "host view": Operation(
        lambda w: memoryview(w.a.view("f4", (PAGES, PAGE // 4))).cast("B").release(),
        "ManagedBuffer.__buffer__ ManagedBuffer.__release_buffer__",
    ),
    "location repr": Operation(
        lambda w: (repr(HOST), repr(Host(1)), repr(ZERO)), "Host.__repr__ Device.__repr__"
    ),
    "host pickle": reduce(lambda w: Host(1), "Host.__reduce__"),
    "device pickle": reduce(lambda w: ZERO, "Device.__reduce__"),
    "policy pickle": reduce(lambda w: EVERYTHING, "MigrationPolicy.__reduce__"),
    "policy repr": Operation(lambda w: repr(EVERYTHING), "MigrationPolicy.__repr__"),
    "policy hash": Operation(lambda w: hash(EVERYTHING), "MigrationPolicy.__hash__"),
    "policy ==": Operation(
        lambda w: [
            MigrationPolicy.default() == EVERYTHING,
            MigrationPolicy.default() != EVERYTHING,
            MigrationPolicy.__lt__(EVERYTHING, EVERYTHING),
        ],
        "MigrationPolicy.__eq__ MigrationPolicy.__ne__ MigrationPolicy.__lt__ "
        "MigrationPolicy.__le__ MigrationPolicy.__gt__ MigrationPolicy.__ge__",
    ),
    "applied policy": Operation(
        apply_for_a_block, "AppliedPolicy.__enter__ AppliedPolicy.__exit__"
    ),
    "applied policy repr": Operation(
        lambda w: repr(EVERYTHING.applied([w.a])), "AppliedPolicy.__repr__"
    ),
    "applied policy pickle": Operation(
        lambda w: pickle.dumps(EVERYTHING.applied([w.a])),
        "AppliedPolicy.__reduce__",
        raises=TypeError,
    ),
    "plan repr": Operation(lambda w: repr(w.plan), "PrefetchPlan.__repr__"),
    "plan iter": Operation(lambda w: [entry.target for entry in w.plan], "PrefetchPlan.__iter__"),
    "plan len": Operation(lambda w: len(w.plan), "PrefetchPlan.__len__"),
    "stream repr": Operation(lambda w: repr(w.stream), "Stream.__repr__"),
    "stream protocol": Operation(lambda w: w.stream.__cuda_stream__(), "Stream.__cuda_stream__"),
    "stream with": Operation(leave_with(lambda w: Stream()), "Stream.__enter__ Stream.__exit__"),
    "stream ==": Operation(
        lambda w: (w.stream != w.stream, Stream.__lt__(w.stream, w.stream)),
        "Stream.__ne__ Stream.__lt__ Stream.__le__ Stream.__gt__ Stream.__ge__",
    ),
    "resource repr": in_pools(
        lambda w: (
            repr(w.pool),
            repr(w.own),
            repr(w.own.attributes),
            repr(ManagedMemoryResource(preferred_location=HOST)),
            repr(ManagedMemoryResource(policy=EVERYTHING)),
        ),
        "ManagedMemoryResource.__repr__ DeviceMemoryResource.__repr__ PoolAttributes.__repr__",
    ),
    "resource with": Operation(
        leave_with(lambda w: ManagedMemoryResource(pooled=True)),
        "ManagedMemoryResource.__enter__ ManagedMemoryResource.__exit__",
    ),
    "device resource with": Operation(
        leave_with(lambda w: DeviceMemoryResource(ZERO)),
        "DeviceMemoryResource.__enter__ DeviceMemoryResource.__exit__",
    ),
    "dtype": Operation(
        lambda w: (
            w.a.dtype == "uint8",
            w.a.dtype != "f4",
            managedmem.typing.DType.__lt__(w.a.dtype, "x"),
            hash(w.a.dtype),
        ),
        "DType.__eq__ DType.__ne__ DType.__lt__ DType.__le__ DType.__gt__ DType.__ge__ "
        "DType.__hash__",
    ),
    "dtype pickle": reduce(lambda w: w.a.dtype, "DType.__reduce__"),
    "cupy is missing": Operation(lambda w: arrays(w.a.cupy), "ManagedBuffer.cupy"),
    "torch is missing": Operation(lambda w: arrays(w.a.torch), "ManagedBuffer.torch"),
}


def arrays(make):
    """Make an array of another library, or ignore the error that says that it cannot be made."""
    try:
        make()
    except managedmem.CUDAError:
        raise  # where the library is installed
    except (ImportError, RuntimeError, BufferError, ValueError):
        pass
