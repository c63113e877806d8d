"""Checks rules for the sources that no compiler checks, and prints what breaks one.

    python tools/check_sources.py

The rules are about includes between rooms, circles of calls in C and of imports in Python, lengths,
names, the places of docstrings and of arguments, Python objects in static storage, and the pages
that must name every source.
"""

import ast
import collections
import fnmatch
import re
import statistics
import sys
import tomllib
from pathlib import Path

from source_text import (
    calls_between,
    code_of,
    depth_of_driver_call,
    docstring_distances,
    find_circle,
    functions,
    imports_between,
    includes,
    places_of_arguments,
    static_python_objects,
)

ROOT = Path(__file__).resolve().parents[1]
# What each room may include of the project; the emulator stands alone.
MAY_INCLUDE = {
    "driver": {"driver"},
    "memory": {"memory", "driver"},
    "trace": {"trace", "memory", "driver"},
    "working": {"working", "memory", "driver"},
    "python": {"python", "trace", "working", "memory", "driver"},
    "emulator": {"emulator"},
}
EXTENSION = [room for room in MAY_INCLUDE if room != "emulator"]
VENDOR_HEADERS = {"cuda.h", "cudaTypedefs.h"}
MOST_LINES = 800
MOST_FUNCTION_LINES = 50
MOST_EMULATOR_FUNCTION_LINES = 42
MOST_DOCSTRING_DISTANCE = 5  # the median
MOST_CALLS = 5  # from an operation to the driver, one for each function on the way
OPERATIONS = [
    ("module_prefetch", "MemPrefetchAsync"),
    ("module_prefetch", "MemPrefetchBatchAsync"),
    ("module_discard", "MemDiscardBatchAsync"),
    ("module_discard_prefetch", "MemDiscardAndPrefetchBatchAsync"),
    ("plan_execute", "MemPrefetchAsync"),
    ("mm_buffer_prefetch", "MemPrefetchAsync"),
    ("mm_buffer_discard", "MemDiscardBatchAsync"),
]
# Words that ask for a meaning where a name should give it.
C_QUESTIONS = {"what", "how", "way", "which", "about"}
PYTHON_QUESTIONS = C_QUESTIONS | {"who", "whose"}
TEST_FOLDERS = {"core", "emulator", "interop", "project", "robustness"}
# This import is for types only: WorkingGroup.set is the set whose add() made the group.
SET_OF_A_GROUP = ("managedmem._working_group", "managedmem._working_set")
# The package imports these for types, or at their first use, and they import the package.
LATE_MODULES = {f"managedmem.{name}" for name in ("cupy", "megatron", "numba", "torch")}


def room_folder(room):
    return ROOT / "src" / (room if room == "emulator" else f"_managedmem/{room}")


def c_files(*rooms, endings="ch"):
    """{path: text} of the sources of rooms."""
    names = (p for room in rooms for p in sorted(room_folder(room).glob(f"*.[{endings}]")))
    return {path: path.read_text() for path in names}


def by_name(files):
    return {path.name: text for path, text in files.items()}


def said_twice(pairs):
    """A line for each name that two places have; takes pairs of a name and its place."""
    seen = {}
    for name, place in pairs:
        if name in seen:
            yield f"{place}: {name} is also in {seen[name]}"
        seen.setdefault(name, place)


# --- each C file ------------------------------------------------------------------------------


def check_includes(room, path, text):
    for delimiter, name in includes(text):
        target = (path.parent / name).resolve()
        if not name.endswith(".h"):
            yield f"it includes a source file, {name}"
        elif target.is_file():
            other = target.parent.name
            if other not in MAY_INCLUDE[room]:
                yield f"an arrow from {room} to {other}: {name}"
        elif delimiter == '"' and name not in VENDOR_HEADERS:
            yield f"{name} is nowhere"
        elif room != "python" and "python" in name.lower():
            yield f"it includes {name}: only the room python knows Python"


def check_words(room, text):
    opening = re.match(r"/\*\s*(.*?)\*/", text, re.DOTALL)
    words = set(re.findall(r"\w+", code_of(text)))
    if not opening or len(opening.group(1).split()) < 4:
        yield "it does not begin with a comment that says what it owns"
    if room != "python" and any(re.match(r"Py(Object|_\w+|Err_\w+)$", word) for word in words):
        yield "a name of Python: only the room python knows it"
    if words & C_QUESTIONS:
        yield f"question words as names: {', '.join(sorted(words & C_QUESTIONS))}"
    for comment in re.findall(r"/\*.*?\*/", text, re.DOTALL):
        for name in set(re.findall(r"(?<![\w*/.)])\*([a-z]\w*)", comment)) - words:
            yield f"a comment tells of *{name}, which the code does not have"


