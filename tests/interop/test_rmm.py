"""The recipe for RMM in the documentation: its two functions, called as RMM does, and by RMM."""

import gc
import re
import textwrap

import pytest

import libraries
from constants import EMULATED, PAGE
from managedmem import Device, ManagedBuffer
from paths import ROOT

PAGE_TEXT = (ROOT / "docs" / "allocators.rst").read_text("utf-8")


class RmmStream:
    """What RMM hands over as the stream."""

    synchronized = 0

    def synchronize(self):
        self.synchronized += 1


@pytest.fixture
def recipe():
    section = PAGE_TEXT[PAGE_TEXT.index("\nRMM\n---\n") :]
    block = re.search(r"\.\. code-block:: python\n\n((?:   .*\n|\n)+)", section)
    namespace = {}
    exec(compile(textwrap.dedent(block.group(1)), "allocators.rst", "exec"), namespace)
    yield namespace
    assert not namespace["blocks"]


def is_managed(address):
    return ManagedBuffer.from_handle(address, 1).is_managed


def test_allocates_advised_memory_and_frees_it_after_the_stream(recipe):
    stream = RmmStream()
    addresses = [recipe["allocate"](100, stream) for _ in range(3)]
    gc.collect()
    assert len({address // PAGE for address in addresses}) == 3
    for address in addresses:
        assert type(address) is int
        assert is_managed(address)
        assert ManagedBuffer.from_handle(address, 100).preferred_location is Device()
    assert stream.synchronized == 0
    for address in addresses:
        recipe["deallocate"](address, 100, stream)
        assert not is_managed(address)
    assert stream.synchronized == 3


def test_a_lack_of_memory_is_what_rmm_knows(recipe):
    with pytest.raises(MemoryError):
        recipe["allocate"](1 << 50, RmmStream())


@pytest.fixture
def upstream(recipe):
    """RMM's resource over the two functions.

    Without a driver RMM's own streams cannot wait: that ends the process. A stand-in does it then.
    """
    rmm = libraries.need("rmm")

    def deallocate(address, size, stream):
        recipe["deallocate"](address, size, RmmStream() if EMULATED else stream)

    return rmm.mr.CallbackMemoryResource(recipe["allocate"], deallocate)


def test_rmm_allocates_and_frees_with_them(upstream):
    addresses = [upstream.allocate(100) for _ in range(3)]
    for address in addresses:
        assert is_managed(address)
        assert ManagedBuffer.from_handle(address, 100).preferred_location is Device()
        upstream.deallocate(address, 100)
        assert not is_managed(address)


def test_rmm_passes_a_lack_of_memory_on_with_its_reason(upstream):
    with pytest.raises(MemoryError, match=f"{1 << 50} bytes"):
        upstream.allocate(1 << 50)
