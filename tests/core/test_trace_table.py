"""The table and the HTML of a trace, of events that the tests write down."""

import ctypes
import html.parser
import json
import re
import sys

import pytest

import managedmem
from canned_recorder import MONOTONIC, MS, NOT_A_BUFFER, OTHER, RAW, Canned
from constants import KIB, MIB, PAGE
from managedmem import Device, Host, _trace_memories
from managedmem._trace_table import share_text
from managedmem._units import count_text, size_text, wrapped

GIB = 1 << 30


@pytest.fixture
def pattern():
    """Memories with all that a table shows."""
    canned = Canned(length_ms=3214)
    weights = canned.memory("weights", 512 * MIB)
    activations = canned.memory("activations #4", 96 * MIB)
    cache = canned.memory("kv cache (foreign)", 64 * MIB, "foreign")
    canned.move(weights, 512 * MIB, "to_device")
    for _ in range(20):
        canned.move(activations, 96 * MIB, "to_device", "fault")
        canned.move(activations, 96 * MIB, "to_host", "fault")
    canned.faults(activations, 24_576, "host").faults(activations, 3_100)
    canned.add("thrashing", activations, 64 * KIB)
    canned.move(cache, 12 * MIB, "to_device", "access_counters")
    canned.faults(cache, 192).add("remote_map", cache, 64 * MIB, source=0, destination=-1)
    return canned


TABLE = """\
trace of 3.214 s, source kernel (/dev/nvidia-uvm-tools, layout 1), complete
                                to device          to host           faults     other
memory                size   moved  requested  moved  requested   host  device
activations #4       96.0M    1.9G         0%   1.9G         0%  24.6k    3.1k  thrashing 64.0K
weights             512.0M  512.0M       100%      0          -      0       0
kv cache (foreign)   64.0M   12.0M         0%      0          -      0     192  remote 64.0M
total                         2.4G        21%   1.9G         0%  24.6k    3.3k

activations #4 went to the device and back 20 times (1.9G each way) by faults.
    No fault of the device was a write. MigrationPolicy.read_duplicated() would copy once if it is
    only read; else prefetch it before each use.

activations #4: several processors compete for the same pages: 64.0K thrashed.
    Set preferred_location to the processor that uses it most, and add the other to accessed_by,
    which then reaches it in place."""


def test_table(traced, pattern):
    trace = traced(pattern)
    assert str(trace) == TABLE
    assert trace.summary() == TABLE
    assert repr(trace) == "<Trace, ended, source kernel>"


def test_table_without_faults_leaves_their_columns_blank(traced):
    canned = Canned(length_ms=12, source="emulator")
    first = canned.memory("a", 4096)
    canned.move(first, 4096, "to_device", "fault")
    trace = traced(canned, faults=False)
    assert str(trace).splitlines()[1:] == [
        "                 to device          to host          faults",
        "memory  size  moved  requested  moved  requested  host  device",
        "a       4.0K   4.0K         0%      0          -",
        "total          4.0K         0%      0          -",
    ]
    total = trace.total
    assert (total.host_faults, total.device_faults) == (None, None)
    assert (total.host_write_faults, total.device_write_faults) == (None, None)


def test_wrapped_lines_keep_numbers_with_their_units():
    for filler in range(80, 101):
        lines = wrapped(f"{'a' * filler} -96.034 ms of layers-of-1; 3.2 x", "  ", "    ").split(
            "\n"
        )
        text = " ".join(line.strip() for line in lines)
        assert text == f"{'a' * filler} -96.034 ms of layers-of-1; 3.2 x"
        for whole in ("-96.034 ms", "layers-of-1;", "3.2 x"):
            assert any(whole in line for line in lines)


def test_sentences_of_long_labels_are_wrapped(traced):
    canned = Canned()
    first = canned.memory("model.layers.10.self-attention.q_proj-k_proj.weight", MIB)
    canned.move(first, MIB, "to_device", "fault").move(first, MIB, "to_host", "fault")
    canned.move(first, MIB, "to_device", "fault")
    lines = str(traced(canned)).splitlines()
    at = next(i for i, line in enumerate(lines) if " went to the device and back" in line)
    assert max(map(len, lines)) <= 100
    assert lines[at].endswith(" back) by")
    assert lines[at + 1] == "    faults."


