"""Runs the Python blocks of the pages in docs/, each page by itself, as tests/documents.py says."""

import pytest

import documents
import managedmem

DOCS = documents.ROOT / "docs"
# What these show needs a GPU and other libraries' allocators: compiled, not run.
OTHER_LIBRARIES = {"allocators", "torch"}
PAGES = [page for page in sorted(DOCS.rglob("*.rst")) if documents.python_blocks(page)]


def test_every_block_is_seen_and_marked():
    for page in PAGES:
        found = documents.python_blocks(page)
        assert page.read_text().count(".. code-block:: python") == len(found), page
        assert {block.mark for block in found} <= documents.MARKS, page


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem not in OTHER_LIBRARIES], ids=lambda page: page.stem
)
def test_a_page_runs_from_top_to_bottom(page):
    info = managedmem.driver_info()
    if info["version"] < 13000 or not managedmem.Device(0).concurrent_managed_access:
        pytest.skip("the pages show what needs CUDA 13.0 and concurrent access")
    documents.run(page)


def test_pages_of_other_libraries_compile():
    pages = [page for page in PAGES if page.stem in OTHER_LIBRARIES]
    assert {page.stem for page in pages} == OTHER_LIBRARIES
    for page in pages:
        for block in documents.python_blocks(page):
            documents.compiled(page, block)


def test_blocks_that_are_not_run_compile_and_say_why():
    for page in PAGES:
        for block in documents.python_blocks(page, "notest"):
            documents.compiled(page, block)
            assert block.code.startswith("# Needs "), page


def test_blocks_that_choose_their_driver_run_by_themselves():
    for page in PAGES:
        for block in documents.python_blocks(page, "process"):
            documents.run_alone(block)
