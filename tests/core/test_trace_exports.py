"""The events of a trace as a file for Perfetto and chrome://tracing, and as a DataFrame."""

import copy
import json
import pickle
import time
from collections import Counter

import pytest

import managedmem
from canned_recorder import MONOTONIC, MS, NOT_A_BUFFER, Canned
from constants import MIB, PAGE
from managedmem import Device, Host
from programs import run_python

# The Trace Event Format: the fields that each kind of event must have, and those it may have.
PLACE = {"ph", "name", "pid", "tid"}
FIELDS = {
    "X": (PLACE | {"cat", "ts", "dur"}, {"args"}),
    "C": (PLACE | {"ts", "args"}, set()),
    "i": (PLACE | {"cat", "ts", "s"}, {"args"}),
    "M": (PLACE | {"args"}, set()),
    "s": (PLACE | {"cat", "ts", "id"}, set()),
    "f": (PLACE | {"cat", "ts", "id", "bp"}, set()),
}
METADATA = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}


def read(path):
    """The events of a file, by kind, once they have been held to the format."""
    found = json.loads(path.read_text(encoding="utf-8"))
    assert set(found) == {"displayTimeUnit", "baseTimeNanoseconds", "otherData", "traceEvents"}
    events = {kind: [] for kind in FIELDS}
    for event in found["traceEvents"]:
        needed, allowed = FIELDS[event["ph"]]
        assert needed <= set(event) <= needed | allowed, event
        assert all(isinstance(event[name], int) and event[name] > 0 for name in ("pid", "tid"))
        assert all(event.get(name, 0) >= 0 for name in ("ts", "dur"))
        assert isinstance(event["name"], str)
        events[event["ph"]].append(event)
    check_values(events)
    check_nesting(events["X"])
    return events


def check_values(events):
    for event in events["M"]:
        assert set(event["args"]) == {METADATA[event["name"]]}
    assert {event["s"] for event in events["i"]} <= {"g", "p", "t"}
    for event in events["C"]:
        assert all(isinstance(value, int) for value in event["args"].values())
    ends = {event["id"]: event for event in events["f"]}
    assert {event["id"] for event in events["s"]} == set(ends)
    for event in events["s"]:
        end = ends[event["id"]]
        assert (event["name"], event["cat"]) == (end["name"], end["cat"])
        assert end["bp"] == "e"
        assert event["ts"] <= end["ts"]


HALF_A_NANOSECOND = 5e-4  # in microseconds, more than an error of a sum of float


def check_nesting(slices):
    """Slices of one row must lie in each other or apart."""
    rows = {}
    for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
        around = rows.setdefault(event["tid"], [])
        while around and around[-1] <= event["ts"] + HALF_A_NANOSECOND:
            around.pop()
        end = event["ts"] + event["dur"]
        assert not around or end <= around[-1] + HALF_A_NANOSECOND, event
        around.append(end)


def names(events):
    return {
        event["tid"]: event["args"]["name"]
        for event in events["M"]
        if event["name"] == "thread_name"
    }