def test_table_of_nothing(traced):
    canned = Canned(length_ms=0)
    canned.length = 85_200
    canned.memory("a", 4096)
    assert str(traced(canned)).splitlines() == [
        "trace of 85.2 us, source kernel (/dev/nvidia-uvm-tools, layout 1), complete",
        "                 to device          to host          faults",
        "memory  size  moved  requested  moved  requested  host  device",
        "total             0          -      0          -     0       0",
    ]


def test_table_without_managed_memory_says_so(traced):
    trace, note = (
        traced(Canned()),
        "No managed memory was seen; ordinary device memory is not traced.",
    )
    assert str(trace).endswith(f"0       0\n\n{note}")
    assert note in trace._repr_html_()
    canned = Canned()
    canned.move(canned.memory("a", 4096), 4096, "to_device")
    assert note not in str(traced(canned))


def test_table_says_what_is_missing(traced):
    canned = Canned(lost=1234, rejected=1, fault_overflows=2, truncated=True, waited=False)
    trace = traced(canned)
    assert (trace.complete, trace.lost, trace.rejected, trace.truncated) == (False, 1234, 1, True)
    text = str(trace)
    assert text.splitlines()[0].endswith(", INCOMPLETE")
    notes = [line for line in text.splitlines() if line.startswith("note: ")]
    assert len(notes) == len(trace.problems) == 5
    assert notes[0].startswith("note: 1,234 events were lost")


def test_many_memories_share_a_row(traced):
    canned = Canned()
    for number in range(1, 101):
        canned.move(canned.memory(f"m{number}", MIB), number * 4096, "to_device")
    lines = str(traced(canned)).splitlines()[3:]
    assert [line.split()[0] for line in lines[:24]] == [
        *(f"m{n}" for n in range(100, 77, -1)),
        "(77",
    ]
    rest = sum(range(1, 78)) * 4096
    assert re.match(rf"\(77 others\) +{rest / MIB:.1f}M +100%", lines[23])
    assert re.match(rf"total +{sum(range(1, 101)) * 4096 / MIB:.1f}M +100%", lines[24])


def test_memories_with_one_label_share_a_row(traced):
    canned = Canned()
    for number in range(3):
        memory = canned.memory("scratch", MIB, born=10 * number + 1, died=10 * number + 5)
        canned.move(memory, 4096, "to_device")
    trace = traced(canned)
    assert [line for line in str(trace).splitlines() if line.startswith("scratch")] == [
        "scratch  3 x 1.0M  12.0K       100%      0          -     0       0"
    ]
    together = trace["scratch"]
    assert together.to_device == 3 * 4096
    assert together.born == pytest.approx(0.001)
    assert together.died == pytest.approx(0.025)
    assert [m.to_device for m in trace.memories] == [4096] * 3


def test_labels_cannot_break_the_table(traced):
    canned = Canned()
    canned.move(canned.memory("a\nb\x1b[31m", MIB), 4096, "to_device")
    canned.move(canned.memory("layers." * 20 + "weight", MIB), 4096, "to_device")
    canned.move(canned.memory("gewöhnlich", MIB), 4096, "to_device")
    lines = str(traced(canned)).splitlines()[3:6]
    assert [line.split()[0] for line in lines] == [
        "a\\nb\\x1b[31m",
        f"layers.layers.la...{('layers.' * 20 + 'weight')[-21:]}",
        "gewöhnlich",
    ]
    assert {line[40:48] for line in lines} == {"  1.0M  "}


def test_unattributed_memory_has_a_row(traced):
    canned = Canned()
    first = canned.memory("", 2 * MIB, "unknown")
    canned.move(first, 2 * MIB, "to_device", "fault")
    trace = traced(canned)
    (event,) = trace.events()
    assert event.memory == f"unknown 2.0M at {canned.memories[first][2]:#x}"
    assert trace.memories == ()
    assert trace.unattributed.to_device == trace.total.to_device == 2 * MIB
    assert trace.unattributed.nbytes == 2 * MIB
    assert "(freed before it was seen)" in str(trace)


