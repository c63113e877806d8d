/* location_device.c: the type Device: one GPU of this system, by its ordinal. Devices are
 * interned, and each ordinal is below the driver's number of devices. */
#include "foreign_location.h"
#include "leak_warnings.h"
#include "location_object.h"

#include "../memory/nearest_host.h"
#include "../memory/pool_teardown.h"

static int
ordinal_of(PyObject *op)
{
    CUmemLocation location = mm_location_of(op);

    assert(location.type == CU_MEM_LOCATION_TYPE_DEVICE);
    return location.id;
}

/* Reads the argument of Device(): an ordinal, or a device of any library. */
static int
read_device_id(mm_state *state, PyObject *value, CUmemLocation *out)
{
    long long ordinal;

    if (PyIndex_Check(value)) {
        return mm_read_index(value, "device_id", PyExc_ValueError, &ordinal) < 0
                   ? -1
                   : mm_device_location(state, ordinal, out);
    }
    return mm_read_location_id(state, value, true, out);
}

PyDoc_STRVAR(
    device_doc,
    "Device(device_id=None)\n--\n\n"
    "A GPU as a location of managed memory.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "device_id : int, or a device of any library, optional\n"
    "    The ordinal, from 0; or a Device, a torch.device, or a device object of CuPy, numba, JAX or\n"
    "    cuda.core. None: the calling thread's current device (0 if it has none).\n"
    "\n"
    "Devices are immutable, hashable and interned: Device(0) is Device(0). Making a Device\n"
    "opens the driver.\n"
    "\n"
    "Raises ValueError for an ordinal that is negative, a bool, or too large (the message gives the\n"
    "number of devices), and for objects that are not devices; DriverNotFoundError without a driver.\n"
    "Safe from every thread.\n"
    "Driver: cuDeviceGetCount, cuCtxGetDevice.");

static PyObject *
device_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static mm_signature signature = {.doc = device_doc};
    mm_state *state = mm_type_state(type);
    CUmemLocation location;
    PyObject *device_id;
    int rc;

    if (mm_signature_args_new(&signature, args, kwargs, &device_id) < 0) {
        return NULL;
    }
    rc = device_id == NULL || device_id == Py_None ? mm_current_device_location(state, &location)
                                                   : read_device_id(state, device_id, &location);
    return rc < 0 ? NULL : mm_location_object_new(state, location);
}

PyDoc_STRVAR(device_reduce_doc,
             "__reduce__($self, /)\n--\n\nPickling and copying return the interned object.");

static PyObject *
device_reduce(PyObject *op, PyObject *Py_UNUSED(none))
{
    return Py_BuildValue("(O(i))", Py_TYPE(op), ordinal_of(op));
}

PyDoc_STRVAR(device_count_doc, "count()\n--\n\n"
                               "The number of devices. Driver: cuDeviceGetCount, called once.");

static PyObject *
device_count(PyObject *type, PyObject *Py_UNUSED(none))
{
    mm_driver *cu = mm_open(mm_type_state((PyTypeObject *)type));

    return cu ? PyLong_FromLong(cu->device_count) : NULL;
}

PyDoc_STRVAR(device_all_doc, "all()\n--\n\n"
                             "All devices, as a tuple in the order of their ordinals.");

static PyObject *
device_all(PyObject *type, PyObject *Py_UNUSED(none))
{
    mm_state *state = mm_type_state((PyTypeObject *)type);
    mm_driver *cu = mm_open(state);
    PyObject *all = cu ? PyTuple_New(cu->device_count) : NULL;

    for (int i = 0; all != NULL && i < cu->device_count; i++) {
        PyObject *device =
            mm_location_object_new(state, mm_location(CU_MEM_LOCATION_TYPE_DEVICE, i));
        if (mm_set_item(all, i, device) < 0) {
            Py_CLEAR(all);
        }
    }
    return all;
}

