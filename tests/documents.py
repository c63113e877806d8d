"""Finds the Python blocks of README.md and of the pages in docs/, and runs them.

The blocks of one document run in order in one namespace, on the driver of the test run. A block can
have a mark: ``notest`` (compiled only; its first line says what it needs), ``process`` (it chooses
its own driver and runs in a process of its own) or ``two_devices`` (skipped where there is one).
Markdown writes it behind the language, ```` ```python notest ````; a page writes it as the option
``:class: notest`` of ``.. code-block:: python``.
"""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MARKS = {"", "notest", "process", "two_devices"}
_FENCE = re.compile(r"^```(\w+)[ ]?(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_DIRECTIVE = re.compile(
    r"^\.\. code-block:: (\w+)\n(?:   :class: (\w+)\n)?\n((?:   .*\n|\n)+)", re.MULTILINE
)


class Block(NamedTuple):
    """One block: its language, its mark, the line before its first one, and its text."""

    language: str
    mark: str
    line: int
    code: str


def blocks(path):
    """The blocks of a document, in order."""
    text = path.read_text(encoding="utf-8")
    found = (_FENCE if path.suffix == ".md" else _DIRECTIVE).finditer(text)
    return [
        Block(m[1], m[2] or "", text.count("\n", 0, m.start(3)), textwrap.dedent(m[3]))
        for m in found
    ]


def python_blocks(path, mark=None):
    """The Python blocks of a document: all, or those with a mark."""
    return [b for b in blocks(path) if b.language == "python" and mark in (None, b.mark)]


def compiled(path, block):
    """The code of a block, whose tracebacks name the line of the document."""
    return compile("\n" * block.line + block.code, str(path), "exec")


def run(path):
    """Run the blocks that are marked for it, in order."""
    import managedmem

    marks = {"", "two_devices"} if managedmem.Device.count() > 1 else {""}
    namespace = {"__name__": "__main__"}
    for block in python_blocks(path):
        if block.mark in marks:
            exec(compiled(path, block), namespace)


def run_alone(block):
    """Run a block that chooses its driver, in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MANAGEDMEM_")}
    done = subprocess.run(
        [sys.executable, "-c", "\n" * block.line + block.code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
