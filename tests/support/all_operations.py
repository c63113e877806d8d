"""All tables of public operations, for the tests that go through each of them.

Each operation works on a `World`. `uncovered()` compares the tables with the stub and the types, so
that no new operation is forgotten.
"""

import ast
import types
from pathlib import Path

import managedmem
from error_operations import ERRORS
from frames_operations import FRAMES
from lifetime_operations import LIVES
from operations import NO_DRIVER, OPERATIONS
from protocol_operations import PROTOCOLS
from working_operations import WORKING
from world import in_pools


def everything():
    """Every operation of all tables, by name."""
    reads = {f"read {name}": in_pools(act, name) for name, act in NO_DRIVER.items()}
    tables = [OPERATIONS, reads, ERRORS, LIVES, PROTOCOLS, WORKING, FRAMES]
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names)), "two operations have one name"
    return {name: operation for table in tables for name, operation in table.items()}


# --- completeness -------------------------------------------------------------------------------

EXTENSION = managedmem._managedmem
# CPython generates the members of these from their fields.
INHERITED = {"MemoryInfo", "PageRun", "PlanEntry"}
NO_CALL = {"__doc__", "__module__", "__weakref__", "__new__", "__match_args__", "__dict__"}


def stub_names():
    """The classes and functions of the stub, and `class.member`."""
    stub = ast.parse(Path(EXTENSION.__file__).with_name("_managedmem.pyi").read_text())
    for node in stub.body:
        hints = {ast.unparse(d) for d in getattr(node, "decorator_list", ())}
        if "type_check_only" in hints:
            continue
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield node.name
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    yield f"{node.name}.{member.name}"


def type_names():
    """The same names, of the types themselves: they have more special methods than the stub."""
    for name, thing in vars(EXTENSION).items():
        if isinstance(thing, type):
            yield name
            for member, value in vars(thing).items():
                if value is not None:
                    yield f"{name}.{member}"
        elif isinstance(thing, types.BuiltinFunctionType) and not name.startswith("__"):
            yield name


def uncovered():
    """Names of the surface that no operation covers."""
    surface = {
        name
        for name in {*stub_names(), *type_names()}
        if name.partition(".")[0] not in INHERITED
        and name.rpartition(".")[2] not in NO_CALL
        and not (name.endswith("__hash__") and "SetProxy" in name)
    }
    return surface - {name for o in everything().values() for name in o.covers.split()}
