"""peer_accessible_by is a live set: held against a real set, one driver call for each change.

The tests take as many devices as there are; the last class runs this file again with others.
"""

import gc
import operator
import os
import subprocess
import sys

import pytest

import live_sets
import managedmem
from calls import names, recorded
from constants import EMULATED
from foreign_objects import cupy_device, torch_device
from identifiers import label
from managedmem import Device, DeviceMemoryResource, Host, emulator
from outcomes import outcome
from programs import run_python

OWNER = Device(0)
PEERS = Device.all()[1:]
needs_peers = pytest.mark.skipif(not PEERS, reason="needs two devices")


@pytest.fixture
def pool():
    with DeviceMemoryResource(OWNER) as made:
        yield made


@pytest.fixture(params=["none", "first", "all"])
def start(request):
    """How full the set is before the operation."""
    return {"none": set(), "first": set(PEERS[:1]), "all": set(PEERS)}[request.param]


@pytest.fixture
def assign(pool):
    return lambda value: setattr(pool, "peer_accessible_by", value)


@pytest.fixture
def universe():
    return PEERS


@pytest.fixture
def others():
    return live_sets.subsets(PEERS)


@pytest.fixture
def pair(pool, start):
    """The proxy and the model set it must behave like."""
    pool.peer_accessible_by = start
    return pool.peer_accessible_by, set(start)


class TestIsASet(live_sets.IsASet):
    def test_cannot_be_pickled(self, pool):
        with pytest.raises(TypeError, match="PeerAccessibleBySetProxy cannot be pickled"):
            pool.peer_accessible_by.__reduce__()

    def test_repr_shows_the_members(self, pair):
        proxy, model = pair
        assert repr(proxy) == f"PeerAccessibleBySetProxy({model!r})"

    def test_is_empty_at_first(self, pool):
        assert set(pool.peer_accessible_by) == set()


class TestReading(live_sets.Reading):
    def test_ordinals_are_in_it(self, pair):
        proxy, model = pair
        for device in Device.all():
            assert (device.device_id in proxy) == (device in model)

    def test_iteration_ascends(self, pool):
        pool.peer_accessible_by = reversed(PEERS)
        assert list(pool.peer_accessible_by) == list(PEERS)
        assert all(type(peer) is Device for peer in pool.peer_accessible_by)

    @pytest.mark.parametrize(
        "stranger",
        [OWNER, 0, -1, 63, 1 << 70, Host(), Host(0), None, True, "cuda:1", 1.0, object()],
        ids=label,
    )
    def test_strangers_are_not_in_it(self, pair, stranger):
        assert (stranger in pair[0]) is False

    @needs_peers
    def test_foreign_devices_are_found(self, pool):
        pool.peer_accessible_by = {PEERS[0]}
        assert torch_device("cuda", 1) in pool.peer_accessible_by
        assert cupy_device(1) in pool.peer_accessible_by
        assert torch_device("cpu") not in pool.peer_accessible_by


