"""``python -m managedmem trace``: run a script or a module as Python does, under a trace.

The program sees its own ``sys.argv``, ``__main__`` and ``sys.path``, and ends with its own exit
status. At its end the table goes to stderr. The driver is open before the program begins.
"""

from __future__ import annotations

import argparse
import atexit
import builtins
import importlib.machinery
import importlib.util
import io
import json
import os
import signal
import sys
import types
from collections.abc import Callable, Sequence
from typing import NamedTuple, TextIO

import managedmem
from managedmem._cli import driver
from managedmem._cli.output import flushed, program_name, write_to_nothing
from managedmem._managedmem import TraceUnavailableError
from managedmem._trace_chrome import write_chrome
from managedmem._trace_ranks import rank_of_process

FILES = ("json", "chrome")
"""The options that name a file."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    command.add_argument("--json", metavar="FILE", help="also write the results to a file, as JSON")
    command.add_argument(
        "--chrome",
        metavar="FILE",
        help="also write the single events to a file for Perfetto or chrome://tracing; {rank} in "
        "the name of a file stands for the number of the process under torchrun, MPI or Slurm",
    )
    command.add_argument(
        "-m", dest="is_module", action="store_true", help="run a module, as python -m does"
    )
    command.add_argument("script", help="the script, or the module after -m")
    # Without the default, argparse's errors would call the arguments required.
    command.add_argument("arguments", nargs="*", default=[], help="its arguments")


def split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split the arguments into those of the command, up to the script, and those of the script."""
    at = 1
    while at < len(arguments) and arguments[at].startswith("-"):
        at += 2 if arguments[at].removeprefix("--") in FILES else 1
    return arguments[: at + 1], arguments[at + 1 :]


def note_late_options(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Say on stderr which options of the command the script gets, because they come after it."""
    for name in FILES:
        if f"--{name}" in arguments and getattr(options, name) is None:
            text = f"trace: --{name} comes after the script, which gets it; give it before"
            print(text, file=sys.stderr)


class NotFoundError(Exception):
    """The script or module cannot be run."""


class Program(NamedTuple):
    """A program that is ready to run: a function that returns its code, and its ``__main__``."""

    compiled: Callable[[], types.CodeType]
    main: types.ModuleType
    argument: str
    folder: str


def read_script(path: str) -> Program:
    """A script, which is compiled when it runs, so that its syntax errors look as usual."""
    full = os.path.abspath(path)
    try:
        with io.open_code(full) as file:
            source = file.read()
    except OSError as error:
        raise NotFoundError(f"cannot open {path!r}: {error.strerror}") from None
    main = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", full)
    main.__dict__.update(__file__=full, __cached__=None, __loader__=loader)

    def compiled() -> types.CodeType:
        return compile(source, full, "exec", dont_inherit=True)

    return Program(compiled, main, path, os.path.dirname(os.path.realpath(full)))


def find_module(name: str) -> Program:
    """A module, or the ``__main__`` of a package."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise NotFoundError(f"cannot find the module {name!r}: {error}") from None
    get_code = getattr(spec.loader, "get_code", None) if spec else None
    code = get_code(name) if get_code else None
    if spec is None or code is None:
        raise NotFoundError(f"there is no module {name!r} that Python can run")
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=spec,
    )
    return Program(lambda: code, main, str(spec.origin), os.getcwd())


def hide_our_frames(error: BaseException) -> None:
    """Let Python show the error, if it ends the process, with the frames of the program only."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    shown = sys.excepthook

    def hook(
        kind: type[BaseException], value: BaseException, traceback: types.TracebackType | None
    ) -> None:
        if value is error:
            value.__traceback__ = traceback = frames
        shown(kind, value, traceback)

    sys.excepthook = hook


class Ending:
    """Ends an interrupted process by SIGINT, as Python does."""

    def __init__(self) -> None:
        self.interrupted = False
        atexit.register(self.end)  # the first to be registered is the last to run

    def end(self) -> None:
        """Runs after all other functions at exit."""
        if self.interrupted:
            sys.stdout.flush()
            sys.stderr.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)


def execute(program: Program) -> None:
    """Run a program as ``__main__``. Its exceptions propagate."""
    ending = Ending()
    program.main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = program.main
    try:
        exec(program.compiled(), program.main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        ending.interrupted = isinstance(error, KeyboardInterrupt)
        hide_our_frames(error)
        raise


class Files(NamedTuple):
    """The files of ``--json`` and ``--chrome``, open before the program can change its folder."""

    json: TextIO | None
    chrome: TextIO | None

    def write(self, trace: managedmem.typing.Trace) -> None:
        """Write the results and the events of an ended trace."""
        if self.json is not None:
            with self.json:
                json.dump(trace.to_dict(), self.json, indent=1)
        if self.chrome is not None:
            with self.chrome:
                write_chrome(trace, self.chrome)


def opened(path: str | None) -> TextIO | None:
    """A file to write, with the rank of the process in its name, or None for None."""
    if path is None:
        return None
    return open(path.replace("{rank}", str(rank_of_process() or 0)), "w", encoding="utf-8")


def finish(trace: managedmem.typing.Trace, files: Files) -> bool:
    """End the trace, print its table, and write the files; False if a reader has stopped."""
    error = ""
    try:
        trace.stop()
    except managedmem.CUDAError as failure:
        error = f"trace: {failure}\n"
    is_read = flushed(sys.stdout)
    try:
        print(f"{error}{trace}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        write_to_nothing(sys.stderr)
        is_read = False
    files.write(trace)
    return is_read


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the program with its arguments; its errors propagate.

    Returns 2 if there is no such program, 1 if it cannot begin, or if a reader of the output has
    stopped, else 0.
    """
    note_late_options(options, arguments)
    driver.apply_request(options.driver)
    if options.is_module and not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # the console command has the folder of its own script there
    try:
        program = (find_module if options.is_module else read_script)(options.script)
        files = Files(opened(options.json), opened(options.chrome))
        trace = managedmem.trace()
        trace.start()
    except (NotFoundError, OSError, managedmem.CUDAError, TraceUnavailableError) as error:
        print(f"trace: {error}", file=sys.stderr)
        if isinstance(error, managedmem.DriverNotFoundError):
            print(f"Without a GPU: {program_name()} trace --emulator", file=sys.stderr)
        return 2 if isinstance(error, NotFoundError) else 1
    sys.argv = [program.argument, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = program.folder
    process, is_read = os.getpid(), True
    try:
        execute(program)
    finally:
        if os.getpid() == process:  # not in a child that the program has forked
            is_read = finish(trace, files)
    return 0 if is_read else 1
