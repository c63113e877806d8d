/* buffer_views.c: the axes, items and slices of a buffer, and its methods range() and view(). */
#include <string.h>

#include "buffer.h"

/* 1 for one length, 0 for an object that may hold several, -1 with an exception. Arrays and tensors
 * have an __index__, which raises TypeError unless they hold one number. */
static int
is_one_length(PyObject *value)
{
    PyObject *length;

    if (!PyIndex_Check(value) || !PySequence_Check(value)) {
        return PyIndex_Check(value);
    }
    length = PyNumber_Index(value);
    if (length != NULL) {
        Py_DECREF(length);
        return 1;
    }
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) {
        return -1;
    }
    PyErr_Clear(); /* TypeError: an array of several lengths */
    return 0;
}

/* The items of a shape as a tuple, of any type. */
static PyObject *
shape_items(PyObject *value)
{
    int one = is_one_length(value);

    if (one != 0) {
        return one < 0 ? NULL : PyTuple_Pack(1, value);
    }
    if (!PySequence_Check(value) && PyType_GetSlot(Py_TYPE(value), Py_tp_iter) == NULL) {
        PyErr_Format(PyExc_TypeError,
                     "a shape is an int or a sequence of ints, as in (2, 3): got %R", value);
        return NULL;
    }
    return PySequence_Tuple(value);
}

int
mm_read_shape(PyObject *value, mm_layout *layout, Py_ssize_t shape[MM_MAX_DIMENSIONS],
              size_t *bytes)
{
    PyObject *items = shape_items(value);
    Py_ssize_t dimensions = items ? PyTuple_Size(items) : -1;
    bool empty = false;

    if (dimensions < 0) {
        return -1;
    }
    if (dimensions > MM_MAX_DIMENSIONS) {
        PyErr_Format(PyExc_ValueError, "a shape has at most %d axes, got %R", MM_MAX_DIMENSIONS,
                     value);
        dimensions = -1;
    }
    *bytes = layout->dtype->itemsize;
    for (Py_ssize_t i = 0; i < dimensions; i++) {
        long long length;
        if (mm_read_index(PyTuple_GetItem(items, i), "a length in shape", PyExc_TypeError, &length)
            < 0) {
            dimensions = -1;
        } else if (length < 0) {
            PyErr_Format(PyExc_ValueError, "a length in shape must be 0 or more, got %R", value);
            dimensions = -1;
        } else if (length > 0 && (size_t)length > (size_t)PY_SSIZE_T_MAX / *bytes) {
            PyErr_Format(PyExc_ValueError, "an array of shape %R has too many bytes", value);
            dimensions = -1;
        } else {
            /* With a length of 0, the other lengths still determine the strides. */
            shape[i] = (Py_ssize_t)length;
            *bytes *= length > 0 ? (size_t)length : 1;
            empty = empty || length == 0;
        }
    }
    *bytes = empty ? 0 : *bytes;
    layout->dimensions = (int)dimensions;
    layout->shape = shape;
    Py_DECREF(items);
    return dimensions < 0 ? -1 : 0;
}