class TestWriting(live_sets.Writing):
    @pytest.mark.parametrize("name", ["add", "discard", "remove"])
    def test_one_member_by_ordinal(self, pair, name):
        proxy, model = pair
        for peer in PEERS:
            expected = outcome(getattr(model, name), peer)
            assert outcome(getattr(proxy, name), peer.device_id) == expected
            assert set(proxy) == model

    @pytest.mark.parametrize("name", live_sets.IN_PLACE)
    def test_several_members_by_ordinal(self, pair, name):
        proxy, model = pair
        for other in live_sets.subsets(PEERS):
            getattr(proxy, name)(peer.device_id for peer in other)
            getattr(model, name)(other)
            assert set(proxy) == model

    @pytest.mark.parametrize(
        "stranger", [OWNER, 0, 63, -1, Host(), None, "x", 1.0, True], ids=label
    )
    def test_strangers_are_never_there_to_go(self, pair, stranger):
        proxy, model = pair
        assert proxy.discard(stranger) is None
        with pytest.raises(KeyError) as error:
            proxy.remove(stranger)
        assert error.value.args == (stranger,)
        assert set(proxy) == model

    def test_the_property_takes_the_result_of_an_operator(self, pool):
        pool.peer_accessible_by |= set(PEERS)
        assert set(pool.peer_accessible_by) == set(PEERS)
        pool.peer_accessible_by -= set(PEERS[:1])
        assert set(pool.peer_accessible_by) == set(PEERS[1:])
        pool.peer_accessible_by ^= set(PEERS)
        assert set(pool.peer_accessible_by) == set(PEERS[:1])

    def test_the_owner_is_left_out_silently(self, pool):
        proxy = pool.peer_accessible_by
        proxy.add(OWNER)
        proxy.update([0, OWNER], [torch_device("cuda", 0)])
        proxy ^= {OWNER}
        pool.peer_accessible_by = [OWNER, *PEERS]
        assert set(proxy) == set(PEERS)

    @needs_peers
    def test_the_set_of_another_pool(self, pool):
        with DeviceMemoryResource(PEERS[0]) as other:
            other.peer_accessible_by = Device.all()
            pool.peer_accessible_by = other.peer_accessible_by
            assert set(pool.peer_accessible_by) == set(PEERS[1:])
            pool.peer_accessible_by |= {PEERS[0]}
            assert OWNER in other.peer_accessible_by

    def test_foreign_devices_are_members(self, pool):
        pool.peer_accessible_by.update(torch_device("cuda", p.device_id) for p in PEERS)
        assert set(pool.peer_accessible_by) == set(PEERS)

    def test_cannot_be_deleted(self, pool):
        with pytest.raises(AttributeError, match="empty set"):
            del pool.peer_accessible_by


class TestIsLive:
    def test_two_proxies_never_disagree(self, pool):
        one, two = pool.peer_accessible_by, pool.peer_accessible_by
        one |= set(PEERS)
        assert one == two == set(PEERS)
        two.clear()
        assert one == set()

    def test_a_loop_may_change_what_it_runs_over(self, pool):
        pool.peer_accessible_by = PEERS
        for peer in pool.peer_accessible_by:
            pool.peer_accessible_by.discard(peer)
        assert set(pool.peer_accessible_by) == set()

    def test_keeps_its_pool_alive(self):
        proxy = DeviceMemoryResource(OWNER).peer_accessible_by
        gc.collect()
        proxy.update(PEERS)
        assert set(proxy) == set(PEERS)

    def test_of_a_closed_resource_refuses(self, pool):
        proxy = pool.peer_accessible_by
        pool.close()
        for use in (
            lambda: len(proxy),
            lambda: list(proxy),
            lambda: 1 in proxy,
            lambda: proxy.discard(1),
            lambda: proxy.update(PEERS),
            lambda: pool.peer_accessible_by,
            lambda: setattr(pool, "peer_accessible_by", []),
        ):
            with pytest.raises(RuntimeError, match="closed"):
                use()
        assert repr(proxy) == "<PeerAccessibleBySetProxy of a closed DeviceMemoryResource>"

    def test_after_a_fork(self):
        done = run_python(
            """
            import os, warnings
            from managedmem import DeviceMemoryResource
            from outcomes import refusal
            warnings.simplefilter("ignore", DeprecationWarning)  # of fork, with threads
            pool = DeviceMemoryResource(0)
            proxy = pool.peer_accessible_by
            pid = os.fork()
            if pid == 0:
                assert "forked" in repr(proxy)
                for use in (lambda: len(proxy), lambda: proxy.add(1), lambda: proxy.discard(1)):
                    assert "fork" in refusal(RuntimeError, use)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            """,
            driver="emulator" if EMULATED else "cuda",
        )
        assert done.stderr == ""


BULK = {
    "add": lambda p, v: [p.peer_accessible_by.add(one) for one in reversed(v)],
    "update": lambda p, v: p.peer_accessible_by.update(v),
    "|=": lambda p, v: p.peer_accessible_by.__ior__(set(v)),
    "^=": lambda p, v: p.peer_accessible_by.__ixor__(set(v)),
    "assignment": lambda p, v: setattr(p, "peer_accessible_by", v),
}


