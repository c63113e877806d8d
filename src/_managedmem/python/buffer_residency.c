/* buffer_residency.c: buf.residency() and managedmem.residency(): the places of pages as a
 * Residency, a class of managedmem/_residency.py. */
#include "../memory/page_residency.h"
#include "location_object.h"
#include "module_functions.h"
#include "targets.h"

/* The distinct prefetch destinations of the runs, as a tuple. */
static PyObject *
hint_locations(mm_state *state, const mm_places *places)
{
    PyObject *all = PyTuple_New((Py_ssize_t)places->hint_count);

    for (size_t i = 0; all != NULL && i < places->hint_count; i++) {
        if (mm_set_item(all, (Py_ssize_t)i, mm_location_object_new(state, places->hint[i])) < 0) {
            Py_CLEAR(all);
        }
    }
    return all;
}

static int
set_node_bytes(PyObject *dict, int node, uint64_t bytes)
{
    PyObject *key = PyLong_FromLong(node);
    PyObject *value = key ? PyLong_FromUnsignedLongLong(bytes) : NULL;
    int rc = value ? PyDict_SetItem(dict, key, value) : -1;

    Py_XDECREF(key);
    Py_XDECREF(value);
    return rc;
}

/* A dict of the bytes on each NUMA node that has some; None if the nodes are not known. */
static PyObject *
numa_bytes(const mm_range_places *places)
{
    PyObject *dict;

    if (places->node_bytes == NULL) {
        Py_RETURN_NONE;
    }
    dict = PyDict_New();
    for (int node = 0; dict != NULL && node < MM_MOST_NODES; node++) {
        if (places->node_bytes[node] > 0
            && set_node_bytes(dict, node, places->node_bytes[node]) < 0) {
            Py_CLEAR(dict);
        }
    }
    return dict;
}

/* (address, nbytes, on_host, runs, numa), with the runs as the bytes of their structs. */
static PyObject *
range_record(const mm_range_places *places, mm_range range)
{
    PyObject *numa = numa_bytes(places), *runs;

    if (numa == NULL) {
        return NULL;
    }
    /* Not "y#": built with newer headers, it fails on Python 3.11. */
    runs = PyBytes_FromStringAndSize((const char *)places->run,
                                     (Py_ssize_t)(places->count * sizeof *places->run));
    if (runs == NULL) {
        Py_DECREF(numa);
        return NULL;
    }
    return Py_BuildValue("KKKNN", (unsigned long long)range.start, (unsigned long long)range.size,
                         (unsigned long long)places->on_host, runs, numa);
}

static PyObject *
range_records(const mm_places *places, const mm_batch *ranges)
{
    PyObject *all = PyTuple_New((Py_ssize_t)places->count);

    assert(places->count == ranges->count);
    for (size_t i = 0; all != NULL && i < places->count; i++) {
        PyObject *one = range_record(&places->range[i], ranges->transfers[i].range);
        if (mm_set_item(all, (Py_ssize_t)i, one) < 0) {
            Py_CLEAR(all);
        }
    }
    return all;
}

static PyObject *
make_residency(mm_state *state, const mm_places *places, const mm_batch *ranges)
{
    PyObject *hints = hint_locations(state, places), *result = NULL;
    PyObject *records = hints ? range_records(places, ranges) : NULL;

    if (records != NULL) {
        result = mm_call_python("managedmem._residency", "make", "(OO)", records, hints);
    }
    Py_XDECREF(records);
    Py_XDECREF(hints);
    return result;
}

const char mm_buffer_residency_doc[] =
    "residency($self, /)\n--\n\n"
    "Where the pages of the buffer are now, as far as that can be known.\n"
    "\n"
    "Returns a Residency: bytes on the host, bytes that are not, and the runs of pages with the\n"
    "evidence for each. A page counts as on the host if the host has it mapped, which is certain.\n"
    "Drivers from CUDA 13.4 on report where the other pages are. Older drivers do not report the\n"
    "device of a page, and the destination of its last prefetch is only a hint: the page can have\n"
    "moved since.\n"
    "\n"
    "No page is touched or moved. The result is a snapshot: other threads and devices go on\n"
    "moving pages, and queued work that has not run yet is not in it. The call takes 2 us for\n"
    "each MiB, or up to 40 us where memory on the host can be on several NUMA nodes.\n"
    "\n"
    "Raises RuntimeError when closed, ValueError if this is neither managed memory nor, with CUDA\n"
    "13.4, system memory that every device can access, OSError if /proc/self/pagemap cannot be\n"
    "read, NotImplementedError without concurrent_managed_access, and before CUDA 13.4 with\n"
    "direct_managed_mem_access_from_host. Safe from every thread; releases the GIL.\n"
    "Driver: cuMemGetLocationInfo, before CUDA 13.4 cuMemRangeGetAttributes.";

PyObject *
mm_buffer_residency(PyObject *op, PyObject *Py_UNUSED(none))
{
    mm_buffer *b = mm_buffer_of(op);
    PyObject *result = NULL;
    mm_buffer_use use;
    mm_places places;
    mm_batch ranges;
    mm_status st;
    int rc;

    if (mm_buffer_enter(b, MM_LOCATE, NULL, &use) < 0) {
        return NULL;
    }
    mm_batch_one(&ranges, use.range, mm_host());
    Py_BEGIN_ALLOW_THREADS
    rc = mm_places_read(use.cu, &mm_kernel_pagemap, &ranges, &places, &st);
    mm_buffer_leave(&use);
    Py_END_ALLOW_THREADS
    result = rc < 0 ? mm_raise(b->state, &st) : make_residency(b->state, &places, &ranges);
    mm_places_free(&places);
    return result;
}

const char mm_residency_doc[] =
    "residency(targets)\n--\n\n"
    "Where the pages of memory are now, as far as that can be known.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "targets : target or sequence of targets\n"
    "    As for advise(), in managed memory; with CUDA 13.4 also in system memory that every device can\n"
    "    access.\n"
    "\n"
    "Returns one Residency. For several targets it has the sums, and its parts are the Residency\n"
    "of each target; a page of two targets counts in both. See ManagedBuffer.residency() for the\n"
    "meaning of the result, the errors and the cost. Raises TypeError and ValueError for bad\n"
    "targets. Safe from every thread; releases the GIL.\n"
    "Driver: cuMemGetLocationInfo, cuMemRangeGetAttributes, cuPointerGetAttributes.";

PyObject *
mm_residency(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = mm_residency_doc};
    mm_state *state = mm_module_state(module);
    PyObject *argv[1], *result = NULL;
    mm_places places = {.range = NULL};
    mm_targets t;
    mm_status st;
    int rc;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_targets_read(state, argv[0], MM_LOCATE, &t) < 0) {
        return NULL;
    }
    rc = mm_targets_enter(&t, NULL, &st);
    if (rc == 0) {
        Py_BEGIN_ALLOW_THREADS
        rc = mm_places_read(t.cu, &mm_kernel_pagemap, &t.batch, &places, &st);
        mm_targets_leave(&t);
        Py_END_ALLOW_THREADS
    }
    if (rc == 0) {
        result = make_residency(state, &places, &t.batch);
    }
    mm_places_free(&places);
    mm_targets_release(&t);
    return rc < 0 ? mm_raise(state, &st) : result;
}
