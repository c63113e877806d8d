/* foreign_dlpack.c: reading memory by DLPack. The capsule is read and kept, not consumed: its own
 * destructor releases the tensor. */
#include "foreign_dlpack.h"

#include <string.h>

#include "dlpack_abi.h"

/* A tensor that a capsule holds. */
typedef struct {
    const dl_tensor *tensor;
    uint64_t flags;
} exchanged;

/* --- asking the producer ---------------------------------------------------------------- */

/* Sets *type to the type of the device that the object names, or to 0 if it names none. Returns -1
 * with an exception on failure. */
static int
read_device_type(PyObject *value, int *type)
{
    PyObject *method, *device;
    long long number = 0;
    int rc = mm_get_optional(value, "__dlpack_device__", &method);

    *type = 0;
    if (rc <= 0) {
        return rc;
    }
    device = PyObject_CallNoArgs(method);
    Py_DECREF(method);
    if (device != NULL && (!PyTuple_Check(device) || PyTuple_Size(device) != 2)) {
        (void)mm_refuse_foreign(PyExc_TypeError, value,
                                "must return (type, ordinal) from __dlpack_device__()");
        Py_CLEAR(device);
    }
    rc = device ? mm_read_index(PyTuple_GetItem(device, 0), "a DLPack device type",
                                PyExc_TypeError, &number)
                : -1;
    Py_XDECREF(device);
    *type = number > 0 && number <= INT_MAX ? (int)number : 0;
    return rc;
}

static bool
is_on_device(int type)
{
    return type == DL_DEVICE_CUDA || type == DL_DEVICE_CUDA_MANAGED;
}

/* Calls __dlpack__ with as many of its keywords as the producer knows: max_version came with DLPack
 * 1.0. Without a stream, a producer assumes the legacy one. */
static PyObject *
call_dlpack(PyObject *method, int type, bool ordered)
{
    enum { VERSION_AND_STREAM, STREAM, NEITHER };
    PyObject *stream = is_on_device(type) ? PyLong_FromLong(ordered ? 1 : -1) : Py_NewRef(Py_None);
    PyObject *none = PyTuple_New(0), *keywords, *capsule = NULL;
    int call = VERSION_AND_STREAM;

    while (stream != NULL && none != NULL) {
        keywords = call == VERSION_AND_STREAM
                       ? Py_BuildValue("{s:(ii),s:O}", "max_version", DLPACK_MAJOR, DLPACK_MINOR,
                                       "stream", stream)
                   : call == STREAM ? Py_BuildValue("{s:O}", "stream", stream)
                                    : PyDict_New();
        capsule = keywords ? PyObject_Call(method, none, keywords) : NULL;
        Py_XDECREF(keywords);
        if (capsule != NULL || call == NEITHER
            || (!PyErr_ExceptionMatches(PyExc_TypeError)
                && !PyErr_ExceptionMatches(PyExc_ValueError))) {
            break;
        }
        PyErr_Clear(); /* TypeError or ValueError: a producer that does not know the arguments */
        call++;
    }
    Py_XDECREF(stream);
    Py_XDECREF(none);
    return capsule;
}

static int
open_capsule(PyObject *value, PyObject *capsule, exchanged *out)
{
    const dl_managed_tensor_versioned *versioned;

    if (PyCapsule_IsValid(capsule, "dltensor")) {
        out->tensor =
            &((const dl_managed_tensor *)PyCapsule_GetPointer(capsule, "dltensor"))->tensor;
        out->flags = 0;
        return 0;
    }
    if (!PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        (void)mm_refuse_foreign(PyExc_TypeError, value,
                                "must return a new DLPack capsule from __dlpack__()");
        return -1; /* the analyzer does not see that mm_refuse_foreign returns -1 */
    }
    versioned = PyCapsule_GetPointer(capsule, "dltensor_versioned");
    if (versioned->version.major != DLPACK_MAJOR) {
        (void)mm_refuse_foreign(PyExc_ValueError, value,
                                "exports another major version of DLPack than 1");
        return -1;
    }
    out->tensor = &versioned->tensor;
    out->flags = versioned->flags;
    return 0;
}

/* --- reading the tensor ----------------------------------------------------------------- */

