"""tests/gcov/gate.py refuses reports below its targets, and exceptions that are wrong."""

import importlib.util
import tomllib

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
    return {
        "line_number": number,
        "function_name": function,
        "count": count,
        "branches": branches,
    }


def judge(*lines, exceptions=(), name="memory/act.c", copies=0):
    """The gate's judgement of a report with these lines, and with `copies` others that run."""
    others = [line(8, 1, 1, 1) for _ in range(copies)]
    files = [{"file": f"src/_managedmem/{name}", "lines": list(lines)}]
    files += [
        {"file": f"src/_managedmem/other{n}.c", "lines": [one]} for n, one in enumerate(others)
    ]
    return gate.judge({"files": files}, exceptions, lambda _: "\n".join(SOURCE))


def exception(**changes):
    entry = {"file": "memory/act.c", "function": "act", "reason": "it cannot happen here"}
    return {**entry, **changes}


ALL = [line(2, 9), line(4, 9, 5, 4), line(5, 5), line(7, 4)]
IDLE = [line(2, 9), line(4, 9, 0, 9), line(5, 0), line(7, 9)]
BOTH = {"lines": ["return 1;"], "branches": ["if (n) {"]}


def test_all_that_runs_passes():
    shown, wrong = judge(*ALL)
    assert wrong == []
    assert shown == [
        "lines: 100.00 % of 4; 0.00 % are exceptions",
        "branches: 100.00 % of 2; 0.00 % are exceptions",
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
    assert (shown[0], wrong) == ("lines: 100.00 % of 3; 0.00 % are exceptions", [])
    partly = line(4, 9, 0, 9)
    partly["branches"][0] |= excluded
    shown, wrong = judge(*ALL[:1], partly, *ALL[2:])
    assert (shown[1], wrong) == ("branches: 100.00 % of 1; 0.00 % are exceptions", [])


def test_a_line_counts_if_one_of_its_functions_runs():
    """A function of a header is compiled into several files."""
    _, wrong = judge(*ALL, line(5, 0, function="copy of act"), line(4, 0, 0, 0))
    assert wrong == []


class TestExceptions:
    def test_count_neither_way(self):
        shown, wrong = judge(*IDLE, exceptions=[exception(**BOTH)], copies=100)
        assert wrong == []
        assert shown == [
            "lines: 100.00 % of 103; 0.96 % are exceptions",
            "branches: 100.00 % of 201; 0.50 % are exceptions",
        ]

    def test_that_are_too_many(self):
        _, wrong = judge(*IDLE, exceptions=[exception(**BOTH)], copies=50)
        assert wrong == ["lines: 1.85 % are exceptions, 1.5 % may be"]

    @pytest.mark.parametrize(
        ("changes", "problem"),
        [
            ({"lines": ["return 0;"]}, "'return 0;': the line runs"),
            ({"lines": ["return 2;"]}, "'return 2;': there is no such line"),
            ({"branches": ["return 0;"]}, "'return 0;': all branches are taken"),
            ({"branches": ["if (m) {"]}, "'if (m) {': there is no such line"),
            ({"function": "react", **BOTH}, "there is no such function"),
            ({"file": "memory/react.c", **BOTH}, "there is no such function"),
            ({"reason": " ", **BOTH}, "it has no reason"),
        ],
    )
    def test_that_are_wrong(self, changes, problem):
        """Stale ones too: their lines have come to run, or were changed."""
        _, wrong = judge(*IDLE, exceptions=[exception(**changes)], copies=300)
        assert len(wrong) == 1 and wrong[0].endswith(problem)

    def test_that_are_reached_in_some_runs(self):
        """By threads that race: the exception is right either way, but not without its line."""
        _, wrong = judge(*ALL, exceptions=[exception(**BOTH, sometimes=True)])
        assert wrong == []
        gone = exception(lines=["return 2;"], sometimes=True)
        assert len(judge(*ALL, exceptions=[gone])[1]) == 1

    def test_of_this_project_are_about_its_files(self):
        sources = FOLDER.parents[1] / "src" / "_managedmem"
        for one in tomllib.loads((FOLDER / "exceptions.toml").read_text()).get("exception", []):
            text = (sources / one["file"]).read_text()
            lines = {line.strip() for line in text.splitlines()}
            assert {*one.get("lines", []), *one.get("branches", [])} <= lines, one
            assert one["reason"] and one["function"] in text, one


def test_the_command_fails_and_says_why(tmp_path, monkeypatch, capsys):
    (tmp_path / "src" / "_managedmem").mkdir(parents=True)
    (tmp_path / "src" / "_managedmem" / "act.c").write_text("\n".join(SOURCE))
    (tmp_path / "none.toml").touch()
    monkeypatch.setattr(gate, "ROOT", tmp_path)
    for lines, status in ((ALL, 0), (IDLE, 1)):
        report = {"files": [{"file": "src/_managedmem/act.c", "lines": lines}]}
        (tmp_path / "report.json").write_text(gate.json.dumps(report))
        assert gate.main(tmp_path / "report.json", tmp_path / "none.toml") == status
    assert "FAILED: lines:  75.00 % of 4 run, 99.0 % are needed" in capsys.readouterr().err
