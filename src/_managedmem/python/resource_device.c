/* resource_device.c: the type DeviceMemoryResource: a pool of a device's own memory. */
#include "foreign_location.h"
#include "resource.h"

PyDoc_STRVAR(
    device_resource_doc,
    "DeviceMemoryResource(device, options=None)\n"
    "--\n"
    "\n"
    "Allocates plain memory of a device, from a driver pool of its own.\n"
    "\n"
    "device is a Device, a device object of another library, or an ordinal. The buffers do not migrate:\n"
    "prefetch, discard and advice raise ValueError, and the host reads them only with copy_to().\n"
    "Allocating and freeing follow the order of a stream. Without a stream, allocations, frees, copies\n"
    "and fills use the default stream of this device, even if another device is current. Other devices\n"
    "can access the memory once they are in peer_accessible_by. The pool keeps freed memory until\n"
    "trim(), or until attributes.release_threshold is lowered.\n"
    "\n"
    "options is a dict, or an object with attributes, such as cuda.core's\n"
    "DeviceMemoryResourceOptions. max_size is the bytes that the pool may take, which the driver\n"
    "rounds up; 0 is no limit. Allocations beyond the limit raise CUDAOutOfMemoryError.\n"
    "ipc_enabled must be False (else IPCNotSupportedError).\n"
    "\n"
    "Raises TypeError for other objects, ValueError for a device that does not exist and for a negative\n"
    "size. Safe from every thread. Driver: cuMemPoolCreate.");

/* Reads the bound of the pool; no limit by default. */
static int
read_max_size(mm_state *state, PyObject *options, size_t *max_size)
{
    enum { MAX_SIZE, IPC, COUNT };
    static const char *const names[] = {"max_size", "ipc_enabled"};
    PyObject *values[COUNT];
    bool ipc = false;
    int rc;

    *max_size = 0;
    if (options == NULL || options == Py_None) {
        return 0;
    }
    if (mm_read_options(options, names, COUNT, values) < 0) {
        return -1;
    }
    rc = values[MAX_SIZE] ? mm_read_size(values[MAX_SIZE], names[MAX_SIZE], max_size) : 0;
    if (rc == 0 && values[IPC] != NULL) {
        rc = mm_read_flag(state, values[IPC], names[IPC], &ipc);
    }
    if (ipc) {
        PyErr_SetString(state->ipc_error,
                        "ipc_enabled=True: these pools cannot be shared between processes");
        rc = -1;
    }
    Py_XDECREF(values[MAX_SIZE]);
    Py_XDECREF(values[IPC]);
    return rc;
}

static PyObject *
device_resource_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static mm_signature signature = {.doc = device_resource_doc};
    enum { DEVICE, OPTIONS, ARGC };
    mm_state *state = mm_type_state(type);
    PyObject *argv[ARGC];
    size_t max_size;
    int device;

    if (mm_signature_args_new(&signature, args, kwargs, argv) < 0
        || mm_read_device(state, argv[DEVICE], &device) < 0
        || read_max_size(state, argv[OPTIONS], &max_size) < 0) {
        return NULL;
    }
    return mm_resource_new(type, true, false, mm_location(CU_MEM_LOCATION_TYPE_DEVICE, device),
                           max_size);
}

static PyObject *
device_resource_get_device_id(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(mm_resource_of(op)->location.id);
}

static PyObject *
device_resource_get_max_size(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(mm_resource_of(op)->max_size);
}

static PyObject *
device_resource_repr(PyObject *op)
{
    const mm_resource *r = mm_resource_of(op);

    return r->max_size == 0
               ? PyUnicode_FromFormat("DeviceMemoryResource(Device(%d))", r->location.id)
               : PyUnicode_FromFormat("DeviceMemoryResource(Device(%d), {'max_size': %zu})",
                                      r->location.id, r->max_size);
}

static PyGetSetDef device_resource_getset[] = {
    {"is_host_accessible", mm_resource_get_false, NULL, "False: only devices can use it.", NULL},
    {"is_device_accessible", mm_resource_get_true, NULL, "True: its device can use the memory.",
     NULL},
    {"is_managed", mm_resource_get_false, NULL, "False: the memory does not migrate.", NULL},
    {"supports_advice", mm_resource_get_false, NULL, "False: advice is for managed memory only.",
     NULL},
    {"device_id", device_resource_get_device_id, NULL, "The ordinal of the device.", NULL},
    {"max_size", device_resource_get_max_size, NULL,
     "The max_size of the options in bytes, before the driver rounds it; 0 for no limit. Driver: none.",
     NULL},
    MM_RESOURCE_GETSET,
    {"peer_accessible_by", mm_peers_get, mm_peers_set,
     "The other devices that may use the pool's memory: a live set of Devices.\n\n"
     "Assigning an iterable of devices and ordinals applies the difference in one driver call.\n"
     "Driver: cuMemPoolGetAccess, cuMemPoolSetAccess.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot device_resource_slots[] = {
    {Py_tp_doc, (void *)device_resource_doc},
    {Py_tp_new, device_resource_new},
    {Py_tp_traverse, mm_traverse_type},
    {Py_tp_dealloc, mm_resource_dealloc},
    {Py_tp_repr, device_resource_repr},
    {Py_tp_methods, mm_resource_methods},
    {Py_tp_members, mm_resource_members},
    {Py_tp_getset, device_resource_getset},
    {0, NULL},
};

static PyType_Spec device_resource_spec = {
    .name = "managedmem.DeviceMemoryResource",
    .basicsize = sizeof(mm_resource),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = device_resource_slots,
};

int
mm_device_resource_init(PyObject *module, mm_state *state)
{
    return mm_add_type(module, &device_resource_spec, &state->device_resource_type);
}