class TestChromeTrace:
    @pytest.fixture
    def written(self, traced, tmp_path):
        def write(canned, **options):
            path = tmp_path / "trace.json"
            traced(canned, **options).to_chrome_trace(path)
            return read(path)

        return write

    def test_moves(self, written):
        canned = Canned()
        first, second = canned.memory("a", MIB), canned.memory("b", MIB)
        canned.move(first, MIB, "to_device", "requested", ms=2)
        canned.move(second, PAGE, "to_host", "fault", offset=2 * PAGE, ms=3)
        events = written(canned)
        start = MONOTONIC / 1e3
        rows = names(events)
        assert [rows[event["tid"]] for event in events["X"]] == ["a", "b"]
        assert [(e["name"], e["cat"], e["ts"], e["dur"]) for e in events["X"]] == [
            ("to Device(0), requested", "move", start, 2000.0),
            ("to Host(), fault", "move", start + 2000, 3000.0),
        ]
        assert events["X"][1]["args"] == {
            "bytes": PAGE,
            "offset": 2 * PAGE,
            "from": "Device(0)",
            "to": "Host()",
            "cause": "fault",
        }

    def test_zero_of_the_times_is_named(self, traced, tmp_path):
        path = tmp_path / "trace.json"
        traced(Canned()).to_chrome_trace(path)
        base = json.loads(path.read_text())["baseTimeNanoseconds"]
        assert abs(base + time.perf_counter_ns() - time.time_ns()) < 1e9

    def test_moves_at_the_same_time_take_more_rows(self, written):
        canned = Canned()
        memory = canned.memory("a", 8 * MIB)
        for _ in range(3):
            canned.move(memory, MIB, "to_device", ms=5)
            canned.time -= 3 * MS
        events = written(canned)
        rows = names(events)
        assert [rows[event["tid"]] for event in events["X"]] == ["a", "a (2)", "a (3)"]

    def test_faults_are_counted_by_ms(self, written):
        canned = Canned()
        memory = canned.memory("a", MIB)
        canned.faults(memory, 3, "host")
        canned.time += MS
        canned.faults(memory, 2, "host").faults(memory, 4, "device")
        events = written(canned)
        start = MONOTONIC / 1e3
        found = {(e["name"], e["ts"] - start): e["args"]["faults"] for e in events["C"]}
        assert found == {
            ("a: host faults per ms", 0): 3,
            ("a: host faults per ms", 1000): 2,
            ("a: host faults per ms", 2000): 0,
            ("a: device faults per ms", 1000): 4,
            ("a: device faults per ms", 2000): 0,
        }

    def test_copies_are_summed_by_ms(self, written):
        canned = Canned()
        memory = canned.memory("a", MIB)
        for page in range(5):
            canned.add("duplicate", memory, PAGE, page * PAGE, ms=0)
        events = written(canned)
        assert [event["args"] for event in events["C"]] == [{"bytes": 5 * PAGE}, {"bytes": 0}]

    def test_call_has_an_arrow_to_its_first_move(self, written):
        canned = Canned()
        first, second = canned.memory("a", 4 * MIB), canned.memory("b", 4 * MIB)
        canned.add("call", first, 4 * MIB, cause=1, destination=0)
        canned.add("call", second, 4 * MIB, cause=1, destination=0)
        canned.move(second, 2 * MIB, "to_device")
        canned.move(second, 2 * MIB, "to_device", offset=2 * MIB)
        canned.move(first, 2 * MIB, "to_device", "fault")
        canned.move(first, 2 * MIB, "to_host")
        events = written(canned)
        calls = [event for event in events["X"] if event["cat"] == "call"]
        moves = [event for event in events["X"] if event["cat"] == "move"]
        assert [call["args"]["memories"] for call in calls] == [["a"], ["b"]]
        assert {call["name"] for call in calls} == {"prefetch Device(0)"}
        assert len(events["s"]) == 1
        assert [events["s"][0][at] for at in ("tid", "ts")] == [
            calls[1][at] for at in ("tid", "ts")
        ]
        assert [events["f"][0][at] for at in ("tid", "ts")] == [
            moves[0][at] for at in ("tid", "ts")
        ]

    def test_call_on_several_memories_is_one_slice(self, written):
        canned = Canned()
        memories = [canned.memory(f"m{i}", MIB) for i in range(10)]
        for memory in memories:
            canned.add("call", memory, MIB, cause=1, destination=0, ms=0)
        for memory in memories:
            canned.move(memory, MIB, "to_device")
        events = written(canned)
        (call,) = [event for event in events["X"] if event["cat"] == "call"]
        assert call["args"]["bytes"] == 10 * MIB
        assert call["args"]["memories"] == [*(f"m{i}" for i in range(8)), "..."]
        assert len(events["s"]) == 10

    def test_marks_and_other_events(self, written):
        canned = Canned()
        memory = canned.memory("a", MIB)
        canned.add("thrashing", memory, PAGE)
        canned.add("remote_map", memory, MIB, source=0, destination=-1, extra=3)
        canned.add("throttling", memory, source=0, ms=4)
        canned.part()
        canned.add("eviction", NOT_A_BUFFER, PAGE, source=0, destination=-1)
        events = written(canned)
        assert [(e["name"], e["s"]) for e in events["i"]] == [
            ("thrashing", "t"),
            ("remote map", "t"),
            ("eviction", "t"),
            ("part 0", "p"),
        ]
        assert events["i"][1]["args"]["cause"] == "advice"
        assert [(e["name"], e["dur"]) for e in events["X"]] == [("throttling", 4000.0)]
        assert set(names(events).values()) == {
            "calls of managedmem",
            "a",
            "(freed before it was seen)",
        }

    def test_labels_are_escaped(self, written):
        canned = Canned()
        label = 'a"\\\n<b>\u00e9\U0001f600'
        canned.move(canned.memory(label, MIB), MIB, "to_device")
        assert label in names(written(canned)).values()

    def test_slice_has_its_own_events(self, traced, tmp_path):
        canned = Canned()
        memory = canned.memory("a", MIB)
        canned.move(memory, MIB, "to_device").part().move(memory, MIB, "to_host", "fault")
        trace = traced(canned)
        trace.slices[1].to_chrome_trace(tmp_path / "end.json")
        assert [e["name"] for e in read(tmp_path / "end.json")["X"]] == ["to Host(), fault"]

    def test_running_trace_leaves_no_file(self, tmp_path):
        trace = managedmem.trace()
        with pytest.raises(RuntimeError, match="has not started"):
            trace.to_chrome_trace(tmp_path / "no.json")
        assert not list(tmp_path.iterdir())

    def test_of_the_driver(self, there_and_back, tmp_path):
        buffer, trace = there_and_back
        trace.to_chrome_trace(tmp_path / "trace.json")
        events = read(tmp_path / "trace.json")
        moved = Counter()
        for event in events["X"]:
            if event["cat"] == "move" and names(events)[event["tid"]].startswith("w"):
                moved[event["args"]["to"]] += event["args"]["bytes"]
        assert moved == {"Device(0)": buffer.nbytes, "Host()": buffer.nbytes}
        assert "prefetch Device(0)" in {e["name"] for e in events["X"] if e["cat"] == "call"}
        assert len(events["s"]) == 1
        faults = sum(e["args"].get("faults", 0) for e in events["C"] if e["name"].startswith("w"))
        assert faults == trace["w"].host_faults + trace["w"].device_faults


