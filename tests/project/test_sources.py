"""Reads the sources and holds them to the rules that no compiler checks.

Owns the architecture's include arrows, the ban on circles of files in C and in Python, the size
limits and the ban on Python objects in static storage. Every rule is a function over text, and each
is first shown a text that breaks it.
"""

import ast
import fnmatch
import re
import statistics
import tomllib

import pytest

from paths import ROOT

SRC = ROOT / "src"
ROOMS = {
    "driver": SRC / "_managedmem" / "driver",
    "memory": SRC / "_managedmem" / "memory",
    "trace": SRC / "_managedmem" / "trace",
    "working": SRC / "_managedmem" / "working",
    "python": SRC / "_managedmem" / "python",
    "emulator": SRC / "emulator",
}
EXTENSION = ("driver", "memory", "working", "trace", "python")
# What each room may include of the project; the emulator stands alone.
MAY_INCLUDE = {
    "driver": {"driver"},
    "memory": {"memory", "driver"},
    "trace": {"trace", "memory", "driver"},
    "working": {"working", "memory", "driver"},
    "python": {"python", "trace", "working", "memory", "driver"},
    "emulator": {"emulator"},
}
VENDOR_HEADERS = {"cuda.h", "cudaTypedefs.h"}
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 80


def c_files():
    return sorted(p for room in ROOMS.values() for p in room.rglob("*.[ch]"))


def room_of(path):
    return next(name for name, folder in ROOMS.items() if folder in path.parents)


def blank_comments_and_strings(text):
    """The same text, line for line, with comments and literals replaced by spaces."""
    pattern = re.compile(
        r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL
    )
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def without_directives(code):
    """The same code with preprocessor lines, and what they continue on, replaced by spaces."""
    pattern = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), code)


def includes(text):
    """Every include as (delimiter, name), in order."""
    # The names are string literals to the blanking, so only comments are taken out here.
    bare = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.DOTALL)
    return re.findall(r"^[ \t]*#[ \t]*include[ \t]*([<\"])([^>\"]+)[>\"]", bare, re.MULTILINE)


def resolve(path, name):
    """The project file that an include names, or None for one from outside.

    Includes are relative to their file, so that each line shows its arrow: "../driver/driver.h".
    """
    target = (path.parent / name).resolve()
    return target if target.is_file() else None


def function_bodies(text):
    """Every function definition as (name, first line, number of lines)."""
    code = without_directives(blank_comments_and_strings(text))
    functions = []
    depth = 0
    start = 0  # of the declaration that leads to the next brace at file level
    for match in re.finditer(r"[{};]", code):
        mark = match.group()
        if mark == "{":
            if depth == 0:
                head = code[start : match.start()]
            depth += 1
        elif mark == "}":
            depth -= 1
            assert depth >= 0, "the braces do not balance"
            if depth == 0:
                name = re.search(r"(\w+)\s*\([^{}]*\)\s*$", head)
                if name and "=" not in head:
                    first = code.count("\n", 0, start + len(head) - len(head.lstrip())) + 1
                    functions.append(
                        (name.group(1), first, code.count("\n", 0, match.end()) + 2 - first)
                    )
                start = match.end()
        elif depth == 0:
            start = match.end()
    assert depth == 0, "the braces do not balance"
    return functions


def static_python_objects(text):
    """Declarations that keep a Python object in static storage, at file or function level."""
    code = without_directives(blank_comments_and_strings(text))
    declared = r"\bPy\w*Object\b[\s*]*\*[\s*]*(?:const\s+)?\w+\s*(?:\[[^\]]*\]\s*)*[=;,]"
    bad = re.findall(r"\b(?:static|extern|_Thread_local)\b[^;{}()]*" + declared, code)
    depth = 0
    top = []
    for character in code:
        depth += character == "{"
        top.append(character if depth == 0 else "\n" if character == "\n" else " ")
        depth -= character == "}"
    for statement in "".join(top).split(";"):
        if "(" not in statement and re.search(declared, statement + ";"):
            bad.append(statement.strip())
    return bad


# The rules can fail: each finds the fault in a text that has it.


