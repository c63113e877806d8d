/* foreign_memory.c: the memory of other libraries' objects: torch tensors, arrays with
 * __cuda_array_interface__, cuda.core buffers, and what has the buffer protocol. */
#include "foreign_memory.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_DIMENSIONS = 64, MOST_ITEM_BYTES = 65536, NEWEST_INTERFACE = 3 };

/* "numpy.ndarray": what a message calls a foreign object. */
static PyObject *
type_text(PyObject *value)
{
    PyObject *module = PyObject_GetAttrString((PyObject *)Py_TYPE(value), "__module__");
    PyObject *name = PyType_GetQualName(Py_TYPE(value)), *text = NULL;

    if (module != NULL && name != NULL) {
        text = PyUnicode_FromFormat("%S.%U", module, name);
    }
    Py_XDECREF(module);
    Py_XDECREF(name);
    return text;
}

int
mm_refuse_foreign(PyObject *error, PyObject *value, const char *why)
{
    PyObject *subject = type_text(value);

    if (subject != NULL) {
        PyErr_Format(error, "%U %s", subject, why);
        Py_DECREF(subject);
    }
    return -1;
}

/* --- extents ---------------------------------------------------------------------------- */

/* True for an array without elements, which becomes an empty range. Called before the address is read,
 * because that may be 0. */
static bool
is_empty(int dimensions, const Py_ssize_t *shape, mm_range *range, bool *dense)
{
    bool empty = false;

    for (int i = 0; i < dimensions; i++) {
        if (shape[i] < 0) {
            return false; /* an error that the caller finds later */
        }
        empty = empty || shape[i] == 0;
    }
    if (empty) {
        *range = (mm_range){0};
        *dense = true;
    }
    return empty;
}

static int
too_large(PyObject *value)
{
    return mm_refuse_foreign(PyExc_ValueError, value, "describes more memory than there can be");
}

static int
negative_length(PyObject *value)
{
    return mm_refuse_foreign(PyExc_ValueError, value, "has a negative length in its shape");
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
        if (shape[i] < 0) {
            return negative_length(value);
        }
        if (__builtin_mul_overflow(bytes, (long long)shape[i], &bytes)
            || (strides && __builtin_mul_overflow((long long)strides[i], shape[i] - 1LL, &reach))
            || __builtin_add_overflow(reach < 0 ? low : high, reach, reach < 0 ? &low : &high)) {
            return too_large(value);
        }
    }
    if (strides && __builtin_sub_overflow(high, low, &bytes)) {
        return too_large(value);
    }
    range->start = first + (CUdeviceptr)low; /* low is 0 or less */
    range->size = (size_t)bytes;
    if (range->start > first || range->size > UINT64_MAX - range->start) {
        return mm_refuse_foreign(PyExc_ValueError, value,
                                 "describes memory beyond an end of the address space");
    }
    range->allocation = 0;
    *dense = strides == NULL || fills_extent(dimensions, shape, strides, itemsize);
    return 0;
}

/* Reads a tuple of ints into out; the number of them, or -1. */
static int
read_ints(PyObject *tuple, const char *name, Py_ssize_t *out, int most)
{
    Py_ssize_t count = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1;

    if (count < 0 || count > most) {
        PyErr_Format(PyExc_TypeError, "%s must be a tuple of at most %d ints, got %R", name, most,
                     tuple);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        long long number;
        if (mm_read_index(PyTuple_GetItem(tuple, i), name, PyExc_TypeError, &number) < 0) {
            return -1;
        }
        out[i] = (Py_ssize_t)number;
    }
    return (int)count;
}

/* --- __cuda_array_interface__ ----------------------------------------------------------- */

/* The item size in a typestr such as "<f4"; 0 if the text is malformed. The byte order does not matter
 * here. Bit fields and Python objects have no size in bytes that could be on a device. */
