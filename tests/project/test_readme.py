"""Runs the README: every Python block, as tests/support/documents.py says.

The two commands at the top are the words that users copy, so they are compared letter by letter.
What holds for the blocks of every page holds for its own, and is tested in test_docs.py.
"""

import re

import pytest

import documents
import managedmem

README = documents.ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
COMMANDS = [
    "python -m pip install . && python -m managedmem demo",
    'python -m pip install ".[test]" && python -m pytest -n auto',
]


def test_the_first_blocks_are_the_two_commands():
    found = [b.code.strip() for b in documents.blocks(README) if b.language == "sh"]
    assert found == COMMANDS


def test_blocks_run_in_order():
    pytest.importorskip("numpy")
    if managedmem._managedmem._driver_info()["version"] < 13000:
        pytest.skip("the README shows discard, which needs CUDA 13.0")
    documents.run(README)


@pytest.mark.parametrize("block", documents.python_blocks(README, "process"))
def test_a_block_that_chooses_its_driver_runs_by_itself(block):
    documents.run_alone(block)


def test_links_lead_somewhere():
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT)
    assert targets
    assert not [target for target in targets if not (README.parent / target).exists()]
