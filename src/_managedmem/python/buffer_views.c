/* buffer_views.c: the axes, items and slices of a buffer, and its methods range() and view(). */
#include <string.h>

#include "buffer.h"

/* 1 for one length, 0 for an object that may hold several, -1 with an exception. The __index__ of
 * arrays and tensors raises TypeError unless they hold one number. */
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

/* The items of a shape, of any type, as a tuple. */
static PyObject *
shape_items(PyObject *value)
{
    int one = is_one_length(value);

    if (one != 0) {
        return one < 0 ? NULL : PyTuple_Pack(1, value);
    }
    if (PyUnicode_Check(value)
        || (!PySequence_Check(value) && PyType_GetSlot(Py_TYPE(value), Py_tp_iter) == NULL)) {
        return PyErr_Format(PyExc_TypeError,
                            "a shape is an int or a sequence of ints, as in (2, 3): got %R",
                            value);
    }
    return PySequence_Tuple(value);
}

/* Reads a length of the shape `value`. `bytes` is the size of an array with the earlier
 * lengths. */
static int
read_length(PyObject *item, PyObject *value, size_t bytes, Py_ssize_t *out)
{
    long long length;

    if (mm_read_index(item, "a length in shape", PyExc_TypeError, &length) < 0) {
        return -1;
    }
    if (length < 0) {
        return MM_ERROR(PyExc_ValueError, "a length in shape must be 0 or more, got %R", value);
    }
    if (length > 0 && (size_t)length > (size_t)PY_SSIZE_T_MAX / bytes) {
        return MM_ERROR(PyExc_ValueError, "an array of shape %R has too many bytes", value);
    }
    *out = (Py_ssize_t)length;
    return 0;
}

int
mm_read_shape(PyObject *value, mm_layout *layout, Py_ssize_t shape[MM_MAX_DIMENSIONS],
              size_t *bytes)
{
    PyObject *items = shape_items(value);
    Py_ssize_t dimensions = items ? PyTuple_Size(items) : -1;
    bool empty = false;

    assert(layout->dtype != NULL);
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
        if (read_length(PyTuple_GetItem(items, i), value, *bytes, &shape[i]) < 0) {
            dimensions = -1;
        } else {
            /* With a length of 0, the other lengths still determine the strides. */
            *bytes *= shape[i] > 0 ? (size_t)shape[i] : 1;
            empty = empty || shape[i] == 0;
        }
    }
    *bytes = empty ? 0 : *bytes;
    layout->dimensions = (int)dimensions;
    layout->shape = shape;
    Py_DECREF(items);
    return dimensions < 0 ? -1 : 0;
}

/* ValueError unless the buffer has exactly `bytes` bytes, at a multiple of the item size. Without
 * a shape, `bytes` is the size of the whole items that fit into the buffer. */
static int
check_view(const mm_buffer *b, const mm_layout *layout, PyObject *shape, size_t bytes)
{
    int itemsize = (int)layout->dtype->itemsize;

    if (bytes != b->size && b->size % (size_t)itemsize != 0) {
        return MM_ERROR(PyExc_ValueError,
                        "cannot view %zu bytes as %s: the size is not a multiple of %d", b->size,
                        layout->dtype->name, itemsize);
    }
    if (bytes != b->size) {
        return MM_ERROR(PyExc_ValueError,
                        "cannot view %zu bytes as %s of shape %R, which has %zu bytes", b->size,
                        layout->dtype->name, shape, bytes);
    }
    if (bytes > 0 && b->start % (size_t)itemsize != 0) {
        return MM_ERROR(PyExc_ValueError,
                        "cannot view memory at %p as %s: the address is not a multiple of %d",
                        (void *)(uintptr_t)b->start, layout->dtype->name, itemsize);
    }
    return 0;
}

const char mm_view_doc[] =
    "view($self, /, dtype=None, shape=None)\n--\n\n"
    "The same bytes with another element type or shape.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "dtype : str, NumPy or torch dtype, Python type; optional\n"
    "    The element type. None: the present one.\n"
    "shape : int or sequence of int, optional\n"
    "    The lengths of the axes. None: the present shape, or one axis with all elements if the dtype\n"
    "    changes.\n"
    "\n"
    "The view keeps this buffer alive. Raises ValueError unless it has exactly the bytes of this buffer\n"
    "and starts at a multiple of the item size, TypeError for an unknown dtype, RuntimeError when closed.\n"
    "Safe from every thread. Driver: none.";

