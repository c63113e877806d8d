"""Runs the Python blocks of the pages on pools and peers, as tests/documents.py says."""

import pytest

import documents
import managedmem

PAGES = [documents.ROOT / "docs" / f"{name}.rst" for name in ("pools", "peers")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_from_top_to_bottom(page, current_device):
    if managedmem.driver_info()["version"] < 13000:
        pytest.skip("pools of managed memory need CUDA 13.0")
    found = documents.python_blocks(page)
    assert page.read_text().count(".. code-block:: python") == len(found)
    documents.run(page)
