/* buffer_advice.c: advice as properties of a buffer. Nothing is cached: each read asks the driver
 * and each write tells it. */
#include "../memory/advice.h"
#include "buffer.h"
#include "foreign_location.h"
#include "location_object.h"

PyObject *
mm_buffer_get_read_mostly(PyObject *op, void *Py_UNUSED(closure))
{
    mm_buffer *b = mm_buffer_of(op);
    mm_buffer_use use;
    mm_status st;
    bool on = false;
    int rc;

    if (mm_buffer_enter(b, MM_QUERY, NULL, &use) < 0) {
        return NULL;
    }
    rc = mm_range_read_mostly(use.cu, use.range, &on, &st);
    mm_buffer_leave(&use);
    return rc < 0 ? mm_raise(b->state, &st) : PyBool_FromLong(on);
}

/* Gives one advice, without the GIL: it can wait for migrations of other threads. */
static int
advise(mm_buffer *b, CUmem_advise advice, CUmemLocation where)
{
    mm_buffer_use use;
    mm_status st;
    int rc;

    if (mm_buffer_enter(b, MM_ADVISE, NULL, &use) < 0) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_range_advise(use.cu, use.range, advice, where, &st);
    mm_buffer_leave(&use);
    Py_END_ALLOW_THREADS
    if (rc < 0) {
        (void)mm_raise(b->state, &st);
    }
    return rc;
}

static int
no_delete(PyObject *value, const char *name, const char *instead)
{
    if (value == NULL) {
        PyErr_Format(PyExc_AttributeError, "%s cannot be deleted; assign %s", name, instead);
        return -1;
    }
    return 0;
}

int
mm_buffer_set_read_mostly(PyObject *op, PyObject *value, void *Py_UNUSED(closure))
{
    mm_buffer *b = mm_buffer_of(op);
    bool on;

    if (no_delete(value, "read_mostly", "False") < 0
        || mm_read_flag(b->state, value, "read_mostly", &on) < 0) {
        return -1;
    }
    /* The driver ignores the place but refuses an unknown kind of place. */
    return advise(b, on ? CU_MEM_ADVISE_SET_READ_MOSTLY : CU_MEM_ADVISE_UNSET_READ_MOSTLY,
                  mm_host());
}

static PyObject *
get_location(PyObject *op, int (*read)(mm_driver *, mm_range, CUmemLocation *, mm_status *))
{
    mm_buffer *b = mm_buffer_of(op);
    CUmemLocation where;
    mm_buffer_use use;
    mm_status st;
    int rc;

    if (mm_buffer_enter(b, MM_QUERY, NULL, &use) < 0) {
        return NULL;
    }
    rc = read(use.cu, use.range, &where, &st);
    mm_buffer_leave(&use);
    return rc < 0 ? mm_raise(b->state, &st) : mm_location_object_new(b->state, where);
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
    CUmemLocation where;

    if (no_delete(value, "preferred_location", "None") < 0) {
        return -1;
    }
    if (value == Py_None) {
        return advise(b, CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, mm_host());
    }
    if (mm_read_location(b->state, value, &where) < 0) {
        return -1;
    }
    return advise(b, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, where);
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
    if (no_delete(value, "accessed_by", "an empty set") < 0) {
        return -1;
    }
    return mm_accessed_by_assign(mm_buffer_of(op), value);
}
