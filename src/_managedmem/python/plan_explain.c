/* plan_explain.c: the numbers of PrefetchPlan.explain, from the preview of an execution. The words are
 * in managedmem/_plan_text.py. */
#include <assert.h>

#include "plan_object.h"
#include "state.h"

_Static_assert(MM_BATCHED == 0 && MM_SINGLE_RESIDENT == 8 && MM_SINGLE_REMAINDER == 9,
               "the order of the reasons in _plan_text.py");

/* (route, location, start, nbytes) */
static PyObject *
transfer_tuple(const mm_transfer *t, int route)
{
    char place[MM_LOCATION_TEXT];

    return Py_BuildValue("isKK", route, mm_location_text(t->location, place),
                         (unsigned long long)t->range.start, (unsigned long long)t->range.size);
}

static PyObject *
entry_tuples(const mm_plan_entry *entries, size_t count)
{
    PyObject *all = PyTuple_New((Py_ssize_t)count);

    for (size_t i = 0; all != NULL && i < count; i++) {
        if (mm_set_item(all, (Py_ssize_t)i, transfer_tuple(&entries[i].transfer, 0)) < 0) {
            Py_CLEAR(all);
        }
    }
    return all;
}

static PyObject *
range_tuples(const mm_plan_preview *p)
{
    PyObject *all = PyTuple_New((Py_ssize_t)p->transfers->count);

    for (size_t i = 0; all != NULL && i < p->transfers->count; i++) {
        PyObject *one = transfer_tuple(&p->transfers->transfers[i], p->work.routes[i]);
        if (mm_set_item(all, (Py_ssize_t)i, one) < 0) {
            Py_CLEAR(all);
        }
    }
    return all;
}

static PyObject *
edge_sizes(const mm_batch *edges)
{
    PyObject *all = PyTuple_New((Py_ssize_t)edges->count);

    for (size_t i = 0; all != NULL && i < edges->count; i++) {
        if (mm_set_item(all, (Py_ssize_t)i, PyLong_FromSize_t(edges->transfers[i].range.size))
            < 0) {
            Py_CLEAR(all);
        }
    }
    return all;
}

/* None, or the bytes that are deferred and their destination. */
static PyObject *
deferral(const mm_plan_preview *p)
{
    if (!p->deferred) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("Ks", (unsigned long long)p->deferred_bytes,
                         p->deferred_to.type == CU_MEM_LOCATION_TYPE_DEVICE ? "devices"
                                                                            : "the host");
}

PyObject *
mm_plan_explanation(const mm_plan_preview *p, const mm_dispatch_options *options,
                    const mm_plan_entry *entries, size_t count)
{
    PyObject *listed = entry_tuples(entries, count);
    PyObject *ranges = listed ? range_tuples(p) : NULL;
    PyObject *edges = ranges ? edge_sizes(p->edges) : NULL;
    PyObject *deferred = edges ? deferral(p) : NULL;
    PyObject *text = NULL;

    if (deferred != NULL) {
        text = mm_call_python(
            "managedmem._plan_text", "explanation", "(iOOOOiii)", p->op == MM_DISCARD_PREFETCH,
            listed, ranges, edges, deferred, options->dispatch == MM_DISPATCH_BATCH,
            options->defer == MM_DEFER_YES, mm_is_legacy_stream(options->stream));
    }
    Py_XDECREF(deferred);
    Py_XDECREF(edges);
    Py_XDECREF(ranges);
    Py_XDECREF(listed);
    return text;
}
