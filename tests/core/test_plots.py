"""The pictures of traces and residencies: their bars, labels and legends, as data."""

import itertools
import time
import warnings

import pytest

import managedmem
from canned_recorder import MS, NONE, NOT_A_BUFFER, OTHER, Canned
from constants import EMULATED, MIB, PAGE
from managedmem import Device, _colours
from managedmem._trace_grid import COLUMNS, short_labels
from managedmem._units import size_text
from programs import run_python
from traces import store

matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib")
matplotlib.use("Agg")

with warnings.catch_warnings():  # of what an older matplotlib imports
    warnings.simplefilter("ignore", DeprecationWarning)
    import numpy as np
    from matplotlib import pyplot
    from matplotlib.patches import StepPatch

HOST, ELSEWHERE, ON_DEVICE = _colours.HOST, _colours.UNKNOWN, _colours.DEVICE


@pytest.fixture(autouse=True)
def closed_figures(monkeypatch):
    """Nothing is shown, and no figure outlives its test; each can be drawn."""
    monkeypatch.setattr(pyplot, "show", lambda *a, **k: pytest.fail("show() was called"))
    yield
    for number in pyplot.get_fignums():
        pyplot.figure(number).canvas.draw()
    pyplot.close("all")


def legend(axes):
    found = axes.get_legend()
    return [] if found is None else [text.get_text() for text in found.get_texts()]


