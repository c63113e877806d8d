/* targets.c: reading targets: our buffers, and anything else that lies in managed memory. */
#include "targets.h"

#include <stdlib.h>

#include "location.h"

/* --- foreign targets -------------------------------------------------------------------- */

static int
empty_target(PyObject *value)
{
    PyErr_Format(PyExc_ValueError, "%R is empty: a target has at least 1 byte", value);
    return -1;
}

/* Whether strided elements fill their extent without a gap or an overlap: in order of their
 * strides, each axis must step over exactly what the smaller ones cover. */
static bool
fills_extent(int dimensions, const Py_ssize_t *shape, const Py_ssize_t *strides,
             Py_ssize_t itemsize)
{
    long long covered = itemsize;
    uint64_t left = 0;

    for (int i = 0; i < dimensions; i++) {
        left |= (uint64_t)(shape[i] > 1) << i;
    }
    while (left != 0) {
        int next = -1;
        for (int i = 0; i < dimensions; i++) {
            if ((left >> i & 1) && (next < 0 || llabs(strides[i]) < llabs(strides[next]))) {
                next = i;
            }
        }
        if (next < 0 || llabs(strides[next]) != covered) {
            return false;
        }
        left &= ~((uint64_t)1 << next);
        covered *= shape[next];
    }
    return true;
}

/* From the address of element 0, lengths and strides to the extent in memory. The numbers come
 * from foreign code, so every product and sum is checked. strides NULL means C order. */
static int
extent(PyObject *value, CUdeviceptr first, int dimensions, const Py_ssize_t *shape,
       const Py_ssize_t *strides, Py_ssize_t itemsize, mm_range *range, bool *dense)
{
    long long low = 0, high = itemsize, bytes = itemsize;

    for (int i = 0; i < dimensions; i++) {
        long long reach = 0;
        if (shape[i] == 0) {
            return empty_target(value);
        }
        if (shape[i] < 0 || __builtin_mul_overflow(bytes, (long long)shape[i], &bytes)
            || (strides && __builtin_mul_overflow((long long)strides[i], shape[i] - 1LL, &reach))
            || __builtin_add_overflow(reach < 0 ? low : high, reach, reach < 0 ? &low : &high)) {
            PyErr_Format(PyExc_ValueError, "%R describes more memory than there can be", value);
            return -1;
        }
    }
    range->start = first + (CUdeviceptr)low;
    range->size = (size_t)(strides ? high - low : bytes);
    range->allocation = 0;
    *dense = strides == NULL || fills_extent(dimensions, shape, strides, itemsize);
    return 0;
}

/* Reads a tuple of ints into out; the number of them, or -1. */
static int
read_ints(PyObject *tuple, const char *what, Py_ssize_t *out, int most)
{
    Py_ssize_t count = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1;

    if (count < 0 || count > most) {
        PyErr_Format(PyExc_TypeError, "%s must be a tuple of at most %d ints, got %R", what, most,
                     tuple);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        long long number;
        if (mm_read_index(PyTuple_GetItem(tuple, i), what, PyExc_TypeError, &number) < 0) {
            return -1;
        }
        out[i] = (Py_ssize_t)number;
    }
    return (int)count;
}

/* The item size in a typestr such as "<f4". */
static Py_ssize_t
typestr_itemsize(PyObject *typestr)
{
    const char *text = mm_read_text(typestr);
    long size = text && text[0] && text[1] ? strtol(text + 2, NULL, 10) : 0;

    if (size < 1 || size > 65536) {
        PyErr_Format(PyExc_TypeError, "typestr must be a str such as \"<f4\", got %R", typestr);
        return -1;
    }
    return size;
}

enum { MOST_DIMENSIONS = 64 };

static int
read_array_interface(PyObject *value, PyObject *interface, mm_range *range, bool *dense)
{
    Py_ssize_t shape[MOST_DIMENSIONS], strides[MOST_DIMENSIONS], itemsize;
    PyObject *data, *shape_item, *typestr, *strides_item;
    int dimensions, has_strides;
    CUdeviceptr first;

    if (!PyDict_Check(interface)) {
        PyErr_Format(PyExc_TypeError, "__cuda_array_interface__ of %R must be a dict", value);
        return -1;
    }
    data = PyDict_GetItemString(interface, "data");
    shape_item = PyDict_GetItemString(interface, "shape");
    typestr = PyDict_GetItemString(interface, "typestr");
    strides_item = PyDict_GetItemString(interface, "strides");
    if (data == NULL || shape_item == NULL || typestr == NULL || !PyTuple_Check(data)
        || PyTuple_Size(data) != 2) {
        PyErr_Format(PyExc_TypeError,
                     "__cuda_array_interface__ of %R must have data=(address, read-only), shape "
                     "and typestr",
                     value);
        return -1;
    }
    dimensions = read_ints(shape_item, "shape", shape, MOST_DIMENSIONS);
    itemsize = dimensions < 0 ? -1 : typestr_itemsize(typestr);
    if (itemsize < 0) {
        return -1;
    }
    for (int i = 0; i < dimensions; i++) {
        if (shape[i] == 0) {
            return empty_target(value); /* its address may be 0 */
        }
    }
    has_strides = strides_item != NULL && strides_item != Py_None;
    if (has_strides
        && read_ints(strides_item, "strides", strides, MOST_DIMENSIONS) != dimensions) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_TypeError, "strides and shape of %R differ in length", value);
        }
        return -1;
    }
    if (mm_read_address(PyTuple_GetItem(data, 0), &first) < 0) {
        return -1;
    }
    return extent(value, first, dimensions, shape, has_strides ? strides : NULL, itemsize, range,
                  dense);
}