def test_system_memory_has_its_name(traced, monkeypatch):
    monkeypatch.setattr(_trace_memories, "_reaches_system_memory", lambda: True)
    memory = bytearray(8 * MIB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) // (2 * MIB) * (2 * MIB)
    canned = Canned()
    gone = canned.memory("", 2 * MIB, "unknown")
    first = canned.memory("", 2 * MIB, "unknown", address=address + 2 * MIB)
    second = canned.memory("", 2 * MIB, "unknown", address=address + 4 * MIB)
    canned.move(first, MIB, "to_device", "fault")
    canned.move(second, MIB, "to_device", "fault")
    canned.move(gone, 4096, "to_device", "fault")
    trace = traced(canned)
    found = trace["(system memory)"]
    assert (found.kind, found.to_device, found.nbytes) == ("system", 2 * MIB, 2 * MIB)
    assert trace.unattributed.to_device == 4096
    assert [event.memory for event in trace.events()][:2] == ["(system memory)"] * 2
    assert re.search(r"^\(system memory\) +2 x 2.0M", str(trace), re.MULTILINE)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (1023, "1023B"),
        (1024, "1.0K"),
        (1024 * 1024 - 1, "1.0M"),
        (64 * MIB, "64.0M"),
        (int(1023.96 * MIB), "1.0G"),
        (3 << 60, "3.0E"),
    ],
)
def test_sizes(number, text):
    assert size_text(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, ""), (0, "0"), (999, "999"), (24_576, "24.6k"), (999_960, "1.0M"), (10**9, "1.0G")],
)
def test_counts(number, text):
    assert count_text(number) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 0, "-"),
        (0, 9, "0%"),
        (1, 1000, "<1%"),
        (209, 1000, "21%"),
        (999, 1000, ">99%"),
        (5, 5, "100%"),
    ],
)
def test_shares(part, whole, text):
    assert share_text(part, whole) == text


# --- sums, memories, events ---------------------------------------------------------------------


def test_sums(traced, pattern):
    trace = traced(pattern)
    total = trace.total
    assert total.to_device == (512 + 20 * 96 + 12) * MIB
    assert total.to_host == 20 * 96 * MIB
    assert total.moved == total.to_device + total.to_host
    assert list(total.by_cause) == [
        *("requested", "fault", "speculative", "eviction", "access_counters"),
        *("host_view", "unknown"),
    ]
    assert total.by_cause["requested"] == (512 * MIB, 0, 0)
    assert total.by_cause["fault"] == (1920 * MIB, 1920 * MIB, 0)
    assert total.by_cause["access_counters"] == (12 * MIB, 0, 0)
    assert (total.host_faults, total.device_faults) == (24_576, 3_292)
    assert total.move_time == pytest.approx(0.042)
    assert repr(trace.unattributed).startswith("<TraceMemory '(unattributed)', nbytes=0")
    assert repr(total).startswith(f"<TraceSums, to_device={total.to_device}, ")
    assert trace["activations #4"].turned_back == 39 * 96 * MIB
    assert trace["weights"].devices == (Device(0),)
    assert repr(trace["weights"]) == (
        f"<TraceMemory 'weights', nbytes={512 * MIB}, to_device={512 * MIB}, move_time=0.001>"
    )
    assert trace.duration == pytest.approx(3.214)
    assert trace.overhead == pytest.approx(250e-6)


def test_unknown_labels_name_the_nearest(traced, pattern):
    trace = traced(pattern)
    with pytest.raises(KeyError, match="no memory named 'weight'; there are: weights, "):
        trace["weight"]
    with pytest.raises(KeyError, match="no memory lived"):
        traced(Canned())["weight"]


def test_unknown_labels_tell_how_many_there_are(traced):
    canned = Canned()
    for number in range(7):
        canned.memory(f"m{number}", MIB)
    with pytest.raises(KeyError, match=r"'layer'; there are: m\d, m\d, m\d, m\d, m\d and 2 more"):
        traced(canned)["layer"]


