"""tools/build_wheels.py without a build. .ci/run manylinux builds wheels with it and uses them."""

import hashlib
import os
import sys
import zipfile

import pytest

import build_wheels
import managedmem
from paths import ROOT

WHEEL = "managedmem-1.2.3-cp311-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"
METADATA = """Metadata-Version: 2.4
Name: managedmem
Version: 1.2.3
License-Expression: Apache-2.0
Requires-Dist: pytest>=9; extra == "test"
"""


@pytest.fixture
def wheel(tmp_path):
    def make(metadata=METADATA, library=b""):
        path = tmp_path / WHEEL
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("managedmem/_managedmem.abi3.so", library)
            archive.writestr("managedmem-1.2.3.dist-info/METADATA", metadata)
        return path

    return make


@pytest.fixture
def only_path(tmp_path, monkeypatch):
    """A folder that is all of PATH, and a function that puts a Python of a version there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def put(name, report):
        (folder / name).write_text(f"#!/bin/sh\n{report}\n")
        (folder / name).chmod(0o755)

    return put


def test_the_bill_of_materials_names_the_file_and_its_bytes(wheel, monkeypatch):
    monkeypatch.setattr(build_wheels, "version", lambda name: f"version of {name}")
    path = wheel()
    bill = build_wheels.bill_of_materials(path)
    component = bill["metadata"]["component"]
    assert (component["name"], component["version"]) == ("managedmem", "1.2.3")
    assert component["licenses"] == [{"expression": "Apache-2.0"}]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert component["hashes"] == [{"alg": "SHA-256", "content": digest}]
    assert component["purl"].endswith(WHEEL)
    assert bill["components"] == []
    (zig, *_) = bill["metadata"]["tools"]["components"]
    assert zig == {"type": "application", "name": "ziglang", "version": "version of ziglang"}


def test_a_dependency_that_the_bill_would_lack(wheel):
    path = wheel(METADATA + "Requires-Dist: numpy>=2\n")
    with pytest.raises(SystemExit, match=r"lacks what the package needs: numpy>=2"):
        build_wheels.bill_of_materials(path)


def test_a_library_for_another_machine(wheel):
    header = b"\x7fELF".ljust(18, b"\0") + bytes([183, 0])  # aarch64
    with pytest.raises(SystemExit, match="ELF machine 183, not x86_64"):
        build_wheels.check(wheel(library=header))


def test_free_threaded_pythons_are_those_that_say_so(only_path):
    only_path("python3.13t", 'echo "3.13t 1 /there/python3.13t"')
    only_path("python3.14t", 'echo "3.14t 0 /there/python3.14t"')  # without headers
    only_path("python3.15t", "exit 127")  # as pyenv's, for a version that is not installed
    only_path("python3.12", 'echo "3.12 1 /there/python3.12"')
    assert list(build_wheels.free_threaded_pythons()) == ["python3.13t"]


def test_free_threaded_wheels_are_built_where_they_run(only_path, monkeypatch, capsys):
    only_path("python3.13t", 'echo "3.13t 1 /there/python3.13t"')
    monkeypatch.setattr(build_wheels.platform, "machine", lambda: "x86_64")
    both = list(build_wheels.chosen_builds(["aarch64", "x86_64"]))
    assert both == [
        (sys.executable, "aarch64"),
        (sys.executable, "x86_64"),
        ("python3.13t", "x86_64"),
    ]
    assert list(build_wheels.chosen_builds(["aarch64"])) == [(sys.executable, "aarch64")]
    monkeypatch.setenv("PATH", os.devnull)
    list(build_wheels.chosen_builds(["x86_64"]))
    assert capsys.readouterr().out == "no free-threaded Python on PATH, so no wheel for one\n"


def test_every_file_has_the_version():
    places = {
        "pyproject.toml": f'\nversion = "{managedmem.__version__}"\n',
        "CITATION.cff": f"\nversion: {managedmem.__version__}\n",
        "conda/recipe/recipe.yaml": f'\n  version: "{managedmem.__version__}"\n',
    }
    assert [name for name, line in places.items() if line not in (ROOT / name).read_text()] == []


def test_the_recipe_for_conda_has_a_c_library():
    """rattler-build knows a compiler for each machine, but a C library only from the variants."""
    folder = ROOT / "conda" / "recipe"
    assert 'stdlib("c")' in (folder / "recipe.yaml").read_text()
    variants = (folder / "variants.yaml").read_text()
    assert 'c_stdlib:\n  - sysroot\nc_stdlib_version:\n  - "2.17"\n' in variants
