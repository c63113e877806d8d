/* plan_explain.c: what PrefetchPlan.explain says. Every number and every reason comes from the
 * decision that an execution acts on. */
#include <stdio.h>

#include "plan_object.h"

/* Text that grows by lines; NULL once something failed. */
typedef struct {
    PyObject *lines;
} words;

static void
add_line(words *w, PyObject *line)
{
    if (line == NULL || w->lines == NULL || PyList_Append(w->lines, line) < 0) {
        Py_CLEAR(w->lines);
    }
    Py_XDECREF(line);
}

enum { SIZE_TEXT = 32 };

static const char *
size_text(size_t bytes, char text[SIZE_TEXT])
{
    static const char *const units[] = {"bytes", "KiB", "MiB"};
    int unit = 0;

    while (unit < 2 && bytes >= 1024 && bytes % 1024 == 0) {
        bytes /= 1024;
        unit++;
    }
    (void)snprintf(text, SIZE_TEXT, "%zu %s", bytes, units[unit]);
    return text;
}

/* --- the calls -------------------------------------------------------------------------- */

static const char *
why_alone(mm_route way)
{
    switch (way) {
    case MM_SINGLE_REQUESTED:
        return "dispatch=\"loop\" asks for a call each";
    case MM_SINGLE_ONE:
        return "one range needs no batch call";
    case MM_SINGLE_ORDERED:
        return "ranges share pages and go to different places, so they go in order";
    case MM_SINGLE_NO_BATCH_CALL:
        return "this driver has no batch call, CUDA 13.0 has";
    case MM_SINGLE_NO_CONCURRENT_ACCESS:
        return "not every device here has concurrent_managed_access, which a batch call needs";
    case MM_SINGLE_TO_HOST:
        return "to the host a call each is faster than a batch call";
    case MM_SINGLE_SMALL:
        return "below 64 KiB a call each is as fast as a batch call";
    case MM_SINGLE_RESIDENT:
        return "last prefetched to where they go, and then a call each is the fastest";
    case MM_SINGLE_REMAINDER:
        return "it alone would gain from a batch call";
    default:
        return "";
    }
}

static const char *
function_name(mm_action what, bool batch)
{
    if (what == MM_DO_DISCARD_PREFETCH) {
        return "cuMemDiscardAndPrefetchBatchAsync";
    }
    return batch ? "cuMemPrefetchBatchAsync" : "cuMemPrefetchAsync";
}

/* Sums over moves of one way and one location are marked as told, so that each counts once. */
enum { TOLD = 255 };

typedef struct {
    CUmemLocation where;
    mm_route way;
    size_t ranges, bytes;
} group;

/* The next group of moves with that way (any of those alone: -1); false when there is none. */
static bool
next_group(mm_plan_preview *o, bool together, group *g)
{
    g->ranges = g->bytes = 0;
    for (size_t i = 0; i < o->transfers->count; i++) {
        const mm_transfer *m = &o->transfers->transfers[i];
        unsigned char *way = &o->work.routes[i];
        if (*way == TOLD || (*way == MM_BATCHED) != together
            || (g->ranges > 0 && (*way != g->way || !mm_same_location(m->where, g->where)))) {
            continue;
        }
        g->way = (mm_route)*way;
        g->where = m->where;
        g->ranges++;
        g->bytes += m->range.size;
        *way = TOLD;
    }
    return g->ranges > 0;
}

static void
tell_deferral(words *w, const mm_plan_preview *o, const mm_dispatch_options *how)
{
    char size[SIZE_TEXT];

    if (!o->deferred) {
        return;
    }
    if (how->defer == MM_DEFER_YES) {
        add_line(w, PyUnicode_FromString("1 x cuLaunchHostFunc: defer=True asks for it"));
        return;
    }
    add_line(w, PyUnicode_FromFormat(
                    "1 x cuLaunchHostFunc: %s to %s are queued behind it, so that the call "
                    "returns while the stream does the work",
                    size_text(o->deferred_bytes, size),
                    o->deferred_to.type == CU_MEM_LOCATION_TYPE_DEVICE ? "devices" : "the host"));
}

static const char *
why_together(const mm_plan_preview *o, const mm_dispatch_options *how)
{
    if (how->dispatch == MM_DISPATCH_BATCH) {
        return "dispatch=\"batch\" asks for it";
    }
    return o->what == MM_DO_PREFETCH
               ? "64 KiB or more each, to a device, and not prefetched there last"
               : "to a device, and not prefetched there last";
}

/* One line for the batch call and one more for each location in it. */
static void
tell_batch(words *w, mm_plan_preview *o, const mm_dispatch_options *how)
{
    char place[MM_LOCATION_TEXT], size[SIZE_TEXT];
    group g;

    if (o->together == 0) {
        return;
    }
    add_line(w,
             PyUnicode_FromFormat("1 x %s over %zu range%s: %s", function_name(o->what, true),
                                  o->together, o->together == 1 ? "" : "s", why_together(o, how)));
    while (next_group(o, true, &g)) {
        add_line(w, PyUnicode_FromFormat("    %zu range%s, %s to %s", g.ranges,
                                         g.ranges == 1 ? "" : "s", size_text(g.bytes, size),
                                         mm_location_text(g.where, place)));
    }
}

static void
tell_singles(words *w, mm_plan_preview *o)
{
    char place[MM_LOCATION_TEXT], size[SIZE_TEXT];
    group g;

    while (next_group(o, false, &g)) {
        add_line(w, PyUnicode_FromFormat("%zu x %s, %s to %s: %s", g.ranges,
                                         function_name(o->what, false), size_text(g.bytes, size),
                                         mm_location_text(g.where, place), why_alone(g.way)));
    }
}

