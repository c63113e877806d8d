/* errors.h: raising exceptions from a message or a status. */
#ifndef MM_ERRORS_H
#define MM_ERRORS_H

#include "../driver/driver.h"
#include "state.h"

/* Raises as PyErr_Format does, in functions that return -1. */
#define MM_ERROR(...) (PyErr_Format(__VA_ARGS__), -1)

/* Sets the exception that a status stands for; none may be set before. Always returns NULL. */
PyObject *mm_raise(mm_state *state, const mm_status *st);

/* The text of the exception that a status stands for; None for MM_OK. NULL with an exception on failure. */
PyObject *mm_status_text(mm_state *state, const mm_status *st);

/* None if rc is 0, else NULL with the exception of the status. */
static inline PyObject *
mm_none_or_raise(mm_state *state, int rc, const mm_status *st)
{
    assert(!PyErr_Occurred());
    return rc < 0 ? mm_raise(state, st) : Py_NewRef(Py_None);
}

/* Raises if rc is a failure, whose status is then st; returns rc. */
static inline int
mm_raise_failure(mm_state *state, int rc, const mm_status *st)
{
    assert(rc == 0 || rc == -1);
    if (rc < 0) {
        (void)mm_raise(state, st);
    }
    return rc;
}

/* Opens the driver without the GIL, because it takes milliseconds. NULL with an exception if no
 * driver is usable. */
mm_driver *mm_open_now(mm_state *state);

/* Returns the driver if it is open, else calls mm_open_now. */
static inline mm_driver *
mm_open(mm_state *state)
{
    mm_driver *cu = mm_driver_usable();

    MM_ASSERT_LEFT();
    return cu ? cu : mm_open_now(state);
}

/* A saved exception, to be restored or dropped later. For example, a deallocation must neither
 * lose the current exception nor raise another. */
typedef struct {
    PyObject *type, *value, *traceback;
} mm_exception;

static inline void
mm_exception_save(mm_exception *e)
{
    PyErr_Fetch(&e->type, &e->value, &e->traceback);
}

static inline void
mm_exception_restore(mm_exception *e)
{
    PyErr_Restore(e->type, e->value, e->traceback);
}

static inline void
mm_exception_drop(mm_exception *e)
{
    Py_XDECREF(e->type);
    Py_XDECREF(e->value);
    Py_XDECREF(e->traceback);
}

#endif
