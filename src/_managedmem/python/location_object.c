/* location_object.c: what Host and Device have in common, and reading locations of other libraries. */
#include "location_object.h"

#include "foreign_class.h"

PyMemberDef mm_location_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(mm_location_object, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

void
mm_location_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    PyObject_ClearWeakRefs(self);
    mm_free_object(self);
}

PyObject *
mm_new_location(PyTypeObject *type, CUmemLocation where)
{
    PyObject *self = mm_alloc_object(type);

    if (self != NULL) {
        ((mm_location_object *)self)->where = where;
    }
    return self;
}

PyObject *
mm_location_object_new(mm_state *state, CUmemLocation where)
{
    switch ((int)where.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        return mm_device_object(state, where.id);
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
        return mm_host_object(state, where);
    default:
        Py_RETURN_NONE;
    }
}

PyObject *
mm_location_frozenset(mm_state *state, mm_location_set set)
{
    PyObject *members = PyFrozenSet_New(NULL);
    CUmemLocation where;

    while (members != NULL && mm_next_location(&set, &where)) {
        PyObject *member = mm_location_object_new(state, where);
        if (member == NULL || PySet_Add(members, member) < 0) {
            Py_CLEAR(members);
        }
        Py_XDECREF(member);
    }
    return members;
}

/* Reads an int attribute of somebody else's device. 1 found, 0 not there or None, -1 error. */
static int
int_attribute(PyObject *value, const char *name, long long *out)
{
    PyObject *attribute;
    int found = mm_get_optional(value, name, &attribute);

    if (found <= 0) {
        return found;
    }
    if (attribute == Py_None) {
        Py_DECREF(attribute);
        return 0;
    }
    found = mm_read_index(attribute, name, PyExc_TypeError, out) < 0 ? -1 : 1;
    Py_DECREF(attribute);
    return found;
}

static int
no_location(PyObject *value)
{
    PyErr_Format(PyExc_TypeError,
                 "a location must be a Device or Host, got %R; ints and strings are refused, "
                 "because -1 and 0 are how host and device get confused",
                 value);
    return -1;
}

int
mm_device_location(mm_state *state, long long ordinal, CUmemLocation *out)
{
    mm_driver *cu = mm_open(state);

    if (cu == NULL) {
        return -1;
    }
    if (ordinal < 0 || ordinal >= cu->device_count) {
        PyErr_Format(PyExc_ValueError, "there is no device %lld: this system has %d device%s",
                     ordinal, cu->device_count, cu->device_count == 1 ? "" : "s");
        return -1;
    }
    *out = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, (int)ordinal);
    return 0;
}

typedef enum { ELSEWHERE, ON_HOST, ON_DEVICE } place;

/* Reads the attribute in which a library says what kind of device this is; -1 with an exception. */
static int
read_place(PyObject *value, const char *attribute, place *out)
{
    PyObject *kind;
    int found = mm_get_optional(value, attribute, &kind);

    *out = ELSEWHERE;
    if (found <= 0) {
        return found;
    }
    if (PyUnicode_Check(kind)) {
        if (PyUnicode_CompareWithASCIIString(kind, "cpu") == 0) {
            *out = ON_HOST;
        } else if (PyUnicode_CompareWithASCIIString(kind, "cuda") == 0
                   || PyUnicode_CompareWithASCIIString(kind, "gpu") == 0) {
            *out = ON_DEVICE;
        }
    }
    Py_DECREF(kind);
    return 0;
}

/* The calling thread's current device; -1 with an exception. */
static int
current_ordinal(mm_state *state, long long *ordinal)
{
    mm_driver *cu = mm_open(state);
    mm_status st;
    int current;

    if (cu == NULL) {
        return -1;
    }
    if (mm_current_device(cu, &current, &st) < 0) {
        (void)mm_raise(state, &st);
        return -1;
    }
    *ordinal = current;
    return 0;
}

/* torch.device: type "cuda" with an index or None for the current one, or "cpu". */
static int
torch_location(mm_state *state, PyObject *value, CUmemLocation *out)
{
    long long ordinal;
    place where;
    int found;

    if (read_place(value, "type", &where) < 0) {
        return -1;
    }
    if (where == ON_HOST) {
        *out = mm_host();
        return 0;
    }
    if (where != ON_DEVICE) {
        return no_location(value);
    }
    found = int_attribute(value, "index", &ordinal);
    if (found < 0 || (found == 0 && current_ordinal(state, &ordinal) < 0)) {
        return -1;
    }
    return mm_device_location(state, ordinal, out);
}

/* A jax.Device counts the devices of all processes; local_hardware_id is the one of this process,
 * as the driver numbers it. */
static int
jax_location(mm_state *state, PyObject *value, CUmemLocation *out)
{
    long long ordinal;
    place where;
    int found;

    if (read_place(value, "platform", &where) < 0) {
        return -1;
    }
    if (where == ON_HOST) {
        *out = mm_host();
        return 0;
    }
    found = where == ON_DEVICE ? int_attribute(value, "local_hardware_id", &ordinal) : 0;
    if (found <= 0) {
        return found < 0 ? -1 : no_location(value);
    }
    return mm_device_location(state, ordinal, out);
}

