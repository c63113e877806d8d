/* oversubscription.c: calls managedmem/_oversubscription.py in the rare case that an allocation,
 * or the memory that a device is to hold, exceeds the memory of devices. */
#include "oversubscription.h"

#include "errors.h"
#include "foreign_resource.h"
#include "module_functions.h"
#include "state.h"

/* Calls a function of that file. Steals the reference to the arguments, which may be NULL with an
 * exception. Returns a new reference, to None while the interpreter ends; NULL on failure. */
static PyObject *
call_oversubscription(const char *name, PyObject *arguments)
{
    PyObject *module = NULL, *function = NULL, *result = NULL;

    MM_ASSERT_LEFT();
    if (arguments != NULL && mm_imports_have_ended()) {
        result = Py_NewRef(Py_None);
    } else if (arguments != NULL) {
        module = PyImport_ImportModule("managedmem._oversubscription");
    }
    if (module != NULL) {
        function = PyObject_GetAttrString(module, name);
    }
    if (function != NULL) {
        result = PyObject_CallObject(function, arguments);
    }
    Py_XDECREF(function);
    Py_XDECREF(module);
    Py_XDECREF(arguments);
    return result;
}

/* Reading the host's free memory takes longer than an allocation. So it is read again only after
 * half of the memory that was left is allocated; if none was left, at each allocation. */
int
mm_warn_of_bytes(size_t bytes, size_t living)
{
    static atomic_size_t enough; /* the sum of both, up to which nothing is read */
    PyObject *left;
    size_t most = 0;

    if (bytes <= SIZE_MAX - living && bytes + living <= atomic_load(&enough)) {
        return 0;
    }
    left = call_oversubscription(
        "warn_of_allocation",
        Py_BuildValue("(KK)", (unsigned long long)bytes, (unsigned long long)living));
    if (left == NULL) {
        return -1;
    }
    if (left != Py_None && (most = PyLong_AsSize_t(left)) > 0 && !PyErr_Occurred()) {
        atomic_store(&enough, bytes + living + most / 2);
    }
    Py_DECREF(left);
    return PyErr_Occurred() ? -1 : 0;
}

static int
warn_of_list(PyObject *places)
{
    PyObject *result =
        call_oversubscription("warn_of_places", places ? Py_BuildValue("(N)", places) : NULL);

    Py_XDECREF(result);
    return result != NULL ? 0 : -1;
}

static PyObject *
describe_place(CUdeviceptr start, size_t bytes, int device)
{
    return Py_BuildValue("(KKi)", (unsigned long long)start, (unsigned long long)bytes, device);
}

int
mm_warn_of_large_place(size_t bytes, CUmemLocation location)
{
    return location.type == CU_MEM_LOCATION_TYPE_DEVICE
               ? warn_of_list(Py_BuildValue("[N]", describe_place(0, bytes, location.id)))
               : 0;
}

MM_COLD static int
warn_of_large_places(const mm_transfer *transfers, size_t count)
{
    PyObject *list = PyList_New(0);

    for (size_t i = 0; list != NULL && i < count; i++) {
        const mm_transfer *t = &transfers[i];
        if (t->location.type == CU_MEM_LOCATION_TYPE_DEVICE
            && mm_append_item(list, describe_place(t->range.start, t->range.size, t->location.id))
                   < 0) {
            Py_CLEAR(list);
        }
    }
    return warn_of_list(list);
}

int
mm_warn_of_places(const mm_transfer *transfers, size_t count)
{
    size_t bytes = 0;

    for (size_t i = 0; i < count; i++) {
        bytes += transfers[i].range.size;
    }
    return mm_may_not_fit(bytes) ? warn_of_large_places(transfers, count) : 0;
}

const char mm_device_memory_totals_doc[] =
    "_device_memory()\n--\n\n"
    "The bytes of each device in all, as a tuple. Opens the driver if needed.";

PyObject *
mm_device_memory_totals(PyObject *module, PyObject *Py_UNUSED(none))
{
    mm_driver *cu = mm_open(mm_module_state(module));
    PyObject *totals = cu ? PyTuple_New(cu->device_count) : NULL;

    for (int i = 0; totals != NULL && i < cu->device_count; i++) {
        if (mm_set_item(totals, i, PyLong_FromSize_t(cu->memory[i])) < 0) {
            Py_CLEAR(totals);
        }
    }
    return totals;
}