def test_include_reader_sees_each_form():
    text = (
        '#include <a.h>\n/* #include <no.h> */\n# include "b/c.h"\nint x; /*\n#include "no.h"\n*/\n'
    )
    assert includes(text) == [("<", "a.h"), ('"', "b/c.h")]


def test_function_reader_measures_from_the_head_to_the_closing_brace():
    text = (
        "/* int no(void) { */\n#define M(x) do { } while (0)\nstruct s {\n    int a;\n};\n"
        "static const int t[] = {1, 2};\n\nstatic int\nf(int a, int b)\n{\n    if (a) {\n"
        '        puts("}");\n    }\n    return b;\n}\nvoid g(void) {}\n'
    )
    assert function_bodies(text) == [("f", 8, 8), ("g", 16, 1)]


@pytest.mark.parametrize(
    "text",
    [
        "static PyObject *error;",
        "PyObject *error = NULL;",
        "extern PyTypeObject *a_type;",
        "int f(void)\n{\n    static PyObject *once;\n}",
        "static PyObject *names[4];",
    ],
)
def test_static_object_finder_finds(text):
    assert static_python_objects(text)


@pytest.mark.parametrize(
    "text",
    [
        "PyObject *f(PyObject *self);",
        "static PyObject *\nf(PyObject *op)\n{\n    PyObject *r = NULL;\n    return r;\n}",
        "typedef struct {\n    PyObject *owner;\n} t;",
        "/* static PyObject *x; */",
        "static PyMethodDef methods[] = {{0}};",
    ],
)
def test_static_object_finder_lets_pass(text):
    assert not static_python_objects(text)


# The sources.


def test_every_room_has_sources():
    for name, folder in ROOMS.items():
        assert list(folder.glob("*.c")), f"no C source in the {name} room"
    assert {room_of(p) for p in c_files()} == set(ROOMS)


@pytest.mark.parametrize("path", c_files(), ids=lambda p: f"{room_of(p)}/{p.name}")
class TestEveryFile:
    def test_includes_only_what_its_room_may(self, path):
        room = room_of(path)
        for delimiter, name in includes(path.read_text()):
            target = resolve(path, name)
            if target is None:
                assert delimiter == "<" or name in VENDOR_HEADERS, f"{name} is nowhere"
                continue
            other = room_of(target)
            assert other in MAY_INCLUDE[room], f"an arrow from {room} to {other}: {name}"
            assert target.suffix == ".h", f"{path.name} includes a source file, {name}"

    def test_only_the_python_room_knows_python(self, path):
        text = path.read_text()
        names = {name for _, name in includes(text)}
        if room_of(path) != "python":
            assert not {n for n in names if "python" in n.lower()}
            assert not re.search(r"\bPy(Object|_\w+|Err_\w+)\b", blank_comments_and_strings(text))

    def test_includes_no_source_file(self, path):
        assert not [name for _, name in includes(path.read_text()) if not name.endswith(".h")]

    def test_first_lines_say_what_it_owns(self, path):
        text = path.read_text()
        opening = re.match(r"/\*\s*(.*?)\*/", text, re.DOTALL)
        assert opening, "the file does not begin with a comment"
        assert len(opening.group(1).split()) >= 4

    def test_is_short_enough(self, path):
        text = path.read_text()
        assert text.count("\n") <= MAX_FILE_LINES
        long = [f for f in function_bodies(text) if f[2] > MAX_FUNCTION_LINES]
        assert not long, "functions (name, line, length) that are too long"

    def test_keeps_no_python_object_in_static_storage(self, path):
        assert not static_python_objects(path.read_text())


@pytest.mark.parametrize(
    "path", [p for p in c_files() if p.suffix == ".h"], ids=lambda p: f"{room_of(p)}/{p.name}"
)
def test_header_is_guarded(path):
    text = blank_comments_and_strings(path.read_text())
    directives = re.findall(r"^#.*$", text, re.MULTILINE)
    guard = re.match(r"#ifndef (\w+)", directives[0])
    assert guard
    assert directives[1] == f"#define {guard.group(1)}"
    assert directives[-1].startswith("#endif")


