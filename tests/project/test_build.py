"""A build from source: its errors when a compiler or headers are missing, and what it makes."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import managedmem
from paths import ROOT

PACKAGE = Path(managedmem.__file__).parent
NO_HEADERS = """
import sysconfig
paths = sysconfig.get_paths
sysconfig.get_paths = lambda *a, **k: paths(*a, **k) | {"include": "/no", "platinclude": "/no"}
from setuptools._distutils import sysconfig as own
own.get_python_inc = lambda *a, **k: "/no/headers"
"""
NO_CUDA = """
import pathlib
read = pathlib.Path.read_text
pathlib.Path.read_text = lambda p, *a, **k: "" if p.name == "cuda.h" else read(p, *a, **k)
"""
TINY = """
#include <cuda.h>
#include <string.h>
const char *file(void) { return __FILE__; }
CUresult checked(char *out, const char *text)
{
    char copy[64];
    memcpy(copy, text, strlen(text) + 1);
    memcpy(out, copy, sizeof copy);
    return CUDA_SUCCESS;
}
"""
IMPORTED = """
import sys, managedmem
print(*sorted(name for name in sys.modules if name.split(".")[0] == "managedmem"))
"""
RUN = """
import runpy, sys
sys.argv = ["setup.py", "-q", "build_ext", "--build-lib", {folder!r}, "--build-temp", {folder!r}]
sys.path[0] = "."
{before}
runpy.run_path("setup.py", run_name="__main__")
"""


def build(folder, before="", **environment):
    """The output of a build in the folder; the build must fail."""
    pytest.importorskip("setuptools", reason="needs setuptools")
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(folder=str(folder), before=before)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def compiler():
    found = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if found is None:
        pytest.skip("needs a C compiler")
    return found


def test_without_a_compiler_the_error_lists_packages(tmp_path):
    text = build(tmp_path, CC="/nonexistent/gcc")
    assert "the C compiler '/nonexistent/gcc' was not found" in text
    assert "apt install gcc libc6-dev python3-dev" in text
    assert "set the environment variable CC" in text


def test_a_compiler_that_does_not_compile(tmp_path):
    """Like `ccache gcc` without gcc: only the first word exists."""
    text = build(tmp_path, CC="env /nonexistent/gcc")
    assert "'env' cannot compile a file that includes Python.h" in text
    assert "apt install gcc libc6-dev python3-dev" in text


def test_without_headers_of_python(tmp_path):
    text = build(tmp_path, NO_HEADERS, CC=compiler())
    assert "Python.h" in text
    assert "cannot compile a file that includes Python.h" in text
    assert "dnf install gcc python3-devel" in text


def test_without_headers_of_cuda(tmp_path):
    """With a compiler, the missing headers of CUDA are named."""
    assert "no cuda.h of CUDA 13.0 or newer found" in build(tmp_path, NO_CUDA, CC=compiler())


@pytest.mark.parametrize("library", sorted(PACKAGE.glob("*.so")), ids=lambda path: path.stem)
def test_no_folder_of_the_building_machine_is_searched(library):
    """A search path that is left in would decide where libcuda.so.1 comes from."""
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("needs readelf")
    dynamic = subprocess.run([readelf, "-d", library], capture_output=True, text=True, check=True)
    assert "NEEDED" in dynamic.stdout
    assert "RPATH" not in dynamic.stdout
    assert "RUNPATH" not in dynamic.stdout


def build_tiny(folder, **environment):
    """A wheel of setup.py's settings with little to compile, built in that folder."""
    for module in ("src/_managedmem/python/module.c", "src/emulator/emulator.c"):
        (folder / module).parent.mkdir(parents=True)
        (folder / module).write_text(TINY)
    (folder / "python" / "managedmem").mkdir(parents=True)
    for name in ("setup.py", "README.md"):
        shutil.copy(ROOT / name, folder)
    unset = ("CFLAGS", "SOURCE_DATE_EPOCH", "MANAGEDMEM_SANITIZE", "MANAGEDMEM_DEBUG")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel"],
        cwd=folder,
        env={**kept, "CC": compiler(), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "no cuda.h of CUDA" in done.stderr:
        pytest.skip("needs the headers of CUDA")
    assert done.returncode == 0, done.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


@pytest.fixture
def folders(tmp_path):
    pytest.importorskip("setuptools", reason="needs setuptools")
    return [tmp_path / "one", tmp_path / "another" / "folder"]


def test_two_builds_are_equal(folders):
    first, second = (build_tiny(folder).read_bytes() for folder in folders)
    assert first == second


def test_debug_information_makes_them_differ(folders):
    """It has the path of the folder, so it is left out unless it is asked for."""
    first, second = (build_tiny(folder, CFLAGS="-g").read_bytes() for folder in folders)
    assert first != second


def test_what_has_not_changed_is_not_compiled_again(folders):
    """Of two sources, one includes a header that changes, and then the options of both do."""
    folder = folders[0]
    build_tiny(folder)
    module = folder / "src" / "_managedmem" / "python" / "module.c"
    module.with_name("other.c").write_text("int other(void) { return 1; }\n")
    module.with_name("tiny.h").write_text("/* empty */\n")
    module.write_text('#include "tiny.h"\n' + TINY)

    def compiled(**environment):
        logged = {"CC": f"{folder}/logs", **environment}
        (folder / "log").write_text("")
        build = [sys.executable, "setup.py", "-q", "build_ext"]
        subprocess.run(build, cwd=folder, env={**os.environ, **logged}, check=True, timeout=120)
        calls = (folder / "log").read_text().splitlines()
        return {name for name in ("module", "other") if any(f"/{name}.c" in c for c in calls)}

    logs = folder / "logs"
    logs.write_text(f'#!/bin/sh\necho "$*" >>{folder}/log\nexec {compiler()} "$@"\n')
    logs.chmod(0o755)
    assert compiled() == {"module", "other"}
    assert compiled() == set()
    module.with_name("tiny.h").write_text("/* still */\n")
    assert compiled() == {"module"}
    module.with_name("other.c").touch()
    assert compiled(CFLAGS="-DOTHER") == {"module", "other"}


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_its_libraries_have_no_fault(folders):
    folder = folders[0]
    with zipfile.ZipFile(build_tiny(folder)) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".so")]
        wheel.extractall(folder / "unpacked")
    assert len(names) == 2
    libraries = [folder / "unpacked" / name for name in names]
    tool = ROOT / "tools" / "check_library.py"
    done = subprocess.run(
        [sys.executable, tool, "--without", folder, *libraries], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["zig", "cc"])
