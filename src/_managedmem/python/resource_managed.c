/* resource_managed.c: the type ManagedMemoryResource. It allocates with cuMemAllocManaged unless a
 * pool is requested, because drivers refuse all advice on pool memory. */
#include "foreign_location.h"
#include "location_object.h"
#include "resource.h"

enum { POOLED, PREFERRED, POLICY, ARGC };

static bool
is_given(PyObject *argument)
{
    return argument != NULL && argument != Py_None;
}

/* Reads the default policy of a resource, which can be given as a preferred location alone. */
static int
read_default_policy(mm_state *state, PyObject *const argv[ARGC], mm_policy *policy)
{
    const mm_policy *given;

    if (mm_read_policy(state, argv[POLICY], &given) < 0) {
        return -1;
    }
    if (given == NULL) {
        return is_given(argv[PREFERRED])
                   ? mm_read_location(state, argv[PREFERRED], &policy->preferred)
                   : 0;
    }
    if (argv[POOLED] == Py_True || is_given(argv[PREFERRED])) {
        PyErr_SetString(PyExc_ValueError,
                        argv[POOLED] == Py_True
                            ? "policy needs pooled=False, because drivers refuse all advice on "
                              "the memory of a pool: give preferred_location instead"
                            : "give policy or preferred_location, not both: a policy has a "
                              "preferred location of its own");
        return -1;
    }
    *policy = *given;
    return 0;
}

PyDoc_STRVAR(
    managed_doc,
    "ManagedMemoryResource(*, pooled=False, preferred_location=None, policy=None)\n"
    "--\n"
    "\n"
    "Allocates managed memory, each buffer on pages of its own.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "pooled : bool\n"
    "    True creates a driver pool. NotImplementedError before CUDA 13.0, and where a device has no\n"
    "    concurrent_managed_access.\n"
    "preferred_location : Device or Host, optional\n"
    "    Where the memory should live. Without a pool it is short for\n"
    "    policy=MigrationPolicy.prefer(...).\n"
    "policy : MigrationPolicy, optional\n"
    "    The advice of each allocation that has no policy of its own; not with a pool.\n"
    "\n"
    "Without a pool it uses cuMemAllocManaged, so every advice works on its memory, and creating it\n"
    "opens no driver. Each buffer, also a copy of a buffer, is advised when it is allocated, and\n"
    "its advice can be changed later.\n"
    "\n"
    "With a pool, allocating and freeing cost microseconds and follow the order of a stream, but drivers\n"
    "refuse all advice on pool memory: its location is set once. The pool keeps freed memory until\n"
    "trim(), or until attributes.release_threshold is lowered.\n"
    "\n"
    "Where a device has no concurrent_managed_access, a UserWarning is issued once in a process:\n"
    "at the first allocation, or earlier, when a resource is made after the driver was opened.\n"
    "\n"
    "Raises TypeError for bad arguments, ValueError for a policy with a pool or a preferred location.\n"
    "Safe from every thread. Driver: cuMemPoolCreate.");

static PyObject *
managed_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static mm_signature signature = {.doc = managed_doc};
    mm_policy policy = {0};
    PyObject *argv[ARGC], *self;

    if (mm_signature_args_new(&signature, args, kwargs, argv) < 0) {
        return NULL;
    }
    if (argv[POOLED] != NULL && !PyBool_Check(argv[POOLED])) {
        PyErr_Format(PyExc_TypeError, "pooled must be True or False, got %R", argv[POOLED]);
        return NULL;
    }
    if (read_default_policy(mm_type_state(type), argv, &policy) < 0) {
        return NULL;
    }
    self = mm_resource_new(type, argv[POOLED] == Py_True, true, policy.preferred, 0);
    if (self != NULL && argv[POOLED] != Py_True) {
        mm_resource_of(self)->policy = policy;
        mm_resource_of(self)->has_policy = is_given(argv[POLICY]) || is_given(argv[PREFERRED]);
    }
    return self;
}

static PyObject *
managed_get_supports_advice(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(!mm_resource_of(op)->pooled);
}

static PyObject *
managed_get_preferred_location(PyObject *op, void *Py_UNUSED(closure))
{
    return mm_location_object_new(mm_type_state(Py_TYPE(op)), mm_resource_of(op)->location);
}

static PyObject *
managed_get_device_id(PyObject *op, void *Py_UNUSED(closure))
{
    mm_state *state = mm_type_state(Py_TYPE(op));
    CUmemLocation location = mm_resource_of(op)->location;
    mm_driver *cu;
    mm_status st;
    int device;

    if (location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
        return PyLong_FromLong(location.id);
    }
    cu = mm_open(state);
    if (cu == NULL) {
        return NULL;
    }
    return mm_current_device(cu, &device, &st) < 0 ? mm_raise(state, &st)
                                                   : PyLong_FromLong(device);
}

static PyObject *
managed_get_policy(PyObject *op, void *Py_UNUSED(closure))
{
    mm_resource *r = mm_resource_of(op);

    return r->has_policy ? mm_policy_object_new(mm_type_state(Py_TYPE(op)), &r->policy)
                         : Py_NewRef(Py_None);
}

static PyObject *
repr_with_policy(PyObject *op)
{
    PyObject *policy = managed_get_policy(op, NULL);
    PyObject *text =
        policy ? PyUnicode_FromFormat("ManagedMemoryResource(policy=%R)", policy) : NULL;

    Py_XDECREF(policy);
    return text;
}

static PyObject *
managed_repr(PyObject *op)
{
    mm_resource *r = mm_resource_of(op);
    mm_policy preferred = {.preferred = r->location};
    bool nowhere = r->location.type == CU_MEM_LOCATION_TYPE_NONE;
    char text[MM_LOCATION_TEXT];

    if (r->has_policy && (nowhere || !mm_same_policy(&r->policy, &preferred))) {
        return repr_with_policy(op);
    }
    if (nowhere) {
        return PyUnicode_FromString(r->pooled ? "ManagedMemoryResource(pooled=True)"
                                              : "ManagedMemoryResource()");
    }
    return PyUnicode_FromFormat("ManagedMemoryResource(%spreferred_location=%s)",
                                r->pooled ? "pooled=True, " : "",
                                mm_location_text(r->location, text));
}

static PyGetSetDef managed_getset[] = {
    {"is_host_accessible", mm_resource_get_true, NULL, "True: the host can use the memory.", NULL},
    {"is_device_accessible", mm_resource_get_true, NULL, "True: every device can use the memory.",
     NULL},
    {"is_managed", mm_resource_get_true, NULL, "True: the memory is managed.", NULL},
    {"supports_advice", managed_get_supports_advice, NULL,
     "True if advice works on the memory; False for a pool.", NULL},
    {"preferred_location", managed_get_preferred_location, NULL,
     "Where the memory should live: a Device, a Host, or None.", NULL},
    {"policy", managed_get_policy, NULL,
     "The MigrationPolicy of allocations without one of their own; None if unset, and for a pool.",
     NULL},
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
