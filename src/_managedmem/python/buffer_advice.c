/* buffer_advice.c: advice as properties of a buffer. Nothing is cached: each read queries the
 * driver, each write advises it. */
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
    mm_status st;
    int rc;

    if (mm_buffer_enter(b, MM_QUERY, NULL, &use) < 0) {
        return NULL;
    }
    rc = read(use.cu, use.range, &location, &st);
    mm_buffer_leave(&use);
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
    if (mm_read_location(b->state, value, &location) < 0) {
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