def test_zig_is_not_given_the_option_that_it_refuses(folders, name):
    """A stand-in refuses -z text as zig does; under another name it is given the option."""
    stand_in = folders[0].parent / name
    refuse = 'case "$*" in *-z,text*) echo "unsupported linker extension flag" >&2; exit 1; esac'
    stand_in.write_text(f'#!/bin/sh\n{refuse}\nexec {compiler()} "$@"\n')
    stand_in.chmod(0o755)
    environment = {"CC": f"env {stand_in}", "LDSHARED": f"{stand_in} -shared"}
    if name == "zig":
        assert build_tiny(folders[0], **environment).exists()
    else:
        with pytest.raises(AssertionError, match="unsupported linker"):
            build_tiny(folders[0], **environment)


def metadata_of(folder, **environment):
    """What setup.py and pyproject.toml write about the project in a folder with a copy of both."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("GITHUB_")}
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info"],
        cwd=folder,
        env={**kept, **environment},
        check=True,
        capture_output=True,
        timeout=120,
    )
    return (folder / "python" / "managedmem.egg-info" / "PKG-INFO").read_text()


def test_addresses_are_those_of_the_repository_that_publishes(tmp_path):
    pytest.importorskip("setuptools", reason="needs setuptools")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for package in ("managedmem/_cli", "managedmem/torch"):
        (tmp_path / "python" / package).mkdir(parents=True)
    assert "Project-URL" not in metadata_of(tmp_path)
    home = "https://github.com/owner/name"
    there = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "owner/name"}
    published = metadata_of(tmp_path, **there)
    assert f"Project-URL: Homepage, {home}\n" in published
    assert f"Project-URL: Issues, {home}/issues\n" in published
    targets = re.findall(r"(!?)\[[^]]*\]\(([^)]+)\)", published)
    assert len(targets) >= 12
    for picture, target in targets:
        assert target.startswith(f"{home}/{'raw' if picture else 'blob'}/main/"), target
        assert (ROOT / target.partition("/main/")[2]).exists()
    (tmp_path / "PKG-INFO").write_text(published)  # as in the source package
    assert metadata_of(tmp_path) == published
    assert metadata_of(tmp_path, GITHUB_REPOSITORY="other/app") == published


def test_every_folder_of_the_package_is_installed():
    source = ROOT / "python"
    folders = {path.parent.relative_to(source) for path in (source / "managedmem").rglob("*.py")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = {Path(*name.split(".")) for name in project["tool"]["setuptools"]["packages"]}
    assert {*folders, Path("managedmem/torch"), Path("managedmem/_cli")} == named


def test_the_import_loads_the_extension_alone():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["managedmem", "managedmem._managedmem"]
