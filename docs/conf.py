"""Builds the documentation from these pages and the docstrings of the installed package.

python -m pip install ".[docs]"
python -m sphinx -W -b html docs docs/_build
"""

import re
from pathlib import Path

import managedmem

project = "managedmem"
author = "The managedmem developers"
copyright = author
version = release = managedmem.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.intersphinx", "myst_nb", "sphinx_copybutton"]
autodoc_mock_imports = ["cupy", "numba", "torch"]  # described without being installed
exclude_patterns = [
    "_build",
    "examples/README.md",  # whose links lead out of these pages
    "results",  # files to download: their tables would fill the search
]
nb_execution_mode = "off"  # notebooks are committed with their outputs
nitpicky = True
nitpick_ignore_regex = [("py:obj", ".*")]  # the links that as_markup() makes
html_theme = "furo"
html_title = "managedmem"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_search_scorer = str(Path(__file__).with_name("search_scorer.js"))

# Only the names that the pages use, in files of this repository: a build needs no network.
intersphinx_mapping = {
    name: (address, f"inventories/{name}.txt")
    for name, address in {
        "python": "https://docs.python.org/3",
        "numpy": "https://numpy.org/doc/stable",
        "torch": "https://docs.pytorch.org/docs/stable",
        "cupy": "https://docs.cupy.dev/en/stable",
    }.items()
}
copybutton_prompt_text = r">>> |\.\.\. "  # stays behind, like the results
copybutton_prompt_is_regexp = True
copybutton_selector = "div.highlight pre:not(.cell_output pre)"

autodoc_member_order = "alphabetical"
autodoc_typehints = "none"  # the stub has the types; signatures come from the docstrings


def described_classes():
    """The full names of the classes that the reference describes, by their last words."""
    classes, module = {}, ""
    for page in sorted(Path(__file__).with_name("reference").glob("*.rst")):
        heads = r"^\.\. (currentmodule|auto(?:class|exception)):: (\S+)"
        for directive, name in re.findall(heads, page.read_text(encoding="utf-8"), re.MULTILINE):
            if directive == "currentmodule":
                module = name
            else:
                full = name if name.startswith("managedmem.") else f"{module}.{name}"
                classes[name.split(".")[-1]] = full
    return classes


CLASSES = described_classes()
# Those whose names are also words, such as Device, are classes only inside a sentence.
WORDS = "|".join(name for name in CLASSES if not re.search("[a-zA-Z][A-Z]", name))
NAMED = "|".join(name for name in CLASSES if re.search("[a-zA-Z][A-Z]", name))
MENTION = re.compile(
    r"``.+?``|`(?P<quoted>[^`]+)`|(?<![\w.=*/\"-])(?P<name>"
    r"(?:\w+\.)*[A-Za-z_]\w*\(\)|managedmem(?:\.\w+)+"
    rf"|(?:{NAMED}|(?<=[\w,(:] )(?:{WORDS}))(?:\.\w+)*)(?![\w(\[=*/\"])"
)
ERROR = r"[A-Z]\w*(?:Error|Warning)\b"
SECTIONS = {"Parameters": ("param", "type"), "Attributes": ("ivar", "vartype")}


def linked(text):
    """The text with the names in it as links, or as code where nothing describes them."""

    def link(found):
        name = found["name"] or found["quoted"] or ""
        if not re.fullmatch(r"[\w.]+(\(\))?", name):
            return found[0] if not name else f"``{name}``"
        first, dot, rest = name.removesuffix("()").partition(".")
        return f":py:obj:`{name} <{CLASSES.get(first, first)}{dot}{rest}>`"

    return re.sub(r"(?<=\w)_(?!\w)", r"\\_", MENTION.sub(link, text))


def items_as_fields(section, lines):
    """The fields of a definition list, whose terms are "names : type" or "names"."""
    field, type_field = SECTIONS[section]
    for item in re.split(r"\n(?=\S)", "\n".join(lines).strip()):
        term, _, text = item.partition("\n")
        names, _, kind = term.partition(" : ")
        for name in names.split(", "):
            yield f":{field} {name}: {linked(' '.join(text.split()))}"
            if kind:  # Sphinx would take plain text for one link
                shown = linked(f": {kind}").removeprefix(": ")
                yield f":{type_field} {name}: {shown if ':py:' in shown else f'*{kind}*'}"


def sentence_as_fields(sentence):
    """The fields of a sentence that says what is returned or raised, or by what; or none."""
    first, _, rest = sentence.rstrip(".").partition(" ")
    if first == "Raises" and re.match(ERROR, rest):
        clauses = re.split(rf"(?:[,;] (?:and |or )?| and | or )(?={ERROR})", rest)
        reasons = [re.sub(rf"^{ERROR}[,:]? ?", "", clause) for clause in clauses]
        for i, clause in enumerate(clauses):  # in "A and B for ...", the reason of A is that of B
            reason = next(filter(None, reasons[i:]), "")
            yield f":raises {re.match(ERROR, clause)[0]}: {linked(reason)}"
    elif first in ("Raises", "Returns", "Driver:"):
        yield f":{first.rstrip(':')}: {linked(rest)}"
    elif sentence.startswith("Safe from "):
        yield f":Threads: {linked(sentence)}"


def as_markup(app, kind, name, obj, options, lines):
    """Turn a docstring into markup, in place: fields, and names that are links.

    Sections and the sentences that begin with "Returns", "Raises", "Safe from" and "Driver:" become
    fields behind the rest. "(else ValueError)" inside a sentence becomes one too.
    """
    if kind == "module":
        return
    fields, prose = [], []
    text = "\n".join(lines).strip()
    for paragraph in re.split(r"\n\s*\n(?=\S)", text):
        title, *body = paragraph.split("\n")
        if title in SECTIONS and re.fullmatch("-{4,}", body[0]):
            fields += items_as_fields(title, body[1:])
        elif re.search(r"^(?: |[-*] |>>> |\.\. )", paragraph, re.MULTILINE):
            prose += [*paragraph.split("\n"), ""]
        else:
            kept = []
            for sentence in re.split(r"(?<=\.)\s+(?=[A-Z`])", paragraph):
                found = list(sentence_as_fields(" ".join(sentence.split())))
                fields += found
                kept += [] if found else [sentence]
            prose += [*linked(" ".join(" ".join(kept).split())).split("\n"), ""]
    otherwise = dict.fromkeys(re.findall(rf"\(else\s+({ERROR})\)", text))
    fields += [f":raises {error}: as said above" for error in otherwise]
    lines[:] = [*prose, *fields, ""]


def skip_numbers(app, kind, name, obj, skip, options):
    """Skip the fields of named tuples, whose docstrings only have a number."""
    return skip or (getattr(obj, "__doc__", None) or "").startswith("Alias for field number")


def setup(app):
    """Connect the functions above to autodoc."""
    app.connect("autodoc-process-docstring", as_markup)
    app.connect("autodoc-skip-member", skip_numbers)
