/* dtype.c: the table of element types, and the type DType of buf.dtype: a str that is also equal to
 * the dtype objects of other libraries for the same element type. */
#include "dtype.h"

#include <string.h>

#include "args.h"
#include "foreign_class.h"

/* The codes of DLPack; those of the 8-bit floats came with version 1.1. */
enum {
    DL_INT = 0,
    DL_UINT = 1,
    DL_FLOAT = 2,
    DL_BFLOAT = 4,
    DL_COMPLEX = 5,
    DL_BOOL = 6,
    DL_FLOAT8_E3M4 = 7,
    DL_FLOAT8_E4M3 = 8,
    DL_FLOAT8_E4M3B11FNUZ = 9,
    DL_FLOAT8_E4M3FN = 10,
    DL_FLOAT8_E4M3FNUZ = 11,
    DL_FLOAT8_E5M2 = 12,
    DL_FLOAT8_E5M2FNUZ = 13,
    DL_FLOAT8_E8M0FNU = 14
};

/* The array interfaces and the buffer protocol have no code for the types from bfloat16 on. The
 * interfaces show these as plain bytes, as ml_dtypes and torch do. Their format is used only by
 * the results of numpy(copy=True), which NumPy then views as types of ml_dtypes. */
const mm_dtype mm_dtypes[MM_DTYPE_COUNT] = {
    {"uint8", "|u1", "B", 1, DL_UINT},
    {"int8", "|i1", "b", 1, DL_INT},
    {"bool", "|b1", "?", 1, DL_BOOL},
    {"uint16", "<u2", "H", 2, DL_UINT},
    {"int16", "<i2", "h", 2, DL_INT},
    {"uint32", "<u4", "I", 4, DL_UINT},
    {"int32", "<i4", "i", 4, DL_INT},
    {"uint64", "<u8", "Q", 8, DL_UINT},
    {"int64", "<i8", "q", 8, DL_INT},
    {"float16", "<f2", "e", 2, DL_FLOAT},
    {"float32", "<f4", "f", 4, DL_FLOAT},
    {"float64", "<f8", "d", 8, DL_FLOAT},
    {"complex64", "<c8", "Zf", 8, DL_COMPLEX},
    {"complex128", "<c16", "Zd", 16, DL_COMPLEX},
    {"bfloat16", "<V2", "2s", 2, DL_BFLOAT},
    {"float8_e3m4", "|V1", "1s", 1, DL_FLOAT8_E3M4},
    {"float8_e4m3", "|V1", "1s", 1, DL_FLOAT8_E4M3},
    {"float8_e4m3b11fnuz", "|V1", "1s", 1, DL_FLOAT8_E4M3B11FNUZ},
    {"float8_e4m3fn", "|V1", "1s", 1, DL_FLOAT8_E4M3FN},
    {"float8_e4m3fnuz", "|V1", "1s", 1, DL_FLOAT8_E4M3FNUZ},
    {"float8_e5m2", "|V1", "1s", 1, DL_FLOAT8_E5M2},
    {"float8_e5m2fnuz", "|V1", "1s", 1, DL_FLOAT8_E5M2FNUZ},
    {"float8_e8m0fnu", "|V1", "1s", 1, DL_FLOAT8_E8M0FNU},
};

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
        if (strcmp(name, mm_dtypes[i].name) == 0) {
            return &mm_dtypes[i];
        }
        if (strcmp(name, bare) == 0
            || (strchr("<=|", name[0]) != NULL && strcmp(name + 1, bare) == 0)) {
            return mm_is_plain_bytes(&mm_dtypes[i]) ? NULL : &mm_dtypes[i];
        }
    }
    return NULL;
}

/* The .str of a dtype of NumPy; its .name if the .str has no code for the type: "<V2", or "<f1"
 * of float8_e5m2. */
static PyObject *
read_numpy_name(PyObject *value)
{
    PyObject *text = PyObject_GetAttrString(value, "str");
    const char *code = mm_read_text(text);

    if (code != NULL && code[0] != '\0' && (code[1] == 'V' || strcmp(code + 1, "f1") == 0)) {
        Py_DECREF(text);
        text = PyObject_GetAttrString(value, "name");
    }
    return text;
}

/* The name as a str: the value itself, the name of a class or of a NumPy dtype, or str(value). */
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
        text = read_numpy_name(value);
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
                     "float16 to float64, complex64 and complex128, bfloat16, and the 8-bit "
                     "floats by the names of ml_dtypes, such as float8_e4m3fn",
                     value);
    }
    return dtype;
}

/* --- the type DType --------------------------------------------------------------------------- */

PyObject *
mm_dtype_object(mm_state *state, const mm_dtype *dtype)
{
    assert(dtype >= mm_dtypes && dtype < mm_dtypes + MM_DTYPE_COUNT);
    /* At the interpreter's end a buffer may outlive the module and its tuple of types. */
    if (state->dtypes == NULL) {
        return PyUnicode_FromString(dtype->name);
    }
    return Py_NewRef(PyTuple_GetItem(state->dtypes, dtype - mm_dtypes));
}