def test_header_guards_are_unique():
    guards = {}
    for path in c_files():
        if path.suffix == ".h":
            guard = re.search(r"^#ifndef (\w+)", path.read_text(), re.MULTILINE).group(1)
            assert guard not in guards, f"{path} and {guards[guard]} share {guard}"
            guards[guard] = path


def test_function_reader_finds_functions_in_every_source():
    """A guard for the length rule: a reader that finds nothing would let everything pass."""
    for path in c_files():
        if path.suffix == ".c" and re.search(r"^\{", path.read_text(), re.MULTILINE):
            assert function_bodies(path.read_text()), f"no function found in {path.name}"


def test_every_deallocator_ends_with_the_function_that_drops_the_type():
    """A missing drop of the heap type leaks one reference an object."""
    seen = 0
    for path in sorted(ROOMS["python"].glob("*.c")):
        lines = path.read_text().splitlines()
        for name, first, length in function_bodies(path.read_text()):
            if name.endswith("_dealloc"):
                seen += 1
                end = lines[first + length - 3 : first - 1 + length]
                assert "mm_free_object(" in "\n".join(end), f"{path.name}: {name}"
    assert seen >= 5, "deallocators not found"
    assert "Py_DECREF(type)" in (ROOMS["python"] / "state.h").read_text()


def test_pre_commit_formats_as_ci_does():
    pins = re.findall(r"[\w-]+==[\w.*]+", (ROOT / ".pre-commit-config.yaml").read_text())
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert pins
    assert set(pins) <= set(lint["optional-dependencies"]["lint"])


# The emulated driver's layers.


# Words that ask for a meaning where a name should give it.
QUESTION_WORDS = {"what", "how", "way", "which", "about"}
MAX_EMULATOR_FUNCTION_LINES = 42


def emulator_files():
    return {p.name: p.read_text() for p in sorted(ROOMS["emulator"].glob("*.c"))}


def global_names(text):
    """The functions and variables that a source file defines for other files."""
    lines = text.splitlines()
    code = without_directives(blank_comments_and_strings(text))
    functions = {
        name
        for name, first, _ in function_bodies(text)
        if name != "EMU_ENTRY" and not re.search(r"\bstatic\b", lines[first - 1])
    }
    variables = re.findall(r"^(?!static|extern)\w[\w *]* \**(emu_\w+)(?: = .*)?;$", code, re.M)
    entries = re.findall(r"^EMU_ENTRY\((\w+)", code, re.M)
    return functions | set(variables) | {f"emu_{name}" for name in entries}


def calls_between(files):
    """Which source file uses a function or a variable of which other file: {user: {owner}}."""
    tags = re.compile(r"\b(?:struct|union|enum) \w+")  # a function can have the name of a type
    code = {
        name: tags.sub("", without_directives(blank_comments_and_strings(text)))
        for name, text in files.items()
    }
    owners = {name: owner for owner, text in files.items() for name in global_names(text)}
    calls = {}
    for user, text in code.items():
        used = {owners[word] for word in re.findall(r"\w+", text) if word in owners}
        if "EMU_ENTRIES(" in text:  # the list that names all entry points
            used |= {owner for owner, other in files.items() if "\nEMU_ENTRY(" in other}
        calls[user] = used - {user}
    return calls


def find_circle(calls):
    """Files that call each other in a circle, the first one twice; an empty list if none do."""
    finished = set()

    def walk(path):
        for owner in sorted(calls.get(path[-1], ())):
            if owner in path:
                return [*path[path.index(owner) :], owner]
            if owner not in finished:
                circle = walk([*path, owner])
                if circle:
                    return circle
        finished.add(path[-1])
        return []

    return next(filter(None, (walk([name]) for name in sorted(calls))), [])


def told_layers(header):
    """The layers in the first comment of emulator.h, upper ones first, as sets of file names."""
    opening = header[: header.index("*/")]
    files = re.findall(r"^ \*   ((?:\w+\.c ?)+)", opening, re.MULTILINE)
    return [set(line.split()) for line in files]


