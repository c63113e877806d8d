/* foreign_location.c: reading location arguments, with a table of the libraries whose devices are
 * known. */
#include "foreign_location.h"

#include "foreign_class.h"
#include "location_object.h"

/* --- readers: 1 if the location was read, 0 if the object has none, -1 with an exception ----- */

/* Reads an int attribute; 0 if it is missing or None. */
static int
read_int(PyObject *value, const char *attribute, long long *out)
{
    PyObject *number;
    int found = mm_get_optional(value, attribute, &number);

    if (found <= 0) {
        return found;
    }
    if (number == Py_None) {
        found = 0;
    } else if (mm_read_index(number, attribute, PyExc_TypeError, out) < 0) {
        found = -1;
    }
    Py_DECREF(number);
    return found;
}

static int
read_ordinal(mm_state *state, PyObject *value, const char *attribute, CUmemLocation *out)
{
    long long ordinal;
    int found = read_int(value, attribute, &ordinal);

    return found > 0 && mm_device_location(state, ordinal, out) < 0 ? -1 : found;
}

static bool
is_text(PyObject *value, const char *text)
{
    return PyUnicode_Check(value) && PyUnicode_CompareWithASCIIString(value, text) == 0;
}

/* Reads the kind of a location from an attribute: the host, or a device whose ordinal is still to
 * be read. */
static int
read_kind(PyObject *value, const char *attribute, CUmemLocation *out)
{
    PyObject *kind;
    int found = mm_get_optional(value, attribute, &kind);

    if (found <= 0) {
        return found;
    }
    if (is_text(kind, "cpu")) {
        *out = mm_host();
    } else if (is_text(kind, "cuda") || is_text(kind, "gpu")) {
        *out = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, 0);
    } else {
        found = 0;
    }
    Py_DECREF(kind);
    return found;
}

/* Reads a torch.device. A device without an index is the current one. */
static int
read_torch_device(mm_state *state, PyObject *value, CUmemLocation *out)
{
    int found = read_kind(value, "type", out);

    if (found <= 0 || out->type == CU_MEM_LOCATION_TYPE_HOST) {
        return found;
    }
    found = read_ordinal(state, value, "index", out);
    if (found == 0) {
        found = mm_current_device_location(state, out) < 0 ? -1 : 1;
    }
    return found;
}

/* Reads a jax.Device. Its id counts the devices of all processes; local_hardware_id is the
 * driver's ordinal in this one. */
static int
read_jax_device(mm_state *state, PyObject *value, CUmemLocation *out)
{
    int found = read_kind(value, "platform", out);

    return found <= 0 || out->type == CU_MEM_LOCATION_TYPE_HOST
               ? found
               : read_ordinal(state, value, "local_hardware_id", out);
}

static int
read_device_with_id(mm_state *state, PyObject *value, CUmemLocation *out)
{
    return read_ordinal(state, value, "id", out);
}

/* Reads a weak proxy, which numba returns for its current device. A proxy has a type of its own. */
static int
read_proxy(mm_state *state, PyObject *value, CUmemLocation *out)
{
    PyObject *class;
    bool answer;

    if (!PyWeakref_CheckProxy(value)) {
        return 0;
    }
    class = PyObject_GetAttrString(value, "__class__");
    if (class == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_ReferenceError)) {
            return -1;
        }
        PyErr_Clear(); /* ReferenceError: the device is gone */
        return 0;
    }
    answer = PyType_Check(class) && mm_is_class_from(state, (PyTypeObject *)class, "numba");
    Py_DECREF(class);
    return answer ? read_device_with_id(state, value, out) : 0;
}

/* Reads a CUdevice of cuda.bindings, whose int value is the ordinal. */
static int
read_bindings_device(mm_state *state, PyObject *value, CUmemLocation *out)
{
    PyObject *number = PyNumber_Long(value);
    long long ordinal;
    int rc = number ? mm_read_index(number, "a CUdevice", PyExc_TypeError, &ordinal) : -1;

    Py_XDECREF(number);
    return rc < 0 || mm_device_location(state, ordinal, out) < 0 ? -1 : 1;
}

/* Reads a Host of cuda.core: the calling thread's NUMA node, a numbered node, or the host as a
 * whole. */
static int
read_core_host(PyObject *value, CUmemLocation *out)
{
    PyObject *current;
    long long node = 0;
    int found = mm_get_optional(value, "is_numa_current", &current);

    if (found <= 0) {
        return found;
    }
    found = PyObject_IsTrue(current);
    Py_DECREF(current);
    if (found != 0) {
        *out = mm_location(CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT, 0);
        return found;
    }
    found = read_int(value, "numa_id", &node);
    if (found > 0 && (node < 0 || node > INT_MAX)) {
        return MM_ERROR(PyExc_ValueError, "%R has a numa_id that is not a NUMA node: %lld", value,
                        node);
    }
    *out = found > 0 ? mm_location(CU_MEM_LOCATION_TYPE_HOST_NUMA, (int)node) : mm_host();
    return found < 0 ? -1 : 1;
}

