"""``managedmem top``: its options, and the loop that shows one view after the other."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from managedmem._cli import top_web
from managedmem._cli.top_source import Ended, Source, only_process, source_of
from managedmem._cli.top_view import HEADS, View, is_left

Show = Callable[[View], None]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of ``top`` to its parser."""
    meaning = "the process; without it, the only one that MANAGEDMEM_TOP=1 lets serve, or that maps"
    meaning += " managed memory"
    command.add_argument("process", metavar="PID", nargs="?", type=_positive, help=meaning)
    forms = command.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print a line of JSON for each view")
    meaning = "show it on a page of this machine; without a port, a free one"
    forms.add_argument("--web", metavar="PORT", nargs="?", type=_port, const=0, help=meaning)
    meaning = "time from one view to the next, 1 by default"
    command.add_argument("--interval", metavar="SECONDS", type=_seconds, default=1.0, help=meaning)
    meaning = "end after so many views"
    command.add_argument("--count", metavar="N", type=_positive, help=meaning)


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, got {text!r}")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port, 0 to 65535, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"must be 0.05 to 3600 seconds, got {text!r}")
    return seconds


# --- the forms of a view ------------------------------------------------------------------


def _print_json(view: View) -> None:
    print(json.dumps(view.to_dict()), flush=True)


def _print_text(view: View) -> None:
    print(view, end="\n\n", flush=True)


def _rich(name: str) -> Any:
    return import_module(f"rich.{name}")


def _table(view: View) -> Any:
    """The view as a table of the library rich, which does not read the texts as markup."""
    table = _rich("table").Table(box=None, title_justify="left", caption_justify="left")
    text = _rich("text").Text
    table.title, table.caption = text(view.title, "bold"), text("\n".join(view.notes))
    for at, head in enumerate(HEADS):
        table.add_column(head, justify="left" if is_left(at) else "right", no_wrap=True)
    rows = view.cells()
    for row in rows:
        table.add_row(*map(text, row), style="bold" if row is rows[-1] else "")
    return table


@contextlib.contextmanager
def _terminal() -> Iterator[Show]:
    """One table that changes in place; without rich, or into a file, one table after another."""
    try:
        live = _rich("live").Live(auto_refresh=False) if sys.stdout.isatty() else None
    except ModuleNotFoundError:
        live = None
    if live is None:
        yield _print_text
        return
    with live:
        yield lambda view: live.update(_table(view), refresh=True)


# --- the loop -----------------------------------------------------------------------------


def views(source: Source, interval: float, count: int | None) -> Iterator[View]:
    """A view now and one after each interval, ``count`` of them. Raises Ended at the end."""
    before = None
    shown = 0
    due = time.monotonic()
    while count is None or shown < count:
        time.sleep(max(0.0, due - time.monotonic()))
        now = source.read()
        yield View(now, before)
        before = now
        shown += 1
        due = max(due + interval, time.monotonic())  # views missed by a stopped top are left out


def run(options: argparse.Namespace) -> int:
    """Show a process until it ends or the count is reached; return the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names can have any character
    process = options.process or only_process()
    source = source_of(process)
    form: contextlib.AbstractContextManager[Show]
    if options.web is not None:
        form = top_web.page(options.web)
    else:
        form = contextlib.nullcontext(_print_json) if options.json else _terminal()
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(source), form as show:
        try:
            for view in views(source, options.interval, options.count):
                show(view)
        except Ended:
            print(f"process {process} has ended, or serves no longer", file=sys.stderr)
    return 0