/* Runs an action that may block, without the GIL. */
static PyObject *
run_on_device(PyObject *op, int (*action)(mm_driver *, int, mm_status *))
{
    mm_state *state = mm_type_state(Py_TYPE(op));
    mm_driver *cu = mm_open(state);
    mm_status st;
    int rc;

    if (cu == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = action(cu, ordinal_of(op), &st);
    Py_END_ALLOW_THREADS
    mm_report_leaks();
    return mm_none_or_raise(state, rc, &st);
}

PyDoc_STRVAR(device_set_current_doc,
             "set_current($self, /)\n--\n\n"
             "Make this device the calling thread's current one, by its primary context.\n"
             "\n"
             "Driver: cuDevicePrimaryCtxRetain, cuCtxSetCurrent.");

static PyObject *
device_set_current(PyObject *op, PyObject *Py_UNUSED(none))
{
    return run_on_device(op, mm_set_current_device);
}

static int
synchronize_and_free(mm_driver *cu, int device, mm_status *st)
{
    int rc = mm_device_synchronize(cu, device, st);

    if (rc == 0) {
        mm_deferred_frees_attempt(
            cu, &(mm_free_conditions){.pools = true, .idle = true, .device = device});
    }
    return rc;
}

PyDoc_STRVAR(device_sync_doc,
             "sync($self, /)\n--\n\n"
             "Wait for all work of this device.\n"
             "\n"
             "Releases the GIL. Driver: cuCtxSynchronize on the primary context.");

static PyObject *
device_sync(PyObject *op, PyObject *Py_UNUSED(none))
{
    return run_on_device(op, synchronize_and_free);
}

static PyObject *
device_get_id(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(ordinal_of(op));
}

static int
check_query(mm_state *state, const char *function, CUresult code)
{
    mm_status st;

    return code == CUDA_SUCCESS
               ? 0
               : mm_raise_failure(state, mm_fail_call(&st, function, (int)code), &st);
}

static PyObject *
device_get_name(PyObject *op, void *Py_UNUSED(closure))
{
    mm_state *state = mm_type_state(Py_TYPE(op));
    mm_driver *cu = mm_open(state);
    char name[256] = "";

    if (cu == NULL
        || check_query(state, "cuDeviceGetName",
                       cu->DeviceGetName(name, sizeof name, ordinal_of(op)))
               < 0) {
        return NULL;
    }
    return PyUnicode_FromString(name);
}

static PyObject *
device_get_uuid(PyObject *op, void *Py_UNUSED(closure))
{
    mm_state *state = mm_type_state(Py_TYPE(op));
    mm_driver *cu = mm_open(state);
    char text[37];
    CUuuid uuid;
    size_t used = 0;

    if (cu == NULL
        || check_query(state, "cuDeviceGetUuid", cu->DeviceGetUuid(&uuid, ordinal_of(op))) < 0) {
        return NULL;
    }
    for (size_t i = 0; i < sizeof uuid.bytes; i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10) {
            text[used++] = '-';
        }
        text[used++] = "0123456789abcdef"[(unsigned char)uuid.bytes[i] >> 4];
        text[used++] = "0123456789abcdef"[uuid.bytes[i] & 15];
    }
    assert(used == sizeof text - 1);
    return PyUnicode_FromStringAndSize(text, (Py_ssize_t)used);
}