def test_the_label_of_a_slice_is_no_memory(traced, pattern):
    pattern.part()
    with pytest.raises(KeyError, match=r"'part 0'; .* It is the label of a slice"):
        traced(pattern)["part 0"]


def test_events_are_in_order_and_can_be_selected(traced):
    canned = Canned()
    first, second = canned.memory("a", MIB), canned.memory("b", MIB)
    canned.move(first, 2 * PAGE, "to_device", "fault", offset=PAGE)
    canned.faults(second, 1, "host", "write")
    canned.part()
    canned.add("call", second, MIB, cause=1, destination=0)
    canned.add("call", second, MIB, cause=0, destination=-1, extra=3)
    canned.add("remote_map", second, PAGE, source=0, destination=-1, extra=2)
    canned.add("move", second, PAGE, source=OTHER, destination=0, cause="eviction")
    canned.add("throttling", NOT_A_BUFFER, 1, source=0)
    canned.events[1].reverse()  # the source delivers moves when they have ended
    trace = traced(canned)
    events = list(trace.events())
    assert [e.kind for e in events] == [
        "move",
        "host_fault",
        "mark",
        "call",
        "call",
        "remote_map",
        "move",
        "throttling",
    ]
    times = [e.time for e in events]
    assert times == sorted(times)
    assert times[0] == pytest.approx(MONOTONIC / 1e9)
    move, fault, mark, prefetch, advice, remote, evicted, throttled = events
    assert move[1:] == (0.001, "move", "fault", None, "a", PAGE, 2 * PAGE, Host(), Device(0), None)
    assert fault[2:] == ("host_fault", None, "write", "b", 0, 0, Host(), None, 77)
    assert mark[2:] == ("mark", "part 0", None, None, 0, 0, None, None, None)
    assert (prefetch.cause, prefetch.destination, prefetch.nbytes) == ("prefetch", Device(0), MIB)
    assert (advice.cause, advice.destination) == ("set_preferred_location", Host())
    assert (remote.cause, remote.source, remote.destination) == ("thrashing", Device(0), Host())
    assert (evicted.cause, evicted.source, evicted.destination) == ("eviction", None, Device(0))
    assert (throttled.memory, throttled.duration) == (None, 0.001)

    assert list(trace.events("move")) == [move, evicted]
    assert list(trace.events("mark")) == [mark]
    assert list(trace.events(of="a")) == [move]
    assert list(trace.events("call", of=trace["b"])) == [prefetch, advice]
    address = canned.memories[first][2]
    assert list(trace.events(of=(address, PAGE))) == []
    assert list(trace.events(of=(address + 2 * PAGE, PAGE))) == [move]
    assert list(trace.slices[0].events()) == [move, fault, mark]
    with pytest.raises(ValueError, match=r"kind must be one of move, host_fault, .*got 'moves'"):
        trace.events("moves")


@pytest.mark.skipif(PAGE != 4 * KIB, reason="its numbers are of pages of 4 KiB")
def test_a_range_counts_its_pages(traced):
    canned = Canned()
    first = canned.memory("a", MIB)
    address = canned.memories[first][2]
    for _ in range(2):
        canned.move(first, MIB, "to_device", "fault")
        canned.move(first, 64 * KIB, "to_host", "speculative", offset=64 * KIB)
    canned.faults(first, 3, "host", "write")
    canned.add("device_fault", first, offset=65 * KIB, source=0, access="write")
    canned.add("thrashing", first, 64 * KIB, offset=64 * KIB)
    canned.add("throttling", first, offset=64 * KIB, source=0, ms=3)
    trace = traced(canned)
    part = trace[address + 60 * KIB + 1, 8 * KIB - 2]  # touches two pages of each side
    assert part.to_device == 2 * 8 * KIB
    assert part.by_cause["fault"] == (16 * KIB, 0, 0)
    assert part.by_cause["speculative"] == (0, 8 * KIB, 0)
    assert part.turned_back == 3 * 4 * KIB
    assert (part.host_faults, part.device_faults, part.device_write_faults) == (0, 1, 1)
    assert (part.thrashing, part.throttled) == (4 * KIB, 0.003)
    assert part.move_time == pytest.approx(0.004)
    assert (part.address, part.nbytes) == (address + 60 * KIB + 1, 8 * KIB - 2)
    assert trace[address, PAGE].host_write_faults == 3
    assert trace[address, MIB].to_device == 2 * MIB
    assert trace[address + (1 << 30), PAGE].moved == 0