class TestBadMembers:
    @pytest.mark.parametrize("bulk", BULK.values(), ids=BULK)
    @pytest.mark.parametrize("bad", [Host(), Host(0), None, True, "cuda:1", 1.0], ids=label)
    def test_what_is_no_device(self, pair, pool, bulk, bad):
        with pytest.raises(TypeError, match="a Device or its ordinal is needed, got"):
            bulk(pool, [*PEERS[:1], bad])
        assert set(pair[0]) == pair[1]

    @pytest.mark.parametrize("bulk", BULK.values(), ids=BULK)
    @pytest.mark.parametrize("bad", [-1, len(Device.all()), 1 << 40])
    def test_a_device_that_is_not_there(self, pair, pool, bulk, bad):
        with pytest.raises(ValueError, match="no device"):
            bulk(pool, [*PEERS[:1], bad])
        assert set(pair[0]) == pair[1]

    @pytest.mark.parametrize("bad", [0, None, OWNER], ids=label)
    def test_bulk_operations_want_iterables(self, pool, bad):
        for name in ("update", "intersection_update", "difference_update"):
            with pytest.raises(TypeError):
                getattr(pool.peer_accessible_by, name)(bad)
        with pytest.raises(TypeError):
            pool.peer_accessible_by = bad

    @pytest.mark.parametrize("one", [OWNER, OWNER.device_id], ids=["device", "ordinal"])
    def test_a_single_device_must_be_wrapped_in_a_set(self, pool, one):
        with pytest.raises(TypeError, match="wrap it in a set") as error:
            pool.peer_accessible_by = one
        assert f"{{{one!r}}}" in str(error.value)

    @pytest.mark.emulator_only
    def test_a_peer_out_of_reach(self):
        done = run_python(
            """
            from managedmem import Device, DeviceMemoryResource, emulator
            from outcomes import refusal
            pool = DeviceMemoryResource(0)
            for use in (
                lambda: pool.peer_accessible_by.add(1),
                lambda: pool.peer_accessible_by.update([1]),
                lambda: setattr(pool, "peer_accessible_by", [1]),
            ):
                text = refusal(ValueError, use)
                assert "Device(1) cannot reach the memory of Device(0)" in text, text
            assert 1 not in pool.peer_accessible_by
            pool.peer_accessible_by.discard(1)
            pool.peer_accessible_by -= {Device(1)}
            assert pool.peer_accessible_by == set()
            """,
            emulator="devices=2,nopeers=1",
        )
        assert done.stderr == ""


SET, GET = "cuMemPoolSetAccess", "cuMemPoolGetAccess"


