"""Build what changed, and check it.

    python tools/check.py quick                      the formatting, and half a minute of tests
    python tools/check.py c [test_plan ...]          the C tests, or some, under sanitizers
    python tools/check.py python [tests/core ...]    the suite, or some of it
    python tools/check.py gpu [whole files ...]      the suite on the GPUs of this machine
    python tools/check.py all [format docs ...]      what CI runs, or some of its checks

The first failure ends it. `all` works on a copy, installs what it needs, and takes long; the others
need the extras test and lint. `quick` mends the formatting.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
DEBUG = {"MANAGEDMEM_DEBUG": "1", "MANAGEDMEM_WERROR": "1"}
PYTEST = [sys.executable, "-m", "pytest"]


def run(*command, **environment):
    """Run a command in the root of the project; its failure ends this program."""
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}).returncode
    if status:
        sys.exit(f"failed with status {status}: {' '.join(map(str, command))}")


def files(*patterns):
    """The files of the repository with such names, new ones included."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).exists()]


def quick(_):
    run("clang-format", "-i", *files("*.[ch]"))
    run(sys.executable, "-m", "ruff", "format", "-q", ".")
    run(sys.executable, "-m", "ruff", "check", "-q", ".")
    run(sys.executable, "tools/check_sources.py")
    run(*BUILD, **DEBUG)
    run(*PYTEST, "-q", "-m", "quick")


def c(names):
    run("bash", "tests/c/run.sh", "build/c", *names)


def python(names):
    run(*BUILD, **DEBUG)
    run(*PYTEST, "-q", *(names or ["-n", "auto"]))


def gpu(names):
    run(*BUILD, **DEBUG)
    python_path = os.pathsep.join(filter(None, ["python", os.environ.get("PYTHONPATH")]))
    suite = [sys.executable, "tools/gpu_suite.py", *(names or ["whole", "files"])]
    run(*suite, PYTHONPATH=python_path)


def everything(names):
    run(".ci/run", *names)


CHECKS = {"quick": quick, "c": c, "python": python, "gpu": gpu, "all": everything}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("names", nargs=argparse.REMAINDER, help="parts of the check")
    arguments = parser.parse_args()
    CHECKS[arguments.check](arguments.names)


if __name__ == "__main__":
    main()
