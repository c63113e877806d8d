"""Policies are exact on every page: random cases, and cases that the search found."""

import pytest

import policy_search
from constants import MIB, PAGE
from managedmem import Device, Host, MigrationPolicy
from programs import run_python
from searches import FIRST_SEED

# The cases from KNOWN on include every kind that was once not exact.
KNOWN, CASES = 3000, 500

pytestmark = pytest.mark.search


@pytest.mark.parametrize("first", [KNOWN, FIRST_SEED], ids=["known", "of this commit"])
def test_random_cases(first):
    policy_search.search(first, CASES)


@pytest.mark.emulator_only
@pytest.mark.parametrize("machine", ["profile=h200-x2", "profile=h200", "devices=3,numa_nodes=4"])
def test_random_cases_on_other_machines(machine):
    script = f"import policy_search; policy_search.search({FIRST_SEED}, 300); print('exact')"
    assert run_python(script, emulator=machine).stdout == "exact\n"


def test_a_policy_after_discard_prefetch_to_the_host(alloc, device0):
    """Batch calls record the host with another id, so one run has three records."""
    buffer = alloc(2 * MIB)[: 4 * PAGE]
    buffer.prefetch(Host())
    buffer.range(2 * PAGE, PAGE).discard_prefetch(Host())
    assert len(buffer.page_runs()) == 1
    policy = MigrationPolicy.prefer(device0)
    policy.apply(buffer.range(0, PAGE))
    before = buffer.page_runs()
    with policy.applied(buffer.range(PAGE, 3 * PAGE)):
        assert MigrationPolicy.of(buffer) == policy
    assert buffer.page_runs() == before


@pytest.mark.emulator_only
class TestSeveralNodes:
    """The default emulated machine has two NUMA nodes, and keeps which one is preferred."""

    NODES = (Host(0), Host(1))

    def differing(self, alloc):
        """Pages that prefer a node, the other one, a device, the host or nothing."""
        buffer = alloc(15 * PAGE)
        places = [Host(0), Host(1), Device(0), Host(), None]
        for page in range(15):
            buffer.range(page * PAGE, PAGE).preferred_location = places[page % 5]
        return buffer

    @pytest.mark.parametrize("node", NODES, ids=repr)
    def test_a_policy_is_kept_on_every_page(self, alloc, node):
        buffer = self.differing(alloc)
        before = buffer.page_runs()
        with MigrationPolicy.prefer(node).applied(buffer):
            assert MigrationPolicy.of(buffer) == MigrationPolicy.prefer(node)
        assert buffer.page_runs() == before

    def test_the_current_node_is_one_node(self, alloc):
        buffer = self.differing(alloc)
        MigrationPolicy.prefer(Host.numa_current()).apply(buffer)
        assert MigrationPolicy.of(buffer) == MigrationPolicy.prefer(Host(0))

    @pytest.mark.parametrize("node", [*NODES, Host.numa_current()], ids=repr)
    def test_a_preferred_node_reads_back(self, alloc, node):
        buffer = self.differing(alloc)
        buffer.preferred_location = node
        assert buffer.preferred_location is (Host(0) if node is Host.numa_current() else node)

    def test_the_host_is_not_a_node(self, alloc):
        buffer = self.differing(alloc)
        buffer.preferred_location = Host()
        assert len(buffer.page_runs()) == 1
        assert buffer.preferred_location is Host()