static int
read_core_location(mm_state *state, PyObject *value, CUmemLocation *out)
{
    int found = read_ordinal(state, value, "device_id", out);

    return found != 0 ? found : read_core_host(value, out);
}

/* --- the table -------------------------------------------------------------------------- */

/* The first row that matches an object reads it. To support another library, add its row. */
static const struct {
    mm_foreign_class class;
    int (*read)(mm_state *state, PyObject *value, CUmemLocation *out);
} libraries[] = {
    {{.package = "torch"}, read_torch_device},
    {{.package = "cupy"}, read_device_with_id},
    {{.package = "numba"}, read_device_with_id},
    {{.package = "jaxlib"}, read_jax_device},
    {{.package = "weakref"}, read_proxy},
    {{.package = "cuda", .name = "CUdevice"}, read_bindings_device},
    {{.package = "cuda"}, read_core_location},
};

MM_COLD static int
refuse_location(PyObject *value)
{
    const char *advice = "";

    if (PyIndex_Check(value) || PyUnicode_Check(value)) {
        advice =
            ": write Device(0) or Host(); ints and strings are refused, because host and device "
            "are easily confused in them";
    } else if (PyList_Check(value) || PyTuple_Check(value) || PyAnySet_Check(value)) {
        advice = ": pass one location, not several";
    }
    return MM_ERROR(PyExc_TypeError, "a location must be a Device or Host, got %R%s", value,
                    advice);
}

static int
read_library_location(mm_state *state, PyObject *value, CUmemLocation *out)
{
    size_t row = 0, count = sizeof libraries / sizeof *libraries;
    PyObject *modules = NULL;
    int found = 0;

    while (row < count && !mm_matches_class(state, value, libraries[row].class, &modules)) {
        row++;
    }
    Py_XDECREF(modules);
    if (row < count) {
        found = libraries[row].read(state, value, out);
    }
    assert((found < 0) == (PyErr_Occurred() != NULL));
    return found == 0 ? refuse_location(value) : found < 0 ? -1 : 0;
}

/* --- arguments -------------------------------------------------------------------------- */

int
mm_read_location(mm_state *state, PyObject *value, CUmemLocation *out)
{
    assert(!PyErr_Occurred());
    if (value != NULL
        && (Py_TYPE(value) == state->device_type || Py_TYPE(value) == state->host_type)) {
        *out = mm_location_of(value);
        return 0;
    }
    if (value == NULL || value == Py_None) {
        return MM_ERROR(PyExc_ValueError, "location is required: a Device or Host");
    }
    if (PyLong_Check(value) || PyUnicode_Check(value)) {
        return refuse_location(value);
    }
    return read_library_location(state, value, out);
}

int
mm_read_location_id(mm_state *state, PyObject *value, bool device, CUmemLocation *out)
{
    int rc = mm_read_location(state, value, out);

    if (rc < 0 && !PyErr_ExceptionMatches(PyExc_TypeError)) {
        return -1;
    }
    if (rc == 0 && (out->type == CU_MEM_LOCATION_TYPE_DEVICE) == device) {
        return 0;
    }
    PyErr_Clear(); /* TypeError: its message is about location arguments */
    return MM_ERROR(PyExc_ValueError,
                    device
                        ? "device_id must be an int or a device, got %R: pass 0 or a torch.device"
                        : "numa_id must be an int or a host, got %R",
                    value);
}

int
mm_read_device(mm_state *state, PyObject *value, int *ordinal)
{
    CUmemLocation location = mm_host(); /* for None */
    long long number;
    int rc = 0;

    if (PyLong_Check(value) && !PyBool_Check(value)) {
        rc = mm_read_index(value, "a device", PyExc_TypeError, &number);
        rc = rc < 0 ? -1 : mm_device_location(state, number, &location);
    } else if (value != Py_None) {
        rc = mm_read_location(state, value, &location);
    }
    if (rc < 0 && !PyErr_ExceptionMatches(PyExc_TypeError)) {
        return -1;
    }
    if (rc < 0 || location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
        PyErr_Clear(); /* TypeError: its message refuses ints, which are valid here */
        return MM_ERROR(PyExc_TypeError,
                        "a Device or its ordinal is needed, got %R: pass 0, Device(0) or a "
                        "torch.device",
                        value);
    }
    assert(location.id >= 0);
    *ordinal = location.id;
    return 0;
}
