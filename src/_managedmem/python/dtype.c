/* dtype.c: the table of element types, and the look-up by name. */
#include "dtype.h"

#include "args.h"

#include <string.h>

enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_COMPLEX = 5, DL_BOOL = 6 };

/* clang-format off: one type a line */
const mm_dtype mm_dtypes[MM_DTYPE_COUNT] = {
    {"uint8", "|u1", "B", 1, DL_UINT},         {"int8", "|i1", "b", 1, DL_INT},
    {"bool", "|b1", "?", 1, DL_BOOL},          {"uint16", "<u2", "H", 2, DL_UINT},
    {"int16", "<i2", "h", 2, DL_INT},          {"uint32", "<u4", "I", 4, DL_UINT},
    {"int32", "<i4", "i", 4, DL_INT},          {"uint64", "<u8", "Q", 8, DL_UINT},
    {"int64", "<i8", "q", 8, DL_INT},          {"float16", "<f2", "e", 2, DL_FLOAT},
    {"float32", "<f4", "f", 4, DL_FLOAT},      {"float64", "<f8", "d", 8, DL_FLOAT},
    {"complex64", "<c8", "Zf", 8, DL_COMPLEX}, {"complex128", "<c16", "Zd", 16, DL_COMPLEX},
};
/* clang-format on */

static const struct {
    const char *alias, *name;
} aliases[] = {
    {"float", "float64"},
    {"int", "int64"},
    {"complex", "complex128"},
    {"bool_", "bool"},
};

static const mm_dtype *
find_dtype(const char *name)
{
    if (strncmp(name, "torch.", 6) == 0) {
        name += 6;
    }
    if (name[0] == '\0') {
        return NULL;
    }
    for (size_t i = 0; i < sizeof aliases / sizeof *aliases; i++) {
        if (strcmp(name, aliases[i].alias) == 0) {
            name = aliases[i].name;
        }
    }
    for (int i = 0; i < MM_DTYPE_COUNT; i++) {
        /* Byte order marks may be left out: "f4" is "<f4". */
        const char *bare = mm_dtypes[i].typestr + 1;
        if (strcmp(name, mm_dtypes[i].name) == 0 || strcmp(name, bare) == 0
            || (strchr("<=|", name[0]) != NULL && strcmp(name + 1, bare) == 0)) {
            return &mm_dtypes[i];
        }
    }
    return NULL;
}

/* The name as a str: the value itself, the name of a class, the .str of NumPy, or str(). */
static PyObject *
read_dtype_name(PyObject *value)
{
    PyObject *text = NULL;

    if (PyUnicode_Check(value)) {
        return Py_NewRef(value);
    }
    if (PyType_Check(value)) {
        text = PyObject_GetAttrString(value, "__name__");
    } else {
        text = PyObject_GetAttrString(value, "str");
        if (text == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear(); /* AttributeError: not an object of NumPy */
            text = PyObject_Str(value);
        }
    }
    return text;
}

const mm_dtype *
mm_read_dtype(PyObject *value)
{
    const mm_dtype *dtype;
    const char *name;
    PyObject *text;

    assert(!PyErr_Occurred());
    if (value == NULL || value == Py_None) {
        return &mm_dtypes[0];
    }
    text = read_dtype_name(value);
    if (text == NULL) {
        return NULL;
    }
    name = mm_read_text(text);
    dtype = name ? find_dtype(name) : NULL;
    Py_DECREF(text);
    if (dtype == NULL) {
        PyErr_Format(PyExc_TypeError,
                     "%R is not a dtype of a buffer; known are bool, (u)int8 to (u)int64, "
                     "float16 to float64, complex64 and complex128 (for bfloat16 and fp8 use an "
                     "integer of the same size and view it there)",
                     value);
    }
    return dtype;
}
