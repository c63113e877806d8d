"""Small changes to the C, named by their coordinates: python tools/mutations.py [--seed N]

A mutation is one place in src/_managedmem where an operator below fits. Its coordinates are its
kind, file, function, and number among those of its kind in the function, so that a list of
mutations quotes no code. Prints a sample: the places are shuffled with the seed, and each kind
takes its share in turns from as many files as it can, whatever the tests cover.
"""

import argparse
import functools
import random
import re
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCES = Path("src") / "_managedmem"
SEED = 30
SHARES = {
    "rollback": 14,
    "boundary": 24,
    "loop": 8,
    "lock": 14,
    "condition": 44,
    "gil": 6,
    "refcount": 14,
    "order": 6,
    "statement": 20,
}
FAILURE = re.compile(r"(<\s*0|[!=]=\s*(CUDA_SUCCESS|NULL|0)|!\w)")
UNDO = re.compile(
    r"^\s*(?:\(void\))?\w*(?:undo|restore|back|unset|members|release|drop|free|destroy|leave|reopen|"
    r"clear|retire|unexport|reset)\w*\([^;{}]*\);\n",
    re.MULTILINE,
)
REFERENCE = re.compile(
    r"Py_(?:X?DECREF|INCREF)\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\);"
    r"|Py_X?NewRef\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)"
    r"|^ +\bmm_\w+_retain\([^;{}]*\);",
    re.MULTILINE,
)
LOCK = [
    (re.compile(r"^\s*(?:mm_guard_(?:leave|unexport|reopen)|lock_\w+|unlock_\w+|acquire_turn|"
                r"release_turn)\([^;{}]*\);\n", re.MULTILINE), lambda m: ""),
    (re.compile(r"!mm_guard_(?:enter|export)\(((?:[^()]|\([^()]*\))*)\)"), lambda m: "false"),
    (re.compile(r"(?<!!)mm_guard_is_closed\(((?:[^()]|\([^()]*\))*)\)"), lambda m: "false"),
    (re.compile(r"^\s*(?:\(void\))?pthread_mutex_(?:lock|unlock)\([^;]*\);\n", re.MULTILINE),
     lambda m: ""),
    (re.compile(r"^\s*atomic_(?:store|flag_clear|fetch_add|fetch_sub)\w*\([^;]*\);\n",
                re.MULTILINE), lambda m: ""),
]  # fmt: skip
CALL = re.compile(r"^( +)(?! |return\b)[\w>.\-\[\]* ]*(?:= *)?\w+\([^;{}]*\);\n", re.MULTILINE)


NOT_CODE = (  # or code whose change no test can notice
    re.compile(r"/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL),
    re.compile(r"\b(?:_Static_assert|static_assert|assert|MM_ASSERT_\w+)\([^;]*\);"),
    re.compile(r"^#ifndef NDEBUG\n.*?(?=^#)", re.MULTILINE | re.DOTALL),
    re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE),
)


def blank(text):
    """The text with spaces in place of comments, literals, assertions and directives, so that
    offsets stay the same."""
    for pattern in NOT_CODE:
        text = pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
    return text


def close_of(code, at, pair="()"):
    """The offset of the bracket that closes the one at offset `at`."""
    depth = 0
    for i in range(at, len(code)):
        depth += (code[i] == pair[0]) - (code[i] == pair[1])
        if depth == 0:
            return i
    raise ValueError("the brackets do not balance")


def operands(code, start, end):
    """The operands of the && or || outside of brackets between two offsets; none if both occur."""
    cuts, depth = [], 0
    for i in range(start, end):
        depth += (code[i] in "([{") - (code[i] in ")]}")
        if depth == 0 and code[i : i + 2] in ("&&", "||"):
            cuts.append(i)
    if len({code[i : i + 2] for i in cuts}) != 1:
        return []
    edges = [start - 2, *cuts, end]
    return [(a + 2, b) for a, b in pairwise(edges)]


def conditions(code):
    """(start, end, new text) of changes that take out an operand, or a whole check with one
    operand."""
    for m in re.finditer(
        r"\b(if|while) \(|^ +(?:return\b|\w[\w *>.\-\[\]]* = )", code, re.MULTILINE
    ):
        word = m.group(1)
        start = m.end()
        end = close_of(code, m.end() - 1) if word else code.index(";", start)
        parts = operands(code, start, end)
        for i, (a, b) in enumerate(parts):
            yield (a, parts[i + 1][0], " ") if i == 0 else (a - 2, b, "")
        if not parts and word == "if":
            yield (start, end, "false")


def boundaries(code):
    for m in re.finditer(r" (<|>|<=|>=) (?!0\b)", code):
        line = code[code.rfind("\n", 0, m.start()) + 1 : code.find("\n", m.end())]
        if not line.lstrip().startswith("for "):
            other = {"<": "<=", ">": ">=", "<=": "<", ">=": ">"}[m.group(1)]
            yield m.start(), m.end(), f" {other} "
    for m in re.finditer(r" [+-] 1\b(?!\s*<)", code):
        yield m.start(), m.end(), ""


