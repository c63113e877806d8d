"""tools/mutants.py: the list fits the sources, wrong lists are refused, survivors are counted.

The mutants themselves run in .ci/run mutants, where a comment shows that a change without effect
survives.
"""

import collections
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
def mutations():
    return importlib.import_module("mutations")


@pytest.fixture
def sources(tmp_path):
    """A tree whose only source has CODE."""
    folder = tmp_path / "src" / "_managedmem" / "memory"
    folder.mkdir(parents=True)
    (folder / "f.c").write_text(CODE)
    return tmp_path


def change(mutations, file, old, new, text):
    start = text.index(old)
    return mutations.Mutation("boundary", file, "f", 1, start, start + len(old), new)


class TestTheList:
    def test_fits_the_sources(self, tool):
        listed = tool.read_list()
        killed = collections.Counter(
            m.kind for m, killer in listed.items() if not tool.is_equivalent(killer)
        )
        for kind, share in tool.SHARES.items():
            assert killed[kind] >= share // 2
        rooms = {"driver", "memory", "working", "trace", "python"}
        assert {m.file.split("/")[0] for m in listed} == rooms

    def test_every_killer_is_there(self, tool):
        killers = [k for k in tool.read_list().values() if not tool.is_equivalent(k)]
        for killer in killers + tool.MAPPED.read_text().split():
            path, _, test = killer.partition(" under ")[0].partition("::")
            assert (ROOT / path).is_file() or path.endswith(":")
            name = test.rpartition("::")[2].partition("[")[0]
            assert f"def {name}(" in (ROOT / path).read_text() if name else True

    @pytest.mark.parametrize(
        "lines",
        [
            ["rollback memory/f.c f 1: t", "rollback memory/f.c f 1: t"],
            ["rollback memory/f.c f 1"],
            ["rollback memory/f.c f 1: "],
            ["rollback memory/f.c f 2: t"],
            ["rollback memory/f.c g 1: t"],
            ["rollback memory/g.c f 1: t"],
            ["statement f 1: t"],
        ],
        ids=["twice", "no colon", "no killer", "number", "function", "source", "no source"],
    )
    def test_wrong_lines_are_refused(self, tool, sources, lines):
        (sources / "list.txt").write_text("# lines\n\n" + "\n".join(lines) + "\n")
        with pytest.raises(tool.BadList):
            tool.read_list(sources / "list.txt", sources)

    def test_a_right_line(self, tool, sources):
        (sources / "list.txt").write_text("rollback memory/f.c f 1: equivalent, none sees it\n")
        [(mutation, killer)] = tool.read_list(sources / "list.txt", sources).items()
        assert mutation.changed(CODE) == CODE.replace("        destroy_it(p);\n", "")
        assert tool.is_equivalent(killer)


def test_a_comment_is_the_harmless_change(tool, mutations):
    one, two = (change(mutations, file, "count > 3", "", CODE) for file in ("a.c", "b.c"))
    comment, killer = tool.harmless_change({one: "tests/c/test_a.c", two: "tests/test_a.py"})
    assert (comment.file, killer) == ("b.c", "tests/test_a.py")
    assert comment.changed(CODE) == CODE.replace("count > 3", "/* changed */count > 3")