static int
check_tensor(PyObject *value, const exchanged *x)
{
    int type = x->tensor->device.device_type;

    if (x->flags & DL_FLAG_IS_COPIED) {
        return mm_refuse_foreign(PyExc_TypeError, value, "exports a copy by DLPack");
    }
    if (type != DL_DEVICE_CPU && type != DL_DEVICE_CUDA_HOST && !is_on_device(type)) {
        return mm_refuse_foreign(PyExc_TypeError, value,
                                 "is on a device that is neither the host nor of CUDA");
    }
    if (x->tensor->ndim < 0 || x->tensor->ndim > MM_FOREIGN_DIMENSIONS) {
        return mm_refuse_foreign(PyExc_TypeError, value, "has more than 64 axes");
    }
    return 0;
}

/* Replaces a layout of packed elements, which share bytes, by that of the bytes they fill. */
static int
read_packed(PyObject *value, Py_ssize_t bits, mm_array_layout *layout, Py_ssize_t *shape)
{
    Py_ssize_t count = bits;

    if (layout->strides != NULL) {
        Py_ssize_t step = 1;
        for (int i = layout->dimensions - 1; i >= 0; i--) {
            if (shape[i] != 1 && layout->strides[i] != step) {
                return mm_refuse_foreign(PyExc_TypeError, value,
                                         "has packed elements of less than a byte with strides");
            }
            step *= shape[i];
        }
    }
    for (int i = 0; i < layout->dimensions; i++) {
        if (__builtin_mul_overflow(count, shape[i], &count)) {
            return mm_refuse_size(value);
        }
    }
    shape[0] = count / 8 + (count % 8 != 0);
    *layout = (mm_array_layout){.dimensions = 1, .itemsize = 1, .shape = shape};
    return 0;
}

/* Reads the layout into the caller's arrays, which have one element for each axis, and at least
 * one. */
static int
read_shape(PyObject *value, const exchanged *x, Py_ssize_t *shape, Py_ssize_t *strides,
           mm_array_layout *layout)
{
    const dl_tensor *t = x->tensor;
    Py_ssize_t bits = (Py_ssize_t)t->dtype.bits * t->dtype.lanes;
    bool packed = bits % 8 != 0 && !(x->flags & DL_FLAG_SUBBYTE_PADDED);

    *layout = (mm_array_layout){.dimensions = t->ndim,
                                .itemsize = (bits + 7) / 8,
                                .shape = shape,
                                .strides = t->strides ? strides : NULL};
    for (int i = 0; i < t->ndim; i++) {
        shape[i] = (Py_ssize_t)t->shape[i];
        if (t->strides != NULL
            && __builtin_mul_overflow(t->strides[i], packed ? 1 : layout->itemsize, &strides[i])) {
            return mm_refuse_size(value);
        }
    }
    return packed && !mm_has_no_elements(layout) ? read_packed(value, bits, layout, shape) : 0;
}

MM_GUARD_ARRAYS static int
read_capsule(PyObject *value, const exchanged *x, mm_foreign *out)
{
    Py_ssize_t shape[MM_FOREIGN_DIMENSIONS], strides[MM_FOREIGN_DIMENSIONS];
    CUdeviceptr first = (CUdeviceptr)(uintptr_t)x->tensor->data;
    mm_array_layout layout;

    if (check_tensor(value, x) < 0 || read_shape(value, x, shape, strides, &layout) < 0) {
        return -1;
    }
    out->read_only = (x->flags & DL_FLAG_READ_ONLY) != 0;
    out->vouched = x->tensor->device.device_type == DL_DEVICE_CPU;
    out->producer =
        out->ordered && is_on_device(x->tensor->device.device_type) ? CU_STREAM_LEGACY : NULL;
    if (mm_has_no_elements(&layout)) {
        return 0;
    }
    if (first == 0 || __builtin_add_overflow(first, x->tensor->byte_offset, &first)) {
        return mm_refuse_foreign(PyExc_ValueError, value, "holds no memory");
    }
    return mm_read_extent(value, first, &layout, out);
}

int
mm_read_dlpack(mm_state *Py_UNUSED(state), PyObject *value, mm_foreign *out)
{
    PyObject *method, *capsule;
    exchanged x;
    int type, found = mm_get_optional(value, "__dlpack__", &method);

    if (found <= 0) {
        return found;
    }
    capsule = read_device_type(value, &type) < 0 ? NULL : call_dlpack(method, type, out->ordered);
    Py_DECREF(method);
    if (capsule == NULL || open_capsule(value, capsule, &x) < 0
        || read_capsule(value, &x, out) < 0) {
        Py_XDECREF(capsule);
        return -1;
    }
    out->export = capsule;
    return 1;
}
