"""The bars at the end of the demo: in terminals of every kind, as a picture, and while it works."""

import io
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

import managedmem
from managedmem._cli import bars, demo_plot, output
from managedmem._cli.bars import Bar
from managedmem._cli.demo_plot import Timing

PARENT = str(Path(managedmem.__file__).resolve().parents[1])
BARS = [Bar("by page faults", 132, "132 faults"), Bar("with prefetch", 0, "0 faults")]


class Terminal(io.StringIO):
    """A terminal with this encoding."""

    encoding = "utf-8"

    def isatty(self):
        return True


def demo(*options, **environment):
    return subprocess.run(
        [sys.executable, "-m", "managedmem", "demo", "--emulator", *options],
        env={**os.environ, "PYTHONPATH": PARENT, "COLUMNS": "70", **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_emulated_demo_ends_in_faults():
    text = demo(PYTHONIOENCODING="utf-8").stdout
    head = "\npage faults of Device(0), one for each 64 KiB\n"
    faults = text.partition(head)[2].rstrip("\n")
    assert re.fullmatch(r"  by page faults  \u2588+  11 faults\n  with prefetch   0 faults", faults)
    assert max(map(len, faults.splitlines())) == 70
    assert "milliseconds" not in text
    assert "\x1b" not in text


def test_the_demo_in_a_terminal_without_blocks():
    text = demo(PYTHONIOENCODING="ascii").stdout
    assert text.isascii()
    assert "  by page faults  ####" in text


def test_bars_are_as_wide_as_the_terminal():
    for columns, expected in ((60, 60), (1000, 100), (1, 18 + 8 + 2 + len("132 faults"))):
        long, empty = bars.lines_of(BARS, io.StringIO(), columns)
        assert (len(long), empty) == (expected, "  with prefetch   0 faults")


def test_a_small_number_is_seen_and_none_is_not():
    for blocks, sign in ((True, "\u258f"), (False, "#")):
        assert bars.drawn(1e-6, 50, blocks) == sign
        assert bars.drawn(0, 50, blocks) == ""
        assert len(bars.drawn(1.0, 50, blocks)) == 50
    assert bars.drawn(0.5, 5, True) == "\u2588\u2588\u258c"


def test_colours_are_for_terminals_that_want_them(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[33m" in bars.lines_of(BARS, Terminal())[0]
    assert "\x1b" not in bars.lines_of(BARS, io.StringIO())[0]
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in bars.lines_of(BARS, Terminal())[0]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in bars.lines_of(BARS, Terminal())[0]


def test_progress_is_for_long_work_in_terminals(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with output.progress("short"):
        pass
    assert terminal.getvalue() == ""
    with output.progress("long"):
        end = time.monotonic() + 10
        while not terminal.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
        assert terminal.getvalue() == "long ..."
    assert terminal.getvalue() == "long ...\r\x1b[K"


def test_progress_elsewhere_shows_nothing(monkeypatch, capsys):
    with output.progress("long"):
        time.sleep(1.1)
    assert capsys.readouterr().err == ""


def heights(path):
    """The pixels from top to bottom of a PNG."""
    return struct.unpack(">I", path.read_bytes()[20:24])[0]


def test_times_of_a_real_driver_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    times = [Timing(bar.name, 0.5, "", int(bar.value)) for bar in BARS]
    demo_plot.draw(str(tmp_path / "both.png"), times, managedmem.Host(), emulated=False)
    assert heights(tmp_path / "both.png") == 2 * 270


def test_plot_writes_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "faults.png"
    done = demo("--plot", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"\nwritten: {path}\n")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert heights(path) == 270  # faults, and no times of the emulated driver
    missing = demo("--plot", str(tmp_path / "no" / "faults.png"))
    assert missing.returncode == 1
    assert missing.stderr.startswith("demo: ") and missing.stderr.count("\n") == 1


def test_plot_without_matplotlib_names_the_extra():
    code = "import sys; sys.modules['matplotlib'] = None; from managedmem._cli import commands; "
    code += "sys.exit(commands.main(['demo', '--emulator', '--plot', 'x.png']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": PARENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith('which is not installed: pip install "managedmem[plot]"\n')
