"""The measuring code of benchmarks/ works: with tiny counts, on whatever driver is in use.

No time is asserted: on the emulated driver they mean nothing, and on a busy machine little.
"""

import json
import os
import re
import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import managedmem
from benchmarks import __main__ as command
from benchmarks import (
    advice,
    attribution,
    bare,
    batches,
    copies,
    deferring,
    footprint,
    instructions,
    jobs,
    many,
    overhead,
    residency,
    results,
    tracing,
)
from benchmarks import pipeline as pipelines
from benchmarks.measure import BUDGET, KIB, MIB, UNFINISHED, Result, Row, need_room, side_by_side
from benchmarks.report import BEGIN, END, Report, machine, section, table
from managedmem import Device


@pytest.fixture(scope="module")
def bare_calls():
    """The bare calls, which have to be compiled, and need a context."""
    if not shutil.which(os.environ.get("CC", "cc")):
        pytest.skip("no C compiler")
    if not bare.include_folder() or not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("no headers of CUDA or of Python")
    Device(0).set_current()


def needs_discard():
    if managedmem._managedmem._driver_info()["version"] < 13000:
        pytest.skip("the driver has no discard")


def whole(rows, *names):
    """Every row, which has a median for each of these."""
    rows = list(rows)
    assert rows
    for row in rows:
        assert set(names) <= set(row.results), row
        assert all(result.count >= 1 for result in row.results.values())
        assert not row.broken
    return rows


class TestGroups:
    def test_overhead(self, bare_calls):
        rows = whole(overhead.measure(count=5, repetitions=3), "ours")
        assert len({row.operation for row in rows}) == len(overhead.OPERATIONS)
        with_loop = [op for op in overhead.OPERATIONS if op.loop]
        assert sum("bare C" in row.results for row in rows) == len(with_loop)
        assert all(row.results["bare C"].median > 0 for row in rows if "bare C" in row.results)

    def test_batches(self, bare_calls):
        needs_discard()
        rows = whole(batches.measure(2, (4 * KIB,), (1, 3)), "loop", "batch", "ours")
        # One range, three adjacent, three apart; and those between, adjacent and apart.
        assert len(rows) == 5 * len(batches.MOVES)
        assert sum("32 x 2048 KiB" in row.operation for row in rows) == 2 * len(batches.MOVES)
        assert [("one call" in row.results) for row in rows] == [
            "adjacent" in row.operation for row in rows
        ]
        assert all(("plan" in r.results) != r.operation.startswith("discard ") for r in rows)
        assert f"of {len(rows)} cells" in batches.summary(rows)

    def test_copies(self, bare_calls):
        rows = whole(copies.measure(2, (3, 20)), "loop", "ours", "ours, hint")
        assert [row.operation.split()[0] for row in rows] == ["3", "20"] * 2

    def test_many(self, bare_calls):
        needs_discard()
        rows = whole(many.measure(2, (20,)), "ours")
        prefetches = [row for row in rows if row.operation.startswith("prefetch device")]
        assert [row.operation.split()[-1] for row in prefetches] == ["neighbours", "apart"]
        assert all({"bare C", "plan"} <= set(row.results) for row in prefetches)
        assert any("set_preferred_location" in row.operation for row in rows)

    def test_deferring(self):
        rows = whole(deferring.measure(2, (64 * KIB,), MIB), "plain, call", "auto, busy")
        assert [row.operation.split()[-1] for row in rows] == ["device", "host"]

    def test_residency(self, bare_calls):
        rows = whole(residency.measure(2, 6 * MIB), "page map, entries", "ours")
        assert [row.operation for row in rows] == [f"6 MiB {name}" for name in residency.STATES]

    def test_results(self):
        pytest.importorskip("numpy", reason="needs NumPy")
        rows = whole(results.measure(2, (64 * KIB, MIB)), *results.JUDGED, "copy_to", "numpy()")
        assert [row.operation.split()[0] for row in rows] == ["64", "1024"]

    def test_advice(self):
        rows = whole(advice.measure(2, (MIB,)), "set", "set again", "unset")
        assert len({row.operation for row in rows}) == len(rows) == 8

    def test_pipeline(self):
        rows = whole(pipelines.measure(2, (64 * KIB,), 3), "ours, deferred", "ours, plain")
        assert [row.operation.split(", ")[1] for row in rows] == ["loop", "thread in the calls"]

    def test_attribution(self, bare_calls):
        """The program compares the bytes itself."""
        rows = whole(attribution.measure(20_000, 500, 2), "ours")
        assert [row.unit for row in rows] == ["ms", "ms", "ms", "kB"]
        assert all(row.results["ours"].median > 0 for row in rows)

    def test_footprint(self):
        rows = whole(footprint.measure(1, objects=2000), "ours")
        assert {row.unit for row in rows} == {"ms", "kB", "bytes"}

    def test_jobs(self):
        rows = list(jobs.measure(repetitions=2))
        if not rows:
            pytest.skip("needs torch and a GPU")
        whole(rows, "page faults", "pinned copy")

    def test_experts_are_loaded_less_often_than_by_the_latest_use(self):
        rows = {row.operation: row.results for row in command.experts.measure()}
        for router, loads in rows.items():
            ours, least = loads["ours"].median, loads["farthest next use"].median
            assert least < ours < loads["LRU"].median * (0.85 if "skewed" in router else 1.05)

    def test_every_group_is_within_the_budget(self):
        for name, group in command.GROUPS.items():
            assert group.need <= BUDGET
            assert (group.need > 0) == (name != "attribution")  # which needs no GPU

    def test_room_is_asked_for(self, monkeypatch):
        need_room(0)
        with pytest.raises(ValueError, match="above the limit"):
            need_room(BUDGET + 1)
        full = SimpleNamespace(memory_info=SimpleNamespace(free=5 * MIB))
        monkeypatch.setattr(managedmem, "Device", lambda ordinal: full)
        with pytest.raises(RuntimeError, match=r"MiB of free memory, it has 5$"):
            need_room(6 * MIB)