/* numba gives its current device out as a weak proxy, whose own type tells nothing. */
static int
is_numba_proxy(mm_state *state, PyObject *value)
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
    return answer;
}

/* A device of CuPy or numba: its ordinal is its id. */
static int
numbered_location(mm_state *state, PyObject *value, CUmemLocation *out)
{
    long long ordinal;
    int found = int_attribute(value, "id", &ordinal);

    if (found <= 0) {
        return found < 0 ? -1 : no_location(value);
    }
    return mm_device_location(state, ordinal, out);
}

/* CUdevice of cuda.bindings: an object that is the ordinal. */
static int
bindings_location(mm_state *state, PyObject *value, CUmemLocation *out)
{
    PyObject *number = PyNumber_Long(value);
    long long ordinal;
    int rc = number ? mm_read_index(number, "a CUdevice", PyExc_TypeError, &ordinal) : -1;

    Py_XDECREF(number);
    return rc < 0 ? -1 : mm_device_location(state, ordinal, out);
}

/* cuda.core: Device has device_id; Host has numa_id and is_numa_current. */
static int
cuda_core_location(mm_state *state, PyObject *value, CUmemLocation *out)
{
    PyObject *current;
    long long id = 0;
    int found = int_attribute(value, "device_id", &id);

    if (found != 0) {
        return found < 0 ? -1 : mm_device_location(state, id, out);
    }
    found = mm_get_optional(value, "is_numa_current", &current);
    if (found <= 0) {
        return found < 0 ? -1 : no_location(value);
    }
    found = PyObject_IsTrue(current);
    Py_DECREF(current);
    if (found != 0) {
        *out = mm_location(CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT, 0);
        return found < 0 ? -1 : 0;
    }
    found = int_attribute(value, "numa_id", &id);
    if (found > 0 && (id < 0 || id > INT_MAX)) {
        PyErr_Format(PyExc_ValueError, "%R has a numa_id that is not a NUMA node: %lld", value,
                     id);
        return -1;
    }
    *out = found > 0 ? mm_location(CU_MEM_LOCATION_TYPE_HOST_NUMA, (int)id) : mm_host();
    return found < 0 ? -1 : 0;
}

int
mm_read_location(mm_state *state, PyObject *value, CUmemLocation *out)
{
    int proxy;

    if (value != NULL
        && (Py_TYPE(value) == state->device_type || Py_TYPE(value) == state->host_type)) {
        *out = ((mm_location_object *)value)->where;
        return 0;
    }
    if (value == NULL || value == Py_None) {
        PyErr_SetString(PyExc_ValueError, "location is required: a Device or Host");
        return -1;
    }
    if (PyLong_Check(value) || PyUnicode_Check(value)) {
        return no_location(value);
    }
    if (mm_is_from(state, value, "torch")) {
        return torch_location(state, value, out);
    }
    if (mm_is_from(state, value, "cuda")) {
        return mm_is_instance(state, value, "cuda", "CUdevice")
                   ? bindings_location(state, value, out)
                   : cuda_core_location(state, value, out);
    }
    if (mm_is_from(state, value, "cupy") || mm_is_from(state, value, "numba")) {
        return numbered_location(state, value, out);
    }
    if (mm_is_from(state, value, "jaxlib")) {
        return jax_location(state, value, out);
    }
    proxy = is_numba_proxy(state, value);
    if (proxy != 0) {
        return proxy < 0 ? -1 : numbered_location(state, value, out);
    }
    return no_location(value);
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
    PyErr_Format(PyExc_ValueError, "%s, got %R",
                 device ? "device_id must be an int or a device"
                        : "numa_id must be an int or a host",
                 value);
    return -1;
}

int
mm_read_accessed_by_member(mm_state *state, PyObject *value, CUmemLocation *out)
{
    if (mm_read_location(state, value, out) < 0) {
        return -1;
    }
    if (mm_is_numa_host(*out)) {
        PyErr_Format(PyExc_ValueError,
                     "%R cannot be in accessed_by: the driver takes devices and Host(), but no "
                     "NUMA host",
                     value);
        return -1;
    }
    return 0;
}

int
mm_read_device(mm_state *state, PyObject *value, int *ordinal)
{
    CUmemLocation where;
    long long number;
    int rc;

    if (PyLong_Check(value) && !PyBool_Check(value)) {
        rc = mm_read_index(value, "a device", PyExc_TypeError, &number) < 0
                 ? -1
                 : mm_device_location(state, number, &where);
    } else if (value == Py_None) {
        where = mm_host();
        rc = 0;
    } else {
        rc = mm_read_location(state, value, &where);
    }
    if (rc < 0 && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear(); /* TypeError: no location at all, of which it says that ints are refused */
        where = mm_host();
    } else if (rc < 0) {
        return -1;
    }
    if (where.type != CU_MEM_LOCATION_TYPE_DEVICE) {
        PyErr_Format(PyExc_TypeError, "a Device or the ordinal of one is needed, got %R", value);
        return -1;
    }
    *ordinal = where.id;
    return 0;
}
