"""Runs the README: every Python block, in order, in one namespace, on the driver of the test run.

A block marked ``notest`` is compiled only, and says why in its first line; one marked ``process``
chooses its own driver and runs in a process of its own. The two commands at the top are the words
that users copy, so they are compared letter by letter.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import managedmem

README = Path(__file__).resolve().parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")
COMMANDS = [
    "python -m pip install . && python -m managedmem demo",
    'python -m pip install ".[test]" && python -m pytest',
]


def blocks(text):
    """The fenced blocks as (language, mark, first line number, source)."""
    found = re.finditer(r"^```(\w+)[ ]?(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(m[1], m[2], text.count("\n", 0, m.start(3)), m[3]) for m in found]


def python_blocks(mark):
    return [
        (line, code)
        for kind, found, line, code in blocks(TEXT)
        if (kind, found) == ("python", mark)
    ]


def compiled(line, code):
    """The code of a block, whose tracebacks name the line of the README."""
    return compile("\n" * line + code, str(README), "exec")


def test_every_block_is_seen_and_marked():
    assert TEXT.count("```") == 2 * len(blocks(TEXT))
    assert {kind for kind, *_ in blocks(TEXT)} == {"sh", "python"}
    assert {mark for kind, mark, *_ in blocks(TEXT) if kind == "python"} == {
        "",
        "notest",
        "process",
    }


def test_the_first_blocks_are_the_two_commands():
    assert [code.strip() for kind, _, _, code in blocks(TEXT) if kind == "sh"] == COMMANDS


def test_blocks_run_in_order(capsys):
    pytest.importorskip("numpy")
    if managedmem.driver_info()["version"] < 13000:
        pytest.skip("the README shows discard, which needs CUDA 13.0")
    namespace = {}
    for line, code in python_blocks(""):
        exec(compiled(line, code), namespace)
    for buffer in ("wrapped", "head", "tail"):
        namespace.pop(buffer)
    namespace["buf"].close()


@pytest.mark.parametrize("line, code", python_blocks("notest"))
def test_a_block_that_is_not_run_compiles_and_says_why(line, code):
    compiled(line, code)
    assert code.startswith("# Needs ")


@pytest.mark.parametrize("line, code", python_blocks("process"))
def test_a_block_that_chooses_its_driver_runs_by_itself(line, code):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MANAGEDMEM_")}
    done = subprocess.run(
        [sys.executable, "-c", "\n" * line + code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_links_lead_somewhere():
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT)
    assert targets
    assert not [target for target in targets if not (README.parent / target).exists()]
