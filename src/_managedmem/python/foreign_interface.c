/* foreign_interface.c: reading memory by __cuda_array_interface__ and __array_interface__, two dicts
 * with the same entries. */
#include "foreign_interface.h"

#include <string.h>

enum { MOST_ITEM_BYTES = 65536, NEWEST_INTERFACE = 3 };

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
typestr_itemsize(PyObject *typestr, bool *swapped)
{
    const char *text = mm_read_text(typestr);
    long size = text ? parse_typestr(text) : 0;

    if (size == 0) {
        return MM_ERROR(PyExc_TypeError,
                        "typestr must be a str of byte order, kind and bytes such as \"<f4\" or "
                        "\"|u1\", got %R",
                        typestr);
    }
    *swapped = mm_is_other_order(text[0]) && size > 1;
    return size;
}

enum { VERSION, MASK, SHAPE, STRIDES, TYPESTR, DATA, STREAM, OFFSET, DESCR, ENTRIES };

/* The dict of an object: borrowed references, NULL for an entry that is missing or None. */
typedef struct {
    PyObject *value;
    const char *attribute; /* its name */
    PyObject *entries[ENTRIES];
} interface;

static int
find_entries(PyObject *dict, interface *shown)
{
    static const char *const names[ENTRIES] = {
        [VERSION] = "version", [MASK] = "mask",       [SHAPE] = "shape",
        [STRIDES] = "strides", [TYPESTR] = "typestr", [DATA] = "data",
        [STREAM] = "stream",   [OFFSET] = "offset",   [DESCR] = "descr",
    };

    for (int i = 0; i < ENTRIES; i++) {
        PyObject *key = PyUnicode_FromString(names[i]), *entry;
        entry = key ? PyDict_GetItemWithError(dict, key) : NULL;
        Py_XDECREF(key);
        if (entry == NULL && PyErr_Occurred()) {
            return -1;
        }
        shown->entries[i] = entry == Py_None && i != VERSION ? NULL : entry;
    }
    return 0;
}

/* Raises with "subject begin attribute end". */
static int
refuse_interface(const interface *shown, PyObject *error, const char *begin, const char *end)
{
    char reason[256];

    (void)PyOS_snprintf(reason, sizeof reason, "%s %s%s", begin, shown->attribute, end);
    return mm_refuse_foreign(error, shown->value, reason);
}

/* Reads the stream of the producer. The protocol forbids 0, which could be either default stream,
 * but some producers write it anyway. It is refused only if the work must follow the stream. */
static int
read_producer(const interface *shown, mm_foreign *out)
{
    PyObject *stream = shown->entries[STREAM];
    long long handle;

    if (stream == NULL) {
        return 0;
    }
    if (mm_read_index(stream, "stream in __cuda_array_interface__", PyExc_TypeError, &handle)
        < 0) {
        return -1;
    }
    if (handle < 0 || (handle == 0 && out->ordered)) {
        return refuse_interface(shown, PyExc_ValueError, "has a stream in its",
                                " that the protocol does not allow: it must be None, 1 (legacy), "
                                "2 (per-thread) or a handle; 0 is ambiguous");
    }
    out->producer = out->ordered ? (CUstream)(uintptr_t)handle : NULL;
    return 0;
}

/* Refuses masked elements, and versions whose new entries could change the meaning of the
 * others. */
static int
check_form(const interface *shown)
{
    PyObject *version = shown->entries[VERSION];
    long long number;

    if (version == NULL) {
        return refuse_interface(shown, PyExc_TypeError, "must have version in its", "");
    }
    if (mm_read_index(version, "version of an array interface", PyExc_TypeError, &number) < 0) {
        return -1;
    }
    if (number < 0 || number > NEWEST_INTERFACE) {
        return MM_ERROR(PyExc_ValueError,
                        "version in %s must be 0 to %d, got %lld: this release does not know the "
                        "entries of other versions",
                        shown->attribute, (int)NEWEST_INTERFACE, number);
    }
    if (shown->entries[MASK] != NULL) {
        return refuse_interface(shown, PyExc_ValueError, "has a mask in its",
                                ": masks are not supported, pass the arrays of the data and of "
                                "the mask");
    }
    return 0;
}

static int
read_form(const interface *shown, Py_ssize_t *shape, Py_ssize_t *strides, mm_array_layout *layout,
          bool *swapped)
{
    PyObject *const *entries = shown->entries;

    if (entries[SHAPE] == NULL || entries[TYPESTR] == NULL) {
        return refuse_interface(shown, PyExc_TypeError, "must have shape and typestr in its", "");
    }
    layout->shape = shape;
    layout->strides = entries[STRIDES] ? strides : NULL;
    layout->dimensions = mm_read_ints(entries[SHAPE], "shape", shape);
    layout->itemsize = layout->dimensions < 0 ? -1 : typestr_itemsize(entries[TYPESTR], swapped);
    if (layout->itemsize < 0) {
        return -1;
    }
    if (entries[STRIDES] != NULL
        && mm_read_ints(entries[STRIDES], "strides", strides) != layout->dimensions) {
        return PyErr_Occurred() ? -1
                                : mm_refuse_foreign(PyExc_TypeError, shown->value,
                                                    "has strides and shape of different length");
    }
    return 0;
}