static PyObject *
device_get_memory_info(PyObject *op, void *Py_UNUSED(closure))
{
    mm_state *state = mm_type_state(Py_TYPE(op));
    mm_driver *cu = mm_open(state);
    size_t free_bytes = 0, total = 0;
    PyObject *fields[2];
    mm_status st;
    int rc;

    if (cu == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_device_memory(cu, ordinal_of(op), &free_bytes, &total, &st);
    Py_END_ALLOW_THREADS
    if (rc < 0) {
        return mm_raise(state, &st);
    }
    fields[0] = PyLong_FromSize_t(free_bytes);
    fields[1] = PyLong_FromSize_t(total);
    return mm_record_new(state->memory_info_type, fields, 2);
}

/* Queries the device attribute of a property. The closure of the property is its number. */
static int
query_attribute(PyObject *op, void *closure, int *value)
{
    mm_state *state = mm_type_state(Py_TYPE(op));
    mm_driver *cu = mm_open(state);
    CUdevice_attribute attribute = (CUdevice_attribute)(intptr_t)closure;

    if (cu == NULL) {
        return -1;
    }
    return check_query(state, "cuDeviceGetAttribute",
                       cu->DeviceGetAttribute(value, attribute, ordinal_of(op)));
}

static PyObject *
device_get_flag(PyObject *op, void *closure)
{
    int value;

    return query_attribute(op, closure, &value) < 0 ? NULL : PyBool_FromLong(value);
}

static PyObject *
device_get_number(PyObject *op, void *closure)
{
    int value;

    return query_attribute(op, closure, &value) < 0 ? NULL : PyLong_FromLong(value);
}

static PyObject *
device_get_nearest_host(PyObject *op, void *Py_UNUSED(closure))
{
    mm_state *state = mm_type_state(Py_TYPE(op));
    mm_driver *cu = mm_open(state);
    CUmemLocation host;
    mm_status st;

    if (cu == NULL) {
        return NULL;
    }
    if (mm_nearest_host(cu, ordinal_of(op), &host, &st) < 0) {
        return mm_raise(state, &st);
    }
    return mm_location_object_new(state, host);
}

static PyMethodDef device_methods[] = {
    {"count", device_count, METH_NOARGS | METH_CLASS, device_count_doc},
    {"all", device_all, METH_NOARGS | METH_CLASS, device_all_doc},
    {"set_current", device_set_current, METH_NOARGS, device_set_current_doc},
    {"sync", device_sync, METH_NOARGS, device_sync_doc},
    {"__reduce__", device_reduce, METH_NOARGS, device_reduce_doc},
    {NULL, NULL, 0, NULL},
};

#define FLAG(name, attribute, doc) \
    {name, device_get_flag, NULL, doc, (void *)(intptr_t)CU_DEVICE_ATTRIBUTE_##attribute}

static PyGetSetDef device_getset[] = {
    {"device_id", device_get_id, NULL, "The ordinal as an int.", NULL},
    {"name", device_get_name, NULL, "The device's name. Driver: cuDeviceGetName.", NULL},
    {"uuid", device_get_uuid, NULL,
     "The device's UUID as a str of 36 characters. Driver: cuDeviceGetUuid.", NULL},
    {"memory_info", device_get_memory_info, NULL,
     "Free and total bytes of the device's memory, as MemoryInfo(free, total).\n\n"
     "An integrated device shares the system's memory. The driver does not count memory that\n"
     "Linux can reclaim as free, so free is at least MemAvailable there. Driver: cuMemGetInfo.",
     NULL},
    FLAG("integrated", INTEGRATED,
         "True if the device is part of the processor and has no memory of its own. Prefetch,\n"
         "read_mostly and discard are accepted there, and do nothing."),
    FLAG("managed_memory", MANAGED_MEMORY, "True if the device supports managed memory."),
    FLAG("concurrent_managed_access", CONCURRENT_MANAGED_ACCESS,
         "True if host and device can use managed memory at the same time. Without it there is\n"
         "no prefetch, and a host access while the device works ends the process."),
    FLAG("pageable_memory_access", PAGEABLE_MEMORY_ACCESS,
         "True if the device reaches system memory (malloc, NumPy arrays), by HMM or ATS. Only\n"
         "then can advise and prefetch take system memory. discard takes it only if every device\n"
         "reaches it."),
    FLAG(
        "pageable_memory_access_uses_host_page_tables",
        PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
        "True if the device reaches system memory through the host's page tables (ATS, as on Grace)."),
    FLAG("direct_managed_mem_access_from_host", DIRECT_MANAGED_MEM_ACCESS_FROM_HOST,
         "True if the host reaches managed memory on the device without moving it."),
    FLAG("memory_pools_supported", MEMORY_POOLS_SUPPORTED,
         "True if the device supports the driver's stream-ordered memory pools."),
    {"host_numa_id", device_get_number, NULL,
     "The NUMA node nearest to the device, or -1 on a system without NUMA.",
     (void *)(intptr_t)CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID},
    {"nearest_host", device_get_nearest_host, NULL,
     "Host(numa_id=host_numa_id) if the host has memory on several NUMA nodes, else Host(). The\n"
     "homes of a ManagedWorkingSet are there. Driver: cuDeviceGetAttribute.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot device_slots[] = {
    {Py_tp_doc, (void *)device_doc},
    {Py_tp_new, device_new},
    {Py_tp_traverse, mm_traverse_type},
    {Py_tp_dealloc, mm_dealloc_value},
    {Py_tp_repr, mm_location_repr},
    {Py_tp_methods, device_methods},
    {Py_tp_getset, device_getset},
    {Py_tp_members, mm_location_members},
    {0, NULL},
};

static PyStructSequence_Field memory_info_fields[] = {
    {"free", "bytes that can still be allocated"},
    {"total", "bytes of the device"},
    {NULL, NULL},
};

static PyStructSequence_Desc memory_info_desc = {"managedmem.typing.MemoryInfo",
                                                 "Free and total bytes of a device's memory.",
                                                 memory_info_fields, 2};

int
mm_device_init(PyObject *module, mm_state *state)
{
    state->memory_info_type = PyStructSequence_NewType(&memory_info_desc);
    state->devices = PyDict_New();
    if (state->memory_info_type == NULL || state->devices == NULL
        || PyModule_AddType(module, state->memory_info_type) < 0) {
        return -1;
    }
    return mm_add_final_type(module, "managedmem.Device", sizeof(mm_location_object), 0,
                             device_slots, &state->device_type);
}