class TestChangedLines:
    DIFF = """\
diff --git a/src/_managedmem/memory/plan.c b/src/_managedmem/memory/plan.c
--- a/src/_managedmem/memory/plan.c
+++ b/src/_managedmem/memory/plan.c
@@ -3 +4,2 @@ static int
-old
+new
+new
@@ -9,2 +10,0 @@ static int
-old
-old
@@ -20 +19 @@
-old
+new
diff --git a/src/_managedmem/memory/gone.c b/src/_managedmem/memory/gone.c
--- a/src/_managedmem/memory/gone.c
+++ /dev/null
@@ -1 +0,0 @@
-old
"""

    def test_of_a_diff(self, tool):
        assert tool.changed_lines(self.DIFF) == {"memory/plan.c": {4, 5, 19}}
        assert tool.mutants_of("", {}) == {}

    def test_mutants_are_in_them_and_few(self, tool, mutations):
        text = (ROOT / mutations.SOURCES / "memory/plan.c").read_text()
        count = text.count("\n")
        diff = f"+++ b/{mutations.SOURCES}/memory/plan.c\n@@ -0,0 +1,{count} @@\n"
        whole = tool.mutants_of(diff, {})
        assert 5 <= len(whole) <= sum(tool.FEW.values())
        assert all("tests/c/test_plan.c" in tests for tests in whole.values())
        one = next(iter(whole))
        line = one.lines(text)[0]
        diff = f"+++ b/{mutations.SOURCES}/memory/plan.c\n@@ -1 +{line} @@\n"
        assert all(line in m.lines(text) for m in tool.mutants_of(diff, {}))
        assert one not in tool.mutants_of(diff, {one: "equivalent, it is"})


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


def test_what_noticed_is_one_test_or_the_whole_killer(tool, mutations, monkeypatch):
    """These must pass on the unchanged sources."""
    ends = [
        ("tests/core/test_a.py", "tests/core/test_a.py::test_one[a b]"),
        ("tests/core/test_b.py", "SIGSEGV"),
        ("tests/c/test_c.c", "status 1"),
        (None, ""),
    ]
    made = [change(mutations, f"{n}.c", "count > 3", "", CODE) for n in range(len(ends))]
    results = [(mutant, *end, 0) for mutant, end in zip(made, ends, strict=True)]
    monkeypatch.setattr(tool, "work_through", lambda build, jobs: results)
    enough, noticed = tool.run(None, dict.fromkeys(made, ()), ())
    assert not enough
    assert noticed == {ends[0][1], "tests/core/test_b.py", "tests/c/test_c.c"}


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
        [("memory/limit.h", {"near.c.o", "test_most.c.o"}), ("memory/far.c", {"far.c.o"})],
    )
    def test_what_has_the_change_is_compiled(self, tool, mutations, build, file, changed):
        place = tool.Place(build, 1)
        before = objects(place.tree)
        source = f"src/_managedmem/{file}"
        made = change(mutations, file, " 4", " 5", SOURCES[source])
        place.apply(made, ["tests/c/test_most.c"])
        after = objects(place.tree)
        assert {name for name in before if before[name] != after[name]} == changed
        place.restore(made, ["tests/c/test_most.c"])
        assert objects(place.tree) == before
        assert (place.tree / source).read_text() == SOURCES[source]

    def test_a_header_that_nothing_includes_is_an_error(self, tool, mutations, build):
        lone = "#define LONE 1\n"
        (build.tree / "src/_managedmem/memory/lone.h").write_text(lone)
        made = change(mutations, "memory/lone.h", "1", "2", lone)
        with pytest.raises(tool.BadList, match=r"no source that is built includes .*lone\.h"):
            tool.Place(build, 1).apply(made, [])


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
def test_operators_find_their_places(mutations, operator, found):
    changes = getattr(mutations, operator)(CODE)
    assert {(CODE[start:end], new) for start, end, new in changes} == found


def test_swaps_and_detachments(mutations, sources):
    found = mutations.mutations_of("memory/f.c", sources)
    [detached] = [m for m in found if m.kind == "gil"]
    assert "\n    rc = work(p);\n    MM_ASSERT_LEFT();\n    }\n" in detached.changed(CODE)
    swapped = next(m for m in found if m.kind == "order").changed(CODE)
    assert swapped == CODE.replace(
        "    first_of(p);\n    second_of(p);\n", "    second_of(p);\n    first_of(p);\n"
    )


def test_two_halves_are_the_whole(tool):
    listed = tool.read_list()
    halves = [tool.chosen(listed, half) for half in (0, 1)]
    assert halves[0] | halves[1] == tool.chosen(listed, None)
    assert not halves[0].keys() & halves[1].keys()
    for half in halves:  # each has some of the kinds that must all be killed
        assert {mutant.kind for mutant in half} >= set(tool.ALL_KILLED)
