"""Finds the Python blocks of README.md and of the pages in docs/, in every form, and runs them.

A page can write a block as ``.. code-block:: python``, as the literal block behind ``::`` (which
Sphinx shows as Python, so other languages need a directive), or with prompts, whose results are
then compared. In Markdown it is a fenced block.

The blocks of one document run in order in one namespace, on the driver of the test run. A block can
have a mark: ``notest`` (compiled only; its first line says what it needs), ``process`` (it chooses
its own driver and runs in a process of its own), ``two_devices`` (skipped where there is one),
``torch`` or ``plot`` (skipped where torch, or matplotlib or pandas, is missing). Markdown writes it
behind the language, ```` ```python notest ````; a page writes it as the option ``:class: notest``
of ``.. code-block:: python``.

A text block behind a Python block and the words "prints", or "prints with the emulated driver", is
compared on that driver, except for durations and white space.
"""

import contextlib
import doctest
import importlib.util
import io
import itertools
import os
import re
import subprocess
import sys
import textwrap
from typing import NamedTuple

from paths import ROOT

DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *(
        p
        for p in sorted(DOCS.rglob("*"))
        if p.suffix in (".md", ".rst") and "_build" not in p.parts
    ),
]
MARKS = {"", "notest", "process", "two_devices", "torch", "plot"}
LANGUAGES = {"python", "sh", "text"}
_FENCE = re.compile(r"[ ]*(```+|~~~+)[ ]*(\w*)[ ]*(.*)")
_DIRECTIVE = re.compile(r"[ ]*\.\. (?:code|code-block|sourcecode)::[ ]*(\w*)$")
_MARK = re.compile(r"[ ]+:class:[ ]+(\w+)$")
_OPTION = re.compile(r"[ ]+:[\w-]+:")
_LITERAL = re.compile(r"(?![ ]*\.\. ).*::$")
_PROMPT = re.compile(r"[ ]*>>>( |$)")
_PRINTS = re.compile(r"prints(?: with the emulated driver)?")
_DURATION = re.compile(r"\d+(?:\.\d+)? (?:ns|us|ms|s)\b")


class Block(NamedTuple):
    """One block: its language, its mark, the number of lines before its text, and its text."""

    language: str
    mark: str
    line: int
    code: str

    @property
    def has_prompts(self):
        return _PROMPT.match(self.code) is not None


def _indent(line):
    return len(line) - len(line.lstrip())


def _end(lines, start, belongs):
    """The index behind the last line of the block, without trailing blank lines."""
    end = start
    while end < len(lines) and (not lines[end].strip() or belongs(lines[end])):
        end += 1
    while end > start and not lines[end - 1].strip():
        end -= 1
    return end


def _made(language, mark, lines, start, end):
    while start < end and not lines[start].strip():
        start += 1
    return Block(language, mark, start, textwrap.dedent("\n".join(lines[start:end]) + "\n"))


def _fenced(lines):
    at = 0
    while at < len(lines):
        if opened := _FENCE.fullmatch(lines[at]):
            fence, language, mark = opened.groups()
            end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == fence)
            yield _made(language, mark, lines, at + 1, end)
            at = end
        at += 1


def _of_page(lines):
    at = 0
    while at < len(lines):
        line, indent = lines[at], _indent(lines[at])
        at += 1
        if directive := _DIRECTIVE.fullmatch(line):
            language, mark = directive[1] or "python", ""
            while at < len(lines) and _OPTION.match(lines[at]):
                found = _MARK.fullmatch(lines[at])
                mark, at = found[1] if found else mark, at + 1
        elif _LITERAL.fullmatch(line):
            language, mark = "python", ""
        elif _PROMPT.match(line):
            start, at = at - 1, next((i for i in range(at, len(lines)) if not lines[i].strip()), at)
            yield _made("python", "", lines, start, at)
            continue
        else:
            continue
        end = _end(lines, at, lambda inside, indent=indent: _indent(inside) > indent)
        if end > at:
            yield _made(language, mark, lines, at, end)
        at = end


def blocks_of(text, suffix):
    """The blocks of a document's text, in order."""
    return list((_fenced if suffix == ".md" else _of_page)(text.split("\n")))


def blocks(path):
    """The blocks of a document, in order."""
    return blocks_of(path.read_text(encoding="utf-8"), path.suffix)


def python_blocks(path, mark=None):
    """The Python blocks of a document: all, or those with a mark."""
    return [b for b in blocks(path) if b.language == "python" and mark in (None, b.mark)]


def compiled(path, block):
    """The code of a block, whose tracebacks name the line of the document."""
    return compile("\n" * block.line + block.code, str(path), "exec")


def run_prompts(path, block, namespace):
    """Run the code behind prompts, and compare the results with those in the text."""
    test = doctest.DocTestParser().get_doctest(block.code, {}, path.name, str(path), block.line)
    test.globs = namespace
    runner = doctest.DebugRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    try:
        runner.run(test, clear_globs=False)
    except doctest.UnexpectedException as unexpected:
        raise unexpected.exc_info[1] from None


def marks_that_run():
    """The marks of the blocks that this machine can run, in the namespace of their document."""
    import managedmem

    marks = {""}
    if managedmem.Device.count() > 1:
        marks.add("two_devices")
    libraries = {"torch": ("torch",), "plot": ("matplotlib", "pandas")}
    for mark, names in libraries.items():
        if all(importlib.util.find_spec(name) is not None for name in names):
            marks.add(mark)
    return marks


def printed(path):
    """The text blocks of a document that show what a block prints, by the line of that block."""
    lines = path.read_text(encoding="utf-8").split("\n")
    found = blocks(path)
    shown = {}
    for block, text in itertools.pairwise(found):
        between = lines[block.line + block.code.count("\n") : text.line]
        words = [line.strip() for line in between if not _DIRECTIVE.fullmatch(line)]
        if text.language == "text" and _PRINTS.fullmatch("".join(words)):
            shown[block.line] = text.code
    return shown


def check_output(path, block, output, expected):
    """Fail if a page shows another output."""
    words = [_DURATION.sub("DURATION", text).split() for text in (output, expected)]
    assert words[0] == words[1], f"{path}, line {block.line}: it prints\n{output}"


def run(path):
    """Run the blocks that this machine can run, in order."""
    import managedmem

    marks = marks_that_run()
    shown = printed(path) if managedmem._managedmem._driver_info()["emulated"] else {}
    namespace = {"__name__": "__main__"}
    for block in python_blocks(path):
        if block.mark not in marks:
            continue
        if block.has_prompts:
            run_prompts(path, block, namespace)
        elif block.line in shown:
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compiled(path, block), namespace)
            check_output(path, block, output.getvalue(), shown[block.line])
        else:
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
