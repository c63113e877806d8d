/* plan_explain.c: the text of PrefetchPlan.explain. Every number and reason comes from the preview
 * of an execution. */
#include <assert.h>
#include <stdio.h>

#include "plan_object.h"

/* The lines of the text; NULL after a failure. */
typedef struct {
    PyObject *lines;
} explanation;

/* Takes ownership of the line, which may be NULL. */
static void
add_line(explanation *e, PyObject *line)
{
    if (line == NULL || e->lines == NULL || PyList_Append(e->lines, line) < 0) {
        Py_CLEAR(e->lines);
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
single_reason(mm_route route)
{
    static const char *const reasons[] = {
        [MM_SINGLE_REQUESTED] = "dispatch=\"loop\" requests single calls",
        [MM_SINGLE_ONE] = "one range needs no batch call",
        [MM_SINGLE_ORDERED] =
            "ranges share pages and have different locations, so they are issued in order",
        [MM_SINGLE_NO_BATCH_CALL] = "this driver has no batch call, which CUDA 13.0 added",
        [MM_SINGLE_NO_CONCURRENT_ACCESS] =
            "not every device here has concurrent_managed_access, which a batch call needs",
        [MM_SINGLE_TO_HOST] = "to the host, single calls are faster than a batch call",
        [MM_SINGLE_SMALL] = "below 64 KiB, single calls are as fast as a batch call",
        [MM_SINGLE_RESIDENT] =
            "last prefetched to their destination, where single calls are the fastest",
        [MM_SINGLE_REMAINDER] = "it alone would gain from a batch call",
    };

    assert(route > MM_BATCHED && route <= MM_SINGLE_REMAINDER);
    return reasons[route];
}

static const char *
call_name(mm_operation op, bool batch)
{
    if (op == MM_DISCARD_PREFETCH) {
        return "cuMemDiscardAndPrefetchBatchAsync";
    }
    return batch ? "cuMemPrefetchBatchAsync" : "cuMemPrefetchAsync";
}

/* Transfers of one route to one location are a group. True for the first transfer of a group;
 * stores the ranges and bytes of the group. */
static bool
is_group(const mm_plan_preview *p, size_t i, size_t *ranges, size_t *bytes)
{
    const mm_transfer *transfers = p->transfers->transfers;

    *ranges = *bytes = 0;
    for (size_t j = 0; j < p->transfers->count; j++) {
        if (p->work.routes[j] == p->work.routes[i]
            && mm_same_location(transfers[j].location, transfers[i].location)) {
            if (j < i) {
                return false;
            }
            ++*ranges;
            *bytes += transfers[j].range.size;
        }
    }
    return true;
}

static void
explain_deferral(explanation *e, const mm_plan_preview *p, const mm_dispatch_options *options)
{
    char size[SIZE_TEXT];

    if (!p->deferred) {
        return;
    }
    if (options->defer == MM_DEFER_YES) {
        add_line(e, PyUnicode_FromString("1 x cuLaunchHostFunc: defer=True requests it"));
        return;
    }
    add_line(e, PyUnicode_FromFormat(
                    "1 x cuLaunchHostFunc: %s to %s are queued behind it, so that the call "
                    "returns while the stream does the work",
                    size_text(p->deferred_bytes, size),
                    p->deferred_to.type == CU_MEM_LOCATION_TYPE_DEVICE ? "devices" : "the host"));
}

static const char *
batch_reason(const mm_plan_preview *p, const mm_dispatch_options *options)
{
    if (options->dispatch == MM_DISPATCH_BATCH) {
        return "dispatch=\"batch\" requests it";
    }
    return p->op == MM_PREFETCH ? "64 KiB or more each, to a device, and not prefetched there last"
                                : "to a device, and not prefetched there last";
}

/* One line for the batch call and one more for each location in it. */
static void
explain_batch(explanation *e, const mm_plan_preview *p, const mm_dispatch_options *options)
{
    char place[MM_LOCATION_TEXT], size[SIZE_TEXT];
    size_t ranges, bytes;

    if (p->batched == 0) {
        return;
    }
    add_line(e, PyUnicode_FromFormat("1 x %s over %zu range%s: %s", call_name(p->op, true),
                                     p->batched, p->batched == 1 ? "" : "s",
                                     batch_reason(p, options)));
    for (size_t i = 0; i < p->transfers->count; i++) {
        if (p->work.routes[i] == MM_BATCHED && is_group(p, i, &ranges, &bytes)) {
            add_line(e, PyUnicode_FromFormat(
                            "    %zu range%s, %s to %s", ranges, ranges == 1 ? "" : "s",
                            size_text(bytes, size),
                            mm_location_text(p->transfers->transfers[i].location, place)));
        }
    }
}

static void
explain_singles(explanation *e, const mm_plan_preview *p)
{
    char place[MM_LOCATION_TEXT], size[SIZE_TEXT];
    size_t ranges, bytes;

    for (size_t i = 0; i < p->transfers->count; i++) {
        mm_route route = (mm_route)p->work.routes[i];
        if (route != MM_BATCHED && is_group(p, i, &ranges, &bytes)) {
            add_line(e, PyUnicode_FromFormat(
                            "%zu x %s, %s to %s: %s", ranges, call_name(p->op, false),
                            size_text(bytes, size),
                            mm_location_text(p->transfers->transfers[i].location, place),
                            single_reason(route)));
        }
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
explain_edges(explanation *e, const mm_batch *edges)
{
    char size[SIZE_TEXT];
    size_t bytes, calls = count_edges(edges, &bytes);

    if (calls > 0) {
        add_line(e, PyUnicode_FromFormat("%zu x cuMemPrefetchAsync, %s: the pages at the ends, "
                                         "shared with neighbours, keep their contents",
                                         calls, size_text(bytes, size)));
    }
}

/* --- remarks ---------------------------------------------------------------------------- */

/* True if the entry is part of a transfer whose route is MM_SINGLE_RESIDENT. */
static bool
last_prefetch_was_there(const mm_plan_preview *p, const mm_transfer *entry)
{
    for (size_t i = 0; i < p->transfers->count; i++) {
        const mm_transfer *t = &p->transfers->transfers[i];
        if (p->work.routes[i] == MM_SINGLE_RESIDENT && entry->range.size > 0
            && mm_same_location(t->location, entry->location)
            && entry->range.start < t->range.start + t->range.size
            && t->range.start < entry->range.start + entry->range.size) {
            return true;
        }
    }
    return false;
}

/* Names the entries whose last prefetch was to their destination. They may have left it since. */
static void
explain_prefetched(explanation *e, const mm_plan_preview *p, const mm_plan_entry *entries,
                   size_t count)
{
    enum { MOST_NAMED = 16 };
    PyObject *line = NULL, *longer;
    size_t found = 0;

    for (size_t i = 0; i < count; i++) {
        if (!last_prefetch_was_there(p, &entries[i].transfer) || found++ >= MOST_NAMED) {
            continue;
        }
        longer = line == NULL
                     ? PyUnicode_FromFormat("Last prefetched to their destination: entries %zu", i)
                     : PyUnicode_FromFormat("%U, %zu", line, i);
        Py_XDECREF(line);
        line = longer;
        if (line == NULL) {
            break;
        }
    }
    if (line != NULL && found > MOST_NAMED) {
        longer = PyUnicode_FromFormat("%U and %zu more", line, found - MOST_NAMED);
        Py_DECREF(line);
        line = longer;
    }
    if (found > 0) {
        add_line(e, line);
    }
}

static void
explain_entries(explanation *e, const mm_plan_preview *p, const mm_plan_entry *entries,
                size_t count)
{
    size_t empty = 0, ranges = p->transfers->count;

    for (size_t i = 0; i < count; i++) {
        empty += entries[i].transfer.range.size == 0;
    }
    if (ranges < count - empty) {
        add_line(e, PyUnicode_FromFormat("%zu entries are merged into %zu range%s: neighbours and "
                                         "overlaps in one allocation with one destination",
                                         count - empty, ranges, ranges == 1 ? "" : "s"));
    }
    if (empty > 0) {
        add_line(e, PyUnicode_FromFormat("%zu %s no call", empty,
                                         empty == 1 ? "entry without bytes needs"
                                                    : "entries without bytes need"));
    }
    explain_prefetched(e, p, entries, count);
}

static PyObject *
plan_heading(const mm_plan_preview *p, const mm_plan_entry *entries, size_t count)
{
    size_t bytes, calls = count_edges(p->edges, &bytes);
    char size[SIZE_TEXT];

    assert(p->batched <= p->transfers->count);
    calls += p->deferred + (p->batched > 0) + (p->transfers->count - p->batched);
    bytes = 0;
    for (size_t i = 0; i < count; i++) {
        bytes += entries[i].transfer.range.size;
    }
    return PyUnicode_FromFormat("%zu driver call%s for %zu %s, %s:", calls, calls == 1 ? "" : "s",
                                count, count == 1 ? "entry" : "entries", size_text(bytes, size));
}

PyObject *
mm_plan_explanation(const mm_plan_preview *p, const mm_dispatch_options *options,
                    const mm_plan_entry *entries, size_t count)
{
    explanation e = {PyList_New(0)};
    PyObject *newline, *text = NULL;

    add_line(&e, plan_heading(p, entries, count));
    explain_deferral(&e, p, options);
    explain_edges(&e, p->edges);
    explain_batch(&e, p, options);
    explain_singles(&e, p);
    explain_entries(&e, p, entries, count);
    if (mm_is_legacy_stream(options->stream) && (p->op != MM_PREFETCH || p->batched > 0)) {
        add_line(&e,
                 PyUnicode_FromString("On a stream of the library, in the order of the default "
                                      "stream, which itself refuses batch and discard calls"));
    }
    newline = e.lines != NULL ? PyUnicode_FromString("\n") : NULL;
    if (newline != NULL) {
        text = PyUnicode_Join(newline, e.lines);
    }
    Py_XDECREF(newline);
    Py_XDECREF(e.lines);
    return text;
}
