"""The modules for other libraries: attributes of the package, imported at their first use."""

import pytest

import managedmem
from programs import run_python

LIBRARIES = {
    "cupy": ("cupy", "pip install cupy-cuda13x"),
    "megatron": ("torch", "https://pytorch.org"),
    "numba": ("numba", "pip install numba-cuda"),
    "torch": ("torch", "https://pytorch.org"),
}


@pytest.mark.parametrize("name", ["emulator", "typing", "torch", "megatron"])
def test_are_imported_at_their_first_use(name):
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name][0], reason="needs the library")
    done = run_python(
        f"""
        import sys
        import managedmem
        before = "managedmem.{name}" in sys.modules
        print(before, managedmem.{name} is sys.modules["managedmem.{name}"])
        """
    )
    assert done.stdout == "False True\n"


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("use", ["managedmem.{0}", "from managedmem import {0}"])
def test_say_what_to_install(name, use):
    library, advice = LIBRARIES[name]
    error = "ImportError" if use.startswith("from") else "AttributeError"
    done = run_python(
        f"""
        import sys
        sys.modules[{library!r}] = None
        import managedmem
        try:
            {use.format(name)}
        except {error} as error:
            print(error)
        print(hasattr(managedmem, {name!r}))
        """
    )
    assert "not installed" in done.stdout
    assert advice in done.stdout
    assert done.stdout.endswith("\nFalse\n")


@pytest.mark.parametrize("name", ["cupy", "numba"])
def test_a_broken_library_keeps_its_own_error(name, tmp_path):
    (tmp_path / f"{name}.py").write_text("import a_library_inside")
    done = run_python(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import managedmem.{name}
        """,
        check=False,
    )
    assert "No module named 'a_library_inside'" in done.stderr
    assert "not installed" not in done.stderr


def test_other_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="has no attribute 'tensorflow'"):
        _ = managedmem.tensorflow