MM_GUARD_ARRAYS PyObject *
mm_buffer_view_method(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = mm_view_doc};
    mm_buffer *b = mm_buffer_of(op);
    Py_ssize_t shape[MM_MAX_DIMENSIONS];
    mm_layout layout = mm_buffer_layout(b);
    PyObject *argv[2];
    size_t bytes;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_buffer_check_open(b) < 0) {
        return NULL;
    }
    if (argv[0] != NULL
        && (PyTuple_Check(argv[0]) || PyList_Check(argv[0]) || PyLong_Check(argv[0]))) {
        return PyErr_Format(
            PyExc_TypeError,
            "view() takes the dtype first, got %R: name the shape, as in view(shape=%R)", argv[0],
            argv[0]);
    }
    if (argv[0] != NULL && argv[0] != Py_None) {
        layout.dtype = mm_read_dtype(argv[0]);
    }
    if (layout.dtype == NULL) {
        return NULL;
    }
    if (layout.dtype == b->dtype && (argv[1] == NULL || argv[1] == Py_None)) {
        return mm_buffer_view(b, 0, &layout);
    }
    if (argv[1] == NULL || argv[1] == Py_None) {
        shape[0] = (Py_ssize_t)(b->size / layout.dtype->itemsize);
        bytes = (size_t)shape[0] * layout.dtype->itemsize;
        layout.dimensions = 1;
        layout.shape = shape;
    } else if (mm_read_shape(argv[1], &layout, shape, &bytes) < 0) {
        return NULL;
    }
    return check_view(b, &layout, argv[1], bytes) < 0 ? NULL : mm_buffer_view(b, 0, &layout);
}

const char mm_range_doc[] =
    "range($self, /, offset, nbytes)\n--\n\n"
    "A part of the buffer, by bytes, as a buffer of uint8 over the same memory.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "offset : int\n"
    "    The first byte, counted from the start of this buffer; dtype and shape do not matter.\n"
    "nbytes : int\n"
    "    The number of bytes, 0 or more.\n"
    "\n"
    "Operations act on just that range; advice and prefetch act on all pages that the range\n"
    "touches. The range keeps this buffer alive. Raises ValueError unless it is inside the\n"
    "buffer, RuntimeError when closed. Safe from every thread. Driver: none.";

PyObject *
mm_buffer_range(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = mm_range_doc};
    mm_buffer *b = mm_buffer_of(op);
    PyObject *argv[2];
    Py_ssize_t length;
    mm_layout layout;
    long long offset;
    size_t nbytes;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_buffer_check_open(b) < 0
        || mm_read_index(argv[0], "offset", PyExc_TypeError, &offset) < 0
        || mm_read_size(argv[1], "nbytes", &nbytes) < 0) {
        return NULL;
    }
    if (offset < 0 || nbytes > b->size || (unsigned long long)offset > b->size - nbytes) {
        return PyErr_Format(
            PyExc_ValueError,
            "a range of %zu bytes at offset %lld is not inside the buffer, which has %zu "
            "bytes",
            nbytes, offset, b->size);
    }
    length = (Py_ssize_t)nbytes;
    layout = mm_layout_of_bytes(&length);
    return mm_buffer_view(b, (size_t)offset, &layout);
}

/* --- items ------------------------------------------------------------------------------ */

static PyObject *
view_of_item(mm_buffer *b, Py_ssize_t i)
{
    mm_layout layout = {b->dtype, b->dimensions - 1, b->shape + 1};

    assert(b->dimensions > 0 && i >= 0 && i < b->shape[0]);
    return mm_buffer_view(b, (size_t)(i * b->strides[0]), &layout);
}

static PyObject *
raise_outside(const mm_buffer *b, Py_ssize_t index)
{
    return PyErr_Format(PyExc_IndexError,
                        "index %zd is outside the first axis, which has length %zd", index,
                        b->shape[0]);
}

