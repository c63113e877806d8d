/* args.c: hand-written argument reading: the generic parser costs more than most driver calls. */
#include "args.h"

#include "foreign_class.h"

#include <string.h>

/* The index of a parameter; -1 if no parameter has the name, with an exception if the name cannot
 * be encoded. Compares UTF-8, which a str caches: PyUnicode_CompareWithASCIIString is several
 * times slower. */
static int
find_name(const mm_parameters *p, PyObject *name)
{
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(name, &length);

    if (text == NULL || length == 0) {
        return -1; /* positional-only parameters are named "" */
    }
    for (int i = 0; i < p->total; i++) {
        const char *known = p->names[i];
        if (known[0] == text[0] && strlen(known) == (size_t)length
            && memcmp(text, known, (size_t)length) == 0) {
            return i;
        }
    }
    return -1;
}

enum { NAMES_TEXT = 128 };

/* Lists the parameters from `first` on, after an introduction; "" if none of them has a name. */
static void
list_names(const mm_parameters *p, int first, const char *introduction, char text[NAMES_TEXT])
{
    text[0] = '\0';
    for (int i = first; i < p->total; i++) {
        size_t used = strlen(text);
        if (p->names[i][0] != '\0') {
            (void)PyOS_snprintf(text + used, NAMES_TEXT - used,
                                "%s%s=", used == 0 ? introduction : ", ", p->names[i]);
        }
    }
}

/* Keys may be of any type in f(**{5: 2}). */
MM_COLD static int
refuse_name(const mm_parameters *p, PyObject *name)
{
    char named[NAMES_TEXT];

    if (!PyUnicode_Check(name)) {
        PyErr_SetString(PyExc_TypeError, "keywords must be strings");
    } else if (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_UnicodeError)) {
        list_names(p, 0, "; there are: ", named);
        PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'%s",
                     p->function, name, named);
    }
    return -1;
}

static int
store_by_name(const mm_parameters *p, PyObject *name, PyObject *value, PyObject **argv)
{
    int i = find_name(p, name);

    if (i < 0) {
        return refuse_name(p, name);
    }
    assert(i < p->total && value != NULL);
    if (argv[i] != NULL) {
        PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument '%U'", p->function,
                     name);
        return -1;
    }
    argv[i] = value;
    return 0;
}

/* Names the keyword-only parameters, which may have been passed by position. */
MM_COLD static int
refuse_count(const mm_parameters *p, Py_ssize_t nargs)
{
    char named[NAMES_TEXT];

    list_names(p, p->positional, "; by name only: ", named);
    if (p->positional == 0) {
        PyErr_Format(PyExc_TypeError, "%s() takes no positional arguments (%zd given)%s",
                     p->function, nargs, named);
    } else {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %d positional argument%s (%zd given)%s",
                     p->function, p->positional, p->positional == 1 ? "" : "s", nargs, named);
    }
    return -1;
}

static int
check_count(const mm_parameters *p, Py_ssize_t nargs)
{
    MM_ASSERT_LEFT(); /* no method is called while this thread has entered a guard */
    assert(!PyErr_Occurred());
    assert(p->required <= p->total && p->positional <= p->total);
    return nargs > p->positional ? refuse_count(p, nargs) : 0;
}

static int
check_required(const mm_parameters *p, PyObject **argv)
{
    for (int i = 0; i < p->required; i++) {
        if (argv[i] == NULL) {
            PyErr_Format(PyExc_TypeError, "%s() missing required argument '%s' (pos %d)",
                         p->function, p->names[i], i + 1);
            return -1;
        }
    }
    return 0;
}

int
mm_args(const mm_parameters *p, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
        PyObject **argv)
{
    Py_ssize_t named = kwnames ? PyTuple_Size(kwnames) : 0;

    if (check_count(p, nargs) < 0) {
        return -1;
    }
    for (int i = 0; i < p->total; i++) {
        assert(p->names[i] != NULL);
        argv[i] = i < nargs ? args[i] : NULL;
    }
    for (Py_ssize_t i = 0; i < named; i++) {
        if (store_by_name(p, PyTuple_GetItem(kwnames, i), args[nargs + i], argv) < 0) {
            return -1;
        }
    }
    return check_required(p, argv);
}

int
mm_args_new(const mm_parameters *p, PyObject *args, PyObject *kwargs, PyObject **argv)
{
    Py_ssize_t nargs = PyTuple_Size(args), position = 0;
    PyObject *name, *value;

    if (check_count(p, nargs) < 0) {
        return -1;
    }
    for (int i = 0; i < p->total; i++) {
        assert(p->names[i] != NULL);
        argv[i] = i < nargs ? PyTuple_GetItem(args, i) : NULL;
    }
    while (kwargs && PyDict_Next(kwargs, &position, &name, &value)) {
        if (store_by_name(p, name, value, argv) < 0) {
            return -1;
        }
    }
    return check_required(p, argv);
}

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
        PyErr_Format(error, "%s must be an int, got %R", name, value);
        return -1;
    } else if ((index = PyNumber_Index(value)) == NULL) {
        return -1;
    }
    *out = PyLong_AsLongLongAndOverflow(index, &overflow);
    Py_DECREF(index);
    if (overflow != 0) {
        PyErr_Format(PyExc_ValueError, "%s is out of range: %R", name, value);
        return -1;
    }
    return *out == -1 && PyErr_Occurred() ? -1 : 0;
}

int
mm_read_size(PyObject *value, const char *name, size_t *out)
{
    long long size;

    if (!is_int(value)) {
        PyErr_Format(PyExc_TypeError,
                     "%s must be an int, the number of bytes, got %R: 4 GiB is 4 << 30", name,
                     value);
        return -1;
    }
    if (mm_read_index(value, name, PyExc_TypeError, &size) < 0) {
        return -1;
    }
    if (size < 0 || size > PY_SSIZE_T_MAX) {
        PyErr_Format(PyExc_ValueError, "%s must be 0 bytes or more, got %lld", name, size);
        return -1;
    }
    *out = (size_t)size;
    return 0;
}

static int
refuse_address(PyObject *value)
{
    PyErr_Format(PyExc_ValueError, "%R is not an address of memory", value);
    return -1;
}

static int
refuse_address_type(PyObject *value)
{
    PyErr_Format(PyExc_TypeError, "an address must be an int, got %R", value);
    return -1;
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
        PyErr_Clear(); /* TypeError: an array, which is more than one number */
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
        PyErr_Format(PyExc_ValueError, "%zu bytes at %p leave the address space", *size,
                     (void *)(uintptr_t)*start);
        return -1;
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
    PyErr_Format(PyExc_ValueError, "dispatch must be \"auto\", \"batch\" or \"loop\", got %R",
                 value);
    return -1;
}

int
mm_read_unsupported_text(PyObject *value, bool *skips)
{
    bool text = PyUnicode_Check(value);

    *skips = text && PyUnicode_CompareWithASCIIString(value, "skip") == 0;
    if (*skips || (text && PyUnicode_CompareWithASCIIString(value, "raise") == 0)) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "unsupported must be \"raise\" or \"skip\", got %R", value);
    return -1;
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

/* 1 or 0 for a bool, also one of NumPy, whose class is called bool_ before NumPy 2. -1 for other
 * objects, and with an exception. */
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
mm_read_numpy_flag(mm_state *state, PyObject *value, const char *name, bool *out)
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
