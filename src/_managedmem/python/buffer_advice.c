/* buffer_advice.c: advice as properties of a buffer, and buf.page_runs() with its records, PageRun.
 * Nothing is cached: each read queries the driver, each write advises it. */
#include "../memory/advice.h"
#include "../memory/page_runs.h"

#include "buffer.h"
#include "foreign_location.h"
#include "location_object.h"
#include "oversubscription.h"

PyObject *
mm_buffer_get_read_mostly(PyObject *op, void *Py_UNUSED(closure))
{
    mm_buffer *b = mm_buffer_of(op);
    mm_buffer_use use;
    mm_status st;
    bool on = false;
    PyThreadState *detached;
    int rc;

    if (mm_buffer_enter(b, MM_QUERY, NULL, &use) < 0) {
        return NULL;
    }
    detached = mm_buffer_begin_query(&use);
    rc = mm_range_read_mostly(use.cu, use.range, &on, &st);
    mm_buffer_end_query(&use, detached);
    return rc < 0 ? mm_raise(b->state, &st) : PyBool_FromLong(on);
}

typedef struct {
    CUmem_advise advice;
    CUmemLocation location;
} one_advice;

static int
advise_entered(mm_driver *cu, mm_range range, const void *arguments, mm_status *st)
{
    const one_advice *one = arguments;

    return mm_range_advise(cu, range, one->advice, one->location, st);
}

static int
advise_buffer(mm_buffer *b, CUmem_advise advice, CUmemLocation location)
{
    one_advice one = {advice, location};

    return mm_buffer_advise(b, advise_entered, &one);
}

/* AttributeError for `del buf.name`, where value is NULL. */
static int
refuse_delete(PyObject *value, const char *name, const char *instead)
{
    if (value == NULL) {
        return MM_ERROR(PyExc_AttributeError, "%s cannot be deleted; assign %s", name, instead);
    }
    return 0;
}

int
mm_buffer_set_read_mostly(PyObject *op, PyObject *value, void *Py_UNUSED(closure))
{
    mm_buffer *b = mm_buffer_of(op);
    bool on;

    if (refuse_delete(value, "read_mostly", "False") < 0
        || mm_read_flag(b->state, value, "read_mostly", &on) < 0) {
        return -1;
    }
    /* The driver ignores the location but refuses an unknown type of location. */
    return advise_buffer(b, on ? CU_MEM_ADVISE_SET_READ_MOSTLY : CU_MEM_ADVISE_UNSET_READ_MOSTLY,
                         mm_host());
}

/* The location that `read` returns for all pages. */
static PyObject *
get_location(PyObject *op, int (*read)(mm_driver *, mm_range, CUmemLocation *, mm_status *))
{
    mm_buffer *b = mm_buffer_of(op);
    CUmemLocation location;
    mm_buffer_use use;
    PyThreadState *detached;
    mm_status st;
    int rc;

    if (mm_buffer_enter(b, MM_QUERY, NULL, &use) < 0) {
        return NULL;
    }
    detached = mm_buffer_begin_query(&use);
    rc = read(use.cu, use.range, &location, &st);
    mm_buffer_end_query(&use, detached);
    return rc < 0 ? mm_raise(b->state, &st) : mm_location_object_new(b->state, location);
}

PyObject *
mm_buffer_get_preferred_location(PyObject *op, void *Py_UNUSED(closure))
{
    return get_location(op, mm_range_preferred_location);
}

PyObject *
mm_buffer_get_last_prefetch_location(PyObject *op, void *Py_UNUSED(closure))
{
    return get_location(op, mm_range_last_prefetch);
}

int
mm_buffer_set_preferred_location(PyObject *op, PyObject *value, void *Py_UNUSED(closure))
{
    mm_buffer *b = mm_buffer_of(op);
    CUmemLocation location;

    if (refuse_delete(value, "preferred_location", "None") < 0) {
        return -1;
    }
    if (value == Py_None) {
        return advise_buffer(b, CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, mm_host());
    }
    if (mm_read_location(b->state, value, &location) < 0
        || mm_warn_of_place(b->size, location) < 0) {
        return -1;
    }
    return advise_buffer(b, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, location);
}

PyObject *
mm_buffer_get_accessed_by(PyObject *op, void *Py_UNUSED(closure))
{
    mm_buffer *b = mm_buffer_of(op);

    return mm_buffer_check_open(b) < 0 ? NULL : mm_accessed_by_new(b->state, op);
}

int
mm_buffer_set_accessed_by(PyObject *op, PyObject *value, void *Py_UNUSED(closure))
{
    if (refuse_delete(value, "accessed_by", "an empty set") < 0) {
        return -1;
    }
    return mm_accessed_by_assign(mm_buffer_of(op), value);
}

