"""Programs in processes of their own, because a process selects its driver once.

A program has tests/support on its path, and the schedule of the test that starts it.
"""

import ast
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from paths import TESTS

PATIENCE = 90  # seconds of processor time for a program
WAITING = 5  # times PATIENCE is the limit for all time: other work makes programs wait
schedule_of_subprocesses = "eager"  # conftest.py sets that of the present test


def build_allocations(folder):
    """The allocators of tests/c/allocations.c, or None where there is no compiler for them."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    source = TESTS / "c" / "allocations.c"
    built = folder / "liballocations.so"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-fPIC"]
    done = subprocess.run(
        [compiler, *flags, "-shared", str(source), "-o", str(built), "-lpthread", "-ldl"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return built


def run_python(code, *, driver="emulator", emulator=None, check=True, patience=PATIENCE):
    """Run code in a fresh interpreter with that MANAGEDMEM_DRIVER (None: unset).

    The emulated driver has the schedule of the present test, unless `emulator` names one.
    """
    import managedmem

    env = {k: v for k, v in os.environ.items() if not k.startswith("MANAGEDMEM_")}
    package_parent = str(Path(managedmem.__file__).resolve().parents[1])
    paths = [package_parent, str(TESTS / "support"), env.get("PYTHONPATH")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if driver is not None:
        env["MANAGEDMEM_DRIVER"] = str(driver)
    options = [emulator] if emulator else []
    if driver == "emulator" and "schedule" not in (emulator or ""):
        options.append(f"schedule={schedule_of_subprocesses}")
    if emulator is not None or options:
        env["MANAGEDMEM_EMULATOR"] = ",".join(options)
    code = textwrap.dedent(code)
    assert not behind_an_end(code), with_lines("this never runs", code)
    done = run_program([sys.executable, "-X", "faulthandler", "-c", code], env, patience)
    if check:
        assert done.returncode == 0, done.stdout + with_lines(done.stderr, code)
    return done


def behind_an_end(code):
    """The statements behind a `return` or `raise` of their block, which never run.

    This is a mistake of tests that join texts: if the first ends in a `def`, the second may become
    a part of that function by its indentation.
    """
    try:
        blocks = [getattr(node, "body", []) for node in ast.walk(ast.parse(code))]
    except SyntaxError:  # the test is about it, or the program reports it
        return []
    ends = ast.Return, ast.Raise, ast.Continue, ast.Break
    return [
        later
        for block in blocks
        if isinstance(block, list)
        for one, later in itertools.pairwise(block)
        if isinstance(one, ends)
    ]


def with_lines(text, code):
    """A traceback with the lines of a program that Python was given as text."""
    lines = code.splitlines()

    def line_of(found):
        number = int(found[1])
        return f"{found[0]}\n    {lines[number - 1].strip()}" if number <= len(lines) else found[0]

    return re.sub(r'^ *File "<string>", line (\d+).*$', line_of, text, flags=re.MULTILINE)


def parameters_of(request, test):
    """The names that a test is parametrized with in this run."""
    items = [item for item in request.session.items if item.originalname == test.__name__]
    return [item.callspec.params["name"] for item in items]


def explore(module, names, at_once, patience=PATIENCE):
    """The findings of main() of a module of tests/support, by operation: a text or None.

    main() runs in processes of its own, because an operation may crash or hang its process. It
    prints lines of JSON: a list with the name before an operation, and with name and finding after
    it.
    """
    found = {}
    while names:
        code = f"import {module}; {module}.main({names[:at_once]!r})"
        done = run_python(code, check=False, patience=patience)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert lines, done.stderr
        for name, *wrong in lines:
            found[name] = wrong[0] if wrong else f"the process ended in it:\n{done.stderr}"
        if found[lines[-1][0]] is not None:
            found[lines[-1][0]] += f"\n{done.stderr}"
        names = [name for name in names if name not in found]
    return found


def communicate(process, patience):
    """The outputs of a process, or TimeoutExpired."""
    end = time.monotonic() + WAITING * patience
    clock = ~process.pid << 3 | 2  # Linux: the processor time of that process
    while True:
        try:
            return process.communicate(timeout=min(1, patience))
        except subprocess.TimeoutExpired:
            if time.monotonic() > end or time.clock_gettime(clock) > patience:
                raise


def run_program(command, env, patience=PATIENCE):
    """Run a Python program to its end; if it hangs, fail with the stacks of all its threads.

    It counts as hanging after `patience` seconds of processor time, or WAITING times as many
    seconds in all. The program must have faulthandler enabled, which writes the stacks when the
    program is aborted, even if a thread waits in C and keeps the GIL.
    """
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, err = communicate(process, patience)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            try:
                out, err = process.communicate(timeout=5)
            except subprocess.TimeoutExpired as later:  # even of a child, which has the same pipes
                process.kill()
                out, err = later.stdout, later.stderr
            limits = f"{patience} s of processor time, or {WAITING * patience} s"
            raise AssertionError(f"it did not end within {limits}\n{out}\n{err}") from None
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)
