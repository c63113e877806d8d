/* foreign_memory.c: the memory of other libraries' objects, with a table of the protocols that
 * show it. */
#include "foreign_memory.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_DIMENSIONS = 64, MOST_ITEM_BYTES = 65536, NEWEST_INTERFACE = 3 };

/* The elements of an array; strides are in bytes, and NULL means C order. */
typedef struct {
    int dimensions;
    Py_ssize_t itemsize;
    const Py_ssize_t *shape, *strides;
} array_layout;

/* The name of a foreign object in messages: that of its type, such as "numpy.ndarray". */
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
mm_refuse_foreign(PyObject *error, PyObject *value, const char *reason)
{
    PyObject *subject = type_text(value);

    if (subject != NULL) {
        PyErr_Format(error, "%U %s", subject, reason);
        Py_DECREF(subject);
    }
    return -1;
}

/* --- extents ---------------------------------------------------------------------------- */

/* True for an array without elements. It becomes an empty range before its address is read,
 * because that may be 0. */
static bool
has_no_elements(const array_layout *layout)
{
    bool empty = false;

    for (int i = 0; i < layout->dimensions; i++) {
        if (layout->shape[i] < 0) {
            return false; /* read_extent refuses it */
        }
        empty = empty || layout->shape[i] == 0;
    }
    return empty;
}

static int
refuse_size(PyObject *value)
{
    return mm_refuse_foreign(PyExc_ValueError, value, "describes more memory than there can be");
}

/* True if strided elements fill their extent without a gap or an overlap: in the order of their
 * strides, each axis must step over exactly the bytes that the smaller ones cover. */
static bool
fills_extent(const array_layout *layout)
{
    const Py_ssize_t *strides = layout->strides;
    long long covered = layout->itemsize;
    uint64_t left = 0;

    assert(layout->dimensions <= MOST_DIMENSIONS);
    for (int i = 0; i < layout->dimensions; i++) {
        left |= (uint64_t)(layout->shape[i] > 1) << i;
    }
    while (left != 0) {
        int next = -1;
        for (int i = 0; i < layout->dimensions; i++) {
            if ((left >> i & 1) && (next < 0 || llabs(strides[i]) < llabs(strides[next]))) {
                next = i;
            }
        }
        if (next < 0 || llabs(strides[next]) != covered) {
            return false;
        }
        left &= ~((uint64_t)1 << next);
        covered *= layout->shape[next];
    }
    return true;
}

/* As are the elements of a ManagedBuffer. */
static bool
is_c_contiguous(const array_layout *layout)
{
    uint64_t step = (uint64_t)layout->itemsize; /* wraps around beside a length of 0 */
    bool contiguous = true;

    for (int i = layout->dimensions - 1; i >= 0; i--) {
        if (layout->shape[i] == 0) {
            return true;
        }
        contiguous = contiguous && (layout->shape[i] == 1 || (uint64_t)layout->strides[i] == step);
        step *= (uint64_t)layout->shape[i];
    }
    return contiguous;
}

/* Computes the extent in memory from the address of element 0. The numbers come from foreign code,
 * so every product and sum is checked. */
static int
read_extent(PyObject *value, CUdeviceptr first, const array_layout *layout, mm_foreign *out)
{
    const Py_ssize_t *shape = layout->shape, *strides = layout->strides;
    long long low = 0, high = layout->itemsize, bytes = layout->itemsize;

    assert(layout->dimensions >= 0 && layout->itemsize >= 0);
    for (int i = 0; i < layout->dimensions; i++) {
        long long reach = 0;
        if (shape[i] < 0) {
            return mm_refuse_foreign(PyExc_ValueError, value,
                                     "has a negative length in its shape");
        }
        if (__builtin_mul_overflow(bytes, (long long)shape[i], &bytes)
            || (strides && __builtin_mul_overflow((long long)strides[i], shape[i] - 1LL, &reach))
            || __builtin_add_overflow(reach < 0 ? low : high, reach, reach < 0 ? &low : &high)) {
            return refuse_size(value);
        }
    }
    if (strides && __builtin_sub_overflow(high, low, &bytes)) {
        return refuse_size(value);
    }
    assert(low <= 0 && bytes >= 0);
    out->range.start = first + (CUdeviceptr)low;
    out->range.size = (size_t)bytes;
    if (out->range.start > first || out->range.size > UINT64_MAX - out->range.start) {
        return mm_refuse_foreign(PyExc_ValueError, value,
                                 "describes memory beyond an end of the address space");
    }
    out->dense = strides == NULL || fills_extent(layout);
    out->strided = strides != NULL && !is_c_contiguous(layout);
    return 0;
}

