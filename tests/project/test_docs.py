"""Runs the Python blocks of the pages in docs/, each page by itself, as support/documents.py says.

A block that is not run must be marked and must name its requirements; such blocks are counted.
"""

import ast
import difflib
import inspect
import re
import runpy
from pathlib import Path

import pytest

import documents
import managedmem
from constants import EMULATED, IMMORTALIZES
from managedmem import _tune_report, emulator
from package_names import public_names_of
from programs import run_python

PAGES = [page for page in documents.PAGES if page.parent != documents.ROOT]
WITH_PYTHON = [page for page in PAGES if documents.python_blocks(page)]
REFERENCE = sorted((documents.DOCS / "reference").glob("*.rst"))
# What these show needs a GPU and other libraries on it.
NOT_RUN = {
    "README.md": 2,
    "allocators.rst": 4,
    "index.rst": 1,
    "many_gpus.rst": 3,
    "offload.rst": 4,
    "recipes.rst": 2,
    "torch.rst": 1,
    "working_sets.rst": 2,
}
ENTRIES = ("function", "class", "exception", "data")
OPTIONS = [
    "exclude-members",
    "inherited-members",
    "members",
    "no-value",
    "show-inheritance",
    "special-members",
]
FORMS = {
    "directive": (".rst", ".. code-block:: python\n\n   {}\n"),
    "directive with options": (".rst", ".. code-block:: python\n   :emphasize-lines: 1\n\n   {}\n"),
    "directive in a list": (".rst", "- item\n\n  .. code-block:: python\n\n     {}\n"),
    "directive without a language": (".rst", ".. code::\n\n    {}\n"),
    "literal": (".rst", "Like this::\n\n    {}\n"),
    "literal alone": (".rst", "Text.\n\n::\n\n  {}\n\nText.\n"),
    "literal in a note": (
        ".rst",
        ".. note:: Like this::\n\n      {}\n\n   Like this::\n\n      {}\n",
    ),
    "prompt": (".rst", "Text\n\n>>> {}\n\nText.\n"),
    "prompt in a directive": (".rst", ".. code-block:: python\n\n   >>> {}\n"),
    "fence": (".md", "```python\n{}\n```\n"),
    "fence in a list": (".md", "- item\n\n  ~~~ python\n  {}\n  ~~~\n"),
    "prompt in a fence": (".md", "```python\n>>> {}\n```\n"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_block_is_run_in_every_form(tmp_path, form):
    suffix, text = FORMS[form]
    page = tmp_path / f"page{suffix}"
    page.write_text(text.replace("{}", "seen = 1"))
    documents.run(page)
    page.write_text(text.replace("{}", "raise ZeroDivisionError"))
    with pytest.raises(ZeroDivisionError):
        documents.run(page)


def test_results_behind_prompts_are_compared(tmp_path):
    page = tmp_path / "page.rst"
    page.write_text(">>> n = 2\n>>> n + 1\n3\n")
    documents.run(page)
    page.write_text(">>> 1 + 1\n3\n")
    with pytest.raises(documents.doctest.DocTestFailure):
        documents.run(page)


def test_output_that_a_page_shows_is_compared():
    assert {
        page.name: len(documents.printed(page)) for page in PAGES if documents.printed(page)
    } == {"plans.rst": 1, "seeing.rst": 1, "start.rst": 1}


@pytest.mark.skipif(not EMULATED, reason="pages show what the emulated driver prints")
def test_other_output_than_a_page_shows_is_an_error(tmp_path):
    page = tmp_path / "page.rst"
    text = "::\n\n    print('it took 3 ms')\n\nprints\n\n.. code-block:: text\n\n   it took 2 ms\n"
    page.write_text(text)
    documents.run(page)
    page.write_text(text.replace("   it", "   It"))
    with pytest.raises(AssertionError, match="line 2: it prints\nit took 3 ms"):
        documents.run(page)


@pytest.mark.parametrize("page", documents.PAGES, ids=lambda page: page.name)
def test_every_block_is_seen_and_marked(page):
    """A line that looks like the start of a block, but is in no block, would never be run."""
    found = documents.blocks(page)
    lines = page.read_text(encoding="utf-8").split("\n")
    for block in found:
        for number in range(block.line, block.line + block.code.count("\n")):
            lines[number] = ""
    outside = "\n".join(lines)
    assert {block.language for block in found} <= documents.LANGUAGES
    assert {block.mark for block in found} <= documents.MARKS
    assert not any(block.mark for block in found if block.has_prompts), "prompts cannot be marked"
    assert "doctest: +SKIP" not in "".join(block.code for block in found)
    assert ">>>" not in outside
    if page.suffix == ".md":
        assert outside.count("```") + outside.count("~~~") == 2 * len(found)
        assert not re.search(r"^\n {4,}\S|^\n\t", outside, re.MULTILINE), "indented code"
        return
    begun = re.findall(r"^ *\.\. (?:code|code-block|sourcecode)::", outside, re.MULTILINE)
    begun += re.findall(r"^(?! *\.\. (?!note)).*::$", outside, re.MULTILINE)
    assert len(begun) == len([block for block in found if not block.has_prompts])
    assert not re.search(r"^ *\.\. (highlight|testcode|doctest|ipython|parsed-lit)", outside, re.M)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.suffix == ".rst"], ids=lambda page: page.name
)
def test_docutils_sees_the_same_blocks(page):
    core = pytest.importorskip("docutils.core", reason="needs docutils")
    from docutils import nodes
    from docutils.parsers.rst import Directive, directives

    class Entry(Directive):
        """An entry of the reference: what stands in it, as Sphinx shows it below the docstring."""

        required_arguments = 1
        has_content = True
        option_spec = dict.fromkeys(OPTIONS, directives.unchanged)

        def run(self):
            shown = nodes.container()
            self.state.nested_parse(self.content, self.content_offset, shown)
            return [shown]

    for kind in ENTRIES:
        directives.register_directive(f"auto{kind}", Entry)
    tree = core.publish_doctree(
        page.read_text(encoding="utf-8"),
        settings_overrides={"report_level": 5, "halt_level": 6, "syntax_highlight": "none"},
    )
    shown = [
        node.astext().strip()
        for kind in (nodes.literal_block, nodes.doctest_block)
        for node in tree.findall(kind)
        if not isinstance(node.parent, nodes.system_message)  # of a directive that Sphinx adds
    ]
    assert sorted(shown) == sorted(block.code.strip() for block in documents.blocks(page))


