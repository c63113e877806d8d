"""Holds the coverage of src/_managedmem to its targets, from a JSON report of gcovr.

    python tests/gcov/gate.py REPORT.json

Prints the files below the targets with what does not run in them, then the totals. Two marks in a
source leave out what does not run in their line, and in the block that it opens:

    if (!mm_guard_enter(guard)) { /* raced */        another thread must act at this moment
    return ""; /* unreached: every value has a case */

Fails below a target, and where a line is marked as unreached and runs. Code that is merely hard to
reach, such as a failed allocation, has no mark.
"""

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = "src/_managedmem/"
TARGETS = {"lines": 99.0, "branches": 94.0}
MOST_MARKED = 1.5  # per cent of the lines, and of the branches
MARK = re.compile(r"/\* (raced|unreached: .+?) \*/")


@dataclass
class Line:
    mark: str = ""
    count: int = 0
    branches: dict = field(default_factory=dict)  # how often each was taken, by its place

    def untaken(self):
        return sum(count == 0 for count in self.branches.values())

    @property
    def excused(self):
        """The line, and its branches with it."""
        return bool(self.mark) and self.count == 0

    @property
    def excused_branches(self):
        """Those of its branches that are not taken."""
        return bool(self.mark) and self.count > 0


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


def marks(text):
    """{line number: its mark, or that of the line that opens its block}."""
    marked, lines = {}, text.splitlines()
    for number, line in enumerate(lines, 1):
        found = MARK.search(line)
        if not found:
            continue
        marked[number] = found[1]
        indent = len(line) - len(line.lstrip())
        inside = lines[number:] if line[: found.start()].rstrip().endswith("{") else []
        for below, other in enumerate(inside, number + 1):
            if other.strip() and len(other) - len(other.lstrip()) <= indent:
                break
            marked[below] = found[1]
    return marked


def read_report(report, read_text):
    """Every file of the sources as {number: Line}; a line of several functions counts once."""
    files = {}
    for entry in report["files"]:
        marked = marks(read_text(entry["file"]))
        lines = files.setdefault(entry["file"].removeprefix(SOURCES), {})
        for found in counted(entry["lines"]):
            number = found["line_number"]
            line = lines.setdefault(number, Line(marked.get(number, "")))
            line.count += found["count"]
            for place, branch in enumerate(counted(found.get("branches", []))):
                line.branches[place] = line.branches.get(place, 0) + branch["count"]
    return files


def check_marks(files):
    """The lines that are marked as unreached, and run with all their branches."""
    for name, lines in files.items():
        for number, line in lines.items():
            if line.mark.startswith("unreached") and line.count > 0 and line.untaken() == 0:
                yield f"{name}:{number} runs: take out its mark, {line.mark!r}"


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


def judge(report, read_text):
    """The lines to print, and the problems."""
    files = read_report(report, read_text)
    wrong = list(check_marks(files))
    shown = [text for name in sorted(files) for text in describe(name, files[name])]
    lines = [line for one in files.values() for line in one.values()]
    figures, excused = measure(lines), excused_share(lines)
    for kind, target in TARGETS.items():
        shown.append(f"{kind}: {figures[kind]}; {excused[kind]:.2f} % are marked")
        if figures[kind].percent() < target or not lines:
            wrong.append(f"{kind}: {figures[kind]} run, {target} % are needed")
        if excused[kind] > MOST_MARKED:
            wrong.append(f"{kind}: {excused[kind]:.2f} % are marked, {MOST_MARKED} % may be")
    return shown, wrong


def main(report):
    shown, wrong = judge(
        json.loads(Path(report).read_text()), lambda name: (ROOT / name).read_text()
    )
    print("\n".join(shown))
    for problem in wrong:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
