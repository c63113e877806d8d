/* args.c: reads the values of arguments. */
#include "args.h"

#include "foreign_class.h"

#include <string.h>

static bool
is_int(PyObject *value)
{
    return PyLong_CheckExact(value) || (PyIndex_Check(value) && !PyBool_Check(value));
}

int
mm_read_index(PyObject *value, const char *name, PyObject *error, long long *out)
{
    PyObject *index;
    int overflow = 0;

    assert(!PyErr_Occurred());
    if (PyLong_CheckExact(value)) {
        index = Py_NewRef(value);
    } else if (!is_int(value)) {
        return MM_ERROR(error, "%s must be an int, got %R", name, value);
    } else if ((index = PyNumber_Index(value)) == NULL) {
        return -1;
    }
    *out = PyLong_AsLongLongAndOverflow(index, &overflow);
    Py_DECREF(index);
    if (overflow != 0) {
        return MM_ERROR(PyExc_ValueError, "%s is out of range: %R", name, value);
    }
    return *out == -1 && PyErr_Occurred() ? -1 : 0;
}

int
mm_read_size(PyObject *value, const char *name, size_t *out)
{
    long long size;

    if (!is_int(value)) {
        return MM_ERROR(PyExc_TypeError,
                        "%s must be an int, the number of bytes, got %R: 4 GiB is 4 << 30", name,
                        value);
    }
    if (mm_read_index(value, name, PyExc_TypeError, &size) < 0) {
        return -1;
    }
    if (size < 0 || size > PY_SSIZE_T_MAX) {
        return MM_ERROR(PyExc_ValueError, "%s must be 0 bytes or more, got %lld", name, size);
    }
    *out = (size_t)size;
    return 0;
}

static int
refuse_address(PyObject *value)
{
    return MM_ERROR(PyExc_ValueError, "%R is not an address of memory", value);
}

static int
refuse_address_type(PyObject *value)
{
    return MM_ERROR(PyExc_TypeError, "an address must be an int, got %R", value);
}

/* Reads an address that may be 0. */
static int
read_any_address(PyObject *value, CUdeviceptr *out)
{
    bool plain = PyLong_CheckExact(value);
    PyObject *number = NULL;
    unsigned long long address;

    if (!plain
        && (PyBool_Check(value) || PyFloat_Check(value)
            || (!PyIndex_Check(value)
                && PyType_GetSlot(Py_TYPE(value), Py_nb_int) == NULL))) { /* text, bytes */
        return refuse_address_type(value);
    }
    number = plain ? Py_NewRef(value) : PyNumber_Long(value);
    if (number == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) {
            return -1;
        }
        PyErr_Clear(); /* TypeError: an array of several numbers */
        return refuse_address_type(value);
    }
    address = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    if (address == (unsigned long long)-1 && PyErr_Occurred()) {
        PyErr_Clear(); /* OverflowError: negative or more than 64 bits */
        return refuse_address(value);
    }
    *out = (CUdeviceptr)address;
    return 0;
}

int
mm_read_address(PyObject *value, CUdeviceptr *out)
{
    if (read_any_address(value, out) < 0) {
        return -1;
    }
    return *out == 0 ? refuse_address(value) : 0;
}

int
mm_read_address_range(PyObject *address, PyObject *bytes, CUdeviceptr *start, size_t *size)
{
    if (read_any_address(address, start) < 0 || mm_read_size(bytes, "size", size) < 0) {
        return -1;
    }
    if (*start == 0 && *size > 0) {
        return refuse_address(address);
    }
    if (*size > UINT64_MAX - *start) {
        return MM_ERROR(PyExc_ValueError, "%zu bytes at %p leave the address space", *size,
                        (void *)(uintptr_t)*start);
    }
    return 0;
}

int
mm_read_dispatch(PyObject *value, mm_dispatch *out)
{
    static const char *const names[] = {
        [MM_DISPATCH_AUTO] = "auto",
        [MM_DISPATCH_BATCH] = "batch",
        [MM_DISPATCH_LOOP] = "loop",
    };

    *out = MM_DISPATCH_AUTO;
    if (value == NULL) {
        return 0;
    }
    for (size_t i = 0; PyUnicode_Check(value) && i < sizeof names / sizeof *names; i++) {
        if (PyUnicode_CompareWithASCIIString(value, names[i]) == 0) {
            *out = (mm_dispatch)i;
            return 0;
        }
    }
    return MM_ERROR(PyExc_ValueError, "dispatch must be \"auto\", \"batch\" or \"loop\", got %R",
                    value);
}

int
mm_read_unsupported_text(PyObject *value, bool *skips)
{
    bool text = PyUnicode_Check(value);

    *skips = text && PyUnicode_CompareWithASCIIString(value, "skip") == 0;
    if (*skips || (text && PyUnicode_CompareWithASCIIString(value, "raise") == 0)) {
        return 0;
    }
    return MM_ERROR(PyExc_ValueError, "unsupported must be \"raise\" or \"skip\", got %R", value);
}

const char *
mm_read_text(PyObject *value)
{
    Py_ssize_t length = 0;
    const char *text;

    if (value == NULL || !PyUnicode_Check(value)) {
        return NULL;
    }
    text = PyUnicode_AsUTF8AndSize(value, &length);
    if (text == NULL) {
        PyErr_Clear(); /* UnicodeEncodeError: a lone surrogate, which no known name has */
        return NULL;
    }
    return strlen(text) == (size_t)length ? text : NULL;
}

/* Returns 1 or 0 for a bool of Python or of NumPy, whose class is called bool_ before NumPy 2.
 * Returns -1 without an exception for other objects, and with one on failure. */
static int
truth_of_bool(mm_state *state, PyObject *value)
{
    if (value == Py_True || value == Py_False) {
        return value == Py_True;
    }
    return mm_is_instance(state, value, "numpy", "bool")
                   || mm_is_instance(state, value, "numpy", "bool_")
               ? PyObject_IsTrue(value)
               : -1;
}

int
mm_read_flag_slow(mm_state *state, PyObject *value, const char *name, bool *out)
{
    int answer = truth_of_bool(state, value);

    if (answer < 0 && !PyErr_Occurred()) {
        PyErr_Format(PyExc_TypeError, "%s takes a bool, got %R", name, value);
    }
    *out = answer > 0;
    return answer < 0 ? -1 : 0;
}

int
mm_read_defer_flag(mm_state *state, PyObject *value, mm_defer *out)
{
    int answer = truth_of_bool(state, value);

    if (answer < 0 && !PyErr_Occurred()) {
        PyErr_Format(PyExc_TypeError, "defer must be None, True or False, got %R", value);
    }
    *out = answer > 0 ? MM_DEFER_YES : MM_DEFER_NO;
    return answer < 0 ? -1 : 0;
}
