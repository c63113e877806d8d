"""tools/mutants.py: the list fits the sources, wrong lists are refused, survivors are counted.

The mutants themselves run in .ci/run mutants, where a comment shows that a change without effect
survives.
"""

import importlib

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
        assert {m.file.split("/")[2] for m in mutants} == {"driver", "memory", "trace", "python"}

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


def test_the_choice_is_fixed_by_the_seed(proposer):
    shares = dict.fromkeys(proposer.SHARES, 2)
    assert proposer.chosen(5, shares) == proposer.chosen(5, shares)
    assert proposer.chosen(5, shares) != proposer.chosen(6, shares)
    files = [entry[2] for entry in proposer.chosen(5, dict.fromkeys(shares, 10))]
    assert len(set(files)) > 25
