/* resource_managed.c: the type ManagedMemoryResource. It draws from cuMemAllocManaged unless a pool
 * is asked for, because drivers refuse all advice on pool memory. */
#include "foreign_location.h"
#include "location_object.h"
#include "resource.h"

static PyObject *
managed_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"pooled", "preferred_location"};
    static const mm_parameters parameters = {"ManagedMemoryResource", names, 0, 0, 2};
    CUmemLocation where = mm_location(CU_MEM_LOCATION_TYPE_NONE, 0);
    PyObject *given[2];

    if (mm_args_new(&parameters, args, kwargs, given) < 0) {
        return NULL;
    }
    if (given[0] != NULL && !PyBool_Check(given[0])) {
        PyErr_Format(PyExc_TypeError, "pooled must be True or False, got %R", given[0]);
        return NULL;
    }
    if (given[1] != NULL && given[1] != Py_None) {
        if (given[0] != Py_True) {
            PyErr_SetString(PyExc_ValueError,
                            "preferred_location needs pooled=True; without a pool set it on each "
                            "buffer: buf.preferred_location = ...");
            return NULL;
        }
        if (mm_read_location(mm_type_state(type), given[1], &where) < 0) {
            return NULL;
        }
    }
    return mm_resource_new(type, given[0] == Py_True, true, where);
}

static PyObject *
managed_get_true(PyObject *Py_UNUSED(op), void *Py_UNUSED(closure))
{
    Py_RETURN_TRUE;
}

static PyObject *
managed_get_supports_advice(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(!mm_resource_of(op)->pooled);
}

static PyObject *
managed_get_preferred_location(PyObject *op, void *Py_UNUSED(closure))
{
    return mm_location_object_new(mm_type_state(Py_TYPE(op)), mm_resource_of(op)->where);
}

static PyObject *
managed_get_device_id(PyObject *op, void *Py_UNUSED(closure))
{
    mm_state *state = mm_type_state(Py_TYPE(op));
    CUmemLocation where = mm_resource_of(op)->where;
    mm_driver *cu;
    mm_status st;
    int device;

    if (where.type == CU_MEM_LOCATION_TYPE_DEVICE) {
        return PyLong_FromLong(where.id);
    }
    cu = mm_open(state);
    if (cu == NULL) {
        return NULL;
    }
    return mm_current_device(cu, &device, &st) < 0 ? mm_raise(state, &st)
                                                   : PyLong_FromLong(device);
}

static PyObject *
managed_repr(PyObject *op)
{
    CUmemLocation where = mm_resource_of(op)->where;
    char text[MM_LOCATION_TEXT];

    if (!mm_resource_of(op)->pooled) {
        return PyUnicode_FromString("ManagedMemoryResource()");
    }
    if (where.type == CU_MEM_LOCATION_TYPE_NONE) {
        return PyUnicode_FromString("ManagedMemoryResource(pooled=True)");
    }
    return PyUnicode_FromFormat("ManagedMemoryResource(pooled=True, preferred_location=%s)",
                                mm_location_text(where, text));
}

PyDoc_STRVAR(
    managed_doc,
    "ManagedMemoryResource(*, pooled=False, preferred_location=None)\n"
    "--\n"
    "\n"
    "Allocates managed memory, each buffer on pages of its own.\n"
    "\n"
    "Without a pool it uses cuMemAllocManaged, so every advice works on what it gives; making one\n"
    "opens no driver. pooled=True makes a driver pool of its own (CUDA 13.0 or newer, else\n"
    "NotImplementedError): allocating and freeing cost microseconds and follow the order of a stream,\n"
    "but drivers refuse all advice on pool memory, so where it should live is said once, with\n"
    "preferred_location, a Device or Host. The pool keeps what is freed until trim(), or until\n"
    "attributes.release_threshold is lowered.\n"
    "\n"
    "Raises ValueError for preferred_location without pooled. Safe from every thread.\n"
    "Driver: cuMemPoolCreate.");

static PyGetSetDef managed_getset[] = {
    {"is_host_accessible", managed_get_true, NULL, "True: the host can use the memory.", NULL},
    {"is_device_accessible", managed_get_true, NULL, "True: every device can use the memory.",
     NULL},
    {"is_managed", managed_get_true, NULL, "True: the memory is managed.", NULL},
    {"supports_advice", managed_get_supports_advice, NULL,
     "Whether advice works on the memory: True, or False for a pool.", NULL},
    {"preferred_location", managed_get_preferred_location, NULL,
     "Where the pool's memory should live: a Device, a Host, or None.", NULL},
    {"device_id", managed_get_device_id, NULL,
     "The preferred device; without one the calling thread's current device, on which allocations\n"
     "are accounted.",
     NULL},
    {"attributes", mm_resource_get_attributes, NULL, mm_resource_attributes_doc, NULL},
    {"is_closed", mm_resource_get_is_closed, NULL, mm_resource_is_closed_doc, NULL},
    {"handle", mm_resource_get_handle, NULL, mm_resource_handle_doc, NULL},
    {"is_handle_owned", mm_resource_get_is_handle_owned, NULL, mm_resource_is_handle_owned_doc,
     NULL},
    {"is_ipc_enabled", mm_resource_get_false, NULL, mm_resource_is_ipc_enabled_doc, NULL},
    {"is_mapped", mm_resource_get_false, NULL, mm_resource_is_mapped_doc, NULL},
    {"uuid", mm_resource_get_none, NULL, mm_resource_uuid_doc, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot managed_slots[] = {
    {Py_tp_doc, (void *)managed_doc},
    {Py_tp_new, managed_new},
    {Py_tp_traverse, mm_traverse_type},
    {Py_tp_dealloc, mm_resource_dealloc},
    {Py_tp_repr, managed_repr},
    {Py_tp_methods, mm_resource_methods},
    {Py_tp_members, mm_resource_members},
    {Py_tp_getset, managed_getset},
    {0, NULL},
};

static PyType_Spec managed_spec = {
    .name = "managedmem.ManagedMemoryResource",
    .basicsize = sizeof(mm_resource),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = managed_slots,
};

int
mm_resource_init(PyObject *module, mm_state *state)
{
    return mm_add_type(module, &managed_spec, &state->managed_resource_type);
}
