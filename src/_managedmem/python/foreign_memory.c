/* foreign_memory.c: the memory of other libraries' objects, with a table of the protocols that
 * show it. */
#include "foreign_memory.h"

#include <string.h>

#include "foreign_dlpack.h"
#include "foreign_interface.h"

/* --- torch ------------------------------------------------------------------------------ */

/* True if the current exception says that an object does not show its memory. */
static bool
is_refusal(void)
{
    assert(PyErr_Occurred());
    return PyErr_ExceptionMatches(PyExc_Exception) && !PyErr_ExceptionMatches(PyExc_MemoryError)
           && !PyErr_ExceptionMatches(PyExc_RecursionError);
}

/* Clears the exception of an object that refuses to show its memory. False for exceptions that must
 * propagate, such as MemoryError or KeyboardInterrupt. */
static bool
clear_refusal(void)
{
    if (!is_refusal()) {
        return false;
    }
    PyErr_Clear(); /* an Exception of the object */
    return true;
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
    subject = mm_type_text(value);
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
    mm_exception_drop(&error);
    return -1;
}

static int
refuse_without_storage(PyObject *value)
{
    PyObject *subject = mm_type_text(value);
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
    Py_ssize_t shape[MM_FOREIGN_DIMENSIONS], strides[MM_FOREIGN_DIMENSIONS];
    mm_array_layout layout = {.shape = shape, .strides = strides};
    CUdeviceptr first;
    size_t itemsize;
    int missing, step_count;

    layout.dimensions = mm_read_ints(lengths, "shape", shape);
    step_count = layout.dimensions < 0 ? -1 : mm_read_ints(steps, "stride()", strides);
    if (step_count < 0 || mm_read_size(width, "element_size()", &itemsize) < 0) {
        return refuse_tensor(value);
    }
    layout.itemsize = (Py_ssize_t)itemsize;
    if (step_count != layout.dimensions) {
        return mm_refuse_foreign(PyExc_TypeError, value,
                                 "has stride() and shape of different length");
    }
    if (mm_has_no_elements(&layout)) {
        return 0;
    }
    missing = PyObject_Not(address);
    if (missing != 0) {
        return missing < 0 ? -1 : refuse_without_storage(value);
    }
    for (int i = 0; i < layout.dimensions; i++) {
        if (__builtin_mul_overflow(strides[i], layout.itemsize, &strides[i])) {
            return mm_refuse_size(value);
        }
    }
    return mm_read_address(address, &first) < 0 ? -1 : mm_read_extent(value, first, &layout, out);
}

/* 1 if a method of the tensor, such as is_conj(), answers true, else 0; -1 with an exception. A
 * class without the method is not lazy. */
static int
ask_tensor(PyObject *value, const char *method)
{
    PyObject *answer = PyObject_CallMethod(value, method, NULL);
    int rc = answer != NULL ? PyObject_IsTrue(answer) : clear_refusal() ? 0 : -1;

    Py_XDECREF(answer);
    return rc;
}

