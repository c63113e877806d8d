/* location_host.c: the type Host: the host's memory as a whole, one NUMA node of it, or the node
 * of the calling thread. Hosts are interned and do not need a driver. */
#include "foreign_location.h"
#include "location_object.h"

/* The host for a numa_id that is not None: a node number, or a host of any library. */
static PyObject *
host_from_id(mm_state *state, PyObject *numa_id)
{
    CUmemLocation location;
    PyObject *known;
    long long node;

    assert(numa_id != NULL && numa_id != Py_None);
    /* The table keeps every node that was requested, by its number. */
    if (PyLong_CheckExact(numa_id)
        && (known = PyDict_GetItemWithError(state->numa_hosts, numa_id)) != NULL) {
        return Py_NewRef(known);
    }
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (!PyIndex_Check(numa_id)) {
        return mm_read_location_id(state, numa_id, false, &location) < 0
                   ? NULL
                   : mm_location_object_new(state, location);
    }
    if (mm_read_index(numa_id, "numa_id", PyExc_ValueError, &node) < 0) {
        return NULL;
    }
    if (node < 0 || node > INT_MAX) {
        return PyErr_Format(PyExc_ValueError, "numa_id must be the number of a NUMA node, got %R",
                            numa_id);
    }
    return mm_location_object_new(state, mm_location(CU_MEM_LOCATION_TYPE_HOST_NUMA, (int)node));
}

PyDoc_STRVAR(
    host_doc,
    "Host(numa_id=None, *, is_numa_current=False)\n--\n\n"
    "The host as a location of managed memory.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "numa_id : int, or a host of any library, optional\n"
    "    One NUMA node of the host; or a Host, a Host of cuda.core, or torch.device(\"cpu\"). None: the\n"
    "    host as a whole.\n"
    "is_numa_current : bool\n"
    "    True: the node of the thread that uses the location in a call, as Host.numa_current().\n"
    "\n"
    "Hosts are immutable, hashable and interned: Host(1) is Host(1). They need no driver.\n"
    "\n"
    "Raises ValueError for a numa_id that is negative, a bool, neither an int nor a host, or given\n"
    "together with is_numa_current. Safe from every thread. Driver: CUmemLocation of type HOST,\n"
    "HOST_NUMA or HOST_NUMA_CURRENT.");

static PyObject *
host_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    enum { NUMA_ID, IS_NUMA_CURRENT, ARGC };
    static mm_signature signature = {.doc = host_doc};
    mm_state *state = mm_type_state(type);
    PyObject *argv[ARGC];
    int current = 0;

    if (mm_signature_args_new(&signature, args, kwargs, argv) < 0) {
        return NULL;
    }
    if (argv[IS_NUMA_CURRENT] != NULL && (current = PyObject_IsTrue(argv[IS_NUMA_CURRENT])) < 0) {
        return NULL;
    }
    if (argv[NUMA_ID] == NULL || argv[NUMA_ID] == Py_None) {
        return Py_NewRef(current ? state->current_numa_host : state->any_host);
    }
    if (current) {
        return PyErr_Format(PyExc_ValueError,
                            "numa_id=%R and is_numa_current=True exclude each other",
                            argv[NUMA_ID]);
    }
    return host_from_id(state, argv[NUMA_ID]);
}

PyDoc_STRVAR(host_numa_current_doc,
             "numa_current()\n--\n\n"
             "The NUMA node of the thread that uses the location in a call.\n"
             "\n"
             "The driver replaces it with a node when a call uses it, so advice with it may read\n"
             "back as that node or as Host().");

static PyObject *
host_numa_current(PyObject *type, PyObject *Py_UNUSED(none))
{
    return Py_NewRef(mm_type_state((PyTypeObject *)type)->current_numa_host);
}

PyDoc_STRVAR(host_reduce_doc,
             "__reduce__($self, /)\n--\n\nPickling and copying return the interned object.");

static PyObject *
host_reduce(PyObject *op, PyObject *Py_UNUSED(none))
{
    CUmemLocation location = mm_location_of(op);

    if (location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT) {
        PyObject *make = PyObject_GetAttrString((PyObject *)Py_TYPE(op), "numa_current");
        return make ? Py_BuildValue("(N())", make) : NULL;
    }
    if (location.type == CU_MEM_LOCATION_TYPE_HOST) {
        return Py_BuildValue("(O())", Py_TYPE(op));
    }
    assert(location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA);
    return Py_BuildValue("(O(i))", Py_TYPE(op), location.id);
}

static PyObject *
host_get_numa_id(PyObject *op, void *Py_UNUSED(closure))
{
    CUmemLocation location = mm_location_of(op);

    if (location.type != CU_MEM_LOCATION_TYPE_HOST_NUMA) {
        Py_RETURN_NONE;
    }
    return PyLong_FromLong(location.id);
}

static PyObject *
host_get_is_numa_current(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(mm_location_of(op).type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT);
}

static PyMethodDef host_methods[] = {
    {"numa_current", host_numa_current, METH_NOARGS | METH_CLASS, host_numa_current_doc},
    {"__reduce__", host_reduce, METH_NOARGS, host_reduce_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef host_getset[] = {
    {"numa_id", host_get_numa_id, NULL, "The NUMA node as an int, or None.", NULL},
    {"is_numa_current", host_get_is_numa_current, NULL,
     "True if this stands for the calling thread's NUMA node.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot host_slots[] = {
    {Py_tp_doc, (void *)host_doc},
    {Py_tp_new, host_new},
    {Py_tp_traverse, mm_traverse_type},
    {Py_tp_dealloc, mm_dealloc_value},
    {Py_tp_repr, mm_location_repr},
    {Py_tp_methods, host_methods},
    {Py_tp_getset, host_getset},
    {Py_tp_members, mm_location_members},
    {0, NULL},
};

int
mm_host_init(PyObject *module, mm_state *state)
{
    if (mm_add_final_type(module, "managedmem.Host", sizeof(mm_location_object), 0, host_slots,
                          &state->host_type)
        < 0) {
        return -1;
    }
    state->numa_hosts = PyDict_New();
    state->any_host = mm_new_location(state->host_type, mm_host());
    state->current_numa_host =
        mm_new_location(state->host_type, mm_location(CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT, 0));
    return state->numa_hosts && state->any_host && state->current_numa_host ? 0 : -1;
}
