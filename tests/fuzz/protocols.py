"""Protocol input of the extension: calls that are made from bytes.

An input is a program: each call takes the bytes that it needs for its arguments, which are objects
of other libraries with wrong, huge or hostile parts. `run` raises if a call raises an exception
that is not documented, accepts memory that does not exist, or leaves something behind.
libFuzzer runs it with the extension under sanitizers (embed.c, run.sh); the suite runs it over the
corpus.
"""

import array
import contextlib
import operator
import os
import types
import warnings

os.environ.setdefault("MANAGEDMEM_DRIVER", "emulator")

import managedmem
from managedmem import (
    Device,
    Host,
    ManagedBuffer,
    ManagedMemoryResource,
    MigrationPolicy,
    PrefetchPlan,
    Stream,
    emulator,
)

PAGE = 4096
ARENA = 8 * PAGE
MOST_CALLS = 12
DOCUMENTED = (
    TypeError,
    ValueError,
    RuntimeError,
    BufferError,
    MemoryError,
    OverflowError,
    IndexError,
    NotImplementedError,
)
TEXTS = (
    "|u1", "<f4", "<c16", "f8", "|b1", ">f4", "<", "|V70000", "<f0", "<f-4", "<f4x", "=i8",
    "torch.float32", "torch.", "int", "bool_", "uint8", "", "\0", "<f4\0", "\ud800", "<é4",
    "|S99999999999999999999", "auto", "batch", "set_read_mostly", "unset_accessed_by",
    "set_preferred_location", "unset_preferred_location", "cuda", "cpu", "gpu",
)  # fmt: skip
NUMBERS = (
    0, 1, 2, 3, 4, 8, 13, 64, 65, 255, 256, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, ARENA, ARENA + 1,
    2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30,
)  # fmt: skip
FORMATS = ("B", "b", "h", "i", "q", "f", "d", "?", "c", "N")


class Wrong(Exception):
    """The library did what it must not do."""


class Planted(AttributeError):
    """A foreign object's error; the library passes it on or sees a missing attribute."""


class Acting:
    """A number that closes a buffer when it is asked."""

    def __init__(self, case, number):
        self.case, self.number = case, number

    def __index__(self):
        self.case.victim.close()
        return self.number

    __int__ = __index__


class Failing:
    """An object that answers every protocol with an error."""

    def __init__(self, error):
        self.error = error

    def __getattr__(self, name):
        raise self.error

    def __index__(self):
        raise self.error

    def __len__(self):
        raise self.error


def foreign(module, name, **attributes):
    """An object whose class claims to come from that module of another library."""
    return type(name, (types.SimpleNamespace,), {"__module__": module})(**attributes)


def extent(interface):
    """The first and the last address of an array, counted by Python's own ints; None if empty."""
    shape, strides = interface["shape"], interface.get("strides")
    if 0 in shape:
        return None
    itemsize = int(interface["typestr"][2:])
    if strides is None:
        strides, step = [], itemsize
        for length in reversed(shape):
            strides.insert(0, step)
            step *= length
    reaches = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
    first = interface["data"][0]
    low = first + sum(r for r in reaches if r < 0)
    return low, first + sum(r for r in reaches if r > 0) + itemsize


def lies_in(buffer, found):
    """Whether an extent is inside an open buffer."""
    return buffer.handle <= found[0] and found[1] <= buffer.handle + buffer.size


