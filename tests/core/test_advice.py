"""The advice properties and `advise`: read from and written to the driver, range by range."""

import enum
import importlib.util
import random
import weakref

import pytest

import libraries
import managedmem
from calls import advices
from constants import ADVICES, EMULATED, MIB, PAGE
from foreign_objects import (
    bindings_object,
    cupy_device,
    foreign,
    jax_device,
    numba_device,
    numpy_bool,
    torch_device,
)
from identifiers import label
from managedmem import Device, Host, ManagedBuffer, emulator
from programs import run_python


def twin(buffer):
    """A second object over the same memory: it shares nothing but what the driver knows."""
    return ManagedBuffer.from_handle(buffer.handle, buffer.size)


def host_forms(host):
    """What a preferred NUMA host may read back as: one-node drivers forget the node."""
    return {host} if EMULATED else {host, Host(), None}


def parts_of(buffer, rng):
    """Parts of a buffer, some long and some of one page, side by side."""
    at = 0
    while at < buffer.nbytes:
        size = min(rng.choice([1, 1, 1, 2, 7]) * PAGE, buffer.nbytes - at)
        yield buffer.range(at, size)
        at += size


class TestReadsBack:
    """What is set over parts that differ reads back, though drivers do not record all at once."""

    @pytest.mark.parametrize("seed", range(8))
    def test_over_any_mixture(self, alloc, members, seed):
        self.check(alloc, members, seed)

    def check(self, alloc, members, seed):
        rng = random.Random(seed)
        buffer = alloc(64 * PAGE)
        places = [*Device.all(), Host()]
        for _ in range(4):
            for part in parts_of(buffer, rng):
                part.read_mostly = rng.random() < 0.5
                part.preferred_location = rng.choice([*places, None])
                part.accessed_by = rng.sample(members, rng.randrange(len(members)))
            first = rng.randrange(60)
            whole = buffer.range(first * PAGE, rng.randrange(1, 65 - first) * PAGE)
            whole.read_mostly = True
            assert whole.read_mostly is True
            whole.preferred_location = place = rng.choice(places)
            assert whole.preferred_location is place
            whole.accessed_by |= set(members)
            assert whole.accessed_by == set(members)
            assert whole.read_mostly is True
            assert whole.preferred_location is place
            managedmem.advise([whole, buffer], "set_preferred_location", [places[0], places[-1]])
            assert buffer.preferred_location is places[-1]

    def test_behind_pages_that_have_it_already(self, alloc, device0):
        buffer = alloc(80 * PAGE)
        buffer.range(0, 40 * PAGE).preferred_location = device0
        for page in range(41, 80, 2):
            buffer.range(page * PAGE, PAGE).preferred_location = Host()
        part = buffer.range(40 * PAGE, 40 * PAGE)
        part.preferred_location = device0
        assert part.preferred_location is device0

    @pytest.mark.emulator_only
    def test_is_given_up_after_a_while(self, alloc, device0):
        """The advice holds all the same; a policy goes by what is recorded and needs no more."""
        buffer = alloc(512 * PAGE)
        buffer.range(0, 200 * PAGE).preferred_location = Host()
        for page in range(201, 512, 2):
            buffer.range(page * PAGE, PAGE).preferred_location = device0
        part = buffer.range(200 * PAGE, 312 * PAGE)
        with emulator.recording() as calls:
            part.preferred_location = Host()
        assert len(advices(calls)) == 129
        assert part.preferred_location is None
        managedmem.MigrationPolicy.prefer(Host()).apply(part)
        assert part.preferred_location is Host()


def random_pages(alloc, members, rng):
    """A buffer whose pages have random advice and prefetches, some of them alike."""
    buffer = alloc(64 * PAGE)
    places = [*Device.all(), Host()]
    for part in parts_of(buffer, rng):
        part.read_mostly = rng.random() < 0.7
        part.preferred_location = rng.choice([places[0], places[0], places[-1], None])
        part.accessed_by = rng.sample(members, rng.choice([0, 1, len(members)]))
        part.prefetch(rng.choice([places[0], places[0], places[-1]]))
    return buffer


