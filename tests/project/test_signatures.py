"""Every public name has a docstring and a signature, and the stub says the same.

Owns the agreement of three descriptions: the C docstrings, python/managedmem/_managedmem.pyi, and
`managedmem.__all__`. Nothing here knows the names; they are read from the module and the stub.
"""

import ast
import importlib
import inspect
import types
import typing
from pathlib import Path

import pytest

import managedmem
from managedmem import _managedmem

STUB = ast.parse((Path(_managedmem.__file__).parent / "_managedmem.pyi").read_text())
KINDS = inspect.Parameter
EMPTY = inspect.Parameter.empty
# What the stub may leave open: `...` stands for a default that has no literal.
ANY_DEFAULT = object()


def public(names):
    return sorted(n for n in names if not n.startswith("_"))


# The public objects of the package; the aliases for annotations are typing.Any at run time.
NAMES = {
    name: value
    for module in (managedmem, managedmem.typing)
    for name in public(module.__all__)
    if (value := getattr(module, name)) is not typing.Any
}


def stub_body(body):
    """The definitions of a stub's body; of a version test, only the branch that holds now."""
    for node in body:
        if isinstance(node, ast.If):
            code = compile(ast.Expression(node.test), "stub", "eval")
            import sys

            yield from stub_body(node.body if eval(code, {"sys": sys}) else node.orelse)
        else:
            yield node


def stub_members(body):
    """Name -> list of nodes (several for overloads and property setters)."""
    members = {}
    for node in stub_body(body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            members.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.AnnAssign):
            members.setdefault(node.target.id, []).append(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                members.setdefault(target.id, []).append(node)
    return members


STUB_MEMBERS = stub_members(STUB.body)


def stub_class(node):
    """The members of a class in the stub, those of its generic base in the stub included."""
    inherited = {}
    for base in node.bases:
        if isinstance(base, ast.Subscript) and base.value.id in STUB_MEMBERS:
            inherited |= stub_class(STUB_MEMBERS[base.value.id][0])
    return inherited | stub_members(node.body)


STUB_CLASSES = {
    name: stub_class(nodes[0])
    for name, nodes in STUB_MEMBERS.items()
    if isinstance(nodes[0], ast.ClassDef)
}
CLASSES = {
    name: value
    for name, value in vars(_managedmem).items()
    if isinstance(value, type) and not name.startswith("_")
}
FUNCTIONS = {
    name: value
    for name, value in vars(_managedmem).items()
    if isinstance(value, types.BuiltinFunctionType) and not name.startswith("__")
}


def decorators(node):
    return {ast.unparse(d) for d in node.decorator_list}


def stub_default(node):
    if node is None:
        return EMPTY
    if isinstance(node, ast.Constant) and node.value is Ellipsis:
        return ANY_DEFAULT
    return ast.literal_eval(node)


def stub_parameters(node, bound):
    """The parameters of a stub function as (name, kind, default), without self or cls."""
    a = node.args
    positional = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(positional) - len(a.defaults)) + a.defaults
    result = []
    for i, (arg, default) in enumerate(zip(positional, defaults, strict=True)):
        kind = KINDS.POSITIONAL_ONLY if i < len(a.posonlyargs) else KINDS.POSITIONAL_OR_KEYWORD
        result.append((arg.arg, kind, stub_default(default)))
    if bound:
        result = result[1:]
    if a.vararg:
        result.append((a.vararg.arg, KINDS.VAR_POSITIONAL, EMPTY))
    for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        result.append((arg.arg, KINDS.KEYWORD_ONLY, stub_default(default)))
    if a.kwarg:
        result.append((a.kwarg.arg, KINDS.VAR_KEYWORD, EMPTY))
    return result


