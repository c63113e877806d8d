"""The numbers on the pages are those of the committed results, as benchmarks/quoted.py says."""

import re

import pytest

from benchmarks import __main__ as command
from benchmarks import bars, quoted
from benchmarks.measure import Result, Row
from benchmarks.report import Report
from paths import ROOT

RESULTS = ROOT / "docs" / "results"
LIST = """
results = ["earlier.json", "measured.json"]
[[quote]]
page = "README.md"
text = "returns after {} us, {} ms plain"
values = '[jobs["prefetch"][by] / unit for by, unit in (("ours", us), ("plain", ms))]'
[[elsewhere]]
page = "README.md"
text = "A thread wakes after {} us"
source = "timed by itself"
"""
PAGE = "The call returns after\n8 us, 11.2 ms plain. A thread wakes after 150 us.\n"


def test_pages_quote_what_was_measured():
    assert quoted.wrong(ROOT) == []


@pytest.fixture
def clone(tmp_path):
    """A page, the list of its quotes, and results: 8.2 us and 11.217 ms."""
    folder = tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    (folder / "quoted.toml").write_text(LIST)
    row = Row("prefetch", {"ours": Result(8200.0), "plain": Result(11_217_000.0)}, "us")
    Report({}, {"jobs": [row]}).write(folder / "measured.json")
    earlier = Row("prefetch", {"ours": Result(9100.0), "plain": Result(15_000_000.0)}, "us")
    Report({}, {"jobs": [earlier]}).write(folder / "earlier.json")
    (tmp_path / "README.md").write_text(PAGE)
    return tmp_path


def test_agreement_is_silent(clone):
    assert quoted.wrong(clone) == []


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ("11.2 ms", "14.6 ms", "says 14.6, measured: 11.22"),
        ("11.2 ms", "11.3 ms", "says 11.3, measured"),
        ("after\n8 us", "after\n9 us", "says 9, measured: 8.2"),
        ("returns after", "comes back after", "is on the page 0 times"),
        ("plain.", "plain. It returns after 8 us, 11.2 ms plain.", "is on the page 2 times"),
        ("150 us.", "150 us. Another takes 24 GB/s.", "'24 GB/s' is not in"),
        ("150 us.", "150 us. Another takes 3 to 5 ms.", "'3 to 5 ms' is not in"),
        ("150 us.", "150 us. Another takes 4 % less.", "'4 %' is not in"),
        ("150 us.", "150 us. Another is 2 to 6 times as fast.", "'2 to 6 times' is not in"),
        ("150 us.", "150 us. Another takes 9 s.", "'9 s' is not in"),
        ("A thread wakes", "It wakes", "'A thread wakes after {} us' is not on the page"),
    ],
)
def test_a_wrong_number_is_named(clone, written, instead, said):
    assert written in PAGE
    (clone / "README.md").write_text(PAGE.replace(written, instead))
    found = quoted.wrong(clone)
    assert any(said in line for line in found), found


def test_pages_of_docs_are_read_and_measured_tables_are_not(clone):
    for page in ("docs/develop/rooms.rst", "docs/results/h200.md", "docs/_build/old.md"):
        (clone / page).parent.mkdir(exist_ok=True)
        (clone / page).write_text("It takes 50 ns.\n")
    (found,) = quoted.wrong(clone)
    assert found.startswith("docs/develop/rooms.rst: '50 ns' is not in")


def test_other_results_make_the_pages_wrong(clone):
    results = clone / "docs" / "results" / "measured.json"
    results.write_text(results.read_text().replace("11217000.0", "14617000.0"))
    assert [line for line in quoted.wrong(clone) if "says 11.2, measured: 14.62" in line]


def test_values_that_do_not_fit_the_text(clone):
    listed = clone / "docs" / "results" / "quoted.toml"
    listed.write_text(LIST.replace(', ("plain", ms))', ",)"))
    assert "has 2 numbers and 1 values" in quoted.wrong(clone)[0]


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_each_page_of_tables_is_what_its_file_gives(page):
    def without_spaces(text):
        return re.sub(r"\s+", " ", text)

    text = command.text_of(command.read([page], []))
    assert without_spaces(text) in without_spaces(page.with_suffix(".md").read_text("utf-8"))


def test_the_picture_of_language_models_is_of_its_results():
    drawn = (RESULTS / "language.svg").read_text("utf-8")
    assert drawn == bars.picture(command.read([RESULTS / "h100-2026-11-26.json"], []))
    assert "1,533 ms ▸</text>" in drawn and ">▸ goes beyond the picture</text>" in drawn
