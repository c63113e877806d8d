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
exclude_patterns = ["_build", "examples/README.md"]  # whose links lead out of these pages
nb_execution_mode = "off"  # notebooks are committed with their outputs
nitpicky = True
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


def as_markup(app, kind, name, obj, options, lines):
    """Turn a docstring into markup: section titles become rubrics.

    Parameters are a definition list already. An underscore at the end of a word must not be a link.
    """
    lines[:] = [re.sub(r"(?<=\w)_(?!\w)", r"\\_", line) for line in lines]
    for i in reversed(range(1, len(lines))):
        if re.fullmatch("-{4,}", lines[i]):
            lines[i - 1 : i + 1] = [f".. rubric:: {lines[i - 1]}", ""]


def skip_numbers(app, kind, name, obj, skip, options):
    """Skip the fields of named tuples, whose docstrings only have a number."""
    return skip or (getattr(obj, "__doc__", None) or "").startswith("Alias for field number")


def setup(app):
    """Connect the functions above to autodoc."""
    app.connect("autodoc-process-docstring", as_markup)
    app.connect("autodoc-skip-member", skip_numbers)