static long
parse_typestr(const char *text)
{
    bool known = text[0] != '\0' && strchr("<>|", text[0]) && text[1] != '\0'
                 && strchr("biufcmMSUV", text[1]) && text[2] >= '1' && text[2] <= '9';
    char *rest;
    long size = known ? strtol(text + 2, &rest, 10) : 0;

    if (size < 1 || size > MOST_ITEM_BYTES) {
        return 0;
    }
    /* A time may have a unit, as in "<M8[ns]". */
    if ((text[1] == 'm' || text[1] == 'M') && rest[0] == '[' && rest[strlen(rest) - 1] == ']') {
        rest += strlen(rest);
    }
    if (*rest != '\0') {
        return 0;
    }
    return text[1] == 'U' ? size * 4 : size; /* U counts characters */
}

static Py_ssize_t
typestr_itemsize(PyObject *typestr)
{
    const char *text = mm_read_text(typestr);
    long size = text ? parse_typestr(text) : 0;

    if (size == 0) {
        PyErr_Format(PyExc_TypeError,
                     "typestr must be a str of byte order, kind and bytes such as \"<f4\" or "
                     "\"|u1\", got %R",
                     typestr);
        return -1;
    }
    return size;
}

/* A borrowed reference to an entry; NULL if it is missing, or with an exception. */
static PyObject *
entry_of(PyObject *interface, const char *name)
{
    PyObject *key = PyUnicode_FromString(name);
    PyObject *entry = key ? PyDict_GetItemWithError(interface, key) : NULL;

    Py_XDECREF(key);
    return entry;
}

/* Reads the stream of the producer. The protocol forbids 0, which could be either default stream. */
static int
read_producer(PyObject *value, PyObject *stream, CUstream *out)
{
    long long handle;

    if (stream == NULL || stream == Py_None) {
        return 0;
    }
    if (mm_read_index(stream, "stream in __cuda_array_interface__", PyExc_TypeError, &handle)
        < 0) {
        return -1;
    }
    if (handle <= 0) {
        return mm_refuse_foreign(
            PyExc_ValueError, value,
            "has a stream in its __cuda_array_interface__ that the protocol "
            "does not allow: it must be None, 1 (legacy), 2 (per-thread) or a "
            "handle; 0 is ambiguous");
    }
    *out = (CUstream)(uintptr_t)handle;
    return 0;
}

/* Refuses what this file does not understand: masked elements, and versions that may add entries with a
 * meaning of their own. */
static int
check_form(PyObject *value, PyObject *version, PyObject *mask)
{
    long long number;

    if (version == NULL) {
        return mm_refuse_foreign(PyExc_TypeError, value,
                                 "must have version in its __cuda_array_interface__");
    }
    if (mm_read_index(version, "version in __cuda_array_interface__", PyExc_TypeError, &number)
        < 0) {
        return -1;
    }
    if (number < 0 || number > NEWEST_INTERFACE) {
        PyErr_Format(PyExc_ValueError,
                     "version in __cuda_array_interface__ must be 0 to %d, got %lld: this release "
                     "does not know what the entries of other versions mean",
                     (int)NEWEST_INTERFACE, number);
        return -1;
    }
    if (mask != NULL && mask != Py_None) {
        return mm_refuse_foreign(PyExc_ValueError, value,
                                 "has a mask in its __cuda_array_interface__: masks are not "
                                 "followed here, give the array of the data and that of the mask");
    }
    return 0;
}

/* Reads data, a tuple (address, read-only). */
static int
read_data(PyObject *value, PyObject *data, CUdeviceptr *first, bool *read_only)
{
    int answer;

    if (!PyTuple_Check(data) || PyTuple_Size(data) != 2) {
        return mm_refuse_foreign(PyExc_TypeError, value,
                                 "must have data=(address, read-only) in its "
                                 "__cuda_array_interface__");
    }
    answer = PyObject_IsTrue(PyTuple_GetItem(data, 1));
    *read_only = answer != 0;
    return answer < 0 || (first != NULL && mm_read_address(PyTuple_GetItem(data, 0), first) < 0)
               ? -1
               : 0;
}

