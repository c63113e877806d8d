"""The tests' own order: folders by subject, modules that are short and have plain names."""

import ast
import collections
import re
import subprocess
import sys

import pytest

from paths import ROOT, TESTS

FOLDERS = {"core", "emulator", "interop", "project", "robustness"}
SUPPORT = sorted((TESTS / "support").glob("*.py"))
TOOLS = sorted((ROOT / "tools").glob("*.py"))
FILES = [*TESTS.rglob("*.py"), *TOOLS]
MAX_LINES = 800
QUESTION_WORDS = {"about", "how", "what", "way", "which", "who", "whose"}


def names_made(source):
    """The names that a source gives: of functions, classes, parameters and variables."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def question_words(source):
    return {name for name in names_made(source) if QUESTION_WORDS & {*name.lower().split("_")}}


def test_every_test_is_in_a_folder_that_says_its_subject():
    files = list(TESTS.rglob("test_*.py"))
    assert len(files) > 60
    assert {path.parent.relative_to(TESTS).as_posix() for path in files} == FOLDERS


def test_the_quick_tests_are_collected_alone():
    command = [sys.executable, "-m", "pytest", "-q", "-m", "quick", "--collect-only"]
    listed = subprocess.run(
        [*command, "-p", "no:cacheprovider", TESTS / "core", TESTS / "emulator"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout
    files = {line.partition("::")[0] for line in listed.splitlines() if "::" in line}
    assert {"tests/core/test_buffer.py", "tests/emulator/test_emulator.py"} <= files
    assert not {"tests/core/test_tune.py", "tests/emulator/test_conformance.py"} & files
    assert "deselected" not in listed  # others were not read


def test_each_name_is_taken_once():
    """pytest and the scripts of tests import modules by their names alone."""
    names = collections.Counter(path.stem for path in FILES)
    assert [name for name, count in names.items() if count > 1] == []


def test_each_file_is_short():
    long = [path.name for path in FILES if path.read_text().count("\n") > MAX_LINES]
    assert not long


def test_tests_import_no_other_test():
    for path in TESTS.rglob("*.py"):
        assert not re.search(r"(?m)^\s*(?:from|import) test_", path.read_text()), path.name


@pytest.mark.parametrize("path", SUPPORT, ids=lambda path: path.stem)
class TestEverySharedModule:
    def test_says_its_subject(self, path):
        assert len((ast.get_docstring(ast.parse(path.read_text())) or "").split()) >= 4

    def test_names_are_no_questions(self, path):
        assert not question_words(path.read_text())


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: path.stem)
def test_names_in_tools_are_no_questions(path):
    assert not question_words(path.read_text())


@pytest.mark.parametrize(
    "source",
    [
        "def how_many(): pass",
        "which = 1",
        "class What: pass",
        "def f(way): pass",
        "def f(self):\n    self.what = 1",
        "for the_way in (): pass",
    ],
)
def test_a_question_is_found(source):
    assert question_words(source)
