"""``python -m managedmem merge``: the traces of several ranks in one file for Perfetto."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import managedmem

pytestmark = pytest.mark.emulator_only

PARENT = str(Path(managedmem.__file__).resolve().parents[1])
HEADER = (
    '{"displayTimeUnit":"ms","baseTimeNanoseconds":5,"otherData":{"clock":"c"},"traceEvents":[\n'
)
PROGRAM = """
import ctypes, sys, managedmem
device = managedmem.Device(int(sys.argv[1]))
device.set_current()
buf = managedmem.empty(1 << 20)
ctypes.memset(buf.handle, 1, buf.nbytes)
buf.prefetch(device)
"""


def started(*arguments, cwd, **variables):
    environment = {**os.environ, "MANAGEDMEM_DRIVER": "emulator", "PYTHONPATH": PARENT}
    command = [sys.executable, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env={**environment, **variables}, **pipes)


def merged(*arguments, cwd, **variables):
    process = started("-m", "managedmem", "merge", *arguments, cwd=cwd, **variables)
    out, error = process.communicate(timeout=60)
    return process.returncode, out, error


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The traces of two ranks at once, one started by torchrun's variables, one by Open MPI's."""
    path = tmp_path_factory.mktemp("ranks")
    (path / "program.py").write_text(PROGRAM)
    options = ["-m", "managedmem", "trace", "--chrome", "events-{rank}.json", "program.py"]
    ranks = [
        started(*options, "0", cwd=path, RANK="0"),
        started(*options, "1", cwd=path, OMPI_COMM_WORLD_RANK="1"),
    ]
    for rank in ranks:
        _, error = rank.communicate(timeout=60)
        assert rank.returncode == 0, error
    return path


def read(path):
    return json.loads(path.read_text())


def named(found, name):
    return {e["pid"]: e["args"] for e in found["traceEvents"] if e["name"] == name}


def moves(found):
    return [event for event in found["traceEvents"] if event.get("cat") == "move"]


def test_each_rank_is_a_process_with_its_own_events(folder):
    assert merged("all.json", "events-1.json", "events-0.json", cwd=folder) == (
        0,
        "written: all.json\n",
        "",
    )
    found = read(folder / "all.json")
    one, other = (read(folder / f"events-{rank}.json") for rank in (1, 0))
    second, first = (args["name"] for args in named(found, "process_name").values())
    host = platform.node()
    assert first.startswith(f"rank 0 on {host}, Device(0): managed memory, process ")
    assert second.startswith(f"rank 1 on {host}, Device(1): managed memory, process ")
    assert [args["sort_index"] for args in named(found, "process_sort_index").values()] == [1, 0]
    assert len({event["pid"] for event in found["traceEvents"]}) == 2
    assert len(moves(found)) == len(moves(one)) + len(moves(other)) > 1
    for whole, alone in zip(moves(found), moves(one) + moves(other), strict=True):
        assert (whole["ts"], whole["name"], whole["args"]) == (
            alone["ts"],
            alone["name"],
            alone["args"],
        )
    assert found["baseTimeNanoseconds"] == one["baseTimeNanoseconds"]
    assert [each["rank"] for each in found["otherData"]["files"]] == [1, 0]


def test_arrows_stay_within_their_rank(folder):
    merged("arrows.json", "events-0.json", "events-1.json", cwd=folder)
    ends = {}
    for event in read(folder / "arrows.json")["traceEvents"]:
        if event["ph"] in "sf":
            ends.setdefault(event["id"], []).append((event["ph"], event["pid"]))
    assert len(ends) >= 2
    assert all(isinstance(number, int) for number in ends)  # Perfetto drops those of other text
    for (begin, one), (end, other) in ends.values():
        assert (begin, end) == ("s", "f")
        assert one == other


def test_rows_of_ranks_have_numbers_of_their_own(folder):
    merged("rows.json", "events-0.json", "events-1.json", cwd=folder)
    rows = {}
    for event in read(folder / "rows.json")["traceEvents"]:
        rows.setdefault(event["tid"], set()).add(event["pid"])
    assert {len(pids) for pids in rows.values()} == {1}