def entries_of_the_reference():
    """Each name that the reference describes, in full, with the text of its entry."""
    module = ""
    text = "".join(page.read_text(encoding="utf-8") for page in REFERENCE)
    heads = rf"^\.\. (currentmodule|auto(?:{'|'.join(ENTRIES)})):: (.*)$"
    parts = re.split(heads, text, flags=re.MULTILINE)
    for directive, name, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        if directive == "currentmodule":
            module = f"{name}."
        else:
            yield name if name.startswith("managedmem.") else module + name, body


def names_without_example(names):
    """Those that have no entry in the reference, or an entry without code."""
    entries = dict(entries_of_the_reference())
    bodies = {
        name: re.split(r"^\S", entries.get(name, ""), flags=re.MULTILINE)[0] for name in names
    }
    return [name for name, body in bodies.items() if not documents.blocks_of(body, ".rst")]


def test_every_public_name_has_an_example_in_the_reference():
    public = {f"managedmem.{name}" for name in managedmem.__all__ if name != "emulator"}
    aliases = {"ArrayLike", "Location", "StreamLike", "Target"}  # Sphinx does not know these
    public |= {f"managedmem.typing.{name}" for name in {*managedmem.typing.__all__} - aliases}
    for module in ("torch", "megatron"):
        public |= {f"managedmem.{module}.{name}" for name in public_names_of(module)}
    public.remove("managedmem.megatron.UnifiedMemoryUnsupportedError")  # of managedmem.torch
    assert len(public) > 70
    assert names_without_example(sorted(public)) == []
    assert names_without_example(["managedmem.unknown"]) == ["managedmem.unknown"]


def test_every_name_of_the_emulator_is_in_its_example():
    page = documents.DOCS / "reference" / "emulator.rst"
    code = "".join(block.code for block in documents.python_blocks(page, "process"))
    assert [name for name in emulator.__all__ if f"emulator.{name}" not in code] == []


