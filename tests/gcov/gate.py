"""Holds the coverage of src/_managedmem to its targets, from a JSON report of gcovr.

    python tests/gcov/gate.py REPORT.json [EXCEPTIONS.toml]

Prints the files below the targets with what does not run in them, then the totals. Fails below a
target, and for an exception that is wrong: its lines run after all (unless `sometimes` is true),
are not there, or it has no reason.
"""

import json
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = "src/_managedmem/"
TARGETS = {"lines": 99.0, "branches": 94.0}
MOST_EXCEPTIONS = 1.5  # per cent of the lines, and of the branches


@dataclass
class Line:
    function: str
    text: str
    count: int = 0
    branches: dict = field(default_factory=dict)  # how often each was taken, by its place
    excused: bool = False  # the line; its branches come with it
    excused_branches: bool = False

    def untaken(self):
        return sum(count == 0 for count in self.branches.values())


@dataclass
class Figure:
    done: int = 0
    total: int = 0

    def percent(self):
        return 100 * self.done / self.total if self.total else 100.0

    def __str__(self):
        return f"{self.percent():6.2f} % of {self.total}"


def counted(entries):
    """The lines or branches that no option of gcovr leaves out."""
    return [entry for entry in entries if not entry.get("gcovr/excluded")]


def read_report(report, read_text):
    """Every file of the sources as {number: Line}; a line of several functions counts once."""
    files = {}
    for entry in report["files"]:
        texts = read_text(entry["file"]).splitlines()
        lines = files.setdefault(entry["file"].removeprefix(SOURCES), {})
        for found in counted(entry["lines"]):
            number = found["line_number"]
            new = Line(found.get("function_name", ""), texts[number - 1].strip())
            line = lines.setdefault(number, new)
            line.count += found["count"]
            for place, branch in enumerate(counted(found.get("branches", []))):
                line.branches[place] = line.branches.get(place, 0) + branch["count"]
    return files


def is_partly_idle(line):
    return line.count > 0 and line.untaken() > 0


def excuse(files, exception):
    """Mark the lines of an exception; returns the problems of the exception itself."""
    place = f"{exception.get('file')}, {exception.get('function')}"
    lines = [
        line
        for line in files.get(exception.get("file"), {}).values()
        if line.function == exception.get("function")
    ]
    wrong = [] if exception.get("reason", "").strip() else [f"{place}: it has no reason"]
    wrong += [] if lines else [f"{place}: there is no such function"]
    for key, problem, is_idle, mark in (
        ("lines", "the line runs", lambda line: line.count == 0, "excused"),
        ("branches", "all branches are taken", is_partly_idle, "excused_branches"),
    ):
        for text in exception.get(key, []):
            found = [line for line in lines if line.text == text]
            idle = [line for line in found if is_idle(line)]
            if lines and not found:
                wrong.append(f"{place}: {text!r}: there is no such line")
            elif lines and not idle and not exception.get("sometimes"):
                wrong.append(f"{place}: {text!r}: {problem}")
            for line in idle:
                setattr(line, mark, True)
    return wrong


def measure(lines):
    """Lines and branches of one file or of all, without those that are excused."""
    kept = [line for line in lines if not line.excused]
    branches = [line for line in kept if not line.excused_branches]
    total = sum(len(line.branches) for line in branches)
    # The taken branches of an excused line still count.
    taken = [line for line in kept if line.excused_branches]
    total += sum(len(line.branches) - line.untaken() for line in taken)
    return {
        "lines": Figure(sum(line.count > 0 for line in kept), len(kept)),
        "branches": Figure(total - sum(line.untaken() for line in branches), total),
    }


def excused_share(lines):
    """The excused lines and branches, in per cent of all."""
    excused = [line for line in lines if line.excused]
    branches = sum(len(line.branches) for line in excused)
    branches += sum(line.untaken() for line in lines if line.excused_branches)
    return {
        "lines": 100 * len(excused) / max(1, len(lines)),
        "branches": 100 * branches / max(1, sum(len(line.branches) for line in lines)),
    }


def runs(numbers):
    """Line numbers as text: 3, 5 to 7."""
    groups = []
    for number in numbers:
        if groups and groups[-1][-1] == number - 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(f"{g[0]}-{g[-1]}" if len(g) > 1 else str(g[0]) for g in groups)


def describe(name, lines):
    """The lines and branches that a file lacks; none if it reaches both targets."""
    figures = measure(lines.values())
    if all(figures[kind].percent() >= TARGETS[kind] for kind in TARGETS):
        return []
    idle = [n for n, line in sorted(lines.items()) if line.count == 0 and not line.excused]
    partly = [
        n
        for n, line in sorted(lines.items())
        if line.count > 0 and line.untaken() and not line.excused_branches
    ]
    return [
        f"{name}: lines {figures['lines']}, branches {figures['branches']}",
        *([f"    lines that do not run: {runs(idle)}"] if idle else []),
        *([f"    branches that are not taken: {runs(partly)}"] if partly else []),
    ]


def judge(report, exceptions, read_text):
    """The lines to print, and the problems."""
    files = read_report(report, read_text)
    wrong = [problem for exception in exceptions for problem in excuse(files, exception)]
    shown = [text for name in sorted(files) for text in describe(name, files[name])]
    lines = [line for one in files.values() for line in one.values()]
    figures, excused = measure(lines), excused_share(lines)
    for kind, target in TARGETS.items():
        shown.append(f"{kind}: {figures[kind]}; {excused[kind]:.2f} % are exceptions")
        if figures[kind].percent() < target or not lines:
            wrong.append(f"{kind}: {figures[kind]} run, {target} % are needed")
        if excused[kind] > MOST_EXCEPTIONS:
            wrong.append(
                f"{kind}: {excused[kind]:.2f} % are exceptions, {MOST_EXCEPTIONS} % may be"
            )
    return shown, wrong


def main(report, exceptions=Path(__file__).parent / "exceptions.toml"):
    shown, wrong = judge(
        json.loads(Path(report).read_text()),
        tomllib.loads(Path(exceptions).read_text()).get("exception", []),
        lambda name: (ROOT / name).read_text(),
    )
    print("\n".join(shown))
    for problem in wrong:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