def against_layers(calls, layers):
    """Calls that do not go down, as (user, owner)."""
    height = {name: -depth for depth, layer in enumerate(layers) for name in layer}
    return {(u, o) for u, owners in calls.items() for o in owners if height[u] <= height[o]}


def test_circle_finder_finds_a_seeded_circle():
    files = {
        "a.c": "int\na(void)\n{\n    return b();\n}\n",
        "b.c": "static int\na2(void)\n{\n    return emu_c;\n}\nint\nb(void)\n{\n}\n",
        "c.c": "int emu_c = 1;\n",
    }
    assert not global_names("MM_COLD static int\nd(void)\n{\n}\n")
    assert calls_between(files) == {"a.c": {"b.c"}, "b.c": {"c.c"}, "c.c": set()}
    assert not find_circle(calls_between(files))
    files["c.c"] += "int\nd(void)\n{\n    return a();\n}\n"
    assert find_circle(calls_between(files)) == ["a.c", "b.c", "c.c", "a.c"]
    assert against_layers(calls_between(files), [{"a.c"}, {"b.c"}, {"c.c"}]) == {("c.c", "a.c")}


def test_emulator_has_no_circle():
    files = emulator_files()
    calls = calls_between(files)
    assert not find_circle(calls)
    assert "runs.c" in calls["page_advice.c"], "calls not found"
    assert "entry_pool.c" in calls["procaddress.c"], "entry points not found"
    # The same with a call back up, in the real sources.
    files["runs.c"] += "\nvoid\nseeded(void)\n{\n    (void)emu_policy_check(0, NULL, 0);\n}\n"
    assert {"page_advice.c", "runs.c"} < set(find_circle(calls_between(files)))


def test_emulator_calls_go_down_the_layers_that_its_header_tells():
    files = emulator_files()
    layers = told_layers((ROOMS["emulator"] / "emulator.h").read_text())
    assert sorted(name for layer in layers for name in layer) == sorted(files)
    assert not against_layers(calls_between(files), layers)


def test_emulator_functions_have_names_of_their_own():
    """A stack trace shows names without files."""
    seen = {}
    for file, text in emulator_files().items():
        for name, _, length in function_bodies(text):
            assert length <= MAX_EMULATOR_FUNCTION_LINES, f"{file}: {name} has {length} lines"
            if name != "EMU_ENTRY":
                assert name not in seen, f"{name} is in {file} and in {seen[name]}"
                seen[name] = file


def test_emulator_uses_no_question_word_as_a_name():
    for path in sorted(ROOMS["emulator"].glob("*.[ch]")):
        words = set(re.findall(r"\w+", blank_comments_and_strings(path.read_text())))
        assert not words & QUESTION_WORDS, path.name


# The python room's lower files: argument reading, other libraries' objects, locations, streams.


def argument_files():
    names = "args.c foreign_*.c location_*.c stream_object.c"
    found = {p.name: p for name in names.split() for p in ROOMS["python"].glob(name)}
    return {name: path.read_text() for name, path in sorted(found.items())}


def test_files_that_read_arguments_have_no_circle():
    files = argument_files()
    calls = calls_between(files)
    assert not find_circle(calls)
    assert "foreign_location.c" in calls["location_device.c"], "calls not found"
    # The same with a call back up, in the real sources.
    files["location_object.c"] += (
        "\nvoid\nseeded(void)\n{\n    (void)mm_read_location(NULL, NULL, NULL);\n}\n"
    )
    assert {"location_object.c", "foreign_location.c"} == set(find_circle(calls_between(files)))


def measured_without_topic(text, topics):
    """Comments that report a measurement without an existing topic of tests/conformance/."""
    bad = []
    for comment in re.findall(r"/\*.*?\*/", text, re.DOTALL):
        flat = re.sub(r"\s+(?:\* )?", " ", comment)
        named = set(re.findall(r'"([^"]+)"', flat)) if "topic" in flat else set()
        if ("Measured" in flat and not named) or not named <= topics:
            bad.append(flat)
    return bad