def docstrings():
    """Each public name without torch, members of classes included, with its docstring."""
    for module in (managedmem, managedmem.typing, emulator):
        for name in module.__all__:
            thing = getattr(module, name)
            members = vars(thing).items() if isinstance(thing, type) else ()
            yield f"{module.__name__}.{name}", inspect.getdoc(thing) or ""
            for member, value in members:
                if not member.startswith("_") and isinstance(value.__doc__, str):
                    yield f"{module.__name__}.{name}.{member}", inspect.cleandoc(value.__doc__)


@pytest.fixture(scope="module")
def as_markup():
    """The lines that the site makes of a docstring."""
    hook = runpy.run_path(str(documents.DOCS / "conf.py"))["as_markup"]

    def lines_of(text):
        lines = text.split("\n")
        hook(None, "function", "name", None, None, lines)
        return lines

    return lines_of


def test_a_docstring_becomes_fields(as_markup):
    lines = as_markup(
        "Do it.\n\nParameters\n----------\na, b : Device or int\n    What\n    to do.\n\n"
        "Returns a Device. More, for empty() and\nManagedBuffer (else KeyError). Raises TypeError\n"
        "and ValueError for bad arguments, CUDAError when prefetch() fails; then nothing is done.\n"
        "Safe from every thread.\nDriver: cuMemFree."
    )
    device = ":py:obj:`Device <managedmem.Device>`"
    assert lines == [
        "Do it.",
        "",
        "More, for :py:obj:`empty() <empty>` and"
        " :py:obj:`ManagedBuffer <managedmem.ManagedBuffer>` (else KeyError).",
        "",
        ":param a: What to do.",
        f":type a: {device} or int",
        ":param b: What to do.",
        f":type b: {device} or int",
        f":Returns: a {device}",
        ":raises TypeError: for bad arguments",
        ":raises ValueError: for bad arguments",
        ":raises CUDAError: when :py:obj:`prefetch() <prefetch>` fails; then nothing is done",
        ":Threads: Safe from every thread.",
        ":Driver: cuMemFree",
        ":raises KeyError: as said above",
        "",
    ]


def test_every_error_and_result_that_a_docstring_names_is_in_a_field(as_markup):
    checked = 0
    for name, text in docstrings():
        fields = "\n".join(line for line in as_markup(text) if line.startswith(":"))
        prose = "\n".join(line for line in as_markup(text) if not line.startswith(":"))
        for sentence in re.findall(r"(?:^|\. )(Raises|Returns) ", " ".join(text.split())):
            assert re.search(f"^:{sentence}[ :]", fields, re.MULTILINE | re.IGNORECASE), name
            checked += 1
        for error in re.findall(r"(?:Raises|\(else) ([A-Z]\w+)", " ".join(text.split())):
            assert f":raises {error}:" in fields, name
        assert not re.search(r"(^|\. )(Raises|Returns|Driver:) ", prose), name
        assert "----" not in prose, name
    assert checked > 100


@pytest.mark.skipif(IMMORTALIZES, reason="immortal functions keep the memory that a page has made")
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
def test_a_page_runs_from_top_to_bottom(page):
    info = managedmem._managedmem._driver_info()
    if info["version"] < 13000 or not managedmem.Device(0).concurrent_managed_access:
        pytest.skip("the pages show what needs CUDA 13.0 and concurrent access")
    try:
        documents.run(page)
    except managedmem.typing.TuneUnstableError:
        if info["emulated"]:
            raise
        pytest.skip("the times of a step vary too much to be tuned beside other jobs")


def test_blocks_that_are_not_run_are_counted_compile_and_say_why():
    found = {page: documents.python_blocks(page, "notest") for page in documents.PAGES}
    assert {page.name: len(blocks) for page, blocks in found.items() if blocks} == NOT_RUN
    for page, blocks in found.items():
        for block in blocks:
            documents.compiled(page, block)
            assert block.code.startswith("# Needs "), f"{page}, line {block.line}"


@pytest.mark.parametrize(
    ("page", "block"),
    [
        pytest.param(page, block, id=f"{page.stem}-{block.line}")
        for page in PAGES
        for block in documents.python_blocks(page, "process")
    ],
)
def test_a_block_that_chooses_its_driver_runs_by_itself(page, block):
    documents.run_alone(block)


