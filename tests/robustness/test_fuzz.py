"""The corpus of the fuzz targets: the inputs that they keep, with every one that once failed."""

import shutil
import subprocess

import pytest

from headers import cuda_include
from paths import ROOT, TESTS

FOLDER = TESTS / "fuzz"
SOURCES = ROOT / "src"


def inputs(target):
    found = sorted((FOLDER / "corpus" / target).iterdir())
    assert len(found) > 10, f"the corpus of {target} is missing"
    return found


@pytest.fixture
def protocols(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import protocols

    return protocols


@pytest.mark.emulator_only
def test_protocol_input(protocols):
    for path in inputs("protocols"):
        protocols.run(path.read_bytes())


@pytest.mark.emulator_only
def test_what_the_target_looks_for_is_noticed(protocols, monkeypatch):
    """A library that takes any array as a target, and one that keeps memory."""

    class Policy:
        of = staticmethod(lambda target: None)

    with monkeypatch.context() as planted:
        planted.setattr(protocols, "MigrationPolicy", Policy)
        with pytest.raises(protocols.Wrong, match="not there"):
            for path in inputs("protocols"):
                protocols.run(path.read_bytes())
    kept = []

    class Keeping(protocols.Case):
        def close(self):
            kept.append(self)

    with monkeypatch.context() as planted:
        planted.setattr(protocols, "Case", Keeping)
        with pytest.raises(protocols.Wrong, match="left behind"):
            protocols.run(b"\0")
    protocols.Case.close(kept.pop())


def replay(program, paths):
    return subprocess.run(
        [program, *paths], capture_output=True, text=True, timeout=60, check=False
    )


PARSERS = {
    "options": SOURCES / "emulator" / "config.c",
    "records": SOURCES / "_managedmem" / "trace" / "uvm_records.c",
}


def build(folder, target, parser):
    """The target, without libFuzzer, over that parser."""
    compiler, include = shutil.which("cc"), cuda_include()
    if compiler is None or include is None:
        pytest.skip("needs a C compiler (cc) and cuda.h")
    program = folder / target
    sources = [FOLDER / f"{target}.c", FOLDER / "replay.c"]
    flags = ["-std=c11", "-D_GNU_SOURCE", f"-I{include}", f"-I{PARSERS[target].parent}"]
    done = subprocess.run(
        [compiler, *flags, f'-DPARSER="{parser}"', *sources, "-o", program, "-lpthread"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.parametrize("target", PARSERS)
def test_input_of_parsers(tmp_path, target):
    paths = inputs(target)
    done = replay(build(tmp_path, target, PARSERS[target]), paths)
    assert (done.returncode, done.stdout) == (0, f"{len(paths)} inputs\n"), done.stderr


@pytest.mark.parametrize(
    ("target", "bound", "wrong"),
    [
        ("options", " *out <= high", " *out <= high + 100"),
        ("records", "out->amount <= MOST_BYTES", "out->amount <= 2 * MOST_BYTES"),
        ("records", "out->end < out->start", "out->end == 0"),
    ],
)
def test_a_bound_that_the_parser_lacks_is_noticed(tmp_path, target, bound, wrong):
    text = PARSERS[target].read_text()
    planted = tmp_path / PARSERS[target].name
    planted.write_text(text.replace(bound, wrong))
    assert planted.read_text() != text
    done = replay(build(tmp_path, target, planted), inputs(target))
    assert done.returncode != 0
    assert "not so: " in done.stderr
