"""tests/gcov/gate.py refuses reports below its targets, and marks that are wrong."""

import importlib.util

import pytest

from paths import TESTS

FOLDER = TESTS / "gcov"
SOURCE = [
    "int",
    "act(int n)",
    "{",
    "    if (n) {",
    "        return 1;",
    "    }",
    "    return 0;",
    "}",
]


def load_gate():
    spec = importlib.util.spec_from_file_location("coverage_gate", FOLDER / "gate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gate = load_gate()


def line(number, count, *branches, function="act"):
    branches = [{"branchno": n, "count": count} for n, count in enumerate(branches)]
    return {"line_number": number, "function_name": function, "count": count, "branches": branches}


def judge(*lines, mark="", copies=0):
    """The gate's judgement of a report with these lines, and with `copies` others that run."""
    others = [line(8, 1, 1, 1) for _ in range(copies)]
    files = [{"file": "src/_managedmem/memory/act.c", "lines": list(lines)}]
    files += [
        {"file": f"src/_managedmem/other{n}.c", "lines": [one]} for n, one in enumerate(others)
    ]
    source = "\n".join(SOURCE)
    marked = source.replace("{\n        return", f"{{{mark}\n        return")
    return gate.judge({"files": files}, lambda name: marked if "act.c" in name else source)


ALL = [line(2, 9), line(4, 9, 5, 4), line(5, 5), line(7, 4)]
IDLE = [line(2, 9), line(4, 9, 0, 9), line(5, 0), line(7, 9)]


def test_all_that_runs_passes():
    shown, wrong = judge(*ALL)
    assert wrong == []
    assert shown == [
        "lines: 100.00 % of 4; 0.00 % are marked",
        "branches: 100.00 % of 2; 0.00 % are marked",
    ]


def test_what_does_not_run_is_named():
    shown, wrong = judge(*IDLE)
    assert shown[:3] == [
        "memory/act.c: lines  75.00 % of 4, branches  50.00 % of 2",
        "    lines that do not run: 5",
        "    branches that are not taken: 4",
    ]
    assert wrong == [
        "lines:  75.00 % of 4 run, 99.0 % are needed",
        "branches:  50.00 % of 2 run, 94.0 % are needed",
    ]


def test_what_gcovr_leaves_out():
    excluded = {"gcovr/excluded": True}
    shown, wrong = judge(*ALL[:3], line(7, 0, 0, 0) | excluded)
    assert (shown[0], wrong) == ("lines: 100.00 % of 3; 0.00 % are marked", [])
    partly = line(4, 9, 0, 9)
    partly["branches"][0] |= excluded
    shown, wrong = judge(*ALL[:1], partly, *ALL[2:])
    assert (shown[1], wrong) == ("branches: 100.00 % of 1; 0.00 % are marked", [])


def test_a_line_counts_if_one_of_its_functions_runs():
    """A function of a header is compiled into several files."""
    _, wrong = judge(*ALL, line(5, 0, function="copy of act"), line(4, 0, 0, 0))
    assert wrong == []


@pytest.mark.parametrize("mark", [" /* raced */", " /* unreached: n is 0 */"])
class TestMarks:
    def test_count_neither_way(self, mark):
        shown, wrong = judge(*IDLE, mark=mark, copies=100)
        assert wrong == []
        assert shown == [
            "lines: 100.00 % of 103; 0.96 % are marked",
            "branches: 100.00 % of 201; 0.50 % are marked",
        ]

    def test_that_are_too_many(self, mark):
        _, wrong = judge(*IDLE, mark=mark, copies=50)
        assert wrong == ["lines: 1.85 % are marked, 1.5 % may be"]

    def test_of_code_that_runs(self, mark):
        lines = [] if "raced" in mark else [4, 5]
        words = "runs: take out its mark, 'unreached: n is 0'"
        assert judge(*ALL, mark=mark)[1] == [f"memory/act.c:{n} {words}" for n in lines]


def test_the_command_fails_and_says_why(tmp_path, monkeypatch, capsys):
    (tmp_path / "src" / "_managedmem").mkdir(parents=True)
    (tmp_path / "src" / "_managedmem" / "act.c").write_text("\n".join(SOURCE))
    monkeypatch.setattr(gate, "ROOT", tmp_path)
    for lines, status in ((ALL, 0), (IDLE, 1)):
        report = {"files": [{"file": "src/_managedmem/act.c", "lines": lines}]}
        (tmp_path / "report.json").write_text(gate.json.dumps(report))
        assert gate.main(tmp_path / "report.json") == status
    assert "FAILED: lines:  75.00 % of 4 run, 99.0 % are needed" in capsys.readouterr().err