/* The layout; strides NULL means C order. Returns the number of dimensions, or -1. */
static int
read_layout(PyObject *value, PyObject *interface, Py_ssize_t *shape, Py_ssize_t *strides,
            bool *has_strides, Py_ssize_t *itemsize)
{
    PyObject *shape_item = entry_of(interface, "shape"), *steps = entry_of(interface, "strides");
    PyObject *typestr = entry_of(interface, "typestr");
    int dimensions;

    if (PyErr_Occurred()) {
        return -1;
    }
    if (shape_item == NULL || typestr == NULL) {
        return mm_refuse_foreign(PyExc_TypeError, value,
                                 "must have shape and typestr in its __cuda_array_interface__");
    }
    dimensions = read_ints(shape_item, "shape", shape, MOST_DIMENSIONS);
    *itemsize = dimensions < 0 ? -1 : typestr_itemsize(typestr);
    if (*itemsize < 0) {
        return -1;
    }
    *has_strides = steps != NULL && steps != Py_None;
    if (*has_strides && read_ints(steps, "strides", strides, MOST_DIMENSIONS) != dimensions) {
        return PyErr_Occurred() ? -1
                                : mm_refuse_foreign(PyExc_TypeError, value,
                                                    "has strides and shape of different length");
    }
    return dimensions;
}

MM_GUARD_ARRAYS static int
read_array_interface(PyObject *value, PyObject *interface, mm_foreign *out)
{
    Py_ssize_t shape[MOST_DIMENSIONS], strides[MOST_DIMENSIONS], itemsize = 0;
    PyObject *data, *stream, *version, *mask;
    bool has_strides, empty;
    CUdeviceptr first = 0;
    int dimensions;

    if (!PyDict_Check(interface)) {
        return mm_refuse_foreign(PyExc_TypeError, value,
                                 "has a __cuda_array_interface__ that is not a dict");
    }
    version = entry_of(interface, "version");
    mask = version ? entry_of(interface, "mask") : NULL;
    if (PyErr_Occurred() || check_form(value, version, mask) < 0) {
        return -1;
    }
    dimensions = read_layout(value, interface, shape, strides, &has_strides, &itemsize);
    if (dimensions < 0) {
        return -1;
    }
    data = entry_of(interface, "data");
    stream = entry_of(interface, "stream");
    if (PyErr_Occurred() || read_producer(value, stream, &out->producer) < 0) {
        return -1;
    }
    empty = is_empty(dimensions, shape, &out->range, &out->dense);
    if (read_data(value, data ? data : Py_None, empty ? NULL : &first, &out->read_only) < 0) {
        return -1;
    }
    return empty ? 0
                 : extent(value, first, dimensions, shape, has_strides ? strides : NULL, itemsize,
                          &out->range, &out->dense);
}

/* --- torch ------------------------------------------------------------------------------ */

/* torch's own words are worth repeating, but not its types of exception. */
static int
refuse_tensor(PyObject *value)
{
    PyObject *subject, *layout, *device;
    mm_exception met;

    if (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError)
        || PyErr_ExceptionMatches(PyExc_RecursionError)) {
        return -1;
    }
    mm_exception_save(&met);
    subject = type_text(value);
    layout = subject ? PyObject_GetAttrString(value, "layout") : NULL;
    device = layout ? PyObject_GetAttrString(value, "device") : NULL;
    if (device != NULL) {
        PyErr_Format(PyExc_TypeError,
                     "%U with layout %S on device %S has no strided memory of its own: give the "
                     "tensors that it is made of, such as values() and indices() of a sparse "
                     "tensor (torch: %S)",
                     subject, layout, device, met.value ? met.value : Py_None);
    }
    Py_XDECREF(subject);
    Py_XDECREF(layout);
    Py_XDECREF(device);
    Py_XDECREF(met.type);
    Py_XDECREF(met.value);
    Py_XDECREF(met.traceback);
    return -1;
}