def shared_by(pages):
    """The advice and the last prefetch that all pages have."""
    preferred = {page.preferred_location for page in pages}
    prefetched = {page.last_prefetch_location for page in pages}
    return (
        all(page.read_mostly for page in pages),
        preferred.pop() if len(preferred) == 1 else None,
        set.intersection(*(set(page.accessed_by) for page in pages)),
        prefetched.pop() if len(prefetched) == 1 else None,
    )


class TestRanges:
    """Where a range begins inside of what drivers keep as one, their queries pass over pages."""

    @pytest.mark.parametrize("seed", range(4))
    def test_have_what_all_their_pages_have(self, alloc, members, seed):
        rng = random.Random(seed)
        buffer = random_pages(alloc, members, rng)
        pages = [buffer.range(i * PAGE, PAGE) for i in range(64)]
        for _ in range(60):
            first = rng.randrange(64)
            count = rng.choice([2, 5, rng.randrange(1, 65)])
            part = buffer[first * PAGE :][: count * PAGE]
            told = (part.read_mostly, part.preferred_location, set(part.accessed_by))
            wanted = shared_by(pages[first : first + count])
            assert (*told, part.last_prefetch_location) == wanted, (first, count)

    def test_lack_what_one_page_lacks(self, alloc, device0, members):
        buffer = alloc(6 * PAGE)
        for part in (buffer[: 3 * PAGE], buffer[4 * PAGE :]):
            part.read_mostly, part.accessed_by = True, members
            part.preferred_location = device0
            part.prefetch(device0)
        part = buffer[PAGE:]
        assert part.read_mostly is False
        assert part.preferred_location is part.last_prefetch_location is None
        assert part.accessed_by == set()

    def test_keep_advice_while_other_advice_is_given(self, alloc, members):
        """Where records were left out unseen, one of twenty properties was lost here."""
        rng = random.Random(len(members))
        for _ in range(20):
            buffer = random_pages(alloc, members, rng)
            first = rng.randrange(60)
            part = buffer.range(first * PAGE, rng.randrange(1, 65 - first) * PAGE)
            wanted = {
                "read_mostly": True,
                "preferred_location": rng.choice([*Device.all(), Host()]),
                "accessed_by": set(members),
            }
            for name in rng.sample(sorted(wanted), 3):
                setattr(part, name, wanted[name])
            assert {name: getattr(part, name) for name in wanted} == wanted
            buffer.close()

    def test_lack_it_behind_many_gaps(self, alloc):
        buffer = alloc(1700 * PAGE)
        for first in range(0, 1600, 16):
            buffer.range(first * PAGE, 15 * PAGE).read_mostly = True
        buffer.range(1600 * PAGE, 40 * PAGE).read_mostly = True
        buffer.range(1643 * PAGE, 50 * PAGE).read_mostly = True
        part = buffer.range(1603 * PAGE, 80 * PAGE)
        assert part.read_mostly is False
        part.read_mostly = True
        assert all(buffer.range(i * PAGE, PAGE).read_mostly for i in range(1603, 1683))

    @pytest.mark.parametrize("count", [8, 100])
    def test_lack_it_behind_a_neighbour_in_the_block(self, alloc, count):
        """Small allocations share blocks, and what drivers keep as one can be of two of them."""
        two = sorted((alloc(count * PAGE), alloc(count * PAGE)), key=lambda buffer: buffer.handle)
        two[0].read_mostly = True
        two[1][: 3 * PAGE].read_mostly = True
        assert two[1].read_mostly is False
        assert two[1].range(PAGE, (count - 2) * PAGE).read_mostly is False
        two[1].read_mostly = True
        two[1].range(0, PAGE).preferred_location = Host()
        assert two[1].read_mostly is True

    @pytest.mark.emulator_only
    def test_a_failed_query_is_told(self, alloc, device0):
        buffer = alloc(2 * MIB)
        for part in (buffer[: 60 * PAGE], buffer.range(64 * PAGE, 60 * PAGE)):
            part.read_mostly = True
            part.preferred_location = device0
        part, failed = buffer.range(20 * PAGE, 100 * PAGE), 0
        for name in ("read_mostly", "preferred_location"):
            with emulator.recording() as calls:
                getattr(part, name)
            for n, call in enumerate(calls):
                earlier = sum(c.name == call.name for c in calls[:n])
                emulator.fail(call.name, earlier + 1, code=719)
                with pytest.raises(managedmem.CUDAError, match=f"^{call.name} failed"):
                    getattr(part, name)
                failed += 1
        assert failed > 8

    @pytest.mark.emulator_only
    @pytest.mark.parametrize("after", [False, True])
    def test_a_refused_member_leaves_what_some_pages_have(self, alloc, after):
        buffer = alloc(6 * PAGE)
        buffer[: 3 * PAGE].accessed_by = buffer[4 * PAGE :].accessed_by = {Host()}
        emulator.fail("cuMemAdvise", 1, after=after)
        with pytest.raises(managedmem.CUDAError):
            buffer[PAGE:].accessed_by.add(Host())
        had = [Host() in buffer.range(i * PAGE, PAGE).accessed_by for i in range(6)]
        assert had == [True, True, True, False, True, True]