/* cuda.core Buffer: handle and size. */
static int
read_cuda_core(PyObject *value, mm_range *range, bool *dense)
{
    PyObject *handle, *size = NULL;
    int rc = -1;

    if (mm_get_optional(value, "handle", &handle) <= 0) {
        return PyErr_Occurred() ? -1 : 0;
    }
    if (mm_get_optional(value, "size", &size) > 0) {
        rc = mm_read_address(handle, &range->start) < 0
                     || mm_read_size(size, "size", &range->size) < 0
                 ? -1
                 : 1;
    } else if (!PyErr_Occurred()) {
        rc = 0;
    }
    range->allocation = 0;
    *dense = true;
    Py_DECREF(handle);
    Py_XDECREF(size);
    return rc;
}

static int
read_exported(PyObject *value, mm_range *range, bool *dense, PyObject **export)
{
    Py_buffer view;
    int rc;

    *export = PyMemoryView_FromObject(value);
    if (*export == NULL) {
        return -1;
    }
    if (PyObject_GetBuffer(*export, &view, PyBUF_STRIDED_RO) < 0) {
        Py_CLEAR(*export);
        return -1;
    }
    rc = extent(value, (CUdeviceptr)(uintptr_t)view.buf, view.ndim, view.shape, view.strides,
                view.itemsize, range, dense);
    PyBuffer_Release(&view);
    if (rc < 0) {
        Py_CLEAR(*export);
    }
    return rc;
}

int
mm_read_foreign(PyObject *value, mm_range *range, bool *dense, PyObject **export)
{
    PyObject *interface;
    int found = mm_get_optional(value, "__cuda_array_interface__", &interface);

    *export = NULL;
    if (found > 0) {
        /* A copy of our own: reading the numbers runs Python code, and other threads, that may
         * change the dict and so free what lies in it. */
        PyObject *own = PyDict_Check(interface) ? PyDict_Copy(interface) : Py_NewRef(interface);
        found = own ? read_array_interface(value, own, range, dense) : -1;
        Py_XDECREF(own);
        Py_DECREF(interface);
        return found;
    }
    if (found == 0 && mm_is_from(value, "cuda")) {
        found = read_cuda_core(value, range, dense);
        if (found != 0) {
            return found < 0 ? -1 : 0;
        }
    }
    if (found == 0 && PyObject_CheckBuffer(value)) {
        return read_exported(value, range, dense, export);
    }
    if (found == 0) {
        PyErr_Format(PyExc_TypeError,
                     "a target must be a ManagedBuffer, an array with __cuda_array_interface__, a "
                     "cuda.core Buffer or an object with the buffer protocol, got %R",
                     value);
    }
    return -1;
}

/* --- one and many ----------------------------------------------------------------------- */

/* Says which of several targets an exception is about; driver errors keep their attributes. */
static void
name_target(const mm_targets *t, Py_ssize_t i)
{
    PyObject *type, *value, *traceback;

    if (!t->several) {
        return;
    }
    PyErr_Fetch(&type, &value, &traceback);
    if (type == PyExc_ValueError || type == PyExc_TypeError || type == PyExc_RuntimeError) {
        PyErr_Format(type, "targets[%zd]: %S", i, value ? value : Py_None);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
    } else {
        PyErr_Restore(type, value, traceback);
    }
}

static int
keep_export(mm_targets *t, PyObject *export)
{
    int rc = 0;

    if (t->exports == NULL) {
        t->exports = PyList_New(0);
    }
    if (export != NULL) {
        rc = t->exports ? PyList_Append(t->exports, export) : -1;
        Py_DECREF(export);
    }
    return rc;
}

