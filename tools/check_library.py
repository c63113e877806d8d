"""Finds the security faults of a built shared library.

    python tools/check_library.py [--without FOLDER]... [--glibc VERSION] LIBRARY...

Prints a line for each fault and ends with status 1 if there is one. FOLDER is a path that must not
stand in the library, such as that of the build. VERSION is the oldest glibc that the library must
load with. Needs readelf (binutils).
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

OPENED_AT_RUN_TIME = ("libcuda", "libnvidia", "libpython")


def readelf(*arguments):
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(
        ["readelf", "--wide", *map(str, arguments)], env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"readelf failed: {done.stderr}")
    return done.stdout


def segments(library):
    """The type and the flags of each program header: ("LOAD", "R E")."""
    line = re.compile(r"^  ([A-Z_]+)(?: +0x[0-9a-f]+){5} ([RWE ]{3})", re.MULTILINE)
    return line.findall(readelf("--program-headers", library))


def dynamic(library):
    """The tag and the value of each dynamic entry: ("NEEDED", "Shared library: [libc.so.6]")."""
    line = re.compile(r"^ 0x[0-9a-f]+ \((\w+)\) *(.*)$", re.MULTILINE)
    return line.findall(readelf("--dynamic", library))


def undefined_symbols(library):
    names = re.findall(r" UND (\S+)", readelf("--dyn-syms", library))
    return {name.partition("@")[0] for name in names}


def loading_faults(library):
    """Search paths, linked drivers, and tables that the loader leaves writable."""
    entries = dynamic(library)
    tags = {tag for tag, _ in entries}
    for tag, value in entries:
        name = value.partition("[")[2].rstrip("]")
        if tag in ("RPATH", "RUNPATH"):
            yield f"searches other libraries, such as the driver, in {name}"
        if tag == "NEEDED" and name.startswith(OPENED_AT_RUN_TIME):
            yield f"is linked to {name}, which must only be opened at run time"
    flags = " ".join(value for tag, value in entries if tag in ("FLAGS", "FLAGS_1"))
    if "BIND_NOW" not in flags and "NOW" not in flags.split() and "BIND_NOW" not in tags:
        yield "resolves functions late (no BIND_NOW), so that its table of addresses stays writable"
    if "TEXTREL" in tags or "TEXTREL" in flags:
        yield "has relocations in its code (TEXTREL)"


def segment_faults(library):
    found = segments(library)
    stacks = [flags for kind, flags in found if kind == "GNU_STACK"]
    if not stacks or any("E" in flags for flags in stacks):
        yield "asks for an executable stack"
    if not any(kind == "GNU_RELRO" for kind, _ in found):
        yield "has no RELRO: addresses of functions stay writable"
    if any(kind == "LOAD" and "W" in flags and "E" in flags for kind, flags in found):
        yield "has memory that is writable and executable"


def compiler_faults(library):
    symbols = undefined_symbols(library)
    if "__stack_chk_fail" not in symbols:
        yield "was compiled without a stack protector"
    if not any(name.endswith("_chk") for name in symbols):
        yield "was compiled without _FORTIFY_SOURCE"


def path_faults(library, folders):
    content = Path(library).read_bytes()
    for folder in folders:
        if os.fsencode(folder) in content:
            yield f"holds the path {folder}"


def glibc_faults(library, oldest):
    def number(version):
        return [int(part) for part in version.split(".")]

    needed = set(re.findall(r"@GLIBC_([0-9.]+)", readelf("--dyn-syms", library)))
    for version in sorted(needed, key=number):
        if number(version) > number(oldest):
            yield f"needs glibc {version}, which is newer than {oldest}"


def faults(library, folders=(), glibc=None):
    yield from loading_faults(library)
    yield from segment_faults(library)
    yield from compiler_faults(library)
    yield from path_faults(library, folders)
    if glibc:
        yield from glibc_faults(library, glibc)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--without", action="append", default=[], metavar="FOLDER")
    parser.add_argument("--glibc", metavar="VERSION")
    parser.add_argument("libraries", nargs="+", metavar="LIBRARY")
    options = parser.parse_args()
    found = [
        f"{path} {fault}"
        for path in options.libraries
        for fault in faults(path, options.without, options.glibc)
    ]
    print("\n".join(found) or f"{len(options.libraries)} libraries have no fault")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
