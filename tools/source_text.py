"""Reads C and Python sources as text: their includes, functions, calls, signatures and imports."""

import ast
import re

COMMENT = r"/\*.*?\*/|//[^\n]*"
LITERAL = r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"


def blanked(pattern, text, flags=re.DOTALL):
    """The same text, line for line, with spaces in place of the matches."""
    return re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=flags)


def code_of(text):
    """C without comments and literals."""
    return blanked(f"{COMMENT}|{LITERAL}", text)


def without_directives(code):
    """C without preprocessor lines and the lines that continue them."""
    return blanked(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", code, re.MULTILINE)


def includes(text):
    """Every include as (delimiter, name), in order."""
    bare = blanked(r"/\*.*?\*/", text)
    return re.findall(r"^[ \t]*#[ \t]*include[ \t]*([<\"])([^>\"]+)[>\"]", bare, re.MULTILINE)


def functions(text):
    """Every function definition as (name, first line, number of lines)."""
    code = without_directives(code_of(text))
    found, head = [], ""
    depth = start = 0  # start: of the declaration before the next brace of the file
    for match in re.finditer(r"[{};]", code):
        mark = match.group()
        if mark == "{":
            head = code[start : match.start()] if depth == 0 else head
            depth += 1
        elif mark == "}":
            depth -= 1
            if depth == 0:
                name = re.search(r"(\w+)\s*\([^{}]*\)\s*$", head)
                if name and "=" not in head:
                    first = code.count("\n", 0, start + len(head) - len(head.lstrip())) + 1
                    lines = code.count("\n", 0, match.end()) + 2 - first
                    found.append((name.group(1), first, lines))
                start = match.end()
        elif depth == 0:
            start = match.end()
    return found


def static_python_objects(text):
    """Declarations that keep a Python object in static storage, of a file or a function."""
    code = without_directives(code_of(text))
    declared = r"\bPy\w*Object\b[\s*]*\*[\s*]*(?:const\s+)?\w+\s*(?:\[[^\]]*\]\s*)*[=;,]"
    bad = re.findall(r"\b(?:static|extern|_Thread_local)\b[^;{}()]*" + declared, code)
    depth, top = 0, []
    for character in code:
        depth += character == "{"
        top.append(character if depth == 0 else " ")
        depth -= character == "}"
    statements = (part + ";" for part in "".join(top).split(";") if "(" not in part)
    return bad + [one.strip() for one in statements if re.search(declared, one)]


def global_names(text):
    """The functions and variables that a C file defines for others."""
    lines = text.splitlines()
    code = without_directives(code_of(text))
    variables = re.findall(r"^(?!static|extern)\w[\w *]* \**(emu_\w+)(?: = .*)?;$", code, re.M)
    entries = re.findall(r"^EMU_ENTRY\((\w+)", code, re.M)
    return {
        *(name for name, first, _ in functions(text) if "static" not in lines[first - 1].split()),
        *variables,
        *(f"emu_{name}" for name in entries),
    } - {"EMU_ENTRY"}


def calls_between(files):
    """The C files whose functions and variables each one uses: {user: {owner}}."""
    tags = re.compile(r"\b(?:struct|union|enum) \w+")  # a function can have the name of a type
    owners = {name: owner for owner, text in files.items() for name in global_names(text)}
    calls = {}
    for user, text in files.items():
        code = tags.sub("", without_directives(code_of(text)))
        used = {owners[word] for word in re.findall(r"\w+", code) if word in owners}
        if "EMU_ENTRIES(" in code:  # the list that names all entry points
            used |= {owner for owner, other in files.items() if "\nEMU_ENTRY(" in other}
        calls[user] = used - {user}
    return calls


def imports_between(files):
    """The modules that each Python module imports, also in functions and for types only."""
    imports = {}
    for user, text in files.items():
        owners = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                owners |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {f"{node.module}.{alias.name}": node.module for alias in node.names}
                owners |= {name if name in files else module for name, module in names.items()}
        imports[user] = owners & (files.keys() - {user})
    return imports


def find_circle(calls):
    """Files that call each other in a circle, with the first one again at the end; an empty list if
    none do."""
    finished = set()

    def walk(path):
        for owner in sorted(calls.get(path[-1], ())):
            if owner in path:
                return [*path[path.index(owner) :], owner]
            if owner not in finished and (circle := walk([*path, owner])):
                return circle
        finished.add(path[-1])
        return []

    return next(filter(None, (walk([name]) for name in sorted(calls))), [])


def depth_of_driver_call(files, start, entry):
    """The number of functions on the way from one to the first that calls this entry of the driver,
    or None."""
    bodies = {}
    for text in files.values():
        lines = code_of(text).splitlines()
        for name, first, length in functions(text):
            bodies[name] = "\n".join(lines[first - 1 : first - 1 + length])
    level, seen, depth = {start}, set(), 1
    while level:
        if any(re.search(rf"->{entry}\b", bodies[name]) for name in level):
            return depth
        seen |= level
        called = {word for name in level for word in re.findall(r"\b(\w+)\(", bodies[name])}
        level = {name for name in called if name in bodies} - seen
        depth += 1
    return None


# --- docstrings of C --------------------------------------------------------------------------


def docstrings(text):
    """{name: (its C literals, its last line)} of the docstrings."""
    literal = r'"(?:\\.|[^"\\\n])*"'
    head = r"PyDoc_STRVAR\(\s*(\w+),|(?:static )?const char (\w+_doc)\[\] ="
    pattern = rf"^(?:{head})((?:\s*{literal})+)\)?;"
    return {
        m.group(1) or m.group(2): (m.group(3), text.count("\n", 0, m.end()) + 1)
        for m in re.finditer(pattern, text, re.MULTILINE)
    }


def documented_functions(files):
    """{docstring: function}, as method tables and the slots of constructors name them."""
    rows = r'"\w+",\s+(\w+),(?:\s+[\w |]+,)?\s+(\w+_doc)[)}]'
    slots = r"\{Py_tp_doc, \(void \*\)(\w+_doc)\},[^;]*?\{Py_tp_new, (\w+)\}"
    owners = {}
    for text in files.values():
        owners |= {doc: function for function, doc in re.findall(rows, text)}
        owners |= dict(re.findall(slots, text))
    return owners


def docstring_distances(files):
    """{docstring: lines from its end to the head of its function}."""
    owners, distances = documented_functions(files), {}
    for text in files.values():
        firsts = {name: first for name, first, _ in functions(text)}
        for doc, (_, last) in docstrings(text).items():
            if doc in owners:
                distances[doc] = firsts.get(owners[doc], len(text)) - last
    return distances


def parameters(literals):
    """The parameters in the first line of a docstring."""
    text = "".join(re.findall(r'"((?:\\.|[^"\\\n])*)"', literals)).replace("\\n", "\n")
    head = text.partition(")\n--")[0].replace("$", "")
    given = ast.parse(f"def {head}): pass").body[0].args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [name for name in names if name != "self"]


def enumerators(text):
    """{enumerator: its value}; of several with one name, the last one."""
    values = {}
    for body in re.findall(r"\benum \{([^}]*)\}", text):
        last = -1
        for name, value in re.findall(r"(\w+)(?: = (\w+))?,?", code_of(body)):
            last = values.get(value, -2) if value else last + 1
            values[name] = last
    return values


def has_places(names, size, values):
    """True if argv[size] has a place for each parameter, and the enumerators are in order."""
    if size.isdigit():
        return int(size) == len(names)
    places = [{word.lower() for word in values if values[word] == i} for i in range(len(names))]
    return values.get(size) == len(names) and all(
        any(word.endswith(name) or word in name for word in words)
        for name, words in zip(names, places, strict=True)
    )


def places_of_arguments(files, headers):
    """{docstring: True if the function that reads it has a place for each argument}."""
    docs = {}
    for text in files.values():
        docs |= docstrings(text)
    reader = re.compile(r"mm_signature signature = \{\.doc = (\w+)\};[^}]*?\*argv\[(\w+)\]")
    return {
        m.group(1): has_places(
            parameters(docs[m.group(1)][0]),
            m.group(2),
            enumerators(headers + text[: m.start()]),
        )
        for text in files.values()
        for m in reader.finditer(text)
    }