static int
read_one(mm_targets *t, PyObject *value, mm_operation op, mm_range *range)
{
    PyObject *export;
    mm_status st;
    bool dense;

    if (mm_is_buffer(t->state, value)) {
        mm_buffer_use use;
        if (mm_buffer_begin(mm_buffer_of(value), op, &use) < 0) {
            return -1;
        }
        *range = use.range;
        mm_buffer_end(&use);
        return 0;
    }
    if (mm_read_foreign(value, range, &dense, &export) < 0
        || (export != NULL && keep_export(t, export) < 0)) {
        return -1;
    }
    if (op == MM_DISCARD && !dense) {
        PyErr_Format(PyExc_ValueError,
                     "cannot discard %R: it is not contiguous, and what lies in its gaps would be "
                     "lost",
                     value);
        return -1;
    }
    if (mm_range_check(t->cu, range, op, &st) < 0) {
        (void)mm_raise(t->state, &st);
        return -1;
    }
    return 0;
}

/* One target, as opposed to a collection of them. */
static int
is_single(mm_state *state, PyObject *value)
{
    PyObject *interface;
    int found;

    if (mm_is_buffer(state, value)) {
        return 1;
    }
    if (PyList_Check(value) || PyTuple_Check(value)) {
        return 0;
    }
    found = mm_get_optional(value, "__cuda_array_interface__", &interface);
    if (found > 0) {
        Py_DECREF(interface);
    }
    if (found != 0) {
        return found;
    }
    return PyUnicode_Check(value) || PyObject_CheckBuffer(value) || mm_is_from(value, "cuda")
           || !(PyIter_Check(value) || PySequence_Check(value)
                || PyObject_HasAttrString(value, "__iter__"));
}

int
mm_targets_read(mm_state *state, PyObject *value, mm_operation op, mm_targets *t)
{
    int single = is_single(state, value);
    Py_ssize_t count;
    mm_status st;

    *t = (mm_targets){.state = state, .several = !single};
    t->batch.moves = t->batch.few;
    if (single < 0 || (t->cu = mm_open(state)) == NULL) {
        return -1;
    }
    t->items = single ? PyTuple_Pack(1, value) : PySequence_Tuple(value);
    if (t->items == NULL) {
        return -1;
    }
    count = PyTuple_Size(t->items);
    if (count == 0) {
        PyErr_SetString(PyExc_ValueError, "targets is empty: give at least one");
    } else if (mm_batch_init(&t->batch, (size_t)count, &st) < 0) {
        (void)mm_raise(state, &st);
    }
    for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); i++) {
        if (read_one(t, PyTuple_GetItem(t->items, i), op, &t->batch.moves[i].range) < 0) {
            name_target(t, i);
        }
    }
    if (PyErr_Occurred()) {
        mm_targets_end(t);
        return -1;
    }
    return 0;
}

int
mm_targets_read_locations(mm_targets *t, PyObject *value)
{
    bool each = value != NULL && t->several && (PyList_Check(value) || PyTuple_Check(value));
    PyObject *locations = each ? PySequence_Tuple(value) : NULL;
    CUmemLocation where = mm_host();
    int rc = 0;

    if (each && locations == NULL) {
        return -1;
    }
    if (!each) {
        rc = mm_read_location(t->state, value, &where);
    } else if ((size_t)PyTuple_Size(locations) != t->batch.count) {
        PyErr_Format(PyExc_ValueError,
                     "location has length %zd, but there are %zu targets: give one location for "
                     "all, or one for each",
                     PyTuple_Size(locations), t->batch.count);
        rc = -1;
    }
    for (size_t i = 0; rc == 0 && i < t->batch.count; i++) {
        if (each) {
            rc = mm_read_location(t->state, PyTuple_GetItem(locations, (Py_ssize_t)i), &where);
        }
        t->batch.moves[i].where = where;
    }
    Py_XDECREF(locations);
    return rc;
}

int
mm_targets_enter(mm_targets *t)
{
    Py_ssize_t count = PyTuple_Size(t->items);

    for (; t->entered < count; t->entered++) {
        PyObject *item = PyTuple_GetItem(t->items, t->entered);
        if (mm_is_buffer(t->state, item)) {
            mm_buffer *b = mm_buffer_of(item);
            if (!mm_guard_enter(&b->memory->guard)) {
                (void)mm_buffer_raise_closed();
                name_target(t, t->entered);
                return -1;
            }
        }
    }
    return 0;
}

void
mm_targets_end(mm_targets *t)
{
    for (Py_ssize_t i = 0; i < t->entered; i++) {
        PyObject *item = PyTuple_GetItem(t->items, i);
        if (mm_is_buffer(t->state, item)) {
            mm_guard_leave(&mm_buffer_of(item)->memory->guard);
        }
    }
    mm_batch_free(&t->batch);
    Py_CLEAR(t->items);
    Py_CLEAR(t->exports);
}