/* Only callers that copy the contents need this. */
static int
read_laziness(PyObject *value, mm_foreign *out)
{
    int rc = ask_tensor(value, "is_conj");

    if (rc == 0) {
        rc = ask_tensor(value, "is_neg");
    }
    out->lazy = rc > 0;
    return rc;
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
    if (rc == 0 && out->ordered) {
        rc = read_laziness(value, out);
    }
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

static int
read_int_of(PyObject *object, const char *name, long long *out)
{
    PyObject *number = object ? PyObject_GetAttrString(object, name) : NULL;
    int rc = number ? mm_read_index(number, name, PyExc_TypeError, out) : -1;

    Py_XDECREF(number);
    return rc;
}

/* The strides of a view of cuda.core count elements, and are None in C order. */
MM_GUARD_ARRAYS static int
read_core_extent(PyObject *value, PyObject *lengths, PyObject *steps, long long itemsize,
                 mm_foreign *out)
{
    Py_ssize_t shape[MM_FOREIGN_DIMENSIONS], strides[MM_FOREIGN_DIMENSIONS];
    mm_array_layout layout = {.itemsize = (Py_ssize_t)itemsize, .shape = shape};
    long long address;

    layout.dimensions = mm_read_ints(lengths, "shape", shape);
    if (layout.dimensions < 0) {
        return -1;
    }
    if (steps != Py_None) {
        layout.strides = strides;
        if (mm_read_ints(steps, "strides", strides) != layout.dimensions) {
            return PyErr_Occurred() ? -1
                                    : mm_refuse_foreign(PyExc_TypeError, value,
                                                        "has strides and shape of different "
                                                        "length");
        }
    }
    for (int i = 0; layout.strides != NULL && i < layout.dimensions; i++) {
        if (__builtin_mul_overflow(strides[i], layout.itemsize, &strides[i])) {
            return mm_refuse_size(value);
        }
    }
    if (mm_has_no_elements(&layout)) {
        return 0;
    }
    if (read_int_of(value, "ptr", &address) < 0) {
        return -1;
    }
    return address == 0 ? mm_refuse_foreign(PyExc_ValueError, value, "holds no memory")
                        : mm_read_extent(value, (CUdeviceptr)address, &layout, out);
}

/* Reads the size of the elements, and if their byte order is not the host's. The layout of a view
 * has the size even for element types that NumPy lacks; views of older releases have only a
 * dtype. */
static int
read_core_elements(PyObject *value, long long *itemsize, bool *swapped)
{
    PyObject *layout, *dtype, *native = NULL;
    int found = mm_get_optional(value, "layout", &layout), rc;

    dtype = found < 0 ? NULL : PyObject_GetAttrString(value, "dtype");
    if (dtype == NULL && (found <= 0 || !clear_refusal())) {
        Py_XDECREF(layout);
        return -1;
    }
    rc = read_int_of(layout ? layout : dtype, "itemsize", itemsize);
    if (rc == 0 && dtype != NULL && dtype != Py_None
        && (rc = mm_get_optional(dtype, "isnative", &native)) > 0) {
        rc = PyObject_Not(native);
        *swapped = rc > 0;
        Py_DECREF(native);
    }
    Py_XDECREF(layout);
    Py_XDECREF(dtype);
    return rc < 0 ? -1 : 0;
}

/* Reads a StridedMemoryView of cuda.core, which keeps the object that it views. */
static int
read_core_view(mm_state *Py_UNUSED(state), PyObject *value, mm_foreign *out)
{
    PyObject *shape = PyObject_GetAttrString(value, "shape");
    PyObject *strides = shape ? PyObject_GetAttrString(value, "strides") : NULL;
    PyObject *read_only = strides ? PyObject_GetAttrString(value, "readonly") : NULL;
    int answer = read_only ? PyObject_IsTrue(read_only) : -1;
    long long itemsize;

    out->read_only = answer > 0;
    out->vouched = true;
    if (answer >= 0
        && (read_core_elements(value, &itemsize, &out->swapped) < 0
            || read_core_extent(value, shape, strides, itemsize, out) < 0)) {
        answer = -1;
    }
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    Py_XDECREF(read_only);
    return answer < 0 ? -1 : 1;
}

static bool
is_object(char mark)
{
    return mark == 'O';
}

/* True if a format of the buffer protocol has a mark that is wanted. The names of members, which
 * are between colons, have no marks. */
static bool
has_mark(const char *format, bool (*is_wanted)(char mark))
{
    bool name = false;

    for (; format != NULL && *format != '\0'; format++) {
        name = name != (*format == ':');
        if (!name && is_wanted(*format)) {
            return true;
        }
    }
    return false;
}

static int
read_exported(mm_state *Py_UNUSED(state), PyObject *value, mm_foreign *out)
{
    mm_array_layout layout;
    Py_buffer view;
    int rc;

    if (!PyObject_CheckBuffer(value)) {
        return 0;
    }
    out->export = PyMemoryView_FromObject(value);
    if (out->export == NULL) {
        return -1;
    }
    if (PyObject_GetBuffer(out->export, &view, PyBUF_RECORDS_RO) < 0) {
        Py_CLEAR(out->export);
        return -1;
    }
    out->vouched = true;
    out->read_only = view.readonly != 0;
    out->swapped = view.itemsize > 1 && has_mark(view.format, mm_is_other_order);
    out->objects = has_mark(view.format, is_object);
    layout = (mm_array_layout){view.ndim, view.itemsize, view.shape, view.strides};
    rc = mm_has_no_elements(&layout)
             ? 0
             : mm_read_extent(value, (CUdeviceptr)(uintptr_t)view.buf, &layout, out);
    PyBuffer_Release(&view);
    if (rc < 0) {
        Py_CLEAR(out->export);
    }
    return rc < 0 ? -1 : 1;
}

/* --- the table -------------------------------------------------------------------------- */

/* Readers return 1 if they read the memory, 0 if the object is of another kind, -1 with an
 * exception. A list of kinds ends with a row without a reader. */
typedef struct {
    mm_foreign_class class;
    int (*read)(mm_state *state, PyObject *value, mm_foreign *out);
} kind_of_object;

/* In the order in which they are tried. To support another kind, add its row. */
static const kind_of_object kinds[] = {
    {{.package = NULL}, mm_read_cuda_interface},
    {{.package = "cuda", .name = "StridedMemoryView"}, read_core_view},
    {{.package = "cuda"}, read_core_buffer},
    {{.package = NULL}, read_exported},
    {{.package = NULL}, mm_read_dlpack},
    {{.package = NULL}, mm_read_host_interface},
    {{.package = NULL}, NULL},
};

static const kind_of_object host_kinds[] = {
    {{.package = NULL}, read_exported},
    {{.package = NULL}, mm_read_host_interface},
    {{.package = NULL}, mm_read_dlpack},
    {{.package = NULL}, NULL},
};

/* Kinds that tell, without a call of a method, if the memory is read-only. */
static const kind_of_object owner_kinds[] = {
    {{.package = NULL}, read_exported},
    {{.package = NULL}, mm_read_cuda_interface},
    {{.package = NULL}, mm_read_host_interface},
    {{.package = NULL}, NULL},
};

static bool
is_tensor(mm_state *state, PyObject *value)
{
    return mm_is_instance(state, value, "torch", "Tensor");
}

/* Tries the kinds in turn, because an object may refuse to show its memory by one protocol and
 * show it by another: a NumPy array of bfloat16 has no buffer but an array interface. If none
 * reads it, the first refusal is raised. Torch tensors are read by read_tensor instead. */
static int
try_kinds(mm_state *state, PyObject *value, const kind_of_object *rows, mm_foreign *out)
{
    const mm_foreign blank = {.dense = true, .ordered = out->ordered};
    mm_exception refusal = {NULL, NULL, NULL};
    PyObject *modules = NULL;
    int found = 0;

    for (; found == 0 && rows->read != NULL; rows++) {
        if (!mm_matches_class(state, value, rows->class, &modules)) {
            continue;
        }
        *out = blank;
        found = rows->read(state, value, out);
        if (found < 0 && is_refusal()) {
            if (refusal.type == NULL) {
                mm_exception_save(&refusal);
            }
            PyErr_Clear(); /* a refusal after the first one */
            found = 0;
        }
    }
    Py_XDECREF(modules);
    if (found == 0 && refusal.type != NULL) {
        mm_exception_restore(&refusal);
        return -1;
    }
    mm_exception_drop(&refusal);
    assert((found < 0) == (PyErr_Occurred() != NULL));
    return found;
}

/* Of a torch module it names only the type, because the repr can be pages long. */
static int
refuse_target(mm_state *state, PyObject *value)
{
    if (mm_is_instance(state, value, "torch", "Module")
        || mm_is_instance(state, value, "torch", "Optimizer")) {
        return mm_refuse_foreign(PyExc_TypeError, value,
                                 "is not a target: managedmem.torch.prefetch() and advise() take "
                                 "modules and optimizers");
    }
    return MM_ERROR(
        PyExc_TypeError,
        "a target must be a ManagedBuffer, a torch tensor, an array with "
        "__cuda_array_interface__, __array_interface__ or __dlpack__, a cuda.core Buffer "
        "or an object with the buffer protocol, got %.200R%s",
        value,
        PyUnicode_Check(value)
            ? ". A dict and a DataFrame give names: pass the values() of the dict, "
              "or to_numpy() of a column"
            : "");
}

int
mm_read_foreign(mm_state *state, PyObject *value, bool ordered, mm_foreign *out)
{
    int found;

    *out = (mm_foreign){.dense = true, .ordered = ordered};
    found = is_tensor(state, value) ? read_tensor(state, value, out)
                                    : try_kinds(state, value, kinds, out);
    return found == 0 ? refuse_target(state, value) : found < 0 ? -1 : 0;
}

/* --- questions about one object --------------------------------------------------------- */

int
mm_read_owner(mm_state *state, PyObject *value, mm_foreign *out)
{
    int found;

    *out = (mm_foreign){.dense = true};
    found = is_tensor(state, value) ? 0 : try_kinds(state, value, owner_kinds, out);
    return found < 0 && clear_refusal() ? 0 : found;
}

int
mm_holds_memory(mm_state *state, PyObject *value, CUdeviceptr start, size_t size, PyObject **held)
{
    mm_foreign shown = {.dense = true};
    const mm_range *range = &shown.range;
    int found;

    assert(size <= UINT64_MAX - start);
    found = is_tensor(state, value) ? read_tensor(state, value, &shown)
                                    : try_kinds(state, value, host_kinds, &shown);
    if (found > 0) {
        found = range->start <= start && start - range->start <= range->size
                && size <= range->size - (start - range->start);
    } else if (found < 0 && clear_refusal()) {
        found = 0;
    }
    if (found > 0 && held != NULL) {
        *held = shown.export ? shown.export : Py_NewRef(value);
    } else {
        Py_XDECREF(shown.export);
    }
    return found;
}

int
mm_is_array(mm_state *state, PyObject *value)
{
    static const char *const names[] = {"__cuda_array_interface__", "__dlpack__",
                                        "__array_interface__"};
    PyObject *shown;
    int found = is_tensor(state, value);

    for (size_t i = 0; found == 0 && i < sizeof names / sizeof *names; i++) {
        found = mm_get_optional((PyObject *)Py_TYPE(value), names[i], &shown);
        if (found == 0) { /* last, because reading it from the object computes an interface */
            found = mm_get_optional(value, names[i], &shown);
        }
        Py_XDECREF(shown);
    }
    return found;
}
