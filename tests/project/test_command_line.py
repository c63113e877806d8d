"""The command line itself: the console command, its version and help, and readers that stop.

``demo`` and ``info`` are tested in test_demo.py, ``trace`` in test_trace_command.py.
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import managedmem
from paths import ROOT

PARENT = str(Path(managedmem.__file__).resolve().parents[1])
MODULE = [sys.executable, "-m", "managedmem"]
ENVIRONMENT = {"MANAGEDMEM_DRIVER": "emulator", "PYTHONPATH": PARENT, "PYTHONUNBUFFERED": ""}
PRINTS = "import managedmem\nmanagedmem.empty(4096).close()\nprint('done')\n"


def run(*command, cwd=None, **options):
    return subprocess.run(
        [*map(str, command)],
        env={**os.environ, **ENVIRONMENT},
        cwd=cwd,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture
def console(tmp_path):
    """The console command, as installers write it from the entry of pyproject.toml."""
    project = ROOT / "pyproject.toml"
    if not project.exists():
        pytest.skip("the sources are not there")
    entry = tomllib.loads(project.read_text())["project"]["scripts"]["managedmem"]
    module, _, function = entry.partition(":")
    script = tmp_path / "bin" / "managedmem"
    script.parent.mkdir()
    script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    return [sys.executable, script]


@pytest.fixture(params=["python -m managedmem", "managedmem"])
def typed(request):
    """The command as it is typed, and the words that run it."""
    if request.param == "managedmem":
        return request.param, request.getfixturevalue("console")
    return request.param, MODULE


def test_usage_shows_the_name_that_was_typed(typed):
    name, words = typed
    done = run(*words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"usage: {name} [-h] [--version]")


@pytest.mark.parametrize("command", ["demo", "info", "trace"])
def test_every_command_has_help(typed, command):
    name, words = typed
    done = run(*words, command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {name} {command} ")
    assert re.search("--emulator +use the emulated driver", done.stdout)


def test_version(typed):
    done = run(*typed[1], "--version")
    assert (done.returncode, done.stdout) == (0, f"managedmem {managedmem.__version__}\n")


@pytest.mark.emulator_only
def test_the_console_command_traces_a_module_of_this_folder(console, tmp_path):
    (tmp_path / "mine.py").write_text(PRINTS)
    done = run(*console, "trace", "-m", "mine", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.fixture
def commands(tmp_path):
    """The arguments of each command by its name."""
    script = tmp_path / "script.py"
    script.write_text(PRINTS)
    return {"trace": ["trace", "--emulator", script], "help": ["--help"]} | {
        name: [name, "--emulator"] for name in ("demo", "info")
    }


@pytest.mark.parametrize("name", ["demo", "info", "help"])
def test_head_ends_a_command_silently(commands, name):
    words = shlex.join(map(str, [*MODULE, *commands[name]]))
    done = run("sh", "-c", f"{words} | head -1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("name", ["demo", "info", "help"])
def test_a_command_without_a_reader_ends_silently(commands, name):
    reading, writing = os.pipe()
    os.close(reading)
    done = run(*MODULE, *commands[name], stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("name", ["demo", "info", "help", "trace"])
def test_a_command_whose_output_was_closed_ends_silently(commands, name):
    words = shlex.join(map(str, [*MODULE, *commands[name]]))
    done = run("sh", "-c", f"{words} >&-")
    assert done.returncode == 0 and "Error" not in done.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_traced_program_without_a_reader_ends_silently(commands, stream):
    reading, writing = os.pipe()
    os.close(reading)
    done = run(*MODULE, *commands["trace"], **{stream: writing})
    os.close(writing)
    assert done.returncode == 1
    if stream == "stdout":
        assert "Error" not in done.stderr
        assert done.stderr.startswith("trace of ")
    else:
        assert done.stdout == "done\n"