def check_lengths(room, text):
    limit = MOST_EMULATOR_FUNCTION_LINES if room == "emulator" else MOST_FUNCTION_LINES
    found = functions(text)
    if text.count("\n") > MOST_LINES:
        yield f"more than {MOST_LINES} lines"
    if re.search(r"^\{", text, re.MULTILINE) and not found:
        yield "no function found in it"
    for name, _, length in found:
        if length > limit:
            yield f"{name}() has {length} lines, of at most {limit}"


def check_objects(room, text):
    for declaration in static_python_objects(text):
        yield f"a Python object in static storage: {declaration}"
    if room != "python":
        return
    lines = text.splitlines()
    for name, first, length in functions(text):
        end = "\n".join(lines[first + length - 3 : first - 1 + length])
        if name.endswith("_dealloc") and "mm_free_object(" not in end:
            yield f"{name}() does not end with mm_free_object(), which drops the type"
    for form in re.findall(r'(?:BuildValue|ParseTuple\w*)\([^"]*"([^"]*)"', text):
        if "#" in form:  # needs PY_SSIZE_T_CLEAN, which newer headers lack for Python 3.11
            yield f"a format with a length: {form}"
    for table in re.findall(r"PyMethodDef \w+\[\] = \{.*?^\};", text, re.MULTILINE | re.DOTALL):
        if "--\\n" in table:
            yield "a docstring in a table of methods"


def check_guard(path, text):
    directives = re.findall(r"^#.*$", code_of(text), re.MULTILINE)
    guard = re.match(r"#ifndef (\w+)$", directives[0])
    closed = directives[-1].startswith("#endif")
    if path.suffix == ".h" and not (guard and directives[1] == f"#define {guard[1]}" and closed):
        yield "a header without a guard"


def check_c_files():
    for room in MAY_INCLUDE:
        for path, text in c_files(room).items():
            problems = (
                check_includes(room, path, text),
                check_words(room, text),
                check_lengths(room, text),
                check_objects(room, text),
                check_guard(path, text) if path.suffix == ".h" else (),
            )
            for problem in (one for each in problems for one in each):
                yield f"{path.relative_to(ROOT)}: {problem}"


# --- the C as a whole -------------------------------------------------------------------------


def check_names():
    every = c_files(*MAY_INCLUDE)
    guards = (
        (re.search(r"^#ifndef (\w+)", text, re.MULTILINE)[1], path.name)
        for path, text in every.items()
        if path.suffix == ".h"
    )
    yield from said_twice((path.name, path.parent.name) for path in every)
    yield from said_twice(guards)
    for rooms in (EXTENSION, ["emulator"]):  # a stack trace shows names without files
        files = by_name(c_files(*rooms, endings="c"))
        named = ((name, file) for file, text in files.items() for name, _, _ in functions(text))
        yield from said_twice(pair for pair in named if pair[0] != "EMU_ENTRY")


def check_calls():
    extension = by_name(c_files(*EXTENSION, endings="c"))
    emulator = by_name(c_files("emulator", endings="c"))
    for files in (extension, emulator):
        circle = find_circle(calls_between(files))
        if circle:
            yield f"files that call each other in a circle: {' -> '.join(circle)}"
    for start, entry in OPERATIONS:
        depth = depth_of_driver_call(extension, start, entry)
        if depth is None or depth > MOST_CALLS:
            yield f"{start}() reaches {entry} in {depth} calls, of at most {MOST_CALLS}"
    header = (room_folder("emulator") / "emulator.h").read_text()
    yield from against_layers(calls_between(emulator), told_layers(header))


def told_layers(header):
    """The layers in the first comment of emulator.h, upper ones first."""
    opening = header[: header.index("*/")]
    return [set(line.split()) for line in re.findall(r"^ \*   ((?:\w+\.c ?)+)", opening, re.M)]


def against_layers(calls, layers):
    height = {name: -depth for depth, layer in enumerate(layers) for name in layer}
    for name in calls.keys() ^ height.keys():
        yield f"emulator.h: its layers and the files differ in {name}"
    for user, owners in calls.items():
        for owner in owners & height.keys():
            if user in height and height[user] <= height[owner]:
                yield f"{user}: it calls up, into {owner} (layers of emulator.h)"


def check_topics():
    """A comment about a measurement must name its topic of the conformance program."""
    table = (ROOT / "tests/conformance/conformance.c").read_text()
    topics = set(re.findall(r'^    {"([^"]+)", topic_', table, re.MULTILINE))
    for path, text in c_files("emulator").items():
        for flat in measured_without_topic(text, topics):
            yield f"{path.name}: measured, but of no topic of the conformance program: {flat}"


