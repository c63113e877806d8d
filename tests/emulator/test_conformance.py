"""Compares the emulated driver, answer by answer, with what real GPUs answered.

Owns the building and running of the conformance program. Its goldens are its output on real
hardware; `known_differences.txt` lists the few lines in which the emulated driver may differ.
"""

import itertools
import os
import re
import shutil
import subprocess
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace

import pytest

import managedmem
from constants import EMULATED
from headers import OLDEST_HEADERS, cuda_include
from paths import TESTS

SOURCES = TESTS / "conformance"
PROFILES = {"h200": 1, "h200-x2": 2}
KNOWN_CARDS = ("H200", "H100")  # their answers agree with the goldens
# Every driver 580 is one of CUDA 13.0.
RECORDED_DRIVER = 13000
RECORDED_PAGE = 4096
LOCATIONS = 13040  # the first driver version with cuMemGetLocationInfo
TIMEOUT = 300
pytestmark = pytest.mark.timeout(TIMEOUT)  # on a GPU; two programs are compiled first


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The conformance program, built for this run."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to build the conformance program with")
    include = cuda_include()
    if include is None:
        pytest.skip(f"no cuda.h of version {OLDEST_HEADERS} or newer found")
    built = tmp_path_factory.mktemp("conformance") / "conformance"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", f"-I{include}"]
    sources = sorted(map(str, SOURCES.glob("*.c")))
    done = subprocess.run(
        [compiler, *flags, *sources, "-o", str(built), "-ldl"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return built


def run(program, library, profile=None, options=""):
    """The lines that the program prints about a driver library."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("MANAGEDMEM_")}
    if profile is not None:
        env["MANAGEDMEM_EMULATOR"] = f"profile={profile},page={RECORDED_PAGE}{options}"
    done = subprocess.run(
        [str(program), str(library)], env=env, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return done.stdout.splitlines()


def golden(name):
    return (SOURCES / "golden" / f"{name}-driver580.txt").read_text().splitlines()


def known_differences():
    """The allowed patterns with their reasons."""
    entries = {}
    for line in (SOURCES / "known_differences.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern, separator, reason = line.partition(" -- ")
            assert separator and reason.strip(), f"a known difference without a reason: {line}"
            entries[pattern.strip()] = reason
    return entries


def differences(expected, answered):
    """Every differing line as (topic, expected, answered)."""
    topic = ""
    for want, got in zip_longest(expected, answered, fillvalue="(nothing)"):
        if want.startswith("## "):
            topic = want[3:]
        if want != got:
            yield topic, want, got
            if want.startswith("## ") or got.startswith("## "):
                return  # a topic has more or fewer lines: everything behind it is shifted


def explain(found):
    return "\n".join(
        f"[{topic}]\n  golden   {want}\n  answered {got}" for topic, want, got in found
    )


@pytest.mark.emulator_only
@pytest.mark.parametrize("profile", PROFILES)
def test_emulated_driver_answers_as_the_hardware_did(program, profile):
    library = Path(managedmem.__file__).with_name("libmanagedmem_emulator.so")
    allowed = [re.compile(pattern) for pattern in known_differences()]
    found = list(differences(golden(profile), run(program, library, profile)))
    unknown = [d for d in found if not any(p.fullmatch(d[1]) for p in allowed)]
    assert not unknown, explain(unknown)


@pytest.mark.emulator_only
def test_every_known_difference_is_still_one(program):
    library = Path(managedmem.__file__).with_name("libmanagedmem_emulator.so")
    found = [d for p in PROFILES for d in differences(golden(p), run(program, library, p))]
    stale = [
        pattern
        for pattern in known_differences()
        if not any(re.fullmatch(pattern, want) for _, want, _ in found)
    ]
    assert not stale, f"no longer needed in known_differences.txt: {stale}"


@pytest.mark.emulator_only
def test_a_newer_emulated_driver_differs_in_its_version_and_in_locations(program):
    library = Path(managedmem.__file__).with_name("libmanagedmem_emulator.so")
    answers = [run(program, library, "h200", options) for options in ("", ",driver=13050")]
    newer, _ = split_locations(answers[1])
    changed = [got for _, _, got in differences(answers[0], newer)]
    assert [line.split() for line in changed] == [["driver", "version", "13050"]]


def split_locations(lines):
    """The topics that goldens have, and those of cuMemGetLocationInfo, which are the last."""
    first = lines.index("## locations") if "## locations" in lines else len(lines)
    return lines[:first], lines[first:]


@pytest.mark.emulator_only
def test_locations_are_those_of_the_documentation(program):
    """That of CUDA 13.5's header. Types: 0 nowhere, 1 a device, 2 the host."""
    library = Path(managedmem.__file__).with_name("libmanagedmem_emulator.so")
    _, lines = split_locations(run(program, library, "h200", ",driver=13040,pageable=1"))
    none, host, device, left = "0:0", "2:0", "1:0", "-77:-77"
    expected = {
        "fresh": [none, none, none, none, left, left],
        "host, fresh, device, fresh": [host, none, device, none, left, left],
        "default sampling": [host, none, device, none, left, left],
        "a part that ends early": [host, none, device, none, left, left],
        "within a page": [device, *[left] * 5],
        "duplicated": [device, *[left] * 5],
        "discarded on the device": [device, *[left] * 5],
        "system memory": [host, *[left] * 5],
    }
    answers = dict(itertools.pairwise(lines))
    for label, locations in expected.items():
        (line,) = [x for x in lines if x.strip().startswith(f"{label}  ")]
        assert line.endswith(" 0 SUCCESS"), line
        assert answers[line].split() == locations, label
    refused = [x.partition("  ")[0] for x in lines if x.endswith(" 1 ERROR_INVALID_VALUE")]
    assert refused == [
        "size 0",
        "summary 0",
        "summary above the size",
        "sampling above the summary",
        "into NULL",
        "past the end",
        "address 0",
        "device memory",
    ]


@pytest.mark.skipif(EMULATED, reason="needs the driver of a real GPU")
def test_real_driver_locates_pages_as_the_emulated_one(program):
    """Nobody has recorded these answers yet: the first driver that has them shows what differs."""
    info = managedmem._managedmem._driver_info()
    if info["version"] < LOCATIONS:
        pytest.skip(f"driver {info['version_string']} has no cuMemGetLocationInfo (CUDA 13.4)")
    library = Path(managedmem.__file__).with_name("libmanagedmem_emulator.so")
    pageable = int(managedmem.Device(0).pageable_memory_access)
    options = f",driver={LOCATIONS},pageable={pageable}"
    _, expected = split_locations(run(program, library, "h200", options))
    _, answered = split_locations(run(program, info["path"]))
    assert answered
    found = list(differences(expected, answered))
    if found:
        pytest.skip(f"differs from the emulated driver:\n{explain(found)}")


def recorded_here():
    """The golden of the machine's driver and devices; skips where none was recorded."""
    info = managedmem._managedmem._driver_info()
    if info["version"] != RECORDED_DRIVER:
        pytest.skip(f"no golden of driver {info['version_string']} was recorded")
    names = {devices: name for name, devices in PROFILES.items()}
    if info["device_count"] not in names:
        pytest.skip(f"no golden of {info['device_count']} devices was recorded")
    return info["path"], names[info["device_count"]]


@pytest.mark.skipif(EMULATED, reason="needs the driver of a real GPU")
def test_real_driver_still_answers_as_recorded(program):
    library, name = recorded_here()
    found = list(differences(golden(name), run(program, library)))
    cards = {d.name for d in managedmem.Device.all()}
    new = sorted(c for c in cards if not any(known in c for known in KNOWN_CARDS))
    if found and new:
        pytest.skip(f"{', '.join(new)}: a new card, which differs:\n{explain(found)}")
    assert not found, explain(found)


class TestTheGoldenOfAMachine:
    """Which golden the real driver is compared with."""

    @staticmethod
    def machine(monkeypatch, *names, version=13000):
        devices = tuple(SimpleNamespace(name=name) for name in names)
        info = {
            "path": "libcuda.so.1",
            "version": version,
            "version_string": f"{version // 1000}.{version % 1000 // 10}",
            "device_count": len(names),
        }
        monkeypatch.setattr(managedmem._managedmem, "_driver_info", lambda: info)
        monkeypatch.setattr(managedmem, "Device", SimpleNamespace(all=lambda: devices))

    @pytest.mark.parametrize("profile", PROFILES)
    def test_is_chosen_by_the_number_of_devices(self, monkeypatch, profile):
        self.machine(monkeypatch, *["NVIDIA H200"] * PROFILES[profile])
        assert recorded_here() == ("libcuda.so.1", profile)

    @pytest.mark.parametrize(
        ("names", "version", "reason"),
        [(["NVIDIA H200"], 13010, "of driver 13.1"), (["NVIDIA H200"] * 4, 13000, "of 4 devices")],
    )
    def test_is_missing_for_other_machines(self, monkeypatch, names, version, reason):
        self.machine(monkeypatch, *names, version=version)
        with pytest.raises(pytest.skip.Exception, match=reason):
            recorded_here()


class TestTheComparison:
    """The comparison itself must see what it is there to see."""

    def test_equal_lines_are_no_difference(self):
        assert list(differences(["## a", "x 0"], ["## a", "x 0"])) == []

    def test_a_changed_line_is_found_with_its_topic(self):
        assert list(differences(["## a", "x 0"], ["## a", "x 1"])) == [("a", "x 0", "x 1")]

    def test_a_missing_line_is_found(self):
        assert list(differences(["## a", "x 0"], ["## a"])) == [("a", "x 0", "(nothing)")]

    def test_a_shifted_topic_is_reported_once(self):
        found = list(differences(["## a", "x", "## b", "y"], ["## a", "## b", "y", "z"]))
        assert found == [("a", "x", "## b")]