def ticks(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def lane_bars(axes):
    """For each bar of a timeline, by lane and legend: the edges, and its ends above the middle."""
    found = {}
    for patch in axes.patches:
        if isinstance(patch, StepPatch):
            values, edges, baseline = patch.get_data()
            lane = round(float(np.median([values, baseline])))
            found[lane, patch.get_label()] = (edges, lane - baseline, lane - values)
    return found


def filled(axes, lane, label):
    """The times at which a lane has bars of a kind, in the unit of the axis."""
    edges, low, high = lane_bars(axes)[lane, label]
    (columns,) = np.nonzero(~np.isclose(low, high))
    return edges[columns[0]], edges[columns[-1] + 1]


class TestTimeline:
    def test_moves_are_where_they_were(self, traced):
        canned = Canned(length_ms=320)
        first, second = canned.memory("a", MIB), canned.memory("b", 2 * MIB)
        canned.move(first, MIB, "to_device", ms=40)
        canned.time += 40 * MS
        canned.move(second, 2 * MIB, "to_device", "fault", ms=80)
        canned.move(second, MIB, "to_host", "speculative", ms=20)
        axes = traced(canned).plot()
        assert ticks(axes) == ["b  2.0M", "a  1.0M"]
        assert filled(axes, 1, "to a device, requested") == (0, 40)
        assert filled(axes, 0, "to a device, by faults") == (80, 160)
        assert filled(axes, 0, "to the host, by faults") == (160, 180)
        assert len(lane_bars(axes)) == 3
        assert axes.get_xlabel() == "time from the start of the trace (ms)"
        assert axes.get_xlim() == (0, 320)

    def test_to_devices_is_above_and_to_the_host_below(self, traced):
        canned = Canned(length_ms=10)
        memory = canned.memory("a", MIB)
        canned.move(memory, MIB, "to_device").move(memory, MIB, "to_host")
        bars = lane_bars(traced(canned).plot())
        assert bars[0, "to a device, requested"][2].max() > 0
        assert bars[0, "to the host, requested"][2].min() < 0

    def test_heights_are_those_of_the_bytes(self, traced):
        """A move of four times the bytes in one column is twice as high; bars of kinds stack."""
        canned = Canned(length_ms=COLUMNS)
        memory = canned.memory("a", 8 * MIB)
        canned.move(memory, 4 * MIB, "to_device").move(memory, MIB, "to_device")
        canned.time -= MS
        canned.move(memory, 3 * MIB, "to_device", "fault")
        bars = lane_bars(traced(canned).plot())
        _, _, requested = bars[0, "to a device, requested"]
        _, low, high = bars[0, "to a device, by faults"]
        full = requested[0]
        assert requested[1] == pytest.approx(full / 4)
        assert (low[1], high[1]) == (pytest.approx(requested[1]), pytest.approx(full))
        assert not requested[2:].any()

    def test_small_moves_can_be_seen(self, traced):
        canned = Canned(length_ms=COLUMNS)
        memory = canned.memory("a", 1024 * MIB)
        canned.move(memory, 1024 * MIB, "to_device").move(memory, PAGE, "to_device")
        _, _, high = lane_bars(traced(canned).plot())[0, "to a device, requested"]
        assert high[1] == pytest.approx(0.12 * high[0])

    def test_every_kind_is_in_the_legend(self, traced):
        canned = Canned()
        memory = canned.memory("a", MIB)
        for direction in ("to_device", "to_host", "between_devices"):
            canned.move(memory, MIB, direction).move(memory, MIB, direction, "fault")
        canned.move(memory, MIB, "to_host", "eviction").faults(memory, 1)
        canned.add("call", memory, MIB, cause=1, destination=0)
        canned.add("remote_map", memory, MIB, source=0, destination=-1)
        canned.add("throttling", memory, source=0)
        assert legend(traced(canned).plot()) == [
            "to a device, requested",
            "to a device, by faults",
            "between devices",
            "to the host, requested",
            "to the host, by faults",
            "to the host, evicted",
            "call of prefetch, advise, ...",
            "mapped remotely",
            "thrashing",
            "page faults (top: device, bottom: host)",
        ]

    def test_faults_and_calls(self, traced):
        canned = Canned(length_ms=320)
        canned.memory("idle", MIB)
        memory = canned.memory("a", MIB)
        canned.time += 100 * MS
        canned.faults(memory, 5, "host")
        canned.time += 100 * MS
        canned.faults(memory, 1)
        canned.add("call", memory, MIB, cause=1, destination=0)
        axes = traced(canned).plot()
        (faults,) = axes.collections
        found = [(segment[0][0], segment[0][1]) for segment in faults.get_segments()]
        assert found == [(200.5, -0.45), (100.5, 0.45)]
        host, device = faults.get_colors()[1][3], faults.get_colors()[0][3]
        assert host > device
        calls = [line for line in axes.lines if line.get_marker() == "v"]
        assert [list(line.get_xdata()) for line in calls] == [[200.5]]

    def test_marks_are_lines_with_labels(self, traced):
        canned = Canned(length_ms=100)
        canned.memory("a", MIB)
        canned.time += 50 * MS
        canned.part()
        axes = traced(canned).plot()
        dotted = [line for line in axes.lines if line.get_linestyle() == ":"]
        assert [line.get_xdata()[0] for line in dotted] == [pytest.approx(50, abs=1e-3)]
        assert "part 0" in [text.get_text() for text in axes.texts]

    def test_labels_of_many_marks_do_not_overlap(self, traced):
        canned = Canned(length_ms=1000)
        for _ in range(200):
            canned.time += 4 * MS
            canned.part()
        axes = traced(canned).plot()
        assert len([line for line in axes.lines if line.get_linestyle() == ":"]) == 200
        axes.figure.canvas.draw()
        boxes = sorted(
            (t.get_window_extent() for t in axes.texts if t.get_text().startswith("part")),
            key=lambda box: box.x0,
        )
        assert 5 < len(boxes) < 50
        assert all(a.x1 <= b.x0 + 1 for a, b in itertools.pairwise(boxes))

    def test_marks_of_one_column_are_one_line(self, traced):
        canned = Canned(length_ms=1000)
        for _ in range(5000):
            canned.time += MS // 5
            canned.part()
        axes = traced(canned).plot()
        dotted = [line for line in axes.lines if line.get_linestyle() == ":"]
        assert 250 < len(dotted) <= COLUMNS
        assert dotted[-1].get_xdata()[0] > 990

    def test_more_memories_than_lanes_share_one(self, traced):
        canned = Canned()
        for number in range(1, 41):
            canned.move(canned.memory(f"m{number}", MIB), number * 4096, "to_device", ms=1)
        labels = ticks(traced(canned).plot())
        assert labels == [*(f"m{n}  1.0M" for n in range(40, 28, -1)), "(28 others)"]

    def test_thirteen_memories_have_a_lane_each(self, traced):
        canned = Canned()
        for number in range(13):
            canned.move(canned.memory(f"m{number}", MIB), MIB, "to_device")
        assert len(ticks(traced(canned).plot())) == 13

    def test_unknown_memory_has_a_lane(self, traced):
        canned = Canned()
        canned.move(canned.memory("gone", 2 * MIB, "unknown"), MIB, "to_device")
        assert ticks(traced(canned).plot()) == ["(freed before seen)"]

    def test_labels_are_not_formulas(self, traced):
        canned = Canned()
        canned.move(canned.memory(r"$\frac$ _^{", MIB), MIB, "to_device")
        axes = traced(canned).plot()
        assert ticks(axes) == [r"$\frac$ _^{  1.0M"]
        axes.figure.canvas.draw()

    def test_labels_do_not_go_to_latex(self, traced):
        canned = Canned()
        canned.move(canned.memory("a_b%", MIB), MIB, "to_device").part()
        with matplotlib.rc_context({"text.usetex": True}):
            axes = traced(canned).plot()
            assert not any(text.get_usetex() for text in [*axes.get_yticklabels(), *axes.texts])
        pyplot.close("all")

    def test_in_a_dark_style(self, traced):
        canned = Canned()
        memory = canned.memory("a", MIB)
        canned.add("call", memory, MIB, cause=1, destination=0).faults(memory, 1).part()
        with pyplot.style.context("dark_background"):
            axes = traced(canned).plot()
        drawn = [
            line for line in axes.lines if line.get_marker() == "v" or line.get_linestyle() == ":"
        ]
        assert [matplotlib.colors.to_hex(line.get_color()) for line in drawn] == ["#ffffff"] * 2
        assert matplotlib.colors.to_hex(axes.collections[0].get_colors()[0]) == "#ffffff"

    def test_long_labels_keep_where_they_differ(self):
        names = [f"model.transformer.layers.{n}.self_attn.q_proj.weight" for n in (3, 17)]
        assert short_labels(["x", *names]) == [
            "x",
            "...3.self_attn.q_proj.weight",
            "...17.self_a...q_proj.weight",
        ]
        assert short_labels([names[0]]) == ["model.transf...q_proj.weight"]

    def test_of_nothing(self, traced):
        axes = traced(Canned()).plot()
        assert [text.get_text() for text in axes.texts] == ["nothing moved"]
        assert (ticks(axes), legend(axes)) == ([], [])

    def test_title(self, traced):
        canned = Canned(length_ms=3214)
        canned.move(canned.memory("a", MIB), MIB, "to_device").part()
        assert traced(canned).plot().get_title("left") == "trace of 3.214 s: moves"
        lost = Canned(length_ms=12, lost=3, source="emulator")
        title = "trace of 12.000 ms, emulated driver: moves (INCOMPLETE)"
        assert traced(lost).plot().get_title("left") == title
        cut = Canned(length_ms=12, truncated=True)
        assert traced(cut).plot().get_title("left").endswith("(first events only: limit=)")
        assert traced(canned).slices[0].plot().get_title("left").startswith("slice 'part 0' of ")

    def test_slice_has_its_own_time(self, traced):
        canned = Canned(length_ms=100)
        memory = canned.memory("a", MIB)
        canned.time += 60 * MS
        canned.part()
        canned.time += 10 * MS
        canned.move(memory, MIB, "to_device", ms=20)
        axes = traced(canned).slices[1].plot()
        assert axes.get_xlim()[1] == pytest.approx(40, abs=1e-3)
        assert filled(axes, 0, "to a device, requested") == pytest.approx((10, 30), abs=0.2)

    def test_draws_on_given_axes(self, traced):
        canned = Canned()
        memory = canned.memory("a", MIB)
        canned.move(memory, MIB, "to_device")
        trace = traced(canned)
        _, (first, second, third) = pyplot.subplots(3)
        assert trace.plot(ax=first) is first
        assert trace.plot_pages("a", ax=second) is second
        assert trace.plot_causes(ax=third) is third
        assert pyplot.get_fignums() == [first.figure.number]

    def test_bytes_of_all_columns_are_those_of_the_trace(self, traced):
        from managedmem._trace_grid import timeline_of

        canned = Canned(length_ms=777)
        memory = canned.memory("a", MIB)
        for ms in (0, 1, 3, 50, 200, 7):
            canned.move(memory, 1000 + ms, "to_device", "fault", ms=ms)
        assert timeline_of(traced(canned)).moved.sum() == pytest.approx(6261)

    @pytest.mark.emulator_only
    def test_many_events_take_seconds(self, traced):
        """Canned records are slow to make, so ten thousand; their number must hardly matter."""
        canned = Canned(length_ms=20_000)
        memory = canned.memory("a", 64 * MIB)
        for number in range(10_000):
            canned.move(memory, PAGE, ("to_device", "to_host")[number % 2], "fault", ms=1)
        trace = traced(canned)
        trace.total  # noqa: B018
        begin = time.process_time()
        trace.plot()
        trace.plot_pages("a")
        assert time.process_time() - begin < 8


def place_names(axes):
    """For each row of the picture, the changes of places: the first column and the name."""
    (image,) = axes.get_images()
    names = {
        matplotlib.colors.to_hex(patch.get_facecolor()): text.get_text()
        for patch, text in zip(
            axes.get_legend().get_patches(), axes.get_legend().get_texts(), strict=True
        )
    }
    shades = {
        int(code): matplotlib.colors.to_hex(image.to_rgba(code))
        for code in np.unique(image.get_array())
    }
    found = []
    for row in image.get_array():
        starts = [0, *(np.flatnonzero(np.diff(row)) + 1)]
        found.append([(int(i), names.get(shades[int(row[i])], "not allocated")) for i in starts])
    return found


class TestPages:
    """Memory of 4 pages over 512 ms, which are 512 columns."""

    @pytest.fixture
    def canned(self):
        canned = Canned(length_ms=512)
        canned.memory("a", 4 * PAGE)
        return canned

    def rows(self, traced, canned, target="a"):
        return place_names(traced(canned).plot_pages(target))

    def at(self, canned, ms):
        canned.time = 5_000_000_000 + ms * MS
        return canned

    def test_copies(self, traced, canned):
        self.at(canned, 100).add("duplicate", 0, 4 * PAGE)
        self.at(canned, 200).add("duplicate_end", 0, 4 * PAGE, destination=0)
        copies = "copies on several"
        row = [(0, "unknown"), (100, copies), (200, "on Device(0)")]
        assert self.rows(traced, canned) == [row] * 4

    def test_copies_that_are_noted_during_their_move(self, traced, canned):
        self.at(canned, 100).move(0, 4 * PAGE, "to_device", ms=50)
        self.at(canned, 110).add("duplicate", 0, 4 * PAGE)
        row = [(0, "on the host"), (100, "on Device(0)"), (110, "copies on several")]
        assert self.rows(traced, canned) == [row] * 4

    @pytest.mark.emulator_only
    def test_copies_of_the_driver(self, alloc):
        buffer = alloc(MIB)
        store(buffer)
        with managedmem.trace() as trace:
            buffer.read_mostly = True
            buffer.prefetch(Device(0))
            trace.mark("there")
        rows = place_names(trace.slices[1].plot_pages(buffer))
        assert rows == [[(0, "copies on several")]] * (MIB // PAGE)

    def test_remote_map_names_the_place(self, traced, canned):
        self.at(canned, 100).add("remote_map", 0, 4 * PAGE, source=0, destination=-1)
        assert self.rows(traced, canned) == [[(0, "on the host")]] * 4

    def test_first_fault_of_the_host(self, traced, canned):
        """It brings an unknown page to the host; one that is known moves by an event of its own."""
        self.at(canned, 100).faults(0, 1, "host")
        self.at(canned, 200).move(0, PAGE, "to_device")
        self.at(canned, 300).faults(0, 1, "host")
        rows = self.rows(traced, canned)
        assert rows[0] == [(0, "unknown"), (100, "on the host"), (200, "on Device(0)")]
        assert rows[1:] == [[(0, "unknown")]] * 3

    def test_discard_forgets(self, traced, canned):
        self.at(canned, 100).move(0, 4 * PAGE, "to_device")
        self.at(canned, 200).add("call", 0, 2 * PAGE, cause=2)
        self.at(canned, 300).faults(0, 1, "host")
        rows = self.rows(traced, canned)
        device = [(0, "on the host"), (100, "on Device(0)")]
        assert rows[0] == [*device, (200, "unknown"), (300, "on the host")]
        assert rows[1:] == [[*device, (200, "unknown")], device, device]

    def test_births_and_deaths(self, traced):
        canned = Canned(length_ms=512)
        canned.memory("a", PAGE, born=100, died=400)
        self.at(canned, 200).move(0, PAGE, "to_device")
        none, device = "not allocated", "on Device(0)"
        assert self.rows(traced, canned) == [
            [(0, none), (100, "unknown"), (200, device), (400, none)]
        ]

    def test_several_devices(self, traced, canned):
        self.at(canned, 100).move(0, 4 * PAGE, "to_device", destination=1)
        self.at(canned, 200).move(0, 4 * PAGE, "between_devices", source=1, destination=3)
        self.at(canned, 300).move(0, 4 * PAGE, "between_devices", source=3, destination=OTHER)
        assert self.rows(traced, canned)[0] == [
            (0, "on the host"),
            (100, "on Device(1)"),
            (200, "on Device(3)"),
            (300, "on a device that is not visible"),
        ]

    def test_to_and_fro_within_a_cell(self, traced, canned):
        for number in range(30):
            self.at(canned, 200)
            canned.time += number * MS // 3
            canned.move(0, 4 * PAGE, ("to_device", "to_host")[number % 2], ms=0)
        row = [(0, "on the host"), (200, "mixed, or to and fro"), (210, "on the host")]
        assert self.rows(traced, canned) == [row] * 4

    @pytest.mark.parametrize("column", [100, 101])
    def test_one_move_within_a_cell(self, traced, column):
        """The cell has the place of the longer time, and is not mixed."""
        canned = Canned(length_ms=5120)
        canned.memory("a", 4 * PAGE)
        self.at(canned, 1004 if column == 100 else 1006).move(0, 4 * PAGE, "to_device")
        row = [(0, "on the host"), (column, "on Device(0)")]
        assert self.rows(traced, canned) == [row] * 4

    def test_rows_are_folded(self, traced):
        canned = Canned(length_ms=512)
        canned.memory("a", 1024 * PAGE)
        for page in range(0, 512, 2):
            self.at(canned, 100).move(0, PAGE, "to_device", offset=page * PAGE)
        self.at(canned, 100).move(0, 512 * PAGE, "to_device", offset=512 * PAGE)
        rows = self.rows(traced, canned)
        assert len(rows) == 512
        assert rows[:256] == [[(0, "mixed, or to and fro")]] * 256
        assert rows[256:] == [[(0, "on the host"), (100, "on Device(0)")]] * 256

    def test_slice_knows_what_came_before(self, traced, canned):
        self.at(canned, 100).move(0, 4 * PAGE, "to_device")
        self.at(canned, 256).part()
        trace = traced(canned)
        axes = trace.slices[1].plot_pages("a")
        assert place_names(axes) == [[(0, "on Device(0)")]] * 4
        assert axes.get_xlim()[1] == pytest.approx(256, abs=1e-3)

    def test_part_of_a_memory(self, traced, canned):
        self.at(canned, 100).move(0, 4 * PAGE, "to_device")
        address = canned.memories[0][2]
        trace = traced(canned)
        axes = trace.plot_pages((address + PAGE, 2 * PAGE))
        assert place_names(axes) == [[(0, "on the host"), (100, "on Device(0)")]] * 2
        assert axes.get_title("left").endswith(f", {size_text(2 * PAGE)}: places of its pages")

    def test_memories_of_one_label_lie_end_to_end(self, traced):
        canned = Canned(length_ms=512)
        for number in range(2):
            canned.memory("a", 2 * PAGE)
            self.at(canned, 100 + 100 * number).move(number, 2 * PAGE, "to_device")
        rows = self.rows(traced, canned)
        assert [row[1][0] for row in rows] == [100, 100, 200, 200]

    def test_memory_without_events(self, traced, canned):
        assert self.rows(traced, canned) == [[(0, "unknown")]] * 4
        assert self.rows(traced, canned, (1 << 50, 3 * PAGE)) == [[(0, "unknown")]] * 3

    def test_memory_of_the_trace(self, traced, canned):
        self.at(canned, 100).move(0, 4 * PAGE, "to_device")
        trace = traced(canned)
        rows = [[(0, "on the host"), (100, "on Device(0)")]] * 4
        assert place_names(trace.plot_pages(trace["a"])) == rows

    def test_unknown_label(self, traced, canned):
        with pytest.raises(KeyError, match="no memory named 'b'; there are: a"):
            traced(canned).plot_pages("b")
        assert not pyplot.get_fignums()

    def test_random_moves_against_a_replay_by_page(self, traced):
        """Each cell is a page at a ms, so a simple replay says the same."""
        generator = np.random.default_rng(7)
        for _ in range(5):
            canned = Canned(length_ms=512)
            canned.memory("a", 24 * PAGE)
            expected = np.full((24, 512), "unknown", object)
            seen = np.zeros(24, bool)
            for ms in sorted(generator.choice(510, 40, replace=False)):
                first = int(generator.integers(0, 24))
                count = int(generator.integers(1, 25 - first))
                to = ("to_device", "to_host")[int(generator.integers(2))]
                self.at(canned, int(ms)).move(0, count * PAGE, to, offset=first * PAGE, ms=1)
                names = ("on the host", "on Device(0)")
                before, after = names if to == "to_device" else names[::-1]
                for page in range(first, first + count):
                    if not seen[page]:
                        expected[page, :ms] = before
                    seen[page] = True
                    expected[page, ms:] = after
            rows = self.rows(traced, canned)
            for row, wanted in zip(rows, expected, strict=True):
                found = np.repeat(
                    np.array([name for _, name in row], object),
                    np.diff([*(at for at, _ in row), 512]),
                )
                assert (found == wanted).all()

    def test_of_the_driver(self, alloc):
        buffer = alloc(4 * MIB)
        store(buffer)
        with managedmem.trace() as trace:
            buffer[: 2 * MIB].prefetch(Device(0))
            trace.mark("there")
            time.sleep(0.02)
        rows = place_names(trace.slices[1].plot_pages(buffer))
        half = len(rows) // 2
        assert rows == [[(0, place)] for place in ("on Device(0)", "unknown") for _ in range(half)]


class TestCauses:
    def bars(self, axes):
        """The bars by lane, as (cause, from, to) in bytes."""
        causes = dict(
            zip(
                (patch.get_facecolor() for patch in axes.get_legend().get_patches()),
                legend(axes),
                strict=True,
            )
        )
        found = {}
        for patch in axes.patches:
            if patch.get_width():
                lane = round(patch.get_y() + patch.get_height() / 2)
                begin, end = sorted((patch.get_x(), patch.get_x() + patch.get_width()))
                found.setdefault(lane, set()).add((causes[patch.get_facecolor()], begin, end))
        return found

    def test_bars(self, traced):
        canned = Canned()
        first, second = canned.memory("a", 64 * MIB), canned.memory("b", MIB)
        canned.move(first, 30, "to_device").move(first, 20, "to_device", "fault")
        canned.move(first, 5, "between_devices", "fault")
        canned.move(first, 7, "to_host", "eviction").move(first, 3, "to_host")
        canned.move(second, 9, "to_host", "access_counters")
        canned.faults(canned.memory("faults only", MIB), 3)
        axes = traced(canned).plot_causes()
        assert ticks(axes) == ["a  64.0M", "b  1.0M"]
        assert legend(axes) == ["requested", "fault", "eviction", "access counters"]
        assert self.bars(axes) == {
            0: {
                ("requested", 0, 30),
                ("fault", 30, 55),
                ("requested", -3, 0),
                ("eviction", -10, -3),
            },
            1: {("access counters", -9, 0)},
        }
        assert [text.get_text() for text in axes.texts] == ["10B", "55B", "9B"]

    def test_others_and_unknown(self, traced):
        canned = Canned()
        for number in range(20):
            canned.move(canned.memory(f"m{number}", MIB), MIB * (20 - number), "to_device")
        canned.move(canned.memory("x", 2 * MIB, "unknown"), MIB, "to_device")
        labels = ticks(traced(canned).plot_causes())
        assert labels[-2:] == ["(8 others)", "(freed before seen)"]
        assert len(labels) == 14

    def test_of_nothing(self, traced):
        axes = traced(Canned()).plot_causes()
        assert [text.get_text() for text in axes.texts] == ["nothing moved"]
        assert legend(axes) == []

    def test_sums_are_those_of_the_trace(self, there_and_back):
        buffer, trace = there_and_back
        axes = trace.slices[1].plot_causes()
        widths = [end - begin for _, begin, end in self.bars(axes)[0]]
        assert sum(widths) == buffer.nbytes
        assert self.bars(trace.slices[0].plot_causes())[0] == {("requested", 0, buffer.nbytes)}


class TestStrip:
    @pytest.fixture
    def halves(self, alloc):
        if EMULATED:
            managedmem.emulator.schedule("eager")
        buffer = alloc(8 * MIB)
        store(buffer)
        buffer[: 4 * MIB].prefetch(Device(0))
        Device(0).sync()
        return buffer.residency()

    def spans(self, axes):
        found = {}
        for collection in axes.collections:
            shade = matplotlib.colors.to_hex(collection.get_facecolor()[0])
            for path in collection.get_paths():
                box = path.get_extents()
                found.setdefault((shade, round(box.y0, 2)), []).append((box.x0, box.x1))
        return found

    def test_place_and_last_prefetch(self, halves):
        axes = halves.plot()
        assert self.spans(axes) == {
            (HOST, -0.4): [(4 * MIB, 8 * MIB)],
            (ELSEWHERE, -0.4): [(0, 4 * MIB)],
            (ON_DEVICE, 0.6): [(0, 4 * MIB)],
        }
        assert legend(axes) == ["on the host", "not on the host", "last prefetched to Device(0)"]
        assert ticks(axes) == ["place", "last prefetch"]
        assert axes.get_title("left") == "8.0M: 4.0M on the host, 4.0M not on the host"

    def test_without_a_prefetch(self, alloc):
        buffer = alloc(MIB)
        store(buffer)
        axes = buffer.residency().plot()
        assert self.spans(axes) == {(HOST, -0.4): [(0, MIB)]}
        assert ticks(axes) == ["place"]

    def test_draws_on_given_axes(self, halves):
        _, axes = pyplot.subplots()
        assert halves.plot(ax=axes) is axes

    def test_refuses_what_is_not_axes(self, halves):
        with pytest.raises(TypeError, match="ax must be one matplotlib Axes, got ndarray"):
            halves.plot(ax=pyplot.subplots(2)[1])


def test_unknown_processor_has_no_place(traced):
    canned = Canned(length_ms=512)
    canned.memory("a", PAGE)
    canned.add("remote_map", 0, PAGE, source=0, destination=NONE)
    canned.add("eviction", NOT_A_BUFFER, PAGE)
    assert place_names(traced(canned).plot_pages("a")) == [[(0, "unknown")]]


@pytest.mark.emulator_only
@pytest.mark.parametrize(
    "call", ["t.plot()", "t.plot_causes()", "t.plot_pages((1 << 30, 4096))", "r.plot()"]
)
def test_without_matplotlib(call):
    code = f"""
    import sys
    sys.modules["matplotlib"] = None
    import managedmem
    with managedmem.trace() as t:
        r = managedmem.empty(1).residency()
    try:
        {call}
    except ImportError as error:
        print(error.name, error)
    """
    name = call[2:].partition("(")[0]
    assert run_python(code).stdout == (
        f"matplotlib {name}() needs matplotlib, which is not installed: "
        'pip install "managedmem[plot]"\n'
    )


@pytest.mark.emulator_only
def test_import_and_trace_do_not_import_matplotlib():
    code = """
    import sys, managedmem
    with managedmem.trace() as t:
        pass
    str(t), t._repr_html_(), managedmem.empty(1).residency()._repr_html_()
    print({"matplotlib", "pandas", "numpy"} & set(sys.modules))
    """
    assert run_python(code).stdout == "set()\n"