/* Reads a tuple of at most MOST_DIMENSIONS ints; returns their number, or -1. */
static int
read_ints(PyObject *tuple, const char *name, Py_ssize_t *out)
{
    Py_ssize_t count = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1;

    if (count < 0 || count > MOST_DIMENSIONS) {
        PyErr_Format(PyExc_TypeError, "%s must be a tuple of at most %d ints, got %R", name,
                     (int)MOST_DIMENSIONS, tuple);
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

/* The item size in a typestr such as "<f4"; 0 if the text is malformed. The byte order does not
 * matter. Bit fields and Python objects have no size in bytes that a device could use. */
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

enum { VERSION, MASK, SHAPE, STRIDES, TYPESTR, DATA, STREAM, ENTRIES };

/* Finds the entries of the protocol: borrowed references, NULL for a missing one. */
static int
find_entries(PyObject *interface, PyObject *entries[ENTRIES])
{
    static const char *const names[ENTRIES] = {
        [VERSION] = "version", [MASK] = "mask", [SHAPE] = "shape",   [STRIDES] = "strides",
        [TYPESTR] = "typestr", [DATA] = "data", [STREAM] = "stream",
    };

    for (int i = 0; i < ENTRIES; i++) {
        PyObject *key = PyUnicode_FromString(names[i]);
        entries[i] = key ? PyDict_GetItemWithError(interface, key) : NULL;
        Py_XDECREF(key);
        if (entries[i] == NULL && PyErr_Occurred()) {
            return -1;
        }
    }
    return 0;
}

/* Reads the stream of the producer. The protocol forbids 0, which could be either default
 * stream. */
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
        return mm_refuse_foreign(PyExc_ValueError, value,
                                 "has a stream in its __cuda_array_interface__ that the protocol "
                                 "does not allow: it must be None, 1 (legacy), 2 (per-thread) or "
                                 "a handle; 0 is ambiguous");
    }
    *out = (CUstream)(uintptr_t)handle;
    return 0;
}

/* Refuses masked elements, and versions whose new entries could change the meaning of the
 * others. */
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
                     "does not know the entries of other versions",
                     (int)NEWEST_INTERFACE, number);
        return -1;
    }
    if (mask != NULL && mask != Py_None) {
        return mm_refuse_foreign(PyExc_ValueError, value,
                                 "has a mask in its __cuda_array_interface__: masks are not "
                                 "supported, pass the arrays of the data and of the mask");
    }
    return 0;
}

