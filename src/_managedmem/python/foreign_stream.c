/* foreign_stream.c: reading stream handles, with a table of the libraries whose streams are
 * known. */
#include "foreign_stream.h"

#include "foreign_class.h"

int
mm_read_stream_handle(PyObject *value, const char *name, CUstream *out)
{
    long long handle;

    assert(!PyErr_Occurred());
    if (mm_read_index(value, name, PyExc_TypeError, &handle) < 0) {
        return -1;
    }
    if (handle < 0) {
        return MM_ERROR(PyExc_ValueError, "%s cannot be negative, got %R", name, value);
    }
    *out = (CUstream)(uintptr_t)handle;
    return 0;
}

/* Reads a handle as other libraries store it: an int, a CUstream or cudaStream_t of cuda.bindings,
 * or a ctypes pointer, whose value is None if it is 0. */
static int
read_stored_handle(mm_state *state, PyObject *value, const char *name, CUstream *out)
{
    PyObject *number = NULL;
    int rc = 0;

    if (mm_is_instance(state, value, "cuda", "CUstream")) {
        number = PyNumber_Long(value);
    } else if (mm_is_from(state, value, "ctypes")) {
        number = PyObject_GetAttrString(value, "value");
    } else {
        number = Py_NewRef(value);
    }
    if (number == NULL) {
        return -1;
    }
    if (number == Py_None && number != value) {
        *out = NULL;
    } else {
        rc = mm_read_stream_handle(number, name, out);
    }
    Py_DECREF(number);
    return rc;
}

/* --- readers: each gets the stream and the attribute of its row ------------------------------ */

static int
read_handle(mm_state *state, PyObject *Py_UNUSED(value), PyObject *handle, CUstream *out)
{
    return read_stored_handle(state, handle, "a stream handle", out);
}

static int
read_protocol_answer(mm_state *state, PyObject *value, PyObject *answer, CUstream *out)
{
    long long version;

    if (!PyTuple_Check(answer) || PyTuple_Size(answer) != 2) {
        return MM_ERROR(PyExc_TypeError, "__cuda_stream__() of %R must return (0, handle), got %R",
                        value, answer);
    }
    if (mm_read_index(PyTuple_GetItem(answer, 0), "the version in __cuda_stream__",
                      PyExc_TypeError, &version)
        < 0) {
        return -1;
    }
    if (version != 0) {
        return MM_ERROR(PyExc_TypeError,
                        "__cuda_stream__() of %R has protocol version %lld; only 0 is known",
                        value, version);
    }
    return read_stored_handle(state, PyTuple_GetItem(answer, 1), "the handle in __cuda_stream__",
                              out);
}

static int
read_protocol(mm_state *state, PyObject *value, PyObject *method, CUstream *out)
{
    PyObject *answer;
    int rc;

    if (!PyCallable_Check(method)) {
        return MM_ERROR(PyExc_TypeError, "__cuda_stream__ of %R must be a method, got %R", value,
                        method);
    }
    answer = PyObject_CallNoArgs(method);
    rc = answer ? read_protocol_answer(state, value, answer, out) : -1;
    Py_XDECREF(answer);
    return rc;
}

/* --- the table -------------------------------------------------------------------------- */

/* The first row whose class and attribute match an object reads it; in a row without an attribute
 * the object is the handle. To support another library, add its row. The rows with a package serve
 * versions without __cuda_stream__, and torch.Stream, which has no particular backend. JAX shows
 * no streams. */
static const struct {
    mm_foreign_class class;
    const char *attribute;
    int (*read)(mm_state *state, PyObject *value, PyObject *attribute, CUstream *out);
} libraries[] = {
    {{.package = NULL}, "__cuda_stream__", read_protocol},
    {{.package = "torch"}, "cuda_stream", read_handle},
    {{.package = "torch"}, "native_handle", read_handle},
    {{.package = "cupy"}, "ptr", read_handle},
    {{.package = "numba"}, "handle", read_handle},
    {{.package = "cuda", .name = "CUstream"}, NULL, read_handle},
};

/* 1 if a row read the handle, 0 if none matches, -1 with an exception. */
static int
read_by_table(mm_state *state, PyObject *value, CUstream *out)
{
    PyObject *modules = NULL, *attribute;
    int found = 0;

    for (size_t i = 0; found == 0 && i < sizeof libraries / sizeof *libraries; i++) {
        if (!mm_matches_class(state, value, libraries[i].class, &modules)) {
            continue;
        }
        if (libraries[i].attribute != NULL) {
            found = mm_get_optional(value, libraries[i].attribute, &attribute);
        } else {
            attribute = Py_NewRef(value);
            found = 1;
        }
        if (found > 0) {
            found = libraries[i].read(state, value, attribute, out) < 0 ? -1 : 1;
            Py_DECREF(attribute);
        }
    }
    Py_XDECREF(modules);
    assert((found < 0) == (PyErr_Occurred() != NULL));
    return found;
}

int
mm_read_foreign_stream(mm_state *state, PyObject *value, CUstream *out)
{
    /* A class, such as Stream in place of Stream(), has the methods, but they need an object. */
    int found = PyType_Check(value) ? 0 : read_by_table(state, value, out);

    if (found != 0) {
        return found < 0 ? -1 : 0;
    }
    if (PyIndex_Check(value) && !PyBool_Check(value)) {
        return mm_read_stream_handle(value, "a stream handle", out);
    }
    return MM_ERROR(PyExc_TypeError,
                    "a stream must be None, a Stream, an object with __cuda_stream__ or an int "
                    "handle, got %R%s",
                    value, PyType_Check(value) ? ": pass an object of the class" : "");
}
