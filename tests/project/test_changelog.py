"""CHANGELOG.md: releases that can be read, of names that exist."""

import re

import managedmem
from package_names import exists, full_name
from paths import ROOT

MOST_WORDS = 800
TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
RELEASES = dict(re.findall(r"^## \[(.+?)\].*?\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))


def words_of(text):
    return re.findall(r"\S*\w\S*", text)


def missing_names(text):
    """The names of the package in backticks that it does not have."""
    named = {full_name(name) for name in re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`", text)}
    return sorted(name for name in named - {None} if not exists(name))


def test_a_release_has_few_words():
    assert len(RELEASES) > 2
    assert {n: len(words_of(t)) for n, t in RELEASES.items() if len(words_of(t)) > MOST_WORDS} == {}
    assert len(words_of("- Two words - here, and `f()`")) == 5


def test_the_first_release_is_this_version():
    first, second, *_ = RELEASES
    assert (first, second) == ("Unreleased", managedmem.__version__)
    (date,) = re.findall(rf"^## \[{re.escape(second)}\] - (\S+)$", TEXT, re.MULTILINE)
    assert f"\ndate-released: {date}\n" in (ROOT / "CITATION.cff").read_text()


def test_names_of_the_package_exist():
    current = RELEASES["Unreleased"] + RELEASES[managedmem.__version__]
    assert missing_names(current) == []
    gone = "`managedmem.driver_info()`, `managedmem.torch.unload`, `PrefetchPlan.fat`, `list.pop()`"
    assert missing_names(gone) == [
        "managedmem.PrefetchPlan.fat",
        "managedmem.driver_info",
        "managedmem.torch.unload",
    ]
