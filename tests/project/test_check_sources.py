"""tools/check_sources.py on the project's own sources, with one fault put into them."""

import shutil
import sys

import pytest

from paths import ROOT, TOOLS

MEMORY, PYTHON, EMULATOR = "src/_managedmem/memory", "src/_managedmem/python", "src/emulator"
LONG = "int\nlong_one(void)\n{\n" + "    (void)0;\n" * 60 + "    return 0;\n}\n"
# A fault: (the check that sees it, the file, the text that is replaced or None for its end, the new
# text, words of the problem).
FAULTS = {
    "arrow": ("c_files", f"{MEMORY}/range.h", "#include ", '#include "../trace/sums.h"\n#include ',
              "an arrow from memory to trace"),
    "source file": ("c_files", f"{MEMORY}/range.c", "#include ", '#include "guard.c"\n#include ',
                    "includes a source file"),
    "Python": ("c_files", f"{MEMORY}/guard.c", None, "int Py_main(void);\n", "a name of Python"),
    "opening": ("c_files", f"{MEMORY}/guard.c", "/* guard.c", "int x; /* guard.c",
                "does not begin with a comment"),
    "question": ("c_files", f"{MEMORY}/guard.c", None, "int which;\n", "question words"),
    "comment": ("c_files", f"{MEMORY}/guard.c", None, "/* Sets *lost. */\n", "tells of *lost"),
    "length": ("c_files", f"{MEMORY}/guard.c", None, LONG, "long_one() has 65 lines"),
    "static": ("c_files", f"{PYTHON}/dtype.c", None, "static PyObject *once;\n", "static storage"),
    "static inside": ("c_files", f"{PYTHON}/dtype.c", None,
                      "int\nf(void)\n{\n    static PyObject *once[2];\n}\n", "static storage"),
    "dealloc": ("c_files", f"{PYTHON}/recorder_object.c", "mm_free_object(", "mm_lose_object(",
                "does not end with mm_free_object()"),
    "format": ("c_files", f"{PYTHON}/dtype.c", None, 'int x = Py_BuildValue("(y#)", a, n);\n',
               "a format with a length"),
    "table": ("c_files", f"{PYTHON}/dtype.c", None,
              'PyMethodDef more[] = {\n    {"f", f, 0, "f()\\n--\\n"},\n};\n',
              "a docstring in a table"),
    "guard": ("c_files", f"{MEMORY}/range.h", "#ifndef", "#ifdef", "without a guard"),
    "name": ("names", f"{MEMORY}/guard.c", None, "int\nmm_first_page(void)\n{\n}\nint\n"
             "mm_batch_run(void)\n{\n}\n", "mm_batch_run is also in"),
    "circle": ("calls", f"{MEMORY}/range.c", None,
               "void\nseeded(void)\n{\n    (void)mm_batch_run();\n}\n", "in a circle"),
    "depth": ("calls", f"{MEMORY}/prefetch.c", "->MemPrefetchAsync", "->Other", "in None calls"),
    "layers": ("calls", f"{EMULATOR}/runs.c", None,
               "void\nseeded(void)\n{\n    (void)emu_policy_check(0, NULL, 0);\n}\n", "calls up"),
    "topic": ("topics", f"{EMULATOR}/runs.c", None, "/* Measured: two. */\n", "of no topic"),
    "places": ("docstrings", f"{PYTHON}/buffer_operations.c", "enum { LOCATION, STREAM, DEFER",
               "enum { STREAM, LOCATION, DEFER", "not its parameters in their order"),
    "page": ("pages", f"{MEMORY}/unheard_of.c", None, "", "does not name unheard_of"),
    "import": ("package", "python/managedmem/_units.py", None,
               "def seeded():\n    from managedmem import Device\n", "in a circle"),
    "support": ("tests_and_tools", "tests/support/paths.py", None, "def how_many(): pass\n",
                "a question as a name: how_many"),
    "folder": ("tests_and_tools", "tests/support/test_x.py", None, '"""Tests of some x."""\n',
               "the folder of a test"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    for name in ("src", "python", "tests", "tools", "docs/develop"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__", "build")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in (".pre-commit-config.yaml", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def check_sources(tree):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TOOLS)
        import check_sources

        patch.setattr(check_sources, "ROOT", tree)
        yield check_sources
    del sys.modules["check_sources"]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(check_sources, tree, name):
    check, file, old, new, words = FAULTS[name]
    path = tree / file
    before = path.read_text() if path.exists() else None
    path.write_text((before or "") + new if old is None else before.replace(old, new))
    try:
        assert words in "\n".join(getattr(check_sources, f"check_{check}")())
    finally:
        path.unlink() if before is None else path.write_text(before)


def test_sources_without_a_fault_are_silent(check_sources, capsys):
    assert not check_sources.main(), capsys.readouterr().out


def test_docstrings_far_from_their_functions_are_named(check_sources, monkeypatch):
    monkeypatch.setattr(check_sources, "MOST_DOCSTRING_DISTANCE", 1)
    assert [*check_sources.check_docstrings()] == ["docstrings do not stand above their functions"]