def test_a_range_of_a_truncated_trace_is_refused(traced):
    canned = Canned(truncated=True)
    first = canned.memory("a", MIB)
    canned.move(first, MIB, "to_device")
    address = canned.memories[first][2]
    trace = traced(canned)
    assert trace[address, MIB].to_device == MIB
    with pytest.raises(RuntimeError, match="higher limit"):
        trace[address, PAGE]


@pytest.mark.skipif(PAGE >= 64 * KIB, reason="it splits 64 KiB")
def test_names_split_memory(traced):
    canned = Canned()
    first = canned.memory("a", MIB)
    address = canned.memories[first][2]
    canned.move(first, PAGE, "to_device")
    canned.move(first, 2 * PAGE, "to_device", offset=64 * KIB)
    trace = traced(canned)
    assert trace[address, MIB].to_device == 12288
    trace.name((address + 64 * KIB, 64 * KIB), "kv.0")
    assert trace["kv.0"].to_device == 2 * PAGE
    assert trace["kv.0"].kind == "named"
    rest = trace["a (rest)"]
    assert (rest.to_device, rest.nbytes, rest.label) == (PAGE, MIB - 64 * KIB, "a (rest)")
    assert [m.label for m in trace.memories] == ["kv.0", "a (rest)"]
    whole = trace["a"]
    assert (whole.to_device, whole.nbytes, whole.address) == (12288, MIB, address)
    assert whole.label == "a"
    assert len(list(trace.events(of="a"))) == 2
    assert trace[address + 64 * KIB, PAGE].label == f"kv.0[0:{PAGE}]"
    assert trace[address, PAGE].label == f"a[0:{PAGE}]"
    assert trace[address + 60 * KIB, 8 * KIB].label == f"a[{60 * KIB}:{68 * KIB}]"
    sizes = [line.split()[-7] for line in str(trace).splitlines()[3:5]]
    assert sizes == ["64.0K", "960.0K"]
    assert (trace[address, MIB].to_device, trace[address, MIB].label) == (12288, "a")
    assert trace[address + 64 * KIB, 64 * KIB].label == "kv.0"
    trace.name((address + 64 * KIB, 64 * KIB), "kv.1")
    with pytest.raises(KeyError):
        trace["kv.0"]
    assert trace["kv.1"].to_device == 2 * PAGE


def test_a_name_of_a_whole_memory_replaces_its_label(traced):
    canned = Canned()
    first = canned.memory(f"uint8[{PAGE + 904}] #1", 2 * PAGE)
    address = canned.memories[first][2]
    canned.move(first, PAGE, "to_device").move(first, PAGE, "to_device", offset=PAGE)
    trace = traced(canned)
    trace.name((address, PAGE + 904), "a")  # the last page counts whole
    assert [(m.label, m.to_device, m.nbytes) for m in trace.memories] == [("a", 2 * PAGE, 2 * PAGE)]
    assert trace[address, PAGE + 904].to_device == 2 * PAGE
    trace.name((address + PAGE + 904, 100), "b")
    assert [m.label for m in trace.memories] == ["a", "b"]
    assert trace[f"uint8[{PAGE + 904}] #1"].to_device == 2 * PAGE


def test_a_name_can_reach_beyond_a_memory(traced):
    canned = Canned()
    first = canned.memory("a", 2 * MIB)
    second = canned.memory("b", 2 * MIB)
    address = canned.memories[second][2]
    assert canned.memories[first][2] + 2 * MIB == address
    for memory in (first, second):
        canned.move(memory, MIB, "to_device").move(memory, MIB, "to_device", offset=MIB)
    trace = traced(canned)
    trace.name((address - MIB, 2 * MIB), "border")
    assert trace["border"].to_device == 2 * MIB
    assert trace["a (rest)"].to_device == trace["b (rest)"].to_device == MIB
    assert trace["a"].to_device == trace["b"].to_device == 2 * MIB