def loops(code):
    for m in re.finditer(r"^ *for \([^;]*;[^;]*( < )", code, re.MULTILINE):
        yield m.start(1), m.end(1), " + 1 < "


def rollbacks(code):
    for m in re.finditer(r"\bif \(", code):
        end = close_of(code, m.end() - 1)
        if code[end + 1 : end + 3] != " {" or not FAILURE.search(code, m.end(), end):
            continue
        stop = close_of(code, end + 2, "{}")
        for undo in UNDO.finditer(code, end + 4, stop):
            yield undo.start(), undo.end(), ""


def detachments(code):
    for m in re.finditer(r"( *)Py_BEGIN_ALLOW_THREADS\n(.*?)\n *Py_END_ALLOW_THREADS", code, re.S):
        yield m.start(1), m.end(), None


def references(code):
    for m in REFERENCE.finditer(code):
        inner = m.group(1) or m.group(2)
        if m.group().startswith(("Py_NewRef", "Py_XNewRef")):
            yield m.start(), m.end(), f"({inner})"
        else:
            yield m.start(), m.end(), f"(void)({inner});" if inner else ";"


def locks(code):
    for pattern, new in LOCK:
        for m in pattern.finditer(code):
            yield m.start(), m.end(), new(m)


def swaps(code):
    for m in CALL.finditer(code):
        second = CALL.match(code, m.end())
        releases = "DECREF" in m.group() and "DECREF" in (second.group() if second else "")
        if second and second.group(1) == m.group(1) and not releases:
            yield m.start(), second.end(), second.group() + m.group()


def statements(code):
    for m in CALL.finditer(code):
        if "DECREF" not in m.group() and not re.match(r" +[\w ]+\*?\w+ = ", m.group()):
            yield m.start(), m.end(), ""


OPERATORS = {
    "rollback": rollbacks,
    "boundary": boundaries,
    "loop": loops,
    "lock": locks,
    "condition": conditions,
    "gil": detachments,
    "refcount": references,
    "order": swaps,
    "statement": statements,
}


class Mutation(NamedTuple):
    """A change of the text from `start` to `end`. The path of the file begins below SOURCES."""

    kind: str
    file: str
    function: str
    number: int  # from 1
    start: int
    end: int
    new: str

    @property
    def name(self):
        return f"{self.kind} {self.file} {self.function} {self.number}"

    def changed(self, text):
        return text[: self.start] + self.new + text[self.end :]

    def lines(self, text):
        """The lines that it changes, from 1."""
        first = text.count("\n", 0, self.start) + 1
        return range(first, first + text.count("\n", self.start, self.end - 1) + 1)


def replacement(text, kind, start, end, new):
    """The new text of a mutation, with the comments and literals that operators do not see."""
    if kind == "gil":
        inner = text[start:end].split("\n")[1:-1]
        return "\n".join(["    {", *inner, "    MM_ASSERT_LEFT();\n    }"])
    if kind == "order":
        middle = start + len(CALL.match(blank(text), start).group())
        return text[middle:end] + text[start:middle]
    return new


def function_at(code, at):
    heads = list(re.finditer(r"^(\w+)\([^;{}]*\)\n\{", code[:at], re.MULTILINE))
    return heads[-1].group(1) if heads else "file"


@functools.cache
def mutations_of(file, root=ROOT):
    """The mutations of a source, by kind and place."""
    text = (root / SOURCES / file).read_text()
    code, found, numbers = blank(text), [], Counter()
    for kind, operator in OPERATORS.items():
        for start, end, new in operator(code):
            function = function_at(code, start)
            numbers[kind, function] += 1
            change = (start, end, replacement(text, kind, start, end, new))
            found.append(Mutation(kind, file, function, numbers[kind, function], *change))
    return found


def sources(root=ROOT):
    return sorted(
        p.relative_to(root / SOURCES).as_posix() for p in (root / SOURCES).glob("*/*.[ch]")
    )


def drawn(mutations, shares, seed):
    """Takes one from each file in turn, in a shuffled order, until each kind has its share."""
    generator = random.Random(seed)
    by_kind = {kind: defaultdict(list) for kind in shares}
    for mutation in mutations:
        by_kind[mutation.kind][mutation.file].append(mutation)
    taken, places = [], set()
    for kind, by_file in by_kind.items():
        files = [generator.sample(found, len(found)) for found in by_file.values()]
        generator.shuffle(files)
        left = shares[kind]
        while left and any(files):
            for found in filter(None, files):
                mutation = found.pop()
                place = (mutation.file, mutation.start, mutation.end, mutation.new)
                if left and place not in places:  # two operators can make the same change
                    places.add(place)
                    taken.append(mutation)
                    left -= 1
    return taken


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=SEED)
    every = [mutation for file in sources() for mutation in mutations_of(file)]
    for mutation in drawn(every, SHARES, parser.parse_args().seed):
        print(mutation.name)


if __name__ == "__main__":
    main()