static int
refuse_without_storage(PyObject *value)
{
    PyObject *subject = type_text(value);
    PyObject *device = subject ? PyObject_GetAttrString(value, "device") : NULL;

    if (device != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "%U on device %S holds no memory: a meta or fake tensor has none, one whose "
                     "storage was freed has lost it, and of a wrapper the tensors inside have it",
                     subject, device);
        Py_DECREF(device);
    }
    Py_XDECREF(subject);
    return -1;
}

MM_GUARD_ARRAYS static int
read_tensor_extent(PyObject *value, PyObject *address, PyObject *lengths, PyObject *steps,
                   PyObject *width, mm_range *range, bool *dense)
{
    Py_ssize_t shape[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
    int dimensions = read_ints(lengths, "shape", shape, MOST_DIMENSIONS);
    int steps_given = dimensions < 0 ? -1 : read_ints(steps, "stride()", strides, MOST_DIMENSIONS);
    int missing;
    size_t itemsize;
    CUdeviceptr first;

    if (steps_given < 0 || mm_read_size(width, "element_size()", &itemsize) < 0) {
        return refuse_tensor(value);
    }
    if (steps_given != dimensions) {
        return mm_refuse_foreign(PyExc_TypeError, value,
                                 "has stride() and shape of different length");
    }
    if (is_empty(dimensions, shape, range, dense)) {
        return 0;
    }
    missing = PyObject_Not(address);
    if (missing != 0) {
        return missing < 0 ? -1 : refuse_without_storage(value);
    }
    for (int i = 0; i < dimensions; i++) {
        if (__builtin_mul_overflow(strides[i], (Py_ssize_t)itemsize, &strides[i])) {
            return too_large(value);
        }
    }
    return mm_read_address(address, &first) < 0 ? -1
                                                : extent(value, first, dimensions, shape, strides,
                                                         (Py_ssize_t)itemsize, range, dense);
}

/* A tensor is asked itself and not for its __cuda_array_interface__: that refuses tensors that
 * require grad, those on the CPU, and the types that NumPy has no name for. */
static int
read_tensor(mm_state *state, PyObject *value, mm_range *range, bool *dense)
{
    PyObject *address = PyObject_CallMethodObjArgs(value, state->name_data_ptr, NULL);
    PyObject *shape = address ? PyObject_GetAttr(value, state->name_shape) : NULL;
    PyObject *strides = shape ? PyObject_CallMethodObjArgs(value, state->name_stride, NULL) : NULL;
    PyObject *width =
        strides ? PyObject_CallMethodObjArgs(value, state->name_element_size, NULL) : NULL;
    int rc = width ? read_tensor_extent(value, address, shape, strides, width, range, dense)
                   : refuse_tensor(value);

    Py_XDECREF(address);
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    Py_XDECREF(width);
    return rc;
}

/* --- the rest --------------------------------------------------------------------------- */

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
        rc = mm_read_address_range(handle, size, &range->start, &range->size) < 0 ? -1 : 1;
    } else if (!PyErr_Occurred()) {
        rc = 0;
    }
    range->allocation = 0;
    *dense = true;
    Py_DECREF(handle);
    Py_XDECREF(size);
    return rc;
}

int
mm_read_exported(PyObject *value, mm_foreign *out)
{
    Py_buffer view;
    int rc;

    *out = (mm_foreign){.dense = true, .vouched = true, .export = PyMemoryView_FromObject(value)};
    if (out->export == NULL) {
        return -1;
    }
    if (PyObject_GetBuffer(out->export, &view, PyBUF_STRIDED_RO) < 0) {
        Py_CLEAR(out->export);
        return -1;
    }
    rc = is_empty(view.ndim, view.shape, &out->range, &out->dense)
             ? 0
             : extent(value, (CUdeviceptr)(uintptr_t)view.buf, view.ndim, view.shape, view.strides,
                      view.itemsize, &out->range, &out->dense);
    PyBuffer_Release(&view);
    if (rc < 0) {
        Py_CLEAR(out->export);
    }
    return rc;
}