static int
check_has_axis(const mm_buffer *b, PyObject *error)
{
    if (b->dimensions == 0) {
        return MM_ERROR(
            error, "this ManagedBuffer is 0-dimensional: read its element through buf.numpy()");
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
    return i < 0 || i >= b->shape[0] ? raise_outside(b, i) : view_of_item(b, i);
}

/* Negative indices count from the end. */
static PyObject *
subscript_index(mm_buffer *b, PyObject *key)
{
    Py_ssize_t index = PyNumber_AsSsize_t(key, PyExc_IndexError);
    Py_ssize_t i = index < 0 ? index + b->shape[0] : index;

    if (index == -1 && PyErr_Occurred()) {
        return NULL;
    }
    return i < 0 || i >= b->shape[0] ? raise_outside(b, index) : view_of_item(b, i);
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
        return PyErr_Format(
            PyExc_ValueError,
            "a slice of a buffer has step 1, got %R: a buffer is memory without gaps; "
            "NumPy's arrays take other steps, as in buf.numpy()[::2]",
            key);
    }
    memcpy(shape, b->shape, sizeof shape);
    shape[0] = PySlice_AdjustIndices(b->shape[0], &start, &stop, step);
    assert(start >= 0 && start + shape[0] <= b->shape[0]);
    return mm_buffer_view(b, (size_t)(start * b->strides[0]), &layout);
}

PyObject *
mm_buffer_subscript(PyObject *op, PyObject *key)
{
    mm_buffer *b = mm_buffer_of(op);
    bool index = PyIndex_Check(key) && !PyBool_Check(key);

    if (!index && !PySlice_Check(key)) {
        return PyErr_Format(
            PyExc_TypeError,
            "a ManagedBuffer is indexed by an int or a slice of its first axis, got %R; "
            "for further axes index again, buf[i][a:b], or use buf.numpy()",
            key);
    }
    if (mm_buffer_check_open(b) < 0 || check_has_axis(b, PyExc_IndexError) < 0) {
        return NULL;
    }
    return index ? subscript_index(b, key) : subscript_slice(b, key);
}

/* Python's own message would only say that item assignment is not supported. */
int
mm_buffer_refuse_assignment(PyObject *op, PyObject *key, PyObject *value)
{
    PyObject *text;

    if (value == NULL) {
        PyErr_Format(PyExc_TypeError, "%R cannot lose elements: the size of memory is fixed", op);
    } else if ((text = mm_call_python("managedmem._units", "key_text", "(O)", key)) != NULL) {
        PyErr_Format(PyExc_TypeError,
                     "a ManagedBuffer is not written by index: buf.numpy()[%U] = value and "
                     "memoryview(buf) write elements from the host, buf[%U].fill(value) and "
                     "buf[%U].copy_from(source) in the order of a stream",
                     text, text, text);
        Py_DECREF(text);
    }
    return -1;
}

Py_ssize_t
mm_buffer_length(PyObject *op)
{
    mm_buffer *b = mm_buffer_of(op);

    return check_has_axis(b, PyExc_TypeError) < 0 ? -1 : b->shape[0];
}

/* True if the buffer has bytes. Its length cannot decide: a buffer without axes has none. */
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

/* Python would compare views by identity, but the caller searches for numbers. */
int
mm_buffer_refuse_search(PyObject *Py_UNUSED(op), PyObject *value)
{
    return MM_ERROR(PyExc_TypeError,
                    "a ManagedBuffer does not search its elements: use %R in buf.numpy()", value);
}

/* Without this, int() and float() would read the bytes of the buffer as text. */
PyObject *
mm_buffer_refuse_number(PyObject *op)
{
    return PyErr_Format(
        PyExc_TypeError,
        "%R is memory, not a number: buf.numpy().item() reads one element, buf.handle "
        "is the address",
        op);
}

static PyObject *
axes_tuple(const mm_buffer *b, const Py_ssize_t *numbers)
{
    PyObject *tuple = PyTuple_New(b->dimensions);

    for (int i = 0; tuple != NULL && i < b->dimensions; i++) {
        if (mm_set_item(tuple, i, PyLong_FromSsize_t(numbers[i])) < 0) {
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
