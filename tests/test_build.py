"""The errors of a build from source when a compiler or headers are missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import managedmem

PACKAGE = Path(managedmem.__file__).parent
ROOT = Path(__file__).resolve().parents[1]
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
RUN = """
import runpy, sys
sys.argv = ["setup.py", "-q", "build_ext", "--build-lib", {folder!r}, "--build-temp", {folder!r}]
sys.path[0] = "."
{before}
runpy.run_path("setup.py", run_name="__main__")
"""


def build(folder, before="", **environment):
    """The output of a build in the folder, which must fail."""
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
