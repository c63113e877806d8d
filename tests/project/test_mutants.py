"""tools/mutants.py: the list fits the sources, wrong lists are refused, survivors are counted.

The mutants themselves run in .ci/run mutants, where a comment shows that a change without effect
survives.
"""

import importlib
import shutil
import subprocess

import pytest

from paths import ROOT

CODE = """\
int
f(int *p, int count)
{
    int rc = open_it(p);

    if (rc < 0 || count > 3) {
        destroy_it(p);
        return -1;
    }
    for (int i = 0; i < count; i++) {
        mm_guard_leave(&p[i]);
    }
    Py_BEGIN_ALLOW_THREADS
    rc = work(p);
    Py_END_ALLOW_THREADS
    first_of(p);
    second_of(p);
    Py_XDECREF(made);
    return rc;
}
"""


@pytest.fixture(scope="module")
def tool():
    return importlib.import_module("mutants")


@pytest.fixture(scope="module")
def proposer():
    return importlib.import_module("propose_mutants")


def mutant(tool, before="b > c", after="b >= c", **more):
    return tool.Mutant("one", "boundary", "a.c", before, after, **more)


class TestTheList:
    def test_fits_the_sources(self, tool):
        mutants = tool.read_list()
        assert len(mutants) >= 109
        for kind, share in {"rollback": 8, "boundary": 16, "lock": 10, "condition": 30}.items():
            assert sum(m.kind == kind for m in mutants) >= share
        for kind, share in {"gil": 3, "refcount": 8}.items():
            assert sum(m.kind == kind and bool(m.killer) for m in mutants) >= share
        rooms = {"driver", "memory", "working", "trace", "python"}
        assert {m.file.split("/")[2] for m in mutants} == rooms

    def test_every_killer_is_there(self, tool):
        for entry in tool.read_list():
            path, _, test = entry.killer.partition(" under ")[0].partition("::")
            assert not path or (ROOT / path).is_file()
            name = test.rpartition("::")[2].partition("[")[0]
            assert f"def {name}(" in (ROOT / path).read_text() if name else True

    @pytest.mark.parametrize("text", ["a = c;", "a = b > c; d = b > c;"])
    def test_a_place_that_is_gone_or_not_unique_is_an_error(self, tool, text):
        with pytest.raises(tool.BadList, match=r"occurs [02] times in a\.c"):
            tool.mutated(mutant(tool), text)

    def test_a_change_that_changes_nothing_is_an_error(self, tool):
        with pytest.raises(tool.BadList):
            tool.mutated(mutant(tool, after="b > c"), "a = b > c;")

    @pytest.mark.parametrize(
        "entries",
        [
            [{"killer": "t"}, {"killer": "t"}],
            [{}],
            [{"killer": "t", "equivalent": "r"}],
            [{"killer": "t", "before": "gone"}],
        ],
        ids=["a name twice", "no killer", "killer and reason", "no such place"],
    )
    def test_wrong_entries_are_refused(self, tool, tmp_path, entries):
        entry = {"name": "n", "kind": "k", "file": "a.c", "before": "x", "after": "y"}
        lines = []
        for more in entries:
            lines += ["[[mutant]]", *(f'{k} = "{v}"' for k, v in {**entry, **more}.items())]
        (tmp_path / "list.toml").write_text("\n".join(lines))
        (tmp_path / "a.c").write_text("x")
        with pytest.raises(tool.BadList):
            tool.read_list(tmp_path / "list.toml", tmp_path)


def test_a_comment_is_the_harmless_change(tool):
    program, test = mutant(tool, killer="tests/c/test_a.c"), mutant(tool, killer="tests/test_a.py")
    assert tool.harmless_change([program, test]).killer == test.killer
    harmless = tool.harmless_change([program])
    assert (harmless.killer, harmless.after) == (program.killer, "b > c/* changed */\n")


ALL_KILLED = [(kind, True) for kind in ("rollback", "lock", "gil", "refcount") for _ in range(5)]


class TestTheGate:
    def test_all_killed(self, tool):
        lines, missed = tool.judge([*ALL_KILLED, ("condition", True)])
        assert missed == []
        assert lines[-1].split() == ["all", "21", "of", "21"]

    def test_nine_tenths_are_enough_for_the_others(self, tool):
        _, missed = tool.judge([*ALL_KILLED, *[("condition", False)] * 2])
        assert missed == []
        lines, missed = tool.judge([*ALL_KILLED, *[("condition", False)] * 3])
        assert missed == ["all"]
        assert "condition    0 of   3" in lines

    @pytest.mark.parametrize("kind", ["rollback", "lock", "gil", "refcount"])
    def test_one_survivor_of_these_is_too_many(self, tool, kind):
        _, missed = tool.judge([*ALL_KILLED * 3, (kind, False)])
        assert missed == [kind]
        _, missed = tool.judge([pair for pair in ALL_KILLED if pair[0] != kind])
        assert kind in missed, "none of them at all shows nothing"


