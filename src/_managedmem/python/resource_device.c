/* resource_device.c: the type DeviceMemoryResource: a pool of a device's own memory. */
#include "foreign_location.h"
#include "resource.h"

static PyObject *
device_resource_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"device"};
    static const mm_parameters parameters = {"DeviceMemoryResource", names, 1, 1, 1};
    PyObject *given[1];
    int device;

    if (mm_args_new(&parameters, args, kwargs, given) < 0
        || mm_read_device(mm_type_state(type), given[0], &device) < 0) {
        return NULL;
    }
    return mm_resource_new(type, true, false, mm_location(CU_MEM_LOCATION_TYPE_DEVICE, device));
}

static PyObject *
device_resource_get_true(PyObject *Py_UNUSED(op), void *Py_UNUSED(closure))
{
    Py_RETURN_TRUE;
}

static PyObject *
device_resource_get_false(PyObject *Py_UNUSED(op), void *Py_UNUSED(closure))
{
    Py_RETURN_FALSE;
}

static PyObject *
device_resource_get_device_id(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(mm_resource_of(op)->where.id);
}

static PyObject *
device_resource_repr(PyObject *op)
{
    return PyUnicode_FromFormat("DeviceMemoryResource(Device(%d))", mm_resource_of(op)->where.id);
}

PyDoc_STRVAR(
    device_resource_doc,
    "DeviceMemoryResource(device)\n"
    "--\n"
    "\n"
    "Allocates plain memory of a device, from a driver pool of its own.\n"
    "\n"
    "device is a Device, of another library too, or an ordinal. The buffers do not migrate: prefetch,\n"
    "discard and advice raise ValueError, and the host cannot read them but by copy_to(). Allocating\n"
    "and freeing follow the order of a stream; where none is named, here and in copies and fills of\n"
    "such a buffer, that is the default stream of this device, whichever is current. Other devices\n"
    "get at the memory once they are in peer_accessible_by. The pool keeps what is freed until trim(),\n"
    "or until attributes.release_threshold is lowered.\n"
    "\n"
    "Raises TypeError for what is no device, ValueError for one that is not there. Safe from every\n"
    "thread. Driver: cuMemPoolCreate.");

static PyGetSetDef device_resource_getset[] = {
    {"is_host_accessible", device_resource_get_false, NULL, "False: only devices can use it.",
     NULL},
    {"is_device_accessible", device_resource_get_true, NULL,
     "True: its device can use the memory.", NULL},
    {"is_managed", device_resource_get_false, NULL, "False: the memory does not migrate.", NULL},
    {"supports_advice", device_resource_get_false, NULL,
     "False: advice is for managed memory only.", NULL},
    {"device_id", device_resource_get_device_id, NULL, "The ordinal of the device.", NULL},
    {"attributes", mm_resource_get_attributes, NULL, mm_resource_attributes_doc, NULL},
    {"is_closed", mm_resource_get_is_closed, NULL, mm_resource_is_closed_doc, NULL},
    {"handle", mm_resource_get_handle, NULL, mm_resource_handle_doc, NULL},
    {"is_handle_owned", mm_resource_get_is_handle_owned, NULL, mm_resource_is_handle_owned_doc,
     NULL},
    {"is_ipc_enabled", mm_resource_get_false, NULL, mm_resource_is_ipc_enabled_doc, NULL},
    {"is_mapped", mm_resource_get_false, NULL, mm_resource_is_mapped_doc, NULL},
    {"uuid", mm_resource_get_none, NULL, mm_resource_uuid_doc, NULL},
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
