"""Proposes small changes to the C for tests/mutants.toml: python tools/propose_mutants.py

Every place in src/_managedmem where an operator below fits is a candidate. They are shuffled with a
fixed seed, and each kind takes its share in turns from as many files as it can, whatever the tests
cover. Prints the entries without killers.
"""

import argparse
import functools
import random
import re
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "_managedmem"
SEED = 11
SHARES = {
    "rollback": 10,
    "boundary": 22,
    "loop": 6,
    "lock": 12,
    "condition": 34,
    "gil": 6,
    "refcount": 14,
    "order": 6,
    "statement": 10,
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


def blank(text):
    """The text with spaces in place of comments and literals, so that offsets stay the same."""
    pattern = re.compile(r"/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL)
    code = pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
    return re.sub(
        r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*",
        lambda m: re.sub(r"[^\n]", " ", m.group()),
        code,
        flags=re.MULTILINE,
    )


def close_of(code, at, pair="()"):
    """The offset of the bracket that closes the one at offset `at`."""
    depth = 0
    for i in range(at, len(code)):
        depth += (code[i] == pair[0]) - (code[i] == pair[1])
        if depth == 0:
            return i
    raise ValueError("the brackets do not balance")


def operands(code, start, end):
    """The operands of the && or || outside of brackets between two offsets."""
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
    """(start, end, new text): takes out an operand, or the whole check if it has one only."""
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
        if second and second.group(1) == m.group(1):
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


def widened(text, start, end, new):
    """The change with as many whole lines around it as make the old text unique."""
    first = text.rfind("\n", 0, start) + 1
    last = end if text[end - 1] == "\n" else text.index("\n", end) + 1
    while text.count(text[first:last]) > 1:
        first = text.rfind("\n", 0, first - 1) + 1
        last = text.find("\n", last) + 1 or len(text)
    before = text[first:last]
    return before, text[first:start] + new + text[end:last]


def replacement(text, code, kind, place, new):
    """The new text with comments and literals, which the blanked code lacks."""
    start, end = place
    if kind == "gil":
        inner = text[start:end].split("\n")[1:-1]
        return "\n".join(["    {", *inner, "    MM_ASSERT_LEFT();\n    }"])
    if kind == "order":
        middle = start + len(CALL.match(code, start).group())
        return text[middle:end] + text[start:middle]
    return new


def function_at(code, at):
    heads = list(re.finditer(r"^(\w+)\([^;{}]*\)\n\{", code[:at], re.MULTILINE))
    return heads[-1].group(1) if heads else "file"


@functools.cache
def candidates():
    """{kind: {file: [(before, after, function)]}}"""
    found = {kind: defaultdict(list) for kind in OPERATORS}
    for path in sorted(SOURCES.glob("*/*.c")):
        text = path.read_text()
        code = blank(text)
        for kind, operator in OPERATORS.items():
            for start, end, new in operator(code):
                entry = widened(text, start, end, replacement(text, code, kind, (start, end), new))
                found[kind][path.relative_to(ROOT).as_posix()].append(
                    (*entry, function_at(code, start))
                )
    return found


def chosen(seed, shares):
    """Takes one from each file in turn, in a shuffled order, until each kind has its share."""
    generator = random.Random(seed)
    entries, taken, texts = [], set(), Counter()
    for kind, found in candidates().items():
        files = {name: generator.sample(all_, len(all_)) for name, all_ in sorted(found.items())}
        names, picked = list(files), 0
        generator.shuffle(names)
        while picked < shares[kind] and any(files.values()):
            for name in names:
                if picked < shares[kind] and files[name]:
                    before, after, function = files[name].pop()
                    if (name, before, after) in taken:
                        continue
                    taken.add((name, before, after))
                    title = f"{kind} {function}"
                    texts[title] += 1
                    title += f" {texts[title]}" if texts[title] > 1 else ""
                    entries.append((title, kind, name, before, after))
                    picked += 1
    return entries


def as_toml(title, kind, file, before, after):
    fields = {"name": f'"{title}"', "kind": f'"{kind}"', "file": f'"{file}"'}
    fields |= {"before": f"'''\n{before}'''", "after": f"'''\n{after}'''"}
    return "[[mutant]]\n" + "".join(f"{key} = {value}\n" for key, value in fields.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED)
    for entry in chosen(parser.parse_args().seed, SHARES):
        print(as_toml(*entry))


if __name__ == "__main__":
    main()
