"""The promises of SECURITY.md about the process. The other promises are tested elsewhere:

Read-only memory and unknown addresses: test_host_access.py, test_copy_kinds.py and test_plan.py.
Interfaces: test_bad_input.py. The built libraries: test_check_library.py and test_build.py.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import managedmem
from paths import ROOT

RAISED = """
import ctypes, sys
AT_SECURE = 23
libc = ctypes.CDLL(None)
libc.getauxval.restype = ctypes.c_ulong
if not libc.getauxval(AT_SECURE):
    sys.exit("not raised")
import managedmem
try:
    print(managedmem._managedmem._driver_info()["path"])
except managedmem.CUDAError as error:
    print(error)
"""


@pytest.fixture
def raised_python(tmp_path):
    """A Python that changes its group at its start, which raises its privileges for the loader."""
    copy = tmp_path / "python"
    shutil.copy(os.path.realpath(sys.executable), copy)
    try:
        os.chown(copy, -1, 65534)
    except OSError:
        pytest.skip("needs the right to give a file to another group")
    copy.chmod(0o2755)
    return copy


@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="the loader preloads no ASan here"
)
@pytest.mark.parametrize("choice", ["emulator", "path"])
def test_raised_privileges_ignore_the_choice_of_a_driver(raised_python, choice):
    emulator = Path(managedmem.__file__).with_name("libmanagedmem_emulator.so")
    package = Path(managedmem.__file__).resolve().parents[1]
    done = subprocess.run(
        [raised_python, "-c", RAISED],
        env={
            "MANAGEDMEM_DRIVER": "emulator" if choice == "emulator" else str(emulator),
            "PYTHONPATH": os.pathsep.join([str(package), *filter(None, sys.path)]),
            "PYTHONHOME": os.pathsep.join([sys.base_prefix, sys.base_exec_prefix]),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "not raised" in done.stderr or "error while loading" in done.stderr:
        pytest.skip("this system does not raise privileges for a copied Python")
    assert done.returncode == 0, done.stderr
    assert "libmanagedmem_emulator" not in done.stdout
    assert "libcuda.so.1" in done.stdout


OPENED = """
import sys
seen = []
def watch(event, args):
    if event in ("open", "ctypes.dlopen", "subprocess.Popen", "os.system", "socket.connect"):
        seen.append((event, str(args[0])))
sys.addaudithook(watch)
import managedmem
with open("/proc/self/maps") as maps:
    assert "emulator" not in maps.read()
managedmem.empty(4096).fill(1)
package = managedmem.__path__[0]
allowed = (".py", ".pyc", ".so", ".pyi", "/proc/self/maps")
print([name for event, name in seen if event != "open" or not name.endswith(allowed)])
"""


def test_nothing_but_modules_and_the_driver_is_opened():
    paths = [str(Path(managedmem.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]
    done = subprocess.run(
        [sys.executable, "-c", OPENED],
        env={
            **os.environ,
            "MANAGEDMEM_DRIVER": "emulator",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_page_is_linked():
    for page in ("README.md", "docs/security.rst", "MANIFEST.in"):
        assert "SECURITY.md" in (ROOT / page).read_text(), page
    assert "\n   security\n" in (ROOT / "docs" / "index.rst").read_text()


def test_the_page_names_files_that_exist():
    text = (ROOT / "SECURITY.md").read_text()
    for name in ("CHANGELOG.md", "docs/guide.rst", "tools/check_library.py"):
        assert name in text and (ROOT / name).exists(), name


def test_every_path_of_the_system_is_named():
    named = (ROOT / "SECURITY.md").read_text()
    sources = [
        path
        for folder in ("src", "python/managedmem")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".c", ".h", ".py", ".pyi")
    ]
    literal = re.compile(r'"(/(?:dev|proc|sys)/[\w/-]+)"')
    found = {path for source in sources for path in literal.findall(source.read_text())}
    assert {"/dev/nvidia-uvm-tools", "/proc/self/fd", "/proc/self/pagemap"} <= found
    assert [path for path in sorted(found) if f"`{path}" not in named] == []