@pytest.mark.parametrize(
    ("target", "label", "error", "text"),
    [
        ((1, 2, 3), "x", TypeError, "a target must be"),
        ((1.5, 2), "x", TypeError, r"\(address, nbytes\), both int, got \(1.5, 2\)"),
        ((True, 2), "x", TypeError, "both int"),
        ((4096, 0), "x", ValueError, r"a range of addresses, got \(4096, 0\)"),
        ((0, 4096), "x", ValueError, "a range of addresses"),
        (((1 << 64) - 1, 2), "x", ValueError, "a range of addresses"),
        ((4096, 1), "", ValueError, "1 to 200 bytes"),
        ((4096, 1), "a\0b", ValueError, "without NUL"),
        ((4096, 1), "\ud800", ValueError, "surrogates"),
        ((4096, 1), "ö" * 101, ValueError, "1 to 200 bytes"),
        ((4096, 1), b"x", TypeError, "a label must be a str, got b'x'"),
    ],
)
def test_bad_names(traced, target, label, error, text):
    trace = traced(Canned())
    with pytest.raises(error, match=text):
        trace.name(target, label)


def test_slices_add_up(traced, pattern):
    pattern.part()
    pattern.move(0, MIB, "to_host", "fault")
    pattern.part()
    trace = traced(pattern)
    assert [s.label for s in trace.slices] == ["part 0", "part 1", "end"]
    assert [s.total.to_host for s in trace.slices] == [1920 * MIB, MIB, 0]
    assert sum(s.duration for s in trace.slices) == pytest.approx(trace.duration)
    assert trace.slices[1]["weights"].to_host == MIB
    assert trace.slices[1]["weights"].to_device == 0
    assert str(trace.slices[1]).startswith("slice 'part 1' of 1.000 ms, source kernel")
    assert repr(trace.slices[1]) == "<TraceSlice 'part 1'>"


def test_json(traced, pattern, tmp_path):
    trace = traced(pattern)
    trace.to_json(tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())
    assert found == trace.to_dict()
    assert found["version"] == 1
    assert found["total"]["to_device"] == trace.total.to_device
    assert found["total"]["by_cause"]["requested"] == [512 * MIB, 0, 0]
    assert found["memories"][0]["label"] == "activations #4"
    assert found["memories"][0]["devices"] == [0]
    assert [s["label"] for s in found["slices"]] == ["end"]
    assert found["findings"][0]["memory"] == "activations #4"


@pytest.mark.parametrize("method", ["to_json", "to_chrome_trace"])
def test_paths_are_no_file_descriptors(traced, pattern, method):
    with pytest.raises(TypeError, match=r"expected str, bytes or os\.PathLike object, not int"):
        getattr(traced(pattern), method)(1)


# --- findings -----------------------------------------------------------------------------------


