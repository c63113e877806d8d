"""Public names of the package, including those of modules whose library this machine may lack."""

import ast
import importlib.util
import pkgutil
from pathlib import Path

import managedmem
import managedmem.typing

FOLDER = Path(managedmem.__file__).parent
NEEDED = {"cupy": "cupy", "megatron": "torch", "numba": "numba", "torch": "torch"}


def source_of(module):
    """The file of a module of the package, such as torch."""
    file = FOLDER / f"{module}.py"
    return file if file.is_file() else FOLDER / module / "__init__.py"


def public_names_of(module):
    """What a module of the package lists as public, read without importing it."""
    for node in ast.parse(source_of(module).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            yield from ast.literal_eval(node.value)


def full_name(name):
    """A name with its module, if it begins with the package or a public name; or else None."""
    first = name.partition(".")[0]
    if first == "managedmem":
        return name
    modules = dict.fromkeys(public_names_of("torch"), "torch.")
    modules |= dict.fromkeys(managedmem.typing.__all__, "typing.")
    modules |= dict.fromkeys(managedmem.__all__, "")
    return f"managedmem.{modules[first]}{name}" if first in modules else None


def exists(full):
    """Whether the package has a name. Without the library of a module, only its list is known."""
    module, _, rest = full.removeprefix("managedmem.").partition(".")
    if module in NEEDED and not rest:
        return source_of(module).is_file()
    if module in NEEDED and not importlib.util.find_spec(NEEDED[module]):
        return rest.partition(".")[0] in public_names_of(module)
    try:
        pkgutil.resolve_name(full)
    except AttributeError:
        return False
    return True
