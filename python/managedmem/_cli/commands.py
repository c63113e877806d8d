"""The command line: its parser, and one entry for each command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import managedmem
from managedmem._cli import demo, info, script, top
from managedmem._cli.output import program_name, readers_may_stop
from managedmem._trace_ranks import merge

COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], str]] = {
    "demo": (
        lambda options: demo.run(options.driver, options.plot),
        "classify handwritten digits in managed memory and report what happened",
    ),
    "info": (
        lambda options: info.run(options.driver),
        "show the driver, its devices, and what managed memory can do here",
    ),
}
TRACE = "run a Python program and show which managed memory moved, and why"


def add_merge_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``merge`` to its parser."""
    command.add_argument("target", metavar="TARGET", help="the file to write")
    meaning = "a file of trace --chrome, or of to_chrome_trace()"
    command.add_argument("files", metavar="FILE", nargs="+", help=meaning)


WITHOUT_DRIVER: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str]] = {
    "top": (top.add_arguments, "show the managed memory of a running process and its moves, live"),
    "merge": (add_merge_arguments, "merge the traces of several ranks into one file for Perfetto"),
}


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    whole = argparse.ArgumentParser(
        prog=program_name(),
        description="CUDA managed memory for Python.",
        epilog="Without an option, the environment variable MANAGEDMEM_DRIVER names the driver: "
        "cuda, emulator, or the path of a library.",
    )
    version = f"managedmem {managedmem.__version__}"
    whole.add_argument("--version", action="version", version=version)
    texts = {name: text for name, (_, text) in COMMANDS.items()} | {"trace": TRACE}
    texts |= {name: text for name, (_, text) in WITHOUT_DRIVER.items()}
    metavar = f"{{{','.join(texts)}}}"
    commands = whole.add_subparsers(dest="command", required=True, metavar=metavar)
    for name, text in texts.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name in WITHOUT_DRIVER:
            WITHOUT_DRIVER[name][0](command)
            continue
        driver = command.add_mutually_exclusive_group()
        for choice, meaning in (("cuda", "the CUDA driver"), ("emulator", "the emulated driver")):
            driver.add_argument(
                f"--{choice}",
                dest="driver",
                action="store_const",
                const=choice,
                help=f"use {meaning}, whatever the environment says",
            )
        if name == "trace":
            script.add_arguments(command)
        if name == "demo":
            meaning = "also draw the bars into a file, such as faults.png, with matplotlib"
            command.add_argument("--plot", metavar="FILE", help=meaning)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 if it failed, 2 for wrong arguments.

    A program under ``trace`` can end the process with another status.
    """
    given = sys.argv[1:] if arguments is None else arguments
    given, of_script = script.split(given) if given[:1] == ["trace"] else (given, [])
    with readers_may_stop():
        options = parser().parse_args(given)
        if options.command != "trace":
            return reported(options)
    return script.run(options, of_script)


def reported(options: argparse.Namespace) -> int:
    """Run a command that prints a report; return its exit status."""
    try:
        if options.command == "merge":
            merge(options.files, options.target)
            print(f"written: {options.target}")
            return 0
        if options.command == "top":
            return top.run(options)
        return COMMANDS[options.command][0](options)
    except BrokenPipeError:
        raise
    except (managedmem.CUDAError, ValueError, ImportError, OSError) as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 1
