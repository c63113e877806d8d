/* buffer_views.c: other ranges, dtypes and shapes of the same memory: slices, range() and
 * view(). */
#include <string.h>

#include "buffer.h"

int
mm_read_shape(PyObject *value, const mm_dtype *dtype, Py_ssize_t shape[MM_MAX_DIMENSIONS],
              size_t *bytes)
{
    PyObject *items = PyIndex_Check(value) ? PyTuple_Pack(1, value) : PySequence_Tuple(value);
    Py_ssize_t dimensions = items ? PyTuple_Size(items) : -1;

    if (dimensions < 0) {
        return -1;
    }
    if (dimensions < 1 || dimensions > MM_MAX_DIMENSIONS) {
        PyErr_Format(PyExc_ValueError, "a shape has 1 to %d dimensions, got %R", MM_MAX_DIMENSIONS,
                     value);
        dimensions = -1;
    }
    *bytes = dtype->itemsize;
    for (Py_ssize_t i = 0; i < dimensions; i++) {
        long long length;
        if (mm_read_index(PyTuple_GetItem(items, i), "a length in shape", PyExc_TypeError, &length)
            < 0) {
            dimensions = -1;
        } else if (length < 1) {
            PyErr_Format(PyExc_ValueError, "a length in shape must be at least 1, got %R", value);
            dimensions = -1;
        } else if ((size_t)length > (size_t)PY_SSIZE_T_MAX / *bytes) {
            PyErr_Format(PyExc_ValueError, "an array of shape %R has too many bytes", value);
            dimensions = -1;
        } else {
            shape[i] = (Py_ssize_t)length;
            *bytes *= (size_t)length;
        }
    }
    Py_DECREF(items);
    return (int)dimensions;
}

PyObject *
mm_buffer_view_method(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"dtype", "shape"};
    static const mm_parameters parameters = {"view", names, 0, 2, 2};
    mm_buffer *b = mm_buffer_of(op);
    Py_ssize_t shape[MM_MAX_DIMENSIONS];
    const mm_dtype *dtype = b->dtype;
    int dimensions = 1;
    PyObject *given[2];
    size_t bytes;

    if (mm_args(&parameters, args, nargs, kwnames, given) < 0 || mm_buffer_check_open(b) < 0) {
        return NULL;
    }
    if (given[0] != NULL && given[0] != Py_None) {
        dtype = mm_read_dtype(given[0]);
    }
    if (dtype == NULL) {
        return NULL;
    }
    if (dtype == b->dtype && (given[1] == NULL || given[1] == Py_None)) {
        return mm_buffer_view(b, 0, dtype, b->dimensions, b->shape);
    }
    if (given[1] == NULL || given[1] == Py_None) {
        shape[0] = (Py_ssize_t)(b->size / dtype->itemsize);
        bytes = (size_t)shape[0] * dtype->itemsize;
    } else {
        dimensions = mm_read_shape(given[1], dtype, shape, &bytes);
    }
    if (dimensions < 0) {
        return NULL;
    }
    if (bytes != b->size || b->start % dtype->itemsize != 0) {
        PyErr_Format(PyExc_ValueError,
                     "cannot view %zu bytes at %p as %s of that shape, which needs %zu bytes "
                     "at a multiple of %d",
                     b->size, (void *)(uintptr_t)b->start, dtype->name, bytes,
                     (int)dtype->itemsize);
        return NULL;
    }
    return mm_buffer_view(b, 0, dtype, dimensions, shape);
}

PyObject *
mm_buffer_range(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"offset", "nbytes"};
    static const mm_parameters parameters = {"range", names, 2, 2, 2};
    mm_buffer *b = mm_buffer_of(op);
    Py_ssize_t shape[1];
    PyObject *given[2];
    long long offset;
    size_t nbytes;

    if (mm_args(&parameters, args, nargs, kwnames, given) < 0 || mm_buffer_check_open(b) < 0
        || mm_read_index(given[0], "offset", PyExc_TypeError, &offset) < 0
        || mm_read_size(given[1], "nbytes", &nbytes) < 0) {
        return NULL;
    }
    if (offset < 0 || nbytes > b->size || (unsigned long long)offset > b->size - nbytes) {
        PyErr_Format(PyExc_ValueError,
                     "a range of %zu bytes at offset %lld is not inside the buffer, which has %zu "
                     "bytes",
                     nbytes, offset, b->size);
        return NULL;
    }
    shape[0] = (Py_ssize_t)nbytes;
    return mm_buffer_view(b, (size_t)offset, mm_read_dtype(NULL), 1, shape);
}