def test_emulator_names_the_conformance_topic_of_what_was_measured():
    assert measured_without_topic("/* Measured: two. */", {"one"})
    assert measured_without_topic('/* Measured (topic "two"):\n * two. */', {"one"})
    assert not measured_without_topic(
        '/* Measured (topic\n * "one"): two. */ /* Other. */', {"one"}
    )
    table = (ROOT / "tests" / "conformance" / "conformance.c").read_text()
    topics = set(re.findall(r'^    {"([^"]+)", topic_', table, re.MULTILINE))
    assert len(topics) > 30
    for path in sorted(ROOMS["emulator"].glob("*.[ch]")):
        assert not measured_without_topic(path.read_text(), topics), path.name


# The extension's calls.


def room_files(*rooms):
    return {p.name: p.read_text() for room in rooms for p in sorted(ROOMS[room].glob("*.c"))}


def test_extension_has_no_circle():
    files = room_files(*EXTENSION)
    calls = calls_between(files)
    assert not find_circle(calls)
    assert {"policy.c", "prefetch.c"} <= set().union(*calls.values()), "calls not found"
    # The same with a call back up, in the real sources.
    files["range.c"] += "\nvoid\nseeded(void)\n{\n    (void)mm_batch_run();\n}\n"
    assert {"dispatch.c", "range.c"} < set(find_circle(calls_between(files)))


def driver_call_depth(files, start, functions):
    """The calls from a function down to the first driver call of one of those functions."""
    bodies = {}
    for text in files.values():
        lines = text.splitlines()
        for name, first, length in function_bodies(text):
            body = "\n".join(lines[first - 1 : first - 1 + length])
            bodies[name] = bodies.get(name, "") + blank_comments_and_strings(body)
    level, seen, depth = {start}, set(), 1
    while level:
        if any(re.search(rf"->{f}\b", bodies[name]) for name in level for f in functions):
            return depth
        seen |= level
        called = {w for name in level for w in re.findall(r"\b(\w+)\(", bodies[name])}
        level = {name for name in called if name in bodies} - seen
        depth += 1
    return None


def test_driver_call_depth_counts_calls():
    files = {
        "a.c": "int\na(void)\n{\n    return b();\n}\nint\nd(void)\n{\n}\n",
        "b.c": "int\nb(void)\n{\n    /* cu->Free() */\n    return c();\n}\n"
        "static int\nc(void)\n{\n    return cu->Free(0);\n}\n",
    }
    assert driver_call_depth(files, "a", ["Free"]) == 3
    assert driver_call_depth(files, "c", ["Free"]) == 1
    assert driver_call_depth(files, "d", ["Free"]) is None


@pytest.mark.parametrize(
    ("start", "functions"),
    [
        ("module_prefetch", ["MemPrefetchAsync"]),
        ("module_prefetch", ["MemPrefetchBatchAsync"]),
        ("module_discard", ["MemDiscardBatchAsync"]),
        ("module_discard_prefetch", ["MemDiscardAndPrefetchBatchAsync"]),
        ("plan_execute", ["MemPrefetchAsync"]),
        ("mm_buffer_prefetch", ["MemPrefetchAsync"]),
        ("mm_buffer_discard", ["MemDiscardBatchAsync"]),
    ],
)
def test_operation_reaches_the_driver_in_five_calls(start, functions):
    depth = driver_call_depth(room_files("memory", "python"), start, functions)
    assert depth is not None
    assert depth <= 5


def test_extension_functions_have_names_of_their_own():
    seen = {}
    for file, text in room_files(*EXTENSION).items():
        for name, _, _ in function_bodies(text):
            assert name not in seen, f"{name} is in {file} and in {seen[name]}"
            seen[name] = file


def test_extension_uses_no_question_word_as_a_name():
    for room in EXTENSION:
        for path in sorted(ROOMS[room].glob("*.[ch]")):
            words = set(re.findall(r"\w+", blank_comments_and_strings(path.read_text())))
            assert not words & QUESTION_WORDS, path.name


