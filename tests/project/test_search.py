"""Searches of the built site find the pages with the answers.

The documentation's check in .ci/run builds the site and names its folder in MANAGEDMEM_SITE.
"""

import os
from pathlib import Path

import pytest

from paths import ROOT

SITE = os.environ.get("MANAGEDMEM_SITE")
ANSWERS = {
    "oversubscription": "glossary",
    "UVM": "glossary",
    "HMM": "glossary",
    "out-of-core": "glossary",
    "pinned": "glossary",
    "Hugging Face": "offload",
    "huggingface": "offload",
    "LoRA": "offload",
    "migration": "glossary",
    "thrashing": "glossary",
    "cpu offload": "offload",
    "diffusers": "offload",
    "offload": "reference/offload",
    "zero copy": "glossary",
    "page fault": "glossary",
    "out of memory": "errors",
    "multiple GPUs": "recipes",
    "docker": "seeing",
    "install": "start",
    "bfloat16": "guide",
    "is_managed": "reference/hints",
    "leak": "reference/memory_stats",
    "peak memory": "reference/memory_stats",
    "NEP 49": "reference/numpy",
    "NumPy allocator": "reference/numpy",
    "cudaMemcpyBatchAsync": "reference/hints",
    "suspend": "reference/offload",
    "sleep": "reference/offload",
    "wake up": "reference/offload",
}


@pytest.fixture(scope="module")
def search():
    if not SITE:
        pytest.skip("MANAGEDMEM_SITE names no built site")
    site_search = pytest.importorskip("site_search", reason="needs Sphinx")
    index = site_search.index_of(Path(SITE))
    return lambda query: site_search.found(index, query)


@pytest.mark.parametrize("query", ANSWERS)
def test_a_search_finds_its_answer(search, query):
    assert ANSWERS[query] in search(query)[:3]


def test_results_of_measurements_are_not_found(search):
    assert not [page for page in search("H200") if page.startswith("results/")]
    assert search("nosuchword") == []


def test_the_scorer_of_the_site_gives_the_same_points():
    scorer = (ROOT / "docs" / "search_scorer.js").read_text(encoding="utf-8")
    assert 'if (page === "errors" && words.length > 2) return score + 20;' in scorer
    assert 'page === "changelog" || page.startsWith("develop/") ? score - 4 : score' in scorer