@pytest.fixture(scope="module")
def rows(bare_calls):
    """Those of the group tracing."""
    return list(tracing.measure(2, 1 / 16, (20_000, 500, 1)))


class TestTracing:
    def test_has_a_row_for_each_figure(self, rows):
        whole(rows, "ours")
        assert [row.operation for row in rows[:4]] == [
            "step of prefetches and kernels, 4 x 2 MiB",
            "step of faults, 4 MiB",
            "start of a trace",
            "stop of a trace",
        ]
        assert all({"untraced", "bare queue"} <= set(row.results) for row in rows[:2])
        assert all(set(row.results) == {"bare queue", "ours"} for row in rows[2:4])
        assert [row.operation for row in rows[-3:]] == [
            "index 500 memories",
            "add 20,000 events",
            "memory for that",
        ]

    def test_bytes_are_those_of_arithmetic(self, rows):
        moved = {row.operation: row for row in rows if "difference" in row.results}
        assert len(moved) == len(tracing.PATTERNS)
        for row in moved.values():
            assert row.results["difference"].median == 0, row
            assert row.results["ours"] == row.results["arithmetic"]
        assert moved["bytes: prefetch to the device"].results["ours"].median == 4 * MIB
        assert moved["bytes: prefetch of half of it"].results["ours"].median == 2 * MIB

    def test_a_bare_queue_records(self, bare_calls, buf):
        queue = tracing.BareQueue()
        queue.start()
        buf.prefetch(Device(0))
        Device(0).sync()
        queue.stop()
        assert queue.records >= 1
        with pytest.raises(RuntimeError, match="not open"):
            queue.stop()


class TestBareCalls:
    def test_what_is_raised_comes_through(self, bare_calls):
        with managedmem.Stream() as stream, pytest.raises(ZeroDivisionError):
            bare.call_nanoseconds(stream.handle, lambda: 1 / 0)

    def test_error_of_the_driver(self, bare_calls, buf):
        target = bare.Target(buf.handle, 0, 0, 0)
        with pytest.raises(RuntimeError, match="CUDA error"):
            bare.nanoseconds("read_mostly", target, 1)