class TestReadMostly:
    def test_is_never_cached(self, buf):
        other = twin(buf)
        buf.read_mostly = True
        assert other.read_mostly is True
        other.read_mostly = False
        assert buf.read_mostly is False

    @pytest.mark.parametrize("name", ["bool", "bool_"])
    def test_takes_bools_of_numpy(self, buf, name):
        buf.read_mostly = numpy_bool(True, name)
        assert buf.read_mostly is True
        buf.read_mostly = numpy_bool(False, name)
        assert buf.read_mostly is False

    def test_takes_the_real_numpy_bools(self, buf):
        numpy = pytest.importorskip("numpy")
        buf.read_mostly = numpy.True_
        assert buf.read_mostly is True
        buf.read_mostly = numpy.arange(3)[0] > 0
        assert buf.read_mostly is False
        for bad in (numpy.int64(1), numpy.uint8(0), numpy.array([True]), numpy.array(True)):
            with pytest.raises(TypeError, match="read_mostly takes a bool"):
                buf.read_mostly = bad

    def test_an_exception_of_bool_is_passed_on(self, buf):
        class bool_:
            __module__ = "numpy"

            def __bool__(self):
                raise LookupError("from the bool")

        with pytest.raises(LookupError, match="from the bool"):
            buf.read_mostly = bool_()

    @pytest.mark.parametrize("bad", [1, 0, "True", None, [], 1.0], ids=label)
    def test_takes_a_real_bool_only(self, buf, bad):
        with pytest.raises(TypeError, match="bool"):
            buf.read_mostly = bad
        assert buf.read_mostly is False

    def test_is_true_only_if_all_of_it_is(self, buf):
        buf[PAGE:].read_mostly = True
        assert buf.read_mostly is False
        buf[:PAGE].read_mostly = True
        assert buf.read_mostly is True


class TestPreferredLocation:
    def test_device_and_host(self, buf, members):
        for location in members:
            buf.preferred_location = location
            assert buf.preferred_location is location

    def test_none_unsets(self, buf, device0):
        buf.preferred_location = device0
        buf.preferred_location = None
        assert buf.preferred_location is None

    def test_unsetting_what_is_unset_is_fine(self, buf):
        buf.preferred_location = None
        assert buf.preferred_location is None

    def test_a_numa_host(self, buf):
        buf.preferred_location = Host(0)
        assert buf.preferred_location in host_forms(Host(0))

    def test_the_current_numa_node_reads_back_as_a_place(self, buf):
        buf.preferred_location = Host.numa_current()
        assert buf.preferred_location in {Host(), None, *(Host(n) for n in range(64))}

    def test_is_never_cached(self, buf, device0):
        other = twin(buf)
        buf.preferred_location = device0
        assert other.preferred_location is device0

    def test_mixed_reads_as_none(self, buf, device0):
        buf[:PAGE].preferred_location = device0
        buf[PAGE:].preferred_location = Host()
        assert buf.preferred_location is None

    def test_moves_nothing_and_leaves_the_other_advice(self, buf, device0):
        buf.read_mostly = True
        buf.accessed_by = {Host()}
        buf.preferred_location = device0
        assert buf.read_mostly is True
        assert set(buf.accessed_by) == {Host()}
        assert buf.last_prefetch_location is None