def measured_without_topic(text, topics):
    for comment in re.findall(r"/\*.*?\*/", text, re.DOTALL):
        flat = re.sub(r"\s+(?:\* )?", " ", comment)
        named = set(re.findall(r'"([^"]+)"', flat)) if "topic" in flat else set()
        if ("Measured" in flat and not named) or not named <= topics:
            yield flat


def check_docstrings():
    files = by_name(c_files("python", endings="c"))
    headers = "".join(c_files("python", endings="h").values())
    distances = docstring_distances(files).values()
    if len(distances) < 100 or statistics.median(distances) > MOST_DOCSTRING_DISTANCE:
        yield "docstrings do not stand above their functions"
    for doc, good in places_of_arguments(files, headers).items():
        if not good:
            yield f"{doc}: the enumerators of argv are not its parameters in their order"


# --- pages and Python -------------------------------------------------------------------------


def check_pages():
    sources = c_files(*EXTENSION)
    page = (ROOT / "docs/develop/architecture.rst").read_text()
    for path in sources:
        if path.suffix == ".c" and f"``{path.name}``" not in page:
            yield f"architecture.rst does not name {path.name}"
    picture = (ROOT / "docs/develop/rooms.svg").read_text()
    listed = re.findall(r'class="file"[^>]*>([^<]+)<', picture)
    patterns = {name for text in listed for name in text.split(", ")}
    stems = {path.stem for path in sources} - {"dlpack_abi"}
    for stem in stems:
        if not any(fnmatch.fnmatchcase(stem, pattern) for pattern in patterns):
            yield f"rooms.svg does not name {stem}"
    for pattern in patterns:
        if not fnmatch.filter(stems, pattern):
            yield f"rooms.svg names {pattern}, which no source is"
    pins = re.findall(r"[\w-]+==[\w.*]+", (ROOT / ".pre-commit-config.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for pin in set(pins) - set(project["optional-dependencies"]["lint"]):
        yield f".pre-commit-config.yaml has {pin}, and the extra lint another one"


def package_files():
    """The text of each Python file of the package, by the name of its module."""
    files = {}
    for path in sorted((ROOT / "python/managedmem").rglob("*.py")):
        parts = path.relative_to(ROOT / "python").with_suffix("").parts
        files[".".join(parts).removesuffix(".__init__")] = path.read_text()
    return files


def check_package():
    files = {**package_files(), "managedmem._managedmem": "", "managedmem.__version__": ""}
    imports = imports_between(files)
    group, owner = SET_OF_A_GROUP
    imports[group].discard(owner)
    imports["managedmem"] -= LATE_MODULES
    circle = find_circle(imports)
    if circle:
        yield f"modules that import each other in a circle: {' -> '.join(circle)}"


def names_made(source):
    """The names that a Python source gives: of functions, classes, parameters and variables."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def question_names(source):
    """The names of a Python source that have a question word."""
    return {n for n in names_made(source) if PYTHON_QUESTIONS & {*n.lower().split("_")}}


def check_tests_and_tools():
    tests, tools = sorted((ROOT / "tests").rglob("*.py")), sorted((ROOT / "tools").glob("*.py"))
    names = collections.Counter(path.stem for path in (*tests, *tools))
    for path in (*tests, *tools):
        text, shown = path.read_text(), path.relative_to(ROOT)
        if names[path.stem] > 1:
            yield f"{shown}: another module of tests and tools has this name"
        if text.count("\n") > MOST_LINES:
            yield f"{shown}: more than {MOST_LINES} lines"
        if re.search(r"^\s*(?:from|import) test_", text, re.MULTILINE):
            yield f"{shown}: it imports a test"
        if path.name.startswith("test_") and path.parent.name not in TEST_FOLDERS:
            yield f"{shown}: the folder of a test says its subject"
        if path.parent.name in ("support", "tools"):
            if len((ast.get_docstring(ast.parse(text)) or "").split()) < 4:
                yield f"{shown}: it does not begin by saying what it owns"
            for name in sorted(question_names(text)):
                yield f"{shown}: a question as a name: {name}"


CHECKS = (
    check_c_files,
    check_names,
    check_calls,
    check_topics,
    check_docstrings,
    check_pages,
    check_package,
    check_tests_and_tools,
)


def main():
    problems = [problem for check in CHECKS for problem in check()]
    print("\n".join(problems), end="\n" if problems else "")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