class TestSideBySide:
    def test_failing_peer_is_left_out_and_named(self):
        def fails(count):
            raise OSError("not today\nsecond line")

        contenders = {"ours": lambda n: 7.0, "CuPy": fails}
        row = side_by_side("op", contenders, count=1, repetitions=2)
        assert set(row.results) == {"ours"}
        assert row.failed == {"CuPy": "OSError: not today"}
        assert not row.broken
        text = section(command.Group("Title", "About.", list), [row])
        assert "CuPy cannot: OSError: not today (op)" in text

    @pytest.mark.parametrize("later", [False, True])
    def test_ours_must_not_fail(self, later, capsys):
        """The others are measured all the same."""
        runs = []

        def fails(count):
            runs.append(count)
            if not later or len(runs) == 3:
                raise OSError("broken")
            return 1.0

        contenders = {"bare C": lambda n: 5.0, "ours": fails, "CuPy": lambda n: 7.0}
        row = side_by_side("op", contenders, count=1, repetitions=4)
        assert {name: found.count for name, found in row.results.items()} == {
            "bare C": 4,
            "CuPy": 4,
        }
        assert row.failed == {"ours": "OSError: broken"}
        assert row.broken
        assert len(runs) == (3 if later else 1)
        assert "Traceback" in capsys.readouterr().err

    def test_median_and_spread(self):
        found = Result.of([1.0, 2.0, 3.0, 4.0, 100.0])
        assert (found.median, found.count) == (3.0, 5)
        assert found.spread > 0
        assert Result.of([5.0]) == Result(5.0, 0.0, 1)


ROWS = [
    Row("first", {"bare C": Result(50.0, 0.1, 9), "ours": Result(80.0), "CuPy": Result(160.0)}),
    Row("second", {"ours": Result(2.5e3)}, unit="us", note="a note", failed={"CuPy": "why"}),
]


class TestReport:
    def test_json_round_trip(self, tmp_path):
        path = tmp_path / "results.json"
        report = Report(machine(), {"overhead": ROWS})
        report.write(path)
        assert Report.read(path) == report
        assert json.loads(path.read_text())["machine"]["gpu"] == Device(0).name

    def test_table(self):
        lines = table(ROWS).splitlines()
        head = "| operation | bare C | ours | CuPy | ours - bare | best peer / ours | unit | note |"
        assert lines[0] == head
        assert lines[2] == "| first | 50 ±10% | 80 | 160 | 30 | 2.0 | ns |  |"
        assert lines[3] == "| second | - | 2.5 | - | - | - | us | a note |"


def counts(*values):
    """A report of instructions, one operation for each value."""
    rows = [Row(f"op{i}", {"ours": Result(v)}, "instructions") for i, v in enumerate(values)]
    return Report({"date": "2026-01-01"}, {"instructions": rows})


class TestInstructions:
    def test_growth_is_caught(self, capsys):
        assert instructions.compare(counts(1000, 500), counts(1000, 551)) == 1
        assert "551  op1  GREW" in capsys.readouterr().out

    def test_emulated_driver_is_left_out(self):
        emulator = "/somewhere/" + instructions.EMULATOR
        lines = [
            "events: Ir",
            "ob=/lib/_managedmem.abi3.so",
            "fn=mm_prefetch",
            "10 100",
            f"cob={emulator}",
            "cfn=cuMemPrefetchAsync_v2",
            "calls=2 20",
            "11 700",  # with what malloc took below it
            "cfn=mm_other",
            "calls=1 5",
            "12 40",
            "fn=mm_other",
            "5 40",
            f"ob={emulator}",
            "fn=cuMemPrefetchAsync_v2",
            "20 300",
            "cfn=helper",
            "calls=1 30",
            "21 150",
            "cob=/lib/libc.so.6",
            "cfn=malloc",
            "calls=1 7",
            "22 250",
            "fn=helper",
            "30 150",
            "ob=/lib/libc.so.6",
            "fn=malloc",
            "7 250",
            "totals: 840",
        ]
        assert instructions.without_emulator(iter(lines)) == 140

    def test_statements_all_run(self):
        with managedmem.Stream() as stream:
            for code, size in instructions.statements().values():
                names = overhead.own_names(size, stream)
                with names["buf"]:
                    exec(code, names)