/* 1 if members of a structure, as in [("a", "|O"), ("b", "<M8[D]")], refer to Python objects. */
static int
has_objects(const interface *shown)
{
    PyObject *mark, *text;
    int rc;

    if (mm_read_text(shown->entries[TYPESTR])[1] != 'V' || shown->entries[DESCR] == NULL) {
        return 0;
    }
    mark = PyUnicode_FromString("'|O'");
    text = mark ? PyObject_Repr(shown->entries[DESCR]) : NULL;
    rc = text ? PyUnicode_Contains(text, mark) : -1;
    Py_XDECREF(mark);
    Py_XDECREF(text);
    return rc;
}

static int
read_data_tuple(const interface *shown, const mm_array_layout *layout, mm_foreign *out)
{
    PyObject *data = shown->entries[DATA];
    bool empty = mm_has_no_elements(layout);
    CUdeviceptr first = 0;
    int answer;

    if (data == NULL || !PyTuple_Check(data) || PyTuple_Size(data) != 2) {
        return refuse_interface(shown, PyExc_TypeError,
                                "must have data=(address, read-only) in its", "");
    }
    answer = PyObject_IsTrue(PyTuple_GetItem(data, 1));
    out->read_only = answer != 0;
    if (answer < 0 || empty) {
        return answer < 0 ? -1 : 0;
    }
    return mm_read_address(PyTuple_GetItem(data, 0), &first) < 0
               ? -1
               : mm_read_extent(shown->value, first, layout, out);
}

/* Reads the entry data, an object with the buffer protocol. Without it, reads the array itself. */
static int
read_data_buffer(const interface *shown, const mm_array_layout *layout, mm_foreign *out)
{
    PyObject *data = shown->entries[DATA];
    size_t offset = 0, start;
    Py_buffer view;
    int rc = 0;

    if (shown->entries[OFFSET] != NULL
        && mm_read_size(shown->entries[OFFSET], "offset of an array interface", &offset) < 0) {
        return -1;
    }
    out->export = PyMemoryView_FromObject(data ? data : shown->value);
    if (out->export == NULL || PyObject_GetBuffer(out->export, &view, PyBUF_SIMPLE) < 0) {
        return -1;
    }
    out->read_only = view.readonly != 0;
    if (!mm_has_no_elements(layout)) {
        rc = mm_read_extent(shown->value, (CUdeviceptr)(uintptr_t)view.buf + offset, layout, out);
        start = out->range.start - (CUdeviceptr)(uintptr_t)view.buf;
        if (rc == 0 && (start > (size_t)view.len || out->range.size > (size_t)view.len - start)) {
            rc = refuse_interface(shown, PyExc_ValueError, "has elements outside the data of its",
                                  "");
        }
    }
    PyBuffer_Release(&view);
    return rc;
}

MM_GUARD_ARRAYS static int
read_dict(interface *shown, PyObject *dict, bool on_host, mm_foreign *out)
{
    Py_ssize_t shape[MM_FOREIGN_DIMENSIONS], strides[MM_FOREIGN_DIMENSIONS];
    mm_array_layout layout;
    bool swapped = false;
    int refers;

    if (!PyDict_Check(dict)) {
        return refuse_interface(shown, PyExc_TypeError, "must have a dict as its", "");
    }
    if (find_entries(dict, shown) < 0 || check_form(shown) < 0
        || read_form(shown, shape, strides, &layout, &swapped) < 0
        || (refers = has_objects(shown)) < 0 || (!on_host && read_producer(shown, out) < 0)) {
        return -1;
    }
    out->swapped = swapped;
    out->objects = refers > 0;
    out->vouched = on_host;
    return on_host && (shown->entries[DATA] == NULL || !PyTuple_Check(shown->entries[DATA]))
               ? read_data_buffer(shown, &layout, out)
               : read_data_tuple(shown, &layout, out);
}

static int
read_interface(PyObject *value, const char *attribute, bool on_host, mm_foreign *out)
{
    interface shown = {.value = value, .attribute = attribute};
    PyObject *dict, *copy;
    int found = mm_get_optional(value, attribute, &dict);

    if (found <= 0) {
        return found;
    }
    /* Reading the numbers runs Python code, which may change the dict and so free its entries. */
    copy = PyDict_Check(dict) ? PyDict_Copy(dict) : Py_NewRef(dict);
    found = copy && read_dict(&shown, copy, on_host, out) == 0 ? 1 : -1;
    Py_XDECREF(copy);
    Py_DECREF(dict);
    if (found < 0) {
        Py_CLEAR(out->export);
    }
    return found;
}

int
mm_read_cuda_interface(mm_state *Py_UNUSED(state), PyObject *value, mm_foreign *out)
{
    return read_interface(value, "__cuda_array_interface__", false, out);
}

int
mm_read_host_interface(mm_state *Py_UNUSED(state), PyObject *value, mm_foreign *out)
{
    return read_interface(value, "__array_interface__", true, out);
}