/* Reads data, a tuple (address, read-only); first is NULL if the address is not needed. */
static int
read_data(PyObject *value, PyObject *data, CUdeviceptr *first, bool *read_only)
{
    int answer;

    if (data == NULL || !PyTuple_Check(data) || PyTuple_Size(data) != 2) {
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

/* Reads the layout into the caller's arrays. */
static int
read_layout(PyObject *value, PyObject *const *entries, Py_ssize_t *shape, Py_ssize_t *strides,
            array_layout *layout)
{
    bool strided = entries[STRIDES] != NULL && entries[STRIDES] != Py_None;

    if (entries[SHAPE] == NULL || entries[TYPESTR] == NULL) {
        return mm_refuse_foreign(PyExc_TypeError, value,
                                 "must have shape and typestr in its __cuda_array_interface__");
    }
    layout->shape = shape;
    layout->strides = strided ? strides : NULL;
    layout->dimensions = read_ints(entries[SHAPE], "shape", shape);
    layout->itemsize = layout->dimensions < 0 ? -1 : typestr_itemsize(entries[TYPESTR]);
    if (layout->itemsize < 0) {
        return -1;
    }
    if (strided && read_ints(entries[STRIDES], "strides", strides) != layout->dimensions) {
        return PyErr_Occurred() ? -1
                                : mm_refuse_foreign(PyExc_TypeError, value,
                                                    "has strides and shape of different length");
    }
    return 0;
}

MM_GUARD_ARRAYS static int
read_interface_dict(PyObject *value, PyObject *interface, mm_foreign *out)
{
    Py_ssize_t shape[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
    PyObject *entries[ENTRIES];
    array_layout layout;
    CUdeviceptr first = 0;
    bool empty;

    if (!PyDict_Check(interface)) {
        return mm_refuse_foreign(PyExc_TypeError, value,
                                 "has a __cuda_array_interface__ that is not a dict");
    }
    if (find_entries(interface, entries) < 0
        || check_form(value, entries[VERSION], entries[MASK]) < 0
        || read_layout(value, entries, shape, strides, &layout) < 0
        || read_producer(value, entries[STREAM], &out->producer) < 0) {
        return -1;
    }
    empty = has_no_elements(&layout);
    if (read_data(value, entries[DATA], empty ? NULL : &first, &out->read_only) < 0) {
        return -1;
    }
    return empty ? 0 : read_extent(value, first, &layout, out);
}

/* Reads any object with the attribute: 1 if it was read, 0 without it, -1 with an exception. */
static int
read_interface(mm_state *Py_UNUSED(state), PyObject *value, mm_foreign *out)
{
    PyObject *interface, *copy;
    int found = mm_get_optional(value, "__cuda_array_interface__", &interface);

    if (found <= 0) {
        return found;
    }
    /* Reading the numbers runs Python code, which may change the dict and so free its entries. */
    copy = PyDict_Check(interface) ? PyDict_Copy(interface) : Py_NewRef(interface);
    found = copy && read_interface_dict(value, copy, out) == 0 ? 1 : -1;
    Py_XDECREF(copy);
    Py_DECREF(interface);
    return found;
}

/* --- torch ------------------------------------------------------------------------------ */

/* True if the current exception says that an object does not show its memory. */
static bool
is_refusal(void)
{
    assert(PyErr_Occurred());
    return PyErr_ExceptionMatches(PyExc_Exception) && !PyErr_ExceptionMatches(PyExc_MemoryError)
           && !PyErr_ExceptionMatches(PyExc_RecursionError);
}

/* Repeats torch's message in a TypeError; torch itself raises several types of exception. */
static int
refuse_tensor(PyObject *value)
{
    PyObject *subject, *layout, *device;
    mm_exception error;

    if (!is_refusal()) {
        return -1;
    }
    mm_exception_save(&error);
    subject = type_text(value);
    layout = subject ? PyObject_GetAttrString(value, "layout") : NULL;
    device = layout ? PyObject_GetAttrString(value, "device") : NULL;
    if (device != NULL) {
        PyErr_Format(PyExc_TypeError,
                     "%U with layout %S on device %S has no strided memory of its own: pass the "
                     "tensors that it is made of, such as values() and indices() of a sparse "
                     "tensor (torch: %S)",
                     subject, layout, device, error.value ? error.value : Py_None);
    }
    Py_XDECREF(subject);
    Py_XDECREF(layout);
    Py_XDECREF(device);
    Py_XDECREF(error.type);
    Py_XDECREF(error.value);
    Py_XDECREF(error.traceback);
    return -1;
}

static int
refuse_without_storage(PyObject *value)
{
    PyObject *subject = type_text(value);
    PyObject *device = subject ? PyObject_GetAttrString(value, "device") : NULL;

    if (device != NULL) {
        PyErr_Format(
            PyExc_ValueError,
            "%U on device %S holds no memory: it is a meta or fake tensor, its storage was "
            "freed, or it is a wrapper whose memory is in the tensors inside",
            subject, device);
        Py_DECREF(device);
    }
    Py_XDECREF(subject);
    return -1;
}

MM_GUARD_ARRAYS static int
read_tensor_extent(PyObject *value, PyObject *address, PyObject *lengths, PyObject *steps,
                   PyObject *width, mm_foreign *out)
{
    Py_ssize_t shape[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
    array_layout layout = {.shape = shape, .strides = strides};
    CUdeviceptr first;
    size_t itemsize;
    int missing, step_count;

    layout.dimensions = read_ints(lengths, "shape", shape);
    step_count = layout.dimensions < 0 ? -1 : read_ints(steps, "stride()", strides);
    if (step_count < 0 || mm_read_size(width, "element_size()", &itemsize) < 0) {
        return refuse_tensor(value);
    }
    layout.itemsize = (Py_ssize_t)itemsize;
    if (step_count != layout.dimensions) {
        return mm_refuse_foreign(PyExc_TypeError, value,
                                 "has stride() and shape of different length");
    }
    if (has_no_elements(&layout)) {
        return 0;
    }
    missing = PyObject_Not(address);
    if (missing != 0) {
        return missing < 0 ? -1 : refuse_without_storage(value);
    }
    for (int i = 0; i < layout.dimensions; i++) {
        if (__builtin_mul_overflow(strides[i], layout.itemsize, &strides[i])) {
            return refuse_size(value);
        }
    }
    return mm_read_address(address, &first) < 0 ? -1 : read_extent(value, first, &layout, out);
}

/* Calls the tensor's own methods, because its __cuda_array_interface__ raises for tensors that
 * require grad, tensors on the CPU, and element types that NumPy lacks. */
static int
read_tensor(mm_state *state, PyObject *value, mm_foreign *out)
{
    PyObject *address = PyObject_CallMethodObjArgs(value, state->name_data_ptr, NULL);
    PyObject *shape = address ? PyObject_GetAttr(value, state->name_shape) : NULL;
    PyObject *strides = shape ? PyObject_CallMethodObjArgs(value, state->name_stride, NULL) : NULL;
    PyObject *width =
        strides ? PyObject_CallMethodObjArgs(value, state->name_element_size, NULL) : NULL;
    int rc = width ? read_tensor_extent(value, address, shape, strides, width, out)
                   : refuse_tensor(value);

    Py_XDECREF(address);
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    Py_XDECREF(width);
    out->vouched = true;
    return rc < 0 ? -1 : 1;
}

/* --- cuda.core and the buffer protocol --------------------------------------------------- */

/* Reads handle and size of a Buffer of cuda.core; 0 if either is missing. */
static int
read_core_buffer(mm_state *Py_UNUSED(state), PyObject *value, mm_foreign *out)
{
    PyObject *handle, *size = NULL;
    int found = mm_get_optional(value, "handle", &handle);

    if (found <= 0) {
        return found;
    }
    found = mm_get_optional(value, "size", &size);
    if (found > 0
        && mm_read_address_range(handle, size, &out->range.start, &out->range.size) < 0) {
        found = -1;
    }
    Py_DECREF(handle);
    Py_XDECREF(size);
    return found;
}

int
mm_read_exported(mm_state *Py_UNUSED(state), PyObject *value, mm_foreign *out)
{
    array_layout layout;
    Py_buffer view;
    int rc;

    if (!PyObject_CheckBuffer(value)) {
        return 0;
    }
    *out = (mm_foreign){.dense = true, .vouched = true, .export = PyMemoryView_FromObject(value)};
    if (out->export == NULL) {
        return -1;
    }
    if (PyObject_GetBuffer(out->export, &view, PyBUF_STRIDED_RO) < 0) {
        Py_CLEAR(out->export);
        return -1;
    }
    layout = (array_layout){view.ndim, view.itemsize, view.shape, view.strides};
    rc = has_no_elements(&layout)
             ? 0
             : read_extent(value, (CUdeviceptr)(uintptr_t)view.buf, &layout, out);
    PyBuffer_Release(&view);
    if (rc < 0) {
        Py_CLEAR(out->export);
    }
    return rc < 0 ? -1 : 1;
}

/* --- the table -------------------------------------------------------------------------- */

/* The kinds of objects, in the order in which they are tried. Readers return 1 if they read the
 * memory, 0 if the object is of another kind, -1 with an exception. To support another kind, add
 * its row. */
static const struct {
    mm_foreign_class class;
    int (*read)(mm_state *state, PyObject *value, mm_foreign *out);
} kinds[] = {
    {{.package = "torch", .name = "Tensor"}, read_tensor},
    {{.package = NULL}, read_interface},
    {{.package = "cuda"}, read_core_buffer},
    {{.package = NULL}, mm_read_exported},
};

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
                 "protocol, got %.200R%s",
                 value,
                 PyUnicode_Check(value) ? ": pass the values() of a dict, not its keys" : "");
    return -1;
}

int
mm_read_foreign(mm_state *state, PyObject *value, mm_foreign *out)
{
    PyObject *module = NULL;
    int found = 0;

    for (size_t i = 0; found == 0 && i < sizeof kinds / sizeof *kinds; i++) {
        if (mm_matches_class(state, value, kinds[i].class, &module)) {
            *out = (mm_foreign){.dense = true};
            found = kinds[i].read(state, value, out);
        }
    }
    Py_XDECREF(module);
    assert((found < 0) == (PyErr_Occurred() != NULL));
    return found == 0 ? refuse_target(state, value) : found < 0 ? -1 : 0;
}

/* --- questions about one object --------------------------------------------------------- */

static bool
is_tensor(mm_state *state, PyObject *value)
{
    return mm_is_instance(state, value, "torch", "Tensor");
}

int
mm_read_interface(mm_state *state, PyObject *value, mm_foreign *out)
{
    *out = (mm_foreign){.dense = true};
    return is_tensor(state, value) ? 0 : read_interface(state, value, out);
}

bool
mm_clear_refusal(void)
{
    if (!is_refusal()) {
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
    int found;

    assert(size <= UINT64_MAX - start);
    if (is_tensor(state, value)) {
        found = read_tensor(state, value, &shown);
        shown.export = Py_NewRef(value);
    } else {
        found = mm_read_exported(state, value, &shown);
    }
    if (found > 0) {
        found = range->start <= start && start - range->start <= range->size
                && size <= range->size - (start - range->start);
    } else if (found < 0 && mm_clear_refusal()) {
        found = 0;
    }
    if (found > 0 && held != NULL) {
        *held = shown.export;
    } else {
        Py_XDECREF(shown.export);
    }
    return found;
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