@pytest.mark.parametrize("keep", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_trace_is_no_value_to_pickle_or_copy(traced, keep):
    trace = traced(Canned())
    for part in (trace, *trace.slices):
        with pytest.raises(TypeError, match=f"{type(part).__name__} cannot .* to_json"):
            keep(part)


class TestDataFrame:
    @pytest.fixture(autouse=True)
    def pandas(self):
        return pytest.importorskip("pandas", reason="needs pandas")

    @pytest.fixture
    def everything(self, traced):
        """Events of every kind, out of order, with marks, on two memories and on none."""
        canned = Canned()
        first, second = canned.memory("a", MIB), canned.memory("b", 2 * MIB, "foreign")
        canned.add("call", first, MIB, cause=1, destination=0)
        canned.add("call", first, MIB, cause=0, extra=1)
        canned.move(first, MIB, "to_device").faults(second, 3, "host", "write").faults(second, 2)
        canned.time -= 2 * MS
        canned.move(second, PAGE, "to_host", "speculative", offset=PAGE)
        canned.part().part()
        canned.add("remote_map", second, MIB, source=0, destination=-1, extra=3)
        canned.add("throttling", second, source=0, ms=4).add("thrashing", first, PAGE)
        canned.part()
        canned.add("eviction", NOT_A_BUFFER, PAGE, source=0, destination=0x7FFF)
        canned.move(first, PAGE, "between_devices", "unknown")
        return traced(canned)

    def rows(self, pandas, frame):
        """The rows as tuples like `TraceEvent`, with texts for places, and the slice."""
        for row in frame.itertuples(index=False):
            yield tuple(None if pandas.isna(value) else value for value in row)

    def events(self, part):
        for event in part.events():
            places = [None if p is None else str(p) for p in (event.source, event.destination)]
            yield (*event[:8], *places, event.thread)

    @pytest.mark.parametrize("index", [None, 0, 1, 2, 3])
    def test_rows_are_the_events(self, pandas, everything, index):
        part = everything if index is None else everything.slices[index]
        found = list(self.rows(pandas, part.to_pandas()))
        expected = list(self.events(part))
        assert [row[2:-1] for row in found] == [event[2:] for event in expected]
        for row, event in zip(found, expected, strict=True):
            assert row[:2] == pytest.approx(event[:2], abs=1e-9)

    def test_slices(self, everything):
        frame = everything.to_pandas()
        counts = [len(list(part.events())) for part in everything.slices]
        found = frame["slice"].value_counts(sort=False)
        assert [found.get(part.label, 0) for part in everything.slices] == counts
        assert list(frame["slice"].cat.categories) == ["part 0", "part 1", "part 2", "end"]

    def test_types(self, everything):
        types = {name: str(kind) for name, kind in everything.to_pandas().dtypes.items()}
        assert types == {
            **dict.fromkeys(("time", "duration"), "float64"),
            **dict.fromkeys(("kind", "cause", "access", "memory"), "category"),
            **dict.fromkeys(("offset", "nbytes"), "int64"),
            **dict.fromkeys(("source", "destination", "slice"), "category"),
            "thread": "Int64",
        }
        assert list(types) == [*managedmem.typing.TraceEvent._fields, "slice"]

    def test_of_nothing(self, traced):
        frame = traced(Canned()).to_pandas()
        assert len(frame) == 0
        assert list(frame) == [*managedmem.typing.TraceEvent._fields, "slice"]

    def test_memories_with_one_label_are_one_category(self, traced):
        canned = Canned()
        for _ in range(3):
            canned.move(canned.memory("a", MIB), MIB, "to_device")
        frame = traced(canned).to_pandas()
        assert list(frame["memory"]) == ["a"] * 3
        assert list(frame["offset"]) == [0] * 3

    def test_sums_are_those_of_the_trace(self, there_and_back):
        buffer, trace = there_and_back
        frame = trace.to_pandas()
        moves = frame[frame.kind == "move"].groupby(["memory", "destination"], observed=True)
        assert moves.nbytes.sum()["w"].to_dict() == {
            str(Device(0)): buffer.nbytes,
            str(Host()): buffer.nbytes,
        }
        faults = frame[frame.kind == "host_fault"]
        assert len(faults) == trace.total.host_faults
        assert faults.thread.notna().all()


@pytest.mark.emulator_only
def test_without_pandas():
    code = """
    import sys
    sys.modules["pandas"] = None
    import managedmem
    with managedmem.trace() as trace:
        pass
    try:
        trace.to_pandas()
    except ImportError as error:
        print(error.name, error)
    """
    assert run_python(code).stdout == (
        'pandas to_pandas() needs pandas, which is not installed: pip install "managedmem[plot]"\n'
    )