class Case:
    """One input, read from the front; when it is used up, every answer is 0."""

    def __init__(self, data):
        self.data, self.at = data, 0
        self.arena = RESOURCE.allocate(ARENA)
        self.victim = RESOURCE.allocate(PAGE)
        self.stream = Stream()

    def close(self):
        self.stream.close()
        self.arena.close()
        self.victim.close()

    # --- what bytes mean

    def byte(self):
        self.at += 1
        return self.data[self.at - 1] if self.at <= len(self.data) else 0

    def chance(self, out_of):
        """True for one byte in so many; the used-up input says no."""
        return self.byte() % out_of == 1

    def choose(self, choices):
        return choices[self.byte() % len(choices)]

    def raw(self, count):
        taken = bytes(self.data[self.at : self.at + count])
        self.at += count
        return taken

    def small(self):
        return self.byte() - 128 if self.chance(4) else self.byte() % 16

    def number(self):
        kind = self.byte() % 8
        if kind < 4:
            return self.byte() % 16
        if kind == 4:
            return self.choose(NUMBERS)
        if kind == 5:
            return -self.choose(NUMBERS)
        return int.from_bytes(self.raw(8), "little", signed=kind == 6)

    def text(self):
        if self.byte() % 4:
            return self.choose(TEXTS)
        return self.raw(self.byte() % 24).decode("utf-8", "surrogateescape")

    def odd(self):
        """An object that is rarely of the right type."""
        kinds = (
            lambda: None,
            self.text,
            self.number,
            lambda: self.choose((True, False, 0.5, float("nan"), b"", b"abc", 1j, (), [], {})),
            lambda: Acting(self, self.number()),
            lambda: Failing(self.choose((ValueError("no"), Planted("no"), MemoryError()))),
            lambda: tuple(self.odd() for _ in range(self.byte() % 4)),
            lambda: [self.odd() for _ in range(self.byte() % 4)],
            lambda: self.choose((int, Device, ManagedBuffer, self.arena, self.stream, Host())),
        )
        return self.choose(kinds)()

    def maybe(self, value):
        """The value, but now and then another object."""
        return self.odd() if self.chance(12) else value

    def address(self):
        kind = self.byte() % 8
        if kind < 5:
            return self.arena.handle + self.byte() * 64
        if kind == 5:
            return self.arena.handle + self.small()
        if kind == 6:
            return self.arena.handle + ARENA - self.byte()
        return self.number()

    def lengths(self):
        return tuple(self.maybe(self.number()) for _ in range(self.axes()))

    def steps(self, count):
        if self.chance(6):
            count += 1
        return tuple(self.maybe(self.number() * (-1) ** self.byte()) for _ in range(count))

    def axes(self):
        return self.choose((63, 64, 65, 200)) if self.chance(24) else self.byte() % 4

    # --- objects of other libraries

    def interface(self):
        shape = self.lengths()
        entries = {
            "shape": list(shape) if self.chance(16) else shape,
            "typestr": self.maybe(self.choose(TEXTS[:11])),
            "data": (self.maybe(self.address()), self.maybe(self.chance(8))),
            "version": self.maybe(3),
        }
        if self.byte() % 2:
            entries["strides"] = self.maybe(self.steps(len(shape)))
        if self.chance(4):
            entries["stream"] = self.maybe(self.choose((None, 1, 2, 0, -1, self.stream.handle)))
        if self.chance(8):
            entries["mask"] = self.odd()
        if self.chance(16):
            entries.pop(self.choose(("shape", "typestr", "data", "version")))
        if self.chance(16):
            entries["data"] = self.odd()
        return entries

    def array(self):
        return types.SimpleNamespace(__cuda_array_interface__=self.maybe(self.interface()))

    def tensor(self):
        shape, strides = self.lengths(), None
        strides = self.maybe(self.steps(len(shape)))
        address, width = self.maybe(self.address()), self.maybe(self.choose((1, 2, 4, 8, 0)))
        return foreign(
            "torch",
            "Tensor",
            data_ptr=lambda: address,
            shape=self.maybe(shape),
            stride=lambda: strides,
            element_size=lambda: width,
            layout="strided",
            device="cuda:0",
        )

    def core_buffer(self):
        return foreign(
            "cuda.core", "Buffer", handle=self.maybe(self.address()), size=self.maybe(self.number())
        )

    def memory(self):
        """An object with the buffer protocol."""
        store = bytearray(64)
        kind = self.byte() % 6
        if kind == 0:
            return store
        if kind == 1:
            return bytes(store)
        if kind == 2:
            return array.array(self.choose("bhiqfd"), range(8))
        if kind == 3:
            return memoryview(store)[self.small() : self.small() : self.byte() % 5 - 2 or 1]
        if kind == 4:
            view = memoryview(store).cast(self.choose(FORMATS))
            return memoryview(view.cast("B")).cast("B", shape=self.choose(([8, 8], [64], [1, 64])))
        return memoryview(store).toreadonly()

    def target(self):
        kind = self.byte() % 8
        if kind < 3:
            return self.array()
        if kind == 3:
            return self.tensor()
        if kind == 4:
            return self.core_buffer()
        if kind == 5:
            return self.memory()
        return self.odd() if self.chance(8) else self.part()

    def part(self):
        """Some of the arena, or of the buffer that numbers close."""
        if self.chance(6):
            return self.victim
        return self.arena[self.byte() * 128 : self.byte() * 128]

    def targets(self):
        if self.byte() % 3:
            return self.target()
        made = [self.target() for _ in range(self.byte() % 5)]
        return tuple(made) if self.byte() % 2 else made

    def location(self):
        kinds = (
            lambda: self.choose((Host(), Host(0), Host(1), Host.numa_current())),
            lambda: Device(self.byte() % 2),
            lambda: foreign("torch", "device", type=self.text(), index=self.odd()),
            lambda: foreign("cupy.cuda.device", "Device", id=self.odd()),
            lambda: foreign(
                "jaxlib._jax", "Device", platform=self.text(), local_hardware_id=self.odd()
            ),
            lambda: foreign("cuda.core", "Host", numa_id=self.odd(), is_numa_current=self.odd()),
            self.odd,
        )
        return self.choose(kinds)() if self.byte() % 3 else Host()

    def locations(self):
        if self.byte() % 3:
            return self.location()
        return [self.location() for _ in range(self.byte() % 5)]

    def any_stream(self):
        kind = self.byte() % 8
        if kind < 3:
            return None
        if kind == 3:
            return self.stream
        if kind == 4:
            answer = (self.maybe(0), self.maybe(self.choose((0, 1, 2, self.stream.handle))))
            answer = self.maybe(answer)
            return types.SimpleNamespace(__cuda_stream__=self.maybe(lambda: answer))
        if kind == 5:
            return foreign("cupy.cuda", "Stream", ptr=self.odd())
        return self.number() if kind == 6 else self.odd()

    def options(self, *names):
        """Some of the keywords that a call has; now and then one of any name."""
        values = {
            "stream": self.any_stream,
            "dispatch": lambda: self.maybe(self.choose(("auto", "batch", "loop"))),
            "defer": lambda: self.maybe(self.choose((None, True, False))),
        }
        made = {name: values[name]() for name in names if self.chance(3)}
        if self.chance(16):
            made[self.text()] = self.odd()
        return made

    # --- calls

    def call_target(self):
        """One target, which is accepted only where it lies in managed memory."""
        target = self.target()
        MigrationPolicy.of(target)
        interface = getattr(target, "__cuda_array_interface__", None)
        if type(target) is types.SimpleNamespace and has_plain_numbers(interface):
            found = extent(interface)
            check(
                found is None or any(map(lies_in, (self.arena, self.victim), (found, found))),
                "memory was accepted that is not there",
                interface,
            )

    def call_dtype(self):
        found = managedmem.typing.DType(self.maybe(self.text()))
        check(managedmem.typing.DType(str(found)) == found, "a dtype does not read back", found)

    def call_empty(self):
        shape = self.maybe(self.lengths())
        dtype = self.maybe(self.text())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of more memory than there is
            buffer = managedmem.empty(shape, dtype)
        with buffer:
            count = 1
            for length in shape if isinstance(shape, tuple | list) else (shape,):
                count *= operator.index(length)
            check(buffer.nbytes == count * buffer.itemsize, "nbytes of empty()", shape, dtype)

    def call_prefetch(self):
        managedmem.prefetch(
            self.targets(), self.locations(), **self.options("stream", "dispatch", "defer")
        )

    def call_discard(self):
        managedmem.discard(self.targets(), **self.options("stream", "dispatch"))

    def call_discard_prefetch(self):
        managedmem.discard_prefetch(
            self.targets(), self.locations(), **self.options("stream", "dispatch", "defer")
        )

    def call_advise(self):
        advice = self.maybe(self.choose(TEXTS[-7:-3]))
        managedmem.advise(self.targets(), advice, self.locations())

    def call_copy_from(self):
        self.part().copy_from(self.target(), **self.options("stream"))

    def call_copy_to(self):
        self.part().copy_to(self.target(), **self.options("stream"))

    def call_fill(self):
        self.part().fill(self.choose((self.number(), self.raw(self.byte() % 6), self.odd())))

    def call_slice(self):
        keys = [self.maybe(self.number()) if self.byte() % 3 else None for _ in range(3)]
        key = slice(*keys) if self.byte() % 4 else keys[0]
        part = self.arena[key]
        if isinstance(key, slice) and all(k is None or type(k) is int for k in keys):
            check(part.size == len(range(ARENA)[key]), "the length of a slice", key)
        part.close()

    def call_range(self):
        offset, nbytes = self.maybe(self.number()), self.maybe(self.number())
        part = self.arena.range(offset, nbytes)
        at = part.handle - self.arena.handle if part.size else 0
        check(at >= 0 and at + part.size <= ARENA, "a range is not inside", offset, nbytes)

    def call_view(self):
        view = self.arena.view(self.maybe(self.text()), self.maybe(self.lengths() or None))
        check(view.nbytes == ARENA, "a view has another size", view)
        view[self.number()].close()

    def call_from_handle(self):
        size = self.maybe(self.choose((0, 1, PAGE, ARENA, self.number())))
        owner = self.choose((None, self.arena, self.odd()))
        with ManagedBuffer.from_handle(self.address(), size, owner=owner) as buffer:
            buffer.prefetch(self.location(), **self.options("stream", "defer"))

    def call_exports(self):
        part = self.part()
        part.__dlpack__(
            stream=self.maybe(self.choose((None, 1, 2, -1))),
            max_version=self.maybe(self.choose((None, (1, 0), (0, 8), (9, 9)))),
            dl_device=self.maybe(self.choose((None, (1, 0), (2, 0), (13, 0), (13, 1)))),
            copy=self.maybe(self.choose((None, True, False))),
        )
        check(part.__cuda_array_interface__["shape"] == part.shape, "shape of an export", part)

    def call_location(self):
        self.choose((Host, Device))(self.odd() if self.byte() % 2 else self.location())

    def call_accessed_by(self):
        members = [self.location() for _ in range(self.byte() % 4)]
        self.arena.accessed_by = self.maybe(members)
        with contextlib.suppress(KeyError):
            self.arena.accessed_by.remove(self.odd())
        self.arena.accessed_by.symmetric_difference_update(self.maybe(members))

    def call_preferred(self):
        self.part().preferred_location = self.location()

    def call_read_mostly(self):
        self.part().read_mostly = self.odd()

    def call_plan(self):
        plan = PrefetchPlan(
            self.maybe((self.target(), self.location())) for _ in range(self.byte() % 4)
        )
        plan.add(self.target(), self.location(), offset=self.number(), nbytes=self.number())
        plan.execute(**self.options("stream", "dispatch", "defer"))

    def call_stream(self):
        stream = self.any_stream()
        self.arena.prefetch(Host(), stream=stream)

    CALLS = tuple(call for name, call in vars().items() if name.startswith("call_"))

    def run(self):
        for _ in range(MOST_CALLS):
            if self.at >= len(self.data):
                break
            with contextlib.suppress(*DOCUMENTED, Planted):
                self.choose(self.CALLS)(self)


def check(condition, *said):
    if not condition:
        raise Wrong(*said)


def has_plain_numbers(interface):
    """Whether the entries are such that Python can count the extent as well."""
    if type(interface) is not dict or not {"shape", "typestr", "data"} <= interface.keys():
        return False
    strides = interface.get("strides")
    numbers = [*interface["shape"], *(strides or ()), interface["data"][0]]
    return all(type(number) is int for number in numbers) and interface["typestr"][2:].isdigit()


def run(data):
    """Makes the calls of an input; an exception is a finding."""
    before = emulator.live()
    case = Case(data)
    try:
        case.run()
    finally:
        case.close()
    after = emulator.live()
    check(after == before, "something is left behind", before, after)


def warm_up():
    """Lets the library make what it keeps, so that a case does not seem to leave it behind."""
    for device in reversed(Device.all()):
        device.set_current()
        with RESOURCE.allocate(4 * PAGE) as buffer:
            buffer.discard()
            buffer.prefetch(device, defer=True)
            device.sync()


RESOURCE = ManagedMemoryResource()
warm_up()
