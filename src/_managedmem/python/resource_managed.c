/* resource_managed.c: the type ManagedMemoryResource. It allocates with cuMemAllocManaged unless a
 * pool is requested, because drivers refuse all advice on pool memory. */
#include "foreign_location.h"
#include "location_object.h"
#include "resource.h"

static PyObject *
managed_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    enum { POOLED, PREFERRED, ARGC };
    static const char *const names[ARGC] = {
        [POOLED] = "pooled", [PREFERRED] = "preferred_location"};
    static const mm_parameters parameters = {
        .function = "ManagedMemoryResource", .names = names, .total = ARGC};
    CUmemLocation where = mm_location(CU_MEM_LOCATION_TYPE_NONE, 0);
    PyObject *argv[ARGC];

    if (mm_args_new(&parameters, args, kwargs, argv) < 0) {
        return NULL;
    }
    if (argv[POOLED] != NULL && !PyBool_Check(argv[POOLED])) {
        PyErr_Format(PyExc_TypeError, "pooled must be True or False, got %R", argv[POOLED]);
        return NULL;
    }
    if (argv[PREFERRED] != NULL && argv[PREFERRED] != Py_None) {
        if (argv[POOLED] != Py_True) {
            PyErr_SetString(PyExc_ValueError,
                            "preferred_location needs pooled=True; without a pool set it on each "
                            "buffer: buf.preferred_location = ...");
            return NULL;
        }
        if (mm_read_location(mm_type_state(type), argv[PREFERRED], &where) < 0) {
            return NULL;
        }
    }
    return mm_resource_new(type, argv[POOLED] == Py_True, true, where);
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
    "Without a pool it uses cuMemAllocManaged, so every advice works on its memory, and creating it\n"
    "opens no driver. pooled=True creates a driver pool (CUDA 13.0 or newer, else\n"
    "NotImplementedError): allocating and freeing cost microseconds and follow the order of a stream,\n"
    "but drivers refuse all advice on pool memory. Its location is set once, with\n"
    "preferred_location, a Device or Host. The pool keeps freed memory until trim(), or until\n"
    "attributes.release_threshold is lowered.\n"
    "\n"
    "Raises ValueError for preferred_location without pooled. Safe from every thread.\n"
    "Driver: cuMemPoolCreate.");

static PyGetSetDef managed_getset[] = {
    {"is_host_accessible", mm_resource_get_true, NULL, "True: the host can use the memory.", NULL},
    {"is_device_accessible", mm_resource_get_true, NULL, "True: every device can use the memory.",
     NULL},
    {"is_managed", mm_resource_get_true, NULL, "True: the memory is managed.", NULL},
    {"supports_advice", managed_get_supports_advice, NULL,
     "True if advice works on the memory; False for a pool.", NULL},
    {"preferred_location", managed_get_preferred_location, NULL,
     "Where the pool's memory should live: a Device, a Host, or None.", NULL},
    {"device_id", managed_get_device_id, NULL,
     "The preferred device; without one the calling thread's current device, on which allocations\n"
     "are accounted.",
     NULL},
    MM_RESOURCE_GETSET,
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
mm_managed_resource_init(PyObject *module, mm_state *state)
{
    return mm_add_type(module, &managed_spec, &state->managed_resource_type);
}
