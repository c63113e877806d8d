"""``python -m managedmem trace``: programs run as Python runs them, with a table at their end."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import managedmem

pytestmark = pytest.mark.emulator_only

PARENT = str(Path(managedmem.__file__).resolve().parents[1])
MOVES = """
import ctypes, managedmem
buf = managedmem.empty(1 << 20)
ctypes.memset(buf.handle, 1, buf.nbytes)
buf.prefetch(managedmem.Device(0))
"""


@pytest.fixture
def folder(tmp_path):
    """Makes files: `folder(name, text)`."""

    def make(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    make.path = tmp_path
    return make


def python(*arguments, cwd, **environment):
    variables = {**os.environ, "MANAGEDMEM_DRIVER": "emulator", "PYTHONPATH": PARENT}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**variables, **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def traced(*arguments, cwd, **environment):
    return python("-m", "managedmem", "trace", *arguments, cwd=cwd, **environment)


def table_of(text):
    assert len(re.findall(r"^trace of .* source emulator ", text, re.MULTILINE)) == 1, text
    return text[text.index("trace of ") :]


def test_table_goes_to_stderr(folder):
    script = folder("script.py", MOVES + "print('done')")
    done = traced(script, cwd=folder.path)
    assert (done.returncode, done.stdout) == (0, "done\n")
    table = table_of(done.stderr)
    for row in (r"1\.0M #\d+ +1\.0M", "total"):
        assert re.search(rf"^{row} +1\.0M +100% +0 +- +\d+ +0$", table, re.MULTILINE), table


def test_a_program_that_chooses_the_emulated_machine_is_told_where_to(folder):
    script = folder("script.py", "from managedmem import emulator\nemulator.enable(devices=4)\n")
    refused = traced(script, cwd=folder.path, MANAGEDMEM_EMULATOR="")
    assert refused.returncode == 1
    words = "before the first use, or set MANAGEDMEM_EMULATOR=devices=4 in the environment"
    assert words in refused.stderr
    done = traced(script, cwd=folder.path, MANAGEDMEM_EMULATOR="devices=4")
    assert done.returncode == 0, done.stderr


PROBE = """
import json, os, sys
import __main__
print(json.dumps({
    "argv": sys.argv,
    "path": sys.path[0],
    "name": __name__,
    "file": __file__,
    "main": sorted(n for n in vars(__main__) if n not in ("__annotations__", "json", "os", "sys")),
    "is_main": __main__.__dict__ is globals(),
    "package": __package__,
    "spec": getattr(__spec__, "name", None),
    "loader": type(__loader__).__name__,
    "cached": __cached__ is None,
    "doc": __doc__,
    "builtins": type(__builtins__).__name__,
}))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["sub/probe.py", "a", "--json", "-m", "x"],
        ["-m", "pack.probe", "-q"],
        ["-m", "pack", "--", "1"],
    ],
)
def test_a_program_sees_what_python_shows_it(folder, arguments):
    for name in ("sub/probe.py", "pack/probe.py", "pack/__main__.py"):
        folder(name, PROBE)
    folder("pack/__init__.py", "")
    plain = python(*arguments, cwd=folder.path)
    done = traced(*arguments, cwd=folder.path)
    assert plain.returncode == 0, plain.stderr
    assert done.returncode == 0, done.stderr
    seen, expected = json.loads(done.stdout), json.loads(plain.stdout)
    for found in (seen, expected):
        found["main"] = [name for name in found["main"] if name != "__cached__"]
    assert seen == expected


@pytest.mark.parametrize(
    ("end", "status", "error"),
    [
        ("sys.exit(7)", 7, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('the end')", 1, "the end\n"),
        ("raise SystemExit(None)", 0, ""),
        ("raise ValueError('bad')", 1, None),
        ("f()", 1, None),
        ("this is wrong", 1, None),
        ("raise KeyboardInterrupt", -signal.SIGINT, None),
        (
            "sys.excepthook = lambda *e: print('hook', e[0].__name__, file=sys.stderr); 1 / 0",
            1,
            None,
        ),
        ("atexit.register(print, 'last'); raise KeyboardInterrupt", -signal.SIGINT, None),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, None),
    ],
)
def test_a_program_ends_as_without_a_trace(folder, end, status, error):
    script = folder(
        "script.py",
        f"import atexit, os, signal, sys\ndef f():\n    int('x')\nprint('begin')\n{end}\n",
    )
    plain, done = (run(script, cwd=folder.path) for run in (python, traced))
    assert plain.returncode == status
    assert done.returncode == status, done.stderr
    assert done.stdout == plain.stdout
    if "SIGTERM" in end:
        return
    if error is not None:
        assert plain.stderr == error
    assert done.stderr.endswith(plain.stderr)
    assert "managedmem" not in plain.stderr
    if "wrong" not in end:
        assert table_of(done.stderr).endswith(plain.stderr)


def test_classes_of_the_program_can_be_pickled(folder):
    script = folder(
        "script.py",
        """
        import multiprocessing, pickle
        class Point:
            x = 3
        def work(n):
            return n * Point.x
        if __name__ == "__main__":
            assert type(pickle.loads(pickle.dumps(Point()))) is Point
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(work, [1, 2]))
        """,
    )
    done = traced(script, cwd=folder.path)
    assert (done.returncode, done.stdout) == (0, "[3, 6]\n"), done.stderr
    assert done.stderr.count("trace of ") == 1