@pytest.mark.parametrize("module", ["managedmem", "managedmem.emulator", "managedmem.torch"])
def test_examples_in_docstrings_of_modules_run(module):
    if module == "managedmem.torch":
        pytest.importorskip("torch")
    run_python(
        f"""
        import doctest, importlib, sys
        import managedmem
        managedmem.emulator.enable()
        module = importlib.import_module("{module}")
        example = doctest.DocTestParser().get_doctest(
            module.__doc__, {{}}, "{module}", None, 0
        )
        assert example.examples
        sys.exit(doctest.DocTestRunner().run(example).failed)
        """,
        driver=None,
    )


def test_the_inventories_list_the_names_that_pages_use():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    used = set(re.findall(r":(?:class|func|mod):`(?:[^`<]+<)?([\w.]+)>?`", text))
    for file in sorted((documents.ROOT / "docs" / "inventories").glob("*.txt")):
        head, *entries = file.read_text(encoding="utf-8").splitlines()
        listed = {entry.split()[0] for entry in entries if not entry.startswith("#")}
        assert head == "# Sphinx inventory version 1"
        assert listed and listed <= used, f"{file.name}: {listed - used}"


@pytest.mark.parametrize("module", ["cupy", "numba"])
def test_examples_that_need_a_gpu_compile(module):
    path = Path(managedmem.__file__).with_name(f"{module}.py")
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    examples = documents.doctest.DocTestParser().get_examples(docstring)
    assert len(examples) >= 3
    compile("".join(each.source for each in examples), str(path), "exec")


def test_help_shows_no_words_of_doctest():
    """The examples run as they are: their marks would be shown to users."""
    folder = Path(managedmem.__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in folder.rglob("*.py")]
    texts += [value.__doc__ or "" for value in vars(managedmem._managedmem).values()]
    assert len(texts) > 60
    assert not [text for text in texts if "doctest:" in text]


def test_the_page_of_stability_has_the_numbers_of_the_package():
    page = " ".join((documents.DOCS / "stability.rst").read_text(encoding="utf-8").split())
    project = (documents.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (python,) = re.findall(r'requires-python = ">=(\S+)"', project)
    assert f'``"version"``, now {_tune_report.VERSION}.' in page
    assert f"CPython {python} and newer" in page
    assert f"limited API of CPython {python}" in page


def test_every_record_of_measurements_is_a_file_to_download():
    page = (documents.DOCS / "develop" / "gpu.rst").read_text(encoding="utf-8")
    records = [f for f in (documents.DOCS / "results").iterdir() if f.suffix in (".json", ".md")]
    assert len(records) > 10
    assert not [record for record in records if f"<../results/{record.name}>`" not in page]


def test_the_pages_for_users_can_be_read():
    """Nobody reads a page that says everything. Markup without letters does not count."""
    pages = [*documents.DOCS.glob("*.rst"), documents.DOCS / "performance.md"]
    text = " ".join(page.read_text(encoding="utf-8") for page in pages)
    assert 10_000 < len(re.findall(r"\S*\w\S*", text)) <= 25_000


def words_of(text):
    return re.findall(r"[A-Za-z_]{2,}", text)


def source_messages():
    """The words of each string literal of the library, adjacent ones joined."""
    for folder in ("src/_managedmem", "python/managedmem"):
        for path in sorted((documents.ROOT / folder).rglob("*")):
            if path.suffix in (".c", ".h", ".py"):
                joined = re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
                for literal in re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined):
                    words = words_of(literal)
                    if 1 < len(words) < 60:  # docstrings are longer
                        yield words


def is_said(part, messages):
    """True if a message has nearly all words of the part, in order; the others are formats."""
    wanted = words_of(part)
    matchers = (difflib.SequenceMatcher(None, wanted, words, False) for words in messages)
    shared = (sum(b.size for b in matcher.get_matching_blocks()) for matcher in matchers)
    return max(shared) >= 0.7 * len(wanted)


def test_the_page_of_errors_quotes_messages_of_the_library():
    text = (documents.ROOT / "docs" / "errors.rst").read_text(encoding="utf-8")
    quoted = re.findall(r"^``.+``.*$", text, re.MULTILINE)
    parts = [p for line in quoted for q in re.findall("``(.+?)``", line) for p in q.split("...")]
    # "cuMemFree failed with CUDA_ERROR_...": most of these words are formats.
    parts = [p for p in parts if len(words_of(p)) >= 3 and " failed with " not in p]
    messages = list(source_messages())
    assert len(parts) > 30
    assert not [part for part in parts if not is_said(part, messages)]
    assert not is_said("the pool was closed earlier", messages)
