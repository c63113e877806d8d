"""The small programs in tools/ that .ci/run calls to prepare its checks, and the quick tests."""

import json
import subprocess
import sys

import pytest

from paths import ROOT, TESTS, TOOLS

RUN = """
import runpy, sys
{before}
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_tool(name, *arguments, before=""):
    """The finished run of a tool, after statements that make the interpreter look like another."""
    code = RUN.format(before=before)
    return subprocess.run(
        [sys.executable, "-c", code, str(TOOLS / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


class TestProbePython:
    def test_of_this_one(self):
        done = run_tool("probe_python.py")
        assert done.returncode == 0, done.stderr
        version, headers, path = done.stdout.split(maxsplit=2)
        assert version.rstrip("t") == "{}.{}".format(*sys.version_info)
        assert version.endswith("t") == ("free-threading" in sys.version)
        assert headers in "01"
        assert path == f"{sys.executable}\n"

    def test_without_headers(self):
        done = run_tool(
            "probe_python.py",
            before="import sysconfig; sysconfig.get_path = lambda name: '/nowhere'",
        )
        assert done.stdout.split()[1] == "0"

    @pytest.mark.parametrize(
        "before",
        [
            "sys.version_info = (3, 10, 4)",
            "sys.implementation.name = 'pypy'",
            "import collections\n"
            "V = collections.namedtuple('V', 'major minor micro releaselevel serial')\n"
            "sys.version_info = V(3, 11, 0, 'candidate', 1)",
            "sys.modules['venv'] = None",
            "sys.modules['ensurepip'] = None",
        ],
        ids=["old", "not CPython", "not final", "no venv", "no ensurepip"],
    )
    def test_of_one_that_will_not_do(self, before):
        done = run_tool("probe_python.py", before=before)
        assert done.returncode != 0
        assert done.stdout == ""


class TestListRequirements:
    def test_of_extras(self):
        done = run_tool("list_requirements.py", "docs", "test")
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[0].startswith("sphinx")
        assert any(line.startswith("pytest>=") for line in lines)
        assert not any(line.startswith("mypy") for line in lines)

    def test_of_an_extra_that_is_not_there(self):
        done = run_tool("list_requirements.py", "test", "tests")
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.startswith("no extra tests; there are: test,")


class TestCompileCommands:
    def note(self, folder, *commands):
        path = folder / "noted"
        path.write_text("".join("\0".join([*command, "\n", ""]) for command in commands))
        return path

    def test_only_what_compiles_and_what_clang_needs(self, tmp_path):
        noted = self.note(
            tmp_path,
            ("/a b", "-O2", "-fPIC", "-Wall", "-DNDEBUG", "-DNAME=1", "-c", "x y.c", "-o", "x.o"),
            ("/a b", "-shared", "x.o", "-o", "x.so"),
            ("/c", "-c", "1.c", "2.c"),
        )
        done = run_tool("compile_commands.py", noted, tmp_path / "made.json")
        assert done.returncode == 0, done.stderr
        kept = ["clang", "-DNAME=1", "-c", "x y.c", "-o", "x.o"]
        both = ["clang", "-c", "1.c", "2.c"]
        assert json.loads((tmp_path / "made.json").read_text()) == [
            {"directory": "/a b", "file": "x y.c", "arguments": kept},
            {"directory": "/c", "file": "1.c", "arguments": both},
            {"directory": "/c", "file": "2.c", "arguments": both},
        ]

    def test_of_a_build_that_compiled_nothing(self, tmp_path):
        noted = self.note(tmp_path, ("/a", "-shared", "x.o"))
        done = run_tool("compile_commands.py", noted, tmp_path / "made.json")
        assert done.returncode == 1
        assert "holds no command that compiles" in done.stderr
        assert not (tmp_path / "made.json").exists()


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