def real_parameters(function, bound):
    parameters = [
        (p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()
    ]
    return parameters[1:] if bound else parameters


def agree(real, stub):
    """Whether names, kinds and defaults are the same, one by one."""
    if len(real) != len(stub):
        return False
    return all(
        r[:2] == s[:2] and (r[2] == s[2] or (s[2] is ANY_DEFAULT and r[2] is not EMPTY))
        for r, s in zip(real, stub, strict=True)
    )


def methods():
    """Every method that the C types define by name, as (class, name, raw attribute)."""
    for class_name, cls in CLASSES.items():
        if issubclass(cls, BaseException | tuple):
            continue  # their methods are those of the built-in base
        for name, raw in vars(cls).items():
            if isinstance(
                raw, types.MethodDescriptorType | types.ClassMethodDescriptorType | staticmethod
            ):
                yield pytest.param(cls, name, raw, id=f"{class_name}.{name}")


def properties():
    for class_name, cls in CLASSES.items():
        for name, raw in vars(cls).items():
            slot = isinstance(raw, types.GetSetDescriptorType | types.MemberDescriptorType)
            if slot and not name.startswith("_"):
                yield pytest.param(cls, name, raw, id=f"{class_name}.{name}")


def has_sentence(doc):
    return bool(doc) and len(doc.strip().split()) >= 3


# The comparison can fail.


def test_comparison_sees_names_kinds_and_defaults():
    def parameters(text):
        return stub_parameters(ast.parse(f"def f({text}): ...").body[0], bound=False)

    def real(a, *, stream=None):
        raise AssertionError

    mine = real_parameters(real, bound=False)
    assert agree(mine, parameters("a, *, stream=None"))
    assert agree(mine, parameters("a, *, stream=..."))
    for other in (
        "b, *, stream=None",
        "a, stream=None",
        "a, *, stream=0",
        "a, *, stream",
        "a",
        "a, /, *, stream=None",
    ):
        assert not agree(mine, parameters(other))


# The package.


def test_all_is_complete():
    exported = set(managedmem.__all__)
    assert len(exported) == len(managedmem.__all__)
    assert not exported - set(dir(managedmem)), "in __all__ but nowhere"
    defined = {
        name
        for name, value in vars(managedmem).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert not defined - exported, "public but not in __all__"
    # `from managedmem import *` must not pull in a private name.
    assert {n for n in exported if n.startswith("_")} <= {"__version__"}


@pytest.mark.parametrize("module", ["managedmem", "managedmem.torch"])
def test_completion_shows_public_names_only(module):
    if module == "managedmem.torch":
        pytest.importorskip("torch")
    shown = public(dir(importlib.import_module(module)))
    imported = {"cupy", "digits", "emulator", "megatron", "numba", "pytest", "torch", "typing"}
    assert set(shown) - imported == set(importlib.import_module(module).__all__) - imported


def test_everything_public_in_the_extension_is_public_in_the_package():
    # managedmem/_trace.py wraps the Recorder.
    assert set(public(vars(_managedmem))) - NAMES.keys() == {"Recorder"}


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_documented(name):
    value = NAMES[name]
    if callable(value):
        assert has_sentence(inspect.getdoc(value))
        assert value.__doc__, "the docstring is only inherited"


@pytest.mark.parametrize("name", [n for n in NAMES if "Working" in n])
def test_members_of_working_sets_are_documented(name):
    """They are written in Python, and the stub says nothing about them."""
    value = NAMES[name]
    members = public(n for cls in value.__mro__ if cls.__module__ != "builtins" for n in vars(cls))
    assert members and not [n for n in members if not inspect.getdoc(getattr(value, n))]


@pytest.mark.parametrize("name", NAMES)
def test_public_things_say_where_they_live(name):
    value = NAMES[name]
    if isinstance(value, type) or inspect.isroutine(value):
        assert value.__name__ == name
        assert value.__module__.split(".")[0] == "managedmem"


def test_the_emulator_module_is_documented():
    from managedmem import emulator

    functions = [
        value
        for name, value in vars(emulator).items()
        if inspect.isfunction(value)
        and not name.startswith("_")
        and value.__module__ == emulator.__name__
    ]
    assert functions
    assert not [f.__name__ for f in functions if not has_sentence(f.__doc__)]


# Functions and methods.


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_signature_docstring_and_stub(name):
    function = FUNCTIONS[name]
    inspect.signature(function)
    assert has_sentence(function.__doc__)
    if not name.startswith("_"):
        stubs = STUB_MEMBERS[name]
        real = real_parameters(function, bound=False)
        assert any(agree(real, stub_parameters(node, bound=False)) for node in stubs), ast.unparse(
            stubs[0]
        )


@pytest.mark.parametrize("cls, name, raw", list(methods()))
def test_methods_have_signature_docstring_and_stub(cls, name, raw):
    static = isinstance(raw, staticmethod)
    method = getattr(cls, name)
    assert method.__doc__
    assert name.startswith("__") or has_sentence(method.__doc__)
    bound_already = static or isinstance(raw, types.ClassMethodDescriptorType)
    real = real_parameters(method, bound=not bound_already)
    nodes = STUB_CLASSES[cls.__name__].get(name)
    assert nodes, f"{cls.__name__}.{name} is not in the stub"
    assert ("staticmethod" in decorators(nodes[0])) == static
    assert ("classmethod" in decorators(nodes[0])) == (bound_already and not static)
    assert any(agree(real, stub_parameters(node, bound=not static)) for node in nodes), (
        f"{cls.__name__}.{name}{inspect.signature(method)} but the stub has {ast.unparse(nodes[0])}"
    )


@pytest.mark.parametrize(
    "name", [n for n in CLASSES if {"__init__", "__new__"} & set(STUB_CLASSES.get(n, ()))]
)
def test_constructors_agree_with_the_stub(name):
    cls = CLASSES[name]
    if issubclass(cls, BaseException):
        pytest.skip("exceptions take what BaseException takes")
    members = STUB_CLASSES[name]
    nodes = members.get("__new__") or members["__init__"]
    real = real_parameters(cls, bound=False)
    assert any(agree(real, stub_parameters(node, bound=True)) for node in nodes), (
        f"{name}{inspect.signature(cls)} but the stub has {ast.unparse(nodes[0])}"
    )


@pytest.mark.parametrize("cls, name, raw", list(properties()))
def test_properties_are_documented_and_in_the_stub(cls, name, raw):
    assert raw.__doc__
    nodes = STUB_CLASSES[cls.__name__].get(name)
    assert nodes, f"{cls.__name__}.{name} is not in the stub"
    if isinstance(nodes[0], ast.FunctionDef):
        assert decorators(nodes[0]) & {"property", "cached_property"}
        assert len(nodes) in (1, 2)
        settable = len(nodes) == 2
        if settable:
            assert decorators(nodes[1]) == {f"{name}.setter"}


# Completeness, both ways.


def test_the_stub_has_every_public_name_and_no_other():
    assert public(STUB_MEMBERS) == public(vars(_managedmem))


@pytest.mark.parametrize("name", [n for n in CLASSES if n in STUB_CLASSES])
def test_the_stub_of_a_class_names_nothing_that_is_not_there(name):
    cls = CLASSES[name]
    assert not [member for member in STUB_CLASSES[name] if not hasattr(cls, member)]


def test_property_setters_are_in_the_stub_exactly_where_they_work():
    """Assigning to a read-only property is an AttributeError, to a writable one it is not."""
    buffer = managedmem.ManagedMemoryResource().allocate(4096)
    try:
        for name, nodes in STUB_CLASSES["ManagedBuffer"].items():
            if isinstance(nodes[0], ast.FunctionDef) and "property" in decorators(nodes[0]):
                if len(nodes) == 2:
                    setattr(buffer, name, getattr(buffer, name))
                else:
                    with pytest.raises(AttributeError):
                        setattr(buffer, name, None)
    finally:
        buffer.close()