SOURCES = {
    "src/_managedmem/memory/limit.h": "static inline int most(void) { return 4; }\n",
    "src/_managedmem/memory/near.h": '#include "limit.h"\n',
    "src/_managedmem/memory/near.c": '#include "near.h"\nint near_most(void) { return most(); }\n',
    "src/_managedmem/memory/far.c": "int far_most(void) { return 4; }\n",
    "tests/c/test_most.c": '#include "memory/near.h"\nint main(void) { return most() - 4; }\n',
    "tests/c/test_other.c": '#include "memory/limit.h"\nint main(void) { return 0; }\n',
}


@pytest.fixture
def build(tool, tmp_path):
    """A built tree of SOURCES, as the tool sees it."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    made = object.__new__(tool.Build)
    made.folder, made.tree = tmp_path, tmp_path / "tree"
    made.compile, made.compile_tests = {}, {}
    for name, text in SOURCES.items():
        path = made.tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in SOURCES:
        if name.endswith(".c"):
            kept = made.compile_tests if name.startswith("tests/") else made.compile
            kept[name] = [compiler, *tool.C_TEST_INCLUDES, "-c", name, "-o", f"{name}.o"]
            subprocess.run(kept[name], cwd=made.tree, check=True)
    return made


def objects(tree):
    return {p.name: p.read_bytes() for p in tree.rglob("*.o")}


class TestPlaces:
    """A change of a file is in the objects of all that have the file, and is undone whole."""

    @pytest.mark.parametrize(
        ("file", "changed"),
        [
            ("memory/limit.h", {"near.c.o", "test_most.c.o"}),
            ("memory/far.c", {"far.c.o"}),
        ],
    )
    def test_what_has_the_change_is_compiled(self, tool, build, file, changed):
        place = tool.Place(build, 1)
        before = objects(place.tree)
        change = tool.Mutant("one", "boundary", f"src/_managedmem/{file}", " 4", " 5")
        place.apply(change, ["tests/c/test_most.c"])
        after = objects(place.tree)
        assert {name for name in before if before[name] != after[name]} == changed
        place.restore(change, ["tests/c/test_most.c"])
        assert objects(place.tree) == before
        assert (place.tree / change.file).read_text() == SOURCES[change.file]

    def test_a_header_that_nothing_includes_is_an_error(self, tool, build):
        (build.tree / "lone.h").write_text("#define LONE 1\n")
        with pytest.raises(tool.BadList, match=r"no source that is built includes lone\.h"):
            tool.Place(build, 1).apply(tool.Mutant("one", "boundary", "lone.h", "1", "2"), [])

    def test_a_compiler_of_several_words_links_c_tests(self, tool, build, monkeypatch):
        """As CC="ccache gcc" is."""
        monkeypatch.setattr(tool, "C_TEST_SOURCES", ())
        build.link = ["env", shutil.which("cc"), "-shared", *build.compile, "-o", "all.so"]
        command = tool.Place(build, 1).link_c_test("tests/c/test_most.c")
        assert subprocess.run(command).returncode == 0


@pytest.mark.parametrize(
    ("operator", "found"),
    [
        ("rollbacks", {("        destroy_it(p);\n", "")}),
        ("boundaries", {(" > ", " >= ")}),
        ("loops", {(" < ", " + 1 < ")}),
        ("locks", {("        mm_guard_leave(&p[i]);\n", "")}),
        ("conditions", {("rc < 0 ||", " "), ("|| count > 3", "")}),
        ("references", {("Py_XDECREF(made);", "(void)(made);")}),
    ],
)
def test_operators_find_their_places(proposer, operator, found):
    changes = getattr(proposer, operator)(CODE)
    assert {(CODE[start:end], new) for start, end, new in changes} == found


def test_swaps_and_detachments(proposer):
    [(start, end, _)] = proposer.detachments(CODE)
    assert CODE[start:end].splitlines()[1] == "    rc = work(p);"
    [first, *_] = proposer.swaps(CODE)
    assert proposer.replacement(CODE, CODE, "order", first[:2], "x") == (
        "    second_of(p);\n    first_of(p);\n"
    )


def test_a_repeated_line_at_the_end_of_a_file_is_made_unique(proposer):
    assert proposer.widened("a\nb\nc\nb\n", 6, 7, "x") == ("c\nb\n", "c\nx\n")


def test_the_choice_is_fixed_by_the_seed(proposer):
    shares = dict.fromkeys(proposer.SHARES, 2)
    assert proposer.chosen(5, shares) == proposer.chosen(5, shares)
    assert proposer.chosen(5, shares) != proposer.chosen(6, shares)
    files = [entry[2] for entry in proposer.chosen(5, dict.fromkeys(shares, 10))]
    assert len(set(files)) > 25


def test_two_halves_are_the_whole(tool):
    listed = [mutant for mutant in tool.read_list(tool.LIST) if mutant.killer]
    halves = [tool.chosen(listed, tool.parse(["--half", half])) for half in "01"]
    assert sorted(mutant.name for half in halves for mutant in half) == sorted(
        mutant.name for mutant in tool.chosen(listed, tool.parse([]))
    )
    for half in halves:  # each has some of the kinds that must all be killed
        assert {mutant.kind for mutant in half} >= set(tool.ALL_KILLED)
