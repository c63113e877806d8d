// Orders what the search of the site finds. A reader who types three words or more looks for a message,
// and those are on the page of errors. The other numbers are those of Sphinx.

const words = (new URLSearchParams(window.location.search).get("q") || "").trim().split(/\s+/);

var Scorer = {
  score: ([page, , , , score]) => {
    if (page === "errors" && words.length > 2) return score + 20;
    return page === "changelog" || page.startsWith("develop/") ? score - 4 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
