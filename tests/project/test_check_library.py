"""tools/check_library.py finds each fault in a tiny library that was built to have it."""

import os
import shutil
import subprocess
import sys

import pytest

from paths import TOOLS

TOOL = TOOLS / "check_library.py"
SOURCE = """
#include <stdio.h>
#include <string.h>
int (*table)(const char *) = puts;
int checked(const char *text)
{
    char copy[16];
    memcpy(copy, text, strlen(text) + 1);
    return table(copy) + puts(copy);
}
#ifdef NAME
const char name[] = NAME;
#endif
#ifdef WRITABLE_CODE
__asm__(".section .both, \\"awx\\", @progbits\\n.byte 0\\n.previous");
#endif
#ifdef RELOCATED_CODE
__asm__(".text\\n.quad table");
#endif
"""
COMPILE = {
    "optimize": "-O2",
    "protector": "-fstack-protector-strong",
    "undefine": "-U_FORTIFY_SOURCE",
    "fortify": "-D_FORTIFY_SOURCE=2",
    "pic": "-fPIC",
}
LINK = {
    "relro": "-Wl,-z,relro",
    "now": "-Wl,-z,now",
    "stack": "-Wl,-z,noexecstack",
    "text": "-Wl,-z,text",
}
FAULTS = {
    "none": ({}, None),
    "search path": (
        {"path": "-Wl,-rpath,/opt/python/lib"},
        "such as the driver, in /opt/python/lib",
    ),
    "old search path": ({"path": "-Wl,-rpath,/x,--disable-new-dtags"}, "such as the driver, in /x"),
    "late binding": ({"now": "-Wl,-z,lazy"}, "no BIND_NOW"),
    "no RELRO": ({"relro": "-Wl,-z,norelro"}, "no RELRO"),
    "executable stack": ({"stack": "-Wl,-z,execstack"}, "executable stack"),
    "no stack protector": ({"protector": "-fno-stack-protector"}, "stack protector"),
    "no fortify": ({"fortify": "-DNOTHING"}, "_FORTIFY_SOURCE"),
    "writable code": ({"add": "-DWRITABLE_CODE"}, "writable and executable"),
    "relocated code": ({"add": "-DRELOCATED_CODE", "text": "-Wl,-z,notext"}, "TEXTREL"),
    "linked to the driver": ({"link": "stub"}, "is linked to libcuda.so.1"),
    "path of the build": ({"add": '-DNAME="{}"'}, "holds the path"),
}


@pytest.fixture(scope="module")
def gcc():
    found = shutil.which("gcc")
    if found is None or shutil.which("readelf") is None or sys.platform != "linux":
        pytest.skip("needs gcc and readelf")
    return found


def build(gcc, folder, changes):
    source = folder / "tiny.c"
    source.write_text(SOURCE)
    options = {**COMPILE, **LINK, **changes}
    if options.get("link") == "stub":
        stub = folder / "libcuda.so.1"
        subprocess.run(
            [gcc, "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull, "-o", stub],
            check=True,
        )
        options["link"] = f"-Wl,--no-as-needed,{stub}"
    options["add"] = options.get("add", "-DNOTHING").format(folder)
    library = folder / "tiny.so"
    command = [gcc, "-shared", *options.values(), source, "-o", library]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"this gcc cannot build it: {done.stderr[-200:]}")
    return library


def check(*arguments):
    done = subprocess.run(
        [sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True
    )
    assert done.stderr == ""
    return done


@pytest.mark.parametrize(("changes", "words"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found(gcc, tmp_path, changes, words):
    library = build(gcc, tmp_path, changes)
    done = check("--without", tmp_path, library)
    assert done.returncode == (words is not None), done.stdout
    assert words is None or words in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_functions_of_a_newer_glibc(gcc, tmp_path):
    library = build(gcc, tmp_path, {})
    done = check("--glibc", "2.0", library)
    assert done.returncode == 1
    assert "needs glibc 2." in done.stdout and "newer than 2.0" in done.stdout
    assert check("--glibc", "2.100", library).returncode == 0  # a number, no text


def test_one_bad_library_among_good_ones(gcc, tmp_path):
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
    good = build(gcc, tmp_path / "good", {})
    bad = build(gcc, tmp_path / "bad", {"stack": "-Wl,-z,execstack"})
    done = check(good, bad)
    assert done.returncode == 1
    assert str(good) not in done.stdout


def test_what_is_no_library(gcc, tmp_path):
    text = tmp_path / "text.so"
    text.write_text("no library")
    done = subprocess.run([sys.executable, TOOL, text], capture_output=True, text=True)
    assert done.returncode == 1 and "readelf failed" in done.stderr
