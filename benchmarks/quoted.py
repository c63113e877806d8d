"""Compares the numbers that pages quote with the measured results.

docs/results/quoted.toml lists the sentences. ``results`` names the files with measurements; if
several have a group, the last one counts. A ``[[quote]]`` has a ``page``, a ``text`` of that page
with ``{}`` for each number, and ``values``, a Python expression for that number or for all of them.
In it, each group of results is a dictionary of rows, and each row a dictionary of medians in
nanoseconds (or bytes)::

    text = "holds the caller for {} ms"
    values = 'deferring["prefetch 262144 KiB to the host"]["plain, call"] / ms'

A number agrees if it is the value rounded to the written digits. With ``within = 0.1`` it may
differ by that part of the value. An ``[[elsewhere]]`` entry, with ``page``, ``text`` and
``source``, is for numbers that no benchmark measures. In README and in docs/, but not in
docs/results/, each time, rate, share and ratio must be in an entry of one of these kinds.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .report import SCALES, Report

LIST = Path("docs/results/quoted.toml")
NUMBER = r"\d[\d,]*(?:\.\d+)?"
# A measured number in prose: one, or two with "to", "or", "and" or a slash between them.
UNITS = r"(?:(?:ns|us|ms|s|GB/s|times)\b|%)"
MEASURED = re.compile(rf"{NUMBER}(?:(?: to | or | and | / ){NUMBER})* {UNITS}")


def words_of(page: Path) -> str:
    """The text of a page on one line, so that a quote may run over the end of a line."""
    return " ".join(page.read_text(encoding="utf-8").split())


def pattern_of(text: str) -> re.Pattern[str]:
    """The pattern of a quote."""
    return re.compile(f"({NUMBER})".join(map(re.escape, " ".join(text.split()).split("{}"))))


def names_of(results: Report) -> dict[str, Any]:
    """The names for expressions: the groups, and the units."""
    groups = {
        group: {row.operation: {n: r.median for n, r in row.results.items()} for row in rows}
        for group, rows in results.groups.items()
    }
    return {**SCALES, "KiB": 1 << 10, "MiB": 1 << 20, **groups}


def agrees(written: str, value: float, within: float) -> bool:
    """True if the number on the page is the value, in the written digits."""
    number = float(written.replace(",", ""))
    half_digit = 0.5 * 10.0 ** -len(written.partition(".")[2])
    return abs(number - value) <= max(half_digit * (1 + 1e-9), within * abs(value))


def differences(quote: dict[str, Any], words: str, names: dict[str, Any]) -> Iterator[str]:
    """The errors of one quote."""
    label = f"{quote['page']}: {quote['text']!r}"
    found = [match.groups() for match in pattern_of(quote["text"]).finditer(words)]
    if len(found) != 1:
        yield f"{label} is on the page {len(found)} times, not once"
        return
    values = eval(quote["values"], names)
    values = list(values) if isinstance(values, list | tuple) else [values]
    if len(values) != len(found[0]):
        yield f"{label} has {len(found[0])} numbers and {len(values)} values"
        return
    for written, value in zip(found[0], values, strict=True):
        if not agrees(written, value, quote.get("within", 0.0)):
            yield f"{label} says {written}, measured: {value:.4g}"


def not_listed(page: str, words: str, entries: list[dict[str, Any]]) -> Iterator[str]:
    """The measured numbers of a page that are in no entry."""
    spans = [
        match.span()
        for entry in entries
        if entry["page"] == page
        for match in pattern_of(entry["text"]).finditer(words)
    ]
    for match in MEASURED.finditer(words):
        if not any(start <= match.start() and match.end() <= end for start, end in spans):
            around = words[max(match.start() - 40, 0) : match.end() + 20]
            yield f"{page}: {match[0]!r} is not in {LIST}: ...{around}..."


def pages_of(root: Path) -> dict[str, str]:
    """The words of each page that may quote, by its path from the root."""
    apart = (root / LIST.parent, root / "docs" / "_build")
    found = [root / "README.md", *sorted((root / "docs").rglob("*"))]
    return {
        str(page.relative_to(root)): words_of(page)
        for page in found
        if page.suffix in (".md", ".rst") and not any(folder in page.parents for folder in apart)
    }


def wrong(root: Path, list_path: Path = LIST) -> list[str]:
    """Every difference between the pages of a clone and its results, each as a line."""
    listed = tomllib.loads((root / list_path).read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    for name in listed["results"]:
        names |= names_of(Report.read(root / list_path.parent / name))
    quotes, elsewhere = listed["quote"], listed.get("elsewhere", [])
    words = pages_of(root)
    found = [line for quote in quotes for line in differences(quote, words[quote["page"]], names)]
    found += [
        f"{entry['page']}: {entry['text']!r} is not on the page"
        for entry in elsewhere
        if not pattern_of(entry["text"]).search(words[entry["page"]])
    ]
    for page in words:
        found += not_listed(page, words[page], quotes + elsewhere)
    return found