/* --- page_runs() ------------------------------------------------------------------------------ */

/* A run as a PageRun, with its offset from origin. */
static PyObject *
page_run_record(mm_state *state, const mm_page_run *run, CUdeviceptr origin)
{
    enum { OFFSET, NBYTES, READ_MOSTLY, PREFERRED, ACCESSED_BY, PREFETCHED, FIELDS };
    PyObject *fields[FIELDS] = {0};

    fields[OFFSET] = PyLong_FromUnsignedLongLong(run->range.start - origin);
    fields[NBYTES] = PyLong_FromSize_t(run->range.size);
    fields[READ_MOSTLY] = PyBool_FromLong(run->policy.read_mostly);
    /* Locations are looked up in a dict, which requires that no exception is set. */
    if (fields[OFFSET] != NULL && fields[NBYTES] != NULL
        && (fields[PREFERRED] = mm_location_object_new(state, run->policy.preferred)) != NULL
        && (fields[ACCESSED_BY] = mm_location_frozenset(state, run->policy.accessed_by)) != NULL) {
        fields[PREFETCHED] = mm_location_object_new(state, run->prefetched);
    }
    return mm_record_new(state->page_run_type, fields, FIELDS);
}

static PyObject *
page_run_records(mm_buffer *b, const mm_page_runs *runs)
{
    PyObject *all = PyTuple_New((Py_ssize_t)runs->count);

    for (size_t i = 0; all != NULL && i < runs->count; i++) {
        assert(runs->run[i].range.start - b->start < b->size);
        PyObject *one = page_run_record(b->state, &runs->run[i], b->start);
        if (mm_set_item(all, (Py_ssize_t)i, one) < 0) {
            Py_CLEAR(all);
        }
    }
    return all;
}

const char mm_page_runs_doc[] =
    "page_runs($self, /)\n--\n\n"
    "The buffer as runs of pages with the same advice and the same last prefetch.\n"
    "\n"
    "The properties, such as preferred_location, describe all pages at once: they read as unset\n"
    "where pages differ. page_runs() returns the state of each part: a tuple of PageRun, in\n"
    "order, without gaps, for the whole buffer. Runs end at page boundaries; neighbours always\n"
    "differ.\n"
    "\n"
    "Queries the driver once for each page (64 MiB in pages of 4 KiB: 16,384 queries, 1 to 3 ms), because\n"
    "only the answer for a single page distinguishes \"not set\" from \"not the same\". Pages that another\n"
    "thread advises during the call are read before or after that advice. Raises RuntimeError when closed,\n"
    "ValueError if this is not managed memory. Safe from every thread; releases the GIL.\n"
    "Driver: cuMemRangeGetAttributes.";

PyObject *
mm_buffer_page_runs(PyObject *op, PyObject *Py_UNUSED(none))
{
    mm_buffer *b = mm_buffer_of(op);
    mm_page_runs runs = {0};
    PyObject *all = NULL;
    mm_buffer_use use;
    mm_status st;
    int rc;

    if (mm_buffer_enter(b, MM_QUERY, NULL, &use) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_page_runs_read(use.cu, use.range, MM_BY_MEANING, &runs, &st);
    mm_buffer_leave(&use);
    Py_END_ALLOW_THREADS
    all = rc < 0 ? mm_raise(b->state, &st) : page_run_records(b, &runs);
    mm_page_runs_free(&runs);
    return all;
}

static PyStructSequence_Field page_run_fields[] = {
    {"offset", "start of the run, in bytes from the start of the buffer"},
    {"nbytes", "length of the run in bytes"},
    {"read_mostly", "True if the pages are advised to be read mostly"},
    {"preferred_location", "preferred location of the pages: a Device, a Host, or None"},
    {"accessed_by", "frozenset of the locations that keep a mapping of the pages"},
    {"last_prefetch_location", "destination of the last prefetch: a Device, a Host, or None"},
    {NULL, NULL},
};

static PyStructSequence_Desc page_run_desc = {
    "managedmem.typing.PageRun",
    "Neighbouring pages of a buffer with the same advice and the same last prefetch.\n\n"
    "A named tuple from ManagedBuffer.page_runs(): offset and nbytes in bytes, read_mostly,\n"
    "preferred_location, accessed_by (a frozenset), last_prefetch_location. Immutable.",
    page_run_fields, 6};

int
mm_page_runs_init(PyObject *module, mm_state *state)
{
    state->page_run_type = PyStructSequence_NewType(&page_run_desc);
    return state->page_run_type ? PyModule_AddType(module, state->page_run_type) : -1;
}