@pytest.mark.parametrize("name", ["read_mostly", "preferred_location", "accessed_by"])
def test_advice_cannot_be_deleted(buf, name):
    with pytest.raises((AttributeError, TypeError)):
        delattr(buf, name)


class TestLastPrefetchLocation:
    def test_follows_the_prefetches(self, buf, members):
        for location in members:
            buf.prefetch(location)
            assert buf.last_prefetch_location is location

    def test_is_none_where_it_differs(self, buf, device0):
        buf[:PAGE].prefetch(device0)
        assert buf.last_prefetch_location is None
        assert buf[:PAGE].last_prefetch_location is device0

    @pytest.mark.parametrize(
        "call",
        [
            lambda part: managedmem.prefetch(
                [part[:PAGE], part[2 * PAGE :]], Host(), dispatch="batch"
            ),
            lambda part: part.discard_prefetch(Host()),
            lambda part: managedmem.discard_prefetch([part[:PAGE], part[2 * PAGE :]], Host()),
        ],
        ids=["batch", "discard", "discards"],
    )
    def test_is_one_record_of_the_host_whatever_the_call(self, buf, call):
        """The driver keeps the number of a host that a call has in an array."""
        buf.prefetch(Host())
        call(buf[: 3 * PAGE])
        assert buf.last_prefetch_location == Host()

    def test_survives_a_discard(self, buf, device0):
        buf.prefetch(device0)
        buf.discard()
        assert buf.last_prefetch_location is device0

    def test_is_read_only(self, buf):
        with pytest.raises(AttributeError):
            buf.last_prefetch_location = Host()