PyDoc_STRVAR(
    dtype_doc,
    "DType(dtype)\n--\n\n"
    "The element type of a buffer: its name, a str such as \"float32\".\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "dtype : str, NumPy or torch dtype, Python type\n"
    "    As for empty().\n"
    "\n"
    "Equal to every name and object of the same type: \"float32\", \"<f4\", numpy.float32,\n"
    "numpy.dtype(\"float32\"), torch.float32; never to None. It hashes like its name, so that a dict\n"
    "finds it by the name only. Each type has one object, which every DType(...) of it returns.\n"
    "\n"
    "bfloat16 and the 8-bit floats have the names of ml_dtypes: float8_e3m4, float8_e4m3,\n"
    "float8_e4m3b11fnuz, float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz,\n"
    "float8_e8m0fnu.\n"
    "\n"
    "Raises TypeError for a type that no buffer can have. Safe from every thread. Driver: none.");

static PyObject *
dtype_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static mm_signature signature = {.doc = dtype_doc};
    const mm_dtype *dtype;
    PyObject *argv[1];

    if (mm_signature_args_new(&signature, args, kwargs, argv) < 0
        || (dtype = mm_read_dtype(argv[0])) == NULL) {
        return NULL;
    }
    return mm_dtype_object(mm_type_state(type), dtype);
}

/* True for objects that can name an element type. A DType is compared only with these. */
static bool
names_a_dtype(mm_state *state, PyObject *value)
{
    return PyUnicode_Check(value) || PyType_Check(value)
           || mm_is_instance(state, value, "numpy", "dtype")
           || mm_is_instance(state, value, "torch", "dtype");
}

static PyObject *
dtype_richcompare(PyObject *op, PyObject *other, int comparison)
{
    mm_state *state = mm_type_state(Py_TYPE(op));
    const mm_dtype *dtype;

    if (comparison != Py_EQ && comparison != Py_NE) {
        return PyUnicode_RichCompare(op, other, comparison);
    }
    if (op == other) {
        return PyBool_FromLong(comparison == Py_EQ);
    }
    if (!names_a_dtype(state, other)) {
        return Py_NewRef(Py_NotImplemented);
    }
    dtype = mm_read_dtype(other);
    if (dtype == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) {
            return NULL;
        }
        PyErr_Clear(); /* TypeError: not a dtype of a buffer, so not equal */
    }
    return PyBool_FromLong((dtype == mm_read_dtype(op)) == (comparison == Py_EQ));
}

/* A type with __eq__ does not inherit __hash__. */
static Py_hash_t
dtype_hash(PyObject *op)
{
    return ((hashfunc)PyType_GetSlot(&PyUnicode_Type, Py_tp_hash))(op);
}

PyDoc_STRVAR(dtype_reduce_doc, "__reduce__($self, /)\n--\n\nFor pickle and copy.");

static PyObject *
dtype_reduce(PyObject *op, PyObject *Py_UNUSED(none))
{
    const mm_dtype *dtype = mm_read_dtype(op);

    return dtype ? Py_BuildValue("(O(s))", Py_TYPE(op), dtype->name) : NULL;
}

static PyObject *
dtype_get_itemsize(PyObject *op, void *Py_UNUSED(closure))
{
    const mm_dtype *dtype = mm_read_dtype(op);

    return dtype ? PyLong_FromLong(dtype->itemsize) : NULL;
}

static PyGetSetDef dtype_getset[] = {
    {"itemsize", dtype_get_itemsize, NULL, "The bytes of an element.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef dtype_methods[] = {
    {"__reduce__", dtype_reduce, METH_NOARGS, dtype_reduce_doc},
    {NULL, NULL, 0, NULL},
};

/* The module refers to the instances, the instances to their type, and the type to the module. str
 * has no traversal, so without this one the cycle would outlive its interpreter. */
static PyType_Slot dtype_slots[] = {
    {Py_tp_doc, (void *)dtype_doc},
    {Py_tp_base, &PyUnicode_Type},
    {Py_tp_traverse, mm_traverse_type},
    {Py_tp_new, dtype_new},
    {Py_tp_hash, dtype_hash},
    {Py_tp_richcompare, dtype_richcompare},
    {Py_tp_methods, dtype_methods},
    {Py_tp_getset, dtype_getset},
    {0, NULL},
};

/* A new instance, made by str.__new__. */
static PyObject *
new_dtype(PyTypeObject *type, const char *name)
{
    PyObject *args = Py_BuildValue("(s)", name);
    PyObject *self =
        args ? ((newfunc)PyType_GetSlot(&PyUnicode_Type, Py_tp_new))(type, args, NULL) : NULL;

    Py_XDECREF(args);
    return self;
}

int
mm_dtype_init(PyObject *module, mm_state *state)
{
    if (mm_add_final_type(module, "managedmem.typing.DType", 0, 0, dtype_slots, &state->dtype_type)
        < 0) {
        return -1;
    }
    state->dtypes = PyTuple_New(MM_DTYPE_COUNT);
    for (int i = 0; state->dtypes != NULL && i < MM_DTYPE_COUNT; i++) {
        PyObject *object = new_dtype(state->dtype_type, mm_dtypes[i].name);
        if (mm_set_item(state->dtypes, i, object) < 0) {
            Py_CLEAR(state->dtypes);
        }
    }
    return state->dtypes ? 0 : -1;
}
