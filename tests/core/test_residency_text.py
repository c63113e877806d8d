"""A Residency as text, as plain values and as a picture."""

import itertools
import json
import random
import xml.dom.minidom
from struct import Struct

import pytest

from constants import MIB, PAGE
from managedmem import Device, Host
from managedmem._residency import make
from residencies import HINT, HOST, MAP, OFF, residency, store

pytestmark = pytest.mark.usefixtures("eager")


class TestText:
    def test_is_short(self, alloc):
        buffer = alloc(64 * MIB)
        store(buffer)
        assert str(residency(buffer)) == "64.0M: 64.0M on the host, 0 not on the host"
        buffer[: 32 * MIB].prefetch(Device(0))
        text = "64.0M: 32.0M on the host, 32.0M not on the host (last asked to Device(0))"
        assert str(residency(buffer)) == text
        assert repr(residency(buffer)) == f"<Residency {text}>"

    def test_of_a_hint_for_a_part(self, alloc):
        buffer = alloc(8 * PAGE)
        buffer.range(PAGE, 2 * PAGE).prefetch(Device(0))
        assert str(residency(buffer)) == (
            "32.0K: 0 on the host, 32.0K not on the host (8.0K last asked to Device(0))"
        )

    def test_does_not_call_a_prefetch_to_the_host_a_hint(self):
        found = fabricated([(0, PAGE, 1, 0, 1)], hints=(Host(),))
        assert str(found) == "4.0K: 0 on the host, 4.0K not on the host"
        assert found.last_asked_to == {Host(): PAGE}

    def test_bar(self, alloc):
        buffer = alloc(64 * MIB)
        store(buffer)
        buffer[: 30 * MIB].prefetch(Device(0))
        found = residency(buffer)
        legend = "  # on the host, . not on the host"
        assert found.bar(8) == f"{found}\n[...+####]{legend}, + mixed"
        assert found.bar() == f"{found}\n[{'.' * 30}{'#' * 34}]{legend}"

    def test_bar_of_nothing(self):
        assert fabricated([]).bar() == "0: 0 on the host, 0 not on the host"

    @pytest.mark.parametrize(
        ("width", "error", "text"),
        [
            (0, ValueError, "width must be from 1 to 4096, got 0"),
            (4097, ValueError, "width must be from 1 to 4096, got 4097"),
            (True, TypeError, "width must be an int, got True"),
            (2.0, TypeError, "width must be an int, got 2.0"),
        ],
    )
    def test_bar_of_another_width(self, width, error, text):
        with pytest.raises(error, match=text):
            fabricated([(0, PAGE, 1, 0, 0)]).bar(width)

    def test_in_a_terminal_of_ipython(self):
        class Printer(list):
            text = list.append

        found, printer = fabricated([(0, PAGE, 1, 0, 0)]), Printer()
        found._repr_pretty_(printer, False)
        assert printer == [found.bar()]

    def test_as_plain_values(self, alloc):
        buffer = alloc(4 * PAGE)
        store(buffer)
        buffer.range(0, PAGE).prefetch(Device(0))
        found = residency(buffer).to_dict()
        numa = found.pop("numa")
        assert numa is None or sum(numa.values()) == 3 * PAGE
        assert json.loads(json.dumps(found)) == {
            "version": 1,
            "nbytes": 4 * PAGE,
            "on_host": 3 * PAGE,
            "not_on_host": PAGE,
            "fraction_on_host": 0.75,
            "last_asked_to": {"Device(0)": PAGE},
            "runs": [
                {
                    "offset": 0,
                    "nbytes": PAGE,
                    "where": OFF,
                    "evidence": HINT,
                    "last_prefetch_location": "Device(0)",
                },
                {
                    "offset": PAGE,
                    "nbytes": 3 * PAGE,
                    "where": HOST,
                    "evidence": MAP,
                    "last_prefetch_location": None,
                },
            ],
        }

    def test_with_numa_nodes(self):
        """Made by hand, because most machines have one node."""
        numa = fabricated([(0, PAGE, 0, 0, 0)], numa={0: 100, 3: 200}).numa
        assert numa == {0: 100, 3: 200}
        record = (0, PAGE, 0, packed((0, PAGE, 1, 0, 0)))
        nodes = ({0: 5, 1: 2}, {1: 3}, None)
        both = make(tuple((*record, each) for each in nodes), ())
        assert both.numa == {0: 5, 1: 5}
        assert both.to_dict()["numa"] == {"0": 5, "1": 5}
        assert make(((*record, None),), ()).numa is None


RUN = Struct("<QQBBB5x")


def packed(*runs):
    return b"".join(RUN.pack(*run) for run in runs)


def fabricated(runs, hints=(), numa=None):
    """A Residency of runs: offset, bytes, place, evidence, hint."""
    on_host = sum(run[1] for run in runs if run[2] == 0)
    record = (0, sum(run[1] for run in runs), on_host, packed(*runs), numa)
    return make((record,), hints)


def strip(found):
    """The rectangles of the picture: first column, columns, colour."""
    return bars(found._repr_html_())


def bars(html):
    page = xml.dom.minidom.parseString(html)
    return [
        (int(bar.getAttribute("x")), int(bar.getAttribute("width")), bar.getAttribute("fill"))
        for bar in page.getElementsByTagName("rect")
    ]


class TestPicture:
    BLUE, MIXED, GREY = "#0072b2", "#4d4d4d", "#cfcfcf"

    def test_shows_the_memory_in_order(self):
        found = fabricated([(0, 512, 0, 0, 0), (512, 256, 1, 0, 0), (768, 256, 0, 0, 0)])
        assert strip(found) == [(0, 128, self.BLUE), (128, 64, self.GREY), (192, 64, self.BLUE)]

    def test_shows_columns_that_are_both(self):
        found = fabricated([(0, 1, 0, 0, 0), (1, 1023, 1, 0, 0)])
        assert strip(found) == [(0, 1, self.MIXED), (1, 255, self.GREY)]

    def test_of_less_bytes_than_columns(self):
        found = fabricated([(0, 1, 1, 0, 0), (1, 1, 0, 0, 0)])
        assert strip(found) == [(0, 128, self.GREY), (128, 128, self.BLUE)]

    def test_stays_small_for_many_runs(self):
        count = 100_000
        runs = b"".join(RUN.pack(i * PAGE, PAGE, i % 2, 0, 0) for i in range(count))
        found = make(((0, count * PAGE, count // 2 * PAGE, runs, None),), ())
        html = found._repr_html_()
        assert bars(html) == [(0, 256, self.MIXED)]
        assert len(html) < 20_000
        runs = found.runs
        assert len(runs) == count
        assert runs[-1] == ((count - 1) * PAGE, PAGE, OFF, MAP, None)

    @pytest.mark.parametrize("seed", range(5))
    def test_has_every_column_once(self, seed):
        chance = random.Random(seed)
        ends = sorted(chance.sample(range(1, 10**9), 2000))
        pairs = itertools.pairwise([0, *ends])
        found = fabricated(
            [(first, end - first, i % 2, 0, 0) for i, (first, end) in enumerate(pairs)]
        )
        bars = strip(found)
        assert [first for first, _, _ in bars] == [
            0,
            *itertools.accumulate(count for _, count, _ in bars[:-1]),
        ]
        assert sum(count for _, count, _ in bars) == 256