class TestAdvise:
    @pytest.mark.parametrize(
        "module", ["cuda.bindings.driver", "cuda.bindings.runtime", "cuda.cuda", "cuda.cudart"]
    )
    @pytest.mark.parametrize("base", [enum.IntEnum, int], ids=["IntEnum", "int"])
    def test_the_enumerations_of_cuda_bindings(self, buf, device0, module, base):
        """Set and unset alternate from 1 on, in the driver's numbers and in the runtime's."""
        name = "cudaMemoryAdvise" if module.endswith(("runtime", "cudart")) else "CUmem_advise"
        if base is int:
            kind = type(name, (int,), {"__module__": module})
        else:
            kind = enum.IntEnum(name, {f"member_{n}": n for n in range(1, 7)}, module=module)
        managedmem.advise(buf, kind(1))
        managedmem.advise([buf], kind(3), device0)
        managedmem.advise(buf, kind(5), Host())
        assert buf.read_mostly is True
        assert buf.preferred_location is device0
        assert buf.accessed_by == {Host()}
        managedmem.advise(buf, kind(2))
        managedmem.advise(buf, kind(4))
        managedmem.advise(buf, kind(6), Host())
        assert managedmem.MigrationPolicy.of(buf).is_default

    @pytest.mark.parametrize("number", [0, 7, -1, 1 << 70])
    def test_an_unknown_member_is_a_value_error(self, buf, number):
        kind = type("CUmem_advise", (int,), {"__module__": "cuda.bindings.driver"})
        with pytest.raises(ValueError, match="there is no advice"):
            managedmem.advise(buf, kind(number), Host())

    @pytest.mark.parametrize(
        "bad",
        [
            1,
            True,
            type("CUmem_advise", (int,), {"__module__": "elsewhere"})(1),
            type("CUmem_attach", (int,), {"__module__": "cuda.bindings.driver"})(1),
        ],
        ids=["int", "bool", "elsewhere", "another enumeration"],
    )
    def test_other_numbers_are_a_type_error(self, buf, bad):
        with pytest.raises(TypeError, match="advice must be a str"):
            managedmem.advise(buf, bad)
        assert buf.read_mostly is False

    def test_the_real_cuda_bindings(self, buf, device0):
        driver = pytest.importorskip("cuda.bindings.driver", reason="needs cuda.bindings")
        runtime = pytest.importorskip("cuda.bindings.runtime", reason="needs cuda.bindings")
        for set_read_mostly, unset_read_mostly, set_accessed_by in [
            (
                driver.CUmem_advise.CU_MEM_ADVISE_SET_READ_MOSTLY,
                driver.CUmem_advise.CU_MEM_ADVISE_UNSET_READ_MOSTLY,
                driver.CUmem_advise.CU_MEM_ADVISE_SET_ACCESSED_BY,
            ),
            (
                runtime.cudaMemoryAdvise.cudaMemAdviseSetReadMostly,
                runtime.cudaMemoryAdvise.cudaMemAdviseUnsetReadMostly,
                runtime.cudaMemoryAdvise.cudaMemAdviseSetAccessedBy,
            ),
        ]:
            buf.accessed_by.clear()
            managedmem.advise(buf, set_read_mostly)
            managedmem.advise(buf, set_accessed_by, device0)
            assert buf.read_mostly is True
            assert buf.accessed_by == {device0}
            managedmem.advise(buf, unset_read_mostly)
            assert buf.read_mostly is False

    @pytest.mark.parametrize("advice", [a for a in ADVICES if not a.endswith("accessed_by")])
    @pytest.mark.parametrize("host", [Host(), Host(0), Host.numa_current()], ids=label)
    def test_all_but_accessed_by_take_numa_hosts(self, buf, advice, host):
        managedmem.advise(buf, advice, host)
        if advice == "set_preferred_location":
            assert buf.preferred_location in {*host_forms(host), Host(), Host(0)}
        else:
            assert buf.read_mostly is (advice == "set_read_mostly")

    @pytest.mark.parametrize("advice", ["set_accessed_by", "unset_accessed_by"])
    @pytest.mark.parametrize("host", [Host(0), Host(1), Host.numa_current()], ids=label)
    def test_accessed_by_refuses_numa_hosts(self, buf, advice, host):
        with pytest.raises(
            ValueError, match=r"cannot be in accessed_by: .* no NUMA host"
        ) as refused:
            managedmem.advise(buf, advice, host)
        with pytest.raises(ValueError, match=r"cannot be in accessed_by") as by_set:
            buf.accessed_by.add(host)
        assert str(by_set.value) == str(refused.value)
        assert set(buf.accessed_by) == set()

    @pytest.mark.parametrize("advice", ADVICES)
    def test_every_advice_takes_a_device_and_the_host(self, buf, members, advice):
        for member in members:
            managedmem.advise(buf, advice, member)
        assert buf.read_mostly is (advice == "set_read_mostly")
        assert buf.preferred_location is (
            members[-1] if advice == "set_preferred_location" else None
        )
        assert set(buf.accessed_by) == (set(members) if advice == "set_accessed_by" else set())

    @pytest.mark.parametrize(
        "advice", ["set_preferred_location", "set_accessed_by", "unset_accessed_by"]
    )
    def test_a_location_is_required(self, buf, advice):
        with pytest.raises(ValueError, match="location is required"):
            managedmem.advise(buf, advice)

    def test_takes_its_arguments_by_name(self, buf, device0):
        managedmem.advise(targets=buf, advice="set_preferred_location", location=device0)
        assert buf.preferred_location is device0