@pytest.mark.emulator_only
class TestCalls:
    """How many calls an operation makes."""

    def calls(self, act):
        return names(recorded(act))

    def test_a_read_asks_about_every_other_device_each_time(self, pool):
        for read in (set, len, bool, repr, lambda p: 1 in p, lambda p: p == {OWNER}):
            proxy = pool.peer_accessible_by
            assert self.calls(lambda read=read, p=proxy: read(p)) == [GET] * len(PEERS)

    @needs_peers
    @pytest.mark.parametrize(
        "act",
        [
            lambda p: p.peer_accessible_by.add(PEERS[-1]),
            lambda p: p.peer_accessible_by.add(PEERS[-1].device_id),
            lambda p: p.peer_accessible_by.update(PEERS, [0], Device.all()),
            lambda p: p.peer_accessible_by.symmetric_difference_update(PEERS),
            lambda p: setattr(p, "peer_accessible_by", PEERS),
            lambda p: setattr(
                p, "peer_accessible_by", operator.ior(p.peer_accessible_by, {*PEERS})
            ),
        ],
    )
    def test_letting_in_is_one_call(self, pool, act):
        assert self.calls(lambda: act(pool)).count(SET) == 1
        assert PEERS[-1] in pool.peer_accessible_by

    @needs_peers
    @pytest.mark.parametrize(
        "act",
        [
            lambda p: p.peer_accessible_by.discard(PEERS[-1]),
            lambda p: p.peer_accessible_by.remove(PEERS[-1]),
            lambda p: [p.peer_accessible_by.pop()] and p.peer_accessible_by.isdisjoint([]),
            lambda p: p.peer_accessible_by.clear(),
            lambda p: p.peer_accessible_by.intersection_update([]),
            lambda p: p.peer_accessible_by.difference_update(PEERS),
            lambda p: setattr(p, "peer_accessible_by", []),
            lambda p: setattr(
                p, "peer_accessible_by", operator.isub(p.peer_accessible_by, {*PEERS})
            ),
        ],
    )
    def test_putting_out_is_one_call(self, pool, act):
        pool.peer_accessible_by = PEERS
        assert self.calls(lambda: act(pool)).count(SET) == 1
        assert len(pool.peer_accessible_by) < len(PEERS)

    def test_letting_in_and_putting_out_at_once_is_one_call(self, pool):
        if len(PEERS) < 2:
            pytest.skip("needs three devices")
        pool.peer_accessible_by = PEERS[:1]
        calls = self.calls(lambda: setattr(pool, "peer_accessible_by", PEERS[1:]))
        assert calls.count(SET) == 1
        assert set(pool.peer_accessible_by) == set(PEERS[1:])

    @pytest.mark.parametrize(
        "act",
        [
            lambda p: p.peer_accessible_by.add(OWNER),
            lambda p: p.peer_accessible_by.update(PEERS),
            lambda p: p.peer_accessible_by.update(),
            lambda p: p.peer_accessible_by.discard(OWNER),
            lambda p: p.peer_accessible_by.difference_update([]),
            lambda p: p.peer_accessible_by.intersection_update(PEERS),
            lambda p: p.peer_accessible_by.symmetric_difference_update([OWNER]),
            lambda p: setattr(p, "peer_accessible_by", [*PEERS, OWNER]),
            lambda p: setattr(p, "peer_accessible_by", p.peer_accessible_by),
        ],
    )
    def test_nothing_to_change_is_no_call(self, pool, act):
        pool.peer_accessible_by = PEERS
        assert SET not in self.calls(lambda: act(pool))
        assert set(pool.peer_accessible_by) == set(PEERS)

    @needs_peers
    def test_all_of_it_is_validated_before_the_first_call(self, pool):
        for bad in ([*PEERS, "x"], [*PEERS, 63]):
            with emulator.recording() as calls, pytest.raises((TypeError, ValueError)):
                pool.peer_accessible_by = bad
            assert SET not in names(calls)


CHANGES = {
    "update": lambda p: p.peer_accessible_by.update(PEERS),
    "clear": lambda p: p.peer_accessible_by.clear(),
    "^=": lambda p: p.peer_accessible_by.__ixor__({*PEERS}),
    "assignment": lambda p: setattr(p, "peer_accessible_by", PEERS[-1:]),
}


@needs_peers
@pytest.mark.emulator_only
class TestFaults:
    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    @pytest.mark.parametrize("after", [False, True], ids=["refused", "failed after the effect"])
    def test_a_failing_set_leaves_the_state(self, pool, start, change, after):
        pool.peer_accessible_by = start
        emulator.fail(SET, code=999, after=after)
        result = outcome(change, pool)
        fired = emulator.failure_fired()
        emulator.clear_failures()
        assert (result is managedmem.CUDAError) == fired
        if fired:
            assert set(pool.peer_accessible_by) == start

    @pytest.mark.parametrize("nth", range(1, len(PEERS) + 1))
    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    def test_a_failing_query_changes_nothing(self, pool, start, change, nth):
        pool.peer_accessible_by = start
        emulator.fail(GET, nth=nth, code=999)
        with pytest.raises(managedmem.CUDAError) as caught:
            change(pool)
        emulator.clear_failures()
        assert caught.value.function == GET
        assert set(pool.peer_accessible_by) == start

    def test_a_failing_check_of_reach(self, pool):
        emulator.fail("cuDeviceCanAccessPeer", code=999)
        with pytest.raises(managedmem.CUDAError):
            pool.peer_accessible_by.add(1)
        assert set(pool.peer_accessible_by) == set()


@pytest.mark.emulator_only
@pytest.mark.skipif("MANAGEDMEM_PEERS_AGAIN" in os.environ, reason="this is the other run")
@pytest.mark.timeout(310)
@pytest.mark.parametrize("devices", [1, 5])
def test_with_other_numbers_of_devices(devices):
    """All of the above once more, and the copies, in a process with so many devices."""
    copies = os.path.join(os.path.dirname(__file__), "test_copy_kinds.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, copies],
        env={
            **os.environ,
            "MANAGEDMEM_EMULATOR": f"devices={devices}",
            "MANAGEDMEM_PEERS_AGAIN": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