/* Reads one end of a slice; nothing is clamped, because a hint on the wrong range is a silent
 * mistake. */
static int
read_bound(PyObject *slice, const char *name, Py_ssize_t length, Py_ssize_t missing,
           Py_ssize_t *out)
{
    PyObject *bound = PyObject_GetAttrString(slice, name);
    long long value = missing;
    int rc = 0;

    if (bound == NULL) {
        return -1;
    }
    if (bound != Py_None) {
        rc = mm_read_index(bound, name, PyExc_TypeError, &value);
        value += rc == 0 && value < 0 ? length : 0;
        if (rc < 0 && PyErr_ExceptionMatches(PyExc_ValueError)) {
            PyErr_Clear(); /* ValueError: beyond 64 bits, so outside as well */
            rc = 0;
            value = -1;
        }
    }
    Py_DECREF(bound);
    if (rc == 0 && (value < 0 || value > length)) {
        PyErr_Format(PyExc_IndexError, "slice %R is outside the buffer's first axis of length %zd",
                     slice, length);
        return -1;
    }
    *out = (Py_ssize_t)value;
    return rc;
}

PyObject *
mm_buffer_subscript(PyObject *op, PyObject *key)
{
    mm_buffer *b = mm_buffer_of(op);
    Py_ssize_t shape[MM_MAX_DIMENSIONS], start, stop, step;

    if (!PySlice_Check(key)) {
        PyErr_Format(PyExc_TypeError,
                     "a ManagedBuffer is indexed by a slice of its first axis, got %R; read "
                     "elements through memoryview(buf) or NumPy",
                     key);
        return NULL;
    }
    if (mm_buffer_check_open(b) < 0 || read_bound(key, "start", b->shape[0], 0, &start) < 0
        || read_bound(key, "stop", b->shape[0], b->shape[0], &stop) < 0
        || read_bound(key, "step", PY_SSIZE_T_MAX, 1, &step) < 0) {
        return NULL;
    }
    if (step != 1 || stop <= start) {
        PyErr_Format(PyExc_ValueError,
                     step != 1 ? "a slice of a buffer has step 1, got %R"
                               : "slice %R selects nothing",
                     key);
        return NULL;
    }
    memcpy(shape, b->shape, sizeof shape);
    shape[0] = stop - start;
    return mm_buffer_view(b, (size_t)(start * b->strides[0]), b->dtype, b->dimensions, shape);
}

const char mm_view_doc[] =
    "view($self, /, dtype=None, shape=None)\n--\n\n"
    "The same bytes with another element type or shape.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "dtype : str, NumPy or torch dtype, Python type; optional\n"
    "    The element type; None keeps the present one.\n"
    "shape : int or sequence of int, optional\n"
    "    None: one axis with all elements, or the same shape where the dtype stays.\n"
    "\n"
    "Raises ValueError unless it has exactly the bytes of this buffer; TypeError for an unknown dtype.\n"
    "Driver: none.";

const char mm_range_doc[] =
    "range($self, /, offset, nbytes)\n--\n\n"
    "Some bytes of the buffer as a buffer of uint8 over the same memory.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "offset : int\n"
    "    Where it begins, in bytes from the start of this buffer, whatever its dtype and shape.\n"
    "nbytes : int\n"
    "    How many bytes, at least 1.\n"
    "\n"
    "Every operation on it acts on just that range; advice and prefetch on the pages it touches. It\n"
    "keeps this buffer alive. Raises ValueError unless all of it is inside the buffer, RuntimeError\n"
    "when closed. Driver: none.";