NUMBA_DEVICE = numba_device(0)
FOREIGN = {
    "torch cuda:0": (lambda: torch_device("cuda", 0), lambda: Device(0)),
    "torch cuda": (lambda: torch_device("cuda"), Device),
    "torch cpu": (lambda: torch_device("cpu"), Host),
    "cupy": (lambda: cupy_device(0), lambda: Device(0)),
    "numba": (lambda: NUMBA_DEVICE, lambda: Device(0)),
    "numba proxy": (lambda: weakref.proxy(NUMBA_DEVICE), lambda: Device(0)),
    "jax gpu": (lambda: jax_device("gpu", 0), lambda: Device(0)),
    "jax cuda": (lambda: jax_device("cuda", 0), lambda: Device(0)),
    "jax cpu": (lambda: jax_device("cpu", 0), Host),
    "CUdevice": (lambda: bindings_object("CUdevice", 0), lambda: Device(0)),
    "cuda.core": (lambda: foreign("cuda.core", "Device", device_id=0), lambda: Device(0)),
    "cuda.core Host": (
        lambda: foreign("cuda.core", "Host", numa_id=None, is_numa_current=False),
        Host,
    ),
}


@pytest.mark.parametrize(("make", "meant"), FOREIGN.values(), ids=FOREIGN)
class TestLocationsOfOtherLibraries:
    def test_preferred_location(self, buf, make, meant):
        buf.preferred_location = make()
        assert buf.preferred_location is meant()

    def test_advise(self, buf, make, meant):
        managedmem.advise(buf, "set_accessed_by", make())
        assert set(buf.accessed_by) == {meant()}

    def test_prefetch(self, buf, make, meant):
        buf.prefetch(make())
        Device().sync()
        assert buf.last_prefetch_location is meant()

    def test_prefetch_of_several(self, buf, make, meant):
        pages = [buf[:PAGE], buf[2 * PAGE :]]
        managedmem.prefetch(pages, [make(), Host()])
        Device().sync()
        assert [p.last_prefetch_location for p in pages] == [meant(), Host()]


@pytest.mark.parametrize(
    "bad",
    [
        torch_device("meta"),
        torch_device("mps", 0),
        torch_device("cuda", "0"),
        foreign("elsewhere", "device", type="cuda", index=0),
        foreign("elsewhere", "Device", id=0),
        foreign("numba.cuda.cudadrv.driver", "Stream", handle=0),
        jax_device("tpu", 0),
        jax_device("gpu", None),
        foreign("jaxlib._jax", "Device", id=0),
        bindings_object("CUstream", 0),
    ],
    ids=label,
)
def test_other_devices_are_no_locations(buf, bad):
    with pytest.raises((TypeError, ValueError)):
        buf.preferred_location = bad
    assert buf.preferred_location is None


def test_a_weak_proxy_of_anything_else_is_no_location(buf):
    gone = numba_device(0)
    other = foreign("elsewhere", "Device", id=0)
    proxies = [weakref.proxy(gone), weakref.proxy(other)]
    del gone
    for proxy in proxies:
        with pytest.raises(TypeError, match="Device or Host"):
            buf.preferred_location = proxy
    assert buf.preferred_location is None


def test_the_real_torch_device(buf):
    torch = pytest.importorskip("torch", reason="needs torch")
    buf.preferred_location = torch.device("cuda", 0)
    assert buf.preferred_location is Device(0)
    buf.preferred_location = torch.device("cpu")
    assert buf.preferred_location is Host()


def test_the_real_jax_host():
    """In a process of its own: JAX takes most of a GPU's memory as soon as it looks for devices."""
    if importlib.util.find_spec("jax") is None:
        pytest.skip("needs JAX")
    run_python(
        """
        import os
        os.environ["JAX_PLATFORMS"] = "cpu"
        import jax
        import managedmem as mm
        with mm.empty(4096) as buf:
            buf.preferred_location = jax.devices()[0]
            assert buf.preferred_location is mm.Host()
        """
    )


def test_the_real_cuda_bindings_device(buf):
    driver = pytest.importorskip("cuda.bindings.driver", reason="needs cuda.bindings")
    buf.preferred_location = driver.CUdevice(Device.count() - 1)
    assert buf.preferred_location is Device.all()[-1]


def test_the_real_cuda_core_host(buf):
    buf.preferred_location = libraries.need("cuda.core").Host()
    assert buf.preferred_location is Host()


def test_the_real_cuda_core_device(buf):
    buf.preferred_location = libraries.cuda_core_device(0)
    assert buf.preferred_location is Device(0)