static bool
is_tensor(mm_state *state, PyObject *value)
{
    return mm_is_instance(state, value, "torch", "Tensor");
}

bool
mm_clear_refusal(void)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError)
        || PyErr_ExceptionMatches(PyExc_RecursionError)) {
        return false;
    }
    PyErr_Clear(); /* an Exception of the object */
    return true;
}

int
mm_holds_memory(mm_state *state, PyObject *value, CUdeviceptr start, size_t size, PyObject **held)
{
    mm_foreign shown = {.dense = true};
    const mm_range *range = &shown.range;
    int rc;

    if (is_tensor(state, value)) {
        rc = read_tensor(state, value, &shown.range, &shown.dense);
        shown.export = rc < 0 ? NULL : Py_NewRef(value);
    } else if (PyObject_CheckBuffer(value)) {
        rc = mm_read_exported(value, &shown);
    } else {
        return 0;
    }
    if (rc < 0) {
        return mm_clear_refusal() ? 0 : -1;
    }
    rc = range->start <= start && start - range->start <= range->size
         && size <= range->size - (start - range->start);
    if (rc > 0 && held != NULL) {
        *held = shown.export;
    } else {
        Py_DECREF(shown.export);
    }
    return rc;
}

int
mm_is_array(mm_state *state, PyObject *value)
{
    static const char name[] = "__cuda_array_interface__";
    PyObject *interface;
    int found;

    if (is_tensor(state, value)) {
        return 1;
    }
    found = mm_get_optional((PyObject *)Py_TYPE(value), name, &interface);
    if (found == 0) { /* the interface is computed only if the type lacks the attribute */
        found = mm_get_optional(value, name, &interface);
    }
    if (found > 0) {
        Py_DECREF(interface);
    }
    return found;
}

/* Names only the type, because the repr of a module can be pages long. */
static int
refuse_target(mm_state *state, PyObject *value)
{
    if (mm_is_instance(state, value, "torch", "Module")
        || mm_is_instance(state, value, "torch", "Optimizer")) {
        return mm_refuse_foreign(PyExc_TypeError, value,
                                 "is not a target: managedmem.torch.prefetch() and advise() take "
                                 "modules and optimizers");
    }
    PyErr_Format(PyExc_TypeError,
                 "a target must be a ManagedBuffer, a torch tensor, an array with "
                 "__cuda_array_interface__, a cuda.core Buffer or an object with the buffer "
                 "protocol, got %R",
                 value);
    return -1;
}

int
mm_read_interface(mm_state *state, PyObject *value, mm_foreign *out)
{
    PyObject *interface, *own;
    int found = 0;

    *out = (mm_foreign){.dense = true};
    if (is_tensor(state, value)
        || (found = mm_get_optional(value, "__cuda_array_interface__", &interface)) <= 0) {
        return found;
    }
    /* A copy of our own: reading the numbers runs Python code, and other threads, that may change the
     * dict and so free what lies in it. */
    own = PyDict_Check(interface) ? PyDict_Copy(interface) : Py_NewRef(interface);
    found = own && read_array_interface(value, own, out) == 0 ? 1 : -1;
    Py_XDECREF(own);
    Py_DECREF(interface);
    return found;
}

int
mm_read_foreign(mm_state *state, PyObject *value, mm_foreign *out)
{
    int found;

    *out = (mm_foreign){.dense = true};
    if (is_tensor(state, value)) {
        out->vouched = true;
        return read_tensor(state, value, &out->range, &out->dense);
    }
    found = mm_read_interface(state, value, out);
    if (found > 0) {
        return 0;
    }
    if (found == 0 && mm_is_from(state, value, "cuda")) {
        found = read_cuda_core(value, &out->range, &out->dense);
        if (found != 0) {
            return found < 0 ? -1 : 0;
        }
    }
    if (found == 0 && PyObject_CheckBuffer(value)) {
        return mm_read_exported(value, out);
    }
    return found == 0 ? refuse_target(state, value) : -1;
}