class Checker(html.parser.HTMLParser):
    """Collects cells, and checks that each element is closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.rows = [], set(), []

    def handle_starttag(self, tag, attributes):
        self.seen.add(tag)
        if tag == "br":
            return
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


def checked(text):
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert not checker.open
    assert not checker.seen & {"script", "style", "link", "img"}
    return checker


def test_html_has_the_cells_of_the_table(traced, pattern):
    trace = traced(pattern)
    found = checked(trace._repr_html_())
    lines = TABLE.splitlines()[3:7]
    assert [[cell for cell in row if cell] for row in found.rows[2:]] == [
        re.split(r"  +", line) for line in lines
    ]
    assert "width:100%" in trace._repr_html_()


def test_html_is_small_and_escapes(traced):
    canned = Canned()
    for number in range(60):
        label = f"{number}" + '<&">' * 40
        first = canned.memory(label[:200], 64 * MIB)
        canned.move(first, 32 * MIB, "to_device", "fault")
        canned.move(first, 32 * MIB, "to_host", "fault")
        canned.move(first, 32 * MIB, "between_devices").add("thrashing", first, PAGE)
        canned.add("throttling", first).add("remote_map", first, PAGE)
        canned.add("duplicate", first, PAGE).add("eviction", first, 64 * MIB)
    canned.report.update(lost=5, rejected=5, truncated=True, fault_overflows=7, ambiguous=3)
    text = traced(canned)._repr_html_()
    assert len(text.encode()) <= 20_000
    assert len(checked(text).rows) == 2 + 16 + 1


# --- recording ----------------------------------------------------------------------------------


def test_time_is_that_of_the_monotonic_clock(traced):
    canned = Canned(length_ms=1000)
    first = canned.memory("a", MIB)
    canned.time = RAW + 500 * MS
    canned.move(first, PAGE, "to_device")
    trace = traced(canned)
    (event,) = trace.events()
    assert event.time == pytest.approx(MONOTONIC / 1e9 + 0.5)


def test_a_failing_stop_is_a_note_on_the_error_of_the_body(monkeypatch):
    canned = Canned()
    canned.failing["stop"] = RuntimeError("the wait failed")
    monkeypatch.setattr(managedmem._managedmem, "Recorder", canned.recorder)
    with pytest.raises(ZeroDivisionError) as caught:
        with managedmem.trace() as trace:
            1 / 0  # noqa: B018
    assert caught.value.__notes__ == [
        "managedmem.trace() could not end as it should: the wait failed"
    ]
    assert not trace.complete
    assert trace.problems == ("the end of the trace failed: the wait failed",)


def test_a_failing_stop_is_an_error_by_itself(monkeypatch):
    canned = Canned()
    canned.failing["stop"] = RuntimeError("the wait failed")
    monkeypatch.setattr(managedmem._managedmem, "Recorder", canned.recorder)
    with pytest.raises(RuntimeError, match="the wait failed"), managedmem.trace():
        pass


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failing_mark_makes_no_slice(monkeypatch, error):
    canned = Canned()
    canned.memory("a", MIB)
    canned.failing["mark"] = error("refused")
    monkeypatch.setattr(managedmem._managedmem, "Recorder", canned.recorder)
    with managedmem.trace() as trace:
        with pytest.raises(error):
            trace.mark("first")
        assert trace.slices == ()
        assert trace.mark("second").total.moved == 0
    assert [s.label for s in trace.slices] == ["second", "end"]


def test_an_interrupted_start_leaves_nothing_running(monkeypatch):
    canned = Canned()
    canned.failing["start"] = KeyboardInterrupt()
    monkeypatch.setattr(managedmem._managedmem, "Recorder", canned.recorder)
    trace = managedmem.trace()
    with pytest.raises(KeyboardInterrupt):
        trace.start()
    assert canned.calls[-1] == ("stop without a wait",)
    assert repr(trace) == "<Trace, not started>"


class FakeTorch:
    """The part of torch that is asked for captures."""

    class cuda:
        @staticmethod
        def is_initialized():
            return True

        @staticmethod
        def is_current_stream_capturing():
            return True


def test_captures_of_torch_refuse_marks(monkeypatch):
    canned = Canned()
    monkeypatch.setattr(managedmem._managedmem, "Recorder", canned.recorder)
    monkeypatch.setitem(sys.modules, "torch", FakeTorch)
    with managedmem.trace() as trace:
        with pytest.raises(RuntimeError, match="would end the capture"):
            trace.mark("inside")
    assert canned.calls[1] == ("start without a wait",)
    assert canned.calls[-1] == ("stop without a wait",)
    assert ("mark",) not in canned.calls


def test_without_sync_captures_of_torch_do_not_matter(monkeypatch):
    canned = Canned()
    monkeypatch.setattr(managedmem._managedmem, "Recorder", canned.recorder)
    monkeypatch.setitem(sys.modules, "torch", FakeTorch)
    with managedmem.trace(sync=False) as trace:
        trace.mark("inside")
    assert ("mark",) in canned.calls
    assert not any("without" in call[0] for call in canned.calls)
