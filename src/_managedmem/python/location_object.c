/* location_object.c: the common base of Host and Device: making, interning and printing them. */
#include "location_object.h"

#include "../driver/context.h"

PyMemberDef mm_location_members[] = MM_WEAK_MEMBERS(mm_location_object);

PyObject *
mm_new_location(PyTypeObject *type, CUmemLocation location)
{
    PyObject *self = mm_alloc_object(type);

    assert(location.type != CU_MEM_LOCATION_TYPE_INVALID && location.id >= 0);
    if (self != NULL) {
        ((mm_location_object *)self)->location = location;
    }
    return self;
}

/* The table has one object for each id, and never loses one, so a reference that is borrowed from
 * the table stays valid. */
static PyObject *
intern_location(PyObject *table, PyTypeObject *type, CUmemLocation location)
{
    PyObject *key = PyLong_FromLong(location.id), *interned, *fresh;

    if (key == NULL) {
        return NULL;
    }
    interned = Py_XNewRef(PyDict_GetItemWithError(table, key));
    if (interned == NULL && !PyErr_Occurred()) {
        fresh = mm_new_location(type, location);
        /* If another thread was faster, setdefault returns that thread's object. */
        interned = fresh ? PyObject_CallMethod(table, "setdefault", "OO", key, fresh) : NULL;
        Py_XDECREF(fresh);
    }
    Py_DECREF(key);
    assert(interned == NULL || mm_same_location(mm_location_of(interned), location));
    return interned;
}

PyObject *
mm_location_repr(PyObject *op)
{
    char text[MM_LOCATION_TEXT];

    return PyUnicode_FromString(mm_location_text(mm_location_of(op), text));
}

PyObject *
mm_location_object_new(mm_state *state, CUmemLocation location)
{
    assert(!PyErr_Occurred());
    switch ((int)location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        return intern_location(state->devices, state->device_type, location);
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
        return intern_location(state->numa_hosts, state->host_type, location);
    case CU_MEM_LOCATION_TYPE_HOST:
        return Py_NewRef(state->any_host);
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
        return Py_NewRef(state->current_numa_host);
    default:
        Py_RETURN_NONE;
    }
}

PyObject *
mm_location_frozenset(mm_state *state, mm_location_set set)
{
    PyObject *members = PyFrozenSet_New(NULL);
    CUmemLocation location;

    while (members != NULL && mm_next_location(&set, &location)) {
        PyObject *member = mm_location_object_new(state, location);
        if (member == NULL || PySet_Add(members, member) < 0) {
            Py_CLEAR(members);
        }
        Py_XDECREF(member);
    }
    return members;
}

int
mm_device_location(mm_state *state, long long ordinal, CUmemLocation *out)
{
    mm_driver *cu = mm_open(state);

    if (cu == NULL) {
        return -1;
    }
    if (ordinal < 0 || ordinal >= cu->device_count) {
        return MM_ERROR(PyExc_ValueError, "there is no device %lld: this system has %d device%s",
                        ordinal, cu->device_count, cu->device_count == 1 ? "" : "s");
    }
    *out = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, (int)ordinal);
    return 0;
}

int
mm_current_device_location(mm_state *state, CUmemLocation *out)
{
    mm_driver *cu = mm_open(state);
    mm_status st;
    int ordinal;

    if (cu == NULL) {
        return -1;
    }
    if (mm_current_device(cu, &ordinal, &st) < 0) {
        return mm_raise_failure(state, -1, &st);
    }
    assert(ordinal >= 0 && ordinal < cu->device_count);
    *out = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, ordinal);
    return 0;
}