MM_GUARD_ARRAYS PyObject *
mm_buffer_view_method(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"dtype", "shape"};
    static const mm_parameters parameters = {"view", names, 0, 2, 2};
    mm_buffer *b = mm_buffer_of(op);
    Py_ssize_t shape[MM_MAX_DIMENSIONS];
    mm_layout layout = mm_buffer_layout(b);
    PyObject *given[2];
    size_t bytes;

    if (mm_args(&parameters, args, nargs, kwnames, given) < 0 || mm_buffer_check_open(b) < 0) {
        return NULL;
    }
    if (given[0] != NULL && given[0] != Py_None) {
        layout.dtype = mm_read_dtype(given[0]);
    }
    if (layout.dtype == NULL) {
        return NULL;
    }
    if (layout.dtype == b->dtype && (given[1] == NULL || given[1] == Py_None)) {
        return mm_buffer_view(b, 0, &layout);
    }
    if (given[1] == NULL || given[1] == Py_None) {
        shape[0] = (Py_ssize_t)(b->size / layout.dtype->itemsize);
        bytes = (size_t)shape[0] * layout.dtype->itemsize;
        layout.dimensions = 1;
        layout.shape = shape;
    } else if (mm_read_shape(given[1], &layout, shape, &bytes) < 0) {
        return NULL;
    }
    if (bytes != b->size || (bytes > 0 && b->start % layout.dtype->itemsize != 0)) {
        PyErr_Format(PyExc_ValueError,
                     "cannot view %zu bytes at %p as %s of that shape, which needs %zu bytes "
                     "at a multiple of %d",
                     b->size, (void *)(uintptr_t)b->start, layout.dtype->name, bytes,
                     (int)layout.dtype->itemsize);
        return NULL;
    }
    return mm_buffer_view(b, 0, &layout);
}

PyObject *
mm_buffer_range(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"offset", "nbytes"};
    static const mm_parameters parameters = {"range", names, 2, 2, 2};
    mm_buffer *b = mm_buffer_of(op);
    PyObject *given[2];
    Py_ssize_t length;
    mm_layout layout;
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
    length = (Py_ssize_t)nbytes;
    layout = mm_layout_of_bytes(&length);
    return mm_buffer_view(b, (size_t)offset, &layout);
}

/* --- items ------------------------------------------------------------------------------ */

/* The view of one item of the first axis. */
static PyObject *
item_at(mm_buffer *b, Py_ssize_t i)
{
    mm_layout layout = {b->dtype, b->dimensions - 1, b->shape + 1};

    return mm_buffer_view(b, (size_t)(i * b->strides[0]), &layout);
}

static int
check_has_axis(const mm_buffer *b, PyObject *error)
{
    if (b->dimensions == 0) {
        PyErr_SetString(error,
                        "this ManagedBuffer has no axes, it is one element: read it through "
                        "buf.numpy()");
        return -1;
    }
    return 0;
}

PyObject *
mm_buffer_item(PyObject *op, Py_ssize_t i)
{
    mm_buffer *b = mm_buffer_of(op);

    if (mm_buffer_check_open(b) < 0 || check_has_axis(b, PyExc_IndexError) < 0) {
        return NULL;
    }
    if (i < 0 || i >= b->shape[0]) {
        PyErr_Format(PyExc_IndexError, "index %zd is outside the first axis, which has length %zd",
                     i, b->shape[0]);
        return NULL;
    }
    return item_at(b, i);
}

/* Negative indices count from the end. */
static PyObject *
subscript_index(mm_buffer *b, PyObject *key)
{
    Py_ssize_t given = PyNumber_AsSsize_t(key, PyExc_IndexError), i;

    if (given == -1 && PyErr_Occurred()) {
        return NULL;
    }
    i = given < 0 ? given + b->shape[0] : given;
    if (i < 0 || i >= b->shape[0]) {
        PyErr_Format(PyExc_IndexError, "index %zd is outside the first axis, which has length %zd",
                     given, b->shape[0]);
        return NULL;
    }
    return item_at(b, i);
}

MM_GUARD_ARRAYS static PyObject *
subscript_slice(mm_buffer *b, PyObject *key)
{
    Py_ssize_t shape[MM_MAX_DIMENSIONS], start, stop, step;
    mm_layout layout = {b->dtype, b->dimensions, shape};

    if (PySlice_Unpack(key, &start, &stop, &step) < 0) {
        return NULL;
    }
    if (step != 1) {
        PyErr_Format(PyExc_ValueError,
                     "a slice of a buffer has step 1, got %R: a buffer is memory without gaps; "
                     "NumPy's arrays take other steps, as in buf.numpy()[::2]",
                     key);
        return NULL;
    }
    memcpy(shape, b->shape, sizeof shape);
    shape[0] = PySlice_AdjustIndices(b->shape[0], &start, &stop, step);
    return mm_buffer_view(b, (size_t)(start * b->strides[0]), &layout);
}