class TestProgress:
    """A run says what it does, keeps what is finished, and goes on after a failure."""

    @pytest.fixture
    def run(self, monkeypatch, tmp_path):
        """Runs the command with two groups in place of those of any driver; status and file."""
        path = tmp_path / "results.json"

        def start(**groups):
            for name, measure in groups.items():
                group = replace(command.GROUPS[name], measure=measure, summary=None)
                monkeypatch.setitem(command.ALL_GROUPS, name, group)
            return command.main([*groups, "--json", str(path)]), path

        return start

    def test_each_row_is_said_when_it_is_done(self, run, capsys):
        said = []

        def measure():
            for row in ROWS:
                yield row
                said.append(capsys.readouterr().err)

        assert run(attribution=measure)[0] == 0
        assert said[0].splitlines()[0] == "attribution: Events of a trace"
        for text, operation in zip(said, ("first", "second"), strict=True):
            assert re.fullmatch(rf"  {operation}: \d+\.\d s", text.splitlines()[-1])
        assert re.fullmatch(r"attribution: \d+ s in all\n", capsys.readouterr().err)

    def test_groups_are_kept_as_soon_as_they_are_done(self, run):
        path, kept = None, []

        def measure():
            yield ROWS[0]
            kept.append(Report.read(path).groups)

        _, path = run(attribution=lambda: ROWS)
        _, path = run(attribution=lambda: ROWS[:1], tracing=measure)
        assert kept == [{"attribution": ROWS[:1]}]
        assert Report.read(path).groups == {"attribution": ROWS[:1], "tracing": ROWS[:1]}
        assert [each.name for each in path.parent.iterdir()] == [path.name]

    def test_others_go_on_after_a_group_that_fails(self, run, capsys):
        def measure():
            yield ROWS[0]
            raise OSError("no more")

        status, path = run(attribution=measure, tracing=lambda: ROWS)
        assert status == 1
        rest = Row(UNFINISHED, {}, note="OSError: no more")
        assert Report.read(path).groups == {"attribution": [ROWS[0], rest], "tracing": ROWS}
        out, err = capsys.readouterr()
        assert "not finished: OSError: no more" in out
        assert "Traceback" in err
        line = "benchmarks: failed: attribution: not finished: OSError: no more"
        assert err.splitlines()[-1] == line


class TestCommand:
    def test_read_prints_and_compares(self, tmp_path, capsys):
        for name, value in (("before", 100), ("after", 900)):
            counts(value).write(tmp_path / name)
        report = Report(machine(), counts(900).groups)
        report.write(tmp_path / "after")
        arguments = ["--read", str(tmp_path / "after"), "--against", str(tmp_path / "before")]
        assert command.main(arguments) == 1
        text = capsys.readouterr().out
        assert Device(0).name in text
        assert "| op0 | 900 | instructions |  |" in text

    def test_tables_are_put_into_a_page(self, tmp_path):
        page, results = tmp_path / "page.md", tmp_path / "results.json"
        Report(machine(), {"overhead": ROWS}).write(results)
        page.write_text(f"Before.\n{BEGIN}\nold\n{END}\nAfter.\n")
        for _ in range(2):
            assert command.main(["--read", str(results), "--into", str(page)]) == 0
            text = page.read_text()
            assert text.startswith(f"Before.\n{BEGIN}\n\n")
            assert text.endswith(f"\n{END}\nAfter.\n")
            assert text.count("| first | 50 ±10% |") == 1
            assert "old" not in text
        page.write_text(f"{END}{BEGIN}")
        with pytest.raises(SystemExit, match="lacks the lines"):
            command.main(["--read", str(results), "--into", str(page)])

    @pytest.mark.emulator_only
    def test_times_of_the_emulated_driver_are_refused(self):
        for names in (["overhead"], ["tracing", "overhead"], []):
            with pytest.raises(SystemExit, match=r"mean nothing.*attribution, captured, diffusion"):
                command.main(names)

    @pytest.mark.emulator_only
    def test_groups_that_the_emulated_driver_runs_are_marked(self, monkeypatch, tmp_path, capsys):
        group = replace(command.GROUPS["tracing"], measure=lambda: ROWS, summary=None)
        monkeypatch.setitem(command.ALL_GROUPS, "tracing", group)
        path = tmp_path / "results.json"
        assert command.main(["tracing", "--json", str(path)]) == 0
        assert "(EMULATED)" in capsys.readouterr().out
        found = json.loads(path.read_text())
        assert found["machine"]["note"] == "Emulated driver: times mean nothing."
        assert list(found["groups"]) == ["tracing"]

    def test_plot(self, tmp_path):
        pytest.importorskip("matplotlib")
        bars = [Row("a job", {"page faults": Result(9e6, 0.1), "prefetch": Result(3e6)}, "us")]
        lines = [
            Row(f"prefetch {64 << i} KiB to the {where}", dict.fromkeys(LINES, Result(9e3)), "us")
            for where in ("device", "host")
            for i in (1, 0)
        ]
        report = Report(machine(), {"deferring": lines, "jobs": bars})
        report.write(tmp_path / "results.json")
        picture = tmp_path / "picture.svg"
        arguments = ["--read", str(tmp_path / "results.json"), "--plot", str(picture)]
        assert command.main(arguments) == 0
        assert "<svg" in picture.read_text()


LINES = ("plain, call", "plain, end", "auto, call", "auto, end")