def test_picture_of_the_rooms_names_every_source():
    """buffer* stands for all files whose names begin so."""
    picture = (ROOT / "docs" / "develop" / "rooms.svg").read_text()
    listed = re.findall(r'class="file"[^>]*>([^<]+)<', picture)
    patterns = {name for text in listed for name in text.split(", ")}
    sources = {path.stem for path in (ROOT / "src" / "_managedmem").glob("*/*.[ch]")}
    unlisted = {n for n in sources if not any(fnmatch.fnmatchcase(n, p) for p in patterns)}
    assert unlisted == {"dlpack_abi"}
    assert all(any(fnmatch.fnmatchcase(n, p) for n in sources) for p in patterns)


def test_architecture_page_names_every_source():
    page = (ROOT / "docs" / "develop" / "architecture.rst").read_text()
    sources = [path.name for path in (ROOT / "src" / "_managedmem").glob("*/*.c")]
    assert [name for name in sources if f"``{name}``" not in page] == []


def lines_to_functions():
    """For each method, the lines from the end of its docstring to the name of its function."""
    texts = {path: path.read_text() for path in sorted(ROOMS["python"].glob("*.c"))}
    row = (
        r'(?:MM_\w+\(|\{)\s*"\w+",\s*(?:\(PyCFunction\))?(\w+),\s*(?:METH_[\w| ]+,\s*)?(\w+_doc)\b'
    )
    for function, docstring in {m.groups() for t in texts.values() for m in re.finditer(row, t)}:
        for text in texts.values():
            found = re.search(rf"\b{docstring}(?:,|\[\] =).*?\"\)?;\n", text, re.DOTALL)
            named = re.search(rf"^{function}\(", text, re.MULTILINE)
            if found and named:
                yield text.count("\n", found.end(), named.start())


def test_docstrings_stand_above_their_functions():
    distances = list(lines_to_functions())
    assert len(distances) > 100
    assert statistics.median(distances) <= 5


def test_source_files_have_names_of_their_own():
    names = [path.name for path in SRC.rglob("*.[ch]")]
    assert [name for name in set(names) if names.count(name) > 1] == []


def test_no_format_has_a_length_argument():
    """A "#" needs PY_SSIZE_T_CLEAN, which does nothing for Python 3.11 in newer headers."""
    for path in (ROOT / "src/_managedmem/python").glob("*.c"):
        formats = re.findall(r'(?:BuildValue|ParseTuple\w*)\([^"]*"([^"]*)"', path.read_text())
        assert not [text for text in formats if "#" in text], path.name


# The imports of the Python package.

PACKAGE = ROOT / "python" / "managedmem"
# The extension, and the one name that the package's own file has by itself.
NO_PYTHON_FILE = {"managedmem._managedmem", "managedmem.__version__"}
# Types only: WorkingGroup.set is one of the sets whose add() makes the group.
SET_OF_A_GROUP = ("managedmem._working_group", "managedmem._working_set")


def package_files():
    """The text of each Python file of the package, by the name of its module."""
    files = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        files[".".join(parts).removesuffix(".__init__")] = path.read_text()
    return files


def imports_between(files):
    """The modules that each one imports, also in functions and for types only."""
    imports = {}
    for user, text in files.items():
        owners = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                owners |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    known = name in files or name in NO_PYTHON_FILE
                    owners.add(name if known else node.module)
        imports[user] = owners & (files.keys() - {user})
    return imports


def test_import_finder_finds_every_import():
    files = {
        "p": "if TYPE_CHECKING:\n    from p.a import A\n",
        "p.a": "from p import x, b, c as d\n",
        "p.b": "def f():\n    import p.c\n",
        "p.c": "import os\nfrom p.c import x\n",
    }
    found = imports_between(files)
    assert found == {"p": {"p.a"}, "p.a": {"p", "p.b", "p.c"}, "p.b": {"p.c"}, "p.c": set()}
    assert find_circle(found) == ["p", "p.a", "p"]


def test_package_has_no_circle():
    files = package_files()
    imports = imports_between(files)
    group, owner = SET_OF_A_GROUP
    assert set(find_circle(imports)) == {group, owner}
    imports[group].remove(owner)
    assert not find_circle(imports)
    # The same with imports back up, in the real sources.
    files["managedmem._units"] += "\ndef seeded():\n    from managedmem import Device\n"
    assert {"managedmem", "managedmem._units"} < set(find_circle(imports_between(files)))