PyObject *
mm_buffer_subscript(PyObject *op, PyObject *key)
{
    mm_buffer *b = mm_buffer_of(op);
    bool index = PyIndex_Check(key) && !PyBool_Check(key);

    if (!index && !PySlice_Check(key)) {
        PyErr_Format(PyExc_TypeError,
                     "a ManagedBuffer is indexed by an int or a slice of its first axis, got %R; "
                     "for further axes index again, buf[i][a:b], or use buf.numpy()",
                     key);
        return NULL;
    }
    if (mm_buffer_check_open(b) < 0 || check_has_axis(b, PyExc_IndexError) < 0) {
        return NULL;
    }
    return index ? subscript_index(b, key) : subscript_slice(b, key);
}

/* Without this, Python would only say that there is no item assignment. */
int
mm_buffer_refuse_assignment(PyObject *op, PyObject *key, PyObject *value)
{
    if (value == NULL) {
        PyErr_Format(PyExc_TypeError, "%R cannot lose elements: the size of memory is fixed", op);
    } else {
        PyErr_Format(PyExc_TypeError,
                     "a ManagedBuffer is not written by index: buf.numpy()[%R] = value and "
                     "memoryview(buf) write elements from the host, buf[%R].fill(value) and "
                     "buf[%R].copy_from(source) in the order of a stream",
                     key, key, key);
    }
    return -1;
}

Py_ssize_t
mm_buffer_length(PyObject *op)
{
    mm_buffer *b = mm_buffer_of(op);

    return check_has_axis(b, PyExc_TypeError) < 0 ? -1 : b->shape[0];
}

/* Not the length, because a buffer without axes has none. */
int
mm_buffer_bool(PyObject *op)
{
    return mm_buffer_of(op)->size > 0;
}

PyObject *
mm_buffer_iter(PyObject *op)
{
    return check_has_axis(mm_buffer_of(op), PyExc_TypeError) < 0 ? NULL : PySeqIter_New(op);
}

/* Python would compare views by identity, but the caller means numbers. */
int
mm_buffer_refuse_search(PyObject *Py_UNUSED(op), PyObject *value)
{
    PyErr_Format(PyExc_TypeError,
                 "a ManagedBuffer does not search its elements: use %R in buf.numpy()", value);
    return -1;
}

/* Without this, int() and float() would read the bytes of the buffer as text. */
PyObject *
mm_buffer_refuse_number(PyObject *op)
{
    PyErr_Format(PyExc_TypeError,
                 "%R is memory, not a number: buf.numpy().item() reads one element, buf.handle "
                 "is the address",
                 op);
    return NULL;
}

/* A tuple with one number for each axis. */
static PyObject *
axes_tuple(const mm_buffer *b, const Py_ssize_t *number)
{
    PyObject *tuple = PyTuple_New(b->dimensions);

    for (int i = 0; tuple != NULL && i < b->dimensions; i++) {
        PyObject *item = PyLong_FromSsize_t(number[i]);
        if (item == NULL || PyTuple_SetItem(tuple, i, item) < 0) {
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

PyObject *
mm_buffer_get_shape(PyObject *op, void *Py_UNUSED(closure))
{
    return axes_tuple(mm_buffer_of(op), mm_buffer_of(op)->shape);
}

PyObject *
mm_buffer_get_strides(PyObject *op, void *Py_UNUSED(closure))
{
    return axes_tuple(mm_buffer_of(op), mm_buffer_of(op)->strides);
}

PyObject *
mm_buffer_get_ndim(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(mm_buffer_of(op)->dimensions);
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
    "    The number of bytes, 0 or more.\n"
    "\n"
    "Every operation on it acts on just that range; advice and prefetch on the pages it touches. It\n"
    "keeps this buffer alive. Raises ValueError unless all of it is inside the buffer, RuntimeError\n"
    "when closed. Driver: none.";
