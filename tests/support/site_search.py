"""Searches the built site as searchtools.js of Sphinx and docs/search_scorer.js do.

A browser would run them; this is the same sum of points, over the same searchindex.js.
"""

import json
import re

from sphinx.search.en import SearchEnglish

ENGLISH = SearchEnglish({})
OBJECT_PRIORITY = {0: 15, 1: 5, 2: -5}


def index_of(site):
    """The index of a built site: its searchindex.js without the call around it."""
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    return json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))


def by_titles(index, query):
    for title, places in index["alltitles"].items():
        if query in title.lower() and 2 * len(query) >= len(title):
            for page, _ in places:
                yield page, round(15 * len(query) / len(title)) + (index["titles"][page] == title)


def by_entries(index, query):
    """The main entries of the index, such as the terms of the glossary; others come last."""
    for entry, places in index["indexentries"].items():
        if query in entry and 2 * len(query) >= len(entry):
            for page, _, is_main in places:
                if is_main:
                    yield page, round(100 * len(query) / len(entry))


def by_objects(index, words):
    for prefix, objects in index["objects"].items():
        for page, kind, priority, _, name in objects:
            last = name.lower().split(".")[-1]
            title = f"{prefix} {name} {index['objnames'][str(kind)][2]} {index['titles'][page]}"
            for word in words:
                if word in f"{prefix}.{name}".lower() and all(w in title.lower() for w in words):
                    points = 11 if last == word else 6 if word in last else 0
                    yield page, points + OBJECT_PRIORITY.get(priority, 0)


def by_words(index, words):
    """Pages with all words, each with the points of its best word."""
    stems = {ENGLISH.stem(w) for w in words if w not in ENGLISH.stopwords and not w.isdigit()}
    points = {}
    for stem in stems:
        for kind, whole, partial in (("terms", 5, 2), ("titleterms", 15, 7)):
            terms = index[kind]
            exact = [stem] if stem in terms else []
            parts = [] if exact or len(stem) < 3 else [term for term in terms if stem in term]
            for term in exact + parts:
                pages = terms[term] if isinstance(terms[term], list) else [terms[term]]
                for page in pages:
                    points.setdefault(page, {})[stem] = whole if exact else partial
    for page, by_stem in points.items():
        if len(by_stem) == len(stems):
            yield page, max(by_stem.values())


def moved_by(page, query):
    """What docs/search_scorer.js adds to the points of a page."""
    if page == "errors" and len(query.split()) > 2:
        return 20
    return -4 if page == "changelog" or page.startswith("develop/") else 0


def found(index, query):
    """The names of the pages that a query finds, the best first, each once."""
    query = query.lower().strip()
    words = re.findall(r"\w+", query)
    results = [*by_titles(index, query), *by_entries(index, query)]
    results += [*by_objects(index, words), *by_words(index, words)]
    best = {}
    for page, points in results:
        best[page] = max(points + moved_by(index["docnames"][page], query), best.get(page, -100))
    ordered = sorted(best, key=lambda page: (-best[page], index["titles"][page].lower()))
    return [index["docnames"][page] for page in ordered]