/* The number of edges that are not empty, and their bytes. */
static size_t
count_edges(const mm_batch *edges, size_t *bytes)
{
    size_t count = 0;

    *bytes = 0;
    for (size_t i = 0; i < edges->count; i++) {
        *bytes += edges->transfers[i].range.size;
        count += edges->transfers[i].range.size > 0;
    }
    return count;
}

static void
tell_edges(words *w, const mm_batch *edges)
{
    char size[SIZE_TEXT];
    size_t bytes, calls = count_edges(edges, &bytes);

    if (calls > 0) {
        add_line(w, PyUnicode_FromFormat("%zu x cuMemPrefetchAsync, %s: the pages at the ends, "
                                         "shared with neighbours, keep their contents",
                                         calls, size_text(bytes, size)));
    }
}

/* --- remarks ---------------------------------------------------------------------------- */

/* Whether the entry is (a part of) a move whose way is MM_SINGLE_RESIDENT. */
static bool
is_there(const mm_plan_preview *o, const mm_transfer *entry)
{
    for (size_t i = 0; i < o->transfers->count; i++) {
        const mm_transfer *m = &o->transfers->transfers[i];
        if (o->work.routes[i] == MM_SINGLE_RESIDENT && entry->range.size > 0
            && mm_same_location(m->where, entry->where)
            && entry->range.start < m->range.start + m->range.size
            && m->range.start < entry->range.start + entry->range.size) {
            return true;
        }
    }
    return false;
}

enum { MOST_NAMED = 16 };

/* Names the entries that seem to be where they shall go; an empty str when there are none. */
static PyObject *
entries_there(const mm_plan_preview *o, const mm_plan_entry *entries, size_t count)
{
    PyObject *line = PyUnicode_FromString("");
    size_t found = 0;

    for (size_t i = 0; line != NULL && i < count; i++) {
        PyObject *longer;
        if (!is_there(o, &entries[i].move) || found++ >= MOST_NAMED) {
            continue;
        }
        longer = PyUnicode_FromFormat("%U%s%zu", line,
                                      found > 1 ? ", " : "Seem to be there already: entries ", i);
        Py_DECREF(line);
        line = longer;
    }
    if (line != NULL && found > MOST_NAMED) {
        PyObject *longer = PyUnicode_FromFormat("%U and %zu more", line, found - MOST_NAMED);
        Py_DECREF(line);
        line = longer;
    }
    return line;
}

static void
tell_remarks(words *w, const mm_plan_preview *o, const mm_dispatch_options *how, size_t count,
             size_t empty, PyObject *there)
{
    if (o->transfers->count < count - empty) {
        add_line(w, PyUnicode_FromFormat("%zu entries are merged into %zu range%s: neighbours and "
                                         "overlaps in one allocation that go to one place",
                                         count - empty, o->transfers->count,
                                         o->transfers->count == 1 ? "" : "s"));
    }
    if (empty > 0) {
        add_line(w, PyUnicode_FromFormat("%zu %s no call", empty,
                                         empty == 1 ? "entry without bytes needs"
                                                    : "entries without bytes need"));
    }
    if (PyUnicode_GetLength(there) > 0) {
        add_line(w, Py_NewRef(there));
    }
    if (mm_is_legacy_stream(how->stream) && (o->what != MM_DO_PREFETCH || o->together > 0)) {
        add_line(w, PyUnicode_FromString("In a stream of the library, in the order of the default "
                                         "stream, which refuses batch and discard calls"));
    }
}

static size_t
count_empty(const mm_plan_entry *entries, size_t count)
{
    size_t empty = 0;

    for (size_t i = 0; i < count; i++) {
        empty += entries[i].move.range.size == 0;
    }
    return empty;
}

static PyObject *
heading(const mm_plan_preview *o, const mm_plan_entry *entries, size_t count)
{
    size_t bytes, calls = count_edges(o->edges, &bytes);
    char size[SIZE_TEXT];

    calls += o->deferred + (o->together > 0) + (o->transfers->count - o->together);
    bytes = 0;
    for (size_t i = 0; i < count; i++) {
        bytes += entries[i].move.range.size;
    }
    return PyUnicode_FromFormat("%zu driver call%s for %zu %s, %s:", calls, calls == 1 ? "" : "s",
                                count, count == 1 ? "entry" : "entries", size_text(bytes, size));
}

PyObject *
mm_plan_words(mm_plan_preview *o, const mm_dispatch_options *how, const mm_plan_entry *entries,
              size_t count)
{
    /* First, because telling the calls uses up the ways. */
    PyObject *there = entries_there(o, entries, count), *newline, *text = NULL;
    words w = {PyList_New(0)};

    if (there == NULL) {
        Py_XDECREF(w.lines);
        return NULL;
    }
    add_line(&w, heading(o, entries, count));
    tell_deferral(&w, o, how);
    tell_edges(&w, o->edges);
    tell_batch(&w, o, how);
    tell_singles(&w, o);
    tell_remarks(&w, o, how, count, count_empty(entries, count), there);
    newline = PyUnicode_FromString("\n");
    if (w.lines != NULL && newline != NULL) {
        text = PyUnicode_Join(newline, w.lines);
    }
    Py_XDECREF(newline);
    Py_XDECREF(w.lines);
    Py_DECREF(there);
    return text;
}