def test_forked_children_print_no_table(folder):
    script = folder(
        "script.py",
        """
        import os, sys
        child = os.fork()
        if child == 0:
            sys.exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
    )
    done = traced(script, cwd=folder.path)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
    assert done.stderr.count("trace of ") == 1


def test_chrome(folder):
    script = folder("script.py", MOVES + "import os, sys\nos.chdir('/')\nprint(sys.argv[1:])")
    options = ["--chrome", "events.json", "--json", "sums.json"]
    done = traced(*options, script, "--chrome", "x", cwd=folder.path)
    assert done.stdout == "['--chrome', 'x']\n"
    found = json.loads((folder.path / "events.json").read_text())
    moves = [e for e in found["traceEvents"] if e.get("cat") == "move"]
    assert sum(move["args"]["bytes"] for move in moves) == 1 << 20
    assert json.loads((folder.path / "sums.json").read_text())["total"]["to_device"] == 1 << 20


def test_json(folder):
    script = folder("script.py", MOVES + "import os; os.chdir('/'); raise SystemExit(5)")
    done = traced("--json", "found.json", script, cwd=folder.path)
    assert done.returncode == 5, done.stderr
    found = json.loads((folder.path / "found.json").read_text())
    assert found["total"]["to_device"] == 1 << 20
    assert found["memories"][0]["by_cause"]["requested"] == [1 << 20, 0, 0]
    table_of(done.stderr)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["missing.py"], "trace: cannot open 'missing.py': No such file or directory\n"),
        (["-m", "missing"], "trace: there is no module 'missing' that Python can run\n"),
        (["-m", "missing.part"], "trace: cannot find the module 'missing.part': "),
        (["."], "trace: cannot open '.': Is a directory\n"),
    ],
)
def test_programs_that_are_not_there(folder, arguments, error):
    done = traced(*arguments, cwd=folder.path)
    assert (done.returncode, done.stdout) == (2, "")  # as of python
    assert done.stderr.startswith(error)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["--json", "--chrome"])
def test_options_after_the_script_are_noted(folder, option):
    script = folder("script.py", "import sys\nprint(sys.argv[1:])")
    done = traced(script, option, "x", cwd=folder.path)
    assert (done.returncode, done.stdout) == (0, f"['{option}', 'x']\n")
    assert done.stderr.startswith(f"trace: {option} comes after the script, which gets it")
    quiet = traced(option, "y", script, option, "x", cwd=folder.path)
    assert "comes after" not in quiet.stderr


@pytest.mark.parametrize("option", ["--json", "--chrome"])
def test_programs_that_cannot_begin(folder, option):
    folder("script.py", "print('ran')")
    done = traced(option, "no/such/folder.json", "script.py", cwd=folder.path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("trace: [Errno 2] No such file")
    assert "Traceback" not in done.stderr


def test_usage(folder):
    done = traced(cwd=folder.path)
    assert done.returncode == 2
    assert "usage: python -m managedmem trace" in done.stderr
    assert done.stderr.endswith("required: script\n")
    assert "script" in traced("--help", cwd=folder.path).stdout


def test_a_program_cannot_begin_without_a_driver(folder):
    script = folder("script.py", "print('ran')")
    done = traced(script, cwd=folder.path, MANAGEDMEM_DRIVER="/missing/libcuda.so.1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "/missing/libcuda.so.1" in done.stderr
    assert done.stderr.endswith("python -m managedmem trace --emulator\n")
    assert "Traceback" not in done.stderr


def test_a_program_that_traces_itself_is_told(folder):
    script = folder("script.py", "import managedmem\nwith managedmem.trace():\n    pass\n")
    done = traced(script, cwd=folder.path)
    assert done.returncode == 1
    assert "TraceBusyError" in done.stderr
    assert "one can run at a time" in done.stderr
    table_of(done.stderr)


def test_info_names_the_source(folder):
    done = python("-m", "managedmem", "info", cwd=folder.path)
    assert done.returncode == 0, done.stderr
    section = done.stdout.partition("sources of events for managedmem.trace()\n")[2].splitlines()
    assert re.match(r"  emulator  yes  \S", section[0])
    assert section[1] == "  kernel    no   this process uses the emulated driver"


def test_info_says_why_no_source_works(folder):
    found = python(
        "-m", "managedmem", "info", cwd=folder.path, MANAGEDMEM_EMULATOR="queue_absent=1"
    )
    assert found.returncode == 0, found.stderr
    section = found.stdout.partition("sources of events for managedmem.trace()\n")[2].splitlines()
    assert re.match(r"  emulator  no +.*--device /dev/nvidia-uvm-tools", section[0])


def test_a_program_does_not_begin_without_a_source(folder):
    script = folder("script.py", "print('ran')")
    done = traced(script, cwd=folder.path, MANAGEDMEM_EMULATOR="queue_absent=1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("trace: no source of unified-memory events.")
    assert "--device /dev/nvidia-uvm-tools" in done.stderr