def test_times_of_another_host_are_moved_by_its_realtime_clock(folder):
    """Its monotonic clock began an hour later."""
    hour = 3_600_000_000
    text = (folder / "events-1.json").read_text()
    found = json.loads(text)
    base, clock = found["baseTimeNanoseconds"], found["otherData"]["clock"]
    text = text.replace(str(base), str(base + hour * 1000)).replace(clock, "another boot")
    (folder / "far.json").write_text(text)
    merged("hosts.json", "events-0.json", "far.json", cwd=folder)
    expected = hour + (base - read(folder / "events-0.json")["baseTimeNanoseconds"]) / 1e3
    mine = [each for each in moves(read(folder / "hosts.json")) if each["pid"] != 10**9]
    shifts = [a["ts"] - b["ts"] for a, b in zip(mine, moves(found), strict=True)]
    assert shifts == pytest.approx([expected] * len(shifts), abs=0.01)


def test_a_file_without_a_rank_is_merged_too(folder):
    begun = started(
        *("-m", "managedmem", "trace", "--chrome", "alone-{rank}.json", "program.py", "0"),
        cwd=folder,
        **dict.fromkeys(("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"), ""),
    )
    begun.communicate(timeout=60)
    assert merged("two.json", "events-1.json", "alone-0.json", cwd=folder)[0] == 0
    names = [args["name"] for args in named(read(folder / "two.json"), "process_name").values()]
    assert names[0].startswith("rank 1 on ")
    assert names[1].startswith("managed memory, process ")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, "No such file"),
        ("", "not a file of to_chrome_trace()"),
        ('{"traceEvents":[\n', "not a file of to_chrome_trace()"),
        ("half", "has no end"),
        (HEADER.replace("5", '"5"'), "not a file of to_chrome_trace()"),
        (HEADER.replace("displayTimeUnit", "unit"), "not a file of to_chrome_trace()"),
        ("[" * 100_000, "not a file of to_chrome_trace()"),
        (HEADER + '{"ph":"X"}\n]}\n', 'to_chrome_trace() does not write: \'{"ph":"X"}\''),
        (HEADER + '{"ph":"X",\n]}\n', "to_chrome_trace() does not write: "),
        (HEADER + "\udcff", "not a file of to_chrome_trace()"),
    ],
)
def test_what_is_no_trace_leaves_the_target(folder, text, error):
    wrong, target = folder / "wrong.json", folder / "kept.json"
    wrong.unlink(missing_ok=True)
    if text is not None:
        whole = (folder / "events-0.json").read_text()
        text = whole[: whole.rindex("\n]}")] if text == "half" else text
        wrong.write_bytes(text.encode(errors="surrogateescape"))
    target.write_text("as before")
    status, out, said = merged("kept.json", "events-1.json", "wrong.json", cwd=folder)
    assert (status, out) == (1, "")
    assert said.startswith("merge: ") and error in said, said
    assert target.read_text() == "as before"
    assert not list(folder.glob(".*.tmp"))


def test_the_target_can_be_one_of_the_files(folder):
    (folder / "mine.json").write_text((folder / "events-0.json").read_text())
    assert merged("mine.json", "mine.json", "events-1.json", cwd=folder)[0] == 0
    assert len(named(read(folder / "mine.json"), "process_name")) == 2


def test_a_file_beside_the_target_stays(folder):
    """The file that is written first has the name of no other one."""
    beside = folder / "beside.json.part"
    beside.write_text(text := (folder / "events-0.json").read_text())
    assert merged("beside.json", "beside.json.part", "events-1.json", cwd=folder)[0] == 0
    assert len(named(read(folder / "beside.json"), "process_name")) == 2
    assert beside.read_text() == text


def test_merging_needs_no_driver(folder):
    status, out, _ = merged("again.json", "events-0.json", cwd=folder, MANAGEDMEM_DRIVER="/none")
    assert (status, out) == (0, "written: again.json\n")
