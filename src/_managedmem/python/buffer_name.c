/* buffer_name.c: ManagedBuffer.name, and the name= of the functions that make buffers. */
#include <string.h>

#include "buffer.h"

/* Raises `error` with the reason and the start of the value, which may be long. */
static int
refuse_buffer_name(PyObject *error, const char *reason, PyObject *value)
{
    PyErr_Format(error, "name %s, got %.300R", reason, value);
    return -1;
}

int
mm_read_name(PyObject *value, const char **name)
{
    Py_ssize_t length;

    *name = NULL;
    if (value == NULL || value == Py_None) {
        return 0;
    }
    if (!PyUnicode_Check(value)) {
        return refuse_buffer_name(PyExc_TypeError, "must be a str or None", value);
    }
    *name = PyUnicode_AsUTF8AndSize(value, &length);
    if (*name == NULL) {
        if (PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
            PyErr_Clear(); /* its message does not name the argument */
            (void)refuse_buffer_name(PyExc_ValueError, "must be text without surrogates", value);
        }
        return -1;
    }
    if (length == 0) {
        return refuse_buffer_name(PyExc_ValueError, "must not be empty (None is no name)", value);
    }
    if (strlen(*name) != (size_t)length) {
        return refuse_buffer_name(PyExc_ValueError, "must not contain a null character", value);
    }
    if (length > MM_NAME_BYTES) {
        PyErr_Format(PyExc_ValueError, "name must have at most %d bytes of UTF-8, got %zd: %.300R",
                     MM_NAME_BYTES, length, value);
        return -1;
    }
    return 0;
}

PyObject *
mm_buffer_named(PyObject *buffer, const char *name)
{
    bool done;
    mm_status st;

    if (buffer == NULL || name == NULL) {
        return buffer;
    }
    if (mm_memory_set_name(mm_buffer_of(buffer)->memory, name, &done, &st) < 0) {
        (void)mm_raise(mm_buffer_of(buffer)->state, &st);
        Py_DECREF(buffer);
        return NULL;
    }
    return buffer;
}

/* The name of a view is that of its memory, and so of its root. */
PyObject *
mm_buffer_get_name(PyObject *op, void *Py_UNUSED(closure))
{
    char name[MM_NAME_BYTES + 1];

    return mm_life_read_name(&mm_buffer_of(op)->memory->life, name) ? PyUnicode_FromString(name)
                                                                    : Py_NewRef(Py_None);
}

int
mm_buffer_set_name(PyObject *op, PyObject *value, void *Py_UNUSED(closure))
{
    mm_buffer *b = mm_buffer_of(op);
    const char *name;
    bool done;
    mm_status st;

    if (value == NULL) {
        PyErr_SetString(PyExc_AttributeError, "name cannot be deleted; assign None");
        return -1;
    }
    if (mm_read_name(value, &name) < 0) {
        return -1;
    }
    if (b->is_view) {
        PyErr_Format(PyExc_ValueError,
                     "a view has the name of its whole buffer, so name=%.300R cannot be set here: "
                     "set it on the whole buffer, or name the part in a trace with "
                     "trace.name(view, label)",
                     value);
        return -1;
    }
    if (mm_memory_set_name(b->memory, name, &done, &st) < 0) {
        (void)mm_raise(b->state, &st);
        return -1;
    }
    return done ? 0 : mm_buffer_raise_closed(b);
}
